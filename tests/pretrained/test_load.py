"""Published checkpoints: the meaning of config.json, required tensors, and round trips."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.devices import on_devices
from tests.support.drawn import drawn
from tests.support.model_folders import assert_loads, assert_same_bits, changed
from transformer_jax.config import (
    ConfigError,
    Experts,
    GatedDelta,
    LatentAttention,
    Learned,
    ModelConfig,
    Rope,
    ShortConv,
    Sinusoidal,
    T5Buckets,
    preset,
)
from transformer_jax.models.factory import build
from transformer_jax.models.stack import stack_layers
from transformer_jax.pretrained.config_json import read_config, write_config, written_family
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.safetensors_folder import CheckpointError
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.pretrained.tensors import parameter_shapes, tensor_names
from transformer_jax.tokenizers.classes import CLASSES

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDEN = sorted(
    path.parent
    for path in Path(__file__).parents[1].glob("golden/*/golden.npz")
    if "at" in np.load(path, allow_pickle=False).files  # others have separate tests
)


# Outputs of transformers


def positions(valid: np.ndarray) -> np.ndarray:  # bool[B, T] -> i32[B, T]
    return np.where(valid, np.cumsum(valid, axis=1) - 1, -1).astype(np.int32)


def run(config: ModelConfig, params: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the logits of the inputs written by tests/golden/write.py."""
    inputs: dict[str, Any] = {}
    for ours, theirs in (("positions", "valid"), ("source_positions", "source_valid")):
        if theirs in arrays:
            inputs[ours] = positions(arrays[theirs])
    inputs |= {name: arrays[name] for name in ("source", "types") if name in arrays}
    model = build(config)
    logits, _ = jax.jit(lambda p, *a, **k: model.apply({"params": p}, *a, **k))(
        params, arrays["tokens"], **inputs
    )
    return np.asarray(logits)


def test_golden_folders_exist():
    assert len(GOLDEN) >= 3
    assert max(np.load(folder / "golden.npz")["tokens"].shape[1] for folder in GOLDEN) > 512


@pytest.mark.slow
@pytest.mark.long_except("gemma3", "llama")
@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_logits_match_transformers(folder):
    """Within 1e-4, with the same most likely token wherever the margin is clear."""
    with np.load(folder / "golden.npz", allow_pickle=False) as file:
        arrays = dict(file)
    config, params = load_pretrained(folder, dtype="float32")
    logits = run(dataclasses.replace(config, implementation="xla"), params, arrays)
    at, valid = arrays["at"], arrays.get("valid", np.ones(arrays["tokens"].shape, bool))
    real, top = valid[:, at], arrays["top"]
    assert np.isfinite(arrays["logits"]).all() and real.mean() > 0.5
    assert np.abs(logits[:, at] - arrays["logits"])[real].max() <= 1e-4
    assert (top >= 0).mean() > 0.8
    assert (logits.argmax(-1) == top)[top >= 0].all()


# config.json as published, with transformers 4's keys

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden/published_configs.json").read_text()
)

LLAMA = dict(
    positions="rope", norm="rmsnorm", activation="silu", glu=True, use_bias=False,
    tie_embeddings=False,
)  # fmt: skip
MISTRAL = LLAMA | dict(
    vocab_size=32000, d_model=4096, d_ff=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    max_len=32768, window=4096,
)  # fmt: skip
QWEN = LLAMA | dict(
    vocab_size=152064, d_model=3584, d_ff=18944, num_layers=28, num_heads=28, num_kv_heads=4,
    max_len=131072, norm_eps=1e-6, qkv_bias=True, positions=Rope(base=1e6),
)  # fmt: skip
GEMMA = LLAMA | dict(
    activation="gelu_tanh", norm_eps=1e-6, head_dim=256, norm_unit_offset=True,
    scale_embeddings=True, tie_embeddings=True,
)  # fmt: skip
CAPPED = GEMMA | dict(norm_order="sandwich", attention_scale=1 / 16)
YARN = Rope(base=1e6, scaling="yarn", factor=4.0, original_len=32768)
OLMO = dict(norm_order="output", qk_norm=True, qk_norm_over="heads")
NEOX = dict(norm_order="parallel", activation="gelu", tie_embeddings=False, max_len=2048)
GPTJ = dict(
    norm_order="parallel_shared", qkv_bias=False, out_bias=False, logit_bias=True,
    tie_embeddings=False, max_len=2048, vocab_size=50400, d_model=4096, num_layers=28,
    num_heads=16, positions=Rope(dims=64, pairing="interleaved"),
)  # fmt: skip
PHI = dict(
    norm_order="parallel_shared", logit_bias=True, tie_embeddings=False, max_len=2048,
    vocab_size=51200, num_heads=32, num_kv_heads=32, positions=Rope(dims=32),
)  # fmt: skip
MEANT: dict[str, dict[str, Any]] = {
    "gpt2": dict(vocab_size=50257, d_model=768, num_layers=12, num_heads=12, max_len=1024,
        dropout=0.1, attention_dropout=0.1),
    "Llama-2-7b": LLAMA | dict(vocab_size=32000, d_model=4096, d_ff=11008, num_layers=32,
        num_heads=32, num_kv_heads=32, max_len=4096),
    "Llama-3.1-8B": LLAMA | dict(vocab_size=128256, d_model=4096, d_ff=14336, num_layers=32,
        num_heads=32, num_kv_heads=8, max_len=131072, positions=Rope(base=500000.0,
        scaling="llama3", factor=8.0, original_len=8192, low_freq_factor=1.0,
        high_freq_factor=4.0)),
    "SmolLM2-135M": LLAMA | dict(vocab_size=49152, d_model=576, d_ff=1536, num_layers=30,
        num_heads=9, num_kv_heads=3, max_len=8192, positions=Rope(base=100000.0),
        tie_embeddings=True),
    "Mistral-7B-v0.1": MISTRAL,
    "Mistral-7B-v0.3": MISTRAL | dict(vocab_size=32768, positions=Rope(base=1e6), window=None),
    "Qwen2-7B": QWEN,
    "Qwen2.5-7B, for long texts": QWEN | dict(positions=YARN),
    "Qwen3-8B": LLAMA | dict(vocab_size=151936, d_model=4096, d_ff=12288, num_layers=36,
        num_heads=32, num_kv_heads=8, head_dim=128, max_len=40960, norm_eps=1e-6, qk_norm=True,
        positions=Rope(base=1e6)),
    "gemma-2b": GEMMA | dict(vocab_size=256000, d_model=2048, d_ff=16384, num_layers=18,
        num_heads=8, num_kv_heads=1, max_len=8192),
    "gemma-2-9b": CAPPED | dict(vocab_size=256000, d_model=3584, d_ff=14336, num_layers=42,
        num_heads=16, num_kv_heads=8, max_len=8192, window=(4096, None), attention_softcap=50.0,
        logit_softcap=30.0),
    "gemma-3-1b-it": CAPPED | dict(vocab_size=262144, d_model=1152, d_ff=6912, num_layers=26,
        num_heads=4, num_kv_heads=1, max_len=32768, window=(512,) * 5 + (None,), qk_norm=True,
        positions=Rope(base=1e6, window_base=10000.0)),
    "Phi-3-mini-4k-instruct": LLAMA | dict(vocab_size=32064, d_model=3072, d_ff=8192, num_layers=32,
        num_heads=32, num_kv_heads=32, max_len=4096, window=2047),
    "granite-3.0-2b-base": LLAMA | dict(vocab_size=49155, d_model=2048, d_ff=8192, num_layers=40,
        num_heads=32, num_kv_heads=8, max_len=4096, attention_dropout=0.1, tie_embeddings=True,
        attention_scale=0.015625, embedding_scale=12.0, residual_scale=0.22, logit_scale=0.125),
    "OLMo-2-1124-7B": LLAMA | OLMO | dict(vocab_size=100352, d_model=4096, d_ff=11008,
        num_layers=32, num_heads=32, num_kv_heads=32, max_len=4096, norm_eps=1e-6,
        positions=Rope(base=5e5)),
    "opt-125m": dict(vocab_size=50272, d_model=768, d_ff=3072, num_layers=12, num_heads=12,
        max_len=2048, positions=Learned(offset=2), activation="relu", dropout=0.1),
    "bloom-560m": dict(vocab_size=250880, d_model=1024, num_layers=24, num_heads=16, max_len=2048,
        positions="alibi", embedding_norm=True),
    "pythia-160m": NEOX | dict(vocab_size=50304, d_model=768, d_ff=3072, num_layers=12,
        num_heads=12, positions=Rope(dims=16)),
    "gpt-j-6b": GPTJ,
    "phi-2": PHI | dict(d_model=2560, d_ff=10240, num_layers=32, dropout=0.1),
}  # fmt: skip


