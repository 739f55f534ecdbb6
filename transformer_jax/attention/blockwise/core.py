"""Blockwise attention in plain JAX, with O(T + S) memory in the forward and backward passes.

The softmax is computed online over tiles, and the backward pass recomputes every tile, as in
FlashAttention-2 (Dao 2023, algorithms 1 and 2). With the scores s_ij of one head, a tile of keys
updates the running maximum m, sum l and output a of each query i:

    m' = max(m, max_j s_ij)      p_ij = exp(s_ij - m')      r = exp(m - m')
    l' = r l + sum_j p_ij        a' = r a + sum_j p_ij v_j
    out = a / l                  lse = m + log l

With D_i = do_i . out_i - dlse_i, the backward pass computes for each tile:

    p_ij = exp(s_ij - lse_i)     ds_ij = p_ij (do_i . v_j - D_i)
    dv_j = sum_i p_ij do_i       dk_j = sum_i ds_ij q_i       dq_i = sum_j ds_ij k_j

Tiles are stored as [queries, keys]. The products for queries multiply row-major matrices. The
products for keys multiply from the left by transposes that are computed once per query tile.
Otherwise, one of the two would be two to three times slower on a CPU. The query heads that share a
key head are concatenated along the query axis, so keys are never repeated. Tiles that the mask's
plan skips are not visited, and the mask is evaluated only in partial tiles.

NaN and inf are handled as in `reference`, at almost no cost if all values are finite: it is enough
to check one row and one column of the products of a tile, and one row of its output. If any of them
is not finite, the forward pass is repeated as a repair pass, and the backward pass also runs as a
repair pass. A repair pass replaces nonfinite rows by zeros. If a query sees such a row, its running
maximum is set to inf, which makes its result NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transformer_jax.attention.arguments import AttentionCall, Implementation, Rows, bias_shape
from transformer_jax.attention.biases import ALiBi, Bias, RelativeBias
from transformer_jax.attention.block_plan import TileLists, pad
from transformer_jax.attention.blockwise.bias import (
    PartOfBias,
    Sum,
    bias_add,
    bias_axes,
    bias_gradient,
    bias_sums,
    bias_tile,
    bias_zeros,
    floating_leaves,
    score_axes,
    score_tile,
)
from transformer_jax.attention.blockwise.tiles import (
    Place,
    Sizes,
    dropout_factor,
    join_keys,
    sink_rows,
    unravel,
    visible_at,
    visited_tiles,
)
from transformer_jax.attention.reference import Xla
from transformer_jax.kernels.contract import LOWEST, Index
from transformer_jax.kernels.derivatives import Passes, differentiable
from transformer_jax.kernels.sharding import (
    HEADS,
    KEYS,
    QUERIES,
    AxisNames,
    First,
    Function,
    Parts,
    by_types,
    over_devices,
)
from transformer_jax.sharding import split, vary
from transformer_jax.values import short_repr

Tree = TypeVar("Tree")

QUERY_ROWS: AxisNames = ("b", None, "n")
# axes of the results of each pass
FORWARD = QUERIES, QUERY_ROWS, QUERY_ROWS, HEADS  # out, row_max, log_sum, repaired
BACKWARD = QUERIES, KEYS, KEYS  # followed by the gradient of the bias, with `bias_axes`


@short_repr
class SavedRows(NamedTuple):
    """Results of the forward pass and cotangents that the backward pass reads."""

    do: jax.Array  # f32[B, T, N, Hv]
    D: jax.Array  # f32[B, T, N]
    row_max: jax.Array  # f32[B, T, N], +inf in rows without a gradient
    log_sum: jax.Array  # f32[B, T, N]
    repaired: jax.Array  # bool[B, N], whether the forward pass was repeated as a repair pass


class Blockwise(Implementation):
    """Tile-by-tile attention in plain JAX, with O(T + S) memory, even for the gradient.

    Forward mode and second derivatives materialize all scores, as "xla" does.
    """

    def refuse(self, call: AttentionCall) -> str | None:
        """Reject float64, and a bias and positions that both differ between batch rows."""
        if call.query.dtype == np.float64:
            return "computes in float32, but the inputs are float64"
        places = call.q_positions, call.k_positions
        if isinstance(call.bias, Bias) and any(_differs_by_row(x, 2) for x in places):
            # a tile evaluates the bias at the positions of some rows, so the bias cannot know which
            # rows of its arrays to use
            _, T, _, S = call.sizes
            one_row = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (T, S))
            if _differs_by_row(bias_shape(call.bias, *one_row), 4):
                return "only one of bias and positions may differ between batch rows"
        return None

    reads_rows = reads_score_mod = True

    def refuse_part(self, call: AttentionCall) -> str | None:
        return None

    def rows(self, call: AttentionCall) -> Rows:
        out, row_max, log_sum, _ = _forward(_prepared(call))
        return Rows(out, row_max, log_sum)

    def attend(self, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        """Return the output [B, T, N, Hv] in the query's dtype, and lse f32[B, T, N].

        This method is differentiable with respect to query, key, value, bias, sinks and scale.
        """
        query, key, value = call.query, call.key, call.value
        if 0 in (*query.shape[:3], key.shape[1]):
            out = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
            return out, jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
        inner = _prepared(call)
        parts = parts_of_types(inner)
        if parts is None:
            out, lse = _attend_part(inner)
        else:
            names, leaves = _axis_names(inner), jax.tree.leaves(inner)
            shapes, wanted = (query.shape, query.shape[:3]), split(query, slice(3))
            function = _of_leaves(_attend_part, inner)
            out, lse = by_types(
                function, leaves, names, shapes, (QUERIES, QUERY_ROWS), parts, wanted
            )
        return out.astype(call.query.dtype), lse


def _prepared(call: AttentionCall) -> AttentionCall:
    """Return the call with a known scale, and with words instead of a dropout key."""
    query, scale = call.query, call.scale
    if call.scale_array is not None:
        query, scale = scaled(query, call.scale_array), 1.0
    elif scale is None:
        scale = 1 / math.sqrt(query.shape[3])
    words = call.head_words()
    # `api._run` has already closed the mask, so the loops read no traced values except arguments
    return dataclasses.replace(
        call,
        query=query,
        sinks=None if call.sinks is None else call.sinks.astype(jnp.float32),
        scale=scale,
        scale_array=None,
        dropout_rate=call.dropout_rate if words is not None else 0.0,
        dropout_words=words,
        dropout_key=None,
    )


# Devices


def parts_of_types(call: AttentionCall) -> Parts | None:
    """Return the sharding of rows and heads that types specify on an explicit mesh, or None.

    The result is also None if the mesh has other axes, or if the call contains user code, whose
    loops may not work inside a `shard_map`.
    """
    query, bias = call.query, call.bias
    mesh = jax.typeof(query).sharding.mesh
    if mesh.empty or len(mesh.explicit_axes) < len(mesh.axis_names):
        return None
    ours = jax.Array, ALiBi, RelativeBias
    if 0 in (*query.shape, *call.key.shape) or not (bias is None or isinstance(bias, ours)):
        return None
    if call.score_mod is not None or (call.mask is not None and call.mask.calls_user_code):
        return None
    parts = Parts.of(mesh, [split(query)], [QUERIES], _full(call))
    return parts if parts.axes["b"] or parts.axes["n"] else None


def _by_compiler(
    function: Callable[..., Sequence[jax.Array]],
    results: Sequence[AxisNames],
    call: AttentionCall,
    *saved: SavedRows,
) -> tuple[jax.Array, ...]:
    """Return `function(call, *saved)` as one operation that the compiler can shard.

    On a single device or inside a user's `shard_map`, the function is called directly.
    """
    in_shard_map = jax.sharding.get_abstract_mesh().manual_axes
    if jax.device_count() == 1 or in_shard_map:
        return tuple(function(call, *saved))
    # make the positions arguments; otherwise, they and a plan made from them would become constants
    at = call.positions()
    call = dataclasses.replace(call, q_positions=at[0], k_positions=at[1])
    split_up = _of_leaves(function, call, *saved)
    names = _axis_names(call, *saved)
    return over_devices(split_up, names, results, _full(call))(*jax.tree.leaves((call, *saved)))


def _of_leaves(
    function: Callable[..., Sequence[jax.Array]], call: AttentionCall, *saved: SavedRows
) -> Function:
    """Convert `function` to a function of the first row and head of a part, and of its leaves."""
    structure, (B, _, N, _) = jax.tree.structure((call, *saved)), call.query.shape

    def of_part(first: First, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        call, *saved = jax.tree.unflatten(structure, leaves)
        rows, _, heads, _ = call.query.shape
        size = rows, heads
        if size != (B, N):
            mask, bias = call.mask, call.bias
            if mask is not None:
                mask = mask.part(first, (B, N), size)
            if isinstance(bias, Bias):
                bias = PartOfBias(bias, first[0], first[1], (B, N), size)
            call = dataclasses.replace(call, mask=mask, bias=bias)
        return tuple(function(call, *saved))

    return of_part


def _full(call: AttentionCall) -> dict[str, int]:
    return dict(b=call.query.shape[0], n=call.query.shape[2], k=call.key.shape[2])


def _axis_names(call: AttentionCall, *saved: SavedRows) -> list[AxisNames]:
    """Return the axis names of the leaves of a call and of saved rows, in order."""
    names = [QUERIES, KEYS, KEYS]
    names += [] if call.mask is None else call.mask.leaf_axes
    names += bias_axes(call.bias) + score_axes(call.score_mod)
    names += [] if call.sinks is None else [HEADS[-call.sinks.ndim :]]
    at = (x for x in (call.q_positions, call.k_positions) if x is not None)
    names += [("b", None)[-x.ndim :] for x in at]
    names += [] if call.dropout_words is None else [(None, "b", "n")]
    return names + [QUERIES, QUERY_ROWS, QUERY_ROWS, QUERY_ROWS, HEADS] * len(saved)


def _differs_by_row(x: jax.Array | jax.ShapeDtypeStruct | None, ndim: int) -> bool:
    """Whether x has `ndim` axes and more than one batch row."""
    return x is not None and x.ndim == ndim and x.shape[0] > 1


def scaled(query: jax.Array, scale: jax.Array) -> jax.Array:  # f32[B, T, N, H]
    """Multiply the query by a scale [] or [N] in float32. Nonfinite rows have no gradient."""
    wide = query.astype(jnp.float32)
    finite = jnp.isfinite(wide).all(axis=-1, keepdims=True)
    by_head = scale.astype(jnp.float32).reshape(1, 1, -1, 1)  # [1, 1, N or 1, 1]
    return jnp.where(finite, jnp.where(finite, wide, 0) * by_head, wide)


zeros = partial(jnp.zeros, dtype=jnp.float32)


# Arithmetic of one tile


def _exp(x: jax.Array) -> jax.Array:
    """Return e^x for x <= 0 within 2 ulp, and 0 at -inf.

    On a CPU, this takes half as long as XLA's `exp`.
    """
    # 2^y = 2^n 2^f, where n is the nearest integer; below -127, the biased exponent would be
    # negative
    y = jnp.maximum(x * np.float32(1.4426950408889634), np.float32(-127))
    n = lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN)
    f = y - n
    power = jnp.full_like(f, _EXP2[0])
    for coefficient in _EXP2[1:]:
        power = power * f + coefficient
    # the low bits of n + 1.5 * 2^23 equal n; shift them into the exponent of the polynomial
    exponent = lax.bitcast_convert_type(n + np.float32(1.5 * 2**23), jnp.int32) << 23
    bits = lax.bitcast_convert_type(power, jnp.int32) + exponent
    return lax.bitcast_convert_type(bits, jnp.float32)


# minimax polynomial on [-1/2, 1/2] with 2^0 = 1 exactly and a relative error of 1.1e-7
_EXP2 = [np.float32(x) for x in (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0)]


def _dot(
    x: jax.Array, y: jax.Array, axes: tuple[int, int], call: AttentionCall | None = None
) -> jax.Array:
    """Multiply two batches of matrices, one pair for each member of a head group."""
    # tiles are always float32; if the inputs are also float32, do not let an accelerator round them
    exact = call is not None and call.key.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else None
    dims = (((axes[0],), (axes[1],)), ((0,), (0,)))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _scores(
    q: jax.Array,  # [group, G block_q, H], times the scale
    k: jax.Array,  # [group, block_k, H]
    call: AttentionCall,
    bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # [group, G block_q, block_k]
    """Return the products of queries and keys, the scores, and the tanh of the softcap or None."""
    x = s = _dot(q, k, (2, 2), call)
    t = None
    if call.softcap is not None:
        t = jnp.tanh(s / call.softcap)
        s = call.softcap * t
    return x, s if bias is None else s + bias, t


# NaN and inf


def once(condition: jax.Array, change: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Return `change(tree)` if the condition is True, else return the tree unchanged."""
    # a loop of at most one step, because `lax.cond` would copy the tree
    step = lambda state: (jnp.zeros_like(state[0]), change(state[1]))  # noqa: E731
    return lax.while_loop(lambda state: state[0], step, (condition, tree))[1]


