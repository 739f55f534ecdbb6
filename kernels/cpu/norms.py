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
from transformer_jax.kernels.cpu.products import MOST_ROWS, fixed_product, fixed_sum, only_here
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
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    call = jax.ffi.ffi_call("transformer_jax_row_norm", result, vmap_method="sequential")
    return vary((call(x, scale, bias, eps=np.float32(eps), centred=centred),), (x, scale, bias))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fixed_norm(
    eps: float, centred: bool, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> jax.Array:
    """Return the norm of f32[rows, D] with a scale and a bias [D], in the same bits for any rows.

    The sums of the gradients are products in a fixed order. See `products.fixed_product`.
    """
    return only_here(partial(_native, eps, centred), (x, scale, bias))


def _fixed_norm_forward(
    eps: float, centred: bool, *arrays: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return fixed_norm(eps, centred, *arrays), arrays


def _fixed_norm_backward(
    eps: float, centred: bool, arrays: tuple[jax.Array, ...], dy: jax.Array
) -> tuple[jax.Array, ...]:
    x, scale, _ = arrays
    rows, width = x.shape

    def mean(x: jax.Array) -> jax.Array:
        return fixed_sum(x)[:, None] / width

    def over_rows(x: jax.Array) -> jax.Array:
        return fixed_product(jnp.ones((1, rows), jnp.float32), x)[0]

    x = x - mean(x) if centred else x
    factor = jax.lax.rsqrt(mean(x * x) + eps)
    x, dx = x * factor, dy * scale[None]
    dx = dx - mean(dx) if centred else dx
    return factor * (dx - x * mean(dx * x)), over_rows(dy * x), over_rows(dy)


fixed_norm.defvjp(_fixed_norm_forward, _fixed_norm_backward)
