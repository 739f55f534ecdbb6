"""Checks and default values for model arguments: tokens, positions, masks and cache capacity."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from typing import Any, Protocol, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.attention.mask import check_mask, nodes
from transformer_jax.attention.masks import (
    And,
    Mask,
    Or,
    Padding,
    Prefix,
    Segments,
    Window,
    causal_window,
)
from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache.model_cache import (
    ModelCache,
    check_cache,
    max_positions,
    refuse_past_capacity,
    refuse_past_int32,
)
from transformer_jax.checks import check_array, check_positions
from transformer_jax.config import Learned, ModelConfig
from transformer_jax.config.keywords import meant, refuse_keywords
from transformer_jax.models.editing import Edit, EditSpec
from transformer_jax.models.module import Module
from transformer_jax.models.packing import documents_of
from transformer_jax.models.places import Edits, Visit, named_edits
from transformer_jax.sharding import by_compiler, split
from transformer_jax.tracing import are_concrete, concrete_value, eagerly
from transformer_jax.values import shape_text


class OutputTable(Protocol):
    """Object that computes logits from hidden states."""

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits [B, T, V] of hidden states [B, T, D]."""
        ...


class CheckedModule(Module, kw_only=True):
    """Linen module with edits, whose `apply` method suggests corrections for misspelled names.

    Attributes:
        edits: functions keyed by place name, which `edited` adds. They do not affect the
            parameters.
    """

    edits: Edits = field(default=(), repr=False)

    @nn.nowrap
    def edited(self, edit: Mapping[str, Edit]) -> Self:
        """Return a copy of the model with functions that change values inside it.

        New edits run after existing ones, in all methods of the model and in its decoding step.
        Edits of a source run when the source is read: in `init_cache`, `init_state` or
        `init_decode_state`.

        Args:
            edit: dict from the name of a place (see `transformer_jax.places`) to a function. In a
                name, `*` matches any block number.

        Raises:
            ValueError: If a name matches no place, or if a value is not a function.
        """
        return self._with((*self.edits, *named_edits(self, edit)))

    @nn.nowrap
    def with_facts(self, **known: Any) -> Self:
        """Return a copy whose edits store facts about the calls (see `EditSpec.of`)."""
        if not self.edits:  # a copy would cause recompilation
            return self
        return self._with(tuple((name, EditSpec.of(one, **known)) for name, one in self.edits))

    def _with(self, edits: Edits) -> Self:
        # reset the scope of a bound model, because it already contains the names of the layers
        scope = None if self.scope is None else self.scope.rewound()
        return self.clone(parent=scope, edits=edits)

    @nn.nowrap
    def __repr__(self) -> str:
        edit = {name: spec.function for name, spec in self.edits}
        return super().__repr__() + (f".edited({edit})" if edit else "")

    @nn.nowrap
    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = None,
        method: Callable[..., Any] | str | None = None,
        mutable: Any = False,
        capture_intermediates: Any = False,
        **arguments: Any,
    ) -> Any:
        """Call a method of the model with parameters, as `flax.linen.Module.apply` does.

        Raises:
            ValueError: If `variables` is not {"params": params}.
            TypeError: If the method has no argument of that name.
        """
        if not isinstance(variables, Mapping) or (variables and "params" not in variables):
            value = f"of type {type(variables).__name__}"
            if isinstance(variables, Mapping):
                value = f"a dict of {', '.join(map(str, variables))}"
            elif hasattr(variables, "shape"):
                value = shape_text(variables)
            rule = 'must be {"params": params}, as in model.apply({"params": params}, tokens)'
            raise ValueError(f"variables is {value}: {rule}")
        called = "__call__" if method is None else method
        if isinstance(called, str):
            if (found := getattr(type(self), called, None)) is None:
                methods = [name for name in vars(type(self)) if not name.startswith("_")]
                rule = f"{type(self).__name__} has no such method{meant(called, methods)}"
                raise ValueError(f"method is {called!r}: {rule}")
            called = found
        if callable(called):
            named = inspect.signature(called).parameters
            every = [x for x in named.values() if x.kind is x.VAR_KEYWORD]
            # a method with `**arguments: Unpack[EncodeOptions]` accepts the arguments of `encode`
            options = getattr(type(self), "encode", None) if every else None
            known = {*named, *(inspect.signature(options).parameters if options else ())}
            known -= (
                {"capture"} if options else set()
            )  # only `encode` itself returns captured values
            unknown = {x: value for x, value in arguments.items() if x not in known}
            if unknown and (not every or options):
                refuse_keywords(called, unknown, [*known, "method"], "apply")
        flax = dict(rngs=rngs, mutable=mutable, capture_intermediates=capture_intermediates)
        return super().apply(variables, *args, method=method, **flax, **arguments)


