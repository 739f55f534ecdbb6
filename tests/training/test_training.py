"""Training: the step against NumPy, and runs that stop, fail and resume bit for bit."""

import errno
import os
import resource
import time
from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

from tests.support.saved import arrays_of, largest_file
from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.checkpoint import CheckpointError, saved_steps
from transformer_jax.checkpoints.run_folder import (
    RunError,
    RunFolder,
    check_unused,
    config_from_json,
    config_to_json,
    locked,
    plot_losses,
    smooth,
)
from transformer_jax.config import (
    PRESETS,
    Adafactor,
    AdamW,
    ConfigError,
    Experts,
    Lion,
    ModelConfig,
    Muon,
    RecurrentConfig,
    ScheduleFree,
    TrainConfig,
    preset,
    train_preset,
)
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.kinds import names_of
from transformer_jax.config.presets import task_recipe
from transformer_jax.config.tasks import TASKS, LanguageTask, PreferenceTask
from transformer_jax.loading import load_run
from transformer_jax.models.experts import route
from transformer_jax.models.factory import build, init_params
from transformer_jax.models.stack import stack_layers
from transformer_jax.training import compiled, evaluation, run
from transformer_jax.training.batch import Batch, batch_loss, batch_scores
from transformer_jax.training.data import (
    IGNORE,
    DataError,
    consecutive_starts,
    load_dataset,
    random_starts,
)
from transformer_jax.training.evaluation import Scores
from transformer_jax.training.loop import _warnings, fit
from transformer_jax.training.optimizers import (
    decays,
    learning_rate_schedule,
    make_optimizer,
)
from transformer_jax.training.planning.memory import StepMemory, check_step
from transformer_jax.training.progress import Silent
from transformer_jax.training.report import MAX_REJECTED
from transformer_jax.training.step import (
    init_state,
    make_eval_step,
    make_train_step,
    start_state,
    windows,
)
from transformer_jax.training.tasks import language

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = ModelConfig(d_model=22, num_heads=2, num_layers=1, d_ff=29, max_len=13, use_bias=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    words = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "far", "\n"]
    chosen = np.random.default_rng(5).choice(words, 701)
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(chosen))
    return file


@pytest.fixture
def config(text, tmp_path) -> TrainConfig:
    return TrainConfig(
        model=MODEL, data=str(text), out=str(tmp_path / "run"), val_fraction=0.2, steps=20,
        batch_size=3, warmup_steps=3, eval_every=5, checkpoint_every=5, keep=2, log_every=1,
        sample_tokens=0, seed=17,
    )  # fmt: skip


def changed(config: TrainConfig, **changes) -> TrainConfig:
    return replace(config, model=replace(config.model, **changes))


@pytest.fixture(autouse=True)
def fresh_trace_counter():
    """chex counts traces by location and source of a function: tests with one name share them."""
    chex.clear_trace_counter()


@pytest.fixture
def traced_once(monkeypatch):
    """All runs share one program for training and one for evaluation: another trace raises."""

    def once(make):
        return lambda *args, **named: chex.assert_max_traces(make(*args, **named), n=1)

    monkeypatch.setattr(compiled, "batch_loss", once(compiled.batch_loss))
    monkeypatch.setattr(compiled, "batch_scores", once(compiled.batch_scores))
    compiled.cached_programs.cache_clear()
    yield
    compiled.cached_programs.cache_clear()


def after(steps: int):
    """A `stop` that ends a run after a number of its own steps."""
    left = iter([False] * (steps - 1))
    return lambda: next(left, True)


def leaves(state) -> dict[str, np.ndarray]:
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


def flattened(tree) -> np.ndarray:
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def assert_same_state(actual, expected) -> None:
    actual, expected = leaves(actual), leaves(expected)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_same_bits(actual[name], expected[name], name)


OF_THE_MACHINE = {
    "tokens_per_second", "seconds", "seconds_data", "seconds_step", "seconds_evaluation",
    "seconds_checkpoint", "peak_memory",
}  # fmt: skip
"""Metrics that differ between two runs with the same numerics."""


def metrics(config: TrainConfig) -> list[dict]:
    lines = RunFolder(Path(config.out)).read_metrics()
    return [{k: v for k, v in line.items() if k not in OF_THE_MACHINE} for line in lines]


VARIANTS = {
    "dropout": lambda c: changed(c, dropout=0.3, attention_dropout=0.2),
    "accumulation": lambda c: replace(
        changed(c, dropout=0.3, attention_dropout=0.2), accumulation=3
    ),
    "warm-up boundary": lambda c: replace(c, warmup_steps=10),
    "bfloat16": lambda c: changed(c, dtype="bfloat16"),
    "tied, scanned": lambda c: changed(c, num_layers=2, scan_layers=True),
    "untied": lambda c: changed(c, tie_embeddings=False, logit_bias=True),
    "bfloat16 parameters, average, chunks": lambda c: replace(
        c, param_dtype="bfloat16", ema_decay=0.9, loss_chunk=5, z_loss=1e-3, optimizer=Lion()
    ),
    "schedulefree": lambda c: replace(c, optimizer=ScheduleFree(), schedule="constant"),
    "muon, rematerialised": lambda c: replace(changed(c, remat="dots"), optimizer=Muon()),
    "adafactor": lambda c: replace(c, optimizer=Adafactor(smallest_factored=8)),
}


