"""Tests of low-rank adapters: products, gradients, dropout and several adapters in a batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.config import LoraConfig, ModelConfig
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.models.adapters import product
from transformer_jax.models.factory import build, init_cache, init_params
from transformer_jax.models.lora import (
    apply_lora,
    init_lora,
    merge_lora,
    unmerge_lora,
    with_adapters,
)
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = dict(vocab_size=23, d_model=14, num_heads=2, d_ff=19, max_len=17, init_std=0.3)
LORA = LoraConfig(rank=3, alpha=5.0, targets="all-linear")
MODELS = {
    "decoder": ModelConfig(
        num_layers=2, num_kv_heads=1, head_dim=6, glu=True, positions="rope", **SMALL
    ),
    "encoder": ModelConfig(kind="encoder", num_layers=2, norm_order="post", **SMALL),
    "encoder-decoder": ModelConfig(kind="encoder-decoder", num_layers=1, **SMALL),
}
TOKENS = jnp.array(np.random.default_rng(5).integers(0, 23, (3, 11)), jnp.int32)


def random_adapters(params, seed=1, lora=LORA):
    """Return random adapters with nonzero B."""
    adapters = init_lora(params, lora, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.array(rng.normal(0, 0.2, x.shape), x.dtype), adapters)


def logits(config, params, tokens=TOKENS, **given):
    if config.kind == "encoder-decoder":
        given["source"] = tokens[:, ::-1]
    return jax.jit(build(config).apply)({"params": params}, tokens, **given)[0]


def test_product_adds_scaled_low_rank_part(rng):
    x, a, b = (rng.normal(size=shape) for shape in ((2, 3, 6), (6, 2), (2, 5)))
    kernel, part = rng.normal(size=(6, 5)), {"a": a, "b": b}
    trees = {"query": {"kernel": kernel}}, {"query": part}
    trees = ({"block_0": jax.tree.map(jnp.float32, tree)} for tree in trees)
    lora = LoraConfig(rank=2, alpha=5.0, targets=("query",))
    module = with_adapters(*trees, lora)["block_0"]["query"]["kernel"]
    found = jax.jit(lambda x: product(x, module, None, 1, None, "query"))(jnp.float32(x))
    assert_near(found, x @ kernel + 5.0 / 2 * (x @ a @ b), 1e-5)


@pytest.mark.slow
@pytest.mark.long_except("encoder-decoder-False")
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_adapted_logits_match_kernel_plus_adapter(kind, scan):
    config = dataclasses.replace(MODELS[kind], scan_layers=scan)
    params = init_params(config, jax.random.key(0))
    adapters = random_adapters(params)
    found = logits(config, with_adapters(params, adapters, LORA))
    expected = logits(config, apply_lora(params, adapters, LORA))
    assert float(jnp.abs(expected - logits(config, params)).max()) > 0.1
    assert_near(found, expected, 2e-5)


@pytest.mark.slow
def test_adapter_gradients_match_sum_and_frozen_kernels_have_none():
    config = MODELS["decoder"]
    params = init_params(config, jax.random.key(0))
    adapters = random_adapters(params)

    def loss(adapters, params, join):
        return jnp.square(logits(config, join(params, adapters, LORA))).mean()

    found = jax.grad(loss)(adapters, params, with_adapters)
    expected = jax.grad(loss)(adapters, params, apply_lora)
    jax.tree.map(lambda x, y: assert_near(x, y, 1e-5), found, expected)
    kernels = {(14, 19), (19, 14)}  # feed-forward
    trace = jax.make_jaxpr(jax.grad(loss), static_argnums=2)
    assert not kernels & set(_products(trace(adapters, params, with_adapters).jaxpr))
    assert kernels <= set(_products(trace(adapters, params, apply_lora).jaxpr))


def _products(jaxpr):
    """Yield the shapes of all matrix products in a trace."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0].aval.shape
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _products(inner)


@pytest.mark.slow
def test_dropout_applies_only_to_adapter_input():
    rng = np.random.default_rng(3)
    x = jnp.array(rng.normal(size=(2, 400, 6)), jnp.float32)
    lora = LoraConfig(rank=2, targets=("query",), dropout=0.25)
    kernel = jnp.array(rng.normal(size=(6, 5)), jnp.float32)
    part = {"a": jnp.eye(6, 2), "b": jnp.ones((2, 5))}
    tree = {"block_0": {"query": {"kernel": kernel}}}
    module = with_adapters(tree, {"block_0": {"query": part}}, lora)
    kernel = module["block_0"]["query"]["kernel"]
    off = product(x, kernel, None, 1, None, "query")
    on = product(x, kernel, None, 1, jax.random.key(1), "query")
    other = product(x, kernel, None, 1, jax.random.key(1), "value")
    plain = np.asarray(x, np.float64) @ np.asarray(kernel.base, np.float64)
    full = lora.scale * np.asarray(x, np.float64)[..., :2].sum(-1, keepdims=True)
    assert_near(off, plain + full, 1e-5)
    # the adapter adds up two inputs, each multiplied by 0 or 4/3
    added = (np.asarray(on, np.float64) - plain)[..., 0] / lora.scale
    ways = [np.asarray(x)[..., 0] * i + np.asarray(x)[..., 1] * j for i in (0, 4 / 3)
            for j in (0, 4 / 3)]  # fmt: skip
    nearest = np.abs(np.stack(ways) - added).min(axis=0)
    assert nearest.max() < 1e-4
    share = (np.abs(ways[0] - added) < 1e-4).mean()
    assert 0.03 < share < 0.1  # probability that both are dropped: 1/16
    assert float(jnp.abs(on - other).max()) > 0.1  # another module draws different bits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["key", "value"])
