"""Cache of a whole model, and checks that a cache matches the model and the tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache import paged_cache as paged
from transformer_jax.cache import state_cache
from transformer_jax.cache.state_cache import StateCache
from transformer_jax.checks import check_count, check_not_consumed
from transformer_jax.config import GatedDelta, ModelConfig, ShortConv
from transformer_jax.tracing import concrete_value, eagerly
from transformer_jax.values import value_class

Layers = tuple[kv.KVCache | StateCache, ...] | tuple[paged.PagedCache, ...] | kv.KVCache
"""One cache per layer, or for a scanned stack, one cache with leaves [B, L, ...]."""


@value_class(pytree=True, exportable=True)
class ModelCache:
    """Immutable cache of a model. Each call of the model returns a new cache.

    Attributes:
        layers: one cache per layer, or for a scanned stack, one cache with leaves [B, L, ...].
        cross: the keys and values of an encoder-decoder's source, computed once; None for a
            decoder.
    """

    layers: Layers
    cross: Layers | None = None

    @property
    def is_scanned(self) -> bool:
        """Whether a single `KVCache` contains all layers, as in a scanned stack."""
        return isinstance(self.layers, kv.KVCache)

    @property
    def length(self) -> jax.Array:  # i32[B]
        """Return the position of each row's next token."""
        layers: Any = self.layers
        length: jax.Array = layers.length[:, 0] if self.is_scanned else layers[0].length
        return length

    @property
    def capacity(self) -> int:
        """Return the number of slots per row in the layer with the most slots, or 0 if none has."""
        layers: Any = self.layers
        if self.is_scanned:
            return int(layers.k.shape[2])
        slots = (layer.capacity for layer in layers if not isinstance(layer, StateCache))
        return max(slots, default=0)

    @property
    def has_state(self) -> bool:
        """Whether any layer has a state of fixed size instead of keys and values."""
        layers: Any = () if self.is_scanned else self.layers
        return any(isinstance(layer, StateCache) for layer in layers)

    @property
    def exhausted(self) -> jax.Array | None:  # bool[B]
        """Return the rows that ran out of free pages, or None if the cache has no pages."""
        found = None
        layers: Any = () if self.is_scanned else self.layers
        for layer in layers:
            if isinstance(layer, paged.PagedCache):
                found = layer.exhausted if found is None else found | layer.exhausted
        return found


def rewind_cache(
    cache: ModelCache,
    length: jax.Array,  # i32[B]
) -> ModelCache:
    """Drop all positions >= length[b] in every layer, but keep the source of an encoder-decoder.

    Rings need one extra slot for each dropped token. Create the cache with a larger `capacity` (for
    a single window) or `slack` (for a window pattern). A layer with a state can drop its last
    `slack` tokens, and the next call reads the others of these tokens again. In your own `jit`, the
    logits of a row that drops more become NaN, as far as they depend on the dropped tokens.

    Args:
        cache: a cache with B rows.
        length: i32[B], the number of tokens to keep in each row, clipped to the row's length.

    Returns:
        The cache that results if each row reads only its first `length[b]` tokens.

    Raises:
        ValueError: If `length` is not an integer array [B], or if a row drops more tokens than the
            state of a layer allows.
    """
    check_is_cache(cache)
    length = jnp.asarray(length)
    layers: Any = cache.layers
    if cache.is_scanned:
        # The leaves of a scanned cache have a layer axis after the row axis.
        rewind = jax.vmap(kv.rewind, in_axes=(1, None), out_axes=1)
        return replace(cache, layers=rewind(layers, length))
    rewinds: Any = {
        kv.KVCache: kv.rewind,
        paged.PagedCache: paged.rewind,
        StateCache: state_cache.rewind,
    }
    return replace(cache, layers=tuple(rewinds[type(x)](x, length) for x in layers))


def share_cache(
    cache: ModelCache,
    rows: jax.Array,  # i32[R]
    length: jax.Array | None = None,  # i32[R]
) -> ModelCache:
    """Return a paged cache with R rows that share this cache's pages (see `paged_cache.share`).

    Args:
        cache: a paged cache with B rows.
        rows: i32[R], the row of this cache with which each new row shares tokens.
        length: i32[R], the number of tokens that each new row shares; None means all.

    Raises:
        ValueError: If the cache has no pages, or if it contains a source.
    """
    check_is_cache(cache)
    if cache.exhausted is None or cache.cross is not None:
        raise ValueError("cache has no pages that rows can share: make it with init_paged_cache")
    layers: Any = cache.layers
    return replace(cache, layers=tuple(paged.share(layer, rows, length) for layer in layers))


