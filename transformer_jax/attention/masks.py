"""Who may attend to whom: masks as values, and functions of positions, never of array indices.

A mask is a frozen pytree. Its arrays are leaves and may be traced; its numbers and its structure
are static. True means "may attend". Masks combine with `&`, `|` and `~`:

    Causal() & Window(4096)              a sliding window
    Causal() | Prefix(lengths)           a prefix language model
    Causal() & Segments(ids)             packed documents
    Padding(valid)                       an encoder's batch of unequal lengths

Every mask below draws what it means for positions 0..3, queries in rows and keys in columns:

              keys
             0 1 2 3
           0 # . . .       # may attend
    queries 1 # # . .       . may not
           2 # # # .
           3 # # # #

A key at a negative position is an empty slot, which nobody attends to, not even under `~`: that
rule is applied last, by `materialize` and `block_plan`. A look-up outside an array is False.
Positions, ids and lengths may be of any integer dtype; one that is known and does not fit int32 is
a ValueError.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from transformer_jax.integers import INT32, as_int32, check_int32
from transformer_jax.meshes import no_mesh
from transformer_jax.tiles import BlockPlan, Tiles, at_once, register


class Mask:
    """What all masks share; a mask implements `lead`, `_sees` and `_tiles`."""

    __slots__ = ()

    @property
    def lead(self) -> tuple[int, int]:
        """(B or 1, N or 1): the batch rows and heads that the mask tells apart."""
        return 1, 1

    def materialize(
        self,
        q_positions: jax.Array,  # i32[T] or [B, T]
        k_positions: jax.Array,  # i32[S] or [B, S]
    ) -> jax.Array:  # bool[B or 1, N or 1, T, S]
        """The mask as an array; ValueError where shapes or dtypes do not fit."""
        q, k = _rows("q_positions", q_positions), _rows("k_positions", k_positions)
        self._check_rows(q, k)
        return self.allows(q, k) & (k >= 0)[:, None, None, :]

    def allows(
        self,
        q_positions: jax.Array,  # i32[B or 1, T]
        k_positions: jax.Array,  # i32[B or 1, S]
    ) -> jax.Array:  # bool[B or 1, N or 1, T, S]
        """As `materialize`, unchecked and without the rule about empty slots: for one tile."""
        sees = self._sees(q_positions[:, None, :, None], k_positions[:, None, None, :])
        return jnp.broadcast_to(sees, (*sees.shape[:2], q_positions.shape[1], k_positions.shape[1]))

    def block_plan(
        self,
        q_positions: jax.Array,  # i32[T] or [B, T]
        k_positions: jax.Array,  # i32[S] or [B, S]
        *,
        block_q: int,
        block_k: int,
    ) -> BlockPlan:
        """Classifies tiles as skipped, partial or full from the smallest and largest positions.

        Conservative: a skipped tile is entirely False, a full one entirely True, a partial one
        anything. The last tiles may reach beyond T and S: keys there count as empty slots, so such
        a tile is never full; queries there count as nothing. Without traced values the plan is
        computed at once, also inside a jit; its memory is O(T + S + tiles), except for `Dense`.
        """
        for name, size in (("block_q", block_q), ("block_k", block_k)):
            if size < 1:
                raise ValueError(f"{name} is {size}: must be at least 1")
        with at_once(self, q_positions, k_positions):
            q, k = _rows("q_positions", q_positions), _rows("k_positions", k_positions)
            self._check_rows(q, k)
            tiles = Tiles(q, k, block_q, block_k)
            return BlockPlan(tiles.classes(*self._tiles(tiles)), block_q, block_k)

    def _sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Positions [B or 1, 1, T, 1] and [B or 1, 1, 1, S] to anything that broadcasts."""
        raise NotImplementedError

    def _tiles(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        """(some, every) of each tile's pairs, without empty slots: some may be too often True,
        every too often False; both broadcast to [B or 1, N or 1, nQ, nK]."""
        raise NotImplementedError

    def _check_rows(self, q: jax.Array, k: jax.Array) -> None:
        sizes = {"the mask": self.lead[0], "q_positions": q.shape[0], "k_positions": k.shape[0]}
        if len({size for size in sizes.values() if size != 1}) > 1:
            rows = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"batch rows differ: {rows}")

    def __and__(self, other: Mask) -> Mask:
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def __repr__(self) -> str:
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        while values and values[-1] is None:
            values.pop()
        return f"{type(self).__name__}({', '.join(map(_brief, values))})"