def check_tokens(tokens: jax.Array | np.ndarray, vocab_size: int) -> None:
    """Raise ValueError unless tokens are integers [B, T] within the vocabulary.

    Traced IDs are not checked here. A traced ID outside the vocabulary results in NaN.
    """
    if not hasattr(tokens, "ndim"):
        raise ValueError(f"tokens are of type {type(tokens).__name__}: must be an array [B, T]")
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens are {tokens.dtype}{list(tokens.shape)}: must be integers [B, T]")
    if isinstance(tokens, jax.core.Tracer):
        return
    known = np.asarray(tokens)
    wrong = np.argwhere((known < 0) | (known >= vocab_size))
    if len(wrong):
        row, column = wrong[0]
        raise ValueError(
            f"token {known[row, column]} at [{row}, {column}]: must be from 0 to {vocab_size - 1}"
        )


def check_one(tokens: jax.Array) -> None:
    """Raise ValueError unless there is one token per row."""
    if tokens.ndim != 2 or tokens.shape[1] != 1:
        raise ValueError(
            f"tokens have shape {tokens.shape}: attend reads one token per row, [B, 1]"
        )


def gather_tokens(x: jax.Array, at: jax.Array) -> jax.Array:  # [B, T, D], i32[B, Q] -> [B, Q, D]
    """Gather the vectors at the given token indices. An index out of range results in NaN.

    Raise ValueError unless `at` is an integer array with one row for each row of x.
    """
    if not hasattr(at, "ndim"):
        raise ValueError(f"at is of type {type(at).__name__}: must be an array [B, Q]")
    if not jnp.issubdtype(at.dtype, jnp.integer) or at.ndim != 2 or at.shape[0] != x.shape[0]:
        raise ValueError(f"at is {at.dtype}{list(at.shape)}: must be integers [{x.shape[0]}, Q]")
    # A negative index would count from the end, so move it out of range.
    index = jnp.where(at < 0, x.shape[1], at)[:, :, None]
    take = partial(jnp.take_along_axis, axis=1, mode="fill", fill_value=jnp.nan)
    rows, _, *rest = split(x)
    return by_compiler(take, [x, index], PartitionSpec(rows, None, *rest))


def visited_logits(
    embed: OutputTable,
    x: jax.Array,  # [B, T, D]
    at: jax.Array | None,  # i32[B, Q]
    visit: Visit,
) -> jax.Array:  # f32[B, T, V] or [B, Q, V]
    """Return the logits of the tokens at indices `at`, or of all tokens if None, after edits."""
    edited = "logits" in visit.edits  # an edit needs the logits of all tokens
    logits = visit("logits", embed.logits(x if at is None or edited else gather_tokens(x, at)))
    if at is not None and edited:
        logits = gather_tokens(logits, at)
        if "logits" in visit.captured:
            visit.captured["logits"] = logits
    return logits


