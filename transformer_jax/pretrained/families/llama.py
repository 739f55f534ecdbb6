"""Map Llama (Touvron et al. 2023, Dubey et al. 2024) and the families that descend from it.

These are Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi 3 and 4, OLMo 2 and 3, Granite, SmolLM 3, and
SmolLM 1 and 2, whose model_type is llama. They share one table of names and differ in norms, biases
and windows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformer_jax.config import ConfigError, ModelConfig, Rope
from transformer_jax.pretrained.families.decoder_keys import (
    biases,
    layer_types,
    read_common,
    read_rope,
    rope_of,
    shortest,
    window_pattern,
    write_common,
    write_windows,
)
from transformer_jax.pretrained.families.table import (
    ACTIVATIONS,
    LINEAR_OUT,
    ConfigKeys,
    Family,
    Fields,
    TensorMapping,
    blocks,
    fused,
    gated_linears,
    linear,
    output_matrix,
)
from transformer_jax.untrusted_files import JsonObject


def llama_table(
    config: ModelConfig,
    feed_forward: list[TensorMapping] | None = None,
    qkv: list[TensorMapping] | None = None,
) -> list[TensorMapping]:
    """Return the table of a Llama, or of one whose blocks have other names of some layers."""
    qkv_bias, out_bias, ff_bias = biases(config)
    block = "model.layers.{i}"
    attention, mlp = f"{block}.self_attn", f"{block}.mlp"
    norms = [
        TensorMapping("norm_attention/scale", f"{block}.input_layernorm.weight"),
        TensorMapping("norm_feed_forward/scale", f"{block}.post_attention_layernorm.weight"),
    ]
    if config.norm_order == "sandwich":
        norms = [
            TensorMapping("norm_attention/scale", f"{block}.input_layernorm.weight"),
            TensorMapping("out_norm_attention/scale", f"{block}.post_attention_layernorm.weight"),
            TensorMapping("norm_feed_forward/scale", f"{block}.pre_feedforward_layernorm.weight"),
            TensorMapping(
                "out_norm_feed_forward/scale", f"{block}.post_feedforward_layernorm.weight"
            ),
        ]
    if config.norm_order == "output":
        norms = [
            TensorMapping("out_norm_attention/scale", f"{block}.post_attention_layernorm.weight"),
            TensorMapping(
                "out_norm_feed_forward/scale", f"{block}.post_feedforward_layernorm.weight"
            ),
        ]
    if config.qk_norm:
        norms += [
            TensorMapping("attention/query_scale", f"{attention}.q_norm.weight"),
            TensorMapping("attention/key_scale", f"{attention}.k_norm.weight"),
        ]
    if config.attention_sinks:
        norms += [TensorMapping("attention/sinks", f"{attention}.sinks")]
    if qkv is None:
        qkv = [
            *linear("attention/query", f"{attention}.q_proj", bias=qkv_bias),
            *linear("attention/key", f"{attention}.k_proj", bias=qkv_bias),
            *linear("attention/value", f"{attention}.v_proj", bias=qkv_bias),
        ]
    if feed_forward is None:
        feed_forward = gated_linears(mlp, ff_bias)
    return [
        TensorMapping("embed/tokens", "model.embed_tokens.weight"),
        *blocks(
            "decoder",
            config.num_layers,
            [
                *norms,
                *qkv,
                *linear("attention/out", f"{attention}.o_proj", LINEAR_OUT, out_bias),
                *feed_forward,
            ],
        ),
        TensorMapping("decoder/norm/scale", "model.norm.weight"),
        *output_matrix(config, "lm_head"),
    ]


# Each family


def _read_llama(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = read_common(keys)
    attention_bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    fields |= dict(use_bias=attention_bias)
    if mlp_bias != attention_bias:
        fields |= dict(ff_bias=mlp_bias)
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope)


def _write_llama(config: ModelConfig) -> JsonObject:
    return dict(
        architectures=["LlamaForCausalLM"],
        **write_common(config),
        attention_bias=config.use_bias,
        mlp_bias=biases(config)[2],
    )


_SMOL_BASE, _SMOL_EVERY = 2_000_000.0, 4


def _read_smollm3(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = read_common(keys, 4, tied=True) | dict(use_bias=keys.flag("attention_bias", False))
    layers = fields["num_layers"]
    if (mlp_bias := keys.flag("mlp_bias", False)) != fields["use_bias"]:
        fields |= dict(ff_bias=mlp_bias)
    every = keys.integer("no_rope_layer_interval", _SMOL_EVERY)
    turns = keys.take("no_rope_layers", None)
    if turns is None:
        turns = [int((i + 1) % every != 0) for i in range(layers)]
    known = isinstance(turns, list) and all(type(own) in (int, bool) for own in turns)
    if not known or len(turns) < layers or not set(turns) <= {0, 1}:
        rule = f"must be a list of {layers} (num_hidden_layers) of 0 and 1"
        keys.fail("no_rope_layers", turns, rule)
    pattern = shortest([own == 1 for own in turns[:layers]])
    width = keys.optional_integer("sliding_window", None)
    used = keys.flag("use_sliding_window", False) and width is not None
    types = layer_types(keys, layers) or [
        "sliding_attention" if used and not own else "full_attention" for own in turns[:layers]
    ]
    window = window_pattern(types, width) if used else None
    if not used and "sliding_attention" in types:
        keys.fail("layer_types", types, "needs use_sliding_window and sliding_window")
    rope = read_rope(keys, fields, default=_SMOL_BASE)
    turned = replace(rope, pattern=None if all(pattern) else pattern) if any(pattern) else None
    return ModelConfig(**fields, positions=turned, window=window)


def _write_smollm3(config: ModelConfig) -> JsonObject:
    pattern = rope_of(config).pattern or (config.positions is not None,)
    windows = write_windows(config)
    return dict(
        architectures=["SmolLM3ForCausalLM"],
        **write_common(config),
        **windows,
        use_sliding_window=windows["sliding_window"] is not None,
        no_rope_layers=[int(pattern[i % len(pattern)]) for i in range(config.num_layers)],
        no_rope_layer_interval=_SMOL_EVERY,
        attention_bias=config.use_bias,
        mlp_bias=biases(config)[2],
    )


def _read_mistral(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = read_common(keys, 8)
    window = keys.optional_integer("sliding_window", 4096)
    types = layer_types(keys, fields["num_layers"])
    if types is not None and fields["head_dim"] == fields["d_model"] // fields["num_heads"]:
        fields["head_dim"] = None  # the usual one, which is written below
    rope = read_rope(keys, fields)
    pattern = window if types is None else window_pattern(types, window)
    return ModelConfig(**fields, positions=rope, window=pattern)


def _write_mistral(config: ModelConfig) -> JsonObject:
    mixed = len(set(config.windows)) > 1
    return dict(
        architectures=["MistralForCausalLM"],
        **write_common(config)
        # transformers makes a ministral of one that lists its layers, and needs its head_dim
        | (dict(head_dim=config.key_dim) if mixed else {}),
        **(write_windows(config) if mixed else dict(sliding_window=config.windows[0])),
    )


def _qwen_window(keys: ConfigKeys, fields: Fields) -> int | tuple[int | None, ...] | None:
    """Return the pattern of windows: by default layers from max_window_layers on have one."""
    layers, used = fields["num_layers"], keys.flag("use_sliding_window", False)
    first = keys.integer("max_window_layers", 28, least=0)
    width = keys.optional_integer("sliding_window", 4096)
    types = layer_types(keys, layers) or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    return window_pattern(types, width) if used else None


def _write_qwen(config: ModelConfig) -> JsonObject:
    keys = write_windows(config)
    used = keys["sliding_window"] is not None
    first = keys["layer_types"].index("sliding_attention") if used else config.num_layers
    return dict(write_common(config), **keys, use_sliding_window=used, max_window_layers=first)


def _read_qwen2(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = read_common(keys, 32)
    window = _qwen_window(keys, fields)
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope, qkv_bias=True, window=window)


def _write_qwen2(config: ModelConfig) -> JsonObject:
    return dict(architectures=["Qwen2ForCausalLM"], **_write_qwen(config))


def _read_qwen3(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = read_common(keys, 32)
    if fields["head_dim"] is None:
        fields["head_dim"] = 128
    fields |= dict(use_bias=keys.flag("attention_bias", False), qk_norm=True)
    if fields["use_bias"]:
        fields |= dict(ff_bias=False)
    window = _qwen_window(keys, fields)
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope, window=window)


def _write_qwen3(config: ModelConfig) -> JsonObject:
    keys = _write_qwen(config) | dict(head_dim=config.key_dim, attention_bias=config.use_bias)
    return dict(architectures=["Qwen3ForCausalLM"], **keys)


def _read_gemma(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _gemma(keys, 16, "hidden_act")
    if fields["activation"] == "gelu":  # the first files say so, but mean tanh
        fields["activation"] = "gelu_tanh"
    if keys.take("hidden_activation", None) is not None:  # libraries differ in which key they read
        also = keys.choice("hidden_activation", ACTIVATIONS)
        if ("gelu_tanh" if also == "gelu" else also) != fields["activation"]:
            rule = f"hidden_act means {fields['activation']!r}, and this must mean the same"
            keys.fail("hidden_activation", keys.take("hidden_activation"), rule)
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope)


def _gemma(keys: ConfigKeys, kv_heads: int, activation: str) -> Fields:
    fields = read_common(keys, kv_heads, "gelu_pytorch_tanh", activation, tied=True)
    if fields["head_dim"] is None:
        fields["head_dim"] = 256
    return fields | dict(norm_unit_offset=True, scale_embeddings=True)


def _write_gemma_common(config: ModelConfig) -> JsonObject:
    keys = write_common(config) | dict(head_dim=config.key_dim)
    keys["hidden_activation"] = keys.pop("hidden_act")
    if config.activation == "gelu_tanh":
        keys["hidden_activation"] = "gelu_pytorch_tanh"
    return keys


def _write_gemma(config: ModelConfig) -> JsonObject:
    keys = _write_gemma_common(config)
    keys["hidden_act"] = keys["hidden_activation"]
    return dict(architectures=["GemmaForCausalLM"], **keys, attention_bias=False)


def _read_gemma2(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _capped(keys, 50.0, 30.0)
    types = layer_types(keys, fields["num_layers"]) or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(fields["num_layers"])
    ]
    window = window_pattern(types, keys.integer("sliding_window", 4096))
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope, window=window)


def _capped(keys: ConfigKeys, scores: float | None, logits: float | None) -> Fields:
    """Read what Gemma 2 and 3 add: soft caps, a scale of the scores, norms around branches."""
    fields = _gemma(keys, 4, "hidden_activation")
    scale = float(keys.positive("query_pre_attn_scalar", 256)) ** -0.5

    def cap(name: str, default: float | None) -> float | None:
        return None if keys.take(name, default) is None else keys.positive(name, default)

    return fields | dict(
        attention_softcap=cap("attn_logit_softcapping", scores),
        logit_softcap=cap("final_logit_softcapping", logits),
        attention_scale=scale,
        norm_order="sandwich",
    )


def _write_capped(config: ModelConfig) -> JsonObject:
    scale = config.key_dim**-0.5 if config.attention_scale is None else config.attention_scale
    scalar = round(scale**-2, 6)
    windows = write_windows(config)
    if windows["sliding_window"] is None:  # no layer has one, but the key must be a number
        windows["sliding_window"] = 4096
    return dict(
        _write_gemma_common(config),
        **windows,
        attn_logit_softcapping=config.attention_softcap,
        final_logit_softcapping=config.logit_softcap,
        query_pre_attn_scalar=int(scalar) if scalar == int(scalar) else scalar,
        attention_bias=False,
    )


def _write_gemma2(config: ModelConfig) -> JsonObject:
    return dict(architectures=["Gemma2ForCausalLM"], **_write_capped(config))


def _read_gemma3(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _capped(keys, None, None) | dict(qk_norm=True)
    layers = fields["num_layers"]
    every = keys.integer("sliding_window_pattern", 6)
    types = layer_types(keys, layers)
    if types is None:
        keys.require("_sliding_window_pattern", every)
        types = [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ]
    keys.ignore("_sliding_window_pattern")  # layer_types were made from it
    window = window_pattern(types, keys.integer("sliding_window", 4096))
    read = keys.number if window is None else partial(keys.positive, above=1)
    local = float(read("rope_local_base_freq", 10_000.0))
    near = None
    if keys.take("rope_parameters", None) is not None:
        near = read_rope(keys, dict(fields), "sliding_attention", local)
        if near.scaling is not None:
            keys.fail("rope_parameters", near.scaling, "layers with a window stretch nothing")
        local = near.base
    rope = read_rope(keys, fields, "full_attention", 1e6)
    if near is not None and near.dims != rope.dims:
        raise ConfigError("partial_rotary_factor must be 1 in every layer")
    base = local if window is not None else None
    rope = replace(rope, window_base=base)
    return ModelConfig(**fields, positions=rope, window=window)


def _write_gemma3(config: ModelConfig) -> JsonObject:
    base = rope_of(config).window_base or 10_000.0
    keys = dict(_write_capped(config), rope_local_base_freq=base)
    return dict(architectures=["Gemma3ForCausalLM"], **keys)


def _phi3_table(config: ModelConfig) -> list[TensorMapping]:
    """Return Llama's table but for query, key and value, and gate and up, in one tensor each."""
    q, k, F = config.num_heads * config.key_dim, config.kv_heads * config.key_dim, config.ff_dim
    heads = {"attention/query": q, "attention/key": k, "attention/value": k}
    hidden, block = {"feed_forward/gate": F, "feed_forward/up": F}, "model.layers.{i}"
    down = linear("feed_forward/down", f"{block}.mlp.down_proj", bias=False)
    feed_forward = fused(f"{block}.mlp.gate_up_proj", 1, hidden, bias=False) + down
    qkv = fused(f"{block}.self_attn.qkv_proj", 1, heads, bias=False)
    return llama_table(config, feed_forward, qkv)


