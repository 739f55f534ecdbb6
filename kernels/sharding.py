"""A function of arrays on each device's part of batch rows and heads: which axis of each array
means what, and which axes of a mesh split it.

What a function computes of one batch row and one key head it computes of that alone. So every
device computes its own part, and only what a whole array sums over (the gradient of a shared bias)
is reduced. Nothing is gathered, unless neither the parts divide the key heads nor the key heads the
parts.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from transformer_jax.kernels.contract import no_mesh

Roles = tuple[str | None, ...]
"""What each axis is: "b" batch rows, "n" query heads, "k" key heads; of size 1 where shared. Other
names are of axes that are all independent, as those of `vmap` are. An array without rows and heads
is whole on every device, and as a result a sum over all of them."""

HEADS: Roles = ("b", "n")
QUERIES: Roles = ("b", None, "n", None)
KEYS: Roles = ("b", None, "k", None)
TILES: Roles = ("b", "n", None, None)

First = tuple[Any, Any]  # the batch row and the query head with which a part begins
Function = Callable[..., tuple[jax.Array, ...]]  # of First, and of arrays


@dataclass(frozen=True)
class Parts:
    """The axes of a mesh that split batch rows, query heads and key heads: of those that split
    query heads the first ones, as many as the key heads allow.

    Where others are left, each device computes on the one key head that its queries read.
    """

    mesh: Any
    full: dict[str, int]  # how many rows and heads there are, by role
    axes: dict[str, tuple[str, ...]]  # by role

    @classmethod
    def of(
        cls, mesh: Any, specs: Sequence[Any], roles: Sequence[Roles], full: dict[str, int]
    ) -> Parts:
        """From how arrays are split, of which the first that has a role decides, the query first;
        what does not divide evenly is not split."""
        axes: dict[str, tuple[str, ...]] = {}
        for spec, given in zip(specs, roles, strict=True):
            for names, role in zip(spec, given, strict=False):
                if role is not None and role != "k" and role not in axes:
                    axes[role] = _names(names)
        taken: set[str] = set()
        for role, names in axes.items():
            number = math.prod(mesh.shape[name] for name in names)
            if role == "n" and full["k"] % number and number % full["k"]:
                names = ()
            axes[role] = names = names if not taken & {*names} and full[role] % number == 0 else ()
            taken |= {*names}
        sizes = itertools.accumulate((mesh.shape[name] for name in axes["n"]), operator.mul)
        of_keys = sum(full["k"] % size == 0 for size in sizes)
        return cls(mesh, full, axes | dict(k=axes["n"][:of_keys]))

    def spec(self, shape: Sequence[int], roles: Roles) -> PartitionSpec:
        """How an array is split."""
        return PartitionSpec(
            *(
                self.axes[role] or None if role is not None and size == self.full[role] else None
                for size, role in zip(shape, roles, strict=True)
            )
        )

    def summed(self, shape: Sequence[int], roles: Roles) -> tuple[str, ...]:
        """The mesh axes over whose devices a result is still to be summed."""
        if not {"b", "n", "k"} & {*roles}:
            return self.axes["b"] + self.axes["n"]
        names = self._beyond_keys() if "k" in roles else ()
        for size, role in zip(shape, roles, strict=True):
            if role in ("b", "n") and size != self.full[role]:
                names = names + self.axes[role]
        return names

    # On a device

    def first(self) -> First:
        """The row and the head with which this device's part begins."""
        return self._first("b"), self._first("n")

    def read(self, arrays: Sequence[jax.Array], roles: Sequence[Roles]) -> list[jax.Array]:
        """The arrays, of the key heads the one that is read here if this device holds them all."""
        return self._of_key_heads(lax.dynamic_slice_in_dim, arrays, roles, 1)

    def write(self, arrays: Sequence[jax.Array], roles: Sequence[Roles]) -> list[jax.Array]:
        """The results, where one key head was read that one of all, and zeros."""
        return self._of_key_heads(_one_of, arrays, roles, self.full["k"] // self._number("k"))

    def _of_key_heads(self, change, arrays, roles, number: int) -> list[jax.Array]:
        beyond = self._beyond_keys()
        if not beyond:
            return list(arrays)
        at = lax.axis_index(beyond) // (self._number("n") // self.full["k"])
        return [
            change(x, at, number, r.index("k")) if "k" in r else x
            for x, r in zip(arrays, roles, strict=True)
        ]

    def _beyond_keys(self) -> tuple[str, ...]:
        """The axes that split query heads and not key heads."""
        return self.axes["n"][len(self.axes["k"]) :]

    def _first(self, role: str) -> Any:
        names = self.axes[role]
        return lax.axis_index(names) * (self.full[role] // self._number(role)) if names else 0

    def _number(self, role: str) -> int:
        return math.prod(self.mesh.shape[name] for name in self.axes[role])


def _names(one: Any) -> tuple[str, ...]:
    """The axes of a mesh that split one axis of an array."""
    return () if one is None else (one,) if isinstance(one, str) else tuple(one)


def _one_of(x: jax.Array, at: jax.Array, number: int, axis: int) -> jax.Array:
    """What is one head as one of so many, and zeros."""
    zeros = jnp.zeros((*x.shape[:axis], number, *x.shape[axis + 1 :]), x.dtype)
    return lax.dynamic_update_slice_in_dim(zeros, x, at, axis)


def partitioned(
    function: Function,
    arrays: Sequence[jax.Array],  # the first is the query
    roles: Sequence[Roles],
    results: Sequence[Roles],
    full: dict[str, int],
) -> tuple[jax.Array, ...]:
    """`function((0, 0), *arrays)`, which the compiler splits as it has split the query: it sees one
    operation, with a rule of how its operands and results lie together."""

    def whole(*arrays):
        return function((0, 0), *arrays)

    traced = jax.make_jaxpr(whole)(*arrays)
    constants = tuple(traced.consts)  # an operation may have none: they are operands, unused
    is_closed = not any(isinstance(x, jax.core.Tracer) for x in constants)
    config: Any = jax.config  # whose fields are not declared
    if not is_closed or not getattr(config, "jax_use_shardy_partitioner", True):
        return whole(*arrays)
    shapes = [x.shape for x in traced.out_avals]
    roles = [(None,) * jnp.ndim(x) for x in constants] + list(roles)
    arrays = [*constants, *arrays]
    precision = config.jax_default_matmul_precision

    def partition(mesh, arguments, _):
        given = arguments[len(constants) :]
        if mesh.empty:
            mesh = Mesh([*_places(given[0].sharding, given[0].ndim)], "devices")
        specs = [_spec(mesh, x.sharding, x.ndim) for x in given]
        parts = Parts.of(mesh, specs, roles[len(constants) :], full)

        def lower(*arrays):  # maybe in another thread, which has not the caller's precision
            with jax.default_matmul_precision(precision), no_mesh():
                inner = parts.read(arrays, roles)[len(constants) :]
                out = parts.write(function(parts.first(), *inner), results)
                names = [parts.summed(*each) for each in zip(shapes, results, strict=True)]
                return tuple(lax.psum(x, n) if n else x for x, n in zip(out, names, strict=True))

        def place(shape, roles):
            return NamedSharding(mesh, parts.spec(shape, roles))

        found = tuple(map(place, shapes, results))
        given = tuple(place(x.shape, r) for x, r in zip(arguments, roles, strict=True))
        return mesh, lower, found, given

    def rule(mesh, *_):
        return _rule(mesh, [jnp.shape(x) for x in arrays], roles, shapes, results, full)

    @custom_partitioning
    def outlined(*arrays):
        given = ClosedJaxpr(traced.jaxpr, arrays[: len(constants)])
        return tuple(jaxpr_as_fun(given)(*arrays[len(constants) :]))

    # jax decodes a sharding into whole axes of a mesh or raises
    outlined.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return outlined(*arrays)


def _places(sharding: Sharding, ndim: int) -> dict[Any, Any]:
    """What each device holds of an array whose axes are as long as there are devices: of another,
    which a compiler may have split unevenly, it could not be asked."""
    return dict(sharding.devices_indices_map((len(sharding.device_set),) * ndim))


def _spec(mesh: Mesh, sharding: Sharding, ndim: int) -> list[tuple[str, ...]]:
    """Which axes of a mesh split each axis of an array, the slowest first; also where only a part
    of one does, as where a compiler splits four heads over eight devices."""
    places = _places(sharding, ndim)

    def of_axis(axis: int) -> tuple[str, ...]:
        first = [places[device][axis].start or 0 for device in mesh.devices.flat]
        starts = np.reshape(first, mesh.devices.shape)
        steps = {  # from one device to the next along each axis of the mesh
            name: np.diff(starts, axis=at).max(initial=0) for at, name in enumerate(mesh.axis_names)
        }
        return tuple(sorted(filter(steps.get, steps), key=steps.__getitem__, reverse=True))

    return [of_axis(axis) for axis in range(ndim)]


def _rule(mesh, shapes, roles, result_shapes, results, full) -> tuple[str, dict[str, int]]:
    """How a sharding spreads from array to array, as `custom_partitioning` writes it. Query heads
    spread to key heads where any axis of the mesh can split these."""
    group = full["n"] // full["k"]
    together = all(full["k"] % size == 0 for size in mesh.shape.values())
    heads = "n" if not together else "k" if group == 1 else "(k g)"
    names = {role: role for role in full} | dict(n=heads)
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


def no_rows(function: Callable[..., Any], tree: tuple[Any, ...], batched: tuple[Any, ...]) -> Any:
    """What a rule for `vmap` over an axis of length 0 returns."""

    def one(x, is_mapped):
        return jax.ShapeDtypeStruct(x.shape[1:] if is_mapped else x.shape, x.dtype)

    shapes = jax.eval_shape(function, *jax.tree.map(one, tree, batched))
    empty = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes)
    return empty, jax.tree.map(lambda _: True, shapes)
