"""Meshes with explicit axes (the default of jax), and inside a custom `shard_map`."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from tests.support.devices import on_devices
from tests.support.tolerances import GRADIENT_F32, assert_near
from transformer_jax.training.placement import parameter_spec

ROWS_HEADS = ["data", None, "model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                "attention, blockwise",
                "int8, blockwise",
                "ordered",
                "training, rope, split by heads and widths, set",
                "inside, model",
                "training, experts, split by heads and widths, set",
                "training, states, split by heads and widths, set",
                "training, latents, split by heads and widths, set",
                "training, kimi, split by heads and widths, set",
                "decoding, kimi, split by heads and widths, set",
                "training, convolutions, split by heads and widths, set",
                "decoding, convolutions, split by heads and widths, set",
                "experts of devices, few rows",
                "experts of devices",
            ],
            id="some",
        ),
        pytest.param([], marks=[pytest.mark.long, pytest.mark.timeout(1800)], id="all"),
    ],
)
def test_results_on_four_devices_match_one_device(cases):
    """With rows, heads or parameters split by type, and inside a `shard_map`."""
    results = on_devices(4, "-m", "tests.multi_device.meshes_on_four", *cases, optimise=False)
    assert len(results) == len(cases) or len(results) > 50
    for case, result in results.items():
        tokens = case.startswith("decoding") or case == "inside, tokens"
        assert result["error"] <= (0 if tokens else 5e-5), (case, result)
        assert result.get("alike", True), (case, result)
        assert result.get("different", 3) >= 3, (case, result)
        assert result.get("moved", []) == [], (case, result)
        if case.startswith("attention, "):
            assert [spec[:3] for spec in result["specs"]] == [ROWS_HEADS] * 3, (case, result)
        elif case == "attention weights":
            assert result["specs"] == [["data", "model", None, None]], (case, result)
        elif case.startswith("int8"):
            assert result["specs"] == [[*ROWS_HEADS, None]], (case, result)


@pytest.mark.slow
@pytest.mark.long_except("scanned")
@pytest.mark.parametrize("kind", ["looped", "scanned"])
def test_interpretability_tools_on_mesh_match_one_device(kind):
    found = on_devices(4, "-m", "tests.multi_device.interpret_on_four", kind, optimise=False)
    assert len(found) == 10
    assert max(found.values()) <= GRADIENT_F32 * 10, found


@pytest.mark.slow
def test_probes_and_dictionaries_trained_on_mesh_match_one_device():
    """Probes, the tuned lens, and dictionaries, trained by the trainer."""
    results = on_devices(4, "-m", "tests.multi_device.probes_on_four", optimise=False)
    assert len(results["fitted"]) == 8
    assert max(results["fitted"].values()) <= GRADIENT_F32 * 10, results["fitted"]
    dictionaries = results["dictionaries"]
    assert len(dictionaries) == 4
    for case, found in dictionaries.items():
        wanted = dictionaries[f"{case.partition(';')[0]}; one"]
        assert len(found["losses"]) == 5 and found["losses"][3] < found["losses"][0]
        for name, tolerance in (("losses", 1e-5), ("norms", 1e-5), ("scores", 1e-4)):
            assert_near(found[name], wanted[name], tolerance, case)


SUGGESTED = "key heads on one of two axes, automatic"
"""The compiler would also split them by a part of the other axis."""


@pytest.mark.long
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
                *("a mask that reads, explicit", "a function of the score, automatic"),
                *("exported", "projected", "ordered", "cut, heads", "precise", "older_partitioner"),
            ],
            id="some",
        ),
        pytest.param([], marks=[pytest.mark.long, pytest.mark.timeout(1800)], id="all"),
    ],
)
def test_blockwise_tiles_stay_on_device_without_gathering(cases):
    """Blockwise attention on 2 x 4 devices: output, lse and gradients, split by the library."""
    results = on_devices(8, "-m", "tests.multi_device.blockwise_on_eight", *cases, optimise=False)
    assert len(results) == len(cases) or len(results) > 30
    for case, result in results.items():
        rounded = case.startswith("sums of bfloat16")
        assert result["error"] <= (2**-7 if rounded else 2 * GRADIENT_F32), (case, result)
        gathers = case.startswith("three key heads") or case == SUGGESTED
        assert bool(result["gathered"]) == gathers, (case, result)
        assert not result.get("rounded"), (case, result)  # before they are summed


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                *("one", "all", "random", "work"),
                *("one; masked tokens", "all; masked tokens"),
                *("one; classes of a decoder", "all; classes of a decoder"),
            ],
            marks=pytest.mark.slow,
            id="some",
        ),
        pytest.param([], marks=[pytest.mark.long, pytest.mark.timeout(1800)], id="all"),
    ],
)
def test_training_losses_on_any_mesh_match_one_device(cases):
    """Includes a run that resumes on another mesh. Random bits are identical."""
    results = on_devices(8, "-m", "tests.multi_device.training_on_eight", *cases, optimise=False)
    work = results.pop("work")
    one, _ = work["one"]
    assert all(one <= other <= 1.1 * one for other, _ in work.values()), "work is repeated"
    gathered = {layout: share for layout, (_, share) in work.items()}
    assert gathered["one"] == gathered["data"] == 0
    # each device gathers every parameter's part of its tensor axis, once
    for layout, share in {"fsdp": 1, "fsdp, tensor": 1 / 4, "all": 1 / 2}.items():
        assert 0.8 * share < gathered[layout] < 1.1 * share, (layout, gathered)
    random = results.pop("random")
    assert len(random["dropout"]) == 5 and len({*random["dropout"]}) == 1
    assert (
        random["apart"] <= 1e-6
    )  # the same bits, converted to normal numbers by different programs
    assert len(results) == len(cases) - 2 or len(results) > 20
    for case, result in results.items():
        layout, _, change = case.partition("; ")
        wanted = results[f"one; {change}" if change else "one"]
        # stochastic rounding: a number near a threshold may fall on the other side
        tolerance = 1e-4 if "bfloat16" in case else 1e-5
        assert len(result["losses"]) == 6 and min(result["losses"]) > 1
        assert_near(result["losses"], wanted["losses"], tolerance, case)
        assert_near([result["held out"]], [wanted["held out"]], tolerance, case)
        assert result["sample"] == wanted["sample"] and wanted["sample"], case
        assert result["split"].keys() == wanted["split"].keys()
        split = {name: spec for name, spec in result["split"].items() if spec != "whole"}
        assert bool(split) == (layout not in ("one", "data")), case
        if case == "all":
            for tree in ("params", "opt_state/1/0/mu", "average"):
                block = f"{tree}/decoder/block_0"
                assert split[f"{block}/attention/query/kernel"] == "P('fsdp', 'tensor', None)"
                assert split[f"{block}/attention/out/kernel"] == "P('tensor', None, 'fsdp')"
                assert split[f"{block}/feed_forward/up/kernel"] == "P('fsdp', 'tensor')"
                assert split[f"{tree}/embed/tokens"] == "P('tensor', 'fsdp')"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_fine_tuning_losses_on_any_mesh_match_one_device():
    """With adapters, whose dropout has identical bits, and by preferences."""
    results = on_devices(4, "-m", "tests.multi_device.finetuning_on_four", optimise=False)
    assert len(results) == 12
    for case, losses in results.items():
        wanted = results[f"one; {case.partition('; ')[2]}"]
        assert len(losses) == 6 and losses[0] != losses[4]
        assert_near(losses, wanted, 1e-5, case)


def test_axis_not_divisible_by_device_count_is_not_sharded():
    sizes = {"data": 2, "fsdp": 4, "tensor": 2, "expert": 2}
    path = ("decoder", "blocks", "attention", "key", "kernel")
    assert parameter_spec(path, (3, 32, 2, 8), sizes) == P(None, "fsdp", "tensor", None)
    assert parameter_spec(path, (3, 30, 1, 8), sizes) == P(None, None, None, None)
    assert parameter_spec(("embed", "tokens"), (50257, 768), sizes) == P(None, "fsdp")
    assert parameter_spec(("decoder", "norm", "scale"), (32,), sizes) == P()
    experts = ("decoder", "blocks", "feed_forward", "down", "kernel")
    assert parameter_spec(experts, (3, 8, 12, 32), sizes) == P(None, "expert", "tensor", "fsdp")
    assert parameter_spec(experts, (3, 7, 12, 32), sizes) == P(None, None, "tensor", "fsdp")
    assert parameter_spec(experts, (3, 12, 32), sizes) == P(None, "tensor", "fsdp")
    # the row sums of Adafactor have the path of their parameter
    assert parameter_spec(("v_row", "block_0", "up", "kernel"), (32,), sizes) == P()
    sums = ("v_row", "block_0", "feed_forward", "up", "kernel")  # of experts
    assert parameter_spec(sums, (8, 32), sizes) == P()
