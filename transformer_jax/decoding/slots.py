"""Hold the slots of continuous batching, check what they are given, and pad prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Generic

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import check_count, check_not_consumed
from transformer_jax.decoding.arguments import (
    Array,
    DecodeOptions,
    Lengths,
    PerRow,
    Prompt,
    Prompts,
    bucket,
    check_prompt,
    check_with_step,
    row_keys,
)
from transformer_jax.decoding.batch_rows import State
from transformer_jax.decoding.generation import DecodeState
from transformer_jax.decoding.samplers import Greedy, RowSampling
from transformer_jax.decoding.step import Step
from transformer_jax.shown import short_repr
from transformer_jax.tracing import traced


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots(Generic[State]):
    """Hold a batch whose rows are at different places of different texts.

    Attributes:
        decode_state: of all rows.
        step: what runs the model.
        options: what the decoding program is compiled for.
        capacity: the most tokens of a prompt and its continuation but the last, which is never
            read.
    """

    decode_state: DecodeState[State]
    step: Step[State] = field(metadata=dict(static=True))
    options: DecodeOptions = field(metadata=dict(static=True))
    capacity: int = field(metadata=dict(static=True))

    @property
    def active(self) -> jax.Array:  # bool[B]
        """Return which slots are taken; False is a free one."""
        return self.decode_state.active


def check_prompts(
    slots: Slots[State],
    prompt: Prompt,
    lengths: Lengths | None,
    state: State,
    limits: Array,
    key: jax.Array | None,
    chunk: int | None,
    sampling: RowSampling | None = None,
) -> Prompts:
    """Check prompts for these slots and pad them to their bucket, which no slot is shorter than."""
    if chunk is not None:
        check_count("chunk", chunk, 1)
    tokens, lengths = check_prompt(prompt, lengths)
    rows = len(tokens)
    limits = check_limits(slots, limits, lengths)
    if key is None and not isinstance(slots.options.sampler, Greedy):
        raise ValueError(f"key is None: {slots.options.sampler!r} draws random numbers")
    keys = row_keys(key, rows)
    check_not_consumed(state)
    check_same_kind(slots.decode_state.state, state, rows)
    tokens = check_with_step(slots.step, tokens, lengths, limits, state)
    check_sampling(slots, sampling, rows)
    exactly = slots.step.reads_exactly
    prompts = pad_prompts(tokens, lengths, keys, limits, slots.capacity, exactly=exactly)
    return prompts._replace(sampling=sampling)


def check_sampling(slots: Slots[State], sampling: RowSampling | None, rows: int) -> None:
    """Raise ValueError unless each row says how it is drawn where the slots ask, and only there."""
    if (sampling is None) == (slots.decode_state.sampling is not None):
        rule = "needed by these slots" if sampling is None else "init_slots(sampling=True) takes it"
        raise ValueError(f"sampling is {sampling!r:.80}: {rule}")
    if sampling is not None:
        for name in ("temperature", "top_p", "rest"):
            value = getattr(sampling, name)
            if value.shape != (rows,) or value.dtype != jnp.float32:
                given = f"{value.dtype}{list(value.shape)}"
                raise ValueError(f"{name} is {given}: must be float32[{rows}]")


def check_limits(slots: Slots[State], limits: Array, lengths: Array) -> Array:
    """Return the limits of prompts i32[R]; traced ones are clipped to what a slot holds."""
    if limits.shape != lengths.shape or not np.issubdtype(limits.dtype, np.integer):
        given = f"{limits.dtype}{list(limits.shape)}" if traced(limits) else limits.tolist()
        raise ValueError(f"limits are {given}: must be integers, one for each prompt")
    if not traced(limits) and limits.min() < 1:
        raise ValueError(f"num_tokens is {limits.min()}: must be at least 1")
    total = lengths + limits - 1
    if traced(total):
        return jnp.clip(limits, 1, slots.capacity + 1 - lengths)
    if total.max() > slots.capacity:
        raise ValueError(
            f"prompt and new tokens reach length {total.max()}: "
            f"the limit is {slots.capacity}, the capacity of a slot"
        )
    return limits


def pad_prompts(
    tokens: Array,
    lengths: Array,
    keys: jax.Array,
    limits: Array,
    capacity: int,
    *,
    exactly: bool = False,
) -> Prompts:
    """Pad prompts to their bucket, or to the capacity of a slot where that is shorter.

    Not if the step reads exactly what it is given.
    """
    columns = tokens.shape[1]
    width = min(columns if exactly else bucket(columns), capacity)
    numpy: ModuleType = jnp if traced(tokens) else np
    tokens = numpy.pad(tokens, ((0, 0), (0, max(0, width - columns))))[:, :width]
    if traced(tokens, lengths, limits):
        placed = [jnp.asarray(x, jnp.int32) for x in (tokens, lengths, limits)]
    else:
        placed = jax.device_put([np.asarray(x, np.int32) for x in (tokens, lengths, limits)])
    return Prompts(placed[0], placed[1], keys, placed[2])


def check_same_kind(held: State, state: State, rows: int) -> None:
    """Raise ValueError where structure, shapes or dtypes are not those of the slots' state."""
    mine, one = jax.tree_util.tree_flatten_with_path(held)
    theirs, other = jax.tree_util.tree_flatten_with_path(state)
    if one != other:  # type: ignore[operator]
        raise ValueError(f"state is {other}: the slots hold {one}")
    for (path, a), (_, b) in zip(mine, theirs, strict=True):
        wanted = (rows, *a.shape[1:])
        if b.shape != wanted or b.dtype != a.dtype:
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} is {b.dtype}{list(b.shape)}: "
                f"the slots take {a.dtype}{list(wanted)}"
            )


def check_slot_rows(slots: Slots[State], rows: int | PerRow) -> Array:  # [R]
    """Return the rows as an array; ValueError where they are not different slots."""
    numpy: ModuleType = jnp if traced(rows) else np
    places = numpy.atleast_1d(rows)
    count = len(slots.active)
    if places.ndim != 1 or not np.issubdtype(places.dtype, np.integer):
        given = f"{places.dtype}{list(places.shape)}" if traced(places) else places.tolist()
        raise ValueError(f"rows are {given}: must be integers")
    if traced(places):
        return places
    if len(set(places.tolist())) < len(places):
        raise ValueError(f"rows are {places.tolist()}: must name a slot once")
    if not ((places >= 0) & (places < count)).all():
        raise ValueError(f"rows are {places.tolist()}: must be in 0..{count - 1}")
    return places


def check_slots(slots: Slots[State]) -> None:
    """Raise ValueError where an earlier call has consumed the slots."""
    if not traced(slots.active) and slots.active.is_deleted():
        raise ValueError("slots were consumed by an earlier call: use those it returned")
