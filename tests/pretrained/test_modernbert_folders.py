"""Check folders of ModernBERT without torch: both styles of config.json, names, what is refused."""

import json
from dataclasses import replace

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.drawn import drawn
from transformer_jax.config import ConfigError
from transformer_jax.pretrained.config_json import read_config, write_config
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.save import save_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")

FULL, LOCAL = "full_attention", "sliding_attention"
NAMES = ("head.dense.weight", *map(str, range(40)))
SIZES = dict(
    model_type="modernbert", vocab_size=29, hidden_size=12, intermediate_size=10,
    num_hidden_layers=4, num_attention_heads=3, max_position_embeddings=64,
)  # fmt: skip
OLD = SIZES | dict(
    global_attn_every_n_layers=2, global_rope_theta=1000.0, local_rope_theta=50.0,
    local_attention=10, position_embedding_type="absolute", layer_norm_eps=1e-5,
)  # fmt: skip
"""A config.json as version 4 of transformers wrote it."""
NEW = SIZES | dict(
    layer_types=[FULL, LOCAL, FULL, LOCAL], local_attention=10,
    rope_parameters={
        FULL: dict(rope_type="default", rope_theta=1000.0),
        LOCAL: dict(rope_type="default", rope_theta=50.0),
    },
)  # fmt: skip


def read(content, names=NAMES):
    return read_config(content, names, "config.json")


def test_both_styles_mean_the_same_and_both_are_written():
    config = read(OLD)
    assert read(NEW) == config
    assert (config.window, config.positions.base, config.positions.window_base) == (
        (None, 6), 1000.0, 50.0,
    )  # fmt: skip
    written = write_config(FAMILIES["modernbert"], config)
    for content in (OLD, NEW):
        said = {name: content[name] for name in content if name in written}
        assert {name: written[name] for name in said} == said
    assert {"layer_types", "rope_parameters", "global_rope_theta"} <= written.keys()


def test_the_first_block_has_no_norm_before_attention(tmp_path):
    config = read(NEW)
    params = drawn(config)
    assert "norm_attention" not in params["encoder"]["block_0"]
    save_pretrained(tmp_path / "m", config, params)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert "model.layers.0.attn_norm.weight" not in tensors
    assert "model.layers.1.attn_norm.weight" in tensors
    query = np.asarray(params["encoder"]["block_2"]["attention"]["value"]["kernel"])
    fused = tensors["model.layers.2.attn.Wqkv.weight"]  # [3 D, D]
    np.testing.assert_array_equal(fused[24:], query.reshape(12, 12).T)
    back, loaded = load_pretrained(tmp_path / "m")
    assert back == config
    chex.assert_trees_all_equal(loaded, params, strict=True)
    content = json.loads((tmp_path / "m" / "config.json").read_text())
    assert content["model_type"] == "modernbert"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (dict(classifier_bias=True), "classifier_bias is True: must be norm_bias, False"),
        (dict(classifier_activation="silu"), "classifier_activation is 'silu': must be hidden_act"),
        (dict(position_embedding_type="relative"), "position_embedding_type is 'relative'"),
        (dict(layer_types=[FULL]), "layer_types is .*: must be a list of 4"),
        (dict(local_attention=0), "local_attention is 0: must be an integer from 1"),
        (
            dict(rope_parameters={FULL: dict(rope_type="linear", factor=2.0)}),
            "rope_parameters is .*: layers may differ in rope_theta",
        ),
        (dict(num_key_value_heads=1), "num_key_value_heads is 1: no such key"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(changes, rule):
    with pytest.raises(ConfigError, match=rule):
        read(NEW | changes)


@pytest.mark.parametrize(
    ("end", "pooling", "of", "reads"),
    [
        ("SequenceClassification", "cls", "text", "first"),
        ("SequenceClassification", "mean", "text", "mean"),
        ("TokenClassification", "mean", "token", "each"),
        ("QuestionAnswering", "cls", "span", "each"),
    ],
)
def test_a_folder_says_what_its_classes_are_of(end, pooling, of, reads, tmp_path):
    said = dict(architectures=[f"ModernBertFor{end}"], classifier_pooling=pooling, num_labels=2)
    config = read(NEW | said, ("classifier.weight", *NAMES))
    assert (config.classes_of, config.pooler_reads, config.pooler) == (of, reads, "transform")
    assert config.num_classes == 2 and not config.masked_token_head
    params = drawn(config)
    save_pretrained(tmp_path / "m", config, params)
    content = json.loads((tmp_path / "m" / "config.json").read_text())
    assert content["architectures"] == said["architectures"]
    assert of != "text" or content["classifier_pooling"] == pooling
    held = load_file(tmp_path / "m" / "model.safetensors")
    kernel = np.asarray(params["classifier"]["kernel"])
    np.testing.assert_array_equal(held["classifier.weight"], kernel.T)
    assert "classifier.bias" in held and "head.dense.weight" in held
    back, loaded = load_pretrained(tmp_path / "m")
    assert back == config
    chex.assert_trees_all_equal(loaded, params, strict=True)


def test_classes_must_be_named():
    names = ("classifier.weight", *NAMES)
    with pytest.raises(ConfigError, match=r"architectures is None: must be a class \.\.\.ForSeq"):
        read(NEW, names)
    said = dict(architectures=["ModernBertForTokenClassification"], classifier_pooling="max")
    with pytest.raises(ConfigError, match="classifier_pooling is 'max': must be one of"):
        read(NEW | said, names)


@pytest.mark.parametrize("changes", [dict(first_norm=True), dict(glu=False), dict(out_bias=True)])
def test_what_it_cannot_say_is_refused_by_name(changes):
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} is "):
        write_config(FAMILIES["modernbert"], replace(read(NEW), **changes))
