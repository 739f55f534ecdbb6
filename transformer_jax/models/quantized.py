"""Kernels quantized to 8 or 4 bits, and products with these kernels.

The quantization is symmetric absmax quantization without a zero point: W' = scale q, with integer
q. An 8-bit kernel has one scale per output. A 4-bit kernel has one scale per output and group of
inputs. Unlike in LLM.int8 (Dettmers et al. 2022), outliers are not stored separately. Unlike in NF4
(Dettmers et al. 2023), levels are uniform.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import largest
from transformer_jax.config import ConfigError
from transformer_jax.config.keywords import known_keywords
from transformer_jax.kernels.cpu import products
from transformer_jax.models import ops
from transformer_jax.pytree import Parameter, Params, PyTree, cast_floats, kernel_axes
from transformer_jax.sharding import explicit_mesh
from transformer_jax.tracing import concrete_value
from transformer_jax.values import value_class

Kind = Literal["bf16", "int8", "int4"]

GROUP = 32
"""Number of inputs per scale in 4 bits. If it does not divide the inputs, all share one scale."""


@value_class(
    kw_only=True, arrays=("values", "scale"), static=("inputs", "outputs", "bits"), exportable=True
)
class QuantizedKernel:
    """Integer kernel with scales, which replaces a kernel in a model's parameters.

    Both arrays have a leading axis L in a scanned stack, and a leading axis E for experts.

    Attributes:
        values: i8[inputs, outputs] in 8 bits. In 4 bits, u32[inputs / 8, outputs], rounded up, with
            8 consecutive inputs of an output per word. 8 is added to each value. Byte i of a word
            contains inputs i and i + 4, with the first in the low half.
        scale: f32[groups, outputs], the scale of each group and output.
        inputs: sizes of the contracted axes, for example [N, Hv] for the output matrix of
            attention.
        outputs: sizes of the other axes.
        bits: number of bits per value, 8 or 4.
    """

    values: jax.Array
    scale: jax.Array
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return (*self.values.shape[:-2], *self.inputs, *self.outputs)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the kernel after dequantization."""
        return np.dtype(np.float32)

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the dequantized kernel W' = scale x values, computed in f32."""
        if self.bits == 4:
            inputs = math.prod(self.inputs)
            weights = products.dequantize_words(self.values, self.scale, inputs)
        else:
            weights = self.values.astype(jnp.float32) * self.scale
        return weights.astype(dtype).reshape(self.shape)


@value_class(kw_only=True, arrays=("values", "scale"), static=("bits",), exportable=True)
class QuantizedTable:
    """Table of vectors in 8 or 4 bits, which replaces a table in a model's parameters.

    Attributes:
        values: i8[V, D] in 8 bits. In 4 bits, u32[D / 8, V], the words of a `QuantizedKernel` with
            D inputs and V outputs.
        scale: f32[V], the scale of each row. In 4 bits, f32[D / 32, V].
        bits: number of bits per value, 8 or 4.
    """

    values: jax.Array
    scale: jax.Array
    bits: int = 8

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table."""
        if self.bits == 8:
            return tuple(self.values.shape)
        return self.values.shape[1], GROUP * self.scale.shape[0]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the table after dequantization."""
        return np.dtype(np.float32)

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the dequantized table W' = scale x values, computed in f32."""
        if self.bits == 4:
            return products.dequantize_words(self.values, self.scale, self.shape[1]).T.astype(dtype)
        return (self.values.astype(jnp.float32) * self.scale[:, None]).astype(dtype)

    def look_up(self, ids: jax.Array) -> jax.Array:  # i32[...] -> f32[..., D]
        """Look up rows of the table. As in `ops.lookup`, an ID out of range results in NaN."""
        if self.bits == 4:  # transposing all words would take longer than a token
            flat = jnp.where(ids < 0, self.shape[0], ids).reshape(-1)
            words = jnp.take(self.values, flat, axis=1, mode="fill", fill_value=0)
            scale = jnp.take(self.scale, flat, axis=1, mode="fill")
            rows = products.dequantize_words(words, scale, self.shape[1]).T
            return rows.reshape(*ids.shape, self.shape[1])
        values = ops.lookup(self.values, ids).astype(jnp.float32)
        return values * ops.lookup(self.scale, ids)[..., None]


WHOLE = "router", "shared_gate"
"""Modules that are never quantized, because small errors would change the choice of experts."""

TABLES = "tokens", "source_tokens", "output"
"""Tables that `quantize(..., embeddings=True)` stores in 8 or 4 bits."""


