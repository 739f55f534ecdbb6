"""CPU kernels in plain JAX, for programs that run on another machine.

A program that is exported, or compiled for another platform, cannot call the compiled library. It
uses these functions, which have the same contract. They loop over tiles of queries and tiles of
keys, and process all heads of all rows at once. They need O(T + S) memory, and they skip tiles that
no head sees. The compiled kernels, which have only a backward pass, also use the derivatives of
these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.contract import (
    Array,
    Blocks,
    Kernels,
    Operands,
    Problem,
    Residuals,
    TileLists,
    learns_slopes,
    out_dtype,
)
from transformer_jax.kernels.dropout import keep
from transformer_jax.kernels.sharding import vary

State = TypeVar("State")
Arrays = tuple[jax.Array, ...]
Sums = tuple[jax.Array, jax.Array, jax.Array]  # out, m, log l
QuerySums = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # m, l, out l, rows that see NaN


def forward(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, ...]:
    """Return the output [B, T, N, Hv], and m and log l as f32[B, N, T]."""
    tiles = _Tiles(problem, operands, blocks)
    B, N, T = tiles.B, tiles.N, tiles.T
    q, finite_q = _clean(tiles.by_tile(operands.query))
    k, v, finite = _clean_keys(operands)
    keys, values, finite = (tiles.pad_keys(x) for x in (k, v, finite[..., None]))
    visits = _visited(lists)

    def of_queries(i: jax.Array) -> Sums:
        def step(j: jax.Array, state: QuerySums) -> QuerySums:
            row_max, total, weighed, lost = state
            s, seen, _ = tiles.scores(q[i], tiles.keys(keys, j), i, j)
            bad = ~tiles.spread(tiles.keys(finite, j)[..., 0])[:, :, None]
            lost = lost | (seen & (bad | jnp.isnan(s) | jnp.isposinf(s))).any(axis=-1)
            # from here on everything is finite, including derivatives
            s = jnp.where(lost[..., None], -jnp.inf, s)
            # the maximum cancels out of the result, so its derivative would only add rounding
            # errors
            most = lax.stop_gradient(jnp.maximum(row_max, s.max(axis=-1)))
            safe = jnp.where(jnp.isneginf(most), 0, most)
            p = jnp.exp(s - safe[..., None])
            old = jnp.exp(row_max - safe)
            total = old * total + p.sum(axis=-1)
            if operands.dropout is not None:
                p = p * tiles.kept(i, j)
            added = tiles.onto_queries(p, tiles.keys(values, j))
            return most, total, old[..., None] * weighed + added, lost

        empty = jnp.full((B, N, tiles.q), -jnp.inf, jnp.float32)
        zeros = jnp.zeros((B, N, tiles.q), jnp.float32)
        weighed = jnp.zeros((*zeros.shape, v.shape[3]), jnp.float32)
        state = vary((empty, zeros, weighed, zeros > 0), operands)
        row_max, total, weighed, lost = _visit(visits[i], step, state)
        masked = jnp.isneginf(row_max) & ~lost
        if operands.sinks is not None:
            sinks = operands.sinks[..., None]
            most = lax.stop_gradient(jnp.where(masked, row_max, jnp.maximum(row_max, sinks)))
            safe = jnp.where(masked, 0, most)
            old = jnp.exp(row_max - safe)
            total = jnp.where(masked, 0, total * old + jnp.exp(sinks - safe))
            row_max, weighed = most, weighed * old[..., None]
        broken = lost | (~finite_q[i] & ~masked) | jnp.isnan(total)
        total = jnp.where(masked | broken, 1, total)
        out = jnp.where(broken[..., None], jnp.nan, weighed / total[..., None])
        row_max, log_sum = (jnp.where(broken, jnp.nan, x) for x in (row_max, jnp.log(total)))
        return out, row_max, log_sum

    out, row_max, log_sum = lax.map(of_queries, jnp.arange(tiles.rows, dtype=jnp.int32))
    out = tiles.from_tiles(out).astype(out_dtype(problem, operands))
    saved = [jnp.moveaxis(x, 0, 2).reshape(B, N, -1)[:, :, :T] for x in (row_max, log_sum)]
    return out, *saved


def backward_single_pass(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, ...]:
    """Return dq, dk, dv and, with learned slopes, the sums of -ds |q - k|, f32[B, N, S]."""
    tiles = _Tiles(problem, operands, blocks)
    q, do, keys, values, rows = _backward_inputs(tiles, operands, saved)
    visits, slopes = _visited(lists), learns_slopes(problem, operands)

    def of_keys(dq: jax.Array, j: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        k, v = tiles.keys(keys, j), tiles.keys(values, j)

        def step(i: jax.Array, state: Arrays) -> Arrays:
            dq, dk, dv, *dslopes = state
            p, ds, du = tiles.gradients(q[i], do[i], k, v, rows, i, j)
            dq = dq.at[i].add(problem.scale * tiles.onto_queries(du, k))
            dk = dk + problem.scale * tiles.onto_keys(du, q[i])
            dv = dv + tiles.onto_keys(p, do[i])
            dslopes = [x - (ds * tiles.distances(i, j)).sum(axis=2) for x in dslopes]
            return dq, dk, dv, *dslopes

        zeros = [jnp.zeros_like(k), jnp.zeros_like(v)]
        zeros += [jnp.zeros((tiles.B, tiles.N, tiles.k), jnp.float32)] * slopes
        dq, *sums = _visit(visits[j], step, vary((dq, *zeros), (operands, saved)))
        return dq, sums

    start = vary(jnp.zeros(q.shape, jnp.float32), (operands, saved))
    steps = jnp.arange(tiles.columns, dtype=jnp.int32)
    dq, (dk, dv, *dslopes) = lax.scan(of_keys, start, steps)
    dk, dv = (
        jnp.moveaxis(x, 0, 1).reshape(tiles.B, -1, *x.shape[3:])[:, : tiles.S].astype(like.dtype)
        for x, like in ((dk, operands.key), (dv, operands.value))
    )
    dslopes = [
        jnp.moveaxis(x, 0, 2).reshape(tiles.B, tiles.N, -1)[:, :, : tiles.S] for x in dslopes
    ]
    return tiles.from_tiles(dq).astype(operands.query.dtype), dk, dv, *dslopes


def backward_bias(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> jax.Array:
    """Return the gradient of an array bias in float32, with the shape of the bias."""
    assert operands.bias is not None
    tiles, shape = _Tiles(problem, operands, blocks), operands.bias.shape
    q, do, keys, values, rows = _backward_inputs(tiles, operands, saved)
    visits = _visited(lists)
    summed = tuple(axis for axis, size in enumerate(shape) if size == 1)
    lengths = [1 if n == 1 else tiles_of * block for n, tiles_of, block in
               ((shape[2], tiles.rows, tiles.q), (shape[3], tiles.columns, tiles.k))]  # fmt: skip

    def of_queries(dbias: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        def step(j: jax.Array, dbias: jax.Array) -> jax.Array:
            k, v = tiles.keys(keys, j), tiles.keys(values, j)
            _, ds, _ = tiles.gradients(q[i], do[i], k, v, rows, i, j)
            ds = ds.sum(axis=summed, keepdims=True)
            places = [0 if shape[2] == 1 else i * tiles.q, 0 if shape[3] == 1 else j * tiles.k]
            at = [jnp.asarray(x, jnp.int32) for x in (0, 0, *places)]
            old = lax.dynamic_slice(dbias, at, ds.shape)
            return lax.dynamic_update_slice(dbias, old + ds, at)

        return _visit(visits[i], step, dbias), None

    start = vary(jnp.zeros((*shape[:2], *lengths), jnp.float32), (operands, saved))
    dbias = lax.scan(of_queries, start, jnp.arange(tiles.rows, dtype=jnp.int32))[0]
    return dbias[:, :, : shape[2], : shape[3]]


KERNELS: Kernels = {
    "forward": forward,
    "single_pass": backward_single_pass,
    "bias": backward_bias,
}


def _visited(lists: TileLists) -> jax.Array:  # bool[rows, columns]
    """Return the tiles that at least one head of one row visits."""
    rows, columns = lists.order.shape[2:]
    steps = jnp.arange(columns, dtype=jnp.int32)[None, None, None]
    visited = steps < lists.seen[..., None]
    leads = -1, rows, columns
    order, visited = lists.order.reshape(leads), visited.reshape(leads)
    at = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    return jnp.zeros((rows, columns), bool).at[at, order].max(visited)


def _visit(visits: jax.Array, step: Callable[[jax.Array, State], State], state: State) -> State:
    """Apply a function to the visited tiles in a row of tiles, in order, updating the state."""

    def one(state: State, at: tuple[jax.Array, jax.Array]) -> tuple[State, None]:
        visited, j = at
        # other tiles are skipped at run time; `scan` supports reverse mode, but `while_loop` does
        # not
        return lax.cond(visited, partial(step, j), lambda state: state, state), None

    steps = jnp.arange(visits.shape[0], dtype=jnp.int32)
    return lax.scan(one, state, (visits, steps))[0]


def _clean(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return rows in float32, with nonfinite rows set to 0, and a mask of the finite rows."""
    finite = jnp.isfinite(x).all(axis=-1)
    return jnp.where(finite[..., None], x, 0).astype(jnp.float32), finite


