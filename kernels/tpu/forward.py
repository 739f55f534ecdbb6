"""Compute output, row maximum and the logarithm of the row sum: the forward kernel."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from transformer_jax.kernels.chips import TPU_LANES
from transformer_jax.kernels.contract import LOWEST, Blocks, Operands, Problem, TileLists
from transformer_jax.kernels.tpu.grid import GridStep, Ref, by_queries
from transformer_jax.kernels.tpu.inputs import TileInputs
from transformer_jax.kernels.tpu.nonfinite import (
    has_nonfinite,
    marks_as_column,
    marks_as_row,
    without_nonfinite,
)
from transformer_jax.kernels.tpu.scores import dot, dropped, power, scores, unit

PART = 128  # keys that are worked on at once


def forward(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, ...]:  # [B, T, N, Hv], f32[B, N, T], f32[B, N, T], bool[B, N]
    """Return the output, m and log l: in fully masked rows 0, -inf and 0.

    The last result says of which heads a tile that is visited had something that is not finite.
    """
    B, T, N, _ = operands.query.shape
    Hv, detects = operands.value.shape[3], problem.detect_nonfinite

    def kernel(
        step: GridStep, x: TileInputs, out: Ref, row_max: Ref, log_sum: Ref, *refs: Ref
    ) -> None:
        mark, (m, sums, acc, *met) = refs[:detects], refs[detects:]

        @pl.when(step.first)
        def _() -> None:
            m[...] = jnp.full_like(m, LOWEST)
            sums[...] = jnp.zeros_like(sums)
            acc[...] = jnp.zeros_like(acc)
            for flag in met:
                flag[0] = has_nonfinite(x.query[...]).astype(jnp.int32)

        for flag in met:  # of these queries, from the first such tile on
            here = has_nonfinite(x.key[...]) | has_nonfinite(x.value[...])
            flag[0] |= (step.listed & here).astype(jnp.int32)
        add = partial(_tile, problem, step, x, (m, sums, acc))
        step.visit(add, met[0][0] != 0 if met else None)

        @pl.when(step.last)
        def _() -> None:
            _write(problem, step, x, (m, sums, acc), out, row_max, log_sum)
            for result, flag in zip(mark, met, strict=True):
                result[...] = jnp.full_like(result, flag[0])

    out, row_max, log_sum, *marks = by_queries(
        "attention_forward", kernel, problem, operands, None, lists, blocks,
        writes=[
            ("query", (B, N, T, Hv), operands.query.dtype),
            ("query row", (B, N, 1, T), jnp.float32),
            ("query row", (B, N, 1, T), jnp.float32),
            *[("query tile", (B, N, 1, T // blocks.q * TPU_LANES), jnp.int32)] * detects,
        ],
        scratch=[
            (1, blocks.q),
            (1, blocks.q),
            (Hv, blocks.q),
            *[pltpu.SMEM((1,), jnp.int32)] * detects,
        ],
    )  # fmt: skip
    nonfinite = marks[0].any(axis=(2, 3)) if marks else jnp.zeros((B, N), bool)
    return out.swapaxes(1, 2), row_max.reshape(B, N, T), log_sum.reshape(B, N, T), nonfinite


def _tile(
    problem: Problem,
    step: GridStep,
    x: TileInputs,
    scratch: tuple[Ref, Ref, Ref],
    masked: bool,
    exact: bool,
) -> None:
    """Add a tile of keys to the running maximum, sum and output."""
    m, sums, acc = scratch
    marks = marks_as_row(x.query[...]) if exact else None
    # All products first: those of one part run while another part is exponentiated.
    parts = step.parts(x, PART)
    products = [
        scores(problem, y, at, masked, None if marks is None else marks + _marks_of_keys(y))
        for at, y in parts
    ]
    for (at, y), (s, _) in zip(parts, products, strict=True):
        top = jnp.maximum(m[...], s.max(axis=0, keepdims=True))
        p, shrink = power(x, s - top), power(x, m[...] - top)
        m[...], sums[...] = top, shrink * sums[...] + p.sum(axis=0, keepdims=True)
        p = dropped(problem, p, y, at).astype(x.value.dtype)
        value = without_nonfinite(y.value[...]) if exact else y.value[...]
        acc[...] = shrink * acc[...] + dot(value, p, 0, 0)


def _marks_of_keys(x: TileInputs) -> jax.Array:
    """Return NaN for keys that are not finite, or whose values are not, as a column."""
    return marks_as_column(x.key[...]) + marks_as_column(x.value[...])


def _write(
    problem: Problem, step: GridStep, x: TileInputs, scratch: tuple[Ref, Ref, Ref],
    out: Ref, row_max: Ref, log_sum: Ref,
) -> None:  # fmt: skip
    """Write the results of a row of tiles; the sink joins here."""
    m, sums, acc = scratch
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
