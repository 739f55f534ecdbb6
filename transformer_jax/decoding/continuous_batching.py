"""Continuous batching: requests take the slots of a running batch as others leave them.

`Slots` is a `Running` of B rows: what a request needs is one row of it. `admit` reads a prompt
beside the batch and writes that row, `advance_slots` chooses the next tokens of all rows, and a row
that has ended stands still until the next request takes its place. Shapes never change, so there is
one decoding program, and one for each bucket of prompts; both consume the slots they are given,
unless a trace of yours goes through. `serve` is the loop around them. A request's tokens are those
of `generate` for it alone with `key=request.key[None]`, whoever else is there (Yu et al. 2022,
Orca, section 3.2).

An encoder-decoder's requests, and those that go on from a prefix, bring a state of one row. All
slots have the same shapes, so sources are padded to one length, with position -1 behind their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.arguments import check_count, check_key, traced
from transformer_jax.decode import (
    Chosen,
    Plan,
    Running,
    Step,
    advance,
    begin,
    bucket,
    check_alive,
    check_prompt,
    check_sampler,
    row_keys,
    stop_tokens,
)
from transformer_jax.meshes import by_compiler, split, split_rows
from transformer_jax.processors import History, HistoryProcessor, check_processors
from transformer_jax.rows import count_rows, fork, put
from transformer_jax.sampling import Greedy, Sampler


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """A batch whose rows are at different places of different texts."""

    running: Running
    step: Step = field(metadata=dict(static=True))
    plan: Plan = field(metadata=dict(static=True))
    capacity: int = field(metadata=dict(static=True))
    """The most tokens of a prompt and its continuation, whose last is never read."""

    @property
    def active(self) -> jax.Array:  # bool[B]
        """False where a slot is free."""
        return self.running.active


def init_slots(
    step: Step,
    params: Any,
    state: Any,
    slots: int,
    capacity: int,
    *,
    sampler: Sampler | None = None,
    processors: Sequence[HistoryProcessor] = (),
    stop: int | Sequence[int] = (),
) -> Slots:
    """So many free slots for states like `state`, which is one row and stays whole."""
    check_count("slots", slots, 1)
    check_count("capacity", capacity, 1)
    if sampler is not None:
        check_sampler(sampler)
    processors, stop = check_processors(processors), stop_tokens(stop)
    check_alive(state)
    if count_rows(state) != 1:
        raise ValueError(f"state has {count_rows(state)} rows: must be one, as each slot has")
    if stop:
        logits, _ = jax.eval_shape(step, params, jnp.zeros((1, 1), jnp.int32), state)
        if max(stop) >= logits.shape[-1]:
            raise ValueError(f"stop is {max(stop)}: must be in 0..{logits.shape[-1] - 1}")
    plan = Plan(Greedy() if sampler is None else sampler, processors, stop, ends=True)
    return _init(step, plan, state, int(slots), int(capacity), row_keys(None, int(slots)))


@partial(jax.jit, static_argnames=("step", "plan", "slots", "capacity"))
def _init(step, plan, state, slots, capacity, keys):
    def zeros() -> jax.Array:
        return jnp.zeros(slots, jnp.int32)

    nothing = jnp.zeros((slots, capacity), jnp.int32)
    history = History.of(nothing, zeros(), 0) if plan.processors else None
    running = Running(zeros(), zeros() > 0, zeros(), zeros(), keys, fork(state, slots), history)
    return Slots(running, step, plan, capacity)


def admit(
    slots: Slots,
    params: Any,
    rows: int | Sequence[int],
    prompt: jax.Array,  # i32[R, P], or rows of one length
    state: Any,
    *,
    limits: int | Sequence[int],
    lengths: jax.Array | None = None,  # i32[R]; None is P in every row
    key: jax.Array | None = None,  # one, or one for each row
    chunk: int | None = None,
) -> tuple[Slots, Chosen]:  # [R]
    """Put prompt r into the free slot `rows[r]`, for `limits[r]` tokens, and choose the first.

    `state` has R rows, which the prompts go on from; it is not consumed, so many may share a
    prefix. The slots are consumed.

    Under a trace of yours nobody sees whether a slot is taken: what it held is lost. Rows that are
    traced have to be different slots, from 0 on; one past the last is dropped. Where limits or
    lengths are traced, limits are clipped to what a slot holds.
    """
    _check_kept(slots)
    places = _rows(slots, rows)
    if not traced(slots.active, places):
        taken = places[jax.device_get(slots.active)[places]].tolist()
        if taken:
            raise ValueError(f"rows {taken} are taken: release them, or wait for their end")
    numpy: Any = jnp if traced(limits) else np
    arrays = _arrange(slots, prompt, lengths, state, numpy.atleast_1d(limits), key, chunk)
    if len(arrays[1]) != len(places):
        raise ValueError(f"prompt has {len(arrays[1])} rows for {len(places)} slots")
    return _admit(slots, params, jnp.asarray(places, jnp.int32), *arrays, state, chunk)


@partial(jax.jit, static_argnames="chunk", donate_argnames="slots")
def _admit(slots, params, rows, prompt, lengths, limits, keys, state, chunk):
    room = slots.capacity - prompt.shape[1]

    def enter(slots, params, rows, prompt, lengths, limits, keys, state):
        new, chosen = begin(
            slots.plan, slots.step, params, prompt, lengths, state, keys, limits, room, chunk
        )
        running = put(slots.running, rows, _end_poisoned(new, chosen))
        return replace(slots, running=running), chosen

    arrays = [slots, params, rows, prompt, lengths, limits, keys, state]
    return by_compiler(enter, arrays, (jax.tree.map(split, slots), split_rows(state)))


def advance_slots(
    slots: Slots, params: Any, steps: int, *, pause: bool = False
) -> tuple[Slots, Chosen]:  # [steps, B]
    """Up to `steps` tokens for every active row; -1, with log-probability 0, where there is none.

    The loop ends when no row is active; with `pause`, as soon as a slot is free, so that it can be
    filled. A row whose logits are poisoned ends with token -1 and log-probability NaN. The slots
    are consumed.
    """
    _check_kept(slots)
    check_count("steps", steps, 1)
    return _advance(slots, params, jax.device_put(np.bool_(pause)), steps)


@partial(jax.jit, static_argnames="steps", donate_argnames="slots")
def _advance(slots, params, pause, steps):
    results = jax.tree.map(split, slots), PartitionSpec(None, *split(slots.active))
    return by_compiler(partial(_loop, steps), [slots, params, pause], results)


def _loop(steps, slots, params, pause):
    rows = len(slots.active)

    def more(carry):
        n, running, _ = carry
        active = running.active
        return (n < steps) & active.any() & (active.all() | ~pause)

    def write(carry):
        n, running, out = carry
        running, chosen = advance(slots.plan, slots.step, params, running)
        out = jax.tree.map(lambda all, x: all.at[n].set(x), out, chosen)
        return n + 1, _end_poisoned(running, chosen), out

    nothing = Chosen(jnp.full((steps, rows), -1), jnp.zeros((steps, rows)), None)
    _, running, out = jax.lax.while_loop(more, write, (jnp.int32(0), slots.running, nothing))
    return replace(slots, running=running), out


def release(slots: Slots, rows: int | Sequence[int]) -> Slots:
    """Free these slots, whether or not their texts have ended. The slots are consumed."""
    _check_kept(slots)
    return _release(slots, jnp.asarray(_rows(slots, rows), jnp.int32))


@partial(jax.jit, donate_argnames="slots")
def _release(slots, rows):
    active = slots.active.at[rows].set(False)
    return replace(slots, running=replace(slots.running, active=active))


def _end_poisoned(running: Running, chosen: Chosen) -> Running:
    """A row without a token has nothing to go on from."""
    return replace(running, active=running.active & (chosen.token >= 0))


@dataclass(frozen=True)
class Request:
    """A text to be continued."""

    prompt: Sequence[int] | np.ndarray  # i32[P]
    num_tokens: int
    """New tokens at most."""
    key: jax.Array | None = None
    """For a sampler that draws."""
    id: Any = None
    """Comes back with what it gets; None is its number among all requests."""
    state: Any = None
    """One row to go on from: a prefix, an encoder's; not consumed. None is the empty one."""


