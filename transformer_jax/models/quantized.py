"""Hold kernels in 8 or 4 bits, and multiply with them: symmetric, absolute maximum (no zero point).

W' = scale q, with q an integer: of 8 bits one scale for each output, of 4 bits one for each output
and each group of inputs. LLM.int8 (Dettmers et al. 2022) keeps outliers apart, NF4 (Dettmers et al.
2023) has other levels than integers: neither is done here.
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
from transformer_jax.tracing import known_value
from transformer_jax.values import value_class

Kind = Literal["bf16", "int8", "int4"]

GROUP = 32
"""Inputs that share a scale in 4 bits; where their number is no multiple of it, all share one."""


@value_class(
    kw_only=True, arrays=("values", "scale"), static=("inputs", "outputs", "bits"), exportable=True
)
class QuantizedKernel:
    """Stand in a model's parameters where a kernel stands: integers, and what to multiply them by.

    In a scanned stack both arrays lead with L, and those of experts with E.

    Attributes:
        values: i8[inputs, outputs]; of 4 bits u8[inputs / 2, outputs], two values in a byte, + 8
            each, the first in its low half.
        scale: f32[groups, outputs].
        inputs: the axes of the kernel that are summed over, such as [N, Hv] of an attention's
            output.
        outputs: the other axes.
        bits: 8 or 4.
    """

    values: jax.Array
    scale: jax.Array
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the kernel."""
        return (*self.values.shape[:-2], *self.inputs, *self.outputs)

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the kernel, when it is no longer quantised."""
        return np.dtype(np.float32)

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the kernel W' as an array: scale x value, computed in f32."""
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
    """Stand in a model's parameters where a table of vectors stands, in 8 bits: W' = scale q.

    Attributes:
        values: i8[V, D], q.
        scale: f32[V], of each row.
    """

    values: jax.Array  # i8[V, D]
    scale: jax.Array  # f32[V]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the table."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the table, when it is no longer quantised."""
        return np.dtype(np.float32)

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the table W' as an array: scale x value, computed in f32."""
        return (self.values.astype(jnp.float32) * self.scale[:, None]).astype(dtype)

    def look_up(self, ids: jax.Array) -> jax.Array:  # i32[...] -> f32[..., D]
        """Return rows of the table; an id outside it gives NaN, as `lookup`."""
        return (
            ops.lookup(self.values, ids).astype(jnp.float32)
            * ops.lookup(self.scale, ids)[..., None]
        )


WHOLE = "router", "shared_gate"
"""Modules of blocks whose kernels are held whole: a little less exact, other experts are chosen."""

TABLES = "tokens", "source_tokens", "output"
"""The tables that `quantize(..., embeddings=True)` holds in 8 bits."""


@known_keywords
def quantize(params: Params, kind: Kind, *, embeddings: bool = False) -> Params:
    """Return parameters of a transformer whose kernels of blocks are held in fewer bits.

    Of each weight, |W - W'| <= scale / 2, which is at most 1/254 of the largest weight of its
    output in 8 bits, and 1/14 of the largest in its group of 32 inputs in 4 (of all inputs, where
    their number is no multiple of 32).

    Args:
        params: of a looped or a scanned stack.
        kind: "bf16" casts every float. "int8" and "int4" are for the kernels of blocks; other
            parameters (norms, biases, heads, routers of experts) stay as they are.
        embeddings: with "int8" and "int4", hold the vectors of tokens and the output matrix in 8
            bits, with a scale for each token: decoding reads all of them for each new one.

    Returns:
        The parameters, with a `QuantizedKernel` or a `QuantizedTable` in the place of an array.

    Raises:
        ConfigError: if `kind` is another, or a kernel is not finite, is quantised already, or has
            an odd number of inputs in 4 bits.
    """
    if not isinstance(params, Mapping):
        rule = "must be parameters, as init_params(config, key) are"
        raise ConfigError(f"params is a {type(params).__name__}: {rule}")
    if kind not in get_args(Kind):
        raise ConfigError(
            f"kind is {kind!r}: must be one of {', '.join(map(repr, get_args(Kind)))}"
        )
    if kind == "bf16":
        return cast_floats(dict(params), jnp.bfloat16)
    return _walk(params, "", kind, embeddings)


def count(params: PyTree) -> int:
    """Count the numbers of parameters or of their shapes; of a quantised kernel, its weights."""
    held = QuantizedKernel, QuantizedTable
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, held))
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
            found[name] = _quantized(at, part, 8 if kind == "int8" else 4)
        elif embeddings and at in [f"embed/{table}" for table in TABLES]:
            values, scale = _rounded(_checked(at, part).T[None], 8)
            _check_scale(at, scale, 8)
            found[name] = QuantizedTable(values=values.T, scale=scale[0])
        else:
            found[name] = part
    return found


def _checked(path: str, weights: Parameter) -> jax.Array:
    if not isinstance(weights, jax.Array | np.ndarray):
        raise ConfigError(f"{path} is a {type(weights).__name__}: must be an array")
    known = known_value(weights)
    if known is not None and not np.isfinite(known).all():
        raise ConfigError(f"{path} is not finite: cannot be quantised")
    return jnp.asarray(weights)


