"""Evaluation of a model on a held-out file, with the metrics of its task."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from copy import copy
from typing import Any, TypedDict, cast

from transformer_jax.config import ConfigError, ModelConfig, TrainConfig, tasks
from transformer_jax.config.fields import FieldValue
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
    """Keyword arguments of `evaluate`."""

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
    """Evaluate a model on a file, and return the loss and the metrics of the task.

    Args:
        model: a model that `load` returned.
        data: a file in the format of the training data, or a .npz file of pictures or sounds.
        targets: for a task on pairs, a file with one target per line.
        examples: for pairs and signals, the number of examples to decode; None decodes all
            examples.
        beams: for pairs, the width of the beam search; None means the width in the run's config.
        context: for a published model, the number of tokens per window; None means 512.
        task: for a published decoder, "chat" scores the answers in lines {"messages": [...]}, as
            for a run of a `ChatTask`; None evaluates the decoder on plain text.
        report: function that is called with the number of examples decoded so far.

    Returns:
        Metrics keyed by name, such as "nats_per_token" and "perplexity".

    Raises:
        ConfigError: if an option does not apply to the model's task, or the file contains
            conversations and `task` is not "chat".
    """
    config = task_on(
        model, data, targets=targets, examples=examples, beams=beams, context=context, named=task
    )
    built = model.edited_module
    if built is not None and built.edits and isinstance(config.task, tasks.CustomTask):
        rule = "a custom task calls its model itself; apply the edit in the task"
        raise ConfigError(f"edit of {built.edits[0][0]}: {rule}")
    if config.task.reads_numbers:
        reads: Any = config.task  # a `ReadsNumbers`
        loaded = reads.load_file(config, model.tokenizers, data)
        return judge(loaded, model.params, report, built)
    return judge_file(config, model.tokenizers, model.params, report, built)


def task_on(
    model: Reader,
    data: str,
    *,
    targets: str | None,
    examples: int | None,
    beams: int | None,
    context: int | None,
    named: str | None = None,
) -> TrainConfig:
    """Return a copy of the model's run config that evaluates on this file."""
    options: dict[str, FieldValue] = dict(targets=targets, beams=beams, examples=examples)
    for name, value in (options | {"context": context}).items():
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name} is {value}: must be at least 1")
    if model.task is None:  # a published model
        for name, value in options.items():
            if value is not None:
                rule = "a published model is evaluated on text"
                raise ConfigError(f"{name} is {value!r}: {rule}")
        if model.kind == "targets":
            rule = "a published encoder-decoder cannot be evaluated; pass a run"
            raise ConfigError(f"model is {model.name!r}: {rule}")
        if model.kind == "vectors":
            rule = "an encoder without a masked-token head cannot be evaluated"
            raise ConfigError(f"model is {model.name!r}: {rule}")
        decoder = model.kind == "text"
        if named is not None and (named != "chat" or not decoder):
            rule = "must be chat" if decoder else "a masked encoder is evaluated on text"
            raise ConfigError(f"task is {named!r}: {rule}")
        line: object = None
        # A line that is not JSON is text. The reader below raises an error if the file is missing.
        with contextlib.suppress(OSError, ValueError, RecursionError), open(data, "rb") as file:
            line = json.loads(file.readline(2**20))
        # `ChatTask` reads such lines as conversations
        if named is None and isinstance(line, dict) and "messages" in line:
            rule = "a decoder needs task chat; any other model needs text"
            raise ConfigError(f"data is {data!r}: its first line is a conversation: {rule}")
        published = published_run(cast(ModelConfig, model.config), model.name, data, context)
        return published if named is None else dataclasses.replace(published, task=tasks.ChatTask())
    run = model.run
    for name, value in {"context": context, "task": named}.items():
        if value is not None:
            raise ConfigError(f"{name} is {value!r}: must be None for a run, which has its own")
    task: tasks.Task = run.task
    if isinstance(task, tasks.PreferenceTask):
        rule = "its loss is relative to the initial model of the run; train.py measures it"
        raise ConfigError(f"run is of task 'preference': {rule}")
    task = task.on_a_file(model.config)
    if isinstance(task, tasks.Seq2SeqTask | tasks.PrefixTask):
        # A run decodes only a few examples in each evaluation, but this function decodes all by
        # default.
        changes: dict[str, FieldValue] = {"judged": examples or 2**31 - 1}
        if beams is not None:
            changes["beams"] = beams
        changes |= {"targets": targets, "val_targets": targets}
        task = dataclasses.replace(task, **changes)
    else:
        decoded = ("examples",) if not task.reads_numbers else ()
        for name in ("targets", "beams", *decoded):
            if options[name] is not None:
                rule = f"a run for task {task.kind!r} has no pairs"
                raise ConfigError(f"{name} is {options[name]!r}: {rule}")
    if task.reads_numbers:  # the training data is not a file
        judged: dict[str, FieldValue] = {"judged": examples or 2**31 - 1}
        task = dataclasses.replace(task, **judged)
        return dataclasses.replace(run, task=task, eval_batches=None)
    # The task also loads training data, which is not used here.
    return dataclasses.replace(
        run, task=task, data=data, val_data=data, eval_batches=None, data_weights=None
    )


def judge_file(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    report: Report | None = None,
    model: CheckedModule | None = None,
) -> dict[str, float]:
    """Evaluate a model on all of `config.val_data`.

    `report` is called with the number of decoded examples. `model` is the edited model, if any.
    """
    size = config.model.vocab_size
    try:
        task = load_task(config, tokenizers, size)
    except ShortText as text:  # read all tokens of the text in one window
        if not (isinstance(config.task, tasks.LanguageTask) and config.task.documents is None):
            raise
        if text.tokens < 2:
            found = f"the number of tokens is {text.tokens}"
            raise DataError(f"data is {config.data!r}: {found}, but must be at least 2") from None
        task = load_task(dataclasses.replace(config, context=text.tokens - 1), tokenizers, size)
    # A task adds the special tokens that it needs, but new tokens would be untrained.
    if isinstance(needed := task.tokenizers.tokenizer, SpecialTokens):
        check_has(tokenizers.tokenizer, *needed.names)
    return judge(task, params, report, model)


def judge(
    task: TrainingTask,
    params: Params,
    report: Report | None = None,
    model: CheckedModule | None = None,
) -> dict[str, float]:
    """Return the loss and the metrics of a model on the held-out part of a task."""
    if model is not None:
        # Use a copy, so that the caller's task keeps its own model.
        task = copy(task)
        task.model = model
    step = make_eval_step(batch_scores(task.model), task.prepare)
    scores = scores_of(step, params, task.held_out, task.evaluation())
    found = {"nats_per_token": scores.loss, "bits_per_token": scores.loss / math.log(2)}
    # A larger exponent would overflow.
    found["perplexity"] = math.exp(min(scores.loss, 700.0))
    if (character := task.per_character(scores.loss)) is not None:
        found[f"nats_per_{character[1]}"] = character[0]
        found[f"bits_per_{character[1]}"] = character[0] / math.log(2)
    return found | {"likeliest_label": scores.accuracy} | task.judge(params, report)
