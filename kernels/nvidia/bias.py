"""Tiles and sums for the kernels that compute the gradient of a bias."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from transformer_jax.kernels.contract import Blocks, Operands, TileLists
from transformer_jax.kernels.nvidia.memory import i32


def sum_shape(operands: Operands, blocks: Blocks) -> tuple[int, int, int, int]:
    """Return the shape of the sum that the kernel computes.

    If axis T or S of the bias has size 1, the kernel sums over tiles in registers, and the caller
    sums over the rows or columns of the last tile. If both have size 1, the kernel keeps T.
    """
    assert operands.bias is not None
    T, S = operands.query.shape[1], operands.key.shape[1]
    b, n, t, s = operands.bias.shape
    return b, n, T if t > 1 or s == 1 else blocks.q, S if s > 1 else blocks.k


def visited(lists: TileLists) -> jax.Array:  # i32[B or 1, N or 1, query tiles, key tiles]
    """Return 1 for listed tiles and 0 for other tiles."""
    *leading, turn = jnp.indices(lists.order.shape, sparse=True)
    listed = (turn < lists.seen[..., None]).astype(i32)
    return jnp.zeros(lists.order.shape, i32).at[*leading, lists.order].max(listed)


def digits(index: jax.Array, sizes: Sequence[int]) -> Iterator[jax.Array]:
    """Yield the index along each axis of an array with these sizes for a flat index."""
    for axis in range(len(sizes)):
        yield index // math.prod(sizes[axis + 1 :]) % sizes[axis]
