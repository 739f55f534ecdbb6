"""Multiply tiles on the tensor cores (wgmma), or in the interpreter with `jnp.dot`."""

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
Found = TypeVar("Found")


def opaque(slot: Index) -> Index:
    """Hide from the compiler which slot this is."""
    # wgmma takes a descriptor for every 16 columns of a tile. Those of a slot that stays would be
    # kept in registers from step to step, up to 64 of them, and something else spilled. So they
    # cost an addition each time instead
    return lax.optimization_barrier(jnp.asarray(slot, i32)) if HAS_JAX_11 else slot


def product(a: Ref, b: Ref, after: Callable[[], None] = lambda: None) -> jax.Array:
    """Return a @ b in float32; `after` runs once the tensor cores are busy with it."""

    def multiply(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        after()
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), f32))


def add_products(problem: Problem, *sums: Sum) -> list[jax.Array]:
    """Return acc + a @ b of every sum, in place on the device; `a` may be in registers."""
    # the interpreter has no `run_state`, and no wgmma from registers
    if problem.interpret:
        results = [acc + jnp.dot(a[...], b[...], preferred_element_type=f32) for acc, a, b in sums]
        # the next copy into these slots comes after these plain reads
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
    meanwhile: Callable[[jax.Array], Found],
) -> tuple[jax.Array, Found]:
    """Return acc + p @ v, and `meanwhile(q @ k)`, evaluated while the former is multiplied.

    `after` runs once the tensor cores are busy with both products.
    """
    (q, k), (acc, p, v) = scored, summed
    if problem.interpret:
        [acc] = add_products(problem, summed)
        return acc, meanwhile(product(q, k, after))

    def multiply(raw_ref: Ref, acc_ref: Ref) -> tuple[jax.Array, Found]:
        acc_ref[...] = acc
        plgpu.wgmma(raw_ref, q, k)
        plgpu.wgmma(acc_ref, p, v)
        after()
        found = meanwhile(plgpu.wgmma_accumulator_load(raw_ref, wait_n=1))
        return acc_ref[...], found

    raw = plgpu.ACC((q.shape[0], k.shape[1]), f32)
    return pl.run_scoped(multiply, raw, plgpu.ACC((acc.shape[0], acc.shape[1]), f32))