@pytest.mark.slow
@pytest.mark.long_except("accumulation")
@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_run_is_bit_identical(config, monkeypatch, traced_once, variant):
    read: list[tuple] = []

    def spy(seed, step, shape, count):
        starts = random_starts(seed, step, shape, count)
        read.append((step, starts.tolist()))
        return starts

    monkeypatch.setattr(language, "random_starts", spy)
    straight = VARIANTS[variant](config)
    whole = fit(straight)
    order, read[:] = list(read), []

    parts = replace(straight, out=straight.out + "-parts")
    half = fit(parts, stop=after(10))
    assert half.interrupted and half.step == 10
    assert 0 < len(metrics(parts)) == 10
    resumed = fit(parts, resume=True)
    assert not resumed.interrupted and resumed.step == 20

    assert [step for step, _ in order] == list(range(20))
    assert read == order
    assert_same_state(resumed.state, whole.state)
    assert (resumed.val_loss, resumed.best_step) == (whole.val_loss, whole.best_step)
    assert half.val_loss is not None  # it stopped at a step with an evaluation
    assert metrics(parts) == metrics(straight)
    for step in (15, 20):
        one, other = (
            checkpoint.step_path(Path(c.out) / "checkpoints", step) for c in (straight, parts)
        )
        again = arrays_of(other)
        assert {name: array.tobytes() for name, array in arrays_of(one).items()} == {
            name: array.tobytes() for name, array in again.items()
        }
        assert len(again) == len(checkpoint.read_manifest(one).leaves)


KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
)
"""An optimizer that stores the gradient as its state."""


def numpy_loss(logits, labels) -> tuple[float, int]:
    """Return the summed negative log-likelihood and the token count, in float64."""
    logits = np.asarray(logits).astype(np.float64)
    top = logits.max(-1, keepdims=True)
    logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    rows = np.asarray(labels)
    counts = rows != IGNORE
    picked = np.take_along_axis(logs, np.where(counts, rows, 0)[..., None], -1)[..., 0]
    return float(-(picked * counts).sum()), int(counts.sum())


SMALL = replace(MODEL, vocab_size=31, dropout=0.0)


@pytest.fixture(scope="module")
def step():
    """A step of SMALL that exposes the gradient."""
    return make_train_step(batch_loss(SMALL), KEEP)


def test_micro_batches_match_one_large_batch(rng, step):
    tokens = rng.integers(0, 31, (4, 13)).astype(np.int32)
    labels = rng.integers(0, 31, (4, 13)).astype(np.int32)
    for row, length in enumerate((13, 2, 7, 0)):  # including an empty row
        labels[row, length:] = IGNORE
    params = init_params(SMALL, jax.random.key(3))
    logits, _ = jax.jit(build(SMALL).apply)({"params": params}, tokens)
    found = {}
    for count in (1, 4):
        batch = Batch(
            jnp.asarray(tokens.reshape(count, -1, 13)), jnp.asarray(labels.reshape(count, -1, 13))
        )
        copied = jax.tree.map(jnp.copy, params)
        state = start_state(copied, KEEP, jax.random.key(3))
        state, measured = step(state, batch)
        assert float(measured.weight) == 22
        found[count] = (state.opt_state, float(measured.loss), float(measured.grad_norm))
    summed, weight = numpy_loss(logits, labels)
    assert weight == 22
    flat = flattened(found[1][0])
    assert np.abs(flat).max() > 0.01
    for count in (1, 4):
        grads, value, norm = found[count]
        assert_near(value, summed / weight, 1e-6, "loss")
        assert_near(norm, np.linalg.norm(flat), 1e-6, "norm")
        assert_near(flattened(grads), flat, 1e-6, f"{count} micro-batches")


@pytest.mark.slow
def test_step_without_labels_has_zero_loss_and_gradient(step):
    tokens = jnp.ones((4, 1, 13), jnp.int32)
    state = init_state(SMALL, KEEP, 3)
    state, measured = step(state, Batch(tokens, jnp.full_like(tokens, IGNORE)))
    assert (float(measured.loss), float(measured.weight), float(measured.grad_norm)) == (0, 0, 0)
    assert not flattened(state.opt_state).any()
    assert int(state.rejected) == 0


