"""Tests of norms, activations, dropout, look-ups and blocks against their formulas."""

import dataclasses
import math
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamNotFoundError, ScopeParamShapeError
from flax.traverse_util import flatten_dict

from tests.support import model_oracle as oracle
from tests.support.tolerances import FORWARD_F32, assert_near, assert_same_bits
from transformer_jax.config import Activation, ConfigError, ModelConfig
from transformer_jax.models.arguments import check_tokens
from transformer_jax.models.block import Attention, Block, BlockInputs
from transformer_jax.models.factory import build, init_params
from transformer_jax.models.functional import activate, dropout, split_key, xielu
from transformer_jax.models.layers import Embed, FeedForward
from transformer_jax.models.ops import layer_norm, lookup, project, rms_norm
from transformer_jax.models.places import Places, Visit

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = ModelConfig(vocab_size=31, d_model=14, num_heads=2, head_dim=5, d_ff=11, num_layers=2)


def float64_norm(x, scale, bias, eps, *, centre: bool):
    x = np.asarray(x, np.float64)
    if centre:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    y = y if scale is None else y * np.asarray(scale, np.float64)
    return y if bias is None else y + np.asarray(bias, np.float64)


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.3])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
def test_norms_match_formulas(rng, size, eps):
    """Include an eps larger than the variance, and one far below the square of float32's eps."""
    x = (size * rng.standard_normal((3, 5, 7))).astype(np.float32)
    scale, bias = rng.standard_normal((2, 7)).astype(np.float32)
    for s, b in ((scale, bias), (scale, None), (None, None)):
        want = float64_norm(x, s, b, eps, centre=True)
        assert_near(jax.jit(layer_norm)(x, s, b, eps), want, FORWARD_F32)
        if b is None:
            want = float64_norm(x, s, None, eps, centre=False)
            assert_near(jax.jit(rms_norm)(x, s, eps), want, FORWARD_F32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_unit_offset", True), ("embedding_norm", True), ("norm_eps", 1e-3),
        ("first_norm", False),
        ("norm_order", "post"), ("norm_order", "sandwich"), ("norm_order", "output"),
    ],
)  # fmt: skip
def test_norm_options_without_norm_raise_error(field, value):
    with pytest.raises(ConfigError, match=f"{field} is {value!r}: needs a norm, but norm is None"):
        dataclasses.replace(SMALL, norm=None, **{field: value})
    parallel = dataclasses.replace(SMALL, norm=None, norm_order="parallel", qk_norm=True)
    # norm_eps then applies to qk_norm
    assert dataclasses.replace(parallel, norm_eps=1e-3).is_parallel


@pytest.mark.slow
def test_block_without_norm_is_sum_of_branches():
    """The block adds attention(x), then the feed-forward of the sum, and has no norm parameters."""
    config = dataclasses.replace(SMALL, norm=None, num_layers=1, positions=None)
    params = init_params(config, jax.random.key(0))
    assert not [n for n in flatten_dict(params, sep="/") if "norm" in n]
    wanted = [f"block_0/{part}/output" for part in ("attention", "feed_forward")]
    tokens = jnp.array([[3, 1, 4, 1, 5]])
    names = ("embedding", *wanted, "block_0/residual")
    _, _, found = jax.jit(partial(build(config).apply, capture=names))({"params": params}, tokens)
    total = sum(np.asarray(found[name], np.float64) for name in ("embedding", *wanted))
    assert_near(found["block_0/residual"], total, FORWARD_F32)


def test_layer_norm_survives_a_large_mean(rng):
    """E[x^2] - E[x]^2 in float32 would lose all digits of the variance."""
    x = (1000 + rng.standard_normal((5, 13))).astype(np.float32)
    want = float64_norm(x, None, None, 1e-5, centre=True)
    assert_near(layer_norm(jnp.asarray(x), None, None, 1e-5), want, 1e-4)


