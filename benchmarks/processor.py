"""Description of the processor, because rented machines differ from day to day.

The values are read from /proc/cpuinfo and /sys on Linux. On other systems, each value is None.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from transformer_jax.kernels import cpu

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

FIELDS = {
    "vendor": ("vendor_id", "CPU implementer"),
    "family": ("cpu family", "CPU architecture"),
    "model": ("model", "CPU part"),
    "stepping": ("stepping", "CPU revision"),
    "name": ("model name", "Model"),
}
"""Names of a value in /proc/cpuinfo on x86-64 and aarch64."""

SETS = re.compile(
    r"sse4_2|f16c|fma|avx|avx2|avx512\w*|avx_\w+|amx_\w+"  # x86-64
    r"|asimd\w*|fphp|bf16|i8mm|sve\w*|sme2?"  # aarch64, on which asimd is NEON
)
"""Names of the arithmetic instruction sets in Linux."""


def processor() -> dict[str, Any]:
    """Return the family, model, instruction sets, caches, and cores of this processor."""
    found = _first_core()
    facts: dict[str, Any] = {
        fact: next((found[name] for name in names if name in found), None)
        for fact, names in FIELDS.items()
    }
    flags = found.get("flags", found.get("Features"))
    facts["instruction_sets"] = (
        None if flags is None else sorted(flag for flag in flags.split() if SETS.fullmatch(flag))
    )
    facts["caches"] = _caches()
    facts["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return facts


def compiled_kernels() -> str:
    """Return the instruction set of our native kernels, or the reason why there are none."""
    library = cpu.library()
    return library if isinstance(library, str) else cpu.instructions()


def line(facts: dict[str, Any], kernels: str) -> str:
    """Return the values on one line."""
    sizes = (facts["caches"] or {}).items()
    caches = ", ".join(f"{name} {size // 2**10} KiB" for name, size in sizes)
    return (
        f"{facts['name']}, family {facts['family']}, model {facts['model']}; {caches}\n"
        f"{' '.join(facts['instruction_sets'] or [])}; our kernels: {kernels}"
    )


def _first_core() -> dict[str, str]:
    """Return the values for the first core in /proc/cpuinfo, or an empty dict."""
    with contextlib.suppress(OSError):
        first = CPUINFO.read_text().strip().partition("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}


def _caches() -> dict[str, int] | None:
    """Return the size in bytes of each cache of the first core: L1d, L1i, L2, and L3."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for index in sorted(CACHES.glob("index*")):
            level, kind, size = (
                (index / name).read_text().strip() for name in ("level", "type", "size")
            )
            letter = {"Data": "d", "Instruction": "i"}.get(kind, "")
            unit = {"K": 2**10, "M": 2**20, "G": 2**30}[size[-1]]
            found[f"L{level}{letter}"] = int(size[:-1]) * unit
    return found or None
