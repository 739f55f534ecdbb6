"""Logit processors against plain Python over lists."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from tests.support.tolerances import assert_near
from transformer_jax.decoding.logit_processors import History, check_processors

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, PROMPT, ROOM = 11, 7, 13
INFINITE = float("inf")


def texts(rng, rows: int = 23) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and generated tokens of all lengths, from a small alphabet so that tokens repeat."""
    prompts = [rng.integers(0, 5, rng.integers(1, PROMPT + 1)).tolist() for _ in range(rows)]
    return prompts, [rng.integers(0, 6, rng.integers(0, ROOM + 1)).tolist() for _ in range(rows)]


begin = jax.jit(History.of, static_argnums=2)
append = jax.jit(History.append)


def history(prompts: list[list[int]], new: list[list[int]]) -> History:
    """Build a history as decoding does: a padded prompt, then one token per active row."""
    padded = np.full((len(prompts), PROMPT), 9)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    out = begin(padded, np.array([len(p) for p in prompts]), ROOM)
    for n in range(ROOM):
        token = np.array([tokens[n] if n < len(tokens) else 8 for tokens in new])
        out = append(out, token, np.array([n < len(tokens) for tokens in new]))
    return out


def repetition(prompt, new, x, p, whole):
    seen = set(prompt + new if whole else new)
    return [(v / p if v > 0 else v * p) if i in seen else v for i, v in enumerate(x)]


def presence(prompt, new, x, a, whole):
    seen = set(prompt + new if whole else new)
    return [v - a if i in seen else v for i, v in enumerate(x)]


def frequency(prompt, new, x, a, whole):
    counts = Counter(prompt + new if whole else new)
    return [v - a * counts[i] for i, v in enumerate(x)]


def no_repeat(prompt, new, x, n):
    text = prompt + new
    grams = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
    last = text[len(text) - n + 1 :] if n > 1 else []
    if len(last) < n - 1:
        return list(x)
    return [-INFINITE if (*last, i) in grams else v for i, v in enumerate(x)]


BANNED = [5, 3], [4], [1, 9, 6]

CASES = [
    *((tj.RepetitionPenalty(p), partial(repetition, p=p, whole=True)) for p in (0.6, 1.0, 1.7)),
    (tj.RepetitionPenalty(1.7, prompt=False), partial(repetition, p=1.7, whole=False)),
    (tj.PresencePenalty(0.7), partial(presence, a=0.7, whole=False)),
    (tj.PresencePenalty(-0.7, prompt=True), partial(presence, a=-0.7, whole=True)),
    (tj.FrequencyPenalty(0.3), partial(frequency, a=0.3, whole=False)),
    (tj.FrequencyPenalty(0.3, prompt=True), partial(frequency, a=0.3, whole=True)),
    *((tj.NoRepeatNGram(n), partial(no_repeat, n=n)) for n in (1, 2, 3, 4, 30)),
    (tj.Ban(3, 10), lambda p, new, x: [-INFINITE if i in (3, 10) else v for i, v in enumerate(x)]),
    (
        tj.Force(4, 2, 4),
        lambda p, new, x: (
            [0.0 if i == (4, 2, 4)[len(new)] else -INFINITE for i in range(V)]
            if len(new) < 3
            else list(x)
        ),
    ),
    (
        tj.BanSequences((5, 3), (4,), (1, 9, 6)),
        lambda p, new, x: [
            -INFINITE if any([*(p + new), i][-len(s) :] == s for s in BANNED) else v
            for i, v in enumerate(x)
        ],
    ),
    (
        tj.ForceLast(3, 9),
        lambda p, new, x: (
            [0.0 if i == 9 else -INFINITE for i in range(V)] if len(new) == 2 else list(x)
        ),
    ),
    (
        tj.MinLength(5, (2, 7)),
        lambda p, new, x: [
            -INFINITE if len(new) < 5 and i in (2, 7) else v for i, v in enumerate(x)
        ],
    ),
]


@pytest.mark.slow_except(
    "Force(tokens=(4, 2, 4))-",
    "NoRepeatNGram(n=1)-",
    "RepetitionPenalty(p=1.7, prompt=False)-",
    "PresencePenalty(a=0.7)-",
    "FrequencyPenalty(a=0.3)-",
)
@pytest.mark.parametrize(("processor", "rule"), CASES, ids=lambda x: str(x) if hasattr(x, "__dataclass_fields__") else "")  # fmt: skip  # noqa: E501
def test_logit_processors_match_python_reference(rng, processor, rule):
    prompts, new = texts(rng)
    logits = rng.normal(size=(len(prompts), V))
    actual = np.asarray(jax.jit(processor)(history(prompts, new), logits.astype(np.float32)))
    expected = np.array([rule(*row) for row in zip(prompts, new, logits.tolist(), strict=True)])
    assert actual.shape == expected.shape and np.isfinite(expected).any(axis=1).all()
    if not isinstance(processor, tj.NoRepeatNGram) or processor.n < 30:
        assert processor == tj.RepetitionPenalty(1.0) or np.abs(actual - logits).max() > 0.01
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
    kept = np.isfinite(expected)
    assert_near(actual[kept], expected[kept], 1e-5)


