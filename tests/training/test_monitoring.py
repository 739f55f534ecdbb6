"""Monitoring of a run: phases, chip utilization, trackers, profiles, spikes."""

import dataclasses
import json
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from tests.support.compilation import quick_environment
from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.checkpoints.run_folder import RunFolder, differences
from transformer_jax.config import ConfigError, ModelConfig, TrainConfig
from transformer_jax.loading import load_run
from transformer_jax.training import loop, run, spikes
from transformer_jax.training.batch import batch_loss
from transformer_jax.training.loop import fit
from transformer_jax.training.phases import PHASES, Phases, flops_utilisation
from transformer_jax.training.planning.peaks import CHIPS
from transformer_jax.training.spikes import Spikes, read_batch

ROOT = loop.Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    (tmp_path / "text.txt").write_text("to be or not to be that is the question\n" * 30)
    model = ModelConfig(d_model=16, num_layers=1, num_heads=2, max_len=8)
    return TrainConfig(
        model=model, data=str(tmp_path / "text.txt"), out=str(tmp_path / "run"), steps=24,
        batch_size=2, eval_every=12, checkpoint_every=8, log_every=4, sample_tokens=0,
        warmup_steps=2,
    )  # fmt: skip


def lines_of(config):
    text = (loop.Path(config.out) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_phase_times_sum_to_elapsed_time(config):
    fit(config)
    lines = lines_of(config)
    assert [line["step"] for line in lines] == [1, 4, 8, 12, 16, 20, 24]
    for line in lines:
        parts = [line[f"seconds_{phase}"] for phase in PHASES]
        assert min(parts) >= 0 and line["peak_memory"] > 2**20
        assert "flops_utilisation" not in line  # CPUs have no published peak
    total = sum(line["seconds"] for line in lines)
    counted_seconds = sum(line[f"seconds_{phase}"] for line in lines for phase in PHASES)
    assert 0.5 * total < counted_seconds <= total * 1.001
    assert lines[3]["seconds_evaluation"] > 0 == lines[1]["seconds_evaluation"]
    assert sum(line["seconds_checkpoint"] for line in lines) > 0


def test_phase_time_excludes_nested_phases(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 4.5, 6.5, 9.0, 10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    phases = Phases()  # 0
    with phases.of("data"):  # 1 to 4
        pass
    with phases.of("step"):  # 4.5 to 6.5
        pass
    found = phases.taken()  # 9
    assert (found["seconds_data"], found["seconds_step"], found["seconds"]) == (3.0, 2.0, 9.0)
    with pytest.raises(KeyError), phases.of("step"):  # 10 to 12: counted even though it fails
        raise KeyError
    assert phases._seconds["step"] == 2.0


def test_utilization_is_flop_rate_divided_by_peak(config):
    model = ModelConfig(
        vocab_size=50, d_model=64, num_layers=3, num_heads=4, d_ff=256, max_len=32, glu=False
    )
    config = dataclasses.replace(config, model=model, context=32)
    blocks = 3 * (4 * 64 * 64 + 2 * 64 * 256) + 50 * 64
    attention = 3 * 2 * 64 * (32 + 1) / 2  # scores and sums over visible tokens, on average
    each = 6 * (blocks + attention)
    found = flops_utilisation(config, 1e6, "NVIDIA H200", 2)
    assert_near(found, 1e6 * each / (2 * CHIPS["h200"].flops), 1e-6)
    assert flops_utilisation(config, 1e6, "cpu", 1) is None


class FakeTracker:
    """A tracker like one from a third-party package, which records its calls."""

    def __init__(self, fails_at=None):
        self.records, self.closed, self.fails_at = [], 0, fails_at

    def log(self, numbers, step):
        if step == self.fails_at:
            raise OSError("no network")
        self.records.append((step, numbers))

    def finish(self):
        self.closed += 1


@pytest.mark.slow
@pytest.mark.long_except("wandb")
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tracker_receives_every_metric_line_and_is_closed(config, monkeypatch, name):
    run, inits = FakeTracker(), []
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace()
    module.init = lambda **settings: inits.append(settings) or run
    monkeypatch.setitem(sys.modules, name, module)
    fit(dataclasses.replace(config, log=(name,)))
    lines = lines_of(config)
    assert [step for step, _ in run.records] == [line["step"] for line in lines]
    for (_, numbers), line in zip(run.records, lines, strict=True):
        assert numbers == {k: float(v) for k, v in line.items() if k != "step" and v is not None}
    assert run.closed == 1
    assert inits[0]["name"] == "run" and inits[0]["resume"] == "allow"
    assert inits[0]["config"]["steps"] == 24


@pytest.mark.slow
def test_failing_tracker_is_removed_and_run_continues(config, monkeypatch):
    run, lines = FakeTracker(fails_at=8), []
    module = types.ModuleType("trackio")
    module.__spec__ = types.SimpleNamespace()
    module.init = lambda **settings: run
    monkeypatch.setitem(sys.modules, "trackio", module)

    class LineRecorder(loop.Silent):
        def say(self, line):
            lines.append(line)

    result = fit(dataclasses.replace(config, log=("trackio",)), progress=LineRecorder())
    assert result.step == 24
    assert [step for step, _ in run.records] == [1, 4]
    (line,) = [line for line in lines if line.startswith("log:")]
    assert line == "log: trackio failed and is disabled (OSError: no network)"


def test_missing_package_raises_error_before_writing_files(config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^log contains 'wandb', which needs wandb: run pip install wandb$"
    ):
        fit(dataclasses.replace(config, log=("wandb",)))
    assert not loop.Path(config.out).exists()


@pytest.mark.slow
def test_tensorboard_can_read_logged_metrics(config):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    fit(dataclasses.replace(config, log=("tensorboard",)))
    (file,) = (loop.Path(config.out) / "tensorboard").glob("events.*")
    data, at, found = file.read_bytes(), 0, {}
    while at < len(data):  # length, its checksum, an event, its checksum
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
        at += 16 + size
    lines = lines_of(config)
    assert [step for step, _ in found["loss"]] == [line["step"] for line in lines]
    assert_near([value for _, value in found["loss"]], [line["loss"] for line in lines], 1e-6)
    assert len(found["val_loss"]) == 2


@pytest.mark.long
def test_monitoring_does_not_change_results(config, tmp_path):
    """The watched run gets its own process: XLA's profiler may crash one that uses libtpu."""
    plain = fit(config)
    watched = tmp_path / "watched"
    flags = (
        f"--data {config.data} --out {watched} --d-model 16 --num-layers 1 --num-heads 2 "
        "--max-len 8 --use-bias True --steps 24 --batch-size 2 --eval-every 12 "
        "--checkpoint-every 8 --log-every 4 --sample-tokens 0 --warmup-steps 2 "
        "--learning-rate 1e-3 --min-learning-rate 1e-4 --eval-batches None --context None "
        "--log tensorboard --profile 3-4 --dump-batch 1.01"
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *flags.split()],
        env=quick_environment(), capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config, plain = (RunFolder(loop.Path(r)).read_config() for r in (watched, plain.config.out))
    changes = {"out", "log", "profile", "dump_batch"}
    changed = {line.partition(":")[0] for line in differences(plain, config)}
    assert changed <= changes, changed
    one, two = (load_run(folder, "last").params for folder in (watched, tmp_path / "run"))
    for ours, other in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert_same_bits(ours, other)
    assert list((watched / "profile").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_profile_contains_only_requested_steps(config, monkeypatch):
    calls, steps = [], []
    monkeypatch.setattr("jax.profiler.start_trace", lambda path: calls.append((path, len(steps))))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append((None, len(steps))))
    compiled = run.programs_of

    def counted(*inits):
        config, programs = compiled(*inits)

        def step(*arguments, **named):
            steps.append(1)
            return programs.train_step(*arguments, **named)

        return config, dataclasses.replace(programs, train_step=step)

    monkeypatch.setattr(run, "programs_of", counted)
    fit(dataclasses.replace(config, profile="5-7"))
    assert calls == [(loop.Path(config.out) / "profile", 4), (None, 7)]


def test_loss_far_above_median_is_reported_as_spike(tmp_path):
    found = Spikes(2.0, tmp_path)
    assert not any(found.is_spike(loss, 1.0) for loss in [9.0, *[1.0] * 8])
    assert not found.is_spike(5.0, 1.0)  # nine losses are too few to judge
    assert not found.is_spike(1.9, 1.0)
    assert found.is_spike(2.1, 1.0)
    assert found.is_spike(float("nan"), 1.0) and found.is_spike(1.0, float("inf"))
    for _ in range(200):  # spikes do not enter the median
        assert found.is_spike(2.1, 1.0)


@pytest.mark.slow
def test_saved_spike_batch_reproduces_loss(config, monkeypatch):
    monkeypatch.setattr(spikes, "LEAST", 3)
    states, compiled = {}, run.programs_of

    def kept(*inits):
        config, programs = compiled(*inits)

        def step(state, *arguments, **named):
            states[int(state.step) + 1] = jax.tree.map(np.array, state.params)
            state, metrics = programs.train_step(state, *arguments, **named)
            loss = metrics.loss * (100.0 if int(state.step) == 9 else 1.0)
            return state, dataclasses.replace(metrics, loss=loss)

        return config, dataclasses.replace(programs, train_step=step)

    monkeypatch.setattr(run, "programs_of", kept)
    result = fit(dataclasses.replace(config, dump_batch=10.0, accumulation=2))
    (file,) = (loop.Path(config.out) / "spikes").glob("*.npz")
    assert file.name == "step-00000009.npz"
    with np.load(file) as found:
        assert int(found["step"]) == 9
        loss = float(found["loss"]) / 100
    batch = read_batch(file)
    assert batch.tokens.shape == (2, 2, 8)
    measure = batch_loss(result.config.model)
    parts = [
        measure(states[9], jax.tree.map(lambda leaf, i=i: leaf[i], batch), None)[0]
        for i in range(2)
    ]
    assert_near(np.mean(parts), loss, 1e-5)
    text = file.with_suffix(".txt").read_text().splitlines()
    assert text[0].startswith("step 9, loss ") and len(text) == 5
    assert eval(text[1].partition(": ")[2]) in (loop.Path(config.data)).read_text()


@pytest.mark.slow
def test_only_spike_batches_are_saved_up_to_limit(config, monkeypatch):
    fit(dataclasses.replace(config, dump_batch=50.0))
    assert not (loop.Path(config.out) / "spikes").exists()
    monkeypatch.setattr(spikes, "MOST", 2)
    monkeypatch.setattr(Spikes, "is_spike", lambda *numbers: True)
    many = dataclasses.replace(config, dump_batch=2.0, out=config.out + "2")
    fit(many)
    assert len(list((loop.Path(many.out) / "spikes").glob("*.npz"))) == 2


@pytest.mark.long
def test_monitoring_settings_can_change_on_resume(config):
    fit(dataclasses.replace(config, steps=8))
    result = fit(
        dataclasses.replace(config, log=("tensorboard",), profile="1-2", dump_batch=3.0),
        resume=True,
    )
    assert result.step == 24
