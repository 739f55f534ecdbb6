"""Head scores, rollout and entropy against their definitions, and integrated gradients."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interpret.tiny import SHAPES, VOCAB, B, D, T, draw, model_of, more, params_of
from tests.support import model_oracle as oracle
from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.interpret import (
    attention_entropy,
    attention_rollout,
    head_scores,
    integrated_gradients,
    repeated_tokens,
)
from transformer_jax.models.attention_weights import attention_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEAR = 5 * FORWARD_F32


def random_weights(*shape: int, seed: int = 3) -> np.ndarray:
    """Return causal attention weights with rows that sum to 1."""
    x = np.tril(np.random.default_rng(seed).random(shape))
    return (x / x.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("P", [2, 5])
def test_attention_head_scores_match_formulas(P):
    length = 13
    weights = random_weights(2, 3, 4, length, length)
    found = jax.jit(partial(head_scores, period=P))(weights)
    wanted = np.zeros((3, 3, 4))
    for i in range(3):
        for n in range(4):
            at = weights[:, i, n].astype(np.float64)
            wanted[0, i, n] = np.mean([at[:, t, t - 1] for t in range(1, length)])
            wanted[1, i, n] = np.mean([at[:, t, t - P] for t in range(P, length)])
            wanted[2, i, n] = np.mean([at[:, t, t - P + 1] for t in range(P, length)])
    assert_near(np.stack(found), wanted, NEAR)


def test_head_that_attends_only_to_target_token_scores_one():
    P = 5
    draw = jax.jit(lambda: repeated_tokens(jax.random.key(3), 7, rows=3, period=P))
    tokens = np.asarray(draw())
    assert tokens.shape == (3, 2 * P) and tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens[:, :P], tokens[:, P:])
    assert all(len(set(row)) == P for row in tokens), "a token comes once in each half"
    assert len({tuple(row) for row in tokens}) == 3
    weights = np.zeros((3, 1, 3, 2 * P, 2 * P), np.float32)  # heads: previous, duplicate, induction
    for b, row in enumerate(tokens):
        for t in range(2 * P):
            weights[b, 0, 0, t, max(t - 1, 0)] = 1
            earlier = [s for s in range(t) if row[s] == row[t]]
            weights[b, 0, 1, t, earlier[0] if earlier else t] = 1
            weights[b, 0, 2, t, earlier[0] + 1 if earlier else t] = 1
    found = np.stack(jax.jit(partial(head_scores, period=P))(weights))[:, 0]
    np.testing.assert_array_equal(found, np.eye(3, dtype=np.float32))


def test_attention_rollout_multiplies_layers_and_rows_sum_to_one():
    weights = random_weights(2, 3, 5, 7, 7)
    found = np.asarray(jax.jit(attention_rollout)(weights))
    for b in range(2):
        rolled = np.eye(7)
        for i in range(3):
            mixed = weights[b, i].astype(np.float64).mean(0) + np.eye(7)
            rolled = np.diag(1 / mixed.sum(1)) @ mixed @ rolled
            assert_near(found[b, i], rolled, NEAR)
    assert_near(found.sum(-1), np.ones((2, 3, 7)), NEAR)


def test_uniform_attention_entropy_is_log_n_with_finite_gradients():
    rows = np.array([[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [0.2] * 5], np.float32)
    entropy = jax.jit(attention_entropy)
    assert_near(entropy(rows), [0, math.log(2), math.log(5)], NEAR)
    weights = random_weights(3, 7, 7).astype(np.float64)
    wanted = -(weights * np.log(weights, where=weights > 0, out=np.zeros_like(weights))).sum(-1)
    assert_near(entropy(weights.astype(np.float32)), wanted, NEAR)
    slope = np.asarray(jax.jit(jax.grad(lambda x: attention_entropy(x).sum()))(rows))
    assert_near(slope[2], np.full(5, -math.log(0.2) - 1), NEAR)
    assert np.isfinite(slope).all()


@pytest.mark.slow
def test_head_scores_have_layer_and_head_axes():
    model, params = model_of("llama", scanned=True)
    tokens = repeated_tokens(jax.random.key(3), VOCAB, rows=2, period=3)
    weights = attention_weights(model, params, tokens)["attention"]
    scores = head_scores(weights, 3)
    assert scores.induction.shape == (2, 4)
    by_hand = np.mean([weights[:, 1, 3, t, t - 2] for t in range(3, 6)])
    assert_near(scores.induction[1, 3], by_hand, NEAR)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: head_scores(np.ones((2, 3, 5)), 2), r"weights have shape \[2, 3, 5\]: must be"),
        (lambda: head_scores(np.ones((2, 5, 5)), 5), "period is 5: must be from 2 to 4"),
        (lambda: head_scores(np.ones((2, 5, 5)), 1), "period is 1: must be from 2 to 4"),
        (lambda: attention_rollout(np.ones((2, 5, 5))), r"must be \[B, L, N, T, T\]"),
        (lambda: repeated_tokens(jax.random.key(3), 7, period=11), "period is 11, rows is 4"),
    ],
)
def test_invalid_attention_weights_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Integrated gradients


def metric(logits):
    return (logits[:, -1, 3] - logits[:, -1, 19]).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "scanned"), [("gpt2", False), ("llama", True), ("t5", False), ("encoder", True)]
)
def test_integrated_gradients_sum_to_output_difference(shape, scanned):
    model, params = model_of(shape, scanned=scanned)
    params = jax.tree.map(lambda x: x / 2, params)  # makes the path smooth enough for 64 points
    run = jax.jit(partial(model.apply, {"params": params}, **more(shape)))
    found = integrated_gradients(model, params, draw(), 2, metric, **more(shape))
    assert found.shape == (B, T)
    wanted = metric(run(draw())[0]) - metric(run(np.full((B, T), 2, np.int32))[0])
    assert abs(found.sum() - wanted) <= 1e-4 * max(1, np.abs(found).sum())


def test_integrated_gradients_are_exact_for_quadratic_function():
    """Without branches and norm, logit z_t is linear in token t, which gets all of z_t^2."""
    model, params = model_of("no norm")
    silent = {
        f"block_*/{branch}/output": jnp.zeros_like for branch in ("attention", "feed_forward")
    }
    square = lambda logits: (logits[..., 3] ** 2).sum()  # noqa: E731
    found = integrated_gradients(model.edited(silent), params, draw(), 2, square, steps=3)
    tokens, positions = (
        np.asarray(params["embed"][x], np.float64) for x in ("tokens", "positions")
    )
    z = [(tokens[ids] + positions[:T]) @ tokens[3] for ids in (draw(), np.full((B, T), 2))]
    assert_near(found, z[0] ** 2 - z[1] ** 2, NEAR)


@pytest.mark.slow
def test_integrated_gradients_match_float64_path_integral():
    """Compare with central differences of the oracle along the path."""
    model, params = model_of("llama")
    tokens = np.arange(3, 3 + T, dtype=np.int32)[None]  # each token once
    found = integrated_gradients(model, params, tokens, 2, metric, steps=5)
    table = np.asarray(params_of("llama")["embed"]["tokens"], np.float64)
    x0, x1 = np.repeat(table[[2]], T, 0), table[tokens[0]]

    def output(x):
        own = {**params_of("llama"), "embed": {**params_of("llama")["embed"], "tokens": x}}
        return metric(oracle.forward(SHAPES["llama"], own, np.arange(T)[None]))

    nodes, shares = np.polynomial.legendre.leggauss(5)
    wanted, step = np.zeros(T), 1e-5
    for node, share in zip((nodes + 1) / 2, shares / 2, strict=True):
        x = x0 + node * (x1 - x0)
        for t in range(T):
            change = np.zeros((T, D))
            change[t] = step * (x1 - x0)[t]
            wanted[t] += share * (output(x + change) - output(x - change)) / (2 * step)
    assert_near(found[0], wanted, 1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(steps=0), "steps is 0: must be positive"),
        (dict(baseline=VOCAB), "token 31 at"),
        (dict(capture=("logits",)), "does not accept capture"),
    ],
)
def test_invalid_gradient_arguments_are_rejected(arguments, message):
    model, params = model_of("gpt2")
    given = dict(tokens=draw(), baseline=2, metric=metric)
    with pytest.raises(ValueError, match=message):
        integrated_gradients(model, params, **given | arguments)


def test_integrated_gradients_reject_edited_embedding():
    model, params = model_of("gpt2")
    with pytest.raises(ValueError, match="integrated_gradients does not accept an edit of embed"):
        integrated_gradients(model.edited({"embedding": jnp.sin}), params, draw(), 2, metric)
