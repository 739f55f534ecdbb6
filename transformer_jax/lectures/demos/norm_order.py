"""Train post-norm and pre-norm models of several depths with and without warmup.

    python -m transformer_jax demo norm_order

The blocks are defined in `depth`. According to Xiong et al. 2020, post-norm models have large
gradients near the output before training, so they need a warmup, while pre-norm models do not. The
picture shows the gradient norm of the last matrix of each block, W_2, in the first step. It also
shows the loss after training with Adam at several learning rates, which are constant or have a
linear warmup over the first half of the steps. Each token is determined by the previous token,
except for a tenth of the tokens, which are random. The lowest possible loss is therefore
`entropy_rate()`, and the loss of a random guess is log 11 = 2.4.
"""

from __future__ import annotations

import math
from argparse import Namespace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.lectures.demos.depth import WIDTH, init, loss_of
from transformer_jax.lectures.demos.length_extrapolation import NOISE, VOCAB, entropy_rate
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    label,
    new_figure,
    print_table,
    save_picture,
)
from transformer_jax.pytree import PyTree

OPTIONS: Options = {"layers": (48, 4), "steps": (40, 20), "seed": (1, 1)}

KINDS = ("post-norm", "pre-norm")
RATES = (0.001, 0.003, 0.01)
ROWS, LENGTH = 8, 8


def make_texts(rows: int, seed: int) -> np.ndarray:  # i32[B, T + 1]
    """Return sequences x_t = f(x_{t-1}) for one permutation f, with 10 % noise."""
    # f is the same for every seed
    after = np.random.default_rng(0).permutation(VOCAB)
    draw = np.random.default_rng(seed)
    texts = draw.integers(0, VOCAB, (rows, LENGTH + 1), dtype=np.int32)
    for t in range(1, LENGTH + 1):
        right = draw.random(rows) >= NOISE
        texts[:, t] = np.where(right, after[texts[:, t - 1]], texts[:, t])
    return texts


def schedules(steps: int) -> np.ndarray:  # f32[rates, 2, steps]
    """Return the rate at every step, both constant and with a warmup over half of the steps."""
    warmup = np.minimum(np.arange(1, steps + 1) / max(1, steps // 2), 1.0)
    shapes = np.stack([np.ones(steps), warmup])
    return (np.array(RATES)[:, None, None] * shapes).astype(np.float32)


def train_all(
    kind: str, layers: int, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:  # f32[rates, 2], f32[L]
    """Train with each schedule from the same parameters. Return losses and first W_2 gradients.

    Each loss is a mean over the last fifth of the steps.
    """
    # the texts do not depend on the seed, so all models are trained on the same texts
    texts = make_texts(steps * ROWS, seed=1).reshape(steps, ROWS, LENGTH + 1)
    nudges = jnp.zeros((layers, ROWS, LENGTH, WIDTH))
    params = init(layers, jax.random.key(seed))
    optimizer = optax.scale_by_adam()

    def learn(rates: jax.Array) -> tuple[jax.Array, jax.Array]:  # f32[steps], of W_2
        def step(state: PyTree, batch: tuple[jax.Array, jax.Array]) -> tuple[PyTree, jax.Array]:
            params, moments = state
            rows, rate = batch
            loss, slopes = jax.value_and_grad(loss_of, 1)(kind, params, rows, nudges)
            updates, moments = optimizer.update(slopes, moments)
            return (jax.tree.map(lambda p, u: p - rate * u, params, updates), moments), loss

        state = params, optimizer.init(params)
        # the scan does not return the moments after the first step, so compute this step separately
        (_, first), _ = step(state, (texts[0], rates[0]))
        return jax.lax.scan(step, state, (jnp.asarray(texts), rates))[1], first.mu["blocks"]["down"]

    # one program trains with all schedules at the same time
    losses, first = jax.jit(jax.vmap(learn))(schedules(steps).reshape(-1, steps))
    last = np.asarray(losses)[:, -max(1, steps // 5) :].mean(axis=1)
    slopes = np.asarray(first)[0] / (1 - 0.9)  # Adam's first moment is a tenth of the gradient
    return last.reshape(len(RATES), 2), np.sqrt((slopes**2).sum(axis=(1, 2)))


def demonstrate(arguments: Namespace) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
    """Run the demonstration, and return (losses, gradients) keyed by kind and depth."""
    depths = sorted({min(2, arguments.layers), max(1, arguments.layers // 4), arguments.layers})
    found = {
        (kind, layers): train_all(kind, layers, arguments.steps, arguments.seed)
        for kind, layers in product(KINDS, depths)
    }
    print(f"loss after {arguments.steps} steps, constant rate / with warmup; "
          f"lowest possible {entropy_rate():.2f}, guessing {math.log(VOCAB):.2f}")  # fmt: skip
    print_table(["kind, blocks", *(f"rate {rate:g}" for rate in RATES)], [
        [f"{kind}, {layers}", *(f"{now:.2f} / {later:.2f}" for now, later in losses)]
        for (kind, layers), (losses, _) in found.items()
    ])  # fmt: skip
    print("gradient of W_2 at the first step")
    print_table(["kind, blocks", "first block", "middle", "last"], [
        [f"{kind}, {layers}", *(f"{norms[i]:.3f}" for i in (0, layers // 2, -1))]
        for (kind, layers), (_, norms) in found.items()
    ])  # fmt: skip
    figure, (left, right) = new_figure(2)
    for (kind, layers), (losses, norms) in found.items():
        style: dict[str, Any] = dict(
            color=COLOURS[KINDS.index(kind)], alpha=0.4 + 0.3 * depths.index(layers)
        )
        left.plot(np.linspace(0, 1, layers), norms, label=f"{kind}, {layers}", **style)
        for column, line in enumerate(("-", "--")):
            if layers == depths[-1]:
                name = kind + ("", ", warmup")[column]
                right.plot(RATES, losses[:, column], f"o{line}", label=name, **style)
    left.set_yscale("log")
    right.set_xscale("log")
    right.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    right.axhline(entropy_rate(), color="#bbbbbb", linestyle=":")
    label(left, "First gradient of W_2", "block, first to last", "norm")
    label(right, f"Loss of {depths[-1]} blocks", "rate", "nats a token")
    save_picture(figure, arguments, "norm_order")
    return found
