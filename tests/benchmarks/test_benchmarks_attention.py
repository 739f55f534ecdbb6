"""A case of attention is the same to everyone, contenders compute the same, goals are judged."""

import contextlib
import functools
import importlib.util
import json
import sys
import time
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from benchmarks import attention, choosing, contenders, goals, specs, timing
from benchmarks.peers import Absent
from tests.support import oracle
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax.kernels import cpu

NATIVE = set() if isinstance(cpu.library(), str) else {"ours native"}
"""Who takes part on a CPU where it was compiled."""


def shrunk(case: specs.AttentionCase) -> specs.AttentionCase:
    """The case with the same mask over a few tokens."""
    return replace(
        case,
        queries=case.queries if case.queries == 1 else 31 if case.queries == case.keys else 23,
        keys=31,
        window=None if case.window is None else 7,
        documents=None if case.documents is None else 5,
    )


def test_heads_divide_and_a_batch_of_masks_fits_its_inputs():
    for case in specs.ATTENTION:
        assert case.heads % case.kv_heads == 0, case.name
        assert min(case.batch, case.queries, case.keys, case.head_dim, case.value_dim) > 0
        assert case.documents is None or case.queries == case.keys, case.name


def test_quick_cases_materialise_little():
    assert all(case.score_bytes() <= 2**26 for case in specs.attention_cases("quick"))


@pytest.mark.parametrize("name", ["edge-everything", "edge-band", "edge-padding", "edge-causal"])
def test_a_case_says_its_mask_the_same_way_to_everyone(name):
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


def test_documents_are_of_uneven_length_and_all_there():
    case = next(c for c in specs.ATTENTION if c.name == "edge-documents")
    ids = case.document_ids()
    assert ids.shape == (case.batch, case.keys)
    for row in ids:
        found, lengths = np.unique(row, return_counts=True)
        np.testing.assert_array_equal(found, np.arange(case.documents))
        assert len(set(lengths)) > 1
        assert (np.diff(row) >= 0).all()


def test_flops_count_the_seen_pairs_of_each_product():
    case = shrunk(next(c for c in specs.ATTENTION if c.name == "edge-values"))
    pairs = sum(min(t + 1, case.keys) for t in range(case.queries))
    forward = sum(2 * case.batch * case.heads * pairs * d for d in (case.head_dim, case.value_dim))
    assert case.flops("forward") == forward > 0
    assert 2 * case.flops("backward") == 5 * forward
    assert case.flops("forward+backward") == case.flops("forward") + case.flops("backward")


@pytest.fixture
def two_cases(monkeypatch):
    """Of `benchmarks.attention`, tiny, on a machine whose limits are known."""
    quick = specs.attention_cases("quick")[0]
    cases = [replace(shrunk(quick), name=name, batch=1, heads=1, kv_heads=1) for name in "ab"]
    monkeypatch.setattr(specs, "attention_cases", lambda *tags: cases)
    found = dict(matmul_flops_per_s=1e9, read_bytes_per_s=1e9, copy_bytes_per_s=1e9)
    monkeypatch.setattr(timing, "limits", lambda dtype, clock: found)


def measured(path, *options):
    """What `benchmarks.attention` leaves and says at its end."""
    arguments = ["--quick", "--skip-memory", "--seconds", "1"]
    arguments += ["--without", "torch", "onnxruntime"]
    arguments += options
    try:
        attention.main([*arguments, "--out", str(path)])
    except SystemExit as end:
        return json.loads(path.read_text())["results"], end.code
    return json.loads(path.read_text())["results"], 0


@pytest.mark.slow
def test_a_case_or_contender_that_fails_is_named_and_costs_no_other(
    tmp_path, monkeypatch, two_cases
):
    def break_case(case, name, original=contenders.ours):
        if case.name == "b":
            raise RuntimeError("no such\nkernel")
        return original(case, name)

    def broken(case):
        raise AssertionError("flax is broken")

    monkeypatch.setattr(contenders, "ours", break_case)
    monkeypatch.setattr(contenders, "_flax", broken)
    results, status = measured(tmp_path / "found.json")
    assert [found["case"] for found in results["cases"]] == ["a", "a"]
    assert {*results["failed"].values()} == {"RuntimeError: no such kernel"}
    assert status == "not measured: b forward, b forward+backward"
    absent = results["cases"][0]["absent"]
    left_out = dict.fromkeys(("torch", "onnxruntime"), "left out")
    assert absent == left_out | {"flax": "AssertionError: flax is broken"}
    assert results["limits"].keys() == {"before", "after"}
    assert (tmp_path / "found.png").stat().st_size > 10_000


