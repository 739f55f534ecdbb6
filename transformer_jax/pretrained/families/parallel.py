"""Families with parallel branches, which all read the input of the block.

These are GPT-NeoX and Pythia (Black et al. 2022, Biderman et al. 2023), GPT-J (Wang and Komatsuzaki
2021), Phi 1 to 2 (Gunasekar et al. 2023), and Command R, Aya and Command R7B by Cohere.
"""

from __future__ import annotations

from functools import partial

from transformer_jax.config import ModelConfig, Rope
from transformer_jax.pretrained.families import decoder_keys as d
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.untrusted_files import JsonObject

# GPT-NeoX and Pythia


def _read_neox_rope(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    part = keys.positive("rotary_pct", 0.25)
    if part > 1:
        keys.fail("rotary_pct", part, "must be at most 1")
    base = keys.positive("rotary_emb_base", 10_000.0, above=1)
    return d.rope(base, part).read(keys, fields)


def _write_neox_rope(config: ModelConfig) -> JsonObject:
    keys = d.write_rope(config)
    base, part = keys.pop("rope_theta"), keys.pop("partial_rotary_factor", 1.0)
    return dict(keys, rotary_emb_base=base, rotary_pct=part)


_NEOX = {
    "norm_attention": "input_layernorm", "norm_feed_forward": "post_attention_layernorm",
    "attention/qkv": "attention.query_key_value", "attention/out": "attention.dense",
    "feed_forward/up": "mlp.dense_h_to_4h", "feed_forward/down": "mlp.dense_4h_to_h",
}  # fmt: skip


GPT_NEOX = t.Family(
    "gpt_neox",
    [
        *k.standard_sizes(50432, 6144, 24576, 44, 64, 2048),
        k.Key("layer_norm_eps", "norm_eps", k.positive, 1e-5),
        k.Key("use_parallel_residual", "norm_order", k.either("parallel", "pre"), True),
        k.Key("hidden_act", "activation", k.activation(), "gelu"),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, False),
        k.Key("hidden_dropout", "dropout", k.rate, 0.0),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
        k.Flag("attention_bias", True, on={}, off=dict(qkv_bias=False, out_bias=False)),
        k.Code(_read_neox_rope, _write_neox_rope),
    ],
    t.named_decoder(
        "gpt_neox.embed_in", "gpt_neox.layers.{i}", _NEOX, "gpt_neox.final_layer_norm", "embed_out"
    ),
    "GPTNeoXForCausalLM",
    rotates_parts=True,
    prefix="gpt_neox.",
    head_tensors=("embed_out.*",),
    ignored_tensors=(
        "gpt_neox.layers.*.attention.bias",
        "gpt_neox.layers.*.attention.masked_bias",
        "gpt_neox.layers.*.attention.rotary_emb.inv_freq",
    ),
    tied_copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
)


# GPT-J


def _read_gptj_rope(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    width, heads = fields["d_model"], fields["num_heads"]
    dims = keys.integer("rotary_dim", 64)
    if dims % 2 or dims > width // heads:
        keys.fail(
            "rotary_dim", dims, f"must be even and at most {width // heads}, the width of a head"
        )
    return dict(positions=Rope(dims=None if dims * heads == width else dims, pairing="interleaved"))


_GPTJ = {
    "norm": "ln_1", **t.attention_names("attn", "out_proj"),
    "feed_forward/up": "mlp.fc_in", "feed_forward/down": "mlp.fc_out",
}  # fmt: skip
GPTJ = t.Family(
    "gptj",
    [
        k.Key("vocab_size", "vocab_size", k.integer, 50400),
        k.Key("n_positions", "max_len", k.integer, 2048),
        k.Key("n_embd", "d_model", k.integer, 4096),
        k.Key("n_layer", "num_layers", k.integer, 28),
        k.Key("n_head", "num_heads", k.integer, 16),
        k.Key("n_inner", "d_ff", k.integer, None),
        k.Code(
            _read_gptj_rope,
            lambda config: dict(rotary_dim=d.rope_of(config).dims or config.key_dim),
        ),
        k.Fixed(norm_order="parallel_shared", qkv_bias=False, out_bias=False, logit_bias=True),
        k.Key("layer_norm_epsilon", "norm_eps", k.positive, 1e-5),
        k.Key("activation_function", "activation", k.activation(), "gelu_new"),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, False),
        k.Key("embd_pdrop", "dropout", k.rate, 0.0),
        k.Key("resid_pdrop", "dropout", k.rate, 0.0),  # takes precedence, as in GPT-2
        k.Key("attn_pdrop", "attention_dropout", k.rate, 0.0),
    ],
    t.named_decoder("transformer.wte", "transformer.h.{i}", _GPTJ, "transformer.ln_f"),
    "GPTJForCausalLM",
    rotates_parts=True,
    prefix="transformer.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    tied_copies={"lm_head.weight": "transformer.wte.weight"},
)


