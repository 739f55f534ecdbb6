"""Compute output, row maximum and the logarithm of the row sum: the forward kernel.

A program holds 128 queries for each of its consumers. One warpgroup copies, one issues the
products, in this order:

    s_0 = q_0 k_j     s_1 = q_1 k_j     o_0 += p_0 v_j    s_0 = q_0 k_(j+1)    o_1 += p_1 v_j  ...

so that the tensor cores work for one consumer while the other computes its softmax. Scores,
weights and output stay in tensor memory, the weights in the place of the scores that they are made
of: the next scores wait until the product that reads the weights is done.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.blackwell.tiles import (
    BY_ALL,
    OTHERS,
    commit,
    finish_loads,
    finish_stores,
    load,
    parts,
    scores_over_weights,
    specialise,
    tensor_barrier,
)
from transformer_jax.kernels.contract import (
    LOWEST,
    Blocks,
    Operands,
    Problem,
    TileLists,
    result,
)
from transformer_jax.kernels.hopper.forward import any_of_warp, raised, with_sink
from transformer_jax.kernels.hopper.memory import (
    LANES,
    ROW,
    Ref,
    across,
    at,
    f32,
    filled,
    slot_of,
    tile_slots,
)
from transformer_jax.kernels.hopper.producer import QueryWalk
from transformer_jax.kernels.hopper.schedule import (
    each_item,
    each_tile,
    launch,
    prepare,
    query_items,
)
from transformer_jax.kernels.hopper.scores import (
    LN2,
    QueryRows,
    TilePosition,
    TileVectors,
    kept,
    score_unit,
    scores,
)

REGISTERS = {1: (240, 96), 2: (200, 56)}
"""Registers of a thread of a consumer, and of one of the others, by the number of consumers."""


def forward(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the output [B, T, N, Hv], and f32[B, N, T] each of m and log l.

    m is the maximum of a row, less at most the slack. With `detect_nonfinite`, log l is NaN in rows
    that met what is not finite, seen or not.
    """
    if blocks.q not in (LANES, 2 * LANES):
        raise ValueError(f"q is {blocks.q}: of 128 queries a consumer, must be 128 or 256")
    if blocks.stages < 2:
        raise ValueError(f"stages is {blocks.stages}: the forward kernel needs at least 2")
    if not 0 <= blocks.slack <= 15:
        raise ValueError(f"slack is {blocks.slack}: must be from 0 to 15, as float16 ends at 2^16")
    (B, T, N, H), Hv = operands.query.shape, operands.value.shape[-1]
    dtype, rows = operands.query.dtype, result((B, N, T), f32, operands.query)
    consumers, stages = blocks.q // LANES, blocks.stages
    return launch(
        problem,
        functools.partial(_forward, problem, blocks),
        consumers,
        query_items(operands, blocks).number,
        others=OTHERS,
        auto_barriers=False,
        out_type=(result((B, T, N, Hv), dtype, operands.query), rows, rows),
        scratch_types=dict(
            q_tile=tile_slots(consumers, LANES, H, dtype),
            k_tile=tile_slots(stages, blocks.k, H, dtype),
            v_tile=tile_slots(stages, blocks.k, Hv, dtype),
            tiles=[scores_over_weights(blocks.k, dtype) for _ in range(consumers)],
            sums=[plgpu.TMEM((LANES, Hv), f32) for _ in range(consumers)],
            q_full=plgpu.Barrier(num_barriers=consumers),
            q_empty=tensor_barrier(barriers=consumers),
            k_full=plgpu.Barrier(num_barriers=stages),
            k_empty=tensor_barrier(barriers=stages),
            v_full=plgpu.Barrier(num_barriers=stages),
            v_empty=tensor_barrier(barriers=stages),
            scored=tensor_barrier(BY_ALL, consumers),
            weighed=tensor_barrier(barriers=consumers),
            summed=tensor_barrier(barriers=consumers),
            whole=tensor_barrier(barriers=consumers),
        ),
    )(prepare(lists), operands)


