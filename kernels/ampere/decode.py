"""Decode kernel: attention for few queries and many keys, divided along the keys.

As on Hopper (`transformer_jax.kernels.hopper.decode`), the queries of all heads that share a key
head are the rows of one tile. A tile list is divided into parts, and XLA merges the results of the
parts. On these GPUs, each part is a program of one warpgroup. While it multiplies the current tile,
it copies the keys and values of the next tiles into shared memory (`cp.async`).

`cp.async` does not check bounds. If the last tile would extend past the end of the keys, it begins
earlier, and the keys that it shares with the previous tile are hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels import chips
from transformer_jax.kernels.ampere.tiles import (
    add_product,
    await_copies,
    copy_layout,
    fetch,
    launch,
    parts_of_rows,
    slot,
    slots,
    start_copy,
    start_nothing,
    store_rows,
)
from transformer_jax.kernels.contract import LOWEST, Blocks, Index, Operands, Problem, TileLists
from transformer_jax.kernels.nvidia.decode_rows import (
    as_rows,
    for_copies,
    lists_of_key_heads,
    merged,
    part_of,
    place_of,
)
from transformer_jax.kernels.nvidia.memory import (
    ROW,
    ROWS,
    WGMMA,
    Ref,
    across,
    at,
    f32,
    filled,
    i32,
    load,
    slot_of,
)
from transformer_jax.kernels.nvidia.schedule import each_tile, item_index, key_parts
from transformer_jax.kernels.nvidia.scores import TilePosition, TileVectors, score_unit, scores
from transformer_jax.kernels.sharding import result

WIDTHS = 32, 64  # supported numbers of keys per tile


def decode(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the output [B, T, N, Hv], and m and log l as f32[B, N, T].

    There is one row of query tiles, and all heads that share a key head have the same list. Keys
    and values may end within a tile, but pages may not.
    """
    if blocks.k not in WIDTHS:
        raise ValueError(
            f"k={blocks.k} must be 32 or 64, the number of keys in a tile of the decode kernel"
        )
    if blocks.stages < 2:
        raise ValueError(f"stages={blocks.stages} must be at least 2 in the decode kernel")
    if operands.page is not None and operands.page % blocks.k:
        raise ValueError(f"page={operands.page} must be a multiple of {blocks.k} keys")
    operands = for_copies(operands)
    (B, T, N, H), (_, _, K, Hv) = operands.query.shape, operands.value.shape
    dtype, like = operands.query.dtype, operands.query
    wide = {}
    # two int8 tiles fit into the memory of one 16-bit tile
    if operands.k_scale is not None:
        wide = dict(k_wide=slot(blocks.k, H, dtype), v_wide=slot(blocks.k, Hv, dtype))
        blocks = dataclasses.replace(blocks, stages=2 * (blocks.stages - 1))
    programs = problem.processors or chips.AMPERE_PROCESSORS
    parts = key_parts(B * K, -(-operands.keys // blocks.k), programs)
    items, rows = B * K * parts, -(-T * N // K // 8) * 8
    sums = launch(
        problem,
        functools.partial(_decode, problem, blocks, parts),
        items,
        out_type=(
            result((items, rows, Hv), f32, like),
            result((items, ROWS), f32, like),
            result((items, ROWS), f32, like),
        ),
        scratch_types=dict(
            q_tile=slot(ROWS, H, dtype),
            k_tile=slots(blocks.stages, blocks.k, H, operands.key.dtype),
            v_tile=slots(blocks.stages, blocks.k, Hv, operands.value.dtype),
            **wide,
        ),
    )(lists_of_key_heads(operands, lists), as_rows(operands)._replace(sinks=None))
    return merged(operands, *(x.reshape(B, K, parts, *x.shape[1:]) for x in sums))


class _Rows(NamedTuple):
    """Queries of a program, and the program's part of their tile list."""

    b: jax.Array
    head: jax.Array  # of the keys
    first: jax.Array  # first tile in the list
    tiles: jax.Array  # number of tiles
    vectors: tuple[jax.Array | None, ...]
    slopes: jax.Array | None


class _Sums(NamedTuple):
    """Sums of a program over its keys."""

    acc: jax.Array  # [ROWS, Hv]
    row_max: jax.Array  # [ROWS], in base 2
    total: jax.Array  # [ROWS]
    scales: tuple[jax.Array, ...] = ()  # scales for the keys and values of the next tile


def _decode(
    problem: Problem, blocks: Blocks, parts: int, lists: TileLists, operands: Operands,
    acc_out: Ref, row_max_out: Ref, total_out: Ref, **memory: Ref,
) -> None:  # fmt: skip
    """Run a program. The operands and lists are memory references."""
    item = lax.axis_index("program")
    b, head, part = item_index(item, operands.key.shape[2], parts)
    vectors = TileVectors(problem, operands, ROW, copies=False)
    program = _Program(problem, blocks, lists, operands, vectors, **memory)
    full, seen = at(lists.full, b, head, 0)[...], at(lists.seen, b, head, 0)[...]
    first, end = part_of(seen, part, parts)
    slopes = operands.slopes
    if slopes is not None:
        slopes = load(at(slopes, b, head, pl.ds(0, ROWS)), WGMMA.reduce(1))
    rows = _Rows(b, head, first, end - first, vectors.of_rows(b, 0), slopes)
    for j in range(blocks.stages - 1):
        program.copy(rows, i32(j))
    program.q_tile[...] = fetch(operands.query.at[b, pl.ds(0, ROWS), head])
    sums = _Sums(
        filled((ROWS, operands.value.shape[3]), 0), filled((ROWS,), LOWEST), filled((ROWS,), 0),
        program.scales(rows, 0),
    )  # fmt: skip
    ahead = jnp.minimum(jnp.maximum(full - first, 0), end - first)
    sums = each_tile(ahead, end - first, functools.partial(program.tile, rows), sums)
    row_max_out[item] = sums.row_max
    total_out[item] = sums.total
    store_rows(problem, sums.acc, acc_out.at[item])


@dataclass(frozen=True, eq=False)  # fields are tracers, which are not hashable
class _Program:
    """Summation over the keys in one part of a list."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    q_tile: Ref  # [ROWS, H]
    k_tile: Ref  # [stages, k, H]
    v_tile: Ref  # [stages, k, Hv]
    k_wide: Ref = None  # [k, H] in the query's dtype, if the keys are int8
    v_wide: Ref = None  # [k, Hv]

    def keys_of(self, rows: _Rows, j: Index) -> tuple[jax.Array, jax.Array]:
        """Return the index of the first key to read for a tile, and the number of keys to hide.

        If the tile is past the end of the list, the results refer to an arbitrary tile.
        """
        j = jnp.minimum(j, self.lists.order.shape[3] - 1 - rows.first)
        k0 = at(self.lists.order, rows.b, rows.head, 0, rows.first + j)[...] * self.blocks.k
        if self.operands.pages is not None:
            return k0, i32(0)
        # `cp.async` does not check bounds, so a last tile that would extend past the end begins
        # earlier
        start = jnp.minimum(k0, self.operands.key.shape[1] - self.blocks.k)
        return start, k0 - start

    def copy(self, rows: _Rows, j: jax.Array) -> None:
        """Start copying the keys and values of a tile that is not past the end of the part."""

        @pl.when(j < rows.tiles)
        def _() -> None:
            start, index = self.keys_of(rows, j)[0], slot_of(j, self.blocks.stages)
            keys = (*place_of(self.operands, rows.b, start, self.blocks.k), rows.head)
            for source, tile in self.sources():
                start_copy(self.problem, source.at[keys], tile.at[index])

        @pl.when(j >= rows.tiles)
        def _() -> None:
            for _ in self.sources():
                start_nothing(self.problem)

    def sources(self) -> tuple[tuple[Ref, Ref], tuple[Ref, Ref]]:
        """Return the keys and values with the destinations of their copies."""
        return (self.operands.key, self.k_tile), (self.operands.value, self.v_tile)

    def tile(self, rows: _Rows, j: jax.Array, sums: _Sums, partial: bool) -> _Sums:
        problem, operands, stages = self.problem, self.operands, self.blocks.stages
        # load the scales early, because they are in device memory
        next_scales = self.scales(rows, j + 1)
        await_copies(problem, 2 * (stages - 2))
        # copy into the slot of the previous tile, which all warps have finished reading
        self.copy(rows, j + stages - 1)
        k, v = self.tiles(slot_of(j, stages), sums.scales)
        start, hidden = self.keys_of(rows, j)
        columns = self.vectors.of_columns(None, 0, rows.b, start, self.blocks.k)
        position = TilePosition(rows.b, rows.head, 0, start, rows.vectors, columns, rows.slopes)
        raw = filled((ROWS, self.blocks.k), 0)
        # multiply in parts to save registers
        for part in parts_of_rows(k):
            raw = add_product(problem, raw, self.q_tile.at[part], k.at[part].transpose((1, 0)))
        s, _ = scores(problem, operands, raw, position, ROW, partial)
        if partial and self.may_overlap():
            column = plgpu.broadcasted_iota(i32, raw.shape, 1, layout=WGMMA)
            s = jnp.where(column < hidden, -jnp.inf, s)
        unit = score_unit(problem, operands)
        row_max = jnp.maximum(sums.row_max, s.max(axis=1) * unit)
        shrink = jnp.exp2(sums.row_max - row_max)
        p = jnp.exp2(s * unit - across(row_max, s))
        total = sums.total * shrink + p.sum(axis=1)
        acc = add_product(problem, sums.acc * across(shrink, sums.acc), p, v)
        return _Sums(acc, row_max, total, next_scales)

    def may_overlap(self) -> bool:
        """Whether the keys end within a tile, so that the last tile begins earlier."""
        return self.operands.pages is None and self.operands.key.shape[1] % self.blocks.k > 0

    def scales(self, rows: _Rows, j: Index) -> tuple[jax.Array, ...]:
        """Load the scales for the keys and values of a tile (any tile past the end of the list)."""
        if self.operands.k_scale is None:
            return ()
        start = self.keys_of(rows, j)[0]
        keys = (*place_of(self.operands, rows.b, start, self.blocks.k), rows.head)
        both: tuple[Ref, Ref] = self.operands.k_scale, self.operands.v_scale
        return tuple(
            load(scale.at[keys], copy_layout(tile.at[parts_of_rows(tile)[0]]).reduce(1))
            for scale, tile in zip(both, (self.k_wide, self.v_wide), strict=True)
        )

    def tiles(self, index: jax.Array, scales: tuple[jax.Array, ...]) -> tuple[Ref, Ref]:
        """Return the tiles of keys and values, dequantized if they are int8."""
        keys, values = (tile.at[index] for _, tile in self.sources())
        if not scales:
            return keys, values
        wide = self.k_wide, self.v_wide
        for tile, target, scale in zip((keys, values), wide, scales, strict=True):
            for columns in parts_of_rows(tile):
                number = fetch(tile.at[columns], target.at[columns]).astype(f32)
                target[columns] = (number * across(scale, number)).astype(target.dtype)
        return wide
