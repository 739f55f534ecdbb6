"""Assignment of items to persistent programs, and of roles to warpgroups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.chips import HOPPER_PROCESSORS
from transformer_jax.kernels.contract import Problem
from transformer_jax.kernels.nvidia.memory import i32
from transformer_jax.kernels.nvidia.schedule import name_of
from transformer_jax.kernels.sharding import vary

PROGRAMS = HOPPER_PROCESSORS  # resident programs on an unknown chip, one per multiprocessor

Carry = TypeVar("Carry")


def each_item(total: int, body: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """Run `carry = body(item, carry)` for this program's items, out of `total` items."""
    # go back and forth, because items become lighter, so that a program's turns are heavy and light
    programs, program = lax.axis_size("program"), lax.axis_index("program")

    def position(turn: jax.Array) -> jax.Array:
        return turn * programs + jnp.where(turn % 2 == 0, program, programs - 1 - program)

    full = total // programs
    mine = full + (position(jnp.int32(full)) < total).astype(i32)
    return lax.fori_loop(0, mine, lambda turn, carry: body(position(turn), carry), carry)


def launch(
    problem: Problem,
    body: Callable[..., None],
    consumers: int,
    items: int,
    *,
    auto_barriers: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """Return a kernel with consumers and a producer as a function of arrays.

    If `auto_barriers` is true, the warps of a warpgroup meet before and after every store, and
    before every copy into shared memory. Otherwise, the kernel's own barriers must order all
    operations. A warp that waits for a barrier may lag behind the other three, but never by two
    phases, because a lag of two phases is indistinguishable from no lag. Therefore, all 128 threads
    of a warpgroup arrive. The producer's threads arrive for every copy, so that a slot is not read
    or freed again before the last warp has seen that it is free. A consumer's threads arrive for
    every slot that they free, so that the slot is not refilled before the last warp has read it.
    """
    interpret = {"interpret": problem.interpret} if problem.interpret else {}
    kernel = plgpu.kernel(
        body,
        grid=(min(items, problem.processors or PROGRAMS),),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        kernel_name=name_of(body),
        compiler_params=compiler_params(auto_barriers),
        **interpret,
        **options,
    )
    # Mosaic GPU loses the information that the results vary over a mesh like the arguments
    return lambda *arrays: vary(kernel(*arrays), like=arrays[:2])


def compiler_params(auto_barriers: bool) -> plgpu.CompilerParams:
    """Return the compiler options, which a check on the device overrides to enable all barriers."""
    return plgpu.CompilerParams(
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        unsafe_no_auto_barriers=not auto_barriers,
    )


def specialize(
    consumers: int, produce: Callable[[], None], consume: Callable[[jax.Array], None]
) -> None:
    """Run one warpgroup as the producer and the others as consumers."""
    warpgroup = lax.axis_index("warpgroup")
    # register limits per thread of a consumer and of the producer
    limits = {1: None, 2: (240, 24), 3: (160, 32)}[consumers]

    @pl.when(warpgroup < consumers)
    def _() -> None:
        if limits:
            plgpu.set_max_registers(limits[0], action="increase")
        consume(warpgroup)

    @pl.when(warpgroup == consumers)
    def _() -> None:
        if limits:
            plgpu.set_max_registers(limits[1], action="decrease")
        produce()
