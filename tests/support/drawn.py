"""Random model parameters for tests that do not need `init_params`, drawn without compiling."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np

from transformer_jax.models.factory import init_params


@cache
def shapes_of(config):
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def drawn(config, seed=0):
    """Draw standard normal parameters with NumPy in the shapes of `init_params`."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype)), shapes_of(config)
    )
