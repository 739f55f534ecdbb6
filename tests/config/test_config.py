"""Every rule of the configs, the published sizes, and what an error says."""

import dataclasses
import json
import subprocess
import sys

import pytest

from transformer_jax.config import (
    PRESETS,
    ConfigError,
    ModelConfig,
    RopeConfig,
    TrainConfig,
    preset,
    train_preset,
)
from transformer_jax.models import num_params
from transformer_jax.run_folder import config_from_json

ROPE = dict(positions="rope")
LINEAR = dict(scaling="linear", factor=2.0)
YARN = dict(scaling="yarn", original_len=64)
DYNAMIC = dict(scaling="dynamic", original_len=64)
LONG = dict(scaling="longrope", original_len=64, short_factors=(1.0, 1.5), long_factors=(2.0, 3.0))
PAIRS = dict(positions="rope", head_dim=4, rope=RopeConfig(**LONG))
LLAMA = dict(scaling="llama3", original_len=64)

# Rows: the class, a valid start, the one change that breaks it, the field the message must name,
# the value it must print, and a fragment of the rule.
BROKEN: list[tuple[type, dict, dict, str, str, str]] = [
    # types
    (ModelConfig, {}, dict(d_model="512"), "d_model", "'512'", "int"),
    (ModelConfig, {}, dict(num_layers=2.0), "num_layers", "2.0", "int"),
    (ModelConfig, {}, dict(num_heads=True), "num_heads", "True", "int"),
    (ModelConfig, {}, dict(use_bias=1), "use_bias", "1", "bool"),
    (ModelConfig, {}, dict(qkv_bias="yes"), "qkv_bias", "'yes'", "bool or None"),
    (ModelConfig, {}, dict(dropout=float("nan")), "dropout", "nan", "finite"),
    (ModelConfig, {}, dict(norm_eps=float("inf")), "norm_eps", "inf", "finite"),
    (ModelConfig, {}, dict(window=7.5), "window", "7.5", "int or None"),
    (ModelConfig, {}, dict(max_len=None), "max_len", "None", "int"),
    (ModelConfig, {}, dict(rope={"base": 2.0}), "rope", "{'base': 2.0}", "RopeConfig"),
    (ModelConfig, {}, dict(kind="decoder-only"), "kind", "'decoder-only'", "'encoder-decoder'"),
    (ModelConfig, {}, dict(positions="rotary"), "positions", "'rotary'", "'rope'"),
    (ModelConfig, {}, dict(norm="batchnorm"), "norm", "'batchnorm'", "'rmsnorm'"),
    (ModelConfig, {}, dict(norm_order="both"), "norm_order", "'both'", "'sandwich'"),
    (ModelConfig, {}, dict(activation="swish"), "activation", "'swish'", "'silu'"),
    (ModelConfig, {}, dict(dtype="float64"), "dtype", "'float64'", "'bfloat16'"),
    (ModelConfig, {}, dict(implementation=3), "implementation", "3", "str or None"),
    # ranges
    (ModelConfig, {}, dict(vocab_size=0), "vocab_size", "0", "positive"),
    (ModelConfig, {}, dict(d_model=-4), "d_model", "-4", "positive"),
    (ModelConfig, {}, dict(num_layers=0), "num_layers", "0", "positive"),
    (
        ModelConfig,
        dict(kind="encoder-decoder"),
        dict(num_decoder_layers=0),
        "num_decoder_layers",
        "0",
        "positive",
    ),
    (ModelConfig, {}, dict(num_heads=0), "num_heads", "0", "positive"),
    (ModelConfig, {}, dict(num_kv_heads=0), "num_kv_heads", "0", "positive"),
    (ModelConfig, {}, dict(head_dim=0), "head_dim", "0", "positive"),
    (ModelConfig, {}, dict(value_head_dim=-1), "value_head_dim", "-1", "positive"),
    (ModelConfig, {}, dict(d_ff=0), "d_ff", "0", "positive"),
    (ModelConfig, {}, dict(max_len=0), "max_len", "0", "positive"),
    (ModelConfig, {}, dict(window=0), "window", "0", "positive"),
    (ModelConfig, {}, dict(relative_buckets=0), "relative_buckets", "0", "positive"),
    (ModelConfig, {}, dict(relative_max_distance=0), "relative_max_distance", "0", "positive"),
    (ModelConfig, {}, dict(norm_eps=0.0), "norm_eps", "0.0", "positive"),
    (ModelConfig, {}, dict(init_std=-0.1), "init_std", "-0.1", "positive"),
    (ModelConfig, {}, dict(attention_softcap=0.0), "attention_softcap", "0.0", "positive"),
    (ModelConfig, {}, dict(attention_scale=-1.0), "attention_scale", "-1.0", "positive"),
    (ModelConfig, {}, dict(logit_softcap=0), "logit_softcap", "0", "positive"),
    (ModelConfig, {}, dict(type_vocab_size=0), "type_vocab_size", "0", "positive"),
    (ModelConfig, dict(kind="encoder"), dict(num_classes=0), "num_classes", "0", "positive"),
    (ModelConfig, {}, dict(dropout=1.0), "dropout", "1.0", "below 1"),
    (ModelConfig, {}, dict(attention_dropout=-0.1), "attention_dropout", "-0.1", "at least 0"),
    # fields that contradict each other
    (ModelConfig, {}, dict(position_offset=-1), "position_offset", "-1", "not be negative"),
    (ModelConfig, {}, dict(logit_scale=0.0), "logit_scale", "0.0", "positive"),
    (ModelConfig, {}, dict(ff_bias="no"), "ff_bias", "'no'", "bool or None"),
    (ModelConfig, {}, dict(norm_unit_offset=1), "norm_unit_offset", "1", "bool"),
    (ModelConfig, {}, dict(sinusoid="thirds"), "sinusoid", "'thirds'", "'halves'"),
    (ModelConfig, dict(kind="encoder"), dict(pooler="gelu"), "pooler", "'gelu'", "'relu'"),
    (
        ModelConfig,
        dict(positions="rope", window=3),
        dict(window_rope_base=1.0),
        "window_rope_base",
        "1.0",
        "above 1",
    ),
    (ModelConfig, {}, dict(num_heads=3), "num_heads", "3", "does not divide d_model 128"),
    (ModelConfig, {}, dict(num_kv_heads=3), "num_kv_heads", "3", "does not divide num_heads 4"),
    (ModelConfig, {}, dict(num_kv_heads=8), "num_kv_heads", "8", "does not divide num_heads 4"),
    (
        ModelConfig,
        dict(positions="sinusoidal", head_dim=4),
        dict(d_model=127),
        "d_model",
        "127",
        "even",
    ),
    (ModelConfig, ROPE, dict(head_dim=7), "rope.dims", "7", "at most head_dim 7"),
    (ModelConfig, ROPE, dict(rope=RopeConfig(dims=34)), "rope.dims", "34", "head_dim 32"),
    (
        ModelConfig,
        {},
        dict(rope=RopeConfig(base=7.0)),
        "rope.base",
        "7.0",
        "needs positions 'rope'",
    ),
    (
        ModelConfig,
        dict(positions="t5"),
        dict(relative_buckets=7),
        "relative_buckets",
        "7",
        "even and at least 2",
    ),
    (
        ModelConfig,
        dict(positions="t5", kind="encoder"),
        dict(relative_buckets=2),
        "relative_buckets",
        "2",
        "even and at least 4",
    ),
    (
        ModelConfig,
        dict(positions="t5"),
        dict(relative_max_distance=16),
        "relative_max_distance",
        "16",
        "above relative_buckets / 2 = 16",
    ),
    (ModelConfig, {}, dict(num_decoder_layers=2), "num_decoder_layers", "2", "'encoder-decoder'"),
    (ModelConfig, {}, dict(num_classes=3), "num_classes", "3", "'encoder'"),
    (ModelConfig, {}, dict(pooler="tanh"), "pooler", "'tanh'", "'encoder'"),
    (ModelConfig, {}, dict(type_vocab_size=2), "type_vocab_size", "2", "'encoder'"),
    (ModelConfig, {}, dict(masked_token_head=True), "masked_token_head", "True", "'encoder'"),
    (ModelConfig, {}, dict(implementation="flash"), "implementation", "'flash'", "'blockwise'"),
    (
        ModelConfig,
        dict(positions="shaw"),
        dict(implementation="blockwise"),
        "implementation",
        "'blockwise'",
        "'shaw'",
    ),
    # fields that nothing reads
    (ModelConfig, {}, dict(relative_buckets=16), "relative_buckets", "16", "'t5'"),
    (
        ModelConfig,
        dict(positions="shaw"),
        dict(relative_buckets=16),
        "relative_buckets",
        "16",
        "t5",
    ),
    (ModelConfig, ROPE, dict(relative_max_distance=64), "relative_max_distance", "64", "'shaw'"),
    (RopeConfig, {}, dict(original_len=64), "original_len", "64", "'yarn' or 'longrope'"),
    (RopeConfig, LINEAR, dict(original_len=64), "original_len", "64", "'yarn' or 'longrope'"),
    (RopeConfig, {}, dict(length=64), "length", "64", "'dynamic' or 'longrope'"),
    (RopeConfig, YARN, dict(length=64), "length", "64", "'dynamic' or 'longrope'"),
    (RopeConfig, LLAMA, dict(truncate=False), "truncate", "False", "'yarn'"),
    (RopeConfig, LONG, dict(truncate=False), "truncate", "False", "'yarn'"),
    (RopeConfig, DYNAMIC, dict(attention_factor=1.5), "attention_factor", "1.5", "or 'longrope'"),
    (RopeConfig, {}, dict(short_factors=(1.0,)), "short_factors", "(1.0,)", "'longrope'"),
    (RopeConfig, YARN, dict(long_factors=(1.0,)), "long_factors", "(1.0,)", "'longrope'"),
    (ModelConfig, {}, dict(window_rope_base=7.0), "window_rope_base", "7.0", "'rope'"),
    (ModelConfig, ROPE, dict(window_rope_base=7.0), "window_rope_base", "7.0", "needs a window"),
    (ModelConfig, ROPE, dict(position_offset=2), "position_offset", "2", "'learned'"),
    (ModelConfig, {}, dict(sinusoid="halves"), "sinusoid", "'halves'", "'sinusoidal'"),
    (RopeConfig, LINEAR, dict(low_freq_factor=2.0), "low_freq_factor", "2.0", "'llama3'"),
    (RopeConfig, YARN, dict(high_freq_factor=2.0), "high_freq_factor", "2.0", "'llama3'"),
    (RopeConfig, {}, dict(beta_fast=31), "beta_fast", "31", "'yarn'"),
    (RopeConfig, LLAMA, dict(beta_slow=2.0), "beta_slow", "2.0", "'yarn'"),
    (RopeConfig, LLAMA, dict(attention_factor=1.5), "attention_factor", "1.5", "'yarn'"),
    (TrainConfig, {}, dict(bpe_vocab_size=512), "bpe_vocab_size", "512", "tokenizer 'bpe'"),
    # rotary
    (RopeConfig, {}, dict(base="1e4"), "base", "'1e4'", "finite"),
    (RopeConfig, {}, dict(base=1.0), "base", "1.0", "above 1"),
    (RopeConfig, {}, dict(base=-3.0), "base", "-3.0", "positive"),
    (RopeConfig, {}, dict(dims=0), "dims", "0", "positive"),
    (RopeConfig, {}, dict(dims=7), "dims", "7", "even"),
    (RopeConfig, {}, dict(pairing="adjacent"), "pairing", "'adjacent'", "'interleaved'"),
    (RopeConfig, {}, dict(scaling="cubic"), "scaling", "'cubic'", "'longrope'"),
    (RopeConfig, {}, dict(scaling="dynamic"), "original_len", "None", "'dynamic'"),
    (RopeConfig, DYNAMIC, dict(length=0), "length", "0", "positive"),
    (RopeConfig, YARN, dict(truncate=1), "truncate", "1", "bool"),
    (RopeConfig, LONG, dict(original_len=None), "original_len", "None", "'longrope'"),
    (RopeConfig, LONG, dict(original_len=1), "original_len", "1", "above 1"),
    (RopeConfig, LONG, dict(short_factors=None), "short_factors", "None", "'longrope' needs"),
    (RopeConfig, LONG, dict(long_factors=None), "long_factors", "None", "'longrope' needs"),
    (RopeConfig, LONG, dict(short_factors=()), "short_factors", "()", "one of each pair"),
    (RopeConfig, LONG, dict(long_factors=(2.0, 0.0)), "long_factors", "(2.0, 0.0)", "positive"),
    (RopeConfig, LONG, dict(long_factors=[2.0, 3.0]), "long_factors", "[2.0, 3.0]", "a tuple (a f"),
    (RopeConfig, LONG, dict(short_factors=(1, "2")), "short_factors", "(1, '2')", "a tuple (a f"),
    (RopeConfig, LONG, dict(long_factors=(2.0,)), "long_factors", "(2.0,)", "as pairs, 2"),
    (RopeConfig, LONG, dict(dims=6), "short_factors", "(1.0, 1.5)", "as pairs, 3"),
    (ModelConfig, PAIRS, dict(head_dim=6), "rope.short_factors", "(1.0, 1.5)", "as pairs, 3"),
    (RopeConfig, {}, dict(scaling="llama3"), "original_len", "None", "'llama3'"),
    (RopeConfig, {}, dict(scaling="yarn"), "original_len", "None", "'yarn'"),
    (RopeConfig, {}, dict(original_len=0), "original_len", "0", "positive"),
    (RopeConfig, dict(scaling="linear"), dict(factor=0.5), "factor", "0.5", "at least 1"),
    (RopeConfig, dict(scaling="linear"), dict(factor=0.0), "factor", "0.0", "positive"),
    (RopeConfig, {}, dict(factor=2.0), "factor", "2.0", "scaling is None"),
    (
        RopeConfig,
        dict(scaling="llama3", original_len=64),
        dict(high_freq_factor=1.0),
        "high_freq_factor",
        "1.0",
        "above low_freq_factor",
    ),
    (RopeConfig, {}, dict(low_freq_factor=0.0), "low_freq_factor", "0.0", "positive"),
    (
        RopeConfig,
        dict(scaling="yarn", original_len=64),
        dict(beta_fast=0.5),
        "beta_fast",
        "0.5",
        "above beta_slow",
    ),
    (RopeConfig, {}, dict(beta_slow=-1.0), "beta_slow", "-1.0", "positive"),
    (RopeConfig, {}, dict(attention_factor=0.0), "attention_factor", "0.0", "positive"),
    (RopeConfig, {}, dict(attention_factor=1.5), "attention_factor", "1.5", "'yarn'"),
    # training
    (TrainConfig, {}, dict(model="gpt2"), "model", "'gpt2'", "ModelConfig"),
    (TrainConfig, {}, dict(data=3), "data", "3", "str"),
    (TrainConfig, {}, dict(tokenizer="word"), "tokenizer", "'word'", "'bpe'"),
    (TrainConfig, {}, dict(text_errors="ignore"), "text_errors", "'ignore'", "'replace'"),
    (TrainConfig, {}, dict(steps=-1), "steps", "-1", "positive"),
    (TrainConfig, {}, dict(steps=2**31), "steps", str(2**31), "below 2**31"),
    (TrainConfig, {}, dict(sample_tokens=2**31), "sample_tokens", str(2**31), "below 2**31"),
    (ModelConfig, {}, dict(position_offset=2**31), "position_offset", str(2**31), "below 2**31"),
    (TrainConfig, {}, dict(batch_size=0), "batch_size", "0", "positive"),
    (TrainConfig, {}, dict(context=0), "context", "0", "positive"),
    (TrainConfig, {}, dict(accumulation=0), "accumulation", "0", "positive"),
    (TrainConfig, {}, dict(learning_rate=float("nan")), "learning_rate", "nan", "finite"),
    (TrainConfig, {}, dict(learning_rate=0.0), "learning_rate", "0.0", "positive"),
    (TrainConfig, {}, dict(clip_norm=0.0), "clip_norm", "0.0", "positive"),
    (TrainConfig, {}, dict(eval_every=0), "eval_every", "0", "positive"),
    (TrainConfig, {}, dict(eval_batches=0), "eval_batches", "0", "positive"),
    (TrainConfig, {}, dict(checkpoint_every=0), "checkpoint_every", "0", "positive"),
    (TrainConfig, {}, dict(keep=0), "keep", "0", "positive"),
    (TrainConfig, {}, dict(log_every=0), "log_every", "0", "positive"),
    (TrainConfig, {}, dict(bpe_vocab_size=256), "bpe_vocab_size", "256", "at least 257"),
    (TrainConfig, {}, dict(min_learning_rate=-1.0), "min_learning_rate", "-1.0", "negative"),
    (TrainConfig, {}, dict(min_learning_rate=1.0), "min_learning_rate", "1.0", "rate 0.001"),
    (TrainConfig, {}, dict(warmup_steps=-1), "warmup_steps", "-1", "negative"),
    (TrainConfig, {}, dict(weight_decay=-0.1), "weight_decay", "-0.1", "negative"),
    (TrainConfig, {}, dict(sample_tokens=-1), "sample_tokens", "-1", "negative"),
    (TrainConfig, {}, dict(beta1=1.0), "beta1", "1.0", "below 1"),
    (TrainConfig, {}, dict(beta2=-0.1), "beta2", "-0.1", "at least 0"),
    (TrainConfig, {}, dict(label_smoothing=1.0), "label_smoothing", "1.0", "below 1"),
    (TrainConfig, {}, dict(val_fraction=0.0), "val_fraction", "0.0", "between 0 and 1"),
    (TrainConfig, {}, dict(val_fraction=1.0), "val_fraction", "1.0", "between 0 and 1"),
    (TrainConfig, {}, dict(seed=2**70), "seed", str(2**70), "2**32"),
    (TrainConfig, {}, dict(seed=-1), "seed", "-1", "at least 0"),
    (TrainConfig, {}, dict(context=257), "context", "257", "max_len 256"),
]


