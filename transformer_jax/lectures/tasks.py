"""Lecture tasks, whose pairs, images, and sounds are generated from a seed."""

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
"""Maximum number of consecutive duplicates: a constant, plus a number per example that was
found."""


@dataclass(frozen=True, kw_only=True)
class _GeneratedTask(Task):
    """Base class of tasks whose examples are generated from the seed of the run."""

    examples: Size = 20000
    """Maximum number of distinct examples, including held-out examples."""
    judged: Count = 200
    """Number of held-out examples to decode at the end of a run; 0 disables decoding."""

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
        # with the default of 0.02, a model this narrow does not learn to recall
        return transformer_with(model, d_model=64, num_layers=2, init_std=0.2)

    def on_a_file(self, model: AnyModelConfig) -> Task:
        if model.kind == "encoder-decoder":
            return Seq2SeqTask(beams=1)
        return PrefixTask(bidirectional=False, beams=1)

    def load(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> Pairs | Signals:
        """Return the examples of a run, which are generated from its seed."""
        return Pairs(config, tokenizers, vocab_size, generate_pairs(self, config.seed))

    def draw(self, random: Random) -> tuple[str, str]:
        """Draw the source and the target of an example."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _LettersTask(_GeneratedTask):
    """Base class of tasks on random strings of letters."""

    letters: Size = 8
    """Number of distinct letters, starting with a."""
    min_length: Size = 2
    """Minimum length of a string."""
    max_length: Size = 8
    """Maximum length of a string."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.letters > 26:
            fail("letters", self.letters, "must be at most 26")
        if self.min_length > self.max_length:
            fail("min_length", self.min_length, f"must not exceed max_length, {self.max_length}")

    def draw(self, random: Random) -> tuple[str, str]:
        length = int(random.integers(self.min_length, self.max_length + 1))
        source = "".join(chr(97 + int(i)) for i in random.integers(0, self.letters, length))
        return source, source


@config_class
class ReverseTask(_LettersTask):
    """Reverse a string: bad -> dab."""

    def draw(self, random: Random) -> tuple[str, str]:
        source, _ = super().draw(random)
        return source, source[::-1]


@config_class
class CopyTask(_LettersTask):
    """Copy a string: bad -> bad."""


@config_class
class AdditionTask(_GeneratedTask):
    """Add two numbers: 17+5 -> 22."""

    digits: Size = 2
    """Maximum number of digits in each number."""
    reversed: bool = False
    """Write the sum with its last digit first: 17+5 -> 22, 17+8 -> 52 (Lee et al. 2023)."""

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
    """Convert a date to ISO format: 9 may 1998 -> 1998-05-09."""

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
    """Associative recall: a3c7b1 ca -> c7a3 (Ba et al. 2016, section 4.1; Arora et al. 2023).

    Several queries per example make the task learnable in minutes. With three pairs and one query,
    small models only guess among the three digits (benchmarks/NOTES.md).
    """

    pairs: Size = 6
    """Number of pairs of a letter and a digit."""
    letters: Size = 12
    """Number of distinct letters, starting with a."""
    queries: Size = 6
    """Number of letters to recall, which are all distinct."""

    def usual_model(self, model: AnyModelConfig) -> AnyModelConfig:
        return transformer_with(super().usual_model(model), positions=Rope())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.letters > 26:
            fail("letters", self.letters, "must be at most 26")
        if self.pairs > self.letters:
            fail("pairs", self.pairs, f"must not exceed letters, {self.letters}")
        if self.queries > self.pairs:
            fail("queries", self.queries, f"must not exceed pairs, {self.pairs}")

    def draw(self, random: Random) -> tuple[str, str]:
        letters = [chr(97 + int(i)) for i in random.permutation(self.letters)[: self.pairs]]
        digits = [str(int(i)) for i in random.integers(0, 10, self.pairs)]
        order = random.permutation(self.pairs)[: self.queries]
        pairs = [letter + digit for letter, digit in zip(letters, digits, strict=True)]
        queries = "".join(letters[i] for i in order)
        return f"{''.join(pairs)} {queries}", "".join(pairs[i] for i in order)


@config_class
class ModularTask(_GeneratedTask):
    """Modular arithmetic: 5*4 -> 6 modulo 7 (Power et al. 2022)."""

    modulus: Size = 23
    """The modulus."""
    operation: Literal["+", "-", "*"] = "+"
    """The operation."""

    def draw(self, random: Random) -> tuple[str, str]:
        one, two = (int(i) for i in random.integers(0, self.modulus, 2))
        results = {"+": one + two, "-": one - two, "*": one * two}
        return f"{one}{self.operation}{two}", str(results[self.operation] % self.modulus)


@dataclass(frozen=True, kw_only=True)
class _ContinuousTask(_GeneratedTask):
    """Base class of tasks on images and sound."""

    examples: Size = 4000
    """Maximum number of distinct examples, including held-out examples."""

    @property
    def reads_numbers(self) -> bool:
        return True

    @property
    def recipe(self) -> dict[str, FieldValue]:
        return dict(steps=300, batch_size=64, eval_every=100)

    @property
    def inputs(self) -> Inputs:
        """Return the input config of a model that reads the examples."""
        raise NotImplementedError

    def usual_model(self, model: AnyModelConfig) -> AnyModelConfig:
        return model  # `fit_model` has already changed it

    def on_a_file(self, model: AnyModelConfig) -> Task:
        return self

    def load(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> Signals:
        """Return the examples of a run, which are generated from its seed."""
        return Signals(config, tokenizers, vocab_size)

    def load_file(self, config: TrainConfig, tokenizers: Tokenizers, path: str) -> Signals:
        """Return the examples in a .npz file, which are all held out."""
        return Signals(config, tokenizers, config.model.vocab_size, read_signals(self, path))

    def answer_file(
        self, config: TrainConfig, tokenizers: Tokenizers, params: Params, path: Path
    ) -> list[str]:
        """Return the model's answer for each image or sound in a .npz file."""
        signals = read_signals(self, str(path), targets=False)
        return answer_signals(config, tokenizers, params, signals)

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a transformer with the inputs of the task. Other models are returned unchanged.

        The value of init_std is 0.1, which is about one over the square root of the width. With
        GPT-2's value of 0.02, an encoder this small makes no progress for hundreds of steps.
        """
        return transformer_with(model, inputs=self.inputs, init_std=0.1)

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        found, wanted = model.inputs, self.inputs
        if not isinstance(found, type(wanted)):
            fail("task", self.kind, f"needs model.inputs {kind_name(type(wanted))}")
        if found.row_shape(1) != wanted.row_shape(1):
            rule = (
                f"has inputs of shape {wanted.row_shape(1)}, but model.inputs reads "
                f"{found.row_shape(1)}"
            )
            fail("task", self.kind, rule)


@config_class
class DigitsTask(_ContinuousTask):
    """Recognition of digits in images.

    An encoder-decoder writes the name of the digit letter by letter. An encoder predicts the class.
    """

    source: Literal["glyphs", "scikit-learn"] = "glyphs"
    """Source of the 8 x 8 images: glyphs, which are drawn from the seed, or the 1797 handwritten
    digits in scikit-learn, which must be installed."""
    noise: NonNegative = 0.1
    """Standard deviation of the noise in glyphs, where ink is from 0.5 to 1 and paper is 0."""

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
            fail("class_token", False, "must be True, because the encoder classifies this token")


@config_class
class TonesTask(_ContinuousTask):
    """Transcription of pure tones, one per letter."""

    letters: Size = 8
    """Number of distinct letters, starting with a. Letter i is a tone of 200 + 150 i Hz."""
    min_length: Size = 1
    """Minimum length of a sequence."""
    max_length: Size = 5
    """Maximum length of a sequence."""
    noise: NonNegative = 0.1
    """Standard deviation of the white noise. The amplitude of a tone is from 0.5 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.letters > 12:
            rule = "must be at most 12: higher tones exceed half the sampling rate"
            fail("letters", self.letters, rule)
        if self.min_length > self.max_length:
            fail("min_length", self.min_length, f"must not exceed max_length, {self.max_length}")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder-decoder",)

    @property
    def inputs(self) -> Frames:
        return Frames(width=16)


GeneratedTask = ReverseTask | CopyTask | AdditionTask | DatesTask | RecallTask | ModularTask
"""Tasks whose pairs are generated from a seed."""

ContinuousTask = DigitsTask | TonesTask
"""Tasks whose inputs are numbers generated from a seed."""


def generate_pairs(task: _GeneratedTask, seed: int) -> list[tuple[str, str]]:
    """Return up to `task.examples` distinct pairs of a source and a target in random order."""
    random = np.random.Generator(np.random.Philox(seed))
    pairs, duplicates = dict[str, str](), 0
    # a task can have fewer distinct examples than this
    while len(pairs) < task.examples and duplicates < TRIES[0] + TRIES[1] * len(pairs):
        source, target = task.draw(random)
        duplicates = duplicates + 1 if source in pairs else 0
        # A dict keeps one target per source, so a held-out source is never part of the training
        # examples.
        pairs[source] = target
    return list(pairs.items())
