"""Train a decoder on a text: read it, step, evaluate, keep checkpoints, stop and continue.

`fit` is all of it; `step` has the parts for a loop of one's own.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path

import jax
import numpy as np
import optax

from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.checkpoints.run_folder import (
    MAY_CHANGE,
    RunError,
    RunFolder,
    check_unused,
    differences,
    locked,
    plot_losses,
    tokenizer_sha256,
)
from transformer_jax.config import ConfigError, Learned, TrainConfig
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.pretrained.config_json import OVERRIDABLE_FIELDS
from transformer_jax.pretrained.load import load_pretrained, pretrained_config
from transformer_jax.pretrained.safetensors_folder import open_folder
from transformer_jax.text.completion import complete
from transformer_jax.text.text_model import published_tokenizer
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.training.data import Dataset, consecutive_starts, load_dataset, random_starts
from transformer_jax.training.progress import Progress, Silent
from transformer_jax.training.step import (
    Batch,
    Metrics,
    Params,
    TrainState,
    init_state,
    language_model_loss,
    learning_rate_schedule,
    make_eval_step,
    make_optimizer,
    make_train_step,
    split_seed,
    start_state,
    windows,
)

MOST_REJECTED = 10
"""Steps in a row with a loss or gradient that is not finite, after which a run gives up."""

_EVAL_STREAM = 2**62
"""The `step` whose windows an evaluation on random batches reads: no training step has it."""


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
    """The same in nats per character, whatever the tokenizer."""
    best_step: int | None
    sample: str
    rejected: int
    """Steps whose loss or gradient was not finite."""


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
    `config.init_from`, parameters and tokenizer start from that published model, whose config
    `config.model` must be, but for `OVERRIDABLE_FIELDS`; `fine_tuning` makes such a config. With
    `resume`, the run in that folder goes on from its last checkpoint, bit for bit as if it had
    never stopped; what `run_folder.MAY_CHANGE` lists may differ from it (with another `steps` the
    schedule follows the new one). `stop` is asked after every step: True saves and returns.

    Raises ConfigError, DataError or CheckpointError before anything is written, RunError and
    OSError for what happens on the way; the checkpoints so far stay good.
    """
    progress = progress or Silent()
    if config.model.kind != "decoder":
        raise ConfigError(f"kind is {config.model.kind!r}: text is trained on with a 'decoder'")
    folder = RunFolder(Path(config.out))
    with ExitStack() as stack:
        found = None
        if resume:
            stored = folder.read_config()
            stack.enter_context(locked(folder.path))
            config, dataset, found = _continued(config, stored, folder, vocab_size, progress)
        else:
            check_unused(folder.path)
            dataset = load_dataset(config, _published(config))
            config = _resolved(config, dataset, vocab_size)
        run = _Run(config, folder, dataset, progress, stop)
        if not resume:
            stack.enter_context(_claimed(folder.path))
        state = run.first_state() if found is None else run.restored(found)
        if found is not None:
            checkpoint.set_aside(folder.checkpoints, found.step)
        folder.write_config(config)
        folder.write_tokenizer(dataset.tokenizer)
        if damaged := folder.cut_metrics(int(state.step)):
            progress.say(f"{folder.metrics_file}: damaged lines left out: {damaged}")
        for line in run.described(int(state.step)):
            progress.say(line)
        with _closing(progress):
            return run.train(state)


def _continued(
    config: TrainConfig,
    stored: TrainConfig,
    folder: RunFolder,
    vocab_size: int | None,
    progress: Progress,
) -> tuple[TrainConfig, Dataset, checkpoint.Manifest | None]:
    """Return what a resumed run goes on with; its checkpoint is None where none was saved yet."""
    checkpoint.remove_partial(folder.checkpoints)
    found, tokenizer = _last_good(folder, progress), None
    if found is not None:
        tokenizer = folder.read_tokenizer(found.metadata["tokenizer_sha256"])
    else:
        _check_none_lost(folder, stored.checkpoint_every)
        if config.init_from is not None:
            tokenizer = folder.read_tokenizer()
    dataset = load_dataset(config, tokenizer)
    config = _resolved(config, dataset, vocab_size)
    _check_same(stored, config, found, dataset)
    return config, dataset, found


@contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Make the folder of a new run and hold it; RunError where another run was quicker."""
    path.mkdir(parents=True, exist_ok=True)
    with locked(path):
        if any(entry.name != "lock" for entry in path.iterdir()):
            raise RunError(f"{path}: another run has just started here")
        yield


def evaluate(
    eval_step: Callable[..., tuple[jax.Array, jax.Array]],
    params: Params,
    corpus: jax.Array,  # uint or i32[n]
    starts: np.ndarray,  # i32[N, B]
) -> float:
    """Return the mean loss in nats per token over batches of windows, weighted by their tokens."""
    parts = [eval_step(params, corpus, jax.device_put(batch)) for batch in starts]
    losses, weights = np.array(jax.device_get(parts), np.float64).T
    return float(losses.sum() / weights.sum())


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
        config: TrainConfig,
        folder: RunFolder,
        dataset: Dataset,
        progress: Progress,
        stop: Callable[[], bool],
    ) -> None:
        self.config, self.folder, self.dataset = config, folder, dataset
        self.progress, self.stop = progress, stop
        self.programs = _compiled(_numerics(config))
        self.template = jax.eval_shape(
            partial(init_state, config.model, self.programs.optimizer), np.uint32(config.seed)
        )
        _check_memory(self.template)
        self.held_out = jax.device_put(dataset.val)
        self.eval_starts = self._eval_starts()

    def first_state(self) -> TrainState:
        config = self.config
        seed = jax.device_put(np.uint32(config.seed))
        if config.init_from is None:
            return init_state(config.model, self.programs.optimizer, seed)
        scanned = config.model.scan_layers
        params = load_pretrained(config.init_from, dtype="float32", scan_layers=scanned)[1]
        return start_state(params, self.programs.optimizer, split_seed(seed)[1])

    def restored(self, found: checkpoint.Manifest) -> TrainState:
        if found.step > self.config.steps:
            rule = f"the run is at step {found.step} already"
            raise ConfigError(f"steps is {self.config.steps}: {rule}")
        return checkpoint.restore(found.path, self.template)

    def described(self, done: int) -> list[str]:
        """Return two lines: the model and its device, and the text that it is trained on."""
        config, device = self.config, jax.local_devices()[0]
        leaves = jax.tree.leaves(self.template.params)
        count = sum(math.prod(leaf.shape) for leaf in leaves)
        kind = "" if device.device_kind == device.platform else f" ({device.device_kind})"
        train, held_out = len(self.dataset.train), len(self.dataset.val)
        step = config.accumulation * config.batch_size * config.sequence_len
        start = f", from step {done} on" if done else ""
        return [
            f"model: {count:,} parameters, vocabulary of {config.model.vocab_size:,}, "
            f"on {device.platform}{kind}",
            f"text: {train:,} tokens and {held_out:,} held out, {step:,} in a step{start}",
        ]

    def train(self, state: TrainState) -> Result:
        config = self.config
        done = int(state.step)
        val_loss = self._saved_val_loss(done)
        best = checkpoint.best_step(self.folder.checkpoints)
        best_loss = None if best is None else self._saved_val_loss(best)
        corpus = jax.device_put(self.dataset.train)
        shape = (config.accumulation, config.batch_size)
        count = len(self.dataset.train) - config.sequence_len
        clock = _Clock(config.accumulation * config.batch_size * config.sequence_len)
        interrupted, pending = False, None
        self.progress.start(done, config.steps)
        while done < config.steps and not interrupted:
            starts = random_starts(config.seed, done, shape, count)
            state, metrics = self.programs.train_step(state, corpus, jax.device_put(starts))
            if pending is not None:  # its numbers are read while this step runs
                self._write(self._read(*pending, clock))
            done += 1
            pending = (done, metrics)
            interrupted, last = self.stop(), done == config.steps
            evaluated = last or done % config.eval_every == 0
            kept = last or interrupted or done % config.checkpoint_every == 0
            if not (evaluated or kept):
                continue
            measured, pending, val_loss = self._read(*pending, clock), None, None
            with clock.paused():
                if evaluated:
                    val_loss = self._evaluate(state.params)
                self._write(measured, val_loss)
                if val_loss is not None and (best_loss is None or val_loss < best_loss):
                    best_loss, kept = val_loss, True
                if kept:
                    self._save(state, val_loss)
            interrupted = interrupted and not last
        if val_loss is None and not interrupted:  # the run was complete before
            val_loss = self._evaluate(state.params)
        return self._finish(state, val_loss, interrupted)

    def _finish(self, state: TrainState, val_loss: float | None, interrupted: bool) -> Result:
        sample = ""
        if not interrupted and self.config.sample_tokens:
            sample = self._sample(state.params)
            checkpoint.write_file(self.folder.path / "sample.txt", sample + "\n")
        plot_losses(self.folder)
        tokens, characters = len(self.dataset.val), self.dataset.val_characters
        return Result(
            config=self.config,
            state=state,
            step=int(state.step),
            interrupted=interrupted,
            val_loss=val_loss,
            val_loss_per_character=None if val_loss is None else val_loss * tokens / characters,
            best_step=checkpoint.best_step(self.folder.checkpoints),
            sample=sample,
            rejected=int(state.rejected),
        )

    def _read(self, step: int, metrics: Metrics, clock: _Clock) -> _Measured:
        """Wait for a step's numbers and show them; RunError after too many rejected steps."""
        metrics = jax.device_get(metrics)
        clock.tick()
        loss, norm = float(metrics.loss), float(metrics.grad_norm)
        if metrics.rejected_in_a_row >= MOST_REJECTED:
            raise RunError(
                f"step {step}: loss or gradient was not finite {MOST_REJECTED} times in a row "
                f"(loss {loss}, gradient norm {norm})"
            )
        self.progress.step(step, loss, clock.tokens_per_second)
        updates = max(step - 1 - int(metrics.rejected), 0)
        return _Measured(step, loss, norm, updates, clock.tokens_per_second)

    def _write(self, measured: _Measured, val_loss: float | None = None) -> None:
        """Append a line to metrics.jsonl, where one is due."""
        step, held_out = measured.step, {}
        if val_loss is not None:
            held_out = {"val_loss": val_loss}
            self.progress.say(f"step {step}: held-out loss {val_loss:.4f}")
        elif step % self.config.log_every and step not in (1, self.config.steps):
            return
        rate = self.programs.rate(jax.device_put(np.int32(measured.updates)))
        line = {
            "step": step,
            "loss": _finite(measured.loss),
            "learning_rate": float(jax.device_get(rate)),
            "grad_norm": _finite(measured.grad_norm),
            "tokens_per_second": measured.tokens_per_second,
        }
        self.folder.append_metrics(line | held_out)

    def _evaluate(self, params: Params) -> float | None:
        return _finite(evaluate(self.programs.eval_step, params, self.held_out, self.eval_starts))

    def _eval_starts(self) -> np.ndarray:  # i32[N, B]
        config, length = self.config, self.config.sequence_len
        size = config.batch_size
        if config.eval_batches is not None:
            shape = (config.eval_batches, size)
            count = len(self.dataset.val) - length
            return random_starts(config.seed, _EVAL_STREAM, shape, count)
        starts = consecutive_starts(len(self.dataset.val), length)
        padding = np.full(-len(starts) % size, len(self.dataset.val), np.int32)  # no labels there
        return np.concatenate([starts, padding]).reshape(-1, size)

    def _save(self, state: TrainState, val_loss: float | None) -> None:
        step = int(state.step)
        params = jax.device_get(state.params)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
            raise RunError(f"step {step}: parameters are no longer finite; not saved")
        metadata = {
            "val_loss": val_loss,
            "data_sha256": self.dataset.sha256,
            "tokenizer_sha256": tokenizer_sha256(self.dataset.tokenizer),
        }
        checkpoint.save(self.folder.checkpoints, step, state, metadata)
        checkpoint.prune(self.folder.checkpoints, self.config.keep)

    def _saved_val_loss(self, step: int) -> float | None:
        path = checkpoint.step_path(self.folder.checkpoints, step)
        if not path.exists():
            return None
        return checkpoint.read_manifest(path).metadata["val_loss"]

    def _sample(self, params: Params) -> str:
        model = self.config.model
        if self.config.init_from is not None and not isinstance(model.positions, Learned):
            model = replace(model, max_len=self.config.sequence_len)  # a cache of that length
        pieces = complete(
            model,
            params,
            self.dataset.tokenizer,
            "",
            self.config.sample_tokens,
            sampler=Sample(Temperature(0.8)),
            key=jax.random.fold_in(jax.random.key(self.config.seed), 2),  # 0 and 1 are in use
        )
        return "".join(pieces)


