"""Published peak rates of chips.

The sources are the pages v5e, v5p, and v6e of cloud.google.com/tpu/docs for TPUs, and NVIDIA's data
sheets for the SXM models for GPUs. Rates apply to dense products in bfloat16. The memory of a TPU
is the amount that its compiler allows a program to use. The memory of an H200 is the amount that it
reports.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Peak rates of a chip."""

    name: str
    flops: float
    """Number of multiplications and additions per second in dense bfloat16 products."""
    memory: int
    """Memory in bytes."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    network: float
    """One-way bandwidth to the other chips of the slice or machine, in bytes per second."""


CHIPS = {
    "v5e": Chip("TPU v5e", 197e12, int(15.75 * 2**30), 819e9, 200e9),
    "v5p": Chip("TPU v5p", 459e12, int(95.73 * 2**30), 2765e9, 600e9),
    "v6e": Chip("TPU v6e", 918e12, int(31.24 * 2**30), 1600e9, 400e9),
    "h200": Chip("NVIDIA H200", 989e12, 139 * 2**30, 4800e9, 450e9),
    "h100": Chip("NVIDIA H100", 989e12, 80 * 10**9, 3350e9, 450e9),
    "a100": Chip("NVIDIA A100", 312e12, 80 * 10**9, 2039e9, 300e9),
}
"""Chips, keyed by short name."""

_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5p": "v5p",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA H200": "h200",
    "NVIDIA H100": "h100",
    "NVIDIA A100": "a100",
}
"""Short names, keyed by the prefix of JAX's `device_kind`."""


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip for JAX's `device_kind`, or None if it is not listed."""
    # the longest prefix comes first, because "TPU v5" is also a prefix of "TPU v5 lite"
    for kind, name in sorted(_KINDS.items(), key=lambda item: -len(item[0])):
        if device_kind.startswith(kind):
            return CHIPS[name]
    return None
