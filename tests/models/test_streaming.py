"""Tests of streaming: chunks match the full forward pass, with a state of constant size."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import assert_near, assert_same_bits, largest_error
from transformer_jax.attention.api import dot_product_attention
from transformer_jax.attention.biases import ALiBi, RelativeBias, alibi_slopes
from transformer_jax.attention.masks import Causal, Prefix, Window
from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache.model_cache import ModelCache
from transformer_jax.config import ModelConfig, Rope, Shaw, T5Buckets
from transformer_jax.models.factory import build, init_cache
from transformer_jax.models.positions import apply_rope
from transformer_jax.models.streaming import (
    StreamingEncoder,
    chunk_mask,
    rebase_cache,
    rebase_state,
    receptive_field,
    stream_attention,
)
from transformer_jax.models.transformer import Decoder

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, FRAME, WINDOW, LENGTH = 2, 5, 50, 127
STREAMED = 1e-5
"""Tolerance of chunks against the full forward pass, both float32."""
END = 2**31 - 1
SIZES = dict(
    vocab_size=23, d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, d_ff=11, init_std=0.5
)
KINDS = {
    "none": dict(positions="none"),
    "half": dict(positions="rope", head_dim=6),
    "interleaved": dict(positions=Rope(pairing="interleaved"), head_dim=6),
    "shaw": dict(positions=Shaw(max_distance=7)),
    "t5": dict(positions=T5Buckets(buckets=8, max_distance=31)),
    "alibi": dict(positions="alibi"),
    "sinusoidal": dict(positions="sinusoidal"),
}
MIXES = {  # only four chunk sizes, to limit compilation
    "ones": [1] * LENGTH,
    "sevens": [7] * 18 + [1],
    "fifties": [50, 50, 7, 7, 7] + [1] * 6,
    "longer than the window": [61, 61] + [1] * 5,
    "mixed": [1, 61, 7, 1, 50, 7],
}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.long)


def settings(kind: str = "half", **more) -> ModelConfig:
    return ModelConfig(**{**SIZES, "window": WINDOW, **KINDS[kind], **more})


def encoder(kind: str = "half", chunk: int | None = None, **more) -> StreamingEncoder:
    return StreamingEncoder(settings(kind, **more), FRAME, chunk)


def parameters(model, example, seed: int = 3):
    """Draw all parameters at random, including biases and norm scales."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), example))["params"]
    return jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)


