"""Decoders with LayerNorm, whose norms have biases even if their matrices have none.

These are StarCoder 2 (Lozhkov et al. 2024), StableLM (Bellagente et al. 2024), OPT (Zhang et al.
2022), BLOOM (Workshop et al. 2022) and Falcon (Almazrouei et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable

from transformer_jax.config import Alibi, Learned, ModelConfig
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.pretrained.families.decoder_keys import (
    OWN_HEAD_NORMS,
    WINDOW,
    rope,
)

NO_BIAS: k.Fields = dict(qkv_bias=False, out_bias=False, ff_bias=False)
"""Fields of a model whose only biases are those of norms."""
NORMS = {
    "norm": "input_layernorm", "norm_attention": "input_layernorm",
    "norm_feed_forward": "post_attention_layernorm",
}  # fmt: skip
"""Names of the norms in a block, which has one norm that its branches share, or two norms."""


def _llama_names(names: dict[str, str]) -> Callable[[ModelConfig], list[t.TensorMapping]]:
    names = NORMS | t.attention_names("self_attn", "o_proj") | names
    return t.named_decoder("model.embed_tokens", "model.layers.{i}", names, "model.norm")


def _sizes(kv_heads: int) -> list[k.Entry]:
    return [
        *k.standard_sizes(),
        k.Key("num_key_value_heads", "num_kv_heads", k.integer, kv_heads),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
    ]


# StarCoder 2


STARCODER2 = t.Family(
    "starcoder2",
    [
        *_sizes(2),
        k.Key("norm_epsilon", "norm_eps", k.positive, 1e-5),
        k.Key(
            "hidden_act",
            "activation",
            k.activation(gelu_tanh="gelu_pytorch_tanh"),  # the name in published files
            "gelu_pytorch_tanh",
        ),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, True),
        k.Key("embedding_dropout", "dropout", k.rate, 0.0),
        k.Key("residual_dropout", "dropout", k.rate, 0.0),  # takes precedence, as in GPT-2
        WINDOW,
        k.Flag("use_bias", True, on={}, off=NO_BIAS),
        rope(),
    ],
    _llama_names({"feed_forward/up": "mlp.c_fc", "feed_forward/down": "mlp.c_proj"}),
    "Starcoder2ForCausalLM",
    prefix="model.",
    head_tensors=("lm_head.*",),
    tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
)


# StableLM


def _stablelm_table(config: ModelConfig) -> list[t.TensorMapping]:
    found = _llama_names(t.gated_names("mlp"))(config)
    heads = [("query", "q", config.num_heads), ("key", "k", config.kv_heads)]
    return found + [  # one norm per head, each a separate tensor
        t.TensorMapping(
            f"decoder/block_{i}/attention/{param}_scale/{n}",
            f"model.layers.{i}.self_attn.{name}_layernorm.norms.{n}.weight",
        )
        for i in range(config.num_layers * config.qk_norm)
        for param, name, count in heads
        for n in range(count)
    ]


STABLELM = t.Family(
    "stablelm",
    [
        *_sizes(32),
        k.Key("use_parallel_residual", "norm_order", k.either("parallel_shared", "pre"), False),
        k.Key("layer_norm_eps", "norm_eps", k.positive, 1e-5),
        k.Key("hidden_act", "activation", k.activation(), "silu"),
        k.Fixed(glu=True, **NO_BIAS),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, False),
        k.Key("hidden_dropout", "dropout", k.rate, 0.0),
        k.Key("use_qkv_bias", "qkv_bias", k.flag, False),
        k.Flag("qk_layernorm", False, on=OWN_HEAD_NORMS, off={}),
        k.FixedKeys(partial_rotary_factor=1.0),  # the default is 0.25
        rope(part=0.25),
    ],
    _stablelm_table,
    "StableLmForCausalLM",
    rotates_parts=True,
    prefix="model.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
)


# OPT


def _opt_table(config: ModelConfig) -> list[t.TensorMapping]:
    stack = "model.decoder"
    names = {
        "norm_attention": "self_attn_layer_norm", "norm_feed_forward": "final_layer_norm",
        **t.attention_names("self_attn", "out_proj"),
        "feed_forward/up": "fc1", "feed_forward/down": "fc2",
    }  # fmt: skip
    # The only post-norm model, with 350M parameters, has no norm after its last block.
    last = f"{stack}.final_layer_norm" if config.norm_order == "pre" else None
    positions = [t.TensorMapping("embed/positions", f"{stack}.embed_positions.weight")]
    tokens, block = f"{stack}.embed_tokens", f"{stack}.layers.{{i}}"
    return t.named_decoder(tokens, block, names, last, more=positions)(config)


OPT = t.Family(
    "opt",
    [
        k.Key("vocab_size", "vocab_size", k.integer, 50272),
        k.Key("max_position_embeddings", "max_len", k.integer, 2048),
        k.Key("hidden_size", "d_model", k.integer, 768),
        # The model with 350M parameters has narrower embeddings and projects them, which is not
        # supported.
        k.same("word_embed_proj_dim", "d_model", "hidden_size"),
        k.Key("ffn_dim", "d_ff", k.integer, 3072),
        k.Key("num_hidden_layers", "num_layers", k.integer, 12),
        k.Key("num_attention_heads", "num_heads", k.integer, 12),
        k.Fixed(positions=Learned(offset=2)),
        k.Key("do_layer_norm_before", "norm_order", k.either("pre", "post"), True),
        k.Key("activation_function", "activation", k.activation(), "relu"),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, True),
        k.Key("dropout", "dropout", k.rate, 0.1),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
        k.Flag("enable_bias", True, on={}, off=NO_BIAS),
    ],
    _opt_table,
    "OPTForCausalLM",
    prefix="model.",
    head_tensors=("lm_head.*",),
    tied_copies={"lm_head.weight": "model.decoder.embed_tokens.weight"},
)


# BLOOM


_FUSED = NORMS | {
    "attention/qkv": "self_attention.query_key_value", "attention/out": "self_attention.dense",
    "feed_forward/up": "mlp.dense_h_to_4h", "feed_forward/down": "mlp.dense_4h_to_h",
}  # fmt: skip
_TWO = {"norm_attention": "ln_attn", "norm_feed_forward": "ln_mlp"}
_AROUND = "transformer.word_embeddings", "transformer.h.{i}"


def _width(default: int) -> k.Code:
    """List the key of the width. `n_embed` takes precedence over `hidden_size`."""

    def read(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
        width = keys.integer("n_embed", None) or keys.integer("hidden_size", default)
        keys.ignore("hidden_size")
        return dict(d_model=width)

    return k.Code(read, lambda config: dict(hidden_size=config.d_model))


BLOOM = t.Family(
    "bloom",
    [
        k.Key("vocab_size", "vocab_size", k.integer, 250880),
        k.Key("seq_length", "max_len", k.integer, 2048),
        _width(64),
        k.Key("n_layer", "num_layers", k.integer, 2),
        k.Key("n_head", "num_heads", k.integer, 8),
        k.Fixed(positions=Alibi(), embedding_norm=True, activation="gelu_tanh"),
        k.Key("layer_norm_epsilon", "norm_eps", k.positive, 1e-5),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, True),
        k.Key("hidden_dropout", "dropout", k.rate, 0.0),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
    ],
    t.named_decoder(
        *_AROUND,
        _FUSED,
        "transformer.ln_f",
        more=t.norm("embed/norm", "transformer.word_embeddings_layernorm"),
    ),
    "BloomForCausalLM",
    prefix="transformer.",
    head_tensors=("lm_head.*",),
    tied_copies={"lm_head.weight": "transformer.word_embeddings.weight"},
)


# Falcon


def _read_falcon(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Read how query heads share keys, and which norms the branches have."""
    heads = fields["num_heads"]
    grouped, multi_query = (
        keys.flag("new_decoder_architecture", False),
        keys.flag("multi_query", True),
    )
    parallel = keys.flag("parallel_attn", True)
    kv_heads = keys.optional_integer("num_kv_heads", None) or heads
    number = keys.optional_integer("num_ln_in_parallel_attn", None) or (2 if grouped else 1)
    if grouped and not parallel:
        keys.fail("parallel_attn", parallel, "must be true with new_decoder_architecture")
    if number > 2 or (number == 2 and not grouped):
        rule = "must be 1, or 2 with new_decoder_architecture"
        keys.fail("num_ln_in_parallel_attn", number, rule)
    # The older architecture has either one key head or as many as query heads.
    if not grouped:
        kv_heads = 1 if multi_query else heads
    orders = {(True, 2): "parallel", (True, 1): "parallel_shared"}
    return dict(num_kv_heads=kv_heads, norm_order=orders.get((parallel, number), "pre"))


