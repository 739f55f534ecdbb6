"""Products of few rows with weights in 32, 16, 8 and 4 bits on a CPU, against float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tests.support.tolerances import FORWARD_F32, assert_near, assert_same_bits
from transformer_jax.kernels import cpu
from transformer_jax.kernels.cpu import products
from transformer_jax.models.ops import logits, project
from transformer_jax.models.quantized import quantize, quantized_project

pytestmark = pytest.mark.usefixtures("quick_compilation")

NATIVE = not isinstance(cpu.library(), str)
needs_kernels = pytest.mark.skipif(not NATIVE, reason=f"no kernels: {cpu.library()}")
SIZES = [(1, 1), (3, 7), (31, 64), (67, 131), (257, 769), (1031, 300)]
"""Inputs and outputs: smaller than a vector, around 32 and 64, and with several items."""


def weights_of(rng, dtype, *shape):
    """Draw weights; return them as stored and in float64."""
    if dtype == "int8":
        stored = rng.integers(-127, 128, shape).astype(np.int8)
    else:
        stored = rng.normal(size=shape).astype(jnp.dtype(dtype))
    return jax.device_put(stored), stored.astype(np.float64)


@pytest.mark.slow_except("neon-bfloat16-*", "neon-float32-False", "neon-int8-True")
@pytest.mark.long_except(
    "*-int8-False",
    "avx2-bfloat16-True",
    "avx2-float32-False",
    "avx512-float32-True",
    "neon-*",
    "plain-*",
)
@needs_kernels
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", products.DTYPES)
def test_native_product_matches_float64(rng, dtype, turned, instructions):
    check_products(rng, dtype, turned)


@needs_kernels
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_empty_arrays(turned):
    bias = jnp.arange(4.0)
    for product in (products.product, products.fixed_product):
        weights = jnp.zeros((4, 0) if turned else (0, 4))
        y = product(jnp.zeros((3, 0)), weights, bias=bias, turned=turned)
        assert_same_bits(y, np.tile(np.arange(4, dtype=np.float32), (3, 1)))
        weights = jnp.zeros((4, 5) if turned else (5, 4))
        assert product(jnp.zeros((0, 5)), weights, turned=turned).shape == (0, 4)
        weights = jnp.zeros((0, 5) if turned else (5, 0))
        assert product(jnp.zeros((3, 5)), weights, turned=turned).shape == (3, 0)


@needs_kernels
def test_fixed_sums_of_empty_arrays():
    bias = jnp.arange(4.0)
    assert products.fixed_sum(jnp.zeros((2, 0, 300))).shape == (2, 0)
    assert not products.fixed_sum(jnp.zeros((2, 0))).any()
    gradient = jax.grad(
        lambda b: products.fixed_product(jnp.zeros((0, 5)), jnp.ones((5, 4)), bias=b).sum()
    )
    assert not gradient(bias).any()


@needs_kernels
def test_long_fixed_sum_matches_float64(rng):
    x = rng.uniform(size=(3, 50_257)).astype(np.float32)
    wanted = x.astype(np.float64).sum(axis=1)
    assert np.abs(products.fixed_sum(jnp.asarray(x)) / wanted - 1).max() < 1e-6


def words_of(rng, inputs, outputs, dtype):
    """Draw 4-bit weights; return words and scales, and the weights in float64."""
    values = rng.integers(-8, 8, (inputs, outputs))
    groups = inputs // 32 if inputs % 32 == 0 else 1
    scale = rng.lognormal(size=(groups, outputs)).astype(dtype)
    words = np.zeros((-(-inputs // 8), outputs), np.uint32)
    for k, row in enumerate(values):
        words[k // 8] |= (row + 8).astype(np.uint32) << (8 * (k % 4) + 4 * (k % 8 // 4))
    exact = values * np.repeat(scale.astype(np.float64), inputs // groups, axis=0)
    return jax.device_put(words), jax.device_put(scale), exact


def check_4_bit_products(rng, dtype):
    """Compare with float64; x may be rounded to 2^-24 of a row's maximum."""
    for inputs, outputs in [*SIZES, (64, 70), (32, 1), (416, 513)]:
        words, scale, exact = words_of(rng, inputs, outputs, dtype)
        bias = rng.normal(size=outputs).astype(np.float32)
        for rows in (1, 2, 3, 7, 8, 16):
            x = rng.normal(size=(rows, inputs)).astype(np.float32)
            size = np.abs(x).astype(np.float64) @ np.abs(exact) + np.abs(bias)
            size += 2**-24 / FORWARD_F32 * np.abs(x).max(1)[:, None] * np.abs(exact).sum(0)
            found = products.product(jnp.array(x), words, scale=scale, bias=jnp.array(bias))
            assert (
                np.abs(found - (x.astype(np.float64) @ exact + bias)) <= FORWARD_F32 * size
            ).all()


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_native_4_bit_product_matches_float64(rng, dtype, instructions):
    check_4_bit_products(rng, dtype)


