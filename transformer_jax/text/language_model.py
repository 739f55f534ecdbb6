r"""Text models, whether from a training run or published, as one object.

    m = load("runs/book")
    m.generate("Once upon", 40, stop="\\n")
    m.score("Once upon a time").perplexity

The training of the model determines what it does with text (see `kind`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args, overload

import jax
import numpy as np

from transformer_jax.checks import check_count, check_int32
from transformer_jax.config import ConfigError, DType, ModelConfig
from transformer_jax.config.keywords import known_keywords, refuse_keywords
from transformer_jax.config.model import as_transformer
from transformer_jax.decoding.arguments import bucket
from transformer_jax.decoding.completion import TextGenerator, max_text_tokens
from transformer_jax.decoding.speculative import Speculation
from transformer_jax.decoding.structured import Grammar
from transformer_jax.decoding.writer import cut_at_stop
from transformer_jax.loading import (
    Which,
    is_run,
    load_run,
    load_text_model,
    with_param_dtype,
    with_quantized_weights,
)
from transformer_jax.models.places import Edit
from transformer_jax.models.quantized import Kind as WeightKind
from transformer_jax.pretrained.safetensors_folder import SHARD_BYTES
from transformer_jax.pretrained.weights import open_weights
from transformer_jax.text import options as option_names
from transformer_jax.text.choices import Choices, Question, score_choices
from transformer_jax.text.continuations import (
    Continuation,
    check_continues,
    read_pair,
    score_requests,
)
from transformer_jax.text.evaluation import EvaluateOptions, evaluate
from transformer_jax.text.inspect import Inspect
from transformer_jax.text.options import GenerateOptions, Options
from transformer_jax.text.reading import NUM_TOKENS, Conversation, Reader
from transformer_jax.text.save import save_published, save_run
from transformer_jax.text.scores import Score, ScoreInput, Windows, is_pair, score_text
from transformer_jax.tokenizers.languages import with_languages
from transformer_jax.tokenizers.pretrained import Message, PretrainedTokenizer
from transformer_jax.tokenizers.special import check_unpadded
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.tasks.classify import label_texts
from transformer_jax.training.tasks.masked import fill_masks, mask_candidates
from transformer_jax.untrusted_files import check_path

Written = str | list[str] | Iterator[str]
"""A string, a list of strings for several prompts or for `samples`, or the pieces of a stream."""


@known_keywords
def load(
    path_or_id: str | Path,
    *,
    checkpoint: Which | None = None,
    init_from: str | Path | None = None,
    dtype: DType | None = None,
    max_len: int | None = None,
    weights: WeightKind | None = None,
    invariant: bool = False,
) -> LanguageModel:
    """Load a model with its tokenizer.

    Args:
        path_or_id: the folder of a run (`fit`, train.py), a Hugging Face folder, a GGUF file, or
            the ID "ORG/NAME" of a repository on the Hugging Face Hub.
        checkpoint: for a run, "best" (the lowest held-out loss) or "last"; None prefers "best".
        init_from: for a run with adapters, the current path of the model that they adapt.
        dtype: for a published model, "float32", "bfloat16" or "float16"; None keeps the stored
            dtype.
        max_len: for a published model, the maximum text length in tokens; None keeps the model's
            limit.
        weights: "bf16", "int8" or "int4" store the weights in fewer bits; None leaves the weights
            unchanged.
        invariant: whether each text gets the same bits whatever else is in its batch (see
            `ModelConfig.invariant`).

    Raises:
        ConfigError: if an argument does not apply to the model.
        CheckpointError: if a file cannot be read.
    """
    if not isinstance(path_or_id, str | Path):
        rule = "must be a folder or the ID of a repository on the hub"
        raise ConfigError(f"path_or_id is of type {type(path_or_id).__name__}: {rule}")
    try:
        # A name that is not a path, such as ORG/NAME, is looked up on the Hub below.
        has_run = is_run(str(path_or_id))
        files = Path(path_or_id) / "metrics.jsonl", Path(path_or_id) / "lock"
        began = any(file.exists() for file in files)  # a run that has not saved a checkpoint
    except OSError as error:  # not a valid file name
        raise ConfigError(f"path_or_id is {str(path_or_id)!r:.60}: {error.strerror}") from None
    if has_run or began:
        for name, value in dict(dtype=dtype, max_len=max_len).items():
            if has_run and value is not None:  # without a checkpoint, `load_run` raises below
                raise ConfigError(f"{name} is {value!r}: must be None for a run, which has its own")
        model = load_run(path_or_id, checkpoint, init_from=init_from)
    else:
        for name, option in dict(checkpoint=checkpoint, init_from=init_from).items():
            if option is not None:
                rule = f"{str(path_or_id)!r} is not a run; only a run has one"
                raise ConfigError(f"{name} is {str(option)!r}: {rule}")
        model = load_text_model(path_or_id, dtype=dtype, max_len=max_len)
    if weights is not None:
        model = with_quantized_weights(model, weights)
    if invariant:
        if not isinstance(model.config, ModelConfig):
            rule = f"{type(model.config).__name__} is not a transformer"
            raise ConfigError(f"invariant is True: {rule}")
        model = replace(model, config=replace(model.config, invariant=True))
    return LanguageModel(model, str(path_or_id))


class LanguageModel(Reader):
    """A text model, as returned by `load`.

    The base class `Reader` (text/reading.py) turns prompts, messages and pairs into tokens.
    """

    @property
    def inspect(self) -> Inspect:
        """Tools that show internal values of the model as it reads text."""
        return Inspect(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, and suggest the method of `inspect` with that name."""
            tool = "attention" if name in ("attend", "attention_weights") else name
            rule = f": use model.inspect.{tool}" if tool in vars(Inspect) and tool[0] != "_" else ""
            raise AttributeError(f"a LanguageModel has no attribute {name!r}{rule}")

    def edited(self, edit: Mapping[str, Edit]) -> LanguageModel:
        """Return a copy of the model that edits internal values in all its methods.

        During generation, an edit function receives the tokens of the prompt, and then one new
        token at a time. In `score`, `continuations` and `multiple_choice`, it receives all tokens
        of one text or window at once.

        Args:
            edit: functions keyed by place in the model (see `transformer_jax.places`), such as the
                edits in `transformer_jax.interpret`. They run after existing edits of the model.

        Raises:
            ValueError: if a key is not a place, or a value is not a function.
        """
        return replace(self, edited_module=self.module.edited(edit))

    def with_languages(self, source: str, target: str) -> LanguageModel:
        """Return a copy of a multilingual model for two languages (mBART, M2M-100, NLLB).

        Args:
            source: the token for the source language, such as "en_XX", "__en__" or "eng_Latn".
            target: the token for the target language.

        Raises:
            ConfigError: if the model is not a published encoder-decoder.
            DataError: if the tokenizer does not have both language tokens.
        """
        tokenizer = self.tokenizer
        if self.kind != "targets" or not isinstance(tokenizer, PretrainedTokenizer):
            raise ConfigError(f"languages: {self.name} is not a published encoder-decoder")
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
        """Continue a prompt, translate a source, or fill in masks, depending on the model's task.

        The prompts in a list do not affect each other.

        Args:
            prompt: a string or a list of strings. A list returns a list. An empty prompt is
                replaced by the begin token of the tokenizer or, if there is no begin token, by a
                newline. A warning lists the words that a word tokenizer does not know.
            num_tokens: the maximum number of new tokens; see `GenerateOptions`.
            **options: the other fields of `GenerateOptions`, except `results` and `length_penalty`.

        Returns:
            A string; with a list or `samples`, a list; with `stream`, an iterator of pieces.

        Raises:
            ValueError: if an argument is invalid or does not apply to the model's task.
        """
        settings = GenerateOptions.of(self.generate, option_names.GENERATES, num_tokens, options)
        texts, is_list = as_texts("prompt", prompt)
        if self.kind in ("chat", "labels", "signals", "vectors"):
            raise ConfigError(f"generate: {self.instead()}")
        self.warn_of_unknown(texts)
        settings.check_one_prompt(len(texts) if is_list else None)
        # The other kinds cannot stream, follow a grammar or exceed their maximum length.
        if self.kind == "text" and settings.beams is None:
            return self._continue([self.read(text) for text in texts], is_list, settings)
        model = self.name if self.task is None else f"a run for task {self.task.kind!r}"
        writer = model if settings.beams is None else "a beam search"
        settings.refuse(option_names.FORMS, writer, "it cannot constrain the form of its text")
        if self.kind == "masks":
            # `stream` and `slots` do not change the text
            ignored = {*option_names.GENERATES, "num_tokens"} - {"stream", "slots"}
            settings.refuse(ignored, model, "each mask is filled with its likeliest token")
            fill = (self.run, self.tokenizers, self.params)
            found = [fill_masks(*fill, text, self.module) for text in texts]
        elif settings.beams is not None:
            settings.drawing()
            names = ("stop", "stream") if self.kind == "text" else ()
            rule = "it does not draw, stream or stop at strings"
            settings.refuse(("sampler", "samples", *names), "a beam search", rule)
            if self.kind == "targets":
                found = self.targets(settings.processors, settings.cache_dtype).answer(
                    texts, self.target_count(settings.num_tokens), beams=settings.beams,
                    length_penalty=self._length_penalty(settings),
                )  # fmt: skip
            else:
                kept: dict[str, Any] = {
                    name: getattr(settings, name) for name in ("beams", "processors", "cache_dtype")
                }
                found = [self.search(text, num_tokens, **kept)[0][1] for text in texts]
        else:
            sampler, key = settings.drawing()
            targets = self.targets(settings.processors, settings.cache_dtype)
            count = self.target_count(settings.num_tokens)
            if settings.sampler is None and settings.samples is None:
                found = targets.answer(texts, count)
            else:
                # Sample text n of a list as a separate call with fold_in(key, n) would.
                keys = [jax.random.fold_in(key, n) for n in range(len(texts))] if is_list else [key]
                drawn = [
                    targets.draw(text, count, settings.samples or 1, sampler, text_key)
                    for text, text_key in zip(texts, keys, strict=True)
                ]
                found = drawn[0] if settings.samples is not None else [one[0] for one in drawn]
                is_list = is_list or settings.samples is not None
        # These texts are generated as a whole, so truncate them at stop strings afterward.
        found = [cut_at_stop(text, settings.stop) for text in found]
        if settings.stream:
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
        """Return the assistant's answer to messages that are formatted as in the model's training.

        Args:
            messages: a list `[{"role": "user", "content": "..."}, ...]`, or a string for a single
                user message. A list of conversations returns a list of answers.
            num_tokens: the maximum number of tokens in an answer; see `GenerateOptions`.
            **options: the other fields of `GenerateOptions`, except the ones for beam search.

        Returns:
            A string; with a list or `samples`, a list; with `stream`, an iterator of pieces.

        Raises:
            ConfigError: if the model has no chat template.
            ValueError: if messages are invalid or contain the text of a special token, or if no
                token fits after them.
        """
        settings = GenerateOptions.of(self.chat, option_names.CHATS, num_tokens, options)
        # A conversation is a list of dicts; a list of conversations contains strings or lists.
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        is_list = is_list and len(messages) > 0
        is_list = is_list and all(isinstance(talk, str | list | tuple) for talk in messages)
        talks: Sequence[Any] = messages if is_list else [messages]
        settings.check_one_prompt(len(talks) if is_list else None)
        settings.drawing()
        ids = [self.read_messages(talk) for talk in talks]
        for prompt in ids:
            # `generate` drops the beginning of a long text, which would change the meaning of a
            # conversation.
            if len(prompt) > (length := max_text_tokens(self.config)):
                rule = f"no new token fits after them (max_len {length})"
                raise DataError(f"messages have {len(prompt)} tokens: {rule}")
        found = self._continue(ids, is_list, settings)
        if settings.form is not None:
            return found
        # The first word of an answer may start with a space that separates it from the prompt.
        if isinstance(found, list):
            return [text.removeprefix(" ") for text in found]
        if isinstance(found, str):
            return found.removeprefix(" ")
        stripped = (piece if n else piece.removeprefix(" ") for n, piece in enumerate(found))
        return (piece for piece in stripped if piece)

    def search(
        self, prompt: str | np.ndarray, num_tokens: int | None = None, **options: Unpack[Options]
    ) -> list[tuple[float, str]]:
        """Return the best continuations from a beam search, with their scores.

        Args:
            prompt: a string, or an array i32[P] of token IDs.
            num_tokens: the maximum number of new tokens; see `GenerateOptions`.
            **options: `beams` (default 4), `results`, `length_penalty`, `processors` and
                `cache_dtype`, as in `GenerateOptions`.

        Returns:
            Pairs (score, text), best first.

        Raises:
            ConfigError: if the model does not generate text after a prompt.
            ValueError: if an argument is invalid, or no token fits after the prompt.
        """
        options = {"beams": 4, **options}
        settings = GenerateOptions.of(self.search, option_names.SEARCHES, num_tokens, options)
        self._check_prompt(prompt)
        if settings.beams is None:
            raise ValueError("beams is None: must be an integer of at least 1")
        of_chat = self.kind == "chat" and not isinstance(prompt, str)
        if not (of_chat or self.kind in ("text", "targets")):
            raise ConfigError(f"search: {self.instead()}")
        self.warn_of_unknown([prompt] if isinstance(prompt, str) else [])
        chosen: dict[str, Any] = dict(
            beams=settings.beams, results=settings.results,
            length_penalty=self._length_penalty(settings),
        )  # fmt: skip
        if self.kind == "targets":
            if not isinstance(prompt, str):
                raise ValueError(
                    f"prompt is {prompt!r:.80}: must be a string that contains the source"
                )
            return self.targets(settings.processors, settings.cache_dtype).search(
                prompt, self.target_count(settings.num_tokens), **chosen
            )
        ids = self.read(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(prompt, str):
            check_unpadded(self.tokenizer, ids, "the prompt")
        if (left := self.room(ids)) < 1:
            rule = f"no new token fits after it (max_len {max_text_tokens(self.config)})"
            raise DataError(f"the prompt has {len(ids)} tokens: {rule}")
        count = min(NUM_TOKENS, left) if num_tokens is None else num_tokens
        return self._generator(settings).sized([ids], count).search(ids, count, **chosen)

    def look_up(
        self, prompt: str | np.ndarray, num_tokens: int | None = None, num_draft: int = 4,
        **options: Unpack[Options],
    ) -> tuple[str, Speculation]:  # fmt: skip
        """Continue a prompt faster by proposing tokens that followed the same words before.

        The generated text has the same distribution as in `generate`.

        Args:
            prompt: a string, or an array i32[P] of token IDs.
            num_tokens: the maximum number of new tokens, which must fit; see `GenerateOptions`.
            num_draft: the maximum number of tokens to propose at a time.
            **options: `stop`, `sampler`, `key`, `processors` and `cache_dtype`, as in
                `GenerateOptions`.

        Returns:
            The text, and a `Speculation` that contains the numbers of proposals and model calls.

        Raises:
            ConfigError: if the model does not continue text, or has no cache.
            ValueError: if an argument is invalid, or if the tokens do not fit.
        """
        settings = GenerateOptions.of(self.look_up, option_names.LOOKS_UP, num_tokens, options)
        check_count("num_draft", num_draft, 1)
        self._check_prompt(prompt)
        if not (self.kind == "text" or (self.kind == "chat" and not isinstance(prompt, str))):
            raise ConfigError(f"look_up: {self.instead()}")
        if not self.config.supports("cache"):
            rule = "must be a transformer, which has a cache"
            raise ConfigError(f"look_up: model {self.name!r} ({type(self.config).__name__}) {rule}")
        ids = self.read(prompt) if isinstance(prompt, str) else prompt
        count = self.fitting(num_tokens, [ids])
        return self._generator(settings).sized([ids], count).look_up(ids, count, num_draft)

    def fitting(self, num_tokens: int | None, prompts: Sequence[np.ndarray]) -> int:
        """Return `num_tokens` or, for None, the number of tokens that fit, up to 400.

        Args:
            num_tokens: the requested number of new tokens.
            prompts: the token IDs of each prompt, i32[P].

        Raises:
            ConfigError: if the requested tokens do not fit.
        """
        left = min(map(self.room, prompts))
        if left < 1 or (num_tokens or 1) > left:
            fits = (
                f"at most {max(left, 0)} fit after the prompt (max_len "
                f"{max_text_tokens(self.config)})"
            )
            raise ConfigError(f"num_tokens is {num_tokens or 1}: {fits}")
        return num_tokens or min(left, NUM_TOKENS)

    def _check_prompt(self, prompt: object) -> None:
        """Raise ValueError unless a prompt is a string or a nonempty array of valid token IDs."""
        if isinstance(prompt, str):
            return
        if not isinstance(prompt, np.ndarray):
            raise ValueError(f"prompt is {prompt!r:.80}: must be a string, or an array of its IDs")
        if prompt.ndim != 1 or not len(prompt) or not np.issubdtype(prompt.dtype, np.integer):
            rule = "must be integers [P], at least one"
            raise ValueError(f"prompt is {prompt.dtype}{list(prompt.shape)}: {rule}")
        check_int32("prompt", prompt)
        size = self.config.vocab_size
        if len(wrong := prompt[(prompt < 0) | (prompt >= size)]):
            raise ValueError(f"prompt contains ID {wrong[0]}: must be from 0 to {size - 1}")

    def _generator(self, settings: GenerateOptions) -> TextGenerator:
        sampler, key = settings.drawing()
        grammar = None
        if settings.form is not None:
            size, stop = self.config.vocab_size, tuple(self.model.stop_ids)
            grammar = Grammar(*settings.form, self.tokenizer, size, stop)
        return TextGenerator(
            self.config, self.params, self.tokenizer, sampler=sampler, key=key,
            processors=(*self.model.processors, *settings.processors), stop=settings.stop,
            stop_ids=self.model.stop_ids, cache_dtype=settings.cache_dtype, grammar=grammar,
            edits=self.module.edits,
        )  # fmt: skip

    def _continue(
        self, prompts: list[np.ndarray], is_list: bool, settings: GenerateOptions
    ) -> Written:
        """Generate the continuations of one or several prompts, as text, pieces or samples."""
        generator, samples = self._generator(settings), settings.samples
        count = NUM_TOKENS if settings.num_tokens is None else settings.num_tokens
        # Samples share one cache and cannot outgrow it.
        if samples is not None and settings.num_tokens is None:
            count = max(1, min(count, self.room(prompts[0])))
        if not is_list:
            single = generator.sized(prompts, count)
            if samples is not None:
                return single.samples(prompts[0], count, samples)
            pieces = single.complete(prompts[0], count)
            return pieces if settings.stream else "".join(pieces)
        found, fitting = [""] * len(prompts), []
        for n, prompt in enumerate(prompts):
            if self.room(prompt) >= count:
                fitting.append(n)
                continue
            # If a text exceeds the model's limit, generate it separately, with its key from the
            # list.
            single = replace(generator, key=jax.random.fold_in(generator.key, n))
            found[n] = "".join(single.sized([prompt], count).complete(prompt, count))
        if fitting:
            parts = [prompts[n] for n in fitting]
            # An empty slot takes as much time per step as a used slot.
            slots = min(settings.slots, bucket(len(parts)))
            answers = generator.sized(parts, count).answer(
                parts, count, slots=slots, numbers=fitting
            )
            for n, text in answers:
                found[n] = text
        return found

    def _length_penalty(self, settings: GenerateOptions) -> float:
        """Return alpha for a beam search. A run on pairs uses the mean log p, as in evaluation."""
        if settings.length_penalty is not None:
            return settings.length_penalty
        return 1.0 if self.kind == "targets" and self.task is not None else 0.0

    @overload
    def score(
        self, text: ScoreInput, *, window: int | None = None, stride: int | None = None,
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
        text: ScoreInput | list[str] | list[tuple[str, str]],
        *,
        window: int | None = None,
        stride: int | None = None,
        batch_size: int = 8,
    ) -> Score | list[Score]:
        """Return the probability of a text, in nats, as a `Score`. A list returns a list.

        If the model does not put a token before the text, the first token of the text is not
        scored.

        Args:
            text: for a decoder, a string. For an encoder-decoder and for a run on pairs or
                preferences, `(source, target)`, whose target is scored. For a chat model, messages
                that end with an answer of the assistant, which is scored.
            window: the number of tokens to read at a time, from 1 to max_len; None means max_len.
            stride: the number of tokens between the starts of windows, from 1 to `window`; None
                means window / 2. Each token is scored once, in the first window that contains it.
                After the first window, each token has more than window - stride tokens of context.
            batch_size: the number of windows per batch, at least 1; edited models always use 1.

        Raises:
            ConfigError: if the model does not assign a probability to text, as is the case for
                masked models.
            ValueError: if the text has the wrong type or too few tokens, or `window` or `stride` is
                out of range.
        """
        for name, value in dict(window=window, stride=stride, batch_size=batch_size).items():
            if value is not None or name == "batch_size":
                check_count(name, value, 1)  # type: ignore[arg-type]
        if isinstance(text, list) and not text:
            raise ValueError("text is an empty list: must contain at least one item")
        read = Windows(window, stride, batch_size)
        if self.kind == "masks":
            rule = (
                "a masked model does not define the probability of a text; evaluate(FILE) measures "
                "its pseudo_perplexity by masking one token at a time"
            )
            raise ConfigError(f"score: {rule}")
        if self.kind in ("labels", "signals", "vectors"):
            raise ConfigError(f"score: {self.instead()}")
        is_list = isinstance(text, list) and isinstance(text[0], str | tuple)
        items: Sequence[Any] = text if is_list else [text]
        pairs = [item for item in items if is_pair(item)]
        sources = [source for source, _ in pairs] + [x for x in items if isinstance(x, str)]
        self.warn_of_unknown(sources, [target for _, target in pairs])
        scores = [score_text(self, item, read) for item in items]
        return scores if is_list else scores[0]

    @known_keywords
    def continuations(
        self, pairs: Sequence[tuple[str, str]], *, batch_size: int = 8
    ) -> list[Continuation]:
        """Return the probability of each continuation, given its context.

        As in lm-eval, the context and the continuation are encoded as one string, and blanks at the
        end of the context belong to the continuation. If a text exceeds `max_len`, only its last
        tokens are read.

        Args:
            pairs: a list of pairs (context, continuation). The model reads equal contexts only
                once.
            batch_size: the number of rows per batch, at least 1; edited models always use 1.

        Returns:
            A `Continuation` for each pair, in order.

        Raises:
            ConfigError: if the model does not continue text.
            ValueError: if `pairs` is empty, or if a text has no tokens.
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
        """Return log p of every choice, and the fraction of questions that are answered correctly.

        Args:
            questions: a list of objects {"context": ..., "choices": [...], "answer": INDEX}, or a
                JSON Lines file of them.
            batch_size: the number of choices per batch, at least 1; edited models always use 1.

        Raises:
            ConfigError: if the model does not continue text.
            ValueError: if a question is invalid. The message states the file, line, field and rule.
        """
        check_count("batch_size", batch_size, 1)
        return score_choices(self, questions, batch_size)

    @known_keywords
    def candidates(self, text: str, *, count: int = 5) -> list[list[tuple[str, float]]]:
        """Return the likeliest tokens for each `[MASK]` or `_` in the text, with probabilities.

        Args:
            text: a string with masks.
            count: the number of tokens to return for each mask, at least 1.

        Returns:
            For each mask, pairs of a token and its probability p = softmax(logits), best first.

        Raises:
            ConfigError: if the model is not a masked model.
            ValueError: if the text has no mask, or is longer than the model can read.
        """
        if not isinstance(text, str):
            raise ValueError(f"text is {text!r:.80}: must be a string")
        check_count("count", count, 1)
        if self.kind != "masks":
            raise ConfigError(f"candidates: {self.instead()}")
        self.warn_of_unknown([text])
        return mask_candidates(self.run, self.tokenizers, self.params, text, count, self.module)

    @overload
    def classify(self, text: str) -> tuple[str, float]: ...
    @overload
    def classify(self, text: list[str] | tuple[str, ...]) -> list[tuple[str, float]]: ...
    @known_keywords
    def classify(self, text: str | Sequence[str]) -> tuple[str, float] | list[tuple[str, float]]:
        """Return the likeliest class of a text, and its probability.

        Args:
            text: a string or a list of strings. A list returns a list.

        Raises:
            ConfigError: if the model is not a run of the "classify" task.
            ValueError: if a text has no tokens.
        """
        texts, is_list = as_texts("text", text)
        if self.kind != "labels":
            raise ConfigError(f"classify: {self.instead()}; classes need a run for task 'classify'")
        for one in texts:
            # Batches are padded, so a text without tokens would contain only padding.
            self.check_tokens(one)
        self.warn_of_unknown(texts)
        found = label_texts(self.run, self.tokenizers, self.params, texts, self.module)
        return found if is_list else found[0]

    def evaluate(self, data: str | Path, **options: Unpack[EvaluateOptions]) -> dict[str, float]:
        """Return the metrics of the model's task on a file, as `text.evaluation.evaluate` does."""
        names = EvaluateOptions.__annotations__
        refuse_keywords(self.evaluate, {x: y for x, y in options.items() if x not in names}, names)
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
        """Save the model as a folder that `load` and Hugging Face's libraries can read.

        Args:
            path: the folder.
            family: for a run, a model_type such as "llama"; None means the first family that can
                express the config. A published model keeps its own family.
            dtype: dtype of the saved parameters; None keeps the current dtypes.
            shard_bytes: the maximum size of a weight file, in bytes. Larger files are split.

        Returns:
            Lines that describe the folder, which the `convert` command prints.

        Raises:
            ConfigError: if other libraries do not support the model, or if the model is edited.
            CheckpointError: if the folder contains other files.
            ValueError: if an argument has the wrong type or value.
        """
        check_path("path", path)
        check_count("shard_bytes", shard_bytes, 1)
        if family is not None and not isinstance(family, str):
            rule = "must be a model_type, such as 'llama', or None"
            raise ConfigError(f"family is {family!r:.80}: {rule}")
        if dtype is not None:
            name: object = getattr(dtype, "name", getattr(dtype, "__name__", dtype))  # jnp.bfloat16
            if not isinstance(name, str) or name not in get_args(DType):
                rule = f"must be one of {', '.join(get_args(DType))}, or None"
                raise ConfigError(f"dtype is {dtype!r:.80}: {rule}")
        if self.module.edits:
            raise ConfigError("save: the model is edited, and no file can store its functions")
        if self.task is None and family is not None:
            rule = f"{self.name!r} is not a run; only a run has one"
            raise ConfigError(f"family is {family!r:.80}: {rule}")
        model = self.model if dtype is None else with_param_dtype(self.model, dtype)
        if self.task is not None:
            return save_run(Path(path), model, family, shard_bytes)
        config, folder = as_transformer(model.config), open_weights(self.name)
        return save_published(Path(path), folder, config, model.params, shard_bytes)


def as_texts(name: str, value: str | Sequence[str]) -> tuple[list[str], bool]:
    """Return the value as a list of strings, and whether it was a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is {value!r:.80}: must be a string or a list of strings")
    if not texts:
        raise ValueError(f"{name} is an empty list: must contain at least one string")
    return list(texts), not isinstance(value, str)
