"""Print values in a few lines: shapes and dtypes in the place of arrays, sizes of what is long."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeGuard, TypeVar

C = TypeVar("C", bound=type)

LONGEST_TEXT, MOST_ITEMS, LONGEST = 60, 8, 1200


class Shaped(Protocol):
    """Be an array, or its shape in the place of one; configs are printed without JAX."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...


def short_repr(cls: C) -> C:
    """Give a dataclass or a NamedTuple a repr of the fields that differ from their defaults.

    An array is its dtype and shape, `float32[2,64,4,16]`, also of a tracer. What a donated buffer
    was part of is `consumed`. A class whose `vocab_size` is all there is to say has that.
    """
    cls.__repr__ = _repr  # type: ignore[assignment]
    return cls


def tokens_repr(tokenizer: Any) -> str:
    """Return the repr of a tokenizer: its kind and its size."""
    return f"{type(tokenizer).__name__}({tokenizer.vocab_size:,} tokens)"


def shape_text(leaf: Shaped) -> str:
    """Return the dtype and the shape of an array: `float32[2,64,4,16]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _repr(self: object) -> str:
    name = type(self).__name__
    values = dict(_fields(self))
    if any(_is_consumed(leaf) for leaf in _leaves(values)):
        return f"{name}(consumed)"
    text = f"{name}({', '.join(f'{key}={shown(value)}' for key, value in values.items())})"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…)"


def _fields(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the fields that differ from their defaults."""
    if not dataclasses.is_dataclass(value):
        yield from value._asdict().items()
        return
    for field in dataclasses.fields(value):
        own, default = getattr(value, field.name, None), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.repr and not (type(own) is type(default) and _same(own, default)):
            yield field.name, own


def _same(one: object, other: object) -> bool:
    return not _is_array(one) and not any(map(_is_array, _leaves(one))) and one == other


def _is_array(value: object) -> TypeGuard[Shaped]:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_consumed(leaf: object) -> bool:
    asked = getattr(leaf, "is_deleted", None)
    return callable(asked) and type(leaf).__name__ == "ArrayImpl" and asked()


def _leaves(value: object) -> Iterator[Shaped]:
    """Yield the arrays within dicts, sequences and dataclasses."""
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
    """Return a value in at most about a line."""
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
    """Join items; of the same in a row one is said, of many the first."""
    if len(items) > 1 and len(set(items)) == 1:
        return f"{len(items)} × {items[0]}"
    more = f", … {len(items)} in all" if len(items) > MOST_ITEMS else ""
    return ", ".join(items[:MOST_ITEMS]) + more
