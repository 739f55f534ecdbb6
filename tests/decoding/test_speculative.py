"""Speculative decoding: the same tokens or distribution as `generate` for any proposals."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.test_decode import (
    NEW,
    PAIR,
    PROMPT,
    ROPE,
    VOCAB,
    CountingStep,
    counting,
    prompts,
)
from tests.decoding.test_decode import parameters as random_parameters
from tests.support.oracle import chi_squared_level
from tests.support.ours import as_ours
from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.config import ModelConfig
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.generation import generate, prefill
from transformer_jax.decoding.logit_processors import NoRepeatNGram, PresencePenalty
from transformer_jax.decoding.proposers import Draft, PromptLookup, Proposal, Proposer
from transformer_jax.decoding.samplers import Greedy, Sample, Temperature, TopK
from transformer_jax.decoding.speculative import _verify, acceptance, residual, speculate
from transformer_jax.decoding.step import Step, make_step
from transformer_jax.models.factory import build, init_cache
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

RING = dataclasses.replace(ROPE, window=5)
LENGTHS = np.array([11, 3, 7], np.int32)
DRAFTED = 3
SAMPLER = Sample(TopK(3), Temperature(0.7))


# Proposers and models for the tests


@as_ours
@partial(jax.tree_util.register_dataclass, data_fields=("text", "logits"), meta_fields=())
@dataclass(frozen=True)
class Scripted(Proposer):
    """Proposer of text[b, n] as new token n of row b."""

    text: Any
    logits: Any = None

    def propose(self, proposer_state, turn):
        at = turn.history.new[:, None] + jnp.arange(turn.num_draft)[None]
        tokens = jnp.take_along_axis(self.text, at, axis=1, mode="fill", fill_value=-1)
        if self.logits is None:
            return Proposal(tokens), proposer_state
        logits = jnp.take_along_axis(self.logits, at[..., None], axis=1, mode="clip")
        return Proposal(tokens, logits), proposer_state


@dataclass(frozen=True)
class Chain:
    """A step with logits params[previous token, this token]; its state cannot be rewound."""

    def __call__(self, params, tokens, state, *, valid=None):
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid

        def read(before, x):
            token, counts = x
            return jnp.where(counts, token, before), params[before, token]

        state, logits = jax.lax.scan(read, state, (tokens.T, valid.T))
        return logits.swapaxes(0, 1), state


@dataclass(frozen=True)
class Ledger(Step):
    """`Chain` with a state that can be rewound: all tokens so far and their number."""

    def __call__(self, params, tokens, state, *, valid=None):
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        rows = jnp.arange(len(tokens))

        def read(state, x):
            text, length = state
            token, counts = x
            logits = params[text[rows, length], token]
            text = text.at[rows, length + 1].set(jnp.where(counts, token, text[rows, length + 1]))
            return (text, length + counts), logits

        state, logits = jax.lax.scan(read, state, (tokens.T, valid.T))
        return logits.swapaxes(0, 1), state

    def rewind(self, state, before, count):
        length = before[1] + count
        beyond = jnp.arange(state[0].shape[1])[None] > length[:, None]
        return jnp.where(beyond, 0, state[0]), length


def chain_state(rows: int):
    return jnp.zeros((rows,), jnp.int32)


def ledger_state(rows: int):
    return jnp.zeros((rows, 13), jnp.int32), jnp.zeros((rows,), jnp.int32)


def chain(seed: int, vocab: int = 5, scale: float = 1.5) -> jax.Array:
    table = scale * np.random.default_rng(seed).normal(size=(vocab, vocab, vocab))
    return jnp.asarray(table, jnp.float32)


@dataclass(frozen=True)
class GRU:
    """A recurrent language model with flax's GRU cell (Cho et al. 2014)."""

    vocab: int = VOCAB
    width: int = 13

    def init(self, seed: int):
        rng = np.random.default_rng(seed)
        cell = nn.GRUCell(self.width)
        shapes = jax.eval_shape(
            cell.init, jax.random.key(0), jnp.zeros((1, self.width)), jnp.zeros((1, self.width))
        )
        shapes = {
            "cell": shapes["params"],
            "embed": jax.ShapeDtypeStruct((self.vocab, self.width), jnp.float32),
            "out": jax.ShapeDtypeStruct((self.width, self.vocab), jnp.float32),
        }
        draw = partial(jax.tree.map, lambda x: 0.3 * rng.normal(size=x.shape) * (x.ndim > 1))
        return jax.tree.map(partial(jnp.asarray, dtype=jnp.float32), draw(shapes))

    def __call__(self, params, tokens, state, *, valid=None):
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid

        def read(hidden, x):
            embedded, counts = x
            new, out = nn.GRUCell(self.width).apply({"params": params["cell"]}, hidden, embedded)
            return jnp.where(counts[:, None], new, hidden), out @ params["out"]

        embedded = 30 * jnp.take(params["embed"], tokens, axis=0).swapaxes(0, 1)
        state, logits = jax.lax.scan(read, state, (embedded, valid.T))
        return logits.swapaxes(0, 1), state


