"""Rows, positions and functions that the tests of several mixers share."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from transformer_jax.models.factory import build

VOCAB, T, ROWS = 31, 19, 3
TOKENS = np.random.default_rng(3).integers(0, VOCAB, (ROWS, T)).astype(np.int32)
LENGTHS = np.array([19, 7, 12], np.int32)
LEFT = np.where(np.arange(T) >= T - LENGTHS[:, None], np.arange(T) - (T - LENGTHS[:, None]), -1)
RIGHT = np.where(np.arange(T) < LENGTHS[:, None], np.arange(T), -1)
ERROR = 5e-6
"""Largest error of logits, relative to the largest logit, after three blocks in float32."""


@partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens, **arguments):
    return build(config).apply({"params": params}, tokens, **arguments)[0]


@partial(jax.jit, static_argnums=0)
def read(config, params, tokens, cache, positions=None):
    return build(config).apply({"params": params}, tokens, cache=cache, positions=positions)