def test_no_case_is_begun_once_the_minutes_are_over(tmp_path, two_cases):
    results, status = measured(tmp_path / "found.json", "--minutes", "0")
    assert results["cases"] == [] and len(results["failed"]) == 4
    assert status.startswith("not measured: a forward, a forward+backward, b")


def contender(timings, *, direction="backward", case="a", **absent):
    """What `benchmarks.attention` says of a case in which each took so many seconds."""
    summaries = {name: {"median_s": seconds} for name, seconds in timings.items()}
    ratios = {name: seconds / timings["ours"] for name, seconds in timings.items()}
    return dict(
        case=case, direction=direction, flops=6e9, timings=summaries, speedup_of_ours=ratios,
        absent=absent, difference=dict.fromkeys(timings, 0.01),
    )  # fmt: skip


def test_a_goal_is_a_ratio_to_peers_a_matmul_or_the_rate_of_another_case():
    cell = contender({"ours": 2.0, "ours pallas_unordered": 1.0, "tokamax": 3.0, "torch": 5.0})
    dense = contender({"ours": 3.0}, case="b")

    def ratio(*than, of="ours", cells=(cell, dense)):
        goal = goals.Goal(case="a", direction="backward", ratio=1.5, than=than, of=of)
        [row] = goals.reached(cells, 12e9, {}, [goal])
        return row["ratio"], row["than"]

    assert ratio("tokamax") == (1.5, "tokamax")
    assert ratio(*goals.PEERS) == (1.5, "best peer, tokamax")
    assert ratio("torch", "jax.nn") == (2.5, "torch, torch")
    assert ratio("tokamax", of="ours pallas_unordered") == (3.0, "tokamax")
    assert ratio(goals.MATMUL) == (0.25, goals.MATMUL)
    assert ratio(goals.MATMUL, of="ours pallas_unordered") == (0.5, goals.MATMUL)
    assert ratio("b") == (1.5, "rate of b")
    assert ratio("b", cells=(cell,)) == (None, "rate of b")


def test_a_goal_that_was_not_measured_says_why():
    cell = contender({"ours": 2.0}, flax="broken")
    wanted = [
        goals.Goal(case="a", direction="backward", ratio=1.5, than=("flax",)),
        goals.Goal(case="a", direction="backward", ratio=1.5, than=("flax", "torch")),
        goals.Goal(case="a", direction="backward", ratio=1.5, than=(goals.MATMUL,), of="other"),
        goals.Goal(case="a", direction="backward", ratio=0.25, than=(goals.MATMUL,)),
        goals.Goal(case="a", direction="backward", ratio=0.26, than=(goals.MATMUL,)),
        goals.Goal(case="a", direction="forward", ratio=1.5, than=("flax",)),
        goals.Goal(case="a", direction="backward", ratio=1.0, than=("torch", "tokamax")),
        goals.Goal(case="b", direction="backward", ratio=1.0, than=("torch",)),
        goals.Goal(case="a", direction="backward", ratio=1.0, than=("b",)),
    ]
    failed = {"b backward": "not begun: 8 minutes are over"}
    cell["timings"]["tokamax"], cell["speedup_of_ours"]["tokamax"] = {"median_s": 2.0}, 1.0
    rows = goals.reached([cell], 12e9, failed, wanted)
    said = [line.rsplit("  ", 1)[-1] for line in goals.table(rows, "pallas").splitlines()[3:]]
    assert said == [
        "flax: broken",
        "flax: broken; torch: does not run",
        "other: does not run",
        "reached",
        "missed",
        "not asked for",
        "reached, without torch",
        "not begun: 8 minutes are over",
        "b: not begun: 8 minutes are over",
    ]


