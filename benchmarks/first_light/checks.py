"""Checks in separate processes with a time limit, and records of how each process ended.

A hang or a crash therefore affects only one check. Each step has its own time limit. Checks that do
not fit into it are reported as not begun.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

ROOT = Path(__file__).resolve().parents[2]
MARK = "RESULT "  # prefix of a line of JSON in the output of a check
TAIL = 4000  # number of characters of output in a record
GRACE = 3.0  # seconds for a process to report where it hangs

Outcome = Literal["passed", "failed", "crashed", "hung", "cut short", "not begun", "absent"]
OUTCOMES = get_args(Outcome)
Record = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """Description of how a process ended."""

    code: int
    output: str
    seconds: float
    timed_out: bool = False

    @property
    def found(self) -> list[Any]:
        """Return the reports of the process, in order."""
        lines = [line for line in self.output.splitlines() if line.startswith(MARK)]
        reports = []
        for line in lines:
            with contextlib.suppress(ValueError):  # a line may be incomplete
                reports.append(json.loads(line.removeprefix(MARK)))
        return reports


@dataclass(frozen=True)
class Verdict:
    """Verdict on a process that ended within its limit."""

    outcome: Outcome
    reason: str | None = None


def by_status(ended: Ended) -> Verdict:
    """Judge a process by its exit status and the report of `main_of`."""
    said = [report for report in ended.found if isinstance(report, dict) and "outcome" in report]
    if said:
        return Verdict(said[-1]["outcome"], said[-1]["reason"])
    if ended.code == 0:
        return Verdict("passed")
    if ended.code < 0:
        return Verdict("crashed", f"ended by {signal.Signals(-ended.code).name}")
    return Verdict("failed", f"exit status {ended.code}: {last_line(ended.output)}")


def last_line(text: str) -> str:
    """Return the last nonempty line, truncated."""
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "")


@dataclass(frozen=True)
class Check:
    """Check that consists of a command, its time limit, and its judge."""

    name: str
    command: tuple[str, ...]
    seconds: float
    judge: Callable[[Ended], Verdict] = by_status
    absent: str | None = None
    """Reason why the check cannot start, for example because a tool is not installed."""
    collect: Callable[[Ended], list[Any]] = lambda ended: ended.found
    """Return the results that a check wrote, even if it was stopped early."""


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of the benchmarks in a separate process."""
    return sys.executable, "-m", f"benchmarks.{module}", *arguments


def report(found: Any) -> None:
    """Print the result of a check, for the parent process."""
    print(MARK + json.dumps(found), flush=True)


def main_of(check: Callable[[], Any]) -> None:
    """Run a check in its own process and report how it ended."""
    try:
        check()
    except AssertionError as error:
        report({"outcome": "failed", "reason": brief(error)})
        raise
    except Unavailable as reason:
        report({"outcome": "absent", "reason": str(reason)})
    except Exception as error:
        report({"outcome": "crashed", "reason": brief(error)})
        raise


class Unavailable(Exception):
    """Reason why a check cannot run here."""


def brief(error: BaseException) -> str:
    """Return a description of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def run(command: tuple[str, ...], seconds: float) -> Ended:
    """Run a command for at most `seconds` seconds, then end it and its child processes."""
    settings = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(os.environ) | settings
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True
        )
        timed_out = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            _signal(process, signal.SIGABRT)  # Python then prints a stack trace
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            _signal(process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # in case the driver blocks it
                process.wait(GRACE)
        taken = time.monotonic() - start
        log.seek(0)
        code = process.returncode
        return Ended(-9 if code is None else code, log.read(), taken, timed_out)


def _signal(process: subprocess.Popen, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, which)


@dataclass
class Step:
    """Time limit and file of a step. Each record is written immediately."""

    name: str
    minutes: float
    path: Path
    rehearsed: bool = False
    records: list[Record] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Return the remaining time in seconds."""
        return 60 * self.minutes - (time.monotonic() - self.begun)

    def open(self, machine: Mapping[str, Any]) -> None:
        """Begin the file with a description of the machine."""
        head = {"step": self.name, "rehearsed": self.rehearsed, "machine": dict(machine)}
        self.path.write_text(json.dumps(head) + "\n")

    def run(self, *checks: Check, jobs: int = 1) -> list[Record]:
        """Run checks, `jobs` at a time, and return their records in order."""
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(self._one, checks))

    def _one(self, check: Check) -> Record:
        limit = min(check.seconds, self.left())
        if check.absent is not None:
            return self._write(check, limit, Verdict("absent", check.absent))
        if limit < 1:
            return self._write(check, limit, Verdict("not begun", "the minutes are over"))
        say(f"{self.name}: {check.name} ...")
        ended = run(check.command, limit)
        if not ended.timed_out:
            verdict = check.judge(ended)
        elif limit < check.seconds:
            verdict = Verdict("cut short", f"the step's minutes were over after {limit:.0f} s")
        else:
            verdict = Verdict("hung", f"still ran after {limit:.0f} s")
        return self._write(check, limit, verdict, ended)

    def _write(
        self, check: Check, limit: float, verdict: Verdict, ended: Ended | None = None
    ) -> Record:
        record = {
            "check": check.name,
            "outcome": verdict.outcome,
            "reason": verdict.reason,
            "rehearsed": self.rehearsed,
            "seconds": None if ended is None else round(ended.seconds, 2),
            "limit_s": round(limit, 1),
            "found": [] if ended is None else check.collect(ended),
        }
        if ended is not None and verdict.outcome != "passed":
            record["output"] = ended.output[-TAIL:]
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        say(line(self.name, record))
        return record


def say(text: str) -> None:
    """Print a line atomically, because several checks may end at the same time."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def line(step: str, record: Mapping[str, Any]) -> str:
    """Format a record as one line."""
    seconds = "" if record["seconds"] is None else f", {record['seconds']:.0f} s"
    reason = "" if record["reason"] is None else f": {record['reason']}"
    mark = "(rehearsed) " if record["rehearsed"] else ""
    return f"{mark}{step}: {record['check']}: {record['outcome']}{seconds}{reason}"
