"""What peers in torch have in common, and how a contender takes no part."""

from __future__ import annotations

import os
from typing import Any

import jax


class Absent(Exception):
    """Why a contender does not take part."""


def torch_and_device() -> tuple[Any, str]:
    """torch, and its name of the device that JAX uses, of a processor all cores; or Absent."""
    try:
        import torch
    except ImportError as error:
        raise Absent("torch is not installed") from error
    if jax.default_backend() == "cpu":
        if hasattr(os, "sched_getaffinity"):
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        return torch, "cpu"
    if not torch.cuda.is_available():
        raise Absent("this torch has no GPU")
    return torch, "cuda"
