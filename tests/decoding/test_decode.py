"""Generation: equal tokens at once or streamed, with or without cache, chunks or other rows."""

import dataclasses
import itertools
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import model_oracle as oracle
from tests.support.ours import as_ours
from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.config import ModelConfig, T5Buckets
from transformer_jax.decoding import generation as decode
from transformer_jax.decoding.arguments import bucket
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.generation import prefill
from transformer_jax.decoding.samplers import Greedy, Sample, Temperature, TopK
from transformer_jax.decoding.step import ModelStep, make_step
from transformer_jax.models.factory import build, init_cache, init_params
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, PROMPT, NEW = 31, 11, 23
LENGTHS = np.array([11, 3, 7], np.int32)

ROPE = ModelConfig(
    vocab_size=VOCAB, d_model=26, num_layers=1, num_heads=2, head_dim=6, num_kv_heads=1, d_ff=19,
    max_len=67, positions="rope", tie_embeddings=False,
)  # fmt: skip
RING = dataclasses.replace(ROPE, window=5)
PAIR = dataclasses.replace(
    ROPE, kind="encoder-decoder", num_layers=1, positions=T5Buckets(buckets=8, max_distance=17)
)  # fmt: skip


def generate(step, params, prompt, state, **arguments) -> jax.Array:
    """Return only the tokens, and keep the state."""
    return decode.generate(step, params, prompt, fork(state, 1), **arguments).tokens


def stream(step, params, prompt, state, **arguments):
    """Call `decode.stream`, and keep the state."""
    return decode.stream(step, params, prompt, fork(state, 1), **arguments)


def shapes(config: ModelConfig):
    return jax.eval_shape(partial(init_params, config), jax.random.key(0))


def parameters(config: ModelConfig, seed: int = 1):
    """Random parameters with sharp attention; otherwise greedy tokens soon repeat."""

    def sharpen(path, leaf):
        name = jax.tree_util.keystr(path)
        return jnp.asarray(leaf * 3 if "query" in name or "value" in name else leaf)

    params = oracle.randomised(shapes(config), np.random.default_rng(seed))
    return jax.tree_util.tree_map_with_path(sharpen, params)


def make(config: ModelConfig):
    """Return a step, its parameters, and a function that creates empty states."""

    def empty(rows: int = 3, capacity: int = PROMPT + NEW):
        return init_cache(config, rows, capacity)

    return make_step(build(config)), parameters(config), empty


def prompts(rows: int = 3, columns: int = PROMPT) -> np.ndarray:
    return np.random.default_rng(17).integers(0, VOCAB, (rows, columns), dtype=np.int32)


