"""Follow a mask from `dot_product_attention` to a tile, and record the types that carry it.

The call is traced under a profile function: here alone the package is imported, not parsed.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.structure.imports import PACKAGE, ROOT

CARRIES = """A type counts if it is defined in transformer_jax or kernels, is no mask itself, and \
an instance of it is an argument (self too) or a result of one of their functions while \
`dot_product_attention` is traced, and holds the mask or what is made of it alone: a mask, \
something that a function of a mask and of no floating-point array returned, or an array of \
integers, looked for through fields, tuples, dicts and partial functions to a depth of 4. The call \
is q, k, v of 2 x 256 x 4 x 128 under `Causal() & Segments(ids)`, without bias, dropout, sinks or \
positions, so that all its arrays of integers are of the mask, its tiles, or the place of a tile."""

DEPTH = 4


@dataclass
class Watch:
    """Record, as a profile function, which functions are given a mask, and in what types."""

    folders: tuple[str, ...]
    mask_type: type
    types: set[str] = field(default_factory=set)
    seen: set[tuple[str, str, int]] = field(default_factory=set)
    """The file, the name and the line of each function that was given a mask."""
    deepest: int = 0
    made: dict[int, Any] = field(default_factory=dict)
    """Results of functions of a mask alone, by id; kept alive, so that ids stay unique."""
    calls: list[tuple[FrameType, bool, bool]] = field(default_factory=list)
    """The project's open calls: whether each was given a mask, and whether no floats."""

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """Take note of one call or return."""
        if event == "call" and self._ours(frame):
            self._enter(frame)
        elif event == "return" and self.calls and self.calls[-1][0] is frame:
            _, carries, alone = self.calls.pop()
            if carries and alone:
                self._keep(result)
            self._look(result, DEPTH)

    def _ours(self, frame: FrameType) -> bool:
        code = frame.f_code
        own = code.co_filename.startswith(self.folders)
        inner = code.co_name.startswith("<") and code.co_name != "<lambda>"
        return own and not inner and not code.co_flags & inspect.CO_GENERATOR

    def _enter(self, frame: FrameType) -> None:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + _stars(code)]
        values = [frame.f_locals[name] for name in names if name in frame.f_locals]
        carries = max((self._look(value, DEPTH) for value in values), default=0) > 1
        alone = not any(_has_floats(value, DEPTH) for value in values)
        self.calls.append((frame, carries, alone))
        if carries:
            self.seen.add((code.co_filename, code.co_qualname, code.co_firstlineno))
            self.deepest = max(self.deepest, sum(one[1] for one in self.calls))

    def _look(self, value: Any, depth: int) -> int:
        """Return 2 where a value is or holds a mask, 1 where only integers, else 0."""
        if isinstance(value, self.mask_type):
            return 2
        if _array_kind(value):
            return int(_array_kind(value) in "iu")
        held = max((self._look(x, depth - 1) for x in _children(value)), default=0) if depth else 0
        if not _projects(type(value)):
            return held
        if held or id(value) in self.made:
            self.types.add(f"{type(value).__module__}.{type(value).__qualname__}")
            return 2
        return 0

    def _keep(self, value: Any) -> None:
        if isinstance(value, tuple | list) and not _projects(type(value)):
            for x in value:
                self._keep(x)
        elif _projects(type(value)):
            self.made[id(value)] = value


def _stars(code: Any) -> int:
    return bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)


def _projects(cls: type) -> bool:
    return str(cls.__module__).split(".")[0] == PACKAGE


def _array_kind(value: Any) -> str:
    """Return the kind of an array's dtype, "i", "u", "f" and so on; "" of anything else."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, type) or dtype is None or not hasattr(value, "shape"):
        return ""
    kind = str(getattr(dtype, "kind", "O"))
    return "f" if "float" in str(dtype) else kind


def _has_floats(value: Any, depth: int) -> bool:
    kind = _array_kind(value)
    if kind or not depth:
        return kind == "f"
    return any(_has_floats(x, depth - 1) for x in _children(value))


def _children(value: Any) -> list[Any]:
    """Return what a tuple, a dict, a partial function or an instance of a project type holds."""
    if isinstance(value, tuple | list | set | frozenset):
        return list(value)[:64]
    if isinstance(value, dict):
        return list(value.values())[:64]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__]
    if not isinstance(value, type) and _projects(type(value)):
        names = [*getattr(value, "__dict__", ())]
        names += [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        return [getattr(value, name) for name in names if hasattr(value, name)]
    return []


class _Finder(importlib.abc.MetaPathFinder):
    """Import the package, and kernels as a part of it, from one checkout, installed or not."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return where a module of the package is; ModuleNotFoundError where the checkout has none.

        Else another checkout that is installed would lend its own.
        """
        first, *rest = name.split(".")
        if first != PACKAGE:
            return None
        file = self.root.joinpath(*(rest if rest[:1] == ["kernels"] else (first, *rest)))
        module = file.with_suffix(".py")
        if (file / "__init__.py").exists():
            module, places = file / "__init__.py", [str(file)]
        elif module.exists():
            places = None
        else:
            raise ModuleNotFoundError(f"{self.root} has no {name}", name=name)
        return importlib.util.spec_from_file_location(
            name, module, submodule_search_locations=places
        )


def follow_mask(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Return by implementation the types that carry a mask to a tile, and the functions on its way.

    RuntimeError where `transformer_jax` of another checkout was imported before.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    root = root.resolve()
    finder = _Finder(root)
    sys.meta_path.insert(0, finder)
    try:
        ours, kernels = (importlib.import_module(n) for n in (PACKAGE, f"{PACKAGE}.kernels"))
        folders = tuple(str(root / name) + os.sep for name in (PACKAGE, "kernels"))
        if not str(ours.__file__).startswith(folders):
            raise RuntimeError(f"{ours.__file__} was imported before, and is not of {root}")
        found = {}
        for name in ("xla", "blockwise", "pallas"):
            watch = Watch(folders, ours.Mask)
            with kernels.using(kernels.Target("tpu", interpret=True)):
                _trace(ours, name, watch)
            found[name] = {
                "types": sorted(watch.types),
                "functions": sorted(
                    f"{Path(file).relative_to(root).as_posix()}:{line} {function}"
                    for file, function, line in watch.seen
                ),
                "nested calls": watch.deepest,
            }
        return found
    finally:
        sys.meta_path.remove(finder)


def _trace(ours: Any, implementation: str, watch: Watch) -> None:
    """Trace one call of attention under a mask, watched."""
    jax, numpy = (importlib.import_module(name) for name in ("jax", "numpy"))
    array = jax.ShapeDtypeStruct((2, 256, 4, 128), "float32")
    ids = numpy.arange(512, dtype="int32").reshape(2, 256) // 100
    mask = ours.Causal() & ours.Segments(ids)
    jax.clear_caches()  # what was traced before would not be called again

    def attend(q: Any, k: Any, v: Any) -> Any:
        return ours.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    sys.setprofile(watch)
    try:
        jax.make_jaxpr(attend)(array, array, array)
    finally:
        sys.setprofile(None)
