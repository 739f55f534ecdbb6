"""Keep keys and values: a frozen value that goes in and comes out, never mutated.

Slot `position % S` holds the key of `position`, so a full cache and a ring (window) cache are the
same code with a different S. Every leaf leads with B: rows can be gathered, and ragged rows each
have their own length. An empty slot has position -1, which no query may attend to.

A cache with `sinks` never overwrites the first so many positions (StreamingLLM, Xiao et al. 2024):
position p < sinks has slot p, the others turn in the slots after those. Keys keep the positions at
which they were read; they are not numbered anew, as that paper does.

A cache of int8 holds each head's key and value of a token as x ~ scale * q, with
scale = max|x| / 127 and q = round(x / scale): the error of an element is at most scale / 2.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from transformer_jax.checks import (
    as_int32,
    at_most,
    check_array,
    check_count,
    check_not_consumed,
    largest,
)
from transformer_jax.kernels.caches import dequantise as dequantise
from transformer_jax.pytree import Tree
from transformer_jax.sharding import by_compiler, split
from transformer_jax.values import value_class


class SlottedCache(Protocol):
    """Hold keys and values by slot, as `KVCache` and `PagedCache` do."""

    # properties, because mypy takes a frozen field for no attribute that could be assigned
    @property
    def k(self) -> jax.Array: ...
    @property
    def v(self) -> jax.Array: ...
    @property
    def positions(self) -> jax.Array: ...
    @property
    def length(self) -> jax.Array: ...
    @property
    def k_scale(self) -> jax.Array | None: ...
    @property
    def v_scale(self) -> jax.Array | None: ...


@value_class(pytree=True, exportable=True)
class KVCache:
    """Hold keys and values of the tokens so far.

    Attributes:
        k: [B, S, K, H], the keys by slot.
        v: [B, S, K, Hv], the values by slot.
        positions: i32[B, S], the position that each slot holds; -1 marks an empty slot.
        length: i32[B], the position of the next token.
        k_scale: f32[B, S, K] where k is int8, else None.
        v_scale: f32[B, S, K] where v is int8, else None.
        sinks: slots from the first on that are never overwritten by a later position.
    """

    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    positions: jax.Array  # i32[B, S]
    length: jax.Array  # i32[B]
    k_scale: jax.Array | None = None  # f32[B, S, K] where k is int8
    v_scale: jax.Array | None = None  # f32[B, S, K] where v is int8
    sinks: int = field(default=0, metadata=dict(static=True))

    @property
    def capacity(self) -> int:
        """Return the slots per row (S)."""
        return self.k.shape[1]


def init(
    batch: int,
    capacity: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    sinks: int = 0,
) -> KVCache:
    """Make an empty cache; no two of its leaves share memory.

    Args:
        batch: B, rows.
        capacity: S, slots of a row.
        num_kv_heads: K.
        head_dim: H.
        value_head_dim: Hv; None is H.
        dtype: of keys and values: int8, or floating with 16 bits or more.
        sinks: slots that are never overwritten, fewer than the capacity.

    Raises:
        ValueError: if a size or the dtype cannot be.
    """
    rule = "must be int8, or floating with 16 bits or more"
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f"dtype is {dtype!r}: {rule}") from None
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    sizes = dict(capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim)
    sizes["value_head_dim"] = value_head_dim
    for name, size in sizes.items():
        check_count(name, size, 1)
    check_count("batch", batch, 0)
    check_count("sinks", sinks, 0)
    if sinks >= capacity:
        raise ValueError(f"sinks is {sinks}: must be below capacity {capacity}")
    if dtype != jnp.int8 and not (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1):
        raise ValueError(f"dtype is {dtype}: {rule}")

    quantised, scales = dtype == jnp.int8, (batch, capacity, num_kv_heads)
    return KVCache(
        k=jnp.zeros((batch, capacity, num_kv_heads, head_dim), dtype),
        v=jnp.zeros((batch, capacity, num_kv_heads, value_head_dim), dtype),
        positions=jnp.full((batch, capacity), -1, jnp.int32),
        length=jnp.zeros((batch,), jnp.int32),
        k_scale=jnp.zeros(scales, jnp.float32) if quantised else None,
        v_scale=jnp.zeros(scales, jnp.float32) if quantised else None,
        sinks=sinks,
    )


def update(
    cache: KVCache,
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    positions: jax.Array,  # i32[B, T]
) -> KVCache:
    """Write token t of row b at slot p % S of its position p.

    After s sinks that slot is `s + (p - s) % (S - s)`. Of more than S tokens the sinks and the last
    ones stay, as in any ring. A caller for whom overwriting is an error checks `positions < S`
    first, as `check_cache_room` does for a model.

    Args:
        cache: of B rows.
        k: [B, T, K, H], the new tokens' keys.
        v: [B, T, K, Hv], their values.
        positions: i32[B, T]; a negative position is padding and is not written.

    Raises:
        ValueError: if a shape is not that of the cache, or a position is known and does not fit
            int32.
    """
    check_not_consumed(cache, "cache")
    rows, _, heads, dim = cache.k.shape
    check_update((rows, heads, dim, cache.v.shape[-1]), k, v, positions)
    positions = as_int32("positions", positions)
    if k.shape[1] == 0:
        return cache
    sinks, turning = cache.sinks, cache.capacity - cache.sinks
    # of a chunk longer than the ring only the last tokens are written: with two of them for one
    # slot, which one stays would be chance
    newest = positions.max(axis=1)  # [B]
    keep = (positions < sinks) | (positions > newest[:, None] - turning)
    slots = jnp.where(positions < sinks, positions, sinks + (positions - sinks) % turning)
    # slot S does not exist: a scatter drops what is written there
    slots = jnp.where(keep & (positions >= 0), slots, cache.capacity)
    old, new = slot_leaves(cache), slot_leaves(held(cache, k, v, positions))
    # on explicit axes of a mesh a scatter's result must be told how it is split
    written = by_compiler(_write, [old, new, slots], jax.tree.map(split, old))
    return replace(cache, **written, length=jnp.maximum(cache.length, newest + 1))


def _write(held: Tree, new: Tree, slots: jax.Array) -> Tree:
    """Write token t of row b into slot `slots[b, t]`, if there is one."""
    rows = jnp.arange(slots.shape[0])[:, None]
    return jax.tree.map(lambda x, token: x.at[rows, slots].set(token, mode="drop"), held, new)


def extend(
    cache: KVCache,
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    positions: jax.Array,  # i32[B, T]
    window: int | None = None,
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """Update a cache, and return what new tokens may see.

    Args:
        cache: of B rows.
        k: [B, T, K, H], the new tokens' keys.
        v: [B, T, K, Hv], their values.
        positions: i32[B, T]; negative is padding.
        window: keys that a query sees; None sees all that the cache holds.

    Returns:
        The new cache, and keys [B, S', K, H], values and positions [B, S'], as in `extend_held`, in
        the dtype of `k`.
    """
    new, seen = extend_held(cache, k, v, positions, window)
    return new, *read(seen, k.dtype), seen.positions


def extend_held(
    cache: KVCache,
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    positions: jax.Array,  # i32[B, T]
    window: int | None = None,
) -> tuple[KVCache, KVCache]:
    """Return the updated cache, and what new tokens read: the same, or the old ring and them.

    A ring of S < window + T - 1 slots (besides its sinks) overwrites keys that the first of T
    queries still see, so those queries read the old ring with the new keys after it; otherwise they
    read the new cache. New tokens too are read in the dtype of the cache, however many are fed at a
    time.

    Args:
        cache: of B rows.
        k: [B, T, K, H], the new tokens' keys.
        v: [B, T, K, Hv], their values.
        positions: i32[B, T]; negative is padding.
        window: keys that a query sees; None sees all that the cache holds.
    """
    new = update(cache, k, v, positions)
    if window is None or at_most(window + k.shape[1] - 1, cache.capacity - cache.sinks):
        return new, new
    # a token that is fed again replaces its old key, or queries would count it twice
    again = (cache.positions[:, :, None] == positions[:, None, :]).any(axis=2)
    old = replace(cache, positions=jnp.where(again, -1, cache.positions))
    both = slot_leaves(old), slot_leaves(held(cache, k, v, positions))
    return new, replace(new, **jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *both))


def read(
    cache: SlottedCache,
    dtype: jax.typing.DTypeLike = jnp.float32,  # of what int8 is read as
) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, Hv]
    """Return the keys and values as attention takes them: of int8, scale * q.

    Args:
        cache: a `KVCache`, or a `PagedCache`, whose pools are returned.
        dtype: of the numbers that int8 is read as; others keep their own.

    Returns:
        Keys [B, S, K, H] and values [B, S, K, Hv].
    """
    if cache.k_scale is None or cache.v_scale is None:
        return cache.k, cache.v
    return dequantise(cache.k, cache.k_scale, dtype), dequantise(cache.v, cache.v_scale, dtype)


def rewind(
    cache: KVCache,
    length: jax.Array,  # i32[B]
) -> KVCache:
    """Forget every position >= length[b]: those slots are empty, and the next token stands there.

    A ring has lost what later positions overwrote. It still serves a window of W as if never turned
    back where at most `S - sinks - W + 1` tokens are forgotten: give it that much more room.

    Args:
        cache: of B rows.
        length: i32[B]; clipped to 0 and to what the row holds.

    Raises:
        ValueError: if `length` is not integers [B].
    """
    check_not_consumed(cache, "cache")
    if length.shape != cache.length.shape or not jnp.issubdtype(length.dtype, jnp.integer):
        given = f"{length.dtype}{list(length.shape)}"
        raise ValueError(f"length is {given}: must be integers {list(cache.length.shape)}")
    length = jnp.clip(length.astype(jnp.int32), 0, cache.length)
    # only positions change: what an empty slot holds is never read, so nothing is overwritten
    kept = jnp.where(cache.positions < length[:, None], cache.positions, -1)
    return replace(cache, positions=kept, length=length)


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [..., H] -> i8[..., H], f32[...]
    """Return (q, scale) of each row: scale = max|x| / 127, q = round(x / scale), so |q| <= 127.

    A row that is not finite has no finite scale, and reads as NaN.
    """
    x = x.astype(jnp.float32)
    # at least the smallest normal number: a row of zeros would divide by 0
    scale = jnp.maximum(largest(jnp.abs(x)) / 127, jnp.finfo(jnp.float32).tiny)
    finite = jnp.isfinite(scale)[..., None]
    q = jnp.where(finite, jnp.round(x / scale[..., None]), 0)
    return q.astype(jnp.int8), scale


def next_positions(length: jax.Array, valid: jax.Array) -> jax.Array:
    """Return the positions of new tokens, after those that rows hold.

    Args:
        length: i32[B], tokens of each row so far.
        valid: bool[B, T]; False is padding.

    Returns:
        i32[B, T]: `length[b]` plus the valid tokens before; -1 of padding.
    """
    return jnp.where(valid, length[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, -1)


def held(cache: SlottedCache, k: jax.Array, v: jax.Array, positions: jax.Array) -> KVCache:
    """Return new tokens in the form in which `cache` holds its own."""
    positions = positions.astype(jnp.int32)
    if cache.k_scale is None:
        k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
        return KVCache(k, v, positions, cache.length)
    (k, k_scale), (v, v_scale) = quantise(k), quantise(v)
    return KVCache(k, v, positions, cache.length, k_scale, v_scale)


def slot_leaves(cache: SlottedCache) -> dict[str, Any]:  # arrays, and None for scales of no int8
    """Return the leaves that have an entry for each slot."""
    names = "k", "v", "positions", "k_scale", "v_scale"
    return {name: getattr(cache, name) for name in names}


def check_update(
    sizes: tuple[int, int, int, int],  # B, K, H, Hv
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
) -> None:
    """Raise ValueError where new tokens are not of these sizes."""
    rows, heads, dim, value_dim = sizes
    check_array("k", k, "[B, T, K, H]")
    check_array("v", v, "[B, T, K, Hv]")
    check_array("positions", positions, "i32[B, T]")
    tokens = k.shape[1] if k.ndim == 4 else -1
    for name, array, expected in (
        ("k", k, (rows, tokens, heads, dim)),
        ("v", v, (rows, tokens, heads, value_dim)),
        ("positions", positions, (rows, tokens)),
    ):
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}: this cache takes {expected}")
