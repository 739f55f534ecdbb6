"""Map decoders of experts: Mixtral (Jiang et al. 2024), OLMoE, Qwen 1.5 to 3, gpt-oss (2025).

Their blocks are those of Llama but for the feed-forward, whose experts lie in the files one by one,
those of gpt-oss all in one tensor.
"""

from __future__ import annotations

from functools import partial

from transformer_jax.config import Experts, ModelConfig
from transformer_jax.pretrained.families.decoder_keys import (
    layer_types,
    read_common,
    read_rope,
    window_pattern,
    write_common,
    write_windows,
)
from transformer_jax.pretrained.families.llama import llama_family, llama_table
from transformer_jax.pretrained.families.table import (
    ConfigKeys,
    Fields,
    Layout,
    TensorMapping,
    expert_linear,
    linear,
)
from transformer_jax.untrusted_files import JsonObject

MIXTRAL_NAMES = "w1", "w3", "w2"
NAMES = "gate_proj", "up_proj", "down_proj"
"""The names in files of an expert's matrices gate, up and down."""


def _table(config: ModelConfig, module: str, names: tuple[str, ...]) -> list[TensorMapping]:
    """Return the table, with the experts of a block in a module of these names."""
    experts = config.experts or Experts()
    block = f"model.layers.{{i}}.{module}"
    mappings = linear("feed_forward/router", f"{block}.gate", bias=False)
    for ours, theirs in zip(("gate", "up", "down"), names, strict=True):
        expert = f"{block}.experts.{{e}}.{theirs}"
        mappings += expert_linear(f"feed_forward/{ours}", expert, experts.count)
        if experts.shared_d_ff is not None:
            shared = f"{block}.shared_expert.{theirs}"
            mappings += linear(f"feed_forward/shared/{ours}", shared, bias=False)
    if experts.shared_gate:
        gate = f"{block}.shared_expert_gate"
        mappings += linear("feed_forward/shared_gate", gate, bias=False)
    return llama_table(config, mappings)


