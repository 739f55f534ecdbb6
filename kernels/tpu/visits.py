"""Lists of visits, which are flattened tile lists for a single grid axis without empty steps.

In a grid with one axis for rows and another for tiles, each row has as many steps as the longest
row, such as a total of 128 steps for the 72 tiles of a causal mask at S = 8192. A list of visits
concatenates the tiles of all rows instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.kernels.contract import FULL, PARTIAL, Array, TileLists

COMPARISONS = 2**20  # a binary search finds the row of a visit if more comparisons would be needed


class Visit(NamedTuple):
    """Tile to visit, whose class is 0 for an empty row and past the end of a list."""

    row: jax.Array
    head: jax.Array  # index in the group that shares a list
    column: jax.Array
    tile_class: jax.Array


@dataclass(frozen=True)
class Packing:
    """Encoding of a visit as one number with bits for the row, head, column and class."""

    heads: int
    columns: int

    @property
    def _shifts(self) -> tuple[int, int]:
        head = (self.columns - 1).bit_length() + 2
        return head + (self.heads - 1).bit_length(), head

    def pack(self, row: Array, head: Array, column: Array, tile_class: Array) -> Array:
        rows, heads = self._shifts
        return row << rows | head << heads | column << 2 | tile_class

    def row(self, number: jax.Array) -> jax.Array:
        return number >> self._shifts[0]

    def tile(self, number: jax.Array) -> jax.Array:
        """Return a number that identifies the tile and the head of a visit."""
        return number >> 2

    def unpack(self, number: jax.Array) -> Visit:
        row, head = self._shifts
        low = lambda shift, end: (number >> shift) & ((1 << end - shift) - 1)  # noqa: E731
        return Visit(number >> row, low(head, row), low(2, head), number & 3)


class VisitLists(NamedTuple):
    """Visits of every list. Past its end, a list repeats its last visit with class 0."""

    numbers: jax.Array  # i32[B or 1, lists, visits]
    longest: jax.Array  # i32[]: length of the longest list
    packing: Packing


def prepare(lists: TileLists) -> TileLists:
    """Add the visits to tile lists. Concrete lists become constants in the program."""
    if not any(isinstance(x, jax.core.Tracer) for x in lists):
        # then everything below is in NumPy and becomes constants
        concrete: Any = map(np.asarray, lists[:3])
        lists = TileLists(*concrete)
    numbers = _numbers(lists, 1)[:, :, None]
    counts = _counts(lists, 1).sum(axis=-1, keepdims=True, dtype=np.int32)
    order, full, seen = map(jnp.asarray, lists[:3])
    return TileLists(order, full, seen, jnp.asarray(numbers), visit_counts=jnp.asarray(counts))


def flatten(lists: TileLists, group: int = 1) -> VisitLists:
    """Return the visits of tile lists, row by row, in the order of the list for each row.

    If each head has its own lists, `group` neighboring heads share a list of visits. Each row
    contains the visits of one head, and then the visits of the next head. An empty row has one
    visit of class 0.
    """
    heads = group if lists.order.shape[1] > 1 else 1
    packing = Packing(heads, lists.order.shape[3])
    # `prepare` created these visits with the plan, but a group of heads needs another list
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
    """Return the number of visits per row and head, which is at least one for the first head."""
    seen = _by_row(lists.seen, heads)
    at_least = np.arange(seen.shape[2], dtype=np.int32) % heads == 0
    xp: ModuleType = np if isinstance(seen, np.ndarray) else jnp
    return xp.maximum(seen, at_least.astype(np.int32)[None, None])


def _numbers(lists: TileLists, heads: int) -> Array:  # i32[B or 1, N or 1 // heads, visits]
    """Return all visits in encoded form, as NumPy arrays if the lists are NumPy arrays."""
    order, full, seen = (_by_row(x, heads) for x in lists[:3])
    B, number, lines, columns = order.shape
    line = np.arange(lines, dtype=np.int32)[None, None, :, None]
    at = np.arange(columns, dtype=np.int32)[None, None, None]
    classes = (at < full[..., None]) * (FULL - PARTIAL) + (at < seen[..., None]) * PARTIAL
    packed = Packing(heads, columns).pack(line // heads, line % heads, order, classes)
    packed = packed.reshape(B * number, lines * columns).astype(np.int32)
    counts = _counts(lists, heads).reshape(B * number, lines)  # length of each line

    # Concatenate the beginnings of all lines. Past its end, a list repeats its last visit with
    # class 0, so that the pipeline does not load any other tiles.
    if isinstance(packed, np.ndarray):
        valid = (np.arange(columns) < counts[..., None]).reshape(packed.shape)
        total = valid.sum(axis=1, keepdims=True)
        turn = np.arange(packed.shape[1])[None]
        first = np.argsort(~valid, axis=1, stable=True)
        chosen = np.take_along_axis(first, np.minimum(turn, total - 1), axis=1)
        listed = np.take_along_axis(packed, chosen, axis=1)
        return np.where(turn < total, listed, listed & ~3).reshape(B, number, lines * columns)
    ends = jnp.cumsum(counts, axis=1, dtype=np.int32)
    totals = ends[:, -1:]
    step = jnp.arange(packed.shape[1], dtype=np.int32)[None]
    place = jnp.minimum(step, totals - 1)
    # no sort, because comparing with every line is one pass, and a binary search is faster for many
    # visits
    search = "compare_all"
    if packed.shape[1] * counts.shape[1] > COMPARISONS:
        search = "scan_unrolled"
    row = jax.vmap(lambda end, at: jnp.searchsorted(end, at, side="right", method=search))(
        ends, place
    ).astype(np.int32)
    starts = jnp.take_along_axis(ends - counts, row, axis=1)
    found = jnp.take_along_axis(packed, row * columns + place - starts, axis=1)
    return jnp.where(step < totals, found, found & ~3).reshape(B, number, lines * columns)