@pytest.mark.slow_except("2")
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_banned_sequence_is_blocked_once_its_prefix_matches(size):
    """The last token is banned after the other ones, but not after a part of them."""
    sequence = [4, 1, 3, 1, 5][:size]
    matching = history([sequence[:-1] or [9], [9, *sequence[:-1]]], [[], []])
    ban = jax.jit(tj.BanSequences(sequence))
    logits = np.asarray(ban(matching, np.zeros((2, V), np.float32)))
    assert np.argwhere(np.isneginf(logits)).tolist() == [[0, sequence[-1]], [1, sequence[-1]]]
    if size > 2:
        shorter = history([sequence[1:-1], sequence[:-2]], [[], []])
        assert not np.asarray(ban(shorter, np.zeros((2, V), np.float32))).any()


def test_processor_history_contains_each_row_without_gaps(rng):
    prompts, new = texts(rng)
    made = history(prompts, new)
    for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
        text = prompt + tokens
        assert made.tokens[row].tolist() == text + [-1] * (PROMPT + ROOM - len(text))
    assert made.new.tolist() == [len(tokens) for tokens in new]
    assert made.length.tolist() == [len(p) + len(t) for p, t in zip(prompts, new, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [tj.PresencePenalty, tj.FrequencyPenalty, tj.RepetitionPenalty])
def test_penalties_outside_float32_range_are_rejected(kind):
    for bad in (math.nan, INFINITE, -INFINITE, "1", None):
        with pytest.raises(ValueError, match="must be finite"):
            kind(bad)
    for far in (1e39, 1e300, 10**400, 1.1e30):
        with pytest.raises(ValueError, match=r"must be finite.*, from -?1e-?30 to 1e30"):
            kind(far)
    largest = np.asarray(kind(1e30)(history([[1]], [[2]]), jnp.zeros((1, V))))
    assert np.isfinite(largest).all() and largest[0, 3] == 0


def test_invalid_processor_settings_are_rejected():
    for call, rule in (
        (lambda: tj.RepetitionPenalty(0), "p is 0: must be finite and above 0"),
        (lambda: tj.RepetitionPenalty(-1.0), "p is -1"),
        (lambda: tj.NoRepeatNGram(0), "n is 0: must be an integer of at least 1"),
        (lambda: tj.NoRepeatNGram(2.0), "n is 2.0"),
        (lambda: tj.Ban(), "tokens is empty"),
        (lambda: tj.Ban(3, -1), "tokens contains -1: token IDs must be integers"),
        (lambda: tj.Force(True), "tokens contains True"),
        (lambda: tj.MinLength(-1, 2), "n is -1"),
        (lambda: tj.BanSequences(), "sequences is empty"),
        (lambda: tj.BanSequences((3,), ()), r"sequences\[1\] is empty"),
        (lambda: tj.BanSequences((3, -1)), r"sequences\[0\] contains -1"),
        (lambda: tj.ForceLast(0, 3), "n is 0"),
        (lambda: tj.ForceLast(3, 1.0), "token contains 1.0"),
        (lambda: tj.MinLength(3, ()), "stop is empty"),
        (lambda: tj.MinLength(3, 2.5), "stop is 2.5: must be one or more token IDs"),
        (lambda: check_processors("abc"), "processors is 'abc'"),
        (lambda: check_processors([tj.Ban]), "must be callable with"),
        (
            lambda: check_processors([lambda x: x]),
            r"pass a processor that reads only logits to Sample",
        ),
    ):
        with pytest.raises(ValueError, match=rule):
            call()


@pytest.mark.slow_except(
    "Ban(tokens=(2, 11))", "BanSequences(sequences=((1, 11),))", "ForceLast(n=3, token=11)"
)
@pytest.mark.parametrize(
    "processor",
    [tj.Ban(2, V), tj.BanSequences((1, V)), tj.Force(V), tj.ForceLast(3, V), tj.MinLength(3, V)],
    ids=str,
)
def test_token_outside_vocabulary_is_rejected(processor):
    made = history([[1]], [[2]])
    with pytest.raises(ValueError, match=rf"token {V} of .*: must be from 0 to {V - 1}"):
        jax.jit(processor)(made, np.zeros((1, V), np.float32))


@pytest.mark.slow
def test_equal_processors_have_equal_hashes():
    assert tj.Ban(1, 2) == tj.Ban(1, 2) and hash(tj.MinLength(3, 5)) == hash(tj.MinLength(3, (5,)))
    assert tj.MinLength(3, np.int64(5)) == tj.MinLength(3, np.array(5)) == tj.MinLength(3, 5)
    assert tj.RepetitionPenalty(1.2) != tj.RepetitionPenalty(1.2, prompt=False)
