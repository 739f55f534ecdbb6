"""Share what peers need, and let a contender say why it takes no part."""

from __future__ import annotations

import importlib
import os
from typing import Any

import jax


class Absent(Exception):
    """Why a contender does not take part."""


def imported(package: str) -> Any:
    """A package that only a benchmark needs; or Absent."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Absent(f"{error.name} is not installed") from error


def cores() -> int:
    """Threads that a peer is given on a processor: one for each core that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def torch_and_device() -> tuple[Any, str]:
    """torch, and its name of the device that JAX uses, of a processor all cores; or Absent."""
    try:
        import torch
    except ImportError as error:
        raise Absent("torch is not installed") from error
    if jax.default_backend() == "cpu":
        torch.set_num_threads(cores())
        return torch, "cpu"
    if not torch.cuda.is_available():
        raise Absent("this torch has no GPU")
    return torch, "cuda"
