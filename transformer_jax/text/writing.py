"""Write texts with a model: check what is asked of it, and go on with prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import jax
import numpy as np

from transformer_jax.checks import check_count, check_key
from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.model import as_transformer
from transformer_jax.decoding.arguments import bucket
from transformer_jax.decoding.completion import TextGenerator
from transformer_jax.decoding.logit_processors import (
    Force,
    ForceLast,
    HistoryProcessor,
    check_processors,
)
from transformer_jax.decoding.samplers import Greedy, Sample, Temperature
from transformer_jax.decoding.structured import Form, Grammar
from transformer_jax.decoding.writer import check_stop_strings
from transformer_jax.models.places import Edit
from transformer_jax.text.reading import Reader, published_run
from transformer_jax.text.translation import translate
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer

NUM_TOKENS = 400
"""New tokens of a text, where none are asked for."""


Written = str | list[str] | Iterator[str]
"""A text, one for each of a list or of `samples`, or the pieces of a stream."""


class Writing(TypedDict, total=False):
    """Name what `LanguageModel.chat` takes besides; its docstring says what each is."""

    stop: str | Sequence[str]
    sampler: Greedy | Sample | None
    key: jax.Array | None
    processors: Sequence[HistoryProcessor]
    slots: int
    cache_dtype: jax.typing.DTypeLike | None
    edit: Mapping[str, Edit]
    schema: Mapping[str, Any] | None
    regex: str | None
    grammar: str | None


class Searching(Writing, total=False):
    """Name what `LanguageModel.generate` takes besides; its docstring says what each is."""

    beams: int | None


class Ends(TypedDict, total=False):
    """Name fields of a `TextGenerator` that are passed on as they are."""

    stop: str | Sequence[str]
    cache_dtype: jax.typing.DTypeLike | None
    edit: Mapping[str, Edit]
    grammar: Grammar | None


class Writer(Reader):
    """Go on with prompts, and write the targets of sources."""

    def _refuse(self, given: Mapping[Any, object], rule: str) -> None:
        """Raise ConfigError for an argument that was given."""
        for name, value in given.items():
            if value is not None and value is not False and not _is_empty(value):
                what = self.name if self.task is None else f"a run of task {self.task.kind!r}"
                raise ConfigError(f"{name} is {value!r:.80}: of {what}, {rule}")

    def _generator(
        self,
        sampler: Greedy | Sample | None = None,
        key: jax.Array | None = None,
        processors: Sequence[HistoryProcessor] = (),
        samples: int | None = None,
        **options: Unpack[Ends],
    ) -> TextGenerator:
        """Return what writes with the model; without a sampler it takes the likeliest tokens."""
        if sampler is not None and not isinstance(sampler, Greedy | Sample):
            raise ValueError(f"sampler is {sampler!r:.80}: must be Greedy() or a Sample(...)")
        if key is not None:
            check_key("key", key)
            if sampler is None and self.kind != "masks":
                raise ValueError("key is given without a sampler: nothing is drawn, give Sample()")
        if sampler is None or isinstance(sampler, Greedy):
            if samples is not None:
                rule = "needs a sampler that draws, such as Sample(), and a key"
                raise ValueError(f"samples is {samples}: {rule}")
            sampler, key = Sample(Temperature(0.0)), jax.random.key(0)
        if key is None:
            raise ValueError(f"key is None: {sampler!r} draws random numbers")
        return TextGenerator(
            self.config, self.params, self.tokenizer, sampler=sampler, key=key,
            processors=(*self.model.processors, *check_processors(processors)),
            stop_ids=self.model.stop_ids, **options,
        )  # fmt: skip

    def _grammar(self, forms: Mapping[Form, Any]) -> Grammar | None:
        """Return the one form that was given, for the tokens of the model."""
        given = [form for form, content in forms.items() if content is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]}: give one of them")
        if not given:
            return None
        return Grammar(
            given[0],
            forms[given[0]],
            self.tokenizer,
            self.config.vocab_size,
            tuple(self.model.stop_ids),
        )

    def _written(
        self,
        generator: TextGenerator,
        prompts: list[np.ndarray],
        num_tokens: int | None,
        samples: int | None,
        slots: int,
        is_list: bool,
        stream: bool,
    ) -> Written:
        """Go on with prompts: one in pieces, one in many ways, or many side by side."""
        count = NUM_TOKENS if num_tokens is None else num_tokens
        if samples is not None and num_tokens is None:
            count = max(1, min(count, self.room(prompts[0])))
        if not is_list:
            own = sized(generator, prompts, count)
            if samples is not None:
                return own.samples(prompts[0], count, samples)
            pieces = own.complete(prompts[0], count)
            return pieces if stream else "".join(pieces)
        found, fitting = [""] * len(prompts), []
        for n, prompt in enumerate(prompts):
            if self.room(prompt) >= count:
                fitting.append(n)
                continue
            own = replace(generator, key=jax.random.fold_in(generator.key, n))
            found[n] = "".join(sized(own, [prompt], count).complete(prompt, count))
        if fitting:
            parts = [prompts[n] for n in fitting]
            at_once = min(slots, bucket(len(parts)))
            answers = sized(generator, parts, count).answer(
                parts, count, slots=at_once, numbers=fitting
            )
            for n, text in answers:
                found[n] = text
        return found

    def _masked_run(self) -> TrainConfig:
        if self.model.run is not None:
            return self.model.run
        return published_run(as_transformer(self.config), self.name)

    def _source(self, text: str) -> np.ndarray:  # i32[S]
        assert isinstance(self.tokenizer, PretrainedTokenizer)
        ids = self.tokenizer.encode(text, special_tokens=True)
        if not text or not len(ids):
            raise ConfigError(f"prompt is {text!r}: an encoder-decoder needs a source")
        return ids

    def _target_count(self, num_tokens: int | None) -> int:
        config = as_transformer(self.config)
        count = min(NUM_TOKENS, config.max_len) if num_tokens is None else num_tokens
        if config.positions is not None and config.positions.absolute and count > config.max_len:
            raise ConfigError(f"num_tokens is {count}: {config.max_len} fit (max_len)")
        return count

    def _forcing(
        self, processors: Sequence[HistoryProcessor], count: int
    ) -> tuple[HistoryProcessor, ...]:
        """Return processors, and what is forced upon every target of a published model."""
        forced: list[HistoryProcessor] = []
        if self.model.forced_bos_id is not None:
            forced.append(Force(self.model.forced_bos_id))  # also where it is banned
        if self.model.forced_eos_id is not None:
            forced.append(ForceLast(count, self.model.forced_eos_id))
        return (*processors, *forced)

    def _targets(
        self,
        generator: TextGenerator,
        texts: list[str],
        num_tokens: int | None,
        samples: int | None,
        is_list: bool,
        stream: bool,
    ) -> Written:
        """Write the targets of sources with a published encoder-decoder."""
        count = self._target_count(num_tokens)
        generator = replace(generator, processors=self._forcing(generator.processors, count))
        found = []
        for n, text in enumerate(texts):
            key = jax.random.fold_in(generator.key, n) if is_list else generator.key
            own, source = replace(generator, key=key), self._source(text)
            found.append(
                translate(own, source, count, start=self.model.start_id, count=samples or 1)  # type: ignore[arg-type]
            )
        if samples is not None:
            return found[0]
        return as_given([targets[0] for targets in found], is_list, stream)


def _is_empty(value: object) -> bool:
    return isinstance(value, tuple) and not value


def sized(generator: TextGenerator, prompts: Sequence[np.ndarray], count: int) -> TextGenerator:
    """Return the generator with a cache as long as the texts need."""
    return replace(generator, config=shortened(generator.config, max(map(len, prompts)) + count))


def shortened(config: AnyModelConfig, needed: int) -> AnyModelConfig:
    """Return a config with room for so many tokens, whose cache is no larger than it has to be."""
    most = -(-needed // 64) * 64
    return config.with_max_len(most if config.max_len is None else min(config.max_len, most))


def checked(
    counts: Mapping[str, int | None],
    stop: str | Sequence[str],
    stream: bool,
    listed: int | None,  # how many prompts a list has, where one was given
) -> tuple[str, ...]:
    """Return the stop strings; ValueError for a count, or for wishes that exclude each other."""
    for name, value in counts.items():
        if value is not None:
            check_count(name, value, 1)
    if listed is not None and (stream or counts["samples"] is not None):
        name = "stream" if stream else "samples"
        raise ValueError(f"{name}: needs one prompt, not a list of {listed}")
    if stream and counts["samples"] is not None:
        raise ValueError("stream and samples: give one of them")
    return check_stop_strings(stop)


def as_texts(name: str, given: str | Sequence[str]) -> tuple[list[str], bool]:
    """Return texts, and whether a list of them was given."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is {given!r:.80}: must be a text or a list of texts")
    if not texts:
        raise ValueError(f"{name} is an empty list: must have a text")
    return list(texts), not isinstance(given, str)


def as_given(texts: list[str], is_list: bool, stream: bool) -> Written:
    """Return a list's texts, the one text, or an iterator of it."""
    if stream:
        return iter([text for text in texts if text])
    return texts if is_list else texts[0]


def without_first_space(pieces: Iterator[str]) -> Iterator[str]:
    """Yield pieces, the first without the space that a first word may bring."""
    for n, piece in enumerate(pieces):
        if piece := piece if n else piece.removeprefix(" "):
            yield piece
