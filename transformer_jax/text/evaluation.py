"""Judge a model on a file that it has not seen, by the measures of the task it was trained for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from copy import copy
from typing import Any, TypedDict, cast

from transformer_jax.config import ConfigError, ModelConfig, TrainConfig
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.tasks import (
    ChatTask,
    LanguageTask,
    OwnTask,
    PreferenceTask,
    PrefixTask,
    Seq2SeqTask,
    Task,
)
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.pytree import Params
from transformer_jax.text.reading import Reader, published_run
from transformer_jax.tokenizers.special import SpecialTokens
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import batch_scores
from transformer_jax.training.data import ShortText
from transformer_jax.training.evaluation import evaluate as scores_of
from transformer_jax.training.step import make_eval_step
from transformer_jax.training.tasks import Tokenizers, load_task
from transformer_jax.training.tasks.task import Report, TrainingTask, check_has


class EvaluateOptions(TypedDict, total=False):
    """Name the arguments of `evaluate` after the file; it says what each is."""

    targets: str | None
    examples: int | None
    beams: int | None
    context: int | None
    task: str | None
    report: Report | None


def evaluate(
    model: Reader,
    data: str,
    *,
    targets: str | None = None,
    examples: int | None = None,
    beams: int | None = None,
    context: int | None = None,
    task: str | None = None,
    report: Report | None = None,
) -> dict[str, float]:
    """Return the loss and the measures of a model on a file.

    Args:
        model: what `load` gave.
        data: a file like the run's own data; of pictures and sounds a .npz file.
        targets: of pairs, the file of the targets, line by line.
        examples: of pairs and signals, how many are decoded; None is all.
        beams: of pairs, beams of the search; None is the run's.
        context: of a published model, the tokens of a window; None is 512. A shorter text is one
            window.
        task: of a published decoder, "chat" judges its answers in lines {"messages": [...]}, as
            the run of a `ChatTask` is judged; None judges it on a text. A run has its own.
        report: is told how many examples are decoded.

    Returns:
        Numbers by name, such as "nats_per_token", "perplexity" and what the task adds.

    Raises:
        ConfigError: if the model's task has no such option, or the file is of messages and `task`
            does not say so.
    """
    config = task_on(
        model, data, targets=targets, examples=examples, beams=beams, context=context, asked=task
    )
    built = model.edited_module
    if built is not None and built.edits and isinstance(config.task, OwnTask):
        rule = "a task of your own calls its model itself, which is to be edited there"
        raise ConfigError(f"edit of {built.edits[0][0]}: {rule}")
    if config.task.reads_numbers:
        own: Any = config.task  # that `ReadsNumbers`
        read = own.load_file(config, model.tokenizers, data)
        return judge(read, model.params, report, built)
    return judge_file(config, model.tokenizers, model.params, report, built)


def task_on(
    model: Reader,
    data: str,
    *,
    targets: str | None,
    examples: int | None,
    beams: int | None,
    context: int | None,
    asked: str | None = None,
) -> TrainConfig:
    """Return the config of the model's run, or one like it, with the file to judge it on."""
    options: dict[str, FieldValue] = dict(targets=targets, beams=beams, examples=examples)
    for name, value in (options | {"context": context}).items():
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name} is {value}: must be at least 1")
    if model.task is None:
        return _published(model, data, options, context, asked)
    run = model.run
    for name, given in {"context": context, "task": asked}.items():
        if given is not None:
            raise ConfigError(f"{name} is {given!r}: needs model, a run has its own")
    task: Task = run.task
    if isinstance(task, PreferenceTask):
        rule = "its loss is relative to the model that the run began with; train.py measures it"
        raise ConfigError(f"run is of task 'preference': {rule}")
    task = task.on_a_file(model.config)
    if isinstance(task, Seq2SeqTask | PrefixTask):
        changes: dict[str, FieldValue] = {"judged": examples or 2**31 - 1}
        if beams is not None:
            changes["beams"] = beams
        changes |= {"targets": targets, "val_targets": targets}
        task = dataclasses.replace(task, **changes)
    else:
        decoded = ("examples",) if not task.reads_numbers else ()
        for name in ("targets", "beams", *decoded):
            if options[name] is not None:
                rule = f"a run of task {task.kind!r} has no pairs"
                raise ConfigError(f"{name} is {options[name]!r}: {rule}")
    if task.reads_numbers:  # which reads no file while it is trained
        judged: dict[str, FieldValue] = {"judged": examples or 2**31 - 1}
        task = dataclasses.replace(task, **judged)
        return dataclasses.replace(run, task=task, eval_batches=None)
    return dataclasses.replace(
        run, task=task, data=data, val_data=data, eval_batches=None, data_weights=None
    )


