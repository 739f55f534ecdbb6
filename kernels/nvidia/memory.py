"""Lay out shared memory, and move numbers between it and registers."""

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
"""A reference to memory or to barriers, or a part of one; Pallas has no public type for it."""

Scratch = pl.MemoryRef | plgpu.Barrier
"""The type of some memory of a kernel."""
Layout = Any
"""How registers hold a tile; Pallas has no public type for it."""
Span = pl.Slice | slice
Value = Any
"""A value, or the context, of MLIR; Pallas passes types of its own."""

ROWS = 64  # rows of a tile that one warpgroup multiplies
ROW, COLUMN = 0, 1  # the axis of a tile along which a vector lies
WGMMA = plgpu.Layout.WGMMA  # how the registers of a warpgroup hold a tile of 64 rows

HAS_JAX_11 = hasattr(plgpu, "InterpretGPUParams")
HAS_INTERPRETER = hasattr(plgpu, "store")  # that of jax 0.12; the one of jax 0.11 fails here

f32 = jnp.float32
i32 = jnp.int32


def tile_slots(
    slots: int | None, rows: int, width: int, dtype: DTypeLike, swizzle: int | None = None
) -> Scratch:
    """Return the type of slots in shared memory, laid out as wgmma and TMA want them; None: one."""
    size = jnp.dtype(dtype).itemsize
    swizzle = swizzle or swizzle_of(size, width)
    tiling = plgpu.TilingTransform((8, swizzle // size))
    # 16 bytes are the order of memory itself: no transform says so
    swizzled = (plgpu.SwizzleTransform(swizzle),) if swizzle > 16 else ()
    shape = (rows, width) if slots is None else (slots, rows, width)
    return plgpu.SMEM(shape, dtype, transforms=(tiling, *swizzled))


def swizzle_of(size: int, *widths: int) -> int:
    """Return the most bytes of a row that may lie together, for numbers of a size in bytes.

    Each of the widths, of a tile or of an array that it is a part of, consists of such parts.
    """
    return next(s for s in (128, 64, 32) if all(width * size % s == 0 for width in widths))


def at(ref: Ref, *index: Index | Span) -> Ref:
    """Return `ref.at[index]`, where an axis of size 1 is shared."""
    return ref.at[tuple(0 if size == 1 else i for size, i in zip(ref.shape, index, strict=True))]


def slot_of(step: Index, slots: int) -> jax.Array:
    """Return which slot a step uses; i32 also where Python's integers are taken for i64."""
    return lax.rem(step, i32(slots))


def load(ref: Ref, layout: Layout) -> jax.Array:
    """Load registers in a layout, straight from global memory where `ref` is there."""
    index = () if HAS_JAX_11 else ((),)
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def load_along(ref: Ref, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Load a vector along one axis of a tile, repeated over the other."""
    vector = load(ref, WGMMA.reduce(1 - axis))
    return lax.broadcast_in_dim(vector, shape, [axis])


def fence(problem: Problem) -> None:
    """Order a thread's own reads and writes of shared memory before later copies and products."""
    # `commit_smem` also makes all warps wait for each other. Here an arrival at a barrier must
    # follow, for which the copies and products wait; the interpreter has no such fence
    if problem.interpret or not HAS_JAX_11:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def emit(_: Value) -> None:
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    emit()


def across(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Repeat a value per row over the columns of a tile."""
    return lax.broadcast_in_dim(rows, like.shape, [0])


def filled(shape: tuple[int, ...], value: float) -> jax.Array:
    """Return registers of one value, for rows or for a tile."""
    layout = WGMMA if len(shape) == 2 else WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, f32), layout)
