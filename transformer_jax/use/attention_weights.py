"""Return the attention weights of a text, with its tokens as labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.masks import Causal, Padding
from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.config.architectures import model_shape
from transformer_jax.models.factory import build
from transformer_jax.models.places import places
from transformer_jax.programs import program
from transformer_jax.pytree import Array, Params
from transformer_jax.shown import short_repr
from transformer_jax.tokenizers.special import encode_text, encoder_frame, special_ids
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.tasks.masked import masked_ids
from transformer_jax.use.reading import Reader, token_texts
from transformer_jax.use.scores import pair_batch


@short_repr
@dataclass(frozen=True)
class AttentionWeights:
    """Hold the weights of every layer and head over the tokens of a text.

    Attributes:
        tokens: the text of each token that is read, special ones by their names.
        weights: f32[L, N, T, T], that of key token s for query token t at [layer, head, t, s].
        source_tokens: the text of each token of the source, where an encoder reads one.
        cross: f32[L, N, T, S], in an encoder-decoder those of the source's tokens for the target's.
        encoder: f32[L, N, S, S], in an encoder-decoder those of the source's tokens for each other.
    """

    tokens: list[str]
    weights: np.ndarray  # f32[L, N, T, T]
    source_tokens: list[str] | None = None
    cross: np.ndarray | None = None  # f32[L, N, T, S]
    encoder: np.ndarray | None = None  # f32[L, N, S, S]


def attention_weights(model: Reader, text: Any) -> AttentionWeights:
    """Return the weights of what `LanguageModel.attend` takes."""
    config = model.config
    if not isinstance(config, ModelConfig) or config.inputs is not None:
        rule = "has no blocks over tokens; model.apply(..., capture=places(config)) looks inside"
        raise ConfigError(f"attend: a {type(config).__name__} of {model.name!r} {rule}")
    pairs = model.kind == "targets"
    if pairs != (isinstance(text, tuple) and len(text) == 2) or not all(
        isinstance(one, str) for one in (text if pairs else (text,))
    ):
        rule = "(source, target)" if pairs else "a text"
        raise DataError(f"text is {text!r:.80}: must be {rule}")
    source, prefix = None, None
    tokenizer = model.tokenizer
    if pairs:
        example = pair_batch(model, *text)
        ids, source, prefix = np.asarray(example.tokens), example.source, example.prefix
    elif model_shape(config) == "encoder":
        if model.kind == "labels":
            ids = encoder_frame(tokenizer).around(encode_text(tokenizer, text))
        else:
            ids = masked_ids(tokenizer, text)
    elif model.kind == "chat":
        ids = model.read_messages(text)
    elif model.kind == "labels":
        ids = np.append(encode_text(tokenizer, text), special_ids(tokenizer)["cls"])
    else:
        ids = model.read(text)
    if not text:
        raise DataError("text is '': must have at least one token")
    ids = model.known(ids.astype(np.int32), "the text")
    limited = (
        config.positions is None or config.positions.absolute or config.kind != "encoder-decoder"
    )
    if limited and len(ids) > config.max_len:
        raise DataError(f"the text has {len(ids)} tokens: must be at most max_len {config.max_len}")
    prefix = None if prefix is None else prefix[None]
    source_row = None if source is None else np.asarray(source)[None]
    found = _weights(config, model.params, ids[None], source_row, prefix)
    own = [f"block_{i}/attention/weights" for i in range(config.decoder_layers)]
    if config.kind == "encoder":
        own = [f"block_{i}/attention/weights" for i in range(config.num_layers)]
    weights = _stacked(found, own)
    labels = token_texts(tokenizer, ids)
    if source is None:
        return AttentionWeights(labels, weights)
    of_source = token_texts(model.tokenizers.of_source, np.asarray(source))
    cross = _stacked(found, [name.replace("attention", "cross_attention") for name in own])
    names = [f"encoder/block_{i}/attention/weights" for i in range(config.num_layers)]
    return AttentionWeights(labels, weights, of_source, cross, _stacked(found, names))


def _stacked(found: dict[str, jax.Array], names: Sequence[str]) -> np.ndarray:  # [L, N, T, S]
    return np.stack([np.asarray(found[name], np.float32)[0] for name in names])


@program(static=("config",))
def _weights(
    config: ModelConfig,
    params: Params,
    tokens: Array,
    source: Array | None,
    prefix: Array | None,
) -> dict[str, jax.Array]:
    """Return the weights of all layers by their places."""
    capture = tuple(name for name in places(config) if name.endswith("/weights"))
    given: dict[str, Any] = {} if source is None else {"source": source}
    if prefix is not None:
        given["mask"] = Causal() | Padding(jnp.asarray(prefix))
    found: Any = build(config).apply(
        {"params": params}, jnp.asarray(tokens), capture=capture, **given
    )
    return dict(found[-1])
