"""Tests of 8-bit and 4-bit kernels: errors, models that use them, and memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.config import ConfigError, LoraConfig, ModelConfig
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.kernels import cpu
from transformer_jax.models.factory import build, init_cache, init_params
from transformer_jax.models.lora import apply_lora, init_lora, with_adapters
from transformer_jax.models.quantized import (
    QuantizedKernel,
    QuantizedTable,
    quantize,
    quantized_project,
    table_logits,
)
from transformer_jax.models.stack import stack_layers, unstack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

NATIVE = not isinstance(cpu.library(), str)
SMALL = dict(vocab_size=23, d_model=32, num_heads=2, d_ff=64, max_len=17, init_std=0.3)
MODELS = {
    "decoder": ModelConfig(
        num_layers=2, num_kv_heads=1, head_dim=6, glu=True, positions="rope", **SMALL
    ),
    "encoder": ModelConfig(kind="encoder", num_layers=2, norm_order="post", **SMALL),
    "encoder-decoder": ModelConfig(kind="encoder-decoder", num_layers=1, **SMALL),
}
TOKENS = jnp.array(np.random.default_rng(5).integers(0, 23, (3, 11)), jnp.int32)


def is_quantized(x):
    return isinstance(x, QuantizedKernel | QuantizedTable)


def plain(params):
    """Dequantise all kernels."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if is_quantized(x) else x, params, is_leaf=is_quantized
    )


def logits(config, params, **given):
    if config.kind == "encoder-decoder":
        given["source"] = TOKENS[:, ::-1]
    return build(config).apply({"params": params}, TOKENS, **given)[0]


def quantize_and_back(kernel, kind):
    """Return a quantised kernel, and its dequantised values in float64."""

    @jax.jit
    def both(kernel):
        found = quantize({"block_0": {"up": {"kernel": kernel}}}, kind)["block_0"]["up"]["kernel"]
        return found, found.astype(jnp.float32)

    found, back = both(kernel)
    return found, np.asarray(back, np.float64)


