"""Captured attention weights against formulas, for whole sequences and decoding, in each layer."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.test_decode import parameters
from tests.lectures import test_recurrent as recurrent
from tests.support import model_oracle as oracle
from tests.support.tolerances import FORWARD_F32, assert_near, assert_same_bits
from transformer_jax.attention.masks import Causal, Padding
from transformer_jax.config import ModelConfig, Shaw, T5Buckets
from transformer_jax.decoding import generation as decode
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.decoding.step import make_step
from transformer_jax.lectures.recurrent import RecurrentStep
from transformer_jax.models.attention_weights import attention_weights
from transformer_jax.models.factory import build, init_cache
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, ROWS, PROMPT, NEW, SOURCE = 31, 3, 5, 7, 11
LENGTHS, LIMITS = np.array([5, 1, 3], np.int32), np.array([7, 5, 2], np.int32)
SOURCE_PLACES = np.where(np.arange(SOURCE) < [[11], [3], [7]], np.arange(SOURCE), -1)
SOURCE_PLACES = SOURCE_PLACES.astype(np.int32)

WEIGHTS = 5 * FORWARD_F32
"""Weights of the second of two layers, and logits, in f32 against float64."""

ROPE = ModelConfig(
    vocab_size=VOCAB, d_model=14, num_layers=2, num_heads=4, head_dim=6, num_kv_heads=2, d_ff=11,
    max_len=37, positions="rope", tie_embeddings=False,
)  # fmt: skip
T5 = dict(positions=T5Buckets(buckets=8, max_distance=7))
CONFIGS = {
    name: dataclasses.replace(ROPE, **changes)
    for name, changes in dict(
        rope=dict(),
        alibi=dict(positions="alibi", qk_norm=True),
        shaw=dict(positions=Shaw(max_distance=3), attention_sinks=True),
        capped=dict(attention_softcap=1.5, attention_sinks=True, attention_scale=0.7),
        ring=dict(window=(5, 3), sink_tokens=2, **T5),
        short=dict(window=29, num_layers=1),
        pair=dict(kind="encoder-decoder", attention_sinks=True, **T5),
        encoder=dict(
            kind="encoder", positions="learned", masked_token_head=True, norm_order="post"
        ),
    ).items()
}


RECURRENT = "attention/weights"


def draw(columns: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(17).integers(0, VOCAB, (rows, columns), dtype=np.int32)


def by_formula(config, params, tokens, **more):
    """Logits in float64, weights [B, L, N, T, S], and the weights of a source or None."""
    record: list[np.ndarray] = []
    logits = oracle.forward(config, params, tokens, record=record, **more)
    every = 2 if config.kind == "encoder-decoder" else 1
    self_weights, *cross = (
        np.stack(part).reshape(len(tokens), config.num_layers, *part[0].shape)
        for part in (record[i::every] for i in range(every))
    )
    return logits, self_weights, cross[0] if cross else None


def places_of(config):
    """The places of the attention of a stack: inputs, weights and outputs."""
    names = ["embedding", "block_*/residual", "block_*/attention/weights"]
    names += ["block_*/attention/key_positions"]
    names += [] if config.norm_order == "post" else ["final_norm"]
    names += ["block_*/cross_attention/weights"] if config.kind == "encoder-decoder" else []
    return tuple(names)


def joined(config, captured, axis=1):
    """The values of all layers; for generated tokens their axis is 2."""

    def of_blocks(name):
        return [np.asarray(captured[f"block_{i}/{name}"]) for i in range(config.num_layers)]

    stream = [captured["embedding"], *of_blocks("residual")]
    if config.norm_order != "post":
        stream[-1] = captured["final_norm"]
    pair = config.kind == "encoder-decoder"
    return SimpleNamespace(
        layers=of_blocks("attention/weights"),
        positions=of_blocks("attention/key_positions"),
        hidden=np.stack(stream, axis),
        cross=np.stack(of_blocks("cross_attention/weights"), axis) if pair else None,
    )


def attend(config, params, tokens, **arguments):
    apply = jax.jit(partial(build(config).apply, capture=places_of(config)))
    logits, cache, captured = apply({"params": params}, tokens, **arguments)
    return logits, cache, joined(config, captured)


def empty(config, params, capacity: int = PROMPT + NEW - 1, dtype=None):
    if config.kind != "encoder-decoder":
        return init_cache(config, ROWS, capacity, dtype)
    read = jax.jit(partial(build(config).apply, capacity=capacity, method="init_cache"))
    return read({"params": params}, draw(SOURCE), positions=SOURCE_PLACES)


def produced(config, params, capacity: int = PROMPT + NEW - 1, **arguments):
    arguments = dict(num_tokens=NEW, lengths=LENGTHS, capture=places_of(config)) | arguments
    state = empty(config, params, capacity)
    return generate(make_step(build(config)), params, draw(PROMPT), state, **arguments)


# Whole sequences


@pytest.mark.slow
@pytest.mark.long_except("ring", "shaw")
@pytest.mark.parametrize("name", ["alibi", "shaw", "capped", "ring", "pair", "encoder"])
def test_full_sequence_weights_match_formulas(name):
    """With padding inside; "ring" has a window pattern, T5's bias and sink tokens."""
    config = CONFIGS[name]
    params, tokens = parameters(config), draw(PROMPT + NEW)
    places = np.stack([np.arange(12), np.arange(-3, 9), np.arange(12)]).astype(np.int32)
    places[1, :3], places[2, 4:9], places[2, 9:] = -1, -1, [4, 5, 6]
    more = {}
    if config.kind == "encoder-decoder":
        more = dict(source=draw(SOURCE), source_positions=SOURCE_PLACES)
    logits, cache, weights = attend(config, params, tokens, positions=places, **more)
    assert cache is None
    captured_weights = np.stack(weights.layers, axis=1)
    for layer in weights.positions:
        np.testing.assert_array_equal(layer, places)
    found = attention_weights(build(config), params, tokens, positions=places, **more)
    assert_near(found["attention"], captured_weights, WEIGHTS)
    if config.kind == "encoder-decoder":
        assert_near(found["cross_attention"], weights.cross, WEIGHTS)
    real = (places >= 0)[:, None, None, :, None]
    stream: list[np.ndarray] = []
    more["hidden"] = stream
    want, want_self, cross = by_formula(config, params, tokens, positions=places, **more)
    assert_near(logits[places >= 0], want[places >= 0], WEIGHTS)
    assert weights.hidden.shape == (ROWS, config.num_layers + 1, PROMPT + NEW, 14)
    for layer in range(config.num_layers + 1):
        hidden = np.stack(stream)[:, layer]
        assert_near(weights.hidden[:, layer][places >= 0], hidden[places >= 0], WEIGHTS)
    assert want_self.std() > 0.1
    assert_near(captured_weights, np.where(real, want_self, 0.0), WEIGHTS)
    assert not captured_weights[np.broadcast_to(~real, want_self.shape)].any()
    assert (weights.cross is None) == (cross is None)
    if cross is not None:
        assert cross.shape[-1] == SOURCE and cross.std() > 0.1
        assert_near(weights.cross, np.where(real, cross, 0.0), WEIGHTS)
    total = captured_weights.sum(axis=-1)[np.broadcast_to(real[..., 0], want_self.shape[:-1])]
    if config.attention_sinks:
        assert 0 < total.min() < 0.5 and total.max() <= 1
    else:
        assert_near(total, np.ones_like(total), WEIGHTS)


