"""Masks in the form that kernels evaluate: integers for each query and key, and a program.

    Causal() & Segments(ids)    vectors q: positions, IDs    k: positions, IDs
                                visible: (k[0] >= 0) & ((k[0] <= q[0]) & (q[1] == k[1]))

The `sees` method of each mask combined with `&`, `|` and `~` is traced separately, for one pair.
Operations of any kind (such as a table lookup, a division, or floating-point arithmetic) that read
only the query or only the key are computed here and become a vector. Operations that read both
become the program. A `Dense` mask becomes one bit of an integer per pair.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.attention.block_plan import BlockPlan, Tiles, numpy_or_jax
from transformer_jax.kernels.contract import Refused
from transformer_jax.kernels.program import (
    SHAPES,
    Operand,
    Program,
    Range,
    ValueReader,
    bound,
    combined,
    number,
    type_of,
    write,
)
from transformer_jax.pytree import Array
from transformer_jax.sharding import no_mesh
from transformer_jax.tracing import concrete_value, eagerly, traced
from transformer_jax.values import short_repr

if TYPE_CHECKING:
    from transformer_jax.attention.mask import Mask

MATRICES = 8
"""Maximum number of `Dense` masks in one mask: the number of bits in an int8."""

NO_EMPTY_SLOT = combined("ge", Program((), ("k", 0)), number(0))


@short_repr
@dataclass
class MaskVectors:
    """Vectors of a mask, [B or 1, T] and [B or 1, S]. Vector 0 of each side contains the positions.

    A vector that differs between heads has the shape [B or 1, N, T] or [B or 1, N, S]. Kernels do
    not support such vectors.
    """

    q: list[Array]
    k: list[Array]
    positions_are_indices: bool
    """Whether positions are 0, 1, 2, ... If so, traces of `sees` treat them as known."""
    visible: Program = NO_EMPTY_SLOT
    matrices: list[jax.Array] = field(default_factory=list)
    """One array bool[B or 1, N or 1, T, S] for each `Dense` mask."""

    @classmethod
    def of(
        cls,
        mask: Mask,
        q_positions: jax.Array,  # i32[B or 1, T]
        k_positions: jax.Array,  # i32[B or 1, S]
        positions_are_indices: bool,
    ) -> MaskVectors:
        """Return the vectors of a mask, and the program that compares the entries of a pair."""
        vectors = cls([q_positions], [k_positions], positions_are_indices)
        seen = mask.comparison(vectors)
        if not isinstance(seen, Program):
            result = f"{mask!r}.comparison returned an object of type {type(seen).__name__}"
            raise TypeError(
                f"{result}: must be a Program, which the methods of its argument return"
            )
        # kernels read one row of integers for all heads of a batch row
        if any(x.ndim > 2 for x in (*vectors.q, *vectors.k)):
            raise Refused("supports only masks that are the same for every head, or Dense(array)")
        if len(vectors.matrices) > MATRICES:
            raise Refused(f"supports at most {MATRICES} Dense masks, not {len(vectors.matrices)}")
        # add this outside all masks, so that no `~` can make an empty slot visible
        vectors.visible = NO_EMPTY_SLOT & seen
        return vectors

    @property
    def q_positions(self) -> Array:  # i32[B or 1, T]
        return self.q[0]

    @property
    def k_positions(self) -> Array:  # i32[B or 1, S]
        return self.k[0]

    def key_holds(self, holds: jax.Array) -> Program:  # bool[B or 1, S]
        """Append a key vector and return the program that tests it."""
        return combined("ne", self._append("k", holds), number(0))

    def pair_holds(self, matrix: jax.Array) -> Program:  # bool[B or 1, N or 1, T, S]
        """Append a matrix with one entry per pair and return the program that tests it."""
        self.matrices.append(matrix)
        return Program((), ("pair", len(self.matrices) - 1))

    def sees(self, function: Callable[..., jax.Array]) -> Program:
        """Append the vectors that `function` (a mask's `sees`) reads and return its program.

        The function is traced for one pair per batch row, [B or 1, 1, 1, 1]. Raise `Refused` if it
        combines a query and a key with an operation that programs do not support.
        """
        at = []
        # in a `shard_map`, the trace must vary over the same axes as the positions
        for x in (self.q[0], self.k[0]):
            kind = None if isinstance(x, np.ndarray) else jax.typeof(x)
            varying: dict[str, Any] = {}
            if kind is not None and kind.manual_axis_type.varying:
                # JAX requires the mesh of the axes, too
                mesh = NamedSharding(kind.sharding.mesh, PartitionSpec())
                varying = {"manual_axis_type": kind.manual_axis_type, "sharding": mesh}
            at.append(jax.ShapeDtypeStruct((x.shape[0], 1, 1, 1), jnp.int32, **varying))
        in_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)
        # use `no_mesh`, because each operation would otherwise require the mesh of `jax.set_mesh`
        with contextlib.nullcontext() if in_shard_map else no_mesh():
            # define a new function each time, because JAX caches traces by function
            traced_mask = jax.make_jaxpr(lambda q, k: function(q, k))(*at)
        shape = (1, 1, 1, 1, *traced_mask.out_avals[0].shape)
        if shape[-2:] != (1, 1):
            raise Refused("supports only elementwise masks")
        known = _Sides(self)
        constants = [_Side("", x) for x in traced_mask.consts]
        (result,) = write(traced_mask.jaxpr, constants, known.positions, known)
        if isinstance(result, Program):
            return result
        value = known.read(result, traced_mask.out_avals[0].shape)
        return value if value.is_bool else combined("ne", value, number(0))

    def range_of(self, tiles: Tiles, operand: Operand) -> Range:
        """Return the lowest and highest integers of an operand in each tile."""
        side, index = operand
        if side == "pair":
            some, every = tiles.pairs(self.matrices[index])
            return every.astype(np.int32), some.astype(np.int32)
        vector = (self.q if side == "q" else self.k)[index]
        # known values become NumPy arrays, so that nothing is compiled
        return tiles.range(side, concrete_value(vector, vector))

    def block_plan(self, block_q: int, block_k: int) -> BlockPlan:
        """Classify the tiles of fused kernels by the program's bounds in each tile."""
        q, k = (concrete_value(x[0], x[0]) for x in (self.q, self.k))
        tiles = Tiles(q, k, block_q, block_k)
        every, some = self.visible.bounds(functools.partial(self.range_of, tiles))
        return BlockPlan(tiles.classes(some != 0, every != 0), block_q, block_k)

    def _append(self, side: str, vector: Array) -> Program:
        vectors = self.q if side == "q" else self.k
        vectors.append(vector.astype(np.int32))
        operand: Operand = side, len(vectors) - 1
        return Program((), operand)


@dataclass(frozen=True)
class _Side:
    """Value that depends only on the queries ("q"), only on the keys ("k"), or on neither ("").

    The array has an axis of queries or keys before the axes of the trace. It is `fixed` if it
    depends only on static values and not on arrays of the mask. A fixed value may become a number
    in the program.
    """

    side: str
    array: Array
    fixed: bool = False


class _Sides(ValueReader):
    """Reader of values that depend on one side. Values that a program reads become vectors."""

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
        self, equation: JaxprEqn, inputs: Sequence[_Side | Array | Program]
    ) -> list[_Side] | None:
        """Return the results of an operation, or None if it reads both a query and a key."""
        known = [
            x if isinstance(x, _Side) else _Side("", x, True)
            for x in inputs
            if not isinstance(x, Program)
        ]
        sides = {x.side for x in known} - {""}
        if len(sides) > 1 or len(known) < len(inputs):
            return None
        side, name = "".join(sides), equation.primitive.name
        fixed = all(x.fixed for x in known)
        outs = [type_of(x).shape for x in equation.outvars]
        arrays = [x.array for x in known]
        if name in SHAPES:
            before, after = type_of(equation.invars[0]).shape, outs[0]
            # A single value stays the same array, so positions remain the same vector even if a
            # mask adds axes of length 1.
            if before == after or np.prod(before) == np.prod(after) == 1:
                return [_Side(side, arrays[0], fixed)]
            array = _fit(known[0], before)
            first = array.shape[: bool(side)]
            if name != "broadcast_in_dim":
                return [_Side(side, array.reshape((*first, *after)), fixed)]
            between = [1] * len(after)
            for axis, size in zip(equation.params["broadcast_dimensions"], before, strict=True):
                between[axis] = size
            lib, array = numpy_or_jax(array), array.reshape((*first, *between))
            return [_Side(side, lib.broadcast_to(array, (*first, *after)), fixed)]
        # use NumPy for known values, so that nothing is compiled for a mask without arrays
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
        with eagerly(arrays):
            results = compute(*arrays)
        on_host = are_known and not traced(*results)  # NumPy does not support arrays of PRNG keys
        return [
            _Side(side, np.asarray(x) if on_host and not is_key else x, fixed)
            for x in results
            for is_key in [jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        ]

    def read(self, value: _Side | Array, shape: tuple[int, ...] = (), part: int = 0) -> Program:
        """Convert a value to a vector or a number and return the program that reads it."""
        value = value if isinstance(value, _Side) else _Side("", np.asarray(value), True)
        cached = self.read_before.get((id(value.array), part))
        if cached is not None:
            return cached[1]
        array = value.array
        # programs use 32-bit arithmetic, so 64-bit integers are read as two halves
        if array.dtype.itemsize > 4:
            array = array >> 32 if part else array & 0xFFFFFFFF
        if jnp.issubdtype(array.dtype, jnp.floating):
            raise Refused(f"supports only masks of 32-bit integers, not {array.dtype}")
        # only static values become numbers in the program, so that equal masks have equal programs
        if value.fixed and not traced(array) and (array == (first := array.ravel()[0])).all():
            return number(int(first.astype(np.int32)))
        vectors = self.vectors
        length = (vectors.k if value.side == "k" else vectors.q)[0].shape[1]
        if array.ndim - bool(value.side) != 4:
            array = _fit(dataclasses.replace(value, array=array), shape)
        inner = array.shape[bool(value.side) :]
        inner = (1,) * (4 - len(inner)) + inner
        if len(inner) != 4 or inner[2:] != (1, 1):
            raise Refused("supports only elementwise masks")
        lib = numpy_or_jax(array)
        rows = lib.broadcast_to(
            array.reshape(-1 if value.side else 1, *inner[:2]), (length, *inner[:2])
        )
        rows = lib.moveaxis(rows, 0, 2)
        result = vectors._append(value.side or "q", rows if inner[1] > 1 else rows[:, 0])
        # keep the array alive, so that its ID remains unique
        self.read_before[id(value.array), part] = value.array, result
        return result

    def halves(self, value: _Side | Array, shape: tuple[int, ...]) -> list[Program]:
        """Return the programs that read the lower and upper 32 bits of 64-bit integers."""
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
"""Operations that NumPy computes if all values are known, so nothing is compiled."""
_ELEMENTWISE = {*_NUMPY, "add", "sub", "mul", "min", "max", "select_n", "convert_element_type"}
"""Operations that support an extra axis without `vmap` if all arrays have it or are scalars."""


def _fit(value: _Side, shape: tuple[int, ...]) -> Array:
    """Return the array of a side in the shape that an operation expects after the first axis.

    The array either already has this shape, or is a single value that no shape operation has
    reshaped.
    """
    array, side = value.array, bool(value.side)
    first, inner = array.shape[:side], array.shape[side:]
    if inner == shape:
        return array
    lib = numpy_or_jax(array)
    return lib.broadcast_to(array.reshape((*first, *(1,) * len(shape))), (*first, *shape))
