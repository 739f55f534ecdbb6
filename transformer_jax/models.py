"""From a config to a model: build it, initialise it, count it, give it a cache."""

from __future__ import annotations

import math
from typing import Any, overload

import jax
import jax.numpy as jnp

from transformer_jax.arguments import check_key
from transformer_jax.config import ModelConfig, RecurrentConfig
from transformer_jax.recurrent import RecurrentLM, RecurrentSeq2Seq
from transformer_jax.transformer import (
    Decoder,
    Encoder,
    EncoderDecoder,
    ModelCache,
    empty_layers,
)

Model = Encoder | Decoder | EncoderDecoder
Recurrent = RecurrentLM | RecurrentSeq2Seq
Config = ModelConfig | RecurrentConfig


@overload
def build(config: ModelConfig) -> Model: ...
@overload
def build(config: RecurrentConfig) -> Recurrent: ...
def build(config: Config) -> Model | Recurrent:
    """The linen module of a config; hashable, so a legal static argument of `jax.jit`."""
    if isinstance(config, RecurrentConfig):
        reads = config.source_vocab_size is not None
        return RecurrentSeq2Seq(config) if reads else RecurrentLM(config)
    match config.kind:
        case "encoder":
            return Encoder(config)
        case "decoder":
            return Decoder(config)
        case "encoder-decoder":
            return EncoderDecoder(config)


def init_params(config: Config, key: jax.Array) -> dict[str, Any]:
    """Fresh f32 parameters as a nested dict."""
    check_key("key", key)
    return jax.jit(_init, static_argnums=0)(config, key)


def _init(config: Config, key: jax.Array) -> dict[str, Any]:
    model, tokens = build(config), jnp.zeros((1, 1), jnp.int32)
    reads = isinstance(model, EncoderDecoder | RecurrentSeq2Seq)
    more: dict[str, Any] = {"source": tokens} if reads else {}
    return model.init({"params": key}, tokens, **more)["params"]


def num_params(config: Config) -> int:
    """How many parameters a config has; nothing is allocated."""
    shapes = jax.eval_shape(lambda: _init(config, jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def init_cache(config: ModelConfig, batch: int, capacity: int) -> ModelCache:
    """An empty cache of a decoder for `capacity` positions a row.

    With a window, `capacity` may be as small as the window: the cache is then a ring that never
    fills. An encoder-decoder reads its source first: `model.apply(..., method="init_cache")`.
    """
    if config.kind != "decoder":
        rule = "an encoder has no cache"
        if config.kind == "encoder-decoder":
            rule = "its cache starts from a source: model.apply(..., source, method='init_cache')"
        raise ValueError(f"kind is {config.kind!r}: {rule}")
    if batch < 0:
        raise ValueError(f"batch is {batch}: must not be negative")
    return ModelCache(empty_layers(config, config.num_layers, batch, capacity))
