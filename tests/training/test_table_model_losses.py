"""Losses, scores and margins of a model that is a table of logits, against float64 NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.support.tolerances import assert_near
from transformer_jax.attention.masks import Causal, Padding
from transformer_jax.config import ModelConfig, TrainConfig, WindowConfig
from transformer_jax.config.tasks import PreferenceTask
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.training import batch as batches
from transformer_jax.training import preference
from transformer_jax.training.batch import Batch, batch_loss, batch_scores, token_nats
from transformer_jax.training.data import IGNORE
from transformer_jax.training.preference import preference_loss, preference_scores

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, D, CAP, SMOOTHING, Z, BETA = 11, 5, 3.0, 0.1, 0.01, 0.3
CONFIG = ModelConfig(
    vocab_size=V, d_model=8, num_heads=1, num_layers=1, max_len=14, logit_softcap=CAP
)


CALLS: list[dict] = []


class Table(CheckedModule):
    """Table of next-token logits by token; `CALLS` records the arguments of a call."""

    config: ModelConfig

    def apply(self, variables, tokens, *, method="__call__", **kwargs):
        params = variables["params"]
        CALLS[:] = [kwargs | {"method": method}]
        x = params["x"][tokens]
        if method == "output_layer":
            return x, params["table"], params["bias"]
        logits = x @ params["table"].T + params["bias"][None, None]
        return CAP * jax.numpy.tanh(logits / CAP), None


@pytest.fixture(autouse=True)
def table(monkeypatch):
    for module in (batches, preference):
        monkeypatch.setattr(
            module, "build", lambda config: config if isinstance(config, Table) else Table(config)
        )


def params_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"x": (V, D), "table": (V, D), "bias": (V,)}
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def logits_of(params, tokens) -> np.ndarray:
    x, table, bias = (params[n].astype(np.float64) for n in ("x", "table", "bias"))
    return CAP * np.tanh((x[tokens] @ table.T + bias) / CAP)


def labelled(rng, rows=3, length=14) -> Batch:
    tokens, labels = rng.integers(0, V, (2, rows, length)).astype(np.int32)
    labels[rng.random((rows, length)) < 0.3] = IGNORE
    labels[0, :3] = [IGNORE, tokens[0, 1], tokens[0, 2]]
    return Batch(tokens, labels)


def test_full_and_chunked_losses_and_scores_match_formula(rng, monkeypatch):
    params, batch = params_of(1), labelled(rng)
    logits, counts = logits_of(params, batch.tokens), batch.labels != IGNORE
    lse = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, np.where(counts, batch.labels, 0)[..., None], -1)[..., 0]
    losses = lse - (1 - SMOOTHING) * picked - SMOOTHING * logits.mean(-1) + Z * lse**2
    nats, right = lse - picked, (logits.argmax(-1) == batch.labels) & counts
    scores = nats[counts].sum(), counts.sum(), right.sum()
    assert 0 < right.sum() < counts.sum()
    mean = losses[counts].mean()
    for chunk, shards, eagerly in ((14, 1, 2**26), (None, 3, 0), (5, 1, 2**26)):
        monkeypatch.setattr(batches, "LOGITS_AT_ONCE", eagerly)
        monkeypatch.setattr(batches, "TOKENS_OF_CHUNK", 4)
        loss = batch_loss(CONFIG, SMOOTHING, z_loss=Z, chunk=chunk, row_shards=shards)
        assert_near(jax.jit(loss)(params, batch, None), (mean, counts.sum()), 1e-5)
        assert CALLS == [{"key": None, "method": "__call__" if chunk == 14 else "output_layer"}]
        if chunk != 5:
            found = jax.jit(batch_scores(CONFIG, row_shards=shards))(params, batch)
            assert_near(found, scores, 1e-5)
            program = str(jax.make_jaxpr(batch_scores(CONFIG, row_shards=shards))(params, batch))
            assert ("f32[3,4,11]" in program) == (chunk is None)  # 14 positions in four chunks
    for edit in ({}, {"logits": lambda x: x}):
        found = token_nats(Table(CONFIG).edited(edit), params, batch)
        assert_near(found, np.where(counts, nats, 0), 1e-5)


def test_preference_scores_match_formula(rng):
    params, reference, batch = params_of(1), params_of(2), labelled(rng, rows=5)
    batch.labels[4] = IGNORE  # a row that only fills the batch

    def rewards(params):
        logits = logits_of(params, batch.tokens)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        picked_labels = np.where(batch.labels == IGNORE, 0, batch.labels)[..., None]
        log_p = np.where(
            batch.labels == IGNORE, 0, np.take_along_axis(log_p, picked_labels, -1)[..., 0]
        )
        return BETA * log_p.reshape(5, 2, 7).sum(-1)

    gained = rewards(params) - rewards(reference)
    margins = (gained[:, 0] - gained[:, 1])[:4]
    losses, right = np.log1p(np.exp(-margins)), (margins > 0).sum()
    assert 0 < right < 4
    config = TrainConfig(model=CONFIG, task=PreferenceTask(beta=BETA), loss_chunk=3)
    loss = jax.jit(preference_loss(config, BETA, row_shards=5))
    assert_near(loss(params, batch, None, reference), (losses.mean(), 4), 1e-5)
    scores = jax.jit(preference_scores(config, BETA))
    assert_near(scores(params, batch, reference), (losses.sum(), 4, right), 1e-5)
    assert_near(scores(params, batch, params), (4 * np.log(2), 4, 0), 1e-6)  # equal rewards


def test_model_receives_fields_of_batch(rng):
    pair = ModelConfig(
        kind="encoder-decoder", vocab_size=V, d_model=8, num_heads=1, num_layers=1, max_len=14
    )
    batch, valid = labelled(rng), np.arange(14)[None] < np.array([[14], [6], [1]])
    positions = np.where(valid, np.arange(14)[None], -1)
    source = rng.integers(0, V, (3, 14)).astype(np.int32)
    more = dict(segments=batch.tokens, valid=valid, prefix=valid, source=source)
    cases = [
        (CONFIG, dict(segments=batch.tokens), dict(segments=batch.tokens)),
        (CONFIG, dict(valid=valid), dict(positions=positions)),
        (CONFIG, dict(prefix=valid), dict(mask=Causal() | Padding(valid))),
        (WindowConfig(vocab_size=V), dict(valid=valid), dict(valid=valid)),
        (pair, dict(source=source, source_valid=valid),
         dict(source=source, source_positions=positions)),
        (pair, more, dict(segments=batch.tokens, positions=positions, source=source,
                          mask=Causal() | Padding(valid))),
    ]  # fmt: skip
    for config, fields, wanted in cases:
        read = batches.batch_logits(config)
        read(params_of(1), Batch(batch.tokens, batch.labels, **fields), None)
        received = jax.tree.map(np.asarray, CALLS[0])
        wanted = jax.tree.map(np.asarray, {"key": None, "method": "__call__"} | wanted)
        assert jax.tree.structure(received) == jax.tree.structure(wanted)
        jax.tree.map(np.testing.assert_array_equal, received, wanted)