def _check_scale(path: str, scale: jax.Array, bits: int) -> None:
    """Check that the largest weight, scale (2^(bits - 1) - 1), is finite after rounding, too."""
    most = 2 ** (bits - 1) - 1
    if not isinstance(scale, jax.core.Tracer) and not bool(jnp.isfinite(scale * most).all()):
        raise ConfigError(f"{path} has weights at the end of float32: cannot be quantised")


def _quantized(path: str, kernel: Parameter, bits: int) -> QuantizedKernel:
    weights = _checked(path, kernel)
    first, contract = kernel_axes(path.split("/"), len(kernel.shape))
    lead = kernel.shape[:first]
    inputs = tuple(kernel.shape[first : first + contract])
    outputs = tuple(kernel.shape[first + contract :])
    rows = math.prod(inputs)
    if bits == 4 and rows % 2:
        raise ConfigError(f"{path} has {rows} inputs: must be even in 4 bits")
    groups = rows // GROUP if bits == 4 and rows % GROUP == 0 else 1
    values, scale = _rounded(weights.reshape(*lead, groups, -1, math.prod(outputs)), bits)
    _check_scale(path, scale, bits)
    return QuantizedKernel(values=values, scale=scale, inputs=inputs, outputs=outputs, bits=bits)


@partial(jax.jit, static_argnums=1)
def _rounded(
    grouped: jax.Array,  # [..., groups, inputs of a group, outputs]
    bits: int,
) -> tuple[jax.Array, jax.Array]:
    most = 2 ** (bits - 1) - 1
    grouped = grouped.astype(jnp.float32)
    scale = largest(jnp.abs(grouped), axis=-2) / most
    # an output whose weights are all 0 has the scale 0
    divisor = jnp.where(scale > 0, scale, 1.0)[..., None, :]
    values = jnp.clip(jnp.round(grouped / divisor), -most, most).astype(jnp.int8)
    values = values.reshape(*values.shape[:-3], -1, values.shape[-1])
    if bits == 4:
        # -7..7 become 1..15, four bits without a sign
        pairs = (values + 8).astype(jnp.uint8)
        pairs = pairs.reshape(*pairs.shape[:-2], -1, 2, pairs.shape[-1])
        values = pairs[..., 0, :] | pairs[..., 1, :] << 4
    return values, scale


def quantized_project(
    x: jax.Array,  # [..., *inputs]
    kernel: QuantizedKernel,
    bias: jax.Array | None,  # [*outputs]
    contract: int,
) -> jax.Array:  # [..., *outputs]
    """Return x W' + b in the dtype of x, as `project`.

    Few rows, on a CPU, are left to the compiled kernel, which reads 8 bits as they are; elsewhere
    W' only exists within the product, and the backward pass makes it again. It has no gradient.
    XLA's CPU backend keeps the first for the second in a looped stack.
    """
    rows = math.prod(x.shape[: x.ndim - contract])
    native = kernel.bits == 8 and products.takes(rows, x.dtype, kernel.values)
    y = (_multiply_few_rows if native else _multiply)(contract, x, kernel)
    return y if bias is None else y + bias.reshape(*(1,) * (y.ndim - bias.ndim), *bias.shape)


@partial(jax.checkpoint, static_argnums=0)
def _multiply(contract: int, x: jax.Array, kernel: QuantizedKernel) -> jax.Array:
    """Return x W', which is made when x is there."""
    # XLA could make W' of all layers before the first product, since W' does not depend on x
    x, kernel = jax.lax.optimization_barrier((x, jax.lax.stop_gradient(kernel)))
    return ops.project(x, kernel.astype(x.dtype), None, contract)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiply_few_rows(contract: int, x: jax.Array, kernel: QuantizedKernel) -> jax.Array:
    """Return x W' of integers that are read as they are."""
    lead = x.shape[: x.ndim - contract]
    rows = x.reshape(math.prod(lead), -1)
    y = products.product(rows, kernel.values, scale=kernel.scale[0]).astype(x.dtype)
    return y.reshape(*lead, *kernel.outputs)


@_multiply_few_rows.defjvp
def _(
    contract: int, primals: tuple[jax.Array, QuantizedKernel], tangents: tuple[jax.Array, object]
) -> tuple[jax.Array, jax.Array]:
    x, kernel = primals
    return jax.jvp(lambda x: _multiply(contract, x, kernel), (x,), tangents[:1])


def table_logits(
    x: jax.Array,  # [B, T, D]
    table: QuantizedTable,  # [V, D]
    bias: jax.Array | None,  # [V]
) -> jax.Array:  # f32[B, T, V]
    """Return x W'^T + b in f32."""
    rows = math.prod(x.shape[:2])
    if not products.takes(rows, x.dtype, table.values):
        return ops.logits(x, table.astype(x.dtype), bias)
    y = products.product(
        x.reshape(rows, -1), table.values, scale=table.scale, bias=bias, turned=True
    )
    return y.reshape(*x.shape[:2], -1)