def counted(script, text, lengths, num_draft: int, num_tokens: int, vocab: int):
    """Count the proposed tokens, accepted tokens and turns of each row, token by token."""
    out = []
    for guess, actual, length in zip(np.asarray(script), np.asarray(text), lengths, strict=True):
        n, proposed, accepted, rounds = min(1, length), 0, 0, 0
        while n < length:
            usable = 0
            while usable < min(num_draft, num_tokens - n - 1) and 0 <= guess[n + usable] < vocab:
                usable += 1
            run = 0
            while run < usable and n + run < length and guess[n + run] == actual[n + run]:
                run += 1
            accepted += min(run, length - n)
            proposed, rounds, n = proposed + usable, rounds + 1, n + run + 1
        out.append((proposed, accepted, rounds))
    return [list(x) for x in zip(*out, strict=True)]


def scripts(text: np.ndarray, vocab: int, seed: int = 5) -> dict[str, np.ndarray]:
    """Return proposals for a text: all right, all wrong, a mixture, or missing tokens."""
    rng = np.random.default_rng(seed)
    wrong = (np.maximum(text, 0) + 1) % vocab
    mixed = np.where(rng.random(text.shape) < 0.3, wrong, text)
    nothing = np.where(rng.random(text.shape) < 0.5, -1, vocab + 3)
    some = np.where(rng.random(text.shape) < 0.2, nothing, mixed)
    return dict(right=text, wrong=wrong, mixed=mixed, nothing=nothing, some=some)


def assert_same_text(got, want, tolerance: float = 2e-5) -> None:
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    assert_near(got.log_probs, want.log_probs, tolerance)


def assert_varied(text) -> None:
    assert all(len(set(row.tolist())) > 2 for row in np.asarray(text))


# Greedy tokens are those of `generate`


@dataclass(frozen=True)
class Model:
    step: Any
    params: Any
    empty: Any
    """A function without arguments that returns a state of three rows."""
    prompt: np.ndarray
    lengths: np.ndarray


def decoder_model(config: ModelConfig, capacity: int, seed: int = 1) -> Model:
    step, params = CountingStep(build(config)), random_parameters(config, seed)
    empty = lambda: init_cache(config, 3, capacity)  # noqa: E731
    return Model(step, params, empty, prompts(), LENGTHS)


def pair_model() -> Model:
    """An encoder-decoder with scanned layers and one padded source."""
    model = build(dataclasses.replace(PAIR, scan_layers=True))
    params = stack_layers(random_parameters(PAIR, 2))
    source = np.random.default_rng(3).integers(0, VOCAB, (3, 7), dtype=np.int32)
    places = np.tile(np.arange(7, dtype=np.int32), (3, 1))
    places[1, 4:] = -1
    state = jax.jit(partial(model.apply, method="init_cache", capacity=NEW + 1))(
        {"params": params}, source, positions=places
    )
    prompt = np.array([[7, 2], [2, 0], [4, 2]], np.int32)
    return Model(CountingStep(model), params, lambda: state, prompt, np.array([2, 1, 2]))


def gru_model() -> Model:
    step = GRU()
    return Model(step, step.init(5), lambda: jnp.zeros((3, 13)), prompts(), LENGTHS)


MODELS = {
    "rope-gqa": lambda: decoder_model(ROPE, PROMPT + NEW - 1),
    "ring": lambda: decoder_model(RING, RING.window + DRAFTED),
    "encoder-decoder": pair_model,
    "recurrent": gru_model,
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("rope-gqa", marks=pytest.mark.long),  # the tests of drafts use the same model
        "ring",
        "encoder-decoder",
        "recurrent",
    ],
)
def model(request) -> Model:
    return MODELS[request.param]()


