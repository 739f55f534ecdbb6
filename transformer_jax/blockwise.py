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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax

from transformer_jax.dropout import keep_tile, key_words
from transformer_jax.masks import Dense, Everything, Mask
from transformer_jax.tiles import FULL, PARTIAL, SKIPPED, BlockPlan, at_once

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
    NaN. Differentiable in query, key, value, bias, sinks and scale. Arguments are taken as checked.
    """
    if 0 in (*query.shape[:3], key.shape[1]):
        out = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
        return out, jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
    if isinstance(scale, jax.Array):
        query, scale = (query.astype(jnp.float32) * scale).astype(query.dtype), 1.0
    options = _Options(
        scale=1 / math.sqrt(query.shape[3]) if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        dropout_rate=float(dropout_rate) if dropout_key is not None else 0.0,
    )
    fixed = _Fixed(
        Everything() if mask is None else mask,
        q_positions,
        k_positions,
        None if dropout_key is None or not options.dropout_rate else key_words(dropout_key),
    )
    return _attend(options, query, key, value, bias, sinks, fixed)


def _positions(positions: jax.Array | None, length: int) -> jax.Array:  # i32[B or 1, length]
    if positions is None:  # made here, where it is known when tracing, and so is the plan
        return jnp.arange(length, dtype=jnp.int32)[None]
    return positions if positions.ndim == 2 else positions[None]


class _Options(NamedTuple):
    """What is known when tracing."""

    scale: float
    softcap: float | None
    dropout_rate: float


class _Fixed(NamedTuple):
    """Integers and booleans, which have no gradient."""

    mask: Mask
    q_positions: jax.Array | None  # i32[T] or [B, T]
    k_positions: jax.Array | None  # i32[S] or [B, S]
    dropout_key: jax.Array | None  # u32[2]


# Sizes, and the cutting into tiles


@dataclass(frozen=True)
class _Sizes:
    """One group of `rows` batch rows by `heads` key heads shares a tile of block_q by block_k."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    block_q: int
    block_k: int
    rows: int
    heads: int

    @classmethod
    def of(cls, query, key, fixed: _Fixed) -> _Sizes:
        B, T, N, H = query.shape
        S, K = key.shape[1:3]

        def plan():
            return _plan(fixed, T, S, T, S).classes

        apart = jax.eval_shape(plan).shape[0] > 1
        return cls(B, T, S, N, K, H, *_tile_sizes(B, T, S, N, K, apart))

    @property
    def G(self) -> int:
        return self.N // self.K

    @property
    def lanes(self) -> int:
        return self.rows * self.heads

    @property
    def groups(self) -> tuple[int, int]:
        return self.B // self.rows, self.K // self.heads

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.T // self.block_q), -(-self.S // self.block_k)