def test_who_computes_something_else_counts_in_no_goal():
    goal = goals.Goal(case="a", direction="backward", ratio=1.5, than=("flax", "torch"))
    cell = contender({"ours": 2.0, "flax": 1.0, "torch": 3.0})

    def reached(**differences):
        cell["difference"] |= differences
        [row] = goals.reached([cell], 12e9, {}, [goal])
        return row["ratio"], row["reason"]

    assert reached() == (0.5, None)
    assert reached(flax=0.3) == (1.5, "without flax")
    assert reached(torch=None) == (None, "ours: differs from everyone")
    assert reached(torch=0.0, ours=None) == (None, "ours: not finite")


def test_a_rate_counts_only_where_both_are_right():
    goal = goals.Goal(case="a", direction="backward", ratio=1.5, than=("b",))
    cells = [
        contender({"ours": 2.0, "torch": 1.0}),
        contender({"ours": 3.0, "flax": 1.0}, case="b"),
    ]

    def reached():
        [row] = goals.reached(cells, 12e9, {}, [goal])
        return row["ratio"], row["reason"]

    assert reached() == (1.5, None)
    cells[1]["difference"]["flax"] = 0.9
    assert reached() == (None, "b: ours: differs from everyone")
    cells[0]["difference"]["ours"] = None
    assert reached() == (None, "ours: not finite")


def test_who_computes_something_else_counts_in_no_mean():
    cells = [contender({"ours": 2.0, "torch": 1.0, "flax": 8.0}) for _ in range(2)]
    cells[1] |= {"case": "b", "direction": "backward"}
    cells[1]["difference"]["torch"] = None
    means = attention.geometric_means(cells)["backward"]
    assert (means["torch"]["cells"], means["flax"]["cells"]) == (1, 2)
    assert (means["torch"]["mean"], means["flax"]["mean"]) == (0.5, 4.0)
    assert means["best peer"]["mean"] == pytest.approx(2**0.5)
    assert means["best peer"]["worst_case"] == "a"


def test_the_table_of_goals_says_whose_it_is():
    row = dict(case="a", direction="forward", of="ours", than="x", goal=1.0, ratio=2.0, reason=None)
    lines = goals.table([row], "pallas").splitlines()
    assert lines[1] == "ours is pallas" and lines[3].split()[-1] == "reached"


def test_the_goals_are_of_pallas_where_nothing_else_is_named(monkeypatch):
    asked = []

    def selected(options, platform):
        asked.append((options.ours, platform))
        return []

    found = timing.environment()
    monkeypatch.setattr(attention, "_selected", selected)
    for platform in ("gpu", "cpu"):
        monkeypatch.setattr(timing, "environment", lambda p=platform: found | {"platform": p})
        for arguments in (["--goals"], ["--goals", "--ours", "xla"], ["--quick"]):
            with pytest.raises(SystemExit, match="no case"):
                attention.main(arguments)
    assert [ours for ours, _ in asked] == ["pallas", "xla", None, None, "xla", None]


def test_goals_are_of_cells_and_contenders_that_exist(monkeypatch):
    """The names are those that run on a GPU."""
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


@pytest.mark.parametrize(
    ("platform", "given", "dtype"),
    [
        ("cpu", (), "float32"),
        ("gpu", (), "bfloat16"),
        ("cpu", ("--dtype", "float16"), "float16"),
        ("gpu", ("--dtype", "float32"), "float32"),
    ],
)
def test_cases_have_the_dtype_of_the_platform_or_the_one_that_is_given(platform, given, dtype):
    chosen = attention._selected(attention._options(["--quick", *given]), platform)
    assert {case.dtype for case, _, _ in chosen} == {dtype}


@pytest.mark.slow_cases("edge-alibi", "edge-bias", "edge-capped-forward")
@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize("name", ["edge-alibi", "edge-bias", "edge-capped"])
@pytest.mark.usefixtures("quick_compilation")
def test_contenders_differentiate_the_same_or_say_why_not(name, direction):
    compare_contenders(name, direction)


@pytest.mark.slow_cases("edge-window", "edge-band")
@pytest.mark.parametrize("name", ["edge-documents", "edge-window", "edge-band", "edge-padding"])
@pytest.mark.usefixtures("quick_compilation")
def test_contenders_see_the_same(name):
    compare_contenders(name, "forward")


