"""Edits of values inside a model, whose results do not depend on how calls split a sequence.

A call may contain a whole sequence or a part of it (such as a chunk of a prompt or a decoded
token), padding, and unrelated rows. An edit acts only on the tokens of the sequence, and can read
their positions. An error is raised if an edit needs more tokens than the call contains.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.kernels.contract import Index
from transformer_jax.models.token_wise import is_wise
from transformer_jax.tracing import concrete_value

Edit: TypeAlias = Callable[..., jax.Array]
"""Function of a value, and also of `positions` i32[B, T] if it has a parameter with this name."""


@dataclass(frozen=True)
class Call:
    """Facts about the tokens of a call that are known while tracing; None means unknown."""

    whole: bool = True
    """Whether no earlier call has read tokens of these sequences."""
    starts: bool | None = True
    """Whether every row begins with the first token of its sequence."""
    padded: bool | None = False
    aligned: bool | None = True
    """Whether the tokens in a column have the same position in all rows."""
    packed: bool = False
    """Whether a row contains several sequences."""
    lengths: tuple[int, ...] | None = None
    """Last position of each row plus 1 if `positions` are passed and not traced."""
    layer: Index | None = None
    """Index of the block, which is traced in a scan; None means outside the blocks."""

    @classmethod
    def of(
        cls,
        positions: jax.Array | None,  # i32[B, T], negative means padding; None means arange(T)
        *,
        whole: bool = True,
        packed: bool = False,
    ) -> Call:
        """Return the facts that follow from the positions of a call's tokens."""
        if positions is None or positions.ndim == 1:
            return cls(whole)
        known = concrete_value(positions)
        if known is None or packed:
            return cls(whole, whole or None, None, None, packed)
        valid, largest = known >= 0, np.iinfo(np.int32).max
        first = np.where(valid, known, largest).min(axis=1, initial=largest)
        highest = known.max(axis=0, initial=-1)
        return cls(
            whole,
            whole or bool(((first == 0) | (first == largest)).all()),
            not valid.all(),
            bool((~valid | (known == highest)).all()),
            packed,
            tuple((known.max(axis=1, initial=-1) + 1).tolist()),
        )


WHOLE = Call()
"""Facts about a call with whole sequences and no padding."""


@dataclass(frozen=True)
class EditSpec:
    """Edit function with facts about the calls that use it."""

    function: Edit
    part: bool = False
    """Whether a call reads only a part of each sequence, as in decoding."""
    apart: bool = False
    """Whether the rows are unrelated sequences or unused."""
    padded: bool = False
    """Whether shorter rows are padded."""
    first: int = 0
    """Number of tokens of each sequence before the first one that is read."""

    @classmethod
    def of(
        cls,
        edit: Edit | EditSpec,
        *,
        part: bool = False,
        apart: bool = False,
        padded: bool = False,
        first: int = 0,
    ) -> EditSpec:
        """Add facts to an edit, without changing facts that are already set."""
        old = edit if isinstance(edit, EditSpec) else cls(edit)
        flags = part or old.part, apart or old.apart, padded or old.padded
        return cls(old.function, *flags, first or old.first)


def axes_of(place: str, ndim: int) -> dict[str, int]:
    """Return the token axis of a value, and the head axis if it has one."""
    if ndim < 4 or place.endswith("/hidden"):  # the hidden layer of experts also has 4 axes
        return {"token": 1}
    return {"token": 2, "head": 1} if place.endswith("/weights") else {"token": 1, "head": 2}


