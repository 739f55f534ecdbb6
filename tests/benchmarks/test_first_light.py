"""First run on a GPU: reports of checks that hang, crash or fail, and its rehearsal."""

import json
import sys

import numpy as np
import pytest

from benchmarks.first_light import (
    __main__,
    checks,
    machine,
    rehearsal,
    smoke,
    smoke_calls,
    summary,
)
from benchmarks.first_light.checks import Check


def program(name, code, seconds=60.0, **settings):
    return Check(name, (sys.executable, "-c", code), seconds, **settings)


FOUR = (
    program("one that hangs", "import time; print('begun', flush=True); time.sleep(600)", 2.0),
    program("one that crashes", "import os; os.kill(os.getpid(), 11)"),
    program("one that fails", "assert False, 'wrong by 3'"),
    program("one that passes", "print('RESULT 7')"),
    program("one without its tool", "", absent="ncu not found"),
)


@pytest.fixture
def four(monkeypatch):
    """Replace a step by checks that end in every way, without inspecting the machine."""
    known = dict.fromkeys(machine.SHOWN, "known")
    monkeypatch.setattr(__main__, "look", lambda options: known)
    monkeypatch.setitem(__main__.STEPS, "smoke", lambda step: step.run(*FOUR))


@pytest.mark.slow
def test_failed_smoke_check_is_reported_and_others_still_run(four, tmp_path):
    status = __main__.main(["--rehearse", "--step", "smoke", "--out", str(tmp_path)])
    assert status == 1
    head, *records = map(json.loads, (tmp_path / "rehearsed_smoke.jsonl").read_text().splitlines())
    assert head["rehearsed"] and all(record["rehearsed"] for record in records)
    assert [record["outcome"] for record in records] == [
        "hung", "crashed", "failed", "passed", "absent",
    ]  # fmt: skip
    assert records[0]["seconds"] < 30 and "begun" in records[0]["output"]
    assert records[3]["found"] == [7]
    page = (tmp_path / "rehearsed_summary.txt").read_text()
    assert page.splitlines()[0] == f"{summary.MARK} {rehearsal.SAID}"
    assert all(line.startswith(summary.MARK) for line in page.splitlines())
    for line in (
        "smoke: 1 passed, 1 failed, 1 crashed, 1 hung, 1 absent",
        "hung: one that hangs: still ran after 2 s",
        "crashed: one that crashes: ended by SIGSEGV",
        "failed: one that fails: exit status 1: AssertionError: wrong by 3",
        "absent: one without its tool: ncu not found",
        "1. smoke, one that hangs, hung",
        "3. smoke, one that fails, failed",
    ):
        assert line in page, line
    assert "one that passes" not in page


@pytest.mark.slow
@pytest.mark.long_except("decode, a cache of int8", "decode, a paged cache")
@pytest.mark.parametrize("name", smoke_calls.CHECKS)
@pytest.mark.usefixtures("quick_compilation")
def test_smoke_checks_pass_in_the_interpreter(name):
    with rehearsal.kernels(True):
        found = smoke_calls.CHECKS[name](smoke_calls.Where(rehearsed=True))
    assert found and all(0 <= share <= 1 for share in found.values())


@pytest.mark.slow_except("out")
@pytest.mark.parametrize("name", ["out", "dquery"])
def test_smoke_check_fails_on_wrong_result(name):
    expected = {"out": np.ones((2, 3)), "dquery": np.ones((2, 3))}
    limit = {"out": 2**-7, "dquery": 2**-6}[name]
    assert smoke_calls.shares({name: expected[name] + 0.9 * limit}, expected)[
        name
    ] == pytest.approx(0.9)
    with pytest.raises(AssertionError, match=rf"'{name}': '1.1'"):
        smoke_calls.shares({name: expected[name] + 1.1 * limit}, expected)
    with pytest.raises(AssertionError, match="not finite"):
        smoke_calls.shares({name: expected[name] * np.nan}, expected)


@pytest.mark.slow
def test_listed_device_tests_exist():
    listing = (sys.executable, "-m", "pytest", "--collect-only", "-m", "")
    ended = checks.run((*listing, "tests/kernels/test_attached.py"), 200)
    there = {line.strip() for line in ended.output.splitlines()}
    assert len(smoke.ATTACHED) == 15
    assert {*smoke.ATTACHED} <= there


@pytest.mark.long
@pytest.mark.parametrize("step", ["speed", "why", "tune"])
def test_device_check_step_can_be_rehearsed(step, tmp_path):
    status = __main__.main(["--rehearse", "--step", step, "--out", str(tmp_path)])
    lines = (tmp_path / f"rehearsed_{step}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[1:]]
    assert status == 0 and records
    assert {record["outcome"] for record in records} <= {"passed", "absent"}
    assert summary.MARK in (tmp_path / "rehearsed_summary.txt").read_text()
