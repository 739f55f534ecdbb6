"""Serve many requests with continuous batching: a request takes a slot as soon as one is free.

`Slots` hold a `DecodeState` of B rows, and each request is one of them. `admit` reads a prompt and
writes its row, `advance_slots` chooses the next tokens of all rows, and a row that has ended stands
still until the next request takes its place. Shapes never change. So there is one decoding program,
and one for each bucket of prompts; both consume the slots they are given, except inside a trace of
yours. `serve` is the loop around them. A request's tokens are those of `generate` for it alone with
`key=request.key[None]`, whatever the other rows hold (Yu et al. 2022, Orca, section 3.2).

An encoder-decoder's requests, and those that go on from a prefix, bring a state of one row. All
slots have the same shapes, so sources are padded to one length, with position -1 after their ends.

A request with a constraint is decoded beside those without. As the constraint is asked on the host
before each token, a call then chooses one token a row, not several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from types import ModuleType
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.checks import check_count, check_key, check_not_consumed
from transformer_jax.config.keywords import known_keywords
from transformer_jax.decoding.arguments import (
    DecodeOptions,
    Lengths,
    PerRow,
    Prompt,
    Prompts,
    check_sampler,
    check_stop,
    row_keys,
    stop_tokens,
)
from transformer_jax.decoding.batch_rows import State, count_rows, fork, write_rows
from transformer_jax.decoding.constraints import Constraint, allowed_tokens
from transformer_jax.decoding.generation import (
    DecodeState,
    StepOutput,
    decode_step,
    start_decoding,
)
from transformer_jax.decoding.logit_processors import History, HistoryProcessor, check_processors
from transformer_jax.decoding.samplers import Greedy, RowSampling, Sampler, as_threefry
from transformer_jax.decoding.slots import Slots, check_prompts, check_slot_rows, check_slots
from transformer_jax.decoding.step import Params, Step, StepLike, as_step, check_given
from transformer_jax.programs import program
from transformer_jax.sharding import by_compiler, split, split_rows
from transformer_jax.shown import short_repr
from transformer_jax.tracing import traced


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
    step = as_step(step).told(apart=True)
    check_given(params, state)
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
    prompt: Prompt,  # i32[R, P], or rows of one length
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

    Under a trace of yours it is not known whether a slot is taken: what it held is lost. Rows that
    are traced must be different slots, from 0 on; one past the last is dropped. Where limits or
    lengths are traced, limits are clipped to what a slot holds.

    Args:
        slots: of `init_slots`; they are consumed.
        params: what the step takes as the model's parameters.
        rows: i32[R] or one, the slot of each prompt.
        prompt: i32[R, P], token ids, as an array or as rows of one length.
        state: R rows, which the prompts go on from; not consumed, so many may share a prefix.
        limits: i32[R] or one, new tokens of each prompt, at least 1.
        lengths: i32[R], from 1 to P, tokens of each prompt, or a mask [R, P]; None is P.
        key: one key, of which prompt r uses `fold_in(key, r)`, or one for each, [R].
        chunk: how many tokens of a prompt are read at a time; None reads all at once.
        sampling: of R rows, for slots that ask for it.
        top: how many of the likeliest tokens are returned as well.
        allowed: bool[R, V], which tokens the first one is chosen from, after the processors and
            before the sampler; None allows all.

    Returns:
        The slots, and the first tokens and log-probabilities, [R]; with `top`, `seen` is a
        `Likeliest` of [R, top].

    Raises:
        ValueError: if an argument is wrong, a slot is taken, or the slots were consumed before.
    """
    check_slots(slots)
    places = check_slot_rows(slots, rows)
    if not traced(slots.active, places):
        taken = places[jax.device_get(slots.active)[places]].tolist()
        if taken:
            raise ValueError(f"rows {taken} are taken: release them, or wait for their end")
    numpy: ModuleType = jnp if traced(limits) else np
    most = numpy.atleast_1d(limits)
    check_count("top", top, 0)
    prompts = check_prompts(slots, prompt, lengths, state, most, key, chunk, sampling)
    if len(prompts.lengths) != len(places):
        raise ValueError(f"prompt has {len(prompts.lengths)} rows for {len(places)} slots")
    at = jnp.asarray(places, jnp.int32)
    return _admit(slots, params, at, prompts, state, chunk, top, _on_device(allowed))


def _on_device(allowed: jax.Array | np.ndarray | None) -> jax.Array | None:
    return None if allowed is None else jnp.asarray(allowed)


