"""BART (Lewis et al. 2020), mBART, M2M-100, NLLB, Pegasus and Marian.

Logits have a bias, except in M2M-100. In sinusoidal positions, the sines come first. LayerDrop and
dropout within the feed-forward network are not supported.

| family                                | norms            | positions | norm of the embeddings |
|---------------------------------------|------------------|-----------|------------------------|
| BART                                  | after branches   | learned   | on each side           |
| mBART (Liu et al. 2020)               | before branches, | learned   | on each side           |
|                                       | after the stacks |           |                        |
| Pegasus (Zhang et al. 2020)           | as mBART         | sinusoids | none                   |
| M2M-100 (Fan et al. 2021), NLLB       | as mBART         | sinusoids | none                   |
| Marian (Junczys-Dowmunt et al. 2018)  | after branches   | sinusoids | none                   |

M2M-100 counts positions from pad_token_id + 1, and its slowest pair has the wavelength 2 pi 10000.
At position p, pair k of n rotates by p 10000^(-k/(n-1)) radians. transformers assigns no positions
to padding tokens, so the first token after left padding has the first position.

The encoder, the decoder and the output share one table, `model.shared`, unless a key specifies
otherwise:

| family | key                                     | tables                                       |
|--------|-----------------------------------------|----------------------------------------------|
| Marian | share_encoder_decoder_embeddings: false | encoder.embed_tokens [vocab_size, D],        |
|        |                                         | decoder.embed_tokens [decoder_vocab_size, D] |
| all    | tie_word_embeddings: false              | lm_head for the output; encoder.embed_tokens |
|        |                                         | and decoder.embed_tokens if the files have   |
|        |                                         | both, otherwise shared                       |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from transformer_jax.config import Learned, ModelConfig, Sinusoidal
from transformer_jax.config.model import NormOrder
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t

BIAS = "final_logits_bias"
HEAD = "lm_head.weight"
SHARED = "model.shared.weight"
ENCODER, DECODER = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"


def _table(config: ModelConfig) -> list[t.TensorMapping]:
    mappings = [t.TensorMapping("embed/tokens", SHARED)]
    if config.source_vocab_size is not None:
        source = t.TensorMapping("embed/source_tokens", ENCODER)
        mappings = [source, t.TensorMapping("embed/tokens", DECODER)]
    if not config.tie_embeddings:
        mappings += [t.TensorMapping("embed/output", HEAD)]
    for side, depth in (("encoder", config.num_layers), ("decoder", config.decoder_layers)):
        target, model = "target_" if side == "decoder" else "", f"model.{side}"
        if isinstance(config.positions, Learned):
            table = f"{model}.embed_positions.weight"
            mappings += [t.TensorMapping(f"embed/{target}positions", table)]
        if config.embedding_norm:
            mappings += t.norm(f"embed/{target}norm", f"{model}.layernorm_embedding")
        names = t.attention_names("self_attn", "out_proj")
        names["norm_attention"] = "self_attn_layer_norm"
        if side == "decoder":
            cross = t.attention_names("encoder_attn", "out_proj")
            names |= {f"cross_{param}": name for param, name in cross.items()}
            names["norm_cross_attention"] = "encoder_attn_layer_norm"
        names |= {"feed_forward/up": "fc1", "feed_forward/down": "fc2"}
        # In these files, `final_layer_norm` is the norm of the feed-forward branch of a block.
        names["norm_feed_forward"] = "final_layer_norm"
        mappings += t.blocks(side, depth, t.named(config, f"{model}.layers.{{i}}", names))
        if config.norm_order == "pre":
            mappings += t.norm(f"{side}/norm", f"{model}.layer_norm")
    return [*mappings, *([t.TensorMapping("embed/bias", BIAS, t.ROW)] if config.logit_bias else [])]


def _copies(config: ModelConfig) -> dict[str, str]:
    """Return a mapping from copies of shared tables that a file may contain to the originals."""
    first = SHARED if config.source_vocab_size is None else DECODER
    head = {HEAD: first} if config.tie_embeddings else {}
    return head | ({DECODER: first, ENCODER: first} if first == SHARED else {})


def _keys(
    order: NormOrder, spelled: dict[str, str] | None = None, *, m2m: bool = False
) -> list[k.Entry]:
    """List the keys that all these families share, with defaults that may differ."""
    return [
        k.Fixed(kind="encoder-decoder", norm_order=order),
        k.FixedKeys(is_encoder_decoder=True),
        k.Key("d_model", "d_model", k.integer, 1024),
        k.Key("encoder_layers", "num_layers", k.integer, 12),
        k.Key("decoder_layers", "num_decoder_layers", k.integer, 12),
        k.Key("encoder_attention_heads", "num_heads", k.integer, 16),
        k.same("decoder_attention_heads", "num_heads", "encoder_attention_heads", 16),
        k.Key("encoder_ffn_dim", "d_ff", k.integer, 4096),
        k.same("decoder_ffn_dim", "d_ff", "encoder_ffn_dim", 4096),
        k.Key("max_position_embeddings", "max_len", k.integer, 1024),
        k.Key(
            "activation_function",
            "activation",
            k.activation(**spelled or {}),
            "relu" if m2m else "gelu",
        ),
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, True),
        k.Key("scale_embedding", "scale_embeddings", k.flag, m2m),
        # No key specifies whether the logits have a bias, so the tensors determine it.
        k.Code(lambda keys, fields: dict(logit_bias=BIAS in keys.names and not m2m)),
        k.Key("dropout", "dropout", k.rate, 0.1),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.1 if m2m else 0.0),
    ]


def _untied_sides(keys: k.ConfigKeys, fields: k.Fields) -> bool:
    """Whether encoder and decoder have separate tables, which no key specifies."""
    return not fields["tie_embeddings"] and {ENCODER, DECODER} <= keys.names


def _vocabulary(default: int) -> k.Code:
    """List the key of a single vocabulary."""

    def read(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
        size = keys.integer("vocab_size", default)
        untied = _untied_sides(keys, fields)
        return dict(vocab_size=size, source_vocab_size=size if untied else None)

    return k.Code(read, lambda config: dict(vocab_size=config.encoder_vocab_size))


def _read_positions(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Read the positions of an M2M-100 model, which are counted from its padding token."""
    if (width := fields["d_model"]) < 4:
        keys.fail("d_model", width, "must be at least 4")
    # The exponents are multiples of 1 / (D/2 - 1), not of 1 / (D/2), which equals a larger base.
    first, base = keys.integer("pad_token_id", 1, least=0) + 1, 10_000 ** (width / (width - 2))
    return dict(positions=Sinusoidal(layout="halves", base=base, offset=first))


