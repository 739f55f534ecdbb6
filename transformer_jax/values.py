"""Value classes: frozen dataclasses with a short repr that can also be pytrees.

The repr shows an array as its dtype and shape. A value class without arrays does not import JAX, so
that configs load quickly.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Protocol, TypeGuard, TypeVar, dataclass_transform, overload

C = TypeVar("C", bound=type)

LONGEST_TEXT, MOST_ITEMS, LONGEST = 60, 8, 1200


class Shaped(Protocol):
    """Array or `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...


@overload
def value_class(cls: C, /) -> C: ...
@overload
def value_class(
    *,
    kw_only: bool = False,
    eq: bool = True,
    init: bool = True,
    repr: bool = True,
    arrays: tuple[str, ...] | None = None,
    static: tuple[str, ...] | None = None,
    pytree: bool = False,
    exportable: bool = False,
) -> Callable[[C], C]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def value_class(
    cls: type | None = None,
    /,
    *,
    arrays: tuple[str, ...] | None = None,
    static: tuple[str, ...] | None = None,
    pytree: bool = False,
    exportable: bool = False,
    repr: bool = True,
    eq: bool = True,
    **options: bool,
) -> Any:
    """Make a class a frozen dataclass with a short repr, and optionally a pytree.

    Args:
        cls: the class, if the decorator is used without arguments.
        arrays: fields that are children of the pytree. Transformations rebuild the value without
            `__init__`, so `__post_init__` checks only values that a caller passes.
        static: fields that belong to the pytree's structure.
        pytree: register all fields with `jax.tree_util.register_dataclass`. A field with metadata
            `static=True` belongs to the structure.
        exportable: whether `jax.export` can serialize calls that have such a value as an argument.
            Static fields are written as JSON, under the name of the class.
        repr: whether to add the short repr.
        eq: whether to add `==` and a hash.
        **options: `kw_only` and `init` of `dataclasses.dataclass`.
    """

    def decorate(cls: type) -> type:
        cls = dataclasses.dataclass(frozen=True, repr=False, eq=False, **options)(cls)
        fields = dataclasses.fields(cls)
        if eq:
            add_equality(cls, tuple(x.name for x in fields if x.compare))
        if repr:
            short_repr(cls)
        children_names, structure_names = arrays or (), static or ()
        if pytree:
            structure_names = tuple(x.name for x in fields if x.metadata.get("static"))
            children_names = tuple(x.name for x in fields if x.name not in structure_names)

        def rebuilt(structure: Iterable[object], children: Iterable[object]) -> object:
            node: object = object.__new__(cls)  # `__post_init__` checks only callers' values
            named = *zip(children_names, children), *zip(structure_names, structure)  # noqa: B905
            for name, value in named:
                object.__setattr__(node, name, value)
            return node

        if pytree:
            import jax

            jax.tree_util.register_dataclass(cls)
        elif arrays is not None or static is not None:
            import jax

            def getter(names: tuple[str, ...]) -> Callable[[object], tuple[object, ...]]:
                # every call flattens its arguments, and with `attrgetter` many fields take no
                # longer than two
                if len(names) > 1:
                    return attrgetter(*names)
                return lambda node: tuple(getattr(node, name) for name in names)

            children_of, structure_of = getter(children_names), getter(structure_names)
            keys = [jax.tree_util.GetAttrKey(name) for name in children_names]
            jax.tree_util.register_pytree_with_keys(
                cls,
                lambda node: (list(zip(keys, children_of(node), strict=True)), structure_of(node)),
                rebuilt,
                lambda node: (children_of(node), structure_of(node)),
            )
        if exportable:
            from jax import export

            export.register_pytree_node_serialization(
                cls,
                serialized_name=f"transformer_jax.{cls.__name__}",
                serialize_auxdata=lambda structure: json.dumps(structure).encode(),
                deserialize_auxdata=lambda data: tuple(json.loads(data)),
                from_children=lambda structure, children: rebuilt(structure, children),
            )
        return cls

    return decorate if cls is None else decorate(cls)


def add_equality(cls: type, names: tuple[str, ...]) -> None:
    """Add `==` and a hash to a frozen dataclass, unless the class defines its own.

    `dataclasses.dataclass` would compile new source code for each class, at each import.
    """
    get = attrgetter("__class__", *names)

    def __eq__(self: object, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return get(self) == get(other)

    def __hash__(self: object) -> int:
        return hash(get(self))

    for method in (__eq__, __hash__):
        if method.__name__ not in cls.__dict__:
            setattr(cls, method.__name__, method)


def short_repr(cls: C) -> C:
    """Add a repr to a dataclass or a NamedTuple that shows the fields with non-default values.

    The repr shows an array or a tracer as its dtype and shape, such as `float32[2,64,4,16]`. It
    shows a value with a donated buffer as `consumed`.
    """
    cls.__repr__ = _repr  # type: ignore[assignment]
    return cls


def tokens_repr(tokenizer: Any) -> str:
    """Return the repr of a tokenizer, which contains its class and its size."""
    return f"{type(tokenizer).__name__}({tokenizer.vocab_size:,} tokens)"


def shape_text(leaf: Shaped) -> str:
    """Return the dtype and the shape of an array as text, such as `float32[2,64,4,16]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _repr(self: object) -> str:
    name = type(self).__name__
    values = dict(_fields(self))
    for leaf in _leaves(values):
        # compare the name of the class, because this module does not import JAX
        if type(leaf).__name__ == "ArrayImpl" and getattr(leaf, "is_deleted", bool)():
            return f"{name}(consumed)"
    text = f"{name}({', '.join(f'{key}={shown(value)}' for key, value in values.items())})"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…)"


def _fields(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the fields with non-default values."""
    if not dataclasses.is_dataclass(value):
        yield from value._asdict().items()
        return
    for field in dataclasses.fields(value):
        item, default = getattr(value, field.name, None), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        # comparing arrays with `==` returns an array, which has no truth value
        comparable = type(item) is type(default) and next(_leaves(item), None) is None
        if field.repr and not (comparable and item == default):
            yield field.name, item


def _is_array(value: object) -> TypeGuard[Shaped]:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _leaves(value: object) -> Iterator[Shaped]:
    """Yield the arrays inside dicts, sequences and dataclasses."""
    if _is_array(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None))


def shown(value: object) -> str:
    """Format a value in at most about one line."""
    if _is_array(value) and not isinstance(value, type):
        return shape_text(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]!r}…"
    if isinstance(value, Mapping):
        arrays = list(_leaves(value))
        if arrays and len(arrays) + len(value) > 4:
            count = sum(getattr(leaf, "size", 0) for leaf in arrays)
            return f"{{{', '.join(map(str, value))}: {len(arrays)} arrays, {count:,} numbers}}"
        return f"{{{_items([f'{key!r}: {shown(item)}' for key, item in value.items()])}}}"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        text = _items([shown(item) for item in value])
        if isinstance(value, list):
            return f"[{text}]"
        return f"({text},)" if len(value) == 1 else f"({text})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = _repr(value) if next(_leaves(value), None) is not None else repr(value)
    return text if len(text) <= 400 else f"{text[:400]}…"


def _items(items: list[str]) -> str:
    """Join items; shorten equal items to a count, and a long list to its first items and length."""
    if len(items) > 1 and len(set(items)) == 1:
        return f"{len(items)} × {items[0]}"
    more = f", … {len(items)} in all" if len(items) > MOST_ITEMS else ""
    return ", ".join(items[:MOST_ITEMS]) + more
