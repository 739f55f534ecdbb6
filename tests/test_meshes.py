"""Meshes: with explicit axes, which are jax's default, and inside a `shard_map` of the user's."""

from __future__ import annotations

import pytest
from devices import on_devices

ROWS_HEADS = ["data", None, "model"]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                "attention, blockwise",
                "training, rope, split by heads and widths, set",
                "inside, model",
            ],
            id="some",
        ),
        pytest.param([], marks=pytest.mark.slow, id="all"),
    ],
)
def test_four_devices_compute_what_one_does(cases):
    """Where rows, heads or parameters are split by type, and inside a `shard_map`."""
    results = on_devices(4, "tests/meshes_on_four.py", *cases, optimise=False)
    assert len(results) == len(cases) or len(results) > 50
    for case, result in results.items():
        tokens = case.startswith("decoding") or case == "inside, tokens"
        assert result["error"] <= (0 if tokens else 5e-5), (case, result)
        assert result.get("alike", True), (case, result)
        assert result.get("different", 3) >= 3, (case, result)
        if case.startswith("attention, "):
            # in tiles the compiler moves parts of rows and heads about: a `shard_map` does not
            assert result["moved"] == [] or "blockwise" in case, (case, result)
            assert [spec[:3] for spec in result["specs"]] == [ROWS_HEADS] * 3, (case, result)
        elif case == "attention weights":
            assert result["specs"] == [["data", "model", None, None]], (case, result)
