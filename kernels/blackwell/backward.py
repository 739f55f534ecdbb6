"""Compute the backward pass by tcgen05: a kernel for dq, one for dk and dv.

A program holds 128 queries, or 128 keys, and visits tiles of the other side: of 128, or of 64 where
heads are wide. One warpgroup copies, one issues the products. Two consumers make ds of the scores s
and of dp = do . v: both hold all 128 rows, each every second part of the columns, and what either
makes of the scores stays in its registers until dp is there. All sums stay in tensor memory from
the first tile to the last, so no sum depends on the order in which programs finish.

The order of the products of the dq kernel, of tile j after tile j - 1:

    s_j       once the consumers have loaded s_(j-1)
    dp_j      once they have loaded dp_(j-1), and ds_(j-1) lies in tensor memory
    dq += ds_(j-1) k_(j-1)

So dp_j and the sum of dq are multiplied while the consumers compute weights, and s_(j+1) while they
compute ds. There is room for ds beside s, dp and dq. The consumers write it once the sum that reads
ds_(j-1) is done.

The dk/dv kernel has keys as rows. At a width of 128 its four tiles take all of tensor memory, so
the weights p take the place of the scores, and ds that of dp:

    dv += p_(j-1) do_(j-1)    once the consumers have written the weights
    s_j                       once that sum is done, as it reads what s_j overwrites
    dk += ds_(j-1) q_(j-1)    once they have written ds
    dp_j                      once that sum is done

The consumers compute ds during the first two, weights during the last two. As a row of numbers in
the input's dtype is half as wide as one of float32, each consumer writes where the other one reads:
so both load, meet, and then write. The hardware keeps the order of products that sum in one place,
and of no others: where the text says "once", a barrier sees to it.

Where dk and dv do not fit beside tiles of 64 either, H + Hv > 384, their kernel is Ampere's.
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

from transformer_jax.kernels.ampere import backward as ampere
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
    Blocks,
    Operands,
    Problem,
    Saved,
    TileLists,
    learns_slopes,
    result,
)
from transformer_jax.kernels.hopper.backward import HeldQueries, base_of
from transformer_jax.kernels.hopper.forward import has_room
from transformer_jax.kernels.hopper.memory import (
    COLUMN,
    LANES,
    NATIVE,
    ROW,
    Ref,
    across,
    at,
    f32,
    fence,
    filled,
    load_along,
    slot_of,
    tile_slots,
)
from transformer_jax.kernels.hopper.memory import load as load_memory
from transformer_jax.kernels.hopper.producer import KeyWalk, QueryWalk
from transformer_jax.kernels.hopper.schedule import (
    each_item,
    each_tile,
    key_items,
    launch,
    prepare,
    query_items,
)
from transformer_jax.kernels.hopper.scores import (
    TilePosition,
    TileVectors,
    distance,
    queries_as_columns,
    score_gradient,
    weights,
)

CONSUMERS = 2  # which share the columns of a tile
REGISTERS = 200, 56  # of a thread of a consumer, and of one of the others
WIDEST = 384  # H + Hv of which tensor memory holds dk and dv, beside two tiles of 64 queries

RowVectors = tuple[jax.Array | None, ...]
Place = tuple[Any, Any, Any]


def own_parts(w: int, width: int) -> list[Any]:
    """Return the slices of a tile's columns that are a consumer's."""
    return list(parts(width))[w::CONSUMERS]


def _check(kind: str, rows: int, columns: int, stages: int) -> None:
    """Raise ValueError where the tile sizes are not those that a program can hold."""
    if rows != LANES or columns not in (64, 128):
        raise ValueError(
            f"the {kind} kernel holds {LANES} rows, and tiles of 64 or 128 columns, not {rows} and "
            f"{columns}"
        )
    if stages < 2:
        raise ValueError(f"stages is {stages}: the {kind} kernel needs at least 2")


def _write_sum(
    problem: Problem, total: Ref, live: jax.Array, scale: float, w: int, out: Ref, place: Place
) -> None:
    """Write a consumer's columns of a sum to rows of an array, or zeros where nothing was summed.

    The place is batch row, rows and head.
    """
    for part in own_parts(w, total.shape[1]):
        found = load(total, part)
        found = jnp.where(jnp.broadcast_to(live, found.shape), found, 0)
        out[(*place, part)] = (found * scale).astype(out.dtype)
    finish_loads(problem)


# The dq kernel


def backward_dq(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, jax.Array | None]:
    """Return dq [B, T, N, H], and with learned slopes f32[B, N, T] of -sum_j ds_ij |q_i - k_j|."""
    (B, T, N, H), Hv = operands.query.shape, operands.value.shape[-1]
    dtype, stages = operands.query.dtype, blocks.stages
    _check("dq", blocks.q, blocks.k, stages)
    slots = stages if has_room(H, Hv) else 1  # values leave sooner than keys
    has_slopes = learns_slopes(problem, operands)
    slopes = (result((CONSUMERS, B, N, T), f32, operands.query),) * has_slopes
    vectors = TileVectors(problem, operands, ROW, copies=has_room(H, Hv))
    dq, *rows = launch(
        problem,
        functools.partial(_backward_dq, problem, blocks),
        CONSUMERS,
        query_items(operands, blocks).number,
        others=OTHERS,
        auto_barriers=False,
        out_type=(result((B, T, N, H), dtype, operands.query), *slopes),
        scratch_types=dict(
            q_tile=tile_slots(1, LANES, H, dtype),
            do_tile=tile_slots(1, LANES, Hv, dtype),
            k_tile=tile_slots(stages, blocks.k, H, dtype),
            v_tile=tile_slots(slots, blocks.k, Hv, dtype),
            meeting=dict(
                scores=plgpu.TMEM((LANES, blocks.k), f32),
                dp=plgpu.TMEM((LANES, blocks.k), f32),
                ds=plgpu.TMEM((LANES, blocks.k), dtype, packed=True),
                dq=plgpu.TMEM((LANES, H), f32),
                scored=tensor_barrier(BY_ALL),
                weighed=tensor_barrier(CONSUMERS),
                multiplied=tensor_barrier(BY_ALL),
                differentiated=tensor_barrier(CONSUMERS),
                summed=tensor_barrier(),
            ),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=1),
            q_empty=tensor_barrier(barriers=1),
            k_full=plgpu.Barrier(num_arrivals=1 + len(vectors.copied), num_barriers=stages),
            k_empty=tensor_barrier(1 + CONSUMERS * bool(vectors.copied), stages),
            v_full=plgpu.Barrier(num_barriers=slots),
            v_empty=tensor_barrier(barriers=slots),
            **vectors.slots(stages, blocks.k),
        ),
    )(prepare(lists), operands, saved.do, base_of(saved), saved.D)
    return dq, rows[0].sum(axis=0) if rows else None


class _QueryMeeting(NamedTuple):
    """Hold what the tensor cores and the consumers of the dq kernel hand one another."""

    scores: Ref  # f32[LANES, blocks.k]
    dp: Ref  # f32[LANES, blocks.k]
    ds: Ref  # [LANES, blocks.k]; du with a softcap
    dq: Ref  # f32[LANES, H]
    scored: Ref  # the scores are there
    weighed: Ref  # the consumers have loaded the scores
    multiplied: Ref  # dp is there
    differentiated: Ref  # the consumers have loaded dp, and ds is there
    summed: Ref  # the sum that reads ds is done


def _backward_dq(
    problem: Problem, blocks: Blocks, lists: TileLists, operands: Operands,
    do: Ref, base: Ref, D: Ref, dq: Ref, slope_out: Ref = None, *,
    meeting: dict[str, Ref], **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program; operands, lists and what follows are references to memory."""
    walk, met = QueryWalk(**memory), _QueryMeeting(**meeting)
    H, Hv = operands.query.shape[-1], operands.value.shape[-1]
    vectors = TileVectors(problem, operands, ROW, copies=has_room(H, Hv))
    items = query_items(operands, blocks).number

    def consume(w: int) -> None:
        consumer = _QueryConsumer(
            problem, blocks, lists, operands, vectors, walk, met, (base, D), dq, slope_out, w
        )
        each_item(items, consumer.walk_item, jnp.int32(0))

    def multiply() -> None:
        products = _QueryProducts(blocks, lists, operands, walk, met)
        each_item(items, products.of_item, jnp.int32(0))

    def produce() -> None:
        walk.produce(blocks, lists, operands, vectors, do)

    specialise(REGISTERS, CONSUMERS, consume, multiply, produce)