def _tile_sizes(B: int, T: int, S: int, N: int, K: int, apart: bool) -> tuple[int, int, int, int]:
    """(block_q, block_k, rows, heads): half a million scores, which two cores hold in L2.

    As many small tiles at once as there are: the less of a tile on the diagonal is empty. Batch
    rows that plan `apart` share a tile only where there is little to skip. Measurements are in
    benchmarks/NOTES.md.
    """
    length, most = max(T, S), B * K
    if not _SMALL_PRODUCTS_THREADED:
        side = 128 if length <= 256 else 512
    else:
        side = 128 if length <= 256 or (most >= 16 and length <= 1024) else 256
    lanes = max(2, 2**19 // side**2)
    block_q = min(max(side // 8, side // (N // K)), _round_up(T, 8))
    block_k = min(side, _round_up(S, 8))
    heads = min(_divisors(K, lanes), key=lambda n: (abs(n - lanes), -n))
    together = lanes // K if not apart or length <= 256 else 1
    rows = max(_divisors(B, max(1, together))) if heads == K else 1
    return block_q, block_k, rows, heads


# XLA of jax 0.10 computes a batch of products on one thread if each is small
_SMALL_PRODUCTS_THREADED = jax.__version_info__ >= (0, 11)


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _pad(x: jax.Array, axis: int, length: int, fill: Any) -> jax.Array:
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)


# Which tiles to visit


class _Visits(NamedTuple):
    """For each group and query tile: the key tiles, full ones first."""

    order: jax.Array  # i32[groups or 1, groups or 1, nQ, nK]
    full: jax.Array  # i32[groups or 1, groups or 1, nQ]
    seen: jax.Array  # i32[groups or 1, groups or 1, nQ]: full and partial

    def row(self, b, c, i):
        b, c = (0 if n == 1 else at for n, at in zip(self.full.shape, (b, c), strict=False))
        return self.order[b, c, i], self.full[b, c, i], self.seen[b, c, i]


def _plan(fixed: _Fixed, T: int, S: int, block_q: int, block_k: int) -> BlockPlan:
    at = _positions(fixed.q_positions, T), _positions(fixed.k_positions, S)
    return fixed.mask.block_plan(*at, block_q=block_q, block_k=block_k)


def _visits(sizes: _Sizes, fixed: _Fixed) -> _Visits:
    with at_once(fixed.mask, fixed.q_positions, fixed.k_positions):
        plan = _plan(fixed, sizes.T, sizes.S, sizes.block_q, sizes.block_k)
        classes = jnp.asarray(plan.classes)
        rows = sizes.rows if classes.shape[0] > 1 else 1
        heads = sizes.heads * sizes.G if classes.shape[1] > 1 else 1
        classes = rearrange(classes, "(b r) (c n) i j -> b c i j r n", r=rows, n=heads)
        low, high = classes.min(axis=(-2, -1)), classes.max(axis=(-2, -1))
        classes = jnp.where(high == SKIPPED, SKIPPED, jnp.where(low == FULL, FULL, PARTIAL))
        order = jnp.argsort(-classes, axis=-1, stable=True).astype(jnp.int32)
        count = partial(jnp.sum, axis=-1, dtype=jnp.int32)
        return _Visits(order, count(classes == FULL), count(classes != SKIPPED))


# What stands at a tile


class _Place(NamedTuple):
    """A query tile (group, group, i) and a key tile j; all but `sizes` may be traced."""

    sizes: _Sizes
    at: tuple[Any, Any, Any]
    j: Any

    @property
    def b(self) -> Any:
        return self.at[0]

    @property
    def c(self) -> Any:
        return self.at[1]

    @property
    def i(self) -> Any:
        return self.at[2]

    def take(self, x: jax.Array, axis: int, start: Any, length: int) -> jax.Array:
        return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, start, length, axis)

    def rows(self, x: jax.Array) -> jax.Array:
        return self.take(x, 0, self.b * self.sizes.rows, self.sizes.rows)

    def spread(self, x: jax.Array) -> jax.Array:
        """[rows or 1, heads G or 1, block_q or 1, block_k or 1] to [lanes, G block_q, block_k]."""
        sizes = self.sizes
        full = sizes.rows, sizes.heads * sizes.G, sizes.block_q, sizes.block_k
        x = jnp.broadcast_to(x, full)
        return rearrange(x, "r (h G) t s -> (r h) (G t) s", G=sizes.G)

    def queries(self, x: jax.Array) -> jax.Array:  # f32[lanes, G block_q, d]
        """The tile's part of x [B, nQ block_q, N, d]."""
        start, shape = self._queries_at()
        x = lax.dynamic_slice(x, _int32(start), (*shape, x.shape[3]))
        return rearrange(x, "r t (h G) d -> (r h) (G t) d", G=self.sizes.G).astype(jnp.float32)

    def put_queries(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """x [B, nQ block_q, N, d] with the tile's part [lanes, G block_q, d] written."""
        names = dict(G=self.sizes.G, r=self.sizes.rows)
        part = rearrange(part, "(r h) (G t) d -> r t (h G) d", **names)
        return lax.dynamic_update_slice(x, part, _int32(self._queries_at()[0]))

    def _queries_at(self):
        sizes = self.sizes
        heads = sizes.heads * sizes.G
        start = self.b * sizes.rows, self.i * sizes.block_q, self.c * heads, 0
        return start, (sizes.rows, sizes.block_q, heads)

    def keys(self, x: jax.Array) -> jax.Array:  # f32[lanes, block_k, d]
        """The tile's part of x [B, nK block_k, K, d]."""
        return rearrange(self._keys(x), "r s h d -> (r h) s d").astype(jnp.float32)

    def add_keys(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """x [groups, groups, nK, lanes, d, block_k] with the tile's part added."""
        at = self.b, self.c, self.j
        total = (x[at] + part)[None, None, None]
        return lax.dynamic_update_slice(x, total, _int32((*at, 0, 0, 0)))

    def _keys(self, x):
        sizes = self.sizes
        start = self.b * sizes.rows, self.j * sizes.block_k, self.c * sizes.heads, 0
        shape = sizes.rows, sizes.block_k, sizes.heads, x.shape[3]
        return lax.dynamic_slice(x, _int32(start), shape)

    def positions(self, fixed: _Fixed) -> tuple[jax.Array, jax.Array]:
        """Of the tile's queries [rows or 1, block_q] and keys [rows or 1, block_k]."""
        sizes = self.sizes
        q, k = _positions(fixed.q_positions, sizes.T), _positions(fixed.k_positions, sizes.S)
        q = _pad(q, 1, sizes.grid[0] * sizes.block_q, 0)
        k = _pad(k, 1, sizes.grid[1] * sizes.block_k, -1)
        q = lax.dynamic_slice_in_dim(q, self.i * sizes.block_q, sizes.block_q, 1)
        k = lax.dynamic_slice_in_dim(k, self.j * sizes.block_k, sizes.block_k, 1)
        return self.rows(q), self.rows(k)

    def indices(self) -> tuple[jax.Array, jax.Array]:
        sizes = self.sizes
        q = self.i * sizes.block_q + jnp.arange(sizes.block_q, dtype=jnp.int32)
        return q, self.j * sizes.block_k + jnp.arange(sizes.block_k, dtype=jnp.int32)


def _visible(place: _Place, fixed: _Fixed) -> jax.Array:  # bool[lanes, G block_q, block_k]
    """The mask at a tile; padding, on either side, is not visible."""
    sizes = place.sizes
    heads = sizes.heads * sizes.G

    def pick(node):  # every leaf but Dense's leads with batch rows
        if not isinstance(node, Dense):
            return place.rows(node)
        if node.array.ndim == 2:
            return node
        take = lambda x: place.take(place.rows(x), 1, place.c * heads, heads)  # noqa: E731
        return jax.tree.map(take, node)

    mask = jax.tree.map(pick, fixed.mask, is_leaf=lambda node: isinstance(node, Dense))
    q, k = place.positions(fixed)
    real = place.indices()[0] < sizes.T
    sees = mask.allows(q, k) & (k >= 0)[:, None, None, :] & real[None, None, :, None]
    return place.spread(sees)


def _kept(place: _Place, options: _Options, fixed: _Fixed) -> jax.Array:
    """Dropout: what each weight is multiplied by, f32[lanes, G block_q, block_k]."""
    assert fixed.dropout_key is not None
    sizes = place.sizes
    heads = sizes.heads * sizes.G
    row = place.b * sizes.rows + jnp.arange(sizes.rows, dtype=jnp.int32)
    head = place.c * heads + jnp.arange(heads, dtype=jnp.int32)
    keep = keep_tile(
        fixed.dropout_key,
        options.dropout_rate,
        head_index=row[:, None] * sizes.N + head[None, :],
        q_index=place.indices()[0],
        k_index=place.indices()[1],
    )
    factor = 0.0 if options.dropout_rate == 1 else 1 / (1 - options.dropout_rate)
    return place.spread(jnp.where(keep, jnp.float32(factor), jnp.float32(0)))


# Bias: an array that is sliced, or a value that is evaluated, tile by tile


def _is_array(bias: Any) -> bool:
    return not hasattr(bias, "materialize")


def _bias_part(place: _Place, bias: jax.Array) -> jax.Array:
    """What of an array a tile depends on."""
    sizes = place.sizes
    for axis, start, length in _bias_slices(place):
        if bias.shape[axis] != 1 and axis >= 2:
            bias = _pad(bias, axis, sizes.grid[axis - 2] * length, 0)
        bias = place.take(bias, axis, start, length)
    return bias


def _bias_slices(place: _Place):
    sizes = place.sizes
    heads = sizes.heads * sizes.G
    return (
        (0, place.b * sizes.rows, sizes.rows),
        (1, place.c * heads, heads),
        (2, place.i * sizes.block_q, sizes.block_q),
        (3, place.j * sizes.block_k, sizes.block_k),
    )


def _bias_tile(place: _Place, bias: Any, fixed: _Fixed) -> jax.Array | None:
    """f32[lanes, G block_q, block_k]"""
    if bias is None:
        return None
    if _is_array(bias):
        part = _bias_part(place, bias)
    else:
        heads = place.sizes.heads * place.sizes.G
        part = bias.materialize(*place.positions(fixed))
        part = place.take(place.rows(part), 1, place.c * heads, heads)
    return place.spread(part.astype(jnp.float32))


def _bias_zeros(bias: Any, sizes: _Sizes) -> Any:
    """Where the gradient of the bias is summed: f32, and for an array of whole tiles."""
    if bias is None:
        return None
    if not _is_array(bias):
        return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), _differentiable(bias))
    whole = (None, None, sizes.grid[0] * sizes.block_q, sizes.grid[1] * sizes.block_k)
    shape = [n if n == 1 or w is None else w for n, w in zip(bias.shape, whole, strict=True)]
    return jnp.zeros(shape, jnp.float32)


def _bias_add(place: _Place, total: Any, bias: Any, fixed: _Fixed, ds: jax.Array) -> Any:
    """total + d(bias) of one tile."""
    if not _is_array(bias):
        tile = lambda leaves: _bias_tile(place, _replace(bias, leaves), fixed)  # noqa: E731
        (gradient,) = jax.vjp(tile, _differentiable(bias))[1](ds)
        return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, gradient)
    starts = [0 if n == 1 else s[1] for n, s in zip(bias.shape, _bias_slices(place), strict=True)]
    shape = [1 if n == 1 else s[2] for n, s in zip(bias.shape, _bias_slices(place), strict=True)]
    like = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    (gradient,) = jax.linear_transpose(place.spread, like)(ds)
    at = _int32(starts)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, shape) + gradient, at)


