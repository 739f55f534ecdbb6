"""Put a gradient and a repair pass around the kernels of any backend: the part without hardware.

The repair pass. In a tile that a mask cuts, a zero weight times NaN would reach queries that do not
see it, and a softcap makes infinity finite. So the kernels detect rows whose scores or results are
nonfinite and set their log l to NaN. Only if there is such a row, the call runs once more, on
inputs whose nonfinite rows are zero, with NaN put exactly where it was seen. While all is finite
nothing is read twice.
"""

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
    learns_slopes,
    once,
)
from transformer_jax.kernels.lowering import here_or_elsewhere
from transformer_jax.kernels.sharding import KEYS, QUERIES, ROWS, TILES, AxisNames

Gradients = tuple[jax.Array | None, ...]
"""Gradients of query, key, value, bias, slopes and sinks; None for an input that is not there or
whose gradient nobody asks for."""
ListsByKernel = dict[Kind, TileLists]
"""The tiles that each kernel of a call visits; rows are key tiles for "dkdv" and "single_pass"."""


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

    T and S are multiples of each kernel's tile sizes. The gradient is that of query, key, value,
    bias, slopes and sinks.
    """
    out, row_max, log_sum, _ = _forward(problem, where, operands, lists)
    return out, row_max + log_sum


def _attend_forward(
    problem: Problem, where: Target, operands: Any, lists: Any
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    asked = Asked(operands.slopes is not None and operands.slopes.perturbed)
    operands, lists = custom_vjp_primal_tree_values((operands, lists))
    results = _forward(problem, where, operands, lists)
    out, row_max, log_sum, _ = results
    return (out, row_max + log_sum), (operands, lists, results, asked)


def _forward(
    problem: Problem, where: Target, operands: Operands, lists: ListsByKernel
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return output, m and log l, repaired where they were nonfinite, and whether they were."""
    results = _kernel(problem, where, "forward", (QUERIES, ROWS, ROWS))(operands, lists["forward"])
    if where.module.REPAIRS:
        return *results, jnp.zeros((), bool)
    nonfinite = jnp.isnan(results[2]).any()

    def transposed(out: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
        """Keep the kernel's own order of axes through a loop."""
        return (out.swapaxes(1, 2) if where.module.HEADS_FIRST else out, *rows)

    def repaired(_: Any) -> tuple[jax.Array, ...]:
        return transposed(*_repaired_forward(problem, where, operands, lists["forward"]))

    out, row_max, log_sum = transposed(*once(nonfinite, repaired, transposed(*results)))
    return out, row_max, log_sum, nonfinite


def _attend_backward(
    problem: Problem, where: Target, saved: tuple[Any, ...], cotangents: tuple[Any, Any]
) -> tuple[Any, Any]:
    operands, lists, (out, row_max, log_sum, nonfinite), asked = saved
    do, dlse = (
        jnp.zeros_like(x) if isinstance(given, SymbolicZero) else given
        for given, x in zip(cotangents, (out, row_max), strict=True)
    )
    problem = dataclasses.replace(problem, fixed_slopes=not asked.slopes)
    if where.module.HEADS_FIRST:  # else XLA makes do as the next weight gradient likes, and copies
        do = with_layout_constraint(do, Layout((0, 2, 1, 3)))
    D = _row_dot(do, out) - dlse  # [B, N, T]
    fully_masked = jnp.isneginf(row_max)
    if where.module.REPAIRS:
        lost = fully_masked | jnp.isnan(log_sum)
        rows = Saved(
            do,
            jnp.where(lost, jnp.inf, row_max),
            jnp.where(lost, 0, log_sum),
            jnp.where(lost, 0, D),
        )
        return _cotangents(operands, lists, _gradients(problem, where, operands, lists, rows))
    nonfinite = nonfinite | jnp.isnan(D).any()
    D = jnp.where(fully_masked, 0, D)
    rows = Saved(
        do, jnp.where(fully_masked, jnp.inf, row_max), jnp.where(fully_masked, 0, log_sum), D
    )
    results = _gradients(problem, where, operands, lists, rows)

    def repaired(_: Any) -> Gradients:
        """Let rows whose output is NaN pass no gradient on."""
        lost = fully_masked | jnp.isnan(row_max) | jnp.moveaxis(jnp.isnan(out).any(axis=-1), 1, 2)
        rows = Saved(
            jnp.where(jnp.moveaxis(lost, 1, 2)[..., None], 0, do),
            jnp.where(lost, jnp.inf, row_max),
            jnp.where(lost, 0, log_sum),
            jnp.where(lost, 0, D),
        )
        return _gradients(problem, where, _without_nonfinite(operands)[0], lists, rows)

    return _cotangents(operands, lists, once(nonfinite, repaired, results))


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
    name = kind if kind == "forward" else f"backward_{kind}"

    def kernel_of(module: ModuleType) -> Kernel:
        function = getattr(module, name)

        def kernel(operands: Operands, lists: TileLists, *saved: Saved) -> tuple[jax.Array, ...]:
            out = function(problem, operands, lists, blocks, *saved)
            out = out if isinstance(out, tuple) else (out,)
            return tuple(x for x in out if x is not None)

        return kernel

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
    if problem.nondeterministic:
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


# The repair pass


def _without_nonfinite(operands: Operands) -> tuple[Operands, jax.Array, jax.Array]:
    """Put zeros into nonfinite rows, and return which those are: [B, T, N] and [B, S, K]."""
    query, key, value = operands[:3]
    bad_query = ~jnp.isfinite(query).all(axis=-1)
    bad_key = ~(jnp.isfinite(key).all(axis=-1) & jnp.isfinite(value).all(axis=-1))
    clean = operands._replace(
        query=jnp.where(bad_query[..., None], 0, query),
        key=jnp.where(bad_key[..., None], 0, key),
        value=jnp.where(bad_key[..., None], 0, value),
    )
    return clean, bad_query, bad_key


def _repaired_forward(
    problem: Problem, where: Target, operands: Operands, lists: TileLists
) -> tuple[jax.Array, ...]:
    """Run the forward pass with NaN in exactly the queries that see a nonfinite row, or are one.

    Which queries see a bad key is one more attention: equal scores, over values that are 1 for bad
    keys. Then a query of NaN makes its own row NaN, and nothing where it is fully masked.
    """
    clean, bad_query, bad_key = _without_nonfinite(operands)
    results = QUERIES, ROWS, ROWS
    indicator = clean._replace(
        query=jnp.zeros_like(clean.query),
        key=jnp.zeros_like(clean.key),
        value=jnp.broadcast_to(bad_key[..., None], clean.value.shape).astype(clean.value.dtype),
        bias=None,
        slopes=None,
        sinks=None,
        dropout=None,
    )
    problem = dataclasses.replace(problem, detect_nonfinite=False)
    equal = dataclasses.replace(problem, softcap=None, dropout_rate=0.0)
    seen = _kernel(equal, where, "forward", results)(indicator, lists)[0]
    sees_nonfinite = (seen.max(axis=-1) > 0) | bad_query
    marked = clean._replace(query=jnp.where(sees_nonfinite[..., None], jnp.nan, clean.query))
    return _kernel(problem, where, "forward", results)(marked, lists)
