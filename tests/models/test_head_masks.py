"""Check head masks: what they multiply, and their gradient, which is each head's importance."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import model_oracle as oracle
from tests.support.tolerances import assert_near
from transformer_jax.config import ModelConfig, Shaw, T5Buckets
from transformer_jax.models.factory import build, init_cache, init_params
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL_F32 = 5e-6
"""Error in f32 against float64, relative to the largest: as in test_transformer.py."""

GRADIENT = 1e-4
"""Error of a gradient in f32 against central differences of float64 logits."""

SMALL = ModelConfig(
    vocab_size=31, d_model=26, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=6, d_ff=37,
    max_len=41, init_std=0.3, positions="rope",
)  # fmt: skip

# The name of each argument, and the attention that it masks.
STACKS = {
    "head_mask": ("decoder", "attention"),
    "cross_head_mask": ("decoder", "cross_attention"),
    "encoder_head_mask": ("encoder", "attention"),
}
BOTH = dict(kind="encoder-decoder", positions=T5Buckets(buckets=8, max_distance=17))
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "decoder": (dict(), ("head_mask",)),
    "decoder-shaw": (dict(positions=Shaw(max_distance=3)), ("head_mask",)),
    "encoder": (dict(kind="encoder"), ("head_mask",)),
    "encoder-decoder": (BOTH, tuple(STACKS)),
}


def prepared(case: str, rng):
    """Return a config, its arguments, random parameters and a random mask of each attention."""
    change, masked = CASES[case]
    config = dataclasses.replace(SMALL, **change)
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    tokens = rng.integers(0, 31, (2, 7), dtype=np.int32)
    arguments = {}
    if config.kind == "encoder-decoder":
        arguments["source"] = rng.integers(0, 31, (2, 5), dtype=np.int32)
    masks = {name: rng.uniform(-0.5, 1.5, (2, 3)).astype(np.float32) for name in masked}
    for mask in masks.values():
        mask[1, 2] = 0.0
    return config, tokens, arguments, oracle.randomised(shapes, rng), masks


def scaled(config: ModelConfig, params, masks: dict[str, np.ndarray]):
    """Return the parameters whose output matrices have each head's rows times its mask."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for name, mask in masks.items():
        stack, branch = STACKS[name]
        stack = "encoder" if config.kind == "encoder" else stack
        for i in range(2):
            params[stack][f"block_{i}"][branch]["out"]["kernel"] *= mask[i][:, None, None]
    return params


@pytest.mark.slow_except("decoder-shaw-scan")
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("case", CASES)
def test_a_mask_multiplies_the_rows_of_its_heads_in_the_output_matrix(case, scan, rng):
    """Compare with the formulas on such a matrix: a mask of 0 deletes its head's rows."""
    config, tokens, arguments, params, masks = prepared(case, rng)
    want = oracle.forward(config, scaled(config, params, masks), tokens, **arguments)
    plain = oracle.forward(config, params, tokens, **arguments)
    assert np.abs(want - plain).max() > 0.1
    model = build(dataclasses.replace(config, scan_layers=scan))

    @jax.jit
    def apply(params, masks):
        own = stack_layers(params) if scan else params
        return model.apply({"params": own}, tokens, **arguments, **masks)

    got, _ = apply(params, masks)
    assert_near(got, want, MODEL_F32)


@pytest.mark.slow
@pytest.mark.long_except("decoder")
@pytest.mark.parametrize("case", ["decoder", "encoder-decoder"])
def test_the_gradient_of_a_mask_is_that_of_central_differences(case, rng):
    config, tokens, arguments, params, masks = prepared(case, rng)
    cotangent = rng.standard_normal((2, 7, 31)).astype(np.float32)
    apply, step = build(config).apply, 1e-5

    @jax.jit
    def gradient(masks):
        def loss(masks):
            logits, _ = apply({"params": params}, tokens, **arguments, **masks)
            return (logits * cotangent).sum()

        return jax.grad(loss)(masks)

    def loss(masks) -> float:
        logits = oracle.forward(config, scaled(config, params, masks), tokens, **arguments)
        return float((logits * cotangent).sum())

    got = gradient(masks)
    for name, mask in masks.items():
        for at in ((0, 1), (1, 2)):
            ends = []
            for sign in (1, -1):
                moved = mask.astype(np.float64)
                moved[at] += sign * step
                ends.append(loss({**masks, name: moved}))
            want = (ends[0] - ends[1]) / (2 * step)
            assert abs(want) > 1e-2 and abs(got[name][at] - want) <= GRADIENT * max(1, abs(want))