@pytest.mark.long
def test_looped_scanned_and_remat_stacks_have_equal_weights():
    config = CONFIGS["capped"]
    params, tokens = parameters(config), draw(PROMPT)
    _, _, want = attend(config, params, tokens)
    assert want.layers[1].shape == (ROWS, 4, PROMPT, PROMPT)
    np.testing.assert_array_equal(want.positions[0], np.tile(np.arange(PROMPT), (ROWS, 1)))
    for scan in (True, False):
        other = dataclasses.replace(config, scan_layers=scan, remat="full")
        _, _, got = attend(other, stack_layers(params) if scan else params, tokens)
        np.testing.assert_array_equal(got.positions, want.positions)
        assert_near(np.stack(got.layers), np.stack(want.layers), WEIGHTS)
        assert_near(got.hidden, want.hidden, WEIGHTS)


@pytest.mark.slow
def test_fully_masked_query_has_zero_weights():
    config = CONFIGS["rope"]
    valid = np.arange(PROMPT) >= np.array([[0], [2], [5]])
    mask = Causal() & Padding(jnp.asarray(valid))
    _, _, weights = attend(config, parameters(config), draw(PROMPT), mask=mask)
    total = np.stack(weights.layers, axis=1).sum(axis=-1)
    assert_near(total, np.broadcast_to(valid[:, None, None], total.shape), WEIGHTS)
    assert not total[1, :, :, :2].any() and not total[2].any()


@pytest.mark.slow
def test_weights_are_nan_exactly_when_output_is_nan():
    """A value is NaN in one slot of one row, but its key is not."""
    config = CONFIGS["rope"]
    params, cache = parameters(config), empty(CONFIGS["rope"], None)
    _, cache, _ = attend(config, params, draw(PROMPT), cache=cache)
    first = cache.layers[0]
    first = dataclasses.replace(first, v=first.v.at[1, 2, 0, 3].set(jnp.nan))
    cache = dataclasses.replace(cache, layers=(first, cache.layers[1]))
    logits, _, weights = attend(config, params, draw(1), cache=cache)
    assert np.isnan(logits).any(axis=(1, 2)).tolist() == [False, True, False]
    broken = np.isnan(weights.layers[0][:, :, 0]).all(axis=-1)  # [B, N]
    assert broken.tolist() == [[False] * 4, [True, True, False, False], [False] * 4]