def draw(rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def apply(model, params, x, **more):
    return model.apply({"params": params}, x, **more)


jit_apply = jax.jit(apply, static_argnums=0)


def cut(x: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    assert sum(sizes) == x.shape[1]
    return np.split(x, np.cumsum(sizes)[:-1], axis=1)


def ring(model, rows: int = ROWS, capacity: int = WINDOW, start: int = 0) -> ModelCache:
    """Return an empty ring whose next frame has position `start`."""
    empty = init_cache(model.config, rows, capacity)
    return jax.tree.map(lambda x: x + start if x.dtype == jnp.int32 and x.ndim == 1 else x, empty)


def feed(model, params, x, sizes, cache):
    out = []
    for chunk in cut(x, sizes):
        y, cache = jit_apply(model, params, chunk, cache=cache)
        out.append(np.asarray(y))
    return np.concatenate(out, axis=1), cache


# One layer, against the formula in float64


HEADS, KV_HEADS, DIM, VALUE = 4, 2, 6, 3
LAYERS = {
    "none": dict(),
    "half": dict(rope=Rope()),
    "interleaved": dict(rope=Rope(pairing="interleaved", base=37.0)),
    "alibi": dict(bias=ALiBi(alibi_slopes(HEADS))),
    "t5": dict(
        bias=RelativeBias(np.arange(32, dtype=np.float32).reshape(8, HEADS) % 7 / 4, False, 31)
    ),
    "capped": dict(softcap=1.3, sinks=np.array([0.5, -1.0, 0.0, 2.0], np.float32), scale=0.7),
}


def t5_bucket(distance: int) -> int:
    """Return one of 8 buckets, logarithmic up to 31 (Raffel et al. 2020)."""
    if distance < 4:
        return distance
    return min(7, 4 + int(np.log(distance / 4) / np.log(31 / 4) * 4))


def layer_oracle(name: str, q, k, v, window: int) -> np.ndarray:
    """Compute attention over the last `window` keys, one query and head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    chosen = LAYERS[name]
    rows, count = q.shape[:2]
    out = np.zeros((rows, count, HEADS, VALUE))
    if "rope" in chosen:
        config, half = chosen["rope"], DIM // 2
        w = config.base ** (-np.arange(half) / half)
        turn = np.exp(1j * np.arange(count)[:, None] * w)[None, :, None]

        def rotate(x):
            first = np.s_[..., :half] if config.pairing == "half" else np.s_[..., 0::2]
            second = np.s_[..., half:] if config.pairing == "half" else np.s_[..., 1::2]
            pairs, y = (x[first] + 1j * x[second]) * turn, np.empty_like(x)
            y[first], y[second] = pairs.real, pairs.imag
            return y

        q, k = rotate(q), rotate(k)
    for b, t, n in np.ndindex(rows, count, HEADS):
        seen = np.arange(max(0, t - window + 1), t + 1)
        key = k[b, seen, n // (HEADS // KV_HEADS)]
        scores = key @ q[b, t, n] * chosen.get("scale", DIM**-0.5)
        if "softcap" in chosen:
            scores = 1.3 * np.tanh(scores / 1.3)
        if name == "alibi":
            scores = scores - 2.0 ** (-8 * (n + 1) / HEADS) * (t - seen)
        if name == "t5":
            table = np.arange(32.0).reshape(8, HEADS) % 7 / 4
            scores = scores + table[[t5_bucket(t - s) for s in seen], n]
        sink = np.exp(float(chosen["sinks"][n])) if "sinks" in chosen else 0.0
        weights = np.exp(scores)
        out[b, t, n] = weights @ v[b, seen, n // (HEADS // KV_HEADS)] / (weights.sum() + sink)
    return out


def layer_inputs(rng, rows: int = ROWS, count: int = LENGTH):
    return (
        draw(rng, rows, count, HEADS, DIM),
        draw(rng, rows, count, KV_HEADS, DIM),
        draw(rng, rows, count, KV_HEADS, VALUE),
    )


def layer_state(start: int = 0, rows: int = ROWS, capacity: int = WINDOW) -> kv.KVCache:
    state = kv.init(rows, capacity, KV_HEADS, DIM, VALUE)
    return dataclasses.replace(state, length=state.length + start)


@partial(jax.jit, static_argnums=0, static_argnames="window")
def layer_step(name: str, state, q, k, v, window=None):
    return stream_attention(state, q, k, v, window=window, **LAYERS[name])


def feed_layer(name: str, state, arrays, sizes: list[int], **more):
    out = []
    for chunk in zip(*(cut(x, sizes) for x in arrays), strict=True):
        y, state = layer_step(name, state, *chunk, **more)
        out.append(np.asarray(y))
    return np.concatenate(out, axis=1), state


@pytest.mark.slow
@pytest.mark.long_except("half-5 mixes", "interleaved-1 mixes", "t5-1 mixes")
@pytest.mark.parametrize(
    ("name", "mixes"),
    [
        ("half", MIXES),
        *[(name, ["longer than the window"]) for name in LAYERS if name != "half"],
        *[slow(name, MIXES) for name in LAYERS if name != "half"],
    ],
    ids=lambda x: x if isinstance(x, str) else f"{len(x)} mixes",
)
def test_streamed_layer_matches_formula_for_any_chunking(rng, name, mixes):
    arrays = layer_inputs(rng)
    want = layer_oracle(name, *arrays, WINDOW)
    for sizes in (MIXES[mix] for mix in mixes):
        got, state = feed_layer(name, layer_state(), arrays, sizes)
        assert_near(got, want, STREAMED)
        assert state.length.tolist() == [LENGTH] * ROWS
    for start in (10_000_000, END - LENGTH - 61):  # as exact at large positions
        got, state = feed_layer(name, layer_state(start), arrays, MIXES["longer than the window"])
        assert_near(got, want, STREAMED)
        assert state.length.tolist() == [start + LENGTH] * ROWS
    narrow = layer_oracle(name, *arrays, WINDOW - 1)
    # the tolerance detects a window that is off by one
    assert largest_error(narrow, want) > 100 * STREAMED


@pytest.mark.slow
def test_layer_without_state_matches_formula(rng):
    arrays = layer_inputs(rng)
    whole, none = layer_step("half", None, *arrays, window=WINDOW)
    assert_near(whole, layer_oracle("half", *arrays, WINDOW), STREAMED)
    assert none is None


@pytest.mark.slow
def test_ring_cache_longer_than_window_matches_formula(rng):
    arrays = layer_inputs(rng)
    want = layer_oracle("half", *arrays, 31)
    got, _ = feed_layer("half", layer_state(capacity=41), arrays, [61, 61, 5], window=31)
    assert_near(got, want, STREAMED)


@pytest.mark.slow
def test_ring_cache_keeps_attention_sinks(rng):
    query, key, value = layer_inputs(rng, 1, 29)
    mask = Causal() & (Window(7) | Prefix(jnp.array([3])))
    want = jax.jit(dot_product_attention)(query, key, value, mask=mask)
    for window, capacity in ((None, 10), (7, 13)):
        state, out = kv.init(1, capacity, KV_HEADS, DIM, VALUE, sinks=3), []
        for at in (slice(0, 13), slice(13, 26), slice(26, 29)):
            arrays = (x[:, at] for x in (query, key, value))
            y, state = layer_step("none", state, *arrays, window=window)
            out.append(y)
        assert_near(np.concatenate(out, axis=1), want, STREAMED)
    with pytest.raises(ValueError, match="capacity is 7 without 3 sinks: must be at least window"):
        stream_attention(kv.init(1, 10, KV_HEADS, DIM, VALUE, sinks=3), query, key, value, window=8)


@pytest.mark.slow
def test_gradients_flow_through_streaming_state(rng):
    """Keys that are only read from the ring, chunks later, also get gradients."""
    arrays, weight = layer_inputs(rng, 1, 37), draw(rng, 1, 37, HEADS, VALUE)

    def streamed(arrays):
        out, state = [], layer_state(rows=1, capacity=11)
        for chunk in zip(*(jnp.split(x, [7, 8, 21], axis=1) for x in arrays), strict=True):
            y, state = stream_attention(state, *chunk, **LAYERS["half"])
            out.append(y)
        return (jnp.concatenate(out, axis=1) * weight).sum()

    def whole(arrays):
        return (stream_attention(None, *arrays, window=11, **LAYERS["half"])[0] * weight).sum()

    got, want = jax.jit(jax.grad(streamed))(arrays), jax.jit(jax.grad(whole))(arrays)
    for a, b in zip(got, want, strict=True):
        assert_near(a, b, STREAMED)


# Models


@pytest.mark.slow
def test_encoder_features_match_decoder_with_frames_as_embeddings(rng):
    """The decoder's logits are features times embeddings; other tests compare it with NumPy."""
    model, count = encoder(), 17
    frames = draw(rng, 1, count, FRAME)
    params = parameters(model, frames)
    table = frames[0] @ params["input"]["kernel"] + params["input"]["bias"][None]
    decoder = Decoder(dataclasses.replace(model.config, vocab_size=count))
    twin = {"embed": {"tokens": table}, "decoder": params["encoder"]}
    want, _ = jit_apply(decoder, twin, jnp.arange(count)[None])
    features, none = jit_apply(model, params, frames)
    assert none is None and features.shape == (1, count, SIZES["d_model"])
    assert_near(features @ table.T, want, STREAMED)


@pytest.mark.slow
@pytest.mark.long_except("half")
@pytest.mark.parametrize("kind", [k if k in ("half", "shaw") else slow(k) for k in KINDS])
def test_streamed_encoder_matches_full_forward(rng, kind):
    model, frames = encoder(kind), draw(rng, ROWS, LENGTH, FRAME)
    params = parameters(model, frames)
    want, _ = jit_apply(model, params, frames)
    got, cache = feed(model, params, frames, [1, 61, 61] + [1] * 4, ring(model))
    assert_near(got, want, STREAMED)
    assert cache.length.tolist() == [LENGTH] * ROWS


@pytest.mark.long
@pytest.mark.parametrize("scan", [False, slow(True)])
def test_streamed_decoder_matches_full_forward(rng, scan):
    """The ring wraps around, also at positions after a million turns."""
    model = build(settings("interleaved", window=7, scan_layers=scan))
    tokens = rng.integers(0, 23, (1, 31)).astype(np.int32)
    params = parameters(model, tokens)
    want, _ = jit_apply(model, params, tokens)
    for start in (0, 10_000_000, END - 100):
        got, _ = feed(model, params, tokens, [15, 1, 15], ring(model, 1, 7, start))
        assert_near(got, want, STREAMED)


@pytest.mark.slow
def test_ragged_rows_match_separate_rows(rng):
    """Rows have different lengths; padding frames are NaN, and are neither seen nor cached."""
    model, lengths = encoder("half", window=11), [0, 0]
    frames = draw(rng, ROWS, 67, FRAME)
    params = parameters(model, frames)
    want = np.asarray(jit_apply(model, params, frames)[0])
    cache, compared = ring(model, capacity=11), 0
    for count in [19, 19, 19, 19, 19, 19]:
        valid = rng.random((ROWS, count)) < [[0.25], [0.8]]
        positions = np.asarray(kv.next_positions(jnp.asarray(lengths), jnp.asarray(valid)))
        positions = np.where(positions < 67, positions, -1)
        chunk = np.full((ROWS, count, FRAME), np.nan, np.float32)
        for b, t in np.argwhere(positions >= 0):
            chunk[b, t] = frames[b, positions[b, t]]
        got, cache = jit_apply(model, params, chunk, positions=positions, cache=cache)
        got = np.asarray(got)
        assert np.isfinite(got).all()
        for b, t in np.argwhere(positions >= 0):
            assert_near(got[b, t], want[b, positions[b, t]], STREAMED)
            compared += 1
        lengths = [int(n) for n in cache.length]
    assert compared == sum(lengths) and lengths[0] + 10 < lengths[1] and lengths[0] > 22


@pytest.mark.slow
def test_nan_padding_does_not_affect_gradients(rng):
    model, frames = encoder(window=3), draw(rng, 1, 7, FRAME)
    params = parameters(model, frames)
    positions = np.array([[-1, 0, 1, -1, 2, -1, 3]], np.int32)
    real = (positions >= 0)[:, :, None]

    @jax.jit
    def gradient(params, frames):
        def loss(params, frames):
            out, _ = apply(model, params, frames, positions=positions)
            return (jnp.where(real, out, 0) ** 2).sum()

        return jax.grad(loss, (0, 1))(params, frames)

    got = gradient(params, np.where(real, frames, np.float32(np.nan)))
    want = gradient(params, np.where(real, frames, np.float32(0)))
    jax.tree.map(assert_same_bits, got, want)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["half", slow("t5"), slow("shaw")])
def test_stream_of_100_000_frames_matches_full_forward(rng, kind):
    """Compare the tail with a forward pass over its receptive field, at positions from 0."""
    window, count, chunks, tail = 13, 127, 797, 3 * 127
    model = encoder(kind, window=window, implementation="xla")
    frames = draw(rng, 1, chunks * count, FRAME)
    params = parameters(model, frames[:, :1])

    @jax.jit
    def run(params, chunks):
        def step(cache, frames):
            return apply(model, params, frames, cache=cache)[::-1]

        return jax.lax.scan(step, ring(model, 1, window), chunks)

    cache, out = run(params, frames.reshape(chunks, 1, count, FRAME))
    out = np.asarray(out).reshape(1, chunks * count, -1)
    assert cache.length.tolist() == [chunks * count] and chunks * count > 100_000
    needed = tail + receptive_field(model.config) - 1
    want, _ = jit_apply(model, params, frames[:, -needed:])
    assert_near(out[:, -tail:], np.asarray(want)[:, -tail:], STREAMED)


# Memory and programs


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_state_size_is_constant_and_each_chunk_size_compiles_once(rng):
    model = encoder("none", num_layers=1, window=7)
    frames = draw(rng, ROWS, 11, FRAME)
    params, cache = parameters(model, frames), ring(model, capacity=7)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    traced = []

    @jax.jit
    def step(params, frames, cache):
        traced.append(frames.shape[1])
        return apply(model, params, frames, cache=cache)

    for count in [1, 11, 1, 1, 11, 1]:
        _, cache = step(params, frames[:, :count], cache)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), cache) == shapes
    assert traced == [1, 11]
    cfg = model.config
    values = 2 * cfg.kv_heads * cfg.key_dim * 4  # one key and one value in float32
    assert nbytes(cache) == ROWS * cfg.num_layers * (7 * (values + 4) + 4)
    assert nbytes(ring(model, capacity=70)) > 9 * nbytes(cache)


