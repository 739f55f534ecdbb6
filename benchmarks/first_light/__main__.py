"""Test and measure the kernels on a new GPU in nine minutes, the most important first.

    python -m benchmarks.first_light --out runs/first_light
    python -m benchmarks.first_light --out runs/again --only goals profile
    python -m benchmarks.first_light --out runs/again --resume runs/first_light
    python -m benchmarks.first_light --rehearse            on a CPU, with few tokens
    python -m benchmarks.first_light --carry FOLDER        peers, on a machine with a network

A step may also use the seconds that earlier steps left over. A step that needs more is cut off and
named, and the next one starts. `results.jsonl` and `log.txt` are written while the processes run,
and `summary.txt` after each step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import goals, timing
from benchmarks.first_light import attached, carry, checks, rehearsal, summary, tasks
from benchmarks.first_light.checks import Run, Task
from benchmarks.specs import Direction

Wave = list[Task]
"""Tasks that run at the same time."""


@dataclass(frozen=True)
class Step:
    """Step with a number of seconds, and its waves as a function of whether it is a rehearsal."""

    seconds: int
    content: str
    waves: Callable[[bool], list[Wave]]


def task(rehearsed: bool, name: str, *arguments: str) -> Task:
    """Return a process that runs a function of `tasks`."""
    flags = ("--rehearse",) if rehearsed else ()
    command = sys.executable, "-m", "benchmarks.first_light.tasks", *flags, name, *arguments
    return Task(" ".join((name, *arguments)), command)


def tests(rehearsed: bool) -> list[Wave]:
    """Return one run of pytest in as many processes as cores, with 20 seconds for each test."""
    command = (
        sys.executable, "-m", "pytest", "-p", "benchmarks.first_light.attached", "-m", "",
        "-p", "no:cacheprovider", "--tb=short", "--timeout-method", "thread",
        "-n", str(len(os.sched_getaffinity(0))), "--dist", "load", "--maxschedchunk", "1",
        *(("-k", "decoding_over") if rehearsed else ("--timeout", "20")),
        "tests/kernels/test_attached.py",
    )  # fmt: skip
    environment = {attached.REHEARSED: "1"} if rehearsed else {}
    return [[Task("tests", command, environment)]]


BOTH: tuple[Direction, ...] = ("forward", "backward")
LONG, SHORT = (
    [(f"causal-16k-h{H}-s{S}", direction) for S in lengths for H in (128, 64) for direction in BOTH]
    for lengths in ((8192, 4096, 2048), (1024,))
)
MASKED = [("documents12-h128-s8192", "forward+backward")]
MASKED += [(f"window1024-gqa-h{H}-s8192", "forward+backward") for H in (128, 64)]


def cells(rehearsed: bool) -> list[Wave]:
    """Return the cells of a sweep over lengths, and then the other cells of the goals.

    The cells of a wave are built at the same time and timed one by one.
    """
    swept = [*LONG, *SHORT, *MASKED]
    waves = [LONG, [*SHORT, *MASKED], [cell for cell in goals.cells() if cell not in swept]]
    if rehearsed:
        waves = [[LONG[0], MASKED[0]]]
    return [_side_by_side(task(rehearsed, "goals", *cell) for cell in wave) for wave in waves]


def _side_by_side(wave: Iterable[Task]) -> Wave:
    """Return tasks that build at the same time, but measure one by one."""
    turns = {timing.TURNS: str(Path(tempfile.gettempdir()) / f"first_light_{os.getpid()}")}
    return [replace(each, environment=turns) for each in wave]


def models(rehearsed: bool) -> list[Wave]:
    names = list(tasks.DECODED)[: 1 if rehearsed else None]
    return [_side_by_side(task(rehearsed, "decoding", name) for name in names)]


def counters(rehearsed: bool) -> list[Wave]:
    names = ("causal-16k-h128-s8192", "causal-16k-h64-s4096")[: 1 if rehearsed else None]
    return [[task(rehearsed, "counters", name)] for name in names]


def alone(name: str, **environment: str) -> Callable[[bool], list[Wave]]:
    """Return the only wave of a step with one task."""
    return lambda rehearsed: [[replace(task(rehearsed, name), environment=environment)]]


# A kernel within a command buffer (CUDA graph) has no time of its own.
EAGER = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
STEPS = {
    "machine": Step(25, "versions; rates of a product, a read and a copy", alone("machine")),
    "attached": Step(120, "each test of `tests/kernels/test_attached.py`, at most 20 s", tests),
    "goals": Step(165, "attention and its peers: S 1k to 8k, windows, documents, goals", cells),
    "profile": Step(90, "kernels of a step of two micro-batches, GPT-2 124M",
                    alone("profile", **EAGER)),
    "decoding": Step(40, "GPT-2 124M and Llama 1.3B, batch 1: share of the memory rate", models),
    "counters": Step(50, "`ncu` for each pass at H 128 and H 64", counters),
    "products": Step(20, "products in tiles of rows: cost, and equal bits", alone("products")),
    "linear": Step(20, "linear attention in chunks, in plain XLA", alone("linear")),
}  # fmt: skip
REHEARSED_TIMES = 3  # a rehearsal must also end on a CPU that other processes use


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps. Return 1 if a step did not pass."""
    options = _options(argv)
    if options.carry is not None:
        carry.carry(options.carry)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out, options.rehearse)
    earlier: Path | None = options.resume and options.resume / f"{run.prefix}results.jsonl"
    done = set()
    if earlier is not None:
        os.environ[attached.PASSED] = str(earlier.resolve())
        done = {
            (record["step"], record.get("task"))
            for record in checks.read(earlier)
            if record.get("outcome") in ("passed", "absent")
        }
    for path in options.out.glob(f"{run.prefix}*.*"):
        path.unlink()
    names = [name for name in STEPS if name in options.only and (name, None) not in done]
    names = ["machine", *(name for name in names if name != "machine")]
    if run.rehearsed:
        run.say(rehearsal.SAID)
    run.say(table(names))
    deadline = time.monotonic()
    for name in names:
        deadline += STEPS[name].seconds * (REHEARSED_TIMES if run.rehearsed else 1)
        waves = STEPS[name].waves(run.rehearsed)
        if name != "machine":
            waves = [[x for x in wave if (name, x.name) not in done] for wave in waves]
        run.step(name, waves, deadline, STEPS[name].seconds)
        try:
            page = summary.page(run.records, run.rehearsed)
        except Exception as error:  # a page that is wrong must not end the run
            page = f"no summary: {error!r}\n"
        (run.folder / f"{run.prefix}summary.txt").write_text(page)
        if name == "machine" and summary.outcomes(run.records)[name] in ("failed", "crashed"):
            break  # there is no accelerator
    print("\n" + page, end="")
    return int(not {*summary.outcomes(run.records).values()} <= {"passed", "absent"})


def table(names: Sequence[str]) -> str:
    """Return the seconds of each step, and the time at which it is cut off."""
    ends = itertools.accumulate(STEPS[name].seconds for name in names)
    rows = [
        (name, str(STEPS[name].seconds), str(end), STEPS[name].content)
        for name, end in zip(names, ends, strict=True)
    ]
    return timing.table(("step", "seconds", "ends by", "content"), rows)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_light",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/first_light"), metavar="FOLDER")
    add("--only", nargs="+", choices=STEPS, default=tuple(STEPS), metavar="STEP",
        help=f"steps to run, besides `machine`: {', '.join(STEPS)}")  # fmt: skip
    add("--resume", type=Path, metavar="FOLDER",
        help="earlier run, whose passed steps, cells and tests are left out")  # fmt: skip
    add("--rehearse", action="store_true", help=rehearsal.SAID)
    add("--carry", type=Path, metavar="FOLDER", help="unpack the peers into this folder, and exit")
    options = parser.parse_args(argv)
    if options.resume is not None and options.resume.resolve() == options.out.resolve():
        parser.error(f"--resume {options.resume} must not be the folder of --out")
    return options


if __name__ == "__main__":
    sys.exit(main())
