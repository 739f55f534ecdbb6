"""Attention benchmarks: equal masks and results of all contenders, timing, and goals."""

import importlib.util
import json
import sys
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from benchmarks import attention, choosing, contenders, goals, specs, timing
from benchmarks.peers import Absent
from tests.support import oracle
from tests.support.tolerances import GRADIENT_F32, assert_near
from transformer_jax.kernels import cpu

NATIVE = set() if isinstance(cpu.library(), str) else {"ours native", "ours invariant"}
"""Additional contenders if the native kernels are compiled."""


def shrunk(case: specs.AttentionCase) -> specs.AttentionCase:
    """Return the case with the same mask over few tokens."""
    return replace(
        case,
        queries=case.queries if case.queries == 1 else 31 if case.queries == case.keys else 23,
        keys=31,
        window=None if case.window is None else 7,
        documents=None if case.documents is None else 5,
    )


@pytest.mark.long_except("edge-causal", "edge-band")
@pytest.mark.slow_except("edge-causal")
@pytest.mark.parametrize("name", ["edge-everything", "edge-band", "edge-padding", "edge-causal"])
def test_benchmark_case_mask_matches_dense_mask(name):
    case = shrunk(next(c for c in specs.ATTENTION if c.name == name))
    ours = case.mask().materialize(jnp.arange(case.queries), jnp.arange(case.keys))
    shape = (case.batch, 1, case.queries, case.keys)
    ours = np.broadcast_to(np.asarray(ours), shape)
    assert ours.any() and not ours.all()
    dense = case.dense_mask()
    if dense is None:
        dense = np.tril(np.ones((1, case.queries, case.keys), bool))
    np.testing.assert_array_equal(ours, np.broadcast_to(dense[:, None], shape))
    assert case.pairs() == ours.sum()


def test_flop_count_includes_only_unmasked_pairs_per_product():
    case = shrunk(next(c for c in specs.ATTENTION if c.name == "edge-values"))
    pairs = sum(min(t + 1, case.keys) for t in range(case.queries))
    forward = sum(2 * case.batch * case.heads * pairs * d for d in (case.head_dim, case.value_dim))
    assert case.flops("forward") == forward > 0
    assert 2 * case.flops("backward") == 5 * forward
    assert case.flops("forward+backward") == case.flops("forward") + case.flops("backward")


def contender(timings, *, direction="backward", case="a", **absent):
    """Return the record of `benchmarks.attention` for a case with these seconds."""
    summaries = {name: {"median_s": seconds} for name, seconds in timings.items()}
    ratios = {name: seconds / timings["ours"] for name, seconds in timings.items()}
    return dict(
        case=case, direction=direction, flops=6e9, timings=summaries, speedup_of_ours=ratios,
        absent=absent, difference=dict.fromkeys(timings, 0.01),
    )  # fmt: skip


def test_contender_with_different_results_is_excluded_from_means():
    cells = [contender({"ours": 2.0, "torch": 1.0, "flax": 8.0}) for _ in range(2)]
    cells[1] |= {"case": "b", "direction": "backward"}
    cells[1]["difference"]["torch"] = None
    means = attention.geometric_means(cells)["backward"]
    assert (means["torch"]["cells"], means["flax"]["cells"]) == (1, 2)
    assert (means["torch"]["mean"], means["flax"]["mean"]) == (0.5, 4.0)
    assert means["best peer"]["mean"] == pytest.approx(2**0.5)
    assert means["best peer"]["worst_case"] == "a"


def test_goals_refer_to_existing_cells_and_contenders(monkeypatch):
    """Check the names of contenders that run on a GPU."""
    cases = {case.name: case for case in specs.attention_cases("gpu")}
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    options = attention._options(["--goals", "--ours", "pallas"])
    for (name, direction), who in goals.cells().items():
        there = contenders.builders(cases[name], direction, options)
        assert who - {goals.UNORDERED} <= there.keys(), name
    chosen = attention._selected(options, "gpu")
    assert [(case.name, d, who) for case, d, who in chosen] == [
        (*cell, who) for cell, who in goals.cells().items()
    ]
    assert {case.dtype for case, _, _ in chosen} == {"bfloat16"}


