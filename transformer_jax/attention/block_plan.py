"""Classification of the tiles of an attention matrix as skipped, partial or full.

A tile consists of `block_q` queries and `block_k` keys. Bounds on the positions or IDs in a tile
determine whether any or all of its pairs may attend. Kernels visit only tiles with a visible pair,
and apply the mask only in partial tiles.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import INT32
from transformer_jax.kernels.contract import FULL, PARTIAL, SKIPPED, TileLists, tile_lists
from transformer_jax.pytree import AnyArray, Array
from transformer_jax.tracing import eagerly, traced
from transformer_jax.values import value_class

__all__ = ["FULL", "PARTIAL", "SKIPPED", "BlockPlan", "TileLists", "Tiles", "pad", "tile_lists"]


@value_class(arrays=("classes",), static=("block_q", "block_k"))
class BlockPlan:
    """Class of each tile: 0 (skipped), 1 (partial) or 2 (full).

    A skipped tile has no visible pair. A full tile needs no mask: it has no empty slots and does
    not extend beyond S.

    Attributes:
        classes: i8[B or 1, N or 1, nQ, nK].
        block_q: number of queries per tile.
        block_k: number of keys per tile.
    """

    classes: Array  # i8[B or 1, N or 1, nQ, nK]
    block_q: int
    block_k: int

    def padded(self, rows: int, columns: int) -> BlockPlan:
        """Return the plan for a larger grid of tiles, with the added tiles marked as skipped.

        Args:
            rows: number of query tiles (nQ) in the larger grid.
            columns: number of key tiles (nK) in the larger grid.
        """
        classes = pad(pad(self.classes, 2, rows, SKIPPED), 3, columns, SKIPPED)
        return BlockPlan(classes, self.block_q, self.block_k)

    def of_first_queries(self, group: int) -> BlockPlan:
        """Return the plan for the first query tile, shared by the query heads of each key head."""
        lib, first = numpy_or_jax(self.classes), self.classes[:, :, :1]
        if first.shape[1] > 1:
            heads = first.reshape(first.shape[0], -1, group, *first.shape[2:])
            low, high = (f(axis=2, keepdims=True) for f in (heads.min, heads.max))
            # if one head skips a tile and another sees it, both heads must apply the mask
            shared = lib.where(low == high, low, PARTIAL).astype(first.dtype)
            first = lib.broadcast_to(shared, heads.shape).reshape(first.shape)
        return BlockPlan(first, self.block_q, self.block_k)

    def key_tiles(self) -> TileLists:
        """List the key tiles that each query tile visits, [.., nQ, nK], with full tiles first.

        The lists are constants if the classes are not traced.
        """
        if traced(self.classes):
            return tile_lists(self.classes)
        with eagerly(self.classes):
            return jax.device_put(tile_lists(np.asarray(self.classes)))

    def query_tiles(self) -> TileLists:
        """List the query tiles that visit each key tile, [.., nK, nQ], with full tiles first."""
        turned = BlockPlan(self.classes.swapaxes(-1, -2), self.block_k, self.block_q)
        return turned.key_tiles()


@value_class
class Tiles:
    """Positions divided into tiles, with a summary of each tile that ignores empty slots.

    Summaries have the shape [B or 1, N or 1, 1, nK] for keys and [B or 1, N or 1, nQ, 1] for
    queries. NumPy computes the summaries of NumPy arrays, so nothing is compiled.
    """

    q: Array  # i32[B or 1, T]
    k: Array  # i32[B or 1, S]
    block_q: int
    block_k: int

    def range(
        self, side: str, values: Array
    ) -> tuple[Array, Array]:  # of "q" or "k", [B or 1, length] or [B or 1, N, length]
        """Return the smallest and largest values in each tile; low > high if it has no keys."""
        values = values if values.ndim == 3 else values[:, None]
        # ignore empty slots: because of their position, -1, a tile of later keys would not be
        # skipped
        where = np.ones((1, 1, 1), bool) if side == "q" else (self.k >= 0)[:, None]
        axis, block = (-1, self.block_q) if side == "q" else (-2, self.block_k)
        lib, (least, most) = numpy_or_jax(values, where), (INT32.min, INT32.max)
        low = _cut(lib.where(where, values, np.int32(most)), block, most).min(axis=-1)
        high = _cut(lib.where(where, values, np.int32(least)), block, least).max(axis=-1)
        return lib.expand_dims(low, axis), lib.expand_dims(high, axis)

    def pairs(self, visible: Array) -> tuple[Array, Array]:  # bool[B, N, T, S]
        """Return (some, every) for each tile by checking all its pairs."""
        empty = (self.k < 0)[:, None, None, :]

        def reduce(visible: Array, every: bool) -> Array:
            fold = numpy_or_jax(visible).all if every else numpy_or_jax(visible).any
            by_keys = fold(_cut(visible, self.block_k, every), axis=-1)  # [B, N, T, nK]
            by_queries = _cut(by_keys.swapaxes(-1, -2), self.block_q, every)
            return fold(by_queries, axis=-1).swapaxes(-1, -2)

        return reduce(visible & ~empty, False), reduce(visible | empty, True)

    def classes(self, some: Array, every: Array) -> Array:  # i8[.., nQ, nK]
        """Return the class of each tile. Empty slots and the tail beyond S count as hidden."""
        # if the last tile extends beyond S, it is never full
        lib, real = numpy_or_jax(some, every, self.k), _cut(self.k >= 0, self.block_k, False)
        some = some & lib.any(real, axis=-1)[:, None, None, :]
        every = every & lib.all(real, axis=-1)[:, None, None, :]
        result = lib.where(some, lib.where(every, FULL, PARTIAL), SKIPPED).astype(np.int8)
        grid = -(-self.q.shape[1] // self.block_q), real.shape[1]
        rows = max(result.shape[0], self.q.shape[0], self.k.shape[0])
        return lib.broadcast_to(result, (rows, result.shape[1], *grid))


def numpy_or_jax(*arrays: Array) -> ModuleType:
    """Return NumPy if all arrays are NumPy arrays, else `jax.numpy`."""
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


def _cut(x: AnyArray, block: int, fill: float) -> AnyArray:
    """Reshape [..., length] to [..., tiles, block], padding the last tile with `fill`."""
    tiles = -(-x.shape[-1] // block)
    x = pad(x, x.ndim - 1, tiles * block, fill)
    return numpy_or_jax(x).reshape(x, (*x.shape[:-1], tiles, block))


def pad(x: AnyArray, axis: int, length: int, fill: float) -> AnyArray:
    """Pad `x` along `axis` to `length` with `fill`."""
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return numpy_or_jax(x).pad(x, widths, constant_values=fill)
