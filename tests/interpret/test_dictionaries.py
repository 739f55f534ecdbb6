"""Dictionaries: recovery of known directions, training runs, and formulas in NumPy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import transformer_jax as tj
from tests.interpret.tiny import B, D, T, draw, model_of
from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.config import ConfigError
from transformer_jax.config.optimizers import AdamW
from transformer_jax.config.tasks import CustomTask
from transformer_jax.interpret import (
    Dictionary,
    DictionaryTask,
    dictionary_learner,
    dictionary_scores,
    feature_examples,
    load_dictionary,
)
from transformer_jax.interpret.dictionary_task import DictionaryWindows
from transformer_jax.loading import TextModel
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.training import fit
from transformer_jax.training.batch import Batch
from transformer_jax.training.tasks.task import Tokenizers, TrainingTask

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEAR = 10 * FORWARD_F32
WIDTH, TRUE, FEATURES = 16, 31, 62
FOUND = 0.9
"""Required mean, over true directions, of the largest cosine; a random dictionary reaches 0.58."""


def directions() -> np.ndarray:  # [TRUE, WIDTH]
    rows = np.random.default_rng(5).standard_normal((TRUE, WIDTH))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def superposed(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return sums of two random directions; there are more directions than dimensions."""
    rng = np.random.default_rng(seed)
    chosen = rng.permuted(np.broadcast_to(np.arange(TRUE), (*shape, TRUE)), axis=-1)[..., :2]
    sizes = rng.uniform(0.5, 1.5, (*shape, 2, 1))
    return (sizes * directions()[chosen]).sum(-2).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Superposed(CustomTask):
    """Learn the directions of synthetic values."""

    active: int | None = None
    l1: float | None = None

    @property
    def loaded_by(self):
        return "tests.made"

    def load(self, config, tokenizers, vocab_size):
        return Made(config, self)


class Made(TrainingTask):
    def __init__(self, config, task):
        self.config, self.tokenizers = config, Tokenizers(CharTokenizer("ab"))
        self.sha256, self.tokens_per_step = "made", config.batch_size
        self.learner = dictionary_learner(WIDTH, WIDTH, FEATURES, active=task.active, l1=task.l1)

    def inputs(self, step):
        x = superposed(step + 100, (1, self.config.batch_size, 1))
        return Batch(x, x)

    def evaluation(self):
        x = superposed(7, (self.config.batch_size, 1))
        yield Batch(x, x)

    def described(self):
        return "made values"


def largest_cosine(decoder) -> float:
    rows = np.asarray(decoder, np.float64)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return float((directions() @ rows.T).max(axis=1).mean())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [dict(active=2), dict(l1=0.3)])
def test_training_recovers_superposed_directions(kind, tmp_path):
    config = tj.TrainConfig(
        model=tj.ModelConfig(d_model=8, num_layers=1, num_heads=1), out=str(tmp_path / "run"),
        steps=800, batch_size=256, learning_rate=1e-2, optimizer=AdamW(weight_decay=0.0),
        eval_every=800, checkpoint_every=800, sample_tokens=0,
    )  # fmt: skip
    result = fit(config, task=Superposed(**kind))
    random = np.random.default_rng(9).standard_normal((FEATURES, WIDTH))
    found = largest_cosine(result.state.params["decoder"])
    assert largest_cosine(random) < 0.65 < FOUND < found, (largest_cosine(random), found)
    assert result.accuracy > 0.8  # the share of variance explained
    assert result.perplexity is None


def random_dictionary(place, target=None, *, active=3, features=23, width=D, target_width=D):
    rng = np.random.default_rng(11)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return Dictionary(
        encoder=draw(width, features), encoder_bias=draw(features),
        decoder=draw(features, target_width), bias=draw(target_width), centre=draw(width),
        size=np.float32(1.3), target_centre=draw(target_width), target_size=np.float32(0.7),
        place=place, target=target or place, active=active,
    )  # fmt: skip


