"""Helpers for peers, and the error of a contender that is not measured."""

from __future__ import annotations

import importlib
import os
from typing import Any

import jax


class Absent(Exception):
    """The reason why a contender is not measured."""


def imported(package: str) -> Any:
    """Import a package that only benchmarks need, or raise `Absent`."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Absent(f"{error.name} is not installed") from error


def cores() -> int:
    """Return the number of threads for a peer: one per core that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def torch_and_device() -> tuple[Any, str]:
    """Return torch, set to all cores, and its name of JAX's device, or raise `Absent`."""
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