@pytest.mark.slow
def test_dropout_differs_by_step_and_micro_batch():
    model = replace(MODEL, dropout=0.5, vocab_size=31)
    optimizer = KEEP
    step = make_train_step(batch_loss(model), optimizer)
    tokens = jnp.arange(26, dtype=jnp.int32).reshape(1, 2, 13)
    one, two = (Batch(*[jnp.concatenate([tokens] * n)] * 2) for n in (1, 2))
    first, first_loss = step(init_state(model, optimizer, 3), one)
    again, again_loss = step(init_state(model, optimizer, 3), one)
    assert_same_state(again, first)
    kept = jax.tree.map(jnp.copy, first.opt_state)
    _, second_loss = step(first, one)
    both, _ = step(init_state(model, optimizer, 3), two)
    losses = [float(m.loss) for m in (first_loss, again_loss, second_loss)]
    assert np.isfinite(losses).all()
    assert losses[0] == losses[1] != losses[2]
    tokens_of = [np.asarray(tree["embed"]["tokens"]) for tree in (kept, both.opt_state)]
    assert np.abs(tokens_of[0] - tokens_of[1]).max() > 1e-3


def touchy_loss(params, batch, key):
    """Finite for ordinary numbers; only the gradient is NaN at a label of 0."""
    mean = jnp.sum(params["w"] * batch.tokens) + jnp.sum(jnp.sqrt(params["v"] * batch.labels))
    return mean, jnp.ones(())


@pytest.mark.slow_except("gradient-1.0-0-1")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("kind", "token", "label"),
    [("loss", np.nan, 1), ("loss", np.inf, 1), ("gradient", 1.0, 0), ("overflow", 3e38, 1)],
)
def test_nonfinite_step_does_not_change_parameters(kind, token, label, count):
    optimizer = make_optimizer(TrainConfig(warmup_steps=0, learning_rate=0.5))
    step = make_train_step(chex.assert_max_traces(touchy_loss, n=1), optimizer)

    def batch(token, label):
        tokens, labels = np.ones((count, 3), np.float32), np.ones((count, 3), np.float32)
        tokens[-1, 1], labels[-1, 1] = token, label
        return Batch(jnp.asarray(tokens), jnp.asarray(labels))

    params = {"w": jnp.ones(3), "v": jnp.ones(3)}
    state = start_state(params, optimizer, jax.random.key(1))
    state, _ = step(state, batch(1.0, 1))
    before = jax.device_get((state.params, state.opt_state))
    for bad in (1, 2):
        state, measured = step(state, batch(token, label))
        assert np.isfinite(float(measured.loss)) == (kind in ("gradient", "overflow"))
        assert not np.isfinite(float(measured.grad_norm))
        assert_same_state((state.params, state.opt_state), before)
        assert (int(state.step), int(state.rejected)) == (1 + bad, bad)
        assert int(measured.rejected_in_a_row) == bad
    state, _ = step(state, batch(1.0, 1))
    assert (int(state.rejected), int(state.rejected_in_a_row)) == (2, 0)
    assert (np.asarray(state.params["w"]) != before[0]["w"]).all()


@pytest.mark.slow
def test_ten_consecutive_nonfinite_steps_stop_run(config):
    wild = replace(config, learning_rate=1e37, checkpoint_every=1, keep=40, eval_every=100)
    wild = replace(wild, steps=40, optimizer=AdamW(weight_decay=0.0))
    with pytest.raises(RunError, match=r"step 1\d: loss or gradient was not finite 10 times"):
        fit(wild)
    folder = Path(wild.out) / "checkpoints"
    steps = saved_steps(folder)
    assert 0 < len(steps)
    for step in steps:
        path = checkpoint.step_path(folder, step)
        assert checkpoint.verify(path).metadata["val_loss"] is None
        params = [array for name, array in arrays_of(path).items() if name.startswith("params:")]
        assert params and all(np.isfinite(array).all() for array in params)
    assert not (Path(wild.out) / "lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rejected", [MAX_REJECTED - 1, MAX_REJECTED])
def test_run_stops_exactly_at_tenth_rejected_step(config, monkeypatch, rejected):
    """A number of steps, from step 3 on, are rejected."""
    assert MAX_REJECTED == 10
    programs_of = run.programs_of

    def rejecting(task):
        moe, programs = programs_of(task)

        def step(state, corpus, starts, **frozen):
            state, measured = programs.train_step(state, corpus, starts, **frozen)
            done = int(state.step)
            bad = max(0, done - 2) if done <= 2 + rejected else 0
            loss = jnp.where(bad > 0, jnp.nan, measured.loss)
            return state, replace(measured, loss=loss, rejected_in_a_row=jnp.int32(bad))

        return moe, replace(programs, train_step=step)

    monkeypatch.setattr(run, "programs_of", rejecting)
    if rejected < MAX_REJECTED:
        assert fit(config).step == 20
        return
    with pytest.raises(RunError, match=r"^step 12: .* was not finite 10 times in a row"):
        fit(config)
    lost = [line["step"] for line in metrics(config) if line["loss"] is None]
    assert lost == list(range(3, 12))


def numpy_rate(config: TrainConfig, count: int) -> float:
    if count < config.warmup:  # even if the run ends during the warm-up
        return config.learning_rate * (count + 1) / (config.warmup + 1)
    if count >= config.steps:
        return config.min_learning_rate
    part = (count - config.warmup) / (config.steps - config.warmup)
    span = config.learning_rate - config.min_learning_rate
    return config.min_learning_rate + span * (1 + np.cos(np.pi * part)) / 2


