"""A mask as kernels evaluate it: integers per query, integers per key, and a program of both.

    Causal() & Segments(ids)    vectors q: positions, ids    k: positions, ids
                                visible: (k[0] >= 0) & ((k[0] <= q[0]) & (q[1] == k[1]))

The `sees` of each mask under `&`, `|` and `~` is traced alone, for one pair. What in it reads the
query alone, or the key alone, is computed here and becomes a vector, whatever it is: a look-up in a
table, a division, floats. What reads both is the program. A `Dense` mask is one bit of an integer
that each pair has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from transformer_jax.attention.block_plan import BlockPlan, Tiles, library_of
from transformer_jax.kernels.contract import Refused
from transformer_jax.kernels.program import (
    SHAPES,
    Known,
    Operand,
    Program,
    Range,
    bound,
    combined,
    number,
    type_of,
    write,
)
from transformer_jax.pytree import Array
from transformer_jax.sharding import no_mesh
from transformer_jax.tracing import at_once, known_value, traced
from transformer_jax.values import short_repr

if TYPE_CHECKING:
    from transformer_jax.attention.mask import Mask

MATRICES = 8
"""How many `Dense` masks one mask may hold: the bits of an integer."""

NO_EMPTY_SLOT = combined("ge", Program((), ("k", 0)), number(0))


@short_repr
@dataclass
class MaskVectors:
    """A mask's vectors, [B or 1, T] and [B or 1, S]; vector 0 of each is the positions.

    A vector that differs by head is [B or 1, N, T] or [B or 1, N, S]: kernels take none.
    """

    q: list[Array]
    k: list[Array]
    positions_are_indices: bool
    """Whether positions are 0, 1, 2 ..: then traces of `sees` take them as known."""
    visible: Program = NO_EMPTY_SLOT
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
        """Return the vectors of a mask, and the program that compares a query's with a key's."""
        vectors = cls([q_positions], [k_positions], positions_are_indices)
        seen = mask.comparison(vectors)
        if not isinstance(seen, Program):
            given = f"{mask!r}.comparison returned a {type(seen).__name__}"
            raise TypeError(f"{given}: must be a Program, as the methods of its argument return")
        # a kernel reads one row of integers for all heads of a batch row
        if any(x.ndim > 2 for x in (*vectors.q, *vectors.k)):
            raise Refused("takes a mask that is the same for every head, or Dense(array)")
        if len(vectors.matrices) > MATRICES:
            raise Refused(f"takes at most {MATRICES} Dense masks, not {len(vectors.matrices)}")
        # here, once for all masks: a `~` inside one must not show an empty slot
        vectors.visible = NO_EMPTY_SLOT & seen
        return vectors

    @property
    def q_positions(self) -> Array:  # i32[B or 1, T]
        return self.q[0]

    @property
    def k_positions(self) -> Array:  # i32[B or 1, S]
        return self.k[0]

    def key_holds(self, holds: jax.Array) -> Program:  # bool[B or 1, S]
        """Append a vector of the keys; return the program that asks whether it is true."""
        return combined("ne", self._append("k", holds), number(0))

    def pair_holds(self, matrix: jax.Array) -> Program:  # bool[B or 1, N or 1, T, S]
        """Append a matrix; return the program that asks whether it is true of a pair."""
        self.matrices.append(matrix)
        return Program((), ("pair", len(self.matrices) - 1))

    def sees(self, function: Callable[..., jax.Array]) -> Program:
        """Append what `function(q, k)`, a mask's `sees`, reads of each side; return its program.

        It is traced for one pair of each batch row, [B or 1, 1, 1, 1]. Refused where it computes of
        a query and a key together what no program does.
        """
        at = []
        # in a `shard_map` the trace must vary as they do
        for x in (self.q[0], self.k[0]):
            axes = None if isinstance(x, np.ndarray) else jax.typeof(x).manual_axis_type
            varying = {"manual_axis_type": axes} if axes is not None and axes.varying else {}
            at.append(jax.ShapeDtypeStruct((x.shape[0], 1, 1, 1), jnp.int32, **varying))
        # the axes of a `shard_map`
        inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
        # without it each operation would insist on the mesh of `jax.set_mesh`
        with contextlib.nullcontext() if inside else no_mesh():
            # a new function each time: JAX remembers the traces of those that it has seen
            found = jax.make_jaxpr(lambda q, k: function(q, k))(*at)
        shape = (1, 1, 1, 1, *found.out_avals[0].shape)
        if shape[-2:] != (1, 1):
            raise Refused("takes a mask that is elementwise")
        known = _Sides(self)
        constants = [_Side("", x) for x in found.consts]
        (result,) = write(found.jaxpr, constants, known.positions, known)
        if isinstance(result, Program):
            return result
        value = known.read(result, found.out_avals[0].shape)
        return value if value.is_bool else combined("ne", value, number(0))

    def range_of(self, tiles: Tiles, operand: Operand) -> Range:
        """Return the lowest and the highest integer of each tile."""
        side, index = operand
        if side == "pair":
            some, every = tiles.pairs(self.matrices[index])
            return every.astype(np.int32), some.astype(np.int32)
        return tiles.range(side, _known_first((self.q if side == "q" else self.k)[index]))

    def block_plan(self, block_q: int, block_k: int) -> BlockPlan:
        """Return which tiles fused kernels skip and mask, by the program's bounds in each one."""
        tiles = Tiles(_known_first(self.q[0]), _known_first(self.k[0]), block_q, block_k)
        every, some = self.visible.bounds(functools.partial(self.range_of, tiles))
        return BlockPlan(tiles.classes(some != 0, every != 0), block_q, block_k)

    def pairs(self) -> jax.Array | None:  # i8[B or 1, N or 1, T, S]
        """Return the matrices as bits of one, if there are any."""
        bits = (matrix.astype(jnp.int8) << bit for bit, matrix in enumerate(self.matrices))
        return functools.reduce(jnp.bitwise_or, bits) if self.matrices else None

    def _append(self, side: str, vector: Array) -> Program:
        vectors = self.q if side == "q" else self.k
        vectors.append(vector.astype(np.int32))
        operand: Operand = side, len(vectors) - 1
        return Program((), operand)