def _clean_keys(operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys and values, with zeros if either is nonfinite, and a mask of the finite keys."""
    (k, finite_k), (v, finite_v) = _clean(operands.key), _clean(operands.value)
    finite = finite_k & finite_v
    k, v = (jnp.where(finite[..., None], x, 0) for x in (k, v))
    return k, v, finite


class _Rows(NamedTuple):
    """Results of the forward pass in tiles of queries, each f32[rows, B, N, block]."""

    row_max: jax.Array
    log_sum: jax.Array
    D: jax.Array


def _backward_inputs(
    tiles: _Tiles, operands: Operands, saved: Residuals
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, _Rows]:
    """Return the tiled queries and cotangents, the keys and values, and the forward results."""
    q, do = _clean(tiles.by_tile(operands.query))[0], tiles.by_tile(saved.do).astype(jnp.float32)
    rows = _Rows(
        tiles.rows_by_tile(saved.row_max, jnp.inf),
        tiles.rows_by_tile(saved.log_sum, 0),
        tiles.rows_by_tile(saved.D, 0),
    )
    # the cotangent of a query that passes no gradient may be NaN
    do = jnp.where(jnp.isposinf(rows.row_max)[..., None], 0, do)
    k, v, _ = _clean_keys(operands)
    return q, do, tiles.pad_keys(k), tiles.pad_keys(v), rows


class _Tiles:
    """Arrays of a call in tiles: `rows` tiles of `q` queries and `columns` tiles of `k` keys."""

    def __init__(self, problem: Problem, operands: Operands, blocks: Blocks) -> None:
        self.problem, self.operands = problem, operands
        self.B, self.T, self.N = operands.query.shape[:3]
        self.S, self.K = operands.key.shape[1:3]
        self.q, self.k = min(blocks.q, self.T), min(blocks.k, self.S)
        self.rows, self.columns = -(-self.T // self.q), -(-self.S // self.k)
        # all arrays are float32 here, and only original float32 inputs lose bits at default
        # precision
        half = operands.query.dtype != jnp.float32
        self.precision = None if half else lax.Precision.HIGHEST

    def by_tile(self, x: jax.Array) -> jax.Array:  # [B, T, N, d] to [rows, B, N, q, d]
        x = _pad(x, 1, self.rows * self.q)
        return x.reshape(self.B, self.rows, self.q, self.N, -1).transpose(1, 0, 3, 2, 4)

    def from_tiles(self, x: jax.Array) -> jax.Array:  # [rows, B, N, q, d] to [B, T, N, d]
        x = x.transpose(1, 0, 3, 2, 4)
        return x.reshape(self.B, -1, self.N, x.shape[-1])[:, : self.T]

    def rows_by_tile(self, x: jax.Array, end: float) -> jax.Array:  # [B, N, T] to [rows, B, N, q]
        x = _pad(x, 2, self.rows * self.q, end)
        return jnp.moveaxis(x.reshape(self.B, self.N, self.rows, self.q), 2, 0)

    def pad_keys(self, x: jax.Array) -> jax.Array:  # [B, S, K, d]
        return _pad(x, 1, self.columns * self.k)

    def keys(self, x: jax.Array, j: jax.Array) -> jax.Array:  # [B, k, K, d] of tile j
        return lax.dynamic_slice_in_dim(x, j * self.k, self.k, 1)

    def spread(self, x: jax.Array) -> jax.Array:  # [B, k, K] to [B, N, k]
        return jnp.repeat(x.swapaxes(1, 2), self.N // self.K, axis=1)

    def _grouped(self, x: jax.Array) -> jax.Array:  # [B, N, ..] to [B, K, G, ..]
        return x.reshape(self.B, self.K, self.N // self.K, *x.shape[2:])

    def _dot(self, names: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(names, x, y, precision=self.precision)

    def onto_pairs(self, q: jax.Array, k: jax.Array) -> jax.Array:  # [B, N, q, k]
        found = self._dot("bkgth,bskh->bkgts", self._grouped(q), k)
        return found.reshape(self.B, self.N, *found.shape[3:])

    def onto_queries(self, p: jax.Array, v: jax.Array) -> jax.Array:  # [B, N, q, d]
        found = self._dot("bkgts,bskh->bkgth", self._grouped(p), v)
        return found.reshape(self.B, self.N, *found.shape[3:])

    def onto_keys(self, p: jax.Array, q: jax.Array) -> jax.Array:  # [B, k, K, d]
        return self._dot("bkgts,bkgth->bskh", self._grouped(p), self._grouped(q))

    def indices(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = i * self.q + jnp.arange(self.q, dtype=jnp.int32)
        return q, j * self.k + jnp.arange(self.k, dtype=jnp.int32)

    def _part(self, x: Array, axis: int, start: jax.Array, size: int, full: int) -> jax.Array:
        """Return the part of an axis for a tile, or the whole axis if it has size 1."""
        if x.shape[axis] == 1 and full != 1:
            return jnp.asarray(x)
        return lax.dynamic_slice_in_dim(_pad(x, axis, -(-full // size) * size), start, size, axis)

    def pairs(self, x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """Return a tile of an array [.., T or 1, S or 1]."""
        x = self._part(x, 2, i * self.q, self.q, self.T)
        return self._part(x, 3, j * self.k, self.k, self.S)

    def vectors(self, i: jax.Array, j: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
        """Return the vectors of a tile, [B or 1, 1, q, 1] and [B or 1, 1, 1, k]."""
        operands = self.operands
        q = (self._part(x, 1, i * self.q, self.q, self.T) for x in operands.q_vectors)
        k = (self._part(x, 1, j * self.k, self.k, self.S) for x in operands.k_vectors)
        return tuple(x[:, None, :, None] for x in q), tuple(x[:, None, None] for x in k)

    def distances(self, i: jax.Array, j: jax.Array) -> jax.Array:  # f32[B or 1, 1, q, k]
        q, k = self.vectors(i, j)
        return jnp.abs(q[0] - k[0]).astype(jnp.float32)

    def scores(
        self, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # [B, N, q, k]
        """Return scores (-inf for hidden pairs), visible pairs, and the tanh in the softcap."""
        problem, operands = self.problem, self.operands
        at_q, at_k = self.indices(i, j)
        seen = (at_q < self.T)[None, None, :, None] & (at_k < self.S)[None, None, None]
        if problem.visible is not None:
            of_q, of_k = self.vectors(i, j)
            pairs = () if operands.pairs is None else (self.pairs(operands.pairs, i, j),)
            seen = seen & problem.visible(of_q, (*of_k, *pairs))
        s, t = problem.scale * self.onto_pairs(q, k), None
        if problem.softcap is not None:
            t = jnp.tanh(s / problem.softcap)
            s = problem.softcap * t
        if operands.slopes is not None:
            s = s - operands.slopes[..., None, None] * self.distances(i, j)
        if operands.bias is not None:
            s = s + self.pairs(operands.bias, i, j).astype(jnp.float32)
        if problem.score is not None:
            of_q, of_k = self.vectors(i, j)
            values = [self.pairs(jnp.asarray(x), i, j) for x in operands.score_values or ()]
            s = problem.score(s, of_q[0], of_k[0], values)
        seen = jnp.broadcast_to(seen, s.shape)
        return jnp.where(seen, s, -jnp.inf), seen, t

    def kept(self, i: jax.Array, j: jax.Array) -> jax.Array:  # f32[B, N, q, k]
        assert self.operands.dropout is not None
        rate = self.problem.dropout_rate
        a, b = self.operands.dropout[..., None, None]
        q, k = (x.astype(jnp.uint32) for x in self.indices(i, j))
        kept = keep(a, b, q[None, None, :, None], k[None, None, None], rate)
        return jnp.where(kept, jnp.float32(0 if rate == 1 else 1 / (1 - rate)), jnp.float32(0))

    def gradients(
        self,
        q: jax.Array,
        do: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rows: _Rows,
        i: jax.Array,
        j: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N, q, k] each
        """Return p after dropout, ds and du."""
        row_max, log_sum, D = (x[i][..., None] for x in rows)
        s, seen, t = self.scores(q, k, i, j)
        seen = seen & ~jnp.isposinf(row_max)
        # select before the exponential, because a select after it would still have a NaN derivative
        s, row_max = jnp.where(seen, s, 0), jnp.where(jnp.isposinf(row_max), 0, row_max)
        p = jnp.where(seen, jnp.exp((s - row_max) - log_sum), 0)
        dp = self.onto_pairs(do, v)
        kept = 1.0 if self.operands.dropout is None else self.kept(i, j)
        ds = jnp.where(seen, p * (dp * kept - D), 0)
        du = ds if t is None else jnp.where(seen, ds * (1 - t * t), 0)
        return p * kept, ds, du


def _pad(x: Array, axis: int, length: int, value: float | bool = 0) -> jax.Array:
    if x.shape[axis] == length:
        return jnp.asarray(x)
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, length - x.shape[axis]
    return jnp.pad(x, widths, constant_values=value)
