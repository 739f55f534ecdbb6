"""Train a decoder on a text: read it, step, evaluate, keep checkpoints, stop and continue.

`fit` is all of it; `training_state` has the pieces for a loop of one's own.
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
from typing import Any

import jax
import numpy as np
import optax

from transformer_jax import checkpoint
from transformer_jax.checkpoint import CheckpointError
from transformer_jax.completion import complete
from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.data import (
    Dataset,
    Tokenizer,
    consecutive_starts,
    load_dataset,
    random_starts,
)
from transformer_jax.pretrained import FREE, load_pretrained, pretrained_config
from transformer_jax.progress import Progress, Silent
from transformer_jax.run_folder import (
    MAY_CHANGE,
    RunError,
    RunFolder,
    check_unused,
    differences,
    locked,
    plot_losses,
    tokenizer_sha256,
)
from transformer_jax.sampling import Sample, Temperature
from transformer_jax.text_model import published_tokenizer
from transformer_jax.training_state import (
    Metrics,
    TrainState,
    init_state,
    language_model_loss,
    learning_rate,
    make_eval_step,
    make_optimizer,
    make_train_step,
    split_seed,
    start_state,
    windows,
)
from transformer_jax.weights import open_folder

__all__ = [
    "MOST_REJECTED",
    "Result",
    "RunError",
    "TrainState",
    "evaluate",
    "fit",
    "init_state",
    "language_model_loss",
    "learning_rate",
    "make_eval_step",
    "make_optimizer",
    "make_train_step",
    "start_state",
]

MOST_REJECTED = 10
"""Steps in a row with a loss or gradient that is not finite, after which a run gives up."""

_EVAL_STREAM = 2**62
"""The `step` whose windows an evaluation on random batches reads: no training step has it."""


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    config: TrainConfig
    state: TrainState
    step: int
    interrupted: bool
    """`stop` asked for it before the last step."""
    val_loss: float | None
    """At `step`, nats per token; None where it is not finite, or where the run stopped between two
    evaluations."""
    val_loss_per_character: float | None
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
    `config.model` must be, but for `pretrained.FREE`; `fine_tuning` makes such a config. With
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
        if resume:
            stored = folder.read_config()
            stack.enter_context(locked(folder.path))
            checkpoint.remove_partial(folder.checkpoints)
            found = _last_good(folder, progress)
            tokenizer = None
            if found is not None:
                tokenizer = folder.read_tokenizer(found.metadata["tokenizer_sha256"])
            else:
                _check_none_lost(folder, stored.checkpoint_every)
                if config.init_from is not None:
                    tokenizer = folder.read_tokenizer()
            dataset = load_dataset(config, tokenizer)
            config = _resolved(config, dataset, vocab_size)
            _check_same(stored, config, found, dataset)
        else:
            check_unused(folder.path)
            found, dataset = None, load_dataset(config, _published(config))
            config = _resolved(config, dataset, vocab_size)
        run = _Run(config, folder, dataset, progress, stop)
        if not resume:
            folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder.path))
            if any(entry.name != "lock" for entry in folder.path.iterdir()):
                raise RunError(f"{folder.path}: another run has just started here")
        state = run.first_state() if found is None else run.restored(found)
        if found is not None:
            checkpoint.set_aside(folder.checkpoints, found.step)
        folder.write_config(config)
        folder.write_tokenizer(dataset.tokenizer)
        if damaged := folder.cut_metrics(int(state.step)):
            progress.say(f"{folder.metrics_file}: damaged lines left out: {damaged}")
        with _closing(progress):
            return run.train(state)


def evaluate(
    eval_step: Callable[..., tuple[jax.Array, jax.Array]],
    params: Any,
    corpus: jax.Array,  # uint or i32[n]
    starts: np.ndarray,  # i32[N, B]
) -> float:
    """Mean loss in nats per token over batches of windows, weighted by their tokens."""
    parts = [eval_step(params, corpus, jax.device_put(batch)) for batch in starts]
    losses, weights = np.array(jax.device_get(parts), np.float64).T
    return float(losses.sum() / weights.sum())


class _Run:
    """One call of `fit`: what stays the same from step to step."""

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
        self.optimizer, self.train_step, self.eval_step = _compiled(_numerics(config))
        self.template = jax.eval_shape(
            partial(init_state, config.model, self.optimizer), np.uint32(config.seed)
        )
        _check_memory(self.template)
        self.held_out = jax.device_put(dataset.val)
        self.eval_starts = self._eval_starts()

    def first_state(self) -> TrainState:
        config = self.config
        seed = jax.device_put(np.uint32(config.seed))
        if config.init_from is None:
            return init_state(config.model, self.optimizer, seed)
        scanned = config.model.scan_layers
        params = load_pretrained(config.init_from, dtype="float32", scan_layers=scanned)[1]
        return start_state(params, self.optimizer, split_seed(seed)[1])

    def restored(self, found: checkpoint.Manifest) -> TrainState:
        if found.step > self.config.steps:
            rule = f"the run is at step {found.step} already"
            raise ConfigError(f"steps is {self.config.steps}: {rule}")
        return checkpoint.restore(found.path, self.template)

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
            state, metrics = self.train_step(state, corpus, jax.device_put(starts))
            if pending is not None:  # its numbers are read while this step runs
                self._write(self._read(*pending, clock))
            done += 1
            pending = (done, metrics)
            interrupted, last = self.stop(), done == config.steps
            evaluated = last or done % config.eval_every == 0
            kept = last or interrupted or done % config.checkpoint_every == 0
            if not (evaluated or kept):
                continue
            line, pending, val_loss = self._read(*pending, clock), None, None
            with clock.paused():
                if evaluated:
                    val_loss = self._evaluate(state.params)
                self._write(line, val_loss)
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

    def _read(self, step: int, metrics: Metrics, clock: _Clock) -> dict[str, Any]:
        """Wait for a step's numbers, show them, and give them as a line of metrics.jsonl."""
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
        return {
            "step": step,
            "loss": _finite(loss),
            "learning_rate": float(learning_rate(self.config, updates)),
            "grad_norm": _finite(norm),
            "tokens_per_second": clock.tokens_per_second,
        }

    def _write(self, line: dict[str, Any], val_loss: float | None = None) -> None:
        step = line["step"]
        if val_loss is not None:
            line["val_loss"] = val_loss
            self.progress.say(f"step {step}: held-out loss {val_loss:.4f}")
        elif step % self.config.log_every and step not in (1, self.config.steps):
            return
        self.folder.append_metrics(line)

    def _evaluate(self, params: Any) -> float | None:
        return _finite(evaluate(self.eval_step, params, self.held_out, self.eval_starts))

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

    def _sample(self, params: Any) -> str:
        model = self.config.model
        if self.config.init_from is not None and model.positions != "learned":
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
    """`config` with all that enters no compiled program set to its default."""
    defaults = TrainConfig(model=config.model)
    names = (MAY_CHANGE | {"seed"}) - {"steps"}
    return replace(config, **{name: getattr(defaults, name) for name in names})


