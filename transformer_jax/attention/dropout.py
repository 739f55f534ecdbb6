"""Words of a PRNG key, from which kernels/dropout.py computes the dropout mask by hashing."""

from __future__ import annotations

import jax


def key_words(key: jax.Array) -> jax.Array:  # u32[words]
    """Return the words of a PRNG key, typed or raw; two for JAX's default generator."""
    data = jax.random.key_data(key)
    if data.ndim != 1:
        raise ValueError(f"dropout_key has shape {key.shape}: must be a single key")
    return data