@pytest.mark.parametrize(
    ("kind", "start", "change", "name", "value", "rule"),
    BROKEN,
    ids=lambda x: x.__name__ if isinstance(x, type) else str(x)[:30],
)
def test_a_broken_rule_names_the_field_and_its_value(kind, start, change, name, value, rule):
    valid = kind(**start)
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(valid, **change)
    message = str(caught.value)
    assert message.startswith(f"{name} is "), message
    said, _, reason = message.partition(": ")
    assert value in message, message
    assert rule in message, message
    assert "\n" not in said and reason
    assert isinstance(caught.value, ValueError)


def test_values_at_the_edge_of_a_rule_are_allowed():
    ModelConfig(dropout=0.0, attention_dropout=0.999, window=1, num_kv_heads=1, num_layers=1)
    ModelConfig(norm_eps=1, init_std=1)  # an integer is a number
    ModelConfig(d_model=7, num_heads=2, head_dim=3, positions="none")
    ModelConfig(positions="rope", head_dim=8, rope=RopeConfig(dims=8))
    ModelConfig(positions="t5", relative_buckets=2, relative_max_distance=2)
    ModelConfig(kind="encoder", positions="t5", relative_buckets=4, relative_max_distance=3)
    ModelConfig(positions="shaw", implementation="xla")
    RopeConfig(scaling="yarn", original_len=1, factor=1.0)
    TrainConfig(seed=2**32 - 1, context=256, beta1=0.0, warmup_steps=0, min_learning_rate=1e-3)


