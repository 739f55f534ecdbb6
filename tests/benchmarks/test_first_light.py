"""First run on a GPU: deadlines, results that are written as they come, and its rehearsal."""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.first_light import __main__, attached, carry, checks, summary, tasks
from benchmarks.first_light.__main__ import STEPS, Step, main
from benchmarks.first_light.checks import Run, Task

ROOT = Path(__file__).parents[2]
FINE = "print('RESULT {\"x\": 7}')"
ENDINGS = {
    "cut off": "import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN)\n"
    "print('RESULT {\"x\": 5}', flush=True); time.sleep(600)",
    "crashed": "import os; os.kill(os.getpid(), 11)",
    "failed": "assert False, 'wrong by 3'",
    "passed": FINE,
    "absent": 'print(\'RESULT {"absent": "ncu not found"}\')',
}


def python(name, code):
    return Task(name, (sys.executable, "-c", code))


def test_tasks_end_at_the_deadline_and_say_how(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "GRACE", 1.0)
    run = Run(tmp_path, rehearsed=True)
    waves = [[python(name, code) for name, code in ENDINGS.items()], [python("late", FINE)]]
    begun = time.monotonic()
    run.step("profile", waves, begun + 7, 7)
    assert time.monotonic() - begun < 30
    run.step("linear", [[python("next", FINE)]], time.monotonic() + 60, 60)
    records = list(checks.read(tmp_path / "rehearsed_results.jsonl"))
    assert records == run.records and all(record["rehearsed"] for record in records)
    ended = {x["task"]: x["outcome"] for x in records if "task" in x and "outcome" in x}
    assert ended == {name: name for name in ENDINGS} | {"late": "not begun", "next": "passed"}
    assert summary.outcomes(records) == {"profile": "crashed", "linear": "passed"}
    assert {"step": "profile", "task": "cut off", "found": {"x": 5}, "rehearsed": True} in records
    page = summary.page(records, rehearsed=True)
    assert all(line.startswith(summary.MARK) for line in page.splitlines())
    for line in (
        "profile: cut off: cut off: still ran after",
        "profile: crashed: crashed: ended by SIGSEGV",
        "profile: failed: failed: exit status 1: AssertionError: wrong by 3",
        "profile: absent: absent: ncu not found",
    ):
        assert line in page, line


def test_results_are_written_while_the_task_runs(tmp_path):
    path = tmp_path / "results.jsonl"
    code = f"{FINE[:-1]}, flush=True)\nimport pathlib, time\n"
    code += f"while '7' not in pathlib.Path({str(path)!r}).read_text(): time.sleep(0.1)"
    path.touch()
    run = Run(tmp_path, rehearsed=False)
    run.step("linear", [[python("waits", code)]], time.monotonic() + 60, 60)
    assert summary.outcomes(run.records) == {"linear": "passed"}


def test_second_run_leaves_out_what_passed(tmp_path, monkeypatch):
    def run(codes, *arguments):
        wave = [python(name, code) for name, code in codes.items()]
        steps = {"machine": [[python("machine", FINE)]], "profile": [wave], "linear": [wave[:1]]}
        made = {name: Step(60, "", lambda _, w=waves: w) for name, waves in steps.items()}
        monkeypatch.setattr(__main__, "STEPS", made)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        status = main(["--rehearse", "--out", str(folder), *arguments])
        records = list(checks.read(folder / "rehearsed_results.jsonl"))
        return status, folder, [(x["step"], x["task"]) for x in records if "found" in x]

    monkeypatch.setenv(attached.PASSED, "")  # restored after the test
    machine = ("machine", "machine")
    status, first, found = run({"a": FINE, "b": "1 / 0"})
    assert status == 1 and found == [machine, ("profile", "a"), ("linear", "a")]
    status, _, found = run({"a": FINE, "b": FINE}, "--resume", str(first))
    assert status == 0 and found == [machine, ("profile", "b")]
    status, _, found = run({"a": FINE, "b": "1 / 0"}, "--only", "linear")
    assert status == 0 and found == [machine, ("linear", "a")]


def test_steps_take_at_most_nine_minutes_as_documented():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE)
    assert rows == [(name, str(step.seconds)) for name, step in STEPS.items()]
    assert sum(step.seconds for step in STEPS.values()) <= 530


TESTS = """
import pytest

def test_right(): pass
def test_wrong(): assert 3 == 5, "wrong by 2"
def test_absent(): pytest.skip("on Hopper alone")
def test_of_Ampere(): pass
"""


def test_each_kernel_test_is_reported_and_passed_ones_are_left_out(tmp_path):
    (tmp_path / "test_four.py").write_text(TESTS.replace("test_of", "test_a_of"))
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.first_light.attached"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_four.py"]

    def run(name):
        environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environment[attached.PASSED] = str(tmp_path / "first" / "rehearsed_results.jsonl")
        made = Task("tests", ("env", "-C", str(tmp_path), *command), environment)
        (tmp_path / name).mkdir()
        ran = Run(tmp_path / name, rehearsed=True)
        ran.step("attached", [[made]], time.monotonic() + 200, 200)
        found = [x["found"] for x in ran.records if "found" in x]
        return {x["test"].partition("::")[2]: x for x in found}, ran

    found, ran = run("first")
    names = ["test_right", "test_wrong", "test_absent", "test_a_of_Ampere"]
    assert list(found) == names
    assert [x["outcome"] for x in found.values()] == ["passed", "failed", "skipped", "passed"]
    assert "wrong by 2" in found["test_wrong"]["reason"]
    assert "on Hopper alone" in found["test_absent"]["reason"]
    page = summary.page(ran.records, rehearsed=True)
    assert "attached: 2 passed, 1 failed, 1 skipped" in page
    assert "test_wrong: AssertionError: wrong by 2" in page
    assert list(run("second")[0]) == ["test_wrong", "test_absent"]


