"""Measure how many inputs an output of stacked windows depends on, by gradients.

    python -m reproduce.lectures.receptive_field

A causal layer of window W sees W keys, its own among them; so L layers see L (W - 1) + 1 inputs.
Measured: the inputs x_t for which the gradient of the last output is not zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from reproduce.lectures.shared import (
    COLOURS,
    label,
    new_figure,
    print_table,
    read_arguments,
    save_picture,
)
from transformer_jax import ModelConfig, StreamingEncoder
from transformer_jax.models.streaming import receptive_field

FRAME = 5


def gradient_norms(config: ModelConfig, length: int) -> np.ndarray:  # f32[T]
    """Return the norm of the last output's gradient at each distance back, from 0 on."""
    model = StreamingEncoder(config, frame_dim=FRAME)
    frames = jax.random.normal(jax.random.key(0), (1, length, FRAME))  # [B, T, frame_dim]
    params = model.init(jax.random.key(1), frames)
    weights = jax.random.normal(jax.random.key(2), (config.d_model,))

    def last_output(frames: jax.Array) -> jax.Array:  # f32[]
        features, _ = model.apply(params, frames)
        return features[0, -1] @ weights

    gradient = jax.jit(jax.grad(last_output))(frames)[0]  # [T, frame_dim]
    return np.linalg.norm(np.asarray(gradient), axis=-1)[::-1]


def main(argv: Sequence[str] | None = None) -> dict[tuple[int, int], tuple[int, int]]:
    """Run the demonstration; return by layers and window the field measured, and the formula's."""
    arguments = read_arguments(__doc__, argv)
    cases = [(1, 3), (2, 3), (3, 2)] if arguments.quick else []
    cases = cases or [(layers, window) for window in (3, 6) for layers in (1, 2, 3, 4)]
    length, fields, curves = 23, {}, {}
    for layers, window in cases:
        config = ModelConfig(
            d_model=16, num_layers=layers, num_heads=2, positions="rope", window=window,
            init_std=0.3,
        )  # fmt: skip
        norms = curves[layers, window] = gradient_norms(config, length)
        fields[layers, window] = int((norms > 0).sum()), receptive_field(config)
    rows = [[layers, window, *both] for (layers, window), both in fields.items()]
    print_table(["layers L", "window W", "measured", "L (W - 1) + 1"], rows)
    last = cases[-1][1]
    figure, (axes,) = new_figure()
    for colour, layers in zip(COLOURS, (1, 2, 3, 4), strict=False):
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


if __name__ == "__main__":
    main()