@pytest.mark.slow
def test_warmup_longer_than_run_emits_python_warning(config, caplog):
    fit(replace(config, steps=2, warmup_steps=2))
    warned = "warmup_steps is 2: learning_rate 0.001 is not reached in 2 steps"
    assert [
        record.getMessage() for record in caplog.records if "warmup" in record.name + record.msg
    ] == [warned]


def test_probably_unintended_settings_emit_warning(config):
    dropped = replace(config.model, dropout=0.25, attention_dropout=0.5)
    assert [*_warnings(replace(config, model=dropped))] == []
    pairs = replace(
        config, model=dropped, task=PreferenceTask(), init_from="x", tokenizer="pretrained"
    )
    rule = "the reference model has none, so the loss does not start at log 2"
    assert [*_warnings(pairs)] == [f"dropout is 0.25: {rule}", f"attention_dropout is 0.5: {rule}"]
    assert [*_warnings(replace(pairs, model=config.model))] == []
    assert [*_warnings(replace(config, steps=4, warmup_steps=3))] == []
    (line,) = _warnings(replace(config, steps=3, warmup_steps=3))
    assert line == "warmup_steps is 3: learning_rate 0.001 is not reached in 3 steps"
    assert [*_warnings(replace(config, model=RecurrentConfig(dropout=0.5)))] == []


@pytest.mark.parametrize(
    "experts", [{}, dict(score="sigmoid"), dict(normalize=False), dict(top_k=2), dict(count=1)]
)
def test_router_without_gradient_emits_warning(config, experts):
    moe = Experts(**dict(count=3, top_k=1) | experts)

    def weights(logits):
        return (route(moe, logits)[1] @ jnp.arange(1.0, moe.top_k + 1)).sum()

    slope = jax.jit(jax.grad(weights))(np.arange(2.0 * moe.count).reshape(2, -1))
    moved = np.abs(slope).max() > 1e-9
    warned = [*_warnings(replace(config, model=replace(config.model, experts=moe)))]
    assert bool(warned) == (not moved and moe.count > 1) == (experts.keys() <= {"score"})
    assert all("top_k=1 and normalize=True" in s and "with normalize=False" in s for s in warned)


def test_learning_rate_warms_up_and_follows_cosine_decay(config):
    for steps, warmup in ((20, 3), (20, 0), (7, 20), (20, 20)):
        now = replace(config, steps=steps, warmup_steps=warmup)
        expected = [numpy_rate(now, n) for n in range(25)]
        assert_near(learning_rate_schedule(now)(jnp.arange(25)), expected, 1e-6)


def test_optimizer_matches_adamw_with_clipping(rng):
    """Five steps against the published update, in float64."""
    config = TrainConfig(
        learning_rate=0.1, min_learning_rate=0.01, warmup_steps=2, steps=5, clip_norm=1.7,
        optimizer=AdamW(beta1=0.8, beta2=0.9, weight_decay=0.3),
    )  # fmt: skip
    shapes = {"kernel": (3, 5), "bias": (2, 3), "scale": (5,), "sinks": (2,), "tokens": (7, 3)}
    params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    optimizer = make_optimizer(config)

    @jax.jit
    def update(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ours = {name: jnp.asarray(p, jnp.float32) for name, p in params.items()}
    state = optimizer.init(ours)
    mu = {name: np.zeros(shape) for name, shape in shapes.items()}
    nu = {name: np.zeros(shape) for name, shape in shapes.items()}
    clipped = 0
    for n in range(5):
        scale = 0.05 if n == 3 else 1.0
        grads = {name: scale * rng.standard_normal(shape) for name, shape in shapes.items()}
        gradients = {name: jnp.asarray(g, jnp.float32) for name, g in grads.items()}
        ours, state = update(gradients, state, ours)
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        clipped += norm > 1.7
        for name, g in grads.items():
            g = g * min(1.0, 1.7 / norm)
            mu[name] = 0.8 * mu[name] + 0.2 * g
            nu[name] = 0.9 * nu[name] + 0.1 * g**2
            step = (
                mu[name] / (1 - 0.8 ** (n + 1)) / (np.sqrt(nu[name] / (1 - 0.9 ** (n + 1))) + 1e-8)
            )
            if name in ("kernel", "tokens"):
                step = step + 0.3 * params[name]
            params[name] = params[name] - numpy_rate(config, n) * step
    assert clipped == 4
    for name in shapes:
        assert_near(ours[name], params[name], 2e-6, name)


def test_weight_decay_skips_same_parameters_in_stacked_layers():
    config = ModelConfig(
        d_model=22, num_heads=2, num_layers=3, max_len=13, qk_norm=True, attention_sinks=True,
        logit_bias=True, glu=True, tie_embeddings=False,
    )  # fmt: skip
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    looped, stacked = decays(params), decays(jax.eval_shape(stack_layers, params["decoder"]))
    expected = jax.tree.map(lambda *found: found[0], looped["decoder"]["block_0"])
    assert stacked["blocks"] == expected
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/"): decayed
        for path, decayed in jax.tree_util.tree_flatten_with_path(looped)[0]
    }
    assert flat["embed/tokens"] and flat["embed/output"] and not flat["embed/bias"]
    block = {name.removeprefix("decoder/block_0/"): decayed for name, decayed in flat.items()}
    assert {name for name in block if name.endswith("kernel") and not block[name]} == set()
    for name in ("attention/query/bias", "attention/query_scale", "attention/sinks"):
        assert block[name] is False


