"""Train decoders on short sequences and measure their loss on longer sequences.

    python -m transformer_jax demo length_extrapolation

For each kind of positional encoding, a decoder is trained on n tokens and evaluated on 4 n tokens.
In a causal model, the loss at position t is the loss for length t. Each token is a random function
of the two previous tokens, so their order matters. A tenth of the tokens are noise, so no model can
have a loss below the entropy rate. Press et al. 2022 made this measurement for English text.
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from transformer_jax import ModelConfig, build, cross_entropy, init_params
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
    train,
)

OPTIONS: Options = {"tokens": (32, 16), "width": (32, 32), "seed": (0, 0)}

KINDS = ("none", "learned", "sinusoidal", "rope", "t5", "alibi", "shaw")
VOCAB, NOISE = 11, 0.1


def make_texts(rows: int, length: int, seed: int) -> np.ndarray:  # i32[B, T]
    """Return sequences x_t = f(x_{t-1}, x_{t-2}) for one random function f, with 10 % noise."""
    # f is the same for training and evaluation
    table = np.random.default_rng(0).integers(0, VOCAB, (VOCAB, VOCAB))
    draw = np.random.default_rng(seed)
    texts = draw.integers(0, VOCAB, (rows, length)).astype(np.int32)
    for t in range(2, length):
        wrong = draw.random(rows) < NOISE
        texts[:, t] = np.where(wrong, texts[:, t], table[texts[:, t - 1], texts[:, t - 2]])
    return texts


def entropy_rate() -> float:
    """Return the lowest possible loss in nats per token."""
    right, other = 1 - NOISE + NOISE / VOCAB, NOISE / VOCAB
    return -right * math.log(right) - (VOCAB - 1) * other * math.log(other)


def losses_by_position(
    config: ModelConfig, texts: np.ndarray, longer: np.ndarray, seed: int
) -> np.ndarray | None:
    """Train on `texts` [steps, B, n + 1]. Return the loss at each position of `longer` [B, T + 1].

    Returns None if the model does not support the longer sequences.
    """
    model = build(config)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits, _ = model.apply({"params": params}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])[0]

    params = init_params(config, jax.random.key(seed))
    # check the longer sequences before training, which takes much longer
    try:
        jax.eval_shape(model.apply, {"params": params}, longer[:, :-1])
    except ValueError as refusal:
        print(f"{config.positions!r} does not support the longer sequences: {refusal}")
        return None
    params, _ = train(loss, params, texts, learning_rate=0.008)
    logits, _ = jax.jit(model.apply)({"params": params}, longer[:, :-1])
    scores = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(scores, jnp.asarray(longer)[:, 1:, None], axis=-1)
    return -np.asarray(chosen[:, :, 0].mean(axis=0))


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration. Return the loss by position for each kind, or None if unsupported."""
    check_least("tokens", arguments.tokens, 3, "a token is a function of the two before it")
    check_multiple("width", arguments.width, 8, "for 4 heads of even width")
    kinds = ("learned", "sinusoidal", "alibi") if arguments.quick else KINDS
    steps, layers = (200, 1) if arguments.quick else (600, 2)
    length = arguments.tokens
    texts = rearrange(make_texts(steps * 16, length + 1, seed=1), "(I B) T -> I B T", B=16)
    longer = make_texts(128, 4 * length + 1, seed=2)
    found: dict[str, Any] = {}
    figure, (axes,) = new_figure()
    for kind, colour in zip(kinds, (*COLOURS, "#c23b4a"), strict=False):
        # the longer sequences exceed `max_len`, so learned positions, which are stored in a table,
        # fail
        config = ModelConfig(
            vocab_size=VOCAB, d_model=arguments.width, num_layers=layers, num_heads=4,
            positions=positions_of(kind), max_len=length, init_std=0.1,
        )  # fmt: skip
        losses = losses_by_position(config, texts, longer, arguments.seed)
        found[kind] = losses
        if losses is not None:
            # the loss at a single position is noisy
            smooth = rearrange(losses[: len(losses) // 8 * 8], "(P C) -> P C", C=8).mean(axis=1)
            axes.plot(8 * np.arange(len(smooth)) + 4, smooth, color=colour, label=kind)
    quarters = [f"{i * length}-{(i + 1) * length}" for i in range(4)]
    rows = [
        [kind, *(["refused"] * 4 if x is None else [f"{q.mean():.3f}" for q in np.split(x, 4)])]
        for kind, x in found.items()
    ]
    print_table(["positions", *quarters], rows)
    axes.axvline(length, color="#bbbbbb", linestyle="--", label="trained length")
    axes.axhline(entropy_rate(), color="#bbbbbb", linestyle=":", label="entropy rate")
    label(axes, "Loss at longer lengths", "position (tokens)", "loss (nats per token)")
    save_picture(figure, arguments, "length_extrapolation")
    return found
