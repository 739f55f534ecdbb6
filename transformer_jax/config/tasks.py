"""Configs of training tasks, one class for each task.

`check_model` checks whether a model can be trained on a task. The code in `training/tasks` reads
the files and creates the batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeGuard

from transformer_jax.config.architectures import AnyModelConfig, Shape
from transformer_jax.config.custom import check_custom
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
from transformer_jax.config.positions import Learned, Rope

Documents = Literal["lines", "paragraphs", "files", "prepared"]
Vocabulary = Literal["shared", "separate"]


@has_kinds
@dataclass(frozen=True, kw_only=True)
class Task:
    """Base class of task configs.

    A task that `training.tasks.load_task` does not handle needs a `load` method that returns its
    examples (`training.tasks.task.LoadsExamples`).
    """

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def kind(self) -> str:
        """Return the name of the task in files and flags."""
        return kind_name(type(self))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of models that can be trained on the task, the usual shape first."""
        return ("decoder",)

    @property
    def reads_numbers(self) -> bool:
        """Whether the examples are numbers, such as images, instead of tokens."""
        return False

    @property
    def makes_examples(self) -> bool:
        """Whether the examples are generated from the seed instead of being read from a file."""
        return False

    @property
    def recipe(self) -> dict[str, FieldValue]:
        """Return the fields of `TrainConfig` whose values differ in the usual run of the task."""
        return {}

    def usual_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return the usual small model, changed so that it learns this task better."""
        return model

    def on_a_file(self, model: AnyModelConfig) -> Task:
        """Return the task that reads its examples from a file.

        This is the task itself, unless its examples are generated.
        """
        return self

    def check_model(self, model: AnyModelConfig) -> None:
        """Raise ConfigError if the model cannot be trained on this task."""
        if model.kind not in self.shapes:
            wanted = " or ".join(self.shapes)
            article = "a" if wanted.startswith("d") else "an"
            rule = f"needs {article} {wanted}, but the model is of kind {model.kind!r}"
            fail("task", self.kind, rule)
        if model.inputs is not None and not self.reads_numbers:
            kind = kind_name(type(model.inputs))
            fail("task", self.kind, f"reads tokens, but model.inputs is {kind!r}")
        if model.classes_of != "text":
            rule = "must be 'text': no task trains classes of tokens"
            fail("classes_of", model.classes_of, rule)

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return the model with the heads and settings that the task needs."""
        return model


class CustomTask(Task):
    """Base class of custom tasks, which are frozen dataclasses with a `load` method.

    `load` returns the examples. `shapes`, `check_model` and `fit_model` define which models the
    task accepts. The default is decoders.
    """

    custom_kind_of = Task

    @property
    def loaded_by(self) -> str | None:
        """Return the name of the function that loads runs of this task.

        None uses `config.model`. Override this method if runs contain another model.
        """
        return None

    def check_model(self, model: AnyModelConfig) -> None:
        """Raise ConfigError if the model does not fit this task or no config can contain it."""
        check_custom("task", self)
        super().check_model(model)


def _is_bert(model: AnyModelConfig) -> TypeGuard[ModelConfig]:
    """Whether the model is a token encoder with the same norms as BERT, RoBERTa and DistilBERT."""
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
    """Units that count as documents: lines, paragraphs (separated by empty lines) or files.
    prepared: the documents in a prepared folder. None reads one long text in windows."""
    packed: bool = True
    """Pack several short documents into a row, without attention between them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.documents is None:
            unread(self, "needs documents", "packed")


@config_class
class MaskedTask(Task):
    """Predict masked tokens in a text (Devlin et al. 2019, section 3.1)."""

    rate: Fraction = 0.15
    """Fraction of the tokens to predict."""
    replaced: float = 0.8
    """Fraction of the predicted tokens that are replaced by the mask token."""
    random: Fraction = 0.1
    """Fraction of the predicted tokens that are replaced by a random token. The others are
    unchanged."""
    whole_words: bool = False
    """Mask all tokens of each word together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.replaced <= 1.0 or self.replaced + self.random > 1.0:
            rule = f"must be at least 0, and at most 1 when added to random {self.random}"
            fail("replaced", self.replaced, rule)
        if self.rate == 0:
            fail("rate", self.rate, "must be above 0")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder",)

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        if model.num_classes is not None:
            fail("num_classes", model.num_classes, "must be None for task 'masked'")

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return an encoder without a classifier.

        An encoder that is built like BERT gets BERT's head.
        """
        if isinstance(model, ModelConfig):
            transform = model.pooler == "transform"  # this pooler is the same as BERT's head
            model = replace(
                model, num_classes=None, classes_of="text", pooler_reads="first",
                pooler=None if model.pooler in ("transform", "gelu") else model.pooler,
            )  # fmt: skip
            head = transform or _is_bert(model)
            return replace(model, masked_token_head=True, logit_bias=True) if head else model
        return model if model.num_classes is None else replace(model, num_classes=None)

    def usual_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a transformer with rotary positions, which learns this task in fewer steps."""
        return transformer_with(model, positions=Rope())  # benchmarks/NOTES.md