@known_keywords
def quantize(params: Params, kind: Kind, *, embeddings: bool = False) -> Params:
    """Quantize the kernels in a transformer's blocks.

    The error of each weight is |W - W'| <= scale / 2. In 8 bits, this is at most 1/254 of the
    largest weight for the same output. In 4 bits, it is at most 1/14 of the largest weight in the
    same group of 32 inputs, or in all inputs if their number is not a multiple of 32. If a
    group is a scale with at most 11 significant bits times integers in -8..7, its numbers do not
    change in 4 bits. This is the case for tensors of type Q4_0 in a GGUF file.

    Args:
        params: parameters of a looped or scanned stack.
        kind: "bf16" casts all floating-point arrays. "int8" and "int4" quantize the kernels of
            blocks, and do not change other parameters (norms, biases, heads and expert routers).
        embeddings: whether "int8" and "int4" also store the token vectors and the output matrix in
            8 bits, with one scale per token, or in 4 bits if "int4" keeps all their numbers
            exactly, which it does not test inside `jit`. Decoding reads the whole output matrix for
            each token.

    Returns:
        The parameters, with each quantized array replaced by a `QuantizedKernel` or a
        `QuantizedTable`.

    Raises:
        ConfigError: If `kind` is unknown, or if a kernel is not finite or is already quantized.
    """
    if not isinstance(params, Mapping):
        rule = "must be parameters, such as init_params(config, key)"
        raise ConfigError(f"params is of type {type(params).__name__}: {rule}")
    if kind not in get_args(Kind):
        raise ConfigError(
            f"kind is {kind!r}: must be one of {', '.join(map(repr, get_args(Kind)))}"
        )
    if kind == "bf16":
        return cast_floats(dict(params), jnp.bfloat16)
    return _walk(params, "", kind, embeddings)


def count(params: PyTree) -> int:
    """Count the elements of parameters (arrays or shapes). Quantized arrays count in full."""
    quantized = QuantizedKernel, QuantizedTable
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, quantized))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _walk(tree: Params, path: str, kind: Kind, embeddings: bool) -> Params:
    found = dict[str, object]()
    for name, part in tree.items():
        at = f"{path}/{name}" if path else name
        if isinstance(part, Mapping):
            found[name] = _walk(part, at, kind, embeddings)
        elif (
            name == "kernel"
            and any(module.startswith("block") for module in path.split("/"))
            and path.rpartition("/")[2] not in WHOLE
        ):
            weights, bits = _checked(at, part), 8 if kind == "int8" else 4
            first, contract = kernel_axes(at.split("/"), len(part.shape))
            lead = part.shape[:first]
            inputs = tuple(part.shape[first : first + contract])
            outputs = tuple(part.shape[first + contract :])
            rows = math.prod(inputs)
            groups = rows // GROUP if bits == 4 and rows % GROUP == 0 else 1
            grouped = weights.reshape(*lead, groups, -1, math.prod(outputs))
            values, scale, _ = _rounded(grouped, bits)
            _check_scale(at, scale, bits)
            found[name] = QuantizedKernel(
                values=values, scale=scale, inputs=inputs, outputs=outputs, bits=bits
            )
        elif embeddings and at in [f"embed/{table}" for table in TABLES]:
            found[name] = _table(at, _checked(at, part), kind)
        else:
            found[name] = part
    return found


def _table(path: str, weights: jax.Array, kind: Kind) -> QuantizedTable:
    rows, width = weights.shape
    if kind == "int4" and width % GROUP == 0:
        values, scale, exact = _rounded(weights.T.reshape(-1, GROUP, rows), 4)
        if concrete_value(exact):
            return QuantizedTable(values=values, scale=scale, bits=4)
    values, scale, _ = _rounded(weights.T[None], 8)
    _check_scale(path, scale, 8)
    return QuantizedTable(values=values.T, scale=scale[0])


def _checked(path: str, weights: Parameter) -> jax.Array:
    if not isinstance(weights, jax.Array | np.ndarray):
        raise ConfigError(f"{path} is of type {type(weights).__name__}: must be an array")
    known = concrete_value(weights)
    # One infinite weight would make the scale infinite and thus all other weights of its group 0.
    if known is not None and not np.isfinite(known).all():
        raise ConfigError(f"{path} is not finite and cannot be quantised")
    return jnp.asarray(weights)


def _check_scale(path: str, scale: jax.Array, bits: int) -> None:
    """Check that the largest dequantized weight, scale (2^(bits - 1) - 1), does not overflow."""
    most = 2 ** (bits - 1) - 1
    if not isinstance(scale, jax.core.Tracer) and not bool(jnp.isfinite(scale * most).all()):
        raise ConfigError(f"{path} has weights near the float32 maximum and cannot be quantised")


