"""Norms, products, table lookups and argmax, each in the fastest form for the platform.

On a mesh with explicit axes, a function calls itself through `by_compiler`, which makes no axis
explicit. The result is sharded like its rows. On a CPU, the compiled kernels are used for up to 16
rows, as in decoding. Products that are slow in XLA's CPU backend are rewritten, which changes only
the order of summation.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from transformer_jax.checks import check_array
from transformer_jax.kernels import platform
from transformer_jax.kernels.cpu import norms, products
from transformer_jax.sharding import by_compiler, explicit_mesh, gathered, split
from transformer_jax.tracing import are_concrete

F32 = jnp.float32


def layer_norm(
    x: jax.Array,  # [..., D]
    scale: jax.Array | None = None,  # [D]
    bias: jax.Array | None = None,  # [D]
    eps: float = 1e-5,
    *,
    invariant: bool = False,
) -> jax.Array:
    """Return (x - mean) / sqrt(var + eps) * scale + bias over the last axis (Ba et al. 2016).

    The result is computed in f32 and returned in the dtype of x. `scale` and `bias` may also be
    scalars.

    Args:
        x: array of any floating-point dtype.
        scale: factor for the normalized values; None means 1.
        bias: array added to the result; None means 0.
        eps: number added to the variance.
        invariant: whether a row has the same bits for any other rows.

    Raises:
        ValueError: If the shapes do not match.
    """
    _check_norm(x, scale=scale, bias=bias)
    return norm(x, scale, bias, eps, centred=True, invariant=invariant)


def rms_norm(
    x: jax.Array,  # [..., D]
    scale: jax.Array | None = None,  # [D]
    eps: float = 1e-5,
    *,
    invariant: bool = False,
) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang & Sennrich 2019).

    The result is computed in f32 and returned in the dtype of x. `scale` may also be a scalar.

    Args:
        x: array of any floating-point dtype.
        scale: factor for the normalized values; None means 1.
        eps: number added to the mean square.
        invariant: whether a row has the same bits for any other rows.

    Raises:
        ValueError: If the shapes do not match.
    """
    _check_norm(x, scale=scale)
    return norm(x, scale, None, eps, centred=False, invariant=invariant)


def _check_norm(x: jax.Array, **parameters: jax.Array | None) -> None:
    check_array("x", x, "[..., D]")
    for name, value in parameters.items():
        if value is None:
            continue
        check_array(name, value, "[D]")
        if value.shape not in (x.shape[-1:], (1,), ()):
            rule = f"must be {x.shape[-1:]}, [D] of x, or a scalar"
            raise ValueError(f"{name} has shape {value.shape}: {rule}")


def norm(
    x: jax.Array,  # [..., D]
    scale: jax.Array | None,  # [D]
    bias: jax.Array | None,  # [D]
    eps: float,
    *,
    centred: bool,
    invariant: bool = False,
    native: bool = True,
) -> jax.Array:
    """Return `layer_norm` if `centred` is true, and otherwise `rms_norm`, without checks."""
    y, rows, width = x.astype(F32), math.prod(x.shape[:-1]), x.shape[-1]
    if invariant:
        _refuse_split_lengths(x)
        pair = 1.0 if scale is None else scale, 0.0 if bias is None else bias
        more = (jnp.broadcast_to(jnp.asarray(one, F32), (width,)) for one in pair)
        y = norms.fixed_norm(eps, centred, y.reshape(rows, width), *more)
        return y.reshape(x.shape).astype(x.dtype)
    if explicit_mesh(x, scale, bias) is not None:
        one = partial(norm, eps=eps, centred=centred)
        return by_compiler(one, [x, scale, bias], split(x))
    if native and norms.takes(rows, width, eps, scale, bias):
        elsewhere = partial(norm, eps=eps, centred=centred, native=False)
        y = y.reshape(rows, width)
        y = norms.norm(y, scale, bias, eps, centred=centred, elsewhere=elsewhere)
        return y.reshape(x.shape).astype(x.dtype)
    # E[x^2] - E[x]^2 would lose all digits if the variance is small compared to the mean
    y = y - y.mean(axis=-1, keepdims=True) if centred else y
    y = y * jax.lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + eps)
    y = y if scale is None else y * scale.astype(F32).reshape(*(1,) * (y.ndim - 1), -1)
    y = y if bias is None else y + bias.astype(F32).reshape(*(1,) * (y.ndim - 1), -1)
    return y.astype(x.dtype)