@pytest.mark.slow
def test_scratch_memory_is_independent_of_stream_length():
    model, count = encoder("none", num_layers=1, window=7), 11
    params = jax.eval_shape(lambda: parameters(model, jnp.zeros((1, 1, FRAME))))

    def scratch(chunks: int) -> int:
        def run(params, frames, cache):
            def step(cache, x):
                return apply(model, params, x, cache=cache)[::-1]

            return jax.lax.scan(step, cache, frames)

        frames = jax.ShapeDtypeStruct((chunks, ROWS, count, FRAME), jnp.float32)
        cache = jax.eval_shape(lambda: ring(model, capacity=7))
        compiled = jax.jit(run).lower(params, frames, cache).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = scratch(2), scratch(2000)
    assert 0 < few and abs(many - few) < 100 < 1998 * count  # bytes, for 1998 more chunks


# Receptive field


def reach(model, count: int, at: int) -> np.ndarray:
    """Return the frames with a gradient of the features of frame `at`."""
    frames = draw(np.random.default_rng(5), 1, count, FRAME)
    params = parameters(model, frames)
    gradient = jax.jit(jax.grad(lambda x: (apply(model, params, x)[0][0, at] ** 3).sum()))
    return np.flatnonzero(np.abs(np.asarray(gradient(frames))[0]).sum(axis=-1))


