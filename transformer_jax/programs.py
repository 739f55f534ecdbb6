"""Compile as `jax.jit` does, and trace calls again that bring code along which is not ours.

`jax.jit` finds a program by the equality of its static arguments. That is right while equal values
do equal things, as ours do. Code that somebody else wrote reads globals, closures, arrays and
attributes, which are no part of its value and may have changed since. So a call in which such code
takes part is traced again, and its compiled program is found by what the trace says.

    program        takes the place of `jax.jit` with static arguments
    shapes_of      takes the place of `jax.eval_shape`
    is_ours        says whether all code that a value brings along is of this package
    undisturbed    says whether nobody has changed what our own code does
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import numpy as np
from flax import linen as nn
from flax.linen import module as linen
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.stages import Lowered, Traced, Wrapped

PACKAGE = "transformer_jax"
LIBRARIES = {PACKAGE, "builtins", "flax", "jax", "jaxlib", "ml_dtypes", "numpy", "optax"}
MOST = 256
"""How many programs that were found by content each function keeps, the latest used ones."""


P = ParamSpec("P")
Result = TypeVar("Result")
Named = dict[str, object]
"""Arguments by their names."""
Arrays = Sequence[jax.Array]


@overload
def program(
    function: Callable[P, Result],
    *,
    static: Sequence[str] = (),
    donate: Sequence[str] = (),
    code: Callable[..., Iterable[object]] | None = None,
) -> Program[P, Result]: ...
@overload
def program(
    *,
    static: Sequence[str] = (),
    donate: Sequence[str] = (),
    code: Callable[..., Iterable[object]] | None = None,
) -> Callable[[Callable[P, Result]], Program[P, Result]]: ...
def program(
    function: Callable[P, Result] | None = None,
    *,
    static: Sequence[str] = (),
    donate: Sequence[str] = (),
    code: Callable[..., Iterable[object]] | None = None,
) -> Program[P, Result] | Callable[[Callable[P, Result]], Program[P, Result]]:
    """Compile a function, as `jax.jit` does, for arguments that may bring foreign code along.

    Arguments named `static` are hashable values, those named `donate` are given away. `code`
    returns what of the arguments is asked for foreign code, without our models; by default it is
    all of them, and our models too.
    """
    if function is None:
        return lambda found: Program(found, tuple(static), tuple(donate), code)
    return Program(function, tuple(static), tuple(donate), code)


class Program(Generic[P, Result]):
    """Call a function by compiled programs: those of `jax.jit`, or those of what a trace says."""

    def __init__(
        self,
        function: Callable[P, Result],
        static: tuple[str, ...],
        donate: tuple[str, ...],
        code: Callable[..., Iterable[object]] | None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function: Callable[..., Result] = function
        self.static, self.donate, self.code = static, donate, code
        self.names = tuple(inspect.signature(function).parameters)
        self.by_value = jax.jit(function, static_argnames=static, donate_argnames=donate)
        self.by_content: OrderedDict[Hashable, Callable[..., list[jax.Array]]] = OrderedDict()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        given = *args, *(kwargs[name] for name in self.names[len(args) :] if kwargs)
        result: Result
        result = self.by_value(*given) if self._by_value(given) else self._traced_again(given)
        if self.donate:
            self._consume(given, result)
        return result

    def _consume(self, args: tuple[object, ...], result: Result) -> None:
        """Delete what was donated, also memory that XLA did not take.

        It leaves arrays that NumPy looks at, and those that no result has the shape of.
        """
        kept = {id(x) for x in jax.tree.leaves(result)}
        for name, x in zip(self.names, args, strict=True):
            for leaf in jax.tree.leaves(x) if name in self.donate else ():
                known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
                if known and id(leaf) not in kept and not leaf.is_deleted():
                    leaf.delete()

    def lower(self, *args: object) -> Lowered:
        """Lower the program of `jax.jit`."""
        return self.by_value.lower(*args)

    def trace(self, *args: object) -> Traced:
        """Trace as `jax.jit` does, anew where foreign code takes part."""
        if self._by_value(args):
            return self.by_value.trace(*args)
        fresh, kept, donated = self._fresh(args)
        return fresh.trace(kept, donated)

    def num_programs(self) -> int:
        """Count the programs that there are."""
        of_jax: Any = self.by_value  # counts in private
        return int(of_jax._cache_size()) + len(self.by_content)

    def _by_value(self, args: tuple[object, ...]) -> bool:
        """Return whether equal arguments have equal programs."""
        if self.code is not None:
            return undisturbed(models=False) and all(map(is_ours, self.code(*args)))
        asked = [x for x, name in zip(args, self.names, strict=True) if name != "params"]
        return undisturbed() and all(map(is_ours, asked))  # parameters are arrays, and many

    def _fresh(self, args: tuple[object, ...]) -> tuple[Wrapped, Named, Named]:
        """Return a function that JAX has not seen before, and its arguments."""
        kept = dict(zip(self.names, args, strict=True))
        fixed = {name: kept.pop(name) for name in self.static}
        donated = {name: kept.pop(name) for name in self.donate}

        def fresh(kept: Named, donated: Named) -> Result:
            return self.function(**fixed, **kept, **donated)

        fresh.__name__ = self.function.__name__
        return jax.jit(fresh, donate_argnums=1 if donated else ()), kept, donated

    def _traced_again(self, args: tuple[object, ...]) -> Result:
        """Return the result of a new trace; its compiled program may be one from before.

        Arrays that the trace reads become arguments. Where one is traced outside, the new trace
        becomes a part of the outer one: derivatives that are written by hand are functions, which
        have no content to find them by.
        """
        fresh, *trees = self._fresh(args)
        found = fresh.trace(*trees)
        constants = found.jaxpr.consts
        # explicitly, for code that refuses implicit transfers
        constants = [
            jax.device_put(x) if isinstance(x, np.ndarray | np.generic) else x for x in constants
        ]
        leaves = [jax.tree.leaves(tree) for tree in trees]
        lifted = len(found.jaxpr.in_avals) > sum(map(len, leaves))  # of a closure, by JAX
        given = *constants, *leaves[0], *leaves[1]
        if lifted or any(isinstance(x, jax.core.Tracer) for x in given):
            return fresh(*trees)
        jaxpr = found.jaxpr.jaxpr

        def run(constants: Arrays, kept: Arrays, donated: Arrays) -> list[jax.Array]:
            return jaxpr_as_fun(ClosedJaxpr(jaxpr, constants))(*kept, *donated)

        run.__name__ = self.function.__name__
        # all arguments are kept, or programs that read the first or the second would look alike
        new = jax.jit(run, donate_argnums=2 if leaves[1] else (), keep_unused=True)
        text = new.lower(constants, *leaves).as_text()
        avals = *map(jax.typeof, constants), *found.jaxpr.in_avals, *found.jaxpr.out_avals
        key = hashlib.sha256(text.encode()).digest(), avals, *_host_calls(jaxpr)
        known = self.by_content.setdefault(key, new)
        self.by_content.move_to_end(key)
        if len(self.by_content) > MOST:
            self.by_content.popitem(last=False)
        return jax.tree.unflatten(jax.tree.structure(found.out_info), known(constants, *leaves))


def _host_calls(jaxpr: Jaxpr) -> Iterable[tuple[int, str]]:
    """Name the functions that a program calls in Python, which its text only counts.

    A program holds its functions, so that no two at a time have one address.
    """
    for one in jaxpr.eqns:
        if "callback" in one.primitive.name or "debug" in one.primitive.name:
            called = one.params.get("callback")
            yield id(getattr(called, "callback_func", called)), str(one.params)
        for inner in programs_within(one):
            yield from _host_calls(inner)


def programs_within(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the programs that an equation holds: the body of a loop, what a function calls."""
    for value in jax.tree.leaves(list(equation.params.values())):
        inner = getattr(value, "jaxpr", value)
        if isinstance(inner, Jaxpr):
            yield inner


