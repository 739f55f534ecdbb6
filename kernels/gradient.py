"""Put a gradient around the kernels of any backend: the part without hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from transformer_jax.kernels import Target, portable
from transformer_jax.kernels.batching import Kernel, batched
from transformer_jax.kernels.caches import dequantise, rows_of_pages
from transformer_jax.kernels.contract import (
    Kernels,
    Kind,
    Operands,
    Problem,
    Saved,
    TileLists,
    learns_slopes,
)
from transformer_jax.kernels.derivatives import Passes, differentiable
from transformer_jax.kernels.lowering import Tree, here_or_elsewhere
from transformer_jax.kernels.packed_queries import packed
from transformer_jax.kernels.sharding import KEYS, QUERIES, ROWS, TILES, AxisNames

Gradients = tuple[jax.Array | None, ...]
"""Gradients of query, key, value, bias, slopes and sinks; None for an input that is not there or
whose gradient nobody asks for."""
ListsByKernel = dict[Kind, TileLists]
"""The tiles that each kernel of a call visits; rows are key tiles for those of `BY_KEY`."""
BY_KEY: tuple[Kind, ...] = ("dkdv", "single_pass")


def attend(
    problem: Problem,
    where: Target,  # with the tile sizes of every kernel of the call
    operands: Operands,  # of which slopes and sinks are f32[1, N]
    lists: ListsByKernel,
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, Hv], f32[B, N, T]
    """Return attention and the logarithm of its denominator.

    T and S are multiples of each kernel's tile sizes, but on a CPU; where there is a decode kernel,
    keys and values may be shorter, and packed queries are not padded. Differentiable in query, key,
    value, bias, slopes, sinks and the scales of int8: gradients by the backward kernels, what else
    there is by `portable`.
    """

    def compute(tree: tuple[Operands, ListsByKernel]) -> tuple[jax.Array, jax.Array]:
        operands, lists = tree
        if "decode" in lists:
            return _decode(problem, where, operands, lists["decode"])
        kernel = _kernel(problem, where, "forward", (QUERIES, ROWS, ROWS))
        out, row_max, log_sum = kernel(operands, lists["forward"])
        return out, row_max + log_sum

    passes = Passes(
        partial(_attend_forward, problem, where),
        partial(_attend_backward, problem, where),
        partial(_attend_plainly, problem, where),
    )
    out, lse = differentiable(compute, passes, (operands, lists))
    return out, lse


def _decode(
    problem: Problem, where: Target, operands: Operands, lists: TileLists
) -> tuple[jax.Array, jax.Array]:
    """Return attention of the first few queries, as many as the tile holds, and zeros after."""
    T, few = operands.query.shape[1], dict(where.blocks)["decode"].q
    kernel = _kernel(problem, where, "decode", (QUERIES, ROWS, ROWS))
    out, row_max, log_sum = kernel(operands.of_first_queries(few), lists)
    fill = (0, 0), (0, T - few)
    return jnp.pad(out, (*fill, (0, 0), (0, 0))), jnp.pad(row_max + log_sum, ((0, 0), *fill))


def _attend_forward(
    problem: Problem, where: Target, tree: tuple[Operands, ListsByKernel]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """Return attention, and the results of the forward kernel."""
    operands, lists = tree
    problem = dataclasses.replace(problem, wide=where.backend.wide)
    kernel = _kernel(problem, where, "forward", (QUERIES, ROWS, ROWS))
    out, row_max, log_sum = kernel(_wide(operands)[0], lists["forward"])
    return (out.astype(operands.query.dtype), row_max + log_sum), (out, row_max, log_sum)


def _attend_plainly(
    problem: Problem, where: Target, tree: tuple[Operands, ListsByKernel]
) -> tuple[jax.Array, jax.Array]:
    """Return attention in plain JAX, over the same tiles."""
    operands, lists = tree
    kernel = _kernel_of(problem, where, "forward", (QUERIES, ROWS, ROWS), portable.KERNELS)
    out, row_max, log_sum = kernel(_wide(operands)[0], lists["forward"])
    return out, row_max + log_sum


def _wide(operands: Operands) -> tuple[Operands, Callable[[list[jax.Array | None]], Tree]]:
    """Return operands as all kernels but that of few queries read them, and how gradients return.

    Keys and values are then numbers of the query's dtype, gathered from pages and padded to whole
    tiles.
    """
    widen = partial(_widened, operands.k_vectors[0].shape[1], operands.query.dtype, operands.pages)
    (key, value), narrow = jax.vjp(widen, _keys_values(operands))
    wide = operands._replace(key=key, value=value, k_scale=None, v_scale=None, pages=None)
    return wide, narrow


def _keys_values(operands: Operands) -> tuple[tuple[jax.Array, jax.Array | None], ...]:
    return (operands.key, operands.k_scale), (operands.value, operands.v_scale)


def _widened(
    S: int,
    dtype: DTypeLike,
    pages: jax.Array | None,
    arrays: tuple[tuple[jax.Array, jax.Array | None], ...],
) -> list[jax.Array]:  # [B, S, K, H or Hv]
    if pages is not None:
        arrays = jax.tree.map(lambda x: rows_of_pages(x, pages), arrays)
    wide = [x if scale is None else dequantise(x, scale, dtype) for x, scale in arrays]
    return [
        x if x.shape[1] == S else jnp.pad(x, ((0, 0), (0, S - x.shape[1]), (0, 0), (0, 0)))
        for x in wide
    ]


def _attend_backward(
    problem: Problem,
    where: Target,
    tree: tuple[Operands, ListsByKernel],
    saved: tuple[jax.Array, jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
    wanted: tuple[Operands, ListsByKernel],
) -> tuple[Operands, ListsByKernel]:
    (given, lists), (out, row_max, log_sum), (do, dlse) = tree, saved, cotangents
    operands, narrow = _wide(given)
    problem = dataclasses.replace(problem, fixed_slopes=not wanted[0].slopes)
    if where.backend.heads_first:  # else XLA makes do as the next weight gradient likes, and copies
        do = with_layout_constraint(do, Layout((0, 2, 1, 3)))
    D = _row_dot(do, out) - dlse  # [B, N, T]
    lost = jnp.isneginf(row_max) | jnp.isnan(row_max) | jnp.isnan(log_sum)
    rows = Saved(
        do, jnp.where(lost, jnp.inf, row_max), jnp.where(lost, 0, log_sum), jnp.where(lost, 0, D)
    )
    dq, dk, dv, dbias, dslopes, dsinks = _gradients(problem, where, operands, lists, rows)
    [((dk, dk_scale), (dv, dv_scale))] = narrow([dk, dv])
    assert dq is not None
    gradients = given._replace(
        query=dq, key=dk, value=dv, bias=dbias, sinks=dsinks, k_scale=dk_scale, v_scale=dv_scale
    )
    return (gradients if dslopes is None else gradients._replace(slopes=dslopes)), lists


def _kernel(
    problem: Problem,
    where: Target,
    kind: Kind,
    results: tuple[AxisNames, ...],
    *,
    of_bias: bool = False,
) -> Kernel:
    """Return a kernel of (operands, lists[, saved]), with its rules for `vmap` and for a mesh."""
    kernel_of = partial(_kernel_of, problem, where, kind, results)
    # an interpreter with parameters calls back into Python, which no partitioner can split
    splits = problem.interpret in (True, False)
    here = batched(kernel_of(where.backend.kernels), results, of_bias=of_bias, splits=splits)
    if where.backend.portable is None:
        return here
    elsewhere = kernel_of(where.backend.portable)
    return lambda *tree: here_or_elsewhere(here, elsewhere, tree)


def _kernel_of(
    problem: Problem, where: Target, kind: Kind, results: tuple[AxisNames, ...], kernels: Kernels
) -> Kernel:
    """Return one of the kernels, as it is."""
    blocks, function = dict(where.blocks)[kind], kernels[kind]

    def kernel(operands: Operands, lists: TileLists, *saved: Saved) -> tuple[jax.Array, ...]:
        out = function(problem, operands, lists, blocks, *saved)
        out = out if isinstance(out, tuple) else (out,)
        return tuple(x for x in out if x is not None)

    if not problem.packs or kind == "decode":  # which packs queries itself
        return kernel
    return packed(kernel, blocks.q, results, by_key=kind in BY_KEY)


def _gradients(
    problem: Problem, where: Target, operands: Operands, lists: ListsByKernel, rows: Saved
) -> Gradients:
    """Run the backward kernels and sum what they leave to sum."""
    sinks, bias = operands.sinks, operands.bias
    kernel = partial(_kernel, problem, where)
    learns = learns_slopes(problem, operands)
    per_row = (ROWS,) if learns else ()  # of dslopes; per key in the single-pass backward
    if "single_pass_rows" in lists:
        by_rows = kernel("single_pass_rows", (QUERIES, KEYS, KEYS, *per_row))
        dq, dk, dv, *slope_rows = by_rows(operands, lists["single_pass_rows"], rows)
    elif problem.nondeterministic:
        single_pass = kernel("single_pass", (QUERIES, KEYS, KEYS, *per_row))
        dq, dk, dv, *slope_rows = single_pass(operands, lists["single_pass"], rows)
    else:
        dq, *slope_rows = kernel("dq", (QUERIES, *per_row))(operands, lists["dq"], rows)
        dk, dv = kernel("dkdv", (KEYS, KEYS))(operands, lists["dkdv"], rows)
    dbias = dslopes = dsinks = None
    if bias is not None:
        (dbias,) = kernel("bias", (TILES,), of_bias=True)(operands, lists["bias"], rows)
        dbias = dbias.astype(bias.dtype)
    if learns:
        dslopes = slope_rows[0].sum(axis=(0, 2))[None]
    if sinks is not None:
        weights = jnp.exp(sinks[..., None] - rows.row_max - rows.log_sum)
        dsinks = -(weights * rows.D).sum(axis=(0, 2))[None]
    return dq, dk, dv, dbias, dslopes, dsinks


def _row_dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply and sum rows: of [B, T, N, d] to f32[B, N, T]."""
    return jnp.moveaxis((x.astype(jnp.float32) * y.astype(jnp.float32)).sum(axis=-1), 1, 2)