@pytest.mark.slow_except("1-50-100")
@pytest.mark.parametrize(("layers", "window", "count"), [(1, 50, 100), (3, 5, 29)])
def test_streaming_receptive_field_is_exact(layers, window, count):
    model = encoder("alibi", num_layers=layers, window=window)
    field = receptive_field(model.config)
    assert field == layers * (window - 1) + 1 < count
    np.testing.assert_array_equal(reach(model, count, count - 1), np.arange(count - field, count))


def test_streaming_chunk_attends_to_itself_and_history():
    places = np.arange(4)
    seen = np.asarray(jax.jit(chunk_mask(2, 1).materialize)(places, places))[0, 0]
    assert seen.astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1]]
    model = encoder("none", chunk=7, num_layers=1, window=10)
    np.testing.assert_array_equal(reach(model, 28, 15), np.arange(14 - 3, 21))


@pytest.mark.slow
def test_streaming_chunk_attends_only_to_earlier_sinks(rng):
    places = jnp.arange(6)
    first, second, third = ([1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1])
    seen = chunk_mask(2, 0, 3).materialize(places, places)[0, 0].astype(int)
    assert seen.tolist() == [first, first, second, second, third, third]
    model = encoder("none", chunk=3, num_layers=1, window=5, sink_tokens=4)
    frames = draw(rng, 1, 18, FRAME)
    params = parameters(model, frames)
    want, _ = jit_apply(model, params, frames)
    for at, told in ((3, True), (4, False), (12, False), (13, True)):
        changed = frames + np.float32(np.arange(18) == at)[None, :, None]
        changed, _ = jit_apply(model, params, changed)
        assert told == (largest_error(changed[:, 15], want[:, 15]) > 1e-3)
    got, _ = feed(model, params, frames, [9, 9], ring(model, 1, 9))
    assert_near(got, want, STREAMED)


