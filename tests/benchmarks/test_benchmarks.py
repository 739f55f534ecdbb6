"""Benchmarks: shapes, fair timing, and result files."""

import importlib
import json
import pkgutil
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

import benchmarks
from benchmarks import (
    decode,
    gpt2_peers,
    load,
    processor,
    serve,
    specs,
    timing,
    tune_attention,
)
from benchmarks.timing import Contender
from transformer_jax.kernels import cpu
from transformer_jax.kernels.contract import Blocks
from transformer_jax.models.factory import init_params, num_params
from transformer_jax.models.quantized import quantize


@pytest.mark.slow
def test_every_benchmark_can_be_imported():
    """Some scripts run only on a GPU, or with packages that tests do not install."""
    found = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
    assert "benchmarks.compile_gpu" in found
    for name in found:
        importlib.import_module(name)


def test_training_uses_six_flops_per_weight_per_token():
    case = specs.TRAIN[1]
    table = case.model.max_len * case.model.d_model
    weights = num_params(case.model) - table
    assert case.matmul_flops() > 6 * weights * case.tokens * 0.99
    assert case.matmul_flops() < 6 * weights * case.tokens * 1.2


@pytest.mark.slow
def test_every_parameter_maps_to_peer_gpt2():
    config = next(case for case in specs.DECODE if "quick" in case.tags).model
    params = init_params(config, jax.random.key(3))
    state = gpt2_peers.gpt2_state(params, config.num_layers)
    head = state.pop("lm_head.weight")
    np.testing.assert_array_equal(head, params["embed"]["tokens"])
    assert sum(x.size for x in state.values()) == num_params(config)
    attention, width = params["decoder"]["block_1"]["attention"], config.d_model
    joined = state["transformer.h.1.attn.c_attn.weight"]
    for i, name in enumerate(("query", "key", "value")):
        mine = np.asarray(attention[name]["kernel"]).reshape(width, width)
        np.testing.assert_array_equal(joined[:, i * width : (i + 1) * width], mine)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_decoding_call_returns_finished_tokens():
    case = next(case for case in specs.DECODE if "quick" in case.tags)
    case = replace(case, model=replace(case.model, num_layers=1))
    params = init_params(case.model, jax.random.key(3))
    peer = decode.ours(case, params)
    tokens = peer.generate(5)
    assert (tokens.shape, tokens.dtype) == ((case.batch, 5), np.int32)
    first = peer.logits().argmax(axis=-1)
    np.testing.assert_array_equal(tokens[:, 0], first)


@pytest.mark.slow
def test_bytes_per_token_include_stored_weights_and_one_embedding_table():
    case = next(case for case in specs.DECODE if "quick" in case.tags)
    params = init_params(case.model, jax.random.key(3))
    state = gpt2_peers.gpt2_state(params, case.model.num_layers)
    read = num_params(case.model) - case.model.max_len * case.model.d_model
    assert gpt2_peers.token_bytes(state, 4, 4) == 4 * read
    assert decode.ours(case, params).token_bytes == 4 * read
    assert decode.ours(case, quantize(params, "bf16")).token_bytes == 2 * read
    kernels = [x.size for name, x in state.items() if x.ndim == 2 and ".h." in name]
    outputs = [x.shape[1] for name, x in state.items() if x.ndim == 2 and ".h." in name]
    expected = 4 * read - 3 * sum(kernels) + 4 * sum(outputs)
    assert decode.ours(case, quantize(params, "int8")).token_bytes == expected


def test_fastest_measured_read_has_smallest_median():
    lucky = timing.Timing((5.0, 1.0, 5.0), first=9.0)
    steady = timing.Timing((4.0, 4.0, 4.0), first=9.0)
    assert timing.fastest([lucky, steady]) == steady


