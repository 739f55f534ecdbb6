"""Forward kernel, which computes the output, the row maxima and the logarithms of the row sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from transformer_jax.kernels.contract import LOWEST, Blocks, Operands, Problem, TileLists, out_dtype
from transformer_jax.kernels.tpu.grid import GridStep, Ref, by_queries
from transformer_jax.kernels.tpu.inputs import TileInputs
from transformer_jax.kernels.tpu.scores import dot, dropped, power, scores, unit

PART = 128  # keys that are processed at once


def forward(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, T, N, Hv], f32[B, N, T], f32[B, N, T]
    """Return the output, m and log l, which are 0, -inf and 0 in fully masked rows."""
    B, T, N, _ = operands.query.shape
    Hv = operands.value.shape[3]

    def kernel(
        step: GridStep, x: TileInputs, out: Ref, row_max: Ref, log_sum: Ref, *scratch: Ref
    ) -> None:
        m, sums, acc = scratch

        @pl.when(step.first)
        def _() -> None:
            m[...] = jnp.full_like(m, LOWEST)
            sums[...] = jnp.zeros_like(sums)
            acc[...] = jnp.zeros_like(acc)

        def tile(masked: bool) -> None:
            # compute all products first, so that the products of one part overlap with the
            # exponentials of another
            parts = step.parts(x, PART)
            products = [scores(problem, y, at, masked) for at, y in parts]
            for (at, y), (s, _) in zip(parts, products, strict=True):
                top = jnp.maximum(m[...], s.max(axis=0, keepdims=True))
                p, shrink = power(x, s - top), power(x, m[...] - top)
                m[...], sums[...] = top, shrink * sums[...] + p.sum(axis=0, keepdims=True)
                p = dropped(problem, p, y, at).astype(x.value.dtype)
                acc[...] = shrink * acc[...] + dot(y.value[...], p, 0, 0)

        step.visit(tile)

        @pl.when(step.last)
        def _() -> None:
            top, total, shrink = m[...], sums[...], jnp.ones(m.shape, jnp.float32)
            fully_masked = total == 0
            if x.sinks is not None:
                sink = step.scalar(x.sinks) * unit(x)
                top = jnp.maximum(top, sink)
                shrink = power(x, m[...] - top)
                total = total * shrink + power(x, sink - top)
            total = jnp.where(fully_masked, 1.0, total)
            rows = jnp.where(fully_masked, 0.0, acc[...] * (shrink / total))
            out[...] = rows.T.astype(out.dtype)
            row_max[...] = jnp.where(fully_masked, -jnp.inf, top * (1 / unit(x)))
            log_sum[...] = jnp.log(total)

    out, row_max, log_sum = by_queries(
        "attention_forward", kernel, problem, operands, None, lists, blocks,
        writes=[
            ("query", (B, N, T, Hv), out_dtype(problem, operands)),
            ("query row", (B, N, 1, T), jnp.float32),
            ("query row", (B, N, 1, T), jnp.float32),
        ],
        scratch=[(1, blocks.q), (1, blocks.q), (Hv, blocks.q)],
    )  # fmt: skip
    return out.swapaxes(1, 2), row_max.reshape(B, N, T), log_sum.reshape(B, N, T)