def positions_and_masks(
    config: ModelConfig,
    shape: tuple[int, ...],  # B, T
    positions: jax.Array | None,
    segments: jax.Array | None,
    mask: Mask | None,
    causal: bool = False,
) -> tuple[jax.Array, tuple[Mask | None, ...]]:
    """Return the positions for embeddings and rotation, and one mask per window in the config.

    The positions are i32[B, T] or [T]. With segments, they start at 0 in each document. Each mask
    combines `mask` with one window, the sink tokens and the segments. Like masks, segments are
    indexed by position, so the tokens of a packed row may be in any order.
    """
    if positions is not None:
        token_positions = positions = check_positions(shape, positions)
        known = None if segments is None else concrete_value(positions)
        if config.has_state and segments is not None:
            rule = "layers with a state read the tokens of a row in order"
            raise ValueError(f"positions cannot be passed with segments: {rule}")
        if known is not None and (np.sort(known, axis=1) != np.arange(shape[1])).any():
            rule = f"with segments, each row must contain 0 to {shape[1] - 1}, in any order"
            raise ValueError(f"positions are {known.tolist()}: {rule}")
    else:
        # with segments, each document starts at 0, so a row may be longer than the position table
        limited = isinstance(config.positions, Learned) and segments is None
        if limited and are_concrete(shape[1]) and shape[1] > config.max_len:
            raise ValueError(
                f"tokens have length {shape[1]}: must be at most max_len, {config.max_len}"
            )
        if mask is not None:
            check_mask(mask, shape[0], config.num_heads, shape[1], shape[1])
        # [T], because all rows have the same positions, so that angles are computed only once
        token_positions = jnp.arange(shape[1])
    sinks: Mask | None = None
    if config.sink_tokens:
        sinks = Prefix(np.full(1, config.sink_tokens, np.int32))  # type: ignore[arg-type]
    if segments is not None:
        check_array("segments", segments, "[B, T]")
        if segments.shape != shape:
            raise ValueError(f"segments {segments.shape} and tokens {shape} differ in shape")
        same = Segments(documents_of(segments))
        mask = same if mask is None else mask & same

        def distances(segments: jax.Array) -> jax.Array:
            """Return the distance of each token from the first token in its run of equal IDs."""
            index = jnp.broadcast_to(jnp.arange(shape[1]), shape)
            # column 0 always starts a document, because its ID differs from the prepended ID
            starts = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
            return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)

        # a mesh may split the length
        in_order = token_positions = by_compiler(distances, [segments], split(segments))
        if sinks is not None:
            sinks = Padding(in_order < config.sink_tokens)
        if positions is not None:
            take = partial(jnp.take_along_axis, axis=1)
            arrays = [in_order, jnp.asarray(positions)]
            token_positions = by_compiler(take, arrays, split(segments))
    masks: list[Mask | None] = []
    for window in config.windows:
        near: Mask | None = None
        if window is not None:
            # under a causal mask, a right limit would hide nothing but would cost a comparison
            near = Window(window, None if causal else window)
            near = near if sinks is None else near | sinks
        masks.append(mask if near is None else near if mask is None else mask & near)
    return token_positions, tuple(masks)