class Clock:
    """Clock that advances only while a contender runs."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, []

    def __call__(self) -> float:
        return self.now

    def contender(self, name: str, *seconds: float) -> Contender:
        """Return a contender whose calls take `seconds` in turn, then always the last of them."""
        left = list(seconds)

        def call() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return Contender(name, call)


def test_contenders_run_in_alternating_order():
    clock = Clock()
    contenders = [clock.contender("a", 1.0), clock.contender("b", 1.0)]
    timing.interleave(contenders, rounds=2, clock=clock)
    turns = clock.calls[4:]  # without the first call and the warm-up call of each
    assert turns == ["a", "a", "b", "b", "b", "b", "a", "a"]


def test_compilation_is_reported_separately():
    clock = Clock()
    taken = timing.interleave([clock.contender("a", 50.0, 2.0)], rounds=5, clock=clock)["a"]
    assert taken.first == 50.0
    assert taken.samples == (2.0,) * 5


def test_short_calls_are_repeated_and_slow_runs_stop_early():
    clock = Clock()
    contenders = [clock.contender("short", 0.25), clock.contender("long", 8.0)]
    taken = timing.interleave(contenders, rounds=100, seconds=68.0, sample_seconds=1.0, clock=clock)
    assert len(taken["short"].samples) == len(taken["long"].samples) == 3
    assert clock.calls.count("short") == 2 + 3 * (1 + 4)


def test_median_quartiles_and_speedup_are_computed_over_rounds():
    ours = timing.Timing((4.0, 1.0, 2.0, 3.0, 5.0), first=9.0)
    peer = timing.Timing((8.0, 3.0, 2.0, 9.0, 10.0), first=9.0)
    assert ours.median == 3.0
    assert ours.quartiles == (2.0, 4.0)
    assert timing.speedup(ours, peer) == 2.0
    assert timing.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_result_records_its_environment(tmp_path):
    path = tmp_path / "new" / "result.json"
    measured = timing.environment() | {"limits": {"matmul_flops_per_s": 1e9}}
    timing.write(path, "how long?", measured, {"seconds": 1.5})
    found = json.loads(path.read_text())
    assert found["results"] == {"seconds": 1.5}
    environment = found["environment"]
    assert environment["platform"] == "cpu"
    assert {"device", "cpu", "cores", "python", "commit", "xla_flags"} <= environment.keys()
    assert environment["packages"]["jax"] and environment["packages"]["flax"]
    assert environment["limits"] == {"matmul_flops_per_s": 1e9}
    with pytest.raises(ValueError, match="environment lacks limits"):
        timing.write(path, "how long?", timing.environment(), {})


def test_processor_supports_compiled_kernels():
    """Linux reports every instruction set that the kernels use; results store the processor."""
    found = timing.environment()
    assert found["processor"] == processor.processor()
    needed = {
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx2": {"avx2", "fma"},
        "neon": {"asimd"},
        "plain": set[str](),
    }
    kernels = found["compiled_kernels"]
    sets = set() if isinstance(cpu.library(), str) else needed[kernels]
    assert sets <= set(found["processor"]["instruction_sets"] or [])


def test_batching_steps_follow_from_lengths():
    """Two slots run [4] and [2, 3]; the batches (4, 2) and (3,) take their longest rows."""
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


@pytest.mark.long
@pytest.mark.parametrize("busy", [None, 0.9])
@pytest.mark.usefixtures("quick_compilation")
def test_continuous_and_static_batching_return_equal_answers(busy):
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


@pytest.mark.long
def test_loading_time_and_peak_memory_are_measured(tmp_path):
    """The peak includes the whole file and temporary memory."""
    load._write(tmp_path / "model", 0.001)
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert size > 2**23
    taken = load._in_a_process(load.OURS, tmp_path / "model")
    assert taken["seconds"] > 0 and 0.5 * size < taken["peak_bytes"] < 8 * size


def test_tile_options_with_slack_round_trip():
    texts = "128:64:2", "64:192:3:8"
    tiles = tune_attention._options(["--candidates", *texts]).candidates
    assert tiles == [Blocks(128, 64, 2), Blocks(64, 192, 3, slack=8.0)]
    written = [tune_attention._written(t) for t in tiles]
    assert written == ["Blocks(128, 64, 2)", "Blocks(64, 192, 3, slack=8.0)"]
