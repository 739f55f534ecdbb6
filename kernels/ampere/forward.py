"""Forward kernel, which computes the output, the row maxima and the logarithms of the row sums.

A program processes 64 queries and visits the key tiles in its list. If `Blocks.stages` is 2, the
next tile is loaded from device memory into registers while the current tile is multiplied.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.ampere.tiles import (
    add_product,
    check_rows,
    fetch,
    launch,
    product,
    slot,
)
from transformer_jax.kernels.contract import (
    LOWEST,
    Blocks,
    Index,
    Operands,
    Problem,
    TileLists,
    out_dtype,
)
from transformer_jax.kernels.nvidia.memory import ROW, ROWS, Ref, across, at, f32, filled
from transformer_jax.kernels.nvidia.schedule import each_tile, query_items
from transformer_jax.kernels.nvidia.scores import (
    LN2,
    TilePosition,
    TileRows,
    TileVectors,
    divided,
    kept,
    score_unit,
    scores,
)
from transformer_jax.kernels.sharding import result


def forward(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the output [B, T, N, Hv], and m and log l as f32[B, N, T]."""
    check_rows("forward", blocks.q)
    (B, T, N, H), Hv = operands.query.shape, operands.value.shape[-1]
    dtype, rows = operands.query.dtype, result((B, N, T), f32, operands.query)
    return launch(
        problem,
        functools.partial(_forward, problem, blocks),
        query_items(operands, blocks).number,
        out_type=(result((B, T, N, Hv), out_dtype(problem, operands), operands.query), rows, rows),
        scratch_types=dict(
            q_tile=slot(ROWS, H, dtype),
            k_tile=slot(blocks.k, H, dtype),
            v_tile=slot(blocks.k, Hv, dtype),
        ),
    )(lists, operands)


class _Sums(NamedTuple):
    """Sums over the key tiles, and the next tile."""

    acc: jax.Array  # [ROWS, Hv]
    row_max: jax.Array  # [ROWS], in base 2
    total: jax.Array  # [ROWS]
    ahead: tuple[jax.Array, ...]  # keys and values of the next tile, if loaded


def _forward(
    problem: Problem, blocks: Blocks, lists: TileLists, operands: Operands, out: Ref,
    row_max_out: Ref, log_sum_out: Ref, *, q_tile: Ref, k_tile: Ref, v_tile: Ref,
) -> None:  # fmt: skip
    """Run a program. The operands and lists are memory references."""
    b, n, row = query_items(operands, blocks).at(lists, lax.axis_index("program"))
    q0, vectors = row * ROWS, TileVectors(problem, operands, ROW, copies=False)
    rows = TileRows(b, n, q0, vectors.of_rows(b, q0), row)
    program = _Program(problem, blocks, lists, operands, vectors, q_tile, k_tile, v_tile)
    queries = b, pl.ds(q0, ROWS), n
    q_tile[...] = fetch(operands.query.at[queries])
    start = _Sums(
        filled((ROWS, v_tile.shape[1]), 0), filled((ROWS,), LOWEST), filled((ROWS,), 0),
        program.ahead(rows, 0),
    )  # fmt: skip
    full, seen = at(lists.full, b, n, row)[...], at(lists.seen, b, n, row)[...]
    sums = each_tile(full, seen, functools.partial(program.tile, rows), start)
    acc, row_max, total, live = divided(problem, operands, b, n, sums.acc, sums.row_max, sums.total)
    place = b, n, pl.ds(q0, ROWS)
    out[queries] = acc
    row_max_out[place] = jnp.where(live, row_max * LN2, -jnp.inf)
    log_sum_out[place] = jnp.where(live, jnp.log2(total) * LN2, 0)


@dataclass(frozen=True, eq=False)  # fields are tracers, which are not hashable
class _Program:
    """Computation of the output for 64 queries."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    q_tile: Ref
    k_tile: Ref
    v_tile: Ref

    def k0(self, rows: TileRows, j: Index) -> jax.Array:
        """Return the index of the first key in a tile of the list."""
        # the tile after the last one is loaded but not used, so it must lie within the keys
        last = jnp.minimum(j, self.lists.order.shape[-1] - 1)
        return at(self.lists.order, rows.b, rows.head, rows.row, last)[...] * self.blocks.k

    def load(self, rows: TileRows, j: Index) -> tuple[jax.Array, jax.Array]:
        key, value = self.operands.key, self.operands.value
        group = self.operands.query.shape[2] // key.shape[2]
        keys = rows.b, pl.ds(self.k0(rows, j), self.blocks.k), rows.head // group
        return fetch(key.at[keys]), fetch(value.at[keys])

    def ahead(self, rows: TileRows, j: Index) -> tuple[jax.Array, ...]:
        """Load the next tile in advance if there are two stages."""
        return self.load(rows, j) if self.blocks.stages > 1 else ()

    def tile(self, rows: TileRows, j: Index, sums: _Sums, partial: bool) -> _Sums:
        problem, operands = self.problem, self.operands
        # with two stages, the tile was loaded into registers while the previous tile was multiplied
        self.k_tile[...], self.v_tile[...] = sums.ahead or self.load(rows, j)
        ahead = self.ahead(rows, j + 1)
        k0 = self.k0(rows, j)
        columns = self.vectors.of_columns(None, 0, rows.b, k0, self.blocks.k)
        position = TilePosition(rows.b, rows.head, rows.start, k0, rows.vectors, columns)
        raw = product(problem, self.q_tile, self.k_tile.transpose((1, 0)))
        s, _ = scores(problem, operands, raw, position, ROW, partial)
        unit = score_unit(problem, operands)
        row_max = jnp.maximum(sums.row_max, s.max(axis=1) * unit)
        shrink = jnp.exp2(sums.row_max - row_max)
        p = jnp.exp2(s * unit - across(row_max, s))
        total = sums.total * shrink + p.sum(axis=1)
        if problem.dropout_rate:
            p = jnp.where(kept(problem, operands, position, p.shape, ROW), p, 0)
        acc = add_product(problem, sums.acc * across(shrink, sums.acc), p, self.v_tile)
        return _Sums(acc, row_max, total, ahead)
