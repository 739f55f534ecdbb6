"""BART (Lewis et al. 2020) and Marian (Junczys-Dowmunt et al. 2018): both sides share the
embeddings, norms stand behind the branches, logits have a bias.

BART has a learned table of positions and a norm of the embeddings on either side; Marian has
sinusoids, sines first. Dropout of whole layers and within the feed-forward, which both have in
training, is left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.families.table import (
    ACTIVATIONS,
    LINEAR_OUT,
    ROW,
    WRITTEN,
    Family,
    Keys,
    Line,
    Shape,
    blocks,
    linear,
    norm,
)

BIAS = "final_logits_bias"


def _table(config: ModelConfig) -> list[Line]:
    lines = [Line("embed/tokens", "model.shared.weight")]
    for side, depth in (("encoder", config.num_layers), ("decoder", config.decoder_layers)):
        target = "target_" if side == "decoder" else ""
        if config.positions == "learned":
            lines += [Line(f"embed/{target}positions", f"model.{side}.embed_positions.weight")]
        if config.embedding_norm:
            lines += norm(f"embed/{target}norm", f"model.{side}.layernorm_embedding")
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
        lines += blocks(side, depth, inner)
    return [*lines, *([Line("embed/bias", BIAS, ROW)] if config.logit_bias else [])]


def _attention(ours: str, theirs: str) -> list[Line]:
    return [
        *linear(f"{ours}/query", f"{theirs}.q_proj"),
        *linear(f"{ours}/key", f"{theirs}.k_proj"),
        *linear(f"{ours}/value", f"{theirs}.v_proj"),
        *linear(f"{ours}/out", f"{theirs}.out_proj", LINEAR_OUT),
    ]


def _common(keys: Keys, names: frozenset[str]) -> dict[str, Any]:
    """What both share, as fields of ModelConfig."""
    keys.only("is_encoder_decoder", True)
    keys.only("tie_word_embeddings", True)
    keys.only("normalize_before", False)
    keys.only("add_final_layer_norm", False)
    keys.only("add_bias_logits", False, True)  # said of the bias that is there either way
    keys.unread("activation_dropout", "encoder_layerdrop", "decoder_layerdrop")
    keys.unread("classif_dropout", "classifier_dropout", "init_std")
    layers = keys.integer("encoder_layers", 12)
    keys.only("num_hidden_layers", layers)  # another name of the same
    return dict(
        kind="encoder-decoder",
        d_model=keys.integer("d_model", 1024),
        num_layers=layers,
        num_decoder_layers=keys.integer("decoder_layers", 12),
        num_heads=_both(keys, "attention_heads", 16),
        d_ff=_both(keys, "ffn_dim", 4096),
        max_len=keys.integer("max_position_embeddings", 1024),
        norm_order="post",
        activation=keys.text("activation_function", ACTIVATIONS, "gelu"),
        scale_embeddings=keys.flag("scale_embedding", False),
        logit_bias=BIAS in names,
        dropout=keys.rate("dropout", 0.1),
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )


def _both(keys: Keys, name: str, default: int) -> int:
    """A size that both sides have."""
    size = keys.integer(f"encoder_{name}", default)
    found = keys.integer(f"decoder_{name}", default)
    if found != size:
        keys.fail(f"decoder_{name}", found, f"must be encoder_{name}, {size}")
    return size


def _write_common(config: ModelConfig) -> dict[str, Any]:
    return dict(
        is_encoder_decoder=True,
        tie_word_embeddings=config.tie_embeddings,
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        encoder_layers=config.num_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.num_heads,
        decoder_attention_heads=config.num_heads,
        encoder_ffn_dim=config.ff_dim,
        decoder_ffn_dim=config.ff_dim,
        max_position_embeddings=config.max_len,
        activation_function=WRITTEN[config.activation],
        scale_embedding=config.scale_embeddings,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )


def _read_bart(keys: Keys, names: frozenset[str]) -> ModelConfig:
    fields = _common(keys, names)
    keys.only("normalize_embedding", True)
    keys.only("static_position_embeddings", False)
    keys.only("extra_pos_embeddings", 2)
    keys.unread("force_bos_token_to_be_generated")
    return ModelConfig(
        vocab_size=keys.integer("vocab_size", 50265),
        positions="learned",
        position_offset=2,
        embedding_norm=True,
        **fields,
    )


def _write_bart(config: ModelConfig) -> dict[str, Any]:
    return dict(architectures=["BartForConditionalGeneration"], **_write_common(config))


def _read_marian(keys: Keys, names: frozenset[str]) -> ModelConfig:
    fields = _common(keys, names)
    keys.only("normalize_embedding", False)
    keys.only("static_position_embeddings", True)
    keys.only("share_encoder_decoder_embeddings", True)
    keys.unread("extra_pos_embeddings", "save_step", "unk_token_id")
    vocab = keys.integer("vocab_size", 58101)
    keys.only("decoder_vocab_size", None, vocab)
    return ModelConfig(vocab_size=vocab, positions="sinusoidal", sinusoid="halves", **fields)


def _write_marian(config: ModelConfig) -> dict[str, Any]:
    keys = _write_common(config)
    if config.activation == "silu":
        keys["activation_function"] = "swish"  # as all that are published say
    return dict(
        architectures=["MarianMTModel"],
        share_encoder_decoder_embeddings=True,
        decoder_vocab_size=config.vocab_size,
        static_position_embeddings=True,
        normalize_embedding=False,
        pad_token_id=None,  # no config has it, and the default is out of most vocabularies
        **keys,
    )


def sinusoids(config: ModelConfig, shape: Shape) -> np.ndarray | None:  # f64[max_len, D]
    """sin(p 10000^(-2i/D)) at i and cos of the same angle at D/2 + i: the table of old files."""
    length, width = config.max_len, config.d_model
    if shape != (length, width):
        return None
    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


_family = partial(
    Family,
    table=_table,
    prefix="model.",
    unused=("model.encoder.version", "model.decoder.version"),
    copies={
        "lm_head.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
        "model.encoder.embed_tokens.weight": "model.shared.weight",
    },
    heads=("lm_head.*", BIAS),
)

BART = _family("bart", _read_bart, _write_bart)
MARIAN = _family(
    "marian",
    _read_marian,
    _write_marian,
    implied={f"model.{side}.embed_positions.weight": sinusoids for side in ("encoder", "decoder")},
)
