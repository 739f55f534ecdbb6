"""Compare the accuracy, latency, and cost of encoders with several window sizes.

    python -m transformer_jax demo window_choice

As in `--task tones`, the frames are log energies of noisy tones, with one frame every 16 ms. A tone
lasts 4 to 8 frames, and the encoder labels each frame with its letter or as silence. A causal
encoder with one layer sees W frames, and its answers are delayed by D frames: the answer at frame t
is for frame t - D. D determines the latency. W determines the work per frame and the memory of the
stream.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import (
    ModelConfig,
    Predicate,
    Rope,
    Vectors,
    build,
    cross_entropy,
    init_params,
)
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    label,
    new_figure,
    print_table,
    save_picture,
    train,
)
from transformer_jax.lectures.signals import HOP, RATE, SILENCE, TONE, WINDOW, log_energies
from transformer_jax.models.factory import cache_bytes
from transformer_jax.pytree import Params

OPTIONS: Options = {"steps": (300, 200)}

LETTERS, FRAMES, NOISE = 8, 64, 1.1
DELAYS = 0, 1, 2, 4, 8
TIME = 1000 * HOP / RATE
"""Time from one frame to the next, in milliseconds."""


def sounds(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:  # f32[B, T, 16], i32[B, T]
    """Return frames of noisy tones and the letter at the center of each frame, or 0 for silence."""
    random = np.random.default_rng(seed)
    samples = WINDOW + (FRAMES - 1) * HOP
    middles = WINDOW // 2 + HOP * np.arange(FRAMES)
    frames, letters = [], []
    for _ in range(count):
        sound, names = np.zeros(0), np.zeros(0, int)
        while len(sound) < samples:
            for low, high, letter in ((*SILENCE, 0), (*TONE, random.integers(1, LETTERS + 1))):
                time = np.arange(random.integers(low, high + 1)) / RATE
                turns = (50 + 150 * letter) * time + random.uniform()
                loud = random.uniform(0.5, 1.0) * (letter > 0)
                sound = np.append(sound, loud * np.sin(2 * np.pi * turns))
                names = np.append(names, np.full(len(time), letter))
        sound = sound[:samples] + NOISE * random.standard_normal(samples)
        frames.append(log_energies(sound))
        letters.append(names[middles])
    return np.stack(frames), np.stack(letters)


CONFIG = ModelConfig(
    kind="encoder", inputs=Vectors(width=16), d_model=32, num_layers=1, num_heads=4,
    positions=Rope(), init_std=0.1,
)  # fmt: skip


@cache
def examples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return frames f32[B, T, 16] and labels i32[B, T, delays].

    Each label is the letter of the frame that is `delay` frames earlier, or -1 before the first
    answer.
    """
    frames, letters = sounds(count, seed)
    later = [np.pad(letters, ((0, 0), (delay, 0)), constant_values=-1)[:, :FRAMES]
             for delay in DELAYS]  # fmt: skip
    return frames.astype(np.float32), np.stack(later, axis=2)