# While decoding


@pytest.mark.slow
@pytest.mark.long_except("ring-False")
@pytest.mark.parametrize(
    ("name", "scan"),
    [
        ("ring", False),
        ("short", False),
        ("pair", True),
        pytest.param("shaw", False, marks=pytest.mark.long),
        pytest.param("capped", True, marks=pytest.mark.long),
    ],
)
def test_weights_for_generated_tokens_match_full_forward(name, scan):
    """Against the formulas, and 0 after a row's end, with and without early exit. "short" is a
    cache shorter than its window."""
    config = CONFIGS[name]
    params = parameters(config)
    run = dataclasses.replace(config, scan_layers=scan)
    capacity = 7 if name == "ring" else PROMPT + NEW - 1
    tree = stack_layers(params) if scan else params
    out = produced(run, tree, capacity, limits=LIMITS, early_exit=not scan)
    found = joined(config, out.captured, axis=2)
    assert found.hidden.shape == (ROWS, NEW, config.num_layers + 1, 14)
    for row, length in enumerate(LENGTHS):
        count = LIMITS[row]
        text = np.concatenate([draw(PROMPT)[row, :length], out.tokens[row, :count]])[None]
        more = {}
        if config.kind == "encoder-decoder":
            keep = SOURCE_PLACES[row] >= 0
            more = dict(source=draw(SOURCE)[row : row + 1, keep])
        stream: list[np.ndarray] = []
        logits, self_weights, cross = by_formula(config, params, text, hidden=stream, **more)
        hidden = found.hidden[row]
        states = stream[0].swapaxes(0, 1)[length - 1 : -1]  # [T, L + 1, D]
        assert_near(hidden[:count], states, WEIGHTS)
        assert not hidden[count:].any()
        np.testing.assert_array_equal(out.tokens[row, :count], logits[0, length - 1 : -1].argmax(1))
        for layer in range(config.num_layers):
            got, places = found.layers[layer][row], found.positions[layer][row]
            assert got.shape == (NEW, 4, places.shape[-1])
            assert not got[count:].any() and not places[count:].any()
            for n in range(count):
                at = length - 1 + n
                filled = places[n] >= 0
                if name not in ("ring", "short"):  # slot p of a full cache is position p
                    now = np.where(np.arange(capacity) <= at, np.arange(capacity), -1)
                    np.testing.assert_array_equal(places[n], now)
                seen = np.flatnonzero(self_weights[0, layer, :, at].any(axis=0))
                assert len(set(places[n][filled])) == filled.sum() and places[n].max() == at
                assert set(seen) <= set(places[n][filled])
                want = np.zeros((4, places.shape[-1]))
                want[:, filled] = self_weights[0, layer, :, at, places[n][filled]].T
                assert_near(got[n], want, WEIGHTS)
        if cross is not None:
            got = found.cross[row]
            want = np.moveaxis(cross[0][:, :, length - 1 : -1], 2, 0)  # [T, L, N, S]
            assert_near(got[:count, ..., keep], want, WEIGHTS)
            assert not got[..., ~keep].any() and not got[count:].any()


@pytest.mark.slow
def test_weights_with_quantized_cache_use_stored_keys():
    """By formula from scale * q of one layer; float keys are tested elsewhere."""
    config = dataclasses.replace(CONFIGS["alibi"], num_layers=1)
    params, tokens = parameters(config), draw(PROMPT)
    state = init_cache(config, ROWS, PROMPT, jnp.int8)
    _, cache, weights = attend(config, params, tokens, cache=state)
    layer_cache = cache.layers[0]
    keys = (
        np.asarray(layer_cache.k, np.float64)
        * np.asarray(layer_cache.k_scale, np.float64)[..., None]
    )
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    block = p["decoder"]["block_0"]
    x = oracle._norm(config, block["norm_attention"], p["embed"]["tokens"][tokens[:, -1]])
    query = oracle._rms(oracle._affine(x, block["attention"]["query"]), config.norm_eps)
    query = query * block["attention"]["query_scale"]
    want = np.zeros((ROWS, 4, PROMPT))
    for row in range(ROWS):
        for n in range(4):
            bias = oracle.alibi_slope(n, 4) * np.arange(1 - PROMPT, 1)
            scores = keys[row, :, n // 2] @ query[row, n] / np.sqrt(6) + bias
            want[row, n] = np.exp(scores) / np.exp(scores).sum()
    assert_near(weights.layers[0][:, :, -1], want, WEIGHTS)
    _, floats, _ = by_formula(config, params, tokens)
    assert np.abs(floats[:, 0, :, -1] - want).max() > 100 * WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        dict(sampler=Sample(Temperature(1.3)), stop=(3, 11, 19, 23, 29)),
        pytest.param(dict(), marks=pytest.mark.long),
    ],
    ids=["sampled-stop", "greedy"],
)
def test_capturing_weights_preserves_tokens_and_adds_one_compilation(arguments):
    config = dataclasses.replace(CONFIGS["capped"], num_layers=1)
    params = parameters(config)
    arguments = dict(arguments, key=jax.random.key(3))
    plain = produced(config, params, capture=(), **arguments)
    before = decode._generate.num_programs()
    out = produced(config, params, **arguments)
    produced(config, params, **dict(arguments, lengths=LENGTHS[::-1].copy()))
    assert decode._generate.num_programs() == before + 1
    assert plain.captured is None
    assert len(np.unique(out.tokens)) > 5
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    np.testing.assert_array_equal(out.lengths, plain.lengths)
    assert_near(out.log_probs, plain.log_probs, WEIGHTS)


