"""Place the arrays of a run on its devices: parameters and optimizer by parts, batches by rows.

The axes of the mesh are explicit: what is placed here decides how every step is split
(docs/meshes.md). A matrix [inputs, outputs] of a block is split

    query, key, value [D, N, H]   up, gate [D, F]     inputs by fsdp, heads or width by tensor
    out [N, H, D]                 down [F, D]         heads or width by tensor, outputs by fsdp
    of each expert up, gate [E, D, F] and down [E, F, D]: the same, and experts by expert
    tables of tokens [V, D]                           vocabulary by tensor, width by fsdp

and the optimizer's state as the parameter that it is of. An axis that its devices do not divide is
whole on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from transformer_jax.config import ConfigError
from transformer_jax.config.mesh import MeshConfig
from transformer_jax.pytree import Array, PyTree, kernel_axes

T = TypeVar("T")

ROWS = ("expert", "data", "fsdp")
"""The axes of a mesh that split the rows of a batch."""

_KERNELS: dict[str, tuple[str | None, ...]] = {
    "query": ("fsdp", "tensor", None),
    "key": ("fsdp", "tensor", None),
    "value": ("fsdp", "tensor", None),
    "out": ("tensor", None, "fsdp"),
    "up": ("fsdp", "tensor"),
    "gate": ("fsdp", "tensor"),
    "down": ("tensor", "fsdp"),
}
"""The axes of a mesh that split a module's kernel."""

_BIASES: dict[str, tuple[str | None, ...]] = {
    "query": ("tensor", None),
    "key": ("tensor", None),
    "value": ("tensor", None),
    "up": ("tensor",),
    "gate": ("tensor",),
}
"""The axes of a mesh that split a module's bias."""

_TABLES: dict[str, tuple[str | None, ...]] = {
    "tokens": ("tensor", "fsdp"),
    "source_tokens": ("tensor", "fsdp"),
    "output": ("tensor", "fsdp"),
    "positions": (None, "fsdp"),
    "target_positions": (None, "fsdp"),
}
"""The axes of a mesh that split a table of the embeddings."""


def parameter_spec(
    names: tuple[str, ...],  # the path of an array, as ("decoder", "block_0", "out", "kernel")
    shape: tuple[int, ...],
    sizes: dict[str, int],  # of the axes of the mesh
) -> PartitionSpec:
    """Return how a parameter is split, or an array of the optimizer with the same path."""
    # sums of rows have the path of their parameter, and not its axes
    if {"v_row", "v_col"} & set(names):  # Adafactor's, which lack an axis of their parameter
        return PartitionSpec()
    first = 1 if "blocks" in names else 0  # the layers of a scanned stack
    module = names[-2] if len(names) > 1 else ""
    wanted: tuple[str | None, ...] = ()
    if names[-1] == "kernel":
        matrix, _ = kernel_axes(names, len(shape))
        wanted = ("expert",) * (matrix - first) + _KERNELS.get(module, ())
    elif names[-1] == "bias" and module != "embed":
        wanted = _BIASES.get(module, ())
    elif module == "embed":
        wanted = _TABLES.get(names[-1], ())
    if len(wanted) != len(shape) - first:
        return PartitionSpec()
    axes = [
        axis if axis is not None and size % sizes[axis] == 0 else None
        for axis, size in zip(wanted, shape[first:], strict=True)
    ]
    return PartitionSpec(*(None,) * first, *axes)


@dataclass(frozen=True)
class Placement:
    """Say where the arrays of a run lie: on one device, or split over a mesh."""

    mesh: Mesh | None = None

    def state(self, template: PyTree) -> PyTree:
        """Return the tree of shapes with the sharding of each array; without a mesh, as it is."""
        if self.mesh is None:
            return template
        mesh, sizes = self.mesh, dict(self.mesh.shape)

        def placed(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            names = tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
            spec = parameter_spec(names, leaf.shape, sizes)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree_util.tree_map_with_path(placed, template)

    def shardings(self, template: PyTree) -> PyTree:
        """Return the sharding of each array of a state; without a mesh, None for all of them."""
        if self.mesh is None:
            return None
        return jax.tree.map(lambda leaf: leaf.sharding, self.state(template))

    def rows(self, batch: T, axis: int) -> T:
        """Return the arrays of a batch on the devices, split along the axis of its rows."""
        if self.mesh is None:
            return jax.device_put(batch)
        return self._put(batch, PartitionSpec(*(None,) * axis, ROWS))

    def own_rows(self, batch: T, axis: int) -> T:
        """Return `rows` of a batch of which this process holds its own alone, one P-th in order."""
        if self.mesh is None:
            return jax.device_put(batch)
        sharding = NamedSharding(self.mesh, PartitionSpec(*(None,) * axis, ROWS))

        def put(x: np.ndarray) -> jax.Array:
            rows = x.shape[axis] * jax.process_count()
            shape = (*x.shape[:axis], rows, *x.shape[axis + 1 :])
            # no process has to hold the batch of all
            return jax.make_array_from_process_local_data(sharding, x, shape)

        return jax.tree.map(put, batch)

    def whole(self, tree: PyTree) -> PyTree:
        """Return arrays on the devices, all of them on each."""
        return jax.device_put(tree) if self.mesh is None else self._put(tree, PartitionSpec())

    def _put(self, tree: PyTree, spec: PartitionSpec) -> PyTree:
        """Place arrays that every process holds whole."""
        assert self.mesh is not None
        sharding = NamedSharding(self.mesh, spec)

        def put(x: Array) -> jax.Array:
            if isinstance(x, jax.Array):
                return jax.device_put(x, sharding)
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(put, tree)

    def settled(self, tree: T) -> T:
        """Return arrays; of a mesh of CPU devices, once they are computed.

        There, two programs on their way at once can wait for each other's collectives for ever.
        """
        if self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(tree)
        return tree

    def described(self) -> str:
        """Return what a run is computed on, as `cpu` or `8 x cpu (data=2, fsdp=4)`."""
        device = jax.local_devices()[0]
        kind = "" if device.device_kind == device.platform else f" ({device.device_kind})"
        if self.mesh is None:
            return f"{device.platform}{kind}"
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items() if size > 1)
        return f"{self.mesh.size} x {device.platform}{kind}" + (f": {axes}" if axes else "")


def make_placement(config: MeshConfig | None) -> Placement:
    """Return the placement on the devices that there are.

    ConfigError unless the mesh has as many devices as there are.
    """
    if config is None:
        if jax.process_count() > 1:
            rule = f"there are {jax.process_count()} processes with {len(jax.devices())} devices"
            raise ConfigError(f"mesh is None: {rule}, which it has to share out, as data=2")
        return Placement()
    there = len(jax.devices())
    if config.devices != there:
        found = "there is one" if there == 1 else f"there are {there}"
        raise ConfigError(f"mesh is {str(config)!r}: needs {config.devices} devices, {found}")
    shape = config.shape
    # the type of an array then says how it is split, and modules can ask it
    axes = (AxisType.Explicit,) * len(shape)
    return Placement(jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=axes))
