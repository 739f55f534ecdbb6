"""Judge a model on a file that it has not seen, by the measures of the task it was trained for.

python -m transformer_jax evaluate --run RUN --data FILE
python -m transformer_jax evaluate --model FOLDER_OR_ID --data FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformer_jax.cli.command import Parser, add_run, load_run, run
from transformer_jax.cli.report import missing_metrics
from transformer_jax.config import ConfigError, ModelConfig, TrainConfig
from transformer_jax.config.architectures import model_shape
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.tasks import (
    DigitsTask,
    GeneratedTask,
    LanguageTask,
    MaskedTask,
    PreferenceTask,
    PrefixTask,
    Seq2SeqTask,
    Task,
    TonesTask,
)

if TYPE_CHECKING:
    from transformer_jax.pytree import Params
    from transformer_jax.training.tasks import Tokenizers
    from transformer_jax.training.tasks.task import Report, TrainingTask


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(_parser(), argv, _evaluate)


def _evaluate(arguments: argparse.Namespace) -> None:
    if (arguments.run is None) == (arguments.model is None):
        raise ConfigError("run and model: give one of them")
    for name in ("checkpoint", "init_from"):
        if arguments.model is not None and getattr(arguments, name) is not None:
            raise ConfigError(f"{name} is {getattr(arguments, name)!r}: needs run")
    if arguments.run is not None and arguments.context is not None:
        raise ConfigError(f"context is {arguments.context}: needs model, a run has its own")
    if arguments.data is None:
        raise ConfigError("data is None: the file to judge the model on is needed")
    for name in ("examples", "beams", "context"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}: must be at least 1")
    from transformer_jax.checkpoints.run_folder import json_text
    from transformer_jax.training.progress import DecodingLine

    config, tokenizers, params = _of_run(arguments) if arguments.run else _published(arguments)
    if isinstance(config.task, DigitsTask | TonesTask):
        found = judge_signals(config, tokenizers, params, arguments.data, DecodingLine())
    else:
        found = judge_file(config, tokenizers, params, DecodingLine())
    if (hint := missing_metrics(config, found)) is not None:
        print(f"evaluate: {hint}", file=sys.stderr)
    width = max(map(len, found))
    lines = "\n".join(f"{name:{width}}  {value:.6g}" for name, value in found.items())
    print(json_text(found, indent=1) if arguments.json else lines)


def judge_file(
    config: TrainConfig, tokenizers: Tokenizers, params: Params, report: Report | None = None
) -> dict[str, float]:
    """Return what a model comes to on `config.val_data`, all of which is held out.

    `report` is told how many examples are decoded.
    """
    from transformer_jax.training.tasks import load_task

    return judge(load_task(config, tokenizers, config.model.vocab_size), params, report)


def judge_signals(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    path: str,
    report: Report | None = None,
) -> dict[str, float]:
    """Return what a model of pictures or sounds comes to on those of a .npz file."""
    from transformer_jax.training.tasks.continuous import Signals
    from transformer_jax.training.tasks.signals import read_signals

    assert isinstance(config.task, DigitsTask | TonesTask)
    signals = read_signals(config.task, path)
    return judge(Signals(config, tokenizers, config.model.vocab_size, signals), params, report)


def judge(task: TrainingTask, params: Params, report: Report | None = None) -> dict[str, float]:
    """Return the loss and the measures of a task's held-out part."""
    from transformer_jax.training.batch import batch_scores
    from transformer_jax.training.evaluation import evaluate
    from transformer_jax.training.step import make_eval_step

    config = task.config
    step = make_eval_step(batch_scores(config.model), task.prepare)
    scores = evaluate(step, params, task.held_out, task.evaluation())
    found = {"nats_per_token": scores.loss, "bits_per_token": scores.loss / math.log(2)}
    found["perplexity"] = math.exp(min(scores.loss, 700.0))
    if (character := task.per_character(scores.loss)) is not None:
        found[f"nats_per_{character[1]}"] = character[0]
        found[f"bits_per_{character[1]}"] = character[0] / math.log(2)
    return found | {"likeliest_label": scores.accuracy} | task.judge(params, report)