def newer(content: dict[str, Any]) -> dict[str, Any]:
    """The same config.json in the style of transformers 5."""
    content = {"dtype": content.pop("torch_dtype", None)} | content
    base, scaling = content.pop("rope_theta", 10_000.0), content.pop("rope_scaling", None) or {}
    kind = scaling.pop("type", scaling.pop("rope_type", "default"))
    content["rope_parameters"] = dict(scaling, rope_type=kind, rope_theta=base)
    if "rope_local_base_freq" in content:
        every, layers = content.pop("sliding_window_pattern"), content["num_hidden_layers"]
        content |= dict(_sliding_window_pattern=every, use_bidirectional_attention=False)
        kinds = ["full" if (i + 1) % every == 0 else "sliding" for i in range(layers)]
        near = dict(rope_type="default", rope_theta=content.pop("rope_local_base_freq"))
        far = content["rope_parameters"]
        content["rope_parameters"] = dict(sliding_attention=near, full_attention=far)
        content["layer_types"] = [f"{kind}_attention" for kind in kinds]
    return content


@pytest.mark.parametrize("keys", ["4", "5"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_correctly(name, keys):
    content = json.loads(json.dumps(PUBLISHED[name]))
    if keys == "5" and content["model_type"] not in ("gpt2", "gptj", "opt", "bloom"):
        content = newer(content)
    config = read_config(content, (), "config.json")
    assert config == ModelConfig(**MEANT[name])
    family = FAMILIES[content["model_type"]]
    written = json.loads(json.dumps(write_config(family, config)))
    assert read_config(written, (), "config.json") == config
    assert write_config(family, config) == written


def small(**changes: Any) -> dict[str, Any]:
    """Return the keys of a small Llama."""
    return dict(
        model_type="llama", vocab_size=53, hidden_size=12, intermediate_size=10,
        num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        max_position_embeddings=64,
    ) | changes  # fmt: skip


def scaled(kind: str, **keys: Any) -> dict[str, Any]:
    return small(rope_scaling=dict(type=kind, **keys))


def test_presets_equal_published_configs():
    assert preset("gpt2") == read_config(PUBLISHED["gpt2"], (), "config.json")
    longer = read_config(PUBLISHED["Llama-3.1-8B"], (), "config.json")
    unscaled = Rope(base=longer.positions.base)
    assert preset("llama3-8b", dtype="float32") == dataclasses.replace(
        longer, max_len=longer.positions.original_len, positions=unscaled
    )


QWEN_WINDOW = dict(model_type="qwen2", max_window_layers=1, sliding_window=7)


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        (small(**QWEN_WINDOW), dict(window=None)),
        (small(**QWEN_WINDOW, use_sliding_window=True), dict(window=(None, 7))),
        (small(model_type="gemma2", attn_logit_softcapping=None),
         dict(attention_softcap=None, logit_softcap=30.0)),
    ],
)  # fmt: skip
def test_window_and_softcap_keys_are_loaded(content, fields):
    config = read_config(content, (), "config.json")
    assert {name: getattr(config, name) for name in fields} == fields


