"""What the engine makes of a decoder's output: its parts of an answer, without a decoder."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from transformer_jax.server import engine as engines
from transformer_jax.server.engine import LEAST_LOG_PROB, NO_TOKEN, Engine, Ticket, _Row
from transformer_jax.server.protocol import Asked, Part, Token
from transformer_jax.text.writer import TextWriter
from transformer_jax.tokenizers.trained import CharTokenizer

TOKENIZER, END = CharTokenizer(" abcdefg"), 8


@pytest.fixture
def engine(monkeypatch) -> Engine:
    """An engine of two slots whose state is a list of the slots that were freed."""
    made = Engine.__new__(Engine)
    made.model = SimpleNamespace(tokenizer=TOKENIZER, model=SimpleNamespace(stop_ids=(END,)))
    made._rows, made._texts, made._held = [None, None], [[], []], []
    made._shares, made._empty = True, "empty"
    monkeypatch.setattr(engines, "release", lambda held, number: [*held, number])
    return made


def output(tokens, log_probs=None, top=3):
    log_probs = -np.arange(1.0, 1 + len(tokens)) if log_probs is None else np.array(log_probs)
    seen = SimpleNamespace(
        tokens=np.tile(np.arange(top), (len(tokens), 1)),
        log_probs=np.tile(-np.arange(top) - 0.5, (len(tokens), 1)),
    )
    return SimpleNamespace(token=np.array(tokens), log_prob=log_probs, seen=seen)


def begin(engine, number=1, num_tokens=9, matcher=None, **asked):
    """Put a request into a slot; its parts are returned."""
    parts = []
    asked = Asked(**dict(endpoint="completion", prompt=(), temperature=1.0) | asked)
    ticket = Ticket(asked, np.arange(3), num_tokens, parts.append, matcher)
    writer = TextWriter(TOKENIZER, asked.stop, (END,))
    engine._rows[number] = _Row(ticket, writer, shared=2)
    return parts


def test_a_text_comes_in_parts_and_ends_by_its_end_or_its_length(engine):
    parts = begin(engine)
    engine._write(1, output([1, 2]))
    engine._write(1, output([-1, -1], [-1.0, -1.0]))  # a row that waits
    engine._write(1, output([3, END, 4]))
    assert parts == [
        Part("ab", (), 2, None, shared=2), Part("c", (), 4, "stop", shared=2)
    ]  # fmt: skip
    assert (
        engine._rows == [None, None] and engine._held == [1] and engine._texts[1] == [1, 2, 3, END]
    )
    parts = begin(engine, 0, num_tokens=3)
    engine._write(0, output([1, 2, 3, 4]))
    assert parts == [Part("abc", (), 3, "length", shared=2)] and engine._held == [1, 0]
    parts = begin(engine, 0, stop=("bc",))
    engine._write(0, output([1]))
    engine._write(0, output([2]))  # it may begin the end
    engine._write(0, output([1, 2, 3]))
    assert [(part.text, part.end) for part in parts] == [("a", None), ("ba", "stop")]
    engine._write(0, output([1]))  # to a slot that is free
    assert len(parts) == 2
    parts = begin(engine, 0, endpoint="chat")
    engine._write(0, output([0, 1]))
    engine._write(0, output([0, 2]))
    assert [part.text for part in parts] == ["a", " b"]  # without the first space of an answer


def test_a_row_without_a_likeliest_token_fails(engine):
    parts = begin(engine)
    engine._write(1, output([1, -1, 2], [-1.0, np.nan, -1.0]))
    assert parts == [Part(count=1, end="failed", error=NO_TOKEN)]
    assert engine._texts[1] == [] and engine._held == [1] and engine._rows[1] is None


def test_tokens_come_with_the_likeliest_and_wait_for_their_text(engine):
    parts = begin(engine, top=2, stop=("bd",))
    engine._write(1, output([1, 2], [-0.5, -np.inf]))
    engine._write(1, output([3, END]))
    top = ((b" ", -0.5), (b"a", -1.5))
    one, two, three = (
        Token(text, log_prob, offset, top)
        for text, log_prob, offset in ((b"a", -0.5, 0), (b"b", LEAST_LOG_PROB, 1), (b"c", -1.0, 2))
    )
    assert [(part.text, part.tokens) for part in parts] == [("a", (one,)), ("bc", (two, three))]
    parts = begin(engine, top=0)
    engine._write(1, output([1]))
    assert parts[0].tokens == (Token(b"a", -1.0, 0, ()),)
    assert engine._bytes(7) == b"g" and engine._bytes(8) == b""


class Once:
    """A form that is `count` tokens long, none of them 5."""

    def __init__(self, count):
        self.left, self.ended = count, False

    def read(self, token):
        if token == 5:
            raise ValueError("no 5")
        self.left -= 1
        self.ended = self.left == 0


def test_an_answer_with_a_form_ends_with_it(engine):
    parts = begin(engine, matcher=Once(2))
    engine._write(1, output([1, 2, 3]))
    assert parts == [Part("ab", (), 2, "stop", shared=2)]
    parts = begin(engine, matcher=Once(2))
    engine._write(1, output([1, 5, 3]))
    assert parts == [Part(count=2, end="failed", error="no 5", status=400)]


def test_the_longest_beginning_that_is_read_already_is_shared(engine, monkeypatch):
    monkeypatch.setattr(
        engines, "_begun", lambda state, row, length: (state, int(row), int(length))
    )
    engine._held = SimpleNamespace(decode_state=SimpleNamespace(state="state"))
    ids = np.arange(40, dtype=np.int32)
    engine._texts = [[*range(20), 99, 99], [*range(30)]]
    assert engine._shared(ids) == (("state", 1, 29), 29)  # its newest token is in no cache
    engine._texts = [[*range(60)], [*range(30)]]
    assert engine._shared(ids) == (("state", 0, 39), 39)  # one is left to go on from
    for length, found in ((17, (("state", 0, 16), 16)), (16, ("empty", 0))):
        engine._texts = [[*range(length)], []]
        assert engine._shared(ids) == found
    engine._texts, engine._shares = [[*range(60)], []], False
    assert engine._shared(ids) == ("empty", 0)


def test_a_request_that_fails_or_whose_loop_is_closed_ends(engine, capsys):
    parts, ticket = begin(engine, 0), None
    engine._rows[0].count = 4
    engine._fail("too late")
    assert parts == [Part(count=4, end="failed", error="too late")] and engine._rows == [None, None]

    def closed(part):
        raise RuntimeError("closed")

    ticket = Ticket(Asked("completion", (), temperature=1.0), np.arange(3), 2, closed)
    engines._deliver(ticket, Part())
    assert ticket.cancelled
