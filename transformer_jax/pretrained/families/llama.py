"""Llama (Touvron et al. 2023, Dubey et al. 2024) and the families that are based on it.

These are Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi 3 and 4, OLMo 2 and 3, Granite, SmolLM 3, and
SmolLM 1 and 2, whose model_type is llama. They share a table of names and differ in norms, biases
and windows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformer_jax.config import ConfigError, ModelConfig, Rope
from transformer_jax.pretrained.families import decoder_keys as d
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.untrusted_files import JsonObject


def llama_table(
    config: ModelConfig,
    feed_forward: list[t.TensorMapping] | None = None,
    qkv: list[t.TensorMapping] | None = None,
) -> list[t.TensorMapping]:
    """Return the table of Llama, or of a variant with different names for some layers."""
    before, after = ("input", "post_attention") if config.norm_order != "output" else (None, None)
    names = {"norm_attention": before, "norm_feed_forward": after}
    if config.norm_order == "output":
        names |= dict(out_norm_attention="post_attention", out_norm_feed_forward="post_feedforward")
    if config.norm_order == "sandwich":
        names |= dict(out_norm_attention="post_attention", norm_feed_forward="pre_feedforward",
                      out_norm_feed_forward="post_feedforward")  # fmt: skip
    scales = {f"attention/{name}_scale": f"self_attn.{name[0]}_norm" for name in ("query", "key")}
    matrices, block = t.attention_names("self_attn", "o_proj"), "model.layers.{i}"
    out = {"attention/out": matrices.pop("attention/out")}
    norms = {param: f"{name}_layernorm" for param, name in names.items() if name is not None}
    mappings = t.named(config, block, norms | scales)
    if config.attention_sinks:
        mappings += [t.TensorMapping("attention/sinks", f"{block}.self_attn.sinks")]
    mappings += qkv or t.named(config, block, matrices)
    mappings += t.named(config, block, out)
    mappings += feed_forward or t.named(config, block, t.gated_names("mlp"))
    return t.decoder(config, "model.embed_tokens", mappings, "model.norm")


llama_family = partial(
    t.Family,
    table=llama_table,
    prefix="model.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
)

LLAMA = llama_family(
    "llama",
    [*d.gated(), *d.BIASES, d.rope()],
    architecture="LlamaForCausalLM",
    divides_width=True,
)
GRANITE = llama_family(
    "granite",
    [
        *d.gated(),
        *d.BIASES,
        k.Key("attention_multiplier", "attention_scale", k.decimal, 1.0),
        k.Key("embedding_multiplier", "embedding_scale", k.multiplier, 1.0),
        k.Key("residual_multiplier", "residual_scale", k.multiplier, 1.0),
        k.Key("logits_scaling", "logit_scale", k.divisor, 1.0),
        d.rope(),
    ],
    architecture="GraniteForCausalLM",
)


# SmolLM 3: some layers have no RoPE

_SMOL_EVERY = 4


def _read_turns(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    layers = fields["num_layers"]
    every = keys.integer("no_rope_layer_interval", _SMOL_EVERY)
    turns = keys.take("no_rope_layers", None)
    if turns is None:
        turns = [int((i + 1) % every != 0) for i in range(layers)]
    valid = isinstance(turns, list) and all(type(turn) in (int, bool) for turn in turns)
    if not valid or len(turns) < layers or not set(turns) <= {0, 1}:
        rule = f"must be a list of {layers} (num_hidden_layers) of 0 and 1"
        keys.fail("no_rope_layers", turns, rule)
    pattern = d.shortest([turn == 1 for turn in turns[:layers]])
    width = keys.optional_integer("sliding_window", None)
    used = keys.flag("use_sliding_window", False) and width is not None
    # By default, the layers without RoPE are those with a window.
    types = d.types_or(keys, layers, lambda i: used and not turns[i])
    if not used and "sliding_attention" in types:
        keys.fail("layer_types", types, "requires use_sliding_window and sliding_window")
    found: k.Fields = dict(window=d.window_pattern(types, width) if used else None)
    if not all(pattern):
        # A pattern must contain a layer that rotates; otherwise, the model has no positions at all.
        turned = any(pattern) and replace(fields["positions"], pattern=pattern)
        found["positions"] = turned or None
    return found


def _write_turns(config: ModelConfig) -> JsonObject:
    pattern = d.rope_of(config).pattern or (config.positions is not None,)
    windows = d.write_windows(config)
    return dict(
        windows,
        use_sliding_window=windows["sliding_window"] is not None,
        no_rope_layers=[int(pattern[i % len(pattern)]) for i in range(config.num_layers)],
        no_rope_layer_interval=_SMOL_EVERY,
    )


SMOLLM3 = llama_family(
    "smollm3",
    [*d.gated(4, tied=True), *d.BIASES, d.rope(2_000_000.0), k.Code(_read_turns, _write_turns)],
    architecture="SmolLM3ForCausalLM",
)


# Mistral and Qwen: windows


def _read_mistral(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    window = keys.optional_integer("sliding_window", 4096)
    types = d.layer_types(keys, fields["num_layers"])
    if types is None:
        return dict(window=window)
    found: k.Fields = dict(window=d.window_pattern(types, window))
    if fields["head_dim"] == fields["d_model"] // fields["num_heads"]:
        found["head_dim"] = None  # means the default width, which is written below
    return found


MISTRAL = llama_family(
    "mistral",
    [
        *d.gated(8),
        k.Code(
            _read_mistral,
            # transformers converts a config with layer_types to a Ministral config, which requires
            # head_dim
            lambda config: (
                dict(d.write_windows(config), head_dim=config.key_dim)
                if len(set(config.windows)) > 1
                else dict(sliding_window=config.windows[0])
            ),
        ),
        d.rope(),
    ],
    architecture="MistralForCausalLM",
)


def _read_qwen(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    used, first = (
        keys.flag("use_sliding_window", False),
        keys.integer("max_window_layers", 28, least=0),
    )
    width = keys.optional_integer("sliding_window", 4096)
    types = d.types_or(keys, fields["num_layers"], lambda i: i >= first)
    return dict(window=d.window_pattern(types, width) if used else None)


def _write_qwen(config: ModelConfig) -> JsonObject:
    keys = d.write_windows(config)
    # The flag disables all windows, and max_window_layers then counts every layer.
    used = keys["sliding_window"] is not None
    first = keys["layer_types"].index("sliding_attention") if used else config.num_layers
    return dict(keys, use_sliding_window=used, max_window_layers=first)


_QWEN_WINDOWS = k.Code(_read_qwen, _write_qwen)
"""Layers from index `max_window_layers` have a window if `use_sliding_window` is true."""
QWEN2 = llama_family(
    "qwen2",
    [*d.gated(32), k.Fixed(qkv_bias=True), _QWEN_WINDOWS, d.rope()],
    architecture="Qwen2ForCausalLM",
)
QWEN3 = llama_family(
    "qwen3",
    [*d.gated(32, head_dim=128), d.ATTENTION_BIAS, k.Fixed(qk_norm=True), _QWEN_WINDOWS, d.rope()],
    architecture="Qwen3ForCausalLM",
)


# Gemma

_TANH = k.activation(gelu_tanh="gelu_pytorch_tanh")


def _read_activation(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    act = keys.choice("hidden_act", k.ACTIVATIONS, "gelu_pytorch_tanh")
    act = (
        "gelu_tanh" if act == "gelu" else act
    )  # early files specify gelu but mean its tanh approximation
    if keys.take("hidden_activation", None) is not None:  # libraries may read either key
        also = keys.choice("hidden_activation", k.ACTIVATIONS)
        if ("gelu_tanh" if also == "gelu" else also) != act:
            rule = f"must match hidden_act, which means {act!r}"
            keys.fail("hidden_activation", keys.take("hidden_activation"), rule)
    return dict(activation=act)


def _gemma(kv_heads: int) -> list[k.Entry]:
    return [
        *d.decoder_sizes(kv_heads, tied=True, head_dim=256),
        k.Fixed(norm="rmsnorm", norm_unit_offset=True, glu=True, use_bias=False),
        k.Fixed(scale_embeddings=True),
        k.Key("rms_norm_eps", "norm_eps", k.positive, 1e-6),
        k.FixedKeys(attention_bias=False),
    ]


def _capped(scores: float | None, logits: float | None) -> list[k.Entry]:
    """List the keys of Gemma 2 and 3, which have soft caps, a score scale and sandwich norms."""
    return [
        *_gemma(4),
        k.Key("hidden_activation", "activation", _TANH, "gelu_pytorch_tanh"),
        k.Key("attn_logit_softcapping", "attention_softcap", k.optional_positive, scores),
        k.Key("final_logit_softcapping", "logit_softcap", k.optional_positive, logits),
        k.Key("query_pre_attn_scalar", "attention_scale", _SCALAR, 256),
        k.Fixed(norm_order="sandwich"),
    ]


_SCALAR = k.Kind(
    lambda keys, name, default: float(keys.positive(name, default)) ** -0.5,
    # squaring the root rounds; integers stay integers
    lambda scale: int(s) if (s := round(scale**-2, 6)) == int(s) else s,
)


def _read_local_rope(keys: k.ConfigKeys, fields: k.Fields, base: float) -> Rope:
    """Return the RoPE of layers with a window, which Gemma 3 and OLMo 3 never scale."""
    # Pass a copy, because read_rope may shorten max_len, which the other layers define.
    rope = d.read_rope(keys, dict(fields), "sliding_attention", base)
    if rope.scaling is not None:
        keys.fail("rope_parameters", rope.scaling, "layers with a window must have no RoPE scaling")
    return rope


def _read_gemma3(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    every = keys.integer("sliding_window_pattern", 6)
    if keys.take("layer_types", None) is None:
        keys.require("_sliding_window_pattern", every)
    keys.ignore("_sliding_window_pattern")  # layer_types is derived from it
    window = d.windows(d.every(every)).read(keys, fields)["window"]
    # Without windows, the local base is not used, and any number is accepted.
    read = keys.number if window is None else partial(keys.positive, above=1)
    local = float(read("rope_local_base_freq", 10_000.0))
    near = None
    if keys.take("rope_parameters", None) is not None:
        near = _read_local_rope(keys, fields, local)
        local = near.base
    far = d.read_rope(keys, fields, "full_attention", 1e6)
    if near is not None and near.dims != far.dims:
        raise ConfigError("partial_rotary_factor must be 1 in every layer")
    far = replace(far, window_base=local if window is not None else None)
    return dict(positions=far, window=window, max_len=fields["max_len"])


GEMMA = llama_family(
    "gemma",
    [
        *_gemma(16),
        k.Code(
            _read_activation,
            lambda config: dict.fromkeys(
                ("hidden_act", "hidden_activation"), _TANH.write(config.activation)
            ),
        ),
        d.rope(),
    ],
    architecture="GemmaForCausalLM",
)
GEMMA2 = llama_family(
    "gemma2",
    [*_capped(50.0, 30.0), d.windows(d.every(2)), d.rope()],
    architecture="Gemma2ForCausalLM",
    divides_width=True,
)
GEMMA3 = llama_family(
    "gemma3_text",
    [
        *_capped(None, None),
        k.Fixed(qk_norm=True),
        k.Code(
            _read_gemma3,
            lambda config: (
                d.write_rope(config)
                | d.windows(d.every(6)).write(config)
                | dict(rope_local_base_freq=d.rope_of(config).window_base or 10_000.0)
            ),
        ),
    ],
    architecture="Gemma3ForCausalLM",
    divides_width=True,
)


# Phi 3: layers with the same input share a tensor


def _phi3_table(config: ModelConfig) -> list[t.TensorMapping]:
    """Return Llama's table with one tensor for query, key and value and one for gate and up."""
    q, k = config.num_heads * config.key_dim, config.kv_heads * config.key_dim
    heads = {"attention/query": q, "attention/key": k, "attention/value": k}
    block = "model.layers.{i}"
    qkv = t.fused(f"{block}.self_attn.qkv_proj", 1, heads, bias=False)
    return llama_table(config, t.named(config, block, t.joint_gate_names("mlp")), qkv)


