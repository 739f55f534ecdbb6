"""Tiles of blockwise attention: sizes, the tiles to visit, and the data of each tile.

A tile consists of block_q queries and block_k keys of a head group. A head group consists of some
batch rows and key heads, with the G query heads that share each key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax

from transformer_jax.attention.arguments import AttentionCall
from transformer_jax.attention.block_plan import PARTIAL, BlockPlan, TileLists, Tiles, pad
from transformer_jax.attention.masks import Everything
from transformer_jax.kernels.contract import Index
from transformer_jax.kernels.dropout import keep
from transformer_jax.tracing import concrete_value, eagerly

# Sizes


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call's tiles. Each tile covers `rows` batch rows and `heads` key heads."""

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
    G: int  # number of query heads per key head
    group: int  # size of a head group, rows * heads
    groups: tuple[int, int]  # number of groups of batch rows, and number of groups of key heads
    grid: tuple[int, int]  # number of query tiles, and number of key tiles

    @classmethod
    def of(cls, call: AttentionCall) -> Sizes:
        """Choose the sizes for the arrays and the mask of a call."""
        B, T, N, S = call.sizes
        K, H = call.key.shape[2:]
        if T <= FEW_QUERIES:
            # in decoding, combine all heads of all rows. Narrow tiles read few keys beyond the last
            # visible one. They divide S, because padding would copy the cache. If no divisor is at
            # least 16, use padded tiles of 64
            widest = _divisors(S, 64)[-1]
            block_k = widest if widest == S or widest >= 16 else min(S, 64)
            block_q, rows, heads = T, B, K
        else:
            # half a million scores, which fit in the L2 caches of two cores (benchmarks/NOTES.md)
            length = max(T, S)
            if not _SMALL_PRODUCTS_THREADED:
                side = 128 if length <= 256 else 512
            else:
                side = 128 if length <= 256 or (B * K >= 16 and length <= 1024) else 256
            # use small tiles in large groups, because less of a small tile on the diagonal is
            # wasted
            group = max(2, 2**19 // side**2)
            block_q = min(max(side // 8, side // (N // K)), -(-T // 8) * 8)
            block_k = min(side, -(-S // 8) * 8)
            heads = min(_divisors(K, group), key=lambda n: (abs(n - group), -n))
            # batch rows with different masks share a tile only if few tiles can be skipped
            at = (p for p in (call.q_positions, call.k_positions) if p is not None and p.ndim == 2)
            lead = 1 if call.mask is None else call.mask.lead[0]
            rows_differ = max(lead, *(p.shape[0] for p in at), 1) > 1
            most = group // K if not rows_differ or length <= 256 else 1
            rows = max(_divisors(B, max(1, most))) if heads == K else 1
        groups, grid = (B // rows, K // heads), (-(-T // block_q), -(-S // block_k))
        sizes = block_q, block_k, rows, heads
        return cls(B, T, S, N, K, H, *sizes, N // K, rows * heads, groups, grid)


FEW_QUERIES = 8

# in jax 0.10, XLA computes a batch of small products on a single thread
_SMALL_PRODUCTS_THREADED = jax.__version_info__ >= (0, 11)


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


# Which tiles to visit


def visited_tiles(sizes: Sizes, call: AttentionCall) -> TileLists:
    """List the key tiles for each head group and query tile, [.., nQ, nK], full tiles first."""
    mask = Everything() if call.mask is None else call.mask
    with eagerly(call.mask, call.q_positions, call.k_positions):
        # with known positions in NumPy, nothing is compiled for the plan of a mask without arrays;
        # compiling took two seconds of the first call
        q, k = (
            np.arange(n, dtype=np.int32) if x is None else concrete_value(x, x)
            for x, n in ((call.q_positions, sizes.T), (call.k_positions, sizes.S))
        )
        q, k = (x if x.ndim == 2 else x[None] for x in (q, k))
        tiles = Tiles(q, k, sizes.block_q, sizes.block_k)
        classes = tiles.classes(*mask.some_and_every(tiles))
        rows = sizes.rows if classes.shape[0] > 1 else 1
        heads = sizes.heads * sizes.G if classes.shape[1] > 1 else 1
        shares = rearrange(classes, "(b r) (c n) i j -> b c i j (r n)", r=rows, n=heads)
        # if the class of a tile differs within a group, the tile is partial for the whole group
        low, high = shares.min(axis=-1), shares.max(axis=-1)
        same = (low == high).astype(low.dtype)
        classes = low * same + PARTIAL * (1 - same)
        return BlockPlan(classes, sizes.block_q, sizes.block_k).key_tiles()


# Data of a tile


class Place(NamedTuple):
    """Possibly traced indices of a query tile (b, c, i) in a head group and of a key tile j."""

    sizes: Sizes
    b: Index
    c: Index
    i: Index
    j: Index

    def take(self, x: jax.Array, axis: int, start: Index, length: int) -> jax.Array:
        return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, start, length, axis)

    def spread(self, x: jax.Array) -> jax.Array:
        """Broadcast [rows or 1, heads G or 1, block_q or 1, block_k or 1] to a tile's shape."""
        sizes = self.sizes
        full = sizes.rows, sizes.heads * sizes.G, sizes.block_q, sizes.block_k
        x = jnp.broadcast_to(x, full)
        return rearrange(x, "r (h G) t s -> (r h) (G t) s", G=sizes.G)

    def queries(self, x: jax.Array) -> jax.Array:  # f32[group, G block_q, d]
        """Return the tile's part of x [B, nQ block_q, N, d]."""
        sizes = self.sizes
        heads = sizes.heads * sizes.G
        start = self.b * sizes.rows, self.i * sizes.block_q, self.c * heads, 0
        shape = sizes.rows, sizes.block_q, heads, x.shape[3]
        tile = lax.dynamic_slice(x, int32(start), shape)
        # concatenate the heads that share a key head, so that one product serves all of them
        return rearrange(tile, "r t (h G) d -> (r h) (G t) d", G=sizes.G).astype(jnp.float32)

    def put_queries(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """Write `part` [group, G block_q, d] to the tile's part of x [B, nQ block_q, N, d]."""
        sizes = self.sizes
        start = self.b * sizes.rows, self.i * sizes.block_q, self.c * sizes.heads * sizes.G, 0
        part = rearrange(part, "(r h) (G t) d -> r t (h G) d", G=sizes.G, r=sizes.rows)
        return lax.dynamic_update_slice(x, part, int32(start))

    def keys(self, x: jax.Array) -> jax.Array:  # f32[group, block_k, d]
        """Return the tile's part of x [B, nK block_k, K, d]."""
        sizes = self.sizes
        start = self.b * sizes.rows, self.j * sizes.block_k, self.c * sizes.heads, 0
        shape = sizes.rows, sizes.block_k, sizes.heads, x.shape[3]
        tile = lax.dynamic_slice(x, int32(start), shape)
        return rearrange(tile, "r s h d -> (r h) s d").astype(jnp.float32)

    def add_keys(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """Add `part` to the tile's part of x [groups, groups, nK, group, d, block_k]."""
        at = self.b, self.c, self.j
        total = (x[at] + part)[None, None, None]
        return lax.dynamic_update_slice(x, total, int32((*at, 0, 0, 0)))

    def positions(self, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        """Return the positions of the tile, [rows or 1, block_q] and [rows or 1, block_k]."""
        sizes = self.sizes
        q, k = call.positions(sizes.T, sizes.S)
        q = pad(q, 1, sizes.grid[0] * sizes.block_q, 0)
        # the padding consists of empty slots
        k = pad(k, 1, sizes.grid[1] * sizes.block_k, -1)
        q = lax.dynamic_slice_in_dim(q, self.i * sizes.block_q, sizes.block_q, 1)
        k = lax.dynamic_slice_in_dim(k, self.j * sizes.block_k, sizes.block_k, 1)
        first = self.b * sizes.rows
        return self.take(q, 0, first, sizes.rows), self.take(k, 0, first, sizes.rows)

    def indices(self) -> tuple[jax.Array, jax.Array]:
        """Return the array indices of the tile's queries [block_q] and keys [block_k]."""
        sizes = self.sizes
        q = self.i * sizes.block_q + jnp.arange(sizes.block_q, dtype=jnp.int32)
        return q, self.j * sizes.block_k + jnp.arange(sizes.block_k, dtype=jnp.int32)


def visible_at(place: Place, call: AttentionCall) -> jax.Array:  # bool[group, G block_q, block_k]
    """Evaluate the mask in a tile. Padded queries and keys are hidden."""
    sizes = place.sizes
    heads = sizes.heads * sizes.G
    first = place.b * sizes.rows, place.c * heads
    mask = Everything() if call.mask is None else call.mask
    mask = mask.part(first, (sizes.B, sizes.N), (sizes.rows, heads))
    q, k = place.positions(call)
    real = place.indices()[0] < sizes.T
    sees = mask.allows(q, k) & (k >= 0)[:, None, None, :] & real[None, None, :, None]
    return place.spread(sees)


def dropout_factor(place: Place, call: AttentionCall) -> jax.Array:
    """Return the dropout factor of each weight, f32[group, G block_q, block_k]."""
    assert call.dropout_words is not None
    sizes, rate = place.sizes, call.dropout_rate
    heads = sizes.heads * sizes.G
    # the call may be only one device's part, but the words are hashes of global rows and heads
    words = place.take(call.dropout_words, 1, place.b * sizes.rows, sizes.rows)
    a, b = place.take(words, 2, place.c * heads, heads)[..., None, None]
    first = (0, 0) if call.first is None else call.first
    q, k = ((n + i).astype(jnp.uint32) for n, i in zip(first, place.indices(), strict=True))
    kept = keep(a, b, q[None, None, :, None], k[None, None, None], rate)
    factor = 0.0 if rate == 1 else 1 / (1 - rate)
    return place.spread(jnp.where(kept, jnp.float32(factor), jnp.float32(0)))


def sink_rows(place: Place, sinks: jax.Array) -> jax.Array:  # f32[group, G block_q, 1]
    """Return the sink of each row in a tile, selected from f32[1, N]."""
    sizes = place.sizes
    heads = sizes.heads * sizes.G
    sinks = lax.dynamic_slice_in_dim(sinks[0], place.c * heads, heads)
    full = jnp.broadcast_to(sinks[None, :, None], (sizes.rows, heads, sizes.block_q))
    return rearrange(full, "r (h G) t -> (r h) (G t) 1", G=sizes.G)


def int32(starts: Sequence[Index]) -> list[jax.Array]:
    """Return the start indices of a slice as int32."""
    # with x64 enabled, Python integers become int64, but `lax` does not accept mixed dtypes
    return [jnp.asarray(start, jnp.int32) for start in starts]


def unravel(n: Index, shape: tuple[int, int, int]) -> tuple[Index, Index, Index]:
    """Return the three indices of the n-th entry in an array of this shape."""
    _, c, i = shape
    return n // (c * i), n // i % c, n % i


def join_keys(x: jax.Array, sizes: Sizes) -> jax.Array:
    """Convert [groups, groups, nK, group, d, block_k] to [B, S, K, d]."""
    x = rearrange(x, "b c j (r h) d s -> (b r) (j s) (c h) d", r=sizes.rows)
    return x[:, : sizes.S]
