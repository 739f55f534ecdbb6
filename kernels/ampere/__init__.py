"""Flash attention in Pallas on Mosaic GPU, for NVIDIA GPUs with `mma.sync` (Ampere and later).

The kernels do not use features that are specific to Hopper (wgmma, TMA), so the same source serves
compute capabilities 8 (Ampere, Ada), 10 and 12 (Blackwell). They follow FlashAttention-2 (Dao
2023). Each program has four warps and computes 64 rows. It copies the tiles of the other side, one
at a time, through registers into shared memory. Scores are in base 2, with the same register layout
as on Hopper.

    tiles      shared memory, registers, copies, products
    forward    the forward kernel          backward   the kernels for dq, for dk and dv, for a bias
    decode     the kernel for few queries
"""

from __future__ import annotations

import jax

from transformer_jax.kernels import Target, nvidia
from transformer_jax.kernels.ampere.backward import backward_bias, backward_dkdv, backward_dq
from transformer_jax.kernels.ampere.decode import decode
from transformer_jax.kernels.ampere.forward import forward
from transformer_jax.kernels.ampere.tiles import HAS_MMA
from transformer_jax.kernels.chips import AMPERE_HEAD_DIMS as HEAD_DIMS
from transformer_jax.kernels.chips import ampere_blocks as blocks
from transformer_jax.kernels.contract import Backend, Shaped
from transformer_jax.kernels.nvidia.memory import HAS_INTERPRETER, ROWS
from transformer_jax.kernels.nvidia.schedule import prepare


def refuse(
    target: Target, nondeterministic: bool, query: Shaped, key: Shaped, value: Shaped
) -> str | None:
    """Return the reason why these arrays, or their structs, are not supported, or None."""
    H, Hv = query.shape[-1], value.shape[-1]
    if reason := nvidia.refuse(target, "Ampere", query, key, value):
        return reason
    if H not in HEAD_DIMS or Hv not in HEAD_DIMS:
        return f"head dims are {H} (query, key) and {Hv} (value): both must be in {HEAD_DIMS}"
    if nondeterministic:
        return "ampere: 'pallas_unordered' needs a Hopper GPU"
    if not HAS_MMA:
        return f"ampere: Pallas has no mma in jax {jax.__version__}; use jax 0.11.2 or 0.12"
    if target.interpret and not HAS_INTERPRETER:
        return f"the Mosaic GPU interpreter needs jax 0.12, but this is {jax.__version__}"
    return None


BACKEND = Backend(
    kernels={
        "forward": forward,
        "decode": decode,
        "dq": backward_dq,
        "dkdv": backward_dkdv,
        "bias": backward_bias,
    },
    refuse=refuse,
    blocks=blocks,
    prepare=prepare,
    decode_rows=ROWS,
    int8=True,
    page=ROWS,  # pages contain whole tiles
    wide=True,
    narrow=True,
    packs=True,
)
