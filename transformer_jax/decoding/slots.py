"""Slots for continuous batching: a batch of fixed shape whose rows are occupied and freed.

`Slots` contains a `DecodeState` with B rows. `admit` reads prompts into free rows, `advance_slots`
chooses the next tokens for all rows, and an ended row does not change until a new request replaces
it. Shapes never change, so there is one decoding program, and one admission program per prompt
bucket. The programs consume their slots, except inside your own `jit`.

`admit_rows`, `advance_rows` and `free_rows` are the compiled programs that `admit`, `advance_slots`
and `release` call. They do not check their arguments and never wait for the device.
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
from transformer_jax.decoding import arguments
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
    """Batch whose rows contain independent texts.

    Attributes:
        decode_state: the state of all rows.
        step: the step of the model.
        options: the static options of the decoding program.
        capacity: the maximum length of a prompt and its continuation, without the last token, which
            is never read.
    """

    decode_state: DecodeState[State]
    step: Step[State] = field(metadata=dict(static=True))
    options: arguments.DecodeOptions = field(metadata=dict(static=True))
    capacity: int = field(metadata=dict(static=True))

    @property
    def active(self) -> jax.Array:  # bool[B]
        """Mask of the occupied slots."""
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
    """Create free slots for states like `state`.

    Args:
        step: the step of the model, as in `generate`.
        params: the model's parameters. Only their shapes are used.
        state: a state with one row. It is not consumed.
        slots: B, the number of requests to decode at the same time, at least 1.
        capacity: the maximum length of a prompt and its continuation, without the last token.
        sampler: function of (key, logits) that chooses a token; None means `Greedy()`.
        processors: functions that change the logits based on the text so far, before sampling.
        stop: one or more token IDs that end a row.
        sampling: whether each row has its own `RowSampling`, which is applied before the sampler.

    Raises:
        ValueError: If an argument is invalid.
    """
    # Rows belong to different requests, so edits that combine rows raise an error.
    step = as_step(step, params, state).with_facts(apart=True)
    check_count("slots", slots, 1)
    check_count("capacity", capacity, 1)
    if sampler is not None:
        arguments.check_sampler(sampler)
    processors, stop = check_processors(processors), arguments.stop_tokens(stop)
    check_not_consumed(state)
    if count_rows(state) != 1:
        raise ValueError(f"state has {count_rows(state)} rows: must have one, like each slot")
    if stop:
        arguments.check_stop(stop, step, params, 1, state)
    options = arguments.DecodeOptions(
        Greedy() if sampler is None else sampler,
        processors,
        stop,
        ends=True,
        invariant=step.invariant,
    )
    keys = arguments.row_keys(None, int(slots))
    return _init_slots(step, options, state, int(slots), int(capacity), bool(sampling), keys)


@program(static=("step", "options", "slots", "capacity", "sampling"))
def _init_slots(
    step: Step[State],
    options: arguments.DecodeOptions,
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
    rows: int | arguments.PerRow,
    prompt: arguments.TokenRows,  # i32[R, P], or rows of equal length
    state: State,
    *,
    limits: int | arguments.PerRow,
    lengths: arguments.Lengths | None = None,  # i32[R], or bool[R, P]
    key: jax.Array | None = None,  # one key, or one for each row
    chunk: int | None = None,
    sampling: RowSampling | None = None,
    top: int = 0,
    allowed: jax.Array | np.ndarray | None = None,  # bool[R, V]
) -> tuple[Slots[State], StepOutput]:  # [R]
    """Add prompts to free slots and choose the first new token of each prompt.

    Inside your own `jit`, occupied slots are overwritten, because they cannot be detected. Traced
    rows must be distinct and not negative. Rows past the last slot are dropped. If limits or
    lengths are traced, limits are clipped to the room in a slot.

    Args:
        slots: the slots to fill, which are consumed.
        params: the model's parameters, passed to the step.
        rows: the index of the slot for each prompt.
        prompt: the token IDs of the prompts.
        state: the state to continue, with R rows. It is not consumed, so prompts can share a
            prefix.
        limits: the maximum number of new tokens for each prompt, at least 1.
        lengths: the length of each prompt, from 1 to P, or a mask [R, P]; None means P.
        key: a single key, so that prompt r uses `fold_in(key, r)`, or one key per prompt, [R].
        chunk: number of prompt tokens to read at a time; None means all at once.
        sampling: settings for R rows, for slots with `sampling`.
        top: number of most likely tokens to return with each token.
        allowed: mask of the tokens allowed as the first new token, which is applied before the
            sampler; None allows all tokens.

    Returns:
        The slots, and the first tokens with their log-probabilities, [R]. With `top`, `seen` is a
        `TopTokens` with arrays [R, top].

    Raises:
        ValueError: If an argument is invalid, if a slot is occupied, or if the slots were already
            consumed.
    """
    check_slots(slots)
    row_array = check_slot_rows(slots, rows)
    if not traced(slots.active, row_array):
        # This waits for the device. `Batcher` tracks its rows and skips this check.
        occupied = row_array[jax.device_get(slots.active)[row_array]].tolist()
        if occupied:
            raise ValueError(
                f"rows {occupied} are occupied: release them, or wait until they finish"
            )
    numpy: ModuleType = jnp if traced(limits) else np
    check_count("top", top, 0)
    if chunk is not None:
        check_count("chunk", chunk, 1)
    limit_array = numpy.atleast_1d(limits)
    prompts = check_prompts(slots, prompt, lengths, state, limit_array, key, sampling)
    if len(prompts.lengths) != len(row_array):
        raise ValueError(
            f"prompt has {len(prompts.lengths)} rows, but there are {len(row_array)} slots"
        )
    prompts = prompts._replace(allowed=None if allowed is None else jnp.asarray(allowed))
    return admit_rows(slots, params, jnp.asarray(row_array, jnp.int32), prompts, state, chunk, top)


@program(static=("chunk", "top"), donate=("slots",))
def admit_rows(
    slots: Slots[State],
    params: Params,
    rows: jax.Array,  # i32[R]
    prompts: arguments.Prompts,
    state: State,
    chunk: int | None,
    top: int,
) -> tuple[Slots[State], StepOutput]:  # [R]
    """Run `admit` with checked arguments."""
    options = slots.options._replace(top=top, chunk=chunk)
    # The history has the capacity of a slot for every bucket, so that all rows fit in one array.
    room = slots.capacity - prompts.tokens.shape[1]

    def fill(
        slots: Slots[State],
        params: Params,
        rows: jax.Array,
        prompts: arguments.Prompts,
        state: State,
    ) -> tuple[Slots[State], StepOutput]:
        # If there are several prompts, some of them may be shorter, which edits need to know.
        step = slots.step if len(prompts.lengths) == 1 else slots.step.with_facts(padded=True)
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

    The loop ends when no row is active. After the end of a row, its tokens are -1 with
    log-probability 0. A row with nonfinite logits ends with token -1 and log-probability NaN.

    Args:
        slots: the slots to advance, which are consumed.
        params: the model's parameters, passed to the step.
        steps: the maximum number of tokens per row, at least 1.
        pause: whether to end the loop as soon as a slot is free, so that it can be filled.
        top: number of most likely tokens to return with each token.
        allowed: mask of the tokens allowed next in each row, for a single step; None allows all
            tokens.

    Returns:
        The slots, and the tokens with their log-probabilities, [steps, B]. With `top`, `seen` is a
        `TopTokens` with arrays [steps, B, top].

    Raises:
        ValueError: If the slots were already consumed, if `steps` is not an integer of at least 1,
            or if it is above 1 and `allowed` is passed.
    """
    check_slots(slots)
    check_count("steps", steps, 1)
    check_count("top", top, 0)
    if allowed is not None and steps > 1:
        raise ValueError(f"steps is {steps}: must be 1 with `allowed`, which applies to one token")
    mask = None if allowed is None else jnp.asarray(allowed)
    return advance_rows(slots, params, jax.device_put(np.bool_(pause)), steps, top, mask)