def _read_phi3(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    positions = d.read_rope(keys, fields)
    if positions.scaling not in (None, "longrope"):
        keys.fail("rope_scaling", positions.scaling, "must be longrope or absent for phi3")
    return dict(positions=positions, max_len=fields["max_len"])


PHI3 = llama_family(
    "phi3",
    [
        *d.gated(eps=1e-5),
        k.Key("embd_pdrop", "dropout", k.rate, 0.0),  # transformers does not use it
        k.Key("resid_pdrop", "dropout", k.rate, 0.0),
        d.WINDOW,
        k.Code(
            _read_phi3,
            lambda config: (
                d.write_rope(config)
                | dict(
                    original_max_position_embeddings=d.rope_of(config).original_len
                    or config.max_len
                )
            ),
        ),
    ],
    table=_phi3_table,
    architecture="Phi3ForCausalLM",
    rotates_parts=True,
)


# OLMo 2 and 3: norms on the outputs of branches

_OLMO = [
    *d.gated(eps=1e-5),
    k.Fixed(norm_order="output", qk_norm=True, qk_norm_over="heads"),
    d.ATTENTION_BIAS,
]
_OLMO3_BASE = 500_000.0
_OLMO3_WINDOWS = d.windows(d.every(4))


def _read_olmo3(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    window = _OLMO3_WINDOWS.read(keys, fields)["window"]
    is_nested = keys.take("rope_parameters", None) is not None
    near = Rope(base=_OLMO3_BASE)
    if is_nested:
        near = _read_local_rope(keys, fields, _OLMO3_BASE)
    far = d.read_rope(keys, fields, "full_attention", _OLMO3_BASE)
    if window is not None:
        if not is_nested and far.base != _OLMO3_BASE:  # libraries differ on the base in windows
            rule = f"must be {_OLMO3_BASE}, or rope_parameters must define the base per layer type"
            keys.fail("rope_theta", far.base, rule)
        if near.dims != far.dims:
            raise ConfigError("partial_rotary_factor must be 1 in every layer")
        if near != far:
            far = replace(far, window_base=near.base)
    return dict(positions=far, window=window, max_len=fields["max_len"])


def _write_olmo3(config: ModelConfig) -> JsonObject:
    keys = d.write_rope(config)
    far: JsonObject = dict(rope_type="default") | keys.pop("rope_scaling", {})
    far["rope_theta"] = keys.pop("rope_theta")
    near: JsonObject = dict(rope_type="default", rope_theta=far["rope_theta"])
    if (base := d.rope_of(config).window_base) is not None:
        near["rope_theta"] = base
    keys["rope_parameters"] = dict(full_attention=far, sliding_attention=near)
    return keys | _OLMO3_WINDOWS.write(config)


OLMO2 = llama_family("olmo2", [*_OLMO, d.rope()], architecture="Olmo2ForCausalLM")
OLMO3 = llama_family(
    "olmo3", [*_OLMO, k.Code(_read_olmo3, _write_olmo3)], architecture="Olmo3ForCausalLM"
)
