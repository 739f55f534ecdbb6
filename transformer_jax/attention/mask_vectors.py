"""A mask as a fused kernel can evaluate it: integers per query, integers per key, and a comparison.

    Causal() & Segments(ids)    vectors q: positions, ids    k: positions, ids
                                visible: (k[0] <= q[0]) & (q[1] == k[1]) & (k[0] >= 0)

A `Dense` mask is an integer per pair, of which each has a bit. Every mask is one of these except a
`Predicate` that reads other arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from transformer_jax.masks import (
    And,
    Causal,
    Dense,
    Everything,
    Mask,
    Not,
    Or,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
    look_up,
)

Vectors = tuple[jax.Array, ...]
Comparison = Callable[[Vectors, Vectors], jax.Array]


@dataclass(frozen=True)
class KeyIs:
    """Key vector `index` is not 0."""

    index: int

    def __call__(self, q: Vectors, k: Vectors) -> jax.Array:
        return k[self.index] != 0


@dataclass(frozen=True)
class QueryIs:
    """Query vector `index` is not 0."""

    index: int

    def __call__(self, q: Vectors, k: Vectors) -> jax.Array:
        return q[self.index] != 0


@dataclass(frozen=True)
class Same:
    """Query vector `q` equals key vector `k`."""

    q: int
    k: int

    def __call__(self, q: Vectors, k: Vectors) -> jax.Array:
        return q[self.q] == k[self.k]


@dataclass(frozen=True)
class PairIs:
    """The integer of the pair, given behind the vectors of the keys, has this bit."""

    bit: int

    def __call__(self, q: Vectors, k: Vectors) -> jax.Array:
        return (k[-1] & (1 << self.bit)) != 0


@dataclass(frozen=True)
class Positions:
    """A mask that reads nothing but positions."""

    mask: Causal | Window | Predicate

    def __call__(self, q: Vectors, k: Vectors) -> jax.Array:
        if isinstance(self.mask, Predicate):
            return self.mask.fn(q[0], k[0])
        if isinstance(self.mask, Causal):
            return k[0] <= q[0]
        return self.mask.within(q[0] - k[0], q[0] - k[0])


@dataclass(frozen=True)
class Real:
    """The key is not an empty slot."""

    def __call__(self, q: Vectors, k: Vectors) -> jax.Array:
        return k[0] >= 0


@dataclass(frozen=True)
class Both:
    left: Comparison
    right: Comparison

    def __call__(self, q: Vectors, k: Vectors) -> jax.Array:
        return self.left(q, k) & self.right(q, k)


@dataclass(frozen=True)
class Either:
    left: Comparison
    right: Comparison

    def __call__(self, q: Vectors, k: Vectors) -> jax.Array:
        return self.left(q, k) | self.right(q, k)


@dataclass(frozen=True)
class Neither:
    comparison: Comparison

    def __call__(self, q: Vectors, k: Vectors) -> jax.Array:
        return ~self.comparison(q, k)


@dataclass
class MaskVectors:
    """The vectors of a mask, [B or 1, T] and [B or 1, S]; vector 0 of each is the positions."""

    q: list[jax.Array]
    k: list[jax.Array]
    every_index: bool
    """Positions are indices, so that a table as long as the array holds them all."""
    visible: Comparison = field(default_factory=Real)
    matrices: list[jax.Array] = field(default_factory=list)
    """bool[B or 1, N or 1, T, S] each: of `Dense` masks."""

    @classmethod
    def of(cls, mask: Mask, q_positions: jax.Array, k_positions: jax.Array, every_index: bool):
        vectors = cls([q_positions], [k_positions], every_index)
        seen = vectors._compare(mask)
        if not isinstance(seen, Real):
            vectors.visible = Both(seen, Real())
        return vectors

    def pairs(self) -> jax.Array | None:  # i8[B or 1, N or 1, T, S]
        """The matrices as bits of one, if any."""
        bits = (matrix.astype(jnp.int8) << bit for bit, matrix in enumerate(self.matrices))
        return functools.reduce(jnp.bitwise_or, bits) if self.matrices else None

    def _compare(self, mask: Mask) -> Comparison:
        match mask:
            case Everything():
                return Real()
            case Causal() | Window() | Predicate():
                return Positions(mask)
            case Padding():
                valid, inside = look_up(mask.valid, self.k[0])
                return self._key_is(valid & inside)
            case Prefix():
                return self._key_is(self.k[0] < mask.lengths[:, None])
            case Segments():
                return self._segments(mask)
            case Dense():
                self.matrices.append(self._matrix(mask))
                return PairIs(len(self.matrices) - 1)
            case And():
                return Both(self._compare(mask.left), self._compare(mask.right))
            case Or():
                return Either(self._compare(mask.left), self._compare(mask.right))
            case Not():
                return Neither(self._compare(mask.mask))
        raise NotImplementedError(f"{mask!r} is not made of vectors")

    def _segments(self, mask: Segments) -> Comparison:
        tables = mask.q_ids, mask.q_ids if mask.k_ids is None else mask.k_ids
        (q_ids, q_inside), (k_ids, k_inside) = (
            look_up(table, at) for table, at in zip(tables, (self.q[0], self.k[0]), strict=True)
        )
        seen: Comparison = Same(_append(self.q, q_ids), _append(self.k, k_ids))
        if not (self.every_index and tables[1].shape[1] >= self.k[0].shape[1]):
            seen = Both(seen, self._key_is(k_inside))
        if not (self.every_index and tables[0].shape[1] >= self.q[0].shape[1]):
            seen = Both(seen, QueryIs(_append(self.q, q_inside)))
        return seen

    def _matrix(self, mask: Dense) -> jax.Array:  # bool[B or 1, N or 1, T, S]
        T, S = self.q[0].shape[1], self.k[0].shape[1]
        if self.every_index and mask.array.shape[-2:] == (T, S):
            return jnp.asarray(mask.array).reshape(*mask.lead, T, S)
        return mask.materialize(self.q[0], self.k[0])

    def _key_is(self, holds: jax.Array) -> Comparison:
        return KeyIs(_append(self.k, holds))


def _append(vectors: list[jax.Array], vector: jax.Array) -> int:
    vectors.append(vector.astype(jnp.int32))
    return len(vectors) - 1


MATRICES = 8  # bits of an integer


def not_vectors(mask: Mask) -> str | None:
    """Why a mask cannot be evaluated by a kernel, or None."""
    if (count := _count(mask)) > MATRICES:
        return f"takes at most {MATRICES} Dense masks, not {count}"
    return _not_vectors(mask)


def _count(mask: Mask) -> int:
    match mask:
        case And() | Or():
            return _count(mask.left) + _count(mask.right)
        case Not():
            return _count(mask.mask)
    return int(isinstance(mask, Dense))


def _not_vectors(mask: Mask) -> str | None:
    match mask:
        case Predicate():
            at = jax.ShapeDtypeStruct((1, 1), jnp.int32)
            try:
                traced = jax.make_jaxpr(mask.fn)(at, at)
            except Exception as error:  # what a user's function may raise
                return f"{mask!r} cannot be traced: {type(error).__name__}: {error}"
            if [x.dtype for x in traced.out_avals] != [jnp.bool_]:
                return f"takes a Predicate that returns bool, {mask!r} returns another dtype"
            if traced.consts:
                return f"takes a Predicate that reads positions only, {mask!r} reads other arrays"
        case Segments() if any(
            ids is not None and ids.dtype.itemsize > 4 for ids in (mask.q_ids, mask.k_ids)
        ):
            return f"takes segment ids of 32 bits, {mask!r} has more"
        case And() | Or():
            return _not_vectors(mask.left) or _not_vectors(mask.right)
        case Not():
            return _not_vectors(mask.mask)
    return None
