"""Apply an edit to the tokens of a sequence, whatever part of it one call reads.

A model is called with a whole sequence, with parts of it (chunks of a prompt, tokens that are
decoded), with padding, with rows of a batch that have nothing to do with each other. An edit sees
the tokens of the sequence, and nothing else: it is told their positions, and refused where it needs
more than the call has. So its numbers are those of one pass over the whole sequence.
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
from transformer_jax.tracing import known_value

Edit: TypeAlias = Callable[..., jax.Array]
"""A function of a value, and of `positions` i32[B, T] if it has a parameter of this name."""


@dataclass(frozen=True)
class Call:
    """What is known of the tokens of a call when it is traced; None is not known."""

    whole: bool = True
    """Whether no token was read before."""
    starts: bool | None = True
    """Whether every row begins with the first token of its sequence."""
    padded: bool | None = False
    aligned: bool | None = True
    """Whether the rows are at the same token of their sequences, in every column."""
    packed: bool = False
    """Whether a row has several sequences."""
    lengths: tuple[int, ...] | None = None
    """How far each row goes, where `positions` are given and known."""
    layer: Index | None = None
    """The number of the block, traced in a scan; None is in no block."""

    @classmethod
    def of(
        cls,
        positions: jax.Array | None,  # i32[B, T], negative is padding; None is arange(T)
        *,
        whole: bool = True,
        packed: bool = False,
    ) -> Call:
        """Return what positions say."""
        if positions is None or positions.ndim == 1:
            return cls(whole)
        known = known_value(positions)
        if known is None or packed:
            return cls(whole, whole or None, None, None, packed)
        valid, most = known >= 0, np.iinfo(np.int32).max
        first = np.where(valid, known, most).min(axis=1, initial=most)
        highest = known.max(axis=0, initial=-1)
        return cls(
            whole,
            whole or bool(((first == 0) | (first == most)).all()),
            not valid.all(),
            bool((~valid | (known == highest)).all()),
            packed,
            tuple((known.max(axis=1, initial=-1) + 1).tolist()),
        )


WHOLE = Call()
"""A call of whole sequences without padding."""


@dataclass(frozen=True)
class InCall:
    """An edit with what its caller knows of the calls that it is for."""

    function: Edit
    part: bool = False
    """A call reads a part of each sequence, as decoding does."""
    apart: bool = False
    """The rows are sequences that have nothing to do with each other, or no sequences at all."""
    padded: bool = False
    """Some rows are shorter than others, and filled up."""
    first: int = 0
    """So many tokens of each sequence are out of sight, before those that are read."""

    @classmethod
    def of(
        cls,
        edit: Edit | InCall,
        *,
        part: bool = False,
        apart: bool = False,
        padded: bool = False,
        first: int = 0,
    ) -> InCall:
        """Return an edit with all that is known of its calls."""
        old = edit if isinstance(edit, InCall) else cls(edit)
        flags = part or old.part, apart or old.apart, padded or old.padded
        return cls(old.function, *flags, first or old.first)


def axes_of(place: str, ndim: int) -> dict[str, int]:
    """Return where the tokens of a value stand among its axes, and where its heads."""
    if ndim < 4 or place.endswith("/hidden"):  # of experts, those of each one
        return {"token": 1}
    return {"token": 2, "head": 1} if place.endswith("/weights") else {"token": 1, "head": 2}


def apply_edit(
    place: str,
    told: InCall,
    value: jax.Array,
    positions: jax.Array | None,  # i32[B, T], negative is padding; None is arange(T)
    call: Call,
    alone: bool = False,
) -> jax.Array:
    """Return what an edit makes of a value; NaN where it needs what a traced call may not have.

    With `alone`, the model itself reads token after token, and the value is of one.

    Raises:
        ValueError: if it is known that the edit needs more tokens or rows than the call has, or
            sees padding.
    """
    function, axis = told.function, axes_of(place, value.ndim)["token"]
    rows, count = value.shape[0], value.shape[axis]
    tokens = jnp.arange(count)[None] if positions is None else positions
    tokens = jnp.broadcast_to(tokens, (rows, count))
    if told.first:
        # `at` counts from the first token of the sequence, whether it is in sight or not
        tokens = jnp.where(tokens < 0, tokens, tokens + told.first)
    if told.part or alone:
        call = replace(call, whole=False)
    try:
        taken = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin may have no signature
        taken = set()
    given = {"positions": tokens, "call": call}
    given = {name: x for name, x in given.items() if name in taken}
    needs = getattr(function, "needs", None)
    declared = needs is not None
    if needs is None:
        # Tracing a function to find its needs takes time. A whole sequence without padding meets
        # every need, so it is spared there.
        plain = told == InCall(function) and call.whole
        plain &= positions is None or "positions" in given
        needs = set() if plain else _needs(function, value, given, axis, alone, told.apart)
    if not needs:
        return function(value, **given)

    def refuse(reason: str, remedy: str) -> ValueError:
        return ValueError(f"edit of {place} {reason}: {remedy}")

    alike = "change each token by itself, or take `positions` (negative is padding)"
    if "tokens" in needs:
        reason = "needs all tokens of a sequence, and this call reads some of them"
        remedy = "`inside.resample` puts captured values or their mean in" if declared else alike
        remedy = f"{remedy}; `model.apply` on the whole sequence has all"
        if told.part or call.starts is False or alone:
            raise refuse(reason, remedy)
        if call.packed:
            raise refuse("needs the tokens of one sequence", "give each document a row of its own")
    if "rows" in needs and rows > 1:
        if told.apart or call.aligned is False:
            reason = "takes rows together, which here are at different texts or tokens"
            raise refuse(reason, "pass rows of one length to `model.apply`, or one at a time")
    blind = "positions" not in given
    if blind and (told.padded or call.padded):
        raise refuse("sees padding", alike)
    changed, wrong = function(value, **given), jnp.zeros(rows, bool)
    if "tokens" in needs and call.starts is None:
        first = jnp.where(tokens < 0, jnp.iinfo(tokens.dtype).max, tokens).min(axis=1)
        wrong |= (first != 0) & (tokens >= 0).any(axis=1)
    if "rows" in needs and rows > 1 and call.aligned is None:
        wrong |= ((tokens >= 0) & (tokens != tokens.max(axis=0, keepdims=True))).any()
    if blind and call.padded is None:
        wrong |= (tokens < 0).any()
    # a wrong shape is refused by the caller, with the name of the place
    if isinstance(changed, jax.Array) and changed.shape == value.shape:
        changed = jnp.where(wrong.reshape(-1, *(1,) * (value.ndim - 1)), jnp.nan, changed)
        changed = changed.astype(value.dtype)
    return changed


def _needs(
    function: Edit,
    value: jax.Array,
    given: dict[str, object],
    axis: int,
    alone: bool,
    apart: bool,
) -> set[str]:
    """Return what a function of somebody else's takes together: "tokens", "rows", or nothing."""
    names = [name for name in given if name == "positions"]
    fixed = {name: x for name, x in given.items() if name not in names}
    arrays = [value, *(given[name] for name in names)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]  # type: ignore[attr-defined]

    def call(value: jax.Array, *more: jax.Array) -> jax.Array:
        return function(value, **dict(zip(names, more, strict=True)), **fixed)

    # more tokens than one, of which a function of the last or of some index would show
    found = set() if alone or is_wise(call, shapes, axis, 13) else {"tokens"}
    rows = value.shape[0]
    by_row = rows == 1 or is_wise(call, shapes, 0, rows)
    # rows may be changed in different ways, unless they are the rows of other texts
    by_row = by_row or (not apart and is_wise(call, shapes, 0, rows, alike=False))
    return found if by_row else {*found, "rows"}
