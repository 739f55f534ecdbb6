"""Linear attention and the causal convolution against recurrences in NumPy float64."""

from __future__ import annotations

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

pytest.register_assert_rewrite("tolerances")

from tests.support.tolerances import (  # noqa: E402
    FORWARD_BF16,
    FORWARD_F32,
    GRADIENT_F32,
    assert_near,
    assert_same_bits,
)
from transformer_jax.attention.linear import (  # noqa: E402
    causal_conv,
    delta_rule,
    gated_delta_rule,
    gated_linear_attention,
    linear_attention,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, N, H, HV = 2, 3, 5, 7
FORMS = {
    "linear": (partial(linear_attention, feature_map=None, normalize=False), ()),
    "gated": (gated_linear_attention, ("decay",)),
    "gated per key": (gated_linear_attention, ("decay per key",)),
    "delta": (delta_rule, ("beta",)),
    "gated delta": (gated_delta_rule, ("decay", "beta")),
    "gated delta per key": (gated_delta_rule, ("decay per key", "beta")),
}
HARDEST = "gated delta per key"


def draw(form, T, *, heads=(N, N, N), strongest=3.0, seed=0, dtype=np.float32):
    """Return the arrays of a call; keys have norm 1, as in models."""
    rng = np.random.default_rng(seed)
    states = max(heads[1:])
    query, key, value = (
        rng.standard_normal((B, T, n, width))
        for n, width in zip(heads, (H, H, HV), strict=True)
    )  # fmt: skip
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    rest = {
        "decay": -strongest * rng.uniform(0, 1, (B, T, states)),
        "decay per key": -strongest * rng.uniform(0, 1, (B, T, states, H)),
        "beta": rng.uniform(0, 2, (B, T, states)),
    }
    return [x.astype(dtype) for x in (query, key, value, *(rest[name] for name in FORMS[form][1]))]


def draw_state(seed=1):
    return np.random.default_rng(seed).standard_normal((B, N, H, HV)).astype(np.float32)


def recurrence(form, arrays, *, scale=None, segments=None, valid=None, state=None):
    """Return the outputs and the last states in float64, one row, head and token at a time."""
    query, key, value, *rest = (np.asarray(x).astype(np.float64) for x in arrays)
    given = dict(zip(FORMS[form][1], rest, strict=True))
    (rows, T, Nq, width), Nk, Nv = query.shape, key.shape[2], value.shape[2]
    states, outputs = max(Nk, Nv), max(Nq, Nk, Nv)
    scale = 1 / math.sqrt(width) if scale is None else scale
    out = np.zeros((rows, T, outputs, value.shape[3]))
    last = np.zeros((rows, states, width, value.shape[3]))
    if state is not None:
        last = np.array(state, np.float64)
    for b in range(rows):
        document = None
        for t in range(T):
            if valid is not None and not valid[b, t]:
                continue
            if segments is not None:
                if document is not None and segments[b, t] != document:
                    last[b] = 0
                document = segments[b, t]
            for n in range(states):
                k, v = key[b, t, n * Nk // states], value[b, t, n * Nv // states]
                S = last[b, n]
                for name in ("decay", "decay per key"):
                    if name in given:
                        S = np.exp(given[name][b, t, n])[..., None] * S
                beta = given["beta"][b, t, n] if "beta" in given else None
                new = v if beta is None else beta * (v - S.T @ k)
                last[b, n] = S + np.outer(k, new)
            for m in range(outputs):
                out[b, t, m] = (
                    scale * last[b, m * states // outputs].T @ query[b, t, m * Nq // outputs]
                )
    return out, last


def run(form, arrays, **options):
    return FORMS[form][0](*map(jnp.asarray, arrays), return_state=True, **options)


def assert_matches(form, arrays, tolerance=FORWARD_F32, chunk_size=16, **options):
    expected = recurrence(form, arrays, **options)
    options["initial_state"] = options.pop("state", None)
    found = run(form, arrays, chunk_size=chunk_size, **options)
    for what, x, y in zip(("output", "state"), found, expected, strict=True):
        assert_near(x, y, tolerance, what)


def documents(T):
    """Return documents that begin in the middle of chunks, two of them with a single token."""
    starts = np.zeros((B, T), np.int32)
    starts[0, [5, 6, 7, 8, 23, T - 1]] = 1
    starts[1, [16, 40]] = 1
    ids = np.cumsum(starts, axis=1, dtype=np.int32) % 3
    return np.where(padded(T), ids, 9)  # tokens that are not valid do not end a document


def padded(T):
    """Return padding at both ends and holes, some at the start of a document or chunk."""
    valid = np.random.default_rng(5).uniform(size=(B, T)) > 0.2
    valid[0, :3] = valid[1, -7:] = False
    valid[0, 5] = valid[1, 16] = valid[1, 32:48] = False
    return valid


@pytest.mark.slow_except("64-gated delta", "16-gated delta per key", "1-gated", "16-linear")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_size", [1, 16, 64, 128])
def test_chunks_match_recurrence(form, chunk_size):
    # without decay, 128 keys of only 5 channels make a system that is badly conditioned
    tolerance = 2 * FORWARD_F32 if (form, chunk_size) == ("delta", 128) else FORWARD_F32
    arrays = draw(form, 149)
    assert_matches(form, arrays, tolerance, chunk_size=chunk_size, state=draw_state())


@pytest.mark.slow_except("16-gated delta", "64-gated delta per key", "16-linear", "1-delta")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_documents_and_padding_match_recurrence(form, chunk_size):
    T = 67
    options = {"segments": documents(T), "valid": padded(T), "state": draw_state()}
    assert_matches(form, draw(form, T), chunk_size=chunk_size, **options)


@pytest.mark.slow_except("2", "17")
@pytest.mark.parametrize("T", [1, 2, 3, 16, 17, 31, 33])
def test_any_length_matches_recurrence(T):
    assert_matches(HARDEST, draw(HARDEST, T), state=draw_state())


@pytest.mark.parametrize("chunk_size", [1, 64])
def test_empty_sequence_returns_initial_state(chunk_size):
    out, state = run(HARDEST, draw(HARDEST, 0), initial_state=draw_state(), chunk_size=chunk_size)
    assert out.shape == (B, 0, N, HV)
    assert_same_bits(state, draw_state())


@pytest.mark.parametrize("form", ["gated delta", "gated delta per key"])
@pytest.mark.parametrize("gate", ["near 0", "near 1", "mixed"])
def test_gates_near_zero_and_one_match_recurrence(form, gate):
    """A difference of cumulative sums would lose five digits in the mixed case."""
    arrays = draw(form, 131)
    rng, decay = np.random.default_rng(7), arrays[3]
    weak = rng.uniform(size=decay.shape) > (0.1 if gate == "mixed" else gate == "near 0")
    arrays[3] = np.where(weak, -1e-3 * (gate == "mixed"), -50.0).astype(np.float32) * np.ones_like(
        decay
    )
    assert (arrays[3].min() < -49) == (gate != "near 1")
    assert (arrays[3].max() > -0.1) == (gate != "near 0")
    arrays[-1] /= 2  # beta from 0 to 1, because the state does not decay
    assert_matches(form, arrays, chunk_size=64)


@pytest.mark.parametrize("form", ["gated delta", "gated delta per key"])
def test_decay_far_below_float32_has_finite_gradient(form):
    arrays = draw(form, 37)
    arrays[3][:, ::3] = -1e5
    arrays[3][:, 1] = -np.inf
    assert_matches(form, arrays)
    cotangent = np.random.default_rng(3).standard_normal((B, 37, N, HV)).astype(np.float32)

    def loss(*arrays):
        return (FORMS[form][0](*arrays, chunk_size=16) * cotangent).sum()

    gradients = jax.jit(jax.grad(loss, argnums=range(5)))(*arrays)
    exact = jax.jit(jax.grad(lambda *x: (FORMS[form][0](*x, chunk_size=1) * cotangent).sum(),
                             argnums=range(5)))(*arrays)  # fmt: skip
    for x, y in zip(gradients, exact, strict=True):
        assert_near(x, y, GRADIENT_F32)


@pytest.mark.slow_except("16-bfloat16", "1-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("chunk_size", [1, 16])
def test_low_precision_inputs_have_float32_states_and_sums(dtype, chunk_size):
    arrays = [jnp.asarray(x, dtype) for x in draw(HARDEST, 67)]
    expected = recurrence(HARDEST, arrays)
    out, state = run(HARDEST, arrays, chunk_size=chunk_size)
    assert out.dtype == dtype and state.dtype == jnp.float32
    assert_near(out, expected[0], FORWARD_BF16)
    assert_near(state, expected[1], FORWARD_F32)


GROUPS = {
    "several values per key": (2, 2, 6), "several queries per state": (6, 2, 2),
    "one key": (1, 1, 4), "several keys per value": (6, 6, 2), "query and value": (2, 4, 2),
    "query of keys": (4, 2, 4),
}  # fmt: skip


@pytest.mark.slow_except(
    "1-several queries per state",
    "16-several values per key",
    "16-several queries per state",
    "16-several keys per value",
)
@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("chunk_size", [1, 16])
def test_grouped_heads_match_recurrence(heads, chunk_size):
    arrays = draw("gated delta", 37, heads=GROUPS[heads])
    assert_matches("gated delta", arrays, chunk_size=chunk_size)
    if chunk_size > 1:
        assert_matches(HARDEST, draw(HARDEST, 37, heads=GROUPS[heads]), chunk_size=chunk_size)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padding_of_nan_equals_its_absence(side):
    T, present = 41, 29
    arrays = draw(HARDEST, present)
    at = {"left": np.arange(T - present, T), "right": np.arange(present),
          "holes": np.sort(np.random.default_rng(2).permutation(T)[:present])}[side]  # fmt: skip
    valid = np.zeros((B, T), bool)
    valid[:, at] = True
    wide = [np.full((B, T, *x.shape[2:]), np.nan, np.float32) for x in arrays]
    for x, y in zip(wide, arrays, strict=True):
        x[:, at] = y
    # known decays are checked, and NaN is not above 0
    out, state = run(HARDEST, wide, valid=valid, chunk_size=16)
    expected, last = run(HARDEST, arrays, chunk_size=16)
    assert_near(out[:, at], expected, FORWARD_F32)
    assert_near(state, last, FORWARD_F32)
    assert not np.asarray(out)[~valid].any()

    def loss(valid, arrays):
        out, state = run(HARDEST, arrays, valid=valid, chunk_size=16)
        return (out**2).sum() + (state**2).sum()

    gradient = jax.grad(loss, argnums=1)
    found = gradient(valid, tuple(map(jnp.asarray, wide)))
    for x, y in zip(found, gradient(None, tuple(map(jnp.asarray, arrays))), strict=True):
        assert_near(x[:, at], y, GRADIENT_F32)
        assert not np.asarray(x)[~valid].any()


@pytest.mark.parametrize("chunk_size", [1, 16])
def test_calls_in_sequence_match_one_call(chunk_size):
    arrays, valid = draw(HARDEST, 53), padded(53)
    whole, last = run(HARDEST, arrays, valid=valid, chunk_size=chunk_size)
    state, parts = None, []
    for start, end in ((0, 21), (21, 22), (22, 53)):
        part = [x[:, start:end] for x in arrays]
        out, state = run(
            HARDEST, part, valid=valid[:, start:end], initial_state=state, chunk_size=chunk_size
        )
        parts.append(out)
    assert_near(np.concatenate(parts, axis=1), whole, FORWARD_F32)
    assert_near(state, last, FORWARD_F32)


@pytest.mark.slow_except("gated delta per key-16", "linear-16")
@pytest.mark.parametrize("chunk_size", [1, 16])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_match_finite_differences(form, chunk_size):
    T = 19
    with jax.enable_x64(True):
        arrays = draw(form, T, strongest=1.0, dtype=np.float64)
        state, rng = np.float64(draw_state()), np.random.default_rng(4)
        # without the first token, because a restart hides its decay
        options = {"valid": padded(67)[:, :T], "segments": documents(67)[:, :T]}
        cotangents = rng.standard_normal((B, T, N, HV)), rng.standard_normal((B, N, H, HV))

        def pull(*arrays):
            f = lambda *x: run(form, x[:-1], initial_state=x[-1], chunk_size=chunk_size, **options)  # noqa: E731
            return jax.vjp(f, *arrays)[1](tuple(map(jnp.asarray, cotangents)))

        gradients = jax.jit(pull)(*arrays, state)

    def loss(moved):
        results = recurrence(form, moved[:-1], state=moved[-1], **options)
        return sum((x * y).sum() for x, y in zip(results, cotangents, strict=True))

    step = 1e-6
    for i, gradient in enumerate(gradients):
        for _ in range(3):
            direction = rng.standard_normal(gradient.shape)
            both = []
            for sign in (1, -1):
                moved = [*arrays, state]
                moved[i] = moved[i] + sign * step * direction
                both.append(loss(moved))
            expected = (both[0] - both[1]) / (2 * step)
            found = (np.asarray(gradient) * direction).sum()
            size = np.abs(np.asarray(gradient) * direction).sum()
            assert size > 0.1
            assert abs(found - expected) <= 1e-8 * size, f"argument {i}"


@pytest.mark.parametrize("one", ["key", "value"])
def test_results_are_split_like_the_array_with_more_heads(one):
    """A single key or value head is not split over the mesh."""
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Explicit,))

    def array(name, width):
        heads, axis = (1, None) if name == one else (N, "model")
        place = NamedSharding(mesh, PartitionSpec(None, None, axis))
        return jax.ShapeDtypeStruct((B, 4, heads, width), jnp.float32, sharding=place)

    arrays = array("query", H), array("key", H), array("value", HV)
    out, state = jax.eval_shape(partial(linear_attention, return_state=True), *arrays)
    assert out.sharding.spec == PartitionSpec(None, None, "model", None)
    assert state.sharding.spec == PartitionSpec(None, "model", None, None)


def test_vmap_matches_loop():
    calls = [draw(HARDEST, 23, seed=seed) for seed in range(2)]
    stacked = [jnp.stack(arrays) for arrays in zip(*calls, strict=True)]
    out, state = jax.vmap(lambda *x: run(HARDEST, x, chunk_size=16))(*stacked)
    for i, arrays in enumerate(calls):
        expected = recurrence(HARDEST, arrays)
        assert_near(out[i], expected[0], FORWARD_F32)
        assert_near(state[i], expected[1], FORWARD_F32)


@pytest.mark.slow_except("16-gated delta")
@pytest.mark.parametrize("form", ["gated delta", HARDEST])
@pytest.mark.parametrize("chunk_size", [1, 16])
def test_second_derivative_matches_differences_of_gradients(form, chunk_size):
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in draw(form, 19, strongest=1.0, dtype=np.float64)]
        rng = np.random.default_rng(6)
        direction = [jnp.asarray(rng.standard_normal(x.shape)) for x in arrays]

        @jax.jit
        def gradient(*arrays):
            loss = lambda *x: (FORMS[form][0](*x, chunk_size=chunk_size) ** 2).sum()  # noqa: E731
            return jax.grad(loss, argnums=range(5))(*arrays)

        _, found = jax.jvp(gradient, arrays, direction)
        moved = [
            gradient(*(x + sign * 1e-6 * d for x, d in zip(arrays, direction, strict=True)))
            for sign in (1, -1)
        ]
    for x, up, down in zip(found, *moved, strict=True):
        assert_near(x, (np.asarray(up) - np.asarray(down)) / 2e-6, 1e-7)


@pytest.mark.slow_except("16-True")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 16])
def test_linear_attention_matches_its_quadratic_form(normalize, chunk_size):
    """Documents, padding and grouped queries, with the weights of all pairs."""
    T, heads = 67, (6, 2, 2)
    arrays = draw("linear", T, heads=heads)
    arrays[1] -= 20  # where elu + 1 would be rounded to 0
    segments, valid = documents(T), padded(T)
    out = linear_attention(
        *arrays, normalize=normalize, segments=segments, valid=valid, chunk_size=chunk_size
    )
    query, key, value = (np.repeat(np.float64(x), 6 // x.shape[2], axis=2) for x in arrays)
    f = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))  # noqa: E731
    sees = np.tri(T, dtype=bool) & valid[:, None] & valid[:, :, None]
    begins = np.cumsum(np.diff(segments, prepend=segments[:, :1]) != 0, axis=1)
    # tokens that are not valid belong to no document
    for b in range(B):
        ids = segments[b, valid[b]]
        begins[b, valid[b]] = np.cumsum(np.diff(ids, prepend=ids[:1]) != 0)
    sees &= begins[:, None] == begins[:, :, None]
    weights = np.einsum("bind,bjnd->bnij", f(query), f(key)) * sees[:, None]
    total = weights.sum(-1, keepdims=True) if normalize else math.sqrt(H)
    expected = np.einsum("bnij,bjnv->binv", weights / np.where(total == 0, 1, total), value)
    assert_near(out, expected, FORWARD_F32)
    assert not np.asarray(out)[~valid].any()


