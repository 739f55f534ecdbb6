"""Hold a mask as a fused kernel evaluates it: integers per query and per key, and a comparison.

    Causal() & Segments(ids)    vectors q: positions, ids    k: positions, ids
                                visible: (k[0] <= q[0]) & (q[1] == k[1]) & (k[0] >= 0)

A `Dense` mask is an integer per pair, of which each such mask has one bit. Every mask appends its
own vectors in `Mask.comparison`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from transformer_jax.shown import short_repr

if TYPE_CHECKING:
    from transformer_jax.attention.masks import Mask

MATRICES = 8
"""How many `Dense` masks one mask may hold: the bits of an integer."""

Vectors = tuple[jax.Array, ...]
Vector = tuple[Literal["q", "k"], int]
"""A reference to one vector of the queries or of the keys."""

Q_POSITIONS: Vector = ("q", 0)
K_POSITIONS: Vector = ("k", 0)
PAIRS: Vector = ("k", -1)
"""The integer of the pair, which a kernel gives after the vectors of the keys."""


@short_repr
@dataclass(frozen=True)
class Comparison:
    """Say from query vectors and key vectors which query sees which key.

    `function` is applied to the operands: vectors that a tuple refers to, results of other
    comparisons, and constants. It is elementwise, hashable, and equal where a compiled kernel may
    be used again.
    """

    function: Callable[..., jax.Array]
    operands: tuple[Any, ...]

    def __call__(self, q: Vectors, k: Vectors) -> jax.Array:
        """Return the visible pairs of vectors that broadcast to a tile."""

        def value(operand: Any) -> Any:
            if isinstance(operand, Comparison):
                return operand(q, k)
            if isinstance(operand, tuple):
                side, index = operand
                return (q if side == "q" else k)[index]
            return operand

        return self.function(*map(value, self.operands))

    def __and__(self, other: Comparison) -> Comparison:
        return Comparison(operator.and_, (self, other))

    def __or__(self, other: Comparison) -> Comparison:
        return Comparison(operator.or_, (self, other))

    def __invert__(self) -> Comparison:
        return Comparison(operator.invert, (self,))


NO_EMPTY_SLOT = Comparison(operator.ge, (K_POSITIONS, 0))


@short_repr
@dataclass
class MaskVectors:
    """Hold a mask's vectors, [B or 1, T] and [B or 1, S]; vector 0 of each is the positions."""

    q: list[jax.Array]
    k: list[jax.Array]
    positions_are_indices: bool
    """Whether a table that is as long as the array has an entry for every position."""
    visible: Comparison = NO_EMPTY_SLOT
    matrices: list[jax.Array] = field(default_factory=list)
    """bool[B or 1, N or 1, T, S] each: of `Dense` masks."""

    @classmethod
    def of(
        cls,
        mask: Mask,
        q_positions: jax.Array,  # i32[B or 1, T]
        k_positions: jax.Array,  # i32[B or 1, S]
        positions_are_indices: bool,
    ) -> MaskVectors:
        """Return the vectors of a mask, and the comparison of a query's with a key's."""
        vectors = cls([q_positions], [k_positions], positions_are_indices)
        seen = mask.comparison(vectors)
        if not isinstance(seen, Comparison):
            given = f"{mask!r}.comparison returned a {type(seen).__name__}"
            raise TypeError(f"{given}: must be a Comparison")
        if seen != NO_EMPTY_SLOT:
            vectors.visible = seen & NO_EMPTY_SLOT
        return vectors

    @property
    def q_positions(self) -> jax.Array:  # i32[B or 1, T]
        return self.q[0]

    @property
    def k_positions(self) -> jax.Array:  # i32[B or 1, S]
        return self.k[0]

    def query_holds(self, holds: jax.Array) -> Comparison:  # bool[B or 1, T]
        """Append a vector of the queries; return the comparison that asks whether it is true."""
        return Comparison(operator.ne, (self._query(holds), 0))

    def key_holds(self, holds: jax.Array) -> Comparison:  # bool[B or 1, S]
        """Append a vector of the keys; return the comparison that asks whether it is true."""
        return Comparison(operator.ne, (self._key(holds), 0))

    def equal(self, of_query: jax.Array, of_key: jax.Array) -> Comparison:
        """Append a vector of each side, i32[B or 1, T] and [B or 1, S]; return their equality."""
        return Comparison(operator.eq, (self._query(of_query), self._key(of_key)))

    def pair_holds(self, matrix: jax.Array) -> Comparison:  # bool[B or 1, N or 1, T, S]
        """Append a matrix; return the comparison that asks whether it is true of a pair."""
        self.matrices.append(matrix)
        return Comparison(_has_bit, (PAIRS, len(self.matrices) - 1))

    def pairs(self) -> jax.Array | None:  # i8[B or 1, N or 1, T, S]
        """Return the matrices as bits of one, if there are any."""
        bits = (matrix.astype(jnp.int8) << bit for bit, matrix in enumerate(self.matrices))
        return functools.reduce(jnp.bitwise_or, bits) if self.matrices else None

    def _query(self, vector: jax.Array) -> Vector:
        self.q.append(vector.astype(jnp.int32))
        return "q", len(self.q) - 1

    def _key(self, vector: jax.Array) -> Vector:
        self.k.append(vector.astype(jnp.int32))
        return "k", len(self.k) - 1


def _has_bit(pairs: jax.Array, bit: int) -> jax.Array:
    return (pairs & (1 << bit)) != 0
