"""Say who may attend to whom: masks as values, functions of positions and never of array indices.

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

Whatever an implementation of attention needs of a mask is a method of `Mask`. A mask of your own
is a frozen dataclass, registered as a pytree, with one method, `sees`: docs/own_mask_and_bias.md.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from transformer_jax.attention.block_plan import BlockPlan, Tiles
from transformer_jax.attention.mask_vectors import (
    K_POSITIONS,
    NO_EMPTY_SLOT,
    Q_POSITIONS,
    Comparison,
    MaskVectors,
)
from transformer_jax.checks import INT32, as_int32, check_int32
from transformer_jax.kernels.sharding import TILES, AxisNames
from transformer_jax.pytree import register
from transformer_jax.sharding import no_mesh
from transformer_jax.tracing import at_once

Pair = tuple[Any, Any]
"""A batch row and a head; either may be traced."""


class Mask:
    """Say which query may attend to which key; a subclass implements `sees`.

    A subclass is a frozen dataclass that is registered as a pytree. The other methods have defaults
    that are right for every mask, and that the masks below replace by faster ones:

        lead            how many batch rows and heads differ; by default asked of `sees`
        some_and_every  what is known of a tile; by default nothing, and none is skipped
        leaf_axes       which axes of its arrays are batch rows and heads; by default none
        comparison      vectors for a fused kernel; by default positions, if it reads no arrays
    """

    __slots__ = ()

    # What a mask of your own implements

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Return whether queries at positions q may attend to keys at positions k, elementwise.

        The shapes of q and k broadcast: [B or 1, 1, T, 1] and [B or 1, 1, 1, S] for whole arrays
        and for tiles, any two that do inside a fused kernel. The result is bool, and broadcasts to
        [B, N, T, S].
        """
        raise TypeError(f"{type(self).__name__} is a Mask without a method sees(self, q, k)")

    @property
    def lead(self) -> tuple[int, int]:
        """Return (B or 1, N or 1): how many batch rows and heads the mask tells apart."""
        at = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.int32)
        bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), self)
        with no_mesh():
            sees = jax.eval_shape(lambda mask, q, k: mask.sees(q, k), bare, at, at)
        if sees.dtype != np.bool_ or len(sees.shape) > 4:
            given = f"{sees.dtype}[{', '.join(map(str, sees.shape))}]"
            raise ValueError(
                f"{type(self).__name__}.sees returned {given}: must be bool[B, N, T, S]"
            )
        rows, heads = ((1,) * (4 - len(sees.shape)) + sees.shape)[:2]
        return rows, heads

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        """Return whether some and whether every pair of each tile may attend, empty slots aside.

        `some` may be True too often, `every` False too often; both are bool and broadcast to
        [B or 1, N or 1, nQ, nK].
        """
        return jnp.ones((1, 1, 1, 1), bool), jnp.zeros((1, 1, 1, 1), bool)

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        """Name the axes of each array of the mask: "b" batch rows, "n" heads, None neither."""
        return tuple((None,) * jnp.ndim(x) for x in jax.tree.leaves(self))

    def comparison(self, vectors: MaskVectors) -> Comparison:
        """Append what a fused kernel reads of the mask, and return the comparison of a pair."""
        return Comparison(type(self).sees, (self, Q_POSITIONS, K_POSITIONS))

    # What follows from these

    def part(self, first: Pair, full: tuple[int, int], size: tuple[int, int]) -> Mask:
        """Return the mask of some batch rows and heads, as pairs (rows, heads).

        They begin with `first`, which may be traced, and are `size` of `full`. Arrays whose axes
        `leaf_axes` names are sliced, unless they are as short as `size` already. Where it names
        no axis, the result of `sees` is sliced.
        """
        axes = self.leaf_axes
        if any(name for names in axes for name in names):
            leaves, structure = jax.tree.flatten(self)
            at = {"b": 0, "n": 1}
            for i, names in enumerate(axes):
                for axis, name in enumerate(names):
                    if name is not None:
                        n = at[name]
                        leaves[i] = _slice(leaves[i], axis, first[n], full[n], size[n])
            return jax.tree.unflatten(structure, leaves)
        return self if self.lead == (1, 1) else PartOfMask(self, *first, full, size)

    def closed(self) -> Mask:
        """Return the mask with the traced values that its predicates read as leaves.

        A derivative that is written by hand may read no traced values but its arguments.
        """

        def close(node: Any) -> Any:
            return node.closed() if isinstance(node, Predicate) else node

        return jax.tree.map(close, self, is_leaf=lambda node: isinstance(node, Predicate))

    def refuse_kernel(self) -> str | None:
        """Return why a fused kernel cannot evaluate the mask, or None."""
        if type(self).comparison is not Mask.comparison:
            return None
        if leaves := jax.tree.leaves(self):
            rule = "takes a mask of your own that reads positions only, or has a method comparison"
            numbers = any(not hasattr(leaf, "shape") for leaf in leaves)
            hint = ", and a number is one without field(metadata=dict(static=True))" * numbers
            return f"{rule}; {Mask.__repr__(self)} reads arrays{hint}"
        return _refuse_traced(self, self.sees, "a mask")

    @property
    def num_matrices(self) -> int:
        """Count the matrices that a fused kernel reads: one for each `Dense`."""
        return 0

    @property
    def sees_everything(self) -> bool:
        """Return whether it is known that every query sees every key."""
        return False

    @property
    def causal_window(self) -> tuple[bool, int | None] | None:
        """Return (whether k <= q, left of q - k < left) if that is all the mask says, else None."""
        return None

    @property
    def calls_user_code(self) -> bool:
        """Return whether evaluating the mask calls code that is not of this module."""
        return True

    # What callers ask of a mask

    def materialize(
        self,
        q_positions: jax.Array,  # i32[T] or [B, T]
        k_positions: jax.Array,  # i32[S] or [B, S]
    ) -> jax.Array:  # bool[B or 1, N or 1, T, S]
        """Return the mask as an array; ValueError where shapes or dtypes do not fit."""
        q, k = _rows("q_positions", q_positions), _rows("k_positions", k_positions)
        self._check_rows(q, k)
        return self.allows(q, k) & (k >= 0)[:, None, None, :]

    def allows(
        self,
        q_positions: jax.Array,  # i32[B or 1, T]
        k_positions: jax.Array,  # i32[B or 1, S]
    ) -> jax.Array:  # bool[B or 1, N or 1, T, S]
        """Return what `materialize` does, unchecked and without the rule about empty slots."""
        sees = _four_axes(self.sees(q_positions[:, None, :, None], k_positions[:, None, None, :]))
        return jnp.broadcast_to(sees, (*sees.shape[:2], q_positions.shape[1], k_positions.shape[1]))

    def block_plan(
        self,
        q_positions: jax.Array,  # i32[T] or [B, T]
        k_positions: jax.Array,  # i32[S] or [B, S]
        *,
        block_q: int,
        block_k: int,
    ) -> BlockPlan:
        """Classify tiles as skipped, partial or full from the smallest and largest positions.

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
            return BlockPlan(tiles.classes(*self.some_and_every(tiles)), block_q, block_k)

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

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is neither true nor false: combine masks with &, | and ~, not with and, or "
            "and not; ask `mask is None`"
        )

    def __repr__(self) -> str:
        if not dataclasses.is_dataclass(self):
            return object.__repr__(self)
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        while values and values[-1] is None:
            values.pop()
        return f"{type(self).__name__}({', '.join(map(_brief, values))})"


class _Ours(Mask):
    """Share what holds of the masks of this module."""

    __slots__ = ()

    @property
    def lead(self) -> tuple[int, int]:
        return 1, 1

    @property
    def calls_user_code(self) -> bool:
        return False

    def refuse_kernel(self) -> str | None:
        return None


@register()
@dataclass(frozen=True, repr=False)
class Everything(_Ours):
    """Let every query see every key that is not an empty slot; what `mask=None` means.

    # # # #
    # # # #
    # # # #
    # # # #
    """

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.ones((1, 1, 1, 1), bool)

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        return jnp.ones((1, 1, 1, 1), bool), jnp.ones((1, 1, 1, 1), bool)

    def comparison(self, vectors: MaskVectors) -> Comparison:
        return NO_EMPTY_SLOT

    @property
    def sees_everything(self) -> bool:
        return True

    @property
    def causal_window(self) -> tuple[bool, int | None] | None:
        return False, None


@register()
@dataclass(frozen=True, repr=False)
class Causal(_Ours):
    """Let a query see its own and earlier positions: k <= q.

    # . . .
    # # . .
    # # # .
    # # # #
    """

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return k <= q

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        return tiles.k_low <= tiles.q_high, tiles.k_high <= tiles.q_low

    @property
    def causal_window(self) -> tuple[bool, int | None] | None:
        return True, None


@register(static=("left", "right"))
@dataclass(frozen=True, repr=False)
class Window(_Ours):
    """Let a query see the keys near it: q - k < left, and k - q < right where given.

    Both sides count the query itself. `left=None` does not bound the past, `right=None` does not
    bound the future; 0 leaves nothing of its side, not even the query itself.

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

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return self.within(q - k, q - k)

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        nearest, farthest = tiles.q_low - tiles.k_high, tiles.q_high - tiles.k_low
        every = self.within(farthest, nearest)
        if self.left is not None and self.right is not None and self.left + self.right < 2:
            return jnp.zeros_like(every), every
        return self.within(nearest, farthest), every

    def within(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """Return -right < high and low < left, for distances from a key to a query."""
        sides = [] if self.left is None else [low <= min(self.left - 1, INT32.max)]
        sides += [] if self.right is None else [high >= max(1 - self.right, INT32.min)]
        return sides[0] if len(sides) == 1 else sides[0] & sides[1]

    @property
    def causal_window(self) -> tuple[bool, int | None] | None:
        return (False, self.left) if self.left and self.right is None else None


@register(arrays=("valid",))
@dataclass(frozen=True, repr=False, eq=False)
class Padding(_Ours):
    """Hide the padding of a batch: a key is seen where valid[b, k].

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
    def lead(self) -> tuple[int, int]:
        return self.valid.shape[0], 1

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        valid, inside = look_up(self.valid, k)
        return valid & inside

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        sees = self.sees(tiles.q, tiles.k[:, None, None, :])[:, 0, 0]
        return tiles.some_key(sees), tiles.every_key(sees)

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return (("b", None),)

    def comparison(self, vectors: MaskVectors) -> Comparison:
        valid, inside = look_up(self.valid, vectors.k_positions)
        return vectors.key_holds(valid & inside)


@register(arrays=("q_ids", "k_ids"))
@dataclass(frozen=True, repr=False, eq=False)
class Segments(_Ours):
    """Let packed documents see only themselves: q_ids[b, q] == k_ids[b, k].

    Without `k_ids` the keys have the ids of the queries.

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
    def lead(self) -> tuple[int, int]:
        return self.q_ids.shape[0], 1

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        q_ids, q_inside = look_up(self.q_ids, q)
        k_ids, k_inside = look_up(self.q_ids if self.k_ids is None else self.k_ids, k)
        return (q_ids == k_ids) & q_inside & k_inside

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        q_ids, q_inside = look_up(self.q_ids, tiles.q)
        k_ids, k_inside = look_up(self.q_ids if self.k_ids is None else self.k_ids, tiles.k)
        q_low, q_high = tiles.query_range(q_ids, q_inside)
        k_low, k_high = tiles.key_range(k_ids, k_inside)
        one_id = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        inside = tiles.every_query(q_inside) & tiles.every_key(k_inside)
        return (q_low <= k_high) & (k_low <= q_high), one_id & inside

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return (("b", None),) * (1 if self.k_ids is None else 2)

    def comparison(self, vectors: MaskVectors) -> Comparison:
        k_table = self.q_ids if self.k_ids is None else self.k_ids
        q_ids, q_inside = look_up(self.q_ids, vectors.q_positions)
        k_ids, k_inside = look_up(k_table, vectors.k_positions)
        seen, known = vectors.equal(q_ids, k_ids), vectors.positions_are_indices
        if not (known and k_table.shape[1] >= k_ids.shape[1]):
            seen = seen & vectors.key_holds(k_inside)
        if not (known and self.q_ids.shape[1] >= q_ids.shape[1]):
            seen = seen & vectors.query_holds(q_inside)
        return seen

    def refuse_kernel(self) -> str | None:
        tables = self.q_ids, self.k_ids
        if any(ids is not None and ids.dtype.itemsize > 4 for ids in tables):
            return f"takes segment ids of 32 bits, {self!r} has more"
        return None


@register(arrays=("lengths",))
@dataclass(frozen=True, repr=False, eq=False)
class Prefix(_Ours):
    """Let every query see the first keys: k < lengths[b].

    A prefix language model is Causal() | Prefix(lengths).

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
    def lead(self) -> tuple[int, int]:
        return self.lengths.shape[0], 1

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return k < self.lengths[:, None, None, None]

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        lengths = self.lengths[:, None, None, None]
        return tiles.k_low < lengths, tiles.k_high < lengths

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return (("b",),)

    def comparison(self, vectors: MaskVectors) -> Comparison:
        return vectors.key_holds(vectors.k_positions < self.lengths[:, None])


@register(arrays=("array",))
@dataclass(frozen=True, repr=False, eq=False)
class Dense(_Ours):
    """Look pairs up in an array by their positions: array[b, n, q, k].

    A plan of its tiles costs as much as the array.

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
    def lead(self) -> tuple[int, int]:
        return (1, 1) if len(self.array.shape) == 2 else (self.array.shape[0], self.array.shape[1])

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return (TILES if self.array.ndim == 4 else (None, None),)

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        array = self.array if self.array.ndim == 4 else self.array[None, None]
        return _look_up_pairs(array, q[:, 0, :, 0], k[:, 0, 0])

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        return tiles.pairs(self.sees(tiles.q[:, None, :, None], tiles.k[:, None, None, :]))

    def comparison(self, vectors: MaskVectors) -> Comparison:
        q, k = vectors.q_positions, vectors.k_positions
        lengths = q.shape[1], k.shape[1]
        if vectors.positions_are_indices and self.array.shape[-2:] == lengths:
            return vectors.pair_holds(jnp.asarray(self.array).reshape(*self.lead, *lengths))
        return vectors.pair_holds(self.materialize(q, k))

    @property
    def num_matrices(self) -> int:
        return 1


@register(static=("fn",))
@dataclass(frozen=True, repr=False)
class Predicate(_Ours):
    """Ask a function fn(q, k) of positions [..., T, 1] and [..., 1, S]; it returns bool.

    It compares pair by pair, and may read other arrays, traced ones too. No tile is ever skipped.

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

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        sees = self.fn(q, k)
        if jnp.result_type(sees) != np.bool_:
            raise ValueError(f"Predicate: fn returned {jnp.result_type(sees)}: must be bool")
        return sees

    def comparison(self, vectors: MaskVectors) -> Comparison:
        return Comparison(self.fn, (Q_POSITIONS, K_POSITIONS))

    def refuse_kernel(self) -> str | None:
        return _refuse_traced(self, self.fn, "a Predicate")

    @property
    def calls_user_code(self) -> bool:
        return True

    def closed(self) -> Mask:
        at = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.int32)
        with no_mesh():  # or each operation would insist on the mesh of `jax.set_mesh`
            traced = jax.make_jaxpr(lambda q, k: self.sees(q, k))(at, at)
        reads = any(isinstance(x, jax.core.Tracer) for x in traced.consts)
        if not reads or traced.out_avals[0].shape != at.shape:
            return self
        return Closed(tuple(traced.consts), traced.jaxpr)


@register(arrays=("constants",), static=("jaxpr",))
@dataclass(frozen=True, repr=False, eq=False)
class Closed(_Ours):
    """Hold a Predicate traced for one pair, with the arrays that it reads as leaves."""

    constants: tuple[jax.Array, ...]
    jaxpr: Jaxpr

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        one = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, self.constants))
        at = lambda position: jnp.reshape(position, (1, 1, 1, 1))  # noqa: E731
        return jnp.vectorize(lambda q, k: one(at(q), at(k))[0].reshape(()))(q, k)

    def refuse_kernel(self) -> str | None:
        return f"takes a Predicate that reads positions only, {self!r} reads other arrays"

    @property
    def calls_user_code(self) -> bool:
        return True


@register(arrays=("mask", "row", "head"), static=("full", "size"))
@dataclass(frozen=True, repr=False, eq=False)
class PartOfMask(Mask):
    """Take some batch rows and heads of a mask's results, where its arrays cannot be sliced."""

    mask: Mask
    row: Any  # the first
    head: Any  # the first
    full: tuple[int, int]  # how many rows and heads there are
    size: tuple[int, int]  # how many are here

    @property
    def lead(self) -> tuple[int, int]:
        sizes = zip(self.mask.lead, self.full, self.size, strict=True)
        rows, heads = (size if n == full else n for n, full, size in sizes)
        return rows, heads

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return self._cut(self.mask.sees(self._of_every_row(q), self._of_every_row(k)))

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        q, k = self._of_every_row(tiles.q), self._of_every_row(tiles.k)
        some, every = self.mask.some_and_every(Tiles(q, k, tiles.block_q, tiles.block_k))
        return self._cut(some), self._cut(every)

    def _of_every_row(self, positions: jax.Array) -> jax.Array:
        """Return positions [size or 1, ...] as [full or 1, ...]; those of other rows are 0."""
        if positions.shape[0] == 1 or self.full[0] == self.size[0]:
            return positions
        zeros = jnp.zeros((self.full[0], *positions.shape[1:]), positions.dtype)
        return lax.dynamic_update_slice_in_dim(zeros, positions, self.row, 0)

    def _cut(self, result: jax.Array) -> jax.Array:
        result = _four_axes(result)
        for axis, first in enumerate((self.row, self.head)):
            result = _slice(result, axis, first, self.full[axis], self.size[axis])
        return result


class _Pair(Mask):
    """Combine two masks under one operator."""

    __slots__ = ()
    left: Mask
    right: Mask

    @property
    def lead(self) -> tuple[int, int]:
        try:
            rows, heads = jnp.broadcast_shapes(self.left.lead, self.right.lead)
        except ValueError:
            sizes = f"{self.left.lead} and {self.right.lead}"
            raise ValueError(f"{self!r}: batch rows and heads {sizes} do not broadcast") from None
        return rows, heads

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return self.left.leaf_axes + self.right.leaf_axes

    def part(self, first: Pair, full: tuple[int, int], size: tuple[int, int]) -> Mask:
        sides = (side.part(first, full, size) for side in (self.left, self.right))
        return type(self)(*sides)

    def refuse_kernel(self) -> str | None:
        return self.left.refuse_kernel() or self.right.refuse_kernel()

    @property
    def num_matrices(self) -> int:
        return self.left.num_matrices + self.right.num_matrices

    @property
    def calls_user_code(self) -> bool:
        return self.left.calls_user_code or self.right.calls_user_code


@register(arrays=("left", "right"))
@dataclass(frozen=True, repr=False)
class And(_Pair):
    """Allow what both masks allow: Causal() & Window(2).

    # . . .
    # # . .
    . # # .
    . . # #
    """

    left: Mask
    right: Mask

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return self.left.sees(q, k) & self.right.sees(q, k)

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        (a_some, a_every), (b_some, b_every) = (
            self.left.some_and_every(tiles),
            self.right.some_and_every(tiles),
        )
        return a_some & b_some, a_every & b_every

    def comparison(self, vectors: MaskVectors) -> Comparison:
        return self.left.comparison(vectors) & self.right.comparison(vectors)

    @property
    def sees_everything(self) -> bool:
        return self.left.sees_everything and self.right.sees_everything

    @property
    def causal_window(self) -> tuple[bool, int | None] | None:
        left, right = self.left.causal_window, self.right.causal_window
        if left is None or right is None:
            return None
        widths = [width for _, width in (left, right) if width is not None]
        return left[0] or right[0], min(widths, default=None)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@register(arrays=("left", "right"))
@dataclass(frozen=True, repr=False)
class Or(_Pair):
    """Allow what either mask allows: Causal() | Prefix(lengths) of lengths [2].

    # # . .
    # # . .
    # # # .
    # # # #
    """

    left: Mask
    right: Mask

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return self.left.sees(q, k) | self.right.sees(q, k)

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        (a_some, a_every), (b_some, b_every) = (
            self.left.some_and_every(tiles),
            self.right.some_and_every(tiles),
        )
        return a_some | b_some, a_every | b_every

    def comparison(self, vectors: MaskVectors) -> Comparison:
        return self.left.comparison(vectors) | self.right.comparison(vectors)

    @property
    def sees_everything(self) -> bool:
        return self.left.sees_everything or self.right.sees_everything

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@register(arrays=("mask",))
@dataclass(frozen=True, repr=False)
class Not(Mask):
    """Allow what a mask hides: ~Causal(). An empty slot stays unseen.

    . # # #
    . . # #
    . . . #
    . . . .
    """

    mask: Mask

    @property
    def lead(self) -> tuple[int, int]:
        return self.mask.lead

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return self.mask.leaf_axes

    def part(self, first: Pair, full: tuple[int, int], size: tuple[int, int]) -> Mask:
        return Not(self.mask.part(first, full, size))

    def comparison(self, vectors: MaskVectors) -> Comparison:
        return ~self.mask.comparison(vectors)

    def refuse_kernel(self) -> str | None:
        return self.mask.refuse_kernel()

    @property
    def num_matrices(self) -> int:
        return self.mask.num_matrices

    @property
    def calls_user_code(self) -> bool:
        return self.mask.calls_user_code

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return ~self.mask.sees(q, k)

    def some_and_every(self, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
        some, every = self.mask.some_and_every(tiles)
        return ~every, ~some

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


def check_mask(mask: Any, B: int, N: int) -> None:
    """Raise ValueError where a mask is none, is not a registered pytree, or does not fit."""
    if mask is None:
        return
    if not isinstance(mask, Mask):
        if isinstance(mask, type):
            raise ValueError(f"mask is the class {mask.__name__}: must be a value of it")
        given = "function" if callable(mask) else type(mask).__name__
        rule = "Dense(array) makes one of an array, Predicate(fn) of a function"
        raise ValueError(f"mask is a {given}: must be a Mask; {rule}")
    for node in _nodes(mask):
        kind = type(node)
        if kind.__module__ == __name__:
            continue
        parameters = vars(kind).get("__dataclass_params__")
        registered = not jax.tree_util.all_leaves([node])
        if parameters is None or not parameters.frozen or not registered:
            wrong = "is not registered as a pytree" if parameters else "is no frozen dataclass"
            wrong = wrong if parameters is None or parameters.frozen else "is not frozen"
            raise ValueError(
                f"{kind.__name__} {wrong}: write @jax.tree_util.register_dataclass and "
                f"@dataclass(frozen=True) above class {kind.__name__}(Mask)"
            )
        if (base := _base_with_other_pairs(kind)) is not None:
            rule = f"overrides {base}.sees and inherits the rest of {base}"
            raise ValueError(f"{kind.__name__} {rule}: derive it from Mask")
    rows, heads = mask.lead
    if rows not in (1, B) or heads not in (1, N):
        raise ValueError(f"{mask!r} has {rows} batch rows and {heads} heads, query {B} and {N}")


def _base_with_other_pairs(kind: type[Mask]) -> str | None:
    """Return the mask of the library that a class derives from and sees other pairs than, or None.

    Such a class would inherit the tiles, the comparison and the window of the other's pairs.
    """
    base = next(x for x in kind.__mro__ if x.__module__ == __name__ and issubclass(x, Mask))
    return base.__name__ if base is not Mask and kind.sees is not base.sees else None


def _nodes(mask: Mask) -> Iterator[Mask]:
    """Yield a mask and those that it is made of."""
    yield mask
    if dataclasses.is_dataclass(mask):
        inner = (getattr(mask, field.name) for field in dataclasses.fields(mask))
        for one in inner:
            if isinstance(one, Mask):
                yield from _nodes(one)


def _refuse_traced(mask: Mask, function: Callable[..., Any], kind: str) -> str | None:
    """Return why a kernel cannot call a function of positions, or None."""
    at = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    try:
        # a new function each time: JAX remembers the traces of those that it has seen
        traced = jax.make_jaxpr(lambda q, k: function(q, k))(at, at)
    except Exception as error:  # what a user's function may raise
        return f"{mask!r} cannot be traced: {type(error).__name__}: {error}"
    if [x.dtype for x in traced.out_avals] != [jnp.bool_]:
        return f"takes {kind} that returns bool, {mask!r} returns another dtype"
    if traced.consts:
        return f"takes {kind} that reads positions only, {mask!r} reads other arrays"
    return None


def _four_axes(sees: jax.Array) -> jax.Array:
    return sees if sees.ndim == 4 else sees.reshape((1,) * (4 - sees.ndim) + sees.shape)


def _slice(x: jax.Array, axis: int, first: Any, full: int, size: int) -> jax.Array:
    """Return `size` of the `full` entries of an axis; an axis of another length as it is."""
    if x.shape[axis] != full or full == size:
        return x
    return lax.dynamic_slice_in_dim(x, first, size, axis)


def look_up(table: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return table[b, at] for positions [B or 1, ...], and which lie inside the table [B, S]."""
    inside = (at >= 0) & (at < table.shape[1])
    rows = jnp.broadcast_shapes(table.shape[:1], at.shape[:1])
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
    """Return array[b, n, q, k], False outside, by two takes: faster than a gather of elements."""
    q_inside, k_inside = (q >= 0) & (q < array.shape[2]), (k >= 0) & (k < array.shape[3])
    inside = q_inside[:, None, :, None] & k_inside[:, None, None, :]
    if 0 in array.shape[2:]:
        return inside

    def take(array: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:  # [N or 1, T', S']
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
    """Return positions as [B or 1, length]."""
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
    """Return an array as dtype[shape], anything else as its repr."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return repr(value)
