"""Train recurrent networks to remember a letter while they read many other tokens.

    python -m transformer_jax demo memory

A sequence contains one of eight letters, followed by k random distractors, which are chosen from
eight other symbols. After the last distractor, the network must name the letter. The accuracy of
random guessing is 1/8. An Elman network overwrites its state at every token. An untrained LSTM
keeps a fraction of about sigmoid(b_f) of its cell, so b_f determines whether the gradient survives
k steps (Gers et al. 2000, Jozefowicz et al. 2015). The models are of class `RecurrentLM`, and b_f
is the `forget_bias` of `RecurrentConfig`.
"""

from __future__ import annotations

from argparse import Namespace

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import RecurrentConfig, build, cross_entropy, init_params
from transformer_jax.config import Cell
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    halved,
    label,
    new_figure,
    print_table,
    save_picture,
    train,
)
from transformer_jax.pytree import Params, PyTree

OPTIONS: Options = {"tokens": (20, 10), "width": (24, 16), "steps": (200, 60), "seed": (0, 0)}

LETTERS, ROWS, HELD_OUT = 8, 16, 128
NETWORKS: dict[str, tuple[Cell, float]] = {
    "Elman": ("rnn", 0.0),
    "GRU": ("gru", 0.0),
    "LSTM, forget bias 0": ("lstm", 0.0),
    "LSTM, forget bias 1": ("lstm", 1.0),
    "LSTM, forget bias 3": ("lstm", 3.0),
}
"""Cell and forget bias of each network, keyed by name."""


def texts(rows: int, length: int, delay: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the letters, and sequences i32[B, T] with the letter `delay` tokens before the end."""
    random = np.random.default_rng(seed)
    # distractors are never letters, so the letter can be recognized at any position
    tokens = random.integers(LETTERS, 2 * LETTERS, (rows, length), dtype=np.int32)
    letters = random.integers(0, LETTERS, rows, dtype=np.int32)
    tokens[:, length - 1 - delay] = letters
    return tokens, letters


def accuracies(
    config: RecurrentConfig, delays: list[int], steps: int, keys: jax.Array
) -> np.ndarray:  # f64[delays, seeds]
    """Train a network for each delay and key, and return the fraction of correct letters."""
    model, length = build(config), delays[-1] + 1

    def logits(params: Params, tokens: jax.Array) -> jax.Array:  # f32[B, V] after the last token
        at = jnp.full((len(tokens), 1), length - 1)
        return model.apply({"params": params}, tokens, at=at)[0][:, 0]

    def loss(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return cross_entropy(logits(params, batch[0])[:, None], batch[1][:, None])[0]

    def right(key: jax.Array, batches: PyTree, held_out: tuple[jax.Array, ...]) -> jax.Array:
        params, _ = train(loss, init_params(config, key), batches, 1e-2)
        return (logits(params, held_out[0]).argmax(axis=-1) == held_out[1]).mean()

    training = [texts(steps * ROWS, length, delay, 1) for delay in delays]
    tokens, letters = (np.stack(x) for x in zip(*training, strict=True))
    batches = tokens.reshape(len(delays), steps, ROWS, length), letters.reshape(-1, steps, ROWS)
    new = [texts(HELD_OUT, length, delay, 2) for delay in delays]
    held_out = tuple(np.stack(x) for x in zip(*new, strict=True))
    of_keys = jax.vmap(right, in_axes=(0, None, None))  # one program serves all seeds and delays
    return np.asarray(jax.jit(jax.vmap(of_keys, in_axes=(None, 0, 0)))(keys, batches, held_out))


def demonstrate(arguments: Namespace) -> tuple[list[int], dict[str, np.ndarray]]:
    """Run the demonstration. Return delays, and accuracies [delays, seeds] keyed by network."""
    delays = halved(arguments.tokens, 2 if arguments.quick else 4)
    keys = jax.random.split(jax.random.key(arguments.seed), 1 if arguments.quick else 3)
    found = {}
    for name, (cell, bias) in NETWORKS.items():
        config = RecurrentConfig(
            cell=cell,
            forget_bias=bias,
            vocab_size=2 * LETTERS,
            d_embed=16,
            d_hidden=arguments.width,
            init_std=0.5,
        )
        found[name] = accuracies(config, delays, arguments.steps, keys)
    print(f"accuracy after {arguments.steps} steps, {len(keys)} seeds: mean (min to max)")
    print_table(["network", *(f"{k} later" for k in delays)], [
        [name, *(f"{x.mean():.2f} ({x.min():.2f} to {x.max():.2f})" for x in values)]
        for name, values in found.items()
    ])  # fmt: skip
    figure, (axes,) = new_figure()
    for (name, values), colour in zip(found.items(), COLOURS, strict=False):
        axes.plot(delays, values.mean(axis=1), "o-", color=colour, label=name)
    axes.axhline(1 / LETTERS, color="#bbbbbb", linestyle=":", label="chance")
    axes.set_xscale("log")
    axes.set_xticks(delays, [str(k) for k in delays])
    label(axes, "A letter named k tokens later", "k (tokens)", "share named right")
    save_picture(figure, arguments, "memory")
    return delays, found