@register()
@dataclass(frozen=True, repr=False)
class Everything(Mask):
    """Every key that is not an empty slot; what `mask=None` means.

    # # # #
    # # # #
    # # # #
    # # # #
    """

    def _sees(self, q, k):
        return jnp.ones((1, 1, 1, 1), bool)

    def _tiles(self, tiles):
        return jnp.ones((1, 1, 1, 1), bool), jnp.ones((1, 1, 1, 1), bool)


@register()
@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """k <= q.

    # . . .
    # # . .
    # # # .
    # # # #
    """

    def _sees(self, q, k):
        return k <= q

    def _tiles(self, tiles):
        return tiles.k_low <= tiles.q_high, tiles.k_high <= tiles.q_low


@register(static=("left", "right"))
@dataclass(frozen=True, repr=False)
class Window(Mask):
    """q - k < left, and k - q < right where given: both sides count the query itself.

    `left=None` does not bound the past, `right=None` does not bound the future; 0 leaves nothing of
    its side, not even the query itself.

        Window(2)      # # # #      Window(2, 2)   # # . .
                       # # # #                     # # # .
                       . # # #                     . # # #
                       . . # #                     . . # #
    """

    left: int | None
    right: int | None = None

    def __post_init__(self) -> None:
        if self.left is None and self.right is None:
            raise ValueError("Window(None, None) bounds nothing: give left or right")
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is None:
                continue
            if not hasattr(value, "__index__") or operator.index(value) < 0:
                raise ValueError(f"Window: {name} is {value!r}: must be an integer of 0 or more")
            object.__setattr__(self, name, operator.index(value))

    def _sees(self, q, k):
        return self.within(q - k, q - k)

    def _tiles(self, tiles):
        nearest, farthest = tiles.q_low - tiles.k_high, tiles.q_high - tiles.k_low
        every = self.within(farthest, nearest)
        if self.left is not None and self.right is not None and self.left + self.right < 2:
            return jnp.zeros_like(every), every
        return self.within(nearest, farthest), every

    def within(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """-right < high and low < left, of distances from a key to a query."""
        sides = [] if self.left is None else [low <= min(self.left - 1, INT32.max)]
        sides += [] if self.right is None else [high >= max(1 - self.right, INT32.min)]
        return sides[0] if len(sides) == 1 else sides[0] & sides[1]


@register(arrays=("valid",))
@dataclass(frozen=True, repr=False, eq=False)
class Padding(Mask):
    """valid[b, k]: real keys of a padded batch.

    Padding([[True, True, True, False]])

    # # # .
    # # # .
    # # # .
    # # # .
    """

    valid: jax.Array  # bool[B, S]
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _check("Padding", "valid", self.valid, "bool[B, S]", (2,), np.bool_)

    @property
    def lead(self):
        return self.valid.shape[0], 1

    def _sees(self, q, k):
        valid, inside = look_up(self.valid, k)
        return valid & inside

    def _tiles(self, tiles):
        sees = self._sees(tiles.q, tiles.k[:, None, None, :])[:, 0, 0]
        return tiles.some_key(sees), tiles.every_key(sees)


@register(arrays=("q_ids", "k_ids"))
@dataclass(frozen=True, repr=False, eq=False)
class Segments(Mask):
    """q_ids[b, q] == k_ids[b, k]; without `k_ids` keys have the queries' ids: packed documents.

    Segments([[1, 1, 1, 2]])

    # # # .
    # # # .
    # # # .
    . . . #
    """

    q_ids: jax.Array  # i32[B, T]
    k_ids: jax.Array | None = None  # i32[B, S]
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _check("Segments", "q_ids", self.q_ids, "i32[B, T]", (2,), np.integer)
        if self.k_ids is not None:
            _check("Segments", "k_ids", self.k_ids, "i32[B, S]", (2,), np.integer)
            rows = self.q_ids.shape[0], self.k_ids.shape[0]
            if rows[0] != rows[1]:
                raise ValueError(f"Segments: q_ids has {rows[0]} rows, k_ids {rows[1]}")

    @property
    def lead(self):
        return self.q_ids.shape[0], 1

    def _sees(self, q, k):
        q_ids, q_inside = look_up(self.q_ids, q)
        k_ids, k_inside = look_up(self.q_ids if self.k_ids is None else self.k_ids, k)
        return (q_ids == k_ids) & q_inside & k_inside

    def _tiles(self, tiles):
        q_ids, q_inside = look_up(self.q_ids, tiles.q)
        k_ids, k_inside = look_up(self.q_ids if self.k_ids is None else self.k_ids, tiles.k)
        q_low, q_high = tiles.query_range(q_ids, q_inside)
        k_low, k_high = tiles.key_range(k_ids, k_inside)
        one_id = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        inside = tiles.every_query(q_inside) & tiles.every_key(k_inside)
        return (q_low <= k_high) & (k_low <= q_high), one_id & inside


@register(arrays=("lengths",))
@dataclass(frozen=True, repr=False, eq=False)
class Prefix(Mask):
    """k < lengths[b]: everybody sees a prefix; a prefix language model is Causal() | Prefix(...).

    Prefix([2])

    # # . .
    # # . .
    # # . .
    # # . .
    """

    lengths: jax.Array  # i32[B]
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _check("Prefix", "lengths", self.lengths, "i32[B]", (1,), np.integer)

    @property
    def lead(self):
        return self.lengths.shape[0], 1

    def _sees(self, q, k):
        return k < self.lengths[:, None, None, None]

    def _tiles(self, tiles):
        lengths = self.lengths[:, None, None, None]
        return tiles.k_low < lengths, tiles.k_high < lengths


@register(arrays=("array",))
@dataclass(frozen=True, repr=False, eq=False)
class Dense(Mask):
    """array[b, n, q, k], looked up by positions; its plan costs as much as the array.

    Dense(numpy.eye(4, dtype=bool))

    # . . .
    . # . .
    . . # .
    . . . #
    """

    array: jax.Array  # bool[B or 1, N or 1, T, S] or bool[T, S]
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _check("Dense", "array", self.array, "bool[T, S] or bool[B, N, T, S]", (2, 4), np.bool_)

    @property
    def lead(self):
        return (1, 1) if len(self.array.shape) == 2 else tuple(self.array.shape[:2])

    def _sees(self, q, k):
        array = self.array if self.array.ndim == 4 else self.array[None, None]
        return _look_up_pairs(array, q[:, 0, :, 0], k[:, 0, 0])

    def _tiles(self, tiles):
        return tiles.pairs(self._sees(tiles.q[:, None, :, None], tiles.k[:, None, None, :]))


@register(static=("fn",))
@dataclass(frozen=True, repr=False)
class Predicate(Mask):
    """fn(q, k), any comparison of positions [..., T, 1] and [..., 1, S]; no tile is ever skipped.

    It compares pair by pair, and may read other arrays, traced ones too.

    Predicate(lambda q, k: (q - k) % 2 == 0)

    # . # .
    . # . #
    # . # .
    . # . #
    """

    fn: Callable[[jax.Array, jax.Array], jax.Array]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"Predicate: fn is {self.fn!r}: must be callable")

    def _sees(self, q, k):
        sees = self.fn(q, k)
        if jnp.result_type(sees) != np.bool_:
            raise ValueError(f"Predicate: fn returned {jnp.result_type(sees)}: must be bool")
        return sees

    def _tiles(self, tiles):
        return jnp.ones((1, 1, 1, 1), bool), jnp.zeros((1, 1, 1, 1), bool)


