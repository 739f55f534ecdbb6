"""Tests of window and convolutional models: formulas, packing, decoding and errors."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax.config import ConfigError, ConvolutionConfig, WindowConfig
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import beam_search
from transformer_jax.decoding.generation import generate, stream
from transformer_jax.decoding.step import make_step
from transformer_jax.lectures import convolution, window
from transformer_jax.lectures.recent_tokens import RecentTokens, init_recent_tokens
from transformer_jax.models.factory import build, init_params, num_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, TOKENS, VOCAB = 3, 11, 31
LENGTHS = np.array([11, 3, 7], np.int32)
WINDOW = WindowConfig(vocab_size=VOCAB, context=3, d_embed=5, d_hidden=17)
DEEP = dataclasses.replace(WINDOW, num_layers=2, direct=True, d_embed=17, tie_embeddings=True)
CONVOLUTION = ConvolutionConfig(vocab_size=VOCAB, kernel_size=3, d_hidden=5, num_layers=2)
TIED = dataclasses.replace(CONVOLUTION, kernel_size=2, num_layers=1, tie_embeddings=True)
CONFIGS = {"window": WINDOW, "deep": DEEP, "convolution": CONVOLUTION, "one layer, tied": TIED}
of_both = pytest.mark.parametrize("name", ["window", "convolution"])

DOCUMENTS = np.array(
    [[3, 3, 3, 3, 7, 7, 3, 3, 3, 3, 3], [1] * 11, [0, 5, 5, 5, 5, 5, 5, 2, 2, 2, 0]], np.int32
)
VALID = np.ones((ROWS, TOKENS), bool)
VALID[0, [2, 4]] = VALID[2, [0, 2, 10]] = False


@cache
def parameters(config):
    """Draw random parameters without zeros."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        if isinstance(config, ConvolutionConfig):
            return noise / 2
        return noise if path[-1].key == "tokens" else noise * 2 * leaf.shape[0] ** -0.5

    return jax.tree_util.tree_map_with_path(draw, shapes)


def draw_tokens() -> np.ndarray:
    return np.random.default_rng(17).integers(0, VOCAB, (ROWS, TOKENS), dtype=np.int32)


@partial(jax.jit, static_argnums=0)
def run(config, params, tokens, **arguments):
    """Apply the model, compiled once per shape."""
    return build(config).apply({"params": params}, tokens, **arguments)