def compare_contenders(name, direction):
    """Use as many key heads as flax has; torch and onnxruntime take part where installed."""
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
    """A case over a few tokens, with as many key heads as query heads."""
    case = shrunk(next(c for c in specs.ATTENTION if c.name == name))
    sizes = dict(batch=2, heads=2, kv_heads=2, head_dim=16, value_dim=16)
    return replace(case, **sizes | changes)


def in_float64(case):
    """Output and gradients by the oracle."""
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


@pytest.mark.parametrize(
    "name",
    ["edge-alibi", "edge-bias", "edge-capped", "edge-documents", "edge-band", "edge-everything"],
)
@pytest.mark.usefixtures("quick_compilation")
def test_what_contenders_are_held_against_is_what_the_case_asks_for(name):
    case, options = small(name), attention._options(["--quick", "--ours", "xla"])
    call = contenders.builders(case, "forward+backward", options)["ours"]()
    for mine, expected in zip(call(), in_float64(case), strict=True):
        assert_near(mine, expected, GRADIENT_F32)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("edge-window", {}),
        ("edge-band", {}),
        ("edge-padding", {}),
        ("edge-alibi", {}),
        ("edge-bias", {}),
        ("edge-capped", dict(sinks=False)),
    ],
)
def test_tokamax_is_asked_for_the_same(monkeypatch, name, changes):
    """By what its documentation says of its arguments: it is not installed here."""
    asked = {}

    def attend(
        query, key, value, bias=None, mask=None, *, is_causal=False, key_value_seq_lengths=None,
        local_window_size=None, logits_soft_cap=None, implementation=None,
    ):  # fmt: skip
        asked.update(implementation=implementation)
        scores = jnp.einsum("BTNH,BSNH->BNTS", query, key) / query.shape[-1] ** 0.5
        scores = scores if bias is None else scores + bias.astype(scores.dtype)
        if logits_soft_cap is not None:
            scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
        t, s = jnp.arange(scores.shape[2])[:, None], jnp.arange(scores.shape[3])[None]
        seen = jnp.ones_like(scores, bool) if mask is None else mask
        if is_causal:
            seen &= (s <= t)[None, None]
        if local_window_size is not None:
            before, after = local_window_size
            seen &= ((t - before <= s) & (s <= t + after))[None, None]
        if key_value_seq_lengths is not None:
            seen &= (s[None] < key_value_seq_lengths[:, None, None])[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        return jnp.einsum("BNTS,BSNH->BTNH", weights, value)

    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(dot_product_attention=attend))
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    case = small(name, **changes)
    options = attention._options(["--quick", "--ours", "xla"])
    call = contenders.builders(case, "forward+backward", options)["tokamax"]()
    for found, expected in zip(call(), in_float64(case), strict=True):
        assert_near(found, expected, GRADIENT_F32)
    assert asked == {"implementation": ("mosaic", "triton")}, "it may take XLA, unsaid"


def test_tokamax_is_not_asked_for_something_else(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace())
    for case, reason in (
        (small("edge-documents"), "no documents"),
        (small("edge-capped"), "no sinks"),
        (small("edge-alibi", softcap=3.0), "softcap is of the scores with their bias"),
    ):
        with pytest.raises(Absent, match=reason):
            contenders._tokamax(case)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("edge-causal", dict(queries=31)),
        ("edge-window", {}),
        ("edge-documents", {}),
        ("edge-everything", dict(padded=False, sinks=True)),
    ],
)
def test_jax_linear_attention_is_asked_for_the_same(monkeypatch, name, changes):
    """Use a stand-in with the arguments of its documentation: it is not installed here."""

    def attend(query, key, value, *, segment_ids=None, sliding_window=None, sinks=None):
        scores = jnp.einsum("BTNH,BSNH->BNTS", query, key) / query.shape[-1] ** 0.5
        t, s = jnp.arange(scores.shape[2])[:, None], jnp.arange(scores.shape[3])[None]
        seen = ((s <= t) & (t - s < (sliding_window or len(t))))[None, None]
        if segment_ids is not None:
            seen = seen & (segment_ids[:, None, :, None] == segment_ids[:, None, None])
        scores = jnp.where(seen, scores, -jnp.inf)
        sinks = jnp.full(query.shape[2], -jnp.inf) if sinks is None else sinks
        shape = (*scores.shape[:3], 1)
        with_sinks = [scores, jnp.broadcast_to(sinks[None, :, None, None], shape)]
        weights = jax.nn.softmax(jnp.concatenate(with_sinks, axis=-1), axis=-1)[..., :-1]
        return jnp.einsum("BNTS,BSNH->BTNH", weights, value)

    fake_jla(monkeypatch, attend)
    monkeypatch.setattr(contenders, "JLA_HEAD_DIMS", ((16, 16),))
    case, options = small(name, **changes), attention._options(["--quick", "--ours", "xla"])
    call = contenders.builders(case, "forward+backward", options)["jax-linear-attention"]()
    for found, expected in zip(call(), in_float64(case), strict=True):
        assert_near(found, expected, GRADIENT_F32)


