"""Nondeterministic single-pass backward kernel, which computes dq, dk and dv.

Like the dk/dv kernel, it iterates over keys, but it also multiplies du of a tile by the keys. It
needs five products per tile, whereas two separate kernels need seven. Each program adds its part of
dq to device memory (by a TMA reduction) in an arbitrary order, so two runs may differ in the last
bits. `implementation="pallas_unordered"` selects this kernel. With keys as rows, it computes:

    s = k q^T    dp = v do^T    dv += p do    dk += du q    dq[tile] += du^T k

Each of the two consumers processes 64 keys. Both write du to shared memory. Then each consumer sums
half of a tile of dq over the keys of both, and writes the sum to shared memory. The producer adds
it to device memory, as in FlashAttention-3 (Shah et al. 2024), so no consumer waits for a copy.
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
from transformer_jax.kernels.hopper.producer import KeyWalk
from transformer_jax.kernels.hopper.products import add_products, opaque
from transformer_jax.kernels.hopper.programs import each_item, launch, specialize
from transformer_jax.kernels.nvidia.memory import (
    COLUMN,
    ROWS,
    Ref,
    Scratch,
    at,
    f32,
    fence,
    filled,
    load_along,
    slot_of,
    swizzle_of,
    tile_slots,
)
from transformer_jax.kernels.nvidia.schedule import each_tile, key_items
from transformer_jax.kernels.nvidia.scores import (
    TilePosition,
    TileRows,
    TileVectors,
    base_of,
    distance,
    probabilities,
    queries_as_columns,
)
from transformer_jax.kernels.sharding import result, vary

KeySums = tuple[jax.Array, jax.Array, jax.Array]  # dk, dv, step
PARTS = 2  # number of consumers


def backward_single_pass(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, ...]:
    """Return dq, dk, dv and, with learned slopes, -sum_i ds_ij |q_i - k_j|, f32[B, N, S].

    The rows of `lists` are key tiles.
    """
    (B, T, N, H), (_, S, K, Hv) = operands.query.shape, operands.value.shape
    dtype, stages = operands.key.dtype, blocks.stages
    assert blocks.k == PARTS * ROWS and blocks.q in (ROWS, PARTS * ROWS), blocks
    side = swizzle(blocks, H)
    vectors = TileVectors(problem, operands, COLUMN)
    items = key_items(operands, blocks)
    operands = queries_as_columns(operands)
    like = operands.query
    slopes = (result((B, N, S), f32, like),) * learns_slopes(problem, operands)
    # float32 and scaled at the end, because programs add to it in any order
    dq = jax.new_ref(jnp.zeros((B, T, N, H), f32))
    dk, dv, *slopes = launch(
        problem,
        functools.partial(_backward_single_pass, problem, blocks),
        PARTS,
        1 if problem.interpret else items.number,  # see `add` below
        auto_barriers=False,
        out_type=(
            result((B, S, K, H), dtype, like),
            result((B, S, K, Hv), dtype, like),
            *slopes,
        ),
        scratch_types=dict(
            k_tile=tile_slots(PARTS, ROWS, H, dtype, side),
            v_tile=tile_slots(PARTS, ROWS, Hv, dtype),
            q_tile=tile_slots(stages, blocks.q, H, dtype, side),
            do_tile=tile_slots(stages, blocks.q, Hv, dtype),
            du_tile=tile_slots(2 * PARTS, ROWS, blocks.q, dtype, side),
            dq_tile=[dq_slot(share, H) for share in dq_shares(blocks, H)],
            base_columns=plgpu.SMEM((stages, blocks.q), f32),
            D_columns=plgpu.SMEM((stages, blocks.q), f32),
            k_full=plgpu.Barrier(num_arrivals=2 * PARTS),
            k_empty=plgpu.Barrier(num_arrivals=PARTS),
            q_full=plgpu.Barrier(num_arrivals=4 + len(vectors.copied), num_barriers=stages),
            q_empty=plgpu.Barrier(num_arrivals=PARTS, num_barriers=stages),
            both=plgpu.Barrier(num_arrivals=PARTS + 1),
            dq_full=plgpu.Barrier(num_arrivals=PARTS),
            **vectors.slots(stages, blocks.q),
        ),
    )(lists, operands, saved.do, base_of(saved), saved.D, dq)
    total = (jax.freeze(dq) * problem.scale).astype(operands.query.dtype)
    return vary(total, like=operands), dk, dv, *slopes


class Share(NamedTuple):
    """Part of a tile of dq that one warpgroup sums."""

    row: int
    rows: int
    column: int
    columns: int


def swizzle(blocks: Blocks, H: int) -> int:
    """Return the swizzle, in bytes, for tiles of width H and for du, by which they are multiplied.

    A tile of 64 queries is divided by columns, so it needs at least two parts.
    """
    least = 1 if blocks.q > ROWS else 2
    return next(s for s in (128, 64, 32) if 2 * H % s == 0 and 2 * H // s >= least)


def dq_shares(blocks: Blocks, H: int) -> list[Share]:
    """Return the share of each warpgroup (64 of 128 queries, or some columns of 64 queries)."""
    if blocks.q > ROWS:
        return [Share(part * ROWS, ROWS, 0, H) for part in range(PARTS)]
    side = swizzle(blocks, H) // 2
    first = -(-H // side // PARTS) * side
    return [Share(0, ROWS, 0, first), Share(0, ROWS, first, H - first)]


def dq_slot(share: Share, H: int) -> Scratch:
    """Return the type of the slot that holds a share before it is copied to device memory."""
    side = swizzle_of(4, share.column, share.columns, H)
    return tile_slots(1, share.rows, share.columns, f32, side)


def _backward_single_pass(
    problem: Problem, blocks: Blocks, lists: TileLists, operands: Operands,
    do: Ref, base: Ref, D: Ref, dq: Ref, dk_out: Ref, dv_out: Ref, slope_out: Ref = None, *,
    du_tile: Ref, dq_tile: list[Ref], dq_full: Ref, **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program. The lists and later arguments are memory references."""
    walk = KeyWalk(**memory)
    vectors = TileVectors(problem, operands, COLUMN)

    def add(b: Index, n: Index, q0: Index) -> None:
        """Add a tile of dq to device memory, and let the consumers write the next tile.

        All threads of the producer and the consumers arrive at `dq_full` for this tile and at
        `both` for the next tile. Each side first waits for the other, so no warp lags by two phases
        of either barrier.
        """
        plgpu.barrier_wait(dq_full)
        for share, tile in zip(dq_shares(blocks, dq.shape[-1]), dq_tile, strict=True):
            rows, columns = pl.ds(q0 + share.row, share.rows), pl.ds(share.column, share.columns)
            target = dq.at[b, rows, n, columns]
            # the interpreter does not support copies that add. Instead, it reads, adds and writes,
            # which is correct because it runs only one program
            if problem.interpret:
                target[...] = target[...] + tile.at[0][...]
            else:
                plgpu.copy_smem_to_gmem(tile.at[0], target, reduction_op="add")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(walk.both)

    def produce() -> None:
        walk.produce(blocks, lists, operands, vectors, do, base, D, together=True, after=add)

    def consume(w: jax.Array) -> None:
        consumer = _Consumer(
            problem, blocks, lists, operands, vectors, walk, du_tile, dq_tile, dq_full,
            (dk_out, dv_out), slope_out, w,
        )  # fmt: skip
        items = key_items(operands, blocks).number
        each_item(items, consumer.walk_item, jnp.int32(0))

    specialize(PARTS, produce, consume)


