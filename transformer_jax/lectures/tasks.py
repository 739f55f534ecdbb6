"""Tasks of the lectures: pairs, pictures and sounds whose examples follow from the seed."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from transformer_jax.config.architectures import AnyModelConfig, Shape
from transformer_jax.config.fields import Count, FieldValue, NonNegative, Size, fail, unread
from transformer_jax.config.inputs import Frames, Inputs, Patches
from transformer_jax.config.keywords import config_class
from transformer_jax.config.kinds import kind_name
from transformer_jax.config.model import transformer_with
from transformer_jax.config.positions import Rope
from transformer_jax.config.tasks import PrefixTask, Seq2SeqTask, Task
from transformer_jax.config.train import TrainConfig
from transformer_jax.lectures.continuous import Signals, answer_signals
from transformer_jax.lectures.signals import read_signals
from transformer_jax.pytree import Params
from transformer_jax.training.tasks.pairs import Pairs
from transformer_jax.training.tasks.task import Tokenizers

Random = np.random.Generator

MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december",
)  # fmt: skip
TRIES = 1000, 20
"""Draws in a row without a new example, and as many for each that was found, after which a task is
taken to have no more."""


@dataclass(frozen=True, kw_only=True)
class _GeneratedTask(Task):
    """Say how many examples are made of a seed, which is the run's."""

    examples: Size = 20000
    """Different examples, the held-out ones included; fewer where there are not as many."""
    judged: Count = 200
    """Held-out examples that are decoded at the end of a run; 0 decodes none."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder-decoder", "decoder")

    @property
    def makes_examples(self) -> bool:
        return True

    @property
    def recipe(self) -> dict[str, FieldValue]:
        return dict(learning_rate=3e-3, steps=2000, batch_size=64, eval_every=500)

    def usual_model(self, model: AnyModelConfig) -> AnyModelConfig:
        # From 0.02 on, the usual start, a model as narrow as this does not learn to recall.
        return transformer_with(model, d_model=64, num_layers=2, init_std=0.2)

    def on_a_file(self, model: AnyModelConfig) -> Task:
        if model.kind == "encoder-decoder":
            return Seq2SeqTask(beams=1)
        return PrefixTask(bidirectional=False, beams=1)

    def load(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> Pairs | Signals:
        """Return the examples of a run, made of its seed."""
        return Pairs(config, tokenizers, vocab_size, generate_pairs(self, config.seed))

    def draw(self, random: Random) -> tuple[str, str]:
        """Draw the source and the target of an example."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _LettersTask(_GeneratedTask):
    """Say what random strings of letters look like."""

    letters: Size = 8
    """Different letters, from a on."""
    min_length: Size = 2
    """Fewest letters of a string."""
    max_length: Size = 8
    """Most letters of a string."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.letters > 26:
            fail("letters", self.letters, "must be at most 26")
        if self.min_length > self.max_length:
            fail("min_length", self.min_length, f"must not exceed max_length {self.max_length}")

    def draw(self, random: Random) -> tuple[str, str]:
        length = int(random.integers(self.min_length, self.max_length + 1))
        source = "".join(chr(97 + int(i)) for i in random.integers(0, self.letters, length))
        return source, source


@config_class
class ReverseTask(_LettersTask):
    """Write a string backwards: bad -> dab."""

    def draw(self, random: Random) -> tuple[str, str]:
        source, _ = super().draw(random)
        return source, source[::-1]


@config_class
class CopyTask(_LettersTask):
    """Write a string again: bad -> bad."""


@config_class
class AdditionTask(_GeneratedTask):
    """Add two numbers: 17+5 -> 22."""

    digits: Size = 2
    """Digits of a number at most."""
    reversed: bool = False
    """The sum begins with its last digit: 17+5 -> 22, 17+8 -> 52 (Lee et al. 2023)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.digits > 9:
            fail("digits", self.digits, "must be at most 9")

    def draw(self, random: Random) -> tuple[str, str]:
        one, two = (int(i) for i in random.integers(0, 10**self.digits, 2))
        total = str(one + two)
        return f"{one}+{two}", total[::-1] if self.reversed else total


