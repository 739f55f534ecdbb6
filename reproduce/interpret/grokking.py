"""Train on modular addition until the model generalizes, and find the frequencies that it uses.

    python -m reproduce.interpret.grokking --seeds 3

This script reproduces Power et al. 2022, "Grokking" (arXiv:2201.02177), and Nanda et al. 2023,
"Progress measures for grokking via mechanistic interpretability" (arXiv:2301.05217). A single block
without norms reads a, b, and "=", and learns a + b mod p from some of the pairs. Long after it has
learned these pairs, it also predicts the other pairs correctly. It uses a few frequencies k of a
Fourier series: its logits are sums of waves of a + b,

    cos(w (a + b)), sin(w (a + b)),    w = 2 pi k / p.

The restricted loss is computed from only the mean of the logits and these waves. The excluded loss
is computed from the logits without these waves. The tokens a and b are read into a cache, and only
"=" passes through the whole block, which reduces the cost to a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import transformer_jax as tj
from reproduce.interpret.induction import halfway
from reproduce.interpret.shared import print_figures, read_arguments
from transformer_jax.lectures.demos.shared import COLOURS, label, new_figure, save_picture

CHUNK = 100
"""Number of steps between two measurements of the model."""
KEY_FREQUENCIES = 5


class Run(NamedTuple):
    """Measurements during one training run, at step 0 and after each chunk of steps."""

    steps: np.ndarray  # i32[C]
    accuracy: np.ndarray  # f32[C, 2], for the training pairs and the other pairs
    loss: np.ndarray  # f32[C, 2], in nats
    restricted: np.ndarray  # f32[C], loss on all pairs
    excluded: np.ndarray  # f32[C], loss on the training pairs
    power: np.ndarray  # f32[C, (p - 1) / 2], for frequencies 1, 2, ... of the embedding
    frequencies: np.ndarray  # i32[5], the largest at the end of training


def all_pairs(p: int) -> tuple[np.ndarray, np.ndarray]:  # i32[p^2, 3], i32[p^2]
    """Return the rows a, b, "=" for all pairs, and a + b mod p. The token for "=" is p."""
    a, b = np.divmod(np.arange(p * p, dtype=np.int32), p)
    return np.stack([a, b, np.full_like(a, p)], axis=1), (a + b) % p


def spectrum(embedding: np.ndarray) -> np.ndarray:  # f32[p, D] -> f32[(p - 1) / 2]
    """Return the squared norm of each frequency over the tokens, starting from frequency 1."""
    return (np.abs(np.fft.rfft(embedding, axis=0))[1:] ** 2).sum(axis=1)


def waves(logits: np.ndarray, frequencies: np.ndarray) -> np.ndarray:  # [p^2, p] -> [p^2, p]
    """Return the component of the logits for all pairs that consists of the waves of a + b."""
    p = logits.shape[1]
    a, b = np.divmod(np.arange(p * p), p)
    angles = 2 * np.pi * frequencies[:, None] * (a + b)[None] / p
    basis = np.concatenate([np.cos(angles), np.sin(angles)]) * (2 / p**2) ** 0.5  # orthonormal
    return basis.T @ (basis @ logits)


def loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean cross-entropy in nats, in float64 because late losses are very small."""
    logits = logits - logits.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return float((np.log(np.exp(logits).sum(axis=1)) - chosen).mean())