def accuracies(windows: list[int], steps: int, seeds: int) -> np.ndarray:
    """Train an encoder for each window and seed. Return accuracies f64[windows, seeds, delays].

    The window is a traced value, so that one program trains all encoders at once.
    """
    model = build(CONFIG)

    def logits(params: Params, frames: jax.Array, window: jax.Array) -> jax.Array:
        """Return f32[B, T, delays, letters] for an encoder with this window."""
        mask = Predicate(lambda q, k: (k <= q) & (q - k < window))
        variables = {"params": params["encoder"]}
        features = model.apply(variables, frames, mask=mask, method="encode")
        return jnp.einsum("BTD,DCV->BTCV", features, params["head"])

    def predict(
        window: jax.Array,  # i32[]
        key: jax.Array,
        frames: jax.Array,  # f32[B, T, 16]
        labels: jax.Array,  # i32[B, T, delays]
        rows: jax.Array,  # i32[steps, 16], indices of the frames
        new: jax.Array,  # f32[B, T, 16]
    ) -> jax.Array:  # i32[B, T, delays]
        """Train on the frames and label the new frames."""
        # the new frames must not affect the standardization
        mean, spread = frames.mean(axis=(0, 1))[None, None], frames.std(axis=(0, 1))[None, None]
        frames, new = (frames - mean) / spread, (new - mean) / spread
        shape = CONFIG.d_model, len(DELAYS), LETTERS + 1
        params = {
            "encoder": init_params(CONFIG, key),
            "head": 0.02 * jax.random.normal(jax.random.fold_in(key, 1), shape),
        }

        def loss(params: Params, rows: jax.Array) -> jax.Array:  # f32[]
            scores = logits(params, frames[rows], window)
            return cross_entropy(scores, labels[rows], ignore_label=-1)[0]

        params, _ = train(loss, params, rows, 1e-2)
        return logits(params, new, window).argmax(axis=3)

    draws = [np.random.default_rng(seed).integers(0, 512, (steps, 16)) for seed in range(seeds)]
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))

    def stacked(count: int, first: int) -> list[np.ndarray]:
        parts = (examples(count, first + seed) for seed in range(seeds))
        return [np.stack(x) for x in zip(*parts, strict=True)]

    # training and evaluation use disjoint seeds
    training, (new, labels) = stacked(512, 0), stacked(128, 1000)
    of_seeds = jax.vmap(predict, in_axes=(None, 0, 0, 0, 0, 0))
    of_all = jax.jit(jax.vmap(of_seeds, in_axes=(0, None, None, None, None, None)))
    found = of_all(np.array(windows, np.int32), keys, *training, np.stack(draws), new)
    right = (np.asarray(found) == labels[None]).sum(axis=(2, 3))  # [windows, seeds, delays]
    return right / (labels >= 0).sum(axis=(1, 2))[None]


def state_bytes(window: int) -> int:
    """Return the size of a stream's state in bytes."""
    # the stream of a causal encoder stores the same keys and values as a decoder
    config = replace(CONFIG, kind="decoder", inputs=None, window=window)
    return cache_bytes(config, 1, window)


def draw(means: dict[int, np.ndarray], arguments: Namespace) -> None:
    """Plot percentages f64[delays], keyed by window, against window and latency."""
    windows, latency = list(means), [TIME * delay for delay in DELAYS]
    figure, (left, right) = new_figure(2)
    for colour, i in zip(COLOURS, range(len(DELAYS)), strict=False):
        curve = [means[window][i] for window in windows]
        left.plot(windows, curve, "o-", ms=4, color=colour, label=f"{latency[i]:.0f} ms late")
    left.set_xscale("log", base=2)
    left.set_xticks(windows, [str(window) for window in windows])
    label(left, "Frames named right", "window W (frames)", "%")
    for colour, window in zip(COLOURS, windows, strict=False):
        right.plot(latency, means[window], "o-", ms=4, color=colour, label=f"W = {window}")
    label(right, "Over the latency", "latency (ms)", "%")
    save_picture(figure, arguments, "window_choice")


def demonstrate(arguments: Namespace) -> dict[int, np.ndarray]:
    """Run the demonstration, and return the accuracies f64[seeds, delays] keyed by window."""
    windows = [1, 8] if arguments.quick else [1, 2, 4, 8, 16]
    seeds = 1 if arguments.quick else 3
    found = dict(zip(windows, accuracies(windows, arguments.steps, seeds), strict=True))
    means = {window: values.mean(axis=0) for window, values in found.items()}
    rows = [
        [window, *(f"{100 * value:.1f} %" for value in means[window]), state_bytes(window)]
        for window in windows
    ]
    late = [f"{delay} late ({TIME * delay:.0f} ms)" for delay in DELAYS]
    print_table(["window W", *late, "bytes kept"], rows)
    spread = max(float(np.ptp(values, axis=0).max()) for values in found.values())
    print(f"means over {seeds} seeds, which differ by at most {100 * spread:.1f} %")
    draw({window: 100 * found[window].mean(axis=0) for window in windows}, arguments)
    return found
