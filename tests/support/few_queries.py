"""Calls with few queries over a cache, for the decode kernels of every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.attention_suite import draw, reference
from transformer_jax import Causal, Prefix, Window, dot_product_attention
from transformer_jax.cache import kv_cache as kv

KERNELS = [
    (1, {}, "decode"),
    (16, {}, "decode"),
    (17, {}, "forward"),
    (1, dict(dropout_rate=0.1, dropout_key=jax.random.key(0)), "forward"),
]
"""The kernel that computes T queries with four heads per key head, and options."""


def arrays_of(width, T=1, heads=8, kv_heads=2, keys=200, **sizes):
    """Draw the arrays of a call in bfloat16 with this head dimension."""
    sizes = dict(batch=2, queries=T, keys=keys, heads=heads, kv_heads=kv_heads) | sizes
    return draw(5, **sizes, dim=width, value_dim=width, dtype="bfloat16")


def program(arrays, **settings):
    """Return a function that computes (out, lse), and its inputs."""

    def attend(query, key, value):
        settings_ = dict(return_lse=True, implementation="pallas") | settings
        return dot_product_attention(query, key, value, **settings_)

    return attend, [arrays[name] for name in ("query", "key", "value")]


def token_over_a_ring(width, capacity, window, sinks):
    """Decode one token per row over a ring buffer; return results and the float64 reference.

    The first row has wrapped around, so its positions are not in order.
    """
    arrays, lengths = arrays_of(width, keys=701), np.array([700, 90])
    positions = jnp.where(np.arange(701) < lengths[:, None], np.arange(701), -1)
    cache = kv.init(2, capacity, 2, width, dtype=jnp.bfloat16, sinks=sinks)
    cache = kv.update(cache, arrays["key"], arrays["value"], positions)

    def step(query, key, value, cache):
        at = cache.length[:, None]
        new = (jnp.take_along_axis(x, at[..., None, None], axis=1) for x in (key, value))
        _, key, value, slot_positions = kv.extend(cache, *new, at, window)
        mask = Causal() & (Window(window) | Prefix(np.full(1, sinks, np.int32)))
        attend, inputs = program(
            dict(query=query, key=key, value=value),
            mask=mask,
            q_positions=at,
            k_positions=slot_positions,
        )
        return *attend(*inputs), slot_positions

    out, lse, slot_positions = jax.jit(step)(arrays["query"], arrays["key"], arrays["value"], cache)
    assert (np.diff(slot_positions[0]) < 0).any()
    far = lengths[:, None] - np.arange(701)
    seen = (far >= 0) & ((far < window) | (np.arange(701) < sinks))
    expected = reference(arrays, np.broadcast_to(seen[:, None, None], (2, 8, 1, 701)))
    return {"out": out, "lse": lse}, expected