def _numerics(config: TrainConfig) -> TrainConfig:
    """Return `config` with all that enters no compiled program at its default."""
    defaults = TrainConfig(model=config.model)
    names = (MAY_CHANGE | {"seed"}) - {"steps"}
    return replace(config, **{name: getattr(defaults, name) for name in names})


@dataclass(frozen=True)
class _Programs:
    """Hold the optimizer of a run and what is compiled for it."""

    optimizer: optax.GradientTransformation
    train_step: Callable[..., tuple[TrainState, Metrics]]
    eval_step: Callable[..., tuple[jax.Array, jax.Array]]
    rate: Callable[[jax.Array], jax.Array]


@lru_cache(maxsize=8)
def _compiled(config: TrainConfig) -> _Programs:
    """Return the programs of a config; another run of the same numbers compiles nothing."""

    def prepare(corpus: jax.Array, starts: jax.Array) -> Batch:
        return windows(corpus, starts, config.sequence_len)

    optimizer = make_optimizer(config)
    loss = language_model_loss(config.model, config.label_smoothing)
    return _Programs(
        optimizer=optimizer,
        train_step=make_train_step(loss, optimizer, prepare),
        eval_step=make_eval_step(language_model_loss(config.model), prepare),
        rate=jax.jit(learning_rate_schedule(config)),
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


def _resolved(config: TrainConfig, dataset: Dataset, vocab_size: int | None) -> TrainConfig:
    """Return `config` with the vocabulary of its tokenizer; a published model has its own."""
    if config.init_from is not None:
        return config
    needed = dataset.tokenizer.vocab_size
    size = needed if vocab_size is None else vocab_size
    if size < needed:
        raise ConfigError(f"vocab_size is {size}: the tokenizer has {needed} tokens")
    return replace(config, model=replace(config.model, vocab_size=size))


def _published(config: TrainConfig) -> Tokenizer | None:
    """Return the tokenizer of the model to start from; check that `config.model` is that model."""
    if config.init_from is None:
        return None
    published = pretrained_config(config.init_from)
    for field in fields(published):
        one, two = getattr(config.model, field.name), getattr(published, field.name)
        if field.name not in OVERRIDABLE_FIELDS and one != two:
            raise ConfigError(f"{field.name} is {one!r}: {config.init_from} has {two!r}")
    return published_tokenizer(open_folder(config.init_from))


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
    dataset: Dataset,
) -> None:
    """Raise ConfigError that lists what a resumed run may not change and has."""
    wrong = differences(stored, config)
    if found is not None and found.metadata["data_sha256"] != dataset.sha256:
        old, new = found.metadata["data_sha256"], dataset.sha256
        wrong.append(f"data (sha256): {old[:16]} -> {new[:16]}")
    if wrong:
        raise ConfigError(f"{config.out}: cannot resume with other settings: " + "; ".join(wrong))


def _check_memory(template: TrainState) -> None:
    """Raise ConfigError for a state larger than the device's memory, before allocating it."""
    leaves = jax.tree.leaves((template.params, template.opt_state))
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        there = stats["bytes_limit"]
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(template.params))
        raise ConfigError(
            f"model has {count:,} parameters: with the optimizer {needed / 2**30:,.1f} GiB, "
            f"the device has {there / 2**30:,.1f} GiB"
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _closing(progress: Progress) -> Iterator[None]:
    """Stop the progress however what is within ends."""
    try:
        yield
    finally:
        progress.stop()
