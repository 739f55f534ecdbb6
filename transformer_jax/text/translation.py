"""Write texts from a source with an encoder-decoder: T5, BART, Pegasus, Marian.

The source is read once; the target begins with the model's start token, and with the ids that are
forced upon it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache.model_cache import ModelCache
from transformer_jax.config import ModelConfig
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import LengthPenalty, beam_search
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.logit_processors import HistoryProcessor
from transformer_jax.decoding.samplers import Sample
from transformer_jax.decoding.step import make_step
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.places import NO_EDIT, Edit, edit_items, split_edit
from transformer_jax.programs import program
from transformer_jax.pytree import Params
from transformer_jax.text.completion import WithoutHistory, known_ids
from transformer_jax.text.writer import NO_TOKEN, check_stop_strings, cut_at_stop
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.trained import Tokenizer


def translate(
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    source: np.ndarray,  # i32[S]
    num_tokens: int,
    *,
    start: int,  # the target's first token, which is not part of the text
    sampler: Sample,
    key: jax.Array,
    count: int = 1,
    processors: Sequence[HistoryProcessor] = (),
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    cache_dtype: jax.typing.DTypeLike | None = None,
    edit: Mapping[str, Edit] = NO_EDIT,
) -> list[str]:
    """Draw targets of one source.

    Args:
        config: of an encoder-decoder.
        params: of the model.
        tokenizer: of its texts.
        source: i32[S], ids, at least one.
        num_tokens: the most tokens of each target.
        start: the target's first token, which is not part of the text.
        sampler: draws them.
        key: a single key.
        count: how many are drawn.
        processors: change the logits by the target so far.
        stop: a text, or several, before the first of which a result ends.
        stop_ids: tokens before the first of which it ends.
        cache_dtype: of the target's keys and values; None is the compute dtype.
        edit: functions by the names of places, which change the values there.
    """
    stop = check_stop_strings(stop)
    of_source, of_target = split_edit(config, edit)
    state = _read(config, params, source, num_tokens, cache_dtype, of_source)
    known = known_ids(config, tokenizer)
    out = generate(
        make_step(EncoderDecoder(config), edit=of_target), params,
        jnp.full((count, 1), start, jnp.int32),
        fork(state, count), num_tokens=num_tokens,
        sampler=Sample(*known, *sampler.processors), key=key,
        processors=processors, stop=stop_ids,
    )  # fmt: skip
    return [_text(tokenizer, row.tolist(), stop, stop_ids) for row in out.rows()]


def search_translations(
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    source: np.ndarray,  # i32[S]
    num_tokens: int,
    *,
    start: int,
    beams: int,
    results: int = 1,
    length_penalty: float = 0.0,
    processors: Sequence[HistoryProcessor] = (),
    stop_ids: Sequence[int] = (),
    cache_dtype: jax.typing.DTypeLike | None = None,
    edit: Mapping[str, Edit] = NO_EDIT,
) -> list[tuple[float, str]]:
    """Return the best targets that beam search finds, and their scores.

    Args:
        config: of an encoder-decoder.
        params: of the model.
        tokenizer: of its texts.
        source: i32[S], ids, at least one.
        num_tokens: the most tokens of each target.
        start: the target's first token, which is not part of the text.
        beams: targets that are followed side by side, at least 1.
        results: how many are returned, from 1 to beams.
        length_penalty: alpha of log p / length^alpha.
        processors: change the logits by the target so far.
        stop_ids: tokens that end a target.
        cache_dtype: of the target's keys and values; None is the compute dtype.
        edit: functions by the names of places, which change the values there.
    """
    of_source, of_target = split_edit(config, edit)
    found = beam_search(
        make_step(EncoderDecoder(config), edit=of_target),
        params,
        jnp.full((1, 1), start, jnp.int32),
        _read(config, params, source, num_tokens, cache_dtype, of_source),
        num_tokens=num_tokens,
        num_beams=beams,
        num_results=results,
        stop=stop_ids,
        processors=(*map(WithoutHistory, known_ids(config, tokenizer)), *processors),
        length_penalty=LengthPenalty(length_penalty),
    )
    if not np.asarray(found.lengths)[0, 0]:
        raise ValueError(NO_TOKEN)
    rows = (np.asarray(x)[0] for x in (found.scores, found.tokens, found.lengths))
    return [
        (float(score), _text(tokenizer, tokens[:length].tolist(), (), stop_ids))
        for score, tokens, length in zip(*rows, strict=True)
        if length
    ]


@program(static=("config", "capacity", "dtype", "edit"))
def _state(
    config: ModelConfig,
    params: Params,
    source: jax.Array,  # i32[1, S]
    capacity: int,
    dtype: jax.typing.DTypeLike | None,
    edit: tuple[tuple[str, Edit], ...],
) -> ModelCache:
    arguments: dict[str, Any] = dict(capacity=capacity, dtype=dtype, edit=dict(edit))
    model: Any = EncoderDecoder(config)
    found: ModelCache = model.apply({"params": params}, source, method="init_cache", **arguments)
    return found


def _read(
    config: ModelConfig,
    params: Params,
    source: np.ndarray,  # i32[S]
    num_tokens: int,
    dtype: jax.typing.DTypeLike | None,
    edit: Mapping[str, Edit],
) -> ModelCache:
    """Return the decoder's state after reading one source, with room for `num_tokens`."""
    if not len(source):
        raise ValueError("the source has no tokens: must have at least one")
    if config.positions is not None and config.positions.absolute and len(source) > config.max_len:
        raise ValueError(f"the source has {len(source)} tokens: max_len is {config.max_len}")
    if wrong := [int(i) for i in source if not 0 <= i < config.encoder_vocab_size]:
        rule = f"the model has {config.encoder_vocab_size}"
        raise ValueError(f"the source has id {wrong[0]}: {rule}")
    return _state(config, params, jnp.asarray(source[None]), num_tokens, dtype, edit_items(edit))


def _text(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], stop_ids: Sequence[int]
) -> str:
    """Return the text of a target up to its end, without special tokens."""
    if any(i < 0 for i in ids):
        raise ValueError(NO_TOKEN)
    end = next((n for n, i in enumerate(ids) if i in stop_ids), len(ids))
    if isinstance(tokenizer, PretrainedTokenizer):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
    else:
        text = tokenizer.to_bytes(ids[:end]).decode("utf-8", "replace")
    return cut_at_stop(text, stop)