BERT = dict(
    kind="encoder", norm_order="post", embedding_norm=True, activation="gelu", num_heads=12,
    d_model=768, d_ff=3072, norm_eps=1e-12, dropout=0.1, attention_dropout=0.1,
)  # fmt: skip
BART = dict(
    kind="encoder-decoder", d_model=1024, num_layers=12, num_decoder_layers=12, num_heads=16,
    d_ff=4096, max_len=1024, norm_order="post", activation="gelu", dropout=0.1,
)  # fmt: skip
SMALL = dict(vocab_size=53, d_model=12, d_ff=10, num_layers=2, num_heads=8, max_len=64)
SMALL_LLAMA = LLAMA | SMALL | dict(norm_eps=1e-6)
SMALL_DEEPSEEK = SMALL_LLAMA | dict(
    positions=Rope(pairing="interleaved"), mixers=("latent_attention",),
    latent_attention=LatentAttention(
        query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128
    ),
)  # fmt: skip
SMALL_GEMMA = GEMMA | SMALL | dict(num_kv_heads=4)
CODER = dict(
    vocab_size=53, d_model=12, d_ff=10, num_layers=2, num_heads=2, max_len=64, positions="rope"
)
COHERE = SMALL_LLAMA | dict(
    norm="layernorm", norm_eps=1e-5, norm_order="parallel_shared", logit_scale=0.0625,
    tie_embeddings=True, positions=Rope(base=8e6, pairing="interleaved"),
)  # fmt: skip
BARE = dict(qkv_bias=False, out_bias=False, ff_bias=False)
EIGHT = dict(num_heads=8, num_kv_heads=8, head_dim=2)
NO_DEFAULT = dict(num_attention_heads=8, num_key_value_heads=..., head_dim=2)
WIDE_HEADS = NO_DEFAULT | dict(head_dim=...)
THREE = ("gated_delta",) * 3 + ("attention",)
NEXT = dict(
    head_dim=256, norm_unit_offset=True, qk_norm=True, attention_gate=True,
    positions=Rope(dims=64), num_layers=4, mixers=THREE, gated_delta=GatedDelta(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128
    ),
)  # fmt: skip
GLM = dict(
    num_kv_heads=2, head_dim=128, norm_eps=1.5625e-7, qkv_bias=True,
    positions=Rope(dims=64, pairing="interleaved"),
)  # fmt: skip
PLAIN = dict(glu=False, activation="relu_squared")
SMALL_QWEN = SMALL_LLAMA | dict(num_layers=30, num_heads=64, num_kv_heads=32)
QWEN_LEFT_OUT = NO_DEFAULT | dict(num_hidden_layers=30, num_attention_heads=64, head_dim=...)
QWEN_WINDOWS = (None,) * 28 + (4096,) * 2
MASKED = BERT | dict(masked_token_head=True, logit_bias=True)
TWELVE = tuple(f"tensor {i}" for i in range(12))  # at least the number of layers
LEFT_OUT: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    # config.json with the required keys, tensor names, and the expected config
    "gpt2": (dict(model_type="gpt2"), (), dict(vocab_size=50257, max_len=1024, d_model=768,
        num_layers=12, num_heads=12, d_ff=None, activation="gelu_tanh", norm_eps=1e-5,
        tie_embeddings=True, dropout=0.1, attention_dropout=0.1)),
    "llama": (small(**NO_DEFAULT), (), SMALL_LLAMA | dict(num_kv_heads=8, head_dim=2)),
    "mistral": (small(model_type="mistral", **NO_DEFAULT | dict(num_attention_heads=16)), (),
        SMALL_LLAMA | dict(num_heads=16, num_kv_heads=8, head_dim=2, window=4096)),
    "qwen2": (small(model_type="qwen2", **QWEN_LEFT_OUT | dict(head_dim=2)), (), SMALL_QWEN
        | dict(head_dim=2, qkv_bias=True)),
    "qwen2 with windows": (small(model_type="qwen2", use_sliding_window=True, **QWEN_LEFT_OUT
        | dict(head_dim=2)), (), SMALL_QWEN | dict(head_dim=2, qkv_bias=True, window=QWEN_WINDOWS)),
    "qwen3": (small(model_type="qwen3", **QWEN_LEFT_OUT), (), SMALL_QWEN
        | dict(head_dim=128, qk_norm=True)),
    "qwen3 with windows": (small(model_type="qwen3", use_sliding_window=True, **QWEN_LEFT_OUT), (),
        SMALL_QWEN | dict(head_dim=128, qk_norm=True, window=QWEN_WINDOWS)),
    "mixtral": (small(model_type="mixtral", **NO_DEFAULT), (), SMALL_LLAMA
        | dict(num_kv_heads=8, head_dim=2, norm_eps=1e-5, positions=Rope(base=1e6),
        experts=Experts(count=8, top_k=2, balance_loss=0.001))),
    "olmoe": (small(model_type="olmoe", **NO_DEFAULT | dict(num_attention_heads=6)), (), SMALL_LLAMA
        | dict(num_heads=6, num_kv_heads=6, head_dim=2, norm_eps=1e-5, qk_norm=True,
        qk_norm_over="heads", experts=Experts(count=64, top_k=8, normalize=False,
        balance_loss=0.01))),
    "qwen2_moe": (small(model_type="qwen2_moe", **NO_DEFAULT | dict(num_attention_heads=16)), (),
        SMALL_LLAMA | dict(num_heads=16, num_kv_heads=16, head_dim=2, qkv_bias=True, d_ff=None,
        experts=Experts(count=60, top_k=4, d_ff=1408, shared_d_ff=5632, shared_gate=True,
        normalize=False, balance_loss=0.001))),
    "qwen3_moe": (small(model_type="qwen3_moe", **NO_DEFAULT), (), SMALL_LLAMA
        | dict(num_kv_heads=4, head_dim=2, qk_norm=True, d_ff=None,
        experts=Experts(count=128, top_k=8, d_ff=768, normalize=False, balance_loss=0.001))),
    "deepseek_v2": (small(model_type="deepseek_v2", num_experts_per_tok=2, **NO_DEFAULT
        | dict(head_dim=...)), (), SMALL_DEEPSEEK | dict(d_ff=None, experts=Experts(count=64,
        top_k=2, d_ff=1407, shared_d_ff=2814, normalize=False, balance_loss=0.001))),
    "deepseek_v3": (small(model_type="deepseek_v3", num_hidden_layers=4, **NO_DEFAULT
        | dict(head_dim=...)), (), SMALL_DEEPSEEK | dict(num_layers=4, experts=Experts(count=256,
        top_k=8, d_ff=2048, shared_d_ff=2048, dense_layers=3, groups=8, top_groups=4, group_best=2,
        score="sigmoid", selection_bias=True, scale=2.5, balance_loss=0.001))),
    "kimi_linear": (small(model_type="kimi_linear", num_hidden_layers=6, **NO_DEFAULT
        | dict(head_dim=...)), (), SMALL_DEEPSEEK | dict(positions=None, num_layers=6,
        mixers=("gated_delta",) * 4 + ("latent_attention",), norm_eps=1e-5,
        latent_attention=LatentAttention(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        gated_delta=GatedDelta(num_key_heads=32, num_value_heads=32, key_dim=128, value_dim=128,
        decay_rank=128, gate_rank=128, gate_activation="sigmoid"),
        experts=Experts(count=256, top_k=8, d_ff=1024, shared_d_ff=1024, dense_layers=1,
        score="sigmoid", selection_bias=True, scale=2.446, balance_loss=0.0))),
    "lfm2": (small(model_type="lfm2", full_attn_idxs=[1], **NO_DEFAULT), (), SMALL_LLAMA | EIGHT
        | dict(d_ff=256, norm_eps=1e-5, qk_norm=True, tie_embeddings=True, positions=Rope(base=1e6),
        mixers=("short_conv", "attention"), short_conv=ShortConv())),
    "gpt_oss": (small(model_type="gpt_oss", rope_scaling=dict(rope_type="default"), **NO_DEFAULT
        | dict(head_dim=...)), (), SMALL_LLAMA | dict(num_kv_heads=8, head_dim=64, norm_eps=1e-5,
        positions=Rope(base=150_000.0), window=(128, None), attention_sinks=True, use_bias=True,
        activation="quick_gelu", glu_limit=7.0, glu_unit_offset=True, ff_bias=True,
        experts=Experts(count=128, top_k=4, router_bias=True, balance_loss=0.001))),
    "gemma": (small(model_type="gemma", **NO_DEFAULT | dict(num_attention_heads=16, head_dim=...)),
        (), SMALL_GEMMA | dict(num_heads=16, num_kv_heads=16, head_dim=256)),
    "gemma2": (small(model_type="gemma2", **NO_DEFAULT | dict(head_dim=...)), (), CAPPED
        | SMALL_GEMMA | dict(window=(4096, None), attention_softcap=50.0, logit_softcap=30.0,
        attention_scale=1 / 16)),
    "gemma3_text": (small(model_type="gemma3_text", **NO_DEFAULT
        | dict(head_dim=..., num_hidden_layers=12)), (), CAPPED | SMALL_GEMMA
        | dict(num_layers=12, window=(4096,) * 5 + (None,), qk_norm=True, attention_scale=1 / 16,
        positions=Rope(base=1e6, window_base=10_000.0))),
    "phi3": (small(model_type="phi3", **NO_DEFAULT), (), SMALL_LLAMA | EIGHT | dict(norm_eps=1e-5)),
    "granite": (small(model_type="granite", **NO_DEFAULT), (), SMALL_LLAMA | EIGHT
        | dict(attention_scale=1.0)),
    "smollm3": (small(model_type="smollm3", **NO_DEFAULT | dict(num_hidden_layers=5)), (),
        SMALL_LLAMA | dict(num_layers=5, num_kv_heads=4, head_dim=2, tie_embeddings=True,
        positions=Rope(base=2e6, pattern=(True, True, True, False)))),
    "olmo2": (small(model_type="olmo2", **NO_DEFAULT), (), SMALL_LLAMA | EIGHT | OLMO
        | dict(norm_eps=1e-5)),
    "olmo3": (small(model_type="olmo3", **NO_DEFAULT | dict(num_hidden_layers=8)), (), SMALL_LLAMA
        | EIGHT | OLMO | dict(norm_eps=1e-5, num_layers=8, window=(4096,) * 3 + (None,),
        positions=Rope(base=5e5))),
    "glm": (small(model_type="glm", **WIDE_HEADS), (), SMALL_LLAMA | GLM),
    "glm4": (small(model_type="glm4", **WIDE_HEADS), (), SMALL_LLAMA | GLM
        | dict(norm_order="sandwich")),
    "ernie4_5": (small(model_type="ernie4_5", **WIDE_HEADS), (), SMALL_LLAMA | dict(num_kv_heads=2,
        head_dim=128, norm_eps=1e-5, tie_embeddings=True,
        positions=Rope(base=5e5, pairing="interleaved"))),
    "seed_oss": (small(model_type="seed_oss", **WIDE_HEADS), (), SMALL_LLAMA | dict(num_kv_heads=8,
        head_dim=128, qkv_bias=True, dropout=0.1, attention_dropout=0.1)),
    "helium": (small(model_type="helium", **WIDE_HEADS | dict(hidden_size=2560,
        num_attention_heads=20)), (), SMALL_LLAMA | dict(d_model=2560, num_heads=20,
        num_kv_heads=20, head_dim=128, norm_eps=1e-8,
        positions=Rope(base=1e5, pairing="interleaved"))),
    "exaone4": (small(model_type="exaone4", hidden_size=64, num_attention_heads=32,
        num_hidden_layers=5, num_key_value_heads=...), (), SMALL_LLAMA | dict(d_model=64,
        num_layers=5, num_heads=32, num_kv_heads=32, norm_eps=1e-5, norm_order="output",
        qk_norm=True, window=(4096,) * 3 + (None,),
        positions=Rope(pattern=(True, True, True, False)))),
    "arcee": (small(model_type="arcee", **NO_DEFAULT), (), SMALL_LLAMA | EIGHT | PLAIN
        | dict(norm_eps=1e-5)),
    "nemotron": (small(model_type="nemotron", **NO_DEFAULT | dict(head_dim=4)), (), SMALL | BARE
        | PLAIN | dict(num_kv_heads=8, head_dim=4, norm_unit_offset=True,
        tie_embeddings=False, positions=Rope(dims=2))),
    "persimmon": (small(model_type="persimmon", **NO_DEFAULT | dict(head_dim=..., hidden_size=32)),
        (), SMALL | dict(d_model=32, activation="relu_squared", qk_norm=True,
        qk_norm_kind="layernorm", qk_norm_bias=True, tie_embeddings=False, positions=Rope(dims=2))),
    "hunyuan_v1_dense": (small(model_type="hunyuan_v1_dense", **NO_DEFAULT), (), SMALL_LLAMA | EIGHT
        | dict(norm_eps=1e-5, qk_norm=True, qk_norm_after_rope=True)),
    "qwen3_next": (small(model_type="qwen3_next", num_hidden_layers=4,
        **NO_DEFAULT | dict(head_dim=...)), (),
        SMALL_LLAMA | NEXT | dict(num_kv_heads=2, d_ff=None, experts=Experts(count=512, top_k=10,
        d_ff=512, shared_d_ff=512, shared_gate=True, balance_loss=0.001))),
    "qwen3_5_text": (small(model_type="qwen3_5_text", num_hidden_layers=4,
        **NO_DEFAULT | dict(head_dim=...)), (),
        SMALL_LLAMA | NEXT | dict(num_kv_heads=4)),
    "olmo_hybrid": (small(model_type="olmo_hybrid", rope_theta=None, num_hidden_layers=4,
        **NO_DEFAULT | dict(head_dim=..., hidden_size=32)), (), SMALL_LLAMA | EIGHT | dict(
        d_model=32, num_layers=4, head_dim=None, positions=None, norm_order="output", qk_norm=True,
        qk_norm_over="heads", mixers=THREE, gated_delta=GatedDelta(
        num_key_heads=8, num_value_heads=8, key_dim=3, value_dim=6, negative_eigenvalues=True,
        norm_order="pre", norm_eps=1e-5))),
    "apertus": (small(model_type="apertus", **NO_DEFAULT), (), SMALL_LLAMA | EIGHT | dict(glu=False,
        norm_eps=1e-5, qk_norm=True, activation="xielu", positions=Rope(base=12e6, scaling="llama3",
        factor=8.0, original_len=8192, low_freq_factor=1.0, high_freq_factor=4.0))),
    "gpt_neox": (dict(model_type="gpt_neox"), (), NEOX | dict(vocab_size=50432, d_model=6144,
        d_ff=24576, num_layers=44, num_heads=64, positions=Rope(dims=24))),
    "gptj": (dict(model_type="gptj"), (), GPTJ),
    "cohere": (small(model_type="cohere", rope_theta=8e6, **NO_DEFAULT), (), COHERE | EIGHT),
    "cohere2": (small(model_type="cohere2", rope_theta=8e6, **NO_DEFAULT
        | dict(num_hidden_layers=5)), (), COHERE | EIGHT | dict(num_layers=5,
        window=(4096, 4096, 4096, None), positions=Rope(base=8e6, pairing="interleaved",
        pattern=(True, True, True, False)))),
    "phi": (dict(model_type="phi"), (), PHI | dict(d_model=2048, d_ff=8192, num_layers=24)),
    "starcoder2": (small(model_type="starcoder2", num_attention_heads=2, num_key_value_heads=...),
        (), CODER | dict(num_kv_heads=2)),
    "stablelm": (small(model_type="stablelm", hidden_size=256, num_attention_heads=32,
        num_key_value_heads=...), (), CODER | BARE | dict(d_model=256, num_heads=32,
        num_kv_heads=32, activation="silu", glu=True, tie_embeddings=False,
        positions=Rope(dims=2))),
    "opt": (dict(model_type="opt"), (), dict(vocab_size=50272, d_model=768, d_ff=3072,
        num_layers=12, num_heads=12, max_len=2048, positions=Learned(offset=2), activation="relu",
        dropout=0.1)),
    "falcon": (dict(model_type="falcon"), (), BARE | dict(vocab_size=65024, d_model=4544,
        num_layers=32, num_heads=71, num_kv_heads=1, max_len=2048, norm_order="parallel_shared",
        activation="gelu", positions="rope")),
    "bloom": (dict(model_type="bloom"), (), dict(vocab_size=250880, d_model=64, num_layers=2,
        num_heads=8, max_len=2048, positions="alibi", embedding_norm=True)),
    "bert": (dict(model_type="bert"), (), BERT | dict(vocab_size=30522, num_layers=12, max_len=512,
        type_vocab_size=2)),
    "bert with classes": (dict(model_type="bert"), ("bert.pooler.dense.weight", "classifier.weight",
        *TWELVE), BERT | dict(vocab_size=30522, num_layers=12, max_len=512, type_vocab_size=2,
        pooler="tanh", num_classes=2)),
    "bert with a masked-token head": (dict(model_type="bert"),
        ("cls.predictions.transform.dense.weight", *TWELVE), MASKED
        | dict(vocab_size=30522, num_layers=12, max_len=512, type_vocab_size=2)),
    "roberta with a masked-token head": (dict(model_type="roberta"),
        ("lm_head.dense.weight", *TWELVE), MASKED | dict(vocab_size=50265, num_layers=12,
        max_len=510, positions=Learned(offset=2), type_vocab_size=2)),
    "xlm-roberta": (dict(model_type="xlm-roberta"), TWELVE, BERT
        | dict(vocab_size=30522, num_layers=12, max_len=510, positions=Learned(offset=2),
        type_vocab_size=2)),
    "camembert": (dict(model_type="camembert", pad_token_id=0), TWELVE, BERT
        | dict(vocab_size=30522, num_layers=12, max_len=511, positions=Learned(offset=1),
        type_vocab_size=2)),
    "mpnet": (dict(model_type="mpnet"), TWELVE, BERT | dict(vocab_size=30527, num_layers=12,
        max_len=510, positions=Learned(offset=2, buckets=32))),
    "albert": (dict(model_type="albert"), TWELVE, BERT | dict(vocab_size=30000, embedding_dim=128,
        d_model=4096, num_heads=64, d_ff=16384, num_layers=12, max_len=512, type_vocab_size=2,
        share_layers=True, activation="gelu_tanh", dropout=0.0, attention_dropout=0.0)),
    "electra": (dict(model_type="electra"), TWELVE, BERT | dict(vocab_size=30522, embedding_dim=128,
        d_model=256, num_heads=4, d_ff=1024, num_layers=12, max_len=512, type_vocab_size=2)),
    "distilbert with a masked-token head": (dict(model_type="distilbert"),
        ("vocab_transform.weight", *TWELVE), MASKED | dict(vocab_size=30522, num_layers=6,
        max_len=512)),
    "modernbert": (dict(model_type="modernbert"), ("head.dense.weight",
        *(f"tensor {i}" for i in range(22))), dict(kind="encoder", vocab_size=50368, d_model=768,
        d_ff=1152, num_layers=22, num_heads=12, max_len=8192,
        positions=Rope(base=160_000.0, window_base=10_000.0), window=(None, 65, 65),
        activation="gelu", glu=True, use_bias=False, qkv_bias=False, out_bias=False, ff_bias=False,
        embedding_norm=True, first_norm=False, masked_token_head=True, logit_bias=True)),
    "nomic_bert": (dict(model_type="nomic_bert"), TWELVE, dict(kind="encoder", vocab_size=30528,
        d_model=768, d_ff=3072, num_layers=12, num_heads=12, max_len=2048,
        positions=Rope(base=1000.0), activation="silu", glu=True, qkv_bias=False, out_bias=False,
        ff_bias=False, embedding_norm=True, norm_order="post", norm_eps=1e-12, type_vocab_size=2)),
    "t5": (dict(model_type="t5"), tuple(f"decoder.{i}" for i in range(6)),
        dict(kind="encoder-decoder", vocab_size=32128, d_model=512, num_layers=6,
        num_decoder_layers=6, num_heads=8, head_dim=64, d_ff=2048, max_len=512,
        positions=T5Buckets(buckets=32, max_distance=128), norm="rmsnorm", norm_eps=1e-6,
        activation="relu", glu=False, use_bias=False, attention_scale=1.0, tie_embeddings=True,
        logit_scale=512**-0.5, dropout=0.1, attention_dropout=0.1)),
    "mt5": (dict(model_type="mt5"), tuple(f"decoder.{i}" for i in range(8)),
        dict(kind="encoder-decoder", vocab_size=250112, d_model=512, num_layers=8,
        num_decoder_layers=8, num_heads=6, head_dim=64, d_ff=1024, max_len=512,
        positions=T5Buckets(buckets=32, max_distance=128), norm="rmsnorm", norm_eps=1e-6,
        activation="gelu_tanh", glu=True, use_bias=False, attention_scale=1.0, tie_embeddings=True,
        dropout=0.1, attention_dropout=0.1)),
    "bart": (dict(model_type="bart"), (), BART | dict(vocab_size=50265, positions=Learned(offset=2),
        embedding_norm=True, scale_embeddings=False)),
    "mbart": (dict(model_type="mbart"), (), BART | dict(vocab_size=50265,
        positions=Learned(offset=2), embedding_norm=True, norm_order="pre")),
    "m2m_100": (dict(model_type="m2m_100"), (), BART | dict(vocab_size=128112, norm_order="pre",
        activation="relu", scale_embeddings=True, positions=Sinusoidal(layout="halves",
        base=10_000 ** (512 / 511), offset=2), attention_dropout=0.1)),
    "pegasus": (dict(model_type="pegasus"), (), BART | dict(vocab_size=50265,
        positions=Sinusoidal(layout="halves"), norm_order="pre")),
    "marian": (dict(model_type="marian"), (), BART | dict(vocab_size=58101,
        positions=Sinusoidal(layout="halves"))),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_missing_keys_have_transformers_defaults(name):
    """The defaults are literals from the config classes of transformers 5.23."""
    content, tensors, effective = LEFT_OUT[name]
    content = {key: value for key, value in content.items() if value is not ...}
    assert read_config(content, tensors, "config.json") == ModelConfig(**effective)
    assert {name.partition(" ")[0] for name in LEFT_OUT} == set(FAMILIES)


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        (small(), dict(unk_token_id=0)),
        (small(), dict(_model_name_or_path="a/b")),
        (small(), dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, factor=1.0))),
        (small(), dict(rope_scaling=dict(type="default", factor=8.0, low_freq_factor=2.0))),
        (small(), dict(partial_rotary_factor=1.0)),
        (dict(model_type="gpt2"), dict(embd_pdrop=0.0)),
        (dict(model_type="gpt2", activation_function="gelu"),
         dict(activation_function="gelu_python")),
        (small(hidden_act="gelu"), dict(hidden_act="gelu_python")),
        (small(hidden_act="gelu_pytorch_tanh"), dict(hidden_act="gelu_python_tanh")),
        (small(hidden_act="gelu_pytorch_tanh"), dict(hidden_act="gelu_accurate")),
    ],
)  # fmt: skip
def test_keys_without_effect_are_accepted(content, keys):
    plain = read_config(content, (), "config.json")
    assert read_config(content | keys, (), "config.json") == plain


