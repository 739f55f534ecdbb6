"""Tests of `jax.export` with caches and states: serialisation and results."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import assert_same_bits
from transformer_jax.config import ModelConfig, RecurrentConfig, WindowConfig
from transformer_jax.lectures.recent_tokens import init_recent_tokens
from transformer_jax.lectures.recurrent import RecurrentState, SourceMemory, init_recurrent_state
from transformer_jax.models.attention_weights import attention_weights
from transformer_jax.models.factory import build, init_cache, init_params

pytest.importorskip("flatbuffers", reason="jax.export serialises with it")

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = dict(vocab_size=17, d_model=6, num_heads=3, num_layers=2, d_ff=5, max_len=13)
TOKENS = np.array([[3, 5, 7], [11, 13, 2]], np.int32)
SOURCE = np.array([[1, 2], [3, 4]], np.int32)


def decoder(**changes):
    return ModelConfig(**SMALL, **changes)


CASES = {
    "full": decoder(positions="rope"),
    "ring with sinks": decoder(window=5, sink_tokens=2, positions="alibi"),
    "pattern": decoder(window=(5, None)),
    "scanned": decoder(scan_layers=True),
    "encoder-decoder": decoder(kind="encoder-decoder", source_vocab_size=5),
    "window": WindowConfig(vocab_size=17, context=2, d_embed=3, d_hidden=5),
    "gru": RecurrentConfig(vocab_size=17, d_embed=3, d_hidden=5, cell="gru"),
    "additive": RecurrentConfig(
        vocab_size=17, source_vocab_size=7, d_embed=3, d_hidden=5, attention="additive"
    ),
}


def initial_state(config, model, params):
    """Return an initial cache or state, including the source if the model has one."""
    if isinstance(config, WindowConfig):
        return init_recent_tokens(config, 2)
    if isinstance(config, RecurrentConfig):
        if config.source_vocab_size is None:
            return init_recurrent_state(config, 2)
        return model.apply({"params": params}, SOURCE, method="init_state")
    if config.kind == "encoder-decoder":
        return model.apply({"params": params}, SOURCE, capacity=11, method="init_cache")
    return init_cache(config, 2, 11)


def deserialized(function, *arguments):
    """Serialise and deserialise an exported function."""
    exported = jax.export.export(jax.jit(function))(*arguments)
    return jax.export.deserialize(exported.serialize()).call


@pytest.mark.slow
@pytest.mark.long_except("ring with sinks", "window")
@pytest.mark.parametrize("name", CASES)
def test_deserialized_step_returns_same_logits_and_state(name, key):
    config = CASES[name]
    model, params = build(config), init_params(config, key)
    carried = "cache" if isinstance(config, ModelConfig) else "state"

    def step(params, tokens, state):
        return model.apply({"params": params}, tokens, **{carried: state})

    state = initial_state(config, model, params)
    call = deserialized(step, params, TOKENS, state)
    want_logits, want = jax.jit(step)(params, TOKENS, state)
    logits, new = call(params, TOKENS, state)
    assert np.isfinite(logits).all() and logits.shape == (2, 3, 17)
    assert_same_bits(logits, want_logits)
    assert type(new) is type(want) and jax.tree.structure(new) == jax.tree.structure(want)
    jax.tree.map(assert_same_bits, new, want)
    logits, _ = call(params, TOKENS, new)  # the returned state works as input
    assert_same_bits(logits, jax.jit(step)(params, TOKENS, want)[0])


@pytest.mark.slow
def test_export_preserves_recurrent_state(key):
    """The state of this encoder-decoder includes the encoder's output."""
    config = CASES["additive"]
    shapes = jax.eval_shape(
        lambda key: initial_state(config, build(config), init_params(config, key)), key
    )
    leaves, structure = jax.tree.flatten(shapes)
    filled = [np.full(leaf.shape, n, leaf.dtype) for n, leaf in enumerate(leaves)]
    state = jax.tree.unflatten(structure, filled)
    again = deserialized(lambda state: state, state)(state)
    chex.assert_trees_all_equal(again, state, strict=True)
    assert type(again) is RecurrentState and type(again.memory) is SourceMemory


@pytest.mark.slow
def test_attention_weights_can_be_exported(key):
    config = CASES["full"]
    model, params = build(config), init_params(config, key)

    def attend(params, tokens):
        return attention_weights(model, params, tokens)

    weights = deserialized(attend, params, jnp.asarray(TOKENS))(params, TOKENS)
    want = jax.jit(attend)(params, TOKENS)
    assert type(weights) is type(want)
    jax.tree.map(assert_same_bits, weights, want)