def test_feature_map_may_change_width_and_ignores_padding():
    arrays, valid = draw("linear", 37), padded(67)[:, 30:]
    double = lambda x: jnp.concatenate([jax.nn.relu(x), jnp.log(jnp.abs(x) + 1)], -1)  # noqa: E731
    broken = [np.where(valid[:, :, None, None], x, np.nan) for x in arrays]

    def loss(arrays, valid):
        out, state = linear_attention(
            *arrays, feature_map=double, normalize=False, scale=1.0, valid=valid, chunk_size=16,
            return_state=True,
        )  # fmt: skip
        return (out**2).sum(), (out, state)

    (_, (out, state)), gradients = jax.value_and_grad(loss, has_aux=True)(broken, valid)
    query, key = (np.asarray(double(x)) for x in arrays[:2])
    expected = recurrence("linear", [query, key, arrays[2]], scale=1.0, valid=valid)
    assert_near(out, expected[0], FORWARD_F32)
    assert_near(state, expected[1], FORWARD_F32)
    assert all(np.isfinite(x).all() for x in gradients)


def test_state_of_normalized_attention_continues_a_sequence():
    arrays = draw("linear", 37)
    whole = linear_attention(*arrays, chunk_size=16)
    first, state = linear_attention(*(x[:, :21] for x in arrays), return_state=True)
    assert state.shape == (B, N, H, HV + 1)
    rest = linear_attention(*(x[:, 21:] for x in arrays), initial_state=state, chunk_size=1)
    assert_near(np.concatenate([first, rest], axis=1), whole, FORWARD_F32)