_Carry: TypeAlias = tuple[jax.Array, DecodeState[State], StepOutput]
"""Number of steps so far, i32[], the rows, and the outputs of all steps, [steps, B]."""


@program(static=("steps", "top"), donate=("slots",))
def advance_rows(
    slots: Slots[State],
    params: Params,
    pause: jax.Array,  # bool[]
    steps: int,
    top: int,
    allowed: jax.Array | None = None,  # bool[B, V]
) -> tuple[Slots[State], StepOutput]:  # [steps, B]
    """Run `advance_slots` with checked arguments."""
    options = slots.options._replace(top=top)

    def advance(
        slots: Slots[State], params: Params, pause: jax.Array, allowed: jax.Array | None
    ) -> tuple[Slots[State], StepOutput]:
        def unfinished(carry: _Carry[State]) -> jax.Array:
            n, decode_state, _ = carry
            active = decode_state.active
            # `pause` is not static, because it changes from call to call.
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
        empty = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), output)
        # For steps after the end of the loop, the tokens are -1.
        empty = empty._replace(token=empty.token - 1)
        carry = jnp.int32(0), slots.decode_state, empty
        _, decode_state, outputs = jax.lax.while_loop(unfinished, write_next, carry)
        return replace(slots, decode_state=decode_state), outputs

    results = jax.tree.map(split, slots), PartitionSpec(None, *split(slots.active))
    return by_compiler(advance, [slots, params, pause, allowed], results)


def _end_nonfinite(decode_state: DecodeState[State], output: StepOutput) -> DecodeState[State]:
    """End the rows with nonfinite logits, because they cannot continue."""
    return replace(decode_state, active=decode_state.active & (output.token >= 0))


