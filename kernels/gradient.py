"""Custom gradient of the attention kernels, which is independent of the backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from transformer_jax.kernels import Target, portable
from transformer_jax.kernels.caches import dequantize, rows_of_pages
from transformer_jax.kernels.contract import (
    Kernels,
    Kind,
    Operands,
    Problem,
    Residuals,
    TileLists,
    learns_slopes,
)
from transformer_jax.kernels.cpu.products import fixed_sum, refuse_elsewhere
from transformer_jax.kernels.derivatives import Passes, differentiable
from transformer_jax.kernels.lowering import Tree, here_or_elsewhere
from transformer_jax.kernels.packed_queries import packed
from transformer_jax.kernels.sharding import (
    KEYS,
    QUERIES,
    ROWS,
    TILES,
    AxisNames,
    KernelCall,
    batched,
)

ListsByKernel = dict[Kind, TileLists]
"""Tile lists for each kernel in a call. For the kernels in `BY_KEY`, the rows are key tiles."""
BY_KEY: tuple[Kind, ...] = ("dkdv", "single_pass")
FORWARD = QUERIES, ROWS, ROWS  # out, m, log l


def fused_attention(
    problem: Problem,
    target: Target,  # with tile sizes for every kernel in the call
    operands: Operands,  # slopes and sinks are f32[1, N]
    lists: ListsByKernel,
    known: tuple[jax.Array, ...] | None = None,
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, Hv], f32[B, N, T]
    """Return the attention output and the logarithm of the softmax denominator.

    Except on a CPU, T and S are multiples of the tile sizes of each kernel. However, keys and
    values may be shorter for a decode kernel, and packed queries are not padded. The result is
    differentiable with respect to the query, key, value, bias, slopes, sinks and int8 scales. The
    backward kernels compute gradients, and `portable` computes all other derivatives.

    If the keys are only a part of those of a call, `known` contains the results of `fused_rows` for
    the entire call. Then no forward kernel runs, and the gradient is the share of these keys.
    """
    compute, passes = _passes(problem, target)
    out, lse = differentiable(compute, passes, (operands, lists, known))
    return out, lse


def fused_rows(
    problem: Problem, target: Target, operands: Operands, lists: ListsByKernel
) -> tuple[jax.Array, ...]:  # f32[B, T, N, Hv], f32[B, N, T], f32[B, N, T]
    """Return the attention output, m and log l, without derivatives."""
    _, passes = _passes(problem, target)
    return passes.forward((operands, lists, None))[1]


Arguments = tuple[Operands, ListsByKernel, tuple[jax.Array, ...] | None]


def _passes(problem: Problem, target: Target) -> tuple[Callable[..., Tree], Passes]:
    """Return the function that computes attention without derivatives, and its passes."""
    backend, blocks = target.backend, dict(target.blocks)

    def kernel(
        problem: Problem, kind: Kind, results: tuple[AxisNames, ...], *, of_bias: bool = False,
        plainly: Kernels | None = None,
    ) -> KernelCall:  # fmt: skip
        """Return a function of (operands, lists[, saved]) with rules for `vmap` and meshes.

        The kernels in `plainly` are written in plain JAX and need no rules.
        """
        kernels = backend.kernels if plainly is None else plainly

        def run(operands: Operands, lists: TileLists, *saved: Residuals) -> tuple[jax.Array, ...]:
            out = kernels[kind](problem, operands, lists, blocks[kind], *saved)
            out = out if isinstance(out, tuple) else (out,)
            return tuple(x for x in out if x is not None)

        # the decode kernel packs queries itself
        packs = problem.packs and kind != "decode"
        call = packed(run, blocks[kind].q, results, by_key=kind in BY_KEY) if packs else run
        if plainly is not None:
            return call
        # an interpreter with parameters calls back into Python, which cannot be partitioned
        splits = problem.interpret in (True, False)
        here = batched(call, results, of_bias=of_bias, splits=splits)
        if backend.portable is None:
            return here
        # a program that is exported, or compiled for another platform, must not call this library
        elsewhere = kernel(problem, kind, results, plainly=backend.portable)
        if problem.invariant:  # plain JAX adds in another order
            elsewhere = refuse_elsewhere
        return lambda *tree: here_or_elsewhere(here, elsewhere, tree)

    def compute(tree: Arguments) -> tuple[jax.Array, jax.Array]:
        """Return the attention output if it is not differentiated."""
        operands, lists, known = tree
        if known is not None:
            return forward(tree)[0]
        if "decode" not in lists:
            out, row_max, log_sum = kernel(problem, "forward", FORWARD)(operands, lists["forward"])
            return out, row_max + log_sum
        # the decode tile contains only real queries, and padding queries get zeros
        T, few = operands.query.shape[1], blocks["decode"].q
        first = operands.of_first_queries(few)
        out, row_max, log_sum = kernel(problem, "decode", FORWARD)(first, lists["decode"])
        fill = (0, 0), (0, T - few)
        return jnp.pad(out, (*fill, (0, 0), (0, 0))), jnp.pad(row_max + log_sum, ((0, 0), *fill))

    def forward(
        tree: Arguments,
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        """Return the attention output and the results of the forward kernel."""
        operands, lists, known = tree
        if known is not None:
            out, row_max, log_sum = known
            return (out.astype(operands.query.dtype), row_max + log_sum), known
        # float32 if the backend supports it, because rounding to 16 bits would make D inaccurate
        wide = replace(problem, wide=backend.wide)
        saved = kernel(wide, "forward", FORWARD)(widened(operands)[0], lists["forward"])
        out, row_max, log_sum = saved
        return (out.astype(operands.query.dtype), row_max + log_sum), (out, row_max, log_sum)

    def plain(tree: Arguments) -> tuple[jax.Array, jax.Array]:
        """Return the attention output, computed in plain JAX over the same tiles."""
        operands, lists, _ = tree
        function = kernel(problem, "forward", FORWARD, plainly=portable.KERNELS)
        out, row_max, log_sum = function(widened(operands)[0], lists["forward"])
        return out, row_max + log_sum

    def backward(
        tree: Arguments,
        saved: tuple[jax.Array, ...],
        cotangents: tuple[jax.Array, ...],
        wanted: Arguments,
    ) -> Arguments:
        """Run the backward kernels, and compute the gradients of the slopes and sinks."""
        narrow_operands, lists, known = tree
        (out, row_max, log_sum), (do, dlse) = saved, cotangents
        operands, narrow = widened(narrow_operands)
        inner = replace(problem, fixed_slopes=not wanted[0].slopes)
        # otherwise, XLA chooses the layout of the next weight gradient and inserts a copy
        if backend.heads_first:
            do = with_layout_constraint(do, Layout((0, 2, 1, 3)))
        products = do.astype(jnp.float32) * out.astype(jnp.float32)
        sums = fixed_sum(products) if problem.invariant else products.sum(axis=-1)
        D = jnp.moveaxis(sums, 1, 2) - dlse  # [B, N, T]
        # a fully masked or NaN row gets p = exp(s - inf) = 0, so it passes no gradient
        lost = jnp.isneginf(row_max) | jnp.isnan(row_max) | jnp.isnan(log_sum)
        rows = Residuals(
            do,
            jnp.where(lost, jnp.inf, row_max),
            jnp.where(lost, 0, log_sum),
            jnp.where(lost, 0, D),
        )
        # the gradient of the slopes is a sum over all tiles, so it is skipped for fixed slopes
        sinks, bias, learns = operands.sinks, operands.bias, learns_slopes(inner, operands)
        per_row = (ROWS,) if learns else ()  # of dslopes (per key in `single_pass`)

        def run(kind: Kind, *results: AxisNames, of_bias: bool = False) -> tuple[jax.Array, ...]:
            return kernel(inner, kind, results, of_bias=of_bias)(operands, lists[kind], rows)

        # the plan contains lists only for its own backward kernels
        if "single_pass_rows" in lists:
            dq, dk, dv, *slope_rows = run("single_pass_rows", QUERIES, KEYS, KEYS, *per_row)
        elif problem.nondeterministic:
            dq, dk, dv, *slope_rows = run("single_pass", QUERIES, KEYS, KEYS, *per_row)
        else:
            dq, *slope_rows = run("dq", QUERIES, *per_row)
            dk, dv = run("dkdv", KEYS, KEYS)
        dbias = dsinks = None
        if bias is not None:
            dbias = run("bias", TILES, of_bias=True)[0].astype(bias.dtype)

        def over_rows(x: jax.Array) -> jax.Array:  # f32[B, N, T or S] -> f32[1, N]
            if not problem.invariant:
                return x.sum(axis=(0, 2))[None]
            return fixed_sum(jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1))[None]

        values = operands.score_values
        if values is not None and any(jax.tree.leaves(wanted[0].score_values)):
            floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in values]
            found = iter(run("score", *[ROWS] * sum(floating)))
            values = tuple(
                _summed_to(x.shape, next(found)) if is_floating else x
                for x, is_floating in zip(values, floating, strict=True)
            )
        dslopes = over_rows(slope_rows[0]) if learns else operands.slopes
        if sinks is not None:
            weights = jnp.exp(sinks[..., None] - rows.row_max - rows.log_sum)
            dsinks = -over_rows(weights * rows.D)
        # the transpose of `widened` restores pages, int8 and unpadded lengths
        [((dk, dk_scale), (dv, dv_scale))] = narrow([dk, dv])
        gradients = narrow_operands._replace(
            query=dq, key=dk, value=dv, bias=dbias, slopes=dslopes, sinks=dsinks,
            k_scale=dk_scale, v_scale=dv_scale, score_values=values,
        )  # fmt: skip
        return gradients, lists, known

    return compute, Passes(forward, backward, plain)


def _summed_to(shape: tuple[int, ...], rows: jax.Array) -> jax.Array:
    """Return the gradient of a value, given its sums over keys or queries, f32[B, N, T or S]."""
    rows = rows[..., None] if shape[3] == 1 else rows[:, :, None]
    summed = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return rows.sum(axis=summed, keepdims=True)


def widened(operands: Operands) -> tuple[Operands, Callable[[list[jax.Array]], Tree]]:
    """Convert operands for all kernels except `decode`, and return the transpose for gradients.

    Keys and values are gathered from pages, dequantized to the query's dtype, and padded to whole
    tiles.
    """
    S, pages = operands.k_vectors[0].shape[1], operands.pages
    scaled = (operands.key, operands.k_scale), (operands.value, operands.v_scale)

    def widen(arrays: tuple[tuple[jax.Array, jax.Array | None], ...]) -> list[jax.Array]:
        if pages is not None:
            arrays = jax.tree.map(lambda x: rows_of_pages(x, pages), arrays)
        dtype = operands.query.dtype
        wide = [x if scale is None else dequantize(x, scale, dtype) for x, scale in arrays]
        return [
            x if x.shape[1] == S else jnp.pad(x, ((0, 0), (0, S - x.shape[1]), (0, 0), (0, 0)))
            for x in wide
        ]

    # the VJP adds the gradients of rows that share a page
    (key, value), narrow = jax.vjp(widen, scaled)
    wide = operands._replace(key=key, value=value, k_scale=None, v_scale=None, pages=None)
    return wide, narrow
