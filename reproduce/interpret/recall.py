"""Train a two-layer model on associative recall and find the lookup head that forms in it.

    python -m reproduce.interpret.recall --seeds 3

The task is multi-query associative recall from Arora et al. 2023, "Zoology: Measuring and improving
recall in efficient language models" (arXiv:2312.04927). A row contains PAIRS pairs of a key and a
value, k1 v1 k2 v2 ..., and then the same pairs in a different order. The model must answer each key
with its value, and the loss covers only these answers. Two layers of attention solve the task like
an induction head. A head in the first layer attends to the previous token, so that the position of
a value contains its key. A lookup head in the second layer attends from a key to the value after
the earlier occurrence of the key. In training, a row has from 2 to PAIRS distinct keys, some of
which are repeated. Rows with few keys are easy, and the head forms on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from reproduce.interpret.shared import print_figures, read_arguments
from transformer_jax import interpret
from transformer_jax.config import T5Buckets
from transformer_jax.lectures.demos.shared import (
    draw_matrix,
    label,
    new_figure,
    save_picture,
    train,
)
from transformer_jax.models import attention_weights

KEYS, PAIRS, ROWS = 16, 8, 32
"""Number of different keys (and of values), number of pairs per row, and number of rows per
batch."""
LENGTH = 4 * PAIRS
ANSWERS = 2 * PAIRS + 1 + 2 * np.arange(PAIRS)
"""Indices of the answers in a row; the query for each answer is the key before it."""


class Found(NamedTuple):
    """Measurements of one model on held-out rows with PAIRS distinct keys."""

    right: float
    """Fraction of correct answers."""
    lookup: np.ndarray  # f32[L, N], weight from a key to its value
    own_key: np.ndarray  # f32[L, N], weight from a value to its key
    without: tuple[float, float]
    """Values of `right` without the lookup heads of the last layer, and without its other heads."""
    without_first: tuple[float, float]
    """Values of `right` without the first-layer heads that attend from values to their keys, and
    without the other first-layer heads."""


def draw_rows(key: jax.Array, rows: int, fewest: int) -> tuple[jax.Array, jax.Array]:
    """Draw rows i32[rows, LENGTH] and the position of the value of each answer, i32[rows, PAIRS].

    The first half of a row has from `fewest` to PAIRS distinct keys. If a key is repeated, so is
    its value, and the position of the last occurrence is returned.
    """
    keys = jax.random.split(key, 5)

    def shuffle(key: jax.Array, values: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.permutation)(jax.random.split(key, rows), values)

    every = shuffle(keys[0], jnp.tile(jnp.arange(KEYS)[None], (rows, 1)))
    distinct = jax.random.randint(keys[1], (rows, 1), fewest, PAIRS + 1)
    names = jnp.take_along_axis(every, jnp.arange(PAIRS)[None] % distinct, axis=1)
    values = KEYS + jax.random.randint(keys[2], (rows, KEYS), 0, KEYS)
    read, asked = shuffle(keys[3], names), shuffle(keys[4], names)
    both = jnp.concatenate([read, asked], axis=1)
    tokens = jnp.stack([both, jnp.take_along_axis(values, both, axis=1)], axis=2)
    equal = asked[:, :, None] == read[:, None, :]
    pair = PAIRS - 1 - jnp.argmax(equal[:, :, ::-1], axis=2)
    return tokens.reshape(rows, LENGTH), 2 * pair + 1


def measure(seed: int, layers: int, sizes: Any) -> Found:
    """Train a model, find the lookup heads, and ablate them."""
    config = tj.ModelConfig(
        vocab_size=2 * KEYS, d_model=sizes.width, num_layers=layers, num_heads=4, d_ff=sizes.width,
        max_len=LENGTH, positions=T5Buckets(buckets=2 * LENGTH, max_distance=2 * LENGTH),
        init_std=sizes.width**-0.5, tie_embeddings=False,
    )  # fmt: skip
    model, key = tj.build(config), jax.random.key(seed)

    def answers(params: Any, rows: jax.Array, model: Any = model) -> jax.Array:  # f32[B, PAIRS, V]
        return model.apply({"params": params}, rows[:, :-1])[0][:, ANSWERS - 1]

    def loss(params: Any, step: jax.Array) -> jax.Array:
        rows, _ = draw_rows(jax.random.fold_in(key, 1 + step), ROWS, 2)
        return tj.cross_entropy(answers(params, rows), rows[:, ANSWERS])[0]

    first = tj.init_params(config, jax.random.fold_in(key, 0))
    params, _ = train(loss, first, jnp.arange(sizes.steps), 3e-3)
    rows, places = draw_rows(jax.random.key(1_000_001), 128, PAIRS)
    weights = np.asarray(attention_weights(model, params, rows[:, :-1])["attention"])
    lookup, own_key = attention(weights, np.asarray(places))

    def right(edit: Any) -> float:
        chosen = answers(params, rows, model.edited(edit)).argmax(axis=-1)
        return float((chosen == rows[:, ANSWERS]).mean())

    def without(layer: int, scores: np.ndarray) -> tuple[float, float]:
        found = scores >= min(0.3, scores.max())
        heads = np.flatnonzero(found), np.flatnonzero(~found)
        place = f"block_{layer}/attention/heads"
        edits = [interpret.zero(place, heads=some) if len(some) else {} for some in heads]
        return right(edits[0]), right(edits[1])

    return Found(
        right({}), lookup, own_key, without(layers - 1, lookup[-1]), without(0, own_key[0])
    )


def attention(
    weights: np.ndarray,  # f32[B, L, N, T, S]
    places: np.ndarray,  # i32[B, PAIRS]
) -> tuple[np.ndarray, np.ndarray]:  # f32[L, N] both
    """Return the mean attention weights from keys to their values and from values to their keys."""
    each, values = np.arange(len(places))[:, None], 1 + 2 * np.arange(PAIRS)
    lookup = weights[each, :, :, ANSWERS - 1, places].mean(axis=(0, 1))
    return lookup, weights[:, :, :, values, values - 1].mean(axis=(0, 3))


def main(argv: Sequence[str] | None = None) -> dict[int, list[Found]]:
    """Run the command and return the measurements for two layers and for one layer."""
    arguments = read_arguments(__doc__, argv, steps=5000, width=32)
    found = {layers: [measure(seed, layers, arguments) for seed in arguments.seeds]
             for layers in (2, 1)}  # fmt: skip
    two, one = found[2], found[1]
    print_figures(arguments, [
        ("right answers, two layers", "1", [x.right for x in two]),
        ("the same, one layer", "few", [x.right for x in one]),
        ("attention of a key on its value, layer 1", "near 1", [x.lookup[1].max() for x in two]),
        ("the same, one layer", "near 0", [x.lookup[0].max() for x in one]),
        ("attention of a value on its key, layer 0", "near 1", [x.own_key[0].max() for x in two]),
        ("lookup heads, of 4", "", [(x.lookup[1] > 0.3).sum() for x in two]),
        ("heads of layer 0 on own keys, of 4", "", [(x.own_key[0] > 0.3).sum() for x in two]),
        ("right without the lookup heads", "few", [x.without[0] for x in two]),
        ("right without the other heads of layer 1", "1", [x.without[1] for x in two]),
        ("right without the heads on own keys", "few", [x.without_first[0] for x in two]),
        ("right without the other heads of layer 0", "1", [x.without_first[1] for x in two]),
    ])  # fmt: skip
    if arguments.out:
        draw_picture(arguments, two[0])
    return found


def draw_picture(arguments: Any, found: Found) -> None:
    """Plot both weights of every head of the two-layer model with seed 0."""
    figure, plots = new_figure(2, height=2.6)
    layers = [f"layer {i}" for i in range(len(found.lookup))]
    heads = [f"head {n}" for n in range(found.lookup.shape[1])]
    kinds = (
        (found.lookup, "of a key on the value it asks for"),
        (found.own_key, "of a value on its key"),
    )
    for axes, (values, name) in zip(plots, kinds, strict=True):
        draw_matrix(axes, values, layers, heads)
        label(axes, f"attention {name}", "", "", legend=False)
    save_picture(figure, arguments, "recall")


if __name__ == "__main__":
    main()
