"""Attention in O(T + S) memory in plain JAX: softmax online over tiles, and a backward pass that
computes every tile again.

After FlashAttention-2 (Dao 2023, algorithms 1 and 2). With scores s_ij of one head, a tile of keys
is folded into the running maximum m, sum l and output a of each query i:

    m' = max(m, max_j s_ij)      p_ij = exp(s_ij - m')      r = exp(m - m')
    l' = r l + sum_j p_ij        a' = r a + sum_j p_ij v_j
    out = a / l                  lse = m + log l

and backward, where D_i = do_i . out_i - dlse_i and again tile by tile:

    p_ij = exp(s_ij - lse_i)     ds_ij = p_ij (do_i . v_j - D_i)
    dv_j = sum_i p_ij do_i       dk_j = sum_i ds_ij q_i       dq_i = sum_j ds_ij k_j

Tiles are held as [queries, keys]. Then the products onto queries are of row-major matrices, and
those onto keys multiply from the left with transposes that are made once for a tile of queries; the
other way round, a CPU is two to three times slower at one of the two. The query heads that share a
key head lie side by side along the queries, so keys are never repeated. Only tiles that the mask's
plan does not skip are visited, and only partial ones evaluate the mask.

Of the rule in `reference` on what is not finite, nothing is computed while all is finite: one row
and one column of the products of a tile, and one row of its output, tell. If they do, the forward
pass begins again with care, and the backward pass takes the same care: rows that are not finite
are read as zeros, and the maximum of a query that sees one is set to inf, which breaks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transformer_jax.blockwise_bias import (
    bias_add,
    bias_gradient,
    bias_sums,
    bias_tile,
    bias_zeros,
    no_gradient,
)
from transformer_jax.blockwise_parts import (
    BACKWARD,
    FORWARD,
    Inputs,
    Saved,
    bias_roles,
    by_compiler,
    by_types,
)
from transformer_jax.blockwise_tiles import (
    Fixed,
    Place,
    Sizes,
    Visits,
    dropout_factor,
    join_keys,
    pad,
    sink_rows,
    unravel,
    visible_at,
    visits_of,
)
from transformer_jax.dropout import head_words, key_words
from transformer_jax.masks import Everything, Mask, close
from transformer_jax.meshes import vary

LOWEST = float(np.finfo(np.float32).min)  # where a running maximum starts: finite, so no inf - inf


def blockwise_attention(
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    value: jax.Array,  # [B, S, K, Hv]
    *,
    mask: Mask | None = None,
    bias: Any = None,  # array that broadcasts to [B, N, T, S], or a value with `materialize`
    scale: float | jax.Array | None = None,  # 1 / sqrt(H)
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    q_positions: jax.Array | None = None,  # i32[T] or [B, T]
    k_positions: jax.Array | None = None,  # i32[S] or [B, S]; negative: an empty slot
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, Hv] in query's dtype, f32[B, T, N]
    """softmax(softcap tanh(scale q k / softcap) + bias) v, and the log of its denominator.

    A query that sees no key gets zeros, lse -inf and no gradient. A key or value that a query does
    not see does not reach it, NaN or not; one that is not finite makes every query that sees it
    NaN, and such a query passes no gradient on. Differentiable in query, key, value, bias, sinks
    and scale. Arguments are taken as checked.
    """
    if 0 in (*query.shape[:3], key.shape[1]):
        out = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
        return out, jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
    dtype = query.dtype
    if isinstance(scale, jax.Array):
        query, scale = _scaled(query, scale), 1.0
    options = Options(
        scale=1 / math.sqrt(query.shape[3]) if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        dropout_rate=float(dropout_rate) if dropout_key is not None else 0.0,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
    )
    fixed = Fixed(
        Everything() if mask is None else close(mask),
        None if q_positions is None else jnp.atleast_2d(q_positions),
        None if k_positions is None else jnp.atleast_2d(k_positions),
        None if not options.dropout_rate else _dropout_words(dropout_key, query),
    )
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    out, lse = by_types(partial(_of_part, options), Inputs(query, key, value, bias, sinks, fixed))
    return out.astype(dtype), lse


def _of_part(options: Options, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    sinks = None if inputs.sinks is None else inputs.sinks[None]
    return _attend(options, *vary(inputs._replace(sinks=sinks)))


def _dropout_words(key: Any, query: jax.Array) -> jax.Array:  # u32[2, B, N]
    return jnp.stack(head_words(key_words(key), query.shape[0], query.shape[2]))


def _scaled(query: jax.Array, scale: jax.Array) -> jax.Array:  # f32[B, T, N, H]
    """The query times an array, unrounded; a row that is not finite has no slope in `scale`."""
    wide = query.astype(jnp.float32)
    finite = jnp.isfinite(wide).all(axis=-1, keepdims=True)
    return jnp.where(finite, jnp.where(finite, wide, 0) * scale.astype(jnp.float32), wide)


class Options(NamedTuple):
    """What is known when tracing."""

    scale: float
    softcap: float | None
    dropout_rate: float
    precision: lax.Precision | None  # of products: an accelerator's float32 may be less


# Arithmetic of one tile


@jax.custom_jvp
def _exp(x: jax.Array) -> jax.Array:
    """e^x for x <= 0 within 2 ulp, exactly 0 at -inf, in half the time of XLA's on a CPU.

    2^y = 2^n 2^f with n the nearest integer: n + 1.5 * 2^23 holds n in its low bits, which are
    shifted into the exponent of a polynomial in f.
    """
    y = jnp.maximum(x * np.float32(1.4426950408889634), np.float32(-127))
    n = lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN)
    f = y - n
    power = jnp.full_like(f, _EXP2[0])
    for coefficient in _EXP2[1:]:
        power = power * f + coefficient
    exponent = lax.bitcast_convert_type(n + np.float32(1.5 * 2**23), jnp.int32) << 23
    bits = lax.bitcast_convert_type(power, jnp.int32) + exponent
    return lax.bitcast_convert_type(bits, jnp.float32)


# minimax in relative error on [-1/2, 1/2] with 2^0 = 1 exactly: 1.1e-7
_EXP2 = [np.float32(x) for x in (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0)]


@_exp.defjvp
def _exp_tangent(primals, tangents):
    """The backward pass of `_attend` is written by hand, but may itself be differentiated."""
    result = _exp(*primals)
    return result, result * tangents[0]


def _dot(
    x: jax.Array, y: jax.Array, axes: tuple[int, int], precision: lax.Precision | None = None
) -> jax.Array:
    """Of matrices led by lanes."""
    dims = (((axes[0],), (axes[1],)), ((0,), (0,)))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _scores(
    q: jax.Array,  # [lanes, G block_q, H], times the scale
    k: jax.Array,  # [lanes, block_k, H]
    options: Options,
    bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # [lanes, G block_q, block_k]
    """Products of queries and keys, scores, and tanh where capped."""
    x = s = _dot(q, k, (2, 2), options.precision)
    t = None
    if options.softcap is not None:
        t = jnp.tanh(s / options.softcap)
        s = options.softcap * t
    return x, s if bias is None else s + bias, t


# What is not finite


def _finite_rows(x: jax.Array) -> jax.Array:  # [lanes, rows, d] to bool[lanes, rows, 1]
    """By a product with a vector: faster on a CPU than a reduction."""
    weights = jnp.full((x.shape[0], x.shape[2], 1), 0.5 / max(x.shape[2], 1), jnp.float32)
    return jnp.isfinite(_dot(x, weights, (2, 1)))  # a sum that cannot overflow


def _clean_queries(q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries without rows that are not finite, and which are: bool[lanes, G block_q, 1]."""
    good = _finite_rows(q)
    return jnp.where(good, q, 0), good


