"""Types of arrays and parameter trees, with their axes, hashes and range-checked casts.

All conversions of parameters use `cast` or `cast_floats`. These functions raise an error if a
finite number would become infinite in the new dtype.
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
"""Array on a device or on the host."""

AnyArray = TypeVar("AnyArray", bound=Array)
"""Type variable for an array on a device or on the host. The result is in the same place."""

PyTree: TypeAlias = Any
"""JAX pytree: nested containers of arrays or of shapes. JAX defines no type for it."""

Leaf: TypeAlias = Any
"""Leaf of a tree: an array on a device or on the host, or a shape or sharding that represents
it."""

Tree = TypeVar("Tree")
"""Type variable for a JAX pytree. The result has the same structure and different leaves."""


class Parameter(Protocol):
    """Model parameter: an array, the shape of one, or a quantized kernel."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Params: TypeAlias = Mapping[str, Any]
"""Parameters of a model: nested dicts of arrays or other `Parameter`s, as in
`params["embed"]["tokens"]`. The leaves are shapes if nothing is computed."""


def stacked_axes(names: Sequence[str], ndim: int) -> int:
    """Return the number of leading axes of a parameter over layers and experts.

    The axis of the layers of a scanned stack comes before the axis of the experts: [L, E, D, F].
    `names` is the parameter's path, such as ("decoder", "blocks", "feed_forward", "up", "kernel").
    """
    layers = 1 if "blocks" in names else 0
    if len(names) < 3 or names[-3] != "feed_forward":
        return layers
    # the path is the same for experts and a single feed-forward; only the number of axes differs
    axes_of_one = 1 if names[-1] == "bias" else 2  # a kernel or an adapter has two
    return layers + 1 if ndim == layers + axes_of_one + 1 else layers


def kernel_axes(names: Sequence[str], ndim: int) -> tuple[int, int]:
    """Return the number of stacking axes and the number of input axes of a block's kernel.

    The axes of the inputs and the outputs follow the `stacked_axes`: [D, N, H] for query, [N, Hv,
    D] for the output of attention, [D, F] for up. `names` is the path of the kernel.
    """
    return stacked_axes(names, ndim), 2 if names[-2] == "out" else 1


def sha256_of(tree: PyTree) -> str:
    """Return the SHA-256 hash of the paths, dtypes, shapes and bytes of a tree of arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.ascontiguousarray(leaf)
        head = f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n"
        digest.update(head.encode())
        digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def cast(name: str, array: AnyArray, dtype: jax.typing.DTypeLike) -> AnyArray:
    """Return an array in `dtype`; raise ValueError if a finite number would become infinite.

    The error message contains `name`. NaN and inf are allowed. Traced arrays are not checked.
    """
    check_range(name, array, dtype)
    result: Any = array.astype(dtype)
    return result


def check_range(
    name: str, array: Array | jax.ShapeDtypeStruct, dtype: jax.typing.DTypeLike
) -> None:
    """Raise ValueError if a finite number in an array would become infinite in `dtype`."""
    if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct) or not array.size:
        return
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return
    largest = float(jnp.finfo(dtype).max)
    # no number becomes infinite in a dtype with the same or a larger range, although digits may be
    # lost
    if float(jnp.finfo(array.dtype).max) <= largest:
        return
    lib: ModuleType = jnp if isinstance(array, jax.Array) else np
    if max(float(array.max()), -float(array.min())) <= largest:  # False if any number is NaN
        return
    with np.errstate(over="ignore"):
        lost = lib.isfinite(array) & ~lib.isfinite(array.astype(dtype))
    if bool(lost.any()):
        worst = float(lib.where(lost, lib.abs(array), 0).max())
        rule = f"{jnp.dtype(dtype).name} represents at most {largest:.5g}"
        raise ValueError(f"{name} has a weight of size {worst:.5g}: {rule}")


def check_ranges(tree: PyTree, dtype: jax.typing.DTypeLike) -> None:
    """Raise ValueError if a finite number in a tree would become infinite in `dtype`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        check_range(path_name(path), leaf, dtype)


def cast_floats(tree: Tree, dtype: jax.typing.DTypeLike) -> Tree:
    """Cast the floating-point arrays of a tree to `dtype`; leave other arrays unchanged.

    Raises ValueError if a finite number would become infinite.
    """
    check_ranges(tree, dtype)
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


def path_name(path: KeyPath) -> str:
    """Convert the path of a leaf to a parameter name, such as "decoder/norm/scale"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
