"""One kernel call under `vmap` and under a device mesh: which axis of each array means what.

A kernel is independent over batch rows and over key heads, so a mapped axis is folded into the
batch, and a mesh may split the batch and the heads, as `parts` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from transformer_jax.kernels.parts import (
    HEADS,
    KEYS,
    QUERIES,
    TILES,
    Roles,
    no_rows,
    partitioned,
)

VECTOR: Roles = ("b", None)
ROWS: Roles = ("b", "n", None)

Kernel = Callable[..., tuple[jax.Array, ...]]  # of Operands, Lists and perhaps Saved


def mapped(
    kernel: Kernel, results: tuple[Roles, ...], *, of_bias: bool = False, splits: bool = True
) -> Kernel:
    """The kernel with rules for `vmap` and for a mesh. `results` are the roles of what it returns;
    `of_bias`: the result has the bias's shape, and is a sum where an axis of that is 1; without
    `splits` there is no rule for a mesh."""

    @custom_vmap
    def call(*tree):
        return (_split(kernel, results) if splits else kernel)(*tree)

    @call.def_vmap
    def rule(size, batched, *tree):
        if size == 0:
            return no_rows(kernel, tree, tuple(batched))
        B = tree[0].query.shape[1 if batched[0].query else 0]
        leaves, structure = jax.tree.flatten(tree)
        flags = jax.tree.leaves(batched)
        bias, pairs = tree[0].bias, tree[0].pairs

        def shared(x):
            if x is bias:
                return not of_bias
            return x is pairs or B > 1  # what is small is copied: lists must all have as many rows

        folded = [
            _fold(x, flag, roles, size, B, shared=shared(x))
            for x, flag, roles in zip(leaves, flags, _roles(tree), strict=True)
        ]
        again = mapped(kernel, results, of_bias=of_bias, splits=splits)
        out = again(*jax.tree.unflatten(structure, folded))
        out = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in out)
        if of_bias and tree[0].bias.shape[1 if batched[0].bias else 0] == 1:
            out = tuple(x.sum(axis=1, keepdims=True) for x in out)
        return out, (True,) * len(out)

    return call


def _fold(x, is_mapped: bool, roles: Roles, size: int, B: int, *, shared: bool) -> jax.Array:
    """[V, .., B or 1, ..] to [.., V B, ..]; where rows that share it may, it stays of size 1."""
    axis = roles.index("b")
    if not is_mapped:
        if x.shape[axis] == 1 and shared:
            return x
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    shape = (*x.shape[: axis + 1], B, *x.shape[axis + 2 :])
    x = jnp.moveaxis(jnp.broadcast_to(x, shape), 0, axis)
    return x.reshape(*x.shape[:axis], size * B, *x.shape[axis + 2 :])


def _roles(tree: tuple[Any, ...]) -> list[Roles]:
    """The roles of the leaves of (Operands, Lists[, Saved]), in their order."""
    operands = tree[0]
    vectors = [VECTOR] * len(operands.q_vectors + operands.k_vectors)
    optional = dict(pairs=TILES, bias=TILES, slopes=HEADS, sinks=HEADS, dropout=(None, "b", "n"))
    given = [roles for name, roles in optional.items() if getattr(operands, name) is not None]
    saved = [QUERIES, ROWS, ROWS, ROWS] * (len(tree) - 2)
    return [QUERIES, KEYS, KEYS, *vectors, *given, TILES, ROWS, ROWS, *saved]


def _split(kernel: Kernel, results: tuple[Roles, ...]) -> Kernel:
    """The kernel on each device's part of the batch and of the heads."""

    def call(*tree):
        leaves, structure = jax.tree.flatten(tree)
        full = dict(b=leaves[0].shape[0], n=leaves[0].shape[2], k=leaves[1].shape[2])

        def plain(_, *leaves):
            return kernel(*jax.tree.unflatten(structure, leaves))

        return partitioned(plain, leaves, _roles(tree), results, full)

    return call