@pytest.mark.parametrize(
    ("content", "rope"),
    [
        (small(model_type="phi3", hidden_size=36, partial_rotary_factor=0.5), Rope(dims=6)),
        (small(model_type="stablelm", hidden_size=30, num_key_value_heads=3,
         rope_parameters=dict(rope_type="linear", rope_theta=5e5, factor=2.0,
         partial_rotary_factor=0.2)), Rope(base=5e5, dims=2, scaling="linear", factor=2.0)),
        (small(model_type="stablelm", hidden_size=18, partial_rotary_factor=0.7), Rope(dims=4)),
    ],
)  # fmt: skip
def test_partial_rotation_round_trips(content, rope):
    config = read_config(content, (), "config.json")
    assert config.positions == rope
    family = FAMILIES[content["model_type"]]
    for dims in range(2, config.key_dim, 2):
        changed = dataclasses.replace(config, positions=dataclasses.replace(rope, dims=dims))
        written = json.loads(json.dumps(write_config(family, changed)))
        assert read_config(written, (), "config.json") == changed


@pytest.mark.parametrize("kind", ["llama", "mistral", "granite", "qwen3", "gemma3_text", "olmo3"])
def test_partial_rotation_unsupported_by_transformers_is_rejected(kind):
    message = "config.json: partial_rotary_factor must be 1: here 4 of .* all of them in the"
    content = small(model_type=kind, num_attention_heads=2, hidden_size=16)
    content |= {} if kind in ("granite", "olmo3") else dict(head_dim=8)
    part = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    if kind in ("gemma3_text", "olmo3"):
        part = dict(sliding_attention=part, full_attention=part)
    for keys in (dict(rope_parameters=part), dict(partial_rotary_factor=0.5)):
        if kind == "olmo3" and "partial_rotary_factor" in keys:
            message = "config.json: partial_rotary_factor must be 1 in every layer"
        with pytest.raises(ConfigError, match=message):
            read_config(content | keys, (), "config.json")