def fit(seed: int, sizes: Any) -> Run:
    """Train a model with AdamW on all training pairs in each step, and measure it."""
    p, width, key = sizes.modulus, sizes.width, jax.random.key(seed)
    config = tj.ModelConfig(
        vocab_size=p + 1, d_model=width, num_layers=1, num_heads=4, max_len=3, norm=None,
        activation="relu", tie_embeddings=False, init_std=width**-0.5, implementation="xla",
    )  # fmt: skip
    model, (rows, labels) = tj.build(config), all_pairs(p)
    order = np.asarray(jax.random.permutation(jax.random.fold_in(key, 1), p * p))
    trained, others = np.split(order, [p * p * sizes.percent // 100])
    optimizer = optax.adamw(1e-3, b1=0.9, b2=0.98, weight_decay=1.0)

    def read(params: Any, rows: jax.Array) -> jax.Array:  # f32[B, p]
        cache = tj.init_cache(config, len(rows), 3)
        cache = model.apply({"params": params}, rows[:, :2], cache=cache)[1]
        return model.apply({"params": params}, rows[:, 2:], cache=cache)[0][:, 0, :p]

    def of_batch(params: Any) -> jax.Array:
        return tj.cross_entropy(read(params, rows[trained]), jnp.asarray(labels[trained]))[0]

    def update(state: Any, _: None) -> tuple[Any, None]:
        params, moments = state
        updates, moments = optimizer.update(jax.grad(of_batch)(params), moments, params)
        return (optax.apply_updates(params, updates), moments), None

    chunk = jax.jit(lambda state: jax.lax.scan(update, state, None, length=CHUNK)[0])
    params = tj.init_params(config, jax.random.fold_in(key, 0))
    state, look, seen = (params, optimizer.init(params)), jax.jit(read), []
    for first in range(0, sizes.steps + 1, CHUNK):
        logits = np.asarray(look(state[0], jnp.asarray(rows)), np.float64)
        seen.append((logits, spectrum(np.asarray(state[0]["embed"]["tokens"])[:p])))
        if first < sizes.steps:
            state = chunk(state)
    every, power = (np.stack(x) for x in zip(*seen, strict=True))
    frequencies = 1 + np.sort(np.argsort(-power[-1])[:KEY_FREQUENCIES])
    accuracy, losses, restricted, excluded = [], [], [], []
    for logits in every:
        kept = waves(logits, frequencies)
        accuracy.append([(logits[i].argmax(1) == labels[i]).mean() for i in (trained, others)])
        losses.append([loss(logits[i], labels[i]) for i in (trained, others)])
        restricted.append(loss(logits.mean(axis=0, keepdims=True) + kept, labels))
        excluded.append(loss((logits - kept)[trained], labels[trained]))
    steps = CHUNK * np.arange(len(seen))
    found = map(np.asarray, (accuracy, losses, restricted, excluded))
    return Run(steps, *found, power, frequencies)


def first_step(steps: np.ndarray, reached: np.ndarray) -> float:
    """Return the first step at which `reached` is true, or NaN if there is none."""
    return float(steps[reached.argmax()]) if reached.any() else float("nan")


def share(power: np.ndarray) -> float:
    """Return the fraction of the total squared norm in the largest frequencies."""
    return float(np.sort(power)[-KEY_FREQUENCIES:].sum() / power.sum())


def main(argv: Sequence[str] | None = None) -> list[Run]:
    """Run the command and return the training runs."""
    arguments = read_arguments(__doc__, argv, steps=6000, width=48, modulus=53, percent=50)
    runs = [fit(seed, arguments) for seed in arguments.seeds]
    count = len(runs[0].power[0])
    print_figures(arguments, [
        ("step at which it knows all its pairs", "early",
         [first_step(x.steps, x.accuracy[:, 0] == 1) for x in runs]),
        ("step at which it knows 95 % of the others", "long after",
         [first_step(x.steps, x.accuracy[:, 1] > 0.95) for x in runs]),
        ("accuracy on the others, end", "1", [x.accuracy[-1, 1] for x in runs]),
        (f"embedding: {KEY_FREQUENCIES} largest of {count} frequencies, start", "few of the norm",
         [share(x.power[0]) for x in runs]),
        ("the same, end", "nearly all", [share(x.power[-1]) for x in runs]),
        ("loss of the others, end", "low", [x.loss[-1, 1] for x in runs]),
        ("restricted loss, end", "as low", [x.restricted[-1] for x in runs]),
        ("excluded loss, end", "high", [x.excluded[-1] for x in runs]),
        ("step at which the restricted loss is half", "before that",
         [halfway(x.restricted, x.steps) for x in runs]),
        ("step at which the loss of the others is half", "",
         [halfway(x.loss[:, 1], x.steps) for x in runs]),
    ])  # fmt: skip
    if arguments.out:
        draw_picture(arguments, runs)
    return runs


def draw_picture(arguments: Any, runs: list[Run]) -> None:
    """Plot the accuracy of all runs over the steps, and the losses and frequencies of seed 0."""
    figure, plots = new_figure(3)
    for i, run in enumerate(runs):
        for side, name in enumerate(("pairs of the training", "the others")):
            style: Any = dict(color=COLOURS[side], alpha=0.8, label=name if i == 0 else None)
            plots[0].plot(run.steps, run.accuracy[:, side], **style)
    label(plots[0], "accuracy", "step", "share")
    first = runs[0]
    kinds = (("others", first.loss[:, 1]), ("restricted", first.restricted),
             ("excluded", first.excluded))  # fmt: skip
    for color, (name, values) in zip(COLOURS, kinds, strict=False):
        plots[1].plot(first.steps, values, color=color, label=name)
    label(plots[1], "losses of seed 0", "step", "nats")
    x = np.arange(1, len(first.power[0]) + 1)
    for color, at, name in ((COLOURS[5], 0, "start"), (COLOURS[0], -1, "end")):
        plots[2].plot(x, first.power[at] / first.power[at].sum(), "o-", color=color, label=name)
    label(plots[2], "embedding of seed 0", "frequency", "share of the squared norm")
    save_picture(figure, arguments, "grokking")


if __name__ == "__main__":
    main()
