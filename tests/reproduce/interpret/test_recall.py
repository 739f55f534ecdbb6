"""The experiment on recall: its data and its measures of attention."""

import jax
import numpy as np
import pytest

from reproduce.interpret import recall

pytestmark = pytest.mark.usefixtures("quick_compilation")


draw_rows = jax.jit(recall.draw_rows, static_argnums=1)


@pytest.mark.parametrize("fewest", [2, 8])
def test_queried_keys_occur_in_their_rows(key, fewest):
    drawn = draw_rows(key, 101, fewest)
    rows, places = map(np.asarray, drawn)
    assert rows.shape == (101, 32) and places.shape == (101, 8)
    counts = set()
    for row, where in zip(rows.tolist(), places.tolist(), strict=True):
        pairs = list(zip(row[:16:2], row[1:16:2], strict=True))
        assert all(0 <= k < 16 <= v < 32 for k, v in pairs)
        assert sorted(pairs) == sorted(zip(row[16::2], row[17::2], strict=True))
        assert len(dict(pairs)) == len(set(pairs))  # a key has one value
        last = {k: 2 * i + 1 for i, (k, _) in enumerate(pairs)}
        assert where == [last[k] for k in row[16::2]]
        counts.add(len(dict(pairs)))
    assert counts == set(range(fewest, 9))
    assert any(row[:16] != row[16:] for row in rows.tolist())


def test_attention_is_measured_on_queried_value_and_key():
    places = np.array([[1, 3, 5, 7, 9, 11, 13, 15], [15, 13, 11, 9, 7, 5, 3, 1]])
    weights = np.full((2, 1, 3, 31, 31), 9.0)  # [B, L, N, T, S]
    for i in range(8):
        weights[:, 0, :, 1 + 2 * i, 2 * i] = [0.1, 0.2, 0.3]
        for row in range(2):
            weights[row, 0, :, 16 + 2 * i, places[row, i]] = [0.5, 0.6, 0.25 + 0.5 * row]
    lookup, own_key = recall.attention(weights, places)
    assert lookup == pytest.approx(np.array([[0.5, 0.6, 0.5]]))
    assert own_key == pytest.approx(np.array([[0.1, 0.2, 0.3]]))


@pytest.mark.slow
def test_recall_command_measures_both_depths_and_draws_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall, "ROWS", 4)
    flags = "--seeds 1 --steps 2 --width 8 --format svg --out"
    found = recall.main([*flags.split(), str(tmp_path)])
    for layers in (2, 1):
        (of_depth,) = found[layers]
        assert of_depth.lookup.shape == of_depth.own_key.shape == (layers, 4)
        assert of_depth.right < 0.2
        # The weights are still almost uniform: a query at position t has t + 1 keys.
        values, queries = 2 + 2 * np.arange(8), 17 + 2 * np.arange(8)
        assert of_depth.own_key.mean() == pytest.approx((1 / values).mean(), rel=0.2)
        assert of_depth.lookup.mean() == pytest.approx((1 / queries).mean(), rel=0.2)
    assert f"{found[2][0].lookup[1].max():.3g}" in capsys.readouterr().out
    assert (tmp_path / "recall.svg").exists()
