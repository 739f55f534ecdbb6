"""Compute attention tile by tile in plain JAX, with memory O(T + S) forwards and backwards.

`core` holds the two passes, `tiles` the walk over tiles, `bias` the bias of a tile, `sharding` how
a mesh of devices shares the work. The fused kernels of GPUs and TPUs are in `kernels`.
"""

from transformer_jax.attention.blockwise.core import Blockwise

__all__ = ["Blockwise"]
