"""Caches with less memory: sink tokens, window patterns, int8, sizes, rewinding, no copies."""

import dataclasses
import functools
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import model_oracle as oracle
from tests.support.tolerances import assert_near, largest_error
from transformer_jax.attention.block_plan import SKIPPED
from transformer_jax.attention.masks import Causal, Prefix, Window
from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache.model_cache import (
    ModelCache,
    cache_limit,
    refuse_past_capacity,
    rewind_cache,
)
from transformer_jax.config import ConfigError, ModelConfig, Shaw, T5Buckets
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.models.arguments import positions_and_masks
from transformer_jax.models.factory import build, cache_bytes, init_cache, init_params
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, TOKENS = 31, 37

CACHED = 1e-5
"""The same sums in another order, in f32, relative to the largest logit."""

INT8 = 0.02
"""Error of logits from an int8 or bfloat16 cache, relative to the largest logit, for two random
layers. Measured: int8 0.005 to 0.006, bfloat16 0.002."""

SMALL = ModelConfig(
    vocab_size=VOCAB, d_model=26, num_layers=2, num_heads=2, head_dim=6, num_kv_heads=1, d_ff=19,
    max_len=TOKENS, tie_embeddings=False, positions="rope",
)  # fmt: skip
PATTERN = dict(window=(None, 5), sink_tokens=2)
RINGS = dict(window=(5, 3), sink_tokens=2)

KINDS: dict[str, dict] = {
    "none": dict(positions="none"),
    "learned": dict(positions="learned"),
    "sinusoidal": dict(positions="sinusoidal"),
    "rope": dict(),
    "shaw": dict(positions=Shaw(max_distance=29)),
    "t5": dict(positions=T5Buckets(buckets=8, max_distance=17)),
    "alibi": dict(positions="alibi"),
}
SELDOM = ("none", "sinusoidal")
"""Attention treats these like "learned"."""


@functools.cache
def make(**changes):
    """Make a config, random parameters, and the jitted model."""
    config = dataclasses.replace(SMALL, **changes)
    shapes = jax.eval_shape(
        partial(init_params, dataclasses.replace(config, scan_layers=False)), jax.random.key(0)
    )
    params = oracle.randomised(shapes, np.random.default_rng(11))
    params = stack_layers(params) if config.scan_layers else params
    apply = jax.jit(build(config).apply)

    def run(tokens, params=params, **arguments):
        return apply({"params": params}, tokens, **arguments)

    return config, params, run


def ragged(rng, rows: int = 3):
    """Make tokens, and positions with padding anywhere, so that row lengths diverge."""
    tokens = rng.integers(0, VOCAB, (rows, TOKENS), dtype=np.int32)
    valid = rng.random((rows, TOKENS)) >= 0.2 * np.arange(rows)[:, None]
    places = np.where(valid, np.cumsum(valid, axis=1) - 1, -1)
    return tokens, places.astype(np.int32)


def fed(apply, tokens, positions, cache, chunk: int):
    """Return the logits of all tokens, fed `chunk` at a time, and the final cache."""
    short = -tokens.shape[1] % chunk
    filled = np.pad(tokens, ((0, 0), (0, short)))
    at = np.pad(positions, ((0, 0), (0, short)), constant_values=-1)
    parts = []
    for start in range(0, filled.shape[1], chunk):
        span = slice(start, start + chunk)
        logits, cache = apply(filled[:, span], positions=at[:, span], cache=cache)
        parts.append(np.asarray(logits))
    return np.concatenate(parts, axis=1)[:, : tokens.shape[1]], cache


# Sink tokens