def shapes_of(function: Callable[..., object], *args: object) -> Any:
    """Return what `jax.eval_shape` does, of a new trace where foreign code takes part."""
    if undisturbed() and is_ours(function) and all(map(is_ours, args)):
        return jax.eval_shape(function, *args)
    return jax.eval_shape(lambda *args: function(*args), *args)


# What our code does


def undisturbed(*, models: bool = True) -> bool:
    """Return whether our code does what it did when it was imported.

    It does not under an interceptor of flax, where a name of ours has another implementation, or
    where a method of our models was replaced. The last is only asked for `models`.
    """
    if linen._global_interceptor_stack:
        return False
    for now, then in _NAMED:
        if now != then and any(now.get(name) is not value for name, value in then.items()):
            return False
    return not models or all([methods(kind) == then for kind, methods, then in _MODELS])


def remember() -> None:
    """Remember the methods of all classes of ours that are imported, as they are."""
    for name, module in list(sys.modules.items()):
        if _root(name) == PACKAGE:
            for kind in list(vars(module).values()):
                if isinstance(kind, type) and _root(kind.__module__) == PACKAGE:
                    _check_of(kind)


def depends_on_names(named: Mapping[str, object]) -> None:
    """Say that our code looks values up by name here, where others may put theirs."""
    _NAMED.append((named, dict(named)))