@pytest.mark.slow
def test_xla_4_bit_product_matches_float64(rng, monkeypatch):
    monkeypatch.setattr(products, "library", lambda: "is left out")
    check_4_bit_products(rng, "float32")


@needs_kernels
def test_4_bit_products_of_empty_arrays():
    scale, bias = jnp.ones((1, 4)), jnp.arange(4.0)
    y = products.product(jnp.zeros((3, 0)), jnp.zeros((0, 4), jnp.uint32), scale=scale, bias=bias)
    assert_same_bits(y, np.tile(np.arange(4, dtype=np.float32), (3, 1)))
    words = jnp.zeros((1, 4), jnp.uint32)
    assert products.product(jnp.zeros((0, 5)), words, scale=scale).shape == (0, 4)
    none = jnp.zeros((1, 0), jnp.uint32)
    assert products.product(jnp.zeros((3, 5)), none, scale=scale[:, :0]).shape == (3, 0)


@needs_kernels
def test_packed_words_are_dequantized_exactly(rng):
    for inputs in (5, 64):
        words, scale, exact = words_of(rng, inputs, 7, "float32")
        found = products.dequantize_words(words, scale, inputs)
        np.testing.assert_array_equal(found, exact.astype(np.float32))
        groups = np.repeat(np.asarray(scale, np.float64), inputs // len(scale), axis=0)
        again = products.pack_words(jnp.array(np.round(exact / groups), jnp.int8))
        assert_same_bits(products.dequantize_words(again, scale, inputs), found)
        if inputs == 64:  # otherwise the last word also contains unused bits
            np.testing.assert_array_equal(again, words)


@needs_kernels
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_inputs_of_4_bit_products_affect_only_their_row(rng, bad, instructions):
    words, scale, exact = words_of(rng, 224, 70, "float32")
    x = rng.normal(size=(3, 224)).astype(np.float32)
    clean = x.astype(np.float64) @ exact
    x[1, 33] = bad
    with np.errstate(invalid="ignore"):
        wanted = x.astype(np.float64) @ exact
    found = np.asarray(products.product(jax.device_put(x), words, scale=scale))
    np.testing.assert_array_equal(found[1], wanted[1])
    assert_near(found[[0, 2]], clean[[0, 2]], 1e-5)


@needs_kernels
def test_4_bit_product_error_is_bounded_relative_to_largest_input(rng, instructions):
    """An outlier of 10,000, a row of zeros, and rows near both ends of the float32 range."""
    words, scale, exact = words_of(rng, 192, 70, "float32")
    x = rng.normal(size=(4, 192)).astype(np.float32)
    x[0, 17], x[1], x[2], x[3] = 1e4, 0, x[2] * np.float32(1e-33), x[3] * np.float32(1e33)
    found = np.asarray(products.product(jax.device_put(x), words, scale=scale), np.float64)
    limit = FORWARD_F32 * (np.abs(x).astype(np.float64) @ np.abs(exact))
    limit += 2**-24 * np.abs(x).max(1)[:, None].astype(np.float64) * np.abs(exact).sum(0)
    assert (np.abs(found - x.astype(np.float64) @ exact) <= limit).all()


@needs_kernels
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
def test_quantized_projection_of_few_rows_uses_the_kernel(rng, x_dtype):
    kernel = jnp.array(rng.normal(size=(256, 96)), jnp.float32)
    stored = quantize({"block_0": {"up": {"kernel": kernel}}}, "int4")["block_0"]["up"]["kernel"]
    exact = np.asarray(stored.astype(jnp.float32), np.float64)

    def reads_words(kernel, rows=1):
        x = jax.ShapeDtypeStruct((rows, math.prod(kernel.inputs)), x_dtype)
        text = jax.jit(lambda x: quantized_project(x, kernel, None, 1)).lower(x).as_text()
        return any("weight_product" in line and "ui32" in line for line in text.split("\n"))

    assert reads_words(stored, 16)
    assert not reads_words(stored, 17)
    # the kernel has no groups of 16 inputs
    assert not reads_words(dataclasses.replace(stored, scale=jnp.repeat(stored.scale, 2, axis=0)))
    x = jnp.array(rng.normal(size=(5, 256)), x_dtype)
    found = quantized_project(x, stored, None, 1)
    assert found.dtype == x_dtype
    error = FORWARD_F32 if x_dtype == "float32" else 2**-8
    assert_near(found, np.asarray(x, np.float64) @ exact, error)


@needs_kernels
def test_4_bit_product_supports_derivatives_vmap_and_export(rng):
    """Adapters on a quantized base use the gradient with respect to x."""
    kernel = jnp.array(rng.normal(size=(256, 96)), jnp.float32)
    stored = quantize({"block_0": {"up": {"kernel": kernel}}}, "int4")["block_0"]["up"]["kernel"]
    exact = np.asarray(stored.astype(jnp.float32), np.float64)
    x, g = (jnp.array(rng.normal(size=(3, n)), jnp.float32) for n in (256, 96))
    function = jax.jit(lambda x: quantized_project(x, stored, None, 1))
    y, pull = jax.vjp(function, x)
    assert_near(y, np.asarray(x, np.float64) @ exact, FORWARD_F32)
    assert_near(pull(g)[0], np.asarray(g, np.float64) @ exact.T, FORWARD_F32)
    assert_near(jax.jvp(function, (x,), (x,))[1], y, FORWARD_F32)
    assert_near(jax.vmap(lambda x: function(x[None])[0])(x), y, FORWARD_F32)
    again = export.deserialize(export.export(function)(x).serialize())
    assert_near(again.call(x), y, FORWARD_F32)


@needs_kernels
def test_mismatched_4_bit_products_are_rejected():
    words, scale = jnp.zeros((8, 5), jnp.uint32), jnp.ones((2, 5))
    with pytest.raises(ValueError, match="x has 56 inputs: 8 words have from 57 to 64"):
        products.product(jnp.ones((2, 56)), words, scale=scale)
    with pytest.raises(ValueError, match=r"scale has shape \[5\]: must be \[groups, 5\]"):
        products.product(jnp.ones((2, 64)), words, scale=jnp.ones(5))
    with pytest.raises(ValueError, match="scale has 4 groups for 64 inputs: the number must be 1"):
        products.product(jnp.ones((2, 64)), words, scale=jnp.ones((4, 5)))
    with pytest.raises(ValueError, match="scale is bfloat16: must be float32 or float16"):
        products.product(jnp.ones((2, 64)), words, scale=scale.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"bias has shape \[4\]: must be \[5\]"):
        products.product(jnp.ones((2, 64)), words, scale=scale, bias=jnp.ones(4))


@pytest.mark.slow
@pytest.mark.long_except("bfloat16-*", "int8-*")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", products.DTYPES)
def test_xla_product_matches_float64(rng, dtype, turned, monkeypatch):
    monkeypatch.setattr(products, "library", lambda: "is left out")
    check_products(rng, dtype, turned)


def check_products(rng, dtype, turned):
    """Compare with float64; with int8 weights, x may be rounded to 2^-24 of a row's maximum."""
    for inputs, outputs in SIZES:
        shape = (outputs, inputs) if turned else (inputs, outputs)
        stored, exact = weights_of(rng, dtype, *shape)
        scale, bias = rng.lognormal(size=outputs), rng.normal(size=outputs)
        for rows in (1, 2, 3, 7, 8, 16):
            x = rng.normal(size=(rows, inputs)).astype(np.float32)
            wanted = x.astype(np.float64) @ (exact.T if turned else exact)
            weights = np.abs(exact.T if turned else exact)
            size = np.abs(x).astype(np.float64) @ weights
            if dtype == "int8":
                size += 2**-24 / FORWARD_F32 * np.abs(x).max(1)[:, None] * weights.sum(0)
            arrays = jnp.array(x), stored
            found = products.product(*arrays, turned=turned)
            assert (np.abs(found - wanted) <= FORWARD_F32 * size + 1e-30).all()
            more = dict(scale=jnp.array(scale, jnp.float32), bias=jnp.array(bias, jnp.float32))
            found = products.product(*arrays, turned=turned, **more)
            limit = FORWARD_F32 * (size * scale + np.abs(bias))
            assert (np.abs(found - (wanted * scale + bias)) <= limit).all()


@needs_kernels
def test_product_kernel_is_used_only_for_few_rows(rng):
    kernel = rng.normal(size=(256, 96)).astype(np.float32)

    def program(rows, weights=kernel, dtype=jnp.float32):
        x = jax.ShapeDtypeStruct((rows, 256), dtype)
        return jax.jit(project).lower(x, weights).as_text()

    assert "weight_product" in program(1) and "weight_product" in program(16)
    assert "weight_product" not in program(17)
    assert "weight_product" not in program(1, kernel[:, :8])  # too few weights
    assert "weight_product" not in program(1, dtype=jnp.float16)
    x = jax.ShapeDtypeStruct((2, 3, 256), jnp.float32)
    table = jax.jit(lambda x, kernel: logits(x, kernel.T, None)).lower(x, kernel)
    assert "weight_product" in table.as_text()


@needs_kernels
def test_exported_product_matches_native_product_without_kernel_call(rng):
    kernel = rng.normal(size=(256, 96)).astype(jnp.bfloat16)
    x = rng.normal(size=(2, 256)).astype(np.float32)
    function = jax.jit(lambda x: project(x, kernel))
    again = export.deserialize(export.export(function)(x).serialize())
    assert_near(again.call(x), function(x), FORWARD_F32)
    export.export(function, platforms=["tpu"])(x)


@pytest.mark.slow
def test_few_row_product_supports_derivatives_and_vmap(rng):
    kernel = jnp.array(rng.normal(size=(256, 96)), jnp.float32)
    x, g = (jnp.array(rng.normal(size=(3, n)), jnp.float32) for n in (256, 96))
    exact = [np.asarray(a, np.float64) for a in (x, kernel, g)]
    y, pull = jax.vjp(lambda x, kernel: project(x, kernel), x, kernel)
    dx, dkernel = pull(g)
    assert_near(y, exact[0] @ exact[1], FORWARD_F32)
    assert_near(dx, exact[2] @ exact[1].T, FORWARD_F32)
    assert_near(dkernel, exact[0].T @ exact[2], FORWARD_F32)
    _, tangent = jax.jvp(lambda x: project(x, kernel), (x,), (x,))
    assert_near(tangent, exact[0] @ exact[1], FORWARD_F32)
    assert_near(jax.vmap(lambda x: project(x, kernel))(x), exact[0] @ exact[1], FORWARD_F32)
    kernels = jnp.stack([kernel, 2 * kernel, -kernel])
    found = jax.vmap(lambda x, kernel: project(x[None], kernel)[0])(x, kernels)
    assert_near(found, exact[0] @ exact[1] * [[1], [2], [-1]], FORWARD_F32)


@needs_kernels
def test_product_sums_do_not_depend_on_thread_count(rng):
    kernel = jax.device_put(rng.normal(size=(3072, 768)).astype(np.float32))
    x = jax.device_put(rng.normal(size=(1, 3072)).astype(np.float32))
    first = products.product(x, kernel)
    for _ in range(20):
        assert_same_bits(products.product(x, kernel), first)


@needs_kernels
@pytest.mark.parametrize("turned", [False, True])
def test_product_error_is_bounded_relative_to_largest_input(rng, turned, instructions):
    """An outlier of 10,000, a row of zeros, and rows near both ends of the float32 range."""
    stored, exact = weights_of(rng, "int8", *((70, 200) if turned else (200, 70)))
    exact = exact.T if turned else exact
    x = rng.normal(size=(4, 200)).astype(np.float32)
    x[0, 17], x[1], x[2], x[3] = 1e4, 0, x[2] * np.float32(1e-33), x[3] * np.float32(1e33)
    found = np.asarray(products.product(jax.device_put(x), stored, turned=turned), np.float64)
    limit = FORWARD_F32 * (np.abs(x).astype(np.float64) @ np.abs(exact))
    limit += 2**-24 * np.abs(x).max(1)[:, None].astype(np.float64) * np.abs(exact).sum(0)
    assert (np.abs(found - x.astype(np.float64) @ exact) <= limit).all()


@needs_kernels
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", products.DTYPES)
def test_nonfinite_product_inputs_affect_only_their_row(rng, dtype, turned, bad, instructions):
    stored, exact = weights_of(rng, dtype, *((70, 200) if turned else (200, 70)))
    exact = exact.T if turned else exact
    x = rng.normal(size=(3, 200)).astype(np.float32)
    clean = x.astype(np.float64) @ exact
    x[1, 33] = bad
    with np.errstate(invalid="ignore"):
        wanted = x.astype(np.float64) @ exact
    found = np.asarray(products.product(jax.device_put(x), stored, turned=turned))
    np.testing.assert_array_equal(found[1], wanted[1])
    assert_near(found[[0, 2]], clean[[0, 2]], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_mismatched_product_sizes_are_rejected(rng, turned):
    weights = jnp.ones((96, 256) if turned else (256, 96))
    with pytest.raises(ValueError, match="x has 255 inputs: must have 256, like the weights"):
        products.product(jnp.ones((2, 255)), weights, turned=turned)
    with pytest.raises(ValueError, match=r"scale has shape \[1, 96\]: must be \[96\]"):
        products.product(jnp.ones((2, 256)), weights, scale=jnp.ones((1, 96)), turned=turned)
    with pytest.raises(ValueError, match=r"bias has shape \[95\]: must be \[96\]"):
        products.product(jnp.ones((2, 256)), weights, bias=jnp.ones(95), turned=turned)


@needs_kernels
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", products.DTYPES)
def test_fixed_product_has_the_same_bits_for_any_number_of_rows(rng, dtype, turned):
    for inputs, outputs in ((1, 1), (31, 64), (257, 131)):
        weights, _ = weights_of(rng, dtype, *((outputs, inputs) if turned else (inputs, outputs)))
        x, bias = (jnp.array(rng.normal(size=s), jnp.float32) for s in ((67, inputs), outputs))
        whole = products.fixed_product(x, weights, bias=bias, turned=turned)
        columns = products.fixed_product(x.T, weights, bias=bias, turned=turned, x_turned=True)
        assert_same_bits(columns, whole)
        for rows in (1, 2, 7, 16, 17, 40):
            found = products.fixed_product(x[-rows:], weights, bias=bias, turned=turned)
            assert_same_bits(found, whole[-rows:])


@needs_kernels
def test_fixed_product_adds_in_the_order_of_inputs(rng):
    x, weights = (rng.normal(size=s).astype(np.float32) for s in ((3, 300), (300, 40)))
    total = np.zeros((3, 40), np.float32)
    for k in range(300):  # a long double holds the exact product, and rounds the sum once more
        exact = x[:, k, None].astype(np.longdouble) * weights[k].astype(np.longdouble) + total
        total = exact.astype(np.float32)
    if cpu.instructions() != "plain":  # without fused multiply-add, products are rounded
        assert_same_bits(products.fixed_product(x, weights), total)
    assert_near(products.fixed_product(x, weights), x.astype(np.float64) @ weights, FORWARD_F32)


@needs_kernels
def test_rows_of_zeros_do_not_change_the_gradient_of_weights(rng):
    x, dy = (rng.normal(size=s).astype(np.float32) for s in ((9, 33), (9, 70)))

    def gradient(x, dy):
        return jax.vjp(lambda w: products.fixed_product(x, w), jnp.zeros((33, 70)))[1](dy)[0]

    more = np.zeros((40, 70), np.float32)
    more[5:14] = dy
    inputs = rng.normal(size=(40, 33)).astype(np.float32)
    inputs[5:14] = x
    assert_same_bits(gradient(inputs, more), gradient(x, dy))


@needs_kernels
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("x_turned", [False, True])
def test_gradients_of_fixed_product_match_xla(rng, turned, x_turned):
    x, weights, bias = (rng.normal(size=s).astype(np.float32) for s in ((5, 33), (33, 40), 40))
    x, weights = x.T if x_turned else x, weights.T if turned else weights

    def fixed(x, weights, bias):
        y = products.fixed_product(x, weights, bias=bias, turned=turned, x_turned=x_turned)
        return (jnp.sin(y) ** 2).sum()

    def plain(x, weights, bias):
        y = (x.T if x_turned else x) @ (weights.T if turned else weights) + bias[None]
        return (jnp.sin(y) ** 2).sum()

    found, wanted = (jax.grad(f, (0, 1, 2))(x, weights, bias) for f in (fixed, plain))
    jax.tree.map(lambda x, y: assert_near(x, y, 1e-5), found, wanted)

    def second(function):
        inner = jax.grad(function)
        return jax.jit(jax.grad(lambda x: jnp.vdot(inner(x, weights, bias), x)))(x)

    assert_near(second(fixed), second(plain), 1e-5)


@needs_kernels
def test_fixed_product_of_mismatched_sizes_is_rejected():
    x, weights = jnp.ones((2, 5)), jnp.ones((4, 3))
    with pytest.raises(ValueError, match="x has 5 inputs: must have 4, like the weights"):
        products.fixed_product(x, weights)
    with pytest.raises(ValueError, match="x has 2 inputs: must have 3"):
        products.fixed_product(x, weights, turned=True, x_turned=True)
    with pytest.raises(ValueError, match=r"bias has shape \[2\]: must be \[3\]"):
        products.fixed_product(jnp.ones((2, 4)), weights, bias=jnp.ones(2))
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="but x is float64"):
        products.fixed_product(jnp.ones((2, 4), jnp.float64), weights)


@needs_kernels
def test_fixed_product_accepts_float16_weights(rng):
    x, weights = (rng.normal(size=s).astype(np.float16) for s in ((3, 40), (40, 9)))
    exact = x.astype(np.float64) @ weights.astype(np.float64)
    assert_near(products.fixed_product(jnp.array(x), jnp.array(weights)), exact, FORWARD_F32)