@pytest.mark.slow_except("int4-7-32")
@pytest.mark.parametrize(("kind", "levels", "group"), [("int8", 127, 96), ("int4", 7, 32)])
def test_quantization_error_is_at_most_half_a_step(rng, kind, levels, group):
    kernel = rng.normal(size=(96, 5)).astype(np.float32) * rng.lognormal(size=(1, 5))
    kernel[:, 3] = 0.0
    kernel = kernel.astype(np.float32)
    found, back = quantize_and_back(kernel, kind)
    assert back.shape == found.shape == kernel.shape
    largest = np.abs(kernel.astype(np.float64)).reshape(-1, group, 5).max(axis=1, keepdims=True)
    error = np.abs(back - kernel).reshape(-1, group, 5)
    assert (error <= largest / (2 * levels) * (1 + 1e-6)).all()
    assert (error.max(axis=1) > largest[:, 0] / (2 * levels) * 0.8)[:, [0, 1, 2, 4]].mean() > 0.6
    assert not back[:, 3].any()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(found))
    assert size == {"int8": 96 * 5 + 4 * 5, "int4": 96 * 5 // 2 + 3 * 4 * 5}[kind]


@pytest.mark.parametrize("traced", [False, True])
def test_int4_keeps_numbers_that_are_already_in_4_bits(rng, traced):
    """Groups as in Q4_0: a positive, negative or zero scale times integers in -8..7."""
    values = rng.integers(-8, 8, (12, 32, 7)).astype(np.float32)
    values[1] = np.abs(values[1] % 4)
    values[2], values[3] = 0, 7
    scale = rng.normal(size=(12, 1, 7)).astype(np.float16).astype(np.float32)
    scale[:, :, 3] = 0
    kernel = (values * scale).reshape(384, 7)
    if traced:
        back = np.asarray(quantize_and_back(kernel, "int4")[1], np.float32)
    else:
        stored = quantize({"block_0": {"up": {"kernel": kernel}}}, "int4")
        back = stored["block_0"]["up"]["kernel"].astype(jnp.float32)
    assert_same_bits(back, kernel)


def test_one_number_between_steps_changes_only_its_group(rng):
    values, scale = rng.integers(-8, 8, (64, 3)).astype(np.float32), np.float32(0.125)
    values[0] = -8
    kernel = values * scale
    kernel[1, 1] = 0.3 * scale
    back = quantize_and_back(kernel, "int4")[1]
    changed = back != kernel
    assert changed[:32, 1].any() and not changed[32:].any() and not changed[:, [0, 2]].any()
    assert np.abs(back - kernel).max() <= scale * 8 / 7 / 2 * (1 + 1e-6)


def test_4_bit_table_matches_its_numbers(rng):
    table = (rng.integers(-8, 8, (67, 32)) * 0.25).astype(np.float32)
    stored = quantize({"embed": {"tokens": table}}, "int4", embeddings=True)["embed"]["tokens"]
    assert stored.bits == 4 and stored.shape == (67, 32)
    assert_same_bits(stored.astype(jnp.float32), table)
    ids = jnp.array([[0, 66, 7], [67, -1, 3]])
    found = np.asarray(jax.jit(stored.look_up)(ids))
    assert_same_bits(found[0], table[[0, 66, 7]])
    assert np.isnan(found[1, :2]).all()
    assert_same_bits(found[1, 2], table[3])
    for rows in (3, 20):  # the compiled kernel takes at most 16 rows, and XLA small tables
        x = rng.normal(size=(rows, 1, 32)).astype(np.float32)
        bias = rng.normal(size=67).astype(np.float32)
        assert_near(table_logits(x, stored, bias), x.astype(np.float64) @ table.T + bias, 1e-5)


def test_few_rows_of_a_large_4_bit_table_match_float64(rng):
    table = (rng.integers(-8, 8, (517, 64)) * 0.25).astype(np.float32)
    stored = quantize({"embed": {"output": table}}, "int4", embeddings=True)["embed"]["output"]
    x = jnp.array(rng.normal(size=(2, 3, 64)), jnp.float32)
    text = jax.jit(lambda x: table_logits(x, stored, None)).lower(x).as_text()
    assert "weight_product" in text or not NATIVE
    assert_near(table_logits(x, stored, None), np.asarray(x, np.float64) @ table.T, 1e-5)


@pytest.mark.slow_except("int8-0.01")
@pytest.mark.parametrize(("kind", "share"), [("int8", 0.01), ("int4", 0.12)])
def test_quantized_product_has_small_relative_error(rng, kind, share):
    kernel = rng.normal(size=(256, 64))
    x = rng.normal(size=(100, 256))
    _, back = quantize_and_back(kernel.astype(np.float32), kind)
    error = np.linalg.norm(x @ (back - kernel)) / np.linalg.norm(x @ kernel)
    assert share / 2 < error < share


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("rows", [2, 17])  # the compiled kernel takes at most 16
def test_product_of_any_number_of_rows_matches_float64(rng, rows, kind):
    kernel, back = quantize_and_back(rng.normal(size=(64, 12)).astype(np.float32), kind)
    x, bias = rng.normal(size=(rows, 64)).astype(np.float32), rng.normal(size=12)
    found = quantized_project(jnp.asarray(x), kernel, jnp.asarray(bias, jnp.float32), 1)
    assert_near(found, x @ back + bias, 1e-5)


@pytest.mark.slow
@pytest.mark.long_except("encoder-False-int8")
@pytest.mark.parametrize(
    ("model", "scan", "kind"),
    [
        ("decoder", False, "int4"),
        ("decoder", True, "int8"),
        pytest.param("encoder-decoder", True, "int4", marks=pytest.mark.long),
        ("encoder", False, "int8"),
        pytest.param("decoder", True, "int4", marks=pytest.mark.long),
        pytest.param("encoder-decoder", False, "int8", marks=pytest.mark.long),
        pytest.param("encoder", True, "int4", marks=pytest.mark.long),
    ],
)
def test_quantized_model_matches_dequantized_model(model, scan, kind):
    config = dataclasses.replace(MODELS[model], scan_layers=scan)
    params = quantize(init_params(config, jax.random.key(0)), kind)
    counted = sum(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
    kernels = {"decoder": 7, "encoder": 6, "encoder-decoder": 16}[model]
    assert counted == (kernels if scan or config.num_layers == 1 else 2 * kernels)
    wanted = logits(config, plain(params))
    assert_near(logits(config, params), wanted, 1e-5)
    key = dataclasses.replace(config, dropout=0.2)
    assert_near(
        logits(key, params, key=jax.random.key(1)),
        logits(key, plain(params), key=jax.random.key(1)),
        1e-5,
    )


@pytest.mark.slow
@pytest.mark.long_except("untied-2")
@pytest.mark.parametrize(("model", "tables"), [("decoder", 1), ("untied", 2)])
def test_8_bit_embeddings_match_dequantized_embeddings(model, tables):
    config = MODELS["decoder"]
    if model == "untied":
        config = dataclasses.replace(config, tie_embeddings=False, logit_bias=True)
    given = init_params(config, jax.random.key(0))
    params = quantize(given, "int8", embeddings=True)
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    assert sum(isinstance(x, QuantizedTable) for x in leaves) == tables
    for name in ("tokens", "output")[:tables]:
        table, exact = params["embed"][name], np.asarray(given["embed"][name], np.float64)
        error = np.abs(np.asarray(table.astype(jnp.float32), np.float64) - exact)
        assert (error.max(axis=1) <= np.abs(exact).max(axis=1) / 254 * (1 + 1e-6)).all()
        assert error.max() > 0
    assert_near(logits(config, params), logits(config, plain(params)), 1e-5)
    apply = jax.jit(build(config).apply)  # tokens under jit are not checked
    beyond = apply({"params": params}, jnp.array([[1, 23]]))[0]
    assert np.isnan(beyond[:, 1]).all() and np.isfinite(beyond[:, 0]).all()


@pytest.mark.slow_except("few rows")
@pytest.mark.parametrize("rows", [1, 67], ids=["few rows", "many rows"])
def test_logits_from_8_bit_table_with_bias_match_float64(rng, rows):
    """Few rows use the compiled kernel, many rows do not."""
    x = rng.normal(size=(rows, 1, 16)).astype(np.float32)
    table, bias = rng.normal(size=(23, 16)), rng.normal(size=23).astype(np.float32)

    @jax.jit
    def multiplied(x, table, bias):
        stored = quantize({"embed": {"output": table}}, "int8", embeddings=True)["embed"]["output"]
        return stored, table_logits(x, stored, bias), table_logits(x, stored, None)

    stored, biased, plain = multiplied(x, table.astype(np.float32), bias)
    exact = np.asarray(stored.values, np.float64) * np.asarray(stored.scale, np.float64)[:, None]
    assert_near(biased, x @ exact.T + bias, 1e-5)
    assert_near(plain, x @ exact.T, 1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_quantized_kernel_supports_input_and_output_capture(scan):
    config = dataclasses.replace(MODELS["decoder"], scan_layers=scan)
    params = quantize(init_params(config, jax.random.key(0)), "int8")["decoder"]
    attention = params["blocks" if scan else "block_0"]["attention"]
    heads = config.num_heads, config.value_dim
    query, out = attention["query"]["kernel"], attention["out"]["kernel"]
    assert (query.inputs, query.outputs) == ((config.d_model,), (config.num_heads, config.key_dim))
    assert (out.inputs, out.outputs) == (heads, (config.d_model,))


@pytest.mark.slow
def test_stacking_quantized_kernels_round_trips():
    config = MODELS["decoder"]
    looped = quantize(init_params(config, jax.random.key(0)), "int4")
    again = unstack_layers(stack_layers(looped))
    jax.tree.map(assert_same_bits, again, looped)
    scanned = dataclasses.replace(config, scan_layers=True)
    assert_near(logits(scanned, stack_layers(looped)), logits(config, looped), 1e-5)


@pytest.mark.slow
@pytest.mark.long_except("True")
@pytest.mark.parametrize("scan", [False, True])
def test_quantized_and_dequantized_models_generate_same_tokens(scan):
    config = dataclasses.replace(MODELS["decoder"], scan_layers=scan)
    params = quantize(init_params(config, jax.random.key(0)), "int8")
    step = make_step(build(config))

    def written(params):
        state = init_cache(config, 3, 17)
        return generate(step, params, TOKENS[:, :5], state, num_tokens=9).tokens

    np.testing.assert_array_equal(written(params), written(plain(params)))


@pytest.mark.long
@pytest.mark.parametrize("scan", [False, True])
def test_adapter_gradients_on_quantized_kernels_match_sum(scan):
    config = dataclasses.replace(MODELS["decoder"], scan_layers=scan)
    params = init_params(config, jax.random.key(0))
    lora = LoraConfig(rank=2, targets="all-linear")
    adapters = init_lora(params, lora, jax.random.key(1))
    rng = np.random.default_rng(2)
    adapters = jax.tree.map(lambda x: jnp.array(rng.normal(0, 0.2, x.shape), x.dtype), adapters)
    params = quantize(params, "int4")

    def loss(adapters, params, join):
        return jnp.square(logits(config, join(params, adapters, lora))).mean()

    found = jax.grad(loss)(adapters, params, with_adapters)
    wanted = jax.grad(loss)(adapters, plain(params), apply_lora)
    jax.tree.map(lambda x, y: assert_near(x, y, 1e-4), found, wanted)


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full"])
def test_backward_pass_dequantizes_one_kernel_at_a_time(remat):
    """In a looped stack, XLA's CPU backend keeps the first copy for the backward pass.

    Compiled for an H200 or a TPU v5e, looped stacks also need no more (benchmarks/NOTES.md).
    """
    width = 256
    kernels = 4 * (4 * width * width + 2 * width * 4 * width)  # bytes of a block in f32

    def working(depth, kind):
        config = ModelConfig(
            vocab_size=23, d_model=width, num_heads=2, num_layers=depth, max_len=8,
            scan_layers=True, remat=remat, positions="rope",
        )  # fmt: skip
        lora = LoraConfig(rank=2)
        params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
        adapters = jax.eval_shape(lambda p: init_lora(p, lora, jax.random.key(1)), params)
        if kind is not None:
            params = jax.eval_shape(lambda p: quantize(p, kind), params)

        def loss(adapters, params, tokens):
            model = with_adapters(params, adapters, lora)
            return build(config).apply({"params": model}, tokens)[0].mean()

        tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        program = jax.jit(jax.grad(loss)).lower(adapters, params, tokens).compile()
        return program.memory_analysis().temp_size_in_bytes

    for kind in ("int8", "int4"):
        assert (working(8, kind) - working(4, kind)) / 4 < 0.1 * kernels
    assert working(4, "int8") < 2.5 * kernels


@pytest.mark.slow
def test_unsupported_quantization_raises_error():
    def one(kernel):
        return {"block_0": {"up": {"kernel": kernel}}}

    with pytest.raises(ConfigError, match=r"^block_0/up/kernel is not finite and cannot be"):
        quantize(one(jnp.full((4, 4), jnp.nan)), "int8")
    twice = quantize(one(jnp.ones((4, 4))), "int8")
    with pytest.raises(ConfigError, match=r"kernel is of type QuantizedKernel: must be an array"):
        quantize(twice, "int8")
    low = quantize({"embed": {"tokens": jnp.ones((4, 4))}, **one(jnp.ones((4, 4)))}, "bf16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(low)} == {"bfloat16"}
