"""Measure the attention to the first token and the cost of a window that excludes it.

    python -m reproduce.interpret.sinks --seeds 3

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453),
show that a decoder directs much of its attention to the first token, which contains no information.
If the window no longer contains this token, the loss increases. If the token is kept in addition to
the window, the loss returns to its previous value. A learned logit in the denominator of the
softmax (`attention_sinks=True`) can replace the token. The task is from Guo et al. 2024,
"Active-Dormant Attention Heads" (arXiv:2410.13835). After <bos>, rows follow the letter bigrams of
a text, except that one of the letters TRIGGERS is followed by a copy of the letter before it.
Attention is therefore useful only after a trigger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from reproduce.interpret.shared import VOCAB, print_figures, read_arguments, text_ids
from transformer_jax.config import T5Buckets
from transformer_jax.lectures.demos.shared import COLOURS, label, new_figure, save_picture, train
from transformer_jax.models import attention_weights

LENGTH, WINDOW, ROWS, BOS = 48, 8, 32, VOCAB
TRIGGERS = (1, 2, 3)
"""Three of the most common letters."""
CONFIG = tj.ModelConfig(
    vocab_size=VOCAB + 1, num_heads=1, max_len=LENGTH, norm="rmsnorm", init_std=0.1,
    positions=T5Buckets(buckets=2 * LENGTH, max_distance=2 * LENGTH),
)  # fmt: skip
SEEN: dict[str, dict[str, int]] = {
    "all tokens": {},
    "a window": {"window": WINDOW},
    "a window and 1 first token": {"window": WINDOW, "sink_tokens": 1},
    "a window and 4 first tokens": {"window": WINDOW, "sink_tokens": 4},
}
"""Config fields that determine which keys are visible, keyed by their name in the table."""


class Found(NamedTuple):
    """Measurements of one model on held-out rows."""

    dormant: np.ndarray  # f32[L]: fraction on token 0 if there is no trigger
    active: np.ndarray  # f32[L]: fraction on token 0 after a trigger
    learnt: np.ndarray  # f32[L]: fraction on the learned logit if there is no trigger
    loss: dict[str, float]
    """Loss in nats per letter on the labels from 2 WINDOW onward, keyed by the visible keys."""


def draw_rows(seed: int, count: int, ids: np.ndarray) -> np.ndarray:  # i32[count, LENGTH + 1]
    """Draw rows of <bos> and letters, which follow the bigrams or, after a trigger, are copies."""
    random, pairs = np.random.default_rng(seed), np.ones((VOCAB, VOCAB)) * 1e-3
    np.add.at(pairs, (ids[:-1], ids[1:]), 1)
    below = np.cumsum(pairs / pairs.sum(axis=1, keepdims=True), axis=1)
    rows = np.full((count, LENGTH + 1), BOS)
    rows[:, 1] = random.choice(ids, count)
    for t in range(2, LENGTH + 1):
        next_one = (below[rows[:, t - 1]] < random.random((count, 1))).sum(axis=1)
        copies = np.isin(rows[:, t - 1], TRIGGERS) & (t > 2)
        rows[:, t] = np.where(copies, rows[:, t - 2], np.minimum(next_one, VOCAB - 1))
    return rows.astype(np.int32)


def share(
    weights: np.ndarray,  # f32[B, L, N, T, S]
    queries: np.ndarray,  # bool[B, T]
) -> tuple[np.ndarray, np.ndarray]:  # f32[L], f32[L]
    """Return the fractions of the attention of late queries on token 0 and on no token."""
    late = queries & (np.arange(queries.shape[1]) >= WINDOW)
    rows = np.moveaxis(weights.astype(np.float64), 3, 1)[late]  # [queries, L, N, S]
    return rows[..., 0].mean(axis=(0, 2)), 1 - rows.sum(axis=-1).mean(axis=(0, 2))


def measure(seed: int, attention_sinks: bool, sizes: Any) -> Found:
    """Train a decoder and measure it."""
    config = dataclasses.replace(
        CONFIG, attention_sinks=attention_sinks, d_model=sizes.width, num_layers=sizes.layers
    )
    model, key, ids = tj.build(config), jax.random.key(seed), np.asarray(text_ids())
    batches = draw_rows(seed, sizes.steps * ROWS, ids).reshape(sizes.steps, ROWS, -1)
    held_out = draw_rows(1_000_001, 128, ids)

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        return tj.cross_entropy(model.apply({"params": params}, rows[:, :-1])[0], rows[:, 1:])[0]

    params, _ = train(loss, tj.init_params(config, key), jnp.asarray(batches), 3e-3)

    @jax.jit
    def look(params: Any, rows: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses = {}
        for name, seen in SEEN.items():
            cut = tj.build(dataclasses.replace(config, **seen))
            logits = cut.apply({"params": params}, rows[:, :-1])[0]
            late = logits[:, 2 * WINDOW :], rows[:, 2 * WINDOW + 1 :]
            losses[name] = tj.cross_entropy(*late)[0]
        return attention_weights(model, params, rows[:, :-1])["attention"], losses

    weights, losses = look(params, jnp.asarray(held_out))
    triggered = np.isin(held_out[:, :-1], TRIGGERS)
    dormant, learnt = share(np.asarray(weights), ~triggered)
    active, _ = share(np.asarray(weights), triggered)
    return Found(dormant, active, learnt, {name: float(losses[name]) for name in SEEN})


def main(argv: Sequence[str] | None = None) -> dict[bool, list[Found]]:
    """Run the command and return the measurements without and with the learned logit."""
    arguments = read_arguments(__doc__, argv, steps=600, layers=1, width=64)
    found = {sinks: [measure(seed, sinks, arguments) for seed in arguments.seeds]
             for sinks in (False, True)}  # fmt: skip
    plain, learnt = found[False], found[True]
    rows: list[Any] = []
    for i in range(arguments.layers):
        rows += [
            (f"layer {i}: on token 0, no trigger", "most", [x.dormant[i] for x in plain]),
            (f"layer {i}: on token 0, trigger", "little", [x.active[i] for x in plain]),
            (f"layer {i}: on token 0, no trigger, +", "little", [x.dormant[i] for x in learnt]),
            (f"layer {i}: on the logit, no trigger, +", "most", [x.learnt[i] for x in learnt]),
        ]
    claims = "", "more", "as all tokens", "as all tokens"
    for runs, extra in ((plain, ""), (learnt, ", +")):
        for name, claim in zip(SEEN, claims, strict=True):
            claim = "as all tokens" if extra and claim else claim
            rows.append((f"loss, {name}{extra}", claim, [x.loss[name] for x in runs]))
    print_figures(arguments, rows)
    print("+ with attention_sinks=True")
    if arguments.out:
        draw_picture(arguments, found)
    return found


def draw_picture(arguments: Any, found: dict[bool, list[Found]]) -> None:
    """Plot the fractions by layer, and the losses."""
    figure, plots = new_figure(2)
    kinds = (("token 0", False, "dormant"), ("token 0, attention_sinks", True, "dormant"),
             ("the learnt logit", True, "learnt"))  # fmt: skip
    for color, (name, sinks, field) in zip(COLOURS, kinds, strict=False):
        of_seeds = np.stack([getattr(x, field) for x in found[sinks]])
        plots[0].plot(of_seeds.mean(axis=0), "o", color=color, label=name)
        plots[0].plot(of_seeds.T, "_", ms=12, color=color)
    label(plots[0], "share of attention, no trigger", "layer", "share")
    plots[0].set_xticks(range(arguments.layers))
    for color, sinks in zip(COLOURS, (False, True), strict=False):
        x = np.arange(len(SEEN)) + 0.1 * sinks
        lines = plots[1].plot(x, np.asarray([[*y.loss.values()] for y in found[sinks]]).T, "o")
        for line in lines:
            line.set_color(color)
        lines[0].set_label("attention_sinks" if sinks else "softmax")
    plots[1].set_xticks(range(len(SEEN)), ["all", "window", "+ 1 first", "+ 4 first"])
    label(plots[1], "loss of late tokens", "a query sees", "nats a letter")
    save_picture(figure, arguments, "sinks")


if __name__ == "__main__":
    main()
