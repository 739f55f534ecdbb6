"""Tests of the forget bias of an LSTM."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from transformer_jax.config import ConfigError, RecurrentConfig
from transformer_jax.lectures.recurrent import LSTMCell
from transformer_jax.models.factory import init_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

TRANSLATOR = RecurrentConfig(
    vocab_size=31, source_vocab_size=23, d_embed=5, d_hidden=7, num_layers=2, bidirectional=True,
    attention="additive",
)  # fmt: skip


@pytest.mark.slow
def test_lstm_matches_flax_cell_bitwise():
    """Compare initial parameters and one step, with forget bias 0."""
    x, c, h = jax.random.normal(jax.random.key(3), (3, 2, 17))
    cells = LSTMCell(17), nn.OptimizedLSTMCell(17)
    params = [jax.jit(cell.init)(jax.random.key(1), (c, h), x[:, :5]) for cell in cells]
    steps = [jax.jit(cell.apply)(params[1], (c, h), x[:, :5]) for cell in cells]
    for one, other in (params, steps):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_forget_bias_initializes_every_forget_gate():
    """Check encoder and decoder, and that no other initial parameter changes."""
    key, changed = jax.random.key(1), []
    fresh, opened = (
        init_params(dataclasses.replace(TRANSLATOR, forget_bias=bias), key) for bias in (0.0, 1.5)
    )
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(fresh), jax.tree.leaves(opened), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("hf/bias"):
            np.testing.assert_array_equal(before, np.zeros(7))
            np.testing.assert_array_equal(after, np.full(7, 1.5))
            changed.append(name.removesuffix("/hf/bias"))
        else:
            np.testing.assert_array_equal(before, after, err_msg=name)
    cells = [f"encoder/{side}_{i}" for side in ("back", "cell") for i in (0, 1)]
    assert sorted(changed) == ["decoder/cell_0", "decoder/cell_1", *cells]


def test_forget_bias_requires_lstm():
    for cell in ("gru", "rnn"):
        with pytest.raises(ConfigError, match=r"^forget_bias is 1.0: needs cell 'lstm'"):
            RecurrentConfig(cell=cell, forget_bias=1.0)