def test_a_field_that_one_choice_needs_is_read_by_it():
    """Another value is legal exactly there; `test_a_broken_rule_...` has the other choices."""
    ModelConfig(positions="t5", relative_buckets=16, relative_max_distance=64)
    ModelConfig(positions="shaw", relative_max_distance=64)
    RopeConfig(**LLAMA, low_freq_factor=2.0, high_freq_factor=3.0)
    RopeConfig(**YARN, beta_fast=31, beta_slow=2, attention_factor=1.5, truncate=False)
    RopeConfig(**DYNAMIC, factor=2.0, length=128)
    RopeConfig(**LONG, factor=2.0, length=128, attention_factor=1.5, dims=4)
    ModelConfig(**PAIRS, window=(3, None), window_rope_base=7.0)
    ModelConfig(position_offset=2)
    ModelConfig(positions="sinusoidal", sinusoid="halves")
    ModelConfig(kind="encoder", pooler="relu")
    TrainConfig(tokenizer="bpe", bpe_vocab_size=512)


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_config_is_read_back_from_json(name):
    config = train_preset(name)
    assert config_from_json(json.dumps(dataclasses.asdict(config)).encode()) == config


@pytest.mark.parametrize("kind", [ModelConfig, RopeConfig, TrainConfig])
def test_configs_are_frozen_hashable_and_keyword_only(kind):
    one = kind()
    assert one == kind() and hash(one) == hash(kind())
    field = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, field, getattr(one, field))
    with pytest.raises(TypeError):
        kind(getattr(one, field))


