"""The experiment on modular addition: its decomposition of logits, and generalisation."""

from types import SimpleNamespace

import numpy as np
import pytest

from reproduce.interpret import grokking

pytestmark = pytest.mark.usefixtures("quick_compilation")
P = 11


def pairs():
    return np.array([(a, b) for a in range(P) for b in range(P)])


def test_data_set_contains_every_pair_with_its_sum():
    rows, sums = grokking.all_pairs(P)
    assert rows.tolist() == [[a, b, P] for a, b in pairs().tolist()]
    assert sums.tolist() == [sum(pair) % P for pair in pairs().tolist()]


def test_filtered_waves_keep_only_requested_frequencies(rng):
    a, b = pairs().T
    w, columns = 2 * np.pi / P, rng.normal(size=(5, P))
    kept = np.outer(np.cos(2 * w * (a + b)), columns[0]) + np.outer(
        np.sin(5 * w * (a + b)), columns[1]
    )
    taken_out = (
        np.outer(np.cos(2 * w * (a - b)), columns[2])
        + np.outer(np.cos(3 * w * (a + b)), columns[3])
        + np.outer(np.sin(5 * w * a), columns[4])
        + columns[:1]
    )
    found = grokking.waves(kept + taken_out, np.array([2, 5]))
    np.testing.assert_allclose(found, kept, atol=1e-12)


def test_spectrum_finds_embedding_frequencies(rng):
    tokens, (u, v) = np.arange(P), rng.normal(size=(2, 7))
    embedding = 3 + np.outer(np.cos(2 * np.pi * 4 * tokens / P), u)
    embedding = embedding + np.outer(np.sin(2 * np.pi * 2 * tokens / P), v)
    power = grokking.spectrum(embedding)
    wanted = np.zeros(5)
    wanted[3], wanted[1] = (P / 2) ** 2 * (u @ u), (P / 2) ** 2 * (v @ v)
    np.testing.assert_allclose(power, wanted, atol=1e-9)
    assert grokking.share(np.array([8.0, 1, 1, 1, 1, 1, 3])) == pytest.approx(14 / 16)


def test_grokking_loss_is_cross_entropy(rng):
    logits, labels = 5 * rng.normal(size=(13, P)), rng.integers(0, P, 13)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wanted = -np.mean([np.log(row[i]) for row, i in zip(p, labels, strict=True)])
    assert grokking.loss(logits, labels) == pytest.approx(wanted)
    assert grokking.loss(logits + 1e4, labels) == pytest.approx(wanted)


def test_first_step_reaching_goal_is_nan_if_never_reached():
    steps = np.array([0, 100, 200, 300])
    assert grokking.first_step(steps, np.array([False, False, True, False])) == 200
    assert np.isnan(grokking.first_step(steps, np.zeros(4, bool)))


@pytest.mark.slow
def test_command_prints_measurements_and_draws_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grokking, "CHUNK", 2)
    flags = "--seeds 1 --steps 4 --width 8 --modulus 11 --percent 60 --format svg --out"
    (run,) = grokking.main([*flags.split(), str(tmp_path)])
    assert run.steps.tolist() == [0, 2, 4] and run.power.shape == (3, 5)
    assert run.loss == pytest.approx(np.log(P), rel=0.3)
    # The logits have almost no waves yet, so removing some changes little.
    assert run.excluded == pytest.approx(run.loss[:, 0], rel=0.1)
    assert f"{run.excluded[-1]:.3g}" in capsys.readouterr().out
    assert (tmp_path / "grokking.svg").exists()


@pytest.mark.slow
def test_held_out_sums_depend_on_few_frequencies():
    sizes = SimpleNamespace(modulus=53, width=48, steps=500, percent=70)
    run = grokking.fit(0, sizes)
    assert (run.accuracy[-1] > 0.99).all() and (run.accuracy[0] < 0.1).all()
    assert grokking.share(run.power[-1]) > 0.5 > 0.3 > grokking.share(run.power[0])
    assert run.restricted[-1] < 0.5 and run.excluded[-1] > 2
