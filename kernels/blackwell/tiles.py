"""Lay out tensor memory, and share the work of a program out to its warpgroups.

A multiprocessor has 128 lanes by 512 columns of tensor memory, 4 bytes each. The tensor cores
(tcgen05) sum there, and take the left factor of a product from there. A warpgroup reads and writes
it: lane i is row i of a tile, and each thread holds one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.typing import DTypeLike
from jaxlib.mlir.dialects import nvvm

from transformer_jax.kernels.contract import Problem
from transformer_jax.kernels.hopper.memory import LANES, NATIVE, Ref, f32

COLUMNS = 32  # of a tile that a thread holds at once
OTHERS = 2  # warpgroups beside the consumers: one issues products, one copies
BY_ALL = 2  # arrivals at a barrier: of the tensor cores, and of the threads that issue products

load_columns: Any = getattr(plgpu, "async_load_tmem", None)  # of jax 0.11
HAS_TENSOR_MEMORY = load_columns is not None


def scores_over_weights(columns: int, dtype: DTypeLike) -> Any:
    """Return the type of a tile of scores in tensor memory, which its weights take the place of."""
    return plgpu.RefUnion(
        plgpu.TMEM((LANES, columns), f32), plgpu.TMEM((LANES, columns), dtype, packed=True)
    )


def parts(width: int) -> Iterator[Any]:
    """Yield the slices of a tile's columns that a thread holds one after the other."""
    size = COLUMNS if width % COLUMNS == 0 else COLUMNS // 2
    for start in range(0, width, size):
        yield pl.ds(start, size)


def load(tile: Ref, columns: Any) -> jax.Array:
    """Load columns of a tile of tensor memory into registers."""
    return load_columns(tile.at[:, columns], layout=NATIVE)


def finish_loads(problem: Problem) -> None:
    """Wait until this thread's loads of tensor memory are done: it may store there then.

    Unlike `wait_load_tmem` it does not meet with the other warps, as each has lanes of its own: so
    only some of them may come here. The interpreter knows only `wait_load_tmem`.
    """
    _wait(problem, plgpu.wait_load_tmem, nvvm.Tcgen05WaitKind.LOAD)


def finish_stores(problem: Problem) -> None:
    """Wait until this thread's stores to tensor memory are done: it may arrive at a barrier then.

    Unlike `commit_tmem` it does not meet with the other warps.
    """
    _wait(problem, plgpu.commit_tmem, nvvm.Tcgen05WaitKind.STORE)


def _wait(problem: Problem, of_warpgroup: Callable[[], None], kind: Any) -> None:
    if problem.interpret:
        of_warpgroup()
        return

    @plgpu.inline_mgpu()
    def emit(_: Any) -> None:
        nvvm.tcgen05_wait(kind)

    emit()


def tensor_barrier(arrivals: int = 1, barriers: int | tuple[int, ...] = ()) -> Any:
    """Return the type of a barrier that orders what tensor cores and threads do."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=barriers, orders_tensor_core=True)


def commit(barrier: Ref) -> None:
    """Arrive at a barrier of `BY_ALL` arrivals once all products that were issued are done.

    One thread issues them, and the tensor cores arrive for it. All four warps of its warpgroup wait
    for what comes next. So that none lags by two phases of a barrier, which would look like none
    (see `transformer_jax.kernels.hopper.schedule.launch`), they meet and arrive, too.
    """
    plgpu.tcgen05_commit_arrive(barrier)
    plgpu.barrier_arrive(barrier)


def specialise(
    registers: tuple[int, int],
    consumers: int,
    consume: Callable[[int], None],
    multiply: Callable[[], None],
    produce: Callable[[], None],
) -> None:
    """Let the first warpgroups consume, one issue the products, and one copy.

    `registers` are those of a thread of a consumer and of the others, chosen so that the compiler
    spills none. The warpgroups share what a program is launched with, and no more: a warp that asks
    for more than the others have given back waits for ever. Four are launched with 128 a thread,
    and three with 168, the multiples of 8 below 65,536 / 512 and / 384. (One warp for each of the
    last two roles would do, but `warp_map` takes no arrays that vary over a mesh.)
    """
    warpgroup, (most, least) = lax.axis_index("warpgroup"), registers

    for w in range(consumers):

        @pl.when(warpgroup == w)
        def _(w: int = w) -> None:
            plgpu.set_max_registers(most, action="increase")
            consume(w)

    for w, role in ((consumers, multiply), (consumers + 1, produce)):

        @pl.when(warpgroup == w)
        def _(role: Callable[[], None] = role) -> None:
            plgpu.set_max_registers(least, action="decrease")
            role()
