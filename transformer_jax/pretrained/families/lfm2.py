"""LFM2 (Liquid AI 2025): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.config.mixers import Mixer
from transformer_jax.pretrained.families import decoder_keys as d
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.pretrained.families.hybrid import mixers_of_types
from transformer_jax.pretrained.families.llama import llama_family
from transformer_jax.untrusted_files import JsonObject

_ATTENTION = t.attention_names("self_attn", "out_proj") | {
    "attention/query_scale": "self_attn.q_layernorm",
    "attention/key_scale": "self_attn.k_layernorm",
}
_FEED_FORWARD = {
    f"feed_forward/{param}": f"feed_forward.{name}"
    for param, name in dict(gate="w1", up="w3", down="w2").items()
}


def _table(config: ModelConfig) -> list[t.TensorMapping]:
    block, bias = "model.layers.{i}", config.short_conv is not None and config.short_conv.conv_bias
    names = "input_gate", "output_gate", "up"
    rows = {f"short_conv/{name}": config.d_model for name in names}
    conv = t.fused(f"{block}.conv.in_proj", 1, rows, bias)
    conv += t.linear("short_conv/down", f"{block}.conv.out_proj", bias=bias)
    conv += [
        t.TensorMapping("short_conv/conv", f"{block}.conv.conv.weight", t.Layout("depthwise")),
        *([t.TensorMapping("short_conv/conv_bias", f"{block}.conv.conv.bias")] if bias else []),
    ]
    attention = t.named(config, block, _ATTENTION)

    def mappings(i: int) -> list[t.TensorMapping]:
        mixer = config.mixer(i)
        norms = {f"norm_{mixer}": "operator_norm", "norm_feed_forward": "ffn_norm"}
        own = conv if mixer == "short_conv" else attention
        return t.named(config, block, norms | _FEED_FORWARD) + own

    return t.decoder(config, "model.embed_tokens", mappings, "model.embedding_norm")


_MIXERS: dict[str, Mixer] = {"conv": "short_conv", "full_attention": "attention"}


def _read_mixers(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    types, layers = keys.take("layer_types", None), fields["num_layers"]
    full = keys.take("full_attn_idxs", None)  # an older form of layer_types
    if full is not None:
        known = isinstance(full, list) and all(type(i) is int and 0 <= i < layers for i in full)
        if not known or len({*full}) < len(full):
            rule = f"must be a list of different numbers from 0 to {layers - 1}"
            keys.fail("full_attn_idxs", full, rule)
        listed = [[*_MIXERS][i in full] for i in range(layers)]
        if types not in (None, listed):
            keys.fail("layer_types", types, "must agree with full_attn_idxs")
        types = listed
    return mixers_of_types(keys, fields, types, _MIXERS)


def _write_mixers(config: ModelConfig) -> JsonObject:
    names = {mixer: name for name, mixer in _MIXERS.items()}
    mixers = [config.mixer(i) for i in range(config.num_layers)]
    return dict(layer_types=[names.get(mixer, mixer) for mixer in mixers])


def _read_width(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Return the width of the feed-forward network, which may derive from intermediate_size."""
    factor = keys.positive("block_ffn_dim_multiplier", 1.0)
    multiple, width = keys.integer("block_multiple_of", 256), fields["d_ff"]
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return {}
    width = -(-int(factor * int(2 * width / 3)) // multiple) * multiple
    if not 1 <= width < 2**31:
        rule = f"block_auto_adjust_ff_dim computes {width}: must be from 1 to 2^31 - 1"
        keys.fail("intermediate_size", fields["d_ff"], rule)
    return dict(d_ff=width)


LFM2 = llama_family(
    "lfm2",
    [
        *d.decoder_sizes(8, tied=True),
        k.Fixed(norm="rmsnorm", glu=True, activation="silu", use_bias=False, qk_norm=True),
        k.Key("norm_eps", "norm_eps", k.positive, 1e-5),
        k.Key("conv_L_cache", "short_conv.conv_width", k.integer, 3),
        k.Key("conv_bias", "short_conv.conv_bias", k.flag, False),
        k.Code(_read_width, lambda config: dict(block_auto_adjust_ff_dim=False)),
        k.Code(_read_mixers, _write_mixers),
        d.rope(1_000_000.0),
    ],
    architecture="Lfm2ForCausalLM",
    table=_table,
)
