"""Decoders compared with `transformers`: logits, generated texts, and gradients."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file

from tests.support.published import (
    LOGITS,
    apply,
    assert_round_trip,
    assert_same_gradients,
    assert_same_logits,
    hidden_states,
    positions,
    randomised,
    reopened,
    saved,
    tokens,
    torch,
    transformers,
    views,
    weights_of,
)
from transformer_jax.config import Rope
from transformer_jax.decoding.beams import LengthPenalty, beam_search
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.logit_processors import Ban, NoRepeatNGram
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache
from transformer_jax.models.positions import rope_frequencies
from transformer_jax.models.stack import stack_layers
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.mxfp4 import dequantize
from transformer_jax.pretrained.save import save_pretrained

AUTO = transformers.AutoModelForCausalLM
VOCAB, LENGTH, WINDOW = 97, 600, 13
TRAINED = 64
"""Sizes for RoPE scalings."""


@dataclass(frozen=True)
class Case:
    """Configuration of a model in `transformers`."""

    model: str
    changes: Any
    trained: int | None = None
    """If the RoPE depends on the sequence length, the maximum length without scaling."""

    def create(self) -> Any:
        torch.manual_seed(0)
        config = self.model.replace("ForCausalLM", "Config").replace("LMHeadModel", "Config")
        config = config.replace("Gemma3C", "Gemma3TextC").replace("Qwen3_5C", "Qwen3_5TextC")
        model = getattr(transformers, self.model)(getattr(transformers, config)(**self.changes))
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # states decay as slowly as in trained models
                parameter.data.sub_(5)
        return model


def gpt2(**changes: Any) -> Case:
    sizes = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH + 1)
    return Case("GPT2LMHeadModel", sizes | changes)


def case(name: str, trained: int | None = None, /, **changes: Any) -> Case:
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(max_position_embeddings=1024)
    return Case(f"{name}ForCausalLM", sizes | changes, trained)


def gptj(**changes: Any) -> Case:
    sizes = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH + 1)
    return Case("GPTJForCausalLM", sizes | dict(rotary_dim=4) | changes)


def opt(**changes: Any) -> Case:
    sizes = dict(vocab_size=VOCAB, hidden_size=32, word_embed_proj_dim=32, ffn_dim=40)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=LENGTH + 1)
    return Case("OPTForCausalLM", sizes | changes)


def bloom(**changes: Any) -> Case:
    sizes = dict(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    return Case("BloomForCausalLM", sizes | changes)


def falcon(**changes: Any) -> Case:
    made = case("Falcon", ffn_hidden_size=40, **changes)
    del made.changes["num_key_value_heads"], made.changes["intermediate_size"]
    return made


def without_groups(name: str, **changes: Any) -> Case:
    """Return a model whose config has no separate number of key heads."""
    made = case(name, **changes)
    del made.changes["num_key_value_heads"]
    return made


neox = partial(without_groups, "GPTNeoX")


def deepseek(version: int, **changes: Any) -> Case:
    """Return a DeepSeek whose widths all differ."""
    sizes = dict(num_key_value_heads=4, q_lora_rank=11, kv_lora_rank=14, qk_nope_head_dim=6)
    sizes |= dict(qk_rope_head_dim=8, v_head_dim=5, n_routed_experts=8, num_experts_per_tok=3)
    sizes |= dict(n_shared_experts=2, moe_intermediate_size=12)
    return case(f"DeepseekV{version}", **sizes | changes)


def kimi(**changes: Any) -> Case:
    """Return a Kimi Linear whose widths all differ."""
    sizes = dict(num_key_value_heads=4, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=8)
    sizes |= dict(v_head_dim=5, num_local_experts=8, num_experts_per_tok=3, n_shared_experts=2)
    sizes |= dict(moe_intermediate_size=12, linear_num_heads=3, linear_head_dim=16)
    layers = ["linear_attention", "full_attention"]
    return case("KimiLinear", **sizes | dict(layer_types=layers) | OLMO | changes)


def rope(kind: str, trained: int | None = None, /, **parameters: Any) -> Case:
    """Return a Llama with a RoPE scaling."""
    parameters |= dict(rope_type=kind, rope_theta=10_000.0)
    size = TRAINED if kind == "dynamic" else 1024
    return case("Llama", trained, rope_parameters=parameters, max_position_embeddings=size)


yarn = partial(rope, "yarn", factor=16.0, original_max_position_embeddings=TRAINED)
PATTERN = [f"{kind}_attention" for kind in ("sliding", "sliding", "full")]
YARN = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=TRAINED)
YARN |= dict(rope_theta=150_000.0, beta_fast=32.0, beta_slow=1.0)
NEAR = dict(rope_type="default", rope_theta=100.0)
FAR = dict(rope_type="linear", rope_theta=10_000.0, factor=4.0)
MIXED = [f"{kind}_attention" for kind in ("linear", "linear", "full")]
STATES: dict[str, Any] = dict(
    num_hidden_layers=4, layer_types=[*MIXED, "full_attention"], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=16,
)  # fmt: skip
ODD = dict(
    num_hidden_layers=3, layer_types=MIXED, linear_num_key_heads=3, linear_num_value_heads=3,
    linear_key_head_dim=14, linear_value_head_dim=10, linear_conv_kernel_dim=3,
)  # fmt: skip
NEXT = STATES | dict(
    num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
)  # fmt: skip
OLMO = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
CONVOLUTIONS = dict(
    num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2, intermediate_size=75,
    block_ffn_dim_multiplier=1.3, block_multiple_of=7, **OLMO,
)  # fmt: skip

CASES = {
    "gpt2": gpt2(),
    "gpt2, untied": gpt2(
        n_head=2, n_inner=40, activation_function="relu", layer_norm_epsilon=1e-2,
        tie_word_embeddings=False,
    ),
    "llama": case("Llama", num_key_value_heads=4),
    "llama, tied": case(
        "Llama", hidden_size=36, num_attention_heads=9, num_key_value_heads=3,
        tie_word_embeddings=True, rms_norm_eps=1e-2,
        rope_parameters=dict(rope_type="default", rope_theta=100_000.0),
    ),
    "llama, MQA and biases": case(
        "Llama", num_key_value_heads=1, head_dim=12, attention_bias=True, mlp_bias=True
    ),
    "llama, biases of attention": case("Llama", attention_bias=True),
    "llama, biases of the MLP": case("Llama", mlp_bias=True),
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", TRAINED, factor=4.0),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=TRAINED,
    ),
    "yarn": yarn(),
    "yarn, betas": yarn(beta_fast=8.0, beta_slow=0.5),
    "yarn, mscale": yarn(mscale=0.7, mscale_all_dim=1.3),
    "yarn, untruncated": yarn(truncate=False),
    "yarn, attention factor": yarn(attention_factor=0.8),
    "longrope, factor": rope(
        "longrope", TRAINED, factor=16.0, original_max_position_embeddings=TRAINED,
        short_factor=[1.0, 1.1, 1.2, 1.5], long_factor=[4.0, 5.0, 7.0, 9.0],  # f32 angles
    ),
    "longrope, attention factor": rope(
        "longrope", TRAINED, original_max_position_embeddings=TRAINED, attention_factor=1.2,
        short_factor=[1.0, 1.1, 1.2, 1.5], long_factor=[1.3, 2.0, 5.0, 9.0],
    ),
    "mistral": case("Mistral", sliding_window=WINDOW),
    "mistral, no window": case("Mistral", sliding_window=None, head_dim=12),
    "qwen2": case(
        "Qwen2", num_hidden_layers=3, use_sliding_window=True, sliding_window=WINDOW,
        max_window_layers=1, tie_word_embeddings=True,
    ),
    "qwen2, untied": case("Qwen2", num_key_value_heads=1),
    "qwen3": case("Qwen3", head_dim=16),
    "qwen3, biases": case(
        "Qwen3", head_dim=6, attention_bias=True, tie_word_embeddings=True,
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0,
    ),
    "mixtral": case("Mixtral", num_local_experts=5, num_experts_per_tok=2),
    "mixtral, window": case(
        "Mixtral", num_local_experts=3, num_experts_per_tok=1, sliding_window=WINDOW, head_dim=12,
        tie_word_embeddings=True,
    ),
    "olmoe": case("Olmoe", num_experts=6, num_experts_per_tok=3),
    "olmoe, biases": case(
        "Olmoe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, attention_bias=True,
        num_key_value_heads=4, tie_word_embeddings=True,
    ),
    "qwen2 moe": case(
        "Qwen2Moe", num_experts=4, num_experts_per_tok=3, moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    ),
    "qwen2 moe, normalised": case(
        "Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
        shared_expert_intermediate_size=8, norm_topk_prob=True, qkv_bias=False,
    ),
    "qwen3 moe": case(
        "Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        norm_topk_prob=True,
    ),
    "qwen3 moe, biases": case(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=3, moe_intermediate_size=8, head_dim=12,
        attention_bias=True,
    ),
    "gpt-oss": case(
        "GptOss", num_local_experts=5, num_experts_per_tok=2, sliding_window=WINDOW, head_dim=8,
        rope_parameters=YARN | dict(truncate=False),
    ),
    "gpt-oss, no biases of attention": case(
        "GptOss", num_local_experts=3, num_experts_per_tok=3, sliding_window=WINDOW, head_dim=12,
        attention_bias=False, tie_word_embeddings=True, swiglu_limit=0.3, layer_types=PATTERN[1:],
        rope_parameters=NEAR,
    ),
    "gemma": case("Gemma", num_key_value_heads=1, head_dim=16),
    "gemma, MHA": case("Gemma", num_key_value_heads=4, head_dim=8, hidden_act="gelu"),
    "gemma2": case("Gemma2", num_hidden_layers=3, head_dim=16, sliding_window=WINDOW),
    "gemma2, other caps": case(
        "Gemma2", head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=24,
        attn_logit_softcapping=None, final_logit_softcapping=2.0, layer_types=PATTERN[1:],
    ),
    "gemma3": case(
        "Gemma3", num_hidden_layers=3, num_key_value_heads=1, head_dim=16, sliding_window=WINDOW,
        layer_types=PATTERN,
    ),
    "gemma3, linear": case(
        "Gemma3", num_hidden_layers=4, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=5,
        layer_types=[*PATTERN, PATTERN[0]], tie_word_embeddings=False,
        rope_parameters=dict(sliding_attention=NEAR, full_attention=FAR),
    ),
    "phi3": case("Phi3", pad_token_id=0, sliding_window=WINDOW),
    "phi3, longrope": case(
        "Phi3", TRAINED, pad_token_id=0, num_key_value_heads=1, tie_word_embeddings=True,
        original_max_position_embeddings=TRAINED,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=10_000.0, partial_rotary_factor=0.75,
            short_factor=[1.0, 1.1, 1.5], long_factor=[4.0, 5.0, 9.0],
        ),
    ),
    "granite": case(
        "Granite", embedding_multiplier=3, residual_multiplier=0.6, logits_scaling=1.5,
        attention_multiplier=0.2,
    ),
    "granite, biases": case(
        "Granite", head_dim=12, attention_bias=True, tie_word_embeddings=True,
        residual_multiplier=0.7, attention_multiplier=0.3,
    ),
    "smollm3": case("SmolLM3", num_hidden_layers=3, pad_token_id=0, no_rope_layer_interval=2),
    "smollm3, windows": case(
        "SmolLM3", num_hidden_layers=3, pad_token_id=0, no_rope_layers=[0, 1, 1], mlp_bias=True,
        use_sliding_window=True, sliding_window=WINDOW, tie_word_embeddings=False,
    ),
    "olmo2": case("Olmo2", head_dim=12, rms_norm_eps=1e-2),
    "olmo2, biases": case(
        "Olmo2", num_key_value_heads=4, attention_bias=True, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=500_000.0),
    ),
    "olmo3": case("Olmo3", num_hidden_layers=4, sliding_window=WINDOW),
    "olmo3, linear": case(
        "Olmo3", num_hidden_layers=3, head_dim=6, sliding_window=WINDOW, layer_types=PATTERN,
        rope_parameters=dict(sliding_attention=NEAR, full_attention=FAR),
    ),
    "glm": case("Glm", pad_token_id=0, head_dim=8),
    "glm, no biases": case(
        "Glm", pad_token_id=0, num_key_value_heads=1, head_dim=12, attention_bias=False,
        tie_word_embeddings=True, rms_norm_eps=1e-2,
        rope_parameters=YARN | dict(partial_rotary_factor=1 / 3),
    ),
    "glm4": case("Glm4", pad_token_id=0, head_dim=12, num_hidden_layers=3),
    "glm4, whole heads": case(
        "Glm4", pad_token_id=0, head_dim=8, attention_bias=False, tie_word_embeddings=True,
        hidden_act="relu",
        rope_parameters=FAR | dict(partial_rotary_factor=1.0),
    ),
    "ernie": case("Ernie4_5", head_dim=8),
    "ernie, biases": case(
        "Ernie4_5", head_dim=None, use_bias=True, tie_word_embeddings=False, rms_norm_eps=1e-2,
        rope_parameters=YARN,
    ),
    "seed": case("SeedOss", head_dim=12),
    "seed, other biases": case(
        "SeedOss", head_dim=None, attention_bias=False, attention_out_bias=True, mlp_bias=True,
        tie_word_embeddings=True, rope_parameters=FAR,
    ),
    "helium": case("Helium", pad_token_id=0, head_dim=8),
    "helium, biases": case(
        "Helium", pad_token_id=0, hidden_size=48, head_dim=12, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True, rope_parameters=FAR,
    ),
    "exaone4": case("Exaone4", num_hidden_layers=4, sliding_window=WINDOW),
    "exaone4, no window": case(
        "Exaone4", sliding_window=None, layer_types=2 * PATTERN[2:], rms_norm_eps=1e-2,
        tie_word_embeddings=True, rope_parameters=YARN,
    ),
    "exaone4, no rotation": case("Exaone4", head_dim=12, sliding_window_pattern=1),
    "arcee": case("Arcee"),
    "arcee, biases": case(
        "Arcee", head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rope_parameters=YARN,
    ),
    "nemotron": case("Nemotron"),
    "nemotron, biases": case(
        "Nemotron", head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        norm_eps=1e-2, rope_parameters=FAR | dict(partial_rotary_factor=1 / 3),
    ),
    "persimmon": without_groups("Persimmon"),
    "persimmon, no norms of heads": without_groups(
        "Persimmon", qk_layernorm=False, hidden_act="gelu_new", tie_word_embeddings=True,
        rope_parameters=FAR | dict(partial_rotary_factor=0.25),
    ),
    "hunyuan": case("HunYuanDenseV1", head_dim=12, attention_bias=True, tie_word_embeddings=True),
    "hunyuan, alpha": case(
        "HunYuanDenseV1", head_dim=8, rms_norm_eps=1e-2,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=1.0, alpha=100.0),
    ),
    "qwen3 next": case("Qwen3Next", head_dim=16, **NEXT),
    "qwen3 next, biases": case(
        "Qwen3Next", head_dim=12, attention_bias=True, norm_topk_prob=False, **NEXT | ODD,
        rope_parameters=FAR | dict(partial_rotary_factor=0.5),
    ),
    "qwen3.5": case("Qwen3_5", head_dim=16, **STATES),
    "qwen3.5, tied": case(
        "Qwen3_5", head_dim=8, tie_word_embeddings=True, **STATES | ODD,
        rope_parameters=NEAR | dict(partial_rotary_factor=1.0, mrope_section=[2, 1, 1]),
    ),
    "olmo hybrid": case("OlmoHybrid", rope_parameters=NEAR, **STATES | OLMO),
    "olmo hybrid, no rotation": case(
        "OlmoHybrid", num_key_value_heads=4, attention_bias=True, linear_allow_neg_eigval=False,
        rope_parameters=dict(rope_type="default", rope_theta=None), **STATES | ODD | OLMO,
    ),
    "apertus": case("Apertus", pad_token_id=0),
    "apertus, relu2": case(
        "Apertus", pad_token_id=0, head_dim=12, hidden_act="relu2", attention_bias=True,
        tie_word_embeddings=True, rms_norm_eps=1e-2, rope_parameters=NEAR,
    ),
    "starcoder2": case("Starcoder2", sliding_window=WINDOW),
    "starcoder2, no biases": case(
        "Starcoder2", num_key_value_heads=1, use_bias=False, tie_word_embeddings=False,
        norm_epsilon=1e-2, rope_parameters=dict(rope_type="linear", rope_theta=1e5, factor=2.0),
    ),
    "stablelm": case("StableLm"),
    "stablelm, parallel": case(
        "StableLm", use_parallel_residual=True, use_qkv_bias=True, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "stablelm, norms of heads": case("StableLm", qk_layernorm=True, layer_norm_eps=1e-2),
    "opt": opt(),
    "opt, post-norm": opt(
        do_layer_norm_before=False, enable_bias=False, tie_word_embeddings=False,
        activation_function="gelu",
    ),
    "bloom": bloom(),
    "bloom, 3 heads": bloom(
        hidden_size=36, n_head=3, layer_norm_epsilon=1e-2, tie_word_embeddings=False
    ),
    "falcon": falcon(),
    "falcon, in turn": falcon(
        multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False
    ),
    "falcon, groups": falcon(
        new_decoder_architecture=True, num_kv_heads=2, activation="relu", layer_norm_epsilon=1e-2,
        rope_parameters=dict(rope_type="linear", rope_theta=1e5, factor=2.0),
    ),
    "falcon, groups with one norm": falcon(
        new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "neox": neox(hidden_size=64),
    "neox, in turn": neox(
        use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True,
        hidden_act="relu", layer_norm_eps=1e-2,
        rope_parameters=dict(
            rope_type="linear", rope_theta=1000.0, factor=4.0, partial_rotary_factor=0.5
        ),
    ),
    "gptj": gptj(),
    "gptj, tied": gptj(
        rotary_dim=8, n_inner=40, activation_function="relu", layer_norm_epsilon=1e-2,
        tie_word_embeddings=True,
    ),
    "cohere": case("Cohere", logit_scale=1.5),
    "cohere, norms of heads": case(
        "Cohere", use_qk_norm=True, attention_bias=True, tie_word_embeddings=False, logit_scale=1.0,
        head_dim=12, layer_norm_eps=1e-2,
    ),
    "cohere2": case("Cohere2", num_hidden_layers=4, sliding_window=WINDOW, logit_scale=0.75),
    "cohere2, linear": case(
        "Cohere2", num_hidden_layers=3, sliding_window=WINDOW, attention_bias=True,
        layer_types=[PATTERN[2], *PATTERN[:2]], logit_scale=1.25,
        rope_parameters=dict(rope_type="linear", rope_theta=1e5, factor=4.0),
    ),
    "phi": case("Phi", num_key_value_heads=4),
    "phi, grouped": case(
        "Phi", tie_word_embeddings=True, layer_norm_eps=1e-2,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=1.0),
    ),
    "kimi": kimi(),
    "kimi, groups": kimi(
        num_hidden_layers=3, layer_types=["full_attention", *MIXED[::2]], linear_num_heads=2,
        linear_head_dim=10, linear_conv_kernel_dim=3, q_lora_rank=11, n_group=4, topk_group=2,
        norm_topk_prob=False, n_shared_experts=1, rms_norm_eps=1e-2,
        mlp_layer_types=["dense", "dense", "sparse"],
    ),
    "lfm2": case("Lfm2", **CONVOLUTIONS),
    "lfm2, wide": case(
        "Lfm2", num_hidden_layers=3, layer_types=["full_attention", "conv", "conv"],
        conv_L_cache=5, block_auto_adjust_ff_dim=False, tie_word_embeddings=False,
        num_key_value_heads=1, norm_eps=1e-2, rope_parameters=FAR, **OLMO,
    ),
    "deepseek2": deepseek(2, q_lora_rank=None, first_k_dense_replace=1, num_hidden_layers=3),
    "deepseek2, groups": deepseek(
        2, n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=1.7,
        n_shared_experts=1, tie_word_embeddings=True, rms_norm_eps=1e-2,
        rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.3),
    ),
    "deepseek3": deepseek(
        3, n_group=2, topk_group=1, first_k_dense_replace=1,
        rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
    ),
    "deepseek3, halves": deepseek(
        3, n_group=1, topk_group=1, q_lora_rank=None, first_k_dense_replace=0,
        rope_interleave=False, norm_topk_prob=False, hidden_act="gelu", v_head_dim=9,
        rope_parameters=YARN | dict(mscale_all_dim=0.6),
    ),
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("quick_compilation")

SELDOM = (
    "llama, biases of attention", "llama, biases of the MLP", "yarn, betas", "yarn, untruncated",
    "yarn, attention factor", "longrope, attention factor", "linear", "gemma, MHA",
    "gptj, tied", "falcon, groups with one norm",
)  # fmt: skip
"""Cases similar to others; RoPE frequencies are compared in every run anyway."""


def often(names: Any, seldom: Any) -> list[Any]:
    """Mark some names as `long`, and as `slow` all but one family with parallel branches, output
    norms, or LayerNorm."""

    def marks(name: str) -> Any:
        if name in seldom:
            return pytest.mark.long
        return pytest.mark.slow if name.startswith(SLOW) and name != "neox" else ()

    return [pytest.param(name, marks=marks(name)) for name in names]


SLOW = (
    "granite", "smollm3", "cohere", "falcon", "neox", "gptj", "phi", "olmo", "starcoder2",
    "stablelm", "opt", "bloom", "glm", "ernie", "seed", "helium", "exaone4",
    "arcee", "nemotron", "persimmon", "hunyuan", "apertus", "qwen3 next, ", "qwen3.5, ",
    "deepseek", "kimi", "lfm2, ",
)  # fmt: skip


ONE_OF_EACH = "gpt2", "llama, tied", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"
ONE_OF_EACH += "neox", "gptj", "phi", "phi3", "olmo2", "olmo3"
ONE_OF_EACH += "granite", "smollm3", "cohere", "cohere2", "falcon", "starcoder2", "stablelm"
ONE_OF_EACH += "opt", "bloom", "glm", "glm4", "ernie", "seed", "helium", "exaone4"
ONE_OF_EACH += "arcee", "nemotron", "persimmon", "hunyuan", "apertus", "qwen3.5", "olmo hybrid"
ONE_OF_EACH += ("lfm2",)
WITH_EXPERTS = "mixtral", "olmoe", "qwen2 moe", "qwen3 moe", "gpt-oss", "qwen3 next"
WITH_EXPERTS += "deepseek2", "deepseek2, groups", "deepseek3", "kimi"
"""In memory, transformers has one tensor for all experts of a block, so their gradients are
compared only with formulas (tests/models/test_experts.py)."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that writes the folder of a case once."""

    @cache
    def folder(name: str) -> Path:
        return saved(randomised(CASES[name].create(), seed=len(name)), tmp_path_factory.mktemp("m"))

    return folder


