"""Continuous batching: each request gets the same tokens as alone, independent of other slots."""

import copy
import dataclasses
import re
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.test_decode import PAIR, RING, ROPE, VOCAB, CountingStep, make, parameters
from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.decoding import slots as slots_module
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.continuous_batching import Batcher, Request, serve_requests
from transformer_jax.decoding.generation import NO_TOKEN, generate, prefill
from transformer_jax.decoding.logit_processors import MinLength, NoRepeatNGram, RepetitionPenalty
from transformer_jax.decoding.samplers import Sample, Temperature, TopK
from transformer_jax.decoding.slots import admit, advance_slots, init_slots, release
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache

pytestmark = pytest.mark.usefixtures("quick_compilation")

SLOTS, CAPACITY, LONGEST = 3, 29, 17
IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
GREEDY: dict = {}
SAMPLED: dict = dict(
    sampler=Sample(Temperature(1.3)),
    processors=(RepetitionPenalty(1.3), MinLength(2, (4, 9))),
    stop=(4, 9),
)


@dataclasses.dataclass(frozen=True)
class GruStep:
    """A foreign model without cache, positions or `check`; the state is the carry of the GRU."""

    def __call__(self, params, tokens, state, *, valid=None):
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid

        def read(carry, now):
            embedded, valid = now
            new, out = nn.GRUCell(7).apply({"params": params["cell"]}, carry, embedded)
            return jnp.where(valid[:, None], new, carry), out

        embedded = jnp.take(params["embed"], tokens.T, axis=0)
        state, outputs = jax.lax.scan(read, state, (embedded, valid.T))
        return outputs.swapaxes(0, 1) @ params["embed"].T, state


def make_gru():
    @jax.jit
    def init(key):
        embed, cell = jax.random.split(key)
        embed = 2 * jax.random.normal(embed, (VOCAB, 7))
        cell = nn.GRUCell(7).init(cell, jnp.zeros((1, 7)), embed[:1])["params"]
        return {"embed": embed, "cell": jax.tree.map(lambda leaf: 2 * leaf, cell)}

    return GruStep(), init(jax.random.key(2)), lambda rows: jnp.zeros((rows, 7))


def make_model(config):
    step, params, empty = make(config)
    capacity = CAPACITY if config.window is None else config.window
    return step, params, partial(empty, capacity=capacity)


MODELS = {
    "rope": partial(make_model, ROPE), "ring": partial(make_model, RING), "gru": make_gru,
}  # fmt: skip


@pytest.fixture(scope="module")
def rope():
    return MODELS["rope"]()


