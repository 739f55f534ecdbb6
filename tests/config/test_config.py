"""Rules of the configs, published sizes, and error messages."""

import contextlib
import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import pytest

from transformer_jax.checkpoints.run_folder import (
    RunFolder,
    config_from_json,
    config_to_json,
    differences,
)
from transformer_jax.config import (
    PRESETS,
    AdamW,
    Alibi,
    ConfigError,
    Experts,
    Frames,
    Learned,
    ModelConfig,
    RecurrentConfig,
    Rope,
    Shaw,
    Sinusoidal,
    T5Buckets,
    TrainConfig,
    fine_tuning,
    preset,
    train_preset,
)
from transformer_jax.config.optimizers import Lion
from transformer_jax.config.tasks import TASKS, ChatTask, DigitsTask, ReverseTask, TonesTask
from transformer_jax.models.factory import num_params
from transformer_jax.models.functional import activate
from transformer_jax.values import value_class

ROPE = dict(positions="rope")
LINEAR = dict(scaling="linear", factor=2.0)
YARN = dict(scaling="yarn", original_len=64)
DYNAMIC = dict(scaling="dynamic", original_len=64)
LONG = dict(scaling="longrope", original_len=64, short_factors=(1.0, 1.5), long_factors=(2.0, 3.0))
PAIRS = dict(head_dim=4, positions=Rope(**LONG))
LLAMA = dict(scaling="llama3", original_len=64)

