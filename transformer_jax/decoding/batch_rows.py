"""Count, gather, copy, select and write the rows of a decoding state.

Every leaf of a state leads with B. So one set of functions serves caches, recurrent states and
whatever else a step carries: a prompt is forked into many samples, beams are reordered, and a
request takes the row of one that has ended. A `PagedCache`, whose pages are all rows', is refused.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from transformer_jax.cache.model_cache import refuse_pages
from transformer_jax.checks import check_count, check_not_consumed
from transformer_jax.config.keywords import known_keywords
from transformer_jax.sharding import by_compiler, split

State = TypeVar("State")
"""A model's state between tokens: any pytree whose leaves lead with B, such as a `ModelCache`."""


def count_rows(state: State) -> int:
    """Return B, the leading axis that all leaves share.

    ValueError where the state has no leaves, or where they do not lead with one B.
    """
    refuse_pages(state, "decoding by rows of arrays")
    leaves = jax.tree.leaves(state)
    if not leaves:
        raise ValueError("state has no arrays: it has no rows")
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(f"state's leaves lead with {sorted(map(str, sizes))}: must be one B")
    return leaves[0].shape[0]


def gather_rows(state: State, rows: jax.Array) -> State:  # i32[R] -> a state of R rows
    """Return the state whose row r is row `rows[r]` of the given one.

    A row may be taken often, or not at all. An index outside 0..B-1 is clipped to it: under a
    trace it cannot be refused.
    """
    refuse_pages(state, "gather_rows")
    check_not_consumed(state)

    def gather(state: State, rows: jax.Array) -> State:
        # JAX's default fills with NaN what is out of range, which a float cache would keep.
        return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), state)

    return by_compiler(gather, [state, rows], jax.tree.map(split, state))


@known_keywords
def fork(state: State, copies: int) -> State:
    """Copy each row: many samples of one prompt.

    The result has memory of its own, so the given state stays whole when the result is donated:
    `fork(state, 1)` keeps a state that `generate` would consume.

    Args:
        state: of B rows.
        copies: at least 1.

    Returns:
        A state of B * copies rows; the copies of a row stand side by side.

    Raises:
        ValueError: if `copies` is not an integer of at least 1, or above 1 of a cache with pages.
    """
    check_count("copies", copies, 1)
    check_not_consumed(state)
    if copies > 1:
        refuse_pages(state, "fork into several rows")

    def repeat(state: State) -> State:
        # `repeat` of one copy returns its argument: a donated result would take the caller's
        # memory.
        return jax.tree.map(lambda x: jnp.array(jnp.repeat(x, copies, axis=0), copy=True), state)

    return by_compiler(repeat, [state], jax.tree.map(split, state))


def select_rows(
    condition: jax.Array,  # bool[B]
    new: State,
    old: State,
) -> State:
    """Take row b from `new` where `condition[b]`, and from `old` elsewhere."""
    refuse_pages(old, "select_rows")

    def select(x: jax.Array, y: jax.Array) -> jax.Array:
        # `where` broadcasts from the last axis, and the rows are the first.
        return jnp.where(condition.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(select, new, old)


def write_rows(
    state: State,  # B rows
    rows: jax.Array,  # i32[R]
    new: State,  # R rows
) -> State:
    """Write row r of `new` over row `rows[r]`; a row past the end is dropped."""
    refuse_pages(state, "write_rows")

    def write_leaf(rows: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        y = y if y.dtype == x.dtype else y.astype(x.dtype)  # keys of random numbers have no astype
        return x.at[rows].set(y, mode="drop")

    def write(state: State, rows: jax.Array, new: State) -> State:
        return jax.tree.map(partial(write_leaf, rows), state, new)

    return by_compiler(write, [state, rows, new], jax.tree.map(split, state))
