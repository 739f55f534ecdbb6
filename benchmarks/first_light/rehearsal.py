"""Stand in for a GPU on a CPU: other kernels, few tokens, and figures that mean nothing.

The Pallas kernels for a TPU run in their interpreter, which every supported jax has, in place of
those for Hopper; the blockwise implementation in place of the single-pass backward.
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
    """Return what tells a process that it is a rehearsal."""
    return (FLAG,) if rehearsed else ()


def kernels(rehearsed: bool, name: Name | None = None) -> contextlib.AbstractContextManager[None]:
    """Return a context whose kernels run here: the device's own, or those of another name.

    Unavailable where others are named and the device has none.
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
    """Return the implementation to ask for."""
    return STANDS_IN[name] if rehearsed else name


def shrunk(case: AttentionCase) -> AttentionCase:
    """Return the case with the same mask and options over a few tokens of two heads."""
    return replace(
        case, batch=1, queries=128, keys=128, heads=2, kv_heads=1 + (case.heads == case.kv_heads),
        head_dim=16, value_dim=16, window=None if case.window is None else 29,
        documents=None if case.documents is None else 5,
    )  # fmt: skip
