"""Tests for traced and known values, and computation with known values inside a trace.

A function that checks values calls `concrete_value` and then uses NumPy. Inside a trace, every
operation of `jax.numpy` returns a traced value, even if its arguments are known.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar, overload

import jax
import numpy as np
from jax.typing import ArrayLike

T = TypeVar("T")


def traced(*arrays: object) -> bool:
    """Whether any of these values is traced and therefore unknown."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


@overload
def concrete_value(x: ArrayLike | jax.ShapeDtypeStruct) -> np.ndarray | None: ...
@overload
def concrete_value(x: ArrayLike | jax.ShapeDtypeStruct, otherwise: T) -> np.ndarray | T: ...
def concrete_value(x: ArrayLike | jax.ShapeDtypeStruct, otherwise: Any = None) -> Any:
    """Convert an array to NumPy; return `otherwise` if it is traced or not fully addressable."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        return otherwise
    return np.asarray(x) if getattr(x, "is_fully_addressable", True) else otherwise


def are_concrete(*sizes: object) -> bool:
    """Whether all sizes are numbers rather than symbolic sizes of `jax.export`."""
    return all(isinstance(n, int | np.integer) for n in sizes)


def eagerly(*trees: object) -> contextlib.AbstractContextManager[None]:
    """Return a context that computes known values eagerly, even inside a trace.

    The context has no effect if any leaf of `trees` is traced. It also has no effect inside a
    `shard_map`, which provides no mesh to compute on.
    """
    inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
    if inside or traced(*jax.tree.leaves(trees)):
        return contextlib.nullcontext()
    return jax.ensure_compile_time_eval()
