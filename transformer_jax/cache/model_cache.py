"""Hold what a whole model remembers of its tokens, and check what still fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache import paged_cache as paged
from transformer_jax.checks import check_count, check_not_consumed
from transformer_jax.config import ModelConfig
from transformer_jax.tracing import at_once, known_value
from transformer_jax.values import value_class

Layers = tuple[kv.KVCache, ...] | tuple[paged.PagedCache, ...] | kv.KVCache
"""One cache a layer; or, of a scanned stack, one whose leaves are [B, L, ...]."""


@value_class(pytree=True, exportable=True)
class ModelCache:
    """Hold all a model remembers of the tokens so far; goes in and comes out, never mutated.

    Attributes:
        layers: one cache a layer; of a scanned stack, one whose leaves are [B, L, ...].
        cross: keys and values of an encoder-decoder's source, computed once; None of a decoder.
    """

    layers: Layers
    cross: Layers | None = None

    @property
    def length(self) -> jax.Array:  # i32[B]
        """Return the position of each row's next token."""
        if isinstance(self.layers, kv.KVCache):
            return self.layers.length[:, 0]
        return self.layers[0].length

    @property
    def capacity(self) -> int:
        """Slots per row of the longest layer."""
        if isinstance(self.layers, kv.KVCache):
            return self.layers.k.shape[2]
        return max(layer.capacity for layer in self.layers)

    @property
    def exhausted(self) -> jax.Array | None:  # bool[B]
        """Return which rows found no free page; None where the cache has no pages."""
        found = None
        for layer in self.layers if isinstance(self.layers, tuple) else ():
            if isinstance(layer, paged.PagedCache):
                found = layer.exhausted if found is None else found | layer.exhausted
        return found


def rewind_cache(
    cache: ModelCache,
    length: jax.Array,  # i32[B]
) -> ModelCache:
    """Forget the positions >= length[b] in every layer; a source stays.

    Rings need room for it: a `capacity` (of one window) or a `slack` (of a pattern) that is larger
    than they need by as many slots as tokens are forgotten.

    Args:
        cache: of B rows.
        length: i32[B], tokens that stay of each row; clipped to 0 and to what the row holds.

    Returns:
        The cache as if each row had read its first `length[b]` tokens only.

    Raises:
        ValueError: if `length` is not integers [B].
    """
    check_is_cache(cache)
    length = jnp.asarray(length)
    if isinstance(cache.layers, kv.KVCache):
        rewind = jax.vmap(kv.rewind, in_axes=(1, None), out_axes=1)
        return replace(cache, layers=rewind(cache.layers, length))
    layers: Any = tuple(  # all of one class
        paged.rewind(layer, length)
        if isinstance(layer, paged.PagedCache)
        else kv.rewind(layer, length)
        for layer in cache.layers
    )
    return replace(cache, layers=layers)


def share_cache(
    cache: ModelCache,
    rows: jax.Array,  # i32[R]
    length: jax.Array | None = None,  # i32[R]
) -> ModelCache:
    """Return a paged cache of R rows that share pages of its own, as `paged_cache.share` does.

    Args:
        cache: of B rows, with pages.
        rows: i32[R], the row that each new one takes its tokens of.
        length: i32[R], how many of its first tokens it takes; None is all.

    Raises:
        ValueError: if the cache has no pages, or has a source.
    """
    check_is_cache(cache)
    if cache.exhausted is None or cache.cross is not None:
        raise ValueError("cache has no pages that rows may share: make it with init_paged_cache")
    layers: Any = cache.layers
    return replace(cache, layers=tuple(paged.share(layer, rows, length) for layer in layers))


def check_pages(
    cache: ModelCache,
    length: np.ndarray,  # i32[B]
) -> None:
    """Raise ValueError where too few pages are free for rows of so many tokens."""
    for layer in cache.layers if isinstance(cache.layers, tuple) else ():
        if not isinstance(layer, paged.PagedCache):
            return
        with at_once(layer, length):
            needed = int(paged.count_needed(layer, jnp.asarray(length)))
            free = int(layer.free_pages)
        if needed > free:
            raise ValueError(f"rows need {needed} more pages: {free} of {layer.num_pages} are free")


def slot_positions(layer: kv.KVCache | paged.PagedCache) -> jax.Array:  # i32[B, S]
    """Return the position that each slot of a row holds; -1 where it is empty."""
    if isinstance(layer, paged.PagedCache):
        return paged.gather_positions(layer)
    return layer.positions


def refuse_pages(state: object, what: str) -> None:
    """Raise ValueError where a state has a `PagedCache`, which `what` cannot take.

    Its arrays do not lead with its rows.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, paged.PagedCache))
    if any(isinstance(node, paged.PagedCache) for node in nodes):
        pages = "a PagedCache, whose pages are those of all rows"
        raise ValueError(f"{what} does not take {pages}; share_cache copies and reorders its rows")


def room_of(config: ModelConfig, cache: ModelCache) -> int | None:
    """Return how many positions a model's cache can hold; None where it never fills."""
    return cache.capacity if cache.exhausted is not None else cache_limit(config, cache.capacity)


def cache_limit(config: ModelConfig, capacity: int) -> int | None:
    """Return how many positions a cache can hold; None where all layers are rings that never fill.

    Such a ring has slots for its window and the sink tokens.

    Args:
        config: of a decoder or an encoder-decoder.
        capacity: slots of a row in the longest layer.
    """
    rings = [_slots(config, i, capacity)[1] for i in range(config.decoder_layers)]
    return None if all(rings) else capacity


