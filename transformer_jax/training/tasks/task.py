"""Interface between the training loop and the training tasks."""

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
from transformer_jax.training.batch import Batch, Loss, Params, identity
from transformer_jax.training.rows import Rows
from transformer_jax.untrusted_files import shown
from transformer_jax.values import short_repr, value_class

T = TypeVar("T")
P = ParamSpec("P")

Inputs: TypeAlias = Batch | np.ndarray
"""Data of a step, which is its micro-batches or the starts of its windows, i32[A, B]."""

Report: TypeAlias = Callable[[int, int], None]
"""Callback that receives the number of decoded examples, starting from 0, and the total number."""


@short_repr
class Tokenizers(NamedTuple):
    """Tokenizer of a run, and a separate tokenizer for its sources if there is one."""

    tokenizer: Tokenizer
    source: Tokenizer | None = None

    @property
    def of_source(self) -> Tokenizer:
        """Return the tokenizer for the sources."""
        return self.tokenizer if self.source is None else self.source


@value_class
class Learner:
    """Custom parameters and loss, which are trained instead of the config's model."""

    fresh: Callable[[jax.Array], Params]
    """Create the initial parameters from a key."""
    loss: Loss
    """`loss(params, batch, key) -> (mean, weight)`, f32[] each, as returned by `batch_loss`."""
    scores: Callable[..., jax.Array]
    """`scores(params, batch) -> f32[3]`, which are the summed loss, the summed weights, and the
    summed accuracy. For labels, the summed accuracy is the number of correct predictions."""


class TrainingTask:
    """Examples of a task and the evaluation of models on them.

    On the device, `prepare(*resident, inputs)` converts a step's inputs to micro-batches. `prepare`
    must be hashable. Equal values share compiled programs.
    """

    config: TrainConfig
    """Config of the run, including the model sizes that depend on the data."""
    tokenizers: Tokenizers
    sha256: str
    """Hash of all the data that was read."""
    tokens_per_step: int
    """Number of tokens in the longest step, including padding. For pairs, only target tokens
    count."""
    prepare: Callable[..., Batch] = staticmethod(identity)
    resident: tuple[np.ndarray, ...] = ()
    """Training arrays that stay on the device."""
    held_out: tuple[np.ndarray, ...] = ()
    """Held-out arrays that stay on the device."""
    learner: Learner | None = None
    """Custom learner that is trained instead of `config.model`. None trains the model."""
    place: Callable[[Batch], Batch] | None = None
    """Function that puts the rows of a process on its devices, for a task that prefetches its
    inputs. If it is None, the loop places the result of `inputs`."""
    reader: tuple[int, int] | None = None
    """(i, n) if `place` puts part i of n of the rows. None means one part for each process."""

    @cached_property
    def model(self) -> AnyModel:
        """Model of `config`, which may have edits, for `sample` and `judge`."""
        return build(self.config.model)

    def edited(self, edit: Mapping[str, Edit]) -> Self:
        """Return the task with an edited model. See `model.edited`."""
        task = copy(self)
        task.model = self.model.edited(edit)
        return task

    def inputs(self, step: int) -> Inputs:
        """Return the inputs of step `step` (from 0), which depend only on `step` and the seed."""
        raise NotImplementedError

    def evaluation(self) -> Iterable[Inputs]:
        """Yield the batches of an evaluation, which are the same every time."""
        raise NotImplementedError

    def described(self) -> str:
        """Return a one-line description of the examples."""
        raise NotImplementedError

    def per_character(self, loss: float) -> tuple[float, str] | None:
        """Return the loss in nats per unit, and the unit, such as "character".

        The unit does not depend on the tokenizer. Returns None unless all labels are text tokens.
        """
        return None

    def sample(self, params: Params) -> str:
        """Return a few held-out examples with the model's outputs, as text."""
        raise NotImplementedError

    def judge(self, params: Params, report: Report | None = None) -> dict[str, float]:
        """Return metrics for decoded held-out examples, or {} if the held-out loss is enough.

        Args:
            params: parameters of the model.
            report: callback that receives the number of decoded examples, if there are many.
        """
        return {}

    def documents(self) -> Sequence[np.ndarray]:
        """Return the token sequences of the training part, for a model that counts tokens."""
        raise NotImplementedError


