"""Attention and training with two or four processes on loopback.

They have the same numbers as one process, one folder and a common end.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.compilation import quick_environment
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax.cli.run_flags import parse
from transformer_jax.config import ConfigError
from transformer_jax.loading import load_run

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--d-model 16 --num-heads 2 --num-layers 1 --max-len 8 --batch-size 8 --eval-every 4 "
    "--checkpoint-every 4 --log-every 2 --sample-tokens 5 --warmup-steps 2"
)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return file


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("localhost", 0))
        return own.getsockname()[1]


def started(devices: int, *argv: str) -> subprocess.Popen:
    mesh = () if "--mesh" in argv else ("--mesh", "data=2,fsdp=2", "--dropout", "0.1")
    return python(devices, "train.py", *FLAGS.split(), *mesh, *argv)


def python(devices: int, *argv: str) -> subprocess.Popen:
    environment = quick_environment(f"--xla_force_host_platform_device_count={devices}")
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, *argv]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, **pipes)


def together(*argv: str, count: int = 2) -> list[subprocess.Popen]:
    """Start processes that have four devices together."""
    where = "--coordinator", f"localhost:{free_port()}", "--processes", str(count), "--process"
    return [started(4 // count, *argv, *where, str(index)) for index in range(count)]


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    told = [process.communicate(timeout=400) for process in processes]
    return [(p.returncode, *output) for p, output in zip(processes, told, strict=True)]


def measured(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_process_resumes_run_started_by_two(text, tmp_path):
    data = ["--data", str(text), "--steps", "8"]
    (first, second) = ended(together(*data, "--out", str(tmp_path / "two")))
    assert first[0] == 0, first[2]
    assert second[0] == 0, second[2]
    gloo = re.compile(r"\[Gloo\]|.*peer ranks")  # its threads mix their output lines
    own = [line for line in second[1].splitlines() if line.strip() and not gloo.match(line)]
    assert "held-out loss" in first[1] and not own
    (alone,) = ended([started(4, *data, "--out", str(tmp_path / "one"))])
    assert alone[0] == 0, alone[2]
    two, one = measured(tmp_path / "two"), measured(tmp_path / "one")
    for field in ("loss", "val_loss", "grad_norm"):
        found = [line[field] for line in two if field in line]
        assert_near(found, [line[field] for line in one if field in line], 1e-5, field)
    params = [load_run(tmp_path / name, "last").params for name in ("two", "one")]
    kernels = [p["decoder"]["block_0"]["attention"]["query"]["kernel"] for p in params]
    assert_near(kernels[0], np.asarray(kernels[1]), 1e-5)
    (again,) = ended([started(4, "--out", str(tmp_path / "two"), "--resume", "--steps", "12")])
    assert again[0] == 0 and measured(tmp_path / "two")[-1]["step"] == 12, again[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_split_lengths_in_processes_match_one_device(count):
    """A ring, and heads that are split by all-to-all, over eight devices of all processes."""
    script = "-m", "tests.multi_device.context_on_eight", "--process", f"localhost:{free_port()}"
    cases = "packed; blockwise; ring", "everything; native; heads"
    numbers = [(str(count), str(index)) for index in range(count)]
    processes = [python(8 // count, *script, *both, *cases) for both in numbers]
    for status, output, error in ended(processes):
        assert status == 0, error
        results = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        for case, errors in results.items():
            assert {"outputs", "gradients"} <= errors.keys()
            for name, error in errors.items():
                limit = FORWARD_F32 if name in ("outputs", "forward mode") else GRADIENT_F32
                assert error <= limit, (case, name, error)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mesh", "counts"),
    [
        ("context=4", [2]),
        pytest.param("context=4", [4], marks=pytest.mark.long),
        pytest.param("data=2,context=2", [2, 4], marks=pytest.mark.long),
    ],
)
def test_split_tokens_in_processes_have_the_losses_of_one_process(mesh, counts, tmp_path):
    """Rows of a prepared folder, of which each process reads those of its devices."""
    folder, file = tmp_path / "prepared", tmp_path / "text.jsonl"
    texts = [f"{n} quick brown foxes jump over {7 * n} lazy dogs. " * 3 for n in range(40)]
    file.write_text("\n".join(json.dumps(dict(text=text)) for text in texts))
    flags = "--data", str(file), "--field", "text", "--val-fraction", "0.2", "--out", str(folder)
    (alone,) = ended([python(1, "-m", "transformer_jax", "prepare", *flags)])
    assert alone[0] == 0, alone[2]
    data = ["--data", str(folder), "--steps", "8", "--mesh", mesh]
    (alone,) = ended([started(4, *data, "--out", str(tmp_path / "one"))])
    assert alone[0] == 0, alone[2]
    one = measured(tmp_path / "one")
    for count in counts:
        out = tmp_path / str(count)
        for status, _, error in ended(together(*data, "--out", str(out), count=count)):
            assert status == 0, error
        found = measured(out)
        for field in ("loss", "val_loss", "grad_norm"):
            wanted = [line[field] for line in one if field in line]
            assert_near([line[field] for line in found if field in line], wanted, 1e-5, field)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_signal_or_error_in_one_process_stops_both(text, tmp_path):
    out = tmp_path / "run"
    processes = together("--data", str(text), "--steps", "100000", "--out", str(out))
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (out / "metrics.jsonl").exists():
        time.sleep(0.2)
    while time.monotonic() < deadline and len(measured(out)) < 2:
        time.sleep(0.2)
    processes[1].send_signal(signal.SIGTERM)
    (first, second) = ended(processes)
    assert (first[0], second[0]) == (143, 143), (first[2], second[2])
    assert "stopped at step" in first[1]
    steps = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert len(steps) <= 3 and all(name.startswith("step-") for name in steps)
    refused = ended(together("--data", str(text), "--steps", "4", "--out", str(out)))
    for status, _, error in refused:
        assert status == 2 and "the folder contains a run" in error, error


def test_incomplete_distributed_config_is_rejected():
    found = parse([]).start
    assert (found.distributed, found.coordinator) == (False, None)
    found = parse("--coordinator h:1 --processes 4 --process 3".split()).start
    assert (found.coordinator, found.processes, found.process) == ("h:1", 4, 3)
    found = parse(["--distributed"]).start
    assert (found.distributed, found.coordinator) == (True, None)
    for argv, message in {
        "--coordinator h:1": "processes is None: pass all of coordinator, processes and process",
        "--coordinator h:1 --processes 2 --process 2": "process is 2: must be below processes, 2",
        "--coordinator h:1 --processes x --process 2": "processes is 'x': must be INTEGER",
        "--distributed --process 2": "pass only one of distributed and coordinator",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse(argv.split())