@pytest.mark.long
@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize("name", ["edge-alibi", "edge-bias", "edge-capped"])
@pytest.mark.usefixtures("quick_compilation")
def test_contenders_have_equal_gradients_or_report_reason(name, direction):
    compare_contenders(name, direction)


@pytest.mark.slow
@pytest.mark.long_except("edge-padding")
@pytest.mark.parametrize("name", ["edge-documents", "edge-window", "edge-band", "edge-padding"])
@pytest.mark.usefixtures("quick_compilation")
def test_contenders_compute_equal_outputs(name):
    compare_contenders(name, "forward")


def compare_contenders(name, direction):
    """Compare contenders without grouped heads; torch and onnxruntime only if installed."""
    options = attention._options(["--quick", "--ours", "xla", "--seconds", "0", "--repeats", "1"])
    case = small(name)
    found = attention.measure(case, direction, options, time.perf_counter)
    peers, capped = {"jax.nn", "flax", "torch"}, case.softcap is not None
    expected = dict.fromkeys(peers, "no softcap and no sinks") if capped else {}
    if importlib.util.find_spec("torch") is None:
        expected["torch"] = "torch is not installed"
    lacking = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    peers |= {"onnxruntime"}
    if direction != "forward":
        expected["onnxruntime"] = "has no gradient"
    elif capped:
        expected["onnxruntime"] = "no sinks"
    elif lacking:
        expected["onnxruntime"] = f"{lacking[0]} is not installed"
    assert found["absent"] == expected
    assert found["difference"].keys() == {"ours", "ours blockwise"} | NATIVE | (
        peers - expected.keys()
    )
    assert all(x is not None and x < 2e-5 for x in found["difference"].values())
    assert (contenders.WITHOUT in found["timings"]) == capped


def small(name, **changes):
    """Return a case over few tokens, with as many key heads as query heads."""
    case = shrunk(next(c for c in specs.ATTENTION if c.name == name))
    sizes = dict(batch=2, heads=2, kv_heads=2, head_dim=16, value_dim=16)
    return replace(case, **sizes | changes)


def in_float64(case):
    """Return output and gradients of the oracle."""
    query, key, value, *more = map(oracle.double, case.inputs())
    settings = dict(mask=case.seen()[:, None], softcap=case.softcap) | case.learned(*more)
    if case.bias == "alibi":
        slopes = 2.0 ** (-8 / case.heads * np.arange(1, case.heads + 1))
        settings["bias"] = oracle.alibi(slopes, np.arange(case.queries), np.arange(case.keys))
    cotangent = oracle.double(contenders.cotangent_of(case))
    out = oracle.attention(query, key, value, **settings).out
    back = oracle.attention_gradients(query, key, value, cotangent, None, **settings)
    found = [out, back.query, back.key, back.value]
    if case.bias == "dense":
        found.append(oracle.sum_to(back.scores, more[0].shape))
    return [*found, back.sinks] if case.sinks else found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["edge-alibi", "edge-bias", "edge-capped", "edge-documents", "edge-band", "edge-everything"],
)
@pytest.mark.usefixtures("quick_compilation")
def test_baseline_contender_matches_float64(name):
    case, options = small(name), attention._options(["--quick", "--ours", "xla"])
    call = contenders.builders(case, "forward+backward", options)["ours"]()
    for mine, expected in zip(call(), in_float64(case), strict=True):
        assert_near(mine, expected, GRADIENT_F32)


@pytest.mark.parametrize(
    "name", ["one-query", "causal", "window", "padding", "documents", "alibi", "bias"]
)
@pytest.mark.parametrize("direction", ["backward", "forward+backward"])
def test_torch_attention_matches_float64(name, direction):
    pytest.importorskip("torch")
    case = small(f"edge-{name}", kv_heads=1)
    call = contenders._torch_call(case, direction, attention._options(["--quick"]))
    expected = in_float64(case)
    for _ in range(2):
        results = [*call()]
        for found, x in zip(results, expected[-len(results) :], strict=True):
            assert_near(found, x, GRADIENT_F32)
    assert len(results) == len(expected) - (direction == "backward")


