"""A first run on a GPU names what hangs, crashes and fails, and is rehearsed here."""

import json
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import specs
from benchmarks.first_light import (
    __main__,
    ablations,
    checks,
    goals_with_rows,
    machine,
    rehearsal,
    smoke,
    smoke_calls,
    summary,
    tune,
    why,
)
from benchmarks.first_light.checks import Check, Ended, Step
from transformer_jax.kernels import chips
from transformer_jax.kernels.contract import Blocks, TileLists


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
    """A step of checks that end in every way, on a machine that is not looked at."""
    known = dict.fromkeys(machine.SHOWN, "known")
    monkeypatch.setattr(__main__, "look", lambda options: known)
    monkeypatch.setitem(__main__.STEPS, "smoke", lambda step: step.run(*FOUR))


def test_a_check_that_hangs_crashes_or_fails_costs_only_itself_and_is_named(four, tmp_path):
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
    for said in (
        "smoke: 1 passed, 1 failed, 1 crashed, 1 hung, 1 absent",
        "hung: one that hangs: still ran after 2 s",
        "crashed: one that crashes: ended by SIGSEGV",
        "failed: one that fails: exit status 1: AssertionError: wrong by 3",
        "absent: one without its tool: ncu not found",
        "1. smoke, one that hangs, hung",
        "3. smoke, one that fails, failed",
    ):
        assert said in page, said
    assert "one that passes" not in page


def test_a_hang_says_where_and_takes_what_it_began_with_it(tmp_path):
    child = tmp_path / "child"
    code = f"""
import subprocess, sys, time
begun = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(child)!r}, "w").write(str(begun.pid))
def waits_for_a_barrier():
    time.sleep(600)
waits_for_a_barrier()
"""
    ended = checks.run((sys.executable, "-c", code), 2.0)
    assert ended.timed_out and "waits_for_a_barrier" in ended.output
    end = time.monotonic() + 20  # a loaded machine takes a while to end what was killed
    while runs(child.read_text()):
        assert time.monotonic() < end, "what it began still runs"
        time.sleep(0.05)


def runs(process):
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_does_not_fit_in_a_steps_minutes_is_named(tmp_path):
    step = Step("smoke", 2 / 60, tmp_path / "smoke.jsonl")
    step.open({})
    found = step.run(program("long", "import time; time.sleep(600)"), program("next", ""))
    assert [record["outcome"] for record in found] == ["cut short", "not begun"]


def test_several_checks_run_at_once_and_keep_their_order(tmp_path):
    step = Step("smoke", 1.0, tmp_path / "smoke.jsonl")
    step.open({})
    code = "import time; time.sleep({}); print('RESULT', {})"
    found = step.run(*(program(str(i), code.format(1.0 - 0.3 * i, i)) for i in range(3)), jobs=3)
    assert [record["found"] for record in found] == [[0], [1], [2]]
    assert len((tmp_path / "smoke.jsonl").read_text().splitlines()) == 4


