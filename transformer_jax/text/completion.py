"""Continue a text with a decoder, at any length, in pieces that are whole characters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import INT32, check_count
from transformer_jax.config import ModelConfig
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.decoding.arguments import bucket
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import LengthPenalty, beam_search
from transformer_jax.decoding.continuous_batching import Request, serve
from transformer_jax.decoding.generation import generate, prefill, stream
from transformer_jax.decoding.logit_processors import (
    Force,
    ForceLast,
    History,
    HistoryProcessor,
    MinLength,
    check_processors,
)
from transformer_jax.decoding.proposers import PromptLookup
from transformer_jax.decoding.samplers import Sample
from transformer_jax.decoding.speculative import Speculation, speculate
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache, init_decode_state
from transformer_jax.models.places import NO_EDIT, Edit
from transformer_jax.programs import program
from transformer_jax.pytree import Params
from transformer_jax.text.structured import Grammar, Matcher
from transformer_jax.text.writer import NO_TOKEN, check_stop_strings, pieces
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import encode_text, frame, plain
from transformer_jax.tokenizers.trained import Tokenizer

Prompt = str | np.ndarray
"""A text, or the ids i32[P] that stand for it."""


@dataclass(frozen=True)
class FirstIds:
    """Exclude the ids from `count` on, which a padded vocabulary has and its tokenizer has not."""

    count: int

    def __call__(self, logits: jax.Array) -> jax.Array:  # f32[B, V] -> f32[B, V]
        ids = jnp.arange(logits.shape[-1])[None]
        return jnp.where(ids < self.count, logits, -jnp.inf)


def complete(
    config: AnyModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    prompt: Prompt,
    num_tokens: int,
    *,
    sampler: Sample,
    key: jax.Array,
    processors: Sequence[HistoryProcessor] = (),
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    cache_dtype: jax.typing.DTypeLike | None = None,
    edit: Mapping[str, Edit] = NO_EDIT,
    grammar: Grammar | None = None,
) -> Iterator[str]:
    """Yield the text after a prompt, a piece at a time.

    Where the text outgrows the model's max_len, the model reads its last max_len / 2 tokens anew
    and goes on: a token costs one decode step, and now and then half a window. A penalty still
    counts a token that was written and is read anew, and none that is out of sight; `Force`,
    `ForceLast` and `MinLength` count all that was written.

    Args:
        config: of a model that goes on with a text.
        params: of the model.
        tokenizer: of its texts.
        prompt: a text, or i32[P], ids; one without a token starts at a newline.
        num_tokens: the most tokens that are written.
        sampler: draws them.
        key: a single key.
        processors: change the logits by the text that the model has read.
        stop: a text, or several, before the first of which the result ends.
        stop_ids: tokens before the first of which it ends.
        cache_dtype: of keys and values; None is the compute dtype.
        edit: functions by the names of places, which change the values there.
        grammar: the form that the text is to have; None lets it have any.
    """
    stop = check_stop_strings(stop)
    processors = check_processors(processors)
    history = _known_prompt(config, tokenizer, prompt)
    sampler = Sample(*known_ids(config, tokenizer), *sampler.processors)
    step = _step(config, edit)
    ids = _ids(
        config, step, params, history, num_tokens, sampler, key, processors, stop_ids, cache_dtype,
        None if grammar is None else grammar.start(),
    )  # fmt: skip
    return pieces(tokenizer, ids, stop, stop_ids)


def longest_text(config: AnyModelConfig) -> int:
    """Return how many tokens a model reads at most: max_len; without a cache, any number."""
    return config.max_len if isinstance(config, ModelConfig) else 2**30


def _step(config: AnyModelConfig, edit: Mapping[str, Edit]) -> Any:
    """Return the step of a model that writes tokens."""
    model: Any = build(config)  # one that writes: `make_step` refuses the others
    return make_step(model, edit=edit)


def room(config: AnyModelConfig, tokenizer: Tokenizer, prompt: Prompt) -> int:
    """Return how many tokens fit after a prompt before any text is read anew."""
    return longest_text(config) + 1 - len(read_prompt(tokenizer, prompt))


def samples(
    config: AnyModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    prompt: Prompt,
    num_tokens: int,
    *,
    count: int,
    sampler: Sample,
    key: jax.Array,
    processors: Sequence[HistoryProcessor] = (),
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    cache_dtype: jax.typing.DTypeLike | None = None,
    edit: Mapping[str, Edit] = NO_EDIT,
    grammar: Grammar | None = None,
) -> list[str]:
    """Draw several texts after one prompt, which is read once and forked.

    With `processors`, which have to see the prompt, it is read `count` times.

    Args:
        config: of a model that goes on with a text.
        params: of the model.
        tokenizer: of its texts.
        prompt: a text, or i32[P], ids.
        num_tokens: the most tokens of each.
        count: how many are drawn, at least 1.
        sampler: draws them.
        key: a single key.
        processors: change the logits by the text so far.
        stop: a text, or several, before the first of which a result ends.
        stop_ids: tokens before the first of which it ends.
        cache_dtype: of keys and values; None is the compute dtype.
        edit: functions by the names of places, which change the values there.
        grammar: the form that each text is to have; None lets it have any.
    """
    check_count("count", count, 1)
    stop = check_stop_strings(stop)
    check_count("num_tokens", num_tokens, 1, INT32.max)
    step: Any = _step(config, edit)
    read: Any = _known_prompt(config, tokenizer, prompt)[None]
    empty = init_decode_state(config, None, 1, longest_text(config), dtype=cache_dtype)
    columns = read.shape[1]
    step.check(read, empty, np.array([columns + num_tokens - 1]))
    sampler = Sample(*known_ids(config, tokenizer), *sampler.processors)
    if grammar is not None:
        keys = [jax.random.fold_in(key, n) for n in range(count)]
        matchers = [grammar.start() for _ in keys]
        ids: list[list[int]] = [[] for _ in keys]
        for n, token in _constrained(
            config, step, params, read[0], empty, num_tokens, keys, matchers, sampler, processors,
            stop_ids,
        ):  # fmt: skip
            ids[n].append(token)
        return ["".join(pieces(tokenizer, row, stop, stop_ids)) for row in ids]
    read = jnp.asarray(read)
    if columns > 1 and not processors:
        lengths = jnp.full((1,), columns - 1)
        state = _prefill(step, params, read[:, :-1], empty, lengths, None)[1]
        read, empty = read[:, -1:], state
    out = generate(
        step, params, jnp.repeat(read, count, axis=0), fork(empty, count), num_tokens=num_tokens,
        sampler=sampler, key=key, processors=processors, stop=stop_ids,
    )  # fmt: skip
    return ["".join(pieces(tokenizer, row.tolist(), stop, stop_ids)) for row in out.rows()]


_prefill = program(prefill, static=("step",))


def search(
    config: AnyModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    prompt: Prompt,
    num_tokens: int,
    *,
    beams: int,
    results: int = 1,
    length_penalty: float = 0.0,
    processors: Sequence[HistoryProcessor] = (),
    stop_ids: Sequence[int] = (),
    cache_dtype: jax.typing.DTypeLike | None = None,
    edit: Mapping[str, Edit] = NO_EDIT,
) -> list[tuple[float, str]]:
    """Return the best texts of a beam search, and their scores.

    Args:
        config: of a model that goes on with a text.
        params: of the model.
        tokenizer: of its texts.
        prompt: a text, or i32[P], ids.
        num_tokens: the most tokens of each.
        beams: texts that are followed side by side, at least 1.
        results: how many are returned, from 1 to beams.
        length_penalty: alpha of log p / length^alpha.
        processors: change the logits by the text so far.
        stop_ids: tokens that end a text.
        cache_dtype: of keys and values; None is the compute dtype.
        edit: functions by the names of places, which change the values there.
    """
    found = beam_search(
        _step(config, edit),
        params,
        jnp.asarray(_known_prompt(config, tokenizer, prompt)[None]),
        init_decode_state(config, None, 1, longest_text(config), dtype=cache_dtype),
        num_tokens=num_tokens,
        num_beams=beams,
        num_results=results,
        stop=stop_ids,
        processors=(*map(WithoutHistory, known_ids(config, tokenizer)), *processors),
        length_penalty=LengthPenalty(length_penalty),
    )
    if not np.asarray(found.lengths)[0, 0]:
        raise ValueError(NO_TOKEN)
    rows = zip(
        *(np.asarray(x)[0] for x in (found.scores, found.tokens, found.lengths)), strict=True
    )
    return [
        (float(score), "".join(pieces(tokenizer, tokens[:length].tolist(), (), stop_ids)))
        for score, tokens, length in rows
        if length
    ]


def look_up(
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    prompt: Prompt,
    num_tokens: int,
    *,
    num_draft: int,
    sampler: Sample,
    key: jax.Array,
    processors: Sequence[HistoryProcessor] = (),
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    cache_dtype: jax.typing.DTypeLike | None = None,
    edit: Mapping[str, Edit] = NO_EDIT,
) -> tuple[str, Speculation]:
    """Write a text by speculative decoding, which proposes what followed the same words before.

    Args:
        config: of a decoder.
        params: of the model.
        tokenizer: of its texts.
        prompt: a text, or i32[P], ids.
        num_tokens: the most tokens that are written.
        num_draft: the most that are proposed at a time.
        sampler: draws them.
        key: a single key.
        processors: change the logits by the text so far.
        stop: a text, or several, before the first of which the result ends.
        stop_ids: tokens before the first of which it ends.
        cache_dtype: of keys and values; None is the compute dtype.
        edit: functions by the names of places, which change the values there.
    """
    stop = check_stop_strings(stop)
    space: dict[str, Any] = dict(batch=1, capacity=config.max_len, dtype=cache_dtype)
    if isinstance(config.window, int):
        space["capacity"] += num_draft
    elif config.window is not None:
        space["slack"] = num_draft
    out = speculate(
        _step(config, edit),
        params,
        jnp.asarray(_known_prompt(config, tokenizer, prompt)[None]),
        init_cache(config, **space),
        proposer=PromptLookup(),
        num_tokens=num_tokens,
        num_draft=num_draft,
        sampler=Sample(*known_ids(config, tokenizer), *sampler.processors),
        key=key,
        processors=processors,
        stop=stop_ids,
    )
    return "".join(pieces(tokenizer, out.rows()[0].tolist(), stop, stop_ids)), out


def answer(
    config: AnyModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    num_tokens: int,
    *,
    slots: int,
    numbers: Sequence[int] | None = None,
    sampler: Sample,
    key: jax.Array,
    processors: Sequence[HistoryProcessor] = (),
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    cache_dtype: jax.typing.DTypeLike | None = None,
    edit: Mapping[str, Edit] = NO_EDIT,
    grammar: Grammar | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield the number of a prompt and the text after it, as each is done.

    Prompt n has the text that `complete` draws with `fold_in(key, n)`, as far as it reads nothing
    anew.

    Args:
        config: of a model that goes on with a text.
        params: of the model.
        tokenizer: of its texts.
        prompts: texts, or i32[P], ids of each.
        num_tokens: the most tokens of each.
        slots: how many run at once.
        numbers: n of each prompt; None counts from 0.
        sampler: draws them.
        key: a single key.
        processors: change the logits by the text so far.
        stop: a text, or several, before the first of which a result ends.
        stop_ids: tokens before the first of which it ends.
        cache_dtype: of keys and values; None is the compute dtype.
        edit: functions by the names of places, which change the values there.
        grammar: the form that each text is to have; None lets it have any.
    """
    stop = check_stop_strings(stop)
    read = [_known_prompt(config, tokenizer, prompt) for prompt in prompts]
    requests = [
        Request(
            ids,
            num_tokens,
            key=first_key(jax.random.fold_in(key, n)),
            id=n,
            constraint=None if grammar is None else grammar.start(),
        )
        for n, ids in zip(range(len(read)) if numbers is None else numbers, read, strict=True)
    ]
    longest = longest_text(config)
    if not isinstance(config, ModelConfig):  # processors see a history of as many tokens
        longest = bucket(max((len(ids) for ids in read), default=1) + num_tokens)
    done = serve(
        _step(config, edit),
        params,
        requests,
        init_decode_state(config, None, 1, longest, dtype=cache_dtype),
        slots=slots,
        capacity=longest,
        sampler=Sample(*known_ids(config, tokenizer), *sampler.processors),
        processors=processors,
        stop=stop_ids,
    )
    for completion in done:
        if completion.error is not None:
            raise ValueError(f"prompt {completion.id}: {completion.error}")
        if completion.end == "nonfinite":
            raise ValueError(f"prompt {completion.id}: {NO_TOKEN}")
        tokens = completion.tokens.tolist()
        yield completion.id, "".join(pieces(tokenizer, tokens, stop, stop_ids))


