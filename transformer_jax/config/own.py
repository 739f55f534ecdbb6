"""Let a config hold a function, or a value of a class, that is not of this package.

A file says it by name, "module:name". It is found again in a module that is imported: reading a
file imports none, and so runs nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from transformer_jax.config.fields import ConfigError, fail


def check_own(field: str, value: object) -> None:
    """Raise ConfigError for a value that is not of a frozen dataclass with hashable fields.

    Programs are found by configs: two values may be equal only where all that they hold is.
    """
    name = type(value).__name__
    if "__dataclass_fields__" not in vars(type(value)):  # a subclass compares its base's fields
        rule = f"must be a frozen dataclass: @dataclass(frozen=True) before class {name}"
        raise ConfigError(f"{field} is of class {name}: {rule}")
    try:
        hash(value)
    except TypeError as error:
        rule = f"must be hashable, as a frozen dataclass of hashable fields is ({error})"
        fail(field, value, rule)


def name_of(field: str, value: object) -> str:
    """Return the "module:name" of a function or class, in a public module where there is one.

    ConfigError for one that could not be found again, as a lambda or what a function defines.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    top = str(module).partition(".")[0]
    # a file says `jax.nn:mish`, and not the private module that defines it
    known = [
        m
        for m in sorted(sys.modules, key=lambda m: (m.count("."), m))
        if m.partition(".")[0] == top and "._" not in m
    ]
    for found in (*known, str(module)):
        if name and getattr(sys.modules.get(found), name, None) is value:
            return f"{found}:{name}"
    fail(field, value, "must be defined by its name in a module, for a file to say what it is")


def found_again(field: str, name: str) -> Any:
    """Return what is called "module:name"; ConfigError where no imported module has it."""
    module, _, own = name.partition(":")
    value = getattr(sys.modules.get(module), own, None)
    if value is None:
        what = "has no such name" if module in sys.modules else "is not imported: import it first"
        fail(field, name, f"{module} {what}")
    return value
