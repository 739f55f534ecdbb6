"""Tests of edits in models of images and sound, and of edits refused with a custom task."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from tests.text.models import plain, run_of
from transformer_jax.config import ConfigError
from transformer_jax.config.tasks import CustomTask, DigitsTask, LanguageTask, TonesTask
from transformer_jax.interpret import zero
from transformer_jax.lectures.continuous import answer_signals
from transformer_jax.lectures.signals import make_signals
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.training.rows import stack_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")
ABC = CharTokenizer("abcdefghijklmnopqrstuvwxyz")


def model_and_file(task, kind, path) -> tuple[LanguageModel, str, list]:
    """Return an untrained model of a task, the path of a file of signals, and the signals."""
    names = ("bos", "eos") if kind == "encoder-decoder" else ()
    model = run_of(task, kind, names=names, base=ABC)
    config = replace(model.config, max_len=64, **({} if names else dict(num_classes=10)))
    run = replace(model.model.run, model=config, context=64)
    params = tj.init_params(config, jax.random.key(3))
    model = LanguageModel(replace(model.model, config=config, params=params, run=run), "here")
    signals = make_signals(replace(task, examples=6), 77)
    inputs, valid = stack_rows([signal.values for signal in signals])
    arrays = dict(inputs=inputs, targets=np.array([signal.target for signal in signals]))
    arrays |= {} if valid is None else dict(lengths=valid.sum(axis=1))
    np.savez(path, **arrays)
    return model, str(path), signals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kind", "side"),
    [
        (DigitsTask(), "encoder", "encoder"),
        (DigitsTask(), "encoder-decoder", "decoder"),
        (TonesTask(max_length=2), "encoder-decoder", "encoder"),
        (TonesTask(max_length=2), "encoder-decoder", "decoder"),
    ],
    ids=["classes of pictures", "pictures", "sounds", "sounds, by the decoder"],
)
def test_signal_evaluation_and_answers_apply_edits(tmp_path, task, kind, side):
    model, file, signals = model_and_file(task, kind, tmp_path / "seen.npz")
    negated = jax.tree.map(np.negative, model.params[side]["norm"])
    params = {**model.params, side: {**model.params[side], "norm": negated}}
    other = LanguageModel(replace(model.model, params=params), "here")
    inside = kind == "encoder-decoder" and side == "encoder"
    edit = {"encoder/final_norm" if inside else "final_norm": jnp.negative}
    whole, edited, wanted = (
        model.evaluate(file),
        model.edited(edit).evaluate(file),
        other.evaluate(file),
    )
    assert edited == pytest.approx(wanted, rel=1e-5)
    assert edited["nats_per_token"] != pytest.approx(whole["nats_per_token"], rel=1e-4)
    measure = "accuracy" if kind == "encoder" else "letter_error_rate"
    assert measure in edited

    def answers(one: LanguageModel, **options) -> list[str]:
        return answer_signals(one.model.run, one.tokenizers, one.params, signals, 7, **options)

    edited = tj.build(model.config).edited(edit)
    assert answers(model, model=edited) == answers(other) != answers(model)
    assert len(answers(other)) == len(signals)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [DigitsTask(), TonesTask(max_length=2)], ids=["pictures", "sounds"]
)
def test_captured_signal_streams_include_edits(tmp_path, task):
    """An edit of one row of block 0 changes only that row of block 1; the sounds have padding."""
    model, _, signals = model_and_file(task, "encoder-decoder", tmp_path / "seen.npz")
    built, place = tj.build(model.config), "encoder/block_0/residual"
    source, valid = stack_rows([signal.values for signal in signals[:2]])
    inputs = dict(source=source)
    if valid is not None:
        inputs["source_positions"] = np.where(valid, np.arange(source.shape[1])[None], -1)
    ids = np.ones((2, 3), np.int32)
    names = place, "encoder/block_1/attention/input", "logits"

    def run(edit):
        return built.edited(edit).apply({"params": model.params}, ids, capture=names, **inputs)[2]

    assert tj.places(model.config)[place] == ("B", "T", model.config.d_model)
    before, after = run({}), run({place: lambda x: x.at[1].add(0.5)})
    assert before[place].shape == (2, model.config.inputs.num_tokens(source.shape[1]), 8)
    np.testing.assert_allclose(after[place][1], before[place][1] + 0.5, atol=1e-6)
    # a LayerNorm removes a constant that is added to all elements of a vector
    np.testing.assert_allclose(after[names[1]], before[names[1]], atol=1e-4)
    slope = jnp.linspace(0.5, 2, model.config.d_model)
    tilted = run({place: lambda x: x.at[1].multiply(slope)})
    for name in names:
        np.testing.assert_array_equal(tilted[name][0], before[name][0])
        assert np.abs(tilted[name][1] - before[name][1]).max() > 1e-3, name


@dataclass(frozen=True, kw_only=True)
class Lines(LanguageTask, CustomTask):
    """A custom task."""


def test_custom_task_evaluation_rejects_edits(tmp_path):
    (tmp_path / "text").write_text("badcab" * 9)
    run = tj.TrainConfig(model=plain().config, task=Lines(), context=7)
    model = LanguageModel(replace(plain().model, run=run), "here")
    rule = r"edit of block_0/attention/heads: a custom task calls its model itself"
    with pytest.raises(ConfigError, match=rule):
        model.edited(zero("block_*/attention/heads")).evaluate(str(tmp_path / "text"))
