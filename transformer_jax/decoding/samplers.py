"""Sample a token from logits: processors exclude tokens, a sampler picks one of the rest.

Both are frozen, hashable values. So a jitted function takes them as static arguments, and equal
ones share its compiled program. All of it is float32.

A processor maps logits [..., V] to logits [..., V], and excludes a token by -inf. The best token
stays, except with `Typical`, which may exclude it. Of equal logits the lower id counts as better.
`Sample` applies its processors from left to right, so `Sample(Temperature(0.8), TopP(0.95))` cuts
what the temperature has already sharpened.

The largest logit of a row must be finite. Where a row holds NaN, +inf, or nothing but -inf, the
call raises ValueError; under a trace the row's token is -1, whose embedding is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import check_count
from transformer_jax.kernels import platform

_SMALLEST = float(np.finfo(np.float32).tiny)


class Processor(Protocol):
    """Exclude tokens by setting their logits to -inf; hashable."""

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        ...


class Sampler(Protocol):
    """Pick a token of every row; hashable.

    It may also have `distribution(logits) -> f32[..., V]`, the logits whose softmax its token is
    drawn from. Speculative decoding needs it.
    """

    def __call__(
        self,
        key: jax.Array,
        logits: jax.Array,  # [..., V]
    ) -> jax.Array:  # i32[...]
        ...


@dataclass(frozen=True)
class Temperature:
    """Scale the logits to (x - max x) / t: t below 1 sharpens, above 1 flattens.

    With t = 0 the best token alone is kept. ValueError unless t is finite and at least 0.
    """

    t: float

    def __post_init__(self) -> None:
        _check_between("t", self.t, 0.0, math.inf)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _as_float32(logits)
        top = jnp.max(x, axis=-1, keepdims=True)
        if self.t == 0:
            return _keep_best(x, top, 1)
        # The maximum becomes 0, so nothing overflows upwards; t and 1 / t stay normal numbers.
        return (x - top) / min(max(float(self.t), _SMALLEST), 1 / _SMALLEST)


@dataclass(frozen=True)
class TopK:
    """Keep the k best tokens, or all where there are fewer (Fan et al. 2018, section 5.4).

    ValueError unless k is an integer of at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        check_count("k", self.k, 1)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _as_float32(logits)
        k = min(int(self.k), x.shape[-1])
        # min, not [..., -1:], with which XLA on CPU sorts all of V: several times slower at 50257
        return _keep_best(x, jnp.min(jax.lax.top_k(x, k)[0], axis=-1, keepdims=True), k)


@dataclass(frozen=True)
class TopP:
    """Keep the fewest best tokens whose probabilities sum to p or more.

    A token stays while those better than it sum to less than p, so the one that crosses p stays
    (Holtzman et al. 2020, section 3.1). ValueError unless p is from 0 to 1.
    """

    p: float

    def __post_init__(self) -> None:
        _check_between("p", self.p, 0.0, 1.0)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _as_float32(logits)
        if self.p == 1:  # a rounded sum may reach 1 before the last token
            return x
        best_first = jnp.sort(x, axis=-1, descending=True)
        sums = jnp.cumsum(jax.nn.softmax(best_first, axis=-1), axis=-1)
        kept = 1 + jnp.sum(sums[..., :-1] < self.p, axis=-1, keepdims=True)
        return _keep_best(x, jnp.take_along_axis(best_first, kept - 1, axis=-1), kept)


@dataclass(frozen=True)
class MinP:
    """Keep the tokens at least p times as probable as the best (Nguyen et al. 2024).

    ValueError unless p is from 0 to 1.
    """

    p: float

    def __post_init__(self) -> None:
        _check_between("p", self.p, 0.0, 1.0)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _as_float32(logits)
        relative = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        return jnp.where(relative >= self.p, x, -jnp.inf)


@dataclass(frozen=True)
class Typical:
    """Keep the fewest tokens whose probabilities sum to p, nearest to the entropy first.

    Tokens are taken in order of |-log q_i - H|, H = -sum_j q_j log q_j; of equals the lower id
    first (Meister et al. 2022). The best token is excluded where its -log q is far from
    H. ValueError unless p is from 0 to 1.
    """

    p: float

    def __post_init__(self) -> None:
        _check_between("p", self.p, 0.0, 1.0)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _as_float32(logits)
        if self.p == 1:
            return x
        log_q = jax.nn.log_softmax(x, axis=-1)
        q = jnp.exp(log_q)
        entropy = -jnp.sum(jnp.where(q > 0, q * log_q, 0.0), axis=-1, keepdims=True)
        nearness = jnp.where(jnp.isneginf(x), -jnp.inf, -jnp.abs(log_q + entropy))
        order = jnp.argsort(nearness, axis=-1, descending=True)
        sums = jnp.cumsum(jnp.take_along_axis(q, order, axis=-1), axis=-1)
        kept = 1 + jnp.sum(sums[..., :-1] < self.p, axis=-1, keepdims=True)
        cut = jnp.take_along_axis(nearness, jnp.take_along_axis(order, kept - 1, axis=-1), axis=-1)
        return jnp.where(jnp.isneginf(_keep_best(nearness, cut, kept)), -jnp.inf, x)


