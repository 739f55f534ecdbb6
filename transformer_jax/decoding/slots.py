"""Slots of continuous batching: a batch of fixed shapes whose rows are taken and freed.

`Slots` contain a `DecodeState` of B rows. `admit` reads prompts into free rows, `advance_slots`
chooses the next tokens of all rows, and a row that has ended stands still until the next request
takes its place. Shapes never change. So there is one decoding program, and one for each bucket of
prompts; both consume the slots they are given, except inside your own `jit`.

Each of the three has a program below it, `admit_rows`, `advance_rows` and `free_rows`, for callers
that keep track of the rows themselves: it checks nothing and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from types import ModuleType
from typing import Generic, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.checks import check_count, check_not_consumed
from transformer_jax.decoding.arguments import (
    Array,
    DecodeOptions,
    Lengths,
    PerRow,
    Prompts,
    TokenRows,
    bucket,
    check_prompt,
    check_sampler,
    check_stop,
    check_with_step,
    row_keys,
    stop_tokens,
)
from transformer_jax.decoding.batch_rows import State, count_rows, fork, write_rows
from transformer_jax.decoding.generation import DecodeState, StepOutput, decode_step, start_decoding
from transformer_jax.decoding.logit_processors import History, HistoryProcessor, check_processors
from transformer_jax.decoding.samplers import Greedy, RowSampling, Sampler
from transformer_jax.decoding.step import Params, Step, StepLike, as_step
from transformer_jax.programs import program
from transformer_jax.sharding import by_compiler, split, split_rows
from transformer_jax.tracing import traced
from transformer_jax.values import value_class


@value_class(pytree=True)
class Slots(Generic[State]):
    """A batch whose rows are at different places of different texts.

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
        """Which slots are taken; False is a free one."""
        return self.decode_state.active


def init_slots(
    step: StepLike[State],
    params: Params,
    state: State,
    slots: int,
    capacity: int,
    *,
    sampler: Sampler | None = None,
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    sampling: bool = False,
) -> Slots[State]:
    """Return free slots for states like `state`.

    Args:
        step: what runs the model, as in `generate`.
        params: what the step takes as the model's parameters; only its shapes are read.
        state: one row, which stays whole.
        slots: B, how many requests are decoded side by side, at least 1.
        capacity: the most tokens of a prompt and its continuation but the last, at least 1.
        sampler: chooses a token, called with (key, logits); None takes the likeliest.
        processors: change the logits by the text so far, before the sampler sees them.
        stop: the token id, or ids, after which a row ends.
        sampling: whether each row brings a `RowSampling`, which is applied after the processors
            and before the sampler.

    Raises:
        ValueError: if an argument is wrong.
    """
    # Rows are of different requests: an edit that takes rows together is refused.
    step = as_step(step, params, state).told(apart=True)
    check_count("slots", slots, 1)
    check_count("capacity", capacity, 1)
    if sampler is not None:
        check_sampler(sampler)
    processors, stop = check_processors(processors), stop_tokens(stop)
    check_not_consumed(state)
    if count_rows(state) != 1:
        raise ValueError(f"state has {count_rows(state)} rows: must be one, as each slot has")
    if stop:
        check_stop(stop, step, params, 1, state)
    options = DecodeOptions(Greedy() if sampler is None else sampler, processors, stop, ends=True)
    keys = row_keys(None, int(slots))
    return _init_slots(step, options, state, int(slots), int(capacity), bool(sampling), keys)


@program(static=("step", "options", "slots", "capacity", "sampling"))
def _init_slots(
    step: Step[State],
    options: DecodeOptions,
    state: State,
    slots: int,
    capacity: int,
    sampling: bool,
    keys: jax.Array,
) -> Slots[State]:
    def zeros() -> jax.Array:
        return jnp.zeros(slots, jnp.int32)

    nothing = jnp.zeros((slots, capacity), jnp.int32)
    history = History.of(nothing, zeros(), 0) if options.processors else None
    each = RowSampling(jnp.ones(slots), jnp.ones(slots)) if sampling else None
    decode_state = DecodeState(
        zeros(), zeros() > 0, zeros(), zeros(), keys, fork(state, slots), history, each
    )
    return Slots(decode_state, step, options, capacity)