@config_class
class DatesTask(_GeneratedTask):
    """Write a date by its numbers: 9 may 1998 -> 1998-05-09."""

    def draw(self, random: Random) -> tuple[str, str]:
        first, last = (datetime.date(*day).toordinal() for day in ((1900, 1, 1), (2099, 12, 31)))
        day = datetime.date.fromordinal(int(random.integers(first, last + 1)))
        month = MONTHS[day.month - 1]
        forms = (
            f"{day.day} {month} {day.year}",
            f"{month} {day.day}, {day.year}",
            f"{day.day}. {month[:3]} {day.year}",
            f"{month[:3]} {day.day} {day.year}",
        )
        return forms[int(random.integers(len(forms)))], day.isoformat()


@config_class
class RecallTask(_GeneratedTask):
    """Recall what stood after letters: a3c7b1 ca -> c7a3 (Ba et al. 2016, 4.1; Arora et al. 2023).

    Many digits to recall in a row make the task learnable in minutes: with one of three asked for,
    small models stop at guessing among the three (benchmarks/NOTES.md).
    """

    pairs: Size = 6
    """Letters, each with a digit after it."""
    letters: Size = 12
    """Different letters, from a on."""
    queries: Size = 6
    """Letters that are asked for, all different."""

    def usual_model(self, model: AnyModelConfig) -> AnyModelConfig:
        return transformer_with(super().usual_model(model), positions=Rope())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.letters > 26:
            fail("letters", self.letters, "must be at most 26")
        if self.pairs > self.letters:
            fail("pairs", self.pairs, f"must not exceed letters {self.letters}")
        if self.queries > self.pairs:
            fail("queries", self.queries, f"must not exceed pairs {self.pairs}")

    def draw(self, random: Random) -> tuple[str, str]:
        letters = [chr(97 + int(i)) for i in random.permutation(self.letters)[: self.pairs]]
        digits = [str(int(i)) for i in random.integers(0, 10, self.pairs)]
        asked = random.permutation(self.pairs)[: self.queries]
        pairs = [letter + digit for letter, digit in zip(letters, digits, strict=True)]
        queries = "".join(letters[i] for i in asked)
        return f"{''.join(pairs)} {queries}", "".join(pairs[i] for i in asked)


@config_class
class ModularTask(_GeneratedTask):
    """Compute (a operation b) modulo a number: 5*4 -> 6 modulo 7 (Power et al. 2022)."""

    modulus: Size = 23
    """The number that results are below."""
    operation: Literal["+", "-", "*"] = "+"
    """What is computed of a and b."""

    def draw(self, random: Random) -> tuple[str, str]:
        one, two = (int(i) for i in random.integers(0, self.modulus, 2))
        results = {"+": one + two, "-": one - two, "*": one * two}
        return f"{one}{self.operation}{two}", str(results[self.operation] % self.modulus)


