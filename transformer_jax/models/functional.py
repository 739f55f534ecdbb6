"""Activations and dropout as pure functions, written as in the original papers.

Norms, products and table lookups are in `ops`, which also shards them over a mesh, and uses the
compiled CPU kernels if there are few rows.
"""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp

from transformer_jax.attention.dropout import key_words
from transformer_jax.checks import check_key
from transformer_jax.config import Activation
from transformer_jax.config.fields import fail, nearest
from transformer_jax.config.model import AnyActivation
from transformer_jax.kernels.dropout import exact_rate, head_words, keep, threshold
from transformer_jax.sharding import by_compiler, split

F32 = jnp.float32


def activate(x: jax.Array, name: AnyActivation) -> jax.Array:
    """Apply an activation elementwise.

    Args:
        x: array of any shape.
        name: "relu", "relu_squared" (So et al. 2021), "silu", "gelu" (x Phi(x), Hendrycks & Gimpel
            2016), one of its approximations "gelu_tanh" (GPT-2) and "quick_gelu"
            (x sigmoid(1.702 x)), or a function of an array.

    Raises:
        ValueError: If a function changes the shape of the array.
    """
    if callable(name):
        y = jnp.asarray(name(x))
        if y.shape != x.shape:
            raise ValueError(f"activation returns shape {y.shape}: must be that of x, {x.shape}")
        return y.astype(x.dtype)
    match name:
        case "relu":
            return jax.nn.relu(x)
        case "relu_squared":
            return jnp.square(jax.nn.relu(x))
        case "silu":
            return jax.nn.silu(x)
        case "gelu":
            # by default, JAX uses the tanh approximation
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "quick_gelu":
            return x * jax.nn.sigmoid(1.702 * x)
        case "xielu":
            fail("activation", name, "has learned numbers; call `xielu` instead of `activate`")
    names = get_args(Activation)
    fail("activation", name, f"must be one of {', '.join(names)}{nearest(name, names)}")


def xielu(
    x: jax.Array,  # [..., F]
    positive: jax.Array,  # [1]
    negative: jax.Array,  # [1]
) -> jax.Array:  # [..., F]
    """Return xIELU with two learned numbers (Huang & Schlag 2024).

    The result is softplus(positive) x² + x/2 for x > 0, and otherwise
    (1/2 + softplus(negative)) (exp(x) - 1 - x) + x/2.
    """
    y = x.astype(F32)
    right = jax.nn.softplus(positive[0]) * jnp.square(y)
    # exp(x) would overflow on the other side, where its gradient would then be NaN
    left = (0.5 + jax.nn.softplus(negative[0])) * (jnp.expm1(jnp.where(y > 0, 0.0, y)) - y)
    return (jnp.where(y > 0, right, left) + 0.5 * y).astype(x.dtype)


def gated(
    gate: jax.Array,  # [..., F], x W_gate
    up: jax.Array,  # [..., F], x W_up
    activation: AnyActivation,
    limit: float | None = None,
    unit_offset: bool = False,
) -> jax.Array:  # [..., F]
    """Return act(gate) * up (Shazeer 2020), or act(gate) * (1 + up) with `unit_offset`.

    A limit c clips `gate` to at most c, and clips `up` to [-c, c] (gpt-oss).
    """
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return activate(gate, activation) * (1 + up if unit_offset else up)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Set elements to zero with probability `rate` and scale the others by 1 / (1 - rate).

    Without a key, x is returned unchanged (Srivastava et al. 2014).
    """
    if key is None or (rate := exact_rate(rate)) == 0.0:
        return x

    def drop(x: jax.Array, key: jax.Array) -> jax.Array:
        # compare 32 random bits, because a random float32 has only 23, too few for rates near 0 or
        # 1
        keep = ~jax.random.bits(key, x.shape, jnp.uint32) >= jnp.uint32(threshold(rate))
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))

    return by_compiler(drop, [x, key], split(x))


def drop_weights(weights: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Apply dropout to weights [B, N, T, S], with the same bits as `dot_product_attention`."""
    if key is None or (rate := exact_rate(rate)) == 0.0:
        return weights

    def drop(weights: jax.Array, key: jax.Array) -> jax.Array:
        B, N, T, S = weights.shape
        a, b = (word[..., None, None] for word in head_words(key_words(key), B, N))
        q = jnp.arange(T, dtype=jnp.uint32)[None, None, :, None]
        k = jnp.arange(S, dtype=jnp.uint32)[None, None, None, :]
        return jnp.where(keep(a, b, q, k, rate), weights / (1 - rate), 0.0)

    return by_compiler(drop, [weights, key], split(weights))


def split_key(key: jax.Array | None, parts: int) -> list[jax.Array | None]:
    """Split a key into `parts` keys, or return a list of None if the key is None."""
    if key is None:
        return [None] * parts
    check_key("key", key)
    return list(jax.random.split(key, parts))
