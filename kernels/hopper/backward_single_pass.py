"""The backward pass on NVIDIA Hopper as one kernel, whose sums for dq have no fixed order.

It walks key tiles as `hopper.gradient_keys` does, and while it has du of a tile it also multiplies
it with the keys: five products a tile instead of the seven of two kernels. Each program adds its
part of dq to device memory (a reduction by TMA), in the order in which programs happen to get
there, so two runs may differ in the last bits: `implementation="pallas_unordered"` asks for it.

    s = k q^T    dp = v do^T    dv += p do    dk += du q    dq[tile] += du^T k

with keys as rows. Two warpgroups hold 64 of them each. Both write du to shared memory, and each
sums half of dq's tile over the keys of both.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.contract import (
    Blocks,
    Lists,
    Operands,
    Problem,
    Saved,
    learns_slopes,
    result,
    vary,
)
from transformer_jax.kernels.hopper import (
    COLUMN,
    ROWS,
    Place,
    Vectors,
    add_products,
    at,
    base,
    copy_queries,
    distance,
    each_item,
    each_tile,
    f32,
    filled,
    fresh,
    key_items,
    launch,
    specialise,
    spread,
    tiles,
    turn_of,
    turned,
    weights,
)

PARTS = 2  # warpgroups that multiply


def gradients(
    problem: Problem, operands: Operands, lists: Lists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, ...]:
    """dq, dk and dv, and with learned slopes f32[B, N, S] of -sum_i ds_ij |q_i - k_j|; the rows of
    `lists` are key tiles."""
    (B, T, N, H), (_, S, K, Hv) = operands.query.shape, operands.value.shape
    dtype, stages = operands.key.dtype, blocks.stages
    assert blocks.k == PARTS * ROWS and blocks.q in (ROWS, PARTS * ROWS), blocks
    side = swizzle(blocks, H)
    vectors = Vectors(problem, operands, COLUMN)
    items = key_items(operands, lists)
    operands = turned(operands)
    like = operands.query
    slopes = (result((B, N, S), f32, like),) * learns_slopes(problem, operands)
    dq = jax.new_ref(jnp.zeros((B, T, N, H), f32))
    dk, dv, *slopes = launch(
        problem,
        functools.partial(_gradients, problem, blocks),
        PARTS,
        1 if problem.interpret else items.size,  # see `add_rows`
        out_type=(result((B, S, K, H), dtype, like), result((B, S, K, Hv), dtype, like), *slopes),
        scratch_types=dict(
            k_tile=tiles(PARTS, ROWS, H, dtype, side),
            v_tile=tiles(PARTS, ROWS, Hv, dtype),
            q_tile=tiles(stages, blocks.q, H, dtype, side),
            do_tile=tiles(stages, blocks.q, Hv, dtype),
            du_tile=tiles(2 * PARTS, ROWS, blocks.q, dtype, side),
            dq_tile=[tiles(1, s.rows, s.columns, f32) for s in shares(blocks, H)],
            base_columns=plgpu.SMEM((stages, blocks.q), f32),
            D_columns=plgpu.SMEM((stages, blocks.q), f32),
            k_full=plgpu.Barrier(num_arrivals=2 * PARTS),
            k_empty=plgpu.Barrier(num_arrivals=PARTS),
            q_full=plgpu.Barrier(num_arrivals=4 + len(vectors.copied), num_barriers=stages),
            q_empty=plgpu.Barrier(num_arrivals=PARTS, num_barriers=stages),
            both=plgpu.Barrier(num_arrivals=PARTS),
            **vectors.slots(stages, blocks.q),
        ),
    )(items, lists, operands, saved.do, base(saved), saved.D, dq)
    total = (jax.freeze(dq) * problem.scale).astype(operands.query.dtype)
    return vary(total, like), dk, dv, *slopes


class Share(NamedTuple):
    """What one warpgroup sums of a tile of dq."""

    row: int
    rows: int
    column: int
    columns: int


def swizzle(blocks: Blocks, H: int) -> int:
    """Bytes of a row that lie together in shared memory, in tiles of width H and in du's, which are
    multiplied with them. A tile of 64 queries is shared by columns, and so lies in two or more."""
    least = 1 if blocks.q > ROWS else 2
    return next(s for s in (128, 64, 32) if 2 * H % s == 0 and 2 * H // s >= least)


def shares(blocks: Blocks, H: int) -> list[Share]:
    """Of 128 queries each warpgroup sums 64, of 64 both sum some of the columns."""
    if blocks.q > ROWS:
        return [Share(part * ROWS, ROWS, 0, H) for part in range(PARTS)]
    side = swizzle(blocks, H) // 2
    first = -(-H // side // PARTS) * side
    return [Share(0, ROWS, 0, first), Share(0, ROWS, first, H - first)]


def add_rows(problem: Problem, tile: Any, target: Any) -> None:
    """target += tile, once the copy is done.

    The interpreter knows no copy that adds. It reads, adds and writes instead, which is right as
    only one program runs there; the instruction itself runs on the device only.
    """
    if problem.interpret:
        target[...] = target[...] + tile[...]
    else:
        plgpu.copy_smem_to_gmem(tile, target, reduction_op="add")


def _gradients(
    problem, blocks, items, lists, operands, do, base, D, dq, dk_out, dv_out, slope_out=None, *,
    k_tile, v_tile, q_tile, do_tile, du_tile, dq_tile, base_columns, D_columns,
    k_full, k_empty, q_full, q_empty, both, columns=None,
):  # fmt: skip
    (_, _, N, H), (_, S, K, Hv) = operands.query.shape, operands.value.shape
    stages, G, rows = blocks.stages, N // K, S // blocks.k
    vectors = Vectors(problem, operands, COLUMN)
    programs = 1 if problem.interpret else None  # see `add_rows`

    def place(item):
        return item // (K * rows), item // rows % K, item % rows

    def produce():
        def tile_item(item, carry):
            b, head, row = place(item)
            done, step = carry
            pl.when(done > 0)(functools.partial(plgpu.barrier_wait, k_empty))
            for w in range(PARTS):
                keys = b, pl.ds(row * blocks.k + w * ROWS, ROWS), head
                plgpu.copy_gmem_to_smem(operands.key.at[keys], k_tile.at[w], k_full)
                plgpu.copy_gmem_to_smem(operands.value.at[keys], v_tile.at[w], k_full)

            sources = operands.query, do, base, D
            slots = q_tile, do_tile, base_columns, D_columns
            step = copy_queries(
                lists, vectors, (b, head, row), G, sources, slots, columns, q_full, q_empty, step
            )
            return done + 1, step

        each_item(items, tile_item, (jnp.int32(0), jnp.int32(0)), programs)

    def meet():
        plgpu.barrier_arrive(both)
        plgpu.barrier_wait(both)

    def consume(w):
        def add_share(share, out, buffer, b, q0, n):
            """Part of a tile of dq, over the keys of both warpgroups."""
            columns = pl.ds(share.column, share.columns)

            def multiply(acc):
                for part in range(PARTS):
                    du = du_tile.at[buffer * PARTS + part, :, pl.ds(share.row, share.rows)]
                    plgpu.wgmma(acc, du.transpose((1, 0)), k_tile.at[fresh(part), :, columns])
                return acc[...]

            summed = pl.run_scoped(multiply, plgpu.ACC((share.rows, share.columns), f32))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was added before
            out[0] = summed
            plgpu.commit_smem()
            add_rows(problem, out.at[0], dq.at[b, pl.ds(q0 + share.row, share.rows), n, columns])

        def walk(item, step):
            b, head, row = place(item)
            k0 = row * blocks.k + w * ROWS
            keys = pl.ds(k0, ROWS)
            key_vectors = vectors.of_rows(b, k0)

            def tile(j, carry, partial, n):
                dk, dv, slope, step = carry
                slot = turn_of(step, stages)
                q, do = q_tile.at[slot], do_tile.at[slot]
                q0 = at(lists.order, b, n, row, j)[...] * blocks.q
                beside = vectors.of_columns(columns, slot, b, q0, blocks.q)
                where = Place(b, n, q0, k0, key_vectors, beside)
                shape = (ROWS, blocks.q)
                plgpu.barrier_wait(q_full.at[slot])

                v, do_columns = v_tile.at[fresh(w)], do.transpose((1, 0))
                zeros = filled(shape, 0)
                raw, dp = add_products(
                    problem,
                    (zeros, k_tile.at[fresh(w)], q.transpose((1, 0))),
                    (zeros, v, do_columns),
                )
                base_tile = spread(base_columns.at[slot], shape, COLUMN)
                p, differentiate = weights(
                    problem, operands, raw, base_tile, where, COLUMN, partial
                )
                p = p.astype(q_tile.dtype)
                ds, du = differentiate(dp, spread(D_columns.at[slot], shape, COLUMN))
                if slope_out is not None:
                    slope -= (ds * distance(where, shape)).sum(axis=1)
                du = du.astype(q_tile.dtype)
                buffer = turn_of(step, 2)
                du_tile[buffer * PARTS + w] = du
                dv, dk = add_products(problem, (dv, p, do), (dk, du, q))
                plgpu.commit_smem()
                plgpu.barrier_arrive(q_empty.at[slot])
                # Both have written du. None writes this buffer again before both are here once
                # more, and so are done with it.
                meet()
                for part, share in enumerate(shares(blocks, H)):
                    add = functools.partial(add_share, share, dq_tile[part])
                    pl.when(w == part)(functools.partial(add, buffer, b, q0, n))
                return dk, dv, slope, step + 1

            def one_head(g, carry):
                n = head * G + g
                dk, dv, step = carry
                full, seen = at(lists.full, b, n, row)[...], at(lists.seen, b, n, row)[...]
                carry = dk, dv, filled((ROWS,), 0) if slope_out is not None else None, step
                dk, dv, slope, step = each_tile(full, seen, functools.partial(tile, n=n), carry)
                if slope_out is not None:
                    slope_out[b, n, keys] = slope
                return dk, dv, step

            plgpu.barrier_wait(k_full)
            carry = filled((ROWS, H), 0), filled((ROWS, Hv), 0), step
            dk, dv, step = lax.fori_loop(0, G, one_head, carry)
            meet()  # the other has read this one's keys for the last time
            k_tile[w] = (dk * problem.scale).astype(k_tile.dtype)
            v_tile[w] = dv.astype(v_tile.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_tile.at[w], dk_out.at[b, keys, head])
            plgpu.copy_smem_to_gmem(v_tile.at[w], dv_out.at[b, keys, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(k_empty)
            return step

        each_item(items, walk, jnp.int32(0), programs)

    specialise(PARTS, produce, consume)