def test_first_position_past_capacity_is_rejected():
    places, beyond = refuse_past_capacity(np.array([[3, 4], [-1, 0]], np.int32), 5)
    assert places.tolist() == [[3, 4], [-1, 0]] and not beyond.any()
    with pytest.raises(ValueError, match="position 5 is beyond the capacity of the cache, 5"):
        refuse_past_capacity(np.array([[3, 5]], np.int32), 5)


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("shuffled", [False, True])
def test_sink_mask_is_exact_and_skips_intermediate_tiles(rng, shuffled):
    """Exactly q - W < k <= q or k < n, and no tile without a visible pair is visited."""
    sinks, window, length, block = 5, 37, 701, 32
    mask = Causal() & (Window(window) | Prefix(np.full(1, sinks, np.int32)))
    q, k = np.arange(length), np.arange(-3, length)
    k = rng.permutation(k) if shuffled else k
    far, near = k[None] < sinks, k[None] > q[:, None] - window
    want = (k[None] >= 0) & (k[None] <= q[:, None]) & (far | near)
    at = q, np.maximum(k, -1)

    def found():
        plan = mask.block_plan(*at, block_q=block, block_k=block)
        return mask.materialize(*at)[0, 0], plan.classes[0, 0]

    sees, classes = jax.device_get(jax.jit(found)())
    np.testing.assert_array_equal(sees, want)
    rows, columns = classes.shape
    padded = np.zeros((rows * block, columns * block), bool)
    padded[:length, : len(k)] = want
    some = padded.reshape(rows, block, columns, block).any(axis=(1, 3))
    visited = classes != SKIPPED
    assert not (some & ~visited).any()
    if not shuffled:
        np.testing.assert_array_equal(visited, some)
        assert 2 * rows <= visited.sum() <= 5 * rows < rows * columns / 4


def test_layer_with_window_also_sees_sink_tokens():
    config = dataclasses.replace(SMALL, **PATTERN)
    _, (whole, ring) = positions_and_masks(config, (1, 11), None, None, None, causal=True)
    q, k = np.arange(11)[:, None], np.arange(11)
    assert whole is None
    np.testing.assert_array_equal(ring.materialize(k, k)[0, 0], (k > q - 5) | (k < 2))


@pytest.mark.slow
@pytest.mark.long_except("rope")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.long] * (kind in SELDOM)) for kind in KINDS],
)
def test_rings_with_sinks_decode_like_full_forward(kind, rng):
    """Rings of 7 and 5 slots wrap around many times, in ragged rows; sinks stay visible."""
    config, _, apply = make(**RINGS, **KINDS[kind])
    tokens, positions = ragged(rng)
    want = np.asarray(apply(tokens, positions=positions)[0])
    cache = init_cache(config, 3, 7)
    assert [layer.capacity for layer in cache.layers] == [7, 5]
    got, cache = fed(apply, tokens, positions, cache, 4)
    real = positions >= 0
    assert (
        want[real].std() > 0.3 and (positions.max(axis=1) >= 2 + 3 * 5).all()
    )  # wraps around three times
    assert_near(got[real], want[real], CACHED)
    for layer in cache.layers:
        assert {0, 1} <= set(np.asarray(layer.positions[0]).tolist())


@pytest.mark.slow_except("scan")
@pytest.mark.long_except("scan")
@pytest.mark.parametrize(
    ("changes", "capacity", "dtype"),
    [
        (dict(window=5, sink_tokens=2, scan_layers=True), 9, None),
        (PATTERN, TOKENS, None),
        (PATTERN, TOKENS, jnp.int8),
        pytest.param(dict(window=5, sink_tokens=2), 7, None, marks=pytest.mark.long),
        pytest.param(PATTERN, 6, None, marks=pytest.mark.long),
    ],
    ids=["scan", "pattern", "int8", "ring", "short"],
)
def test_cached_logits_do_not_depend_on_chunk_size(changes, capacity, dtype, rng):
    """One token at a time, and more than fit a ring; sizes between are tested above."""
    config, _, apply = make(**changes)
    tokens, positions = ragged(rng)
    if capacity == 6:  # the length of its longest layer, which is full
        positions = np.where(positions < 6, positions, -1)
    want = np.asarray(apply(tokens, positions=positions)[0])
    real = positions >= 0
    one, many = (
        fed(apply, tokens, positions, init_cache(config, 3, capacity, dtype), chunk)[0]
        for chunk in (1, 13)
    )
    # with int8, a difference of 1e-7 may change the rounding
    tolerance = CACHED if dtype is None else INT8
    assert_near(one[real], many[real], tolerance)
    assert_near(many[real], want[real], tolerance)


