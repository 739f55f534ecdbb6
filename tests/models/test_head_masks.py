"""Tests of `interpret.scale` as a head mask: outputs and gradients (head importance)."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from tests.models.test_transformer import MODEL_F32, shapes
from tests.support import model_oracle as oracle
from tests.support.tolerances import assert_near
from transformer_jax.config import ModelConfig, Shaw, T5Buckets
from transformer_jax.interpret import scale
from transformer_jax.models.factory import build, init_cache
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")


GRADIENT = 1e-4
"""Error of a gradient in f32 against central differences of float64 logits."""

SMALL = ModelConfig(
    vocab_size=31, d_model=26, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=6, d_ff=37,
    max_len=41, init_std=0.3, positions="rope",
)  # fmt: skip

OWN, CROSS = "block_*/attention/heads", "block_*/cross_attention/heads"
SOURCE = "encoder/block_*/attention/heads"
# The stack and the branch of each masked place.
STACKS = {
    OWN: ("decoder", "attention"), CROSS: ("decoder", "cross_attention"),
    SOURCE: ("encoder", "attention"),
}  # fmt: skip
BOTH = dict(kind="encoder-decoder", positions=T5Buckets(buckets=8, max_distance=17))
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "decoder": (dict(), (OWN,)),
    "decoder-shaw": (dict(positions=Shaw(max_distance=3)), (OWN,)),
    "encoder": (dict(kind="encoder"), (OWN,)),
    "encoder-decoder": (BOTH, tuple(STACKS)),
}


def masked(config: ModelConfig, masks):
    """Return the model with its heads multiplied by the mask of each place."""
    model = build(config)
    for place, mask in masks.items():
        model = model.edited(scale(place, mask))
    return model


def random_case(case: str, rng):
    """Return a config, arguments, random parameters and a random mask for each attention."""
    change, masked = CASES[case]
    config = dataclasses.replace(SMALL, **change)
    tokens = rng.integers(0, 31, (2, 7), dtype=np.int32)
    arguments = {}
    if config.kind == "encoder-decoder":
        arguments["source"] = rng.integers(0, 31, (2, 5), dtype=np.int32)
    masks = {name: rng.uniform(-0.5, 1.5, (2, 3)).astype(np.float32) for name in masked}
    for mask in masks.values():
        mask[1, 2] = 0.0
    return config, tokens, arguments, oracle.randomised(shapes(config), rng), masks


def scaled(config: ModelConfig, params, masks: dict[str, np.ndarray]):
    """Multiply the rows of each head in the output matrices by its mask."""
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
def test_head_mask_matches_scaled_output_matrix(case, scan, rng):
    """Compare with the oracle on scaled output matrices; a mask of 0 removes the head."""
    config, tokens, arguments, params, masks = random_case(case, rng)
    want = oracle.forward(config, scaled(config, params, masks), tokens, **arguments)
    plain = oracle.forward(config, params, tokens, **arguments)
    assert np.abs(want - plain).max() > 0.1
    own_config = dataclasses.replace(config, scan_layers=scan)

    @jax.jit
    def apply(params, masks):
        own = stack_layers(params) if scan else params
        return masked(own_config, masks).apply({"params": own}, tokens, **arguments)

    got, _ = apply(params, masks)
    assert_near(got, want, MODEL_F32)


@pytest.mark.slow
@pytest.mark.long_except("decoder")
@pytest.mark.parametrize("case", ["decoder", "encoder-decoder"])
def test_head_mask_gradient_matches_central_differences(case, rng):
    config, tokens, arguments, params, masks = random_case(case, rng)
    cotangent = rng.standard_normal((2, 7, 31)).astype(np.float32)
    step = 1e-5

    @jax.jit
    def gradient(masks):
        def loss(masks):
            logits, _ = masked(config, masks).apply({"params": params}, tokens, **arguments)
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
def test_head_mask_without_layer_axis_applies_to_all_layers(rng):
    config, tokens, _, params, _ = random_case("decoder", rng)
    mask = np.array([1.0, 0.0, 0.5], np.float32)
    got, _ = jax.jit(masked(config, {OWN: mask}).apply)({"params": params}, tokens)
    want = oracle.forward(config, scaled(config, params, {OWN: np.stack([mask, mask])}), tokens)
    assert_near(got, want, MODEL_F32)


@pytest.mark.slow
def test_cached_decode_with_head_mask_matches_full_forward(rng):
    config, tokens, _, params, masks = random_case("decoder", rng)
    apply, cache, parts = jax.jit(masked(config, masks).apply), init_cache(config, 2, 7), []
    for span in (slice(0, 4), slice(4, 7)):
        logits, cache = apply({"params": params}, tokens[:, span], cache=cache)
        parts.append(logits)
    want = oracle.forward(config, scaled(config, params, masks), tokens)
    assert_near(np.concatenate(parts, axis=1), want, MODEL_F32)


@pytest.mark.slow
def test_head_mask_affects_classifier(rng):
    config, tokens, _, _, masks = random_case("encoder", rng)
    config = dataclasses.replace(config, num_classes=2)
    params = oracle.randomised(shapes(config), rng)
    classify = jax.jit(partial(masked(config, masks).apply, method="classify"))
    got = classify({"params": params}, tokens)
    assert_near(got, oracle.classify(config, scaled(config, params, masks), tokens), MODEL_F32)


def test_program_without_head_mask_has_no_extra_multiplication():
    """A mask adds one multiplication per layer; no mask adds none."""
    config, tokens = dataclasses.replace(SMALL, num_layers=1), np.zeros((2, 7), np.int32)

    def products(masks) -> int:
        program = jax.make_jaxpr(masked(config, masks).apply)({"params": shapes(config)}, tokens)
        return str(program).count(" = mul ")

    assert products({OWN: np.ones((1, 3), np.float32)}) == products({}) + 1


@pytest.mark.parametrize(
    ("place", "mask", "message"),
    [
        (
            OWN,
            np.ones(2, np.float32),
            r"by is float32\[2\], but block_\*/attention/heads has 3 heads",
        ),
        (
            OWN,
            np.ones((3, 3), np.float32),
            r"values for 3 blocks: block_\*/attention/heads matches 2",
        ),
        (OWN, np.ones((2, 2), np.float32), r"by is float32\[2, 2\], but .* has 3 heads"),
        (OWN, np.ones(3, np.int32), r"by is int32\[3\]: must be a float array"),
        (OWN, [1.0, 1.0, 1.0], "by is of type list: must be a float array"),
        (
            "block_0/attention/heads",
            np.ones((2, 3), np.float32),
            r"float32\[2, 3\]: must be a float array",
        ),
        (CROSS, np.ones(2, np.float32), "block_.*/cross_attention/heads has 3 heads"),
        (SOURCE, np.ones((1, 3), np.float32), "values for 1 blocks: encoder/block_.* matches 2"),
        ("block_*/residual", np.ones(3, np.float32), r"block_\*/residual has no heads"),
    ],
)
def test_head_masks_with_wrong_shape_or_dtype_raise_error(place, mask, message, rng):
    config, tokens = dataclasses.replace(SMALL, **BOTH), np.zeros((2, 7), np.int32)
    with pytest.raises(ValueError, match=message):
        apply = partial(masked(config, {place: mask}).apply, source=tokens)
        jax.eval_shape(apply, {"params": shapes(config)}, tokens)
