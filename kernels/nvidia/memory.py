"""Layouts of shared memory and registers, and transfers between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxlib.mlir.dialects import nvvm

from transformer_jax.kernels.contract import Index, Problem

Ref = Any
"""Reference to memory or barriers, or to a part of them. Pallas has no public type for it."""

Scratch = pl.MemoryRef | plgpu.Barrier
"""Type of the scratch memory or the barriers of a kernel."""
Layout = Any
"""Register layout of a tile. Pallas has no public type for it."""
Span = pl.Slice | slice
Value = Any
"""MLIR value or context. Pallas passes private types."""

ROWS = 64  # rows of a tile that a warpgroup multiplies
ROW, COLUMN = 0, 1  # the axis of a tile along which a vector varies
WGMMA = plgpu.Layout.WGMMA  # register layout of a warpgroup for a tile of 64 rows

HAS_JAX_11 = hasattr(plgpu, "InterpretGPUParams")
HAS_INTERPRETER = hasattr(plgpu, "store")  # jax 0.12; the one in jax 0.11 fails on these kernels

f32 = jnp.float32
i32 = jnp.int32


def tile_slots(
    slots: int | None, rows: int, width: int, dtype: DTypeLike, swizzle: int | None = None
) -> Scratch:
    """Return the type of slots in shared memory, laid out for wgmma and TMA."""
    size = jnp.dtype(dtype).itemsize
    swizzle = swizzle or swizzle_of(size, width)
    tiling = plgpu.TilingTransform((8, swizzle // size))
    # a swizzle of 16 bytes is the plain order, which needs no transform
    swizzled = (plgpu.SwizzleTransform(swizzle),) if swizzle > 16 else ()
    shape = (rows, width) if slots is None else (slots, rows, width)
    return plgpu.SMEM(shape, dtype, transforms=(tiling, *swizzled))


def swizzle_of(size: int, *widths: int) -> int:
    """Return the widest swizzle, in bytes, that divides the rows of all widths.

    `size` is the number of bytes per element. `widths` contains the widths of the tile and of its
    array.
    """
    return next(s for s in (128, 64, 32) if all(width * size % s == 0 for width in widths))


def at(ref: Ref, *index: Index | Span) -> Ref:
    """Return `ref.at[index]`, with index 0 along axes of size 1."""
    return ref.at[tuple(0 if size == 1 else i for size, i in zip(ref.shape, index, strict=True))]


def slot_of(step: Index, slots: int) -> jax.Array:
    """Return the slot of a step as i32, even if x64 is enabled."""
    return lax.rem(step, i32(slots))


def load(ref: Ref, layout: Layout) -> jax.Array:
    """Load registers in a layout from `ref`, which may be in global memory."""
    index = () if HAS_JAX_11 else ((),)
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def load_along(ref: Ref, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Load a vector along one axis of a tile, and broadcast it along the other axis."""
    vector = load(ref, WGMMA.reduce(1 - axis))
    return lax.broadcast_in_dim(vector, shape, [axis])


def fence(problem: Problem) -> None:
    """Order a thread's reads and writes of shared memory before later copies and products."""
    # `commit_smem` would also synchronize all warps. This fence must be followed by an arrival at a
    # barrier that the copies and products wait for. The interpreter does not support the fence
    if problem.interpret or not HAS_JAX_11:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def emit(_: Value) -> None:
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    emit()


def across(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast the value of each row over the columns of a tile."""
    return lax.broadcast_in_dim(rows, like.shape, [0])


def filled(shape: tuple[int, ...], value: float) -> jax.Array:
    """Return registers that contain a constant value, for rows or for a tile."""
    layout = WGMMA if len(shape) == 2 else WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, f32), layout)
