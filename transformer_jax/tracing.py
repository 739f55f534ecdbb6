"""Tell traced values from known ones, and compute known ones inside a trace.

A check of values asks `known_value` first and goes on in NumPy: inside a trace every operation of
`jax.numpy` gives a traced value, of known arrays too.
"""

from __future__ import annotations

import contextlib

import jax
import numpy as np
from jax.typing import ArrayLike


def traced(*arrays: object) -> bool:
    """Return whether the value of one of these is not known yet."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def known_value(x: ArrayLike | jax.ShapeDtypeStruct) -> np.ndarray | None:
    """Return an array's value as NumPy's array; None where it is traced, or not all on hand."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        return None
    return np.asarray(x) if getattr(x, "is_fully_addressable", True) else None


def known_sizes(*sizes: object) -> bool:
    """Return whether all sizes are numbers, none an open one of an export, such as `(b, 20)`."""
    return all(isinstance(n, int | np.integer) for n in sizes)


def at_once(*trees: object) -> contextlib.AbstractContextManager[None]:
    """Return a context that computes known values as constants, also inside a trace.

    It does nothing where a leaf of `trees` is traced, and inside a `shard_map`, where JAX has no
    mesh to compute on.
    """
    inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
    if inside or traced(*jax.tree.leaves(trees)):
        return contextlib.nullcontext()
    return jax.ensure_compile_time_eval()
