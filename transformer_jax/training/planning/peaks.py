"""Published peak rates of chips, not measured here.

Sources: for TPUs, cloud.google.com/tpu/docs, pages v5e, v5p and v6e; for GPUs, NVIDIA's data sheets
of the SXM models. Rates are those of dense products in bfloat16. Memory is the amount that a TPU's
compiler allows a program, and that an H200 reports.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Peak rates of a chip."""

    name: str
    flops: float
    """Multiplications and additions per second in dense bfloat16 products."""
    memory: int
    """Bytes of memory."""
    bandwidth: float
    """Bytes per second to and from memory."""
    network: float
    """Bytes per second in one direction to the other chips of the slice or machine."""


CHIPS = {
    "v5e": Chip("TPU v5e", 197e12, int(15.75 * 2**30), 819e9, 200e9),
    "v5p": Chip("TPU v5p", 459e12, int(95.73 * 2**30), 2765e9, 600e9),
    "v6e": Chip("TPU v6e", 918e12, int(31.24 * 2**30), 1600e9, 400e9),
    "h200": Chip("NVIDIA H200", 989e12, 139 * 2**30, 4800e9, 450e9),
    "h100": Chip("NVIDIA H100", 989e12, 80 * 10**9, 3350e9, 450e9),
    "a100": Chip("NVIDIA A100", 312e12, 80 * 10**9, 2039e9, 300e9),
}
"""Chips by short name."""

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
"""Short names by prefix of JAX's `device_kind`."""


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip that JAX calls `device_kind`, or None if it is not listed."""
    # longest first, because "TPU v5" is also a prefix of "TPU v5 lite"
    for kind, name in sorted(_KINDS.items(), key=lambda item: -len(item[0])):
        if device_kind.startswith(kind):
            return CHIPS[name]
    return None
