"""Permute the tokens of an encoder, without and with each kind of positions.

    python -m reproduce.lectures.permutation

Self-attention without positions is equivariant: f(P x) = P f(x) for every permutation P. Only
positions tell an encoder the order of its tokens. For each kind, the largest element of
|f(P x) - P f(x)| over a random encoder's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from reproduce.lectures.shared import (
    COLOURS,
    label,
    new_figure,
    print_table,
    read_arguments,
    save_picture,
)
from transformer_jax import ModelConfig, build, init_params

KINDS = ("none", "learned", "sinusoidal", "rope", "shaw", "t5", "alibi")
CONFIG = ModelConfig(
    kind="encoder", vocab_size=53, d_model=32, num_layers=2, num_heads=4, max_len=16, init_std=0.3
)


def largest_difference(kind: str) -> float:
    """Return the largest element of |f(P x) - P f(x)| of an encoder with such positions."""
    config = replace(CONFIG, positions=kind)
    model, params = build(config), init_params(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 13), 0, config.vocab_size)  # [B, T]
    order = np.random.default_rng(2).permutation(13)

    @jax.jit
    def encode(tokens: jax.Array) -> jax.Array:  # [B, T, D]
        return model.apply({"params": params}, tokens, method="encode")

    return float(jnp.abs(encode(tokens[:, order]) - encode(tokens)[:, order]).max())


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run the demonstration; return each kind's largest difference."""
    arguments = read_arguments(__doc__, argv)
    kinds = ("none", "rope") if arguments.quick else KINDS
    differences = {kind: largest_difference(kind) for kind in kinds}
    rows = [
        [kind, f"{value:.1e}", "yes" if value < 1e-4 else "no"]
        for kind, value in differences.items()
    ]
    print_table(["positions", "largest |f(P x) - P f(x)|", "equivariant"], rows)
    figure, (axes,) = new_figure(height=3.2)
    colours = [COLOURS[0] if value < 1e-4 else COLOURS[1] for value in differences.values()]
    axes.barh(kinds[::-1], list(differences.values())[::-1], color=colours[::-1])
    axes.set_xscale("log")
    axes.set_xlim(1e-7, 20)
    title = "Encoders of permuted tokens"
    label(axes, title, "largest |f(P x) - P f(x)|", "positions", legend=False)
    save_picture(figure, arguments, "permutation")
    return differences


if __name__ == "__main__":
    main()