def _clean_keys(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values without rows that are not finite, and which are: bool[lanes, block_k, 1]."""
    good = _finite_rows(k) & _finite_rows(v)
    return jnp.where(good, k, 0), jnp.where(good, v, 0), good


def _once(condition: jax.Array, change: Callable, x: Any) -> Any:
    """`change(x)` where the condition holds, else x as it stands: a loop of one step or none,
    because a conditional would copy it."""
    step = lambda state: (jnp.zeros_like(state[0]), change(state[1]))  # noqa: E731
    return lax.while_loop(lambda state: state[0], step, (condition, x))[1]


# Forward and backward


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, query, key, value, bias, sinks, fixed):
    return _attend_forward(options, query, key, value, bias, sinks, fixed)[0]


def _attend_forward(options, *inputs):
    inputs = Inputs(*inputs)
    out, high, log, careful = by_compiler(partial(_forward, options), FORWARD, inputs)
    return (out, high + log), (inputs, out, high, log, careful)


def _attend_backward(options, saved, cotangents):
    """A query that sees nothing, or something that is not finite, passes no gradient on."""
    inputs, out, high, log, careful = saved
    dout, dlse = cotangents
    dead = jnp.isneginf(high) | jnp.isnan(high) | jnp.isnan(out).any(axis=-1)
    dout = jnp.where(dead[..., None], 0, dout.astype(jnp.float32))
    D = jnp.where(dead, 0, (dout * out.astype(jnp.float32)).sum(axis=-1) - dlse)
    high, log = jnp.where(dead, jnp.inf, high), jnp.where(dead, 0, log)
    dsinks = None
    if inputs.sinks is not None:
        weights = jnp.exp(inputs.sinks[None] - high - log)
        dsinks = -(weights * D).sum(axis=(0, 1))[None]
    roles = *BACKWARD, *bias_roles(inputs.bias, of_gradient=True)
    rows = Saved(dout, D, high, log, careful)
    dq, dk, dv, *dbias = by_compiler(partial(_backward, options), roles, inputs, rows)
    return (
        *(dx.astype(x.dtype) for dx, x in zip((dq, dk, dv), inputs, strict=False)),
        bias_gradient(inputs.bias, dbias),
        dsinks,
        jax.tree.map(no_gradient, inputs.fixed),
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _visit(visits: Visits, at: Any, tile: Callable, state: Any) -> Any:
    """Folds the tiles that a query tile visits, full ones first, into the state."""
    order, full, seen = visits.row(*at)
    state = lax.fori_loop(np.int32(0), full, partial(tile, False, order), state)
    return lax.fori_loop(full, seen, partial(tile, True, order), state)


def _forward(options, inputs):
    """(out, m, log l, whether care was taken [B, N]), one query tile of one group after the other.

    Where a row sees nothing, m is -inf; where it is broken, all three are NaN.

    lse is m + log l, but where scores are large the sum has no bits left for log l, so the backward
    pass takes the two apart.
    """
    query, key, value, bias, sinks, fixed = inputs
    sizes = Sizes.of(query, key, fixed)
    visits = visits_of(sizes, fixed)
    q = pad(query, 1, sizes.grid[0] * sizes.block_q, 0)
    k, v = (pad(x, 1, sizes.grid[1] * sizes.block_k, 0) for x in (key, value))
    row = sizes.lanes, sizes.G * sizes.block_q, 1

    def tile(at, q_tile, careful, partly, visits, n, state):
        high, total, weighed, rows_fine, columns_fine = state
        place = Place(sizes, at, visits[n])
        visible = partial(visible_at, place, fixed) if partly else None

        def clean(tiles):
            k, v, high = tiles
            k, v, good = _clean_keys(k, v)
            bad = ~good.swapaxes(1, 2)
            seen = (bad if visible is None else bad & visible()).any(axis=2, keepdims=True)
            return k, v, jnp.where(seen, jnp.inf, high)

        k_tile, v_tile, high = _once(careful, clean, (place.keys(k), place.keys(v), high))
        x, s, _ = _scores(q_tile, k_tile, options, bias_tile(place, bias, fixed, jnp.inf))
        s = s if visible is None else jnp.where(visible(), s, -jnp.inf)
        new = jnp.maximum(high, s.max(axis=2, keepdims=True))
        p, r = _exp(s - new), _exp(high - new)
        total = total * r + p.sum(axis=2, keepdims=True)
        if options.dropout_rate:
            p = p * dropout_factor(place, options.dropout_rate, fixed)
        weighed = weighed * r + _dot(p, v_tile, (2, 1), options.precision)
        rows_fine = rows_fine & jnp.isfinite(x[:, :, :1])
        columns_fine = columns_fine & jnp.isfinite(x[:, :1])
        return new, total, weighed, rows_fine, columns_fine

    def query_tile(careful, n, state):
        *results, fine = state
        at = unravel(n, (*sizes.groups, sizes.grid[0]))
        place = Place(sizes, at, 0)
        q_tile = place.queries(q) * np.float32(options.scale)
        every = vary(jnp.ones(row, bool), q)
        clean = lambda tile: _clean_queries(tile[0])  # noqa: E731
        q_tile, good = _once(careful, clean, (q_tile, every))
        state = (
            jnp.full(row, LOWEST, jnp.float32),
            _zeros(row),
            _zeros((*row[:2], v.shape[3])),
            every,
            jnp.ones((sizes.lanes, 1, sizes.block_k), bool),
        )
        state = _visit(visits, at, partial(tile, at, q_tile, careful), vary(state, q))
        high, total, weighed, *tiles_fine = state
        for x in (*tiles_fine, jnp.isfinite(weighed[:, 0])):
            fine = fine & x.all()
        broken = jnp.isposinf(high) | jnp.isnan(total)
        blind = (total == 0) & ~broken
        broken = broken | ~(good | blind)
        if sinks is not None:
            high, total, weighed = _add_sink(sink_rows(place, sinks), high, total, weighed)
        total = jnp.where(blind, 1, total)
        high = jnp.where(blind, -jnp.inf, high)
        parts = weighed / total, high, jnp.log(total)
        marked = (jnp.where(broken, jnp.nan, x) for x in parts)
        return *map(place.put_queries, results, marked), fine

    def attempt(state):
        _, careful, results = state
        total = np.int32(math.prod((*sizes.groups, sizes.grid[0])))
        state = vary((*results, jnp.bool_(True)), q)
        *results, fine = lax.fori_loop(np.int32(0), total, partial(query_tile, careful), state)
        return ~(fine | careful), ~fine | careful, results

    results = [_zeros((*q.shape[:3], d)) for d in (v.shape[3], 1, 1)]
    state = jnp.bool_(True), jnp.bool_(False), results  # whether to begin, and with care
    _, careful, results = lax.while_loop(lambda state: state[0], attempt, vary(state, q))
    out, high, log = (x[:, : sizes.T] for x in results)
    careful = jnp.broadcast_to(careful, (sizes.B, sizes.N))  # so that it is split as all else
    return out.astype(query.dtype), high[..., 0], log[..., 0], careful


def _add_sink(sink, high, total, weighed):
    new = jnp.maximum(high, sink)
    r = jnp.exp(high - new)
    return new, total * r + jnp.exp(sink - new), weighed * r


def _zeros(shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def _backward(options, inputs, saved):
    """(dq, dk, dv, *dbias) in float32, in the order of `_forward`; all but dq are added up in
    place."""
    query, key, value, bias, _, fixed = inputs
    dout, D, high, log, careful = saved
    careful = careful.any()
    sizes = Sizes.of(query, key, fixed)
    visits = visits_of(sizes, fixed)
    dead = jnp.isposinf(high)

    length = sizes.grid[0] * sizes.block_q
    q, do = (pad(x, 1, length, 0) for x in (jnp.where(dead[..., None], 0, query), dout))
    D, log = (pad(x[..., None], 1, length, 0) for x in (D, log))
    high = pad(high[..., None], 1, length, jnp.inf)
    k, v = (pad(x, 1, sizes.grid[1] * sizes.block_k, 0) for x in (key, value))

    def tile(at, q, q_across, do, do_across, D, high, log, partly, visits, n, state):
        dq, dk, dv, dbias = state
        place = Place(sizes, at, visits[n])
        visible = partial(visible_at, place, fixed) if partly else None
        tiles = place.keys(k), place.keys(v)
        k_tile, v_tile = _once(careful, lambda tiles: _clean_keys(*tiles)[:2], tiles)
        _, s, t = _scores(q, k_tile, options, bias_tile(place, bias, fixed, -jnp.inf))
        s = s if visible is None else jnp.where(visible(), s, -jnp.inf)
        p = _exp(s - high - log)
        dp = _dot(do, v_tile, (2, 2), options.precision)
        kept = p
        if options.dropout_rate:
            factor = dropout_factor(place, options.dropout_rate, fixed)
            kept, dp = p * factor, dp * factor
        ds = p * (dp - D)
        if bias is not None:
            ds = ds if visible is None else jnp.where(visible(), ds, 0)
            dbias = bias_add(place, dbias, bias, fixed, ds)
        if t is not None:
            ds = ds * (1 - t * t)
        if visible is not None and (bias is None or t is not None):
            ds = jnp.where(visible(), ds, 0)
        dv = place.add_keys(dv, _dot(do_across, kept, (2, 1), options.precision))
        dk = place.add_keys(dk, _dot(q_across, ds, (2, 1), options.precision))
        return dq + _dot(ds, k_tile, (2, 1), options.precision), dk, dv, dbias

    def query_tile(n, results):
        dq, *sums = results
        at = unravel(n, (*sizes.groups, sizes.grid[0]))
        place = Place(sizes, at, 0)
        q_tile = place.queries(q) * np.float32(options.scale)
        do_tile = place.queries(do)
        rows = (place.queries(x) for x in (D, high, log))
        tiles = (y for x in (q_tile, do_tile) for y in (x, x.swapaxes(1, 2)))
        step = partial(tile, at, *tiles, *rows)
        dq_tile, *sums = _visit(visits, at, step, (jnp.zeros_like(q_tile), *sums))
        return place.put_queries(dq, dq_tile * np.float32(options.scale)), *sums

    keys = *sizes.groups, sizes.grid[1], sizes.lanes
    sums = (_zeros((*keys, x.shape[3], sizes.block_k)) for x in (k, v))  # adding is contiguous
    results = vary((_zeros(q.shape), *sums, bias_zeros(bias, sizes)), q)
    total = math.prod((*sizes.groups, sizes.grid[0]))
    dq, dk, dv, dbias = lax.fori_loop(np.int32(0), np.int32(total), query_tile, results)
    return (
        dq[:, : sizes.T],
        *(join_keys(dx, sizes) for dx in (dk, dv)),
        *bias_sums(bias, dbias),
    )
