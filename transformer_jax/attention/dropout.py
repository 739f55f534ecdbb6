"""Words of a PRNG key, from which kernels/dropout.py derives the dropout mask by hashing."""

from __future__ import annotations

import jax


def key_words(key: jax.Array) -> jax.Array:  # u32[words]
    """Return the words of a typed or raw PRNG key; JAX's default generator uses two words."""
    data = jax.random.key_data(key)
    if data.ndim != 1:
        raise ValueError(f"dropout_key has shape {key.shape}: must be a single key")
    return data
