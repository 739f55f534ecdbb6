"""Edits for ablation and steering: functions that return a dict for `edit=`.

    edit = zero("block_0/attention/heads", heads=2) | add("block_1/residual", vector, at=5)
    logits, _ = model.apply({"params": params}, tokens, edit=edit)
    step = make_step(model, edit=edit)

`heads` and `at` (tokens) select the part of a value that changes; None selects everything. An index
out of range raises an error; a traced one turns the whole value into NaN. `at` counts from the
first token of the sequence, not of a prompt chunk or decoding step, and skips padding.

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
"""One index or several: i32[] or i32[n], traced or not."""


def zero(place: str, *, heads: Indices | None = None, at: Indices | None = None) -> dict[str, Edit]:
    """Return an edit that sets a value to 0.

    A zeroed head adds nothing to the stream, as if its rows of the output matrix were 0.

    Args:
        place: a name of `transformer_jax.places`; may contain `*`.
        heads: indices of heads, for a place with a head axis; None means all.
        at: indices of tokens; None means all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: when the model runs, if there is no such head or token.
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
    """Return an edit that multiplies a value: a differentiable head mask.

    A head's importance is the derivative of a loss with respect to its factor (Michel et al. 2019).

    Args:
        place: a name of `transformer_jax.places`; may contain `*`.
        by: f32[], one factor; f32[N], one factor per head of a place with a head axis; or, with
            "block_*/...", f32[L, N], one factor per block and head. May be traced.
        heads: indices of the heads that change; None means all.
        at: indices of the tokens that change; None means all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: if `by` has a wrong dtype or, when the model runs, a wrong shape.
    """
    rule = "must be a float array [], [N] (heads) or, with block_*/..., [L, N] (blocks, heads)"
    if not hasattr(by, "ndim"):
        raise ValueError(f"by is a {type(by).__name__}: {rule}")
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
            raise ValueError(f"by is {by.dtype}{list(by.shape)}: {place} has {heads_there} heads")
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

    To use the mean of other prompts, pass it to `resample`. A mean over tokens includes later
    tokens, so a call that reads only part of a sequence, such as a decoding step, raises an error.
    A mean over rows includes only the rows that have the token.

    Args:
        place: a name of `transformer_jax.places`; may contain `*`.
        over: average over the tokens of each row, the rows at each token, or both.
        heads: indices of heads, each with its own mean; None means all.
        at: indices of the tokens to replace; None means all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: if `over` is invalid; when the model runs, if there is no such head or token, or
            a call lacks tokens or rows of the mean.
    """
    if over not in ("tokens", "rows", "both"):
        raise ValueError(f"over is {over!r}: must be 'tokens', 'rows' or 'both'")

    def average(value: jax.Array, positions: jax.Array, call: Call) -> jax.Array:
        tokens = axes_of(place, value.ndim)["token"]
        axes = {"tokens": (tokens,), "rows": (0,), "both": (0, tokens)}[over]
        valid = None if call.padded is False else _along(positions >= 0, value.ndim, tokens)
        # float32, because bfloat16 would lose the small terms of a long sum
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
        captured: values keyed by place, as `capture=` returned them for the other prompt, or their
            means. They must have as many tokens as the sequence (with `at`, enough tokens) and
            either as many rows or one row, which is used for all.
        heads: indices of heads, for places with a head axis; None means all.
        at: indices of tokens; None means all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: when the model runs, if a shape is wrong, or there is no such head or token.
    """

    def put(name: str, new: jax.Array) -> Edit:
        tokens = axes_of(name, new.ndim)["token"]

        def function(value: jax.Array, positions: jax.Array, call: Call) -> jax.Array:
            shape = list(value.shape)
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
        place: a name of `transformer_jax.places`; may contain `*`.
        vector: [D] for a stream, [H] or [N, H] for heads, [T, D] for each token; may be traced.
        heads: indices of heads, for a place with a head axis; None means all.
        at: indices of tokens; None means all.

    Returns:
        A dict for `edit=`.

    Raises:
        ValueError: when the model runs, if the shape of `vector` does not match the last axes of
            the value, or there is no such head or token.
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
    """Reshape an array [B, T] to `ndim` axes, with T at `axis`."""
    return x.reshape([x.shape[0], *(x.shape[1] if i == axis else 1 for i in range(1, ndim))])


