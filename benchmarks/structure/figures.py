"""Measure the lengths, the signatures and the floors, and print all figures as a table."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.structure.carriers import CARRIES, follow_mask
from benchmarks.structure.imports import (
    DOORS,
    FLOORS,
    PACKAGE,
    ROOT,
    Module,
    between_places,
    circles,
    graph_of,
    imports,
    longest_chain,
    read,
    violations,
)
from benchmarks.structure.naming import EXAMPLES, touched


@dataclass(frozen=True)
class Function:
    """Hold one function or method, or a nested one, and where it stands."""

    name: str
    path: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    parents: tuple[ast.AST, ...]

    @property
    def lines(self) -> int:
        """Return its number of lines from `def` on, docstring included, decorators not."""
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    @property
    def parameters(self) -> list[ast.arg]:
        """Return the parameters, without `self` and `cls`."""
        a = self.node.args
        given = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
        return [x for x in given if x is not None and x.arg not in ("self", "cls")]

    @property
    def public(self) -> bool:
        """Return whether a user may call it: no leading underscore in its path, in no function."""
        names = [*Path(self.path).with_suffix("").parts, *self.name.split(".")]
        named = (n for n in names if n not in ("__init__", "__call__", "__main__"))
        inner = any(isinstance(p, ast.FunctionDef | ast.AsyncFunctionDef) for p in self.parents)
        return not inner and not any(name.startswith("_") for name in named)

    def decorated(self, name: str) -> bool:
        """Return whether a decorator has this name."""
        return any(ast.unparse(d).split(".")[-1] == name for d in self.node.decorator_list)


def functions(modules: Mapping[str, Module]) -> list[Function]:
    """Return all functions of the library, in the order of its files."""
    found = []

    def walk(node: ast.AST, path: str, parents: tuple[ast.AST, ...], name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner, called = parents, name
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                called = f"{name}.{child.name}" if name else child.name
                if not isinstance(child, ast.ClassDef):
                    found.append(Function(called, path, child, parents))
                inner = (*parents, child)
            walk(child, path, inner, called)

    for module in library(modules):
        walk(module.tree, module.path, (), "")
    return found


def library(modules: Mapping[str, Module]) -> list[Module]:
    """Return the files that the figures are about: the package, kernels and train.py."""
    return [m for m in modules.values() if m.name.split(".")[0] in (PACKAGE, "train")]


def _says_any(annotation: ast.expr | None) -> bool:
    """Return whether an annotation has `Any` anywhere, as `dict[str, Any]` has."""
    if annotation is None:
        return False
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return any(
        (isinstance(x, ast.Name) and x.id == "Any")
        or (isinstance(x, ast.Attribute) and x.attr == "Any")
        for x in ast.walk(annotation)
    )


def _is_any(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("Any", "typing.Any")


def _signatures(every: Sequence[Function]) -> dict[str, Any]:
    """Return what of signatures says nothing: `Any` in public ones, and missing annotations."""
    overloaded = {(f.path, f.name) for f in every if f.decorated("overload")}
    public = [
        f
        for f in every
        if f.public and (f.decorated("overload") or (f.path, f.name) not in overloaded)
    ]
    parameters = [a.annotation for f in public for a in f.parameters]
    results = [f.node.returns for f in public]
    bare = [
        f
        for f in every
        if f.node.returns is None or any(a.annotation is None for a in f.parameters)
    ]
    return {
        "public results": len(results),
        "public parameters": len(parameters),
        "public results that are Any": sum(map(_is_any, results)),
        "public results with Any inside": sum(map(_says_any, results)) - sum(map(_is_any, results)),
        "public parameters that are Any": sum(map(_is_any, parameters)),
        "public parameters with Any inside": sum(map(_says_any, parameters))
        - sum(map(_is_any, parameters)),
        "functions": len(every),
        "unannotated functions": len(bare),
    }


def _lengths(modules: Mapping[str, Module], every: Sequence[Function]) -> dict[str, Any]:
    """Return the longest functions and files."""
    long = sorted(((f.lines, f"{f.path}:{f.name}") for f in every if f.lines > 60), reverse=True)
    files = sorted(((m.lines, m.path) for m in library(modules)), reverse=True)
    return {
        "longest function": [max((f.lines, f"{f.path}:{f.name}") for f in every)],
        "functions over 60 lines": long,
        "functions over 100 lines": [one for one in long if one[0] > 100],
        "longest file": files[:1],
        "files over 600 lines": [one for one in files if one[0] > 600],
    }


def _public_names(modules: Mapping[str, Module]) -> int | None:
    """Return how many names `transformer_jax.__all__` has."""
    for node in modules[PACKAGE].tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len({x.value for x in ast.walk(node.value) if isinstance(x, ast.Constant)})
    return None


def figures(root: Path = ROOT) -> dict[str, Any]:
    """Return every figure by its name; lists stand beside their counts."""
    modules = read(root)
    found = [one for one in imports(modules) if not one.types_only]
    inside = [m for m in modules.values() if m.name.split(".")[0] == PACKAGE]
    names = {m.name for m in inside}
    graph = graph_of((x.source, x.target) for x in found if {x.source, x.target} <= names)
    pairs = between_places(modules, found)
    every = functions(modules)
    result: dict[str, Any] = {
        "folders": len({str(Path(m.path).parent) for m in inside}),
        "modules": sum(not m.path.endswith("__init__.py") for m in inside),
        "places": len({m.place for m in inside} - {*DOORS}),
        "chain of modules": longest_chain(graph),
        "chain of places": longest_chain(graph_of(pairs)),
        "pairs of places": len(pairs),
        "imports between places": sum(pairs.values()),
        "circles": circles([x for x in found if x.source in names]),
        "places without a floor": len({m.place for m in inside} - {*itertools.chain(*FLOORS)}),
        "violations": [x for x in violations(root) if "no floor in FLOORS" not in x],
        "public names": _public_names(modules),
    }
    result |= _lengths(modules, every) | _signatures(every)
    result["files touched"] = {
        example.kind: dict(zip(("count", "named in"), touched(modules, example), strict=True))
        for example in EXAMPLES
    }
    try:
        result["mask"] = follow_mask(root)
    except (ImportError, RuntimeError) as error:
        result["mask"] = str(error)
    return result


def _rows(f: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (figure, value) of each row of the table."""
    for name in ("folders", "modules", "places"):
        yield name, str(f[name])
    yield "longest import chain between modules", f"{len(f['chain of modules'])} modules"
    yield "longest import chain between places (floors)", f"{len(f['chain of places'])} places"
    yield "pairs of places, one of which imports the other", str(f["pairs of places"])
    yield "imports between places", str(f["imports between places"])
    yield "places without a floor", str(f["places without a floor"])
    judged = 2 * f["places without a floor"] < f["places"]
    said = str(len(f["violations"])) if judged else "no floors to go down"
    yield "imports that do not go down, and circles", said
    for kind in ("function", "file"):
        lines, name = f[f"longest {kind}"][0]
        yield f"longest {kind}", f"{lines} lines, `{name.split('/')[-1]}`"
    for name in ("functions over 60 lines", "functions over 100 lines", "files over 600 lines"):
        yield name, str(len(f[name]))
    for what in ("results", "parameters"):
        that, inside = (f[f"public {what} {how}"] for how in ("that are Any", "with Any inside"))
        said = f"{that} (+{inside}) of {f[f'public {what}']}"
        yield f"public {what} that are `Any` (more with it inside)", said
    yield "unannotated functions", f"{f['unannotated functions']} of {f['functions']}"
    yield "names in `transformer_jax.__all__`", str(f["public names"])
    for kind, one in f["files touched"].items():
        yield f"files touched to add: {kind}", str(one["count"])
    if not isinstance(f["mask"], str):
        every = {name for one in f["mask"].values() for name in one["types"]}
        yield "types that carry a mask to a tile", str(len(every))
        for name, one in f["mask"].items():
            counts = len(one["types"]), len(one["functions"]), one["nested calls"]
            yield f"- in {name}: types, functions, nested calls", ", ".join(map(str, counts))