def empty_layers(
    config: ModelConfig,
    depth: int,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike | None = None,  # None is the compute dtype
    slack: int = 0,
) -> Layers:
    """Make empty self-attention caches of a stack; no two of their leaves share memory.

    Of a window pattern, windowed layers are rings of min(capacity, window + sinks + slack) slots.
    """
    check_count("slack", slack, 0)
    if slack and not isinstance(config.window, tuple):
        rule = "is for rings of a window pattern, here a ring has `capacity` slots"
        raise ValueError(f"slack is {slack}: {rule}")

    heads = config.kv_heads, config.key_dim, config.value_dim
    dtype = config.dtype if dtype is None else dtype
    layers: list[kv.KVCache] = []
    for i in range(1 if config.scan_layers else depth):
        slots, turns = _slots(config, i, capacity, slack)
        sinks = config.sink_tokens if turns else 0
        layers.append(kv.init(batch, slots, *heads, dtype, sinks))
    if not config.scan_layers:
        return tuple(layers)
    # rows stay the first axis, so that beams reorder the leaves of both kinds of stack alike
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * depth, axis=1), layers[0])


def _slots(config: ModelConfig, i: int, capacity: int, slack: int = 0) -> tuple[int, bool]:
    """Return how many slots layer i has, the longest having `capacity`, and whether they turn."""
    # a cache too short for its window and the sinks never turns, so it keeps no sinks apart
    window = config.windows[i % len(config.windows)]
    if window is None:
        return capacity, False
    least = window + config.sink_tokens
    slots = min(capacity, least + slack) if isinstance(config.window, tuple) else capacity
    return slots, slots >= least


def check_is_cache(cache: object) -> None:
    """Raise ValueError unless this is a model's cache."""
    if not isinstance(cache, ModelCache):
        rule = "must be a ModelCache, as init_cache(config, rows, capacity) makes one"
        raise ValueError(f"cache is a {type(cache).__name__}: {rule}")
    check_not_consumed(cache, "cache")


def check_cache(config: ModelConfig, cache: ModelCache, tokens: jax.Array, crossed: bool) -> None:
    """Raise ValueError unless the cache has the layout, depth and rows of model and tokens."""
    check_is_cache(cache)
    if crossed and cache.cross is None:
        raise ValueError("cache.cross is None: start it from a source, with method='init_cache'")
    depth = config.decoder_layers if crossed else config.num_layers
    for name in ("layers", "cross") if crossed else ("layers",):
        layers = getattr(cache, name)
        if isinstance(layers, kv.KVCache) != config.scan_layers:
            held, wanted = ("looped", "scanned") if config.scan_layers else ("scanned", "looped")
            raise ValueError(f"cache.{name} is of a {held} stack, the model's is {wanted}")
        found = layers.length.shape[1] if isinstance(layers, kv.KVCache) else len(layers)
        if found != depth:
            raise ValueError(f"cache.{name} has {found} layers, the model {depth}")
    for i in range(1 if config.scan_layers else depth):
        layer = cache.layers if isinstance(cache.layers, kv.KVCache) else cache.layers[i]
        if isinstance(layer, paged.PagedCache) != (cache.exhausted is not None):
            raise ValueError(f"cache.layers[{i}] is a {type(layer).__name__}, others are not")
        if isinstance(layer, paged.PagedCache):
            continue
        slots, sinks = cache.capacity if config.scan_layers else layer.capacity, layer.sinks
        least = _slots(config, i, cache.capacity)[0]
        kept = config.sink_tokens if _slots(config, i, slots)[1] else 0
        if slots < least or sinks != kept:
            wants = f"the model wants {kept} and at least {least}"
            raise ValueError(f"cache.layers[{i}] has {sinks} sinks and {slots} slots, {wants}")
    if cache.length.shape[0] != tokens.shape[0]:
        raise ValueError(f"tokens have {tokens.shape[0]} rows, the cache {cache.length.shape[0]}")


def refuse_past_capacity(positions: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
    """Return positions with those past the cache's end made padding, and the rows [B] that had any.

    A known one is a ValueError.
    """
    known = known_value(positions)
    if known is not None and known.size:
        last = known.max()
        if last >= limit:
            raise ValueError(f"position {last} is past the cache: its capacity is {limit}")
    # traced, it cannot be an error: the caller makes those rows' logits NaN
    beyond = positions >= limit
    return jnp.where(beyond, -1, positions), beyond.any(axis=1)


def refuse_past_int32(
    positions: jax.Array,  # i32[B, T]
) -> tuple[jax.Array, jax.Array]:
    """Return positions with rows that reach 2^31 - 1 made padding, and which rows [B] these are.

    A known one is a ValueError. A row that counts past 2^31 - 1 holds it.
    """
    # a ring ends only there: after it positions would be negative, which is padding, and vanish in
    # silence
    last = np.iinfo(np.int32).max
    known = known_value(positions)
    if known is not None and (known >= last).any():
        row = int(np.argmax((known >= last).any(axis=1)))
        raise ValueError(f"row {row} reaches position {last}: rebase the cache before it does")
    beyond = (positions >= last).any(axis=1)
    return jnp.where(beyond[:, None], -1, positions), beyond
