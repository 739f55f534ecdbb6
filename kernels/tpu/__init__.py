"""Flash attention on a TPU: Pallas kernels for Mosaic, after FlashAttention-2 (Dao 2023).

The scores of a tile are held as [keys, queries]. Then what belongs to a query (m, l, D, positions)
is a row along the lanes, as in memory, sums over keys add whole registers, and the products onto
keys need no transpose; what is summed onto queries is held as [H, queries] and transposed once.

    grid       the walk over rows of tiles and the tiles that each visits
    scores     the arithmetic of a tile
    forward, backward    the kernels
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from transformer_jax.kernels.chips import TPU_LANES as SHORTEST  # no tile is shorter
from transformer_jax.kernels.chips import TPU_LIST_BYTES as LIST_BYTES
from transformer_jax.kernels.chips import tpu_blocks as blocks
from transformer_jax.kernels.contract import Problem
from transformer_jax.kernels.tpu.backward import backward_bias, backward_dkdv, backward_dq
from transformer_jax.kernels.tpu.forward import forward

__all__ = [
    "HEADS_FIRST",
    "LIST_BYTES",
    "SHORTEST",
    "backward_bias",
    "backward_dkdv",
    "backward_dq",
    "blocks",
    "forward",
    "refuse",
]

HEADS_FIRST = True  # whether results come as [B, N, T, H], transposed
REPAIRS = False  # whether the kernels themselves keep the rule on what is not finite
PORTABLE = None


def refuse(
    problem: Problem,
    query: Any,  # [B, T, N, H]: arrays, or structs of their shape and dtype
    key: Any,  # [B, S, K, H]
    value: Any,  # [B, S, K, Hv]
) -> str | None:
    """Return why these arrays can't be done here, or None."""
    dtypes = [jnp.dtype(x.dtype).name for x in (query, key, value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in ("float32", "bfloat16"):
        return f"dtypes {', '.join(dtypes)}: must be float32 or bfloat16, and the same"
    for name, size in (("H", query.shape[-1]), ("Hv", value.shape[-1])):
        if size % 8 or not 0 < size <= 512:
            return f"{name} {size}: must be a multiple of 8 up to 512"
    if problem.nondeterministic:
        return "tpu: 'pallas_unordered' needs a Hopper GPU"
    return None
