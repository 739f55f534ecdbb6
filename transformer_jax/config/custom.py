"""Custom values in configs: functions and class instances that are defined outside this package.

Files store such a value as "module:name". When a file is read, the name is looked up only in
modules that are already imported, so no code is run.
"""

from __future__ import annotations

import sys
from typing import Any

from transformer_jax.config.fields import ConfigError, fail


def check_custom(field: str, value: object) -> None:
    """Raise ConfigError unless the value is a frozen dataclass whose fields are hashable.

    Compiled programs are looked up by config, so different values must not compare equal.
    """
    name = type(value).__name__
    # use `vars`, because a subclass without the decorator would compare only the fields of its base
    if "__dataclass_fields__" not in vars(type(value)):
        rule = f"must be a frozen dataclass; write @dataclass(frozen=True) above class {name}"
        raise ConfigError(f"{field} is of class {name}: {rule}")
    try:
        hash(value)
    except TypeError as error:
        rule = f"must be hashable, so all of its fields must be ({error})"
        fail(field, value, rule)


def name_of(field: str, value: object) -> str:
    """Return the "module:name" of a function or class, preferring a public module.

    Raises ConfigError if the value cannot be found by that name, as in the case of a lambda or a
    local function.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    top = str(module).partition(".")[0]
    # store `jax.nn:mish` instead of the private module that defines the function
    public = [
        m
        for m in sorted(sys.modules, key=lambda m: (m.count("."), m))
        if m.partition(".")[0] == top and "._" not in m
    ]
    for candidate in (*public, str(module)):
        if name and getattr(sys.modules.get(candidate), name, None) is value:
            return f"{candidate}:{name}"
    fail(field, value, "must be defined in a module under its name, so that a file can store it")


def find_by_name(field: str, name: str) -> Any:
    """Return the value named "module:name"; raise ConfigError if no imported module contains it."""
    module, _, attribute = name.partition(":")
    value = getattr(sys.modules.get(module), attribute, None)
    if value is None:
        rule = "has no such name" if module in sys.modules else "is not imported; import it first"
        fail(field, name, f"{module} {rule}")
    return value
