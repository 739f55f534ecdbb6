"""A mask that looks ahead in a chunked prefill: the numbers of one call, or none."""

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
    """A step of one's own whose model has this mask."""

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
    "a prefix within a chunk": (Causal() | Prefix(np.array([4, 3])), "both"),
    "a prefix of several chunks": (Causal() | Prefix(jnp.array([9, 9])), "neither"),
    "one row's prefix": (Causal() | Prefix(jnp.array([9, 4])), "second"),
    "a prefix and a window": ((Causal() | Prefix(jnp.array([9, 9]))) & Window(4, 4), "neither"),
    "everything of a segment": (Segments(IDS[None], IDS[None]), "neither"),
    "causal segments": (Causal() & Segments(IDS[None], IDS[None]), "both"),
    "one's own": (Predicate(lambda q, k: (k <= q) | (k < 7)), "neither"),
    "one's own, causal": (Predicate(lambda q, k: (k <= q) & (k % 3 != 1)), "both"),
    "a table": (tj.Dense(AHEAD), "neither"), "a causal table": (tj.Dense(TABLE), "both"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long_except("a prefix of several chunks", "causal segments")
@pytest.mark.parametrize("name", MASKS)
def test_a_chunked_prompt_has_the_numbers_of_the_whole_or_none(rng, params, name):
    mask, right = MASKS[name]
    tokens = rng.integers(0, 23, (ROWS, P)).astype(np.int32)
    whole = jax.jit(MODEL.apply)({"params": params}, tokens, mask=mask)[0][:, -1]
    lengths = np.full(ROWS, P, np.int32)
    read = jax.jit(tj.prefill, static_argnums=(0, 5))
    found = read(Masked(mask), params, tokens, tj.init_cache(CONFIG, ROWS, 19), lengths, 4)[0]
    found = np.asarray(found)
    good = {"both": [True, True], "second": [False, True], "neither": [False, False]}[right]
    assert np.isfinite(found).all(axis=1).tolist() == good == (~np.isnan(found)).any(1).tolist()
    if any(good):
        assert_near(found[good], whole[np.array(good)], FORWARD_F32)


@pytest.mark.slow
def test_it_is_refused_where_it_is_known(params):
    mask, tokens = Causal() | Prefix(jnp.array([9, 4])), np.ones((ROWS, P), np.int32)
    with pytest.raises(ValueError, match=r"mask is .*Prefix.*in row 0 .* from 4 on"):
        Masked(mask)(params, tokens[:, :4], tj.init_cache(CONFIG, ROWS, 19))
    _, state = Masked(mask)(params, tokens[:, :9], tj.init_cache(CONFIG, ROWS, 19))
    Masked(mask)(params, tokens[:, 9:], state)
