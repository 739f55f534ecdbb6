"""Flash attention for TPUs, in Pallas for Mosaic, based on FlashAttention-2 (Dao 2023).

The scores of a tile have the layout [keys, queries]. As a result, per-query values (m, l, D and
positions) are a row along the lanes, as in memory. Sums over keys add whole registers, and the
products for keys need no transpose. Sums for queries have the layout [H, queries] and are
transposed once.

    visits     the tile lists, flattened
    grid       the iteration over them
    inputs     the input arrays of kernels
    scores     the arithmetic of a tile
    forward, decode, backward, backward_single_pass    the kernels
"""

from __future__ import annotations

import jax.numpy as jnp

from transformer_jax.kernels import Target
from transformer_jax.kernels.chips import TPU_LANES, TPU_LIST_BYTES
from transformer_jax.kernels.chips import tpu_blocks as blocks
from transformer_jax.kernels.contract import Backend, Shaped
from transformer_jax.kernels.tpu.backward import (
    backward_bias,
    backward_dkdv,
    backward_dq,
    backward_score,
)
from transformer_jax.kernels.tpu.backward_single_pass import backward_single_pass_rows, sums_fit
from transformer_jax.kernels.tpu.decode import decode
from transformer_jax.kernels.tpu.forward import forward
from transformer_jax.kernels.tpu.visits import prepare


def refuse(
    target: Target,
    nondeterministic: bool,
    query: Shaped,  # [B, T, N, H], an array or a struct of its shape and dtype
    key: Shaped,  # [B, S, K, H]
    value: Shaped,  # [B, S, K, Hv]
) -> str | None:
    """Return the reason why these arrays are not supported, or None."""
    dtypes = [jnp.dtype(x.dtype).name for x in (query, key, value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in ("float32", "bfloat16"):
        return f"dtypes are {', '.join(dtypes)}: must be equal, and float32 or bfloat16"
    for name, size in (("H", query.shape[-1]), ("Hv", value.shape[-1])):
        if size % 8 or not 0 < size <= 512:
            return f"{name} is {size}: must be a multiple of 8 up to 512"
    if nondeterministic:
        return "tpu: 'pallas_unordered' needs a Hopper GPU"
    return None


BACKEND = Backend(
    kernels={
        "forward": forward,
        "decode": decode,
        "dq": backward_dq,
        "dkdv": backward_dkdv,
        "bias": backward_bias,
        "score": backward_score,
        "single_pass_rows": backward_single_pass_rows,
    },
    refuse=refuse,
    blocks=blocks,
    prepare=prepare,
    sums_fit=sums_fit,
    list_bytes=TPU_LIST_BYTES,
    heads_first=True,
    score=True,
    wide=True,
    shortest=TPU_LANES,  # the minimum tile width
    decode_rows=64,
    int8=True,
    page=TPU_LANES,  # pages contain whole tiles
)
