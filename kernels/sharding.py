"""Sharding of attention by batch rows and heads, over devices and for `vmap`.

The sharded functions compute each batch row and key head independently. Therefore, every device
computes its own part, and only sums over a whole array, such as the gradient of a shared bias, are
reduced. No arrays are gathered, unless neither the number of parts nor the number of key heads
divides the other. `AxisNames` describes the axes of an array, and `Parts` describes the mesh axes
that split them.

    partitioned   the compiler splits a function in the same way as the query
    by_types      types determine the split, on a mesh of explicit axes
    over_devices  `partitioned` with a rule for `vmap`; a mesh may also split the axis of `vmap`
    batched       the same for a kernel, which sees the axis of `vmap` as additional batch rows
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
"""Names of the axes of an array, where "b" means batch rows, "n" means query heads and "k" means
key heads. An axis of size 1 is shared. Other names are independent axes, such as those of `vmap`.
An array without rows and heads is replicated on every device, and a result without them is a sum
over all devices."""

HEADS: AxisNames = ("b", "n")
QUERIES: AxisNames = ("b", None, "n", None)
KEYS: AxisNames = ("b", None, "k", None)
POOLS: AxisNames = (None, None, "k", None)
TILES: AxisNames = ("b", "n", None, None)
VECTORS: AxisNames = ("b", None)
ROWS: AxisNames = ("b", "n", None)

Spec = Sequence[str | Sequence[str] | None] | PartitionSpec
"""Mesh axes that split each axis of an array, or None for an axis that is not split."""
First = tuple[jax.Array | int, jax.Array | int]
"""Indices of the first batch row and the first query head of a part."""
Function = Callable[..., tuple[jax.Array, ...]]  # (First, *arrays)
KernelCall = Callable[..., tuple[jax.Array, ...]]  # (Operands, TileLists[, Residuals])
Part = Any
"""`Operands`, `TileLists` or `Residuals`, with arrays, bools or axes as leaves."""
Arguments = tuple[Part, ...]


@dataclass(frozen=True)
class Parts:
    """Mesh axes that split batch rows, query heads and key heads.

    Key heads are split by the longest prefix of the axes of the query heads whose sizes divide the
    number of key heads. If axes remain, each device uses the single key head that its queries read.
    """

    mesh: Mesh | AbstractMesh
    full: dict[str, int]  # total number of rows and heads, keyed by name
    axes: dict[str, tuple[str, ...]]  # axes of the mesh, keyed by name

    @classmethod
    def of(
        cls,
        mesh: Mesh | AbstractMesh,
        specs: Sequence[Spec],
        names: Sequence[AxisNames],
        full: dict[str, int],
    ) -> Parts:
        """Choose the parts from the sharding of arrays, starting with the query.

        The first array that has an axis with a given name determines the split of the axis, if it
        divides evenly.
        """
        axes: dict[str, tuple[str, ...]] = {}
        for spec, array_names in zip(specs, names, strict=True):
            for splitting, name in zip(spec, array_names, strict=False):
                if name is not None and name != "k" and name not in axes:
                    axes[name] = tuple(_axes(splitting))
        # a mesh axis cannot split both rows and heads
        taken: set[str] = set()
        for name, splitting in axes.items():
            number = math.prod(mesh.shape[axis] for axis in splitting)
            fits = full[name] % number == 0 and not taken & {*splitting}
            # the queries of a device must belong to whole key heads, or to part of a single key
            # head
            if name == "n" and full["k"] % number and number % full["k"]:
                fits = False
            axes[name] = splitting if fits else ()
            taken |= {*axes[name]}
        # key heads are split by the first of those axes whose sizes divide them
        sizes = itertools.accumulate((mesh.shape[axis] for axis in axes["n"]), operator.mul)
        of_keys = sum(full["k"] % size == 0 for size in sizes)
        return cls(mesh, full, axes | dict(k=axes["n"][:of_keys]))

    def spec(self, shape: Sequence[int], names: AxisNames) -> PartitionSpec:
        return PartitionSpec(
            *(
                self.axes[name] or None if name is not None and size == self.full[name] else None
                for size, name in zip(shape, names, strict=True)
            )
        )

    def summed(self, shape: Sequence[int], names: AxisNames) -> tuple[str, ...]:
        """Return the mesh axes to sum a result over."""
        # each device that reads a key head has a part of its gradient
        used = {name for one in self.spec(shape, names) for name in _axes(one)}
        every = dict.fromkeys(axis for axes in self.axes.values() for axis in axes)
        return tuple(axis for axis in every if axis not in used)

    # On a device

    def first(self) -> First:
        """Return the indices of the first row and the first head of this device's part."""
        return self._first("b"), self._first("n")

    def read(self, arrays: Sequence[jax.Array], names: Sequence[AxisNames]) -> list[jax.Array]:
        """Select the only key head that this device reads if key heads are not fully split."""
        return self._change_keys(lax.dynamic_slice_in_dim, arrays, names, 1)

    def write(self, arrays: Sequence[jax.Array], names: Sequence[AxisNames]) -> list[jax.Array]:
        """Return results for all key heads, with zeros for heads that this device did not read."""
        return self._change_keys(_embed, arrays, names, self.full["k"] // self.number("k"))

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
        # which of the local key heads the local query heads read
        at = lax.axis_index(beyond) // (self.number("n") // self.full["k"])
        return [
            change(x, at, number, axes.index("k")) if "k" in axes else x
            for x, axes in zip(arrays, names, strict=True)
        ]

    def _beyond_keys(self) -> tuple[str, ...]:
        """Return the mesh axes that split query heads but not key heads."""
        return self.axes["n"][len(self.axes["k"]) :]

    def _first(self, name: str) -> jax.Array | int:
        axes = self.axes[name]
        return lax.axis_index(axes) * (self.full[name] // self.number(name)) if axes else 0

    def number(self, name: str) -> int:
        """Return the number of parts of an axis."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes[name])


def _axes(one: str | Sequence[str] | None) -> Sequence[str]:
    """Return the mesh axes in one entry of a PartitionSpec."""
    return (one,) if isinstance(one, str) else one or ()


def _embed(x: jax.Array, at: jax.Array, number: int, axis: int) -> jax.Array:
    """Return `number` heads that contain the given head and zeros."""
    zeros = jnp.zeros((*x.shape[:axis], number, *x.shape[axis + 1 :]), x.dtype)
    return lax.dynamic_update_slice_in_dim(zeros, x, at, axis)


def partitioned(
    function: Function,
    arrays: Sequence[jax.Array],  # the first is the query
    names: Sequence[AxisNames],
    results: Sequence[AxisNames],
    full: dict[str, int],
) -> tuple[jax.Array, ...]:
    """Return `function((0, 0), *arrays)`, which the compiler splits in the same way as the query.

    The compiler sees a single operation, with a sharding rule that relates its operands and
    results.
    """
    # traced here, because `custom_partitioning` accepts no constants and does not report shapes
    whole = functools.partial(function, (0, 0))
    traced = jax.make_jaxpr(whole)(*arrays)
    # constants become operands
    constants = tuple(traced.consts)
    is_closed = not any(isinstance(x, jax.core.Tracer) for x in constants)
    # JAX does not declare the fields
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
        inputs = arguments[len(constants) :]
        # for an XLA sharding without a mesh, treat all devices as one axis
        if mesh.empty:
            mesh = Mesh([*_slices(inputs[0].sharding, inputs[0].ndim)], "devices")
        specs = [_spec(mesh, x.sharding, x.ndim) for x in inputs]
        parts = Parts.of(mesh, specs, names[len(constants) :], full)

        def lower(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            # this may run in another thread, without the caller's precision
            with jax.default_matmul_precision(precision), no_mesh():
                inner = parts.read(arrays, names)[len(constants) :]
                out = parts.write(function(parts.first(), *inner), results)
                axes = [parts.summed(*each) for each in zip(shapes, results, strict=True)]
                return tuple(lax.psum(x, n) if n else x for x, n in zip(out, axes, strict=True))

        def sharding(shape: tuple[int, ...], names: AxisNames) -> NamedSharding:
            return NamedSharding(mesh, parts.spec(shape, names))

        out = tuple(map(sharding, shapes, results))
        operands = tuple(sharding(x.shape, n) for x, n in zip(arguments, names, strict=True))
        return mesh, lower, out, operands

    def rule(mesh: Mesh | AbstractMesh, *_: object) -> tuple[str, dict[str, int]]:
        return _rule(mesh, [jnp.shape(x) for x in arrays], names, shapes, results, full)

    @custom_partitioning
    def outlined(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        closed = ClosedJaxpr(traced.jaxpr, arrays[: len(constants)])
        return tuple(jaxpr_as_fun(closed)(*arrays[len(constants) :]))

    # JAX would decode a sharding into whole mesh axes, or raise an error
    outlined.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    return outlined(*arrays)


def _slices(sharding: Sharding, ndim: int) -> dict[jax.Device, tuple[slice, ...]]:
    """Return the slices on each device of an array whose axes have one element per device."""
    # a sharding has no index map for an array that the compiler has split unevenly
    return dict(sharding.devices_indices_map((len(sharding.device_set),) * ndim))


def _spec(mesh: Mesh, sharding: Sharding, ndim: int) -> list[tuple[str, ...]]:
    """Return the mesh axes that split each axis of an array, starting with the slowest."""
    # derived from the start of each device's part, because the compiler may split four heads over
    # eight devices by part of a mesh axis, which a PartitionSpec cannot express
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
    """Return the rule that propagates shardings, in the notation of `custom_partitioning`."""
    # "(k g)" propagates a split of query heads to key heads if every mesh axis divides the key
    # heads
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
    """Return `function(first, *arrays)`, computed per device, with the sharding `wanted`."""
    dtypes = [x.dtype for x in arrays]

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        varied = vary(arrays, parts.first())  # the transpose sums gradients before they are rounded
        inputs = [x.astype(dtype) for x, dtype in zip(varied, dtypes, strict=True)]
        return function(parts.first(), *parts.read(inputs, names))

    def placed(x: jax.Array, names: AxisNames) -> jax.Array:
        if parts.summed(x.shape, names) and x.dtype in (jnp.bfloat16, jnp.float16):
            # so that the summed gradients are also float32
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
    """Return the `partitioned` function of arrays with a rule for `vmap`."""

    @custom_vmap
    def call(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return partitioned(function, leaves, names, results, dict(full))

    @call.def_vmap
    def rule(
        size: int, batched: Sequence[bool], *leaves: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        axes = tuple(0 if is_mapped else None for is_mapped in batched)
        # no kernel supports an axis of length 0, so handle a `vmap` over zero calls here
        if size == 0:
            return empty_batch(functools.partial(function, (0, 0)), leaves, tuple(batched))
        name = f"v{len(full)}"  # a new one

        def mapped(first: First, *leaves: jax.Array) -> tuple[jax.Array, ...]:
            return jax.vmap(functools.partial(function, first), axes)(*leaves)

        inputs = [(name, *n) if f else n for n, f in zip(names, batched, strict=True)]
        outer = over_devices(mapped, inputs, [(name, *n) for n in results], {**full, name: size})
        return outer(*leaves), (True,) * len(results)

    return call


def batched(
    kernel: KernelCall,
    results: tuple[AxisNames, ...],
    *,
    of_bias: bool = False,
    splits: bool = True,
) -> KernelCall:
    """Return the kernel with rules for `vmap` and for a mesh.

    `results` contains the axis names of the results. If `of_bias` is true, the result has the shape
    of the bias, and is summed over the axes of size 1. If `splits` is false, there is no rule for a
    mesh.
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
        # each call had its own copy of the bias for every row, so the gradient is summed over them
        if of_bias and tree[0].bias.shape[1 if mapped[0].bias else 0] == 1:
            out = tuple(x.sum(axis=1, keepdims=True) for x in out)
        return out, (True,) * len(out)

    return call


def _folded(size: int, mapped: Arguments, tree: Arguments, *, copies_bias: bool) -> Arguments:
    """Merge the mapped axis of every array into its batch, [V, .., B or 1, ..] to [.., V B, ..]."""
    B = tree[0].query.shape[1 if mapped[0].query else 0]
    bias, pairs = tree[0].bias, tree[0].pairs

    def shared(x: jax.Array) -> bool:
        """Whether rows may share an array. All tile lists must have the same number of rows."""
        if x is bias:
            return not copies_bias
        # only small arrays are copied
        return x is pairs or B > 1

    def fold(x: jax.Array, is_mapped: bool, names: AxisNames) -> jax.Array:
        if "b" not in names:  # a pool of pages
            return x
        axis = names.index("b")
        if not is_mapped:
            if x.shape[axis] == 1 and shared(x):
                return x
            x = jnp.broadcast_to(x[None], (size, *x.shape))
        shape = (*x.shape[: axis + 1], B, *x.shape[axis + 2 :])
        # the rows of each call remain contiguous
        x = jnp.moveaxis(jnp.broadcast_to(x, shape), 0, axis)
        return x.reshape(*x.shape[:axis], size * B, *x.shape[axis + 2 :])

    leaves, structure = jax.tree.flatten(tree)
    folded = map(fold, leaves, jax.tree.leaves(mapped), _axis_names(tree))
    return jax.tree.unflatten(structure, folded)


def _one_pool(size: int, mapped: Arguments, tree: Arguments) -> tuple[Arguments, Arguments]:
    """Concatenate mapped pools, so that a single block table indexes all of them."""
    operands, flags = tree[0], mapped[0]
    fields = [f for f in ("key", "value", "k_scale", "v_scale") if getattr(operands, f) is not None]
    if not any(getattr(flags, field) for field in fields):
        return mapped, tree

    def every(x: jax.Array, is_mapped: bool) -> jax.Array:  # [V, ..]
        return x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))

    # even unmapped pools are copied for each call, because a table can index only one pool
    pools = {field: every(getattr(operands, field), getattr(flags, field)) for field in fields}
    first = jnp.arange(size, dtype=jnp.int32) * pools["key"].shape[1]
    pages = every(operands.pages, flags.pages) + first[:, None, None]
    pools = {field: x.reshape(-1, *x.shape[2:]) for field, x in pools.items()}
    flags = flags._replace(**dict.fromkeys(fields, False), pages=True)
    return (flags, *mapped[1:]), (operands._replace(**pools, pages=pages), *tree[1:])


