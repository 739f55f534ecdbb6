"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, and experts after the first layers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from transformer_jax.config import Experts, LatentAttention, ModelConfig
from transformer_jax.pretrained.families import decoder_keys as d
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.pretrained.families.experts import expert_mappings
from transformer_jax.pretrained.families.llama import llama_family
from transformer_jax.untrusted_files import MISSING, JsonObject

# Tensors


def latent_mappings(config: ModelConfig, module: str) -> list[t.TensorMapping]:
    """Map a layer of latent attention."""
    sizes, linear = config.latent_attention or LatentAttention(), partial(t.linear, bias=False)
    first = {"latent": sizes.kv_rank, "rotated_key": sizes.rope_dim}
    heads = {"key": sizes.nope_dim, "value": sizes.value_dim}
    found = [
        *t.fused(f"{module}.kv_a_proj_with_mqa", 1, first, bias=False),
        t.TensorMapping("latent_scale", f"{module}.kv_a_layernorm.weight"),
        *t.fused(f"{module}.kv_b_proj", config.num_heads, heads, bias=False),
        *linear("out", f"{module}.o_proj", t.LINEAR_OUT),
    ]
    if sizes.query_rank is None:
        found += linear("query", f"{module}.q_proj")
    else:
        found += linear("query_latent", f"{module}.q_a_proj")
        found += [t.TensorMapping("query_latent_scale", f"{module}.q_a_layernorm.weight")]
        found += linear("query", f"{module}.q_b_proj")
    return [t.TensorMapping(f"latent_attention/{m.param}", m.tensor, m.layout) for m in found]


def _table(config: ModelConfig) -> list[t.TensorMapping]:
    block = "model.layers.{i}"
    mixer = latent_mappings(config, f"{block}.self_attn")
    mixer += t.norm("norm_latent_attention", f"{block}.input_layernorm", bias=False)
    mixer += t.norm("norm_feed_forward", f"{block}.post_attention_layernorm", bias=False)
    dense = t.named(config, block, t.gated_names("mlp"))
    routed = expert_mappings(config, shared="shared_experts")
    mappings = lambda i: mixer + (routed if config.has_experts(i) else dense)  # noqa: E731
    return t.decoder(config, "model.embed_tokens", mappings, "model.norm")


# Keys


