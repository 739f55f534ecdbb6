"""Scores of a tile, with softcap, bias, slopes, mask and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from transformer_jax.kernels.contract import (
    LOWEST,
    Index,
    Operands,
    Problem,
    Residuals,
    out_dtype,
)
from transformer_jax.kernels.dropout import mix, threshold
from transformer_jax.kernels.nvidia.memory import (
    COLUMN,
    ROW,
    ROWS,
    WGMMA,
    Ref,
    Scratch,
    across,
    at,
    f32,
    fence,
    filled,
    i32,
    load,
    load_along,
)

COPIED = 4  # maximum number of mask vectors copied with a tile; others are read from memory
HARDWARE_TANH = 64.0  # highest softcap that uses the hardware's tanh
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

Shape = tuple[int, ...]  # shape of a tile
Differentiate = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""Function that computes ds and du of a tile from do . v and D."""


class TilePosition(NamedTuple):
    """Position of a tile, and the mask vectors of its rows and columns (None if not read)."""

    b: Index
    n: Index
    q0: Index  # the first query
    k0: Index  # the first key
    rows: tuple[jax.Array | None, ...] = ()  # i32[rows], in registers
    columns: tuple[Ref | None, ...] = ()  # to i32[columns], in shared memory if copied
    slopes: jax.Array | None = None  # f32[rows] for ALiBi, if the rows belong to several heads


class TileRows(NamedTuple):
    """Rows that a warpgroup keeps for all tiles in a list (keys for dk and dv, else queries)."""

    b: Index
    head: Index  # of queries, or of keys
    start: Index  # the first query or key
    vectors: tuple[jax.Array | None, ...]  # vectors of the mask
    row: Index = 0  # row of tiles in the lists
    base: Any = None  # f32[ROWS], for queries in a backward kernel
    D: Any = None  # f32[ROWS], for queries in a backward kernel


def is_linear(problem: Problem, operands: Operands) -> bool:
    """Whether a score is the product times a positive number, which needs one FMA before exp2."""
    return (
        problem.softcap is None
        and operands.bias is None
        and operands.slopes is None
        and problem.scale > 0
    )


def score_unit(problem: Problem, operands: Operands) -> float:
    """Return the factor that converts the result of `scores` to base 2."""
    return problem.scale * LOG2E if is_linear(problem, operands) else 1.0


