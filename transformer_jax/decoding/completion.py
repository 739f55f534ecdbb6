"""Text completion with streaming, sampling, beam search, prompt lookup or batching."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import INT32, check_count
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.model import as_transformer
from transformer_jax.decoding.arguments import bucket
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import Beams, LengthPenalty, beam_search
from transformer_jax.decoding.continuous_batching import Request, serve_requests
from transformer_jax.decoding.generation import NO_TOKEN, generate, prefill, stream
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
from transformer_jax.decoding.structured import Grammar, Matcher
from transformer_jax.decoding.writer import check_stop_strings, pieces
from transformer_jax.models.factory import build, init_cache, init_decode_state
from transformer_jax.models.places import Edits
from transformer_jax.programs import program
from transformer_jax.pytree import Params
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import encode_text, frame, plain
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.values import value_class

TextOrIds = str | np.ndarray
"""A string, or an array of token IDs i32[P]."""


@dataclass(frozen=True)
class ExcludePadding:
    """Processor that excludes the padding of a vocabulary, the IDs from `count` on."""

    count: int

    def __call__(self, logits: jax.Array) -> jax.Array:  # f32[B, V] -> f32[B, V]
        # Vocabularies are padded for the hardware, and the embeddings of the padding are not
        # trained.
        ids = jnp.arange(logits.shape[-1])[None]
        return jnp.where(ids < self.count, logits, -jnp.inf)


@value_class(eq=False)
class TextGenerator:
    """Model that generates text, with a sampler and stop conditions.

    Attributes:
        config: config of a model that generates tokens.
        params: parameters of the model.
        tokenizer: tokenizer of the model.
        sampler: sampler that draws the tokens.
        key: a single PRNG key.
        processors: functions that change the logits based on the text so far.
        stop: one or more stop strings. The text ends before the first stop string that occurs.
        stop_ids: stop tokens. The text ends before the first stop token that occurs.
        cache_dtype: dtype of the cached keys and values; None means the compute dtype.
        edits: edits of the model, `model.edits`.
        grammar: grammar that the text must follow; None allows any text.
    """

    config: AnyModelConfig
    params: Params
    tokenizer: Tokenizer
    _: KW_ONLY
    sampler: Sample
    key: jax.Array
    processors: Sequence[HistoryProcessor] = ()
    stop: str | Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    cache_dtype: jax.typing.DTypeLike | None = None
    edits: Edits = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", check_stop_strings(self.stop))
        object.__setattr__(self, "processors", check_processors(self.processors))

    def sized(self, prompts: Sequence[np.ndarray], count: int) -> TextGenerator:
        """Return a generator whose cache is just long enough for the prompts and `count` tokens."""
        return replace(self, config=shortened(self.config, max(map(len, prompts)) + count))

    def complete(self, prompt: TextOrIds, num_tokens: int) -> Iterator[str]:
        """Yield the text after a prompt, piece by piece.

        If the text exceeds the model's max_len, the model re-reads the last max_len / 2 tokens and
        continues. Penalties then ignore the dropped tokens, but `Force`, `ForceLast` and
        `MinLength` count all generated tokens.

        Args:
            prompt: a string or token IDs i32[P]. An empty prompt starts a new text.
            num_tokens: the maximum number of new tokens.
        """
        matcher = None if self.grammar is None else self.grammar.start()
        ids = self._stream_ids(self._read(prompt), num_tokens, self.known_sampler(), matcher)
        return pieces(self.tokenizer, ids, self.stop, self.stop_ids)

    def samples(self, prompt: TextOrIds, num_tokens: int, count: int) -> list[str]:
        """Draw several continuations of one prompt, which is read once and forked.

        With `processors`, the prompt is read `count` times, because it must be part of each
        history.

        Args:
            prompt: a string or token IDs i32[P].
            num_tokens: the maximum number of new tokens per sample.
            count: the number of samples, at least 1.
        """
        check_count("count", count, 1)
        check_count("num_tokens", num_tokens, 1, INT32.max)
        step, read, empty = self._step(), self._read(prompt)[None], self._empty()
        columns, sampler = read.shape[1], self.known_sampler()
        step.check(read, empty, np.array([columns + num_tokens - 1]))
        if self.grammar is not None:
            keys = [jax.random.fold_in(self.key, n) for n in range(count)]
            matchers = [self.grammar.start() for _ in keys]
            ids: list[list[int]] = [[] for _ in keys]
            for n, token in self._constrained(
                read[0], num_tokens, keys, matchers, sampler, self.processors
            ):
                ids[n].append(token)
            return [self._text(row) for row in ids]
        tokens = jnp.asarray(read)
        # Processors need the prompt in their history, so every row must read the prompt.
        if columns > 1 and not self.processors:
            # The last token is left for `generate`, which needs at least one token to read in each
            # row.
            lengths = jnp.full((1,), columns - 1)
            empty = _prefill(step, self.params, tokens[:, :-1], empty, lengths, None)[1]
            tokens = tokens[:, -1:]
        out = generate(
            step, self.params, jnp.repeat(tokens, count, axis=0), fork(empty, count),
            num_tokens=num_tokens, sampler=sampler, key=self.key, processors=self.processors,
            stop=self.stop_ids,
        )  # fmt: skip
        return [self._text(row.tolist()) for row in out.rows()]

    def search(
        self,
        prompt: TextOrIds,
        num_tokens: int,
        *,
        beams: int,
        results: int = 1,
        length_penalty: float = 0.0,
    ) -> list[tuple[float, str]]:
        """Return the best texts of a deterministic beam search, with their scores.

        Args:
            prompt: a string or token IDs i32[P].
            num_tokens: the maximum number of new tokens per text.
            beams: the number of beams, at least 1.
            results: the number of texts to return, from 1 to beams.
            length_penalty: alpha in the score log p / length^alpha.
        """
        found = beam_search(
            self._step(), self.params, jnp.asarray(self._read(prompt)[None]), self._empty(),
            num_tokens=num_tokens, num_beams=beams, num_results=results, stop=self.stop_ids,
            processors=self.search_processors(), length_penalty=LengthPenalty(length_penalty),
        )  # fmt: skip
        return scored_texts(
            found, lambda ids: "".join(pieces(self.tokenizer, ids, (), self.stop_ids))
        )

    def look_up(
        self, prompt: TextOrIds, num_tokens: int, num_draft: int
    ) -> tuple[str, Speculation]:
        """Generate text by speculative decoding with `PromptLookup`, which copies earlier text.

        Args:
            prompt: a string or token IDs i32[P].
            num_tokens: the maximum number of new tokens.
            num_draft: the maximum number of tokens to propose at a time.
        """
        config = as_transformer(self.config)
        space: dict[str, Any] = dict(batch=1, capacity=config.max_len, dtype=self.cache_dtype)
        # Rewinding rejected tokens requires slots for the keys that a ring would overwrite, and
        # tokens that a state does not include yet.
        if isinstance(config.window, int):
            space["capacity"] += num_draft
        if isinstance(config.window, tuple) or config.has_state:
            space["slack"] = num_draft
        out = speculate(
            self._step(), self.params, jnp.asarray(self._read(prompt)[None]),
            init_cache(config, **space), proposer=PromptLookup(), num_tokens=num_tokens,
            num_draft=num_draft, sampler=self.known_sampler(), key=self.key,
            processors=self.processors, stop=self.stop_ids,
        )  # fmt: skip
        return self._text(out.rows()[0].tolist()), out

    def answer(
        self,
        prompts: Sequence[TextOrIds],
        num_tokens: int,
        *,
        slots: int,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, str]]:
        """Yield the number of each prompt and the text after it, in the order of completion.

        Up to max_len, the text of prompt n equals the text from `complete` with key `fold_in(key,
        n)`.

        Args:
            prompts: strings or token IDs i32[P].
            num_tokens: the maximum number of new tokens per prompt.
            slots: the number of prompts to run at once.
            numbers: the number n of each prompt; None means 0, 1, ...
        """
        read = [self._read(prompt) for prompt in prompts]
        requests = [
            Request(
                ids, num_tokens, key=first_key(jax.random.fold_in(self.key, n)), id=n,
                constraint=None if self.grammar is None else self.grammar.start(),
            )
            for n, ids in zip(range(len(read)) if numbers is None else numbers, read, strict=True)
        ]  # fmt: skip
        longest = max_text_tokens(self.config)
        # A recurrent model has no limit, but the history of the processors must have a fixed size.
        if self.config.max_len is None:
            longest = bucket(max((len(ids) for ids in read), default=1) + num_tokens)
        done = serve_requests(
            self._step(), self.params, requests, self._empty(longest), slots=slots,
            capacity=longest, sampler=self.known_sampler(), processors=self.processors,
            stop=self.stop_ids,
        )  # fmt: skip
        for completion in done:
            if completion.error is not None:
                raise ValueError(f"prompt {completion.id}: {completion.error}")
            yield completion.id, self._text(completion.tokens.tolist())

    def search_processors(self) -> tuple[HistoryProcessor, ...]:
        """Return the processors for beam search, which has no sampler to exclude padding IDs."""
        return (*map(WithoutHistory, known_ids(self.config, self.tokenizer)), *self.processors)

    def known_sampler(self) -> Sample:
        """Return the sampler, restricted to the token IDs of the tokenizer."""
        return Sample(*known_ids(self.config, self.tokenizer), *self.sampler.processors)

    def _step(self) -> Any:
        # `make_step` raises an error for models that do not generate tokens.
        model: Any = build(self.config).clone(edits=self.edits)
        return make_step(model).with_facts(apart=True)

    def _empty(self, capacity: int | None = None) -> Any:
        capacity = max_text_tokens(self.config) if capacity is None else capacity
        return init_decode_state(self.config, None, 1, capacity, dtype=self.cache_dtype)

    def _read(self, prompt: TextOrIds) -> np.ndarray:  # i32[P]
        """Return the prompt's tokens. Raise ValueError if one is outside the model's vocabulary."""
        ids, count = read_prompt(self.tokenizer, prompt), self.config.vocab_size
        if len(ids) and not 0 <= ids.min() <= ids.max() < count:
            wrong = int(ids[np.argmax((ids < 0) | (ids >= count))])
            raise ValueError(
                f"the prompt contains ID {wrong}, but the model has only {count} tokens"
            )
        return ids

    def _text(self, ids: Iterable[int]) -> str:
        return "".join(pieces(self.tokenizer, ids, self.stop, self.stop_ids))

    def _stream_ids(
        self,
        history: np.ndarray,  # i32[P]
        num_tokens: int,
        sampler: Sample,
        matcher: Matcher | None,
    ) -> Iterator[int]:
        """Yield tokens one by one. If the text exceeds max_len, re-read its last half."""
        length, whole_step = max_text_tokens(self.config), self._step()
        part, generated, prompt_length, first = 0, 0, len(history), 0
        while num_tokens > 0:
            # Re-reading more text would soon fill the cache again, and re-reading less would lose
            # context.
            read = history if len(history) <= length else history[-max(1, length // 2) :]
            dropped = len(history) - len(read)
            first += dropped
            step = whole_step.with_facts(part=True, first=first) if first else whole_step
            count = min(num_tokens, length - len(read) + 1)
            prompt_length = max(0, prompt_length - dropped)
            # Processors that count tokens, such as `MinLength`, include generated tokens that were
            # dropped.
            forgotten = generated - (len(read) - prompt_length)
            # Each part numbers its tokens from 0, so using one key for all parts would repeat
            # random numbers.
            key, processors = jax.random.fold_in(self.key, part), tuple(self.processors)
            # In the first part, the history already separates the prompt from the new tokens.
            if part:
                processors = tuple(
                    _RereadProcessor(_remaining(one, forgotten), prompt_length)
                    for one in processors
                )
            tokens: Iterator[int]
            if matcher is None:
                found = stream(
                    step, self.params, jnp.asarray(read[None]), self._empty(), num_tokens=count,
                    sampler=sampler, key=key, processors=processors, stop=self.stop_ids,
                )  # fmt: skip
                tokens = (int(row[0]) for row in found)
            else:
                keys = [jax.random.fold_in(key, 0)]
                numbered = self._constrained(
                    read, count, keys, [matcher], sampler, processors, step
                )
                tokens = (token for _, token in numbered)
            new = []
            for token in tokens:
                new.append(token)
                yield token
            if (new and new[-1] in self.stop_ids) or (matcher is not None and matcher.ended):
                return
            history = np.concatenate([read, np.array(new, read.dtype)])
            num_tokens, part, generated = num_tokens - count, part + 1, generated + count

    def _constrained(
        self,
        prompt: np.ndarray,  # i32[P]
        num_tokens: int,
        keys: Sequence[jax.Array],
        matchers: Sequence[Matcher],
        sampler: Sample,
        processors: Sequence[HistoryProcessor],
        step: Any = None,
    ) -> Iterator[tuple[int, int]]:
        """Yield the number of a sample and its next token. Raise ValueError if no token can follow.

        Sample n continues the prompt with `keys[n]` under the constraint `matchers[n]`.
        """
        capacity = max_text_tokens(self.config)
        if self.config.max_len is None:
            capacity = bucket(len(prompt) + num_tokens - 1)
        parts = serve_requests(
            self._step() if step is None else step,
            self.params,
            [
                Request(prompt, num_tokens, key=key, constraint=matcher)
                for key, matcher in zip(keys, matchers, strict=True)
            ],
            self._empty(),
            slots=len(keys),
            capacity=capacity,
            sampler=sampler,
            processors=processors,
            stop=self.stop_ids,
            stream=True,
        )
        for part in parts:
            if part.error is not None:
                raise ValueError(part.error)
            yield from ((part.id, token) for token in part.tokens.tolist())


_prefill = program(static=("step",))(prefill)


def scored_texts(found: Beams, text_of: Callable[[list[int]], str]) -> list[tuple[float, str]]:
    """Return the scores and texts of a search with one row. Raise ValueError if there are none."""
    scores, tokens, lengths = (
        np.asarray(x)[0] for x in (found.scores, found.tokens, found.lengths)
    )
    if not lengths[0]:
        raise ValueError(NO_TOKEN)
    return [
        (float(score), text_of(row[:length].tolist()))
        for score, row, length in zip(scores, tokens, lengths, strict=True)
        if length
    ]


def max_text_tokens(config: AnyModelConfig) -> int:
    """Return the maximum number of tokens that a model can read: max_len, or 2^30 if unlimited."""
    return 2**30 if config.max_len is None else config.max_len


def shortened(config: AnyModelConfig, needed: int) -> AnyModelConfig:
    """Return the config with max_len reduced to `needed`, rounded up to a multiple of 64."""
    most = -(-needed // 64) * 64
    return config.with_max_len(most if config.max_len is None else min(config.max_len, most))


def room(config: AnyModelConfig, tokenizer: Tokenizer, prompt: TextOrIds) -> int:
    """Return the number of tokens that fit after a prompt until the model must re-read text."""
    return max_text_tokens(config) + 1 - len(read_prompt(tokenizer, prompt))


def first_key(key: jax.Array) -> jax.Array:
    """Return the key that `complete` uses for the first part of the text."""
    return jax.random.fold_in(jax.random.fold_in(key, 0), 0)


@dataclass(frozen=True)
class WithoutHistory:
    """Adapter for calling a processor of logits with (history, logits)."""

    processor: ExcludePadding

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        return self.processor(logits)


def read_prompt(
    tokenizer: Tokenizer, prompt: TextOrIds, begin: int | None = None
) -> np.ndarray:  # i32[P]
    """Return the prompt's tokens, preceded by the special tokens of a published tokenizer.

    If the model was trained with `begin` as the first token, this token replaces the special
    tokens. An empty prompt becomes the tokens that begin text. If there are none, it becomes a
    newline, or token 0 if there is no newline token.
    """
    if not isinstance(prompt, str):
        return prompt
    if begin is not None:
        return np.append(np.int32(begin), encode_text(tokenizer, prompt)).astype(np.int32)
    if isinstance(published := plain(tokenizer), PretrainedTokenizer):
        text = published.encode(prompt, special_tokens=False)
        ids = np.concatenate([frame(published).first, text]).astype(np.int32)
        # Many models, such as GPT-2, start text with the end-of-text token.
        starts = [published.special_ids[r] for r in ("bos", "eos") if r in published.special_ids]
        if len(ids) or starts:
            return ids if len(ids) else np.array(starts[:1], np.int32)
    ids = tokenizer.encode(prompt)
    if not len(ids):
        with contextlib.suppress(ValueError):  # a character tokenizer may have no newline token
            ids = tokenizer.encode("\n")
    return ids if len(ids) else np.zeros(1, np.int32)


def known_ids(config: AnyModelConfig, tokenizer: Tokenizer) -> tuple[ExcludePadding, ...]:
    """Return a processor that excludes the padding IDs of the vocabulary, if there are any.

    Raise ValueError if the tokenizer has more tokens than the model.
    """
    # The added tokens of a published tokenizer may be outside the vocabulary of its model.
    published = isinstance(tokenizer, PretrainedTokenizer)
    if tokenizer.vocab_size > config.vocab_size and not published:
        rule = f"the model has {config.vocab_size}"
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, but {rule}")
    padded = tokenizer.vocab_size < config.vocab_size
    return (ExcludePadding(tokenizer.vocab_size),) if padded else ()


@dataclass(frozen=True)
class _RereadProcessor:
    """Processor for re-read text that treats its first `prompt_length` tokens as the prompt."""

    processor: HistoryProcessor
    prompt_length: int

    def __call__(self, history: History, logits: jax.Array) -> jax.Array:
        prompt = jnp.full_like(history.prompt, self.prompt_length)
        return self.processor(replace(history, prompt=prompt), logits)


def _remaining(processor: HistoryProcessor, forgotten: int) -> HistoryProcessor:
    """Subtract dropped tokens from a processor that counts new tokens. Return others unchanged."""
    match processor:
        case Force(tokens) if forgotten:
            return Force(*tokens[forgotten:]) if len(tokens) > forgotten else _unchanged
        case ForceLast(n, token) if forgotten:
            return ForceLast(n - forgotten, token) if n > forgotten else _unchanged
        case MinLength(n, stop) if forgotten:
            return MinLength(max(0, n - forgotten), stop)
    return processor


def _unchanged(history: History, logits: jax.Array) -> jax.Array:
    return logits
