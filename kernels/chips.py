"""Properties of chips, such as limits, tile sizes, and the sizes at which the kernels are fastest.

`python -m benchmarks.tune_attention` searches for the fastest tile sizes on the attached chip, and
prints rows for `MEASURED`. If there is no row for a chip, the defaults below apply. The defaults
compile for every head dimension that a backend supports, but they have not been measured.
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
"""Tile sizes that were faster than the defaults, keyed by (backend, JAX's name for the chip,
kernel, H, Hv, bytes per element). They were measured with a causal mask, 16 heads and S = 8192
(benchmarks/results/h100/tiles.txt; for H = 256, only the fastest sizes were recorded). For H = 64,
forward tiles of 192 queries were 1.05 times as fast, but together with backward tiles of 128
queries they would pad the queries to multiples of 384. Since then, the three warpgroups of such a
tile take turns as two do, which has not been measured: `Blocks(192, 128, 2)`."""

FASTEST: dict[tuple[str, str], int] = {("hopper", _H100): 512}
"""Smallest number of queries for which a training step was timed, keyed by the (backend, chip)
pairs on which the kernels were fastest. With at least this number of queries, `implementation=None`
selects the kernels if they support the call. On other chips, the kernels must be requested by
name."""

# Hopper

HOPPER_PROCESSORS = 132  # multiprocessors of an H100 SXM, H100 NVL, H200 or GH200
HOPPER_WITH_FEWER = {
    "NVIDIA H100 PCIe": 114,
    "NVIDIA H800 PCIe": 114,
    "NVIDIA H20": 78,
    "NVIDIA H20-3e": 78,
}
HOPPER_SHARED_MEMORY = 232448  # maximum bytes per block, 227 KiB
HOPPER_HEAD_DIMS = tuple(range(32, 257, 16))
"""Supported head dimensions. wgmma sums over 16 columns at once, and Mosaic copies rows in parts of
32 bytes."""
HOPPER_UNLIKE_HEAD_DIMS = 448
"""Limit on H + Hv if H and Hv differ, because the queries and the output then need separate shared
memory."""


def hopper_blocks(kind: str, H: int, Hv: int, itemsize: int = 2, K: int = 1) -> Blocks:
    """Return the default tile sizes for a Hopper kernel.

    The tiles fit in shared memory and cause few register spills at 240 registers per thread
    (benchmarks/compile_gpu.py).
    """
    del itemsize, K  # `refuse` accepts only 2 bytes; a tile has one key head
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
        case "decode":  # 227 KiB minus 64 queries twice, 16 KiB of sums per warpgroup, and vectors
            k = 64 if wide else 128
            room = HOPPER_SHARED_MEMORY - 256 * H - 256 * k - 12 * 1024
            return Blocks(q=64, k=k, stages=min(6, room // (2 * k * (H + Hv))))
    raise ValueError(f"there is no kernel named {kind!r}")


# Ampere, and other GPUs with mma.sync

AMPERE_HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # no other values have been compiled
AMPERE_PROCESSORS = 108
"""Number of multiprocessors of an A100, which is used if a device does not report its number. The
decode kernel divides its keys into about four parts per multiprocessor."""
AMPERE_SHARED_MEMORY = 101376  # maximum bytes per block on the smallest devices, 8.6 and 12


def ampere_blocks(kind: str, H: int, Hv: int, itemsize: int = 2, K: int = 1) -> Blocks:
    """Return the default tile sizes for an Ampere kernel.

    The tiles fit in the smallest shared memory and cause few register spills at 255 registers per
    thread. Their speed has not been measured.
    """
    del itemsize, K  # `refuse` accepts only 2 bytes; a tile has one key head
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
    raise ValueError(f"there is no kernel named {kind!r}")


# TPU

TPU_LIST_BYTES = 768 * 1024  # limit for the tile lists; scalar memory has 1 MiB
TPU_VMEM_BYTES = 32 * 1024 * 1024
TPU_SUM_BYTES = 16 * 1024 * 1024
"""Limit, in bytes of VMEM, on the sums of dk and dv over all keys of a head, not counting tiles."""
TPU_FEW_BYTES = 4 * 1024 * 1024
"""Limit, in bytes of VMEM, on a double-buffered tile of keys and values in the decode kernel."""
TPU_LANES = 128  # elements per row of a register, and minimum width of a tile


def tpu_blocks(kind: str, H: int, Hv: int, itemsize: int, K: int = 1) -> Blocks:
    """Return the default tile sizes for a TPU kernel.

    A tile of the decode kernel contains all K key heads and 128 to 2048 slots, up to 2 MiB.
    """
    if kind == "decode":
        # registers are padded to 128 lanes, so narrow heads need as much memory as wide ones
        lanes = sum(-(-width // TPU_LANES) * TPU_LANES for width in (H, Hv))
        slots = TPU_FEW_BYTES // 2 // (K * lanes * itemsize)
        return Blocks(64, min(2048, max(TPU_LANES, 1 << max(slots, 1).bit_length() - 1)))
    wide = kind not in ("bias", "score") and itemsize == 2 and max(H, Hv) <= 256
    return Blocks(512, 1024 if wide else 512)


# Selection


def blocks(
    target: Target,
    kind: Kind,
    H: int,
    Hv: int,
    itemsize: int,
    T: int,
    S: int,
    K: int = 1,
    page: int | None = None,
) -> Blocks:
    """Return the tile sizes for a kernel, from the target, the measurements or the defaults.

    Short sequences get shorter tiles if the backend supports them. A tile of the decode kernel
    contains all queries, and the tile size depends on K, the number of key heads. If the keys are
    in pages, a backend with a `shortest` tile copies whole tiles, whose size must divide the page
    size.
    """
    found = dict(target.blocks).get(kind) or MEASURED.get(
        (target.name, target.chip, kind, H, Hv, itemsize)
    )
    # tile sizes of the target take precedence, for benchmarks that search for faster tiles
    found = found or target.backend.blocks(kind, H, Hv, itemsize, K)
    least, q, k = target.backend.shortest, found.q, found.k
    # a power of two that covers a short sequence, because tile sizes must divide each other
    if least is not None:
        q = q if q <= T else min(q, max(least, 1 << (T - 1).bit_length()))
        k = k if k <= S else min(k, max(least, 1 << (S - 1).bit_length()))
    # a decode tile contains all queries, and a copy of keys must not cross a page boundary
    if kind != "decode":
        return dataclasses.replace(found, q=q, k=k)
    return dataclasses.replace(found, q=T, k=math.gcd(k, page) if page and least else k)
