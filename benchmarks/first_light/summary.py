"""One page of a run: the outcome of each step, failed tests, reached goals, and all figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import goals, timing
from benchmarks.contenders import OURS, PEERS
from benchmarks.first_light import rehearsal
from benchmarks.first_light.checks import Record

MARK = "rehearsed |"  # prefix of every line in a rehearsal, so that no figure appears without it


def outcomes(records: Sequence[Record]) -> dict[str, str]:
    """Return the outcome of each step that ended."""
    return {record["step"]: record["outcome"] for record in records if "budget_s" in record}


def page(records: Sequence[Record], rehearsed: bool) -> str:
    """Return the page."""
    parts = [rehearsal.SAID] if rehearsed else []
    ended = [record for record in records if "budget_s" in record]
    rows = [(x["step"], x["outcome"], f"{x['seconds']:.0f}", str(x["budget_s"])) for x in ended]
    parts += [timing.table(("step", "outcome", "seconds", "of"), rows)]
    parts += [
        f"{record['step']}: {record['task']}: {record['outcome']}: {record['reason']}"
        for record in records
        if "task" in record and record.get("outcome", "passed") != "passed"
    ]
    for step in dict.fromkeys(record["step"] for record in records):
        found = [x["found"] for x in records if x["step"] == step and "found" in x]
        if step == "attached":
            parts += _tests(found)
        elif step == "goals":
            parts += _goals(found, records)
        else:
            parts += [f"\n{step}", *_tables(found)]
    lines = "\n".join(parts).splitlines()
    mark = f"{MARK} " if rehearsed else ""
    return "".join(f"{mark}{line}".rstrip() + "\n" for line in lines)


def _tests(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the number of tests per outcome, and each failed test."""
    counted = Counter(test["outcome"] for test in found)
    yield "\nattached: " + ", ".join(f"{count} {name}" for name, count in counted.items())
    for test in found:
        if test["outcome"] == "failed":
            yield f"  {test['test'].partition('::')[2]}: {test.get('reason', '')}"


def _goals(found: Sequence[dict[str, Any]], records: Sequence[Record]) -> Iterator[str]:
    """Yield the rate of each contender in TFLOP/s, and the degree to which goals are reached."""
    names = list(dict.fromkeys(name for cell in found for name in cell["timings"]))
    rows = []
    for cell in found:
        rates = []
        for name in names:
            if (reason := goals.trouble(cell, name)) is None or name == OURS:
                rate = cell["flops"] / cell["timings"][name]["median_s"] / 1e12
                rates.append(f"{rate:.3g}" + ("" if reason is None else f" ({reason})"))
            else:
                rates.append("differs" if name in cell["timings"] else "-")
        rows.append((f"{cell['case']} {cell['direction']}", *rates))
    yield "\n" + timing.table(("TFLOP/s", *names), sorted(rows))
    reasons = {
        f"{name}: {reason}"
        for cell in found
        for name, reason in cell["absent"].items()
        if name in PEERS
    }
    yield from sorted(reasons)
    rates = [x["found"]["matmul_flops_per_s"] for x in records
             if "matmul_flops_per_s" in x.get("found", ())]  # fmt: skip
    reached = goals.reached(found, max(rates, default=1.0), {})
    yield goals.table([row for row in reached if row["reason"] != "not asked for"], "pallas")


def _tables(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield one table for the results with the same names, or one line for a single result."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for result in found:
        kinds.setdefault(tuple(result), []).append(result)
    for names, results in kinds.items():
        if len(results) == 1:
            yield ", ".join(f"{name} {_shown(x)}" for name, x in results[0].items())
        else:
            yield timing.table(names, [[_shown(x) for x in result.values()] for result in results])


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
