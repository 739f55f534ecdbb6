"""Tasks in separate processes with a deadline, whose results are written as they come.

A hang or a crash therefore affects only one task, and a run that is stopped keeps its results.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

ROOT = Path(__file__).resolve().parents[2]
MARK = "RESULT "  # prefix of a line of JSON in the output of a task
GRACE = 3.0  # seconds for a process to report where it hangs
LOG_BYTES = 12 * 2**20  # less than the largest file that a remote machine may return

Outcome = Literal["passed", "absent", "not begun", "cut off", "failed", "crashed"]
OUTCOMES = get_args(Outcome)
"""From the best to the worst."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Command whose output contains results, with further environment variables."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def report(found: Any) -> None:
    """Print a result of a task, for the parent process."""
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


@dataclass
class Run:
    """Files of a run: results as JSON lines, and the output of all processes."""

    folder: Path
    rehearsed: bool
    records: list[Record] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    written: int = 0

    @property
    def prefix(self) -> str:
        return "rehearsed_" if self.rehearsed else ""

    def add(self, record: Record) -> None:
        """Write a record to `results.jsonl`."""
        record |= {"rehearsed": True} if self.rehearsed else {}
        with self.lock:
            self.records.append(record)
            with (self.folder / f"{self.prefix}results.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")

    def say(self, text: str) -> None:
        """Print a line and write it to `log.txt`."""
        line = f"{'(rehearsed) ' if self.rehearsed else ''}{text.rstrip()}\n"
        with self.lock:
            self.written += len(line)
            if self.written < LOG_BYTES:
                with (self.folder / f"{self.prefix}log.txt").open("a") as file:
                    file.write(line)
            if MARK not in line:
                sys.stdout.write(line)
                sys.stdout.flush()

    def step(self, name: str, waves: list[list[Task]], deadline: float, budget: float) -> None:
        """Run the tasks of a wave at the same time, and wave after wave until `deadline`.

        The deadline is on the clock of `time.monotonic`. A task that still runs then is cut off.
        """
        begun, outcomes = time.monotonic(), []
        for tasks in filter(None, waves):
            with ThreadPoolExecutor(len(tasks)) as pool:
                outcomes += pool.map(lambda task: self._task(name, task, deadline), tasks)
        worst = max(outcomes, key=OUTCOMES.index, default="passed")
        seconds = round(time.monotonic() - begun, 1)
        self.add({"step": name, "outcome": worst, "seconds": seconds, "budget_s": budget})
        self.say(f"{name}: {worst}, {seconds:.0f} s of {budget:.0f}")

    def _task(self, step: str, task: Task, deadline: float) -> Outcome:
        seconds = deadline - time.monotonic() - GRACE
        outcome: Outcome
        if seconds < 1:
            outcome, reason, taken = "not begun", "no time is left", 0.0
        else:
            outcome, reason, taken = self._process(step, task, seconds)
        record = {"step": step, "task": task.name, "outcome": outcome, "reason": reason}
        self.add(record | {"seconds": round(taken, 1)})
        self.say(f"{step}: {task.name}: {outcome}, {taken:.0f} s{reason and f': {reason}'}")
        return outcome

    def _process(self, step: str, task: Task, seconds: float) -> tuple[Outcome, str, float]:
        settings = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        settings |= {"JAX_PLATFORMS": "cpu" if self.rehearsed else "cuda"}
        settings |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if self.rehearsed else {}
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, **settings}
        begun, last, absent = time.monotonic(), "", ""
        process = subprocess.Popen(
            task.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            errors="replace", env=environment | {**task.environment}, start_new_session=True,
        )  # fmt: skip

        def read() -> None:
            nonlocal last, absent
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    if line.isspace():
                        continue
                    self.say(f"{task.name} | {line}")
                    if not line.startswith(MARK):
                        last = " ".join(line.split())
                        continue
                    with contextlib.suppress(ValueError):  # a line may be incomplete
                        found = json.loads(line.removeprefix(MARK))
                        absent = found.get("absent", "") or absent
                        self.add({"step": step, "task": task.name, "found": found})

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        cut = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            cut = True
            _signal(process, signal.SIGABRT)  # Python then prints a stack trace
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE / 2)
        finally:
            _signal(process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # in case the driver blocks it
                process.wait(GRACE / 2)
            reader.join(GRACE / 2)
        taken, code = time.monotonic() - begun, process.returncode
        if cut:
            return "cut off", f"still ran after {seconds:.0f} s", taken
        if absent:
            return "absent", absent, taken
        if code == 0:
            return "passed", "", taken
        if code is None or code < 0:
            return "crashed", f"ended by {signal.Signals(-(code or -9)).name}", taken
        return "failed", f"exit status {code}: {last[:200]}", taken


def _signal(process: subprocess.Popen, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, which)


def read(path: Path) -> Iterator[Record]:
    """Yield the records in `path`, whose last line may be incomplete."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
