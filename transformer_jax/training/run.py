"""Programs, placement, state, and checkpoints of a new or resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import jax
import numpy as np

from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.checkpoints.run_folder import (
    MAY_CHANGE,
    RunError,
    RunFolder,
    differences,
    tokenizer_sha256,
)
from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.optimizers import ScheduleFree
from transformer_jax.config.tasks import PreferenceTask
from transformer_jax.models.quantized import count
from transformer_jax.pytree import check_ranges
from transformer_jax.training.adapting import FrozenBase
from transformer_jax.training.batch import Params
from transformer_jax.training.compiled import CompiledAhead, programs_of
from transformer_jax.training.initial import StartModel, start_params
from transformer_jax.training.placement import make_placement
from transformer_jax.training.planning.memory import check_state, check_step, step_memory
from transformer_jax.training.preference import Reference
from transformer_jax.training.processes import by_first
from transformer_jax.training.progress import Progress
from transformer_jax.training.step import Metrics, TrainState, split_seed
from transformer_jax.training.tasks import Tokenizers, TrainingTask, load_task
from transformer_jax.training.tasks.task import Inputs


class Run:
    """Task, programs, placement, and folder of a run, which are constant during a call to `fit`."""

    def __init__(self, task: TrainingTask, folder: RunFolder) -> None:
        self.task, self.folder = task, folder
        self.config, self.programs = programs_of(task)
        task.config = self.config
        self.placement = make_placement(self.config.mesh)
        self.template: TrainState = self.placement.state(
            jax.eval_shape(self.programs.fresh_state, np.uint32(self.config.seed))
        )
        self.base: FrozenBase | None = None
        if self.config.lora is not None:
            self.base = FrozenBase(self.config, self.placement)
        elif isinstance(self.config.task, PreferenceTask):
            self.base = Reference(self.config, self.placement)
        # checked before compilation, because compiling a model that does not fit may take minutes
        check_state(self.template, self.frozen)
        if task.place is not None:
            task.place = partial(self.placement.rows_of_process, axis=1)
            task.reader = self.placement.reader()
        self.resident = self.placement.whole(task.resident)
        self.held_out = self.placement.whole(task.held_out)
        self.saver = checkpoint.Saver(folder.checkpoints, self.config.keep, _check_finite)

    @property
    def frozen(self) -> tuple[Params, ...]:
        """Return the frozen parameters, or their shapes until a state exists."""
        return () if self.base is None else (self.base.params,)

    def inputs(self, step: int) -> Inputs:
        """Return the inputs of a step (from 0), placed on the devices."""
        found = self.task.inputs(step)
        return self.placement.rows(found, axis=1) if self.task.place is None else found

    def check_memory(self, step: int) -> list[Inputs]:
        """Compile step `step`. Raises ConfigError if it needs more memory than a device has.

        Returns a list that contains the inputs of the step, or an empty list if they were not read.
        """
        program = self.programs.train_step
        if not isinstance(program, CompiledAhead) or step >= self.config.steps:
            return []
        inputs = self.inputs(step)
        arguments = (*self.resident, inputs)
        compiled = program.program(self.template, *arguments, frozen=self.frozen)
        check_step(step_memory(compiled, self.template, arguments, self.frozen), self.config)
        return [inputs]

    def first_state(self, start: StartModel | None, progress: Progress) -> TrainState:
        """Return the initial state, either newly initialized or loaded from `start`."""
        config, shardings = self.config, self.placement.shardings(self.template)
        if start is None:
            create, seed = self.programs.fresh_state, self.placement.whole(np.uint32(config.seed))
            return (create if shardings is None else jax.jit(create, out_shardings=shardings))(seed)
        init_key, key = split_seed(np.uint32(config.seed))
        if self.base is not None:
            params, changes = self.base.load(start, init_key)
        else:
            loaded = start.params(config.model.scan_layers)
            params, changes = start_params(config, start, loaded, init_key)
        for line in changes:
            progress.say(line)
        if shardings is None:
            return self.programs.state_of(params, key=key)
        check_ranges(params, config.param_dtype)  # a compiled program cannot raise an error
        params = jax.device_put(params, shardings.params)
        key = jax.device_put(key, shardings.key)
        return jax.jit(self.programs.state_of, out_shardings=shardings)(params, key=key)

    def load_base(self, found: checkpoint.Manifest, start: StartModel | None) -> None:
        """Load the frozen parameters that are needed for the state of a checkpoint."""
        if found.step > self.config.steps:
            rule = f"the run is already at step {found.step}"
            raise ConfigError(f"steps is {self.config.steps}: {rule}")
        if self.base is not None:
            assert start is not None
            key = split_seed(np.uint32(self.config.seed))[0]
            self.base.load(start, key, found.metadata)

    def step(self, state: TrainState, inputs: Inputs) -> tuple[TrainState, Metrics]:
        """Take one training step."""
        found = self.programs.train_step(state, *self.resident, inputs, frozen=self.frozen)
        return self.placement.settled(found)

    def eval_params(self, state: TrainState) -> Params:
        """Return the parameters of the whole model, including adapters."""
        trained = state.eval_params
        return trained if self.base is None else self.base.join_parts(trained)

    def described(self, done: int) -> list[str]:
        """Return two lines, which describe the model with its device, and the data."""
        total, trained = count(self.template.params), ""
        if self.config.lora is not None:
            trained, total = f" ({total:,} of them trained)", total + count(self.frozen)
        start = f", from step {done} on" if done else ""
        return [
            f"model: {total:,} parameters{trained}, "
            f"vocabulary of {self.config.model.vocab_size:,}, on {self.placement.described()}",
            f"{self.task.described()}{start}",
        ]

    def save(self, state: TrainState, val_loss: float | None) -> None:
        """Write a checkpoint in the background."""
        # the parameters for inference are averages, not those at which gradients are computed
        if isinstance(self.config.optimizer, ScheduleFree):
            state = replace(state, average=state.eval_params)
        metadata = {
            "val_loss": val_loss,
            "eval_batches": self.config.eval_batches,
            "data_sha256": self.task.sha256,
            "tokenizer_sha256": tokenizer_sha256(self.task.tokenizers.tokenizer),
        }
        if self.base is not None:
            metadata["base_sha256"] = self.base.sha256
        if self.task.tokenizers.source is not None:
            metadata["source_tokenizer_sha256"] = tokenizer_sha256(self.task.tokenizers.source)
        self.saver.save(int(state.step), state, metadata)

    def saved_val_loss(self, step: int) -> float | None:
        """Return the held-out loss of a checkpoint, or None if either is missing."""
        path = checkpoint.step_path(self.folder.checkpoints, step)
        return checkpoint.read_manifest(path).metadata["val_loss"] if path.exists() else None


def _check_finite(step: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise RunError if any parameter is not finite, so that it is not saved."""
    for name, array in arrays.items():
        if name.startswith(("params/", "average/")) and not np.isfinite(array).all():
            raise RunError(f"step {step}: parameters are no longer finite; not saved")


