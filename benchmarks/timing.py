"""Timing for all benchmarks, with warm-up, blocking until results are ready, and alternation.

The speed of a machine drifts with its load, clocks, and temperature. Therefore, only contenders
that alternate in one run are compared: A B C, C B A, ... A ratio is the median over rounds of the
ratio within a round.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import processor
from transformer_jax.cli.process import keep_freed_memory

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers", "tokamax",
    "jax-linear-attention", "dew-flash-attn-cu13", "ctranslate2", "llama-cpp-python", "gguf",
    "onnxruntime",
)  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """Timed task. `call` starts the work, and `wait` returns when it is complete."""

    name: str
    call: Callable[[], Any]
    wait: Callable[[Any], Any] = lambda begun: begun
    """Function that waits for several calls, given the result of the last one, because an
    accelerator runs calls in order. By default, `call` itself returns when the work is complete."""


def of_jax(name: str, begin: Callable[[], Any]) -> Contender:
    """Return a contender for `begin`, which dispatches a program. On a CPU, each call waits."""
    if jax.default_backend() == "cpu":
        return Contender(name, lambda: jax.block_until_ready(begin()))
    return Contender(name, begin, jax.block_until_ready)


@dataclass(frozen=True)
class Timing:
    """Time per call in seconds, with one sample per round."""

    samples: tuple[float, ...]
    first: float
    """Time of the first call in seconds, including compilation."""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the quartiles of the samples."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def summary(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {
            "median_s": self.median,
            "quartiles_s": [low, high],
            "min_s": min(self.samples),
            "rounds": len(self.samples),
            "first_call_s": self.first,
        }


TURNS = "BENCHMARK_TURNS"
"""Environment variable that contains the name of a lock file. Processes that build hold a shared
lock, and the process that measures holds an exclusive lock."""


@contextlib.contextmanager
def side_by_side(folder: Path) -> Iterator[None]:
    """Allow benchmarks in this context to build concurrently, but to run only one at a time."""
    with mock.patch.dict(os.environ, {TURNS: str(folder / "turns")}):
        yield


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process builds or runs, and block others until the context ends."""
    if _TURNS is None:
        yield
        return
    faulthandler.cancel_dump_traceback_later()
    fcntl.flock(_TURNS, fcntl.LOCK_EX)
    _end_if_it_hangs()
    try:
        yield
    finally:
        fcntl.flock(_TURNS, fcntl.LOCK_SH)
        _end_if_it_hangs()


def _end_if_it_hangs() -> None:
    """End this process if it holds a lock for too long, because other processes wait for it."""
    faulthandler.dump_traceback_later(LONGEST_TURN, exit=True)


LONGEST_TURN = 150  # seconds, for building and for timing
_TURNS = open(os.environ[TURNS], "a") if TURNS in os.environ else None
if _TURNS is not None:
    fcntl.flock(_TURNS, fcntl.LOCK_SH)
    _end_if_it_hangs()


