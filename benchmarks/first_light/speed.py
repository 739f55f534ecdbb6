"""How fast are the kernels compared with peers, and how much does each part of a call cost?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import goals, timing
from benchmarks.first_light import checks, rehearsal
from benchmarks.first_light.checks import Check, Ended, Record, Step, Verdict

ABLATED = tuple(f"causal-16k-h128-s{length}" for length in (8192, 512, 2048))
GOALS = "goals"
GOALS_SHARE = 0.6  # fraction of the step's time
CASES = tuple(dict.fromkeys(case for case, _ in goals.cells()))


def run(step: Step) -> None:
    """Measure the goals, then ablate the parts of a call at three lengths."""
    measure_goals(step, GOALS, GOALS_SHARE * step.left())
    flags = rehearsal.flags(step.rehearsed)
    for case in ABLATED[:1] if step.rehearsed else ABLATED:
        command = checks.python("first_light.ablations", case, *flags)
        step.run(Check(f"parts of {case}", command, 100))


def measure_goals(
    step: Step, name: str, seconds: float, more: Sequence[str] = (), only: str = "",
    rows: Path | None = None,
) -> None:  # fmt: skip
    """Measure cases within a time limit, each in its own process.

    The cases are built at the same time and timed one after another.
    """
    after = step.left() - seconds
    chosen = CASES[:1] if step.rehearsed else [case for case in CASES if only in case]
    with tempfile.TemporaryDirectory() as folder:
        own = ["--limits", str(Path(folder) / "limits.json")]
        own += [*(() if rows is None else ("--rows", str(rows))), *rehearsal.flags(step.rehearsed)]
        alone = checks.python("first_light.goals_with_rows", *own)
        step.run(Check(f"{name}, limits", alone, 60))
        found = []
        for case in chosen:
            path = Path(folder) / f"{case}.json"
            given = ["--", "--goals", "--only", case, "--seconds", "6", "--out", str(path), *more]
            command = checks.python("first_light.goals_with_rows", *own, *given)
            left = max(step.left() - after, 0.0)
            found.append(cell(f"{name}: {case}", command, path, left))
        with timing.side_by_side(Path(folder)):
            step.run(*found, jobs=len(found))


def cell(name: str, command: tuple[str, ...], path: Path, seconds: float) -> Check:
    """Return a check that measures a case and keeps partial results after a timeout."""

    def judge(ended: Ended) -> Verdict:
        verdict, said = checks.by_status(ended), checks.last_line(ended.output)
        missing = verdict.outcome == "failed" and said.startswith("not measured")
        return Verdict("passed", said) if missing else verdict

    def found() -> list[dict[str, Any]]:
        return [json.loads(path.read_text())["results"]] if path.exists() else []

    return Check(name, command, seconds, judge=judge, collect=lambda ended: found())


def reached(records: Sequence[Record], name: str) -> list[dict[str, Any]]:
    """Return the degree to which each goal is reached in the records of `measure_goals`."""
    own = [record for record in records if record["check"].startswith(f"{name}: ")]
    cases, failed, rates = [], {}, []
    for record in own:
        case = record["check"].partition(": ")[2]
        why = f"{record['outcome']}: {record['reason']}"
        failed |= {f"{case} {direction}": why for direction in ("forward", "backward")}
        failed |= {f"{case} forward+backward": why}
        for found in record["found"]:
            cases += found["cases"]
            failed |= found["failed"]
            rates += [limit["matmul_flops_per_s"] for limit in found["limits"].values()]
    rows = goals.reached(cases, max(rates, default=1.0), failed) if own else []
    return [row for row in rows if row["reason"] != "not asked for"]
