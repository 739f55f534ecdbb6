"""The experiment on attention sinks: its data and its measures of attention."""

import numpy as np
import pytest

from reproduce.interpret import sinks

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_sink_attention_is_averaged_over_late_queries():
    """With weights of 0.25 on token 0 and 0.5 on the query itself, 0.25 goes to the sink logit."""
    weights = np.zeros((2, 3, 5, 48, 48))
    weights[..., np.arange(48), np.arange(48)] = 0.5
    weights[..., :, 0] += 0.25
    weights[..., : sinks.WINDOW, 0] = 1.0
    weights[:, 1, :, sinks.WINDOW :, 0] = 0.5
    queries = np.ones((2, 48), bool)
    queries[0, 20:] = False
    weights[0, ..., 20:, 0] = 9.0
    first, learnt = sinks.share(weights, queries)
    assert first == pytest.approx([0.25, 0.5, 0.25]) and learnt == pytest.approx([0.25, 0, 0.25])


def test_generated_rows_follow_bigrams_and_copy_after_triggers():
    after = {0: 5, 5: 1, 1: 7, 7: 0}
    ids = np.array([0, 5, 1, 7] * 50)
    rows = sinks.draw_rows(3, 97, ids)
    assert rows.shape == (97, sinks.LENGTH + 1) and (rows[:, 0] == sinks.BOS).all()
    before, last, new = rows[:, 1:-2].ravel(), rows[:, 2:-1].ravel(), rows[:, 3:].ravel()
    triggered = np.isin(last, sinks.TRIGGERS)
    assert triggered.mean() > 0.2 and (new[triggered] == before[triggered]).all()
    known = np.isin(last, [*after]) & ~triggered
    wanted = np.array([after[x] for x in last[known]])
    assert known.mean() > 0.5 and (new[known] == wanted).mean() > 0.99  # the rest is smoothing


@pytest.mark.slow
def test_sinks_command_measures_with_and_without_learned_logit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sinks, "ROWS", 2)
    flags = "--seeds 1 --steps 2 --layers 1 --width 8 --format svg --out"
    found = sinks.main([*flags.split(), str(tmp_path)])
    (plain,), (learnt,) = found[False], found[True]
    assert plain.learnt == pytest.approx([0], abs=1e-5)
    # The weights are still almost uniform: position t has t + 1 keys, and the sink logit.
    late = np.arange(sinks.WINDOW, sinks.LENGTH)
    assert plain.dormant == pytest.approx([(1 / (late + 1)).mean()], rel=0.3)
    assert learnt.learnt == pytest.approx([(1 / (late + 2)).mean()], rel=0.3)
    assert list(plain.loss) == list(sinks.SEEN) and len(set(plain.loss.values())) == 4
    assert f"{learnt.loss['a window']:.3g}" in capsys.readouterr().out
    assert (tmp_path / "sinks.svg").exists()


@pytest.mark.slow
def test_dormant_heads_attend_to_first_token():
    arguments = sinks.read_arguments(None, ["--seeds", "1"], steps=600, layers=1, width=64)
    found = sinks.measure(0, False, arguments)
    assert found.dormant[0] > 3 * found.active[0]
    loss = found.loss
    assert loss["a window"] > loss["all tokens"] + 0.1
    assert loss["a window and 1 first token"] < loss["all tokens"] + 0.05
