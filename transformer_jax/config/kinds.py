"""Kinds of models and of tasks that register by name, the package's own and yours alike.

A base class has kinds: `register(AnyModelConfig, gru="my_models:GRUConfig")` makes one known to
`--model gru`, to config.json and to every field of type `AnyModelConfig`. A kind is a class, or the
"module:Class" to import when a config, a flag or a file is first read.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Union

_KINDS: dict[type, dict[str, type | str]] = {}


def register(base: type, **kinds: type | str) -> None:
    """Make kinds of a base class known by name, in this order and after those that are known."""
    _KINDS.setdefault(base, {}).update(kinds)
    kinds_of.cache_clear()
    for forget in _ON_CHANGE:
        forget()


_ON_CHANGE: list[Callable[[], None]] = []
"""Caches of types to clear once there is another kind."""


def names_of(base: type) -> tuple[str, ...]:
    """Return the names of a base's kinds; none is imported."""
    return tuple(_KINDS.get(base, ()))


@functools.cache
def kinds_of(base: type) -> Mapping[str, type]:
    """Return the kinds of a base by name, and import those that are not there yet."""
    found = {}
    for name, kind in _KINDS.get(base, {}).items():
        if isinstance(kind, str):
            module, _, own = kind.partition(":")
            kind = getattr(importlib.import_module(module), own)
        found[name] = kind
    return found


def with_kinds(hint: Any) -> Any:
    """Return the union of a base's kinds, and any other type as it is."""
    kinds = dict.fromkeys(kinds_of(hint).values()) if hint in _KINDS else ()
    return Union[tuple(kinds)] if kinds else hint  # noqa: UP007 (of a tuple)


def later(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that imports names, by their modules, when needed.

    A name of a floor above is public here without an import of that floor.
    """

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(names[name]), name)

    return attribute
