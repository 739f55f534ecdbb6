"""Give a kernel call its rules for `vmap` and for a device mesh.

A kernel is independent over batch rows and over key heads. So an axis of `vmap` is folded into the
batch, and a mesh may split the batch and the heads, as `kernels/sharding.py` does it. A pool of
pages has no batch: every device holds all pages of its heads, and pools that `vmap` maps are put
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from transformer_jax.kernels.sharding import (
    HEADS,
    KEYS,
    POOLS,
    QUERIES,
    ROWS,
    TILES,
    VECTORS,
    AxisNames,
    empty_batch,
    partitioned,
)

Kernel = Callable[..., tuple[jax.Array, ...]]  # of Operands, TileLists and perhaps Saved
Part = Any
"""`Operands`, `TileLists` or `Saved`, of arrays or of what stands for one: a bool, an axis."""
Tree = tuple[Part, ...]


def batched(
    kernel: Kernel, results: tuple[AxisNames, ...], *, of_bias: bool = False, splits: bool = True
) -> Kernel:
    """Return the kernel with rules for `vmap` and for a mesh.

    `results` names the axes of what it returns. With `of_bias` the result has the bias's shape,
    and is a sum where an axis of that is 1. Without `splits` there is no rule for a mesh.
    """

    @custom_vmap
    def call(*tree: Part) -> tuple[jax.Array, ...]:
        if not splits:
            return kernel(*tree)
        leaves, structure = jax.tree.flatten(tree)
        full = dict(b=leaves[0].shape[0], n=leaves[0].shape[2], k=leaves[1].shape[2])
        local = lambda _, *leaves: kernel(*jax.tree.unflatten(structure, leaves))  # noqa: E731
        return partitioned(local, leaves, _axis_names(tree), results, full)

    @call.def_vmap
    def rule(
        size: int, mapped: Tree, *tree: Part
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        if size == 0:
            return empty_batch(kernel, tree, tuple(mapped))
        if tree[0].pages is not None:
            mapped, tree = _one_pool(size, mapped, tree)
        folded = _fold_all(size, mapped, tree, copies_bias=of_bias)
        again = batched(kernel, results, of_bias=of_bias, splits=splits)
        out = again(*folded)
        out = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in out)
        if of_bias and tree[0].bias.shape[1 if mapped[0].bias else 0] == 1:
            out = tuple(x.sum(axis=1, keepdims=True) for x in out)
        return out, (True,) * len(out)

    return call


def _fold_all(size: int, mapped: Tree, tree: Tree, *, copies_bias: bool) -> Tree:
    """Fold the mapped axis of every array into its batch."""
    B = tree[0].query.shape[1 if mapped[0].query else 0]
    leaves, structure = jax.tree.flatten(tree)
    flags = jax.tree.leaves(mapped)
    bias, pairs = tree[0].bias, tree[0].pairs

    def shared(x: jax.Array) -> bool:
        """Say whether rows may share an array; the lists of tiles must all have as many rows."""
        if x is bias:
            return not copies_bias
        return x is pairs or B > 1  # what is small is copied

    folded = [
        _fold(x, flag, names, size, B, shared=shared(x))
        for x, flag, names in zip(leaves, flags, _axis_names(tree), strict=True)
    ]
    return jax.tree.unflatten(structure, folded)


def _one_pool(size: int, mapped: Tree, tree: Tree) -> tuple[Tree, Tree]:
    """Put mapped pools one after the other, so that a table names pages of all of them."""
    operands, flags = tree[0], mapped[0]
    fields = [f for f in ("key", "value", "k_scale", "v_scale") if getattr(operands, f) is not None]
    if not any(getattr(flags, field) for field in fields):
        return mapped, tree

    def every(x: jax.Array, is_mapped: bool) -> jax.Array:  # [V, ..]
        return x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))

    pools = {field: every(getattr(operands, field), getattr(flags, field)) for field in fields}
    first = jnp.arange(size, dtype=jnp.int32) * pools["key"].shape[1]
    pages = every(operands.pages, flags.pages) + first[:, None, None]
    pools = {field: x.reshape(-1, *x.shape[2:]) for field, x in pools.items()}
    flags = flags._replace(**dict.fromkeys(fields, False), pages=True)
    return (flags, *mapped[1:]), (operands._replace(**pools, pages=pages), *tree[1:])


def _fold(
    x: jax.Array, is_mapped: bool, names: AxisNames, size: int, B: int, *, shared: bool
) -> jax.Array:
    """Reshape [V, .., B or 1, ..] to [.., V B, ..]; a shared array may stay of size 1."""
    if "b" not in names:  # of pages
        return x
    axis = names.index("b")
    if not is_mapped:
        if x.shape[axis] == 1 and shared:
            return x
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    shape = (*x.shape[: axis + 1], B, *x.shape[axis + 2 :])
    x = jnp.moveaxis(jnp.broadcast_to(x, shape), 0, axis)
    return x.reshape(*x.shape[:axis], size * B, *x.shape[axis + 2 :])


def _axis_names(tree: Tree) -> list[AxisNames]:
    """Return the names of the axes of every leaf, in order."""
    operands = tree[0]
    vectors = [VECTORS] * len(operands.q_vectors + operands.k_vectors)
    optional = dict(pairs=TILES, bias=TILES, slopes=HEADS, sinks=HEADS, dropout=(None, "b", "n"))
    keys = KEYS if operands.pages is None else POOLS
    optional |= dict(k_scale=keys[:3], v_scale=keys[:3], pages=VECTORS)
    given = [names for field, names in optional.items() if getattr(operands, field) is not None]
    saved = [QUERIES, ROWS, ROWS, ROWS] * (len(tree) - 2)
    lists = [TILES, ROWS, ROWS]
    lists += [TILES] * (tree[1].visits is not None) + [ROWS] * (tree[1].rows is not None)
    lists += [ROWS] * (tree[1].visit_counts is not None)
    return [QUERIES, keys, keys, *vectors, *given, *lists, *saved]
