"""Judge a model by multiple choice: by whether the right continuation is the likeliest one.

A question is a line of a file, {"context": TEXT, "choices": [TEXT, ...], "answer": INDEX}.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from transformer_jax.text.continuations import check_continues, read_pair, score_requests
from transformer_jax.text.reading import Reader
from transformer_jax.tokenizers.plain_text import read_text, split_lines
from transformer_jax.tokenizers.utf8 import DataError, utf8
from transformer_jax.untrusted_files import Untrusted

FIELDS = "context", "choices", "answer"


@dataclass(frozen=True)
class Question:
    """Hold a context, continuations of it, and which of them is right.

    Attributes:
        context: the text that all choices go on with; blanks at its end are read as part of them.
        choices: at least two texts, all different, none empty.
        answer: the index of the right one, from 0.
        where: the file and the line that it was read from, for errors.

    Raises:
        DataError: if a field is something else.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    where: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.context, str):
            raise DataError(f"context is {self.context!r:.60}: must be a text")
        if not isinstance(self.choices, tuple) or len(self.choices) < 2:
            raise DataError(f"choices is {self.choices!r:.60}: must be two texts or more")
        for n, choice in enumerate(self.choices):
            if not isinstance(choice, str) or not choice:
                raise DataError(f"choices[{n}] is {choice!r:.60}: must be a text, not empty")
            if (first := self.choices.index(choice)) < n:
                rule = f"must differ from choices[{first}]"
                raise DataError(f"choices[{n}] is {choice!r:.60}: {rule}")
        most = len(self.choices) - 1
        if type(self.answer) is not int or not 0 <= self.answer <= most:
            raise DataError(f"answer is {self.answer!r:.60}: must be an index from 0 to {most}")


@dataclass(frozen=True, repr=False)
class Choices:
    """Hold how likely each choice of each question is, and how often the right one is likeliest.

    The likeliest choice is that of the largest log p. Longer texts are less likely, so it is also
    judged by log p / length, with the length of the choice as it is written, without its context:
    in characters, which is lm-eval's `acc_norm`, and in UTF-8 bytes, its `acc_bytes`, which counts
    a text of another alphabet, or emoji, as tokenizers mostly do. Of equal ones the first counts.
    Where a log p is NaN no choice is the likeliest, and every share is NaN.

    Attributes:
        questions: as they were given.
        log_probs: log p of each choice of each question, in nats.
    """

    questions: tuple[Question, ...]
    log_probs: tuple[tuple[float, ...], ...]

    @property
    def accuracy(self) -> float:
        """Return the share of questions whose right choice has the largest log p."""
        return self._accuracy(lambda choice: 1)

    @property
    def accuracy_per_character(self) -> float:
        """Return the share whose right choice has the largest log p / characters."""
        return self._accuracy(len)

    @property
    def accuracy_per_byte(self) -> float:
        """Return the share whose right choice has the largest log p / bytes."""
        return self._accuracy(lambda choice: len(utf8(choice)))

    def _accuracy(self, length: Callable[[str], int]) -> float:
        # `argmax` takes a NaN for the largest: a broken model would look decided.
        if any(math.isnan(p) for row in self.log_probs for p in row):
            return math.nan
        right = [
            int(np.argmax([p / length(c) for p, c in zip(row, question.choices, strict=True)]))
            == question.answer
            for question, row in zip(self.questions, self.log_probs, strict=True)
        ]
        return float(np.mean(right))

    def __repr__(self) -> str:
        names = "accuracy", "accuracy_per_character", "accuracy_per_byte"
        said = ", ".join(f"{name}={getattr(self, name):.4f}" for name in names)
        return f"Choices({len(self.questions)} questions, {said})"


def read_questions(path: str | Path) -> list[Question]:
    """Return the questions of a file of JSON lines; DataError names file, line, field and rule."""
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"choices is {str(path)!r}: cannot be read ({reason})") from None
    found = []
    for number, line in enumerate(split_lines(read_text(content, str(path))), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        value = Untrusted(DataError).parse(line, where)
        found.append(replace(_question(where, value), where=where))
    if not found:
        raise DataError(f"choices is {str(path)!r}: it has no line with a question")
    return found


def _question(where: str, value: object) -> Question:
    """Return the question of an object; DataError says where it is wrong."""
    if isinstance(value, Question):
        return value
    if not isinstance(value, Mapping):
        rule = 'must be {"context": ..., "choices": [...], "answer": ...}'
        raise DataError(f"{where}: is {value!r:.60}: {rule}")
    for name in FIELDS:
        if name not in value:
            raise DataError(f"{where}: {name} is missing: a question has {', '.join(FIELDS)}")
    if unknown := [name for name in value if name not in FIELDS]:
        raise DataError(f"{where}: has {unknown[0]!r:.60}: a question has {', '.join(FIELDS)}")
    choices = value["choices"]
    given = tuple(choices) if isinstance(choices, list | tuple) else choices
    try:
        return Question(value["context"], given, value["answer"])
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def score_choices(
    model: Reader,
    questions: str | Path | Sequence[Question | Mapping[str, object]],
    batch_size: int,
) -> Choices:
    """Return the scores of what `LanguageModel.multiple_choice` takes."""
    check_continues(model, "multiple_choice")
    if isinstance(questions, str | os.PathLike):
        given = read_questions(questions)
    else:
        rule = "must be a file, or a list of questions"
        if not isinstance(questions, list | tuple) or not questions:
            raise DataError(f"questions is {questions!r:.60}: {rule}")
        places = [f"questions[{n}]" for n in range(len(questions))]
        given = [_question(*one) for one in zip(places, questions, strict=True)]
    requests = []
    for n, question in enumerate(given):
        try:
            requests += [read_pair(model, question.context, choice) for choice in question.choices]
        except DataError as error:
            raise DataError(f"{question.where or f'questions[{n}]'}: {error}") from None
    # All choices of all questions at once: batches are of one length, and contexts are shared.
    scores = iter(score_requests(model, requests, batch_size))
    rows = [tuple(next(scores).log_prob for _ in question.choices) for question in given]
    return Choices(tuple(given), tuple(rows))
