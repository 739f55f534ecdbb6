"""Description of the machine: driver, ptxas, device, clocks, and versions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.first_light import checks

ASKED = (
    "name", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "clocks.max.sm",
    "clocks.max.mem", "power.limit", "temperature.gpu",
)  # fmt: skip
SHOWN = (
    "driver", "ptxas", "device", "core_count", "clocks", "ncu", "compute-sanitizer", "jax",
    "jaxlib", "torch", "tokamax", "jax-linear-attention", "python", "commit",
)  # fmt: skip


def check(flags: tuple[str, ...]) -> checks.Check:
    """Return a check that describes the machine in its own process, because a driver may hang."""
    return checks.Check("machine", checks.python("first_light.machine", *flags), 90)


def describe() -> dict[str, Any]:
    """Return a description of the machine. This function starts JAX's backend."""
    import jax

    from benchmarks import timing

    found = timing.environment()
    device = jax.devices()[0]
    packages = found["packages"]
    card = _card()
    return {
        **found,
        "driver": card.get("driver_version") or card.get("error"),
        "ptxas": _ptxas(),
        "core_count": getattr(device, "core_count", None),
        "clocks": {name: card[name] for name in ASKED[3:] if name in card} or None,
        "ncu": _tool("ncu"),
        "compute-sanitizer": _tool("compute-sanitizer"),
        **{name: packages.get(name) for name in SHOWN if name in packages},
    }


def shown(machine: dict[str, Any]) -> str:
    """Return the first lines of the output."""
    lines = [f"{name}: {_said(machine.get(name))}" for name in SHOWN]
    return "\n".join(lines)


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {x}" for name, x in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "not found"
    return "absent" if value is None else str(value)


def _card() -> dict[str, str]:
    """Return the report by nvidia-smi about the first GPU."""
    if shutil.which("nvidia-smi") is None:
        return {}
    said = _output("nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader")
    values = said.partition("\n")[0].split(", ")
    return dict(zip(ASKED, values, strict=True)) if len(values) == len(ASKED) else {"error": said}


def _ptxas() -> list[str]:
    """Return every ptxas, both on the PATH and in NVIDIA's packages for JAX."""
    paths = {}
    if on_path := shutil.which("ptxas"):
        paths[on_path] = "on the PATH"
    for folder in map(Path, sys.path):
        for path in sorted(folder.glob("nvidia/*/bin/ptxas")):
            paths.setdefault(str(path), f"in nvidia/{path.parts[-3]}")
    versions = []
    for path, where in paths.items():
        release = re.search(r"V[\d.]+", _output(path, "--version"))
        versions.append(f"{release.group() if release else 'unknown'} {where}")
    return versions


def _tool(name: str) -> str:
    return shutil.which(name) or "not found"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return checks.brief(error)
    return (done.stdout + done.stderr).strip()


if __name__ == "__main__":
    checks.main_of(lambda: checks.report(describe()))
