"""Run fused attention kernels, imported as `transformer_jax.kernels`; needs only jax and numpy.

There is one `contract.Backend` in each of `hopper` (NVIDIA of compute capability 9), `ampere` (any
other from 8 on; both Pallas on Mosaic GPU), `tpu` (Pallas on Mosaic TPU) and `cpu` (C++).
What attention means (masks, arguments, the choice of an implementation) is in
`transformer_jax.attention`, which calls `gradient.fused_attention`.

    contract   what a kernel computes and is given, and what a backend is
    caches     keys and values as caches hold them
    dropout    which weights dropout keeps, on every backend
    chips      facts about chips: limits, tile sizes, where the kernels are fastest
    packed_queries  the queries of several heads as rows of one tile
    program    a mask as a few operations of integers
    gradient   `fused_attention`, which every call enters, with its gradient
    derivatives  forward mode, and derivatives of gradients
    portable   the kernels in plain JAX
    sharding   device meshes, `vmap`
    lowering   programs for other platforms, which a library here is not for
    hopper/, ampere/, tpu/, cpu/   the kernels; nvidia/ is what the first two share

`target()` is the backend of this process, or the text why there is none: of a CPU too, whose
kernels "native" calls by name. `using` takes another one: for the interpreters of the backends on a
CPU, and for compiling for a device that is not attached.
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
    """A backend, and how it runs."""

    name: Name
    """tpu, hopper, ampere or cpu."""
    interpret: Any = False
    """False on the device. On a CPU what the backend's interpreter takes: True or an
    `InterpretParams` of Pallas for TPUs, an `InterpretGPUParams` of Pallas for Mosaic GPU."""

    chip: str = ""
    """The chip as JAX names it, "NVIDIA H200": what tile sizes depend on."""
    blocks: tuple[tuple[Kind, Blocks], ...] = ()
    """Tile sizes to take instead of the table's, by kernel."""
    processors: int | None = None
    """How many multiprocessors an NVIDIA chip has; None: as many as `chips` knows of it."""

    @property
    def backend(self) -> Backend:
        """Return the backend of this name; a ValueError names one that does not exist."""
        path = f"transformer_jax.kernels.{self.name}"
        try:
            found: Backend = importlib.import_module(path).BACKEND
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
            names = "'tpu', 'hopper', 'ampere' or 'cpu'"
            raise ValueError(f"name is {self.name!r}: must be {names}") from None
        return found


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
    # an interpreter runs on whatever is attached
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
        return f"needs an NVIDIA GPU of compute capability 8 or later, the device has {capability}"
    return f"needs a TPU or an NVIDIA GPU of capability 8 or later, the backend is {backend}"