def test_absent_sizes_follow_from_the_others():
    config = ModelConfig(d_model=48, num_heads=6)
    assert (config.kv_heads, config.key_dim, config.value_dim) == (6, 8, 8)
    assert (config.ff_dim, config.decoder_layers) == (192, 4)
    config = ModelConfig(
        kind="encoder-decoder", d_model=48, num_heads=6, num_kv_heads=2, head_dim=5,
        value_head_dim=7, d_ff=31, num_layers=3, num_decoder_layers=2,
    )  # fmt: skip
    assert (config.kv_heads, config.key_dim, config.value_dim) == (2, 5, 7)
    assert (config.ff_dim, config.num_layers, config.decoder_layers) == (31, 3, 2)
    assert ModelConfig(head_dim=5).value_dim == 5
    assert TrainConfig().sequence_len == 256 and TrainConfig(context=31).sequence_len == 31


def test_the_pooler_and_the_rotation_of_a_layer_follow_from_the_others():
    kinds = dict(pooler="relu", num_classes=None), dict(num_classes=3), {}
    encoders = [ModelConfig(kind="encoder", **change) for change in kinds]
    assert [c.pooling for c in encoders] == ["relu", "tanh", None]
    rope = RopeConfig(base=99.0, dims=4, pairing="interleaved", scaling="linear", factor=2.0)
    config = ModelConfig(positions="rope", rope=rope, window=(3, None))
    assert config.layer_rope(3) == config.layer_rope(None) == rope
    config = dataclasses.replace(config, window_rope_base=7.0)
    assert config.layer_rope(3) == RopeConfig(base=7.0, dims=4, pairing="interleaved")
    assert config.layer_rope(None) == rope


