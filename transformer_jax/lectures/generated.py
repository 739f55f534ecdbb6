"""Make the pairs of tasks that need no data: every example follows from the seed."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import numpy as np

from transformer_jax.config.tasks import (
    AdditionTask,
    CopyTask,
    DatesTask,
    GeneratedTask,
    ModularTask,
    RecallTask,
    ReverseTask,
)

Random = np.random.Generator
Pair = tuple[str, str]

_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december",
)  # fmt: skip
_TRIES = 1000, 20
"""Draws in a row without a new example, and as many for each that was found, after which a task is
taken to have no more."""


def generate_pairs(task: GeneratedTask, seed: int) -> list[Pair]:
    """Return up to `task.examples` different pairs of source and target, in random order."""
    random = np.random.Generator(np.random.Philox(seed))
    draw, found, missed = _drawing(task), dict[str, str](), 0
    while len(found) < task.examples and missed < _TRIES[0] + _TRIES[1] * len(found):
        source, target = draw(random)
        missed = missed + 1 if source in found else 0
        found[source] = target
    return list(found.items())


def _drawing(task: GeneratedTask) -> Callable[[Random], Pair]:
    """Return the function that draws one example of a task."""
    match task:
        case ReverseTask() | CopyTask():
            back = isinstance(task, ReverseTask)
            return lambda random: _string(task, random, back)
        case AdditionTask():
            return lambda random: _sum(task, random)
        case DatesTask():
            return _date
        case RecallTask():
            return lambda random: _recall(task, random)
        case ModularTask():
            return lambda random: _modular(task, random)


def _string(task: ReverseTask | CopyTask, random: Random, back: bool) -> Pair:
    length = int(random.integers(task.min_length, task.max_length + 1))
    source = "".join(chr(97 + int(i)) for i in random.integers(0, task.letters, length))
    return source, source[::-1] if back else source


def _sum(task: AdditionTask, random: Random) -> Pair:
    one, two = (int(i) for i in random.integers(0, 10**task.digits, 2))
    total = str(one + two)
    return f"{one}+{two}", total[::-1] if task.reversed else total


def _date(random: Random) -> Pair:
    first, last = datetime.date(1900, 1, 1).toordinal(), datetime.date(2099, 12, 31).toordinal()
    day = datetime.date.fromordinal(int(random.integers(first, last + 1)))
    month = _MONTHS[day.month - 1]
    forms = (
        f"{day.day} {month} {day.year}",
        f"{month} {day.day}, {day.year}",
        f"{day.day}. {month[:3]} {day.year}",
        f"{month[:3]} {day.day} {day.year}",
    )
    return forms[int(random.integers(len(forms)))], day.isoformat()


def _recall(task: RecallTask, random: Random) -> Pair:
    letters = [chr(97 + int(i)) for i in random.permutation(task.letters)[: task.pairs]]
    digits = [str(int(i)) for i in random.integers(0, 10, task.pairs)]
    asked = random.permutation(task.pairs)[: task.queries]
    pairs = [letter + digit for letter, digit in zip(letters, digits, strict=True)]
    queries = "".join(letters[i] for i in asked)
    return f"{''.join(pairs)} {queries}", "".join(pairs[i] for i in asked)


def _modular(task: ModularTask, random: Random) -> Pair:
    one, two = (int(i) for i in random.integers(0, task.modulus, 2))
    results = {"+": one + two, "-": one - two, "*": one * two}
    return f"{one}{task.operation}{two}", str(results[task.operation] % task.modulus)
