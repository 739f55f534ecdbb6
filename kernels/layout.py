"""One kernel call under `vmap` and under a device mesh: which axis of each array means what.

A kernel is independent over batch rows and over key heads, so a mapped axis is folded into the
batch, and a mesh may split the batch and the heads: each device then runs the kernel on its own
part, and only what a whole array sums over (the gradient of a shared bias) is reduced. Nothing is
gathered, unless neither the parts divide the key heads nor the key heads the parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Roles = tuple[str | None, ...]
"""What each axis is: "b" batch rows, "n" query heads, "k" key heads; of size 1 where shared."""

VECTOR: Roles = ("b", None)
HEADS: Roles = ("b", "n")
ROWS: Roles = ("b", "n", None)
QUERIES: Roles = ("b", None, "n", None)
KEYS: Roles = ("b", None, "k", None)
TILES: Roles = ("b", "n", None, None)

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
        B = tree[0].query.shape[1 if batched[0].query else 0]
        leaves, structure = jax.tree.flatten(tree)
        flags = jax.tree.leaves(batched)
        folded = [
            _fold(x, flag, roles, size, B, apart=of_bias and x is tree[0].bias)
            for x, flag, roles in zip(leaves, flags, _roles(tree), strict=True)
        ]
        again = mapped(kernel, results, of_bias=of_bias, splits=splits)
        out = again(*jax.tree.unflatten(structure, folded))
        out = tuple(x.reshape(size, -1, *x.shape[1:]) for x in out)
        if of_bias and tree[0].bias.shape[1 if batched[0].bias else 0] == 1:
            out = tuple(x.sum(axis=1, keepdims=True) for x in out)
        return out, (True,) * len(out)

    return call


def _fold(x, is_mapped: bool, roles: Roles, size: int, B: int, *, apart: bool) -> jax.Array:
    """[V, .., B or 1, ..] to [.., V B, ..]; what all rows share stays of size 1, unless `apart`."""
    axis = roles.index("b")
    if not is_mapped:
        if x.shape[axis] == 1 and B > 1 and not apart:
            return x
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    shape = (*x.shape[: axis + 1], B, *x.shape[axis + 2 :])
    x = jnp.moveaxis(jnp.broadcast_to(x, shape), 0, axis)
    return x.reshape(*x.shape[:axis], size * B, *x.shape[axis + 2 :])


def _roles(tree: tuple[Any, ...]) -> list[Roles]:
    """The roles of the leaves of (Operands, Lists[, Saved]), in their order."""
    operands = tree[0]
    vectors = [VECTOR] * len(operands.q_vectors + operands.k_vectors)
    optional = dict(bias=TILES, slopes=HEADS, sinks=HEADS, dropout=(None, "b", "n"))
    given = [roles for name, roles in optional.items() if getattr(operands, name) is not None]
    saved = [QUERIES, ROWS, ROWS, ROWS] * (len(tree) - 2)
    return [QUERIES, KEYS, KEYS, *vectors, *given, TILES, ROWS, ROWS, *saved]


# A device mesh


def _split(kernel: Kernel, results: tuple[Roles, ...]) -> Kernel:
    """The kernel on each device's part of the batch and of the heads."""

    def call(*tree):
        leaves, structure = jax.tree.flatten(tree)
        roles = _roles(tree)
        full = dict(b=leaves[0].shape[0], n=leaves[0].shape[2], k=leaves[1].shape[2])

        def plain(*leaves):
            return kernel(*jax.tree.unflatten(structure, leaves))

        def partition(mesh, arguments, shapes):
            axes = _axes(mesh, arguments[0].sharding.spec, full)
            key_head = _key_head(mesh, axes, full)

            def place(x, roles):
                return NamedSharding(mesh, PartitionSpec(*_sharded(x.shape, roles, axes, full)))

            partial = [
                _partial(x.shape, r, axes, full) for x, r in zip(shapes, results, strict=True)
            ]

            def lower(*leaves):
                if key_head is not None:
                    leaves = tuple(
                        lax.dynamic_slice_in_dim(x, key_head(), 1, 2) if r == KEYS else x
                        for x, r in zip(leaves, roles, strict=True)
                    )
                out = plain(*leaves)
                if key_head is not None:
                    out = tuple(
                        _one_of(x, key_head(), full["k"]) if r == KEYS else x
                        for x, r in zip(out, results, strict=True)
                    )
                return tuple(
                    lax.psum(x, names) if names else x
                    for x, names in zip(out, partial, strict=True)
                )

            found = tuple(map(place, shapes, results))
            return mesh, lower, found, tuple(map(place, arguments, roles))

        outlined = custom_partitioning(plain)
        shapes = [x.shape for x in jax.eval_shape(plain, *leaves)]

        def rule(mesh, *_):
            return _rule(mesh, [x.shape for x in leaves], roles, shapes, results, full)

        outlined.def_partition(partition, sharding_rule=rule)
        return outlined(*leaves)

    return call


