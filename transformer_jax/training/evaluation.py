"""Evaluation on held-out examples: the loss, and the metrics of decoded outputs."""

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
    """Result of an evaluation."""

    loss: float
    """Mean loss in nats per label."""
    accuracy: float


def evaluate(
    eval_step: Callable[..., jax.Array],
    params: Params,
    held_out: tuple[jax.Array | np.ndarray, ...],
    batches: Iterable[Inputs],
) -> Scores:
    """Return the mean loss and accuracy over all labels of the batches.

    Args:
        eval_step: function that `make_eval_step` returned.
        params: model parameters.
        held_out: arrays that are passed to every call, such as a corpus.
        batches: inputs for each call.
    """

    def placed(leaf: jax.Array | np.ndarray) -> jax.Array:
        return leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf)

    parts = [eval_step(params, *held_out, jax.tree.map(placed, batch)) for batch in batches]
    # results are transferred once at the end, because reading each result would wait for its batch
    losses, weights, right = np.array(jax.device_get(parts), np.float64).T
    # padding rows have no labels, so their weight is 0
    labels = max(weights.sum(), 1.0)
    return Scores(float(losses.sum() / labels), float(right.sum() / labels))


def evaluate_run(run: Run, state: TrainState) -> Scores:
    """Return the mean loss and accuracy on the task's held-out data."""
    place = run.placement.rows
    if run.task.place is not None:  # each process reads only its own rows
        place = run.placement.rows_of_process
    batches = (place(batch, axis=0) for batch in run.task.evaluation())
    relative = isinstance(run.config.task, PreferenceTask)
    # The adapters are already joined to the base below, so only a reference model is passed.
    kwargs = {"frozen": run.frozen} if relative else {}

    def step(*arguments: PyTree) -> jax.Array:
        return run.placement.settled(run.programs.eval_step(*arguments, **kwargs))

    return evaluate(step, run.eval_params(state), run.held_out, batches)


def reevaluate_checkpoints(run: Run, last: int, before: TrainConfig, progress: Progress) -> None:
    """Reevaluate checkpoints up to step `last` if they used a different value of `eval_batches`.

    The best checkpoint is the one with the lowest loss, so the losses must be comparable. `before`
    is the run's previous config, which applies to checkpoints that do not record `eval_batches`.
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
        except checkpoint.CheckpointError as error:  # a damaged checkpoint cannot be the best
            progress.say(f"{error}; not evaluated")
            continue
        found = loss if math.isfinite(loss) else None
        by_first(partial(checkpoint.set_metadata, path, val_loss=found, eval_batches=now))
        line = f"eval_batches changed from {was} to {now}: held-out loss {loss:.4f}"
        progress.say(f"step {step}: {line}, was {old:.4f}")


def decode_held_out(
    run: Run, state: TrainState, progress: Progress
) -> tuple[str, dict[str, float]]:
    """Decode held-out examples. Return a sample and the scores, which the first process saves."""
    sample, judged = "", dict[str, float]()
    # all processes take part in gathering, but only the first process decodes
    params = gathered_here(run.eval_params(state))
    if is_first():
        if run.config.sample_tokens:
            sample = run.task.sample(params)
            write_file(run.folder.path / "sample.txt", sample + "\n")
        judged = run.task.judge(params, progress.decoded)
        write_file(run.folder.path / "scores.json", json_text(judged, indent=1))
    return sample, judged