@dataclass(frozen=True, kw_only=True)
class _ContinuousTask(_GeneratedTask):
    """Say what tasks of pictures and of sound have in common."""

    examples: Size = 4000
    """Different examples, the held-out ones included."""

    @property
    def reads_numbers(self) -> bool:
        return True

    @property
    def recipe(self) -> dict[str, FieldValue]:
        return dict(steps=300, batch_size=64, eval_every=100)

    @property
    def inputs(self) -> Inputs:
        """Return inputs of a model that can read the examples."""
        raise NotImplementedError

    def usual_model(self, model: AnyModelConfig) -> AnyModelConfig:
        return model  # as `fit_model` has made it

    def on_a_file(self, model: AnyModelConfig) -> Task:
        return self

    def load(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> Signals:
        """Return the examples of a run, made of its seed."""
        return Signals(config, tokenizers, vocab_size)

    def load_file(self, config: TrainConfig, tokenizers: Tokenizers, path: str) -> Signals:
        """Return the examples of a .npz file, all of them held out."""
        return Signals(
            config,
            tokenizers,
            config.model.vocab_size,
            read_signals(self, path),
        )

    def answer_file(
        self, config: TrainConfig, tokenizers: Tokenizers, params: Params, path: Path
    ) -> list[str]:
        """Return what the model writes of each picture or sound of a .npz file."""
        found = read_signals(self, str(path), targets=False)
        return answer_signals(config, tokenizers, params, found)

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a transformer that reads the task's inputs; other models as they are.

        Weights begin at 0.1, about the inverse root of the width: from GPT-2's 0.02 on, an encoder
        as small as this stands still for hundreds of steps.
        """
        return transformer_with(model, inputs=self.inputs, init_std=0.1)

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        found, wanted = model.inputs, self.inputs
        if not isinstance(found, type(wanted)):
            fail("task", self.kind, f"needs model.inputs {kind_name(type(wanted))}")
        if found.row_shape(1) != wanted.row_shape(1):
            rule = f"has inputs of {wanted.row_shape(1)}, model.inputs reads {found.row_shape(1)}"
            fail("task", self.kind, rule)


@config_class
class DigitsTask(_ContinuousTask):
    """Read a picture of a digit and write its name, or say which digit it is.

    An encoder-decoder writes the name by its letters; an encoder says the class.
    """

    source: Literal["glyphs", "scikit-learn"] = "glyphs"
    """Where the 8 x 8 pictures come from. glyphs: drawn from the seed; scikit-learn: its 1797
    handwritten digits, which must be installed."""
    noise: NonNegative = 0.1
    """glyphs: standard deviation of the noise, where ink is from 0.5 to 1 and paper 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source != "glyphs":
            unread(self, "needs source 'glyphs'", "noise")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder-decoder", "encoder")

    @property
    def inputs(self) -> Patches:
        return Patches(size=2, height=8, width=8, channels=1)

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        if model.kind == "encoder" and not getattr(model.inputs, "class_token", True):
            fail("class_token", False, "an encoder says the class by this token: must be True")


@config_class
class TonesTask(_ContinuousTask):
    """Hear pure tones, each of which stands for a letter, and write the letters."""

    letters: Size = 8
    """Different letters, from a on: letter number i is a tone of 200 + 150 i Hz."""
    min_length: Size = 1
    """Fewest letters of a sequence."""
    max_length: Size = 5
    """Most letters of a sequence."""
    noise: NonNegative = 0.1
    """Standard deviation of white noise, where a tone has an amplitude from 0.5 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.letters > 12:
            rule = "must be at most 12: the next tone is above half the sampling rate"
            fail("letters", self.letters, rule)
        if self.min_length > self.max_length:
            fail("min_length", self.min_length, f"must not exceed max_length {self.max_length}")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder-decoder",)

    @property
    def inputs(self) -> Frames:
        return Frames(width=16)


GeneratedTask = ReverseTask | CopyTask | AdditionTask | DatesTask | RecallTask | ModularTask
"""Tasks whose pairs are made of a seed."""

ContinuousTask = DigitsTask | TonesTask
"""Tasks whose inputs are numbers, made of a seed, instead of tokens."""


def generate_pairs(task: _GeneratedTask, seed: int) -> list[tuple[str, str]]:
    """Return up to `task.examples` different pairs of source and target, in random order."""
    random = np.random.Generator(np.random.Philox(seed))
    found, missed = dict[str, str](), 0
    # a task with fewer examples than are asked for would draw the same ones for ever
    while len(found) < task.examples and missed < TRIES[0] + TRIES[1] * len(found):
        source, target = task.draw(random)
        missed = missed + 1 if source in found else 0
        found[source] = target
    return list(found.items())