@pytest.mark.parametrize("chunk_size", [1, 16])
def test_gated_linear_attention_computes_ssd_of_mamba_2(chunk_size):
    """h = exp(dt A) h + dt x b^T and y = h c, with 2 groups of b and c for 4 heads."""
    T, heads, groups, P = 41, 4, 2, 3
    rng = np.random.default_rng(8)
    x, dt = rng.standard_normal((B, T, heads, P)), rng.uniform(0.001, 1, (B, T, heads))
    b, c = rng.standard_normal((2, B, T, groups, H))
    A = -rng.uniform(1, 16, heads)
    expected = np.zeros((B, T, heads, P))
    for row in range(B):
        for head in range(heads):
            h, group = np.zeros((P, H)), head // 2
            for t in range(T):
                h = np.exp(dt[row, t, head] * A[head]) * h
                h = h + dt[row, t, head] * np.outer(x[row, t, head], b[row, t, group])
                expected[row, t, head] = h @ c[row, t, group]
    x, dt, A, b, c = (jnp.asarray(one, jnp.float32) for one in (x, dt, A, b, c))
    out = gated_linear_attention(
        c, b, dt[..., None] * x, dt * A[None, None], scale=1.0, chunk_size=chunk_size
    )  # fmt: skip
    assert_near(out, expected, FORWARD_F32)