def check_pages(
    cache: ModelCache,
    length: np.ndarray,  # i32[B]
) -> None:
    """Raise ValueError if there are too few free pages for the rows to grow to these lengths."""
    layers: Any = () if cache.is_scanned else cache.layers
    for layer in layers:
        if not isinstance(layer, paged.PagedCache):
            return
        with eagerly(layer, length):
            needed = int(paged.count_needed(layer, jnp.asarray(length)))
            free = int(layer.free_pages)
        if needed > free:
            raise ValueError(
                f"rows need {needed} more pages, but only {free} of {layer.num_pages} are free"
            )


def refuse_pages(state: object, what: str) -> None:
    """Raise ValueError if a state contains a `PagedCache`, whose arrays have no batch axis."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, paged.PagedCache))
    if any(isinstance(node, paged.PagedCache) for node in nodes):
        rule = "rows share its pages; use share_cache to copy and reorder rows"
        raise ValueError(f"{what} does not support a PagedCache: {rule}")


def refuse_state(cache: object, what: str) -> None:
    """Raise ValueError if a layer of a cache has a state instead of keys and values."""
    if isinstance(cache, ModelCache) and cache.has_state:
        rule = "the state of a layer includes all tokens of its row"
        raise ValueError(f"{what} does not support a StateCache: {rule}")


def max_positions(config: ModelConfig, cache: ModelCache) -> int | None:
    """Return the number of positions that fit in a model's cache, or None if it never fills up."""
    return cache.capacity if cache.exhausted is not None else cache_limit(config, cache.capacity)


def cache_limit(config: ModelConfig, capacity: int) -> int | None:
    """Return the number of positions that fit in a cache, or None if it never fills up.

    A ring has slots for its window and the sink tokens, and never fills up. Neither does a state.

    Args:
        config: the config of a decoder or an encoder-decoder.
        capacity: the number of slots per row in the layer with the most slots.
    """
    keyed = [i for i in range(config.decoder_layers) if not config.keeps_state(i)]
    rings = [_slots(config, i, capacity)[1] for i in keyed]
    return None if all(rings) else capacity


def empty_layers(
    config: ModelConfig,
    depth: int,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike | None = None,  # None means the compute dtype
    slack: int = 0,
) -> Layers:
    """Create the empty self-attention caches of a stack, whose leaves do not share memory.

    In a window pattern, windowed layers are rings of min(capacity, window + sinks + slack) slots.
    Layers with a state can drop their last `slack` tokens.
    """
    check_count("slack", slack, 0)
    if slack and not isinstance(config.window, tuple) and not config.has_state:
        rule = (
            "needs a window pattern or a layer with a state; a single window has `capacity` slots"
        )
        raise ValueError(f"slack is {slack}: {rule}")

    if dtype is not None and all(map(config.keeps_state, range(depth))):
        rule = "must be None, because no layer caches keys and values"
        raise ValueError(f"dtype is {jnp.dtype(dtype)}: {rule}")
    dtype = config.dtype if dtype is None else dtype
    layers: list[kv.KVCache | StateCache] = []
    for i in range(1 if config.scan_layers else depth):
        if config.keeps_state(i):
            layers.append(state_cache.init(batch, *_state_sizes(config, i), config.dtype, slack))
            continue
        slots, is_ring = _slots(config, i, capacity, slack)
        sinks = config.sink_tokens if is_ring else 0
        layers.append(kv.init(batch, slots, *config.cached_heads(i), dtype, sinks))
    if not config.scan_layers:
        return tuple(layers)
    # rows remain the first axis, so that beams reorder the leaves of both kinds of stack in the
    # same way
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * depth, axis=1), layers[0])


def _slots(config: ModelConfig, i: int, capacity: int, slack: int = 0) -> tuple[int, bool]:
    """Return the number of slots in layer i, and whether they form a ring."""
    # a cache that is too short for its window and sinks is not a ring, so it needs no sinks
    window = config.windows[i % len(config.windows)]
    if window is None:
        return capacity, False
    least = window + config.sink_tokens
    slots = min(capacity, least + slack) if isinstance(config.window, tuple) else capacity
    return slots, slots >= least


def check_is_cache(cache: object) -> None:
    """Raise ValueError unless this is a model's cache that no earlier call has consumed."""
    if not isinstance(cache, ModelCache):
        rule = "must be a ModelCache, which init_cache(config, batch, capacity) returns"
        raise ValueError(f"cache is of type {type(cache).__name__}: {rule}")
    check_not_consumed(cache, "cache")