class FlashAttention:
    """Functions with the arguments of dew-flash-attn-cu13, in float64.

    A window (left, right) contains the query's own key. -1 does not bound a side.
    """

    @staticmethod
    def flash_mha(query, key, value, *, is_causal, window_size, sinks=None, ids=None):
        distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])
        left, right = window_size
        seen = (distance >= 0) | (not is_causal)
        seen &= ((distance <= left) | (left < 0)) & ((-distance <= right) | (right < 0))
        if ids is not None:
            seen &= ids[:, None] == ids
        arrays = (oracle.double(x) for x in (query, key, value))
        return oracle.attention(*arrays, mask=seen[None, None], sinks=sinks).out

    @classmethod
    def flash_mha_varlen(cls, query, key, value, starts, *, max_seqlen, **settings):
        lengths = np.diff(starts)
        assert starts[0] == 0 and starts[-1] == len(query) and max_seqlen == lengths.max()
        ids = np.repeat(np.arange(len(lengths)), lengths)
        return cls.flash_mha(query[None], key[None], value[None], ids=ids, **settings)[0]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", ["edge-causal", "edge-window", "edge-band", "edge-documents"])
def test_flash_attention_3_is_called_with_its_own_conventions(name, sinks, monkeypatch):
    monkeypatch.setitem(sys.modules, "dew_flash_attn", FlashAttention)
    case = next(c for c in specs.ATTENTION if c.name == name)
    case = replace(shrunk(replace(case, queries=case.keys)), sinks=sinks)
    inputs = [oracle.double(x) for x in case.inputs()]
    found = contenders._flash_attention_3(case)(*inputs)
    learned = {"sinks": inputs[3]} if sinks else {}
    expected = oracle.attention(*inputs[:3], mask=case.seen()[:, None], **learned).out
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("change", [dict(queries=7), dict(softcap=3.0), dict(padded=True)])
def test_flash_attention_3_refuses_what_it_cannot_compute(change, monkeypatch):
    monkeypatch.setitem(sys.modules, "dew_flash_attn", FlashAttention)
    case = replace(next(c for c in specs.ATTENTION if c.name == "edge-causal"), queries=131)
    contenders._flash_attention_3(case)
    with pytest.raises(Absent, match=r"no lengths|no softcap"):
        contenders._flash_attention_3(replace(case, **change))


def test_torch_backward_timing_excludes_forward_pass(monkeypatch):
    torch = pytest.importorskip("torch")
    passes, original = [], torch.nn.functional.scaled_dot_product_attention

    def spied(*inputs, **arguments):
        passes.append("forward")
        return original(*inputs, **arguments)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    options = attention._options(["--quick"])
    for direction, expected in (("forward", 3), ("backward", 1), ("forward+backward", 3)):
        passes.clear()
        call = contenders._torch_call(small("edge-causal"), direction, options)
        for _ in range(3):
            call()
        assert len(passes) == expected, direction