def test_delta_rule_returns_the_last_value_of_a_key():
    """With keys of norm 1 and beta of 1, a write replaces the value."""
    key = np.tile(np.eye(2, dtype=np.float32), (3, 1)).reshape(1, 6, 1, 2)
    value = np.arange(12, dtype=np.float32).reshape(1, 6, 1, 2)
    out, state = delta_rule(
        key, key, value, np.ones((1, 6, 1), np.float32), scale=1.0, return_state=True
    )
    assert_same_bits(out, value)
    assert_same_bits(state, value[:, -2:].swapaxes(1, 2))


def test_call_inside_jit_with_strict_promotion_and_debugging_matches():
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in draw(HARDEST, 23)]
    options = {"segments": documents(67)[:, :23], "valid": padded(67)[:, :23], "chunk_size": 16}
    expected = run(HARDEST, arrays, **options)
    with jax.numpy_dtype_promotion("strict"), jax.debug_nans(True), jax.debug_infs(True):
        found = jax.jit(lambda *x: run(HARDEST, x, **options))(*arrays)
    for x, y in zip(found, expected, strict=True):
        assert_near(x, y, FORWARD_F32)


# The convolution


def convolution(x, weight, bias=None, *, segments=None, valid=None, state=None):
    """Return the outputs and the last tokens in float64, one row and token at a time."""
    x, weight = np.asarray(x).astype(np.float64), np.asarray(weight).astype(np.float64)
    (rows, T, D), W = x.shape, len(weight)
    out, last = np.zeros((rows, T, D)), np.zeros((rows, W - 1, D))
    for b in range(rows):
        seen = [np.zeros(D)] * (W - 1) if state is None else list(np.float64(state[b]))
        document = None
        for t in range(T):
            if valid is not None and not valid[b, t]:
                continue
            if segments is not None:
                if document is not None and segments[b, t] != document:
                    seen = [np.zeros(D)] * (W - 1)
                document = segments[b, t]
            seen = [*seen, x[b, t]]
            out[b, t] = sum(weight[w] * seen[len(seen) - W + w] for w in range(W))
            out[b, t] += 0 if bias is None else bias
        last[b] = np.reshape(seen[len(seen) - (W - 1) :], (W - 1, D))
    return out, last