def test_config_misread_by_transformers_is_saved_as_another_family():
    base = dict(
        vocab_size=29, d_model=24, num_layers=1, num_heads=3, d_ff=20, max_len=16, norm="rmsnorm",
        activation="silu", glu=True, use_bias=False, tie_embeddings=False,
    )  # fmt: skip
    part = ModelConfig(**base, positions=Rope(dims=4))
    assert written_family(part) == "phi3"
    for name in ("llama", "mistral", "granite"):
        with pytest.raises(ConfigError, match=rf"positions.dims must .* {name}; .* phi3, "):
            written_family(part, name)
    stretched = Rope(dims=4, scaling="linear", factor=2.0)
    with pytest.raises(ConfigError, match=r"no family .*positions\.dims must be None"):
        written_family(dataclasses.replace(part, positions=stretched))
    odd = ModelConfig(**base | dict(num_heads=5), head_dim=8, positions=Rope())
    assert written_family(odd) == "mistral"
    with pytest.raises(ConfigError, match="d_model=24 must be divisible by num_heads=5, or"):
        written_family(odd, "llama")
    normed = dict(qk_norm=True, qk_norm_over="heads", experts=Experts(count=2), positions=Rope())
    assert written_family(ModelConfig(**base, **normed)) == "olmoe"
    with pytest.raises(ConfigError, match="head_dim is 12: must be hidden_size / num_attention"):
        written_family(ModelConfig(**base, **normed, head_dim=12), "olmoe")


def test_unspecified_token_ids_are_null(tmp_path):
    """Otherwise transformers uses class defaults: the padding of a phi3 is token 32000."""
    config = ModelConfig(
        vocab_size=29, d_model=8, num_layers=1, num_heads=2, d_ff=12, max_len=16, norm="rmsnorm",
        activation="silu", glu=True, use_bias=False, tie_embeddings=False, positions=Rope(),
    )  # fmt: skip
    for family in ("phi3", "llama"):
        keys = dict(eos_token_id=3)
        save_pretrained(tmp_path / family, config, drawn(config), family=family, keys=keys)
        content = json.loads((tmp_path / family / "config.json").read_text())
        ids = {name: value for name, value in content.items() if name.endswith("_token_id")}
        assert ids == dict(bos_token_id=None, eos_token_id=3, pad_token_id=None)


def test_partial_rotation_in_some_gemma_layers_is_rejected():
    near, far = (dict(rope_type="default", partial_rotary_factor=part) for part in (0.5, 0.25))
    content = small(model_type="gemma3_text", head_dim=8)
    content["rope_parameters"] = dict(sliding_attention=near, full_attention=far)
    with pytest.raises(ConfigError, match="partial_rotary_factor must be 1 in every layer"):
        read_config(content, (), "config.json")


FACTORS = dict(short_factor=[1.0, 1.5], long_factor=[2.0, 3.0])


@pytest.mark.parametrize(
    ("content", "rope", "max_len"),
    [
        (scaled("linear", factor=4), Rope(scaling="linear", factor=4.0), 64),
        (scaled("dynamic", factor=2.0, original_max_position_embeddings=16),
         Rope(scaling="dynamic", factor=2.0, original_len=64), 64),
        (scaled("yarn", original_max_position_embeddings=16, truncate=False),
         Rope(scaling="yarn", factor=4.0, original_len=16, truncate=False), 64),
        (scaled("yarn", factor=8.0, mscale=0.5, mscale_all_dim=1.0),
         Rope(scaling="yarn", factor=8.0, original_len=64, attention_factor=(
         1 + 0.05 * math.log(8)) / (1 + 0.1 * math.log(8))), 64),
        (scaled("yarn", factor=8.0, mscale=0.5), Rope(scaling="yarn", factor=8.0, original_len=64),
         64),
        (scaled("yarn", factor=8.0, mscale_all_dim=0.5), Rope(scaling="yarn", factor=8.0,
         original_len=64), 64),
        (scaled("su", original_max_position_embeddings=16, **FACTORS),
         Rope(scaling="longrope", factor=4.0, original_len=16, short_factors=(1.0, 1.5),
         long_factors=(2.0, 3.0)), 16),
        (scaled("longrope", factor=6.0, **FACTORS) | dict(original_max_position_embeddings=32),
         Rope(scaling="longrope", factor=6.0, original_len=32, short_factors=(1.0, 1.5),
         long_factors=(2.0, 3.0)), 32),
    ],
    ids=[
        "linear", "dynamic", "yarn", "mscale", "mscale alone", "mscale_all_dim alone", "su",
        "longrope",
    ],
)  # fmt: skip
def test_rope_scaling_config_is_loaded(content, rope, max_len):
    config = read_config(content, (), "config.json")
    assert config.positions == rope
    assert config.max_len == max_len
    written = json.loads(json.dumps(write_config(FAMILIES["llama"], config)))
    assert read_config(written, (), "config.json") == config


