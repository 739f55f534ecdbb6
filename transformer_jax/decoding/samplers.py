"""Sample a token from logits: processors exclude tokens, a sampler picks one of the rest.

Both are frozen, hashable values. So a jitted function takes them as static arguments, and equal
ones share its compiled program. All of it is float32.

A processor maps logits [..., V] to logits [..., V], and excludes a token by -inf. The best token
stays, except with `Typical`, which may exclude it. Of equal logits the lower id counts as better.
`Sample` applies its processors from left to right, so `Sample(Temperature(0.8), TopP(0.95))` cuts
what the temperature has already sharpened.

The largest logit of a row must be finite. Where a row holds NaN, +inf, or nothing but -inf, the
call raises ValueError; under a trace the row's token is -1, whose embedding is NaN.

Random numbers are Threefry's, whatever implementation the key is of: with others, under a `vmap`
over keys, what is drawn for a key may depend on the keys beside it.
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
from transformer_jax.tracing import known_value
from transformer_jax.values import value_class

_THREEFRY = "threefry2x32"

_ROUNDING = 2.0**-22
"""The part of a sum in float32 that may be due to its rounding."""


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
    """Scale the logits to (x - max x) / t.

    Attributes:
        t: finite and at least 0: below 1 sharpens, above 1 flattens, 0 keeps the best token alone.

    Raises:
        ValueError: if t is not a number in that range.
    """

    t: float

    def __post_init__(self) -> None:
        _check_between("t", self.t, 0.0, math.inf)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _rows_of(logits)
        top = jnp.max(x, axis=-1, keepdims=True)
        if self.t == 0:
            return _keep_best(x, top, 1)
        # t is m 2^e. Powers of two are exact, so only m, from 1/2 to 1, divides: a device may take
        # what is below 2^-126, such as the inverse of a large t, for zero. Beyond these e all
        # logits are equal, or all that differ from the best are excluded.
        m, e = math.frexp(self.t)
        e = min(max(e, -200), 180)
        if e > 0:  # first, so that what is twice the largest float32 away is not infinitely far
            first = 2.0 ** -min(e, 64)
            return (x * first - top * first) * 2.0 ** min(0, 64 - e) / m
        difference = (x - top) * 2.0 ** min(-e, 100)
        if e < -40:  # then differences count that are too small for a subtraction
            # x 2^100, also of numbers below 2^-126, which a device may take for zero
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
        k: at least 1; where there are fewer tokens, all stay.

    Raises:
        ValueError: if k is not an integer of at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        check_count("k", self.k, 1)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _rows_of(logits)
        k = min(int(self.k), x.shape[-1])
        # min, not [..., -1:], with which XLA on CPU sorts all of V: several times slower at 50257
        return _keep_best(x, jnp.min(jax.lax.top_k(x, k)[0], axis=-1, keepdims=True), k)


@dataclass(frozen=True)
class TopP:
    """Keep the fewest best tokens whose probabilities sum to p or more.

    A token stays while those better than it sum to less than p, so the one that crosses p stays
    (Holtzman et al. 2020, section 3.1). A sum that is below p by no more than its rounding in
    float32, a part in 2^22, reaches p: of five equal tokens `TopP(0.6)` keeps three.

    Attributes:
        p: from 0, which keeps the best token alone, to 1, which keeps all.

    Raises:
        ValueError: if p is not a number from 0 to 1.
    """

    p: float

    def __post_init__(self) -> None:
        _check_between("p", self.p, 0.0, 1.0)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _rows_of(logits)
        if self.p == 1:  # a token whose probability is below float32 stays too
            return x
        return _keep_share(x, self.p, 1 - self.p)


@value_class(pytree=True)
class RowSampling:
    """Give each row of a batch a temperature and a mass of its own, as arrays.

    Row b becomes what `Temperature(temperature[b])` and then `TopP(top_p[b])` make of it, to
    rounding. As values these two are compiled into the program; rows with numbers of their own
    share one. No row is sorted where every top_p is 1.

    Attributes:
        temperature: f32[B], at least 0; 0 keeps the best token alone.
        top_p: f32[B], from 0 to 1, which keeps all tokens.
        rest: f32[B], 1 - top_p, which float32 has more exactly if it is computed in float64. None
            is 1 - top_p and half a unit in the last place of top_p.
    """

    temperature: jax.Array  # f32[B]
    top_p: jax.Array  # f32[B]
    rest: jax.Array | None = None  # f32[B]

    def __post_init__(self) -> None:
        if self.rest is None and isinstance(self.top_p, jax.Array | np.ndarray):
            object.__setattr__(self, "rest", 1 - jnp.asarray(self.top_p) + 2.0**-25)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [B, V] -> f32[B, V]
        x = _rows_of(logits)
        top = jnp.max(x, axis=-1, keepdims=True)
        assert self.rest is not None
        t, p, rest = self.temperature[:, None], self.top_p[:, None], self.rest[:, None]
        # As in `Temperature`: powers of two are exact, and only m, from 1/2 to 1, divides.
        m, e = jnp.frexp(jnp.where(t > 0, t, 1.0))
        x = jnp.where(t > 0, jnp.ldexp(x - top, -e) / m, _keep_best(x, top, 1))

        def cut(x: jax.Array) -> jax.Array:
            return jnp.where(p < 1, _keep_share(x, p, rest), x)

        # A sort of the vocabulary is slow, and needed only if a row is cut.
        return jax.lax.cond((p < 1).any(), cut, lambda x: x, x)


@dataclass(frozen=True)
class MinP:
    """Keep the tokens at least p times as probable as the best (Nguyen et al. 2024).

    Attributes:
        p: from 0, which keeps all tokens, to 1, which keeps those as probable as the best.

    Raises:
        ValueError: if p is not a number from 0 to 1.
    """

    p: float

    def __post_init__(self) -> None:
        _check_between("p", self.p, 0.0, 1.0)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _rows_of(logits)
        # Compared in logs: probabilities below 1e-38 would be 0 in float32.
        least = math.log(self.p) if self.p else -math.inf
        return jnp.where(x - jnp.max(x, axis=-1, keepdims=True) >= least, x, -jnp.inf)


@dataclass(frozen=True)
class Typical:
    """Keep the fewest tokens whose probabilities sum to p, nearest to the entropy first.

    Tokens are taken in order of |-log q_i - H|, H = -sum_j q_j log q_j; of equals the lower id
    first (Meister et al. 2022). The best token is excluded where its -log q is far from H.

    Attributes:
        p: from 0 to 1, which keeps all.

    Raises:
        ValueError: if p is not a number from 0 to 1.
    """

    p: float

    def __post_init__(self) -> None:
        _check_between("p", self.p, 0.0, 1.0)

    def __call__(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        x = _rows_of(logits)
        if self.p == 1:
            return x
        q = jax.nn.softmax(x, axis=-1)
        below = x - jnp.max(x, axis=-1, keepdims=True)
        # -log q - H without their log of a sum, whose rounding is that of log V
        mean = jnp.sum(jnp.where(q > 0, q * below, 0.0), axis=-1, keepdims=True)
        nearness = jnp.where(jnp.isneginf(x), -jnp.inf, -jnp.abs(below - mean))
        order = jnp.argsort(nearness, axis=-1, descending=True)
        kept = _count_to_reach(jnp.take_along_axis(q, order, axis=-1), self.p, 1 - self.p)
        cut = jnp.take_along_axis(nearness, jnp.take_along_axis(order, kept - 1, axis=-1), axis=-1)
        return jnp.where(jnp.isneginf(_keep_best(nearness, cut, kept)), -jnp.inf, x)


@dataclass(frozen=True)
class Greedy:
    """Pick the best token; of equal ones that of the lowest id."""

    def __call__(self, key: jax.Array | None, logits: jax.Array) -> jax.Array:
        """Return the best token of each row.

        Args:
            key: not used; may be None.
            logits: [..., V].

        Returns:
            i32[...]; under a trace -1 in a row whose largest logit is not finite.

        Raises:
            ValueError: if the largest logit of a row is known and not finite.
        """
        x = _as_float32(logits)
        top = largest(x)
        return jnp.where(jnp.isfinite(top), ops.argmax(x, top), -1).astype(jnp.int32)

    def distribution(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        """Return -inf for all but the best token: the softmax gives it probability 1."""
        x = _rows_of(logits)
        return _keep_best(x, jnp.max(x, axis=-1, keepdims=True), 1)


@dataclass(frozen=True, init=False)
class Sample:
    """Draw a token from softmax(processed logits): `Sample(Temperature(0.8), TopP(0.95))`.

    Attributes:
        processors: map logits [..., V] to logits, from left to right; none draws from the logits.

    Raises:
        ValueError: if one is not a value that is called with logits.
    """

    processors: tuple[Processor, ...]

    def __init__(self, *processors: Processor) -> None:
        for processor in processors:
            if not callable(processor) or isinstance(processor, type | Greedy | Sample):
                rule = "must be a value that maps logits to logits, such as Temperature(0.7)"
                raise ValueError(f"processor is {processor!r}: {rule}")
        object.__setattr__(self, "processors", processors)

    def __call__(self, key: jax.Array, logits: jax.Array) -> jax.Array:
        """Draw one token of each row.

        Args:
            key: a single key; its numbers are Threefry's.
            logits: [..., V].

        Returns:
            i32[...]; under a trace -1 in a row whose largest logit is not finite.

        Raises:
            ValueError: if `key` is not a single key, or the largest logit of a row is known and not
                finite.
        """
        processed = self.distribution(logits)  # names swapped arguments before `key` is refused
        check_key("key", key)
        token = _draw_token(as_threefry(key), processed)
        return jnp.where(has_finite_maximum(processed), token, -1).astype(jnp.int32)

    def distribution(self, logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
        """Return the processed logits, whose softmax a token is drawn from.

        A row whose largest logit is not finite is NaN.
        """
        # Looked for before the processors, which may exclude what is wrong.
        given = processed = _as_float32(logits)
        for processor in self.processors:
            processed = processor(processed)
        finite = has_finite_maximum(given)[..., None]
        return jnp.where(finite, _as_float32(processed), jnp.nan)


def as_threefry(key: jax.Array) -> jax.Array:  # key[...]
    """Return keys of any implementation, or their raw words u32[..., n], as Threefry's.

    Those of Threefry are themselves. Each of the others depends on all of its own words alone.
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
    # Keys of "rbg" have four words, and each of them must count.
    for i in range(2, words.shape[1]):
        keys = jax.vmap(jax.random.fold_in)(keys, words[:, i])
    return keys.reshape(lead)


