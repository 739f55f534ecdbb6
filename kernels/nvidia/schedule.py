"""Assignment of rows of tiles to items, and of tiles to steps."""

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

TURNS = 4  # approximate number of parts of keys per program, which balances rows of all lengths
LEVELS = 8  # levels of weights: few keep heads together, many balance the work

Carry = TypeVar("Carry")


def prepare(lists: TileLists) -> TileLists:
    """Add the order of rows to tile lists, with the rows that have the most tiles first."""
    # start with heavy rows to balance the work; the order is constant if the lists are concrete
    if not isinstance(lists.seen, jax.core.Tracer):
        order = np.argsort(-np.asarray(lists.seen), axis=-1, kind="stable")
        return lists._replace(rows=jnp.asarray(order, i32))
    # use comparisons instead of a sort, which needs a dozen kernels on a GPU
    this, other = lists.seen[..., :, None], lists.seen[..., None, :]
    index = jnp.arange(lists.seen.shape[-1], dtype=i32)[None, None, None]
    down = index.swapaxes(-1, -2)
    place = ((other > this) | ((other == this) & (index < down))).sum(axis=-1, dtype=i32)
    rows = jnp.where(place[..., None, :] == down, index, 0).sum(axis=-1, dtype=i32)
    return lists._replace(rows=rows)


class Items(NamedTuple):
    """Items of a kernel, with one item for each row of tiles of each batch row and head."""

    batch: int
    heads: int
    rows: int

    @property
    def number(self) -> int:
        return self.batch * self.heads * self.rows

    def at(
        self, lists: TileLists, item: Index, group: int = 1
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the batch row, the head and the tile row of a work item.

        Items are ordered from heaviest to lightest.

        The order of rows in each list is divided into `LEVELS` parts. Within a part, items are
        sorted by head, so that concurrent programs read only a few heads, which fit in the cache. A
        `group` of heads uses the list of its first head.
        """
        b, head, turn = self.turn(item)
        return b, head, at(lists.rows, b, head * group, turn)[...]

    def turn(self, item: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the batch row, head and place in the list's order of an item."""
        part = -(-self.rows // LEVELS)
        level, rest = (f(item, i32(self.batch * self.heads * part)) for f in (lax.div, lax.rem))
        here = i32(part) if self.rows % part == 0 else jnp.minimum(part, self.rows - level * part)
        list_index, turn = lax.div(rest, here), level * part + lax.rem(rest, here)
        return list_index // self.heads, list_index % self.heads, turn


def query_items(operands: Operands, blocks: Blocks) -> Items:
    """Return the items for a kernel whose rows are tiles of queries."""
    B, T, N, _ = operands.query.shape
    return Items(B, N, T // blocks.q)


def key_items(operands: Operands, blocks: Blocks) -> Items:
    """Return the items for a kernel whose rows are tiles of keys."""
    B, S, K, _ = operands.key.shape
    return Items(B, K, S // blocks.k)


def key_parts(heads: int, tiles: int, programs: int) -> int:
    """Return the number of parts per batch row and key head that keeps most programs busy."""

    def filled(parts: int) -> float:
        turns = -(-heads * parts // programs)
        return heads * parts / (turns * programs)

    least = max(1, TURNS * programs // heads)
    return min(tiles, max(range(least, 2 * least + 1), key=filled))


def item_index(item: jax.Array, heads: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the batch row, head and row of tiles of an item."""
    return item // (heads * rows), item // rows % heads, item % rows


def each_tile(full: Index, seen: Index, body: Callable[..., Carry], carry: Carry) -> Carry:
    """Run `carry = body(j, carry, partial)` for the tiles in a list, starting with full tiles."""
    # Both loops count from 0, because the type of a loop counter must not change. Values read from
    # memory vary over a mesh, but values computed from them do not.
    carry = lax.fori_loop(0, full, functools.partial(body, partial=False), carry)
    partial = functools.partial(body, partial=True)
    return lax.fori_loop(0, seen - full, lambda j, carry: partial(full + j, carry), carry)


def name_of(body: Callable[..., None]) -> str:
    """Return the name of a kernel for profilers and compilers."""
    body = body.func if isinstance(body, functools.partial) else body
    return f"attention_{body.__name__.strip('_')}"