def continued(
    config: TrainConfig,
    stored: TrainConfig,
    folder: RunFolder,
    vocab_size: int | None,
    progress: Progress,
) -> tuple[TrainingTask, checkpoint.Manifest | None]:
    """Return the task and the last intact checkpoint of a resumed run.

    The checkpoint is None if none was ever saved.

    Each damaged checkpoint is reported. Raises CheckpointError if all checkpoints are damaged or
    missing, and ConfigError if a setting that must stay the same has changed.
    """
    by_first(lambda: checkpoint.remove_partial(folder.checkpoints))
    found, damage, tokenizers = None, None, None
    # verification reads every byte, so damage is found here
    for step in reversed(checkpoint.saved_steps(folder.checkpoints)):
        try:
            found = checkpoint.verify(checkpoint.step_path(folder.checkpoints, step))
            break
        except CheckpointError as error:
            damage = damage or error
            progress.say(f"{error}; trying the previous checkpoint")
    if found is not None:
        metadata = found.metadata
        tokenizer = folder.read_tokenizer(metadata["tokenizer_sha256"])
        source = metadata.get("source_tokenizer_sha256")
        tokenizers = Tokenizers(tokenizer, source and folder.read_source_tokenizer(source))
    elif damage is not None:
        raise damage
    else:
        lines = folder.read_metrics()
        evaluated = [line["step"] for line in lines if line.get("val_loss") is not None]
        # the first evaluation saves a checkpoint, because its loss is the best up to that step
        first = min([stored.checkpoint_every, *evaluated])
        last = max((line["step"] for line in lines), default=0)
        # start over only if no checkpoint was ever saved
        if last > first:
            rule = f"metrics.jsonl reaches step {last}, and step {first} was saved"
            raise CheckpointError(f"{folder.checkpoints}: no checkpoint is left ({rule})")
        if config.init_from is not None:
            tokenizers = Tokenizers(folder.read_tokenizer(), folder.read_source_tokenizer())
    task = load_task(config, tokenizers, vocab_size)
    # the checkpoint of a run with a base model stores the hash of that model
    may_change = MAY_CHANGE | {"init_from"} if found is not None else MAY_CHANGE
    wrong = differences(stored, task.config, may_change)
    if found is not None and found.metadata["data_sha256"] != task.sha256:
        old, new = found.metadata["data_sha256"], task.sha256
        wrong.append(f"data (sha256): {old[:16]} -> {new[:16]}")
    if wrong:
        raise ConfigError(f"{config.out}: cannot resume with other settings: " + "; ".join(wrong))
    return task, found
