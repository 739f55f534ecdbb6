"""Meshes: with explicit axes, which are jax's default, and inside a `shard_map` of the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    done = subprocess.run(
        [sys.executable, "tests/meshes_on_four.py", *cases],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
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