@pytest.mark.slow
def test_encoder_decoder_with_window_pattern_decodes_from_int8_cache(rng):
    """Both stacks have the pattern; the target's cache has rings with room for rewinding."""
    config, params, apply = make(kind="encoder-decoder", positions="alibi", **RINGS)
    source = rng.integers(0, VOCAB, (3, 11), dtype=np.int32)
    tokens, positions = ragged(rng)
    want = np.asarray(apply(tokens, positions=positions, source=source)[0])
    empty = partial(build(config).apply, capacity=23, dtype=jnp.int8, slack=3, method="init_cache")
    cache = jax.jit(empty)({"params": params}, source)
    assert [layer.capacity for layer in cache.layers] == [10, 8]
    assert {layer.k.dtype for layer in cache.layers} == {jnp.dtype("int8")}
    expected_bytes = cache_bytes(config, 3, 23, jnp.int8, source_length=11, slack=3)
    assert expected_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    got, after = fed(apply, tokens, positions, cache, 4)
    real = positions >= 0
    assert_near(got[real], want[real], INT8)
    again = rewind_cache(after, jnp.zeros(3, jnp.int32))
    chex.assert_trees_all_equal(again.cross, cache.cross, strict=True)
    np.testing.assert_array_equal(fed(apply, tokens, positions, again, 4)[0][real], got[real])


# Capacities and their limits


def test_each_layer_allocates_only_required_slots():
    def slots(capacity, slack=0, **changes):
        config = dataclasses.replace(SMALL, **changes)
        cache = jax.eval_shape(partial(init_cache, config, 2, capacity, slack=slack))
        longest = cache.capacity
        found = [layer.capacity for layer in cache.layers]
        assert longest == max(found)
        return found, [layer.sinks for layer in cache.layers], cache_limit(config, longest)

    assert slots(19) == ([19, 19], [0, 0], 19)
    assert slots(19, window=5) == ([19, 19], [0, 0], None)
    assert slots(4, window=5) == ([4, 4], [0, 0], 4)
    assert slots(7, window=5, sink_tokens=2) == ([7, 7], [2, 2], None)
    assert slots(6, window=5, sink_tokens=2) == ([6, 6], [0, 0], 6)
    assert slots(19, **PATTERN) == ([19, 7], [0, 2], 19)
    assert slots(6, **PATTERN) == ([6, 6], [0, 0], 6)
    assert slots(19, 3, **PATTERN) == ([19, 10], [0, 2], 19)
    assert slots(19, **RINGS) == ([7, 5], [2, 2], None)
    assert slots(6, **RINGS) == ([6, 5], [0, 2], 6)
    assert slots(19, window=(5, None)) == ([5, 19], [0, 0], 19)
    assert slots(19, window=(5,)) == ([5, 5], [0, 0], None)


@pytest.mark.slow
def test_full_attention_layer_limits_positions_of_ring_caches(rng):
    """A known position raises; a traced one makes the row's logits NaN and overwrites nothing."""
    config, params, apply = make(**PATTERN)
    model, end = build(config), TOKENS + 2  # a whole number of chunks
    tokens = rng.integers(0, VOCAB, (3, end), dtype=np.int32)
    positions = np.tile(np.arange(end, dtype=np.int32), (3, 1))
    cache = init_cache(config, 3, TOKENS)
    with pytest.raises(ValueError, match=r"reach length 38: the limit is 37 \(cache capacity 37"):
        generate(make_step(model), params, tokens[:, :5], cache, num_tokens=34)
    with pytest.raises(ValueError, match="position 38 is beyond the capacity of the cache, 37"):
        model.apply({"params": params}, tokens, positions=positions, cache=cache)
    _, full = fed(apply, tokens[:, :TOKENS], positions[:, :TOKENS], cache, 13)
    at = np.array([[TOKENS], [TOKENS - 1], [TOKENS]], np.int32)
    logits, after = apply(tokens[:, -1:], positions=at, cache=full)
    assert np.isnan(np.asarray(logits)).any(axis=(1, 2)).tolist() == [True, False, True]
    assert after.length.tolist() == [TOKENS] * 3
    for row in (0, 2):
        pick = partial(jax.tree.map, lambda leaf, row=row: leaf[row])
        chex.assert_trees_all_equal(pick(after), pick(full), strict=True)


def test_cache_with_different_window_pattern_is_rejected(rng):
    tokens = rng.integers(0, VOCAB, (2, 1), dtype=np.int32)

    def run(other: dict, model: dict):  # refuses before it reads parameters
        cache = partial(init_cache, dataclasses.replace(SMALL, **other), 2, 19)
        apply = build(dataclasses.replace(SMALL, **model)).apply
        jax.eval_shape(lambda: apply({}, tokens, cache=cache()))

    turned = PATTERN | dict(window=(5, None))
    with pytest.raises(ValueError, match=r"layers\[0\] has 2 sinks and 7 slots: .* at least 19"):
        run(turned, PATTERN)
    with pytest.raises(ValueError, match=r"layers\[1\] has 0 sinks and 3 slots: .* at least 19"):
        run(dict(num_layers=3, window=(5, 3, None)), dict(num_layers=3, window=(5, None, 3)))
    twin = dict(window=5, scan_layers=True)
    with pytest.raises(ValueError, match=r"layers\[0\] has 2 sinks and 19 slots: .* needs 0"):
        run(twin | dict(sink_tokens=2), twin)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sink_tokens=3), "sink_tokens is 3: needs a window"),
        (dict(window=(None, None), sink_tokens=3), "sink_tokens is 3: needs a window"),
        (dict(window=5, sink_tokens=-1), "sink_tokens is -1: must not be negative"),
        (dict(window=5, sink_tokens=2.0), "sink_tokens is 2.0: must be of type int"),
        (dict(window=(5, 0)), r"window is \(5, 0\): must be positive"),
        (dict(window=(5, "3")), r"window is \(5, '3'\): must be of type int or a tuple \("),
        (dict(window=[5, None]), r"window is \[5, None\]: must be of type int or a tuple"),
        (dict(window=()), r"window is \(\): a pattern must have from 1 to 2 \(num_layers\) items"),
        (dict(window=(5, 3, None)), r"a pattern must have from 1 to 2 \(num_layers\) items"),
        (dict(window=(5, None), scan_layers=True), "a pattern needs a looped stack: scan_layers"),
    ],
)
def test_invalid_window_is_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_invalid_slack_and_dtype_are_rejected():
    for config in (SMALL, dataclasses.replace(SMALL, window=5)):
        with pytest.raises(ValueError, match="slack is 3: needs a window pattern"):
            init_cache(config, 2, 19, slack=3)
    with pytest.raises(ValueError, match="slack is -1: must be an integer of at least 0"):
        init_cache(dataclasses.replace(SMALL, **RINGS), 2, 19, slack=-1)
    with pytest.raises(ValueError, match="dtype is int16: must be int8 or a floating-point"):
        init_cache(SMALL, 2, 19, dtype=jnp.int16)


# int8


