"""LayerNorm and RMSNorm for few rows in a single call, for decoding on a CPU.

XLA's CPU backend compiles a LayerNorm to six operations. The overhead of each exceeds the cost of
computing a row of 768 elements. XLA computes the norm if the compiled kernel (`source/norms.h`)
cannot run, which is the case in exported programs, on several devices, and under gradients or
`vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.kernels import platform
from transformer_jax.kernels.cpu import library
from transformer_jax.kernels.cpu.products import MOST_ROWS
from transformer_jax.kernels.lowering import here_or_elsewhere
from transformer_jax.kernels.sharding import vary

SMALLEST = 128
"""Minimum row length. For shorter rows, XLA fuses the norm with neighboring operations."""


def takes(rows: int, width: int, eps: float | jax.Array, *parameters: jax.Array | None) -> bool:
    """Whether to use `norm` for these rows and parameters on this platform."""
    return (
        not isinstance(eps, jax.core.Tracer)
        and all(one is None or one.shape == (width,) for one in parameters)
        # the number of rows is symbolic in some exports
        and isinstance(rows, int)
        and 1 <= rows <= MOST_ROWS
        and width >= SMALLEST
        and platform() == "cpu"
        and not isinstance(library(), str)
    )


def norm(
    x: jax.Array,  # f32[rows, D]
    scale: jax.Array | None,  # [D]
    bias: jax.Array | None,  # [D]
    eps: float,
    *,
    centred: bool,
    elsewhere: Callable[..., jax.Array],
) -> jax.Array:  # f32[rows, D]
    """Return (x - mean) / sqrt(var + eps) * scale + bias for each row.

    The mean is 0 unless `centred` is true. `elsewhere(x, scale, bias)` computes the same result in
    JAX, for programs that cannot call the kernel.
    """
    here = partial(_native, eps, centred)
    plain = lambda *arrays: (elsewhere(*arrays),)  # noqa: E731
    return here_or_elsewhere(here, plain, (x, scale, bias), single_device=True)[0]


def _native(
    eps: float, centred: bool, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array]:
    none = jnp.zeros((0,), jnp.float32)
    scale, bias = (none if one is None else one.astype(jnp.float32) for one in (scale, bias))
    call = jax.ffi.ffi_call("transformer_jax_row_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return vary((call(x, scale, bias, eps=np.float32(eps), centred=centred),), (x, scale, bias))
