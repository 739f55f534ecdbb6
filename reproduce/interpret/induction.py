"""Track the formation of an induction head in a two-layer attention-only model, then ablate it.

    python -m reproduce.interpret.induction --seeds 3

This script reproduces Olsson et al. 2022, "In-context learning and induction heads"
(arXiv:2209.11895). In each batch, half of the rows contain random tokens that repeat with a period
of 12 to 24 tokens, which differs by row. The other half contain text, which is the documentation of
Python, split into letters. The model uses only attention because the output of the feed-forward
branch is set to 0 during training, with `interpret.zero("block_*/feed_forward/output")`. The
in-context loss is the loss on the second half of random rows. The prefix-matching score is
`interpret.head_scores(...).induction`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import transformer_jax as tj
from reproduce.interpret.shared import VOCAB, print_figures, read_arguments, text_ids
from transformer_jax import interpret
from transformer_jax.config import T5Buckets
from transformer_jax.lectures.demos.shared import COLOURS, label, new_figure, save_picture

LENGTH, PERIOD, ROWS = 48, 24, 32
CHUNK = 50
"""Number of steps between two measurements of the heads."""
NO_FEED_FORWARD = interpret.zero("block_*/feed_forward/output")


class Run(NamedTuple):
    """Training run, with the measurements after each chunk of steps and the model."""

    steps: np.ndarray  # i32[C]
    loss: np.ndarray  # f32[C], on the second half of random rows
    scores: np.ndarray  # f32[C, L, N]
    model: Any
    params: Any


def repeated_rows(key: jax.Array, rows: int) -> jax.Array:  # i32[rows, LENGTH]
    """Return rows of random tokens that repeat with a random period per row."""
    first, second = jax.random.split(key)
    period = jax.random.randint(first, (rows, 1), PERIOD // 2, PERIOD + 1)
    tokens = jax.random.randint(second, (rows, PERIOD), 0, VOCAB)
    return jnp.take_along_axis(tokens, jnp.arange(LENGTH)[None] % period, axis=1)


def config(layers: int, width: int) -> tj.ModelConfig:
    """Return the config, in which each head has a bias for each distance."""
    return tj.ModelConfig(
        vocab_size=VOCAB, d_model=width, num_layers=layers, num_heads=4, d_ff=1, max_len=LENGTH,
        positions=T5Buckets(buckets=2 * LENGTH, max_distance=2 * LENGTH), init_std=width**-0.5,
        tie_embeddings=False,
    )  # fmt: skip


def second_half_loss(model: Any, params: Any, rows: jax.Array, edit: Any = None) -> jax.Array:
    """Return the loss after the first full period, in nats per token."""
    given = NO_FEED_FORWARD | (edit or {})
    logits = model.edited(given).apply({"params": params}, rows[:, :-1])[0]
    return tj.cross_entropy(logits[:, PERIOD:], rows[:, PERIOD + 1 :])[0]


def fit(seed: int, layers: int, steps: int, width: int) -> Run:
    """Train a model, and measure its heads after each chunk of steps."""
    model, key = tj.build(config(layers, width)), jax.random.key(seed)
    params = tj.init_params(model.config, jax.random.fold_in(key, 0))
    optimizer, text = optax.adam(3e-3), text_ids()
    held_out = repeated_rows(jax.random.key(1_000_001), 64)
    probe = interpret.repeated_tokens(jax.random.key(1_000_002), VOCAB, rows=16, period=PERIOD)

    def loss(params: Any, key: jax.Array, step: jax.Array) -> jax.Array:
        first, second = jax.random.split(jax.random.fold_in(key, 1 + step))
        starts = jax.random.randint(first, (ROWS // 2, 1), 0, len(text) - LENGTH)
        halves = repeated_rows(second, ROWS // 2), text[starts + jnp.arange(LENGTH)[None]]
        rows = jnp.concatenate(halves)
        logits = model.edited(NO_FEED_FORWARD).apply({"params": params}, rows[:, :-1])[0]
        return tj.cross_entropy(logits, rows[:, 1:])[0]

    def update(key: jax.Array, state: Any, step: jax.Array) -> tuple[Any, None]:
        params, moments = state
        updates, moments = optimizer.update(jax.grad(loss)(params, key, step), moments)
        return (optax.apply_updates(params, updates), moments), None

    @jax.jit
    def chunk(state: Any, key: jax.Array, first: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        params, moments = jax.lax.scan(partial(update, key), state, first + jnp.arange(CHUNK))[0]
        edited, capture = model.edited(NO_FEED_FORWARD), ("block_*/attention/weights",)
        found = edited.apply({"params": params}, probe, capture=capture)[2]
        weights = jnp.stack([found[f"block_{i}/attention/weights"] for i in range(layers)], axis=1)
        scores = interpret.head_scores(weights, PERIOD).induction
        return (params, moments), second_half_loss(model, params, held_out), scores

    state, seen = (params, optimizer.init(params)), []
    for first in range(0, steps, CHUNK):
        state, *found = chunk(state, key, jnp.int32(first))
        seen.append((first + CHUNK, *map(np.asarray, found)))
    return Run(*map(np.stack, zip(*seen, strict=True)), model, state[0])


def halfway(values: np.ndarray, steps: np.ndarray) -> int:
    """Return the step from which the values are closer to the last value than to the first."""
    near = np.abs(values - values[-1]) <= np.abs(values - values[0])
    return int(steps[len(near) - int(np.argmin(np.append(near[::-1], False)))])


def ablated(run: Run) -> tuple[float, float]:
    """Return the loss without the induction heads, and without as many other heads of the layer."""
    held_out, last = repeated_rows(jax.random.key(1_000_003), 64), run.scores[-1, -1]
    order = np.argsort(-last)
    count = min(max(1, int((last > 0.3).sum())), len(last) // 2)
    place = f"block_{run.scores.shape[1] - 1}/attention/heads"
    without = partial(second_half_loss, run.model, run.params, held_out)
    found = [without(interpret.zero(place, heads=h)) for h in (order[:count], order[-count:])]
    return float(found[0]), float(found[1])


def main(argv: Sequence[str] | None = None) -> dict[str, list[Run]]:
    """Run the command and return the training runs with two layers and with one layer."""
    arguments = read_arguments(__doc__, argv, steps=1400, width=64)
    sizes = arguments.steps, arguments.width
    two, one = ([fit(seed, layers, *sizes) for seed in arguments.seeds] for layers in (2, 1))
    best = [run.scores.max(axis=(1, 2)) for run in two]
    formed = [halfway(score, run.steps) for score, run in zip(best, two, strict=True)]
    without = [ablated(run) for run in two]
    print_figures(arguments, [
        ("loss on second halves, two layers", "low", [run.loss[-1] for run in two]),
        ("the same, one layer", f"stays near {np.log(VOCAB):.2f}", [run.loss[-1] for run in one]),
        ("prefix matching, best head, two layers", "near 1", [found[-1] for found in best]),
        ("the same, one layer", "near 0", [run.scores[-1].max() for run in one]),
        ("step at which the score is half", "the same", formed),
        ("step at which the loss is half", "step", [halfway(run.loss, run.steps) for run in two]),
        ("loss without the induction heads", "high again", [x[0] for x in without]),
        ("loss without as many other heads", "low", [x[1] for x in without]),
    ])  # fmt: skip
    if arguments.out:
        draw_picture(arguments, two, one)
    return {"two": two, "one": one}


def draw_picture(arguments: Any, two: list[Run], one: list[Run]) -> None:
    """Plot the loss and the score over the steps."""
    figure, plots = new_figure(2)
    for runs, name, color in ((two, "two layers", COLOURS[0]), (one, "one layer", COLOURS[1])):
        for i, run in enumerate(runs):
            style: Any = dict(color=color, alpha=0.8, label=name if i == 0 else None)
            plots[0].plot(run.steps, run.loss, **style)
            plots[1].plot(run.steps, run.scores.max(axis=(1, 2)), **style)
    label(plots[0], "loss on second halves", "step", "nats a token")
    label(plots[1], "prefix matching of the best head", "step", "mean weight")
    save_picture(figure, arguments, "induction")


if __name__ == "__main__":
    main()
