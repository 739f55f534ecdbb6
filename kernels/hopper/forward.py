"""Forward kernel, which computes the output, the row maxima and the logarithms of the row sums.

A consumer processes 64 queries. For each tile of keys, it starts two products. The first computes
the scores of this tile, and the second multiplies the weights and the values of the previous tile.
The softmax is computed during the second product:

    tile j       q k_j   ...softmax of j...
    tile j - 1           p_(j-1) v_(j-1)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from transformer_jax.kernels.contract import LOWEST, Blocks, Index, Operands, Problem, TileLists
from transformer_jax.kernels.hopper.producer import QueryWalk
from transformer_jax.kernels.hopper.products import (
    add_products,
    opaque,
    overlapped_products,
    product,
)
from transformer_jax.kernels.hopper.programs import each_item, launch, specialize
from transformer_jax.kernels.nvidia.memory import (
    HAS_JAX_11,
    ROW,
    ROWS,
    WGMMA,
    Ref,
    Value,
    across,
    at,
    f32,
    filled,
    slot_of,
    tile_slots,
)
from transformer_jax.kernels.nvidia.schedule import query_items
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
    """Return the output [B, T, N, Hv], and m and log l as f32[B, N, T].

    m is at most `slack` less than the maximum of a row.
    """
    if blocks.stages < 2:
        raise ValueError(f"stages={blocks.stages} must be at least 2 in the forward kernel")
    if not 0 <= blocks.slack <= 15:
        raise ValueError(f"slack={blocks.slack} must be from 0 to 15 (float16 overflows at 2^16)")
    (B, T, N, H), Hv = operands.query.shape, operands.value.shape[-1]
    dtype = operands.query.dtype
    consumers, stages = blocks.q // ROWS, blocks.stages
    items = query_items(operands, blocks)
    vectors = tile_vectors(problem, operands)
    out_slot = (
        {} if shares_query_slot(H, Hv) else {"out_tile": tile_slots(consumers, ROWS, Hv, dtype)}
    )
    return launch(
        problem,
        functools.partial(_forward, problem, blocks),
        consumers,
        items.number,
        auto_barriers=False,
        out_type=(
            result((B, T, N, Hv), dtype, operands.query),
            result((B, N, T), f32, operands.query),
            result((B, N, T), f32, operands.query),
        ),
        scratch_types=dict(
            q_tile=tile_slots(consumers, ROWS, H, dtype),
            k_tile=tile_slots(stages, blocks.k, H, dtype),
            v_tile=tile_slots(stages, blocks.k, Hv, dtype),
            q_full=plgpu.Barrier(num_barriers=consumers),
            q_empty=plgpu.Barrier(num_barriers=consumers),
            k_full=plgpu.Barrier(num_arrivals=1 + len(vectors.copied), num_barriers=stages),
            k_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            v_full=plgpu.Barrier(num_barriers=stages),
            v_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            turn=plgpu.Barrier(num_barriers=consumers),
            **vectors.slots(stages, blocks.k),
            **out_slot,
        ),
    )(lists, operands)


def tile_vectors(problem: Problem, operands: Operands) -> TileVectors:
    """Return the vectors of the mask, which are copied with a tile if shared memory has room."""
    H, Hv = operands.query.shape[-1], operands.value.shape[-1]
    return TileVectors(problem, operands, ROW, copies=has_room(H, Hv) or shares_query_slot(H, Hv))


def has_room(H: int, Hv: int) -> bool:
    """Whether shared memory has room for additional data in `forward` and `backward_dq`."""
    return H + Hv <= 384


def shares_query_slot(H: int, Hv: int) -> bool:
    """Whether the output is copied out through the slot of the queries to save shared memory."""
    return H == Hv > 128


def _forward(
    problem: Problem, blocks: Blocks, lists: TileLists, operands: Operands, out: Ref,
    row_max_out: Ref, log_sum_out: Ref, *,
    turn: Ref, out_tile: Ref = None, **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program. The operands and lists are memory references."""
    walk = QueryWalk(**memory)
    vectors = tile_vectors(problem, operands)
    consumers = blocks.q // ROWS

    def consume(w: jax.Array) -> None:
        consumer = _Consumer(
            problem, blocks, lists, operands, vectors, walk, turn, out_tile,
            (out, row_max_out, log_sum_out), w,
        )  # fmt: skip
        # the turns of the first consumer begin and end with an arrival of the last
        if consumers > 1:
            pl.when(w == consumers - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        items = query_items(operands, blocks).number
        each_item(items, consumer.attend, jnp.int32(0))
        if consumers > 1:
            pl.when(w == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    produce = functools.partial(walk.produce, blocks, lists, operands, vectors)
    specialize(consumers, produce, consume)


class _Sums(NamedTuple):
    """Sums of a consumer over the key tiles."""

    acc: jax.Array  # [ROWS, Hv], without the last tile
    row_max: jax.Array  # [ROWS], in base 2
    total: jax.Array  # [ROWS]
    p: jax.Array  # [ROWS, blocks.k], weights of the last tile
    step: jax.Array


@dataclass(frozen=True, eq=False)  # fields are tracers, which are not hashable
class _Consumer:
    """Warpgroup that computes 64 rows of a tile of queries."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    walk: QueryWalk
    turn: Ref
    out_tile: Ref
    results: tuple[Ref, Ref, Ref]
    w: jax.Array

    def attend(self, item: jax.Array, step: jax.Array) -> jax.Array:
        Hv = self.operands.value.shape[-1]
        b, n, row = query_items(self.operands, self.blocks).at(self.lists, item)
        q0 = row * self.blocks.q + self.w * ROWS
        full, seen = at(self.lists.full, b, n, row)[...], at(self.lists.seen, b, n, row)[...]
        rows = TileRows(b, n, q0, self.vectors.of_rows(b, q0), row)

        plgpu.barrier_wait(self.walk.q_full.at[self.w])
        p_shape, dtype = (ROWS, self.blocks.k), self.walk.v_tile.dtype
        nothing = plgpu.layout_cast(jnp.zeros(p_shape, dtype), WGMMA)
        acc, row_max, total = filled((ROWS, Hv), 0), filled((ROWS,), LOWEST), filled((ROWS,), 0)
        sums = lax.cond(
            seen > 0,
            functools.partial(self.every_tile, rows, full, seen),
            self.no_tile,
            _Sums(acc, row_max, total, nothing, step),
        )
        problem, operands = self.problem, self.operands
        self.write(rows, *divided(problem, operands, b, n, sums.acc, sums.row_max, sums.total))
        return sums.step

    def every_tile(self, rows: TileRows, full: Index, seen: Index, sums: _Sums) -> _Sums:
        """Visit the tiles in a nonempty list."""
        sums = self.tile(rows, jnp.int32(0), sums, partial=True, first=True)
        ahead = jnp.maximum(full, 1)
        sums = lax.fori_loop(
            0, ahead - 1, lambda j, sums: self.tile(rows, j + 1, sums, partial=False), sums
        )
        sums = lax.fori_loop(
            0, seen - ahead, lambda j, sums: self.tile(rows, j + ahead, sums, partial=True), sums
        )
        slot = slot_of(sums.step + self.blocks.stages - 1, self.blocks.stages)
        self.free_queries()
        [acc] = add_products(self.problem, (sums.acc, sums.p, self.walk.v_tile.at[slot]))
        plgpu.barrier_arrive(self.walk.v_empty.at[slot])
        return sums._replace(acc=acc)

    def no_tile(self, sums: _Sums) -> _Sums:
        """Free the slot of the queries for an empty list."""
        self.free_queries()
        return sums

    def free_queries(self) -> None:
        """Release the slot of the queries to the producer, unless the output uses the slot."""
        if self.out_tile is not None:
            plgpu.barrier_arrive(self.walk.q_empty.at[self.w])

    def tile(
        self, rows: TileRows, j: jax.Array, sums: _Sums, partial: bool, first: bool = False
    ) -> _Sums:
        """Multiply the keys of this tile and the values of the previous tile."""
        walk, stages, w = self.walk, self.blocks.stages, self.w
        acc, row_max, total, p, step = sums
        slot, last = slot_of(step, stages), slot_of(step + stages - 1, stages)
        k0 = at(self.lists.order, rows.b, rows.head, rows.row, j)[...] * self.blocks.k
        columns = self.vectors.of_columns(walk.columns, slot, rows.b, k0, self.blocks.k)
        position = TilePosition(rows.b, rows.head, rows.start, k0, rows.vectors, columns)
        softmax = functools.partial(self.softmax, row_max, total, position, slot, partial)

        plgpu.barrier_wait(walk.k_full.at[slot])
        # consumers take turns in the use of the tensor cores, so that the softmax of one overlaps
        # with the products of the others (FlashAttention-3, section 3.1; not measured for three)
        if self.blocks.q > ROWS:
            plgpu.barrier_wait(self.turn.at[w])
        q, k = walk.q_tile.at[opaque(w)], walk.k_tile.at[slot].transpose((1, 0))
        # there are no earlier values to add at the first tile
        if first:
            p, row_max, total, _, _ = softmax(product(q, k, self.hand_over))
        else:
            acc, (p, row_max, total, shrink, risen) = overlapped_products(
                self.problem, (q, k), (acc, p, walk.v_tile.at[last]), self.hand_over, softmax
            )
            plgpu.barrier_arrive(walk.v_empty.at[last])
            acc = rescaled(acc, shrink, risen)
        # cast only now, because the tensor cores read the weights of the last tile until they
        # finish
        return _Sums(acc, row_max, total, p.astype(walk.v_tile.dtype), step + 1)

    def hand_over(self) -> None:
        """Let the next consumer use the tensor cores."""
        if self.blocks.q > ROWS:
            following = jnp.where(self.w == self.blocks.q // ROWS - 1, 0, self.w + 1)
            plgpu.barrier_arrive(self.turn.at[following])

    def softmax(
        self, row_max: jax.Array, total: jax.Array, position: TilePosition, slot: jax.Array,
        partial: bool, raw: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
        """Return p, the new maximum and sum, the factor for old sums, and whether a maximum rose.

        The last result is computed per warp. None means that every warp rescales its sums.
        """
        problem, walk, late = self.problem, self.walk, self.vectors.late(partial)
        # beyond 2^27, row_max + 8 may be rounded to row_max + 16, and 2^16 is infinite in float16
        slack = self.blocks.slack * (1 - 2**-20)
        branches = slack > 0 and HAS_JAX_11 and not problem.interpret
        if not late:
            plgpu.barrier_arrive(walk.k_empty.at[slot])
        s, _ = scores(problem, self.operands, raw, position, ROW, partial)
        unit = score_unit(problem, self.operands)
        top = s.max(axis=1) * unit
        grown = jnp.maximum(row_max, top)
        if slack:  # LOWEST + slack is LOWEST: any score is above it
            grown = jnp.where(top > row_max + slack, top, row_max)
        risen = any_of_warp(grown > row_max) if branches else None
        shrink = jnp.exp2(row_max - grown)
        p = jnp.exp2(s * unit - across(grown, s))
        if late:
            self.vectors.release(walk.k_empty.at[slot], partial)
        summed = total * shrink + p.sum(axis=1)
        if problem.dropout_rate:
            p = jnp.where(kept(problem, self.operands, position, p.shape, ROW), p, 0)
        p, grown, summed, shrink = lax.optimization_barrier((p, grown, summed, shrink))
        # wait for the values of the next product, because the compiler moves nothing past a barrier
        plgpu.barrier_wait(walk.v_full.at[slot])
        return p, grown, summed, shrink, risen

    def write(
        self, rows: TileRows, acc: jax.Array, row_max: jax.Array, total: jax.Array, live: jax.Array
    ) -> None:
        """Copy the results of an item to device memory."""
        out, row_max_out, log_sum_out = self.results
        staged = self.walk.q_tile if self.out_tile is None else self.out_tile
        if self.out_tile is None:
            # the last product of a warp may read rows that another warp writes next
            plgpu.commit_smem()
        staged[self.w] = acc
        rows_out = rows.b, rows.head, pl.ds(rows.start, ROWS)
        row_max_out[rows_out] = jnp.where(live, row_max * LN2, -jnp.inf)
        log_sum_out[rows_out] = jnp.where(live, jnp.log2(total) * LN2, 0)
        # all warps must write before one thread copies
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            staged.at[self.w], out.at[rows.b, pl.ds(rows.start, ROWS), rows.head]
        )
        # all warps wait for the copy, because they will write to the slot again
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.out_tile is None:
            plgpu.barrier_arrive(self.walk.q_empty.at[self.w])


def any_of_warp(rows: jax.Array) -> jax.Array:  # bool[rows] -> bool[]
    """Whether the value of any row in a warp is true."""
    # the result may differ between warps, so code that depends on it must not contain a barrier or
    # wgmma

    @plgpu.inline_mgpu(
        arg_types=(WGMMA.reduce(1),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_: Value, rows: Value) -> Value:
        lane = vector.extract(functools.reduce(arith.ori, rows.registers.flat), [], [0])
        every_lane = mgpu.c(-1, ir.IntegerType.get_signless(32))
        any_lane = nvvm.vote_sync(every_lane, lane, "any")
        return mgpu.FragmentedArray.splat(any_lane, (), is_signed=False)

    return vote(rows)


def rescaled(acc: jax.Array, shrink: jax.Array, risen: jax.Array | None) -> jax.Array:
    """Multiply each row of acc by its factor, which is 1 in a warp without `risen`."""
    if risen is None:
        return acc * across(shrink, acc)
    return lax.cond(risen, lambda: acc * across(shrink, acc), lambda: acc)
