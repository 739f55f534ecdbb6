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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

Roles = tuple[str | None, ...]
"""What each axis is: "b" batch rows, "n" query heads, "k" key heads; of size 1 where shared. An
array without any is whole on every device, and as a result a sum over all of them."""

HEADS: Roles = ("b", "n")
QUERIES: Roles = ("b", None, "n", None)
KEYS: Roles = ("b", None, "k", None)
TILES: Roles = ("b", "n", None, None)

First = tuple[Any, Any]  # the batch row and the query head with which a part begins
Function = Callable[..., tuple[jax.Array, ...]]  # of First, and of arrays


@dataclass(frozen=True)
class Parts:
    """The axes of a mesh that split batch rows, query heads and key heads.

    More parts than key heads: each device computes on the one key head that its queries read.
    """

    mesh: Any
    full: dict[str, int]  # how many rows and heads there are, by role
    b: tuple[str, ...] = ()
    n: tuple[str, ...] = ()
    k: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: Any, spec: Any, full: dict[str, int]) -> Parts:
        """From how the query [B, T, N, H] is split; what does not divide evenly is not split."""
        given: list[tuple[str, ...]] = [(), (), (), ()]
        for i, names in enumerate(spec):
            given[i] = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        rows, heads = (math.prod(mesh.shape[name] for name in given[i]) for i in (0, 2))
        b = given[0] if full["b"] % rows == 0 else ()
        if full["k"] % heads == 0:
            return cls(mesh, full, b, given[2], given[2])
        divides = heads % full["k"] == 0 == full["n"] % heads
        return cls(mesh, full, b, given[2] if divides else ())

    def spec(self, shape: Sequence[int], roles: Roles) -> PartitionSpec:
        """How an array is split."""
        return PartitionSpec(
            *(
                getattr(self, role) or None
                if role is not None and size == self.full[role]
                else None
                for size, role in zip(shape, roles, strict=True)
            )
        )

    def summed(self, shape: Sequence[int], roles: Roles) -> tuple[str, ...]:
        """The mesh axes over whose devices a result is still to be summed."""
        if not any(roles):
            return self.b + self.n
        names = () if "k" not in roles or self.k else self.n
        for size, role in zip(shape, roles, strict=True):
            if role in ("b", "n") and size != self.full[role]:
                names = names + getattr(self, role)
        return names

    # On a device

    def first(self) -> First:
        """The row and the head with which this device's part begins."""
        return self._first(self.b, self.full["b"]), self._first(self.n, self.full["n"])

    def read(self, arrays: Sequence[jax.Array], roles: Sequence[Roles]) -> list[jax.Array]:
        """The arrays, of the key heads the one that is read here if this device holds them all."""
        at = self._key_head()
        return [
            x if at is None or r != KEYS else lax.dynamic_slice_in_dim(x, at, 1, 2)
            for x, r in zip(arrays, roles, strict=True)
        ]

    def write(self, arrays: Sequence[jax.Array], roles: Sequence[Roles]) -> list[jax.Array]:
        """The results, where one key head was read that one of all, and zeros."""
        at = self._key_head()
        return [
            x if at is None or r != KEYS else _one_of(x, at, self.full["k"])
            for x, r in zip(arrays, roles, strict=True)
        ]

    def _first(self, names: tuple[str, ...], size: int) -> Any:
        return lax.axis_index(names) * (size // self._number(names)) if names else 0

    def _key_head(self) -> jax.Array | None:
        """Which key head this device reads, if it holds all of them and reads one."""
        if self.n == self.k:
            return None
        return lax.axis_index(self.n) // (self._number(self.n) // self.full["k"])

    def _number(self, names: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[name] for name in names)


def _one_of(x: jax.Array, at: jax.Array, K: int) -> jax.Array:
    """[B, S, 1, d] as one head of [B, S, K, d], and zeros."""
    zeros = jnp.zeros((*x.shape[:2], K, x.shape[3]), x.dtype)
    return lax.dynamic_update_slice_in_dim(zeros, x, at, 2)


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
    if any(isinstance(x, jax.core.Tracer) for x in constants):
        return whole(*arrays)
    shapes = [x.shape for x in traced.out_avals]
    roles = [(None,) * jnp.ndim(x) for x in constants] + list(roles)
    arrays = [*constants, *arrays]

    def partition(mesh, arguments, _):
        parts = Parts.of(mesh, arguments[len(constants)].sharding.spec, full)

        def lower(*arrays):
            inner = parts.read(arrays, roles)[len(constants) :]
            out = parts.write(function(parts.first(), *inner), results)
            names = [parts.summed(*each) for each in zip(shapes, results, strict=True)]
            return tuple(lax.psum(x, n) if n else x for x, n in zip(out, names, strict=True))

        def place(shape, roles):
            return NamedSharding(mesh, parts.spec(shape, roles))

        found = tuple(map(place, shapes, results))
        return mesh, lower, found, tuple(place(x.shape, r) for x, r in zip(arguments, roles))  # noqa: B905

    def rule(mesh, *_):
        return _rule(mesh, [jnp.shape(x) for x in arrays], roles, shapes, results, full)

    @custom_partitioning
    def outlined(*arrays):
        given = ClosedJaxpr(traced.jaxpr, arrays[: len(constants)])
        return tuple(jaxpr_as_fun(given)(*arrays[len(constants) :]))

    outlined.def_partition(partition, sharding_rule=rule)
    return outlined(*arrays)


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


def fold(
    x: jax.Array, is_mapped: bool, roles: Roles, size: int, B: int, *, apart: bool = False
) -> jax.Array:
    """[V, .., B or 1, ..] to [.., V B, ..]; what all rows share stays of size 1, unless `apart`."""
    axis = roles.index("b")
    if not is_mapped:
        if x.shape[axis] == 1 and B > 1 and not apart:
            return x
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    shape = (*x.shape[: axis + 1], B, *x.shape[axis + 2 :])
    x = jnp.moveaxis(jnp.broadcast_to(x, shape), 0, axis)
    return x.reshape(*x.shape[:axis], size * B, *x.shape[axis + 2 :])


def no_rows(function: Callable[..., Any], tree: tuple[Any, ...], batched: tuple[Any, ...]) -> Any:
    """What a rule for `vmap` over an axis of length 0 returns."""

    def one(x, is_mapped):
        return jax.ShapeDtypeStruct(x.shape[1:] if is_mapped else x.shape, x.dtype)

    shapes = jax.eval_shape(function, *jax.tree.map(one, tree, batched))
    empty = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes)
    return empty, jax.tree.map(lambda _: True, shapes)