def admit(
    slots: Slots[State],
    params: Params,
    rows: int | PerRow,
    prompt: TokenRows,  # i32[R, P], or rows of one length
    state: State,
    *,
    limits: int | PerRow,
    lengths: Lengths | None = None,  # i32[R], or bool[R, P]
    key: jax.Array | None = None,  # one, or one for each row
    chunk: int | None = None,
    sampling: RowSampling | None = None,
    top: int = 0,
    allowed: jax.Array | np.ndarray | None = None,  # bool[R, V]
) -> tuple[Slots[State], StepOutput]:  # [R]
    """Put prompts into free slots and choose the first token of each.

    Inside your own `jit`, occupied slots cannot be detected and are overwritten. Traced rows must
    be different slots, from 0 on; one past the last is dropped. If limits or lengths are traced,
    limits are clipped to the room of a slot.

    Args:
        slots: of `init_slots`; they are consumed.
        params: the model's parameters, as the step takes them.
        rows: the slot of each prompt.
        prompt: token ids.
        state: R rows, from which the prompts continue; not consumed, so many may share a prefix.
        limits: new tokens of each prompt, at least 1.
        lengths: from 1 to P, tokens of each prompt, or a mask [R, P]; None is P.
        key: one key, of which prompt r uses `fold_in(key, r)`, or one for each, [R].
        chunk: how many tokens of a prompt are read at a time; None reads all at once.
        sampling: of R rows, for slots with `sampling`.
        top: how many of the likeliest tokens are returned as well.
        allowed: the tokens from which the first one is chosen, after the processors and before the
            sampler; None allows all.

    Returns:
        The slots, and the first tokens and log-probabilities, [R]; with `top`, `seen` is a
        `Likeliest` of [R, top].

    Raises:
        ValueError: if an argument is wrong, a slot is taken, or the slots were consumed before.
    """
    check_slots(slots)
    places = check_slot_rows(slots, rows)
    if not traced(slots.active, places):
        # This waits for the device; the `Batcher` knows its rows and skips it.
        taken = places[jax.device_get(slots.active)[places]].tolist()
        if taken:
            raise ValueError(f"rows {taken} are taken: release them, or wait for their end")
    numpy: ModuleType = jnp if traced(limits) else np
    check_count("top", top, 0)
    if chunk is not None:
        check_count("chunk", chunk, 1)
    most = numpy.atleast_1d(limits)
    prompts = check_prompts(slots, prompt, lengths, state, most, key, sampling)
    if len(prompts.lengths) != len(places):
        raise ValueError(f"prompt has {len(prompts.lengths)} rows for {len(places)} slots")
    prompts = prompts._replace(allowed=None if allowed is None else jnp.asarray(allowed))
    return admit_rows(slots, params, jnp.asarray(places, jnp.int32), prompts, state, chunk, top)


@program(static=("chunk", "top"), donate=("slots",))
def admit_rows(
    slots: Slots[State],
    params: Params,
    rows: jax.Array,  # i32[R]
    prompts: Prompts,
    state: State,
    chunk: int | None,
    top: int,
) -> tuple[Slots[State], StepOutput]:  # [R]
    """Do what `admit` does, with arguments that were checked."""
    options = slots.options._replace(top=top, chunk=chunk)
    # A history is as wide as a slot, in every bucket: rows of all of them are one array.
    room = slots.capacity - prompts.tokens.shape[1]

    def fill(
        slots: Slots[State], params: Params, rows: jax.Array, prompts: Prompts, state: State
    ) -> tuple[Slots[State], StepOutput]:
        # Of several prompts some may be shorter, which an edit has to know.
        step = slots.step if len(prompts.lengths) == 1 else slots.step.told(padded=True)
        new, output = start_decoding(options, step, params, prompts, state, room)
        decode_state = write_rows(slots.decode_state, rows, _end_nonfinite(new, output))
        return replace(slots, decode_state=decode_state), output

    results = jax.tree.map(split, slots), split_rows(state)
    return by_compiler(fill, [slots, params, rows, prompts, state], results)