@lru_cache(maxsize=8)
def _compiled(
    config: TrainConfig,
) -> tuple[optax.GradientTransformation, Callable[..., Any], Callable[..., Any]]:
    """Optimizer, train step and eval step; another run of the same numbers compiles nothing."""

    def prepare(corpus, starts):
        return windows(corpus, starts, config.sequence_len)

    optimizer = make_optimizer(config)
    loss = language_model_loss(config.model, config.label_smoothing)
    return (
        optimizer,
        make_train_step(loss, optimizer, prepare),
        make_eval_step(language_model_loss(config.model), prepare),
    )


class _Clock:
    """Tokens per second, without the time of evaluations and checkpoints."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens, self._times = tokens_per_step, list[float]()
        self.tokens_per_second: float | None = None

    def tick(self) -> None:
        """The numbers of one more step are here; the mean is over the last 20."""
        self._times = [*self._times[-20:], time.perf_counter()]
        if len(self._times) > 1:
            seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
            self.tokens_per_second = self._tokens / max(seconds, 1e-9)

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        pause = time.perf_counter() - before
        self._times = [t + pause for t in self._times]


def _resolved(config: TrainConfig, dataset: Dataset, vocab_size: int | None) -> TrainConfig:
    """`config` with the vocabulary its tokenizer turned out to have; a published model has its."""
    if config.init_from is not None:
        return config
    needed = dataset.tokenizer.vocab_size
    size = needed if vocab_size is None else vocab_size
    if size < needed:
        raise ConfigError(f"vocab_size is {size}: the tokenizer has {needed} tokens")
    return replace(config, model=replace(config.model, vocab_size=size))


def _published(config: TrainConfig) -> Tokenizer | None:
    """The tokenizer of the model to start from, once that is what `config` says it is."""
    if config.init_from is None:
        return None
    published = pretrained_config(config.init_from)
    for field in fields(published):
        one, two = getattr(config.model, field.name), getattr(published, field.name)
        if field.name not in FREE and one != two:
            raise ConfigError(f"{field.name} is {one!r}: {config.init_from} has {two!r}")
    return published_tokenizer(open_folder(config.init_from))


def _last_good(folder: RunFolder, progress: Progress) -> checkpoint.Manifest | None:
    """The last checkpoint, or a line and the one before where that is damaged."""
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
    """CheckpointError where none is left, but metrics.jsonl goes on behind where one was saved."""
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
    wrong = differences(stored, config)
    if found is not None and found.metadata["data_sha256"] != dataset.sha256:
        old, new = found.metadata["data_sha256"], dataset.sha256
        wrong.append(f"data (sha256): {old[:16]} -> {new[:16]}")
    if wrong:
        raise ConfigError(f"{config.out}: cannot resume with other settings: " + "; ".join(wrong))


def _check_memory(template: TrainState) -> None:
    """ConfigError, before anything is allocated, for a state larger than the device's memory."""
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
    try:
        yield
    finally:
        progress.stop()
