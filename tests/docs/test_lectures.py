"""Worked examples of the lectures, reproduced by every implementation of the library."""

from __future__ import annotations

from functools import cache as cached
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import cache
from transformer_jax.attention.additive import additive_attention, state_attention
from transformer_jax.attention.api import dot_product_attention, dot_product_attention_weights
from transformer_jax.attention.masks import Causal, Window
from transformer_jax.config import RecurrentConfig, Rope, preset
from transformer_jax.models.factory import build, init_params
from transformer_jax.models.positions import apply_rope, sinusoidal

pytestmark = pytest.mark.usefixtures("quick_compilation")

SINUSOIDS = [
    [0.0, 1.0, 0.0, 1.0],
    [0.84147, 0.54030, 0.00999983, 0.99995],
    [0.9092974, -0.4161468, 0.0199987, 0.9998000],
]
EMBEDDINGS = np.array([[1, 2, 1, 2], [3, 2, 1, 2], [4, 1, 2, 1]], np.float32)
W_Q = np.array([[1, 2, 3, 1], [4, 1, 2, 3], [1, 1, 2, 2], [1, 2, 1, 1]], np.float32)
W_K = W_V = np.array([[1, 2, 2, 1], [1, 2, 2, 3], [1, 3, 4, 2], [1, 2, 3, 1]], np.float32)


ENCODER_STATES, DECODER_STATE = np.array([[1, 0], [0, 1], [1, 1.0]]), np.array([[0.5, 0.2]])
ENCODER_WEIGHTS = np.exp([0.5, 0.2, 0.7]) / np.exp([0.5, 0.2, 0.7]).sum()
SLIDE_WEIGHTS = [0.3374, 0.2501, 0.4125]  # a slip, not a rounding: tests/docs/test_errata.py


@pytest.fixture(params=["xla", "blockwise"])
def implementation(request) -> str:
    return request.param


def one_head(matrix: np.ndarray) -> jax.Array:
    """Return [T, H] as [1, T, 1, H]."""
    return jax.device_put(np.asarray(matrix, np.float32)[None, :, None, :])


def attend(query, key, value, **settings) -> np.ndarray:
    """Return the attention of matrices [T, H], [S, H], [S, Hv]: one batch row, one head."""
    out = dot_product_attention(one_head(query), one_head(key), one_head(value), **settings)
    return np.asarray(out)[0, :, 0]


