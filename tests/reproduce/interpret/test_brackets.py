"""The experiment on brackets: its data, its measures, and the heads that carry the kind."""

from types import SimpleNamespace

import numpy as np
import pytest

from reproduce.interpret import brackets

pytestmark = pytest.mark.usefixtures("quick_compilation")


def walk(row):
    """Return the indices of open brackets after each token; fail if none is open to close."""
    stack, every = [], []
    for t, token in enumerate(row):
        if token in (0, 1):
            stack.append(t)
        elif token in (2, 3):
            assert row[stack.pop()] == token - 2
        every.append(list(stack))
    return every


def test_generated_brackets_nest_and_close_correctly():
    rows, last_open = brackets.draw_rows(3, 101)
    assert rows.shape == last_open.shape == (101, 33) and (rows[:, 0] == brackets.BOS).all()
    assert set(rows[:, 1:].ravel()) == {0, 1, 2, 3}
    stacks = [walk(row.tolist()) for row in rows]
    assert last_open.tolist() == [[s[-1] if s else -1 for s in every] for every in stacks]
    assert {len(s) for every in stacks for s in every} == {0, 1, 2, 3, 4}


def test_prompt_pairs_differ_only_in_last_open_bracket():
    clean, corrupted = brackets.draw_prompts(5, 11)
    assert clean.shape == corrupted.shape == (11, 24)
    assert (clean != corrupted).sum(axis=1).tolist() == [1] * 11
    for rows in (clean, corrupted):
        assert [walk(row.tolist())[-1][-1] for row in rows] == [15] * 11


def test_attention_to_last_open_bracket_excludes_bracket_itself():
    last_open = np.array([[-1, 1, 2, 1], [-1, 1, -1, 3]])
    weights = np.full((2, 1, 3, 4, 4), 9.0)  # [B, L, N, T, S]
    weights[0, 0, :, 3, 1] = [0.25, 0.5, 1.0]  # the only query that is not the bracket itself
    assert brackets.on_last_open(weights, last_open).tolist() == [[0.25, 0.5, 1.0]]


def test_each_layer_with_selected_heads_has_one_edit():
    made = brackets.edit_heads([(1, 2), (0, 3), (1, 0)], lambda place, heads: {place: heads})
    assert made == {"block_0/attention/heads": [3], "block_1/attention/heads": [2, 0]}
    assert brackets.edit_heads([], lambda place, heads: {place: heads}) == {}


@pytest.mark.slow
def test_brackets_command_measures_model_and_draws_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(brackets, "ROWS", 4)
    flags = "--seeds 1 --steps 2 --width 8 --format svg --out"
    (found,) = brackets.main([*flags.split(), str(tmp_path)])
    assert found.heads.shape == found.attention.shape == (2, 4) and found.tokens.shape == (2, 24)
    assert found.tokens[1, -1] == pytest.approx(
        1, abs=1e-3
    )  # the logits read no other token of the last layer
    assert found.tokens[:, : 23 - brackets.BACK] == pytest.approx(
        0, abs=1e-3
    )  # the prompts are equal up to there
    assert f"{found.right:.3g}" in capsys.readouterr().out
    assert (tmp_path / "brackets.svg").exists()


@pytest.mark.slow
def test_heads_that_encode_bracket_type_are_necessary():
    found = brackets.measure(0, SimpleNamespace(steps=700, width=32))
    assert found.right > 0.98 and found.asked > 0.95
    assert found.without < found.without_others - 0.1