@runtime_checkable
class LoadsExamples(Protocol):
    """Task settings that load their own examples, such as those of a custom task."""

    def load(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> TrainingTask:
        """Return the examples of a run, as `training.tasks.load_task` does.

        Args:
            config: the config of the run.
            tokenizers: the tokenizers of a resumed run or of the initial model, or None.
            vocab_size: a vocabulary size larger than the tokenizer's. None means the tokenizer's.
        """
        ...


class ReadsNumbers(Protocol):
    """Task settings whose examples are numbers from a file (see `reads_numbers`)."""

    def load_file(self, config: TrainConfig, tokenizers: Tokenizers, path: str) -> TrainingTask:
        """Return the examples in a file, which are all held out."""
        ...

    def answer_file(
        self, config: TrainConfig, tokenizers: Tokenizers, params: Params, path: Path
    ) -> list[str]:
        """Return the model's answer to each input of a file."""
        ...


class RowsTask(TrainingTask):
    """Base class of all tasks whose examples are rows instead of text windows or prepared data."""

    def __init__(
        self, config: TrainConfig, tokenizers: Tokenizers, sha256: str, train: Rows, val: Rows
    ) -> None:
        self.config, self.tokenizers, self.sha256 = config, tokenizers, sha256
        if config.mesh is not None and config.mesh.context > 1:
            longest, devices = config.sequence_len, config.mesh.context
            train, val = (rows.split_over(devices, longest) for rows in (train, val))
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
        """Return a description of the number and length of the rows."""
        parts = ", ".join(
            f"{count:,} of {bucket.tokens.shape[1]} tokens"
            for count, bucket in zip(self.train.counts, self.train.buckets, strict=True)
        )
        held_out = sum(self.val.counts)
        return f"rows: {parts}; {held_out:,} held out; {self.train.labels:,} labels"

    def documents(self) -> list[np.ndarray]:
        """Return the token sequence of each row, including its last label."""
        found = []
        for bucket in self.train.buckets:
            segments = bucket.segments
            for row, (tokens, labels) in enumerate(zip(bucket.tokens, bucket.labels, strict=True)):
                # the labels of padding are negative
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
    """Return the config with vocabulary sizes that match the tokenizers.

    An initial model keeps its vocabulary sizes, except for new special tokens.

    Args:
        config: config of the run.
        tokenizers: tokenizers of the run's data.
        vocab_size: a vocabulary size larger than the tokenizer's. None means the tokenizer's.
        **changes: other model fields to change.

    Raises:
        ConfigError: If `vocab_size` is less than the tokenizer's vocabulary size.
    """
    model, tokenizer = config.model, tokenizers.tokenizer
    needed = tokenizer.vocab_size
    if config.init_from is not None:
        published = isinstance(tokenizer, PretrainedTokenizer)  # may exceed its model's size
        changes["vocab_size"] = model.vocab_size if published else max(needed, model.vocab_size)
    elif vocab_size is not None and vocab_size < needed:
        rule = f"must be at least {needed}, the number of tokens in the tokenizer"
        raise ConfigError(f"vocab_size is {vocab_size}: {rule}")
    else:
        changes["vocab_size"] = needed if vocab_size is None else vocab_size
    separate = isinstance(config.task, Seq2SeqTask) and config.task.vocabulary == "separate"
    # Such a model has one table for each side, even if both sides use the same vocabulary.
    if model.kind == "encoder-decoder" and not model.supports("shared_table"):
        separate = True
    if separate:
        changes["source_vocab_size"] = tokenizers.of_source.vocab_size
    return replace(config, model=replace(model, **changes))


def split_held_out(config: TrainConfig, found: list[T], unit: str) -> tuple[list[T], list[T]]:
    """Split examples into training examples and held-out examples, which are the last ones."""
    cut = int(len(found) * (1 - config.val_fraction))
    if not 0 < cut < len(found):
        rule = "must be at least one for training and one held out"
        raise DataError(f"data is {config.data!r}: the number of {unit} is {len(found)}: {rule}")
    return found[:cut], found[cut:]


def check_lengths(config: TrainConfig, sizes: Mapping[str, int]) -> None:
    """Raise DataError for the first example that exceeds the maximum sequence length."""
    for where, size in sizes.items():
        if size > config.sequence_len:
            limit = "max_len" if config.context is None else "context"
            rule = f"a sequence has at most {config.sequence_len} ({limit})"
            raise DataError(f"{where}: it has {size} tokens, but {rule}")


def located(where: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`. If it raises DataError, prefix the message with the location of the data."""
    try:
        return work(*args, **kwargs)
    except DataError as error:
        # an inner call has already added the location
        if str(error).startswith(where):
            raise
        raise DataError(f"{where}: {error}") from None


def known_sources(config: TrainConfig) -> int:
    """Return the vocabulary size of the model for sources and prompts."""
    return config.model.source_vocab_size or config.model.vocab_size


def check_token_ids(vocab_size: int, tokenizer: Tokenizer, where: str, *parts: np.ndarray) -> None:
    """Raise DataError for the first token ID outside the model's `vocab_size`."""
    for ids in parts:
        if len(ids) and ids.max() >= vocab_size:
            i = int(ids[np.argmax(ids >= vocab_size)])
            text = shown(tokenizer.to_bytes([i]).decode(errors="replace"))
            raise DataError(
                f"{where}: it has token {i}, {text}, but the model has only {vocab_size} tokens"
            )


def check_has(tokenizer: Tokenizer, *names: str) -> None:
    """Raise DataError for the first special token that the tokenizer lacks."""
    for name in names:
        if name not in special_ids(tokenizer):
            rule = "the model was not trained with one"
            if name in ROLES:
                rule = f"set {name}_token in tokenizer_config.json, if there is one"
            raise DataError(f"the tokenizer has no {name} token: {rule}")


def encode_line(tokenizer: Tokenizer, text: str, where: str) -> np.ndarray:  # i32[n]
    """Return the token IDs of a text, or raise DataError with the location `where`."""
    return located(where, encode_text, tokenizer, text)


def sha256_of(*parts: bytes) -> str:
    """Return the hash of the concatenated parts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()
