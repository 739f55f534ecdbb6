"""Hold every fact about a chip: its limits, tile sizes, and where the kernels are the fastest.

`python -m benchmarks.tune_attention` searches for the fastest tile sizes on the attached chip and
prints rows for `MEASURED`. Where that has no row, the defaults below are taken: sizes that compile
for every width a backend supports, and that nothing was measured for.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from transformer_jax.kernels import Target
from transformer_jax.kernels.contract import Blocks

Kind = Literal["forward", "dq", "dkdv", "bias", "single_pass"]

MEASURED: dict[tuple[str, Kind, int, int, int], Blocks] = {}
"""(chip as JAX names it, kernel, H, Hv, bytes of a number) to tiles; none measured yet."""

FASTEST: frozenset[str] = frozenset()
"""Chips on which the kernels were measured to be the best choice where they run; none yet, so
`implementation=None` leaves them to those who ask by name."""

# Hopper

HOPPER_PROCESSORS = 132  # multiprocessors of an H100 or H200 SXM
HOPPER_SHARED_MEMORY = 232448  # bytes that a block may ask for: 227 KiB
HOPPER_HEAD_DIMS = (32, 64, 96, 128, 192, 256)


def hopper_blocks(kind: str, H: int, Hv: int, itemsize: int = 2) -> Blocks:
    """Return the default tile sizes of a Hopper kernel.

    They fit shared memory and, at 240 registers a thread, spill none or little:
    benchmarks/compile_gpu.py shows it.
    """
    del itemsize  # 2: `refuse` lets through nothing else
    wide = max(H, Hv) > 128
    match kind:
        case "forward":
            return Blocks(q=128, k=64 if wide else 128, stages=3 if H + Hv <= 192 else 2)
        case "dq":
            return Blocks(q=128, k=64, stages=3 if H + Hv <= 256 else 2)
        case "dkdv":
            narrow = H + Hv <= 256
            return Blocks(q=64, k=128 if narrow else 64, stages=3 if narrow else 2)
        case "bias":
            return Blocks(q=128, k=64, stages=1 if wide else 2)
        case "single_pass":
            return Blocks(q=128 if max(H, Hv) == 32 else 64, k=128, stages=2)
    raise ValueError(f"no kernel {kind!r}")


# TPU

TPU_LIST_BYTES = 768 * 1024  # for the lists of tiles, of the 1 MiB of scalar memory
TPU_VMEM_BYTES = 32 * 1024 * 1024
TPU_LANES = 128  # numbers in a row of a register: no tile is narrower


def tpu_blocks(kind: str, H: int, Hv: int, itemsize: int) -> Blocks:
    """Return the default tile sizes of a TPU kernel."""
    wide = kind != "bias" and itemsize == 2 and max(H, Hv) <= 256
    return Blocks(512, 1024 if wide else 512)


# Choosing


def kinds(nondeterministic: bool) -> tuple[Kind, ...]:
    """Return the kernels of a call."""
    gradients: tuple[Kind, ...] = ("single_pass",) if nondeterministic else ("dq", "dkdv")
    return ("forward", *gradients, "bias")


def blocks(where: Target, kind: Kind, H: int, Hv: int, itemsize: int, T: int, S: int) -> Blocks:
    """Return the tiles of a kernel: the target's own, else measured, else default sizes.

    Short sequences take shorter tiles where the backend can.
    """
    found = dict(where.blocks).get(kind) or MEASURED.get((where.chip, kind, H, Hv, itemsize))
    found = found or where.module.blocks(kind, H, Hv, itemsize)
    least = where.module.SHORTEST
    q, k = (_at_most(n, length, least) for n, length in ((found.q, T), (found.k, S)))
    return dataclasses.replace(found, q=q, k=k)


def _at_most(block: int, length: int, least: int | None) -> int:
    """Return a power of two that holds a short sequence, from `least`; blocks divide each other."""
    if least is None or length >= block:
        return block
    return min(block, max(least, 1 << (length - 1).bit_length()))
