"""Products with a kernel that has low-rank adapters: x W + s (x A) B.

W + s A B is never computed, so no kernel is stored twice, and the gradient of W is computed only on
request. Each row of a batch can use a different adapter.
"""

from __future__ import annotations

import math
import zlib

import jax
import jax.numpy as jnp

from transformer_jax.models.functional import dropout
from transformer_jax.models.ops import project
from transformer_jax.models.quantized import QuantizedKernel, quantized_project
from transformer_jax.sharding import by_compiler, split
from transformer_jax.values import value_class


@value_class(
    kw_only=True, arrays=("base", "a", "b", "rows"), static=("scale", "dropout"), exportable=True
)
class AdaptedKernel:
    """Kernel with its adapters, which replaces the plain kernel in a model's parameters.

    In a scanned stack, all arrays have a leading axis L.
    """

    base: jax.Array | QuantizedKernel  # [*inputs, *outputs]
    a: jax.Array  # f32[inputs, r], or f32[n, inputs, r] for n adapters
    b: jax.Array  # f32[r, outputs], or f32[n, r, outputs]
    rows: jax.Array | None = None  # i32[B], the adapter for each batch row; -1 means none
    scale: float
    dropout: float = 0.0
    """Dropout rate for the input of A."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return tuple(self.base.shape)


def product(
    x: jax.Array,  # [..., *inputs]
    kernel: jax.Array | QuantizedKernel | AdaptedKernel,  # [*inputs, *outputs]
    bias: jax.Array | None,  # [*outputs]
    contract: int,
    key: jax.Array | None,
    name: str,
    *,
    invariant: bool = False,
) -> jax.Array:  # [..., *outputs]
    """Return x W + b over the last `contract` axes of x, in the dtype of x.

    An adapted kernel adds s (drop(x) A) B. Passing a key turns dropout on. The dropout bits also
    depend on `name`. If `invariant` is true, a row has the same bits for any other rows.
    """
    if isinstance(kernel, QuantizedKernel):
        return quantized_project(x, kernel, bias, contract, invariant=invariant)
    if not isinstance(kernel, AdaptedKernel):
        return project(x, kernel, bias, contract, invariant=invariant)
    y = product(x, kernel.base, bias, contract, None, name, invariant=invariant)
    if key is not None and kernel.dropout:
        # modules that share a key must draw different bits; `hash` would differ between processes
        key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        x = dropout(x, kernel.dropout, key)
    rows = kernel.rows
    if rows is not None and rows.shape != x.shape[:1]:
        rule = f"must have one entry for each of the {x.shape[0]} rows of the batch"
        raise ValueError(f"rows has shape {list(rows.shape)}: {rule}")
    if invariant and rows is not None:
        raise NotImplementedError(
            "invariant=True does not support adapters by row: use one adapter"
        )
    contracted, outputs = x.shape[x.ndim - contract :], kernel.shape[contract:]

    def low_rank(
        x: jax.Array, a: jax.Array, b: jax.Array, rows: jax.Array | None
    ) -> jax.Array:  # [..., *outputs]
        x = x.reshape(*x.shape[: x.ndim - contract], math.prod(contracted))
        if rows is None:
            y = project(project(x, a, invariant=invariant), b, invariant=invariant)
        else:
            # -1 must not select the last adapter; "fill" returns NaN for an index past the last
            # adapter
            a, b = (jnp.take(part, jnp.maximum(rows, 0), axis=0, mode="fill") for part in (a, b))
            y = jnp.einsum("B...r,Bro->B...o", jnp.einsum("B...i,Bir->B...r", x, a), b)
            y = jnp.where(rows.reshape(-1, *(1,) * (y.ndim - 1)) < 0, 0, y)
        return y.reshape(*x.shape[:-1], *outputs)

    arrays = [x, kernel.a.astype(x.dtype), kernel.b.astype(x.dtype), rows]
    added = by_compiler(low_rank, arrays, split(y))
    return y + jnp.asarray(kernel.scale, y.dtype) * added
