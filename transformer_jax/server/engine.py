"""Run a model for many clients at once: one thread, continuous batching, first come first served.

A request waits in a queue until a slot is free, and its row is then decoded beside the others. What
it gets depends on no other row: with temperature 0 it is what `LanguageModel.generate` writes, and
with a seed what it writes with `Sample(Temperature(t), TopP(p))` and `jax.random.key(seed)`.

A slot keeps what its last request read until another takes it. A prompt that begins as the text of
a slot does, as the next turn of a chat, goes on from a copy of its cache.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache.model_cache import rewind_cache
from transformer_jax.checks import check_count
from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.decoding.batch_rows import gather_rows
from transformer_jax.decoding.constraints import allowed_tokens
from transformer_jax.decoding.continuous_batching import (
    admit,
    advance_slots,
    init_slots,
    release,
)
from transformer_jax.decoding.generation import StepOutput
from transformer_jax.decoding.samplers import RowSampling, Sample
from transformer_jax.decoding.slots import Slots
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_decode_state
from transformer_jax.server.protocol import Asked, Part, RequestError, Token
from transformer_jax.server.schemas import MOST_TOP
from transformer_jax.shown import short_repr
from transformer_jax.text.completion import (
    WithoutHistory,
    first_key,
    known_ids,
    longest_text,
)
from transformer_jax.text.structured import Grammar, Matcher
from transformer_jax.text.writer import NO_TOKEN, TextWriter
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import check_unpadded, plain
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.untrusted_files import brief
from transformer_jax.use.language_model import LanguageModel

CONTEXT = 2048
"""Most tokens of a prompt and its answer, unless the model reads fewer or the caller says more."""

LEAST_SHARED = 16
"""Fewest tokens that are taken from the cache of another request: fewer are read as soon."""

LEAST_LOG_PROB = -9999.0
"""What stands for the logarithm of 0, which JSON has no number for."""


@short_repr
@dataclass(eq=False)
class Ticket:
    """Hold a request from its arrival to its end.

    Attributes:
        asked: the request.
        ids: i32[P], its prompt.
        num_tokens: the most new tokens.
        deliver: called from the engine's thread with each part; the last one has an end.
        matcher: of the form that the answer is to have; None lets it have any.
        cancelled: set when nobody waits for it any more.
    """

    asked: Asked
    ids: np.ndarray  # i32[P]
    num_tokens: int
    deliver: Callable[[Part], None]
    matcher: Matcher | None = None
    cancelled: bool = False


@short_repr
@dataclass(eq=False)
class _Row:
    """Hold a request that has a slot, and what was written of it."""

    ticket: Ticket
    writer: TextWriter
    shared: int = 0
    """Tokens of the prompt that were not read anew."""
    count: int = 0
    decided: int = 0
    """Characters that were delivered."""
    held: list[Token] = field(default_factory=list)
    """Tokens of text that is not decided yet."""
    whole: bool = False
    """Whether the text has its form, and nothing can follow it."""


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
        if context > longest:
            raise ConfigError(f"context is {context}: must be at most max_len {longest}")
        own = plain(model.tokenizer)
        templates = isinstance(own, PretrainedTokenizer) and bool(own.chat_templates)
        self.model, self.slots, self.context, self.queue = model, slots, context, queue
        self.answers_chats = model.kind == "chat" or templates
        self._steps = steps
        decoder: Any = build(model.config)
        self._step: Any = make_step(decoder)
        self._empty: Any = init_decode_state(model.config, None, 1, context, dtype=cache_dtype)
        known = map(WithoutHistory, known_ids(model.config, model.tokenizer))
        self._processors = (*model.model.processors, *known)
        self._held = self._free_slots()
        self._rows: list[_Row | None] = [None] * slots
        # A ring forgets what a prefix needs, processors must see it, and int8 would round it twice.
        whole = isinstance(model.config, ModelConfig) and model.config.window is None
        self._shares = whole and cache_dtype is None and not model.model.processors
        self._texts: list[list[int]] = [[] for _ in range(slots)]
        """The tokens that each slot has read, and the newest one."""
        self._taken = [0] * slots
        """When each slot was taken, counted in requests."""
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
        return sum(row is not None for row in self._rows)

    @property
    def alive(self) -> bool:
        """Whether requests are decoded."""
        return self._thread.is_alive() and not self._closing

    def start(self) -> None:
        """Compile the decoding program, and decode what is submitted from now on."""
        self._thread.start()
        done = threading.Event()
        asked = Asked("completion", (), temperature=0.0)
        ids = np.zeros(1, np.int32)
        count = min(2, self.context)

        def deliver(part: Part) -> None:
            if part.end is not None:
                done.set()

        self._submit(Ticket(asked, ids, count, deliver))
        done.wait()

    def stop(self) -> None:
        """End all requests as failed, and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def read(self, asked: Asked) -> tuple[np.ndarray, int]:  # i32[P]
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

    def match(self, asked: Asked) -> Matcher | None:
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
        asked: Asked,
        ids: np.ndarray,
        num_tokens: int,
        deliver: Callable[[Part], None],
        matcher: Matcher | None = None,
    ) -> Ticket:
        """Put a request that was read into the queue; RequestError where it is full."""
        ticket = Ticket(asked, ids, num_tokens, deliver, matcher)
        self._submit(ticket)
        return ticket

    def _submit(self, ticket: Ticket) -> None:
        with self._changed:
            if not self.alive:
                raise RequestError("the server is stopping", 503, code="stopping")
            if self.waiting >= self.queue:
                message = f"{self.queue} requests wait already: try again later"
                raise RequestError(message, 429, code="queue_full")
            self._waiting.append(ticket)
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Give up a request, whether it waits, is decoded or has ended; its slot is freed."""
        with self._changed:
            ticket.cancelled = True
            with contextlib.suppress(ValueError):
                self._waiting.remove(ticket)
            self._changed.notify()

    # The engine's thread: the methods below run in it alone.

    def _free_slots(self) -> Slots[Any]:
        return init_slots(
            self._step, self.model.params, self._empty, self.slots, self.context,
            sampler=Sample(), processors=self._processors, stop=self.model.model.stop_ids,
            sampling=True,
        )  # fmt: skip

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or any(self._rows) or self._closing):
                    self._changed.wait()
                if self._closing:
                    break
            try:
                self._turn()
            except Exception as error:  # such as too little memory: the next requests go on
                print(f"serve: {type(error).__name__}: {brief(error)}", file=sys.stderr)
                self._fail("the server could not go on with this request")
                self._held = self._free_slots()
                self._texts = [[] for _ in self._rows]
        self._fail("the server is stopping")
        while self._waiting:
            _deliver(self._waiting.popleft(), Part(end="failed", error="the server is stopping"))

    def _fail(self, why: str) -> None:
        for number, row in enumerate(self._rows):
            if row is not None:
                self._rows[number] = None
                _deliver(row.ticket, Part(count=row.count, end="failed", error=why))

    def _turn(self) -> None:
        """Free the slots of clients who have gone, fill those that are free, and advance all."""
        for number, row in enumerate(self._rows):
            if row is not None and row.ticket.cancelled:
                self._free(number)
        first: dict[int, StepOutput] = {}
        while None in self._rows and (ticket := self._next()) is not None:
            free = [number for number, row in enumerate(self._rows) if row is None]
            number = min(free, key=lambda n: self._taken[n])  # whose text is the oldest
            if ticket.matcher is not None and ticket.matcher.ended:
                _deliver(ticket, Part(end="stop"))
                continue
            self._taken[number] = max(self._taken) + 1
            output = self._admit(number, ticket)
            if ticket.matcher is None:
                first[number] = output
            else:  # which has to know the token before it says what may follow
                self._write(number, jax.device_get(output))
        if not any(self._rows):
            return
        allowed = allowed_tokens(
            [None if row is None else row.ticket.matcher for row in self._rows]
        )
        top = max(MOST_TOP if row and row.ticket.asked.top else 0 for row in self._rows)
        self._held, output = advance_slots(
            self._held, self.model.params, self._steps if allowed is None else 1,
            pause=bool(self._waiting), top=top, allowed=allowed,
        )  # fmt: skip
        for number, one in first.items():  # read while the device advances the rows
            self._write(number, jax.device_get(one))
        output = jax.device_get(output)
        for number, row in enumerate(self._rows):
            if row is not None:
                self._write(number, jax.tree.map(lambda x, n=number: x[:, n], output))

    def _next(self) -> Ticket | None:
        """Take the request that waits longest."""
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def _admit(self, number: int, ticket: Ticket) -> StepOutput:
        asked, (state, shared) = ticket.asked, self._shared(ticket.ids)
        matcher = ticket.matcher
        ends = self.model.model.stop_ids
        writer = TextWriter(self.model.tokenizer, asked.stop, ends)
        self._rows[number] = _Row(ticket, writer, shared)
        self._texts[number] = ticket.ids.tolist()
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        self._held, output = admit(
            self._held, self.model.params, number, ticket.ids[None, shared:], state,
            limits=ticket.num_tokens, key=first_key(jax.random.key(seed))[None],
            sampling=RowSampling(
                *jnp.array([[asked.temperature], [asked.top_p], [1 - asked.top_p]], jnp.float32)
            ),
            top=MOST_TOP if asked.top else 0,
            allowed=None if matcher is None else matcher.allowed[None],
        )  # fmt: skip
        return output

    def _shared(self, ids: np.ndarray) -> tuple[Any, int]:
        """Return a row that has read the beginning of a prompt, and how many tokens these are."""
        best, row = 0, 0
        for number, text in enumerate(self._texts if self._shares else ()):
            read = min(len(text), len(ids)) - 1  # the newest token of a text, and one to go on from
            known = np.array(text[: max(0, read)], ids.dtype)
            differs = np.flatnonzero(known != ids[: len(known)])
            length = int(differs[0]) if len(differs) else len(known)
            if length > best:
                best, row = length, number
        if best < LEAST_SHARED:
            return self._empty, 0
        return _begun(self._held.decode_state.state, np.int32(row), np.int32(best)), best

    def _write(self, number: int, output: StepOutput) -> None:
        """Deliver what a call gave the request of a slot, and free the slot at its end."""
        row = self._rows[number]
        if row is None:
            return
        asked, part, chosen = row.ticket.asked, Part(count=row.count), list[str]()
        matcher = row.ticket.matcher
        for n, token in enumerate(output.token.tolist()):
            if token < 0:
                if np.isnan(output.log_prob[n]):
                    part = Part(count=row.count, end="failed", error=NO_TOKEN)
                    self._texts[number] = []
                    break
                continue
            row.count += 1
            self._texts[number].append(token)
            chosen.append(row.writer.feed(token))
            if asked.top is not None and token not in row.writer.stop_ids:
                row.held.append(self._token(token, row.writer.start, output, n, asked.top))
            if matcher is not None and not row.writer.ended:
                try:
                    matcher.read(token)
                except ValueError as error:  # it cannot be written, or is too much to follow
                    part = Part(count=row.count, end="failed", error=str(error), status=400)
                    break
                row.whole = matcher.ended
            if row.writer.ended or row.whole or row.count == row.ticket.num_tokens:
                break
        if part.end is None:
            part = self._part(row, chosen)
        if part.end is not None:
            self._free(number)
        if part.end is not None or part.text or part.tokens:
            _deliver(row.ticket, part)

    def _part(self, row: _Row, chosen: Sequence[str]) -> Part:
        """Return the text that is decided now, with its tokens."""
        end, text = None, "".join(chosen)
        if row.writer.ended:
            end = "stop"
        elif row.whole:
            end = "stop"
            text += row.writer.finish()
        elif row.count == row.ticket.num_tokens:
            end = "length"
            text += row.writer.finish()
        begins = not row.decided
        row.decided += len(text)
        whole = end is not None and not row.ticket.asked.stop
        tokens = [t for t in row.held if whole or t.offset < row.decided]
        row.held = row.held[len(tokens) :]
        if begins and row.ticket.asked.endpoint == "chat" and row.ticket.matcher is None:
            text = text.removeprefix(" ")
        return Part(text, tuple(tokens), row.count, end, shared=row.shared)  # type: ignore[arg-type]

    def _token(self, token: int, offset: int, output: StepOutput, n: int, count: int) -> Token:
        top: tuple[tuple[bytes, float], ...] = ()
        if count:
            ids, log_probs = output.seen.tokens[n, :count], output.seen.log_probs[n, :count]
            pairs = zip(ids.tolist(), log_probs.tolist(), strict=True)
            top = tuple((self._bytes(i), _finite(p)) for i, p in pairs)
        return Token(self._bytes(token), _finite(output.log_prob[n].item()), offset, top)

    def _bytes(self, token: int) -> bytes:
        """Return the bytes of a token, of which a padded vocabulary has more than its tokenizer."""
        known = token < self.model.tokenizer.vocab_size
        return self.model.tokenizer.to_bytes([token]) if known else b""

    def _free(self, number: int) -> None:
        self._held = release(self._held, number)
        self._rows[number] = None


@jax.jit
def _begun(state: Any, row: jax.Array, length: jax.Array) -> Any:
    """Return one row of a state as it was when it had read `length` tokens."""
    return rewind_cache(gather_rows(state, row[None]), length[None])


def _deliver(ticket: Ticket, part: Part) -> None:
    try:
        ticket.deliver(part)
    except RuntimeError:  # the event loop that waited is closed
        ticket.cancelled = True


def _finite(log_prob: float) -> float:
    return max(log_prob, LEAST_LOG_PROB)