def oracle_forward(config, params, tokens) -> np.ndarray:
    """Return the float64 logits [T, V] of one document, token by token."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table = p["embed"]["tokens"]
    output, bias = table if config.tie_embeddings else p["embed"]["output"], p["embed"]["bias"]
    if isinstance(config, WindowConfig):
        line, logits = [None] * config.context + list(tokens), []
        for t in range(len(tokens)):
            seen = line[t + 1 : t + 1 + config.context]
            x = h = np.concatenate([p["begin"] if w is None else table[w] for w in seen])
            for i in range(config.num_layers):
                h = np.tanh(h @ p[f"hidden_{i}"]["kernel"] + p[f"hidden_{i}"]["bias"])
            logits.append(output @ h + bias + (x @ p["direct"] if config.direct else 0))
        return np.array(logits)
    k = config.kernel_size
    x = [p["begin"]] * (config.num_layers * (k - 1)) + [table[token] for token in tokens]
    for i in range(config.num_layers):
        kernel, layer_bias = (p[f"convolution_{i}"][name] for name in ("kernel", "bias"))
        after = []
        for t in range(k - 1, len(x)):
            both = layer_bias + sum(x[t - k + 1 + j] @ kernel[j] for j in range(k))
            value, gate = both[: config.d_hidden], both[config.d_hidden :]
            after.append(x[t] + value / (1 + np.exp(-gate)))
        x = after
    return np.array(x) @ output.T + bias


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_pass_matches_formula(name):
    config, tokens = CONFIGS[name], draw_tokens()
    logits, state = run(config, parameters(config), tokens)
    assert logits.shape == (ROWS, TOKENS, VOCAB) and logits.dtype == jnp.float32
    for row, ids in enumerate(tokens):
        want = oracle_forward(config, parameters(config), ids)
        assert_near(logits[row], want, 3 * FORWARD_F32)
    np.testing.assert_array_equal(state.tokens, tokens[:, -config.context :])
    np.testing.assert_array_equal(state.length, [TOKENS] * ROWS)


@of_both
def test_prediction_depends_only_on_context_window(name):
    """A changed token affects exactly C predictions, where C = L (k - 1) + 1 for convolutions."""
    config, tokens = CONFIGS[name], draw_tokens()
    other = np.array(tokens)
    other[:, 4] = (other[:, 4] + 1) % VOCAB
    one, two = (np.asarray(run(config, parameters(config), t)[0]) for t in (tokens, other))
    changed = np.flatnonzero((one != two).any(axis=(0, 2)))
    np.testing.assert_array_equal(changed, range(4, 4 + config.context))
    assert config.context == {"window": 3, "convolution": 2 * (3 - 1) + 1}[name]


@pytest.mark.slow_except("window")
@of_both
def test_packed_documents_match_separate_documents(name):
    """Padding is excluded, and the state is that of the last document."""
    config, tokens = CONFIGS[name], draw_tokens()
    params = parameters(config)
    logits, state = run(config, params, tokens, segments=DOCUMENTS, valid=VALID)
    for row, columns in (
        (0, [0, 1, 3]), (0, [5]), (0, [6, 7, 8, 9, 10]), (1, list(range(TOKENS))),
        (2, [1, 3, 4, 5, 6]), (2, [7, 8, 9]),
    ):  # fmt: skip
        want = oracle_forward(config, params, tokens[row, columns])
        assert_near(np.asarray(logits)[row, columns], want, 3 * FORWARD_F32)
    np.testing.assert_array_equal(state.length, [5, TOKENS, 3])
    np.testing.assert_array_equal(state.tokens[0, -3:], tokens[0, 8:])
    before = [-1] * (config.context - 3)
    np.testing.assert_array_equal(state.tokens[2], [*before, *tokens[2, 7:10]])
    apart = run(config, params, tokens, segments=np.arange(33, dtype=np.int32).reshape(3, 11))[1]
    alone = [[-1] * (config.context - 1) + [t] for t in tokens[:, -1]]
    np.testing.assert_array_equal(apart.tokens, alone)


@pytest.mark.slow_except("window")
@of_both
def test_padded_chunks_match_full_forward(name):
    """Each row has padding at different positions."""
    config, rng = CONFIGS[name], np.random.default_rng(23)
    params, state = parameters(config), init_recent_tokens(config, ROWS)
    read, logits = [[] for _ in range(ROWS)], [[] for _ in range(ROWS)]
    for turn, count in enumerate([1, TOKENS, 1, TOKENS, TOKENS]):
        tokens = rng.integers(0, VOCAB, (ROWS, count), dtype=np.int32)
        valid = rng.random((ROWS, count)) < 0.6
        valid[turn % ROWS] = False
        before = state
        out, state = run(config, params, tokens, state=state, valid=valid)
        for row in range(ROWS):
            read[row] += tokens[row, valid[row]].tolist()
            logits[row] += list(np.asarray(out)[row, valid[row]])
        np.testing.assert_array_equal(state.tokens[turn % ROWS], before.tokens[turn % ROWS])
    np.testing.assert_array_equal(state.length, [len(row) for row in read])
    for found, tokens in zip(logits, read, strict=True):
        assert len(tokens) > 4
        assert_near(np.array(found), oracle_forward(config, params, tokens), 3 * FORWARD_F32)


def test_small_chunks_match_full_forward():
    """With chunks of several tokens, each convolution runs once along the chunk."""
    params, tokens = parameters(CONVOLUTION), draw_tokens()
    whole, after = run(CONVOLUTION, params, tokens)
    for size in (1, 5):
        state, parts = init_recent_tokens(CONVOLUTION, ROWS), []
        for start in range(0, TOKENS, size):
            logits, state = run(CONVOLUTION, params, tokens[:, start : start + size], state=state)
            parts.append(logits)
        assert_near(np.concatenate(parts, axis=1), whole, 3 * FORWARD_F32)
        np.testing.assert_array_equal(state.tokens, after.tokens)


@of_both
def test_logits_at_indices_match_full_forward(name):
    """An index out of range gives NaN."""
    config, tokens = CONFIGS[name], draw_tokens()
    at = np.array([[TOKENS - 1, 0], [2, -1], [0, TOKENS]], np.int32)
    got, state = run(config, parameters(config), tokens, at=at)
    whole, after = run(config, parameters(config), tokens)
    got, whole = np.asarray(got), np.asarray(whole)
    for row, columns in enumerate([[10, 0], [2], [0]]):
        assert_near(got[row, : len(columns)], whole[row, columns], 3 * FORWARD_F32)
    assert np.isnan(got[1:, 1]).all()
    np.testing.assert_array_equal(state.tokens, after.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "deep", "convolution"])
def test_greedy_decode_matches_full_forward(name):
    """Compare each token with the argmax of the formula; the prompts are ragged."""
    config, prompt = CONFIGS[name], draw_tokens()
    step, params = make_step(build(config)), parameters(config)
    state, arguments = init_recent_tokens(config, ROWS), dict(num_tokens=7, lengths=LENGTHS)
    tokens = np.asarray(generate(step, params, prompt, fork(state, 1), **arguments).tokens)
    for row, length in enumerate(LENGTHS):
        whole = np.concatenate([prompt[row, :length], tokens[row]])
        best = oracle_forward(config, params, whole[:-1])[length - 1 :]
        np.testing.assert_array_equal(tokens[row], best.argmax(axis=-1))
    if config is WINDOW:
        streamed = np.stack(list(stream(step, params, prompt, state, **arguments)), axis=1)
        np.testing.assert_array_equal(streamed, tokens)


@pytest.mark.slow
def test_beam_score_matches_full_forward():
    """The best beam is also at least as probable as the greedy result."""
    prompt, step, params = draw_tokens(), make_step(build(WINDOW)), parameters(WINDOW)
    state = init_recent_tokens(WINDOW, ROWS)
    arguments = dict(num_tokens=3, lengths=LENGTHS)
    beams = beam_search(step, params, prompt, fork(state, 1), num_beams=5, **arguments)
    greedy = generate(step, params, prompt, state, **arguments)
    for row, length in enumerate(LENGTHS):
        text = np.asarray(beams.tokens)[row, 0]
        whole = np.concatenate([prompt[row, :length], text])
        logits = oracle_forward(WINDOW, params, whole[:-1])[length - 1 :]
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        total = log_p[np.arange(3), text].sum()
        assert_near(beams.log_probs[row, 0], total, 5 * FORWARD_F32)
        assert total >= np.asarray(greedy.log_probs)[row].sum() - 1e-5


@pytest.mark.slow
def test_gradients_match_finite_differences():
    """Check `begin` and `direct`, and that NaN embeddings of padding have no effect."""
    params, tokens = parameters(DEEP), draw_tokens()
    tokens = np.where(VALID, np.where(tokens == 1, 2, tokens), 1)
    rng = np.random.default_rng(29)
    weigh = rng.standard_normal((ROWS, TOKENS, VOCAB)) * VALID[:, :, None]
    params = params | {"embed": params["embed"] | {"tokens": np.array(params["embed"]["tokens"])}}

    def loss(params):
        logits, _ = run(DEEP, params, tokens, valid=VALID)
        return (logits * weigh.astype(np.float32)).sum()

    slopes = jax.jit(jax.grad(loss))(params)

    def exact(name, step):
        moved = params | {name: np.asarray(params[name], np.float64) + step}
        rows = [oracle_forward(DEEP, moved, tokens[row, VALID[row]]) for row in range(ROWS)]
        return sum((out * weigh[row, VALID[row]]).sum() for row, out in enumerate(rows))

    for name in ("begin", "direct"):
        way = rng.standard_normal(params[name].shape)
        want = (exact(name, 1e-5 * way) - exact(name, -1e-5 * way)) / 2e-5
        assert_near((np.asarray(slopes[name]) * way).sum(), want, 10 * GRADIENT_F32)
    params["embed"]["tokens"][1] = np.nan
    untied = dataclasses.replace(DEEP, tie_embeddings=False)
    params["embed"]["output"] = np.ones((VOCAB, 17), np.float32)
    logits, _ = run(untied, params, tokens, valid=VALID)
    assert np.isfinite(np.asarray(logits)[VALID]).all()


@pytest.mark.parametrize(
    ("config", "module", "widths"),
    [(DEEP, window, [51, 17, 17]), (CONVOLUTION, convolution, [5, 5, 5])],
    ids=["window", "convolution"],
)
def test_dropout_requires_key(config, module, widths, monkeypatch):
    """Dropout is applied to the embeddings, between the layers and before the output."""
    seen, params = [], parameters(config)  # before the patch: initialisation also calls dropout
    monkeypatch.setattr(module, "dropout", lambda x, rate, key: seen.append((x.shape, key)) or x)
    model = build(dataclasses.replace(config, dropout=0.3))
    apply = partial(model.apply, {"params": params}, draw_tokens())
    for key in (None, jax.random.key(1)):
        jax.eval_shape(lambda key: apply(key=key), key)
    assert [shape[-1] for shape, _ in seen] == widths * 2
    assert [key is None for _, key in seen] == [True] * 3 + [False] * 3


def test_parameter_count_matches_formula():
    assert num_params(WINDOW) == 31 * 5 + 5 + (15 + 1) * 17 + (17 + 1) * 31
    assert num_params(DEEP) == 32 * 17 + (51 + 1) * 17 + (17 + 1) * 17 + 51 * 31 + 31
    assert num_params(CONVOLUTION) == 2 * 31 * 5 + 31 + 5 + 2 * (3 * 5 * 10 + 10)
    assert num_params(TIED) == 31 * 5 + 31 + 5 + 2 * 5 * 10 + 10


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (WINDOW, dict(vocab_size=0), "vocab_size is 0: must be positive"),
        (WINDOW, dict(context=0), "context is 0: must be positive"),
        (WINDOW, dict(direct=1), "direct is 1: must be of type bool"),
        (WINDOW, dict(dropout=1.0), "dropout is 1.0: must be at least 0 and below 1"),
        (WINDOW, dict(tie_embeddings=True),
         "tie_embeddings is True: needs d_embed 5 to equal d_hidden 17"),
        (CONVOLUTION, dict(kernel_size=0), "kernel_size is 0: must be positive"),
        (CONVOLUTION, dict(num_layers=2.0), "num_layers is 2.0: must be of type int"),
        (CONVOLUTION, dict(dropout=1.0), "dropout is 1.0: must be at least 0 and below 1"),
    ],
)  # fmt: skip
def test_invalid_config_is_rejected(config, change, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        dataclasses.replace(config, **change)


def test_invalid_arguments_are_rejected():
    params, state, right = parameters(WINDOW), init_recent_tokens(WINDOW, ROWS), draw_tokens()
    wrong = draw_tokens()
    wrong[1, 2] = VOCAB
    fewer = init_recent_tokens(WINDOW, 2)
    wider = RecentTokens(np.zeros((ROWS, 5), np.int32), state.length)
    for message, tokens, arguments in (
        (r"token 31 at \[1, 2\]: must be from 0 to 30", wrong, {}),
        ("tokens have 3 rows, but the state has 2", right, dict(state=fewer)),
        ("state.tokens have width 5, but the model's context is 3", right, dict(state=wider)),
        ("state is of type dict: must be RecentTokens", right, dict(state={})),
        ("segments with a state", right, dict(state=state, segments=DOCUMENTS)),
        (r"valid is int32\[3, 11\]: must be bool\[3, 11\]", right, dict(valid=DOCUMENTS)),
        (r"at is int32\[1, 1\]: must be integers \[3, Q\]", right, dict(at=wrong[:1, :1])),
        ("rngs contains 'dropout'", right, dict(rngs={"dropout": jax.random.key(0)})),
    ):
        apply = partial(build(WINDOW).apply, tokens=tokens, **arguments)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda params, apply=apply: apply({"params": params}), params)
    with pytest.raises(ValueError, match="prompt has 3 rows, but the state has 2"):
        generate(make_step(build(WINDOW)), {}, right, fewer, num_tokens=3)
    with pytest.raises(ValueError, match="batch is -1: must be an integer of at least 0"):
        init_recent_tokens(WINDOW, -1)


def test_traced_unknown_token_makes_affected_windows_nan():
    tokens = draw_tokens()
    tokens[1, 2] = -5
    logits, _ = run(WINDOW, parameters(WINDOW), tokens)
    nan = np.isnan(logits).all(axis=-1)
    np.testing.assert_array_equal(nan[1], [2 <= t < 5 for t in range(TOKENS)])
    assert not nan[[0, 2]].any() and np.isnan(logits).any(axis=-1).sum() == 3
