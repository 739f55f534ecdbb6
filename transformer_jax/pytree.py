"""Types for arrays and parameter trees, their axes and digests, and range-checked casts.

All conversions of parameters use `cast` and `cast_floats`, which raise an error if the new dtype
would turn a finite number into infinity.
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
"""An array on the device or the host; the result is in the same place."""

PyTree: TypeAlias = Any
"""A JAX pytree: nested containers of arrays or of shapes. JAX has no type for it."""

Leaf: TypeAlias = Any
"""A leaf of a tree: an array on the device or the host, or a shape or sharding in its place."""

Tree = TypeVar("Tree")
"""A JAX pytree that is returned with the same structure but different leaves."""


class Parameter(Protocol):
    """A model parameter: an array, its shape, or a quantized kernel."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Params: TypeAlias = Mapping[str, Any]
"""A model's parameters: nested dicts, as in `params["embed"]["tokens"]`, of arrays or other
`Parameter`s, or of shapes if nothing is computed."""


def stacked_axes(names: Sequence[str], ndim: int) -> int:
    """Return the number of leading axes of a parameter that stack layers and experts.

    The layers of a scanned stack come first, then the experts of a block: [L, E, D, F]. `names` is
    the path of the parameter, such as ("decoder", "blocks", "feed_forward", "up", "kernel").
    """
    layers = 1 if "blocks" in names else 0
    if len(names) < 3 or names[-3] != "feed_forward":
        return layers
    # only the number of axes tells experts from a single feed-forward; the path does not
    axes_of_one = 1 if names[-1] == "bias" else 2  # 2 for a kernel or an adapter
    return layers + 1 if ndim == layers + axes_of_one + 1 else layers


def kernel_axes(names: Sequence[str], ndim: int) -> tuple[int, int]:
    """Return the number of stacking axes and the number of input axes of a block's kernel.

    Inputs and outputs follow the `stacked_axes`: query [D, N, H], attention's out [N, Hv, D],
    up [D, F]. `names` is the path of the kernel.
    """
    return stacked_axes(names, ndim), 2 if names[-2] == "out" else 1


def sha256_of(tree: PyTree) -> str:
    """Return the SHA-256 of the paths, dtypes, shapes and bytes of a tree of arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.ascontiguousarray(leaf)
        head = f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n"
        digest.update(head.encode())
        digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def cast(name: str, array: AnyArray, dtype: jax.typing.DTypeLike) -> AnyArray:
    """Return an array in `dtype`; raise ValueError if a finite number would become infinite.

    `name` is used in the message. NaN and inf pass, and traced arrays are not checked.
    """
    check_range(name, array, dtype)
    result: Any = array.astype(dtype)
    return result


def check_range(
    name: str, array: Array | jax.ShapeDtypeStruct, dtype: jax.typing.DTypeLike
) -> None:
    """Raise ValueError if a finite number of an array would be infinite in `dtype`."""
    if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct) or not array.size:
        return
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return
    largest = float(jnp.finfo(dtype).max)
    # a dtype with at least the same range may lose digits, but no number becomes infinite
    if float(jnp.finfo(array.dtype).max) <= largest:
        return
    lib: ModuleType = jnp if isinstance(array, jax.Array) else np
    if max(float(array.max()), -float(array.min())) <= largest:  # False if there is a NaN
        return
    with np.errstate(over="ignore"):
        lost = lib.isfinite(array) & ~lib.isfinite(array.astype(dtype))
    if bool(lost.any()):
        worst = float(lib.where(lost, lib.abs(array), 0).max())
        rule = f"{jnp.dtype(dtype).name} represents at most {largest:.5g}"
        raise ValueError(f"{name} has a weight of size {worst:.5g}: {rule}")


def check_ranges(tree: PyTree, dtype: jax.typing.DTypeLike) -> None:
    """Raise ValueError if a finite number in a tree would be infinite in `dtype`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        check_range(path_name(path), leaf, dtype)


def cast_floats(tree: Tree, dtype: jax.typing.DTypeLike) -> Tree:
    """Cast the floating-point arrays of a tree to `dtype`, like `cast`; others do not change."""
    check_ranges(tree, dtype)
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


def path_name(path: KeyPath) -> str:
    """Return the path of a leaf as a parameter name, such as "decoder/norm/scale"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
