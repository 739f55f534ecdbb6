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

from transformer_jax.kernels.hopper.memory import LANES, NATIVE, Ref, f32

COLUMNS = 32  # of a tile that a thread holds at once
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


def tensor_barrier(arrivals: int = 1, barriers: int | tuple[int, ...] = ()) -> Any:
    """Return the type of a barrier that orders what tensor cores and threads do."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=barriers, orders_tensor_core=True)


def finish(barrier: Ref) -> None:
    """Arrive at a barrier of `BY_ALL` arrivals once all products that were issued are done.

    One thread issues them, and the tensor cores arrive for it. All four warps of its warpgroup wait
    for what comes next. So that none lags by two phases of a barrier, which would look like none
    (see `transformer_jax.kernels.hopper.schedule.launch`), all of them arrive, too.
    """
    plgpu.tcgen05_commit_arrive(barrier)
    plgpu.barrier_arrive(barrier)


def specialise(
    consumers: int,
    consume: Callable[[int], None],
    multiply: Callable[[], None],
    produce: Callable[[], None],
) -> None:
    """Let the first warpgroups consume, one issue the products, and one copy.

    Their threads share 65,536 registers.
    """
    warpgroup = lax.axis_index("warpgroup")
    most, least = {1: (240, 96), 2: (200, 56)}[consumers]

    for w in range(consumers):

        @pl.when(warpgroup == w)
        def _(w: int = w) -> None:
            plgpu.set_max_registers(most, action="increase")
            consume(w)

    @pl.when(warpgroup == consumers)
    def _() -> None:
        plgpu.set_max_registers(least, action="decrease")
        multiply()

    @pl.when(warpgroup == consumers + 1)
    def _() -> None:
        plgpu.set_max_registers(least, action="decrease")
        produce()