def naive(config: ModelConfig, params, prompt, lengths, count: int, **more) -> np.ndarray:
    """Greedy tokens from full passes over the whole text, without cache, scan or chunks."""
    rows, columns = prompt.shape
    apply = jax.jit(build(config).apply)
    tokens = np.zeros((rows, columns + count), np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = prompt[row, :length]
    out = []
    lengths = np.array(lengths)
    for _ in range(count):
        index = np.arange(columns + count)[None]
        places = np.where(index < lengths[:, None], index, -1).astype(np.int32)
        logits = np.asarray(apply({"params": params}, tokens, positions=places, **more)[0])
        best = logits[np.arange(rows), lengths - 1].argmax(-1).astype(np.int32)
        assert np.isfinite(logits[np.arange(rows), lengths - 1]).all()
        tokens[np.arange(rows), lengths] = best
        lengths = lengths + 1
        out.append(best)
    return np.stack(out, axis=1)


def assert_varied(tokens: np.ndarray) -> None:
    """A model that repeats one token would pass any comparison of tokens."""
    assert tokens.shape == (3, NEW) and tokens.dtype == np.int32
    assert all(len(set(row.tolist())) > 3 for row in tokens)
    assert len({tuple(row.tolist()) for row in tokens}) == 3


@pytest.fixture(scope="module")
def rope():
    return make(ROPE)


@pytest.fixture(scope="module")
def greedy(rope) -> np.ndarray:
    step, params, empty = rope
    return np.asarray(generate(step, params, prompts(), empty(), num_tokens=NEW, lengths=LENGTHS))


SAMPLER = Sample(TopK(7), Temperature(1.3))


@pytest.fixture(scope="module")
def sampled(rope) -> np.ndarray:
    step, params, empty = rope
    return np.asarray(
        generate(
            step, params, prompts(), empty(), num_tokens=NEW, lengths=LENGTHS, sampler=SAMPLER,
            key=jax.random.key(3),
        )
    )  # fmt: skip


@pytest.mark.slow
def test_greedy_tokens_match_full_forward(rope, greedy):
    _, params, _ = rope
    assert_varied(greedy)
    np.testing.assert_array_equal(greedy, naive(ROPE, params, prompts(), LENGTHS, NEW))


@pytest.mark.slow
def test_sampled_tokens_depend_only_on_key(rope, sampled, greedy):
    step, params, empty = rope
    assert_varied(sampled)
    draw = partial(
        generate, step, params, prompts(), empty(), num_tokens=NEW, lengths=LENGTHS, sampler=SAMPLER
    )
    np.testing.assert_array_equal(draw(key=jax.random.key(3)), sampled)
    assert (np.asarray(draw(key=jax.random.key(4))) != sampled).any()
    assert (sampled != greedy).any()


@pytest.mark.slow
def test_nth_token_is_sampled_with_key_folded_with_n(rope, sampled):
    """Token n can be reproduced from the logits before it."""
    _, params, _ = rope
    both = np.concatenate([prompts()[:1], sampled[:1]], axis=1)
    logits = oracle.forward(ROPE, params, both)[:, PROMPT - 1 :].astype(np.float32)
    for n in (0, 1, 2, NEW - 1):
        row = jax.random.fold_in(jax.random.key(3), 0)
        drawn = SAMPLER(jax.random.fold_in(row, n), jnp.asarray(logits[0, n]))
        assert int(drawn) == sampled[0, n]


@pytest.mark.slow
@pytest.mark.long_except("sampled")
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_stream_yields_same_tokens_as_generate(rope, kind, request):
    step, params, empty = rope
    want = request.getfixturevalue(kind)
    more = dict(sampler=SAMPLER, key=jax.random.key(3)) if kind == "sampled" else {}
    tokens = stream(step, params, prompts(), empty(), num_tokens=NEW, lengths=LENGTHS, **more)
    first = next(tokens)
    assert isinstance(first, np.ndarray) and first.shape == (3,) and first.dtype == np.int32
    got = np.stack([first, *tokens], axis=1)
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@pytest.mark.long_except("2", "5")
@pytest.mark.parametrize("chunk", [1, 2, 5, PROMPT])
def test_chunked_prefill_generates_same_tokens(rope, greedy, chunk):
    step, params, empty = rope
    got = generate(step, params, prompts(), empty(), num_tokens=NEW, lengths=LENGTHS, chunk=chunk)
    np.testing.assert_array_equal(got, greedy)


def test_prefill_returns_logits_after_last_token_in_each_row(rope):
    step, params, empty = rope
    want = np.asarray(oracle.forward(ROPE, params, prompts()))
    want = want[np.arange(3), LENGTHS - 1]
    for chunk in (None, 4):
        logits, state = jax.jit(partial(prefill, step, chunk=chunk))(
            params, prompts(), empty(), LENGTHS
        )
        assert_near(logits, want, 2e-5)
        np.testing.assert_array_equal(state.length, LENGTHS)


@pytest.mark.slow
def test_prefill_computes_only_the_logits_it_returns(rope):
    """Also in chunks; a step without `read`, or one that overrides the call, still works."""
    step, params, empty = rope
    wide = re.compile(rf"f32\[(3,{PROMPT}|3,5|{3 * PROMPT}|15),{VOCAB}\]")

    class Doubled(ModelStep):
        def __call__(self, params, tokens, state, *, valid=None):
            logits, state = super().__call__(params, tokens, state, valid=valid)
            return 2 * logits, state

    def program(step, chunk=None):
        run = jax.jit(partial(prefill, step, chunk=chunk))
        return run.lower(params, prompts(), empty(), jnp.asarray(LENGTHS)).compile()

    whole = program(lambda *args, **kwargs: step(*args, **kwargs))
    assert wide.search(whole.as_text())
    arguments = params, prompts(), empty(), jnp.asarray(LENGTHS)
    want, state = whole(*arguments)
    for chunk in (None, 5):
        narrow = program(step, chunk)
        assert not wide.search(narrow.as_text())
        got, read = narrow(*arguments)
        assert_near(got, want, 1e-6)
        if chunk is None:
            jax.tree.map(assert_same_bits, read, state)
    assert_near(program(Doubled(step.model))(*arguments)[0], 2 * want, 1e-6)


@pytest.mark.slow
def test_generated_rows_are_independent(rope, greedy):
    """A row gives the same tokens alone and with other prompts of other lengths."""
    step, params, empty = rope
    alone = generate(step, params, prompts()[1:2], empty(1), num_tokens=NEW, lengths=LENGTHS[1:2])
    np.testing.assert_array_equal(alone, greedy[1:2])
    other = (prompts() + 5) % VOCAB
    other[1] = prompts()[1]
    lengths = np.array([2, 3, 11], np.int32)
    mixed = generate(step, params, other, empty(), num_tokens=NEW, lengths=lengths)
    np.testing.assert_array_equal(np.asarray(mixed)[1], greedy[1])
    assert (np.asarray(mixed)[0] != greedy[0]).any()


@pytest.mark.slow
def test_prompt_tokens_past_row_length_are_ignored(rope, greedy):
    """Even if they are not valid tokens."""
    step, params, empty = rope
    prompt = prompts()
    prompt[1, 3:] = VOCAB + 7
    prompt[2, 7:] = -1
    got = generate(step, params, prompt, empty(), num_tokens=NEW, lengths=LENGTHS)
    np.testing.assert_array_equal(got, greedy)


@pytest.mark.slow
@pytest.mark.parametrize("call", [generate, stream])
def test_generation_does_not_mutate_state_or_prompt(rope, greedy, call):
    step, params, empty = rope
    state, prompt, lengths = empty(), prompts(), LENGTHS.copy()
    before = jax.tree.map(np.array, state)
    for _ in range(2):
        tokens = call(step, params, prompt, state, num_tokens=NEW, lengths=lengths)
        tokens = np.stack(list(tokens), axis=1) if call is stream else tokens
        np.testing.assert_array_equal(tokens, greedy)
    chex.assert_trees_all_equal(state, before)
    assert_same_bits(prompt, prompts())
    assert_same_bits(lengths, LENGTHS)


@pytest.mark.slow
def test_generating_one_token_matches_first_of_many(rope, greedy):
    step, params, empty = rope
    capacity = PROMPT  # the only new token is never fed back, so it needs no slot
    one = generate(step, params, prompts(), empty(3, capacity), num_tokens=1, lengths=LENGTHS)
    np.testing.assert_array_equal(one, greedy[:, :1])
    streamed = stream(step, params, prompts(), empty(3, capacity), num_tokens=1, lengths=LENGTHS)
    np.testing.assert_array_equal(np.stack(list(streamed), axis=1), greedy[:, :1])


@pytest.mark.slow
def test_generation_continues_from_saved_state(rope, greedy):
    """The state has read the beginning of the prompt; the rest is passed as the prompt."""
    step, params, empty = rope
    four = np.full((3,), 4, np.int32)
    _, state = jax.jit(partial(prefill, step))(params, prompts()[:, :4], empty(), four)
    got = generate(step, params, prompts()[:1, 4:], jax.tree.map(lambda x: x[:1], state),
                   num_tokens=NEW)  # fmt: skip
    np.testing.assert_array_equal(got, greedy[:1])


@pytest.mark.slow
@pytest.mark.long_except("3")
@pytest.mark.parametrize("chunk", [None, 3])
def test_generation_continues_after_ring_cache_wraps(chunk):
    """Five slots for 34 positions give the same tokens as a full cache and as no cache."""
    step, params, empty = make(RING)
    ring = empty(3, 5)
    assert ring.capacity == 5
    got = np.asarray(
        generate(step, params, prompts(), ring, num_tokens=NEW, lengths=LENGTHS, chunk=chunk)
    )
    assert_varied(got)
    if chunk is None:
        np.testing.assert_array_equal(got, naive(RING, params, prompts(), LENGTHS, NEW))
        streamed = stream(step, params, prompts(), ring, num_tokens=NEW, lengths=LENGTHS)
        np.testing.assert_array_equal(np.stack(list(streamed), axis=1), got)
    else:
        whole = generate(step, params, prompts(), empty(), num_tokens=NEW, lengths=LENGTHS)
        np.testing.assert_array_equal(got, whole)


@pytest.mark.long
def test_scanned_and_looped_layers_generate_same_tokens():
    two, options = dataclasses.replace(ROPE, num_layers=2), dict(num_tokens=NEW, lengths=LENGTHS)
    step, params, empty = make(two)
    looped = generate(step, params, prompts(), empty(), **options)
    step, _, empty = make(dataclasses.replace(two, scan_layers=True))
    got = generate(step, stack_layers(params), prompts(), empty(), **options)
    np.testing.assert_array_equal(got, looped)


@pytest.mark.slow
@pytest.mark.long_except("loop")
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_encoder_decoder_generation_matches_full_forward(scan):
    """The tokens are also streamed twice from one state, which must survive both."""
    config = dataclasses.replace(PAIR, scan_layers=scan)
    params = parameters(PAIR, 2)
    params = stack_layers(params) if scan else params
    model = build(config)
    source = np.random.default_rng(3).integers(0, VOCAB, (3, 7), dtype=np.int32)
    places = np.tile(np.arange(7, dtype=np.int32), (3, 1))
    places[1, 4:] = -1
    state = jax.jit(partial(model.apply, method="init_cache", capacity=NEW + 1))(
        {"params": params}, source, positions=places
    )
    begin = np.full((3, 1), 2, np.int32)
    step = make_step(model)
    got = np.asarray(generate(step, params, begin, state, num_tokens=NEW))
    want = naive(config, params, begin, [1, 1, 1], NEW, source=source, source_positions=places)
    assert_varied(got)
    np.testing.assert_array_equal(got, want)
    for _ in range(2):
        streamed = np.stack(list(stream(step, params, begin, state, num_tokens=NEW)), axis=1)
        np.testing.assert_array_equal(streamed, want)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_overridden_call_method_processes_prompt(rope):
    """In a subclass, a mixin, and a subclass of either; an overridden `read` takes precedence."""
    step, params, empty = rope

    class Negative(ModelStep):
        def __call__(self, params, tokens, state, *, valid=None):
            logits, state = super().__call__(params, tokens, state, valid=valid)
            return -logits, state

    class Mixin:
        def __call__(self, params, tokens, state, *, valid=None):
            logits, state = super().__call__(params, tokens, state, valid=valid)
            return -logits, state

    class Mixed(Mixin, ModelStep):
        pass

    class Both(Negative):
        def read(self, params, tokens, state, at, *, valid=None):
            logits, state = super().read(params, tokens, state, at, valid=valid)
            return 2 * logits, state

    for kind in (Negative, Mixed, Both):  # classes that change the logits
        assert not kind(step.model).implements("look")
    want = prefill(step, params, prompts(), empty(), LENGTHS)[0]
    for kind, factor in (
        (Negative, -1),
        (type("Sub", (Negative,), {}), -1),
        (Mixed, -1),
        (Both, -2),
    ):
        got = prefill(kind(step.model), params, prompts(), empty(), LENGTHS)[0]
        assert_near(got, factor * want, 2e-5)


def test_callable_with_step_methods_must_subclass_step(rope):
    step, params, empty = rope

    class Own:
        def __call__(self, params, tokens, state, *, valid=None):
            return step(params, tokens, state, valid=valid)

        def rewind(self, state, before, count):
            return state

    with pytest.raises(ValueError, match=r"step is of type Own with `rewind`.*subclass of"):
        prefill(Own(), params, prompts(), empty(), LENGTHS)


# Compilation


def counting(kind):
    """Return a subclass of a step that counts its traces and equals no other step."""

    @as_ours
    @dataclasses.dataclass(frozen=True, eq=False)
    class Counting(kind):
        calls: list = dataclasses.field(default_factory=list)
        __hash__, __eq__ = object.__hash__, object.__eq__

        def __call__(self, params, tokens, state, *, valid=None):
            self.calls.append(tokens.shape)
            return super().__call__(params, tokens, state, valid=valid)

    return Counting


CountingStep = counting(ModelStep)


@pytest.mark.slow
def test_stream_compiles_its_step_once():
    step = CountingStep(build(ROPE))
    params = parameters(ROPE)
    sizes = []
    for columns in (3, 11):
        tokens = stream(step, params, prompts(columns=columns), init_cache(ROPE, 3, 34),
                        num_tokens=NEW)  # fmt: skip
        assert len(list(tokens)) == NEW
        sizes.append(len(step.calls))
    assert sizes[0] > 0 and sizes == sizes[:1] * 2


def test_equal_steps_have_equal_hashes():
    one, two = make_step(build(ROPE)), make_step(build(dataclasses.replace(ROPE)))
    assert one == two and hash(one) == hash(two)


def test_buckets_are_powers_of_two_of_at_least_sixteen():
    assert [bucket(n) for n in (1, 15, 16, 17, 32, 33, 1000)] == [16, 16, 16, 32, 32, 64, 1024]


# Refusals


def refuse(message: str, *, config=ROPE, capacity: int = PROMPT + NEW, call=generate, **change):
    """Check that the call fails before anything is traced."""
    step = CountingStep(build(config))
    arguments = dict(prompt=prompts(), state=init_cache(config, 3, capacity), num_tokens=NEW)
    arguments.update(change)
    prompt, state = arguments.pop("prompt"), arguments.pop("state")
    with pytest.raises(ValueError, match=message):
        result = call(step, {}, prompt, state, **arguments)
        next(iter(result))
    assert step.calls == []


@pytest.mark.slow
@pytest.mark.parametrize("call", [generate, stream])
def test_text_longer_than_cache_is_rejected_before_compiling(call):
    """11 tokens and 23 new ones need 33 slots, because the last one is not fed back."""
    message = r"reach length 33: the limit is 32 \(cache capacity 32"
    refuse(message, capacity=32, call=call)
    refuse(r"reach length 44: the limit is 34", num_tokens=34, call=call)
    refuse(r"reach length 5: the limit is 4", config=RING, capacity=4, prompt=prompts()[:, :2],
           num_tokens=4, call=call)  # fmt: skip
    learned = dataclasses.replace(ROPE, positions="learned", max_len=13)
    refuse(r"reach length 33: the limit is 13 .*max_len 13", config=learned, call=call)


def test_partly_filled_state_has_less_capacity(rope):
    step, _, empty = rope
    state = empty(3, 17)
    state = dataclasses.replace(
        state, layers=tuple(dataclasses.replace(x, length=LENGTHS) for x in state.layers)
    )
    with pytest.raises(ValueError, match=r"reach length 18: the limit is 17"):
        decode.generate(step, {}, prompts(columns=1), state, num_tokens=7)


@pytest.mark.slow_except("stream")
@pytest.mark.parametrize("call", [generate, stream])
def test_invalid_arguments_are_rejected_before_compiling(call):
    wrong = prompts()
    wrong[1, 2] = VOCAB
    cases = [
        (r"token 31 at \[1, 2\]", dict(prompt=wrong)),
        (r"prompt has shape \(3, 0\)", dict(prompt=prompts()[:, :0])),
        (r"prompt has shape \(11,\)", dict(prompt=prompts()[0])),
        (r"prompt is float32\[3, 11\]: must be integer token IDs",
         dict(prompt=prompts().astype(np.float32))),
        (r"prompt has 2 rows, but the cache has 3", dict(prompt=prompts(2))),
        (r"num_tokens is 0", dict(num_tokens=0)),
        (r"chunk is 0", dict(chunk=0)),
        (r"prompt has rows of different lengths", dict(prompt=[[1, 2], [3], [4, 5, 6]])),
        (r"key is None: must be set, because Sample", dict(sampler=SAMPLER)),
        (r"key is 0: must be a single key", dict(sampler=SAMPLER, key=0)),
        (r"key is float32\(2,\): must be", dict(sampler=SAMPLER, key=np.zeros(2, np.float32))),
        (r"key is key<fry>\(4,\)",
         dict(sampler=SAMPLER, key=jax.random.split(jax.random.key(3), 4))),
        (r"sampler is the class Greedy: must be a value",
         dict(sampler=Greedy, key=jax.random.key(3))),
        (r"sampler is the class TopK", dict(sampler=TopK, key=jax.random.key(3))),
        (r"sampler is TopK\(k=3\): .* as Sample\(TopK\(k=3\)\)",
         dict(sampler=TopK(3), key=jax.random.key(3))),
        (r"sampler is 'greedy': must be callable", dict(sampler="greedy", key=jax.random.key(3))),
        (r"lengths have shape \(2,\): must be \(3,\)", dict(lengths=[1, 2])),
        (r"lengths are \[1, 0, 2\]: must be from 1 to 11", dict(lengths=[1, 0, 2])),
        (r"lengths are \[1, 12, 2\]", dict(lengths=[1, 12, 2])),
        (r"lengths are float64", dict(lengths=[1.0, 2.0, 3.0])),
    ]  # fmt: skip
    for message, change in cases:
        refuse(message, call=call, **change)


@pytest.mark.slow
def test_prompt_may_be_list_and_key_may_be_raw_words(rope, greedy, sampled):
    step, params, empty = rope
    arguments = dict(num_tokens=NEW, lengths=LENGTHS.tolist())
    got = generate(step, params, prompts().tolist(), empty(), **arguments)
    np.testing.assert_array_equal(got, greedy)
    raw = jax.random.key_data(jax.random.key(3))
    got = generate(step, params, prompts(), empty(), sampler=SAMPLER, key=raw, **arguments)
    np.testing.assert_array_equal(got, sampled)
    _, state = prefill(step, params, prompts().tolist(), empty(), LENGTHS.tolist())
    np.testing.assert_array_equal(state.length, LENGTHS)


@pytest.mark.long
def test_cache_overflow_inside_jit_overwrites_no_slot():
    """A traced length cannot be checked: from there on, the row has NaN logits and token -1."""
    step, params, empty = make(ROPE)

    @jax.jit
    def unchecked(prompt, lengths, state):
        logits, state = prefill(step, params, prompt, state, lengths)
        tokens, states = [], [state]
        for _ in range(4):
            tokens.append(Greedy()(None, logits))
            out, state = step(params, tokens[-1][:, None], state)
            logits = out[:, 0]
            states.append(state)
        return jnp.stack([*tokens, Greedy()(None, logits)], axis=1), states

    tokens, states = unchecked(prompts(), LENGTHS, empty(3, 13))
    assert (np.asarray(tokens)[0] >= 0).tolist() == [True, True, True, False, False]
    assert (np.asarray(tokens)[1:] >= 0).all()
    for full, last in zip(states[2].layers, states[-1].layers, strict=True):
        assert full.positions[0].tolist() == list(range(13))
        assert_same_bits(last.positions[0], full.positions[0])
        assert_same_bits(last.k[0], full.k[0])
        assert_same_bits(last.v[0], full.v[0])
    assert states[-1].length.tolist() == [13, 7, 11]


@pytest.mark.slow
def test_empty_batch_generates_no_tokens(rope):
    step, params, empty = rope
    got = generate(step, params, prompts(0), empty(0), num_tokens=3)
    assert got.shape == (0, 3) and got.dtype == jnp.int32


# Hygiene


@pytest.mark.slow
@pytest.mark.long_except("nans", "transfers")
@pytest.mark.parametrize(
    "setting",
    [jax.checking_leaks, partial(jax.debug_nans, True), partial(jax.transfer_guard, "disallow")],
    ids=["leaks", "nans", "transfers"],
)
def test_generation_passes_leak_nan_and_transfer_checks(setting, rope, greedy):
    step, params, empty = rope
    state, key = empty(), jax.random.key(3)
    with setting():
        tokens = generate(step, params, prompts(), state, num_tokens=3, lengths=LENGTHS, key=key)
        first = next(stream(step, params, prompts(), state, num_tokens=3, lengths=LENGTHS, key=key))
    np.testing.assert_array_equal(tokens, greedy[:, :3])
    np.testing.assert_array_equal(first, greedy[:, 0])


@pytest.mark.slow
def test_cache_from_another_model_is_rejected():
    scanned = dataclasses.replace(ROPE, scan_layers=True)
    deeper = dataclasses.replace(ROPE, num_layers=3)
    tokens = jnp.zeros((3, 2), jnp.int32)
    for model, cached, rows, rule in (
        (ROPE, scanned, 3, "cache.layers is for a scanned stack, but the model has a looped stack"),
        (scanned, ROPE, 3, "cache.layers is for a looped stack, but the model has a scanned stack"),
        (ROPE, deeper, 3, "cache.layers has 3 layers, but the model has 1"),
        (ROPE, ROPE, 2, "tokens have 3 rows, but the cache has 2"),
        (PAIR, dataclasses.replace(PAIR, kind="decoder"), 3, "cache.cross is None"),
    ):
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes(model))
        with pytest.raises(ValueError, match=rule):
            build(model).apply({"params": params}, tokens, cache=init_cache(cached, rows, 8))


