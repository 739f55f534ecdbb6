"""Keys and values in the formats of caches, such as int8 with scales and pages in a pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def dequantize(
    q: jax.Array,  # i8[..., H]
    scale: jax.Array,  # f32[...]
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:  # [..., H]
    """Return scale * q, computed in float32.

    Args:
        q: i8[..., H].
        scale: f32[...].
        dtype: dtype of the result.
    """
    return (q.astype(jnp.float32) * scale[..., None]).astype(dtype)


def rows_of_pages(
    x: jax.Array,  # [P, page, ..]
    pages: jax.Array,  # i32[B, M]; an invalid entry is clipped to a valid page
) -> jax.Array:  # [B, M * page, ..]
    """Return a copy with contiguous pages in each row."""
    (B, M), (_, page, *rest) = pages.shape, x.shape
    return x[clip_pages(pages, x.shape[0])].reshape(B, M * page, *rest)


def clip_pages(pages: jax.Array, P: int) -> jax.Array:  # i32[B, M]
    """Clip the entries of a block table to valid page indices in the pool."""
    return jnp.clip(pages.astype(jnp.int32), 0, P - 1)
