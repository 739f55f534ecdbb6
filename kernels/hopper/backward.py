"""Compute the backward pass in two kernels: one for dq, one for dk and dv.

The dq kernel walks by queries, the dk/dv kernel by keys. Each sums what it owns in registers, so no
sum depends on the order in which programs finish: the results have the same bits in every run.
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

from transformer_jax.kernels.contract import (
    Blocks,
    Operands,
    Problem,
    Saved,
    TileLists,
    learns_slopes,
    result,
)
from transformer_jax.kernels.hopper.forward import has_room
from transformer_jax.kernels.hopper.memory import (
    COLUMN,
    ROW,
    ROWS,
    WGMMA,
    Ref,
    across,
    at,
    f32,
    filled,
    load,
    load_along,
    opaque,
    slot_of,
    tile_slots,
)
from transformer_jax.kernels.hopper.producer import KeyWalk, QueryWalk
from transformer_jax.kernels.hopper.products import add_products, product
from transformer_jax.kernels.hopper.schedule import (
    each_item,
    each_tile,
    item_index,
    key_items,
    launch,
    query_items,
    specialise,
)
from transformer_jax.kernels.hopper.scores import (
    LOG2E,
    TilePosition,
    TileVectors,
    distance,
    is_linear,
    probabilities,
    queries_as_columns,
)

RowVectors = tuple[jax.Array | None, ...]


def base_of(saved: Saved) -> jax.Array:  # f32[B, N, T]
    """Return what p = 2^(s - base) subtracts."""
    return (saved.row_max + saved.log_sum) * LOG2E


# The dq kernel


def backward_dq(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, jax.Array | None]:
    """Return dq [B, T, N, H], and with learned slopes f32[B, N, T] of -sum_j ds_ij |q_i - k_j|."""
    (B, T, N, H), Hv = operands.query.shape, operands.value.shape[-1]
    dtype = operands.query.dtype
    consumers, stages = blocks.q // ROWS, blocks.stages
    items = query_items(operands, lists)
    rows = result((B, N, T), f32, operands.query)
    has_slopes = learns_slopes(problem, operands)
    slots = stages if has_room(H, Hv) else 1  # values leave sooner than keys
    vectors = TileVectors(problem, operands, ROW, copies=has_room(H, Hv))
    own_slot = {} if H + Hv > 256 else {"dq_tile": tile_slots(consumers, ROWS, H, dtype)}
    results = launch(
        problem,
        functools.partial(_backward_dq, problem, blocks),
        consumers,
        items.size,
        out_type=(result((B, T, N, H), dtype, operands.query),) + (rows,) * has_slopes,
        scratch_types=dict(
            q_tile=tile_slots(consumers, ROWS, H, dtype),
            do_tile=tile_slots(consumers, ROWS, Hv, dtype),
            k_tile=tile_slots(stages, blocks.k, H, dtype),
            v_tile=tile_slots(slots, blocks.k, Hv, dtype),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=consumers),
            q_empty=plgpu.Barrier(num_barriers=consumers),
            k_full=plgpu.Barrier(num_arrivals=1 + len(vectors.copied), num_barriers=stages),
            k_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            v_full=plgpu.Barrier(num_barriers=slots),
            v_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
            **vectors.slots(stages, blocks.k),
            **own_slot,
        ),
    )(items, lists, operands, saved.do, base_of(saved), saved.D)
    return results if has_slopes else (results[0], None)


def _backward_dq(
    problem: Problem, blocks: Blocks, items: Ref, lists: TileLists, operands: Operands,
    do: Ref, base: Ref, D: Ref, dq: Ref, slope_out: Ref = None, *,
    dq_tile: Ref = None, **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program; operands, lists and what follows are references to memory."""
    walk = QueryWalk(**memory)
    H, Hv = operands.query.shape[-1], operands.value.shape[-1]
    vectors = TileVectors(problem, operands, ROW, copies=has_room(H, Hv))

    def produce() -> None:
        walk.produce(blocks, items, lists, operands, vectors, do)

    def consume(w: jax.Array) -> None:
        staged = walk.q_tile if dq_tile is None else dq_tile
        consumer = _QueryConsumer(
            problem, blocks, lists, operands, vectors, walk, base, D, staged, dq, slope_out, w
        )
        each_item(items, consumer.walk_item, jnp.int32(0))

    specialise(blocks.q // ROWS, produce, consume)


class _Rows(NamedTuple):
    """Say which queries a consumer holds, and what it has loaded of them."""

    b: jax.Array
    n: jax.Array
    row: jax.Array  # of tiles
    q0: jax.Array
    base: jax.Array  # f32[ROWS]
    D: jax.Array  # f32[ROWS]
    vectors: RowVectors


@dataclass(frozen=True, eq=False)  # which holds tracers, that have no hash
class _QueryConsumer:
    """Compute 64 rows of a tile of dq, by one warpgroup."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    walk: QueryWalk
    base: Ref
    D: Ref
    staged: Ref  # the slots through which dq leaves
    dq: Ref
    slope_out: Ref
    w: jax.Array

    def walk_item(self, item: jax.Array, step: jax.Array) -> jax.Array:
        """Compute an item: dq of some queries."""
        (_, T, N, H), w = self.operands.query.shape, self.w
        b, n, row = item_index(item, N, T // self.blocks.q)
        q0 = row * self.blocks.q + w * ROWS
        queries = b, n, pl.ds(q0, ROWS)
        full, seen = at(self.lists.full, b, n, row)[...], at(self.lists.seen, b, n, row)[...]
        base = load(self.base.at[queries], WGMMA.reduce(1))
        D = load(self.D.at[queries], WGMMA.reduce(1))
        rows = _Rows(b, n, row, q0, base, D, self.vectors.of_rows(b, q0))

        plgpu.barrier_wait(self.walk.q_full.at[w])
        carry = filled((ROWS, H), 0), filled((ROWS,), 0), step
        acc, slope, step = each_tile(full, seen, functools.partial(self.tile, rows), carry)
        if self.staged is not self.walk.q_tile:
            plgpu.barrier_arrive(self.walk.q_empty.at[w])
        self.staged[w] = (acc * self.problem.scale).astype(self.staged.dtype)
        if self.slope_out is not None:
            self.slope_out[queries] = slope
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.staged.at[w], self.dq.at[b, pl.ds(q0, ROWS), n])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.staged is self.walk.q_tile:
            plgpu.barrier_arrive(self.walk.q_empty.at[w])
        return step

    def tile(
        self, rows: _Rows, j: jax.Array, carry: tuple[jax.Array, ...], partial: bool
    ) -> tuple[jax.Array, ...]:
        """Add a tile of keys to dq and to the row of dslopes."""
        problem, walk, w = self.problem, self.walk, self.w
        acc, slope, step = carry
        k_slot, v_slot = slot_of(step, self.blocks.stages), slot_of(step, walk.v_tile.shape[0])
        k = walk.k_tile.at[k_slot]
        k0 = at(self.lists.order, rows.b, rows.n, rows.row, j)[...] * self.blocks.k
        beside = self.vectors.of_columns(walk.columns, k_slot, rows.b, k0, self.blocks.k)
        where = TilePosition(rows.b, rows.n, rows.q0, k0, rows.vectors, beside)
        plgpu.barrier_wait(walk.k_full.at[k_slot])
        raw = product(walk.q_tile.at[opaque(w)], k.transpose((1, 0)))
        _, differentiate = probabilities(
            problem, self.operands, raw, across(rows.base, raw), where, ROW, partial
        )
        plgpu.barrier_wait(walk.v_full.at[v_slot])
        v = walk.v_tile.at[opaque(v_slot)]
        dp = product(walk.do_tile.at[opaque(w)], v.transpose((1, 0)))
        ds, du = differentiate(dp, across(rows.D, dp))
        plgpu.barrier_arrive(walk.v_empty.at[v_slot])
        if self.slope_out is not None:
            slope -= (ds * distance(where, ds.shape)).sum(axis=1)
        [acc] = add_products(problem, (acc, du.astype(walk.k_tile.dtype), k))
        self.vectors.release(walk.k_empty.at[k_slot], partial)
        return acc, slope, step + 1


# The dk/dv kernel


def backward_dkdv(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, jax.Array]:
    """Return dk [B, S, K, H] and dv [B, S, K, Hv]; the rows of `lists` are key tiles here."""
    H, (B, S, K, Hv) = operands.query.shape[-1], operands.value.shape
    dtype, stages = operands.key.dtype, blocks.stages
    parts = blocks.k // ROWS
    consumers = max(2, parts)
    items = key_items(operands, lists)
    vectors = TileVectors(problem, operands, COLUMN)
    operands = queries_as_columns(operands)
    return launch(
        problem,
        functools.partial(_backward_dkdv, problem, blocks),
        consumers,
        items.size,
        out_type=(
            result((B, S, K, H), dtype, operands.query),
            result((B, S, K, Hv), dtype, operands.query),
        ),
        scratch_types=dict(
            k_tile=tile_slots(parts, ROWS, H, dtype),
            v_tile=tile_slots(parts, ROWS, Hv, dtype),
            q_tile=tile_slots(stages, blocks.q, H, dtype),
            do_tile=tile_slots(stages, blocks.q, Hv, dtype),
            base_columns=plgpu.SMEM((stages, blocks.q), f32),
            D_columns=plgpu.SMEM((stages, blocks.q), f32),
            k_full=plgpu.Barrier(num_arrivals=2, num_barriers=parts),
            k_empty=plgpu.Barrier(num_arrivals=consumers // parts, num_barriers=parts),
            q_full=plgpu.Barrier(num_arrivals=4 + len(vectors.copied), num_barriers=stages),
            q_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            both=plgpu.Barrier(num_arrivals=consumers),
            **vectors.slots(stages, blocks.q),
        ),
    )(items, lists, operands, saved.do, base_of(saved), saved.D)


def _backward_dkdv(
    problem: Problem, blocks: Blocks, items: Ref, lists: TileLists, operands: Operands,
    do: Ref, base: Ref, D: Ref, dk_out: Ref, dv_out: Ref, **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program.

    Two consumers hold 64 keys each, or, where their dk and dv are too many registers for one, the
    same 64: the first sums dv, the second dk.
    """
    walk = KeyWalk(**memory)
    parts = blocks.k // ROWS
    consumers = max(2, parts)
    vectors = TileVectors(problem, operands, COLUMN)

    def produce() -> None:
        walk.produce(blocks, items, lists, operands, vectors, do, base, D)

    def consume(part: Any, wanted: tuple[str, ...]) -> None:
        consumer = _KeyConsumer(
            problem, blocks, lists, operands, vectors, walk, (dk_out, dv_out), part, wanted
        )
        each_item(items, consumer.walk_item, jnp.int32(0))

    def consume_part(w: jax.Array) -> None:
        consume(w, ("dk", "dv"))

    def consume_half(w: jax.Array) -> None:
        pl.when(w == 0)(lambda: consume(0, ("dv",)))
        pl.when(w == 1)(lambda: consume(0, ("dk",)))

    specialise(consumers, produce, consume_part if parts == consumers else consume_half)


class _Keys(NamedTuple):
    """Say which keys a consumer holds."""

    b: jax.Array
    head: jax.Array
    row: jax.Array  # of tiles
    k0: jax.Array
    vectors: RowVectors


@dataclass(frozen=True, eq=False)  # which holds tracers, that have no hash
class _KeyConsumer:
    """Compute 64 rows of a tile of dk and dv, by one warpgroup."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    walk: KeyWalk
    results: tuple[Ref, Ref]
    part: Any  # which 64 keys of the tile
    wanted: tuple[str, ...]  # "dk", "dv"

    def walk_item(self, item: jax.Array, step: jax.Array) -> jax.Array:
        """Compute an item: dk, dv or both of some keys."""
        (_, S, K, H), N = self.operands.key.shape, self.operands.query.shape[2]
        G = N // K
        b, head, row = item_index(item, K, S // self.blocks.k)
        k0 = row * self.blocks.k + self.part * ROWS
        keys = _Keys(b, head, row, k0, self.vectors.of_rows(b, k0))

        def one_head(g: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            n = head * G + g
            full, seen = at(self.lists.full, b, n, row)[...], at(self.lists.seen, b, n, row)[...]
            return each_tile(full, seen, functools.partial(self.tile, keys, n), carry)

        plgpu.barrier_wait(self.walk.k_full.at[self.part])
        widths = {"dk": H, "dv": self.operands.value.shape[-1]}
        sums = {name: filled((ROWS, widths[name]), 0) for name in self.wanted}
        sums, step = lax.fori_loop(0, G, one_head, (sums, step))
        self.write(keys, sums)
        return step

    def tile(
        self, keys: _Keys, n: jax.Array, j: jax.Array, carry: tuple[Any, Any], partial: bool
    ) -> tuple[Any, Any]:
        """Add a tile of queries to dk, dv or both."""
        walk, problem, operands, width = self.walk, self.problem, self.operands, self.blocks.q
        sums, step = dict(carry[0]), carry[1]
        slot = slot_of(step, self.blocks.stages)
        q, do = walk.q_tile.at[slot], walk.do_tile.at[slot]
        q0 = at(self.lists.order, keys.b, n, keys.row, j)[...] * width
        beside = self.vectors.of_columns(walk.columns, slot, keys.b, q0, width)
        where = TilePosition(keys.b, n, q0, keys.k0, keys.vectors, beside)
        shape = (ROWS, width)
        plgpu.barrier_wait(walk.q_full.at[slot])

        raw = product(walk.k_tile.at[opaque(self.part)], q.transpose((1, 0)))
        base = load_along(walk.base_columns.at[slot], shape, COLUMN)
        p, differentiate = probabilities(problem, operands, raw, base, where, COLUMN, partial)
        p = p.astype(walk.q_tile.dtype)
        v, do_columns = walk.v_tile.at[opaque(self.part)], do.transpose((1, 0))
        bare = is_linear(problem, operands) and not problem.dropout_rate
        if len(self.wanted) == 2 and bare and not partial:
            sums["dv"], dp = add_products(
                problem, (sums["dv"], p, do), (filled(shape, 0), v, do_columns)
            )
        else:  # fewer registers at a time, for what a mask or an option needs
            if "dv" in self.wanted:
                [sums["dv"]] = add_products(problem, (sums["dv"], p, do))
            if "dk" in self.wanted:
                dp = product(v, do_columns)
        if "dk" in self.wanted:
            _, du = differentiate(dp, load_along(walk.D_columns.at[slot], shape, COLUMN))
            [sums["dk"]] = add_products(problem, (sums["dk"], du.astype(walk.q_tile.dtype), q))
        plgpu.commit_smem()  # the next copies come after plain reads of the slot
        plgpu.barrier_arrive(walk.q_empty.at[slot])
        return sums, step + 1

    def write(self, keys: _Keys, sums: dict[str, jax.Array]) -> None:
        """Write an item's results to device memory, through the slots of its keys and values."""
        walk, part = self.walk, self.part
        if self.blocks.k == ROWS:  # the other warpgroup reads the slots that are written next
            plgpu.barrier_arrive(walk.both)
            plgpu.barrier_wait(walk.both)
        dk_out, dv_out = self.results
        outs = {"dk": (walk.k_tile, dk_out, self.problem.scale), "dv": (walk.v_tile, dv_out, 1.0)}
        for name in self.wanted:
            staged, _, scale = outs[name]
            staged[part] = (sums[name] * scale).astype(staged.dtype)
        plgpu.commit_smem()
        for name in self.wanted:
            staged, out, _ = outs[name]
            place = keys.b, pl.ds(keys.k0, ROWS), keys.head
            plgpu.copy_smem_to_gmem(staged.at[part], out.at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(walk.k_empty.at[part])