def test_cache_quantization_error_is_at_most_half_a_step(rng):
    """|x - scale q| <= scale / 2 = max|x| / 254 in exact arithmetic, plus 2^-15 of it for f32.

    Rows of all magnitudes, zeros, subnormal numbers, and ties.
    """
    x = rng.standard_normal((3, 101, 2, 7)).astype(np.float32)
    x *= np.exp(rng.uniform(-80, 80, (3, 101, 2, 1))).astype(np.float32)
    x[0, 0], x[0, 1], x[0, 2] = 0, 1e-41, np.array([127, 0.5, 1.5, -2.5, 3, -127, 126.5])
    for dtype in (np.float32, jnp.bfloat16):
        given = x.astype(dtype).astype(np.float64)
        q, scale = jax.jit(kv.quantize)(x.astype(dtype))
        assert q.dtype == jnp.int8 and scale.dtype == jnp.float32 and scale.shape == (3, 101, 2)
        assert int(np.abs(np.asarray(q, np.int32)).max()) == 127
        got = np.asarray(jax.jit(kv.dequantize)(q, scale)).astype(np.float64)
        step = np.abs(given).max(axis=-1, keepdims=True) / 127
        step = np.maximum(step, np.finfo(np.float32).tiny)
        np.testing.assert_allclose(scale, step[..., 0], rtol=2**-22)
        excess = np.abs(got - given) / (step / 2)
        assert 0.99 < excess.max() <= 1 + 2**-14
        assert (got[0, 0] == 0).all()
    np.testing.assert_array_equal(
        jax.jit(kv.quantize)(x)[0][0, 2, 0], [127, 0, 2, -2, 3, -127, 126]
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_row_dequantizes_to_nan_without_affecting_others(bad, rng):
    x = rng.standard_normal((2, 3, 1, 5)).astype(np.float32)
    x[1, 2, 0, 3] = bad
    q, scale = jax.jit(kv.quantize)(x)
    got = np.array(jax.jit(kv.dequantize)(q, scale))
    assert np.isnan(got[1, 2]).all()
    got[1, 2] = x[1, 2] = 0
    assert largest_error(got, x) <= np.abs(x).max() / 254 * 1.001


@pytest.mark.slow
def test_int8_slots_match_float_cache(rng):
    """A ring with sinks, read after wrapping around: each row is within half its step."""
    caches = {d: kv.init(3, 7, 2, 3, 5, dtype=d, sinks=2) for d in ("float32", "int8", "bfloat16")}
    assert caches["int8"].k_scale.shape == caches["int8"].v_scale.shape == (3, 7, 2)
    for start in range(0, 30, 3):
        k, v = (rng.standard_normal((3, 3, 2, width)).astype(np.float32) for width in (3, 5))
        at = np.tile(np.arange(start, start + 3, dtype=np.int32), (3, 1))
        read = {}
        for d, cache in caches.items():
            caches[d], *read[d] = jax.jit(kv.extend, static_argnums=4)(cache, k, v, at, 5)
        for d, part in (("int8", 127), ("bfloat16", 128)):
            np.testing.assert_array_equal(read[d][2], read["float32"][2])
            assert read[d][0].dtype == (jnp.float32 if d == "int8" else jnp.bfloat16)
            for got, want in zip(read[d][:2], read["float32"][:2], strict=True):
                step = np.abs(np.asarray(want)).max(axis=-1, keepdims=True) / part
                off = np.abs(np.asarray(got).astype(np.float32) - np.asarray(want))
                assert (off <= step / 2 * 1.001).all()
                assert off[:, -3:].max() > 0, "new tokens are not read as they are held"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_nan_in_low_precision_cache_affects_only_queries_within_window(dtype, rng):
    """A NaN token reaches exactly the tokens within two windows; later tokens are bitwise equal."""
    config, params, apply = make(**RINGS)
    tokens, _ = ragged(rng)
    tokens = np.maximum(tokens, 8)
    positions = np.tile(np.arange(TOKENS, dtype=np.int32), (3, 1))
    embed = dict(params["embed"], tokens=params["embed"]["tokens"].copy())
    embed["tokens"][7] = np.nan
    marked = tokens.copy()
    marked[1, 3] = 7
    apply = partial(apply, params=params | dict(embed=embed))
    got, want = (
        fed(apply, t, positions, init_cache(config, 3, 7, dtype), 4)[0] for t in (marked, tokens)
    )
    reached = np.zeros((3, TOKENS), bool)
    reached[1, 3 : 3 + 5 + 3 - 1] = True
    assert np.isnan(got[reached]).all() and np.isfinite(want).all()
    np.testing.assert_array_equal(got[~reached], want[~reached])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("rope", "int8"), ("learned", "int8"), ("shaw", "int8"), ("rope", "bfloat16")],
)
def test_low_precision_cache_changes_logits_within_bound(kind, dtype, rng):
    config, _, apply = make(**RINGS, **KINDS[kind])
    tokens, positions = ragged(rng)
    want, got = (
        fed(apply, tokens, positions, init_cache(config, 3, 7, d), 4)[0] for d in (None, dtype)
    )
    real = positions >= 0
    assert 0 < largest_error(got[real], want[real])
    assert_near(got[real], want[real], INT8)


