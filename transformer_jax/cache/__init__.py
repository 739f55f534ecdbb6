"""Immutable caches of the keys and values of tokens already read.

`kv_cache` is the cache of one layer, full or ring; `paged_cache` stores it in pages that rows may
share; `model_cache` is the cache of a whole model, with its checks. Nothing here computes attention
or depends on a model's parameters.
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

__all__ = [
    "KVCache",
    "ModelCache",
    "PagedCache",
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
