"""Count the files that know one mask, one implementation, one family of checkpoints.

How many files an addition touches is measured by one that is there already: the files that name it
in a way that another of its kind would need too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.structure.imports import Module


@dataclass(frozen=True)
class Example:
    """Describe one thing that stands for its kind, and how a file shows that it knows it."""

    kind: str
    word: str
    own: re.Pattern[str]
    """Paths of its own files, which count as one."""
    named: Callable[[str], bool]
    """Whether a name or a string is its."""
    counted: tuple[str, ...]
    """Ways of naming it that an addition of its kind would touch."""


_DECIDES = ("defines", "asks for its type", "matches", "compares", "lists")
EXAMPLES = (
    Example("mask", "Prefix", re.compile("$^"), lambda x: x == "Prefix", _DECIDES),
    Example(
        "implementation",
        "blockwise",
        re.compile(r"blockwise"),
        lambda x: "blockwise" in x.lower().split("_"),
        (*_DECIDES, "imports", "calls"),
    ),
    Example(
        "family of checkpoints",
        "bart",  # "gpt2" is a preset and a kind of tokenizer too
        re.compile(r"families/bart"),
        lambda x: x.strip("_").lower() == "bart",
        (*_DECIDES, "imports"),
    ),
)


def files_naming(modules: Mapping[str, Module], example: Example) -> dict[str, list[str]]:
    """Return by path how each file outside tests and docs names the example: "lists 12"."""
    found: dict[str, list[str]] = {}
    for module in modules.values():
        if module.path.startswith("benchmarks/structure"):
            continue
        ways = sorted(set(_ways(module, example)))
        if example.own.search(module.path):
            found[module.path] = ["is its own"]
        elif ways:
            found[module.path] = [f"{way} {line}" for line, way in ways]
    return found


def _ways(module: Module, example: Example) -> Iterator[tuple[int, str]]:
    """Yield (line, way) of each time that a file names the example; docstrings do not count."""
    parents = {x: node for node in ast.walk(module.tree) for x in ast.iter_child_nodes(node)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            if any(example.named(alias.name) for alias in node.names):
                yield node.lineno, "imports"
            elif any(map(example.named, (node.module or "").split("."))):
                yield node.lineno, "takes a helper"
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            if example.named(node.name):
                yield node.lineno, "defines"
        else:
            name = _spelled(node)
            if name is not None and example.named(name):
                way = _way(node, parents)
                if way is not None:
                    yield getattr(node, "lineno", 0), way


def _spelled(node: ast.AST) -> str | None:
    """Return the name or the short string that a node is."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Constant(value=str(text)) if len(text) < 40:
            return text
    return None


def _way(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> str | None:
    """Return what a file does with a name where it stands; None in `__all__` and docstrings."""
    child, parent = node, parents[node]
    while isinstance(parent, ast.Attribute | ast.BinOp | ast.Starred):
        child, parent = parent, parents[parent]
    if isinstance(parent, ast.Tuple) and isinstance(parents[parent], ast.Call):
        child, parent = parent, parents[parent]
    if isinstance(parent, ast.Call):
        asks = ast.unparse(parent.func) in ("isinstance", "issubclass")
        return "asks for its type" if asks else "calls" if child is parent.func else "passes"
    if isinstance(parent, ast.MatchClass | ast.MatchValue):
        return "matches"
    if isinstance(parent, ast.Compare):
        return "compares"
    within = _inside(parent, parents)
    if isinstance(parent, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.Subscript):
        if isinstance(within, ast.Assign) and ast.unparse(within.targets[0]) == "__all__":
            return None
        compared = isinstance(parents[parent], ast.Compare)
        return "compares" if compared else "lists"
    return None if isinstance(parent, ast.Expr) else "uses"


def _inside(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> ast.AST:
    while not isinstance(node, ast.stmt) and node in parents:
        node = parents[node]
    return node


def touched(modules: Mapping[str, Module], example: Example) -> tuple[int, dict[str, list[str]]]:
    """Return how many files another of its kind would touch, and each file that names this one.

    Its own files count as one. A file that only builds or passes it counts as nothing, and so does
    an `__init__.py` that only imports it.
    """
    named = files_naming(modules, example)
    own = any(ways == ["is its own"] for ways in named.values())
    others = 0
    for path, ways in named.items():
        counted = {way.rpartition(" ")[0] for way in ways} & {*example.counted}
        others += bool(counted - ({"imports"} if path.endswith("__init__.py") else set()))
    return own + others, named