def interleave(
    contenders: Sequence[Contender],
    *,
    rounds: int = 20,
    seconds: float = 60.0,
    sample_seconds: float = 0.02,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time contenders alternately, reversing their order in every other round.

    Each turn starts with a call that is not counted, which reclaims caches and cores from the
    previous contender. A sample is the mean over as many calls as fit in `sample_seconds`, with one
    `wait` at the end. There are `rounds` rounds, or fewer (but at least 3) if they would exceed
    `seconds`.
    """

    with _alone():
        return _interleave(contenders, rounds, seconds, sample_seconds, clock)


def _interleave(
    contenders: Sequence[Contender],
    rounds: int,
    seconds: float,
    sample_seconds: float,
    clock: Callable[[], float],
) -> dict[str, Timing]:
    def timed(c: Contender, repeats: int) -> float:
        start = clock()
        for _ in range(repeats):
            begun = c.call()
        c.wait(begun)
        return (clock() - start) / repeats

    firsts = {c.name: timed(c, 1) for c in contenders}
    if len(firsts) < len(contenders):
        raise ValueError(f"contenders share a name: {[c.name for c in contenders]}")
    warm = {c.name: timed(c, 1) for c in contenders}
    repeats = {
        name: max(1, math.ceil(sample_seconds / max(taken, 1e-9))) for name, taken in warm.items()
    }
    per_round = sum((1 + repeats[name]) * taken for name, taken in warm.items())
    rounds = max(min(rounds, 3), min(rounds, int(seconds / max(per_round, 1e-9))))
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            for c in contenders if index % 2 == 0 else reversed(contenders):
                timed(c, 1)
                samples[c.name].append(timed(c, repeats[c.name]))
    finally:
        gc.enable()
    return {name: Timing(tuple(taken), firsts[name]) for name, taken in samples.items()}


FASTER = "times as fast (median of rounds)"
"""Column title for `speedup`, which is not the ratio of the medians because machines drift."""


def speedup(ours: Timing, peer: Timing) -> float:
    """Return our speedup, which is the median of the ratios in each round."""
    return statistics.median(p / o for o, p in zip(ours.samples, peer.samples, strict=True))


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean, so that a ratio and its inverse cancel."""
    return statistics.geometric_mean(ratios)


def matmul_rate(
    dtype: str = "float32",
    size: int = 2048,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the current FLOP/s of a product of random square matrices."""
    x, y = jax.random.normal(jax.random.key(0), (2, size, size), dtype)
    multiply = jax.jit(lambda x, y: jnp.dot(x, y, precision="highest"))
    taken = interleave(
        [of_jax("matmul", lambda: multiply(x, y))],
        rounds=rounds,
        clock=clock,
    )
    return 2 * size**3 / min(taken["matmul"].samples)


def copy_rate(
    size: int = 2**26, rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the bytes per second of a program that reads and writes an array of this size."""
    x = jax.random.normal(jax.random.key(0), (size // 4,))
    copy = jax.jit(jnp.negative)
    contender = of_jax("copy", lambda: copy(x))
    taken = interleave([contender], rounds=rounds, clock=clock)
    return 2 * x.nbytes / min(taken["copy"].samples)


def reads(size: int) -> list[Contender]:
    """Return contenders that read this many bytes once with XLA and, on a CPU, with torch."""
    numbers = jax.random.normal(jax.random.key(2), (size // 4,))
    total, largest = jax.jit(jnp.sum), jax.jit(jnp.max)
    found = [
        of_jax("read by XLA, sum", lambda: total(numbers)),
        of_jax("read by XLA, max", lambda: largest(numbers)),
    ]
    try:
        import torch
    except ImportError:
        return found
    if jax.default_backend() == "cpu":
        same = torch.from_dlpack(numbers)  # shares memory, because its pages determine the rate
        found.append(Contender("read by torch, sum", same.sum))
    return found


def fastest(taken: Iterable[Timing]) -> Timing:
    """Return the timing with the smallest median."""
    return min(taken, key=lambda timing: timing.median)


def read_rate(
    size: int = 2**28, rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the bytes per second when reading an array that is larger than the caches."""
    taken = interleave(reads(size), rounds=rounds, clock=clock)
    return size / min(fastest(taken.values()).samples)


def limits(dtype: str, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Return the current limits of this machine, measured with large arrays."""
    on_cpu = jax.default_backend() == "cpu"
    return {
        "dtype": dtype,
        "matmul_flops_per_s": matmul_rate(dtype, 2048 if on_cpu else 8192, clock=clock),
        "read_bytes_per_s": read_rate(2**28 if on_cpu else 2**30, clock=clock),
        "copy_bytes_per_s": copy_rate(2**26 if on_cpu else 2**30, clock=clock),
    }


ONE_CORE = "stay on one core and count its CPU time: for a machine that others use too"


def prepare(*, one_core: bool = False) -> Callable[[], float]:
    """Return the clock. Call this first, because its memory setting makes all contenders faster.

    On one core, the clock is CPU time, which excludes other processes.
    """
    keep_freed_memory()
    if not one_core:
        return time.perf_counter
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return time.process_time


def brief(error: BaseException) -> str:
    """Return a description of an error on one line, for a contender that fails."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def headline(environment: Mapping[str, Any]) -> str:
    """Return a description of the machine on one line, with a warning if it is busy."""
    cores, busy = environment["cores"] or 1, environment["load"] or 0.0
    line = f"{environment['device']}, {cores} cores, load {busy:.1f}, {environment['commit']}"
    line += "\n" + processor.line(environment["processor"], environment["compiled_kernels"])
    if busy > 0.5 * cores and cores > 1:
        line += "\nothers are running: ratios mislead (most of all torch's, whose threads spin)"
    return line


def environment() -> dict[str, Any]:
    """Return the machine, the versions, and the commit of a measurement."""
    device = jax.devices()[0]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device.device_kind,
        "platform": device.platform,
        "cpu": _cpu_model(),
        "processor": processor.processor(),
        "compiled_kernels": processor.compiled_kernels(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "load": load(),
    }


def load() -> float | None:
    """Return the average number of runnable processes over the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def write(path: Path, question: str, before: Mapping[str, Any], results: Any) -> None:
    """Write a JSON file with the question, the environment, the final load, and the results.

    The environment must contain the `limits` of the same run, because rates are relative to them.
    """
    if "limits" not in before:
        raise ValueError("the environment lacks limits: add what timing.limits returns")
    record = {
        "question": question,
        "environment": dict(before),
        "load_after": load(),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows in aligned columns. The first column is left-aligned."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _commit() -> str | None:
    """Return the commit, followed by + if tracked files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    return None
