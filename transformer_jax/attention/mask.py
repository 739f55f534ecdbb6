"""Base class of masks, and the operators `&`, `|` and `~` that combine masks.

A mask only needs to implement `sees`, and all other methods follow from it. The built-in masks are
in `masks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transformer_jax.attention.block_plan import BlockPlan, Tiles, numpy_or_jax
from transformer_jax.attention.mask_vectors import MATRICES, MaskVectors
from transformer_jax.checks import as_int32, check_count
from transformer_jax.kernels.contract import Index, Refused
from transformer_jax.kernels.program import Program
from transformer_jax.kernels.sharding import AxisNames
from transformer_jax.pytree import AnyArray, Array
from transformer_jax.sharding import no_mesh
from transformer_jax.tracing import concrete_value, eagerly
from transformer_jax.values import value_class

Pair = tuple[Index, Index]
"""Indices of a batch row and a head, either of which may be traced."""

OURS = __name__, "transformer_jax.attention.masks"
"""Modules whose mask classes do not need to be checked."""


class Mask:
    """Set of query-key pairs that may attend. Subclasses implement `sees`.

    Define a subclass as a frozen dataclass that is registered as a pytree. The other methods follow
    from `sees`, and you can override them with faster versions:

        lead            the number of batch rows and heads that differ; by default from `sees`
        leaf_axes       the axes of its arrays that are batch rows and heads; by default none
        comparison      the vectors and the program for a fused kernel; by default the trace of
                        `sees`
        some_and_every  the bounds in a tile, used only by "blockwise"; by default those of the
                        program, which all fused kernels use
        check_lengths   a check that arrays have an entry for each query and key; by default none
    """

    __slots__ = ()
    is_foreign: ClassVar[bool] = True
    """Whether `sees` may call code from outside this library."""
    reads_pairs: ClassVar[bool] = False
    """Whether a kernel needs one integer per pair for this mask."""

    # Methods that custom masks implement or override

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Return whether queries may attend to keys, as bool that broadcasts to [B, N, T, S].

        Args:
            q: i32[B or 1, 1, T, 1], the positions of the queries. Inside a fused kernel, the array
                may have any shape that broadcasts with k.
            k: i32[B or 1, 1, 1, S], the positions of the keys. Inside a fused kernel, the array may
                have any shape that broadcasts with q.
        """
        raise TypeError(f"{type(self).__name__} is a Mask without a method sees(self, q, k)")

    @property
    def lead(self) -> tuple[int, int]:
        """Return (B or 1, N or 1), the number of batch rows and heads that differ."""
        at = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.int32)
        bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), self)
        # use `no_mesh`, because operations would otherwise require the mesh of `jax.set_mesh`
        with no_mesh():
            sees = jax.eval_shape(lambda mask, q, k: mask.sees(q, k), bare, at, at)
        if sees.dtype != np.bool_ or len(sees.shape) > 4:
            result = f"{sees.dtype}[{', '.join(map(str, sees.shape))}]"
            raise ValueError(
                f"{type(self).__name__}.sees returned {result}: must be bool[B, N, T, S]"
            )
        rows, heads = ((1,) * (4 - len(sees.shape)) + sees.shape)[:2]
        return rows, heads

    def some_and_every(self, tiles: Tiles) -> tuple[Array, Array]:
        """Return whether any pair and whether every pair in each tile may attend.

        Both results are bool, broadcast to [B or 1, N or 1, nQ, nK], and ignore empty slots. They
        are conservative: if in doubt, `some` is True and `every` is False. This applies to all
        tiles of a mask without a program.
        """
        try:
            vectors = MaskVectors([tiles.q], [tiles.k], False)
            program = self.comparison(vectors)
        except Refused:
            return np.ones((1, 1, 1, 1), bool), np.zeros((1, 1, 1, 1), bool)
        every, some = program.bounds(partial(vectors.range_of, tiles))
        return some != 0, every != 0

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        """Return the axis names of each array: "b" for batch rows, "n" for heads, or None."""
        return tuple((None,) * jnp.ndim(x) for x in jax.tree.leaves(self))

    def comparison(self, vectors: MaskVectors) -> Program:
        """Append the mask's vectors for a fused kernel and return the mask's program."""
        return vectors.sees(self.sees)

    def check_lengths(self, T: int | None, S: int | None) -> None:
        """Raise ValueError if an array has no entry for some query or key.

        Without this check, such a query or key would be hidden silently. If the caller passes
        positions, an array may be shorter, and positions outside it are hidden.

        Args:
            T: the number of queries, at positions arange(T); None if the caller passes positions.
            S: the number of keys, at positions arange(S); None if the caller passes positions.
        """

    # Methods that follow from those above

    def part(self, first: Pair, full: tuple[int, int], size: tuple[int, int]) -> Mask:
        """Return the part of the mask for some of the batch rows and heads.

        The arrays are sliced along their `leaf_axes`, unless these already have length `size`. If
        no array has such axes, the result of `sees` is sliced instead.

        Args:
            first: the first row and the first head of the part, which may be traced.
            full: the total number of rows and heads.
            size: the number of rows and heads in the part.
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
        # a custom mask may index the rows itself, so its arrays cannot be sliced
        return self if self.lead == (1, 1) else PartOfMask(self, *first, full, size)

    def closed(self) -> Mask:
        """Convert the traced values that the mask's predicates read to leaves of the mask.

        A function with a custom derivative may read traced values only from its arguments.
        """
        open_ones = [x for x in nodes(self) if type(x).closed is not Mask.closed]
        found = {id(node): node.closed() for node in open_ones}
        close = lambda node: found.get(id(node), node)  # noqa: E731
        return jax.tree.map(close, self, is_leaf=lambda x: id(x) in found) if found else self

    @property
    def calls_user_code(self) -> bool:
        """Whether evaluating the mask calls code from outside this library."""
        return any(type(node).is_foreign for node in nodes(self))

    # Methods that callers use

    def materialize(
        self,
        q_positions: Array,  # i32[T] or [B, T]
        k_positions: Array,  # i32[S] or [B, S]
    ) -> jax.Array:  # bool[B or 1, N or 1, T, S]
        """Return the mask as an array, bool[B or 1, N or 1, T, S].

        Args:
            q_positions: i32[T] or [B, T].
            k_positions: i32[S] or [B, S]; a key at a negative position is an empty slot.

        Raises:
            ValueError: If shapes or dtypes do not match.
        """
        q, k = self._positions(q_positions, k_positions)
        return self.allows(jnp.asarray(q), jnp.asarray(k)) & (k >= 0)[:, None, None, :]

    def allows(
        self,
        q_positions: jax.Array,  # i32[B or 1, T]
        k_positions: jax.Array,  # i32[B or 1, S]
    ) -> jax.Array:  # bool[B or 1, N or 1, T, S]
        """Return bool[B or 1, N or 1, T, S], without checking arguments or hiding empty slots.

        Args:
            q_positions: i32[B or 1, T].
            k_positions: i32[B or 1, S].
        """
        sees = self.sees(q_positions[:, None, :, None], k_positions[:, None, None, :])
        # a mask that reads only keys, such as `Padding`, has one row for all queries
        lead = ((1,) * (4 - sees.ndim) + sees.shape)[:2]
        return jnp.broadcast_to(sees, (*lead, q_positions.shape[1], k_positions.shape[1]))

    def block_plan(
        self,
        q_positions: Array,  # i32[T] or [B, T]
        k_positions: Array,  # i32[S] or [B, S]
        *,
        block_q: int,
        block_k: int,
    ) -> BlockPlan:
        """Classify tiles as skipped, partial or full with `some_and_every`, for "blockwise".

        The result is conservative: a skipped tile is entirely False and a full tile is entirely
        True, but a partial tile may be either. The last tiles may extend beyond T and S. Keys
        beyond S count as empty slots, so such a tile is never full. Queries beyond T are ignored.
        If no value is traced, the plan is computed eagerly, even inside `jit`. Memory is O(T + S +
        tiles), except for `Dense`.

        Args:
            q_positions: i32[T] or [B, T].
            k_positions: i32[S] or [B, S].
            block_q: number of queries per tile, at least 1.
            block_k: number of keys per tile, at least 1.

        Raises:
            ValueError: If a block size is below 1, or if shapes or dtypes do not match.
        """
        for name, size in (("block_q", block_q), ("block_k", block_k)):
            check_count(name, size, 1)
        with eagerly(self, q_positions, k_positions):
            tiles = Tiles(*self._positions(q_positions, k_positions), block_q, block_k)
            return BlockPlan(tiles.classes(*self.some_and_every(tiles)), block_q, block_k)

    def _positions(self, q_positions: Array, k_positions: Array) -> tuple[Array, Array]:
        """Check positions and return them as [B or 1, length]. Known ones become NumPy arrays."""
        found, sizes = [], {"the mask": self.lead[0]}
        for name, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
            at = as_int32(name, positions)
            # NumPy arrays need no compilation, and only they remain known inside a trace
            known = concrete_value(at)
            at = jnp.asarray(at) if known is None else known
            if at.ndim not in (1, 2) or not jnp.issubdtype(at.dtype, jnp.integer):
                rule = "must be integers [length] or [B, length]"
                raise ValueError(f"{name} is {at.dtype}{at.shape}: {rule}")
            found.append(at[None] if at.ndim == 1 else at)
            sizes[name] = found[-1].shape[0]
        if len({size for size in sizes.values() if size != 1}) > 1:
            rows = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"batch rows must be equal or 1: {rows}")
        return found[0], found[1]

    def __and__(self, other: Mask) -> Mask:
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is neither true nor false: combine masks with &, | and ~, not with and, or "
            "and not; test for None with `mask is None`"
        )

    def __repr__(self) -> str:
        if not dataclasses.is_dataclass(self):
            return object.__repr__(self)
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        while values and values[-1] is None:
            values.pop()
        shown = (  # show only the dtype and shape of arrays
            f"{x.dtype}[{', '.join(map(str, x.shape))}]"
            if hasattr(x, "shape") and hasattr(x, "dtype")
            else repr(x)
            for x in values
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@value_class(arrays=("mask", "row", "head"), static=("full", "size"), repr=False, eq=False)
class PartOfMask(Mask):
    """Part of a mask for some rows and heads, sliced from its results instead of its arrays."""

    mask: Mask
    row: Index  # index of the first row
    head: Index  # index of the first head
    full: tuple[int, int]  # total number of rows and heads
    size: tuple[int, int]  # number of rows and heads in this part

    @property
    def lead(self) -> tuple[int, int]:
        sizes = zip(self.mask.lead, self.full, self.size, strict=True)
        rows, heads = (size if n == full else n for n, full, size in sizes)
        return rows, heads

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return self._cut(self.mask.sees(self._of_every_row(q), self._of_every_row(k)))

    def some_and_every(self, tiles: Tiles) -> tuple[Array, Array]:
        q, k = self._of_every_row(tiles.q), self._of_every_row(tiles.k)
        some, every = self.mask.some_and_every(Tiles(q, k, tiles.block_q, tiles.block_k))
        return self._cut(some), self._cut(every)

    def _of_every_row(self, positions: AnyArray) -> AnyArray | jax.Array:
        """Expand positions [size or 1, ...] to [full or 1, ...], with 0 in the other rows."""
        if positions.shape[0] == 1 or self.full[0] == self.size[0]:
            return positions
        zeros = jnp.zeros((self.full[0], *positions.shape[1:]), positions.dtype)
        return lax.dynamic_update_slice_in_dim(zeros, positions, self.row, 0)

    def _cut(self, result: AnyArray) -> AnyArray | jax.Array:
        part: AnyArray | jax.Array = four_axes(result)
        for axis, first in enumerate((self.row, self.head)):
            part = _slice(part, axis, first, self.full[axis], self.size[axis])
        return part


class _Pair(Mask):
    """Base class of masks that combine two masks."""

    __slots__ = ()
    is_foreign = False
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


@value_class(arrays=("left", "right"), repr=False)
class And(_Pair):
    """Pairs that both masks allow, for example Causal() & Window(2).

    # . . .
    # # . .
    . # # .
    . . # #
    """

    left: Mask
    right: Mask

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return self.left.sees(q, k) & self.right.sees(q, k)

    def some_and_every(self, tiles: Tiles) -> tuple[Array, Array]:
        # compute the bounds separately: if one mask has no program, the other may still exclude the
        # tile
        a_some, a_every = self.left.some_and_every(tiles)
        b_some, b_every = self.right.some_and_every(tiles)
        return a_some & b_some, a_every & b_every

    def comparison(self, vectors: MaskVectors) -> Program:
        return self.left.comparison(vectors) & self.right.comparison(vectors)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@value_class(arrays=("left", "right"), repr=False)
class Or(_Pair):
    """Pairs that at least one mask allows, for example Causal() | Prefix([2]).

    # # . .
    # # . .
    # # # .
    # # # #
    """

    left: Mask
    right: Mask

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return self.left.sees(q, k) | self.right.sees(q, k)

    def some_and_every(self, tiles: Tiles) -> tuple[Array, Array]:
        a_some, a_every = self.left.some_and_every(tiles)
        b_some, b_every = self.right.some_and_every(tiles)
        return a_some | b_some, a_every | b_every

    def comparison(self, vectors: MaskVectors) -> Program:
        return self.left.comparison(vectors) | self.right.comparison(vectors)

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@value_class(arrays=("mask",), repr=False)
class Not(Mask):
    """Pairs that a mask hides, for example ~Causal(). Empty slots remain hidden.

    . # # #
    . . # #
    . . . #
    . . . .
    """

    mask: Mask
    is_foreign = False

    @property
    def lead(self) -> tuple[int, int]:
        return self.mask.lead

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return self.mask.leaf_axes

    def part(self, first: Pair, full: tuple[int, int], size: tuple[int, int]) -> Mask:
        return Not(self.mask.part(first, full, size))

    def comparison(self, vectors: MaskVectors) -> Program:
        return ~self.mask.comparison(vectors)

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return ~self.mask.sees(q, k)

    def some_and_every(self, tiles: Tiles) -> tuple[Array, Array]:
        some, every = self.mask.some_and_every(tiles)
        # the rule about empty slots is applied later, so they remain hidden under ~
        return ~every, ~some

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


def check_mask(
    mask: Mask | None, B: int, N: int, T: int | None = None, S: int | None = None
) -> None:
    """Raise ValueError unless `mask` is None or a registered mask that matches the sizes.

    T is the number of queries, and S is the number of keys. They are None if the caller passes
    positions.
    """
    if mask is None:
        return
    if not isinstance(mask, Mask):
        if isinstance(mask, type):
            raise ValueError(f"mask is the class {mask.__name__}: must be an instance of it")
        kind = "a function" if callable(mask) else f"of type {type(mask).__name__}"
        kind = "an array" if isinstance(mask, jax.Array | np.ndarray) else kind
        rule = "use Dense(array) for an array [T, S], Padding(array) for one [B, S], "
        rule += "or Predicate(fn) for a function"
        if isinstance(mask, jax.Array | np.ndarray) and jnp.issubdtype(mask.dtype, jnp.floating):
            kind, rule = (
                f"{mask.dtype}{list(mask.shape)}",
                "to add it to the scores, use bias=array; if it contains only 0 and 1, use "
                "Dense(array > 0)",
            )
        raise ValueError(f"mask is {kind}: must be a Mask; {rule}")
    for node in nodes(mask):
        cls = type(node)
        if cls.__module__ in OURS:
            node.check_lengths(T, S)
            continue
        parameters = vars(cls).get("__dataclass_params__")
        # JAX treats objects of unregistered classes as leaves
        registered = not jax.tree_util.all_leaves([node])
        if parameters is None or not parameters.frozen or not registered:
            problem = "is not registered as a pytree" if parameters else "is not a frozen dataclass"
            problem = problem if parameters is None or parameters.frozen else "is not frozen"
            raise ValueError(
                f"{cls.__name__} {problem}: write @jax.tree_util.register_dataclass and "
                f"@dataclass(frozen=True) above class {cls.__name__}(Mask)"
            )
        # a subclass that overrides only `sees` would inherit the tiles and comparisons of its base
        # mask
        base = next(x for x in cls.__mro__ if x.__module__ in OURS and issubclass(x, Mask))
        if base is not Mask and cls.sees is not base.sees:
            rule = f"overrides {base.__name__}.sees and inherits the rest of {base.__name__}"
            raise ValueError(f"{cls.__name__} {rule}: derive it from Mask")
        node.check_lengths(T, S)
    rows, heads = mask.lead
    if rows not in (1, B) or heads not in (1, N):
        rule = f"query has {B} and {N}"
        raise ValueError(f"{mask!r} has {rows} batch rows and {heads} heads, but {rule}")


def refuse_mask(mask: Mask) -> str | None:
    """Return the reason why no kernel can evaluate a mask, or None.

    `MaskVectors` may still reject the mask later, when it is traced with the arrays of the call.
    """
    parts = list(nodes(mask))
    matrices = sum(part.reads_pairs for part in parts)
    if matrices > MATRICES:
        return f"supports at most {MATRICES} Dense masks, not {matrices}"
    if not any(type(part).is_foreign for part in parts):
        return None
    at = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def trial(mask: Mask, q: jax.Array, k: jax.Array) -> list[jax.Array]:
        vectors = MaskVectors.of(mask, q, k, False)
        return [*map(jnp.asarray, (*vectors.q, *vectors.k))]

    try:
        # define a new function `trial` for each call, because the values that a predicate reads may
        # have changed since a cached trace
        jax.eval_shape(trial, mask, at, at)
    except Refused as error:
        return f"{error}; the mask is {Mask.__repr__(mask)}"
    except Exception as error:  # a user's function may raise anything
        return f"{Mask.__repr__(mask)} cannot be traced: {type(error).__name__}: {error}"
    return None


def nodes(mask: Mask) -> Iterator[Mask]:
    """Yield a mask and, recursively, the masks that it combines."""
    yield mask
    for name in getattr(mask, "__dataclass_fields__", ()):
        one = getattr(mask, name)
        if isinstance(one, Mask):
            yield from nodes(one)


def four_axes(sees: AnyArray) -> AnyArray:
    """Return the result of `sees` with all four axes, [B or 1, N or 1, T or 1, S or 1]."""
    shape = (1,) * (4 - sees.ndim) + sees.shape
    return sees if sees.ndim == 4 else numpy_or_jax(sees).reshape(sees, shape)


def _slice(x: AnyArray, axis: int, first: Index, full: int, size: int) -> AnyArray | jax.Array:
    """Return `size` of the `full` entries of an axis. An axis of any other length is unchanged."""
    if x.shape[axis] != full or full == size:
        return x
    return lax.dynamic_slice_in_dim(x, first, size, axis)
