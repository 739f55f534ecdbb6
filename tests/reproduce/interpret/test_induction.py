"""The experiment on induction heads: its data, and the heads that copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reproduce.interpret import induction

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_each_row_repeats_with_its_own_period(key):
    rows = np.asarray(jax.jit(induction.repeated_rows, static_argnums=1)(key, 101))
    periods = [
        next(p for p in range(1, 49) if (row[p:] == row[: len(row) - p]).all()) for row in rows
    ]
    assert min(periods) == 12 and max(periods) == 24 and len(set(periods)) == 13


def test_halfway_step_is_start_of_lasting_convergence():
    steps = np.arange(10, 70, 10)
    assert induction.halfway(np.array([4.0, 4, 1, 4, 0, 0]), steps) == 50
    assert induction.halfway(np.array([0.0, 0, 0.6, 0.9, 1, 1]), steps) == 30


@pytest.mark.slow
def test_induction_command_trains_both_depths_and_draws_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(induction, "CHUNK", 2)
    monkeypatch.setattr(induction, "ROWS", 4)
    flags = "--seeds 1 --steps 4 --width 8 --format svg --out"
    found = induction.main([*flags.split(), str(tmp_path)])
    for name, layers in (("two", 2), ("one", 1)):
        (run,) = found[name]
        assert run.scores.shape == (2, layers, 4) and run.steps.tolist() == [2, 4]
        assert run.loss[0] == pytest.approx(np.log(induction.VOCAB), rel=0.3)
        still = run.params["decoder"]["block_0"]["feed_forward"]["up"]["kernel"]
        first = induction.tj.init_params(run.model.config, jax.random.fold_in(jax.random.key(0), 0))
        assert jnp.array_equal(still, first["decoder"]["block_0"]["feed_forward"]["up"]["kernel"])
    printed = capsys.readouterr().out
    assert f"{found['two'][0].loss[-1]:.3g}" in printed and (tmp_path / "induction.svg").exists()


@pytest.mark.slow
def test_ablating_induction_head_raises_loss():
    run = induction.fit(0, 2, 800, 64)
    assert run.loss[-1] < 1 and run.scores[-1, 1].max() > 0.7
    without, others = induction.ablated(run)
    assert without > 3 and others < 1.5
