"""Blockwise attention on a mesh of devices: each computes its own batch rows and heads.

On a mesh of explicit axes types say how arrays are split, and one `shard_map` stands around the
call with its gradient. On automatic axes only the compiler knows: it finds the forward and the
backward pass as one operation each, with a rule of how to split it. Elsewhere, on one device and
inside a `shard_map` of the user's, nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding

from transformer_jax.blockwise_bias import differentiable
from transformer_jax.blockwise_tiles import Fixed, positions_at
from transformer_jax.kernels.parts import (
    HEADS,
    KEYS,
    QUERIES,
    TILES,
    First,
    Function,
    Parts,
    Roles,
    no_rows,
    partitioned,
)
from transformer_jax.masks import Closed, Dense, Predicate
from transformer_jax.meshes import split, vary
from transformer_jax.positions import ALiBi, RelativeBias
from transformer_jax.tiles import register

ROWS: Roles = ("b", None, "n")
OUR_BIASES = jax.Array, ALiBi, RelativeBias


class Inputs(NamedTuple):
    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]
    value: jax.Array  # [B, S, K, Hv]
    bias: Any
    sinks: jax.Array | None  # f32[N], f32[1, N] on a part
    fixed: Fixed


class Saved(NamedTuple):
    """What the backward pass reads of the forward pass and of the cotangents."""

    do: jax.Array  # f32[B, T, N, Hv]
    D: jax.Array  # f32[B, T, N]
    high: jax.Array  # f32[B, T, N]: m, +inf in rows that pass no gradient on
    log: jax.Array  # f32[B, T, N]: log l
    careful: jax.Array  # bool[B, N]


# Roles of what the passes return
FORWARD = QUERIES, ROWS, ROWS, HEADS  # out, m, log l, and whether care was taken
BACKWARD = QUERIES, KEYS, KEYS  # and the gradient of the bias, which is as `bias_roles` says


# A mesh whose axes are explicit


def by_types(attend: Callable, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """`attend(inputs)`, (out [B, T, N, Hv], lse [B, T, N]), on each device's part."""
    parts = parts_of_types(inputs.query, inputs.key, inputs.fixed.mask, inputs.bias)
    if parts is None:
        return attend(inputs)
    leaves, structure = jax.tree.flatten(inputs)
    roles = _roles((inputs,))
    dtypes = [x.dtype for x in leaves]
    specs = [parts.spec(x.shape, r) for x, r in zip(leaves, roles, strict=True)]
    results = [(inputs.query.shape, QUERIES), (inputs.query.shape[:3], ROWS)]

    def local(*leaves):
        varied = vary(leaves, parts.first())  # here gradients are added up: before rounding
        given = [x.astype(dtype) for x, dtype in zip(varied, dtypes, strict=True)]
        inner = jax.tree.unflatten(structure, parts.read(given, roles))
        return attend(_part(inner, parts.first(), parts.full))

    def placed(x, roles, spec):
        if parts.summed(x.shape, roles) and x.dtype in (jnp.bfloat16, jnp.float16):
            x = x.astype(jnp.float32)  # and so are the gradients that are added up
        return jax.sharding.reshard(x, NamedSharding(parts.mesh, spec))

    split_up = jax.shard_map(
        local,
        mesh=parts.mesh,
        in_specs=tuple(specs),
        out_specs=tuple(parts.spec(*each) for each in results),
    )
    out, lse = split_up(*map(placed, leaves, roles, specs))
    wanted = NamedSharding(parts.mesh, split(inputs.query, slice(3)))
    return jax.sharding.reshard(out, wanted), jax.sharding.reshard(lse, wanted)


def parts_of_types(query: jax.Array, key: jax.Array, mask: Any, bias: Any) -> Parts | None:
    """How types split rows and heads; None where they do not, where a mesh has other axes too, and
    for functions of the user's, whose loops may not fit into a `shard_map`."""
    mesh = jax.typeof(query).sharding.mesh
    if mesh.empty or len(mesh.explicit_axes) < len(mesh.axis_names):
        return None
    if 0 in (*query.shape, *key.shape) or not (bias is None or isinstance(bias, OUR_BIASES)):
        return None
    if any(isinstance(node, Closed | Predicate) for node in _nodes(mask)):
        return None
    parts = Parts.of(mesh, [split(query)], [QUERIES], _full(query, key))
    return parts if parts.axes["b"] or parts.axes["n"] else None


def _full(query: jax.Array, key: jax.Array) -> dict[str, int]:
    return dict(b=query.shape[0], n=query.shape[2], k=key.shape[2])


# A mesh whose axes are automatic


