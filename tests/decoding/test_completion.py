"""Streaming text output (whole characters, stop strings across tokens) and `TextGenerator`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import transformer_jax as tj
from transformer_jax.config import ModelConfig
from transformer_jax.decoding.completion import TextGenerator, _remaining, _unchanged
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.decoding.writer import TextWriter, pieces
from transformer_jax.models.factory import init_params
from transformer_jax.tokenizers.trained import ByteTokenizer, CharTokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

LETTERS = "aab\u00e9\u20ac\U0001f600"


@dataclasses.dataclass(frozen=True)
class Cut:
    """A tokenizer whose token i is the i-th part of a byte string."""

    parts: tuple[bytes, ...]

    def to_bytes(self, ids) -> bytes:
        return b"".join(self.parts[i] for i in ids)


def before_stop(text: str, stop: list[str]) -> str:
    """Cut the text before the stop string that is completed first, character by character."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def split(data: bytes, cuts: list[int]) -> tuple[bytes, ...]:
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    return tuple(data[a:b] for a, b in itertools.pairwise(edges))


ON_A_BUSY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@ON_A_BUSY_MACHINE
@given(
    st.text(LETTERS, max_size=13),
    st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 40), max_size=7),
)
def test_decoded_text_does_not_depend_on_token_boundaries(text, stop, cuts):
    parts = split(text.encode(), cuts)
    out = list(pieces(Cut(parts), range(len(parts)), stop))
    assert "".join(out) == before_stop(text, stop) and all(out)


@ON_A_BUSY_MACHINE
@given(
    st.text(LETTERS, max_size=13), st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)
)
def test_text_is_withheld_only_while_stop_string_is_possible(text, stop):
    """After each character, only the longest suffix that begins a stop string is pending."""
    tokenizer, seen = Cut(tuple(c.encode() for c in text)), []

    def ids() -> Iterator[int]:
        for i in range(len(text)):
            yield i
            seen.append("".join(out))

    out: list[str] = []
    for piece in pieces(tokenizer, ids(), stop):
        out.append(piece)
    kept = before_stop(text, stop)
    for count, done in enumerate(seen, start=1):
        so_far = text[:count]
        ends = [so_far[-n:] for n in range(1, count + 1)]
        pending = max((len(e) for e in ends if any(s.startswith(e) for s in stop)), default=0)
        assert done == so_far[: count - pending] and kept.startswith(done)


def test_longest_matching_stop_string_is_removed():
    assert "".join(pieces(Cut((b"aa", b"bc")), range(2), ["b", "ab"])) == "a"


def test_no_token_is_sampled_after_stop_string():
    drawn = []

    def ids() -> Iterator[int]:
        for i, _ in enumerate("abcdef"):
            drawn.append(i)
            yield i

    assert "".join(pieces(Cut((b"a", b"b", b"c", b"d", b"e", b"f")), ids(), ["cd"])) == "ab"
    assert drawn == [0, 1, 2, 3]


def test_invalid_utf8_becomes_replacement_characters():
    out = list(pieces(Cut((b"a\xe2\x82", b"\xacb\xff", b"c\xf0\x9f")), range(3), ["zz"]))
    assert out == ["a", "\u20acb\ufffd", "c", "\ufffd"]


def spans(whole: bytes) -> list[int]:
    """Return the character index of each byte; invalid UTF-8 counts as one character."""
    found, at = [], 0
    while at < len(whole):
        try:
            whole[at:].decode("utf-8")
            size = len(whole[at:].decode("utf-8")[0].encode())
        except UnicodeDecodeError as error:
            first = whole[at : at + error.start].decode("utf-8")[:1]
            size = len(first.encode()) or error.end - error.start
        found += [found[-1] + 1 if found else 0] * size
        at += size
    return found