def _of_run(arguments: argparse.Namespace) -> tuple[TrainConfig, Tokenizers, Params]:
    """Return a run's config with the file to judge it on, its tokenizers and parameters."""
    from transformer_jax.training.tasks import Tokenizers

    model = load_run("evaluate", arguments)
    assert model.run is not None
    task: Task = model.run.task
    if isinstance(task, PreferenceTask):
        rule = "its loss is relative to the model that the run began with; train.py measures it"
        raise ConfigError(f"run is of task 'preference': {rule}")
    if isinstance(task, GeneratedTask):  # a file of pairs, read as those of its examples
        two_rows = model_shape(model.config) == "encoder-decoder"
        task = Seq2SeqTask(beams=1) if two_rows else PrefixTask(bidirectional=False, beams=1)
    if isinstance(task, Seq2SeqTask | PrefixTask):
        changes: dict[str, FieldValue] = {"judged": arguments.examples or 2**31 - 1}
        if arguments.beams is not None:
            changes["beams"] = arguments.beams
        changes |= {"targets": arguments.targets, "val_targets": arguments.targets}
        task = dataclasses.replace(task, **changes)
    else:
        signals = isinstance(task, DigitsTask | TonesTask)
        for name in ("targets", "beams") if signals else ("targets", "beams", "examples"):
            if getattr(arguments, name) is not None:
                rule = f"a run of task {task.kind!r} has no pairs"
                raise ConfigError(f"{name} is {getattr(arguments, name)!r}: {rule}")
    held = Tokenizers(model.tokenizer, model.source_tokenizer)
    if isinstance(task, DigitsTask | TonesTask):  # which reads no file while it is trained
        task = dataclasses.replace(task, judged=arguments.examples or 2**31 - 1)
        return dataclasses.replace(model.run, task=task, eval_batches=None), held, model.params
    config = dataclasses.replace(
        model.run, task=task, data=arguments.data, val_data=arguments.data, eval_batches=None,
        data_weights=None,
    )  # fmt: skip
    return config, held, model.params


def _published(arguments: argparse.Namespace) -> tuple[TrainConfig, Tokenizers, Params]:
    """Return the config of a published model's evaluation, its tokenizer and parameters."""
    from transformer_jax.pretrained.load import load_pretrained
    from transformer_jax.pretrained.safetensors_folder import open_folder
    from transformer_jax.text.text_model import published_tokenizer
    from transformer_jax.training.tasks import Tokenizers

    for name in ("targets", "beams", "examples"):
        if getattr(arguments, name) is not None:
            rule = "a published model is judged on text"
            raise ConfigError(f"{name} is {getattr(arguments, name)!r}: {rule}")
    folder = open_folder(arguments.model)
    tokenizer = published_tokenizer(folder)
    model, params = load_pretrained(folder.path, dtype="float32")
    if model.kind == "encoder-decoder":
        raise ConfigError(f"model is {arguments.model!r}: an encoder-decoder; give it a run")
    assert isinstance(model, ModelConfig)
    if model.kind == "encoder" and not model.masked_token_head:
        rule = "it has no head of hidden tokens, which is what an encoder is judged by"
        raise ConfigError(f"model is {arguments.model!r}: {rule}")
    config = TrainConfig(
        model=model if model.kind == "decoder" else MaskedTask().fit_model(model),
        task=LanguageTask() if model.kind == "decoder" else MaskedTask(),
        tokenizer="pretrained", init_from=arguments.model, data=arguments.data,
        val_data=arguments.data, context=min(model.max_len, arguments.context or 512), batch_size=4,
    )  # fmt: skip
    return config, Tokenizers(tokenizer), params


def _parser() -> Parser:
    parser = Parser("evaluate", "Judge a model on a file that it has not seen.")
    add = parser.add_argument
    add_run(parser)
    add("--model", metavar="FOLDER_OR_ID", help="a published decoder or encoder instead")
    add("--data", metavar="FILE", help="what to judge on: a file like the run's own data")
    add("--targets", metavar="FILE", help="of pairs: the file of the targets, line by line")
    add(
        "--examples",
        type=int,
        metavar="N",
        help="of pairs and signals: decode the first N; default: all",
    )
    add("--beams", type=int, metavar="N", help="of pairs: beams of the search; default: the run's")
    add("--context", type=int, metavar="N", help="of --model: tokens of a window; default: 512")
    add("--json", action="store_true", help="print one JSON object")
    return parser
