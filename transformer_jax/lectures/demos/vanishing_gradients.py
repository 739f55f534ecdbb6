"""Measure how far back gradients reach in an Elman network, an LSTM, and a GRU.

    python -m transformer_jax demo vanishing_gradients

The measure is the Frobenius norm of the Jacobian d h_T / d x_t at distance T - t for untrained
parameters, averaged over seeds. In an Elman network, each step back multiplies the gradient by
diag(1 - h^2) U, so the norm decreases exponentially (Bengio et al. 1994). In an LSTM, the path
through the cell multiplies the gradient by the forget gate f = sigmoid(... + b_f). If b_f = 0, the
factor is about 1/2 per step, so the gradient vanishes just as fast. A larger forget bias preserves
it (Gers et al. 2000, Jozefowicz et al. 2015). The cells are the same as in
`lectures.recurrent.RecurrentLM`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
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
from transformer_jax.lectures.recurrent import LSTMCell

OPTIONS: Options = {"tokens": (101, 24), "width": (32, 32), "seed": (0, 0)}

CELLS: dict[str, Callable[[int], nn.RNNCellBase]] = {
    "Elman": nn.SimpleCell,
    "GRU": nn.GRUCell,
    "LSTM, forget bias 0": LSTMCell,
    "LSTM, forget bias 1": partial(LSTMCell, forget_bias=1.0),
    "LSTM, forget bias 3": partial(LSTMCell, forget_bias=3.0),
}
"""Functions that create the cell of each network for a given width."""


def jacobian(
    cell: nn.RNNCellBase, length: int, width: int, key: jax.Array
) -> jax.Array:  # f32[H, T, E]
    """Return d h_T / d x_t for every t, with random parameters and inputs."""
    params_key, inputs_key = jax.random.split(key)
    network = nn.RNN(cell)
    inputs = jax.random.normal(inputs_key, (1, length, width))  # [B, T, E]
    params = network.init(params_key, inputs)["params"]

    def last_state(inputs: jax.Array) -> jax.Array:  # [T, E] -> [H]
        states: Any = network.apply({"params": params}, inputs[None])
        return states[0, -1]

    return jax.jacrev(last_state)(inputs[0])


def measure(
    length: int, width: int, seed: int, seeds: int
) -> dict[str, np.ndarray]:  # f64[T] for each network
    """Return the norm for each distance T - t (from 0), averaged over seeds."""
    norms = {}
    for name, cell in CELLS.items():
        of_key = partial(jacobian, cell(width), length, width)
        keys = jax.random.split(jax.random.key(seed), seeds)
        # in float64, because the squares of the smallest elements underflow in float32
        jacobians = np.asarray(jax.jit(jax.vmap(of_key))(keys), np.float64)
        norms[name] = np.sqrt((jacobians**2).sum(axis=(1, 3))).mean(axis=0)[::-1]
    return norms


def demonstrate(arguments: Namespace) -> dict[str, np.ndarray]:
    """Run the demonstration, and return the norm for each network and distance."""
    length, seeds = arguments.tokens, 3 if arguments.quick else 8
    norms = measure(length, arguments.width, arguments.seed, seeds)
    distances = [d for d in (0, 1, 5, 10, 20, 50, 100) if d < length]
    rows = [[name, *(f"{curve[d]:.1e}" for d in distances)] for name, curve in norms.items()]
    print_table(["distance T - t", *map(str, distances)], rows)
    figure, (axes,) = new_figure()
    for (name, curve), colour in zip(norms.items(), COLOURS, strict=False):
        axes.plot(curve, color=colour, label=name)
    axes.set_yscale("log")
    label(axes, "Gradient over distance", "distance T - t (steps)", "norm of d h_T / d x_t")
    save_picture(figure, arguments, "vanishing_gradients")
    return norms
