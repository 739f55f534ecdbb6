"""Read the project's files and hold their imports against the floors.

The files are parsed, not imported. `violations` is what the test of the architecture and CI ask.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "transformer_jax"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("kernels", "programs", "shown", "tracing"),
    ("checks", "config", "durable_files", "pytree", "sharding", "untrusted_files"),
    ("tokenizers",),
    ("attention", "cache", "corpus"),
    ("checkpoints", "models"),
    ("decoding", "pretrained"),
    ("text",),
    ("training",),
    ("cli",),
    ("__init__", "__main__"),
)
"""Places from the bottom up: folders and single modules of the package, and `kernels`.

A place imports only places of lower floors, and none of its own floor. The top floor has the two
doors: `from transformer_jax import ...` and `python -m transformer_jax`.
"""

DOORS = ("__init__", "__main__")
OUTSIDE = ("benchmarks", "reproduce", "tests", "train")

Pairs = Counter[tuple[str, str]]
"""How many imports go from the first place to the second."""


@dataclass(frozen=True)
class Module:
    """Hold one file: its dotted name, its path below the root, and its syntax tree."""

    name: str
    path: str
    lines: int
    tree: ast.Module

    @property
    def place(self) -> str:
        """Return its folder or its own name directly below the package, or outside it."""
        first, _, rest = self.name.partition(".")
        if first != PACKAGE:
            return first
        return rest.partition(".")[0] or "__init__"


@dataclass(frozen=True, order=True)
class Import:
    """Name one import of a project module by another, and its line."""

    source: str
    target: str
    line: int
    types_only: bool
    """Whether it stands under `if TYPE_CHECKING:`."""


def read(root: Path = ROOT) -> dict[str, Module]:
    """Return the project's files by dotted name: the package, kernels, and what stands outside."""
    found = {}
    for path in sorted(root.glob("*.py")) + [
        path for top in _tops(root) for path in sorted((root / top).rglob("*.py"))
    ]:
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[0] == "kernels":
            parts.insert(0, PACKAGE)
        if parts[-1] == "__init__":
            parts.pop()
        text = path.read_text(encoding="utf-8")
        name = ".".join(parts)
        where = path.relative_to(root).as_posix()
        found[name] = Module(name, where, len(text.splitlines()), ast.parse(text, where))
    return found


def _tops(root: Path) -> list[str]:
    tops = (PACKAGE, "kernels", "benchmarks", "reproduce")
    return [top for top in tops if (root / top).is_dir()]


def imports(modules: Mapping[str, Module]) -> list[Import]:
    """Return every import of a project module by a file, also those inside functions."""
    found = set()
    for module in modules.values():
        for node, types_only in _statements(module.tree, False):
            for name in _imported(node, modules):
                if name != module.name:
                    found.add(Import(module.name, name, node.lineno, types_only))
    return sorted(found)


def _statements(node: ast.AST, types_only: bool) -> Iterator[tuple[ast.stmt | ast.Call, bool]]:
    """Yield imports, and calls that may be imports, with whether types alone need them."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
        yield node, types_only
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _statements(child, True)
        for child in node.orelse:
            yield from _statements(child, types_only)
        return
    for one in ast.iter_child_nodes(node):
        yield from _statements(one, types_only)


def _imported(node: ast.stmt | ast.Call, modules: Mapping[str, Module]) -> list[str]:
    """Return the project modules that a statement imports."""
    names = _from(node)
    if isinstance(node, ast.ImportFrom):
        within = [f"{name}.{alias.name}" for name in names for alias in node.names]
        names = [x if x in modules else x.rpartition(".")[0] for x in within]
    return [x for x in names if x in modules or x.split(".")[0] == "tests"]


def _from(node: ast.AST) -> list[str]:
    """Return the modules that a statement, or a call of `import_module`, names."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(name), level=0):
            return [name]
        case ast.Call(args=[ast.Constant(value=str(name)), *_]):
            return [name] if ast.unparse(node.func).endswith("import_module") else []
    return []


def violations(root: Path = ROOT) -> list[str]:
    """Return each import that does not go down, place without a floor, and circle of imports."""
    modules = read(root)
    found = imports(modules)
    floor = {place: i for i, places in enumerate(FLOORS) for place in places}
    inside = {name: m for name, m in modules.items() if m.name.split(".")[0] == PACKAGE}
    places = sorted({m.place for m in inside.values()} - floor.keys())
    said = [f"{place}: has no floor in FLOORS" for place in places]
    for module in inside.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                said.append(f"{module.path}:{node.lineno}: relative import")
            for name in _from(node):
                if name.split(".")[0] == PACKAGE and name not in modules:
                    line = getattr(node, "lineno", 0)
                    said.append(f"{module.path}:{line}: imports {name}: no such module")
    for one in found:
        if one.source not in inside:
            continue
        source = inside[one.source]
        target = inside[one.target].place if one.target in inside else one.target.split(".")[0]
        reason = _upward(source.place, target, floor)
        if reason:
            kind = " for its types" if one.types_only else ""
            said.append(f"{source.path}:{one.line}: imports {one.target}{kind}: {reason}")
    return said + [
        f"{inside[ring[0]].place}: circular imports between {', '.join(ring)}"
        for ring in circles([one for one in found if not one.types_only and one.source in inside])
        if len({inside[name].place for name in ring}) == 1
    ]


def _upward(source: str, target: str, floor: Mapping[str, int]) -> str | None:
    """Return why a place may not import another, or None."""
    if source == target:
        return None
    if target in OUTSIDE:
        return "the package imports nothing outside it"
    if source == "kernels":
        return "kernels imports nothing of the package"
    if source not in floor or target not in floor or floor[target] < floor[source]:
        return None
    side = "on the same floor as" if floor[target] == floor[source] else "above"
    return f"{target} is {side} {source}"


def circles(found: Sequence[Import]) -> list[list[str]]:
    """Return the groups of modules each of which imports, through others, all of its group."""
    graph = graph_of((one.source, one.target) for one in found)
    return [sorted(ring) for ring in rings(graph) if len(ring) > 1]


def graph_of(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return by node the nodes that it points to; every node has an entry."""
    graph: dict[str, set[str]] = {}
    for source, target in pairs:
        graph.setdefault(source, set()).add(target)
        graph.setdefault(target, set())
    return graph


def rings(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components, what is imported first (Tarjan 1972)."""
    number: dict[str, int] = {}
    least: dict[str, int] = {}
    open_: list[str] = []
    done: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = least[node] = len(number)
        open_.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                least[node] = min(least[node], least[other])
            elif other in open_:
                least[node] = min(least[node], number[other])
        if least[node] == number[node]:
            at = open_.index(node)
            done.append(open_[at:])
            del open_[at:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return done


def longest_chain(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the longest way down the imports; a circle counts as its first member."""
    best: dict[str, list[str]] = {}
    for ring in rings(graph):
        below = [best[x] for node in ring for x in sorted(graph[node]) if x not in ring]
        chain = [min(ring), *max(below, key=len, default=[])]
        best |= {node: chain for node in ring}
    return max(best.values(), key=len, default=[])


def between_places(modules: Mapping[str, Module], found: Sequence[Import]) -> Pairs:
    """Return how many imports go from one place of the package to another, doors left out."""
    pairs: Pairs = Counter()
    for one in found:
        if one.target in modules and one.source.split(".")[0] == PACKAGE:
            pair = modules[one.source].place, modules[one.target].place
            if pair[0] != pair[1] and not {*pair} & {*DOORS, *OUTSIDE}:
                pairs[pair] += 1
    return pairs
