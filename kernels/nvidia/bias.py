"""Say what the kernels for the gradient of a bias sum, and where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from transformer_jax.kernels.contract import Blocks, Operands, TileLists
from transformer_jax.kernels.nvidia.memory import i32


def sum_shape(operands: Operands, blocks: Blocks) -> tuple[int, int, int, int]:
    """Return the shape of what the kernel sums.

    Along T or S a bias without that axis is summed in registers and then once more outside, over
    the rows or columns of one tile; one without both keeps T.
    """
    assert operands.bias is not None
    T, S = operands.query.shape[1], operands.key.shape[1]
    b, n, t, s = operands.bias.shape
    return b, n, T if t > 1 or s == 1 else blocks.q, S if s > 1 else blocks.k


def visited(lists: TileLists) -> jax.Array:  # i32[B or 1, N or 1, query tiles, key tiles]
    """Return 1 for the tiles that the lists name, else 0."""
    *where, turn = jnp.indices(lists.order.shape, sparse=True)
    named = (turn < lists.seen[..., None]).astype(i32)
    return jnp.zeros(lists.order.shape, i32).at[*where, lists.order].max(named)


def digits(index: jax.Array, sizes: Sequence[int]) -> Iterator[jax.Array]:
    """Yield the index of an array of these sizes at a flat index."""
    for axis in range(len(sizes)):
        yield index // math.prod(sizes[axis + 1 :]) % sizes[axis]
