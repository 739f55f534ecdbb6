"""Compile a step before its arrays exist, and say how much memory it takes on each device."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax.stages import Compiled

from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.models.quantized import count
from transformer_jax.pytree import PyTree

R = TypeVar("R")


@dataclass(frozen=True)
class StepMemory:
    """Hold the bytes that a step needs on one device."""

    parameters: int
    optimizer: int
    """The optimizer's state, and the average of the parameters where one is kept."""
    inputs: int
    """The batch, and what stays on the device beside the state, such as a text."""
    working: int
    """What only exists within the step: gradients, activations and buffers."""

    @property
    def total(self) -> int:
        """Return all of them: the state is donated, so it exists once."""
        return self.parameters + self.optimizer + self.inputs + self.working

    def described(self) -> str:
        """Return the parts in GiB, in one line."""
        parts = {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "inputs": self.inputs,
            "gradients and activations": self.working,
        }
        return ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in parts.items() if size)


def bytes_on_device(tree: PyTree) -> int:
    """Count the bytes of arrays, or of shapes, on one of the devices that they are split over."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape, sharding = leaf.shape, getattr(leaf, "sharding", None)
        if sharding is not None:
            shape = sharding.shard_shape(shape)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            total += 16 * math.prod(shape)
        else:
            total += math.prod(shape) * leaf.dtype.itemsize
    return total


def step_memory(
    program: Compiled, state: PyTree, inputs: PyTree, frozen: PyTree = ()
) -> StepMemory:
    """Return what a compiled step needs on a device, for a state and inputs of these shapes.

    Parameters that are `frozen`, given beside the state, count among the parameters.
    """
    found = program.memory_analysis()
    assert found is not None
    # a donated argument and the result in its memory count once
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    parameters = bytes_on_device((state.params, frozen))
    optimizer = bytes_on_device((state.opt_state, state.average))
    given = bytes_on_device(inputs)
    working = max(held + found.temp_size_in_bytes - parameters - optimizer - given, 0)
    return StepMemory(parameters, optimizer, given, working)


def device_memory() -> int:
    """Return the bytes that a device of this process may use; of a CPU, its share of the memory."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole // (jax.local_device_count() if device.platform == "cpu" else 1)


def check_state(state: PyTree, frozen: PyTree = ()) -> None:
    """Raise ConfigError for a state that, with its gradients, is larger than a device's memory.

    Beside it are the parameters that are `frozen`. Nothing is compiled: a model that cannot fit
    might take long to compile.
    """
    gradients = bytes_on_device(state.params)
    parameters = gradients + bytes_on_device(frozen)
    optimizer, there = bytes_on_device((state.opt_state, state.average)), device_memory()
    needed = parameters + optimizer + gradients
    if needed > there:
        total = count((state.params, frozen))
        parts = f"parameters {_gib(parameters)}, optimizer {_gib(optimizer)}"
        raise ConfigError(
            f"model has {total:,} parameters: needs {_gib(needed)} GiB on each device before any "
            f"batch ({parts}, gradients {_gib(gradients)}), which has {_gib(there)} GiB"
        )


def check_step(memory: StepMemory, config: TrainConfig) -> None:
    """Raise ConfigError for a step that needs more than a device's memory."""
    there = device_memory()
    if memory.total > there:
        more = "a shorter context and a mesh"
        if config.model.supports("plan"):
            more = "`remat='full'`, `scan_layers=True` and a mesh"
        raise ConfigError(
            f"batch_size is {config.batch_size}: a step needs {_gib(memory.total)} GiB on each "
            f"device ({memory.described()}), which has {_gib(there)} GiB; a smaller batch_size "
            f"with more accumulation needs less, and so do {more}"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f}"
