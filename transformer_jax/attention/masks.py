"""Attention masks that are functions of positions, not of array indices.

A mask is a frozen pytree. Its arrays are leaves and may be traced. Its numbers and structure are
static. True means "may attend". Combine masks with `&`, `|` and `~`:

    Causal() & Window(4096)              a sliding window
    Causal() | Prefix(lengths)           a prefix language model
    Causal() & Segments(ids)             packed documents
    Padding(valid)                       a batch of unequal lengths in an encoder

Each mask below is drawn for positions 0..3, with queries in rows and keys in columns:

              keys
             0 1 2 3
           0 # . . .       # may attend
    queries 1 # # . .       . may not
           2 # # # .
           3 # # # #

A key at a negative position is an empty slot. No query attends to an empty slot, not even under
`~`: every implementation adds this rule. Positions outside a mask's array are hidden. Positions,
IDs and lengths may have any integer dtype. A known value that does not fit in int32 raises
ValueError.

To write your own mask, see docs/own_mask_and_bias.md.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from transformer_jax.attention.block_plan import Tiles
from transformer_jax.attention.mask import And, Mask, Not, Or, four_axes
from transformer_jax.attention.mask_vectors import MaskVectors
from transformer_jax.checks import INT32, check_int32
from transformer_jax.kernels.program import Program
from transformer_jax.kernels.sharding import TILES, AxisNames
from transformer_jax.pytree import Array
from transformer_jax.sharding import no_mesh
from transformer_jax.tracing import are_concrete
from transformer_jax.values import value_class

__all__ = [
    "And",
    "Causal",
    "Dense",
    "Everything",
    "Mask",
    "Not",
    "Or",
    "Padding",
    "Predicate",
    "Prefix",
    "Segments",
    "Window",
]


class _BuiltinMask(Mask):
    """Base class of the masks in this module that do not call user code."""

    __slots__ = ()
    is_foreign = False


@value_class(arrays=(), repr=False)
class Everything(_BuiltinMask):
    """Mask that lets every query see every key except empty slots, as `mask=None` does.

    # # # #
    # # # #
    # # # #
    # # # #
    """

    lead = 1, 1

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.ones((1, 1, 1, 1), bool)


@value_class(arrays=(), repr=False)
class Causal(_BuiltinMask):
    """Mask that lets a query see its own position and earlier positions: k <= q.

    # . . .
    # # . .
    # # # .
    # # # #
    """

    lead = 1, 1

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        return k <= q


@value_class(static=("left", "right"), repr=False)
class Window(_BuiltinMask):
    """Mask that lets a query see nearby keys: q - k < left, and k - q < right.

    Each side includes the query's own position, so 0 hides that position and the entire side.

        Window(2)      # # # #      Window(2, 2)   # # . .
                       # # # #                     # # # .
                       . # # #                     . # # #
                       . . # #                     . . # #

    Attributes:
        left: number of visible keys up to and including the query's position, at least 0; None
            means no limit.
        right: number of visible keys from the query's position on, at least 0; None means no limit.

    Raises:
        ValueError: If both limits are None, or if a limit is negative or not an integer.
    """

    left: int | None
    right: int | None = None
    lead = 1, 1

    def __post_init__(self) -> None:
        if self.left is None and self.right is None:
            raise ValueError("Window(None, None) has no bound: pass left or right")
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is None:
                continue
            try:
                number = -1 if isinstance(value, bool) else operator.index(value)
            except TypeError:  # a float, an array, or a traced value
                number = -1
            if isinstance(value, jax.core.Tracer):
                raise ValueError(
                    f"Window: {name} is traced, but must be static, because a window is part of "
                    "the "
                    "program; Predicate(lambda q, k: q - k < left) may read arrays"
                )
            if number < 0:
                raise ValueError(f"Window: {name} is {value!r}: must be an integer of at least 0")
            object.__setattr__(self, name, number)

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        if self.left is not None and self.right is not None and self.left + self.right < 2:
            return jnp.zeros((1, 1, 1, 1), bool)
        # clip to int32: q - k is at most 2^31 - 1
        sides = [] if self.left is None else [q - k <= min(self.left - 1, INT32.max)]
        sides += [] if self.right is None else [q - k >= max(1 - self.right, INT32.min)]
        return sides[0] if len(sides) == 1 else sides[0] & sides[1]


@value_class(arrays=("valid",), repr=False, eq=False)
class Padding(_BuiltinMask):
    """Mask for a padded batch. Queries of row b see key k if valid[b, k] is True.

    Padding([[True, True, True, False]])

    # # # .
    # # # .
    # # # .
    # # # .

    Attributes:
        valid: bool[B, S], with False for padding.

    Raises:
        ValueError: If `valid` is not an array of this shape and dtype.
    """

    valid: jax.Array  # bool[B, S]
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _check("Padding", "valid", self.valid, "bool[B, S]", (2,), np.bool_)

    @property
    def lead(self) -> tuple[int, int]:
        return self.valid.shape[0], 1

    def check_lengths(self, T: int | None, S: int | None) -> None:
        _check_length("Padding", "valid", self.valid, "keys", S)

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        valid, inside = look_up(self.valid, k)
        return valid & inside

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return (("b", None),)


@value_class(arrays=("q_ids", "k_ids"), repr=False, eq=False)
class Segments(_BuiltinMask):
    """Mask that lets a query see only keys in its own document: q_ids[b, q] == k_ids[b, k].

    Segments([[1, 1, 1, 2]])

    # # # .
    # # # .
    # # # .
    . . . #

    Attributes:
        q_ids: i32[B, T], the document of each query.
        k_ids: i32[B, S], the document of each key; None means the same as `q_ids`.

    Raises:
        ValueError: If an argument is not an array of this shape and dtype, or if the numbers of
            rows differ.
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
                raise ValueError(f"Segments: q_ids has {rows[0]} rows, but k_ids has {rows[1]}")

    @property
    def lead(self) -> tuple[int, int]:
        return self.q_ids.shape[0], 1

    def check_lengths(self, T: int | None, S: int | None) -> None:
        _check_length("Segments", "q_ids", self.q_ids, "queries", T)
        if self.k_ids is None:
            _check_length("Segments", "q_ids, used for the keys too,", self.q_ids, "keys", S)
        else:
            _check_length("Segments", "k_ids", self.k_ids, "keys", S)

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        q_ids, q_inside = look_up(self.q_ids, q)
        k_ids, k_inside = look_up(self.q_ids if self.k_ids is None else self.k_ids, k)
        return (q_ids == k_ids) & q_inside & k_inside

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return (("b", None),) * (1 if self.k_ids is None else 2)


