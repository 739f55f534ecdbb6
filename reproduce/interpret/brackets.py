"""Find the attention heads that match brackets by patching, and verify them by ablation.

    python -m reproduce.interpret.brackets --seeds 3

Yao et al. 2021, "Self-Attention Networks Can Process Bounded Hierarchical Languages"
(arXiv:2105.11115), show that two layers suffice to predict the next closing bracket for two kinds
of brackets with a maximum nesting depth of DEPTH. The first layer computes the depth of each
bracket, and the second layer attends to the last open bracket. This script trains a two-layer
decoder on rows of such brackets. A corrupted prompt differs from the clean prompt only in the kind
of the last open bracket. `interpret.patch` replaces the values of the corrupted prompt with those
of the clean prompt, one at a time, and measures

    restored = (metric(patched) - metric(corrupted)) / (metric(clean) - metric(corrupted)),

where the metric is the logit of the correct closing bracket minus the logit of the incorrect one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from reproduce.interpret.shared import print_figures, read_arguments
from transformer_jax import interpret
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    draw_matrix,
    label,
    new_figure,
    save_picture,
    train,
)
from transformer_jax.models import attention_weights

LENGTH, DEPTH, ROWS = 32, 4, 64
ASKED, BACK = 24, 8
"""Number of tokens in a prompt, and distance from the last open bracket to the last token."""
CLOSE, BOS = 2, 4
"""Tokens 0 and 1 are opening brackets; 2 and 3 are closing brackets."""
Heads = list[tuple[int, int]]
"""Heads, as pairs of a layer and a head number."""


class Found(NamedTuple):
    """Measurements of one model."""

    right: float
    """Fraction of closing brackets on held-out rows whose kind is predicted correctly."""
    asked: float
    """Fraction of the clean and corrupted prompts for which the closing bracket is correct."""
    attention: np.ndarray  # f32[L, N], weight on the last open bracket
    tokens: np.ndarray  # f32[L, T], restored by the residual stream after a layer at a token
    heads: np.ndarray  # f32[L, N], restored by a head
    circuit: Heads
    """Smallest set of the most important heads that together restore 0.9."""
    without: float
    """Value of `asked` if the output of each head in the circuit is replaced by its mean."""
    without_others: float
    """Value of `asked` if the same number of other heads, those that restore least, are ablated."""
    alone: float
    """Value of `asked` if all heads outside the circuit are ablated."""


def draw_rows(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:  # i32[count, LENGTH + 1]
    """Draw rows of <bos> and brackets, and find the last open bracket at each token.

    Its position is -1 if no bracket is open.
    """
    random, each = np.random.default_rng(seed), np.arange(count)
    rows, last_open = (np.full((count, LENGTH + 1), x, np.int32) for x in (BOS, -1))
    stack, depth = np.full((count, DEPTH + 1), -1), np.zeros(count, int)
    for t in range(1, LENGTH + 1):
        opens = (depth == 0) | ((depth < DEPTH) & (random.random(count) < 0.5))
        closing = rows[each, stack[each, depth]] + CLOSE
        rows[:, t] = np.where(opens, random.integers(0, 2, count), closing)
        depth += np.where(opens, 1, -1)
        stack[each[opens], depth[opens]] = t
        last_open[:, t] = stack[each, depth]
    return rows, last_open


def draw_prompts(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:  # i32[count, ASKED]
    """Draw clean prompts, with the last open bracket BACK tokens before the end, and corrupted
    ones."""
    rows, last_open = draw_rows(seed, 200 * count)
    place = ASKED - 1 - BACK
    clean = rows[last_open[:, ASKED - 1] == place, :ASKED][:count]
    corrupted = clean.copy()
    corrupted[:, place] = 1 - clean[:, place]
    return clean, corrupted


def on_last_open(
    weights: np.ndarray,  # f32[B, L, N, T, S]
    last_open: np.ndarray,  # i32[B, T]
) -> np.ndarray:  # f32[L, N]
    """Return the mean attention weight on the last open bracket over all other queries."""
    rows, queries = np.nonzero((last_open > 0) & (last_open < np.arange(last_open.shape[1])))
    return weights[rows, :, :, queries, last_open[rows, queries]].mean(axis=0)


def edit_heads(heads: Heads, edit: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Return the edits for some heads, with one call of edit(place, heads=...) per layer."""
    joined: dict[str, Any] = {}
    for layer in sorted({layer for layer, _ in heads}):
        own = [head for of, head in heads if of == layer]
        joined |= edit(f"block_{layer}/attention/heads", heads=own)
    return joined


