"""Attention of few queries on NVIDIA GPUs: when the decode kernel runs, and the code around it."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import decode_step
from benchmarks.decode_step import B, H, K, S, large_results
from tests.support import few_queries
from tests.support.attention_suite import reference
from tests.support.few_queries import program
from tests.support.hopper_kernels import (
    EXACT,
    INTERPRETS,
    NEAR,
    assert_near,
    needs_interpreter,
)
from transformer_jax import ALiBi, Causal, Dense, Padding, dot_product_attention
from transformer_jax.attention.api import IMPLEMENTATIONS
from transformer_jax.attention.arguments import check_call
from transformer_jax.cache import kv_cache as kv
from transformer_jax.kernels import Target, ampere, chips, hopper, using
from transformer_jax.kernels.chips import HOPPER_PROCESSORS
from transformer_jax.kernels.contract import Problem
from transformer_jax.kernels.hopper import programs
from transformer_jax.kernels.nvidia import schedule
from transformer_jax.kernels.nvidia.decode_rows import part_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODULES = {"hopper": hopper, "ampere": ampere}
needs_mma = pytest.mark.skipif(not ampere.HAS_MMA, reason="jax 0.10 has no mma in Pallas")
each_backend = pytest.mark.parametrize(
    "backend", ["hopper", pytest.param("ampere", marks=needs_mma)]
)


def interpreter(backend="hopper"):
    return Target(backend, plgpu.InterpretGPUParams() if INTERPRETS is None else False)


@pytest.fixture(autouse=True)
def two_programs(monkeypatch):
    """Run so few programs that each of them has several items and reuses every slot."""
    monkeypatch.setattr(programs, "PROGRAMS", 2)
    monkeypatch.setattr(chips, "AMPERE_PROCESSORS", 1)


arrays_of = functools.partial(few_queries.arrays_of, 64)


def named(monkeypatch, backend="hopper"):
    """Record which kernels are traced."""
    jax.clear_caches()  # a cached program is not traced again
    calls, module, kernels = [], MODULES[backend], {}
    for name in ("forward", "decode"):
        kernel = module.BACKEND.kernels[name]

        def record(*arguments, name=name, kernel=kernel):
            calls.append(name)
            return kernel(*arguments)

        kernels[name] = record
    kernels = module.BACKEND.kernels | kernels
    monkeypatch.setattr(module, "BACKEND", replace(module.BACKEND, kernels=kernels))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(("T", "options", "kernel"), few_queries.KERNELS)
@each_backend
def test_few_queries_without_dropout_use_decode_kernel(backend, T, options, kernel, monkeypatch):
    calls = named(monkeypatch, backend)
    attend, inputs = program(arrays_of(T), mask=Causal(), **options)
    with using(Target(backend)):
        jax.eval_shape(attend, *inputs)
    assert set(calls) == {kernel}


@pytest.mark.slow
def test_differentiated_few_query_call_uses_forward_kernel():
    attend, inputs = program(arrays_of(), mask=Causal(), return_lse=False)
    parts = schedule.key_parts(
        2 * 2, 2, programs.PROGRAMS
    )  # of 2 tiles, each shared by two warpgroups
    of_decode = f"f32[{2 * 2 * parts * 2},8,64]"
    with using(Target("hopper")):
        assert of_decode in str(jax.make_jaxpr(attend)(*inputs))
        gradient = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum())
        assert of_decode not in str(jax.make_jaxpr(gradient)(*inputs))


@pytest.mark.parametrize(("queries", "is_few"), [(1, True), (64, True), (65, False)])
def test_decode_kernel_is_planned_only_for_few_queries(queries, is_few):
    query, key = (jax.ShapeDtypeStruct((1, n, 1, 64), jnp.bfloat16) for n in (queries, 128))
    with using(Target("hopper")):
        plan = IMPLEMENTATIONS["pallas"].plan(check_call(query, key, key))
    assert ("decode" in dict(plan.where.blocks)) == is_few


MASKS = {
    "lengths": lambda rng: Padding(jnp.asarray(np.arange(200) < np.array([[200], [37]]))),
    "matrix of heads": lambda rng: Dense(jnp.asarray(rng.random((2, 8, 3, 200)) < 0.4)),
    "one matrix": lambda rng: Dense(jnp.asarray(rng.random((1, 1, 3, 200)) < 0.4)),
    "halves of heads": lambda rng: Dense(
        jnp.asarray(np.arange(200) // 128 == np.arange(8)[None, :, None, None] % 2).repeat(3, 2)
    ),
}


@pytest.mark.slow
@pytest.mark.long_except("ampere-lengths", "hopper-lengths", "hopper-matrix of heads")
@needs_interpreter
@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
@each_backend
def test_few_query_attention_matches_reference(backend, make):
    arrays, mask = arrays_of(3), make(np.random.default_rng(1))
    seen = np.asarray(mask.materialize(jnp.arange(3)[None], jnp.arange(200)[None]))
    seen = np.broadcast_to(seen, (2, 8, 3, 200))
    assert seen.any(axis=-1).all()
    attend, inputs = program(arrays, mask=mask)
    with using(interpreter(backend)):
        out, lse = jax.jit(attend)(*inputs)
    expected = reference(arrays, seen)
    assert_near(out, expected["out"], NEAR, "out")
    assert_near(lse, expected["lse"], EXACT, "lse")


@pytest.mark.slow
@pytest.mark.long_except("hopper")
@needs_interpreter
@each_backend
def test_alibi_slopes_are_applied_per_head(backend):
    arrays = arrays_of(2)
    slopes = 2.0 ** -np.arange(1, 9)
    at = jnp.array([198, 199])
    bias = ALiBi(jnp.asarray(slopes, jnp.float32))
    attend, inputs = program(arrays, mask=Causal(), bias=bias, q_positions=at)
    with using(interpreter(backend)):
        out, _ = jax.jit(attend)(*inputs)
    far = np.abs(np.asarray(at)[:, None] - np.arange(200))
    seen = np.asarray(at)[:, None] >= np.arange(200)
    arrays = arrays | {"bias": -slopes[None, :, None, None] * far}
    assert_near(out, reference(arrays, seen[None, None])["out"], NEAR, "out")


@pytest.mark.slow
def test_vmap_folds_mapped_axis_into_batch_axis(monkeypatch):
    calls = named(monkeypatch)
    attend, (query, key, value) = program(arrays_of(), mask=Causal())
    with using(Target("hopper")):
        mapped = jax.vmap(attend, (0, None, 0))
        out, lse = jax.eval_shape(mapped, jnp.stack([query] * 3), key, jnp.stack([value] * 3))
    assert out.shape == (3, *query.shape) and lse.shape == (3, 2, 1, 8)
    assert set(calls) == {"decode"}


@pytest.mark.slow
@each_backend
def test_results_have_same_varying_axes_as_inputs_in_shard_map(backend):
    """Traced, not run: `shard_map` compares types."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    attend, inputs = program(arrays_of(), mask=Causal(), bias=jnp.zeros((1, 8, 1, 200)))

    def call(*inputs):
        results = attend(*inputs)
        assert all(jax.typeof(x).manual_axis_type.varying == {"data"} for x in results)
        return results

    mapped = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with using(Target(backend)):
        out, lse = jax.eval_shape(mapped, *inputs)
    assert out.shape == inputs[0].shape and lse.shape == (2, 1, 8)