def markdown(f: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    """Return the figures as a table, their lists, and what is counted."""
    earlier = dict(_rows(before)) if before else {}
    heads = ["figure", "before", "now"] if before else ["figure", "value"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    for name, value in _rows(f):
        cells = [name, earlier.get(name, ""), value] if before else [name, value]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_lists(f), "", *_definitions()]
    return "\n".join(lines) + "\n"


def _lists(f: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names that were counted, as list items."""
    short = [name.removeprefix(f"{PACKAGE}.") for name in f["chain of modules"]]
    yield f"- Longest chain of modules: {', '.join(short)}."
    yield f"- Longest chain of places: {', '.join(f['chain of places'])}."
    if f["circles"]:
        rings = ("; ".join(", ".join(ring) for ring in f["circles"])).replace(f"{PACKAGE}.", "")
        yield f"- Circles: {rings}."
    for name in ("functions over 60 lines", "files over 600 lines"):
        said = ", ".join(f"`{path}` {lines}" for lines, path in f[name]) or "none"
        yield f"- {name.capitalize()}: {said}."
    for kind, one in f["files touched"].items():
        word = next(x.word for x in EXAMPLES if x.kind == kind)
        named = "; ".join(f"`{path}` {', '.join(ways)}" for path, ways in one["named in"].items())
        yield f"- Files naming `{word}` (way and line): {named}."
    if isinstance(f["mask"], str):
        yield f"- Not measured, what carries a mask: {f['mask']}."
        return
    for name, one in f["mask"].items():
        types = ", ".join(x.removeprefix(f"{PACKAGE}.") for x in one["types"])
        yield f"- {name}: {types}."


def _definitions() -> list[str]:
    """Return what is counted, in words."""
    ways = "; ".join(f"{x.kind}: {', '.join(x.counted)}" for x in EXAMPLES)
    return [
        "Folders, modules and chains: of `transformer_jax/` and `kernels/`, imports inside "
        "functions too. Every file but an `__init__` is a module; in a chain an `__init__` that is "
        "imported counts too, and a circle counts as one. A place is a folder directly below "
        "`transformer_jax`, a single module there, or kernels; the doors `__init__` and `__main__` "
        "are left out.",
        "Functions and files: of `transformer_jax/`, `kernels/` and `train.py`. A function's lines "
        "run from `def` to its end, docstring and nested functions included. A function is "
        "unannotated if its result or a parameter other than self and cls has no annotation; "
        "nested ones count, lambdas do not. A signature is public if neither the function nor its "
        "class, module or folder begins with an underscore (`__init__` and `__call__` are public) "
        "and it stands in no function; where there are overloads, they count instead.",
        f"Files touched: of the package, kernels, train.py, benchmarks and reproduce, those that "
        f"name {', '.join(f'`{x.word}`' for x in EXAMPLES)} in a way that another one would need "
        f"({ways}); its own files count as one, an `__init__.py` that only imports it as none, and "
        "so does a file that only builds or passes it. Docstrings do not count.",
        f"What carries a mask: {CARRIES}",
    ]
