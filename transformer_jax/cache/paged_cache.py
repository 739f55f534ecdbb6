"""Keep keys and values in pages, which rows take as they grow and may share: a frozen value.

Block j of a row, its positions from j * page_size on, lies in page `block_table[b, j]`
(PagedAttention, Kwon et al. 2023). So short rows leave their room to long ones, and rows that begin
alike name the same pages. A page that no row names is free: the table alone says so, nothing is
counted, and nothing can leak.

A row writes only to pages that are its own. It takes a copy of a shared one first (copy on write),
so that a write never shows in another row. Pages are handed out in the order of the rows, the first
free one first. A row that finds too few of them is left as it was, and marked in `exhausted`.

Nothing turns as in a ring: every position of a row has its slot, and `capacity` is the last one's
end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache import kv_cache as kv
from transformer_jax.checks import as_int32, check_count, check_not_consumed
from transformer_jax.kernels.caches import rows_of_pages
from transformer_jax.pytree import Tree
from transformer_jax.tracing import known_value, traced
from transformer_jax.values import value_class


@value_class(pytree=True, exportable=True)
class PagedCache:
    """Hold keys and values of the tokens so far, of all rows in one pool of pages.

    Attributes:
        k: [P, page_size, K, H], the keys.
        v: [P, page_size, K, Hv], the values.
        positions: i32[P, page_size], the position that each slot holds; -1 marks an empty slot.
        block_table: i32[B, M], the page of each block of a row; -1 is none.
        length: i32[B], the position of the next token.
        exhausted: bool[B], rows that found no free page, and take nothing until they are rewound.
        k_scale: f32[P, page_size, K] where k is int8, else None.
        v_scale: f32[P, page_size, K] where v is int8, else None.
    """

    k: jax.Array  # [P, page_size, K, H]
    v: jax.Array  # [P, page_size, K, Hv]
    positions: jax.Array  # i32[P, page_size]
    block_table: jax.Array  # i32[B, M]
    length: jax.Array  # i32[B]
    exhausted: jax.Array  # bool[B]
    k_scale: jax.Array | None = None  # f32[P, page_size, K] where k is int8
    v_scale: jax.Array | None = None  # f32[P, page_size, K] where v is int8

    @property
    def page_size(self) -> int:
        """Return the slots of a page."""
        return self.positions.shape[1]

    @property
    def num_pages(self) -> int:
        """Return the pages of all rows together (P)."""
        return self.positions.shape[0]

    @property
    def capacity(self) -> int:
        """Return the most positions of a row (M * page_size)."""
        return self.block_table.shape[1] * self.page_size

    @property
    def free_pages(self) -> jax.Array:  # i32[]
        """Return how many pages no row names."""
        return (_named(self) == 0).sum(dtype=jnp.int32)


def init(
    batch: int,
    capacity: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    num_pages: int,
    page_size: int = 128,
) -> PagedCache:
    """Make an empty cache.

    Args:
        batch: B, rows.
        capacity: the most positions of a row, a multiple of `page_size`.
        num_kv_heads: K.
        head_dim: H.
        value_head_dim: Hv; None is H.
        dtype: of keys and values: int8, or floating with 16 bits or more.
        num_pages: P, pages of all rows together.
        page_size: slots of a page.

    Raises:
        ValueError: if a size or the dtype cannot be, or `page_size` does not divide the capacity.
    """
    check_count("num_pages", num_pages, 1)
    check_count("page_size", page_size, 1)
    check_count("capacity", capacity, 1)
    check_count("batch", batch, 0)
    if capacity % page_size:
        raise ValueError(f"capacity is {capacity}: must be a multiple of page_size {page_size}")
    pool = kv.init(num_pages, page_size, num_kv_heads, head_dim, value_head_dim, dtype)
    return PagedCache(
        **kv.slot_leaves(pool),
        block_table=jnp.full((batch, capacity // page_size), -1, jnp.int32),
        length=jnp.zeros(batch, jnp.int32),
        exhausted=jnp.zeros(batch, bool),
    )


def update(
    cache: PagedCache,
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    positions: jax.Array,  # i32[B, T]
) -> PagedCache:
    """Write token t of row b at its position, into a page that is taken where there is none.

    Args:
        cache: of B rows.
        k: [B, T, K, H], the new tokens' keys.
        v: [B, T, K, Hv], their values.
        positions: i32[B, T]; a negative position is padding and is not written.

    Raises:
        ValueError: if it is known that too few pages are free or a position is past the capacity
            (under a trace such a row is left as it was, and marked in `exhausted`), or if axes of a
            mesh are explicit.
    """
    check_not_consumed(cache, "cache")
    rows, (_, _, heads, dim) = len(cache.block_table), cache.k.shape
    kv.check_update((rows, heads, dim, cache.v.shape[-1]), k, v, positions)
    positions = as_int32("positions", positions)
    if jax.typeof(cache.k).sharding.mesh.explicit_axes or jax.typeof(k).sharding.mesh.explicit_axes:
        raise ValueError("a PagedCache takes no mesh with explicit axes: give it automatic ones")
    if k.shape[1] == 0:
        return cache
    new = _write(cache, kv.held(cache, k, v, positions))
    if traced(new.exhausted, cache.exhausted):
        return new
    # a row that was marked before goes on in silence: it takes nothing until it is rewound
    marked = np.flatnonzero(np.asarray(new.exhausted) & ~np.asarray(cache.exhausted))
    if len(marked):
        row = int(marked[0])
        last, free = int(np.max(np.asarray(positions)[row])), int(cache.free_pages)
        if last >= cache.capacity:
            raise ValueError(f"position {last} of row {row} is past the capacity {cache.capacity}")
        pool = f"{free} of {cache.num_pages} pages of {cache.page_size} tokens were free"
        raise ValueError(f"row {row} finds no page for position {last}: {pool}")
    return new


@jax.jit
def _write(cache: PagedCache, new: kv.KVCache) -> PagedCache:
    """Take the pages that new tokens need, and write them."""
    positions, size, P = new.positions, cache.page_size, cache.num_pages
    beyond = (positions >= cache.capacity).any(axis=1)
    inside = (positions >= 0) & ~(beyond | cache.exhausted)[:, None]
    table, touched, taken, failed = _take_pages(cache, jnp.where(inside, positions // size, -1))
    failed |= beyond
    inside &= ~failed[:, None]
    cache = _prepare_pages(
        replace(cache, block_table=table), cache, touched, taken, inside.shape[1]
    )

    block = jnp.where(inside, positions // size, 0)
    # page P does not exist: a scatter drops what is written there
    page = jnp.where(inside, jnp.take_along_axis(table, block, axis=1), P)
    written = jax.tree.map(
        lambda x, token: x.at[page, positions % size].set(token, mode="drop"),
        kv.slot_leaves(cache),
        kv.slot_leaves(new),
    )
    newest = jnp.where(inside, positions, -1).max(axis=1)
    length = jnp.maximum(cache.length, newest + 1)
    return replace(cache, **written, length=length, exhausted=cache.exhausted | failed)


def _take_pages(
    cache: PagedCache,
    block: jax.Array,  # i32[B, T], of each new token; -1 is none
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return a table with the pages that are taken, and which blocks and rows that concerns.

    They are the table i32[B, M], the blocks that are written to and those of them with another page
    than before, bool[B, M] both, and the rows that find too few, bool[B].
    """
    table, (B, M) = cache.block_table, cache.block_table.shape
    at = jnp.arange(B)[:, None], jnp.where(block < 0, M, block)
    touched = jnp.zeros((B, M), bool).at[at].set(True, mode="drop")
    # in the block where the row ends, later slots may hold what was taken back
    last = jnp.arange(M)[None] == (cache.length // cache.page_size)[:, None]
    touched |= last & (table >= 0) & touched.any(axis=1, keepdims=True)
    named = _named(cache)
    taken = touched & ((table < 0) | (named[table] > 1))
    turn = jnp.cumsum(taken.reshape(-1)).reshape(B, M) - 1
    # pages are handed out in the order of the rows, so a later row finds too few first
    failed = (taken & (turn >= (named == 0).sum())).any(axis=1)
    kept = ~failed[:, None]
    # a page is free if no table names it: nothing is counted, so nothing can leak
    free_first = jnp.argsort(named > 0, stable=True).astype(jnp.int32)
    page = free_first[jnp.minimum(turn, len(named) - 1)]
    return jnp.where(taken & kept, page, table), touched & kept, taken & kept, failed


def _prepare_pages(
    cache: PagedCache,  # with the new table
    before: PagedCache,
    touched: jax.Array,  # bool[B, M]
    taken: jax.Array,  # bool[B, M]
    T: int,
) -> PagedCache:
    """Make the pages that are written to each row's own: copies of shared ones, or empty."""
    # a row of T tokens touches few blocks: those of the tokens, and the one where it ends
    M, P = touched.shape[1], cache.num_pages
    blocks = jnp.argsort(~touched, axis=1, stable=True)[:, : min(T + 1, M)]
    pick = partial(jnp.take_along_axis, indices=blocks, axis=1)
    old, page = pick(before.block_table), pick(cache.block_table)
    page = jnp.where(pick(touched), page, P)
    copied = pick(taken) & (old >= 0)
    positions = jnp.where((old >= 0)[..., None], before.positions[old], -1)
    # a page that was taken back, or given to another row, may still hold later positions
    positions = jnp.where(positions < before.length[:, None, None], positions, -1)
    arrays = kv.slot_leaves(cache)
    arrays["positions"] = cache.positions.at[page].set(positions, mode="drop")

    if copied.size == 0:
        return replace(cache, **arrays)
    first = jnp.argsort(~copied.reshape(-1), stable=True)  # those that are copied
    source, target = old.reshape(-1)[first], page.reshape(-1)[first]

    # page by page: for a scatter of whole pages XLA would choose another layout of the pool
    def copy(i: jax.Array, pages: Tree) -> Tree:
        read = partial(jax.lax.dynamic_index_in_dim, index=source[i])
        write = jax.lax.dynamic_update_index_in_dim
        return jax.tree.map(lambda x: write(x, read(x), target[i], 0), pages)

    contents = {name: x for name, x in arrays.items() if name != "positions"}
    contents = jax.lax.fori_loop(0, copied.sum(dtype=jnp.int32), copy, contents)
    return replace(cache, **(arrays | contents))


def gather_pages(cache: PagedCache) -> kv.KVCache:
    """Return the rows one after the other: a full cache of `capacity` slots, which is a copy.

    Slot p holds position p. `cache.read` returns its keys and values as attention takes them, which
    also takes the pools themselves with the block table, and `gather_positions`.
    """
    gathered = jax.tree.map(lambda x: rows_of_pages(x, cache.block_table), kv.slot_leaves(cache))
    return kv.KVCache(**gathered | {"positions": gather_positions(cache)}, length=cache.length)


def gather_positions(cache: PagedCache) -> jax.Array:  # i32[B, capacity]
    """Return the position that each slot of a row holds; -1 where it is empty."""
    positions = rows_of_pages(cache.positions, cache.block_table)
    there = jnp.repeat(cache.block_table >= 0, cache.page_size, axis=1)
    return jnp.where(there & (positions < cache.length[:, None]), positions, -1)


def share(
    cache: PagedCache,
    rows: jax.Array,  # i32[R]
    length: jax.Array | None = None,  # i32[R]
) -> PagedCache:
    """Return the cache of R rows, each of which begins as a row of the given one does.

    It forks a row, reorders rows, lets a row begin with the prefix of another, takes tokens back,
    and with a length of 0 frees the pages of a row that has ended. Nothing is copied: the rows name
    the same pages, and the result has the given cache's arrays, so what is donated with one of them
    is gone for both (`fork(cache, 1)` has arrays of its own).

    Args:
        cache: of B rows.
        rows: i32[R], from 0 to B - 1; traced ones are clipped.
        length: i32[R]: new row r has the first `length[r]` tokens of row `rows[r]`; None is all.

    Raises:
        ValueError: if `rows` or `length` are not integers [R], or a known row is none.
    """
    check_not_consumed(cache, "cache")
    rows = jnp.asarray(rows)
    if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}: must be integers [R]")
    count = len(cache.block_table)
    known = known_value(rows)
    if known is not None and not ((known >= 0) & (known < count)).all():
        raise ValueError(f"rows are {known.tolist()}: must be in 0..{count - 1}")
    rows = jnp.clip(rows, 0, count - 1)
    held, exhausted = cache.length[rows], cache.exhausted[rows]
    length = held if length is None else jnp.asarray(length)
    if length.shape != rows.shape or not jnp.issubdtype(length.dtype, jnp.integer):
        given = f"{length.dtype}{list(length.shape)}"
        raise ValueError(f"length is {given}: must be integers {list(rows.shape)}")
    # a row that takes tokens back, or begins anew, may go on
    if length is not held:
        exhausted &= (length >= held) & (length > 0)
    length = jnp.clip(length.astype(jnp.int32), 0, held)
    blocks = -(-length // cache.page_size)
    named = jnp.arange(cache.block_table.shape[1])[None] < blocks[:, None]
    return replace(
        cache,
        block_table=jnp.where(named, cache.block_table[rows], -1),
        length=length,
        exhausted=exhausted,
    )


def rewind(
    cache: PagedCache,
    length: jax.Array,  # i32[B]
) -> PagedCache:
    """Forget every position >= length[b]; pages that hold nothing else are free.

    A row that found no free page may go on if it forgets something, or all (a length of 0).

    Args:
        cache: of B rows.
        length: i32[B], tokens that stay of each row.

    Raises:
        ValueError: if `length` is not integers [B].
    """
    return share(cache, jnp.arange(len(cache.block_table)), length)


def count_needed(
    cache: PagedCache,
    length: jax.Array,  # i32[B]
) -> jax.Array:  # i32[]
    """Return how many free pages rows take until they hold positions below length[b].

    Args:
        cache: of B rows.
        length: i32[B].
    """
    table, at = cache.block_table, jnp.arange(cache.block_table.shape[1])[None]
    first = (cache.length // cache.page_size)[:, None]
    written = (at >= first) & (at < (-(-length // cache.page_size))[:, None])
    own = (table >= 0) & (_named(cache)[table] == 1)
    return (written & ~own).sum(dtype=jnp.int32)


def _named(cache: PagedCache) -> jax.Array:  # i32[P]
    """Return how many blocks of all rows lie in each page."""
    pages = jnp.where(cache.block_table < 0, cache.num_pages, cache.block_table)
    return jnp.zeros(cache.num_pages, jnp.int32).at[pages].add(1, mode="drop")
