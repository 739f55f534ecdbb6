"""Train a model for a task: read it, step, evaluate, keep checkpoints, stop and continue.

`fit` is all of it; `step` has the parts for a loop of one's own. What is learnt, and of what, is
the task's (`tasks`): the loop is the same for all.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax._src.config import trace_context  # what `jax.jit` itself finds programs by

from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.checkpoints.run_folder import (
    MAY_CHANGE,
    RunError,
    RunFolder,
    check_unused,
    differences,
    json_text,
    locked,
    plot_losses,
    tokenizer_sha256,
)
from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.fields import check_new_folder
from transformer_jax.config.ngram import NgramConfig
from transformer_jax.config.optimizers import ScheduleFree
from transformer_jax.config.tasks import PreferenceTask
from transformer_jax.durable_files import write_file
from transformer_jax.models.ngram import count_ngrams
from transformer_jax.models.quantized import count
from transformer_jax.programs import is_ours, undisturbed
from transformer_jax.pytree import check_ranges
from transformer_jax.shown import short_repr
from transformer_jax.text.text_model import naming_run
from transformer_jax.training.adapting import FrozenBase, adapted_loss, fresh_adapters, given_params
from transformer_jax.training.batch import Batch, batch_loss, batch_scores
from transformer_jax.training.initial import StartModel, check_model, start_model, start_params
from transformer_jax.training.optimizers import (
    learning_rate_schedule,
    make_optimizer,
    without_frozen,
)
from transformer_jax.training.phases import Phases, flops_utilisation, peak_memory
from transformer_jax.training.placement import make_placement
from transformer_jax.training.planning.memory import (
    CompiledAhead,
    check_state,
    check_step,
    step_memory,
)
from transformer_jax.training.preference import Reference, preference_loss, preference_scores
from transformer_jax.training.processes import (
    any_process,
    by_first,
    gathered_here,
    is_first,
    wait_for_all,
)
from transformer_jax.training.profiling import Profile
from transformer_jax.training.progress import Progress, Silent, progress_for_notebook
from transformer_jax.training.spikes import Spikes
from transformer_jax.training.step import (
    Metrics,
    Params,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
    split_seed,
    start_state,
)
from transformer_jax.training.tasks import Tokenizers, TrainingTask, load_task
from transformer_jax.training.trackers import Trackers, check_trackers

MOST_REJECTED = 10
"""Steps in a row with a loss or gradient that is not finite, after which a run gives up."""


@short_repr
@dataclass(frozen=True)
class Result:
    """Hold what a run came to."""

    config: TrainConfig
    state: TrainState
    step: int
    interrupted: bool
    """`stop` asked for it before the last step."""
    val_loss: float | None
    """At `step`, nats per token; None where it is not finite, or where the run stopped between two
    evaluations."""
    val_loss_per_character: float | None
    """The same in nats per character, whatever the tokenizer; None where a task has none."""
    best_step: int | None
    sample: str
    """What the model makes of its task: a text, or held-out examples."""
    rejected: int
    """Steps whose loss or gradient was not finite."""
    accuracy: float | None = None
    """Share of the held-out labels that are the likeliest, at `step`."""
    scores: dict[str, float] = field(default_factory=dict)
    """What the held-out examples came to once they were decoded."""
    unit: str = "token"
    """What `val_loss_per_character` is of: character or byte; token where it is None."""

    @property
    def perplexity(self) -> float | None:
        """Return exp(val_loss), of a token; None where the loss is of pairs, or not finite."""
        if self.val_loss is None or isinstance(self.config.task, PreferenceTask):
            return None
        return math.exp(min(self.val_loss, 700.0))


@short_repr
class Scores(NamedTuple):
    """Hold what an evaluation found."""

    loss: float
    """Nats a label."""
    accuracy: float


def fit(
    config: TrainConfig,
    *,
    resume: bool = False,
    vocab_size: int | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train as `config` says, into the folder `config.out`.

    The model's vocab_size becomes the tokenizer's, or `vocab_size`, which may be larger. With
    `config.init_from`, parameters and tokenizer start from that run or published model, whose
    config `config.model` must be, but for `OVERRIDABLE_FIELDS` and what the task adds at the ends
    of its tables; `fine_tuning` makes such a config. With
    `resume`, the run in that folder goes on from its last checkpoint, bit for bit as if it had
    never stopped; what `run_folder.MAY_CHANGE` lists may differ from it (with another `steps` the
    schedule follows the new one). `stop` is asked after every step: True saves and returns.

    Of several processes (`jax.distributed`), each calls it with the same config, whose mesh is of
    all their devices, and a folder that all of them see; the first writes it. They are asked
    whether to stop every `log_every` steps.

    Raises ConfigError, DataError or CheckpointError before anything is written, RunError and
    OSError for what happens on the way; the checkpoints so far stay good.
    """
    if not isinstance(config, TrainConfig):
        given = repr(config) if isinstance(config, str) else f"a {type(config).__name__}"
        rule = "must be a TrainConfig, as TrainConfig(model=...) or train_preset(NAME) is"
        raise ConfigError(f"config is {given}: {rule}")
    progress = progress_for_notebook() if progress is None else progress
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
            task, found = _continued(config, stored, folder, vocab_size, progress)
            if config.init_from is not None and (found is None or keeps):
                with naming_run(config.out, config.init_from):
                    start = start_model(config.init_from)
        else:
            check_new_folder("out", config.out)
            by_first(lambda: check_unused(Path(config.out)))
            if config.init_from is not None:
                start = start_model(config.init_from)
                check_model(config.model, start, config.init_from)
            task = load_task(config, None if start is None else start.tokenizers, vocab_size)
        run = _Run(task, folder, progress, stop)
        run.check_memory(0 if found is None else found.step)
        if not resume:
            by_first(lambda: stack.enter_context(_claimed(folder.path)))
        if found is None:
            state = run.first_state(start)
        else:
            state = run.restored(found, start)
        done = int(state.step)
        if found is not None:
            by_first(lambda: checkpoint.set_aside(folder.checkpoints, done))
        by_first(lambda: _write_folder(folder, run.config, task.tokenizers))
        if damaged := by_first(lambda: folder.cut_metrics(done)):
            progress.say(f"{folder.metrics_file}: damaged lines left out: {damaged}")
        for line in run.described(done):
            progress.say(line)
        if config.warmup >= config.steps:
            rule = f"learning_rate {config.learning_rate:g} is not reached in {config.steps} steps"
            line = f"warmup_steps is {config.warmup}: {rule}"
            progress.say(line)
            if isinstance(progress, Silent) and is_first():
                logging.getLogger(__name__).warning(line)
        with _closing(progress), run.watched(), run.saver:
            return run.train(state)


