"""Beam search against exhaustive search, against plain Python, and against full passes."""

import dataclasses
import itertools
import math
from collections import Counter
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.test_decode import PAIR, ROPE, VOCAB, counting
from tests.support import model_oracle as oracle
from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.config import ModelConfig
from transformer_jax.decoding import beams as beam
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import Beams, GNMTPenalty, LengthPenalty, beam_search
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.logit_processors import (
    Force,
    MinLength,
    NoRepeatNGram,
    RepetitionPenalty,
)
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache, init_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

SUM_F32 = 3e-6
"""Tolerance of a float32 sum of log-probabilities, relative to the largest."""

PLACES, MEMORIES = 19, 13


# A random automaton replaces the network; its state depends on all tokens that it has read.


@dataclasses.dataclass(frozen=True)
class Automaton:
    """A step over tables; the state is the number of tokens read and one of 13 memories."""

    name: str = "plain"

    def __call__(self, params, tokens, state, *, valid=None):
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid

        def read(carry, column):
            place, memory = carry
            token, counts = column
            memory = jnp.where(counts, params["next"][place, memory, token], memory)
            place = place + counts
            return (place, memory), params["logits"][place, memory]

        start = (state["place"], state["memory"])
        (place, memory), logits = jax.lax.scan(read, start, (tokens.T, valid.T))
        return jnp.moveaxis(logits, 0, 1), dict(state, place=place, memory=memory)


STEP = Automaton()


