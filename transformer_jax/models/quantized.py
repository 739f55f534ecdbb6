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
        values: i8[inputs, outputs] in 8 bits. In 4 bits, u8[inputs / 2, outputs] with two values
            per byte. 8 is added to each value, and the first value is in the low half.
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
        values = self.values
        if self.bits == 4:
            low, high = values & 15, values >> 4
            values = jnp.stack([low, high], axis=-2)  # [..., inputs / 2, 2, outputs]
            values = values.reshape(*values.shape[:-3], -1, values.shape[-1]).astype(jnp.int8) - 8
        *lead, inputs, outputs = values.shape
        groups = self.scale.shape[-2]
        grouped = values.reshape(*lead, groups, inputs // groups, outputs).astype(jnp.float32)
        return (grouped * self.scale[..., None, :]).astype(dtype).reshape(self.shape)


@value_class(kw_only=True, arrays=("values", "scale"), exportable=True)
class QuantizedTable:
    """8-bit table of vectors W' = scale q, which replaces a table in a model's parameters.

    Attributes:
        values: i8[V, D], the integers q.
        scale: f32[V], the scale of each row.
    """

    values: jax.Array  # i8[V, D]
    scale: jax.Array  # f32[V]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the table after dequantization."""
        return np.dtype(np.float32)

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the dequantized table W' = scale x values, computed in f32."""
        return (self.values.astype(jnp.float32) * self.scale[:, None]).astype(dtype)

    def look_up(self, ids: jax.Array) -> jax.Array:  # i32[...] -> f32[..., D]
        """Look up rows of the table. As in `ops.lookup`, an ID out of range results in NaN."""
        values = ops.lookup(self.values, ids).astype(jnp.float32)
        return values * ops.lookup(self.scale, ids)[..., None]


WHOLE = "router", "shared_gate"
"""Modules that are never quantized, because small errors would change the choice of experts."""

TABLES = "tokens", "source_tokens", "output"
"""Tables that `quantize(..., embeddings=True)` stores in 8 bits."""


@known_keywords
def quantize(params: Params, kind: Kind, *, embeddings: bool = False) -> Params:
    """Quantize the kernels in a transformer's blocks.

    The error of each weight is |W - W'| <= scale / 2. In 8 bits, this is at most 1/254 of the
    largest weight for the same output. In 4 bits, it is at most 1/14 of the largest weight in the
    same group of 32 inputs, or in all inputs if their number is not a multiple of 32.

    Args:
        params: parameters of a looped or scanned stack.
        kind: "bf16" casts all floating-point arrays. "int8" and "int4" quantize the kernels of
            blocks, and do not change other parameters (norms, biases, heads and expert routers).
        embeddings: whether "int8" and "int4" also store the token vectors and the output matrix in
            8 bits, with one scale per token. Decoding reads the whole output matrix for each token.

    Returns:
        The parameters, with each quantized array replaced by a `QuantizedKernel` or a
        `QuantizedTable`.

    Raises:
        ConfigError: If `kind` is unknown, or if a kernel is not finite, is already quantized, or
            has an odd number of inputs in 4 bits.
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
            if bits == 4 and rows % 2:  # a byte contains two rows
                raise ConfigError(f"{at} has {rows} inputs: the number must be even for 4 bits")
            groups = rows // GROUP if bits == 4 and rows % GROUP == 0 else 1
            values, scale = _rounded(weights.reshape(*lead, groups, -1, math.prod(outputs)), bits)
            _check_scale(at, scale, bits)
            found[name] = QuantizedKernel(
                values=values, scale=scale, inputs=inputs, outputs=outputs, bits=bits
            )
        elif embeddings and at in [f"embed/{table}" for table in TABLES]:
            values, scale = _rounded(_checked(at, part).T[None], 8)
            _check_scale(at, scale, 8)
            found[name] = QuantizedTable(values=values.T, scale=scale[0])
        else:
            found[name] = part
    return found


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
) -> tuple[jax.Array, jax.Array]:
    most = 2 ** (bits - 1) - 1
    grouped = grouped.astype(jnp.float32)
    scale = largest(jnp.abs(grouped), axis=-2) / most
    # the scale of an output with only zero weights is 0
    divisor = jnp.where(scale > 0, scale, 1.0)[..., None, :]
    # The lowest integer, such as -128, is not used, so that W and -W have the same error.
    values = jnp.clip(jnp.round(grouped / divisor), -most, most).astype(jnp.int8)
    values = values.reshape(*values.shape[:-3], -1, values.shape[-1])
    if bits == 4:
        # -7..7 become the unsigned 4-bit values 1..15
        pairs = (values + 8).astype(jnp.uint8)
        pairs = pairs.reshape(*pairs.shape[:-2], -1, 2, pairs.shape[-1])
        values = pairs[..., 0, :] | pairs[..., 1, :] << 4
    return values, scale


def quantized_project(
    x: jax.Array,  # [..., *inputs]
    kernel: QuantizedKernel,
    bias: jax.Array | None,  # [*outputs]
    contract: int,
    *,
    invariant: bool = False,
) -> jax.Array:  # [..., *outputs]
    """Return x W' + b in the dtype of x, like `ops.project`, but without a gradient for W'.

    On a CPU, the compiled kernel, which reads the 8-bit values directly, is used for a few rows.
    Otherwise, W' exists only during the product, and the backward pass dequantizes it again.
    (However, in a looped stack, XLA's CPU backend saves the first copy for the backward pass.)
    """
    if invariant:
        return _multiply(contract, x, kernel, bias, True)
    rows = math.prod(x.shape[: x.ndim - contract])
    native = kernel.bits == 8 and products.takes(rows, x.dtype, kernel.values)
    if native:
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
    y = products.product(rows, kernel.values, scale=kernel.scale[0]).astype(x.dtype)
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
    if invariant or not products.takes(rows, x.dtype, table.values):
        return ops.logits(x, table.astype(x.dtype), bias, invariant=invariant)
    y = products.product(
        x.reshape(rows, -1), table.values, scale=table.scale, bias=bias, turned=True
    )
    return y.reshape(*x.shape[:2], -1)
