"""Backward kernels for dq, and for dk and dv.

The dq kernel iterates over queries, and the dk/dv kernel iterates over keys. Both sum their results
in registers, so no sum depends on the order in which programs finish. Therefore, all runs produce
the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.contract import (
    Blocks,
    Index,
    Operands,
    Problem,
    Residuals,
    TileLists,
    learns_slopes,
)
from transformer_jax.kernels.hopper.forward import has_room
from transformer_jax.kernels.hopper.producer import KeyWalk, QueryWalk, wait_from
from transformer_jax.kernels.hopper.products import add_products, opaque, product
from transformer_jax.kernels.hopper.programs import each_item, launch, specialize
from transformer_jax.kernels.nvidia.memory import (
    COLUMN,
    ROW,
    ROWS,
    WGMMA,
    Ref,
    across,
    at,
    f32,
    fence,
    filled,
    load,
    load_along,
    slot_of,
    tile_slots,
)
from transformer_jax.kernels.nvidia.schedule import each_tile, key_items, query_items
from transformer_jax.kernels.nvidia.scores import (
    TilePosition,
    TileRows,
    TileVectors,
    base_of,
    distance,
    is_linear,
    probabilities,
    queries_as_columns,
    score_gradient,
    weights,
)
from transformer_jax.kernels.sharding import result

Sums = dict[str, jax.Array]  # "dk", "dv"
QuerySums = tuple[jax.Array, jax.Array, jax.Array]  # dq, dslopes, step


# The dq kernel


def backward_dq(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, jax.Array | None]:
    """Return dq [B, T, N, H] and, with learned slopes, -sum_j ds_ij |q_i - k_j|, f32[B, N, T]."""
    (B, T, N, H), Hv = operands.query.shape, operands.value.shape[-1]
    dtype = operands.query.dtype
    consumers, stages = blocks.q // ROWS, blocks.stages
    items = query_items(operands, blocks)
    rows = result((B, N, T), f32, operands.query)
    has_slopes = learns_slopes(problem, operands)
    # values are freed before keys, so one slot is enough
    slots = stages if has_room(H, Hv) else 1
    vectors = TileVectors(problem, operands, ROW, copies=has_room(H, Hv))
    # if there is no room for a separate slot, dq is copied out through the slot of the queries
    has_slot = blocks.k * (H + Hv) <= 64 * 256
    dq_slot = {"dq_tile": tile_slots(consumers, ROWS, H, dtype)} if has_slot else {}
    results = launch(
        problem,
        functools.partial(_backward_dq, problem, blocks),
        consumers,
        items.number,
        auto_barriers=False,
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
            **dq_slot,
        ),
    )(lists, operands, saved.do, base_of(saved), saved.D)
    dq, *slopes = results
    return dq, slopes[0] if has_slopes else None


def _backward_dq(
    problem: Problem, blocks: Blocks, lists: TileLists, operands: Operands,
    do: Ref, base: Ref, D: Ref, dq: Ref, slope_out: Ref = None, *,
    dq_tile: Ref = None, **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program. The lists and later arguments are memory references."""
    walk = QueryWalk(**memory)
    H, Hv = operands.query.shape[-1], operands.value.shape[-1]
    vectors = TileVectors(problem, operands, ROW, copies=has_room(H, Hv))

    def produce() -> None:
        walk.produce(blocks, lists, operands, vectors, do)

    def consume(w: jax.Array) -> None:
        staged = walk.q_tile if dq_tile is None else dq_tile
        consumer = _QueryConsumer(
            problem, blocks, lists, operands, vectors, walk, base, D, staged, dq, slope_out, w,
        )  # fmt: skip
        items = query_items(operands, blocks).number
        each_item(items, consumer.walk_item, jnp.int32(0))

    specialize(blocks.q // ROWS, produce, consume)


@dataclass(frozen=True, eq=False)  # fields are tracers, which are not hashable
class _QueryConsumer:
    """Warpgroup that computes 64 rows of a tile of dq."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    walk: QueryWalk
    base: Ref
    D: Ref
    staged: Ref  # slots from which dq is copied to device memory
    dq: Ref
    slope_out: Ref
    w: jax.Array

    def walk_item(self, item: jax.Array, step: jax.Array) -> jax.Array:
        """Compute an item, which is dq for some queries."""
        H, w = self.operands.query.shape[-1], self.w
        b, n, row = query_items(self.operands, self.blocks).at(self.lists, item)
        q0 = row * self.blocks.q + w * ROWS
        queries = b, n, pl.ds(q0, ROWS)
        full, seen = at(self.lists.full, b, n, row)[...], at(self.lists.seen, b, n, row)[...]
        base = load(self.base.at[queries], WGMMA.reduce(1))
        D = load(self.D.at[queries], WGMMA.reduce(1))
        rows = TileRows(b, n, q0, self.vectors.of_rows(b, q0), row, base, D)

        plgpu.barrier_wait(self.walk.q_full.at[w])
        carry = filled((ROWS, H), 0), filled((ROWS,), 0), step
        acc, slope, step = each_tile(full, seen, functools.partial(self.tile, rows), carry)
        if self.staged is not self.walk.q_tile:
            plgpu.barrier_arrive(self.walk.q_empty.at[w])
        else:
            # the last product of a warp may read rows that another warp writes next
            plgpu.commit_smem()
        self.staged[w] = (acc * self.problem.scale).astype(self.staged.dtype)
        if self.slope_out is not None:
            self.slope_out[queries] = slope
        # all warps must write before one thread copies
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.staged.at[w], self.dq.at[b, pl.ds(q0, ROWS), n])
        # all warps wait for the copy, because they will write to the slot again
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.staged is self.walk.q_tile:
            plgpu.barrier_arrive(self.walk.q_empty.at[w])
        return step

    def tile(self, rows: TileRows, j: jax.Array, carry: QuerySums, partial: bool) -> QuerySums:
        """Add a tile of keys to dq and to the rows of dslopes."""
        problem, walk, w = self.problem, self.walk, self.w
        acc, slope, step = carry
        k_slot, v_slot = slot_of(step, self.blocks.stages), slot_of(step, walk.v_tile.shape[0])
        k = walk.k_tile.at[k_slot]
        k0 = at(self.lists.order, rows.b, rows.head, rows.row, j)[...] * self.blocks.k
        columns = self.vectors.of_columns(walk.columns, k_slot, rows.b, k0, self.blocks.k)
        position = TilePosition(rows.b, rows.head, rows.start, k0, rows.vectors, columns)
        plgpu.barrier_wait(walk.k_full.at[k_slot])
        raw = product(walk.q_tile.at[opaque(w)], k.transpose((1, 0)))
        _, differentiate = probabilities(
            problem, self.operands, raw, across(rows.base, raw), position, ROW, partial
        )
        plgpu.barrier_wait(walk.v_full.at[v_slot])
        v = walk.v_tile.at[opaque(v_slot)]
        dp = product(walk.do_tile.at[opaque(w)], v.transpose((1, 0)))
        ds, du = differentiate(dp, across(rows.D, dp))
        # values are freed before keys, because one more product reads the keys
        plgpu.barrier_arrive(walk.v_empty.at[v_slot])
        if self.slope_out is not None:
            slope -= (ds * distance(position, ds.shape)).sum(axis=1)
        [acc] = add_products(problem, (acc, du.astype(walk.k_tile.dtype), k))
        self.vectors.release(walk.k_empty.at[k_slot], partial)
        return acc, slope, step + 1


# The dk/dv kernel


def backward_dkdv(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, jax.Array]:
    """Return dk [B, S, K, H] and dv [B, S, K, Hv]. The rows of `lists` are key tiles."""
    H, (B, S, K, Hv) = operands.query.shape[-1], operands.value.shape
    dtype, stages = operands.key.dtype, blocks.stages
    parts = blocks.k // ROWS
    consumers = max(2, parts)
    items = key_items(operands, blocks)
    vectors = TileVectors(problem, operands, COLUMN)
    operands = queries_as_columns(operands)
    shared = dict(
        tile=tile_slots(None, ROWS, blocks.q, f32), full=plgpu.Barrier(), empty=plgpu.Barrier()
    )
    return launch(
        problem,
        functools.partial(_backward_dkdv, problem, blocks),
        consumers,
        items.number,
        auto_barriers=False,
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
            **({"shared": shared} if parts < consumers else {}),
        ),
    )(lists, operands, saved.do, base_of(saved), saved.D)


def _backward_dkdv(
    problem: Problem, blocks: Blocks, lists: TileLists, operands: Operands,
    do: Ref, base: Ref, D: Ref, dk_out: Ref, dv_out: Ref, *,
    shared: dict[str, Ref] | None = None, **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program.

    Each of the two consumers processes 64 keys. If dk and dv need too many registers for one
    warpgroup, both consumers process the same 64 keys. The first consumer computes the scores and
    sums dv, and the second reads the weights from shared memory and sums dk.
    """
    walk = KeyWalk(**memory)
    parts = blocks.k // ROWS
    consumers = max(2, parts)
    vectors = TileVectors(problem, operands, COLUMN)

    def produce() -> None:
        walk.produce(blocks, lists, operands, vectors, do, base, D)

    def consume(part: Index, wanted: tuple[str, ...]) -> None:
        consumer = _KeyConsumer(
            problem, blocks, lists, operands, vectors, walk, (dk_out, dv_out),
            _SharedWeights(**shared) if shared else None, part, wanted,
        )  # fmt: skip
        items = key_items(operands, blocks).number
        each_item(items, consumer.walk_item, jnp.int32(0))

    def consume_part(w: jax.Array) -> None:
        consume(w, ("dk", "dv"))

    # both process the same 64 keys; the first computes the weights and sums dv, the second sums dk
    def consume_half(w: jax.Array) -> None:
        pl.when(w == 0)(lambda: consume(0, ("dv",)))
        pl.when(w == 1)(lambda: consume(0, ("dk",)))

    specialize(consumers, produce, consume_part if parts == consumers else consume_half)


class _SharedWeights(NamedTuple):
    """Weights of a tile that one warpgroup computes for another."""

    tile: Ref  # f32[ROWS, blocks.q]: `Weights.capped`
    full: Ref
    empty: Ref


@dataclass(frozen=True, eq=False)  # fields are tracers, which are not hashable
class _KeyConsumer:
    """Warpgroup that computes 64 rows of a tile of dk and dv."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    walk: KeyWalk
    results: tuple[Ref, Ref]
    shared: _SharedWeights | None  # if two warpgroups process the same keys
    part: Index  # index of its 64 keys in the tile
    wanted: tuple[str, ...]  # "dk", "dv"

    def walk_item(self, item: jax.Array, step: jax.Array) -> jax.Array:
        """Compute an item, which is dk, dv or both for some keys."""
        (_, _, K, H), N = self.operands.key.shape, self.operands.query.shape[2]
        G = N // K
        b, head, row = key_items(self.operands, self.blocks).at(self.lists, item, G)
        k0 = row * self.blocks.k + self.part * ROWS
        keys = TileRows(b, head, k0, self.vectors.of_rows(b, k0), row)

        def one_head(g: Index, carry: tuple[Sums, jax.Array]) -> tuple[Sums, jax.Array]:
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
        self,
        keys: TileRows,
        n: jax.Array,
        j: jax.Array,
        carry: tuple[Sums, jax.Array],
        partial: bool,
    ) -> tuple[Sums, jax.Array]:
        """Add a tile of queries to dk, dv or both."""
        walk, width = self.walk, self.blocks.q
        sums, step = carry
        slot = slot_of(step, self.blocks.stages)
        q0 = at(self.lists.order, keys.b, n, keys.row, j)[...] * width
        columns = self.vectors.of_columns(walk.columns, slot, keys.b, q0, width)
        position = TilePosition(keys.b, n, q0, keys.start, keys.vectors, columns)
        plgpu.barrier_wait(walk.q_full.at[slot])
        add = {("dk", "dv"): self.add_both, ("dv",): self.add_dv, ("dk",): self.add_dk}
        sums = add[self.wanted](sums, slot, step, position, partial)
        # order the reads of the slot before the next copies into it
        fence(self.problem)
        plgpu.barrier_arrive(walk.q_empty.at[slot])
        return sums, step + 1

    def add_both(
        self, sums: Sums, slot: jax.Array, _: jax.Array, position: TilePosition, partial: bool
    ) -> Sums:
        problem, walk = self.problem, self.walk
        q, do, shape = walk.q_tile.at[slot], walk.do_tile.at[slot], (ROWS, self.blocks.q)
        raw, base = self.scores(slot)
        p, differentiate = probabilities(
            problem, self.operands, raw, base, position, COLUMN, partial
        )
        p = p.astype(walk.q_tile.dtype)
        v, do_columns = walk.v_tile.at[opaque(self.part)], do.transpose((1, 0))
        is_plain = is_linear(problem, self.operands) and not problem.dropout_rate
        if is_plain and not partial:
            dv, dp = add_products(problem, (sums["dv"], p, do), (filled(shape, 0), v, do_columns))
        else:  # run one product at a time to leave registers for a mask or an option
            [dv] = add_products(problem, (sums["dv"], p, do))
            dp = product(v, do_columns)
        _, du = differentiate(dp, load_along(walk.D_columns.at[slot], shape, COLUMN))
        [dk] = add_products(problem, (sums["dk"], du.astype(walk.q_tile.dtype), q))
        return {"dk": dk, "dv": dv}

    def add_dv(
        self, sums: Sums, slot: jax.Array, step: jax.Array, position: TilePosition, partial: bool
    ) -> Sums:
        """Add a tile to dv, and share the weights with the warpgroup that sums dk."""
        problem, walk, shared = self.problem, self.walk, self.shared
        assert shared is not None
        raw, base = self.scores(slot)
        tile_weights = weights(problem, self.operands, raw, base, position, COLUMN, partial)
        # wait until all warps of the other warpgroup have read the weights of the last tile
        wait_from(1, step, shared.empty)
        shared.tile[...] = tile_weights.capped
        plgpu.barrier_arrive(shared.full)
        p = tile_weights.dropped.astype(walk.q_tile.dtype)
        [dv] = add_products(problem, (sums["dv"], p, walk.do_tile.at[slot]))
        return {"dv": dv}

    def add_dk(
        self, sums: Sums, slot: jax.Array, _: jax.Array, __: TilePosition, partial: bool
    ) -> Sums:
        """Add a tile to dk, using the weights from the warpgroup that sums dv."""
        problem, walk, shared = self.problem, self.walk, self.shared
        assert shared is not None
        do_columns = walk.do_tile.at[slot].transpose((1, 0))
        dp = product(walk.v_tile.at[opaque(self.part)], do_columns)
        D = load_along(walk.D_columns.at[slot], dp.shape, COLUMN)
        plgpu.barrier_wait(shared.full)
        capped = load(shared.tile, WGMMA)
        plgpu.barrier_arrive(shared.empty)
        du = score_gradient(problem, capped, dp, D, partial).astype(walk.q_tile.dtype)
        [dk] = add_products(problem, (sums["dk"], du, walk.q_tile.at[slot]))
        return {"dk": dk}

    def scores(self, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return k q^T for a tile, and the base that is subtracted in p = 2^(s - base)."""
        walk = self.walk
        q_columns = walk.q_tile.at[slot].transpose((1, 0))
        raw = product(walk.k_tile.at[opaque(self.part)], q_columns)
        return raw, load_along(walk.base_columns.at[slot], raw.shape, COLUMN)

    def write(self, keys: TileRows, sums: dict[str, jax.Array]) -> None:
        """Copy the results of an item to device memory, through its key and value slots."""
        walk, part = self.walk, self.part
        # the other warpgroup is still reading the slots that are written next
        if self.blocks.k == ROWS:
            plgpu.barrier_arrive(walk.both)
            plgpu.barrier_wait(walk.both)
        else:
            # the last product of a warp may read rows that another warp writes next
            plgpu.commit_smem()
        dk_out, dv_out = self.results
        outs = {"dk": (walk.k_tile, dk_out, self.problem.scale), "dv": (walk.v_tile, dv_out, 1.0)}
        for name in self.wanted:
            staged, _, scale = outs[name]
            staged[part] = (sums[name] * scale).astype(staged.dtype)
        plgpu.commit_smem()
        for name in self.wanted:
            staged, out, _ = outs[name]
            place = keys.b, pl.ds(keys.start, ROWS), keys.head
            plgpu.copy_smem_to_gmem(staged.at[part], out.at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(walk.k_empty.at[part])
