"""Samplers and the processors that restrict their choice of tokens.

Both are frozen, hashable values that are passed to jitted functions as static arguments. Equal
values share a compiled program. All arithmetic is in float32.

A processor maps logits [..., V] to logits [..., V], and sets the logits of excluded tokens to -inf.
All processors except `Typical` keep the best token. Ties go to the lower ID. `Sample` applies its
processors from left to right, so `Sample(Temperature(0.8), TopP(0.95))` truncates the distribution
that the temperature has sharpened.

The largest logit in a row must be finite. If a row contains NaN, +inf, or only -inf, the call
raises ValueError. If the logits are traced, the token for this row is -1, whose embedding is NaN.

Random numbers are always generated with Threefry. With other implementations, the draw for one key
may depend on the other keys under a `vmap` over keys.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import check_count, check_key, has_finite_maximum, largest
from transformer_jax.models import ops
from transformer_jax.tracing import concrete_value
from transformer_jax.values import value_class

_THREEFRY = "threefry2x32"

_ROUNDING = 2.0**-22
"""Bound on the relative rounding error of a float32 sum."""


class Processor(Protocol):
    """Hashable function that excludes tokens by setting their logits to -inf."""

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        ...


class Sampler(Protocol):
    """Hashable function that chooses a token for every row.

    Speculative decoding also requires a method `distribution(logits) -> f32[..., V]`. It returns
    logits such that the token is drawn from their softmax.
    """

    def __call__(
        self,
        key: jax.Array,
        logits: jax.Array,  # [..., V]
    ) -> jax.Array:  # i32[...]
        ...


@dataclass(frozen=True)
class Temperature:
    """Scale the logits to (x - max x) / t.

    Attributes:
        t: temperature, finite and at least 0. A value below 1 sharpens the distribution, a value
            above 1 flattens it, and 0 keeps only the best token.

    Raises:
        ValueError: If t is not a number in that range.
    """

    t: float

    def __post_init__(self) -> None:
        _check_between("t", self.t, 0.0, math.inf)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _finite_rows(logits)
        top = jnp.max(x, axis=-1, keepdims=True)
        if self.t == 0:
            return _keep_best(x, top, 1)
        # t = m * 2^e, with m from 1/2 to 1. Scaling by powers of two is exact, so divide only by m.
        # A device may flush numbers below 2^-126 to zero, such as the inverse of a large t. Beyond
        # these bounds on e, either all logits are equal, or all except the best are excluded.
        m, e = math.frexp(self.t)
        e = min(max(e, -200), 180)
        if e > 0:  # scale first, because a difference of twice the largest float32 would overflow
            first = 2.0 ** -min(e, 64)
            return (x * first - top * first) * 2.0 ** min(0, 64 - e) / m
        difference = (x - top) * 2.0 ** min(-e, 100)
        if e < -40:  # differences that a subtraction would lose still matter
            # x * 2^100, even for subnormal numbers, which a device may flush to zero
            bits = jax.lax.bitcast_convert_type(x, jnp.int32)
            small = (bits & 0x7FFFFF).astype(jnp.float32) * 2.0 ** (100 - 149)
            normal = (bits & 0x7F800000) != 0
            large = jnp.where(normal, x * 2.0**100, jnp.where(bits < 0, -small, small))
            best = jnp.max(large, axis=-1, keepdims=True)
            near = (jnp.abs(x) < 1) & (jnp.abs(top) < 1)
            difference = jnp.where(near, (large - best) * 2.0 ** (-100 - e), difference)
        return difference / m


@dataclass(frozen=True)
class TopK:
    """Keep the k best tokens (Fan et al. 2018, section 5.4).

    Attributes:
        k: number of tokens to keep, at least 1. If the vocabulary has fewer tokens, all of them are
            kept.

    Raises:
        ValueError: If k is not an integer of at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        check_count("k", self.k, 1)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _finite_rows(logits)
        k = min(int(self.k), x.shape[-1])
        # Do not use [..., -1:], because XLA would sort all of V on a CPU, which is several times
        # slower for V = 50257.
        return _keep_best(x, jnp.min(jax.lax.top_k(x, k)[0], axis=-1, keepdims=True), k)


