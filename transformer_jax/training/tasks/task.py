"""Say what the training loop needs of a task; only `preference` it knows by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, ParamSpec, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import jax
import numpy as np

from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.tasks import Seq2SeqTask
from transformer_jax.models.arguments import CheckedModule as AnyModel
from transformer_jax.models.editing import Edit
from transformer_jax.models.factory import build
from transformer_jax.tokenizers.pretrained import ROLES, PretrainedTokenizer
from transformer_jax.tokenizers.special import encode_text, special_ids
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch, Loss, Params, as_given
from transformer_jax.training.rows import Rows
from transformer_jax.untrusted_files import shown
from transformer_jax.values import short_repr, value_class

T = TypeVar("T")
P = ParamSpec("P")

Inputs: TypeAlias = Batch | np.ndarray
"""The data of a step: its micro-batches, or the places where its windows start, i32[A, B]."""

Report: TypeAlias = Callable[[int, int], None]
"""Take how many examples are decoded, from 0 on, and how many there are."""


@short_repr
class Tokenizers(NamedTuple):
    """Hold a run's tokenizer, and that of the sources where they have one of their own."""

    tokenizer: Tokenizer
    source: Tokenizer | None = None

    @property
    def of_source(self) -> Tokenizer:
        """Return the tokenizer of the sources."""
        return self.tokenizer if self.source is None else self.source


@value_class
class Learner:
    """Say what is trained in the place of the config's model, and by what loss."""

    fresh: Callable[[jax.Array], Params]
    """Makes the parameters of step 0 of a key."""
    loss: Loss
    """`loss(params, batch, key) -> (mean, weight)`, f32[] each, as `batch_loss` returns it."""
    scores: Callable[..., jax.Array]
    """`scores(params, batch) -> f32[3]`: summed loss, the weights it is over, and the sum of what
    counts as accuracy: of labels those that are likeliest."""


class TrainingTask:
    """Hold the examples of a task, and judge what a model makes of them.

    A step's inputs become micro-batches by `prepare(*resident, inputs)`, on the device; `prepare`
    is hashable, and equal ones share their compiled programs.
    """

    config: TrainConfig
    """The run's, with the sizes of the model that follow from the data."""
    tokenizers: Tokenizers
    sha256: str
    """Of all that was read."""
    tokens_per_step: int
    """Tokens of the longest step, padding included; of pairs, the targets alone."""
    prepare: Callable[..., Batch] = staticmethod(as_given)
    resident: tuple[np.ndarray, ...] = ()
    """Arrays of the training part that stay on the device."""
    held_out: tuple[np.ndarray, ...] = ()
    """Arrays of the held-out part that stay on the device."""
    learner: Learner | None = None
    """Parameters and a loss that are trained instead of those of `config.model`; None trains the
    model."""
    place: Callable[[Batch], Batch] | None = None
    """Of a task that reads batches ahead, and in each process the rows of this one alone: what
    brings them to where the loop needs them. None: the loop places what `inputs` returns."""

    @cached_property
    def model(self) -> AnyModel:
        """The model of `config`, or as `edited` changes it: what `sample` and `judge` run."""
        return build(self.config.model)

    def edited(self, edit: Mapping[str, Edit]) -> Self:
        """Return the task with a model that is edited, as `model.edited` does it."""
        task = copy(self)
        task.model = self.model.edited(edit)
        return task

    def inputs(self, step: int) -> Inputs:
        """Return what step `step`, from 0 on, reads, from the run's seed and the step alone."""
        raise NotImplementedError

    def evaluation(self) -> Iterable[Inputs]:
        """Yield what an evaluation reads, a batch at a time, the same every time."""
        raise NotImplementedError

    def described(self) -> str:
        """Return a line about the examples."""
        raise NotImplementedError

    def per_character(self, loss: float) -> tuple[float, str] | None:
        """Return a loss in nats of a unit that does not depend on the tokenizer, and the unit.

        None where the labels are not all tokens of a text.
        """
        return None

    def sample(self, params: Params) -> str:
        """Return a few examples of what the model makes of held-out ones, as text."""
        raise NotImplementedError

    def judge(self, params: Params, report: Report | None = None) -> dict[str, float]:
        """Return what the held-out examples come to once they are decoded.

        Nothing where the held-out loss says it all.

        Args:
            params: of the model.
            report: is told on the way how many examples are decoded, where many are.
        """
        return {}

    def documents(self) -> Sequence[np.ndarray]:
        """Return the sequences of the training part, for a model that counts."""
        raise NotImplementedError


