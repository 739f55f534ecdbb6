"""Plant random one-token mutants, and count those that the tests notice.

`python -m tests.mutants --map` runs the default tests once and records which lines each test runs.
`python -m tests.mutants --seed 1 --folder decoding --count 20` then plants 20 random mutants of
that folder, each alone in a copy of the project. The 60 quickest of the tests that run the
mutant's line come first, then all tests of the three files that have the most of them, then the
rest of them, until one fails or three minutes are over. `--slow` also runs the slow
tests of those files on the mutants that survived. Results are stored in
`build/mutants/results.jsonl`, so that a second run does only the rest. `--write` writes the
table.

`mutmut` and `cosmic-ray` start a process for each mutant, which imports JAX and Flax for longer
than most tests run, and neither drops keyword arguments nor swaps arguments. Here, a run is a fork
of a process that has imported them (see `tests.planted_bugs`).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from coverage import CoverageData

from tests.mutants.judged import JUDGED
from tests.mutants.operators import Mutant, mutants
from tests.mutants.reached import FOLDER
from tests.planted_bugs.__main__ import IMPORTED, ROOT, Run, copy_project

LIMIT = {"default": 180.0, "slow": 900.0}
"""Seconds for the tests of one mutant; if they take longer, it survives, as the table notes."""
FIRST = 60
"""Tests of the mutant's line that run before whole files."""


def folder_of(file: str) -> str:
    """Return the folder that a file counts for: `kernels`, `decoding`, `models`, ..."""
    parts = Path(file).parts
    return parts[0] if parts[0] == "kernels" or len(parts) < 3 else parts[1]


def package_mutants(seed: int) -> dict[str, list[Mutant]]:
    """Return each folder's mutants in random order, one of each kind in turn.

    Rare kinds, such as arithmetic, would otherwise drown in dropped keywords.
    """
    found: dict[str, list[Mutant]] = defaultdict(list)
    for top in ("transformer_jax", "kernels"):
        for path in sorted((ROOT / top).rglob("*.py")):
            file = path.relative_to(ROOT)
            if "kernels" not in file.parts[1:]:  # the package's link to the folder
                found[folder_of(str(file))] += mutants(ROOT, str(file))
    chosen = {}
    for folder, several in found.items():
        places: dict[str, int] = defaultdict(int)
        ranked = []
        for mutant in sorted(several, key=lambda mutant: mutant.rank(seed)):
            ranked.append((places[mutant.kind], mutant.rank(seed), mutant))
            places[mutant.kind] += 1
        chosen[folder] = [mutant for *_, mutant in sorted(ranked, key=lambda item: item[:2])]
    return chosen


class LineMap:
    """The tests that run each line, and the seconds of each test."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.sources: dict[str, str] = {}
        for path in FOLDER.glob("seconds.*.json"):
            self.seconds |= json.loads(path.read_text())
        if not self.seconds:
            raise SystemExit("no map of lines and tests: run `python -m tests.mutants --map` first")
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for path in FOLDER.glob("lines.*"):
            data = CoverageData(basename=str(path))
            data.read()
            for file in data.measured_files():
                name = str(Path(file).relative_to(ROOT))
                for line, tests in data.contexts_by_lineno(file).items():
                    self.lines[name][line] |= set(tests)

    def is_there(self, test: str) -> bool:
        """Whether the source still defines a test: pytest fails for one that it does not."""
        file, _, name = test.partition("::")
        if file not in self.sources:
            path = ROOT / file
            self.sources[file] = path.read_text() if path.is_file() else ""
        inherited = "::" in name.partition("[")[0]  # from a suite in another file, it may be
        return inherited or f"def {name.partition('[')[0]}(" in self.sources[file]

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the mutant's line, quickest first; none if no test does.

        For a line that runs only at import, these are the tests that run any line of the file.
        """
        lines = self.lines.get(mutant.file, {})
        found = lines.get(mutant.line, set())
        if found == {""}:
            found = set().union(*lines.values())
        found = {test for test in found if self.is_there(test)}
        return sorted(found, key=lambda test: (self.seconds.get(test, 1e9), test))


