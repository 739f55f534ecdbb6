"""Register frozen dataclasses as pytrees whose checks run for callers only, and for export.

`cast` changes the dtype of an array, and `cast_floats` that of a tree's numbers: all conversions of
parameters are theirs, which refuse a finite number that the dtype has no room for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

C = TypeVar("C", bound=type)

Array: TypeAlias = jax.Array | np.ndarray
"""An array on a device, or on the host."""

AnyArray = TypeVar("AnyArray", bound=Array)
"""An array that comes back where it was, on the device or the host."""

PyTree: TypeAlias = Any
"""A tree of JAX: nested containers of arrays or of shapes. JAX has no type for it."""

Leaf: TypeAlias = Any
"""A leaf of a tree: an array of the device or the host, or a shape or sharding in its place."""

Tree = TypeVar("Tree")
"""A tree of JAX that comes back with other leaves."""


class Parameter(Protocol):
    """Be a parameter of a model: an array, its shape, or what holds a kernel in another form."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Params: TypeAlias = Mapping[str, Any]
"""A model's parameters: nested dicts, so that a caller may write `params["embed"]["tokens"]`, of
arrays or other `Parameter`s, or of shapes where nothing is computed."""


def stacked_axes(names: Sequence[str], ndim: int) -> int:
    """Return how many leading axes of a parameter count parameters: layers, then experts.

    The layers of a scanned stack come first, then the experts of a block: [L, E, D, F].

    Args:
        names: the path of the parameter, as ("decoder", "blocks", "feed_forward", "up", "kernel").
        ndim: its axes.
    """
    layers = 1 if "blocks" in names else 0
    if len(names) < 3 or names[-3] != "feed_forward":
        return layers
    # by its axes: nothing else in a path tells experts from one feed-forward
    own = 1 if names[-1] == "bias" else 2  # a kernel's, or an adapter's, of one expert
    return layers + 1 if ndim == layers + own + 1 else layers


def kernel_axes(names: Sequence[str], ndim: int) -> tuple[int, int]:
    """Return how many axes of a block's kernel count matrices, and how many are their inputs.

    After `stacked_axes` come inputs and outputs: query [D, N, H], an attention's out [N, Hv, D],
    up [D, F].

    Args:
        names: the path of the kernel, as ("decoder", "block_0", "feed_forward", "up", "kernel").
        ndim: its axes.
    """
    return stacked_axes(names, ndim), 2 if names[-2] == "out" else 1


def sha256_of(tree: PyTree) -> str:
    """Return the SHA-256 of a tree of arrays: of each one's path, dtype, shape and bytes."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.ascontiguousarray(leaf)
        head = f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n"
        found.update(head.encode())
        found.update(array.view(np.uint8).data if array.size else b"")
    return found.hexdigest()


def cast(name: str, array: AnyArray, dtype: jax.typing.DTypeLike) -> AnyArray:
    """Return an array in `dtype`; ValueError where a finite number would become infinite.

    `name` says where it stands. NaN and inf that are there already stay; what is traced is not
    looked at.
    """
    check_range(name, array, dtype)
    found: Any = array.astype(dtype)
    return found


def check_range(
    name: str, array: Array | jax.ShapeDtypeStruct, dtype: jax.typing.DTypeLike
) -> None:
    """Raise ValueError where a finite number of an array would be infinite in `dtype`."""
    if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct) or not array.size:
        return
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return
    largest = float(jnp.finfo(dtype).max)
    # a dtype with as wide a range loses digits, and no number becomes infinite
    if float(jnp.finfo(array.dtype).max) <= largest:
        return
    lib: ModuleType = jnp if isinstance(array, jax.Array) else np
    if max(float(array.max()), -float(array.min())) <= largest:  # False where there is NaN
        return
    with np.errstate(over="ignore"):  # of which NumPy warns
        lost = lib.isfinite(array) & ~lib.isfinite(array.astype(dtype))
    if bool(lost.any()):
        worst = float(lib.where(lost, lib.abs(array), 0).max())
        rule = f"{jnp.dtype(dtype).name} holds at most {largest:.5g}"
        raise ValueError(f"{name} has a weight of size {worst:.5g}: {rule}")


def check_ranges(tree: PyTree, dtype: jax.typing.DTypeLike) -> None:
    """Raise ValueError for the first array of a tree with a finite number too large for `dtype`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        check_range(path_name(path), leaf, dtype)


def cast_floats(tree: Tree, dtype: jax.typing.DTypeLike) -> Tree:
    """Return a tree whose floating-point arrays are `cast` to `dtype`; others stay as they are."""
    check_ranges(tree, dtype)
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


def path_name(path: KeyPath) -> str:
    """Return the path of a leaf as names of parameters are written, "decoder/norm/scale"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
