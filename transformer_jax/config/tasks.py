"""Configure what a model is trained for: one value, whose fields are those of its task.

A task here says what is asked for; `training/tasks` reads the files and makes the batches.
`check_model` says which models can learn it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeGuard

from transformer_jax.config.architectures import AnyModelConfig, Shape
from transformer_jax.config.fields import (
    Count,
    FieldValue,
    Fraction,
    Positive,
    Size,
    check_types,
    fail,
    unread,
)
from transformer_jax.config.keywords import config_class
from transformer_jax.config.kinds import has_kinds, kind_name, kinds_of, later, register
from transformer_jax.config.model import ModelConfig, transformer_with
from transformer_jax.config.own import check_own
from transformer_jax.config.positions import Learned, Rope

Documents = Literal["lines", "paragraphs", "files", "prepared"]
Vocabulary = Literal["shared", "separate"]


@has_kinds
@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of any kind: all that the package may ask about its settings.

    One that `training.tasks.load_task` does not know by itself has a `load` of its own, which
    returns its examples (`training.tasks.task.LoadsExamples`).
    """

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
        """Whether the examples are numbers, as of a picture, instead of tokens."""
        return False

    @property
    def makes_examples(self) -> bool:
        """Whether the examples follow from the seed, and no file is read."""
        return False

    @property
    def recipe(self) -> dict[str, FieldValue]:
        """Return the fields of the usual run that differ from those of other tasks."""
        return {}

    def usual_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return the usual small model of a kind as it learns this task well."""
        return model

    def on_a_file(self, model: AnyModelConfig) -> Task:
        """Return the task that reads a file of examples like those of this one."""
        return self

    def check_model(self, model: AnyModelConfig) -> None:
        """Raise ConfigError where the model cannot learn this task."""
        if model.kind not in self.shapes:
            wanted = " or ".join(self.shapes)
            article = "a" if wanted.startswith("d") else "an"
            rule = f"is learnt by {article} {wanted}, the model is of kind {model.kind!r}"
            fail("task", self.kind, rule)
        if model.inputs is not None and not self.reads_numbers:
            kind = kind_name(type(model.inputs))
            fail("task", self.kind, f"reads tokens, model.inputs is {kind!r}")
        if model.classes_of != "text":
            rule = "no task learns classes of tokens: must be 'text'"
            fail("classes_of", model.classes_of, rule)

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a model with what the task asks of it, where that is more than its shape."""
        return model


class OwnTask(Task):
    """A task of your own: make a frozen dataclass of it with a `load` that returns its examples.

    `shapes`, `check_model` and `fit_model` say which models can learn it, by default decoders.
    """

    own_kind_of = Task

    @property
    def loaded_by(self) -> str | None:
        """Return what loads its runs, where they hold something else than `config.model`."""
        return None

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


@config_class
class LanguageTask(Task):
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


@config_class
class MaskedTask(Task):
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
        if model.num_classes is not None:
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
        return model if model.num_classes is None else replace(model, num_classes=None)

    def usual_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a transformer with rotary positions, by which it learns sooner."""
        return transformer_with(model, positions=Rope())  # benchmarks/NOTES.md


@dataclass(frozen=True, kw_only=True)
class _PairFilesTask(Task):
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


@config_class
class Seq2SeqTask(_PairFilesTask):
    """Read a source and write its target (Sutskever et al. 2014)."""

    vocabulary: Vocabulary = "shared"
    """shared: one tokenizer for source and target; separate: one for each."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder-decoder",)


@config_class
class PrefixTask(_PairFilesTask):
    """Go on from a source with its target in one row (Raffel et al. 2020, 3.2.1)."""

    bidirectional: bool = True
    """The tokens of a source see each other in both directions; a transformer's only."""
    packed: bool = True
    """Several short pairs in a row, which do not see each other."""


@config_class
class ClassifyTask(Task):
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
        if not model.supports("gradients"):
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

    def usual_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a transformer with rotary positions, by which it learns sooner."""
        return transformer_with(model, positions=Rope())  # benchmarks/NOTES.md


@config_class
class ChatTask(Task):
    """Answer messages: the loss is of the assistant's turns alone."""

    packed: bool = True
    """Several short conversations in a row, which do not see each other."""


@config_class
class PreferenceTask(Task):
    """Learn from pairs of answers which is preferred, relative to the model of init_from (DPO)."""

    beta: Positive = 0.1
    """How much a log-probability that has moved away from that model's counts, per nat."""
    messages: bool | None = None
    """Whether a prompt is messages, or else a text; None: as the data has them."""

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        model.check_supports("preference", "task", self.kind)

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a model without dropout, which the model that it is compared with has not."""
        return transformer_with(model, dropout=0.0, attention_dropout=0.0)


register(
    Task,
    **{
        kind_name(task): task
        for task in (
            LanguageTask, MaskedTask, Seq2SeqTask, PrefixTask, ClassifyTask, ChatTask,
            PreferenceTask,
        )
    },
)  # fmt: skip


def usual_task(model: AnyModelConfig) -> Task:
    """Return the first task that a model can learn: language, masked or seq2seq."""
    usual: dict[Shape, Task] = {
        "decoder": LanguageTask(), "encoder": MaskedTask(), "encoder-decoder": Seq2SeqTask(),
    }  # fmt: skip
    return usual[model.kind] if model.num_classes is None else ClassifyTask()


_of_lectures, __dir__ = later(
    __name__,
    dict.fromkeys(
        (
            "AdditionTask", "ContinuousTask", "CopyTask", "DatesTask", "DigitsTask",
            "GeneratedTask", "ModularTask", "RecallTask", "ReverseTask", "TonesTask",
        ),
        "transformer_jax.lectures.tasks",
    ),
)  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return TASKS, every task by its name, or a task of the lectures."""
        return kinds_of(Task) if name == "TASKS" else _of_lectures(name)