def test_token_start_is_index_of_first_character(rng):
    bits = [b"a", b"\xc3", b"\xa9", b"\xe6\xbc", b"\xa2", b"\xf0\x9f", b"\x91", b"\xff"]
    bits += ["\u00e9b".encode(), "\ufffd".encode(), b"\xa2\xc3", b"\xef\xbf", b"\xbd"]
    for _ in range(300):
        parts = tuple(bits[i] for i in rng.integers(len(bits), size=7))
        writer, starts = TextWriter(Cut(parts)), []
        for token in range(len(parts)):
            writer.feed(token)
            starts.append(writer.start)
        first = np.cumsum([0, *map(len, parts[:-1])])
        assert starts == [spans(b"".join(parts))[at] for at in first], parts


CONFIG = ModelConfig(vocab_size=300, d_model=16, num_layers=1, num_heads=2, max_len=23)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


def greedy(config, params, tokenizer=None, **options) -> TextGenerator:
    drawn = dict(sampler=Sample(Temperature(0)), key=jax.random.key(0))
    return TextGenerator(config, params, tokenizer or ByteTokenizer(), **drawn, **options)


def text(params, **options) -> str:
    return "".join(greedy(CONFIG, params, **options).complete("To be", 29))


@pytest.mark.slow
def test_completion_respects_stop_strings_and_processors(params):
    """Also beyond max_len, where the model re-reads its own text."""
    forced = dict(processors=(tj.Force(*b"or not to"), tj.Ban(*range(128, 256))))
    free = text(params, **forced)
    assert free.startswith("or not to") and len(free) == 29
    assert text(params, **forced, stop="not") == "or "
    assert text(params, **forced, stop=["t t", "nothing"]) == "or no"
    letter = free[9]
    shaped = text(params, processors=(*forced["processors"], tj.Ban(ord(letter))))
    assert len(shaped) == 29 and shaped.startswith("or not to") and letter not in shaped[9:]
    assert text(params, cache_dtype="int8") != ""


@pytest.mark.long
def test_token_counts_persist_when_prompt_is_reprocessed(params):
    """The cache of CONFIG is full after 19 tokens."""
    mark, a = ord("!"), ord("a")
    late = text(params, processors=(tj.Ban(mark, *range(128, 256)), tj.ForceLast(27, mark)))
    assert (len(late), late.count("!"), late[26]) == (29, 1, "!")
    others = [token for token in range(256) if token != a]
    forced = text(params, processors=(tj.ForceLast(26, mark), tj.MinLength(25, others)))
    assert forced[:26] == "a" * 25 + "!"


def spell(history, logits):
    """Force the letter whose index is the number of new tokens that a penalty counts."""
    vocab = logits.shape[-1]
    letter = ord("A") + history.counts(vocab, prompt=False).sum(axis=1)
    return jnp.where(jnp.arange(vocab)[None] == letter[:, None], 0.0, -jnp.inf)


@pytest.mark.slow
def test_generated_tokens_stay_marked_as_generated_when_reprocessed(params):
    """The model re-reads 11 tokens: two of the prompt and nine that it generated."""
    generator = greedy(CONFIG, params, processors=(spell,))
    whole = "".join(generator.complete("To be or not to", 13))
    assert whole == "ABCDEFGHI" + "JKLM"


def test_tokens_evicted_from_cache_still_count():
    """Processors that count new tokens include those dropped before the text is re-read."""
    left = {n: _remaining(tj.ForceLast(5, 2), n) for n in (0, 3, 5)}
    assert left == {0: tj.ForceLast(5, 2), 3: tj.ForceLast(2, 2), 5: _unchanged}
    assert [_remaining(tj.Force(7, 8, 9), n) for n in (2, 3)] == [tj.Force(9), _unchanged]
    assert [_remaining(tj.MinLength(4, (1,)), n) for n in (3, 6)] == [
        tj.MinLength(1, (1,)),
        tj.MinLength(0, (1,)),
    ]


@pytest.mark.long
def test_forced_prefix_is_generated_once(params):
    """Also if the forced text is longer than max_len, so that the model re-reads a part of it."""
    words = "or not to be, that is the question: w"
    first = text(params, processors=(tj.Force(*words[:5].encode()),))
    assert first.startswith("or no") and first.count("or no") == 1
    forced = (tj.Force(*words.encode()),)
    generator = TextGenerator(
        CONFIG, params, ByteTokenizer(), sampler=Sample(), key=jax.random.key(0), processors=forced
    )
    whole = "".join(generator.complete("To be", len(words)))
    assert whole == words


