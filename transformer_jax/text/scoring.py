"""Say how likely a model finds texts, continuations of contexts, and the choices of questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never, overload

from transformer_jax.checks import check_count
from transformer_jax.config import ConfigError
from transformer_jax.config.keywords import refuse_keywords
from transformer_jax.models.places import NO_EDIT, Edit
from transformer_jax.text.choices import Choices, Question, score_choices
from transformer_jax.text.continuations import (
    Continuation,
    check_continues,
    read_pair,
    score_requests,
)
from transformer_jax.text.reading import Reader
from transformer_jax.text.scores import Score, Scored, Windows, is_pair, score_text
from transformer_jax.tokenizers.utf8 import DataError


class Scorer(Reader):
    """Score texts; `LanguageModel` has these methods."""

    @overload
    def score(
        self, text: Scored, *, window: int | None = None, stride: int | None = None,
        batch_size: int = 8, edit: Mapping[str, Edit] = ...,
    ) -> Score: ...  # fmt: skip
    @overload
    def score(
        self, text: list[str] | list[tuple[str, str]], *, window: int | None = None,
        stride: int | None = None, batch_size: int = 8, edit: Mapping[str, Edit] = ...,
    ) -> list[Score]: ...  # fmt: skip
    def score(
        self,
        text: Scored | list[str] | list[tuple[str, str]],
        *,
        window: int | None = None,
        stride: int | None = None,
        batch_size: int = 8,
        edit: Mapping[str, Edit] = NO_EDIT,
        **unknown: Never,
    ) -> Score | list[Score]:
        """Return how likely the model finds a text: a `Score`, in nats, or a list of a list's.

        A model that puts nothing before a text scores all of its tokens but the first.

        Args:
            text: a text of a decoder; `(source, target)`, of which the target is scored, of an
                encoder-decoder, a run on pairs or one of preferences; messages, of which the last,
                the assistant's, is scored, of a chat model.
            window: how many tokens are read at a time, from 1 to max_len; None is max_len.
            stride: a longer text is read in windows that begin so many tokens after one another,
                from 1 to `window`; a token counts once, in the first window that has it, where more
                than window - stride tokens are before it. None is window / 2.
            batch_size: how many windows are read side by side, at least 1.
            edit: functions by the names of places, which change the values there, as in `generate`;
                they get all tokens of a window at once, and windows one by one.

        Raises:
            ConfigError: if the model gives no probability of a text, as a masked one.
            ValueError: if the text has another form, or too few tokens, or `window` or `stride` is
                out of its range.
        """
        refuse_keywords(self.score, unknown)
        for name, value in dict(window=window, stride=stride, batch_size=batch_size).items():
            if value is not None:
                check_count(name, value, 1)
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
        if many:
            return [score_text(self, one, read, edit) for one in asked]
        return score_text(self, text, read, edit)  # type: ignore[arg-type]

    def continuations(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        batch_size: int = 8,
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> list[Continuation]:
        """Return how likely the model finds each continuation of its context.

        Both are encoded as one text; blanks at the end of a context go to its continuation, as in
        lm-eval. Of what is longer than `max_len` the last tokens are read.

        Args:
            pairs: (context, continuation) each. Continuations of one context read it once.
            batch_size: how many rows are read side by side, at least 1.
            edit: functions by the names of places, which change the values there, as in `score`;
                pairs are then read one by one.

        Returns:
            A `Continuation` of each pair, in their order: log p in nats, whether every token is
            the likeliest, and how many tokens there are.

        Raises:
            ConfigError: if the model does not go on with a text.
            ValueError: if `pairs` are none, or a text has no token.
        """
        check_count("batch_size", batch_size, 1)
        check_continues(self, "continuations")
        if not isinstance(pairs, list | tuple) or not all(is_pair(pair) for pair in pairs):
            raise DataError(f"pairs is {pairs!r:.80}: must be a list of (context, continuation)")
        requests = [read_pair(self, *pair) for pair in pairs]
        return score_requests(self, requests, batch_size, edit=edit)

    def multiple_choice(
        self,
        questions: str | Path | Sequence[Question | Mapping[str, object]],
        *,
        batch_size: int = 8,
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> Choices:
        """Return how often the right choice is the likeliest one, with log p of every choice.

        Args:
            questions: a file of JSON lines {"context": ..., "choices": [...], "answer": INDEX}, or
                a list of such objects.
            batch_size: how many choices are read side by side, at least 1.
            edit: functions by the names of places, which change the values there, as in `score`;
                choices are then read one by one.

        Raises:
            ConfigError: if the model does not go on with a text.
            ValueError: if a question has another form, naming file, line, field and rule.
        """
        check_count("batch_size", batch_size, 1)
        return score_choices(self, questions, batch_size, edit)
