"""A text continued by a decoder, for as long as one likes, in pieces that are whole characters.

What is yielded is decided: a character that lacks bytes waits for them, and so does text that may
be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data import Tokenizer
from transformer_jax.decode import make_step, stream
from transformer_jax.models import init_cache
from transformer_jax.processors import HistoryProcessor, check_processors
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
    processors: Sequence[HistoryProcessor] = (),
    stop: str | Sequence[str] = (),
    cache_dtype: jax.typing.DTypeLike | None = None,
) -> Iterator[str]:
    """The text behind `prompt`, a piece at a time; an empty prompt starts at a newline.

    It ends in front of the first `stop` string, or after `num_tokens` tokens. Where the text
    outgrows the model's max_len, the model reads its last max_len / 2 tokens anew and goes on, and
    `processors` see those: a token costs one decode step, and now and then half a window.
    """
    stop = check_stop_strings(stop)
    processors = check_processors(processors)
    history = read_prompt(tokenizer, prompt)
    sampler = Sample(*known_ids(config, tokenizer), *sampler.processors)
    ids = _ids(config, params, history, num_tokens, sampler, key, processors, cache_dtype)
    return pieces(tokenizer, ids, stop)


def read_prompt(tokenizer: Tokenizer, prompt: str) -> np.ndarray:  # i32[P]
    """The prompt's tokens; of an empty one, those of a newline or of the first token there is."""
    return tokenizer.encode(prompt or _first_prompt(tokenizer))


def known_ids(config: ModelConfig, tokenizer: Tokenizer) -> tuple[FirstIds, ...]:
    """What keeps a padded vocabulary to its tokenizer's ids."""
    if tokenizer.vocab_size > config.vocab_size:
        rule = f"the model has {config.vocab_size}"
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens: {rule}")
    known = FirstIds(tokenizer.vocab_size)
    return (known,) if tokenizer.vocab_size < config.vocab_size else ()


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
    processors: Sequence[HistoryProcessor],
    cache_dtype: jax.typing.DTypeLike | None,
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
            init_cache(config, 1, length, cache_dtype),
            num_tokens=count,
            sampler=sampler,
            key=jax.random.fold_in(key, part),
            processors=processors,
        )
        new = []
        for token in tokens:
            new.append(int(token[0]))
            yield new[-1]
        history = np.concatenate([read, np.array(new, read.dtype)])
        num_tokens, part = num_tokens - count, part + 1


def pieces(tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = ()) -> Iterator[str]:
    """Text as soon as it is decided; what is no UTF-8 shows as U+FFFD.

    It ends in front of the stop string whose last character comes first, wherever tokens begin and
    end; no id is taken from `ids` after that.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    matcher = StopStrings(check_stop_strings(stop))
    for token in ids:
        text, ended = matcher.feed(decoder.decode(tokenizer.to_bytes([token])))
        if text:
            yield text
        if ended:
            return
    text, ended = matcher.feed(decoder.decode(b"", final=True))
    rest = text if ended else text + matcher.held
    if rest:
        yield rest


class StopStrings:
    """Text in, and out again as soon as it can no longer be part of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self.held = ""
        """The longest end of the text so far with which a stop string begins."""

    def feed(self, text: str) -> tuple[str, bool]:
        """What is decided now, and whether a stop string came: then this was all."""
        out: list[str] = []
        for character in text:
            self.held += character
            found = [stop for stop in self.stop if self.held.endswith(stop)]
            if found:
                return "".join(out) + self.held[: -max(map(len, found))], True
            keep = next(
                n
                for n in range(len(self.held), -1, -1)
                if n == 0 or any(stop.startswith(self.held[-n:]) for stop in self.stop)
            )
            cut = len(self.held) - keep
            out.append(self.held[:cut])
            self.held = self.held[cut:]
        return "".join(out), False


def check_stop_strings(stop: Any) -> tuple[str, ...]:
    """One string or several, none of them empty."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop has {text!r}: must be strings of at least one character")
    return strings
