"""Encoder inputs in configs, run folders and flags."""

import argparse
import json
from typing import Any

import pytest

from transformer_jax.checkpoints.run_folder import config_from_json, config_to_json
from transformer_jax.cli.flags import ConfigFlags, changed
from transformer_jax.config import (
    ConfigError,
    Frames,
    ModelConfig,
    Patches,
    TrainConfig,
    Vectors,
)
from transformer_jax.config.tasks import DigitsTask, Seq2SeqTask, TonesTask


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Vectors(width=0), "width is 0: must be positive"),
        (lambda: Vectors(width=2**31), r"width is 2147483648: must be below 2\*\*31"),
        (lambda: Patches(size="16"), "size is '16': must be of type int"),
        (lambda: Patches(size=5), "height is 224: must be a multiple of size, 5"),
        (lambda: Patches(size=7, width=15), "width is 15: must be a multiple of size, 7"),
        (lambda: Patches(class_token=1), "class_token is 1: must be of type bool"),
        (lambda: Frames(kernel=4), "kernel is 4: must be odd"),
        (lambda: Frames(kernel=3, stride=5), "stride is 5: must not exceed kernel"),
        (lambda: Frames(layers=0), "layers is 0: must be positive"),
    ],
)
def test_invalid_input_configs_are_rejected(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kind="decoder"), r"inputs is Vectors\(\): needs kind 'encoder' or 'encoder-"),
        (
            dict(source_vocab_size=7, kind="encoder-decoder"),
            "source_vocab_size is 7: needs inputs None",
        ),
        (dict(masked_token_head=True), "masked_token_head is True: needs inputs None"),
        (dict(type_vocab_size=2), "type_vocab_size is 2: needs inputs None, because an encoder"),
        (dict(tie_embeddings=False), "tie_embeddings is False: needs inputs None, because an"),
        (dict(inputs=Patches(), max_len=196), "max_len is 196: must be at least the 197 tokens"),
        (dict(inputs="pixels"), "inputs is 'pixels': must be"),
    ],
)
def test_config_fields_that_contradict_inputs_are_rejected(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**dict(dict(kind="encoder", inputs=Vectors()), **change))


def test_config_fields_compatible_with_inputs_are_allowed():
    ModelConfig(kind="encoder", inputs=Patches(), max_len=197, num_classes=3)
    ModelConfig(kind="encoder", inputs=Patches(), positions="rope")
    ModelConfig(kind="encoder-decoder", inputs=Frames(), tie_embeddings=False, logit_bias=True)


def test_token_counts_match_formulas():
    assert Patches(size=4, height=8, width=12).num_tokens() == 2 * 3 + 1
    assert Patches(size=4, height=8, width=12, class_token=False).num_tokens() == 2 * 3
    frames = Frames(kernel=5, stride=3, layers=2)
    assert [frames.num_tokens(n) for n in (1, 9, 10, 18, 19)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("task", [Seq2SeqTask(), DigitsTask(), TonesTask()])
def test_run_config_restores_inputs(task):
    inputs = getattr(task, "inputs", None)
    model = ModelConfig(kind="encoder-decoder", inputs=inputs)
    config = TrainConfig(task=task, model=model)
    text = config_to_json(config)
    stored = json.loads(text)["model"]
    kind = None if inputs is None else type(inputs).__name__.lower()
    assert stored["inputs"] is None if kind is None else stored["inputs"]["kind"] == kind
    assert config_from_json(text) == config
    del stored["inputs"], stored["source_vocab_size"]  # absent keys are the defaults
    plain = TrainConfig(task=Seq2SeqTask(), model=ModelConfig(kind="encoder-decoder"))
    assert config_from_json(json.dumps({"task": {"kind": "seq2seq"}, "model": stored})) == plain


def test_flags_select_input_kind_and_set_its_fields():
    flags = ConfigFlags(ModelConfig)
    base = ModelConfig(kind="encoder-decoder")
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    flags.add_to(parser, base, None)

    def read(*words: str) -> Any:
        return changed(base, flags.read(flags.texts(parser.parse_args(words)), base)).inputs

    assert read("--inputs", "frames", "--inputs.width", "40") == Frames(width=40)
    assert read("--inputs", "vectors", "--inputs.width", "3") == Vectors(width=3)
    with pytest.raises(ConfigError, match=r"inputs\.stride is '2': needs --inputs frames"):
        read("--inputs", "vectors", "--inputs.stride", "2")