def _read_mixtral(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = read_common(keys, 8)
    fields["norm_eps"] = keys.positive("rms_norm_eps", 1e-5)
    experts = Experts(
        count=keys.integer("num_local_experts", 8),
        top_k=keys.integer("num_experts_per_tok", 2),
        balance_loss=keys.number("router_aux_loss_coef", 0.001),
    )
    window = keys.optional_integer("sliding_window", None)
    rope = read_rope(keys, fields, default=1e6)
    return ModelConfig(**fields, positions=rope, window=window, experts=experts)


def _write_mixtral(config: ModelConfig) -> JsonObject:
    experts = config.experts or Experts()
    return dict(
        architectures=["MixtralForCausalLM"],
        **write_common(config),
        sliding_window=config.windows[0],
        num_local_experts=experts.count,
        num_experts_per_tok=experts.top_k,
        router_aux_loss_coef=experts.balance_loss,
    )


def _read_olmoe(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = read_common(keys)
    fields |= dict(
        norm_eps=keys.positive("rms_norm_eps", 1e-5),
        use_bias=keys.flag("attention_bias", False),
        qk_norm=True,
        qk_norm_over="heads",
    )
    if fields["use_bias"]:
        fields |= dict(ff_bias=False)
    width = fields["head_dim"]
    if width is not None and width * fields["num_heads"] != fields["d_model"]:
        rule = "must be hidden_size / num_attention_heads, the width of the norms in transformers"
        keys.fail("head_dim", width, rule)
    experts = Experts(
        count=keys.integer("num_experts", 64),
        top_k=keys.integer("num_experts_per_tok", 8),
        normalize=keys.flag("norm_topk_prob", False),
        balance_loss=keys.number("router_aux_loss_coef", 0.01),
    )
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope, experts=experts)


def _write_olmoe(config: ModelConfig) -> JsonObject:
    experts = config.experts or Experts()
    return dict(
        architectures=["OlmoeForCausalLM"],
        **write_common(config),
        attention_bias=config.use_bias,
        num_experts=experts.count,
        num_experts_per_tok=experts.top_k,
        norm_topk_prob=experts.normalize,
        router_aux_loss_coef=experts.balance_loss,
    )


def _read_qwen(keys: ConfigKeys, kv_heads: int, experts: Fields) -> tuple[Fields, Experts]:
    """Read what Qwen's models of experts have in common; every block has experts."""
    fields = read_common(keys, kv_heads) | dict(d_ff=None)
    found = Experts(
        count=keys.integer("num_experts", experts["count"]),
        top_k=keys.integer("num_experts_per_tok", experts["top_k"]),
        d_ff=keys.integer("moe_intermediate_size", experts["d_ff"]),
        normalize=keys.flag("norm_topk_prob", False),
        shared_d_ff=experts.get("shared_d_ff"),
        shared_gate="shared_d_ff" in experts,
        balance_loss=keys.number("router_aux_loss_coef", 0.001),
    )
    return fields, found


def _write_qwen(config: ModelConfig) -> JsonObject:
    experts = config.experts or Experts()
    return dict(
        write_common(config),
        intermediate_size=config.expert_dim,
        moe_intermediate_size=config.expert_dim,
        num_experts=experts.count,
        num_experts_per_tok=experts.top_k,
        norm_topk_prob=experts.normalize,
        router_aux_loss_coef=experts.balance_loss,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    )


def _read_qwen2_moe(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    shared = keys.integer("shared_expert_intermediate_size", 5632)
    usual = dict(count=60, top_k=4, d_ff=1408, shared_d_ff=shared)
    fields, experts = _read_qwen(keys, 16, usual)
    qkv_bias = keys.flag("qkv_bias", True)
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope, qkv_bias=qkv_bias, experts=experts)


def _write_qwen2_moe(config: ModelConfig) -> JsonObject:
    return dict(
        architectures=["Qwen2MoeForCausalLM"],
        **_write_qwen(config),
        shared_expert_intermediate_size=(config.experts or Experts()).shared_d_ff,
        qkv_bias=bool(config.qkv_bias),
    )


def _read_qwen3_moe(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields, experts = _read_qwen(keys, 4, dict(count=128, top_k=8, d_ff=768))
    fields |= dict(use_bias=keys.flag("attention_bias", False), qk_norm=True)
    if fields["use_bias"]:
        fields |= dict(ff_bias=False)
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope, experts=experts)


def _write_qwen3_moe(config: ModelConfig) -> JsonObject:
    keys = _write_qwen(config) | dict(attention_bias=config.use_bias)
    return dict(architectures=["Qwen3MoeForCausalLM"], **keys)


def _gpt_oss_table(config: ModelConfig) -> list[TensorMapping]:
    """Return the table; the columns of gate and up take turns in one tensor."""
    block = "model.layers.{i}.mlp"
    mappings = linear("feed_forward/router", f"{block}.router")
    for part, name in enumerate(("gate", "up")):
        layout, tensor = Layout(part=part, parts=2, in_turn=True), f"{block}.experts.gate_up_proj"
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


def _read_gpt_oss(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = read_common(keys, 8, eps=1e-5)
    if fields["head_dim"] is None:
        fields["head_dim"] = 64
    fields |= dict(
        activation="quick_gelu",
        glu_limit=float(keys.positive("swiglu_limit", 7.0)),
        glu_unit_offset=True,
        use_bias=keys.flag("attention_bias", True),
        ff_bias=True,
        attention_sinks=True,
    )
    experts = Experts(
        count=keys.integer("num_local_experts", 128),
        top_k=keys.integer("num_experts_per_tok", 4),
        router_bias=True,
        balance_loss=keys.number("router_aux_loss_coef", 0.001),
    )
    types = layer_types(keys, fields["num_layers"]) or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(fields["num_layers"])
    ]
    window = window_pattern(types, keys.optional_integer("sliding_window", 128))
    said = [keys.take(name, None) for name in ("rope_parameters", "rope_scaling")]
    if said == [None, None]:  # of which transformers makes one that is stretched by 32
        keys.fail("rope_parameters", None, 'must be an object, such as {"rope_type": "default"}')
    rope = read_rope(keys, fields, default=150_000.0)
    return ModelConfig(**fields, positions=rope, window=window, experts=experts)


def _write_gpt_oss(config: ModelConfig) -> JsonObject:
    experts = config.experts or Experts()
    keys = dict(rope_scaling=dict(rope_type="default")) | write_common(config)
    return dict(
        keys,
        **write_windows(config),
        architectures=["GptOssForCausalLM"],
        head_dim=config.key_dim,
        hidden_act="silu",
        swiglu_alpha=1.702,
        swiglu_limit=config.glu_limit,
        attention_bias=config.use_bias,
        num_local_experts=experts.count,
        num_experts_per_tok=experts.top_k,
        router_aux_loss_coef=experts.balance_loss,
    )


_of_mlp = partial(_table, module="mlp", names=NAMES)

MIXTRAL = llama_family(
    "mixtral",
    _read_mixtral,
    _write_mixtral,
    table=partial(_table, module="block_sparse_moe", names=MIXTRAL_NAMES),
)
OLMOE = llama_family("olmoe", _read_olmoe, _write_olmoe, table=_of_mlp)
QWEN2_MOE = llama_family("qwen2_moe", _read_qwen2_moe, _write_qwen2_moe, table=_of_mlp)
QWEN3_MOE = llama_family("qwen3_moe", _read_qwen3_moe, _write_qwen3_moe, table=_of_mlp)
GPT_OSS = llama_family(
    "gpt_oss", _read_gpt_oss, _write_gpt_oss, table=_gpt_oss_table, joined_experts=True
)
