"""Rehearsal of a GPU run on a CPU, with other kernels, few tokens, and meaningless figures.

Instead of the kernels for Hopper, the Pallas kernels for a TPU run in interpreter mode, which every
supported version of JAX has. The blockwise implementation replaces the single-pass backward pass.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from benchmarks.first_light.checks import Unavailable
from benchmarks.specs import AttentionCase
from transformer_jax.kernels import Name, Target, target, using

FLAG = "--rehearse"
SAID = "REHEARSED on a CPU, over a few tokens: no figure here is a measurement of a kernel"
STANDS_IN = {"pallas": "pallas", "pallas_unordered": "blockwise"}


def flags(rehearsed: bool) -> tuple[str, ...]:
    """Return the flags for a process that rehearses."""
    return (FLAG,) if rehearsed else ()


def kernels(rehearsed: bool, name: Name | None = None) -> contextlib.AbstractContextManager[None]:
    """Return a context with the kernels for this device, or with the kernels called `name`.

    Raise `Unavailable` if the device does not support the named kernels.
    """
    if rehearsed:
        return using(Target("tpu", interpret=True, chip="rehearsed"))
    if name is None:
        return contextlib.nullcontext()
    attached = target()
    if isinstance(attached, str):
        raise Unavailable(attached)
    return using(replace(attached, name=name))


def implementation(name: str, rehearsed: bool) -> str:
    """Return the name of the implementation to request."""
    return STANDS_IN[name] if rehearsed else name


def shrunk(case: AttentionCase) -> AttentionCase:
    """Return the case with the same mask and options, but with few tokens and two heads."""
    return replace(
        case, batch=1, queries=128, keys=128, heads=2, kv_heads=1 + (case.heads == case.kv_heads),
        head_dim=16, value_dim=16, window=None if case.window is None else 29,
        documents=None if case.documents is None else 5,
    )  # fmt: skip