@pytest.mark.slow_except("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_norms_round_once(rng, dtype):
    """The result equals that of a float32 computation, rounded at the end."""
    x = (rng.standard_normal((5, 127)) * 30).astype(dtype)
    scale = rng.standard_normal(127).astype(np.float32)
    for norm in (lambda x: layer_norm(x, scale, scale), lambda x: rms_norm(x, scale)):
        norm = jax.jit(norm)
        got = norm(x)
        assert got.dtype == dtype
        assert_same_bits(got, np.asarray(norm(x.astype(np.float32))).astype(dtype))


@pytest.mark.slow
def test_constant_vector_has_finite_norm_and_gradient():
    x = jnp.full((2, 7), 3.0)
    assert np.abs(layer_norm(x, None, None)).max() < 1e-3
    for norm in (lambda x: layer_norm(x, None, None), lambda x: rms_norm(0 * x, None)):
        assert np.isfinite(np.asarray(jax.grad(lambda x, norm=norm: norm(x).sum())(x))).all()


@pytest.mark.slow_except("silu")
@pytest.mark.parametrize("name", sorted({*get_args(Activation)} - {"xielu"}))
def test_activations_match_closed_forms(name):
    """The exact gelu uses the error function, which differs from its tanh approximation."""
    x = np.linspace(-6, 6, 499).astype(np.float32)
    exact = {
        "relu": lambda v: max(v, 0.0),
        "relu_squared": lambda v: v * v if v > 0 else 0.0,
        "gelu": lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2,
        "gelu_tanh": lambda v: (
            v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2
        ),
        "quick_gelu": lambda v: v / (1 + math.exp(-1.702 * v)),
        "silu": lambda v: v / (1 + math.exp(-v)),
    }
    want = np.array([exact[name](float(v)) for v in x])
    assert_near(jax.jit(activate, static_argnums=1)(x, name), want, 3e-7)
    others = [np.abs(want - [f(float(v)) for v in x]).max() for n, f in exact.items() if n != name]
    assert min(others) > 1e-4
    slopes = jax.jit(jax.vmap(jax.grad(lambda v: activate(v, name))))
    slope = slopes(np.float32([-1e4, -90.0, 90.0, 1e4]))
    steep = [180, 2e4] if name == "relu_squared" else [1, 1]
    np.testing.assert_array_equal(slope, [0, 0, *steep])


def test_xielu_has_finite_gradients_and_learned_numbers():
    steep = np.float32([-1e4, -90.0, 0.0, 90.0])
    alphas = jnp.float32([0.3]), jnp.float32([-0.2])
    slopes = jax.vmap(jax.grad(lambda v: xielu(v, *alphas)))(steep)
    a, b = (np.log1p(np.exp(float(alpha[0]))) for alpha in alphas)
    np.testing.assert_allclose(slopes, [-b, -b, 0.5, 180 * a + 0.5], rtol=1e-6)
    by_alpha = jax.jacobian(lambda p, n: xielu(np.float32([-2.0, 3.0]), p, n), (0, 1))(*alphas)
    want = [9 / (1 + np.exp(-0.3)), (np.exp(-2) + 1) / (1 + np.exp(0.2))]
    np.testing.assert_allclose(by_alpha[0][:, 0], [0, want[0]], rtol=1e-6)
    np.testing.assert_allclose(by_alpha[1][:, 0], [want[1], 0], rtol=1e-6)
    with pytest.raises(ConfigError, match="activation is 'xielu': has learned numbers"):
        activate(steep, "xielu")


def test_dropout_scales_kept_elements(key):
    """The gradient is nonzero exactly for kept elements."""
    x = np.random.default_rng(3).uniform(1, 2, (211, 101)).astype(np.float32)
    rate = 0.3
    drop = jax.jit(lambda x: jax.vjp(lambda x: dropout(x, rate, key), x))
    y, pull = drop(x)
    slope, y = np.asarray(pull(np.ones_like(x))[0]), np.asarray(y)
    kept = y != 0
    np.testing.assert_allclose(y[kept], x[kept] / 0.7, rtol=1e-6)
    np.testing.assert_allclose(slope, np.where(kept, 1 / 0.7, 0), rtol=1e-6)
    deviation = math.sqrt(rate * (1 - rate) / x.size)
    assert abs(kept.mean() - (1 - rate)) < 4 * deviation
    for axis in (0, 1):  # no whole row or column is dropped
        assert np.ptp(kept.mean(axis)) < 0.5
    assert abs(y.mean() / x.mean() - 1) < 0.02


@pytest.mark.parametrize("rate", [1e-6, 3e-7, 1 - 1e-6, 1 - 1e-8, 1 - 1e-10])
def test_dropout_preserves_mean_at_extreme_rates(rate, monkeypatch):
    """Replace random bits by a grid around the threshold, so that shares are exact."""
    edge = round((1 - rate) * 2**32)  # bits below this are kept
    bits = np.clip(edge + np.arange(-1100, 1101), 0, 2**32 - 1).astype(np.uint32)
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.asarray(bits))
    y = np.asarray(dropout(jnp.ones(len(bits)), rate, jax.random.key(0)), np.float64)
    count = max(1, edge)
    np.testing.assert_array_equal(y != 0, bits < count)
    assert y.max() * count / 2**32 == pytest.approx(1, abs=1e-6)


