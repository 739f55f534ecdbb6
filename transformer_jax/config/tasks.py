"""Configure what a model is trained for: one value, whose fields are those of its task.

A task here says what is asked for; `training/tasks` reads the files and makes the batches.
`check_model` says which models can learn it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard, get_args

from transformer_jax.config.architectures import AnyModelConfig, Shape, model_shape
from transformer_jax.config.fields import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    Size,
    check_types,
    fail,
    kind_name,
    unread,
)
from transformer_jax.config.inputs import Frames, Inputs, Patches
from transformer_jax.config.keywords import known_fields
from transformer_jax.config.model import ModelConfig
from transformer_jax.config.own import check_own
from transformer_jax.config.positions import Learned
from transformer_jax.lectures.ngram_config import NgramConfig
from transformer_jax.lectures.recurrent_config import RecurrentConfig
from transformer_jax.shown import short_repr

Documents = Literal["lines", "paragraphs", "files", "prepared"]
Vocabulary = Literal["shared", "separate"]


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Say what every task has in common."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def kind(self) -> str:
        """Return the task's name in files and flags."""
        return kind_name(type(self))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of model that can learn the task, the usual one first."""
        return ("decoder",)

    @property
    def reads_numbers(self) -> bool:
        """Say whether the examples are numbers, as of a picture, in the place of tokens."""
        return False

    def check_model(self, model: AnyModelConfig) -> None:
        """Raise ConfigError where the model cannot learn this task."""
        shape = model_shape(model)
        if shape not in self.shapes:
            wanted = " or ".join(self.shapes)
            article = "a" if wanted.startswith("d") else "an"
            rule = f"is learnt by {article} {wanted}, the model is of kind {shape!r}"
            fail("task", self.kind, rule)
        inputs = getattr(model, "inputs", None)
        if inputs is not None and not self.reads_numbers:
            fail("task", self.kind, f"reads tokens, model.inputs is {kind_name(type(inputs))!r}")
        if (of := getattr(model, "classes_of", "text")) != "text":
            fail("classes_of", of, "no task learns classes of tokens: must be 'text'")

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a model with what the task asks of it, where that is more than its shape."""
        return model


class OwnTask(_Task):
    """Hold a task of your own: make a frozen dataclass of it that loads its examples.

    `shapes`, `check_model` and `fit_model` say which models can learn it, by default decoders.
    """

    own_kind_of = _Task

    @property
    def loaded_by(self) -> str | None:
        """Return what loads its runs, where they hold something else than `config.model`."""
        return None

    # of `TrainConfig`, `Tokenizers` and `TrainingTask`, which are of the floors above
    def load(self, config: Any, tokenizers: Any, vocab_size: int | None) -> Any:
        """Return a `training.tasks.TrainingTask` of the run, as `training.tasks.load_task` does.

        Args:
            config: of the run.
            tokenizers: of a run that goes on, or of the model it starts from; else None.
            vocab_size: more ids than the tokenizer's; None is the tokenizer's.
        """
        raise NotImplementedError

    def check_model(self, model: AnyModelConfig) -> None:
        """Raise ConfigError where the model cannot learn this task, or no config can hold it."""
        check_own("task", self)
        super().check_model(model)


