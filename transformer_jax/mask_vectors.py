"""A mask as a fused kernel can evaluate it: integers per query, integers per key, and a comparison.

    Causal() & Segments(ids)    vectors q: positions, ids    k: positions, ids
                                visible: (k[0] <= q[0]) & (q[1] == k[1]) & (k[0] >= 0)

Every mask is one except `Dense`, which is a matrix, and a `Predicate` that reads other arrays.
"""

from __future__ import annotations

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

    @classmethod
    def of(cls, mask: Mask, q_positions: jax.Array, k_positions: jax.Array, every_index: bool):
        vectors = cls([q_positions], [k_positions], every_index)
        seen = vectors._compare(mask)
        if not isinstance(seen, Real):
            vectors.visible = Both(seen, Real())
        return vectors

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

    def _key_is(self, holds: jax.Array) -> Comparison:
        return KeyIs(_append(self.k, holds))


def _append(vectors: list[jax.Array], vector: jax.Array) -> int:
    vectors.append(vector.astype(jnp.int32))
    return len(vectors) - 1


def not_vectors(mask: Mask) -> str | None:
    """Why a mask cannot be evaluated from vectors, or None."""
    match mask:
        case Dense():
            return "takes no Dense mask, which is a matrix of T x S"
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
            return not_vectors(mask.left) or not_vectors(mask.right)
        case Not():
            return not_vectors(mask.mask)
    return None
