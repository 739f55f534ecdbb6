"""A text continued by a decoder, for as long as one likes, in pieces that are whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data import Tokenizer
from transformer_jax.decode import make_step, stream
from transformer_jax.models import init_cache
from transformer_jax.sampling import Sample
from transformer_jax.transformer import Decoder


@dataclass(frozen=True)
class FirstIds:
    """Excludes the ids from `count` on: those a padded vocabulary has and its tokenizer has not."""

    count: int

    def __call__(self, logits: jax.Array) -> jax.Array:  # f32[B, V] -> f32[B, V]
        ids = jnp.arange(logits.shape[-1])[None]
        return jnp.where(ids < self.count, logits, -jnp.inf)


def complete(
    config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    *,
    sampler: Sample,
    key: jax.Array,
) -> Iterator[str]:
    """The text behind `prompt`, a piece at a time; an empty prompt starts at a newline.

    Where the text outgrows the model's max_len, the model reads its last max_len / 2 tokens anew
    and goes on: a token costs one decode step, and now and then half a window.
    """
    history = tokenizer.encode(prompt or _first_prompt(tokenizer))
    if tokenizer.vocab_size < config.vocab_size:
        sampler = Sample(FirstIds(tokenizer.vocab_size), *sampler.processors)
    return _pieces(tokenizer, _ids(config, params, history, num_tokens, sampler, key))


def _first_prompt(tokenizer: Tokenizer) -> str:
    try:
        tokenizer.encode("\n")
        return "\n"
    except ValueError:
        return tokenizer.to_bytes([0]).decode()


def _ids(
    config: ModelConfig,
    params: Any,
    history: np.ndarray,  # i32[P]
    num_tokens: int,
    sampler: Sample,
    key: jax.Array,
) -> Iterator[int]:
    step, length = make_step(Decoder(config)), config.max_len
    part = 0
    while num_tokens > 0:
        read = history if len(history) < length else history[-max(1, length // 2) :]
        count = min(num_tokens, length - len(read) + 1)
        tokens = stream(
            step,
            params,
            jnp.asarray(read[None]),
            init_cache(config, 1, length),
            num_tokens=count,
            sampler=sampler,
            key=jax.random.fold_in(key, part),
        )
        new = []
        for token in tokens:
            new.append(int(token[0]))
            yield new[-1]
        history = np.concatenate([read, np.array(new, read.dtype)])
        num_tokens, part = num_tokens - count, part + 1


def _pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text as soon as its characters are whole; what is no UTF-8 shows as U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        piece = decoder.decode(tokenizer.to_bytes([token]))
        if piece:
            yield piece
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest
