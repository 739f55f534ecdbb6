"""Products of few rows with a weight matrix, for decoding on a CPU.

The compiled kernel (`source/products.h`) reads the weights once, in place, in float32, bfloat16,
int8 or 4 bits, and sums in float32. XLA's CPU backend requires weights in the dtype of x, and is
slower for several rows. XLA computes the product if the kernel cannot run, which is the case in
exported programs, on several devices, and under gradients or `vmap`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.kernels import platform
from transformer_jax.kernels.cpu import library
from transformer_jax.kernels.lowering import here_or_elsewhere
from transformer_jax.kernels.sharding import vary

MOST_ROWS = 16
"""Maximum number of rows. For more rows, XLA's matrix products reuse weights in caches."""
SMALLEST = 2**14
"""Minimum matrix size. For smaller matrices, XLA fuses the product with neighboring operations."""
DTYPES = "float32", "bfloat16", "int8"
WORD = 8
"""Number of 4-bit weights in a word: consecutive inputs of one output."""
_SHIFTS = np.array([0, 8, 16, 24, 4, 12, 20, 28], np.uint32)
"""Position of each input's weight in a word. Each half of a byte is then four consecutive inputs,
as the processor's integer products require."""


def pack_words(values: jax.Array) -> jax.Array:
    """Pack integers of -8..7 [..., inputs, outputs] into words u32[..., inputs / 8, outputs].

    The number of words is rounded up. 8 is added to each integer.
    """
    *lead, inputs, outputs = values.shape
    values = jnp.pad(values, [*[(0, 0)] * len(lead), (0, -inputs % WORD), (0, 0)])
    values = values.reshape(*lead, values.shape[-2] // WORD, WORD, outputs)
    shifted = (values + 8).astype(jnp.uint32) << _shifts(values.ndim)
    return shifted.sum(axis=-2, dtype=jnp.uint32)


def dequantize_words(words: jax.Array, scale: jax.Array, inputs: int) -> jax.Array:
    """Return the weights f32[..., inputs, outputs] of packed words and scale[..., groups, outputs].

    Each scale applies to a group of consecutive inputs.
    """
    *lead, groups, outputs = scale.shape
    values = (words[..., None, :] >> _shifts(words.ndim + 1) & 15).astype(jnp.int32) - 8
    values = values.reshape(*lead, words.shape[-2] * WORD, outputs)[..., :inputs, :]
    grouped = values.reshape(*lead, groups, inputs // groups, outputs).astype(jnp.float32)
    weights = grouped * scale[..., None, :].astype(jnp.float32)
    return weights.reshape(*lead, inputs, outputs)


def _shifts(ndim: int) -> np.ndarray:
    return _SHIFTS.reshape((1,) * (ndim - 2) + (WORD, 1))


def takes(rows: int, dtype: jax.typing.DTypeLike, weights: jax.Array) -> bool:
    """Whether to use `product` for these rows and this dtype on this platform."""
    size = weights.size * (WORD if weights.dtype == jnp.uint32 else 1)
    return (
        # the number of rows is symbolic in some exports
        isinstance(rows, int)
        and 1 <= rows <= MOST_ROWS
        and size >= SMALLEST
        and jnp.dtype(dtype).name in ("float32", "bfloat16")
        and jnp.dtype(weights.dtype).name in (*DTYPES, "uint32")
        and platform() == "cpu"
        and not isinstance(library(), str)
    )


def product(
    x: jax.Array,  # [rows, inputs]
    weights: jax.Array,  # [inputs, outputs]; transposed: [outputs, inputs]; 4 bits: see below
    *,
    scale: jax.Array | None = None,  # [outputs]; with words: [groups, outputs]
    bias: jax.Array | None = None,  # [outputs]
    turned: bool = False,
) -> jax.Array:  # f32[rows, outputs]
    """Return scale x W + bias with sums in float32, or scale x W^T + bias if `turned` is true.

    4-bit weights are words u32[inputs / 8, outputs] (see `pack_words`) with scales in float32 or
    float16. They cannot be transposed, and several groups must have a multiple of 32 inputs.

    Raises ValueError if the sizes of x, W, scale and bias do not match.
    """
    if weights.dtype == jnp.uint32:
        _check_words(x.shape[1], weights, scale, bias)
    else:
        _check(x.shape[1], weights, turned, scale=scale, bias=bias)
        scale = None if scale is None else scale.astype(jnp.float32)
    none = jnp.zeros((0,), jnp.float32)
    bias = none if bias is None else bias.astype(jnp.float32)
    tree = x.astype(jnp.float32), weights, none if scale is None else scale, bias
    here, elsewhere = partial(_native, turned), partial(_portable, turned)
    if isinstance(library(), str):
        return elsewhere(*tree)[0]
    return here_or_elsewhere(here, elsewhere, tree, single_device=True)[0]


def _check(inputs: int, weights: jax.Array, turned: bool, **more: jax.Array | None) -> None:
    # the kernel reads as many numbers as the weights have inputs
    wanted, outputs = weights.shape[::-1] if turned else weights.shape
    if inputs != wanted:
        raise ValueError(f"x has {inputs} inputs: must have {wanted}, like the weights")
    for name, one in more.items():
        if one is not None and one.shape != (outputs,):
            raise ValueError(f"{name} has shape {list(one.shape)}: must be [{outputs}]")


def _check_words(
    inputs: int, words: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> None:
    rows, outputs = words.shape
    if -(-inputs // WORD) != rows:
        raise ValueError(
            f"x has {inputs} inputs: {rows} words have from {8 * rows - 7} to {8 * rows}"
        )
    if scale is None or scale.ndim != 2 or scale.shape[1] != outputs:
        shape = None if scale is None else list(scale.shape)
        raise ValueError(f"scale has shape {shape}: must be [groups, {outputs}]")
    groups = scale.shape[0]
    if groups != 1 and (not groups or inputs % (32 * groups)):
        rule = "must be 1, or divide the inputs into groups of a multiple of 32"
        raise ValueError(f"scale has {groups} groups for {inputs} inputs: the number {rule}")
    if scale.dtype not in (jnp.float32, jnp.float16):
        raise ValueError(f"scale is {scale.dtype}: must be float32 or float16")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"bias has shape {list(bias.shape)}: must be [{outputs}]")


def _native(
    turned: bool, x: jax.Array, weights: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array]:
    outputs = weights.shape[0 if turned else 1]
    result = jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32)
    call = jax.ffi.ffi_call("transformer_jax_weight_product", result)
    arrays = x, weights, scale, bias
    return vary((call(*arrays, turned=turned, x_turned=False, fixed=False),), arrays)


def _portable(
    turned: bool, x: jax.Array, weights: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array]:
    axes = ((1,), (1 if turned else 0,)), ((), ())
    if weights.dtype == jnp.uint32:
        y = x @ dequantize_words(weights, scale, x.shape[1])
    else:
        y = jax.lax.dot_general(x, weights.astype(jnp.float32), axes)
        y = y * scale[None] if scale.size else y
    return (y + bias[None] if bias.size else y,)


# Sums in a fixed order


def fixed_product(
    x: jax.Array,  # [rows, inputs]; x_turned: [inputs, rows]
    weights: jax.Array,  # [inputs, outputs]; turned: [outputs, inputs]
    *,
    bias: jax.Array | None = None,  # [outputs]
    turned: bool = False,
    x_turned: bool = False,
) -> jax.Array:  # f32[rows, outputs]
    """Return x W + bias, where each sum is in the order of the inputs.

    A sum is fma(x[k], w[k], sum) for k = 0, 1, ..., in float32. Therefore, a row of the result has
    the same bits for any other rows, any number of rows and any number of threads. The gradients
    are products of the same kind.

    Raises:
        ValueError: if the sizes of x, W and bias do not match.
        NotImplementedError: if x is float64, if the compiled kernels are missing, or, when the
            program is lowered, if it is exported or runs on several devices.
    """
    _check(x.shape[0 if x_turned else 1], weights, turned, bias=bias)
    if x.dtype == jnp.float64:
        raise NotImplementedError("invariant=True computes in float32, but x is float64")
    if jnp.dtype(weights.dtype).name not in DTYPES:
        weights = weights.astype(jnp.float32)
    bias = jnp.zeros((0,), jnp.float32) if bias is None else bias.astype(jnp.float32)
    return _fixed(turned, x_turned, x.astype(jnp.float32), weights, bias)


def fixed_sum(x: jax.Array) -> jax.Array:  # f32[..., inputs] -> f32[...]
    """Return the sum over the last axis, in an order that depends only on its length.

    Numbers are added as in `fixed_product`, within parts of 256, and then the sums of the parts.
    """
    *lead, width = x.shape
    if width > 256:  # one sum of all numbers would lose up to `width` times the rounding error
        parts = jnp.pad(x, [*[(0, 0)] * len(lead), (0, -width % 256)])
        return fixed_sum(fixed_sum(parts.reshape(*lead, parts.shape[-1] // 256, 256)))
    rows = x.reshape(math.prod(lead), width)
    return fixed_product(rows, jnp.ones((width, 1), jnp.float32)).reshape(lead)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fixed(
    turned: bool,
    x_turned: bool,
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    rows, outputs = x.shape[1 if x_turned else 0], weights.shape[0 if turned else 1]
    call = jax.ffi.ffi_call(
        "transformer_jax_weight_product",
        jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        vmap_method="sequential",
    )
    arrays = x, weights, jnp.zeros((0,), jnp.float32), bias

    def here(*arrays: jax.Array) -> tuple[jax.Array]:
        return vary((call(*arrays, turned=turned, x_turned=x_turned, fixed=True),), arrays)

    return only_here(here, arrays)


def only_here(here: Callable[..., tuple[jax.Array]], arrays: tuple[jax.Array, ...]) -> jax.Array:
    """Return the result of `here(*arrays)`, which no other function can replace."""
    if isinstance(reason := library(), str):
        raise NotImplementedError(f"invariant=True needs the compiled kernels: {reason}")
    how = dict(single_device=True, mapped=True)
    return here_or_elsewhere(here, refuse_elsewhere, arrays, **how)[0]


def refuse_elsewhere(*_: object) -> NoReturn:
    """Raise NotImplementedError for a program that cannot call the compiled kernels."""
    rule = "needs a program for a single CPU device that is not exported"
    raise NotImplementedError(f"invariant=True {rule}")


def _fixed_forward(
    turned: bool, x_turned: bool, *arrays: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _fixed(turned, x_turned, *arrays), arrays


def _fixed_backward(
    turned: bool, x_turned: bool, arrays: tuple[jax.Array, ...], dy: jax.Array
) -> tuple[jax.Array | None, ...]:
    x, weights, bias = arrays
    db = None
    if bias.size:
        db = fixed_product(jnp.ones((1, dy.shape[0]), jnp.float32), dy)[0]
    if x_turned:
        dx = fixed_product(weights.astype(jnp.float32), dy, x_turned=turned, turned=True)
        first, second = (dy, x) if turned else (x, dy)
        dw = fixed_product(first, second, x_turned=turned, turned=turned)
    else:
        dx = fixed_product(dy, weights, turned=not turned)
        first, second = (dy, x) if turned else (x, dy)
        dw = fixed_product(first, second, x_turned=True)
    whole = jnp.issubdtype(weights.dtype, jnp.integer)
    return dx, None if whole else dw.astype(weights.dtype), db


_fixed.defvjp(_fixed_forward, _fixed_backward)
