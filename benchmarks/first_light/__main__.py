"""Run the kernels on a GPU for the first time, and measure correctness, speed, and tile sizes.

    python -m benchmarks.first_light --out runs/first_light
    python -m benchmarks.first_light --step smoke why --minutes 4
    python -m benchmarks.first_light --rehearse     on a CPU, with few tokens

Each check is a separate process with a time limit. Its record is written when it ends, to one file
of JSON lines per step. Finally, the command writes `summary.txt`, one page about all steps that
have files, so that steps can be run one by one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.first_light import (
    ampere,
    machine,
    models,
    rehearsal,
    smoke,
    speed,
    summary,
    tune,
    why,
)
from benchmarks.first_light.checks import Step

STEPS = {"smoke": smoke.run, "speed": speed.run, "why": why.run, "tune": tune.run,
         "ampere": ampere.run, "models": models.run}  # fmt: skip
MINUTES = {"smoke": 6.0, "speed": 10.0, "why": 5.0, "tune": 9.0, "ampere": 4.0, "models": 10.0}
DEFAULT = ("smoke", "speed", "why", "tune")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps. Return 1 if a check is wrong, hung, or crashed."""
    options = _options(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    prefix = "rehearsed_" if options.rehearse else ""
    where = look(options)
    for name in options.step:
        path = options.out / f"{prefix}{name}.jsonl"
        step = Step(name, options.minutes[name], path, rehearsed=options.rehearse)
        step.open(where)
        STEPS[name](step)
        _, records = summary.read(options.out, prefix, tuple(STEPS))  # in case a run is interrupted
        text = summary.page(where, records, options.rehearse)
        (options.out / f"{prefix}summary.txt").write_text(text)
    print("\n" + text, end="")
    own = [record for name in options.step for record in records[name]]
    return int(any(record["outcome"] in ("failed", "crashed", "hung") for record in own))


def look(options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the description of the machine. Exit if it is not of the requested kind."""
    step = Step("first light", 2.0, options.out / "machine.jsonl", rehearsed=options.rehearse)
    [record] = step.run(machine.check(rehearsal.flags(options.rehearse)))
    step.path.unlink()  # the file of each step begins with this description
    if record["outcome"] != "passed":
        raise SystemExit(f"{record.get('output', '')}\nthe machine: {record['reason']}")
    [where] = record["found"]
    if options.rehearse:
        print(rehearsal.SAID)
    elif where["platform"] == "cpu":
        raise SystemExit("no accelerator; the backend is cpu: try `--rehearse`")
    print(machine.shown(where), flush=True)
    return where


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_light",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--step", nargs="+", choices=STEPS, default=DEFAULT, help=f"default: {' '.join(DEFAULT)}")
    minutes = ", ".join(f"{name} {n:g}" for name, n in MINUTES.items())
    add("--minutes", type=float, help=f"for each step (default: {minutes})")
    add("--out", type=Path, default=Path("runs/first_light"), metavar="DIRECTORY")
    add(rehearsal.FLAG, action="store_true", help=rehearsal.SAID)
    options = parser.parse_args(argv)
    asked = MINUTES if options.minutes is None else dict.fromkeys(MINUTES, options.minutes)
    options.minutes = asked
    return options


if __name__ == "__main__":
    sys.exit(main())
