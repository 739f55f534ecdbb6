"""T5 (Raffel et al. 2020), T5 1.1, Flan-T5, mT5 (Xue et al. 2021) and their encoders.

These models have a bias that depends on the distance, RMSNorm, projections without biases and
unscaled attention scores. Version 1.0 uses relu and computes scaled logits with the embeddings.
Version 1.1 uses a gated gelu and a separate output matrix. Keys and tensors determine the version
of a folder:

| tie_word_embeddings | scale_decoder_outputs | lm_head.weight   | output matrix | logits          |
|---------------------|-----------------------|------------------|---------------|-----------------|
| true or absent      | absent                | absent or a copy | embeddings    | scaled          |
| false               | absent                | present          | separate      | not scaled      |
| true                | present               | absent           | embeddings    | set by the key  |
| either              | present               | present          | separate      | set by the key  |

transformers 5 writes the last two rows, because it always sets tie_word_embeddings. Any other
combination is contradictory and is rejected. For mT5, transformers 5 ignores tie_word_embeddings.
The output matrix is then lm_head.weight if the file contains it, and otherwise the embedding
matrix. The logits of mT5 are never scaled. Files without a decoder contain only the encoder. T5's
dropout within the feed-forward network is not supported.
"""

from __future__ import annotations

from functools import partial

from transformer_jax.config import Activation, ModelConfig, T5Buckets
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.untrusted_files import JsonObject

HEAD = "lm_head.weight"

BUCKETS = 256
"""Maximum number of buckets. Each bucket adds a comparison. Published models have 32 buckets."""

FEED_FORWARDS: dict[str, tuple[Activation, bool]] = {
    **{name: (activation, False) for name, activation in k.ACTIVATIONS.items()},
    **{f"gated-{name}": (activation, True) for name, activation in k.ACTIVATIONS.items()},
    "gated-gelu": ("gelu_tanh", True),
}
"""Activation and gate for each feed_forward_proj. "gated-gelu" is the tanh approximation."""


def _table(config: ModelConfig) -> list[t.TensorMapping]:
    found = [t.TensorMapping("embed/tokens", "shared.weight")]
    sides = [("encoder", config.num_layers), ("decoder", config.decoder_layers)]
    for side, depth in sides[:1] if config.kind == "encoder" else sides:
        names = t.attention_names("0.SelfAttention", "o", "q k v") | {
            "norm_attention": "0.layer_norm"
        }
        if side == "decoder":
            cross = t.attention_names("1.EncDecAttention", "o", "q k v")
            names |= {f"cross_{param}": name for param, name in cross.items()}
            names["norm_cross_attention"] = "1.layer_norm"
        last = 2 if side == "decoder" else 1
        dense = f"{last}.DenseReluDense"
        if config.glu:
            names["feed_forward/gate"] = f"{dense}.wi_0"
        # wi_0 is the gate, and wi_1 is the matrix whose output it multiplies.
        names["feed_forward/up"] = f"{dense}.wi_1" if config.glu else f"{dense}.wi"
        names["feed_forward/down"] = f"{dense}.wo"
        names["norm_feed_forward"] = f"{last}.layer_norm"
        first = f"{side}.block.0.layer.0.SelfAttention"  # contains the bias of the whole stack
        found += [
            t.TensorMapping(f"{side}/relative_bias", f"{first}.relative_attention_bias.weight"),
            *t.blocks(side, depth, t.named(config, f"{side}.block.{{i}}.layer", names)),
            t.TensorMapping(f"{side}/norm/scale", f"{side}.final_layer_norm.weight"),
        ]
    return found if config.tie_embeddings else [*found, t.TensorMapping("embed/output", HEAD)]


def _read_sides(keys: k.ConfigKeys, fields: k.Fields, kind: str) -> k.Fields:
    if not any(name.startswith("decoder.") for name in keys.names):
        keys.ignore("num_decoder_layers", "scale_decoder_outputs", "tie_word_embeddings")
        return dict(kind="encoder")
    keys.require("is_encoder_decoder", True)
    tied = scaled = keys.flag("tie_word_embeddings", True)
    if kind == "mt5":  # published files set false; lm_head.weight decides
        tied, scaled = HEAD not in keys.names, False
    elif keys.take("scale_decoder_outputs", None) is not None:  # only transformers 5 writes it
        scaled = keys.flag("scale_decoder_outputs")
        tied = tied and HEAD not in keys.names
    return dict(
        kind="encoder-decoder",
        num_decoder_layers=keys.optional_integer("num_decoder_layers", None)
        or fields["num_layers"],
        tie_embeddings=tied,
        # A tied output matrix has the scale of embeddings, so T5 scales the output of the decoder.
        logit_scale=fields["d_model"] ** -0.5 if scaled else None,
    )


