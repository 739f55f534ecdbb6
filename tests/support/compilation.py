"""Compiler options for tests that compile many programs and run each of them once."""

from __future__ import annotations

import functools
import os

import jax

OLDER_LOOPS = {"xla_cpu_use_fusion_emitters": False}
"""The older code generator of XLA for fused CPU loops, which compiles in half the time."""

ONE_PART = {"xla_cpu_parallel_codegen_split_count": 1}
"""Pass the program to LLVM as one module, not one per thread: 20 % less CPU time."""


@functools.cache
def supported_options(quick: bool) -> dict[str, bool | int]:
    """Return the options for faster compilation that the installed XLA supports.

    `quick` adds the older loops; equivalent programs may then differ in their last bits.
    """
    found = {}
    for name, value in (ONE_PART | OLDER_LOOPS if quick else ONE_PART).items():
        try:
            jax.jit(lambda x: x).lower(1.0).compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError:
            continue
        found[name] = value
    return found


def quick_environment(*flags: str) -> dict[str, str]:
    """Return the environment of a process that compiles like `quick_compilation`.

    XLA still partitions the program in the same way, with the same gathers and copies; it skips
    only optimisations of the loops on each device.
    """
    quick = [
        f"--{name}={str(value).lower()}" for name, value in supported_options(quick=True).items()
    ]
    settings = {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags, *quick]),
    }
    return os.environ | settings