def _take_tokens(
    new: jax.Array, value: jax.Array, axis: int, positions: jax.Array, call: Call
) -> jax.Array:
    """Return the entries of `new`, one per token in a sequence, for the tokens in a call.

    Tokens past the end of `new` get NaN. If a call reads whole sequences and the lengths agree,
    entries are matched to columns, as captured.
    """
    size = new.shape[axis]
    if call.whole and size == value.shape[axis]:
        return jnp.broadcast_to(new, value.shape)
    # a partial call reads tokens of the sequence in any order, with padding between them
    index = _along(positions, value.ndim, axis)
    whole = jnp.broadcast_to(new, (value.shape[0], *new.shape[1:]))
    found = jnp.take_along_axis(whole, jnp.clip(index, 0, size - 1), axis=axis)
    return jnp.where(index < size, found, jnp.nan)


@dataclass(frozen=True, eq=False, repr=False)
class _SelectiveEdit:
    """Edit that replaces the selected heads and tokens with the result of a function."""

    name: str
    """Description for the repr: "zero", or "add, float32[16]"."""
    place: str
    function: Callable[[jax.Array, jax.Array, Call], jax.Array]
    heads: Indices | None
    at: Indices | None
    needs: frozenset[str] = frozenset()
    """Values needed in one call: all "tokens", all "rows", or a "batch" with the same rows."""
    length: tuple[str, int] | None = None
    """Name and length of an array with an entry for each token."""
    per_block: int | None = None
    """Number of blocks, if there is a factor for each block."""

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
        """Raise ValueError if `at` is out of range for a sequence of one of these lengths."""
        if self.at is not None and not isinstance(self.at, jax.core.Tracer):
            for row, size in enumerate(lengths):
                _select("at", self.at, size, f" for row {row}" if len(set(lengths)) > 1 else "")

    def check_parts(self, lengths: jax.Array | np.ndarray) -> jax.Array | None:  # bool[B]
        """Return a mask, bool[B], of rows that the edit does not fit, given their lengths i32[B].

        If nothing is traced, raise ValueError for such a row, or else return None.
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
            selected = _select("heads", self.heads, size)
            heads = jnp.atleast_1d(jnp.asarray(self.heads))
            changed = jnp.where(selected.reshape(shape), changed, value)
            if isinstance(self.heads, jax.core.Tracer):  # an error cannot be raised: NaN
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
        # a traced index cannot raise an error, so a wrong one makes the value NaN
        if isinstance(self.at, jax.core.Tracer):
            wrong = (at < 0).any() | (call.whole & (at >= count).any())
            changed = jnp.where(wrong, jnp.nan, changed)
        if call.whole and call.lengths is None and call.padded is None:
            missing = ~here.any(axis=1).all(axis=1, keepdims=True) & (positions >= 0).any(
                1, keepdims=True
            )
            changed = jnp.where(_along(missing, value.ndim, axis), jnp.nan, changed)
        return changed.astype(value.dtype)


def _select(name: str, index: Indices, size: int, ending: str = "") -> jax.Array:  # bool[size]
    """Return a mask of the items that `index` selects; raise ValueError if it is out of range."""
    if not isinstance(index, jax.core.Tracer):
        indices = np.atleast_1d(np.asarray(index))
        if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
            raise ValueError(f"{name} is {index!r}: must be an index or a list of indices")
        if ((indices < 0) | (indices >= size)).any():
            raise ValueError(f"{name} is {index!r}: must be in 0..{size - 1}{ending}")
    return (jnp.arange(size)[:, None] == jnp.atleast_1d(jnp.asarray(index))[None, :]).any(axis=1)