@pytest.mark.slow
def test_single_frame_chunks_match_causal_window():
    places = jnp.concatenate([jnp.arange(-1, 23), END - 1 - jnp.arange(7)])
    want = (Causal() & Window(8)).materialize(places, places)
    assert_same_bits(chunk_mask(1, 7).materialize(places, places), want)
    assert chunk_mask(1, 7) == chunk_mask(1, 7) and hash(chunk_mask(1, 7)) == hash(chunk_mask(1, 7))


@pytest.mark.slow
def test_encoder_with_lookahead_streams_whole_chunks(rng):
    """Use chunks of 50 frames with 50 frames of history; one row ends early."""
    model = encoder("none", chunk=50, window=100, num_layers=1, implementation="xla")
    frames, places = draw(rng, ROWS, 250, FRAME), np.arange(250, dtype=np.int32)
    params = parameters(model, frames)
    positions = np.where(places < np.array([[250], [231]]), places, -1)
    want, _ = jit_apply(model, params, frames, positions=positions)
    cache, out = ring(model, capacity=100), []
    for at in (slice(0, 50), slice(50, 150), slice(150, 200), slice(200, 250)):
        y, cache = jit_apply(model, params, frames[:, at], positions=positions[:, at], cache=cache)
        out.append(y)
    real = (positions >= 0)[:, :, None]
    want = np.asarray(want)
    assert_near(np.concatenate(out, axis=1) * real, want * real, STREAMED)
    frames[:, 49] += 1
    dirty, _ = jit_apply(model, params, frames, positions=positions)
    assert largest_error(dirty[:, 0], want[:, 0]) > 1e-3  # frame 0 sees frame 49 of its chunk
    with pytest.raises(ValueError, match="row 1 starts at position 231: must be a multiple of c"):
        apply(model, params, frames[:, :3], cache=cache)
    later = np.asarray(cache.length)[:, None] + places[:50]
    lost, _ = jit_apply(model, params, frames[:, :50], positions=later, cache=cache)
    assert np.isfinite(lost[0]).all() and np.isnan(lost[1]).all()


