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
    numbers, lengths = _visits(lists, 1)
    arrays = map(jnp.asarray, (*lists[:3], numbers[:, :, None], lengths[..., None]))
    order, full, seen, visits, counts = arrays
    return TileLists(order, full, seen, visits, visit_counts=counts)


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
    numbers, lengths = _visits(lists, heads)
    return VisitLists(jnp.asarray(numbers), lengths.max(), packing)


def _visits(
    lists: TileLists, heads: int
) -> tuple[Array, Array]:  # i32[B or 1, N or 1 // heads, visits], i32[B or 1, N or 1 // heads]
    """Return all visits in encoded form, and the length of each list of visits.

    They are NumPy arrays if the lists are NumPy arrays.
    """
    B, N, rows, columns = lists.order.shape
    number, lines = N // heads, rows * heads
    # [B, N, rows, ..] -> [B, number, lines, ..]
    split = (x.reshape(B, number, heads, rows, *x.shape[3:]).swapaxes(2, 3) for x in lists[:3])
    order, full, seen = (x.reshape(B, number, lines, *x.shape[4:]) for x in split)
    line = np.arange(lines, dtype=np.int32)[None, None, :, None]
    xp: ModuleType = np if isinstance(seen, np.ndarray) else jnp
    # an empty row has one visit, by its first head
    counts = xp.maximum(seen, (line % heads == 0)[..., 0].astype(np.int32))
    lengths = counts.sum(axis=-1, dtype=np.int32)
    at = np.arange(columns, dtype=np.int32)[None, None, None]
    classes = (at < full[..., None]) * (FULL - PARTIAL) + (at < seen[..., None]) * PARTIAL
    packed = Packing(heads, columns).pack(line // heads, line % heads, order, classes)
    packed = packed.reshape(B * number, lines * columns).astype(np.int32)
    counts = counts.reshape(B * number, lines)  # length of each line

    # Concatenate the beginnings of all lines. Past its end, a list repeats its last visit with
    # class 0, so that the pipeline does not load any other tiles.
    if isinstance(packed, np.ndarray):
        valid = (np.arange(columns) < counts[..., None]).reshape(packed.shape)
        total = valid.sum(axis=1, keepdims=True)
        turn = np.arange(packed.shape[1])[None]
        first = np.argsort(~valid, axis=1, stable=True)
        chosen = np.take_along_axis(first, np.minimum(turn, total - 1), axis=1)
        listed = np.take_along_axis(packed, chosen, axis=1)
        listed = np.where(turn < total, listed, listed & ~3)
        return listed.reshape(B, number, lines * columns), lengths
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
    found = jnp.where(step < totals, found, found & ~3)
    return found.reshape(B, number, lines * columns), lengths
