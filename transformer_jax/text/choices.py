"""Multiple-choice evaluation: how often the correct continuation of a context is the likeliest.

Each line of a file is a question {"context": TEXT, "choices": [TEXT, ...], "answer": INDEX}.
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
    """Question with a context, possible continuations, and the index of the correct one.

    Attributes:
        context: text that every choice continues. Trailing blanks are treated as part of the
            choice.
        choices: at least two distinct, nonempty strings.
        answer: zero-based index of the correct choice.
        where: file and line of the question, for error messages.

    Raises:
        DataError: if a field is invalid.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    where: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.context, str):
            raise DataError(f"context is {self.context!r:.60}: must be a string")
        if not isinstance(self.choices, tuple) or len(self.choices) < 2:
            raise DataError(f"choices is {self.choices!r:.60}: must be two or more strings")
        for n, choice in enumerate(self.choices):
            if not isinstance(choice, str) or not choice:
                raise DataError(f"choices[{n}] is {choice!r:.60}: must be a nonempty string")
            if (first := self.choices.index(choice)) < n:
                rule = f"must differ from choices[{first}]"
                raise DataError(f"choices[{n}] is {choice!r:.60}: {rule}")
        most = len(self.choices) - 1
        if type(self.answer) is not int or not 0 <= self.answer <= most:
            raise DataError(f"answer is {self.answer!r:.60}: must be an index from 0 to {most}")


@dataclass(frozen=True, repr=False)
class Choices:
    """Log-probabilities of choices, and how often the correct choice is the likeliest.

    Because log p decreases with length, two of the accuracies compare log p / length instead. The
    length of a choice excludes the context. It is measured in characters (lm-eval's `acc_norm`) or
    in UTF-8 bytes (lm-eval's `acc_bytes`), which are closer to the number of tokens for non-Latin
    alphabets and emoji. Ties go to the first choice. If any log p is NaN, all accuracies are NaN.

    Attributes:
        questions: the questions, in order.
        log_probs: log p of each choice of each question, in nats.
    """

    questions: tuple[Question, ...]
    log_probs: tuple[tuple[float, ...], ...]

    @property
    def accuracy(self) -> float:
        """Fraction of questions whose correct choice has the largest log p."""
        return self._accuracy(lambda choice: 1)

    @property
    def accuracy_per_character(self) -> float:
        """Fraction of questions whose correct choice has the largest log p per character."""
        return self._accuracy(len)

    @property
    def accuracy_per_byte(self) -> float:
        """Fraction of questions whose correct choice has the largest log p per byte."""
        return self._accuracy(lambda choice: len(utf8(choice)))

    def _accuracy(self, length: Callable[[str], int]) -> float:
        # `argmax` treats NaN as the largest value, so a broken model would still get a score.
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
        measures = ", ".join(f"{name}={getattr(self, name):.4f}" for name in names)
        return f"Choices({len(self.questions)} questions, {measures})"


def read_questions(path: str | Path) -> list[Question]:
    """Read questions from JSON Lines; a DataError states the file, line, field and rule."""
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
        raise DataError(f"choices is {str(path)!r}: the file contains no questions")
    return found


def _question(where: str, value: object) -> Question:
    if isinstance(value, Question):
        return value
    if not isinstance(value, Mapping):
        rule = 'must be {"context": ..., "choices": [...], "answer": ...}'
        raise DataError(f"{where}: the question is {value!r:.60}: {rule}")
    for name in FIELDS:
        if name not in value:
            raise DataError(f"{where}: {name} is missing: a question must have {', '.join(FIELDS)}")
    if unknown := [name for name in value if name not in FIELDS]:
        rule = f"a question must have {', '.join(FIELDS)}"
        raise DataError(f"{where}: unknown field {unknown[0]!r:.60}: {rule}")
    choices = value["choices"]
    choices = tuple(choices) if isinstance(choices, list) else choices
    try:
        return Question(value["context"], choices, value["answer"])
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def score_choices(
    model: Reader,
    questions: str | Path | Sequence[Question | Mapping[str, object]],
    batch_size: int,
) -> Choices:
    """Score all questions, as described in `LanguageModel.multiple_choice`."""
    check_continues(model, "multiple_choice")
    if isinstance(questions, str | os.PathLike):
        parsed = read_questions(questions)
    else:
        rule = "must be a file or a nonempty list of questions"
        if not isinstance(questions, list | tuple) or not questions:
            raise DataError(f"questions is {questions!r:.60}: {rule}")
        parsed = [_question(f"questions[{n}]", one) for n, one in enumerate(questions)]
    requests = []
    for n, question in enumerate(parsed):
        try:
            requests += [read_pair(model, question.context, choice) for choice in question.choices]
        except DataError as error:
            raise DataError(f"{question.where or f'questions[{n}]'}: {error}") from None
    # Score all questions together, so that choices of similar length or equal context share a
    # batch.
    scores = iter(score_requests(model, requests, batch_size))
    rows = [tuple(next(scores).log_prob for _ in question.choices) for question in parsed]
    return Choices(tuple(parsed), tuple(rows))