def by_compiler(function: Callable, results: Sequence[Roles], *tree: Any) -> tuple[jax.Array, ...]:
    """`function(*tree)`, of (Inputs[, Saved]) to arrays, with a rule of how to split it."""
    inside = jax.sharding.get_abstract_mesh().manual_axes
    if jax.device_count() == 1 or inside:
        return function(*tree)
    inputs, *saved = tree
    T, S = inputs.query.shape[1], inputs.key.shape[1]
    at = positions_at(inputs.fixed, T, S)  # or they, and a plan of them, would be constants
    fixed = inputs.fixed._replace(q_positions=at[0], k_positions=at[1])
    tree = inputs._replace(fixed=fixed), *saved
    leaves, structure = jax.tree.flatten(tree)
    full = _full(inputs.query, inputs.key)

    def flat(first, *leaves):
        inputs, *saved = jax.tree.unflatten(structure, leaves)
        return tuple(function(_part(inputs, first, full), *saved))

    return _mapped(flat, _roles(tree), results, full)(*leaves)


def _mapped(function: Function, roles: Sequence[Roles], results: Sequence[Roles], full: dict):
    """With a rule for `vmap` too: its axis is one more that a mesh may split."""

    @custom_vmap
    def call(*leaves):
        return partitioned(function, leaves, roles, results, full)

    @call.def_vmap
    def rule(size, batched, *leaves):
        axes = tuple(0 if is_mapped else None for is_mapped in batched)
        if size == 0:
            return no_rows(partial(function, (0, 0)), leaves, tuple(batched))
        role = f"v{len(full)}"  # a new one

        def mapped(first, *leaves):
            return jax.vmap(partial(function, first), axes)(*leaves)

        given = [(role, *r) if f else r for r, f in zip(roles, batched, strict=True)]
        again = _mapped(mapped, given, [(role, *r) for r in results], full | {role: size})
        return again(*leaves), (True,) * len(results)

    return call


# A part


def _roles(tree: tuple[Any, ...]) -> list[Roles]:
    """The roles of the leaves of (Inputs[, Saved]), in their order."""
    inputs, fixed = tree[0], tree[0].fixed
    roles = [QUERIES, KEYS, KEYS, *bias_roles(inputs.bias)]
    roles += [] if inputs.sinks is None else [HEADS[-inputs.sinks.ndim :]]
    for node in _nodes(fixed.mask):
        if isinstance(node, Dense):
            roles.append(TILES if node.array.ndim == 4 else (None, None))
        elif isinstance(node, Closed):
            roles += [(None,) * jnp.ndim(x) for x in node.constants]
        elif not isinstance(node, Predicate):  # all else leads with batch rows
            roles.append(("b", *[None] * (node.ndim - 1)))
    roles += [("b", None)] * sum(x is not None for x in fixed[1:3])
    roles += [] if fixed.dropout is None else [(None, "b", "n")]
    return roles + [QUERIES, ROWS, ROWS, ROWS, HEADS] * (len(tree) - 1)


def _nodes(mask: Any) -> list:
    """The leaves of a mask, and whole what has other leaves than such as lead with batch rows."""
    kinds = Closed | Dense | Predicate
    return jax.tree.leaves(mask, is_leaf=lambda node: isinstance(node, kinds))


def bias_roles(bias: Any, *, of_gradient: bool = False) -> list[Roles]:
    """An array is split; of what a value's arrays mean nothing is known."""
    if not hasattr(bias, "materialize"):
        return [] if bias is None else [TILES]
    leaves = jax.tree.leaves(bias) if not of_gradient else differentiable(bias)
    return [(None,) * jnp.ndim(x) for x in leaves]


def _part(inputs: Inputs, first: First, full: dict[str, int]) -> Inputs:
    """Inputs of a part, with a bias that knows which part."""
    B, _, N, _ = inputs.query.shape
    if not hasattr(inputs.bias, "materialize") or (B, N) == (full["b"], full["n"]):
        return inputs
    row, head = first
    bias = PartOfBias(inputs.bias, row, head, (full["b"], full["n"]), (B, N))
    return inputs._replace(bias=bias)


@register(arrays=("bias", "row", "head"), static=("full", "size"))
@dataclass(frozen=True, eq=False)
class PartOfBias:
    """Some rows and heads of a bias that is a value."""

    bias: Any
    row: Any  # the first
    head: Any  # the first
    full: tuple[int, int]  # how many rows and heads there are
    size: tuple[int, int]  # how many are here

    def materialize(self, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        bias = self.bias.materialize(q_positions, k_positions)
        for axis, start in enumerate((self.row, self.head)):
            full, size = self.full[axis], self.size[axis]
            if bias.shape[axis] == full != size:
                bias = lax.dynamic_slice_in_dim(bias, start, size, axis)
        return bias
