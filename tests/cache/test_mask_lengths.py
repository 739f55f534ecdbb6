"""Masks that are too short for the tokens of a cache are refused, as without a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import transformer_jax as tj

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_mask_shorter_than_cached_tokens_is_rejected() -> None:
    """For 4 cached tokens and 1 more, length 3 is refused; length 5 has the result of no mask."""
    config = tj.ModelConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=2, max_len=16)
    model, tokens = tj.build(config), jnp.array([[1, 0, 3, 5, 4]])
    variables = {"params": tj.init_params(config, jax.random.key(3))}
    cache = tj.init_cache(config, 1, 16)
    valid = jnp.ones((1, 5), bool)
    for first in (tokens, tokens[:, :4]):
        with pytest.raises(ValueError, match="valid has length 3 for"):
            mask = tj.Causal() & tj.Padding(valid[:, :3])
            model.apply(variables, first, cache=cache, mask=mask)
    _, cache = jax.jit(model.apply)(variables, tokens[:, :4], cache=cache)
    with pytest.raises(ValueError, match="valid has length 3 for 5"):
        mask = tj.Causal() & tj.Padding(valid[:, :3])
        model.apply(variables, tokens[:, 4:], cache=cache, mask=mask)
    mask = tj.Causal() & tj.Padding(valid)
    found, _ = model.apply(variables, tokens[:, 4:], cache=cache, mask=mask)
    wanted, _ = jax.jit(model.apply)(variables, tokens)
    assert jnp.abs(found[:, 0] - wanted[:, -1]).max() < 1e-5