def knowing(params, rng):
    """Return parameters that predict a successor for each of D tokens: their embeddings are
    orthogonal and outweigh the output of the blocks."""
    width = params["embed"]["tokens"].shape[1]
    directions = np.linalg.qr(rng.standard_normal((width, width)))[0].astype(np.float32)
    tokens, output = (np.zeros((VOCAB, width), np.float32) for _ in range(2))
    tokens[:width] = 50 * directions
    output[rng.permutation(width)] = directions
    return params | dict(embed=params["embed"] | dict(tokens=tokens, output=output))


@pytest.mark.slow
def test_greedy_tokens_with_int8_cache_match_float32(rng):
    """As long as the likeliest token leads by more than twice the bound, in each row."""
    config, params, apply = make(**PATTERN)
    params = knowing(params, rng)

    def greedy(dtype):
        token, cache, tokens_so_far, margin = (
            np.arange(3)[:, None],
            init_cache(config, 3, TOKENS, dtype),
            [],
            [],
        )
        for n in range(TOKENS):
            at = np.full((3, 1), n, np.int32)
            logits, cache = apply(token.astype(np.int32), params=params, positions=at, cache=cache)
            best = np.sort(np.asarray(logits)[:, 0])
            margin.append((best[:, -1] - best[:, -2]) / np.abs(best).max())
            token = np.asarray(logits).argmax(axis=-1)
            tokens_so_far.append(token[:, 0])
        return np.stack(tokens_so_far, axis=1), np.stack(margin, axis=1)

    (want, margin), (got, _) = greedy(None), greedy(jnp.int8)
    assert len(np.unique(want)) > 5 and margin.min() > 2 * INT8
    np.testing.assert_array_equal(got, want)


# Bytes


@pytest.mark.slow_except("bf16-compute", "full", "pattern-int8")
@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        (dict(), dict()),
        (dict(scan_layers=True), dict(dtype=jnp.int8)),
        (dict(dtype="bfloat16", value_head_dim=5), dict()),
        (PATTERN, dict(dtype=jnp.int8, slack=2)),
    ],
    ids=["full", "int8-scan", "bf16-compute", "pattern-int8"],
)
def test_cache_bytes_match_arrays(changes, arguments):
    """Encoder-decoders are in the tests of rings and of donated caches."""
    config = dataclasses.replace(SMALL, **changes)
    cache = jax.eval_shape(partial(init_cache, config, 3, 17, **arguments))
    count = cache_bytes(config, 3, 17, **arguments)
    assert count == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) > 0


@pytest.mark.slow
def test_cache_bytes_match_hand_calculation():
    """B rows of S slots with H + Hv numbers and a position, and a length; int8 adds two scales."""
    config = dataclasses.replace(SMALL, num_kv_heads=2, value_head_dim=5, **PATTERN)
    slots = 19 + 7
    assert cache_bytes(config, 3, 19) == 3 * (slots * (2 * (6 + 5) * 4 + 4) + 2 * 4)
    assert cache_bytes(config, 3, 19, jnp.int8) == 3 * (slots * (2 * (6 + 5 + 8) + 4) + 2 * 4)
    pair = dataclasses.replace(SMALL, kind="encoder-decoder")
    crossed = 2 * 3 * (11 * (2 * 6 * 4 + 4) + 4)
    assert cache_bytes(pair, 3, 7, source_length=11) == crossed + 2 * 3 * (7 * (2 * 6 * 4 + 4) + 4)


