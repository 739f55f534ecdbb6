"""A plugin of pytest that records which test runs which lines of the package, and for how long.

`python -m tests.mutants --map` runs the default tests with it. Processes of xdist each write their
own files; `python -m tests.mutants` reads them all.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/mutants"


class Recorder:
    """The lines and seconds of each test of one process."""

    def __init__(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = {}
        self.coverage = coverage.Coverage(
            data_file=str(FOLDER / f"lines.{os.getpid()}"),
            config_file=False,
            include=[f"{ROOT}/transformer_jax/*", f"{ROOT}/kernels/*", f"{ROOT}/train.py"],
            messages=False,
        )
        self.coverage.set_option(
            "run:disable_warnings", ["no-data-collected", "module-not-measured"]
        )
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.coverage.switch_context(item.nodeid)
        begin = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = round(time.perf_counter() - begin, 3)
        return result

    def pytest_unconfigure(self):
        self.coverage.stop()
        self.coverage.save()
        (FOLDER / f"seconds.{os.getpid()}.json").write_text(json.dumps(self.seconds))


def pytest_configure(config: pytest.Config) -> None:
    """Record in each process that runs tests: not in the one that only hands them out."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder())
