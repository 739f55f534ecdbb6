"""How programs are compiled where a test has many and runs each once."""

from __future__ import annotations

import functools
import os

import jax

OLDER_LOOPS = {"xla_cpu_use_fusion_emitters": False}
"""XLA's older way of writing fused loops for a CPU, which compiles in half the time."""

ONE_PART = {"xla_cpu_parallel_codegen_split_count": 1}
"""LLVM gets the program as one module and not as many that threads share: a fifth less CPU time."""


@functools.cache
def known(quick: bool) -> dict[str, bool | int]:
    """Return options of a compilation that take less time, of those that this XLA has.

    The older loops are among them where two programs that compute the same may differ in bits.
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
    """Return the environment of a process that compiles as `quick_compilation` does.

    XLA still passes over the whole program, and gathers and moves the same arrays: what it leaves
    out is how the loops of a device are written.
    """
    quick = [f"--{name}={str(value).lower()}" for name, value in known(quick=True).items()]
    settings = {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags, *quick]),
    }
    return os.environ | settings