@program(static=("chunk", "top"), donate=("slots",))
def _admit(
    slots: Slots[State],
    params: Params,
    rows: jax.Array,
    prompts: Prompts,
    state: State,
    chunk: int | None,
    top: int,
    allowed: jax.Array | None = None,
) -> tuple[Slots[State], StepOutput]:
    options = slots.options._replace(top=top)
    room = slots.capacity - prompts.tokens.shape[1]

    def fill(
        slots: Slots[State],
        params: Params,
        rows: jax.Array,
        prompts: Prompts,
        state: State,
        allowed: jax.Array | None,
    ) -> tuple[Slots[State], StepOutput]:
        step = slots.step if len(prompts.lengths) == 1 else slots.step.told(padded=True)
        new, output = start_decoding(options, step, params, prompts, state, room, chunk, allowed)
        decode_state = write_rows(slots.decode_state, rows, _end_nonfinite(new, output))
        return replace(slots, decode_state=decode_state), output

    results = jax.tree.map(split, slots), split_rows(state)
    return by_compiler(fill, [slots, params, rows, prompts, state, allowed], results)


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

    The loop ends when no row is active. Where a row has no token, -1 and log-probability 0 stand. A
    row whose logits are nonfinite ends with token -1 and log-probability NaN.

    Args:
        slots: of `admit`; they are consumed.
        params: what the step takes as the model's parameters.
        steps: at least 1.
        pause: end the loop as soon as a slot is free, so that it can be filled.
        top: how many of the likeliest tokens are returned as well.
        allowed: bool[B, V], which tokens the next one of each row is chosen from, in a single step;
            None allows all.

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
    paused = jax.device_put(np.bool_(pause))
    return _advance(slots, params, paused, steps, top, _on_device(allowed))


@program(static=("steps", "top"), donate=("slots",))
def _advance(
    slots: Slots[State],
    params: Params,
    pause: jax.Array,
    steps: int,
    top: int,
    allowed: jax.Array | None = None,
) -> tuple[Slots[State], StepOutput]:
    results = jax.tree.map(split, slots), PartitionSpec(None, *split(slots.active))
    return by_compiler(partial(_decode_steps, steps, top), [slots, params, pause, allowed], results)


_Carry: TypeAlias = tuple[jax.Array, DecodeState[State], StepOutput]
"""Steps so far, i32[]; the rows; the outputs of all steps, [steps, B]."""


def _decode_steps(
    steps: int,
    top: int,
    slots: Slots[State],
    params: Params,
    pause: jax.Array,
    allowed: jax.Array | None,
) -> tuple[Slots[State], StepOutput]:
    options = slots.options._replace(top=top)

    def unfinished(carry: _Carry[State]) -> jax.Array:
        n, decode_state, _ = carry
        active = decode_state.active
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
    nothing = nothing._replace(token=nothing.token - 1)
    carry = jnp.int32(0), slots.decode_state, nothing
    _, decode_state, outputs = jax.lax.while_loop(unfinished, write_next, carry)
    return replace(slots, decode_state=decode_state), outputs


def release(slots: Slots[State], rows: int | PerRow) -> Slots[State]:
    """Free slots, whether or not their texts have ended.

    Args:
        slots: they are consumed.
        rows: i32[R] or one, the slots that are freed.

    Raises:
        ValueError: if the slots were consumed before, or a row is no slot.
    """
    check_slots(slots)
    return _release(slots, jnp.asarray(check_slot_rows(slots, rows), jnp.int32))


@program(donate=("slots",))
def _release(slots: Slots[State], rows: jax.Array) -> Slots[State]:
    active = slots.active.at[rows].set(False)
    return replace(slots, decode_state=replace(slots.decode_state, active=active))


def _end_nonfinite(decode_state: DecodeState[State], output: StepOutput) -> DecodeState[State]:
    """End the rows whose logits gave no token: they have nothing to go on from."""
    return replace(decode_state, active=decode_state.active & (output.token >= 0))


@short_repr
@dataclass(frozen=True)
class Request:
    """Ask for the continuation of a text.

    Attributes:
        prompt: i32[P], token ids, at least one.
        num_tokens: the most new tokens, at least 1.
        key: a single key, for a sampler that draws; the tokens are those of `generate` with
            `key[None]`.
        id: comes back with the completion; None is the request's number among all, from 0.
        state: one row to go on from, as a prefix or an encoder's source; not consumed. None is the
            empty one.
        constraint: says before each token which ones may come next, of this request alone; None
            allows all.
    """

    prompt: Sequence[int] | np.ndarray  # i32[P]
    num_tokens: int
    key: jax.Array | None = None
    id: Any = None  # of the caller's own type, which comes back
    state: Any = None  # of the model's own type
    constraint: Constraint | None = None


