"""Read keys and values as caches hold them: int8 with scales, and pages of a pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def dequantise(
    q: jax.Array,  # i8[..., H]
    scale: jax.Array,  # f32[...]
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:  # [..., H]
    """Return scale * q, computed in f32.

    Args:
        q: i8[..., H].
        scale: f32[...].
        dtype: of the result.
    """
    return (q.astype(jnp.float32) * scale[..., None]).astype(dtype)


def rows_of_pages(
    x: jax.Array,  # [P, page, ..]
    pages: jax.Array,  # i32[B, M]; an entry that is no page reads some page
) -> jax.Array:  # [B, M * page, ..]
    """Return the pages of each row one after the other, which is a copy."""
    (B, M), (_, page, *rest) = pages.shape, x.shape
    return x[clip_pages(pages, x.shape[0])].reshape(B, M * page, *rest)


def clip_pages(pages: jax.Array, P: int) -> jax.Array:  # i32[B, M]
    """Return a table that names only pages of the pool."""
    return jnp.clip(pages.astype(jnp.int32), 0, P - 1)