def automaton(seed: int, vocab: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shape = (PLACES, MEMORIES, vocab)
    return {
        "next": jnp.asarray(rng.integers(0, MEMORIES, shape, dtype=np.int32)),
        "logits": jnp.asarray(rng.normal(0, 1.5, shape).astype(np.float32)),
    }


def states(rows: int = 4) -> dict[str, jax.Array]:
    """Every row has another initial memory, so each row is a separate case."""
    return {"place": jnp.zeros(rows, jnp.int32), "memory": jnp.arange(rows, dtype=jnp.int32)}


def prompts(vocab: int, rows: int = 4, columns: int = 3) -> np.ndarray:
    return np.random.default_rng(5).integers(0, vocab, (rows, columns), dtype=np.int32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    if logits.max() == -np.inf:
        return logits
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def log_probs_of(params, row: int, prompt: list[int], change=lambda text, logits: logits):
    """Return a function text -> log p [V] of the next token, in float64, that reads everything."""
    following, logits = (np.asarray(params[name]) for name in ("next", "logits"))

    @cache
    def after(text: tuple[int, ...]) -> np.ndarray:
        memory, read = row, [*prompt, *text]
        for place, token in enumerate(read):
            memory = following[place, memory, token]
        return log_softmax(change(text, logits[len(read), memory]))

    return after


# Reference implementations


def ranked(found: dict[tuple[int, ...], float], divisor, results: int):
    """Return (text, log p, score) of the best texts, best first."""
    scored = [(text, total, total / divisor(len(text))) for text, total in found.items()]
    return sorted(scored, key=lambda one: -one[2])[:results]


def best_of_all(after, vocab: int, longest: int, stop, divisor, results: int):
    """Rank all strings that end at their first stop token, or have full length without one."""
    found = {}
    for length in range(1, longest + 1):
        for text in itertools.product(range(vocab), repeat=length):
            ends = text[-1] in stop or length == longest
            if ends and not set(text[:-1]) & set(stop):
                found[text] = sum(after(text[:i])[token] for i, token in enumerate(text))
    return ranked(found, divisor, results)


def plain_beams(after, longest, beams, stop, divisor, results, groups=1, diversity=0.0):
    """Beam search with lists and dicts."""
    width = beams // groups
    living: list[list[tuple[tuple[int, ...], float]]] = [[((), 0.0)] for _ in range(groups)]
    found: dict[tuple[int, ...], float] = {}
    for _ in range(longest):
        taken: Counter[int] = Counter()
        for g in range(groups):
            extensions = []
            for text, total in living[g]:
                for token, log_prob in enumerate(after(text)):
                    if log_prob > -math.inf:
                        rank = total + log_prob - diversity * taken[token]
                        extensions.append((rank, total + log_prob, (*text, token)))
            extensions.sort(key=lambda one: -one[0])
            for _, total, text in extensions[:width]:
                if text[-1] in stop:
                    found.setdefault(text, total)
            stays = [(text, total) for _, total, text in extensions if text[-1] not in stop]
            living[g] = stays[:width]
            taken.update(text[-1] for text, _ in living[g])
    for text, total in itertools.chain(*living):
        found.setdefault(text, total)
    return ranked(found, divisor, results)


def assert_row(got: Beams, row: int, want: list, results: int) -> None:
    """Compare texts exactly and scores nearly; missing results must be empty with score -inf."""
    tokens, lengths, scores, log_probs = (
        np.asarray(x)[row] for x in (got.tokens, got.lengths, got.scores, got.log_probs)
    )
    assert tokens.shape[0] == results and lengths.shape == scores.shape == (results,)
    texts = [tuple(t[:n].tolist()) for t, n in zip(tokens, lengths, strict=True)]
    count = len(want)
    assert count > 0
    assert texts[:count] == [text for text, _, _ in want]
    assert len(set(texts[:count])) == count and (np.diff(scores[:count]) <= 0).all()
    assert all((t[n:] == -1).all() for t, n in zip(tokens, lengths, strict=True))
    assert_near(log_probs[:count], [total for _, total, _ in want], SUM_F32)
    assert_near(scores[:count], [score for _, _, score in want], SUM_F32)
    assert (lengths[count:] == 0).all()
    assert (scores[count:] == -np.inf).all() and (log_probs[count:] == -np.inf).all()


PENALTIES = [(LengthPenalty(a), lambda n, a=a: n**a) for a in (-0.5, 0.0, 0.7, 2.0)]
PENALTIES += [(None, lambda n: 1.0), (GNMTPenalty(0.6), lambda n: ((5 + n) / 6) ** 0.6)]

WIDE = [  # vocabulary, longest, stop tokens
    (3, 5, (0,)), (5, 4, (4, 2)), pytest.param((4, 3, (0, 1, 3)), marks=pytest.mark.long),
    pytest.param((4, 4, ()), marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.long_except("(5, 4, (4, 2))")
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_beams_find_best_of_all_sequences(case):
    """24 cases each: four prompts for each of six penalties."""
    vocab, longest, stop = case
    prompt, results = prompts(vocab), 7
    lengths_seen = set()
    for seed, (penalty, divisor) in enumerate(PENALTIES):
        params = automaton(seed, vocab)
        got = beam_search(
            STEP, params, prompt, states(), num_tokens=longest, num_beams=vocab ** (longest - 1),
            num_results=results, stop=stop, length_penalty=penalty,
        )  # fmt: skip
        for row in range(4):
            after = log_probs_of(params, row, prompt[row].tolist())
            want = best_of_all(after, vocab, longest, stop, divisor, results)
            assert_row(got, row, want, results)
            lengths_seen |= {len(text) for text, _, _ in want}
    assert len(lengths_seen) == (longest if stop else 1)


NARROW = [  # vocabulary, longest, beams, results, stop, groups, diversity
    (7, 11, 3, 2, (0, 3), 1, 0.0), (5, 7, 6, 5, (1, 2), 3, 0.9), (3, 5, 8, 7, 0, 2, 0.5),
    (3, 5, 8, 7, 0, 2, 0.0),
]  # fmt: skip


@pytest.mark.long_except("(5, 7, 6, 5, (1, 2), 3, 0.9)", "(3, 5, 8, 7, 0, 2, 0.0)")
@pytest.mark.slow
@pytest.mark.parametrize("case", NARROW, ids=str)
def test_narrow_beams_match_python_reference(case):
    """24 cases each; results with and without early exit are bitwise equal."""
    vocab, longest, beams, results, stop, groups, diversity = case
    prompt = prompts(vocab)
    ends = (stop,) if isinstance(stop, int) else stop
    for seed, (penalty, divisor) in enumerate(PENALTIES):
        params = automaton(10 + seed, vocab)
        search = partial(
            beam_search, STEP, params, prompt, num_tokens=longest, num_beams=beams,
            num_results=results, stop=stop, length_penalty=penalty, groups=groups,
            diversity=diversity,
        )  # fmt: skip
        got = search(states())
        for row in range(4):
            after = log_probs_of(params, row, prompt[row].tolist())
            want = plain_beams(after, longest, beams, ends, divisor, results, groups, diversity)
            assert_row(got, row, want, results)
        assert_same(got, search(states(), early_exit=False))


def assert_same(one: Beams, other: Beams) -> None:
    for field in dataclasses.fields(Beams):
        assert_same_bits(getattr(one, field.name), getattr(other, field.name), field.name)


@pytest.mark.slow
def test_row_ends_early_if_no_live_beam_can_win():
    """The third token is almost certainly a stop token: early exit takes three steps, not 13."""
    ran = []

    @dataclasses.dataclass(frozen=True)
    class Watched(Automaton):
        def __call__(self, params, tokens, state, *, valid=None):
            jax.debug.callback(lambda: ran.append(tokens.shape))
            return super().__call__(params, tokens, state, valid=valid)

    params = automaton(1, 5)
    params["logits"] = params["logits"].at[5:, :, 2].set(9.0).at[:5, :, 2].set(-9.0)
    search = partial(
        beam_search, Watched(), params, prompts(5), num_tokens=13, num_beams=3, stop=2,
        length_penalty=LengthPenalty(0.7),
    )  # fmt: skip
    results, steps = [], []
    for early_exit in (True, False):
        results.append(search(states(), early_exit=early_exit))
        jax.effects_barrier()
        steps.append(len(ran))
        ran.clear()
    assert results[0].lengths[:, 0].tolist() == [3, 3, 3, 3]
    assert_same(*results)
    assert steps == [3, 13]  # the prompt is one of them


def test_score_bound_considers_all_lengths_up_to_limit():
    """For a penalty that is not monotonic, the bound is the smallest factor still reachable."""
    divisors = np.array([3.0, 7.0, 2.0, 5.0, 11.0])
    limits = np.array([5, 4, 3, 1, 2])
    factors = jnp.asarray((1 / divisors).astype(np.float32))
    best_factors = jax.jit(beam._Scoring(factors, jnp.zeros(()), jnp.bool_(True)).best_factors)
    for n in range(1, 6):
        got = np.asarray(best_factors(np.int32(n), limits))
        for row, limit in enumerate(limits):
            ahead = 1 / divisors[min(n, limit - 1) : limit]
            assert got[row] == np.float32(ahead.min())


@pytest.mark.slow
def test_ties_prefer_lower_beam_then_lower_token():
    """All strings of one length tie. Token 1 stops, so 3 beams keep 0, 2, 3, then 00, 02."""
    params = jax.tree.map(jnp.zeros_like, automaton(1, 4))
    call = partial(beam_search, STEP, params, prompts(4), num_tokens=2, stop=1, num_results=3)
    got = call(states(), num_beams=3, length_penalty=LengthPenalty(1.0))
    assert got.tokens[0].tolist() == [[1, -1], [0, 1], [0, 0]]
    assert got.tokens.tolist() == [got.tokens[0].tolist()] * 4
    np.testing.assert_allclose(got.scores, -math.log(4), rtol=1e-6)
    got = call(states(), num_beams=3)  # shorter is better; ties go to the text that stopped
    assert got.tokens[0].tolist() == [[1, -1], [0, 1], [0, 0]]
    assert got.lengths[0].tolist() == [1, 2, 2]


@pytest.mark.slow
def test_processors_receive_history_of_their_beam():
    """Log-probabilities are computed from the processed logits, renormalized."""
    params, prompt = automaton(7, 5), prompts(5)
    lengths = np.array([3, 1, 2, 3], np.int32)
    got = beam_search(
        STEP, params, prompt, states(), num_tokens=7, num_beams=4, num_results=4, stop=(1,),
        lengths=lengths, processors=(RepetitionPenalty(1.7), NoRepeatNGram(2), MinLength(3, 1)),
    )  # fmt: skip
    changed = 0
    for row, length in enumerate(lengths):
        start = prompt[row, :length].tolist()

        def change(text, logits, start=start):
            read, out = [*start, *text], np.array(logits, np.float64)
            for token in set(read):
                out[token] = out[token] / 1.7 if out[token] > 0 else out[token] * 1.7
            pairs = set(itertools.pairwise(read))
            out[[t for t in range(5) if (read[-1], t) in pairs]] = -np.inf
            if len(text) < 3:
                out[1] = -np.inf
            return out

        after = log_probs_of(params, row, start, change)
        want = plain_beams(after, 7, 4, (1,), lambda n: 1.0, 4)
        assert_row(got, row, want, 4)
        plain = plain_beams(log_probs_of(params, row, start), 7, 4, (1,), lambda n: 1.0, 4)
        changed += [text for text, _, _ in plain] != [text for text, _, _ in want]
    assert changed == 4


@pytest.mark.slow
def test_beams_without_allowed_tokens_return_no_hypothesis():
    """No token may repeat: after prompt 0 some beams stop in time, after 0 1 2 none can."""
    got = beam_search(
        STEP, automaton(6, 3), np.array([[0, 1, 2], [0, 1, 2]], np.int32), states(2), num_tokens=5,
        num_beams=4, num_results=4, stop=1, lengths=[1, 3], processors=(NoRepeatNGram(1),),
    )  # fmt: skip
    first, second = (
        {tuple(text[text >= 0].tolist()) for text in np.asarray(row)} for row in got.tokens
    )
    assert first == {(1,), (2, 1), ()} and second == {()}
    assert np.asarray(got.lengths).tolist()[1] == [0, 0, 0, 0]
    assert np.isfinite(np.asarray(got.scores)).sum(axis=1).tolist() == [2, 0]
    assert (np.asarray(got.scores)[:, 2:] == -np.inf).all()


def test_beam_search_with_one_beam_is_greedy():
    """Also with stop tokens: without a penalty, a longer text can only be less likely."""
    params, prompt, stop = automaton(8, 7), prompts(7), (0, 3)
    got = beam_search(STEP, params, prompt, states(), num_tokens=11, num_beams=1, stop=stop)
    greedy = np.asarray(generate(STEP, params, prompt, states(), num_tokens=11).tokens)
    for row in range(4):
        ends = [n for n, token in enumerate(greedy[row]) if token in stop]
        length = ends[0] + 1 if ends else 11
        assert got.lengths[row].tolist() == [length]
        assert got.tokens[row, 0, :length].tolist() == greedy[row, :length].tolist()
    assert (np.asarray(got.lengths) < 11).any() and (np.asarray(got.lengths) > 2).any()


COMMON: dict[str, Any] = dict(num_tokens=11, num_beams=3, num_results=2, stop=(0, 3))
"""Arguments for vocabulary 7 and four rows; several tests share the compiled program."""


@pytest.mark.slow
def test_ragged_rows_are_searched_independently():
    """Each row is bitwise equal to a search for the row alone, without padding."""
    params, prompt = automaton(9, 7), prompts(7, columns=5)
    lengths = np.array([5, 1, 2, 4], np.int32)
    search = partial(beam_search, STEP, params, length_penalty=LengthPenalty(0.7), **COMMON)
    together = search(prompt, states(), lengths=lengths)
    for row, length in enumerate(lengths):
        alone = search(prompt[row : row + 1, :length], row_of(states(), row))
        assert_same(alone, row_of(together, row))


def row_of(tree, row: int):
    return jax.tree.map(lambda leaf: leaf[row : row + 1], tree)


LIMITED = [  # vocabulary, longest, beams, results, stop, groups, diversity
    (5, 7, 6, 5, (1, 2), 3, 0.9), (3, 5, 8, 7, (0,), 1, 0.0), (3, 5, 3, 3, (), 1, 0.0),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.long_except("(3, 5, 3, 3, (), 1, 0.0)")
@pytest.mark.parametrize("case", LIMITED, ids=str)
def test_row_limits_match_separate_searches(case):
    """Ragged prompts with limits match plain Python, and bitwise the row alone."""
    vocab, longest, beams, results, stop, groups, diversity = case
    prompt, lengths = prompts(vocab, columns=5), np.array([5, 1, 2, 4], np.int32)
    ran_out = 0
    for seed, (penalty, divisor) in enumerate(PENALTIES):
        params = automaton(20 + seed, vocab)
        search = partial(
            beam_search, STEP, params, num_beams=beams, num_results=results, stop=stop,
            length_penalty=penalty, groups=groups, diversity=diversity,
        )  # fmt: skip
        limits = np.roll([1, longest, longest - 2, 3], seed)
        together = search(
            prompt, states(), num_tokens=longest, lengths=lengths, limits=limits,
            early_exit=seed % 2 == 0,
        )  # fmt: skip
        for row, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
            start = prompt[row, :length]
            after = log_probs_of(params, row, start.tolist())
            want = plain_beams(after, limit, beams, stop, divisor, results, groups, diversity)
            got = row_of(together, row)
            assert_row(got, 0, want, results)
            assert (np.asarray(got.tokens)[..., limit:] == -1).all()
            alone = search(start[None], row_of(states(), row), num_tokens=int(limit))
            short = dataclasses.replace(got, tokens=got.tokens[..., :limit])
            assert_same(alone, short)
            ran_out += sum(len(text) == limit < longest for text, _, _ in want)
    assert ran_out > 20


@pytest.mark.slow
def test_wide_beams_find_best_sequence_within_row_limit():
    prompt, limits = prompts(3), np.array([4, 1, 3, 2])
    for seed, (penalty, divisor) in enumerate(PENALTIES):
        params = automaton(30 + seed, 3)
        got = beam_search(
            STEP, params, prompt, states(), num_tokens=4, num_beams=27, num_results=5, stop=0,
            length_penalty=penalty, limits=limits,
        )  # fmt: skip
        for row, limit in enumerate(limits):
            after = log_probs_of(params, row, prompt[row].tolist())
            assert_row(got, row, best_of_all(after, 3, limit, (0,), divisor, 5), 5)


@pytest.mark.slow
def test_row_with_zero_limit_has_no_result():
    """Even if the logits after its prompt are NaN."""
    params = automaton(2, 7)
    got = beam_search(
        STEP, dict(params, logits=params["logits"].at[3].set(np.nan)), prompts(7), states(),
        limits=[0, 11, 0, 1], **COMMON,
    )  # fmt: skip
    assert (np.asarray(got.tokens) == -1).all() and (np.asarray(got.lengths) == 0).all()
    for numbers in (got.scores, got.log_probs):
        assert np.asarray(numbers)[[0, 2]].tolist() == [[-np.inf] * 2] * 2
        assert np.isnan(np.asarray(numbers)[[1, 3]]).all()


@pytest.mark.slow
def test_row_stops_decoding_at_its_limit():
    """It reads all but its last token, while other rows continue."""
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watched(Automaton):
        def __call__(self, params, tokens, state, *, valid=None):
            logits, new = super().__call__(params, tokens, state, valid=valid)
            jax.debug.callback(lambda place: seen.append(np.asarray(place)), new["place"])
            return logits, new

    lengths, limits = np.array([5, 1, 2, 4]), np.array([2, 7, 1, 4])
    beam_search(
        Watched(), automaton(4, 5), prompts(5, columns=5), states(), num_tokens=7, num_beams=3,
        lengths=lengths, limits=limits,
    )  # fmt: skip
    jax.effects_barrier()
    places = np.array(seen[1:]).reshape(6, 4, 3)
    assert np.array_equal(places.max(axis=(0, 2)), np.maximum(lengths + limits - 1, lengths))
    assert np.array_equal(places.min(axis=2), places.max(axis=2))


@pytest.mark.slow
def test_row_limit_caps_required_cache():
    """The cache is full when the row ends; another token would make the row nonfinite."""
    params, prompt, limits = network(ROPE), prompts(VOCAB, rows=3, columns=5), [2, 6, 4]
    step, lengths = make_step(build(ROPE)), [5, 1, 3]
    search = partial(
        beam_search, step, params, num_beams=5, num_results=5, stop=STOP,
        length_penalty=LengthPenalty(0.7),
    )  # fmt: skip
    together = search(
        prompt, init_cache(ROPE, 3, 6), num_tokens=NEW, lengths=lengths, limits=limits
    )
    for row, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
        start = prompt[row : row + 1, :length]
        alone = search(start, init_cache(ROPE, 1, 6), num_tokens=limit)
        got = row_of(together, row)
        assert np.array_equal(got.tokens[..., :limit], alone.tokens)
        assert np.array_equal(got.lengths, alone.lengths)
        assert_near(got.scores, alone.scores, SUM_F32)
    with pytest.raises(ValueError, match="reach length 7: the limit is 6"):
        search(prompt, init_cache(ROPE, 3, 6), num_tokens=NEW, lengths=lengths, limits=[2, 7, 4])


@pytest.mark.slow
def test_traced_limits_are_clipped_to_num_tokens():
    params, prompt, step = automaton(3, 7), prompts(7), counting(Automaton)()
    search = partial(beam_search, step, params, prompt, **COMMON | dict(stop=()))
    whole = search(states(), limits=[11, 0, 5, 11])

    @jax.jit
    def go(limits, state):
        return search(state, limits=limits)

    assert_same(go(jnp.array([99, -3, 5, 11]), states()), whole)
    traced = len(step.calls)
    assert_same(go(jnp.array([11, 11, 12, 11]), states()), search(states()))
    assert len(step.calls) == traced


@pytest.mark.slow
@pytest.mark.parametrize("nonfinite", [np.nan, np.inf])
def test_nonfinite_logits_end_only_the_affected_row(nonfinite):
    """The row gets length 0 and score NaN; the other rows do not change."""
    params, prompt = automaton(5, 7), prompts(7)
    search = partial(beam_search, STEP, prompt=prompt, **COMMON)
    whole = search(params, state=states())
    memory = [after_prompt(params, row, prompt[row]) for row in range(4)]
    row = next(row for row in range(4) if memory.count(memory[row]) == 1)
    broken = dict(params, logits=params["logits"].at[3, memory[row], 0].set(nonfinite))
    got = search(broken, state=states())
    assert (np.asarray(got.tokens)[row] == -1).all() and got.lengths[row].tolist() == [0, 0]
    assert np.isnan(np.asarray(got.scores)[row]).all()
    assert np.isnan(np.asarray(got.log_probs)[row]).all()
    later = search(
        dict(params, logits=params["logits"].at[5].set(nonfinite)), state=states(),
        length_penalty=LengthPenalty(2.0),
    )  # fmt: skip
    assert (np.asarray(later.tokens) == -1).all() and (np.asarray(later.lengths) == 0).all()
    assert np.isnan(np.asarray(later.scores)).all()
    others = np.array([other for other in range(4) if other != row])
    assert_same(jax.tree.map(lambda x: x[others], got), jax.tree.map(lambda x: x[others], whole))


def after_prompt(params, row: int, prompt: np.ndarray) -> int:
    memory = row
    for place, token in enumerate(prompt):
        memory = int(params["next"][place, memory, token])
    return memory


# Networks

NEW = 7
STOP = tuple(range(0, VOCAB, 2))


def network(config: ModelConfig) -> dict[str, Any]:
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    params = oracle.randomised(shapes, np.random.default_rng(4))

    def sharpen(path, leaf):
        return jnp.asarray(leaf * 3 if "output" in jax.tree_util.keystr(path) else leaf)

    return jax.tree_util.tree_map_with_path(sharpen, params)


def assert_rescored(got: Beams, prompt, lengths, full) -> None:
    """Compare log p of every text with a full pass over prompt and text, without a cache."""
    tokens, ends = np.asarray(got.tokens), np.asarray(got.lengths)
    assert (ends > 0).all() and len(set(ends.ravel().tolist())) > 1
    totals = np.zeros(ends.shape)
    for row, length in enumerate(lengths):
        for i, end in enumerate(ends[row]):
            text = tokens[row, i, :end]
            logits = full(row, np.concatenate([prompt[row, :length], text])[None])[0]
            for n, token in enumerate(text):
                totals[row, i] += log_softmax(logits[length - 1 + n])[token]
    assert_near(got.log_probs, totals, 3e-5)
    assert_near(got.scores, totals / ends**0.7, 3e-5)


@pytest.mark.slow
def test_decoder_beam_scores_match_full_forward():
    """The cache of ragged rows is forked, reordered and consumed."""
    params, prompt = network(ROPE), prompts(VOCAB, rows=3, columns=5)
    lengths = [5, 1, 3]
    state = init_cache(ROPE, 3, 5 + NEW - 1)
    got = beam_search(
        make_step(build(ROPE)), params, prompt, state, num_tokens=NEW, num_beams=5, num_results=5,
        stop=STOP, lengths=lengths, length_penalty=LengthPenalty(0.7),
    )  # fmt: skip
    assert_rescored(got, prompt, lengths, lambda row, tokens: oracle.forward(ROPE, params, tokens))


@pytest.mark.slow
def test_encoder_decoder_beam_scores_match_full_forward():
    params, model = network(PAIR), build(PAIR)
    source = np.random.default_rng(3).integers(0, VOCAB, (3, 7), dtype=np.int32)
    places = np.tile(np.arange(7, dtype=np.int32), (3, 1))
    places[1, 4:] = -1
    state = jax.jit(partial(model.apply, method="init_cache", capacity=NEW))(
        {"params": params}, source, positions=places
    )
    begin = np.full((3, 1), 2, np.int32)
    got = beam_search(
        make_step(model), params, begin, state, num_tokens=NEW, num_beams=4, num_results=4,
        stop=STOP, length_penalty=LengthPenalty(0.7),
    )  # fmt: skip

    def full(row, tokens):
        here = slice(row, row + 1)
        return oracle.forward(
            PAIR, params, tokens, source=source[here], source_positions=places[here]
        )

    assert_rescored(got, begin, [1, 1, 1], full)


class Recurrent(nn.Module):
    """Embedding, GRU, logits; the carry is the state."""

    @nn.compact
    def __call__(self, tokens, state, valid):
        x = nn.Embed(VOCAB, 11, name="embed")(tokens)
        cell, head = nn.GRUCell(13, name="cell"), nn.Dense(VOCAB, name="head")
        logits = []
        for t in range(tokens.shape[1]):
            new, out = cell(state, x[:, t])
            state = jnp.where(valid[:, t, None], new, state)
            logits.append(head(out))
        return jnp.stack(logits, axis=1), state


def recurrent_step(params, tokens, state, *, valid=None):
    valid = jnp.ones(tokens.shape, bool) if valid is None else valid
    return Recurrent().apply({"params": params}, tokens, state, valid)


def recurrent_logits(params, tokens: np.ndarray) -> np.ndarray:  # [T] -> [T, V]
    """Compute a GRU (Cho et al. 2014, in flax's variant) in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    cell = p["cell"]

    def affine(name, x):
        return x @ cell[name]["kernel"] + cell[name].get("bias", 0.0)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    h, out = np.zeros(13), []
    for token in tokens:
        x = p["embed"]["embedding"][token]
        r = sigmoid(affine("ir", x) + affine("hr", h))
        z = sigmoid(affine("iz", x) + affine("hz", h))
        h = (1 - z) * np.tanh(affine("in", x) + r * affine("hn", h)) + z * h
        out.append(h @ p["head"]["kernel"] + p["head"]["bias"])
    return np.stack(out)


@pytest.mark.slow
def test_recurrent_beam_scores_match_full_forward():
    """The state is one vector per row; no cache is needed."""
    prompt, empty = prompts(VOCAB, rows=3, columns=5), jnp.zeros((3, 13))
    shapes = jax.eval_shape(
        Recurrent().init, jax.random.key(0), prompt[:, :1], empty, np.ones((3, 1), bool)
    )["params"]
    rng = np.random.default_rng(6)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 1, x.shape), jnp.float32), shapes)
    lengths = [5, 1, 3]
    got = beam_search(
        recurrent_step, params, prompt, empty, num_tokens=NEW, num_beams=5, num_results=5,
        stop=STOP, lengths=lengths, length_penalty=LengthPenalty(0.7), chunk=1,
    )  # fmt: skip
    assert_rescored(
        got, prompt, lengths, lambda row, tokens: recurrent_logits(params, tokens[0])[None]
    )


# The state


@pytest.mark.slow
def test_beam_search_consumes_state_but_not_its_fork():
    params, prompt, state = automaton(1, 7), prompts(7), states()
    search = partial(beam_search, STEP, params, prompt, **COMMON)
    first = search(fork(state, 1))
    again = search(state)
    assert_same(first, again)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    with pytest.raises(ValueError, match=r"state was consumed .*fork\(state, 1\)"):
        search(state)


@pytest.mark.slow
def test_unchanged_state_leaves_are_not_gathered():
    """For example the keys of a source, which all beams share. No other leaf has this width."""
    state = dict(states(), source=jnp.ones((4, 97)), read=jnp.zeros((4, 89)))

    @dataclasses.dataclass(frozen=True)
    class Reading(Automaton):
        def __call__(self, params, tokens, state, *, valid=None):
            logits, new = super().__call__(params, tokens, state, valid=valid)
            seen = state["source"].sum(axis=1) + state["read"].sum(axis=1)
            return logits * seen[:, None, None], dict(new, read=new["read"] + 1)

    @jax.jit
    def search(params, state):
        return beam_search(Reading(), params, prompts(5), state, num_tokens=5, num_beams=3)

    program = search.lower(automaton(1, 5), state).as_text()
    gathers = [line for line in program.splitlines() if "stablehlo.gather" in line]
    assert any("12x89" in line for line in gathers)
    assert not any("12x97" in line for line in gathers)


# Compilation and refusals


@pytest.mark.slow
def test_prompts_in_one_bucket_share_program_for_all_penalties():
    step, params, sizes = counting(Automaton)(), automaton(1, 5), []
    changes: list[dict[str, Any]] = [
        dict(lengths=None), dict(lengths=[2, 1, 2, 2]), dict(length_penalty=GNMTPenalty(0.6)),
        dict(length_penalty=LengthPenalty(-1.0), early_exit=False), dict(diversity=0.7),
        dict(stop=[1, 0, 1]), dict(limits=[3, 0, 1, 2]),
    ]  # fmt: skip
    for columns, change in zip((16, 2, 1, 5, 13, 7, 11), changes, strict=True):
        arguments: dict[str, Any] = dict(num_tokens=3, num_beams=4, groups=2, stop=(0, 1)) | change
        beam_search(step, params, prompts(5, columns=columns), states(), **arguments)
        sizes.append(len(step.calls))
    assert sizes[0] > 0 and sizes == sizes[:1] * 7


REFUSED = [
    (r"num_beams is 0: must be an integer of at least 1", dict(num_beams=0)),
    (r"num_beams is 2.0", dict(num_beams=2.0)),
    (r"num_tokens is 0", dict(num_tokens=0)),
    (r"num_tokens is 2147483648: must be at most 2147483647", dict(num_tokens=2**31)),
    (r"num_results is 0", dict(num_results=0)),
    (r"num_results is 5: must be at most num_beams, 4", dict(num_results=5)),
    (r"groups is 0", dict(groups=0)),
    (r"groups is 3: must divide num_beams, 4", dict(groups=3)),
    (r"diversity is nan: must be finite", dict(groups=2, diversity=math.nan)),
    (r"diversity is -1: must be at least 0", dict(groups=2, diversity=-1)),
    (r"diversity is 0.5 with 1 group", dict(diversity=0.5)),
    (r"stop contains 5: must be from 0 to 4", dict(stop=(1, 5))),
    (r"stop contains -1: token IDs must be integers", dict(stop=-1)),
    (r"stop contains 1.0: token IDs must be integers", dict(stop=(1.0,))),
    (r"length_penalty is 1.0: must be a value", dict(length_penalty=1.0)),
    (r"length_penalty is <class .*: must be a value", dict(length_penalty=LengthPenalty)),
    (r"LengthPenalty\(alpha=99\) for length 3 is 1.7.*e\+47: must be .* within float32",
     dict(length_penalty=LengthPenalty(99))),
    (r"for length 1 is nan: must be above 0", dict(length_penalty=lambda n: n * math.nan)),
    (r"for length 1 is -1: must be above 0", dict(length_penalty=lambda n: -n)),
    (r"returned shape \(\) for 3 lengths: must be \(3,\)", dict(length_penalty=lambda n: 1.0)),
    (r"processor is 3: must be callable with", dict(processors=(3,))),
    (r"prompt has 4 rows, but the state has 3", dict(state=lambda: states(3))),
    (r"the first axes of the state's leaves are \['3', '4'\]: must be equal",
     dict(state=lambda: dict(states(), more=jnp.zeros((3, 1))))),
    (r"chunk is 0", dict(chunk=0)),
    (r"lengths are \[0, 1, 1, 1\]", dict(lengths=[0, 1, 1, 1])),
    (r"limits are \[4, 1, 1, 1\]: must be from 0 to 3", dict(limits=[4, 1, 1, 1])),
    (r"limits are \[3, -1, 1, 1\]: must be from 0 to 3", dict(limits=[3, -1, 1, 1])),
    (r"limits are float64\[4\]: must be integers \[4\]", dict(limits=np.ones(4))),
    (r"limits are int64\[1\]: must be integers \[4\]", dict(limits=[3])),
    (r"prompt has shape \(4, 0\)", dict(prompt=np.zeros((4, 0), np.int32))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "change"), REFUSED, ids=[message for message, _ in REFUSED])
def test_invalid_arguments_are_rejected(message, change):
    """Errors are raised before anything is compiled and before the state is consumed."""
    state = change.get("state", states)()
    arguments = dict(prompt=prompts(5), num_tokens=3, num_beams=4) | change | dict(state=state)
    with pytest.raises(ValueError, match=message):
        beam_search(STEP, automaton(1, 5), **arguments)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_length_penalties_match_their_formulas():
    lengths = np.array([1, 4, 9])
    assert LengthPenalty(0.5)(lengths).tolist() == pytest.approx([1, 2, 3])
    assert GNMTPenalty(0.5)(lengths).tolist() == pytest.approx([1, 1.5**0.5, (7 / 3) ** 0.5])


@pytest.mark.parametrize("penalty", [LengthPenalty, GNMTPenalty])
@pytest.mark.parametrize("alpha", [math.nan, math.inf, "1"])
def test_nonfinite_alpha_is_rejected(penalty, alpha):
    with pytest.raises(ValueError, match=r"alpha is .*: must be finite"):
        penalty(alpha)


def test_beam_search_longer_than_cache_is_rejected():
    """The last token is not fed back, so 3 tokens and 7 new ones take 9 slots."""
    with pytest.raises(ValueError, match="reach length 9: the limit is 8"):
        beam_search(
            make_step(build(ROPE)), {}, prompts(VOCAB), init_cache(ROPE, 4, 8), num_tokens=NEW,
            num_beams=2,
        )  # fmt: skip


@pytest.mark.slow
def test_empty_batch_returns_no_results():
    got = beam_search(
        STEP, automaton(1, 5), prompts(5, 0), states(0), num_tokens=3, num_beams=4, num_results=2
    )
    assert got.tokens.shape == (0, 2, 3) and got.scores.shape == (0, 2)


@pytest.mark.slow
def test_beam_search_passes_leak_nan_and_transfer_checks():
    """No leaked tracer, NaN, implicit transfer, or 64-bit result with x64 enabled."""
    params, state = automaton(1, 5), states()
    with (
        jax.checking_leaks(),
        jax.debug_nans(True),
        jax.transfer_guard("disallow"),
        jax.enable_x64(True),
    ):
        got = beam_search(
            STEP, params, prompts(5), state, num_tokens=2, num_beams=2, stop=1, groups=2,
            diversity=0.5, length_penalty=LengthPenalty(0.7), processors=(Force(3),),
        )  # fmt: skip
    assert got.tokens[:, 0, 0].tolist() == [3] * 4
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [jnp.int32] * 2 + [jnp.float32] * 2