def _is_bert(model: AnyModelConfig) -> TypeGuard[ModelConfig]:
    """Say whether an encoder of tokens is built as BERT, RoBERTa and DistilBERT are."""
    return (
        isinstance(model, ModelConfig)
        and model.kind == "encoder"
        and model.inputs is None
        and model.norm_order == "post"
        and model.embedding_norm
    )


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class LanguageTask(_Task):
    """Predict the next token of a text."""

    documents: Documents | None = None
    """Cut the text into documents: at each line, at each empty line, or at the end of each file;
    prepared: those of a prepared folder; None reads one long text, in windows."""
    packed: bool = True
    """With documents: several short ones in a row, which do not see each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.documents is None:
            unread(self, "needs documents", "packed")


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class MaskedTask(_Task):
    """Predict tokens that were hidden in a text (Devlin et al. 2019, 3.1)."""

    rate: Fraction = 0.15
    """Share of the tokens that are to be predicted."""
    replaced: float = 0.8
    """Share of those that become the mask token."""
    random: Fraction = 0.1
    """Share of those that become a random token; the rest stay as they are."""
    whole_words: bool = False
    """All tokens of a word are hidden together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.replaced <= 1.0 or self.replaced + self.random > 1.0:
            rule = f"must be at least 0, and with random {self.random} at most 1"
            fail("replaced", self.replaced, rule)
        if self.rate == 0:
            fail("rate", self.rate, "must be above 0")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder",)

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        if isinstance(model, ModelConfig | RecurrentConfig) and model.num_classes is not None:
            fail("num_classes", model.num_classes, "a masked task has no classes: must be None")

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return an encoder without a classifier; one built as BERT, with the head of BERT."""
        if isinstance(model, ModelConfig):
            transform = model.pooler == "transform"  # has the layers of that head
            model = replace(
                model, num_classes=None, classes_of="text", pooler_reads="first",
                pooler=None if model.pooler in ("transform", "gelu") else model.pooler,
            )  # fmt: skip
            head = transform or _is_bert(model)
            return replace(model, masked_token_head=True, logit_bias=True) if head else model
        if isinstance(model, RecurrentConfig):
            return replace(model, num_classes=None)
        return model


@dataclass(frozen=True, kw_only=True)
class _PairFilesTask(_Task):
    """Say where the pairs of two texts come from."""

    targets: str | None = None
    """The file of the targets, line by line beside `data`; None: a line of `data` holds source and
    target with a tab between them."""
    val_targets: str | None = None
    """The file of the targets of `val_data`."""
    beams: Size = 4
    """Beams of the search when the held-out pairs are decoded; 1 takes the likeliest token."""
    judged: Count = 200
    """Held-out pairs that are decoded at the end of a run; 0 decodes none."""

    def __post_init__(self) -> None:
        super().__post_init__()


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class Seq2SeqTask(_PairFilesTask):
    """Read a source and write its target (Sutskever et al. 2014)."""

    vocabulary: Vocabulary = "shared"
    """shared: one tokenizer for source and target; separate: one for each."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder-decoder",)


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class PrefixTask(_PairFilesTask):
    """Go on from a source with its target in one row (Raffel et al. 2020, 3.2.1)."""

    bidirectional: bool = True
    """The tokens of a source see each other in both directions; a transformer's only."""
    packed: bool = True
    """Several short pairs in a row, which do not see each other."""


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class ClassifyTask(_Task):
    """Say which class a text is of."""

    labels: tuple[str, ...] | None = None
    """The names of the classes; None takes those of the training part, in order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels is not None and len(set(self.labels)) < max(2, len(self.labels)):
            fail("labels", self.labels, "must be at least two different names")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder", "decoder")

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        if isinstance(model, NgramConfig):
            fail("task", self.kind, "is not learnt by counting: the model is an n-gram")

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return an encoder without the head of hidden tokens, and with the pooler of its family.

        Of those built as BERT, DistilBERT alone has no token types, and a pooler of its own;
        ModernBERT's is its head of hidden tokens. ELECTRA's begins as that of its discriminator.
        """
        if not isinstance(model, ModelConfig) or model.kind != "encoder":
            return model
        model = replace(model, masked_token_head=False, logit_bias=False)
        if model.pooler_reads == "each" and model.num_classes == 1:  # a discriminator
            return replace(model, num_classes=None, classes_of="text", pooler_reads="first")
        if model.pooler is not None:
            return model
        if not model.first_norm:
            return replace(model, pooler="transform")
        if model.embedding_dim is not None and not model.share_layers:
            return replace(model, pooler="gelu")
        mpnet = isinstance(model.positions, Learned) and model.positions.buckets is not None
        relu = _is_bert(model) and model.type_vocab_size is None and not mpnet
        return replace(model, pooler="relu") if relu else model


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class ChatTask(_Task):
    """Answer messages: the loss is of the assistant's turns alone."""

    packed: bool = True
    """Several short conversations in a row, which do not see each other."""


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class PreferenceTask(_Task):
    """Learn from pairs of answers which is preferred, relative to the model of init_from (DPO)."""

    beta: Positive = 0.1
    """How much a log-probability that has moved away from that model's counts, per nat."""
    messages: bool | None = None
    """Whether a prompt is messages, or else a text; None: as the data has them."""

    def __post_init__(self) -> None:
        super().__post_init__()

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        if not isinstance(model, ModelConfig):
            kind = kind_name(type(model)).removesuffix("config")
            fail("task", self.kind, f"is for transformers, the model is {kind}")

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a model without dropout, which the model that it is compared with has not."""
        if isinstance(model, ModelConfig):
            return replace(model, dropout=0.0, attention_dropout=0.0)
        return model


@dataclass(frozen=True, kw_only=True)
class _GeneratedTask(_Task):
    """Say how many examples are made of a seed, which is the run's."""

    examples: Size = 20000
    """Different examples, the held-out ones included; fewer where there are not as many."""
    judged: Count = 200
    """Held-out examples that are decoded at the end of a run; 0 decodes none."""

    def __post_init__(self) -> None:
        super().__post_init__()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder-decoder", "decoder")


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


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class ReverseTask(_LettersTask):
    """Write a string backwards: bad -> dab."""


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class CopyTask(_LettersTask):
    """Write a string again: bad -> bad."""


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
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


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class DatesTask(_GeneratedTask):
    """Write a date by its numbers: 9 may 1998 -> 1998-05-09."""


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.letters > 26:
            fail("letters", self.letters, "must be at most 26")
        if self.pairs > self.letters:
            fail("pairs", self.pairs, f"must not exceed letters {self.letters}")
        if self.queries > self.pairs:
            fail("queries", self.queries, f"must not exceed pairs {self.pairs}")


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class ModularTask(_GeneratedTask):
    """Compute (a operation b) modulo a number: 5*4 -> 6 modulo 7 (Power et al. 2022)."""

    modulus: Size = 23
    """The number that results are below."""
    operation: Literal["+", "-", "*"] = "+"
    """What is computed of a and b."""