def project(
    x: jax.Array,  # [..., *inputs]
    kernel: jax.Array,  # [*inputs, *outputs]
    bias: jax.Array | None = None,  # [*outputs]
    contract: int = 1,
    *,
    invariant: bool = False,
    flatten: bool = True,
) -> jax.Array:  # [..., *outputs]
    """Return x W + b over the last `contract` axes of x, in the dtype of x.

    If `invariant` is true, a row of the result has the same bits for any other rows.

    The operands are reshaped to matrices. On a CPU, the gradient of a batched product would make
    XLA copy the transpose of W, which takes a third of a training step.
    """
    lead, outputs = x.shape[: x.ndim - contract], kernel.shape[contract:]
    inputs, width, rows = math.prod(kernel.shape[:contract]), math.prod(outputs), math.prod(lead)
    if invariant:
        _refuse_split_lengths(x)
        if kernel.dtype != jnp.bfloat16:  # read as it is stored
            kernel = kernel.astype(x.dtype)
        flat, kernel = x.reshape(rows, inputs), kernel.reshape(inputs, width)
        y = products.fixed_product(flat, kernel, bias=None if bias is None else bias.reshape(width))
        return y.astype(x.dtype).reshape(*lead, *outputs)
    # the compiled kernel reads the stored bfloat16 values, which have half as many bytes
    if not (kernel.dtype == jnp.bfloat16 and products.takes(rows, x.dtype, kernel)):
        kernel = kernel.astype(x.dtype)
    if explicit_mesh(x, kernel, bias) is not None:
        axes = slice(len(lead))
        arrays = [x, gathered(kernel, x, axes), gathered(bias, x, axes)]
        result = split(x, axes, split(kernel, slice(contract, None)))
        flatten = not any(split(x, axes)[1:])
        return by_compiler(partial(project, contract=contract, flatten=flatten), arrays, result)
    if not flatten:  # a mesh splits two axes, and the compiler would gather one to join them
        y = jnp.tensordot(x, kernel, contract)
        return y if bias is None else y + bias.reshape(*(1,) * len(lead), *outputs)
    x, kernel = x.reshape(rows, inputs), kernel.reshape(inputs, width)
    on_cpu = platform() == "cpu"
    if products.takes(rows, x.dtype, kernel):
        y = products.product(x, kernel, bias=None if bias is None else bias.reshape(width))
        return y.astype(x.dtype).reshape(*lead, *outputs)
    if on_cpu and are_concrete(rows) and rows >= inputs > width:
        # Multiply by W^T, with a barrier so that XLA keeps the transpose. The gradient of W is then
        # g^T x, in which the narrow matrix comes first and which takes two thirds of the time of
        # x^T g.
        transposed = jax.lax.optimization_barrier(kernel.T)
        y = jax.lax.dot_general(x, transposed, (((1,), (1,)), ((), ())))
    elif on_cpu and rows == 1 and inputs % 8 == 0 and x.dtype == F32:
        # A sum of 8 parallel products reads W at memory bandwidth. A single product keeps only one
        # and a half cores busy.
        y = jnp.einsum("PI,PIO->PO", x.reshape(8, -1), kernel.reshape(8, -1, width))
        y = y.sum(axis=0, keepdims=True)
    else:
        y = x @ kernel
    if bias is not None:
        y = y + bias.reshape(1, -1)
    return y.reshape(*lead, *outputs)


def _refuse_split_lengths(x: jax.Array) -> None:
    if any(split(x)[1:]):
        rule = "a mesh may split only the rows of an invariant model"
        raise ValueError(f"the model's inputs are split as {split(x)}: {rule}")


