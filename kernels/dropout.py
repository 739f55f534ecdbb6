"""Decide which weights dropout keeps, by a hash of their place in the attention matrix.

Each decision hashes (key, batch row and head, query index, key index). So every implementation
drops the same weights, forward and backward, without a buffer of T x S bits, whoever computes a
tile and in which order. Only integer operations occur: a kernel in any language can repeat them.

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

_START = 0x9E3779B9, 0x85EBCA6B  # the golden ratio, and a constant of murmur3


def mix(x: jax.Array) -> jax.Array:  # u32[...] -> u32[...]
    """Scramble 32 bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def threshold(rate: float) -> int:
    """Return the least 32 bits with which a weight is kept."""
    return min(round(rate * 2**32), 2**32 - 1)


def exact_rate(rate: float) -> float:
    """Return the rate that this threshold has: 1 / (1 - it) makes up for what is dropped.

    Near 1 it is far from `rate`; of 1 - 1e-10, 4 weights of 2^32 would be kept where 1 is.
    """
    return threshold(rate) / 2**32


def head_words(key_data: jax.Array, B: int, N: int) -> tuple[jax.Array, jax.Array]:  # u32[B, N]
    """Return a and b of every batch row and head: the key and the head are absorbed."""
    a, b = (jnp.uint32(word) for word in _START)
    for i in range(key_data.shape[0]):
        a, b = _absorb(a, b, key_data[i])
    return _absorb(a, b, jnp.arange(B * N, dtype=jnp.uint32).reshape(B, N))


def keep(
    a: jax.Array,  # u32[], of the batch row and head
    b: jax.Array,  # u32[]
    q_index: jax.Array,  # u32[block_q, 1] or broadcast: indices in the array, not positions
    k_index: jax.Array,  # u32[1, block_k] or broadcast
    rate: float,
) -> jax.Array:  # bool[block_q, block_k]
    """Return which weights of a tile are kept, given the words of its head."""
    # the query is absorbed once for a row of the tile, and the key's index mixed once for a column:
    # a pair costs one `mix`
    a = mix(a ^ q_index)
    b = mix(b + a)
    return mix((mix(k_index) ^ a) + b) >= jnp.uint32(threshold(rate))


def _absorb(a: jax.Array, b: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array]:
    a = mix(a ^ word)
    return a, mix(b + a)
