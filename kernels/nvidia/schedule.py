"""Share the work out: rows of tiles to items, tiles to steps."""

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

TURNS = 4  # parts of keys that a program takes, about: so many that rows of all lengths share well
LEVELS = 8  # of how heavy an item is; few keep heads together, many share the work out evenly

Carry = TypeVar("Carry")


def prepare(lists: TileLists) -> TileLists:
    """Return tile lists with the order of their rows, those of most tiles first.

    What is known when tracing is made of constants, else it takes comparisons, and no sort.
    """
    # heavy rows first, so that the programs share the work evenly; constants where known
    if not isinstance(lists.seen, jax.core.Tracer):
        order = np.argsort(-np.asarray(lists.seen), axis=-1, kind="stable")
        return lists._replace(rows=jnp.asarray(order, i32))
    # comparisons instead of a sort, which is a dozen kernels of its own on a GPU
    this, other = lists.seen[..., :, None], lists.seen[..., None, :]
    index = jnp.arange(lists.seen.shape[-1], dtype=i32)[None, None, None]
    down = index.swapaxes(-1, -2)
    place = ((other > this) | ((other == this) & (index < down))).sum(axis=-1, dtype=i32)
    rows = jnp.where(place[..., None, :] == down, index, 0).sum(axis=-1, dtype=i32)
    return lists._replace(rows=rows)


class Items(NamedTuple):
    """The items of a kernel: every row of tiles of every batch row and head."""

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

        Rows are taken in `LEVELS` parts of each list's own order. Within a part heads follow one
        another, so that programs which run together read few heads, which the cache holds. Of a
        `group` of heads the list of the first one counts.
        """
        b, head, turn = self.turn(item)
        return b, head, at(lists.rows, b, head * group, turn)[...]

    def turn(self, item: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return batch row and head of an item, and the place of its row in its list's order."""
        part = -(-self.rows // LEVELS)
        level, rest = (f(item, i32(self.batch * self.heads * part)) for f in (lax.div, lax.rem))
        here = i32(part) if self.rows % part == 0 else jnp.minimum(part, self.rows - level * part)
        owner, turn = lax.div(rest, here), level * part + lax.rem(rest, here)
        return owner // self.heads, owner % self.heads, turn


def query_items(operands: Operands, blocks: Blocks) -> Items:
    """Return the items of a kernel whose rows are tiles of queries."""
    B, T, N, _ = operands.query.shape
    return Items(B, N, T // blocks.q)


def key_items(operands: Operands, blocks: Blocks) -> Items:
    """Return the items of a kernel whose rows are tiles of keys."""
    B, S, K, _ = operands.key.shape
    return Items(B, K, S // blocks.k)


def key_parts(heads: int, tiles: int, programs: int) -> int:
    """Return into how many parts the keys of each batch row and key head are divided.

    The last turn of the programs is then as full as it can be.
    """

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
    # both loops count from 0: what is read of memory varies over a mesh, what is computed of it
    # does not, and a loop's counter must stay of one type
    carry = lax.fori_loop(0, full, functools.partial(body, partial=False), carry)
    partial = functools.partial(body, partial=True)
    return lax.fori_loop(0, seen - full, lambda j, carry: partial(full + j, carry), carry)


def name_of(body: Callable[..., None]) -> str:
    """Return the name of a kernel, which profilers and compilers print."""
    body = body.func if isinstance(body, functools.partial) else body
    return f"attention_{body.__name__.strip('_')}"