def _write_folder(folder: RunFolder, config: TrainConfig, tokenizers: Tokenizers) -> None:
    """Write what a run's folder holds beside measurements and checkpoints."""
    folder.write_config(config)
    folder.write_tokenizer(tokenizers.tokenizer)
    folder.write_source_tokenizer(tokenizers.source)


def _continued(
    config: TrainConfig,
    stored: TrainConfig,
    folder: RunFolder,
    vocab_size: int | None,
    progress: Progress,
) -> tuple[TrainingTask, checkpoint.Manifest | None]:
    """Return what a resumed run goes on with; its checkpoint is None where none was saved yet."""
    by_first(lambda: checkpoint.remove_partial(folder.checkpoints))
    found, tokenizers = _last_good(folder, progress), None
    if found is not None:
        metadata = found.metadata
        own = folder.read_tokenizer(metadata["tokenizer_sha256"])
        source = metadata.get("source_tokenizer_sha256")
        tokenizers = Tokenizers(own, source and folder.read_source_tokenizer(source))
    else:
        _check_none_lost(folder, stored.checkpoint_every)
        if config.init_from is not None:
            tokenizers = Tokenizers(folder.read_tokenizer(), folder.read_source_tokenizer())
    task = load_task(config, tokenizers, vocab_size)
    _check_same(stored, task.config, found, task)
    return task, found


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


