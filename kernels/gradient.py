"""Put a gradient and a repair pass around the kernels of any backend: the part without hardware.

The repair pass. In a tile that a mask cuts, a zero weight times NaN would reach queries that do not
see it, and a softcap makes infinity finite. So the kernels detect rows whose scores or results are
nonfinite and set their log l to NaN. Only if there is such a row, the call runs once more, on
inputs whose nonfinite rows are zero, with NaN put exactly where it was seen. While all is finite
nothing is read twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.experimental.layout import Layout, with_layout_constraint

from transformer_jax.kernels.batching import Kernel, batched
from transformer_jax.kernels.chips import Kind
from transformer_jax.kernels.contract import (
    Blocks,
    Operands,
    Problem,
    Saved,
    TileLists,
    learns_slopes,
)
from transformer_jax.kernels.sharding import KEYS, QUERIES, ROWS, TILES, AxisNames

Results = TypeVar("Results", bound=tuple)
Gradients = tuple[jax.Array | None, ...]
"""Gradients of query, key, value, bias, slopes and sinks; None for an input that is not there or
whose gradient nobody asks for."""


@dataclass(frozen=True)
class KernelSetup:
    """Say which kernels run, with which tiles; known when tracing."""

    backend: ModuleType
    problem: Problem
    blocks: tuple[tuple[Kind, Blocks], ...]

    def change(self, **fields: Any) -> KernelSetup:
        """Return a setup with other fields of its problem."""
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, **fields))


class KernelLists(NamedTuple):
    """Hold the tiles that each kernel visits."""

    forward: TileLists
    dq: TileLists | None  # None for the single-pass backward
    by_key: TileLists  # rows are key tiles; of the dk/dv kernel or the single-pass backward
    bias: TileLists | None


class IntegerInputs(NamedTuple):
    """Hold the inputs that have no gradient."""

    q_vectors: tuple[jax.Array, ...]
    k_vectors: tuple[jax.Array, ...]
    pairs: jax.Array | None
    dropout: jax.Array | None
    lists: KernelLists


@jax.tree_util.register_static
@dataclass(frozen=True)
class Asked:
    """Say which gradients are asked for, of those that cost something."""

    slopes: bool


class Forward(NamedTuple):
    """Hold what the backward pass reads of the forward pass."""

    operands: Operands
    integers: IntegerInputs
    out: jax.Array  # [B, T, N, Hv]
    row_max: jax.Array  # f32[B, N, T]
    log_sum: jax.Array  # f32[B, N, T]
    nonfinite: jax.Array  # bool[]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    setup: KernelSetup,
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    value: jax.Array,  # [B, S, K, Hv]
    bias: jax.Array | None,  # [B or 1, N or 1, T or 1, S or 1]
    slopes: jax.Array | None,  # f32[1, N]
    sinks: jax.Array | None,  # f32[1, N]
    integers: IntegerInputs,
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, Hv], f32[B, N, T]
    """Return attention and the logarithm of its denominator; T and S are multiples of each tile."""
    return _forward(setup, query, key, value, bias, slopes, sinks, integers)[0]


def _attend_forward(
    setup: KernelSetup, *primals: Any
) -> tuple[tuple[jax.Array, jax.Array], tuple[Forward, Asked]]:
    slopes = primals[4]
    results, saved = _forward(setup, *custom_vjp_primal_tree_values(primals))
    return results, (saved, Asked(slopes is not None and slopes.perturbed))


def _forward(
    setup: KernelSetup,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    slopes: jax.Array | None,
    sinks: jax.Array | None,
    integers: IntegerInputs,
) -> tuple[tuple[jax.Array, jax.Array], Forward]:
    *vectors, pairs, dropout, lists = integers
    operands = Operands(query, key, value, *vectors, pairs, bias, slopes, sinks, dropout)
    results = _kernel(setup, "forward", (QUERIES, ROWS, ROWS))(operands, lists.forward)
    nonfinite = jnp.isnan(results[2]).any()

    def transposed(out: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
        """Keep the kernel's own order of axes through a loop."""
        return (out.swapaxes(1, 2) if setup.backend.HEADS_FIRST else out, *rows)

    def repaired(_: Any) -> tuple[jax.Array, ...]:
        return transposed(*_repaired_forward(setup, operands, lists.forward))

    out, row_max, log_sum = transposed(*_once(nonfinite, repaired, transposed(*results)))
    saved = Forward(operands, integers, out, row_max, log_sum, nonfinite)
    return (out, row_max + log_sum), saved


