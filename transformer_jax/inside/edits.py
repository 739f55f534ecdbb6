"""Make edits that ablate and steer: functions that return a dict for `edit=`.

    edit = zero("block_0/attention/heads", heads=2) | add("block_1/residual", vector, at=5)
    logits, _ = model.apply({"params": params}, tokens, edit=edit)
    step = make_step(model, edit=edit)

`heads` and `at` (tokens) say what of a value changes, all where they are None. A wrong index is
refused; of a traced one, which is not known, the whole value becomes NaN. `at` counts the
tokens of one call: while tokens are made, those of the prompt; of a call that reads one token,
nothing is at another place than 0.

Sources: Meyes et al. 2019 and Michel et al. 2019 (zero), Wang et al. 2023 (mean), Chan et al.
2022, "Causal scrubbing" (resampling), Turner et al. 2023, "Activation addition" (steering).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.models.places import Edit
from transformer_jax.shown import shape_text, shown

Indices: TypeAlias = int | Sequence[int] | jax.Array | np.ndarray
"""One index, or some: i32[] or i32[n], traced or not."""


def zero(place: str, *, heads: Indices | None = None, at: Indices | None = None) -> dict[str, Edit]:
    """Return an edit that sets a value to 0.

    Of a head this is the same as rows of 0 in the output matrix: the head adds nothing.

    Args:
        place: a name of `transformer_jax.places`, which may hold `*`.
        heads: which heads, of a place that has some; None is all.
        at: which tokens; None is all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: if there is no such head or token; when the model is run.
    """
    return {place: _Change("zero", place, jnp.zeros_like, heads, at)}


def mean(
    place: str,
    over: Literal["tokens", "rows", "both"] = "both",
    *,
    heads: Indices | None = None,
    at: Indices | None = None,
) -> dict[str, Edit]:
    """Return an edit that puts the mean of a value, over the call, in its place.

    The mean of other prompts is put in by `resample`. A mean over tokens is of all tokens of the
    call, padding and later ones too.

    Args:
        place: a name of `transformer_jax.places`, which may hold `*`.
        over: the tokens of each row, the rows at each token, or both.
        heads: which heads, of a place that has some; None is all. Each has its own mean.
        at: which tokens get the mean; None is all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: if `over` is none of the three, or there is no such head or token.
    """
    if over not in ("tokens", "rows", "both"):
        raise ValueError(f"over is {over!r}: must be 'tokens', 'rows' or 'both'")

    def average(value: jax.Array) -> jax.Array:
        tokens = axes_of(place, value.ndim)["token"]
        axes = {"tokens": (tokens,), "rows": (0,), "both": (0, tokens)}[over]
        whole = value.astype(jnp.float32).mean(axis=axes, keepdims=True)
        return jnp.broadcast_to(whole.astype(value.dtype), value.shape)

    return {place: _Change(f"mean, over {over}", place, average, heads, at)}


def resample(
    captured: Mapping[str, jax.Array],  # [B, T, ...] or [1, T, ...] by the name of a place
    *,
    heads: Indices | None = None,
    at: Indices | None = None,
) -> dict[str, Edit]:
    """Return an edit that puts values of another run in their places.

    Args:
        captured: what `capture=` returned for the other prompt, or means of it, by place: of as
            many tokens, and of as many rows or of one, which is then for all.
        heads: which heads, of places that have some; None is all.
        at: which tokens; None is all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: if a value has another shape, or there is no such head or token; when the model
            is run.
    """

    def put(name: str, new: jax.Array) -> Edit:
        def function(value: jax.Array) -> jax.Array:
            if new.shape[1:] != value.shape[1:] or new.shape[0] not in (1, value.shape[0]):
                rule = f"must be {list(value.shape)}, or that of one row"
                raise ValueError(f"captured[{name!r}] has shape {list(new.shape)}: {rule}")
            return jnp.broadcast_to(new.astype(value.dtype), value.shape)

        return _Change(f"resample, {shape_text(new)}", name, function, heads, at)

    return {name: put(name, jnp.asarray(new)) for name, new in captured.items()}


def add(
    place: str,
    vector: jax.Array,  # [D], or what has the last axes of the value
    *,
    heads: Indices | None = None,
    at: Indices | None = None,
) -> dict[str, Edit]:
    """Return an edit that adds a vector to a value: x + vector, activation addition.

    Args:
        place: a name of `transformer_jax.places`, which may hold `*`.
        vector: [D] of a stream, [H] or [N, H] of heads, [T, D] of some prompt; traced or not.
        heads: to which heads, of a place that has some; None is all.
        at: to which tokens; None is all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: if the vector has not the last axes of the value, or there is no such head or
            token; when the model is run.
    """
    vector = jnp.asarray(vector)

    def added(value: jax.Array) -> jax.Array:
        if vector.ndim == 0 or vector.shape != value.shape[value.ndim - vector.ndim :]:
            rule = f"must be the last axes of {place}, {list(value.shape)}"
            raise ValueError(f"vector has shape {list(vector.shape)}: {rule}")
        own = vector.reshape((1,) * (value.ndim - vector.ndim) + vector.shape)
        return value + own.astype(value.dtype)

    return {place: _Change(f"add, {shape_text(vector)}", place, added, heads, at)}


def axes_of(place: str, ndim: int) -> dict[str, int]:
    """Return where the tokens of a value stand among its axes, and where its heads."""
    if ndim < 4 or place.endswith("/hidden"):  # of experts, those of each one
        return {"token": 1}
    return {"token": 2, "head": 1} if place.endswith("/weights") else {"token": 1, "head": 2}


@dataclass(frozen=True, eq=False, repr=False)
class _Change:
    """Be an edit that takes what a function returns at some heads and tokens alone."""

    name: str
    """What the edit does, for its repr: "zero", or "add, float32[16]"."""
    place: str
    function: Callable[[jax.Array], jax.Array]
    heads: Indices | None
    at: Indices | None

    def __post_init__(self) -> None:
        last, asked = self.place.rpartition("/")[2], (self.heads, self.at)
        if "*" in last and any(one is not None for one in asked):
            rule = "the last part of the name must hold no *"
            raise ValueError(f"{self.place!r} with heads or at: {rule}")

    def __repr__(self) -> str:
        asked = {"heads": self.heads, "at": self.at}
        of = "".join(f", {n} {shown(x)}" for n, x in asked.items() if x is not None)
        return f"<{self.name}{of}>"

    def __call__(self, value: jax.Array) -> jax.Array:
        asked = {"head": ("heads", self.heads), "token": ("at", self.at)}
        changed, axes = self.function(value), axes_of(self.place, value.ndim)
        for axis, (name, index) in asked.items():
            if index is None:
                continue
            if axis not in axes:
                raise ValueError(f"{name} is {index!r}: {self.place} has no heads")
            size = value.shape[axes[axis]]
            alone = axis == "token" and size == 1
            chosen = _chosen(name, index, size, alone=alone)
            shape = [1] * value.ndim
            shape[axes[axis]] = size
            changed = jnp.where(chosen.reshape(shape), changed, value)
            if isinstance(index, jax.core.Tracer):  # nothing can be raised of what is not known
                wrong = (index < 0) | ((index >= size) & (not alone))
                changed = jnp.where(wrong.any(), jnp.nan, changed)
        return changed


def _chosen(name: str, index: Indices, size: int, *, alone: bool) -> jax.Array:  # bool[size]
    """Return which of `size` items an index names.

    A token that is read alone, while tokens are made, may have another index than those asked for.
    """
    if not isinstance(index, jax.core.Tracer):
        known = np.atleast_1d(np.asarray(index))
        if known.ndim != 1 or not np.issubdtype(known.dtype, np.integer):
            raise ValueError(f"{name} is {index!r}: must be an index, or some")
        wrong = known[(known < 0) | ((known >= size) & (not alone))]
        if len(wrong):
            raise ValueError(f"{name} is {index!r}: must be in 0..{size - 1}")
    asked = jnp.atleast_1d(jnp.asarray(index))
    return (jnp.arange(size)[:, None] == asked[None, :]).any(axis=1)