@dataclass(frozen=True)
class TopP:
    """Keep the smallest set of best tokens whose probabilities sum to at least p.

    A token is kept if the probabilities of all better tokens sum to less than p, so the token that
    crosses p is kept (Holtzman et al. 2020, section 3.1). A sum that is below p by at most its
    float32 rounding error, one part in 2^22, counts as reaching p: `TopP(0.6)` keeps three of five
    equal tokens.

    Attributes:
        p: probability mass, from 0 (keeps only the best token) to 1 (keeps all tokens).

    Raises:
        ValueError: If p is not a number from 0 to 1.
    """

    p: float

    def __post_init__(self) -> None:
        _check_between("p", self.p, 0.0, 1.0)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _finite_rows(logits)
        if self.p == 1:  # also keeps tokens whose probability underflows in float32
            return x
        return _keep_mass(x, self.p, 1 - self.p)


@value_class(pytree=True)
class RowSampling:
    """Arrays with a temperature and a top-p value for each row of a batch.

    Up to rounding, row b is processed as with `Temperature(temperature[b])` followed by
    `TopP(top_p[b])`. The parameters of `Temperature` and `TopP` are compiled into a program,
    whereas all `RowSampling` values share one program. If every top_p is 1, nothing is sorted.

    Attributes:
        temperature: f32[B], at least 0. A value of 0 keeps only the best token.
        top_p: f32[B], from 0 to 1. A value of 1 keeps all tokens.
        rest: f32[B], 1 - top_p, which is more exact if you compute it in float64. None means 1 -
            top_p plus half a unit in the last place of top_p.
    """

    temperature: jax.Array  # f32[B]
    top_p: jax.Array  # f32[B]
    rest: jax.Array | None = None  # f32[B]

    def __post_init__(self) -> None:
        if self.rest is None and isinstance(self.top_p, jax.Array | np.ndarray):
            object.__setattr__(self, "rest", 1 - jnp.asarray(self.top_p) + 2.0**-25)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [B, V] -> f32[B, V]
        x = _finite_rows(logits)
        top = jnp.max(x, axis=-1, keepdims=True)
        assert self.rest is not None
        t, p, rest = self.temperature[:, None], self.top_p[:, None], self.rest[:, None]
        # As in `Temperature`, scale exactly by powers of two, and divide only by m, from 1/2 to 1.
        m, e = jnp.frexp(jnp.where(t > 0, t, 1.0))
        x = jnp.where(t > 0, jnp.ldexp(x - top, -e) / m, _keep_best(x, top, 1))

        def cut(x: jax.Array) -> jax.Array:
            return jnp.where(p < 1, _keep_mass(x, p, rest), x)

        # Sorting the vocabulary is slow, and is needed only if a row is truncated.
        return jax.lax.cond((p < 1).any(), cut, lambda x: x, x)


@dataclass(frozen=True)
class MinP:
    """Keep the tokens that are at least p times as probable as the best token (Nguyen et al. 2024).

    Attributes:
        p: relative probability, from 0 (keeps all tokens) to 1 (keeps only tokens that are as
            probable as the best).

    Raises:
        ValueError: If p is not a number from 0 to 1.
    """

    p: float

    def __post_init__(self) -> None:
        _check_between("p", self.p, 0.0, 1.0)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _finite_rows(logits)
        # Compare logarithms: probabilities below 1e-38 would underflow in float32.
        least = math.log(self.p) if self.p else -math.inf
        return jnp.where(x - jnp.max(x, axis=-1, keepdims=True) >= least, x, -jnp.inf)


@dataclass(frozen=True)
class Typical:
    """Keep the smallest set of typical tokens whose probabilities sum to at least p.

    Tokens are ordered by |-log q_i - H|, where H = -sum_j q_j log q_j is the entropy (Meister et
    al. 2022). Ties go to the lower ID. The best token is excluded if its -log q is far from H.

    Attributes:
        p: probability mass, from 0 to 1. A value of 1 keeps all tokens.

    Raises:
        ValueError: If p is not a number from 0 to 1.
    """

    p: float

    def __post_init__(self) -> None:
        _check_between("p", self.p, 0.0, 1.0)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _finite_rows(logits)
        if self.p == 1:
            return x
        q = jax.nn.softmax(x, axis=-1)
        below = x - jnp.max(x, axis=-1, keepdims=True)
        # -log q - H, in which the common term log sum exp cancels, as does its rounding error.
        mean = jnp.sum(jnp.where(q > 0, q * below, 0.0), axis=-1, keepdims=True)
        nearness = jnp.where(jnp.isneginf(x), -jnp.inf, -jnp.abs(below - mean))
        order = jnp.argsort(nearness, axis=-1, descending=True)
        kept = _count_to_reach(jnp.take_along_axis(q, order, axis=-1), self.p, 1 - self.p)
        cut = jnp.take_along_axis(nearness, jnp.take_along_axis(order, kept - 1, axis=-1), axis=-1)
        return jnp.where(jnp.isneginf(_keep_best(nearness, cut, kept)), -jnp.inf, x)