def _attend_backward(
    setup: KernelSetup, saved: tuple[Forward, Asked], cotangents: tuple[Any, Any]
) -> tuple[Any, ...]:
    (operands, integers, out, row_max, log_sum, nonfinite), asked = saved
    do, dlse = (
        jnp.zeros_like(x) if isinstance(given, SymbolicZero) else given
        for given, x in zip(cotangents, (out, row_max), strict=True)
    )
    setup = setup.change(fixed_slopes=not asked.slopes)
    if setup.backend.HEADS_FIRST:  # else XLA makes do as the next weight gradient likes, and copies
        do = with_layout_constraint(do, Layout((0, 2, 1, 3)))
    D = _row_dot(do, out) - dlse  # [B, N, T]
    fully_masked = jnp.isneginf(row_max)
    nonfinite = nonfinite | jnp.isnan(D).any()
    D = jnp.where(fully_masked, 0, D)
    rows = Saved(
        do, jnp.where(fully_masked, jnp.inf, row_max), jnp.where(fully_masked, 0, log_sum), D
    )
    results = _gradients(setup, operands, integers.lists, rows)

    def repaired(_: Any) -> Gradients:
        """Let rows whose output is NaN pass no gradient on."""
        lost = fully_masked | jnp.isnan(row_max) | jnp.moveaxis(jnp.isnan(out).any(axis=-1), 1, 2)
        rows = Saved(
            jnp.where(jnp.moveaxis(lost, 1, 2)[..., None], 0, do),
            jnp.where(lost, jnp.inf, row_max),
            jnp.where(lost, 0, log_sum),
            jnp.where(lost, 0, D),
        )
        return _gradients(setup, _without_nonfinite(operands)[0], integers.lists, rows)

    gradients = _once(nonfinite, repaired, results)
    no_gradient = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), integers)
    return *gradients, no_gradient


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _kernel(
    setup: KernelSetup, kind: Kind, results: tuple[AxisNames, ...], *, of_bias: bool = False
) -> Kernel:
    """Return a kernel of (operands, lists[, saved]), with its rules for `vmap` and for a mesh."""
    blocks = dict(setup.blocks)[kind]
    function = getattr(setup.backend, kind if kind == "forward" else f"backward_{kind}")

    def kernel(operands: Operands, lists: TileLists, *saved: Saved) -> tuple[jax.Array, ...]:
        out = function(setup.problem, operands, lists, blocks, *saved)
        out = out if isinstance(out, tuple) else (out,)
        return tuple(x for x in out if x is not None)

    # an interpreter with parameters calls back into Python, which no partitioner can split
    splits = setup.problem.interpret in (True, False)
    return batched(kernel, results, of_bias=of_bias, splits=splits)


def _gradients(
    setup: KernelSetup, operands: Operands, lists: KernelLists, rows: Saved
) -> Gradients:
    """Run the backward kernels and sum what they leave to sum."""
    sinks, bias = operands.sinks, operands.bias
    learns = learns_slopes(setup.problem, operands)
    per_row = (ROWS,) if learns else ()  # of dslopes; per key in the single-pass backward
    if setup.problem.nondeterministic:
        single_pass = _kernel(setup, "single_pass", (QUERIES, KEYS, KEYS, *per_row))
        dq, dk, dv, *slope_rows = single_pass(operands, lists.by_key, rows)
    else:
        dq, *slope_rows = _kernel(setup, "dq", (QUERIES, *per_row))(operands, lists.dq, rows)
        dk, dv = _kernel(setup, "dkdv", (KEYS, KEYS))(operands, lists.by_key, rows)
    dbias = dslopes = dsinks = None
    if bias is not None:
        (dbias,) = _kernel(setup, "bias", (TILES,), of_bias=True)(operands, lists.bias, rows)
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


def _once(condition: jax.Array, repeat: Callable[[Results], Results], results: Results) -> Results:
    """Return `repeat(results)` where the condition holds, else the results as they stand.

    A loop of one step or none, because a conditional would copy them.
    """
    step = lambda state: (jnp.zeros_like(state[0]), repeat(state[1]))  # noqa: E731
    return lax.while_loop(lambda state: state[0], step, (condition, results))[1]


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
    setup: KernelSetup, operands: Operands, lists: TileLists
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
    setup = setup.change(detect_nonfinite=False)
    equal = setup.change(softcap=None, dropout_rate=0.0)
    seen = _kernel(equal, "forward", results)(indicator, lists)[0]
    poison = (seen.max(axis=-1) > 0) | bad_query
    poisoned = clean._replace(query=jnp.where(poison[..., None], jnp.nan, clean.query))
    return _kernel(setup, "forward", results)(poisoned, lists)
