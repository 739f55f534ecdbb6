"""Single-pass backward kernel, which computes dq, dk and dv with five products in a fixed order.

The grid of a TPU runs in order, over queries. The rows of dq are completed one by one, while the
sums of dk and dv for all keys of a key head stay in VMEM until all query heads of the key head are
done.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from transformer_jax.kernels.chips import TPU_SUM_BYTES
from transformer_jax.kernels.contract import (
    Blocks,
    Operands,
    Problem,
    Residuals,
    TileLists,
    learns_slopes,
)
from transformer_jax.kernels.tpu.backward import QuerySums, clear
from transformer_jax.kernels.tpu.grid import GridStep, Ref, Span, by_queries_of_key_heads
from transformer_jax.kernels.tpu.inputs import TileInputs
from transformer_jax.kernels.tpu.scores import dot, score_gradients


def sums_fit(S: int, H: int, Hv: int) -> bool:
    """Whether the sums of dk and dv for a key head, padded to registers, fit in VMEM."""
    lanes = sum(-(-width // 128) * 128 for width in (H, Hv))
    return S * lanes * 4 <= TPU_SUM_BYTES


def backward_single_pass_rows(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, ...]:  # [B, T, N, H], [B, S, K, H], [B, S, K, Hv][, f32[B, N, T]]
    """Return dq, dk, dv and, with learned slopes, the rows -sum_j ds_ij |q_i - k_j|."""
    (B, T, N, H), (_, S, K, _) = operands.query.shape, operands.key.shape
    Hv, dtype = operands.value.shape[3], operands.query.dtype
    sloped = learns_slopes(problem, operands)

    def kernel(step: GridStep, x: TileInputs, dq: Ref, dk: Ref, dv: Ref, *refs: Ref) -> None:
        slope_rows, (acc, dk_sums, dv_sums, dk_tile, dv_tile, dk_copied, dv_copied, *slope_acc) = (
            refs[:sloped],
            refs[sloped:],
        )

        @pl.when(step.begins)
        def _() -> None:
            def clear_tile(here: Span) -> None:
                clear(dk_sums.at[here], dv_sums.at[here])

            _each_tile(S, blocks.k, clear_tile)

        sums = QuerySums(problem, step, x, (dq, slope_rows), (acc, slope_acc))
        sums.begin()

        def tile(masked: bool) -> None:
            p, ds, du, _ = score_gradients(problem, x, step, masked)
            keys = pl.ds(pl.multiple_of(jnp.asarray(step.j), blocks.k), blocks.k)
            # the sums of all keys stay in VMEM, because each row of tiles adds to all of them
            dv_sums[keys] += dot(p.astype(dtype), x.do[...], 1, 0)
            du = du.astype(dtype)
            dk_sums[keys] += dot(du, x.query[...], 1, 0)
            sums.add(ds, du)

        step.visit(tile)
        sums.write()

        @pl.when(step.ends)
        def _() -> None:
            place = step.b, lax.div(step.n, jnp.int32(N // K))

            def write(here: Span) -> None:
                dk_tile[...] = (dk_sums[here] * problem.scale).astype(dtype)
                dv_tile[...] = dv_sums[here].astype(dtype)
                copies = [
                    pltpu.make_async_copy(dk_tile, dk.at[*place, here], dk_copied),
                    pltpu.make_async_copy(dv_tile, dv.at[*place, here], dv_copied),
                ]
                for copy in copies:
                    copy.start()
                for copy in copies:
                    copy.wait()

            _each_tile(S, blocks.k, write)

    dq, dk, dv, *slope_rows = by_queries_of_key_heads(
        "attention_single_pass", kernel, problem, operands, saved, lists, blocks,
        writes=[
            ("query", (B, N, T, H), dtype),
            ("whole", (B, K, S, H), dtype),
            ("whole", (B, K, S, Hv), dtype),
            *[("query row", (B, N, 1, T), jnp.float32)] * sloped,
        ],
        scratch=[
            (H, blocks.q),
            (S, H),
            (S, Hv),
            pltpu.VMEM((blocks.k, H), dtype),
            pltpu.VMEM((blocks.k, Hv), dtype),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
            *[(1, blocks.q)] * sloped,
        ],
    )  # fmt: skip
    results = (x.swapaxes(1, 2) for x in (dq, dk, dv))
    return *results, *(rows.reshape(B, N, T) for rows in slope_rows)


def _each_tile(length: int, block: int, body: Callable[[Span], None]) -> None:
    """Run `body` for each tile of `length` rows."""

    def one(j: jax.Array, carry: None) -> None:
        body(pl.ds(pl.multiple_of(j * block, block), block))

    lax.fori_loop(jnp.int32(0), jnp.int32(length // block), one, None)