@dataclass(frozen=True)
class Greedy:
    """Pick the best token; the key is not used."""

    def __call__(self, key: jax.Array | None, logits: jax.Array) -> jax.Array:
        x = _as_float32(logits)
        if platform() == "cpu" and x.shape[-1] < 2**24:
            return _first_of_the_best(x)
        return _mark_nonfinite(jnp.argmax(x, axis=-1), x)

    def distribution(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        """Return -inf for all but the best token: the softmax gives it probability 1."""
        x = _as_float32(logits)
        return _keep_best(x, jnp.max(x, axis=-1, keepdims=True), 1)


@dataclass(frozen=True, init=False)
class Sample:
    """Draw a token from softmax(processed logits).

    ValueError where a processor is not a value that is called with logits.
    """

    processors: tuple[Processor, ...]

    def __init__(self, *processors: Processor) -> None:
        for processor in processors:
            if not callable(processor) or isinstance(processor, type):
                raise ValueError(f"processor is {processor!r}: must map logits to logits")
        object.__setattr__(self, "processors", processors)

    def __call__(self, key: jax.Array, logits: jax.Array) -> jax.Array:
        processed = self.distribution(logits)
        return _mark_nonfinite(jax.random.categorical(key, processed, axis=-1), processed)

    def distribution(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        """Return the processed logits, whose softmax a token is drawn from.

        A row whose largest logit is not finite is NaN.
        """
        given = processed = _as_float32(logits)
        for processor in self.processors:
            processed = processor(processed)
        finite = jnp.isfinite(jnp.max(given, axis=-1, keepdims=True))
        return jnp.where(finite, _as_float32(processed), jnp.nan)


def _check_between(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, Real) or not (low <= value <= high and math.isfinite(value)):
        span = f"from {low:g} to {high:g}" if math.isfinite(high) else f"finite, at least {low:g}"
        raise ValueError(f"{name} is {value!r}: must be {span}")


def _as_float32(logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
    """Return the logits in float32; ValueError where the largest of a row is not finite."""
    x = jnp.asarray(logits).astype(jnp.float32)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"logits have shape {x.shape}: must be [..., V] with V at least 1")
    if isinstance(x, jax.core.Tracer):
        return x
    top = np.asarray(jnp.max(x, axis=-1))
    if not np.isfinite(top).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(top))[0])
        raise ValueError(f"the largest logit of row {where} is {top[where]}: must be finite")
    return x


def _first_of_the_best(x: jax.Array) -> jax.Array:  # [..., V] -> i32[...]
    """Return argmax(x), or -1 where the largest logit is not finite, by two reductions.

    XLA's CPU backend takes ten times as long for the one that gives an index: 0.2 ms of 50,000.
    Indices below 2^24 are exact in float32, whose smallest it finds faster than of integers.
    """
    top = _largest(x)
    indices = jax.lax.broadcasted_iota(jnp.float32, x.shape, x.ndim - 1)
    first = jnp.min(jnp.where(x == top[..., None], indices, jnp.inf), axis=-1)
    return jnp.where(jnp.isfinite(top), first, -1).astype(jnp.int32)


def _mark_nonfinite(tokens: jax.Array, logits: jax.Array) -> jax.Array:  # i32[...]
    """Return the tokens, -1 where the largest logit is not finite."""
    return jnp.where(has_finite_maximum(logits), tokens, -1).astype(jnp.int32)


def has_finite_maximum(logits: jax.Array) -> jax.Array:  # [..., V] -> bool[...]
    """Return whether the largest logit is finite; it is not where a logit is NaN."""
    return jnp.isfinite(_largest(logits))


def _largest(logits: jax.Array) -> jax.Array:  # [..., V] -> [...]
    """Return the largest logit, infinity where one is NaN: XLA's maximum may lose a NaN."""
    return jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1)


def _keep_best(
    x: jax.Array,  # [..., V]
    cut: jax.Array,  # [..., 1]: the n-th best value
    n: jax.Array | int,  # [..., 1]
) -> jax.Array:  # [..., V]
    """Keep the n best: those above `cut`, and of those that equal it the lowest ids."""
    above, equal = x > cut, x == cut
    room = n - jnp.sum(above, axis=-1, keepdims=True)
    return jnp.where(above | (equal & (jnp.cumsum(equal, axis=-1) <= room)), x, -jnp.inf)
