"""Continuous batching: many requests share a batch, and each starts as soon as a slot is free.

`Batcher` is the only scheduler. It admits requests into `Slots`, advances all of them with one
program, and decides when each request ends. `serve_requests`, the HTTP engine, the lm-eval adapter
and constrained generation are loops around a `Batcher`. The tokens of a request equal those of
`generate` with `key=request.key[None]`, and do not depend on the other rows (Orca, Yu et al. 2022,
section 3.2).

Requests to an encoder-decoder, and requests that continue a prefix, include a state with one row.
Pad all sources to the same length, with position -1 for padding, because all slots have the same
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Generic, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache.model_cache import refuse_state, rewind_cache
from transformer_jax.checks import check_count, check_key
from transformer_jax.config.keywords import known_keywords
from transformer_jax.decoding.arguments import Prompts
from transformer_jax.decoding.batch_rows import State, gather_rows
from transformer_jax.decoding.constraints import Constraint, allowed_tokens
from transformer_jax.decoding.generation import NO_TOKEN, StepOutput, TopTokens
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
"""Minimum number of tokens to copy from another slot. Reading fewer is as fast as copying."""


@value_class
class Request:
    """Prompt to continue, with its settings.

    Attributes:
        prompt: token IDs, at least one.
        num_tokens: the maximum number of new tokens, at least 1.
        key: a single PRNG key, required if the sampler draws random numbers. The tokens equal those
            of `generate` with `key[None]`.
        id: ID to return with the completion; None means the number of the request, counted from 0.
        state: the state to continue, with one row, such as the state after a prefix or an encoder's
            source. It is not consumed. None means the empty state.
        constraint: the constraint on each next token; None allows all tokens.
        sampling: settings for one row, for slots with `sampling`.
        top: number of most likely tokens to return with each token.
    """

    prompt: Sequence[int] | np.ndarray  # i32[P]
    num_tokens: int
    key: jax.Array | None = None
    id: Any = None  # any type, returned unchanged
    state: Any = None  # the state type of the model
    constraint: Constraint | None = None
    sampling: RowSampling | None = None
    top: int = 0


End = Literal["stop", "length", "nonfinite", "refused"]


@value_class
class Completion:
    """All tokens of a request, or only the newest tokens when streaming.

    Attributes:
        id: the ID of the request.
        tokens: i32[n], the new tokens, including a stop token.
        log_probs: f32[n], as in `Generation.log_probs`.
        end: the reason why the request ended: "stop" (also if its constraint ended), "length",
            "nonfinite" (no finite logit was left) or "refused" (the request is invalid, or its
            constraint cannot continue the text). None means that more tokens follow.
        error: the error message for "refused" or "nonfinite".
        likeliest: the most likely tokens, [n, top], if the request specifies `top`.
        shared: the number of prompt tokens that were copied from another slot instead of being
            read.
    """

    id: Any  # as in the request
    tokens: np.ndarray  # i32[n]
    log_probs: np.ndarray  # f32[n]
    end: End | None
    error: str | None = None
    likeliest: TopTokens | None = None
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
    """Yield the completion of each request when it ends, or in parts if `stream` is set.

    Requests are served in order, and each one occupies the next free slot. No request advances
    while `next(requests)` blocks. If `next(requests)` returns None, the requests in the slots
    advance by up to `steps_per_call` tokens before it is called again.

    Args:
        step: the step of the model, as in `generate`.
        params: the model's parameters, passed to the step.
        requests: an iterable of `Request`, which may yield None if no request is waiting. An
            invalid request is refused with an error message, and the others continue.
        state: an empty state with one row, such as `init_cache(config, 1, capacity)`. It is not
            consumed.
        slots: number of requests to decode at the same time, at least 1.
        capacity: the maximum length of a prompt and its continuation, without the last token.
        steps_per_call: the maximum number of tokens per slot in each call of the program, at least
            1.
        pause: whether to end a call as soon as a slot is free for a waiting request, instead of
            leaving the slot idle for the remaining steps. This causes more calls, so it is useful
            if a step takes much longer than the overhead of a call.
        sampler: function of (key, logits) that chooses a token; None means `Greedy()`.
        processors: functions that change the logits based on the text so far, before sampling.
        stop: one or more token IDs that end a request.
        chunk: number of prompt tokens to read at a time; None means all at once.
        stream: whether to yield the newest tokens of each request after each call.

    Yields:
        A `Completion` with the `id` of the request, its tokens i32[n] and their log-probabilities
        f32[n]. `end` contains the reason why the request ended, or None if more tokens follow.

    Raises:
        ValueError: If an argument of the call is invalid.
    """
    check_count("steps_per_call", steps_per_call, 1)
    if chunk is not None:
        check_count("chunk", chunk, 1)
    if not isinstance(requests, Iterable):
        rule = "must be an iterable of Request objects"
        raise ValueError(f"requests is of type {type(requests).__name__}: {rule}")
    empty_slots = init_slots(
        step, params, state, slots, capacity, sampler=sampler, processors=processors, stop=stop
    )
    return iter(
        Batcher(
            empty_slots, params, iter(requests), state, steps=steps_per_call, pause=lambda: pause,
            chunk=chunk, stream=stream,
        )
    )  # fmt: skip


@dataclass
class _Row:
    """Request that occupies a slot."""

    request: Request
    id: Any
    left: int
    """Number of tokens that may still be generated."""
    shared: int
    parts: list[Completion] = field(default_factory=list)


@dataclass(eq=False)
class Batcher(Generic[State]):
    """Scheduler that admits waiting requests, advances all rows of a batch, and emits their tokens.

        for part in batcher:  # or call `batcher.turn()` repeatedly from your own loop
            print(part.id, part.tokens, part.end)

    Attributes:
        slots: the result of `init_slots`, which each turn consumes.
        params: the model's parameters.
        requests: requests in order of arrival. A value of None means that no request is waiting
            now.
        empty: a state with one row and without any tokens. It is not consumed.
        steps: the maximum number of tokens per row and turn.
        pause: a function that returns whether to end a call as soon as a slot is free. It is called
            only if all slots are occupied.
        chunk: number of prompt tokens to read at a time; None means all at once.
        stream: whether to emit the newest tokens of each request after each turn, instead of all
            tokens when the request ends.
        shares: whether a prompt that starts with the same tokens as the text in a slot continues
            from a copy of its cache. This requires states that `rewind_cache` restores exactly.
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
        if self.shares:
            refuse_state(self.empty, "shares=True")
        count = len(self.slots.active)
        self.rows: list[_Row | None] = [None] * count
        self.more, self.number = True, 0
        self._texts: list[list[int]] = [[] for _ in range(count)]
        """Tokens that each slot has read, followed by the newest token, which has not been read."""
        self._admitted = [0] * count
        """Number of the request that last filled each slot."""

    def __iter__(self) -> Iterator[Completion]:
        """Run turns until there are no more requests."""
        while self.more or any(self.rows):
            yield from self.turn()

    def turn(self) -> Iterator[Completion]:
        """Fill the free slots, advance all rows, and yield the new tokens of each request.

        Admission chooses the first token after a prompt. Then, up to `steps` tokens are added to
        each row, or only one token if any request has a constraint, because a constraint is queried
        on the host before each token.
        """
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
            # Overwrite the oldest text, because newer texts are more likely to be shared.
            free = (n for n, occupant in enumerate(self.rows) if occupant is None)
            row = min(free, key=self._admitted.__getitem__)
            # An invalid request must not stop the other requests, so its completion reports the
            # error.
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
            self._admitted[row] = max(self._admitted) + 1
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
            else:  # the constraint must read this token before it restricts the next token
                yield from self._emit(row, jax.device_get(output))
        if not any(self.rows):
            return
        # If a slot is free, no request is waiting, so there is no reason to pause.
        waiting = self.more and None not in self.rows and self.pause()
        allowed = allowed_tokens([None if r is None else r.request.constraint for r in self.rows])
        steps = self.steps if allowed is None else 1
        # One program serves all rows, so it uses the largest `top` of any request.
        top = max(occupant.request.top for occupant in self.rows if occupant is not None)
        pause, allowed = jax.device_put((np.bool_(waiting), allowed))
        self.slots, output = advance_rows(self.slots, self.params, pause, steps, top, allowed)
        for row, one in first.items():  # fetch these while the device advances the rows
            yield from self._emit(row, jax.device_get(one))
        output = jax.device_get(output)
        for row, occupant in enumerate(self.rows):
            if occupant is not None:
                yield from self._emit(row, jax.tree.map(lambda x, row=row: x[:, row], output))

    def drop(self, name: Any) -> None:  # the ID of the request
        """Cancel the request with this ID, free its slot, and emit no more of its tokens."""
        for row, occupant in enumerate(self.rows):
            if occupant is None:
                continue
            try:
                same = occupant.id is name or bool(occupant.id == name)
            except (TypeError, ValueError):  # arrays do not have a single truth value
                same = False
            if same:
                self._free(row)

    def _free(self, row: int) -> None:
        self.rows[row] = None
        self.slots = free_rows(self.slots, jax.device_put(np.array([row], np.int32)))

    def _read(self, request: Request) -> tuple[Prompts, State, int]:
        """Check a request and return its prompt, its state, and the number of shared tokens."""
        if not isinstance(request, Request):
            raise ValueError(f"request is of type {type(request).__name__}: must be a Request")
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
            # The newest token in a slot has not been read, and at least one prompt token must be
            # left to read.
            lengths = [_common_prefix(text[:-1], ids[:-1]) for text in self._texts]
            best = int(np.argmax(lengths))
            if lengths[best] >= LEAST_SHARED:
                shared = lengths[best]
                rows = self.slots.decode_state.state
                state = _rewound_row(rows, np.int32(best), np.int32(shared))
        prompts = check_prompts(
            self.slots, ids[None, shared:], None, state, np.array([limit]), key, request.sampling
        )
        return prompts, state, shared

    def _emit(self, row: int, output: StepOutput) -> Iterator[Completion]:
        """Yield the new tokens of a row and free its slot if the request has ended."""
        occupant = self.rows[row]
        if occupant is None:  # the request ended earlier in this turn
            return
        log_prob = np.asarray(output.log_prob)
        real = np.asarray(output.token) >= 0
        tokens, log_probs = np.asarray(output.token)[real], log_prob[real]
        constraint = occupant.request.constraint
        end: End | None = None
        error = None
        # Determine the end again here, because the program knows stop tokens and limits but not
        # constraints.
        occupant.left -= len(tokens)
        if occupant.left == 0:
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
        # Token -1 has log-probability NaN if the logits were nonfinite, or 0 after the end of a
        # row.
        if np.isnan(log_prob[~real]).any():
            end, error = "nonfinite", NO_TOKEN
        if self.shares:
            # A dropped row may have read more tokens, but a prefix of its text is enough.
            self._texts[row] += tokens.tolist()
            if end == "nonfinite":
                self._texts[row] = []  # the cache may contain NaN
        if end is not None:
            if constraint is None:
                self.rows[row] = None
            else:  # the program does not know that the text has ended
                self._free(row)
        top, likeliest = occupant.request.top, None
        if top:  # another row may have requested more tokens
            likeliest = jax.tree.map(lambda x: x[real, :top], output.seen)
        part = Completion(occupant.id, tokens, log_probs, end, error, likeliest, occupant.shared)
        if self.stream:
            if end is not None or len(tokens):
                yield part
            return
        occupant.parts.append(part)
        if end is not None:
            arrays = [(part.tokens, part.log_probs, part.likeliest) for part in occupant.parts]
            whole = jax.tree.map(lambda *parts: np.concatenate(parts), *arrays)
            yield replace(part, tokens=whole[0], log_probs=whole[1], likeliest=whole[2])


def _common_prefix(text: list[int], ids: np.ndarray) -> int:
    start = np.array(text[: len(ids)], ids.dtype)
    differs = np.flatnonzero(start != ids[: len(start)])
    return int(differs[0]) if len(differs) else len(start)


@jax.jit
def _rewound_row(state: Any, row: jax.Array, length: jax.Array) -> Any:
    """Return one row of a state, rewound to its first `length` tokens."""
    return rewind_cache(gather_rows(state, row[None]), length[None])
