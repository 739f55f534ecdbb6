"""Backward kernels for dq, for dk and dv, and for the gradient of a bias.

A program sums its 64 rows in registers, so no sum depends on the order in which programs finish. If
dk and dv together need too many registers, separate programs compute them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
from jax import lax
from jax.typing import DTypeLike

from transformer_jax.kernels.ampere.tiles import (
    add_product,
    check_rows,
    fetch,
    launch,
    product,
    slot,
)
from transformer_jax.kernels.contract import (
    Blocks,
    Index,
    Operands,
    Problem,
    Residuals,
    TileLists,
    learns_slopes,
)
from transformer_jax.kernels.nvidia.bias import digits, sum_shape, visited
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
    filled,
    load,
    load_along,
)
from transformer_jax.kernels.nvidia.schedule import each_tile, key_items, query_items
from transformer_jax.kernels.nvidia.scores import (
    TilePosition,
    TileRows,
    TileVectors,
    base_of,
    distance,
    probabilities,
    queries_as_columns,
)
from transformer_jax.kernels.sharding import result

WIDEST = 256  # the largest H + Hv for which one program computes both dk and dv


class _Inputs(NamedTuple):
    """References to the input arrays of the kernels."""

    operands: Operands
    do: Ref  # [B, T, N, Hv]
    base: Ref  # f32[B, N, T], subtracted in p = 2^(s - base)
    D: Ref  # f32[B, N, T]

    def of_queries(self, b: Index, n: Index, q0: Index) -> tuple[jax.Array, jax.Array]:
        """Load base and D for 64 queries."""
        place = b, n, pl.ds(q0, ROWS)
        base, D = (load(x.at[place], WGMMA.reduce(1)) for x in (self.base, self.D))
        return base, D


def _inputs(operands: Operands, saved: Residuals) -> _Inputs:
    return _Inputs(operands, saved.do, base_of(saved), saved.D)


# The dq kernel


def backward_dq(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, jax.Array | None]:
    """Return dq [B, T, N, H] and, with learned slopes, -sum_j ds_ij |q_i - k_j|, f32[B, N, T]."""
    check_rows("dq", blocks.q)
    (B, T, N, H), Hv = operands.query.shape, operands.value.shape[-1]
    dtype, has_slopes = operands.query.dtype, learns_slopes(problem, operands)
    slopes = (result((B, N, T), f32, operands.query),) * has_slopes
    dq, *rows = launch(
        problem,
        functools.partial(_backward_dq, problem, blocks),
        query_items(operands, blocks).number,
        out_type=(result((B, T, N, H), dtype, operands.query), *slopes),
        scratch_types=_query_slots(blocks, H, Hv, dtype),
    )(lists, _inputs(operands, saved))
    return dq, rows[0] if rows else None


def _query_slots(blocks: Blocks, H: int, Hv: int, dtype: DTypeLike) -> dict[str, Scratch]:
    """Return the shared memory types for a kernel whose tiles have queries as rows."""
    return dict(
        q_tile=slot(ROWS, H, dtype),
        do_tile=slot(ROWS, Hv, dtype),
        k_tile=slot(blocks.k, H, dtype),
        v_tile=slot(blocks.k, Hv, dtype),
    )


def _backward_dq(
    problem: Problem, blocks: Blocks, lists: TileLists, inputs: _Inputs, dq: Ref,
    slope_out: Ref = None, **memory: Ref,
) -> None:  # fmt: skip
    """Run a program. The operands, lists and later arguments are memory references."""
    operands = inputs.operands
    tiles = _QueryTiles(problem, blocks, inputs, TileVectors(problem, operands, ROW, copies=False),
                        **memory)  # fmt: skip
    b, n, row = query_items(operands, blocks).at(lists, lax.axis_index("program"))
    q0 = row * ROWS
    rows = tiles.of_queries(b, n, q0)

    def add(
        j: Index, carry: tuple[jax.Array, jax.Array], partial: bool
    ) -> tuple[jax.Array, jax.Array]:
        acc, slope = carry
        k0 = at(lists.order, b, n, row, j)[...] * blocks.k
        position, ds, du = tiles.differentiate(rows, k0, partial)
        if slope_out is not None:
            slope -= (ds * distance(position, ds.shape)).sum(axis=1)
        return add_product(problem, acc, du, tiles.k_tile), slope

    full, seen = at(lists.full, b, n, row)[...], at(lists.seen, b, n, row)[...]
    start = filled((ROWS, operands.query.shape[-1]), 0), filled((ROWS,), 0)
    acc, slope = each_tile(full, seen, add, start)
    dq[b, pl.ds(q0, ROWS), n] = (acc * problem.scale).astype(operands.query.dtype)
    if slope_out is not None:
        slope_out[b, n, pl.ds(q0, ROWS)] = slope


@dataclass(frozen=True, eq=False)  # fields are tracers, which are not hashable
class _QueryTiles:
    """Computation of ds for tiles that have queries as rows."""

    problem: Problem
    blocks: Blocks
    inputs: _Inputs
    vectors: TileVectors
    q_tile: Ref
    do_tile: Ref
    k_tile: Ref
    v_tile: Ref

    def of_queries(self, b: Index, n: Index, q0: Index) -> TileRows:
        """Load 64 queries into shared memory, and load their vectors into registers."""
        queries = b, pl.ds(q0, ROWS), n
        self.q_tile[...] = fetch(self.inputs.operands.query.at[queries])
        self.do_tile[...] = fetch(self.inputs.do.at[queries])
        base, D = self.inputs.of_queries(b, n, q0)
        return TileRows(b, n, q0, self.vectors.of_rows(b, q0), base=base, D=D)

    def differentiate(
        self, rows: TileRows, k0: jax.Array, partial: bool
    ) -> tuple[TilePosition, jax.Array, jax.Array]:
        """Load a tile of keys, and return the position, ds and du of the tile."""
        problem, operands, width = self.problem, self.inputs.operands, self.blocks.k
        group = operands.query.shape[2] // operands.key.shape[2]
        keys = rows.b, pl.ds(k0, width), rows.head // group
        self.k_tile[...] = fetch(operands.key.at[keys])
        self.v_tile[...] = fetch(operands.value.at[keys])
        columns = self.vectors.of_columns(None, 0, rows.b, k0, width)
        position = TilePosition(rows.b, rows.head, rows.start, k0, rows.vectors, columns)
        raw = product(problem, self.q_tile, self.k_tile.transpose((1, 0)))
        _, differentiate = probabilities(
            problem, operands, raw, across(rows.base, raw), position, ROW, partial
        )
        dp = product(problem, self.do_tile, self.v_tile.transpose((1, 0)))
        return position, *differentiate(dp, across(rows.D, dp))


# The gradient of a bias


def backward_bias(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> jax.Array:
    """Return ds in float32, summed over the axes along which the bias has size 1."""
    check_rows("bias", blocks.q)
    assert operands.bias is not None
    H, Hv, shape = operands.query.shape[-1], operands.value.shape[-1], operands.bias.shape
    sums = sum_shape(operands, blocks)
    outer = (*shape[:2], sums[2] // blocks.q, sums[3] // blocks.k)
    total = launch(
        problem,
        functools.partial(_backward_bias, problem, blocks, outer),
        math.prod(outer),
        out_type=result(sums, f32, operands.query),
        scratch_types=_query_slots(blocks, H, Hv, operands.query.dtype),
    )(visited(lists), _inputs(operands, saved))
    # if the bias has size 1 along an axis, the kernel has summed all tiles into one
    lacking = tuple(axis for axis in (2, 3) if shape[axis] == 1)
    return total.sum(axis=lacking, keepdims=True)


def _backward_bias(
    problem: Problem, blocks: Blocks, outer: tuple[int, ...], visits: Ref, inputs: _Inputs,
    out: Ref, **memory: Ref,
) -> None:  # fmt: skip
    """Run a program over the visited tiles of all rows and heads that share a tile of the bias."""
    operands = inputs.operands
    tiles = _QueryTiles(problem, blocks, inputs, TileVectors(problem, operands, ROW, copies=False),
                        **memory)  # fmt: skip
    (B, T, N, _), S = operands.query.shape, operands.key.shape[1]
    sizes = (B, N, T // blocks.q, S // blocks.k)
    inner = tuple(size // o for size, o in zip(sizes, outer, strict=True))
    first = tuple(digits(lax.axis_index("program"), outer))

    def visit(index: jax.Array, total: jax.Array) -> jax.Array:
        # one of the two indices is 0 on every axis
        tile = tuple(o + i for o, i in zip(first, digits(index, inner), strict=True))

        def add(total: jax.Array) -> jax.Array:
            b, n, row, column = tile
            rows = tiles.of_queries(b, n, row * ROWS)
            return total + tiles.differentiate(rows, column * blocks.k, partial=True)[1]

        return lax.cond(at(visits, *tile)[...] > 0, add, lambda total: total, total)

    total = lax.fori_loop(0, math.prod(inner), visit, filled((ROWS, blocks.k), 0))
    b, n, row, column = first
    out[b, n, pl.ds(row * ROWS, ROWS), pl.ds(column * blocks.k, blocks.k)] = total


# The dk/dv kernel


def backward_dkdv(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, jax.Array]:
    """Return dk [B, S, K, H] and dv [B, S, K, Hv]. The rows of `lists` are key tiles."""
    check_rows("dk/dv", blocks.k)
    H, (B, S, K, Hv), dtype = operands.query.shape[-1], operands.value.shape, operands.key.dtype
    # use two programs if dk and dv together need too many registers
    parts: tuple[tuple[str, ...], ...] = (("dk", "dv"),) if H + Hv <= WIDEST else (("dv",), ("dk",))
    return launch(
        problem,
        functools.partial(_backward_dkdv, problem, blocks, parts),
        key_items(operands, blocks).number * len(parts),
        out_type=(
            result((B, S, K, H), dtype, operands.query),
            result((B, S, K, Hv), dtype, operands.query),
        ),
        scratch_types=dict(
            k_tile=slot(ROWS, H, dtype),
            v_tile=slot(ROWS, Hv, dtype),
            q_tile=slot(blocks.q, H, dtype),
            do_tile=slot(blocks.q, Hv, dtype),
        ),
    )(lists, _inputs(queries_as_columns(operands), saved))


def _backward_dkdv(
    problem: Problem, blocks: Blocks, parts: tuple[tuple[str, ...], ...], lists: TileLists,
    inputs: _Inputs, dk_out: Ref, dv_out: Ref, **memory: Ref,
) -> None:  # fmt: skip
    """Run a program that computes dk, dv or both for 64 keys."""
    program = lax.axis_index("program")
    vectors = TileVectors(problem, inputs.operands, COLUMN, copies=False)
    outs = {"dk": dk_out, "dv": dv_out}
    for i, wanted in enumerate(parts):
        keys = _KeyTiles(problem, blocks, lists, inputs, vectors, outs, wanted, **memory)
        if len(parts) == 1:
            keys.run(program)
        else:
            pl.when(program % len(parts) == i)(functools.partial(keys.run, program // len(parts)))


@dataclass(frozen=True, eq=False)  # fields are tracers, which are not hashable
class _KeyTiles:
    """Computation of dk, dv or both for 64 keys."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    inputs: _Inputs
    vectors: TileVectors
    outs: dict[str, Ref]
    wanted: tuple[str, ...]  # "dk", "dv"
    k_tile: Ref
    v_tile: Ref
    q_tile: Ref
    do_tile: Ref

    def run(self, item: jax.Array) -> None:
        operands = self.inputs.operands
        (_, _, K, H), N = operands.key.shape, operands.query.shape[2]
        group = N // K
        b, head, row = key_items(operands, self.blocks).at(self.lists, item, group)
        k0 = row * ROWS
        place = b, pl.ds(k0, ROWS), head
        self.k_tile[...] = fetch(operands.key.at[place])
        self.v_tile[...] = fetch(operands.value.at[place])
        keys = TileRows(b, head, k0, self.vectors.of_rows(b, k0), row)

        def one_head(g: Index, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
            n = head * group + g
            full, seen = (at(x, b, n, row)[...] for x in (self.lists.full, self.lists.seen))
            return each_tile(full, seen, functools.partial(self.tile, keys, n), sums)

        widths = {"dk": H, "dv": operands.value.shape[-1]}
        sums = {name: filled((ROWS, widths[name]), 0) for name in self.wanted}
        sums = lax.fori_loop(0, group, one_head, sums)
        for name, total in sums.items():
            scale = self.problem.scale if name == "dk" else 1.0
            self.outs[name][place] = (total * scale).astype(operands.key.dtype)

    def tile(
        self, keys: TileRows, n: jax.Array, j: jax.Array, sums: dict[str, jax.Array], partial: bool
    ) -> dict[str, jax.Array]:
        problem, inputs, width = self.problem, self.inputs, self.blocks.q
        operands, sums = inputs.operands, dict(sums)
        q0 = at(self.lists.order, keys.b, n, keys.row, j)[...] * width
        queries, rows = (keys.b, pl.ds(q0, width), n), (keys.b, n, pl.ds(q0, width))
        self.q_tile[...] = fetch(operands.query.at[queries])
        self.do_tile[...] = fetch(inputs.do.at[queries])
        columns = self.vectors.of_columns(None, 0, keys.b, q0, width)
        position = TilePosition(keys.b, n, q0, keys.start, keys.vectors, columns)
        raw = product(problem, self.k_tile, self.q_tile.transpose((1, 0)))
        base = load_along(inputs.base.at[rows], raw.shape, COLUMN)
        p, differentiate = probabilities(problem, operands, raw, base, position, COLUMN, partial)
        if "dv" in sums:
            sums["dv"] = add_product(problem, sums["dv"], p, self.do_tile)
        if "dk" in sums:
            dp = product(problem, self.v_tile, self.do_tile.transpose((1, 0)))
            _, du = differentiate(dp, load_along(inputs.D.at[rows], raw.shape, COLUMN))
            sums["dk"] = add_product(problem, sums["dk"], du, self.q_tile)
        return sums
