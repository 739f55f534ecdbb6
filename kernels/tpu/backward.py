"""Backward kernels for dq, for dk and dv, and for the gradient of a bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from transformer_jax.kernels.contract import (
    Blocks,
    Operands,
    Problem,
    Residuals,
    TileLists,
    learns_slopes,
    tile_lists,
)
from transformer_jax.kernels.tpu.grid import (
    GridStep,
    Ref,
    by_keys,
    by_pairs,
    by_queries,
    classes_of,
)
from transformer_jax.kernels.tpu.inputs import TileInputs
from transformer_jax.kernels.tpu.scores import distances, dot, score_gradients


class QuerySums(NamedTuple):
    """Sums over a row of tiles, which are dq and the rows of the gradient of the learned slopes."""

    problem: Problem
    step: GridStep
    x: TileInputs
    results: tuple[Ref, Sequence[Ref]]  # dq, and the rows for slopes or an empty sequence
    sums: tuple[Ref, Sequence[Ref]]  # the same in float32

    def begin(self) -> None:
        acc, slopes = self.sums

        @pl.when(self.step.first)
        def _() -> None:
            clear(acc, *slopes)

    def add(self, ds: jax.Array, du: jax.Array) -> None:
        acc, slopes = self.sums
        acc[...] += dot(self.x.key[...], du, 0, 0)
        for rows in slopes:
            rows[...] -= (ds * distances(self.x)).sum(axis=0, keepdims=True)

    def write(self) -> None:
        (dq, rows), (acc, slopes) = self.results, self.sums

        @pl.when(self.step.last)
        def _() -> None:
            dq[...] = (acc[...] * self.problem.scale).T.astype(dq.dtype)
            for out, summed in zip(rows, slopes, strict=True):
                out[...] = summed[...]


def backward_dq(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, jax.Array | None]:  # [B, T, N, H], f32[B, N, T]
    """Return dq and, with learned slopes, the rows -sum_j ds_ij |q_i - k_j|."""
    B, T, N, H = operands.query.shape
    sloped = learns_slopes(problem, operands)

    def kernel(step: GridStep, x: TileInputs, *refs: Ref) -> None:
        (dq, *slope_rows), (acc, *slope_acc) = refs[: 1 + sloped], refs[1 + sloped :]

        sums = QuerySums(problem, step, x, (dq, slope_rows), (acc, slope_acc))
        sums.begin()

        def tile(masked: bool) -> None:
            of_tile = score_gradients(problem, x, step, masked)
            sums.add(of_tile.ds, of_tile.du.astype(operands.query.dtype))

        step.visit(tile)
        sums.write()

    dq, *slope_rows = by_queries(
        "attention_dq", kernel, problem, operands, saved, lists, blocks,
        writes=[
            ("query", (B, N, T, H), operands.query.dtype),
            *[("query row", (B, N, 1, T), jnp.float32)] * sloped,
        ],
        scratch=[(H, blocks.q), *[(1, blocks.q)] * sloped],
    )  # fmt: skip
    return dq.swapaxes(1, 2), slope_rows[0].reshape(B, N, T) if sloped else None


def backward_dkdv(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, Hv]
    """Return dk and dv, summed over the query heads that read a key head."""
    B, S, K, H = operands.key.shape
    Hv, dtype = operands.value.shape[3], operands.key.dtype

    def kernel(step: GridStep, x: TileInputs, dk: Ref, dv: Ref, dk_sum: Ref, dv_sum: Ref) -> None:
        @pl.when(step.first)
        def _() -> None:
            clear(dk_sum, dv_sum)

        def tile(masked: bool) -> None:
            of_tile = score_gradients(problem, x, step, masked)
            dv_sum[...] += dot(of_tile.p.astype(dtype), x.do[...], 1, 0)
            dk_sum[...] += dot(of_tile.du.astype(dtype), x.query[...], 1, 0)

        step.visit(tile)

        @pl.when(step.last)
        def _() -> None:
            dk[...] = (dk_sum[...] * problem.scale).astype(dk.dtype)
            dv[...] = dv_sum[...].astype(dv.dtype)

    dk, dv = by_keys(
        "attention_dkdv", kernel, problem, operands, saved, lists, blocks,
        writes=[("key", (B, K, S, H), dtype), ("key", (B, K, S, Hv), dtype)],
        scratch=[(blocks.k, H), (blocks.k, Hv)],
        heads=K,
    )  # fmt: skip
    return dk.swapaxes(1, 2), dv.swapaxes(1, 2)


def backward_bias(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> jax.Array:  # f32, of the shape of the bias
    """Return ds, summed over the axes along which the bias has size 1."""
    assert operands.bias is not None
    B, T, N, _ = operands.query.shape
    bias, S = operands.bias.shape, operands.key.shape[1]
    reduce = [axis for axis, size in enumerate(bias) if size == 1]

    def kernel(step: GridStep, x: TileInputs, out: Ref) -> None:
        @pl.when(step.first)
        def _() -> None:
            clear(out)

        def tile(masked: bool) -> None:
            ds = score_gradients(problem, x, step, masked).ds
            if bias[3] == 1:
                out[...] += ds.sum(axis=0, keepdims=True)
            elif bias[2] == 1:
                out[...] += ds.sum(axis=1, keepdims=True).reshape(out.shape)
            else:
                out[...] += ds.T

        step.visit(tile)

    args = "attention_bias", kernel, problem, operands, saved
    # a sum over keys is a row of queries, so iterate over queries, and the other way around
    if bias[3] == 1:
        (rows,) = by_queries(
            *args, lists, blocks, writes=[("query row", (B, N, 1, T), jnp.float32)]
        )
        return rows.swapaxes(2, 3).sum(axis=reduce, keepdims=True)
    if bias[2] == 1:
        by_key = tile_lists(classes_of(lists).swapaxes(2, 3))
        (rows,) = by_keys(
            *args, by_key, blocks, writes=[("key row", (B, N, 1, S), jnp.float32)], heads=N
        )
        return rows.sum(axis=reduce, keepdims=True)
    (pairs,) = by_pairs(*args, lists, blocks, writes=[("pairs", bias, jnp.float32)])
    return pairs


def backward_score(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, ...]:  # f32[B, N, T or S] each
    """Return the gradients of the values that a function of a score reads, summed over a tile."""
    assert operands.score_values is not None
    (B, T, N, _), S = operands.query.shape, operands.key.shape[1]
    values = [x for x in operands.score_values if x.dtype == jnp.float32]
    found: dict[int, jax.Array] = {}
    # as for a bias, a sum over keys is a row of queries, and the other way around
    for axis in (0, 1):
        places = [i for i, x in enumerate(values) if (x.shape[3] > 1) == (axis == 1)]
        if not places:
            continue

        def kernel(
            step: GridStep, x: TileInputs, *sums: Ref, axis: int = axis, places: list[int] = places
        ) -> None:
            @pl.when(step.first)
            def _() -> None:
                clear(*sums)

            def tile(masked: bool) -> None:
                gradients = score_gradients(problem, x, step, masked).values
                for out, i in zip(sums, places, strict=True):
                    out[...] += gradients[i].sum(axis=axis, keepdims=True).reshape(out.shape)

            step.visit(tile)

        args = "attention_score", kernel, problem, operands, saved
        if axis == 0:
            writes = [("query row", (B, N, 1, T), jnp.float32)] * len(places)
            rows = by_queries(*args, lists, blocks, writes=writes)
        else:
            writes = [("key row", (B, N, 1, S), jnp.float32)] * len(places)
            by_key = tile_lists(classes_of(lists).swapaxes(2, 3))
            rows = by_keys(*args, by_key, blocks, writes=writes, heads=N)
        found |= zip(places, (x.reshape(B, N, -1) for x in rows), strict=True)
    return tuple(found[i] for i in range(len(values)))


def clear(*sums: Ref) -> None:
    """Fill sums with zeros."""
    for one in sums:
        one[...] = jnp.zeros_like(one)
