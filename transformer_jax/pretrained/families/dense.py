"""Decoders that differ from Llama in a few keys and names.

These are GLM and GLM-4 (Zeng et al. 2024), ERNIE 4.5 (Baidu 2025), Seed-OSS (ByteDance 2025),
Helium (Kyutai 2025), EXAONE 4 (LG AI Research 2025), Arcee (Arcee AI 2025), Nemotron (Parmar et al.
2024), Persimmon (Elsen et al. 2023), Hunyuan (Tencent 2025) and Apertus (Swiss AI 2025).
"""

from __future__ import annotations

from dataclasses import replace

from transformer_jax.config import ModelConfig, Rope
from transformer_jax.pretrained.families import decoder_keys as d
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.pretrained.families.layernorm import NORMS
from transformer_jax.pretrained.families.llama import llama_family, llama_table
from transformer_jax.untrusted_files import JsonObject

_HEAD_DIM = k.Key("head_dim", "head_dim", k.optional_integer, 128)
"""Unlike in Qwen 3, null means hidden_size / num_attention_heads."""
_MLP_BIAS = k.Key("mlp_bias", "ff_bias", k.flag, False, unless="use_bias")


def _qkv_bias(default: bool) -> k.Key:
    return k.Key("attention_bias", "qkv_bias", k.flag, default, unless="use_bias")


# GLM and GLM-4

_GLM_NAMES = NORMS | t.attention_names("self_attn", "o_proj") | t.joint_gate_names("mlp")
_GLM = [
    *d.gated(2, head_dim=128, eps=1.5625e-7),
    _qkv_bias(True),
    k.FixedKeys(partial_rotary_factor=1.0),  # the default is 0.5
    d.rope(part=0.5, pairing="interleaved"),
]
GLM = llama_family(
    "glm",
    _GLM,
    table=t.named_decoder("model.embed_tokens", "model.layers.{i}", _GLM_NAMES, "model.norm"),
    architecture="GlmForCausalLM",
    rotates_parts=True,
)
_GLM4_NAMES = _GLM_NAMES | {
    "out_norm_attention": "post_self_attn_layernorm", "out_norm_feed_forward": "post_mlp_layernorm",
}  # fmt: skip
GLM4 = llama_family(
    "glm4",
    [*_GLM, k.Fixed(norm_order="sandwich")],
    table=t.named_decoder("model.embed_tokens", "model.layers.{i}", _GLM4_NAMES, "model.norm"),
    architecture="Glm4ForCausalLM",
    rotates_parts=True,
)


# ERNIE 4.5, Seed-OSS and Helium

ERNIE = llama_family(
    "ernie4_5",
    [
        *d.gated(2, tied=True, eps=1e-5),
        _HEAD_DIM,
        k.Key("use_bias", "use_bias", k.flag, False),
        d.rope(500_000.0, pairing="interleaved"),
    ],
    architecture="Ernie4_5ForCausalLM",
)
SEED_OSS = llama_family(
    "seed_oss",
    [
        *d.gated(8),
        _HEAD_DIM,
        _qkv_bias(True),
        k.Key("attention_out_bias", "out_bias", k.flag, False, unless="use_bias"),
        _MLP_BIAS,
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.1),
        k.Key("residual_dropout", "dropout", k.rate, 0.1),
        d.rope(),
    ],
    architecture="SeedOssForCausalLM",
)