def _state_sizes(config: ModelConfig, i: int) -> tuple[GatedDelta | ShortConv, int]:
    """Return the sizes of layer i, which has a state, and its number of channels."""
    if config.mixer(i) == "short_conv":
        assert config.short_conv is not None
        return config.short_conv, config.d_model
    assert config.gated_delta is not None
    return config.gated_delta, config.gated_delta.channels


def check_cache(config: ModelConfig, cache: ModelCache, tokens: jax.Array, crossed: bool) -> None:
    """Raise ValueError unless the cache matches the model and the number of token rows.

    `crossed` specifies whether the model is the decoder of an encoder-decoder.
    """
    check_is_cache(cache)
    if crossed and cache.cross is None:
        raise ValueError("cache.cross is None: make it from a source with method='init_cache'")
    depth = config.decoder_layers if crossed else config.num_layers
    for name in ("layers", "cross") if crossed else ("layers",):
        layers: Any = getattr(cache, name)
        if isinstance(layers, kv.KVCache) != config.scan_layers:
            kind, wanted = ("looped", "scanned") if config.scan_layers else ("scanned", "looped")
            raise ValueError(
                f"cache.{name} is for a {kind} stack, but the model has a {wanted} stack"
            )
        found = layers.length.shape[1] if config.scan_layers else len(layers)
        if found != depth:
            raise ValueError(f"cache.{name} has {found} layers, but the model has {depth}")
    layers = cache.layers
    for i in range(1 if config.scan_layers else depth):
        layer: Any = layers if cache.is_scanned else layers[i]
        if isinstance(layer, StateCache) != config.keeps_state(i):
            rule = f"layer {i} of the model has the mixer {config.mixer(i)}"
            raise ValueError(f"cache.layers[{i}] is of type {type(layer).__name__}, but {rule}")
        if isinstance(layer, StateCache):
            state = None if layer.state is None else layer.state.shape[1:]
            found_shapes = state, layer.tail.shape[1:]
            wanted_shapes = state_cache.shapes(*_state_sizes(config, i))
            if found_shapes != wanted_shapes:
                named = ["state {} and tail {}".format(*x) for x in (found_shapes, wanted_shapes)]
                rule = f"layer {i} of the model ({config.mixer(i)}) needs {named[1]}"
                raise ValueError(f"cache.layers[{i}] has {named[0]}: {rule}")
            continue
        if isinstance(layer, paged.PagedCache) != (cache.exhausted is not None):
            raise ValueError(
                f"cache.layers[{i}] is of type {type(layer).__name__}, but other layers are not"
            )
        if isinstance(layer, paged.PagedCache):
            continue
        slots, sinks = cache.capacity if config.scan_layers else layer.capacity, layer.sinks
        least = _slots(config, i, cache.capacity)[0]
        kept = config.sink_tokens if _slots(config, i, slots)[1] else 0
        if slots < least or sinks != kept:
            rule = f"the model needs {kept} and at least {least}"
            raise ValueError(f"cache.layers[{i}] has {sinks} sinks and {slots} slots: {rule}")
    if (rows := cache.length.shape[0]) != tokens.shape[0]:
        raise ValueError(f"tokens have {tokens.shape[0]} rows, but the cache has {rows}")


def refuse_past_capacity(positions: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
    """Replace positions past the end of the cache with padding (-1).

    Also return the affected rows, bool[B]. Raise ValueError if a known position is past the end.
    """
    known = concrete_value(positions)
    if known is not None and known.size:
        last = known.max()
        if last >= limit:
            raise ValueError(f"position {last} is beyond the capacity of the cache, {limit}")
    # a traced position cannot raise an error, so the caller sets the logits of these rows to NaN
    beyond = positions >= limit
    return jnp.where(beyond, -1, positions), beyond.any(axis=1)


def refuse_past_int32(
    positions: jax.Array,  # i32[B, T]
) -> tuple[jax.Array, jax.Array]:
    """Replace rows that reach position 2^31 - 1 with padding (-1).

    Also return these rows, bool[B]. Raise ValueError if a known position reaches this limit. A row
    that counts past the limit also contains it.
    """
    # this is the only limit of a ring: later positions would wrap around to negative ones, which
    # mean padding, so the tokens would be dropped silently
    last = np.iinfo(np.int32).max
    known = concrete_value(positions)
    if known is not None and (known >= last).any():
        row = int(np.argmax((known >= last).any(axis=1)))
        raise ValueError(f"row {row} would reach position {last}: rebase the cache before it does")
    beyond = (positions >= last).any(axis=1)
    return jnp.where(beyond[:, None], -1, positions), beyond
