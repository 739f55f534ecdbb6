"""Tests of encoders that read vectors, images and audio frames, against formulas."""

import dataclasses
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.test_transformer import INVARIANCE, MODEL_F32, names, shapes
from tests.support import model_oracle as oracle
from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.config import Frames, ModelConfig, Patches, Shaw, T5Buckets, Vectors
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import beam_search
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.models.attention_weights import attention_weights
from transformer_jax.models.factory import build, cache_bytes, num_params
from transformer_jax.models.inputs import frame_positions, strided_windows
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")


SMALL = ModelConfig(
    kind="encoder", vocab_size=31, d_model=26, num_layers=1, num_heads=2, head_dim=6, d_ff=37,
    max_len=41, init_std=0.3,
)  # fmt: skip
VECTORS = Vectors(width=5)
PATCHES = Patches(size=3, height=6, width=9, channels=2)
BARE = Patches(size=2, height=6, width=2, channels=1, class_token=False)
FRAMES = Frames(width=7, kernel=3, stride=2, layers=2)
WIDE = Frames(width=3, kernel=5, stride=3, layers=1)
LENGTH = 13

LEFT_AND_RIGHT = np.array([[-1] * 2 + [*range(11)], [*range(10), -1, -1, -1]], np.int32)
IMAGES = np.array([[*range(7)], [0, 1, 2, -1, 4, 5, -1]], np.int32)

CASES: dict[str, tuple[dict[str, Any], np.ndarray | None]] = {
    "vectors-learned": (dict(inputs=VECTORS), LEFT_AND_RIGHT),
    "vectors-shaw": (dict(inputs=VECTORS, positions=Shaw(max_distance=3)), None),
    "vectors-none": (dict(inputs=VECTORS, positions=None, scale_embeddings=True), LEFT_AND_RIGHT),
    "patches-learned": (dict(inputs=PATCHES, embedding_norm=True, max_len=7), IMAGES),
    "patches-rope": (dict(inputs=BARE, positions="rope"), None),
    "frames-sinusoidal": (dict(inputs=FRAMES, positions="sinusoidal"), LEFT_AND_RIGHT),
    "frames-alibi": (dict(inputs=WIDE, positions="alibi", norm_order="post"), None),
    "frames-t5": (dict(inputs=WIDE, positions=T5Buckets(buckets=8, max_distance=17)),
                  LEFT_AND_RIGHT),
}  # fmt: skip


def random_case(change: dict[str, Any], rng, seed_shape: int = LENGTH):
    """Return a config, random inputs of two rows, and random parameters."""
    config = dataclasses.replace(SMALL, **change)
    row = config.inputs.row_shape(seed_shape)
    x = rng.standard_normal((2, *row)).astype(np.float32)
    return config, x, oracle.randomised(shapes(config), rng)


def applied(config: ModelConfig, params, x, method: str, **arguments):
    """Compile and run one method of the config's model."""
    return jax.jit(partial(build(config).apply, method=method))({"params": params}, x, **arguments)


def tokens_of(config: ModelConfig, positions: np.ndarray) -> np.ndarray:
    """Return which of the encoder's tokens are valid."""
    if isinstance(config.inputs, Frames):
        positions = np.asarray(frame_positions(config.inputs, positions))
    return positions >= 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_match_reference(case, rng):
    change, positions = CASES[case]
    config, x, params = random_case(change, rng)
    arguments = {} if positions is None else dict(positions=positions)
    got = np.asarray(applied(config, params, x, "encode", **arguments))
    count = config.inputs.num_tokens(LENGTH)
    assert got.shape == (2, count, 26) and np.isfinite(got).all()
    want = oracle.encode(config, params, x, **arguments)
    for b in range(2):
        real = np.ones(count, bool) if positions is None else tokens_of(config, positions)[b]
        states = want[b][real] if len(want[b]) == count else want[b]
        assert states.std() > 0.1 and len(states) == real.sum() > 1
        assert_near(got[b][real], states, MODEL_F32, f"row {b}")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["patches-learned", "frames-sinusoidal"])
