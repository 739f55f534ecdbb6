"""Support for device meshes with explicit axes, the default of `jax.make_mesh`.

On explicit axes, the type of an array specifies how it is split. An operation must specify the
split of its result unless its inputs determine it. This library specifies only how the results of
its functions are split. Inside the functions the compiler decides, as on automatic axes. On meshes
without explicit axes, the functions below do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from transformer_jax.kernels.sharding import no_mesh, vary
from transformer_jax.tracing import traced

Result = TypeVar("Result")
Gathered = TypeVar("Gathered", bound=jax.Array | None)
Axis = str | tuple[str, ...] | None
"""Mesh axes that split one axis of an array."""

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
    """Return the mesh of the arrays in these trees if it has explicit axes, otherwise None."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(trees))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def split(x: ArrayLike, axes: slice = slice(None), after: Iterable[Axis] = ()) -> PartitionSpec:
    """Return the PartitionSpec of these axes of an array, followed by the entries of `after`.

    An entry of `after` becomes None if it repeats a mesh axis, because a mesh axis can split an
    array only once.
    """
    first = tuple(jax.typeof(x).sharding.spec)[axes]
    if not any(first):
        return PartitionSpec(*first, *after)
    used = {name for one in first for name in axis_names(one)}
    return PartitionSpec(*first, *(None if used & set(axis_names(one)) else one for one in after))


def split_rows(state: object) -> PartitionSpec:
    """Return the PartitionSpec of a state's rows, which are the first axis of all its arrays."""
    leaves = jax.tree.leaves(state)
    return split(leaves[0], slice(1)) if leaves else PartitionSpec()


def gathered(parameter: Gathered, x: jax.Array, axes: slice) -> Gathered:
    """Gather a parameter along the mesh axes that split the given axes of `x`.

    If both arrays are split over the same devices, like rows and parameters in "fsdp", the compiler
    could move the activations instead, but gathering the parameter is cheaper. If `parameter` is
    None, the result is None.
    """
    if parameter is None or not jax.typeof(parameter).sharding.mesh.explicit_axes:
        return parameter
    mesh = jax.typeof(parameter).sharding.mesh
    used = {name for one in split(x, axes) for name in axis_names(one)}
    spec = split(parameter)
    kept = [[name for name in axis_names(one) if name not in used] for one in spec]
    wanted = PartitionSpec(*(one[0] if len(one) == 1 else tuple(one) or None for one in kept))
    return (
        parameter
        if wanted == spec
        else jax.sharding.reshard(parameter, NamedSharding(mesh, wanted))
    )


def by_compiler(
    function: Callable[..., Result], arguments: Sequence[object], results: object
) -> Result:
    """Return `function(*arguments)`, where the compiler decides how to split it on explicit axes.

    `results` is the tree of PartitionSpecs of the results, or a prefix of this tree.
    """
    mesh = explicit_mesh(*arguments)
    if mesh is None:
        return function(*arguments)

    # outside `jit`, arrays on no mesh need the devices of the mesh, which types do not have
    known = (getattr(x, "sharding", None) for x in jax.tree.leaves(arguments) if not traced(x))
    meshes = (one.mesh for one in known if isinstance(one, NamedSharding))
    whole = NamedSharding(next(meshes, mesh), PartitionSpec())

    # without this, the compiler would choose how to split donated arrays that are on no mesh
    def place(x: jax.Array) -> jax.Array:
        return jax.sharding.reshard(x, whole) if jax.typeof(x).sharding.mesh.empty else x

    wanted = jax.tree.map(lambda spec: NamedSharding(mesh, spec), results)
    automatic = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=wanted)
    return automatic(*jax.tree.map(place, arguments))


def axis_names(one: Axis) -> tuple[str, ...]:
    """Return the names of the mesh axes in one entry of a PartitionSpec."""
    return one if isinstance(one, tuple) else () if one is None else (one,)