def apply_edit(
    place: str,
    spec: EditSpec,
    value: jax.Array,
    positions: jax.Array | None,  # i32[B, T], negative means padding; None means arange(T)
    call: Call,
    single: bool = False,
) -> jax.Array:
    """Apply an edit to a value. Rows of a traced call that violate the edit's needs become NaN.

    `single` means that the model reads one token at a time and that the value belongs to one token.

    Raises:
        ValueError: If the edit needs more tokens or rows than the call has, or if it would see
            padding.
    """
    function, axis = spec.function, axes_of(place, value.ndim)["token"]
    rows, count = value.shape[0], value.shape[axis]
    tokens = jnp.arange(count)[None] if positions is None else positions
    tokens = jnp.broadcast_to(tokens, (rows, count))
    if spec.first:
        # `at` is relative to the first token of the sequence, whether or not the call contains that
        # token
        tokens = jnp.where(tokens < 0, tokens, tokens + spec.first)
    if spec.part or single:
        call = replace(call, whole=False)
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built-in functions may have no signature
        names = set()
    arguments = {"positions": tokens, "call": call}
    arguments = {name: x for name, x in arguments.items() if name in names}
    needs = getattr(function, "needs", None)
    declared = needs is not None
    if needs is None:
        # Whole sequences without padding meet all needs, so skip the slow analysis.
        plain = spec == EditSpec(function) and call.whole
        plain &= positions is None or "positions" in arguments
        needs = set() if plain else _needs(function, value, arguments, axis, single, spec.apart)
    if not needs:
        return function(value, **arguments)

    def error(reason: str, remedy: str) -> ValueError:
        return ValueError(f"edit of {place} {reason}: {remedy}")

    independent = "change each token independently, or take `positions` (negative is padding)"
    if "tokens" in needs:
        reason = "needs all tokens of a sequence, but this call reads only some of them"
        remedy = "use `interpret.resample` with captured values or their mean"
        remedy = f"{remedy if declared else independent}; or call `model.apply` on whole sequences"
        if spec.part or call.starts is False or single:
            raise error(reason, remedy)
        if call.packed:
            raise error("needs the tokens of one sequence", "use one row per document")
    if "rows" in needs and rows > 1:
        if spec.apart or call.aligned is False:
            reason = "combines rows, but here they are different texts or at different tokens"
            raise error(reason, "pass rows of equal length to `model.apply`, or one at a time")
    blind = "positions" not in arguments
    if blind and (spec.padded or call.padded):
        raise error("sees padding", independent)
    changed, wrong = function(value, **arguments), jnp.zeros(rows, bool)
    if "tokens" in needs and call.starts is None:
        first = jnp.where(tokens < 0, jnp.iinfo(tokens.dtype).max, tokens).min(axis=1)
        wrong |= (first != 0) & (tokens >= 0).any(axis=1)
    if "rows" in needs and rows > 1 and call.aligned is None:
        wrong |= ((tokens >= 0) & (tokens != tokens.max(axis=0, keepdims=True))).any()
    if blind and call.padded is None:
        wrong |= (tokens < 0).any()
    # the caller raises the error for a wrong shape
    if isinstance(changed, jax.Array) and changed.shape == value.shape:
        changed = jnp.where(wrong.reshape(-1, *(1,) * (value.ndim - 1)), jnp.nan, changed)
        changed = changed.astype(value.dtype)
    return changed


def _needs(
    function: Edit,
    value: jax.Array,
    arguments: dict[str, object],
    axis: int,
    single: bool,
    apart: bool,
) -> set[str]:
    """Return the axes along which a user's function mixes values: "tokens" and "rows"."""
    names = [name for name in arguments if name == "positions"]
    fixed = {name: x for name, x in arguments.items() if name not in names}
    arrays = [value, *(arguments[name] for name in names)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]  # type: ignore[attr-defined]

    def call(value: jax.Array, *more: jax.Array) -> jax.Array:
        return function(value, **dict(zip(names, more, strict=True)), **fixed)

    # trace with 13 tokens, so that the jaxpr shows whether the last token or a fixed one is indexed
    found = set() if single or is_wise(call, shapes, axis, 13) else {"tokens"}
    rows = value.shape[0]
    by_row = rows == 1 or is_wise(call, shapes, 0, rows)
    # an edit may treat rows differently unless their texts are unrelated
    by_row = by_row or (not apart and is_wise(call, shapes, 0, rows, alike=False))
    return found if by_row else {*found, "rows"}
