"""Count the features that a toy model represents in fewer dimensions at different sparsities.

    python -m reproduce.interpret.superposition --seeds 3

The model is from Elhage et al. 2022, "Toy Models of Superposition" (arXiv:2209.10652), section 2.
It projects n features x_i to m < n dimensions and reconstructs them. A feature is 0 with
probability S and otherwise uniform in 0..1:

    h = W x,    y = ReLU(W^T h + b),    loss = sum_i I_i (x_i - y_i)^2,    I_i = 0.7^i.

A feature counts as represented if |W_i| > 0.5. The control is the same model without ReLU. The
dimensionality D_i = |W_i|^2 / sum_j (W_i/|W_i| . W_j)^2 is the fraction of a dimension that a
feature has (section 4). Its sum over the features is at most m for every W. A single program trains
all sparsities, all seeds, and the control on the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reproduce.interpret.shared import print_figures, read_arguments
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    label,
    new_figure,
    save_picture,
    train,
)

SPARSITIES = (0.0, 0.7, 0.9, 0.97, 0.99, 0.999)


def draw(key: jax.Array, sparsity: jax.Array, shape: tuple[int, int]) -> jax.Array:  # f32[B, n]
    """Draw features that are 0 with probability `sparsity` and otherwise uniform in 0..1."""
    keep, size = jax.random.uniform(key, (2, *shape))
    return jnp.where(keep >= sparsity, size, 0.0)


def loss(
    params: dict[str, jax.Array],  # W f32[m, n], b f32[n]
    x: jax.Array,  # f32[B, n]
    importance: jax.Array,  # f32[n]
    with_relu: jax.Array | bool,
) -> jax.Array:
    """Return the mean over rows of sum_i I_i (x_i - y_i)^2."""
    y = x @ params["W"].T @ params["W"] + params["b"][None]
    y = jnp.where(with_relu, jax.nn.relu(y), y)
    return (importance[None] * (x - y) ** 2).sum(axis=-1).mean()


def fit(
    seed: jax.Array, sparsity: jax.Array, with_relu: jax.Array, sizes: Any
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return the trained parameters and the mean loss over the last tenth of the steps."""
    n, m, steps = sizes.features, sizes.dimensions, sizes.steps
    key = jax.random.key(seed)
    first = jax.random.fold_in(key, steps)
    importance = 0.7 ** jnp.arange(n)
    params = {"W": jax.random.normal(first, (m, n)) * (2 / (n + m)) ** 0.5, "b": jnp.zeros(n)}

    def of_step(params: Any, step: jax.Array) -> jax.Array:
        x = draw(jax.random.fold_in(key, step), sparsity, (sizes.rows, n))
        return loss(params, x, importance, with_relu)

    params, losses = train(of_step, params, jnp.arange(steps), 3e-3)
    return params, losses[-(steps // 10) :].mean()


def dimensionality(W: np.ndarray) -> np.ndarray:  # [..., m, n] -> [..., n]
    """Return D_i, the fraction of a dimension that each feature has, or 0 if the feature is 0."""
    W = np.asarray(W, np.float64)
    products = np.swapaxes(W, -1, -2) @ W
    square = np.diagonal(products, axis1=-2, axis2=-1)
    return square**2 / np.maximum((products**2).sum(axis=-1), 1e-12)


def main(argv: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Run the command; return W f32[2, S, seeds, m, n] (with, without ReLU), losses, and counts."""
    arguments = read_arguments(__doc__, argv, features=20, dimensions=5, steps=5000, rows=256)
    every = jax.vmap(lambda seed, s, relu: fit(seed, s, relu, arguments), (0, None, None))
    every = jax.vmap(jax.vmap(every, (None, 0, None)), (None, None, 0))
    seeds, sparsities = jnp.asarray(arguments.seeds), jnp.asarray(SPARSITIES)
    params, losses = jax.jit(every)(seeds, sparsities, jnp.asarray([True, False]))
    W, m = np.asarray(params["W"]), arguments.dimensions
    counts = (np.linalg.norm(W, axis=-2) > 0.5).sum(axis=-1)  # [2, S, seeds]
    shares = dimensionality(W).sum(axis=-1)
    rows: list[Any] = []
    for i, s in enumerate(SPARSITIES):
        claim = f"{m}, as PCA" if s == 0 else "more" if s < 0.9 else f"well above {m}"
        rows.append((f"features represented, S = {s}", claim, counts[0, i]))
    rows += [(f"the same without ReLU, S = {s}", f"{m}", counts[1, i])
             for i, s in enumerate(SPARSITIES) if s in (0.0, 0.9, 0.99)]  # fmt: skip
    rows.append(("sum of D_i, S = 0.99", f"about {m}", shares[0, SPARSITIES.index(0.99)]))
    print_figures(arguments, rows)
    if arguments.out:
        draw_picture(arguments, W, counts)
    return {"W": W, "loss": np.asarray(losses), "represented": counts}


def draw_picture(arguments: Any, W: np.ndarray, counts: np.ndarray) -> None:
    """Plot the counts against sparsity, and |W^T W| of seed 0 at three sparsities."""
    figure, plots = new_figure(4, height=3.6)
    x = 1 / (1 - np.asarray(SPARSITIES))
    for i, name in enumerate(("ReLU", "linear")):
        mean, low, high = (f(counts[i], axis=1) for f in (np.mean, np.min, np.max))
        plots[0].plot(x, mean, "o-", color=COLOURS[i], label=name)
        plots[0].fill_between(x, low, high, color=COLOURS[i], alpha=0.2)
    plots[0].set_xscale("log")
    label(plots[0], "features with |W_i| > 0.5", "1 / (1 - S)", "count")
    for axes, i in zip(plots[1:], (0, 2, 4), strict=True):
        axes.imshow(W[0, i, 0].T @ W[0, i, 0], cmap="RdBu", vmin=-1, vmax=1)
        axes.grid(False)
        label(axes, f"W^T W, S = {SPARSITIES[i]}", "feature", "feature", legend=False)
    save_picture(figure, arguments, "superposition")


if __name__ == "__main__":
    main()
