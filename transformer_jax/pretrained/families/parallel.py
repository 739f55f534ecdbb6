"""Map the families whose branches are parallel: both read the stream before the block.

They are GPT-NeoX with Pythia (Black et al. 2022, Biderman et al. 2023), GPT-J (Wang and Komatsuzaki
2021), Phi 1 to 2 (Gunasekar et al. 2023), and Command R, Aya and Command R7B of Cohere.
"""

from __future__ import annotations

from dataclasses import replace

from transformer_jax.config import ModelConfig, Rope
from transformer_jax.pretrained.families.decoder_keys import (
    biases,
    layer_types,
    read_common,
    read_rope,
    rope_of,
    shortest,
    window_pattern,
    write_rope,
    write_sizes,
    write_windows,
)
from transformer_jax.pretrained.families.table import (
    ACTIVATIONS,
    LINEAR_OUT,
    ConfigKeys,
    Family,
    Fields,
    TensorMapping,
    activation_key,
    attention_linears,
    blocks,
    fused,
    gated_linears,
    linear,
    norm,
    output_matrix,
)
from transformer_jax.untrusted_files import JsonObject

# GPT-NeoX and Pythia


def _neox_table(config: ModelConfig) -> list[TensorMapping]:
    block = "gpt_neox.layers.{i}"
    attention, mlp = f"{block}.attention", f"{block}.mlp"
    heads = dict.fromkeys(("attention/query", "attention/key", "attention/value"), config.key_dim)
    qkv, out, _ = biases(config)
    return [
        TensorMapping("embed/tokens", "gpt_neox.embed_in.weight"),
        *blocks(
            "decoder",
            config.num_layers,
            [
                *norm("norm_attention", f"{block}.input_layernorm"),
                *norm("norm_feed_forward", f"{block}.post_attention_layernorm"),
                *fused(f"{attention}.query_key_value", config.num_heads, heads, qkv),
                *linear("attention/out", f"{attention}.dense", LINEAR_OUT, out),
                *linear("feed_forward/up", f"{mlp}.dense_h_to_4h"),
                *linear("feed_forward/down", f"{mlp}.dense_4h_to_h"),
            ],
        ),
        *norm("decoder/norm", "gpt_neox.final_layer_norm"),
        *output_matrix(config, "embed_out"),
    ]


