"""Wall-clock time, peak memory, and chip utilization of a run."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import jax

from transformer_jax.config import TrainConfig
from transformer_jax.models.flops import step_flops
from transformer_jax.training.planning.peaks import chip_of

Phase = Literal["data", "step", "evaluation", "checkpoint"]
PHASES: tuple[Phase, ...] = ("data", "step", "evaluation", "checkpoint")


class Phases:
    """Wall-clock seconds per phase since the last line in metrics.jsonl."""

    def __init__(self) -> None:
        self._begun, self._seconds = time.perf_counter(), dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """Add the time spent in the context to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            # the time counts even if the phase fails
            self._seconds[phase] += time.perf_counter() - start

    def taken(self) -> dict[str, float]:
        """Return the seconds per phase and in total, then reset them."""
        now = time.perf_counter()
        found = {f"seconds_{phase}": seconds for phase, seconds in self._seconds.items()}
        found["seconds"] = now - self._begun
        self._begun, self._seconds = now, dict.fromkeys(PHASES, 0.0)
        return {name: round(seconds, 6) for name, seconds in found.items()}


def peak_memory() -> int:
    """Return the peak memory in bytes of this process's device or, on a CPU, of this process."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    # getrusage returns bytes on macOS and KiB on Linux
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def flops_utilisation(
    config: TrainConfig,
    tokens_per_second: float,
    device_kind: str | None = None,
    devices: int | None = None,
) -> float | None:
    """Return the model FLOPs utilization (MFU; Chowdhery et al. 2022, appendix B).

    `step_flops` counts the operations. The peak is the device's peak rate for dense bfloat16
    products, regardless of the run's dtype. Returns None if the model is not a transformer, or if
    no peak rate is listed for the device, such as a CPU.
    """
    found = jax.devices()
    chip = chip_of(found[0].device_kind if device_kind is None else device_kind)
    if chip is None or not config.model.supports("plan"):
        return None
    # The rate counts tokens of full rows, so divide the operations of a row by its length.
    each = step_flops(config) / config.sequence_len
    count = len(found) if devices is None else devices
    return tokens_per_second * each / (chip.flops * count)
