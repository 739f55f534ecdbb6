"""The toy model of superposition: loss and shares with known values."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reproduce.interpret import superposition

pytestmark = pytest.mark.usefixtures("quick_compilation")


def sizes(**changes):
    return SimpleNamespace(**dict(features=5, dimensions=2, steps=10000, rows=64) | changes)


@pytest.mark.slow
def test_linear_model_keeps_most_important_features():
    """The loss of dense features is the lost variance: the sum over i >= m of I_i / 12."""
    args = jnp.int32(4), jnp.float32(0.0), jnp.asarray(False), sizes()
    params, found = superposition.fit(*args)
    assert found == pytest.approx(sum(0.7**i for i in (2, 3, 4)) / 12, rel=0.02)
    norms = np.linalg.norm(params["W"], axis=0)
    assert (norms[:2] > 0.9).all() and (norms[2:] < 0.2).all()


def test_loss_matches_formula(rng):
    W, b, x = (rng.normal(size=size) for size in ((2, 5), (5,), (7, 5)))
    importance = 0.7 ** np.arange(5)
    loss = jax.jit(superposition.loss, static_argnums=3)
    for with_relu in (True, False):
        y = np.stack([W.T @ (W @ row) + b for row in x])
        y = np.maximum(y, 0) if with_relu else y
        wanted = (importance * (x - y) ** 2).sum(axis=1).mean()
        arguments = {"W": W, "b": b}, x, importance
        found = loss(*jax.tree.map(np.float32, arguments), with_relu)
        assert found == pytest.approx(wanted, rel=1e-5)


def test_sampled_features_are_sparse_and_uniform(key):
    x = np.asarray(jax.jit(superposition.draw, static_argnums=2)(key, 0.7, (2003, 5)))
    assert (x == 0).mean() == pytest.approx(0.7, abs=0.02)
    assert x[x > 0].mean() == pytest.approx(0.5, abs=0.02) and x.max() <= 1


def test_feature_dimensionalities_sum_to_at_most_hidden_size(rng):
    assert superposition.dimensionality(rng.normal(size=(11, 3, 7))).sum(axis=-1).max() <= 3 + 1e-9
    angles = 2 * np.pi * np.arange(3) / 3
    triangle = np.stack([np.cos(angles), np.sin(angles)])
    assert superposition.dimensionality(2 * triangle) == pytest.approx(2 / 3)
    pair = np.array([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    assert superposition.dimensionality(pair) == pytest.approx([0.5, 0.5, 0])


@pytest.mark.slow
def test_superposition_command_prints_and_draws_every_seed(tmp_path, capsys):
    flags = "--seeds 2 --features 5 --dimensions 2 --steps 20 --rows 11 --format svg --out"
    found = superposition.main([*flags.split(), str(tmp_path)])
    assert found["W"].shape == (2, 6, 2, 2, 5) and np.isfinite(found["loss"]).all()
    printed = capsys.readouterr().out
    line = next(x for x in printed.splitlines() if x.startswith("features represented, S = 0.99 "))
    counts = [int(c) for c in line.split()[-3:-1]]
    assert counts == list((np.linalg.norm(found["W"][0, 4], axis=-2) > 0.5).sum(axis=-1))
    assert "seed 0  seed 1  spread" in printed and (tmp_path / "superposition.svg").exists()


@pytest.mark.slow
def test_only_sparse_features_share_dimensions():
    found = superposition.main(["--seeds", "1", "--steps", "1500"])
    with_relu, linear = found["represented"][..., 0]
    assert with_relu[0] <= 6 and with_relu[4] >= 10
    assert (linear[:4] <= 6).all()