@dataclass(frozen=True, kw_only=True)
class _ContinuousTask(_GeneratedTask):
    """Say what tasks of pictures and of sound have in common."""

    examples: int = 4000
    """Different examples, the held-out ones included."""

    @property
    def reads_numbers(self) -> bool:
        return True

    @property
    def inputs(self) -> Inputs:
        """Return inputs of a model that can read the examples."""
        raise NotImplementedError

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a transformer that reads the task's inputs; other models as they are.

        Weights begin at 0.1, about the inverse root of the width: from GPT-2's 0.02 on, an encoder
        as small as this stands still for hundreds of steps.
        """
        if not isinstance(model, ModelConfig):
            return model
        return replace(model, inputs=self.inputs, init_std=0.1)

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        found = model.inputs if isinstance(model, ModelConfig) else None
        wanted = self.inputs
        if not isinstance(found, type(wanted)):
            fail("task", self.kind, f"needs model.inputs {kind_name(type(wanted))}")
        if found.row_shape(1) != wanted.row_shape(1):
            rule = f"has inputs of {wanted.row_shape(1)}, model.inputs reads {found.row_shape(1)}"
            fail("task", self.kind, rule)


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
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
        inputs = model.inputs if isinstance(model, ModelConfig) else None
        if model_shape(model) == "encoder" and not getattr(inputs, "class_token", True):
            fail("class_token", False, "an encoder says the class by this token: must be True")


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
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


Task = (
    LanguageTask
    | MaskedTask
    | Seq2SeqTask
    | PrefixTask
    | ClassifyTask
    | ChatTask
    | PreferenceTask
    | ReverseTask
    | CopyTask
    | AdditionTask
    | DatesTask
    | RecallTask
    | ModularTask
    | DigitsTask
    | TonesTask
)
"""The settings of any task."""

GeneratedTask = ReverseTask | CopyTask | AdditionTask | DatesTask | RecallTask | ModularTask
"""Tasks whose pairs are made of a seed."""

ContinuousTask = DigitsTask | TonesTask
"""Tasks whose inputs are numbers, made of a seed, in the place of tokens."""

PairsTask = Seq2SeqTask | PrefixTask | GeneratedTask
"""Tasks of a source and its target."""

TASKS = {kind_name(task): task for task in get_args(Task)}
"""Every task by its name."""


def usual_task(model: AnyModelConfig) -> Task:
    """Return the first task that a model can learn: language, masked or seq2seq."""
    shape = model_shape(model)
    usual: dict[Shape, Task] = {
        "decoder": LanguageTask(), "encoder": MaskedTask(), "encoder-decoder": Seq2SeqTask(),
    }  # fmt: skip
    if getattr(model, "num_classes", None) is not None:
        return ClassifyTask()
    return usual[shape]


__all__ = [
    "TASKS",
    "AdditionTask",
    "ChatTask",
    "ClassifyTask",
    "ContinuousTask",
    "CopyTask",
    "DatesTask",
    "DigitsTask",
    "GeneratedTask",
    "LanguageTask",
    "MaskedTask",
    "ModularTask",
    "PairsTask",
    "PreferenceTask",
    "PrefixTask",
    "RecallTask",
    "ReverseTask",
    "Seq2SeqTask",
    "Task",
    "TonesTask",
    "usual_task",
]
