"""Map BART (Lewis et al. 2020), mBART, M2M-100 and NLLB, Pegasus and Marian.

Logits have a bias, but for M2M-100's. Sinusoids have sines first. Dropout of whole layers and in
the feed-forward is left out.

| family                                | norms            | positions | norm of the embeddings |
|---------------------------------------|------------------|-----------|------------------------|
| BART                                  | after branches   | learned   | on each side           |
| mBART (Liu et al. 2020)               | before branches, | learned   | on each side           |
|                                       | after the stacks |           |                        |
| Pegasus (Zhang et al. 2020)           | as mBART         | sinusoids | none                   |
| M2M-100 (Fan et al. 2021), NLLB       | as mBART         | sinusoids | none                   |
| Marian (Junczys-Dowmunt et al. 2018)  | after branches   | sinusoids | none                   |

M2M-100 counts positions from pad_token_id + 1, and its slowest pair has the wavelength 2 pi 10000:
pair k of n turns by p 10000^(-k/(n-1)) radians. transformers gives a padding token no number, so
that after padding on the left the first token has the first position, and not that of its column.

Encoder, decoder and output share one table, `model.shared`, unless a key says otherwise:

| family | key                                     | tables                                       |
|--------|-----------------------------------------|----------------------------------------------|
| Marian | share_encoder_decoder_embeddings: false | encoder.embed_tokens [vocab_size, D],        |
|        |                                         | decoder.embed_tokens [decoder_vocab_size, D] |
| all    | tie_word_embeddings: false              | lm_head for the output; encoder.embed_tokens |
|        |                                         | and decoder.embed_tokens where the files     |
|        |                                         | have both, else shared                       |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from transformer_jax.config import Learned, ModelConfig, Sinusoidal
from transformer_jax.config.model import NormOrder
from transformer_jax.pretrained.families.table import (
    ACTIVATIONS,
    LINEAR_OUT,
    ROW,
    ConfigKeys,
    Family,
    Fields,
    Shape,
    TensorMapping,
    activation_key,
    blocks,
    linear,
    norm,
)
from transformer_jax.untrusted_files import JsonObject

BIAS = "final_logits_bias"
HEAD = "lm_head.weight"
SHARED = "model.shared.weight"
ENCODER, DECODER = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"


def _table(config: ModelConfig) -> list[TensorMapping]:
    mappings = _embeddings(config)
    for side, depth in (("encoder", config.num_layers), ("decoder", config.decoder_layers)):
        target = "target_" if side == "decoder" else ""
        if isinstance(config.positions, Learned):
            mappings += [
                TensorMapping(f"embed/{target}positions", f"model.{side}.embed_positions.weight")
            ]
        if config.embedding_norm:
            mappings += norm(f"embed/{target}norm", f"model.{side}.layernorm_embedding")
        block = f"model.{side}.layers.{{i}}"
        inner = [
            *_attention("attention", f"{block}.self_attn"),
            *norm("norm_attention", f"{block}.self_attn_layer_norm"),
        ]
        if side == "decoder":
            inner += _attention("cross_attention", f"{block}.encoder_attn")
            inner += norm("norm_cross_attention", f"{block}.encoder_attn_layer_norm")
        inner += [
            *linear("feed_forward/up", f"{block}.fc1"),
            *linear("feed_forward/down", f"{block}.fc2"),
            *norm("norm_feed_forward", f"{block}.final_layer_norm"),
        ]
        mappings += blocks(side, depth, inner)
        if config.norm_order == "pre":
            mappings += norm(f"{side}/norm", f"model.{side}.layer_norm")
    return [*mappings, *([TensorMapping("embed/bias", BIAS, ROW)] if config.logit_bias else [])]


def _embeddings(config: ModelConfig) -> list[TensorMapping]:
    if config.source_vocab_size is None:
        mappings = [TensorMapping("embed/tokens", SHARED)]
    else:
        mappings = [
            TensorMapping("embed/source_tokens", ENCODER),
            TensorMapping("embed/tokens", DECODER),
        ]
    return [*mappings, *([] if config.tie_embeddings else [TensorMapping("embed/output", HEAD)])]


def _copies(config: ModelConfig) -> dict[str, str]:
    """Return the second copies that a file may hold of the tables that the config shares."""
    first = SHARED if config.source_vocab_size is None else DECODER
    head = {HEAD: first} if config.tie_embeddings else {}
    return head | ({DECODER: first, ENCODER: first} if first == SHARED else {})


def _attention(param: str, tensor: str) -> list[TensorMapping]:
    return [
        *linear(f"{param}/query", f"{tensor}.q_proj"),
        *linear(f"{param}/key", f"{tensor}.k_proj"),
        *linear(f"{param}/value", f"{tensor}.v_proj"),
        *linear(f"{param}/out", f"{tensor}.out_proj", LINEAR_OUT),
    ]


def _common(keys: ConfigKeys, names: frozenset[str], order: NormOrder, m2m: bool = False) -> Fields:
    """Read the fields of ModelConfig that all these families have; some defaults differ."""
    return dict(
        kind="encoder-decoder",
        d_model=keys.integer("d_model", 1024),
        num_layers=keys.integer("encoder_layers", 12),
        num_decoder_layers=keys.integer("decoder_layers", 12),
        num_heads=_shared_size(keys, "attention_heads", 16),
        d_ff=_shared_size(keys, "ffn_dim", 4096),
        max_len=keys.integer("max_position_embeddings", 1024),
        norm_order=order,
        activation=keys.choice("activation_function", ACTIVATIONS, "relu" if m2m else "gelu"),
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        scale_embeddings=keys.flag("scale_embedding", m2m),
        logit_bias=BIAS in names and not m2m,
        dropout=keys.rate("dropout", 0.1),
        attention_dropout=keys.rate("attention_dropout", 0.1 if m2m else 0.0),
    )


def _shared_size(keys: ConfigKeys, name: str, default: int) -> int:
    """Read a size that must be the same in the encoder and the decoder."""
    size = keys.integer(f"encoder_{name}", default)
    found = keys.integer(f"decoder_{name}", default)
    if found != size:
        keys.fail(f"decoder_{name}", found, f"must be encoder_{name}, {size}")
    return size


def _write_common(config: ModelConfig) -> JsonObject:
    return dict(
        is_encoder_decoder=True,
        tie_word_embeddings=config.tie_embeddings,
        vocab_size=config.encoder_vocab_size,
        d_model=config.d_model,
        encoder_layers=config.num_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.num_heads,
        decoder_attention_heads=config.num_heads,
        encoder_ffn_dim=config.ff_dim,
        decoder_ffn_dim=config.ff_dim,
        max_position_embeddings=config.max_len,
        activation_function=activation_key(config.activation),
        scale_embedding=config.scale_embeddings,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )


def _read(keys: ConfigKeys, names: frozenset[str], order: NormOrder, learned: bool) -> ModelConfig:
    """Read one vocabulary: with learned positions and a norm of embeddings, or with sinusoids."""
    fields = _common(keys, names, order)
    vocab = keys.integer("vocab_size", 50265)
    return ModelConfig(
        vocab_size=vocab,
        source_vocab_size=vocab if _untied_sides(fields, names) else None,
        positions=Learned(offset=2) if learned else Sinusoidal(layout="halves"),
        embedding_norm=learned,
        **fields,
    )


def _untied_sides(fields: Fields, names: frozenset[str]) -> bool:
    """Return whether encoder and decoder have a table each, though the config does not say so."""
    return not fields["tie_embeddings"] and {ENCODER, DECODER} <= names


def _write(config: ModelConfig, model: str) -> JsonObject:
    return dict(architectures=[model], **_write_common(config))


def _read_m2m100(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _common(keys, names, "pre", m2m=True)
    if (width := fields["d_model"]) < 4:
        keys.fail("d_model", width, "must be at least 4")
    vocab = keys.integer("vocab_size", 128112)
    return ModelConfig(
        vocab_size=vocab,
        source_vocab_size=vocab if _untied_sides(fields, names) else None,
        positions=Sinusoidal(
            layout="halves",
            base=10_000 ** (width / (width - 2)),
            offset=keys.integer("pad_token_id", 1, least=0) + 1,
        ),
        **fields,
    )


def _write_m2m100(config: ModelConfig) -> JsonObject:
    positions = config.positions
    offset = positions.offset if isinstance(positions, Sinusoidal) else 2
    keys = dict(architectures=["M2M100ForConditionalGeneration"], **_write_common(config))
    return keys | dict(pad_token_id=max(offset, 1) - 1)


def _read_marian(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    fields = _common(keys, names, "post")
    source = keys.integer("vocab_size", 58101)
    target = keys.optional_integer("decoder_vocab_size", None) or source
    shared = keys.flag("share_encoder_decoder_embeddings", True)
    if shared and target != source:
        rule = f"must be vocab_size, {source}, while share_encoder_decoder_embeddings is true"
        keys.fail("decoder_vocab_size", target, rule)
    return ModelConfig(
        vocab_size=target,
        source_vocab_size=source if not shared or _untied_sides(fields, names) else None,
        positions=Sinusoidal(layout="halves"),
        **fields,
    )


def _write_marian(config: ModelConfig) -> JsonObject:
    keys = _write_common(config)
    if config.activation == "silu":
        keys["activation_function"] = "swish"  # as published Marians spell it
    return dict(
        architectures=["MarianMTModel"],
        share_encoder_decoder_embeddings=config.source_vocab_size is None,
        decoder_vocab_size=config.vocab_size,
        static_position_embeddings=True,
        normalize_embedding=False,
        **keys,
    )


def sinusoids(config: ModelConfig, shape: Shape) -> np.ndarray | None:  # f64[max_len, D]
    """Compute the table of positions that old files hold.

    Row p has sin(p base^(-2i/D)) in column i and the cosine of the same angle in column D/2 + i.
    """
    positions = config.positions
    assert isinstance(positions, Sinusoidal)
    first, length, width = positions.offset, config.max_len + positions.offset, config.d_model
    if shape != (length, width):
        return None
    angles = np.arange(length)[:, None] * positions.base ** (-np.arange(0, width, 2) / width)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    table[first - 1 : first] = 0.0  # of padding
    return table


_family = partial(
    Family,
    table=_table,
    prefix="model.",
    ignored_tensors=("model.encoder.version", "model.decoder.version", SHARED),
    tied_copies=_copies,
    shares_if_tied=True,
    head_tensors=("lm_head.*", BIAS),
)


def _sinusoids_in(name: str) -> dict[str, Callable[[ModelConfig, Shape], np.ndarray | None]]:
    return {f"model.{side}.embed_positions.{name}": sinusoids for side in ("encoder", "decoder")}


BART = _family(
    "bart",
    partial(_read, order="post", learned=True),
    partial(_write, model="BartForConditionalGeneration"),
)
MBART = _family(
    "mbart",
    partial(_read, order="pre", learned=True),
    partial(_write, model="MBartForConditionalGeneration"),
)
PEGASUS = _family(
    "pegasus",
    partial(_read, order="pre", learned=False),
    partial(_write, model="PegasusForConditionalGeneration"),
    computed_tensors=_sinusoids_in("weight"),
)
M2M100 = _family("m2m_100", _read_m2m100, _write_m2m100, computed_tensors=_sinusoids_in("weights"))
MARIAN = _family(
    "marian",
    _read_marian,
    _write_marian,
    needed_ids=("decoder_start_token_id",),
    computed_tensors=_sinusoids_in("weight"),
)
