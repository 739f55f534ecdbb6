"""Split attention over devices and over `vmap`, by its batch rows and heads.

A function here computes each batch row and key head independently of all others. So every device
computes its own part, and only what a whole array sums over (the gradient of a shared bias) is
reduced. Nothing is gathered, unless neither the parts divide the key heads nor the key heads the
parts. For that, this file says what each axis of an array means (`AxisNames`) and which axes of a
mesh split it (`Parts`).

    partitioned   the compiler splits a function, as it has split the query
    by_types      types split it, on a mesh of explicit axes
    over_devices  `partitioned` with a rule for `vmap`, whose axis is one more that a mesh may split
    batched       the same for a kernel, which gets the axis of `vmap` as more batch rows
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

Tree = TypeVar("Tree")
AxisNames = tuple[str | None, ...]
"""The names of an array's axes: "b" batch rows, "n" query heads, "k" key heads; size 1 is shared.
Other names are of axes that are all independent, as those of `vmap` are. An array without rows and
heads is whole on every device, and as a result a sum over all of them."""

HEADS: AxisNames = ("b", "n")
QUERIES: AxisNames = ("b", None, "n", None)
KEYS: AxisNames = ("b", None, "k", None)
POOLS: AxisNames = (None, None, "k", None)
TILES: AxisNames = ("b", "n", None, None)
VECTORS: AxisNames = ("b", None)
ROWS: AxisNames = ("b", "n", None)

Spec = Sequence[str | Sequence[str] | None] | PartitionSpec
"""For each axis of an array the axes of a mesh that split it, or None."""
First = tuple[jax.Array | int, jax.Array | int]
"""The batch row and the query head with which a part begins."""
Function = Callable[..., tuple[jax.Array, ...]]  # of First, and of arrays
KernelCall = Callable[..., tuple[jax.Array, ...]]  # of Operands, TileLists and perhaps Saved
Part = Any
"""`Operands`, `TileLists` or `Saved`, of arrays or of what stands for one: a bool, an axis."""
Arguments = tuple[Part, ...]


@dataclass(frozen=True)
class Parts:
    """The axes of a mesh that split batch rows, query heads and key heads.

    Key heads are split by the first of the axes that split query heads, by as many as divide them.
    Where others are left, each device computes on the one key head that its queries read.
    """

    mesh: Mesh | AbstractMesh
    full: dict[str, int]  # how many rows and heads there are, by name
    axes: dict[str, tuple[str, ...]]  # of the mesh, by name

    @classmethod
    def of(
        cls,
        mesh: Mesh | AbstractMesh,
        specs: Sequence[Spec],
        names: Sequence[AxisNames],
        full: dict[str, int],
    ) -> Parts:
        """Choose the parts by how arrays are split, the query first.

        The first array that has an axis of a name decides for it. What does not divide evenly is
        not split.
        """
        axes: dict[str, tuple[str, ...]] = {}
        for spec, array_names in zip(specs, names, strict=True):
            for splitting, name in zip(spec, array_names, strict=False):
                if name is not None and name != "k" and name not in axes:
                    axes[name] = _mesh_axes(splitting)
        # one axis of a mesh cannot split both rows and heads
        taken: set[str] = set()
        for name, splitting in axes.items():
            number = math.prod(mesh.shape[axis] for axis in splitting)
            fits = full[name] % number == 0 and not taken & {*splitting}
            # a device's queries must be of whole key heads, or of parts of a single one
            if name == "n" and full["k"] % number and number % full["k"]:
                fits = False
            axes[name] = splitting if fits else ()
            taken |= {*axes[name]}
        # key heads are split by the first of those axes, as far as they divide them
        sizes = itertools.accumulate((mesh.shape[axis] for axis in axes["n"]), operator.mul)
        of_keys = sum(full["k"] % size == 0 for size in sizes)
        return cls(mesh, full, axes | dict(k=axes["n"][:of_keys]))

    def spec(self, shape: Sequence[int], names: AxisNames) -> PartitionSpec:
        """Return how an array is split."""
        return PartitionSpec(
            *(
                self.axes[name] or None if name is not None and size == self.full[name] else None
                for size, name in zip(shape, names, strict=True)
            )
        )

    def summed(self, shape: Sequence[int], names: AxisNames) -> tuple[str, ...]:
        """Return the mesh axes over whose devices a result is still to be summed."""
        if not {"b", "n", "k"} & {*names}:
            return self.axes["b"] + self.axes["n"]
        # devices that read one key head have each a part of its gradient
        axes = self._beyond_keys() if "k" in names else ()
        for size, name in zip(shape, names, strict=True):
            if name in ("b", "n") and size != self.full[name]:
                axes = axes + self.axes[name]
        return axes

    # On a device

    def first(self) -> First:
        """Return the row and the head with which this device's part begins."""
        return self._first("b"), self._first("n")

    def read(self, arrays: Sequence[jax.Array], names: Sequence[AxisNames]) -> list[jax.Array]:
        """Return the arrays with the one key head that is read here, if a device holds them all."""
        return self._change_keys(lax.dynamic_slice_in_dim, arrays, names, 1)

    def write(self, arrays: Sequence[jax.Array], names: Sequence[AxisNames]) -> list[jax.Array]:
        """Return the results with all key heads, zeros in those that were not read here."""
        return self._change_keys(_embed, arrays, names, self.full["k"] // self._number("k"))

    def _change_keys(
        self,
        change: Callable[[jax.Array, jax.Array, int, int], jax.Array],
        arrays: Sequence[jax.Array],
        names: Sequence[AxisNames],
        number: int,
    ) -> list[jax.Array]:
        beyond = self._beyond_keys()
        if not beyond:
            return list(arrays)
        # which of the key heads that a device holds its query heads read
        at = lax.axis_index(beyond) // (self._number("n") // self.full["k"])
        return [
            change(x, at, number, own.index("k")) if "k" in own else x
            for x, own in zip(arrays, names, strict=True)
        ]

    def _beyond_keys(self) -> tuple[str, ...]:
        """Return the mesh axes that split query heads and not key heads."""
        return self.axes["n"][len(self.axes["k"]) :]

    def _first(self, name: str) -> jax.Array | int:
        axes = self.axes[name]
        return lax.axis_index(axes) * (self.full[name] // self._number(name)) if axes else 0

    def _number(self, name: str) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes[name])


def _mesh_axes(one: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the axes of a mesh that split one axis of an array."""
    return () if one is None else (one,) if isinstance(one, str) else tuple(one)


def _embed(x: jax.Array, at: jax.Array, number: int, axis: int) -> jax.Array:
    """Put one head among so many, the others zeros."""
    zeros = jnp.zeros((*x.shape[:axis], number, *x.shape[axis + 1 :]), x.dtype)
    return lax.dynamic_update_slice_in_dim(zeros, x, at, axis)


def partitioned(
    function: Function,
    arrays: Sequence[jax.Array],  # the first is the query
    names: Sequence[AxisNames],
    results: Sequence[AxisNames],
    full: dict[str, int],
) -> tuple[jax.Array, ...]:
    """Return `function((0, 0), *arrays)`, which the compiler splits as it has split the query.

    The compiler sees one operation, with a rule of how its operands and results lie together.
    """
    # traced here, because `custom_partitioning` cannot have constants and does not tell its shapes
    whole = functools.partial(function, (0, 0))
    traced = jax.make_jaxpr(whole)(*arrays)
    # an operation may have no constants: they become operands
    constants = tuple(traced.consts)
    is_closed = not any(isinstance(x, jax.core.Tracer) for x in constants)
    # JAX does not declare its fields
    config: Any = jax.config
    if not is_closed or not getattr(config, "jax_use_shardy_partitioner", True):
        return whole(*arrays)
    shapes = [x.shape for x in traced.out_avals]
    names = [(None,) * jnp.ndim(x) for x in constants] + list(names)
    arrays = [*constants, *arrays]
    precision = config.jax_default_matmul_precision

    def partition(
        mesh: Mesh, arguments: tuple[jax.ShapeDtypeStruct, ...], _: object
    ) -> tuple[Mesh, Function, tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        own = arguments[len(constants) :]
        # a sharding of XLA's without a mesh: all devices are one axis
        if mesh.empty:
            mesh = Mesh([*_slices(own[0].sharding, own[0].ndim)], "devices")
        specs = [_spec(mesh, x.sharding, x.ndim) for x in own]
        parts = Parts.of(mesh, specs, names[len(constants) :], full)

        def lower(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            # maybe in another thread, which has not the caller's precision
            with jax.default_matmul_precision(precision), no_mesh():
                inner = parts.read(arrays, names)[len(constants) :]
                out = parts.write(function(parts.first(), *inner), results)
                axes = [parts.summed(*each) for each in zip(shapes, results, strict=True)]
                return tuple(lax.psum(x, n) if n else x for x, n in zip(out, axes, strict=True))

        def sharding(shape: tuple[int, ...], names: AxisNames) -> NamedSharding:
            return NamedSharding(mesh, parts.spec(shape, names))

        found = tuple(map(sharding, shapes, results))
        given = tuple(sharding(x.shape, axes) for x, axes in zip(arguments, names, strict=True))
        return mesh, lower, found, given

    def rule(mesh: Mesh | AbstractMesh, *_: object) -> tuple[str, dict[str, int]]:
        return _rule(mesh, [jnp.shape(x) for x in arrays], names, shapes, results, full)

    @custom_partitioning
    def outlined(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = ClosedJaxpr(traced.jaxpr, arrays[: len(constants)])
        return tuple(jaxpr_as_fun(given)(*arrays[len(constants) :]))

    # jax decodes a sharding into whole axes of a mesh or raises
    outlined.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return outlined(*arrays)


def _slices(sharding: Sharding, ndim: int) -> dict[jax.Device, tuple[slice, ...]]:
    """Return what each device holds of an array whose axes are as long as there are devices."""
    # of an array that a compiler has split unevenly, a sharding could not be asked
    return dict(sharding.devices_indices_map((len(sharding.device_set),) * ndim))


def _spec(mesh: Mesh, sharding: Sharding, ndim: int) -> list[tuple[str, ...]]:
    """Return which axes of a mesh split each axis of an array, the slowest first."""
    # by where each device's part begins: a compiler may split four heads over eight devices, by a
    # part of a mesh axis, which no PartitionSpec can say
    slices = _slices(sharding, ndim)

    def of_axis(axis: int) -> tuple[str, ...]:
        first = [slices[device][axis].start or 0 for device in mesh.devices.flat]
        starts = np.reshape(first, mesh.devices.shape)
        steps = {  # from one device to the next along each axis of the mesh
            name: np.diff(starts, axis=at).max(initial=0) for at, name in enumerate(mesh.axis_names)
        }
        return tuple(sorted(filter(steps.get, steps), key=steps.__getitem__, reverse=True))

    return [of_axis(axis) for axis in range(ndim)]


def _rule(
    mesh: Mesh | AbstractMesh,
    shapes: Sequence[tuple[int, ...]],
    names: Sequence[AxisNames],
    result_shapes: Sequence[tuple[int, ...]],
    results: Sequence[AxisNames],
    full: dict[str, int],
) -> tuple[str, dict[str, int]]:
    """Return how a sharding spreads from array to array, as `custom_partitioning` writes it.

    Query heads spread to key heads where any axis of the mesh can split these.
    """
    # "(k g)" lets a split of query heads spread to key heads, if any axis of the mesh divides these
    group = full["n"] // full["k"]
    together = all(full["k"] % size == 0 for size in mesh.shape.values())
    heads = "n" if not together else "k" if group == 1 else "(k g)"
    factors = {name: name for name in full} | dict(n=heads)
    fresh = itertools.count()

    def axis(size: int, name: str | None) -> str:
        return f"x{next(fresh)}" if name is None or size != full[name] else factors[name]

    def array(shape: tuple[int, ...], names: AxisNames) -> str:
        return " ".join(axis(*each) for each in zip(shape, names, strict=True))

    sides = [
        ", ".join(array(*each) for each in zip(*side, strict=True))
        for side in ((shapes, names), (result_shapes, results))
    ]
    return " -> ".join(sides), dict(g=group) if heads == "(k g)" else {}


def by_types(
    function: Function,
    arrays: Sequence[jax.Array],
    names: Sequence[AxisNames],
    shapes: Sequence[tuple[int, ...]],
    results: Sequence[AxisNames],
    parts: Parts,
    wanted: PartitionSpec,
) -> tuple[jax.Array, ...]:
    """Return `function(first, *arrays)` of each device's part, with results split as `wanted`."""
    dtypes = [x.dtype for x in arrays]

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        varied = vary(arrays, parts.first())  # here gradients are added up: before rounding
        given = [x.astype(dtype) for x, dtype in zip(varied, dtypes, strict=True)]
        return function(parts.first(), *parts.read(given, names))

    def placed(x: jax.Array, names: AxisNames) -> jax.Array:
        if parts.summed(x.shape, names) and x.dtype in (jnp.bfloat16, jnp.float16):
            # so that gradients, which are added up, are float32 too
            x = x.astype(jnp.float32)
        return jax.sharding.reshard(x, NamedSharding(parts.mesh, parts.spec(x.shape, names)))

    found = jax.shard_map(
        local,
        mesh=parts.mesh,
        in_specs=tuple(parts.spec(x.shape, n) for x, n in zip(arrays, names, strict=True)),
        out_specs=tuple(parts.spec(*each) for each in zip(shapes, results, strict=True)),
    )(*map(placed, arrays, names))
    sharding = NamedSharding(parts.mesh, wanted)
    return tuple(jax.sharding.reshard(x, sharding) for x in found)


# `vmap`


def over_devices(
    function: Function,
    names: Sequence[AxisNames],
    results: Sequence[AxisNames],
    full: Mapping[str, int],
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return `partitioned` of a function, of arrays, with a rule for `vmap` too."""

    @custom_vmap
    def call(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return partitioned(function, leaves, names, results, dict(full))

    @call.def_vmap
    def rule(
        size: int, batched: Sequence[bool], *leaves: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        axes = tuple(0 if is_mapped else None for is_mapped in batched)
        # a `vmap` over no calls; no kernel takes an axis of length 0
        if size == 0:
            return empty_batch(functools.partial(function, (0, 0)), leaves, tuple(batched))
        name = f"v{len(full)}"  # a new one

        def mapped(first: First, *leaves: jax.Array) -> tuple[jax.Array, ...]:
            return jax.vmap(functools.partial(function, first), axes)(*leaves)

        given = [(name, *n) if f else n for n, f in zip(names, batched, strict=True)]
        again = over_devices(mapped, given, [(name, *n) for n in results], {**full, name: size})
        return again(*leaves), (True,) * len(results)

    return call


def batched(
    kernel: KernelCall,
    results: tuple[AxisNames, ...],
    *,
    of_bias: bool = False,
    splits: bool = True,
) -> KernelCall:
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
        size: int, mapped: Arguments, *tree: Part
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        if size == 0:
            return empty_batch(kernel, tree, tuple(mapped))
        if tree[0].pages is not None:
            mapped, tree = _one_pool(size, mapped, tree)
        folded = _folded(size, mapped, tree, copies_bias=of_bias)
        out = batched(kernel, results, of_bias=of_bias, splits=splits)(*folded)
        out = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in out)
        # each call had its own copy of the bias for every row: its gradient sums over them
        if of_bias and tree[0].bias.shape[1 if mapped[0].bias else 0] == 1:
            out = tuple(x.sum(axis=1, keepdims=True) for x in out)
        return out, (True,) * len(out)

    return call


def _folded(size: int, mapped: Arguments, tree: Arguments, *, copies_bias: bool) -> Arguments:
    """Fold the mapped axis of every array into its batch: [V, .., B or 1, ..] to [.., V B, ..]."""
    B = tree[0].query.shape[1 if mapped[0].query else 0]
    bias, pairs = tree[0].bias, tree[0].pairs

    def shared(x: jax.Array) -> bool:
        """Whether rows may share an array; the lists of tiles must all have as many rows."""
        if x is bias:
            return not copies_bias
        # what is small is copied
        return x is pairs or B > 1

    def fold(x: jax.Array, is_mapped: bool, names: AxisNames) -> jax.Array:
        if "b" not in names:  # of pages
            return x
        axis = names.index("b")
        if not is_mapped:
            if x.shape[axis] == 1 and shared(x):
                return x
            x = jnp.broadcast_to(x[None], (size, *x.shape))
        shape = (*x.shape[: axis + 1], B, *x.shape[axis + 2 :])
        # the rows of each call stay next to each other
        x = jnp.moveaxis(jnp.broadcast_to(x, shape), 0, axis)
        return x.reshape(*x.shape[:axis], size * B, *x.shape[axis + 2 :])

    leaves, structure = jax.tree.flatten(tree)
    folded = map(fold, leaves, jax.tree.leaves(mapped), _axis_names(tree))
    return jax.tree.unflatten(structure, folded)


def _one_pool(size: int, mapped: Arguments, tree: Arguments) -> tuple[Arguments, Arguments]:
    """Put mapped pools one after the other, so that a table names pages of all of them."""
    operands, flags = tree[0], mapped[0]
    fields = [f for f in ("key", "value", "k_scale", "v_scale") if getattr(operands, f) is not None]
    if not any(getattr(flags, field) for field in fields):
        return mapped, tree

    def every(x: jax.Array, is_mapped: bool) -> jax.Array:  # [V, ..]
        return x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))

    # even pools that are not mapped are copied for each call: a table names pages of one pool
    pools = {field: every(getattr(operands, field), getattr(flags, field)) for field in fields}
    first = jnp.arange(size, dtype=jnp.int32) * pools["key"].shape[1]
    pages = every(operands.pages, flags.pages) + first[:, None, None]
    pools = {field: x.reshape(-1, *x.shape[2:]) for field, x in pools.items()}
    flags = flags._replace(**dict.fromkeys(fields, False), pages=True)
    return (flags, *mapped[1:]), (operands._replace(**pools, pages=pages), *tree[1:])


def _axis_names(tree: Arguments) -> list[AxisNames]:
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


def empty_batch(
    function: Callable[..., Tree], tree: tuple[object, ...], mapped: tuple[object, ...]
) -> tuple[Tree, tuple[bool, ...]]:
    """Return what a rule for `vmap` over an axis of length 0 returns."""

    def one(x: jax.Array, is_mapped: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:] if is_mapped else x.shape, x.dtype)

    shapes = jax.eval_shape(function, *jax.tree.map(one, tree, mapped))
    empty = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes)
    return empty, jax.tree.map(lambda _: True, shapes)


# What varies over a mesh


def result(shape: tuple[int, ...], dtype: DTypeLike, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the type of a kernel's result: in a `shard_map`, it varies over the mesh as `like`."""
    axes = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(
        shape, dtype, **({"manual_axis_type": axes} if axes.varying else {})
    )


def vary(tree: Tree, like: object = None) -> Tree:
    """Mark arrays as different on each device of a `shard_map`, if others of `like` or `tree` are.

    Outside of a `shard_map` nothing happens.
    """
    # a loop wants what it carries to be of one kind, and a gradient of what was the same on all
    # devices is summed over them only if it was marked
    leaves = jax.tree.leaves((tree, like))
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))

    def one(x: jax.Array) -> jax.Array:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(one, tree) if axes else tree


def no_mesh() -> contextlib.AbstractContextManager:
    """Return a context without the mesh of `jax.set_mesh`: programs traced in it fit any mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