# Rows: class, valid fields, one invalid change, and the field, value and part of the rule that the
# message must contain.
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
    (ModelConfig, {}, dict(positions={"base": 2.0}), "positions", "{'base': 2.0}", "or Rope or"),
    (ModelConfig, {}, dict(positions=3), "positions", "3", "or None"),
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
    (ModelConfig, dict(kind="encoder-decoder"), dict(num_decoder_layers=0), "num_decoder_layers",
     "0", "positive"),
    (ModelConfig, {}, dict(num_heads=0), "num_heads", "0", "positive"),
    (ModelConfig, {}, dict(num_kv_heads=0), "num_kv_heads", "0", "positive"),
    (ModelConfig, {}, dict(head_dim=0), "head_dim", "0", "positive"),
    (ModelConfig, {}, dict(value_head_dim=-1), "value_head_dim", "-1", "positive"),
    (ModelConfig, {}, dict(d_ff=-1), "d_ff", "-1", "must not be negative"),
    (ModelConfig, dict(d_ff=0), dict(glu=True), "glu", "True", "needs a feed-forward, but d_ff"),
    (ModelConfig, dict(d_ff=0), dict(norm_order="parallel"), "norm_order", "'parallel'", "needs a"),
    (ModelConfig, dict(d_ff=0), dict(ff_bias=False), "ff_bias", "False", "needs a feed-forward"),
    (ModelConfig, dict(d_ff=0), dict(activation="relu"), "activation", "'relu'", "needs a feed-"),
    (ModelConfig, dict(experts=Experts()), dict(d_ff=0), "d_ff", "0", "must be positive: experts"),
    (ModelConfig, {}, dict(max_len=0), "max_len", "0", "positive"),
    (ModelConfig, {}, dict(window=0), "window", "0", "positive"),
    (T5Buckets, {}, dict(buckets=0), "buckets", "0", "positive"),
    (T5Buckets, {}, dict(max_distance=0), "max_distance", "0", "positive"),
    (Shaw, {}, dict(max_distance=0), "max_distance", "0", "positive"),
    (Shaw, {}, dict(max_distance=2**31), "max_distance", str(2**31), "below 2**31"),
    (T5Buckets, {}, dict(max_distance=2**31), "max_distance", str(2**31), "below 2**31"),
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
    (ModelConfig, {}, dict(embedding_dim=5), "embedding_dim", "5", "needs kind 'encoder'"),
    (ModelConfig, {}, dict(share_layers=True), "share_layers", "True", "needs kind 'encoder'"),
    (ModelConfig, dict(kind="encoder", share_layers=True), dict(window=(2, 3)), "share_layers",
     "True", "stack of identical layers"),
    (ModelConfig, dict(kind="encoder", share_layers=True),
     dict(positions=Rope(pattern=(True, False))), "share_layers", "True", "positions without a"),
    (Learned, {}, dict(offset=-1), "offset", "-1", "not be negative"),
    (Learned, {}, dict(buckets=5), "buckets", "5", "must be even"),
    (Learned, {}, dict(max_distance=5), "max_distance", "5", "needs buckets"),
    (Learned, dict(buckets=8), dict(max_distance=4), "max_distance", "4", "above buckets / 2 = 4"),
    (ModelConfig, {}, dict(logit_scale=0.0), "logit_scale", "0.0", "positive"),
    (ModelConfig, {}, dict(residual_scale=0.0), "residual_scale", "0.0", "positive"),
    (ModelConfig, dict(glu=True), dict(glu_limit=0.0), "glu_limit", "0.0", "positive"),
    (ModelConfig, dict(norm_order="post"), dict(first_norm=False), "first_norm", "False", "'pre'"),
    (ModelConfig, dict(scan_layers=True), dict(first_norm=False), "first_norm", "False", "looped"),
    (ModelConfig, dict(kind="encoder"), dict(classes_of="token"), "classes_of", "'token'", "needs"),
    (ModelConfig, dict(kind="encoder"), dict(pooler_reads="mean"), "pooler_reads", "'mean'",
     "needs"),
    (ModelConfig, dict(kind="encoder", num_classes=3), dict(pooler_reads="each"), "pooler_reads",
     "'each'", "needs classes_of 'token'"),
    (ModelConfig, dict(kind="encoder", masked_token_head=True), dict(pooler="transform"), "pooler",
     "'transform'", "needs masked_token_head False"),
    (ModelConfig, dict(kind="encoder", num_classes=3), dict(classes_of="span"), "num_classes", "3",
     "must be 2 with classes_of 'span'"),
    (ModelConfig, dict(glu=True), dict(activation="xielu"), "activation", "'xielu'",
     "needs glu False"),
    (ModelConfig, dict(experts=Experts()), dict(activation="xielu"), "activation", "'xielu'",
     "needs experts None"),
    (ModelConfig, dict(kind="encoder", masked_token_head=True), dict(activation="xielu"),
     "activation", "'xielu'", "needs masked_token_head False"),
    (ModelConfig, dict(kind="encoder", pooler="transform", num_classes=3),
     dict(activation="xielu"), "activation", "'xielu'", "needs another pooler"),
    (ModelConfig, dict(activation="xielu"), dict(invariant=True), "invariant", "True",
     "cannot be promised for activation 'xielu'"),
    (ModelConfig, {}, dict(glu_limit=7.0), "glu_limit", "7.0", "needs glu"),
    (ModelConfig, {}, dict(glu_unit_offset=True), "glu_unit_offset", "True", "needs glu"),
    (ModelConfig, dict(scale_embeddings=True), dict(embedding_scale=2.0), "embedding_scale", "2.0",
     "needs scale_embeddings False"),
    (ModelConfig, {}, dict(qk_norm_over="heads"), "qk_norm_over", "'heads'", "needs qk_norm"),
    (ModelConfig, {}, dict(qk_norm_kind="layernorm"), "qk_norm_kind", "'layernorm'", "qk_norm"),
    (ModelConfig, dict(qk_norm=True), dict(qk_norm_bias=True), "qk_norm_bias", "True",
     "needs qk_norm_kind 'layernorm'"),
    (ModelConfig, dict(positions="rope"), dict(qk_norm_after_rope=True), "qk_norm_after_rope",
     "True", "needs qk_norm"),
    (ModelConfig, dict(qk_norm=True), dict(qk_norm_after_rope=True), "qk_norm_after_rope", "True",
     "needs positions 'rope'"),
    (ModelConfig, {}, dict(out_bias="no"), "out_bias", "'no'", "bool or None"),
    (ModelConfig, {}, dict(ff_bias="no"), "ff_bias", "'no'", "bool or None"),
    (ModelConfig, {}, dict(norm_unit_offset=1), "norm_unit_offset", "1", "bool"),
    (Sinusoidal, {}, dict(layout="thirds"), "layout", "'thirds'", "'halves'"),
    (ModelConfig, dict(kind="encoder"), dict(pooler="silu"), "pooler", "'silu'", "'relu'"),
    (Rope, {}, dict(window_base=1.0), "window_base", "1.0", "above 1"),
    (Rope, {}, dict(pattern=(False, False)), "pattern", "(False, False)", "at least one layer"),
    (Rope, {}, dict(pattern=(1,)), "pattern", "(1,)", "a tuple (of type bool, ...) or None"),
    (ModelConfig, ROPE | dict(num_layers=1), dict(positions=Rope(pattern=(True, False))),
     "positions.pattern", "(True, False)", "from 1 to 1 (num_layers) items"),
    (ModelConfig, ROPE | dict(scan_layers=True), dict(positions=Rope(pattern=(True, False))),
     "positions.pattern", "(True, False)", "needs a looped stack"),
    (ModelConfig, {}, dict(num_heads=3), "num_heads", "3", "must divide d_model 128"),
    (ModelConfig, {}, dict(num_kv_heads=3), "num_kv_heads", "3", "must divide num_heads 4"),
    (ModelConfig, {}, dict(num_kv_heads=8), "num_kv_heads", "8", "must divide num_heads 4"),
    (ModelConfig, dict(positions="sinusoidal", head_dim=4), dict(d_model=127), "d_model", "127",
     "even"),
    (ModelConfig, ROPE, dict(head_dim=7), "positions.dims", "7", "at most head_dim 7"),
    (ModelConfig, ROPE, dict(positions=Rope(dims=34)), "positions.dims", "34", "head_dim 32"),
    (T5Buckets, {}, dict(buckets=7), "buckets", "7", "even and at least 2"),
    (ModelConfig, dict(positions="t5", kind="encoder"), dict(positions=T5Buckets(buckets=2)),
     "positions.buckets", "2", "even and at least 4"),
    (T5Buckets, {}, dict(max_distance=16), "max_distance", "16", "above buckets / 2 = 16"),
    (ModelConfig, {}, dict(num_decoder_layers=2), "num_decoder_layers", "2", "'encoder-decoder'"),
    (ModelConfig, {}, dict(num_classes=3), "num_classes", "3", "'encoder'"),
    (ModelConfig, {}, dict(pooler="tanh"), "pooler", "'tanh'", "'encoder'"),
    (ModelConfig, {}, dict(type_vocab_size=2), "type_vocab_size", "2", "'encoder'"),
    (ModelConfig, {}, dict(masked_token_head=True), "masked_token_head", "True", "'encoder'"),
    (ModelConfig, dict(positions="shaw"), dict(implementation="blockwise"), "implementation",
     "'blockwise'", "'shaw'"),
    # fields without effect
    (Rope, {}, dict(original_len=64), "original_len", "64", "'yarn' or 'longrope'"),
    (Rope, LINEAR, dict(original_len=64), "original_len", "64", "'yarn' or 'longrope'"),
    (Rope, {}, dict(length=64), "length", "64", "'dynamic' or 'longrope'"),
    (Rope, YARN, dict(length=64), "length", "64", "'dynamic' or 'longrope'"),
    (Rope, LLAMA, dict(truncate=False), "truncate", "False", "'yarn'"),
    (Rope, LONG, dict(truncate=False), "truncate", "False", "'yarn'"),
    (Rope, DYNAMIC, dict(attention_factor=1.5), "attention_factor", "1.5", "or 'longrope'"),
    (Rope, {}, dict(short_factors=(1.0,)), "short_factors", "(1.0,)", "'longrope'"),
    (Rope, YARN, dict(long_factors=(1.0,)), "long_factors", "(1.0,)", "'longrope'"),
    (ModelConfig, ROPE, dict(positions=Rope(window_base=7.0)), "positions.window_base", "7.0",
     "needs a window"),
    (Rope, LINEAR, dict(low_freq_factor=2.0), "low_freq_factor", "2.0", "'llama3'"),
    (Rope, YARN, dict(high_freq_factor=2.0), "high_freq_factor", "2.0", "'llama3'"),
    (Rope, {}, dict(beta_fast=31), "beta_fast", "31", "'yarn'"),
    (Rope, LLAMA, dict(beta_slow=2.0), "beta_slow", "2.0", "'yarn'"),
    (Rope, LLAMA, dict(attention_factor=1.5), "attention_factor", "1.5", "'yarn'"),
    (TrainConfig, {}, dict(bpe_vocab_size=512), "bpe_vocab_size", "512", "tokenizer 'bpe'"),
    # rotary
    (Rope, {}, dict(base="1e4"), "base", "'1e4'", "finite"),
    (Rope, {}, dict(base=1.0), "base", "1.0", "above 1"),
    (Rope, {}, dict(base=-3.0), "base", "-3.0", "positive"),
    (Rope, {}, dict(dims=0), "dims", "0", "positive"),
    (Rope, {}, dict(dims=7), "dims", "7", "even"),
    (Rope, {}, dict(pairing="adjacent"), "pairing", "'adjacent'", "'interleaved'"),
    (Rope, {}, dict(scaling="cubic"), "scaling", "'cubic'", "'longrope'"),
    (Rope, {}, dict(scaling="dynamic"), "original_len", "None", "'dynamic'"),
    (Rope, DYNAMIC, dict(length=0), "length", "0", "positive"),
    (Rope, YARN, dict(truncate=1), "truncate", "1", "bool"),
    (Rope, LONG, dict(original_len=None), "original_len", "None", "'longrope'"),
    (Rope, LONG, dict(original_len=1), "original_len", "1", "above 1"),
    (Rope, LONG, dict(short_factors=None), "short_factors", "None", "one number per pair"),
    (Rope, LONG, dict(long_factors=None), "long_factors", "None", "one number per pair"),
    (Rope, LONG, dict(short_factors=()), "short_factors", "()", "one per pair"),
    (Rope, LONG, dict(long_factors=(2.0, 0.0)), "long_factors", "(2.0, 0.0)", "positive"),
    (Rope, LONG, dict(long_factors=[2.0, 3.0]), "long_factors", "[2.0, 3.0]", "a tuple (a f"),
    (Rope, LONG, dict(short_factors=(1, "2")), "short_factors", "(1, '2')", "a tuple (a f"),
    (Rope, LONG, dict(long_factors=(2.0,)), "long_factors", "(2.0,)", "2 items, one per"),
    (Rope, LONG, dict(dims=6), "short_factors", "(1.0, 1.5)", "3 items"),
    (ModelConfig, PAIRS, dict(head_dim=6), "positions.short_factors", "(1.0, 1.5)", "3 items"),
    (Rope, {}, dict(scaling="llama3"), "original_len", "None", "'llama3'"),
    (Rope, {}, dict(scaling="yarn"), "original_len", "None", "'yarn'"),
    (Rope, {}, dict(original_len=0), "original_len", "0", "positive"),
    (Rope, dict(scaling="linear"), dict(factor=0.5), "factor", "0.5", "at least 1"),
    (Rope, dict(scaling="linear"), dict(factor=0.0), "factor", "0.0", "positive"),
    (Rope, {}, dict(factor=2.0), "factor", "2.0", "scaling is None"),
    (Rope, dict(scaling="llama3", original_len=64), dict(high_freq_factor=1.0), "high_freq_factor",
     "1.0", "above low_freq_factor"),
    (Rope, {}, dict(low_freq_factor=0.0), "low_freq_factor", "0.0", "positive"),
    (Rope, dict(scaling="yarn", original_len=64), dict(beta_fast=0.5), "beta_fast", "0.5",
     "above beta_slow"),
    (Rope, {}, dict(beta_slow=-1.0), "beta_slow", "-1.0", "positive"),
    (Rope, {}, dict(attention_factor=0.0), "attention_factor", "0.0", "positive"),
    (Rope, {}, dict(attention_factor=1.5), "attention_factor", "1.5", "'yarn'"),
    # training
    (TrainConfig, {}, dict(model="gpt2"), "model", "'gpt2'", "ModelConfig"),
    (TrainConfig, {}, dict(data=3), "data", "3", "str"),
    (TrainConfig, {}, dict(tokenizer="letter"), "tokenizer", "'letter'", "'bpe'"),
    (TrainConfig, {}, dict(text_errors="ignore"), "text_errors", "'ignore'", "'replace'"),
    (TrainConfig, {}, dict(steps=-1), "steps", "-1", "positive"),
    (TrainConfig, {}, dict(steps=2**31), "steps", str(2**31), "below 2**31"),
    (TrainConfig, {}, dict(sample_tokens=2**31), "sample_tokens", str(2**31), "below 2**31"),
    (Learned, {}, dict(offset=2**31), "offset", str(2**31), "below 2**31"),
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
    (TrainConfig, {}, dict(min_learning_rate=1.0), "min_learning_rate", "1.0", "rate, 0.001"),
    (TrainConfig, {}, dict(warmup_steps=-1), "warmup_steps", "-1", "negative"),
    (AdamW, {}, dict(weight_decay=-0.1), "weight_decay", "-0.1", "negative"),
    (TrainConfig, {}, dict(sample_tokens=-1), "sample_tokens", "-1", "negative"),
    (AdamW, {}, dict(beta1=1.0), "beta1", "1.0", "below 1"),
    (AdamW, {}, dict(beta2=-0.1), "beta2", "-0.1", "at least 0"),
    (TrainConfig, {}, dict(label_smoothing=1.0), "label_smoothing", "1.0", "below 1"),
    (TrainConfig, {}, dict(val_fraction=0.0), "val_fraction", "0.0", "between 0 and 1"),
    (TrainConfig, {}, dict(data_weights=()), "data_weights", "()", "must be positive"),
    (TrainConfig, {}, dict(val_fraction=1.0), "val_fraction", "1.0", "between 0 and 1"),
    (DigitsTask, {}, dict(examples=0), "examples", "0", "must be positive"),  # a field of a base
    (TonesTask, {}, dict(examples=0), "examples", "0", "must be positive"),
    (ReverseTask, {}, dict(examples=0), "examples", "0", "must be positive"),
    (TrainConfig, {}, dict(seed=2**70), "seed", str(2**70), "2**32"),
    (TrainConfig, {}, dict(seed=-1), "seed", "-1", "at least 0"),
    (TrainConfig, {}, dict(context=257), "context", "257", "max_len, 256"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "start", "change", "name", "value", "rule"),
    BROKEN,
    ids=lambda x: x.__name__ if isinstance(x, type) else str(x)[:30],
)
def test_invalid_value_error_names_field_value_and_rule(kind, start, change, name, value, rule):
    valid = kind(**start)
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(valid, **change)
    message = str(caught.value)
    assert message.startswith(f"{name} is "), message
    start, _, reason = message.partition(": ")
    assert value in message, message
    assert rule in message, message
    assert "\n" not in start and reason
    assert isinstance(caught.value, ValueError)