def weights_and_out(query, key, value, **settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights [T, S], read from one-hot values, and the output."""
    out = attend(query, key, np.hstack([np.eye(len(key)), value]), **settings)
    return out[:, : len(key)], out[:, len(key) :]


def near(actual, expected, digits: int = 4) -> None:
    """Check equality to `digits` decimals, which the slide may round or truncate."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.size > 0
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() < 10.0**-digits


@pytest.mark.slow_except("xla")
def test_attention_over_encoder_states_matches_slide(implementation):
    settings = dict(scale=1.0, implementation=implementation)
    weights, context = weights_and_out(DECODER_STATE, ENCODER_STATES, ENCODER_STATES, **settings)
    near(weights[0], ENCODER_WEIGHTS, 6)
    near(weights[0], SLIDE_WEIGHTS, 3)
    near(context[0], ENCODER_WEIGHTS @ ENCODER_STATES, 6)
    near(context[0], [0.7499, 0.6626], 3)


def test_state_attention_matches_slide():
    arrays = (x[None].astype(np.float32) for x in (DECODER_STATE, ENCODER_STATES))
    context, weights = map(np.asarray, jax.jit(state_attention)(*arrays))
    near(weights[0, 0], ENCODER_WEIGHTS, 6)
    near(context[0, 0], [0.7499, 0.6626], 3)


def test_neuron_with_three_inputs_matches_slide():
    x, w, b = np.array([0.5, 0.6, 0.1]), np.array([0.2, 0.3, 0.9]), 0.5
    # one step of gradient descent toward the target 1, with learning rate .1
    loss = lambda w, b, x: -jax.nn.log_sigmoid(w @ x + b)  # noqa: E731

    def step(w, b, x):
        return w @ x + b, jax.nn.sigmoid(w @ x + b), jax.grad(loss, (0, 1))(w, b, x)

    z, a, slopes = jax.device_get(jax.jit(step)(*map(np.float32, (w, b, x))))
    near(z, w @ x + b, 6)
    near(a, 1 / (1 + np.exp(-(w @ x + b))), 6)
    assert (f"{z:.2f}", f"{a:.2f}") == ("0.87", "0.70")
    error = 1 / (1 + np.exp(-0.87)) - 1
    near(w - 0.1 * slopes[0], w - 0.1 * error * x, 6)
    near(w - 0.1 * slopes[0], [0.2148, 0.3177, 0.9030])
    near(b - 0.1 * slopes[1], 0.5295)


def test_position_table_matches_slide_to_ten_decimals_in_float64():
    slide = (
        "0.0000000000 1.0000000000 0.0000000000 1.0000000000",
        "0.8414709848 0.5403023059 0.0099998333 0.9999500004",
        "0.9092974268 -0.4161468365 0.0199986667 0.9998000067",
    )
    with jax.enable_x64(True):
        table = np.asarray(jax.jit(lambda: sinusoidal(jnp.arange(3), 4))())
    assert table.dtype == np.float64
    assert tuple(" ".join(f"{x:.10f}" for x in row) for row in table) == slide


@pytest.mark.slow
def test_next_decoder_state_depends_on_previous_state_context_and_word():
    """s_t = tanh(W [s_{t-1}; c_t] + W_y y + b): an Elman cell with the context as input."""
    config = RecurrentConfig(
        vocab_size=7, source_vocab_size=11, d_embed=3, d_hidden=5, cell="rnn", attention="dot",
        context="input",
    )  # fmt: skip
    model, params = build(config), init_params(config, jax.random.key(0))
    source = jnp.array([[3, 1, 4, 1]])
    begin = jax.jit(lambda params: model.apply({"params": params}, source, method="init_state"))
    state = begin(params)
    _, after = jax.jit(model.apply)({"params": params}, jnp.array([[2]]), state=state)
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    s, h = wide(state.carry[0])[0], wide(state.memory.states)[0]
    scores = np.exp(h @ s)
    context = scores / scores.sum() @ h
    cell = params["decoder"]["cell_0"]
    w_y, w_c = np.split(wide(cell["i"]["kernel"]), [3])
    w = np.concatenate([wide(cell["h"]["kernel"]), w_c])
    y = wide(params["embed"]["tokens"])[2] @ w_y + wide(cell["i"]["bias"])
    near(after.carry[0][0], np.tanh(np.concatenate([s, context]) @ w + y), 6)


@pytest.mark.slow
def test_sinusoidal_table_matches_slide():
    table = sinusoidal(jnp.arange(3), 4)
    near(table[0], SINUSOIDS[0], 7)
    near(table[1], SINUSOIDS[1], 5)
    near(table[1, 2], SINUSOIDS[1][2], 8)
    near(table[2], SINUSOIDS[2], 6)


@cached
def positions() -> np.ndarray:
    return np.asarray(jax.jit(lambda: sinusoidal(jnp.arange(3), 4))())


def worked_example():
    x = EMBEDDINGS + positions()
    return x @ W_Q, x @ W_K, x @ W_V


@pytest.mark.slow_except("xla")
def test_worked_example_projections_and_scores_match_slide(implementation):
    queries, keys, _ = worked_example()
    near(queries[0], [17, 12, 14, 15])
    near(keys[0], [8, 17, 21, 15])
    scores = []
    for j in range(3):  # the log-sum-exp over a single key is its score
        _, lse = dot_product_attention(
            one_head(queries), one_head(keys[j : j + 1]), one_head(keys[j : j + 1]),
            return_lse=True, implementation=implementation,
        )  # fmt: skip
        scores.append(np.asarray(lse)[0, 0, 0])
    near(scores[0], 429.5)
    near(scores[1], 523.3316)
    near(scores[2], 477.8502, 3)


@pytest.mark.slow_except("xla")
def test_worked_example_attends_only_to_second_token(implementation):
    queries, keys, values = worked_example()
    weights, out = weights_and_out(queries, keys, values, implementation=implementation)
    near(weights, [[0, 1, 0]] * 3, 6)
    near(out, [[10.3917, 21.7934, 25.8034, 16.4823]] * 3, 3)
    near(out[0], [10.3917, 21.7934, 25.8034, 16.4823])


@pytest.mark.slow_except("xla")
def test_worked_example_residual_sum_and_norm_match_slide(implementation):
    queries, keys, values = worked_example()
    _, out = weights_and_out(queries, keys, values, implementation=implementation)
    total = out + positions()
    centred = total - total.mean(axis=1, keepdims=True)
    normalised = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True))
    near(normalised[0], [-1.4909, 0.6280, 1.1423, -0.2794])
    near(normalised[2], [-1.4427, 0.4465, 1.2801, -0.2838])


