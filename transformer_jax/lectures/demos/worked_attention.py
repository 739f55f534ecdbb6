"""Work through one layer of self-attention for three tokens of width 4, and print every number.

    python -m transformer_jax demo worked_attention

    X = E + P                     embeddings and sinusoidal positions
    Q, K, V = X W_Q, X W_K, X W_V
    S = Q K^T / sqrt(4)           scores
    A = softmax(S)                weights, one row per query
    O = A V                       output
    Y = norm(O + P)               positions added again, then normalized

The equations are from Vaswani et al. 2017, section 3.2.1, and the numbers are from the lecture.
Adding P again is not a residual connection, because a transformer block adds X: Z = norm(O + X).
"""

from __future__ import annotations

from argparse import Namespace

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import dot_product_attention, dot_product_attention_weights
from transformer_jax.lectures.demos.shared import (
    Options,
    draw_matrix,
    label,
    new_figure,
    save_picture,
)
from transformer_jax.models.ops import layer_norm
from transformer_jax.models.positions import sinusoidal

OPTIONS: Options = {"sentence": (None, None), "seed": (0, 0)}

EMBEDDINGS = jnp.array([[1.0, 2, 1, 2], [3, 2, 1, 2], [4, 1, 2, 1]])  # [T, D]
W_Q = jnp.array([[1.0, 2, 3, 1], [4, 1, 2, 3], [1, 1, 2, 2], [1, 2, 1, 1]])  # [D, H]
W_K = W_V = jnp.array([[1.0, 2, 2, 1], [1, 2, 2, 3], [1, 3, 4, 2], [1, 2, 3, 1]])
TOKENS = ("Apple", "Innovative", "Company")


def one_head(matrix: jax.Array) -> jax.Array:  # [T, H] -> [B, T, N, H]
    """Add a batch axis and a head axis of size 1."""
    return matrix[None, :, None]


def compute(
    embeddings: jax.Array = EMBEDDINGS,  # f32[T, D]
) -> dict[str, np.ndarray]:
    """Return every intermediate value of the example, keyed by name, with one row per token."""
    positions = sinusoidal(jnp.arange(len(embeddings)), 4)
    x = embeddings + positions
    q, k, v = x @ W_Q, x @ W_K, x @ W_V
    weights = dot_product_attention_weights(one_head(q), one_head(k))[0, 0]
    output = dot_product_attention(one_head(q), one_head(k), one_head(v))[0, :, 0]
    return {
        "embeddings E": np.asarray(embeddings),
        "positions P": np.asarray(positions),
        "input X = E + P": np.asarray(x),
        "queries Q": np.asarray(q),
        "keys K": np.asarray(k),
        "values V": np.asarray(v),
        "scores S": np.asarray(q @ k.T / 2),
        "weights A": np.asarray(weights),
        "output O": np.asarray(output),
        "sum O + P": np.asarray(output + positions),
        "normalised Y": np.asarray(layer_norm(output + positions, eps=0.0)),
        "residual O + X": np.asarray(output + x),
        "normalised Z": np.asarray(layer_norm(output + x, eps=0.0)),
    }


def demonstrate(arguments: Namespace) -> dict[str, np.ndarray]:
    """Run the demonstration, and return every intermediate value, keyed by name."""
    words, embeddings = TOKENS, EMBEDDINGS
    if arguments.sentence is not None:
        words = tuple(arguments.sentence.split())
        draw = np.random.default_rng(arguments.seed)
        embeddings = jnp.asarray(draw.integers(1, 5, (len(words), 4)), jnp.float32)
    steps = compute(embeddings)
    for name, rows in steps.items():
        print(name)
        for token, row in zip(words, rows, strict=True):
            print(f"  {token:10}  " + " ".join(f"{value:10.4f}" for value in row))
    if arguments.sentence is None:
        print("the scores of each row differ so much that all weight is on Innovative")
    unit = np.asarray(jax.nn.softmax(steps["scores S"] / 50))
    figure, (left, right) = new_figure(2, height=3.4)
    names = [f"{t}\n{e.astype(int)}" for t, e in zip(words, steps["embeddings E"], strict=True)]
    draw_matrix(left, steps["weights A"], names, words)
    draw_matrix(right, unit, words, words)
    label(left, "softmax(S)", "key", "query", legend=False)
    label(right, "softmax(S / 50): what smaller scores give", "key", "query", legend=False)
    save_picture(figure, arguments, "worked_attention")
    return steps
