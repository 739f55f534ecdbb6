"""The key/value cache: a frozen value that goes in and comes out, never mutated.

Slot `position % S` holds the key of `position`, so a full cache and a ring (window) cache are the
same code with a different S. Every leaf leads with B: rows can be gathered, and ragged rows each
have their own length. An empty slot has position -1, which no query may attend to.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens so far."""

    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    positions: jax.Array  # i32[B, S]; -1 marks an empty slot
    length: jax.Array  # i32[B]; the position of the next token

    @property
    def capacity(self) -> int:
        """Slots per row (S)."""
        return self.k.shape[1]


def init(
    batch: int,
    capacity: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> KVCache:
    """An empty cache of `capacity` slots a row."""
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}: must be at least 1")
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    return KVCache(
        k=jnp.zeros((batch, capacity, num_kv_heads, head_dim), dtype),
        v=jnp.zeros((batch, capacity, num_kv_heads, value_head_dim), dtype),
        positions=jnp.full((batch, capacity), -1, jnp.int32),
        length=jnp.zeros((batch,), jnp.int32),
    )


def update(
    cache: KVCache,
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    positions: jax.Array,  # i32[B, T]; a negative position is padding and is not written
) -> KVCache:
    """Write token t of row b at slot `positions[b, t] % S`.

    Of more than S tokens the last S stay, as in any ring. A caller for whom overwriting is an
    error checks `positions < S` first (`transformer.Decoder` does).
    """
    _check_update(cache, k, v, positions)
    if k.shape[1] == 0:
        return cache
    newest = positions.max(axis=1)  # [B]
    keep = (positions >= 0) & (positions > newest[:, None] - cache.capacity)
    slots = jnp.where(keep, positions % cache.capacity, cache.capacity)  # S itself is dropped
    rows = jnp.arange(k.shape[0])[:, None]
    return KVCache(
        k=cache.k.at[rows, slots].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[rows, slots].set(v.astype(cache.v.dtype), mode="drop"),
        positions=cache.positions.at[rows, slots].set(positions.astype(jnp.int32), mode="drop"),
        length=jnp.maximum(cache.length, newest + 1),
    )


def extend(
    cache: KVCache,
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    positions: jax.Array,  # i32[B, T]
    window: int | None = None,
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """The updated cache, and the keys, values and positions [B, S'] that the new tokens may see.

    A ring of S < window + T - 1 slots overwrites keys that the first of T queries still see, so
    those queries read the old ring with the new keys behind it; otherwise they read the new cache.
    """
    new = update(cache, k, v, positions)
    if window is None or cache.capacity >= window + k.shape[1] - 1:
        return new, new.k, new.v, new.positions
    again = (cache.positions[:, :, None] == positions[:, None, :]).any(axis=2)
    old = jnp.where(again, -1, cache.positions)  # a token fed again replaces its old key
    return (
        new,
        jnp.concatenate([cache.k, k.astype(cache.k.dtype)], axis=1),
        jnp.concatenate([cache.v, v.astype(cache.v.dtype)], axis=1),
        jnp.concatenate([old, positions.astype(jnp.int32)], axis=1),
    )


def next_positions(length: jax.Array, valid: jax.Array) -> jax.Array:
    """Positions [B, T] of new tokens: `length[b]` plus the valid ones before; -1 where invalid."""
    return jnp.where(valid, length[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, -1)


def _check_update(cache: KVCache, k: jax.Array, v: jax.Array, positions: jax.Array) -> None:
    rows, _, heads, dim = cache.k.shape
    tokens = k.shape[1] if k.ndim == 4 else -1
    for name, array, expected in (
        ("k", k, (rows, tokens, heads, dim)),
        ("v", v, (rows, tokens, heads, cache.v.shape[-1])),
        ("positions", positions, (rows, tokens)),
    ):
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}: this cache takes {expected}")