def test_windows_predict_next_token_without_reading_past_end():
    corpus = jnp.asarray(np.arange(100, 117) % 251, jnp.uint8)  # 17 tokens
    found = windows(corpus, jnp.asarray([[0, 3], [11, 17]], jnp.int32), 7)
    assert found.tokens.shape == found.labels.shape == (2, 2, 7)
    assert found.tokens.dtype == found.labels.dtype == jnp.int32
    assert found.tokens[0, 1].tolist() == list(range(103, 110))
    assert found.labels[0, 1].tolist() == list(range(104, 111))
    assert found.labels[1, 0].tolist() == [112, 113, 114, 115, 116, IGNORE, IGNORE]
    assert found.labels[1, 1].tolist() == [IGNORE] * 7


@pytest.mark.slow
def test_evaluation_counts_every_held_out_token_once(rng):
    model = replace(MODEL, vocab_size=31, dropout=0.0)
    corpus = rng.integers(0, 31, 97).astype(np.uint8)
    params = init_params(model, jax.random.key(1))
    starts = consecutive_starts(97, 13)
    summed, count = 0.0, 0
    read = jax.jit(build(model).apply)
    for start in starts:
        part = corpus[start : start + 14].astype(np.int32)
        tokens = np.zeros((1, 13), np.int32)
        tokens[0, : len(part) - 1] = part[:-1]
        more = numpy_loss(read({"params": params}, tokens)[0][0, : len(part) - 1], part[1:])
        summed, count = summed + more[0], count + more[1]
    assert count == 96
    scores = chex.assert_max_traces(batch_scores(model), n=1)
    step = make_eval_step(scores, lambda c, s: windows(c, s, 13))
    padded = np.concatenate([starts, np.full(-len(starts) % 3, 97)]).reshape(-1, 3)
    found = evaluation.evaluate(step, params, (jnp.asarray(corpus),), padded.astype(np.int32))
    assert_near(found.loss, summed / count, 1e-6)


@pytest.mark.slow
def test_run_is_saved_in_folder_and_loaded(config):
    config = replace(config, log_every=8, sample_tokens=7, checkpoint_every=20)
    result = fit(config)
    folder = RunFolder(Path(config.out))
    assert sorted(p.name for p in folder.path.iterdir()) == [
        "checkpoints", "config.json", "loss.png", "metrics.jsonl", "sample.txt", "scores.json",
        "tokenizer.json",
    ]  # fmt: skip
    assert folder.read_config() == result.config
    assert result.config.model.vocab_size == len(set(Path(config.data).read_text()))
    lines = folder.read_metrics()
    assert [line["step"] for line in lines] == [1, 5, 8, 10, 15, 16, 20]
    assert [line["step"] for line in lines if "val_loss" in line] == [5, 10, 15, 20]
    assert {*lines[0]} == {"step", "loss", "learning_rate", "grad_norm", *OF_THE_MACHINE}
    assert lines[-1]["val_loss"] == result.val_loss
    rates = jax.jit(learning_rate_schedule(config))
    assert [line["learning_rate"] for line in lines] == [
        float(rates(line["step"] - 1)) for line in lines
    ]
    assert_near(lines[2]["learning_rate"], numpy_rate(config, 7), 1e-6)
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (folder.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder.path / "sample.txt").read_text() == result.sample + "\n"
    assert len(result.sample) > 0
    assert result.val_loss_per_character == pytest.approx(result.val_loss)  # the text is ASCII
    best = min((line["val_loss"], line["step"]) for line in lines if "val_loss" in line)[1]
    assert result.best_step == best
    assert saved_steps(folder.checkpoints) == sorted({best, 15, 20})
    manifest = checkpoint.verify(checkpoint.step_path(folder.checkpoints, 20))
    assert manifest.metadata["val_loss"] == result.val_loss
    last, chosen = load_run(config.out, "last"), load_run(config.out)
    assert (last.step, chosen.step, chosen.which) == (20, best, "best")
    assert_same_state(last.params, result.state.params)
    assert last.config == result.config.model and last.run == result.config
    assert last.tokenizer.to_bytes(last.tokenizer.encode("the cat")) == b"the cat"


