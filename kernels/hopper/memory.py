"""Lay out shared memory, and move numbers between it and registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

Ref = Any
"""A reference to memory or to barriers, or a part of one; Pallas has no public type for it."""

ROWS = 64  # rows of a tile that one warpgroup multiplies
ROW, COLUMN = 0, 1  # the axis of a tile along which a vector lies
WGMMA = plgpu.Layout.WGMMA  # how the registers of a warpgroup hold a tile

HAS_JAX_11 = hasattr(plgpu, "InterpretGPUParams")
HAS_INTERPRETER = hasattr(plgpu, "store")  # that of jax 0.12; the one of jax 0.11 fails here

f32 = jnp.float32
i32 = jnp.int32


def tile_slots(
    slots: int, rows: int, width: int, dtype: DTypeLike, swizzle: int | None = None
) -> Any:
    """Return the type of slots in shared memory, laid out as wgmma and TMA want them."""
    size = jnp.dtype(dtype).itemsize
    swizzle = swizzle or next(s for s in (128, 64, 32) if width * size % s == 0)
    layout = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM((slots, rows, width), dtype, transforms=layout)


def at(ref: Ref, *index: Any) -> Ref:
    """Return `ref.at[index]`, where an axis of size 1 is shared."""
    return ref.at[tuple(0 if size == 1 else i for size, i in zip(ref.shape, index, strict=True))]


def slot_of(step: Any, slots: int) -> jax.Array:
    """Return which slot a step uses; i32 also where Python's integers are taken for i64."""
    return lax.rem(step, i32(slots))


def opaque(slot: Any) -> jax.Array:
    """Hide from the compiler which slot this is.

    wgmma takes a descriptor for every 16 columns of a tile. Those of a slot that stays would be
    kept in registers from step to step, up to 64 of them, and something else spilled. So they cost
    an addition each time instead.
    """
    return lax.optimization_barrier(jnp.asarray(slot, i32)) if HAS_JAX_11 else slot


def load(ref: Ref, layout: Any) -> jax.Array:
    """Load registers in a layout, straight from global memory where `ref` is there."""
    index = () if HAS_JAX_11 else ((),)
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def load_along(ref: Ref, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Load a vector along one axis of a tile, repeated over the other."""
    vector = load(ref, WGMMA.reduce(1 - axis))
    return lax.broadcast_in_dim(vector, shape, [axis])


def across(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Repeat a value per row over the columns of a tile."""
    return lax.broadcast_in_dim(rows, like.shape, [0])


def filled(shape: tuple[int, ...], value: float) -> jax.Array:
    """Return registers of one value, for rows or for a tile."""
    layout = WGMMA if len(shape) == 2 else WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, f32), layout)
