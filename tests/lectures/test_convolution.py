"""Check the convolutional language model: its formula, what it sees, packing, decoding, errors."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.config import ConfigError, ConvolutionConfig
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.lectures import convolution
from transformer_jax.lectures.recent_tokens import init_recent_tokens
from transformer_jax.models.factory import build, init_params, num_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, TOKENS, VOCAB = 3, 11, 31
CONFIG = ConvolutionConfig(vocab_size=VOCAB, kernel_size=3, d_hidden=5, num_layers=2)
TIED = dataclasses.replace(CONFIG, kernel_size=2, num_layers=1, tie_embeddings=True)

DOCUMENTS = np.array(
    [[3, 3, 3, 3, 7, 7, 3, 3, 3, 3, 3], [1] * 11, [0, 5, 5, 5, 5, 5, 5, 2, 2, 2, 0]], np.int32
)
VALID = np.ones((ROWS, TOKENS), bool)
VALID[0, [2, 4]] = VALID[2, [0, 2, 10]] = False


@cache
def parameters(config: ConvolutionConfig):
    """Draw parameters, none of them at its initial 0."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    return jax.tree.map(lambda x: 0.5 * rng.standard_normal(x.shape).astype(np.float32), shapes)


def draw_tokens() -> np.ndarray:
    return np.random.default_rng(17).integers(0, VOCAB, (ROWS, TOKENS), dtype=np.int32)


@partial(jax.jit, static_argnums=0)
def run(config, params, tokens, **arguments):
    """Apply the model, compiled once for equal shapes."""
    return build(config).apply({"params": params}, tokens, **arguments)


def oracle_forward(config, params, tokens) -> np.ndarray:
    """Return the logits [T, V] of one document by the formula, in float64, tap by tap."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table, k = p["embed"]["tokens"], config.kernel_size
    begins = [p["begin"]] * (config.num_layers * (k - 1))
    x = begins + [table[token] for token in tokens]
    for i in range(config.num_layers):
        kernel, bias = (p[f"convolution_{i}"][name] for name in ("kernel", "bias"))
        after = []
        for t in range(k - 1, len(x)):
            both = bias + sum(x[t - k + 1 + j] @ kernel[j] for j in range(k))
            value, gate = both[: config.d_hidden], both[config.d_hidden :]
            after.append(x[t] + value / (1 + np.exp(-gate)))
        x = after
    output = table if config.tie_embeddings else p["embed"]["output"]
    return np.array(x) @ output.T + p["embed"]["bias"]


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["two layers", "one layer, tied"])
def test_a_pass_matches_the_formula(config):
    params, tokens = parameters(config), draw_tokens()
    logits, state = run(config, params, tokens)
    assert logits.shape == (ROWS, TOKENS, VOCAB) and logits.dtype == jnp.float32
    for row, own in enumerate(np.asarray(logits)):
        assert_near(own, oracle_forward(config, params, tokens[row]), 3 * FORWARD_F32)
    np.testing.assert_array_equal(state.tokens, tokens[:, -config.context :])
    np.testing.assert_array_equal(state.length, [TOKENS] * ROWS)


def test_a_prediction_depends_on_the_last_tokens_alone():
    """Change a token: no earlier prediction moves, and L (k - 1) + 1 = 5 from it on do."""
    tokens = draw_tokens()
    other = np.array(tokens)
    other[:, 4] = (other[:, 4] + 1) % VOCAB
    one, two = (np.asarray(run(CONFIG, parameters(CONFIG), t)[0]) for t in (tokens, other))
    np.testing.assert_array_equal(np.flatnonzero((one != two).any(axis=(0, 2))), range(4, 9))
    assert CONFIG.context == 5


@pytest.mark.slow
def test_packed_documents_are_read_as_if_alone():
    """Check that padding is no part of them, and that the state is the last document's."""
    params, tokens = parameters(CONFIG), draw_tokens()
    logits, state = run(CONFIG, params, tokens, segments=DOCUMENTS, valid=VALID)
    for row, columns in (
        (0, [0, 1, 3]), (0, [5]), (0, [6, 7, 8, 9, 10]), (1, list(range(TOKENS))),
        (2, [1, 3, 4, 5, 6]), (2, [7, 8, 9]),
    ):  # fmt: skip
        want = oracle_forward(CONFIG, params, tokens[row, columns])
        assert_near(logits[row, columns], want, 3 * FORWARD_F32)
    np.testing.assert_array_equal(state.length, [5, TOKENS, 3])


def test_token_by_token_equals_the_whole():
    """Check also chunks, and logits that are asked for at some tokens."""
    params, tokens = parameters(CONFIG), draw_tokens()
    whole, after = run(CONFIG, params, tokens)
    for size in (1, 5):
        state, parts = init_recent_tokens(CONFIG, ROWS), []
        for start in range(0, TOKENS, size):
            logits, state = run(CONFIG, params, tokens[:, start : start + size], state=state)
            parts.append(logits)
        assert_near(np.concatenate(parts, axis=1), whole, 3 * FORWARD_F32)
        np.testing.assert_array_equal(state.tokens, after.tokens)
    some, _ = run(CONFIG, params, tokens, at=np.array([[10, 0], [2, 3], [7, -1]], np.int32))
    some, whole = np.asarray(some), np.asarray(whole)
    assert_near(some[0], whole[0, [10, 0]], 3 * FORWARD_F32)
    assert np.isnan(some[2, 1]).all()


@pytest.mark.slow
def test_greedy_tokens_are_the_best_of_the_full_pass():
    """Compare each token with the formula's best after all before it, from ragged prompts."""
    prompt, params, lengths = draw_tokens(), parameters(CONFIG), np.array([11, 3, 7])
    state, step = init_recent_tokens(CONFIG, ROWS), make_step(build(CONFIG))
    tokens = np.asarray(generate(step, params, prompt, state, num_tokens=5, lengths=lengths).tokens)
    for row, length in enumerate(lengths):
        text = np.concatenate([prompt[row, :length], tokens[row]])
        best = oracle_forward(CONFIG, params, text[:-1])[length - 1 :]
        np.testing.assert_array_equal(tokens[row], best.argmax(axis=-1))


def test_dropout_stands_before_each_layer_and_before_the_output(monkeypatch):
    config, keys = dataclasses.replace(CONFIG, dropout=0.3), []
    monkeypatch.setattr(convolution, "dropout", lambda x, rate, key: keys.append(key) or x)
    apply = partial(build(config).apply, {"params": parameters(CONFIG)}, draw_tokens())
    for key in (None, jax.random.key(1)):
        jax.eval_shape(lambda key: apply(key=key), key)
    assert [key is None for key in keys] == [True] * 3 + [False] * 3


def test_parameters_are_counted():
    assert num_params(CONFIG) == 2 * 31 * 5 + 31 + 5 + 2 * (3 * 5 * 10 + 10)
    assert num_params(TIED) == 31 * 5 + 31 + 5 + 2 * 5 * 10 + 10


def test_a_config_that_cannot_be_is_refused():
    for change, said in (
        (dict(kernel_size=0), "kernel_size is 0: must be positive"),
        (dict(num_layers=2.0), "num_layers is 2.0: must be of type int"),
        (dict(dropout=1.0), "dropout is 1.0: must be at least 0 and below 1"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}"):
            dataclasses.replace(CONFIG, **change)