def test_dropout_applies_to_cross_attention_adapter_input(name):
    """The key and value of a source are computed in a separate code path."""
    config = dataclasses.replace(MODELS["encoder-decoder"], dropout=0.0, attention_dropout=0.0)
    params = init_params(config, jax.random.key(0))
    lora = LoraConfig(rank=2, targets=(f"cross_attention/{name}",), dropout=0.5)
    adapters = random_adapters(params, lora=lora)
    given = with_adapters(params, adapters, lora)
    off, on = (logits(config, given, key=key) for key in (None, jax.random.key(2)))
    assert float(jnp.abs(on - off).max()) > 1e-3


@pytest.mark.slow
def test_scanned_and_looped_stacks_draw_same_dropout_bits():
    lora = dataclasses.replace(LORA, dropout=0.5)
    config = MODELS["decoder"]
    params = init_params(config, jax.random.key(0))
    adapters = random_adapters(params)
    looped = logits(config, with_adapters(params, adapters, lora), key=jax.random.key(4))
    scanned = logits(
        dataclasses.replace(config, scan_layers=True),
        with_adapters(stack_layers(params), stack_layers(adapters), lora),
        key=jax.random.key(4),
    )
    assert_near(looped, scanned, 1e-5)
    assert float(jnp.abs(looped - logits(config, with_adapters(params, adapters, lora))).max()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_each_row_uses_its_own_adapter(scan):
    config = dataclasses.replace(MODELS["decoder"], scan_layers=scan)
    params = init_params(config, jax.random.key(0))
    several = [random_adapters(params, seed) for seed in (1, 2)]
    rows = jnp.array([1, -1, 0])
    found = logits(config, with_adapters(params, several, LORA, rows))
    alone = [logits(config, with_adapters(params, one, LORA)) for one in several]
    assert_near(found[0], alone[1][0], 1e-5)
    assert_near(found[1], logits(config, params)[1], 1e-5)
    assert_near(found[2], alone[0][2], 1e-5)


@pytest.mark.slow
def test_per_row_and_merged_adapters_generate_same_tokens():
    config = MODELS["decoder"]
    params = init_params(config, jax.random.key(0))
    several = [random_adapters(params, seed) for seed in (1, 2)]
    prompts, step = TOKENS[:2, :4], make_step(build(config))

    def written(params, prompts):
        state = init_cache(config, len(prompts), 10)
        return generate(step, params, prompts, state, num_tokens=6).tokens

    both = written(with_adapters(params, several, LORA, jnp.array([0, 1])), prompts)
    for i, adapters in enumerate(several):
        one = written(merge_lora(params, adapters, LORA), prompts[i : i + 1])
        np.testing.assert_array_equal(both[i], one[0])


@pytest.mark.slow
def test_adapters_with_mismatched_shapes_raise_error():
    config = MODELS["decoder"]
    params = init_params(config, jax.random.key(0))
    adapters = random_adapters(params)
    with pytest.raises(ValueError, match="rows must be passed with several adapters"):
        with_adapters(params, [adapters], LORA)
    with pytest.raises(ValueError, match="rows must be passed with several adapters"):
        with_adapters(params, adapters, LORA, jnp.zeros(3, jnp.int32))
    with pytest.raises(
        ValueError, match=r"rows has shape \[2\]: must have one entry for each of the 3"
    ):
        logits(config, with_adapters(params, [adapters], LORA, jnp.zeros(2, jnp.int32)))
    with pytest.raises(ValueError, match="rank 4 requires"):
        with_adapters(params, adapters, LoraConfig(rank=4, targets="all-linear"))
    with pytest.raises(ValueError, match="only kernels of blocks"):
        tree = {"head": {"kernel": jnp.zeros((14, 23))}}
        with_adapters(tree, {"head": {"a": jnp.zeros((14, 3)), "b": jnp.zeros((3, 23))}}, LORA)
    past = logits(config, with_adapters(params, [adapters], LORA, jnp.array([0, 1, 0])))
    assert np.isnan(np.asarray(past[1])).all()  # there is no adapter 1
    assert not np.isnan(np.asarray(past[::2])).any()


@pytest.mark.slow
def test_unmerge_restores_kernels_within_two_roundings():
    params = init_params(MODELS["decoder"], jax.random.key(0))
    adapters = random_adapters(params)
    merged = merge_lora(params, adapters, LORA)
    back = unmerge_lora(merged, adapters, LORA)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        one, two = (_at(tree, path) for tree in (merged, back))
        bound = 2**-23 * np.maximum(np.abs(leaf), np.abs(one))
        assert (np.abs(np.asarray(two, np.float64) - leaf) <= bound + 1e-12).all()
    norm = params["decoder"]["norm"]["scale"]
    assert_same_bits(back["decoder"]["norm"]["scale"], norm)


def _at(tree, path):
    for part in path:
        tree = tree[part.key]
    return tree