def test_all_padding_row_is_accepted_at_any_chunk_offset(rng):
    """Known positions raise no error, and traced ones give finite results."""
    model = encoder("none", chunk=3, num_layers=1, window=5)
    frames = draw(rng, ROWS, 6, FRAME)
    params = parameters(model, frames)
    positions = np.stack([np.arange(6), np.full(6, -1)]).astype(np.int32)
    jax.eval_shape(lambda params: apply(model, params, frames, positions=positions), params)
    both, padded = np.stack([positions[0]] * 2), positions
    want, out = (jit_apply(model, params, frames, positions=p)[0] for p in (both, padded))
    assert np.isfinite(out).all()
    assert_near(np.asarray(out)[:1], np.asarray(want)[:1], STREAMED)


# The end of int32


@pytest.mark.slow
@pytest.mark.parametrize(("pairing", "scan"), [slow("half", False), ("interleaved", True)])
def test_rebased_stream_continues_with_same_features(rng, pairing, scan):
    rope = Rope(pairing=pairing, scaling="yarn", factor=4.0, original_len=16)
    model = encoder("half", positions=rope, window=11, scan_layers=scan)
    frames, count = draw(rng, ROWS, 62, FRAME), jnp.array([31, 20])
    params = parameters(model, frames)
    want, _ = jit_apply(model, params, frames)
    valid = jnp.arange(31)[None] < count[:, None]
    cache = ring(model, capacity=11)
    positions = kv.next_positions(cache.length, valid)
    _, cache = jit_apply(model, params, frames[:, :31], positions=positions, cache=cache)
    moved = jax.jit(rebase_cache, static_argnums=1)(cache, model.config)
    assert cache.length.tolist() == [31, 20] and moved.length.tolist() == [20, 20]
    rest = np.stack([frames[0, 31:], frames[1, 20:51]])
    positions = kv.next_positions(moved.length, jnp.ones((ROWS, 31), bool))
    got, _ = jit_apply(model, params, rest, positions=positions, cache=moved)
    assert_near(got, np.stack([np.asarray(want)[0, 31:], np.asarray(want)[1, 20:51]]), STREAMED)


@pytest.mark.slow
def test_stream_position_past_int32_fails_until_rebased(rng):
    arrays = layer_inputs(rng, count=122)
    want = layer_oracle("half", *arrays, WINDOW)
    early, late = ([x[:, at] for x in arrays] for at in (slice(61), slice(61, None)))
    _, state = feed_layer("half", layer_state(END - 100), early, [61])
    with pytest.raises(ValueError, match="row 0 would reach position 2147483647: rebase"):
        stream_attention(state, *late, **LAYERS["half"])
    lost, kept = feed_layer("half", state, late, [61])
    assert np.isnan(lost).all() and kept.length.tolist() == state.length.tolist()
    assert_same_bits(kept.k, state.k)
    moved = rebase_state(state, LAYERS["half"]["rope"])
    assert max(moved.length.tolist()) < 2 * WINDOW
    got, _ = feed_layer("half", moved, late, [61])
    assert_near(got, want[:, 61:], STREAMED)


@pytest.mark.long
def test_decoder_position_past_int32_raises_error_or_returns_nan(rng):
    model = build(settings(window=7))
    tokens = rng.integers(0, 23, (2, 5)).astype(np.int32)
    params = parameters(model, tokens)
    start = jnp.array([END - 14, END - 5])
    ends = ring(model, 2, 7)
    ends = ModelCache(tuple(dataclasses.replace(x, length=start) for x in ends.layers))
    fine, after = jit_apply(model, params, tokens, cache=ends)
    assert np.isfinite(fine).all() and after.length.tolist() == [END - 9, END]
    out, after = jit_apply(model, params, tokens, cache=after)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()
    assert after.length.tolist() == [END - 4, END]
    with pytest.raises(ValueError, match="row 0 would reach position 2147483647: rebase"):
        apply(model, params, tokens, cache=after)
    out, after = jit_apply(model, params, tokens, cache=rebase_cache(after, model.config))
    assert np.isfinite(out).all() and max(after.length.tolist()) < 30
    with pytest.raises(ValueError, match="row 0 would reach position 2147483647: rebase"):
        apply(model, params, tokens, positions=jnp.full((2, 5), END), cache=ring(model, 2, 7))


