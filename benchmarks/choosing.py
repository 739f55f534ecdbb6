"""Which of our implementations is the fastest for a call, and how good is the choice of `None`?

    python -m benchmarks.choosing --only short decode     # measure and add rows to the file
    python -m benchmarks.choosing --check benchmarks/results/choosing.json

The first command measures "xla", "blockwise", and "native" alternately, forward and forward +
backward, for the cases in `specs.py` with the tag `choosing`. The rule in `attention/api.py` is
fitted to the file. The second command prints, for each row, the choice of `None` and how much
slower it is than the best implementation. It exits with status 1 if the median ratio is more than 3
% slower and three quarters of the rounds are slower. Noise alone causes the former without the
latter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks import contenders, timing
from benchmarks.peers import Absent
from benchmarks.specs import AttentionCase, Direction, attention_cases

FILE = timing.RESULTS / "choosing.json"
OURS = "xla", "blockwise", "native"
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")
SLOWER = 1.03


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if options.check is not None:
        return 1 if check(json.loads(options.check.read_text())["results"]) else 0
    timing.prepare()
    before = timing.environment() | {"limits": timing.limits("float32")}
    print(timing.headline(before), flush=True)
    rows = json.loads(options.out.read_text())["results"] if options.out.exists() else {}
    for case, direction in _cells(options):
        name = f"{case.name} {direction}"
        if name in rows and not options.again:
            continue
        rows[name] = measure(case, direction, options)
        print(line(name, rows[name]), flush=True)
        if not options.warm:
            timing.write(options.out, __doc__.splitlines()[0], before, rows)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--check", type=Path, help="compare the choice with this file, measure nothing")
    add("--only", nargs="+", default=[], help="cases whose name or tags have one of these words")
    add("--out", type=Path, default=FILE, help="the file that rows are added to")
    add("--again", action="store_true", help="measure rows again that the file has")
    add("--warm", action="store_true", help="compile everything, for a cache; write nothing")
    add("--rounds", type=int, default=11)
    add("--seconds", type=float, default=6.0, help="most time for a row")
    add("--memory", type=float, default=4.0, help="GiB that materialised scores may take")
    return parser.parse_args(argv)


def _cells(options: argparse.Namespace) -> Iterator[tuple[AttentionCase, Direction]]:
    for case in attention_cases("choosing"):
        words = [case.name, *case.tags]
        if options.only and not any(x in word for x in options.only for word in words):
            continue
        for direction in DIRECTIONS:
            if direction == "forward" or not case.cached:
                yield case, direction


def measure(
    case: AttentionCase, direction: Direction, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the time in seconds of each round for each of our implementations that can run."""
    explained = contenders.explain(case)
    found = []
    for name in OURS:
        if explained[name] is not None:
            continue
        build = partial(contenders.ours, case, name)
        try:
            call = contenders._jax_call(case, direction, options, build, name)
        except Absent:
            continue
        call()
        found.append(timing.Contender(name, call))
    if options.warm:
        return {}
    taken = timing.interleave(
        found, rounds=options.rounds, seconds=options.seconds, sample_seconds=0.01
    )
    return {name: [float(f"{x:.4g}") for x in one.samples] for name, one in taken.items()}


def best_of(row: Mapping[str, Sequence[float]]) -> str:
    return min(row, key=lambda name: statistics.median(row[name]))


def slower(row: Mapping[str, Sequence[float]], chosen: str) -> tuple[float, float]:
    """Return the median and the lower quartile of the time of the choice relative to the best."""
    ratios = [x / y for x, y in zip(row[chosen], row[best_of(row)], strict=True)]
    low, middle, _ = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low


def check(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Print the choice for each row and return the rows for which the choice is too slow."""
    cases = {case.name: case for case in attention_cases("choosing")}
    worst = []
    for name, row in rows.items():
        chosen = contenders.explain(cases[name.split()[0]]).chosen
        if chosen not in row:
            print(f"{name}: {chosen} was not measured")
            worst.append(name)
            continue
        middle, low = slower(row, chosen)
        if middle > SLOWER and low > 1:
            worst.append(name)
        print(f"{line(name, row)}  None: {chosen} {middle:.3f}{' !' * (name in worst)}")
    print(f"{len(worst)} of {len(rows)} rows are more than {SLOWER - 1:.0%} slower than the best")
    return worst


def line(name: str, row: Mapping[str, Sequence[float]]) -> str:
    times = (f"{key} {1e6 * statistics.median(x):9.1f}" for key, x in row.items())
    return f"{name:48} us: {', '.join(times)}"


if __name__ == "__main__":
    sys.exit(main())