def _axis_names(tree: Arguments) -> list[AxisNames]:
    """Return the axis names of every leaf, in order."""
    operands = tree[0]
    vectors = [VECTORS] * len(operands.q_vectors + operands.k_vectors)
    optional = dict(pairs=TILES, bias=TILES, slopes=HEADS, sinks=HEADS, dropout=(None, "b", "n"))
    keys = KEYS if operands.pages is None else POOLS
    optional |= dict(k_scale=keys[:3], v_scale=keys[:3], pages=VECTORS)
    present = [names for field, names in optional.items() if getattr(operands, field) is not None]
    saved = [QUERIES, ROWS, ROWS, ROWS] * (len(tree) - 2)
    lists = [TILES, ROWS, ROWS]
    lists += [TILES] * (tree[1].visits is not None) + [ROWS] * (tree[1].rows is not None)
    lists += [ROWS] * (tree[1].visit_counts is not None)
    present += [TILES] * len(operands.score_values or ())
    return [QUERIES, keys, keys, *vectors, *present, *lists, *saved]


def empty_batch(
    function: Callable[..., Tree], tree: tuple[object, ...], mapped: tuple[object, ...]
) -> tuple[Tree, tuple[bool, ...]]:
    """Return the result of a `vmap` over an axis of length 0."""

    def one(x: jax.Array, is_mapped: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:] if is_mapped else x.shape, x.dtype)

    shapes = jax.eval_shape(function, *jax.tree.map(one, tree, mapped))
    empty = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes)
    return empty, jax.tree.map(lambda _: True, shapes)


# Varying axes of a mesh


def result(shape: tuple[int, ...], dtype: DTypeLike, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the type of a result that varies over the same `shard_map` axes as `like`."""
    axes = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(
        shape, dtype, **({"manual_axis_type": axes} if axes.varying else {})
    )


def vary(tree: Tree, like: object = None) -> Tree:
    """Mark arrays as varying over the axes of a `shard_map` over which `tree` or `like` varies."""
    # this is needed because the carry of a loop must keep its type, and because the gradient of a
    # replicated array is summed over the devices only if the array was marked
    leaves = jax.tree.leaves((tree, like))
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))

    def one(x: jax.Array) -> jax.Array:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(one, tree) if axes else tree


def no_mesh() -> contextlib.AbstractContextManager:
    """Return a context without the mesh of `jax.set_mesh`, for programs that fit any mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