def _differentiable(tree: Any) -> list:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def _replace(tree: Any, leaves: list) -> Any:
    """The tree with its differentiable leaves replaced."""
    new = iter(leaves)
    floating = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: next(new) if floating(x) else x, tree)


# Arithmetic of one tile


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


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Of matrices led by lanes."""
    dims = (((axes[0],), (axes[1],)), ((0,), (0,)))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def _scores(
    q: jax.Array,  # [lanes, G block_q, H], times the scale
    k: jax.Array,  # [lanes, block_k, H]
    options: _Options,
    bias: jax.Array | None,
    visible: Callable[[], jax.Array] | None,
) -> tuple[jax.Array, jax.Array | None]:  # [lanes, G block_q, block_k]
    """Scores, -inf where not visible, and tanh where capped."""
    s, t = _dot(q, k, (2, 2)), None
    if options.softcap is not None:
        t = jnp.tanh(s / options.softcap)
        s = options.softcap * t
    if bias is not None:
        s = s + bias
    return (s if visible is None else jnp.where(visible(), s, -jnp.inf)), t


def _weigh(
    weights: jax.Array,  # [lanes, G block_q, block_k]
    x: jax.Array,  # [lanes, block_k, d]
    visible: Callable[[], jax.Array] | None,
) -> jax.Array:  # [lanes, G block_q, d]
    """The sum over keys of weights times x.

    In a partial tile 0 * NaN must be 0 where the key is not seen, and NaN where it is. All of x
    goes into the sum of the first query, so that one tells whether x is finite.
    """
    result = _dot(weights, x, (2, 1))
    if visible is None:
        return result

    def careful():
        good = jnp.isfinite(x)
        seen = _dot(visible().astype(jnp.float32), (~good).astype(jnp.float32), (2, 1)) > 0
        return jnp.where(seen, jnp.nan, _dot(weights, jnp.where(good, x, 0), (2, 1)))

    return lax.cond(jnp.isfinite(result[:, 0]).all(), lambda: result, careful)


# Forward and backward


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, query, key, value, bias, sinks, fixed):
    return _attend_forward(options, query, key, value, bias, sinks, fixed)[0]


def _attend_forward(options, query, key, value, bias, sinks, fixed):
    out, high, log = _forward(options, query, key, value, bias, sinks, fixed)
    return (out, high + log), (query, key, value, bias, sinks, fixed, out, high, log)


def _attend_backward(options, saved, cotangents):
    gradients = _backward(options, *saved, *cotangents)
    return (*gradients, jax.tree.map(_no_gradient, saved[5]))


def _no_gradient(x: Any) -> np.ndarray:
    return np.zeros(jnp.shape(x), jax.dtypes.float0)


_attend.defvjp(_attend_forward, _attend_backward)


def _visit(visits: _Visits, at: Any, tile: Callable, state: Any) -> Any:
    """Folds the tiles that a query tile visits, full ones first, into the state."""
    order, full, seen = visits.row(*at)
    state = lax.fori_loop(np.int32(0), full, partial(tile, False, order), state)
    return lax.fori_loop(full, seen, partial(tile, True, order), state)


def _forward(options, query, key, value, bias, sinks, fixed):
    """(out, m, log l), one query tile of one group after the other; m is -inf in dead rows.

    lse is m + log l, but where scores are large the sum has no bits left for log l, so the backward
    pass takes the two apart.
    """
    sizes = _Sizes.of(query, key, fixed)
    visits = _visits(sizes, fixed)
    q = _pad(query, 1, sizes.grid[0] * sizes.block_q, 0)
    k, v = (_pad(x, 1, sizes.grid[1] * sizes.block_k, 0) for x in (key, value))

    def tile(at, q_tile, partly, visits, n, state):
        high, total, weighed = state
        place = _Place(sizes, at, visits[n])
        visible = partial(_visible, place, fixed) if partly else None
        s, _ = _scores(q_tile, place.keys(k), options, _bias_tile(place, bias, fixed), visible)
        new = jnp.maximum(high, s.max(axis=2, keepdims=True))
        p, r = _exp(s - new), _exp(high - new)
        total = total * r + p.sum(axis=2, keepdims=True)
        if options.dropout_rate:
            p = p * _kept(place, options, fixed)
        return new, total, weighed * r + _weigh(p, place.keys(v), visible)

    def query_tile(n, results):
        at = _unravel(n, (*sizes.groups, sizes.grid[0]))
        place = _Place(sizes, at, 0)
        q_tile = place.queries(q) * np.float32(options.scale)
        row = sizes.lanes, sizes.G * sizes.block_q, 1
        state = (
            jnp.full(row, LOWEST, jnp.float32),
            _zeros(row),
            _zeros((*row[:2], v.shape[3])),
        )
        high, total, weighed = _visit(visits, at, partial(tile, at, q_tile), state)
        dead = total == 0
        if sinks is not None:
            high, total, weighed = _add_sink(_sink_rows(place, sinks), high, total, weighed)
        total = jnp.where(dead, 1, total)
        high = jnp.where(dead, -jnp.inf, high)
        parts = weighed / total, high, jnp.log(total)
        return tuple(map(place.put_queries, results, parts))

    results = tuple(_zeros((*q.shape[:3], d)) for d in (v.shape[3], 1, 1))
    total = math.prod((*sizes.groups, sizes.grid[0]))
    out, high, log = lax.fori_loop(np.int32(0), np.int32(total), query_tile, results)
    out, high, log = (x[:, : sizes.T] for x in (out, high, log))
    return out.astype(query.dtype), high[..., 0], log[..., 0]


def _add_sink(sink, high, total, weighed):
    new = jnp.maximum(high, sink)
    r = jnp.exp(high - new)
    return new, total * r + jnp.exp(sink - new), weighed * r


def _sink_rows(place: _Place, sinks: jax.Array) -> jax.Array:  # f32[lanes, G block_q, 1]
    sizes = place.sizes
    heads = sizes.heads * sizes.G
    sinks = lax.dynamic_slice_in_dim(sinks.astype(jnp.float32), place.c * heads, heads)
    full = jnp.broadcast_to(sinks[None, :, None], (sizes.rows, heads, sizes.block_q))
    return rearrange(full, "r (h G) t -> (r h) (G t) 1", G=sizes.G)


def _zeros(shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def _int32(starts: Sequence[Any]) -> list[jax.Array]:
    """Starts of a slice in one dtype, also where 64 bits are on."""
    return [jnp.asarray(start, jnp.int32) for start in starts]


def _unravel(n: Any, shape: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    _, c, i = shape
    return n // (c * i), n // i % c, n % i


def _backward(options, query, key, value, bias, sinks, fixed, out, high, log, dout, dlse):
    """Gradients, in the order of `_forward`; dk, dv and dbias are added up in place.

    A query that sees nothing, or something that is not finite, passes no gradient on.
    """
    sizes = _Sizes.of(query, key, fixed)
    visits = _visits(sizes, fixed)
    dead = jnp.isneginf(high) | jnp.isnan(high) | jnp.isnan(out).any(axis=-1)
    dout = jnp.where(dead[..., None], 0, dout.astype(jnp.float32))
    D = jnp.where(dead, 0, (dout * out.astype(jnp.float32)).sum(axis=-1) - dlse)
    high, log = jnp.where(dead, jnp.inf, high), jnp.where(dead, 0, log)
    dsinks = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(jnp.float32)[None, None, :] - high - log)
        dsinks = -(weights * D).sum(axis=(0, 1)).astype(sinks.dtype)

    length = sizes.grid[0] * sizes.block_q
    q, do = (_pad(x, 1, length, 0) for x in (jnp.where(dead[..., None], 0, query), dout))
    D, log = (_pad(x[..., None], 1, length, 0) for x in (D, log))
    high = _pad(high[..., None], 1, length, jnp.inf)
    k, v = (_pad(x, 1, sizes.grid[1] * sizes.block_k, 0) for x in (key, value))

    def tile(at, q, q_across, do, do_across, D, high, log, partly, visits, n, state):
        dq, dk, dv, dbias = state
        place = _Place(sizes, at, visits[n])
        visible = partial(_visible, place, fixed) if partly else None
        k_tile = place.keys(k)
        s, t = _scores(q, k_tile, options, _bias_tile(place, bias, fixed), visible)
        p = _exp(s - high - log)
        dp = _dot(do, place.keys(v), (2, 2))
        kept = p
        if options.dropout_rate:
            factor = _kept(place, options, fixed)
            kept, dp = p * factor, dp * factor
        ds = p * (dp - D)
        if bias is not None:
            ds = ds if visible is None else jnp.where(visible(), ds, 0)
            dbias = _bias_add(place, dbias, bias, fixed, ds)
        if t is not None:
            ds = ds * (1 - t * t)
        if visible is not None and (bias is None or t is not None):
            ds = jnp.where(visible(), ds, 0)
        dv = place.add_keys(dv, _dot(do_across, kept, (2, 1)))
        dk = place.add_keys(dk, _dot(q_across, ds, (2, 1)))
        return dq + _weigh(ds, k_tile, visible), dk, dv, dbias

    def query_tile(n, results):
        dq, *sums = results
        at = _unravel(n, (*sizes.groups, sizes.grid[0]))
        place = _Place(sizes, at, 0)
        q_tile = place.queries(q) * np.float32(options.scale)
        do_tile = place.queries(do)
        rows = (place.queries(x) for x in (D, high, log))
        tiles = (y for x in (q_tile, do_tile) for y in (x, x.swapaxes(1, 2)))
        step = partial(tile, at, *tiles, *rows)
        dq_tile, *sums = _visit(visits, at, step, (jnp.zeros_like(q_tile), *sums))
        return place.put_queries(dq, dq_tile * np.float32(options.scale)), *sums

    keys = *sizes.groups, sizes.grid[1], sizes.lanes
    sums = (_zeros((*keys, x.shape[3], sizes.block_k)) for x in (k, v))  # adding is contiguous
    results = _zeros(q.shape), *sums, _bias_zeros(bias, sizes)
    total = math.prod((*sizes.groups, sizes.grid[0]))
    dq, dk, dv, dbias = lax.fori_loop(np.int32(0), np.int32(total), query_tile, results)
    return (
        dq[:, : sizes.T].astype(query.dtype),
        _join_keys(dk, sizes).astype(key.dtype),
        _join_keys(dv, sizes).astype(value.dtype),
        _bias_gradient(bias, dbias),
        dsinks,
    )


def _join_keys(x: jax.Array, sizes: _Sizes) -> jax.Array:
    """[groups, groups, nK, lanes, d, block_k] to [B, S, K, d]."""
    x = rearrange(x, "b c j (r h) d s -> (b r) (j s) (c h) d", r=sizes.rows)
    return x[:, : sizes.S]


def _bias_gradient(bias: Any, total: Any) -> Any:
    """The sum as a cotangent of the bias: its shape, its dtypes, nothing for integers."""
    if bias is None:
        return None
    if _is_array(bias):
        return total[tuple(slice(n) for n in bias.shape)].astype(bias.dtype)
    leaves, structure = jax.tree.flatten(bias)
    sums = iter(total)
    floating = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]
    leaves = [
        next(sums).astype(x.dtype) if f else _no_gradient(x)
        for x, f in zip(leaves, floating, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)
