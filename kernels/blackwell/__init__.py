"""Flash attention on NVIDIA datacentre Blackwell (tcgen05, TMEM), in Pallas on Mosaic GPU.

The kernels sum in tensor memory (TMEM), by the tensor cores of the fifth generation (tcgen05), of
compute capability 10. They are persistent and warp-specialised as on Hopper, whose copies, masks
and arithmetic of a tile are used: one warpgroup copies, one issues the products. In the forward
kernel two compute the softmax of 128 queries each, in turns, in the backward kernels two share the
columns of a tile (FlashAttention-4, Zadouri et al. 2026). The gradient of a bias, dk and dv of
the widest heads, and few queries are by the kernels of `transformer_jax.kernels.ampere`, which run
here, too.

    tiles      tensor memory, registers, warpgroups
    forward    the forward kernel          backward   those of dq, of dk and dv
"""

from __future__ import annotations

from typing import Any

from transformer_jax.kernels import ampere
from transformer_jax.kernels.ampere import DECODE_ROWS, INT8, PAGE, backward_bias, decode
from transformer_jax.kernels.blackwell.backward import backward_dkdv as marking_dkdv
from transformer_jax.kernels.blackwell.backward import backward_dq as marking_dq
from transformer_jax.kernels.blackwell.forward import forward as marking_forward
from transformer_jax.kernels.blackwell.tiles import HAS_TENSOR_MEMORY
from transformer_jax.kernels.chips import AMPERE_HEAD_DIMS as HEAD_DIMS
from transformer_jax.kernels.chips import blackwell_blocks as blocks
from transformer_jax.kernels.contract import Problem
from transformer_jax.kernels.hopper.schedule import prepare
from transformer_jax.kernels.repair import repaired_backward, repaired_forward

__all__ = [
    "DECODE_ROWS",
    "HEADS_FIRST",
    "HEAD_DIMS",
    "INT8",
    "LIST_BYTES",
    "MARKS",
    "PACKS",
    "PAGE",
    "PORTABLE",
    "SHORTEST",
    "backward_bias",
    "backward_dkdv",
    "backward_dq",
    "blocks",
    "decode",
    "forward",
    "prepare",
    "refuse",
]

HEADS_FIRST = False  # whether results come as [B, N, T, H], transposed
LIST_BYTES = None  # lists are in device memory
MARKS = True  # whether the forward kernel says for the others where something was not finite
PACKS = True  # few queries of several heads as rows of one tile
PORTABLE = None
SHORTEST = None  # short sequences are padded to whole tiles

forward = repaired_forward(ampere.varying(marking_forward))
backward_dq = repaired_backward(ampere.varying(marking_dq))
backward_dkdv = repaired_backward(ampere.varying(marking_dkdv))


def refuse(problem: Problem, query: Any, key: Any, value: Any) -> str | None:
    """Return why these arrays, or structs of their shape and dtype, can't be done here, or None."""
    has_both = HAS_TENSOR_MEMORY and ampere.HAS_MMA  # the gradient of a bias is by mma
    lacking = None if has_both else "lacks mma or tcgen05: 0.11.2 and 0.12 have both"
    return ampere.refuse_as("Blackwell", lacking, problem, query, key, value)