def fake_jla(monkeypatch, attend):
    """Install a module in place of jax-linear-attention's attention, beside a GPU."""
    for name in ("jla", "jla.ops", "jla.ops.mosaic_gpu"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace())
    module = types.SimpleNamespace(flash_attention=attend)
    monkeypatch.setitem(sys.modules, "jla.ops.mosaic_gpu.attention", module)
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")


def test_jax_linear_attention_is_not_asked_for_something_else(monkeypatch):
    fake_jla(monkeypatch, None)
    for case, reason in (
        (small("edge-band"), "causal alone"),
        (small("edge-padding"), "causal alone"),
        (small("edge-causal"), "as many queries as keys"),
        (small("edge-alibi", queries=31), "no bias"),
        (small("edge-documents", softcap=3.0), "no softcap"),
        (small("edge-documents", head_dim=256, value_dim=256), "head dims 64, 128"),
    ):
        with pytest.raises(Absent, match=reason):
            contenders._jax_linear_attention(case)


FLEX = [
    *((f"edge-{name}", {}) for name in ("causal", "window", "band", "padding", "documents")),
    *((f"edge-{name}", {}) for name in ("alibi", "bias", "capped")),
    ("edge-everything", dict(softcap=3.0, sinks=True, kv_heads=1)),
    ("edge-everything", dict(bias="dense", softcap=3.0)),
]
"""Each mask, bias and change of the scores, alone and together."""


