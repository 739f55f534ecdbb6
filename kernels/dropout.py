"""Dropout bits that depend on the place in the attention matrix, not on who computes it.

Each bit is a hash of (key, batch row and head, query index, key index), so the materialised, the
blockwise and the fused attention drop the same weights, forward and backward, without a buffer of
T x S bits. Integer operations only: a kernel in any language can repeat them.

    mix(x)            x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16
    absorb(a, b, w)   a = mix(a ^ w); b = mix(b + a)
    a, b              absorb the key's words, the head index b N + n, and the query index
    bits              mix((mix(k_index) ^ a) + b), uniform in 32 bits; kept where >= rate 2^32

`mix` is Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/), a bijection whose avalanche
is within 0.2 % of even. The hash is for dropout, not for cryptography or sampling.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.kernels.contract import keep, mix

_START = 0x9E3779B9, 0x85EBCA6B  # the golden ratio, and a constant of murmur3


def key_words(key: jax.Array) -> jax.Array:  # u32[words]
    """The words of a PRNG key, typed or raw; two for JAX's default generator."""
    data = jax.random.key_data(key)
    if data.ndim != 1:
        raise ValueError(f"dropout_key has shape {key.shape}: must be a single key")
    return data


def keep_tile(
    key_data: jax.Array,  # u32[words]
    rate: float,
    *,
    head_index: jax.Array,  # i32[...], batch row b and head n as b N + n
    q_index: jax.Array,  # i32[T], indices of queries in the array, not positions
    k_index: jax.Array,  # i32[S]
) -> jax.Array:  # bool[..., T, S]
    """True with probability 1 - rate, independently for each head, query and key of a tile."""
    a, b = _head_words(key_data, head_index)
    rows = q_index.astype(jnp.uint32).reshape((1,) * a.ndim + (-1, 1))
    columns = k_index.astype(jnp.uint32).reshape((1,) * a.ndim + (1, -1))
    return keep(a[..., None, None], b[..., None, None], rows, columns, rate)


def head_words(key_data: jax.Array, B: int, N: int) -> tuple[jax.Array, jax.Array]:  # u32[B, N]
    """a and b once the key and the head are absorbed: where a kernel goes on from."""
    return _head_words(key_data, jnp.arange(B * N, dtype=jnp.int32).reshape(B, N))


def _head_words(key_data: jax.Array, head_index: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = (jnp.uint32(word) for word in _START)
    for i in range(key_data.shape[0]):
        a, b = _absorb(a, b, key_data[i])
    return _absorb(a, b, head_index.astype(jnp.uint32))


def _absorb(a: jax.Array, b: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array]:
    a = mix(a ^ word)
    return a, mix(b + a)
