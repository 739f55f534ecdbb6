"""Run a model for many clients at once: one thread, continuous batching, first come first served.

A request waits in a queue until the `Batcher` has a free slot for it. Its answer depends on no
other request: with temperature 0 it is that of `LanguageModel.generate`, and with a seed that of
`Sample(Temperature(t), TopP(p))` and `jax.random.key(seed)`. A prompt that begins like the text of
a slot, such as the next turn of a chat, continues from a copy of its cache.
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
from transformer_jax.decoding.completion import WithoutHistory, first_key, known_ids, longest_text
from transformer_jax.decoding.continuous_batching import Batcher, Completion, Request
from transformer_jax.decoding.samplers import RowSampling, Sample
from transformer_jax.decoding.slots import init_slots
from transformer_jax.decoding.step import make_step
from transformer_jax.decoding.structured import Grammar, Matcher
from transformer_jax.decoding.writer import TextWriter
from transformer_jax.models.factory import build, init_decode_state
from transformer_jax.server.protocol import Part, RequestError, TextRequest, Token
from transformer_jax.server.schemas import MOST_TOP
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import check_unpadded, plain
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.untrusted_files import brief
from transformer_jax.values import short_repr

CONTEXT = 2048
"""Most tokens of a prompt and its answer, unless the model reads fewer or the caller says more."""

LEAST_LOG_PROB = -9999.0
"""What stands for the logarithm of 0, which JSON has no number for."""


@short_repr
@dataclass(eq=False)
class Ticket:
    """A request from its arrival to its end.

    Attributes:
        asked: the request.
        ids: its prompt.
        num_tokens: the most new tokens.
        deliver: called from the engine's thread with each part; the last one has an end.
        matcher: of the form that the answer must have; None lets it have any.
        cancelled: set when nobody waits for it any more.
        writer: of its text, once it was submitted.
        count: tokens that were chosen.
        decided: characters that were delivered.
        held: tokens of text that is not decided yet.
    """

    asked: TextRequest
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
    """Decode the requests of many clients in the slots of one batch.

    Args:
        model: one that goes on with a text or answers messages.
        slots: how many requests are decoded side by side.
        context: most tokens of a prompt and its answer but the last, which is never read; None is
            the model's, at most 2048.
        queue: how many requests may wait for a slot.
        steps: most tokens of each row between two looks at the queue.
        cache_dtype: of keys and values; None is the compute dtype.

    Raises:
        ConfigError: if the model writes no text, or `context` is longer than it reads.
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
        longest = longest_text(model.config)
        if context is None:
            context = min(longest, CONTEXT)
        check_count("context", context, 1)
        if cache_dtype is not None:
            check_cache_dtype("cache_dtype", cache_dtype)
        if context > longest:
            raise ConfigError(f"context is {context}: must be at most max_len {longest}")
        own = plain(model.tokenizer)
        # A published model answers messages if its folder says how they are written.
        templates = isinstance(own, PretrainedTokenizer) and bool(own.chat_templates)
        self.model, self.slots, self.context, self.queue = model, slots, context, queue
        self.answers_chats = model.kind == "chat" or templates
        self._steps = steps
        decoder: Any = model.module
        self._step: Any = make_step(decoder)
        self._empty: Any = init_decode_state(model.config, None, 1, context, dtype=cache_dtype)
        known = map(WithoutHistory, known_ids(model.config, model.tokenizer))
        self._processors = (*model.model.processors, *known)
        # A ring forgets what a prefix needs, processors and edits must see it, and int8 would round
        # it twice.
        whole = model.config.supports("cache") and model.config.window is None
        unseen = not model.model.processors and not decoder.edits
        self._shares = whole and cache_dtype is None and unseen
        # Only the engine's thread changes it; the queue is changed by its callers, too.
        self._running: list[Ticket] = []
        self.batcher = self._new_batcher()
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many requests have a slot."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """Whether requests are decoded."""
        return self._thread.is_alive() and not self._closing

    def start(self) -> None:
        """Compile the decoding program, and decode what is submitted from now on."""
        self._thread.start()
        done = threading.Event()
        asked = TextRequest("completion", (), temperature=0.0)
        # A request of its own: the first client would wait for the compiler otherwise.
        ids = np.zeros(1, np.int32)
        # Two tokens: the first comes with the prompt, the second from the decoding program.
        count = min(2, self.context)

        def deliver(part: Part) -> None:
            if part.end is not None:
                done.set()

        self.submit(asked, ids, count, deliver)
        done.wait()

    def stop(self) -> None:
        """End all requests as failed, and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def read(self, asked: TextRequest) -> tuple[np.ndarray, int]:  # i32[P]
        """Return the tokens of a request's prompt, and how many may follow.

        RequestError where the model cannot read it, or where it does not fit.
        """
        chat = asked.endpoint == "chat"
        name = "messages" if chat else "prompt"
        if chat and not self.answers_chats:
            raise RequestError("messages: the model has no chat template; it goes on with a prompt")
        if not chat and self.model.kind == "chat":
            raise RequestError("prompt: the model answers messages, /v1/chat/completions")
        try:
            if chat:
                ids = self.model.read_messages(asked.prompt)  # type: ignore[arg-type]
            elif isinstance(asked.prompt, str):
                ids = self.model.read(asked.prompt)
            else:
                ids = self.model.known(np.array(asked.prompt, np.int32), "the prompt")
                check_unpadded(self.model.tokenizer, ids, "the prompt")
        except DataError as error:
            raise RequestError(str(error), param=name) from None
        if not len(ids):
            raise RequestError(f"{name}: has no token", param=name)
        room = self.context + 1 - len(ids)
        count = min(room, self.context) if asked.num_tokens is None else asked.num_tokens
        if room < 1 or count > room:
            wanted = "" if asked.num_tokens is None else f" and {count} new ones are asked for"
            message = (
                f"{name} has {len(ids)} tokens{wanted}: "
                f"together they must be at most {self.context + 1}"
            )
            raise RequestError(message, param=name, code="context_length_exceeded")
        return ids, count

    def match(self, asked: TextRequest) -> Matcher | None:
        """Return what says which tokens an answer of the form may have; RequestError if it is none.

        None where any text may be the answer.
        """
        if asked.form is None:
            return None
        form, content, param = asked.form
        config, stop = self.model.config, tuple(self.model.model.stop_ids)
        try:
            return Grammar(
                form, content, self.model.tokenizer, config.vocab_size, stop, name=param
            ).start()
        except ValueError as error:
            raise RequestError(str(error), param=param) from None

    def submit(
        self,
        asked: TextRequest,
        ids: np.ndarray,
        num_tokens: int,
        deliver: Callable[[Part], None],
        matcher: Matcher | None = None,
    ) -> Ticket:
        """Put a request that was read into the queue; RequestError where it is full."""
        ticket = Ticket(asked, ids, num_tokens, deliver, matcher)
        ticket.writer = TextWriter(self.model.tokenizer, asked.stop, self.model.model.stop_ids)
        with self._changed:
            if not self.alive:
                raise RequestError("the server is stopping", 503, code="stopping")
            if self.waiting >= self.queue:
                message = f"{self.queue} requests wait already: try again later"
                raise RequestError(message, 429, code="queue_full")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Give up a request, whether it waits, is decoded or has ended; its slot is freed."""
        with self._changed:
            ticket.cancelled = True
            # It may have been taken from the queue a moment ago: then the thread frees its slot.
            with contextlib.suppress(ValueError):
                self._waiting.remove(ticket)
            self._changed.notify()

    # The engine's thread: the methods below run in it alone.

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
        """Yield the request that waits longest, and None while there is none."""
        while True:
            with self._changed:
                ticket = self._waiting.popleft() if self._waiting else None
                if ticket is not None:
                    self._running.append(ticket)
            if ticket is None:
                yield None
                continue
            asked = ticket.asked
            # Without a seed, equal requests must not get equal answers.
            seed = secrets.randbits(32) if asked.seed is None else asked.seed
            # 1 - p in Python's float64: float32 would lose digits of a p near 1.
            how = [[asked.temperature], [asked.top_p], [1 - asked.top_p]]
            yield Request(
                ticket.ids, ticket.num_tokens, key=first_key(jax.random.key(seed)), id=ticket,
                constraint=ticket.matcher, sampling=RowSampling(*jnp.array(how, jnp.float32)),
                top=MOST_TOP if asked.top else 0,  # one program, whatever number is asked for
            )  # fmt: skip

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._closing):
                    self._changed.wait()
                if self._closing:
                    break
            try:
                # Only this thread touches the batcher: a client's `cancel` sets a flag.
                for ticket in [ticket for ticket in self._running if ticket.cancelled]:
                    self._free(ticket)
                for new in self.batcher.turn():
                    self._write(new)
            except Exception as error:  # such as too little memory: the next requests go on
                print(f"serve: {type(error).__name__}: {brief(error)}", file=sys.stderr)
                self._fail("the server could not go on with this request")
                self.batcher = self._new_batcher()
        self._fail("the server is stopping")
        while self._waiting:
            _deliver(self._waiting.popleft(), Part(end="failed", error="the server is stopping"))

    def _fail(self, why: str) -> None:
        # Clients wait for the end of their answers, so each gets one.
        while self._running:
            ticket = self._running.pop()
            _deliver(ticket, Part(count=ticket.count, end="failed", error=why))

    def _free(self, ticket: Ticket) -> None:
        self.batcher.drop(ticket)
        self._running.remove(ticket)

    def _write(self, new: Completion) -> None:
        """Deliver the text of new tokens that is decided now, and free the slot at its end."""
        ticket: Ticket = new.id
        asked, writer, text = ticket.asked, ticket.writer, ""
        for n, token in enumerate(new.tokens.tolist()):
            ticket.count += 1
            text += writer.feed(token)
            if asked.top is not None and token not in writer.stop_ids:
                ticket.held.append(self._token(token, writer.start, new, n, asked.top))
            if writer.ended:
                break
        # a text that its stop string ends is whole, whatever comes of the tokens after it
        end = "stop" if writer.ended else new.end
        if end is not None:
            self._free(ticket)
        if end in ("nonfinite", "refused"):
            status = 500 if end == "nonfinite" else 400
            _deliver(ticket, Part("", (), ticket.count, "failed", new.error, status))
            return
        if end is not None and not writer.ended:
            text += writer.finish()
        # The first word of an answer may bring a space, as in `LanguageModel.chat`.
        begins = not ticket.decided
        ticket.decided += len(text)
        whole = end is not None and not asked.stop
        # Tokens are shown with their text, which may wait: it could be part of a stop string.
        tokens = tuple(t for t in ticket.held if whole or t.offset < ticket.decided)
        ticket.held = ticket.held[len(tokens) :]
        if begins and asked.endpoint == "chat" and ticket.matcher is None:
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
        """Return the bytes of a token, of which a padded vocabulary has more than its tokenizer."""
        known = token < self.model.tokenizer.vocab_size
        return self.model.tokenizer.to_bytes([token]) if known else b""


def _deliver(ticket: Ticket, part: Part) -> None:
    try:
        ticket.deliver(part)
    except RuntimeError:  # the event loop that waited is closed
        ticket.cancelled = True