def _check_widths(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Check two widths that transformers writes, but does not read."""
    nope, rope = (fields[f"latent_attention.{name}_dim"] for name in ("nope", "rope"))
    for name, width in ("head_dim", rope), ("qk_head_dim", nope + rope):
        if keys.optional_integer(name, width) != width:
            keys.fail(name, keys.take(name), f"must be {width}, by the widths of the parts")
    return {}


def shared_width(name: str, default: int) -> k.Code:
    """Return the entry for the number of shared experts, which are one wide expert here."""

    def read(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
        width = fields["experts.d_ff"] * keys.integer(name, default)
        # the width of the first layers is not used if all layers have experts
        unused = {} if fields["experts.dense_layers"] else {"d_ff": None}
        return {"experts.shared_d_ff": width, **unused}

    def write(config: ModelConfig) -> JsonObject:
        shared = 0 if config.experts is None else config.experts.shared_d_ff or 0
        return {name: shared // config.expert_dim}

    return k.Code(read, write)


def latent_keys(query_rank: int | None) -> list[k.Entry]:
    """List the sizes of latent attention. The argument is a default value."""
    return [
        k.Key("q_lora_rank", "latent_attention.query_rank", k.optional_integer, query_rank),
        k.Key("kv_lora_rank", "latent_attention.kv_rank", k.integer, 512),
        k.Key("qk_nope_head_dim", "latent_attention.nope_dim", k.integer, 128),
        k.Key("qk_rope_head_dim", "latent_attention.rope_dim", k.integer, 64),
        k.Key("v_head_dim", "latent_attention.value_dim", k.integer, 128),
    ]


def read_groups(
    keys: k.ConfigKeys,
    fields: k.Fields,
    best: int,
    usual: tuple[int | None, int | None],
    names: tuple[str, str] = ("n_group", "num_experts_per_tok"),
) -> k.Fields:
    """Return the groups of experts.

    `usual` contains the defaults of the numbers of groups and of chosen groups, and `names` the
    keys of the numbers of groups and of chosen experts.
    """
    name, per_token = names
    groups = keys.optional_integer(name, usual[0])
    top = keys.optional_integer("topk_group", usual[1])
    if best == 1:  # DeepSeek-V2 may ignore the groups
        limited = dict(greedy=False, group_limited_greedy=True)
        groups = groups if keys.choice("topk_method", limited, "greedy") else 1
    if groups in (None, 1):
        return {}
    if top is None:
        keys.fail("topk_group", top, f"must be an integer for {name} above 1")
    count, chosen = fields["experts.count"], fields["experts.top_k"]
    size, rest = divmod(count, groups)
    if rest or size < best:
        rule = f"must divide the number of experts, {count}, into groups of at least {best}"
        keys.fail(name, groups, rule)
    if top > groups:
        keys.fail("topk_group", top, f"must be at most {name}, {groups}")
    if chosen > top * size:
        rule = f"must be at most {top * size}, the number of experts in topk_group groups"
        keys.fail(per_token, chosen, rule)
    return {"experts.groups": groups, "experts.top_groups": top, "experts.group_best": best}


def _write_groups(config: ModelConfig, best: int) -> JsonObject:
    experts = config.experts or Experts()
    keys: JsonObject = dict(n_group=experts.groups, topk_group=experts.top_groups)
    if best == 1:
        keys["topk_method"] = "greedy" if experts.groups == 1 else "group_limited_greedy"
    return keys


def _scale_by(factor: float, width: int, mscale: float) -> float:
    """Return the scale of the scores: YaRN's magnitude multiplies queries and keys."""
    return float(width**-0.5 * d.magnitude(factor, mscale) ** 2)


def _read_rope(keys: k.ConfigKeys, fields: k.Fields, is_v3: bool) -> k.Fields:
    names = "rope_parameters", "rope_scaling"
    specs = [spec for name in names if isinstance(spec := keys.take(name, None), dict)]
    for part in (spec.get("partial_rotary_factor") for spec in (*specs, keys.content)):
        if part not in (None, 1):
            rule = "must be 1, because qk_rope_head_dim counts the rotated dimensions"
            keys.fail("partial_rotary_factor", part, rule)
    rope = d.read_rope(keys, fields)
    if not is_v3 or keys.flag("rope_interleave", True):
        rope = replace(rope, pairing="interleaved")
    found: k.Fields = dict(positions=rope, max_len=fields["max_len"])
    spec = keys.take("rope_parameters", None) or keys.take("rope_scaling", None) or {}
    mscale = spec.get("mscale_all_dim")
    if rope.scaling is not None and mscale:
        width = fields["latent_attention.nope_dim"] + fields["latent_attention.rope_dim"]
        found["attention_scale"] = _scale_by(rope.factor, width, mscale)
    return found


def _write_rope(config: ModelConfig, is_v3: bool) -> JsonObject:
    rope, keys = d.rope_of(config), d.write_rope(config)
    if is_v3:
        keys["rope_interleave"] = rope.pairing == "interleaved"
    if config.attention_scale is not None and rope.factor > 1:
        width = (config.latent_attention or LatentAttention()).key_dim
        ratio = math.sqrt(config.attention_scale * math.sqrt(width))
        mscale = (ratio - 1) / (0.1 * math.log(rope.factor))
        short = float(f"{mscale:.12g}")  # removes the rounding of the root
        same = _scale_by(rope.factor, width, short) == config.attention_scale
        keys["rope_scaling"]["mscale_all_dim"] = short if same else mscale
    return keys


def _extra_layers(keys: k.ConfigKeys) -> int:
    """Return the number of layers that predict further tokens, which transformers does not load."""
    name = "num_nextn_predict_layers"
    return 0 if keys.take(name, 1) is None else keys.integer(name, 1, least=0)


def _check_extra_layers(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    _extra_layers(keys)
    keys.ignore("num_nextn_predict_layers")
    return {}


def _ignored_in_v3(content: JsonObject) -> tuple[str, ...]:
    keys = k.ConfigKeys(content, "config.json", "deepseek_v3")
    first = keys.integer("num_hidden_layers")
    extra = [f"model.layers.{first + i}.*" for i in range(_extra_layers(keys))]
    return "model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", *extra


def _deepseek(version: int, dense: int, count: int, shared: int, width: int) -> list[k.Entry]:
    """List the keys of both versions. The arguments after the version are default values."""
    is_v3 = version == 3
    from_zero = k.Kind(lambda keys, name, default: keys.integer(name, default, least=0))
    best = 2 if is_v3 else 1
    groups = partial(read_groups, best=best, usual=(8, 4) if is_v3 else (None, None))
    return [
        *k.standard_sizes(),
        k.same("num_key_value_heads", "num_heads", "num_attention_heads"),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, False),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
        k.Fixed(norm="rmsnorm", glu=True, use_bias=False, mixers=("latent_attention",)),
        k.Key("rms_norm_eps", "norm_eps", k.positive, 1e-6),
        k.Key("hidden_act", "activation", k.activation(), "silu"),
        k.FixedKeys(attention_bias=False),
        *latent_keys(1536),
        k.Code(_check_widths),
        k.Key("n_routed_experts", "experts.count", k.integer, count),
        k.Key("num_experts_per_tok", "experts.top_k", k.integer, 8 if is_v3 else MISSING),
        k.Key("first_k_dense_replace", "experts.dense_layers", from_zero, dense),
        k.Key("moe_intermediate_size", "experts.d_ff", k.integer, width),
        k.Key("routed_scaling_factor", "experts.scale", k.decimal, 2.5 if is_v3 else 1.0),
        k.Key("aux_loss_alpha", "experts.balance_loss", k.number, 0.001),
        shared_width("n_shared_experts", shared),
        k.Code(groups, partial(_write_groups, best=best)),
        k.Code(partial(_read_rope, is_v3=is_v3), partial(_write_rope, is_v3=is_v3)),
    ]


DEEPSEEK_V2 = llama_family(
    "deepseek_v2",
    [
        *_deepseek(2, 0, 64, 2, 1407),
        k.Fixed(**{"experts.normalize": False}),
        k.FixedKeys(norm_topk_prob=False),
    ],
    architecture="DeepseekV2ForCausalLM",
    table=_table,
    divides_width=True,
)
DEEPSEEK_V3 = llama_family(
    "deepseek_v3",
    [
        *_deepseek(3, 3, 256, 1, 2048),
        k.Fixed(**{"experts.score": "sigmoid", "experts.selection_bias": True}),
        k.Key("norm_topk_prob", "experts.normalize", k.flag, True),
        k.Code(_check_extra_layers),
    ],
    architecture="DeepseekV3ForCausalLM",
    table=_table,
    ignored_tensors=_ignored_in_v3,
)