FALCON = t.Family(
    "falcon",
    [
        k.Key("vocab_size", "vocab_size", k.integer, 65024),
        _width(4544),
        k.Key("ffn_hidden_size", "d_ff", k.optional_integer, None),
        k.Key("num_hidden_layers", "num_layers", k.integer, 32),
        k.Key("num_attention_heads", "num_heads", k.integer, 71),
        k.Key("max_position_embeddings", "max_len", k.integer, 2048),
        k.Code(
            _read_falcon,
            lambda config: dict(
                num_kv_heads=config.kv_heads,
                new_decoder_architecture=config.norm_order == "parallel"
                or config.kv_heads not in (1, config.num_heads),
                num_ln_in_parallel_attn=2 if config.norm_order == "parallel" else 1,
                multi_query=config.kv_heads == 1,
                parallel_attn=config.is_parallel,
            ),
        ),
        k.Key("layer_norm_epsilon", "norm_eps", k.positive, 1e-5),
        k.Key("activation", "activation", k.activation(), "gelu"),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, True),
        k.Key("hidden_dropout", "dropout", k.rate, 0.0),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
        k.Flag("bias", False, on={}, off=NO_BIAS),
        k.FixedKeys(alibi=False),
        rope(),
    ],
    lambda config: t.named_decoder(
        *_AROUND, _FUSED | (_TWO if config.norm_order == "parallel" else {}), "transformer.ln_f"
    )(config),
    "FalconForCausalLM",
    prefix="transformer.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("transformer.h.*.self_attention.rotary_emb.inv_freq",),
    tied_copies={"lm_head.weight": "transformer.word_embeddings.weight"},
)
