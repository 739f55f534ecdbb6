"""Custom gradient of the attention kernels, independent of the backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from transformer_jax.kernels import Target, portable
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
"""The tiles that each kernel of a call visits; rows are key tiles for those of `BY_KEY`."""
BY_KEY: tuple[Kind, ...] = ("dkdv", "single_pass")
FORWARD = QUERIES, ROWS, ROWS  # out, m, log l


def fused_attention(
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
    backend, blocks = where.backend, dict(where.blocks)

    def kernel(
        problem: Problem, kind: Kind, results: tuple[AxisNames, ...], *, of_bias: bool = False,
        plainly: Kernels | None = None,
    ) -> KernelCall:  # fmt: skip
        """Return a kernel of (operands, lists[, saved]), with rules for `vmap` and for a mesh.

        Those of `plainly`, in plain JAX, need none: the compiler splits them, and JAX maps them.
        """
        kernels = backend.kernels if plainly is None else plainly

        def run(operands: Operands, lists: TileLists, *saved: Saved) -> tuple[jax.Array, ...]:
            out = kernels[kind](problem, operands, lists, blocks[kind], *saved)
            out = out if isinstance(out, tuple) else (out,)
            return tuple(x for x in out if x is not None)

        # the decode kernel packs queries itself
        packs = problem.packs and kind != "decode"
        own = packed(run, blocks[kind].q, results, by_key=kind in BY_KEY) if packs else run
        if plainly is not None:
            return own
        # an interpreter with parameters calls back into Python, which no partitioner can split
        splits = problem.interpret in (True, False)
        here = batched(own, results, of_bias=of_bias, splits=splits)
        if backend.portable is None:
            return here
        # a program that is exported, or for another platform, may not call this library
        elsewhere = kernel(problem, kind, results, plainly=backend.portable)
        return lambda *tree: here_or_elsewhere(here, elsewhere, tree)

    def compute(tree: tuple[Operands, ListsByKernel]) -> tuple[jax.Array, jax.Array]:
        """Return attention where nobody differentiates it."""
        operands, lists = tree
        if "decode" not in lists:
            out, row_max, log_sum = kernel(problem, "forward", FORWARD)(operands, lists["forward"])
            return out, row_max + log_sum
        # the tile of few queries has no more rows than there are; what pads them is zeros
        T, few = operands.query.shape[1], blocks["decode"].q
        first = operands.of_first_queries(few)
        out, row_max, log_sum = kernel(problem, "decode", FORWARD)(first, lists["decode"])
        fill = (0, 0), (0, T - few)
        return jnp.pad(out, (*fill, (0, 0), (0, 0))), jnp.pad(row_max + log_sum, ((0, 0), *fill))

    def forward(
        tree: tuple[Operands, ListsByKernel],
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
        """Return attention, and the results of the forward kernel."""
        operands, lists = tree
        # float32, where the backend has it: D of an output rounded to 16 bits would be off
        wide = replace(problem, wide=backend.wide)
        saved = kernel(wide, "forward", FORWARD)(widened(operands)[0], lists["forward"])
        out, row_max, log_sum = saved
        return (out.astype(operands.query.dtype), row_max + log_sum), (out, row_max, log_sum)

    def plain(tree: tuple[Operands, ListsByKernel]) -> tuple[jax.Array, jax.Array]:
        """Return attention in plain JAX, over the same tiles."""
        operands, lists = tree
        function = kernel(problem, "forward", FORWARD, plainly=portable.KERNELS)
        out, row_max, log_sum = function(widened(operands)[0], lists["forward"])
        return out, row_max + log_sum

    def backward(
        tree: tuple[Operands, ListsByKernel],
        saved: tuple[jax.Array, jax.Array, jax.Array],
        cotangents: tuple[jax.Array, ...],
        wanted: tuple[Operands, ListsByKernel],
    ) -> tuple[Operands, ListsByKernel]:
        """Run the backward kernels and sum what they leave to sum."""
        (given, lists), (out, row_max, log_sum), (do, dlse) = tree, saved, cotangents
        operands, narrow = widened(given)
        own = replace(problem, fixed_slopes=not wanted[0].slopes)
        # else XLA lays `do` out as the next weight gradient likes it, and copies
        if backend.heads_first:
            do = with_layout_constraint(do, Layout((0, 2, 1, 3)))
        products = do.astype(jnp.float32) * out.astype(jnp.float32)
        D = jnp.moveaxis(products.sum(axis=-1), 1, 2) - dlse  # [B, N, T]
        # p = exp(s - inf) is 0 in a row that sees nothing, or is NaN: it passes no gradient on
        lost = jnp.isneginf(row_max) | jnp.isnan(row_max) | jnp.isnan(log_sum)
        rows = Saved(
            do,
            jnp.where(lost, jnp.inf, row_max),
            jnp.where(lost, 0, log_sum),
            jnp.where(lost, 0, D),
        )
        # the slopes of ALiBi's paper are not learned, and their gradient is a sum over every tile
        sinks, bias, learns = operands.sinks, operands.bias, learns_slopes(own, operands)
        per_row = (ROWS,) if learns else ()  # of dslopes; per key in the single-pass backward

        def run(kind: Kind, *results: AxisNames, of_bias: bool = False) -> tuple[jax.Array, ...]:
            return kernel(own, kind, results, of_bias=of_bias)(operands, lists[kind], rows)

        # the lists say which backward kernels the plan has chosen
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
        dslopes = slope_rows[0].sum(axis=(0, 2))[None] if learns else given.slopes
        if sinks is not None:
            weights = jnp.exp(sinks[..., None] - rows.row_max - rows.log_sum)
            dsinks = -(weights * rows.D).sum(axis=(0, 2))[None]
        # back to pages, int8 and lengths that were not padded, by the transpose of `widened`
        [((dk, dk_scale), (dv, dv_scale))] = narrow([dk, dv])
        gradients = given._replace(
            query=dq, key=dk, value=dv, bias=dbias, slopes=dslopes, sinks=dsinks,
            k_scale=dk_scale, v_scale=dv_scale,
        )  # fmt: skip
        return gradients, lists

    out, lse = differentiable(compute, Passes(forward, backward, plain), (operands, lists))
    return out, lse


def widened(operands: Operands) -> tuple[Operands, Callable[[list[jax.Array]], Tree]]:
    """Return operands as all kernels but that of few queries read them, and how gradients return.

    Keys and values are then numbers of the query's dtype, gathered from pages and padded to whole
    tiles.
    """
    S, pages = operands.k_vectors[0].shape[1], operands.pages
    given = (operands.key, operands.k_scale), (operands.value, operands.v_scale)

    def widen(arrays: tuple[tuple[jax.Array, jax.Array | None], ...]) -> list[jax.Array]:
        if pages is not None:
            arrays = jax.tree.map(lambda x: rows_of_pages(x, pages), arrays)
        dtype = operands.query.dtype
        wide = [x if scale is None else dequantise(x, scale, dtype) for x, scale in arrays]
        return [
            x if x.shape[1] == S else jnp.pad(x, ((0, 0), (0, S - x.shape[1]), (0, 0), (0, 0)))
            for x in wide
        ]

    # JAX knows how gradients return from pages, padding and int8: two rows that share a page add up
    (key, value), narrow = jax.vjp(widen, given)
    wide = operands._replace(key=key, value=value, k_scale=None, v_scale=None, pages=None)
    return wide, narrow