def _read_phi3(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = read_common(keys, eps=1e-5)
    keys.rate("embd_pdrop", 0.0)  # transformers does not use it
    fields |= dict(dropout=keys.rate("resid_pdrop", 0.0))
    window = keys.optional_integer("sliding_window", None)
    rope = read_rope(keys, fields)
    if rope.scaling not in (None, "longrope"):
        keys.fail("rope_scaling", rope.scaling, "a phi3 has longrope or none")
    return ModelConfig(**fields, positions=rope, window=window)


def _write_phi3(config: ModelConfig) -> JsonObject:
    keys = dict(write_common(config), sliding_window=config.windows[0])
    keys |= dict(resid_pdrop=config.dropout, embd_pdrop=config.dropout)
    trained = rope_of(config).original_len
    keys["original_max_position_embeddings"] = config.max_len if trained is None else trained
    return dict(architectures=["Phi3ForCausalLM"], **keys)


def _read_olmo(keys: ConfigKeys) -> Fields:
    fields = read_common(keys, eps=1e-5)
    fields |= dict(norm_order="output", qk_norm=True, qk_norm_over="heads")
    if keys.flag("attention_bias", False):
        fields |= dict(use_bias=True, ff_bias=False)
    return fields


def _read_olmo2(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _read_olmo(keys)
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope)


def _write_olmo2(config: ModelConfig) -> JsonObject:
    keys = dict(write_common(config), attention_bias=config.use_bias)
    return dict(architectures=["Olmo2ForCausalLM"], **keys)


_OLMO3_BASE = 500_000.0


def _read_olmo3(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _read_olmo(keys)
    layers = fields["num_layers"]
    types = layer_types(keys, layers) or [
        "sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)
    ]
    window = window_pattern(types, keys.integer("sliding_window", 4096))
    is_nested = keys.take("rope_parameters", None) is not None
    near = Rope(base=_OLMO3_BASE)
    if is_nested:
        near = read_rope(keys, dict(fields), "sliding_attention", _OLMO3_BASE)
        if near.scaling is not None:
            keys.fail("rope_parameters", near.scaling, "layers with a window stretch nothing")
    rope = read_rope(keys, fields, "full_attention", _OLMO3_BASE)
    if window is None:
        return ModelConfig(**fields, positions=rope)
    if not is_nested and rope.base != _OLMO3_BASE:  # of windows, libraries differ
        rule = f"must be {_OLMO3_BASE}, or rope_parameters have that of each kind of layer"
        keys.fail("rope_theta", rope.base, rule)
    if near.dims != rope.dims:
        raise ConfigError("partial_rotary_factor must be 1 in every layer")
    if near != rope:
        rope = replace(rope, window_base=near.base)
    return ModelConfig(**fields, positions=rope, window=window)


def _write_olmo3(config: ModelConfig) -> JsonObject:
    keys = dict(write_common(config), **write_windows(config), attention_bias=config.use_bias)
    if keys["sliding_window"] is None:  # no layer has one, but the key must be a number
        keys["sliding_window"] = 4096
    far: JsonObject = dict(rope_type="default") | keys.pop("rope_scaling", {})
    far["rope_theta"] = keys.pop("rope_theta")
    near: JsonObject = dict(rope_type="default", rope_theta=far["rope_theta"])
    if (base := rope_of(config).window_base) is not None:
        near["rope_theta"] = base
    keys["rope_parameters"] = dict(full_attention=far, sliding_attention=near)
    return dict(architectures=["Olmo3ForCausalLM"], **keys)


def _scale(keys: ConfigKeys, name: str) -> float | None:
    scale = float(keys.positive(name, 1.0))
    return None if scale == 1 else scale


def _read_granite(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = read_common(keys)
    attention_bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    divisor = float(keys.positive("logits_scaling", 1.0))
    fields |= dict(
        use_bias=attention_bias,
        attention_scale=float(keys.positive("attention_multiplier", 1.0)),
        embedding_scale=_scale(keys, "embedding_multiplier"),
        residual_scale=_scale(keys, "residual_multiplier"),
        logit_scale=None if divisor == 1 else 1 / divisor,
    )
    if mlp_bias != attention_bias:
        fields |= dict(ff_bias=mlp_bias)
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope)


def _write_granite(config: ModelConfig) -> JsonObject:
    scale = config.key_dim**-0.5 if config.attention_scale is None else config.attention_scale
    divisor = 1.0
    if config.logit_scale is not None:  # the shortest number whose inverse it is
        divisor = 1 / config.logit_scale
        short = float(f"{divisor:.12g}")
        divisor = short if 1 / short == config.logit_scale else divisor
    return dict(
        architectures=["GraniteForCausalLM"],
        **write_common(config),
        attention_bias=config.use_bias,
        mlp_bias=config.use_bias if config.ff_bias is None else config.ff_bias,
        attention_multiplier=scale,
        embedding_multiplier=config.embedding_scale or 1.0,
        residual_multiplier=config.residual_scale or 1.0,
        logits_scaling=divisor,
    )


llama_family = partial(
    Family,
    table=llama_table,
    prefix="model.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
)

LLAMA = llama_family("llama", _read_llama, _write_llama, divides_width=True)
MISTRAL = llama_family("mistral", _read_mistral, _write_mistral)
QWEN2 = llama_family("qwen2", _read_qwen2, _write_qwen2)
QWEN3 = llama_family("qwen3", _read_qwen3, _write_qwen3)
GEMMA = llama_family("gemma", _read_gemma, _write_gemma)
GEMMA2 = llama_family("gemma2", _read_gemma2, _write_gemma2, divides_width=True)
GEMMA3 = llama_family("gemma3_text", _read_gemma3, _write_gemma3, divides_width=True)
PHI3 = llama_family("phi3", _read_phi3, _write_phi3, table=_phi3_table, rotates_parts=True)
GRANITE = llama_family("granite", _read_granite, _write_granite)
SMOLLM3 = llama_family("smollm3", _read_smollm3, _write_smollm3)
OLMO2 = llama_family("olmo2", _read_olmo2, _write_olmo2)
OLMO3 = llama_family("olmo3", _read_olmo3, _write_olmo3)
