"""Lists of visits: flattened tile lists, for a single grid axis without empty steps.

A grid with an axis for rows and one for tiles gives each row as many steps as the longest row: 128
steps for the 72 tiles of a causal mask at S 8192. A list of visits concatenates the tiles of all
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.kernels.contract import FULL, PARTIAL, Array, TileLists

COMPARISONS = 2**20  # above this number, a binary search finds the row of a visit


class Visit(NamedTuple):
    """A tile to visit; its class is 0 for an empty row and past the end of a list."""

    row: jax.Array
    head: jax.Array  # in the group that shares a list
    column: jax.Array
    tile_class: jax.Array


@dataclass(frozen=True)
class Packing:
    """Encoding of a visit as one number: row, head, column and class, from the highest bits."""

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
    """The visits of every list; past its end, a list repeats its last visit with class 0."""

    numbers: jax.Array  # i32[B or 1, lists, visits]
    longest: jax.Array  # i32[]: length of the longest list
    packing: Packing


def prepare(lists: TileLists) -> TileLists:
    """Add the visits to tile lists; concrete lists become constants in the program."""
    if not any(isinstance(x, jax.core.Tracer) for x in lists):
        # then everything below is NumPy, and becomes constants
        concrete: Any = map(np.asarray, lists[:3])
        lists = TileLists(*concrete)
    numbers = _numbers(lists, 1)[:, :, None]
    counts = _counts(lists, 1).sum(axis=-1, keepdims=True, dtype=np.int32)
    order, full, seen = map(jnp.asarray, lists[:3])
    return TileLists(order, full, seen, jnp.asarray(numbers), visit_counts=jnp.asarray(counts))


def flatten(lists: TileLists, group: int = 1) -> VisitLists:
    """Return the visits of tile lists, row by row, in the order of each row's list.

    If each head has its own lists, `group` neighbors share a list of visits: each row has the
    visits of one head, then those of the next. An empty row has one visit of class 0.
    """
    heads = group if lists.order.shape[1] > 1 else 1
    packing = Packing(heads, lists.order.shape[3])
    # `prepare` made these with the plan; a group of heads needs another list
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
    """Return the number of visits per row and head; at least one for the first head."""
    seen = _by_row(lists.seen, heads)
    at_least = np.arange(seen.shape[2], dtype=np.int32) % heads == 0
    xp: ModuleType = np if isinstance(seen, np.ndarray) else jnp
    return xp.maximum(seen, at_least.astype(np.int32)[None, None])


def _numbers(lists: TileLists, heads: int) -> Array:  # i32[B or 1, N or 1 // heads, visits]
    """Return all visits, encoded; NumPy arrays return NumPy arrays."""
    order, full, seen = (_by_row(x, heads) for x in lists[:3])
    B, number, lines, columns = order.shape
    line = np.arange(lines, dtype=np.int32)[None, None, :, None]
    at = np.arange(columns, dtype=np.int32)[None, None, None]
    classes = (at < full[..., None]) * (FULL - PARTIAL) + (at < seen[..., None]) * PARTIAL
    packed = Packing(heads, columns).pack(line // heads, line % heads, order, classes)
    packed = packed.reshape(B * number, lines * columns).astype(np.int32)
    counts = _counts(lists, heads).reshape(B * number, lines)  # length of each line

    # concatenate the beginnings of all lines. Past its end a list repeats its last visit with class
    # 0, so that the pipeline loads nothing new
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
    # no sort: comparing with every line is one pass; a binary search is faster for many visits
    search = "compare_all"
    if packed.shape[1] * counts.shape[1] > COMPARISONS:
        search = "scan_unrolled"
    row = jax.vmap(lambda end, at: jnp.searchsorted(end, at, side="right", method=search))(
        ends, place
    ).astype(np.int32)
    starts = jnp.take_along_axis(ends - counts, row, axis=1)
    found = jnp.take_along_axis(packed, row * columns + place - starts, axis=1)
    return jnp.where(step < totals, found, found & ~3).reshape(B, number, lines * columns)
