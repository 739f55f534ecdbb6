"""Show why scores are divided by the square root of the head width.

    python -m transformer_jax demo score_variance

If the elements of q and k are independent with mean 0 and variance 1, then q.k has variance d.
After scaling by 1/sqrt(d), the variance is 1 (Vaswani et al. 2017, section 3.2.1, note 4). Large
scores make the softmax one-hot, so its entropy and gradient approach 0. Uniform weights over S keys
have entropy ln S.
"""

from __future__ import annotations

import math
from argparse import Namespace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax import dot_product_attention, dot_product_attention_weights
from transformer_jax.config.fields import fail
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    label,
    new_figure,
    print_table,
    save_picture,
)

OPTIONS: Options = {"tokens": (64, 64), "width": (1024, 64)}

QUERIES = 1000


@partial(jax.jit, static_argnums=(0, 1, 2))
def measure(d: int, keys: int, scale: float | None) -> tuple[jax.Array, jax.Array]:
    """Return the variance of the scores and the mean entropy of their softmax, in nats."""
    query_key, key_key = jax.random.split(jax.random.key(d))
    query = jax.random.normal(query_key, (QUERIES, 1, 1, d))  # [B, T, N, H]
    key = jax.random.normal(key_key, (QUERIES, keys, 1, d))  # [B, S, K, H]
    one = key[:, :1]  # with one key, the log-sum-exp is the score
    _, scores = dot_product_attention(query, one, one, scale=scale, return_lse=True)
    weights = dot_product_attention_weights(query, key, scale=scale)
    entropy = jax.scipy.special.entr(weights).sum(axis=-1)
    return jnp.var(scores), entropy.mean()


def demonstrate(arguments: Namespace) -> dict[int, Any]:
    """Run the demonstration. Return (variance, entropy), unscaled and scaled, keyed by width."""
    keys, widths = arguments.tokens, [4**i for i in range(1, 16) if 4**i <= arguments.width]
    if not widths:
        fail("width", arguments.width, "must be at least 4")
    found = {d: (measure(d, keys, 1.0), measure(d, keys, None)) for d in widths}
    rows = [
        [d, f"{raw[0]:.2f}", f"{scaled[0]:.3f}", f"{raw[1]:.3f}", f"{scaled[1]:.3f}"]
        for d, (raw, scaled) in found.items()
    ]
    print_table(["d", "var q.k", "var q.k/sqrt(d)", "entropy", "entropy, scaled"], rows)
    print(f"entropy of uniform weights over {keys} keys: ln {keys} = {math.log(keys):.3f} nats")
    figure, plots = new_figure(2)
    for i, axes in enumerate(plots):
        for j, name in enumerate(("q.k", "q.k / sqrt(d)")):
            values = [both[j][i] for both in found.values()]
            axes.plot(widths, values, "o-", color=COLOURS[1 - j], label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [str(d) for d in widths])
    plots[0].set_yscale("log")
    plots[1].axhline(math.log(keys), color="#bbbbbb", linestyle="--", label=f"uniform, ln {keys}")
    label(plots[0], "Variance of the scores", "head width d", "variance")
    label(plots[1], "Entropy of the softmax", "head width d", "entropy (nats)")
    save_picture(figure, arguments, "score_variance")
    return found
