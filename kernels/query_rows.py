"""Lay the queries of all heads that read one key head out as the rows of one tile, and back.

Row t G + g of key head h is query t of head h G + g, with G = N / K. The decode kernels multiply
such rows, R = T G of them, with each key once. (`packed_queries` has them head after head.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.kernels.contract import Operands


def packed_rows(operands: Operands, rows: int) -> Operands:
    """Return the operands with the queries of a key head as rows, filled up to `rows` of them.

    The query is [B, rows, K, H], arrays of pairs are [.., K or 1, rows or 1, ..], slopes and sinks
    [.., K, rows].
    """
    (B, T, N, H), K = operands.query.shape, operands.key.shape[2]
    G = N // K

    def filled_up(x: jax.Array, axis: int) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, rows - x.shape[axis])
        return jnp.pad(x, widths)

    def of_pairs(x: jax.Array) -> jax.Array:  # [B or 1, N or 1, T or 1, S or 1]
        b, n, t, s = x.shape
        if n == 1 == t:
            return x
        heads, group = (K, G) if n == N else (1, 1)
        x = x.reshape(b, heads, group, t, s).swapaxes(2, 3)
        return filled_up(jnp.broadcast_to(x, (b, heads, T, G, s)).reshape(b, heads, T * G, s), 2)

    def of_heads(x: jax.Array) -> jax.Array:  # [B or 1, N]
        b = x.shape[0]
        x = jnp.broadcast_to(x.reshape(b, K, 1, G), (b, K, T, G)).reshape(b, K, T * G)
        return filled_up(x, 2)

    query = operands.query.reshape(B, T, K, G, H).swapaxes(2, 3).reshape(B, T * G, K, H)
    slopes, sinks = operands.slopes, operands.sinks
    pairs, bias = operands.pairs, operands.bias
    return operands._replace(
        query=filled_up(query, 1),
        q_vectors=tuple(filled_up(jnp.repeat(x, G, axis=1), 1) for x in operands.q_vectors),
        pairs=None if pairs is None else of_pairs(pairs),
        bias=None if bias is None else of_pairs(bias),
        slopes=None if slopes is None else of_heads(slopes),
        sinks=None if sinks is None else of_heads(sinks),
    )


def unpacked_output(
    rows: jax.Array,  # [B, K, R, Hv]
    T: int,
) -> jax.Array:  # [B, T, N, Hv]
    """Return the output of rows by query and head."""
    B, K, R, Hv = rows.shape
    return rows.reshape(B, K, T, R // T, Hv).transpose(0, 2, 1, 3, 4).reshape(B, T, -1, Hv)


def unpacked_sums(
    rows: jax.Array,  # [B, K, R]
    T: int,
) -> jax.Array:  # [B, N, T]
    """Return one number of each row by head and query."""
    B, K, R = rows.shape
    return rows.reshape(B, K, T, R // T).swapaxes(2, 3).reshape(B, -1, T)