def _draw_token(key: jax.Array, x: jax.Array) -> jax.Array:  # f32[..., V] -> i32[...]
    """Draw from softmax(x): one of about sqrt(V) blocks by its sum, then one of its tokens.

    Both by the largest of logits and Gumbel noise. In float32 that has a tail only in JAX's mode
    "high", of twice the random bits; of 2 sqrt(V) numbers these cost less than one each of V.
    """
    vocab = x.shape[-1]
    size = 1 << max(3, math.isqrt(vocab).bit_length())
    blocks = -(-vocab // size)
    lead = [(0, 0)] * (x.ndim - 1)
    x = x - jnp.max(x, axis=-1, keepdims=True)  # noise would be lost beside a large number
    x = jnp.pad(x, [*lead, (0, blocks * size - vocab)], constant_values=-jnp.inf)
    x = x.reshape(*x.shape[:-1], blocks, size)
    shape = (*x.shape[:-2], blocks + size)
    noise = jax.random.gumbel(key, shape, jnp.float32, mode="high")
    # A block of excluded tokens has a sum of -inf, which no noise can make the largest.
    sums = jax.nn.logsumexp(x, axis=-1)
    block = jnp.argmax(sums + noise[..., :blocks], axis=-1)[..., None]
    x = jnp.take_along_axis(x, block[..., None], axis=-2, mode="clip")[..., 0, :]
    token = jnp.argmax(x + noise[..., blocks:], axis=-1)
    return block[..., 0] * size + token


def _keep_share(
    x: jax.Array,  # f32[..., V]
    p: jax.Array | float,  # [..., 1]
    rest: jax.Array | float,  # [..., 1], 1 - p
) -> jax.Array:  # f32[..., V]
    """Keep the fewest best tokens that have the share p of all probability."""
    best_first = jnp.sort(x, axis=-1, descending=True)
    kept = _count_to_reach(jnp.exp(best_first - best_first[..., :1]), p, rest)
    return _keep_best(x, jnp.take_along_axis(best_first, kept - 1, axis=-1), kept)


def _count_to_reach(
    weights: jax.Array,  # f32[..., V]
    p: jax.Array | float,  # [..., 1]
    rest: jax.Array | float,  # [..., 1], 1 - p
) -> jax.Array:  # i32[..., 1]
    """Return how many weights, from the first on, sum to the share p of all; at least 1.

    Above 1/2 what is left is summed, from the last on: float32 has few numbers near 1, many near 0.
    """
    before = jnp.cumsum(weights, axis=-1)
    left = jax.lax.cumsum(weights, axis=weights.ndim - 1, reverse=True)
    short = jnp.where(
        p <= 0.5,
        before[..., :-1] < p * before[..., -1:] * (1 - _ROUNDING),
        left[..., 1:] > rest * left[..., :1] * (1 + _ROUNDING),
    )
    return 1 + jnp.sum(short, axis=-1, keepdims=True)


def _check_between(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, Real) or not low <= value <= min(high, sys.float_info.max):
        span = f"from {low:g} to {high:g}" if math.isfinite(high) else f"finite, at least {low:g}"
        raise ValueError(f"{name} is {value!r}: must be {span}")


def _as_float32(logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
    """Return the logits in float32; ValueError where the largest of a row is not finite."""
    dtype = getattr(logits, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(f"logits is {dtype}: a sampler is called with (key, logits)")
    x = jnp.asarray(logits).astype(jnp.float32)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"logits have shape {x.shape}: must be [..., V] with V at least 1")
    # Known logits are checked even inside a `jit`, where they are constants.
    known = known_value(logits)  # asked first: inside a trace x is traced
    if known is not None:
        top = known.max(axis=-1)
        if not np.isfinite(top).all():
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(top))[0])
            raise ValueError(f"the largest logit of row {where} is {top[where]}: must be finite")
    return x


def _rows_of(logits: jax.Array) -> jax.Array:  # [..., V] -> f32[..., V]
    """Return what a processor reads: float32, all NaN in a row without a finite maximum.

    A cut of such a row would otherwise exclude the NaN, and the rest would look like logits.
    """
    x = _as_float32(logits)
    return jnp.where(has_finite_maximum(x)[..., None], x, jnp.nan)


def _keep_best(
    x: jax.Array,  # [..., V]
    cut: jax.Array,  # [..., 1]: the n-th best value
    n: jax.Array | int,  # [..., 1]
) -> jax.Array:  # [..., V]
    """Keep the n best: those above `cut`, and of those that equal it the lowest ids."""
    above, equal = x > cut, x == cut
    room = n - jnp.sum(above, axis=-1, keepdims=True)
    return jnp.where(above | (equal & (jnp.cumsum(equal, axis=-1) <= room)), x, -jnp.inf)
