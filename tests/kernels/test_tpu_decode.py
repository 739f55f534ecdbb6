"""The TPU decode kernel against NumPy in float64 in the interpreter, and compiled without a TPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.decode_step import large_results
from tests.support import few_queries
from tests.support.attention_suite import reference
from tests.support.few_queries import program
from tests.support.hopper_kernels import (
    EXACT,
    NEAR,
    Case,
    assert_near,
    causal,
    draw_few,
    lists_of,
    oracle,
    seen_by,
    window_in_document,
    within_length,
)
from transformer_jax import Causal, Dense, Window, dot_product_attention, explain_attention
from transformer_jax.cache import kv_cache as kv
from transformer_jax.kernels import Target, tpu, using
from transformer_jax.kernels.contract import Blocks, Problem
from transformer_jax.kernels.packed_queries import PackedQueries
from transformer_jax.kernels.tpu.visits import flatten

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, for infinities
]

kernel = importlib.import_module(
    "transformer_jax.kernels.tpu.decode"
)  # hidden by the function of the same name
S, TILES, WHERE = 331, Blocks(64, 128), Target("tpu", True)


def run(case, operands, tiles=TILES, mask=None):
    problem = Problem(case.scale, case.softcap, 0.0, case.visible, interpret=True)
    mask = seen_by(case, operands) if mask is None else mask
    decode = jax.jit(functools.partial(tpu.decode, problem, blocks=tiles))
    found = decode(operands, lists_of(mask, case.T, tiles.k))
    return dict(zip(("out", "row_max", "log_sum"), found, strict=True))


def ends_in_a_tile(operands, length=S):
    """Return operands without padding: the interpreter fills the rest of a tile with NaN."""
    return operands._replace(key=operands.key[:, :length], value=operands.value[:, :length])


CASES = {
    "causal, one query, no groups": (Case(T=1, S=S, N=2, K=2, H=32, Hv=32), None),
    "causal, four queries, groups of four, float32": (
        Case(T=4, S=S, N=8, K=2, H=32, Hv=16, dtype="float32"), None
    ),
    "three key heads, window in documents": (
        Case(B=2, T=4, S=S, N=6, K=3, H=32, Hv=96, visible=window_in_document), None
    ),
    "lengths of rows": (Case(B=3, T=1, S=S, N=4, K=1, visible=within_length), [S, 0, 130]),
    "no mask, negative scale": (Case(T=3, S=256, visible=None, scale=-0.1), None),
    "sixty-four rows": (Case(T=8, S=S, N=8, K=1), None),
    "cap, sinks and a bias of each head and query": (
        Case(T=4, S=S, N=4, K=2, softcap=2.5, sinks=True, bias=(1, 4, 4, S), bias_dtype="bfloat16"),
        None,
    ),
    "bias of each key": (Case(B=2, T=2, S=S, bias=(2, 1, 1, S), sinks=True), None),
    "bias of each query": (Case(T=3, S=S, N=4, K=2, bias=(1, 1, 3, S)), None),
    "bias of each head": (Case(T=2, S=S, N=4, K=2, bias=(1, 4, 1, 1)), None),
    "slopes and lengths": (
        Case(B=2, T=2, S=S, N=4, K=2, slopes=True, visible=within_length), [7, 300]
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long_except("cap, sinks and a bias of each head and query")
@pytest.mark.parametrize(("case", "lengths"), CASES.values(), ids=CASES)
def test_decode_matches_dense_reference(case, lengths):
    operands = draw_few(case, lengths=lengths)
    expected, _ = oracle(case, operands, jnp.zeros((case.B, case.T, case.N, case.Hv)))
    if case.visible is not None:
        operands = ends_in_a_tile(operands)
    got = run(case, operands, mask=seen_by(case, draw_few(case, lengths=lengths)))
    assert np.abs(expected["out"]).max() > 0.05
    near = EXACT if case.dtype == "float32" else NEAR
    for name in ("out", "row_max", "log_sum"):
        assert_near(got[name], expected[name], near if name == "out" else EXACT, name)
    assert got["out"].dtype == operands.query.dtype


@pytest.mark.long
@pytest.mark.parametrize("heads", [16, 6], ids=["slots first", "heads first"])
def test_tiles_covering_some_key_heads_match_reference(heads, monkeypatch):
    case = Case(B=2, T=2, S=S, N=2 * heads, K=heads, H=32, Hv=32, bias=(1, 2 * heads, 1, S))
    operands = draw_few(case)
    expected, _ = oracle(case, operands, jnp.zeros((2, 2, 2 * heads, 32)))
    assert kernel.tile_of_heads(operands, 128) == (heads, heads == 16)
    monkeypatch.setattr(kernel, "TPU_FEW_BYTES", 2 * 128 * 256 * heads // 2)
    assert kernel.tile_of_heads(operands, 128) == (heads // 2, heads == 16)
    for name, x in run(case, operands).items():
        assert_near(x, expected[name], NEAR if name == "out" else EXACT, name)


@pytest.mark.parametrize("heads", [2, 3], ids=["slots first", "heads first"])
def test_every_tile_is_inside_its_array(heads):
    """An interpreter moves a tile inside, but a copy on a TPU would read other memory."""
    case = Case(B=2, T=3, S=384, N=2 * heads, K=heads, bias=(1, 2 * heads, 1, 384), sinks=True)
    operands = draw_few(case)
    lists = kernel.of_all_heads(lists_of(seen_by(case, operands), case.T, 128), case.B)
    visits = flatten(lists)
    x = kernel._laid_out(PackedQueries(3, 2, 8).operands(operands), 128)
    walk = kernel.Walk(visits.packing, 128, *kernel.tile_of_heads(operands, 128))
    assert walk.slots_first == (heads == 2)
    numbers, specs = np.asarray(visits.numbers).ravel(), jax.tree.leaves(walk.specs(x))
    for spec, array in zip(specs, jax.tree.leaves(x), strict=True):
        for group, at in np.ndindex(heads // walk.heads, len(numbers)):
            index = spec.index_map(group, at, numbers)
            for i, size, length in zip(index, spec.block_shape, array.shape, strict=True):
                assert 0 <= i * (1 if size is None else size) < length, (spec, index)


@pytest.mark.slow
def test_fully_masked_rows_are_zero():
    case = Case(B=2, T=2, S=S, N=4, K=2, visible=within_length, sinks=True)
    got = run(case, draw_few(case, lengths=[0, 5]))
    assert not np.asarray(got["out"], np.float32)[0].any()
    assert np.isneginf(got["row_max"])[0].all() and not np.asarray(got["log_sum"])[0].any()
    assert np.isfinite(got["row_max"])[1].all()


@pytest.mark.slow
def test_softcap_matches_reference_when_products_overflow():
    case = Case(T=1, S=200, N=2, K=1, softcap=3.0, visible=causal)
    operands = draw_few(case)
    query = operands.query.at[..., 0].set(3e38)
    key = operands.key.at[:, :100, :, 0].set(3e38).at[:, 100:, :, 0].set(-3e38)
    got = run(case, operands._replace(query=query, key=key))
    weight = np.exp(np.where(np.arange(200) < 100, 3.0, -3.0))
    value = np.asarray(operands.value, np.float32)[0, :200, 0]
    assert_near(got["out"][0, 0], (weight / weight.sum() @ value)[None].repeat(2, 0), NEAR, "out")


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 3], ids=["slots first", "heads first"])
def test_tiles_missing_from_list_are_not_read(heads):
    """No mask hides the NaN in all other keys and values."""
    case = Case(B=2, T=1, S=384, N=2 * heads, K=heads, visible=None)
    operands = draw_few(case)
    tiles = np.array([[1, 0, 1], [0, 1, 0]], bool)
    listed = tiles.repeat(128, axis=1)
    key, value = (
        jnp.where(jnp.asarray(listed)[:, :, None, None], x, jnp.nan)
        for x in (operands.key, operands.value)
    )
    got = run(case, operands._replace(key=key, value=value), mask=listed[:, None, None])["out"]
    q, k, v = (
        np.asarray(x, np.float64)
        for x in (operands.query.reshape(2, heads, 2, -1), operands.key, operands.value)
    )
    scores = np.einsum("bkgh,bskh->bkgs", q, k) * case.scale
    weight = np.where(listed[:, None, None], np.exp(scores), 0)
    weight = weight / weight.sum(axis=-1, keepdims=True)
    assert_near(got, np.einsum("bkgs,bskh->bkgh", weight, v).reshape(got.shape), NEAR, "out")


# int8


@pytest.mark.slow
@pytest.mark.long_except("heads first")
@pytest.mark.parametrize("heads", [4, 3], ids=["slots first", "heads first"])
def test_int8_cache_matches_dequantized_reference(heads):
    """Keys, values and scales end within a tile; the interpreter reads NaN past the end."""
    case = Case(B=2, T=2, S=S, N=2 * heads, K=heads, H=32, Hv=96, visible=within_length)
    operands = draw_few(case, lengths=[S, 130])
    (key, k_scale), (value, v_scale) = (kv.quantize(x) for x in (operands.key, operands.value))
    wide = [kv.dequantize(key, k_scale), kv.dequantize(value, v_scale)]
    expected, _ = oracle(
        case, operands._replace(key=wide[0], value=wide[1]), jnp.zeros((2, 2, 2 * heads, 96))
    )
    quantized = operands._replace(key=key, value=value, k_scale=k_scale, v_scale=v_scale)
    mask = seen_by(case, operands)
    got = run(
        case, quantized._replace(**{n: getattr(quantized, n)[:, :S] for n in KEYS}), mask=mask
    )
    out = np.asarray(got["out"], np.float32)
    assert np.abs(expected["out"]).max() > 0.05
    assert_near(out, expected["out"], NEAR, "out")


KEYS = "key", "value", "k_scale", "v_scale"


# Around the kernel


arrays_of = functools.partial(few_queries.arrays_of, 32)


@pytest.mark.slow_except("1-options3-forward")
@pytest.mark.parametrize(("T", "options", "kernel"), few_queries.KERNELS)
def test_few_queries_without_dropout_use_decode_kernel(T, options, kernel):
    attend, inputs = program(arrays_of(T), mask=Causal(), **options)
    with using(WHERE):
        text = str(jax.make_jaxpr(attend)(*inputs))
        assert explain_attention(*inputs, mask=Causal(), **options)["pallas"] is None
    assert [name for name in ("decode", "forward") if f"attention_{name}" in text] == [kernel]


def test_differentiated_few_query_call_uses_forward_kernel():
    attend, inputs = program(arrays_of(), mask=Causal(), return_lse=False)
    gradient = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum())
    with using(WHERE):
        text = str(jax.make_jaxpr(gradient)(*inputs))
    assert "attention_forward" in text and "attention_decode" not in text


@pytest.mark.slow
def test_per_head_masks_match_reference():
    arrays = arrays_of(3, keys=300)
    halves = np.arange(300) // 128 == np.arange(8)[None, :, None, None] % 2
    seen = np.broadcast_to(halves.repeat(3, 2), (2, 8, 3, 300))
    attend, inputs = program(arrays, mask=Dense(jnp.asarray(seen[:1])))
    with using(dataclasses.replace(WHERE, blocks=(("decode", TILES),))):
        out, lse = jax.jit(attend)(*inputs)
    expected = reference(arrays, seen)
    assert_near(out, expected["out"], NEAR, "out")
    assert_near(lse, expected["lse"], EXACT, "lse")


def test_vmap_folds_mapped_axis_into_batch_axis():
    attend, (query, key, value) = program(arrays_of(), mask=Causal())
    with using(WHERE):
        mapped = jax.vmap(attend, (0, None, 0))
        inputs = jnp.stack([query] * 3), key, jnp.stack([value] * 3)
        out, lse = jax.eval_shape(mapped, *inputs)
        text = str(jax.make_jaxpr(mapped)(*inputs))
    assert out.shape == (3, *query.shape) and lse.shape == (3, 2, 1, 8)
    assert "attention_decode" in text


@pytest.mark.slow
@pytest.mark.long_except("5")
@pytest.mark.parametrize("sinks", [0, 5])
def test_decode_supports_any_ring_buffer_order(sinks):
    with using(dataclasses.replace(WHERE, blocks=(("decode", TILES),))):
        found, expected = few_queries.token_over_a_ring(32, 320, 200, sinks)
    assert_near(found["out"], expected["out"], NEAR, "out")
    assert_near(found["lse"], expected["lse"], EXACT, "lse")


def copies(lengths, capacity, k=512):
    """Return the tiles that the pipeline copies: those whose index differs from the last one."""
    at = jnp.arange(capacity)[None]
    positions = jnp.where(at < jnp.asarray(lengths)[:, None], at, -1)  # in a cache
    queries = jnp.asarray(lengths)[:, None]
    plan = Causal().block_plan(queries, positions, block_q=1, block_k=k)
    lists = kernel.of_all_heads(plan.of_first_queries(1).key_tiles(), len(lengths))
    visits = flatten(lists)
    steps = np.asarray(visits.numbers)[0, 0, : int(visits.longest)]
    struct = jax.ShapeDtypeStruct((len(lengths), capacity, 8, 128), jnp.bfloat16)
    spec = kernel.Walk(visits.packing, k, 8, True).spec("slots", struct.shape)
    places = [tuple(int(n) for n in spec.index_map(0, step, steps)) for step in range(len(steps))]
    return [a for a, b in zip(places, [None, *places], strict=False) if a != b], len(steps)


@pytest.mark.slow
def test_tile_copies_do_not_depend_on_cache_capacity():
    lengths = [1, 512, 2800, 0]
    found = [copies(lengths, capacity) for capacity in (4096, 32768, 4000)]
    assert found[0] == found[1] == found[2]
    tiles, steps = found[0]
    assert steps == len(tiles) == 1 + 1 + 6 + 1  # a row without keys has one step, which writes 0
    assert tiles[2:8] == [(2, j, 0, 0) for j in (0, 1, 2, 3, 4, 5)]


@pytest.mark.slow
def test_copied_bytes_equal_filled_cache_size():
    lengths = np.random.default_rng(3).integers(6000, 30000, 8)
    tiles, _ = copies(lengths, 32768)
    assert lengths.sum() <= 512 * len(tiles) <= 1.1 * lengths.sum()


@pytest.mark.slow
def test_grid_has_one_step_per_listed_tile(monkeypatch):
    grids, pallas_call = [], kernel.pl.pallas_call

    def recorded(*args, grid_spec, **more):
        grids.append(grid_spec.grid)
        return pallas_call(*args, grid_spec=grid_spec, **more)

    monkeypatch.setattr(kernel.pl, "pallas_call", recorded)
    case = Case(B=3, T=1, S=384, N=2, K=1, H=32, Hv=32, visible=within_length)
    operands = draw_few(case, lengths=[384, 0, 130])
    lists = lists_of(seen_by(case, operands), 1, 128)
    tpu.decode(Problem(case.scale, visible=case.visible, interpret=True), operands, lists, TILES)
    assert [tuple(map(int, grid)) for grid in grids] == [(1, 3 + 1 + 2)]


@pytest.mark.slow_except("bfloat16-")
@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_decode_kernel_lowers_for_tpu(dtype, x64):
    def attend(query, key, value, scale):
        scales = dict(key_scale=scale, value_scale=scale) if dtype == jnp.int8 else {}
        settings = dict(mask=Causal(), implementation="pallas") | scales
        return dot_product_attention(query, key, value, **settings)

    struct = lambda n, dtype: jax.ShapeDtypeStruct((2, n, 2, 128), dtype)  # noqa: E731
    with jax.enable_x64(x64), using(Target("tpu", chip="TPU v5e")):
        arrays = struct(2, jnp.bfloat16), *[struct(512, dtype)] * 2
        scale = jax.ShapeDtypeStruct((2, 512, 2), jnp.float32)
        traced = jax.jit(attend).trace(*arrays, scale)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "attention_decode" in text


# Compiled for TPUs that are not attached


def compiled_step(topology, K, capacity, dtype=jnp.bfloat16, window=None, B=8, H=128):
    """Compile a step that writes one token per row into a cache, and attends to the filled part."""
    pytest.importorskip("libtpu", reason="libtpu compiles for TPUs that are not attached")
    from jax.experimental import topologies

    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # otherwise it locks a file
    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # noqa: E731
    cache = jax.eval_shape(lambda: kv.init(B, capacity, K, H, dtype=dtype))
    cache = jax.tree.map(lambda x: struct(x.shape, x.dtype), cache)
    wide = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    query, new = (struct((B, 1, heads, H), wide) for heads in (4 * K, K))

    def step(cache, query, new):
        at = cache.length[:, None]
        cache, seen = kv.extend_quantized(cache, new, new, at, window)
        mask = Causal() if window is None else Causal() & Window(window)
        settings = dict(q_positions=at, k_positions=seen.positions, implementation="pallas")
        settings |= dict(key_scale=seen.k_scale, value_scale=seen.v_scale)
        return cache, dot_product_attention(query, seen.k, seen.v, mask=mask, **settings)

    with using(Target("tpu", chip="TPU")):
        return jax.jit(step, donate_argnums=0).lower(cache, query, new).compile()


@pytest.mark.slow
@pytest.mark.long_except("v5e:2x2-1-32768-bfloat16-None")
@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize(
    ("topology", "K", "capacity", "dtype", "window"),
    [
        ("v5e:2x2", 1, 32768, jnp.bfloat16, None),
        ("v5e:2x2", 2, 32768, jnp.float32, None),
        ("v5e:2x2", 4, 32768, jnp.int8, None),
        ("v5e:2x2", 8, 32768, jnp.bfloat16, None),
        ("v5e:2x2", 8, 32744, jnp.bfloat16, None),
        ("v5e:2x2", 8, 4104, jnp.bfloat16, 4104),
        ("v5e:2x2", 8, 32768, jnp.int8, None),
        ("v5e:2x2", 12, 32768, jnp.bfloat16, None),
        ("v5p:2x2x1", 8, 32768, jnp.bfloat16, None),
        ("v6e:2x2", 8, 32768, jnp.bfloat16, None),
        ("v6e:2x2", 8, 32768, jnp.int8, None),
        ("tpu7x:2x2x1", 8, 32768, jnp.bfloat16, None),
    ],
)
def test_decode_step_does_not_copy_cache(topology, K, capacity, dtype, window):
    """Only the two in-place writes of a token have the size of keys or values."""
    step = compiled_step(topology, K, capacity, dtype, window)
    text, numbers = step.as_text(), 8 * capacity * K * 128
    assert "attention_decode" in text and " while(" not in text
    assert large_results(text, numbers) == [("fusion", True)] * 2
    memory = step.memory_analysis()
    scales = 8 * capacity * 128 * 4 * (dtype == jnp.int8)  # of a token, written in another order
    assert memory.temp_size_in_bytes < scales + 0.05 * numbers
    assert memory.alias_size_in_bytes >= 2 * numbers * jnp.dtype(dtype).itemsize