_Methods = tuple[type, Callable[[object], object], object]
"""A class, what gets its methods, and those that it had."""

_NAMED: list[tuple[Mapping[str, object], Mapping[str, object]]] = []
_MODELS: list[_Methods] = []


def _methods_of(kind: type) -> _Methods:
    names = {
        name: None
        for base in kind.__mro__
        if _root(base.__module__) == PACKAGE
        for name, value in vars(base).items()
        if (name == "__call__" or not name.startswith("__"))
        and isinstance(value, types.FunctionType | property | functools.cached_property)
    }
    methods = attrgetter(*names, "__class__") if names else attrgetter("__class__")
    return kind, methods, methods(kind)


# What code a value brings along


def is_ours(value: object) -> bool:
    """Return whether all code that a value brings along is of this package or of its libraries.

    Foreign are functions, methods and instances of classes that somebody else wrote, in a field or
    in a closure, at any depth; and a name that somebody else gave an implementation.
    """
    check = _CHECKS.get(type(value)) or _check_of(type(value))
    return check(value)


_Check = Callable[[Any], bool]


def _check_of(kind: type) -> _Check:
    """Return how values of exactly this type are asked, and remember it."""
    check = _CHECKS[kind] = _new_check(kind)
    return check


def _new_check(kind: type) -> _Check:
    if issubclass(kind, str):
        return _is_name_of_ours
    if _root(kind.__module__) not in LIBRARIES | {"functools", "enum"}:
        return lambda _: False
    plain = bool, int, float, complex, bytes, type(None), np.ndarray, np.generic, enum.Enum
    if issubclass(kind, (*plain, jax.Array, jax.core.Tracer)):
        return lambda _: True
    if issubclass(kind, tuple | list | set | frozenset):
        return lambda values: all([is_ours(x) for x in values])
    if issubclass(kind, Mapping):
        return lambda named: all([is_ours(x) for x in named.values()])
    if issubclass(kind, functools.partial):
        return lambda x: is_ours(x.func) and is_ours(x.args) and is_ours(x.keywords)
    if issubclass(kind, types.FunctionType):
        return _is_function_of_ours
    if issubclass(kind, types.MethodType):
        return lambda x: is_ours(x.__self__) and is_ours(x.__func__)
    if issubclass(kind, type):
        return lambda x: _root(x.__module__) in LIBRARIES
    if issubclass(kind, types.BuiltinFunctionType | types.MethodWrapperType):
        # bound to a list, it reads what the list holds
        return lambda x: (
            isinstance(x.__self__, types.ModuleType) and _root(x.__self__.__name__) in LIBRARIES
        )
    if _root(kind.__module__) != PACKAGE and not issubclass(kind, nn.Module):
        if issubclass(kind, jax.sharding.Mesh):
            return lambda _: True
        # a dtype, a jaxpr; or what wraps a function: jit shows it, `np.vectorize` does not
        return lambda x: is_ours(x.__wrapped__) if hasattr(x, "__wrapped__") else not callable(x)
    return _new_instance_check(kind)


def _new_instance_check(kind: type) -> _Check:
    """Return how instances of a class of ours are asked: its methods, and their fields."""
    methods = _methods_of(kind)
    _, get, then = methods
    if issubclass(kind, nn.Module):
        _MODELS.append(methods)
    if not dataclasses.is_dataclass(kind):
        return lambda x: get(kind) == then and is_ours(getattr(x, "__dict__", None))
    fields = [field.name for field in dataclasses.fields(kind)]
    if not fields:
        return lambda _: get(kind) == then
    values = attrgetter(*fields, fields[0])  # two at least, so that it gives a tuple

    def check(x: object) -> bool:
        return get(kind) == then and all([is_ours(value) for value in values(x)])

    if not kind.__module__.startswith(f"{PACKAGE}.config"):
        return check
    known: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()

    def check_config(x: object) -> bool:
        """Ask a config once, which holds numbers and names and never changes."""
        if known.get(id(x)) is x and not any([len(now) > len(then) for now, then in _NAMED]):
            return get(kind) == then
        ours = check(x)
        if ours:
            known[id(x)] = x
        return ours

    return check_config


def _is_name_of_ours(name: str) -> bool:
    return all([name in then or name not in now for now, then in _NAMED])


def _is_function_of_ours(function: types.FunctionType) -> bool:
    if _root(function.__globals__.get("__name__", "")) not in LIBRARIES - {"builtins"}:
        return False
    cells = [cell for cell in function.__closure__ or () if not _is_empty(cell)]
    read = [cell.cell_contents for cell in cells]
    read += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all([is_ours(x) for x in read if x is not function])


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _root(module: str) -> str:
    return module.partition(".")[0]


_CHECKS: dict[type, _Check] = {}