@partial(jax.jit, static_argnums=1)
def _rounded(
    grouped: jax.Array,  # [..., groups, inputs of a group, outputs]
    bits: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the integers, the scales, and whether all numbers are unchanged in 4 bits."""
    most = 2 ** (bits - 1) - 1
    grouped = grouped.astype(jnp.float32)
    size = largest(jnp.abs(grouped), axis=-2)
    scale = size / most
    # the scale of an output with only zero weights is 0
    divisor = jnp.where(scale > 0, scale, 1.0)[..., None, :]
    # The lowest integer, such as -128, is not used, so that W and -W have the same error.
    values = jnp.clip(jnp.round(grouped / divisor), -most, most).astype(jnp.int8)
    kept = jnp.zeros(scale.shape, bool)
    if bits == 4:
        for steps in range(1, 9):  # the integer of the largest number of each group
            # XLA multiplies by 1 / steps; the scale is exact once it is rounded to 11 bits
            unit = jax.lax.reduce_precision(size / steps, exponent_bits=8, mantissa_bits=10)
            found, unit, exact = _on_grid(grouped, unit)
            values = jnp.where(exact[..., None, :], found, values)
            scale, kept = jnp.where(exact, unit, scale), kept | exact
    values = values.reshape(*values.shape[:-3], -1, values.shape[-1])
    return (products.pack_words(values) if bits == 4 else values), scale, kept.all()


def _on_grid(
    grouped: jax.Array,  # f32[..., groups, inputs of a group, outputs]
    size: jax.Array,  # f32[..., groups, outputs]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return integers in -8..7, scales +-size, and whether scale x integers has the same bits."""
    divisor = jnp.where(size > 0, size, 1.0)[..., None, :]
    values = jnp.clip(jnp.round(grouped / divisor), -8, 8)
    # in Q4_0, the integer of the largest number is -8, and so the scale may be negative; the sign
    # of a zero is then that of the scale
    negative = (values == 8) | ((grouped == 0) & jnp.signbit(grouped))
    sign = jnp.where(negative.any(axis=-2), -1.0, 1.0)
    values = (values * sign[..., None, :]).astype(jnp.int8)
    scale = size * sign
    back = values.astype(jnp.float32) * scale[..., None, :]
    same = jax.lax.bitcast_convert_type(back, jnp.int32) == jax.lax.bitcast_convert_type(
        grouped, jnp.int32
    )
    return values, scale, (same & (values < 8)).all(axis=-2)


def quantized_project(
    x: jax.Array,  # [..., *inputs]
    kernel: QuantizedKernel,
    bias: jax.Array | None,  # [*outputs]
    contract: int,
    *,
    invariant: bool = False,
) -> jax.Array:  # [..., *outputs]
    """Return x W' + b in the dtype of x, like `ops.project`, but without a gradient for W'.

    On a CPU, the compiled kernel, which reads the integers directly, is used for a few rows.
    Otherwise, W' exists only during the product, and the backward pass dequantizes it again.
    (However, in a looped stack, XLA's CPU backend saves the first copy for the backward pass.)
    """
    if invariant:
        return _multiply(contract, x, kernel, bias, True)
    rows, groups = math.prod(x.shape[: x.ndim - contract]), len(kernel.scale)
    # the compiled kernel scales sums of 32 inputs
    aligned = groups == 1 or math.prod(kernel.inputs) % (32 * groups) == 0
    if aligned and explicit_mesh(x) is None and products.takes(rows, x.dtype, kernel.values):
        y = _multiply_few_rows(contract, x, kernel)
    else:
        y = _multiply(contract, x, kernel, None, False)
    return y if bias is None else y + bias.reshape(*(1,) * (y.ndim - bias.ndim), *bias.shape)


@partial(jax.checkpoint, static_argnums=(0, 4))
def _multiply(
    contract: int,
    x: jax.Array,
    kernel: QuantizedKernel,
    bias: jax.Array | None,
    invariant: bool,
) -> jax.Array:
    """Return x W' + b, but dequantize W' only when x is available."""
    # without the barrier, XLA could dequantize all layers before the first product
    x, kernel = jax.lax.optimization_barrier((x, jax.lax.stop_gradient(kernel)))
    return ops.project(x, kernel.astype(x.dtype), bias, contract, invariant=invariant)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiply_few_rows(contract: int, x: jax.Array, kernel: QuantizedKernel) -> jax.Array:
    """Return x W', computed by the compiled CPU kernel without dequantizing W'."""
    lead = x.shape[: x.ndim - contract]
    rows = x.reshape(math.prod(lead), -1)
    scale = kernel.scale[0] if kernel.bits == 8 else kernel.scale
    y = products.product(rows, kernel.values, scale=scale).astype(x.dtype)
    return y.reshape(*lead, *kernel.outputs)


@_multiply_few_rows.defjvp
def _(
    contract: int, primals: tuple[jax.Array, QuantizedKernel], tangents: tuple[jax.Array, object]
) -> tuple[jax.Array, jax.Array]:
    # The compiled kernel has no derivative, but the product is linear in x, and XLA can
    # differentiate the product with the dequantized kernel.
    x, kernel = primals
    return jax.jvp(lambda x: _multiply(contract, x, kernel, None, False), (x,), tangents[:1])


def table_logits(
    x: jax.Array,  # [B, T, D]
    table: QuantizedTable,  # [V, D]
    bias: jax.Array | None,  # [V]
    *,
    invariant: bool = False,
) -> jax.Array:  # f32[B, T, V]
    """Return x W'^T + b in f32."""
    rows = math.prod(x.shape[:2])
    takes = explicit_mesh(x) is None and products.takes(rows, x.dtype, table.values)
    if invariant or not takes:
        return ops.logits(x, table.astype(x.dtype), bias, invariant=invariant)
    y = products.product(
        x.reshape(rows, -1), table.values, scale=table.scale, bias=bias, turned=table.bits == 8
    )
    return y.reshape(*x.shape[:2], -1)
