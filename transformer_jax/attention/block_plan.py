"""Find the tiles of an attention matrix that are worth computing: summaries, classes, lists.

A tile is `block_q` queries by `block_k` keys. A mask says from the smallest and largest position of
a tile whether some and whether every pair in it may attend; a kernel then skips tiles without any,
and applies the mask only in tiles without all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.kernels.contract import FULL, PARTIAL, SKIPPED, TileLists, tile_lists
from transformer_jax.pytree import register
from transformer_jax.shown import short_repr
from transformer_jax.tracing import at_once, traced

__all__ = ["FULL", "PARTIAL", "SKIPPED", "BlockPlan", "TileLists", "Tiles", "pad", "tile_lists"]


@short_repr
@register(arrays=("classes",), static=("block_q", "block_k"))
@dataclass(frozen=True)
class BlockPlan:
    """Say what a kernel may leave out: tiles that are 0 skipped, 1 partial or 2 full.

    A skipped tile sees nothing; a full one needs no mask, has no empty slot and ends within S.
    """

    classes: jax.Array  # i8[B or 1, N or 1, nQ, nK]
    block_q: int
    block_k: int

    def padded(self, rows: int, columns: int) -> BlockPlan:
        """Return the plan of a larger grid of tiles; those that are added are skipped."""
        with at_once(self.classes):
            classes = pad(pad(jnp.asarray(self.classes), 2, rows, SKIPPED), 3, columns, SKIPPED)
            return BlockPlan(classes, self.block_q, self.block_k)

    def of_first_queries(self, group: int) -> BlockPlan:
        """Return the plan of the first query tile; query heads that read one key head share it."""
        with at_once(self.classes):
            first = jnp.asarray(self.classes)[:, :, :1]
            if first.shape[1] > 1:
                heads = first.reshape(first.shape[0], -1, group, *first.shape[2:])
                low, high = (f(axis=2, keepdims=True) for f in (heads.min, heads.max))
                shared = jnp.where(low == high, low, PARTIAL).astype(first.dtype)
                first = jnp.broadcast_to(shared, heads.shape).reshape(first.shape)
            return BlockPlan(first, self.block_q, self.block_k)

    def key_tiles(self) -> TileLists:
        """List the key tiles that each query tile visits: order [.., nQ, nK], full ones first."""
        return lists_of(self.classes)

    def query_tiles(self) -> TileLists:
        """List the query tiles that visit each key tile: order [.., nK, nQ], full ones first."""
        if traced(self.classes):
            return lists_of(self.classes.swapaxes(-1, -2))
        return lists_of(np.asarray(self.classes).swapaxes(-1, -2))


def lists_of(classes: Any) -> TileLists:
    """Return `tile_lists` of classes; of known ones as constants, for which nothing is compiled."""
    if traced(classes):
        return tile_lists(classes)
    with at_once(classes):
        return jax.tree.map(jnp.asarray, tile_lists(np.asarray(classes)))


@short_repr
@dataclass(frozen=True)
class Tiles:
    """Cut positions into tiles, and summarise each tile; empty slots count as nothing.

    Results about keys have the shape [B or 1, 1, 1, nK], about queries [B or 1, 1, nQ, 1].
    """

    q: jax.Array  # i32[B or 1, T]
    k: jax.Array  # i32[B or 1, S]
    block_q: int
    block_k: int

    @cached_property
    def q_low(self) -> jax.Array:
        return self.query_range(self.q, jnp.ones_like(self.q, bool))[0]

    @cached_property
    def q_high(self) -> jax.Array:
        return self.query_range(self.q, jnp.ones_like(self.q, bool))[1]

    @cached_property
    def k_low(self) -> jax.Array:
        return self.key_range(self.k, jnp.ones_like(self.k, bool))[0]

    @cached_property
    def k_high(self) -> jax.Array:
        return self.key_range(self.k, jnp.ones_like(self.k, bool))[1]

    def query_range(self, values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the smallest and largest values [B or 1, T] of a tile; low > high without any."""
        low, high = _range(values, where, self.block_q)
        return low[:, None, :, None], high[:, None, :, None]

    def key_range(self, values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the smallest and largest values [B or 1, S] of a tile; low > high without any."""
        low, high = _range(values, where & (self.k >= 0), self.block_k)
        return low[:, None, None, :], high[:, None, None, :]

    def every_query(self, holds: jax.Array) -> jax.Array:  # bool[B or 1, T]
        return _cut(holds, self.block_q, True).all(axis=-1)[:, None, :, None]

    def every_key(self, holds: jax.Array) -> jax.Array:  # bool[B or 1, S]
        return _cut(holds | (self.k < 0), self.block_k, True).all(axis=-1)[:, None, None, :]

    def some_key(self, holds: jax.Array) -> jax.Array:  # bool[B or 1, S]
        return _cut(holds & (self.k >= 0), self.block_k, False).any(axis=-1)[:, None, None, :]

    def pairs(self, holds: jax.Array) -> tuple[jax.Array, jax.Array]:  # bool[B, N, T, S]
        """Return (some, every) of each tile by looking at all its pairs."""
        empty = (self.k < 0)[:, None, None, :]
        some = self._reduce(holds & ~empty, False, jnp.any)
        return some, self._reduce(holds | empty, True, jnp.all)

    def _reduce(self, holds: jax.Array, fill: bool, reduce: Callable[..., jax.Array]) -> jax.Array:
        by_keys = reduce(_cut(holds, self.block_k, fill), axis=-1)  # [B, N, T, nK]
        by_queries = _cut(by_keys.swapaxes(-1, -2), self.block_q, fill)  # [B, N, nK, nQ, block_q]
        return reduce(by_queries, axis=-1).swapaxes(-1, -2)

    def classes(self, some: jax.Array, every: jax.Array) -> jax.Array:  # i8[.., nQ, nK]
        """Return the classes once empty slots and the tail after S count as unseen."""
        real = _cut(self.k >= 0, self.block_k, False)
        some = some & real.any(axis=-1)[:, None, None, :]
        every = every & real.all(axis=-1)[:, None, None, :]
        result = jnp.where(some, jnp.where(every, FULL, PARTIAL), SKIPPED).astype(jnp.int8)
        grid = -(-self.q.shape[1] // self.block_q), real.shape[1]
        rows = max(result.shape[0], self.q.shape[0], self.k.shape[0])
        return jnp.broadcast_to(result, (rows, result.shape[1], *grid))


def _cut(x: jax.Array, block: int, fill: Any) -> jax.Array:
    """Cut [..., length] into [..., tiles, block], the last tile filled up."""
    tiles = -(-x.shape[-1] // block)
    x = pad(x, x.ndim - 1, tiles * block, fill)
    return x.reshape(*x.shape[:-1], tiles, block)


def pad(x: jax.Array, axis: int, length: int, fill: Any) -> jax.Array:
    """Return an array with one axis filled up to a length."""
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)


def _range(values: jax.Array, where: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    limits = jnp.iinfo(values.dtype)
    least, most = (np.array(x, values.dtype) for x in (limits.min, limits.max))
    low = _cut(jnp.where(where, values, most), block, most).min(axis=-1)
    return low, _cut(jnp.where(where, values, least), block, least).max(axis=-1)
