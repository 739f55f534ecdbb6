"""Code shared by the Hopper and Ampere kernels, and checks for calls that neither supports.

memory       slots of shared memory, registers    schedule   assignment of work to programs
scores       scores, mask and dropout of a tile, and their gradients
decode_rows  inputs of the decode kernels, and the sum of their parts
bias         the sum for the gradient of a bias
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from transformer_jax.kernels import Target
from transformer_jax.kernels.contract import Shaped

BROKEN_CUDA = range(12080, 12100)  # ptxas up to 12.9.0 miscompiles causal kernels (see jax)


@functools.cache
def cuda_version() -> int | None:
    """Return the CUDA version, such as 13020 for 13.2, or None without CUDA."""
    try:  # jax has no public name for it
        from jax._src.lib import cuda_versions
    except ImportError:
        return None
    return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()


def refuse(target: Target, backend: str, query: Shaped, key: Shaped, value: Shaped) -> str | None:
    """Return the reason why no kernel in a backend supports these arrays or structs, or None."""
    if not target.interpret and cuda_version() in BROKEN_CUDA:
        return (
            "CUDA 12.8.0 to 12.9.0 miscompiles causal kernels, and version "
            f"{cuda_version()} may be affected, because 12.9.1 also reports 12.9.0; install CUDA 13"
        )
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the {backend} kernel supports only bfloat16 and float16, not {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return f"query {query.dtype}, key {key.dtype} and value {value.dtype} differ in dtype"
    return None
