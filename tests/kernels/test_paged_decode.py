"""The decode kernels over the pages of a pool, read through a block table."""

from __future__ import annotations

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import decode_step
from benchmarks.decode_step import large_results
from tests.support.hopper_kernels import (
    EXACT,
    NEAR,
    Case,
    assert_near,
    draw_few,
    lists_of,
    needs_interpreter,
    oracle,
    seen_by,
    window_in_document,
    within_length,
)
from tests.support.pages import in_pages
from transformer_jax import Causal, dot_product_attention
from transformer_jax.cache import kv_cache as kv
from transformer_jax.kernels import Target, ampere, chips, hopper, tpu, using
from transformer_jax.kernels.chips import HOPPER_PROCESSORS
from transformer_jax.kernels.contract import Blocks, Problem
from transformer_jax.kernels.hopper import programs
from transformer_jax.kernels.nvidia import schedule

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, for infinities
]

S = 768
FIELDS = "key", "value", "k_scale", "v_scale"


def paged(case, operands, page):
    """Return operands with keys in pages; unused pages are NaN."""
    seen = seen_by(case, operands)[..., : case.S]
    seen = np.broadcast_to(seen, (case.B, 1, case.T, case.S))
    fields = [field for field in FIELDS if getattr(operands, field) is not None]
    arrays = [getattr(operands, field)[:, : case.S] for field in fields]
    seen = seen.any(axis=(1, 2))
    *pools, table = in_pages(np.random.default_rng(7), page, seen, *arrays, unseen=77)
    pages = jnp.maximum(table, 0)
    return operands._replace(**dict(zip(fields, pools, strict=True)), pages=pages)


def run_tpu(case, operands, mask, k=128):
    tiles = Blocks(64, k)
    problem = Problem(case.scale, case.softcap, 0.0, case.visible, interpret=True)
    decode = jax.jit(functools.partial(tpu.decode, problem, blocks=tiles))
    found = decode(operands, lists_of(mask, case.T, k))
    return dict(zip(("out", "row_max", "log_sum"), found, strict=True))


def with_prefix(operands, length):
    """Return operands whose rows share a prefix."""
    alike = [x.at[:, :length].set(x[:1, :length]) for x in (operands.key, operands.value)]
    return operands._replace(key=alike[0], value=alike[1])


