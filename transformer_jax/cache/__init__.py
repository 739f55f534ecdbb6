"""Hold the keys and values of tokens already read, as immutable pytrees.

`kv_cache` is the cache of one layer, a full one or a ring, and `paged_cache` one of pages that rows
share; `model_cache` is that of a whole model, with the checks of what still fits. Nothing here
computes attention or knows a model's parameters.
"""

from transformer_jax.cache.kv_cache import (
    KVCache,
    dequantise,
    extend,
    extend_held,
    init,
    next_positions,
    quantise,
    read,
    rewind,
    update,
)
from transformer_jax.cache.model_cache import ModelCache, cache_limit, rewind_cache, share_cache
from transformer_jax.cache.paged_cache import PagedCache, gather_pages

__all__ = [
    "KVCache",
    "ModelCache",
    "PagedCache",
    "cache_limit",
    "dequantise",
    "extend",
    "extend_held",
    "gather_pages",
    "init",
    "next_positions",
    "quantise",
    "read",
    "rewind",
    "rewind_cache",
    "share_cache",
    "update",
]