def log_softmax(x: jax.Array, *, invariant: bool = False) -> jax.Array:  # [..., V] -> f32[..., V]
    """Return x - log sum exp x over the last axis, in f32.

    If `invariant` is true, a row of the result has the same bits for any other rows.
    """
    x = x.astype(F32)
    if not invariant:
        return jax.nn.log_softmax(x, axis=-1)
    # If exp is fused with a reduction, XLA's CPU backend computes it by another library for some
    # shapes (findings/xla_cpu_exp_by_shape.sh). A sum of one number is a call, so it is not fused.
    top = products.fixed_sum(jnp.max(x, axis=-1, keepdims=True))
    shifted = x - top[..., None]
    return shifted - jnp.log(products.fixed_sum(jnp.exp(shifted)))[..., None]


def logits(
    x: jax.Array,  # [B, T, D]
    table: jax.Array,  # [V, D]
    bias: jax.Array | None,  # [V]
    *,
    invariant: bool = False,
    flatten: bool = True,
) -> jax.Array:  # f32[B, T, V]
    """Return x E^T + b, accumulated in f32.

    If `invariant` is true, a row of the result has the same bits for any other rows.
    """
    rows = math.prod(x.shape[:2])
    if invariant:
        _refuse_split_lengths(x)
        if table.dtype != jnp.bfloat16:
            table = table.astype(x.dtype)
        y = products.fixed_product(x.reshape(rows, x.shape[2]), table, bias=bias, turned=True)
        return y.reshape(*x.shape[:2], len(table))
    if not (table.dtype == jnp.bfloat16 and products.takes(rows, x.dtype, table)):
        table = table.astype(x.dtype)
    if explicit_mesh(x, table, bias) is not None:
        arrays = [x, gathered(table, x, slice(2)), bias]
        flatten = split(x, slice(2))[1] is None
        result = split(x, slice(2), split(table, slice(1)))
        return by_compiler(partial(logits, flatten=flatten), arrays, result)
    if not flatten:
        y = jnp.einsum("BTD,VD->BTV", x, table, preferred_element_type=F32)
        return y if bias is None else y + bias[None, None]
    flat = x.reshape(rows, x.shape[2])
    if products.takes(rows, x.dtype, table):
        y = products.product(flat, table, bias=bias, turned=True)
        return y.reshape(*x.shape[:2], len(table))
    if are_concrete(rows) and 1 < rows <= 16 and platform() == "cpu":
        # compute (E x^T)^T, with a barrier so that XLA keeps this order, which reads the large
        # matrix E contiguously and is up to 1.5 times as fast (benchmarks/NOTES.md)
        y = jnp.einsum("VD,XD->VX", table, flat, preferred_element_type=F32)
        y = jax.lax.optimization_barrier(y).T
    else:
        y = jnp.einsum("XD,VD->XV", flat, table, preferred_element_type=F32)
    y = y.reshape(*x.shape[:2], len(table))
    return y if bias is None else y + bias[None, None]


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:  # [V, D], i32[...] -> [..., D]
    """Look up rows of a table. An ID out of range results in NaN, never in another row."""
    if ids.dtype.itemsize < 4:  # the length of the table may exceed the range of a narrow dtype
        ids = ids.astype(jnp.int32)
    # a negative index would count from the end, even in mode "fill"
    ids = jnp.where(ids < 0, table.shape[0], ids)
    if explicit_mesh(table, ids) is not None:
        return by_compiler(lookup, [gathered(table, ids, slice(None)), ids], split(ids))
    return jnp.take(table, ids, axis=0, mode="fill")


def argmax(
    x: jax.Array,  # f32[..., V]
    top: jax.Array,  # f32[...]: the maximum of each row
) -> jax.Array:  # [...]
    """Return the first index of the maximum in each row.

    If the maximum is not finite, the result is undefined. On a CPU, `jnp.argmax` takes ten times as
    long (0.2 ms for 50,000 values) as computing the minimum of the matching indices. The indices
    are float32, which is faster than integers and exact below 2^24.
    """
    if platform() != "cpu" or x.shape[-1] >= 2**24:
        return jnp.argmax(x, axis=-1)
    indices = jax.lax.broadcasted_iota(F32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(x == top[..., None], indices, jnp.inf), axis=-1)