def first_key(key: jax.Array) -> jax.Array:
    """Return the key of the only row of the first part of a text that `complete` draws."""
    return jax.random.fold_in(jax.random.fold_in(key, 0), 0)


@dataclass(frozen=True)
class WithoutHistory:
    """Call a processor of logits alone where one of (history, logits) is asked for."""

    processor: FirstIds

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        return self.processor(logits)


def read_prompt(
    tokenizer: Tokenizer, prompt: Prompt, begin: int | None = None
) -> np.ndarray:  # i32[P]
    """Return the prompt's tokens, after those that a published tokenizer puts before any text.

    Where the model learnt that a text begins with the token `begin`, it stands in their place. A
    prompt without a token, as "" is, is what begins a text, else a newline, else the first token
    there is.
    """
    if not isinstance(prompt, str):
        return prompt
    if begin is not None:
        return np.append(np.int32(begin), encode_text(tokenizer, prompt)).astype(np.int32)
    if isinstance(own := plain(tokenizer), PretrainedTokenizer):
        text = own.encode(prompt, special_tokens=False)
        ids = np.concatenate([frame(own).first, text]).astype(np.int32)
        starts = [own.special_ids[r] for r in ("bos", "eos") if r in own.special_ids]
        if len(ids) or starts:
            return ids if len(ids) else np.array(starts[:1], np.int32)
    ids = tokenizer.encode(prompt)
    return ids if len(ids) else _first_prompt(tokenizer)


