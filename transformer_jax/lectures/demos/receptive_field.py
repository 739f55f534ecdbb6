"""Measure the receptive field of stacked attention windows with gradients.

    python -m transformer_jax demo receptive_field

With a window of W tokens, a query in a causal layer sees W keys, including its own. The last output
of L layers therefore depends on L (W - 1) + 1 inputs. The demonstration counts the inputs whose
gradient from the last output is not zero.
"""

from __future__ import annotations

from argparse import Namespace

import jax
import numpy as np

from transformer_jax import ModelConfig, StreamingEncoder
from transformer_jax.config import Rope
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    check_multiple,
    label,
    new_figure,
    print_table,
    save_picture,
)
from transformer_jax.models.streaming import receptive_field

OPTIONS: Options = {"window": (6, 3), "layers": (4, 2), "width": (16, 16), "seed": (0, 0)}

FRAME = 5


def gradient_norms(config: ModelConfig, length: int, seed: int) -> np.ndarray:  # f32[T]
    """Return the gradient norm of the last output for each distance to the input, from 0."""
    model = StreamingEncoder(config, frame_dim=FRAME)
    frames = jax.random.normal(jax.random.key(seed), (1, length, FRAME))  # [B, T, frame_dim]
    params = model.init(jax.random.key(1), frames)
    # random weights, because the sum of normalized features is constant and has no gradient
    weights = jax.random.normal(jax.random.key(2), (config.d_model,))

    def last_output(frames: jax.Array) -> jax.Array:  # f32[]
        features, _ = model.apply(params, frames)
        return features[0, -1] @ weights

    gradient = jax.jit(jax.grad(last_output))(frames)[0]  # [T, frame_dim]
    return np.linalg.norm(np.asarray(gradient), axis=-1)[::-1]


def demonstrate(arguments: Namespace) -> dict[tuple[int, int], tuple[int, int]]:
    """Run the demonstration. Return (measured, computed) fields keyed by (layers, window)."""
    check_multiple("width", arguments.width, 4, "for 2 heads of even width")
    last, deepest = arguments.window, arguments.layers
    windows = sorted({max(1, last // 2), last})
    cases = [(layers, window) for window in windows for layers in range(1, deepest + 1)]
    # two frames more than the largest field, whose gradients must be 0
    length, fields, curves = deepest * (last - 1) + 3, {}, {}
    for layers, window in cases:
        config = ModelConfig(
            d_model=arguments.width, num_layers=layers, num_heads=2, positions=Rope(),
            window=window, init_std=0.3,
        )  # fmt: skip
        norms = curves[layers, window] = gradient_norms(config, length, arguments.seed)
        fields[layers, window] = int((norms > 0).sum()), receptive_field(config)
    rows = [[layers, window, *both] for (layers, window), both in fields.items()]
    print_table(["layers L", "window W", "measured", "L (W - 1) + 1"], rows)
    figure, (axes,) = new_figure()
    for colour, layers in zip(COLOURS, range(1, deepest + 1), strict=False):
        if (layers, last) in curves:
            norms, field = curves[layers, last], fields[layers, last][1]
            axes.plot(range(field), norms[:field], "o-", ms=4, color=colour, label=f"L = {layers}")
            axes.axvline(field - 0.5, color=colour, linestyle="--", linewidth=0.9)
    axes.set_yscale("log")
    axes.set_xlim(-0.5, length)
    title = f"Gradient of one output: stacked windows of W = {last}; dashed: L (W - 1) + 1 inputs"
    label(axes, title, "distance back to the input (frames)", "norm of the gradient")
    save_picture(figure, arguments, "receptive_field")
    return fields
