"""Print which attention functions agree with one definition for each case.

    python -m benchmarks.conformance                        all installed implementations
    python -m benchmarks.conformance --only jax.nn          only this implementation
    python -m benchmarks.conformance --write benchmarks/results/conformance
    python -m benchmarks.conformance --against benchmarks/results/conformance.json

Each implementation runs in its own process, so that a crash affects only one cell. As many
processes run at a time as there are cores. With `--against`, the command exits with 1 if an outcome
is not the recorded one. The outcome in a cell is one of

    equal          output and gradients are within the bounds on rounding (`Case.result`)
    another        they match another definition, which is described in a note
    wrong          they match no definition
    refused        the call raised an error
    inexpressible  the function has no argument for an option of the case
    crashed        a signal ended the process

If nothing is selected, a second part describes the behavior of caches, position tables, and dropout
(`benchmarks.conformance.behavior`).
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conformance.behavior import markdown, observed
from benchmarks.conformance.cases import Case, cases
from benchmarks.conformance.definition import DEFINITION, MEANING, Definition, alternatives
from benchmarks.conformance.implementations import IMPLEMENTATIONS
from benchmarks.conformance.outcomes import Cell, write
from benchmarks.peers import Absent

MARKS = {
    "equal": "=", "another": "other", "wrong": "**wrong**", "refused": "refused",
    "inexpressible": "·", "crashed": "**crashed**",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = list(IMPLEMENTATIONS)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--case", default="", help="run the cases whose name contains this text")
    parser.add_argument("--write", metavar="PATH", type=Path, help="write PATH.json and PATH.md")
    parser.add_argument("--against", metavar="FILE", type=Path, help="compare with FILE's cells")
    parser.add_argument("--skip", type=int, help=argparse.SUPPRESS)  # for child processes
    options = parser.parse_args(argv)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    chosen = [case for case in cases() if options.case in case.name]
    if not chosen:
        parser.error(f"case is {options.case!r}: no case has this in its name")
    if options.skip is not None:
        sys.argv[1:] = []  # tokamax parses the command line of the process on its first call
        for case in chosen[options.skip :]:
            print(json.dumps(asdict(judge(options.only[0], case))), flush=True)
        return 0
    versions, absent, cells = dict[str, str](), dict[str, str](), list[Cell]()
    for name in options.only:
        try:
            versions[name] = IMPLEMENTATIONS[name].version()
        except Absent as reason:
            absent[name] = str(reason)
            print(f"{name}: not run: {reason}", flush=True)
    run = functools.partial(in_process, chosen=chosen, part=options.case)
    with ThreadPoolExecutor(os.cpu_count()) as processes:
        for name, found in zip(versions, processes.map(run, versions), strict=True):
            counts = collections.Counter(cell.kind for cell in found)
            kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
            print(f"{name} {versions[name]}: {kinds}", flush=True)
            cells += found
    text = table(chosen, versions, absent, cells)
    behavior: dict[str, dict[str, str]] = {}
    if options.only == names and not options.case:
        behavior = observed()
        text += f"\n\n{markdown(behavior)}"
    if options.write is not None:
        write(options.write, versions, cells, text, absent=absent, behavior=behavior)
    if options.against is not None:
        return compare(cells, versions, json.loads(options.against.read_text()))
    if options.write is None:
        print(f"\n{text}")
    return 0


def compare(cells: list[Cell], versions: dict[str, str], recorded: dict[str, Any]) -> int:
    """Print each cell whose outcome is not the recorded one, and return 1 if there is one."""
    kinds = {
        (name, case): outcome.partition(": ")[0]
        for name, outcomes in recorded["cells"].items()
        for case, outcome in outcomes.items()
    }
    status = 0
    for cell in cells:
        before = kinds.get((cell.implementation, cell.case), "not recorded")
        if cell.kind != before:
            now = versions[cell.implementation]
            then = recorded["versions"].get(cell.implementation, "not recorded")
            found = f"{cell.implementation} {now}, {cell.case}: {cell.kind} {cell.text}"
            print(f"{found.strip()}: the recorded outcome, of version {then}, is {before}")
            status = 1
    return status


def in_process(name: str, chosen: list[Case], part: str) -> list[Cell]:
    """Run an implementation's cases in a process, which is replaced after a crash.

    Raises RuntimeError if the process ends with an error instead of a signal.
    """
    cells: list[Cell] = []
    defaults = dict(JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    command = [sys.executable, "-m", "benchmarks.conformance", "--only", name, "--case", part]
    while len(cells) < len(chosen):
        child = subprocess.run(
            [*command, "--skip", str(len(cells))], capture_output=True, text=True, check=False,
            env=defaults | os.environ,
        )  # fmt: skip
        lines = [line for line in child.stdout.splitlines() if line.startswith('{"impl')]
        cells += [Cell(**json.loads(line)) for line in lines]
        if len(cells) == len(chosen):
            break
        reason = (child.stderr.strip().splitlines() or [""])[-1][:200]
        if 0 <= child.returncode < 128:
            raise RuntimeError(f"{name}: exit status {child.returncode}: {reason}")
        text = f"exit status {child.returncode}: {reason}"
        cells.append(Cell(name, chosen[len(cells)].name, "crashed", text))
    return cells


def judge(name: str, case: Case) -> Cell:
    """Run a case and compare the result with each definition."""
    cell = functools.partial(Cell, name, case.name)
    try:
        result = IMPLEMENTATIONS[name](case)
    except Absent as reason:
        return cell("inexpressible", str(reason))
    except Exception as error:
        return cell("refused", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    wrong = difference(case, DEFINITION, result)
    if wrong is None:
        return cell("equal")
    for definition in alternatives():
        if difference(case, definition, result) is None:
            return cell("another", "; ".join(choices(definition)))
    return cell("wrong", wrong)


def difference(case: Case, definition: Definition, result: dict[str, np.ndarray]) -> str | None:
    """Return the first difference from a definition, or None if a result is within its bounds."""
    expected, bounds = case.result(definition)
    for name, found in result.items():
        what = "output" if name == "out" else f"gradient of {name}"
        if found.shape != expected[name].shape:
            return f"{what}: shape {found.shape}, expected {expected[name].shape}"
        nan = np.isnan(expected[name])
        if (np.isnan(found) != nan).any():
            return f"{what}: {'NaN' if (np.isnan(found) & ~nan).any() else 'no NaN'}"
        off = np.where(nan, 0, np.abs(found - expected[name]))
        if (off > bounds[name]).any():
            at = np.unravel_index(np.argmax(off - bounds[name]), off.shape)
            return f"{what}: off by {off[at]:.2g}, bound {bounds[name][at]:.1g}"
    return None


def choices(definition: Definition) -> list[str]:
    """Return the meaning of each choice in a definition that is not the default."""
    return [text for (field, value), text in MEANING.items() if getattr(definition, field) == value]


def table(
    chosen: list[Case], versions: dict[str, str], absent: dict[str, str], cells: list[Cell]
) -> str:
    """Return the table in Markdown, with the notes to which its cells refer."""
    found = {(cell.implementation, cell.case): cell for cell in cells}
    notes: dict[str, int] = {}
    heads = [
        f"{name} {version}" + ("" if IMPLEMENTATIONS[name].gradient else " (output only)")
        for name, version in versions.items()
    ]
    lines = [f"| case | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for group, members in itertools.groupby(chosen, lambda case: case.group):
        lines.append(f"| **{group}** |" + " |" * len(heads))
        for case in members:
            row = [case.name]
            for name in versions:
                cell = found[name, case.name]
                note = f" {notes.setdefault(cell.text, len(notes) + 1)}" if cell.text else ""
                row.append(MARKS[cell.kind] + ("" if cell.kind == "inexpressible" else note))
            lines.append(f"| {' | '.join(row)} |")
    lines += ["", *(f"{number}. {text}" for text, number in notes.items())]
    lines += [f"- {name}: not run: {reason}" for name, reason in absent.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
