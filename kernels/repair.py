"""Keep the rule on what is not finite around kernels that only notice it.

In a tile that a mask cuts, a zero weight times NaN would reach queries that do not see it, and a
softcap makes infinity finite. A kernel that has no way around that marks the rows in which it met
something that is not finite: their log l is NaN. Where there is such a row, the call runs once
more, on inputs whose nonfinite rows are zero, with NaN put exactly where it was seen.

Every device decides for its own part of a call, and while all is finite nothing is read twice. The
decision is a loop of one step or none on the device, for which the host waits on a GPU. The
kernels of `ampere` rely on it, and Hopper's under jax 0.10; the others keep the rule themselves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.kernels.contract import Blocks, Operands, Problem, Saved, TileLists, once

Kernel = Callable[..., Any]  # of problem, operands, lists, blocks[, saved]


def repaired_forward(kernel: Kernel) -> Kernel:
    """Return a forward kernel with NaN in exactly the rows that see what is not finite.

    Its fourth result, bool[B, N], says of which heads something was not finite, seen or not; it is
    for the backward kernels.
    """

    @functools.wraps(kernel)
    def call(
        problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
    ) -> tuple[jax.Array, ...]:
        results = kernel(problem, operands, lists, blocks)
        if not problem.detect_nonfinite:
            return *results, jnp.zeros(results[2].shape[:2], bool)
        nonfinite = jnp.isnan(results[2]).any(axis=2)

        def again(_: Any) -> tuple[jax.Array, ...]:
            return _forward_again(kernel, problem, operands, lists, blocks)

        return *once(nonfinite.any(), again, results), nonfinite

    return call


def repaired_backward(kernel: Kernel) -> Kernel:
    """Return a backward kernel that is right of inputs that are not finite, too."""

    @functools.wraps(kernel)
    def call(
        problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Saved
    ) -> Any:
        results = kernel(problem, operands, lists, blocks, saved)
        if not problem.detect_nonfinite:
            return results
        assert saved.nonfinite is not None
        nonfinite = saved.nonfinite.any() | jnp.isnan(saved.D).any()

        def again(_: Any) -> Any:
            lost = jnp.moveaxis(jnp.isposinf(saved.row_max), 1, 2)[..., None]
            clean = saved._replace(do=jnp.where(lost, 0, saved.do))
            return kernel(problem, _without_nonfinite(operands)[0], lists, blocks, clean)

        return once(nonfinite, again, results)

    return call


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


def _forward_again(
    kernel: Kernel, problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, ...]:
    """Run the forward pass with NaN in exactly the queries that see a nonfinite row, or are one.

    Which queries see a bad key is one more attention: equal scores, over values that are 1 for bad
    keys. Then a query of NaN makes its own row NaN, and nothing where it is fully masked.
    """
    clean, bad_query, bad_key = _without_nonfinite(operands)
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
    seen = kernel(equal, indicator, lists, blocks)[0]
    sees_nonfinite = (seen.max(axis=-1) > 0) | bad_query
    marked = clean._replace(query=jnp.where(sees_nonfinite[..., None], jnp.nan, clean.query))
    found: tuple[jax.Array, ...] = kernel(problem, marked, lists, blocks)
    return found
