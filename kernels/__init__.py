"""Run fused attention kernels, imported as `transformer_jax.kernels`; needs only jax and numpy.

A backend is a module that keeps the contract: `hopper` (NVIDIA, Pallas on Mosaic GPU), `tpu`
(Pallas on Mosaic TPU) and `cpu` (C++). What attention means (masks, arguments, the choice of an
implementation) is in `transformer_jax.attention`, which calls `gradient.attend`.

    contract   what a kernel computes and is given
    dropout    which weights dropout keeps, on every backend
    chips      facts about chips: limits, tile sizes, where the kernels are fastest
    gradient   the backward pass, and the repair pass for what is not finite
    batching   `vmap`
    sharding   device meshes
    lowering   programs for other platforms, which a library here is not for
    hopper/, tpu/, cpu/   the kernels

`target()` is the backend of this process. `using` takes another one: for the interpreters of the
backends on a CPU, and for compiling for a device that is not attached.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import jax

from transformer_jax.kernels.contract import Blocks

__all__ = ["Target", "platform", "target", "using"]


@dataclass(frozen=True)
class Target:
    """Name a backend, and say how it runs."""

    backend: Literal["tpu", "hopper", "cpu"]
    interpret: Any = False
    """False on the device. On a CPU what the backend's interpreter takes: True or an
    `InterpretParams` of Pallas for TPUs, an `InterpretGPUParams` of Pallas for Mosaic GPU."""

    chip: str = ""
    """The chip as JAX names it, "NVIDIA H200": what tile sizes depend on."""
    blocks: tuple[tuple[str, Blocks], ...] = ()
    """Tile sizes to take instead of the table's, by kernel."""

    @property
    def module(self) -> ModuleType:
        """Return the backend's module; a ValueError names one that does not exist."""
        name = f"transformer_jax.kernels.{self.backend}"
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ValueError(
                f"backend is {self.backend!r}: must be 'tpu', 'hopper' or 'cpu'"
            ) from None


_chosen: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def using(chosen: Target) -> Iterator[None]:
    """Run `implementation="pallas"` and "pallas_unordered" on this target in a `with` block."""
    token = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(token)


def target() -> Target | str:
    """Return where a kernel would run, or why none would."""
    return _chosen.get() or _attached()


def platform() -> str:
    """Return what programs are made for: cpu, gpu or tpu, of a target that is not interpreted."""
    chosen = _chosen.get()
    if chosen is None or chosen.interpret:
        return jax.default_backend()
    return "tpu" if chosen.backend == "tpu" else "gpu"


@functools.cache
def _attached() -> Target | str:
    backend = jax.default_backend()
    chip = jax.devices()[0].device_kind
    if backend == "tpu":
        return Target("tpu", chip=chip)
    if backend in ("gpu", "cuda"):
        capability = getattr(jax.devices()[0], "compute_capability", None)
        if str(capability).startswith("9."):
            return Target("hopper", chip=chip)
        return f"needs an NVIDIA GPU of compute capability 9, the device has {capability}"
    return f"needs a TPU or an NVIDIA Hopper GPU, the backend is {backend}"