CASES = {
    "lengths of rows, groups of four": (
        Case(B=3, T=1, S=S, N=8, K=2, H=32, Hv=16, visible=within_length), [S, 0, 130], 128
    ),
    "float32, two tiles a page": (
        Case(B=2, T=2, S=S, N=4, K=2, H=32, Hv=32, dtype="float32", visible=within_length),
        [500, 257],
        256,
    ),
    "cap and sinks, three key heads": (
        Case(B=2, T=3, S=S, N=6, K=3, H=32, Hv=96, softcap=2.5, sinks=True, visible=within_length),
        [300, 611],
        384,
    ),
    "window in documents, bias of each key": (
        Case(B=2, T=2, S=S, N=4, K=2, H=32, Hv=32, visible=window_in_document, bias=(2, 1, 1, S)),
        None,
        128,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long_except("float32, two tiles a page")
@pytest.mark.parametrize(("case", "lengths", "page"), CASES.values(), ids=CASES)
def test_paged_decode_matches_dense_reference(case, lengths, page):
    """Rows have a common prefix, and share its pages."""
    operands = with_prefix(draw_few(case, lengths=lengths), 128)
    expected, _ = oracle(case, operands, jnp.zeros((case.B, case.T, case.N, case.Hv)))
    pool = paged(case, operands, page)
    assert pool.page == page and pool.keys == S
    got = run_tpu(case, pool, seen_by(case, operands))
    assert np.abs(expected["out"]).max() > 0.05
    near = EXACT if case.dtype == "float32" else NEAR
    for name in ("out", "row_max", "log_sum"):
        assert_near(got[name], expected[name], near if name == "out" else EXACT, name)


@pytest.mark.slow
def test_paged_cases_include_shared_and_unordered_pages():
    """The cases above cover shared pages in any order."""
    case, lengths, page = CASES["lengths of rows, groups of four"]
    lengths = [S, 128, 300]
    pool = paged(case, with_prefix(draw_few(case, lengths=lengths), 128), page)
    table = np.asarray(pool.pages)
    assert table[0, 0] == table[1, 0] == table[2, 0] and (np.diff(table[0]) < 0).any()
    assert np.isnan(np.asarray(pool.key, np.float32)).any()


each_backend = pytest.mark.parametrize("module", [hopper, ampere], ids=["hopper", "ampere"])
needs_mma = pytest.mark.skipif(not ampere.HAS_MMA, reason="jax 0.10 has no mma in Pallas")


@pytest.fixture
def few_programs(monkeypatch):
    """Run so few programs that each of them reuses its slots."""
    monkeypatch.setattr(programs, "PROGRAMS", 2)
    monkeypatch.setattr(chips, "AMPERE_PROCESSORS", 1)


GPU_CASES = {
    "lengths of rows, groups of four": (
        Case(B=3, T=1, S=S, N=8, K=2, H=32, Hv=64, visible=within_length), [S, 0, 130], 128
    ),
    "an odd number of short pages": (
        Case(B=2, T=2, S=704, N=4, K=2, softcap=2.5, sinks=True, visible=within_length),
        [660, 257],
        64,
    ),
    "window in documents, bias of each key, two tiles a page": (
        Case(B=2, T=2, S=S, N=4, K=2, visible=window_in_document, bias=(2, 1, 1, S)), None, 256
    ),
    "wide heads, pages of three copies": (
        Case(B=2, T=1, S=S, N=4, K=1, H=256, Hv=128, scale=0.06), None, 192
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long_except(
    "ampere-an odd number of short pages",
    "hopper-an odd number of short pages",
    "hopper-lengths of rows, groups of four",
)
@needs_interpreter
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("case", "lengths", "page"), GPU_CASES.values(), ids=GPU_CASES)
@each_backend
def test_paged_decode_matches_dense_reference_on_gpu(module, case, lengths, page):
    """The interpreter also detects races."""
    operands = with_prefix(draw_few(case, lengths=lengths), 128)
    expected, _ = oracle(case, operands, jnp.zeros((case.B, case.T, case.N, case.Hv)))
    got = run_gpu(module, case, operands, page)
    assert np.abs(expected["out"]).max() > 0.05
    for name in ("out", "row_max", "log_sum"):
        assert_near(got[name], expected[name], NEAR if name == "out" else EXACT, name)


def run_gpu(module, case, operands, page=None):
    """The last tile of a row may end after its last page, where the vectors continue."""
    plan = dataclasses.replace(module.blocks("decode", case.H, case.Hv), stages=2)
    lists = lists_of(seen_by(case, operands), case.T, plan.k)
    if page is not None:
        operands = paged(case, operands, page)
    decode = jax.jit(functools.partial(module.decode, case.problem, blocks=plan))
    return dict(zip(("out", "row_max", "log_sum"), decode(operands, lists), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "tile", "consumers"),
    [("hopper", 128, 2), pytest.param("ampere", 64, 1, marks=needs_mma)],
)
def test_paged_and_contiguous_rows_have_same_split_count(backend, tile, consumers):
    """Traced: pages of 64 are read in place, those of 96 are gathered."""
    B, S, N, K, H = 2, 1152, 8, 2, 64
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731

    def text(page):
        table = None if page is None else jnp.zeros((B, S // page), jnp.int32)
        pool = struct(B, S, K, H) if page is None else struct(29, page, K, H)
        settings = dict(mask=Causal(), block_table=table, implementation="pallas")
        attend = functools.partial(dot_product_attention, **settings)
        with using(Target(backend, processors=7)):
            return str(jax.make_jaxpr(attend)(struct(B, 1, N, H), pool, pool))

    parts = schedule.key_parts(B * K, S // tile, 7)
    assert parts > 1
    for page in (None, 64, 96):
        found = text(page)
        assert f"f32[{B * K * parts * consumers},8,{H}]" in found
        assert (f"bf16[{B},{S},{K},{H}]" in found) == (page != 64)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.usefixtures("few_programs")
@each_backend
def test_int8_pages_match_contiguous_rows_bitwise_on_gpu(module):
    case = Case(B=2, T=2, S=384, N=4, K=2, H=32, Hv=96, visible=within_length)
    operands = draw_few(case, lengths=[384, 130])
    (key, k_scale), (value, v_scale) = (kv.quantize(x) for x in (operands.key, operands.value))
    quantized = operands._replace(key=key, value=value, k_scale=k_scale, v_scale=v_scale)
    expected, got = (run_gpu(module, case, quantized, page) for page in (None, 192))
    for name, x in got.items():
        np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (x, expected[name])))


@pytest.mark.slow
@pytest.mark.long_except("slots first")
@pytest.mark.parametrize("heads", [4, 3], ids=["slots first", "heads first"])
def test_int8_pages_match_contiguous_rows_bitwise(heads):
    case = Case(B=2, T=2, S=S, N=2 * heads, K=heads, H=32, Hv=96, visible=within_length)
    operands = draw_few(case, lengths=[S, 130])
    (key, k_scale), (value, v_scale) = (kv.quantize(x) for x in (operands.key, operands.value))
    quantized = operands._replace(key=key, value=value, k_scale=k_scale, v_scale=v_scale)
    mask = seen_by(case, operands)
    expected, got = (run_tpu(case, x, mask) for x in (quantized, paged(case, quantized, 384)))
    for name, x in got.items():
        np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (x, expected[name])))


@pytest.mark.slow_except("bfloat16-")
@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_paged_decode_lowers_for_tpu_and_traces_for_gpus(dtype, x64):
    def attend(query, key, value, scale, table):
        scales = dict(key_scale=scale, value_scale=scale) if dtype == jnp.int8 else {}
        settings = dict(mask=Causal(), block_table=table, implementation="pallas") | scales
        return dot_product_attention(query, key, value, **settings)

    pool = jax.ShapeDtypeStruct((7, 256, 2, 128), dtype)
    scale, table = (
        jax.ShapeDtypeStruct((7, 256, 2), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.int32)
    )  # fmt: skip
    query = jax.ShapeDtypeStruct((2, 2, 2, 128), jnp.bfloat16)
    with jax.enable_x64(x64):
        with using(Target("tpu", chip="TPU v5e")):
            traced = jax.jit(attend).trace(query, pool, pool, scale, table)
            text = traced.lower(lowering_platforms=("tpu",)).as_text()
        for backend in ("hopper",) + ("ampere",) * ampere.HAS_MMA:
            with using(Target(backend)):
                out = jax.eval_shape(attend, query, pool, pool, scale, table)
            assert out.shape == query.shape
    assert "attention_decode" in text


@pytest.mark.slow
def test_page_size_not_divisible_by_tile_is_rejected():
    case = CASES["lengths of rows, groups of four"][0]
    operands = draw_few(case)
    with pytest.raises(ValueError, match="page=384 must be a multiple of the tile, 256 keys"):
        run_tpu(case, paged(case, operands, 384), seen_by(case, operands), k=256)


# Compiled for chips that are not attached


READABLE = pytest.mark.skipif(
    not hopper.HAS_JAX_11,
    reason="jaxlib 0.10 cannot read libtpu's output for a loop with asynchronous copies",
)


@pytest.mark.slow
@pytest.mark.long_except("v5e:2x2-8-128-bfloat16")
@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize(
    ("topology", "K", "page", "dtype"),
    [
        ("v5e:2x2", 1, 128, jnp.bfloat16),
        ("v5e:2x2", 2, 128, jnp.float32),
        ("v5e:2x2", 4, 256, jnp.bfloat16),
        ("v5e:2x2", 8, 128, jnp.bfloat16),
        ("v5e:2x2", 8, 256, jnp.int8),
        pytest.param("v6e:2x2", 8, 128, jnp.bfloat16, marks=READABLE),
        pytest.param("tpu7x:2x2x1", 8, 128, jnp.bfloat16, marks=READABLE),
    ],
)
def test_paged_decode_step_does_not_copy_pool(topology, K, page, dtype):
    """Only two writes and an in-place loop that copies pages have the size of a pool."""
    pytest.importorskip("libtpu", reason="libtpu compiles for TPUs that are not attached")
    from jax.experimental import topologies

    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # otherwise it locks a file
    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    with using(Target("tpu", chip="TPU")):
        step, numbers = decode_step.lowered_over_pages(
            jax.sharding.SingleDeviceSharding(device), page, dtype, K=K
        )
        step = step.compile()
    text = step.as_text()
    assert "attention_decode" in text
    large = large_results(text, numbers)
    assert sorted(large) == [("fusion", True), ("fusion", True), ("while", False)]
    memory = step.memory_analysis()
    scales = numbers // (K * 128) * 128 * 4 * (dtype == jnp.int8)  # written in another order
    assert memory.temp_size_in_bytes < scales + 0.05 * numbers
    assert memory.alias_size_in_bytes >= 2 * numbers * jnp.dtype(dtype).itemsize


@pytest.mark.long
@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("page", [64, 256])
def test_paged_decode_step_does_not_copy_pool_on_hopper(page, dtype, monkeypatch):
    """The loop belongs to `update`, which copies shared pages."""
    reason = "jax[cuda13] compiles for GPUs that are not attached"
    pytest.importorskip("jax_cuda13_plugin", reason=reason)
    from benchmarks import compile_gpu

    monkeypatch.setattr(programs, "PROGRAMS", HOPPER_PROCESSORS)
    place = jax.sharding.SingleDeviceSharding(compile_gpu.device())
    with using(Target("hopper", chip="NVIDIA H200")), compile_gpu.context():
        step, numbers = decode_step.lowered_over_pages(place, page, dtype)
        step = step.compile()
    large = [kind for kind, _ in large_results(step.as_text(), numbers)]
    assert sorted(large) == ["fusion", "fusion", "while"]
    memory = step.memory_analysis()
    assert memory.temp_size_in_bytes < 8e6  # the pools have 537 MB
    assert memory.alias_size_in_bytes >= 2 * numbers * jnp.dtype(dtype).itemsize


@pytest.mark.long
@pytest.mark.parametrize("H", [128, 256])
def test_paged_kernel_spills_no_registers_on_hopper(H):
    reason = "jax[cuda13] compiles for GPUs that are not attached"
    pytest.importorskip("jax_cuda13_plugin", reason=reason)
    from benchmarks import compile_gpu

    problem, table = Problem(scale=H**-0.5, visible=compile_gpu.causal), (compile_gpu.B, 2)
    found = compile_gpu.compile_one("decode", H, H, problem, pages=(table, jnp.int32))
    assert found.spills == (0, 0)
