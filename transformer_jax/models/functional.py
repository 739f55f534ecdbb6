"""Compute norms, activations, dropout, projections and look-ups as pure functions of arrays."""

from __future__ import annotations

import math
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp

from transformer_jax.checks import check_key
from transformer_jax.config import Activation
from transformer_jax.config.fields import fail, nearest
from transformer_jax.kernels import platform
from transformer_jax.kernels.cpu import norms, products
from transformer_jax.kernels.dropout import exact_rate, threshold
from transformer_jax.sharding import by_compiler, gathered, split
from transformer_jax.tracing import known_sizes

F32 = jnp.float32


def layer_norm(
    x: jax.Array,  # [..., D]
    scale: jax.Array | None,  # [D]
    bias: jax.Array | None,  # [D]
    eps: float = 1e-5,
) -> jax.Array:
    """Return (x - mean) / sqrt(var + eps) * scale + bias over the last axis (Ba et al. 2016).

    Computed in f32, returned in the dtype of x.
    """
    return by_compiler(partial(_normalise, eps, True), [x, scale, bias], split(x))


def rms_norm(
    x: jax.Array,  # [..., D]
    scale: jax.Array | None,  # [D]
    eps: float = 1e-5,
) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang & Sennrich 2019).

    Computed in f32, returned in the dtype of x.
    """
    return by_compiler(partial(_normalise, eps, False), [x, scale, None], split(x))


def _normalise(
    eps: float, centred: bool, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    """Normalise in XLA, or few rows by the compiled kernel."""

    def plain(y: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
        if centred:
            y = y - y.mean(axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + eps)
        return _affine(y, scale, bias)

    y = x.astype(jnp.float32)
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    if norms.takes(rows, width, eps, scale, bias):
        y = y.reshape(rows, width)
        y = norms.norm(y, scale, bias, eps, centred=centred, elsewhere=plain).reshape(x.shape)
    else:
        y = plain(y, scale, bias)
    return y.astype(x.dtype)


def _affine(y: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    lead = (1,) * (y.ndim - 1)
    if scale is not None:
        y = y * scale.reshape(*lead, -1).astype(y.dtype)
    if bias is not None:
        y = y + bias.reshape(*lead, -1).astype(y.dtype)
    return y


def activate(x: jax.Array, name: Activation) -> jax.Array:
    """Apply relu, silu, gelu x Phi(x), or GPT-2's gelu_tanh (Hendrycks & Gimpel 2016)."""
    match name:
        case "relu":
            return jax.nn.relu(x)
        case "silu":
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
    names = get_args(Activation)
    fail("activation", name, f"must be one of {', '.join(names)}{nearest(name, names)}")


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Return x / (1 - rate) where kept, else 0; x itself without a key (Srivastava et al. 2014)."""
    rate = exact_rate(rate)
    if key is None or rate == 0.0:
        return x

    def drop(x: jax.Array, key: jax.Array) -> jax.Array:
        # 32 bits: a float32 has 23, too few for rates near 0 and 1
        keep = ~jax.random.bits(key, x.shape, jnp.uint32) >= jnp.uint32(threshold(rate))
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))

    return by_compiler(drop, [x, key], split(x))


def split_key(key: jax.Array | None, parts: int) -> list[jax.Array | None]:
    """Split a key into `parts`; None into as many times None."""
    if key is None:
        return [None] * parts
    check_key("key", key)
    return list(jax.random.split(key, parts))


def held(weights: jax.Array, rows: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return weights in a dtype; or in bfloat16, if they are, and so few rows are multiplied so."""
    if weights.dtype == jnp.bfloat16 and products.takes(rows, dtype, weights):
        return weights
    return weights.astype(dtype)


def project(
    x: jax.Array,  # [..., *inputs]
    kernel: jax.Array,  # [*inputs, *outputs]
    bias: jax.Array | None = None,  # [*outputs]
    contract: int = 1,
) -> jax.Array:  # [..., *outputs]
    """Return x W + b over the last `contract` axes of x.

    One product of two matrices: over a batch of them, XLA's CPU backend computes the gradient of W
    from a transposed copy, which takes a third of a training step. There, from wide to narrow, it
    is the product with a W^T that XLA may not fold away: then the gradient of W is g^T x, which
    has the narrow matrix first and takes two thirds of the time of x^T g. With few rows, as in
    decoding, the copy would cost more than the product.

    Few rows, there, are left to the compiled kernel, which reads W once, one in bfloat16 too beside
    an x in float32. Without it one row is 8 products side by side and their sum: W is read at the
    memory's rate, where one product uses a core and a half.
    """
    lead = slice(x.ndim - contract)
    result = split(x, lead, split(kernel, slice(contract, None)))
    arrays = [x, gathered(kernel, x, lead), gathered(bias, x, lead)]
    return by_compiler(partial(_project, contract), arrays, result)


def _project(contract: int, x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    lead, outputs = x.shape[: x.ndim - contract], kernel.shape[contract:]
    inputs, width, rows = math.prod(kernel.shape[:contract]), math.prod(outputs), math.prod(lead)
    x, kernel = x.reshape(rows, inputs), kernel.reshape(inputs, width)
    on_cpu = platform() == "cpu"
    if products.takes(rows, x.dtype, kernel):
        y = products.product(x, kernel, bias=None if bias is None else bias.reshape(width))
        return y.astype(x.dtype).reshape(*lead, *outputs)
    if on_cpu and known_sizes(rows) and rows >= inputs > width:
        across = jax.lax.optimization_barrier(kernel.T)
        y = jax.lax.dot_general(x, across, (((1,), (1,)), ((), ())))
    elif on_cpu and rows == 1 and inputs % 8 == 0 and x.dtype == jnp.float32:
        y = jnp.einsum("PI,PIO->PO", x.reshape(8, -1), kernel.reshape(8, -1, width))
        y = y.sum(axis=0, keepdims=True)
    else:
        y = x @ kernel
    if bias is not None:
        y = y + bias.reshape(1, -1)
    return y.reshape(*lead, *outputs)


def against(
    x: jax.Array,  # [B, T, D]
    table: jax.Array,  # [V, D]
    bias: jax.Array | None,  # [V]
) -> jax.Array:  # f32[B, T, V]
    """Return x E^T + b, with sums in f32.

    On a CPU a few rows are left to the compiled kernel; without it they are taken as (E x^T)^T,
    which XLA may not turn back: E, the large one, is then read as it lies: up to half as fast again
    (benchmarks/NOTES.md).
    """
    rows = x.reshape(math.prod(x.shape[:2]), x.shape[2])
    few = known_sizes(rows.shape[0]) and 1 < rows.shape[0] <= 16
    if products.takes(rows.shape[0], x.dtype, table):
        y = products.product(rows, table, bias=bias, turned=True)
        return y.reshape(*x.shape[:2], len(table))
    if few and platform() == "cpu":
        y = jnp.einsum("VD,XD->VX", table, rows, preferred_element_type=F32)
        y = jax.lax.optimization_barrier(y).T
    else:
        y = jnp.einsum("XD,VD->XV", rows, table, preferred_element_type=F32)
    y = y.reshape(*x.shape[:2], len(table))
    return y if bias is None else y + bias[None, None]


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:  # [V, D], i32[...] -> [..., D]
    """Look up rows of a table; an id outside it gives NaN, never another row."""
    if ids.dtype.itemsize < 4:  # too narrow, perhaps, for the table's length
        ids = ids.astype(jnp.int32)
    ids = jnp.where(ids < 0, table.shape[0], ids)
    return by_compiler(_take, [gathered(table, ids, slice(None)), ids], split(ids))


def _take(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="fill")
