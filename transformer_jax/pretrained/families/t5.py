"""Map T5 (Raffel et al. 2020), its version 1.1, Flan-T5, mT5 (Xue et al. 2021), their encoders.

They have a bias that depends on the distance, RMSNorm, projections without biases, and scores that
are not scaled. Version 1.0 has relu and computes scaled logits with the embeddings; version 1.1 has
a gated gelu and an output matrix of its own. These keys and tensors say which one a folder holds:

| tie_word_embeddings | scale_decoder_outputs | lm_head.weight   | output matrix | logits          |
|---------------------|-----------------------|------------------|---------------|-----------------|
| true or absent      | absent                | absent or a copy | embeddings    | scaled          |
| false               | absent                | present          | its own       | not scaled      |
| true                | present               | absent           | embeddings    | as the key says |
| either              | present               | present          | its own       | as the key says |

The last two rows are what transformers 5 writes, which always sets tie_word_embeddings. Anything
else contradicts itself and is refused. Of an mT5 transformers 5 ignores tie_word_embeddings: an
lm_head.weight that the file has is the output matrix, else the embeddings are, and logits are never
scaled. Files without a decoder are the encoder alone. T5's dropout within the feed-forward is left
out.
"""

from __future__ import annotations

from functools import partial

from transformer_jax.config import Activation, ModelConfig, T5Buckets
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

HEAD = "lm_head.weight"

BUCKETS = 256
"""Largest number of buckets: each is a comparison in the program. Published models have 32."""

FEED_FORWARDS: dict[str, tuple[Activation, bool]] = {
    **{name: (activation, False) for name, activation in ACTIVATIONS.items()},
    **{f"gated-{name}": (activation, True) for name, activation in ACTIVATIONS.items()},
    "gated-gelu": ("gelu_tanh", True),
}
"""feed_forward_proj to the activation and whether there is a gate; "gated-gelu" means the
approximation of gelu by tanh."""

DEFAULTS: dict[str, Fields] = {
    "t5": dict(vocab_size=32128, layers=6, heads=8, d_ff=2048, forward="relu"),
    "mt5": dict(vocab_size=250112, layers=8, heads=6, d_ff=1024, forward="gated-gelu"),
}


def _table(config: ModelConfig) -> list[TensorMapping]:
    stacks = []
    sides = [("encoder", config.num_layers), ("decoder", config.decoder_layers)]
    for side, depth in sides[:1] if config.kind == "encoder" else sides:
        block = f"{side}.block.{{i}}.layer"
        last = 2 if side == "decoder" else 1
        mappings = [
            *_attention("attention", f"{block}.0.SelfAttention"),
            TensorMapping("norm_attention/scale", f"{block}.0.layer_norm.weight"),
        ]
        if side == "decoder":
            mappings += [
                *_attention("cross_attention", f"{block}.1.EncDecAttention"),
                TensorMapping("norm_cross_attention/scale", f"{block}.1.layer_norm.weight"),
            ]
        dense = f"{block}.{last}.DenseReluDense"
        up = f"{dense}.wi"
        if config.glu:
            mappings += linear("feed_forward/gate", f"{dense}.wi_0", bias=False)
            up = f"{dense}.wi_1"
        mappings += [
            *linear("feed_forward/up", up, bias=False),
            *linear("feed_forward/down", f"{dense}.wo", bias=False),
            TensorMapping("norm_feed_forward/scale", f"{block}.{last}.layer_norm.weight"),
        ]
        first = f"{side}.block.0.layer.0.SelfAttention"  # holds the bias of the whole stack
        stacks += [
            TensorMapping(f"{side}/relative_bias", f"{first}.relative_attention_bias.weight"),
            *blocks(side, depth, mappings),
            TensorMapping(f"{side}/norm/scale", f"{side}.final_layer_norm.weight"),
        ]
    return [
        TensorMapping("embed/tokens", "shared.weight"),
        *stacks,
        *([] if config.tie_embeddings else [TensorMapping("embed/output", HEAD)]),
    ]


def _attention(param: str, tensor: str) -> list[TensorMapping]:
    return [
        *linear(f"{param}/query", f"{tensor}.q", bias=False),
        *linear(f"{param}/key", f"{tensor}.k", bias=False),
        *linear(f"{param}/value", f"{tensor}.v", bias=False),
        *linear(f"{param}/out", f"{tensor}.o", LINEAR_OUT, bias=False),
    ]


