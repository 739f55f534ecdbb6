"""Split blockwise attention over a mesh of devices: each computes its own batch rows and heads.

On a mesh of explicit axes types say how arrays are split, and one `shard_map` stands around the
call with its gradient. On automatic axes only the compiler knows: it finds the forward and the
backward pass as one operation each, with a rule of how to split it. Elsewhere, on one device and
inside a `shard_map` of the user's, nothing here does anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.attention.arguments import AttentionCall
from transformer_jax.attention.biases import ALiBi, Bias, RelativeBias
from transformer_jax.attention.blockwise.bias import differentiable
from transformer_jax.kernels.contract import Index
from transformer_jax.kernels.sharding import (
    HEADS,
    KEYS,
    QUERIES,
    TILES,
    AxisNames,
    First,
    Function,
    Parts,
    empty_batch,
    partitioned,
)
from transformer_jax.pytree import register
from transformer_jax.sharding import split, vary
from transformer_jax.shown import short_repr

ROWS: AxisNames = ("b", None, "n")
OUR_BIASES = jax.Array, ALiBi, RelativeBias


@short_repr
class Saved(NamedTuple):
    """Hold what the backward pass reads of the forward pass and of the cotangents."""

    do: jax.Array  # f32[B, T, N, Hv]
    D: jax.Array  # f32[B, T, N]
    row_max: jax.Array  # f32[B, T, N], +inf in rows that pass no gradient on
    log_sum: jax.Array  # f32[B, T, N]
    repaired: jax.Array  # bool[B, N]: whether the forward pass was repeated as a repair pass


# The names of the axes of what the passes return
FORWARD = QUERIES, ROWS, ROWS, HEADS  # out, row_max, log_sum, repaired
BACKWARD = QUERIES, KEYS, KEYS  # and the gradient of the bias, which is as `bias_axes` says


# A mesh whose axes are explicit


def by_types(
    attend: Callable[[AttentionCall], tuple[jax.Array, jax.Array]], call: AttentionCall
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, Hv], lse [B, T, N]
    """Return `attend(call)`, computed on each device's part where types split the call."""
    parts = parts_of_types(call)
    if parts is None:
        return attend(call)
    leaves, structure = jax.tree.flatten(call)
    names = _axis_names(call)
    dtypes = [x.dtype for x in leaves]
    specs = [parts.spec(x.shape, n) for x, n in zip(leaves, names, strict=True)]
    results = [(call.query.shape, QUERIES), (call.query.shape[:3], ROWS)]

    def local(*leaves: jax.Array) -> tuple[jax.Array, jax.Array]:
        varied = vary(leaves, parts.first())  # here gradients are added up: before rounding
        given = [x.astype(dtype) for x, dtype in zip(varied, dtypes, strict=True)]
        inner = jax.tree.unflatten(structure, parts.read(given, names))
        return attend(_part(inner, parts.first(), parts.full))

    def placed(x: jax.Array, names: AxisNames, spec: PartitionSpec) -> jax.Array:
        if parts.summed(x.shape, names) and x.dtype in (jnp.bfloat16, jnp.float16):
            x = x.astype(jnp.float32)  # and so are the gradients that are added up
        return jax.sharding.reshard(x, NamedSharding(parts.mesh, spec))

    split_up = jax.shard_map(
        local,
        mesh=parts.mesh,
        in_specs=tuple(specs),
        out_specs=tuple(parts.spec(*each) for each in results),
    )
    out, lse = split_up(*map(placed, leaves, names, specs))
    wanted = NamedSharding(parts.mesh, split(call.query, slice(3)))
    return jax.sharding.reshard(out, wanted), jax.sharding.reshard(lse, wanted)


def parts_of_types(call: AttentionCall) -> Parts | None:
    """Return how types split rows and heads; None where they do not.

    None also where a mesh has other axes too, and for functions of the user's, whose loops may not
    fit into a `shard_map`.
    """
    query, key, bias = call.query, call.key, call.bias
    mesh = jax.typeof(query).sharding.mesh
    if mesh.empty or len(mesh.explicit_axes) < len(mesh.axis_names):
        return None
    if 0 in (*query.shape, *key.shape) or not (bias is None or isinstance(bias, OUR_BIASES)):
        return None
    if call.mask is not None and call.mask.calls_user_code:
        return None
    parts = Parts.of(mesh, [split(query)], [QUERIES], _full(call))
    return parts if parts.axes["b"] or parts.axes["n"] else None


