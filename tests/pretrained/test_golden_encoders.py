"""Encoders saved by `transformers`, with its outputs, from golden/write_encoders.py."""

from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax import build, load_pretrained, save_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-4


def opened(name):
    with np.load(GOLDEN / name / "golden.npz", allow_pickle=False) as file:
        return dict(file)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_mask_predictions_match_transformers(scan):
    golden = opened("bert_masked_lm")
    config, params = load_pretrained(GOLDEN / "bert_masked_lm", scan_layers=scan)
    at = golden["positions"]
    logits, _ = jax.jit(build(config).apply)(
        {"params": params}, golden["tokens"], positions=at, types=golden["types"]
    )
    got, want = np.asarray(logits)[at >= 0], golden["logits"][at >= 0]
    assert want.shape == (29, 53) and want.std() > 0.3
    assert np.abs(got - want).max() <= TOLERANCE
    assert (got.argmax(-1) == want.argmax(-1)).all()


@pytest.mark.slow
def test_class_predictions_match_transformers():
    golden = opened("distilbert_classes")
    config, params = load_pretrained(GOLDEN / "distilbert_classes")
    got = np.asarray(
        build(config).apply(
            {"params": params}, golden["tokens"], positions=golden["positions"], method="classify"
        )
    )
    want = golden["classes"]
    assert want.shape == (3, 3) and np.ptp(want, axis=0).max() > 0.3
    assert np.abs(got - want).max() <= TOLERANCE
    assert (got.argmax(-1) == want.argmax(-1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_masked_lm", "distilbert_classes"])
def test_saving_loaded_folder_reproduces_same_bytes(name, tmp_path):
    config, params = load_pretrained(GOLDEN / name)
    save_pretrained(tmp_path / "again", config, params, like=GOLDEN / name)
    file = "model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (GOLDEN / name / file).read_bytes()
    assert load_pretrained(tmp_path / "again")[0] == config


def test_golden_folders_are_small():
    for name in ("bert_masked_lm", "distilbert_classes"):
        assert sum(file.stat().st_size for file in (GOLDEN / name).iterdir()) < 60_000
