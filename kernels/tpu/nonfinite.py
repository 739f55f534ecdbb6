"""Keep the rule on what is not finite, in the tile that holds it.

Zero times NaN is NaN. So where a tile has a nonfinite number, what is multiplied with weights is
made finite, and NaN is added to the scores of the pairs that meet it, before the mask selects. A
kernel has that arithmetic beside the usual one, and each tile takes one of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def has_nonfinite(x: jax.Array) -> jax.Array:  # bool[]
    """Return whether a tile has a number that is not finite."""
    return _marks(x).sum(axis=0, keepdims=True).sum() != 0


def marks_as_column(x: jax.Array) -> jax.Array:  # f32[rows, 1]
    """Return NaN for rows that are not finite, else 0."""
    return _marks(x).sum(axis=1, keepdims=True)


def marks_as_row(x: jax.Array) -> jax.Array:  # f32[1, rows]
    """Return the same along the lanes."""
    return _marks(x).T.sum(axis=0, keepdims=True)


def without_nonfinite(x: jax.Array) -> jax.Array:
    """Return a tile with zeros in the rows that are not finite."""
    kept = jnp.where(marks_as_column(x) == 0, x.astype(jnp.float32), 0.0)
    return kept.astype(x.dtype)


def _marks(x: jax.Array) -> jax.Array:
    """Return 0 for each finite number, else NaN."""
    return x.astype(jnp.float32) * 0