@dataclass(frozen=True, eq=False)  # which holds tracers, that have no hash
class _QueryProducts:
    """Issue the products of the dq kernel."""

    blocks: Blocks
    lists: TileLists
    operands: Operands
    walk: QueryWalk
    met: _QueryMeeting

    def of_item(self, item: jax.Array, step: jax.Array) -> jax.Array:
        """Multiply the tiles of an item."""
        b, n, row = query_items(self.operands, self.blocks).at(self.lists, item)
        seen = at(self.lists.seen, b, n, row)[...]
        plgpu.barrier_wait(self.walk.q_full.at[0])

        def no_tile(step: jax.Array) -> jax.Array:
            plgpu.barrier_arrive(self.walk.q_empty.at[0])
            return step

        def every_tile(step: jax.Array) -> jax.Array:
            self.score(step)
            self.multiply(step, seen == 1)
            return lax.fori_loop(0, seen, lambda j, step: self.tile(step, j, seen), step)

        return lax.cond(seen > 0, every_tile, no_tile, step)

    def score(self, step: Any) -> None:
        """Multiply the queries with the keys of a tile."""
        walk, slot = self.walk, slot_of(step, self.blocks.stages)
        plgpu.barrier_wait(walk.k_full.at[slot])
        plgpu.tcgen05_mma(
            self.met.scores, walk.q_tile.at[0], walk.k_tile.at[slot].transpose((1, 0)),
            accumulate=False,
        )  # fmt: skip
        commit(self.met.scored)

    def multiply(self, step: Any, last: Any) -> None:
        """Multiply do with the values of a tile; the last lets the queries and do go."""
        walk, slot = self.walk, slot_of(step, self.walk.v_tile.shape[0])
        plgpu.barrier_wait(walk.v_full.at[slot])
        plgpu.tcgen05_mma(
            self.met.dp, walk.do_tile.at[0], walk.v_tile.at[slot].transpose((1, 0)),
            accumulate=False,
        )  # fmt: skip
        commit(self.met.multiplied)
        plgpu.tcgen05_commit_arrive(walk.v_empty.at[slot])
        pl.when(last)(lambda: plgpu.tcgen05_commit_arrive(walk.q_empty.at[0]))

    def tile(self, step: Any, j: Any, seen: Any) -> Any:
        """Add a tile to dq, and multiply the next one."""
        met = self.met
        slot = slot_of(step, self.blocks.stages)
        plgpu.barrier_wait(met.weighed)
        pl.when(j + 1 < seen)(lambda: self.score(step + 1))
        plgpu.barrier_wait(met.differentiated)
        pl.when(j + 1 < seen)(lambda: self.multiply(step + 1, j + 2 == seen))
        plgpu.tcgen05_mma(met.dq, met.ds, self.walk.k_tile.at[slot], met.summed, accumulate=j > 0)
        plgpu.tcgen05_commit_arrive(self.walk.k_empty.at[slot])
        return step + 1