def draw_conv(T, W, D=3, dtype=np.float32):
    rng = np.random.default_rng(9)
    shapes = (B, T, D), (W, D), (D,), (B, W - 1, D)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 2, 67])
@pytest.mark.parametrize("given", ["nothing", "documents", "padding", "both"])
def test_convolution_matches_definition(W, T, given):
    x, weight, bias, state = draw_conv(T, W)
    options = {
        "segments": documents(67)[:, :T] if given in ("documents", "both") else None,
        "valid": padded(67)[:, :T] if given in ("padding", "both") else None,
    }
    out, last = causal_conv(x, weight, bias, initial_state=state, return_state=True, **options)
    expected = convolution(x, weight, bias, state=state, **options)
    assert_near(out, expected[0], FORWARD_F32)
    if W > 1:
        assert_same_bits(last, expected[1].astype(np.float32))
    assert last.shape == (B, W - 1, 3)


def test_convolution_in_several_calls_matches_one_call():
    x, weight, _, _ = draw_conv(23, 4)
    valid = padded(67)[:, :23]
    whole, last = causal_conv(x, weight, valid=valid, return_state=True)
    state, parts = None, []
    for start, end in ((0, 2), (2, 3), (3, 3), (3, 23)):
        out, state = causal_conv(
            x[:, start:end], weight, valid=valid[:, start:end], initial_state=state,
            return_state=True,
        )  # fmt: skip
        parts.append(out)
    assert_near(np.concatenate(parts, axis=1), whole, FORWARD_F32)
    assert_same_bits(state, last)