def test_dropout_is_determined_by_key_and_preserves_dtype(key):
    """Without a key or a rate, dropout is the identity."""
    x = np.ones((7, 11), jnp.bfloat16)
    assert dropout(x, 0.5, None) is x and dropout(x, 0.0, key) is x
    drop = jax.jit(dropout, static_argnums=1)
    one, again, other = (drop(x, 0.5, jax.random.key(n)) for n in (0, 0, 1))
    assert one.dtype == jnp.bfloat16
    assert_same_bits(one, again)
    assert (np.asarray(one) != np.asarray(other)).any()
    assert set(np.unique(np.asarray(one, np.float32))) == {0.0, 2.0}


def test_split_keys_differ_or_are_all_absent(key):
    assert split_key(None, 3) == [None] * 3
    parts = [tuple(np.asarray(jax.random.key_data(k)).tolist()) for k in split_key(key, 5)]
    assert len(set(parts)) == 5


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int16, np.int8, np.uint8, np.uint32])
def test_embedding_lookup_supports_any_integer_width(rng, dtype):
    """The length of the table may exceed the range of the ids' dtype, as for uint8 bytes."""
    sizes = (31, 127, 200, 256, 300)
    tables = [rng.standard_normal((vocab, 3)).astype(np.float32) for vocab in sizes]
    last = [min(vocab - 1, np.iinfo(dtype).max) for vocab in sizes]
    ids = [np.array([[0, 7, largest]], dtype) for largest in last]
    rows = jax.jit(lambda *pairs: [lookup(*pair) for pair in pairs])(*zip(tables, ids, strict=True))
    for row, table, own in zip(rows, tables, ids, strict=True):
        assert_same_bits(row, table[own.astype(np.int64)])


@pytest.mark.slow_except("-1")
@pytest.mark.parametrize("wrong", [-1, -7, 31, 2**31 - 1, -(2**31)])
def test_out_of_range_embedding_lookup_returns_nan(rng, wrong):
    table = rng.standard_normal((31, 3)).astype(np.float32)
    ids = np.array([[3, wrong, 30]], np.int32)
    taken = jax.jit(jax.grad(lambda table: (lookup(table, ids)[0, 1].sum(), lookup(table, ids)),
                             has_aux=True))  # fmt: skip
    slope, got = map(np.asarray, taken(table))
    assert np.isnan(got[0, 1]).all()
    assert_same_bits(got[0, [0, 2]], table[[3, 30]])
    # The NaN has no gradient in any row of the table.
    assert_same_bits(slope, np.zeros((31, 3), np.float32))


