"""Attention tile by tile in plain JAX, with memory O(T + S) forward and backward.

`core` contains the two passes and splits them over devices, `tiles` the layout of the tiles, and
`bias` the bias of a tile. The fused kernels for GPUs and TPUs are in `kernels`.
"""

from transformer_jax.attention.blockwise.core import Blockwise

__all__ = ["Blockwise"]