def test_config_values_at_limits_are_allowed():
    ModelConfig(dropout=0.0, attention_dropout=0.999, window=1, num_kv_heads=1, num_layers=1)
    ModelConfig(norm_eps=1, init_std=1)  # an integer is a number
    ModelConfig(d_model=7, num_heads=2, head_dim=3, positions="none")
    ModelConfig(head_dim=8, positions=Rope(dims=8))
    ModelConfig(positions=T5Buckets(buckets=2, max_distance=2))
    ModelConfig(kind="encoder", positions=T5Buckets(buckets=4, max_distance=3))
    ModelConfig(positions="shaw", implementation="xla")
    Rope(scaling="yarn", original_len=1, factor=1.0)
    TrainConfig(
        seed=2**32 - 1,
        context=256,
        optimizer=AdamW(beta1=0.0),
        warmup_steps=0,
        min_learning_rate=1e-3,
    )


def test_choice_specific_fields_are_allowed_with_that_choice():
    """`test_invalid_value_error_names_field_value_and_rule` covers the other choices."""
    Rope(**LLAMA, low_freq_factor=2.0, high_freq_factor=3.0)
    Rope(**YARN, beta_fast=31, beta_slow=2, attention_factor=1.5, truncate=False)
    Rope(**DYNAMIC, factor=2.0, length=128)
    Rope(**LONG, factor=2.0, length=128, attention_factor=1.5, dims=4)
    ModelConfig(head_dim=4, positions=Rope(**LONG, window_base=7.0), window=(3, None))
    ModelConfig(kind="encoder", pooler="relu")
    TrainConfig(tokenizer="bpe", bpe_vocab_size=512)


