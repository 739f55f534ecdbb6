"""Chunked loss of a batch against the loss of all logits at once, for every transformer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.test_transformer import assert_gradients_near
from tests.support.tolerances import assert_near
from transformer_jax.config import ModelConfig
from transformer_jax.models.factory import init_params
from transformer_jax.training import batch
from transformer_jax.training.batch import (
    LOGITS_AT_ONCE,
    TOKENS_OF_CHUNK,
    Batch,
    batch_loss,
    batch_scores,
    chosen_chunk,
)
from transformer_jax.training.data import IGNORE

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = dict(vocab_size=37, d_model=12, num_heads=2, num_layers=1, max_len=11, init_std=0.5)
MODELS = {
    "decoder": ModelConfig(**SMALL, dropout=0.2, logit_softcap=3.0, logit_scale=0.7),
    "packed": ModelConfig(**SMALL, tie_embeddings=False, logit_bias=True),
    "prefix": ModelConfig(**SMALL, positions="rope"),
    "encoder": ModelConfig(**SMALL, kind="encoder", masked_token_head=True, logit_bias=True),
    "encoder-decoder": ModelConfig(**SMALL, kind="encoder-decoder", dropout=0.2),
}


def batch_of(name, rng):
    tokens = rng.integers(0, 37, (3, 11)).astype(np.int32)
    labels = np.where(rng.random((3, 11)) < 0.3, IGNORE, rng.integers(0, 37, (3, 11)))
    more = {}
    if name == "packed":
        more["segments"] = np.repeat([[1, 2, 2], [1, 1, 1], [1, 2, 0]], [4, 3, 4], axis=1)
    if name == "prefix":
        more["prefix"] = np.arange(11)[None] < np.array([[3], [0], [5]])
    if name == "encoder":
        more["valid"] = np.arange(11)[None] < np.array([[11], [7], [9]])
        labels = np.where(more["valid"], labels, IGNORE)
    if name == "encoder-decoder":
        more["source"] = rng.integers(0, 37, (3, 7)).astype(np.int32)
        more["source_valid"] = np.arange(7)[None] < np.array([[7], [2], [5]])
    return jax.tree.map(jnp.asarray, Batch(tokens, labels.astype(np.int32), **more))


@pytest.mark.slow
@pytest.mark.long_except("encoder-decoder")
@pytest.mark.parametrize("name", MODELS)
def test_chunked_loss_matches_full_loss(name, rng):
    """Loss, weight and gradients, with dropout, smoothing and z-loss; the oracle has no chunks."""
    config, examples = MODELS[name], batch_of(name, rng)
    params = init_params(config, jax.random.key(1))
    found = []
    for chunk in (11, 4):
        key = jax.random.key(2) if config.dropout else None
        loss = batch_loss(config, 0.1, z_loss=0.01, chunk=chunk)
        measure = jax.jit(jax.value_and_grad(loss, has_aux=True))
        found.append(measure(params, examples, key))
        logits = f"f32[{3 * 11},37]", "f32[3,11,37]"
        program = str(jax.make_jaxpr(measure)(params, examples, None))
        assert any(shape in program for shape in logits) == (chunk == 11)
    ((whole, weight), slopes), ((parts, same), part_slopes) = found
    assert float(weight) == float(same) == (np.asarray(examples.labels) != IGNORE).sum()
    assert_near(parts, np.asarray(whole), 1e-6)
    assert_gradients_near(part_slopes, slopes, 2e-5)


@pytest.mark.slow
@pytest.mark.long_except("decoder")
@pytest.mark.parametrize("name", MODELS)
def test_chunked_scores_match_full_scores(name, rng, monkeypatch):
    """Includes lengths that are not a multiple of the chunk."""
    config, examples = MODELS[name], batch_of(name, rng)
    params = init_params(config, jax.random.key(1))
    whole = jax.jit(batch_scores(config))(params, examples)
    monkeypatch.setattr(batch, "LOGITS_AT_ONCE", 0)
    monkeypatch.setattr(batch, "TOKENS_OF_CHUNK", 12)
    parts = jax.jit(batch_scores(config))
    assert "f32[3,4,37]" in str(jax.make_jaxpr(parts)(params, examples))
    assert float(whole[1]) == (np.asarray(examples.labels) != IGNORE).sum() > 0
    assert_near(parts(params, examples), np.asarray(whole), 1e-6)
    assert float(parts(params, examples)[2]) == float(whole[2])


def test_large_logits_are_computed_in_chunks():
    assert chosen_chunk(8, 256, 1000) == 256  # 2 M logits
    rows, length, vocab = 8, 1024, 50_257
    assert rows * length * vocab > LOGITS_AT_ONCE
    assert rows * chosen_chunk(rows, length, vocab) == TOKENS_OF_CHUNK < rows * length
    assert chosen_chunk(4096, 8, 10**6) == 1
    assert chosen_chunk(1, 512, 10**6) == 512


def test_chunks_have_equal_length_and_are_larger_on_accelerators(monkeypatch):
    assert chosen_chunk(12, 256, 50_257) == 64  # four equal chunks, not three of 85 and one of 1
    monkeypatch.setattr(batch, "platform", lambda: "gpu")
    assert chosen_chunk(32, 1024, 50_304) == 147  # seven chunks, 237 M logits each
    assert chosen_chunk(1, 4096, 10**6) == TOKENS_OF_CHUNK  # more than 2**28 logits


def test_router_receives_padding_mask_for_its_input():
    source, target = np.array([[1, 1, 0]], bool), np.array([[1, 0]], bool)
    pair = batch.Batch(np.zeros((1, 2)), np.zeros((1, 2)), valid=target, source_valid=source)
    logits = jnp.zeros((1, 3, 4)), jnp.zeros((1, 2, 4))
    assert batch._router_mask(pair, True, "encoder-decoder", logits[0]).tolist() == source.tolist()
    assert batch._router_mask(pair, False, "encoder-decoder", logits[1]).tolist() == target.tolist()
    assert batch._router_mask(pair, True, "encoder", logits[1]).tolist() == target.tolist()
    assert batch._router_mask(pair, True, "encoder", logits[0]) is None  # has other tokens