def advance_slots(
    slots: Slots[State],
    params: Params,
    steps: int,
    *,
    pause: bool = False,
    top: int = 0,
    allowed: jax.Array | np.ndarray | None = None,  # bool[B, V]
) -> tuple[Slots[State], StepOutput]:  # [steps, B]
    """Choose up to `steps` tokens for every active row.

    The loop ends when no row is active. A row without a token has -1 and log-probability 0. A row
    whose logits are nonfinite ends with token -1 and log-probability NaN.

    Args:
        slots: of `admit`; they are consumed.
        params: the model's parameters, as the step takes them.
        steps: at least 1.
        pause: end the loop as soon as a slot is free, so that it can be filled.
        top: how many of the likeliest tokens are returned as well.
        allowed: the tokens from which the next one of each row is chosen, in a single step; None
            allows all.

    Returns:
        The slots, and the tokens and log-probabilities, [steps, B]; with `top`, `seen` is a
        `Likeliest` of [steps, B, top].

    Raises:
        ValueError: if the slots were consumed before, or `steps` is not an integer of at least 1,
            or with `allowed` more than 1.
    """
    check_slots(slots)
    check_count("steps", steps, 1)
    check_count("top", top, 0)
    if allowed is not None and steps > 1:
        raise ValueError(f"steps is {steps}: must be 1, as `allowed` is of the next token")
    mask = None if allowed is None else jnp.asarray(allowed)
    return advance_rows(slots, params, jax.device_put(np.bool_(pause)), steps, top, mask)


_Carry: TypeAlias = tuple[jax.Array, DecodeState[State], StepOutput]
"""Steps so far, i32[]; the rows; the outputs of all steps, [steps, B]."""


@program(static=("steps", "top"), donate=("slots",))
def advance_rows(
    slots: Slots[State],
    params: Params,
    pause: jax.Array,  # bool[]
    steps: int,
    top: int,
    allowed: jax.Array | None = None,  # bool[B, V]
) -> tuple[Slots[State], StepOutput]:  # [steps, B]
    """Do what `advance_slots` does, with arguments that were checked."""
    options = slots.options._replace(top=top)

    def advance(
        slots: Slots[State], params: Params, pause: jax.Array, allowed: jax.Array | None
    ) -> tuple[Slots[State], StepOutput]:
        def unfinished(carry: _Carry[State]) -> jax.Array:
            n, decode_state, _ = carry
            active = decode_state.active
            # `pause` is an argument of the program, not a static one: it changes from call to call.
            return (n < steps) & active.any() & (active.all() | ~pause)

        def write_next(carry: _Carry[State]) -> _Carry[State]:
            n, decode_state, outputs = carry
            decode_state, output = decode_step(options, slots.step, params, decode_state, allowed)
            outputs = jax.tree.map(lambda all, x: all.at[n].set(x), outputs, output)
            return n + 1, _end_nonfinite(decode_state, output), outputs

        output = jax.eval_shape(
            lambda params, state: decode_step(options, slots.step, params, state)[1],
            params, slots.decode_state,
        )  # fmt: skip
        nothing = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), output)
        # Steps that are not taken, because the loop has ended, leave token -1.
        nothing = nothing._replace(token=nothing.token - 1)
        carry = jnp.int32(0), slots.decode_state, nothing
        _, decode_state, outputs = jax.lax.while_loop(unfinished, write_next, carry)
        return replace(slots, decode_state=decode_state), outputs

    results = jax.tree.map(split, slots), PartitionSpec(None, *split(slots.active))
    return by_compiler(advance, [slots, params, pause, allowed], results)


def _end_nonfinite(decode_state: DecodeState[State], output: StepOutput) -> DecodeState[State]:
    """End the rows whose logits gave no token: they have nothing to continue from."""
    return replace(decode_state, active=decode_state.active & (output.token >= 0))


