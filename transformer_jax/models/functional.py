"""Compute activations and dropout as pure functions of arrays, as their papers write them.

`ops` has norms, products and look-ups: it splits them over a mesh and leaves few rows to the
kernels compiled for CPUs.
"""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp

from transformer_jax.checks import check_key
from transformer_jax.config import Activation
from transformer_jax.config.fields import fail, nearest
from transformer_jax.config.model import AnyActivation
from transformer_jax.kernels.dropout import exact_rate, threshold
from transformer_jax.sharding import by_compiler, split

F32 = jnp.float32


def activate(x: jax.Array, name: AnyActivation) -> jax.Array:
    """Apply an activation elementwise.

    Args:
        x: any shape.
        name: "relu", "silu", "gelu", x Phi(x), and what approximates it (Hendrycks & Gimpel 2016),
            "gelu_tanh", GPT-2's, and "quick_gelu", x sigmoid(1.702 x); or a function of an array.

    Raises:
        ValueError: if a function returns another shape.
    """
    if callable(name):
        y = jnp.asarray(name(x))
        if y.shape != x.shape:
            raise ValueError(f"activation returns shape {y.shape}: must be that of x, {x.shape}")
        return y.astype(x.dtype)
    match name:
        case "relu":
            return jax.nn.relu(x)
        case "silu":
            return jax.nn.silu(x)
        case "gelu":
            # the default of JAX is the approximation by tanh
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "quick_gelu":
            return x * jax.nn.sigmoid(1.702 * x)
    names = get_args(Activation)
    fail("activation", name, f"must be one of {', '.join(names)}{nearest(name, names)}")


def gated(
    gate: jax.Array,  # [..., F], x W_gate
    up: jax.Array,  # [..., F], x W_up
    activation: AnyActivation,
    limit: float | None = None,
    unit_offset: bool = False,
) -> jax.Array:  # [..., F]
    """Return act(gate) * up (Shazeer 2020), or with `unit_offset` act(gate) * (1 + up).

    With a limit c gate is at most c, and up from -c to c (gpt-oss).
    """
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return activate(gate, activation) * (1 + up if unit_offset else up)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Return x / (1 - rate) where kept, else 0; x itself without a key (Srivastava et al. 2014)."""
    if key is None or (rate := exact_rate(rate)) == 0.0:
        return x

    def drop(x: jax.Array, key: jax.Array) -> jax.Array:
        # 32 bits: a float32 has 23, too few for rates near 0 and 1
        keep = ~jax.random.bits(key, x.shape, jnp.uint32) >= jnp.uint32(threshold(rate))
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))

    return by_compiler(drop, [x, key], split(x))


def split_key(key: jax.Array | None, parts: int) -> list[jax.Array | None]:
    """Split a key into `parts`; None into as many times None."""
    if key is None:
        return [None] * parts
    check_key("key", key)
    return list(jax.random.split(key, parts))