SHORT = {
    "none": None, "learned": Learned(), "sinusoidal": Sinusoidal(), "rope": Rope(), "shaw": Shaw(),
    "t5": T5Buckets(), "t5buckets": T5Buckets(), "alibi": Alibi(),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
def test_string_selects_positions_with_defaults(name):
    config = ModelConfig(positions=name)
    assert config == ModelConfig(positions=SHORT[name]) and config.positions == SHORT[name]
    assert preset("tiny", positions=name).positions == SHORT[name]
    assert hash(config) == hash(ModelConfig(positions=SHORT[name]))


def test_string_selects_kind_with_defaults():
    named = TrainConfig(task="chat", optimizer="lion", model="recurrent")
    assert named == TrainConfig(task=ChatTask(), optimizer=Lion(), model=RecurrentConfig())
    for task in TASKS:
        with contextlib.suppress(ConfigError):  # a task for another model
            assert TrainConfig(task=task).task == TASKS[task]()
    assert ModelConfig(kind="encoder", inputs="frames").inputs == Frames()
    encoder = preset("bert-base")
    for name in ("masked", "classify"):
        assert fine_tuning(encoder, "x", task=name) == fine_tuning(encoder, "x", TASKS[name]())
    with pytest.raises(ConfigError, match=r"^task is 'sft': must be .*; did you mean chat\?$"):
        fine_tuning(encoder, "x", task="sft")
    with pytest.raises(ConfigError, match=r"^mesh is 'mesh': must be"):
        TrainConfig(mesh="mesh")


def test_positions_repr_shows_only_changed_fields():
    values = Alibi(), Learned(offset=2), Rope(base=500.0, dims=4), T5Buckets(buckets=8)
    assert [repr(value) for value in values] == [
        "Alibi()", "Learned(offset=2)", "Rope(base=500.0, dims=4)", "T5Buckets(buckets=8)",
    ]  # fmt: skip
    assert all(eval(repr(value)) == value for value in values)


# Files


def model_of(**content) -> ModelConfig:
    """Return the model of a run folder's config.json with these keys."""
    return config_from_json(json.dumps({"model": content})).model


@pytest.mark.parametrize("positions", SHORT.values(), ids=SHORT)
def test_positions_are_stored_in_json_as_object_with_kind(positions):
    config = TrainConfig(model=ModelConfig(positions=positions))
    stored = json.loads(config_to_json(config))["model"]["positions"]
    if positions is None:
        assert stored is None
    else:
        assert stored == {"kind": positions.kind, **dataclasses.asdict(positions)}
        assert positions.kind == type(positions).__name__.lower()
    assert config_from_json(config_to_json(config)) == config


BEFORE = dict(position_offset=0, sinusoid="halves", rope={}, beta1=0.9, weight_decay=0.1)
"""Fields of old configs, whose positions and optimizer were spread over several fields."""


@pytest.mark.parametrize("field", BEFORE)
def test_unknown_field_in_config_file_is_named(tmp_path, field):
    path = "" if field in ("beta1", "weight_decay") else "model."
    content = json.loads(config_to_json(TrainConfig()))
    (content["model"] if path else content)[field] = BEFORE[field]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path).read_config()
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{tmp_path}/config.json: {path}{field}: unknown key")
    assert line.endswith("(configs of other versions cannot be read)")


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (dict(positions="rotary"), "model.positions is 'rotary': must be one of 'none'"),
        (dict(positions=dict(kind="rope"), rope={}), "model.rope: unknown key"),
        (dict(positions=dict(base=7.0)), "model.positions.kind is None: must be one of learned"),
        (dict(positions=dict(kind="ropes")), "model.positions.kind is 'ropes': must be one of"),
        (dict(positions=dict(kind="rope", theta=1)), "model.positions.theta: unknown key"),
        (dict(positions=dict(kind="rope", base=0)), "model.positions.base is 0: must be positive"),
        (dict(positions=7), "model.positions is 7: must be an object"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_invalid_positions_in_file_error_names_path(stored, message):
    with pytest.raises(ConfigError) as caught:
        model_of(**stored)
    assert str(caught.value).startswith(message)


def test_config_differences_name_changed_positions():
    learned, rope = TrainConfig(), TrainConfig(model=ModelConfig(positions=Rope(base=500.0)))
    assert differences(learned, learned) == []
    assert differences(learned, rope) == ["model.positions: Learned() -> Rope(base=500.0)"]
    other = TrainConfig(model=ModelConfig(positions="rope"), steps=7)
    assert differences(rope, other) == ["model.positions.base: 500.0 -> 10000.0"]
    nowhere = TrainConfig(model=ModelConfig(positions=None))
    assert differences(nowhere, rope) == ["model.positions: None -> Rope(base=500.0)"]


@pytest.mark.parametrize("kind", [ModelConfig, Rope, T5Buckets, TrainConfig])
def test_configs_are_frozen_hashable_and_keyword_only(kind):
    one = kind()
    assert one == kind() and hash(one) == hash(kind())
    field = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, field, getattr(one, field))
    with pytest.raises(TypeError):
        kind(getattr(one, field))