# Wrong input


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        (dict(window=None), (FRAME,), "window is None: streaming requires a window"),
        (dict(kind="encoder"), (FRAME,), "kind is 'encoder': must be 'decoder', since a"),
        (dict(positions="learned"), (FRAME,), "positions is Learned(): a stream outgrows"),
        (dict(scale_embeddings=True), (FRAME,),
         "scale_embeddings is True: not applicable, since frames have no"),
        (dict(logit_bias=True), (FRAME,), "logit_bias is True: not applicable"),
        ({}, (0,), "frame_dim is 0: must be an integer of at least 1"),
        ({}, (FRAME, 51), "chunk is 51: must be from 1 to window, 50"),
        ({}, (FRAME, 0), "chunk is 0: must be an integer of at least 1"),
    ],
    ids=lambda x: str(x)[:24],
)  # fmt: skip
def test_invalid_streaming_encoder_config_raises_error(change, sizes, message):
    with pytest.raises(ValueError) as caught:
        StreamingEncoder(
            ModelConfig(**SIZES | dict(window=WINDOW, positions="none") | change), *sizes
        )
    assert str(caught.value).startswith(message)


FRAMES = np.zeros((2, 3, FRAME), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frames", "more", "message"),
    [
        ([[0.0]], dict(), "frames are of type list: must be an array"),
        (FRAMES[0], dict(), f"frames are float32[3, {FRAME}]: must be floating-point [B, T"),
        (FRAMES[..., :4], dict(), "frames are float32[2, 3, 4]: must be floating-point [B, T"),
        (FRAMES.astype(np.int32), dict(), f"frames are int32[2, 3, {FRAME}]: must be floating"),
        (FRAMES, dict(positions=np.zeros((2, 4), np.int32)), "positions are int32[2, 4]: must"),
        (FRAMES, dict(positions=np.zeros((2, 3), np.float32)),
         "positions are float32[2, 3]: must be integers"),
        (FRAMES, dict(cache=3), "frames have 2 rows, but the cache has 3"),
        (FRAMES, dict(cache=(2, 49)), "capacity is 49: must be at least window, 50"),
    ],
    ids=lambda x: str(x)[:24] if isinstance(x, str) else "",
)  # fmt: skip
def test_invalid_frames_raise_error(frames, more, message):
    model = encoder()
    if "cache" in more:
        rows, capacity = more["cache"] if isinstance(more["cache"], tuple) else (more["cache"], 50)
        more = dict(cache=ring(model, rows, capacity))
    params = jax.eval_shape(lambda: parameters(model, FRAMES))
    with pytest.raises(ValueError) as caught:
        apply(model, params, frames, **more)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("state", "change", "message"),
    [
        (None, dict(), "window is None without a state"),
        ((2, 50), dict(window=51), "capacity is 50: must be at least window, 51"),
        ((2, 50), dict(window=0), "window is 0: must be at least 1"),
        ((3, 50), dict(), "query has 2 rows, but the state has 3"),
        ((2, 50), dict(bias=np.zeros((1, 1, 7, 7), np.float32)), "bias is of type "),
        ((2, 50), dict(positions=np.zeros((2, 6), np.int32)), "positions are int32[2, 6]: must"),
        ((2, 50), dict(positions=np.zeros((2, 7), np.float32)), "positions are float32[2, 7]: mus"),
        ((2, 50), dict(key=(2, 7, KV_HEADS, DIM + 1)), "k has shape (2, 7, 2, 7): must be"),
        ((2, 50), dict(query=(2, 7, DIM)), "query has shape (2, 7, 6): must be [B, T, N, H]"),
    ],
    ids=lambda x: str(x)[:24] if isinstance(x, str) else "",
)  # fmt: skip
def test_invalid_stream_attention_arguments_raise_error(state, change, message):
    arrays = dict(query=(2, 7, HEADS, DIM), key=(2, 7, KV_HEADS, DIM), value=(2, 7, KV_HEADS, 3))
    arrays |= {name: change[name] for name in arrays.keys() & change.keys()}
    more = {name: value for name, value in change.items() if name not in arrays}
    given = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in arrays.items()}

    def stream(given):
        ready = None if state is None else layer_state(rows=state[0], capacity=state[1])
        return stream_attention(ready, **given, **more)

    with pytest.raises(ValueError) as caught:
        jax.eval_shape(stream, given)
    assert str(caught.value).startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["yarn", "longrope", "window"])