@pytest.mark.slow_except("256", "300")
@pytest.mark.parametrize("vocab", [200, 256, 300])
def test_negative_int8_embedding_lookup_returns_nan(rng, vocab):
    """300 does not fit an int8; wrapped to 44, it would index a valid row."""
    table = rng.standard_normal((vocab, 3)).astype(np.float32)
    got = np.asarray(jax.jit(lookup)(table, np.array([[-1, 5]], np.int8)))
    assert np.isnan(got[0, 0]).all() and np.isfinite(got[0, 1]).all()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([[3, 4], [5, 31]]), r"token 31 at \[1, 1\].*from 0 to 30"),
        (np.array([[3, -1], [5, 6]]), r"token -1 at \[0, 1\].*from 0 to 30"),
        (np.array([[3, 2**31]], np.int64), r"token 2147483648 at \[0, 1\]"),
        (np.array([[3.0, 4.0]], np.float32), r"float32\[1, 2\].*integers"),
        (np.array([[True, False]]), r"bool\[1, 2\].*integers"),
        (np.array([3, 4]), r"int64\[2\].*\[B, T\]"),
        (np.zeros((1, 2, 3), np.int32), r"int32\[1, 2, 3\].*\[B, T\]"),
    ],
    ids=str,
)
def test_invalid_token_error_names_position_and_value(tokens, message):
    with pytest.raises(ValueError, match=message):
        check_tokens(tokens, 31)
    model = build(SMALL)
    with pytest.raises(ValueError, match=message):
        model.apply({"params": {}}, tokens)


def test_float_tokens_raise_under_jit():
    model = build(SMALL)
    with pytest.raises(ValueError, match=r"float32\[2, 3\].*integers"):
        jax.eval_shape(lambda t: model.apply({"params": {}}, t), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="tokens are of type list: must be an array"):
        model.apply({"params": {}}, [[1, 2], [3, 4]])


def test_integer_passed_as_key_raises_error():
    with pytest.raises(ValueError, match="key is 0: must be a single key"):
        init_params(SMALL, 0)
    with pytest.raises(ValueError, match="key is 0: must be a single key"):
        build(SMALL).apply({"params": {}}, jnp.zeros((1, 2), jnp.int32), key=0)


@pytest.mark.slow
@pytest.mark.long_except("learned")
@pytest.mark.parametrize("positions", ["learned", "shaw"])
def test_traced_token_outside_vocabulary_makes_only_its_row_nan(key, positions):
    """Earlier tokens and other rows do not change by a single bit."""
    config = dataclasses.replace(SMALL, positions=positions)
    model, params = build(config), init_params(config, key)
    apply = jax.jit(lambda t: model.apply({"params": params}, t)[0])
    tokens = np.arange(15, dtype=np.int32).reshape(3, 5)
    clean = np.asarray(apply(tokens))
    assert np.isfinite(clean).all()
    for wrong in (31, -1, 2**31 - 1):
        changed = tokens.copy()
        changed[1, 2] = wrong
        got = np.asarray(apply(changed))
        assert np.isnan(got[1, 2:]).all()
        assert_same_bits(got[[0, 2]], clean[[0, 2]])
        assert_same_bits(got[1, :2], clean[1, :2])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_logits_and_gradients_match_float64_for_any_row_count(rng, key, rows):
    embed = Embed(dataclasses.replace(SMALL, positions="none", logit_softcap=None))
    params = embed.init(key, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))["params"]
    table = params["tokens"]
    x, g = (rng.standard_normal((rows, 1, n)) for n in (table.shape[1], table.shape[0]))

    def logits(table, x):
        return embed.apply({"params": {"tokens": table}}, x, method="logits")

    y, pull = jax.vjp(logits, table, jnp.asarray(x, jnp.float32))
    dtable, dx = pull(jnp.asarray(g, jnp.float32))
    table = np.asarray(table, np.float64)
    wants = (y, x @ table.T), (dx, g @ table), (dtable, np.einsum("XTV,XTD->VD", g, x))
    for got, want in wants:
        assert_near(got, want, FORWARD_F32)


def test_embedding_dropout_uses_key(rng):
    embed = Embed(dataclasses.replace(SMALL, dropout=0.3, positions="none"))
    tokens, places = np.arange(31, dtype=np.int32)[None], np.arange(31, dtype=np.int32)
    params = {"tokens": rng.standard_normal((31, 14)).astype(np.float32)}
    apply = jax.jit(embed.apply)
    whole = np.asarray(apply({"params": params}, tokens, places))
    assert_same_bits(whole[0], params["tokens"])
    drawn = np.asarray(apply({"params": params}, tokens, places, key=jax.random.key(3)))
    kept = drawn != 0
    assert 0.6 < kept.mean() < 0.8
    np.testing.assert_allclose(drawn[kept], whole[kept] / 0.7, rtol=1e-6)


