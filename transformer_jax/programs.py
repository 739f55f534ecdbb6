"""Compile functions as `jax.jit` does, without a stale result where code of yours takes part.

`jax.jit` finds a program by the equality of its static arguments. That is right for the values of
this package: equal ones do the same. Your functions and classes read globals, closures, arrays and
attributes that may have changed since the last call. So a call that brings such code along is
traced again, and its compiled program is found by the text of that trace.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from flax.linen import module as linen
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.stages import Traced

LIBRARIES = {"transformer_jax", "flax", "jax", "jaxlib", "ml_dtypes", "numpy", "optax",
             "builtins", "collections", "enum", "functools"}  # fmt: skip
PLAIN = (int, float, complex, bytes, type(None), np.ndarray, np.generic, np.dtype, enum.Enum,
         jax.Array, jax.core.Tracer, jax.ShapeDtypeStruct, jax.sharding.Mesh)  # fmt: skip
MOST = 256
"""Programs found by text that each function keeps; the latest used ones stay."""

P = ParamSpec("P")
Result = TypeVar("Result")


def program(
    *, static: tuple[str, ...] = (), donate: tuple[str, ...] = ()
) -> Callable[[Callable[P, Result]], Program[P, Result]]:
    """Compile a function like `jax.jit` with these static and donated arguments."""
    return lambda function: Program(function, static, donate)


class Program(Generic[P, Result]):
    """A function that runs compiled programs, found by value or by the text of a new trace."""

    def __init__(
        self, function: Callable[P, Result], static: tuple[str, ...], donate: tuple[str, ...]
    ) -> None:
        functools.update_wrapper(self, function)
        self.function: Callable[..., Result] = function
        self.static, self.donate = static, donate
        self.names = tuple(inspect.signature(function).parameters)
        self.by_value = jax.jit(function, static_argnames=static, donate_argnames=donate)
        self.by_text: dict[Hashable, Callable[..., list[jax.Array]]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        named: dict[str, Any] = dict(zip(self.names, args)) | kwargs  # noqa: B905
        result: Result
        result = self._run_by_text(named) if _again(named) else self.by_value(*args, **kwargs)
        if self.donate:
            # XLA keeps memory that NumPy looks at or that no result has the shape of; whether a
            # donated state can be used again must not depend on that
            kept = {id(x) for x in jax.tree.leaves(result)}
            for leaf in jax.tree.leaves([named[name] for name in self.donate]):
                known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
                if known and id(leaf) not in kept and not leaf.is_deleted():
                    leaf.delete()
        return result

    def trace(self, **named: Any) -> Traced:
        """Trace like `jax.jit`, but again if foreign code takes part."""
        if not _again(named):
            return self.by_value.trace(**named)
        fixed = {name: named.pop(name) for name in self.static}
        # a new function, of which JAX has no trace yet
        return jax.jit(lambda **named: self.function(**fixed, **named)).trace(**named)

    def num_programs(self) -> int:
        """Count the compiled programs."""
        by_value: Any = self.by_value
        return int(by_value._cache_size()) + len(self.by_text)

    def _run_by_text(self, named: dict[str, Any]) -> Any:
        given = {name: named[name] for name in sorted(named) if name not in self.static}
        leaves = jax.tree.leaves(given)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self.function(**named)  # a part of the outer trace, which reads the code once
        found = self.trace(**named)
        jaxpr, read = found.jaxpr.jaxpr, found.jaxpr.consts
        if len(jaxpr.invars) > len(leaves):  # the code's closure belongs to an outer trace
            return self.function(**named)
        # arrays that the code reads become arguments, so that other numbers compile nothing;
        # explicitly, because the caller may refuse implicit transfers
        read = [jax.device_put(x) if isinstance(x, np.ndarray | np.generic) else x for x in read]
        donated = [name in self.donate for name, x in given.items() for _ in jax.tree.leaves(x)]

        def run(*arrays: jax.Array) -> list[jax.Array]:
            return jaxpr_as_fun(ClosedJaxpr(jaxpr, arrays[: len(read)]))(*arrays[len(read) :])

        run.__name__ = self.function.__name__
        # all arguments are kept, or programs that read the first or the second would look alike
        at = [len(read) + i for i, gone in enumerate(donated) if gone]
        jitted = jax.jit(run, donate_argnums=at, keep_unused=True)
        compiled: Callable[..., list[jax.Array]] = jitted
        text = jitted.lower(*read, *leaves).as_text()
        if "callback" not in text:  # the text only counts functions that are called in Python
            avals = *map(jax.typeof, read), *found.jaxpr.in_avals, *found.jaxpr.out_avals
            key = hashlib.sha256(text.encode()).digest(), avals
            compiled = self.by_text[key] = self.by_text.pop(key, compiled)
            if len(self.by_text) > MOST:
                del self.by_text[next(iter(self.by_text))]
        return jax.tree.unflatten(jax.tree.structure(found.out_info), compiled(*read, *leaves))


def _again(named: Mapping[str, Any]) -> bool:
    # parameters are arrays, and many
    return disturbed() or any(brings_code(x) for name, x in named.items() if name != "params")


_LOOKED_UP: list[tuple[Mapping[str, object], dict[str, object]]] = []


def depends_on_names(named: Mapping[str, object]) -> None:
    """Register a mapping in which our code looks values up by name, and you may put yours."""
    _LOOKED_UP.append((named, dict(named)))


def disturbed() -> bool:
    """Whether an interceptor of flax is active, or a name of ours has another implementation."""
    return bool(linen._global_interceptor_stack) or any(
        now.get(name) is not value for now, then in _LOOKED_UP for name, value in then.items()
    )


def brings_code(value: Any) -> bool:
    """Whether a value contains, at any depth, a function or class that is not of `LIBRARIES`."""
    kind = type(value)
    if kind in _PLAIN_KINDS:
        return False
    if isinstance(value, str):
        return any(value in now and brings_code(now[value]) for now, _ in _LOOKED_UP)
    if kind.__module__.partition(".")[0] not in LIBRARIES:
        return True
    if isinstance(value, PLAIN):
        _PLAIN_KINDS.add(kind)
        return False
    if isinstance(value, tuple | list | set | frozenset):
        return any(map(brings_code, value))
    if isinstance(value, Mapping):
        return any(map(brings_code, value.values()))
    if isinstance(value, functools.partial):
        return brings_code((value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        return brings_code((value.__func__, value.__self__))
    if kind.__module__.startswith("transformer_jax"):
        fields = getattr(kind, "__dataclass_fields__", None) or vars(value)
        return any(brings_code(getattr(value, name)) for name in fields)
    # a module of ours or of a library has its functions and classes by their names; a lambda, a
    # closure and an object that wraps a function are not found so
    name = str(getattr(value, "__module__", ""))
    found: Any = sys.modules.get(name) if name.partition(".")[0] in LIBRARIES else None
    for part in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is not value


_PLAIN_KINDS: set[type] = set()