class _Sums(NamedTuple):
    """Sums of a consumer over the tiles of queries."""

    dk: jax.Array  # [ROWS, H]
    dv: jax.Array  # [ROWS, Hv]
    slope: jax.Array | None  # [ROWS], for one query head
    step: jax.Array


@dataclass(frozen=True, eq=False)  # fields are tracers, which are not hashable
class _Consumer:
    """Warpgroup that computes 64 rows of a tile of keys."""

    problem: Problem
    blocks: Blocks
    lists: TileLists
    operands: Operands
    vectors: TileVectors
    walk: KeyWalk
    du_tile: Ref  # [2 * PARTS, ROWS, blocks.q]
    dq_tile: list[Ref]  # f32[1, rows, columns], for each share
    dq_full: Ref
    results: tuple[Ref, Ref]
    slope_out: Ref
    w: jax.Array

    def meet(self) -> None:
        """Wait until the other consumer arrives and the slots of dq are free."""
        plgpu.barrier_arrive(self.walk.both)
        plgpu.barrier_wait(self.walk.both)

    def walk_item(self, item: jax.Array, step: jax.Array) -> jax.Array:
        """Compute an item, which is dk and dv for some keys, and their part of dq."""
        (_, _, K, H), N = self.operands.key.shape, self.operands.query.shape[2]
        G, Hv = N // K, self.operands.value.shape[-1]
        b, head, row = key_items(self.operands, self.blocks).at(self.lists, item, G)
        k0 = row * self.blocks.k + self.w * ROWS
        keys = TileRows(b, head, k0, self.vectors.of_rows(b, k0), row)
        has_slopes = self.slope_out is not None

        def one_head(g: Index, carry: KeySums) -> KeySums:
            n = head * G + g
            dk, dv, step = carry
            full, seen = at(self.lists.full, b, n, row)[...], at(self.lists.seen, b, n, row)[...]
            sums = _Sums(dk, dv, filled((ROWS,), 0) if has_slopes else None, step)
            sums = each_tile(full, seen, functools.partial(self.tile, keys, n), sums)
            if has_slopes:
                self.slope_out[b, n, pl.ds(k0, ROWS)] = sums.slope
            return sums.dk, sums.dv, sums.step

        plgpu.barrier_wait(self.walk.k_full)
        carry = filled((ROWS, H), 0), filled((ROWS, Hv), 0), step
        dk, dv, step = lax.fori_loop(0, G, one_head, carry)
        self.write(keys, dk, dv)
        return step

    def tile(self, keys: TileRows, n: jax.Array, j: jax.Array, sums: _Sums, partial: bool) -> _Sums:
        """Add a tile of queries to dk and dv, and add its part of dq to device memory."""
        problem, walk, width = self.problem, self.walk, self.blocks.q
        dk, dv, slope, step = sums
        slot = slot_of(step, self.blocks.stages)
        q, do = walk.q_tile.at[slot], walk.do_tile.at[slot]
        q0 = at(self.lists.order, keys.b, n, keys.row, j)[...] * width
        columns = self.vectors.of_columns(walk.columns, slot, keys.b, q0, width)
        position = TilePosition(keys.b, n, q0, keys.start, keys.vectors, columns)
        shape = (ROWS, width)
        plgpu.barrier_wait(walk.q_full.at[slot])

        v, do_columns = walk.v_tile.at[opaque(self.w)], do.transpose((1, 0))
        zeros = filled(shape, 0)
        raw, dp = add_products(
            problem,
            (zeros, walk.k_tile.at[opaque(self.w)], q.transpose((1, 0))),
            (zeros, v, do_columns),
        )
        base = load_along(walk.base_columns.at[slot], shape, COLUMN)
        p, differentiate = probabilities(
            problem, self.operands, raw, base, position, COLUMN, partial
        )
        p = p.astype(walk.q_tile.dtype)
        ds, du = differentiate(dp, load_along(walk.D_columns.at[slot], shape, COLUMN))
        if slope is not None:
            slope -= (ds * distance(position, shape)).sum(axis=1)
        du = du.astype(walk.q_tile.dtype)
        buffer = slot_of(step, 2)
        self.du_tile[buffer * PARTS + self.w] = du
        dv, dk = add_products(problem, (dv, p, do), (dk, du, q))
        fence(problem)
        plgpu.barrier_arrive(walk.q_empty.at[slot])
        # Now all warps of both consumers have written du. No warp writes to this buffer again until
        # all warps have met again, and by then all of them have read the buffer.
        self.meet()
        for part, share in enumerate(dq_shares(self.blocks, dk.shape[-1])):
            sum_dq = functools.partial(self.sum_dq, share, self.dq_tile[part], buffer)
            pl.when(self.w == part)(sum_dq)
        return _Sums(dk, dv, slope, step + 1)

    def sum_dq(self, share: Share, staged: Ref, buffer: jax.Array) -> None:
        """Sum a share of a dq tile over the keys of both warpgroups, for the producer to add.

        The producer has read the previous tile, because `meet` waited for it.
        """
        columns = pl.ds(share.column, share.columns)

        def multiply(acc: Ref) -> jax.Array:
            for part in range(PARTS):
                du = self.du_tile.at[buffer * PARTS + part, :, pl.ds(share.row, share.rows)]
                k = self.walk.k_tile.at[opaque(part), :, columns]
                plgpu.wgmma(acc, du.transpose((1, 0)), k)
            return acc[...]

        summed = pl.run_scoped(multiply, plgpu.ACC((share.rows, share.columns), f32))
        staged[0] = summed
        fence(self.problem)
        plgpu.barrier_arrive(self.dq_full)

    def write(self, keys: TileRows, dk: jax.Array, dv: jax.Array) -> None:
        """Copy dk and dv of an item to device memory, through the slots of its keys and values."""
        walk, w, (dk_out, dv_out) = self.walk, self.w, self.results
        # wait until all warps of both consumers have read these keys and values for the last time
        self.meet()
        walk.k_tile[w] = (dk * self.problem.scale).astype(walk.k_tile.dtype)
        walk.v_tile[w] = dv.astype(walk.v_tile.dtype)
        plgpu.commit_smem()
        place = keys.b, pl.ds(keys.start, ROWS), keys.head
        plgpu.copy_smem_to_gmem(walk.k_tile.at[w], dk_out.at[place])
        plgpu.copy_smem_to_gmem(walk.v_tile.at[w], dv_out.at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(walk.k_empty)
