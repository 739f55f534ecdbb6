"""Put a gradient around the kernels of any backend: the part without hardware."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.experimental.layout import Layout, with_layout_constraint

from transformer_jax.kernels import Target
from transformer_jax.kernels.batching import Kernel, batched
from transformer_jax.kernels.chips import Kind
from transformer_jax.kernels.contract import (
    Operands,
    Problem,
    Saved,
    TileLists,
    dequantise,
    learns_slopes,
    rows_of_pages,
)
from transformer_jax.kernels.lowering import here_or_elsewhere
from transformer_jax.kernels.packed_queries import packed
from transformer_jax.kernels.sharding import HEADS, KEYS, QUERIES, ROWS, TILES, AxisNames

Gradients = tuple[jax.Array | None, ...]
"""Gradients of query, key, value, bias, slopes and sinks; None for an input that is not there or
whose gradient nobody asks for."""
ListsByKernel = dict[Kind, TileLists]
"""The tiles that each kernel of a call visits; rows are key tiles for those of `BY_KEY`."""
BY_KEY: tuple[Kind, ...] = ("dkdv", "single_pass")


@jax.tree_util.register_static
@dataclass(frozen=True)
class Asked:
    """Say which gradients are asked for, of those that cost something."""

    slopes: bool


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    problem: Problem,
    where: Target,  # with the tile sizes of every kernel of the call
    operands: Operands,  # of which slopes and sinks are f32[1, N]
    lists: ListsByKernel,
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, Hv], f32[B, N, T]
    """Return attention and the logarithm of its denominator.

    T and S are multiples of each kernel's tile sizes; where there is a decode kernel, keys and
    values may be shorter, and packed queries are not padded. The gradient is that of query, key,
    value, bias, slopes and sinks.
    """
    if "decode" in lists:
        return _decode(problem, where, operands, lists["decode"])
    out, row_max, log_sum, _ = _forward(problem, where, operands, lists)
    return out, row_max + log_sum


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
    problem: Problem, where: Target, operands: Any, lists: Any
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    asked = Asked(operands.slopes is not None and operands.slopes.perturbed)
    operands, lists = custom_vjp_primal_tree_values((operands, lists))
    S, pages = operands.k_vectors[0].shape[1], operands.pages
    widen = partial(_widened, S, operands.query.dtype, pages)
    (key, value), narrow = jax.vjp(widen, _keys_values(operands))
    operands = operands._replace(key=key, value=value, k_scale=None, v_scale=None, pages=None)
    results = _forward(problem, where, operands, lists)
    out, row_max, log_sum, _ = results
    return (out, row_max + log_sum), (operands, lists, results, asked, narrow, pages)


def _keys_values(operands: Operands) -> tuple[tuple[jax.Array, jax.Array | None], ...]:
    return (operands.key, operands.k_scale), (operands.value, operands.v_scale)


def _widened(
    S: int,
    dtype: Any,
    pages: jax.Array | None,
    arrays: tuple[tuple[jax.Array, jax.Array | None], ...],
) -> list[jax.Array]:  # [B, S, K, H or Hv]
    """Return keys and values as other kernels than that of few queries read them.

    They are numbers of the query's dtype, gathered from pages and padded to whole tiles.
    """
    if pages is not None:
        arrays = jax.tree.map(lambda x: rows_of_pages(x, pages), arrays)
    wide = [x if scale is None else dequantise(x, scale, dtype) for x, scale in arrays]
    return [
        x if x.shape[1] == S else jnp.pad(x, ((0, 0), (0, S - x.shape[1]), (0, 0), (0, 0)))
        for x in wide
    ]


def _forward(
    problem: Problem, where: Target, operands: Operands, lists: ListsByKernel
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return output, m, log l, and of which heads something was not finite, if a backend says."""
    names = (QUERIES, ROWS, ROWS) + (HEADS,) * where.module.MARKS
    out, row_max, log_sum, *marks = _kernel(problem, where, "forward", names)(
        operands, lists["forward"]
    )
    return out, row_max, log_sum, marks[0] if marks else None