@dataclass(frozen=True)
class _Side:
    """A value that a trace made of the queries only ("q"), the keys only ("k") or neither ("").

    The array has an axis of queries or keys in front of the trace's, which are short. It is `fixed`
    where it follows from static values, and no array of the mask: then it may be a number of the
    program.
    """

    side: str
    array: Array
    fixed: bool = False


class _Sides(Known):
    """The values that read one side of a pair; those that a program reads become vectors."""

    def __init__(self, vectors: MaskVectors) -> None:
        self.vectors = vectors
        self.positions = []
        for side, x in (("q", vectors.q[0]), ("k", vectors.k[0])):
            known = np.arange(x.shape[1], dtype=np.int32)[None]
            at = known if vectors.positions_are_indices else x
            fixed = vectors.positions_are_indices
            self.positions.append(_Side(side, at.T[:, :, None, None, None], fixed))
        self.read_before: dict[tuple[int, int], tuple[Array, Program]] = {
            (id(x.array), 0): (x.array, Program((), (x.side, 0))) for x in self.positions
        }

    def evaluate(
        self, equation: JaxprEqn, given: Sequence[_Side | Array | Program]
    ) -> list[_Side] | None:
        """Return the results of an operation, unless it reads a query and a key."""
        known = [
            x if isinstance(x, _Side) else _Side("", x, True)
            for x in given
            if not isinstance(x, Program)
        ]
        sides = {x.side for x in known} - {""}
        if len(sides) > 1 or len(known) < len(given):
            return None
        side, name = "".join(sides), equation.primitive.name
        fixed = all(x.fixed for x in known)
        outs = [type_of(x).shape for x in equation.outvars]
        arrays = [x.array for x in known]
        if name in SHAPES:
            return [_Side(side, _reshaped(known[0], equation), fixed)]
        # NumPy as long as all is known: a mask without arrays compiles nothing
        if name in _NUMPY and all(isinstance(x, np.ndarray) for x in arrays):
            fitted = [_fit(x, outs[0]) for x in known]
            return [_Side(side, np.asarray(_NUMPY[name](*fitted)), fixed)]
        shapes = [type_of(atom).shape for atom in equation.invars]
        arrays = [_fit(*pair) for pair in zip(known, shapes, strict=True)]
        compute = lambda *arrays: bound(equation, arrays)  # noqa: E731
        pairs = zip(known, shapes, strict=True)
        alike = all((x.side == side) == (shape != ()) for x, shape in pairs)
        if side and not (alike and name in _ELEMENTWISE):
            compute = jax.vmap(compute, [0 if x.side else None for x in known])
        are_known = not traced(*arrays)
        with at_once(arrays):
            results = compute(*arrays)
        on_host = are_known and not traced(*results)  # NumPy has no array of keys of random numbers
        return [
            _Side(side, np.asarray(x) if on_host and not is_key else x, fixed)
            for x in results
            for is_key in [jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        ]

    def read(self, value: _Side | Array, shape: tuple[int, ...] = (), part: int = 0) -> Program:
        """Return the program that reads a side's values, which become a vector, or a number."""
        value = value if isinstance(value, _Side) else _Side("", np.asarray(value), True)
        before = self.read_before.get((id(value.array), part))
        if before is not None:
            return before[1]
        array = value.array
        # steps are of 32 bits: 64 are read as two halves
        if array.dtype.itemsize > 4:
            array = array >> 32 if part else array & 0xFFFFFFFF
        if jnp.issubdtype(array.dtype, jnp.floating):
            raise Refused(f"takes masks of integers of 32 bits, not {array.dtype}")
        # one number for all, of structure alone: equal masks keep equal programs
        if value.fixed and not traced(array) and (array == (first := array.ravel()[0])).all():
            return number(int(first.astype(np.int32)))
        vectors = self.vectors
        length = (vectors.k if value.side == "k" else vectors.q)[0].shape[1]
        if array.ndim - bool(value.side) != 4:
            array = _fit(dataclasses.replace(value, array=array), shape)
        inner = array.shape[bool(value.side) :]
        inner = (1,) * (4 - len(inner)) + inner
        if len(inner) != 4 or inner[2:] != (1, 1):
            raise Refused("takes a mask that is elementwise")
        lib = library_of(array)
        rows = lib.broadcast_to(
            array.reshape(-1 if value.side else 1, *inner[:2]), (length, *inner[:2])
        )
        rows = lib.moveaxis(rows, 0, 2)
        found = vectors._append(value.side or "q", rows if inner[1] > 1 else rows[:, 0])
        self.read_before[id(value.array), part] = value.array, found
        return found

    def halves(self, value: _Side | Array, shape: tuple[int, ...]) -> list[Program]:
        """Return the programs that read the lower and the upper 32 bits of integers of 64."""
        return [self.read(value, shape, part) for part in (0, 1)]


_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
}
"""Operations that NumPy computes where all values are known: nothing is compiled for them."""
_ELEMENTWISE = {*_NUMPY, "add", "sub", "mul", "min", "max", "select_n", "convert_element_type"}
"""Operations that take one more axis without `vmap`, if all arrays have it or are scalars."""


