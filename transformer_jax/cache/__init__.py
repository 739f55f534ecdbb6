"""Immutable caches of the keys and values of earlier tokens.

`kv_cache` is the cache of one layer, either full or a ring. `paged_cache` stores the cache of a
layer in pages that rows may share. `state_cache` is the cache of a layer that has a state instead
of keys and values. `model_cache` is the cache of a whole model, with its checks. These modules do
not compute attention and do not depend on a model's parameters.
"""

from transformer_jax.cache.kv_cache import (
    KVCache,
    dequantize,
    extend,
    extend_quantized,
    init,
    next_positions,
    quantize,
    read,
    rewind,
    update,
)
from transformer_jax.cache.model_cache import ModelCache, cache_limit, rewind_cache, share_cache
from transformer_jax.cache.paged_cache import PagedCache, gather_pages
from transformer_jax.cache.state_cache import PendingTokens, StateCache

__all__ = [
    "KVCache",
    "ModelCache",
    "PagedCache",
    "PendingTokens",
    "StateCache",
    "cache_limit",
    "dequantize",
    "extend",
    "extend_quantized",
    "gather_pages",
    "init",
    "next_positions",
    "quantize",
    "read",
    "rewind",
    "rewind_cache",
    "share_cache",
    "update",
]
