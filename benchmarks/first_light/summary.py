"""One-page summary of passed checks, reached goals, and suggested changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import goals, timing
from benchmarks.first_light import machine, rehearsal
from benchmarks.first_light.ablations import AS_IT_IS, CHAINED, VARIANTS
from benchmarks.first_light.checks import OUTCOMES, Record
from benchmarks.first_light.speed import GOALS, reached
from benchmarks.first_light.tune import AGAIN
from benchmarks.first_light.why import busiest

Records = Mapping[str, Sequence[Record]]
"""Records of each step that ran."""
GAIN = 1.03  # smaller gains are within the spread of a measurement
WAITS = 1.10
BUSY = 70.0  # percent
FIRST = 10  # number of suggested changes
MARK = "rehearsed |"  # prefix of every line in a rehearsal, so that no figure appears without it


def read(folder: Path, prefix: str, steps: Sequence[str]) -> tuple[dict[str, Any], Records]:
    """Return the machine and the records of each step; the files may be incomplete."""
    where: dict[str, Any] = {}
    found = {}
    for step in steps:
        path = folder / f"{prefix}{step}.jsonl"
        if path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            where, found[step] = lines[0]["machine"], lines[1:]
    return where, found


def page(where: dict[str, Any], records: Records, rehearsed: bool) -> str:
    """Return the page."""
    parts = [rehearsal.SAID, ""] if rehearsed else []
    parts += [machine.shown(where)]
    parts += [outcomes(step, found) for step, found in records.items()]
    for name, rows in _goals(records).items():
        parts.append(f"\n{name}" + goals.table(rows, "pallas"))
    parts += [*_parts_table(records), *_kernels_table(records), *_rows(records)]
    first = change_first(records)
    parts.append("\nchange first")
    parts += [f"{i}. {said}" for i, said in enumerate(first[:FIRST], 1)] or ["nothing was found"]
    lines = "\n".join(parts).splitlines()
    mark = f"{MARK} " if rehearsed else ""
    return "".join(f"{mark}{line}".rstrip() + "\n" for line in lines)


def outcomes(step: str, records: Sequence[Record]) -> str:
    """Return the number of checks per outcome, and one line for each check that did not pass."""
    counted = Counter(record["outcome"] for record in records)
    said = ", ".join(f"{counted[name]} {name}" for name in OUTCOMES if counted[name])
    lines = [f"\n{step}: {said or 'nothing was begun'}"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record["reason"]:
            reasons.setdefault((record["outcome"], record["reason"]), []).append(record["check"])
    for (outcome, reason), names in reasons.items():
        more = f" and {len(names) - 1} more" if names[1:] else ""
        lines.append(f"  {outcome}: {names[0]}{more}: {reason}")
    return "\n".join(lines)


def change_first(records: Records) -> list[str]:
    """Return suggested changes, with wrong results first and then the largest costs."""
    return [*_wrong(records), *_costs(records), *_missed(records), *_limits(records)]


def _wrong(records: Records) -> Iterator[str]:
    for step, found in records.items():
        for record in found:
            if record["outcome"] in ("failed", "crashed", "hung"):
                yield f"{step}, {record['check']}, {record['outcome']}: {record['reason']}"


def _costs(records: Records) -> Iterator[str]:
    """Yield the parts that slow down a call, with the most expensive first, and host waits."""
    best: dict[str, tuple[float, str]] = {}
    for cell in _cells(records):
        place = f"{cell['case']} {cell['direction']}"
        for name, gain in cell["gain"].items():
            part = name.removesuffix(CHAINED)
            how = "chained" if name.endswith(CHAINED) else "synchronised"
            if part != AS_IT_IS and part not in cell["differs"]:
                best[part] = max(best.get(part, (0.0, "")), (gain, f"{place}, {how}"))
    for part, (gain, place) in sorted(best.items(), key=lambda item: -item[1][0]):
        if gain > GAIN:
            yield f"{part}: {gain:.2f}x as fast ({place})"
    for cell in _cells(records):
        waits = cell["ms"][AS_IT_IS] / cell["ms"][AS_IT_IS + CHAINED]
        if waits > WAITS:
            place = f"{cell['case']} {cell['direction']}"
            yield f"a synchronised call takes {waits:.2f} times as long as a chained one ({place})"


def _missed(records: Records) -> Iterator[str]:
    for name, rows in reversed(_goals(records).items()):
        missed = [x for x in rows if x["ratio"] is not None and x["ratio"] < x["goal"]]
        for row in sorted(missed, key=lambda x: x["ratio"] / x["goal"])[:4]:
            cell = f"{row['case']} {row['direction']}, {row['of']}"
            yield f"{cell}: {row['ratio']:.2f} of {row['than']}, wanted {row['goal']:.2f} ({name})"
        if missed:
            return


def _limits(records: Records) -> Iterator[str]:
    for record in records.get("why", ()):
        for launch in sorted(record["found"], key=lambda x: -(x["ns"] or 0))[:1]:
            most = busiest(launch)
            if most is not None:
                unit, percent = most
                said = "nothing is busy: it waits" if percent < BUSY else f"{unit} are the limit"
                yield f"{record['check']}: {said} ({unit} {percent:.0f} %)"


def _goals(records: Records) -> dict[str, list[dict[str, Any]]]:
    """Return the degree to which goals are reached, with the default and the best tile sizes."""
    every = [record for found in records.values() for record in found]
    rows = {name: reached(every, name) for name in (GOALS, AGAIN)}
    return {name: found for name, found in rows.items() if found}


def _found(records: Records, check: str) -> Iterator[Any]:
    for found in records.values():
        yield from (record["found"] for record in found if record["check"] == check)


def _cells(records: Records) -> Iterator[dict[str, Any]]:
    """Yield the measurements of calls with disabled parts."""
    for record in records.get("speed", ()):
        yield from (x for x in record["found"] if "gain" in x)


def _parts_table(records: Records) -> list[str]:
    """Return one row per case with the time in milliseconds and the speedup without each part."""
    parts = [name for name in VARIANTS if name != AS_IT_IS]
    rows = []
    for cell in _cells(records):
        gains = [
            " ".join(
                f"{cell['gain'][name]:.2f}x" if name in cell["gain"] else "-"
                for name in (part, part + CHAINED)
            )
            + (" differs" if part in cell["differs"] else "")
            for part in parts
        ]
        ms = cell["ms"]
        own = f"{ms[AS_IT_IS]:.3f} {ms[AS_IT_IS + CHAINED]:.3f}"
        rows.append((f"{cell['case']} {cell['direction']}", own, *gains))
    if not rows:
        return []
    header = ("a call, synchronised and chained", "ms", *parts)
    absent = {name: why for cell in _cells(records) for name, why in cell["absent"].items()}
    return ["\n" + timing.table(header, rows), *(f"{n}: {why}" for n, why in absent.items())]


def _kernels_table(records: Records) -> list[str]:
    """Return the longest launches of each pass and the number of other launches."""
    rows = []
    for record in records.get("why", ()):
        longest = sorted(record["found"], key=lambda x: -(x["ns"] or 0))
        for launch in longest[:2]:
            units = [_percent(launch[unit]) for unit in ("tensor", "special", "issue", "dram")]
            us = "-" if launch["ns"] is None else f"{launch['ns'] / 1e3:.1f}"
            rows.append((f"{record['check']}: {launch['kernel'][:40]}", us, *units))
        if longest[2:]:
            rest = sum(x["ns"] or 0 for x in longest[2:])
            rows.append((f"{record['check']}: {len(longest) - 2} others", f"{rest / 1e3:.1f}"))
    if not rows:
        return []
    header = ("kernel", "us", "tensor", "special", "issue", "dram")
    padded = [(*row, *[""] * (len(header) - len(row))) for row in rows]
    return ["\n" + timing.table(header, padded)]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _rows(records: Records) -> list[str]:
    searches = [x for x in records.get("tune", ()) if x["check"].startswith("search at ")]
    found = [row for record in searches for row in record["found"]]
    if not found:
        return []
    return ["\nrows for kernels/chips.py", *(f"  {tuple(row[:6])}: {row[6:]}" for row in found)]
