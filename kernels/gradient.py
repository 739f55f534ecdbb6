"""Fused attention with its gradient, on whatever backend is given: the part without hardware.

The kernels do the work and say where it went wrong: in a tile that the mask cuts, a zero weight
times NaN would reach queries that do not see it, and a softcap makes infinity finite. They mark
rows whose scores or results are not finite in `log`, and only then is the
call repeated on inputs whose rows are finite, with NaN put where it was seen. Nothing is read twice
while everything is finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.experimental.layout import Layout, with_layout_constraint

from transformer_jax.kernels.blocks import Kind
from transformer_jax.kernels.contract import (
    Blocks,
    Lists,
    Operands,
    Problem,
    Saved,
    learns_slopes,
)
from transformer_jax.kernels.layout import ROWS, mapped
from transformer_jax.kernels.parts import KEYS, QUERIES, TILES


@dataclass(frozen=True)
class Plan:
    """What is known when tracing: which kernels, and the tiles of each that is called."""

    backend: ModuleType
    problem: Problem
    blocks: tuple[tuple[Kind, Blocks], ...]


class Visits(NamedTuple):
    """The tiles that each kernel visits."""

    forward: Lists
    queries: Lists | None  # of two kernels
    keys: Lists  # rows are key tiles; of the second or the only one
    bias: Lists | None


class Fixed(NamedTuple):
    """Integers, which have no gradient."""

    q_vectors: tuple[jax.Array, ...]
    k_vectors: tuple[jax.Array, ...]
    pairs: jax.Array | None
    dropout: jax.Array | None
    visits: Visits


@jax.tree_util.register_static
@dataclass(frozen=True)
class Asked:
    """Whose gradient is asked for, of those that are not free."""

    slopes: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    plan: Plan,
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    value: jax.Array,  # [B, S, K, Hv]
    bias: jax.Array | None,  # [B or 1, N or 1, T or 1, S or 1]
    slopes: jax.Array | None,  # f32[1, N]
    sinks: jax.Array | None,  # f32[1, N]
    fixed: Fixed,
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, Hv], f32[B, N, T]
    """Attention and the logarithm of its denominator; T and S are multiples of every tile."""
    return _forward(plan, query, key, value, bias, slopes, sinks, fixed)[0]


def _attend_forward(plan, *primals):
    slopes = primals[4]
    results, saved = _forward(plan, *custom_vjp_primal_tree_values(primals))
    return results, (*saved, Asked(slopes is not None and slopes.perturbed))


def _forward(plan, query, key, value, bias, slopes, sinks, fixed):
    *vectors, pairs, dropout, visits = fixed
    operands = Operands(query, key, value, *vectors, pairs, bias, slopes, sinks, dropout)
    forward = _kernel(plan, "forward", (QUERIES, ROWS, ROWS))
    results = forward(operands, visits.forward)
    marked = jnp.isnan(results[2]).any()

    def turned(out, *rows):  # a loop keeps what passes it in the kernel's own order
        return (out.swapaxes(1, 2) if plan.backend.HEADS_FIRST else out, *rows)

    def careful(_):
        return turned(*_careful_forward(plan, operands, visits.forward))

    out, high, log = turned(*_once(marked, careful, turned(*results)))
    return (out, high + log), (operands, fixed, out, high, log, marked)


def _attend_backward(plan, saved, cotangents):
    operands, fixed, out, high, log, marked, asked = saved
    do, dlse = (
        jnp.zeros_like(x) if isinstance(given, SymbolicZero) else given
        for given, x in zip(cotangents, (out, high), strict=True)
    )
    plan = _with(plan, dataclasses.replace(plan.problem, fixed_slopes=not asked.slopes))
    if plan.backend.HEADS_FIRST:  # else XLA makes do as the next weight gradient likes, and copies
        do = with_layout_constraint(do, Layout((0, 2, 1, 3)))
    D = _row_dot(do, out) - dlse  # [B, N, T]
    dead = jnp.isneginf(high)
    marked = marked | jnp.isnan(D).any()
    D = jnp.where(dead, 0, D)
    rows = Saved(do, jnp.where(dead, jnp.inf, high), jnp.where(dead, 0, log), D)
    results = _gradients(plan, operands, fixed.visits, rows)

    def careful(_):
        lost = dead | jnp.isnan(high) | jnp.moveaxis(jnp.isnan(out).any(axis=-1), 1, 2)
        rows = Saved(
            jnp.where(jnp.moveaxis(lost, 1, 2)[..., None], 0, do),
            jnp.where(lost, jnp.inf, high),
            jnp.where(lost, 0, log),
            jnp.where(lost, 0, D),
        )
        return _gradients(plan, _cleaned(operands)[0], fixed.visits, rows)

    dq, dk, dv, dbias, dslopes, dsinks = _once(marked, careful, results)
    integers = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), fixed)
    return dq, dk, dv, dbias, dslopes, dsinks, integers


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _kernel(plan: Plan, name: str, results, *, of_bias: bool = False) -> Callable:
    blocks = {k if k == "forward" else f"gradient_{k}": b for k, b in plan.blocks}[name]
    function = getattr(plan.backend, name)

    def kernel(operands, lists, *saved):
        out = function(plan.problem, operands, lists, blocks, *saved)
        out = out if isinstance(out, tuple) else (out,)
        return tuple(x for x in out if x is not None)

    # an interpreter with parameters calls back into Python, which no partitioner can split
    splits = plan.problem.interpret in (True, False)
    return mapped(kernel, results, of_bias=of_bias, splits=splits)


def _gradients(plan: Plan, operands: Operands, visits: Visits, rows: Saved) -> tuple:
    """Of query, key, value, bias, slopes and sinks; None where there is none, or nobody asks."""
    sinks, bias = operands.sinks, operands.bias
    learns = learns_slopes(plan.problem, operands)
    per_row = (ROWS,) if learns else ()  # of dslopes; per key where unordered
    if plan.problem.unordered:
        every = _kernel(plan, "gradient_unordered", (QUERIES, KEYS, KEYS, *per_row))
        dq, dk, dv, *slope_rows = every(operands, visits.keys, rows)
    else:
        by_query = _kernel(plan, "gradient_queries", (QUERIES, *per_row))
        dq, *slope_rows = by_query(operands, visits.queries, rows)
        dk, dv = _kernel(plan, "gradient_keys", (KEYS, KEYS))(operands, visits.keys, rows)
    dbias = dslopes = dsinks = None
    if bias is not None:
        (dbias,) = _kernel(plan, "gradient_bias", (TILES,), of_bias=True)(
            operands, visits.bias, rows
        )
        dbias = dbias.astype(bias.dtype)
    if learns:
        dslopes = slope_rows[0].sum(axis=(0, 2))[None]
    if sinks is not None:
        weights = jnp.exp(sinks[..., None] - rows.high - rows.log)
        dsinks = -(weights * rows.D).sum(axis=(0, 2))[None]
    return dq, dk, dv, dbias, dslopes, dsinks


def _row_dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """[B, T, N, d] to f32[B, N, T]"""
    return jnp.moveaxis((x.astype(jnp.float32) * y.astype(jnp.float32)).sum(axis=-1), 1, 2)


# What is not finite


def _once(condition: jax.Array, repeat: Callable, results: Any) -> Any:
    """`repeat(results)` where the condition holds, else the results as they stand: a loop of one
    step or none, because a conditional would copy them."""
    step = lambda state: (jnp.zeros_like(state[0]), repeat(state[1]))  # noqa: E731
    return lax.while_loop(lambda state: state[0], step, (condition, results))[1]


def _cleaned(operands: Operands) -> tuple[Operands, jax.Array, jax.Array]:
    """Zeros in rows that are not finite, and which those are: [B, T, N] and [B, S, K]."""
    query, key, value = operands[:3]
    bad_query = ~jnp.isfinite(query).all(axis=-1)
    bad_key = ~(jnp.isfinite(key).all(axis=-1) & jnp.isfinite(value).all(axis=-1))
    clean = operands._replace(
        query=jnp.where(bad_query[..., None], 0, query),
        key=jnp.where(bad_key[..., None], 0, key),
        value=jnp.where(bad_key[..., None], 0, value),
    )
    return clean, bad_query, bad_key


def _careful_forward(plan: Plan, operands: Operands, lists: Lists) -> tuple:
    """NaN in exactly the queries that see something not finite, or are not finite themselves.

    Who sees a bad key is one more attention: with equal scores over values that mark bad keys.
    Then a query of NaN makes its own row NaN, and nothing where it sees nothing.
    """
    clean, bad_query, bad_key = _cleaned(operands)
    results = QUERIES, ROWS, ROWS
    marks = clean._replace(
        query=jnp.zeros_like(clean.query),
        key=jnp.zeros_like(clean.key),
        value=jnp.broadcast_to(bad_key[..., None], clean.value.shape).astype(clean.value.dtype),
        bias=None,
        slopes=None,
        sinks=None,
        dropout=None,
    )
    unmarked = dataclasses.replace(plan.problem, mark=False)
    equal = dataclasses.replace(unmarked, softcap=None, dropout_rate=0.0)
    seen = _kernel(_with(plan, equal), "forward", results)(marks, lists)[0]
    poison = (seen.max(axis=-1) > 0) | bad_query
    poisoned = clean._replace(query=jnp.where(poison[..., None], jnp.nan, clean.query))
    return _kernel(_with(plan, unmarked), "forward", results)(poisoned, lists)


def _with(plan: Plan, problem: Problem) -> Plan:
    return dataclasses.replace(plan, problem=problem)
