"""GPT-2 (Radford et al. 2019).

GPT-2 has learned positions, pre-norm blocks and one matrix for query, key and value.
"""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t


def _conv(
    param: str, tensor: str, inputs: int = 1, part: int = 0, parts: int = 1
) -> list[t.TensorMapping]:
    return [
        t.TensorMapping(
            f"{param}/kernel", f"{tensor}.weight", t.Layout("conv", inputs, part, parts)
        ),
        t.TensorMapping(
            f"{param}/bias", f"{tensor}.bias", t.Layout("flat", part=part, parts=parts)
        ),
    ]


def _table(config: ModelConfig) -> list[t.TensorMapping]:
    block = "transformer.h.{i}"
    mappings = [
        *t.norm("norm_attention", f"{block}.ln_1"),
        *_conv("attention/query", f"{block}.attn.c_attn", part=0, parts=3),
        *_conv("attention/key", f"{block}.attn.c_attn", part=1, parts=3),
        *_conv("attention/value", f"{block}.attn.c_attn", part=2, parts=3),
        *_conv("attention/out", f"{block}.attn.c_proj", inputs=2),
        *t.norm("norm_feed_forward", f"{block}.ln_2"),
        *_conv("feed_forward/up", f"{block}.mlp.c_fc"),
        *_conv("feed_forward/down", f"{block}.mlp.c_proj"),
    ]
    positions = [t.TensorMapping("embed/positions", "transformer.wpe.weight")]
    return t.decoder(config, "transformer.wte", mappings, "transformer.ln_f", more=positions)


GPT2 = t.Family(
    "gpt2",
    [
        k.Key("vocab_size", "vocab_size", k.integer, 50257),
        k.Key("n_positions", "max_len", k.integer, 1024),
        k.Key("n_embd", "d_model", k.integer, 768),
        k.Key("n_layer", "num_layers", k.integer, 12),
        k.Key("n_head", "num_heads", k.integer, 12),
        k.Key("n_inner", "d_ff", k.integer, None),
        k.Key("activation_function", "activation", k.activation(), "gelu_new"),
        k.Key("layer_norm_epsilon", "norm_eps", k.positive, 1e-5),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, True),
        # a ModelConfig has one rate for both, so resid_pdrop takes precedence, because it is read
        # last
        k.Key("embd_pdrop", "dropout", k.rate, 0.1),
        k.Key("resid_pdrop", "dropout", k.rate, 0.1),
        k.Key("attn_pdrop", "attention_dropout", k.rate, 0.1),
    ],
    _table,
    "GPT2LMHeadModel",
    prefix="transformer.",
    ignored_tensors=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    tied_copies={"lm_head.weight": "transformer.wte.weight"},
    head_tensors=("lm_head.*",),
)
