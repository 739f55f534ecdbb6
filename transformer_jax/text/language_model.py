r"""Text in, text out: one object over the model of a training run, or over a published one.

    m = load("runs/book")
    m.generate("Once upon", 40, stop="\\n")
    m.score("Once upon a time").perplexity

What a model does with a text follows from what it was trained for (`kind`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Never, Unpack, overload

import jax
import numpy as np

from transformer_jax.checks import INT32, check_count
from transformer_jax.config import ConfigError, DType
from transformer_jax.config.keywords import known_keywords, refuse_keywords
from transformer_jax.decoding.completion import longest_text
from transformer_jax.decoding.logit_processors import HistoryProcessor
from transformer_jax.decoding.samplers import Greedy, Sample
from transformer_jax.decoding.structured import Form
from transformer_jax.decoding.writer import cut_at_stop
from transformer_jax.loading import (
    Which,
    is_run,
    load_run,
    load_text_model,
    with_weights_held,
)
from transformer_jax.models.factory import build
from transformer_jax.models.places import NO_EDIT, Edit
from transformer_jax.models.quantized import Kind as WeightKind
from transformer_jax.text.attention_weights import AttentionWeights, attention_weights
from transformer_jax.text.evaluation import EvaluateOptions, evaluate
from transformer_jax.text.looking import Looker
from transformer_jax.text.nearest import nearest_words
from transformer_jax.text.reading import Conversation
from transformer_jax.text.scoring import Scorer
from transformer_jax.text.translation import search_translations
from transformer_jax.text.writing import (
    NUM_TOKENS,
    Searching,
    Writing,
    Written,
    as_given,
    as_texts,
    checked,
    sized,
    without_first_space,
)
from transformer_jax.tokenizers.languages import with_languages
from transformer_jax.tokenizers.pretrained import Message, PretrainedTokenizer
from transformer_jax.tokenizers.special import check_unpadded, target_of
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.tasks.answers import answer_sources, search_targets
from transformer_jax.training.tasks.classify import label_texts
from transformer_jax.training.tasks.masked import fill_masks, mask_candidates


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
    """Load a model with its tokenizer, to use it on texts.

    Args:
        path_or_id: the folder of a run (`fit`, train.py), a folder of the Hugging Face hub's form,
            a GGUF file, or the id of a repository of the hub, "ORG/NAME".
        checkpoint: of a run: "best", of the lowest held-out loss; "last". None is best if there is
            one.
        init_from: of a run with adapters: where the model that they are of is now.
        dtype: of a published model: "float32", "bfloat16" or "float16"; None is the file's.
        max_len: of a published model: the longest text, in tokens; None is its own.
        weights: "bf16", "int8" or "int4" hold the weights in fewer bits; None holds them as they
            are.

    Raises:
        ConfigError: if an argument does not fit the model.
        CheckpointError: if a file cannot be read.
    """
    if not isinstance(path_or_id, str | Path):
        rule = "must be a folder, or the id of a repository of the hub"
        raise ConfigError(f"path_or_id is a {type(path_or_id).__name__}: {rule}")
    try:
        of_run = is_run(str(path_or_id))
        began = _began_as_run(Path(path_or_id))
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


def _began_as_run(path: Path) -> bool:
    """Say whether a folder is that of a run that has saved nothing yet."""
    return (path / "metrics.jsonl").exists() or (path / "lock").exists()


class LanguageModel(Looker, Scorer):
    """Use a model on texts; `load` makes one."""

    @overload
    def generate(
        self, prompt: str = "", num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: None = None, **options: Unpack[Searching],
    ) -> str: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: str = "", num_tokens: int | None = None, *,
        stream: Literal[True], samples: None = None, **options: Unpack[Searching],
    ) -> Iterator[str]: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: str = "", num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: int, **options: Unpack[Searching],
    ) -> list[str]: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: None = None, **options: Unpack[Searching],
    ) -> list[str]: ...  # fmt: skip
    def generate(
        self,
        prompt: str | Sequence[str] = "",
        num_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        stream: bool = False,
        sampler: Greedy | Sample | None = None,
        key: jax.Array | None = None,
        processors: Sequence[HistoryProcessor] = (),
        beams: int | None = None,
        samples: int | None = None,
        slots: int = 8,
        cache_dtype: jax.typing.DTypeLike | None = None,
        edit: Mapping[str, Edit] = NO_EDIT,
        schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        **unknown: Never,
    ) -> Written:
        """Return the text that follows a prompt, or the target of a source, or masks filled.

        A text of a list is what it would be alone.

        Args:
            prompt: a text, or a list of texts, of which a list is returned. An empty one is read as
                what begins a text, else as a newline. A warning names words that a tokenizer of
                words does not know.
            num_tokens: the most tokens that are written, at least 1; None is 400, and of a run on
                pairs as many as it was trained on. Where a text outgrows `max_len`, its last half
                is read anew.
            stop: a text, or several, before the first of which the result ends.
            stream: yield the text in pieces, each as soon as nothing can change it.
            sampler: how a token is chosen; None takes the likeliest. A `Sample` needs `key`.
            key: a single `jax.random.key`. Text n of a list draws as one alone does with
                `fold_in(key, n)`.
            processors: what changes the logits before a token is chosen.
            beams: search with so many beams, and return the best text; None searches with none.
            samples: draw so many texts of one prompt, and return a list; None draws one.
            slots: how many texts of a list are written at a time.
            cache_dtype: of the keys and values that are kept; None is the compute dtype.
            edit: functions by the names of places in the model (`transformer_jax.places`), which
                change the values there, as `transformer_jax.inside` makes them. A function gets the
                tokens of the prompt, then each new one by itself.
            schema: a JSON schema, which the text is to have, as JSON. Of it, of `regex` and of
                `grammar` one may be given; they need the extra `structured`.
            regex: a regular expression, in Rust's syntax, which the whole text is to match.
            grammar: a grammar of which the text is to be, in llguidance's variant of Lark's syntax.

        Returns:
            A text, a list of texts for a list or for `samples`, or with `stream` an iterator of
            pieces.

        Raises:
            ValueError: if an argument does not fit the task of the model, or is not what it must
                be.
        """
        refuse_keywords(self.generate, unknown)
        texts, is_list = as_texts("prompt", prompt)
        if self.kind in ("chat", "labels", "signals", "vectors"):
            raise ConfigError(f"generate: {self.instead()}")
        self.warn_of_unknown(texts)
        counts = dict(num_tokens=num_tokens, beams=beams, samples=samples, slots=slots)
        stop = checked(counts, stop, stream, len(texts) if is_list else None)
        generator = self._generator(
            sampler, key, processors, samples, stop=stop, cache_dtype=cache_dtype, edit=edit
        )
        forms: dict[Form, Any] = {"schema": schema, "regex": regex, "grammar": grammar}
        if self.kind != "text" or beams is not None:
            does = "a beam search finds" if beams is not None else "it writes"
            self._refuse(forms, f"{does} texts of no given form")
        generator = replace(generator, grammar=self._grammar(forms))
        sampler = None if isinstance(sampler, Greedy) else sampler
        processors = tuple(processors)
        given: dict[str, object] = dict(
            sampler=sampler, processors=processors, cache_dtype=cache_dtype
        )
        if self.kind == "masks":
            given |= {"num_tokens": num_tokens, "beams": beams, "samples": samples, "stop": stop}
            given |= {"key": None if key is None else "a key"}
            self._refuse(given, "each mask is filled with its likeliest token")
            run = self._masked_run()
            built = build(run.model).edited(edit)
            filled = [fill_masks(run, self.tokenizers, self.params, text, built) for text in texts]
            return as_given(filled, is_list, stream)
        if self.kind == "targets" and self.model.run is not None:
            self._refuse(given | {"samples": samples}, "it takes the likeliest tokens, or beams")
            found = answer_sources(
                self.model.run, self.tokenizers, self.params, texts, beams=beams or 1,
                num_tokens=num_tokens, model=build(self.config).edited(edit),
            )  # fmt: skip
            cut = [cut_at_stop(text, stop) for text in found]
            return as_given(cut, is_list, stream)
        if beams is not None:
            self._refuse(
                {"sampler": sampler, "samples": samples, "stop": stop, "stream": stream},
                "a beam search takes none",
            )
            best = [
                self.search(text, num_tokens, beams=beams, processors=processors,
                            cache_dtype=cache_dtype, edit=edit)[0][1]
                for text in texts
            ]  # fmt: skip
            return as_given(best, is_list, stream)
        if self.kind == "targets":
            return self._targets(generator, texts, num_tokens, samples, is_list, stream)
        ids = [self.read(text) for text in texts]
        return self._written(generator, ids, num_tokens, samples, slots, is_list, stream)

    @overload
    def chat(
        self, messages: Conversation, num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: None = None, **options: Unpack[Writing],
    ) -> str: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Conversation, num_tokens: int | None = None, *,
        stream: Literal[True], samples: None = None, **options: Unpack[Writing],
    ) -> Iterator[str]: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Conversation, num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: int, **options: Unpack[Writing],
    ) -> list[str]: ...  # fmt: skip
    @overload
    def chat(
        self, messages: list[str] | Sequence[Sequence[Message]], num_tokens: int | None = None, *,
        stream: Literal[False] = False, samples: None = None, **options: Unpack[Writing],
    ) -> list[str]: ...  # fmt: skip
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        num_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        stream: bool = False,
        sampler: Greedy | Sample | None = None,
        key: jax.Array | None = None,
        processors: Sequence[HistoryProcessor] = (),
        samples: int | None = None,
        slots: int = 8,
        cache_dtype: jax.typing.DTypeLike | None = None,
        edit: Mapping[str, Edit] = NO_EDIT,
        schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        **unknown: Never,
    ) -> Written:
        """Return the assistant's answer to messages, as the model was trained to read them.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`, or a text, which is one message
                of the user's. A list of conversations gives a list of answers.
            num_tokens: the most tokens of an answer, at least 1; None is 400.
            stop: a text, or several, before the first of which the answer ends.
            stream: yield the answer in pieces, each as soon as nothing can change it.
            sampler: how a token is chosen; None takes the likeliest. A `Sample` needs `key`.
            key: a single `jax.random.key`, as in `generate`.
            processors: what changes the logits before a token is chosen.
            samples: draw so many answers to one conversation, and return a list; None draws one.
            slots: how many answers of a list are written at a time.
            cache_dtype: of the keys and values that are kept; None is the compute dtype.
            edit: functions by the names of places in the model (`transformer_jax.places`), which
                change the values there, as `transformer_jax.inside` makes them. A function gets the
                tokens of the prompt, then each new one by itself.
            schema: a JSON schema, which the text is to have, as JSON. Of it, of `regex` and of
                `grammar` one may be given; they need the extra `structured`.
            regex: a regular expression, in Rust's syntax, which the whole text is to match.
            grammar: a grammar of which the text is to be, in llguidance's variant of Lark's syntax.

        Returns:
            A text, a list of texts for a list or for `samples`, or with `stream` an iterator of
            pieces.

        Raises:
            ConfigError: if the model has no chat template.
            ValueError: if messages have another form or spell out a special token, or no token fits
                after them.
        """
        refuse_keywords(self.chat, unknown)
        many = not isinstance(messages, str) and isinstance(messages, Sequence) and bool(messages)
        many = many and all(isinstance(talk, str | list | tuple) for talk in messages)
        talks: Sequence[Any] = messages if many else [messages]  # asked one by one, below
        counts = dict(num_tokens=num_tokens, samples=samples, slots=slots)
        stop = checked(counts, stop, stream, len(talks) if many else None)
        form = self._grammar({"schema": schema, "regex": regex, "grammar": grammar})
        generator = self._generator(
            sampler, key, processors, samples, stop=stop, cache_dtype=cache_dtype, edit=edit,
            grammar=form,
        )  # fmt: skip
        ids = [self.read_messages(talk) for talk in talks]
        for prompt in ids:
            if len(prompt) > (length := longest_text(self.config)):
                rule = f"0 fit after the prompt (max_len {length})"
                raise DataError(f"messages have {len(prompt)} tokens: {rule}")
        found = self._written(generator, ids, num_tokens, samples, slots, many, stream)
        if form is not None:
            return found
        if isinstance(found, list):
            return [text.removeprefix(" ") for text in found]
        return found.removeprefix(" ") if isinstance(found, str) else without_first_space(found)

    def with_languages(self, source: str, target: str) -> LanguageModel:
        """Return the model as one that translates from a language into another.

        For mBART, M2M-100 and NLLB. The parameters are shared.

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
        begins = target_of(tokenizer)
        model = replace(
            self.model, tokenizer=tokenizer, start_id=begins.start, forced_bos_id=begins.forced_bos
        )
        return replace(self, model=model)

    @known_keywords
    def search(
        self,
        prompt: str | np.ndarray,
        num_tokens: int | None = None,
        *,
        beams: int = 4,
        results: int = 1,
        length_penalty: float | None = None,
        processors: Sequence[HistoryProcessor] = (),
        cache_dtype: jax.typing.DTypeLike | None = None,
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> list[tuple[float, str]]:
        """Return the best texts that a beam search finds after a prompt, with their scores.

        Args:
            prompt: a text, or i32[P], the ids of one.
            num_tokens: the most tokens that are written, at least 1; None is 400, or as many as
                fit; of a run on pairs as many as it was trained on.
            beams: texts that are followed side by side, at least 1.
            results: how many texts are returned, from 1 to beams.
            length_penalty: alpha of score = log p / length^alpha; 0 favours short texts. None is 0,
                and of a run on pairs 1, by which its task judges.
            processors: what changes the logits before tokens are compared; not of a run on pairs.
            cache_dtype: of the keys and values that are kept; None is the compute dtype.
            edit: functions by the names of places in the model (`transformer_jax.places`), which
                change the values there, as `transformer_jax.inside` makes them. A function gets the
                tokens of the prompt, then each new one by itself.

        Returns:
            Pairs of a score and a text, best first.

        Raises:
            ConfigError: if the model writes no text after a prompt.
            ValueError: if an argument is wrong, or no token fits after the prompt.
        """
        if num_tokens is not None:
            check_count("num_tokens", num_tokens, 1, INT32.max)
        if not isinstance(prompt, str | np.ndarray):
            raise ValueError(f"prompt is {prompt!r:.80}: must be a text, or the ids of one")
        of_chat = self.kind == "chat" and not isinstance(prompt, str)
        if not (of_chat or self.kind in ("text", "targets")):
            raise ConfigError(f"search: {self.instead()}")
        self.warn_of_unknown([prompt] if isinstance(prompt, str) else [])
        if self.kind == "targets" and self.model.run is not None:
            ruled_out = {"processors": tuple(processors), "cache_dtype": cache_dtype}
            self._refuse(ruled_out, "its targets are searched without")
            return search_targets(
                self.model.run, self.tokenizers, self.params, str(prompt), beams=beams,
                results=results, num_tokens=num_tokens,
                length_penalty=1.0 if length_penalty is None else length_penalty,
                model=build(self.config).edited(edit),
            )  # fmt: skip
        generator = self._generator(processors=processors, cache_dtype=cache_dtype, edit=edit)
        penalty = length_penalty or 0.0
        if self.kind == "targets":
            source, count = self._source(str(prompt)), self._target_count(num_tokens)
            forcing = replace(generator, processors=self._forcing(generator.processors, count))
            return search_translations(
                forcing, source, count, start=self.model.start_id,  # type: ignore[arg-type]
                beams=beams, results=results, length_penalty=penalty,
            )  # fmt: skip
        ids = self.read(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(prompt, str):
            check_unpadded(self.tokenizer, ids, "the prompt")
        if (left := self.room(ids)) < 1:
            rule = f"0 fit after it (max_len {longest_text(self.config)})"
            raise DataError(f"the prompt has {len(ids)} tokens: {rule}")
        count = min(NUM_TOKENS, left) if num_tokens is None else num_tokens
        return sized(generator, [ids], count).search(
            ids, count, beams=beams, results=results, length_penalty=penalty
        )

    @known_keywords
    def attend(
        self, text: str | tuple[str, str], *, edit: Mapping[str, Edit] = NO_EDIT
    ) -> AttentionWeights:
        """Return the attention weights of every layer and head, with the tokens as labels.

        Args:
            text: a text; of an encoder-decoder, and of a run on pairs, `(source, target)`, or a
                source, whose target is what the model writes.
            edit: functions by the names of places, which change the values there; weights that
                they change are returned as changed.

        Returns:
            Weights with their tokens; their `plot()` is a picture.

        Raises:
            ConfigError: if the model has no attention over tokens.
            ValueError: if the text is longer than the model reads.
        """
        if self.kind == "targets" and isinstance(text, str):
            text = text, self.generate(text, edit=edit)
        return attention_weights(self, text, edit)

    @known_keywords
    def nearest(
        self,
        word: str,
        *,
        minus: str | Sequence[str] = (),
        plus: str | Sequence[str] = (),
        count: int = 10,
    ) -> list[tuple[str, float]]:
        """Return the tokens whose vectors point most nearly where that of a word does.

        e is the input embedding, the vector of each token that the model reads (of an
        encoder-decoder with two vocabularies, those of the sources), and u = e / |e|. With words
        to take away and to add (Mikolov et al. 2013), the direction is

            x = u(word) - sum of u(minus) + sum of u(plus)
            cos(x, e(w)) = x . e(w) / (|x| |e(w)|)

        A word is looked up as it stands after another one, with its space, if the tokenizer has
        that as one token.

        Args:
            word: a word that is one token.
            minus: a word or several, whose vectors are taken away.
            plus: a word or several, whose vectors are added.
            count: how many tokens are returned, at least 1.

        Returns:
            Pairs of a token's text and its cosine, the largest first, without the given words and
            special tokens.

        Raises:
            ConfigError: if the model has no vectors of tokens.
            ValueError: if a word is several tokens, or none, and so has no vector.
        """
        away, added = ([one] if isinstance(one, str) else list(one) for one in (minus, plus))
        return nearest_words(self, word, away, added, count)

    @known_keywords
    def candidates(
        self, text: str, *, count: int = 5, edit: Mapping[str, Edit] = NO_EDIT
    ) -> list[list[tuple[str, float]]]:
        """Return for each `[MASK]` (or `_`) of a text its likeliest tokens and their probabilities.

        Args:
            text: a text with masks.
            count: how many tokens are returned for each mask, at least 1.
            edit: functions by the names of places, which change the values there.

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
        built = build(self.config).edited(edit)
        return mask_candidates(self._masked_run(), self.tokenizers, self.params, text, count, built)

    @overload
    def classify(self, text: str, *, edit: Mapping[str, Edit] = ...) -> tuple[str, float]: ...
    @overload
    def classify(
        self, text: list[str] | tuple[str, ...], *, edit: Mapping[str, Edit] = ...
    ) -> list[tuple[str, float]]: ...
    @known_keywords
    def classify(
        self, text: str | Sequence[str], *, edit: Mapping[str, Edit] = NO_EDIT
    ) -> tuple[str, float] | list[tuple[str, float]]:
        """Return the likeliest class of a text and its probability.

        Args:
            text: a text, or a list of texts, of which a list is returned.
            edit: functions by the names of places, which change the values there; they get all
                tokens of a batch at once.

        Raises:
            ConfigError: if the model is not a run of task "classify".
            ValueError: if a text has no token.
        """
        texts, is_list = as_texts("text", text)
        if self.kind != "labels":
            raise ConfigError(f"classify: {self.instead()}; classes need a run of task 'classify'")
        assert self.model.run is not None
        for one in texts:
            self.check_tokens(one)
        self.warn_of_unknown(texts)
        found = label_texts(
            self.model.run, self.tokenizers, self.params, texts, build(self.config).edited(edit)
        )
        return found if is_list else found[0]

    def evaluate(self, data: str | Path, **options: Unpack[EvaluateOptions]) -> dict[str, float]:
        """Return the measures of the model's task on a file; see `use.evaluation.evaluate`."""
        if not isinstance(data, str | Path):
            raise ConfigError(f"data is {data!r:.80}: must be a file")
        return evaluate(self, str(data), **options)
