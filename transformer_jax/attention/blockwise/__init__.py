"""Compute attention tile by tile in plain JAX, with memory O(T + S) forwards and backwards.

`core` has the two passes and splits them over devices, `tiles` has the walk over tiles, `bias` the
bias of a tile. The fused kernels of GPUs and TPUs are in `kernels`.
"""

from transformer_jax.attention.blockwise.core import Blockwise

__all__ = ["Blockwise"]
