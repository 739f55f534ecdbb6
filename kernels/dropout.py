"""Dropout masks for attention weights, from a hash of the position in the attention matrix.

Each decision is a hash of (key, batch row and head, query index, key index). Therefore, every
implementation drops the same weights, in both passes and in any order of tiles, without a buffer of
T x S bits. The hash uses only integer operations, so kernels in any language can compute it.

    mix(x)            x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16
    absorb(a, b, w)   a = mix(a ^ w); b = mix(b + a)
    a, b              absorb the key's words, the head index b N + n, and the query index
    bits              mix((mix(k_index) ^ a) + b), uniform in 32 bits; kept if >= rate 2^32

`mix` is Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/), a bijection whose avalanche
is within 0.2 % of the ideal. The hash is suitable for dropout, but not for cryptography or
sampling.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_START = 0x9E3779B9, 0x85EBCA6B  # the golden ratio, and a constant of murmur3


def mix(x: jax.Array) -> jax.Array:  # u32[...] -> u32[...]
    """Hash 32 bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def threshold(rate: float) -> int:
    """Return the smallest 32-bit hash that keeps a weight."""
    return min(round(rate * 2**32), 2**32 - 1)


def exact_rate(rate: float) -> float:
    """Return the effective rate r of the threshold, by which kept weights are scaled: 1 / (1 - r).

    Near 1, the effective rate differs from `rate`. For a rate of 1 - 1e-10, one hash in 2^32 keeps
    its weight, instead of 0.43 hashes.
    """
    return threshold(rate) / 2**32


def head_words(key_data: jax.Array, B: int, N: int) -> tuple[jax.Array, jax.Array]:  # u32[B, N]
    """Return a and b for each batch row and head, which depend on the key and the head."""
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
    """Return a mask of the weights to keep in a tile, computed from the words of its head."""
    # absorb the query once per row and mix the key index once per column, which leaves one `mix`
    # per pair
    a = mix(a ^ q_index)
    b = mix(b + a)
    return mix((mix(k_index) ^ a) + b) >= jnp.uint32(threshold(rate))


def _absorb(a: jax.Array, b: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array]:
    a = mix(a ^ word)
    return a, mix(b + a)