def _read(keys: ConfigKeys, names: frozenset[str], kind: str) -> ModelConfig:
    default = DEFAULTS[kind]
    width, layers = keys.integer("d_model", 512), keys.integer("num_layers", default["layers"])
    fields: Fields
    if not any(name.startswith("decoder.") for name in names):
        keys.ignore("num_decoder_layers", "scale_decoder_outputs", "tie_word_embeddings")
        fields = dict(kind="encoder")
    else:
        keys.require("is_encoder_decoder", True)
        tied, scaled = _mt5_output(keys, names) if kind == "mt5" else _output(keys, names)
        fields = dict(
            kind="encoder-decoder",
            num_decoder_layers=keys.optional_integer("num_decoder_layers", None) or layers,
            tie_embeddings=tied,
            logit_scale=width**-0.5 if scaled else None,
        )
    activation, gated = _forward(keys, default["forward"])
    dropout = keys.rate("dropout_rate", 0.1)
    buckets = keys.integer("relative_attention_num_buckets", 32)
    if buckets > BUCKETS:
        keys.fail("relative_attention_num_buckets", buckets, f"must be at most {BUCKETS}")
    if buckets % 2 or buckets < 4:
        keys.fail("relative_attention_num_buckets", buckets, "must be even and at least 4")
    farthest = keys.integer("relative_attention_max_distance", 128)
    if farthest <= buckets // 2:
        rule = f"must be above relative_attention_num_buckets / 2 = {buckets // 2}"
        keys.fail("relative_attention_max_distance", farthest, rule)
    return ModelConfig(
        **fields,
        vocab_size=keys.integer("vocab_size", default["vocab_size"]),
        d_model=width,
        num_layers=layers,
        num_heads=keys.integer("num_heads", default["heads"]),
        head_dim=keys.integer("d_kv", 64),
        d_ff=keys.integer("d_ff", default["d_ff"]),
        max_len=keys.integer("n_positions", 512),
        positions=T5Buckets(buckets=buckets, max_distance=farthest),
        norm="rmsnorm",
        norm_eps=keys.positive("layer_norm_epsilon", 1e-6),
        activation=activation,
        glu=gated,
        use_bias=False,
        attention_scale=1.0,
        dropout=dropout,
        attention_dropout=dropout,
    )


def _output(keys: ConfigKeys, names: frozenset[str]) -> tuple[bool, bool]:
    """Return whether the output matrix is the embeddings, and whether logits are scaled."""
    tied = keys.flag("tie_word_embeddings", True)
    if keys.take("scale_decoder_outputs", None) is None:
        return tied, tied
    return tied and HEAD not in names, keys.flag("scale_decoder_outputs")


def _mt5_output(keys: ConfigKeys, names: frozenset[str]) -> tuple[bool, bool]:
    keys.flag("tie_word_embeddings", True)  # published ones say false, and mean what the files hold
    return HEAD not in names, False


def _forward(keys: ConfigKeys, default: str) -> tuple[Activation, bool]:
    """Return the activation and whether there is a gate; keys that repeat them must agree."""
    name = keys.take("feed_forward_proj", default)
    activation, gated = keys.choice("feed_forward_proj", FEED_FORWARDS, default)
    again = keys.take("dense_act_fn", None)
    if again is not None and keys.choice("dense_act_fn", ACTIVATIONS) != activation:
        keys.fail("dense_act_fn", again, f"feed_forward_proj is {name!r}, which is {activation!r}")
    if keys.take("is_gated_act", gated) is not gated:
        keys.fail("is_gated_act", not gated, f"feed_forward_proj is {name!r}")
    return activation, gated


def _write(config: ModelConfig, kind: str) -> JsonObject:
    dense = activation_key(config.activation)
    positions = config.positions if isinstance(config.positions, T5Buckets) else T5Buckets()
    plain = "gelu" if config.activation == "gelu_tanh" else dense
    model, alone = kind.replace("t5", "T5").replace("m", "M"), config.kind == "encoder"
    keys: JsonObject = dict(
        architectures=[f"{model}EncoderModel" if alone else f"{model}ForConditionalGeneration"],
        is_encoder_decoder=not alone,
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        d_kv=config.key_dim,
        d_ff=config.ff_dim,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        n_positions=config.max_len,
        relative_attention_num_buckets=positions.buckets,
        relative_attention_max_distance=positions.max_distance,
        layer_norm_epsilon=config.norm_eps,
        feed_forward_proj=f"gated-{plain}" if config.glu else dense,
        dense_act_fn=dense,
        is_gated_act=config.glu,
        dropout_rate=config.dropout,
    )
    if not alone:
        keys |= dict(
            num_decoder_layers=config.decoder_layers, tie_word_embeddings=config.tie_embeddings
        )
    if not alone and kind == "t5":
        keys |= dict(scale_decoder_outputs=config.logit_scale is not None)
    return keys


def _family(kind: str) -> Family:
    return Family(
        kind,
        partial(_read, kind=kind),
        partial(_write, kind=kind),
        _table,
        ignored_tensors=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        tied_copies={
            "decoder.embed_tokens.weight": "shared.weight",
            "encoder.embed_tokens.weight": "shared.weight",
            HEAD: "shared.weight",
        },
    )


T5 = _family("t5")
MT5 = _family("mt5")
