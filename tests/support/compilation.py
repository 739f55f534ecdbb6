"""How programs are compiled where a test has many and runs each once."""

from __future__ import annotations

import functools
import os

import jax

OLDER_LOOPS = {"xla_cpu_use_fusion_emitters": False}
"""XLA's older way of writing fused loops for a CPU, which compiles in half the time."""


@functools.cache
def has_older_loops() -> bool:
    """Return whether this version of XLA can still be asked for them."""
    try:
        jax.jit(lambda x: x).lower(1.0).compile(compiler_options=OLDER_LOOPS)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def quick_environment(*flags: str) -> dict[str, str]:
    """Return the environment of a process that compiles as `quick_compilation` does.

    XLA still passes over the whole program, and gathers and moves the same arrays: what it leaves
    out is how the loops of a device are written.
    """
    older = [f"--{name}={str(value).lower()}" for name, value in OLDER_LOOPS.items()]
    settings = {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "XLA_FLAGS": " ".join(
            [os.environ.get("XLA_FLAGS", ""), *flags, *(older if has_older_loops() else ())]
        ),
    }
    return os.environ | settings