@pytest.mark.long
def test_all_methods_generate_same_text_with_processors(params):
    generator = greedy(CONFIG, params, processors=(tj.NoRepeatNGram(1), tj.Ban(*range(128, 256))))
    want = "".join(generator.complete("abcdef", 9))
    assert len(set("abcdef" + want)) == 15
    assert generator.samples("abcdef", 9, 2) == [want, want]
    assert generator.look_up("abcdef", 9, 3)[0] == want
    assert list(generator.answer(["abcdef"], 9, slots=1)) == [(0, want)]
    assert generator.search("abcdef", 9, beams=1)[0][1] == want


@pytest.mark.long
def test_all_methods_report_when_no_token_is_allowed(params):
    generator = greedy(CONFIG, params, processors=(tj.Ban(*range(256)),))
    for call in (
        lambda: list(generator.complete("a", 3)),
        lambda: generator.samples("a", 3, 2),
        lambda: generator.look_up("a", 3, 2),
        lambda: list(generator.answer(["a"], 3, slots=1)),
        lambda: generator.search("a", 3, beams=2),
    ):
        with pytest.raises(ValueError, match="no token can follow"):
            call()


@pytest.mark.long
@pytest.mark.parametrize(
    ("layers", "window"),
    [
        pytest.param(1, 8, id="one layer"),
        pytest.param(2, (5, None), id="one of two layers"),
    ],
)
def test_prompt_lookup_allocates_extra_ring_slots(layers, window):
    config = dataclasses.replace(CONFIG, positions="rope", window=window, num_layers=layers)
    generator = greedy(config, init_params(config, jax.random.key(0)))
    want = "".join(generator.complete("abcab", 17))
    assert generator.look_up("abcab", 17, 4)[0] == want


def test_samples_share_prompt_and_forced_tokens(params):
    generator = greedy(CONFIG, params, processors=(tj.Force(*b"or"),))
    assert generator.samples("To be", 2, 3) == ["or"] * 3


def test_constrained_samples_have_slots_for_prompt_and_new_tokens(monkeypatch):
    """A recurrent model has no max_len, which would be the capacity."""
    slots: list[int] = []

    def serve(*arguments, capacity, **options):
        slots.append(capacity)
        return iter(())

    monkeypatch.setattr("transformer_jax.decoding.completion.serve_requests", serve)
    config = tj.RecurrentConfig(vocab_size=300, d_embed=5, d_hidden=7, num_layers=1)
    generator = greedy(config, {}, grammar=SimpleNamespace(start=lambda: None))
    assert generator.samples("a" * 41, 30, 2) == ["", ""]
    assert slots[0] >= 41 + 30 - 1


def test_invalid_text_options_are_rejected(params):
    with pytest.raises(
        ValueError, match="stop contains '': each must be a string of at least one character"
    ):
        text(params, stop=["a", ""])
    with pytest.raises(ValueError, match="processors is Ban"):
        text(params, processors=tj.Ban(3))
    with pytest.raises(
        ValueError, match="the prompt contains ID 300, but the model has only 300 tokens"
    ):
        ring = greedy(dataclasses.replace(CONFIG, window=4), params)
        ring.samples(np.array([300] + [98] * 12), 3, 2)
    with pytest.raises(ValueError, match="new tokens reach length 32: the limit is 23"):
        greedy(CONFIG, params).samples("a" * 30, 3, 2)
    many = CharTokenizer("".join(map(chr, range(0x4E00, 0x4E00 + 301))))
    with pytest.raises(ValueError, match="the tokenizer has 301 tokens, but the model has 300"):
        greedy(CONFIG, params, many).complete("\u4e00", 3)


def test_prompt_with_unknown_character_is_rejected(params):
    with pytest.raises(ValueError):
        greedy(CONFIG, params, CharTokenizer("ab")).complete("c", 3)
    assert np.asarray(ByteTokenizer().encode("\u20ac")).tolist() == [0xE2, 0x82, 0xAC]
