"""Decoders with experts: Mixtral (Jiang et al. 2024), OLMoE, Qwen 1.5 to 3 and gpt-oss (2025).

Their blocks are the same as in Llama, except for the feed-forward network. Each expert has its own
tensors in the files, except in gpt-oss, where one tensor contains all experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformer_jax.config import Experts, ModelConfig
from transformer_jax.pretrained.families import decoder_keys as d
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families.llama import llama_family, llama_table
from transformer_jax.pretrained.families.table import (
    Layout,
    TensorMapping,
    expert_linear,
    linear,
)

MIXTRAL_NAMES = "w1", "w3", "w2"
NAMES = "gate_proj", "up_proj", "down_proj"
"""Tensor names of the gate, up and down matrices of an expert."""


def expert_mappings(
    config: ModelConfig,
    module: str = "mlp",
    names: tuple[str, ...] = NAMES,
    shared: str = "shared_expert",
) -> list[TensorMapping]:
    """Map the router and the experts of a block, which have these names in `module`."""
    experts = config.experts or Experts()
    block = f"model.layers.{{i}}.{module}"
    mappings = linear("feed_forward/router", f"{block}.gate", bias=False)
    for ours, theirs, usual in zip(("gate", "up", "down"), names, NAMES, strict=True):
        expert = f"{block}.experts.{{e}}.{theirs}"
        mappings += expert_linear(f"feed_forward/{ours}", expert, experts.count)
        if experts.shared_d_ff is not None:
            tensor = f"{block}.{shared}.{usual}"
            mappings += linear(f"feed_forward/shared/{ours}", tensor, bias=False)
    if experts.selection_bias:
        bias = f"{block}.gate.e_score_correction_bias"
        mappings += [TensorMapping("feed_forward/selection_bias", bias)]
    if experts.shared_gate:
        gate = f"{block}.shared_expert_gate"
        mappings += linear("feed_forward/shared_gate", gate, bias=False)
    return mappings


def _table(config: ModelConfig, **names: Any) -> list[TensorMapping]:
    return llama_table(config, expert_mappings(config, **names))


def expert_keys(count: str, default: int, top_k: int, balance: float = 0.001) -> list[k.Entry]:
    """List the numbers of experts and the balance loss.

    All arguments except `count` are default values.
    """
    return [
        k.Key(count, "experts.count", k.integer, default),
        k.Key("num_experts_per_tok", "experts.top_k", k.integer, top_k),
        k.Key("router_aux_loss_coef", "experts.balance_loss", k.number, balance),
    ]


NORMALIZE = k.Key("norm_topk_prob", "experts.normalize", k.flag, False)

MIXTRAL = llama_family(
    "mixtral",
    [*d.gated(8, eps=1e-5), *expert_keys("num_local_experts", 8, 2), d.WINDOW, d.rope(1e6)],
    architecture="MixtralForCausalLM",
    table=partial(_table, module="block_sparse_moe", names=MIXTRAL_NAMES),
)


def _check_width(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    width = fields["head_dim"]
    if width is not None and width * fields["num_heads"] != fields["d_model"]:
        rule = "must be hidden_size / num_attention_heads, the width of the norms in transformers"
        keys.fail("head_dim", width, rule)
    return {}


OLMOE = llama_family(
    "olmoe",
    [
        *d.gated(eps=1e-5),
        d.ATTENTION_BIAS,
        k.Fixed(qk_norm=True, qk_norm_over="heads"),
        k.Code(_check_width),
        *expert_keys("num_experts", 64, 8, 0.01),
        NORMALIZE,
        d.rope(),
    ],
    architecture="OlmoeForCausalLM",
    table=_table,
)


# Qwen: every block has experts, whose width has its own key


def _qwen(kv_heads: int, count: int, top_k: int, width: int) -> list[k.Entry]:
    """List the keys of Qwen's mixture-of-experts models. The arguments are default values."""
    return [
        *d.gated(kv_heads),
        k.Fixed(d_ff=None),
        *expert_keys("num_experts", count, top_k),
        k.Key("moe_intermediate_size", "experts.d_ff", k.integer, width),
        # Transformers requires both widths, even though every block has experts.
        k.Code(
            write=lambda config: dict(
                intermediate_size=config.expert_dim, moe_intermediate_size=config.expert_dim
            )
        ),
        NORMALIZE,
        k.FixedKeys(decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False),
        d.rope(),
    ]


QWEN2_MOE = llama_family(
    "qwen2_moe",
    [
        *_qwen(16, 60, 4, 1408),
        k.Key("shared_expert_intermediate_size", "experts.shared_d_ff", k.integer, 5632),
        k.Fixed(**{"experts.shared_gate": True}),
        k.Key("qkv_bias", "qkv_bias", k.flag, True),
    ],
    architecture="Qwen2MoeForCausalLM",
    table=_table,
)
QWEN3_MOE = llama_family(
    "qwen3_moe",
    [*_qwen(4, 128, 8, 768), d.ATTENTION_BIAS, k.Fixed(qk_norm=True)],
    architecture="Qwen3MoeForCausalLM",
    table=_table,
)


# gpt-oss


def _gpt_oss_table(config: ModelConfig) -> list[TensorMapping]:
    """Return the table, where the columns of gate and up are interleaved in one tensor."""
    block = "model.layers.{i}.mlp"
    mappings = linear("feed_forward/router", f"{block}.router")
    for part, name in enumerate(("gate", "up")):
        # Published gpt-oss files interleave the columns of gate and up.
        layout, tensor = (
            Layout(part=part, parts=2, interleaved=True),
            f"{block}.experts.gate_up_proj",
        )
        mappings += [
            TensorMapping(f"feed_forward/{name}/kernel", tensor, layout),
            TensorMapping(f"feed_forward/{name}/bias", f"{tensor}_bias", layout),
        ]
    down = f"{block}.experts.down_proj"
    mappings += [
        TensorMapping("feed_forward/down/kernel", down),
        TensorMapping("feed_forward/down/bias", f"{down}_bias"),
    ]
    return llama_table(config, mappings)


def _read_windows(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    types = d.types_or(keys, fields["num_layers"], d.every(2))
    window = d.window_pattern(types, keys.optional_integer("sliding_window", 128))
    values = [keys.take(name, None) for name in ("rope_parameters", "rope_scaling")]
    if values == [None, None]:  # transformers would use a default scaling of 32
        keys.fail("rope_parameters", None, 'must be an object, such as {"rope_type": "default"}')
    return dict(window=window)


GPT_OSS = llama_family(
    "gpt_oss",
    [
        *d.decoder_sizes(8, head_dim=64),
        k.Fixed(norm="rmsnorm", glu=True, activation="quick_gelu", glu_unit_offset=True),
        k.Fixed(ff_bias=True, attention_sinks=True),
        k.FixedKeys(hidden_act="silu", swiglu_alpha=1.702),
        k.Key("rms_norm_eps", "norm_eps", k.positive, 1e-5),
        k.Key("swiglu_limit", "glu_limit", k.decimal, 7.0),
        k.Key("attention_bias", "use_bias", k.flag, True),
        *expert_keys("num_local_experts", 128, 4),
        k.Fixed(**{"experts.router_bias": True}),
        k.Code(_read_windows, d.write_windows),
        k.FixedKeys(rope_scaling=dict(rope_type="default")),
        d.rope(150_000.0),
    ],
    architecture="GptOssForCausalLM",
    table=_gpt_oss_table,
    joined_experts=True,
)
