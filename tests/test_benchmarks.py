"""The table of shapes is sane, the clock is fair, and what is written can be read again."""

import json
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    attention,
    contenders,
    decode,
    goals,
    load,
    serve,
    specs,
    timing,
    tune_attention,
)
from benchmarks.timing import Contender
from transformer_jax.kernels.contract import Blocks
from transformer_jax.models import init_params, num_params


def shrunk(case: specs.AttentionCase) -> specs.AttentionCase:
    """The case with the same mask over a few tokens."""
    return replace(
        case,
        queries=case.queries if case.queries == 1 else 31 if case.queries == case.keys else 23,
        keys=31,
        window=None if case.window is None else 7,
        documents=None if case.documents is None else 5,
    )


def test_names_are_unique_and_every_case_is_asked_for():
    tables = specs.ATTENTION, specs.TRAIN, specs.DECODE
    names = [case.name for cases in tables for case in cases]
    assert len(names) > 30
    assert len(set(names)) == len(names)
    assert all(case.tags for case in specs.ATTENTION)
    assert all(specs.attention_cases(tag) for tag in ("cpu", "gpu", "tpu", "quick", "edge"))


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


def test_train_flops_are_six_per_weight_and_token_at_a_short_context():
    case = specs.TRAIN[1]
    table = case.model.max_len * case.model.d_model
    weights = num_params(case.model) - table
    assert case.matmul_flops() > 6 * weights * case.tokens * 0.99
    assert case.matmul_flops() < 6 * weights * case.tokens * 1.2


def test_decoding_fits_the_cache_and_every_row_has_a_prompt():
    for case in specs.DECODE:
        assert case.prompt + case.new <= case.capacity <= case.model.max_len, case.name
        assert 1 <= case.lengths().min() <= case.lengths().max() == case.prompt, case.name
        assert case.ragged == (len(set(case.lengths())) > 1) or case.batch == 1, case.name
        assert case.tokens().shape == (case.batch, case.prompt)


def test_every_parameter_has_a_place_in_the_peers_gpt2():
    config = next(case for case in specs.DECODE if "quick" in case.tags).model
    params = init_params(config, jax.random.key(3))
    state = decode.gpt2_state(params, config.num_layers)
    head = state.pop("lm_head.weight")
    np.testing.assert_array_equal(head, params["embed"]["tokens"])
    assert sum(x.size for x in state.values()) == num_params(config)
    attention, width = params["decoder"]["block_1"]["attention"], config.d_model
    joined = state["transformer.h.1.attn.c_attn.weight"]
    for i, name in enumerate(("query", "key", "value")):
        mine = np.asarray(attention[name]["kernel"]).reshape(width, width)
        np.testing.assert_array_equal(joined[:, i * width : (i + 1) * width], mine)


@pytest.mark.usefixtures("quick_compilation")
def test_our_decoding_is_timed_until_its_tokens_are_there():
    case = next(case for case in specs.DECODE if "quick" in case.tags)
    case = replace(case, model=replace(case.model, num_layers=1))
    params = init_params(case.model, jax.random.key(3))
    peer = decode.ours(case, params)
    tokens = peer.generate(5)
    assert (tokens.shape, tokens.dtype) == ((case.batch, 5), np.int32)
    first = peer.logits().argmax(axis=-1)
    np.testing.assert_array_equal(tokens[:, 0], first)


def test_who_decodes_otherwise_is_no_peer():
    case = next(case for case in specs.DECODE if "quick" in case.tags)
    logits, tokens = np.zeros((2, 5), np.float32), np.zeros((2, case.new), np.int32)

    def peer(more_logits: float, more_tokens: int) -> decode.Peer:
        return decode.Peer(lambda new: tokens + more_tokens, lambda: logits + more_logits)

    peers = {decode.OURS: peer(0, 0), "other": peer(5e-4, 0)}
    assert decode.compare(case, peers)["other"] == pytest.approx(5e-4)
    for wrong, message in (
        (peer(2e-3, 0), "logits"),
        (peer(np.nan, 0), "logits"),
        (peer(0, 1), "tokens"),
    ):
        with pytest.raises(AssertionError, match=f"other.*{message}"):
            decode.compare(case, {decode.OURS: peer(0, 0), "other": wrong})