@pytest.mark.long
@pytest.mark.usefixtures("quick_compilation")
def test_goals_run_evaluates_every_goal(tmp_path, monkeypatch, capsys):
    """Run tiny cells on a CPU; the limit is the faster of two matmuls."""
    cases = [
        replace(case, batch=1, queries=16, keys=16, heads=4, kv_heads=2, head_dim=8, value_dim=8)
        for case in specs.attention_cases("gpu")
        if case.documents is None
    ]
    both, dense = "forward+backward", "causal-gqa-h128-s8192"
    chosen = {
        ("causal-16k-h64-s4096", "forward"): {"ours", "flax"},
        ("window1024-gqa-h128-s8192", both): {"ours", "jax.nn cudnn"},
        (dense, both): {"ours"},
    }
    monkeypatch.setattr(specs, "attention_cases", lambda *tags: cases)
    monkeypatch.setattr(goals, "cells", lambda: chosen)
    same = dict(read_bytes_per_s=1e9, copy_bytes_per_s=1e9)
    rates = iter([same | dict(matmul_flops_per_s=r) for r in (1e9, 4e9)])
    monkeypatch.setattr(timing, "limits", lambda dtype, clock: next(rates))
    path = tmp_path / "goals.json"
    arguments = ["--goals", "--ours", "xla", "--skip-memory", "--repeats", "1", "--seconds", "0"]
    attention.main([*arguments, "--out", str(path)])
    results = json.loads(path.read_text())["results"]
    cells = {(x["case"], x["direction"]): x for x in results["cases"]}
    assert cells.keys() == chosen.keys() and {x["ours"] for x in results["cases"]} == {"xla"}
    assert cells["causal-16k-h64-s4096", "forward"]["absent"] == {
        "flax": "flax's function has no grouped heads"
    }
    rows = {(x["case"], x["direction"], x["than"]): x for x in results["goals"]}
    assert len(results["goals"]) == len(goals.GOALS)

    def rate(cell):
        return cells[cell]["flops"] / cells[cell]["timings"]["ours"]["median_s"]

    first, window = (row for row in [*chosen][:2])
    assert rows[*first, goals.MATMUL]["ratio"] == pytest.approx(rate(first) / 4e9)
    assert rows[*first, "best peer"]["reason"].startswith("jax.nn: ")
    of_dense = rows[*window, f"rate of {dense}"]["ratio"]
    assert of_dense == pytest.approx(rate(window) / rate((dense, both)))
    missing = rows[*window, "jax.nn cudnn"]
    assert missing["ratio"] is None and "does not run on cpu" in missing["reason"]
    assert {x["reason"] for x in results["goals"] if (x["case"], x["direction"]) not in chosen} == {
        "not asked for"
    }
    assert capsys.readouterr().out.count("not asked for") > 10


@pytest.mark.slow
def test_backward_timing_excludes_forward_pass():
    case = replace(specs.attention_cases("quick")[0], queries=5, keys=5)
    options, passes = attention._options(["--quick"]), []

    def attend(query, key, value):
        jax.debug.callback(lambda: passes.append("forward"))
        return jnp.einsum("BTNH,BSNH->BTNH", query + value, key)

    def forward_passes(direction):
        passes.clear()
        call = contenders._jax_call(case, direction, options, lambda: Partial(attend), "blockwise")
        found = [np.shape(x) for _ in range(3) for x in call()]
        jax.effects_barrier()
        return len(passes), len(found) // 3

    assert forward_passes("forward") == (3, 1)
    assert forward_passes("backward") == (1, 3)
    assert forward_passes("forward+backward") == (3, 4)


@pytest.mark.slow
def test_choice_is_slow_if_median_and_most_rounds_agree(capsys):
    """For a call with 8 tokens, "xla" is chosen."""
    best = [1.0, 1.0, 1.0, 1.0, 1.0]
    rounds = {
        "slow": [1.04, 1.05, 1.2, 1.04, 0.9],
        "near": [1.02, 1.02, 1.5, 1.02, 1.02],
        "noise": [1.3, 0.8, 1.2, 0.9, 1.1],
    }
    name = "short-b1n4-h64-s8 forward"
    found = {
        label: choosing.check({name: {"xla": taken, "blockwise": best}})
        for label, taken in rounds.items()
    }
    assert found == {"slow": [name], "near": [], "noise": []}
    assert choosing.check({name: {"native": best}}) == [name]
    assert "xla was not measured" in capsys.readouterr().out


def test_quick_run_measures_few_cells():
    """Most of its time is compilation: one program per cell and contender, and for memory."""
    options = attention._options(["--quick"])
    cells = attention._selected(options, "cpu")
    assert {direction for _, direction, _ in cells} == set(attention.DIRECTIONS)
    assert len({case.name for case, *_ in cells}) == 3 and len(cells) <= 9
    assert options.repeats == 3 and options.seconds <= 3 and len(cells) * options.seconds <= 30


def test_ratio_is_labeled_as_median_over_rounds():
    """On a machine that drifts, the ratio of medians can contradict the median of ratios."""
    found = contender({"ours": 2.0, "flax": 1.0})
    for taken in found["timings"].values():
        taken["quartiles_s"] = 1.0, 2.0
    found["speedup_of_ours"] = {"flax": 2.0}
    header, *_, flax = attention._line(found, 1e9).splitlines()[2:]
    assert "ms, median" in header and "times as fast (median of rounds)" in header
    assert flax.split()[:2] == ["flax", "1000.00"] and "2.00" in flax and "x" not in flax[4:]