@dataclass(frozen=True, eq=False)  # which holds tracers, that have no hash
class _QueryConsumer:
    """Compute ds of a consumer's columns, by one warpgroup."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    walk: QueryWalk
    met: _QueryMeeting
    of_rows: tuple[Ref, Ref]  # base and D
    dq: Ref
    slope_out: Ref
    w: int

    def walk_item(self, item: jax.Array, step: jax.Array) -> jax.Array:
        """Compute an item: dq of some queries."""
        b, n, row = query_items(self.operands, self.blocks).at(self.lists, item)
        q0 = row * self.blocks.q
        queries = b, n, pl.ds(q0, LANES)
        full, seen = at(self.lists.full, b, n, row)[...], at(self.lists.seen, b, n, row)[...]
        base, D = (load_memory(x.at[queries], NATIVE.reduce(1)) for x in self.of_rows)
        rows = HeldQueries(b, n, row, q0, base, D, self.vectors.of_rows(b, q0, LANES))
        carry = filled((LANES,), 0), step
        slope, end = each_tile(full, seen, functools.partial(self.tile, rows, step), carry)
        pl.when(seen > 0)(lambda: plgpu.barrier_wait(self.met.summed))
        place = b, pl.ds(q0, LANES), n
        _write_sum(self.problem, self.met.dq, seen > 0, self.problem.scale, self.w, self.dq, place)
        if self.slope_out is not None:
            self.slope_out[(self.w, *queries)] = slope
        return end

    def tile(
        self, rows: HeldQueries, start: jax.Array, j: jax.Array, carry: tuple[jax.Array, jax.Array],
        partial: bool,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Make ds of a tile's scores and dp, and add to the row of dslopes."""
        problem, operands, met, vectors = self.problem, self.operands, self.met, self.vectors
        (slope, step), width = carry, self.blocks.k
        slot = slot_of(step, self.blocks.stages)
        k0 = at(self.lists.order, rows.b, rows.n, rows.row, j)[...] * width
        if vectors.copied:
            plgpu.barrier_wait(self.walk.k_full.at[slot])
        plgpu.barrier_wait(met.scored)
        found = []
        for part in own_parts(self.w, width):
            beside = vectors.of_columns(self.walk.columns, slot, rows.b, k0, width)
            beside = tuple(x if x is None else x.at[part] for x in beside)
            where = TilePosition(rows.b, rows.n, rows.q0, k0 + part.start, rows.vectors, beside)
            raw = load(met.scores, part)
            base = across(rows.base, raw)
            found.append((part, where, weights(problem, operands, raw, base, where, ROW, partial)))
        finish_loads(problem)
        plgpu.barrier_arrive(met.weighed)
        plgpu.barrier_wait(met.multiplied)
        gradients = []
        for part, where, of_part in found:
            dp = load(met.dp, part)
            D = across(rows.D, dp)
            if self.slope_out is not None:
                ds = score_gradient(problem, of_part.weight, dp, D, partial)
                slope -= (ds * distance(where, ds.shape)).sum(axis=1)
            du = score_gradient(problem, of_part.capped, dp, D, partial)
            gradients.append((part, du.astype(operands.query.dtype)))
        if vectors.copied:
            vectors.release(self.walk.k_empty.at[slot], partial)
        finish_loads(problem)
        pl.when(step > start)(lambda: plgpu.barrier_wait(met.summed))
        for part, du in gradients:
            plgpu.async_store_tmem(met.ds.at[:, part], du)
        finish_stores(problem)
        plgpu.barrier_arrive(met.differentiated)
        return slope, step + 1


