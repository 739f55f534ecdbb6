"""A variant of `jax.jit` that traces a call again if its arguments contain your own code.

`jax.jit` looks up a program by the equality of its static arguments. This is correct for the values
of this package, because equal values behave the same. However, your own functions and classes may
read globals, closures, arrays and attributes that have changed since the last call. Therefore, a
call with such arguments is traced again, and its compiled program is looked up by the text of the
trace.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from flax.linen import module as linen
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.stages import Traced

LIBRARIES = {"transformer_jax", "flax", "jax", "jaxlib", "ml_dtypes", "numpy", "optax",
             "builtins", "collections", "enum", "functools"}  # fmt: skip
HOST, TRACED = (np.ndarray, np.generic), jax.core.Tracer
PLAIN = (*HOST, int, float, complex, bytes, type(None), np.dtype, enum.Enum, jax.Array, TRACED,
         jax.ShapeDtypeStruct, jax.sharding.Mesh)  # fmt: skip
MOST = 256
"""Maximum number of programs that a function caches by text. The least recently used is dropped."""
P = ParamSpec("P")
Result = TypeVar("Result")


def program(
    *, static: tuple[str, ...] = (), donate: tuple[str, ...] = ()
) -> Callable[[Callable[P, Result]], Program[P, Result]]:
    """Compile a function like `jax.jit`, with the given static and donated arguments."""
    return lambda function: Program(function, static, donate)


class Program(Generic[P, Result]):
    """Function whose compiled programs are looked up by value or by the text of a new trace."""

    def __init__(
        self, function: Callable[P, Result], static: tuple[str, ...], donate: tuple[str, ...]
    ) -> None:
        functools.update_wrapper(self, function)
        self.function: Callable[..., Result] = function
        self.static, self.donate = static, donate
        self.names = tuple(inspect.signature(function).parameters)
        self.by_value: Any = jax.jit(function, static_argnames=static, donate_argnames=donate)
        self.by_text: dict[Hashable, Callable[..., list[jax.Array]]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        named: dict[str, Any] = dict(zip(self.names, args)) | kwargs  # noqa: B905
        result: Result
        result = self._run_by_text(named) if retraces(named) else self.by_value(*args, **kwargs)
        # XLA does not free donated memory if NumPy has a view of it or no result fits it; delete it
        # here, so that a donated state is always consumed
        kept = {id(x) for x in jax.tree.leaves(result)} if self.donate else set()
        for x in jax.tree.leaves([named[name] for name in self.donate]):
            if isinstance(x, jax.Array) and not isinstance(x, TRACED) and id(x) not in kept:
                x.delete()
        return result

    def trace(self, **named: Any) -> Traced:
        """Trace the function like `jax.jit`, without reusing traces of your own code."""
        if not retraces(named):
            return self.by_value.trace(**named)
        fixed = {name: named.pop(name) for name in self.static}
        # a new function, because JAX caches traces by function
        return jax.jit(lambda **named: self.function(**fixed, **named)).trace(**named)

    def num_programs(self) -> int:
        """Count the compiled programs."""
        return int(self.by_value._cache_size()) + len(self.by_text)

    def _run_by_text(self, named: dict[str, Any]) -> Any:
        arguments = {name: named[name] for name in sorted(named) if name not in self.static}
        leaves = jax.tree.leaves(arguments)
        if any(isinstance(x, TRACED) for x in leaves):  # the outer trace runs your code only once
            return self.function(**named)
        trace = self.trace(**named)
        jaxpr, consts = trace.jaxpr.jaxpr, trace.jaxpr.consts
        if len(jaxpr.invars) > len(leaves):  # your code closes over values of an outer trace
            return self.function(**named)
        # arrays that your code reads become arguments, so that the program also serves new values;
        # they are transferred explicitly, because the caller may disallow implicit transfers
        consts = [jax.device_put(x) if isinstance(x, HOST) else x for x in consts]
        donated = [name in self.donate for name, x in arguments.items() for _ in jax.tree.leaves(x)]

        def run(consts: list[jax.Array], *arrays: jax.Array) -> list[jax.Array]:
            return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*arrays)

        run.__name__ = self.function.__name__
        # keep unused arguments; otherwise the text is the same whether the code reads only the
        # first or only the second argument
        at = [1 + i for i, is_donated in enumerate(donated) if is_donated]
        compiled: Any = jax.jit(run, donate_argnums=at, keep_unused=True)
        text = compiled.lower(consts, *leaves).as_text()
        if "callback" not in text:  # a callback appears in the text only as a number
            avals = *map(jax.typeof, consts), *trace.jaxpr.in_avals, *trace.jaxpr.out_avals
            key = hashlib.sha256(text.encode()).digest(), avals
            compiled = self.by_text[key] = self.by_text.pop(key, compiled)
            if len(self.by_text) > MOST:
                del self.by_text[next(iter(self.by_text))]
        return jax.tree.unflatten(jax.tree.structure(trace.out_info), compiled(consts, *leaves))


_LOOKED_UP: list[tuple[Mapping[str, object], dict[str, object]]] = []
_PLAIN_KINDS: set[type] = set()  # the checks below take several microseconds for each class


def depends_on_names(named: Mapping[str, object]) -> None:
    """Register a mapping in which this package looks up names and you may replace values."""
    _LOOKED_UP.append((named, dict(named)))


def retraces(named: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments must be traced again.

    It must if a flax interceptor is active, if a value in a registered mapping has been replaced,
    or if an argument contains code from outside `LIBRARIES`.
    """
    replaced = any(now.get(name) is not x for now, then in _LOOKED_UP for name, x in then.items())
    if linen._global_interceptor_stack or replaced:
        return True
    # skip the parameters, because they contain many arrays
    return any(brings_code(x) for name, x in named.items() if name != "params")


def brings_code(value: Any) -> bool:
    """Whether a value contains, at any depth, a function or class from outside `LIBRARIES`."""
    kind = type(value)
    if kind in _PLAIN_KINDS:
        return False
    if isinstance(value, str):
        return any(value in now and brings_code(now[value]) for now, _ in _LOOKED_UP)
    root = kind.__module__.partition(".")[0]
    if root not in LIBRARIES:
        return True
    parts: Iterable[Any] = ()
    if isinstance(value, PLAIN):
        _PLAIN_KINDS.add(kind)
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, types.MethodType):
        parts = value.__func__, value.__self__
    elif isinstance(value, tuple | list | set | frozenset):
        parts = value
    elif root == "transformer_jax":
        fields = getattr(kind, "__dataclass_fields__", None) or vars(value)
        parts = [getattr(value, name) for name in fields]
    else:
        # a library's functions and classes are attributes of their module; lambdas, closures and
        # objects that wrap a function are not
        name = str(getattr(value, "__module__", ""))
        found: Any = sys.modules.get(name) if name.partition(".")[0] in LIBRARIES else None
        for part in getattr(value, "__qualname__", "").split("."):
            found = getattr(found, part, None)
        return found is not value
    return any(map(brings_code, parts))