def test_an_unknown_preset_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match=r"preset is 'gpt-2'.*did you mean 'gpt2'\?") as caught:
        preset("gpt-2")
    assert all(name in str(caught.value) for name in PRESETS)
    with pytest.raises(ConfigError, match="did you mean 'llama3-8b'"):
        train_preset("llama-8b")
    with pytest.raises(ConfigError) as caught:
        preset("zzzz")
    assert "did you mean" not in str(caught.value)


def test_a_changed_preset_is_checked_again():
    assert preset("gpt2", window=31).window == 31
    assert preset("gpt2").window is None
    with pytest.raises(ConfigError, match="num_heads is 7"):
        preset("gpt2", num_heads=7)
    with pytest.raises(ConfigError, match=r"field is 'heads'.*num_heads"):
        preset("gpt2", heads=7)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_training_recipe(name):
    recipe = train_preset(name, steps=3)
    assert recipe.model == preset(name) and recipe.steps == 3
    assert recipe.sequence_len <= recipe.model.max_len


def test_feed_forward_sizes_are_those_of_the_table():
    """Model width and hidden width: Transformer base, BERT base, BERT large, GPT-2 small."""
    sizes = {
        name: (preset(name).d_model, preset(name).ff_dim)
        for name in ("transformer-base", "bert-base", "bert-large", "gpt2")
    }
    assert sizes == {
        "transformer-base": (512, 2048),
        "bert-base": (768, 3072),
        "bert-large": (1024, 4096),
        "gpt2": (768, 3072),
    }