def test_convolution_skips_nan_in_padding_and_sums_in_float32():
    x, weight, bias, _ = (jnp.asarray(x, jnp.bfloat16) for x in draw_conv(67, 4))
    valid, segments = padded(67), documents(67)
    broken = jnp.where(valid[..., None], x, jnp.nan)

    def loss(x, weight):
        out, state = causal_conv(
            x, weight, bias, valid=valid, segments=segments, return_state=True
        )  # fmt: skip
        return out.astype(jnp.float32).sum(), (out, state)

    (_, (out, state)), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        broken, weight
    )
    assert out.dtype == state.dtype == jnp.bfloat16
    expected = convolution(x, weight, np.asarray(bias, np.float64), valid=valid, segments=segments)
    assert_near(out, expected[0], 2**-8)  # one rounding
    assert_same_bits(state.astype(jnp.float32), expected[1].astype(np.float32))
    assert all(np.isfinite(g.astype(jnp.float32)).all() for g in gradients)
    assert not np.asarray(gradients[0].astype(jnp.float32))[~valid].any()


def test_convolution_sums_in_float32():
    x = jnp.asarray([256.0, 1.0, -256.0], jnp.bfloat16)[None, :, None]
    out = causal_conv(x, jnp.ones((3, 1), jnp.bfloat16))
    assert out[0, 2, 0] == 1  # in bfloat16, 257 is rounded to 256


def test_gradient_of_several_queries_per_state_in_optimized_program():
    """A product of two rows per token at once would crash XLA's programs for CPUs."""
    arrays = draw(HARDEST, 64, heads=(4, 2, 2))

    @partial(jax.jit, static_argnums=0)
    def gradient(chunk_size, *arrays):
        loss = lambda *x: (gated_delta_rule(*x, chunk_size=chunk_size) ** 2).sum()  # noqa: E731
        return jax.grad(loss, argnums=range(5))(*arrays)

    for x, y in zip(gradient(16, *arrays), gradient(1, *arrays), strict=True):
        assert_near(x, y, GRADIENT_F32)


