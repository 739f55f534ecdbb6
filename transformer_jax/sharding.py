"""Support for device meshes with explicit axes, the default of `jax.make_mesh`.

On explicit axes, the type of an array specifies how it is split, and an operation must specify the
split of its result unless its inputs determine it. This library specifies it only for the results
of its functions; inside, the compiler decides, as on automatic axes. On other meshes the functions
below do nothing.
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
    """Return the mesh with explicit axes that an array is on, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(trees))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def split(x: ArrayLike, axes: slice = slice(None), after: Iterable[Axis] = ()) -> PartitionSpec:
    """Return the PartitionSpec of some axes of an array, from its type, followed by `after`.

    Entries of `after` that repeat a mesh axis become None: an axis may split an array only once.
    """
    first = tuple(jax.typeof(x).sharding.spec)[axes]
    if not any(first):
        return PartitionSpec(*first, *after)
    used = {name for one in first for name in axis_names(one)}
    return PartitionSpec(*first, *(None if used & set(axis_names(one)) else one for one in after))


def split_rows(state: object) -> PartitionSpec:
    """Return how the rows of a state, the first axis of all its arrays, are split."""
    leaves = jax.tree.leaves(state)
    return split(leaves[0], slice(1)) if leaves else PartitionSpec()


def gathered(parameter: Gathered, x: jax.Array, axes: slice) -> Gathered:
    """Gather a parameter along the mesh axes that split these axes of `x`.

    If both are split over the same devices, like rows and parameters in "fsdp", the compiler could
    move the activations instead; gathering the parameter is cheaper. None stays None.
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
    """Return `function(*arguments)`, letting the compiler split it on explicit axes of a mesh.

    `results` is the tree, or prefix tree, of the PartitionSpecs of the results.
    """
    mesh = explicit_mesh(*arguments)
    if mesh is None:
        return function(*arguments)

    # without this, the compiler would choose a split for donated arrays that are on no mesh
    def place(x: jax.Array) -> jax.Array:
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.sharding.reshard(x, whole) if jax.typeof(x).sharding.mesh.empty else x

    wanted = jax.tree.map(lambda spec: NamedSharding(mesh, spec), results)
    automatic = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=wanted)
    return automatic(*jax.tree.map(place, arguments))


def axis_names(one: Axis) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a PartitionSpec."""
    return one if isinstance(one, tuple) else () if one is None else (one,)