def test_smoothed_curve_does_not_lag_and_stays_within_loss_range(rng):
    rising = tuple(float(n) for n in range(211))
    assert_near(smooth(rising), rising, 1e-12)
    noise = tuple(rng.standard_normal(211))
    found = smooth(noise)
    assert (found[0], found[-1]) == pytest.approx((noise[0], noise[-1]))
    assert_near(found[100], np.mean(noise[96:105]), 1e-9)


@pytest.mark.slow
def test_random_evaluation_batches_are_the_same_every_time(config, monkeypatch):
    seen = []

    def spy(step, params, held_out, batches):
        seen.append([starts.tolist() for starts in batches])
        return Scores(1.0, 0.5)

    monkeypatch.setattr(evaluation, "evaluate", spy)
    fit(replace(config, eval_batches=2), stop=after(12))
    assert len(seen) == 2
    assert np.shape(seen[0]) == (2, 3)
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_three_fifty_step_runs_compile_once(config, traced_once):
    fit(config)
    fit(replace(config, out=config.out + "-2", seed=3, keep=1), stop=after(10))
    assert fit(replace(config, out=config.out + "-3", seed=2**32 - 1)).step == 20
    with pytest.raises(AssertionError, match="traced > 1 times"):
        fit(replace(config, out=config.out + "-4", batch_size=2))


@pytest.mark.slow
def test_training_step_has_no_implicit_transfers_or_nans(config):
    fit(config, stop=after(1))  # compile and initialise
    again = replace(config, out=config.out + "-again")
    with jax.transfer_guard("disallow"), jax.debug_nans(True), jax.checking_leaks():
        assert fit(again, stop=after(6)).step == 6


@pytest.mark.long
def test_finished_run_can_be_resumed_and_extended(config):
    first = fit(config)
    again = fit(config, resume=True)
    assert again.val_loss == first.val_loss
    assert_same_state(again.state, first.state)
    assert fit(replace(config, steps=22), resume=True).step == 22
    assert RunFolder(Path(config.out)).read_config().steps == 22
    with pytest.raises(ConfigError, match="steps is 20: the run is already at step 22"):
        fit(config, resume=True)


@pytest.fixture
def started(config) -> TrainConfig:
    """A run that stopped after step 7."""
    fit(config, stop=after(7))
    return config


def contents(folder: str) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


@pytest.mark.slow
def test_run_does_not_resume_with_changed_settings(started, text, tmp_path):
    before = contents(started.out)
    wrong = changed(replace(started, learning_rate=0.5, seed=3), d_model=32)
    with pytest.raises(ConfigError) as caught:
        fit(wrong, resume=True)
    for part in ("model.d_model: 22 -> 32", "learning_rate: 0.001 -> 0.5", "seed: 17 -> 3"):
        assert part in str(caught.value)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("cat", "dog"))
    with pytest.raises(ConfigError, match=r"data \(sha256\): \w+ -> \w+"):
        fit(replace(started, data=str(other)), resume=True)
    assert contents(started.out) == before
    moved = tmp_path / "moved.txt"
    moved.write_bytes(text.read_bytes())
    moved_on = fit(replace(started, data=str(moved)), resume=True, stop=after(2))
    assert moved_on.step == 9


@pytest.mark.slow
def test_existing_run_is_not_overwritten(started):
    before = contents(started.out)
    with pytest.raises(ConfigError, match="contains a run"):
        fit(started)
    assert contents(started.out) == before


@pytest.mark.slow
def test_another_active_run_in_folder_is_reported(started):
    before = contents(started.out)
    with locked(Path(started.out)):
        owner = (Path(started.out) / "lock").read_text().strip()
        for resume in (False, True):
            with pytest.raises(RunError, match=f"process {owner} is training here"):
                fit(started, resume=resume)
    assert contents(started.out) == before


@pytest.mark.slow
def test_stale_run_lock_is_replaced(started):
    lock = Path(started.out) / "lock"
    lock.write_text("1\n")  # a live process that does not hold the lock
    assert fit(started, resume=True, stop=after(1)).step == 8
    assert not lock.exists()


