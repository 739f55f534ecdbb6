"""Tests of stacks: norm orders with kinds of positions, and memory of captured weights."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import model_oracle as oracle
from tests.support.tolerances import assert_near
from transformer_jax.config import ModelConfig, Shaw, T5Buckets
from transformer_jax.config.positions import KINDS
from transformer_jax.models.attention_weights import attention_weights
from transformer_jax.models.factory import build, init_cache, init_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL_F32 = 5e-6
"""Tolerance of f32 against float64, relative to the largest, as in test_transformer.py."""

SMALL = ModelConfig(
    vocab_size=31, d_model=26, num_layers=1, num_heads=2, head_dim=6, d_ff=37, max_len=11,
    init_std=0.3,
)  # fmt: skip
POSITIONS = {
    "none": None,
    **{name: kind() for name, kind in KINDS.items()},
    "shaw": Shaw(max_distance=3),
    "t5buckets": T5Buckets(buckets=8, max_distance=17),
}


@pytest.mark.slow
@pytest.mark.long_except(
    "post-learned", "post-rope", "pre-alibi", "sandwich-sinusoidal", "sandwich-t5buckets",
    "parallel-rope", "parallel_shared-alibi", "output-rope",
)  # fmt: skip
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(
    "order", ["pre", "post", "sandwich", "output", "parallel", "parallel_shared"]
)
def test_norm_orders_and_positions_match_reference_and_train(order, positions, rng):
    """Compare a full forward pass and cached calls with the oracle, and take a gradient step."""
    config = dataclasses.replace(
        SMALL, norm_order=order, positions=POSITIONS[positions], implementation="xla"
    )
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    params, apply = oracle.randomised(shapes, rng), build(config).apply
    tokens = rng.integers(0, 31, (2, 7), dtype=np.int32)

    @jax.jit
    def run(params, cache):
        def loss(params):
            logits, _ = apply({"params": params}, tokens)
            log_probs = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2).mean(), logits

        slopes, logits = jax.grad(loss, has_aux=True)(params)
        first, cache = apply({"params": params}, tokens[:, :4], cache=cache)
        last, _ = apply({"params": params}, tokens[:, 4:], cache=cache)
        better = jax.tree.map(lambda p, slope: p - 1e-3 * slope, params, slopes)
        return better, logits, jnp.concatenate([first, last], axis=1)

    def mean_loss(logits) -> float:
        log_probs = logits[:, :-1] - np.log(np.exp(logits[:, :-1]).sum(axis=-1, keepdims=True))
        return -np.take_along_axis(log_probs, tokens[:, 1:, None], axis=2).mean()

    better, logits, decoded = run(params, init_cache(config, 2, 7))
    want = oracle.forward(config, params, tokens)
    assert_near(logits, want, MODEL_F32)
    assert_near(decoded, want, MODEL_F32)
    assert mean_loss(oracle.forward(config, better, tokens)) < mean_loss(want) - 1e-4


@pytest.mark.long
@pytest.mark.usefixtures("usual_compilation")
def test_capturing_one_layer_uses_memory_of_one_layer():
    """Compare the memory of returning the weights of all layers and of one head."""
    config = dataclasses.replace(SMALL, num_layers=3, max_len=127)
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    tokens = np.zeros((1, 127), np.int32)

    def memory(selected) -> int:
        def weights(params):
            return attention_weights(build(config), params, tokens)["attention"][selected]

        found = jax.jit(weights).lower(shapes).compile().memory_analysis()
        return found.temp_size_in_bytes + found.output_size_in_bytes

    one_layer = 2 * 127 * 127 * 4
    assert memory(slice(None)) > 5 * one_layer
    assert memory((slice(None), 3, 1)) < 3 * one_layer