@pytest.mark.slow_except("xla")
def test_masked_scores_match_slide(implementation):
    scores = np.array([[2, 4, 6], [3, 5, 7], [4, 6, 8]], np.float32)
    weights = attend(
        np.zeros((3, 1)), np.zeros((3, 1)), np.eye(3), bias=jax.device_put(scores), mask=Causal(),
        implementation=implementation,
    )  # fmt: skip
    near(weights, [[1, 0, 0], [0.1192, 0.8808, 0], [0.0159, 0.1173, 0.8668]])
    assert not weights[np.triu_indices(3, 1)].any()


@pytest.mark.slow_except("xla")
def test_cross_attention_from_two_states_over_three_matches_slide(implementation):
    encoded = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0.0]])
    states = np.array([[1, 0, 0, 1], [0, 1, 1, 0.0]])
    assert (states @ encoded.T).tolist() == [[1, 1, 1], [1, 1, 1]]
    weights, out = weights_and_out(states, encoded, encoded, implementation=implementation)
    near(weights, np.full((2, 3), 1 / 3), 6)
    near(out, [[2 / 3, 2 / 3, 1 / 3, 1 / 3]] * 2, 6)


@pytest.mark.slow_except("xla")
def test_cross_attention_with_equal_scores_is_uniform(implementation):
    encoded = np.array([[1, 2, 3, 4], [4, 3, 2, 1], [2, 2, 2, 5]], np.float32)
    states = np.array([[0, 0, 0, 0], [5, -5, 0, 0]], np.float32)
    encoded[:, :2] = 1.0  # the second state is orthogonal to the differences of the keys
    weights, out = weights_and_out(states, encoded, encoded, implementation=implementation)
    near(weights, np.full((2, 3), 1 / 3), 6)
    near(out, np.tile(encoded.mean(axis=0), (2, 1)), 5)


def test_additive_attention_with_equal_scores_is_uniform():
    encoded = np.array([[[1, 2, 3], [4, 3, 2], [2, 2, 5]]], np.float32)
    query, w_query, v = (np.ones(shape, np.float32) for shape in ((1, 2, 3), (3, 5), 5))
    _, weights = jax.jit(additive_attention)(
        query, encoded, encoded, w_query=w_query, w_key=0 * w_query, v=v
    )
    near(weights, np.full((1, 2, 3), 1 / 3), 6)


@pytest.mark.slow_except("xla")
def test_key_value_cache_matches_slide(implementation):
    x = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
    keys, values = x @ [[1, 2], [0, 1]], x @ [[0.5, -0.5], [1, 0.5]]
    expected_keys, expected_values = (
        [[1, 4], [3, 10], [5, 16]],
        [[2.5, 0.5], [5.5, 0.5], [8.5, 0.5]],
    )
    near(keys[:3], expected_keys)
    near(values[:3], expected_values)
    slots, update = jax.jit(lambda: cache.init(1, 5, 1, 2))(), jax.jit(cache.update)
    for t in range(3):
        position = np.array([[t]], np.int32)
        slots = update(slots, one_head(keys[t : t + 1]), one_head(values[t : t + 1]), position)
    near(np.asarray(slots.k)[0, :3, 0], expected_keys)
    near(np.asarray(slots.v)[0, :3, 0], expected_values)
    assert slots.positions[0].tolist() == [0, 1, 2, -1, -1] and slots.length.tolist() == [3]
    now = np.array([[3]], np.int32)
    slots = update(slots, one_head(keys[3:]), one_head(values[3:]), now)
    near(np.asarray(slots.k)[0, :3, 0], expected_keys)
    fourth = dot_product_attention(
        one_head(x[3:]), slots.k, slots.v, mask=Causal(), q_positions=now,
        k_positions=slots.positions, implementation=implementation,
    )  # fmt: skip
    whole = attend(x, keys, values, mask=Causal(), implementation=implementation)
    fourth = np.asarray(fourth)
    near(fourth[0, 0, 0], whole[3], 6)
    near(fourth[0, 0, 0], [11.5, 0.5], 6)  # all the weight is on the token itself
    scores = x[3] @ keys.T / 2**0.5
    near(scores, [27.58, 71.42, 115.26, 159.10], 2)
    exact = np.exp(scores - scores.max())
    near(fourth[0, 0, 0], exact / exact.sum() @ values, 6)


