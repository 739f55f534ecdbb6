"""What limits the speed of a kernel? One call of each kernel is profiled with ncu."""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first_light import checks, rehearsal
from benchmarks.first_light.checks import Check, Ended, Step, Verdict

PASSES = {
    "forward": ("pallas", "forward"),
    "dq, dk/dv": ("pallas", "backward"),
    "single-pass": ("pallas_unordered", "backward"),
}
CASE = "causal-16k-h128-s8192"
METRICS = {
    "ns": "gpu__time_duration.sum",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "wgmma": "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
    "special": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
}
"""Counters that ncu reports, in nanoseconds and in percent of each unit's peak."""
UNITS = {"tensor": "tensor cores", "special": "special functions", "issue": "issue slots",
         "dram": "device memory"}  # fmt: skip
LAUNCHES = 24  # number per call, including small launches around the kernels


@dataclass(frozen=True)
class Launch:
    """Counters that ncu reports for one kernel; None for a missing counter."""

    kernel: str
    counters: dict[str, float | None]


def run(step: Step) -> None:
    """Profile one call of each pass."""
    with tempfile.TemporaryDirectory() as folder:
        for name in PASSES:
            step.run(check(name, Path(folder) / f"{list(PASSES).index(name)}.csv", step.rehearsed))


def check(name: str, path: Path, rehearsed: bool) -> Check:
    """Return a check that runs a pass under ncu."""
    command = checks.python("first_light.profiled", *PASSES[name], *rehearsal.flags(rehearsed))
    ncu = (
        "ncu", "--clock-control", "none", "--profile-from-start", "off", "--launch-count",
        str(LAUNCHES), "--section", "SpeedOfLight", "--metrics", ",".join(METRICS.values()),
        "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(path),
    )  # fmt: skip

    def found() -> list[dict[str, Any]]:
        text = path.read_text(errors="replace") if path.exists() else ""
        return [
            {"kernel": launch.kernel, **launch.counters} for launch in launches(text.splitlines())
        ]

    def judge(ended: Ended) -> Verdict:
        if found():
            return Verdict("passed")
        log = path.read_text(errors="replace") if path.exists() else ""
        said = checks.last_line(log) or checks.last_line(ended.output)
        return Verdict("failed", f"ncu wrote no counters: {said}")

    return Check(
        name,
        (*ncu, *command),
        100,
        judge=judge,
        absent=None if shutil.which("ncu") else "ncu not found",
        collect=lambda ended: found(),
    )


def launches(lines: Iterable[str]) -> list[Launch]:
    """Parse ncu's "raw" page in CSV format: counter names, units, and one row per launch.

    Messages from ncu begin with "==", and numbers may have thousands separators.
    """
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(rows) < 3:
        return []
    header, _, *values = rows
    found = []
    for row in values:
        named = dict(zip(header, row, strict=False))
        counters = {short: _number(named.get(name)) for short, name in METRICS.items()}
        found.append(Launch(named.get("Kernel Name", "?"), counters))
    return found


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:  # n/a
        return None


def busiest(found: dict[str, Any]) -> tuple[str, float] | None:
    """Return the unit with the highest utilization and its percentage."""
    known = {unit: found[unit] for unit in UNITS if found.get(unit) is not None}
    if not known:
        return None
    most = max(known, key=known.__getitem__)
    return UNITS[most], known[most]