def test_gradient_program_grows_by_a_constant_for_each_doubling_of_chunks():
    arrays = [jnp.asarray(x, jnp.float32) for x in draw("delta", 64)]

    def size(chunk_size):
        loss = lambda *x: delta_rule(*x, chunk_size=chunk_size).sum()  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss, argnums=range(4)))(*arrays)).count("\n")

    small, middle, large = map(size, (16, 32, 64))
    assert 0 < large - middle <= 1.1 * (middle - small)


def test_convolution_gradients_match_finite_differences():
    T, options = 19, {"valid": padded(67)[:, :19], "segments": documents(67)[:, :19]}
    with jax.enable_x64(True):
        arrays = draw_conv(T, 4, dtype=np.float64)
        rng = np.random.default_rng(4)
        cotangents = rng.standard_normal((B, T, 3)), rng.standard_normal((B, 3, 3))
        f = lambda x, w, b, s: causal_conv(  # noqa: E731
            x, w, b, initial_state=s, return_state=True, **options
        )
        gradients = jax.vjp(f, *map(jnp.asarray, arrays))[1](tuple(map(jnp.asarray, cotangents)))

    def loss(x, w, b, s):
        results = convolution(x, w, b, state=s, **options)
        return sum((x * y).sum() for x, y in zip(results, cotangents, strict=True))

    for i, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        both = [
            loss(*(x + sign * 1e-5 * direction * (i == j) if i == j else x
                   for j, x in enumerate(arrays)))
            for sign in (1, -1)
        ]  # fmt: skip
        size = np.abs(np.asarray(gradient) * direction).sum()
        assert size > 0.1
        expected = (both[0] - both[1]) / 2e-5
        assert abs((np.asarray(gradient) * direction).sum() - expected) <= 1e-8 * size


# Invalid arguments


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, jnp.dtype(dtype))


