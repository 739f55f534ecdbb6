"""Measure a model on held-out examples: their loss, and what it writes once they are decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.run_folder import json_text
from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import PreferenceTask
from transformer_jax.durable_files import write_file
from transformer_jax.pytree import PyTree
from transformer_jax.training.batch import Params
from transformer_jax.training.processes import by_first, gathered_here, is_first
from transformer_jax.training.progress import Progress
from transformer_jax.training.run import Run
from transformer_jax.training.step import TrainState
from transformer_jax.training.tasks.task import Inputs
from transformer_jax.values import short_repr


@short_repr
class Scores(NamedTuple):
    """Hold what an evaluation found."""

    loss: float
    """Nats a label."""
    accuracy: float


def evaluate(
    eval_step: Callable[..., jax.Array],
    params: Params,
    held_out: tuple[jax.Array | np.ndarray, ...],
    batches: Iterable[Inputs],
) -> Scores:
    """Return mean loss and accuracy over batches, weighted by their labels.

    Args:
        eval_step: of `make_eval_step`.
        params: of the model.
        held_out: what the step reads in each batch, such as a corpus.
        batches: the inputs of each call.
    """

    def placed(leaf: jax.Array | np.ndarray) -> jax.Array:
        return leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf)

    parts = [eval_step(params, *held_out, jax.tree.map(placed, batch)) for batch in batches]
    # one transfer at the end: reading each batch's numbers would wait for it
    losses, weights, right = np.array(jax.device_get(parts), np.float64).T
    # batches that fill up have no labels, and weigh nothing
    labels = max(weights.sum(), 1.0)
    return Scores(float(losses.sum() / labels), float(right.sum() / labels))


def evaluate_run(run: Run, state: TrainState) -> Scores:
    """Return mean loss and accuracy over the held-out part of a run's task."""
    place = run.placement.rows
    if run.task.place is not None:  # its processes read a part each
        place = run.placement.own_rows
    batches = (place(batch, axis=0) for batch in run.task.evaluation())
    relative = isinstance(run.config.task, PreferenceTask)
    named = {"frozen": run.frozen} if relative else {}

    def step(*arguments: PyTree) -> jax.Array:
        return run.placement.settled(run.programs.eval_step(*arguments, **named))

    return evaluate(step, run.used_params(state), run.held_out, batches)


def measure_alike(run: Run, last: int, before: TrainConfig, progress: Progress) -> None:
    """Evaluate the checkpoints up to step `last` again whose loss is of other `eval_batches`.

    The best one is chosen by these losses. `before` is the run's config of the last call, which
    says how those were measured that do not say it.
    """
    now, folder = run.config.eval_batches, run.folder.checkpoints
    for step in checkpoint.saved_steps(folder):
        path = checkpoint.step_path(folder, step)
        try:
            metadata = checkpoint.read_manifest(path).metadata
            was, old = metadata.get("eval_batches", before.eval_batches), metadata["val_loss"]
            if step > last or old is None or was == now:
                continue
            loss = evaluate_run(run, checkpoint.restore(path, run.template)).loss
        except checkpoint.CheckpointError as error:  # a damaged one cannot be the best
            progress.say(f"{error}; not evaluated")
            continue
        found = loss if math.isfinite(loss) else None
        by_first(partial(checkpoint.set_metadata, path, val_loss=found, eval_batches=now))
        line = f"eval_batches was {was} and is {now}: evaluated again, held-out loss {loss:.4f}"
        progress.say(f"step {step}: {line}, was {old:.4f}")


def decode_held_out(
    run: Run, state: TrainState, progress: Progress
) -> tuple[str, dict[str, float]]:
    """Return what the model writes, and how it compares; the first process also writes files."""
    sample, judged = "", dict[str, float]()
    # all processes take part in the gathering, and the first alone decodes
    params = gathered_here(run.used_params(state))
    if is_first():
        if run.config.sample_tokens:
            sample = run.task.sample(params)
            write_file(run.folder.path / "sample.txt", sample + "\n")
        judged = run.task.judge(params, progress.decoded)
        write_file(run.folder.path / "scores.json", json_text(judged, indent=1))
    return sample, judged
