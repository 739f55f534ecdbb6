"""Map Llama (Touvron et al. 2023, Dubey et al. 2024) and the families that descend from it.

These are Mistral, Qwen 2 and 3, Gemma 1 to 3, and SmolLM, whose model_type is llama. They share one
table of names and differ in norms, biases and windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from transformer_jax.config import ModelConfig, Rope, RopeScaling
from transformer_jax.pretrained.families.table import (
    ACTIVATIONS,
    LINEAR_OUT,
    ConfigKeys,
    Family,
    Fields,
    TensorMapping,
    activation_key,
    blocks,
    linear,
)
from transformer_jax.untrusted_files import JsonObject


def _table(config: ModelConfig) -> list[TensorMapping]:
    qkv_bias = config.use_bias if config.qkv_bias is None else config.qkv_bias
    ff_bias = config.use_bias if config.ff_bias is None else config.ff_bias
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
    if config.qk_norm:
        norms += [
            TensorMapping("attention/query_scale", f"{attention}.q_norm.weight"),
            TensorMapping("attention/key_scale", f"{attention}.k_norm.weight"),
        ]
    return [
        TensorMapping("embed/tokens", "model.embed_tokens.weight"),
        *blocks(
            "decoder",
            config.num_layers,
            [
                *norms,
                *linear("attention/query", f"{attention}.q_proj", bias=qkv_bias),
                *linear("attention/key", f"{attention}.k_proj", bias=qkv_bias),
                *linear("attention/value", f"{attention}.v_proj", bias=qkv_bias),
                *linear("attention/out", f"{attention}.o_proj", LINEAR_OUT, config.use_bias),
                *linear("feed_forward/gate", f"{mlp}.gate_proj", bias=ff_bias),
                *linear("feed_forward/up", f"{mlp}.up_proj", bias=ff_bias),
                *linear("feed_forward/down", f"{mlp}.down_proj", bias=ff_bias),
            ],
        ),
        TensorMapping("decoder/norm/scale", "model.norm.weight"),
        *([] if config.tie_embeddings else [TensorMapping("embed/output", "lm_head.weight")]),
    ]


# Sizes


def _common(
    keys: ConfigKeys,
    kv_heads: int | None = None,  # default of num_key_value_heads; None is num_attention_heads
    activation: str = "silu",
    name: str = "hidden_act",
    tied: bool = False,
) -> Fields:
    """Read sizes, norm, activation and dropout as fields of ModelConfig."""
    heads = keys.integer("num_attention_heads")
    return dict(
        vocab_size=keys.integer("vocab_size"),
        d_model=keys.integer("hidden_size"),
        d_ff=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=keys.optional_integer("num_key_value_heads", kv_heads) or heads,
        head_dim=keys.integer("head_dim", None),
        max_len=keys.integer("max_position_embeddings"),
        norm="rmsnorm",
        norm_eps=keys.positive("rms_norm_eps", 1e-6),
        activation=keys.choice(name, ACTIVATIONS, activation),
        glu=True,
        use_bias=False,
        tie_embeddings=keys.flag("tie_word_embeddings", tied),
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )


def _write_common(config: ModelConfig) -> JsonObject:
    keys: JsonObject = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.ff_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_len,
        rms_norm_eps=config.norm_eps,
        hidden_act=activation_key(config.activation),
        tie_word_embeddings=config.tie_embeddings,
        attention_dropout=config.attention_dropout,
    )
    if config.head_dim is not None:
        keys["head_dim"] = config.head_dim
    return keys | _write_rope(config)


# Rotation

SCALINGS: dict[str, RopeScaling | None] = {
    "default": None,
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
"""Published names of the ways to stretch a rotation."""

SCALING_KEYS = (
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor",
    "low_freq_factor", "mscale", "mscale_all_dim", "short_factor", "truncate",
)  # fmt: skip
"""Keys of a stretch, which change nothing where there is none."""


def _read_rope(
    keys: ConfigKeys, fields: Fields, layer: str | None = None, default: float = 10_000.0
) -> Rope:
    """Return the rotation that config.json means.

    It is said by `rope_theta` and `rope_scaling`, or by `rope_parameters`, which hold both. `layer`
    names the entry of `rope_parameters` to read in families whose layers rotate in two ways, and
    `default` is the base if none is given. If the stretch depends on the length of a text (dynamic,
    longrope), max_len in `fields` becomes the trained length, for which nothing is stretched.
    """
    inner = _rope_keys(keys, layer)
    base = inner.positive("rope_theta", None, above=1)
    if base is None:
        base = keys.positive("rope_theta", default, above=1)
    keys.ignore("rope_theta")
    scaling = _scaling_kind(inner)
    dims = _rotated_dims((inner, keys), fields)
    longest = fields["max_len"]
    trained = inner.integer("original_max_position_embeddings", None)
    trained = keys.integer("original_max_position_embeddings", None) or trained or longest
    if scaling == "dynamic":
        trained = longest
    options: Fields = dict(base=float(base), dims=dims, scaling=scaling)
    if scaling is None:
        inner.ignore(*SCALING_KEYS)
    else:
        options["factor"] = _factor(inner, scaling, longest, trained)
    if scaling in ("dynamic", "llama3", "yarn", "longrope"):
        options["original_len"] = trained
    match scaling:
        case "llama3":
            options["low_freq_factor"] = inner.positive("low_freq_factor")
            options["high_freq_factor"] = inner.positive("high_freq_factor")
        case "yarn":
            options |= _yarn_options(inner, options["factor"])
        case "longrope":
            options |= _longrope_options(inner)
    if scaling in ("dynamic", "longrope"):
        fields["max_len"] = trained
    inner.check_all_read()
    return Rope(**options)


def _rope_keys(keys: ConfigKeys, layer: str | None) -> ConfigKeys:
    """Return the keys of `rope_parameters` or `rope_scaling`, whichever there is."""
    name, given = "rope_parameters", keys.take("rope_parameters", None)
    older = keys.take("rope_scaling", None)
    if given is not None and older is not None:
        keys.fail("rope_scaling", older, "rope_parameters says it already")
    if given is None:
        name, given = "rope_scaling", older
    elif layer is not None and isinstance(given, dict):
        if unknown := sorted(set(given) - set(LAYER_TYPES)):
            keys.fail(name, unknown[0], f"must be of {' and '.join(LAYER_TYPES)}")
        name, given = f"{name}.{layer}", given.get(layer)
    if given is not None and not isinstance(given, dict):
        keys.fail(name, given, "must be an object or null")
    return ConfigKeys(given or {}, f"{keys.where}: {name}")


def _scaling_kind(inner: ConfigKeys) -> RopeScaling | None:
    """Return the kind of stretch from `rope_type`, or from its older name `type`."""
    older = inner.choice("type", SCALINGS, "default")
    scaling = inner.choice("rope_type", SCALINGS, inner.take("type", "default"))
    if inner.take("type", None) is not None and scaling != older:
        inner.fail("type", older, f"rope_type is {scaling!r}")
    return scaling


def _rotated_dims(holders: Iterable[ConfigKeys], fields: Fields) -> int | None:
    """Return how many dimensions of each head rotate, int(head_dim partial_rotary_factor).

    The first of the holders with such a key decides; None rotates all dimensions.
    """
    head_dim = fields["head_dim"] or fields["d_model"] // fields["num_heads"]
    found = None
    for holder in holders:
        part = holder.positive("partial_rotary_factor", None)
        if part is None or found is not None:
            continue
        if part > 1:
            holder.fail("partial_rotary_factor", part, "must be at most 1")
        found = int(head_dim * part)
        if found < 2 or found % 2:
            rule = f"{found} of {head_dim} dimensions rotate: must be even and at least 2"
            holder.fail("partial_rotary_factor", part, rule)
    return None if found == head_dim else found


def _factor(inner: ConfigKeys, scaling: RopeScaling, longest: int, trained: int) -> float:
    """Return the stretch; yarn and longrope may leave it to the two lengths."""
    factor = inner.positive("factor", None)
    if factor is None and scaling in ("yarn", "longrope"):
        factor = longest / trained
        if factor < 1:
            rule = f"must be at most max_position_embeddings, {longest}"
            inner.fail("original_max_position_embeddings", trained, rule)
    if factor is None or factor < 1:
        inner.fail("factor", factor, f"{scaling} needs one of at least 1")
    return float(factor)


def _yarn_options(inner: ConfigKeys, factor: float) -> Fields:
    """Return the fields of Rope that yarn alone has (Peng et al. 2023)."""
    attention_factor = inner.positive("attention_factor", None)
    one, two = inner.number("mscale", None), inner.number("mscale_all_dim", None)
    if attention_factor is None and one and two:
        attention_factor = _magnitude(factor, one) / _magnitude(factor, two)
    return dict(
        attention_factor=attention_factor,
        beta_fast=inner.number("beta_fast", None) or 32.0,
        beta_slow=inner.number("beta_slow", None) or 1.0,
        truncate=inner.flag("truncate", True),
    )


def _magnitude(factor: float, scale: float) -> float:
    """Return yarn's multiplier of the rotated vectors, 0.1 scale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope_options(inner: ConfigKeys) -> Fields:
    """Return the fields of Rope that longrope alone has (Ding et al. 2024)."""
    options: Fields = dict(attention_factor=inner.positive("attention_factor", None))
    for field, key in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
        listed = inner.take(key)
        numbers = isinstance(listed, list) and all(type(f) in (int, float) for f in listed)
        if not numbers or not all(abs(f) < 2**63 for f in listed):
            inner.fail(key, listed, "must be a list of numbers")
        options[field] = tuple(map(float, listed))
    return options


