"""Immutable cache of a layer with a state of fixed size instead of keys and values.

The first axis of every array is B, so rows can be gathered, forked and reset like those of a
`KVCache`. Unlike a `KVCache`, the cache cannot drop tokens, because each token changes the state.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from transformer_jax.values import value_class


@value_class(pytree=True, exportable=True)
class StateCache:
    """Immutable state of a layer after all tokens so far.

    Attributes:
        state: f32[B, N, H, Hv], the matrix of each head, which maps keys to values; None in a
            short_conv layer.
        tail: [B, W - 1, C], the last inputs of the short convolution.
        length: i32[B], the position of the next token.
    """

    state: jax.Array | None  # f32[B, N, H, Hv]
    tail: jax.Array  # [B, W - 1, C]
    length: jax.Array  # i32[B]


def init(
    batch: int,
    sizes: tuple[int, int, int] | None,  # N, H, Hv
    tail: tuple[int, int],  # W - 1, C
    dtype: jax.typing.DTypeLike,
) -> StateCache:
    """Create the state before the first token, whose leaves do not share memory.

    Args:
        batch: B, the number of rows.
        sizes: number of heads, and the widths of their keys and values; None for no heads.
        tail: number of tokens and channels of the convolution's tail.
        dtype: dtype of the tail, which is the compute dtype.
    """
    return StateCache(
        state=None if sizes is None else jnp.zeros((batch, *sizes), jnp.float32),
        tail=jnp.zeros((batch, *tail), dtype),
        length=jnp.zeros(batch, jnp.int32),
    )


def advance(
    cache: StateCache,
    state: jax.Array | None,  # f32[B, N, H, Hv]
    tail: jax.Array,  # [B, W - 1, C]
    positions: jax.Array,  # i32[B, T]; negative means padding
) -> StateCache:
    """Return the cache after new tokens, given the state and the tail after them."""
    newest = positions.max(axis=1, initial=-1) + 1
    return replace(cache, state=state, tail=tail, length=jnp.maximum(cache.length, newest))
