"""Edits for ablation and steering: functions that return a dict for `model.edited`.

    edit = zero("block_0/attention/heads", heads=2) | add("block_1/residual", vector, at=5)
    edited = model.edited(edit)
    logits, _ = edited.apply({"params": params}, tokens)
    step = make_step(edited)

`heads` and `at` select the heads and the tokens whose values change. None selects all of them. An
index that is out of range raises an error. If it is traced, the whole value becomes NaN instead.
`at` counts tokens from the start of the sequence, not from the start of a prompt chunk or decoding
step, and skips padding.

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
"""One or several indices: i32[] or i32[n]. They may be traced."""


def zero(place: str, *, heads: Indices | None = None, at: Indices | None = None) -> dict[str, Edit]:
    """Return an edit that sets a value to 0.

    A head that is set to 0 adds nothing to the stream, as if its rows in the output matrix were 0.

    Args:
        place: the name of a place in `transformer_jax.places`; may contain `*` as a wildcard.
        heads: indices of the heads to edit, if the place has a head axis; None edits all heads.
        at: indices of the tokens to edit; None edits all tokens.

    Returns:
        A dict to pass to `model.edited`.

    Raises:
        ValueError: when the model runs, if a head or token does not exist.
    """
    zeros = lambda value, positions, call: jnp.zeros_like(value)  # noqa: E731
    return {place: _SelectiveEdit("zero", place, zeros, heads, at)}


def scale(
    place: str,
    by: jax.Array,  # f32[], f32[N] or f32[L, N]
    *,
    heads: Indices | None = None,
    at: Indices | None = None,
) -> dict[str, Edit]:
    """Return an edit that multiplies a value by a factor, such as a differentiable head mask.

    The importance of a head is the derivative of the loss with respect to its factor (Michel et al.
    2019).

    Args:
        place: the name of a place in `transformer_jax.places`; may contain `*` as a wildcard.
        by: f32[], one factor; f32[N], one factor per head, if the place has a head axis; or
            f32[L, N], one factor per block and head, if `place` is "block_*/...". The array may be
            traced.
        heads: indices of the heads to edit; None edits all heads.
        at: indices of the tokens to edit; None edits all tokens.

    Returns:
        A dict to pass to `model.edited`.

    Raises:
        ValueError: if the dtype of `by` is wrong, or, when the model runs, if its shape is wrong.
    """
    rule = "must be a float array [], [N] (heads) or, with block_*/..., [L, N] (blocks, heads)"
    if not hasattr(by, "ndim"):
        raise ValueError(f"by is of type {type(by).__name__}: {rule}")
    rows = by.ndim == 2 and "block_*/" in place
    if not jnp.issubdtype(by.dtype, jnp.floating) or not (by.ndim < 2 or rows):
        raise ValueError(f"by is {by.dtype}{list(by.shape)}: {rule}")

    def multiply(value: jax.Array, positions: jax.Array, call: Call) -> jax.Array:
        factors = jnp.asarray(by)[call.layer] if rows else by
        if by.ndim == 0:
            return value * factors.astype(value.dtype)
        axis = axes_of(place, value.ndim).get("head")
        if axis is None or len(factors) != value.shape[axis]:
            heads_there = value.shape[axis] if axis else "no"
            raise ValueError(
                f"by is {by.dtype}{list(by.shape)}, but {place} has {heads_there} heads"
            )
        shape = [1] * value.ndim
        shape[axis] = -1
        return value * factors.astype(value.dtype).reshape(shape)

    blocks = by.shape[0] if rows else None
    return {
        place: _SelectiveEdit(
            f"scale, {shape_text(by)}", place, multiply, heads, at, per_block=blocks
        )
    }


def mean(
    place: str,
    over: Literal["tokens", "rows", "both"] = "both",
    *,
    heads: Indices | None = None,
    at: Indices | None = None,
) -> dict[str, Edit]:
    """Return an edit that replaces a value with its mean over tokens or rows.

    To use the mean over other prompts, pass it to `resample`. A mean over tokens includes later
    tokens. Therefore, a call that reads only part of a sequence, such as a decoding step, raises an
    error. A mean over rows includes only rows that contain the token.

    Args:
        place: the name of a place in `transformer_jax.places`; may contain `*` as a wildcard.
        over: the axes of the mean, which are the tokens of each row, the rows at each token, or
            both.
        heads: indices of the heads to edit. Each head has its own mean. None edits all heads.
        at: indices of the tokens to edit; None edits all tokens.

    Returns:
        A dict to pass to `model.edited`.

    Raises:
        ValueError: if `over` is invalid, or, when the model runs, if a head or token does not exist
            or a call lacks tokens or rows that the mean needs.
    """
    if over not in ("tokens", "rows", "both"):
        raise ValueError(f"over is {over!r}: must be 'tokens', 'rows' or 'both'")

    def average(value: jax.Array, positions: jax.Array, call: Call) -> jax.Array:
        tokens = axes_of(place, value.ndim)["token"]
        axes = {"tokens": (tokens,), "rows": (0,), "both": (0, tokens)}[over]
        valid = None if call.padded is False else _along(positions >= 0, value.ndim, tokens)
        # computed in float32, because bfloat16 would lose the small terms of a long sum
        means = value.astype(jnp.float32).mean(axis=axes, keepdims=True, where=valid)
        return jnp.broadcast_to(means.astype(value.dtype), value.shape)

    needs = {"tokens": {"tokens"}, "rows": {"rows"}, "both": {"tokens", "rows"}}[over]
    return {
        place: _SelectiveEdit(f"mean, over {over}", place, average, heads, at, frozenset(needs))
    }


def resample(
    captured: Mapping[str, jax.Array],  # [B, T, ...] or [1, T, ...], keyed by place name
    *,
    heads: Indices | None = None,
    at: Indices | None = None,
) -> dict[str, Edit]:
    """Return an edit that replaces values with those of another run.

    Args:
        captured: values keyed by place name, as returned by `capture=` for another prompt, or their
            means. A value must have the same number of tokens as the sequence, or at least the
            tokens in `at`. It must have the same number of rows, or one row, which is then used for
            all rows.
        heads: indices of the heads to edit, if the places have a head axis; None edits all heads.
        at: indices of the tokens to edit; None edits all tokens.

    Returns:
        A dict to pass to `model.edited`.

    Raises:
        ValueError: when the model runs, if a shape is wrong or a head or token does not exist.
    """

    def put(name: str, new: jax.Array) -> Edit:
        tokens = axes_of(name, new.ndim)["token"]

        def function(value: jax.Array, positions: jax.Array, call: Call) -> jax.Array:
            shape = list(value.shape)
            # only the tokens that change have to be in `new`, so the number of tokens may differ
            if (at is not None or not call.whole) and new.ndim > tokens:
                shape[tokens] = new.shape[tokens]
            if [*new.shape[1:]] != shape[1:] or new.shape[0] not in (1, value.shape[0]):
                rule = f"must be {list(value.shape)}, or the same with one row"
                raise ValueError(f"captured[{name!r}] has shape {list(new.shape)}: {rule}")
            return _take_tokens(new, value, tokens, positions, call).astype(value.dtype)

        needs = frozenset({"batch"} if new.shape[:1] != (1,) else ())
        length = (f"captured[{name!r}]", new.shape[tokens]) if new.ndim > tokens else None
        return _SelectiveEdit(
            f"resample, {shape_text(new)}", name, function, heads, at, needs, length
        )

    return {name: put(name, jnp.asarray(new)) for name, new in captured.items()}


def add(
    place: str,
    vector: jax.Array,  # [D], or an array with the last axes of the value
    *,
    heads: Indices | None = None,
    at: Indices | None = None,
) -> dict[str, Edit]:
    """Return an edit that adds a vector to a value (activation addition).

    Args:
        place: the name of a place in `transformer_jax.places`; may contain `*` as a wildcard.
        vector: [D] for a stream, [H] or [N, H] for heads, or [T, D] for a different vector at each
            token. May be traced.
        heads: indices of the heads to edit, if the place has a head axis; None edits all heads.
        at: indices of the tokens to edit; None edits all tokens.

    Returns:
        A dict to pass to `model.edited`.

    Raises:
        ValueError: when the model runs, if the shape of `vector` does not match the last axes of
            the value, or if a head or token does not exist.
    """
    vector = jnp.asarray(vector)

    def plus(value: jax.Array, positions: jax.Array, call: Call) -> jax.Array:
        tokens, missing = axes_of(place, value.ndim)["token"], value.ndim - vector.ndim
        shape, term = list(value.shape), vector.reshape((1,) * missing + vector.shape)
        per_token = 0 <= missing <= tokens
        if per_token and (at is not None or not call.whole):
            shape[tokens] = term.shape[tokens]
        if vector.ndim == 0 or missing < 0 or [*vector.shape] != shape[missing:]:
            rule = f"must match the last axes of {place}, {list(value.shape)}"
            raise ValueError(f"vector has shape {list(vector.shape)}: {rule}")
        term = _take_tokens(term, value, tokens, positions, call) if per_token else term
        return value + term.astype(value.dtype)

    return {place: _SelectiveEdit(f"add, {shape_text(vector)}", place, plus, heads, at)}


def _along(x: jax.Array, ndim: int, axis: int) -> jax.Array:
    """Reshape an array [B, T] to `ndim` axes so that T is at `axis`."""
    return x.reshape([x.shape[0], *(x.shape[1] if i == axis else 1 for i in range(1, ndim))])


def _take_tokens(
    new: jax.Array, value: jax.Array, axis: int, positions: jax.Array, call: Call
) -> jax.Array:
    """Return the entries of `new` that belong to the tokens of a call.

    `new` has one entry per token of a sequence. Tokens past its end get NaN. If a call reads whole
    sequences of the same length as `new`, each column gets the entry that was captured there.
    """
    size = new.shape[axis]
    if call.whole and size == value.shape[axis]:
        return jnp.broadcast_to(new, value.shape)
    # a call that reads part of a sequence can contain its tokens in any order, with padding between
    # them
    index = _along(positions, value.ndim, axis)
    whole = jnp.broadcast_to(new, (value.shape[0], *new.shape[1:]))
    found = jnp.take_along_axis(whole, jnp.clip(index, 0, size - 1), axis=axis)
    return jnp.where(index < size, found, jnp.nan)


@dataclass(frozen=True, eq=False, repr=False)
class _SelectiveEdit:
    """Edit that replaces the selected heads and tokens of a value with the result of a function."""

    name: str
    """Description for the repr: "zero", or "add, float32[16]"."""
    place: str
    function: Callable[[jax.Array, jax.Array, Call], jax.Array]
    heads: Indices | None
    at: Indices | None
    needs: frozenset[str] = frozenset()
    """Values that one call must contain: all "tokens", all "rows", or a "batch" with the same
    rows."""
    length: tuple[str, int] | None = None
    """Name and length of an array that has an entry for each token."""
    per_block: int | None = None
    """Number of blocks, if each block has its own factor."""

    def __post_init__(self) -> None:
        last = self.place.rpartition("/")[2]
        if "*" in last and (self.heads is not None or self.at is not None):
            rule = "the last part of the name must not contain *"
            raise ValueError(f"{self.place!r} with heads or at: {rule}")

    def __repr__(self) -> str:
        selected = {"heads": self.heads, "at": self.at}
        ending = "".join(f", {n} {shown(x)}" for n, x in selected.items() if x is not None)
        return f"<{self.name}{ending}>"

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if `at` is out of range for a sequence with one of these lengths."""
        if self.at is not None and not isinstance(self.at, jax.core.Tracer):
            for row, size in enumerate(lengths):
                _select("at", self.at, size, f" for row {row}" if len(set(lengths)) > 1 else "")

    def check_parts(self, lengths: jax.Array | np.ndarray) -> jax.Array | None:  # bool[B]
        """Return a mask, bool[B], of the rows that are too short for the edit.

        `lengths` is i32[B].

        If nothing is traced, raise ValueError for such a row instead, or return None if there is
        none.
        """
        name, size = self.length or ("", 0)
        if self.at is None and not name:
            return None
        if traced(lengths, self.at):
            if self.at is None:
                return jnp.asarray(lengths) != size
            at = jnp.atleast_1d(jnp.asarray(self.at))[None]
            return ((at < 0) | (at >= jnp.asarray(lengths)[:, None])).any(axis=1)
        counts = lengths.tolist()
        self.check(counts)
        if self.at is None and any(n != size for n in counts):
            rule = f"a sequence reaches {max(counts)} tokens; pass `at`, the tokens that change"
            raise ValueError(f"{name} has {size} tokens: {rule}")
        return None

    def __call__(
        self,
        value: jax.Array,
        positions: jax.Array | None = None,  # i32[B, T], negative for padding
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
            selected = _select("heads", self.heads, size)
            heads = jnp.atleast_1d(jnp.asarray(self.heads))
            changed = jnp.where(selected.reshape(shape), changed, value)
            if isinstance(self.heads, jax.core.Tracer):  # it cannot raise an error
                changed = jnp.where(((heads < 0) | (heads >= size)).any(), jnp.nan, changed)
        if self.at is None:
            return changed
        if call.whole and count > 0:
            self.check((count,) if call.lengths is None else call.lengths)
        if self.length is not None:
            _select("at", self.at, self.length[1])
        at = jnp.atleast_1d(jnp.asarray(self.at))
        here = (positions[..., None] == at[None, None]) & (positions >= 0)[..., None]  # [B, T, n]
        changed = jnp.where(_along(here.any(axis=2), value.ndim, axis), changed, value)
        # a traced index cannot raise an error, so an index that is out of range makes the value NaN
        if isinstance(self.at, jax.core.Tracer):
            wrong = (at < 0).any() | (call.whole & (at >= count).any())
            changed = jnp.where(wrong, jnp.nan, changed)
        # if positions are traced, a missing token cannot raise an error, so its row becomes NaN
        if call.whole and call.lengths is None and call.padded is None:
            missing = ~here.any(axis=1).all(axis=1, keepdims=True) & (positions >= 0).any(
                1, keepdims=True
            )
            changed = jnp.where(_along(missing, value.ndim, axis), jnp.nan, changed)
        return changed.astype(value.dtype)


def _select(name: str, index: Indices, size: int, ending: str = "") -> jax.Array:  # bool[size]
    """Return a mask of the items that `index` selects.

    Raises ValueError if an index is out of range.
    """
    if not isinstance(index, jax.core.Tracer):
        indices = np.atleast_1d(np.asarray(index))
        if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
            raise ValueError(f"{name} is {index!r}: must be an index or a list of indices")
        if ((indices < 0) | (indices >= size)).any():
            raise ValueError(f"{name} is {index!r}: must be from 0 to {size - 1}{ending}")
    return (jnp.arange(size)[:, None] == jnp.atleast_1d(jnp.asarray(index))[None, :]).any(axis=1)