def test_default_sizes_are_derived_from_other_fields():
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


def test_pooler_and_layer_rotation_are_derived_from_other_fields():
    kinds = dict(pooler="relu", num_classes=None), dict(num_classes=3), {}
    encoders = [ModelConfig(kind="encoder", **change) for change in kinds]
    assert [c.pooling for c in encoders] == ["relu", "tanh", None]
    rope = Rope(base=99.0, dims=4, pairing="interleaved", scaling="linear", factor=2.0)
    assert rope.in_layer(3) == rope.in_layer(None) == rope
    rope = dataclasses.replace(rope, window_base=7.0)
    assert rope.in_layer(3) == Rope(base=7.0, dims=4, pairing="interleaved")
    assert rope.in_layer(None) == rope
    some = dataclasses.replace(rope, pattern=(True, False))
    assert [some.in_layer(None, i) for i in range(3)] == [rope, None, rope]
    assert [some.in_layer(3, i) for i in range(2)] == [rope.in_layer(3), None]


def test_unknown_preset_suggests_nearest_name():
    with pytest.raises(ConfigError, match=r"preset is 'gpt-2'.*did you mean gpt2\?$") as caught:
        preset("gpt-2")
    assert all(name in str(caught.value) for name in PRESETS)
    with pytest.raises(ConfigError, match=r"did you mean llama3-8b\?$"):
        train_preset("llama-8b")
    with pytest.raises(ConfigError) as caught:
        preset("zzzz")
    assert "nearest" not in str(caught.value)