def _rope(config: ModelConfig) -> Rope:
    """Return the rotation to write; where there is none, one that reading back will not match."""
    return config.positions if isinstance(config.positions, Rope) else Rope()


def _write_rope(config: ModelConfig) -> JsonObject:
    rope = _rope(config)
    keys: JsonObject = dict(rope_theta=rope.base)
    if rope.dims not in (None, config.key_dim):
        keys["partial_rotary_factor"] = _part(rope.dims, config.key_dim)
    if rope.scaling is None:
        return keys
    scaling: JsonObject = dict(rope_type=rope.scaling, factor=rope.factor)
    if rope.original_len is not None and rope.scaling != "dynamic":
        scaling["original_max_position_embeddings"] = rope.original_len
    if rope.scaling == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    if rope.scaling == "yarn":
        scaling |= dict(beta_fast=rope.beta_fast, beta_slow=rope.beta_slow, truncate=rope.truncate)
    if rope.scaling == "longrope":
        assert rope.short_factors and rope.long_factors and rope.original_len
        scaling["short_factor"] = list(rope.short_factors)
        scaling["long_factor"] = list(rope.long_factors)
        keys["max_position_embeddings"] = round(rope.original_len * rope.factor)
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
    return keys | dict(rope_scaling=scaling)


def _part(dims: int, head_dim: int) -> float:
    """Return the partial_rotary_factor p with int(head_dim p) = dims."""
    part = dims / head_dim
    return part if int(head_dim * part) == dims else math.nextafter(part, 1.0)