@register(arrays=("constants",), static=("jaxpr",))
@dataclass(frozen=True, repr=False, eq=False)
class Closed(Mask):
    """A Predicate traced for one pair, with the arrays that it reads as leaves; see `close`."""

    constants: tuple[jax.Array, ...]
    jaxpr: Jaxpr

    def _sees(self, q, k):
        one = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, self.constants))
        at = lambda position: jnp.reshape(position, (1, 1, 1, 1))  # noqa: E731
        return jnp.vectorize(lambda q, k: one(at(q), at(k))[0].reshape(()))(q, k)

    def _tiles(self, tiles):
        return jnp.ones((1, 1, 1, 1), bool), jnp.zeros((1, 1, 1, 1), bool)


def close(mask: Mask) -> Mask:
    """The mask with the traced values that its predicates read as leaves of it: a derivative
    written by hand may read no other."""

    def closed(node: Any) -> Any:
        if not isinstance(node, Predicate):
            return node
        at = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.int32)
        # or each operation would insist on the mesh of `jax.set_mesh`, as it is here
        with no_mesh():
            traced = jax.make_jaxpr(node._sees)(at, at)
        reads = any(isinstance(x, jax.core.Tracer) for x in traced.consts)
        if not reads or traced.out_avals[0].shape != at.shape:
            return node
        return Closed(tuple(traced.consts), traced.jaxpr)

    return jax.tree.map(closed, mask, is_leaf=lambda node: isinstance(node, Predicate))


class _Pair(Mask):
    """Two masks under one operator."""

    __slots__ = ()
    left: Mask
    right: Mask

    @property
    def lead(self):
        try:
            return np.broadcast_shapes(self.left.lead, self.right.lead)
        except ValueError:
            sizes = f"{self.left.lead} and {self.right.lead}"
            raise ValueError(f"{self!r}: batch rows and heads {sizes} do not broadcast") from None


