"""Write texts from a source with an encoder-decoder: T5, BART, Pegasus, Marian.

The source is read once; the target begins with the model's start token, and with the ids that are
forced upon it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache.model_cache import ModelCache
from transformer_jax.config.model import as_transformer
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import LengthPenalty, beam_search
from transformer_jax.decoding.completion import TextGenerator, scored_texts
from transformer_jax.decoding.generation import NO_TOKEN, generate
from transformer_jax.decoding.step import ModelStep, make_step
from transformer_jax.decoding.writer import check_stop_strings, cut_at_stop
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.programs import program
from transformer_jax.pytree import Params
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer


def translate(
    generator: TextGenerator,  # whose text is the target
    source: np.ndarray,  # i32[S]
    num_tokens: int,
    *,
    start: int,
    count: int = 1,
) -> list[str]:
    """Draw targets of one source.

    Args:
        generator: of an encoder-decoder; its text is the target.
        source: i32[S], ids, at least one.
        num_tokens: the most tokens of each target.
        start: the target's first token, which is not part of the text.
        count: how many are drawn.
    """
    step, state = _begun(generator, source, num_tokens)
    out = generate(
        step, generator.params, jnp.full((count, 1), start, jnp.int32), fork(state, count),
        num_tokens=num_tokens, sampler=generator.known_sampler(),
        key=generator.key, processors=generator.processors, stop=generator.stop_ids,
    )  # fmt: skip
    return [_text(generator, row.tolist()) for row in out.rows()]


def search_translations(
    generator: TextGenerator,
    source: np.ndarray,  # i32[S]
    num_tokens: int,
    *,
    start: int,
    beams: int,
    results: int = 1,
    length_penalty: float = 0.0,
) -> list[tuple[float, str]]:
    """Return the best targets that beam search finds, and their scores.

    Args:
        generator: of an encoder-decoder; its text is the target.
        source: i32[S], ids, at least one.
        num_tokens: the most tokens of each target.
        start: the target's first token, which is not part of the text.
        beams: targets that are followed side by side, at least 1.
        results: how many are returned, from 1 to beams.
        length_penalty: alpha of log p / length^alpha.
    """
    step, state = _begun(generator, source, num_tokens)
    found = beam_search(
        step, generator.params, jnp.full((1, 1), start, jnp.int32), state, num_tokens=num_tokens,
        num_beams=beams, num_results=results, stop=generator.stop_ids,
        processors=generator.search_processors(), length_penalty=LengthPenalty(length_penalty),
    )  # fmt: skip
    return scored_texts(found, partial(_text, generator))


@program(static=("model", "capacity", "dtype"))
def _state(
    model: EncoderDecoder,
    params: Params,
    source: jax.Array,  # i32[1, S]
    capacity: int,
    dtype: jax.typing.DTypeLike | None,
) -> ModelCache:
    arguments: dict[str, Any] = dict(capacity=capacity, dtype=dtype)
    found: ModelCache = model.apply({"params": params}, source, method="init_cache", **arguments)
    return found


def _begun(
    generator: TextGenerator, source: np.ndarray, num_tokens: int
) -> tuple[ModelStep, ModelCache]:
    """Return the decoder's step, and its state after the source, with room for `num_tokens`."""
    config = as_transformer(generator.config)
    if not len(source):
        raise ValueError("the source has no tokens: must have at least one")
    if config.positions is not None and config.positions.absolute and len(source) > config.max_len:
        raise ValueError(f"the source has {len(source)} tokens: max_len is {config.max_len}")
    if wrong := [int(i) for i in source if not 0 <= i < config.encoder_vocab_size]:
        rule = f"the model has {config.encoder_vocab_size}"
        raise ValueError(f"the source has id {wrong[0]}: {rule}")
    model = EncoderDecoder(config).edited(generator.edit)
    state = _state(
        model, generator.params, jnp.asarray(source[None]), num_tokens, generator.cache_dtype
    )
    return make_step(model).told(apart=True), state


def _text(generator: TextGenerator, ids: Sequence[int]) -> str:
    """Return the text of a target up to its end, without special tokens."""
    if any(i < 0 for i in ids):
        raise ValueError(NO_TOKEN)
    end = next((n for n, i in enumerate(ids) if i in generator.stop_ids), len(ids))
    if isinstance(generator.tokenizer, PretrainedTokenizer):
        text = generator.tokenizer.decode(ids[:end], skip_special_tokens=True)
    else:
        text = generator.tokenizer.to_bytes(ids[:end]).decode("utf-8", "replace")
    return cut_at_stop(text, check_stop_strings(generator.stop))