@pytest.mark.parametrize(("name", "changes"), FLEX)
def test_flex_attention_is_asked_for_the_same(monkeypatch, name, changes):
    """Traced but not compiled; on a processor it has no backward pass."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    case, options = small(name, **changes), attention._options(["--quick"])
    call = contenders._torch_call(case, "forward", options, "flex")
    [out] = call()
    assert_near(out, in_float64(case)[0], FORWARD_F32)


@pytest.mark.parametrize(
    "name", ["one-query", "causal", "window", "padding", "documents", "alibi", "bias"]
)
@pytest.mark.parametrize("direction", ["backward", "forward+backward"])
def test_torchs_attention_is_asked_for_the_same(name, direction):
    pytest.importorskip("torch")
    case = small(f"edge-{name}", kv_heads=1)
    call = contenders._torch_call(case, direction, attention._options(["--quick"]))
    expected = in_float64(case)
    for _ in range(2):
        results = [*call()]
        for found, x in zip(results, expected[-len(results) :], strict=True):
            assert_near(found, x, GRADIENT_F32)
    assert len(results) == len(expected) - (direction == "backward")


def test_torchs_backward_pass_is_timed_without_the_forward_pass(monkeypatch):
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


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_what_would_not_fit_is_absent():
    options = ["--quick", "--memory", "0", "--seconds", "0", "--repeats", "1"]
    options = attention._options([*options, "--ours", "blockwise"])
    for direction, name in (("forward", "edge-bias"), ("backward", "edge-documents")):
        found = attention.measure(small(name), direction, options, time.perf_counter)
        absent = found["absent"]
        assert found["timings"].keys() == {"ours"} | NATIVE and found["ours"] == "blockwise"
        for who in ("ours xla", "jax.nn", "flax"):
            assert absent.pop(who).startswith("materialised scores need")
        said = absent.pop("torch")
        assert said == "torch is not installed" or said.startswith("the mask or bias as an array")
        said = absent.pop("onnxruntime")
        assert said.startswith({"forward": "materialised", "backward": "has no"}[direction])
        assert not absent


def test_a_gradient_of_materialised_scores_needs_twice_as_much():
    case = small("edge-causal")
    room = ["--memory", str(3 * case.score_bytes() / 2**30)]
    options = attention._options(["--quick", "--ours", "xla", *room])
    contenders.builders(case, "forward", options)["ours"]()
    for direction in ("backward", "forward+backward"):
        with pytest.raises(Absent, match="materialised scores need"):
            contenders.builders(case, direction, options)["ours"]()


def test_a_case_that_would_not_fit_costs_no_other(tmp_path, two_cases):
    results, status = measured(tmp_path / "found.json", "--ours", "xla", "--memory", "0")
    assert results["cases"] == [] and status.startswith("not measured: a forward, a")
    assert len(results["failed"]) == 4
    assert all("materialised scores need" in why for why in results["failed"].values())


@pytest.mark.filterwarnings("ignore:.*ops.gpu.attention is deprecated:DeprecationWarning")
def test_jaxs_own_kernel_is_asked_for_the_same(monkeypatch):
    from jax.experimental.pallas.ops.gpu import attention as theirs

    def mha(query, key, value, ids, *, sm_scale, causal):
        scores = sm_scale * jnp.einsum("BTNH,BSNH->BNTS", query, key)
        if causal:
            scores += jnp.where(np.tri(*scores.shape[2:], dtype=bool), 0, -1e30)[None, None]
        if ids is not None:
            scores += jnp.where(ids[:, None, :, None] == ids[:, None, None], 0, -1e30)
        return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores, axis=-1), value)

    monkeypatch.setattr(theirs, "mha", mha)
    options = attention._options(["--quick"])
    for name in ("edge-causal", "edge-documents"):
        case = small(name)
        build = functools.partial(contenders._jax_pallas, case)
        call = contenders._jax_call(case, "forward+backward", options, build, "pallas")
        for found, expected in zip(call(), in_float64(case), strict=True):
            assert_near(found, expected, GRADIENT_F32)
    for name in ("edge-window", "edge-padding", "edge-alibi", "edge-capped"):
        with pytest.raises(Absent, match=r"^no "):
            contenders._jax_pallas(small(name))


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_torchs_kernels_are_asked_for_by_name(monkeypatch, name):
    torch = pytest.importorskip("torch")
    asked = []

    @contextlib.contextmanager
    def only(backend):
        asked.append(backend.name)
        yield

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", only)
    options = attention._options(["--quick"])
    contenders._torch_call(small("edge-causal"), "forward", options, name)()
    assert asked == [{"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}[name]]


def test_torchs_bias_says_the_mask_before_the_time_runs(monkeypatch):
    torch = pytest.importorskip("torch")
    case, options = small("edge-bias"), attention._options(["--quick"])
    call = contenders._torch_call(case, "forward+backward", options)
    monkeypatch.setattr(torch.Tensor, "masked_fill", None, raising=False)
    results = [*call()]
    for found, expected in zip(results, in_float64(case), strict=True):
        assert_near(found, expected, GRADIENT_F32)
    monkeypatch.undo()
    rows = replace(case, padded=True)
    with pytest.raises(Absent, match="of each row another"):
        contenders._torch_call(rows, "forward", options)


def test_temporaries_are_those_of_materialised_scores_and_of_their_gradient():
    case = replace(small("edge-alibi"), queries=256, keys=256)
    nn = functools.partial(contenders.jax_nn, implementation="xla")
    for build, least in ((nn, 3), (functools.partial(contenders.ours, name="xla"), 2)):
        assert least <= attention._temporary_bytes(case, build) / case.score_bytes() < 12


def test_the_gradient_of_the_output_is_no_constant():
    cotangent = np.asarray(contenders.cotangent_of(small("edge-causal")))
    assert len(np.unique(cotangent)) > 0.9 * cotangent.size and 0.8 < cotangent.std() < 1.2


@pytest.mark.usefixtures("quick_compilation")
def test_who_is_asked_for_and_is_not_there_is_absent_with_the_reason():
    options = attention._options(["--quick", "--ours", "xla", "--seconds", "0", "--repeats", "1"])
    who = {"ours", "ours pallas", "ours xla", "torch flex"}
    case = small("edge-causal")
    found = attention.measure(case, "forward", options, time.perf_counter, who)
    assert found["timings"].keys() == {"ours"}
    assert found["absent"] == {
        "ours pallas": contenders.explain(case)["pallas"],
        "ours xla": "is ours, by another name",
        "torch flex": "does not run on cpu",
    }
    assert found["absent"]["ours pallas"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--without ours", "--without: invalid choice: 'ours'"),
        ("--without flax touch", "--without: invalid choice: 'touch'"),
        ("--ours fused", "--ours: invalid choice: 'fused'"),
        ("--quick --goals", "--goals: not allowed with argument --quick"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(capsys, arguments, said):
    with pytest.raises(SystemExit):
        attention._options(arguments.split())
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("quick_compilation")
def test_a_run_for_the_goals_judges_each_of_them(tmp_path, monkeypatch, capsys):
    """On a processor, of cells that are tiny: against the faster of two matmuls."""
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


def test_the_backward_pass_is_timed_without_the_forward_pass():
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


def test_ours_is_what_was_asked_for_and_without_is_the_same_without_softcap_and_sinks(monkeypatch):
    case = shrunk(next(c for c in specs.ATTENTION if c.name == "edge-capped"))
    options, asked = attention._options(["--quick", "--ours", "xla"]), []

    def spied(case, name, original=contenders.ours):
        asked.append((name, case.softcap, case.sinks, case.padded))
        return original(case, name)

    monkeypatch.setattr(contenders, "ours", spied)
    calls = contenders.builders(case, "forward", options)
    outputs = {name: calls[name]()() for name in (contenders.OURS, contenders.WITHOUT)}
    assert asked == [("xla", 3.0, True, True), ("xla", None, False, True)]
    assert not np.allclose(*(np.asarray(out[0]) for out in outputs.values()))
    assert "ours xla" not in calls and "ours blockwise" in calls


def test_the_cells_of_goals_have_whom_they_compare_and_the_cases_of_other_rates():
    both = "forward+backward"
    wanted = [
        goals.Goal(case="a", direction=both, ratio=1.0, than=("flax", "torch")),
        goals.Goal(case="a", direction=both, ratio=1.0, than=("b",)),
        goals.Goal(case="a", direction="forward", ratio=1.0, than=(goals.MATMUL,), of="other"),
    ]
    assert goals.cells(wanted) == {
        ("a", both): {"ours", "flax", "torch"},
        ("b", both): {"ours", goals.WITNESS},
        ("a", "forward"): {"ours", "other"},
    }
    assert {goal.of for goal in goals.GOALS} == {"ours", goals.UNORDERED}


def test_a_learned_bias_and_sinks_are_differentiated():
    case = replace(specs.attention_cases("quick")[0], bias="dense", sinks=True, queries=5, keys=5)
    inputs = case.inputs()
    results = contenders.with_gradients(
        contenders.ours(case, "xla"), contenders.cotangent_of(case), *inputs
    )
    assert [x.shape for x in results[1:]] == [x.shape for x in inputs]
    assert results[4].shape == (1, case.heads, 5, 5) and results[5].shape == (case.heads,)
    assert all(float(jnp.abs(x).max()) > 1e-3 for x in results)


def test_a_choice_is_too_slow_where_the_median_and_three_quarters_of_the_rounds_say_so(capsys):
    """Use a call of 8 tokens, for which "xla" is chosen."""
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


@pytest.mark.slow
@pytest.mark.long
def test_a_table_of_choices_is_measured_in_pieces(tmp_path):
    path, names = tmp_path / "choosing.json", ["short-b1n4-h64-s8", "short-b1n4-h64-s16"]
    for name in names:
        assert choosing.main(["--only", name, "--out", str(path), "--seconds", "0.01"]) == 0
    rows = json.loads(path.read_text())["results"]
    assert [*rows] == [f"{name} {x}" for name in names for x in ("forward", "forward+backward")]
    assert all({"xla", "blockwise"} <= row.keys() for row in rows.values())
