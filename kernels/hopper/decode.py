"""Decode kernel: attention for few queries and many keys, divided along the keys.

The R = T N / K queries of all heads that share a key head are the rows of one tile. Therefore, each
key and value is read only once, directly from a cache [B, S, K, H]. Only listed tiles are read, so
the cost depends on the filled length. An item consists of a batch row, a key head and a part of its
list. Two warpgroups share each tile of keys. Each warpgroup writes its own sums, and `merged`
combines them in a fixed order (Flash-Decoding, Dao et al. 2023), in base 2:

    m = max_p m_p        l = sum_p 2^(m_p - m) l_p        out = sum_p 2^(m_p - m) acc_p / l

If keys are in the pages of a pool, each copy of 64 keys looks up its page in the table. A tile may
span two pages, but a copy may not.

Keys and values in int8 are copied without conversion, which halves the number of bytes. A consumer
multiplies them by their scales, rounds them to the query's dtype, and writes them to a separate
tile for wgmma. Therefore, the result is bit-identical to attention with dequantized keys and
values.
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

from transformer_jax.kernels.contract import LOWEST, Blocks, Index, Operands, Problem, TileLists
from transformer_jax.kernels.hopper.producer import wait_from
from transformer_jax.kernels.hopper.products import add_products, opaque, product
from transformer_jax.kernels.hopper.programs import PROGRAMS, each_item, launch, specialize
from transformer_jax.kernels.nvidia.decode_rows import (
    as_rows,
    columns_at_once,
    for_copies,
    lists_of_key_heads,
    merged,
    part_of,
    place_of,
    swizzle,
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
    load,
    slot_of,
    swizzle_of,
    tile_slots,
)
from transformer_jax.kernels.nvidia.schedule import each_tile, item_index, key_parts
from transformer_jax.kernels.nvidia.scores import TilePosition, TileVectors, score_unit, scores
from transformer_jax.kernels.sharding import result

QUERY_SLOTS = 2  # the next item's queries are copied while this item's are in use


def decode(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the output [B, T, N, Hv], and m and log l as f32[B, N, T].

    There is one row of query tiles, and all heads that share a key head have the same list. Keys
    and values may end within a tile, because copies read zeros past the end. A page may not end
    within the 64 keys of a copy.
    """
    if operands.page is not None and operands.page % ROWS:
        raise ValueError(f"page={operands.page} must be a multiple of {ROWS} keys")
    operands = for_copies(operands, lists.order.shape[3] * blocks.k)
    (B, T, N, H), (_, _, K, Hv) = operands.query.shape, operands.value.shape
    dtype, like = operands.query.dtype, operands.query
    consumers, wide = blocks.k // ROWS, {}
    # two int8 tiles fit into the memory of one 16-bit tile
    if operands.k_scale is not None:
        if blocks.stages < 2:
            raise ValueError(f"stages={blocks.stages} must be at least 2 for int8")
        wide = dict(
            k_wide=tile_slots(consumers, ROWS, H, dtype),
            v_wide=tile_slots(consumers, ROWS, Hv, dtype),
        )
        blocks = dataclasses.replace(blocks, stages=2 * (blocks.stages - 1))
    parts = key_parts(B * K, -(-operands.keys // blocks.k), problem.processors or PROGRAMS)
    sums, slots = B * K * parts * consumers, blocks.stages * consumers
    packed = as_rows(operands)._replace(sinks=None)
    lists = lists_of_key_heads(operands, lists)
    vectors = TileVectors(problem, packed, ROW)
    # copies are in units of 8 rows
    rows = -(-T * N // K // 8) * 8
    width = columns_at_once(Hv)
    acc, row_max, total = launch(
        problem,
        functools.partial(_decode, problem, blocks, parts),
        consumers,
        B * K * parts,
        out_type=(
            result((sums, rows, Hv), f32, like),
            result((sums, ROWS), f32, like),
            result((sums, ROWS), f32, like),
        ),
        scratch_types=dict(
            q_tile=tile_slots(QUERY_SLOTS, ROWS, H, dtype),
            k_tile=tile_slots(slots, ROWS, H, operands.key.dtype, swizzle(operands.key)),
            v_tile=tile_slots(slots, ROWS, Hv, operands.value.dtype, swizzle(operands.value)),
            acc_tile=tile_slots(consumers, ROWS, width, f32, swizzle_of(4, width, Hv)),
            q_full=plgpu.Barrier(num_barriers=QUERY_SLOTS),
            q_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=QUERY_SLOTS),
            full=plgpu.Barrier(num_arrivals=2 + len(vectors.copied), num_barriers=slots),
            empty=plgpu.Barrier(num_barriers=slots),
            **vectors.slots(slots, ROWS),
            **wide,
        ),
    )(lists, packed)
    by_part = [x.reshape(B, K, parts * consumers, *x.shape[1:]) for x in (acc, row_max, total)]
    return merged(operands, *by_part)


def _decode(
    problem: Problem, blocks: Blocks, parts: int, lists: TileLists, operands: Operands,
    acc_out: Ref, row_max_out: Ref, total_out: Ref, **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program. The operands and lists are memory references."""
    slots = _Slots(**memory)
    vectors = TileVectors(problem, operands, ROW)
    B, K = operands.query.shape[0], operands.key.shape[2]
    items = B * K * parts

    def produce() -> None:
        slots.produce(blocks, parts, items, lists, operands, vectors)

    def consume(w: jax.Array) -> None:
        results = acc_out, row_max_out, total_out
        consumer = _Consumer(problem, blocks, parts, lists, operands, vectors, slots, results, w)
        each_item(items, consumer.attend, (jnp.int32(0), jnp.int32(0)))

    specialize(blocks.k // ROWS, produce, consume)


class _Slots(NamedTuple):
    """Shared memory, in which every consumer has its own ring of slots for 64 keys each."""

    q_tile: Ref  # [QUERY_SLOTS, ROWS, H]
    k_tile: Ref  # [stages * consumers, ROWS, H]
    v_tile: Ref  # [stages * consumers, ROWS, Hv]
    acc_tile: Ref  # f32[consumers, ROWS, some columns of Hv], from which acc is copied out
    q_full: Ref
    q_empty: Ref
    full: Ref
    empty: Ref
    columns: Ref = None  # i32[stages * consumers * copied vectors, ROWS]
    k_wide: Ref = None  # [consumers, ROWS, H] in the query's dtype, for int8 keys
    v_wide: Ref = None  # [consumers, ROWS, Hv]

    def produce(
        self, blocks: Blocks, parts: int, items: int, lists: TileLists, operands: Operands,
        vectors: TileVectors,
    ) -> None:  # fmt: skip
        """Copy the queries of every item, and the keys and values in its part of the list."""
        K, consumers = operands.key.shape[2], blocks.k // ROWS
        sources: list[tuple[Ref, Ref]]
        sources = [(operands.key, self.k_tile), (operands.value, self.v_tile)]

        def copy_item(
            item: jax.Array, carry: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            b, head, part = item_index(item, K, parts)
            done, step = carry
            slot = slot_of(done, QUERY_SLOTS)
            wait_from(QUERY_SLOTS, done, self.q_empty.at[slot])
            q: Ref = operands.query.at[b, pl.ds(0, ROWS), head]
            plgpu.copy_gmem_to_smem(q, self.q_tile.at[slot], self.q_full.at[slot])
            first, end = part_of(at(lists.seen, b, head, 0)[...], part, parts)

            def copy_keys(j: Index, step: jax.Array) -> jax.Array:
                k0 = at(lists.order, b, head, 0, first + j)[...] * blocks.k
                for w in range(consumers):
                    slot = slot_of(step, blocks.stages) * consumers + w
                    wait_from(blocks.stages, step, self.empty.at[slot])
                    keys = (*place_of(operands, b, k0 + w * ROWS), head)
                    for source, tile in sources:
                        plgpu.copy_gmem_to_smem(source.at[keys], tile.at[slot], self.full.at[slot])
                    vectors.copy(self.columns, slot, self.full.at[slot], b, k0 + w * ROWS)
                return step + 1

            return done + 1, lax.fori_loop(0, end - first, copy_keys, step)

        each_item(items, copy_item, (jnp.int32(0), jnp.int32(0)))


def _columns(tile: Ref) -> list[Ref]:
    """Return a tile in groups of columns, which need few registers."""
    width = columns_at_once(tile.shape[1])
    return [tile.at[:, pl.ds(first, width)] for first in range(0, tile.shape[1], width)]


class _Rows(NamedTuple):
    """Queries of a consumer, and the consumer's part of their tile list."""

    b: jax.Array
    head: jax.Array  # of the keys
    first: jax.Array  # first tile in the list
    slot: jax.Array
    vectors: tuple[jax.Array | None, ...]
    slopes: jax.Array | None


class _Sums(NamedTuple):
    """Sums of a consumer over its keys."""

    acc: jax.Array  # [ROWS, Hv]
    row_max: jax.Array  # [ROWS], in base 2
    total: jax.Array  # [ROWS]
    step: jax.Array
    scales: tuple[jax.Array, ...] = ()  # f32[ROWS] for the keys and values of the next tile


@dataclass(frozen=True, eq=False)  # fields are tracers, which are not hashable
class _Consumer:
    """Warpgroup that sums over 64 keys of each tile."""

    problem: Problem
    blocks: Blocks
    parts: int
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    slots: _Slots
    results: tuple[Ref, Ref, Ref]
    w: jax.Array

    def attend(
        self, item: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        (_, _, K, Hv), (done, step) = self.operands.value.shape, carry
        b, head, part = item_index(item, K, self.parts)
        full, seen = at(self.lists.full, b, head, 0)[...], at(self.lists.seen, b, head, 0)[...]
        first, end = part_of(seen, part, self.parts)
        slopes = self.operands.slopes
        if slopes is not None:
            slopes = load(at(slopes, b, head, pl.ds(0, ROWS)), WGMMA.reduce(1))
        slot = slot_of(done, QUERY_SLOTS)
        rows = _Rows(b, head, first, slot, self.vectors.of_rows(b, 0), slopes)
        sums = _Sums(filled((ROWS, Hv), 0), filled((ROWS,), LOWEST), filled((ROWS,), 0), step)
        sums = sums._replace(scales=self.scales(rows, 0))

        plgpu.barrier_wait(self.slots.q_full.at[slot])
        ahead = jnp.minimum(jnp.maximum(full - first, 0), end - first)
        sums = each_tile(ahead, end - first, functools.partial(self.tile, rows), sums)
        plgpu.barrier_arrive(self.slots.q_empty.at[slot])
        self.write(item, sums)
        return done + 1, sums.step

    def tile(self, rows: _Rows, j: jax.Array, sums: _Sums, partial: bool) -> _Sums:
        """Add 64 keys of a tile to the sums."""
        problem, slots, w = self.problem, self.slots, self.w
        acc, row_max, total, step, scales = sums
        consumers = self.blocks.k // ROWS
        slot = slot_of(step, self.blocks.stages) * consumers + w
        k0 = self.first_key(rows, j)
        columns = self.vectors.of_columns(slots.columns, slot, rows.b, k0, ROWS)
        position = TilePosition(rows.b, rows.head, 0, k0, rows.vectors, columns, rows.slopes)

        # load the scales early, because they are in device memory
        next_scales = self.scales(rows, j + 1)
        plgpu.barrier_wait(slots.full.at[slot])
        k, v = slots.k_tile.at[slot], slots.v_tile.at[slot]
        if scales:
            k, v = self.widen(k, v, *scales)
        raw = product(slots.q_tile.at[opaque(rows.slot)], k.transpose((1, 0)))
        s, _ = scores(problem, self.operands, raw, position, ROW, partial)
        unit = score_unit(problem, self.operands)
        grown = jnp.maximum(row_max, s.max(axis=1) * unit)
        shrink = jnp.exp2(row_max - grown)
        p = jnp.exp2(s * unit - across(grown, s))
        total = total * shrink + p.sum(axis=1)
        p = p.astype(v.dtype)
        [acc] = add_products(problem, (acc * across(shrink, acc), p, v))
        self.vectors.release(slots.empty.at[slot], partial)
        return _Sums(acc, grown, total, step + 1, next_scales)

    def first_key(self, rows: _Rows, j: Index) -> jax.Array:
        """Return the index of the first key of this consumer in a tile of its part."""
        tile = at(self.lists.order, rows.b, rows.head, 0, rows.first + j)[...]
        return tile * self.blocks.k + self.w * ROWS

    def scales(self, rows: _Rows, j: Index) -> tuple[jax.Array, ...]:
        """Load the scales for the keys and values of a tile (any tile past the end of the list)."""
        if self.operands.k_scale is None:
            return ()
        j = jnp.minimum(j, self.lists.order.shape[3] - 1 - rows.first)
        keys = (*place_of(self.operands, rows.b, self.first_key(rows, j)), rows.head)
        both: tuple[Ref, Ref] = self.operands.k_scale, self.operands.v_scale
        return tuple(load(scale.at[keys], WGMMA.reduce(1)) for scale in both)

    def widen(self, k: Ref, v: Ref, k_scale: jax.Array, v_scale: jax.Array) -> tuple[Ref, Ref]:
        """Dequantize int8 tiles of keys and values, and return the results."""
        wide = self.slots.k_wide.at[self.w], self.slots.v_wide.at[self.w]
        # wait until all warps have read the previous tile
        plgpu.commit_smem()
        for tile, scale, target in zip((k, v), (k_scale, v_scale), wide, strict=True):
            for columns, to in zip(_columns(tile), _columns(target), strict=True):
                x = load(columns, WGMMA).astype(f32)
                to[...] = (x * across(scale, x)).astype(target.dtype)
        plgpu.commit_smem()
        return wide

    def write(self, item: jax.Array, sums: _Sums) -> None:
        """Copy the sums of an item to device memory, a few columns at a time."""
        acc_out, row_max_out, total_out = self.results
        place = item * (self.blocks.k // ROWS) + self.w
        row_max_out[place] = sums.row_max
        total_out[place] = sums.total
        (_, rows, Hv), (_, _, width) = acc_out.shape, self.slots.acc_tile.shape
        for column in range(0, Hv, width):
            # not `slice_in_dim`, because Mosaic GPU does not support its strides
            some = lax.slice(sums.acc, (0, column), (ROWS, column + width))
            self.slots.acc_tile[self.w] = some
            plgpu.commit_smem()
            staged = self.slots.acc_tile.at[self.w, pl.ds(0, rows)]
            target = acc_out.at[place, pl.ds(0, rows), pl.ds(column, width)]
            plgpu.copy_smem_to_gmem(staged, target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