@value_class(arrays=("lengths",), repr=False, eq=False)
class Prefix(_BuiltinMask):
    """Mask that lets every query see the first keys of its row: k < lengths[b].

    Use Causal() | Prefix(lengths) for a prefix language model.

    Prefix([2])

    # # . .
    # # . .
    # # . .
    # # . .

    Attributes:
        lengths: i32[B], the number of keys in the prefix of each row.

    Raises:
        ValueError: If `lengths` is not an array of this shape and dtype.
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

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return (("b",),)


@value_class(arrays=("array",), repr=False, eq=False)
class Dense(_BuiltinMask):
    """Mask given by a bool array that is indexed by positions: array[b, n, q, k].

    Planning the tiles reads the whole array. An array [B or 1, 1, 1, S] or [B or 1, 1, T, 1] needs
    only O(T + S) memory, like `Padding`.

    Dense(numpy.eye(4, dtype=bool))

    # . . .
    . # . .
    . . # .
    . . . #

    Attributes:
        array: bool[B or 1, N or 1, T or 1, S or 1], or only the last two axes. Axes of length 1 are
            broadcast. Positions outside a longer axis are hidden. If you do not pass positions,
            more queries or keys than entries raise an error.

    Raises:
        ValueError: If `array` is not an array of this shape and dtype.
    """

    array: jax.Array  # bool[B or 1, N or 1, T or 1, S or 1], or its last two axes
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _check("Dense", "array", self.array, "bool[T, S] or bool[B, N, T, S]", (2, 4), np.bool_)

    @property
    def lead(self) -> tuple[int, int]:
        return (1, 1) if len(self.array.shape) == 2 else (self.array.shape[0], self.array.shape[1])

    @property
    def reads_pairs(self) -> bool:  # type: ignore[override]
        # without a head axis, an array of one row or column is a vector of keys or queries
        return self.lead[1] != 1 or 1 not in self.array.shape[-2:]

    @property
    def leaf_axes(self) -> tuple[AxisNames, ...]:
        return (TILES if self.array.ndim == 4 else (None, None),)

    def check_lengths(self, T: int | None, S: int | None) -> None:
        for axis, (what, count) in enumerate((("queries", T), ("keys", S)), start=-2):
            if self.array.shape[axis] != 1:
                _check_length("Dense", "array", self.array, what, count, axis)

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        array = self.array if self.array.ndim == 4 else self.array[None, None]
        if not self.reads_pairs:
            table = array[:, 0].reshape(array.shape[0], -1)
            at, other = (k, q) if array.shape[2] == 1 else (q, k)
            if table.shape[1] == 1:
                return table[:, :, None, None] & (at >= 0) & (other >= 0)
            seen, inside = look_up(table, at)
            return seen & inside & (other >= 0)
        q, k = q[:, 0, :, 0], k[:, 0, 0]
        q_inside, k_inside = (
            (at >= 0) & ((at < length) | (length == 1))
            for at, length in zip((q, k), array.shape[2:], strict=True)
        )
        inside = q_inside[:, None, :, None] & k_inside[:, None, None, :]
        if 0 in array.shape[2:]:
            return inside

        # gathering whole rows and then columns is faster than gathering elements
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

    def comparison(self, vectors: MaskVectors) -> Program:
        if not self.reads_pairs:
            return vectors.sees(self.sees)
        q, k = vectors.q_positions, vectors.k_positions
        lengths = q.shape[1], k.shape[1]
        # the array itself is the matrix, so no lookup is necessary
        if vectors.positions_are_indices and self.array.shape[-2:] == lengths:
            return vectors.pair_holds(jnp.asarray(self.array).reshape(*self.lead, *lengths))
        return vectors.pair_holds(self.materialize(q, k))


@value_class(static=("fn",), repr=False)
class Predicate(Mask):
    """Mask defined by a function of query and key positions.

    Hidden tiles are skipped if the function combines the query and key positions only with integer
    operations and does not use the pair to index an array.

    Predicate(lambda q, k: (q - k) % 2 == 0)

    # . # .
    . # . #
    # . # .
    . # . #

    Attributes:
        fn: function of positions [..., T, 1] and [..., 1, S] that returns an elementwise bool
            result. It may read other arrays, even traced ones, with shape [B, 1, 1, 1] for values
            per row or [1, N, 1, 1] for values per head.

    Raises:
        ValueError: If `fn` is not callable or does not return bool.
    """

    fn: Callable[[jax.Array, jax.Array], jax.Array]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"Predicate: fn is {self.fn!r}: must be callable")
        if inspect.isfunction(self.fn):
            # the parameters of a wrapper may differ from those of the wrapped function
            signature = inspect.signature(self.fn, follow_wrapped=False)
            try:
                signature.bind(None, None)
            except TypeError:
                raise ValueError(
                    f"Predicate: fn is {self.fn.__name__}{signature}: must take two arguments, the "
                    "positions of queries and keys; for rows or heads, let it read arrays "
                    "[B, 1, 1, 1] or [1, N, 1, 1]"
                ) from None

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        # `lambda q, k: True` returns a Python bool
        sees = jnp.asarray(self.fn(q, k))
        if sees.dtype != np.bool_:
            raise ValueError(f"Predicate: fn returned {sees.dtype}: must be bool")
        return sees

    def closed(self) -> Mask:
        at = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.int32)
        # without `no_mesh`, each operation would require the mesh of `jax.set_mesh`
        with no_mesh():
            traced = jax.make_jaxpr(lambda q, k: self.sees(q, k))(at, at)
        if not any(isinstance(x, jax.core.Tracer) for x in traced.consts):
            return self
        return TracedPredicate(tuple(traced.consts), traced.jaxpr, self.sees)


@value_class(arrays=("constants",), static=("jaxpr", "as_written"), repr=False, eq=False)
class TracedPredicate(Mask):
    """`Predicate` traced for one pair, with the arrays that it reads as leaves."""

    constants: tuple[jax.Array, ...]
    jaxpr: Jaxpr
    as_written: Callable[[jax.Array, jax.Array], jax.Array]

    def sees(self, q: jax.Array, k: jax.Array) -> jax.Array:
        of_one = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, self.constants))
        at = lambda position: jnp.reshape(position, (1, 1, 1, 1))  # noqa: E731
        seen = self.jaxpr.outvars[0].aval
        assert isinstance(seen, jax.core.ShapedArray)
        if seen.shape == (1, 1, 1, 1):
            return jnp.vectorize(lambda q, k: of_one(at(q), at(k))[0].reshape(()))(q, k)

        @partial(jnp.vectorize, signature="(),()->(b,n)")
        def of_rows_and_heads(q: jax.Array, k: jax.Array) -> jax.Array:
            return four_axes(of_one(at(q), at(k))[0])[:, :, 0, 0]

        found = of_rows_and_heads(q[:, 0], k[:, 0])  # [rows of positions, T, S, B or 1, N or 1]
        if found.shape[0] > 1 and found.shape[3] > 1:  # each row has its own positions and arrays
            found = jnp.diagonal(found, axis1=0, axis2=3)  # [T, S, N or 1, B]
            return jnp.transpose(found, (3, 2, 0, 1))
        rows = found[:, ..., 0, :] if found.shape[3] == 1 else jnp.moveaxis(found[0], 2, 0)
        return jnp.moveaxis(rows, 3, 1)

    def comparison(self, vectors: MaskVectors) -> Program:
        if self.lead == (1, 1):
            return super().comparison(vectors)
        # only fused kernels call this method, before differentiation, so the predicate may read
        # tracers
        return vectors.sees(self.as_written)

    def some_and_every(self, tiles: Tiles) -> tuple[Array, Array]:
        if self.lead == (1, 1):
            return super().some_and_every(tiles)
        return np.ones((1, 1, 1, 1), bool), np.zeros((1, 1, 1, 1), bool)  # all tiles are partial


def causal_window(mask: Mask) -> tuple[bool, int | None] | None:
    """Return (is causal, window or None) if the mask is Causal, Window(left) or both, else None."""
    match mask:
        case Everything() | Causal():
            return isinstance(mask, Causal), None
        case Window(left=left, right=None) if left:
            return False, left
        case And():
            one, two = causal_window(mask.left), causal_window(mask.right)
            if one is not None and two is not None:
                widths = [width for _, width in (one, two) if width is not None]
                return one[0] or two[0], min(widths, default=None)
    return None


def look_up(table: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return table[b, at] for positions [B or 1, ...], and whether each one is within [B, S]."""
    inside = (at >= 0) & (at < table.shape[1])
    rows = jnp.broadcast_shapes(table.shape[:1], at.shape[:1])
    if table.shape[1] == 0:  # there is no entry to clip to
        return jnp.zeros(rows + at.shape[1:], table.dtype), inside
    # positions outside the table read the nearest entry, so they do not widen a tile's bounds
    index = jnp.clip(at, 0, table.shape[1] - 1).reshape(at.shape[0], -1)
    found = jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")
    return found.reshape(rows + at.shape[1:]), inside


def _check_length(
    mask: str, name: str, array: Array, what: str, count: int | None, axis: int = -1
) -> None:
    """Raise ValueError if an array has too few entries for the queries or keys."""
    length = array.shape[axis]
    if count is None or not are_concrete(length, count) or length >= count:
        return
    axis_name, positions = {"queries": ("T", "q_positions"), "keys": ("S", "k_positions")}[what]
    raise ValueError(
        f"{mask}: {name} has length {length} for {count} {what}: {axis_name} must be at least "
        f"{count}, unless you pass {positions}"
    )


def _check(
    mask: str, name: str, value: Array, wanted: str, ranks: tuple[int, ...], kind: type
) -> None:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise ValueError(
            f"{mask}: {name} is of type {type(value).__name__}: must be an array {wanted}"
        )
    if len(shape) not in ranks or not jnp.issubdtype(dtype, kind):
        raise ValueError(f"{mask}: {name} is {dtype}{tuple(shape)}: must be {wanted}")
    if kind is np.integer:
        check_int32(f"{mask}: {name}", value)