# The dk/dv kernel


def backward_dkdv(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, jax.Array]:
    """Return dk [B, S, K, H] and dv [B, S, K, Hv]; the rows of `lists` are key tiles here.

    Where H + Hv > 384, the kernel and its tile sizes are those of `ampere`.
    """
    H, (B, S, K, Hv) = operands.query.shape[-1], operands.value.shape
    if H + Hv > WIDEST:
        return ampere.backward_dkdv(problem, operands, lists, blocks, saved)
    _check("dk/dv", blocks.k, blocks.q, blocks.stages)
    dtype, stages = operands.key.dtype, blocks.stages
    vectors = TileVectors(problem, operands, COLUMN)
    return launch(
        problem,
        functools.partial(_backward_dkdv, problem, blocks),
        CONSUMERS,
        key_items(operands, blocks).number,
        others=OTHERS,
        auto_barriers=False,
        out_type=(
            result((B, S, K, H), dtype, operands.query),
            result((B, S, K, Hv), dtype, operands.query),
        ),
        scratch_types=dict(
            k_tile=tile_slots(1, LANES, H, dtype),
            v_tile=tile_slots(1, LANES, Hv, dtype),
            q_tile=tile_slots(stages, blocks.q, H, dtype),
            do_tile=tile_slots(stages, blocks.q, Hv, dtype),
            base_columns=plgpu.SMEM((stages, blocks.q), f32),
            D_columns=plgpu.SMEM((stages, blocks.q), f32),
            meeting=dict(
                scores=scores_over_weights(blocks.q, dtype),
                dp=scores_over_weights(blocks.q, dtype),
                dk=plgpu.TMEM((LANES, H), f32),
                dv=plgpu.TMEM((LANES, Hv), f32),
                scored=tensor_barrier(BY_ALL),
                weighed=tensor_barrier(CONSUMERS),
                added_dv=tensor_barrier(),
                multiplied=tensor_barrier(BY_ALL),
                differentiated=tensor_barrier(CONSUMERS),
                added_dk=tensor_barrier(),
                summed=tensor_barrier(),
            ),
            k_full=plgpu.Barrier(num_arrivals=2, num_barriers=1),
            k_empty=tensor_barrier(barriers=1),
            q_full=plgpu.Barrier(num_arrivals=4 + len(vectors.copied), num_barriers=stages),
            q_empty=tensor_barrier(1 + CONSUMERS, stages),
            both=tensor_barrier(CONSUMERS),
            **vectors.slots(stages, blocks.q),
        ),
    )(prepare(lists), queries_as_columns(operands), saved.do, base_of(saved), saved.D)


