"""Memory per device of a compiled step, computed before its arrays exist."""

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
    """Memory that a step needs on one device, in bytes."""

    parameters: int
    optimizer: int
    """Optimizer state and, if there is one, the moving average of the parameters."""
    inputs: int
    """The batch and the arrays that stay on the device, such as a corpus."""
    working: int
    """Temporary arrays: gradients, activations, and buffers."""

    @property
    def total(self) -> int:
        """Return the sum, counting the donated state once."""
        return self.parameters + self.optimizer + self.inputs + self.working

    def described(self) -> str:
        """Return the parts in GiB, on one line."""
        parts = {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "inputs": self.inputs,
            "gradients and activations": self.working,
        }
        return ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in parts.items() if size)


def bytes_on_device(tree: PyTree) -> int:
    """Return the size in bytes of a tree of arrays or shapes on each device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape, sharding = leaf.shape, getattr(leaf, "sharding", None)
        if sharding is not None:
            shape = sharding.shard_shape(shape)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            # 16 bytes are enough for every implementation; a Threefry key has only 8.
            total += 16 * math.prod(shape)
        else:
            total += math.prod(shape) * leaf.dtype.itemsize
    return total


def step_memory(
    program: Compiled, state: PyTree, inputs: PyTree, frozen: PyTree = ()
) -> StepMemory:
    """Return the memory per device that a step needs if it is compiled for these shapes.

    The memory of the parameters includes `frozen` parameters.
    """
    found = program.memory_analysis()
    assert found is not None
    # a donated argument and the result that reuses its memory are counted once
    arguments = (
        found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    )
    parameters = bytes_on_device((state.params, frozen))
    optimizer = bytes_on_device((state.opt_state, state.average))
    batch = bytes_on_device(inputs)
    working = max(arguments + found.temp_size_in_bytes - parameters - optimizer - batch, 0)
    return StepMemory(parameters, optimizer, batch, working)


def device_memory() -> int:
    """Return the number of bytes that a device can use. CPU devices share the host's memory."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # XLA can split one CPU into several devices, which then share the memory.
    return whole // (jax.local_device_count() if device.platform == "cpu" else 1)


def check_state(state: PyTree, frozen: PyTree = ()) -> None:
    """Raise ConfigError if the state, its gradients, and `frozen` exceed a device's memory.

    Nothing is compiled, because a model that does not fit may take minutes to compile.
    """
    # only trained parameters have gradients
    gradients = bytes_on_device(state.params)
    parameters = gradients + bytes_on_device(frozen)
    optimizer, available = bytes_on_device((state.opt_state, state.average)), device_memory()
    needed = parameters + optimizer + gradients
    if needed > available:
        total = count((state.params, frozen))
        parts = f"parameters {_gib(parameters)}, optimizer {_gib(optimizer)}"
        raise ConfigError(
            f"model has {total:,} parameters: needs {_gib(needed)} GiB on each device before any "
            f"batch ({parts}, gradients {_gib(gradients)}), but a device has {_gib(available)} GiB"
        )


def check_step(memory: StepMemory, config: TrainConfig) -> None:
    """Raise ConfigError if a step needs more than a device's memory."""
    available = device_memory()
    if memory.total > available:
        more = "a shorter context or a mesh"
        if config.model.supports("plan"):
            more = "`remat='full'`, `scan_layers=True` or a mesh"
        raise ConfigError(
            f"batch_size is {config.batch_size}: a step needs {_gib(memory.total)} GiB on each "
            f"device ({memory.described()}), but a device has {_gib(available)} GiB; to reduce "
            f"it, use a smaller batch_size with more accumulation, {more}"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f}"