Axes = dict[str, tuple[str, ...]]  # the mesh axes that split batch rows, query heads and key heads


def _axes(mesh: Any, spec: Any, full: dict[str, int]) -> Axes:
    """From how the query [B, T, N, H] is split; what does not divide evenly is not split.

    More parts than key heads: each device computes on the one key head that its queries read.
    """
    given: list[tuple[str, ...]] = [(), (), (), ()]
    for i, names in enumerate(spec):
        given[i] = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    rows, heads = (math.prod(mesh.shape[name] for name in given[i]) for i in (0, 2))
    b = given[0] if full["b"] % rows == 0 else ()
    if full["k"] % heads == 0:
        return dict(b=b, n=given[2], k=given[2])
    return dict(b=b, n=given[2] if heads % full["k"] == 0 == full["n"] % heads else (), k=())


def _key_head(mesh: Any, axes: Axes, full: dict[str, int]) -> Callable[[], jax.Array] | None:
    """Which key head a device reads, if it holds all of them and reads one."""
    if axes["n"] == axes["k"]:
        return None
    parts = math.prod(mesh.shape[name] for name in axes["n"])
    return lambda: lax.axis_index(axes["n"]) // (parts // full["k"])


def _one_of(x: jax.Array, at: jax.Array, K: int) -> jax.Array:
    """[B, S, 1, d] as one head of [B, S, K, d], and zeros."""
    zeros = jnp.zeros((*x.shape[:2], K, x.shape[3]), x.dtype)
    return lax.dynamic_update_slice_in_dim(zeros, x, at, 2)


def _sharded(shape, roles: Roles, axes: Axes, full: dict[str, int]) -> list[tuple[str, ...] | None]:
    return [
        axes[role] or None if role is not None and size == full[role] else None
        for size, role in zip(shape, roles, strict=True)
    ]


def _partial(shape, roles: Roles, axes: Axes, full: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes over whose devices a result is still to be summed."""
    names = () if "k" not in roles or axes["k"] else axes["n"]
    for size, role in zip(shape, roles, strict=True):
        if role in ("b", "n") and size != full[role]:
            names = names + axes[role]
    return names


def _rule(mesh, shapes, roles, result_shapes, results, full) -> tuple[str, dict[str, int]]:
    """How a sharding spreads from array to array, as `custom_partitioning` writes it. Query heads
    spread to key heads where any axis of the mesh can split these."""
    group = full["n"] // full["k"]
    together = all(full["k"] % size == 0 for size in mesh.shape.values())
    heads = "n" if not together else "k" if group == 1 else "(k g)"
    names = dict(b="b", n=heads, k="k")
    fresh = itertools.count()

    def axis(size: int, role: str | None) -> str:
        return f"x{next(fresh)}" if role is None or size != full[role] else names[role]

    def array(shape, roles):
        return " ".join(axis(*each) for each in zip(shape, roles, strict=True))

    sides = [
        ", ".join(array(*each) for each in zip(*side, strict=True))
        for side in ((shapes, roles), (result_shapes, results))
    ]
    return " -> ".join(sides), dict(g=group) if heads == "(k g)" else {}