def _check_width(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Reject a width that does not fit the output projection of Helium, which is square."""
    if fields["head_dim"] * fields["num_heads"] != fields["d_model"]:
        rule = f"must be hidden_size / num_attention_heads, {fields['d_model']} / "
        keys.fail("head_dim", fields["head_dim"], f"{rule}{fields['num_heads']}")
    return {}


HELIUM = llama_family(
    "helium",
    [
        *d.gated(20, head_dim=128, eps=1e-8),
        k.Code(_check_width),
        _qkv_bias(False),
        _MLP_BIAS,
        d.rope(100_000.0, pairing="interleaved"),
    ],
    architecture="HeliumForCausalLM",
)


# EXAONE 4: if there are windows, layers without a window do not rotate


def _read_exaone4(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    layers, width = fields["num_layers"], keys.optional_integer("sliding_window", 4096)
    types = d.layer_types(keys, layers)
    if types is None:
        every = 1 if width is None else keys.integer("sliding_window_pattern", 4)
        types = d.types_or(keys, layers, d.every(every))
    keys.ignore("sliding_window_pattern")  # layer_types takes precedence
    if width is not None:
        window = d.window_pattern(types, width)
        return d.rotated_in_windows(types, fields["positions"]) | dict(window=window)
    if "sliding_attention" in types:
        keys.fail("sliding_window", width, "must be a number, because layer_types has windows")
    return dict(window=None)


def _write_exaone4(config: ModelConfig) -> JsonObject:
    keys = d.write_windows(config)
    if config.positions is None and keys["sliding_window"] is None:
        keys["sliding_window"] = 4096  # any number disables the rotation of layers without a window
    return keys


EXAONE4 = llama_family(
    "exaone4",
    [
        *d.gated(32, eps=1e-5),
        k.Fixed(norm_order="output", qk_norm=True),
        d.rope(),
        k.Code(_read_exaone4, _write_exaone4),
    ],
    architecture="Exaone4ForCausalLM",
)


# Arcee and Nemotron: a feed-forward network without gates, with a squared ReLU

_UP_DOWN = {"feed_forward/up": "mlp.up_proj", "feed_forward/down": "mlp.down_proj"}
_RELU_SQUARED = k.Key("hidden_act", "activation", k.activation(), "relu2")
ARCEE = llama_family(
    "arcee",
    [
        *d.decoder_sizes(),
        k.Fixed(norm="rmsnorm"),
        k.Key("rms_norm_eps", "norm_eps", k.positive, 1e-5),
        _RELU_SQUARED,
        *d.BIASES,
        d.rope(),
    ],
    table=lambda config: llama_table(config, t.named(config, "model.layers.{i}", _UP_DOWN)),
    architecture="ArceeForCausalLM",
    divides_width=True,
)
NEMOTRON = llama_family(
    "nemotron",
    [
        *d.decoder_sizes(),
        k.Fixed(norm_unit_offset=True),
        k.Key("norm_eps", "norm_eps", k.positive, 1e-5),
        _RELU_SQUARED,
        k.Flag("attention_bias", False, on={}, off=dict(qkv_bias=False, out_bias=False)),
        k.Flag("mlp_bias", False, on={}, off=dict(ff_bias=False)),
        k.FixedKeys(partial_rotary_factor=1.0),  # the default is 0.5
        d.rope(part=0.5),
    ],
    table=t.named_decoder(
        "model.embed_tokens",
        "model.layers.{i}",
        NORMS | t.attention_names("self_attn", "o_proj") | _UP_DOWN,
        "model.norm",
    ),
    architecture="NemotronForCausalLM",
    rotates_parts=True,
)


# Persimmon: norms of queries and keys with biases

_QK_NORMS = dict(qk_norm=True, qk_norm_kind="layernorm", qk_norm_bias=True)
_PERSIMMON_NAMES = NORMS | {
    "attention/qkv": "self_attn.query_key_value", "attention/out": "self_attn.dense",
    "attention/query_scale": "self_attn.q_layernorm",
    "attention/key_scale": "self_attn.k_layernorm",
    "feed_forward/up": "mlp.dense_h_to_4h", "feed_forward/down": "mlp.dense_4h_to_h",
}  # fmt: skip

PERSIMMON = llama_family(
    "persimmon",
    [
        *k.standard_sizes(),
        k.Key("layer_norm_eps", "norm_eps", k.positive, 1e-5),
        _RELU_SQUARED,
        k.Flag("qk_layernorm", True, on=_QK_NORMS, off=dict(qk_norm=False)),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, False),
        k.Key("hidden_dropout", "dropout", k.rate, 0.0),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
        k.FixedKeys(partial_rotary_factor=1.0),  # the default is 0.5
        d.rope(part=0.5),
    ],
    table=t.named_decoder(
        "model.embed_tokens", "model.layers.{i}", _PERSIMMON_NAMES, "model.final_layernorm"
    ),
    architecture="PersimmonForCausalLM",
    rotates_parts=True,
)


# Hunyuan: norms of queries and keys after the rotation


def _read_hunyuan_rope(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Read RoPE. With `alpha`, a dynamic rotation only has another base, for every length."""
    names = "rope_parameters", "rope_scaling"
    specs = {name: keys.take(name, None) for name in names}
    name = next((n for n in names if isinstance(specs[n], dict) and specs[n].get("alpha")), None)
    if name is None:
        return d.rope().read(keys, fields)
    spec = dict(specs[name])
    alpha = k.ConfigKeys(spec, f"{keys.where}: {name}", family="rope").positive("alpha")
    if spec.pop("type", None) != "dynamic" and spec.get("rope_type") != "dynamic":
        keys.fail(name, specs[name], "alpha needs rope_type 'dynamic'")
    del spec["alpha"]
    plain = dict(keys.content, **{name: dict(spec, rope_type="default")})
    positions = d.read_rope(k.ConfigKeys(plain, keys.where), fields)
    keys.ignore("rope_theta")
    width = fields["head_dim"] or fields["d_model"] // fields["num_heads"]
    if width <= 2:
        keys.fail("head_dim", width, f"must exceed 2, because {name} has alpha")
    return dict(positions=replace(positions, base=positions.base * alpha ** (width / (width - 2))))


_HUNYUAN_NAMES = NORMS | t.attention_names("self_attn", "o_proj") | t.gated_names("mlp") | {
    "attention/query_scale": "self_attn.query_layernorm",
    "attention/key_scale": "self_attn.key_layernorm",
}  # fmt: skip
HUNYUAN = llama_family(
    "hunyuan_v1_dense",
    [
        *d.gated(eps=1e-5),
        d.ATTENTION_BIAS,
        k.Fixed(qk_norm=True, qk_norm_after_rope=True),
        # transformers fails without head_dim
        k.Code(
            _read_hunyuan_rope, lambda config: d.write_rope(config) | dict(head_dim=config.key_dim)
        ),
    ],
    table=t.named_decoder("model.embed_tokens", "model.layers.{i}", _HUNYUAN_NAMES, "model.norm"),
    architecture="HunYuanDenseV1ForCausalLM",
)


# Apertus: xIELU

_APERTUS_ROPE = Rope(
    base=12e6, scaling="llama3", factor=8.0, original_len=8192, low_freq_factor=1.0,
    high_freq_factor=4.0,
)  # fmt: skip


def _read_apertus_rope(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    if any(keys.take(name, None) for name in ("rope_parameters", "rope_scaling")):
        return d.rope(12e6).read(keys, fields)
    if (base := keys.take("rope_theta", None)) is not None:  # versions of transformers differ
        keys.fail("rope_theta", base, "needs rope_parameters or rope_scaling")
    return dict(positions=_APERTUS_ROPE)


_APERTUS_NAMES = t.attention_names("self_attn", "o_proj") | _UP_DOWN | {
    "norm_attention": "attention_layernorm", "norm_feed_forward": "feedforward_layernorm",
    "attention/query_scale": "self_attn.q_norm", "attention/key_scale": "self_attn.k_norm",
    "feed_forward/alpha_positive": "mlp.act_fn.alpha_p",
    "feed_forward/alpha_negative": "mlp.act_fn.alpha_n",
}  # fmt: skip
APERTUS = llama_family(
    "apertus",
    [
        *d.decoder_sizes(),
        k.Fixed(norm="rmsnorm", qk_norm=True),
        k.Key("rms_norm_eps", "norm_eps", k.positive, 1e-5),
        k.Key("hidden_act", "activation", k.activation(xielu="xielu"), "xielu"),
        d.ATTENTION_BIAS,
        k.FixedKeys(rope_scaling=dict(rope_type="default")),  # the default is llama3
        k.Code(_read_apertus_rope, d.write_rope),
    ],
    table=t.named_decoder("model.embed_tokens", "model.layers.{i}", _APERTUS_NAMES, "model.norm"),
    architecture="ApertusForCausalLM",
    scalars=lambda config: {
        f"model.layers.{i}.mlp.act_fn.{name}": value
        for i in range(config.num_layers * (config.activation == "xielu"))
        for name, value in (("beta", 0.5), ("eps", -1e-6))
    },
)
