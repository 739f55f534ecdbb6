"""Print which attention functions agree with one definition, case by case.

    python -m benchmarks.conformance                        all that is installed
    python -m benchmarks.conformance --only jax.nn          one implementation
    python -m benchmarks.conformance --write benchmarks/results/conformance

Each implementation runs in a process of its own, so that a crash costs one cell. A cell is one of

    equal      output and gradients lie within the bounds on rounding, see `cases.Case.result`
    another    they are those of another definition, which is named
    wrong      they are those of no definition that is listed
    refused    the call raised an error
    no word    the function has no argument for an option of the case
    crashed    the process ended
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.conformance.cases import Case, cases
from benchmarks.conformance.definition import DEFINITION, MEANING, Words, alternatives
from benchmarks.conformance.implementations import IMPLEMENTATIONS, CannotSay, reason_absent

LETTERS = {
    "equal": "=",
    "another": "other",
    "wrong": "WRONG",
    "refused": "refused",
    "no word": "·",
    "crashed": "CRASHED",
}


@dataclass(frozen=True)
class Cell:
    implementation: str
    case: str
    kind: str
    text: str = ""  # which definition, which error, how far off


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS)
    )
    parser.add_argument("--case", default="", help="run cases whose name contains this text")
    parser.add_argument("--write", metavar="PATH", type=Path, help="write PATH.json and PATH.md")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    chosen = [case for case in cases() if given.case in case.name]
    if not chosen:
        parser.error(f"no case has {given.case!r} in its name")
    if given.child:
        sys.argv[1:] = []  # tokamax parses the command line of the process on its first call
        for case in chosen[given.skip :]:
            print(json.dumps(asdict(judge(given.only[0], case))), flush=True)
        return 0
    versions: dict[str, str] = {}
    cells: list[Cell] = []
    for name in given.only:
        if (reason := reason_absent(name)) is not None:
            print(f"{name}: not run: {reason}", flush=True)
            continue
        versions[name] = IMPLEMENTATIONS[name].version()
        found = in_process(name, chosen, given.case)
        cells += found
        counts = collections.Counter(cell.kind for cell in found)
        print(
            f"{name} {versions[name]}:",
            ", ".join(f"{n} {kind}" for kind, n in counts.most_common()),
            flush=True,
        )
    text = table(chosen, versions, cells)
    if given.write is None:
        print("\n" + text)
    else:
        machine = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "versions": versions,
        }
        given.write.with_suffix(".json").write_text(
            json.dumps(machine | {"cells": [asdict(c) for c in cells]}, indent=1) + "\n"
        )
        given.write.with_suffix(".md").write_text(text + "\n")
    return 0


def in_process(name: str, chosen: list[Case], part: str) -> list[Cell]:
    """Run one implementation's cases in processes; a new one begins after each crash."""
    cells: list[Cell] = []
    environment = {
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    } | os.environ
    while len(cells) < len(chosen):
        command = [
            sys.executable,
            "-m",
            "benchmarks.conformance",
            "--child",
            "--only",
            name,
            "--case",
            part,
        ]
        child = subprocess.run(
            [*command, "--skip", str(len(cells))],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        for line in child.stdout.splitlines():
            if line.startswith('{"implementation"'):
                cells.append(Cell(**json.loads(line)))
        if len(cells) < len(chosen):
            reason = (child.stderr.strip().splitlines() or [""])[-1]
            cells.append(
                Cell(
                    name,
                    chosen[len(cells)].name,
                    "crashed",
                    f"exit status {child.returncode}: {reason[:200]}",
                )
            )
    return cells


def judge(name: str, case: Case) -> Cell:
    """Run a case and compare the result with each definition in turn."""
    try:
        result = IMPLEMENTATIONS[name](case)
    except CannotSay as error:
        return Cell(name, case.name, "no word", str(error))
    except Exception as error:
        return Cell(
            name,
            case.name,
            "refused",
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
        )
    if difference(case, DEFINITION, result) is None:
        return Cell(name, case.name, "equal")
    for words in alternatives():
        if difference(case, words, result) is None:
            return Cell(name, case.name, "another", "; ".join(other_words(words)))
    return Cell(name, case.name, "wrong", difference(case, DEFINITION, result) or "")


def difference(case: Case, words: Words, result: dict[str, np.ndarray]) -> str | None:
    """Return None when a result is within the bounds of a definition, else what is furthest off."""
    expected, bounds = case.result(words)
    worst = None
    for name in result:
        if name not in expected:
            continue
        if result[name].shape != expected[name].shape:
            return f"shape of {name}: {result[name].shape}, expected {expected[name].shape}"
        nan = np.isnan(expected[name])
        if (np.isnan(result[name]) != nan).any():
            found = "NaN" if (np.isnan(result[name]) & ~nan).any() else "no NaN"
            return f"{found} in {'the output' if name == 'out' else f'the gradient of {name}'}"
        off = np.abs(np.where(nan, 0, result[name]) - np.where(nan, 0, expected[name]))
        over = off - bounds[name]
        if (over > 0).any():
            at = np.unravel_index(np.argmax(over), over.shape)
            what = "output" if name == "out" else f"gradient of {name}"
            worst = f"{what}: off by {off[at]:.2g}, bound {bounds[name][at]:.1g}"
            break
    return worst


def other_words(words: Words) -> list[str]:
    return [text for (field, value), text in MEANING.items() if getattr(words, field) == value]


def table(chosen: list[Case], versions: dict[str, str], cells: list[Cell]) -> str:
    """Return the table as Markdown, with what its words mean under it."""
    found = {(cell.implementation, cell.case): cell for cell in cells}
    notes: dict[str, int] = {}
    lines = [
        "| case | " + " | ".join(f"{name} {version}" for name, version in versions.items()) + " |",
        "|---" * (len(versions) + 1) + "|",
    ]
    group = ""
    for case in chosen:
        if case.group != group:
            group = case.group
            lines.append(f"| **{group}** |" + " |" * len(versions))
        row = []
        for name in versions:
            cell = found[name, case.name]
            mark = LETTERS[cell.kind]
            if cell.text and cell.kind != "no word":
                mark += f" {notes.setdefault(cell.text, len(notes) + 1)}"
            row.append(mark)
        lines.append(f"| {case.name} | " + " | ".join(row) + " |")
    lines += ["", *(f"{number}. {text}" for text, number in notes.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
