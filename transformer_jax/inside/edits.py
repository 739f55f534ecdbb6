"""Make edits that ablate and steer: functions that return a dict for `edit=`.

    edit = zero("block_0/attention/heads", heads=2) | add("block_1/residual", vector, at=5)
    logits, _ = model.apply({"params": params}, tokens, edit=edit)
    step = make_step(model, edit=edit)

`heads` and `at` (tokens) say what of a value changes, all where they are None. A wrong index is
refused; of a traced one, which is not known, the whole value becomes NaN. `at` counts from the
first token of the sequence, in every call: also in chunks of a prompt, and while tokens are made.
Padding has no index.

Sources: Meyes et al. 2019 (zero), Michel et al. 2019 (scale), Wang et al. 2023 (mean), Chan et al.
2022, "Causal scrubbing" (resampling), Turner et al. 2023, "Activation addition" (steering).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.models.editing import WHOLE, Call, Edit, axes_of
from transformer_jax.tracing import traced
from transformer_jax.values import shape_text, shown

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
    zeros = lambda value, positions, call: jnp.zeros_like(value)  # noqa: E731
    return {place: _Change("zero", place, zeros, heads, at)}


def scale(
    place: str,
    by: jax.Array,  # f32[], f32[N] or f32[L, N]
    *,
    heads: Indices | None = None,
    at: Indices | None = None,
) -> dict[str, Edit]:
    """Return an edit that multiplies a value: a head mask, with a gradient for each head.

    The slope of a loss with respect to the factor of a head is the head's importance (Michel et al.
    2019).

    Args:
        place: a name of `transformer_jax.places`, which may hold `*`.
        by: one factor; or f32[N], one for each head of a place that has some; or with
            "block_*/..." f32[L, N], one for each head of each block. It may be traced.
        heads: which heads change; None is all.
        at: which tokens change; None is all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: if `by` does not hold floats, or does not fit the heads or the blocks; when the
            model is run.
    """
    wanted = "must be floats [], [N] or with block_*/... [L, N], of heads or blocks and heads"
    if not hasattr(by, "ndim"):
        raise ValueError(f"by is a {type(by).__name__}: {wanted}")
    rows = by.ndim == 2 and "block_*/" in place
    if not jnp.issubdtype(by.dtype, jnp.floating) or not (by.ndim < 2 or rows):
        raise ValueError(f"by is {by.dtype}{list(by.shape)}: {wanted}")

    def scaled(value: jax.Array, positions: jax.Array, call: Call) -> jax.Array:
        factors = jnp.asarray(by)[call.layer] if rows else by
        if by.ndim == 0:
            return value * factors.astype(value.dtype)
        axis = axes_of(place, value.ndim).get("head")
        if axis is None or len(factors) != value.shape[axis]:
            given = f"by is {by.dtype}{list(by.shape)}"
            raise ValueError(f"{given}: {place} has {value.shape[axis] if axis else 'no'} heads")
        shape = [1] * value.ndim
        shape[axis] = -1
        return value * factors.astype(value.dtype).reshape(shape)

    blocks = by.shape[0] if rows else None
    return {place: _Change(f"scale, {shape_text(by)}", place, scaled, heads, at, per_block=blocks)}


def mean(
    place: str,
    over: Literal["tokens", "rows", "both"] = "both",
    *,
    heads: Indices | None = None,
    at: Indices | None = None,
) -> dict[str, Edit]:
    """Return an edit that puts the mean of a value, over tokens or rows, in its place.

    The mean of other prompts is put in by `resample`. A mean over tokens is of all tokens of a
    sequence, later ones too, so it is refused where a call reads some of them, as decoding does. A
    mean over rows is of those that have the token.

    Args:
        place: a name of `transformer_jax.places`, which may hold `*`.
        over: the tokens of each row, the rows at each token, or both.
        heads: which heads, of a place that has some; None is all. Each has its own mean.
        at: which tokens get the mean; None is all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: if `over` is none of the three, there is no such head or token, or a call has
            not all tokens or rows of the mean.
    """
    if over not in ("tokens", "rows", "both"):
        raise ValueError(f"over is {over!r}: must be 'tokens', 'rows' or 'both'")

    def average(value: jax.Array, positions: jax.Array, call: Call) -> jax.Array:
        tokens = axes_of(place, value.ndim)["token"]
        axes = {"tokens": (tokens,), "rows": (0,), "both": (0, tokens)}[over]
        valid = None if call.padded is False else _along(positions >= 0, value.ndim, tokens)
        # bfloat16 would lose the small terms of a long sum
        whole = value.astype(jnp.float32).mean(axis=axes, keepdims=True, where=valid)
        return jnp.broadcast_to(whole.astype(value.dtype), value.shape)

    needs = {"tokens": {"tokens"}, "rows": {"rows"}, "both": {"tokens", "rows"}}[over]
    name = f"mean, over {over}"
    return {place: _Change(name, place, average, heads, at, frozenset(needs))}


def resample(
    captured: Mapping[str, jax.Array],  # [B, T, ...] or [1, T, ...] by the name of a place
    *,
    heads: Indices | None = None,
    at: Indices | None = None,
) -> dict[str, Edit]:
    """Return an edit that puts values of another run in their places.

    Args:
        captured: what `capture=` returned for the other prompt, or means of it, by place: of as
            many tokens as the sequence, or with `at` of enough, and of as many rows or of one,
            which is then for all.
        heads: which heads, of places that have some; None is all.
        at: which tokens; None is all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: if a value has another shape, or there is no such head or token; when the model
            is run.
    """

    def put(name: str, new: jax.Array) -> Edit:
        tokens = axes_of(name, new.ndim)["token"]

        def function(value: jax.Array, positions: jax.Array, call: Call) -> jax.Array:
            wanted = list(value.shape)
            if (at is not None or not call.whole) and new.ndim > tokens:
                wanted[tokens] = new.shape[tokens]
            if [*new.shape[1:]] != wanted[1:] or new.shape[0] not in (1, value.shape[0]):
                rule = f"must be {list(value.shape)}, or that of one row"
                raise ValueError(f"captured[{name!r}] has shape {list(new.shape)}: {rule}")
            return _at_tokens(new, value, tokens, positions, call).astype(value.dtype)

        needs = frozenset({"batch"} if new.shape[:1] != (1,) else ())
        length = (f"captured[{name!r}]", new.shape[tokens]) if new.ndim > tokens else None
        return _Change(f"resample, {shape_text(new)}", name, function, heads, at, needs, length)

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

    def added(value: jax.Array, positions: jax.Array, call: Call) -> jax.Array:
        tokens, missing = axes_of(place, value.ndim)["token"], value.ndim - vector.ndim
        wanted, own = list(value.shape), vector.reshape((1,) * missing + vector.shape)
        many = 0 <= missing <= tokens  # it has a vector for each token
        if many and (at is not None or not call.whole):
            wanted[tokens] = own.shape[tokens]
        if vector.ndim == 0 or missing < 0 or [*vector.shape] != wanted[missing:]:
            rule = f"must be the last axes of {place}, {list(value.shape)}"
            raise ValueError(f"vector has shape {list(vector.shape)}: {rule}")
        own = _at_tokens(own, value, tokens, positions, call) if many else own
        return value + own.astype(value.dtype)

    return {place: _Change(f"add, {shape_text(vector)}", place, added, heads, at)}


def _along(x: jax.Array, ndim: int, axis: int) -> jax.Array:
    """Return an array [B, T] with axes of size 1 so that T is the axis of a value's tokens."""
    return x.reshape([x.shape[0], *(x.shape[1] if i == axis else 1 for i in range(1, ndim))])


