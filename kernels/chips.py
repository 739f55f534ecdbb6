"""Hold every fact about a chip: its limits, tile sizes, and where the kernels are the fastest.

`python -m benchmarks.tune_attention` searches for the fastest tile sizes on the attached chip and
prints rows for `MEASURED`. Where that has no row, the defaults below are taken: sizes that compile
for every width a backend supports, and that nothing was measured for.
"""

from __future__ import annotations

import dataclasses
import math

from transformer_jax.kernels import Target
from transformer_jax.kernels.contract import Blocks, Kind

_H100 = "NVIDIA H100 80GB HBM3"

MEASURED: dict[tuple[str, str, Kind, int, int, int], Blocks] = {
    ("hopper", _H100, "single_pass", 64, 64, 2): Blocks(128, 128, 2),
    ("hopper", _H100, "forward", 128, 128, 2): Blocks(128, 128, 2, slack=8.0),
    ("hopper", _H100, "forward", 256, 256, 2): Blocks(128, 64, 2, slack=8.0),
}
"""(backend, chip as JAX names it, kernel, H, Hv, bytes of a number) to tiles that were faster than
the defaults, causal, 16 heads, S 8192 (benchmarks/results/h100/tiles.txt; of H 256 only which won
was kept). Of H 64, forward tiles of 192 queries were 1.05 times as fast, and are left out: with
tiles of 128 in the backward pass, queries are padded to multiples of 384."""

FASTEST: dict[tuple[str, str], int] = {("hopper", _H100): 512}
"""(backend, chip) on which a step of training was fastest with the kernels, to the fewest queries
that were timed: from so many on `implementation=None` takes them where they run. Everything else
leaves them to those who ask by name."""

# Hopper

HOPPER_PROCESSORS = 132  # multiprocessors of an H100 SXM or NVL, an H200, a GH200
HOPPER_WITH_FEWER = {
    "NVIDIA H100 PCIe": 114,
    "NVIDIA H800 PCIe": 114,
    "NVIDIA H20": 78,
    "NVIDIA H20-3e": 78,
}
HOPPER_SHARED_MEMORY = 232448  # bytes that a block may ask for: 227 KiB
HOPPER_HEAD_DIMS = tuple(range(32, 257, 16))
"""wgmma sums over 16 columns at once, and Mosaic copies tiles whose rows are parts of 32 bytes."""
HOPPER_UNLIKE_HEAD_DIMS = 448
"""The most of H + Hv where they differ: then queries and output each have shared memory."""


