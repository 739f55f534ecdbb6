"""Rehearsal of a GPU run on a CPU, with other kernels, few tokens, and meaningless figures.

Instead of the kernels for Hopper, the Pallas kernels for a TPU run in interpreter mode, which every
supported version of JAX has. The blockwise implementation replaces the single-pass backward pass.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from benchmarks.specs import AttentionCase
from transformer_jax.kernels import Target, using

SAID = "REHEARSED on a CPU, over a few tokens: no figure here is a measurement of a kernel"
STANDS_IN = {"pallas": "pallas", "pallas_unordered": "blockwise"}


def kernels(rehearsed: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context with the kernels for this device or, in a rehearsal, the TPU interpreter."""
    if not rehearsed:
        return contextlib.nullcontext()
    return using(Target("tpu", interpret=True, chip="rehearsed"))


def shrunk(case: AttentionCase) -> AttentionCase:
    """Return the case with the same mask and options, but with few tokens and two heads."""
    return replace(
        case, batch=1, queries=128, keys=128, heads=2, kv_heads=1 + (case.heads == case.kv_heads),
        head_dim=16, value_dim=16, window=None if case.window is None else 29,
        documents=None if case.documents is None else 5,
    )  # fmt: skip