def test_class_logits_match_reference(case, rng):
    """The head reads the state of the class token, or of the first valid frame."""
    change, positions = CASES[case]
    config, x, params = random_case(dict(change, num_classes=3), rng)
    got = applied(config, params, x, "classify", positions=positions)
    assert got.shape == (2, 3)
    assert_near(got, oracle.classify(config, params, x, positions=positions), MODEL_F32)


@pytest.mark.slow
def test_attention_weights_cover_class_token_and_patches(rng):
    config, x, params = random_case(dict(inputs=PATCHES), rng)
    weights = attention_weights(build(config), params, x)["attention"]
    assert weights.shape == (2, 1, 2, 7, 7)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    states = applied(config, params, x, "encode")
    assert_near(states, np.stack(oracle.encode(config, params, x)), MODEL_F32)


@pytest.mark.slow
def test_class_token_is_added_to_patches(rng):
    """The class token adds parameters, and the patches remain."""
    config, x, params = random_case(dict(inputs=PATCHES, positions=None, num_classes=2), rng)
    assert names(params["inputs"]) == {
        "class_token": (26,), "projection/kernel": (3, 3, 2, 26), "projection/bias": (26,)
    }  # fmt: skip
    changed = {**params, "inputs": {**params["inputs"], "class_token": np.zeros(26, np.float32)}}
    one, two = (applied(config, p, x, "classify") for p in (params, changed))
    assert np.abs(one - two).max() > 1e-3


@pytest.mark.slow
def test_encoder_with_inputs_has_no_token_table():
    plain = dataclasses.replace(SMALL, positions="rope")
    config = dataclasses.replace(plain, inputs=FRAMES)
    own = {
        "inputs/conv_0/kernel": (3, 7, 26), "inputs/conv_0/bias": (26,),
        "inputs/conv_1/kernel": (3, 26, 26), "inputs/conv_1/bias": (26,),
    }  # fmt: skip
    without = {k: v for k, v in names(shapes(plain)).items() if k != "embed/tokens"}
    assert names(shapes(config)) == without | own
    sizes = sum(int(np.prod(shape)) for shape in own.values())
    assert num_params(config) == num_params(plain) - 31 * 26 + sizes
    both = names(shapes(dataclasses.replace(config, kind="encoder-decoder")))
    assert both["embed/tokens"] == (31, 26) and own.items() <= both.items()


# Frames


@pytest.mark.slow
@pytest.mark.long_except("one")
@pytest.mark.parametrize("inputs", [FRAMES, WIDE], ids=["two", "one"])
def test_frame_position_count_matches_unpadded_output(inputs):
    for frames in range(1, LENGTH + 1):
        for left in (0, 1, 2, LENGTH - frames):
            index = np.arange(LENGTH + 2) - left
            places = np.where((index >= 0) & (index < frames), index, -1)[None].astype(np.int32)
            got = np.asarray(frame_positions(inputs, places))[0]
            alone = jnp.ones((1, frames, 1))
            for _ in range(inputs.layers):
                alone = strided_windows(alone, inputs.kernel, inputs.stride)[:, :, 0]
            count = alone.shape[1]
            assert got.tolist() == [*range(count)] + [-1] * (len(got) - count)
            assert inputs.num_tokens(frames) == count


def test_strided_windows_are_centered_and_padded_with_zeros(rng):
    for length, kernel, stride in ((7, 3, 2), (11, 5, 3), (5, 1, 1)):
        x, reach = rng.standard_normal((2, length, 3)).astype(np.float32), kernel // 2
        padded = np.pad(x, ((0, 0), (reach, reach), (0, 0)))
        wanted = np.stack([padded[:, at : at + kernel] for at in range(0, length, stride)], 1)
        assert_same_bits(strided_windows(jnp.asarray(x), kernel, stride), wanted)


