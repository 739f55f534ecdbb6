"""Serve many requests with continuous batching: a request takes a slot as soon as one is free.

A `Batcher` is the only scheduler: it admits requests into `Slots`, advances all of them with one
program, and decides how each ends. `serve_requests`, the HTTP engine, the lm-eval adapter and
constrained texts are loops around it. A request's tokens are those of `generate` for it alone with
`key=request.key[None]`, whatever the other rows contain (Yu et al. 2022, Orca, section 3.2).

Requests of an encoder-decoder, and those that continue a prefix, bring a state of one row. All
slots have the same shapes, so sources are padded to one length, with position -1 after their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Generic, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache.model_cache import rewind_cache
from transformer_jax.checks import check_count, check_key
from transformer_jax.config.keywords import known_keywords
from transformer_jax.decoding.arguments import Prompts
from transformer_jax.decoding.batch_rows import State, gather_rows
from transformer_jax.decoding.constraints import Constraint, allowed_tokens
from transformer_jax.decoding.generation import NO_TOKEN, Likeliest, StepOutput
from transformer_jax.decoding.logit_processors import HistoryProcessor
from transformer_jax.decoding.samplers import RowSampling, Sampler, as_threefry
from transformer_jax.decoding.slots import (
    Slots,
    admit_rows,
    advance_rows,
    check_prompts,
    free_rows,
    init_slots,
)
from transformer_jax.decoding.step import Params, StepLike
from transformer_jax.values import value_class

LEAST_SHARED = 16
"""Fewest tokens that are copied from the slot of another request: fewer are read as fast."""


@value_class
class Request:
    """A text to continue.

    Attributes:
        prompt: token ids, at least one.
        num_tokens: the most new tokens, at least 1.
        key: a single key, for a sampler that draws; the tokens are those of `generate` with
            `key[None]`.
        id: comes back with the completion; None is the request's number among all, from 0.
        state: one row to continue from, as a prefix or an encoder's source; not consumed. None is
            the empty one.
        constraint: restricts each next token of this request; None allows all.
        sampling: of one row, for slots with `sampling`.
        top: how many of the likeliest tokens are returned with each token.
    """

    prompt: Sequence[int] | np.ndarray  # i32[P]
    num_tokens: int
    key: jax.Array | None = None
    id: Any = None  # of the caller's own type, which comes back
    state: Any = None  # of the model's own type
    constraint: Constraint | None = None
    sampling: RowSampling | None = None
    top: int = 0


End = Literal["stop", "length", "nonfinite", "refused"]


@value_class
class Completion:
    """The tokens of a request: all of them, or in a stream the newest ones.

    Attributes:
        id: the request's.
        tokens: a stop token included.
        log_probs: as `Generation.log_probs`.
        end: why it ended: "stop" (also if its constraint has ended), "length", "nonfinite" (no
            finite logit was left) or "refused" (the request is wrong, or its constraint cannot
            follow the text). None: more is to come.
        error: why it was refused, or is nonfinite.
        likeliest: of [n, top], if the request has `top`.
        shared: tokens of the prompt that were copied from another slot instead of read.
    """

    id: Any  # as in the request
    tokens: np.ndarray  # i32[n]
    log_probs: np.ndarray  # f32[n]
    end: End | None
    error: str | None = None
    likeliest: Likeliest | None = None
    shared: int = 0


@known_keywords
def serve_requests(
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
    While `next(requests)` blocks, no request advances. If it returns None, the requests in the
    slots advance by up to `steps_per_call` tokens before the next call of it.

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
    if chunk is not None:
        check_count("chunk", chunk, 1)
    if not isinstance(requests, Iterable):
        rule = "must be an iterable of Request"
        raise ValueError(f"requests is a {type(requests).__name__}: {rule}")
    held = init_slots(
        step, params, state, slots, capacity, sampler=sampler, processors=processors, stop=stop
    )
    return iter(
        Batcher(
            held, params, iter(requests), state, steps=steps_per_call, pause=lambda: pause,
            chunk=chunk, stream=stream,
        )
    )  # fmt: skip


@dataclass
class _Row:
    """A request that has a slot."""

    request: Request
    id: Any
    left: int
    """Tokens that it may still get."""
    shared: int
    parts: list[Completion] = field(default_factory=list)


@dataclass(eq=False)
class Batcher(Generic[State]):
    """The scheduler of one batch: admit waiting requests, advance all rows, emit their tokens.

        for part in batcher:  # or `batcher.turn()`, again and again, for a caller with other duties
            print(part.id, part.tokens, part.end)

    Attributes:
        slots: of `init_slots`; each turn consumes them.
        params: the model's parameters.
        requests: in the order of their arrival; None means that none waits now.
        empty: the state of one row before any token; not consumed.
        steps: the most tokens of each row between two looks at the requests.
        pause: whether a call ends as soon as a slot is free; queried only if all are taken.
        chunk: how many tokens of a prompt are read at a time; None reads all at once.
        stream: emit the newest tokens of each request; otherwise all of them at its end.
        shares: whether a prompt that begins like the text of a slot continues from a copy of its
            cache; for states that `rewind_cache` takes back exactly.
    """

    slots: Slots[State]
    params: Params
    requests: Iterator[Request | None]
    empty: State
    steps: int = 8
    pause: Callable[[], bool] = lambda: False
    chunk: int | None = None
    stream: bool = True
    shares: bool = False

    def __post_init__(self) -> None:
        count = len(self.slots.active)
        self.rows: list[_Row | None] = [None] * count
        self.more, self.number = True, 0
        self._texts: list[list[int]] = [[] for _ in range(count)]
        """Tokens that each slot has read, and the newest one, which it has not."""
        self._taken = [0] * count
        """When each slot was taken, counted in requests."""

    def __iter__(self) -> Iterator[Completion]:
        """Take turns until no request is left."""
        while self.more or any(self.rows):
            yield from self.turn()

    def turn(self) -> Iterator[Completion]:
        """Fill the free slots, advance all rows once, and yield the tokens that requests got."""
        first: dict[int, StepOutput] = {}
        while self.more and None in self.rows:
            try:
                request = next(self.requests)
            except StopIteration:
                self.more = False
                break
            if request is None:
                break
            number, self.number = self.number, self.number + 1
            name = getattr(request, "id", None)
            name = number if name is None else name
            # the slot whose text is the oldest, as the newest ones are the likeliest to be shared
            row = min(
                (n for n, held in enumerate(self.rows) if held is None), key=self._taken.__getitem__
            )
            # A wrong request must not end the others: its error is its completion.
            nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
            try:
                prompts, state, shared = self._read(request)
            except ValueError as error:
                yield Completion(name, *nothing, "refused", str(error))
                continue
            constraint = request.constraint
            if constraint is not None and constraint.ended:
                yield Completion(name, *nothing, "stop")
                continue
            self.rows[row] = _Row(request, name, request.num_tokens, shared)
            self._taken[row] = max(self._taken) + 1
            if self.shares:
                self._texts[row] = np.asarray(request.prompt).tolist()
            # Explicit transfers work under `jax.transfer_guard("disallow")`.
            at, allowed = jax.device_put((np.array([row], np.int32), allowed_tokens([constraint])))
            self.slots, output = admit_rows(
                self.slots, self.params, at, prompts._replace(allowed=allowed), state, self.chunk,
                request.top,
            )  # fmt: skip
            if constraint is None:
                first[row] = output
            else:  # the constraint has to read this token before it restricts the next one
                yield from self._emit(row, jax.device_get(output))
        if not any(self.rows):
            return
        # With a free slot no request waits, so there is nothing to pause for.
        waiting = self.more and None not in self.rows and self.pause()
        allowed = allowed_tokens(
            [None if held is None else held.request.constraint for held in self.rows]
        )
        # a constraint is queried on the host before each token
        steps = self.steps if allowed is None else 1
        # One program serves all rows: it returns as many as the most curious request wants.
        top = max(held.request.top for held in self.rows if held is not None)
        pause, allowed = jax.device_put((np.bool_(waiting), allowed))
        self.slots, output = advance_rows(self.slots, self.params, pause, steps, top, allowed)
        for row, one in first.items():  # read while the device advances the rows
            yield from self._emit(row, jax.device_get(one))
        output = jax.device_get(output)
        for row, held in enumerate(self.rows):
            if held is not None:
                yield from self._emit(row, jax.tree.map(lambda x, row=row: x[:, row], output))

    def drop(self, name: Any) -> None:  # the id that the request's parts have
        """Free the slot of a request that has not ended; nothing more comes of it."""
        for row, held in enumerate(self.rows):
            if held is not None and held.id is name:
                self._free(row)

    def _free(self, row: int) -> None:
        self.rows[row] = None
        self.slots = free_rows(self.slots, jax.device_put(np.array([row], np.int32)))

    def _read(self, request: Request) -> tuple[Prompts, State, int]:
        """Return a request as prompts of one row, the state they continue, and tokens in it."""
        if not isinstance(request, Request):
            raise ValueError(f"request is a {type(request).__name__}: must be a Request")
        limit = request.num_tokens
        if not isinstance(limit, Integral) or isinstance(limit, bool):
            raise ValueError(f"num_tokens is {limit!r}: must be an integer")
        check_count("top", request.top, 0)
        key = request.key
        if key is not None:
            check_key("key", key)
            key = as_threefry(jnp.asarray(key))[None]
        ids = np.asarray(request.prompt)
        state, shared = (self.empty if request.state is None else request.state), 0
        if self.shares and request.state is None:
            # The newest token of a slot was not read, and of a prompt one token must be left to
            # read.
            lengths = [_common(text[:-1], ids[:-1]) for text in self._texts]
            best = int(np.argmax(lengths))
            if lengths[best] >= LEAST_SHARED:
                shared = lengths[best]
                state = _begun(self.slots.decode_state.state, np.int32(best), np.int32(shared))
        prompts = check_prompts(
            self.slots, ids[None, shared:], None, state, np.array([limit]), key, request.sampling
        )
        return prompts, state, shared

    def _emit(self, row: int, output: StepOutput) -> Iterator[Completion]:
        """Yield the tokens [n] that a call gave a row, and free the slot if it ends with them."""
        held = self.rows[row]
        if held is None:  # it ended with an earlier part of this turn
            return
        log_prob = np.asarray(output.log_prob)
        real = np.asarray(output.token) >= 0
        tokens, log_probs = np.asarray(output.token)[real], log_prob[real]
        constraint = held.request.constraint
        end: End | None = None
        error = None
        # The end is decided here a second time: the program knows stops and limits, but no
        # constraints.
        held.left -= len(tokens)
        if held.left == 0:
            end = "length"
        if len(tokens) and tokens[-1] in self.slots.options.stop:
            end = "stop"
        elif constraint is not None:
            try:
                for token in tokens.tolist():
                    constraint.read(token)
                end = "stop" if constraint.ended else end
            except ValueError as cause:
                end, error = "refused", str(cause)
        # Token -1 has log-probability NaN if the logits were not finite, and 0 after a row's end.
        if np.isnan(log_prob[~real]).any():
            end, error = "nonfinite", NO_TOKEN
        if self.shares:
            # the row itself may have read more, if it was dropped; a prefix of its text is enough
            self._texts[row] += tokens.tolist()
            if end == "nonfinite":
                self._texts[row] = []  # its cache may have NaN
        if end is not None:
            if constraint is None:
                self.rows[row] = None
            else:  # the program does not know that the text has ended
                self._free(row)
        top, likeliest = held.request.top, None
        if top:  # another row may have asked for more
            likeliest = jax.tree.map(lambda x: x[real, :top], output.seen)
        part = Completion(held.id, tokens, log_probs, end, error, likeliest, held.shared)
        if self.stream:
            if end is not None or len(tokens):
                yield part
            return
        held.parts.append(part)
        if end is not None:
            arrays = [(part.tokens, part.log_probs, part.likeliest) for part in held.parts]
            whole = jax.tree.map(lambda *parts: np.concatenate(parts), *arrays)
            yield replace(part, tokens=whole[0], log_probs=whole[1], likeliest=whole[2])


def _common(text: list[int], ids: np.ndarray) -> int:
    """Return how many tokens two texts have in common before they differ."""
    known = np.array(text[: len(ids)], ids.dtype)
    differs = np.flatnonzero(known != ids[: len(known)])
    return int(differs[0]) if len(differs) else len(known)


@jax.jit
def _begun(state: Any, row: jax.Array, length: jax.Array) -> Any:
    """Return one row of a state as it was when it had read `length` tokens."""
    return rewind_cache(gather_rows(state, row[None]), length[None])