# Windows

LAYER_TYPES = ("full_attention", "sliding_attention")


def _layer_types(keys: ConfigKeys, layers: int) -> list[str] | None:
    """Return the kind of every layer, "sliding_attention" being those with a window, or None."""
    types = keys.take("layer_types", None)
    if types is None:
        return None
    known = isinstance(types, list) and all(kind in LAYER_TYPES for kind in types)
    if not known or len(types) != layers:
        rule = f"must be a list of {layers} (num_hidden_layers) of {' and '.join(LAYER_TYPES)}"
        keys.fail("layer_types", types, rule)
    return types


def _pattern(types: list[str], window: int | None) -> int | tuple[int | None, ...] | None:
    """Return the shortest pattern of windows that repeats to these layers."""
    windows = [window if kind == "sliding_attention" else None for kind in types]
    for period in range(1, len(windows) + 1):
        if all(w == windows[i % period] for i, w in enumerate(windows)):
            return windows[0] if period == 1 else tuple(windows[:period])
    raise AssertionError


def _write_windows(config: ModelConfig) -> JsonObject:
    windows = [config.windows[i % len(config.windows)] for i in range(config.num_layers)]
    names = ["full_attention" if window is None else "sliding_attention" for window in windows]
    width = next((window for window in windows if window is not None), None)
    return dict(layer_types=names, sliding_window=width)


# Each family


def _read_llama(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _common(keys)
    keys.require("pretraining_tp", 1)
    keys.require("rope_interleaved", False)
    keys.ignore("is_llama_config", "transformers.js_config")
    attention_bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    fields |= dict(use_bias=attention_bias)
    if mlp_bias != attention_bias:
        fields |= dict(ff_bias=mlp_bias)
    rope = _read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope)


def _write_llama(config: ModelConfig) -> JsonObject:
    ff_bias = config.use_bias if config.ff_bias is None else config.ff_bias
    return dict(
        architectures=["LlamaForCausalLM"],
        **_write_common(config),
        attention_bias=config.use_bias,
        mlp_bias=ff_bias,
    )


