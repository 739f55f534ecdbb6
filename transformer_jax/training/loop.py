"""Train a model for a task: read its data, step, evaluate, keep checkpoints, stop and continue.

`fit` is all of it; `step` has the parts for a loop of one's own. What is learnt, and of what, is
the task's (`tasks`): the loop is the same for all.

    run         the programs of a run, its state, and its checkpoints
    evaluation  the loss of held-out examples, and what the model makes of them
    report      what is written and shown of each step
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
from transformer_jax.config.tasks import OwnTask, PreferenceTask
from transformer_jax.training.evaluation import decode_held_out, evaluate_run, measure_alike
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
    """Hold what a run came to.

    Attributes:
        config: of the run.
        state: after the last step.
        step: the number of that step.
        interrupted: `stop` asked for it before the last step.
        val_loss: at `step`, nats per token; None where it is not finite, or where the run stopped
            between two evaluations.
        val_loss_per_character: the same in nats per character, whatever the tokenizer; None where a
            task has none.
        best_step: the step of the checkpoint with the lowest held-out loss; None where there is
            none.
        sample: what the model makes of its task, a text or held-out examples.
        rejected: steps whose loss or gradient was not finite.
        accuracy: share of the held-out labels that are the likeliest, at `step`.
        scores: what the held-out examples came to once they were decoded.
        unit: what `val_loss_per_character` is of, character or byte; token where it is None.
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
        """Return exp(val_loss), of a token; None where the loss is of pairs, or not finite."""
        task = self.config.task
        own = isinstance(task, OwnTask) and task.loaded_by is not None  # no loss of tokens
        if self.val_loss is None or own or isinstance(task, PreferenceTask):
            return None
        # exp(710) is infinite in float64
        return math.exp(min(self.val_loss, 700.0))


@known_keywords
def fit(
    config: TrainConfig,
    *,
    resume: bool = False,
    vocab_size: int | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    task: OwnTask | None = None,
) -> Result:
    """Train as a config says, into its folder.

    Of several processes (`jax.distributed`), each calls it with the same config, whose mesh is of
    all their devices, and a folder that all of them see; the first writes it. They are asked
    whether to stop every `log_every` steps.

    Args:
        config: of the run; `config.out` is the folder. With `config.init_from`, parameters and
            tokenizer start from that run or published model, whose config `config.model` must be,
            but for `OVERRIDABLE_FIELDS` and what the task adds at the ends of its tables;
            `fine_tuning` makes such a config.
        resume: go on with the run in the folder from its last checkpoint, bit for bit as if it had
            never stopped. What `run_folder.MAY_CHANGE` lists may differ from it (with another
            `steps` the schedule follows the new one).
        vocab_size: the model's, at least the tokenizer's; None is the tokenizer's.
        progress: is told how far it is; None prints in a notebook, and nothing elsewhere.
        stop: is asked after every step; True saves and returns.
        task: a task of your own, in the place of `config.task` (docs/howto_task.md).

    Raises:
        ConfigError: if the config cannot be run, before anything is written.
        DataError: if the data cannot be used, before anything is written.
        CheckpointError: if what to start from cannot be read, before anything is written.
        RunError: for what happens on the way, as does OSError; the checkpoints so far stay good.
    """
    if not isinstance(config, TrainConfig):
        given = repr(config) if isinstance(config, str) else f"a {type(config).__name__}"
        rule = "must be a TrainConfig, as TrainConfig(model=...) or train_preset(NAME) is"
        raise ConfigError(f"config is {given}: {rule}")
    if task is not None:
        config = replace(config, task=task)
    progress = progress_for_notebook() if progress is None else progress
    # every process sees the same numbers: one tells of them
    progress = progress if is_first() else Silent()
    keeps = config.lora is not None or isinstance(config.task, PreferenceTask)
    if keeps and config.init_from is None:
        what = "lora adapts" if config.lora is not None else "task 'preference' starts from"
        raise ConfigError(f"init_from is None: must name the model that {what}")
    if is_first():
        check_trackers(config.log or ())
    folder = RunFolder(Path(config.out).absolute())  # wherever the process goes meanwhile
    with ExitStack() as stack:
        found, start = None, None
        if resume:
            stored = folder.read_config()
            by_first(lambda: stack.enter_context(locked(folder.path)))
            # the lock comes first: another process may be writing the checkpoint that is chosen
            data, found = continued(config, stored, folder, vocab_size, progress)
            if config.init_from is not None and (found is None or keeps):
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
        # nothing is written before the step is known to fit the memory
        run = Run(data, folder)
        first = run.check_memory(0 if found is None else found.step)
        if not resume:
            by_first(lambda: stack.enter_context(_claimed(folder.path)))
        if found is None:
            state = run.first_state(start, progress)
        else:
            run.load_base(found, start)
            measure_alike(run, found.step, stored, progress)
            state = checkpoint.restore(found.path, run.template, verified=True)
        done = int(state.step)
        if found is not None:
            by_first(lambda: checkpoint.set_aside(folder.checkpoints, done))
        by_first(lambda: folder.write_config(run.config))
        by_first(lambda: folder.write_tokenizer(data.tokenizers.tokenizer))
        by_first(lambda: folder.write_source_tokenizer(data.tokenizers.source))
        if damaged := by_first(lambda: folder.cut_metrics(done)):
            progress.say(f"{folder.metrics_file}: damaged lines left out: {damaged}")
        for line in run.described(done):
            progress.say(line)
        for line in _doubts(run.config):
            progress.say(line)
            if isinstance(progress, Silent) and is_first():
                logging.getLogger(__name__).warning(line)
        stack.callback(progress.stop)
        report = stack.enter_context(closing(Report(run, progress)))
        # an error of the last save ends the run here, and not in a thread
        with run.saver:
            return _train(run, report, state, first, stop)