def measure(seed: int, sizes: Any) -> Found:
    """Train a decoder, find the heads that transfer the kind of a bracket, and ablate them."""
    config = tj.ModelConfig(
        vocab_size=BOS + 1, d_model=sizes.width, num_layers=2, num_heads=4, max_len=LENGTH,
        init_std=0.1,
    )  # fmt: skip
    model, key = tj.build(config), jax.random.key(seed)
    batches = draw_rows(seed, sizes.steps * ROWS)[0].reshape(sizes.steps, ROWS, -1)

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        return tj.cross_entropy(model.apply({"params": params}, rows[:, :-1])[0], rows[:, 1:])[0]

    params, _ = train(loss, tj.init_params(config, key), jnp.asarray(batches), 3e-3)
    rows, last_open = draw_rows(1_000_001, 256)
    clean, corrupted = map(jnp.asarray, draw_prompts(1_000_002, 128))
    sign = 1 - 2 * clean[:, ASKED - 1 - BACK]
    both = jnp.concatenate([clean, corrupted])

    def read(tokens: Any, model: Any = model, **arguments: Any) -> Any:
        return model.apply({"params": params}, jnp.asarray(tokens), **arguments)

    def right(ablated: Heads) -> float:
        logits = read(both, model.edited(edit_heads(ablated, interpret.mean)))[0][:, -1]
        kinds = CLOSE + (logits[:, CLOSE + 1] > logits[:, CLOSE])
        return float((kinds == both[:, ASKED - 1 - BACK] + CLOSE).mean())

    def metric(logits: jax.Array) -> jax.Array:
        return ((logits[:, -1, CLOSE] - logits[:, -1, CLOSE + 1]) * sign).mean()

    high, low = (float(metric(read(x)[0])) for x in (clean, corrupted))

    def restored(places: str, axis: Any) -> np.ndarray:
        given = model, params, clean, corrupted, places, metric
        return (np.asarray(interpret.patch(*given, each=(axis,), batch_size=4)) - low) / (
            high - low
        )

    tokens, by_head = (
        restored("block_*/residual", "token"),
        restored("block_*/attention/heads", "head"),
    )
    captured = read(clean, capture=("block_*/attention/heads",))[2]

    def put(place: str, heads: list[int]) -> dict[str, Any]:
        return interpret.resample({place: captured[place]}, heads=heads)

    order = [(int(i), int(n)) for i, n in np.argwhere(by_head > -np.inf)]
    order.sort(key=lambda head: -by_head[head])
    count = 1
    while count < len(order):
        logits = read(corrupted, model.edited(edit_heads(order[:count], put)))[0]
        if metric(logits) - low >= 0.9 * (high - low):
            break
        count += 1
    logits = read(rows[:, :-1])[0]
    weights = attention_weights(model, params, jnp.asarray(rows[:, :-1]))["attention"]
    kinds = CLOSE + (logits[..., CLOSE + 1] > logits[..., CLOSE])
    closes = rows[:, 1:] >= CLOSE
    return Found(
        float((np.asarray(kinds) == rows[:, 1:])[closes].mean()), right([]),
        on_last_open(np.asarray(weights), last_open[:, :-1]), tokens, by_head, order[:count],
        right(order[:count]), right(order[max(count, len(order) - count) :]), right(order[count:]),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> list[Found]:
    """Run the command and return the measurements of each model."""
    arguments = read_arguments(__doc__, argv, steps=1000, width=32)
    found = [measure(seed, arguments) for seed in arguments.seeds]
    place = ASKED - 1 - BACK
    print_figures(arguments, [
        ("closing brackets of the right kind", "1", [x.right for x in found]),
        ("attention on the last open one, layer 0", "", [x.attention[0].max() for x in found]),
        ("the same, layer 1", "near 1", [x.attention[1].max() for x in found]),
        ("restored at the open bracket, after layer 0", "1", [x.tokens[0, place] for x in found]),
        ("restored at the last token, after layer 0", "0", [x.tokens[0, -1] for x in found]),
        ("restored by the heads of layer 0, best", "0", [x.heads[0].max() for x in found]),
        ("restored by the heads of layer 1, best", "1", [x.heads[1].max() for x in found]),
        ("heads of the circuit", "few", [len(x.circuit) for x in found]),
        ("of them in layer 1", "all", [sum(i == 1 for i, _ in x.circuit) for x in found]),
        ("prompts answered right", "1", [x.asked for x in found]),
        ("the same without the circuit", "0.5", [x.without for x in found]),
        ("without as many others", "1", [x.without_others for x in found]),
        ("with the circuit alone", "1", [x.alone for x in found]),
    ])  # fmt: skip
    if arguments.out:
        draw_picture(arguments, found[0])
    return found


def draw_picture(arguments: Any, found: Found) -> None:
    """Plot how much the heads and tokens of seed 0 restore."""
    figure, plots = new_figure(2, height=2.6)
    layers = [f"layer {i}" for i in range(len(found.heads))]
    heads = [f"head {n}" for n in range(found.heads.shape[1])]
    draw_matrix(plots[0], found.heads, layers, heads)
    label(plots[0], "restored by a head", "", "", legend=False)
    for color, layer, row in zip(COLOURS, layers, found.tokens, strict=False):
        plots[1].plot(row, "o-", color=color, label=layer)
    label(plots[1], "restored by the stream at a token", "token", "share")
    save_picture(figure, arguments, "brackets")


if __name__ == "__main__":
    main()
