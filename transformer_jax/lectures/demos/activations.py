"""Plot activation functions and their derivatives.

    python -m transformer_jax demo activations

    sigmoid 1 / (1 + exp(-z)), tanh z, ReLU max(z, 0), GELU z Phi(z) (Hendrycks & Gimpel 2016)

Each layer multiplies a gradient by one slope. The slope is at most 1/4 for a sigmoid and at most 1
for tanh. Both slopes approach 0 when the function saturates. The slope of ReLU is 0 or 1.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import jax
import numpy as np

from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    label,
    new_figure,
    print_table,
    save_picture,
)
from transformer_jax.models.functional import activate

OPTIONS: Options = {}

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "tanh": jax.numpy.tanh,
    "ReLU": lambda z: activate(z, "relu"),
    "GELU": lambda z: activate(z, "gelu"),
}


def demonstrate(arguments: Namespace) -> dict[str, np.ndarray]:
    """Run the demonstration. Return the points as "z", and (values, slopes) keyed by activation."""
    z = np.linspace(-4, 4, 17 if arguments.quick else 161, dtype=np.float32)
    found: dict[str, np.ndarray] = {"z": z}
    figure, plots = new_figure(2, height=3.4)
    for (name, function), colour in zip(ACTIVATIONS.items(), COLOURS, strict=False):
        slopes = jax.vmap(jax.grad(function))(z)
        found[name] = np.stack([function(jax.numpy.asarray(z)), slopes])
        for axes, curve in zip(plots, found[name], strict=True):
            axes.plot(z, curve, color=colour, label=name)
    rows = [
        [name, *(f"{found[name][1][np.abs(z - at).argmin()]:.3f}" for at in (-4, -2, 0, 2, 4))]
        for name in ACTIVATIONS
    ]
    print_table(["slope at", *("-4", "-2", "0", "2", "4")], rows)
    label(plots[0], "Activation", "z", "value")
    label(plots[1], "Its slope", "z", "slope", legend=False)
    plots[0].set_ylim(-1.2, 3)
    save_picture(figure, arguments, "activations")
    return found
