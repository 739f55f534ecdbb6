"""Go on with texts: in pieces, drawn several times, searched, looked up, or many at once."""

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
"""A text, or the ids i32[P] that stand for it."""


@dataclass(frozen=True)
class FirstIds:
    """Exclude the ids from `count` on, which a padded vocabulary has and its tokenizer has not."""

    count: int

    def __call__(self, logits: jax.Array) -> jax.Array:  # f32[B, V] -> f32[B, V]
        # Vocabularies are padded for the hardware: rows past the tokenizer's ids were never
        # trained.
        ids = jnp.arange(logits.shape[-1])[None]
        return jnp.where(ids < self.count, logits, -jnp.inf)


@value_class(eq=False)
class TextGenerator:
    """Write texts with a model: how tokens are chosen, and where a text ends.

    Attributes:
        config: of a model that writes tokens.
        params: of the model.
        tokenizer: of its texts.
        sampler: draws the tokens.
        key: a single key.
        processors: change the logits by the text that the model has read.
        stop: a text, or several, before the first of which a result ends.
        stop_ids: tokens before the first of which it ends.
        cache_dtype: of keys and values; None is the compute dtype.
        edits: those of the model, `model.edits`.
        grammar: the form that a text is to have; None lets it have any.
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
        """Return the generator with a cache as long as `count` tokens after the prompts need."""
        return replace(self, config=shortened(self.config, max(map(len, prompts)) + count))

    def complete(self, prompt: TextOrIds, num_tokens: int) -> Iterator[str]:
        """Yield the text after a prompt, a piece at a time.

        Where the text outgrows the model's max_len, the model reads its last max_len / 2 tokens
        anew and goes on: a token costs one decode step, and now and then half a window. A penalty
        still counts a token that was written and is read anew, and none that is out of sight;
        `Force`, `ForceLast` and `MinLength` count all that was written.

        Args:
            prompt: a text, or i32[P], ids; one without a token starts at a newline.
            num_tokens: the most tokens that are written.
        """
        matcher = None if self.grammar is None else self.grammar.start()
        ids = self._ids(self._read(prompt), num_tokens, self.known_sampler(), matcher)
        return pieces(self.tokenizer, ids, self.stop, self.stop_ids)

    def samples(self, prompt: TextOrIds, num_tokens: int, count: int) -> list[str]:
        """Draw several texts after one prompt, which is read once and forked.

        With `processors`, which have to see the prompt, it is read `count` times.

        Args:
            prompt: a text, or i32[P], ids.
            num_tokens: the most tokens of each.
            count: how many are drawn, at least 1.
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
        # Processors need the prompt's tokens in their history, so then every row reads it.
        if columns > 1 and not self.processors:
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
        """Return the best texts of a beam search, which draws nothing, and their scores.

        Args:
            prompt: a text, or i32[P], ids.
            num_tokens: the most tokens of each.
            beams: texts that are followed side by side, at least 1.
            results: how many are returned, from 1 to beams.
            length_penalty: alpha of log p / length^alpha.
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
        """Write a text by speculation, which proposes what followed the same words before.

        Args:
            prompt: a text, or i32[P], ids.
            num_tokens: the most tokens that are written.
            num_draft: the most that are proposed at a time.
        """
        config = as_transformer(self.config)
        space: dict[str, Any] = dict(batch=1, capacity=config.max_len, dtype=self.cache_dtype)
        # A ring overwrites its oldest key: rejected tokens may be taken back only if it has room.
        if isinstance(config.window, int):
            space["capacity"] += num_draft
        elif config.window is not None:
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
        """Yield the number of a prompt and the text after it, as each is done.

        Prompt n has the text that `complete` draws with `fold_in(key, n)`, as far as it reads
        nothing anew.

        Args:
            prompts: texts, or i32[P], ids of each.
            num_tokens: the most tokens of each.
            slots: how many run at once.
            numbers: n of each prompt; None counts from 0.
        """
        read = [self._read(prompt) for prompt in prompts]
        requests = [
            Request(
                ids, num_tokens, key=first_key(jax.random.fold_in(self.key, n)), id=n,
                constraint=None if self.grammar is None else self.grammar.start(),
            )
            for n, ids in zip(range(len(read)) if numbers is None else numbers, read, strict=True)
        ]  # fmt: skip
        longest = longest_text(self.config)
        # A recurrent model reads any length, but a history of any length has no memory.
        if self.config.max_len is None:  # processors see a history of as many tokens
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
        """Return the processors of a search, which has no sampler to exclude unknown ids."""
        known = known_ids(self.config, self.tokenizer)
        return (*map(WithoutHistory, known), *self.processors)

    def known_sampler(self) -> Sample:
        """Return the sampler, which draws ids of the tokenizer alone."""
        return Sample(*known_ids(self.config, self.tokenizer), *self.sampler.processors)

    def _step(self) -> Any:
        # one that writes: `make_step` refuses the others
        model: Any = build(self.config).clone(edits=self.edits)
        return make_step(model).told(apart=True)

    def _empty(self, capacity: int | None = None) -> Any:
        """Return the state of one row before any token."""
        capacity = longest_text(self.config) if capacity is None else capacity
        return init_decode_state(self.config, None, 1, capacity, dtype=self.cache_dtype)

    def _read(self, prompt: TextOrIds) -> np.ndarray:  # i32[P]
        """Return the prompt's tokens; ValueError for one that the model does not have."""
        ids, count = read_prompt(self.tokenizer, prompt), self.config.vocab_size
        if len(ids) and not 0 <= ids.min() <= ids.max() < count:
            wrong = int(ids[np.argmax((ids < 0) | (ids >= count))])
            raise ValueError(f"the prompt has id {wrong}: the model has {count} tokens")
        return ids

    def _text(self, ids: Iterable[int]) -> str:
        return "".join(pieces(self.tokenizer, ids, self.stop, self.stop_ids))

    def _ids(
        self,
        history: np.ndarray,  # i32[P]
        num_tokens: int,
        sampler: Sample,
        matcher: Matcher | None,
    ) -> Iterator[int]:
        """Yield token after token; where the text outgrows max_len, read its last half anew."""
        length, own = longest_text(self.config), self._step()
        part, written, given, first = 0, 0, len(history), 0
        while num_tokens > 0:
            # Half: a longer part would soon be full again, and a shorter one would see less of the
            # text.
            read = history if len(history) <= length else history[-max(1, length // 2) :]
            first += len(history) - len(read)
            step = own.told(part=True, first=first) if first else own
            count = min(num_tokens, length - len(read) + 1)
            given = max(0, given - (len(history) - len(read)))  # of what is read, the prompt's
            # Tokens that were written and are out of sight; counts such as MinLength go on from
            # them.
            gone = written - (len(read) - given)
            # Tokens are numbered from 0 in each part: with one key, two parts would draw alike.
            key, processors = jax.random.fold_in(self.key, part), tuple(self.processors)
            # In the first part prompt and text are told apart by the history itself.
            if part:
                processors = tuple(_Resumed(_unsaid(one, gone), given) for one in processors)
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
            num_tokens, part, written = num_tokens - count, part + 1, written + count

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
        """Yield the number of a text and its next token; ValueError if none can follow.

        Text n goes on with the prompt, drawn with `keys[n]`, and has the form that `matchers[n]`
        says.
        """
        capacity = longest_text(self.config)
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
    """Return the scores and the texts of a search of one row; ValueError where it found none."""
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


def longest_text(config: AnyModelConfig) -> int:
    """Return how many tokens a model reads at most: max_len; without a cache, any number."""
    return 2**30 if config.max_len is None else config.max_len


def shortened(config: AnyModelConfig, needed: int) -> AnyModelConfig:
    """Return a config whose cache has room for `needed` tokens and not many more."""
    most = -(-needed // 64) * 64
    return config.with_max_len(most if config.max_len is None else min(config.max_len, most))


def room(config: AnyModelConfig, tokenizer: Tokenizer, prompt: TextOrIds) -> int:
    """Return how many tokens fit after a prompt before any text is read anew."""
    return longest_text(config) + 1 - len(read_prompt(tokenizer, prompt))


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
    tokenizer: Tokenizer, prompt: TextOrIds, begin: int | None = None
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
        # Many models, such as GPT-2's, begin a text with the token that ends one.
        starts = [own.special_ids[r] for r in ("bos", "eos") if r in own.special_ids]
        if len(ids) or starts:
            return ids if len(ids) else np.array(starts[:1], np.int32)
    ids = tokenizer.encode(prompt)
    if not len(ids):
        with contextlib.suppress(ValueError):  # a tokenizer of characters may not know the newline
            ids = tokenizer.encode("\n")
    return ids if len(ids) else np.zeros(1, np.int32)


def known_ids(config: AnyModelConfig, tokenizer: Tokenizer) -> tuple[FirstIds, ...]:
    """Return what keeps a padded vocabulary to its tokenizer's ids.

    A published tokenizer may have tokens that its model has not: ids are compared, not counts.
    """
    # Added tokens of a published folder may lie past the rows of its model.
    published = isinstance(tokenizer, PretrainedTokenizer)
    if tokenizer.vocab_size > config.vocab_size and not published:
        rule = f"the model has {config.vocab_size}"
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens: {rule}")
    known = FirstIds(tokenizer.vocab_size)
    return (known,) if tokenizer.vocab_size < config.vocab_size else ()


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