@dataclass(frozen=True)
class Greedy:
    """Choose the best token. Ties go to the lowest ID."""

    def __call__(self, key: jax.Array | None, logits: jax.Array) -> jax.Array:
        """Return the best token of each row.

        Args:
            key: not used, so it may be None.
            logits: [..., V].

        Returns:
            The tokens i32[...]. For traced logits, a token is -1 if the largest logit in its row is
            not finite.

        Raises:
            ValueError: If the logits are concrete and the largest logit in a row is not finite.
        """
        x = _as_float32(logits)
        top = largest(x)
        return jnp.where(jnp.isfinite(top), ops.argmax(x, top), -1).astype(jnp.int32)

    def distribution(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        """Return -inf for all tokens except the best, whose probability is thus 1."""
        x = _finite_rows(logits)
        return _keep_best(x, jnp.max(x, axis=-1, keepdims=True), 1)


@dataclass(frozen=True, init=False)
class Sample:
    """Draw a token from softmax(processed logits), as in `Sample(Temperature(0.8), TopP(0.95))`.

    Attributes:
        processors: functions from logits [..., V] to logits, applied from left to right. If there
            are none, tokens are drawn from softmax(logits).

    Raises:
        ValueError: If a processor is not a value that can be called with logits.
    """

    processors: tuple[Processor, ...]

    def __init__(self, *processors: Processor) -> None:
        for processor in processors:
            if not callable(processor) or isinstance(processor, type | Greedy | Sample):
                rule = "must be a value that maps logits to logits, such as Temperature(0.7)"
                raise ValueError(f"processor is {processor!r}: {rule}")
        object.__setattr__(self, "processors", processors)

    def __call__(self, key: jax.Array, logits: jax.Array) -> jax.Array:
        """Draw one token for each row.

        Args:
            key: a single key, which is converted to Threefry.
            logits: [..., V].

        Returns:
            The tokens i32[...]. For traced logits, a token is -1 if the largest logit in its row is
            not finite.

        Raises:
            ValueError: If `key` is not a single key, or if the logits are concrete and the largest
                logit in a row is not finite.
        """
        processed = self.distribution(logits)  # before `key`, to report swapped arguments
        check_key("key", key)
        # Draw first one of about sqrt(V) blocks, whose probability is the sum over its tokens, then
        # a token in this block. Both draws take the argmax of logits plus Gumbel noise. In float32,
        # the tail of the noise is accurate only in JAX's "high" mode, which uses twice as many bits
        # per number, but only for 2 sqrt(V) instead of V numbers.
        x, vocab = processed, processed.shape[-1]
        size = 1 << max(3, math.isqrt(vocab).bit_length())
        blocks = -(-vocab // size)
        lead = [(0, 0)] * (x.ndim - 1)
        x = x - jnp.max(x, axis=-1, keepdims=True)  # if x were large, rounding would absorb noise
        x = jnp.pad(x, [*lead, (0, blocks * size - vocab)], constant_values=-jnp.inf)
        x = x.reshape(*x.shape[:-1], blocks, size)
        shape = (*x.shape[:-2], blocks + size)
        noise = jax.random.gumbel(as_threefry(key), shape, jnp.float32, mode="high")
        # A block in which all tokens are excluded has a log-sum of -inf and is never chosen.
        sums = jax.nn.logsumexp(x, axis=-1)
        block = jnp.argmax(sums + noise[..., :blocks], axis=-1)[..., None]
        x = jnp.take_along_axis(x, block[..., None], axis=-2, mode="clip")[..., 0, :]
        token = block[..., 0] * size + jnp.argmax(x + noise[..., blocks:], axis=-1)
        return jnp.where(has_finite_maximum(processed), token, -1).astype(jnp.int32)

    def distribution(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        """Return the processed logits. Tokens are drawn from their softmax.

        A row whose largest logit is not finite becomes NaN.
        """
        # Check the logits before processing, because a processor may exclude the nonfinite logit.
        raw = processed = _as_float32(logits)
        for processor in self.processors:
            processed = processor(processed)
        finite = has_finite_maximum(raw)[..., None]
        return jnp.where(finite, _as_float32(processed), jnp.nan)


def as_threefry(key: jax.Array) -> jax.Array:  # key[...]
    """Convert keys of any implementation, or raw words u32[..., n], to Threefry keys.

    Threefry keys are returned unchanged. For other keys, the result depends on all of their words.
    """
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if str(jax.random.key_impl(key)) == _THREEFRY:
            return key
        key = jax.random.key_data(key)
    return _threefry_of_words(key)


@jax.jit
def _threefry_of_words(key: jax.Array) -> jax.Array:  # u32[..., n] -> key[...]
    lead, words = key.shape[:-1], key.reshape(-1, key.shape[-1])
    keys = jax.random.wrap_key_data(words[:, :2], impl=_THREEFRY)
    # "rbg" keys have four words, and the result must depend on all of them.
    for i in range(2, words.shape[1]):
        keys = jax.vmap(jax.random.fold_in)(keys, words[:, i])
    return keys.reshape(lead)


def _keep_mass(
    x: jax.Array,  # f32[..., V]
    p: jax.Array | float,  # [..., 1]
    rest: jax.Array | float,  # [..., 1], 1 - p
) -> jax.Array:  # f32[..., V]
    """Keep the smallest set of best tokens with probability mass p."""
    best_first = jnp.sort(x, axis=-1, descending=True)
    kept = _count_to_reach(jnp.exp(best_first - best_first[..., :1]), p, rest)
    return _keep_best(x, jnp.take_along_axis(best_first, kept - 1, axis=-1), kept)


def _count_to_reach(
    weights: jax.Array,  # f32[..., V]
    p: jax.Array | float,  # [..., 1]
    rest: jax.Array | float,  # [..., 1], 1 - p
) -> jax.Array:  # i32[..., 1]
    """Return the number of leading weights, at least 1, that sum to a fraction p of the total.

    If p is above 1/2, the remaining weights are summed instead, because float32 is finer near 0
    than near 1.
    """
    prefix = jnp.cumsum(weights, axis=-1)
    suffix = jax.lax.cumsum(weights, axis=weights.ndim - 1, reverse=True)
    short = jnp.where(
        p <= 0.5,
        prefix[..., :-1] < p * prefix[..., -1:] * (1 - _ROUNDING),
        suffix[..., 1:] > rest * suffix[..., :1] * (1 + _ROUNDING),
    )
    return 1 + jnp.sum(short, axis=-1, keepdims=True)


def _check_between(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, Real) or not low <= value <= min(high, sys.float_info.max):
        span = (
            f"from {low:g} to {high:g}" if math.isfinite(high) else f"finite and at least {low:g}"
        )
        raise ValueError(f"{name} is {value!r}: must be {span}")


def _as_float32(logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
    """Return float32 logits. Raise ValueError if the concrete maximum of a row is not finite."""
    dtype = getattr(logits, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(f"logits is {dtype}: pass a sampler its key first, then logits")
    x = jnp.asarray(logits).astype(jnp.float32)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"logits have shape {x.shape}: must be [..., V] with V at least 1")
    # Constants are checked even inside a `jit`, in which x itself is traced.
    concrete = concrete_value(logits)
    if concrete is not None:
        top = concrete.max(axis=-1)
        if not np.isfinite(top).all():
            row = tuple(int(i) for i in np.argwhere(~np.isfinite(top))[0])
            raise ValueError(f"the largest logit of row {row} is {top[row]}: must be finite")
    return x


def _finite_rows(logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
    """Return float32 logits, with NaN in every row that has no finite maximum.

    Otherwise, a processor might exclude the NaN, and the rest of the row would appear valid.
    """
    x = _as_float32(logits)
    return jnp.where(has_finite_maximum(x)[..., None], x, jnp.nan)


def _keep_best(
    x: jax.Array,  # [..., V]
    cut: jax.Array,  # [..., 1], the n-th best value
    n: jax.Array | int,  # [..., 1]
) -> jax.Array:  # [..., V]
    """Keep the n best values: those above `cut`, and the lowest IDs among those equal to it."""
    above, equal = x > cut, x == cut
    room = n - jnp.sum(above, axis=-1, keepdims=True)
    return jnp.where(above | (equal & (jnp.cumsum(equal, axis=-1) <= room)), x, -jnp.inf)
