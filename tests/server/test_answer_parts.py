"""Parts of the engine's answers, for scripted tokens of the batcher."""

from __future__ import annotations

import queue
from dataclasses import replace

import numpy as np
import pytest

from tests.server.models import running, tiny
from transformer_jax.decoding.continuous_batching import Completion
from transformer_jax.decoding.generation import NO_TOKEN, TopTokens
from transformer_jax.server import engine as engines
from transformer_jax.server.engine import LEAST_LOG_PROB
from transformer_jax.server.protocol import Part, TextRequest, Token

END = 257
TOP = np.tile([32, 97, 259], (9, 1)), np.tile([-0.5, -1.5, -2.5], (9, 1))


def new(tokens, end=None, log_probs=None, **more):
    ids = [ord(one) if isinstance(one, str) else one for one in tokens]
    log_probs = -np.arange(1.0, 1 + len(ids)) if log_probs is None else log_probs
    likeliest = TopTokens(TOP[0][: len(ids)], TOP[1][: len(ids)])
    return Completion(0, np.array(ids), np.array(log_probs), end, likeliest=likeliest, **more)


class Scripted:
    """A batcher that returns the completions in `script`, one per turn."""

    def __init__(self, slots, params, requests, empty, **options):
        self.requests, self.running = requests, {}
        self.script, self.dropped = [[new("a", "length")]], []  # first, the engine's own request

    def turn(self):
        while (request := next(self.requests)) is not None:
            self.running[request.id] = list(self.script.pop(0))
        for ticket, left in list(self.running.items()):
            if ticket in self.running:
                part = replace(left.pop(0), id=ticket)
                if part.end is not None:
                    del self.running[ticket]
                yield part

    def drop(self, ticket):
        self.dropped.append(self.running.pop(ticket, None))


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(engines, "Batcher", Scripted)
    monkeypatch.setattr(engines, "init_slots", lambda *arguments, **options: None)
    with running(tiny(), slots=2) as found:
        found.batcher.dropped.clear()
        yield found


def answer(engine, *script, matcher=None, **fields) -> list[Part]:
    """Return the parts of the answer to a request that gets these completions."""
    parts: queue.Queue[Part] = queue.Queue()
    engine.batcher.script.append(script)
    request = TextRequest(**dict(endpoint="completion", prompt=(), temperature=1.0) | fields)
    engine.submit(request, np.arange(3), 9, parts.put, matcher)
    found = [parts.get(timeout=20)]
    while found[-1].end is None:
        found.append(parts.get(timeout=20))
    return found


CASES = {
    "the end of a text": ([new("ab", shared=2), new([]), new(["c", END], "stop", shared=2)], {},
                          [Part("ab", (), 2, None, shared=2), Part("c", (), 4, "stop", shared=2)]),
    "its length": ([new("abc", "length")], {}, [Part("abc", (), 3, "length")]),
    "a stop text, whose beginning waits": ([new("a"), new("b"), new("abcd")], dict(stop=("bc",)),
                                           [Part("a", (), 1), Part("ba", (), 5, "stop")]),
    "a stop text before the length": (
        [new("abc", "length")], dict(stop=("b",)), [Part("a", (), 2, "stop")]
    ),
    "what may begin a stop text, at the length": (
        [new("ab", "length")], dict(stop=("bc",)), [Part("ab", (), 2, "length")]
    ),
    "a chat, without its first space": ([new(" a"), new(" b", "length")], dict(endpoint="chat"),
                                        [Part("a", (), 2), Part(" b", (), 4, "length")]),
    "a chat of a form, with it": (
        [new(" a", "stop")], dict(endpoint="chat", matcher="any"), [Part(" a", (), 2, "stop")]
    ),
    "a form": ([new("ab", "stop")], dict(matcher="any"), [Part("ab", (), 2, "stop")]),
    "an empty form": ([new([], "stop")], dict(matcher="any"), [Part("", (), 0, "stop")]),
    "a form that cannot go on": ([new("ab", "refused", error="no b")], dict(matcher="any"),
                                 [Part(count=2, end="failed", error="no b", status=400)]),
    "a stop text before it": (
        [new("ab", "refused", error="no b")], dict(matcher="any", stop=("a",)),
        [Part("", (), 1, "stop")],
    ),
    "no likeliest token": (
        [new("a", "nonfinite", error=NO_TOKEN)], {}, [Part(count=1, end="failed", error=NO_TOKEN)]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("script", "fields", "parts"), CASES.values(), ids=CASES)
def test_server_streams_answer_in_parts(engine, script, fields, parts):
    assert answer(engine, *script, **fields) == parts
    assert engine.running == 0 and not engine.batcher.running
    assert len(engine.batcher.dropped) == 1, "the slot is freed"


def test_streamed_tokens_include_top_log_probabilities(engine):
    script = new("ab", log_probs=[-0.5, -np.inf]), new(["c", END], "stop")
    parts = answer(engine, *script, top=2, stop=("bd",))
    top = ((b" ", -0.5), (b"a", -1.5))
    one, two, three = (
        Token(text, log_prob, offset, top)
        for text, log_prob, offset in ((b"a", -0.5, 0), (b"b", LEAST_LOG_PROB, 1), (b"c", -1.0, 2))
    )
    assert [(part.text, part.tokens) for part in parts] == [("a", (one,)), ("bc", (two, three))]
    (part,) = answer(engine, new("a", "length"), top=0)
    assert part.tokens == (Token(b"a", -1.0, 0, ()),)
    (part,) = answer(engine, new("a", "length"), top=3)
    assert part.tokens[0].top[2] == (b"", -2.5), "the tokenizer has fewer tokens than the model"


def test_failed_request_or_closed_event_loop_ends_request(engine, capsys):
    parts = answer(engine, new("ab"))  # the script has no more: the turn fails
    assert parts[0] == Part("ab", (), 2)
    why = "the server could not complete this request"
    assert parts[1:] == [Part(count=2, end="failed", error=why)]
    assert "IndexError" in capsys.readouterr().err

    def closed(part):
        raise RuntimeError("closed")

    engine.batcher.script[:] = [[new("a")] * 9]
    request = TextRequest("completion", (), temperature=1.0)
    ticket = engine.submit(request, np.arange(3), 9, closed)
    assert answer(engine, new("c", "length")) == [Part("c", (), 1, "length")]
    assert ticket.cancelled
