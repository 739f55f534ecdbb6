"""Operations that count, gather, fork, select and write the rows of a decoding state.

The first axis of every leaf is B, so the same functions support caches, recurrent states and any
other state of a step. They fork a prompt into many samples, reorder beams, and reuse the row of a
finished request. They do not support a `PagedCache`, because its rows share their pages.
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
"""State of a model between tokens: a pytree whose leaves start with axis B, as in `ModelCache`."""


def count_rows(state: State) -> int:
    """Return B, the size of the first axis. Raise ValueError if leaves differ or none exist."""
    refuse_pages(state, "decoding by rows of arrays")
    leaves = jax.tree.leaves(state)
    if not leaves:
        raise ValueError("state has no arrays and therefore no rows")
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            f"the first axes of the state's leaves are {sorted(map(str, sizes))}: must be equal"
        )
    return leaves[0].shape[0]


def gather_rows(state: State, rows: jax.Array) -> State:  # i32[R] -> a state with R rows
    """Return a state whose row r is row `rows[r]` of `state`.

    Indices may repeat. An index outside 0..B-1 is clipped, because a traced index cannot raise an
    error.
    """
    refuse_pages(state, "gather_rows")
    check_not_consumed(state)

    def gather(state: State, rows: jax.Array) -> State:
        # By default, JAX fills rows that are out of range with NaN, which would remain in a float
        # cache.
        return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), state)

    return by_compiler(gather, [state, rows], jax.tree.map(split, state))


@known_keywords
def fork(state: State, copies: int) -> State:
    """Copy each row, for example to draw many samples from one prompt.

    The copies do not share memory with `state`, which remains valid if the result is donated. To
    keep a state that `generate` would consume, pass `fork(state, 1)` instead.

    Args:
        state: the state to copy, with B rows.
        copies: number of copies of each row, at least 1.

    Returns:
        A state with B * copies rows. The copies of each row are adjacent.

    Raises:
        ValueError: If `copies` is not an integer of at least 1, or if it is above 1 for a paged
            cache.
    """
    check_count("copies", copies, 1)
    check_not_consumed(state)
    if copies > 1:
        refuse_pages(state, "fork into several rows")

    def repeat(state: State) -> State:
        # For one copy, `jnp.repeat` returns its argument, and donating it would free the caller's
        # array.
        return jax.tree.map(lambda x: jnp.array(jnp.repeat(x, copies, axis=0), copy=True), state)

    return by_compiler(repeat, [state], jax.tree.map(split, state))


def select_rows(
    condition: jax.Array,  # bool[B]
    new: State,
    old: State,
) -> State:
    """Select row b from `new` if `condition[b]` is True, else from `old`."""
    refuse_pages(old, "select_rows")

    def select(x: jax.Array, y: jax.Array) -> jax.Array:
        # `where` aligns trailing axes, but rows are the first axis.
        return jnp.where(condition.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(select, new, old)


def write_rows(
    state: State,  # B rows
    rows: jax.Array,  # i32[R]
    new: State,  # R rows
) -> State:
    """Write row r of `new` to row `rows[r]` of the state and drop rows past the end."""
    refuse_pages(state, "write_rows")

    def write_leaf(rows: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        y = y if y.dtype == x.dtype else y.astype(x.dtype)  # PRNG keys have no astype
        return x.at[rows].set(y, mode="drop")

    def write(state: State, rows: jax.Array, new: State) -> State:
        return jax.tree.map(partial(write_leaf, rows), state, new)

    return by_compiler(write, [state, rows, new], jax.tree.map(split, state))
