"""Chunked prefill with masks that look ahead: equal to a full prefill, or NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax import Causal, Predicate, Prefix, Segments, Window

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tj.ModelConfig(
    vocab_size=23, d_model=16, num_layers=2, num_heads=2, max_len=19, positions="rope"
)
MODEL, ROWS, P = tj.build(CONFIG), 2, 11


@pytest.fixture(scope="module")
def params(quick_compilation):
    return tj.init_params(CONFIG, jax.random.key(0))


@dataclass(frozen=True, eq=False)
class Masked:
    """A custom step that calls the model with this mask."""

    mask: Any

    def __call__(self, params, tokens, state, *, valid=None):
        length = state.length
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        at = jnp.where(valid, length[:, None] + jnp.cumsum(valid, axis=1) - 1, -1)
        return MODEL.apply({"params": params}, tokens, positions=at, mask=self.mask, cache=state)


IDS = np.array([0] * 4 + [1] * 7 + [3] * 8, np.int32)
TABLE = np.tri(19, dtype=bool)
AHEAD = TABLE.copy()
AHEAD[2, 6] = True
MASKS = {
    "causal": (Causal(), "both"), "window": (Causal() & Window(5), "both"),
    "prefix within a chunk": (Causal() | Prefix(np.array([4, 3])), "both"),
    "prefix of several chunks": (Causal() | Prefix(jnp.array([9, 9])), "neither"),
    "prefix of one row": (Causal() | Prefix(jnp.array([9, 4])), "second"),
    "prefix and window": ((Causal() | Prefix(jnp.array([9, 9]))) & Window(4, 4), "neither"),
    "bidirectional segments": (Segments(IDS[None], IDS[None]), "neither"),
    "causal segments": (Causal() & Segments(IDS[None], IDS[None]), "both"),
    "predicate": (Predicate(lambda q, k: (k <= q) | (k < 7)), "neither"),
    "causal predicate": (Predicate(lambda q, k: (k <= q) & (k % 3 != 1)), "both"),
    "dense": (tj.Dense(AHEAD), "neither"), "causal dense": (tj.Dense(TABLE), "both"),
}  # fmt: skip
"""Masks, and the rows whose chunked prefill can be computed."""


@pytest.mark.slow
@pytest.mark.long_except("prefix of several chunks", "causal segments")
@pytest.mark.parametrize("name", MASKS)
def test_chunked_prefill_with_lookahead_matches_full_prefill_or_is_nan(rng, params, name):
    mask, valid_rows = MASKS[name]
    tokens = rng.integers(0, 23, (ROWS, P)).astype(np.int32)
    whole = jax.jit(MODEL.apply)({"params": params}, tokens, mask=mask)[0][:, -1]
    lengths = np.full(ROWS, P, np.int32)
    read = jax.jit(tj.prefill, static_argnums=(0, 5))
    chunked = read(Masked(mask), params, tokens, tj.init_cache(CONFIG, ROWS, 19), lengths, 4)[0]
    chunked = np.asarray(chunked)
    valid = {"both": [True, True], "second": [False, True], "neither": [False, False]}[valid_rows]
    assert np.isfinite(chunked).all(axis=1).tolist() == valid
    assert (~np.isnan(chunked)).any(axis=1).tolist() == valid
    if any(valid):
        assert_near(chunked[valid], whole[np.array(valid)], FORWARD_F32)


@pytest.mark.slow
def test_concrete_lookahead_across_chunks_is_rejected(params):
    mask, tokens = Causal() | Prefix(jnp.array([9, 4])), np.ones((ROWS, P), np.int32)
    with pytest.raises(ValueError, match=r"mask is .*Prefix.*in row 0 .* position 4 or later"):
        Masked(mask)(params, tokens[:, :4], tj.init_cache(CONFIG, ROWS, 19))
    _, state = Masked(mask)(params, tokens[:, :9], tj.init_cache(CONFIG, ROWS, 19))
    Masked(mask)(params, tokens[:, 9:], state)