# Phi 1, 1.5 and 2


_PHI = {
    "norm": "input_layernorm", **t.attention_names("self_attn", "dense"),
    "feed_forward/up": "mlp.fc1", "feed_forward/down": "mlp.fc2",
}  # fmt: skip
PHI = t.Family(
    "phi",
    [
        *k.standard_sizes(51200, 2048, 8192, 24, 32, 2048),
        k.Key("num_key_value_heads", "num_kv_heads", k.optional_integer, None, null="num_heads"),
        k.Key("head_dim", "head_dim", k.integer, None, optional=True),
        k.Fixed(norm_order="parallel_shared", logit_bias=True),
        k.Key("layer_norm_eps", "norm_eps", k.positive, 1e-5),
        k.Key("hidden_act", "activation", k.activation(), "gelu_new"),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, False),
        k.Key("embd_pdrop", "dropout", k.rate, 0.0),
        k.Key("resid_pdrop", "dropout", k.rate, 0.0),  # takes precedence, as in GPT-2
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
        k.FixedKeys(partial_rotary_factor=1.0),  # the default is 0.5
        d.rope(part=0.5),
    ],
    t.named_decoder("model.embed_tokens", "model.layers.{i}", _PHI, "model.final_layernorm"),
    "PhiForCausalLM",
    rotates_parts=True,
    prefix="model.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
)


# Cohere


def _read_cohere_rope(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    if keys.take("rope_parameters", None) is None:
        keys.take("rope_theta")  # its default differs between versions of transformers
    return d.rope(pairing="interleaved").read(keys, fields)


_COHERE: list[k.Entry] = [
    *d.decoder_sizes(tied=True),
    k.Fixed(norm="layernorm", norm_order="parallel_shared", glu=True, use_bias=False),
    k.Key("layer_norm_eps", "norm_eps", k.positive, 1e-5),
    k.Key("hidden_act", "activation", k.activation(), "silu"),
    k.Key("logit_scale", "logit_scale", k.multiplier, 0.0625),
    k.Flag("attention_bias", False, on=dict(qkv_bias=True, out_bias=True), off={}),
    k.Code(_read_cohere_rope, d.write_rope),
]


def _read_cohere2(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    every = keys.integer("sliding_window_pattern", 4)
    types = d.types_or(keys, fields["num_layers"], d.every(every))
    keys.ignore("_sliding_window_pattern")  # layer_types is derived from it
    window = d.window_pattern(types, keys.integer("sliding_window", 4096))
    return d.rotated_in_windows(types, fields["positions"]) | dict(window=window)


_COHERE_NAMES = {
    "norm": "input_layernorm", "attention/query_scale": "self_attn.q_norm",
    "attention/key_scale": "self_attn.k_norm", **t.attention_names("self_attn", "o_proj"),
    **t.gated_names("mlp"),
}  # fmt: skip
cohere_family = partial(
    t.Family,
    table=t.named_decoder("model.embed_tokens", "model.layers.{i}", _COHERE_NAMES, "model.norm"),
    prefix="model.",
    head_tensors=("lm_head.*",),
    tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
)
COHERE = cohere_family(
    "cohere",
    [*_COHERE, k.Flag("use_qk_norm", False, on=d.OWN_HEAD_NORMS, off={})],
    architecture="CohereForCausalLM",
)
COHERE2 = cohere_family(
    "cohere2",
    [*_COHERE, k.Code(_read_cohere2, d.windows(d.every(4)).write)],
    architecture="Cohere2ForCausalLM",
)
