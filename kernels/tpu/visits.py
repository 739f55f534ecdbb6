"""Flatten the lists of tiles into lists of visits: one axis of a grid, and no step without a tile.

A grid with an axis for rows and one for places in a row's list is as long in each row as in the
longest one: 128 steps for the 72 tiles of a causal mask at S 8192. A list of visits names the tiles
of all rows one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.kernels.contract import FULL, PARTIAL, Array, TileLists

COMPARISONS = 2**20  # of numbers: from so many on, a binary search finds the row of a visit


class Visit(NamedTuple):
    """One tile to visit; the class is 0 where a row, or the end of a list, has none."""

    row: jax.Array
    head: jax.Array  # of the group that shares a list
    column: jax.Array
    tile_class: jax.Array


@dataclass(frozen=True)
class Packing:
    """A visit as one number: row, head, column and class, the highest bits first."""

    heads: int
    columns: int

    @property
    def _shifts(self) -> tuple[int, int]:
        head = (self.columns - 1).bit_length() + 2
        return head + (self.heads - 1).bit_length(), head

    def pack(self, row: Array, head: Array, column: Array, tile_class: Array) -> Array:
        """Return the number of a visit."""
        rows, heads = self._shifts
        return row << rows | head << heads | column << 2 | tile_class

    def row(self, number: jax.Array) -> jax.Array:
        """Return the row of a visit."""
        return number >> self._shifts[0]

    def tile(self, number: jax.Array) -> jax.Array:
        """Return what two visits have in common that are of the same tile of the same head."""
        return number >> 2

    def unpack(self, number: jax.Array) -> Visit:
        """Return the visit of a number."""
        row, head = self._shifts
        low = lambda shift, end: (number >> shift) & ((1 << end - shift) - 1)  # noqa: E731
        return Visit(number >> row, low(head, row), low(2, head), number & 3)


class VisitLists(NamedTuple):
    """The visits of every list; after its own, a list repeats the last one as class 0."""

    numbers: jax.Array  # i32[B or 1, lists, visits]
    longest: jax.Array  # i32[]: how many visits the longest list has
    packing: Packing


def prepare(lists: TileLists) -> TileLists:
    """Return tile lists with their visits; what is known when tracing is made of constants."""
    if not any(isinstance(x, jax.core.Tracer) for x in lists):
        # then everything below is NumPy's, and becomes constants
        known: Any = map(np.asarray, lists[:3])
        lists = TileLists(*known)
    numbers = _numbers(lists, 1)[:, :, None]
    counts = _counts(lists, 1).sum(axis=-1, keepdims=True, dtype=np.int32)
    order, full, seen = map(jnp.asarray, lists[:3])
    return TileLists(order, full, seen, jnp.asarray(numbers), visit_counts=jnp.asarray(counts))


def flatten(lists: TileLists, group: int = 1) -> VisitLists:
    """Return the visits of tile lists, row by row, in the order of each row's list.

    Where each head has lists of its own, `group` neighbours share one of visits: in every row the
    visits of one head, then those of the next. A row without tiles is visited once, as class 0.
    """
    heads = group if lists.order.shape[1] > 1 else 1
    packing = Packing(heads, lists.order.shape[3])
    # `prepare` made these with the plan; heads that share a list of visits need another one
    if lists.visits is not None and lists.visit_counts is not None and heads == 1:
        return VisitLists(lists.visits[:, :, 0], lists.visit_counts.max(), packing)
    longest = _counts(lists, heads).sum(axis=-1, dtype=np.int32).max()
    return VisitLists(jnp.asarray(_numbers(lists, heads)), longest, packing)


def _by_row(
    x: jax.Array, heads: int
) -> jax.Array:  # [B, N, rows, ..] -> [B, N // heads, rows * heads, ..]
    B, N, rows, *rest = x.shape
    grouped = x.reshape(B, N // heads, heads, rows, *rest).swapaxes(2, 3)
    return grouped.reshape(B, N // heads, rows * heads, *rest)


def _counts(lists: TileLists, heads: int) -> jax.Array:  # i32[.., rows * heads]
    """Return how many visits each row of each head has; the first head at least one."""
    seen = _by_row(lists.seen, heads)
    at_least = np.arange(seen.shape[2], dtype=np.int32) % heads == 0
    xp: ModuleType = np if isinstance(seen, np.ndarray) else jnp
    return xp.maximum(seen, at_least.astype(np.int32)[None, None])


def _numbers(lists: TileLists, heads: int) -> Array:  # i32[B or 1, N or 1 // heads, visits]
    """Return all visits, as numbers; NumPy's arrays give NumPy's."""
    order, full, seen = (_by_row(x, heads) for x in lists[:3])
    B, number, lines, columns = order.shape
    line = np.arange(lines, dtype=np.int32)[None, None, :, None]
    at = np.arange(columns, dtype=np.int32)[None, None, None]
    classes = (at < full[..., None]) * (FULL - PARTIAL) + (at < seen[..., None]) * PARTIAL
    packed = Packing(heads, columns).pack(line // heads, line % heads, order, classes)
    packed = packed.reshape(B * number, lines * columns).astype(np.int32)
    counts = _counts(lists, heads).reshape(B * number, lines)  # of each line, how many come first

    # now the first numbers of all lines side by side. After its own visits a list repeats the last
    # one, as class 0, so that the pipeline loads nothing new
    if isinstance(packed, np.ndarray):
        valid = (np.arange(columns) < counts[..., None]).reshape(packed.shape)
        many = valid.sum(axis=1, keepdims=True)
        turn = np.arange(packed.shape[1])[None]
        first = np.argsort(~valid, axis=1, stable=True)
        chosen = np.take_along_axis(first, np.minimum(turn, many - 1), axis=1)
        listed = np.take_along_axis(packed, chosen, axis=1)
        return np.where(turn < many, listed, listed & ~3).reshape(B, number, lines * columns)
    ends = jnp.cumsum(counts, axis=1, dtype=np.int32)
    totals = ends[:, -1:]
    step = jnp.arange(packed.shape[1], dtype=np.int32)[None]
    place = jnp.minimum(step, totals - 1)
    # no sort: comparing with every line is one pass, and a binary search pays from many on
    search = "compare_all"
    if packed.shape[1] * counts.shape[1] > COMPARISONS:
        search = "scan_unrolled"
    row = jax.vmap(lambda end, at: jnp.searchsorted(end, at, side="right", method=search))(
        ends, place
    ).astype(np.int32)
    starts = jnp.take_along_axis(ends - counts, row, axis=1)
    found = jnp.take_along_axis(packed, row * columns + place - starts, axis=1)
    return jnp.where(step < totals, found, found & ~3).reshape(B, number, lines * columns)
