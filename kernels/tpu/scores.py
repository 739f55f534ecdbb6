"""Scores of a tile and their gradients, in the layout [keys, queries]."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.contract import Problem
from transformer_jax.kernels.dropout import keep
from transformer_jax.kernels.tpu.grid import GridStep, column
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
    """Return the factor for scores, which is log2(e) without a bias and slopes, or else 1."""
    # with log2(e), an exponential is one instruction, and the factor is part of the scale. A bias
    # would need another product, which would convert the lowest finite number to -inf, which means
    # masked
    return math.log2(math.e) if x.bias is None and x.slopes is None else 1.0


def power(x: TileInputs, s: jax.Array) -> jax.Array:
    """Return the exponential of scores, or of score differences, in their unit."""
    return jnp.exp(s) if unit(x) == 1 else jnp.exp2(s)


def scores(
    problem: Problem, x: TileInputs, step: GridStep, masked: bool
) -> tuple[jax.Array, jax.Array | None]:  # [block_k, block_q]
    """Return s times `unit`, and the tanh in the softcap."""
    raw = dot(x.key[...], x.query[...], 1, 1)
    if problem.softcap is None:
        s, tanh = raw * (problem.scale * unit(x)), None
    else:
        tanh = jnp.tanh(raw * (problem.scale / problem.softcap))
        s = tanh * (problem.softcap * unit(x))
    if x.bias is not None:
        s = s + step.by_key(x.bias[...].astype(jnp.float32))
    if x.slopes is not None:
        s = s - step.scalar(x.slopes) * distances(x)
    if masked:
        assert problem.visible is not None
        queries = tuple(vector[...] for vector in x.q_vectors)
        keys = tuple(column(vector[...]) for vector in x.k_vectors)
        if x.pairs is not None:
            keys += (x.pairs[...].astype(jnp.int32),)
        s = jnp.where(problem.visible(queries, keys), s, -jnp.inf)
    return s, tanh


def score_gradients(
    problem: Problem, x: TileInputs, step: GridStep, masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [block_k, block_q]
    """Return p after dropout, ds and du."""
    s, tanh = scores(problem, x, step, masked)
    # subtract m and log l separately, because their sum has no bits left for log l if scores are
    # large
    p = power(x, s - x.row_max[...] * unit(x) - x.log_sum[...] * unit(x))
    dp = dropped(problem, dot(x.value[...], x.do[...], 1, 1), x, step)
    ds = p * (dp - x.D[...])
    du = ds if tanh is None else ds * (1 - tanh * tanh)
    # the products of hidden pairs may have overflowed
    if masked:
        ds, du = (jnp.where(s > -jnp.inf, x, 0.0) for x in (ds, du))
    return dropped(problem, p, x, step), ds, du


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