@register(arrays=("left", "right"))
@dataclass(frozen=True, repr=False)
class And(_Pair):
    """left & right: Causal() & Window(2).

    # . . .
    # # . .
    . # # .
    . . # #
    """

    left: Mask
    right: Mask

    def _sees(self, q, k):
        return self.left._sees(q, k) & self.right._sees(q, k)

    def _tiles(self, tiles):
        (a_some, a_every), (b_some, b_every) = self.left._tiles(tiles), self.right._tiles(tiles)
        return a_some & b_some, a_every & b_every

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@register(arrays=("left", "right"))
@dataclass(frozen=True, repr=False)
class Or(_Pair):
    """left | right: Causal() | Prefix(lengths) of lengths [2].

    # # . .
    # # . .
    # # # .
    # # # #
    """

    left: Mask
    right: Mask

    def _sees(self, q, k):
        return self.left._sees(q, k) | self.right._sees(q, k)

    def _tiles(self, tiles):
        (a_some, a_every), (b_some, b_every) = self.left._tiles(tiles), self.right._tiles(tiles)
        return a_some | b_some, a_every | b_every

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@register(arrays=("mask",))
@dataclass(frozen=True, repr=False)
class Not(Mask):
    """~mask: ~Causal(). An empty slot stays unseen.

    . # # #
    . . # #
    . . . #
    . . . .
    """

    mask: Mask

    @property
    def lead(self):
        return self.mask.lead

    def _sees(self, q, k):
        return ~self.mask._sees(q, k)

    def _tiles(self, tiles):
        some, every = self.mask._tiles(tiles)
        return ~every, ~some

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


def look_up(table: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """table[b, at] for positions [B or 1, ...], and whether they lie inside the table [B, S]."""
    inside = (at >= 0) & (at < table.shape[1])
    rows = np.broadcast_shapes(table.shape[:1], at.shape[:1])
    if table.shape[1] == 0:
        return jnp.zeros(rows + at.shape[1:], table.dtype), inside
    index = jnp.where(inside, at, 0).reshape(at.shape[0], -1)
    found = jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")
    return found.reshape(rows + at.shape[1:]), inside


def _look_up_pairs(
    array: jax.Array,  # bool[B or 1, N or 1, T', S']
    q: jax.Array,  # i32[B or 1, T]
    k: jax.Array,  # i32[B or 1, S]
) -> jax.Array:  # bool[B or 1, N or 1, T, S]
    """array[b, n, q, k], False outside: two takes instead of a gather of single elements."""
    q_inside, k_inside = (q >= 0) & (q < array.shape[2]), (k >= 0) & (k < array.shape[3])
    inside = q_inside[:, None, :, None] & k_inside[:, None, None, :]
    if 0 in array.shape[2:]:
        return inside

    def take(array, q, k):  # [N or 1, T', S'], [T], [S]
        rows = jnp.take(array, q, axis=1, mode="clip")
        return jnp.take(rows, k, axis=2, mode="clip")

    if q.shape[0] == k.shape[0] == 1:
        return jax.vmap(take, (0, None, None))(array, q[0], k[0]) & inside
    rows = np.broadcast_shapes(array.shape[:1], q.shape[:1], k.shape[:1])
    index = [jnp.broadcast_to(x, rows + x.shape[1:]) for x in (q, k)]
    if array.shape[0] == 1:
        return jax.vmap(take, (None, 0, 0))(array[0], *index) & inside
    return jax.vmap(take)(array, *index) & inside


def _rows(name: str, positions: Any) -> jax.Array:
    """Positions as [B or 1, length]."""
    positions = jnp.asarray(as_int32(name, positions))
    if positions.ndim not in (1, 2) or not jnp.issubdtype(positions.dtype, jnp.integer):
        given = f"{positions.dtype}{positions.shape}"
        raise ValueError(f"{name} is {given}: must be integers [length] or [B, length]")
    return positions[None] if positions.ndim == 1 else positions


def _check(
    mask: str, name: str, value: Any, wanted: str, ranks: tuple[int, ...], kind: Any
) -> None:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise ValueError(f"{mask}: {name} is a {type(value).__name__}: must be an array {wanted}")
    if len(shape) not in ranks or not jnp.issubdtype(dtype, kind):
        raise ValueError(f"{mask}: {name} is {dtype}{tuple(shape)}: must be {wanted}")
    if kind is np.integer:
        check_int32(f"{mask}: {name}", value)


def _brief(value: Any) -> str:
    """An array as dtype[shape], anything else as itself."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return repr(value)