@pytest.mark.slow
def test_a_mask_of_heads_alone_is_that_of_every_layer(rng):
    config, tokens, _, params, _ = prepared("decoder", rng)
    mask = np.array([1.0, 0.0, 0.5], np.float32)
    apply = jax.jit(build(config).apply)
    got, _ = apply({"params": params}, tokens, head_mask=mask)
    want = oracle.forward(
        config, scaled(config, params, {"head_mask": np.stack([mask, mask])}), tokens
    )
    assert_near(got, want, MODEL_F32)


@pytest.mark.slow
def test_masked_heads_decode_from_a_cache_as_in_one_pass(rng):
    config, tokens, _, params, masks = prepared("decoder", rng)
    apply, cache, parts = jax.jit(build(config).apply), init_cache(config, 2, 7), []
    for span in (slice(0, 4), slice(4, 7)):
        logits, cache = apply({"params": params}, tokens[:, span], cache=cache, **masks)
        parts.append(logits)
    want = oracle.forward(config, scaled(config, params, masks), tokens)
    assert_near(np.concatenate(parts, axis=1), want, MODEL_F32)


@pytest.mark.slow
def test_classes_are_of_masked_heads(rng):
    config, tokens, _, _, masks = prepared("encoder", rng)
    config = dataclasses.replace(config, num_classes=2)
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    params = oracle.randomised(shapes, rng)
    got = jax.jit(partial(build(config).apply, method="classify"))(
        {"params": params}, tokens, **masks
    )
    assert_near(got, oracle.classify(config, scaled(config, params, masks), tokens), MODEL_F32)


def test_without_a_mask_nothing_is_multiplied():
    """Count operations: a mask costs one product of each layer, its absence none."""
    config, tokens = dataclasses.replace(SMALL, num_layers=1), np.zeros((2, 7), np.int32)
    params = jax.eval_shape(partial(init_params, config), jax.random.key(0))

    def products(**arguments) -> int:
        program = jax.make_jaxpr(partial(build(config).apply, **arguments))(
            {"params": params}, tokens
        )
        return str(program).count(" = mul ")

    without = products()
    assert products(head_mask=None) == without
    assert products(head_mask=np.ones((1, 3), np.float32)) == without + 1


@pytest.mark.slow_except(
    "cross_head_mask-mask4-cross*",
    "head_mask-mask2-head_mask is int32\\\\[3\\\\]: must be floats",
    "head_mask-mask3-head_mask is a list: must be floats",
)
@pytest.mark.parametrize(
    ("name", "mask", "said"),
    [
        (
            "head_mask",
            np.ones(2, np.float32),
            r"head_mask is float32\[2\]: must be floats \[3\] or",
        ),
        ("head_mask", np.ones((3, 2), np.float32), r"float32\[3, 2\]: must be .* or \[2, 3\]"),
        ("head_mask", np.ones(3, np.int32), r"head_mask is int32\[3\]: must be floats"),
        ("head_mask", [1.0, 1.0, 1.0], "head_mask is a list: must be floats"),
        ("cross_head_mask", np.ones(2, np.float32), r"cross_head_mask is float32\[2\]: must be"),
        ("encoder_head_mask", np.ones(2, np.float32), r"encoder_head_mask is float32\[2\]: must"),
    ],
)
def test_masks_of_another_shape_or_dtype_are_refused(name, mask, said, rng):
    config, tokens = dataclasses.replace(SMALL, **BOTH), np.zeros((2, 7), np.int32)
    with pytest.raises(ValueError, match=said):
        build(config).apply({"params": {}}, tokens, source=tokens, **{name: mask})


@pytest.mark.slow
def test_a_mask_of_an_encoder_that_a_cache_has_read_is_refused(rng):
    config, tokens, arguments, params, _ = prepared("encoder-decoder", rng)
    model = build(config)
    read = partial(model.apply, capacity=7, method="init_cache")
    cache = jax.eval_shape(read, {"params": params}, arguments["source"])
    with pytest.raises(ValueError, match="encoder_head_mask without a source"):
        mask = np.ones(3, np.float32)
        model.apply({"params": params}, tokens, cache=cache, encoder_head_mask=mask)
