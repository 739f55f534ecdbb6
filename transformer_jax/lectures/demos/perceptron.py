"""Learn AND, OR, and XOR with a perceptron and with a two-layer network.

    python -m transformer_jax demo perceptron

A perceptron computes step(w.x + b) and learns by applying w += (y - answer) x after each wrong
answer (Rosenblatt 1958). It divides the plane by a straight line, so it can learn AND and OR but
not XOR (Minsky & Papert 1969). A network with two layers, sigmoid(v.tanh(W x + b) + c), can learn
curved boundaries (Rumelhart et al. 1986). The sigmoid 1 / (1 + exp(-z)) is the probability that the
answer is 1.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from transformer_jax.lectures.demos.shared import (
    Options,
    label,
    new_figure,
    print_table,
    save_picture,
    train,
)

OPTIONS: Options = {"width": (4, 4), "seed": (1, 1)}

INPUTS = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)  # [4, 2]
GATES = {
    "AND": np.array([0, 0, 0, 1], np.float32),
    "OR": np.array([0, 1, 1, 1], np.float32),
    "XOR": np.array([0, 1, 1, 0], np.float32),
}


def learn_perceptron(answers: np.ndarray, epochs: int) -> tuple[np.ndarray, int | None]:
    """Return the weights [w1, w2, b], and the number of epochs until all answers are right.

    The number is None if some answers are still wrong at the end.
    """
    weights = np.zeros(3)
    for epoch in range(epochs):
        wrong = 0
        for x, y in zip(INPUTS, answers, strict=True):
            # the weight of this constant input is the bias
            x = np.append(x, 1.0)
            error = y - float(weights @ x > 0)
            weights += error * x
            wrong += error != 0
        if not wrong:
            return weights, epoch
    return weights, None


def two_layers(params: Any, x: jax.Array) -> jax.Array:  # [B, 2] -> f32[B]
    """Return the logits v.tanh(W x + b) + c."""
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])  # [B, F]
    return hidden @ params["v"] + params["c"]


def learn_two_layers(answers: np.ndarray, steps: int, width: int, seed: int) -> tuple[Any, float]:
    """Return the parameters trained with full batches and the last loss in nats."""
    first, second = jax.random.split(jax.random.key(seed))
    params = {
        "w": jax.random.normal(first, (2, width)),
        "b": jnp.zeros(width),
        "v": jax.random.normal(second, (width,)),
        "c": jnp.zeros(()),
    }

    def loss(params: Any, y: jax.Array) -> jax.Array:
        logits = two_layers(params, jnp.asarray(INPUTS))
        return -(y * jax.nn.log_sigmoid(logits) + (1 - y) * jax.nn.log_sigmoid(-logits)).mean()

    params, losses = train(loss, params, np.tile(answers, (steps, 1)), learning_rate=0.1)
    return params, float(losses[-1])


def draw(learned: dict[str, Any], arguments: Any) -> None:
    """Plot the network's output over the plane, with the four inputs of each gate."""
    figure, plots = new_figure(len(GATES), height=4.2)
    side = np.linspace(-0.4, 1.4, 55, dtype=np.float32)
    grid = np.stack(np.meshgrid(side, side), axis=-1)  # [y, x, 2]
    for axes, (name, answers) in zip(plots, GATES.items(), strict=True):
        points = two_layers(
            learned[name]["params"], jnp.asarray(rearrange(grid, "Y X D -> (Y X) D"))
        )
        logits = rearrange(points, "(Y X) -> Y X", Y=len(side))
        extent = (side[0], side[-1], side[0], side[-1])
        axes.grid(False)
        shades = np.asarray(jax.nn.sigmoid(logits))
        axes.imshow(shades, cmap="RdBu", vmin=0, vmax=1, alpha=0.7, extent=extent, origin="lower")
        axes.contour(side, side, logits, [0.0], colors="#444444", linewidths=1.2)
        for (x1, x2), y in zip(INPUTS, answers, strict=True):
            face = "#3b6fb6" if y else "white"
            axes.plot(x1, x2, "o", ms=11, color=face, markeredgecolor="#444444")
        w1, w2, b = learned[name]["perceptron"]
        # the weights of a perceptron that never converges define no line that separates the classes
        if learned[name]["epochs"] is not None:
            axes.axline((0, -b / w2), slope=-w1 / w2, color="#e07b39", ls="--", lw=1.5)
        axes.set(xlim=(-0.4, 1.4), ylim=(-0.4, 1.4), xticks=(0, 1), yticks=(0, 1), aspect="equal")
        found = "found" if learned[name]["epochs"] is not None else "there is none"
        label(axes, f"{name}; the perceptron's line: {found}", "x1", "x2", legend=False)
    save_picture(figure, arguments, "perceptron")


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration, and return the learned weights and outputs keyed by gate."""
    learned: dict[str, Any] = {}
    for name, answers in GATES.items():
        weights, epochs = learn_perceptron(answers, epochs=1000)
        params, loss = learn_two_layers(answers, 300, arguments.width, arguments.seed)
        outputs = np.asarray(jax.nn.sigmoid(two_layers(params, jnp.asarray(INPUTS))))
        learned[name] = dict(
            perceptron=weights, epochs=epochs, params=params, loss=loss, outputs=outputs
        )
    rows = [
        [
            name,
            "never" if one["epochs"] is None else f"{one['epochs']} epochs",
            *(f"{p:.3f}" for p in one["outputs"]),
        ]
        for name, one in learned.items()
    ]
    print_table(["gate", "perceptron", *(f"2 layers ({a:.0f}, {b:.0f})" for a, b in INPUTS)], rows)
    draw(learned, arguments)
    return learned