@pytest.mark.parametrize(("factor", "trained"), [(4.0, 16), (6.0, 32), (2.5, 24)])
def test_max_position_embeddings_is_written_as_scaled_length(factor, trained):
    """When read, max_len is the trained length, which needs no scaling."""
    content = scaled("longrope", factor=factor, **FACTORS)
    content["original_max_position_embeddings"] = trained
    written = write_config(FAMILIES["llama"], read_config(content, (), "config.json"))
    assert written["max_position_embeddings"] == factor * trained
    assert written["rope_scaling"]["original_max_position_embeddings"] == trained


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (scaled("ntk", factor=2.0), "rope_scaling: type is 'ntk': must be one of"),
        (scaled("linear"), "rope_scaling: factor is None: must be at least 1 for linear"),
        (scaled("llama3", factor=2.0), "low_freq_factor is missing"),
        (scaled("linear", factor=2.0, twist=1), "rope_scaling: twist is 1"),
        (small(rope_parameters={}, rope_scaling={}), "must be absent, because rope_parameters"),
        (small(partial_rotary_factor=0.25), "partial_rotary_factor is 0.25: 1 of 4 dimensions"),
        (small(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5: must be at most 1"),
        (small(partial_rotary_factor=0), "partial_rotary_factor is 0: must be positive"),
        (small(sliding_window=4), "sliding_window is 4: this key is not"),
        (small(pretraining_tp=2), "pretraining_tp is 2: must be 1"),
        (small(hidden_act="mish"), "hidden_act is 'mish': must be one of"),
        (small(auto_map={"AutoModel": "x.py"}), "code in a checkpoint is never run"),
        (small(attention_bias=0), "attention_bias is 0: must be true or false"),
        (small(head_dim=3), "head_dim"),
        (small(model_type="mamba"), "model_type is 'mamba': must be one of gpt2, llama"),
        (small(model_type="kimi_k2"), "model_type is 'kimi_k2': of the models with latent att"),
        (small(model_type="lfm2_moe"), "of the models by Liquid AI, only lfm2 is supported"),
        (small(model_type="deberta-v2"),
         "model_type is 'deberta-v2': this library does not implement its disentangled attention"),
        (small(model_type="gemma3_text", rope_parameters=dict(rope_type="default")),
         "rope_parameters is 'rope_type': keys must be full_attention and sliding_attention"),
        (small(model_type="qwen2", layer_types=["full_attention"]),
         "layer_types is ['full_attention']: must be a list of 2"),
    ],
)  # fmt: skip
def test_error_names_unsupported_config_key(content, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        read_config(content, (), "DIR/config.json")
    assert str(error.value).startswith("DIR/config.json: ")


# Tensors

GPT2, LLAMA3, GEMMA3 = (
    Path(__file__).parents[1] / "golden" / n for n in ("gpt2", "llama", "gemma3")
)


def test_loaded_parameters_follow_requested_layout():
    """Compare with the raw tensors: GPT-2's fused matrix, and Llama's transposed ones."""
    tensors, (_, params) = load_file(GPT2 / "model.safetensors"), load_pretrained(GPT2)
    block, joint = params["decoder"]["block_1"], tensors["transformer.h.1.attn.c_attn.weight"]
    for i, name in enumerate(("query", "key", "value")):
        part = block["attention"][name]
        want = joint[:, 24 * i : 24 * (i + 1)].reshape(24, 3, 8)
        np.testing.assert_array_equal(part["kernel"], want)
        bias = tensors["transformer.h.1.attn.c_attn.bias"][24 * i : 24 * (i + 1)]
        np.testing.assert_array_equal(part["bias"], bias.reshape(3, 8))
    down = tensors["transformer.h.1.mlp.c_proj.weight"]
    np.testing.assert_array_equal(block["feed_forward"]["down"]["kernel"], down)
    tensors, (_, params) = load_file(LLAMA3 / "model.safetensors"), load_pretrained(LLAMA3)
    block, name = params["decoder"]["block_1"]["attention"], "model.layers.1.self_attn"
    key = tensors[f"{name}.k_proj.weight"]
    np.testing.assert_array_equal(block["key"]["kernel"], key.T.reshape(24, 2, 8))
    out = tensors[f"{name}.o_proj.weight"]
    np.testing.assert_array_equal(block["out"]["kernel"], out.T.reshape(4, 8, 24))
    np.testing.assert_array_equal(params["embed"]["output"], tensors["lm_head.weight"])


def test_sharded_folder_loads_same_model(tmp_path):
    whole = load_pretrained(LLAMA3)
    save_pretrained(tmp_path / "parts", *whole, shard_bytes=9000)
    files = sorted((tmp_path / "parts").glob("model-*.safetensors"))
    assert len(files) > 3
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(load_file(LLAMA3 / "model.safetensors"))
    assert_loads(tmp_path / "parts", whole[0], whole[1])


def bare(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors named like the first published GPT-2: without a prefix, with buffers."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 48, 48), np.float32))
        tensors[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    return tensors


def test_tensor_names_without_prefix_are_accepted_and_preserved(tmp_path):
    folder = changed(GPT2, tmp_path / "bare", bare, n_ctx=48, task_specific_params={"a": 1})
    (folder / "vocab.json").write_text('{"a": 0}')
    (folder / "training_args.bin").write_bytes(b"never copied")
    config, params = load_pretrained(folder)
    assert_same_bits(params, load_pretrained(GPT2)[1])
    save_pretrained(tmp_path / "new", config, params, like=folder, files={"README.md": b"hello"})
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"config.json", "model.safetensors", "vocab.json", "README.md"}
    written = load_file(tmp_path / "new" / "model.safetensors")
    assert set(written) == {n for n in bare(load_file(GPT2 / "model.safetensors")) if n in written}
    assert "wte.weight" in written and not any("attn.masked" in name for name in written)
    content = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (content["n_ctx"], content["task_specific_params"]) == (48, {"a": 1})
    assert_same_bits(load_pretrained(tmp_path / "new")[1], params)


def test_modified_config_replaces_old_keys(tmp_path):
    """A removed RoPE scaling, a dtype, and rope_parameters do not survive."""
    config, params = load_pretrained(LLAMA3, dtype="bfloat16")
    plain = dataclasses.replace(config, positions=Rope(base=500.0), max_len=32)
    save_pretrained(tmp_path / "new", plain, params, like=LLAMA3)
    content = json.loads((tmp_path / "new" / "config.json").read_text())
    old = json.loads((LLAMA3 / "config.json").read_text())
    assert {"rope_parameters", "dtype"} <= set(old) and old["max_position_embeddings"] == 1024
    assert not {"rope_parameters", "rope_scaling", "torch_dtype"} & set(content)
    assert content["initializer_range"] == old["initializer_range"]
    assert (content["dtype"], content["max_position_embeddings"]) == ("bfloat16", 32)
    assert_loads(tmp_path / "new", plain, params)


@pytest.mark.slow_except("folder0-keys0", "folder1-keys1")
@pytest.mark.parametrize(
    ("folder", "keys"),
    [
        (GPT2, dict(n_ctx=48)),
        (LLAMA3, dict(rope_parameters=dict(rope_type="longrope", rope_theta=500.0, factor=2.5,
         short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=400))),
        (GEMMA3, dict(sliding_window_pattern=2, hidden_act="gelu")),
    ],
)  # fmt: skip
def test_unmodified_config_keeps_original_format(tmp_path, folder, keys):
    """If two spellings express the same config, the folder's spelling is kept."""
    before = changed(folder, tmp_path / "before", dict, **keys)
    config, params = load_pretrained(before)
    save_pretrained(tmp_path / "after", config, params, like=before)
    old, new = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("before", "after"))
    assert new == old


def test_all_chat_templates_are_copied(tmp_path):
    before = changed(GEMMA3, tmp_path / "before", dict)
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (before / name).parent.mkdir(exist_ok=True)
        (before / name).write_text(name)
    save_pretrained(tmp_path / "after", *load_pretrained(before), like=before)
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "after" / name).read_text() == name


