"""The gradient, `vmap` and meshes around the kernels, on a backend with dense arrays.

The whole attention suite runs here, so a failure here is not the fault of a kernel. The kernels
themselves are tested in test_tpu.py and test_hopper.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import plain_kernels
from tests.support.attention_suite import AttentionSuite, draw, reference
from tests.support.devices import on_devices
from tests.support.plain_kernels import Plain
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax.attention.api import dot_product_attention
from transformer_jax.attention.biases import ALiBi
from transformer_jax.attention.masks import (
    Causal,
    Dense,
    Padding,
    Window,
)
from transformer_jax.kernels import Target, cpu, using

pytestmark = pytest.mark.usefixtures("quick_compilation")

compiled = pytest.mark.skipif(isinstance(cpu.library(), str), reason=f"{cpu.library()}")


@pytest.mark.slow_except(
    "test_every_mask_matches_reference[dense]", "test_empty_axes_produce_empty_or_zero_results"
)
@pytest.mark.long_except(
    "test_every_mask_matches_reference[dense]",
    "test_masks_use_positions_in_ring_caches_and_ragged_rows",
    "test_fully_masked_rows_are_zero_and_do_not_affect_others",
    "test_empty_axes_produce_empty_or_zero_results",
    "test_masked_keys_and_values_have_no_influence[future-3.3e+38]",
    "test_vmap_over_any_argument_matches_loop[('key', 'value')]",
    "test_vmap_over_dense_mask_matches_loop",
    "test_scan_over_calls_matches_loop",
)
class TestPlain(AttentionSuite):
    implementation = "pallas"
    target = Plain()
    may_refuse = True
    queries, span = 39, 71


@pytest.mark.slow_except("invariant")
@pytest.mark.parametrize("implementation", ["pallas", pytest.param("invariant", marks=compiled)])
def test_sink_gradients_match_formula(implementation):
    """-sum p_sink D over batch rows and queries, with row maxima and sums far from 0 and 1."""
    arrays = draw(6, batch=3, queries=11, keys=19)
    arrays["query"] = 3 * arrays["query"]
    arrays["sinks"] = jnp.array([-2.0, 0.5, 3.0, 7.0])
    seen = np.tri(11, 19, k=-1, dtype=bool)[None, None]  # the first query sees no key

    @jax.jit
    def gradient(sinks):
        def attend(sinks):
            inputs = arrays["query"], arrays["key"], arrays["value"]
            settings = dict(mask=Causal() & ~Window(1), sinks=sinks, return_lse=True)
            return dot_product_attention(*inputs, implementation=implementation, **settings)

        (out, lse), pull = jax.vjp(attend, sinks)
        return out, lse, pull((arrays["out_cotangent"], arrays["lse_cotangent"]))[0]

    with using(Plain()) if implementation == "pallas" else nullcontext():
        out, lse, dsinks = gradient(arrays["sinks"])
    expected = reference(arrays, seen)
    assert np.isneginf(np.asarray(lse)[:, 0]).all() and not np.asarray(out)[:, 0].any()
    assert_near(dsinks, expected["dsinks"], GRADIENT_F32)


# vmap


@pytest.mark.slow
@pytest.mark.long_except("1-1")
@pytest.mark.parametrize(("batch", "rows"), [(2, 1), (2, 2), (1, 1)])
def test_unmapped_bias_has_separate_gradient_per_vmapped_call(batch, rows):
    """With a bias shared by all batch rows, and with one per row."""
    arrays = draw(2, batch=batch)
    bias = jnp.asarray(np.random.default_rng(3).normal(size=(rows, 4, 1, 17)), jnp.float32)
    queries = jnp.stack([arrays["query"], 2 * arrays["query"], -arrays["query"]])

    def slope(query, bias):
        def loss(bias):
            inputs = query, arrays["key"], arrays["value"]
            out = dot_product_attention(*inputs, bias=bias, implementation="pallas")
            return (out * arrays["out_cotangent"]).sum()

        return jax.grad(loss)(bias)

    with using(Plain()):
        mapped = jax.vmap(slope, (0, None))(queries, bias)
        expected = jnp.stack([slope(query, bias) for query in queries])
    assert mapped.shape == (3, *bias.shape)
    assert_near(mapped, expected, GRADIENT_F32)


@pytest.mark.slow
@pytest.mark.long_except("matrix")
@pytest.mark.parametrize("mapped", ["key", "valid", "matrix"])
def test_vmap_over_one_argument_matches_loop(mapped):
    """Includes the gradient; all other arguments are shared."""
    random, arrays = np.random.default_rng(8), draw(8, batch=1)
    inputs = {n: arrays[n] for n in ("query", "key", "value")}
    inputs |= dict(valid=random.random((1, 17)) < 0.8, matrix=random.random((13, 17)) < 0.8)
    inputs[mapped] = np.stack([
        random.normal(size=inputs[mapped].shape).astype(np.float32)
        if mapped == "key" else random.random(inputs[mapped].shape) < 0.6 for _ in range(3)
    ])  # fmt: skip

    def loss(query, key, value, valid, matrix):
        mask = Padding(jnp.asarray(valid)) & Dense(jnp.asarray(matrix)) & Causal()
        out = dot_product_attention(query, key, value, mask=mask, implementation="pallas")
        return (out * arrays["out_cotangent"]).sum(), out

    axes = [0 if name == mapped else None for name in inputs]
    step = jax.grad(loss, (0, 1, 2), has_aux=True)
    with using(Plain()):
        slopes, out = jax.vmap(step, axes)(*inputs.values())
    for i in range(3):
        one = {n: np.asarray(x[i] if n == mapped else x) for n, x in inputs.items()}
        seen = np.tri(13, 17, dtype=bool) & one["valid"] & one["matrix"]
        expected = reference(
            arrays | {"key": one["key"], "lse_cotangent": np.zeros((1, 13, 4))}, seen[None, None]
        )
        assert_near(out[i], expected["out"], FORWARD_F32)
        for name, slope in zip(("query", "key", "value"), slopes, strict=True):
            assert_near(slope[i], expected[f"d{name}"], GRADIENT_F32, name)


@pytest.mark.slow_except("key")
@pytest.mark.parametrize("mapped", ["key", "valid"])
def test_vmap_over_single_row_uses_one_kernel_row_per_call(mapped):
    """Unlike dense arrays, the grid of a kernel does not broadcast axes of size 1."""
    random, arrays = np.random.default_rng(9), draw(9, batch=1, queries=9, keys=17)
    inputs = {n: np.asarray(arrays[n]) for n in ("query", "key", "value")}
    inputs["valid"] = random.random((1, 17)) < 0.8
    one = inputs[mapped]
    inputs[mapped] = np.stack([one, one[:, ::-1], np.roll(one, 3, axis=1)])
    axes = [0 if name == mapped else None for name in inputs]

    def attend(query, key, value, valid):
        mask = Padding(valid) & Causal()
        return dot_product_attention(query, key, value, mask=mask, implementation="pallas")

    with using(Target("tpu", interpret=True)):
        out = np.asarray(jax.jit(jax.vmap(attend, axes))(*inputs.values()))
    silent = {"lse_cotangent": np.zeros((1, 9, 4))}
    for i in range(3):
        call = {n: x[i] if n == mapped else x for n, x in inputs.items()}
        seen = np.tri(9, 17, dtype=bool) & call["valid"]
        expected = reference(arrays | {"key": call["key"]} | silent, seen[None, None])
        assert_near(out[i], expected["out"], FORWARD_F32)


@pytest.mark.slow
def test_vmap_over_single_row_shares_unmapped_matrix():
    arrays, matrix = draw(4, batch=1), jnp.asarray(np.random.default_rng(4).random((13, 17)) < 0.6)
    queries = jnp.stack([arrays["query"] * s for s in (1.0, 0.5, 2.0, -1.0, 3.0)])

    def attend(query):
        inputs = query, arrays["key"], arrays["value"]
        mask = Dense(matrix) | Causal()
        return dot_product_attention(*inputs, mask=mask, implementation="pallas")

    with using(Plain()):
        text = str(jax.make_jaxpr(jax.vmap(attend))(queries))
        found, expected = jax.vmap(attend)(queries), [attend(query) for query in queries]
    assert "i8[1,1,32,32]" in text and "i8[5" not in text
    assert_near(found, np.stack(expected), FORWARD_F32)


# A device mesh


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["two parts of a key head", "packed queries"], id="two cases"),
        pytest.param([], marks=pytest.mark.long, id="all"),
    ],
)
def test_mesh_matches_one_device_without_gathering(cases):
    results = on_devices(8, "-m", "tests.multi_device.kernels_on_eight", *cases, optimise=False)
    assert len(results) >= (len(cases) or 3)
    for case, result in results.items():
        assert result["error"] < 2 * GRADIENT_F32, (case, result)
        if case.startswith("three"):  # the only split that must move data
            continue
        assert result["moves"] == [], (case, result)
        assert result["query"] == ["data", None, "model"], (case, result)


@pytest.mark.slow
@pytest.mark.long_except("plain")
@pytest.mark.parametrize(
    ("where", "checked"), [(Plain(), True), (Target("tpu", True), False)], ids=["plain", "tpu"]
)
def test_kernels_run_on_each_device_in_user_shard_map(where, checked):
    """Includes gradients of replicated arrays, which are summed over the devices. The Pallas
    interpreter does not report which values vary over a mesh."""
    arrays = draw(1, batch=2)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def attend(query, key, value, sinks):
        with using(where):
            settings = dict(mask=Causal(), sinks=sinks, implementation="pallas")
            return dot_product_attention(query, key, value, **settings)

    inputs = arrays["query"], arrays["key"], arrays["value"], jnp.linspace(-1, 1, 4)
    in_specs = (spec,) * 3 + (jax.sharding.PartitionSpec(),)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=checked)

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum(), (0, 1, 2, 3)))(*inputs)

    for x, y in zip(gradients(mapped), gradients(attend), strict=True):
        assert_near(x, y, GRADIENT_F32)


@pytest.mark.slow
def test_slope_gradient_is_computed_only_if_requested(monkeypatch):
    """In a kernel it costs a sum over every tile."""
    arrays, requested = draw(0, queries=16, keys=16), []

    def spied(problem, *rest):
        requested.append(not problem.fixed_slopes)
        return plain_kernels.backward_dq(problem, *rest)

    backend = plain_kernels.BACKEND
    spies = replace(backend, kernels=backend.kernels | {"dq": spied})
    monkeypatch.setattr(plain_kernels, "BACKEND", spies)

    def loss(query, slopes):
        with using(Plain()):
            out = dot_product_attention(
                query, arrays["key"], arrays["value"], bias=ALiBi(slopes), implementation="pallas"
            )
        return out.sum()

    def scanned(query, slopes):
        def step(query, _):
            return query * loss(query, slopes), None

        return jax.lax.scan(step, query, length=2)[0].sum()

    query, slopes = arrays["query"], jnp.ones(4)
    wrappers = (loss, jax.jit(loss), jax.checkpoint(loss), scanned)
    for wrapped in wrappers:
        jax.eval_shape(jax.grad(wrapped), query, slopes)
    assert set(requested) == {False}
    requested.clear()
    for wrapped in wrappers:
        jax.eval_shape(jax.grad(wrapped, (0, 1)), query, slopes)
    assert set(requested) == {True}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hopper", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bias_gradient_allocates_no_extra_arrays(backend, dtype):
    """The surrounding program makes no copy in the same dtype, and no replacements of NaN rows.

    Hopper transposes it for the kernel with queries as columns; zeros are accumulators."""
    T = 1024
    queries = jax.ShapeDtypeStruct((1, T, 2, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 2, T, T), dtype)

    def gradients(query, bias, cotangent):
        def attend(query, bias):
            return dot_product_attention(
                query, query, query, mask=Causal(), bias=bias, implementation="pallas"
            )

        return jax.vjp(attend, query, bias)[1](cotangent)

    found = set()

    def read(jaxpr):
        for step in jaxpr.eqns:
            inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(step.params)]
            inner = [x for x in inner if hasattr(x, "eqns")]
            for x in inner:
                read(x)
            for v in step.outvars:
                if not inner and getattr(v.aval, "size", 0) == 2 * T * T:
                    found.add((step.primitive.name, str(v.aval.dtype)))

    with using(Target(backend)):
        read(jax.make_jaxpr(gradients)(queries, bias, queries).jaxpr)
    rounded = {("convert_element_type", dtype)} - {("convert_element_type", "float32")}
    if dtype == "float16":  # matches neither inputs nor scores, so kernels do not read it
        rounded, dtype = rounded | {("convert_element_type", "float32")}, "float32"
    there = {
        "hopper": {("transpose", dtype), ("reduce_sum", "float32")},  # over an empty set of axes
        "tpu": {("broadcast_in_dim", "float32")},
    }
    assert found == there[backend] | rounded
