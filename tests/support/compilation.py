"""How programs are compiled where a test has many and runs each once."""

from __future__ import annotations

import functools

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