def test_nothing_is_measured_on_a_processor_but_by_rehearsing(monkeypatch, tmp_path):
    found = program("machine", 'print(\'RESULT {"platform": "cpu"}\')')
    monkeypatch.setattr(machine, "check", lambda flags: found)
    monkeypatch.setattr(__main__, "STEPS", {})
    with pytest.raises(SystemExit, match="no accelerator"):
        __main__.main(["--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_importing_the_command_starts_no_backend():
    code = "import benchmarks.first_light.__main__, jax._src.xla_bridge as b; print(b._backends)"
    ended = checks.run((sys.executable, "-c", code), 120)
    assert ended.code == 0 and checks.last_line(ended.output) == "{}"


SLOW = (
    "causal 704, forw",
    "causal 704, grad",
    "single",
    "65",
    "two-sided",
    "ALiBi",
    "softcap",
    "own",
)


@pytest.mark.slow_cases(*SLOW)
@pytest.mark.parametrize("name", smoke_calls.CHECKS)
@pytest.mark.usefixtures("quick_compilation")
def test_smoke_checks_pass_in_the_interpreter(name):
    with rehearsal.kernels(True):
        found = smoke_calls.CHECKS[name](smoke_calls.Where(rehearsed=True))
    assert found and all(0 <= share <= 1 for share in found.values())


@pytest.mark.parametrize("name", ["out", "dquery"])
def test_a_smoke_check_fails_where_a_result_is_wrong(name):
    expected = {"out": np.ones((2, 3)), "dquery": np.ones((2, 3))}
    limit = {"out": 2**-7, "dquery": 2**-6}[name]
    assert smoke_calls.shares({name: expected[name] + 0.9 * limit}, expected)[
        name
    ] == pytest.approx(0.9)
    with pytest.raises(AssertionError, match=rf"'{name}': '1.1'"):
        smoke_calls.shares({name: expected[name] + 1.1 * limit}, expected)
    with pytest.raises(AssertionError, match="not finite"):
        smoke_calls.shares({name: expected[name] * np.nan}, expected)


def test_a_smoke_check_fails_where_the_kernels_refuse_it():
    with pytest.raises(AssertionError, match="'pallas' refuses: needs a TPU"):
        smoke_calls.CHECKS["one tile, forward"](smoke_calls.Where())


def test_attached_tests_that_are_named_exist():
    listing = (sys.executable, "-m", "pytest", "--collect-only", "-m", "")
    ended = checks.run((*listing, "tests/kernels/test_attached.py"), 200)
    there = {line.strip() for line in ended.output.splitlines()}
    assert len(smoke.ATTACHED) == 15
    assert {*smoke.ATTACHED} <= there


@pytest.mark.parametrize(
    ("output", "code", "outcome"),
    [
        ("..\n2 passed in 0.1s\n", 0, "passed"),
        ("SKIPPED [1] a.py:3: the kernels: no GPU\n1 skipped in 0.1s\n", 0, "absent"),
        ("FAILED a.py\n1 failed, 1 passed in 0.1s\n", 1, "failed"),
        ("Fatal Python error: Aborted\n", -6, "crashed"),
    ],
)
def test_a_skipped_test_has_not_passed(output, code, outcome):
    assert smoke.judge_pytest(Ended(code, output, 1.0)).outcome == outcome


@pytest.mark.parametrize(
    ("output", "code", "outcome"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0, "passed"),
        ("========= ERROR SUMMARY: 12 errors\n", 9, "failed"),
        ("========= ERROR SUMMARY: 12 errors\n", 0, "failed"),
        ("========= ERROR SUMMARY: 0 errors\n", 1, "failed"),
        ("Device not supported\n", 0, "crashed"),
    ],
)
def test_a_sanitizer_that_says_nothing_has_not_looked(output, code, outcome):
    assert smoke.judge_sanitizer(Ended(code, output, 1.0)).outcome == outcome


COUNTED = f"""\
==PROF== Connected to process 7
"ID","Kernel Name","{'","'.join(why.METRICS.values())}"
"","","ns","%","%","%","%","%","register/thread"
"0","_forward","1,234,567","61.5","40.0","38.0","55.0","9.5","168"
"1","loop_add_fusion","2,100","0","0","n/a","12.0","70.0","16"
"""


def test_counters_are_read_from_the_profilers_table():
    forward, other = why.launches(COUNTED.splitlines())
    assert forward.kernel == "_forward"
    assert (forward.counters["ns"], forward.counters["tensor"]) == (1234567.0, 61.5)
    assert why.busiest(forward.counters) == ("tensor cores", 61.5)
    assert other.counters["special"] is None
    assert why.busiest(other.counters) == ("device memory", 70.0)
    assert why.launches(["==ERROR== ", '"ID"']) == []


def test_rows_of_tile_sizes_are_read_and_entered(monkeypatch):
    text = """# forward, causal S 8192
#   Blocks(q=128, k=128, stages=2, slack=0.0): 1.000 ms, 1.00x the present
    ('NVIDIA H200', 'forward', 128, 128, 2): Blocks(128, 128, 2, slack=8.0),  # causal S 8192
    ('NVIDIA H200', 'dq', 128, 128, 2): Blocks(128, 64, 3),  # causal S 8192: 2.1 ms
"""
    rows = tune.rows(text)
    monkeypatch.setattr(chips, "MEASURED", {})
    goals_with_rows.add_rows(json.loads(json.dumps(rows)))
    assert chips.MEASURED == {
        ("NVIDIA H200", "forward", 128, 128, 2): Blocks(128, 128, 2, 8.0),
        ("NVIDIA H200", "dq", 128, 128, 2): Blocks(128, 64, 3),
    }


def test_parts_are_left_out_only_within_their_context():
    repair = ablations.importlib.import_module("transformer_jax.kernels.hopper.repair")
    hopper = ablations.importlib.import_module("transformer_jax.kernels.hopper")
    before = repair._again, hopper.prepare
    with ablations.no_second_kernels():
        assert repair._again(None, None, None, {}, (), (1, 2)) == (1, 2)
    with ablations.rows_as_they_are():
        seen = jnp.array([[[1, 2, 3]]], jnp.int32)
        lists = TileLists(jnp.zeros((1, 1, 3, 3), jnp.int32), seen, seen)
        assert hopper.prepare(lists).rows.tolist() == [[[0, 1, 2]]]
    assert (repair._again, hopper.prepare) == before
    assert hopper.prepare(lists).rows.tolist() == [[[2, 1, 0]]]
    with pytest.raises(checks.Unavailable, match=r"kernels\.gradient has no such_part"):
        ablations.replaced("kernels.gradient", "such_part", lambda x: x)


def test_a_chain_of_calls_needs_each_of_them():
    def call(query, key, value, cotangent):
        return (query + key,)

    one = jnp.ones((1, 2, 1, 3))
    query, *_ = ablations.chained(call, 5)(one, one, one, one)
    assert query[0, 0, 0, 0] == 6 and (query.reshape(-1)[1:] == 1).all()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_ablations_time_every_variant_that_runs():
    case = rehearsal.shrunk(next(c for c in specs.ATTENTION if c.name == why.CASE))
    with rehearsal.kernels(True):
        found = ablations.measure(case, "forward", 0.0, 2)
    parts = {*ablations.VARIANTS}
    assert found["gain"].keys() == parts | {name + ablations.CHAINED for name in parts}
    assert found["differs"] == {} == found["absent"]


def record(check, found, outcome="passed", reason=None):
    return dict(check=check, outcome=outcome, reason=reason, found=found, rehearsed=False)


def test_the_page_says_what_to_change_first():
    names = [name + chained for name in ("as it is", "slack 8") for chained in ("", ", chained")]
    cell = dict(
        case="a", direction="forward", ms=dict(zip(names, (2.0, 1.0, 2.0, 0.8), strict=True)),
        gain=dict(zip(names, (1.0, 1.0, 1.0, 1.25), strict=True)), differs={}, absent={},
    )  # fmt: skip
    measured = dict(
        case="alibi-16k-h128-s4096", direction="forward+backward", flops=6e9, absent={},
        timings={"ours": {"median_s": 2.0}, "tokamax": {"median_s": 3.0}},
        speedup_of_ours={"tokamax": 1.5}, difference={"ours": 0.0, "tokamax": 0.01},
    )  # fmt: skip
    rates = {"before": {"matmul_flops_per_s": 1e10}}
    results = dict(cases=[measured], failed={}, limits=rates)
    launch = dict(
        kernel="_forward", **dict(zip(why.METRICS, (9e5, 61, 40, 38, 55, 9, 168), strict=True))
    )
    records = {
        "smoke": [record("one tile", [], "hung", "still ran after 60 s")],
        "speed": [
            record("goals: alibi-16k-h128-s4096", [results]),
            record("goals: bias-16k-h128-s2048", [], "hung", "still ran after 100 s"),
            record("parts of a", [cell]),
        ],
        "why": [record("forward", [launch])],
    }
    assert summary.change_first(records) == [
        "smoke, one tile, hung: still ran after 60 s",
        "speed, goals: bias-16k-h128-s2048, hung: still ran after 100 s",
        "slack 8: 1.25x as fast (a forward, chained)",
        "a synchronised call takes 2.00 times as long as a chained one (a forward)",
        "alibi-16k-h128-s4096 forward+backward, ours: 1.50 of tokamax, wanted 2.00 (goals)",
        "forward: nothing is busy: it waits (tensor cores 61 %)",
    ]
    page = summary.page({"device": "NVIDIA H200"}, records, rehearsed=False)
    assert "REHEARSED" not in page and "device: NVIDIA H200" in page
    assert "missed" in page and "1.00x 1.25x" in page and "900.0" in page
    [line] = [line for line in page.splitlines() if line.startswith("bias-16k-h128-s2048")]
    assert line.endswith("hung: still ran after 100 s")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("step", ["speed", "why", "tune"])
def test_a_step_is_rehearsed(step, tmp_path):
    status = __main__.main(["--rehearse", "--step", step, "--out", str(tmp_path)])
    lines = (tmp_path / f"rehearsed_{step}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[1:]]
    assert status == 0 and records
    assert {record["outcome"] for record in records} <= {"passed", "absent"}
    assert summary.MARK in (tmp_path / "rehearsed_summary.txt").read_text()


def test_every_name_of_a_smoke_check_has_a_computation():
    assert tuple(smoke_calls.CHECKS) == smoke.NAMES
    assert {*smoke.SANITIZED} <= {*smoke.NAMES}


def test_limits_are_measured_by_the_first_process_alone(tmp_path):
    asked = []

    def measure(dtype, clock):
        asked.append(dtype)
        return {"dtype": dtype, "matmul_flops_per_s": 7.0}

    for _ in range(2):  # as in two processes
        limits = goals_with_rows.kept(tmp_path / "limits.json", measure)
        assert limits("bfloat16", None) == limits("bfloat16", None)
    assert asked == ["bfloat16"]
