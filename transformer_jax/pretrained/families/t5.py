"""T5 (Raffel et al. 2020), its version 1.1 and Flan-T5: a bias of the distance, RMSNorm, no biases
in projections, scores that are not scaled.

Version 1.0 has relu, and reads scaled logits from the embeddings; 1.1 has a gated gelu and an
output matrix of its own. Which of them a folder is, is said by

| tie_word_embeddings | scale_decoder_outputs | lm_head.weight | output matrix | logits |
|---------------------|-----------------------|----------------|---------------|--------|
| true, or absent     | absent                | none, a copy   | embeddings    | scaled |
| false               | absent                | there          | its own       | as are |
| true                | given                 | none           | embeddings    | as given |
| either              | given                 | there          | its own       | as given |

The last two are what transformers 5 writes, which always says that they are tied. Anything else
contradicts itself and is refused. Dropout within the feed-forward, which T5 has too, is left out.
"""

from __future__ import annotations

from typing import Any

from transformer_jax.config import Activation, ModelConfig
from transformer_jax.families.table import (
    ACTIVATIONS,
    LINEAR_OUT,
    WRITTEN,
    Family,
    Keys,
    Line,
    blocks,
    linear,
)

HEAD = "lm_head.weight"

BUCKETS = 256
"""Most buckets of distances, of which each is a comparison in the program; published are 32."""

FORWARDS: dict[str, tuple[Activation, bool]] = {
    **{name: (activation, False) for name, activation in ACTIVATIONS.items()},
    **{f"gated-{name}": (activation, True) for name, activation in ACTIVATIONS.items()},
    "gated-gelu": ("gelu_tanh", True),
}
"""feed_forward_proj: the activation, and whether there is a gate. Of gelu alone, a gate means the
approximation by tanh."""


def _table(config: ModelConfig) -> list[Line]:
    stacks = []
    for side, depth in (("encoder", config.num_layers), ("decoder", config.decoder_layers)):
        block = f"{side}.block.{{i}}.layer"
        last = 2 if side == "decoder" else 1
        lines = [
            *_attention("attention", f"{block}.0.SelfAttention"),
            Line("norm_attention/scale", f"{block}.0.layer_norm.weight"),
        ]
        if side == "decoder":
            lines += [
                *_attention("cross_attention", f"{block}.1.EncDecAttention"),
                Line("norm_cross_attention/scale", f"{block}.1.layer_norm.weight"),
            ]
        dense = f"{block}.{last}.DenseReluDense"
        up = f"{dense}.wi"
        if config.glu:
            lines += linear("feed_forward/gate", f"{dense}.wi_0", bias=False)
            up = f"{dense}.wi_1"
        lines += [
            *linear("feed_forward/up", up, bias=False),
            *linear("feed_forward/down", f"{dense}.wo", bias=False),
            Line("norm_feed_forward/scale", f"{block}.{last}.layer_norm.weight"),
        ]
        first = f"{side}.block.0.layer.0.SelfAttention"  # holds the bias of the whole stack
        stacks += [
            Line(f"{side}/relative_bias", f"{first}.relative_attention_bias.weight"),
            *blocks(side, depth, lines),
            Line(f"{side}/norm/scale", f"{side}.final_layer_norm.weight"),
        ]
    return [
        Line("embed/tokens", "shared.weight"),
        *stacks,
        *([] if config.tie_embeddings else [Line("embed/output", HEAD)]),
    ]


def _attention(ours: str, theirs: str) -> list[Line]:
    return [
        *linear(f"{ours}/query", f"{theirs}.q", bias=False),
        *linear(f"{ours}/key", f"{theirs}.k", bias=False),
        *linear(f"{ours}/value", f"{theirs}.v", bias=False),
        *linear(f"{ours}/out", f"{theirs}.o", LINEAR_OUT, bias=False),
    ]


def _read(keys: Keys, names: frozenset[str]) -> ModelConfig:
    keys.only("is_encoder_decoder", True)
    if not any(name.startswith("decoder.") for name in names):
        given = keys.take("architectures", None)
        keys.fail("architectures", given, "there is no decoder, and an encoder alone is no t5 here")
    keys.unread("classifier_dropout", "initializer_factor")
    width, layers = keys.integer("d_model", 512), keys.integer("num_layers", 6)
    tied, scaled = _output(keys, names)
    activation, gated = _forward(keys)
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
        kind="encoder-decoder",
        vocab_size=keys.integer("vocab_size", 32128),
        d_model=width,
        num_layers=layers,
        num_decoder_layers=keys.optional("num_decoder_layers", None) or layers,
        num_heads=keys.integer("num_heads", 8),
        head_dim=keys.integer("d_kv", 64),
        d_ff=keys.integer("d_ff", 2048),
        max_len=keys.integer("n_positions", 512),
        positions="t5",
        relative_buckets=buckets,
        relative_max_distance=farthest,
        norm="rmsnorm",
        norm_eps=keys.positive("layer_norm_epsilon", 1e-6),
        activation=activation,
        glu=gated,
        use_bias=False,
        attention_scale=1.0,
        tie_embeddings=tied,
        logit_scale=width**-0.5 if scaled else None,
        dropout=dropout,
        attention_dropout=dropout,
    )


def _output(keys: Keys, names: frozenset[str]) -> tuple[bool, bool]:
    """Whether logits are read from the embeddings, and whether they are scaled."""
    tied = keys.flag("tie_word_embeddings", True)
    if keys.take("scale_decoder_outputs", None) is None:
        return tied, tied
    return tied and HEAD not in names, keys.flag("scale_decoder_outputs")


def _forward(keys: Keys) -> tuple[Activation, bool]:
    """The activation and the gate; what is said of them a second time must agree."""
    name = keys.take("feed_forward_proj", "relu")
    activation, gated = keys.text("feed_forward_proj", FORWARDS, "relu")
    again = keys.take("dense_act_fn", None)
    if again is not None and keys.text("dense_act_fn", ACTIVATIONS) != activation:
        keys.fail("dense_act_fn", again, f"feed_forward_proj is {name!r}, which is {activation!r}")
    if keys.take("is_gated_act", gated) is not gated:
        keys.fail("is_gated_act", not gated, f"feed_forward_proj is {name!r}")
    return activation, gated


def _write(config: ModelConfig) -> dict[str, Any]:
    dense = WRITTEN[config.activation]
    plain = "gelu" if config.activation == "gelu_tanh" else dense
    return dict(
        architectures=["T5ForConditionalGeneration"],
        is_encoder_decoder=True,
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        d_kv=config.key_dim,
        d_ff=config.ff_dim,
        num_layers=config.num_layers,
        num_decoder_layers=config.decoder_layers,
        num_heads=config.num_heads,
        n_positions=config.max_len,
        relative_attention_num_buckets=config.relative_buckets,
        relative_attention_max_distance=config.relative_max_distance,
        layer_norm_epsilon=config.norm_eps,
        feed_forward_proj=f"gated-{plain}" if config.glu else dense,
        dense_act_fn=dense,
        is_gated_act=config.glu,
        tie_word_embeddings=config.tie_embeddings,
        scale_decoder_outputs=config.logit_scale is not None,
        dropout_rate=config.dropout,
    )


T5 = Family(
    "t5",
    _read,
    _write,
    _table,
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    copies={
        "decoder.embed_tokens.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        HEAD: "shared.weight",
    },
)
