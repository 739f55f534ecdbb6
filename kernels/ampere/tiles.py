"""Move tiles between device memory, shared memory and registers, and multiply them (`mma.sync`).

One warpgroup of four warps runs a program. Mosaic GPU puts a barrier before and after each store to
shared memory, so what is read of a slot is what was last stored there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from transformer_jax.kernels.contract import Problem
from transformer_jax.kernels.hopper.memory import ROWS, Ref, filled, load, tile_slots
from transformer_jax.kernels.hopper.schedule import name_of

LAYOUT: Any = plgpu.Layout
mma: Any = getattr(plgpu, "mma", None)  # of jax 0.11
HAS_MMA = mma is not None


def launch(problem: Problem, body: Callable[..., None], items: int, **options: Any) -> Any:
    """Return the kernel of a body as a function of arrays: one program for each item.

    Mosaic GPU forgets that results vary over a mesh as arguments do: `vary` is left to the caller.
    """
    interpret = {"interpret": problem.interpret} if problem.interpret else {}
    return plgpu.kernel(
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


def check_rows(kind: str, rows: int) -> None:
    """Raise ValueError where a program would hold other than the 64 rows that it computes."""
    if rows != ROWS:
        raise ValueError(f"the {kind} kernel holds {ROWS} rows a program: its tiles have {rows}")


def swizzle_of(rows: int, width: int, dtype: DTypeLike) -> int:
    """Return the widest swizzle, in bytes, of whose tiles each of four warps copies as many."""
    row = width * jnp.dtype(dtype).itemsize
    return next(s for s in (128, 64, 32) if row % s == 0 and rows // 8 * (row // s) % 4 == 0)


def slot(rows: int, width: int, dtype: DTypeLike) -> Any:
    """Return the type of a tile in shared memory, laid out for `ldmatrix`."""
    return tile_slots(None, rows, width, dtype, swizzle_of(rows, width, dtype))


def fetch(source: Ref) -> jax.Array:
    """Load a tile of device memory into registers, along its rows."""
    (rows, width), dtype = source.shape, source.dtype
    swizzle = swizzle_of(rows, width, dtype)
    return load(source, LAYOUT.SMEM_GMEM_COPY((rows, width), dtype, swizzle))


def product(problem: Problem, a: Ref, b: Ref) -> jax.Array:
    """Return a @ b in float32."""
    return add_product(problem, filled((a.shape[0], b.shape[1]), 0), a, b)


def add_product(problem: Problem, acc: jax.Array, a: Ref | jax.Array, b: Ref) -> jax.Array:
    """Return acc + a @ b; `a` is a tile, or float32 in registers, rounded to the dtype of b."""
    in_registers = isinstance(a, jax.Array)
    if problem.interpret:  # which has no `mma`
        left = a.astype(b.dtype) if in_registers else a[...]
        return acc + jnp.dot(left, b[...], preferred_element_type=jnp.float32)
    left = _as_left(a, b.dtype) if in_registers else load(a, LAYOUT.MMA_LHS(b.dtype))
    return mma(acc, left, load(b, LAYOUT.MMA_RHS(b.dtype)))


def _as_left(x: jax.Array, dtype: Any) -> jax.Array:
    """Round the result of a product to a dtype, as the left factor of the next one.

    The registers of a thread hold the same numbers in both layouts, which `layout_cast` does not
    know.
    """

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, layout=LAYOUT.MMA_LHS(dtype)),
    )
    def rounded(_: Any, x: Any) -> Any:
        layout = mgpu.MMALayouts(dtype).lhs
        narrow = x.astype(mgpu.utils.dtype_to_ir_type(dtype)).registers
        shape = layout.registers_shape(x.shape)
        return mgpu.FragmentedArray(
            _registers=narrow.reshape(shape), _layout=layout, _is_signed=None
        )

    return rounded(x)