def _fit(value: _Side, shape: tuple[int, ...]) -> Array:
    """Return a side's array with the shape that an operation wants, after its own first axis.

    It has that shape, or is one value: `_reshaped` leaves the shape of one value as it is.
    """
    array, side = value.array, bool(value.side)
    first, inner = array.shape[:side], array.shape[side:]
    if inner == shape:
        return array
    lib = library_of(array)
    return lib.broadcast_to(array.reshape((*first, *(1,) * len(shape))), (*first, *shape))


def _reshaped(value: _Side, equation: JaxprEqn) -> Array:
    """Return a side's array after an operation on shapes; the array itself where it is one value.

    So positions stay the vector that they are, whatever axes of length 1 a mask gives them.
    """
    before, after = type_of(equation.invars[0]).shape, type_of(equation.outvars[0]).shape
    if before == after or np.prod(before) == np.prod(after) == 1:
        return value.array
    array = _fit(value, before)
    first = array.shape[: bool(value.side)]
    if equation.primitive.name != "broadcast_in_dim":
        return array.reshape((*first, *after))
    between = [1] * len(after)
    for axis, size in zip(equation.params["broadcast_dimensions"], before, strict=True):
        between[axis] = size
    lib = library_of(array)
    return lib.broadcast_to(array.reshape((*first, *between)), (*first, *after))


def _known_first(x: Array) -> Array:
    """Return an array's value as NumPy's where it is known, so that nothing is compiled."""
    known = known_value(x)
    return x if known is None else known