class Recorder(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.slow
def test_damaged_checkpoint_is_reported_and_previous_one_resumes(config):
    whole = fit(config)
    parts = replace(config, out=config.out + "-parts")
    fit(parts, stop=after(13))
    folder = Path(parts.out) / "checkpoints"
    assert saved_steps(folder)[-2:] == [10, 13]
    file = largest_file(folder / "step-00000013", "opt_state")
    content = bytearray(file.read_bytes())
    content[99] ^= 16
    file.write_bytes(content)
    recorder = Recorder()
    fit(replace(parts, keep=1), resume=True, progress=recorder, stop=after(1))
    assert (
        f"{file} has the wrong SHA-256 checksum; trying the previous checkpoint" in recorder.lines
    )
    assert saved_steps(folder)[-1] == 11
    aside = folder / "step-00000013.damaged"
    assert (aside / file.relative_to(folder / "step-00000013")).read_bytes() == content
    resumed = fit(parts, resume=True)
    assert_same_state(resumed.state, whole.state)


@pytest.mark.slow
def test_run_without_intact_checkpoint_does_not_resume(started):
    for path in Path(started.out).glob("checkpoints/step-*"):
        largest_file(path, "params").write_bytes(b"")
    before = contents(started.out)
    with pytest.raises(CheckpointError, match=r"/params/\S+ has 0 bytes"):
        fit(started, resume=True)
    assert contents(started.out) == before


@pytest.mark.slow
def test_run_that_lost_checkpoints_is_not_restarted(started):
    for path in Path(started.out).glob("checkpoints/step-*"):
        path.rename(path.with_name("elsewhere-" + path.name))
    before = contents(started.out)
    with pytest.raises(CheckpointError, match=r"left .*reaches step 7, and step 5 was saved"):
        fit(started, resume=True)
    assert contents(started.out) == before


@pytest.mark.slow
def test_run_in_its_own_data_folder_resumes(config, text, tmp_path):
    (tmp_path / "texts").mkdir()
    content = text.read_bytes()[:-1]  # reading appends a newline
    (tmp_path / "texts" / "a.txt").write_bytes(content)
    inside = replace(config, data=str(tmp_path / "texts"), out=str(tmp_path / "texts" / "one"))
    fit(inside, stop=after(2))
    assert fit(inside, resume=True, stop=after(1)).step == 3
    other = load_dataset(replace(inside, out=str(tmp_path / "texts" / "two")))
    assert other.sha256 == load_dataset(replace(inside, out=str(tmp_path / "two"))).sha256
    assert len(other.train) + len(other.val) == len(content) + 1


def test_folder_with_only_stale_lock_is_treated_as_unused(tmp_path):
    (tmp_path / "lock").write_text("1\n")
    check_unused(tmp_path)
    assert not list(tmp_path.iterdir())


def test_run_with_any_name_can_be_plotted(tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda it, *to, **kw: drawn.append(it) or save(it, *to, **kw)
    )
    folder = RunFolder(tmp_path / "f$_$x")
    folder.path.mkdir()
    folder.metrics_file.write_text('{"step": 1, "loss": 2.5}\n')
    plot_losses(folder)
    assert (folder.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    ((axes,),) = (figure.axes for figure in drawn)
    assert axes.get_title(loc="left") == "f$_$x"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers=[1,2]", "a b*?{c} 100% #\nn\u0303", "~"])
def test_run_in_folder_with_any_name_loads_and_resumes(config, name):
    odd = replace(config, out=f"{config.out}/{name}/")
    fit(odd, stop=after(2))
    assert fit(odd, resume=True, stop=after(1)).step == 3
    assert load_run(odd.out).step == 3


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (b"caf\xe9".decode("utf-8", "surrogateescape"), "must be UTF-8"),
        ("gs://bucket/run", "must be a folder on this machine, not an address"),
        ("a\0b", "must be the name of a folder"),
        ("/".join(["d" * 97] * 41), "must have at most 3840 bytes, not 40.."),
    ],
)
def test_invalid_run_folder_name_is_rejected_immediately(config, name, rule):
    with pytest.raises(ConfigError, match=rf"^out is .*{rule}$"):
        fit(replace(config, out=name, data="no such file"))


@pytest.mark.slow
def test_run_folder_is_unaffected_by_changing_working_directory(config, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def moved() -> bool:
        monkeypatch.chdir(tmp_path / "elsewhere")
        return True

    fit(replace(config, out="here"), stop=moved)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert load_run(tmp_path / "here").step == 1


@pytest.mark.slow
@pytest.mark.parametrize("code", ["ENOLCK", "ENOTSUP", "EOPNOTSUPP"])
def test_file_system_without_locks_raises_error_and_leaves_no_files(config, monkeypatch, code):
    def refuse(handle, how):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", refuse)
        with pytest.raises(
            OSError, match=r"does not support locks .*; choose a local disk"
        ) as caught:
            fit(config)
        assert caught.value.filename == str(Path(config.out).absolute())
    assert not Path(config.out).exists()
    assert fit(config, stop=after(1)).step == 1


@pytest.mark.slow
def test_changed_run_tokenizer_is_detected(started):
    file = Path(started.out) / "tokenizer.json"
    file.write_text(file.read_text().replace("a", "b", 1))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has the wrong SHA-256 checksum"):
        fit(started, resume=True)


@pytest.mark.slow
def test_run_interrupted_before_first_checkpoint_restarts(config):
    whole = fit(replace(config, out=config.out + "-whole"))
    fit(config, stop=after(3))
    for path in Path(config.out).glob("checkpoints/step-*"):
        path.rename(path.with_name(path.name + ".tmp"))
    assert_same_state(fit(config, resume=True).state, whole.state)
    assert not list(Path(config.out).rglob("*.tmp"))


@pytest.mark.slow
def test_full_disk_stops_run_and_keeps_checkpoints(config):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class DiskFiller(Silent):
        def step(self, step, loss, tokens_per_second):
            if step == 8:
                while not saved_steps(Path(config.out) / "checkpoints"):
                    time.sleep(0.01)  # step 5 is being written
                resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))

    try:
        with pytest.raises(OSError, match="too large"):
            fit(config, progress=DiskFiller())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder = Path(config.out) / "checkpoints"
    assert saved_steps(folder) == [5]
    checkpoint.verify(folder / "step-00000005")
    whole = fit(replace(config, out=config.out + "-whole"))
    assert_same_state(fit(config, resume=True).state, whole.state)
    assert not list(Path(config.out).rglob("*.tmp"))