def evaluate(
    eval_step: Callable[..., jax.Array],
    params: Params,
    held_out: tuple[Any, ...],
    batches: Iterable[Any],
) -> Scores:
    """Return mean loss and accuracy over batches, weighted by their labels."""

    def placed(leaf: Any) -> jax.Array:
        return leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf)

    parts = [eval_step(params, *held_out, jax.tree.map(placed, batch)) for batch in batches]
    losses, weights, right = np.array(jax.device_get(parts), np.float64).T
    labels = max(weights.sum(), 1.0)
    return Scores(float(losses.sum() / labels), float(right.sum() / labels))


@dataclass(frozen=True)
class _Measured:
    """Hold the numbers of one step."""

    step: int
    loss: float
    grad_norm: float
    updates: int
    """Steps before it that were not rejected."""
    tokens_per_second: float | None


class _Run:
    """Hold what stays the same from step to step in one call of `fit`."""

    def __init__(
        self,
        task: TrainingTask,
        folder: RunFolder,
        progress: Progress,
        stop: Callable[[], bool],
    ) -> None:
        self.config, self.task, self.folder = task.config, task, folder
        self.progress, self.stop = progress, stop
        self._first: Any = None
        self._stop = False
        self.phases, self.profile = Phases(), Profile(task.config, folder.path)
        self.trackers = Trackers((), folder.path, task.config, progress.say)
        factor = task.config.dump_batch
        self.spikes = None if factor is None else Spikes(factor, folder.path)
        if isinstance(self.config.model, NgramConfig):
            self.config, self.programs = _counted(self.config, task)
            task.config = self.config
        else:
            of = _numerics(self.config), task.prepare
            known = undisturbed() and is_ours(of)
            self.programs = (_compiled if known else _compiled.__wrapped__)(*of, trace_context())
        self.placement = make_placement(self.config.mesh)
        self.template = self.placement.state(
            jax.eval_shape(self.programs.fresh_state, np.uint32(self.config.seed))
        )
        self.base: FrozenBase | Reference | None = None
        if self.config.lora is not None:
            self.base = FrozenBase(self.config, self.placement)
        elif isinstance(self.config.task, PreferenceTask):
            self.base = Reference(self.config, self.placement, self.template.params)
        self.frozen: tuple[Params, ...] = () if self.base is None else (self.base.template,)
        check_state(self.template, self.frozen)
        if task.place is not None:
            task.place = partial(self.placement.own_rows, axis=1)
        self.held_out = self.placement.whole(task.held_out)
        self.resident = self.placement.whole(task.resident)
        self.saver = checkpoint.Saver(folder.checkpoints, self.config.keep, _check_finite)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Open what a run is watched by, and close it however the run ends."""
        names = (self.config.log or ()) if is_first() else ()
        self.trackers = Trackers(names, self.folder.path, self.config, self.progress.say)
        try:
            yield
        finally:
            self.profile.close()
            self.trackers.close()

    def check_memory(self, step: int) -> None:
        """Compile the step that comes first; ConfigError where it needs more than a device has."""
        program = self.programs.train_step
        if isinstance(program, CompiledAhead) and step < self.config.steps:
            self._first = self._inputs(step)
            given = (*self.resident, self._first)
            compiled = program.program(self.template, *given, frozen=self.frozen)
            memory = step_memory(compiled, self.template, given, self.frozen)
            check_step(memory, self.config)

    def _inputs(self, step: int) -> Any:
        """Return what step `step`, from 0 on, reads, on the devices."""
        if self._first is not None:
            found, self._first = self._first, None  # was made to compile the first step
            return found
        inputs = self.task.inputs(step)
        if self.task.place is not None:  # it has placed them
            return inputs
        return self.placement.rows(inputs, axis=1)

    def first_state(self, start: StartModel | None) -> TrainState:
        """Return the state of step 0: fresh, or of the model to start from."""
        config, shardings = self.config, self.placement.shardings(self.template)
        seed = self.placement.whole(np.uint32(config.seed))
        if start is None:
            if shardings is None:
                return self.programs.fresh_state(seed)
            return jax.jit(self.programs.fresh_state, out_shardings=shardings)(seed)
        init_key, key = split_seed(np.uint32(config.seed))
        if self.base is not None:
            params, changes = self.base.load(start, init_key)
            self.frozen = (self.base.params,)
        else:
            params, changes = start_params(config, start, given_params(config, start), init_key)
        for line in changes:
            self.progress.say(line)
        if shardings is None:
            return self.programs.state_of(params, key=key)
        check_ranges(params, config.param_dtype)  # which a compiled program cannot do
        params = jax.device_put(params, shardings.params)
        key = jax.device_put(key, shardings.key)
        return jax.jit(self.programs.state_of, out_shardings=shardings)(params, key=key)

    def restored(self, found: checkpoint.Manifest, start: StartModel | None) -> TrainState:
        """Return the state of a checkpoint; what stays as it is comes from the model to start."""
        if found.step > self.config.steps:
            rule = f"the run is at step {found.step} already"
            raise ConfigError(f"steps is {self.config.steps}: {rule}")
        if self.base is not None:
            assert start is not None
            self.base.load(start, split_seed(np.uint32(self.config.seed))[0], found.metadata)
            self.frozen = (self.base.params,)
        return checkpoint.restore(found.path, self.template, verified=True)

    def used_params(self, state: TrainState) -> Params:
        """Return the parameters of the model, which adapters are a part of."""
        if self.base is None:
            return state.used_params
        return self.base.rejoined(state.used_params)

    def described(self, done: int) -> list[str]:
        """Return two lines: the model and its device, and what it is trained on."""
        total = count(self.template.params)
        if isinstance(self.base, FrozenBase):
            kept = count(self.base.template)
            trained, total = f" ({total:,} of them trained)", total + kept
        else:
            trained = ""
        start = f", from step {done} on" if done else ""
        return [
            f"model: {total:,} parameters{trained}, "
            f"vocabulary of {self.config.model.vocab_size:,}, on {self.placement.described()}",
            f"{self.task.described()}{start}",
        ]

    def train(self, state: TrainState) -> Result:
        config = self.config
        done = int(state.step)
        scores, val_loss = None, self._saved_val_loss(done)
        best = checkpoint.best_step(self.folder.checkpoints)
        best_loss = None if best is None else self._saved_val_loss(best)
        clock = _Clock(self.task.tokens_per_step)
        interrupted, pending = False, None
        self.progress.start(done, config.steps)
        self.phases.taken()
        while done < config.steps and not interrupted:
            with self.phases.of("data"):
                inputs = self._inputs(done)
            self.profile.before(done + 1, state)
            with self.phases.of("step"):
                step = self.programs.train_step(state, *self.resident, inputs, frozen=self.frozen)
                state, metrics = self.placement.settled(step)
            self.profile.after(done + 1, state)
            if pending is not None:  # its numbers are read while this step runs
                self._write(self._read(*pending, clock))
            done += 1
            pending = (done, metrics, None if self.spikes is None else inputs)
            interrupted, last = self._told_to_stop(done), done == config.steps
            evaluated = last or done % config.eval_every == 0
            kept = last or interrupted or done % config.checkpoint_every == 0
            if not (evaluated or kept):
                continue
            measured, pending = self._read(*pending, clock), None
            scores, val_loss = None, None
            with clock.paused():
                if evaluated:
                    with self.phases.of("evaluation"):
                        scores = self._evaluate(self.used_params(state))
                    val_loss = _finite(scores.loss)
                self._write(measured, scores)
                if val_loss is not None and (best_loss is None or val_loss < best_loss):
                    best_loss, kept = val_loss, True
                if kept:
                    with self.phases.of("checkpoint"):
                        self._save(state, val_loss)
            interrupted = interrupted and not last
        if scores is None and not interrupted:  # the run was complete before
            scores = self._evaluate(self.used_params(state))
            val_loss = _finite(scores.loss)
        return self._finish(state, val_loss, scores, interrupted)

    def _told_to_stop(self, done: int) -> bool:
        """Say whether any process was told to stop; several agree now and then alone."""
        if jax.process_count() == 1:
            return self.stop()
        self._stop = self._stop or self.stop()
        return done % self.config.log_every == 0 and any_process(self._stop)

    def _finish(
        self, state: TrainState, val_loss: float | None, scores: Scores | None, interrupted: bool
    ) -> Result:
        """Sample, judge and draw the curves, and return what the run came to."""
        self.saver.wait()
        sample, judged = "", dict[str, float]()
        params = None if interrupted else gathered_here(self.used_params(state))
        if is_first():
            if not interrupted and self.config.sample_tokens:
                sample = self.task.sample(params)
                write_file(self.folder.path / "sample.txt", sample + "\n")
            if not interrupted:
                judged = self.task.judge(params, self.progress.decoded)
                scored = json_text(judged, indent=1)
                write_file(self.folder.path / "scores.json", scored)
            plot_losses(self.folder)
        wait_for_all("finished")
        character = None if val_loss is None else self.task.per_character(val_loss)
        return Result(
            config=self.config,
            state=state,
            step=int(state.step),
            interrupted=interrupted,
            val_loss=val_loss,
            val_loss_per_character=None if character is None else character[0],
            best_step=checkpoint.best_step(self.folder.checkpoints),
            sample=sample,
            rejected=int(state.rejected),
            accuracy=None if scores is None else scores.accuracy,
            scores=judged,
            unit="token" if character is None else character[1],
        )

    def _read(self, step: int, metrics: Metrics, inputs: Any, clock: _Clock) -> _Measured:
        """Wait for a step's numbers and show them; RunError after too many rejected steps."""
        with self.phases.of("step"):
            metrics = jax.device_get(metrics)
        clock.tick()
        loss, norm = float(metrics.loss), float(metrics.grad_norm)
        if self.spikes is not None and self.spikes.stands_out(loss, norm):
            self._keep_batch(self.spikes, step, inputs, loss, norm)
        if metrics.rejected_in_a_row >= MOST_REJECTED:
            raise RunError(
                f"step {step}: loss or gradient was not finite {MOST_REJECTED} times in a row "
                f"(loss {loss}, gradient norm {norm})"
            )
        self.progress.step(step, loss, clock.tokens_per_second)
        updates = max(step - 1 - int(metrics.rejected), 0)
        return _Measured(step, loss, norm, updates, clock.tokens_per_second)

    def _keep_batch(
        self, spikes: Spikes, step: int, inputs: Any, loss: float, grad_norm: float
    ) -> None:
        """Write what a step has read, unless enough is kept."""
        batch = gathered_here(self.task.prepare(*self.resident, inputs))
        if is_first() and not spikes.is_full():
            tokenizer = self.task.tokenizers.tokenizer
            file = spikes.save(step, batch, loss, grad_norm, tokenizer)
            self.progress.say(f"step {step}: loss {loss:.4f} stands out: its batch is in {file}")

    def _write(self, measured: _Measured, scores: Scores | None = None) -> None:
        """Append a line to metrics.jsonl, where one is due."""
        step, held_out = measured.step, {}
        if scores is not None and math.isfinite(scores.loss):
            held_out = {"val_loss": scores.loss, "val_accuracy": scores.accuracy}
            perplexity = ""
            if not isinstance(self.config.task, PreferenceTask):
                perplexity = f"perplexity {math.exp(min(scores.loss, 700.0)):.2f}, "
            self.progress.say(
                f"step {step}: held-out loss {scores.loss:.4f}, {perplexity}"
                f"accuracy {scores.accuracy:.3f}"
            )
        elif step % self.config.log_every and step not in (1, self.config.steps):
            return
        rate = self.programs.rate(jax.device_put(np.int32(measured.updates)))
        line = {
            "step": step,
            "loss": _finite(measured.loss),
            "learning_rate": float(jax.device_get(rate)),
            "grad_norm": _finite(measured.grad_norm),
            "tokens_per_second": measured.tokens_per_second,
            **self.phases.taken(),
            "peak_memory": peak_memory(),
        }
        if measured.tokens_per_second is not None:
            used = flops_utilisation(self.config, measured.tokens_per_second)
            line |= {} if used is None else {"flops_utilisation": used}
        if is_first():
            self.folder.append_metrics(line | held_out)
        self.trackers.write(step, line | held_out)

    def _evaluate(self, params: Params) -> Scores:
        own = self.task.place is not None  # whose processes read a part each
        place = self.placement.own_rows if own else self.placement.rows
        batches = (place(batch, axis=0) for batch in self.task.evaluation())

        relative = isinstance(self.config.task, PreferenceTask)
        reference: dict[str, Any] = {"frozen": self.frozen} if relative else {}

        def step(*arguments: Any) -> jax.Array:
            step = self.programs.eval_step(*arguments, **reference)
            return self.placement.settled(step)

        return evaluate(step, params, self.held_out, batches)

    def _save(self, state: TrainState, val_loss: float | None) -> None:
        if isinstance(self.config.optimizer, ScheduleFree):
            state = replace(state, average=state.used_params)  # for those who use the model
        metadata = {
            "val_loss": val_loss,
            "data_sha256": self.task.sha256,
            "tokenizer_sha256": tokenizer_sha256(self.task.tokenizers.tokenizer),
        }
        if self.base is not None:
            metadata["base_sha256"] = self.base.sha256
        if self.task.tokenizers.source is not None:
            metadata["source_tokenizer_sha256"] = tokenizer_sha256(self.task.tokenizers.source)
        self.saver.save(int(state.step), state, metadata)

    def _saved_val_loss(self, step: int) -> float | None:
        path = checkpoint.step_path(self.folder.checkpoints, step)
        if not path.exists():
            return None
        return checkpoint.read_manifest(path).metadata["val_loss"]