@pytest.mark.slow
def test_invalid_row_has_zero_weights():
    config = dataclasses.replace(CONFIGS["pair"], num_layers=1)
    params = parameters(config)
    valid = np.array([[True], [False], [True]])
    names = ("block_0/attention/weights", "block_0/cross_attention/weights")
    look = jax.jit(make_step(build(config)).look, static_argnames="capture")
    _, cache, captured = look(params, draw(1), empty(config, params), capture=names, valid=valid)
    assert cache.length.tolist() == [1, 0, 1]
    params = recurrent.parameters(recurrent.DOT)
    look = jax.jit(RecurrentStep(build(recurrent.DOT)).look, static_argnames="capture")
    start = recurrent.begin(recurrent.DOT, params)
    _, state, _ = look(params, draw(1), start, capture=(RECURRENT,))
    _, after, own = look(params, draw(1), state, capture=(RECURRENT,), valid=valid)
    assert_same_bits(after.weights[1], state.weights[1])
    assert_same_bits(own[RECURRENT][np.array([0, 2])], after.weights[np.array([0, 2])])
    for leaf in captured.values():
        total = np.asarray(leaf).sum(axis=-1).reshape(ROWS, -1)
        assert (total > 0).all(axis=1).tolist() == [True, False, True]
        assert not np.asarray(leaf)[1].any()


# Recurrent models


@pytest.mark.slow
@pytest.mark.long_except("additive")
@pytest.mark.parametrize(
    ("config", "early_exit"),
    [(recurrent.ADDITIVE, True), (recurrent.DOT, False)],
    ids=["additive", "dot"],
)
def test_recurrent_weights_match_formulas(config, early_exit):
    """And 0 after a row's end, with and without early exit."""
    params, step = recurrent.parameters(config), RecurrentStep(build(config))
    prompt = draw(PROMPT)
    out = generate(
        step, params, prompt, recurrent.begin(config, params), num_tokens=NEW, lengths=LENGTHS,
        limits=LIMITS, early_exit=early_exit, capture=(RECURRENT,),
    )  # fmt: skip
    weights = np.asarray(out.captured[RECURRENT])
    assert weights.shape == (ROWS, NEW, recurrent.SOURCE)
    for row, length in enumerate(LENGTHS):
        text = np.concatenate([prompt[row, :length], out.tokens[row, : LIMITS[row]]])
        _, want = recurrent.oracle_row(config, params, text[:-1], row)
        got = weights[row]
        source = recurrent.SOURCE_LENGTHS[row]
        assert_near(got[: LIMITS[row], :source], want[length - 1 :], WEIGHTS)
        assert not got[: LIMITS[row], source:].any() and not got[LIMITS[row] :].any()
        assert_same_bits(out.state.weights[row], got[LIMITS[row] - 1])


# Refusals


@pytest.mark.slow
def test_models_without_attention_weights_are_rejected_by_name():
    model, params = build(recurrent.PLAIN), recurrent.parameters(recurrent.PLAIN)
    with pytest.raises(ValueError, match="RecurrentSeq2Seq has no attention weights"):
        attention_weights(model, params, draw(PROMPT))
    config = CONFIGS["rope"]
    with pytest.raises(ValueError, match="attention_weights does not accept a cache"):
        attention_weights(build(config), parameters(config), draw(1), cache=empty(config, None))
    with pytest.raises(ValueError, match=r"tokens have shape \(3, 2\): .* reads one token per r"):
        make_step(build(config)).look(
            parameters(config), draw(2), empty(config, None), ("block_0/attention/weights",)
        )
