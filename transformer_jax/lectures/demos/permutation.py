"""Permute the tokens of an encoder for each kind of positional encoding, and without any.

    python -m transformer_jax demo permutation

Self-attention without positional encoding is equivariant: f(P x) = P f(x) for every permutation P.
An encoder knows the order of its tokens only from positional encodings. The table shows the largest
element of |f(P x) - P f(x)| for a random encoder.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import Encoder, ModelConfig, init_params
from transformer_jax.config.positions import positions_of
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    check_least,
    check_multiple,
    label,
    new_figure,
    print_table,
    save_picture,
)

OPTIONS: Options = {"tokens": (13, 13), "width": (32, 32), "seed": (0, 0)}

KINDS = ("none", "learned", "sinusoidal", "rope", "shaw", "t5", "alibi")


def largest_difference(kind: str, length: int, width: int, seed: int) -> float:
    """Return the largest element of |f(P x) - P f(x)| for an encoder with these positions."""
    config = ModelConfig(
        kind="encoder", vocab_size=53, d_model=width, num_layers=2, num_heads=4, max_len=length,
        init_std=0.3, positions=positions_of(kind),
    )  # fmt: skip
    model, params = Encoder(config), init_params(config, jax.random.key(seed))
    tokens = jax.random.randint(jax.random.key(1), (3, length), 0, config.vocab_size)  # [B, T]
    draw = np.random.default_rng(2)
    order = draw.permutation(length)
    while (order == np.arange(length)).all():  # for two tokens, half of the draws are the identity
        order = draw.permutation(length)

    @jax.jit
    def encode(tokens: jax.Array) -> Any:  # [B, T, D]
        return model.apply({"params": params}, tokens, method="encode")

    return float(jnp.abs(encode(tokens[:, order]) - encode(tokens)[:, order]).max())


def demonstrate(arguments: Namespace) -> dict[str, float]:
    """Run the demonstration, and return the largest difference for each kind."""
    check_least("tokens", arguments.tokens, 2, "one token has no other order")
    check_multiple("width", arguments.width, 8, "for 4 heads of even width")
    kinds = ("none", "rope") if arguments.quick else KINDS
    differences = {
        kind: largest_difference(kind, arguments.tokens, arguments.width, arguments.seed)
        for kind in kinds
    }
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