@pytest.mark.slow_except("xla")
def test_permuting_tokens_permutes_output(implementation, rng):
    x = rng.normal(size=(1, 11, 3, 5)).astype(np.float32)
    order = rng.permutation(11)

    @jax.jit
    def run(x):
        plain = dot_product_attention(x, x, x, implementation=implementation)
        return plain, dot_product_attention(x, x, x, mask=Causal(), implementation=implementation)

    (out, masked), moved = jax.device_get(run(x)), jax.device_get(run(x[:, order]))
    near(moved[0], out[:, order], 5)
    assert np.abs(moved[1] - masked[:, order]).max() > 0.1


@pytest.mark.slow_except("xla")
def test_rope_scores_depend_only_on_distance(implementation, rng):
    query, key = (rng.normal(size=(1, 1, 1, 6)).astype(np.float32) for _ in range(2))
    rope = Rope(pairing="interleaved")

    @jax.jit
    def score(i: int, j: int) -> jax.Array:
        turned = (apply_rope(a, jnp.array([p]), rope) for a, p in ((query, i), (key, j)))
        _, lse = dot_product_attention(
            *turned, key, return_lse=True, scale=1.0, implementation=implementation
        )
        return lse[0, 0, 0]

    for distance in (0, 1, 7):
        near([score(i + distance, i) for i in (0, 3, 100)], [score(distance, 0)] * 3)
    assert abs(float(score(3, 0)) - float(score(7, 0))) > 0.01


def test_rope_rotates_pairs_by_angle_in_lecture(rng):
    x = rng.normal(size=(1, 1, 1, 6))
    turn = jax.jit(lambda x: apply_rope(x, jnp.array([5]), Rope(pairing="interleaved")))
    turned = np.asarray(turn(x.astype(np.float32)))
    for k in range(3):
        angle = 5 * 10000 ** (-2 * k / 6)
        rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        pair = slice(2 * k, 2 * k + 2)
        near(turned[0, 0, 0, pair], rotation @ x[0, 0, 0, pair], 5)


@pytest.mark.slow_except("xla")
def test_scaling_reduces_score_variance_from_d_to_one(implementation, rng):
    d, count = 61, 20_011
    query, key = (rng.normal(size=(count, 1, 1, d)).astype(np.float32) for _ in range(2))

    @jax.jit
    def scores(query, key):
        attend = partial(dot_product_attention, query, key, key, implementation=implementation)
        return [attend(scale=scale, return_lse=True)[1] for scale in (1.0, None)]

    raw, scaled = jax.device_get(scores(query, key))
    assert abs(raw.var() / d - 1) < 0.05
    assert abs(scaled.var() - 1) < 0.05


@pytest.mark.slow_except("xla")
def test_causal_window_covers_fifty_frames(implementation):
    frames = jax.device_put(np.zeros((1, 100, 1, 1), np.float32))
    values = jax.device_put(np.eye(100, dtype=np.float32)[None, :, None, :])
    mask = Causal() & Window(50)
    out = dot_product_attention(frames, frames, values, mask=mask, implementation=implementation)
    weights = np.asarray(out)[0, :, 0]
    for frame in range(100):
        seen = range(max(0, frame - 49), frame + 1)
        assert np.flatnonzero(weights[frame]).tolist() == list(seen)
        near(weights[frame, frame], 1 / len(seen), 6)
    found = np.asarray(dot_product_attention_weights(frames, frames, mask=mask))
    near(found[0, 0], weights, 6)


@pytest.mark.slow
def test_stacked_windows_enlarge_receptive_field(implementation, rng):
    x = jnp.asarray(rng.normal(size=(1, 19, 2, 3)), jnp.float32)
    mask, last = Causal() & Window(4), 17

    def influence(x, layers: int):
        for _ in range(layers):
            x = x + dot_product_attention(x, x, x, mask=mask, implementation=implementation)
        return (x[:, last] ** 2).sum()

    for layers in (1, 3):
        gradient = np.asarray(jax.jit(jax.grad(influence), static_argnums=1)(x, layers))
        assert np.isfinite(gradient).all()
        reached = np.abs(gradient).max(axis=(0, 2, 3)) > 0
        field = 1 + 3 * layers
        assert np.flatnonzero(reached).tolist() == list(range(last + 1 - field, last + 1))


@pytest.mark.slow_except("transformer-base-512-2048")
@pytest.mark.parametrize(
    ("name", "width", "hidden"),
    [
        ("transformer-base", 512, 2048), ("bert-base", 768, 3072), ("bert-large", 1024, 4096),
        ("gpt2", 768, 3072),
    ],
)  # fmt: skip
def test_feed_forward_sizes_match_slide(name, width, hidden):
    config = preset(name)
    assert (config.d_model, config.ff_dim) == (width, hidden)
