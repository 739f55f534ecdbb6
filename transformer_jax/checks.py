"""Integers in int32: narrower or unsigned ones would wrap in a difference, wider ones are cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.tiles import at_once

INT32 = np.iinfo(np.int32)


def as_int32(name: str, values: Any) -> Any:
    """Integers as i32, NumPy's as NumPy's; anything else as it is.

    ValueError where a value does not fit and is known; a traced one becomes the nearest that does.
    """
    if values is None:
        return None
    if not hasattr(values, "dtype"):
        values = np.asarray(values)
    if values.dtype == np.int32 or not jnp.issubdtype(values.dtype, jnp.integer):
        return values
    if isinstance(values, jax.ShapeDtypeStruct):
        return values.update(dtype=jnp.int32)
    check_int32(name, values)
    if not isinstance(values, jax.Array):
        return values.astype(np.int32)
    own = jnp.iinfo(values.dtype)
    with at_once(values):
        values = jnp.clip(values, max(int(own.min), INT32.min), min(int(own.max), INT32.max))
        return values.astype(jnp.int32)


def check_int32(name: str, values: Any) -> None:
    """ValueError where an integer is known and does not fit int32."""
    if isinstance(values, jax.core.Tracer | jax.ShapeDtypeStruct):
        return
    if np.can_cast(values.dtype, np.int32) or not getattr(values, "is_fully_addressable", True):
        return
    known = np.asarray(values)
    beyond = known[(known < INT32.min) | (known > INT32.max)]
    if beyond.size:
        raise ValueError(f"{name} holds {beyond[0]}: must be from {INT32.min} to {INT32.max}")
