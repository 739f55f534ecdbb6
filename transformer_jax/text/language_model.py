r"""Text in, text out: one object over the model of a training run, or over a published one.

    m = load("runs/book")
    m.generate("Once upon", 40, stop="\\n")
    m.score("Once upon a time").perplexity

The model's training decides what it does with a text (`kind`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import numpy as np

from transformer_jax.checks import check_count
from transformer_jax.config import ConfigError, DType
from transformer_jax.config.keywords import known_keywords, refuse_keywords
from transformer_jax.config.model import as_transformer
from transformer_jax.decoding.arguments import bucket
from transformer_jax.decoding.completion import TextGenerator, longest_text
from transformer_jax.decoding.speculative import Speculation
from transformer_jax.decoding.structured import Grammar
from transformer_jax.decoding.writer import cut_at_stop
from transformer_jax.loading import (
    Which,
    is_run,
    load_run,
    load_text_model,
    with_parameters_in,
    with_weights_held,
)
from transformer_jax.models.places import Edit
from transformer_jax.models.quantized import Kind as WeightKind
from transformer_jax.pretrained.safetensors_folder import SHARD_BYTES
from transformer_jax.pretrained.weights import open_weights
from transformer_jax.text.choices import Choices, Question, score_choices
from transformer_jax.text.continuations import (
    Continuation,
    check_continues,
    read_pair,
    score_requests,
)
from transformer_jax.text.evaluation import EvaluateOptions, evaluate
from transformer_jax.text.inspect import Inspect
from transformer_jax.text.options import (
    CHATS,
    FORMS,
    GENERATES,
    LOOKS_UP,
    SEARCHES,
    GenerateOptions,
    Options,
)
from transformer_jax.text.reading import NUM_TOKENS, Conversation, Reader
from transformer_jax.text.save import save_published, save_run
from transformer_jax.text.scores import Score, Scored, Windows, is_pair, score_text
from transformer_jax.tokenizers.languages import with_languages
from transformer_jax.tokenizers.pretrained import Message, PretrainedTokenizer
from transformer_jax.tokenizers.special import check_unpadded
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.tasks.classify import label_texts
from transformer_jax.training.tasks.masked import fill_masks, mask_candidates

Written = str | list[str] | Iterator[str]
"""A text, one for each of a list or of `samples`, or the pieces of a stream."""


@known_keywords
def load(
    path_or_id: str | Path,
    *,
    checkpoint: Which | None = None,
    init_from: str | Path | None = None,
    dtype: DType | None = None,
    max_len: int | None = None,
    weights: WeightKind | None = None,
) -> LanguageModel:
    """Load a model with its tokenizer.

    Args:
        path_or_id: the folder of a run (`fit`, train.py), a folder of the Hugging Face hub's form,
            a GGUF file, or the id of a repository of the hub, "ORG/NAME".
        checkpoint: for a run: "best", the one of the lowest held-out loss, or "last". None is best
            if there is one.
        init_from: for a run with adapters: the present path of the model that they adapt.
        dtype: for a published model: "float32", "bfloat16" or "float16"; None is the file's.
        max_len: for a published model: the longest text, in tokens; None is its own.
        weights: "bf16", "int8" or "int4" store the weights in fewer bits; None keeps them as they
            are.

    Raises:
        ConfigError: if an argument does not fit the model.
        CheckpointError: if a file cannot be read.
    """
    if not isinstance(path_or_id, str | Path):
        rule = "must be a folder, or the id of a repository of the hub"
        raise ConfigError(f"path_or_id is a {type(path_or_id).__name__}: {rule}")
    try:
        # A name that is no path, such as ORG/NAME, is looked up on the hub, below.
        of_run = is_run(str(path_or_id))
        files = Path(path_or_id) / "metrics.jsonl", Path(path_or_id) / "lock"
        began = any(file.exists() for file in files)  # a run that has saved nothing yet
    except OSError as error:  # a name that no file can have
        raise ConfigError(f"path_or_id is {str(path_or_id)!r:.60}: {error.strerror}") from None
    if of_run or began:
        for name, value in dict(dtype=dtype, max_len=max_len).items():
            if of_run and value is not None:  # one that saved nothing is refused for that
                raise ConfigError(f"{name} is {value!r}: a run has its own")
        model = load_run(path_or_id, checkpoint, init_from=init_from)
    else:
        for name, of_runs in dict(checkpoint=checkpoint, init_from=init_from).items():
            if of_runs is not None:
                rule = f"{str(path_or_id)!r} is no run, which alone has one"
                raise ConfigError(f"{name} is {str(of_runs)!r}: {rule}")
        model = load_text_model(path_or_id, dtype=dtype, max_len=max_len)
    if weights is not None:
        model = with_weights_held(model, weights)
    return LanguageModel(model, str(path_or_id))


class LanguageModel(Reader):
    """A model on texts; `load` makes one.

    `inspect` looks inside it, and `edited` returns a copy with other values inside.
    """

    @property
    def inspect(self) -> Inspect:
        """What is inside the model as it reads a text."""
        return Inspect(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, which names the tool of `inspect` of that name."""
            tool = "attention" if name in ("attend", "attention_weights") else name
            rule = f": use model.inspect.{tool}" if tool in vars(Inspect) and tool[0] != "_" else ""
            raise AttributeError(f"a LanguageModel has no attribute {name!r}{rule}")

    def edited(self, edit: Mapping[str, Edit]) -> LanguageModel:
        """Return a copy of the model with other values inside; every method uses them.

        A function gets the tokens of the prompt, then each new one by itself. In `score`,
        `continuations` and `multiple_choice` it gets all tokens of one text or window at once.

        Args:
            edit: functions by the names of places in the model (`transformer_jax.places`), such as
                those that `transformer_jax.inside` makes. They follow the edits that the model
                has.

        Raises:
            ValueError: if a name is not a place, or a value is not a function.
        """
        return replace(self, edited_module=self.module.edited(edit))

    def with_languages(self, source: str, target: str) -> LanguageModel:
        """Return a copy that translates from one language into another; it shares the parameters.

        For mBART, M2M-100 and NLLB.

        Args:
            source: the token of a language, such as "en_XX", "__en__" or "eng_Latn".
            target: another.

        Raises:
            ConfigError: if the model writes no targets, or was not published.
            DataError: if its tokenizer has no languages, or not these.
        """
        tokenizer = self.tokenizer
        if self.kind != "targets" or not isinstance(tokenizer, PretrainedTokenizer):
            raise ConfigError(f"languages: {self.name} is no published encoder-decoder")
        tokenizer = with_languages(tokenizer, source, target)
        return replace(self, model=replace(self.model, tokenizer=tokenizer))

    @overload
    def generate(
        self, prompt: str = "", num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: None = None, **options: Unpack[Options],
    ) -> str: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: str = "", num_tokens: int | None = None, *,
        stream: Literal[True], samples: None = None, **options: Unpack[Options],
    ) -> Iterator[str]: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: str = "", num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: int, **options: Unpack[Options],
    ) -> list[str]: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: None = None, **options: Unpack[Options],
    ) -> list[str]: ...  # fmt: skip
    def generate(
        self, prompt: str | Sequence[str] = "", num_tokens: int | None = None, **options: Any
    ) -> Written:
        """Return the text that follows a prompt, or the target of a source, or masks filled.

        Each text of a list is what it would be by itself.

        Args:
            prompt: a string or a list of strings; a list returns a list. An empty one stands for
                the beginning of a text, or else a newline. A warning names words that a tokenizer
                of words does not know.
            num_tokens: the most tokens that are written; see `GenerateOptions`.
            **options: fields of `GenerateOptions`, which describes them, except `results` and
                `length_penalty`.

        Returns:
            A text, a list of texts for a list or for `samples`, or with `stream` an iterator of
            pieces.

        Raises:
            ValueError: if an argument does not fit the task of the model, or is wrong.
        """
        given = GenerateOptions.of(self.generate, GENERATES, num_tokens, options)
        texts, is_list = as_texts("prompt", prompt)
        if self.kind in ("chat", "labels", "signals", "vectors"):
            raise ConfigError(f"generate: {self.instead()}")
        self.warn_of_unknown(texts)
        given.check_one_prompt(len(texts) if is_list else None)
        # Only such a model writes in pieces, by a grammar, or past its longest text.
        if self.kind == "text" and given.beams is None:
            return self._continue([self.read(text) for text in texts], is_list, given)
        does = "a beam search finds" if given.beams is not None else "it writes"
        self._refuse(given, FORMS, f"{does} texts of no given form")
        if self.kind == "masks":
            ignored = {*GENERATES, "num_tokens"} - {"stream", "slots"}
            self._refuse(given, ignored, "each mask is filled with its likeliest token")
            fill = (self.run, self.tokenizers, self.params)
            found = [fill_masks(*fill, text, self.module) for text in texts]
        elif given.beams is not None:
            given.drawing()
            ruled_out = ("stop", "stream") if self.kind == "text" else ()
            self._refuse(given, ("sampler", "samples", *ruled_out), "a beam search takes none")
            kept: dict[str, Any] = dict(beams=given.beams, processors=given.processors)
            if self.kind == "targets":
                found = self.targets(given.processors, given.cache_dtype).answer(
                    texts, self.target_count(given.num_tokens), beams=given.beams,
                    length_penalty=self._length_penalty(given),
                )  # fmt: skip
            else:
                found = [
                    self.search(text, num_tokens, cache_dtype=given.cache_dtype, **kept)[0][1]
                    for text in texts
                ]
        else:
            sampler, key = given.drawing()
            targets = self.targets(given.processors, given.cache_dtype)
            count = self.target_count(given.num_tokens)
            if given.sampler is None and given.samples is None:
                found = targets.answer(texts, count)
            else:
                # A text of a list is drawn as it would be alone with `fold_in(key, n)`.
                keys = [jax.random.fold_in(key, n) for n in range(len(texts))] if is_list else [key]
                drawn = [
                    targets.draw(text, count, given.samples or 1, sampler, own)
                    for text, own in zip(texts, keys, strict=True)
                ]
                found = drawn[0] if given.samples is not None else [one[0] for one in drawn]
                is_list = is_list or given.samples is not None
        # These texts are written whole, so stop strings are looked for afterwards.
        found = [cut_at_stop(text, given.stop) for text in found]
        if given.stream:
            return iter([text for text in found if text])
        return found if is_list else found[0]

    @overload
    def chat(
        self, messages: Conversation, num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: None = None, **options: Unpack[Options],
    ) -> str: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Conversation, num_tokens: int | None = None, *,
        stream: Literal[True], samples: None = None, **options: Unpack[Options],
    ) -> Iterator[str]: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Conversation, num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: int, **options: Unpack[Options],
    ) -> list[str]: ...  # fmt: skip
    @overload
    def chat(
        self, messages: list[str] | Sequence[Sequence[Message]], num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: None = None, **options: Unpack[Options],
    ) -> list[str]: ...  # fmt: skip
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        num_tokens: int | None = None,
        **options: Any,
    ) -> Written:
        """Return the assistant's answer to messages, as the model was trained to read them.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`, or a string, which is one message
                of the user. A list of conversations returns a list of answers.
            num_tokens: the most tokens of an answer; see `GenerateOptions`.
            **options: fields of `GenerateOptions`, which describes them, except those of a beam
                search.

        Returns:
            A text, a list of texts for a list or for `samples`, or with `stream` an iterator of
            pieces.

        Raises:
            ConfigError: if the model has no chat template.
            ValueError: if messages have another form or spell out a special token, or no token fits
                after them.
        """
        given = GenerateOptions.of(self.chat, CHATS, num_tokens, options)
        many = not isinstance(messages, str) and isinstance(messages, Sequence) and bool(messages)
        many = many and all(isinstance(talk, str | list | tuple) for talk in messages)
        # A conversation is a list of messages, and so is a list of conversations: its items tell.
        talks: Sequence[Any] = messages if many else [messages]  # checked one by one, below
        given.check_one_prompt(len(talks) if many else None)
        given.drawing()
        ids = [self.read_messages(talk) for talk in talks]
        for prompt in ids:
            # A text that is too long is cut at its beginning; half a conversation would mean
            # another.
            if len(prompt) > (length := longest_text(self.config)):
                rule = f"0 fit after the prompt (max_len {length})"
                raise DataError(f"messages have {len(prompt)} tokens: {rule}")
        found = self._continue(ids, many, given)
        if given.form is not None:
            return found
        # The first word of an answer may bring a space, which is no part of it.
        if isinstance(found, list):
            return [text.removeprefix(" ") for text in found]
        return found.removeprefix(" ") if isinstance(found, str) else _without_first_space(found)

    def search(
        self, prompt: str | np.ndarray, num_tokens: int | None = None, **options: Unpack[Options]
    ) -> list[tuple[float, str]]:
        """Return the best texts that a beam search finds after a prompt, with their scores.

        Args:
            prompt: a text, or i32[P], its ids.
            num_tokens: the most tokens that are written; see `GenerateOptions`.
            **options: `beams`, by default 4, `results`, `length_penalty`, `processors` and
                `cache_dtype` of `GenerateOptions`, which describes them.

        Returns:
            Pairs of a score and a text, best first.

        Raises:
            ConfigError: if the model writes no text after a prompt.
            ValueError: if an argument is wrong, or no token fits after the prompt.
        """
        given = GenerateOptions.of(self.search, SEARCHES, num_tokens, {"beams": 4, **options})
        if not isinstance(prompt, str | np.ndarray):
            raise ValueError(f"prompt is {prompt!r:.80}: must be a text, or the ids of one")
        of_chat = self.kind == "chat" and not isinstance(prompt, str)
        if not (of_chat or self.kind in ("text", "targets")):
            raise ConfigError(f"search: {self.instead()}")
        self.warn_of_unknown([prompt] if isinstance(prompt, str) else [])
        if given.beams is None:
            raise ValueError("beams is None: a search has at least 1")
        chosen: dict[str, Any] = dict(
            beams=given.beams, results=given.results, length_penalty=self._length_penalty(given)
        )
        if self.kind == "targets":
            return self.targets(given.processors, given.cache_dtype).search(
                str(prompt), self.target_count(given.num_tokens), **chosen
            )
        ids = self.read(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(prompt, str):
            check_unpadded(self.tokenizer, ids, "the prompt")
        if (left := self.room(ids)) < 1:
            rule = f"0 fit after it (max_len {longest_text(self.config)})"
            raise DataError(f"the prompt has {len(ids)} tokens: {rule}")
        count = min(NUM_TOKENS, left) if num_tokens is None else num_tokens
        return self._generator(given).sized([ids], count).search(ids, count, **chosen)

    def look_up(
        self, prompt: str | np.ndarray, num_tokens: int | None = None, num_draft: int = 4,
        **options: Unpack[Options],
    ) -> tuple[str, Speculation]:  # fmt: skip
        """Return the text after a prompt, written faster by proposing what followed the same words.

        The text is drawn from the same distribution as that of `generate`.

        Args:
            prompt: a text, or i32[P], its ids.
            num_tokens: the most tokens that are written, which must fit; see `GenerateOptions`.
            num_draft: the most tokens that are proposed at a time.
            **options: `stop`, `sampler`, `key`, `processors` and `cache_dtype` of
                `GenerateOptions`, which describes them.

        Returns:
            The text, and a `Speculation`, which counts proposals and calls of the model.

        Raises:
            ConfigError: if the model does not continue texts, or has no cache.
            ValueError: if an argument is wrong, or more tokens are written than fit.
        """
        given = GenerateOptions.of(self.look_up, LOOKS_UP, num_tokens, options)
        check_count("num_draft", num_draft, 1)
        if not (self.kind == "text" or (self.kind == "chat" and not isinstance(prompt, str))):
            raise ConfigError(f"look_up: {self.instead()}")
        if not self.config.supports("cache"):
            rule = "must be a transformer, which has a cache"
            raise ConfigError(f"look_up: a {type(self.config).__name__} of {self.name!r}: {rule}")
        if not isinstance(prompt, str | np.ndarray):
            raise ValueError(f"prompt is {prompt!r:.80}: must be a text, or the ids of one")
        ids = self.read(prompt) if isinstance(prompt, str) else prompt
        count = self.fitting(num_tokens, [ids])
        return self._generator(given).sized([ids], count).look_up(ids, count, num_draft)

    def fitting(self, num_tokens: int | None, prompts: Sequence[np.ndarray]) -> int:
        """Return `num_tokens`, or if it is None how many tokens fit after all prompts, up to 400.

        Args:
            num_tokens: what is asked for.
            prompts: i32[P], ids of each.

        Raises:
            ConfigError: if fewer tokens fit.
        """
        left = min(map(self.room, prompts))
        if left < 1 or (num_tokens or 1) > left:
            fits = f"{max(left, 0)} fit after the prompt (max_len {longest_text(self.config)})"
            raise ConfigError(f"num_tokens is {num_tokens or 1}: {fits}")
        return num_tokens or min(left, NUM_TOKENS)

    def _refuse(self, given: GenerateOptions, names: Sequence[str] | set[str], rule: str) -> None:
        what = self.name if self.task is None else f"a run of task {self.task.kind!r}"
        given.refuse(names, what, rule)

    def _generator(self, given: GenerateOptions) -> TextGenerator:
        sampler, key = given.drawing()
        grammar = None
        if given.form is not None:
            size, stop = self.config.vocab_size, tuple(self.model.stop_ids)
            grammar = Grammar(*given.form, self.tokenizer, size, stop)
        return TextGenerator(
            self.config, self.params, self.tokenizer, sampler=sampler, key=key,
            processors=(*self.model.processors, *given.processors), stop=given.stop,
            stop_ids=self.model.stop_ids, cache_dtype=given.cache_dtype, grammar=grammar,
            edits=self.module.edits,
        )  # fmt: skip

    def _continue(
        self, prompts: list[np.ndarray], is_list: bool, given: GenerateOptions
    ) -> Written:
        """Continue prompts: one in pieces, one in many ways, or many side by side."""
        generator, samples = self._generator(given), given.samples
        count = NUM_TOKENS if given.num_tokens is None else given.num_tokens
        # Samples share one cache and are not continued past it.
        if samples is not None and given.num_tokens is None:
            count = max(1, min(count, self.room(prompts[0])))
        if not is_list:
            own = generator.sized(prompts, count)
            if samples is not None:
                return own.samples(prompts[0], count, samples)
            pieces = own.complete(prompts[0], count)
            return pieces if given.stream else "".join(pieces)
        found, fitting = [""] * len(prompts), []
        for n, prompt in enumerate(prompts):
            if self.room(prompt) >= count:
                fitting.append(n)
                continue
            # A text that outgrows the model is written alone, with the key that it has in the list.
            own = replace(generator, key=jax.random.fold_in(generator.key, n))
            found[n] = "".join(own.sized([prompt], count).complete(prompt, count))
        if fitting:
            parts = [prompts[n] for n in fitting]
            # More slots than texts would cost their share of every step.
            at_once = min(given.slots, bucket(len(parts)))
            answers = generator.sized(parts, count).answer(
                parts, count, slots=at_once, numbers=fitting
            )
            for n, text in answers:
                found[n] = text
        return found

    def _length_penalty(self, given: GenerateOptions) -> float:
        """Return alpha of a search: a run on pairs is judged by the mean of log p."""
        if given.length_penalty is not None:
            return given.length_penalty
        return 1.0 if self.kind == "targets" and self.task is not None else 0.0

    @overload
    def score(
        self, text: Scored, *, window: int | None = None, stride: int | None = None,
        batch_size: int = 8,
    ) -> Score: ...  # fmt: skip
    @overload
    def score(
        self, text: list[str] | list[tuple[str, str]], *, window: int | None = None,
        stride: int | None = None, batch_size: int = 8,
    ) -> list[Score]: ...  # fmt: skip
    @known_keywords
    def score(
        self,
        text: Scored | list[str] | list[tuple[str, str]],
        *,
        window: int | None = None,
        stride: int | None = None,
        batch_size: int = 8,
    ) -> Score | list[Score]:
        """Return how likely the model finds a text: a `Score`, in nats, or a list of a list's.

        A model that puts nothing before a text scores all of its tokens but the first.

        Args:
            text: a text, for a decoder; `(source, target)`, whose target is scored, for an
                encoder-decoder and a run on pairs or on preferences; messages, whose last, the
                assistant's, is scored, for a chat model.
            window: how many tokens are read at a time, from 1 to max_len; None is max_len.
            stride: tokens between the beginnings of two windows of a longer text, from 1 to
                `window`. A token counts once, in the first window that has it, where more than
                window - stride tokens are before it. None is window / 2.
            batch_size: how many windows are read side by side, at least 1. An edited model reads
                them one by one.

        Raises:
            ConfigError: if the model gives no probability of a text, as a masked one.
            ValueError: if the text has another form, or too few tokens, or `window` or `stride` is
                out of its range.
        """
        for name, value in dict(window=window, stride=stride, batch_size=batch_size).items():
            if value is not None:
                check_count(name, value, 1)
        # An empty list could be of texts or of messages; neither can be scored.
        if isinstance(text, list) and not text:
            raise ValueError("text is an empty list: must have a text")
        read = Windows(window, stride, batch_size)
        if self.kind == "masks":
            rule = (
                "a masked model has no probability of a text; its pseudo-likelihood, of each token "
                "hidden alone, is what evaluate(FILE) averages as pseudo_perplexity"
            )
            raise ConfigError(f"score: {rule}")
        if self.kind in ("labels", "signals", "vectors"):
            raise ConfigError(f"score: {self.instead()}")
        many = isinstance(text, list) and isinstance(text[0], str | tuple)
        asked: Sequence[Any] = text if many else [text]
        pairs = [one for one in asked if is_pair(one)]
        sources = [source for source, _ in pairs] + [one for one in asked if isinstance(one, str)]
        self.warn_of_unknown(sources, [target for _, target in pairs])
        scores = [score_text(self, one, read) for one in asked]
        return scores if many else scores[0]

    @known_keywords
    def continuations(
        self, pairs: Sequence[tuple[str, str]], *, batch_size: int = 8
    ) -> list[Continuation]:
        """Return how likely the model finds each continuation of its context.

        Both are encoded as one text; blanks at the end of a context go to its continuation, as in
        lm-eval. If a text exceeds `max_len`, its last tokens are read.

        Args:
            pairs: (context, continuation) each. Continuations of one context read it once.
            batch_size: how many rows are read side by side, at least 1. An edited model reads
                pairs one by one.

        Returns:
            A `Continuation` of each pair, in their order: log p in nats, whether every token is
            the likeliest, and how many tokens there are.

        Raises:
            ConfigError: if the model does not continue texts.
            ValueError: if `pairs` is empty, or a text has no token.
        """
        check_count("batch_size", batch_size, 1)
        check_continues(self, "continuations")
        listed = isinstance(pairs, list | tuple) and len(pairs) > 0
        if not listed or not all(is_pair(pair) for pair in pairs):
            raise DataError(f"pairs is {pairs!r:.80}: must be a list of (context, continuation)")
        return score_requests(self, [read_pair(self, *pair) for pair in pairs], batch_size)

    @known_keywords
    def multiple_choice(
        self,
        questions: str | Path | Sequence[Question | Mapping[str, object]],
        *,
        batch_size: int = 8,
    ) -> Choices:
        """Return how often the right choice is the likeliest one, with log p of every choice.

        Args:
            questions: a file of JSON lines {"context": ..., "choices": [...], "answer": INDEX}, or
                a list of such objects.
            batch_size: how many choices are read side by side, at least 1. An edited model reads
                them one by one.

        Raises:
            ConfigError: if the model does not continue texts.
            ValueError: if a question has another form; it names file, line, field and rule.
        """
        check_count("batch_size", batch_size, 1)
        return score_choices(self, questions, batch_size)

    @known_keywords
    def candidates(self, text: str, *, count: int = 5) -> list[list[tuple[str, float]]]:
        """Return for each `[MASK]` (or `_`) of a text its likeliest tokens and their probabilities.

        Args:
            text: a text with masks.
            count: how many tokens are returned for each mask, at least 1.

        Returns:
            For each mask pairs of a token's text and p = softmax(logits) over all tokens of the
            model, the likeliest first.

        Raises:
            ConfigError: if the model fills no masks.
            ValueError: if the text has no mask, or is longer than the model reads.
        """
        if self.kind != "masks":
            raise ConfigError(f"candidates: {self.instead()}")
        check_count("count", count, 1)
        self.warn_of_unknown([text])
        return mask_candidates(self.run, self.tokenizers, self.params, text, count, self.module)

    @overload
    def classify(self, text: str) -> tuple[str, float]: ...
    @overload
    def classify(self, text: list[str] | tuple[str, ...]) -> list[tuple[str, float]]: ...
    @known_keywords
    def classify(self, text: str | Sequence[str]) -> tuple[str, float] | list[tuple[str, float]]:
        """Return the likeliest class of a text and its probability.

        Args:
            text: a string or a list of strings; a list returns a list.

        Raises:
            ConfigError: if the model is not a run of task "classify".
            ValueError: if a text has no token.
        """
        texts, is_list = as_texts("text", text)
        if self.kind != "labels":
            raise ConfigError(f"classify: {self.instead()}; classes need a run of task 'classify'")
        for one in texts:
            # A batch is filled up with padding: a text without tokens would be padding alone.
            self.check_tokens(one)
        self.warn_of_unknown(texts)
        found = label_texts(self.run, self.tokenizers, self.params, texts, self.module)
        return found if is_list else found[0]

    def evaluate(self, data: str | Path, **options: Unpack[EvaluateOptions]) -> dict[str, float]:
        """Return the measures of the model's task on a file; see `text.evaluation.evaluate`."""
        named = EvaluateOptions.__annotations__
        refuse_keywords(self.evaluate, {x: y for x, y in options.items() if x not in named}, named)
        if not isinstance(data, str | Path):
            raise ConfigError(f"data is {data!r:.80}: must be a file")
        return evaluate(self, str(data), **options)

    @known_keywords
    def save(
        self,
        path: str | Path,
        *,
        family: str | None = None,
        dtype: DType | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> list[str]:
        """Save the model as a folder that `load` and Hugging Face's libraries read.

        Args:
            path: the folder.
            family: for a run: a model_type, such as "llama"; None is the first that can express the
                config. A published model keeps its own.
            dtype: of the parameters; None keeps theirs.
            shard_bytes: files of weights over so many bytes are split.

        Returns:
            Lines that describe the folder, as the command `convert` prints them.

        Raises:
            ConfigError: if other libraries have no such model, or the model is edited.
            CheckpointError: if the folder contains other files.
        """
        if self.module.edits:
            raise ConfigError("save: the model is edited, and no file can store its functions")
        model = self.model if dtype is None else with_parameters_in(self.model, dtype)
        if self.task is not None:
            return save_run(Path(path), model, family, shard_bytes)
        if family is not None:
            raise ConfigError(f"family is {family!r}: {self.name!r} is no run, which alone has one")
        config, folder = as_transformer(model.config), open_weights(self.name)
        return save_published(Path(path), folder, config, model.params, shard_bytes)


def as_texts(name: str, given: str | Sequence[str]) -> tuple[list[str], bool]:
    """Return texts, and whether a list of them was given."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is {given!r:.80}: must be a text or a list of texts")
    if not texts:
        raise ValueError(f"{name} is an empty list: must have a text")
    return list(texts), not isinstance(given, str)


def _without_first_space(pieces: Iterator[str]) -> Iterator[str]:
    """Yield pieces, the first without the space that a first word may bring."""
    for n, piece in enumerate(pieces):
        if piece := piece if n else piece.removeprefix(" "):
            yield piece