@pytest.mark.slow
@pytest.mark.long_except("recurrent")
def test_greedy_tokens_match_generate_for_any_proposals(model):
    """Also with a different script for each row, in one program, and with an equal final state."""
    arguments = dict(num_tokens=NEW, lengths=model.lengths)
    want = generate(model.step, model.params, model.prompt, fork(model.empty(), 1), **arguments)
    assert_varied(want.tokens)
    text = np.asarray(want.tokens)
    texts = scripts(text, VOCAB)
    texts["one per row"] = np.stack([texts["right"][0], texts["wrong"][1], texts["some"][2]])
    traced = []
    for name, script in texts.items():
        got = speculate(
            model.step, model.params, model.prompt, fork(model.empty(), 1),
            proposer=Scripted(jnp.asarray(script)), num_draft=DRAFTED, **arguments,
        )  # fmt: skip
        assert_same_text(got, want)
        if isinstance(model.step, CountingStep):
            traced.append(len(model.step.calls))
            assert_same_memory(got.state, want.state, model)
        else:
            chex.assert_trees_all_close(got.state, want.state, atol=1e-5)
        proposed, accepted, rounds = counted(script, text, [NEW] * 3, DRAFTED, NEW, VOCAB)
        assert got.proposed.tolist() == proposed and got.accepted.tolist() == accepted, name
        assert int(got.calls) == max(rounds) * (2 if isinstance(model.step, GRU) else 1), name
        assert_near(got.acceptance + 1, np.divide(accepted, np.maximum(proposed, 1)) + 1, 1e-6)
        if name == "right":
            assert accepted == proposed and rounds == [-(-(NEW - 1) // (DRAFTED + 1))] * 3
        if name in ("wrong", "nothing"):
            assert accepted == [0] * 3 and rounds == [NEW - 1] * 3
    assert len(set(traced)) <= 1


def assert_same_memory(got, want, model: Model) -> None:
    """Check that lengths are equal, and keys at all positions that a query can still see."""
    np.testing.assert_array_equal(got.length, want.length)
    config = model.step.model.config

    def keys(cache):
        layers = cache.layers
        if not isinstance(layers, tuple):
            layers = [
                jax.tree.map(lambda x, i=i: x[:, i], layers) for i in range(layers.k.shape[1])
            ]
        for layer, row in itertools.product(layers, range(3)):
            positions = np.asarray(layer.positions[row])
            oldest = 0 if config.window is None else cache.length[row] - config.window + 1
            seen = [s for s in np.argsort(positions) if positions[s] >= max(oldest, 0)]
            yield positions[seen], np.asarray(layer.k)[row, seen], np.asarray(layer.v)[row, seen]

    pairs = list(zip(keys(got), keys(want), strict=True))
    assert len(pairs) == 3
    for one, two in pairs:
        np.testing.assert_array_equal(one[0], two[0])
        assert_near(one[1], two[1], 2e-5)
        assert_near(one[2], two[2], 2e-5)
    if want.cross is not None:
        jax.tree.map(assert_same_bits, got.cross, want.cross)


@pytest.fixture(scope="module")
def drafted():
    """A decoder as its own draft; the program also accepts drafts with other parameters."""
    step, params = CountingStep(build(ROPE)), random_parameters(ROPE)
    empty = init_cache(ROPE, 3, PROMPT + NEW - 1)

    def call(draft_params):
        return speculate(
            step, params, prompts(), fork(empty, 1), lengths=LENGTHS, num_tokens=NEW,
            num_draft=DRAFTED, proposer=Draft(step, draft_params, empty),
        )  # fmt: skip

    want = generate(step, params, prompts(), fork(empty, 1), num_tokens=NEW, lengths=LENGTHS)
    call(params)  # compile before the tests count traces, in whatever order they run
    return step, params, call, want


@pytest.mark.slow
def test_draft_identical_to_model_is_always_accepted(drafted):
    _, params, call, want = drafted
    got = call(params)
    assert_same_text(got, want)
    assert got.proposed.tolist() == got.accepted.tolist() == [16, 16, 16]
    assert int(got.calls) == 6  # 22 tokens, four per turn
    assert got.acceptance.tolist() == [1, 1, 1]
    chex.assert_trees_all_close(got.proposer_state, got.state, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True], ids=["other", "nan"])
def test_draft_with_other_parameters_does_not_change_tokens(drafted, broken):
    """A draft with NaN logits proposes nothing and changes no token, either."""
    step, params, call, want = drafted
    other = jax.tree.map(lambda x: x * jnp.nan, params) if broken else random_parameters(ROPE, 9)
    before = len(step.calls)
    got = call(other)
    assert len(step.calls) == before, "the draft's parameters are traced"
    assert_same_text(got, want)
    assert (got.proposed.sum() == 0) == broken
    np.testing.assert_array_equal(got.proposer_state.length, got.state.length)


# Ends


@pytest.mark.slow
def test_speculative_rows_end_as_in_generate():
    """A stop token in the middle of accepted proposals discards the tokens after it."""
    params, prompt = chain(1, 17, 3.0), prompts(7) % 17
    arguments = dict(num_tokens=NEW, lengths=np.array([11, 3, 7, 1, 2, 5, 4]))
    plain = generate(Chain(), params, prompt, chain_state(7), **arguments)
    text = np.asarray(plain.tokens)
    arguments |= dict(stop=(int(text[0, 3]), int(text[1, 9])))
    arguments |= dict(limits=np.array([NEW, NEW, 0, 1, 2, NEW, 9]))
    want = generate(Chain(), params, prompt, chain_state(7), **arguments)
    lengths = want.lengths.tolist()
    assert lengths[:5] == [*lengths[:2], 0, 1, 2] and 1 < lengths[0] <= 5 and len(set(lengths)) > 4
    for name, script in scripts(text, 17).items():
        got = speculate(
            Chain(), params, prompt, chain_state(7), proposer=Scripted(jnp.asarray(script)),
            num_draft=5, **arguments,
        )  # fmt: skip
        assert_same_text(got, want)
        np.testing.assert_array_equal(got.state, want.state)
        assert [len(row) for row in got.rows()] == lengths
        assert (np.asarray(got.log_probs)[np.asarray(got.tokens) < 0] == 0).all()
        ends = np.asarray(arguments["limits"])
        for row in range(7):
            _, accepted, _ = counted(
                script[row : row + 1], text[row : row + 1], lengths[row : row + 1], 5, ends[row], 17
            )
            assert got.accepted[row] == accepted[0], (name, row)
        if name == "right":
            assert got.accepted[0] == lengths[0] - 1, "the stop token itself was accepted"


def test_text_exceeding_cache_by_one_token_is_rejected():
    """As in `generate`, 11 tokens and 23 new ones need 33 slots; proposals need no more."""
    step = CountingStep(build(ROPE))
    with pytest.raises(ValueError, match=r"reach length 33: the limit is 32"):
        speculate(step, {}, prompts(), init_cache(ROPE, 3, 32), proposer=PromptLookup(),
                  num_tokens=NEW, num_draft=DRAFTED)  # fmt: skip
    assert step.calls == []  # the test of a draft equal to the model uses 33 slots


@pytest.mark.parametrize("seed", [2, 3])
def test_draft_proposals_do_not_change_greedy_tokens(seed):
    """The draft is equal to the model (seed 2), and always right, or different (seed 3)."""
    params, prompt = chain(2), prompts(31) % 5
    want = generate(Chain(), params, prompt, chain_state(31), num_tokens=9)
    draft = Draft(Chain(), chain(seed), chain_state(31))
    got = speculate(
        Chain(), params, prompt, chain_state(31), proposer=draft, num_tokens=9, num_draft=2
    )
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert (np.asarray(got.accepted) == got.proposed).all() == (seed == 2)


@pytest.mark.long
def test_speculation_continues_from_model_and_draft_states():
    """The state of the draft and that of the model, after different numbers of tokens."""
    params, other, prompt = chain(2), chain(3), prompts(31) % 5
    call = partial(speculate, Chain(), params, num_draft=4)
    whole = call(prompt, chain_state(31), num_tokens=24,
                 proposer=Draft(Chain(), other, chain_state(31)))  # fmt: skip
    first = call(prompt, chain_state(31), num_tokens=12,
                 proposer=Draft(Chain(), other, chain_state(31)))  # fmt: skip
    np.testing.assert_array_equal(first.tokens, whole.tokens[:, :12])
    np.testing.assert_array_equal(first.proposer_state, first.tokens[:, -2])
    np.testing.assert_array_equal(first.state, first.tokens[:, -2])
    then = call(first.tokens[:, -1:], first.state, num_tokens=12,
                proposer=Draft(Chain(), other, first.proposer_state))  # fmt: skip
    np.testing.assert_array_equal(then.tokens, whole.tokens[:, 12:])
    np.testing.assert_array_equal(then.proposer_state, whole.tokens[:, -2])


@pytest.mark.slow
def test_processors_see_preceding_proposals():
    params, prompt = chain(4), prompts(7) % 5
    arguments = dict(num_tokens=NEW, processors=(NoRepeatNGram(3), PresencePenalty(0.7)))
    want = generate(Chain(), params, prompt, chain_state(7), **arguments)
    plain = generate(Chain(), params, prompt, chain_state(7), num_tokens=NEW)
    assert (want.tokens != plain.tokens).any(axis=1).all()
    for script in scripts(np.asarray(want.tokens), 5).values():
        got = speculate(
            Chain(), params, prompt, chain_state(7), proposer=Scripted(jnp.asarray(script)),
            num_draft=DRAFTED, **arguments,
        )  # fmt: skip
        assert_same_text(got, want)


@pytest.mark.slow
def test_nonfinite_model_logits_yield_token_minus_one():
    params = chain(1, 17, 3.0)
    prompt = prompts(7) % 17
    plain = np.asarray(generate(Chain(), params, prompt, chain_state(7), num_tokens=NEW).tokens)
    params = params.at[plain[0, 4], plain[0, 5]].set(jnp.nan)
    want = generate(Chain(), params, prompt, chain_state(7), num_tokens=NEW)
    assert want.tokens[0, 6] == -1 and np.isnan(want.log_probs[0, 6])
    got = speculate(
        Chain(), params, prompt, chain_state(7), num_tokens=NEW, num_draft=5,
        proposer=Scripted(jnp.asarray(plain)),
    )  # fmt: skip
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(np.isnan(got.log_probs), np.isnan(want.log_probs))
    assert got.accepted[0] > 0 and int((want.tokens < 0).sum()) > 1


# The distribution is that of plain sampling


@jax.jit
def chances_and_rest(p, q):
    return acceptance(p, q), residual(p, q)


def test_accepted_and_replaced_proposals_follow_model_distribution(rng):
    """sum over x of q(x) (a(x) [x = y] + (1 - a(x)) r(y)) = p(y), in float64."""
    p, q = (rng.dirichlet(np.full(7, 0.4), 100) for _ in range(2))
    p[::3, 2], q[::3, 4], p[::4, :5] = 0, 0, 0
    q[::10] = np.eye(7)[rng.integers(0, 7, 10)]  # proposals that are not drawn
    p, q = (np.float32(x / x.sum(axis=1, keepdims=True)) for x in (p, q))
    stay, rest = (np.asarray(x, np.float64) for x in chances_and_rest(p, q))
    p, q = np.float64(p), np.float64(q)
    assert ((stay >= 0) & (stay <= 1) & (rest >= 0)).all()
    np.testing.assert_allclose(rest.sum(axis=1), 1, rtol=0, atol=1e-6)
    total = q * stay + (q * (1 - stay)).sum(axis=1, keepdims=True) * rest
    np.testing.assert_allclose(total, p, rtol=0, atol=1e-6)
    some = q > 0
    np.testing.assert_allclose(stay[some], np.minimum(1, p[some] / q[some]), rtol=0, atol=1e-6)
    assert total.shape == (100, 7) and some.sum() > 500


def verified(logits, proposal) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of accepted proposals, and the tokens after them, of many rows."""
    rows, count = proposal.tokens.shape
    logits = jnp.broadcast_to(jnp.array(logits), (rows, count + 1, len(logits[0])))
    options: Any = SimpleNamespace(sampler=Sample())
    keys = jax.random.split(jax.random.key(5), rows)
    state: Any = SimpleNamespace(keys=keys, count=jnp.zeros(rows, jnp.int32))
    usable = jnp.ones((rows, count), bool)
    return jax.device_get(jax.jit(partial(_verify, options, state))(logits, proposal, usable))


def test_proposals_are_accepted_in_proportion_to_model_and_draft():
    """Three quarters of the draft's tokens are 0, and a quarter of the model's are."""
    rows, three = 499, float(np.log(3))
    tokens, draft = jnp.zeros((rows, 1), jnp.int32), jnp.array([three, 0.0])
    proposal = Proposal(tokens, jnp.broadcast_to(draft, (rows, 1, 2)))
    accepted, token = verified([[0.0, three]] * 2, proposal)
    assert abs(accepted.sum() - rows / 3) < 5 * (rows * 2 / 9) ** 0.5
    assert (token[accepted == 0] == 1).all()


def test_token_after_accepted_proposals_follows_model_distribution():
    """It is not drawn from the residual of the last proposal."""
    rows, certain, after = 256, [-50.0, 50.0, -50.0], [0.0, 0.0, -50.0]
    accepted, token = verified([certain, certain, after], Proposal(jnp.ones((rows, 2), jnp.int32)))
    assert (accepted == 2).all()
    counts = np.bincount(token, minlength=3)
    assert counts[2] == 0 and abs(counts[0] - rows / 2) < 5 * (rows / 4) ** 0.5


def test_residual_between_equal_distributions_is_that_distribution():
    p = np.float32([0.25, 0.75])
    stay, rest = chances_and_rest(p, p)
    assert_same_bits(rest, p)
    assert stay.tolist() == [1, 1]


TEXT = 4
ROWS = 30_000


def chances(table: np.ndarray, before: int, last: int, sampler: bool = True) -> np.ndarray:
    """Return the probabilities after TopK(3) and Temperature(0.7), in float64."""
    logits = np.float64(table[before, last])
    logits = np.where(logits >= np.sort(logits)[-3], logits, -np.inf)
    x = np.exp((logits - logits.max()) / 0.7)
    return x / x.sum()


def enumerated(table, prompt) -> np.ndarray:  # [V, V, V, V]
    out = np.zeros((5,) * TEXT)
    for text in itertools.product(range(5), repeat=TEXT):
        read, chance = list(prompt), 1.0
        for token in text:
            chance *= chances(table, read[-2], read[-1])[token]
            read.append(token)
        out[text] = chance
    assert abs(out.sum() - 1) < 1e-9
    return out


def assert_drawn_from(want: np.ndarray, tokens) -> float:
    """Chi-squared test over all texts at level 1e-4; impossible texts must not occur."""
    tokens = np.asarray(tokens)
    seen = np.zeros(want.shape)
    np.add.at(seen, tuple(tokens.T), 1)
    assert seen.sum() == ROWS and (seen[want == 0] == 0).all()
    expected = want * ROWS
    often = expected >= 5
    pairs = list(zip(seen[often], expected[often], strict=True))
    pairs.append((seen[~often].sum(), expected[~often].sum()))
    assert len(pairs) > 40
    statistic = sum((s - e) ** 2 / e for s, e in pairs if e > 0)
    level = chi_squared_level(statistic, len(pairs) - 1)
    assert level > 1e-4, f"chi-squared {statistic:.1f} of {len(pairs)} cells: {level:.1e}"
    return level


PROMPT_OF_CHAIN = [1, 3, 1, 0, 2, 1, 3]
IMPLEMENTATIONS = {"draft": "rbg", "lookup": "unsafe_rbg"}
PROPOSERS = {
    "draft": lambda step, state: Draft(step, chain(12), state),
    "hot draft": lambda step, state: Draft(step, chain(11), state, Sample(Temperature(3.0))),
    "lookup": lambda step, state: PromptLookup(1),
    "equal draft": lambda step, state: Draft(step, chain(11), state),
}


@pytest.mark.slow
@pytest.mark.long_except("equal draft")
@pytest.mark.parametrize(
    "name", ["draft", "lookup", pytest.param("hot draft", marks=pytest.mark.long), "equal draft"]
)
def test_speculative_samples_follow_plain_sampling_distribution(name):
    """Compare 30,000 rows of four tokens with the 81 possible texts, enumerated in float64."""
    step, state = (Chain(), chain_state) if name == "hot draft" else (Ledger(), ledger_state)
    got = speculate(
        step, chain(11), np.tile(PROMPT_OF_CHAIN, (ROWS, 1)), state(ROWS), num_draft=2,
        proposer=PROPOSERS[name](step, state(ROWS)), num_tokens=TEXT, sampler=SAMPLER,
        key=jax.random.key(2, impl=IMPLEMENTATIONS.get(name, "threefry2x32")),
    )  # fmt: skip
    assert_drawn_from(enumerated(np.asarray(chain(11)), PROMPT_OF_CHAIN), got.tokens)
    rate = float(got.accepted.sum() / got.proposed.sum())
    assert (rate == 1) == (name == "equal draft") and 0.01 < rate
    np.testing.assert_array_equal(got.lengths, TEXT)
    assert_near(got.log_probs, log_probs(np.asarray(chain(11)), got.tokens), 1e-5)
    if isinstance(step, Ledger):
        np.testing.assert_array_equal(got.state[1], len(PROMPT_OF_CHAIN) + TEXT - 1)
        np.testing.assert_array_equal(got.state[0][:, 8:11], got.tokens[:, :3])
        assert not got.state[0][:, 11:].any()
    if name in ("draft", "equal draft"):
        jax.tree.map(assert_same_bits, got.proposer_state, got.state)


def log_probs(table: np.ndarray, tokens) -> np.ndarray:
    """Return log-probabilities of the raw model distribution."""
    text = np.concatenate([np.tile(PROMPT_OF_CHAIN, (ROWS, 1)), tokens], axis=1)
    logits = np.float64(table[text[:, -6:-2], text[:, -5:-1]])
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.take_along_axis(logits, text[:, -4:, None], axis=-1)[..., 0]


@pytest.mark.slow
def test_sampling_without_proposals_matches_generate():
    prompt, arguments = prompts(7) % 5, dict(num_tokens=NEW, sampler=SAMPLER)
    want = generate(Chain(), chain(1), prompt, chain_state(7), key=jax.random.key(5), **arguments)
    got = speculate(
        Chain(), chain(1), prompt, chain_state(7), key=jax.random.key(5), num_draft=DRAFTED,
        proposer=Scripted(jnp.full((7, NEW), -1)), **arguments,
    )  # fmt: skip
    assert_same_text(got, want)


@pytest.mark.long_except("rbg", "threefry2x32")
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_sampled_row_does_not_depend_on_other_rows(implementation):
    """Row 4 has the same tokens and proposals with other prompts, lengths and keys around it."""

    def draw(prompt, lengths, keys):
        return speculate(
            Chain(), chain(1), prompt, chain_state(7), num_draft=DRAFTED, num_tokens=NEW,
            proposer=Draft(Chain(), chain(6), chain_state(7)), sampler=SAMPLER, key=keys,
            lengths=np.array(lengths),
        )  # fmt: skip

    one = prompts(7) % 5
    two = (one + 1) % 5
    two[4] = one[4]
    keys, others = (
        jax.random.split(jax.random.key(seed, impl=implementation), 7) for seed in (3, 4)
    )
    together = draw(one, [11, 3, 7, 1, 2, 5, 4], keys)
    mixed = draw(two, [2, 1, 5, 11, 2, 9, 3], others.at[4].set(keys[4]))
    again = draw(one, [11, 3, 7, 1, 2, 5, 4], others)
    for name in ("tokens", "proposed", "accepted", "state", "proposer_state"):
        np.testing.assert_array_equal(getattr(mixed, name)[4], getattr(together, name)[4])
    same = (together.tokens == mixed.tokens).all(axis=1)
    assert same.tolist() == [False] * 4 + [True] + [False] * 2
    assert not (together.tokens == again.tokens).all(axis=1).any()


# Prompt lookup


def looked_up(text: list[int], ngram: int, count: int) -> list[int]:
    """Search backward for the last n-gram, and copy the tokens after it, also copied ones."""
    for end in range(len(text) - 1, ngram - 1, -1):
        if text[end - ngram : end] == text[-ngram:]:
            longer = list(text)
            for i in range(count):
                longer.append(longer[end + i])
            return longer[len(text) :]
    return [-1] * count


@pytest.mark.slow_except("2")
@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_prompt_lookup_copies_tokens_after_last_match(rng, ngram):
    """Short texts over three tokens, so that n-grams overlap themselves or are missing."""
    from transformer_jax.decoding.logit_processors import History
    from transformer_jax.decoding.proposers import Turn

    rows = 211
    lengths = rng.integers(1, 14, rows)
    tokens = rng.integers(0, 3, (rows, 13))
    active, room = np.ones(rows, bool), np.full(rows, 4, np.int32)

    @jax.jit
    def propose(tokens, lengths):
        keys = jax.random.split(jax.random.key(0), rows)
        turn = Turn(History.of(tokens, lengths, 5), active, room, keys, 4, Greedy())
        return PromptLookup(ngram).propose((), turn)

    proposal, proposer_state = propose(tokens, lengths)
    want = [looked_up(t[:n].tolist(), ngram, 4) for t, n in zip(tokens, lengths, strict=True)]
    np.testing.assert_array_equal(proposal.tokens, want)
    assert proposal.logits is None and proposer_state == ()
    found = np.array(want)[:, 0] >= 0
    assert 20 < found.sum() < rows - 20


@pytest.mark.slow
def test_prompt_lookup_continues_repeating_pattern():
    """A greedy chain falls into a cycle; from then on, all proposals are right."""
    params, prompt = chain(8), prompts(7) % 5
    want = generate(Chain(), params, prompt, chain_state(7), num_tokens=NEW)
    got = speculate(Chain(), params, prompt, chain_state(7), num_tokens=NEW, num_draft=7,
                    proposer=PromptLookup(2))  # fmt: skip
    assert_same_text(got, want)
    assert int(got.calls) < NEW and float(got.acceptance.min()) > 0.3


@pytest.mark.slow
def test_limits_below_num_tokens_cap_proposals():
    """Every proposal is right and there is no stop token, so only limits end a row."""
    prompt, limits = prompts(7) % 5, np.array([1, 2, 3, 5, 0, 9, NEW])
    whole = generate(Chain(), chain(1), prompt, chain_state(7), num_tokens=NEW)
    want = generate(Chain(), chain(1), prompt, chain_state(7), num_tokens=NEW, limits=limits)
    got = speculate(Chain(), chain(1), prompt, chain_state(7), num_tokens=NEW, num_draft=7,
                    proposer=Scripted(jnp.asarray(whole.tokens)), limits=limits)  # fmt: skip
    assert got.lengths.tolist() == limits.tolist()
    assert_same_text(got, want)
    np.testing.assert_array_equal(got.state, want.state)
    script = np.asarray(whole.tokens)
    proposed = [0, 0, 1, 3, 0, 7, counted(script[-1:], script[-1:], [NEW], 7, NEW, 5)[0][0]]
    assert got.proposed.tolist() == proposed and got.accepted.tolist() == proposed


@pytest.mark.slow
def test_traced_limits_are_clipped_to_num_tokens():
    prompt, limits = prompts(5) % 5, jnp.array([1, -3, 99, 7, NEW])
    want = generate(Chain(), chain(1), prompt, chain_state(5), num_tokens=NEW,
                    limits=np.clip(limits, 0, NEW))  # fmt: skip

    @jax.jit
    def go(limits, state):
        return speculate(Chain(), chain(1), prompt, state, num_tokens=NEW, num_draft=7,
                         proposer=Scripted(want.tokens), limits=limits)  # fmt: skip

    got = go(limits, chain_state(5))
    assert got.lengths.tolist() == [1, 0, NEW, 7, NEW]
    assert_same_text(got, want)
    np.testing.assert_array_equal(got.state, want.state)


# Invalid proposals


@pytest.mark.slow
def test_nonfinite_proposal_logits_do_not_change_greedy_tokens():
    prompt = prompts(7) % 5
    want = generate(Chain(), chain(1), prompt, chain_state(7), num_tokens=NEW)
    text = jnp.asarray(want.tokens)
    logits = jnp.where((text % 2 == 0)[..., None], jnp.nan, jnp.zeros((7, NEW, 5)))
    proposed = []
    for script in ((text + 1) % 5, text):
        got = speculate(Chain(), chain(1), prompt, chain_state(7), num_tokens=NEW, num_draft=2,
                        proposer=Scripted(script, logits))  # fmt: skip
        assert_same_text(got, want)
        proposed.append(int(got.proposed.sum()))
    assert min(proposed) > 0


# Compilation


@pytest.mark.slow
def test_speculative_requests_in_one_bucket_share_program():
    """Prompts of 1 to 16 tokens, and other keys, lengths, parameters and drafts."""
    step, sizes = counting(Chain)(), []
    for columns, lengths in ((16, None), (1, None), (2, [2, 1, 2]), (13, [4, 13, 1])):
        got = speculate(
            step, chain(columns), prompts(3, columns) % 5, chain_state(3), num_tokens=NEW,
            num_draft=4, lengths=lengths, key=jax.random.key(columns),
            proposer=Draft(step, chain(columns + 1), chain_state(3)),
        )  # fmt: skip
        assert (np.asarray(got.tokens) >= 0).all()
        programs = [shape for shape in step.calls if shape != (3, 1)]
        sizes.append(len(programs))
    assert sizes[0] > 0 and sizes == sizes[:1] * 4, "only the vocabulary is counted again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [jax.checking_leaks, partial(jax.debug_nans, True), partial(jax.transfer_guard, "disallow")],
    ids=["leaks", "nans", "transfers"],
)
def test_speculative_decoding_passes_leak_nan_and_transfer_checks(setting):
    params, state, prompt = chain(2), chain_state(31), prompts(31) % 5
    draft, key = Draft(Chain(), chain(3), chain_state(31)), jax.random.key(3)
    want = generate(Chain(), params, prompt, chain_state(31), num_tokens=12)
    with setting():
        got = speculate(
            Chain(), params, prompt, state, num_tokens=12, num_draft=4, proposer=draft, key=key
        )  # fmt: skip
    np.testing.assert_array_equal(got.tokens, want.tokens)


@pytest.mark.slow
def test_proposer_is_not_consumed_and_consumed_state_is_rejected():
    state, draft = chain_state(31), Draft(Chain(), chain(3), chain_state(31))
    call = partial(speculate, Chain(), chain(2), prompts(31) % 5, num_tokens=12, num_draft=4)
    first, again = (call(chain_state(31), proposer=draft) for _ in range(2))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert not draft.state.is_deleted() and not draft.params.is_deleted()
    state.delete()  # as donation does
    with pytest.raises(ValueError, match="state was consumed"):
        call(state, proposer=draft)
    with pytest.raises(ValueError, match="the draft's state was consumed"):
        call(chain_state(31), proposer=dataclasses.replace(draft, state=state))
    with pytest.raises(ValueError, match="state is shared with the proposer"):
        call(draft.state, proposer=draft)


# Refusals


@dataclass(frozen=True)
class Unregistered(Proposer):
    def propose(self, proposer_state, turn):
        return Proposal(jnp.zeros((3, turn.num_draft), jnp.int32)), proposer_state


@pytest.mark.slow
def test_invalid_arguments_are_rejected_before_compiling():
    step = CountingStep(build(ROPE))
    empty = init_cache(ROPE, 3, PROMPT + NEW)
    params = jax.eval_shape(lambda: random_parameters(ROPE))
    other = dataclasses.replace(ROPE, vocab_size=37)
    draft = Draft(make_step(build(ROPE)), params, init_cache(ROPE, 3, PROMPT + NEW))
    strange = Draft(
        make_step(build(other)), jax.eval_shape(lambda: random_parameters(other)), draft.state
    )
    ring = CountingStep(build(RING))
    key = jax.random.key(0)

    def plain(key, logits):
        return logits.argmax(-1)

    cases = [
        ("num_draft is 0: must be an integer of at least 1", dict(num_draft=0)),
        (r"num_draft is 2.0", dict(num_draft=2.0)),
        ("num_tokens is 0", dict(num_tokens=0)),
        ("proposer is <class .*PromptLookup'>: must be a value", dict(proposer=PromptLookup)),
        ("proposer is None: must be a value", dict(proposer=None)),
        ("is of type Unregistered, which is not a pytree", dict(proposer=Unregistered())),
        ("sampler is <function .*plain.*`distribution", dict(sampler=plain, key=key)),
        ("sampler is <class .*Sample'>: speculate needs a value", dict(sampler=Sample, key=key)),
        ("key is None: must be set, because Sample", dict(sampler=SAMPLER)),
        ("the draft's sampler is <function .*plain",
         dict(proposer=dataclasses.replace(draft, sampler=plain))),
        ("the vocabulary of the draft has size 37: must be 31", dict(proposer=strange)),
        (r"the draft's prompt and new tokens reach length 33: the limit is 32",
         dict(proposer=dataclasses.replace(draft, state=init_cache(ROPE, 3, 32)))),
        ("the draft's prompt has 3 rows, but the cache has 2",
         dict(proposer=dataclasses.replace(draft, state=init_cache(ROPE, 2, 40)))),
        (r"capacity is 7: a ring .* at least window \+ 3 = 8 slots",
         dict(step=ring, state=init_cache(RING, 3, 7))),
        (
            r"the draft's cache capacity is 7: a ring",
            dict(
                proposer=Draft(
                    ring, jax.eval_shape(lambda: random_parameters(RING)), init_cache(RING, 3, 7)
                )
            ),
        ),
        (r"stop is 31: must be from 0 to 30", dict(stop=31)),
        (r"limits are \[24, 1, 1\]", dict(limits=[24, 1, 1])),
        (r"lengths are \[1, 0, 2\]", dict(lengths=[1, 0, 2])),
    ]  # fmt: skip
    for message, change in cases:
        arguments = dict(
            step=step, prompt=prompts(), state=empty, proposer=draft, num_tokens=NEW, num_draft=3
        )
        arguments |= change
        call = [arguments.pop(name) for name in ("step", "prompt", "state")]
        with pytest.raises(ValueError, match=message):
            speculate(call[0], params, *call[1:], **arguments)
        assert all(shape[1] == 1 for shape in step.calls), "only the vocabulary is counted"
    with pytest.raises(ValueError, match="ngram is 0: must be an integer of at least 1"):
        PromptLookup(0)


@pytest.mark.slow
def test_cache_shorter_than_its_window_is_not_a_ring():
    """With fewer slots than the window the cache cannot wrap, so it can always be rewound."""
    step = make_step(build(dataclasses.replace(ROPE, window=50)))
    step.check_rewind(init_cache(ROPE, 3, 40), 30)
    with pytest.raises(ValueError, match=r"window \+ 30 = 80 slots"):
        step.check_rewind(init_cache(ROPE, 3, 50), 30)


@pytest.mark.slow
def test_cache_is_rewound_to_each_row_length():
    step, params = make_step(build(ROPE)), random_parameters(ROPE)
    read = jax.jit(partial(prefill, step))
    _, before = read(params, prompts()[:, :5], init_cache(ROPE, 3, 17), np.array([4, 2, 3]))
    _, after = read(params, prompts()[:, 5:10], before, np.array([5, 5, 5]))
    count = np.array([0, 5, 2])
    back = step.rewind(after, before, jnp.asarray(count))
    assert back.length.tolist() == [4, 7, 5]
    for layer in back.layers:
        for row, length in enumerate([4, 7, 5]):
            assert layer.positions[row].tolist() == [*range(length), *[-1] * (17 - length)]


@pytest.mark.long
def test_speculative_decoding_works_with_x64():
    """The counts in the loop remain i32."""
    import os
    import subprocess
    import sys

    code = """
import jax
jax.config.update("jax_enable_x64", True)
from transformer_jax import *
config = preset("tiny", num_layers=1, vocab_size=17, positions="rope")
step, params = make_step(build(config)), init_params(config, jax.random.key(0))
prompt = jax.random.randint(jax.random.key(1), (2, 5), 0, 17)
out = speculate(step, params, prompt, init_cache(config, 2, 24), proposer=PromptLookup(2),
                num_tokens=9, num_draft=3)
want = generate(step, params, prompt, init_cache(config, 2, 24), num_tokens=9, chunk=2)
assert (out.tokens == want.tokens).all()
"""
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=quick)
