"""Map GPT-2 (Radford et al. 2019).

It has learned positions, norms before the branches, and one matrix for query, key and value.
"""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.pretrained.families.table import (
    ACTIVATIONS,
    ConfigKeys,
    Family,
    Layout,
    TensorMapping,
    activation_key,
    blocks,
    norm,
    output_matrix,
)
from transformer_jax.untrusted_files import JsonObject


def _conv(
    param: str, tensor: str, inputs: int = 1, part: int = 0, parts: int = 1
) -> list[TensorMapping]:
    return [
        TensorMapping(f"{param}/kernel", f"{tensor}.weight", Layout("conv", inputs, part, parts)),
        TensorMapping(f"{param}/bias", f"{tensor}.bias", Layout("flat", part=part, parts=parts)),
    ]


def _table(config: ModelConfig) -> list[TensorMapping]:
    block = "transformer.h.{i}"
    return [
        TensorMapping("embed/tokens", "transformer.wte.weight"),
        TensorMapping("embed/positions", "transformer.wpe.weight"),
        *blocks(
            "decoder",
            config.num_layers,
            [
                *norm("norm_attention", f"{block}.ln_1"),
                *_conv("attention/query", f"{block}.attn.c_attn", part=0, parts=3),
                *_conv("attention/key", f"{block}.attn.c_attn", part=1, parts=3),
                *_conv("attention/value", f"{block}.attn.c_attn", part=2, parts=3),
                *_conv("attention/out", f"{block}.attn.c_proj", inputs=2),
                *norm("norm_feed_forward", f"{block}.ln_2"),
                *_conv("feed_forward/up", f"{block}.mlp.c_fc"),
                *_conv("feed_forward/down", f"{block}.mlp.c_proj"),
            ],
        ),
        *norm("decoder/norm", "transformer.ln_f"),
        *output_matrix(config, "lm_head"),
    ]


def _read(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    keys.rate("embd_pdrop", 0.1)  # read as resid_pdrop: a ModelConfig has one rate for both
    return ModelConfig(
        vocab_size=keys.integer("vocab_size", 50257),
        max_len=keys.integer("n_positions", 1024),
        d_model=keys.integer("n_embd", 768),
        num_layers=keys.integer("n_layer", 12),
        num_heads=keys.integer("n_head", 12),
        d_ff=keys.integer("n_inner", None),
        activation=keys.choice("activation_function", ACTIVATIONS, "gelu_new"),
        norm_eps=keys.positive("layer_norm_epsilon", 1e-5),
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        dropout=keys.rate("resid_pdrop", 0.1),
        attention_dropout=keys.rate("attn_pdrop", 0.1),
    )


def _write(config: ModelConfig) -> JsonObject:
    return dict(
        architectures=["GPT2LMHeadModel"],
        vocab_size=config.vocab_size,
        n_positions=config.max_len,
        n_embd=config.d_model,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.d_ff,
        activation_function=activation_key(config.activation),
        layer_norm_epsilon=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.attention_dropout,
    )


GPT2 = Family(
    "gpt2",
    _read,
    _write,
    _table,
    prefix="transformer.",
    ignored_tensors=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    tied_copies={"lm_head.weight": "transformer.wte.weight"},
    head_tensors=("lm_head.*",),
)