def _published(
    model: Reader, data: str, options: dict[str, FieldValue], context: int | None, asked: str | None
) -> TrainConfig:
    """Return the config of a published model's evaluation."""
    for name, value in options.items():
        if value is not None:
            rule = "a published model is judged on text"
            raise ConfigError(f"{name} is {value!r}: {rule}")
    if model.kind == "targets":
        raise ConfigError(f"model is {model.name!r}: an encoder-decoder; give it a run")
    if model.kind == "vectors":
        rule = "it has no head of hidden tokens, which is what an encoder is judged by"
        raise ConfigError(f"model is {model.name!r}: {rule}")
    decoder = model.kind == "text"
    if asked is not None and (asked != "chat" or not decoder):
        rule = "must be chat, of a decoder" if decoder else "a masked encoder is judged on text"
        raise ConfigError(f"task is {asked!r}: {rule}")
    line: object = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        # Not JSON: a text. No file: the reader says so, below.
        with open(data, "rb") as file:
            line = json.loads(file.readline(2**20))
    if asked is None and isinstance(line, dict) and "messages" in line:  # as `ChatTask` reads them
        rule = "task chat judges a decoder's answers; any other model needs a text"
        raise ConfigError(f"data is {data!r}: its first line is a conversation: {rule}")
    run = published_run(cast(ModelConfig, model.config), model.name, data, context)
    return run if asked is None else dataclasses.replace(run, task=ChatTask())


def judge_file(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    report: Report | None = None,
    model: CheckedModule | None = None,
) -> dict[str, float]:
    """Return what a model comes to on `config.val_data`, all of which is held out.

    `report` is told how many examples are decoded, and `model` is the config's, edited.
    """
    size = config.model.vocab_size
    try:
        task = load_task(config, tokenizers, size)
    except ShortText as text:  # one window of all its tokens
        of_windows = isinstance(config.task, LanguageTask) and config.task.documents is None
        if not of_windows:
            raise
        if text.tokens < 2:
            rule = "must have at least two"
            raise DataError(f"data is {config.data!r}: tokens are {text.tokens}: {rule}") from None
        task = load_task(dataclasses.replace(config, context=text.tokens - 1), tokenizers, size)
    # A task adds the special tokens that it needs, as for training.
    if isinstance(own := task.tokenizers.tokenizer, SpecialTokens):
        check_has(tokenizers.tokenizer, *own.names)  # a token that is added now is not trained
    return judge(task, params, report, model)


def judge(
    task: TrainingTask,
    params: Params,
    report: Report | None = None,
    model: CheckedModule | None = None,
) -> dict[str, float]:
    """Return the loss and the measures of a task's held-out part."""
    if model is not None:
        # The caller's task keeps its own model.
        task = copy(task)
        task.model = model
    step = make_eval_step(batch_scores(task.model), task.prepare)
    scores = scores_of(step, params, task.held_out, task.evaluation())
    found = {"nats_per_token": scores.loss, "bits_per_token": scores.loss / math.log(2)}
    found["perplexity"] = math.exp(min(scores.loss, 700.0))
    if (character := task.per_character(scores.loss)) is not None:
        found[f"nats_per_{character[1]}"] = character[0]
        found[f"bits_per_{character[1]}"] = character[0] / math.log(2)
    own = task.judge(params, report)
    return found | {"likeliest_label": scores.accuracy} | own
