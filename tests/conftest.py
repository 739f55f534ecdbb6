"""Strict settings for the whole suite: a leak of rank, key or dtype is an error, not a warning."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20_261_120)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(7)
