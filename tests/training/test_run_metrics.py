"""A run that fits a line: every number in its metrics against the same steps in NumPy."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.checkpoints import checkpoint
from transformer_jax.config import ConfigError
from transformer_jax.config.optimizers import SGD
from transformer_jax.config.tasks import CustomTask
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.training import loop
from transformer_jax.training.batch import Batch
from transformer_jax.training.loop import Result, fit
from transformer_jax.training.progress import Silent
from transformer_jax.training.spikes import read_batch
from transformer_jax.training.tasks.task import Learner, Tokenizers, TrainingTask

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS, SPIKE, NAN = 14, 12, 5
PEAK, END, WARMUP, MOMENTUM, CLIP, EMA = 0.3, 0.01, 2, 0.5, 0.7, 0.8
FIRST = [0.5, -0.25]


def micro_batches(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x [A, B, 2], y [A, B] and weights [A, B] of step 1, 2, ..., with unequal sums."""
    rng = np.random.default_rng(step)
    x = rng.standard_normal((2, 3, 2)).astype(np.float32)
    y = (x @ np.float32([1.5, -0.5]) + 0.1 * rng.standard_normal((2, 3))).astype(np.float32)
    y[0, 1] += {SPIKE: 300.0, NAN: np.nan}.get(step, 0.0)
    return x, y, np.array([[1, 1, 0], [1, 1, 1]], np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line(CustomTask):
    """Task of fitting a line to points."""

    @property
    def loaded_by(self):
        return "tests.lines"

    def load(self, config, tokenizers, vocab_size):
        return LineTask(config)


class LineTask(TrainingTask):
    sha256 = "0" * 64
    tokens_per_step = 6

    def __init__(self, config):
        self.config, self.tokenizers = config, Tokenizers(CharTokenizer("ab"))
        self.learner = Learner(lambda key: {"w": jnp.array(FIRST)}, self.loss, self.scores)

    @staticmethod
    def errors(params, batch):
        return (batch.tokens * params["w"][None]).sum(-1) - batch.labels

    def loss(self, params, batch, key):
        weight = batch.valid.sum()
        return (batch.valid * self.errors(params, batch) ** 2).sum() / (2 * weight), weight

    def scores(self, params, batch):
        mean, weight = self.loss(params, batch, None)
        near = (batch.valid * (abs(self.errors(params, batch)) < 0.5)).sum()
        return jnp.stack([mean * weight, weight, near])

    def inputs(self, step):
        return Batch(*micro_batches(step + 1)[:2], valid=micro_batches(step + 1)[2])

    def evaluation(self):
        for number in range(self.config.eval_batches or 2):
            x, y, weights = micro_batches(1000 + number)
            yield Batch(x[number], y[number], valid=weights[number])

    def described(self):
        return "points near a line"

    def sample(self, params):
        return "slope " + " ".join(f"{w:.3f}" for w in params["w"])

    def judge(self, params, report=None):
        return {"distance": float(np.abs(params["w"] - np.float32([1.5, -0.5])).max())}


def oracle(eval_batches: int) -> tuple[list[dict], np.ndarray, np.ndarray]:
    """Return the measurements of each step in float64, the last parameters and their average."""
    w = np.array(FIRST)
    average, total, lines, updates = w, np.zeros(2), [], 0
    for step in range(1, STEPS + 1):
        x, y, weights = (a.reshape(6, -1).squeeze().astype(float) for a in micro_batches(step))
        error = x @ w - y
        loss = (weights * error**2).sum() / 2 / weights.sum()
        gradient = (weights * error) @ x / weights.sum()
        norm = np.sqrt((gradient**2).sum())
        falling = PEAK + (END - PEAK) * (updates - WARMUP) / (STEPS - WARMUP)
        rate = PEAK * (updates + 1) / (WARMUP + 1) if updates < WARMUP else falling
        line = {"step": step, "loss": loss, "learning_rate": rate, "grad_norm": norm}
        if step != NAN:
            total = MOMENTUM * total + gradient * min(1, CLIP / norm)
            w, updates = w - rate * total, updates + 1
            average = EMA * average + (1 - EMA) * w
        held_out = [[a[n] for a in micro_batches(1000 + n)] for n in range(eval_batches)]
        errors = np.concatenate([x @ average - y for x, y, _ in held_out])
        of = np.concatenate([weights for *_, weights in held_out])
        line["val_loss"] = (of * errors**2).sum() / 2 / of.sum()
        line["val_accuracy"] = (of * (abs(errors) < 0.5)).sum() / of.sum()
        lines.append(line)
    return lines, w, average


class Recorder(Silent):
    def __init__(self):
        self.lines, self.steps, self.begun = [], [], None

    def start(self, step, steps):
        self.begun = step, steps

    def step(self, step, loss, tokens_per_second):
        self.steps.append(step)

    def say(self, line):
        self.lines.append(line)


def written(out: str) -> list[dict]:
    lines = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
    machine = "seconds", "tokens_per_second", "peak_memory"
    return [{k: v for k, v in line.items() if not k.startswith(machine)} for line in lines]


def wanted_lines(steps: list[int], evaluated: list[int], eval_batches: int | None) -> list[dict]:
    found = []
    for line in oracle(eval_batches or 2)[0]:
        if line["step"] in steps:
            of = line["step"] in evaluated
            line = line if of else {k: v for k, v in line.items() if not k.startswith("val_")}
            more = {"eval_batches": eval_batches} if of and eval_batches else {}
            finite = {k: v if np.isfinite(v) else None for k, v in line.items()}
            found.append(pytest.approx(finite | more, rel=2e-4))
    return found


@pytest.fixture
def config(tmp_path, monkeypatch) -> tj.TrainConfig:
    monkeypatch.setattr(loop, "plot_losses", lambda folder: None)
    return tj.TrainConfig(
        model=tj.ModelConfig(d_model=4, num_heads=1, num_layers=1, max_len=3), task=Line(),
        out=str(tmp_path / "run"), steps=STEPS, batch_size=3, accumulation=2, context=2,
        learning_rate=PEAK, min_learning_rate=END, schedule="linear", warmup_steps=WARMUP,
        optimizer=SGD(momentum=MOMENTUM), clip_norm=CLIP, ema_decay=EMA, eval_every=3,
        checkpoint_every=4, keep=2, log_every=4, dump_batch=20.0, sample_tokens=1,
    )  # fmt: skip


def close(found: np.ndarray) -> object:
    return pytest.approx(np.asarray(found), rel=2e-4)


def test_run_metrics_match_numpy(config):
    recorder, folder = Recorder(), Path(config.out)
    result = fit(config, progress=recorder)
    lines, w, average = oracle(2)
    last = lines[-1]
    assert written(config.out) == wanted_lines([1, 3, 4, 6, 8, 9, 12, 14], [3, 6, 9, 12, 14], None)
    assert result.state.params["w"] == close(w)
    assert result.state.average["w"] == close(average)
    best = min((3, 6, 9, 12, 14), key=lambda step: lines[step - 1]["val_loss"])
    slope = f"slope {average[0]:.3f} {average[1]:.3f}"
    assert result == Result(
        config=config, state=result.state, step=STEPS, interrupted=False,
        val_loss=pytest.approx(last["val_loss"], rel=2e-4), val_loss_per_character=None,
        best_step=best, sample=slope, rejected=1,
        accuracy=pytest.approx(last["val_accuracy"]), scores=result.scores, unit="token",
    )  # fmt: skip
    assert result.scores["distance"] == pytest.approx(np.abs(average - [1.5, -0.5]).max(), rel=1e-3)
    assert (folder / "sample.txt").read_text() == slope + "\n"
    assert json.loads((folder / "scores.json").read_text()) == result.scores
    assert result.perplexity is None  # the loss is per point
    assert recorder.begun == (0, STEPS) and recorder.steps == [*range(1, STEPS + 1)]
    kept = checkpoint.saved_steps(folder / "checkpoints")
    assert kept == sorted({best, 12, 14})
    spikes = folder / "spikes"
    assert sorted(file.name for file in spikes.iterdir()) == [
        f"step-{step:08d}.npz" for step in (NAN, SPIKE)
    ]
    batch = read_batch(spikes / f"step-{SPIKE:08d}.npz")
    for found, saved in zip(
        (batch.tokens, batch.labels, batch.valid), micro_batches(SPIKE), strict=True
    ):
        np.testing.assert_array_equal(found, saved)
    with np.load(spikes / f"step-{SPIKE:08d}.npz") as content:
        assert content["step"] == SPIKE
        assert content["loss"] == close(lines[SPIKE - 1]["loss"])
        assert content["grad_norm"] == close(lines[SPIKE - 1]["grad_norm"])
    step_lines = [line for line in recorder.lines if line.startswith("step ")]
    assert [int(line.split()[1].rstrip(":")) for line in step_lines] == [
        3,
        NAN,
        6,
        9,
        SPIKE,
        12,
        14,
    ]
    wanted = f"held-out loss {last['val_loss']:.4f}, accuracy {last['val_accuracy']:.3f}"
    assert step_lines[-1] == f"step 14: {wanted}"
    assert recorder.lines[:2] == [
        "model: 2 parameters, vocabulary of 256, on cpu",
        "points near a line",
    ]


@pytest.mark.slow
def test_run_resumes_from_last_intact_checkpoint(config):
    stops = deque([False] * 7 + [True])
    assert fit(config, stop=stops.popleft).interrupted
    checkpoints = Path(config.out) / "checkpoints"
    array = checkpoints / "step-00000008" / "params" / "manifest.ocdbt"
    array.write_bytes(array.read_bytes() + b"\0")
    (checkpoints / "step-00000009.tmp").mkdir()
    with open(Path(config.out) / "metrics.jsonl", "a") as stream:
        stream.write("{broken\n")
    with pytest.raises(ConfigError, match=r"run: cannot resume with other settings: seed: 0 -> 3$"):
        fit(dataclasses.replace(config, seed=3), resume=True)
    again, recorder = dataclasses.replace(config, eval_batches=1), Recorder()
    result = fit(again, resume=True, progress=recorder)
    lines, w, average = oracle(1)
    assert recorder.begun == (6, STEPS) and recorder.steps == [*range(7, STEPS + 1)]
    assert result.state.params["w"] == close(w) and result.state.average["w"] == close(average)
    old = wanted_lines([1, 3, 4, 6], [3, 6], None)
    assert written(config.out) == old + wanted_lines([8, 9, 12, 14], [9, 12, 14], 1)
    assert not (checkpoints / "step-00000009.tmp").exists()
    assert (checkpoints / "step-00000008.damaged").exists()
    metadata = checkpoint.read_manifest(checkpoint.step_path(checkpoints, 12)).metadata
    assert metadata == {
        "val_loss": close(lines[11]["val_loss"]), "eval_batches": 1, "data_sha256": "0" * 64,
        "tokenizer_sha256": metadata["tokenizer_sha256"],
    }  # fmt: skip
    before, after = oracle(2)[0][5]["val_loss"], lines[5]["val_loss"]
    fault, reevaluated, cut, _, described, *_ = recorder.lines
    assert fault.endswith("the manifest specifies 113; trying the previous checkpoint")
    loss_line = f"held-out loss {after:.4f}, was {before:.4f}"
    assert reevaluated == f"step 6: eval_batches changed from None to 1: {loss_line}"
    assert cut == f"{config.out}/metrics.jsonl: dropped damaged lines: 1"
    assert described == "points near a line, from step 6 on"