def _known_prompt(
    config: AnyModelConfig, tokenizer: Tokenizer, prompt: Prompt
) -> np.ndarray:  # i32[P]
    """Return the prompt's tokens; ValueError for one that the model does not have."""
    ids = read_prompt(tokenizer, prompt)
    if len(ids) and not 0 <= ids.min() <= ids.max() < config.vocab_size:
        wrong = int(ids[np.argmax((ids < 0) | (ids >= config.vocab_size))])
        raise ValueError(f"the prompt has id {wrong}: the model has {config.vocab_size} tokens")
    return ids


def known_ids(config: AnyModelConfig, tokenizer: Tokenizer) -> tuple[FirstIds, ...]:
    """Return what keeps a padded vocabulary to its tokenizer's ids.

    A published tokenizer may have tokens that its model has not: ids are compared, not counts.
    """
    published = isinstance(tokenizer, PretrainedTokenizer)
    if tokenizer.vocab_size > config.vocab_size and not published:
        rule = f"the model has {config.vocab_size}"
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens: {rule}")
    known = FirstIds(tokenizer.vocab_size)
    return (known,) if tokenizer.vocab_size < config.vocab_size else ()


def _first_prompt(tokenizer: Tokenizer) -> np.ndarray:  # i32[P]
    with contextlib.suppress(ValueError):
        if len(ids := tokenizer.encode("\n")):
            return ids
    return np.zeros(1, np.int32)


