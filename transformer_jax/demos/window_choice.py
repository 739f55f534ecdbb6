"""Choose a window: train encoders of frames with several, and compare accuracy, latency and cost.

    python -m transformer_jax demo window_choice

The frames are those of `--task tones`: log energies of noisy tones, one every 16 ms. A tone lasts 4
to 8 frames, and each frame is to be named, by its letter or as silence. A causal encoder of one
layer sees W frames, and may answer D frames late: what it says at frame t is of frame t - D. So
D frames are the latency, and W is the work of a frame and the memory of the stream.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import ModelConfig, Rope, StreamingEncoder, cross_entropy, init_cache
from transformer_jax.demos.shared import (
    COLOURS,
    Options,
    label,
    new_figure,
    print_table,
    save_picture,
    train,
)
from transformer_jax.training.tasks.signals import HOP, RATE, SILENCE, TONE, WINDOW, log_energies

OPTIONS: Options = {"steps": (800, 200)}

LETTERS, FRAMES, NOISE = 8, 64, 1.1
DELAYS = 0, 1, 2, 4, 8
TIME = 1000 * HOP / RATE
"""Milliseconds from one frame to the next."""


def sounds(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:  # f32[B, T, 16], i32[B, T]
    """Return frames of noisy tones, and the letter in the middle of each; 0 is silence."""
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


def encoder(window: int) -> StreamingEncoder:
    """Return an encoder of one layer that sees so many frames."""
    config = ModelConfig(
        d_model=32, num_layers=1, num_heads=4, positions=Rope(), window=window, init_std=0.1
    )
    return StreamingEncoder(config, frame_dim=16)


def accuracies(window: int, steps: int, seed: int) -> list[float]:
    """Train an encoder with a window; return the share of held-out frames it names, by delay."""
    model = encoder(window)
    frames, letters = sounds(512, seed)  # drawn from anew in every step
    mean, spread = frames.mean(axis=(0, 1)), frames.std(axis=(0, 1))
    later = [np.pad(letters, ((0, 0), (delay, 0)), constant_values=-1)[:, :FRAMES]
             for delay in DELAYS]  # fmt: skip
    labels = np.stack(later, axis=2)  # i32[B, T, delays]; -1 before the first answer
    key = jax.random.key(seed)
    shape = 32, len(DELAYS), LETTERS + 1
    params = {
        "encoder": model.init(key, frames[:1])["params"],
        "head": 0.02 * jax.random.normal(jax.random.fold_in(key, 1), shape),
    }

    def logits(params: Any, frames: jax.Array) -> jax.Array:  # f32[B, T, delays, letters]
        scaled = (frames - mean[None, None]) / spread[None, None]
        features, _ = model.apply({"params": params["encoder"]}, scaled)
        return jnp.einsum("BTD,DCV->BTCV", features, params["head"])

    data = jnp.asarray(frames), jnp.asarray(labels)

    def loss(params: Any, rows: jax.Array) -> jax.Array:  # f32[]
        frames, labels = data[0][rows], data[1][rows]
        return cross_entropy(logits(params, frames), labels, ignore_label=-1)[0]

    rows = np.random.default_rng(seed).integers(0, len(frames), (steps, 16))
    params, _ = train(loss, params, jnp.asarray(rows), 1e-2)
    frames, letters = sounds(128, seed + 1000)
    said = np.asarray(jax.jit(logits)(params, frames).argmax(axis=3))  # [B, T, delays]
    return [
        float((said[:, delay:, i] == letters[:, : FRAMES - delay]).mean())
        for i, delay in enumerate(DELAYS)
    ]


def state_bytes(window: int) -> int:
    """Return the bytes that a stream keeps from chunk to chunk."""
    state = init_cache(encoder(window).config, batch=1, capacity=window)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def draw(means: dict[int, np.ndarray], arguments: Namespace) -> None:
    """Draw percentages by window, f64[delays] each, over the window and over the latency."""
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
    """Run the demonstration; return by window the accuracies f64[seeds, delays]."""
    windows = (1, 8) if arguments.quick else (1, 2, 4, 8, 16, 32)
    seeds = 1 if arguments.quick else 3
    found = {
        window: np.array([accuracies(window, arguments.steps, seed) for seed in range(seeds)])
        for window in windows
    }
    means = {window: values.mean(axis=0) for window, values in found.items()}
    rows = [
        [window, *(f"{100 * value:.1f} %" for value in means[window]), state_bytes(window)]
        for window in windows
    ]
    late = [f"{delay} late ({TIME * delay:.0f} ms)" for delay in DELAYS]
    print_table(["window W", *late, "bytes kept"], rows)
    apart = max(float(np.ptp(values, axis=0).max()) for values in found.values())
    print(f"means of {seeds} seeds, which differ by {100 * apart:.1f} % at most")
    draw({window: 100 * found[window].mean(axis=0) for window in windows}, arguments)
    return found
