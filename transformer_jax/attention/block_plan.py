"""Which tiles of an attention matrix are worth computing: summaries, classes and lists of tiles.

A tile is `block_q` queries by `block_k` keys. A mask says from the smallest and largest position of
a tile whether some and whether every pair in it may attend; a kernel then skips tiles without any,
and applies the mask only in tiles without all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

SKIPPED, PARTIAL, FULL = 0, 1, 2

C = TypeVar("C", bound=type)


def register(*, arrays: tuple[str, ...] = (), static: tuple[str, ...] = ()) -> Callable[[C], C]:
    """Makes a frozen dataclass a pytree, whose `arrays` are children and `static` are structure.

    Rebuilding skips `__init__`, so `__post_init__` checks what a caller wrote and never what a
    transformation put in its place: placeholders, or tracers with an axis more or less.
    """

    def decorate(cls: C) -> C:
        def flatten_with_keys(node):
            children = [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in arrays]
            return children, tuple(getattr(node, name) for name in static)

        def flatten(node):
            children = [getattr(node, name) for name in arrays]
            return children, tuple(getattr(node, name) for name in static)

        def unflatten(structure, children):
            node: Any = object.__new__(cls)
            for name, value in (*zip(arrays, children), *zip(static, structure)):  # noqa: B905
                object.__setattr__(node, name, value)
            return node

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return decorate


class TileLists(NamedTuple):
    """For each row of tiles, those to visit: `indices[..., i, :counts[..., i]]`, ascending."""

    indices: jax.Array  # i32[B or 1, N or 1, rows, columns]; behind the count, the skipped ones
    counts: jax.Array  # i32[B or 1, N or 1, rows]


@register(arrays=("classes",), static=("block_q", "block_k"))
@dataclass(frozen=True)
class BlockPlan:
    """What a kernel may leave out: tiles that are 0 skipped, 1 partial or 2 full.

    A skipped tile sees nothing; a full one needs no mask, has no empty slot and ends within S.
    """

    classes: jax.Array  # i8[B or 1, N or 1, nQ, nK]
    block_q: int
    block_k: int

    def key_tiles(self) -> TileLists:
        """The key tiles that each query tile visits: indices [.., nQ, nK], counts [.., nQ]."""
        with at_once(self.classes):
            return _compact(jnp.asarray(self.classes))

    def query_tiles(self) -> TileLists:
        """The query tiles that visit each key tile: indices [.., nK, nQ], counts [.., nK]."""
        with at_once(self.classes):
            return _compact(jnp.asarray(self.classes).swapaxes(-1, -2))


def _compact(classes: jax.Array) -> TileLists:
    skipped, columns = classes == SKIPPED, classes.shape[-1]
    order = jnp.where(skipped, columns, 0) + jnp.arange(columns, dtype=jnp.int32)[None, None, None]
    indices = jnp.sort(order, axis=-1) % max(columns, 1)
    return TileLists(indices.astype(jnp.int32), (~skipped).sum(axis=-1, dtype=jnp.int32))


@dataclass(frozen=True)
class Tiles:
    """Positions cut into tiles, and what is known of each tile; empty slots count as nothing.

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
        """Smallest and largest of values [B or 1, T] in each tile; low > high without any."""
        low, high = _range(values, where, self.block_q)
        return low[:, None, :, None], high[:, None, :, None]

    def key_range(self, values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Smallest and largest of values [B or 1, S] in each tile; low > high without any."""
        low, high = _range(values, where & (self.k >= 0), self.block_k)
        return low[:, None, None, :], high[:, None, None, :]

    def every_query(self, holds: jax.Array) -> jax.Array:  # bool[B or 1, T]
        return _cut(holds, self.block_q, True).all(axis=-1)[:, None, :, None]

    def every_key(self, holds: jax.Array) -> jax.Array:  # bool[B or 1, S]
        return _cut(holds | (self.k < 0), self.block_k, True).all(axis=-1)[:, None, None, :]

    def some_key(self, holds: jax.Array) -> jax.Array:  # bool[B or 1, S]
        return _cut(holds & (self.k >= 0), self.block_k, False).any(axis=-1)[:, None, None, :]

    def pairs(self, holds: jax.Array) -> tuple[jax.Array, jax.Array]:  # bool[B, N, T, S]
        """(some, every) of each tile by looking at all its pairs."""
        empty = (self.k < 0)[:, None, None, :]
        some = self._reduce(holds & ~empty, False, jnp.any)
        return some, self._reduce(holds | empty, True, jnp.all)

    def _reduce(self, holds: jax.Array, fill: bool, reduce: Callable) -> jax.Array:
        by_keys = reduce(_cut(holds, self.block_k, fill), axis=-1)  # [B, N, T, nK]
        by_queries = _cut(by_keys.swapaxes(-1, -2), self.block_q, fill)  # [B, N, nK, nQ, block_q]
        return reduce(by_queries, axis=-1).swapaxes(-1, -2)

    def classes(self, some: jax.Array, every: jax.Array) -> jax.Array:  # i8[.., nQ, nK]
        """Classes once empty slots and the tail behind S count as unseen."""
        real = _cut(self.k >= 0, self.block_k, False)
        some = some & real.any(axis=-1)[:, None, None, :]
        every = every & real.all(axis=-1)[:, None, None, :]
        result = jnp.where(some, jnp.where(every, FULL, PARTIAL), SKIPPED).astype(jnp.int8)
        grid = -(-self.q.shape[1] // self.block_q), real.shape[1]
        rows = max(result.shape[0], self.q.shape[0], self.k.shape[0])
        return jnp.broadcast_to(result, (rows, result.shape[1], *grid))


def at_once(*trees: Any) -> contextlib.AbstractContextManager:
    """Computes inside a trace, as constants, what depends on no traced value; not in a `shard_map`,
    where jax has no mesh to do so."""
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))
    traced = traced or bool(jax.sharding.get_abstract_mesh().manual_axes)
    return contextlib.nullcontext() if traced else jax.ensure_compile_time_eval()


def _cut(x: jax.Array, block: int, fill: Any) -> jax.Array:
    """[..., length] to [..., tiles, block], the last tile filled up."""
    tiles = -(-x.shape[-1] // block)
    rest = tiles * block - x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)], constant_values=fill)
    return x.reshape(*x.shape[:-1], tiles, block)


def _range(values: jax.Array, where: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    limits = jnp.iinfo(values.dtype)
    least, most = (np.array(x, values.dtype) for x in (limits.min, limits.max))
    low = _cut(jnp.where(where, values, most), block, most).min(axis=-1)
    return low, _cut(jnp.where(where, values, least), block, least).max(axis=-1)
