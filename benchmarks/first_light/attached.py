"""Pytest plugin that reports each test as soon as it ends, and rehearses on a CPU.

It runs the kernels for other NVIDIA GPUs last, and leaves out the tests that passed in an earlier
run, if the variable `FIRST_LIGHT_PASSED` contains the path of its results.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from benchmarks.first_light import checks

REHEARSED, PASSED = "FIRST_LIGHT_REHEARSED", "FIRST_LIGHT_PASSED"
_config: pytest.Config | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _config
    _config = config
    if os.environ.get(REHEARSED):
        from benchmarks.first_light import rehearsal  # imports JAX

        stack = contextlib.ExitStack()
        stack.enter_context(rehearsal.kernels(True))
        config.add_cleanup(stack.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    results = checks.read(Path(os.environ.get(PASSED, os.devnull)))
    found = [record.get("found") for record in results]
    passed = {x["test"] for x in found if isinstance(x, dict) and x.get("outcome") == "passed"}
    again = [item for item in items if item.nodeid in passed]
    config.hook.pytest_deselected(items=again)
    items[:] = sorted((x for x in items if x not in again), key=lambda x: "Ampere" in x.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    assert _config is not None
    terminal = _config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or (report.when != "call" and report.passed):
        return  # a worker of xdist has no terminal
    lines = report.longreprtext.splitlines()
    errors = [x.removeprefix("E").strip() for x in lines if x.startswith("E ")] or lines[-1:]
    if isinstance(report.longrepr, tuple):  # of a skipped test
        errors = [report.longrepr[-1]]
    found = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
    found |= {"reason": " ".join(errors)[:300]} if errors and not report.passed else {}
    terminal.write(f"\n{checks.MARK}{json.dumps(found)}\n")