@pytest.mark.slow
def test_padded_and_unpadded_frames_produce_same_output(rng):
    """Compare states and gradients of a row without padding and with up to 4 padding frames.

    The contents of padding, even NaN, do not change any bit.
    """
    config, x, params = random_case(dict(inputs=FRAMES, positions="rope"), rng, 6)
    pads = [(0, 4), (1, 3), (2, 2), (3, 1), (4, 0)]
    real = x[0]
    rows = np.stack([np.pad(real, ((a, b), (0, 0)), constant_values=9.0) for a, b in pads])
    index = np.arange(10)[None] - np.array([a for a, _ in pads])[:, None]
    places = np.where((index >= 0) & (index < 6), index, -1).astype(np.int32)
    cotangent = rng.standard_normal((2, 26)).astype(np.float32)

    @jax.jit
    def measure(params, x, positions=None):
        def loss(params):
            given = {} if positions is None else dict(positions=positions)
            states = build(config).apply({"params": params}, x, method="encode", **given)
            return (states[:, :2] * cotangent[None]).sum(), states

        slopes, states = jax.grad(loss, has_aux=True)(params)
        return states, slopes

    states, slopes = measure(params, rows, places)
    alone, slopes_alone = measure(params, np.tile(real[None], (5, 1, 1)))
    assert alone.shape == (5, 2, 26) and states.shape == (5, 3, 26)
    assert_near(states[:, :2], alone, INVARIANCE)
    top = max(np.abs(leaf).max() for leaf in jax.tree.leaves(slopes_alone))
    chex.assert_trees_all_close(slopes, slopes_alone, atol=INVARIANCE * top, rtol=0)
    rows[places < 0] = np.nan
    again, slopes_again = measure(params, rows, places)
    assert_same_bits(again[:, :2], states[:, :2])
    chex.assert_trees_all_equal(slopes_again, slopes, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["vectors-learned", "patches-learned"])
def test_padding_contents_do_not_affect_gradients(case, rng):
    change, positions = CASES[case]
    config, x, params = random_case(change, rng)
    hidden = x.copy()
    if case == "vectors-learned":
        hidden[positions < 0] = np.nan
    else:
        hidden[1, :3, 6:] = hidden[1, 3:, 6:] = np.nan  # patches 2 and 5, after the class token

    @jax.jit
    def slopes(params, x):
        def loss(params):
            given = dict(positions=positions, method="encode")
            states = build(config).apply({"params": params}, x, **given)
            return (jnp.where(positions[:, :, None] >= 0, states, 0) ** 2).sum()

        return jax.grad(loss)(params)

    want = slopes(params, x)
    assert np.abs(want["inputs"]["projection"]["kernel"]).max() > 0.1
    chex.assert_trees_all_equal(slopes(params, hidden), want, strict=True)


# Encoder-decoders

BOTH: dict[str, tuple[dict[str, Any], np.ndarray | None]] = {
    "frames": (dict(inputs=FRAMES, positions="sinusoidal"), LEFT_AND_RIGHT),
    "patches": (dict(inputs=PATCHES, norm_order="post"), None),
}