class _KeyMeeting(NamedTuple):
    """Hold what the tensor cores and the consumers of the dk/dv kernel hand one another."""

    scores: Any  # f32[LANES, blocks.q], and [LANES, blocks.q] of weights in their place
    dp: Any  # f32[LANES, blocks.q], and [LANES, blocks.q] of ds in its place; du with a softcap
    dk: Ref  # f32[LANES, H]
    dv: Ref  # f32[LANES, Hv]
    scored: Ref  # the scores are there
    weighed: Ref  # the weights are there
    added_dv: Ref  # the sum that reads the weights is done
    multiplied: Ref  # dp is there
    differentiated: Ref  # ds is there
    added_dk: Ref  # the sum that reads ds is done
    summed: Ref  # all sums of an item are done


def _backward_dkdv(
    problem: Problem, blocks: Blocks, lists: TileLists, operands: Operands,
    do: Ref, base: Ref, D: Ref, dk_out: Ref, dv_out: Ref, *,
    meeting: dict[str, Any], **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program; operands, lists and what follows are references to memory."""
    walk, met = KeyWalk(**memory), _KeyMeeting(**meeting)
    vectors = TileVectors(problem, operands, COLUMN)
    items = key_items(operands, blocks).number

    def consume(w: int) -> None:
        consumer = _KeyConsumer(
            problem, blocks, lists, operands, vectors, walk, met, (dk_out, dv_out), w
        )
        each_item(items, consumer.walk_item, jnp.int32(0))

    def multiply() -> None:
        products = _KeyProducts(blocks, lists, operands, walk, met)
        each_item(items, products.of_item, jnp.int32(0))

    def produce() -> None:
        walk.produce(blocks, lists, operands, vectors, do, base, D)

    specialise(REGISTERS, CONSUMERS, consume, multiply, produce)


class _Keys(NamedTuple):
    """Say which keys a program holds, and what a consumer has loaded of them."""

    b: jax.Array
    head: jax.Array
    row: jax.Array  # of tiles
    k0: jax.Array
    vectors: RowVectors


@dataclass(frozen=True, eq=False)  # which holds tracers, that have no hash
class _KeyProducts:
    """Issue the products of the dk/dv kernel."""

    blocks: Blocks
    lists: TileLists
    operands: Operands
    walk: KeyWalk
    met: _KeyMeeting

    def of_item(self, item: jax.Array, step: jax.Array) -> jax.Array:
        """Multiply the tiles of an item, of all query heads that read the key head."""
        group = self.operands.query.shape[2] // self.operands.key.shape[2]
        b, head, row = key_items(self.operands, self.blocks).at(self.lists, item, group)

        def add(g: Any, total: Any) -> Any:
            return total + at(self.lists.seen, b, head * group + g, row)[...]

        total = lax.fori_loop(0, group, add, jnp.int32(0))
        plgpu.barrier_wait(self.walk.k_full.at[0])

        def no_tile(step: jax.Array) -> jax.Array:
            plgpu.barrier_arrive(self.walk.k_empty.at[0])
            return step

        def every_tile(step: jax.Array) -> jax.Array:
            self.score(step)
            self.multiply(step, total == 1)
            step = lax.fori_loop(0, total, lambda j, step: self.tile(step, j, total), step)
            plgpu.tcgen05_commit_arrive(self.met.summed)
            return step

        return lax.cond(total > 0, every_tile, no_tile, step)

    def score(self, step: Any) -> None:
        """Multiply the keys with the queries of a tile."""
        walk, slot = self.walk, slot_of(step, self.blocks.stages)
        plgpu.barrier_wait(walk.q_full.at[slot])
        plgpu.tcgen05_mma(
            self.met.scores[0], walk.k_tile.at[0], walk.q_tile.at[slot].transpose((1, 0)),
            accumulate=False,
        )  # fmt: skip
        commit(self.met.scored)

    def multiply(self, step: Any, last: Any) -> None:
        """Multiply the values with do of a tile; the last lets the keys and values go."""
        walk, slot = self.walk, slot_of(step, self.blocks.stages)
        plgpu.tcgen05_mma(
            self.met.dp[0], walk.v_tile.at[0], walk.do_tile.at[slot].transpose((1, 0)),
            accumulate=False,
        )  # fmt: skip
        commit(self.met.multiplied)
        pl.when(last)(lambda: plgpu.tcgen05_commit_arrive(walk.k_empty.at[0]))

    def tile(self, step: Any, j: Any, total: Any) -> Any:
        """Add a tile to dv and dk, and multiply the next one."""
        walk, met = self.walk, self.met
        slot = slot_of(step, self.blocks.stages)
        plgpu.barrier_wait(met.weighed)
        plgpu.tcgen05_mma(
            met.dv, met.scores[1], walk.do_tile.at[slot], met.added_dv, accumulate=j > 0
        )
        plgpu.barrier_wait(met.added_dv)
        pl.when(j + 1 < total)(lambda: self.score(step + 1))
        plgpu.barrier_wait(met.differentiated)
        plgpu.tcgen05_mma(met.dk, met.dp[1], walk.q_tile.at[slot], met.added_dk, accumulate=j > 0)
        plgpu.tcgen05_commit_arrive(walk.q_empty.at[slot])
        plgpu.barrier_wait(met.added_dk)
        pl.when(j + 1 < total)(lambda: self.multiply(step + 1, j + 2 == total))
        return step + 1


@dataclass(frozen=True, eq=False)  # which holds tracers, that have no hash
class _KeyConsumer:
    """Compute weights and ds of a consumer's columns, by one warpgroup."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    walk: KeyWalk
    met: _KeyMeeting
    results: tuple[Ref, Ref]  # dk and dv
    w: int

    def walk_item(self, item: jax.Array, step: jax.Array) -> jax.Array:
        """Compute an item: dk and dv of some keys."""
        group = self.operands.query.shape[2] // self.operands.key.shape[2]
        b, head, row = key_items(self.operands, self.blocks).at(self.lists, item, group)
        k0 = row * self.blocks.k
        keys = _Keys(b, head, row, k0, self.vectors.of_rows(b, k0, LANES))

        def one_head(g: Any, step: Any) -> Any:
            n = head * group + g
            full, seen = at(self.lists.full, b, n, row)[...], at(self.lists.seen, b, n, row)[...]
            return each_tile(full, seen, functools.partial(self.tile, keys, n), step)

        end = lax.fori_loop(0, group, one_head, step)
        pl.when(end > step)(lambda: plgpu.barrier_wait(self.met.summed))
        place = b, pl.ds(k0, LANES), head
        dk, dv = self.results
        _write_sum(self.problem, self.met.dk, end > step, self.problem.scale, self.w, dk, place)
        _write_sum(self.problem, self.met.dv, end > step, 1.0, self.w, dv, place)
        return end

    def tile(
        self, keys: _Keys, n: jax.Array, j: jax.Array, step: jax.Array, partial: bool
    ) -> jax.Array:
        """Make weights of a tile's scores, and ds of its dp."""
        problem, walk, met, width = self.problem, self.walk, self.met, self.blocks.q
        dtype = self.operands.query.dtype
        slot = slot_of(step, self.blocks.stages)
        q0 = at(self.lists.order, keys.b, n, keys.row, j)[...] * width
        beside = self.vectors.of_columns(walk.columns, slot, keys.b, q0, width)
        plgpu.barrier_wait(walk.q_full.at[slot])
        plgpu.barrier_wait(met.scored)
        capped, dropped = [], []
        own = own_parts(self.w, width)
        for part in own:
            columns = tuple(x if x is None else x.at[part] for x in beside)
            where = TilePosition(keys.b, n, q0 + part.start, keys.k0, keys.vectors, columns)
            raw = load(met.scores[0], part)
            base = load_along(walk.base_columns.at[slot, part], raw.shape, COLUMN)
            found = weights(problem, self.operands, raw, base, where, COLUMN, partial)
            capped.append(found.capped)
            dropped.append(found.dropped.astype(dtype))
        self.replace(met.scores[1], own, dropped, met.weighed)
        plgpu.barrier_wait(met.multiplied)
        gradients = []
        for part, weight in zip(own, capped, strict=True):
            dp = load(met.dp[0], part)
            D = load_along(walk.D_columns.at[slot, part], dp.shape, COLUMN)
            gradients.append(score_gradient(problem, weight, dp, D, partial).astype(dtype))
        fence(problem)  # the next copies come after plain reads of the slot
        plgpu.barrier_arrive(walk.q_empty.at[slot])
        self.replace(met.dp[1], own, gradients, met.differentiated)
        return step + 1

    def replace(self, tile: Ref, own: list[Any], values: list[jax.Array], there: Ref) -> None:
        """Write what was made of a tile in its place, once both consumers have loaded theirs."""
        finish_loads(self.problem)
        plgpu.barrier_arrive(self.walk.both)
        plgpu.barrier_wait(self.walk.both)
        for part, value in zip(own, values, strict=True):
            plgpu.async_store_tmem(tile.at[:, part], value)
        finish_stores(self.problem)
        plgpu.barrier_arrive(there)