def scores(
    problem: Problem,
    operands: Operands,  # references to memory
    raw: jax.Array,  # [rows, columns], q . k
    position: TilePosition,
    q_axis: int,  # the axis of the tile's queries
    partial: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the scores divided by `score_unit`, and the tanh in the softcap."""
    s, tanh = raw, None
    if problem.softcap is not None:
        tanh = _softcap_tanh(problem.scale, problem.softcap, raw, operands.query.dtype)
        s = tanh * (problem.softcap * LOG2E)
    elif not is_linear(problem, operands):
        s = raw * (problem.scale * LOG2E)
    if operands.bias is not None:
        bias = _load_pairs(operands.bias, position, raw.shape, q_axis).astype(f32)
        # the lowest finite number, which some callers use as a mask, must remain finite
        s = s + jnp.where(bias == -jnp.inf, -jnp.inf, jnp.maximum(bias * LOG2E, LOWEST))
    if operands.slopes is not None:
        # one slope for the head of the tile, or one for each of its rows
        if position.slopes is None:
            slope = at(operands.slopes, position.b, position.n)[...]
        else:
            slope = across(position.slopes, raw)
        s = s - distance(position, raw.shape) * (slope * LOG2E)
    # the code for full tiles does not evaluate a mask
    if partial and problem.visible is not None:
        s = jnp.where(visible_pairs(problem, operands, position, raw.shape, q_axis), s, -jnp.inf)
    return s, tanh


def _softcap_tanh(scale: float, softcap: float, raw: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return tanh(scale raw / softcap), with the hardware's instruction for bfloat16 inputs.

    The instruction is `tanh.approx.f32` (PTX ISA), which has a relative error of at most 2^-11. The
    error of a score s is at most |s| 2^-11, which is also the relative error of its weight. The
    error is 0.1 % at s = 2, 1 % at s = 20, and 2.4 % at s = 50. Rounding q and k to bfloat16 has a
    relative error of 2^-8 each. For scores with a standard deviation of 1 and H = 128, the rounding
    changes scores by 0.0023 (root mean square). This tanh changes them by less than 0.0005, almost
    independently of the softcap, from 20 to 50. The error of tanh dominates only if most weight is
    on scores far beyond the cap, where errors of q and k have no effect. In this case, tanh changes
    an output by up to 1 % (softcap 20) or 2 % (softcap 50), and rounding the inputs changes it by
    0.4 %.

    For float16, the rounding error is 2^-11, which changes scores by 0.0003. The error of tanh
    would dominate, so float16 uses the exact form. The exact form is also used for softcaps whose
    scores could have errors of more than 1/32.
    """
    if dtype == jnp.bfloat16 and softcap <= HARDWARE_TANH:
        return _hardware_tanh(raw * (scale / softcap))
    # exp2 and rsqrt are accurate to 22 bits, and rsqrt is one instruction
    grown = 1.0 + jnp.exp2(raw * (2 * LOG2E * scale / softcap))
    tanh = 1.0 - 2.0 * lax.rsqrt(grown * grown)
    # a large softcap multiplies the rounding error, so use the Taylor series for small x
    if softcap > 256:
        x = raw * (scale / softcap)
        square = x * x
        series = x - x * square * (1 / 3 - square * (2 / 15))
        tanh = jnp.where(square < 0.01, series, tanh)
    return tanh


def _hardware_tanh(x: jax.Array) -> jax.Array:
    """Return tanh, which compiles to one instruction if `launch` sets `approx_math`."""
    return jnp.tanh(x)


def distance(position: TilePosition, shape: Shape) -> jax.Array:
    """Return the distance |q position - k position|."""
    assert position.rows[0] is not None
    rows = lax.broadcast_in_dim(position.rows[0], shape, [ROW])
    return jnp.abs((rows - load_along(position.columns[0], shape, COLUMN)).astype(f32))


def probabilities(
    problem: Problem,
    operands: Operands,  # references to memory
    raw: jax.Array,  # [rows, columns], q . k
    base: jax.Array,  # [rows, columns], subtracted in p = 2^(s - base)
    position: TilePosition,
    q_axis: int,
    partial: bool,
) -> tuple[jax.Array, Differentiate]:
    """Return p f for a tile in the backward pass, and a function that returns ds and du."""
    tile_weights = weights(problem, operands, raw, base, position, q_axis, partial)

    def differentiate(dp: jax.Array, D: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = tile_weights.weight, tile_weights.capped
        ds, du = (score_gradient(problem, x, dp, D, partial) for x in both)
        return ds, du

    return tile_weights.dropped, differentiate


def divided(
    problem: Problem, operands: Operands, b: Index, n: Index, acc: jax.Array, row_max: jax.Array,
    total: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Add the sink to the sums, and return the output, m, l and the rows that see a key."""
    # a row that sees no key is zero, even if there is a sink
    live = total != 0
    shrink = filled(total.shape, 1)
    if operands.sinks is not None:
        sink = at(operands.sinks, b, n)[...] * LOG2E
        grown = jnp.maximum(row_max, sink)
        shrink = jnp.exp2(row_max - grown)
        total, row_max = total * shrink + jnp.exp2(sink - grown), grown
    factor = jnp.where(live, shrink / total, 0) * (1 / (1 - problem.dropout_rate))
    out = (acc * across(factor, acc)).astype(out_dtype(problem, operands))
    return out, row_max, total, live


def base_of(saved: Residuals) -> jax.Array:  # f32[B, N, T]
    """Return the base that is subtracted in p = 2^(s - base)."""
    return (saved.row_max + saved.log_sum) * LOG2E


class Weights(NamedTuple):
    """Weights of a tile in the backward pass.

    Weights that dropout removes are negative. Weights of hidden pairs are 0, because exp2(-inf) =
    0.
    """

    dropped: jax.Array  # p f, after dropout
    weight: jax.Array  # for ds
    capped: jax.Array  # for du, times the derivative of the softcap


def weights(
    problem: Problem, operands: Operands, raw: jax.Array, base: jax.Array, position: TilePosition,
    q_axis: int, partial: bool,
) -> Weights:  # fmt: skip
    """Return the weights of a tile, for the same arguments as in `probabilities`."""
    s, tanh = scores(problem, operands, raw, position, q_axis, partial)
    weight = dropped = jnp.exp2(s * score_unit(problem, operands) - base)
    grow = 1 / (1 - problem.dropout_rate)
    # the sign marks dropped weights, so that only one number per pair is kept for the gradient
    if problem.dropout_rate:
        keep = kept(problem, operands, position, weight.shape, q_axis)
        weight = jnp.where(keep, weight, -weight)
        dropped = jnp.maximum(weight, 0) * grow
    capped = weight if tanh is None else weight * (1 - tanh * tanh)
    # the product of a hidden pair may have overflowed
    if tanh is not None and partial:
        capped = jnp.where(weight == 0, 0, capped)
    return Weights(dropped, weight, capped)


def score_gradient(
    problem: Problem, weight: jax.Array, dp: jax.Array, D: jax.Array, partial: bool
) -> jax.Array:
    """Return ds of a tile from `Weights.weight`, or du from `Weights.capped`."""
    grow = 1 / (1 - problem.dropout_rate)
    d = jnp.where(weight < 0, 0, dp * grow) if problem.dropout_rate else dp
    ds = (jnp.abs(weight) if problem.dropout_rate else weight) * (d - D)
    # dp of hidden pairs may have overflowed
    return jnp.where(weight == 0, 0, ds) if partial else ds


# The mask


def visible_pairs(
    problem: Problem, operands: Operands, position: TilePosition, shape: Shape, q_axis: int
) -> jax.Array:  # bool, with the given shape
    """Evaluate the mask on a tile."""
    rows = [x if x is None else lax.broadcast_in_dim(x, shape, [ROW]) for x in position.rows]
    columns = [x if x is None else load_along(x, shape, COLUMN) for x in position.columns]
    queries, keys = (rows, columns) if q_axis == ROW else (columns, rows)
    if operands.pairs is not None:
        keys.append(_load_pairs(operands.pairs, position, shape, q_axis).astype(i32))
    assert problem.visible is not None
    return problem.visible(queries, keys)


class TileVectors:
    """Mask vectors of a tile.

    Row vectors are loaded once per row of tiles, and column vectors are copied with each tile.
    """

    def __init__(
        self, problem: Problem, operands: Operands, q_axis: int, *, copies: bool = True
    ) -> None:
        queries, keys = operands.q_vectors, operands.k_vectors
        self._problem = problem
        self.rows, self.columns = (queries, keys) if q_axis == ROW else (keys, queries)
        # slopes need the positions, and the mask needs the vectors that its program reads
        read = {side: {0} if operands.slopes is not None else set() for side in ("q", "k")}
        if problem.visible is not None:
            read = {side: some | problem.visible.reads(side) for side, some in read.items()}
        needed = read["q"], read["k"]
        self._rows, self._columns = needed if q_axis == ROW else needed[::-1]
        self.copied = sorted(self._columns)[: COPIED * copies]
        self._every_tile = operands.slopes is not None

    def slots(self, count: int, width: int) -> dict[str, Scratch]:
        """Return the shared memory type for `count` tiles in flight if vectors are copied."""
        rows = count * len(self.copied)
        return {"columns": plgpu.SMEM((rows, width), i32)} if rows else {}

    def copy(self, columns: Ref, slot: Index, barrier: Ref, b: Index, start: Index) -> None:
        """Start the copies for a tile. Each of the `len(copied)` copies arrives at the barrier."""
        for i, index in enumerate(self.copied):
            source = at(self.columns[index], b, pl.ds(start, columns.shape[1]))
            plgpu.copy_gmem_to_smem(source, columns.at[slot * len(self.copied) + i], barrier)

    def of_rows(self, b: Index, start: Index) -> tuple[jax.Array | None, ...]:
        """Load the vectors for the rows of a warpgroup into registers."""
        return tuple(
            load(at(vector, b, pl.ds(start, ROWS)), WGMMA.reduce(1)) if i in self._rows else None
            for i, vector in enumerate(self.rows)
        )

    def of_columns(
        self, columns: Ref, slot: Index, b: Index, start: Index, width: int
    ) -> tuple[Ref | None, ...]:
        """Return references to the vectors for the columns of a tile."""
        refs: list[Ref | None] = [None] * len(self.columns)
        for index in self._columns - {*self.copied}:
            refs[index] = at(self.columns[index], b, pl.ds(start, width))
        for i, index in enumerate(self.copied):
            refs[index] = columns.at[slot * len(self.copied) + i]
        return tuple(refs)

    def late(self, partial: bool) -> bool:
        """Whether the scores of a tile need copied vectors, which delays freeing the slot."""
        return bool(self.copied) and (partial or self._every_tile)

    def release(self, barrier: Ref, partial: bool) -> None:
        """Release the slot of a tile to the producer, after this thread has read it."""
        if self.late(partial):
            fence(self._problem)
        plgpu.barrier_arrive(barrier)


# Arrays of pairs, and dropout


def queries_as_columns(operands: Operands) -> Operands:
    """Transpose arrays of pairs for kernels whose tiles have keys as rows."""
    arrays = {name: getattr(operands, name) for name in ("pairs", "bias")}
    return operands._replace(
        **{name: x.swapaxes(2, 3) for name, x in arrays.items() if x is not None}
    )


def _load_pairs(array: Ref, position: TilePosition, shape: Shape, q_axis: int) -> jax.Array:
    """Load a tile of an array [B or 1, N or 1, T or 1, S or 1], or [.., S or 1, T or 1]."""
    b, n, q0, k0 = position[:4]
    starts = (q0, k0) if q_axis == ROW else (k0, q0)
    has_rows, has_columns = (size > 1 for size in array.shape[2:])
    rows = pl.ds(starts[0], shape[0]) if has_rows else 0
    columns = pl.ds(starts[1], shape[1]) if has_columns else 0
    tile = at(array, b, n, rows, columns)
    if has_rows and has_columns:
        return load(tile, WGMMA)
    if has_rows or has_columns:
        return load_along(tile, shape, ROW if has_rows else COLUMN)
    return jnp.full(shape, tile[...])


def kept(
    problem: Problem, operands: Operands, position: TilePosition, shape: Shape, q_axis: int
) -> jax.Array:
    """Return `dropout.keep` for a tile, mixing each row and column only once."""
    b, n, q0, k0 = position[:4]

    def indices(start: Index, axis: int) -> jax.Array:
        layout = WGMMA.reduce(1 - axis)
        count = plgpu.broadcasted_iota(jnp.uint32, (shape[axis],), 0, layout=layout)
        return count + jnp.asarray(start).astype(jnp.uint32)

    def broadcast(vector: jax.Array, axis: int) -> jax.Array:
        return lax.broadcast_in_dim(vector, shape, [axis])

    assert operands.dropout is not None
    first = mix(operands.dropout[0, b, n] ^ indices(q0, q_axis))
    second = mix(operands.dropout[1, b, n] + first)
    columns = broadcast(mix(indices(k0, 1 - q_axis)), 1 - q_axis)
    bits = mix((columns ^ broadcast(first, q_axis)) + broadcast(second, q_axis))
    return bits >= jnp.uint32(threshold(problem.dropout_rate))