def release(slots: Slots[State], rows: int | arguments.PerRow) -> Slots[State]:
    """Free slots, whether or not their texts have ended.

    Args:
        slots: all slots, which are consumed.
        rows: indices of the slots to free.

    Raises:
        ValueError: If the slots were already consumed, or if a row is not the index of a slot.
    """
    check_slots(slots)
    return free_rows(slots, jnp.asarray(check_slot_rows(slots, rows), jnp.int32))


@program(donate=("slots",))
def free_rows(slots: Slots[State], rows: jax.Array) -> Slots[State]:  # i32[R]
    """Run `release` with checked rows."""
    active = slots.active.at[rows].set(False)
    return replace(slots, decode_state=replace(slots.decode_state, active=active))


def check_slots(slots: Slots[State]) -> None:
    """Raise ValueError if an earlier call has consumed the slots."""
    if not traced(slots.active) and slots.active.is_deleted():
        raise ValueError("slots were consumed by an earlier call: use the slots that it returned")


def check_slot_rows(slots: Slots[State], rows: int | arguments.PerRow) -> arguments.Array:  # [R]
    """Return the rows as an array. Raise ValueError unless they are distinct slots."""
    numpy: ModuleType = jnp if traced(rows) else np
    array = numpy.atleast_1d(rows)
    count = len(slots.active)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        actual = f"{array.dtype}{list(array.shape)}" if traced(array) else array.tolist()
        raise ValueError(f"rows are {actual}: must be integers")
    if traced(array):
        return array
    if len(set(array.tolist())) < len(array):
        raise ValueError(f"rows are {array.tolist()}: must be distinct")
    if not ((array >= 0) & (array < count)).all():
        raise ValueError(f"rows are {array.tolist()}: must be from 0 to {count - 1}")
    return array


def check_prompts(
    slots: Slots[State],
    prompt: arguments.TokenRows,
    lengths: arguments.Lengths | None,
    state: State,
    limits: arguments.Array,
    key: jax.Array | None,
    sampling: RowSampling | None = None,
) -> arguments.Prompts:
    """Check prompts for these slots and pad them to their bucket or at most a slot's capacity."""
    tokens, lengths = arguments.check_prompt(prompt, lengths)
    rows = len(tokens)
    if limits.shape != lengths.shape or not np.issubdtype(limits.dtype, np.integer):
        actual = f"{limits.dtype}{list(limits.shape)}" if traced(limits) else limits.tolist()
        raise ValueError(f"limits are {actual}: must be integers, one for each prompt")
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
        raise ValueError(
            f"key is None: must be set, because {slots.options.sampler!r} draws random numbers"
        )
    keys = arguments.row_keys(key, rows)
    check_not_consumed(state)
    # A state with a different shape would be broadcast into the row, or fail deep inside a program.
    slot_leaves, slot_tree = jax.tree_util.tree_flatten_with_path(slots.decode_state.state)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    if tree != slot_tree:  # type: ignore[operator]
        raise ValueError(f"state is {tree}, but the slots contain {slot_tree}")
    for (path, slot_leaf), (_, leaf) in zip(slot_leaves, leaves, strict=True):
        expected = (rows, *slot_leaf.shape[1:])
        if leaf.shape != expected or leaf.dtype != slot_leaf.dtype:
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}: "
                f"the slots require {slot_leaf.dtype}{list(expected)}"
            )
    tokens = arguments.check_with_step(slots.step, tokens, lengths, limits, state)
    if (sampling is None) == (slots.decode_state.sampling is not None):
        rule = (
            "these slots were made with sampling=True and require it"
            if sampling is None
            else "the slots require init_slots(sampling=True)"
        )
        raise ValueError(f"sampling is {sampling!r:.80}: {rule}")
    for name in ("temperature", "top_p", "rest") if sampling is not None else ():
        value = getattr(sampling, name)
        if value.shape != (rows,) or value.dtype != jnp.float32:
            actual = f"{value.dtype}{list(value.shape)}"
            raise ValueError(f"{name} is {actual}: must be float32[{rows}]")
    columns = tokens.shape[1]
    # An edit that reads every token would see the padding.
    width = columns if slots.step.needs_unpadded else arguments.bucket(columns)
    width = min(width, slots.capacity)
    numpy: ModuleType = jnp if traced(tokens) else np
    tokens = numpy.pad(tokens, ((0, 0), (0, max(0, width - columns))))[:, :width]
    if traced(tokens, lengths, limits):
        placed = [jnp.asarray(x, jnp.int32) for x in (tokens, lengths, limits)]
    else:  # transfer explicitly, for code under `jax.transfer_guard`
        placed = jax.device_put([np.asarray(x, np.int32) for x in (tokens, lengths, limits)])
    return arguments.Prompts(placed[0], placed[1], keys, placed[2], sampling)
