"""Immutable key/value cache in pages, which rows allocate as they grow and may share.

Block j of row b consists of `page_size` positions, starting at j * page_size, and is stored in page
`block_table[b, j]` (PagedAttention, Kwon et al. 2023). Short rows leave space for long rows, and
rows with a common prefix share its pages. A page is free if no entry of the table refers to it.
There are no reference counts, so no page can leak.

A row writes only to pages that it does not share. It copies a shared page first (copy on write), so
a write never affects another row. Pages are allocated to the rows in order, lowest page first. If
there are not enough free pages for a row, the row is not changed and is marked in `exhausted`.

A paged cache is never a ring: every position below `capacity` has its own slot.
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
from transformer_jax.tracing import concrete_value, traced
from transformer_jax.values import value_class


@value_class(pytree=True, exportable=True)
class PagedCache:
    """Immutable keys and values of all tokens so far, with one pool of pages for all rows.

    Attributes:
        k: [P, page_size, K, H], the keys.
        v: [P, page_size, K, Hv], the values.
        positions: i32[P, page_size], the position stored in each slot; -1 marks an empty slot.
        block_table: i32[B, M], the page of each block of a row; -1 means none.
        length: i32[B], the position of the next token.
        exhausted: bool[B], the rows that ran out of free pages. They accept no tokens until they
            are rewound.
        k_scale: f32[P, page_size, K] if k is int8, else None.
        v_scale: f32[P, page_size, K] if v is int8, else None.
    """

    k: jax.Array  # [P, page_size, K, H]
    v: jax.Array  # [P, page_size, K, Hv]
    positions: jax.Array  # i32[P, page_size]
    block_table: jax.Array  # i32[B, M]
    length: jax.Array  # i32[B]
    exhausted: jax.Array  # bool[B]
    k_scale: jax.Array | None = None  # f32[P, page_size, K] if k is int8
    v_scale: jax.Array | None = None  # f32[P, page_size, K] if v is int8

    @property
    def page_size(self) -> int:
        """Return the number of slots per page."""
        return self.positions.shape[1]

    @property
    def num_pages(self) -> int:
        """Return P, the number of pages in the pool."""
        return self.positions.shape[0]

    @property
    def capacity(self) -> int:
        """Return the maximum length of a row, M * page_size."""
        return self.block_table.shape[1] * self.page_size

    @property
    def free_pages(self) -> jax.Array:  # i32[]
        """Return the number of pages that no row uses."""
        return (_references(self) == 0).sum(dtype=jnp.int32)


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
    """Create an empty cache.

    Args:
        batch: B, the number of rows.
        capacity: the maximum length of a row, a multiple of `page_size`.
        num_kv_heads: K, the number of key/value heads.
        head_dim: H, the size of a key per head.
        value_head_dim: Hv, the size of a value per head; None means H.
        dtype: dtype of keys and values, either int8 or a float of at least 16 bits.
        num_pages: P, the number of pages in the pool.
        page_size: the number of slots per page.

    Raises:
        ValueError: If a size or the dtype is invalid, or if `page_size` does not divide the
            capacity.
    """
    check_count("num_pages", num_pages, 1)
    check_count("page_size", page_size, 1)
    check_count("capacity", capacity, 1)
    check_count("batch", batch, 0)
    if capacity % page_size:
        raise ValueError(f"capacity is {capacity}: must be a multiple of page_size, {page_size}")
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
    """Write token t of row b at its position, and allocate the pages that it needs.

    Args:
        cache: a cache with B rows.
        k: [B, T, K, H], the keys of the new tokens.
        v: [B, T, K, Hv], the values of the new tokens.
        positions: i32[B, T]; tokens at negative positions are padding and are not written.

    Raises:
        ValueError: If there are too few free pages, a position is past the capacity, or a mesh has
            explicit axes. Inside `jit`, a row without enough pages or capacity is not changed and
            is marked in `exhausted` instead.
    """
    check_not_consumed(cache, "cache")
    rows, (_, _, heads, dim) = len(cache.block_table), cache.k.shape
    kv.check_update((rows, heads, dim, cache.v.shape[-1]), k, v, positions)
    positions = as_int32("positions", positions)
    if jax.typeof(cache.k).sharding.mesh.explicit_axes or jax.typeof(k).sharding.mesh.explicit_axes:
        raise ValueError("a PagedCache supports no mesh with explicit axes: use automatic axes")
    if k.shape[1] == 0:
        return cache
    new = _write(cache, kv.as_stored(cache, k, v, positions))
    if traced(new.exhausted, cache.exhausted):
        return new
    # rows that were already exhausted are not a new error; they accept no tokens until rewound
    marked = np.flatnonzero(np.asarray(new.exhausted) & ~np.asarray(cache.exhausted))
    if len(marked):
        row = int(marked[0])
        last, free = int(np.max(np.asarray(positions)[row])), int(cache.free_pages)
        if last >= cache.capacity:
            raise ValueError(
                f"position {last} of row {row} is beyond the capacity {cache.capacity}"
            )
        pool = f"{free} of {cache.num_pages} pages of {cache.page_size} tokens were free"
        raise ValueError(f"row {row} has no page for position {last}: {pool}")
    return new


@jax.jit
def _write(cache: PagedCache, new: kv.KVCache) -> PagedCache:
    """Allocate the pages that new tokens need and write the tokens."""
    positions, size, P = new.positions, cache.page_size, cache.num_pages
    (B, M), T = cache.block_table.shape, positions.shape[1]
    beyond = (positions >= cache.capacity).any(axis=1)
    write = (positions >= 0) & ~(beyond | cache.exhausted)[:, None]

    # Allocate pages: bool[B, M] masks select the blocks to write, and those of them that are new.
    at = jnp.arange(B)[:, None], jnp.where(write, positions // size, M)  # block M does not exist
    touched = jnp.zeros((B, M), bool).at[at].set(True, mode="drop")
    # the last block of a row is also rewritten, because its later slots may contain rewound tokens
    last = jnp.arange(M)[None] == (cache.length // size)[:, None]
    touched |= last & (cache.block_table >= 0) & touched.any(axis=1, keepdims=True)
    references = _references(cache)
    taken = touched & ((cache.block_table < 0) | (references[cache.block_table] > 1))
    order = jnp.cumsum(taken.reshape(-1)).reshape(B, M) - 1
    # pages are allocated to the rows in order, so the last rows are the first to fail
    failed = (taken & (order >= (references == 0).sum())).any(axis=1)
    touched, taken = touched & ~failed[:, None], taken & ~failed[:, None]
    free_first = jnp.argsort(references > 0, stable=True).astype(jnp.int32)
    fresh = free_first[jnp.minimum(order, len(references) - 1)]
    table = jnp.where(taken, fresh, cache.block_table)
    failed |= beyond
    write &= ~failed[:, None]

    # Initialize the new pages as copies of shared pages, or as empty pages. T tokens affect at most
    # T blocks, in addition to the last block of the row.
    blocks = jnp.argsort(~touched, axis=1, stable=True)[:, : min(T + 1, M)]
    pick = partial(jnp.take_along_axis, indices=blocks, axis=1)
    old, page = pick(cache.block_table), jnp.where(pick(touched), pick(table), P)
    copied = pick(taken) & (old >= 0)
    kept = jnp.where((old >= 0)[..., None], cache.positions[old], -1)
    # a freed or reallocated page may still contain later positions
    kept = jnp.where(kept < cache.length[:, None, None], kept, -1)
    arrays = kv.slot_leaves(cache)
    arrays["positions"] = cache.positions.at[page].set(kept, mode="drop")
    if copied.size:
        copied_first = jnp.argsort(~copied.reshape(-1), stable=True)
        source, target = old.reshape(-1)[copied_first], page.reshape(-1)[copied_first]

        # copy page by page, because XLA would change the layout of the pool for a scatter of whole
        # pages
        def copy(i: jax.Array, pages: Tree) -> Tree:
            read = partial(jax.lax.dynamic_index_in_dim, index=source[i])
            write = jax.lax.dynamic_update_index_in_dim
            return jax.tree.map(lambda x: write(x, read(x), target[i], 0), pages)

        contents = {name: x for name, x in arrays.items() if name != "positions"}
        arrays |= jax.lax.fori_loop(0, copied.sum(dtype=jnp.int32), copy, contents)
    cache = replace(cache, block_table=table, **arrays)

    block = jnp.where(write, positions // size, 0)
    # page P does not exist, so the scatter drops writes to it
    page = jnp.where(write, jnp.take_along_axis(table, block, axis=1), P)
    written = jax.tree.map(
        lambda x, token: x.at[page, positions % size].set(token, mode="drop"),
        kv.slot_leaves(cache),
        kv.slot_leaves(new),
    )
    newest = jnp.where(write, positions, -1).max(axis=1)
    length = jnp.maximum(cache.length, newest + 1)
    return replace(cache, **written, length=length, exhausted=cache.exhausted | failed)


def gather_pages(cache: PagedCache) -> kv.KVCache:
    """Copy the pages of each row to a full cache of `capacity` slots, with position p in slot p.

    Attention can also read the pools without this copy if you pass `block_table` and
    `gather_positions`.
    """
    gathered = jax.tree.map(lambda x: rows_of_pages(x, cache.block_table), kv.slot_leaves(cache))
    return kv.KVCache(**gathered | {"positions": gather_positions(cache)}, length=cache.length)


def gather_positions(cache: PagedCache) -> jax.Array:  # i32[B, capacity]
    """Return the position stored in each slot of a row, or -1 if the slot is empty."""
    positions = rows_of_pages(cache.positions, cache.block_table)
    allocated = jnp.repeat(cache.block_table >= 0, cache.page_size, axis=1)
    return jnp.where(allocated & (positions < cache.length[:, None]), positions, -1)


def share(
    cache: PagedCache,
    rows: jax.Array,  # i32[R]
    length: jax.Array | None = None,  # i32[R]
) -> PagedCache:
    """Return a cache with R rows. Each row shares a prefix with a row of this cache.

    Use this function to fork, reorder or rewind rows, or to share a prefix. A length of 0 frees the
    pages of a finished row. Nothing is copied: the rows refer to the same pages, and the result
    shares the arrays of this cache. If you donate one of the two caches, both are consumed. To copy
    the arrays, use `fork(cache, 1)`.

    Args:
        cache: a cache with B rows.
        rows: i32[R], the row to share for each new row, from 0 to B - 1. Traced values are clipped.
        length: i32[R], the number of tokens that each new row shares; None means all.

    Raises:
        ValueError: If `rows` or `length` is not an integer array [R], or if a known row is out of
            range.
    """
    check_not_consumed(cache, "cache")
    rows = jnp.asarray(rows)
    if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}: must be integers [R]")
    count = len(cache.block_table)
    known = concrete_value(rows)
    if known is not None and not ((known >= 0) & (known < count)).all():
        raise ValueError(f"rows are {known.tolist()}: must be from 0 to {count - 1}")
    rows = jnp.clip(rows, 0, count - 1)
    old_length, exhausted = cache.length[rows], cache.exhausted[rows]
    length = old_length if length is None else jnp.asarray(length)
    if length.shape != rows.shape or not jnp.issubdtype(length.dtype, jnp.integer):
        shape = f"{length.dtype}{list(length.shape)}"
        raise ValueError(f"length is {shape}: must be integers {list(rows.shape)}")
    # a row that drops tokens or starts empty may continue
    if length is not old_length:
        exhausted &= (length >= old_length) & (length > 0)
    length = jnp.clip(length.astype(jnp.int32), 0, old_length)
    blocks = -(-length // cache.page_size)
    kept = jnp.arange(cache.block_table.shape[1])[None] < blocks[:, None]
    return replace(
        cache,
        block_table=jnp.where(kept, cache.block_table[rows], -1),
        length=length,
        exhausted=exhausted,
    )


def rewind(
    cache: PagedCache,
    length: jax.Array,  # i32[B]
) -> PagedCache:
    """Drop all positions >= length[b] and free the pages that become unused.

    An exhausted row may continue if at least one of its tokens is dropped or if its length is 0.

    Args:
        cache: a cache with B rows.
        length: i32[B], the number of tokens to keep in each row.

    Raises:
        ValueError: If `length` is not an integer array [B].
    """
    return share(cache, jnp.arange(len(cache.block_table)), length)


def count_needed(
    cache: PagedCache,
    length: jax.Array,  # i32[B]
) -> jax.Array:  # i32[]
    """Return the total number of free pages needed for each row b to grow to length[b]."""
    table, at = cache.block_table, jnp.arange(cache.block_table.shape[1])[None]
    # The block of the next token may already have a page, but a shared page is copied before a
    # write.
    first = (cache.length // cache.page_size)[:, None]
    written = (at >= first) & (at < (-(-length // cache.page_size))[:, None])
    unshared = (table >= 0) & (_references(cache)[table] == 1)
    return (written & ~unshared).sum(dtype=jnp.int32)


def _references(cache: PagedCache) -> jax.Array:  # i32[P]
    """Return the number of blocks, over all rows, that are stored in each page."""
    # Page P does not exist, so the scatter drops empty blocks.
    pages = jnp.where(cache.block_table < 0, cache.num_pages, cache.block_table)
    return jnp.zeros(cache.num_pages, jnp.int32).at[pages].add(1, mode="drop")
