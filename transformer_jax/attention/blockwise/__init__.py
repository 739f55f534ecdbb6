"""Tile-by-tile attention in plain JAX, with O(T + S) memory in the forward and backward passes.

`core` contains the two passes and shards them over devices. `tiles` contains the layout of the
tiles, and `bias` contains the bias of a tile. The fused kernels for GPUs and TPUs are in `kernels`.
"""

from transformer_jax.attention.blockwise.core import Blockwise

__all__ = ["Blockwise"]
