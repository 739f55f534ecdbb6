"""Probes of caches, tables of positions and dropout: how an observation is described."""

import numpy as np
import pytest

from benchmarks.conformance import behavior
from benchmarks.peers import Absent


def cache(store):
    """Return a function that writes to three slots until they are full, then calls `store`."""
    slots = []

    def write(number):
        nonlocal slots
        slots = [*slots, number] if len(slots) < behavior.CAPACITY else store(slots, number)
        missing = max(0, behavior.CAPACITY - len(slots))
        return np.array([*slots, *[0.0] * missing])

    return write


def refuse(slots, number):
    raise IndexError("full")


@pytest.mark.parametrize(
    ("store", "described"),
    [
        (refuse, "raises IndexError"),
        (lambda slots, number: [*slots, number], "grows"),
        (lambda slots, number: slots, "does not store the key"),
        (lambda slots, number: [number, *slots[1:]], "overwrites the oldest key"),
        (lambda slots, number: [*slots[:-1], number], "overwrites the newest key"),
        (lambda slots, number: [slots[0], number, slots[2]], "changes slots [1]"),
        (lambda slots, number: [np.nan] * 3, "NaN"),
    ],
)
def test_full_cache_behavior_is_reported(store, described):
    assert behavior.full_cache(cache(store)) == described


@pytest.mark.parametrize(
    ("row", "described"),
    [
        ([np.nan, np.nan], "NaN"), ([3.0, 4.0], "the last row"), ([1.0, 2.0], "the first row"),
        ([0.0, 0.0], "zeros"), ([5.0, 6.0], "another row"),
    ],
)  # fmt: skip
def test_lookup_past_end_of_table_is_reported(row, described):
    assert behavior.past_table(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array(row)) == described


@pytest.mark.parametrize(
    ("axes", "factor", "described"),
    [
        ((), 2, "each weight by itself; kept weights are divided by 1 - rate"),
        ((0, 2), 2, "shared by rows and heads; kept weights are divided by 1 - rate"),
        ((2,), 1, "shared by heads; kept weights are not rescaled"),
        ((0,), 3, "shared by rows; kept weights are multiplied by 3"),
    ],
)
def test_dropped_weights_are_reported(axes, factor, described):
    B, T, S, N = behavior.SHAPE
    shape = [1 if axis in axes else size for axis, size in enumerate((B, T, N, S))]
    kept = np.random.default_rng(0).random(shape) < 0.5
    out = np.broadcast_to(kept * factor / S, (B, T, N, S))
    assert behavior.dropped(out) == described


def test_missing_library_is_reported(monkeypatch):
    def absent():
        raise Absent("x is not installed")

    monkeypatch.setattr(behavior, "BEHAVIOR", {"a question": {"x": absent, "y": lambda: "equal"}})
    found = behavior.observed()
    assert found == {"a question": {"x": "not run: x is not installed", "y": "equal"}}
    assert "| y | equal |" in behavior.markdown(found)


@pytest.mark.slow
def test_this_library_rejects_full_cache_and_separates_ragged_prompts():
    assert behavior.our_cache(jit=False) == "raises ValueError"
    assert behavior.our_cache(jit=True) == "NaN"
    assert behavior.our_positions() == "raises ValueError"
    assert behavior.our_ragged() == "equal to each prompt alone"
    for name in ("xla", "blockwise"):
        assert behavior.our_dropout(name).startswith("each weight by itself; kept weights are div")