def test_changed_preset_is_validated():
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


def test_default_run_trains_the_small_model_of_shakespeare():
    assert train_preset().model == preset("shakespeare-cpu")


def test_equality_of_value_classes_depends_on_the_class_and_compared_fields():
    @value_class
    class One:
        size: int
        note: str = dataclasses.field(default="", compare=False)

    class Other(One):
        pass

    assert One(2, "a") == One(2, "b") and hash(One(2, "a")) == hash(One(2, "b"))
    assert One(2) != One(3) and One(2) != Other(2) and One(2) != 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        One(2).size = 3


def test_only_transformer_base_scales_embeddings():
    """Scaling by sqrt(d_model) is in section 3.4 of Vaswani et al. (2017)."""
    assert [name for name in PRESETS if preset(name).scale_embeddings] == ["transformer-base"]


def test_presets_have_published_attention_dropout():
    found = {n: (c.dropout, c.attention_dropout) for n in PRESETS for c in [preset(n)] if c.dropout}
    assert found["shakespeare-gpu"] == (0.2, 0.2)
    assert found["bert-base"] == found["bert-large"] == found["gpt2"] == (0.1, 0.1)
    assert found["transformer-base"] == (0.1, 0.0)


def test_presets_have_published_sizes():
    """Layers, width, hidden width, heads, key heads, head width, vocabulary and length."""
    found = {
        name: (c.num_layers, c.d_model, c.ff_dim, c.num_heads, c.kv_heads, c.key_dim, c.vocab_size,
               c.max_len)
        for name in PRESETS
        for c in [preset(name)]
        if not name.startswith(("tiny", "shakespeare"))
    }  # fmt: skip
    assert found == {
        "transformer-base": (6, 512, 2048, 8, 8, 64, 37000, 512),
        "bert-base": (12, 768, 3072, 12, 12, 64, 30522, 512),
        "bert-large": (24, 1024, 4096, 16, 16, 64, 30522, 512),
        "gpt2": (12, 768, 3072, 12, 12, 64, 50257, 1024),
        "gpt2-medium": (24, 1024, 4096, 16, 16, 64, 50257, 1024),
        "gpt2-large": (36, 1280, 5120, 20, 20, 64, 50257, 1024),
        "gpt2-xl": (48, 1600, 6400, 25, 25, 64, 50257, 1024),
        "llama3-8b": (32, 4096, 14336, 32, 8, 128, 128256, 8192),
    }


