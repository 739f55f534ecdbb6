"""Engine that runs a model for many clients in one thread, with continuous batching.

Requests wait in a queue, in order of arrival, until the `Batcher` has a free slot. An answer does
not depend on other requests. At temperature 0 or with a seed, it is the same as from
`LanguageModel.generate` with `Sample(Temperature(t), TopP(p))` and `jax.random.key(seed)`. If a
prompt starts with the text of a slot, as in the next turn of a chat, it continues from a copy of
that slot's cache.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache.kv_cache import check_cache_dtype
from transformer_jax.checks import check_count
from transformer_jax.config import ConfigError
from transformer_jax.decoding.completion import (
    WithoutHistory,
    first_key,
    known_ids,
    max_text_tokens,
)
from transformer_jax.decoding.continuous_batching import Batcher, Completion, Request
from transformer_jax.decoding.samplers import RowSampling, Sample
from transformer_jax.decoding.slots import init_slots
from transformer_jax.decoding.step import make_step
from transformer_jax.decoding.structured import Grammar, Matcher
from transformer_jax.decoding.writer import TextWriter
from transformer_jax.models.factory import init_decode_state
from transformer_jax.server.protocol import Part, RequestError, TextRequest, Token
from transformer_jax.server.schemas import MOST_TOP
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import check_unpadded, plain
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.untrusted_files import brief
from transformer_jax.values import short_repr

CONTEXT = 2048
"""Default limit on the number of tokens in a prompt and its answer."""

LEAST_LOG_PROB = -9999.0
"""Replacement for the logarithm of 0, which JSON cannot represent."""


@short_repr
@dataclass(eq=False)
class Ticket:
    """Submitted request and the state of its answer.

    Attributes:
        request: the request.
        ids: the tokens of its prompt.
        num_tokens: maximum number of new tokens.
        deliver: function that the engine's thread calls with each part. The last part has an `end`.
        matcher: matcher for the required form of the answer; None allows any text.
        cancelled: whether the client no longer waits for the answer.
        writer: converter from tokens to text, which `submit` sets.
        count: number of tokens generated so far.
        decided: number of characters delivered so far.
        held: tokens whose text may still change.
    """

    request: TextRequest
    ids: np.ndarray  # i32[P]
    num_tokens: int
    deliver: Callable[[Part], None]
    matcher: Matcher | None = None
    cancelled: bool = False
    writer: TextWriter = field(init=False)
    count: int = 0
    decided: int = 0
    held: list[Token] = field(default_factory=list)


class Engine:
    """Decoder that serves requests from many clients in the slots of one batch.

    Args:
        model: a model that continues text or answers messages.
        slots: number of requests to decode in parallel.
        context: maximum number of tokens in a prompt and its answer, not counting the last token,
            which is never read. None means the model's limit or 2048, whichever is smaller.
        queue: maximum number of requests that wait for a slot.
        steps: maximum number of decoding steps between checks of the queue.
        cache_dtype: dtype of the cached keys and values; None means the compute dtype.

    Raises:
        ConfigError: if the model does not generate text, or if `context` exceeds the model's limit.
        ValueError: if a count is not an integer of at least 1.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        slots: int = 8,
        context: int | None = None,
        queue: int = 64,
        steps: int = 4,
        cache_dtype: jax.typing.DTypeLike | None = None,
    ) -> None:
        for name, count in dict(slots=slots, queue=queue, steps=steps).items():
            check_count(name, count, 1)
        if model.kind not in ("text", "chat"):
            raise ConfigError(f"serve: {model.instead()}")
        longest = max_text_tokens(model.config)
        if context is None:
            context = min(longest, CONTEXT)
        check_count("context", context, 1)
        if cache_dtype is not None:
            check_cache_dtype("cache_dtype", cache_dtype)
        if context > longest:
            raise ConfigError(f"context is {context}: must be at most max_len, {longest}")
        tokenizer = plain(model.tokenizer)
        # A published model can answer messages if its folder contains a chat template.
        templates = isinstance(tokenizer, PretrainedTokenizer) and bool(tokenizer.chat_templates)
        self.model, self.slots, self.context, self.queue = model, slots, context, queue
        self.answers_chats = model.kind == "chat" or templates
        self._steps = steps
        decoder: Any = model.module
        self._step: Any = make_step(decoder)
        self._empty: Any = init_decode_state(model.config, None, 1, context, dtype=cache_dtype)
        known = map(WithoutHistory, known_ids(model.config, model.tokenizer))
        self._processors = (*model.model.processors, *known)
        # Prefixes cannot be shared if a ring cache overwrites their keys, if a layer has a state,
        # if processors or edits must see their tokens, or if int8 would round their keys twice.
        whole = model.config.supports("cache") and model.config.window is None
        whole = whole and not getattr(model.config, "has_state", False)
        unseen = not model.model.processors and not decoder.edits
        self._shares = whole and cache_dtype is None and unseen
        # Only the engine's thread changes `_running`, but callers also change `_waiting`.
        self._running: list[Ticket] = []
        self.batcher = self._new_batcher()
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closing = False
        # A daemon thread does not keep a program alive that never calls `stop`.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests that have a slot."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """Whether the engine accepts and decodes requests."""
        return self._thread.is_alive() and not self._closing

    def start(self) -> None:
        """Start the engine's thread, and compile the programs by running an internal request."""
        self._thread.start()
        done = threading.Event()
        request = TextRequest("completion", (), temperature=0.0)
        ids = np.zeros(1, np.int32)
        # The first token comes from the prompt program, and the second comes from the decoding
        # program.
        count = min(2, self.context)

        def deliver(part: Part) -> None:
            if part.end is not None:
                done.set()

        self.submit(request, ids, count, deliver)
        done.wait()

    def stop(self) -> None:
        """Fail all requests, and stop the engine's thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def read(self, request: TextRequest) -> tuple[np.ndarray, int]:  # i32[P]
        """Return the token IDs of a prompt, and the maximum number of new tokens.

        Raises RequestError if the model cannot read the prompt, or if the prompt does not fit.
        """
        chat = request.endpoint == "chat"
        name = "messages" if chat else "prompt"
        if chat and not self.answers_chats:
            rule = "the model has no chat template; use /v1/completions"
            raise RequestError(f"messages: {rule}")
        if not chat and self.model.kind == "chat":
            raise RequestError("prompt: the model answers messages; use /v1/chat/completions")
        try:
            if chat:
                ids = self.model.read_messages(request.prompt)  # type: ignore[arg-type]
            elif isinstance(request.prompt, str):
                ids = self.model.read(request.prompt)
            else:
                ids = self.model.known(np.array(request.prompt, np.int32), "the prompt")
                check_unpadded(self.model.tokenizer, ids, "the prompt")
        except DataError as error:
            raise RequestError(str(error), param=name) from None
        if not len(ids):
            raise RequestError(f"{name} has no tokens: must have at least one", param=name)
        room = self.context + 1 - len(ids)
        count = min(room, self.context) if request.num_tokens is None else request.num_tokens
        if room < 1 or count > room:
            new = "" if request.num_tokens is None else f" and {count} new ones are requested"
            message = (
                f"{name} has {len(ids)} tokens{new}: must be at most {self.context + 1} in all"
            )
            raise RequestError(message, param=name, code="context_length_exceeded")
        return ids, count

    def match(self, request: TextRequest) -> Matcher | None:
        """Return a matcher for the requested form, or None; raise RequestError if it is invalid."""
        if request.form is None:
            return None
        form, content, param = request.form
        config, stop = self.model.config, tuple(self.model.model.stop_ids)
        try:
            return Grammar(
                form, content, self.model.tokenizer, config.vocab_size, stop, name=param
            ).start()
        except ValueError as error:
            raise RequestError(str(error), param=param) from None

    def submit(
        self,
        request: TextRequest,
        ids: np.ndarray,
        num_tokens: int,
        deliver: Callable[[Part], None],
        matcher: Matcher | None = None,
    ) -> Ticket:
        """Add a request to the queue; raise RequestError if the queue is full."""
        ticket = Ticket(request, ids, num_tokens, deliver, matcher)
        ticket.writer = TextWriter(self.model.tokenizer, request.stop, self.model.model.stop_ids)
        with self._changed:
            if not self.alive:
                raise RequestError("the server is stopping", 503, code="stopping")
            if self.waiting >= self.queue:
                message = f"{self.queue} requests are already waiting: try again later"
                raise RequestError(message, 429, code="queue_full")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request in any state, and free its slot."""
        with self._changed:
            ticket.cancelled = True
            # If the engine's thread has just taken the request from the queue, it will free the
            # slot.
            with contextlib.suppress(ValueError):
                self._waiting.remove(ticket)
            self._changed.notify()

    # The methods below run only in the engine's thread.

    def _new_batcher(self) -> Batcher[Any]:
        slots = init_slots(
            self._step, self.model.params, self._empty, self.slots, self.context,
            sampler=Sample(), processors=self._processors, stop=self.model.model.stop_ids,
            sampling=True,
        )  # fmt: skip
        return Batcher(
            slots, self.model.params, self._requests(), self._empty, steps=self._steps,
            pause=lambda: bool(self._waiting), shares=self._shares,
        )  # fmt: skip

    def _requests(self) -> Iterator[Request | None]:
        """Yield the oldest waiting request, or None if there is none."""
        while True:
            with self._changed:
                ticket = self._waiting.popleft() if self._waiting else None
                if ticket is not None:
                    self._running.append(ticket)
            if ticket is None:
                yield None
                continue
            request = ticket.request
            # Without a seed, identical requests must not get identical answers.
            seed = secrets.randbits(32) if request.seed is None else request.seed
            # Compute 1 - p in float64, because float32 would lose digits if p is close to 1.
            how = [[request.temperature], [request.top_p], [1 - request.top_p]]
            yield Request(
                ticket.ids, ticket.num_tokens, key=first_key(jax.random.key(seed)), id=ticket,
                constraint=ticket.matcher, sampling=RowSampling(*jnp.array(how, jnp.float32)),
                top=MOST_TOP if request.top else 0,  # one program for any number
            )  # fmt: skip

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._closing):
                    self._changed.wait()
                if self._closing:
                    break
            try:
                # Only this thread may use the batcher, so `cancel` sets a flag.
                for ticket in [ticket for ticket in self._running if ticket.cancelled]:
                    self._free(ticket)
                for new in self.batcher.turn():
                    self._write(new)
            except Exception as error:  # such as out of memory, where later requests may succeed
                print(f"serve: {type(error).__name__}: {brief(error)}", file=sys.stderr)
                # The failed call may have consumed the state of all slots, so every request fails.
                self._fail("the server could not complete this request")
                self.batcher = self._new_batcher()
        self._fail("the server is stopping")
        while self._waiting:
            _deliver(self._waiting.popleft(), Part(end="failed", error="the server is stopping"))

    def _fail(self, why: str) -> None:
        # Clients wait until their answer has an `end`.
        while self._running:
            ticket = self._running.pop()
            _deliver(ticket, Part(count=ticket.count, end="failed", error=why))

    def _free(self, ticket: Ticket) -> None:
        self.batcher.drop(ticket)
        self._running.remove(ticket)

    def _write(self, new: Completion) -> None:
        """Deliver the new text that can no longer change, and free the slot after the answer."""
        ticket: Ticket = new.id
        request, writer, text = ticket.request, ticket.writer, ""
        for n, token in enumerate(new.tokens.tolist()):
            ticket.count += 1
            text += writer.feed(token)
            if request.top is not None and token not in writer.stop_ids:
                ticket.held.append(self._token(token, writer.start, new, n, request.top))
            if writer.ended:
                break
        # a stop string ends the answer even if later tokens of this turn failed
        end = "stop" if writer.ended else new.end
        if end is not None:
            self._free(ticket)
        if end in ("nonfinite", "refused"):
            status = 500 if end == "nonfinite" else 400
            _deliver(ticket, Part("", (), ticket.count, "failed", new.error, status))
            return
        if end is not None and not writer.ended:
            text += writer.finish()
        # The first word of an answer may start with a space, as in `LanguageModel.chat`.
        begins = not ticket.decided
        ticket.decided += len(text)
        whole = end is not None and not request.stop
        # Tokens are sent with their text, which is delayed if it could be part of a stop string.
        tokens = tuple(t for t in ticket.held if whole or t.offset < ticket.decided)
        ticket.held = ticket.held[len(tokens) :]
        if begins and request.endpoint == "chat" and ticket.matcher is None:
            text = text.removeprefix(" ")
        if end is not None or text or tokens:
            part = Part(text, tokens, ticket.count, end, shared=new.shared)  # type: ignore[arg-type]
            _deliver(ticket, part)

    def _token(self, token: int, offset: int, new: Completion, n: int, count: int) -> Token:
        top: tuple[tuple[bytes, float], ...] = ()
        if count and new.likeliest is not None:
            ids, log_probs = (x[n, :count].tolist() for x in new.likeliest)
            pairs = zip(ids, log_probs, strict=True)
            top = tuple((self._bytes(i), max(p, LEAST_LOG_PROB)) for i, p in pairs)
        log_prob = max(new.log_probs[n].item(), LEAST_LOG_PROB)
        return Token(self._bytes(token), log_prob, offset, top)

    def _bytes(self, token: int) -> bytes:
        """Return the bytes of a token, or b"" for an ID that only pads the vocabulary."""
        known = token < self.model.tokenizer.vocab_size
        return self.model.tokenizer.to_bytes([token]) if known else b""


def _deliver(ticket: Ticket, part: Part) -> None:
    try:
        ticket.deliver(part)
    except RuntimeError:  # the client's event loop is closed
        ticket.cancelled = True