@pytest.mark.slow
@needs_interpreter
def test_few_query_gradients_match_reference_with_partial_last_tile():
    arrays = arrays_of(2, heads=2, kv_heads=1)
    weight = np.random.default_rng(2).standard_normal((2, 2, 2, 64))

    def gradients(implementation):
        attend, inputs = program(arrays, implementation=implementation, return_lse=False)
        loss = lambda *x: (attend(*x).astype(jnp.float32) * weight).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs)

    with using(interpreter()):
        found = gradients("pallas")
    for got, expected in zip(found, gradients("xla"), strict=True):
        assert got.shape == expected.shape
        assert_near(got, np.asarray(expected, np.float64), 2 * NEAR, "gradient")


@pytest.mark.slow
def test_tile_reads_do_not_depend_on_cache_capacity():
    """The parts of a list partition it, so the length of the lists is the number of copies."""
    lengths = jnp.asarray([[1], [128], [700], [0]])

    def tiles(capacity):
        at = jnp.arange(capacity)[None]
        positions = jnp.where(at < lengths, at, -1)  # in a cache
        plan = Causal().block_plan(lengths, positions, block_q=1, block_k=128)
        seen = plan.of_first_queries(1).key_tiles().seen
        parts = schedule.key_parts(4, -(-capacity // 128), programs.PROGRAMS)
        ends = [part_of(seen, part, parts) for part in range(parts)]
        assert (ends[0][0] == 0).all() and (ends[-1][1] == seen).all()
        assert all((a[1] == b[0]).all() for a, b in itertools.pairwise(ends))
        return np.asarray(seen)[:, 0, 0].tolist()

    assert tiles(1024) == tiles(8192) == tiles(1000) == [1, 1, 6, 0]


@pytest.mark.slow
@needs_interpreter
@each_backend
def test_int8_cache_is_read_without_conversion(backend, monkeypatch):
    calls, arrays = named(monkeypatch, backend), arrays_of(2)
    (key, key_scale), (value, value_scale) = (kv.quantize(arrays[x]) for x in ("key", "value"))
    query, wide = arrays["query"], [kv.dequantize(key, key_scale, "bfloat16")]
    wide.append(kv.dequantize(value, value_scale, "bfloat16"))
    settings = dict(mask=Causal(), q_positions=jnp.array([190, 199]), implementation="pallas")
    scales = dict(key_scale=key_scale, value_scale=value_scale)

    def attend(query, key, value, **scales):
        return dot_product_attention(query, key, value, **settings, **scales)

    with using(interpreter(backend)):
        out = jax.jit(attend)(query, key, value, **scales)
        expected = jax.jit(attend)(query, *wide)
        assert set(calls) == {"decode"}
        program = str(jax.make_jaxpr(attend)(query, key, value, **scales))
        gradient = jax.eval_shape(
            jax.grad(lambda *x: attend(x[0], key, value, **x[1]).astype(jnp.float32).sum(), (0, 1)),
            *(query, scales),
        )
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (out, expected)))
    assert "bf16[2,200,2,64]" not in program
    assert gradient[1]["key_scale"].shape == key_scale.shape and "forward" in calls