def _attend_backward(
    problem: Problem, where: Target, saved: tuple[Any, ...], cotangents: tuple[Any, Any]
) -> tuple[Any, Any]:
    operands, lists, (out, row_max, log_sum, nonfinite), asked, narrow, pages = saved
    do, dlse = (
        jnp.zeros_like(x) if isinstance(given, SymbolicZero) else given
        for given, x in zip(cotangents, (out, row_max), strict=True)
    )
    problem = dataclasses.replace(problem, fixed_slopes=not asked.slopes)
    if where.module.HEADS_FIRST:  # else XLA makes do as the next weight gradient likes, and copies
        do = with_layout_constraint(do, Layout((0, 2, 1, 3)))
    D = _row_dot(do, out) - dlse  # [B, N, T]
    lost = jnp.isneginf(row_max) | jnp.isnan(row_max) | jnp.isnan(log_sum)
    if nonfinite is not None and problem.detect_nonfinite:
        nonfinite |= ~jnp.isfinite(D).all(axis=2)
        nonfinite |= _beyond_forward_tiles(where, operands, lists)
    rows = Saved(
        do,
        jnp.where(lost, jnp.inf, row_max),
        jnp.where(lost, 0, log_sum),
        jnp.where(lost, 0, D),
        nonfinite,
    )
    dq, dk, dv, *others = _gradients(problem, where, operands, lists, rows)
    [((dk, dk_scale), (dv, dv_scale))] = narrow([dk, dv])
    operands = operands._replace(pages=pages)
    found, lists = _cotangents(operands, lists, (dq, dk, dv, *others))
    return found._replace(k_scale=dk_scale, v_scale=dv_scale), lists


def _beyond_forward_tiles(
    where: Target, operands: Operands, lists: ListsByKernel
) -> jax.Array | bool:  # bool[B, N]
    """Return which heads may hold what is not finite in keys that the forward kernel never met.

    A backward tile that is wider than a forward one has keys of tiles that nobody sees.
    """
    tiles = dict(where.blocks)
    if all(tiles[kind].k <= tiles["forward"].k for kind in lists if kind != "decode"):
        return False
    group = operands.query.shape[2] // operands.key.shape[2]
    finite = [jnp.isfinite(x).all(axis=(1, 3)) for x in (operands.key, operands.value)]
    return ~jnp.repeat(finite[0] & finite[1], group, axis=1)


def _cotangents(operands: Operands, lists: Any, gradients: Gradients) -> tuple[Any, Any]:
    """Return gradients as cotangents of operands and lists; integers have none."""
    no_gradient = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
    integers, lists = jax.tree.map(no_gradient, (operands, lists))
    dq, dk, dv, dbias, dslopes, dsinks = gradients
    return integers._replace(
        query=dq, key=dk, value=dv, bias=dbias, slopes=dslopes, sinks=dsinks
    ), lists


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _kernel(
    problem: Problem,
    where: Target,
    kind: Kind,
    results: tuple[AxisNames, ...],
    *,
    of_bias: bool = False,
) -> Kernel:
    """Return a kernel of (operands, lists[, saved]), with its rules for `vmap` and for a mesh."""
    blocks = dict(where.blocks)[kind]
    name = kind if kind in ("forward", "decode") else f"backward_{kind}"

    def kernel_of(module: ModuleType) -> Kernel:
        function = getattr(module, name)

        def kernel(operands: Operands, lists: TileLists, *saved: Saved) -> tuple[jax.Array, ...]:
            out = function(problem, operands, lists, blocks, *saved)
            out = out if isinstance(out, tuple) else (out,)
            return tuple(x for x in out if x is not None)

        if not problem.packs or kind == "decode":  # which packs queries itself
            return kernel
        return packed(kernel, blocks.q, results, by_key=kind in BY_KEY)

    # an interpreter with parameters calls back into Python, which no partitioner can split
    splits = problem.interpret in (True, False)
    here = batched(kernel_of(where.module), results, of_bias=of_bias, splits=splits)
    if where.module.PORTABLE is None:
        return here
    elsewhere = kernel_of(where.module.PORTABLE)
    return lambda *tree: here_or_elsewhere(here, elsewhere, tree)


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
