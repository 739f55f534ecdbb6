"""Placement of a run's arrays.

Parameters and optimizer state are sharded, and batches are split by row.

The mesh axes are explicit, so this placement determines how every step is split (docs/meshes.md).
Matrices are split as follows:

    query, key, value [D, N, H]   up, gate [D, F]     inputs by fsdp, heads or width by tensor
    out [N, H, D]                 down [F, D]         heads or width by tensor, outputs by fsdp
    latent [D, C]                                     inputs by fsdp
    expert up, gate [E, D, F] and down [E, F, D]      like up, gate, and down; experts by expert
    token embedding tables [V, D]                     vocabulary by tensor, width by fsdp

Devices that split the tokens of a row, along "context", also split what "fsdp" splits. The
optimizer state of a parameter is split like the parameter. An array axis is replicated if its size
is not divisible by the number of devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from transformer_jax.config import ConfigError
from transformer_jax.config.mesh import MeshConfig
from transformer_jax.pytree import Array, PyTree, kernel_axes

T = TypeVar("T")

ROWS = ("expert", "data", "fsdp")
"""Mesh axes across which the rows of a batch are split."""

# Each pair of layers is split as in Megatron-LM (Shoeybi et al. 2019): the first by its outputs and
# the second by its inputs, so that "tensor" needs one sum per branch.
_KERNELS: dict[str, tuple[str | None, ...]] = {
    "query": ("fsdp", "tensor", None),
    "key": ("fsdp", "tensor", None),
    "value": ("fsdp", "tensor", None),
    "out": ("tensor", None, "fsdp"),
    "query_latent": ("fsdp", None),
    "latent": ("fsdp", None),
    "rotated_key": ("fsdp", None),
    "decay_latent": ("fsdp", None),
    "gate_latent": ("fsdp", None),
    "up": ("fsdp", "tensor"),
    "gate": ("fsdp", "tensor"),
    "input_gate": ("fsdp", "tensor"),
    "output_gate": ("fsdp", "tensor"),
    "down": ("tensor", "fsdp"),
}
"""Mesh axes across which each axis of a kernel is split, keyed by module name."""

_BIASES: dict[str, tuple[str | None, ...]] = {
    "query": ("tensor", None),
    "key": ("tensor", None),
    "value": ("tensor", None),
    "up": ("tensor",),
    "gate": ("tensor",),
    "input_gate": ("tensor",),
    "output_gate": ("tensor",),
}
"""Mesh axes across which each axis of a bias is split, keyed by module name."""

_TABLES: dict[str, tuple[str | None, ...]] = {
    "tokens": ("tensor", "fsdp"),
    "source_tokens": ("tensor", "fsdp"),
    "output": ("tensor", "fsdp"),
    "positions": (None, "fsdp"),
    "target_positions": (None, "fsdp"),
}
"""Mesh axes across which each axis of an embedding table is split, keyed by table name."""


def parameter_spec(
    names: tuple[str, ...],  # path of the array, such as ("decoder", "block_0", "out", "kernel")
    shape: tuple[int, ...],
    sizes: dict[str, int],  # size of each mesh axis
) -> PartitionSpec:
    """Return the partition spec for a parameter, or for an optimizer array with the same path."""
    # the row and column sums of Adafactor lack one of the parameter's axes
    if {"v_row", "v_col"} & set(names):
        return PartitionSpec()
    first = 1 if "blocks" in names else 0  # skip the layer axis of a scanned stack
    module = names[-2] if len(names) > 1 else ""
    wanted: tuple[str | None, ...] = ()
    if names[-1] == "kernel":
        matrix, _ = kernel_axes(names, len(shape))
        kernel = _KERNELS.get(module, ())
        if "feed_forward" not in names and module in ("gate", "beta", "decay"):
            kernel = _KERNELS["value"][: len(shape) - matrix]
        wanted = ("expert",) * (matrix - first) + kernel
    elif names[-1] == "bias" and module != "embed":
        wanted = _BIASES.get(module, ())
    elif module == "embed":
        wanted = _TABLES.get(names[-1], ())
    # Everything else is replicated: norms, and optimizer arrays without the parameter's rank, such
    # as Adafactor's placeholders.
    if len(wanted) != len(shape) - first:
        return PartitionSpec()

    def fitting(axis: str | None, size: int) -> str | tuple[str, ...] | None:
        if axis is None or size % sizes[axis]:
            return None
        context = sizes.get("context", 1)
        together = context > 1 and size % (sizes["fsdp"] * context) == 0
        return ("fsdp", "context") if axis == "fsdp" and together else axis

    axes = [fitting(axis, size) for axis, size in zip(wanted, shape[first:], strict=True)]
    return PartitionSpec(*(None,) * first, *axes)


@dataclass(frozen=True)
class Placement:
    """Placement of a run's arrays on one device or across a mesh."""

    mesh: Mesh | None = None

    def state(self, template: PyTree) -> PyTree:
        """Add a sharding to each shape. Without a mesh, return the shapes unchanged."""
        if self.mesh is None:
            return template
        mesh, sizes = self.mesh, dict(self.mesh.shape)

        def placed(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            names = tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
            spec = parameter_spec(names, leaf.shape, sizes)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree_util.tree_map_with_path(placed, template)

    def shardings(self, template: PyTree) -> PyTree:
        """Return the sharding of each array in a state, or a single None without a mesh."""
        if self.mesh is None:
            return None
        return jax.tree.map(lambda leaf: leaf.sharding, self.state(template))

    def rows(self, batch: T, axis: int) -> T:
        """Put a batch on the devices, split along its row axis."""
        if self.mesh is None:
            return jax.device_put(batch)
        return self._put(batch, PartitionSpec(*(None,) * axis, ROWS))

    def reader(self) -> tuple[int, int]:
        """Return (i, n) if this process reads part i of n of the rows of each batch.

        Processes whose devices split the same rows by tokens, heads or widths read the same part.
        """
        if self.mesh is None:
            return 0, 1
        count = math.prod(self.mesh.shape[axis] for axis in ROWS)
        rows: dict[int, set[int]] = {}
        sharding = NamedSharding(self.mesh, PartitionSpec(ROWS))
        devices: Any = sharding.devices_indices_map((count,))
        for device, (row,) in devices.items():
            rows.setdefault(device.process_index, set()).add(row.start or 0)
        parts = sorted({tuple(sorted(one)) for one in rows.values()})
        size = len(parts[0])
        if parts != [tuple(range(i * size, (i + 1) * size)) for i in range(len(parts))]:
            return 0, 1  # the parts are not equal stretches of rows: each process reads all rows
        return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)

    def rows_of_process(self, batch: T, axis: int) -> T:
        """Put a batch on the devices like `rows`, given only the rows of this `reader`."""
        if self.mesh is None:
            return jax.device_put(batch)
        _, readers = self.reader()
        sharding = NamedSharding(self.mesh, PartitionSpec(*(None,) * axis, ROWS))

        def put(x: np.ndarray) -> jax.Array:
            rows = x.shape[axis] * readers
            shape = (*x.shape[:axis], rows, *x.shape[axis + 1 :])
            # each process needs only its own part of the batch
            return jax.make_array_from_process_local_data(sharding, x, shape)

        return jax.tree.map(put, batch)

    def whole(self, tree: PyTree) -> PyTree:
        """Put arrays on the devices and replicate them."""
        return jax.device_put(tree) if self.mesh is None else self._put(tree, PartitionSpec())

    def _put(self, tree: PyTree, spec: PartitionSpec) -> PyTree:
        """Put arrays on the devices. Every process must have all of the arrays."""
        assert self.mesh is not None
        sharding = NamedSharding(self.mesh, spec)

        def put(x: Array) -> jax.Array:
            # JAX can move its own arrays between devices. From NumPy, each device copies only its
            # own part.
            if isinstance(x, jax.Array):
                return jax.device_put(x, sharding)
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(put, tree)

    def settled(self, tree: T) -> T:
        """Return the tree. On a CPU mesh, first wait until it has been computed.

        On CPUs, the collectives of two concurrent programs can deadlock.
        """
        if self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(tree)
        return tree

    def described(self) -> str:
        """Return a description of the run's devices, such as `cpu` or `8 x cpu: data=2, fsdp=4`."""
        device = jax.local_devices()[0]
        kind = "" if device.device_kind == device.platform else f" ({device.device_kind})"
        if self.mesh is None:
            return f"{device.platform}{kind}"
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items() if size > 1)
        return f"{self.mesh.size} x {device.platform}{kind}" + (f": {axes}" if axes else "")


def make_placement(config: MeshConfig | None) -> Placement:
    """Return the placement. Raises ConfigError unless the mesh uses all available devices."""
    if config is None:
        if jax.process_count() > 1:
            found = f"{jax.process_count()} processes with {len(jax.devices())} devices"
            raise ConfigError(f"mesh is None: {found} need a mesh, such as data=2")
        return Placement()
    available = len(jax.devices())
    if config.devices != available:
        found = "there is one" if available == 1 else f"there are {available}"
        raise ConfigError(f"mesh is {str(config)!r}: needs {config.devices} devices, but {found}")
    shape = config.shape
    # explicit axes make the sharding part of an array's type, so that modules can read it
    axes = (AxisType.Explicit,) * len(shape)
    return Placement(jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=axes))
