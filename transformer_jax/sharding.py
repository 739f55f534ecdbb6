"""Device meshes: axes that are explicit, as `jax.make_mesh` makes them, and `shard_map`.

On a mesh of explicit axes an array's type says how it is split, and an operation must say how its
result is, unless its inputs leave no choice. The functions of this library say it once, for their
results; inside, splitting is left to the compiler, as it is on a mesh of automatic axes. Elsewhere
nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from transformer_jax.kernels.sharding import no_mesh, vary

Result = TypeVar("Result")
Gathered = TypeVar("Gathered", bound=jax.Array | None)
Axis = str | tuple[str, ...] | None
"""The axes of a mesh that split one axis of an array."""

__all__ = [
    "Axis",
    "axis_names",
    "by_compiler",
    "explicit_mesh",
    "gathered",
    "no_mesh",
    "split",
    "split_rows",
    "vary",
]


def explicit_mesh(*trees: object) -> AbstractMesh | None:
    """Return the mesh of explicit axes that an array is on; None if all are elsewhere."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(trees))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def split(x: ArrayLike, axes: slice = slice(None), after: Iterable[Axis] = ()) -> PartitionSpec:
    """Return how some axes of an array are split, by its type, and after them those of `after`.

    No axis of a mesh splits an array twice: what the first have taken is left out of `after`.
    """
    first = tuple(jax.typeof(x).sharding.spec)[axes]
    if not any(first):
        return PartitionSpec(*first, *after)
    taken = {name for one in first for name in axis_names(one)}
    return PartitionSpec(*first, *(None if taken & set(axis_names(one)) else one for one in after))


def split_rows(state: object) -> PartitionSpec:
    """Return how the rows of a state are split, with which all of its arrays begin."""
    leaves = jax.tree.leaves(state)
    return split(leaves[0], slice(1)) if leaves else PartitionSpec()


def gathered(parameter: Gathered, x: jax.Array, axes: slice) -> Gathered:
    """Return a parameter whole along the axes of the mesh that split these axes of `x`, its rows.

    Where both are split over the same devices, as rows and parameters by "fsdp", the compiler might
    as well move the activations; of the two, the parameter is the one to gather. None stays None.
    """
    if parameter is None or not jax.typeof(parameter).sharding.mesh.explicit_axes:
        return parameter
    mesh = jax.typeof(parameter).sharding.mesh
    taken = {name for one in split(x, axes) for name in axis_names(one)}
    spec = split(parameter)
    kept = [[name for name in axis_names(one) if name not in taken] for one in spec]
    wanted = PartitionSpec(*(one[0] if len(one) == 1 else tuple(one) or None for one in kept))
    return (
        parameter
        if wanted == spec
        else jax.sharding.reshard(parameter, NamedSharding(mesh, wanted))
    )


def by_compiler(
    function: Callable[..., Result], arguments: Sequence[object], results: object
) -> Result:
    """Return `function(*arguments)`; on explicit axes of a mesh the compiler splits it.

    `results` is a tree of PartitionSpecs, or a prefix of one: how the results are split.
    """
    mesh = explicit_mesh(*arguments)
    if mesh is None:
        return function(*arguments)

    # without this the compiler would split an array that is nowhere, and donated, as it likes
    def placed(x: jax.Array) -> jax.Array:
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.sharding.reshard(x, whole) if jax.typeof(x).sharding.mesh.empty else x

    wanted = jax.tree.map(lambda spec: NamedSharding(mesh, spec), results)
    left = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=wanted)
    return left(*jax.tree.map(placed, arguments))


def axis_names(one: Axis) -> tuple[str, ...]:
    """Return the axes of a mesh that split one axis of an array."""
    return one if isinstance(one, tuple) else () if one is None else (one,)