def test_published_depths_heads_and_lengths():
    found = {
        name: (c.num_layers, c.num_heads, c.kv_heads, c.key_dim, c.vocab_size, c.max_len)
        for name in PRESETS
        for c in [preset(name)]
        if not name.startswith(("tiny", "shakespeare"))
    }
    assert found == {
        "transformer-base": (6, 8, 8, 64, 37000, 512),
        "bert-base": (12, 12, 12, 64, 30522, 512),
        "bert-large": (24, 16, 16, 64, 30522, 512),
        "gpt2": (12, 12, 12, 64, 50257, 1024),
        "gpt2-medium": (24, 16, 16, 64, 50257, 1024),
        "gpt2-large": (36, 20, 20, 64, 50257, 1024),
        "gpt2-xl": (48, 25, 25, 64, 50257, 1024),
        "llama3-8b": (32, 32, 8, 128, 128256, 8192),
    }


def gpt2_size(layers: int, width: int) -> int:
    """Tokens, positions; a layer has q, k, v, out, up, down with biases and two norms; one norm."""
    layer = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 4 * width
    return 50257 * width + 1024 * width + layers * layer + 2 * width


def bert_size(layers: int, width: int) -> int:
    """With the masked-token head: dense, norm and a bias a token; without pooler and next-sentence
    head, which belong to other tasks."""
    embedding = (30522 + 512 + 2) * width + 2 * width
    layer = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 4 * width
    head = width * width + width + 2 * width + 30522
    return embedding + layers * layer + head


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
        ("bert-base", 109_514_298),
    ],
)
def test_parameter_counts_are_the_published_ones(name, size):
    derived = {"gpt2": gpt2_size(12, 768), "gpt2-xl": gpt2_size(48, 1600)}
    derived["bert-base"] = bert_size(12, 768)
    assert derived.get(name, size) == size
    assert num_params(preset(name)) == size


def test_counting_parameters_allocates_none():
    """Eight billion parameters would take 32 GB: counting them leaves the process small."""
    code = (
        "import json, resource\n"
        "from transformer_jax.config import preset\n"
        "from transformer_jax.models import num_params\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "n = num_params(preset('llama3-8b'))\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(json.dumps([n, after - before]))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, grown_kib = json.loads(out.stdout.splitlines()[-1])
    assert count == 8_030_261_248
    assert grown_kib < 500_000
