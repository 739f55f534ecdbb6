"""A decoding state by rows. Every leaf of a state leads with B, so one set of functions serves
caches, recurrent states and whatever else a `step` carries: fork a prompt into many samples, follow
the best beams, let a row join a running batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.arguments import check_count
from transformer_jax.meshes import by_compiler, split


def count_rows(state: Any) -> int:
    """B: the leading axis that all leaves share."""
    leaves = jax.tree.leaves(state)
    if not leaves:
        raise ValueError("state has no arrays: it has no rows")
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(f"state's leaves lead with {sorted(map(str, sizes))}: must be one B")
    return leaves[0].shape[0]


def gather(state: Any, rows: jax.Array) -> Any:  # i32[B'] -> a state of B' rows
    """Row b of the result is row `rows[b]`; a row may be taken often, or not at all.

    An index outside 0..B-1 means the nearest row: under a trace it cannot be refused.
    """

    def take(state, rows):
        return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), state)

    return by_compiler(take, [state, rows], jax.tree.map(split, state))


def fork(state: Any, copies: int) -> Any:
    """Each row `copies` times side by side, as B * copies rows: many samples of one prompt.

    The result owns its memory, so what is forked stays whole when the copy is donated;
    `fork(state, 1)` keeps a state that `generate` would consume.
    """
    check_count("copies", copies, 1)

    def repeat(state):
        return jax.tree.map(lambda x: jnp.array(jnp.repeat(x, copies, axis=0), copy=True), state)

    return by_compiler(repeat, [state], jax.tree.map(split, state))


def choose(take: jax.Array, new: Any, old: Any) -> Any:
    """Row b of `new` where `take[b]` (bool[B]), of `old` elsewhere."""

    def leaf(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(take.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(leaf, new, old)


def put(state: Any, rows: jax.Array, other: Any) -> Any:
    """Row b of `other` takes the place of row `rows[b]`; a row past the end is dropped."""

    def leaf(rows: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        y = y if y.dtype == x.dtype else y.astype(x.dtype)  # keys of random numbers have no astype
        return x.at[rows].set(y, mode="drop")

    def every(state, rows, other):
        return jax.tree.map(partial(leaf, rows), state, other)

    return by_compiler(every, [state, rows, other], jax.tree.map(split, state))
