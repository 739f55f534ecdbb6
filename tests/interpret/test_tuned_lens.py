"""Tuned lens against NumPy in float64, and its training on unseen tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interpret.tiny import SHAPES, VOCAB, B, D, L, T, draw, model_of, more, params_of
from tests.support import model_oracle as oracle
from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.interpret import (
    Translators,
    fit_tuned_lens,
    lens_divergence,
    logit_lens,
    tuned_lens,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEAR = 10 * FORWARD_F32


def random_translators():
    rng = np.random.default_rng(7)
    draw = lambda *shape: (0.1 * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    return Translators(draw(L, D, D), draw(L, D))


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("shape", ["llama", "t5", "bert"])
def test_identity_translators_reproduce_logit_lens_bitwise(shape, scanned):
    model, params = model_of(shape, scanned=scanned)
    given = draw(), more(shape)

    def tuned(params, own, tokens, rest):
        return tuned_lens(model, params, own, tokens, **rest)

    found = jax.jit(tuned)(params, Translators.identity(model), *given)
    assert found.shape == (B, L + 1, T, VOCAB)
    plain = jax.jit(lambda params, tokens, rest: logit_lens(model, params, tokens, **rest))
    np.testing.assert_array_equal(found, plain(params, *given))


def test_tuned_lens_logits_and_divergence_match_translated_streams():
    model, params = model_of("llama", scanned=True)
    own, tokens = random_translators(), draw()
    both = lambda *given: (tuned_lens(model, *given), lens_divergence(model, *given))  # noqa: E731
    found, apart = jax.device_get(jax.jit(both)(params, own, tokens))
    streams: list[np.ndarray] = []
    logits = oracle.forward(SHAPES["llama"], params_of("llama"), tokens, hidden=streams)
    x = np.stack([np.stack(row[:L]) for row in streams])  # [B, L, T, D]
    kernel, bias = (np.asarray(part, np.float64) for part in own)
    x = x + np.einsum("bltd,lde->blte", x, kernel) + bias[:, None]
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + SHAPES["llama"].norm_eps)
    x = x * params_of("llama")["decoder"]["norm"]["scale"]
    wanted = x @ params_of("llama")["embed"]["output"].T.astype(np.float64)
    assert_near(found[:, :L], wanted, NEAR)
    assert_near(found[:, L], logits, NEAR)
    p, q = (np.exp(y) / np.exp(y).sum(-1, keepdims=True) for y in (logits[:, None], wanted))
    assert_near(apart, (p * np.log(p / q)).sum(-1).mean((0, 2)), 10 * NEAR)
    assert np.min(apart) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "scanned"), [("gpt2", True), ("llama", False), ("bert", False)])
def test_tuned_lens_training_reduces_divergence_on_unseen_tokens(shape, scanned):
    model, params = model_of(shape, scanned=scanned)
    train, unseen = draw(3, rows=64), draw(4, rows=32)
    fit = lambda p, x: fit_tuned_lens(  # noqa: E731
        model, p, x, key=jax.random.key(3), steps=300, batch_size=16, learning_rate=1e-2
    )
    own, apart = fit(params, train)
    before, after = (
        lens_divergence(model, params, t, unseen) for t in (Translators.identity(model), own)
    )
    assert (np.asarray(after) < 0.7 * np.asarray(before)).all(), (before, after)
    assert apart.shape == (300, L)
    assert_near(apart[-20:].mean(0), after, 0.5)
    again = fit(params, train)[0]
    np.testing.assert_array_equal(own.kernel, again.kernel)


@pytest.mark.slow
def test_tuned_lens_supports_vmap_over_translators():
    model, params = model_of("gpt2")
    own = random_translators()
    two = jax.tree.map(lambda a, b: jnp.stack([a, b]), own, Translators.identity(model))
    found = jax.vmap(lambda t: tuned_lens(model, params, t, draw()))(two)
    assert_near(found[0], tuned_lens(model, params, own, draw()), NEAR)
    assert_near(found[1], logit_lens(model, params, draw()), NEAR)


@pytest.mark.slow
def test_invalid_tuned_lens_arguments_are_rejected():
    model, params = model_of("gpt2")
    own = Translators(np.zeros((L + 1, D, D)), np.zeros((L + 1, D)))
    with pytest.raises(
        ValueError, match=r"translators have kernels of shape \[3, 14, 14\]: must be \[2, 14"
    ):
        tuned_lens(model, params, own, draw())
    own = Translators.identity(model)
    with pytest.raises(ValueError, match="tuned_lens does not accept an edit of final_norm"):
        tuned_lens(model.edited({"final_norm": lambda x: x}), params, own, draw())
    with pytest.raises(ValueError, match="steps is 0: must be positive"):
        fit_tuned_lens(model, params, draw(), key=jax.random.key(3), steps=0)
    with pytest.raises(ValueError, match="fit_tuned_lens does not support an encoder-decoder"):
        fit_tuned_lens(*model_of("t5"), draw(), key=jax.random.key(3))