def hopper_blocks(kind: str, H: int, Hv: int, itemsize: int = 2, K: int = 1) -> Blocks:
    """Return the default tile sizes of a Hopper kernel.

    They fit shared memory and, at 240 registers a thread, spill none or little:
    benchmarks/compile_gpu.py shows it.
    """
    del itemsize, K  # 2 bytes: `refuse` lets through nothing else; one key head a tile
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
        case "decode":  # 227 KiB, less 64 queries twice, 16 KiB a warpgroup of sums, and vectors
            k = 64 if wide else 128
            room = HOPPER_SHARED_MEMORY - 256 * H - 256 * k - 12 * 1024
            return Blocks(q=64, k=k, stages=min(6, room // (2 * k * (H + Hv))))
    raise ValueError(f"no kernel {kind!r}")


# Ampere, and what else has mma.sync

AMPERE_HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # those between were not compiled
AMPERE_PROCESSORS = 108
"""Multiprocessors of an A100: taken where a device does not say how many it has. The decode kernel
divides its keys into about four parts for each."""
AMPERE_SHARED_MEMORY = 101376  # bytes that a block may ask for where it is least, 8.6 and 12


def ampere_blocks(kind: str, H: int, Hv: int, itemsize: int = 2, K: int = 1) -> Blocks:
    """Return the default tile sizes of an Ampere kernel.

    They fit the least shared memory and, at 255 registers a thread, spill none or little; nothing
    was measured for them.
    """
    del itemsize, K  # 2 bytes: `refuse` lets through nothing else; one key head a tile
    widest = max(H, Hv)
    short = 64 if widest <= 64 else 32 if widest <= 128 else 16
    match kind:
        case "forward":
            return Blocks(q=64, k=32 if widest == 192 else short, stages=2 if widest <= 128 else 1)
        case "dq" | "bias":
            return Blocks(q=64, k=short, stages=1)
        case "dkdv":
            return Blocks(q=short, k=64, stages=1)
        case "decode":
            return Blocks(q=64, k=64 if widest <= 64 else 32, stages=3 if widest <= 128 else 2)
    raise ValueError(f"no kernel {kind!r}")


# TPU

TPU_LIST_BYTES = 768 * 1024  # for the lists of tiles, of the 1 MiB of scalar memory
TPU_VMEM_BYTES = 32 * 1024 * 1024
TPU_SUM_BYTES = 16 * 1024 * 1024
"""Bytes of VMEM that the sums of dk and dv of all keys of a head may take, beside the tiles."""
TPU_FEW_BYTES = 4 * 1024 * 1024
"""Bytes of VMEM that one tile of keys and values of the decode kernel may take, twice."""
TPU_LANES = 128  # numbers in a row of a register: no tile is narrower


def tpu_blocks(kind: str, H: int, Hv: int, itemsize: int, K: int = 1) -> Blocks:
    """Return the default tile sizes of a TPU kernel.

    A tile of the decode kernel has all K key heads, of as many slots as take 2 MiB, but at least
    128 and at most 2048.
    """
    if kind == "decode":
        # a register's row is filled up to 128 numbers, so narrow heads take as much room
        lanes = sum(-(-width // TPU_LANES) * TPU_LANES for width in (H, Hv))
        slots = TPU_FEW_BYTES // 2 // (K * lanes * itemsize)
        return Blocks(64, min(2048, max(TPU_LANES, 1 << max(slots, 1).bit_length() - 1)))
    wide = kind != "bias" and itemsize == 2 and max(H, Hv) <= 256
    return Blocks(512, 1024 if wide else 512)


# Choosing


def processors_of(where: Target) -> int | None:
    """Return how many multiprocessors a target has: as the device says, else by its name.

    None where neither says.
    """
    if where.name != "hopper" or where.processors or not where.chip:
        return where.processors
    return HOPPER_WITH_FEWER.get(where.chip, HOPPER_PROCESSORS)


def kinds(nondeterministic: bool, decode: bool = False, by_rows: bool = False) -> tuple[Kind, ...]:
    """Return the kernels of a call; `by_rows` is the deterministic single-pass backward."""
    gradients: tuple[Kind, ...] = ("single_pass",) if nondeterministic else ("dq", "dkdv")
    if by_rows:
        gradients = ("single_pass_rows",)
    few: tuple[Kind, ...] = ("decode",) if decode else ()
    return ("forward", *gradients, "bias", *few)


def blocks(
    where: Target,
    kind: Kind,
    H: int,
    Hv: int,
    itemsize: int,
    T: int,
    S: int,
    K: int = 1,
    page: int | None = None,
) -> Blocks:
    """Return the tiles of a kernel: the target's own, else measured, else default sizes.

    Short sequences take shorter tiles where the backend can; that of few queries holds them all,
    and depends on K, how many key heads there are. Where keys lie in pages, a backend with a
    shortest tile copies each at once, so a tile of it divides the page.
    """
    found = dict(where.blocks).get(kind) or MEASURED.get(
        (where.name, where.chip, kind, H, Hv, itemsize)
    )
    # a target's own tiles come first, for benchmarks that search for faster ones
    found = found or where.backend.blocks(kind, H, Hv, itemsize, K)
    least, q, k = where.backend.shortest, found.q, found.k
    # a power of two that holds a short sequence, as blocks divide each other
    if least is not None:
        q = q if q <= T else min(q, max(least, 1 << (T - 1).bit_length()))
        k = k if k <= S else min(k, max(least, 1 << (S - 1).bit_length()))
    # the kernel of few queries holds all of them, and a copy of keys may not cross into a page
    # that lies elsewhere
    if kind != "decode":
        return dataclasses.replace(found, q=q, k=k)
    return dataclasses.replace(found, q=T, k=math.gcd(k, page) if page and least else k)