End = Literal["stop", "length", "nonfinite", "refused"]


@short_repr
@dataclass(frozen=True)
class Completion:
    """Hold what a request got: all of it, or in a stream the newest part of it.

    Attributes:
        id: the request's.
        tokens: i32[n], a stop token included.
        log_probs: f32[n], as `Generation.log_probs`.
        end: why it ended: "stop" (also where its constraint has ended), "length", "nonfinite" (no
            finite logit was left) or "refused". None: more is to come.
        error: why it was refused.
    """

    id: Any  # as in the request
    tokens: np.ndarray  # i32[n]
    log_probs: np.ndarray  # f32[n]
    end: End | None
    error: str | None = None


@known_keywords
def serve(
    step: StepLike[State],
    params: Params,
    requests: Iterable[Request | None],
    state: State,
    *,
    slots: int,
    capacity: int,
    steps_per_call: int = 8,
    pause: bool = False,
    sampler: Sampler | None = None,
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
    chunk: int | None = None,
    stream: bool = False,
) -> Iterator[Completion]:
    """Yield each request's completion when it has ended; with `stream`, in parts as they come.

    Admission is first come, first served: requests are taken in order, one whenever a slot is free.
    While `next(requests)` blocks, no request advances; where it gives None, those in the slots go
    on for up to `steps_per_call` tokens, and it is asked again.

    Args:
        step: what runs the model, as in `generate`.
        params: what the step takes as the model's parameters.
        requests: an iterable of `Request`, which may yield None for "nothing yet". One that is
            wrong is refused with its error, and the others go on.
        state: one empty row, as `init_cache(config, 1, capacity)`; it stays whole.
        slots: how many requests are decoded side by side, at least 1.
        capacity: the most tokens of a prompt and its continuation but the last, which is never
            read.
        steps_per_call: the most tokens that a call of the decoding program chooses for each slot,
            at least 1.
        pause: end a call as soon as a slot is free for a request that waits: fewer steps in more
            calls, which pays where a step takes much longer than a call. Without it, a free slot
            costs its share of every step.
        sampler: chooses a token, called with (key, logits), of all requests; None takes the
            likeliest.
        processors: change the logits by the text so far, before the sampler sees them.
        stop: the token id, or ids, after which a request ends.
        chunk: how many tokens of a prompt are read at a time; None reads all at once.
        stream: yield the newest tokens of each request after each call.

    Yields:
        A `Completion` with the request's `id`, its tokens i32[n] and their log-probabilities
        f32[n]; its `end` says why it ended, None that more is to come.

    Raises:
        ValueError: if an argument of the call is wrong.
    """
    check_count("steps_per_call", steps_per_call, 1)
    if not isinstance(requests, Iterable):
        rule = "must be an iterable of Request"
        raise ValueError(f"requests is a {type(requests).__name__}: {rule}")
    held = init_slots(
        step, params, state, slots, capacity, sampler=sampler, processors=processors, stop=stop
    )
    parts = _serve_parts(held, params, iter(requests), state, steps_per_call, pause, chunk)
    return (part for _, part in parts) if stream else _join_parts(parts)


def _join_parts(parts: Iterator[tuple[int, Completion]]) -> Iterator[Completion]:
    """Yield whole completions, each when its last part has come."""
    unfinished: dict[int, list[Completion]] = {}
    for number, part in parts:
        unfinished.setdefault(number, []).append(part)
        if part.end is not None:
            whole = unfinished.pop(number)
            tokens = np.concatenate([part.tokens for part in whole])
            log_probs = np.concatenate([part.log_probs for part in whole])
            yield replace(part, tokens=tokens, log_probs=log_probs)


