"""Reporting on a run: metrics.jsonl, trackers, the profile, and batches with loss spikes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np

from transformer_jax.checkpoints.run_folder import RunError
from transformer_jax.config.tasks import PreferenceTask
from transformer_jax.training.evaluation import Scores
from transformer_jax.training.phases import Phases, flops_utilisation, peak_memory
from transformer_jax.training.processes import gathered_here, is_first
from transformer_jax.training.profiling import Profile
from transformer_jax.training.progress import Progress
from transformer_jax.training.run import Run
from transformer_jax.training.spikes import Spikes
from transformer_jax.training.step import Metrics
from transformer_jax.training.tasks.task import Inputs
from transformer_jax.training.trackers import Trackers

MAX_REJECTED = 10
"""Number of consecutive steps with a non-finite loss or gradient after which a run stops."""


@dataclass(frozen=True)
class StepNumbers:
    """Measurements of one step."""

    step: int
    loss: float
    grad_norm: float
    updates: int
    """Number of earlier steps that updated the parameters."""
    tokens_per_second: float | None


class Report:
    """Reporter that shows the measurements of every step and writes some of them to a file."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run, self.progress = run, progress
        folder, factor = run.folder.path, run.config.dump_batch
        self.phases, self.profile = Phases(), Profile(run.config, folder)
        self.spikes = None if factor is None else Spikes(factor, folder)
        names = (run.config.log or ()) if is_first() else ()
        self.trackers = Trackers(names, folder, run.config, progress.say)
        self._times = list[float]()  # arrival times of the last 21 steps' measurements

    def close(self) -> None:
        """Close the profile and the trackers."""
        self.profile.close()
        self.trackers.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in the context from the number of tokens per second."""
        before = time.perf_counter()
        yield
        pause = time.perf_counter() - before
        # shift the recorded times by the pause
        self._times = [t + pause for t in self._times]

    def read(self, step: int, metrics: Metrics, inputs: Inputs | None) -> StepNumbers:
        """Wait for the measurements of a step and show them.

        If the loss spikes, the batch is saved. Raises RunError after MAX_REJECTED consecutive
        rejected steps.
        """
        with self.phases.of("step"):
            metrics = jax.device_get(metrics)
        self._times = [*self._times[-20:], time.perf_counter()]
        rate = None
        if len(self._times) > 1:
            seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
            rate = self.run.task.tokens_per_step / max(seconds, 1e-9)
        loss, norm = float(metrics.loss), float(metrics.grad_norm)
        if self.spikes is not None and self.spikes.is_spike(loss, norm):
            task = self.run.task
            batch = gathered_here(task.prepare(*self.run.resident, inputs))
            if is_first() and not self.spikes.is_full():
                file = self.spikes.save(step, batch, loss, norm, task.tokenizers.tokenizer)
                self.progress.say(f"step {step}: loss {loss:.4f} stands out: batch saved in {file}")
        if metrics.rejected_in_a_row >= MAX_REJECTED:
            raise RunError(
                f"step {step}: loss or gradient was not finite {MAX_REJECTED} times in a row "
                f"(loss {loss}, gradient norm {norm})"
            )
        self.progress.step(step, loss, rate)
        return StepNumbers(step, loss, norm, max(step - 1 - int(metrics.rejected), 0), rate)

    def write(self, numbers: StepNumbers, scores: Scores | None = None) -> None:
        """Append a line to metrics.jsonl if one is due."""
        config, step, held_out = self.run.config, numbers.step, {}
        if scores is not None and math.isfinite(scores.loss):
            held_out = {"val_loss": scores.loss, "val_accuracy": scores.accuracy}
            if config.eval_batches is not None:  # the loss is for some held-out batches only
                held_out["eval_batches"] = config.eval_batches
            perplexity = ""
            of_tokens = self.run.task.learner is None
            if of_tokens and not isinstance(config.task, PreferenceTask):
                # `math.exp` raises OverflowError above 709.
                perplexity = f"perplexity {math.exp(min(scores.loss, 700.0)):.2f}, "
            self.progress.say(
                f"step {step}: held-out loss {scores.loss:.4f}, {perplexity}"
                f"accuracy {scores.accuracy:.3f}"
            )
        elif step % config.log_every and step not in (1, config.steps):
            return
        # a rejected step changes neither the parameters nor the schedule
        learning_rate = self.run.programs.rate(jax.device_put(np.int32(numbers.updates)))
        line = {
            "step": step,
            "loss": finite(numbers.loss),
            "learning_rate": float(jax.device_get(learning_rate)),
            "grad_norm": finite(numbers.grad_norm),
            "tokens_per_second": numbers.tokens_per_second,
            **self.phases.taken(),
            "peak_memory": peak_memory(),
        }
        if numbers.tokens_per_second is not None and self.run.task.learner is None:
            used = flops_utilisation(config, numbers.tokens_per_second)
            line |= {} if used is None else {"flops_utilisation": used}
        if is_first():
            self.run.folder.append_metrics(line | held_out)
        self.trackers.write(step, line | held_out)


def finite(value: float) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON cannot represent."""
    return value if math.isfinite(value) else None
