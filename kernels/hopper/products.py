"""Products of tiles on the tensor cores (wgmma), or with `jnp.dot` in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.contract import Index, Problem
from transformer_jax.kernels.nvidia.memory import HAS_JAX_11, Ref, f32, i32

Sum = tuple[jax.Array, jax.Array | Ref, Ref]  # acc, a and b of acc + a @ b
Result = TypeVar("Result")


def opaque(slot: Index) -> Index:
    """Hide the index of a slot from the compiler."""
    # wgmma needs a descriptor for every 16 columns of a tile. If the slot were constant, the
    # compiler would keep up to 64 descriptors in registers and spill other values. If the index is
    # hidden, each descriptor costs an addition instead
    return lax.optimization_barrier(jnp.asarray(slot, i32)) if HAS_JAX_11 else slot


def product(a: Ref, b: Ref, after: Callable[[], None] = lambda: None) -> jax.Array:
    """Return a @ b in float32, and run `after` as soon as the tensor cores have started."""

    def multiply(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        after()
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), f32))


def add_products(problem: Problem, *sums: Sum) -> list[jax.Array]:
    """Return acc + a @ b for every sum, in place on the device, where `a` may be in registers."""
    # the interpreter does not support `run_state`, or wgmma with registers
    if problem.interpret:
        results = [acc + jnp.dot(a[...], b[...], preferred_element_type=f32) for acc, a, b in sums]
        # order these reads before the next copy into the slots
        plgpu.commit_smem()
        return results

    def multiply(refs: list[Ref]) -> None:
        for ref, (_, a, b) in zip(refs, sums, strict=True):
            plgpu.wgmma(ref, a, b)

    return pl.run_state(multiply)([plgpu.ACC.init(acc) for acc, _, _ in sums])


def overlapped_products(
    problem: Problem,
    scored: tuple[Ref, Ref],
    summed: Sum,
    after: Callable[[], None],
    meanwhile: Callable[[jax.Array], Result],
) -> tuple[jax.Array, Result]:
    """Return acc + p @ v, and `meanwhile(q @ k)`, which is evaluated during the first product.

    The function `after` runs as soon as the tensor cores have started both products.
    """
    (q, k), (acc, p, v) = scored, summed
    if problem.interpret:
        [acc] = add_products(problem, summed)
        return acc, meanwhile(product(q, k, after))

    def multiply(raw_ref: Ref, acc_ref: Ref) -> tuple[jax.Array, Result]:
        acc_ref[...] = acc
        plgpu.wgmma(raw_ref, q, k)
        plgpu.wgmma(acc_ref, p, v)
        after()
        out = meanwhile(plgpu.wgmma_accumulator_load(raw_ref, wait_n=1))
        return acc_ref[...], out

    raw = plgpu.ACC((q.shape[0], k.shape[1]), f32)
    return pl.run_scoped(multiply, raw, plgpu.ACC((acc.shape[0], acc.shape[1]), f32))
