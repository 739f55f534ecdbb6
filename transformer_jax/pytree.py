"""Register frozen dataclasses as pytrees whose checks run for callers only, and for export.

`cast_floats` changes the dtype of a tree's numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

C = TypeVar("C", bound=type)


def sha256_of(tree: Any) -> str:
    """Return the SHA-256 of a tree of arrays: of each one's path, dtype, shape and bytes."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.ascontiguousarray(leaf)
        head = f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n"
        found.update(head.encode())
        found.update(array.view(np.uint8).data if array.size else b"")
    return found.hexdigest()


def cast_floats(tree: Any, dtype: jax.typing.DTypeLike) -> Any:
    """Return a tree whose floating-point arrays are in `dtype`; others stay as they are."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def register(*, arrays: tuple[str, ...] = (), static: tuple[str, ...] = ()) -> Callable[[C], C]:
    """Make a frozen dataclass a pytree, whose `arrays` are children and `static` are structure.

    Rebuilding skips `__init__`, so `__post_init__` checks what a caller wrote and never what a
    transformation put in its place: placeholders, or tracers with an axis more or less.
    """

    def decorate(cls: C) -> C:
        def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
            children = [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in arrays]
            return children, tuple(getattr(node, name) for name in static)

        def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
            children = [getattr(node, name) for name in arrays]
            return children, tuple(getattr(node, name) for name in static)

        def unflatten(structure: tuple[Any, ...], children: Any) -> Any:
            node: Any = object.__new__(cls)
            for name, value in (*zip(arrays, children), *zip(static, structure)):  # noqa: B905
                object.__setattr__(node, name, value)
            return node

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return decorate


def exportable(cls: C) -> C:
    """Register a dataclass that is a pytree, so that `jax.export` serialises calls with it.

    Static fields are written as JSON. The class's name is part of what is written: a serialised
    program is read where a class of that name is registered.
    """
    fields = dataclasses.fields(cls)
    static = [field.name for field in fields if field.metadata.get("static")]
    arrays = [field.name for field in fields if field.name not in static]

    def from_children(aux_data: Any, children: Iterable[Any]) -> Any:
        node: Any = object.__new__(cls)  # of placeholders, which no check would let through
        for names, values in ((arrays, children), (static, aux_data)):
            for name, value in zip(names, values, strict=True):
                object.__setattr__(node, name, value)
        return node

    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"transformer_jax.{cls.__name__}",
        serialize_auxdata=lambda structure: json.dumps(structure).encode(),
        deserialize_auxdata=lambda data: tuple(json.loads(data)),
        from_children=from_children,
    )
    return cls