@pytest.mark.slow_except("3")
@pytest.mark.parametrize("rows", [3, 37])
def test_wide_to_narrow_projection_and_gradients_match_float64(rng, rows):
    x, w, g = (rng.standard_normal(s).astype(np.float32) for s in ((rows, 23), (23, 5), (rows, 5)))
    y, pull = jax.vjp(project, x, w)
    x, w, g = (a.astype(np.float64) for a in (x, w, g))
    dx, dw = pull(jnp.asarray(g, jnp.float32))
    for got, want in ((y, x @ w), (dx, g @ w.T), (dw, x.T @ g)):
        assert_near(got, want, FORWARD_F32)


@pytest.mark.slow
def test_one_row_projection_and_gradients_match_float64(rng):
    """The kernel has several input axes, whose product is a multiple of 8."""
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((1, 1, 3, 8), (3, 8, 5, 7)))
    b, g = (rng.standard_normal(s).astype(np.float32) for s in ((5, 7), (1, 1, 5, 7)))
    y, pull = jax.vjp(lambda *arrays: project(*arrays, contract=2), x, w, b)
    dx, dw, db = pull(jnp.asarray(g))
    x, w, b, g = (a.astype(np.float64) for a in (x, w, b, g))
    wants = (
        (y, np.einsum("BTNH,NHKO->BTKO", x, w) + b),
        (dx, np.einsum("BTKO,NHKO->BTNH", g, w)),
        (dw, np.einsum("BTNH,BTKO->NHKO", x, g)),
        (db, g[0, 0]),
    )
    for got, want in wants:
        assert_near(got, want, FORWARD_F32)


@pytest.mark.slow
def test_branch_output_dropout_uses_key(rng, key):
    config = dataclasses.replace(SMALL, dropout=0.25)
    block = Block(config, number=0)
    x = jnp.asarray(rng.standard_normal((2, 31, 14)), jnp.float32)
    params = block.init(key, x, BlockInputs(token_positions=jnp.arange(31)))["params"]

    edit = {"block_0/residual_mid": jnp.zeros_like, "block_0/feed_forward/output": jnp.ones_like}
    places = Places.of(build(config).edited(edit))
    given = BlockInputs(token_positions=jnp.arange(31), places=places)

    def added(key):
        return np.asarray(block.apply({"params": params}, x, given, key=key)[0])

    assert (added(None) == 1).all()
    drawn = added(jax.random.key(3))
    assert set(np.unique(drawn)) == {0.0, np.float32(1 / 0.75)}
    assert 0.65 < (drawn > 0).mean() < 0.85


@pytest.mark.slow
@pytest.mark.parametrize("glu", [False, True])
def test_feed_forward_matches_formula(rng, key, glu):
    config = dataclasses.replace(SMALL, glu=glu, activation="silu")
    layer = FeedForward(config)
    x = rng.standard_normal((2, 3, 14)).astype(np.float32)
    params = oracle.randomised(layer.init(key, x)["params"], rng)
    assert set(params) == {"up", "down", *(["gate"] if glu else [])}
    p = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    up = x @ p["up"]["kernel"] + p["up"]["bias"]
    opened = up
    if glu:
        opened = x @ p["gate"]["kernel"] + p["gate"]["bias"]
    hidden = opened / (1 + np.exp(-opened)) * (up if glu else 1)
    want = hidden @ p["down"]["kernel"] + p["down"]["bias"]
    assert_near(layer.apply({"params": params}, x), want, 2 * FORWARD_F32)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["pre", "post", "sandwich"])