def _at_tokens(
    new: jax.Array, value: jax.Array, axis: int, positions: jax.Array, call: Call
) -> jax.Array:
    """Return an array of each token of a sequence at the tokens of a call, NaN where it has none.

    In a call of whole sequences, one of as many tokens is of the columns, as it was captured.
    """
    size = new.shape[axis]
    if call.whole and size == value.shape[axis]:
        return jnp.broadcast_to(new, value.shape)
    # a call of a part reads some tokens of the sequence, in any order, with padding between them
    index = _along(positions, value.ndim, axis)
    whole = jnp.broadcast_to(new, (value.shape[0], *new.shape[1:]))
    found = jnp.take_along_axis(whole, jnp.clip(index, 0, size - 1), axis=axis)
    return jnp.where(index < size, found, jnp.nan)


@dataclass(frozen=True, eq=False, repr=False)
class _Change:
    """An edit that changes some heads and tokens to the values of a function."""

    name: str
    """What the edit does, for its repr: "zero", or "add, float32[16]"."""
    place: str
    function: Callable[[jax.Array, jax.Array, Call], jax.Array]
    heads: Indices | None
    at: Indices | None
    needs: frozenset[str] = frozenset()
    """What it takes together: "tokens" of a sequence, "rows", or a "batch" of as many rows."""
    length: tuple[str, int] | None = None
    """The name of an array with a value for each token, and how many."""
    per_block: int | None = None
    """How many blocks it has a value for each of."""

    def __post_init__(self) -> None:
        last, given = self.place.rpartition("/")[2], (self.heads, self.at)
        if "*" in last and any(one is not None for one in given):
            rule = "the last part of the name must hold no *"
            raise ValueError(f"{self.place!r} with heads or at: {rule}")

    def __repr__(self) -> str:
        given = {"heads": self.heads, "at": self.at}
        of = "".join(f", {n} {shown(x)}" for n, x in given.items() if x is not None)
        return f"<{self.name}{of}>"

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if a sequence of one of these lengths lacks a token that is named."""
        if self.at is not None and not isinstance(self.at, jax.core.Tracer):
            for row, size in enumerate(lengths):
                _chosen("at", self.at, size, f" of row {row}" if len(set(lengths)) > 1 else "")

    def check_parts(self, lengths: jax.Array | np.ndarray) -> jax.Array | None:  # bool[B]
        """Return which sequences of these lengths, i32[B], cannot be edited in several calls.

        ValueError if it is known that one cannot; None if it is known that all can.
        """
        name, size = self.length or ("", 0)
        if self.at is None and not name:
            return None
        if traced(lengths, self.at):
            if self.at is None:
                return jnp.asarray(lengths) != size
            at = jnp.atleast_1d(jnp.asarray(self.at))[None]
            return ((at < 0) | (at >= jnp.asarray(lengths)[:, None])).any(axis=1)
        known = lengths.tolist()
        self.check(known)
        if self.at is None and any(n != size for n in known):
            rule = f"a sequence reaches {max(known)}; `at` names those that change"
            raise ValueError(f"{name} has {size} tokens: {rule}")
        return None

    def __call__(
        self,
        value: jax.Array,
        positions: jax.Array | None = None,  # i32[B, T], negative is padding
        call: Call = WHOLE,
    ) -> jax.Array:
        axes, rows = axes_of(self.place, value.ndim), value.shape[0]
        axis = axes["token"]
        count = value.shape[axis]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(count)[None], (rows, count))
        changed = self.function(value, positions, call)
        if self.heads is not None:
            if "head" not in axes:
                raise ValueError(f"heads is {self.heads!r}: {self.place} has no heads")
            size = value.shape[axes["head"]]
            shape = [1] * value.ndim
            shape[axes["head"]] = size
            chosen = _chosen("heads", self.heads, size)
            heads = jnp.atleast_1d(jnp.asarray(self.heads))
            changed = jnp.where(chosen.reshape(shape), changed, value)
            if isinstance(self.heads, jax.core.Tracer):  # nothing can be raised
                changed = jnp.where(((heads < 0) | (heads >= size)).any(), jnp.nan, changed)
        if self.at is None:
            return changed
        if call.whole and count > 0:
            self.check((count,) if call.lengths is None else call.lengths)
        if self.length is not None:
            _chosen("at", self.at, self.length[1])
        at = jnp.atleast_1d(jnp.asarray(self.at))
        here = (positions[..., None] == at[None, None]) & (positions >= 0)[..., None]  # [B, T, n]
        changed = jnp.where(_along(here.any(axis=2), value.ndim, axis), changed, value)
        # nothing can be raised for a traced index, so a wrong one makes the value NaN
        if isinstance(self.at, jax.core.Tracer):
            wrong = (at < 0).any() | (call.whole & (at >= count).any())
            changed = jnp.where(wrong, jnp.nan, changed)
        if call.whole and call.lengths is None and call.padded is None:
            missing = ~here.any(axis=1).all(axis=1, keepdims=True) & (positions >= 0).any(
                1, keepdims=True
            )
            changed = jnp.where(_along(missing, value.ndim, axis), jnp.nan, changed)
        return changed.astype(value.dtype)


def _chosen(name: str, index: Indices, size: int, where: str = "") -> jax.Array:  # bool[size]
    """Return which of `size` items an index names; ValueError if it is known to be none."""
    if not isinstance(index, jax.core.Tracer):
        known = np.atleast_1d(np.asarray(index))
        if known.ndim != 1 or not np.issubdtype(known.dtype, np.integer):
            raise ValueError(f"{name} is {index!r}: must be an index, or some")
        if ((known < 0) | (known >= size)).any():
            raise ValueError(f"{name} is {index!r}: must be in 0..{size - 1}{where}")
    given = jnp.atleast_1d(jnp.asarray(index))
    return (jnp.arange(size)[:, None] == given[None, :]).any(axis=1)