@pytest.mark.slow
def test_folder_that_cannot_be_created_raises_os_error(config, text):
    with pytest.raises(OSError, match="Not a directory"):
        fit(replace(config, out=str(text / "run")))


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_language_task_requires_decoder(config, kind):
    rule = f"task is 'language': needs a decoder, but the model is of kind '{kind}'"
    with pytest.raises(ConfigError, match=rule):
        fit(changed(config, kind=kind))
    assert not Path(config.out).exists()


@pytest.mark.long
def test_vocabulary_can_be_larger_than_tokenizer_but_not_smaller(config):
    with pytest.raises(ConfigError, match="vocab_size is 3: must be at least"):
        fit(config, vocab_size=3)
    assert not Path(config.out).exists()
    wide = fit(config, vocab_size=97, stop=after(1))
    assert wide.config.model.vocab_size == 97
    assert wide.state.params["embed"]["tokens"].shape == (97, 22)


def test_model_larger_than_memory_is_rejected_before_creation(config):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=r"model has [\d,]+ parameters: needs [\d,.]+ GiB on"):
        fit(changed(config, d_model=10**9))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    assert not Path(config.out).exists()


@pytest.mark.parametrize("model", [ModelConfig(), RecurrentConfig()])
def test_step_exceeding_memory_error_lists_remedies(model):
    memory = StepMemory(0, 0, 0, 2**60)
    rule = r"batch_size is 5: a step needs [\d,.]+ GiB on each device .* with more accumulation, "
    with pytest.raises(ConfigError, match=rule) as error:
        check_step(memory, TrainConfig(model=model, batch_size=5))
    assert ("remat=" in str(error.value)) == isinstance(model, ModelConfig)


def test_too_short_text_leaves_no_run_folder(config, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("abc" * 9)
    with pytest.raises(DataError, match="held-out part has 6 tokens"):
        fit(replace(config, data=str(short)))
    assert not Path(config.out).exists()


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_config_round_trips_through_file(name):
    kind = "decoder" if name is None else preset(name).kind
    task = next(task() for task in TASKS.values() if kind in task().shapes)
    config = replace(train_preset(name, task=task), eval_batches=7, learning_rate=1 / 3)
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize("architecture", names_of(AnyModelConfig))
@pytest.mark.parametrize("name", TASKS)
def test_every_recipe_round_trips_through_file(name, architecture):
    try:
        config = task_recipe(TASKS[name](), architecture)
    except ConfigError as error:
        assert f"task {name!r} needs " in str(error)
        return
    again = config_from_json(config_to_json(config))
    assert again == config
    assert type(again.model) is type(config.model)


def test_absent_config_keys_use_defaults():
    config = config_from_json('{"model": {"kind": "decoder", "d_model": 8}, "steps": 7}')
    assert config == TrainConfig(model=ModelConfig(d_model=8), steps=7)
    assert config.task == LanguageTask()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"stepz": 3}', "stepz: unknown key; did you mean steps?"),
        ('{"model": {"d_modle": 3}}', "model.d_modle: unknown key; did you mean model.d_model?"),
        ('{"auto_map": {}}', "auto_map: unknown key"),
        ('{"model": {"rope": {"theta": 3}}}', "model.rope: unknown key"),
        ('{"model": 3}', "model is 3: must be an object"),
        ('{"model": {"d_model": "512"}}', "model.d_model is '512': must be of type int"),
        ('{"model": {"num_heads": 0}}', "model.num_heads is 0: must be positive"),
        ('{"model": {"num_layers": true}}', "model.num_layers is True: must be of type int"),
        ('{"model": {"d_model": 1e9}}', "model.d_model is 1000000000.0: must be of type int"),
        ('{"learning_rate": NaN}', "NaN is not a number"),
        ('{"learning_rate": 1e999}', "learning_rate is inf: must be a finite number"),
        ('{"steps": 1, "steps": 2}', "'steps' appears twice"),
        ('{"steps": ' + "9" * 5000 + "}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "the config is []: must be an object"),
        ("", "not JSON"),
    ],
)
def test_hostile_run_config_error_names_key(text, message):
    with pytest.raises(ConfigError) as caught:
        config_from_json(text)
    assert message in str(caught.value)


@pytest.mark.slow
def test_oversized_config_is_rejected_without_reading(tmp_path):
    folder = RunFolder(tmp_path)
    folder.config_file.write_bytes(b" " * (2**23 + 1))
    with pytest.raises(ConfigError, match="longer than 8388608 bytes"):
        folder.read_config()