def release(slots: Slots[State], rows: int | PerRow) -> Slots[State]:
    """Free slots, whether or not their texts have ended.

    Args:
        slots: they are consumed.
        rows: the slots that are freed.

    Raises:
        ValueError: if the slots were consumed before, or a row is no slot.
    """
    check_slots(slots)
    return free_rows(slots, jnp.asarray(check_slot_rows(slots, rows), jnp.int32))


@program(donate=("slots",))
def free_rows(slots: Slots[State], rows: jax.Array) -> Slots[State]:  # i32[R]
    """Do what `release` does, with rows that were checked."""
    active = slots.active.at[rows].set(False)
    return replace(slots, decode_state=replace(slots.decode_state, active=active))


def check_slots(slots: Slots[State]) -> None:
    """Raise ValueError if an earlier call has consumed the slots."""
    if not traced(slots.active) and slots.active.is_deleted():
        raise ValueError("slots were consumed by an earlier call: use those it returned")


def check_slot_rows(slots: Slots[State], rows: int | PerRow) -> Array:  # [R]
    """Return the rows as an array; ValueError unless they are different slots."""
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


def check_prompts(
    slots: Slots[State],
    prompt: TokenRows,
    lengths: Lengths | None,
    state: State,
    limits: Array,
    key: jax.Array | None,
    sampling: RowSampling | None = None,
) -> Prompts:
    """Check prompts for these slots and pad them to their bucket, at most a slot's capacity."""
    tokens, lengths = check_prompt(prompt, lengths)
    rows = len(tokens)
    if limits.shape != lengths.shape or not np.issubdtype(limits.dtype, np.integer):
        given = f"{limits.dtype}{list(limits.shape)}" if traced(limits) else limits.tolist()
        raise ValueError(f"limits are {given}: must be integers, one for each prompt")
    if not traced(limits) and limits.min() < 1:
        raise ValueError(f"num_tokens is {limits.min()}: must be at least 1")
    total = lengths + limits - 1
    if traced(total):
        limits = jnp.clip(limits, 1, slots.capacity + 1 - lengths)
    elif total.max() > slots.capacity:
        raise ValueError(
            f"prompt and new tokens reach length {total.max()}: "
            f"the limit is {slots.capacity}, the capacity of a slot"
        )
    if key is None and not isinstance(slots.options.sampler, Greedy):
        raise ValueError(f"key is None: {slots.options.sampler!r} draws random numbers")
    keys = row_keys(key, rows)
    check_not_consumed(state)
    # A state of another shape would be broadcast into the row, or fail deep in a program.
    mine, one = jax.tree_util.tree_flatten_with_path(slots.decode_state.state)
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
    tokens = check_with_step(slots.step, tokens, lengths, limits, state)
    if (sampling is None) == (slots.decode_state.sampling is not None):
        rule = "needed by these slots" if sampling is None else "init_slots(sampling=True) takes it"
        raise ValueError(f"sampling is {sampling!r:.80}: {rule}")
    for name in ("temperature", "top_p", "rest") if sampling is not None else ():
        value = getattr(sampling, name)
        if value.shape != (rows,) or value.dtype != jnp.float32:
            given = f"{value.dtype}{list(value.shape)}"
            raise ValueError(f"{name} is {given}: must be float32[{rows}]")
    columns = tokens.shape[1]
    # a step that reads exactly what it is given would see the padding
    width = columns if slots.step.reads_exactly else bucket(columns)
    width = min(width, slots.capacity)
    numpy: ModuleType = jnp if traced(tokens) else np
    tokens = numpy.pad(tokens, ((0, 0), (0, max(0, width - columns))))[:, :width]
    if traced(tokens, lengths, limits):
        placed = [jnp.asarray(x, jnp.int32) for x in (tokens, lengths, limits)]
    else:  # explicitly, for code that refuses implicit transfers
        placed = jax.device_put([np.asarray(x, np.int32) for x in (tokens, lengths, limits)])
    return Prompts(placed[0], placed[1], keys, placed[2], sampling)
