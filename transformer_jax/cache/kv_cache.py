"""Immutable key/value cache of one layer: each call returns a new cache.

Position p is stored in slot p % S, so the same code implements a full cache and a ring (window)
cache with different values of S. The first axis of every array is B, so rows can be gathered. Each
row has its own length. An empty slot has position -1, and no query may attend to it.

A cache with `sinks` never overwrites the first `sinks` positions (StreamingLLM, Xiao et al. 2024):
position p < sinks is stored in slot p, and the other positions share the remaining slots as a ring.
Unlike in the paper, keys are not renumbered.

An int8 cache approximates the key and value of each token and head as x ~ scale * q, with scale =
max|x| / 127 and q = round(x / scale), so the error of an element is at most scale / 2.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache.split_slots import join_split, slot_axes, write_split
from transformer_jax.checks import (
    as_int32,
    at_most,
    check_array,
    check_count,
    check_not_consumed,
    largest,
)
from transformer_jax.kernels.caches import dequantize as dequantize
from transformer_jax.pytree import Tree
from transformer_jax.sharding import by_compiler, split
from transformer_jax.values import shown, value_class


class SlottedCache(Protocol):
    """Keys and values indexed by slot, as in `KVCache` and `PagedCache`."""

    # these are properties, because a frozen field does not match a mutable attribute of a protocol
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
    """Immutable keys and values of all tokens so far.

    Attributes:
        k: [B, S, K, H], the keys in each slot.
        v: [B, S, K, Hv], the values in each slot.
        positions: i32[B, S], the position stored in each slot; -1 marks an empty slot.
        length: i32[B], the position of the next token.
        k_scale: f32[B, S, K] if k is int8, else None.
        v_scale: f32[B, S, K] if v is int8, else None.
        sinks: number of leading slots that later positions never overwrite.
    """

    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    positions: jax.Array  # i32[B, S]
    length: jax.Array  # i32[B]
    k_scale: jax.Array | None = None  # f32[B, S, K] if k is int8
    v_scale: jax.Array | None = None  # f32[B, S, K] if v is int8
    sinks: int = field(default=0, metadata=dict(static=True))

    @property
    def capacity(self) -> int:
        """Return S, the number of slots per row."""
        return self.k.shape[1]


def check_cache_dtype(name: str, dtype: object) -> np.dtype:
    """Return a cache's dtype, or raise ValueError unless it is int8 or a float of at least 16 bits.

    Args:
        name: name of the argument that specified the dtype, for the error message.
        dtype: a dtype, a scalar type such as `jnp.bfloat16`, or the name of a dtype.
    """
    rule = "must be int8 or a floating-point dtype of at least 16 bits"
    value: Any = dtype
    try:
        # NumPy converts None to float64, and an array to the dtype of its elements
        if value is None or isinstance(value, jax.Array | np.ndarray):
            raise TypeError
        found = jnp.dtype(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {shown(value)}: {rule}") from None
    if found != jnp.int8 and not (jnp.issubdtype(found, jnp.floating) and found.itemsize > 1):
        raise ValueError(f"{name} is {shown(value) if isinstance(value, str) else found}: {rule}")
    return found


def init(
    batch: int,
    capacity: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    sinks: int = 0,
) -> KVCache:
    """Create an empty cache whose leaves do not share memory.

    Args:
        batch: B, the number of rows.
        capacity: S, the number of slots per row.
        num_kv_heads: K, the number of key/value heads.
        head_dim: H, the size of a key per head.
        value_head_dim: Hv, the size of a value per head; None means H.
        dtype: dtype of keys and values, either int8 or a float of at least 16 bits.
        sinks: number of slots that are never overwritten, which must be below the capacity.

    Raises:
        ValueError: If a size or the dtype is invalid.
    """
    dtype = check_cache_dtype("dtype", dtype)
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    sizes = dict(capacity=capacity, num_kv_heads=num_kv_heads, head_dim=head_dim)
    sizes["value_head_dim"] = value_head_dim
    for name, size in sizes.items():
        check_count(name, size, 1)
    check_count("batch", batch, 0)
    check_count("sinks", sinks, 0)
    if sinks >= capacity:
        raise ValueError(f"sinks is {sinks}: must be below capacity, {capacity}")

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
    """Write token t of row b, which has position p, to slot p % S.

    With s sinks, the slot for p >= s is `s + (p - s) % (S - s)`. If there are more than S tokens,
    the cache keeps the sinks and the last tokens. To treat overwriting as an error, check
    `positions < S` first, as `refuse_past_capacity` does for a model.

    Args:
        cache: a cache with B rows.
        k: [B, T, K, H], the keys of the new tokens.
        v: [B, T, K, Hv], the values of the new tokens.
        positions: i32[B, T]; tokens at negative positions are padding and are not written.

    Raises:
        ValueError: If a shape does not match the cache, or if a known position does not fit in
            int32.
    """
    check_not_consumed(cache, "cache")
    rows, _, heads, dim = cache.k.shape
    check_update((rows, heads, dim, cache.v.shape[-1]), k, v, positions)
    positions = as_int32("positions", positions)
    if k.shape[1] == 0:
        return cache
    sinks, ring = cache.sinks, cache.capacity - cache.sinks
    # if a chunk is longer than the ring, write only its last tokens, because the order of two
    # writes to one slot is undefined
    newest = positions.max(axis=1)  # [B]
    keep = (positions < sinks) | (positions > newest[:, None] - ring)
    slots = jnp.where(positions < sinks, positions, sinks + (positions - sinks) % ring)
    # slot S does not exist, so the scatter drops writes to it
    slots = jnp.where(keep & (positions >= 0), slots, cache.capacity)
    old, new = slot_leaves(cache), slot_leaves(as_stored(cache, k, v, positions))
    if axes := slot_axes(cache.k):
        written = write_split(old, new, slots, axes)
    else:
        # if a mesh has explicit axes, the sharding of the scatter's result must be specified
        written = by_compiler(_write, [old, new, slots], jax.tree.map(split, old))
    return replace(cache, **written, length=jnp.maximum(cache.length, newest + 1))


def _write(old: Tree, new: Tree, slots: jax.Array) -> Tree:
    """Write token t of row b to slot `slots[b, t]` if that slot exists."""
    rows = jnp.arange(slots.shape[0])[:, None]
    return jax.tree.map(lambda x, token: x.at[rows, slots].set(token, mode="drop"), old, new)


def extend(
    cache: KVCache,
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    positions: jax.Array,  # i32[B, T]
    window: int | None = None,
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """Update a cache and return the keys and values that the new tokens may attend to.

    Args:
        cache: a cache with B rows.
        k: [B, T, K, H], the keys of the new tokens.
        v: [B, T, K, Hv], the values of the new tokens.
        positions: i32[B, T]; negative means padding.
        window: the number of keys that each query sees; None means all keys in the cache.

    Returns:
        The new cache, and the keys, values and positions that `extend_quantized` selects. The keys
        and values have the dtype of `k`.
    """
    new, seen = extend_quantized(cache, k, v, positions, window)
    return new, *read(seen, k.dtype), seen.positions


def extend_quantized(
    cache: KVCache,
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    positions: jax.Array,  # i32[B, T]
    window: int | None = None,
) -> tuple[KVCache, KVCache]:
    """Return the updated cache, and the cache that the new tokens read.

    The two differ only for a ring of S < window + T - 1 slots (without sinks). Such a ring
    overwrites keys that the first of the T queries still see, so the queries read the old ring
    followed by the new keys. New tokens are also read in the dtype of the cache, so results do not
    depend on the number of tokens per call.

    Args:
        cache: a cache with B rows.
        k: [B, T, K, H], the keys of the new tokens.
        v: [B, T, K, Hv], the values of the new tokens.
        positions: i32[B, T]; negative means padding.
        window: the number of keys that each query sees; None means all keys in the cache.
    """
    new = update(cache, k, v, positions)
    if window is None or at_most(window + k.shape[1] - 1, cache.capacity - cache.sinks):
        return new, new

    # a token at a cached position replaces the old key; otherwise, queries would count it twice
    def kept(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where((old[:, :, None] == new[:, None, :]).any(axis=2), -1, old)

    places = by_compiler(kept, [cache.positions, positions], split(cache.positions))
    both = (
        slot_leaves(replace(cache, positions=places)),
        slot_leaves(as_stored(cache, k, v, positions)),
    )
    if axes := slot_axes(cache.k):
        return new, replace(new, **join_split(*both, axes))
    return new, replace(new, **jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *both))


def read(
    cache: SlottedCache,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, Hv]
    """Return the keys [B, S, K, H] and values [B, S, K, Hv] for attention, dequantized if int8.

    Args:
        cache: a `KVCache`, or a `PagedCache`, for which the pools are returned.
        dtype: the dtype of dequantized int8 arrays. Other arrays keep their dtype.
    """
    if cache.k_scale is None or cache.v_scale is None:
        return cache.k, cache.v
    return dequantize(cache.k, cache.k_scale, dtype), dequantize(cache.v, cache.v_scale, dtype)


def in_order(cache: KVCache) -> KVCache:
    """Return a cache whose slots are sorted by position; empty slots come first."""
    rows, order = jnp.arange(len(cache.positions))[:, None], jnp.argsort(cache.positions, axis=1)
    return replace(cache, **jax.tree.map(lambda x: x[rows, order], slot_leaves(cache)))


def rewind(
    cache: KVCache,
    length: jax.Array,  # i32[B]
) -> KVCache:
    """Drop all positions >= length[b], so that the next token is written at length[b].

    A ring cannot restore overwritten keys. With a window of W, rewinding is exact for at most `S -
    sinks - W + 1` dropped tokens. Allocate one extra slot for each token that you may drop.

    Args:
        cache: a cache with B rows.
        length: i32[B], the number of tokens to keep in each row, clipped to the range from 0 to the
            current length.

    Raises:
        ValueError: If `length` is not an integer array [B].
    """
    check_not_consumed(cache, "cache")
    length = kept_length(cache.length, length)
    # only the positions change, because the content of an empty slot is never read
    kept = jnp.where(cache.positions < length[:, None], cache.positions, -1)
    return replace(cache, positions=kept, length=length)


def kept_length(old: jax.Array, length: jax.Array) -> jax.Array:  # i32[B]
    """Return the new length of each row, clipped to the range from 0 to its old length."""
    if length.shape != old.shape or not jnp.issubdtype(length.dtype, jnp.integer):
        shape = f"{length.dtype}{list(length.shape)}"
        raise ValueError(f"length is {shape}: must be integers {list(old.shape)}")
    return jnp.clip(length.astype(jnp.int32), 0, old)


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [..., H] -> i8[..., H], f32[...]
    """Return (q, scale) for each row: scale = max|x| / 127, q = round(x / scale), so |q| <= 127.

    A nonfinite row has no finite scale and is dequantized to NaN.
    """
    x = x.astype(jnp.float32)
    # use at least the smallest normal number, because a row of zeros would cause a division by 0
    scale = jnp.maximum(largest(jnp.abs(x)) / 127, jnp.finfo(jnp.float32).tiny)
    finite = jnp.isfinite(scale)[..., None]
    # The scale marks a nonfinite row, and NaN has no int8 value.
    q = jnp.where(finite, jnp.round(x / scale[..., None]), 0)
    return q.astype(jnp.int8), scale


def next_positions(length: jax.Array, valid: jax.Array) -> jax.Array:
    """Return the position of each token: `length[b]` plus the number of earlier valid tokens.

    The result is i32[B, T], with -1 for padding.

    Args:
        length: i32[B], the current number of tokens in each row.
        valid: bool[B, T]; False means padding.
    """
    return jnp.where(valid, length[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, -1)


def as_stored(cache: SlottedCache, k: jax.Array, v: jax.Array, positions: jax.Array) -> KVCache:
    """Convert new tokens to the dtype of `cache`, quantizing them if it is int8."""
    positions = positions.astype(jnp.int32)
    if cache.k_scale is None:
        k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
        return KVCache(k, v, positions, cache.length)
    (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
    return KVCache(k, v, positions, cache.length, k_scale, v_scale)


def slot_leaves(cache: SlottedCache) -> dict[str, Any]:  # scales are None unless k is int8
    """Return the leaves with one entry per slot."""
    names = "k", "v", "positions", "k_scale", "v_scale"
    return {name: getattr(cache, name) for name in names}


def check_update(
    sizes: tuple[int, int, int, int],  # B, K, H, Hv
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
) -> None:
    """Raise ValueError unless the new tokens have these sizes."""
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
            raise ValueError(f"{name} has shape {array.shape}: must be {expected} for this cache")
