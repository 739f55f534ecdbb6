"""Hold what the kernels of Hopper and of Ampere share, and refuse what none of them can do.

memory       slots of shared memory, registers    schedule   which program computes what
scores       a tile's scores, mask, dropout, and their gradients
decode_rows  keys and values as few queries read them, and their parts added up
bias         what the gradient of a bias sums
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from transformer_jax.kernels import Target
from transformer_jax.kernels.contract import Shaped

BROKEN_CUDA = range(12080, 12100)  # up to 12.9.0 ptxas breaks causal kernels, as jax says


@functools.cache
def cuda_version() -> int | None:
    """Return CUDA's version, 13020 for 13.2, or None without it."""
    try:  # jax has no public name for it
        from jax._src.lib import cuda_versions
    except ImportError:
        return None
    return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()


def refuse(where: Target, backend: str, query: Shaped, key: Shaped, value: Shaped) -> str | None:
    """Return why no kernel of a backend takes these arrays, or structs of them, or None."""
    if not where.interpret and cuda_version() in BROKEN_CUDA:
        return (
            f"CUDA 12.8.0 to 12.9.0 compiles causal kernels wrongly, and version {cuda_version()} "
            "may be one of them, as 12.9.1 has the number of 12.9.0: install CUDA 13"
        )
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the {backend} kernel multiplies bfloat16 or float16, not {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return f"query {query.dtype}, key {key.dtype} and value {value.dtype} differ in dtype"
    return None