def _finite_rows(x: jax.Array) -> jax.Array:  # [group, rows, d] to bool[group, rows, 1]
    # on a CPU, a product with a vector is faster than a reduction, and this sum cannot overflow
    weights = jnp.full((x.shape[0], x.shape[2], 1), 0.5 / max(x.shape[2], 1), jnp.float32)
    return jnp.isfinite(_dot(x, weights, (2, 1)))


def _clean_keys(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys and values with nonfinite rows set to zero, and a mask of the finite rows."""
    good = _finite_rows(k) & _finite_rows(v)  # bool[group, block_k, 1]
    return jnp.where(good, k, 0), jnp.where(good, v, 0), good


# The gradient


def _attend_part(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
    """Compute attention for the rows and heads of this device, with custom derivatives."""

    def forward(
        call: AttentionCall,
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        if call.rows is not None:
            out, row_max, log_sum = call.rows
            finite = [jnp.isfinite(x).all() for x in (call.query, call.key, call.value)]
            repaired = jnp.full((out.shape[0], out.shape[2]), ~(finite[0] & finite[1] & finite[2]))
        else:
            out, row_max, log_sum, repaired = _by_compiler(_forward, FORWARD, call)
        # save the output in float32, because D must not be computed from a rounded output
        saved = out, row_max, log_sum, repaired
        return (out.astype(call.query.dtype), row_max + log_sum), saved

    def plain(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        """Compute attention from all scores, in O(T S) memory, so that JAX can differentiate it."""
        q, k, v = (x.astype(jnp.float32) for x in (call.query, call.key, call.value))
        sinks = None if call.sinks is None else call.sinks[0]
        wide = dataclasses.replace(call, query=q, key=k, value=v, sinks=sinks)
        out, lse = Xla().attend(wide)
        return out.astype(call.query.dtype), lse

    def backward(
        call: AttentionCall,
        saved: tuple[jax.Array, ...],
        cotangents: tuple[jax.Array, ...],
        wanted: AttentionCall,
    ) -> AttentionCall:
        """Return the gradients, which are 0 for fully masked and broken queries."""
        out, row_max, log_sum, repaired = saved
        dout, dlse = cotangents
        dead = jnp.isneginf(row_max) | jnp.isnan(row_max) | jnp.isnan(out).any(axis=-1)
        dout = jnp.where(dead[..., None], 0, dout.astype(jnp.float32))
        D = jnp.where(dead, 0, (dout * out).sum(axis=-1) - dlse)
        row_max, log_sum = jnp.where(dead, jnp.inf, row_max), jnp.where(dead, 0, log_sum)
        zeros_of, dsinks = jax.tree.map(jnp.zeros_like, call), None
        call = dataclasses.replace(call, rows=None)
        if call.sinks is not None:
            weights = jnp.exp(call.sinks[None] - row_max - log_sum)
            dsinks = -(weights * D).sum(axis=(0, 1))[None]
        of_bias = bias_axes(call.bias, of_gradient=True)
        names = *BACKWARD, *of_bias, *score_axes(call.score_mod, of_gradient=True)
        rows = SavedRows(dout, D, row_max, log_sum, repaired)
        dq, dk, dv, *others = _by_compiler(_backward, names, call, rows)
        return dataclasses.replace(
            zeros_of,  # the arrays of a mask have no gradient
            query=dq.astype(call.query.dtype),
            key=dk.astype(call.key.dtype),
            value=dv.astype(call.value.dtype),
            bias=bias_gradient(zeros_of.bias, others[: len(of_bias)]),
            score_mod=bias_gradient(zeros_of.score_mod, others[len(of_bias) :]),
            sinks=dsinks,
        )

    sinks = None if call.sinks is None else call.sinks[None]
    call = vary(dataclasses.replace(call, sinks=sinks))
    passes = Passes(forward, backward, plain)
    out, lse = differentiable(lambda call: forward(call)[0], passes, call)
    return out, lse


def _padded(sizes: Sizes, call: AttentionCall) -> AttentionCall:
    """Return the call with queries, keys and values padded to whole tiles."""
    queries, keys = sizes.grid[0] * sizes.block_q, sizes.grid[1] * sizes.block_k
    return dataclasses.replace(
        call,
        query=pad(call.query, 1, queries, 0),
        key=pad(call.key, 1, keys, 0),
        value=pad(call.value, 1, keys, 0),
    )


def _visit(
    lists: TileLists,
    at: tuple[Index, Index, Index],
    tile: Callable[[bool, jax.Array, jax.Array, Tree], Tree],
    state: Tree,
) -> Tree:
    """Update the state with each tile that a query tile visits, full tiles first."""
    b, c, i = (0 if n == 1 else x for n, x in zip(lists.full.shape, at, strict=True))
    order, full, seen = (x[b, c, i] for x in (lists.order, lists.full, lists.seen))
    state = lax.fori_loop(np.int32(0), full, partial(tile, False, order), state)
    return lax.fori_loop(full, seen, partial(tile, True, order), state)


# Forward


class _Rows(NamedTuple):
    """Running sums of a query tile, and masks that show whether all values so far were finite."""

    row_max: jax.Array  # [group, G block_q, 1]: m
    total: jax.Array  # [group, G block_q, 1]: l
    weighted: jax.Array  # [group, G block_q, Hv]: a
    rows_finite: jax.Array  # bool[group, G block_q, 1]
    columns_finite: jax.Array  # bool[group, 1, block_k]


def _forward(call: AttentionCall) -> tuple[jax.Array, ...]:
    """Return out, m, log l, and whether a repair pass was necessary, [B, N].

    The function loops over the query tiles of each head group. In a fully masked row, m is -inf. In
    a broken row, out, m and log l are NaN. The lse is m + log l. If the scores are large, rounding
    this sum loses log l, so the backward pass receives the two terms separately.
    """
    sizes = Sizes.of(call)
    lists, padded = visited_tiles(sizes, call), _padded(sizes, call)
    q = padded.query

    def attempt(
        state: tuple[jax.Array, jax.Array, list[jax.Array]],
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        _, repair, results = state
        step = partial(_forward_queries, sizes, lists, padded, repair)
        total = np.int32(math.prod((*sizes.groups, sizes.grid[0])))
        state = vary((*results, jnp.bool_(True)), q)
        *results, finite = lax.fori_loop(np.int32(0), total, step, state)
        return ~(finite | repair), ~finite | repair, results

    # make at most two attempts; the second one, a repair pass, runs only if a value was not finite
    results = [zeros((*q.shape[:3], d)) for d in (call.value.shape[3], 1, 1)]
    state = jnp.bool_(True), jnp.bool_(False), results  # whether to run, whether to repair
    _, repaired, results = lax.while_loop(lambda state: state[0], attempt, vary(state, q))
    out, row_max, log_sum = (x[:, : sizes.T] for x in results)
    # one value per row and head, so that it can be sharded like the other results
    repaired = jnp.broadcast_to(repaired, (sizes.B, sizes.N))
    return out, row_max[..., 0], log_sum[..., 0], repaired


def _forward_queries(
    sizes: Sizes,
    lists: TileLists,
    call: AttentionCall,
    repair: jax.Array,
    n: jax.Array,
    state: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Compute the n-th query tile and write its results."""
    *results, finite = state
    at = unravel(n, (*sizes.groups, sizes.grid[0]))
    place = Place(sizes, *at, 0)
    row = sizes.group, sizes.G * sizes.block_q, 1
    q_tile = place.queries(call.query) * np.float32(call.scale)
    every = vary(jnp.ones(row, bool), call.query)

    def clean(tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        good = _finite_rows(tile[0])
        return jnp.where(good, tile[0], 0), good

    q_tile, good = once(repair, clean, (q_tile, every))
    rows = _Rows(
        jnp.full(row, LOWEST, jnp.float32),
        zeros(row),
        zeros((*row[:2], call.value.shape[3])),
        every,
        jnp.ones((sizes.group, 1, sizes.block_k), bool),
    )
    tile = partial(_forward_tile, Place(sizes, *at, 0), call, repair, q_tile)
    row_max, total, weighted, *tiles_finite = _visit(lists, at, tile, vary(rows, call.query))
    for x in (*tiles_finite, jnp.isfinite(weighted[:, 0])):
        finite = finite & x.all()
    broken = jnp.isposinf(row_max) | jnp.isnan(total)
    fully_masked = (total == 0) & ~broken
    broken = broken | ~(good | fully_masked)
    if call.sinks is not None:
        sink = sink_rows(place, call.sinks)
        new = jnp.maximum(row_max, sink)
        r = jnp.exp(row_max - new)
        row_max, total, weighted = new, total * r + jnp.exp(sink - new), weighted * r
    total = jnp.where(fully_masked, 1, total)  # so that the output of such a row is 0 / 1
    row_max = jnp.where(fully_masked, -jnp.inf, row_max)
    parts = weighted / total, row_max, jnp.log(total)
    parts_or_nan = (jnp.where(broken, jnp.nan, x) for x in parts)
    return *map(place.put_queries, results, parts_or_nan), finite


def _forward_tile(
    place: Place,
    call: AttentionCall,
    repair: jax.Array,
    q_tile: jax.Array,
    partly: bool,
    order: jax.Array,
    n: jax.Array,
    rows: _Rows,
) -> _Rows:
    """Update the rows of a query tile with the n-th tile of its list."""
    place = place._replace(j=order[n])
    visible = partial(visible_at, place, call) if partly else None

    def clean(
        tiles: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        k, v, row_max = tiles
        k, v, good = _clean_keys(k, v)
        bad = ~good.swapaxes(1, 2)
        seen = (bad if visible is None else bad & visible()).any(axis=2, keepdims=True)
        return k, v, jnp.where(seen, jnp.inf, row_max)

    tiles = place.keys(call.key), place.keys(call.value), rows.row_max
    k_tile, v_tile, row_max = once(repair, clean, tiles)
    bias = None if call.bias is None else bias_tile(place, call.bias, call, jnp.inf)
    x, s, _ = _scores(q_tile, k_tile, call, bias)
    if call.score_mod is not None:
        s = score_tile(place, call, s, floating_leaves(call.score_mod), jnp.inf)
    s = s if visible is None else jnp.where(visible(), s, -jnp.inf)
    # `row_max` starts at the lowest finite number, so no difference is inf - inf
    new = jnp.maximum(row_max, s.max(axis=2, keepdims=True))
    p, r = _exp(s - new), _exp(row_max - new)
    total = rows.total * r + p.sum(axis=2, keepdims=True)
    if call.dropout_rate:
        p = p * dropout_factor(place, call)
    weighted = rows.weighted * r + _dot(p, v_tile, (2, 1), call)
    # one row and one column of the products show whether any query or key of the tile is not finite
    rows_finite = rows.rows_finite & jnp.isfinite(x[:, :, :1])
    columns_finite = rows.columns_finite & jnp.isfinite(x[:, :1])
    return _Rows(new, total, weighted, rows_finite, columns_finite)


# Backward


_Gradients = tuple[jax.Array, jax.Array, jax.Array, Sum, list[jax.Array]]
"""Accumulated gradients of the queries, keys, values, bias and arrays of `score_mod`."""


class _QueryTile(NamedTuple):
    """Values of a query tile that the backward pass reads, including two precomputed transposes."""

    q: jax.Array  # [group, G block_q, H], times the scale
    q_across: jax.Array  # [group, H, G block_q]
    do: jax.Array  # [group, G block_q, Hv]
    do_across: jax.Array  # [group, Hv, G block_q]
    D: jax.Array  # [group, G block_q, 1]
    row_max: jax.Array  # [group, G block_q, 1]
    log_sum: jax.Array  # [group, G block_q, 1]


def _backward(call: AttentionCall, saved: SavedRows) -> tuple[jax.Array, ...]:
    """Return (dq, dk, dv, *dbias, *dmod) in float32. All except dq are accumulated in place."""
    sizes = Sizes.of(call)
    lists, repair = visited_tiles(sizes, call), saved.repaired.any()
    # a query without a gradient may be NaN, and 0 * NaN = NaN would enter the sums of its keys
    dead = jnp.isposinf(saved.row_max)
    clean = dataclasses.replace(call, query=jnp.where(dead[..., None], 0, call.query))
    padded = _padded(sizes, clean)
    length = padded.query.shape[1]
    rows = saved._replace(
        do=pad(saved.do, 1, length, 0),
        D=pad(saved.D[..., None], 1, length, 0),
        row_max=pad(saved.row_max[..., None], 1, length, jnp.inf),
        log_sum=pad(saved.log_sum[..., None], 1, length, 0),
    )

    def queries(n: jax.Array, results: _Gradients) -> _Gradients:
        dq, dk, dv, dbias, dmod = results
        at = unravel(n, (*sizes.groups, sizes.grid[0]))
        place = Place(sizes, *at, 0)
        q = place.queries(padded.query) * np.float32(call.scale)
        do, D, row_max, log_sum = (place.queries(x) for x in rows[:4])
        across = q.swapaxes(1, 2), do.swapaxes(1, 2)
        tile = _QueryTile(q, across[0], do, across[1], D, row_max, log_sum)
        step = partial(_backward_tile, place, padded, repair, tile)
        state = jnp.zeros_like(q), dk, dv, dbias, dmod
        dq_tile, dk, dv, dbias, dmod = _visit(lists, at, step, state)
        dq = place.put_queries(dq, dq_tile * np.float32(call.scale))
        return dq, dk, dv, dbias, dmod

    keys = *sizes.groups, sizes.grid[1], sizes.group
    widths = (x.shape[3] for x in (call.key, call.value))
    # with this order of axes, the accumulated parts are contiguous
    sums = (zeros((*keys, width, sizes.block_k)) for width in widths)
    read = [] if call.score_mod is None else floating_leaves(call.score_mod)
    dmod = [zeros(jnp.shape(x)) for x in read]
    results = zeros(padded.query.shape), *sums, bias_zeros(call.bias, sizes), dmod
    results = vary(results, padded.query)
    total = math.prod((*sizes.groups, sizes.grid[0]))
    dq, dk, dv, dbias, dmod = lax.fori_loop(np.int32(0), np.int32(total), queries, results)
    return (
        dq[:, : sizes.T],
        *(join_keys(dx, sizes) for dx in (dk, dv)),
        *bias_sums(call.bias, dbias),
        *dmod,
    )


def _backward_tile(
    place: Place,
    call: AttentionCall,
    repair: jax.Array,
    of: _QueryTile,
    partly: bool,
    order: jax.Array,
    n: jax.Array,
    state: _Gradients,
) -> _Gradients:
    """Accumulate the gradients of the n-th tile of a query tile's list."""
    dq, dk, dv, dbias, dmod = state
    place = place._replace(j=order[n])
    visible = partial(visible_at, place, call) if partly else None
    tiles = place.keys(call.key), place.keys(call.value)
    k_tile, v_tile = once(repair, lambda tiles: _clean_keys(*tiles)[:2], tiles)
    bias = None if call.bias is None else bias_tile(place, call.bias, call, -jnp.inf)
    _, s, t = _scores(of.q, k_tile, call, bias)
    if call.score_mod is not None:
        modify = lambda s, leaves: score_tile(place, call, s, leaves, -jnp.inf)  # noqa: E731
        # padded keys and queries without a gradient have scores of 0, where the derivative of the
        # function may be infinite: 0 * inf = NaN
        passes = of.row_max < jnp.inf if visible is None else (of.row_max < jnp.inf) & visible()
        s = jnp.where(passes, s, 1.0)
        s, derivatives = jax.vjp(modify, s, floating_leaves(call.score_mod))
    s = s if visible is None else jnp.where(visible(), s, -jnp.inf)
    # subtract m and log l separately: if scores are large, rounding their sum loses log l
    p = _exp(s - of.row_max - of.log_sum)
    dp = _dot(of.do, v_tile, (2, 2), call)
    kept = p
    if call.dropout_rate:
        factor = dropout_factor(place, call)
        kept, dp = p * factor, dp * factor
    ds = p * (dp - of.D)
    # select instead of multiplying, because the products of hidden pairs may have overflowed
    if call.score_mod is not None:
        ds, added = derivatives(ds if visible is None else jnp.where(visible(), ds, 0))
        dmod = [x + y.astype(jnp.float32) for x, y in zip(dmod, added, strict=True)]
    if call.bias is not None:
        ds = ds if visible is None else jnp.where(visible(), ds, 0)
        dbias = bias_add(place, dbias, call, ds)
    if t is not None:
        ds = ds * (1 - t * t)
    if visible is not None and (call.bias is None or t is not None):
        ds = jnp.where(visible(), ds, 0)
    # on a CPU, multiplying from the left by transposes computed once per query tile is two to three
    # times as fast as a product that sums over rows
    dv = place.add_keys(dv, _dot(of.do_across, kept, (2, 1), call))
    dk = place.add_keys(dk, _dot(of.q_across, ds, (2, 1), call))
    return dq + _dot(ds, k_tile, (2, 1), call), dk, dv, dbias, dmod