@dataclass
class _Admitted:
    """Hold a request that has a slot."""

    number: int
    """Among all requests."""
    id: Any
    left: int
    """Tokens that it may still get."""
    constraint: Constraint | None

    def complete(
        self,
        tokens: np.ndarray,  # i32[n]; -1 is none
        log_probs: np.ndarray,  # f32[n]
        stop: tuple[int, ...],
    ) -> Completion:
        """Return the part of its completion that one call gave."""
        real = tokens >= 0
        self.left -= int(real.sum())
        end: End | None = "length" if self.left == 0 else None
        if real.any() and tokens[real][-1] in stop:
            end = "stop"
        elif self.constraint is not None:
            for token in tokens[real].tolist():
                self.constraint.read(token)
            end = "stop" if self.constraint.ended else end
        if np.isnan(log_probs[~real]).any():
            end = "nonfinite"
        return Completion(self.id, tokens[real], log_probs[real], end)


def _serve_parts(
    slots: Slots[State],
    params: Params,
    requests: Iterator[Request | None],
    empty: State,
    steps: int,
    pause: bool,
    chunk: int | None,
) -> Iterator[tuple[int, Completion]]:
    """Fill free slots and advance, until no request is left; yield parts by request number."""
    stop, numbers, more = slots.options.stop, itertools.count(), True
    admitted: list[_Admitted | None] = [None] * len(slots.active)
    while more or any(admitted):
        first: dict[int, StepOutput] = {}
        while more and None in admitted:
            try:
                request = next(requests)
            except StopIteration:
                more = False
                break
            if request is None:
                break
            number, name = next(numbers), getattr(request, "id", None)
            name = number if name is None else name
            try:
                prompts, state = _check_request(slots, request, empty, chunk)
            except ValueError as error:
                nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
                yield number, Completion(name, *nothing, "refused", str(error))
                continue
            constraint = request.constraint
            if constraint is not None and constraint.ended:
                nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
                yield number, Completion(name, *nothing, "stop")
                continue
            row = admitted.index(None)
            rows = jax.device_put(np.array([row], np.int32))
            allowed = _on_device(allowed_tokens([constraint]))
            slots, output = _admit(slots, params, rows, prompts, state, chunk, 0, allowed)
            admitted[row] = _Admitted(number, name, request.num_tokens, constraint)
            if constraint is None:
                first[row] = output
                continue
            tokens, log_probs = jax.device_get((output.token, output.log_prob))
            yield from _complete_row(admitted, row, tokens, log_probs, stop)
            if admitted[row] is None:
                slots = _release(slots, rows)
        if not any(admitted):
            continue
        waiting = jax.device_put(np.bool_(pause and more and None not in admitted))
        constraints = [None if one is None else one.constraint for one in admitted]
        allowed = _on_device(allowed_tokens(constraints))
        count = steps if allowed is None else 1
        slots, output = _advance(slots, params, waiting, count, 0, allowed)
        for row, one in first.items():  # read while the device advances the rows
            tokens, log_probs = jax.device_get((one.token, one.log_prob))
            yield from _complete_row(admitted, row, tokens, log_probs, stop)
        tokens, log_probs = jax.device_get((output.token, output.log_prob))
        for row in range(len(admitted)):
            yield from _complete_row(admitted, row, tokens[:, row], log_probs[:, row], stop)
        for row, constraint in enumerate(constraints):
            if constraint is not None and admitted[row] is None:  # the program does not know it
                slots = _release(slots, jax.device_put(np.array([row], np.int32)))


def _complete_row(
    admitted: list[_Admitted | None],
    row: int,
    tokens: np.ndarray,
    log_probs: np.ndarray,
    stop: tuple[int, ...],
) -> Iterator[tuple[int, Completion]]:
    """Yield what a call gave the request in a slot, if any, and free the slot at its end."""
    request = admitted[row]
    if request is None:
        return
    part = request.complete(tokens, log_probs, stop)
    if part.end is not None:
        admitted[row] = None
    if part.end is not None or len(part.tokens):
        yield request.number, part


def _check_request(
    slots: Slots[State], request: Request, empty: State, chunk: int | None
) -> tuple[Prompts, State]:
    """Return the request as prompts of one row, and the state to go on from."""
    if not isinstance(request, Request):
        raise ValueError(f"request is a {type(request).__name__}: must be a Request")
    limit = request.num_tokens
    if not isinstance(limit, Integral) or isinstance(limit, bool):
        raise ValueError(f"num_tokens is {limit!r}: must be an integer")
    key = request.key
    if key is not None:
        check_key("key", key)
        key = as_threefry(jnp.asarray(key))[None]
    prompt = np.asarray(request.prompt)[None]
    state = empty if request.state is None else request.state
    return check_prompts(slots, prompt, None, state, np.array([limit]), key, chunk), state
