"""Lowered decoding steps over a cache for attached or other devices, and their large results.

The step writes one token per row into a donated cache and attends to the filled part of the row.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from transformer_jax import Causal, Window, dot_product_attention
from transformer_jax.cache import kv_cache, paged_cache

B, S, N, K, H = 8, 32768, 32, 8, 128  # rows, capacity, query heads, key heads, head dimension


def lowered(
    place: jax.sharding.Sharding,
    capacity: int = S,
    window: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    H: int = H,
) -> jax.stages.Lowered:
    """Return the lowered step over a cache with a given dtype for the target of `kernels.using`."""

    def step(cache: Any, query: jax.Array, new: jax.Array) -> tuple[Any, jax.Array]:
        at = cache.length[:, None]
        cache, seen = kv_cache.extend_quantized(cache, new, new, at, window)
        mask = Causal() if window is None else Causal() & Window(window)
        settings: dict[str, Any] = dict(q_positions=at, k_positions=seen.positions)
        settings |= dict(key_scale=seen.k_scale, value_scale=seen.v_scale)
        settings |= dict(mask=mask, implementation="pallas")
        return cache, dot_product_attention(query, seen.k, seen.v, **settings)

    cache = jax.eval_shape(lambda: kv_cache.init(B, capacity, K, H, dtype=dtype))
    query, new = (jax.ShapeDtypeStruct((B, 1, heads, H), jnp.bfloat16) for heads in (N, K))
    return jax.jit(step, donate_argnums=0).lower(*_placed(place, (cache, query, new)))


def lowered_over_pages(
    place: jax.sharding.Sharding, page: int, dtype: DTypeLike = jnp.bfloat16, *, K: int = K
) -> tuple[jax.stages.Lowered, int]:
    """Return the lowered step over pages and the number of elements in a pool.

    The pool has half of the pages that all rows together could fill.
    """

    def step(cache: Any, query: jax.Array, new: jax.Array) -> tuple[Any, jax.Array]:
        at = cache.length[:, None]
        cache = paged_cache.update(cache, new, new, at)
        settings: dict[str, Any] = dict(q_positions=at)
        settings |= dict(k_positions=paged_cache.gather_positions(cache), mask=Causal())
        settings |= dict(key_scale=cache.k_scale, value_scale=cache.v_scale)
        settings |= dict(block_table=cache.block_table, implementation="pallas")
        return cache, dot_product_attention(query, cache.k, cache.v, **settings)

    pages = dict(num_pages=B * S // page // 2, page_size=page)
    cache = jax.eval_shape(lambda: paged_cache.init(B, S, K, H, dtype=dtype, **pages))
    wide = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    query, new = (jax.ShapeDtypeStruct((B, 1, heads, H), wide) for heads in (4 * K, K))
    step_of = jax.jit(step, donate_argnums=0).lower(*_placed(place, (cache, query, new)))
    return step_of, cache.k.size


def _placed(place: jax.sharding.Sharding, tree: Any) -> Any:
    """Return shape structs for arrays on a device."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def large_results(text: str, least: int) -> list[tuple[str, bool]]:
    """Return the opcodes with results of this size and whether each is a scatter.

    Views are excluded, and a fusion is one operation.
    """
    views = ("parameter", "tuple", "bitcast", "get-tuple-element")
    found = []
    for line in text[text.index("\nENTRY") :].splitlines():
        match = re.match(r"\s+(?:ROOT )?%\S+ = (.*?) ([\w-]+)\(", line)
        if match and match[2] not in views:
            shapes = re.findall(r"\[([\d,]+)\]", match[1])
            if any(math.prod(map(int, x.split(","))) >= least for x in shapes):
                found.append((match[2], "scatter" in line))
    return found
