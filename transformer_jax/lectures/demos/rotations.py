"""Plot the table of sinusoidal positions and a vector that rotates with its position.

    python -m transformer_jax demo rotations

The left plot shows P[p, 2i] = sin(p w_i) and P[p, 2i + 1] = cos(p w_i) with w_i = 10000^(-2i/D),
from high to low frequencies. Every pair is a point on a circle, so P(t + k) is P(t) rotated by k
w_i. The right plot shows the first pair of elements of a query with rotary positions (Su et al.
2021). At positions 0 to 5, the vector [1, 0] is rotated by 0, 1, 2, ... radians, and its length
remains 1.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_jax import Rope
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    INK,
    Options,
    check_least,
    check_multiple,
    label,
    new_figure,
    print_table,
    save_picture,
)
from transformer_jax.models.positions import apply_rope, sinusoidal

OPTIONS: Options = {"tokens": (64, 24), "width": (64, 8)}


def rotate(table: np.ndarray, k: int) -> np.ndarray:  # [T, D] -> [T, D]
    """Rotate each pair (sin, cos) in a table of positions by k times its frequency."""
    d = table.shape[1]
    angle = k * 10_000.0 ** (-2 * np.arange(d // 2) / d)
    sin, cos = table[:, 0::2], table[:, 1::2]
    pairs = [sin * np.cos(angle) + cos * np.sin(angle), cos * np.cos(angle) - sin * np.sin(angle)]
    return np.stack(pairs, axis=-1).reshape(table.shape)


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration. Return the table, the rotation error, and the rotated vectors."""
    check_multiple("width", arguments.width, 2, "for pairs of sine and cosine")
    length, width = arguments.tokens, arguments.width
    check_least("tokens", length, 2, "one position is rotated to another")
    k = min(5, length - 1)
    table = np.asarray(sinusoidal(jnp.arange(length), width))
    error = float(np.abs(rotate(table[:-k], k) - table[k:]).max())
    at = jnp.arange(6)
    one = jnp.tile(jnp.array([1.0, 0])[None, None, None], (1, 6, 1, 1))  # [B, T, N, H]
    vectors = np.asarray(apply_rope(one, at, Rope()))[0, :, 0]
    print(f"P(t + {k}) and rotated P(t): largest difference {error:.0e}")
    print_table(["position", "x", "y", "length"], [
        [p, *(f"{x:.4f}" for x in (*v, np.hypot(*v)))] for p, v in enumerate(vectors)
    ])  # fmt: skip
    figure, (left, right) = new_figure(2)
    left.imshow(table, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    left.grid(False)
    label(left, "Sinusoids: red -1, blue 1", "column", "position", legend=False)
    for p, (x, y) in enumerate(vectors):
        right.annotate(
            "", (x, y), (0, 0), arrowprops=dict(arrowstyle="->", color=COLOURS[0], lw=1.6)
        )
        right.text(1.13 * x, 1.13 * y, str(p), color=INK, ha="center", va="center")
    angles = np.linspace(0, 2 * np.pi, 121)
    right.plot(np.cos(angles), np.sin(angles), color="#cccccc", lw=1)
    right.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    label(right, "[1, 0] at positions 0 to 5", "first number", "second number", legend=False)
    save_picture(figure, arguments, "rotations")
    return {"table": table, "error": error, "vectors": vectors}