def _forward(
    problem: Problem, blocks: Blocks, lists: TileLists, operands: Operands, out: Ref,
    row_max_out: Ref, log_sum_out: Ref, *,
    tiles: list[Any], sums: list[Ref], scored: Ref, weighed: Ref, summed: Ref,
    whole: Ref, **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program; operands and lists are references to memory."""
    walk = QueryWalk(**memory)
    vectors = TileVectors(problem, operands, ROW, copies=False)  # read where they lie
    meeting = _Meeting(tiles, sums, scored, weighed, summed, whole)
    items = query_items(operands, blocks)

    def consume(w: int) -> None:
        consumer = _Consumer(
            problem, blocks, lists, operands, vectors, meeting,
            (out, row_max_out, log_sum_out), w,
        )  # fmt: skip
        each_item(items.number, consumer.attend, None)

    def multiply() -> None:
        products = _Products(blocks, lists, operands, walk, meeting)
        each_item(items.number, products.of_item, jnp.int32(0))

    def produce() -> None:
        walk.produce(blocks, lists, operands, vectors)

    consumers = blocks.q // LANES
    specialise(REGISTERS[consumers], consumers, consume, multiply, produce)


class _Meeting(NamedTuple):
    """Hold what the tensor cores and each consumer hand one another.

    A barrier must not complete two phases before who waits has seen the first one. So the second
    needs an arrival of who waits, and `whole` is no phase of `scored`: after it the scores of the
    next item may come at once.
    """

    tiles: list[Any]  # of scores [LANES, blocks.k], and of weights in their place
    sums: list[Ref]  # f32[LANES, Hv], of weights with values
    scored: Ref  # the scores of a tile are there, and the sums of all tiles before it
    weighed: Ref  # the weights are there, and the sums fit them
    summed: Ref  # the product that reads the weights is done
    whole: Ref  # the sums of an item are there


@dataclass(frozen=True, eq=False)  # which holds tracers, that have no hash
class _Products:
    """Issue the products of all consumers."""

    blocks: Blocks
    lists: TileLists
    operands: Operands
    walk: QueryWalk
    meeting: _Meeting

    def of_item(self, item: jax.Array, step: jax.Array) -> jax.Array:
        """Multiply the tiles of an item."""
        b, n, row = query_items(self.operands, self.blocks).at(self.lists, item)
        seen = at(self.lists.seen, b, n, row)[...]
        consumers = range(len(self.meeting.sums))
        for w in consumers:
            plgpu.barrier_wait(self.walk.q_full.at[w])

        def no_tile(step: jax.Array) -> jax.Array:
            for w in consumers:
                plgpu.barrier_arrive(self.walk.q_empty.at[w])
            return step

        def every_tile(step: jax.Array) -> jax.Array:
            for w in consumers:
                self.score(w, step, seen == 1)
            return lax.fori_loop(0, seen, lambda j, step: self.tile(step, j, seen), step)

        return lax.cond(seen > 0, every_tile, no_tile, step)

    def score(self, w: int, step: Any, last: Any) -> None:
        """Multiply a consumer's queries with the keys of a tile; the last lets the queries go."""
        walk, slot = self.walk, slot_of(step, self.blocks.stages)
        if w == 0:
            plgpu.barrier_wait(walk.k_full.at[slot])
        scores, _ = self.meeting.tiles[w]
        k = walk.k_tile.at[slot].transpose((1, 0))
        plgpu.tcgen05_mma(scores, walk.q_tile.at[w], k, accumulate=False)
        commit(self.meeting.scored.at[w])
        if w == len(self.meeting.sums) - 1:
            plgpu.tcgen05_commit_arrive(walk.k_empty.at[slot])
        pl.when(last)(lambda: plgpu.tcgen05_commit_arrive(walk.q_empty.at[w]))

    def tile(self, step: Any, j: Any, seen: Any) -> Any:
        """Multiply the weights of a tile with its values, and each time the next tile's keys."""
        walk, meeting = self.walk, self.meeting
        slot = slot_of(step, self.blocks.stages)
        for w in range(len(meeting.sums)):
            plgpu.barrier_wait(meeting.weighed.at[w])
            if w == 0:
                plgpu.barrier_wait(walk.v_full.at[slot])
            _, weights = meeting.tiles[w]
            plgpu.tcgen05_mma(
                meeting.sums[w], weights, walk.v_tile.at[slot], meeting.summed.at[w],
                accumulate=j > 0,
            )  # fmt: skip
            if w == len(meeting.sums) - 1:
                plgpu.tcgen05_commit_arrive(walk.v_empty.at[slot])
            plgpu.barrier_wait(meeting.summed.at[w])
            lax.cond(
                j + 1 < seen,
                lambda w=w: self.score(w, step + 1, j + 2 == seen),
                lambda w=w: plgpu.barrier_arrive(meeting.whole.at[w]),
            )
        return step + 1


class _Sums(NamedTuple):
    """Carry what a consumer keeps in registers from tile to tile."""

    row_max: jax.Array  # [LANES], in base 2
    total: jax.Array  # [LANES]


@dataclass(frozen=True, eq=False)  # which holds tracers, that have no hash
class _Consumer:
    """Compute the softmax of 128 queries, by one warpgroup."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    meeting: _Meeting
    results: tuple[Ref, Ref, Ref]
    w: int

    def attend(self, item: jax.Array, _: None) -> None:
        """Compute an item."""
        b, n, row = query_items(self.operands, self.blocks).at(self.lists, item)
        q0 = row * self.blocks.q + self.w * LANES
        full, seen = at(self.lists.full, b, n, row)[...], at(self.lists.seen, b, n, row)[...]
        rows = QueryRows(b, n, row, q0, self.vectors.of_rows(b, q0, LANES))
        sums = _Sums(filled((LANES,), LOWEST), filled((LANES,), 0))
        sums = each_tile(full, seen, functools.partial(self.tile, rows), sums)
        pl.when(seen > 0)(lambda: plgpu.barrier_wait(self.meeting.whole.at[self.w]))
        self.write(rows, seen, sums)

    def tile(self, rows: QueryRows, j: jax.Array, sums: _Sums, partial: bool) -> _Sums:
        """Make weights of a tile's scores, and have the sums fit them."""
        problem, operands, vectors, w = self.problem, self.operands, self.vectors, self.w
        row_max, total = sums
        k0 = at(self.lists.order, rows.b, rows.n, rows.row, j)[...] * self.blocks.k
        columns = list(parts(self.blocks.k))
        scored, weights = self.meeting.tiles[w]
        plgpu.barrier_wait(self.meeting.scored.at[w])
        found, positions = [], []
        for part in columns:
            raw = load(scored, part)
            start = k0 + part.start
            beside = vectors.of_columns(None, 0, rows.b, start, part.size)
            where = TilePosition(rows.b, rows.n, rows.q0, start, rows.vectors, beside)
            if problem.detect_nonfinite:  # 0 * a product that is not finite is NaN
                total = total + (raw * 0).sum(axis=1)
            found.append(scores(problem, operands, raw, where, ROW, partial)[0])
            positions.append(where)
        unit = score_unit(problem, operands)
        top = functools.reduce(jnp.maximum, [s.max(axis=1) for s in found]) * unit
        # beyond 2^27, row_max + 8 may be rounded to row_max + 16, and 2^16 is infinite in float16
        grown = raised(row_max, top, self.blocks.slack * (1 - 2**-20))
        shrink = jnp.exp2(row_max - grown)
        total = total * shrink
        finish_loads(problem)  # the weights take the place of the scores
        for part, s, where in zip(columns, found, positions, strict=True):
            p = jnp.exp2(s * unit - across(grown, s))
            total = total + p.sum(axis=1)
            if problem.dropout_rate:
                p = jnp.where(kept(problem, operands, where, p.shape, ROW), p, 0)
            plgpu.async_store_tmem(weights.at[:, part], p.astype(operands.query.dtype))
        self.rescale(row_max, grown, shrink)
        finish_stores(problem)
        plgpu.barrier_arrive(self.meeting.weighed.at[w])
        return _Sums(grown, total)

    def rescale(self, row_max: jax.Array, grown: jax.Array, shrink: jax.Array) -> None:
        """Multiply the sums by the factor of their row, in warps where one of the maxima rose.

        Before an item's first tile the maxima are the lowest number, and what is multiplied is what
        the last item left: the product of the first tile overwrites it.
        """
        acc = self.meeting.sums[self.w]

        def multiply() -> None:
            for part in parts(acc.shape[1]):
                old = load(acc, part)
                finish_loads(self.problem)
                plgpu.async_store_tmem(acc.at[:, part], old * across(shrink, old))

        if self.problem.interpret:
            multiply()
        else:
            pl.when(any_of_warp(grown > row_max))(multiply)

    def write(self, rows: QueryRows, seen: Any, sums: _Sums) -> None:
        """Write an item's results to device memory."""
        out, row_max_out, log_sum_out = self.results
        dtype, acc = self.operands.query.dtype, self.meeting.sums[self.w]
        factor, row_max, total, live = with_sink(
            self.problem, self.operands, rows.b, rows.n, sums.row_max, sums.total
        )
        mark = filled((LANES,), 0)
        for part in parts(acc.shape[1]):
            # without a tile nothing was summed, and tensor memory holds what was there before
            whole = load(acc, part)
            whole = jnp.where(jnp.broadcast_to(seen > 0, whole.shape), whole, 0)
            rounded = (whole * across(factor, whole)).astype(dtype)
            mark = mark + (rounded.astype(f32) * 0).sum(axis=1)
            out[rows.b, pl.ds(rows.q0, LANES), rows.n, part] = rounded
            finish_loads(self.problem)  # here, lest all parts are in registers at once
        place = rows.b, rows.n, pl.ds(rows.q0, LANES)
        row_max_out[place] = jnp.where(live, row_max * LN2, -jnp.inf)
        log_sum = jnp.where(live, jnp.log2(total) * LN2, 0)
        if self.problem.detect_nonfinite:
            log_sum = log_sum + mark
        log_sum_out[place] = log_sum