def _write_sides(config: ModelConfig, kind: str) -> JsonObject:
    if config.kind == "encoder":
        return dict(is_encoder_decoder=False)
    keys: JsonObject = dict(
        is_encoder_decoder=True,
        num_decoder_layers=config.decoder_layers,
        tie_word_embeddings=config.tie_embeddings,
    )
    if kind == "t5":
        keys["scale_decoder_outputs"] = config.logit_scale is not None
    return keys


def _read_forward(keys: k.ConfigKeys, fields: k.Fields, default: str) -> k.Fields:
    """Read the activation and the gate. Keys that repeat them must agree."""
    name = keys.take("feed_forward_proj", default)
    activation, gated = keys.choice("feed_forward_proj", FEED_FORWARDS, default)
    repeated = keys.take("dense_act_fn", None)
    if repeated is not None and keys.choice("dense_act_fn", k.ACTIVATIONS) != activation:
        keys.fail(
            "dense_act_fn", repeated, f"must match feed_forward_proj, {name!r} ({activation!r})"
        )
    if keys.take("is_gated_act", gated) is not gated:
        keys.fail("is_gated_act", not gated, f"must match feed_forward_proj, {name!r}")
    return dict(activation=activation, glu=gated)


def _write_forward(config: ModelConfig) -> JsonObject:
    dense = k.activation().write(config.activation)
    plain = "gelu" if config.activation == "gelu_tanh" else dense
    return dict(
        feed_forward_proj=f"gated-{plain}" if config.glu else dense,
        dense_act_fn=dense,
        is_gated_act=config.glu,
    )


def _read_distances(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    buckets = keys.integer("relative_attention_num_buckets", 32)
    if buckets > BUCKETS:
        keys.fail("relative_attention_num_buckets", buckets, f"must be at most {BUCKETS}")
    if buckets % 2 or buckets < 4:
        keys.fail("relative_attention_num_buckets", buckets, "must be even and at least 4")
    farthest = keys.integer("relative_attention_max_distance", 128)
    if farthest <= buckets // 2:
        rule = f"must exceed relative_attention_num_buckets / 2 = {buckets // 2}"
        keys.fail("relative_attention_max_distance", farthest, rule)
    return dict(positions=T5Buckets(buckets=buckets, max_distance=farthest))


def _write_distances(config: ModelConfig) -> JsonObject:
    positions = config.positions if isinstance(config.positions, T5Buckets) else T5Buckets()
    return dict(
        relative_attention_num_buckets=positions.buckets,
        relative_attention_max_distance=positions.max_distance,
    )


def _keys(
    kind: str, vocab_size: int, layers: int, heads: int, d_ff: int, forward: str
) -> list[k.Entry]:
    """List the keys. The arguments after `kind` are default values."""
    return [
        k.Key("vocab_size", "vocab_size", k.integer, vocab_size),
        k.Key("d_model", "d_model", k.integer, 512),
        k.Key("d_kv", "head_dim", k.integer, 64),
        k.Key("d_ff", "d_ff", k.integer, d_ff),
        k.Key("num_layers", "num_layers", k.integer, layers),
        k.Key("num_heads", "num_heads", k.integer, heads),
        k.Key("n_positions", "max_len", k.integer, 512),
        k.Key("layer_norm_epsilon", "norm_eps", k.positive, 1e-6),
        # T5 has one rate for the residual stream and the attention weights.
        k.Key("dropout_rate", "attention_dropout", k.rate, 0.1),
        k.Key("dropout_rate", "dropout", k.rate, 0.1),
        # T5 does not divide scores by the square root of the head width; its initial queries are
        # smaller.
        k.Fixed(norm="rmsnorm", use_bias=False, attention_scale=1.0),
        k.Code(partial(_read_sides, kind=kind), partial(_write_sides, kind=kind)),
        k.Code(partial(_read_forward, default=forward), _write_forward),
        k.Code(_read_distances, _write_distances),
    ]


def _architecture(config: ModelConfig, name: str) -> str:
    return f"{name}{'EncoderModel' if config.kind == 'encoder' else 'ForConditionalGeneration'}"


_family = partial(
    t.Family,
    table=_table,
    ignored_tensors=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    tied_copies={
        "decoder.embed_tokens.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        HEAD: "shared.weight",
    },
)
T5 = _family(
    "t5",
    _keys("t5", 32128, 6, 8, 2048, "relu"),
    architecture=partial(_architecture, name="T5"),
)
MT5 = _family(
    "mt5",
    _keys("mt5", 250112, 8, 6, 1024, "gated-gelu"),
    architecture=partial(_architecture, name="MT5"),
)