def test_cache_bytes_require_source_length_only_for_encoder_decoders():
    with pytest.raises(ValueError, match="source_length is None: an encoder-decoder also caches"):
        cache_bytes(dataclasses.replace(SMALL, kind="encoder-decoder"), 2, 7)
    with pytest.raises(ValueError, match="source_length is 7, but kind is 'decoder'"):
        cache_bytes(SMALL, 2, 7, source_length=7)
    with pytest.raises(ValueError, match="an encoder has no cache"):
        cache_bytes(dataclasses.replace(SMALL, kind="encoder"), 2, 7)


# Rewinding


def test_scanned_layers_are_rewound_separately(rng):
    """With three rows and two layers, confusing the axes changes the shape."""
    layer = kv.init(3, 7, 2, 4, 4, jnp.float32)
    read = jnp.broadcast_to(jnp.arange(6), (3, 6))
    layers = [
        kv.update(layer, *jnp.asarray(rng.normal(size=(2, 3, 6, 2, 4)), jnp.float32), read)
        for _ in range(2)
    ]
    scanned = ModelCache(jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *layers))
    length = np.array([0, 4, 6], np.int32)
    found = rewind_cache(scanned, length).layers
    back = [kv.rewind(layer, jnp.asarray(length)) for layer in layers]
    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *back)
    chex.assert_trees_all_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.long_except("pattern")
@pytest.mark.parametrize(
    ("changes", "capacity", "more"),
    [
        (dict(scan_layers=True, window=5, sink_tokens=2), 11, dict(dtype=jnp.int8)),
        (PATTERN, TOKENS, dict(slack=4)),
        pytest.param(dict(), TOKENS, dict(), marks=pytest.mark.long),
        pytest.param(dict(scan_layers=True), TOKENS, dict(), marks=pytest.mark.long),
    ],
    ids=["ring-scan", "pattern", "full", "full-scan"],
)
def test_rewound_cache_decodes_as_if_tokens_were_never_added(changes, capacity, more, rng):
    """Rings with four extra slots drop up to five tokens, a different number in each row."""
    config, _, apply = make(**changes)
    texts, other = (rng.integers(0, VOCAB, (3, 23), dtype=np.int32) for _ in range(2))
    read = np.array([18, 18, 18], np.int32)
    kept = np.array([13, 18, 15], np.int32)
    columns = np.arange(23, dtype=np.int32)[None]
    empty = init_cache(config, 3, capacity, **more)
    _, cache = fed(apply, texts, np.where(columns < read[:, None], columns, -1), empty, 4)
    cache = jax.jit(rewind_cache)(cache, kept)
    assert cache.length.tolist() == kept.tolist()
    _, never = fed(apply, texts, np.where(columns < kept[:, None], columns, -1), empty, 4)
    for chunk in (1, 4):
        positions = np.where(columns < 6, kept[:, None] + columns, -1)
        got, after = fed(apply, other[:, :6], positions[:, :6], cache, chunk)
        want, _ = fed(apply, other[:, :6], positions[:, :6], never, chunk)
        assert np.isfinite(want).all()
        assert_near(got, want, CACHED)
        assert after.length.tolist() == (kept + 6).tolist()


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("sinks", [0, 2])
def test_rewind_keeps_exactly_positions_below_length(rng, sinks):
    """For every length: 0, one less than, equal to and one more than the current length."""
    length_before, capacity = 7, 11
    k, v = rng.standard_normal((2, 1, length_before, 1, 3)).astype(np.float32)
    cache = jax.jit(partial(kv.init, 1, capacity, 1, 3, sinks=sinks))()
    update, rewind = jax.jit(kv.update), jax.jit(kv.rewind)
    cache = update(cache, k, v, np.arange(length_before, dtype=np.int32)[None])
    for length in range(length_before + 2):
        back = rewind(cache, np.array([length], np.int32))
        kept, positions = min(length, length_before), back.positions[0].tolist()
        assert back.length.tolist() == [kept]
        assert sorted(p for p in positions if p >= 0) == list(range(kept))
        assert set(positions[kept:]) == {-1}
        on = update(back, k, v, np.where(np.arange(length_before) == 0, kept, -1)[None])
        assert on.length.tolist() == [kept + 1]
        np.testing.assert_array_equal(np.asarray(on.k)[0, kept], k[0, 0])
    chex.assert_trees_all_equal(rewind(cache, cache.length), cache, strict=True)