@pytest.mark.slow
def test_extra_keys_cannot_change_config(tmp_path):
    """This includes keys that the folder omits."""
    before = changed(LLAMA3, tmp_path / "before", dict, rope_parameters=None)
    config, params = load_pretrained(before)
    for name, like in (("like", before), ("new", None)):
        save_pretrained(tmp_path / name, config, params, like=like, keys=dict(rope_theta=5e5))
        assert load_pretrained(tmp_path / name)[0] == config
        with pytest.raises(ConfigError, match="keys rope_scaling: must not change the meaning"):
            linear = dict(rope_scaling=dict(rope_type="linear", factor=2.0))
            save_pretrained(tmp_path / f"{name}2", config, params, like=like, keys=linear)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gemma-2b", dict(hidden_activation="silu"),
         "hidden_activation is 'silu': must match hidden_act, which means 'gelu_tanh'"),
        ("gemma-2b", dict(hidden_act="relu", hidden_activation="gelu"), "which means 'relu'"),
        ("gemma-2b", dict(hidden_act=..., hidden_activation="relu"), "which means 'gelu_tanh'"),
        ("gemma-3-1b-it", dict(attn_logit_softcapping=3.0),
         "attn_logit_softcapping is 3.0: must be None"),
        ("gemma-3-1b-it", dict(_sliding_window_pattern=3),
         "_sliding_window_pattern is 3: must be 6"),
    ],
)  # fmt: skip
def test_ambiguous_gemma_configs_are_rejected(name, keys, message):
    content = {k: v for k, v in (PUBLISHED[name] | keys).items() if v is not ...}
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_config(content, (), "config.json")
    for same in (dict(hidden_activation="gelu"), dict(hidden_activation=None)):
        read_config(PUBLISHED["gemma-2b"] | same, (), "config.json")
    listed = dict(layer_types=["full_attention"] * 26, _sliding_window_pattern=3)
    read_config(PUBLISHED["gemma-3-1b-it"] | listed, (), "config.json")


@pytest.mark.parametrize("name", ["gemma-2-9b", "gemma-3-1b-it"])
def test_gemma_without_windows_round_trips(name):
    """Its sliding_window is a number although no layer uses it."""
    full = dict(layer_types=["full_attention"] * PUBLISHED[name]["num_hidden_layers"])
    config = read_config(PUBLISHED[name] | full | dict(sliding_window=5), (), "config.json")
    assert config.window is None
    written = write_config(FAMILIES[PUBLISHED[name]["model_type"]], config)
    assert written["sliding_window"] == 4096 and written["layer_types"] == full["layer_types"]
    assert written.get("rope_local_base_freq") == (10_000 if name.startswith("gemma-3") else None)
    assert read_config(written, (), "config.json") == config


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_multiple_choice_head_is_rejected(family):
    """Its tensors have the same names as those of a supported head."""
    named = "BertForMultipleChoice" if family == "bert" else "RobertaForMultipleChoice"
    content = dict(model_type=family, num_hidden_layers=1, architectures=[named])
    tensors = ("classifier.weight", f"{family}.pooler.dense.weight")
    with pytest.raises(
        ConfigError, match=rf"architectures is \['{named}'\]: multiple-choice heads"
    ):
        read_config(content, tensors, "config.json")


def test_text_classifier_requires_pooler():
    content = dict(model_type="bert", num_hidden_layers=1)
    for named in (None, ["BertForSequenceClassification"], "BertForTokenClassification"):
        with pytest.raises(
            ConfigError, match=r"architectures is .*: must be, without bert\.pooler"
        ):
            read_config(content | dict(architectures=named), ("classifier.weight",), "config.json")


def test_config_with_softcap_is_not_saved_as_gemma3():
    config = read_config(PUBLISHED["gemma-3-1b-it"], (), "config.json")
    assert written_family(config) == "gemma3_text"
    capped = dataclasses.replace(config, attention_softcap=3.0)
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping is 3\.0: must be None"):
        written_family(capped, "gemma3_text")
    with pytest.raises(ConfigError):
        written_family(capped)


def double(scale: float) -> Any:
    def change(tensors):
        name = "model.embed_tokens.weight"
        copy = tensors[name].copy()
        copy[3, 2] *= scale
        return tensors | {"lm_head.weight": copy}

    return change


def test_stored_copy_of_tied_embeddings_must_match(tmp_path):
    _, params = load_pretrained(changed(GEMMA3, tmp_path / "same", double(1.0)))
    assert_same_bits(params, load_pretrained(GEMMA3)[1])
    folder = changed(GEMMA3, tmp_path / "other", double(2.0))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight must equal model\.embed_tokens"):
        load_pretrained(folder)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM) is None, f"tensor {NORM} is missing"),
        (lambda t: t.pop("lm_head.weight") is None, "tensor lm_head.weight is missing"),
        (lambda t: t | {"model.layers.2.input_layernorm.weight": t[NORM]},
         "model.layers.2.input_layernorm.weight: llama with this config.json has no such"),
        (lambda t: t | {NORM: t[NORM][:23]}, f"{NORM} has shape [23]: config.json requires [24]"),
        (lambda t: t | {NORM: t[NORM].astype(np.float64)},
         f"{NORM} is float64: must be one of float32, bfloat16, float16"),
        (lambda t: t | {"model.embed_tokens.weight": np.zeros((61, 24), np.int8)},
         "model.embed_tokens.weight is int8: must be one of"),
    ],
    ids=["missing", "no output", "unknown", "misshapen", "float64", "int8"],
)  # fmt: skip
def test_error_names_invalid_tensor_and_file(change, message, tmp_path):
    folder = changed(LLAMA3, tmp_path / "bad", lambda t: change(t) or None)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        load_pretrained(folder)
    assert str(folder) in str(error.value)


@pytest.mark.slow
def test_stacked_layers_round_trip(tmp_path):
    config, params = load_pretrained(LLAMA3)
    scanned, stacked = load_pretrained(LLAMA3, scan_layers=True)
    assert scanned == dataclasses.replace(config, scan_layers=True)
    assert_same_bits(stacked, stack_layers(params))
    save_pretrained(tmp_path / "looped", config, params)
    save_pretrained(tmp_path / "scanned", scanned, stacked)
    one, two = (tmp_path / n / "model.safetensors" for n in ("looped", "scanned"))
    assert one.read_bytes() == two.read_bytes()
    with pytest.raises(ConfigError, match="scan_layers"):
        load_pretrained(GEMMA3, scan_layers=True)


def test_mixed_dtypes_are_preserved_without_stacking(tmp_path):
    def mixed(tensors):
        return tensors | {NORM: tensors[NORM].astype(np.float16)}

    folder = changed(LLAMA3, tmp_path / "mixed", mixed)
    config, params = load_pretrained(folder)
    assert params["decoder"]["block_1"]["norm_attention"]["scale"].dtype == np.float16
    assert config.dtype == "float32"
    with pytest.raises(
        CheckpointError, match="norm_attention/scale is float16, but earlier layers"
    ):
        load_pretrained(folder, scan_layers=True)
    load_pretrained(folder, scan_layers=True, dtype="float32")
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        load_pretrained(folder, dtype="int8")


def test_loaded_parameters_follow_requested_sharding():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    _, plain = load_pretrained(LLAMA3)
    _, params = load_pretrained(LLAMA3, sharding=whole)
    assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {whole}
    assert_same_bits(params, plain)
    tree = jax.tree.map(lambda leaf: rows, plain)
    tree["embed"]["tokens"] = whole
    _, params = load_pretrained(LLAMA3, sharding=tree)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == tree
    del tree["embed"]["tokens"]
    with pytest.raises(
        ValueError, match="sharding must match the parameters: they differ at embed/tokens"
    ):
        load_pretrained(LLAMA3, sharding=tree)


EIGHT = """
import json, sys, jax, numpy as np
from transformer_jax import build, load_pretrained
mesh = jax.make_mesh((8,), ("model",))
P = jax.sharding.PartitionSpec
config, plain = load_pretrained(sys.argv[1])
def place(x):
    return jax.sharding.NamedSharding(mesh, P("model") if x.shape[0] % 8 == 0 else P())
_, params = load_pretrained(sys.argv[1], sharding=jax.tree.map(place, plain))
kernel = params["decoder"]["block_1"]["attention"]["query"]["kernel"]
assert [s.data.shape for s in kernel.addressable_shards] == [(3, 4, 8)] * 8
assert len(params["decoder"]["norm"]["scale"].sharding.device_set) == 8
jax.tree.map(np.testing.assert_array_equal, params, plain)
logits = jax.jit(lambda params: build(config).apply({"params": params}, np.arange(6)[None])[0])
np.testing.assert_allclose(logits(params), logits(plain), atol=1e-5)
whole = jax.sharding.NamedSharding(mesh, P())
_, stacked = load_pretrained(sys.argv[1], scan_layers=True, sharding=whole)
assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(stacked)} == {8}
print(json.dumps(len(jax.devices())))
"""


@pytest.mark.long
def test_parameters_are_sharded_over_eight_devices():
    assert on_devices(8, "-c", EIGHT, str(LLAMA3)) == 8


