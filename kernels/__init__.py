"""Fused attention kernels, imported as `transformer_jax.kernels`, which need only JAX and NumPy.

Each backend is a `contract.Backend`. The backends `hopper` (NVIDIA GPUs with compute capability 9)
and `ampere` (other NVIDIA GPUs with capability 8 or later) are written in Pallas for Mosaic GPU,
`tpu` is written in Pallas for Mosaic TPU, and `cpu` is written in C++. The semantics of attention
(masks, arguments, and the choice of an implementation) are in `transformer_jax.attention`, which
calls `gradient.fused_attention`.

    contract   the inputs and outputs of a kernel, and the interface of a backend
    caches     keys and values in the formats of caches
    dropout    the dropout mask, the same on every backend
    chips      facts about chips: limits, tile sizes, where the kernels are fastest
    packed_queries  the queries of several heads as rows of one tile
    program    a mask as a short sequence of integer operations
    score_function  a function of a score, divided between XLA and the kernels
    gradient   `fused_attention`, the entry point of every call, with its gradient
    derivatives  forward mode, and derivatives of gradients
    portable   the kernels in plain JAX
    sharding   device meshes, `vmap`
    lowering   lowering for a platform other than the current one
    hopper/, ampere/, tpu/, cpu/   the kernels; nvidia/ contains the code that the first two share

`target()` returns the backend for this process, or the reason why no backend is available. On a
CPU, it always returns a reason, because the CPU kernels are selected by name ("native"). `using`
selects a different target, either to run a backend's interpreter on a CPU or to compile for a
device that is not attached.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax

from transformer_jax.kernels.contract import Backend, Blocks, Kind

__all__ = ["Target", "platform", "target", "using"]

Name = Literal["tpu", "hopper", "ampere", "cpu"]


@dataclass(frozen=True)
class Target:
    """Backend and its settings."""

    name: Name
    """Name of the backend: tpu, hopper, ampere or cpu."""
    interpret: Any = False
    """False on the device. On a CPU, this is the argument for the backend's interpreter, which is
    True or a Pallas `InterpretParams` for TPUs, and a Pallas `InterpretGPUParams` for Mosaic
    GPU."""

    chip: str = ""
    """JAX's name for the chip, such as "NVIDIA H200", which determines the tile sizes."""
    blocks: tuple[tuple[Kind, Blocks], ...] = ()
    """Tile sizes, keyed by kernel, that take precedence over the table in `chips`."""
    processors: int | None = None
    """Number of multiprocessors on an NVIDIA chip. None means the number in `chips`."""

    @property
    def backend(self) -> Backend:
        """The backend with this name; raises ValueError if no backend has it."""
        path = f"transformer_jax.kernels.{self.name}"
        try:
            found: Backend = importlib.import_module(path).BACKEND
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
            names = "'tpu', 'hopper', 'ampere' or 'cpu'"
            raise ValueError(f"name={self.name!r} must be {names}") from None
        return found


_chosen: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def using(chosen: Target) -> Iterator[None]:
    """Use this target for `implementation="pallas"` and "pallas_unordered" in a `with` block."""
    token = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(token)


def target() -> Target | str:
    """Return the target on which a kernel would run, or the reason why no kernel can run."""
    return _chosen.get() or _attached()


def platform() -> str:
    """Return the platform that programs are compiled for: cpu, gpu or tpu."""
    chosen = _chosen.get()
    # an interpreter runs on the attached device
    if chosen is None or chosen.interpret:
        return jax.default_backend()
    return "tpu" if chosen.name == "tpu" else "gpu"


@functools.cache
def _attached() -> Target | str:
    backend = jax.default_backend()
    device = jax.devices()[0]
    chip = device.device_kind
    if backend == "tpu":
        return Target("tpu", chip=chip)
    if backend in ("gpu", "cuda"):
        capability = str(getattr(device, "compute_capability", None))
        major = capability.partition(".")[0]
        if major.isdigit() and int(major) >= 8:
            processors = getattr(device, "core_count", None)
            kind: Name = "hopper" if major == "9" else "ampere"
            return Target(kind, chip=chip, processors=processors)
        return (
            f"needs an NVIDIA GPU of compute capability 8 or later, but the device has {capability}"
        )
    return (
        "needs a TPU or an NVIDIA GPU of compute capability 8 or later, but the backend is "
        f"{backend}"
    )