def _doubts(config: TrainConfig) -> Iterator[str]:
    """Yield a line about each setting that may be meant, and seldom is."""
    model = config.model
    if config.warmup >= config.steps:
        rule = f"learning_rate {config.learning_rate:g} is not reached in {config.steps} steps"
        yield f"warmup_steps is {config.warmup}: {rule}"
    if isinstance(config.task, PreferenceTask):
        for name in ("dropout", "attention_dropout"):
            if rate := getattr(model, name, 0):
                rule = "the model that answers are compared with has none"
                yield f"{name} is {rate:g}: {rule}, so the loss does not start at log 2"
    experts = model.experts
    if experts is not None and experts.top_k == 1 < experts.count and experts.normalize:
        rule = "each token's only weight is 1, so the router learns nothing from the task's loss"
        yield f"experts have top_k=1 and normalize=True: {rule} (it does with normalize=False)"


@contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Make the folder of a new run and hold it; RunError where another run was quicker."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        with locked(path):
            if any(entry.name != "lock" for entry in path.iterdir()):
                raise RunError(f"{path}: another run has just started here")
            yield
    except BaseException:
        with suppress(OSError):  # unless it holds something: an empty one would be in the way
            path.rmdir()
        raise


def _train(
    run: Run, report: Report, state: TrainState, first: list[Inputs], stop: Callable[[], bool]
) -> Result:
    """Take the steps that are left, and return what the run came to.

    A step's numbers are read while the next one runs, unless there is something to do between them.
    """
    config, progress, phases = run.config, report.progress, report.phases
    done = int(state.step)
    scores, val_loss = None, run.saved_val_loss(done)
    best = checkpoint.best_step(run.folder.checkpoints)
    best_loss = None if best is None else run.saved_val_loss(best)
    told = interrupted = False
    pending = None
    progress.start(done, config.steps)
    phases.taken()
    while done < config.steps and not interrupted:
        with phases.of("data"):
            inputs = first.pop() if first else run.inputs(done)
        report.profile.before(done + 1, state)
        with phases.of("step"):
            state, metrics = run.step(state, inputs)
        report.profile.after(done + 1, state)
        # the numbers of a step are read while the next one runs: waiting would idle the device
        if pending is not None:
            report.write(report.read(*pending))
        done += 1
        pending = (done, metrics, None if report.spikes is None else inputs)
        told = told or stop()
        interrupted = told
        if jax.process_count() > 1:  # they agree now and then alone
            interrupted = done % config.log_every == 0 and any_process(told)
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
            # the best so far is kept, whether or not a checkpoint is due
            if val_loss is not None and (best_loss is None or val_loss < best_loss):
                best_loss, kept = val_loss, True
            if kept:
                with phases.of("checkpoint"):
                    run.save(state, val_loss)
        interrupted = interrupted and not last
    if scores is None and not interrupted:  # the run was complete before
        scores = evaluate_run(run, state)
        val_loss = finite(scores.loss)
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
