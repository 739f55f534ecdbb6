"""Meshes: with explicit axes, which are jax's default, and inside a `shard_map` of the user's."""

from __future__ import annotations

import pytest

from tests.support.devices import on_devices
from tests.support.tolerances import GRADIENT_F32

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
        pytest.param([], marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="all"),
    ],
)
def test_four_devices_compute_what_one_does(cases):
    """Where rows, heads or parameters are split by type, and inside a `shard_map`."""
    results = on_devices(4, "-m", "tests.multi_device.meshes_on_four", *cases, optimise=False)
    assert len(results) == len(cases) or len(results) > 50
    for case, result in results.items():
        tokens = case.startswith("decoding") or case == "inside, tokens"
        assert result["error"] <= (0 if tokens else 5e-5), (case, result)
        assert result.get("alike", True), (case, result)
        assert result.get("different", 3) >= 3, (case, result)
        if case.startswith("attention, "):
            assert result["moved"] == [], (case, result)
            assert [spec[:3] for spec in result["specs"]] == [ROWS_HEADS] * 3, (case, result)
        elif case == "attention weights":
            assert result["specs"] == [["data", "model", None, None]], (case, result)


SUGGESTED = "key heads on one of two axes, automatic"
"""There the compiler would split them by a part of the other axis too."""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                *("all at once, explicit", "all at once, automatic"),
                *(
                    "key heads on one of two axes, explicit",
                    "key heads on one of two axes, automatic",
                ),
                "a mask that reads, explicit",
                *("exported", "projected", "ordered", "cut, heads", "precise", "unasked"),
            ],
            id="some",
        ),
        pytest.param([], marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="all"),
    ],
)
def test_tiles_of_rows_and_heads_are_of_one_device_and_nothing_is_gathered(cases):
    """Blockwise attention on 2 x 4 devices, output, lse and gradients: the library splits it."""
    results = on_devices(8, "-m", "tests.multi_device.blockwise_on_eight", *cases, optimise=False)
    assert len(results) == len(cases) or len(results) > 30
    for case, result in results.items():
        rounded = case.startswith("sums of bfloat16")
        assert result["error"] <= (2**-7 if rounded else 2 * GRADIENT_F32), (case, result)
        gathers = case.startswith("three key heads") or case == SUGGESTED
        assert bool(result["gathered"]) == gathers, (case, result)
        assert not result.get("rounded"), (case, result)  # before they are added up
