"""Check config.json of Phi-3 and OLMo: what is written, and what is refused by name."""

import dataclasses

import pytest

from transformer_jax.config import ConfigError, Rope
from transformer_jax.pretrained.config_json import read_config, write_config
from transformer_jax.pretrained.families import FAMILIES

SMALL = dict(
    vocab_size=29, hidden_size=24, intermediate_size=11, num_hidden_layers=4,
    num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=64,
)  # fmt: skip
PHI3 = SMALL | dict(model_type="phi3")
OLMO2 = SMALL | dict(model_type="olmo2")
OLMO3 = SMALL | dict(model_type="olmo3", sliding_window=5)
GRANITE = SMALL | dict(model_type="granite")
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8)


def default(base: float) -> dict:
    return dict(rope_type="default", rope_theta=base)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({}, Rope(base=5e5)),
        (dict(rope_theta=500_000), Rope(base=5e5)),
        (
            dict(rope_scaling=YARN),
            Rope(base=5e5, window_base=5e5, scaling="yarn", factor=8.0, original_len=8),
        ),
        (
            dict(rope_parameters=dict(full_attention=default(1e4), sliding_attention=default(1e4))),
            Rope(base=1e4),
        ),
        (
            dict(rope_parameters=dict(full_attention=default(1e4), sliding_attention=default(1e3))),
            Rope(base=1e4, window_base=1e3),
        ),
        (
            dict(rope_parameters=dict(
                full_attention=YARN | dict(rope_theta=1e4), sliding_attention=default(1e4)
            )),
            Rope(base=1e4, window_base=1e4, scaling="yarn", factor=8.0, original_len=8),
        ),
    ],
)  # fmt: skip
def test_the_two_rotations_of_olmo3_are_read_and_written(keys, rope):
    config = read_config(OLMO3 | keys, (), "config.json")
    assert config.positions == rope and config.windows == (5, 5, 5, None)
    assert read_config(write_config(FAMILIES["olmo3"], config), (), "config.json") == config


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (OLMO3 | dict(rope_theta=1e4), "rope_theta is 10000.0: must be 500000.0, or rope_param"),
        (
            OLMO3 | dict(rope_parameters=dict(full_attention=default(5e5), sliding_attention=YARN)),
            "rope_parameters is 'yarn': layers with a window stretch nothing",
        ),
        (OLMO3 | dict(layer_types=["full_attention"]), "layer_types is .*: must be a list of 4"),
        (GRANITE | dict(residual_multiplier=0), "residual_multiplier is 0: must be positive"),
        (GRANITE | dict(logits_scaling="6"), "logits_scaling is '6': must be a number"),
        (OLMO2 | dict(clip_qkv=3.0), "clip_qkv is 3.0: no such key"),
        (PHI3 | dict(rope_scaling=YARN), "rope_scaling is 'yarn': a phi3 has longrope or none"),
        (PHI3 | dict(attention_bias=True), "attention_bias is True: must be False"),
        (PHI3 | dict(lm_head_bias=True), "lm_head_bias is True: must be False"),
        (OLMO2 | dict(auto_map={"AutoConfig": "a.B"}), "auto_map is .*code of a checkpoint"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(content, rule):
    with pytest.raises(ConfigError, match=rule):
        read_config(content, (), "config.json")


@pytest.mark.parametrize(
    ("content", "changes", "rule"),
    [
        (OLMO2, dict(qk_norm_over="head"), "qk_norm_over is 'head': a olmo2 has 'heads'"),
        (OLMO2, dict(norm_order="pre"), "norm_order is 'pre': a olmo2 has 'output'"),
        (PHI3, dict(window=(3, None)), r"window is \[3, None, 3, None\]: a phi3 has"),
    ],
)
def test_what_a_family_cannot_say_is_refused_by_name(content, changes, rule):
    config = dataclasses.replace(read_config(content, (), "config.json"), **changes)
    with pytest.raises(ConfigError, match=rule):
        write_config(FAMILIES[content["model_type"]], config)