def _ids(
    config: AnyModelConfig,
    step: Any,
    params: Params,
    history: np.ndarray,  # i32[P]
    num_tokens: int,
    sampler: Sample,
    key: jax.Array,
    processors: Sequence[HistoryProcessor],
    stop_ids: Sequence[int],
    cache_dtype: jax.typing.DTypeLike | None,
    matcher: Matcher | None,
) -> Iterator[int]:
    """Yield token after token; where the text outgrows max_len, read its last half anew."""
    length = longest_text(config)
    part, written, given = 0, 0, len(history)
    while num_tokens > 0:
        read = history if len(history) <= length else history[-max(1, length // 2) :]
        count = min(num_tokens, length - len(read) + 1)
        given = max(0, given - (len(history) - len(read)))  # of what is read, the prompt's
        gone = written - (len(read) - given)
        state = init_decode_state(config, None, 1, length, dtype=cache_dtype)
        own, these = (
            jax.random.fold_in(key, part),
            tuple(
                _Resumed(_unsaid(processor, gone), given) if part else processor
                for processor in processors
            ),
        )
        tokens: Iterator[int]
        if matcher is None:
            found = stream(
                step, params, jnp.asarray(read[None]), state, num_tokens=count, sampler=sampler,
                key=own, processors=these, stop=stop_ids,
            )  # fmt: skip
            tokens = (int(row[0]) for row in found)
        else:
            keys = [jax.random.fold_in(own, 0)]
            numbered = _constrained(
                config, step, params, read, state, count, keys, [matcher], sampler, these, stop_ids
            )
            tokens = (token for _, token in numbered)
        new = []
        for token in tokens:
            new.append(token)
            yield token
        if (new and new[-1] in stop_ids) or (matcher is not None and matcher.ended):
            return
        history = np.concatenate([read, np.array(new, read.dtype)])
        num_tokens, part, written = num_tokens - count, part + 1, written + count


def _constrained(
    config: AnyModelConfig,
    step: Any,
    params: Params,
    prompt: np.ndarray,  # i32[P]
    state: Any,
    num_tokens: int,
    keys: Sequence[jax.Array],
    matchers: Sequence[Matcher],
    sampler: Sample,
    processors: Sequence[HistoryProcessor],
    stop_ids: Sequence[int],
) -> Iterator[tuple[int, int]]:
    """Yield the number of a text and its next token, or -1 where none can follow.

    Text n goes on with the prompt, drawn with `keys[n]`, and has the form that `matchers[n]` says.
    """
    needed = len(prompt) + num_tokens - 1
    parts = serve(
        step,
        params,
        [
            Request(prompt, num_tokens, key=key, constraint=matcher)
            for key, matcher in zip(keys, matchers, strict=True)
        ],
        state,
        slots=len(keys),
        capacity=config.max_len if isinstance(config, ModelConfig) else bucket(needed),
        sampler=sampler,
        processors=processors,
        stop=stop_ids,
        stream=True,
    )
    for part in parts:
        if part.error is not None:
            raise ValueError(part.error)
        yield from ((part.id, token) for token in part.tokens.tolist())
        if part.end == "nonfinite":
            yield part.id, -1


@dataclass(frozen=True)
class _Resumed:
    """Call a processor where, of what is read anew, all after `given` tokens was written."""

    processor: HistoryProcessor
    given: int

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        prompt = jnp.full_like(history.prompt, self.given)
        return self.processor(replace(history, prompt=prompt), logits)


def _unsaid(processor: HistoryProcessor, gone: int) -> HistoryProcessor:
    """Return what is left of a count of new tokens once `gone` are out of sight; others as is."""
    match processor:
        case Force(tokens) if gone:
            return Force(*tokens[gone:]) if len(tokens) > gone else _keep
        case ForceLast(n, token) if gone:
            return ForceLast(n - gone, token) if n > gone else _keep
        case MinLength(n, stop) if gone:
            return MinLength(max(0, n - gone), stop)
    return processor


def _keep(history: History, logits: jax.Array) -> jax.Array:
    return logits
