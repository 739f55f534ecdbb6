"""Schedule of the work: rows of tiles to items, tiles to steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transformer_jax.kernels.contract import Blocks, Index, Operands, TileLists
from transformer_jax.kernels.nvidia.memory import at, i32

TURNS = 4  # approximate parts of keys per program: enough to balance rows of all lengths
LEVELS = 8  # of the weight of an item: few keep heads together, many balance the work

Carry = TypeVar("Carry")


def prepare(lists: TileLists) -> TileLists:
    """Add the order of rows to tile lists: rows with the most tiles first."""
    # heavy rows first, so that the work is balanced; constants if the lists are concrete
    if not isinstance(lists.seen, jax.core.Tracer):
        order = np.argsort(-np.asarray(lists.seen), axis=-1, kind="stable")
        return lists._replace(rows=jnp.asarray(order, i32))
    # comparisons instead of a sort, which takes a dozen kernels on a GPU
    this, other = lists.seen[..., :, None], lists.seen[..., None, :]
    index = jnp.arange(lists.seen.shape[-1], dtype=i32)[None, None, None]
    down = index.swapaxes(-1, -2)
    place = ((other > this) | ((other == this) & (index < down))).sum(axis=-1, dtype=i32)
    rows = jnp.where(place[..., None, :] == down, index, 0).sum(axis=-1, dtype=i32)
    return lists._replace(rows=rows)


class Items(NamedTuple):
    """Items of a kernel: every row of tiles, for every batch row and head."""

    batch: int
    heads: int
    rows: int

    @property
    def number(self) -> int:
        return self.batch * self.heads * self.rows

    def at(
        self, lists: TileLists, item: Index, group: int = 1
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return batch row, head and row of an item, roughly the heaviest first.

        Each list's order of rows is divided into `LEVELS` parts. Within a part, items are sorted by
        head, so that concurrent programs read few heads, which fit the cache. A `group` of heads
        uses the list of its first head.
        """
        b, head, turn = self.turn(item)
        return b, head, at(lists.rows, b, head * group, turn)[...]

    def turn(self, item: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return batch row and head of an item, and the place of its row in the list's order."""
        part = -(-self.rows // LEVELS)
        level, rest = (f(item, i32(self.batch * self.heads * part)) for f in (lax.div, lax.rem))
        here = i32(part) if self.rows % part == 0 else jnp.minimum(part, self.rows - level * part)
        list_index, turn = lax.div(rest, here), level * part + lax.rem(rest, here)
        return list_index // self.heads, list_index % self.heads, turn


def query_items(operands: Operands, blocks: Blocks) -> Items:
    """Return the items of a kernel whose rows are tiles of queries."""
    B, T, N, _ = operands.query.shape
    return Items(B, N, T // blocks.q)


def key_items(operands: Operands, blocks: Blocks) -> Items:
    """Return the items of a kernel whose rows are tiles of keys."""
    B, S, K, _ = operands.key.shape
    return Items(B, K, S // blocks.k)


def key_parts(heads: int, tiles: int, programs: int) -> int:
    """Return the number of parts of each batch row and key head that keeps most programs busy."""

    def filled(parts: int) -> float:
        turns = -(-heads * parts // programs)
        return heads * parts / (turns * programs)

    least = max(1, TURNS * programs // heads)
    return min(tiles, max(range(least, 2 * least + 1), key=filled))


def item_index(item: jax.Array, heads: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the batch row, head and row of tiles of an item."""
    return item // (heads * rows), item // rows % heads, item % rows


def each_tile(full: Index, seen: Index, body: Callable[..., Carry], carry: Carry) -> Carry:
    """Run `carry = body(j, carry, partial)` for the tiles of a list, full ones first."""
    # both loops count from 0, because the counter of a loop must not change its type: values read
    # from memory vary over a mesh, and values computed from them do not
    carry = lax.fori_loop(0, full, functools.partial(body, partial=False), carry)
    partial = functools.partial(body, partial=True)
    return lax.fori_loop(0, seen - full, lambda j, carry: partial(full + j, carry), carry)


def name_of(body: Callable[..., None]) -> str:
    """Return the name of a kernel for profilers and compilers."""
    body = body.func if isinstance(body, functools.partial) else body
    return f"attention_{body.__name__.strip('_')}"
