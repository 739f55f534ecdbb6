"""Custom kinds of models and tasks: registration, training, loading and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.checkpoints.run_folder import config_from_json, config_to_json
from transformer_jax.cli import run_flags
from transformer_jax.config import AnyModelConfig, ConfigError, TrainConfig, kinds, register
from transformer_jax.config.presets import task_recipe
from transformer_jax.config.tasks import CustomTask, ReverseTask, Task
from transformer_jax.decoding.step import AppliedStep
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.training import fit
from transformer_jax.training.batch import Batch
from transformer_jax.training.rows import laid_out
from transformer_jax.training.tasks import Tokenizers, load_task
from transformer_jax.training.tasks.task import RowsTask, with_vocabulary

pytestmark = pytest.mark.usefixtures("quick_compilation")

LETTERS = "abcde"


class Average(NamedTuple):
    vector: jax.Array  # [B, D]


@dataclass(frozen=True, kw_only=True)
class AverageConfig(AnyModelConfig):
    vocab_size: int = 7
    width: int = 3

    def build(self):
        return AverageLM(self)

    def init_state(self, batch):
        return Average(jnp.zeros((batch, self.width)))


class AverageLM(CheckedModule):
    """Predict a token from a running average of earlier ones; the newest has weight 1/2."""

    config: AverageConfig

    @nn.nowrap
    def as_step(self):
        return AppliedStep(self)

    @nn.compact
    def __call__(self, tokens, *, state=None, valid=None, at=None, key=None):
        cfg = self.config
        state = cfg.init_state(len(tokens)) if state is None else state
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        x = nn.Embed(cfg.vocab_size, cfg.width, name="embed")(tokens)

        def read(h, token):
            x, valid = token
            h = jnp.where(valid[:, None], (h + x) / 2, h)
            return h, h

        last, h = jax.lax.scan(read, state.vector, (x.swapaxes(0, 1), valid.T))
        h = h.swapaxes(0, 1)
        h = h if at is None else jnp.take_along_axis(h, at[..., None], axis=1)
        return nn.Dense(cfg.vocab_size, name="out")(h), Average(last)


@dataclass(frozen=True, kw_only=True)
class AlphabetTask(Task):
    """Continue the alphabet, which repeats after its last letter."""

    length: int = 5

    def load(self, config, tokenizers, vocab_size):
        tokenizers = Tokenizers(CharTokenizer(LETTERS)) if tokenizers is None else tokenizers
        rows = []
        for first in range(len(LETTERS)):
            text = "".join(LETTERS[(first + i) % len(LETTERS)] for i in range(self.length + 1))
            ids = tokenizers.tokenizer.encode(text)
            rows.append(Batch(ids[:-1], ids[1:]))
        config = with_vocabulary(config, tokenizers, vocab_size)
        return Alphabet(config, tokenizers, "no file", laid_out(rows, None), laid_out(rows, None))


class Alphabet(RowsTask):
    def sample(self, params):
        return "no sample"


@dataclass(frozen=True, kw_only=True)
class EmptyTask(Task):
    """A task without a `load`."""


@pytest.mark.usefixtures("registering")
def test_custom_model_and_task_are_trained_and_loaded_by_name(tmp_path):
    register(AnyModelConfig, average=AverageConfig)
    register(Task, alphabet=AlphabetTask)
    out = tmp_path / "run"
    config = TrainConfig(
        task="alphabet", model=AverageConfig(width=11), out=str(out), context=5, steps=60,
        batch_size=5, learning_rate=0.1, eval_every=60,
    )  # fmt: skip
    assert fit(config).val_loss < 0.1
    text = (out / "config.json").read_text()
    assert '"kind": "alphabet"' in text and '"kind": "average"' in text
    model = tj.load(out)
    assert model.config == AverageConfig(width=11, vocab_size=len(model.tokenizer.encode(LETTERS)))
    assert model.generate("ab", 7) == "cdeabcd"
    embed, out_layer = (model.params[name] for name in ("embed", "out"))
    h = np.zeros(11)
    for token in model.tokenizer.encode("ab"):
        h = (h + np.asarray(embed["embedding"], np.float64)[token]) / 2
    logits = h @ np.asarray(out_layer["kernel"], np.float64) + np.asarray(out_layer["bias"])
    want = logits - np.log(np.exp(logits).sum())
    tokens = jnp.asarray(model.tokenizer.encode("ab"))[None]
    found, _ = model.config.build().apply({"params": model.params}, tokens)
    np.testing.assert_allclose(jax.nn.log_softmax(found[0, -1]), want, atol=1e-5)


@pytest.mark.usefixtures("registering")
def test_registered_kind_has_training_recipe_and_round_trips():
    with pytest.raises(ConfigError, match="model is 'average'"):
        task_recipe(ReverseTask(), "average")
    register(AnyModelConfig, average=AverageConfig)
    config = task_recipe(ReverseTask(), "average")
    assert config.model == AverageConfig()
    text = config_to_json(config)
    assert config_from_json(text) == config
    assert (
        config_from_json(
            text.replace('"average"', '"window"').replace('"width": 3', '"context": 3')
        ).model.context
        == 3
    )


@pytest.mark.usefixtures("registering")
@pytest.mark.parametrize(
    "base, name, kind, rule",
    [
        (AnyModelConfig, "mine", AlphabetTask, "mine is .*AlphabetTask.*must be a subclass of A"),
        (Task, "mine", 3, "mine is 3: must be a subclass of Task, or its \"module:Class\""),
        (AnyModelConfig, "gru", AverageConfig, "the name 'gru' already belongs to .*recurrent:Rec"),
        (AnyModelConfig, "a", "m:WindowConfig", "a is m:WindowConfig: the name 'window' already"),
        (AnyModelConfig, "b", "m:DecoderConfig", "the name 'decoder' already belongs to .*ModelC"),
        (AnyModelConfig, "c", type("C", (AverageConfig,), {}), "must be a frozen dataclass"),
        (AnyModelConfig, "mean", AverageConfig, "mean is .*AverageConfig: must be named average"),
        (AnyModelConfig, "mean", "means", "mean is 'means': must be \"module:Class\""),
        (int, "mean", int, "base is <class 'int'>: must be AnyModelConfig or Task"),
        (CustomTask, "mine", AlphabetTask, "base is .*CustomTask.*: must be AnyModelConfig or"),
    ],
)  # fmt: skip
def test_invalid_kinds_cannot_be_registered(base, name, kind, rule):
    known = kinds.names_of(AnyModelConfig), kinds.names_of(Task)
    good = dict(average=AverageConfig) if base is AnyModelConfig else {}
    with pytest.raises(ValueError, match=rule):
        register(base, **good, **{name: kind})
    assert (kinds.names_of(AnyModelConfig), kinds.names_of(Task)) == known
    assert TrainConfig().model.kind == "decoder"


@pytest.mark.usefixtures("registering")
@pytest.mark.parametrize("place", ["no_such_module:Mean", "transformer_jax:Nope"])
def test_import_error_names_kind_that_cannot_be_imported(place):
    register(AnyModelConfig, mean=place)
    with pytest.raises(ValueError, match=f"mean is '{place}': .*(no_such_module|Nope)"):
        TrainConfig()


@pytest.mark.usefixtures("registering")
def test_registered_kind_has_flags_and_validated_fields():
    assert "--model.width" not in run_flags.FLAGS.names
    register(AnyModelConfig, average=AverageConfig)
    flags = run_flags.parse(["--model", "average", "--model.width", "5"])
    assert run_flags.configure(flags)[0].model == AverageConfig(width=5)
    with pytest.raises(ConfigError, match="width is 'x': must be of type int"):
        AverageConfig(width="x")


def test_loading_run_with_unregistered_kind_suggests_registration():
    text = config_to_json(TrainConfig()).replace('"decoder"', '"average"')
    with pytest.raises(ConfigError, match=r"model.kind is 'average'.*register a custom kind"):
        config_from_json(text)


def test_model_without_places_rejects_edits_and_word_vectors():
    config = AverageConfig()
    with pytest.raises(ValueError, match="logits"):
        config.build().edited({"logits": jnp.zeros_like})
    assert config.word_vectors({}) is None


def test_dir_lists_lecture_names():
    for module in (tj.config, tj.config.tasks, tj.decoding):
        assert {"RecurrentConfig", "ReverseTask", "RecurrentStep"} & {*dir(module)}


@pytest.mark.usefixtures("registering")
def test_redefined_class_replaces_registered_class():
    def defined(width):
        @dataclass(frozen=True, kw_only=True)
        class AgainConfig(AnyModelConfig):
            vocab_size: int = 7
            size: int = width

        register(AnyModelConfig, again=AgainConfig)
        return AgainConfig

    first = defined(3)
    assert TrainConfig(model=first()).model.size == 3
    second = defined(5)
    assert TrainConfig(model=second()).model.size == 5
    with pytest.raises(ConfigError, match="model is"):
        TrainConfig(model=first())


@pytest.mark.usefixtures("registering")
def test_task_without_load_method_is_rejected():
    register(Task, empty=EmptyTask)
    with pytest.raises(ConfigError, match=r"task is EmptyTask.*must have a method `load`"):
        load_task(TrainConfig(task="empty"))
