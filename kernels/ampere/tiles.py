"""Operations on tiles in device memory, shared memory and registers (with `mma.sync`).

A program is one warpgroup of four warps. Mosaic GPU inserts a barrier before and after each store
to shared memory, so a read from a slot returns the last value that was stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

from transformer_jax.kernels.contract import Problem
from transformer_jax.kernels.nvidia.memory import (
    ROWS,
    Layout,
    Ref,
    Scratch,
    Span,
    Value,
    filled,
    load,
    tile_slots,
)
from transformer_jax.kernels.nvidia.schedule import name_of
from transformer_jax.kernels.sharding import vary

LAYOUT: Any = plgpu.Layout
mma: Any = getattr(plgpu, "mma", None)  # new in jax 0.11
HAS_MMA = mma is not None


def launch(
    problem: Problem, body: Callable[..., None], items: int, **options: Any
) -> Callable[..., Any]:
    """Return a kernel as a function of arrays, with one program for each item."""
    interpret = {"interpret": problem.interpret} if problem.interpret else {}
    kernel = plgpu.kernel(
        body,
        grid=(items,),
        grid_names=("program",),
        kernel_name=name_of(body),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **interpret,
        **options,
    )
    # Mosaic GPU loses the information that the results vary over a mesh like the arguments
    return lambda *arrays: vary(kernel(*arrays), like=arrays[:2])


def check_rows(kind: str, rows: int) -> None:
    """Raise ValueError unless the tiles have 64 rows."""
    if rows != ROWS:
        raise ValueError(f"a tile of the {kind} kernel must have {ROWS} rows, not {rows}")


def swizzle_of(rows: int, width: int, dtype: DTypeLike) -> int:
    """Return the widest swizzle, in bytes, for which four warps copy the same number of parts.

    The swizzle of an int8 tile covers the same number of columns as the swizzle of the dequantized
    tile.
    """
    size = jnp.dtype(dtype).itemsize
    row = width * max(size, 2)
    widest = next(s for s in (128, 64, 32) if row % s == 0 and rows // 8 * (row // s) % 4 == 0)
    return widest * size // max(size, 2)


def slot(rows: int, width: int, dtype: DTypeLike) -> Scratch:
    """Return the type of a tile in shared memory, with the layout for `ldmatrix`."""
    return tile_slots(None, rows, width, dtype, swizzle_of(rows, width, dtype))


def slots(count: int, rows: int, width: int, dtype: DTypeLike) -> Scratch:
    """Return the type of several tiles in shared memory."""
    return tile_slots(count, rows, width, dtype, swizzle_of(rows, width, dtype))


def copy_layout(tile: Ref) -> Layout:
    """Return the register layout for copying a tile. Each thread has parts of the rows."""
    (rows, width), dtype = tile.shape, tile.dtype
    return LAYOUT.SMEM_GMEM_COPY((rows, width), dtype, swizzle_of(rows, width, dtype))


def parts_of_rows(tile: Ref) -> list[tuple[slice, Span]]:
    """Return the indices of the groups of columns that the tile's swizzle keeps together."""
    (rows, width), size = tile.shape, jnp.dtype(tile.dtype).itemsize
    columns = swizzle_of(rows, width, tile.dtype) // size
    return [(slice(None), pl.ds(first, columns)) for first in range(0, width, columns)]


def fetch(source: Ref, like: Ref | None = None) -> jax.Array:
    """Load a tile, which may be in device memory, into registers along its rows.

    The register layout matches `like`, the destination of the next store, or else the tile itself.
    """
    return load(source, copy_layout(source if like is None else like))