def test_a_token_of_decoding_leaves_out_the_prompt_and_the_first():
    taken = {
        "ours": timing.Timing((10.0, 12.0), first=99.0),
        "ours" + decode.FIRST: timing.Timing((3.0, 2.0), first=99.0),
    }
    assert decode._per_token(taken, "ours", 8) == pytest.approx([1.0, 10 / 7])


def test_the_limit_is_the_read_that_is_usually_fastest():
    lucky = timing.Timing((5.0, 1.0, 5.0), first=9.0)
    steady = timing.Timing((4.0, 4.0, 4.0), first=9.0)
    assert decode._fastest([lucky, steady]) == (4.0, 4.0, 4.0)


class Clock:
    """Time that passes only when a contender works."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, []

    def __call__(self) -> float:
        return self.now

    def contender(self, name: str, *seconds: float) -> Contender:
        """Takes the next of `seconds` each call, then the last one for ever."""
        left = list(seconds)

        def call() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return Contender(name, call)


def test_contenders_take_turns_and_the_order_reverses():
    clock = Clock()
    contenders = [clock.contender("a", 1.0), clock.contender("b", 1.0)]
    timing.interleave(contenders, rounds=2, clock=clock)
    turns = clock.calls[4:]  # after the first and the warm calls
    assert turns == ["a", "a", "b", "b", "b", "b", "a", "a"]


def test_compilation_is_reported_and_not_counted():
    clock = Clock()
    taken = timing.interleave([clock.contender("a", 50.0, 2.0)], rounds=5, clock=clock)["a"]
    assert taken.first == 50.0
    assert taken.samples == (2.0,) * 5


def test_short_calls_are_repeated_and_long_runs_cut():
    clock = Clock()
    contenders = [clock.contender("short", 0.25), clock.contender("long", 8.0)]
    taken = timing.interleave(contenders, rounds=100, seconds=68.0, sample_seconds=1.0, clock=clock)
    assert len(taken["short"].samples) == len(taken["long"].samples) == 3
    assert clock.calls.count("short") == 2 + 3 * (1 + 4)


def test_median_quartiles_and_speedup_are_those_of_the_rounds():
    ours = timing.Timing((4.0, 1.0, 2.0, 3.0, 5.0), first=9.0)
    peer = timing.Timing((8.0, 3.0, 2.0, 9.0, 10.0), first=9.0)
    assert ours.median == 3.0
    assert ours.quartiles == (2.0, 4.0)
    assert timing.speedup(ours, peer) == 2.0
    assert timing.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_contenders_of_one_name_are_refused():
    clock = Clock()
    with pytest.raises(ValueError, match="share a name"):
        timing.interleave([clock.contender("a", 1.0)] * 2, clock=clock)


def test_a_result_says_where_it_was_measured(tmp_path):
    path = tmp_path / "new" / "result.json"
    timing.write(path, "how long?", timing.environment(), {"seconds": 1.5})
    found = json.loads(path.read_text())
    assert found["results"] == {"seconds": 1.5}
    environment = found["environment"]
    assert environment["platform"] == "cpu"
    assert {"device", "cpu", "cores", "python", "commit", "xla_flags"} <= environment.keys()
    assert environment["packages"]["jax"] and environment["packages"]["flax"]


def test_a_table_aligns_its_columns():
    text = timing.table(("", "ms"), [("ours", "1.5"), ("a peer", "12.25")])
    assert text == "           ms\nours      1.5\na peer  12.25"


def test_steps_of_batches_are_counted_from_their_lengths():
    """Slot by slot: [4], [2, 3] of two slots; of batches (4, 2), (3,) the longest rows."""
    assert serve.pausing_steps([4, 2, 3], 2) == 3
    assert serve.static_steps([4, 2, 3], 2) == 3 + 2
    assert [serve.continuous_steps([4, 2, 3], 2, call) for call in (1, 2, 3)] == [3, 4, 5]
    for equal in (serve.pausing_steps([7] * 3, 3), serve.continuous_steps([7] * 3, 3, 8)):
        assert equal == serve.static_steps([7] * 3, 3) == 6
    lengths, slots = specs.SERVE[1].lengths(), specs.SERVE[1].slots
    pausing = serve.pausing_steps(lengths, slots)
    calls = serve.continuous_steps(lengths, slots, 8)
    assert lengths.sum() - len(lengths) <= slots * pausing
    assert pausing < calls < serve.static_steps(lengths, slots)


@pytest.mark.parametrize("busy", [None, 0.9])
@pytest.mark.usefixtures("quick_compilation")
def test_continuous_and_static_batching_answer_the_same_requests(busy):
    small = replace(specs.SERVE[0].model, num_layers=1, d_model=32)
    case = replace(specs.SERVE[0], model=small, busy=busy, requests=7)
    arrivals = case.arrivals(0.05)
    assert (np.diff(arrivals) >= 0).all() and (arrivals.max() > 0) == (busy is not None)
    ours = serve.continuous(case, arrivals, time.perf_counter, 8, pause=busy is None)
    static = serve.static(case, arrivals, time.perf_counter)
    for answers in (ours, static):
        assert [len(tokens) for tokens in answers.tokens] == case.lengths().tolist()
        assert (answers.latencies > 0).all()
    for mine, its in zip(ours.tokens, static.tokens, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_a_load_is_timed_and_its_memory_counted(tmp_path):
    """All of the file arrives in memory, and what it takes beside is seen too."""
    load._write(tmp_path / "model", 0.001)
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert size > 2**23
    taken = load._in_a_process(load.OURS, tmp_path / "model")
    assert taken["seconds"] > 0 and 0.5 * size < taken["peak_bytes"] < 8 * size


def test_a_loads_ratio_is_of_the_same_round():
    ours = [dict(seconds=s, peak_bytes=110) for s in (1.0, 2.0, 4.0)]
    theirs = [dict(seconds=s, peak_bytes=200) for s in (3.0, 4.0, 4.0)]
    row = load._summary("b", theirs, ours, 100)
    assert (row["ours_is_faster"], row["peak_of_file"], row["rounds"]) == (2.0, 2.0, 3)


@pytest.fixture
def two_cases(monkeypatch):
    """Of `benchmarks.attention`, tiny, on a machine whose limits are known."""
    quick = specs.attention_cases("quick")[0]
    cases = [replace(shrunk(quick), name=name, batch=1, heads=1, kv_heads=1) for name in "ab"]
    monkeypatch.setattr(specs, "attention_cases", lambda *tags: cases)
    found = dict(matmul_flops_per_s=1e9, copy_bytes_per_s=1e9)
    monkeypatch.setattr(timing, "limits", lambda dtype, clock: found)


def measured(path, *options):
    """What `benchmarks.attention` leaves and says at its end."""
    arguments = ["--quick", "--skip-memory", "--seconds", "1", "--without", "torch", *options]
    try:
        attention.main([*arguments, "--out", str(path)])
    except SystemExit as end:
        return json.loads(path.read_text())["results"], end.code
    return json.loads(path.read_text())["results"], 0


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
    assert absent == {"torch": "left out", "flax": "AssertionError: flax is broken"}
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
        [row] = goals.reached(cells, 12e9, [goal])
        return row["ratio"], row["than"]

    assert ratio("tokamax") == (1.5, "tokamax")
    assert ratio(*contenders.PEERS) == (1.5, "best peer, tokamax")
    assert ratio("torch", "jax.nn") == (2.5, "torch, torch")
    assert ratio("tokamax", of="ours pallas_unordered") == (3.0, "tokamax")
    assert ratio(goals.MATMUL) == (0.25, goals.MATMUL)
    assert ratio(goals.MATMUL, of="ours pallas_unordered") == (0.5, goals.MATMUL)
    assert ratio("b") == (1.5, "rate of b")
    assert ratio("b", cells=(cell,)) == (None, "b")


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
    ]
    cell["timings"]["tokamax"], cell["speedup_of_ours"]["tokamax"] = {"median_s": 2.0}, 1.0
    rows = goals.reached([cell], 12e9, wanted)
    said = [line.rsplit("  ", 1)[-1] for line in goals.table(rows).splitlines()[2:]]
    assert said == [
        "flax: broken",
        "flax: broken; torch: does not run",
        "other: does not run",
        "reached",
        "missed",
        "reached, without torch",
    ]


def test_who_computes_something_else_counts_in_no_goal():
    goal = goals.Goal(case="a", direction="backward", ratio=1.5, than=("flax", "torch"))
    cell = contender({"ours": 2.0, "flax": 1.0, "torch": 3.0})

    def reached(**differences):
        cell["difference"] |= differences
        [row] = goals.reached([cell], 12e9, [goal])
        return row["ratio"], row["reason"]

    assert reached() == (0.5, None)
    assert reached(flax=0.3) == (1.5, "without flax")
    assert reached(torch=None) == (None, "flax: differs by 0.3; torch: not finite")
    assert reached(torch=0.0, ours=0.5) == (None, "ours: differs by 0.5")


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


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize("name", ["edge-alibi", "edge-bias", "edge-capped"])
@pytest.mark.usefixtures("quick_compilation")
def test_contenders_differentiate_the_same_or_say_why_not(name, direction):
    compare_contenders(name, direction)


@pytest.mark.parametrize("name", ["edge-documents", "edge-window", "edge-band", "edge-padding"])
@pytest.mark.usefixtures("quick_compilation")
def test_contenders_see_the_same(name):
    compare_contenders(name, "forward")


def compare_contenders(name, direction):
    """As many key heads as flax has, and with torch where it is installed."""
    case = shrunk(next(c for c in specs.ATTENTION if c.name == name))
    case = replace(case, batch=2, heads=2, kv_heads=2, head_dim=16, value_dim=16)
    options = attention._options(["--quick", "--ours", "xla", "--seconds", "0", "--repeats", "1"])
    found = attention.measure(case, direction, options, time.perf_counter)
    absent, capped = found["absent"], case.softcap is not None
    absent.pop("torch", None)
    assert absent == (
        dict.fromkeys(["jax.nn", "flax"], "no softcap and no sinks") if capped else {}
    )
    there = {"ours", "ours blockwise"} | (set() if capped else {"jax.nn", "flax"})
    assert found["difference"].keys() - {"torch"} == there
    assert all(x is not None and x < 2e-5 for x in found["difference"].values())
    assert (contenders.WITHOUT in found["timings"]) == capped


def test_the_backward_pass_is_timed_without_the_forward_pass():
    case = replace(specs.attention_cases("quick")[0], queries=5, keys=5)
    options, passes = attention._options(["--quick"]), []

    def attend(query, key, value):
        jax.debug.callback(lambda: passes.append("forward"))
        return jnp.einsum("BTNH,BSNH->BTNH", query + value, key)

    def forward_passes(direction):
        passes.clear()
        call = contenders._jax_call(case, direction, options, lambda: attend, "blockwise")
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
        ("b", both): {"ours"},
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


def test_limits_are_those_of_this_machine(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    found = timing.limits("float32")
    x = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    x @ x
    start = time.perf_counter()
    x @ x
    alike = 2 * 1024**3 / (time.perf_counter() - start)
    assert alike / 20 < found["matmul_flops_per_s"] < alike * 20
    assert 1e8 < found["copy_bytes_per_s"] < 1e12


def test_tiles_are_read_and_written_with_their_slack():
    texts = "128:64:2", "64:192:3:8"
    tiles = tune_attention._options(["--candidates", *texts]).candidates
    assert tiles == [Blocks(128, 64, 2), Blocks(64, 192, 3, slack=8.0)]
    written = [tune_attention._written(t) for t in tiles]
    assert written == ["Blocks(128, 64, 2)", "Blocks(64, 192, 3, slack=8.0)"]