@pytest.mark.slow
@pytest.mark.long_except("patches")
@pytest.mark.parametrize("case", BOTH)
def test_sequences_generated_from_inputs_match_reference(case, rng):
    """Compare full-forward logits, greedy search and beam search."""
    change, positions = BOTH[case]
    config, source, params = random_case(dict(change, kind="encoder-decoder"), rng)
    model, variables = build(dataclasses.replace(config, implementation="xla")), {"params": params}
    places = {} if positions is None else dict(positions=positions)
    more = {} if positions is None else dict(source_positions=positions)
    read = jax.jit(partial(model.apply, method="init_cache", capacity=5))
    state = read(variables, source, **places)
    cached = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    length = None if case == "patches" else LENGTH
    assert cached == cache_bytes(config, 2, 5, source_length=length)
    start = np.full((2, 1), 1)
    greedy = generate(make_step(model), params, start, fork(state, 1), num_tokens=4)
    written = np.asarray(greedy.tokens)
    best = beam_search(make_step(model), params, start, state, num_tokens=4, num_beams=1)
    np.testing.assert_array_equal(best.tokens[:, 0], written)
    target = np.concatenate([start, written[:, :-1]], axis=1).astype(np.int32)
    got, _ = jax.jit(model.apply)(variables, target, source=source, **more)
    want = oracle.forward(config, params, target, source=source, **more)
    assert want.std() > 0.3
    assert_near(got, want, MODEL_F32)
    np.testing.assert_array_equal(want.argmax(-1), written)


@pytest.mark.slow
def test_patch_encoder_with_scan_and_remat_matches_reference(rng):
    config, x, params = random_case(dict(inputs=PATCHES, num_layers=2), rng)
    scanned = dataclasses.replace(config, scan_layers=True, remat="full")
    want = oracle.encode(config, params, x)
    assert_near(applied(scanned, stack_layers(params), x, "encode"), np.stack(want), MODEL_F32)


# Arguments


@pytest.mark.slow_except(
    "inputs0-x0-int32\\\\[2, 3\\\\]: must be floats \\\\[B, T, D\\\\]",
    "inputs1-x1-int32\\\\[2, 3, 5\\\\]: must be floats",
    "inputs3-x3-float32\\\\[2, 0, 7\\\\]: must be floats",
    "inputs5-x5-float32\\\\[2, 9, 6, 2\\\\]: must be floats",
)
@pytest.mark.parametrize(
    ("inputs", "x", "message"),
    [
        (VECTORS, np.zeros((2, 3), np.int32), r"int32\[2, 3\]: must be floats \[B, T, D\]"),
        (VECTORS, np.zeros((2, 3, 5), np.int32), r"int32\[2, 3, 5\]: must be floats"),
        (FRAMES, np.zeros((2, 3, 5), np.float32), r"float32\[2, 3, 5\]: .* of rows \[3, 7\]"),
        (FRAMES, np.zeros((2, 0, 7), np.float32), r"float32\[2, 0, 7\]: must be floats"),
        (PATCHES, np.zeros((2, 6, 9), np.float32),
         r"must be floats \[B, H, W, C\] of .*\[6, 9, 2\]"),
        (PATCHES, np.zeros((2, 9, 6, 2), np.float32), r"float32\[2, 9, 6, 2\]: must be floats"),
        (VECTORS, [[[1.0]]], r"inputs are of type list: must be floats"),
    ],
)  # fmt: skip
def test_inputs_with_wrong_shape_or_dtype_raise_error(inputs, x, message):
    config = dataclasses.replace(SMALL, inputs=inputs)
    with pytest.raises(ValueError, match=message):
        build(config).apply({"params": {}}, x, method="encode")


@pytest.mark.slow
def test_contradictory_model_arguments_raise_error(rng):
    config, x, params = random_case(dict(inputs=PATCHES), rng)
    ids = np.zeros((2, 7), np.int32)
    for more, message in (
        ({}, r"inputs is Patches\(.*such a model has no token logits"),
        (
            dict(method="encode", segments=ids),
            "segments with Patches are not supported: use one row",
        ),
        (dict(method="encode", positions=ids[:, 1:]), r"positions \(2, 6\) and tokens \(2, 7\)"),
    ):
        with pytest.raises(ValueError, match=message):
            build(config).apply({"params": params}, x, **more)
    config, x, params = random_case(dict(inputs=FRAMES), rng)
    with pytest.raises(ValueError, match=r"positions \(2, 4\) and tokens \(2, 13\)"):
        places = np.zeros((2, 4), np.int32)
        build(config).apply({"params": params}, x, method="encode", positions=places)
