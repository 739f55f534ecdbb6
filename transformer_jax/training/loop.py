"""Training loop, which trains and evaluates a model, saves checkpoints, and resumes runs.

The loop is the same for all tasks. A task (see `tasks`) defines the data and the loss. For a custom
loop, use the building blocks in `step`.

    run         programs, state, and checkpoints of a training run
    evaluation  loss on held-out examples, and metrics computed on decoded outputs
    report      logging and display of the measurements of each step
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path

import jax

from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.run_folder import (
    RunError,
    RunFolder,
    check_unused,
    locked,
    plot_losses,
)
from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.fields import check_new_folder
from transformer_jax.config.keywords import known_keywords
from transformer_jax.config.tasks import CustomTask, PreferenceTask
from transformer_jax.training.evaluation import (
    decode_held_out,
    evaluate_run,
    reevaluate_checkpoints,
)
from transformer_jax.training.initial import check_model, start_model
from transformer_jax.training.processes import any_process, by_first, is_first, wait_for_all
from transformer_jax.training.progress import Progress, Silent, progress_for_notebook
from transformer_jax.training.report import Report, finite
from transformer_jax.training.run import Run, continued
from transformer_jax.training.step import TrainState
from transformer_jax.training.tasks import load_task
from transformer_jax.training.tasks.task import Inputs
from transformer_jax.training.trackers import check_trackers
from transformer_jax.values import value_class


@value_class
class Result:
    """Result of a run.

    Attributes:
        config: the config of the run.
        state: the state after the last step.
        step: the number of the last step.
        interrupted: whether `stop` ended the run early.
        val_loss: held-out loss at `step`, in nats per token, or None if it is not finite or if the
            run stopped between evaluations.
        val_loss_per_character: held-out loss in nats per `unit`, which is comparable across
            tokenizers, or None if the task does not define it.
        best_step: step of the checkpoint with the lowest held-out loss, or None if there is none.
        sample: sample of the model's output, either generated text or decoded held-out examples.
        rejected: number of steps with a non-finite loss or gradient.
        accuracy: fraction of held-out labels predicted correctly at `step`.
        scores: metrics for the decoded held-out examples.
        unit: unit of `val_loss_per_character`, which is "character" or "byte", or "token" if that
            loss is None.
    """

    config: TrainConfig
    state: TrainState = field(repr=False)
    step: int
    interrupted: bool
    val_loss: float | None
    val_loss_per_character: float | None
    best_step: int | None
    sample: str
    rejected: int
    accuracy: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    unit: str = "token"

    @property
    def perplexity(self) -> float | None:
        """Return exp(val_loss), or None if the loss is not finite or not measured per token."""
        task = self.config.task
        custom = isinstance(task, CustomTask) and task.loaded_by is not None
        if self.val_loss is None or custom or isinstance(task, PreferenceTask):
            return None
        # exp(710) overflows float64
        return math.exp(min(self.val_loss, 700.0))


@known_keywords
def fit(
    config: TrainConfig,
    *,
    resume: bool = False,
    vocab_size: int | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    task: CustomTask | None = None,
) -> Result:
    """Train a model as the config specifies and write the run to its folder.

    In a distributed run (`jax.distributed`), each process calls `fit` with the same config, and the
    mesh must span all devices. Only the first process writes the folder, but all processes must be
    able to read it. Every `log_every` steps, the processes agree on whether to stop.

    Args:
        config: config of the run. `config.out` is the folder. If `config.init_from` is set, the
            parameters and the tokenizer are loaded from that run or published model. In this case,
            `config.model` must match the initial model's config, except for `OVERRIDABLE_FIELDS`
            and the table rows that the task appends. Use `fine_tuning` to create the config.
        resume: whether to continue the run in the folder from its last checkpoint. The result is
            bit for bit the same as without the interruption. Only the fields in
            `run_folder.MAY_CHANGE` can differ. If `steps` changes, the schedule is adjusted.
        vocab_size: vocabulary size of the model, which must be at least the tokenizer's. None uses
            the tokenizer's size.
        progress: receiver of the progress. None prints lines in a notebook and nothing elsewhere.
        stop: function that is called after every step. If it returns True, the run saves a
            checkpoint and returns.
        task: a custom task, used instead of `config.task` (docs/howto_task.md).

    Raises:
        ConfigError: If the config is invalid. Nothing is written.
        DataError: If the data cannot be used. Nothing is written.
        CheckpointError: If the initial model or checkpoint cannot be read. Nothing is written.
        RunError: If the run fails. After RunError or OSError, existing checkpoints remain valid.
    """
    if not isinstance(config, TrainConfig):
        kind = repr(config) if isinstance(config, str) else f"of type {type(config).__name__}"
        rule = "must be a TrainConfig, such as TrainConfig(model=...) or train_preset(NAME)"
        raise ConfigError(f"config is {kind}: {rule}")
    if task is not None:
        config = replace(config, task=task)
    progress = progress_for_notebook() if progress is None else progress
    # all processes compute the same numbers, so only the first process reports them
    progress = progress if is_first() else Silent()
    needs_base = config.lora is not None or isinstance(config.task, PreferenceTask)
    if needs_base and config.init_from is None:
        reason = "lora adapts" if config.lora is not None else "task 'preference' starts from"
        raise ConfigError(f"init_from is None: must name the model that {reason}")
    if is_first():
        check_trackers(config.log or ())
    folder = RunFolder(Path(config.out).absolute())  # the working directory may change
    with ExitStack() as stack:
        found, start = None, None
        if resume:
            stored = folder.read_config()
            by_first(lambda: stack.enter_context(locked(folder.path)))
            # locked first, because another process may be writing the checkpoint to resume from
            data, found = continued(config, stored, folder, vocab_size, progress)
            if config.init_from is not None and (found is None or needs_base):
                from transformer_jax.loading import naming_run

                with naming_run(config.out, config.init_from):
                    start = start_model(config.init_from)
        else:
            check_new_folder("out", config.out)
            by_first(lambda: check_unused(Path(config.out)))
            if config.init_from is not None:
                start = start_model(config.init_from)
                check_model(config.model, start, config.init_from)
            data = load_task(config, None if start is None else start.tokenizers, vocab_size)
        # nothing is written until the step is known to fit in memory
        run = Run(data, folder)
        first = run.check_memory(0 if found is None else found.step)
        if not resume:
            by_first(lambda: stack.enter_context(_claim_folder(folder.path)))
        if found is None:
            state = run.first_state(start, progress)
        else:
            run.load_base(found, start)
            reevaluate_checkpoints(run, found.step, stored, progress)
            state = checkpoint.restore(found.path, run.template, verified=True)
        done = int(state.step)
        if found is not None:
            by_first(lambda: checkpoint.set_aside(folder.checkpoints, done))
        by_first(lambda: folder.write_config(run.config))
        by_first(lambda: folder.write_tokenizer(data.tokenizers.tokenizer))
        by_first(lambda: folder.write_source_tokenizer(data.tokenizers.source))
        if damaged := by_first(lambda: folder.cut_metrics(done)):
            progress.say(f"{folder.metrics_file}: dropped damaged lines: {damaged}")
        for line in run.described(done):
            progress.say(line)
        for line in _warnings(run.config):
            progress.say(line)
            if isinstance(progress, Silent) and is_first():
                logging.getLogger(__name__).warning(line)
        stack.callback(progress.stop)
        report = stack.enter_context(closing(Report(run, progress)))
        # raise an error from the last save here rather than in its thread
        with run.saver:
            return _train(run, report, state, first, stop)


def _warnings(config: TrainConfig) -> Iterator[str]:
    """Yield a warning for each setting that is probably a mistake."""
    model = config.model
    if config.warmup >= config.steps:
        rule = f"learning_rate {config.learning_rate:g} is not reached in {config.steps} steps"
        yield f"warmup_steps is {config.warmup}: {rule}"
    if isinstance(config.task, PreferenceTask):
        for name in ("dropout", "attention_dropout"):
            if rate := getattr(model, name, 0):
                rule = "the reference model has none"
                yield f"{name} is {rate:g}: {rule}, so the loss does not start at log 2"
    experts = model.experts
    if experts is not None and experts.top_k == 1 < experts.count and experts.normalize:
        rule = "each token's only weight is 1, so the router learns nothing from the task's loss"
        yield f"experts have top_k=1 and normalize=True: {rule} (it does with normalize=False)"


@contextmanager
def _claim_folder(path: Path) -> Iterator[None]:
    """Create and lock a new run's folder. Raises RunError if another run has started there."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        with locked(path):
            if any(entry.name != "lock" for entry in path.iterdir()):
                raise RunError(f"{path}: another run has just started here")
            yield
    except BaseException:
        with suppress(OSError):  # fails unless the folder is empty
            path.rmdir()
        raise