@pytest.mark.slow
def test_rewind_empties_slots_and_never_extends_cache(rng):
    cache = kv.init(3, 7, 1, 3)
    k = rng.standard_normal((3, 5, 1, 3)).astype(np.float32)
    cache = kv.update(cache, k, k, np.tile(np.arange(5, dtype=np.int32), (3, 1)))
    got = jax.jit(kv.rewind)(cache, np.array([2, 6, -3], np.int32))
    assert got.length.tolist() == [2, 5, 0]
    assert got.positions.tolist() == [[0, 1, *[-1] * 5], [0, 1, 2, 3, 4, -1, -1], [-1] * 7]
    assert cache.length.tolist() == [5, 5, 5]
    for length in (jnp.zeros(2, jnp.int32), jnp.zeros(3), jnp.zeros((3, 1), jnp.int32)):
        with pytest.raises(ValueError, match=r"length is .*: must be integers \[3\]"):
            kv.rewind(cache, length)


# Memory


@pytest.mark.slow
@pytest.mark.long_except("decoder-False-None")
@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize(
    ("kind", "scan", "dtype"),
    [
        ("decoder", False, None),
        ("encoder-decoder", True, jnp.int8),
        pytest.param("decoder", True, None, marks=pytest.mark.long),
        pytest.param("encoder-decoder", False, jnp.int8, marks=pytest.mark.long),
    ],
)
def test_donated_cache_is_updated_in_place(kind, scan, dtype, rng):
    """Every leaf is donated and returned in the same memory; none is copied."""
    config, params, _ = make(kind=kind, scan_layers=scan)
    model = build(config)
    tokens = rng.integers(0, VOCAB, (2, 1), dtype=np.int32)
    if kind == "decoder":
        cache, told = init_cache(config, 2, 53, dtype), cache_bytes(config, 2, 53, dtype)
    else:
        source = rng.integers(0, VOCAB, (2, 41), dtype=np.int32)
        empty = partial(model.apply, capacity=53, dtype=dtype, method="init_cache")
        cache = jax.jit(empty)({"params": params}, source)
        told = cache_bytes(config, 2, 53, dtype, source_length=41)
    leaves = jax.tree.leaves(cache)
    assert told == sum(leaf.nbytes for leaf in leaves)

    def step(params, tokens, cache):
        return model.apply({"params": params}, tokens, cache=cache)

    compiled = jax.jit(step, donate_argnums=2).lower(params, tokens, cache).compile()
    text = compiled.as_text()
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    assert aliases and aliases[1].count("-alias") == len(leaves)
    assert re.search(r"dynamic-update-slice\(|scatter\(", text)
    copied = set(re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text))
    large = {",".join(map(str, leaf.shape)) for leaf in leaves if leaf.ndim > 3 + scan}
    assert len(large) >= 1 and not copied & large, copied
    places = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    assert len(set(places)) == len(places)
    _, new = compiled(params, tokens, cache)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(new)] == places
    assert new.length.tolist() == [1, 1]