def _read_neox(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields: Fields = dict(
        vocab_size=keys.integer("vocab_size", 50432),
        d_model=keys.integer("hidden_size", 6144),
        d_ff=keys.integer("intermediate_size", 24576),
        num_layers=keys.integer("num_hidden_layers", 44),
        num_heads=keys.integer("num_attention_heads", 64),
        head_dim=None,
        max_len=keys.integer("max_position_embeddings", 2048),
        norm_eps=keys.positive("layer_norm_eps", 1e-5),
        norm_order="parallel" if keys.flag("use_parallel_residual", True) else "pre",
        activation=keys.choice("hidden_act", ACTIVATIONS, "gelu"),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        dropout=keys.rate("hidden_dropout", 0.0),
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )
    if not keys.flag("attention_bias", True):
        fields |= dict(qkv_bias=False, out_bias=False)
    part = keys.positive("rotary_pct", 0.25)
    if part > 1:
        keys.fail("rotary_pct", part, "must be at most 1")
    base = keys.positive("rotary_emb_base", 10_000.0, above=1)
    rope = read_rope(keys, fields, default=base, part=part)
    return ModelConfig(**fields, positions=rope)


def _write_neox(config: ModelConfig) -> JsonObject:
    rope = write_rope(config)
    return dict(
        architectures=["GPTNeoXForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.ff_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        max_position_embeddings=rope.pop("max_position_embeddings", config.max_len),
        layer_norm_eps=config.norm_eps,
        use_parallel_residual=config.norm_order == "parallel",
        hidden_act=activation_key(config.activation),
        tie_word_embeddings=config.tie_embeddings,
        hidden_dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        attention_bias=biases(config)[0],
        rotary_emb_base=rope.pop("rope_theta"),
        rotary_pct=rope.pop("partial_rotary_factor", 1.0),
        **rope,
    )


# GPT-J


def _gptj_table(config: ModelConfig) -> list[TensorMapping]:
    block = "transformer.h.{i}"
    return [
        TensorMapping("embed/tokens", "transformer.wte.weight"),
        *blocks(
            "decoder",
            config.num_layers,
            [
                *norm("norm", f"{block}.ln_1"),
                *attention_linears(f"{block}.attn", "out_proj", False, False),
                *linear("feed_forward/up", f"{block}.mlp.fc_in"),
                *linear("feed_forward/down", f"{block}.mlp.fc_out"),
            ],
        ),
        *norm("decoder/norm", "transformer.ln_f"),
        *output_matrix(config, "lm_head"),
    ]


def _read_gptj(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    keys.rate("embd_pdrop", 0.0)  # read as resid_pdrop: a ModelConfig has one rate for both
    width, heads = keys.integer("n_embd", 4096), keys.integer("n_head", 16)
    dims = keys.integer("rotary_dim", 64)
    if dims % 2 or dims > width // heads:
        keys.fail("rotary_dim", dims, f"must be even and at most {width // heads}, the head's")
    return ModelConfig(
        vocab_size=keys.integer("vocab_size", 50400),
        max_len=keys.integer("n_positions", 2048),
        d_model=width,
        num_layers=keys.integer("n_layer", 28),
        num_heads=heads,
        d_ff=keys.integer("n_inner", None),
        positions=Rope(dims=None if dims * heads == width else dims, pairing="interleaved"),
        norm_order="parallel_shared",
        norm_eps=keys.positive("layer_norm_epsilon", 1e-5),
        activation=keys.choice("activation_function", ACTIVATIONS, "gelu_new"),
        qkv_bias=False,
        out_bias=False,
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        logit_bias=True,
        dropout=keys.rate("resid_pdrop", 0.0),
        attention_dropout=keys.rate("attn_pdrop", 0.0),
    )


def _write_gptj(config: ModelConfig) -> JsonObject:
    return dict(
        architectures=["GPTJForCausalLM"],
        vocab_size=config.vocab_size,
        n_positions=config.max_len,
        n_embd=config.d_model,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.d_ff,
        rotary_dim=rope_of(config).dims or config.key_dim,
        activation_function=activation_key(config.activation),
        layer_norm_epsilon=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.attention_dropout,
    )


# Phi 1, 1.5 and 2


def _phi_table(config: ModelConfig) -> list[TensorMapping]:
    block = "model.layers.{i}"
    return [
        TensorMapping("embed/tokens", "model.embed_tokens.weight"),
        *blocks(
            "decoder",
            config.num_layers,
            [
                *norm("norm", f"{block}.input_layernorm"),
                *attention_linears(f"{block}.self_attn", "dense", True, True),
                *linear("feed_forward/up", f"{block}.mlp.fc1"),
                *linear("feed_forward/down", f"{block}.mlp.fc2"),
            ],
        ),
        *norm("decoder/norm", "model.final_layernorm"),
        *output_matrix(config, "lm_head"),
    ]


def _read_phi(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    keys.rate("embd_pdrop", 0.0)  # read as resid_pdrop, as of GPT-2
    heads = keys.integer("num_attention_heads", 32)
    fields: Fields = dict(
        vocab_size=keys.integer("vocab_size", 51200),
        d_model=keys.integer("hidden_size", 2048),
        d_ff=keys.integer("intermediate_size", 8192),
        num_layers=keys.integer("num_hidden_layers", 24),
        num_heads=heads,
        num_kv_heads=keys.optional_integer("num_key_value_heads", None) or heads,
        head_dim=keys.integer("head_dim", None),
        max_len=keys.integer("max_position_embeddings", 2048),
        norm_order="parallel_shared",
        norm_eps=keys.positive("layer_norm_eps", 1e-5),
        activation=keys.choice("hidden_act", ACTIVATIONS, "gelu_new"),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        logit_bias=True,
        dropout=keys.rate("resid_pdrop", 0.0),
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )
    rope = read_rope(keys, fields, part=0.5)
    return ModelConfig(**fields, positions=rope)


def _write_phi(config: ModelConfig) -> JsonObject:
    keys: JsonObject = dict(
        write_sizes(config),
        architectures=["PhiForCausalLM"],
        layer_norm_eps=config.norm_eps,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        partial_rotary_factor=1.0,
    )
    return keys | write_rope(config)


# Cohere


def _cohere_table(config: ModelConfig) -> list[TensorMapping]:
    block, (qkv, out, _) = "model.layers.{i}", biases(config)
    attention = f"{block}.self_attn"
    norms = [TensorMapping("norm/scale", f"{block}.input_layernorm.weight")]
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
                *attention_linears(attention, "o_proj", qkv, out),
                *gated_linears(f"{block}.mlp", bias=False),
            ],
        ),
        TensorMapping("decoder/norm/scale", "model.norm.weight"),
        *output_matrix(config, "lm_head"),
    ]


def _read_cohere_common(keys: ConfigKeys) -> tuple[Fields, Rope]:
    scale = float(keys.positive("logit_scale", 0.0625))
    fields = read_common(keys, tied=True, eps=1e-5, norm_eps="layer_norm_eps") | dict(
        norm="layernorm",
        norm_order="parallel_shared",
        logit_scale=None if scale == 1 else scale,
    )
    if keys.flag("attention_bias", False):
        fields |= dict(qkv_bias=True, out_bias=True)
    if keys.take("rope_parameters", None) is None:
        keys.take("rope_theta")  # versions of transformers differ in what it is by default
    return fields, replace(read_rope(keys, fields), pairing="interleaved")


def _write_cohere_common(config: ModelConfig) -> JsonObject:
    return dict(
        write_sizes(config) | write_rope(config),
        layer_norm_eps=config.norm_eps,
        logit_scale=1.0 if config.logit_scale is None else config.logit_scale,
        attention_bias=biases(config)[0],
    )


def _read_cohere(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields, rope = _read_cohere_common(keys)
    if keys.flag("use_qk_norm", False):
        fields |= dict(qk_norm=True, qk_norm_kind="layernorm", qk_norm_over="own_head")
    return ModelConfig(**fields, positions=rope)


def _write_cohere(config: ModelConfig) -> JsonObject:
    keys = dict(_write_cohere_common(config), use_qk_norm=config.qk_norm)
    return dict(architectures=["CohereForCausalLM"], **keys)


def _read_cohere2(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields, rope = _read_cohere_common(keys)
    layers, every = fields["num_layers"], keys.integer("sliding_window_pattern", 4)
    types = layer_types(keys, layers) or [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]
    keys.ignore("_sliding_window_pattern")  # layer_types were made from it
    window = window_pattern(types, keys.integer("sliding_window", 4096))
    pattern = shortest([kind == "sliding_attention" for kind in types])
    if pattern == (False,):
        return ModelConfig(**fields, positions=None)
    turned = replace(rope, pattern=None if pattern == (True,) else pattern)
    return ModelConfig(**fields, positions=turned, window=window)


def _write_cohere2(config: ModelConfig) -> JsonObject:
    keys = _write_cohere_common(config) | write_windows(config)
    if keys["sliding_window"] is None:  # no layer has one, but the key must be a number
        keys["sliding_window"] = 4096
    return dict(architectures=["Cohere2ForCausalLM"], **keys)


GPT_NEOX = Family(
    "gpt_neox",
    _read_neox,
    _write_neox,
    _neox_table,
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
GPTJ = Family(
    "gptj",
    _read_gptj,
    _write_gptj,
    _gptj_table,
    rotates_parts=True,
    prefix="transformer.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    tied_copies={"lm_head.weight": "transformer.wte.weight"},
)
PHI = Family(
    "phi",
    _read_phi,
    _write_phi,
    _phi_table,
    rotates_parts=True,
    prefix="model.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
)
COHERE, COHERE2 = (
    Family(
        name,
        read,
        write,
        _cohere_table,
        prefix="model.",
        head_tensors=("lm_head.*",),
        tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
    )
    for name, read, write in (
        ("cohere", _read_cohere, _write_cohere),
        ("cohere2", _read_cohere2, _write_cohere2),
    )
)