@runtime_checkable
class LoadsExamples(Protocol):
    """Settings of a task that `load` their own examples, as those of your own do."""

    def load(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> TrainingTask:
        """Return the examples of a run, as `training.tasks.load_task` does.

        Args:
            config: of the run.
            tokenizers: of a run that goes on, or of the model it starts from; else None.
            vocab_size: more ids than the tokenizer's; None is the tokenizer's.
        """
        ...


class ReadsNumbers(Protocol):
    """Settings of a task whose examples are numbers, which a file may hold: `reads_numbers`."""

    def load_file(self, config: TrainConfig, tokenizers: Tokenizers, path: str) -> TrainingTask:
        """Return the examples of a file, all of them held out."""
        ...

    def answer_file(
        self, config: TrainConfig, tokenizers: Tokenizers, params: Params, path: Path
    ) -> list[str]:
        """Return the model's answer to each input of a file."""
        ...


class RowsTask(TrainingTask):
    """Serve a task whose examples are rows: all but windows of a text and prepared folders."""

    def __init__(
        self, config: TrainConfig, tokenizers: Tokenizers, sha256: str, train: Rows, val: Rows
    ) -> None:
        self.config, self.tokenizers, self.sha256 = config, tokenizers, sha256
        self.train, self.val = train, val
        longest = max(bucket.tokens.shape[1] for bucket in train.buckets)
        self.tokens_per_step = config.accumulation * config.batch_size * longest

    def inputs(self, step: int) -> Batch:
        """Return the rows of a step."""
        config = self.config
        return self.train.step(config.seed, step, config.accumulation, config.batch_size)

    def evaluation(self) -> Iterator[Batch]:
        """Yield the held-out rows, or `eval_batches` random batches of them."""
        seed, size, limit = self.config.seed, self.config.batch_size, self.config.eval_batches
        if limit is None:
            yield from self.val.batches(size)
            return
        for step in range(limit):
            yield self.val.step(seed, step, 1, size).first()

    def described(self) -> str:
        """Return how many rows there are, and how long they are."""
        parts = ", ".join(
            f"{count:,} of {bucket.tokens.shape[1]} tokens"
            for count, bucket in zip(self.train.counts, self.train.buckets, strict=True)
        )
        held_out = sum(self.val.counts)
        return f"rows: {parts}; {held_out:,} held out; {self.train.labels:,} labels"

    def documents(self) -> list[np.ndarray]:
        """Return the sequences of all rows: what is read, and the label of its end."""
        found = []
        for bucket in self.train.buckets:
            segments = bucket.segments
            for row, (tokens, labels) in enumerate(zip(bucket.tokens, bucket.labels, strict=True)):
                last = labels.shape[0] - np.argmax(labels[::-1] >= 0) if segments is None else 0
                if segments is None:
                    found.append(np.append(tokens[:last], labels[last - 1]))
                    continue
                for number in range(1, segments[row].max() + 1):
                    (at,) = np.nonzero(segments[row] == number)
                    found.append(np.append(tokens[at], labels[at[-1]]))
        return found


def with_vocabulary(
    config: TrainConfig, tokenizers: Tokenizers, vocab_size: int | None, **changes: FieldValue
) -> TrainConfig:
    """Return the config with the sizes of a model that reads and writes these tokenizers' ids.

    A model to start from keeps its own, but for the special tokens that its tokenizer did not have.

    Args:
        config: of the run.
        tokenizers: of its data.
        vocab_size: more ids than the tokenizer's; None is the tokenizer's.
        **changes: more fields of the model with other values.

    Raises:
        ConfigError: if `vocab_size` is below the tokenizer's.
    """
    model, tokenizer = config.model, tokenizers.tokenizer
    needed = tokenizer.vocab_size
    if config.init_from is not None:
        published = isinstance(tokenizer, PretrainedTokenizer)  # it may know more than its model
        changes["vocab_size"] = model.vocab_size if published else max(needed, model.vocab_size)
    elif vocab_size is not None and vocab_size < needed:
        raise ConfigError(f"vocab_size is {vocab_size}: the tokenizer has {needed} tokens")
    else:
        changes["vocab_size"] = needed if vocab_size is None else vocab_size
    separate = isinstance(config.task, Seq2SeqTask) and config.task.vocabulary == "separate"
    if model.kind == "encoder-decoder" and not model.supports("shared_table"):
        separate = True
    if separate:
        changes["source_vocab_size"] = tokenizers.of_source.vocab_size
    return replace(config, model=replace(model, **changes))


def split_held_out(config: TrainConfig, found: list[T], what: str) -> tuple[list[T], list[T]]:
    """Return the examples to train on, and the last ones, which are held out."""
    cut = int(len(found) * (1 - config.val_fraction))
    if not 0 < cut < len(found):
        rule = "must have one for training and one held out at least"
        raise DataError(f"data is {config.data!r}: {len(found)} {what}: {rule}")
    return found[:cut], found[cut:]


def check_lengths(config: TrainConfig, sizes: Mapping[str, int]) -> None:
    """Raise DataError for the first example that has more tokens than a sequence may have."""
    for where, size in sizes.items():
        if size > config.sequence_len:
            limit = "max_len" if config.context is None else "context"
            rule = f"a sequence has at most {config.sequence_len} ({limit})"
            raise DataError(f"{where}: {size} tokens: {rule}")


def located(where: str, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """Return `work(*given)`; its DataError begins with where the text stands that it read."""
    try:
        return work(*given, **named)
    except DataError as error:
        # it was located already, further in
        if str(error).startswith(where):
            raise
        raise DataError(f"{where}: {error}") from None


def known_sources(config: TrainConfig) -> int:
    """Return how many tokens of a source, or of a prompt, the model has."""
    return config.model.source_vocab_size or config.model.vocab_size


def check_known(known: int, tokenizer: Tokenizer, where: str, *parts: np.ndarray) -> None:
    """Raise DataError for the first of these ids that is not below `known`, the model's number."""
    for ids in parts:
        if len(ids) and ids.max() >= known:
            i = int(ids[np.argmax(ids >= known)])
            text = shown(tokenizer.to_bytes([i]).decode(errors="replace"))
            raise DataError(f"{where}: has token {i}, {text}: the model has {known} tokens")


def check_has(tokenizer: Tokenizer, *names: str) -> None:
    """Raise DataError for the first of these special tokens that a tokenizer does not have."""
    for name in names:
        if name not in special_ids(tokenizer):
            known = f"name it as {name}_token in tokenizer_config.json, if there is one"
            rule = known if name in ROLES else "the model was not trained with one"
            raise DataError(f"the tokenizer has no {name} token: {rule}")


def encode_line(tokenizer: Tokenizer, text: str, where: str) -> np.ndarray:  # i32[n]
    """Return the ids of a text; the DataError of one that has none begins with where it stands."""
    return located(where, encode_text, tokenizer, text)


def sha256_of(*parts: bytes) -> str:
    """Return the hash of several contents, one after the other."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()