def files_of(mutant: Mutant, tests: list[str]) -> list[str]:
    """Return the three files with most of these tests; without any, those of the same folder."""
    count: dict[str, int] = defaultdict(int)
    for test in tests:
        count[test.partition("::")[0]] += 1
    folder = ROOT / "tests" / folder_of(mutant.file)
    same = sorted(str(path.relative_to(ROOT)) for path in folder.glob("test_*.py"))
    return sorted(count, key=lambda file: (-count[file], file))[:3] or same


def attempt(mutant: Mutant, copy: Path, arguments: list[str], limit: float) -> dict[str, Any]:
    """Plant a mutant in a copy of the project, and return the result of the tests."""
    path, output = copy / mutant.file, copy / "output"
    source = path.read_bytes()
    path.write_bytes(mutant.text(source))
    try:
        run = Run(copy, arguments, output)
        while (status := run.status(limit)) is None:
            time.sleep(0.05)
    finally:
        path.write_bytes(source)
    result = {"killed": None, "seconds": round(run.seconds, 1)}
    if status == -1:
        return result | {"timeout": True}
    if status in (0, 5):  # all passed, or none was selected
        return result
    lines = [
        line for line in output.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return result | {"killed": lines[0][:200] if lines else f"pytest ended with {status}"}


def judge(
    mutant: Mutant, copy: Path, known: LineMap, tests: str, more: list[str]
) -> dict[str, Any]:
    """Run the `default` or the `slow` tests of a mutant, and of `more` files, until one fails."""
    reached = known.tests(mutant)
    files = [*more, *files_of(mutant, reached)]
    if tests == "slow":
        return attempt(mutant, copy, ["-m", "slow and not long", *files], LIMIT[tests])
    result: dict[str, Any] = {"killed": None, "seconds": 0.0}
    others = [test for test in reached[FIRST:] if test.partition("::")[0] not in files]
    for chosen in (reached[:FIRST], files, others) if reached or more else ():
        left = LIMIT[tests] - result["seconds"]
        if chosen and result["killed"] is None and left > 0:
            found = attempt(mutant, copy, ["-m", "not slow", *chosen], left)
            usual = sum(known.seconds.get(test, left) for test in chosen)
            if found.get("timeout") and usual < left / 3:
                found["killed"] = "its tests hang"
            result = found | {"seconds": round(found["seconds"] + result["seconds"], 1)}
    return result | {"tests": len(reached)}


def share(killed: int, of: int) -> str:
    """Return a share in percent with its 95 % interval (Wilson 1927)."""
    p, z = killed / of, 1.96
    middle = (p + z * z / (2 * of)) / (1 + z * z / of)
    width = z * (p * (1 - p) / of + z * z / (4 * of * of)) ** 0.5 / (1 + z * z / of)
    return f"{killed} ({p:.0%}; {middle - width:.0%} to {middle + width:.0%})"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the page: killed by folder and by kind, and what became of each survivor."""
    lines = [
        "# Random mutants",
        "",
        "`python -m tests.mutants` plants one random one-token change at a time in a copy of the",
        "project. A mutant is killed if a test fails. Equivalent mutants and mutants that change",
        "only speed don't count: `tests/mutants/judged.py` records the verdict on each survivor.",
        "A mutant survives if its tests take longer than `--limit` (180 s; 60 s in draw 4).",
        'Shares have 95 % intervals. "First" is the share before the survivors of a draw led to',
        'new tests. "Now" is the share since then; only a new draw gives an unbiased estimate.',
        "",
    ]
    counted = [r for key, r in results.items() if JUDGED.get(key, ("hole", ""))[0] == "hole"]
    for field, title in (("folder", "folder"), ("kind", "change"), ("seed", "draw of `--seed`")):
        lines += [f"| {title} | mutants | killed by default, first | now | slow tests included |"]
        lines += ["|---|---|---|---|---|"]
        for group in [*sorted({row[field] for row in counted}), "all"]:
            rows = [row for row in counted if group in (row[field], "all")]
            first = share(sum(bool(row["first"]) for row in rows), len(rows))
            quick = [row for row in rows if row["default"]["killed"]]
            slow = [row for row in rows if row.get("slow", {}).get("killed")]
            unknown = [r for r in rows if not r["default"]["killed"] and "slow" not in r]
            both = share(len({id(row) for row in quick + slow}), len(rows))
            also = "not run" if unknown else both
            now = share(len(quick), len(rows))
            lines.append(f"| {group} | {len(rows)} | {first} | {now} | {also} |")
        lines.append("")
    lines += ["| survivor of the default tests | change | slow tests | verdict |"]
    lines += ["|---|---|---|---|"]
    for key, row in sorted(results.items(), key=lambda item: (item[1]["file"], item[0])):
        if row["default"]["killed"]:
            continue
        after = "not run"
        if "slow" in row:
            after = "killed" if row["slow"]["killed"] else "survived"
        reached = "" if row["default"]["tests"] else "; no default test runs the line"
        change = f"{row['kind']}: `{row['old']}` → `{row['new']}`".replace("|", "\\|")
        change = change if len(change) < 140 else row["kind"]
        verdict = ": ".join(filter(None, JUDGED.get(key, ("not judged",))))
        place = f"`{row['file']}:{row['line']}` `{key}`, in `{row['where']}`"
        lines.append(f"| {place} | {change}{reached} | {after} | {verdict} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Plant the mutants of the arguments, and print what became of each."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--map", action="store_true", help="record which test runs which line")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", action="append", help="a folder of the package; default all")
    parser.add_argument("--count", type=int, default=20, help="mutants of each folder")
    parser.add_argument("--key", action="append", help="one mutant, by its name in the table")
    parser.add_argument(
        "--tests", action="append", default=[],
        help="a file of tests to run besides: some read a table, but run no line of its file",
    )  # fmt: skip
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT["default"],
        help="seconds for the default tests of one mutant",
    )
    parser.add_argument("--slow", action="store_true", help="also run slow tests on survivors")
    parser.add_argument("--again", action="store_true", help="run survivors again")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    parser.add_argument("--results", type=Path, default=FOLDER / "results.jsonl")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table of all results")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    LIMIT["default"] = args.limit
    if args.map:
        for path in [*FOLDER.glob("lines.*"), *FOLDER.glob("seconds.*")]:
            path.unlink()
        loaded = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
        return int(pytest.main(["-p", "tests.mutants.reached", "-n", "2", "-W", loaded]))
    groups = package_mutants(args.seed)
    groups = {name: found for name, found in groups.items() if name in (args.folder or groups)}
    if args.key:
        chosen = [m for found in groups.values() for m in found if m.key in args.key]
    else:  # one of each folder in turn, so that a run that is cut off has seen them all
        turns = zip_longest(*(found[: args.count] for found in groups.values()))
        chosen = [mutant for turn in turns for mutant in turn if mutant is not None]
    if args.list:
        for mutant in chosen:
            what = f"{mutant.kind}: {mutant.old} -> {mutant.new}"
            print(f"{mutant.key} {mutant.file}:{mutant.line} {what}")
        return 0

    results: dict[str, dict[str, Any]] = {}
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.touch()
    for line in map(json.loads, args.results.read_text().splitlines()):
        line = {"first": line["default"]["killed"], "seed": args.seed} | line
        results[line["key"]] = line | {"first": results.get(line["key"], line)["first"]}
    if args.write:
        args.write.write_text(table(results))
        return 0
    known = LineMap()
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copy = Path(temporary)
        copy_project(copy)
        for mutant in chosen:
            row = results.get(mutant.key, {"key": mutant.key, "seed": args.seed})
            row["folder"] = folder_of(mutant.file)
            for name in ("file", "line", "kind", "where", "old", "new"):
                row[name] = getattr(mutant, name)
            for tests in ("default", "slow") if args.slow else ("default",):
                done = tests in row and (row[tests]["killed"] or not args.again)
                if done or (tests == "slow" and row["default"]["killed"]):
                    continue
                ast.parse(mutant.text((copy / mutant.file).read_bytes()))
                row[tests] = judge(mutant, copy, known, tests, args.tests)
                with args.results.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
                what = f"{mutant.kind}: {mutant.old[:60]} -> {mutant.new[:60]}"
                end = row[tests]["killed"] or "SURVIVED"
                print(f"{mutant.key} {mutant.file}:{mutant.line} {what}", flush=True)
                print(f"    {tests}, {row[tests]['seconds']} s: {end}", flush=True)
            results[mutant.key] = row
    rows = [
        row for m in chosen if JUDGED.get(m.key, ("hole",))[0] == "hole" for row in [results[m.key]]
    ]
    killed = sum(bool(row["default"]["killed"]) for row in rows)
    print(f"killed by the default tests: {share(killed, len(rows))} of {len(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