def without(tree: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a copy of the tree without this leaf."""
    first, _, rest = path.partition("/")
    if not rest:
        return {name: leaf for name, leaf in tree.items() if name != first}
    return tree | {first: without(tree[first], rest)}


def test_saving_parameters_that_contradict_config_is_rejected(tmp_path):
    config, params = load_pretrained(LLAMA3)
    for wrong, message in (
        (
            without(params, "decoder/norm/scale"),
            "params must contain decoder/norm/scale, which is missing",
        ),
        (params | {"pooler": params["embed"]["tokens"]}, "params pooler: the config has no such"),
        (
            params | {"embed": params["embed"] | {"tokens": params["embed"]["tokens"][:60]}},
            "params embed/tokens has shape [60, 24]: the config requires [61, 24]",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            save_pretrained(tmp_path / "never", config, wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_error_names_field_that_family_cannot_express(tmp_path):
    config = ModelConfig(vocab_size=31, d_model=6, num_layers=1, num_heads=1, positions="alibi")
    params = drawn(config)
    with pytest.raises(ConfigError, match="no family can express this config") as error:
        save_pretrained(tmp_path / "never", config, params)
    assert "gpt2: positions is Alibi(): must be Learned() in the family gpt2" in str(error.value)
    assert all(f"{name}: " in str(error.value) for name in FAMILIES)
    assert "`checkpoints.checkpoint.save(folder, step, params)` writes" in str(error.value)
    with pytest.raises(
        ConfigError, match=r"^positions is Alibi\(\): must be Learned\(\) in the family gpt2$"
    ):
        save_pretrained(tmp_path / "never", config, params, family="gpt2")
    with pytest.raises(ConfigError, match=r"family is 'llama': .*gpt2 has family 'gpt2'"):
        save_pretrained(tmp_path / "never", config, params, family="llama", like=GPT2)
    with pytest.raises(ConfigError, match="family is 'rwkv': must be one of gpt2, llama"):
        save_pretrained(tmp_path / "never", config, params, family="rwkv")
    assert list(tmp_path.iterdir()) == []


def test_attention_only_model_cannot_be_saved(tmp_path):
    config = ModelConfig(vocab_size=31, d_model=6, num_layers=1, num_heads=1, d_ff=0)
    params = drawn(config)
    with pytest.raises(ConfigError, match="no family can express this config") as error:
        save_pretrained(tmp_path / "never", config, params)
    for name in FAMILIES:
        rule = f"d_ff is 0: every block in the family {name} has a feed-forward"
        assert f"{name}: {rule}" in str(error.value)
        with pytest.raises(ConfigError, match=f"^{rule}$"):
            save_pretrained(tmp_path / "never", config, params, family=name)


def test_max_len_argument_overrides_config(tmp_path):
    stretch = dict(rope_type="dynamic", rope_theta=10_000.0, factor=2.0)
    folder = changed(LLAMA3, tmp_path / "dynamic", dict, rope_parameters=stretch)
    config, params = load_pretrained(folder, max_len=3000)
    rope = config.positions
    assert (config.max_len, rope.length, rope.original_len) == (
        3000,
        3000,
        1024,
    )
    save_pretrained(tmp_path / "again", config, params)
    assert load_pretrained(tmp_path / "again")[0] == load_pretrained(folder)[0]
    config, _ = load_pretrained(LLAMA3, max_len=70)
    assert (config.max_len, config.positions) == (70, load_pretrained(LLAMA3)[0].positions)
    with pytest.raises(ConfigError, match="max_len is 49: the table of learned positions has 48"):
        load_pretrained(GPT2, max_len=49)
    with pytest.raises(ConfigError, match="max_len is 0: must be a positive integer"):
        load_pretrained(LLAMA3, max_len=0)


def test_tensor_names_map_to_parameters():
    config = ModelConfig(vocab_size=31, d_model=12, num_heads=3, num_layers=2)
    names = tensor_names(config, "gpt2")
    parts = ("query", "key", "value")
    assert names["transformer.h.1.attn.c_attn.weight"] == tuple(
        f"decoder/block_1/attention/{part}/kernel" for part in parts
    )
    assert names["transformer.wte.weight"] == ("embed/tokens",)
    assert names == tensor_names(config)  # the first family that can express it
    shapes = parameter_shapes(config)
    assert sorted(path for paths in names.values() for path in paths) == sorted(shapes)


NAMES = json.loads((Path(__file__).parents[1] / "golden/names.json").read_text())["families"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_names_match_transformers(family):
    """The golden files are written by `python -m tests.golden.write_names`."""
    saved = set(NAMES[family]["tensors"])
    config = read_config(NAMES[family]["config"], saved, "config.json")
    if family == "pegasus":  # its positions are computed
        saved -= {f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")}
    if family == "apertus":  # its constants are computed
        constants = {f"model.layers.0.mlp.act_fn.{name}" for name in ("beta", "eps")}
        assert constants < saved and set(FAMILIES[family].computed(config)) == constants
        saved -= constants
    assert set(tensor_names(config, family)) == saved


def test_special_token_roles_match_transformers_classes():
    saved = json.loads((Path(__file__).parents[1] / "golden/names.json").read_text())["classes"]
    assert len(saved) > 15
    assert {name: dict(CLASSES[name].roles) for name in saved} == saved


def test_disabled_options_are_ignored():
    off_keys = dict(is_encoder_decoder=False, is_decoder=False, pruned_heads={}, unsloth_fixed=True)
    plain = PUBLISHED["Llama-2-7b"]
    assert read_config(plain | off_keys, (), "here") == read_config(plain, (), "here")
    for name, value in (("is_encoder_decoder", True), ("pruned_heads", {"0": [1]})):
        with pytest.raises(ConfigError, match=f"{name} is .*: must be"):
            read_config(plain | {name: value}, (), "here")
    with pytest.raises(ConfigError, match="normalize_embedding is True: this key is not"):
        read_config(plain | dict(normalize_embedding=True), (), "here")


def test_type_and_rope_type_must_agree():
    stretch = dict(factor=4.0, original_max_position_embeddings=32)
    for one, two in (("yarn", "default"), ("linear", "yarn")):
        scaling = stretch | dict(type=one, rope_type=two)
        with pytest.raises(ConfigError, match=f"type is '{one}'|rope_type is "):
            read_config(PUBLISHED["Llama-2-7b"] | dict(rope_scaling=scaling), (), "here")


def test_mistral_accepts_layer_types():
    content = PUBLISHED["Mistral-7B-v0.1"]
    layers = ["full_attention", "sliding_attention"] * (content["num_hidden_layers"] // 2)
    config = read_config(content | dict(layer_types=layers), (), "here")
    assert config.window == (None, 4096)
    written = json.loads(json.dumps(write_config(FAMILIES["mistral"], config)))
    assert (written["layer_types"], written["sliding_window"]) == (layers, 4096)
    assert read_config(written, (), "here") == config
    alike = read_config(content, (), "here")
    assert "layer_types" not in write_config(FAMILIES["mistral"], alike)


def test_mistral_with_layer_types_round_trips(tmp_path):
    layers = ["sliding_attention", "full_attention"]
    before = changed(
        LLAMA3, tmp_path / "before", dict, model_type="mistral", layer_types=layers,
        sliding_window=7, attention_bias=..., mlp_bias=..., pretraining_tp=...,
    )  # fmt: skip
    config, params = load_pretrained(before)
    assert config.window == (7, None)
    for name, like in (("new", None), ("like", before)):
        save_pretrained(tmp_path / name, config, params, family="mistral", like=like)
        assert_loads(tmp_path / name, config, params)


def test_missing_output_matrix_error_explains_cause(tmp_path):
    """`AutoModel` saves such folders, which lack the tensors for logits."""

    def headless(tensors):
        del tensors["lm_head.weight"]
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    folder = changed(LLAMA3, tmp_path / "headless", headless, architectures=["LlamaModel"])
    message = (
        "tensor lm_head.weight is missing: tie_word_embeddings is false, so logits need it. The "
        "model was saved without its head, as by AutoModel: save it with its head"
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_pretrained(folder)
    tied = changed(LLAMA3, tmp_path / "tied", headless, tie_word_embeddings=True)
    assert load_pretrained(tied)[0].tie_embeddings


def test_saving_float64_parameters_is_rejected(tmp_path):
    config = ModelConfig(vocab_size=31, d_model=12, num_heads=3, num_layers=1)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), drawn(config))
    with pytest.raises(ValueError, match="is float64: must be one of float32, bfloat16, float16"):
        save_pretrained(tmp_path / "model", config, params)
    assert not (tmp_path / "model").exists()