def ours(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Load the model, scanned if all layers have the same structure, to compile faster."""
    keys = json.loads((folder / "config.json").read_text())
    patterns = [keys.get(name) or () for name in ("layer_types", "no_rope_layers")]
    patterns += [("kv_lora_rank", None)] if "kv_lora_rank" in keys else []
    return load_pretrained(folder, scan_layers=all(len(set(p)) < 2 for p in patterns), **options)


def padded(length: int) -> np.ndarray:  # bool[2, T]
    """Return the valid tokens of a row with left padding and a row with right padding."""
    at = np.arange(length)
    return np.stack([at >= length // 15, at < length - length // 10])


def model_call(model: Any, ids: np.ndarray, valid: np.ndarray) -> Any:
    inputs = dict(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(valid).long())
    inputs["position_ids"] = inputs["attention_mask"].cumsum(1).sub(1).clamp(min=0)
    return partial(model, **inputs)


def assert_same_views(captured: dict[str, Any], want: Any, real: np.ndarray) -> None:
    """Compare hidden states and attention weights of every layer at valid positions."""
    hidden, actual = torch.stack(want.hidden_states, 1).numpy(), hidden_states(captured)
    assert actual.shape == hidden.shape
    rows, at = np.nonzero(real)
    difference = np.abs(actual - hidden)[rows, :, at]
    assert difference.max() <= LOGITS * max(1.0, np.abs(hidden[rows, :, at]).max() / 10)
    weights, actual = torch.stack(want.attentions, 1).numpy(), weights_of(captured)
    assert actual.shape == weights.shape
    assert np.abs(actual - weights)[rows, :, :, at].max() <= 2e-5


WITHOUT_ROPE = "gpt2", "gptj", "opt", "bloom", "exaone4, no r", "olmo hybrid, no r", "kimi"


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith(WITHOUT_ROPE)])
def test_rope_frequencies_match_transformers(name, folders):
    """Compares the frequencies that `transformers` uses for 600 tokens."""
    options = {} if CASES[name].trained is None else dict(max_len=LENGTH)
    config, _ = load_pretrained(folders(name), **options)
    rotary = reopened(folders(name), AUTO).base_model.rotary_emb
    pattern = name.startswith(("gemma3", "olmo3"))
    for layer in ("full_attention", "sliding_attention") if pattern else (None,):
        near = layer == "sliding_attention"
        rope = config.positions
        stretch = Rope(base=rope.window_base or rope.base) if near else rope
        rotary(torch.zeros(1), torch.arange(LENGTH)[None], *([layer] if pattern else []))
        prefix = f"{layer}_" if pattern else ""
        latent = config.latent_attention
        width = config.key_dim if latent is None else latent.rope_dim
        frequencies, factor = rope_frequencies(stretch, width)
        want = getattr(rotary, f"{prefix}inv_freq").numpy()
        np.testing.assert_allclose(frequencies, want, rtol=1e-6)
        assert abs(factor - getattr(rotary, f"{prefix}attention_scaling")) < 1e-7


@pytest.mark.parametrize("name", often(CASES, SELDOM))
def test_logits_and_internals_match_transformers(name, folders, rng):
    """600 tokens with padding on either side, or fewer if the RoPE depends on the length."""
    folder, trained = folders(name), CASES[name].trained
    for length in (LENGTH,) if trained is None else (trained, LENGTH):
        ids, valid = tokens(rng, VOCAB, 2, length), padded(length)
        config, params = ours(folder)
        assert (config.kind, config.dtype) == ("decoder", "float32")
        if trained is not None:
            assert config.max_len == trained
        if length > config.max_len:
            config, params = ours(folder, max_len=int(valid.sum(axis=1).max()))
        with torch.no_grad():
            model = reopened(folder, AUTO)
            want = model_call(model, ids, valid)(output_hidden_states=True, output_attentions=True)
        read = jax.jit(partial(build(config).apply, capture=views(config)))
        got, _, seen = read({"params": params}, ids, positions=positions(valid))
        assert_same_logits(got, want.logits, valid)
        assert_same_views(seen, want, valid)


LIKE = "phi3", "falcon", "persimmon", "smollm3"
"""Families some of whose configs an earlier family can express, and smollm3, which pads with token
128004."""


@pytest.mark.parametrize("name", often(CASES, ()))
def test_saved_folder_matches_original(name, folders, rng, tmp_path):
    ids = torch.tensor(tokens(rng, VOCAB, 1, 80)).long()
    like = folders(name) if name.startswith(LIKE) else None
    assert_round_trip(folders(name), tmp_path, AUTO, like, input_ids=ids)


# in memory, OLMo Hybrid has one tensor for the three convolutions in its files
@pytest.mark.parametrize("name", often([n for n in ONE_OF_EACH if n != "olmo hybrid"], ()))
def test_cross_entropy_gradients_match_transformers(name, folders, rng):
    folder = folders(name)
    config, params = load_pretrained(folder)
    scanned, _ = ours(folder)
    ids, valid = tokens(rng, VOCAB, 2, 41), padded(41)
    labelled = valid[:, 1:] & valid[:, :-1]
    model = reopened(folder, AUTO)
    logits = model_call(model, ids, valid)().logits[:, :-1][torch.tensor(labelled)]
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[:, 1:][labelled]).long())

    def loss(params):
        params = stack_layers(params) if scanned.scan_layers else params
        logits, _ = build(scanned).apply({"params": params}, ids, positions=positions(valid))
        chosen = jax.nn.log_softmax(logits[:, :-1])
        chosen = jnp.take_along_axis(chosen, ids[:, 1:, None], axis=-1)[..., 0]
        return -(chosen * labelled).sum() / labelled.sum()

    table = FAMILIES[model.config.model_type].table(config)
    if name == "neox":  # transformers uses another name in memory than in files
        table = [dataclasses.replace(m, tensor=HEAD.get(m.tensor, m.tensor)) for m in table]
    assert_same_gradients(config, params, loss, model, want, table)


HEAD = {"embed_out.weight": "lm_head.weight"}
OFTEN_BEAMS = "gpt2", "mistral", "gemma3"
NEW = 20
PROCESSORS = Ban(0), NoRepeatNGram(2)
"""Families where transformers counts padding in the text as generated."""
LENGTHS = np.array([23, 9])
CAPACITY = 23 + NEW


def prompts(rng: np.random.Generator) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """Return two prompts with right padding for this library and left padding for transformers."""
    ids = tokens(rng, VOCAB, 2, LENGTHS.max())
    left, mask = np.zeros_like(ids), np.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        left[row, -length:], mask[row, -length:] = ids[row, :length], 1
    return ids, torch.tensor(left).long(), torch.tensor(mask).long()


def continued(model: Any, left: Any, mask: Any, stop: list[int] | None, **options: Any) -> Any:
    """Return the text generated by `transformers`."""
    plain = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=stop,
        suppress_tokens=[0], no_repeat_ngram_size=2, **options,
    )  # fmt: skip
    model.generation_config = transformers.GenerationConfig()
    with torch.no_grad():
        return model.generate(left, attention_mask=mask, generation_config=plain)


def until(ids: list[int], stop: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(ids) if token in stop]
    return ids[: ends[0] + 1] if ends else ids


@pytest.mark.parametrize("name", often((*ONE_OF_EACH, *WITH_EXPERTS), OFTEN_BEAMS))
def test_greedy_tokens_match_transformers(name, folders, rng):
    """Two prompts of different lengths. No bigram may repeat, otherwise models with random
    parameters repeat one token forever."""
    config, params = ours(folders(name))
    ids, left, mask = prompts(rng)
    want = continued(reopened(folders(name), AUTO), left, mask, None)[:, ids.shape[1] :]
    got = generate(
        make_step(build(config)), params, ids, init_cache(config, 2, CAPACITY), num_tokens=NEW,
        lengths=LENGTHS, processors=PROCESSORS,
    )  # fmt: skip
    np.testing.assert_array_equal(got.tokens, want.numpy())
    assert len(np.unique(got.tokens)) > 3


@pytest.mark.parametrize("name", often(ONE_OF_EACH, set(ONE_OF_EACH) - set(OFTEN_BEAMS)))
def test_beam_search_texts_and_scores_match_transformers(name, folders, rng):
    """Two results of three beams; the most likely texts contain stop tokens."""
    config, params = ours(folders(name))
    model = reopened(folders(name), AUTO)
    ids, left, mask = prompts(rng)
    likeliest = continued(model, left, mask, None)[:, ids.shape[1] :]
    stop = sorted(set(likeliest[:, 4:9].flatten().tolist()))
    want = continued(
        model, left, mask, stop, num_beams=3, num_return_sequences=2, length_penalty=0.95,
        early_stopping="never", renormalize_logits=True, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    found = beam_search(
        make_step(build(config)), params, ids, init_cache(config, 2, CAPACITY), num_tokens=NEW,
        num_beams=3, num_results=2, stop=stop, lengths=LENGTHS, length_penalty=LengthPenalty(0.95),
        processors=PROCESSORS,
    )  # fmt: skip
    texts = want.sequences[:, ids.shape[1] :]
    rows, lengths = np.asarray(found.tokens).reshape(4, -1), np.asarray(found.lengths).reshape(4)
    got = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    assert got == [until(text, stop) for text in texts.tolist()]
    assert max(lengths) > 1
    scores = want.sequences_scores.reshape(2, 2).numpy()
    np.testing.assert_allclose(found.scores, scores, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_bfloat16_is_kept_unless_dtype_is_passed(name, tmp_path, rng):
    folder = saved(randomised(CASES[name].create(), seed=3).to(torch.bfloat16), tmp_path / "half")
    file = load_file(folder / "model.safetensors")
    assert {str(x.dtype) for x in file.values()} == {"bfloat16"}
    config, params = load_pretrained(folder)
    assert config.dtype == "bfloat16"
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16"}
    save_pretrained(tmp_path / "again", config, params)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {k: x.tobytes() for k, x in again.items()} == {k: x.tobytes() for k, x in file.items()}
    wide, params = load_pretrained(folder, dtype="float32")
    assert wide == dataclasses.replace(config, dtype="float32")
    ids = tokens(rng, VOCAB, 1, 50)
    model = AUTO.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        want = model(torch.tensor(ids).long()).logits
    assert_same_logits(apply(wide, params)(ids)[0], want)
    half = np.asarray(apply(config, load_pretrained(folder)[1])(ids)[0])
    error = np.abs(half - want.numpy())
    assert LOGITS < error.max() < 0.25 * np.abs(want.numpy()).max()


@pytest.mark.parametrize("shape", [(3, 5, 2, 16), (2, 7, 1, 16)])
def test_mxfp4_model_matches_transformers(shape, rng):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    scales = rng.integers(100, 140, shape[:-1], dtype=np.uint8)
    want = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    np.testing.assert_array_equal(
        dequantize(blocks, scales).astype(np.float32), want.float().numpy()
    )