def rebuilt(dictionary: Dictionary, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return features and reconstructions, in float64."""
    a = {f.name: getattr(dictionary, f.name) for f in dataclasses.fields(dictionary)}
    x = (np.asarray(x, np.float64) - a["centre"]) / a["size"]
    f = np.maximum(x @ a["encoder"] + a["encoder_bias"], 0)
    if dictionary.active is not None:
        f = np.where(f >= np.sort(f, axis=-1)[..., -dictionary.active, None], f, 0)
    return f, (f @ a["decoder"] + a["bias"]) * a["target_size"] + a["target_centre"]


@pytest.mark.parametrize("active", [3, None])
def test_dictionary_features_reconstructions_and_loss_match_formulas(active):
    dictionary = random_dictionary("block_0/residual", active=active)
    rng = np.random.default_rng(13)
    x, y = (rng.standard_normal((B, T, D)).astype(np.float32) for _ in range(2))
    f, made = rebuilt(dictionary, x)
    encoded = jax.jit(dictionary.encode)(x)
    assert_near(encoded, f, NEAR)
    assert_near(jax.jit(dictionary.decode)(encoded), made, NEAR)
    l1 = None if active else 0.3
    learner = dictionary_learner(D, D, 23, active=active, l1=l1)
    names = "encoder encoder_bias decoder bias centre size target_centre target_size".split()
    params = {name: getattr(dictionary, name) for name in names}
    valid = rng.random((B, T)) < 0.7
    mean, weight = learner.loss(params, Batch(x, y, valid=valid), None)
    each = (((y - made) / dictionary.target_size) ** 2).sum(-1)
    if l1 is not None:
        each = each + l1 * f @ np.linalg.norm(np.float64(dictionary.decoder), axis=1)
    assert weight == valid.sum()
    residual, spread = (((y - part) ** 2)[valid].sum() for part in (made, dictionary.target_centre))
    scores = learner.scores(params, Batch(x, y, valid=valid))
    np.testing.assert_allclose(scores, [mean * weight, weight, weight * (1 - residual / spread)],
                               rtol=1e-4)  # fmt: skip
    np.testing.assert_allclose(mean, (each / D)[valid].mean(), rtol=1e-4)
    slopes = jax.jit(jax.grad(lambda p: learner.loss(p, Batch(x, y), None)[0]))(params)
    assert all(np.abs(slopes[name]).max() > 0 for name in names[:4])
    assert all((np.asarray(slopes[name]) == 0).all() for name in names[4:])


def test_initial_dictionary_has_unit_directions_that_an_autoencoder_reads():
    for width, target in (5, 5), (5, 7):
        first = dictionary_learner(width, target, 11, active=3).fresh(jax.random.key(2))
        assert first["encoder"].shape == (width, 11) and first["decoder"].shape == (11, target)
        for directions in first["encoder"].T, first["decoder"]:
            assert_near(np.linalg.norm(directions, axis=1), np.ones(11), FORWARD_F32)
        same = width == target
        assert np.array_equal(first["encoder"].T, first["decoder"]) == same


def test_dictionary_run_must_have_the_config_of_the_studied_model():
    studied = tj.ModelConfig(vocab_size=3, d_model=8, num_layers=1, num_heads=2)
    task = DictionaryTask(of="run", place="block_0/residual", features=7, active=2)
    model = TextModel(studied, {}, CharTokenizer("ab"))
    config = tj.TrainConfig(model=studied, init_from="other", tokenizer="pretrained")
    with pytest.raises(ConfigError, match="init_from is 'other': must be None: a dictionary"):
        DictionaryWindows(config, task, model)
    with pytest.raises(ConfigError, match="of is 'run': model must equal the config of that"):
        DictionaryWindows(dataclasses.replace(config, model=tj.ModelConfig()), task, model)


@pytest.mark.slow_except("block_1/feed_forward/input-block_1/feed_forward/output-False")
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("block_0/residual", None),
        ("block_1/attention/heads", None),
        ("block_1/feed_forward/input", "block_1/feed_forward/output"),
    ],
)
def test_feature_scores_and_examples_match_captured_values(place, target, scanned):
    model, params = model_of("gpt2", scanned=scanned)
    width = 24 if place.endswith("heads") else D
    dictionary = random_dictionary(place, target, width=width, target_width=width, features=29)
    tokens, target = draw(3, rows=5), target or place
    run = jax.jit(lambda x: model.apply({"params": params}, x, capture=(place, target)))
    logits, _, captured = run(tokens)
    x, y = (np.asarray(captured[name], np.float64).reshape(5, T, -1) for name in (place, target))
    f, made = rebuilt(dictionary, x)

    def nats(logits):
        log_p = np.asarray(logits, np.float64)[:, :-1]
        log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
        return -np.take_along_axis(log_p, tokens[:, 1:, None], axis=2).mean()

    def with_target(value):
        put = value.reshape(captured[target].shape).astype(np.float32)
        return nats(model.edited({target: lambda _: put}).apply({"params": params}, tokens)[0])

    found = dictionary_scores(model, params, dictionary, tokens, batch_size=2)
    assert np.isfinite(dictionary_scores(model, params, dictionary, tokens[:, :2])).all()
    spread = ((y - y.mean((0, 1))) ** 2).sum()
    wanted = [
        1 - ((y - made) ** 2).sum() / spread, (f > 0).sum() / 35,
        1 - (f > 0).any((0, 1)).mean(), nats(logits), with_target(made), with_target(0 * y),
    ]  # fmt: skip
    np.testing.assert_allclose(found, wanted, rtol=2e-4)
    recovered = (wanted[5] - wanted[4]) / (wanted[5] - wanted[3])
    np.testing.assert_allclose(found.loss_recovered, recovered, rtol=5e-3)
    features = np.array([17, 2, 8])
    looked = feature_examples(model, params, dictionary, tokens, features, count=4, batch_size=2)
    for values, rows, at, i in zip(*looked, features, strict=True):
        largest = -np.sort(-f[..., i].ravel())[:4]
        assert_near(values, largest, NEAR)
        assert_near(f[rows, at, i], largest, NEAR)
    usual = jax.eval_shape(lambda: feature_examples(model, params, dictionary, tokens, features))
    assert usual.values.shape == usual.rows.shape == usual.positions.shape == (3, 10)


TEXT = "the cat sat on the mat. the dog sat on the log. " * 30


def base_run(path: Path) -> str:
    (path / "text.txt").write_text(TEXT)
    run = str(path / "model")
    fit(
        tj.TrainConfig(
            model=tj.ModelConfig(d_model=16, num_layers=2, num_heads=2, max_len=16),
            data=str(path / "text.txt"), out=run, steps=3, batch_size=2, sample_tokens=0,
        )
    )  # fmt: skip
    return run


@pytest.mark.slow
def test_dictionary_run_resumes_bitwise_and_loads(tmp_path):
    base = base_run(tmp_path)
    m = tj.load(base)
    task = DictionaryTask(of=base, place="block_0/residual", features=37, active=4)

    def config(name, **changes):
        return tj.TrainConfig(
            model=m.config, data=str(tmp_path / "text.txt"), out=str(tmp_path / name), steps=9,
            batch_size=4, context=16, optimizer=AdamW(weight_decay=0.0), learning_rate=1e-2,
            eval_every=9, checkpoint_every=9, **changes,
        )  # fmt: skip

    whole = fit(config("whole"), task=task)
    stops = iter([False] * 3 + [True] * 9)
    cut = fit(config("cut"), task=task, stop=lambda: next(stops))
    assert cut.interrupted and cut.step == 4
    again = fit(config("cut"), task=task, resume=True)
    for name, leaf in whole.state.params.items():
        np.testing.assert_array_equal(leaf, again.state.params[name], err_msg=name)
    start = cut.state.params
    assert np.abs(start["decoder"] - whole.state.params["decoder"]).max() > 0
    for fixed in ("centre", "size", "target_centre", "target_size"):
        np.testing.assert_array_equal(start[fixed], whole.state.params[fixed])
    dictionary = load_dictionary(tmp_path / "cut")
    np.testing.assert_array_equal(dictionary.encoder, whole.state.params["encoder"])
    assert (dictionary.place, dictionary.target, dictionary.active) == (
        "block_0/residual",
        "block_0/residual",
        4,
    )
    assert whole.scores["l0"] <= 4 and set(whole.scores) == {
        "variance_explained", "l0", "dead", "loss_recovered"
    }  # fmt: skip
    assert whole.scores["variance_explained"] == pytest.approx(whole.accuracy, abs=0.2)
    assert "variance_explained" in (tmp_path / "whole" / "sample.txt").read_text()
    assert isinstance(m.edited(dictionary.edit()).generate("the", 5), str)
    with pytest.raises(
        ConfigError, match=r"it contains no text model; load it with .*\.interpret\.load_dict"
    ):
        tj.load(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"must be a run with task 'dictionary', not 'language'"):
        load_dictionary(base)
    with pytest.raises(ConfigError, match=r"step is 5: run .* has checkpoints only for steps"):
        load_dictionary(tmp_path / "whole", 5)
    for changes, message in [
        (dict(optimizer=AdamW()), "optimizer.weight_decay is 0.1: must be 0 for a dictionary"),
        (dict(model=dataclasses.replace(m.config, num_heads=4)), "model must equal the config"),
    ]:
        with pytest.raises(ConfigError, match=message):
            fit(dataclasses.replace(config("other"), **changes), task=task)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unnamed(Superposed):
    """Task with a learner but without `loaded_by`."""

    loaded_by = None


def test_task_with_custom_learner_must_name_loader(tmp_path):
    config = tj.TrainConfig(model=tj.ModelConfig(d_model=8), out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="loaded_by is None: must be set"):
        fit(config, task=Unnamed(active=2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(), "set exactly one of active and l1 .l1 is None"),
        (dict(active=3, l1=0.1), "active is 3: set exactly one of active and l1 .l1 is 0.1"),
        (dict(active=8), "active is 8: must be at most features, 7"),
        (dict(l1=-1.0), "l1 is -1.0: must be positive"),
    ],
)
def test_invalid_dictionary_tasks_are_rejected(fields, message):
    with pytest.raises(ConfigError, match=message):
        DictionaryTask(of="run", place="block_0/residual", features=7, **fields)


@pytest.mark.slow
def test_cross_branch_edits_and_missing_features_are_rejected():
    model, params = model_of("gpt2")
    dictionary = random_dictionary("block_0/residual", "block_1/residual")
    with pytest.raises(
        ValueError, match=r"edit of block_0/residual and block_1/residual: both must be"
    ):
        dictionary.edit()
    with pytest.raises(ValueError, match=r"features is .*: must be a list of indices from 0 to 22"):
        feature_examples(model, params, dictionary, draw(), np.array([23]))
    traced = jax.jit(
        lambda n: feature_examples(model, params, dictionary, draw(), n, count=2).values
    )
    assert np.isfinite(traced(np.array([3]))).all()
    assert np.isnan(traced(np.array([3, 23, -1]))[1:]).all()
    with pytest.raises(ValueError, match=r"count is 15: must be from 1 to 14"):
        feature_examples(model, params, dictionary, draw(), np.array([3]), count=15)
    with pytest.raises(
        ValueError, match=r"dictionary_scores received Encoder and rows of length 7"
    ):
        dictionary_scores(*model_of("bert"), dictionary, draw())