def test_block_applies_norms_in_configured_order(rng, key, order):
    """Compare with x + f(n(x)), n(x + f(x)), ... computed from the block's own branches."""
    config = dataclasses.replace(SMALL, norm_order=order)
    block = Block(config, cross=True)
    x = jnp.asarray(rng.standard_normal((2, 5, 14)), jnp.float32)
    memory = jnp.asarray(rng.standard_normal((2, 3, 14)), jnp.float32)
    places = jnp.tile(jnp.arange(3), (2, 1))
    given = BlockInputs(token_positions=jnp.arange(5), memory=memory, memory_positions=places)
    params = oracle.randomised(block.init(key, x, given)["params"], rng)
    names = ("attention", "cross_attention", "feed_forward")
    norms = {f"norm_{name}" for name in names}
    norms |= {f"out_norm_{name}" for name in names} if order == "sandwich" else set()
    assert set(params) == {*names, *norms}
    got, cache, captured = block.apply({"params": params}, x, given)
    assert cache is None and captured == {}

    cross_cache = block.apply({"params": params}, memory, places, method="init_cross_cache")
    functions = {
        "attention": lambda y: Attention(config).apply(
            {"params": params["attention"]}, y, BlockInputs(token_positions=jnp.arange(5))
        )[0],
        "cross_attention": lambda y: Attention(config, cross=True).apply(
            {"params": params["cross_attention"]}, y, BlockInputs(), cross_cache=cross_cache
        )[0],
        "feed_forward": lambda y: FeedForward(config).apply({"params": params["feed_forward"]}, y),
    }

    def norm(name, y):
        p = params[name]
        return layer_norm(y, p["scale"], p["bias"], config.norm_eps)

    want = x
    for name, f in functions.items():
        if order == "pre":
            want = want + f(norm(f"norm_{name}", want))
        elif order == "post":
            want = norm(f"norm_{name}", want + f(want))
        else:
            want = want + norm(f"out_norm_{name}", f(norm(f"norm_{name}", want)))
    assert_near(got, want, FORWARD_F32)


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("offset", [False, True])
def test_query_key_norm_uses_configured_epsilon(rng, key, offset):
    """Use an eps that is as large as the mean square of queries and keys."""
    config = dataclasses.replace(
        SMALL, qk_norm=True, norm_eps=0.3, positions="none", norm_unit_offset=offset
    )
    layer = Attention(config)
    x = rng.standard_normal((2, 3, 14)).astype(np.float32)
    shapes = jax.eval_shape(lambda: layer.init(key, x, BlockInputs())["params"])
    params = oracle.randomised(shapes, rng)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def projected(name):
        y = np.einsum("btd,dnh->btnh", x.astype(np.float64), p[name]["kernel"]) + p[name]["bias"]
        return y * (offset + p[f"{name}_scale"]) / np.sqrt((y * y).mean(-1, keepdims=True) + 0.3)

    q, k = projected("query"), projected("key")

    @jax.jit
    def keys_and_weights(params):
        visit = Visit(["attention/weights"])
        layer.apply({"params": params}, x, BlockInputs(), visit=visit)
        keys, _ = layer.apply({"params": params}, x, method="cross_keys_values")
        return keys, visit.captured["attention/weights"]

    keys, weights = keys_and_weights(params)
    assert_near(keys, k, FORWARD_F32)
    scores = np.exp(np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(5))
    assert_near(weights, scores / scores.sum(-1, keepdims=True), FORWARD_F32)


@pytest.mark.slow
def test_parameter_shapes_are_checked_without_tracing_initializers(monkeypatch):
    """A wrong shape raises flax's error, although the initialisers are never traced."""
    model, tokens = build(SMALL), jnp.zeros((1, 3), jnp.int32)
    params = init_params(SMALL, jax.random.key(0))
    query = params["decoder"]["block_1"]["attention"]["query"]
    for kernel, error in ((jnp.zeros((14, 2, 4)), ScopeParamShapeError), (None, None)):
        part = {"bias": query["bias"]} | ({} if kernel is None else {"kernel": kernel})
        attention = params["decoder"]["block_1"]["attention"] | {"query": part}
        block = params["decoder"]["block_1"] | {"attention": attention}
        wrong = params | {"decoder": params["decoder"] | {"block_1": block}}
        with pytest.raises(error or ScopeParamNotFoundError, match=r"kernel.*block_1/attention"):
            model.apply({"params": wrong}, tokens)

    def drawn(*arguments):
        raise AssertionError("an initialiser was traced")

    monkeypatch.setattr(jax.random, "normal", drawn)
    jax.eval_shape(lambda params: model.apply({"params": params}, tokens)[0], params)