End = Literal["stop", "length", "poisoned", "refused"]


@dataclass(frozen=True)
class Completion:
    """What a request got: all of it, or in a stream the newest of it."""

    id: Any
    tokens: np.ndarray  # i32[n]; a stop token included
    log_probs: np.ndarray  # f32[n]; as `Generation.log_probs`
    end: End | None
    """None: more is to come. Poisoned: no finite logit was left."""
    error: str | None = None
    """Why it was refused."""


def serve(
    step: Step,
    params: Any,
    requests: Iterable[Request | None],
    state: Any,
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
    """What each request gets, as soon as it has ended; with `stream`, in pieces as they come.

    `state` is one empty row, as `init_cache(config, 1, capacity)`; it stays whole. A request whose
    prompt and new tokens but the last are more than `capacity`, or that is wrong otherwise, is
    refused with its error, and the others go on.

    Requests are taken in order, one whenever a slot is free, and none overtakes another on its way
    into a slot. An iterator may yield None for "nothing yet": what runs goes on for up to
    `steps_per_call` tokens (for none, if nothing runs), then it is asked again. While it waits
    inside `next`, nobody advances. A slot that is free costs its share of a step all the same: with
    `pause`, a call ends as soon as a slot is free for who waits, which is fewer steps in more
    calls, and pays where a step takes much longer than a call.
    """
    check_count("steps_per_call", steps_per_call, 1)
    held = init_slots(
        step, params, state, slots, capacity, sampler=sampler, processors=processors, stop=stop
    )
    pieces = _pieces(held, params, iter(requests), state, steps_per_call, pause, chunk)
    return (piece for _, piece in pieces) if stream else _whole(pieces)


def _whole(pieces: Iterator[tuple[int, Completion]]) -> Iterator[Completion]:
    parts: dict[int, list[Completion]] = {}
    for number, piece in pieces:
        parts.setdefault(number, []).append(piece)
        if piece.end is not None:
            of = parts.pop(number)
            tokens = np.concatenate([part.tokens for part in of])
            log_probs = np.concatenate([part.log_probs for part in of])
            yield replace(piece, tokens=tokens, log_probs=log_probs)


@dataclass
class _Seat:
    """Who has a slot, by its number among all requests, and how many tokens it may still get."""

    number: int
    id: Any
    left: int

    def take(
        self,
        tokens: np.ndarray,  # i32[n]
        log_probs: np.ndarray,  # f32[n]
        stop: tuple[int, ...],
    ) -> Completion:
        """What it got in one call."""
        real = tokens >= 0
        self.left -= int(real.sum())
        end: End | None = "length" if self.left == 0 else None
        if real.any() and tokens[real][-1] in stop:
            end = "stop"
        if np.isnan(log_probs[~real]).any():
            end = "poisoned"
        return Completion(self.id, tokens[real], log_probs[real], end)


def _pieces(
    slots: Slots,
    params: Any,
    requests: Iterator[Request | None],
    empty: Any,
    steps: int,
    pause: bool,
    chunk: int | None,
) -> Iterator[tuple[int, Completion]]:
    stop, number, more = slots.plan.stop, 0, True
    seats: list[_Seat | None] = [None] * len(slots.active)
    while more or any(seats):
        first = {}
        while more and None in seats:
            try:
                request = next(requests)
            except StopIteration:
                more = False
                break
            if request is None:
                break
            name = getattr(request, "id", None)
            seat = _Seat(number, number if name is None else name, 0)
            number += 1
            try:
                arrays, state = _arrange_one(slots, request, empty, chunk)
                seat.left = request.num_tokens
            except ValueError as error:
                nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
                yield seat.number, Completion(seat.id, *nothing, "refused", str(error))
                continue
            row = seats.index(None)
            rows = jax.device_put(np.array([row], np.int32))
            slots, first[row] = _admit(slots, params, rows, *arrays, state, chunk)
            seats[row] = seat
        if not any(seats):
            continue
        waiting = jax.device_put(np.bool_(pause and more and None not in seats))
        slots, chosen = _advance(slots, params, waiting, steps)
        for row, one in first.items():  # read while the others advance
            tokens, log_probs = jax.device_get((one.token, one.log_prob))
            yield from _take(seats, row, tokens, log_probs, stop)
        tokens, log_probs = jax.device_get((chosen.token, chosen.log_prob))
        for row in range(len(seats)):
            yield from _take(seats, row, tokens[:, row], log_probs[:, row], stop)


def _take(
    seats: list[_Seat | None],
    row: int,
    tokens: np.ndarray,
    log_probs: np.ndarray,
    stop: tuple[int, ...],
) -> Iterator[tuple[int, Completion]]:
    seat = seats[row]
    if seat is None:
        return
    piece = seat.take(tokens, log_probs, stop)
    if piece.end is not None:
        seats[row] = None
    if piece.end is not None or len(piece.tokens):
        yield seat.number, piece


def _arrange_one(
    slots: Slots, request: Request, empty: Any, chunk: int | None
) -> tuple[tuple[jax.Array, ...], Any]:
    """As `_arrange`, and the state to go on from."""
    if not isinstance(request, Request):
        raise ValueError(f"request is a {type(request).__name__}: must be a Request")
    limit = request.num_tokens
    if not isinstance(limit, Integral) or isinstance(limit, bool):
        raise ValueError(f"num_tokens is {limit!r}: must be an integer")
    key = request.key
    if key is not None:
        key = _typed(key)[None]
    prompt = np.asarray(request.prompt)[None]
    state = empty if request.state is None else request.state
    return _arrange(slots, prompt, None, state, np.array([limit]), key, chunk), state


def _arrange(
    slots: Slots, prompt: Any, lengths: Any, state: Any, limits: Any, key: Any, chunk: int | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Checked: i32[R, P] padded to its bucket, lengths, limits and keys, each of R rows."""
    if chunk is not None:
        check_count("chunk", chunk, 1)
    prompt, lengths = check_prompt(prompt, lengths)
    rows, columns = prompt.shape
    if limits.shape != (rows,) or not np.issubdtype(limits.dtype, np.integer):
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
    if key is None and not isinstance(slots.plan.sampler, Greedy):
        raise ValueError(f"key is None: {slots.plan.sampler!r} draws random numbers")
    if getattr(key, "dtype", None) == jnp.uint32:
        key = _typed(key)
    keys, held = row_keys(key, rows), slots.running.keys
    if keys.dtype != held.dtype:
        raise ValueError(f"key is {keys.dtype}: the slots hold {held.dtype}")
    check_alive(state)
    _check_state(slots.running.state, state, rows)
    if hasattr(slots.step, "check") and not traced(prompt, total):
        slots.step.check(prompt, state, total)
    width = min(bucket(columns), slots.capacity)
    numpy: Any = jnp if traced(prompt) else np
    prompt = numpy.pad(prompt, ((0, 0), (0, max(0, width - columns))))[:, :width]
    arrays = prompt, lengths, limits
    if traced(*arrays):
        prompt, lengths, limits = (jnp.asarray(x, jnp.int32) for x in arrays)
    else:
        prompt, lengths, limits = jax.device_put(tuple(np.asarray(x, np.int32) for x in arrays))
    return prompt, lengths, limits, keys


def _typed(key: Any) -> jax.Array:  # key[]
    """Raw words, as older JAX has them, as the key they are: slots hold keys of one type."""
    check_key("key", key)
    raw = key.dtype == jnp.uint32
    return jax.random.wrap_key_data(jnp.asarray(key)) if raw else key


def _check_state(held: Any, state: Any, rows: int) -> None:
    """Of the kind that the slots have."""
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


def _rows(slots: Slots, rows: Any) -> Any:  # [R]
    places = jnp.atleast_1d(rows) if traced(rows) else np.atleast_1d(rows)
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


def _check_kept(slots: Slots) -> None:
    if not traced(slots.active) and slots.active.is_deleted():
        raise ValueError("slots were consumed by an earlier call: use those it returned")