def _check_finite(step: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise RunError where parameters are not to be saved."""
    for name, array in arrays.items():
        if name.startswith(("params/", "average/")) and not np.isfinite(array).all():
            raise RunError(f"step {step}: parameters are no longer finite; not saved")


def _numerics(config: TrainConfig) -> TrainConfig:
    """Return `config` with all that enters no compiled program at its default."""
    names = [name for name in (MAY_CHANGE | {"seed"}) - {"steps", "mesh"} if "." not in name]
    fields: Any = TrainConfig.__dataclass_fields__
    return replace(config, **{name: fields[name].default for name in names})


@dataclass(frozen=True)
class _Programs:
    """Hold what makes the state of a run, and what is compiled for it."""

    fresh_state: Callable[[Any], TrainState]
    """Makes the state of step 0 of a seed, u32[]."""
    state_of: Callable[..., TrainState]
    """Makes the state of step 0 of parameters and a key."""
    train_step: Callable[..., tuple[TrainState, Metrics]]
    eval_step: Callable[..., jax.Array]
    rate: Callable[[jax.Array], jax.Array]


@lru_cache(maxsize=8)
def _compiled(config: TrainConfig, prepare: Callable[..., Batch], settings: Any) -> _Programs:
    """Return the programs of a config; another run of the same numbers compiles nothing.

    `settings` are those of JAX that a trace depends on, such as `jax_enable_x64`.
    """
    optimizer = make_optimizer(config)
    row_shards = 1 if config.mesh is None else config.mesh.row_shards
    loss = batch_loss(
        config.model,
        config.label_smoothing,
        z_loss=config.z_loss,
        chunk=config.loss_chunk,
        row_shards=row_shards,
    )
    scores = batch_scores(config.model, row_shards=row_shards)
    if isinstance(config.task, PreferenceTask):
        beta = config.task.beta
        loss = preference_loss(config, beta, row_shards=row_shards)
        scores = preference_scores(config, beta, row_shards=row_shards)
    held_as: dict[str, Any] = dict(
        param_dtype=jnp.dtype(config.param_dtype), average=config.ema_decay is not None
    )
    fresh: Callable[[Any], TrainState]
    fresh = partial(init_state, config.model, optimizer, **held_as)
    if config.frozen is not None:
        loss = without_frozen(loss, config.frozen)
    if config.lora is not None:
        loss = adapted_loss(loss, config.lora, relative=isinstance(config.task, PreferenceTask))
        fresh = partial(fresh_adapters, config, optimizer)
    return _Programs(
        fresh_state=fresh,
        state_of=partial(start_state, optimizer=optimizer, **held_as),
        train_step=CompiledAhead(
            make_train_step(loss, optimizer, prepare, ema_decay=config.ema_decay)
        ),
        eval_step=make_eval_step(scores, prepare),
        rate=jax.jit(learning_rate_schedule(config)),
    )


def _counted(config: TrainConfig, task: TrainingTask) -> tuple[TrainConfig, _Programs]:
    """Return the programs of an n-gram model, whose only step counts, and its config."""
    assert isinstance(config.model, NgramConfig)
    model, params = count_ngrams(config.model, task.documents())
    scores = batch_scores(model)

    def step(state: TrainState, *inputs: Any, frozen: Any) -> tuple[TrainState, Metrics]:
        """Put the counts in place; the loss is that of what a step of another model reads."""
        first = jax.tree.map(lambda leaf: leaf[0], task.prepare(*inputs))
        total, labels, _ = jax.jit(scores)(params, first)
        none = jnp.zeros((), jnp.int32)
        state = replace(state, step=state.step + 1, params=jax.device_put(params))
        return state, Metrics(total / labels, labels, jnp.zeros(()), none, none)

    return replace(config, model=model), _Programs(
        fresh_state=partial(init_state, model, optax.identity()),
        state_of=partial(start_state, optimizer=optax.identity()),
        train_step=step,
        eval_step=make_eval_step(scores, task.prepare),
        rate=lambda count: jnp.zeros(()),
    )


class _Clock:
    """Measure tokens per second, without the time of evaluations and checkpoints."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens, self._times = tokens_per_step, list[float]()
        self.tokens_per_second: float | None = None

    def tick(self) -> None:
        """Count one more step whose numbers are here; the mean is over the last 20."""
        self._times = [*self._times[-20:], time.perf_counter()]
        if len(self._times) > 1:
            seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
            self.tokens_per_second = self._tokens / max(seconds, 1e-9)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that passes within."""
        before = time.perf_counter()
        yield
        pause = time.perf_counter() - before
        self._times = [t + pause for t in self._times]


def _last_good(folder: RunFolder, progress: Progress) -> checkpoint.Manifest | None:
    """Return the last whole checkpoint, and say a line about each damaged one after it."""
    steps = checkpoint.saved_steps(folder.checkpoints)
    first = None
    for step in reversed(steps):
        try:
            return checkpoint.verify(checkpoint.step_path(folder.checkpoints, step))
        except CheckpointError as error:
            first = first or error
            progress.say(f"{error}; trying the checkpoint before")
    if first is not None:
        raise first
    return None


def _check_none_lost(folder: RunFolder, checkpoint_every: int) -> None:
    """Raise CheckpointError where none is left, though metrics.jsonl reaches past a saved one."""
    lines = folder.read_metrics()
    evaluated = [line["step"] for line in lines if line.get("val_loss") is not None]
    first = min([checkpoint_every, *evaluated])  # the first evaluation is the best so far
    last = max((line["step"] for line in lines), default=0)
    if last > first:
        rule = f"metrics.jsonl reaches step {last}, step {first} was saved"
        raise CheckpointError(f"{folder.checkpoints}: no checkpoint is left ({rule})")


def _check_same(
    stored: TrainConfig,
    config: TrainConfig,
    found: checkpoint.Manifest | None,
    task: TrainingTask,
) -> None:
    """Raise ConfigError that lists what a resumed run may not change and has."""
    # a checkpoint holds the hash of the model it needs, or needs none
    wrong = differences(stored, config, MAY_CHANGE | {"init_from"} if found else MAY_CHANGE)
    if found is not None and found.metadata["data_sha256"] != task.sha256:
        old, new = found.metadata["data_sha256"], task.sha256
        wrong.append(f"data (sha256): {old[:16]} -> {new[:16]}")
    if wrong:
        raise ConfigError(f"{config.out}: cannot resume with other settings: " + "; ".join(wrong))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _closing(progress: Progress) -> Iterator[None]:
    """Stop the progress however what is within ends."""
    try:
        yield
    finally:
        progress.stop()