def _train(
    run: Run, report: Report, state: TrainState, first: list[Inputs], stop: Callable[[], bool]
) -> Result:
    """Run the remaining steps and return the result."""
    config, progress, phases = run.config, report.progress, report.phases
    done = int(state.step)
    scores, val_loss = None, run.saved_val_loss(done)
    best = checkpoint.best_step(run.folder.checkpoints)
    best_loss = None if best is None else run.saved_val_loss(best)
    stop_requested = interrupted = False
    pending = None
    progress.start(done, config.steps)
    # the time before the first step belongs to no phase
    phases.taken()
    while done < config.steps and not interrupted:
        with phases.of("data"):
            # the memory check has already made the inputs of the first step
            inputs = first.pop() if first else run.inputs(done)
        report.profile.before(done + 1, state)
        with phases.of("step"):
            state, metrics = run.step(state, inputs)
        report.profile.after(done + 1, state)
        # a step's measurements are read while the next step runs, so that the device is never idle
        if pending is not None:
            report.write(report.read(*pending))
        done += 1
        pending = (done, metrics, None if report.spikes is None else inputs)
        stop_requested = stop_requested or stop()
        interrupted = stop_requested
        if jax.process_count() > 1:  # processes synchronize only every `log_every` steps
            interrupted = done % config.log_every == 0 and any_process(stop_requested)
        last = done == config.steps
        evaluated = last or done % config.eval_every == 0
        kept = last or interrupted or done % config.checkpoint_every == 0
        if not (evaluated or kept):
            continue
        numbers, pending = report.read(*pending), None
        scores, val_loss = None, None
        with report.paused():
            if evaluated:
                with phases.of("evaluation"):
                    scores = evaluate_run(run, state)
                val_loss = finite(scores.loss)
            report.write(numbers, scores)
            # the best model up to now is always saved
            if val_loss is not None and (best_loss is None or val_loss < best_loss):
                best_loss, kept = val_loss, True
            if kept:
                with phases.of("checkpoint"):
                    run.save(state, val_loss)
        # a run that has taken its last step is complete
        interrupted = interrupted and not last
    if scores is None and not interrupted:  # the run was already complete
        scores = evaluate_run(run, state)
        val_loss = finite(scores.loss)
    # The best step is read from the folder below, so all checkpoints must be complete.
    run.saver.wait()
    sample, judged = ("", {}) if interrupted else decode_held_out(run, state, progress)
    if is_first():
        plot_losses(run.folder)
    wait_for_all("finished")
    character = None if val_loss is None else run.task.per_character(val_loss)
    return Result(
        config=config,
        state=state,
        step=int(state.step),
        interrupted=interrupted,
        val_loss=val_loss,
        val_loss_per_character=None if character is None else character[0],
        best_step=checkpoint.best_step(run.folder.checkpoints),
        sample=sample,
        rejected=int(state.rejected),
        accuracy=None if scores is None else scores.accuracy,
        scores=judged,
        unit="token" if character is None else character[1],
    )