def test_carried_peers_lack_only_what_is_replaced(tmp_path):
    for name, changes in carry.CHANGED.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("kept\n" + "\n".join(old for old, _ in changes))
    for name in ("libdew_flash_attn.so", "libdew_flash_attn3.so"):
        (tmp_path / "dew_flash_attn" / name).touch()
    carry.trim(tmp_path)
    assert [path.name for path in tmp_path.rglob("*.so")] == ["libdew_flash_attn3.so"]
    for name, changes in carry.CHANGED.items():
        text = (tmp_path / name).read_text()
        assert text.startswith("kept\n") and all(new in text for _, new in changes)
    with pytest.raises(SystemExit, match=r"must contain '_library, _two = _load.*' once"):
        carry.trim(tmp_path)


def test_times_of_kernels_are_summed_by_operation():
    def event(operation, name, ns):
        stats = [("hlo_op", operation)] if operation else []
        return SimpleNamespace(stats=stats, name=name, duration_ns=ns)

    stream = [event("fusion.1", "loop_add", 3e6), event("fusion.1", "loop_add", 5e6)]
    stream += [event("dot.2", "nvjet_hsh_128", 7e6), event("custom-call.3", "kernel", 11e6)]
    stream += [event("", "MemcpyD2D", 13e6)]
    lines = [SimpleNamespace(name="Stream #17(Compute)", events=stream)]
    lines += [SimpleNamespace(name="XLA Ops", events=stream)]  # the same kernels again
    planes = [SimpleNamespace(name="/device:GPU:0", lines=lines)]
    planes += [SimpleNamespace(name="/host:CPU", lines=lines)]
    places = {"fusion.1": "jit(step)/while/body/closed_call/block/add"}
    places["custom-call.3"] = "jit(step)/block/attention/pallas_call"
    rows = tasks.kernels(SimpleNamespace(planes=planes), places, steps=2)
    found = {row.pop("kernel"): tuple(row.values()) for row in rows}
    assert found == {
        "loop_add": ("other", 4.0, 1.0, "block/add"),
        "nvjet_hsh_128": ("products", 3.5, 0.5, ""),
        "kernel": ("attention", 5.5, 0.5, places["custom-call.3"]),
        "MemcpyD2D": ("other", 6.5, 0.5, ""),
    }


def test_counters_are_read_from_each_launch():
    names = list(tasks.COUNTERS.values())
    rows = [["ID", "Kernel Name", *names[:2]], ["", "", "ns", "%"], ["0", "fwd", "1,234", "56.5"]]
    rows += [["1", "copy", "7", "n/a"]]
    lines = ["==PROF== connected", *(",".join(f'"{x}"' for x in row) for row in rows)]
    rest = dict.fromkeys(list(tasks.COUNTERS)[2:])
    assert tasks.launches(lines) == [
        {"kernel": "fwd", "ns": 1234.0, "tensor": 56.5} | rest,
        {"kernel": "copy", "ns": 7.0, "tensor": None} | rest,
    ]
    assert tasks.launches(["==ERROR== no permission"]) == []


def test_product_in_tiles_equals_product():
    x, weights = jax.random.normal(jax.random.key(0), (2, 37, 37), jnp.float32)
    wanted = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    for rows in (5, 37):
        found = np.asarray(tasks.in_tiles(x[:rows], weights, 7))
        np.testing.assert_allclose(found, wanted[:rows], atol=1e-4)


def test_failing_summary_does_not_end_the_run(tmp_path, monkeypatch):
    steps = {n: Step(60, "", lambda _: [[python("a", FINE)]]) for n in ("machine", "linear")}
    monkeypatch.setattr(__main__, "STEPS", steps)
    monkeypatch.setattr(summary, "page", lambda *_: 1 / 0)
    assert main(["--rehearse", "--out", str(tmp_path)]) == 0
    assert "ZeroDivisionError" in (tmp_path / "rehearsed_summary.txt").read_text()


@pytest.mark.slow
@pytest.mark.long_except("products", "profile", "goals")
@pytest.mark.parametrize("step", [name for name in STEPS if name != "machine"])
def test_step_can_be_rehearsed(step, tmp_path):
    assert main(["--rehearse", "--only", step, "--out", str(tmp_path)]) == 0
    records = list(checks.read(tmp_path / "rehearsed_results.jsonl"))
    assert [x for x in records if x["step"] == step and "found" in x]
    assert summary.outcomes(records)[step] in ("passed", "absent")
    assert len(list(tmp_path.iterdir())) == 3
