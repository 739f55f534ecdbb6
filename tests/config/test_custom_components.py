"""Custom functions, positions and tasks in configs: results, storage by name, and errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.checkpoints.run_folder import config_from_json, config_to_json
from transformer_jax.config import ConfigError
from transformer_jax.config.positions import CustomPositions
from transformer_jax.config.tasks import CustomTask
from transformer_jax.models.factory import build
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.training import fit
from transformer_jax.training.batch import Batch
from transformer_jax.training.rows import laid_out
from transformer_jax.training.tasks import Tokenizers
from transformer_jax.training.tasks.task import RowsTask

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tj.ModelConfig(
    vocab_size=11, d_model=8, num_layers=1, num_heads=2, max_len=17, init_std=0.3
)


def cubed(x):
    return x**3


@dataclass(frozen=True)
class Turned(CustomPositions):
    """Rotate the first two dimensions of a head by an angle per position, like `Rope`."""

    base: float = 10.0

    def rotate(self, x, positions):
        angles = (positions / self.base)[..., None, None]
        a, b, rest = jnp.split(x, (1, 2), axis=-1)
        c, s = jnp.cos(angles), jnp.sin(angles)  # [B, T, 1, 1]
        return jnp.concatenate([a * c - b * s, a * s + b * c, rest], axis=-1)


@dataclass(frozen=True)
class Added(CustomPositions):
    """Add sines of the position at several frequencies, like `Sinusoidal`."""

    def embed(self, positions, d_model):
        return jnp.sin(positions[..., None] * jnp.arange(d_model, dtype=jnp.float32)[None, None])


@dataclass(frozen=True)
class Sloped(CustomPositions):
    """Subtract the distance, like ALiBi."""

    def bias(self, num_heads):
        return tj.ALiBi(2.0 ** (-8.0 * jnp.arange(1, num_heads + 1) / num_heads))


def applied(config, params, tokens):
    return np.asarray(jax.jit(build(config).apply)({"params": params}, tokens)[0])


TOKENS = np.arange(13)[None] % 11


class Bare(CustomPositions):
    def embed(self, positions, d_model):
        return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "positions", [Turned(), Added(), Sloped()], ids=lambda one: type(one).__name__
)
def test_cached_decode_with_custom_positions_matches_full_forward(positions, key):
    config = replace(CONFIG, positions=positions)
    params = tj.init_params(config, key)
    without = applied(replace(config, positions=None), params, TOKENS)
    assert np.abs(applied(config, params, TOKENS) - without).max() > 1e-3
    out = tj.generate(
        tj.make_step(build(config)), params, TOKENS[:, :5], tj.init_cache(config, 1, 16),
        num_tokens=7, capture=("logits",),
    )  # fmt: skip
    whole = np.concatenate([TOKENS[:, :5], out.tokens], axis=1)
    logits = applied(config, params, whole[:, :-1])[:, 4:]
    np.testing.assert_allclose(out.captured["logits"], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_custom_alibi_matches_alibi(key):
    """A custom bias and the built-in name give the same logits."""
    params = tj.init_params(replace(CONFIG, positions="alibi"), key)
    ours = applied(replace(CONFIG, positions="alibi"), params, TOKENS)
    custom = applied(replace(CONFIG, positions=Sloped()), params, TOKENS)
    np.testing.assert_allclose(custom, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_activation_function_matches_activation_name(key):
    ours = replace(CONFIG, activation="silu")
    params = tj.init_params(ours, key)
    custom = replace(CONFIG, activation=jax.nn.silu)
    np.testing.assert_allclose(
        applied(custom, params, TOKENS), applied(ours, params, TOKENS), rtol=1e-5, atol=1e-6
    )
    assert hash(custom) == hash(replace(CONFIG, activation=jax.nn.silu))
    assert "cubed" in repr(replace(CONFIG, activation=cubed))
    assert "0x" not in repr(replace(CONFIG, activation=jax.nn.mish))


@pytest.mark.parametrize(
    "change",
    [
        dict(activation=cubed),
        dict(activation=jax.nn.mish),
        dict(positions=Turned(base=7.0)),
        dict(positions=Added()),
    ],
    ids=lambda change: str(*change),
)
def test_config_stores_custom_values_by_name(change):
    run = tj.TrainConfig(model=replace(CONFIG, **change))
    text = config_to_json(run)
    assert config_from_json(text) == run
    named = {
        "activation": ("test_custom_components:cubed", "jax.nn:mish"),
        "positions": ("test_custom_components:",),
    }
    assert any(name in text for name in named[next(iter(change))])


def save(config) -> None:
    tj.save_pretrained("/nonexistent/nowhere", config, tj.init_params(config, jax.random.key(0)))


def gone(text: str) -> Any:
    return config_from_json(text.replace("test_custom_components:", "test_gone:"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replace(CONFIG, activation=jax.nn), "activation is .*: must be one of 'relu'"),
        (lambda: replace(CONFIG, activation=3), "activation is 3: must be one of 'relu'"),
        (lambda: replace(CONFIG, positions=Turned), "positions is .*: must be"),
        (lambda: replace(CONFIG, positions=Turned([])), "positions is .*must be hashable"),
        (lambda: replace(CONFIG, positions=Bare()), "positions is of class Bare: must be a frozen"),
        (lambda: replace(CONFIG, positions=Bare()), r"@dataclass\(frozen=True\) above class Bare"),
        (lambda: replace(CONFIG, dropout=cubed), "dropout is .*must be"),
        (lambda: replace(CONFIG, activation="os:nothing"), "os has no such name"),
        (
            lambda: config_to_json(tj.TrainConfig(model=replace(CONFIG, activation=lambda x: x))),
            "activation is .*must be defined in a module under",
        ),
        (
            lambda: gone(config_to_json(tj.TrainConfig(model=replace(CONFIG, activation=cubed)))),
            r"activation is 'tests\.config\.test_gone:cubed': .*is not imported; import it first",
        ),
        (
            lambda: gone(config_to_json(tj.TrainConfig(model=replace(CONFIG, positions=Added())))),
            r"positions\.kind is 'tests.config.test_gone:Added': .*import it first",
        ),
        (
            lambda: config_from_json(
                config_to_json(tj.TrainConfig(model=replace(CONFIG, positions=Added()))).replace(
                    "tests.config.test_custom_components:Added", "os:getcwd"
                )
            ),
            r"positions\.kind is 'os:getcwd': must be a custom class for model.positions",
        ),
        (
            lambda: save(replace(CONFIG, activation=cubed)),
            "activation is .*no published family supports a custom function",
        ),
        (
            lambda: save(replace(CONFIG, positions=Sloped())),
            "positions is Sloped",
        ),
    ],
)
def test_invalid_custom_value_raises_one_line_error(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@dataclass(frozen=True, kw_only=True)
class Counting(CustomTask):
    """Learn the next letter of the alphabet."""

    letters: str = "abcdefg"

    def load(self, config, tokenizers, vocab_size):
        tokenizer = CharTokenizer(self.letters)
        ids = np.arange(len(self.letters), dtype=np.int32)
        rows = laid_out([Batch(np.roll(ids, -n)[:-1], np.roll(ids, -n)[1:]) for n in ids], None)
        config = replace(config, model=replace(config.model, vocab_size=len(ids)))
        return CountingRows(config, Tokenizers(tokenizer), "0" * 64, rows, rows)


class CountingRows(RowsTask):
    def sample(self, params):
        return "none"

    def judge(self, params, report=None):
        return {"counted": 1.0}


@pytest.mark.slow
def test_custom_task_run_is_trained_resumed_and_loaded(tmp_path):
    settings = dict(
        batch_size=5, context=6, eval_every=4, checkpoint_every=2, sample_tokens=0,
        learning_rate=1e-2, warmup_steps=1,
    )  # fmt: skip
    model = replace(CONFIG, num_layers=1)
    config = tj.TrainConfig(model=model, out=str(tmp_path / "run"), steps=4, **settings)
    whole = fit(config, task=Counting())
    assert whole.scores["counted"] == 1.0 and math.isfinite(whole.val_loss)
    stops = iter([False, True])
    half = replace(config, out=str(tmp_path / "half"))
    assert fit(half, task=Counting(), stop=lambda: next(stops)).interrupted
    resumed = fit(half, task=Counting(), resume=True)
    for one, two in zip(*(jax.tree.leaves(r.state.params) for r in (whole, resumed)), strict=True):
        np.testing.assert_array_equal(one, two)
    with pytest.raises(ConfigError, match=r"cannot resume with other settings: .*letters"):
        fit(replace(half, steps=5), task=Counting(letters="abcdefh"), resume=True)
    loaded = tj.load(tmp_path / "run")
    assert loaded.task == Counting() and len(loaded.generate("ab", 3)) == 3


def test_invalid_custom_task_is_rejected(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Broken(CustomTask):
        def load(self, config, tokenizers, vocab_size):
            return 3

    config = tj.TrainConfig(model=CONFIG, out=str(tmp_path / "run"))
    with pytest.raises(
        ConfigError, match="load returns an object of type int: must be a TrainingTask"
    ):
        fit(config, task=Broken())
    with pytest.raises(ConfigError, match=r"task is .*must be"):
        fit(config, task="counting")

    class Undecorated(Counting):
        pass

    with pytest.raises(ConfigError, match="task is of class Undecorated: must be a frozen"):
        fit(config, task=Undecorated())