def some_requests(count: int = 23, seed: int = 5) -> list[Request]:
    """Ragged prompts, each with its own key; the keys cover all implementations of JAX."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(0, VOCAB, rng.integers(1, CAPACITY - LONGEST + 2)),
            int(rng.integers(1, LONGEST + 1)),
            key=jax.random.key(100 + number, impl=IMPLEMENTATIONS[number % 3]),
            id=f"request {number}",
        )
        for number in range(count)
    ]


def alone(model, request: Request, options: dict, state=None):
    """The result of `generate` with the request as the only row."""
    step, params, empty = model
    state = fork(empty(1) if state is None else state, 1)
    return generate(
        step, params, np.asarray(request.prompt)[None], state, num_tokens=LONGEST,
        limits=[request.num_tokens], key=request.key[None], **options,
    )  # fmt: skip


def served(model, requests, options: dict | None = None, **more) -> dict:
    step, params, empty = model
    arguments = dict(slots=SLOTS, capacity=CAPACITY) | (options or {}) | more
    return {c.id: c for c in serve_requests(step, params, requests, empty(1), **arguments)}


def assert_as_alone(model, requests, options: dict, got: dict) -> None:
    assert len(got) == len(requests) > 0
    for request in requests:
        want, result = alone(model, request, options), got[request.id]
        np.testing.assert_array_equal(result.tokens, want.rows()[0], str(request.id))
        assert_near(result.log_probs, np.asarray(want.log_probs)[0, : len(result.tokens)], 1e-5)
        stopped = result.tokens[-1] in options.get("stop", ())
        assert result.end == ("stop" if stopped else "length") and result.error is None
        assert stopped or len(result.tokens) == request.num_tokens


def arriving(requests):
    """Yield the requests with random pauses (None) between them."""
    rng = np.random.default_rng(3)
    for request in requests:
        yield from [None] * int(rng.geometric(0.5) - 1)
        yield request


# Equality with `generate`


@pytest.mark.slow
@pytest.mark.long_except("rope-greedy")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("rope", GREEDY, id="rope-greedy"),
        pytest.param("rope", SAMPLED, id="rope-sampled"),
        pytest.param("ring", GREEDY, id="ring-greedy"),
        pytest.param("gru", GREEDY, id="gru-greedy"),
        pytest.param("ring", SAMPLED, id="ring-sampled", marks=pytest.mark.long),
        pytest.param("gru", SAMPLED, id="gru-sampled", marks=pytest.mark.long),
    ],
)
def test_each_request_matches_separate_generation(kind, options):
    """23 requests share 3 slots and arrive at random; with `pause`, also in another order."""
    model, requests = MODELS[kind](), some_requests()
    got = served(model, arriving(requests), options)
    assert_as_alone(model, requests, options, got)
    ends = [c.end for c in got.values()]
    assert "length" in ends and ("stop" in ends) == bool(options)
    distinct = {tuple(c.tokens.tolist()) for c in got.values() if len(c.tokens) > 3}
    assert len(distinct) > 9 and max(len(set(c)) for c in distinct) > 4
    order = np.random.default_rng(1).permutation(len(requests))
    again = served(model, [requests[i] for i in order], options, pause=True)
    for name, completion in got.items():
        np.testing.assert_array_equal(again[name].tokens, completion.tokens, name)
    assert list(again) != list(got)


@pytest.mark.slow
def test_streamed_parts_concatenate_to_the_completion(rope):
    step, params, empty = rope
    requests = some_requests(9)
    whole = served(rope, requests, SAMPLED)
    pieces = list(
        serve_requests(step, params, requests, empty(1), slots=SLOTS, capacity=CAPACITY, **SAMPLED,
              stream=True)
    )  # fmt: skip
    for request in requests:
        parts = [p for p in pieces if p.id == request.id]
        assert len(parts[0].tokens) == 1, "the first token comes by itself"
        assert [p.end is None for p in parts] == [True] * (len(parts) - 1) + [False]
        joined = np.concatenate([p.tokens for p in parts])
        np.testing.assert_array_equal(joined, whole[request.id].tokens)
        joined = np.concatenate([p.log_probs for p in parts])
        np.testing.assert_array_equal(joined, whole[request.id].log_probs)
    assert len(pieces) > len(requests) + 5


@pytest.mark.slow
def test_several_prompts_are_admitted_at_once(rope):
    """One program puts prompts of different lengths into the specified slots."""
    step, params, empty = rope
    requests = [dataclasses.replace(r, num_tokens=7) for r in some_requests(2)]
    lengths = [len(r.prompt) for r in requests]
    assert len(set(lengths)) == 2
    prompt = np.stack([np.pad(r.prompt, (0, 13 - len(r.prompt))) for r in requests])
    slots = init_slots(step, params, empty(1), SLOTS, CAPACITY)
    slots, first = admit(slots, params, [2, 0], prompt, empty(2), limits=[7, 7], lengths=lengths)
    assert slots.active.tolist() == [True, False, True]
    slots, rest = advance_slots(slots, params, 8)
    assert slots.active.tolist() == [False] * 3
    first, rest = jax.device_get((first, rest))
    for i, row in enumerate([2, 0]):
        got = [first.token[i], *rest.token[:6, row]]
        assert got == alone(rope, requests[i], GREEDY).rows()[0].tolist()
    assert (rest.token[6:] == -1).all() and (rest.log_prob[6:] == 0).all()
    assert (rest.token[:, 1] == -1).all()


@pytest.mark.slow
def test_many_requests_can_share_a_prefix(rope):
    step, params, empty = rope
    prefix = np.array([[3, 1, 4, 1, 5]])
    _, state = jax.jit(partial(prefill, step))(params, prefix, empty(1), np.array([5]))
    before = jax.tree.map(np.array, state)
    requests = [dataclasses.replace(r, num_tokens=6) for r in some_requests(7)]
    requests = [dataclasses.replace(r, prompt=r.prompt[:7], state=state) for r in requests]
    requests[3] = dataclasses.replace(requests[3], state=None)
    got = served(rope, requests)
    for request in requests:
        read = [] if request.state is None else prefix[0]
        whole = dataclasses.replace(request, prompt=np.concatenate([read, request.prompt]))
        whole = dataclasses.replace(whole, prompt=whole.prompt.astype(int))
        np.testing.assert_array_equal(got[request.id].tokens, alone(rope, whole, {}).rows()[0])
    jax.tree.map(assert_same_bits, state, before)


@pytest.mark.long
def test_encoder_decoder_batching_serves_requests_with_sources():
    """Sources of different lengths are padded to one length; the padding is not read."""
    config = dataclasses.replace(PAIR, d_ff=13)
    params, model = parameters(config, 2), build(config)
    rng = np.random.default_rng(7)

    @jax.jit
    def read(source, length):
        places = jnp.where(jnp.arange(11) < length, jnp.arange(11), -1)[None]
        return model.apply(
            {"params": params}, source, positions=places, capacity=CAPACITY, method="init_cache"
        )

    empty = read(np.zeros((1, 11), np.int32), 1)
    pair = make_step(model), params, lambda rows: empty
    requests = []
    for request in some_requests(8):
        state = read(rng.integers(0, VOCAB, (1, 11)), int(rng.integers(1, 12)))
        requests.append(dataclasses.replace(request, state=state, prompt=[2]))
    got = served(pair, requests)
    for request in requests:
        want = alone(pair, request, {}, request.state).rows()[0]
        np.testing.assert_array_equal(got[request.id].tokens, want)
    assert len({tuple(c.tokens[:3]) for c in got.values()}) > 4


# Free, occupied and reused slots


def begin_three(model, **options):
    """Return slots in the middle of three requests, the requests and their tokens so far."""
    step, params, empty = model
    requests = [dataclasses.replace(r, num_tokens=LONGEST) for r in some_requests(3)]
    slots = init_slots(step, params, empty(1), SLOTS, CAPACITY, **options)
    first = []
    for row, r in enumerate(requests):
        slots, one = admit(
            slots, params, row, r.prompt[None], empty(1), limits=LONGEST, key=r.key[None]
        )
        first.append(int(one.token[0]))
    slots, chosen = advance_slots(slots, params, 8)
    return slots, requests, np.concatenate([[first], chosen.token])


@pytest.mark.slow
def test_reused_slot_contains_no_data_from_previous_request(rope):
    """Cache and history are bitwise equal to those of a fresh slot."""
    step, params, empty = rope

    def key():
        return jax.random.split(jax.random.key(8), 1)

    slots, _, _ = begin_three(rope, **SAMPLED)
    fresh = init_slots(step, params, empty(1), SLOTS, CAPACITY, **SAMPLED)
    fresh, one = admit(fresh, params, 1, [[7, 9]], empty(1), limits=5, key=key())
    used, two = admit(release(slots, 1), params, 1, [[7, 9]], empty(1), limits=5, key=key())
    row = partial(jax.tree.map, lambda leaf: jax.random.key_data(leaf)[1]
                  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf[1])  # fmt: skip
    chex.assert_trees_all_equal(row(used.decode_state), row(fresh.decode_state))
    assert used.decode_state.state.layers[0].positions[1].tolist() == [0, 1] + [-1] * (CAPACITY - 2)
    assert int(one.token[0]) == int(two.token[0])


def make_nonfinite(slots, row: int):
    """Fill the state of a row with NaN, at positions that it would attend to."""

    def leaf(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x.at[row].set(jnp.nan)
        return x.at[row].set(jnp.arange(x.shape[1])) if x.ndim == 2 else x

    state = jax.tree.map(leaf, slots.decode_state.state)
    decode_state = dataclasses.replace(slots.decode_state, state=state)
    return dataclasses.replace(slots, decode_state=decode_state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rope", "gru"])
def test_nan_in_free_slot_does_not_affect_other_rows(kind):
    """Neither other rows nor the next request in the slot are affected."""
    model = MODELS[kind]()
    _, params, empty = model
    slots, requests, tokens = begin_three(model)
    slots = make_nonfinite(release(slots, 1), 1)
    slots, others = advance_slots(slots, params, 8)
    assert (np.asarray(others.token)[:, 1] == -1).all()
    assert np.isnan(np.asarray(jax.tree.leaves(slots.decode_state.state)[0][1])).any(), (
        "still there"
    )
    for row in (0, 2):
        got = np.concatenate([tokens[:, row], np.asarray(others.token)[:, row]])
        np.testing.assert_array_equal(got, alone(model, requests[row], {}).rows()[0])
    slots, one = admit(slots, params, 1, requests[1].prompt[None], empty(1), limits=9)
    slots, rest = advance_slots(slots, params, 8)
    got = np.concatenate([one.token, np.asarray(rest.token)[:, 1]])
    np.testing.assert_array_equal(got, alone(model, requests[1], {}).rows()[0][:9])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slots.decode_state.state))


@pytest.mark.slow
def test_only_the_nonfinite_row_ends(rope):
    """Its slot is reused, and no other request changes."""
    _, params, empty = rope
    slots, requests, tokens = begin_three(rope)
    slots, rest = advance_slots(make_nonfinite(slots, 1), params, 8)
    assert np.asarray(rest.token)[:, 1].tolist() == [-1] * 8
    assert np.isnan(rest.log_prob[0, 1]) and (np.asarray(rest.log_prob)[1:, 1] == 0).all()
    for row in (0, 2):
        got = np.concatenate([tokens[:, row], np.asarray(rest.token)[:, row]])
        np.testing.assert_array_equal(got, alone(rope, requests[row], {}).rows()[0])
    requests = some_requests(11)
    bad = jax.tree.map(lambda x: x + jnp.nan if x.dtype == jnp.float32 else x, empty(1))
    bad = dataclasses.replace(
        bad, layers=tuple(dataclasses.replace(x, positions=x.positions.at[0, 0].set(0),
                                              length=x.length + 1) for x in bad.layers)
    )  # fmt: skip
    requests[4] = dataclasses.replace(requests[4], state=bad)
    got = served(rope, requests)
    broken = got.pop(requests[4].id)
    assert broken.end == "nonfinite" and len(broken.tokens) == len(broken.log_probs) == 0
    assert_as_alone(rope, requests[:4] + requests[5:], GREEDY, got)


@pytest.mark.slow
def test_pause_ends_once_a_slot_is_free(rope):
    _, params, _ = rope
    slots, _, _ = begin_three(rope)
    decode_state = dataclasses.replace(slots.decode_state, limits=jnp.array([15, 12, 14]))
    slots = dataclasses.replace(slots, decode_state=decode_state)
    slots, chosen = advance_slots(slots, params, 8, pause=True)
    assert (np.asarray(chosen.token) >= 0).all(axis=1).tolist() == [True] * 3 + [False] * 5
    assert slots.active.tolist() == [True, False, True]
    slots, chosen = advance_slots(slots, params, 8, pause=True)
    assert (np.asarray(chosen.token) == -1).all() and slots.decode_state.count.tolist() == [12] * 3
    slots, chosen = advance_slots(slots, params, 8)
    assert slots.decode_state.count.tolist() == [15, 12, 14]


# The queue


@pytest.mark.slow
def test_long_requests_do_not_block_first_come_first_served_admission(rope):
    step, params, empty = rope
    requests = some_requests(17)
    requests[1] = dataclasses.replace(requests[1], num_tokens=CAPACITY - len(requests[1].prompt))
    taken, pieces = [], []

    def queue():
        for request in requests:
            taken.append(request.id)
            yield request

    running = serve_requests(
        step, params, queue(), empty(1), slots=SLOTS, capacity=CAPACITY, stream=True
    )  # fmt: skip
    assert taken == [], "no request is taken before the first completion is requested"
    for piece in running:
        pieces.append(piece)
        open_ = set(taken) - {p.id for p in pieces if p.end is not None}
        assert len(open_) <= SLOTS, "a request is taken only when a slot is free"
    started = list(dict.fromkeys(p.id for p in pieces))
    assert started == [r.id for r in requests]
    ended = [p.id for p in pieces if p.end is not None]
    assert sorted(ended) == sorted(started)
    before = ended[: ended.index(requests[1].id)]
    admitted_later = {request.id for request in requests[SLOTS:]}
    assert len(admitted_later & set(before)) == 2, "later requests may end earlier"


@pytest.mark.slow
def test_invalid_requests_are_rejected_and_queue_continues(rope):
    _, _, empty = rope
    good = some_requests(6)
    other = init_cache(dataclasses.replace(ROPE, num_kv_heads=2), 1, CAPACITY)
    consumed = empty(1)
    consumed.layers[0].k.delete()
    wrong = [
        (Request(range(20), 11), r"reach length 30: the limit is 29, the capacity of a slot"),
        (Request(range(30), 1), r"reach length 30: the limit is 29"),
        (Request([1, VOCAB], 3), r"token 31 at \[0, 1\]: must be from 0 to 30"),
        (Request([], 3), r"prompt has shape \(1, 0\)"),
        (Request([[1, 2]], 3), r"prompt has shape \(1, 1, 2\)"),
        (Request([0.5], 3), r"prompt is float64\[1, 1\]: must be integer token IDs"),
        (Request([2**40], 3), f"prompt contains {2**40}: must be from"),
        (Request([1], 0), "num_tokens is 0: must be at least 1"),
        (Request([1], 2.5), "num_tokens is 2.5: must be an integer"),
        (Request([1], 3, key=jax.random.split(jax.random.key(0))), "key is .*single key"),
        (Request([1], 3, key=7), "key is 7: must be a single key"),
        (Request([1], 3, state=init_cache(ROPE, 1, 31)),
         r"layers\[0\].k is float32\[1, 31, 1, 6\]: the slots require float32\[1, 29, 1, 6\]"),
        (Request([1], 3, state=other), r"the slots require float32\[1, 29, 1, 6\]"),
        (Request([1], 3, state=empty(2)), r"state.layers\[0\].k is float32\[2, 29, 1, 6\]"),
        (Request([1], 3, state=jnp.zeros((1, 7))), "state is PyTreeDef"),
        (Request([1], 3, state=consumed), "state was consumed by an earlier call"),
        ("text", "request is of type str: must be a Request"),
    ]  # fmt: skip
    queue = [x for pair in zip(good, wrong[:6], strict=True) for x in (pair[0], pair[1][0])]
    queue += [request for request, _ in wrong[6:]]
    got = served(rope, queue)
    assert len(got) == len(queue)
    ours = [got[r.id] for r in good]
    assert_as_alone(rope, good, GREEDY, {c.id: c for c in ours})
    refused = [c for c in got.values() if c.end == "refused"]
    assert len(refused) == len(wrong)
    for completion, (_, message) in zip(refused, wrong, strict=True):
        assert re.search(message, completion.error), completion.error
        assert len(completion.tokens) == len(completion.log_probs) == 0
    assert refused[0].id == 1 and refused[1].id == 3, "without an id, the number is returned"


def follow(params, tokens, state, *, valid=None):
    """A step whose likeliest token after t is t + 1."""
    valid = jnp.ones(tokens.shape, bool) if valid is None else valid
    return jax.nn.one_hot(tokens + 1, 29), state + valid.sum(axis=1)


def follow_to_20(params, tokens, state, *, valid=None):
    """Like `follow`, but with NaN logits after token 20."""
    logits, state = follow(params, tokens, state, valid=valid)
    return jnp.where(tokens[..., None] == 20, jnp.nan, logits), state


START = jnp.zeros((1,), jnp.int32)
"""The state of `follow` before any token; not consumed."""


class UpTo:
    """A constraint that ends after token `last` and raises an error on token `wrong`."""

    def __init__(self, last: int, wrong: int = -1) -> None:
        self.last, self.wrong, self.ended = last, wrong, last == 0

    allowed = np.arange(29) > 0

    def read(self, token: int) -> None:
        if token == self.wrong:
            raise ValueError(f"cannot read {token}")
        self.ended = token == self.last


ENDS = {
    "at the limit": (Request([3], 4), [4, 5, 6, 7], "length", None),
    "at a limit of one": (Request([3], 1), [4], "length", None),
    "with a stop token": (Request([5], 9), [6, 7, 8, 9], "stop", None),
    "with a stop token at the limit": (Request([5], 4), [6, 7, 8, 9], "stop", None),
    "with a stop token at once": (Request([8], 9), [9], "stop", None),
    "at nonfinite logits": (Request([17], 9), [18, 19, 20], "nonfinite", NO_TOKEN),
    "at nonfinite first logits": (Request([20], 9), [], "nonfinite", NO_TOKEN),
    "with its constraint": (Request([11], 9, constraint=UpTo(13)), [12, 13], "stop", None),
    "with its constraint at once": (Request([11], 9, constraint=UpTo(12)), [12], "stop", None),
    "before its first token": (Request([11], 9, constraint=UpTo(0)), [], "stop", None),
    "at the limit of a constraint": (Request([1], 2, constraint=UpTo(25)), [2, 3], "length", None),
    "when its constraint fails": (
        Request([11], 9, constraint=UpTo(25, wrong=14)), [12, 13, 14], "refused", "cannot read 14",
    ),
    "when its constraint fails at once": (
        Request([11], 9, constraint=UpTo(25, wrong=12)), [12], "refused", "cannot read 12",
    ),
    "if it is invalid": (Request([3], 0), [], "refused", "num_tokens is 0: must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_each_request_follows_its_own_stopping_rule(streamed):
    requests = [
        dataclasses.replace(request, id=name, constraint=copy.copy(request.constraint))
        for name, (request, *_) in ENDS.items()
    ]
    arguments: dict = dict(slots=5, capacity=16, stop=9, steps_per_call=3)
    found = list(serve_requests(follow_to_20, {}, requests, START, stream=streamed, **arguments))
    for name, (_, tokens, end, error) in ENDS.items():
        parts = [part for part in found if part.id == name]
        assert streamed or len(parts) == 1
        assert np.concatenate([part.tokens for part in parts]).tolist() == tokens, name
        assert [part.end for part in parts] == [None] * (len(parts) - 1) + [end], name
        assert parts[-1].error == error, name


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_cancelled_request_frees_its_slot(streamed):
    """After its first part, nothing more is emitted for it, in the same turn or later."""
    requests = [Request([3], 12, id="a", top=2), Request([7], 9), Request([3], 2, id="c", top=1)]
    slots = init_slots(follow, {}, START, 2, 16)
    batcher = Batcher(slots, {}, iter(requests), START, steps=3, stream=streamed)
    got: dict = {}
    for part in batcher:
        got.setdefault(part.id, []).append(part)
        batcher.drop(part.id if part.id == "a" else None)
    assert not batcher.slots.active.any() and not any(batcher.rows)
    tokens = {name: np.concatenate([p.tokens for p in parts]) for name, parts in got.items()}
    if streamed:
        assert tokens.pop("a").tolist() == [4]
        likeliest = got["a"][0].likeliest
        assert likeliest.tokens.tolist() == [[4, 0]] and likeliest.log_probs.shape == (1, 2)
    else:
        assert tokens.pop("a").tolist() == list(range(4, 16)), "it was never seen before its end"
    assert {name: x.tolist() for name, x in tokens.items()} == {1: [*range(8, 17)], "c": [4, 5]}
    assert all(part.likeliest is None for part in got[1])
    assert np.concatenate([part.likeliest.tokens for part in got["c"]]).tolist() == [[4], [5]]


def test_request_is_cancelled_by_equal_id():
    """Ids of any type: an array, whose comparison has no truth value, is found by identity."""
    array, pair = np.arange(2), np.array([1, 2, 3])
    ids = [int("300"), ("a", int("301")), array, pair, None]
    requests = [Request([3], 9, id=name) for name in ids]
    batcher = Batcher(init_slots(follow, {}, START, 5, 16), {}, iter(requests), START, steps=1)
    list(batcher.turn())
    expected = [True] * 5
    batcher.drop("an id of no request")
    for row, name in enumerate([int("300"), ("a", int("301")), array, pair, 4]):
        assert [occupant is not None for occupant in batcher.rows] == expected
        batcher.drop(name)
        expected[row] = False
    assert not any(batcher.rows) and not batcher.slots.active.any()


@pytest.mark.parametrize("shares", [True, False])
def test_longest_cached_prefix_is_shared(rope, shares):
    """A slot contains 20 tokens, the last one unread; the prompts begin with the same tokens."""
    step, params, _ = rope
    empty, key = init_cache(ROPE, 1, 41), jax.random.key(0)
    text = np.random.default_rng(1).integers(0, VOCAB, 18)
    whole = alone((step, params, lambda rows: empty), Request(text, 2, key=key), {}).rows()[0]
    text = np.concatenate([text, whole])
    other = (text + 1) % VOCAB
    prompts = {  # prompts, and the number of their tokens that a slot has read
        "first": (text[:18], 0), "other": (other[:3], 0), "all but its last": (text, 19),
        "one is left to read": (text[:17], 16), "as fast to read": (text[:16], 0),
        "parts": (np.concatenate([text[:17], other[17:]]), 17), "differs": (other, 0),
    }  # fmt: skip
    for name in list(prompts)[2:]:
        requests = [
            Request(prompts[one][0], 2, key=key, id=one) for one in ("first", "other", name)
        ]
        slots = init_slots(step, params, empty, 2, 41)
        got = {c.id: c for c in Batcher(slots, params, iter(requests), empty, stream=False,
                                        shares=shares)}  # fmt: skip
        for request in requests:
            want = alone((step, params, lambda rows: empty), request, {}).rows()[0]
            np.testing.assert_array_equal(got[request.id].tokens, want, str(request.id))
            assert got[request.id].shared == (prompts[request.id][1] if shares else 0), request.id


def test_request_with_its_own_state_shares_no_prefix(rope):
    step, params, _ = rope
    empty, text = init_cache(ROPE, 1, 41), list(range(19))
    batcher = Batcher(init_slots(step, params, empty, 2, 41), params, iter(()), empty, shares=True)
    batcher._texts[1] = text  # as if a slot contained the prompt
    own = fork(empty, 1)
    _, state, shared = batcher._read(Request(text, 2, state=own))
    assert state is own and shared == 0


@pytest.mark.slow
def test_requests_advance_while_queue_is_paused():
    """A free slot does not pause the loop if no request is waiting for it."""
    parts, requested = [], []

    def queue():
        yield Request([3], 9)
        while not parts or parts[-1].end is None:
            requested.append(len(parts))
            assert len(requested) < 20, "the request in its slot makes no progress"
            yield None

    running = serve_requests(
        follow, {}, queue(), START, slots=2, capacity=16, steps_per_call=2, pause=True, stream=True
    )
    for part in running:
        parts.append(part)
    assert np.concatenate([part.tokens for part in parts]).tolist() == list(range(4, 13))
    assert len(requested) == 4, "one call for every two tokens after the first"


@pytest.mark.slow
def test_pause_fills_free_slot_before_next_step():
    """After one step a slot becomes free, and the third request fills it before the next step."""
    requests = [Request([3], 2, id="a"), Request([7], 9, id="b"), Request([11], 9, id="c")]
    arguments: dict = dict(slots=2, capacity=16, steps_per_call=8, stream=True)
    calls = {  # the request and number of tokens of each part; the first token comes by itself
        True: ["a1 b1 a1 b1", "c1 c7 b7", "c1"],
        False: ["a1 b1 a1 b8", "c1 c8"],
    }
    for pause, expected in calls.items():
        parts = serve_requests(follow, {}, requests, START, pause=pause, **arguments)
        assert [f"{p.id}{len(p.tokens)}" for p in parts] == " ".join(expected).split()


@pytest.mark.slow
def test_raw_uint32_words_are_accepted_as_key():
    key = jax.random.key(5)
    requests = [Request([3], 9, key=key), Request([3], 9, key=jax.random.key_data(key))]
    arguments: dict = dict(slots=2, capacity=16, sampler=Sample())
    one, two = serve_requests(follow, {}, requests, START, **arguments)
    assert len(one.tokens) == 9 and one.tokens.tolist() == two.tokens.tolist()
    slots = init_slots(follow, {}, START, 2, 16, sampler=Sample())
    slots, first = admit(slots, {}, 0, [[3]], START, limits=9, key=key)
    slots, again = admit(slots, {}, 1, [[3]], START, limits=9, key=jax.random.key_data(key))
    assert first.token.tolist() == again.token.tolist()


@pytest.mark.slow
def test_batching_slots_work_inside_jit():
    """Traced limits are clipped to the room in a slot."""

    @jax.jit
    def go(slots, rows, prompt, lengths, limits):
        slots, first = admit(slots, {}, rows, prompt, empty, limits=limits, lengths=lengths)
        slots, rest = advance_slots(slots, {}, 2)
        return slots, release(slots, rows[1:]), first.token, rest.token

    empty = jnp.zeros((2,), jnp.int32)
    slots = init_slots(follow, {}, empty[:1], 3, 5)
    arguments = jnp.array([2, 0]), jnp.array([[1, 2, 3], [7, 0, 0]]), jnp.array([3, 1])
    after, released, first, rest = go(slots, *arguments, jnp.array([99, 9]))
    assert first.tolist() == [4, 8]
    assert rest.tolist() == [[9, -1, 5], [10, -1, 6]]
    assert after.active.tolist() == [True, False, False]
    assert after.decode_state.limits.tolist() == [5, 0, 3]
    assert released.active.tolist() == [False, False, False]
    with pytest.raises(ValueError, match="reach length 6: the limit is 5"):
        jax.jit(lambda slots: admit(slots, {}, [1], [[5]], empty[:1], limits=6)[0])(slots)


@pytest.mark.slow
def test_duplicate_ids_and_slot_filling_requests_are_served(rope):
    """A bucket may be longer than the capacity of a slot; the history still fits."""
    step, params, empty = rope
    requests = [
        Request([5] * (CAPACITY - n + 1), n, key=jax.random.key(n), id="same") for n in (1, 2, 2)
    ]
    arguments = dict(slots=SLOTS, capacity=CAPACITY, **SAMPLED)
    got = list(serve_requests(step, params, requests, empty(1), **arguments))
    assert sorted((len(c.tokens), c.id) for c in got) == [(1, "same"), (2, "same"), (2, "same")]
    assert all(c.end in ("length", "stop") and (c.tokens >= 0).all() for c in got)
    assert list(serve_requests(step, params, [], empty(1), **arguments)) == []


@pytest.mark.slow
def test_invalid_arguments_are_rejected_at_call_time(rope):
    step, params, empty = rope
    step = CountingStep(step.model)

    def serving(**change):
        arguments = dict(state=empty(1), slots=SLOTS, capacity=CAPACITY) | change
        return partial(serve_requests, step, params, [], **arguments)

    sampled = init_slots(step, params, empty(1), SLOTS, CAPACITY, sampler=SAMPLED["sampler"])
    slots = init_slots(step, params, empty(1), SLOTS, CAPACITY)

    def admitting(rows, count=1, limits=3, slots=slots, **more):
        prompt, state = [[1, 2]] * count, empty(count)
        return partial(admit, slots, params, rows, prompt, state, limits=limits, **more)

    cases = [
        ("slots is 0: must be an integer of at least 1", serving(slots=0)),
        ("slots is 2.0: must be an integer", serving(slots=2.0)),
        ("capacity is 0: must be an integer of at least 1", serving(capacity=0)),
        ("steps_per_call is 0: must be an integer of at least 1", serving(steps_per_call=0)),
        ("state has 2 rows: must have one", serving(state=empty(2))),
        ("stop is 31: must be from 0 to 30", serving(stop=31)),
        ("sampler is TopK", serving(sampler=TopK(3))),
        ("processors is .*: must be a tuple", serving(processors=RepetitionPenalty(1.2))),
        (r"rows are \[3\]: must be from 0 to 2", admitting(3)),
        (r"rows are \[-1\]: must be from 0 to 2", admitting(-1)),
        (r"rows are \[0.5\]: must be integers", admitting(0.5)),
        (r"rows are \[1, 1\]: must be distinct", admitting([1, 1], 2, [3, 3])),
        ("prompt has 1 rows, but there are 2 slots", admitting([0, 1])),
        (r"limits are \[3, 3\]: must be", admitting(0, 1, [3, 3])),
        ("chunk is 0", admitting(0, chunk=0)),
        ("key is None: must be set, because Sample", admitting(0, slots=sampled)),
        ("steps is 0: must be an integer of at least 1", partial(advance_slots, slots, params, 0)),
    ]
    traced = len(step.calls)
    for message, wrong in cases:
        with pytest.raises(ValueError, match=message):
            wrong()
    assert len(step.calls) == traced + 1, "only to count the vocabulary, for `stop`"


@pytest.mark.slow
def test_occupied_and_consumed_slots_are_rejected(rope):
    _, params, empty = rope
    slots, requests, _ = begin_three(rope)
    with pytest.raises(ValueError, match=r"rows \[2\] are occupied: release them"):
        admit(slots, params, 2, requests[0].prompt[None], empty(1), limits=3)
    with pytest.raises(ValueError, match=r"rows are \[3\]"):
        release(slots, 3)
    after = release(slots, [2])
    for call in (partial(release, slots, 1), partial(advance_slots, slots, params, 1)):
        with pytest.raises(ValueError, match="slots were consumed by an earlier call"):
            call()
    assert after.active.tolist() == [True, True, False]


# Compilation and memory


@pytest.mark.slow
def test_fifty_requests_do_not_recompile():
    """One decoding program, plus one per bucket, serves all lengths, keys and batches."""
    options = dict(sampler=SAMPLED["sampler"], stop=(4, 9))
    step = CountingStep(build(ROPE))
    model = step, parameters(ROPE), partial(init_cache, ROPE, capacity=CAPACITY)
    served(model, some_requests(2, seed=1), options)
    first = len(step.calls)
    assert first > 0
    got = served(model, arriving(some_requests(53)), options)
    assert len(got) == 53 and len(step.calls) == first
    long = Request([3] * 19, 4, key=jax.random.key(1))
    served(model, [long], options)
    second = len(step.calls)
    assert second > first, "a new bucket needs a new program"
    served(model, [long, *some_requests(5), Request([3] * 27, 3, key=jax.random.key(1))], options)
    assert len(step.calls) == second


@pytest.mark.slow
def test_cache_is_updated_in_place(rope):
    """Each program donates its memory to the result, and none allocates a second cache."""
    step, params, empty = rope
    slots = init_slots(step, params, empty(1), SLOTS, CAPACITY, processors=(NoRepeatNGram(2),))
    row, limits = jnp.array([1]), np.array([7])
    prompts = slots_module.check_prompts(slots, np.ones((1, 11), int), None, empty(1), limits, None)
    leaves = len(jax.tree.leaves(slots))
    jax.config.update("jax_disable_most_optimizations", False)
    programs = [
        slots_module.advance_rows.by_value.lower(slots, params, jnp.array(True), 8, 0).compile(),
        slots_module.admit_rows.by_value.lower(
            slots, params, row, prompts, empty(1), None, 0
        ).compile(),
        slots_module.free_rows.by_value.lower(slots, row).compile(),
    ]
    jax.config.update("jax_disable_most_optimizations", True)
    assert slots.decode_state.state.layers[0].k.shape == (3, 29, 1, 6)
    shapes = {"f32[3,29,1,6]", "s32[3,29]"}
    assert all(any(shape in p.as_text() for p in programs) for shape in shapes)
    for program in programs:
        text = program.as_text()
        copied = re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", text)
        assert not shapes & set(copied), copied
        assert text.split("\n")[0].count("may-alias") == leaves
    before = slots.decode_state.state.layers[0].k.unsafe_buffer_pointer()
    slots, _ = admit(slots, params, 1, [[1, 2]], empty(1), limits=7)
    slots, _ = advance_slots(slots, params, 8)
    slots = release(slots, 1)
    assert slots.decode_state.state.layers[0].k.unsafe_buffer_pointer() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [jax.checking_leaks, partial(jax.debug_nans, True), partial(jax.transfer_guard, "disallow")],
    ids=["leaks", "nans", "transfers"],
)
def test_continuous_batching_passes_leak_nan_and_transfer_checks(setting, rope):
    step, params, empty = rope
    requests = some_requests(7)
    running = serve_requests(step, params, requests, empty(1), slots=SLOTS, capacity=CAPACITY)
    with setting():
        got = {completion.id: completion for completion in running}
    assert_as_alone(rope, requests, GREEDY, got)


@pytest.mark.slow
def test_empty_cache_can_be_donated():
    """Every leaf has its own buffer, because a buffer cannot be donated twice."""
    leaves = jax.tree.leaves(init_cache(dataclasses.replace(ROPE, num_layers=2), 2, 3))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves) == 8
