"""The comparison of a hybrid, a transformer and a linear model."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import hybrids, timing
from transformer_jax import GatedDelta, num_params
from transformer_jax.training.data import IGNORE


def test_models_have_equal_parameters_within_half_a_percent():
    counts = [num_params(config) for config in hybrids.models().values()]
    assert max(counts) < 1.005 * min(counts)


@pytest.mark.parametrize("pairs", hybrids.PAIRS)
def test_label_of_each_query_is_the_value_of_its_key(pairs):
    batch = hybrids.problems(np.random.default_rng(5), pairs, rows=3)
    assert batch.tokens.shape == (3, hybrids.LENGTH)
    parts = (np.asarray(x).reshape(-1, 3 * pairs) for x in (batch.tokens, batch.labels))
    for tokens, labels in zip(*parts, strict=True):
        values = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        queries = tokens[2 * pairs :]
        assert sorted(queries) == sorted(values)
        assert (labels[: 2 * pairs] == IGNORE).all()
        assert [values[key] for key in queries] == list(labels[2 * pairs :])
    documents = np.asarray(batch.segments).reshape(-1, 3 * pairs)
    assert (documents == documents[:, :1]).all()
    assert (np.diff(documents[: hybrids.MOST // pairs, 0]) == 1).all()


def test_labels_of_text_are_the_next_bytes():
    batch = hybrids.windows(np.arange(200, dtype=np.uint8), np.array([0, 7]))
    np.testing.assert_array_equal(batch.labels, batch.tokens + 1)
    assert batch.tokens[1, 0] == 7


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_quick_run_writes_all_figures(monkeypatch, tmp_path):
    sizes = GatedDelta(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=4)

    def small(name, config):
        mixers = config.mixers[-2:]
        own = None if config.gated_delta is None else sizes
        return replace(config, d_model=16, num_layers=len(mixers), mixers=mixers, gated_delta=own)

    models = {name: small(name, config) for name, config in hybrids.models().items()}
    monkeypatch.setattr(hybrids, "models", lambda: models)
    monkeypatch.setattr(hybrids, "RATES", (1e-3, 1e-2))
    monkeypatch.setattr(timing, "limits", lambda *_: {})
    (tmp_path / "text").write_text("to be, or not to be " * 2000)
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    paths = ["--data", str(tmp_path / "text"), "--out", str(out), "--picture", str(picture)]
    hybrids.main(["--quick", "--seconds", "0", *paths])
    results = json.loads(out.read_text())["results"]
    for name in hybrids.PATTERNS:
        assert 0 < results["text"][name]["test_loss"] < 5.6
        assert results["recall"][name]["accuracy"].keys() == set(map(str, hybrids.PAIRS))
        small, large = (results["decoding"][length][name] for length in ("64", "256"))
        assert small["cache_bytes"] < large["cache_bytes"] or name == "linear"
        assert large["token_s"] > 0
    assert picture.read_text().count("hybrid") > 0