@dataclass(frozen=True, kw_only=True)
class _PairFilesTask(Task):
    """Base class of tasks with pairs of texts."""

    targets: str | None = None
    """File of targets, whose lines correspond to the lines of `data`. None reads the source and the
    target from each line of `data`, where they are separated by a tab."""
    val_targets: str | None = None
    """File of targets for `val_data`."""
    beams: Size = 4
    """Number of beams for decoding held-out pairs. 1 means greedy decoding."""
    judged: Count = 200
    """Number of held-out pairs to decode at the end of a run. 0 disables decoding."""


@config_class
class Seq2SeqTask(_PairFilesTask):
    """Read a source and generate its target (Sutskever et al. 2014)."""

    vocabulary: Vocabulary = "shared"
    """Tokenizers of source and target. shared: one tokenizer for both. separate: one tokenizer for
    each."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder-decoder",)


@config_class
class PrefixTask(_PairFilesTask):
    """Continue a source with its target in the same row (Raffel et al. 2020, section 3.2.1)."""

    bidirectional: bool = True
    """Let the tokens of a source attend in both directions. Requires a transformer."""
    packed: bool = True
    """Pack several short pairs into a row, without attention between them."""

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        if self.bidirectional and getattr(model, "has_state", False):
            fail("bidirectional", True, "must be False, because layers with a state are causal")


@config_class
class ClassifyTask(Task):
    """Predict the class of a text."""

    labels: tuple[str, ...] | None = None
    """Names of the classes. None uses the sorted labels of the training data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels is not None and len(set(self.labels)) < max(2, len(self.labels)):
            fail("labels", self.labels, "must contain at least two names, all different")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ("encoder", "decoder")

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        if not model.supports("gradients"):
            fail("task", self.kind, "needs gradients, but the model is an n-gram")

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return an encoder without a masked-token head and with the pooler of its family.

        Among encoders that are built like BERT, only DistilBERT has no token types. It has its own
        pooler. The pooler of ModernBERT is its masked-token head. The pooler of ELECTRA starts from
        that of its discriminator.
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
        """Return a transformer with rotary positions, which learns this task in fewer steps."""
        return transformer_with(model, positions=Rope())  # benchmarks/NOTES.md


@config_class
class ChatTask(Task):
    """Answer chat messages.

    Only the assistant's turns contribute to the loss.
    """

    packed: bool = True
    """Pack several short conversations into a row, without attention between them."""


@config_class
class PreferenceTask(Task):
    """Learn preferences between pairs of answers, relative to the model in init_from (DPO)."""

    beta: Positive = 0.1
    """Factor for log-probabilities relative to the reference model (beta in DPO)."""
    messages: bool | None = None
    """Whether prompts are chat messages instead of text. None detects this from the data."""

    def check_model(self, model: AnyModelConfig) -> None:
        super().check_model(model)
        model.check_supports("preference", "task", self.kind)

    def fit_model(self, model: AnyModelConfig) -> AnyModelConfig:
        """Return a model without dropout, because the reference model has none."""
        # The reference model has no dropout, and with equal models, the loss must start at log 2.
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
    """Return the default task for a model, which is language, masked, seq2seq or classify."""
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
        """Return TASKS, which contains every task keyed by name, or a task of the lectures."""
        return kinds_of(Task) if name == "TASKS" else _of_lectures(name)