def double(params, tokens, state, *, valid=None):
    """A step without a `check` that continues token t with 2t."""
    logits = jax.nn.one_hot(tokens * 2, VOCAB, dtype=state.dtype)
    return logits, state


@pytest.mark.slow
def test_prompts_without_token_ids_are_rejected_by_every_step():
    state = jnp.zeros((1,))
    for wrong in (np.array([[1.7, 2.2]]), np.array([[True, False]])):
        message = rf"prompt is {wrong.dtype}\[1, 2\]: must be integer token IDs"
        with pytest.raises(ValueError, match=message):
            generate(double, {}, wrong, state, num_tokens=2)
    with pytest.raises(ValueError, match=r"prompt is float32.*: must be integer token IDs"):
        jax.jit(lambda x: generate(double, {}, x, state, num_tokens=2))(jnp.ones((1, 2)))
    for wrong, lengths in itertools.product((2**40, -(2**31) - 1), (None, [2])):
        with pytest.raises(ValueError, match=f"prompt contains {wrong}: must be from -{2**31} to"):
            generate(double, {}, np.array([[1, wrong]]), state, num_tokens=2, lengths=lengths)
    padded = np.array([[3, 2**40]])  # tokens after the length are not read
    assert generate(double, {}, padded, state, num_tokens=2, lengths=[1]).tolist() == [[6, 12]]


def test_scalar_stop_array_and_keyless_greedy_are_accepted():
    for options in ({}, dict(sampler=Greedy())):
        got = decode.generate(
            double, {}, [[1]], np.zeros(1, np.float32), num_tokens=4, stop=np.array(4), **options
        )
        assert got.tokens.tolist() == [[2, 4, -1, -1]]