Q, V, D, DK = (2, 5, 2, 3), (2, 5, 4, 7), (2, 5, 4), (2, 5, 4, 3)
BAD = {
    "rank": ({"key": zeros(5, 2, 3)}, r"shapes are .*\(5, 2, 3\).*key must be \[batch, length"),
    "batch": ({"value": zeros(3, 5, 4, 7)}, "value must have the batch and length of query"),
    "length": ({"key": zeros(2, 4, 2, 3)}, "key must have the batch and length of query"),
    "width": ({"key": zeros(2, 5, 2, 4)}, "query and key must have equal widths above 0"),
    "heads": ({"value": zeros(2, 5, 3, 7)}, "the smaller number must divide the larger"),
    "query heads": ({"query": zeros(2, 5, 3, 3)}, "heads of query must divide N or be a multiple"),
    "no heads": ({"query": zeros(2, 5, 0, 3)}, "heads of query must divide N or be a multiple"),
    "dtypes": ({"key": zeros(*Q, dtype="bfloat16")}, "key bfloat16.*must be one dtype of"),
    "integers": ({"query": zeros(*Q, dtype="int32")}, "query is int32: must be one of bfloat16"),
    "float64": ({"query": zeros(*Q, dtype="float64")}, "query is float64: needs jax_enable_x64"),
    "decay shape": ({"decay": zeros(2, 5, 2)}, r"decay has shape \(2, 5, 2\): must be \(2, 5, 4\)"),
    "decay per key": ({"decay": zeros(2, 5, 4, 7)}, r"decay has shape .*: must be \(2, 5, 4, 3\)"),
    "growth": ({"decay": np.full(D, 0.5, np.float32)}, "decay contains 0.5: must be at most 0"),
    "no decay": ({"decay": None}, "decay is None: must be an array"),
    "no beta": ({"beta": None}, "beta is None: must be an array"),
    "no query": ({"query": None}, "query is None: must be an array"),
    "decay dtype": ({"decay": zeros(*D, dtype="int32")}, "decay is int32: must be one of"),
    "beta": ({"beta": zeros(2, 5, 2)}, r"beta has shape \(2, 5, 2\): must be \(2, 5, 4\)"),
    "segments": ({"segments": zeros(2, 4, dtype="int32")}, r"segments is int32\(2, 4\): must be"),
    "float segments": ({"segments": zeros(2, 5)}, r"segments is float32\(2, 5\): must be integers"),
    "valid": ({"valid": zeros(2, 5)}, r"valid is float32\(2, 5\): must be bool\(2, 5\)"),
    "state": ({"initial_state": zeros(2, 2, 3, 7)}, r"initial_state has shape .*\(2, 4, 3, 7\)"),
    "state dtype": ({"initial_state": zeros(2, 4, 3, 7, dtype="int32")}, "initial_state is int32"),
    "chunk": ({"chunk_size": 0}, "chunk_size is 0: must be an integer of at least 1"),
    "part of a chunk": ({"chunk_size": 8.0}, "chunk_size is 8.0: must be an integer"),
    "scale": ({"scale": math.inf}, "scale is inf: must be finite"),
    "array of scales": ({"scale": zeros(4)}, "scale is of type ndarray: must be a concrete number"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_argument_error_names_value_and_rule(case):
    changed, message = BAD[case]
    good = {"query": zeros(*Q), "key": zeros(*Q), "value": zeros(*V), "decay": zeros(*D),
            "beta": zeros(*D)}  # fmt: skip
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        gated_delta_rule(**good | changed)
    gated_delta_rule(**good)
    gated_delta_rule(**good | {"decay": zeros(*DK)})


BAD_FEATURES = {
    "scale": ({"scale": 1.0}, "scale is 1.0: must be None with normalize=True"),
    "name of a map": ({"feature_map": "elu"}, "feature_map is 'elu': must be a function"),
    "shape": ({"feature_map": lambda x: x[0]}, r"returned float32\(5, 2, 3\): must be float32\[2"),
    "dtype": ({"feature_map": lambda x: x > 0}, r"returned bool.*: must be float32\[2, 5, 2, wid"),
    "nothing": ({"feature_map": lambda x: None}, r"returned NoneType: must be float32\[2, 5, 2"),
    "state": ({"initial_state": zeros(2, 4, 3, 7)}, r"initial_state.*must be \(2, 4, 3, 8\)"),
    "name": ({"segment_ids": zeros(2, 5)}, "no argument 'segment_ids'; use segments"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FEATURES)
def test_invalid_argument_of_linear_attention_is_rejected(case):
    changed, message = BAD_FEATURES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        linear_attention(zeros(*Q), zeros(*Q), zeros(*V), **changed)


BAD_CONV = {
    "rank": ({"x": zeros(2, 5)}, r"x has shape \(2, 5\): must be \[batch, length, channels\]"),
    "dtype": ({"x": zeros(2, 5, 3, dtype="int32")}, "x is int32: must be one of"),
    "weight": ({"weight": zeros(4, 2)}, r"weight has shape \(4, 2\): must be \[W, 3\] with W >= 1"),
    "no weight": ({"weight": zeros(0, 3)}, r"weight has shape \(0, 3\): must be \[W, 3\]"),
    "weight dtype": ({"weight": zeros(4, 3, dtype="int32")}, "weight is int32: must be one of"),
    "bias": ({"bias": zeros(4)}, r"bias has shape \(4,\): must be \(3,\)"),
    "segments": ({"segments": zeros(2, 5)}, "segments is float32"),
    "valid": ({"valid": zeros(2, 4, dtype="bool")}, r"valid is bool\(2, 4\): must be bool\(2, 5\)"),
    "state": ({"initial_state": zeros(2, 4, 3)}, r"initial_state has shape .*must be \(2, 3, 3\)"),
    "state dtype": (
        {"initial_state": zeros(2, 3, 3, dtype="bfloat16")},
        "initial_state is bfloat16: must be float32, like x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONV)
def test_invalid_argument_of_convolution_is_rejected(case):
    changed, message = BAD_CONV[case]
    with pytest.raises(ValueError, match=message):
        causal_conv(**{"x": zeros(2, 5, 3), "weight": zeros(4, 3)} | changed)


@pytest.mark.parametrize("sizes", [(0, 5, 2, 4), (2, 5, 2, 0)])
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_empty_arrays_give_empty_results(sizes, chunk_size):
    B, T, N, Hv = sizes
    query, value = zeros(B, T, N, 3), zeros(B, T, N, Hv)
    more = dict(chunk_size=chunk_size, return_state=True)
    out, state = gated_delta_rule(query, query, value, zeros(B, T, N), zeros(B, T, N), **more)
    assert out.shape == sizes and state.shape == (B, N, 3, Hv)


def test_decay_of_padding_is_not_checked():
    query, decay, valid = zeros(1, 3, 1, 2), zeros(1, 3, 1), np.array([[True, True, False]])
    decay[:, 2] = 1
    assert not gated_linear_attention(query, query, query, decay, valid=valid).any()
    with pytest.raises(ValueError, match="decay contains 1"):
        gated_linear_attention(query, query, query, decay, valid=~valid)
