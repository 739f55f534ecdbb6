"""Scores of a tile and their gradients, in the layout [keys, queries]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.contract import Problem
from transformer_jax.kernels.dropout import keep
from transformer_jax.kernels.score_function import ScoreProgram
from transformer_jax.kernels.tpu.grid import GridStep, by_key, column
from transformer_jax.kernels.tpu.inputs import TileInputs


def dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Multiply two arrays and sum over one axis of each, in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x,
        y,
        (((x_axis,), (y_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def unit(x: TileInputs) -> float:
    """Return the factor for scores: log2(e) without a bias, slopes and a function, or else 1."""
    # with log2(e), an exponential is one instruction, and the factor is part of the scale. A bias
    # would need another product, which would convert the lowest finite number to -inf, which means
    # masked
    natural = x.bias is not None or x.slopes is not None or x.score_values is not None
    return 1.0 if natural else math.log2(math.e)


def power(x: TileInputs, s: jax.Array) -> jax.Array:
    """Return the exponential of scores, or of score differences, in their unit."""
    return jnp.exp(s) if unit(x) == 1 else jnp.exp2(s)


def scores(
    problem: Problem, x: TileInputs, step: GridStep, masked: bool
) -> tuple[jax.Array, jax.Array | None]:  # [block_k, block_q]
    """Return s times `unit`, and the tanh in the softcap."""
    s, tanh = _before_function(problem, x, step)
    if problem.score is not None:
        s = _function(problem.score, x)(s, _values(x, step))
        # NaN and inf break the query: inf - inf is NaN
        s = jnp.where(s < jnp.inf, s, jnp.inf)
    return _masked(problem, x, s) if masked else s, tanh


def _before_function(
    problem: Problem, x: TileInputs, step: GridStep
) -> tuple[jax.Array, jax.Array | None]:
    raw = dot(x.key[...], x.query[...], 1, 1)
    if problem.softcap is None:
        s, tanh = raw * (problem.scale * unit(x)), None
    else:
        tanh = jnp.tanh(raw * (problem.scale / problem.softcap))
        s = tanh * (problem.softcap * unit(x))
    if x.bias is not None:
        s = s + by_key(step.kinds.bias, x.bias[...].astype(jnp.float32))
    if x.slopes is not None:
        s = s - step.scalar(x.slopes) * distances(x)
    return s, tanh


def _values(x: TileInputs, step: GridStep) -> list[jax.Array]:
    """Return the values that the function of a score reads."""
    return [
        by_key(kind, ref[...])
        for kind, ref in zip(step.kinds.score_values, x.score_values, strict=True)
    ]


def _function(
    function: ScoreProgram, x: TileInputs
) -> Callable[[jax.Array, Sequence[jax.Array]], jax.Array]:
    """Return the function of (scores, values) of a tile."""
    q_positions, k_positions = x.q_vectors[0][...], column(x.k_vectors[0][...])
    return lambda s, values: function(s, q_positions, k_positions, values)


def _masked(problem: Problem, x: TileInputs, s: jax.Array) -> jax.Array:
    """Return the scores, with -inf for hidden pairs."""
    assert problem.visible is not None
    queries = tuple(vector[...] for vector in x.q_vectors)
    keys = tuple(column(vector[...]) for vector in x.k_vectors)
    if x.pairs is not None:
        keys += (x.pairs[...].astype(jnp.int32),)
    return jnp.where(problem.visible(queries, keys), s, -jnp.inf)


class ScoreGradients(NamedTuple):
    """Gradients of a tile, [block_k, block_q] each."""

    p: jax.Array  # after dropout
    ds: jax.Array  # before the function of a score
    du: jax.Array
    values: list[jax.Array]  # of the floating-point values of the function


def score_gradients(
    problem: Problem, x: TileInputs, step: GridStep, masked: bool
) -> ScoreGradients:
    """Return p and the gradients of a tile."""
    s, tanh = _before_function(problem, x, step)
    if problem.score is not None:
        modify = _function(problem.score, x)
        values = [jnp.broadcast_to(value, s.shape) for value in _values(x, step)]
        s, pull_back = jax.vjp(modify, s, values)
        # a broken query passes no gradient
        s = jnp.where(s < jnp.inf, s, -jnp.inf)
    s = _masked(problem, x, s) if masked else s
    # subtract m and log l separately, because their sum has no bits left for log l if scores are
    # large
    p = power(x, s - x.row_max[...] * unit(x) - x.log_sum[...] * unit(x))
    dp = dropped(problem, dot(x.value[...], x.do[...], 1, 1), x, step)
    ds = p * (dp - x.D[...])
    # the products of hidden pairs may have overflowed, and their derivatives may be NaN
    seen = lambda ds: jnp.where(s > -jnp.inf, ds, 0.0)  # noqa: E731
    dvalues = list[jax.Array]()
    if problem.score is not None:
        given = seen(ds)
        ds, found = pull_back(given)
        # padded queries have scores of 0, where the function's derivative may be infinite
        passed = lambda x: jnp.where(given != 0, x, 0.0)  # noqa: E731
        ds, *dvalues = map(passed, (ds, *(x for x in found if x.dtype == jnp.float32)))
    du = ds if tanh is None else ds * (1 - tanh * tanh)
    if masked:
        ds, du = seen(ds), seen(du)
    return ScoreGradients(dropped(problem, p, x, step), ds, du, dvalues)


def dropped(problem: Problem, p: jax.Array, x: TileInputs, step: GridStep) -> jax.Array:
    """Return p f, which is the result of dropout on a tile [block_k, block_q]."""
    if x.dropout is None or not problem.dropout_rate:
        return p
    block_k, block_q = p.shape
    a, b = (step.scalar(words) for words in x.dropout)
    q_index = step.i + lax.broadcasted_iota(jnp.int32, (1, block_q), 1)
    k_index = step.j + lax.broadcasted_iota(jnp.int32, (block_k, 1), 0)
    stays = keep(a, b, q_index.astype(jnp.uint32), k_index.astype(jnp.uint32), problem.dropout_rate)
    return jnp.where(stays, p * (1 / (1 - problem.dropout_rate)), 0.0)


def distances(x: TileInputs) -> jax.Array:  # f32[block_k, block_q]
    """Return the distance |q position - k position|."""
    return jnp.abs(x.q_vectors[0][...] - column(x.k_vectors[0][...])).astype(jnp.float32)