def start_copy(problem: Problem, source: Ref, tile: Ref) -> None:
    """Start a group of copies from device memory to a tile of `slots` (`cp.async`)."""
    # Pallas emits `cp.async` only for capability 8 and for contiguous rows, but all later GPUs have
    # the instruction. The interpreter does not support copies without a barrier.
    if problem.interpret:
        tile[...] = source[...]
        return
    layout, (rows, width), dtype = copy_layout(tile), tile.shape, tile.dtype
    swizzle = swizzle_of(rows, width, dtype)
    columns = swizzle // jnp.dtype(dtype).itemsize
    laid_out = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(laid_out)))
    def emit(_: Value, source: Value, tile: Value) -> None:
        tiled, element = layout.to_mgpu(), mgpu.utils.dtype_to_ir_type(dtype)
        size = tiled.vector_length * jnp.dtype(dtype).itemsize
        modifier = nvvm.LoadCacheModifierKind
        strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
        steps = [
            mgpu.c(s, ir.IntegerType.get_signless(32)) for s in tiled.tiling.tile_strides(strides)
        ]
        offsets = (
            mgpu.utils.dyn_dot(x, steps[2:]) for x in (tiled.lane_indices(), tiled.warp_indices())
        )
        first = mgpu.utils.getelementptr(
            mgpu.utils.memref_ptr(source), [arith.addi(*offsets)], element
        )
        first = llvm.addrspacecast(llvm.PointerType.get(address_space=1), first)
        for _, _, place, to in mgpu.FragmentedArray.transfer_tiled(
            tile, swizzle, tiled, (rows, width), optimized=False
        ):
            distance = sum(i * s for i, s in zip(place(), strides, strict=True))
            start = mgpu.utils.getelementptr(first, [distance], element)
            nvvm.cp_async_shared_global(to, start, size, modifier.CG if size == 16 else modifier.CA)
        nvvm.cp_async_commit_group()

    emit(source, tile)


def start_nothing(problem: Problem) -> None:
    """Commit an empty group of copies."""
    # `await_copies` counts groups, and empty groups past the last tile keep its argument constant
    if problem.interpret:
        return

    @plgpu.inline_mgpu()
    def emit(_: Value) -> None:
        nvvm.cp_async_commit_group()

    emit()


def await_copies(problem: Problem, groups: int) -> None:
    """Wait until at most `groups` groups of copies are pending and all warps have arrived."""
    if problem.interpret:
        return

    @plgpu.inline_mgpu()
    def emit(context: Value) -> None:
        context.await_cp_async_copy(groups)

    emit()


def store_rows(problem: Problem, x: jax.Array, target: Ref) -> None:
    """Store the leading rows of a tile from registers in device memory, as many as fit."""
    rows = target.shape[0]
    if problem.interpret:
        target[...] = x[:rows]
        return

    @plgpu.inline_mgpu(arg_types=(LAYOUT.WGMMA, plgpu.RefType()))
    def emit(_: Value, x: Value, target: Value) -> None:
        limit = mgpu.c(rows, ir.IndexType.get())

        def one(number: Value, place: tuple[Value, Value]) -> None:
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, place[0], limit)):
                memref.store(number, target, place)

        x.foreach(one)

    emit(x, target)


def product(problem: Problem, a: Ref, b: Ref) -> jax.Array:
    """Return a @ b in float32."""
    return add_product(problem, filled((a.shape[0], b.shape[1]), 0), a, b)


def add_product(problem: Problem, acc: jax.Array, a: Ref | jax.Array, b: Ref) -> jax.Array:
    """Return acc + a @ b, where `a` is a tile or float32 registers (rounded to b's dtype)."""
    in_registers = isinstance(a, jax.Array)
    # the interpreter has no `mma`
    if problem.interpret:
        left = a.astype(b.dtype) if in_registers else a[...]
        return acc + jnp.dot(left, b[...], preferred_element_type=jnp.float32)
    left = _as_left(a, b.dtype) if in_registers else load(a, LAYOUT.MMA_LHS(b.dtype))
    return mma(acc, left, load(b, LAYOUT.MMA_RHS(b.dtype)))


def _as_left(x: jax.Array, dtype: Any) -> jax.Array:
    """Round the result of a product to a dtype for use as the left factor of the next product."""
    # each thread has the same registers in both layouts, but `layout_cast` does not support this
    # cast

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, layout=LAYOUT.MMA_LHS(dtype)),
    )
    def rounded(_: Value, x: Value) -> Value:
        layout = mgpu.MMALayouts(dtype).lhs
        narrow = x.astype(mgpu.utils.dtype_to_ir_type(dtype)).registers
        shape = layout.registers_shape(x.shape)
        return mgpu.FragmentedArray(
            _registers=narrow.reshape(shape), _layout=layout, _is_signed=None
        )

    return rounded(x)
