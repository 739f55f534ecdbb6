"""Lay out keys and values for the decode kernel's copies, and add up what its parts leave."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.kernels.contract import Operands
from transformer_jax.kernels.hopper.memory import ROWS
from transformer_jax.kernels.hopper.scores import LN2, LOG2E
from transformer_jax.kernels.query_rows import unpacked_output, unpacked_sums


def for_copies(operands: Operands, listed: int) -> Operands:
    """Return the operands with keys and values as copies want them, which mostly they are.

    A copy takes 64 of them, and reads zeros past the end of an array of a multiple of 8. Scales,
    which are read without copies, are as many as `listed` tiles have keys. Pages are whole copies.
    """
    if operands.pages is not None:
        return operands

    def padded(x: Any, length: int) -> Any:
        if x is None or x.shape[1] == length:
            return x
        return jnp.pad(x, [(0, length - n if axis == 1 else 0) for axis, n in enumerate(x.shape)])

    S = max(ROWS, -(-operands.key.shape[1] // 8) * 8)
    return operands._replace(
        key=padded(operands.key, S),
        value=padded(operands.value, S),
        k_scale=padded(operands.k_scale, listed),
        v_scale=padded(operands.v_scale, listed),
    )


def swizzle(x: jax.Array) -> int | None:
    """Return how tiles of int8 are swizzled, so that some columns are whole parts of it."""
    return None if x.dtype != jnp.int8 else columns_at_once(x.shape[3])


def columns_at_once(width: int) -> int:
    """Return how many columns of a tile are in registers at a time: few, and whole parts of it."""
    return next(columns for columns in (64, 32, 16) if width % columns == 0)


def merged(
    operands: Operands,
    acc: jax.Array,  # f32[B, K, parts, rows, Hv]
    row_max: jax.Array,  # f32[B, K, parts, ROWS], in base 2
    total: jax.Array,  # f32[B, K, parts, ROWS]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return output, m and log l of the sums of all parts; the sink joins here."""
    (B, T, N, _), K = operands.query.shape, operands.key.shape[2]
    G, R = N // K, T * N // K
    row_max, total = row_max[..., :R], total[..., :R]
    top = row_max.max(axis=2)
    weight = jnp.exp2(row_max - top[:, :, None])
    total = (weight * total).sum(axis=2)
    summed = (weight[..., None] * acc[:, :, :, :R]).sum(axis=2)
    live = total != 0
    if operands.sinks is not None:
        sinks = operands.sinks.reshape(-1, K, 1, G) * LOG2E
        sinks = jnp.broadcast_to(sinks, (B, K, T, G)).reshape(B, K, R)
        grown = jnp.maximum(top, sinks)
        shrink = jnp.exp2(top - grown)
        total, summed = total * shrink + jnp.exp2(sinks - grown), summed * shrink[..., None]
        top = grown
    total = jnp.where(live, total, 1)
    out = jnp.where(live[..., None], summed / total[..., None], 0).astype(operands.query.dtype)
    row_max, log_sum = jnp.where(live, top * LN2, -jnp.inf), jnp.log2(total) * LN2
    return unpacked_output(out, T), unpacked_sums(row_max, T), unpacked_sums(log_sum, T)