def _full(call: AttentionCall) -> dict[str, int]:
    return dict(b=call.query.shape[0], n=call.query.shape[2], k=call.key.shape[2])


# A mesh whose axes are automatic


def by_compiler(
    function: Callable[..., Sequence[jax.Array]],
    results: Sequence[AxisNames],
    call: AttentionCall,
    *saved: Saved,
) -> tuple[jax.Array, ...]:
    """Return `function(call, *saved)`, to which the compiler has a rule of how to split it."""
    inside = jax.sharding.get_abstract_mesh().manual_axes
    if jax.device_count() == 1 or inside:
        return tuple(function(call, *saved))
    at = call.positions()  # or they, and a plan of them, would be constants
    call = dataclasses.replace(call, q_positions=at[0], k_positions=at[1])
    leaves, structure = jax.tree.flatten((call, *saved))
    full = _full(call)

    def flat(first: First, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        call, *saved = jax.tree.unflatten(structure, leaves)
        return tuple(function(_part(call, first, full), *saved))

    return _mapped(flat, _axis_names(call, *saved), results, full)(*leaves)


def _mapped(
    function: Function,
    names: Sequence[AxisNames],
    results: Sequence[AxisNames],
    full: Mapping[str, int],
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function with a rule for `vmap` too: its axis is one more that a mesh may split."""

    @custom_vmap
    def call(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return partitioned(function, leaves, names, results, dict(full))

    @call.def_vmap
    def rule(
        size: int, batched: Sequence[bool], *leaves: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        axes = tuple(0 if is_mapped else None for is_mapped in batched)
        if size == 0:
            return empty_batch(partial(function, (0, 0)), leaves, tuple(batched))
        name = f"v{len(full)}"  # a new one

        def mapped(first: First, *leaves: jax.Array) -> tuple[jax.Array, ...]:
            return jax.vmap(partial(function, first), axes)(*leaves)

        given = [(name, *n) if f else n for n, f in zip(names, batched, strict=True)]
        again = _mapped(mapped, given, [(name, *n) for n in results], {**full, name: size})
        return again(*leaves), (True,) * len(results)

    return call


# A part


def _axis_names(call: AttentionCall, *saved: Saved) -> list[AxisNames]:
    """Name the axes of the leaves of a call and of what was saved, in their order."""
    names = [QUERIES, KEYS, KEYS]
    names += [] if call.mask is None else call.mask.leaf_axes
    names += bias_axes(call.bias)
    names += [] if call.sinks is None else [HEADS[-call.sinks.ndim :]]
    at = (x for x in (call.q_positions, call.k_positions) if x is not None)
    names += [("b", None)[-x.ndim :] for x in at]
    names += [] if call.dropout_words is None else [(None, "b", "n")]
    return names + [QUERIES, ROWS, ROWS, ROWS, HEADS] * len(saved)


def bias_axes(bias: jax.Array | Bias | None, *, of_gradient: bool = False) -> list[AxisNames]:
    """Name the axes of a bias, whose values' arrays are not split: nobody knows what they mean."""
    if not isinstance(bias, Bias):
        return [] if bias is None else [TILES]
    leaves = jax.tree.leaves(bias) if not of_gradient else differentiable(bias)
    return [(None,) * jnp.ndim(x) for x in leaves]


def _part(call: AttentionCall, first: First, full: Mapping[str, int]) -> AttentionCall:
    """Return the call of a part, with a mask and a bias that know which part."""
    B, _, N, _ = call.query.shape
    whole = full["b"], full["n"]
    if (B, N) == whole:
        return call
    mask, bias = call.mask, call.bias
    if mask is not None:
        mask = mask.part(first, whole, (B, N))
    if isinstance(bias, Bias):
        bias = PartOfBias(bias, first[0], first[1], whole, (B, N))
    return dataclasses.replace(call, mask=mask, bias=bias)


@register(arrays=("bias", "row", "head"), static=("full", "size"))
@dataclass(frozen=True, eq=False)
class PartOfBias:
    """Take some rows and heads of what a bias materializes."""

    bias: Bias
    row: Index  # the first
    head: Index  # the first
    full: tuple[int, int]  # how many rows and heads there are
    size: tuple[int, int]  # how many are here

    def materialize(self, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        bias = self.bias.materialize(q_positions, k_positions)
        for axis, start in enumerate((self.row, self.head)):
            full, size = self.full[axis], self.size[axis]
            if bias.shape[axis] == full != size:
                bias = lax.dynamic_slice_in_dim(bias, start, size, axis)
        return bias