def _read_mistral(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _common(keys, 8)
    window = keys.optional_integer("sliding_window", 4096)
    types = _layer_types(keys, fields["num_layers"])
    rope = _read_rope(keys, fields)
    pattern = window if types is None else _pattern(types, window)
    return ModelConfig(**fields, positions=rope, window=pattern)


def _write_mistral(config: ModelConfig) -> JsonObject:
    mixed = len(set(config.windows)) > 1
    return dict(
        architectures=["MistralForCausalLM"],
        **_write_common(config),
        **(_write_windows(config) if mixed else dict(sliding_window=config.windows[0])),
    )


def _qwen_window(keys: ConfigKeys, fields: Fields) -> int | tuple[int | None, ...] | None:
    """Return the pattern of windows: by default layers from max_window_layers on have one."""
    layers, used = fields["num_layers"], keys.flag("use_sliding_window", False)
    first = keys.integer("max_window_layers", 28, least=0)
    width = keys.optional_integer("sliding_window", 4096)
    types = _layer_types(keys, layers) or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    return _pattern(types, width) if used else None


def _write_qwen(config: ModelConfig) -> JsonObject:
    keys = _write_windows(config)
    used = keys["sliding_window"] is not None
    first = keys["layer_types"].index("sliding_attention") if used else config.num_layers
    return dict(_write_common(config), **keys, use_sliding_window=used, max_window_layers=first)


def _read_qwen2(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _common(keys, 32)
    keys.require("use_mrope", False)
    window = _qwen_window(keys, fields)
    rope = _read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope, qkv_bias=True, window=window)


def _write_qwen2(config: ModelConfig) -> JsonObject:
    return dict(architectures=["Qwen2ForCausalLM"], **_write_qwen(config))


def _read_qwen3(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _common(keys, 32)
    if fields["head_dim"] is None:
        fields["head_dim"] = 128
    fields |= dict(use_bias=keys.flag("attention_bias", False), qk_norm=True)
    if fields["use_bias"]:
        fields |= dict(ff_bias=False)
    window = _qwen_window(keys, fields)
    rope = _read_rope(keys, fields)
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
    rope = _read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope)


def _gemma(keys: ConfigKeys, kv_heads: int, activation: str) -> Fields:
    fields = _common(keys, kv_heads, "gelu_pytorch_tanh", activation, tied=True)
    keys.require("attention_bias", False)
    keys.require("use_bidirectional_attention", None, False)
    if fields["head_dim"] is None:
        fields["head_dim"] = 256
    return fields | dict(norm_unit_offset=True, scale_embeddings=True)


def _write_gemma_common(config: ModelConfig) -> JsonObject:
    keys = _write_common(config) | dict(head_dim=config.key_dim)
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
    types = _layer_types(keys, fields["num_layers"]) or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(fields["num_layers"])
    ]
    keys.ignore("cache_implementation", "sliding_window_size")
    window = _pattern(types, keys.integer("sliding_window", 4096))
    rope = _read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope, window=window)


def _capped(keys: ConfigKeys, scores: float | None, logits: float | None) -> Fields:
    """Read what Gemma 2 and 3 add: soft caps, a scale of the scores, norms around branches."""
    fields = _gemma(keys, 4, "hidden_activation")
    keys.ignore("hidden_act")  # transformers reads hidden_activation only
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
    windows = _write_windows(config)
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
    keys.require("attn_logit_softcapping", None)  # transformers ignores this key
    fields = _capped(keys, None, None) | dict(qk_norm=True)
    layers = fields["num_layers"]
    every = keys.integer("sliding_window_pattern", 6)
    keys.ignore("cache_implementation")
    types = _layer_types(keys, layers)
    if types is None:
        keys.require("_sliding_window_pattern", every)
        types = [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ]
    keys.ignore("_sliding_window_pattern")  # layer_types were made from it
    window = _pattern(types, keys.integer("sliding_window", 4096))
    read = keys.number if window is None else partial(keys.positive, above=1)
    local = float(read("rope_local_base_freq", 10_000.0))
    near = None
    if keys.take("rope_parameters", None) is not None:
        near = _read_rope(keys, dict(fields), "sliding_attention", local)
        if near.scaling is not None:
            keys.fail("rope_parameters", near.scaling, "layers with a window stretch nothing")
        local = near.base
    rope = _read_rope(keys, fields, "full_attention", 1e6)
    if near is not None and near.dims != rope.dims:
        rule = "both must have one partial_rotary_factor"
        keys.fail("rope_parameters", keys.take("rope_parameters"), rule)
    base = local if window is not None else None
    rope = replace(rope, window_base=base)
    return ModelConfig(**fields, positions=rope, window=window)


def _write_gemma3(config: ModelConfig) -> JsonObject:
    base = _rope(config).window_base or 10_000.0
    keys = dict(_write_capped(config), rope_local_base_freq=base)
    return dict(architectures=["Gemma3ForCausalLM"], **keys)


_family = partial(
    Family,
    table=_table,
    prefix="model.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
)

LLAMA = _family("llama", _read_llama, _write_llama)
MISTRAL = _family("mistral", _read_mistral, _write_mistral)
QWEN2 = _family("qwen2", _read_qwen2, _write_qwen2)
QWEN3 = _family("qwen3", _read_qwen3, _write_qwen3)
GEMMA = _family("gemma", _read_gemma, _write_gemma)
GEMMA2 = _family("gemma2", _read_gemma2, _write_gemma2)
GEMMA3 = _family("gemma3_text", _read_gemma3, _write_gemma3)
