"""Packing of the queries of all heads that share a key head into the rows of one tile.

If there are few queries, a tile of a single head is mostly empty, and each head reads the keys
again. After packing, row g T + t of key head h is query t of query head h G + g, where G = N / K.
The kernel has K heads with G T rows each, padded to whole tiles. Every tile of rows visits all
tiles that any of its queries sees. The decode kernels pack queries themselves, and `packed` wraps
all other kernels.

`packed` is applied inside the rules for `vmap` and for meshes. Therefore, G refers to the heads on
one device, and no data moves between devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer_jax.kernels.contract import Operands, Residuals, TileLists
from transformer_jax.kernels.sharding import KEYS, QUERIES, ROWS, TILES, AxisNames, KernelCall


def packed(
    kernel: KernelCall, block_q: int, results: Sequence[AxisNames], *, by_key: bool
) -> KernelCall:
    """Wrap a kernel, packing its inputs and unpacking its results.

    The wrapper requires unpadded queries, no dropout and no slopes. The lists have one tile of
    queries (one row, or one column if `by_key` is true) for all heads that share a key head. A bias
    that differs between heads must have a row for each query.
    """

    def call(operands: Operands, lists: TileLists, *saved: Residuals) -> tuple[jax.Array, ...]:
        (_, T, N, _), K = operands.query.shape, operands.key.shape[2]
        rows = PackedQueries(T, N // K, block_q)
        inner = (
            rows.operands(operands)._replace(sinks=None),
            rows.lists(lists, by_key),
            *map(rows.saved, saved),
        )
        bias = None if operands.bias is None else operands.bias.shape
        found = zip(kernel(*inner), results, strict=True)
        out = tuple(rows.unpacked(x, names, bias) for x, names in found)
        return out if saved or operands.sinks is None else with_sinks(operands.sinks, *out)

    return call


@dataclass(frozen=True)
class PackedQueries:
    """Rows of one key head, which are T queries for each of `group` query heads, head by head."""

    T: int
    group: int
    block: int

    @property
    def number(self) -> int:
        """Number of rows that are queries."""
        return self.group * self.T

    @property
    def tiles(self) -> int:
        """Number of tiles that contain the rows."""
        return -(-self.number // self.block)

    # Inputs of a kernel

    def operands(self, x: Operands) -> Operands:
        """Return the operands with rows instead of queries, and with slopes and sinks per row."""

        def per_row(v: jax.Array | None) -> jax.Array | None:  # [B or 1, N] to rows
            if v is None:
                return None
            return self.heads(jnp.broadcast_to(v[..., None], (*v.shape, self.T)))

        return x._replace(
            query=self.queries(x.query),
            q_vectors=tuple(self._filled(jnp.tile(v, self.group), 1) for v in x.q_vectors),
            pairs=None if x.pairs is None else self.pairs(x.pairs),
            bias=None if x.bias is None else self.pairs(x.bias),
            score_values=jax.tree.map(self.pairs, x.score_values),
            slopes=per_row(x.slopes),
            sinks=per_row(x.sinks),
        )

    def saved(self, x: Residuals) -> Residuals:
        """Pack the inputs of the backward pass, giving padding rows zero weights."""
        return Residuals(
            self.queries(x.do),
            self.heads(x.row_max, jnp.inf),
            self.heads(x.log_sum),
            self.heads(x.D),
        )

    def lists(self, lists: TileLists, by_key: bool) -> TileLists:
        """Return lists in which all tiles of rows visit the same tiles."""
        # heads of one group have the same lists, and a single shared list is kept
        order, full, seen = (x[:, :: self.group] for x in lists[:3])
        if by_key:
            every = jax.lax.broadcasted_iota(order.dtype, (*seen.shape, self.tiles), seen.ndim)
            order = jnp.where(seen[..., None] > 0, every, 0)
            rows = None if lists.rows is None else lists.rows[:, :: self.group]
            return TileLists(order, full * self.tiles, seen * self.tiles, rows=rows)
        order, full, seen = (jnp.repeat(x, self.tiles, axis=2) for x in (order, full, seen))
        rows = None
        # all rows have the same number of tiles, so any order is balanced
        if lists.rows is not None:
            rows = jnp.broadcast_to(jnp.arange(self.tiles, dtype=jnp.int32), seen.shape)
        return TileLists(order, full, seen, rows=rows)

    def queries(self, x: jax.Array) -> jax.Array:  # [B, T, N, d] -> [B, rows, K, d]
        """Pack queries, or arrays of their shape, as rows."""
        B, T, N, d = x.shape
        x = x.reshape(B, T, N // self.group, self.group, d).transpose(0, 3, 1, 2, 4)
        return self._filled(x.reshape(B, self.number, -1, d), 1)

    def heads(self, x: jax.Array, fill: float = 0) -> jax.Array:  # [B, N, T] -> [B, K, rows]
        """Pack one value per head and query as one value per row."""
        return self._filled(x.reshape(x.shape[0], -1, self.number), 2, fill)

    def pairs(self, x: jax.Array) -> jax.Array:  # [.., N or 1, T or 1, S or 1] to rows
        """Pack an array of pairs, so that it has packed rows (or size 1) and K heads (or one)."""
        b, n, t, s = x.shape
        if n == 1 == t:
            return x
        group = self.group if n > 1 else 1
        x = x.reshape(b, n // group, group, t, s)
        x = jnp.broadcast_to(x, (b, n // group, self.group, self.T, s))
        return self._filled(x.reshape(b, n // group, self.number, s), 2)

    def _filled(self, x: jax.Array, axis: int, fill: float = 0) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, self.tiles * self.block - self.number)
        return jnp.pad(x, widths, constant_values=fill)

    # Results of a kernel

    def unpacked(
        self, x: jax.Array, names: AxisNames, bias: tuple[int, ...] | None = None
    ) -> jax.Array:
        """Unpack a result to queries and heads, or the gradient of a bias to its shape."""
        if names == KEYS:
            return x
        if names == QUERIES:  # [B, rows, K, d] -> [B, T, N, d]
            B, _, K, d = x.shape
            x = x[:, : self.number].reshape(B, self.group, self.T, K, d)
            return x.transpose(0, 2, 3, 1, 4).reshape(B, self.T, -1, d)
        if names == ROWS:  # [B, K, rows] -> [B, N, T]
            return x[:, :, : self.number].reshape(x.shape[0], -1, self.T)
        assert names == TILES and bias is not None
        b, n, t, s = bias
        if n == 1 == t:
            return x
        x = x[:, :, : self.number].reshape(b, -1, self.group, self.T, s)
        return x.sum(axis=2) if n == 1 else x.reshape(bias)


def with_sinks(
    sinks: jax.Array,  # f32[B or 1, N]
    out: jax.Array,  # [B, T, N, Hv], without sinks
    row_max: jax.Array,  # f32[B, N, T]: m
    log_sum: jax.Array,  # f32[B, N, T]: log l
) -> tuple[jax.Array, ...]:
    """Add sinks to the results of a forward kernel.

        m' = max(m, sink)    log l' = log(l exp(m - m') + exp(sink - m'))
        out' = out l exp(m - m') / l'

    Rows that are fully masked do not change.
    """
    # The kernel cannot do this, because it takes one sink per head, and the rows of a tile belong
    # to several heads.
    fully_masked = jnp.isneginf(row_max)
    sink = jnp.where(fully_masked, -jnp.inf, sinks[..., None])
    # without the new maximum, m + log l' would cancel if the scores were far below the sink
    new_max = jnp.maximum(row_max, sink)
    rescaled = log_sum + jnp.where(fully_masked, 0, row_max - new_max)
    total = jnp.logaddexp(rescaled, jnp.where(fully_masked, -jnp.inf, sink - new_max))
    share = jnp.swapaxes(jnp.exp(rescaled - total), 1, 2)[..., None]
    return (out.astype(jnp.float32) * share).astype(out.dtype), new_max, total
