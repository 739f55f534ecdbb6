"""State what chips can do at best, as their makers publish it; no rate here was measured.

TPUs: cloud.google.com/tpu/docs, pages v5e, v5p and v6e. H200: NVIDIA's data sheet of the H200 SXM;
A100 and H100 likewise. Rates are those of dense products in bfloat16. The memory of TPUs is
what their compiler lets a program have, that of an H200 what one of them says of itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Hold the peak rates of a chip."""

    name: str
    flops: float
    """Multiplications and additions of dense bfloat16 products in a second."""
    memory: int
    """Bytes of its memory."""
    bandwidth: float
    """Bytes a second between its memory and it."""
    network: float
    """Bytes a second, in one direction, to the other chips of its slice or machine."""


CHIPS = {
    "v5e": Chip("TPU v5e", 197e12, int(15.75 * 2**30), 819e9, 200e9),
    "v5p": Chip("TPU v5p", 459e12, int(95.73 * 2**30), 2765e9, 600e9),
    "v6e": Chip("TPU v6e", 918e12, int(31.24 * 2**30), 1600e9, 400e9),
    "h200": Chip("NVIDIA H200", 989e12, 139 * 2**30, 4800e9, 450e9),
    "h100": Chip("NVIDIA H100", 989e12, 80 * 10**9, 3350e9, 450e9),
    "a100": Chip("NVIDIA A100", 312e12, 80 * 10**9, 2039e9, 300e9),
}
"""The chips by their short names."""

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
"""How JAX names the chips: the beginning of `device_kind`, the longer names first."""


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip that JAX calls `device_kind`; None where its peak is not known."""
    # "TPU v5" is the beginning of "TPU v5 lite" too
    for kind, name in sorted(_KINDS.items(), key=lambda item: -len(item[0])):
        if device_kind.startswith(kind):
            return CHIPS[name]
    return None
