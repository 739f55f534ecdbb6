"""Tests of parts of the demonstrations: sequences, counts and small models."""

from __future__ import annotations

import importlib
import math
from typing import Any

import jax
import numpy as np
import pytest

from transformer_jax import ModelConfig, RecurrentConfig, Rope
from transformer_jax.config import Learned
from transformer_jax.lectures.signals import HOP, WINDOW

pytestmark = pytest.mark.usefixtures("quick_compilation")


def part_of(demo: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformer_jax.lectures.demos.{demo}"), name)


def test_generated_sequences_follow_task_rules():
    tokens, letters = part_of("memory", "texts")(7, 11, 3, seed=5)
    assert tokens.shape == (7, 11) and letters.shape == (7,)
    assert (tokens[:, 7] == letters).all() and ((tokens < 8).sum(axis=1) == 1).all()
    assert set(tokens[tokens >= 8]) == set(range(8, 16)) and letters.min() >= 0
    fibonacci = part_of("exposure_bias", "continue_texts")(np.array([[0, 1], [5, 10]]), 8)
    assert fibonacci.tolist() == [[0, 1, 1, 2, 3, 5, 8, 2], [5, 10, 4, 3, 7, 10, 6, 5]]

    drawn = part_of("length_extrapolation", "make_texts")(700, 17, seed=1)
    table = np.random.default_rng(0).integers(0, 11, (11, 11))
    follows = drawn[:, 2:] == table[drawn[:, 1:-1], drawn[:, :-2]]
    assert abs(follows.mean() - (0.9 + 0.1 / 11)) < 0.01 and set(drawn.ravel()) == set(range(11))
    drawn = part_of("norm_order", "make_texts")(1500, seed=1)
    after = np.random.default_rng(0).permutation(11)
    assert drawn.shape == (1500, 8 + 1) and set(drawn.ravel()) == set(range(11))
    assert abs((drawn[:, 1:] == after[drawn[:, :-1]]).mean() - (0.9 + 0.1 / 11)) < 0.01
    rates = part_of("norm_order", "schedules")(8)
    assert rates.shape == (3, 2, 8)
    rising = np.array([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    for (now, later), rate in zip(rates, (0.001, 0.003, 0.01), strict=True):
        np.testing.assert_allclose(now, [rate] * 8)
        np.testing.assert_allclose(later, rate * rising)
    assert (part_of("norm_order", "schedules")(1)[:, 1, 0] == rates[:, 0, 0]).all()

    rows = part_of("variants", "rows_of")(np.arange(12), 3)
    assert rows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    words, ids = part_of("alignment", "encode")([["b", "a"], ["c", "a", "b"]])
    assert (words, ids.tolist()) == (["a", "b", "c"], [[1, 0, -1], [2, 0, 1]])


def test_labels_match_tones_in_earlier_frames(monkeypatch):
    """Without noise, higher letters are loudest in higher bands, and silence has no energy."""
    module = importlib.import_module("transformer_jax.lectures.demos.window_choice")
    monkeypatch.setattr(module, "NOISE", 0.0)
    frames, letters = module.sounds(9, seed=3)
    assert frames.shape == (9, 64, 16) and letters.shape == (9, 64)
    assert set(letters.ravel()) == set(range(9)) and 0.2 < (letters == 0).mean() < 0.6
    again = module.sounds(2, seed=3)
    assert (again[0] == frames[:2]).all() and (again[1] == letters[:2]).all()
    loudest = [frames[letters == letter].mean(axis=0).argmax() for letter in range(1, 9)]
    assert loudest == sorted(loudest) and len(set(loudest)) > 4
    assert frames[letters == 0].max(axis=1).mean() < frames[letters > 0].max(axis=1).mean()
    with monkeypatch.context() as patch:  # the label is the letter at the center of the frame
        cut = lambda sound: np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP]  # noqa: E731
        patch.setattr(module, "log_energies", cut)
        np.testing.assert_array_equal(module.sounds(9, 3)[0][:, :, WINDOW // 2] != 0, letters > 0)

    module.examples.cache_clear()
    later = module.examples(9, 3)[1]
    module.examples.cache_clear()
    assert later.shape == (9, 64, 5)
    for i, delay in enumerate((0, 1, 2, 4, 8)):
        assert (later[:, :delay, i] == -1).all()
        assert (later[:, delay:, i] == letters[:, : 64 - delay]).all()


def test_operation_counts_match_tables():
    """Compare counts from masks and traced programs with explicit sums."""
    formulas = part_of("decoding_cost", "formulas")
    for n, window in ((1, 1), (5, 3), (3, 7), (17, 16)):
        steps = range(1, n + 1)
        whole = sum(sum(range(1, t + 1)) for t in steps)
        assert formulas(n, window) == [whole, sum(steps), sum(min(t, window) for t in steps)]
    expected = [2 * 25 * 3, 2 * 5 * 9, 3 * 5 * 9, 8 * 5 * 9, 4 * 5 * 9]
    assert part_of("operations", "count")(5, 3) == expected
    assert part_of("operations", "formulas")(5, 3) == expected
    assert part_of("path_length", "formulas")(10, 4) == ([10, 1, 1], [10, 1, 3])

    def shifted(state):  # the value at t - 2 moves to t
        return jax.numpy.concatenate([0 * state[:2], state[:-2]])

    first = np.eye(8, dtype=np.float32)[1]
    assert part_of("path_length", "steps_until_dependent")(shifted, first, first) == 3


def test_windows_and_streams_compute_expected_number_of_frames(monkeypatch):
    """A sum of 2 (3 - 1) + 1 = 5 frames replaces two layers with window 3."""
    module = importlib.import_module("transformer_jax.lectures.demos.streaming_windows")
    config = ModelConfig(d_model=4, num_layers=2, num_heads=1, positions=Rope(), window=3)
    frames = np.random.default_rng(0).integers(0, 9, (1, 24, 1))
    padded = np.pad(frames, ((0, 0), (4, 0), (0, 0)))
    whole = sum(padded[:, i : i + 24] for i in range(5))

    def apply(part, state):
        before = np.zeros((1, 4, 1)) if state is None else state[:, -4:]
        line = np.concatenate([before, part], axis=1)
        return sum(line[:, i : i + part.shape[1]] for i in range(5)), line

    q, k = np.array([3, 4]), np.array([1, 2, 3, 4])
    assert module.products(3, q, k) == 6
    monkeypatch.setattr(
        module, "products",
        lambda w, q, k: int(((q[:, None] >= k) & (q[:, None] - k < w)).sum()),
    )  # fmt: skip
    monkeypatch.setattr(
        module, "init_cache", lambda config, batch, capacity: np.zeros((batch, 4, 1))
    )
    outputs, run, pairs = module.run_overlapping(apply, frames, 4, config)
    assert (np.asarray(outputs) == whole).all()
    # chunks of 8, the last two after 4 earlier frames; each has 1 + 2 + 3 + 3 ... pairs
    assert (run, pairs) == (8 + 12 + 12, 2 * ((3 * 8 - 3) + 2 * (3 * 12 - 3)))
    assert (np.asarray(module.run_overlapping(apply, frames, 3, config)[0]) != whole).any()
    outputs, run, pairs = module.run_streaming(apply, frames, config)
    assert (np.asarray(outputs) == whole).all()
    assert (run, pairs) == (24, 2 * (3 * 24 - 3))


def test_layer_stack_matches_float64():
    """Compare a block, its residual connections and its norms with NumPy."""
    module = importlib.import_module("transformer_jax.lectures.demos.depth")
    draw = np.random.default_rng(0)
    shapes = {"qkv": (32, 96), "out": (32, 32), "up": (32, 128), "down": (128, 32)}
    drawn = {
        name: array.shape
        for name, array in jax.eval_shape(module.init_block, jax.random.key(0)).items()
    }
    assert drawn == shapes
    params = {
        "tokens": draw.standard_normal((11, 32)), "read": draw.standard_normal((32, 11)),
        "blocks": {k: 0.2 * draw.standard_normal((1, *shape)) for k, shape in shapes.items()},
    }  # fmt: skip
    tokens, nudges = draw.integers(0, 11, (2, 5)), draw.standard_normal((1, 2, 5, 32))
    angles = np.arange(5)[:, None] / 10_000 ** (np.arange(16) / 16)
    places = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(5, 32)
    p = {name: array[0] for name, array in params["blocks"].items()}

    def norm(x):
        centred = x - x.mean(axis=-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)

    def attention(x):
        q, k, v = np.split(x @ p["qkv"], 3, axis=-1)
        out = np.zeros_like(q)
        for b, t, n in np.ndindex(2, 5, 4):
            at = slice(8 * n, 8 * n + 8)
            weights = np.exp(k[b, : t + 1, at] @ q[b, t, at] / math.sqrt(8))
            out[b, t, at] = weights / weights.sum() @ v[b, : t + 1, at]
        return out @ p["out"]

    def feed_forward(x):
        return np.maximum(x @ p["up"], 0) @ p["down"]

    x = params["tokens"][tokens] + places + nudges[0]
    x = x + attention(norm(x))
    x = norm(x + feed_forward(norm(x)))
    found = jax.jit(module.run, static_argnums=0)(
        "pre-norm", jax.tree.map(np.float32, params), tokens, nudges
    )
    np.testing.assert_allclose(found, x @ params["read"], atol=1e-3)
    x, f = draw.standard_normal((3, 32)), lambda x: 2 * x + 1
    expected = {
        "no residual": f(x),
        "no norm": x + f(x),
        "post-norm": norm(x + f(x)),
        "pre-norm": x + f(norm(x)),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(module.part(name, f, np.float32(x)), value, atol=1e-4)


def patch_zeros(monkeypatch, module: Any, steps: tuple[int, ...], rate: float) -> None:
    """Replace parameters by zeros and skip training, so that all tokens are equally likely."""

    def train(loss, params, batches, learning_rate):
        assert (jax.tree.leaves(batches)[0].shape[: len(steps)], learning_rate) == (steps, rate)
        assert jax.eval_shape(loss, params, jax.tree.map(lambda x: x[0], batches)).shape == ()
        return params, np.zeros(steps[0])

    original = module.init_params

    def init_params(config, key):
        shapes = jax.eval_shape(lambda: original(config, jax.random.key(0)))
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "init_params", init_params)


@pytest.mark.slow_except("length_extrapolation")
@pytest.mark.parametrize("name", ["memory", "length_extrapolation", "exposure_bias", "variants"])
def test_zero_initialized_model_guesses_uniformly(name, monkeypatch):
    """With equal logits, the model predicts token 0 and the loss is log V."""
    module = importlib.import_module(f"transformer_jax.lectures.demos.{name}")
    sizes: dict[str, Any] = dict(d_model=4, num_layers=1, num_heads=2, positions=Rope())
    if name == "memory":
        patch_zeros(monkeypatch, module, (3, 16), 1e-2)
        config = RecurrentConfig(cell="rnn", vocab_size=16, d_embed=3, d_hidden=5)
        found = module.accuracies(config, [1, 2], 3, jax.random.split(jax.random.key(0), 1))
        right = [[(module.texts(128, 3, delay, 2)[1] == 0).mean()] for delay in (1, 2)]
        np.testing.assert_allclose(found, right, atol=1e-6)
    elif name == "length_extrapolation":
        patch_zeros(monkeypatch, module, (3, 2, 5), 0.008)
        texts, longer = module.make_texts(6, 5, 1).reshape(3, 2, 5), module.make_texts(2, 7, 2)
        config = ModelConfig(vocab_size=11, max_len=5, **sizes)
        found = module.losses_by_position(config, texts, longer, 0)
        np.testing.assert_allclose(found, [math.log(11)] * 6, rtol=1e-6)
        learned = ModelConfig(vocab_size=11, max_len=5, **sizes | {"positions": Learned()})
        assert module.losses_by_position(learned, texts, longer, 0) is None
    elif name == "exposure_bias":
        patch_zeros(monkeypatch, module, (3, 16, 6), 0.02)
        config = ModelConfig(vocab_size=11, window=2, **sizes)
        forced, free = module.measure_errors(config, module.train_model(config, 3, 5, 0), 3)
        texts = np.array([(a, b) for a in range(11) for b in range(11)])
        rest = module.continue_texts(texts, 5)[:, 2:]
        assert forced.tolist() == free.tolist() == (rest != 0).mean(axis=0).tolist()
    else:
        patch_zeros(monkeypatch, module, (3, 12, 5), 4e-3)
        config = ModelConfig(vocab_size=13, **sizes)
        texts = np.random.default_rng(0).integers(0, 13, (9, 5))
        found = module.held_out_losses(config, texts, texts[:4], 3, range(2))
        np.testing.assert_allclose(found, [math.log(13)] * 2, rtol=1e-6)