def _read_vocabularies(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    """Read the source and target vocabularies of a Marian model."""
    source = keys.integer("vocab_size", 58101)
    target = keys.optional_integer("decoder_vocab_size", None) or source
    shared = keys.flag("share_encoder_decoder_embeddings", True)
    if shared and target != source:
        rule = f"must equal vocab_size, {source}, if share_encoder_decoder_embeddings is true"
        keys.fail("decoder_vocab_size", target, rule)
    separate = not shared or _untied_sides(keys, fields)
    return dict(vocab_size=target, source_vocab_size=source if separate else None)


def sinusoids(config: ModelConfig, shape: t.Shape) -> np.ndarray | None:  # f64[max_len, D]
    """Return the table of sinusoidal positions that old files contain.

    Row p contains sin(p base^(-2i/D)) in column i and the cosine of the same angle in column D/2 +
    i.
    """
    positions = config.positions
    assert isinstance(positions, Sinusoidal)
    first, length, width = positions.offset, config.max_len + positions.offset, config.d_model
    if shape != (length, width):
        return None
    angles = np.arange(length)[:, None] * positions.base ** (-np.arange(0, width, 2) / width)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    table[first - 1 : first] = 0.0  # the padding token
    return table


_family = partial(
    t.Family,
    table=_table,
    prefix="model.",
    ignored_tensors=("model.encoder.version", "model.decoder.version", SHARED),
    tied_copies=_copies,
    shares_if_tied=True,
    head_tensors=("lm_head.*", BIAS),
)
_LEARNED = k.Fixed(positions=Learned(offset=2), embedding_norm=True)
_SINUSOIDS = k.Fixed(positions=Sinusoidal(layout="halves"), embedding_norm=False)


def _sinusoids_in(name: str) -> dict[str, Callable[[ModelConfig, t.Shape], np.ndarray | None]]:
    return {f"model.{side}.embed_positions.{name}": sinusoids for side in ("encoder", "decoder")}


BART = _family(
    "bart",
    [*_keys("post"), _vocabulary(50265), _LEARNED],
    architecture="BartForConditionalGeneration",
)
MBART = _family(
    "mbart",
    [*_keys("pre"), _vocabulary(50265), _LEARNED],
    architecture="MBartForConditionalGeneration",
)
PEGASUS = _family(
    "pegasus",
    [*_keys("pre"), _vocabulary(50265), _SINUSOIDS],
    architecture="PegasusForConditionalGeneration",
    computed_tensors=_sinusoids_in("weight"),
)
M2M100 = _family(
    "m2m_100",
    [
        *_keys("pre", m2m=True),
        _vocabulary(128112),
        k.Code(
            _read_positions,
            lambda config: dict(
                pad_token_id=max(
                    config.positions.offset if isinstance(config.positions, Sinusoidal) else 2, 1
                )
                - 1
            ),
        ),
    ],
    architecture="M2M100ForConditionalGeneration",
    computed_tensors=_sinusoids_in("weights"),
)
MARIAN = _family(
    "marian",
    [
        *_keys("post", dict(silu="swish")),  # the spelling in published Marian models
        k.Code(
            _read_vocabularies,
            lambda config: dict(
                vocab_size=config.encoder_vocab_size,
                decoder_vocab_size=config.vocab_size,
                share_encoder_decoder_embeddings=config.source_vocab_size is None,
            ),
        ),
        _SINUSOIDS,
        k.FixedKeys(static_position_embeddings=True, normalize_embedding=False),
    ],
    architecture="MarianMTModel",
    needed_ids=("decoder_start_token_id",),
    computed_tensors=_sinusoids_in("weight"),
)