def refuse_disorder(
    positions: jax.Array,  # i32[B, T]; negative means padding
) -> jax.Array:  # bool[B]
    """Return the rows that a layer with a state cannot read, because it reads them in order.

    If the positions are known, raise ValueError instead.
    """
    known = concrete_value(positions)
    if known is None:
        before = jax.lax.cummax(positions, axis=1)[:, :-1]
        return ((positions[:, 1:] >= 0) & (positions[:, 1:] <= before)).any(axis=1)
    largest = np.maximum.accumulate(known, axis=1)[:, :-1]
    wrong = ((known[:, 1:] >= 0) & (known[:, 1:] <= largest)).any(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        rule = "must increase from token to token, because a layer has a state"
        raise ValueError(f"positions of row {row} are {known[row].tolist()}: {rule}")
    return jnp.asarray(wrong)


def check_sees_past(mask: Mask) -> None:
    """Raise ValueError if a decoder's mask does not hide any future tokens.

    The mask replaces `Causal()`, so this is usually a mistake. To allow it, use `Everything() &
    ...`.
    """
    unrestricted = all(
        type(node) in (Padding, Segments, And, Or)
        or (isinstance(node, Window) and node.right is None)
        for node in nodes(mask)
    )
    if unrestricted:
        rule = "replaces Causal(), so tokens would see the future: use mask=Causal() & ..."
        also = " or segments=ids" if isinstance(mask, Segments) else ""
        raise ValueError(f"mask is {mask!r}: {rule}{also}")


def check_cache_room(
    config: ModelConfig,
    cache: ModelCache,
    tokens: jax.Array,  # [B, T]
    positions: jax.Array | None,  # i32[B, T]; None means the positions after the cached tokens
    is_cross: bool = False,
) -> tuple[jax.Array, jax.Array]:  # i32[B, T], bool[B]
    """Return the positions of new tokens in a cache, and the rows that cannot read them.

    A known position past the end of the cache raises ValueError, as does the cache of another
    model. A traced position past the end becomes padding, and the caller sets the result of its row
    to NaN. A ring ends only at position 2^31 - 1. If a layer has a state, the positions must follow
    those in the cache.
    """
    check_cache(config, cache, tokens, is_cross)
    if positions is None:
        positions = kv.next_positions(cache.length, jnp.ones(tokens.shape, bool))
    else:
        positions = check_positions(tokens.shape, positions)
    skips = None
    if config.has_state:  # a state cannot read a token again, or leave a gap
        skips = (positions != kv.next_positions(cache.length, positions >= 0)).any(axis=1)
        known = concrete_value(skips)
        if known is not None and known.any():
            row = int(np.argmax(known))
            rule = f"must continue from {int(cache.length[row])} without a gap"
            raise ValueError(f"positions of row {row} are {positions[row].tolist()}: {rule}")
    limit = max_positions(config, cache)
    if limit is None:
        positions, refused = refuse_past_int32(positions)
    else:
        positions, refused = refuse_past_capacity(positions, limit)
    return positions, refused if skips is None else refused | skips


def refuse_unread(
    mask: Mask,
    cache: ModelCache,
    tokens: jax.Array,  # i32[B, T]
    positions: jax.Array,  # i32[B, T]
) -> jax.Array:  # i32[B, T]
    """Replace the tokens with -1 in rows whose mask lets a query see keys after this call.

    Those keys would be missing from the result, so a prefix with bidirectional attention must be
    read in one call. If the positions are known, raise ValueError instead.
    """
    if not _looks_ahead(mask):
        return tokens
    # inside a trace, jnp would turn even known arrays into tracers, so no error could be raised
    with eagerly(mask, cache.length, positions):
        end = jnp.maximum(cache.length, positions.max(axis=1) + 1)  # [B]
        unread = end[:, None] + jnp.arange(cache.capacity)[None]
        sees = mask.allows(positions, unread) & (positions >= 0)[:, None, :, None]
        ahead = jnp.broadcast_to(sees.any(axis=(1, 2, 3)), end.shape)
    known = concrete_value(ahead)
    if known is not None and known.any():
        row = int(known.argmax())
        raise ValueError(
            f"mask is {mask!r}: in row {row} it lets a token see position {int(end[row])} or "
            "later, which this call does not read; read them in one call, without `chunk`"
        )
    # -1 is outside the vocabulary: the logits of the row become NaN
    return jnp.where(ahead[:, None], -1, tokens)


def _looks_ahead(mask: Mask) -> bool:
    """Whether the structure of the mask allows a query to see a later key."""
    if isinstance(mask, And):
        return _looks_ahead(mask.left) and _looks_ahead(mask.right)
    if isinstance(mask, Or):
        return _looks_ahead(mask.left) or _looks_ahead(mask.right)
    return not (causal_window(mask) or (False,))[0]