def test_rebased_keys_match_keys_computed_at_smaller_positions(rng, scaling):
    """Use the base of the layer's window, and do not apply the attention factor again."""
    factors = dict(short_factors=(1.5,) * 3, long_factors=(2.0,) * 3) if scaling != "yarn" else {}
    name = "yarn" if scaling == "yarn" else "longrope"
    rope = Rope(scaling=name, factor=9.0, original_len=16, **factors)
    config = settings(positions=rope, window=7, num_layers=1)
    if scaling == "window":
        config = dataclasses.replace(config, positions=dataclasses.replace(rope, window_base=31.0))
        rope = Rope(base=31.0)
    keys = jnp.asarray(draw(rng, 1, 7, 1, 6))
    places = jnp.array([[14, 15, 16, 17, 18, 19, 13]])
    turn = jax.jit(lambda keys, places: apply_rope(keys, places, rope))
    layer_cache = kv.KVCache(turn(keys, places), keys, places, jnp.array([20]))
    (moved,) = jax.jit(lambda cache: rebase_cache(cache, config))(ModelCache((layer_cache,))).layers
    assert moved.length.tolist() == [13]
    want = jnp.where((places >= 7)[..., None, None], turn(keys, places - 7), 0)
    assert_near(moved.k, want, STREAMED)
    assert float(jnp.abs(moved.k - layer_cache.k).max()) > 0.1


def test_rebase_keeps_keys_of_unrotated_layers(rng):
    config = settings(positions=Rope(pattern=(False, True)), window=7, num_layers=2)
    keys, places = draw(rng, 1, 7, 1, 6), np.arange(14, 21, dtype=np.int32)[None]
    layer_cache = kv.KVCache(keys, keys, places, np.array([21], np.int32))
    cache = ModelCache((layer_cache, layer_cache))
    still, turned = jax.jit(lambda cache: rebase_cache(cache, config))(cache).layers
    assert still.positions.tolist() == turned.positions.tolist() == [list(range(7))]
    np.testing.assert_array_equal(still.k, keys)
    assert largest_error(turned.k, keys) > 0.1


def test_rebase_shifts_positions_by_whole_chunks():
    @jax.jit
    def moved(length):
        state = dataclasses.replace(kv.init(2, 6, 1, 4), length=length)
        return [rebase_state(state, multiple=multiple).length for multiple in (1, 4, 10)]

    one, four, ten = moved(np.array([100, 23], np.int32))
    assert one.tolist() == [100 - 90, 23 - 12]
    assert four.tolist() == [100 - 84, 23 - 12]
    assert ten.tolist() == [100 - 90, 23]


def test_invalid_rebase_raises_error():
    absolute, turned = encoder("sinusoidal"), encoder()

    def moved(model, multiple=1, **sizes):
        return rebase_cache(ring(model, **sizes), model.config, multiple=multiple)

    for move, message in (
        (partial(moved, absolute), r"positions is Sinusoidal\(\): absolute positions"),
        (partial(moved, turned, capacity=49), "capacity is 49: must be at least window, 50"),
        (partial(moved, turned, multiple=0), "multiple is 0"),
        (lambda: rebase_state(kv.init(1, 3, 1, 4, dtype=jnp.int8), Rope()),
         "keys are int8: must be floating"),
        (lambda: rebase_state(kv.init(1, 7, 1, 4, sinks=2)),
         "sinks is 2: must be 0, since positions of sinks are fixed"),
        (lambda: chunk_mask(0, 3), "chunk is 0: must be an integer of at least 1"),
        (lambda: chunk_mask(2, 3, -1), "sinks is -1: must be an integer of at least 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(move)


@pytest.mark.long
def test_low_precision_stream_keeps_dtype(rng):
    model, frames = encoder(dtype="bfloat16", window=7), draw(rng, 1, 30, FRAME)
    params = parameters(model, frames)
    want, _ = jit_apply(model, params, frames)
    got, cache = feed(model, params, frames, [15, 15], ring(model, 1, 7))
    assert got.dtype == cache.layers[0].k.dtype == jnp.bfloat16
    assert_near(got, want, 2.0**-5)


@pytest.mark.slow
def test_streaming_encoder_with_dropout_rngs_raises_error(rng):
    model, frames = encoder("half"), draw(rng, ROWS, 3, FRAME)
    variables = {"params": parameters(model, frames)}
    with pytest.raises(ValueError, match="rngs contains 'dropout': pass the dropout key"):
        model.apply(variables, frames, rngs={"dropout": jax.random.key(0)})