@pytest.mark.slow
@pytest.mark.long_except("hopper-small", "hopper-with sinks")
@needs_interpreter
@pytest.mark.parametrize(
    ("capacity", "window", "sinks"), [(176, 150, 0), (520, 100, 5)], ids=["small", "with sinks"]
)
@each_backend
def test_decode_supports_any_ring_buffer_order(backend, capacity, window, sinks, monkeypatch):
    calls = named(monkeypatch, backend)
    with using(interpreter(backend)):
        found, expected = few_queries.token_over_a_ring(64, capacity, window, sinks)
    assert set(calls) == {"decode"}
    assert_near(found["out"], expected["out"], NEAR, "out")
    assert_near(found["lse"], expected["lse"], EXACT, "lse")


# Compiled for an H200 that is not attached


@pytest.fixture
def compile_gpu():
    reason = "jax[cuda13] compiles for GPUs that are not attached"
    pytest.importorskip("jax_cuda13_plugin", reason=reason)
    from benchmarks import compile_gpu

    return compile_gpu


def compiled_step(compile_gpu, capacity, window=None, dtype=jnp.bfloat16, H=H):
    place = jax.sharding.SingleDeviceSharding(compile_gpu.device())
    with using(Target("hopper", chip="NVIDIA H200")), compile_gpu.context():
        return decode_step.lowered(place, capacity, window, dtype, H=H).compile()


@pytest.mark.long
@pytest.mark.parametrize(
    ("capacity", "window", "dtype", "H"),
    [
        (S, None, jnp.bfloat16, H),
        (S - 24, None, jnp.bfloat16, H),
        (4104, 4104, jnp.bfloat16, H),
        (S, None, jnp.int8, H),
        (S, None, jnp.bfloat16, 80),
        (S, None, jnp.int8, 80),
    ],
    ids=["", "odd", "ring", "int8", "width 80", "width 80, int8"],
)
def test_decode_step_does_not_copy_cache(capacity, window, dtype, H, compile_gpu, monkeypatch):
    """Only the two writes of a token have the size of the cache; no loop runs over it."""
    monkeypatch.setattr(programs, "PROGRAMS", HOPPER_PROCESSORS)
    step = compiled_step(compile_gpu, capacity, window, dtype, H)
    large = [kind for kind, _ in large_results(step.as_text(), B * capacity * K * H)]
    assert large == ["fusion", "fusion"]
    assert step.as_text().count("custom-call(") == 1
    memory = step.memory_analysis()
    assert memory.temp_size_in_bytes < 8e6  # the cache has 1074 MB
    cache_bytes = 2 * B * capacity * K * H * jnp.dtype(dtype).itemsize
    assert memory.alias_size_in_bytes > cache_bytes  # written in place


@pytest.mark.long
@pytest.mark.parametrize("H", [64, 80, 96, 112, 128, 256])
def test_decode_kernel_spills_no_registers(H, compile_gpu):
    problem = Problem(scale=H**-0.5, visible=compile_gpu.causal)
    assert compile_gpu.compile_one("decode", H, H, problem).spills == (0, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bias", "pairs"])
def test_decode_kernel_compiles_with_dense_mask_and_bias(name, compile_gpu):
    """Mosaic GPU may reject the start of a slice that the interpreter accepts."""
    sizes = (compile_gpu.B, compile_gpu.N, compile_gpu.T, compile_gpu.T)
    visible, dtype = (
        (compile_gpu.causal, jnp.bfloat16) if name == "bias" else (compile_gpu.in_matrix, jnp.int8)
    )
    problem, arrays = Problem(scale=0.125, visible=visible), {name: (sizes, dtype)}
    assert compile_gpu.compile_one("decode", 64, 64, problem, **arrays).spills == (0, 0)