def gpt2_size(layers: int, width: int) -> int:
    """Return the parameters of a GPT-2 of this size.

    Tokens and positions; per layer q, k, v, out, up and down with biases and two norms; a norm.
    """
    layer = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 4 * width
    return 50257 * width + 1024 * width + layers * layer + 2 * width


def bert_size(layers: int, width: int) -> int:
    """Return the parameters of a BERT of this size, with the masked-token head.

    That head is a dense layer, a norm and a bias per token. The pooler and the next-sentence head
    are excluded.
    """
    embedding = (30522 + 512 + 2) * width + 2 * width
    layer = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 4 * width
    head = width * width + width + 2 * width + 30522
    return embedding + layers * layer + head


@pytest.mark.slow
@pytest.mark.long_except("bert-base-109514298", "gpt2-124439808")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
        ("bert-base", 109_514_298),
    ],
)
def test_parameter_counts_match_published_counts(name, size):
    derived = {"gpt2": gpt2_size(12, 768), "gpt2-xl": gpt2_size(48, 1600)}
    derived["bert-base"] = bert_size(12, 768)
    assert derived.get(name, size) == size
    assert num_params(preset(name)) == size


@pytest.mark.slow
def test_counting_parameters_does_not_allocate_them():
    """Eight billion float32 parameters would take 32 GB."""
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


@pytest.mark.parametrize(
    ("field", "wrong", "meant"),
    [
        ("positions", "rotary", "rope"),
        ("positions", "absolute", "learned"),
        ("positions", "sinusodial", "sinusoidal"),
        ("activation", "swish", "silu"),
        ("norm", "rms_norm", "rmsnorm"),
        ("dtype", "bf16", "bfloat16"),
        ("kind", "bert", "encoder"),
    ],
)
def test_invalid_config_choice_suggests_intended_choice(field, wrong, meant):
    with pytest.raises(ConfigError, match=rf"^{field} is '{wrong}': .*did you mean {meant}\?$"):
        ModelConfig(**{field: wrong})


def test_unknown_activation_is_rejected():
    with pytest.raises(
        ConfigError, match=r"^activation is 'sigmoid': must be one of relu, relu_squared,"
    ):
        activate(jnp.ones(3), "sigmoid")


def test_default_warmup_fits_steps():
    assert [TrainConfig(steps=steps).warmup for steps in (1, 40, 997, 2000)] == [0, 4, 99, 100]
    short = dataclasses.replace(TrainConfig(steps=2000), steps=40)
    assert short.warmup == 4 and dataclasses.replace(short, warmup_steps=7).warmup == 7
