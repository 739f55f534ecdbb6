"""Registry of named kinds of models and tasks, which can include your own.

After `register(AnyModelConfig, mamba="my_models:MambaConfig")`, you can use the new kind in
`--model mamba`, in config.json and in every field of type AnyModelConfig.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, Union, get_args, get_type_hints

_KINDS: dict[type, dict[str, type | str]] = {}

C = TypeVar("C", bound=type)


def has_kinds(base: C) -> C:
    """Decorate a base class so that it accepts registered kinds."""
    _KINDS[base] = {}
    return base


def register(base: type, **kinds: type | str) -> None:
    """Register kinds of a base class by name, after the existing kinds.

    A kind is a frozen dataclass, or a string "module:Class" that is imported when a config, flag or
    file is first read. Its name is the lowercase name of the class without "Config" or "Task". A
    class that defines `usual` may have other names. If a class is defined again, for example in a
    notebook cell, it replaces the old class. If one kind is invalid, no kind is registered.

    Raises:
        ValueError: if the base class does not accept kinds, or if a kind is not a subclass of it,
            has the wrong name, or has the name of another class.
    """
    if base not in _KINDS:
        rule = f"must be {' or '.join(one.__name__ for one in _KINDS)}"
        raise ValueError(f"base is {base!r}: {rule}")
    known = dict(_KINDS[base])
    for name, kind in kinds.items():
        if not isinstance(kind, str):
            _check_kind(base, name, kind)
        elif not re.fullmatch(r"[\w.]+:\w+", kind):
            raise ValueError(f'{name} is {kind!r}: must be "module:Class"')
        for other, one in known.items():
            taken = {name} & {other} | {*names_in_files(kind)} & {*names_in_files(one)}
            # a notebook cell that runs again defines the same class again
            if taken and _place(one) != _place(kind):
                rule = f"the name {min(taken)!r} already belongs to {_place(one)}"
                raise ValueError(f"{name} is {_place(kind)}: {rule}")
        if not isinstance(kind, str):
            _check_name(base, name, kind)
        known[name] = kind
    _KINDS[base] = known
    kinds_of.cache_clear()
    field_hints.cache_clear()


def names_of(base: type) -> tuple[str, ...]:
    """Return the names of all kinds of a base class without importing them."""
    return tuple(_KINDS.get(base, ()))


@functools.cache
def kinds_of(base: type) -> Mapping[str, type]:
    """Return the kinds of a base class, keyed by name.

    Raises ValueError if a "module:Class" cannot be imported.
    """
    found = {}
    for name, kind in _KINDS.get(base, {}).items():
        if isinstance(kind, str):
            module, _, attribute = kind.partition(":")
            try:
                kind = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError) as error:
                raise ValueError(f"{name} is {kind!r}: {error}") from error
            _check_kind(base, name, kind)
            _check_name(base, name, kind)
        found[name] = kind
    return found


def kind_name(kind: type | str) -> str:
    """Return the name of a config class in files and flags, which is lowercase and has no suffix.

    Examples are rope and learned for positions, masked and seq2seq for tasks, and recurrent and
    window for models.
    """
    name = kind.rpartition(":")[2] if isinstance(kind, str) else kind.__name__
    return name.removesuffix("Task").removesuffix("Config").lower()


def names_in_files(kind: type | str) -> tuple[str, ...]:
    """Return the values of `kind` in files that refer to a class.

    There is one value, or one for each value of the field `kind`.
    """
    has_field = "kind" in getattr(kind, "__dataclass_fields__", ())
    return get_args(field_hints(kind)["kind"]) if has_field else (kind_name(kind),)


@functools.cache  # evaluating type hints takes longer than all other checks of a config
def field_hints(kind: type) -> dict[str, Any]:
    """Return the type of each field of a config class; base classes are replaced by their kinds."""
    hints = get_type_hints(kind)
    found = {field.name: hints[field.name] for field in fields(kind)}
    for name, hint in found.items():
        if hint in _KINDS:
            found[name] = Union[tuple(kinds_of(hint).values())]  # noqa: UP007 (a tuple has no |)
    return found


def _check_kind(base: type, name: str, kind: object) -> None:
    if not (isinstance(kind, type) and issubclass(kind, base)):
        rule = f'must be a subclass of {base.__name__}, or its "module:Class"'
        raise ValueError(f"{name} is {kind!r}: {rule}")
    # use `vars`, because a subclass without the decorator would compare only the fields of its base
    options = vars(kind).get("__dataclass_params__")
    if options is None or not options.frozen:
        rule = (
            f"must be a frozen dataclass; write @dataclass(frozen=True) above class {kind.__name__}"
        )
        raise ValueError(f"{name} is {kind!r}: {rule}")


def _check_name(base: type, name: str, kind: type) -> None:
    classes = kind.__mro__[: kind.__mro__.index(base)]
    if name not in names_in_files(kind) and not any("usual" in vars(one) for one in classes):
        rule = f"must be named {' or '.join(names_in_files(kind))}, or define its own `usual`"
        raise ValueError(f"{name} is {_place(kind)}: {rule}")


def _place(kind: type | str) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}:{kind.__qualname__}"


def later(
    module: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module that imports `names` on first use.

    This allows a module to export names from a higher layer. `names` maps each name to its module.
    """

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(names[name]), name)

    return attribute, lambda: sorted({*vars(sys.modules[module]), *names})
