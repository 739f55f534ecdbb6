"""One-token changes of a Python file that a careless edit could make.

Comparisons, arithmetic, numbers by one, booleans, `and` and `or`, inverted conditions, dropped
keyword arguments, and swapped arguments. Text inside f-strings, annotations, decorators, and the
arguments of `raise` stay as they are, and so do types in an expression (`int | None`).
"""

from __future__ import annotations

import ast
import builtins
import hashlib
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A file with one expression replaced."""

    file: str
    line: int
    kind: str
    where: str
    """The function or class around the expression, as in `Class.method`."""
    begin: int
    end: int
    """The replaced bytes of the file: [begin, end)."""
    old: str
    new: str
    number: int
    """Counts equal changes of one function from the top of the file."""

    @property
    def key(self) -> str:
        """A name that stays the same if other parts of the file change."""
        told = [self.file, self.where, self.kind, self.old, self.new, str(self.number)]
        return hashlib.sha256("\0".join(told).encode()).hexdigest()[:12]

    def rank(self, seed: int) -> str:
        """The mutant's place in the random order of this seed."""
        return hashlib.sha256(f"{seed} {self.key}".encode()).hexdigest()

    def text(self, source: bytes) -> bytes:
        """Return the file's text with the change."""
        return source[: self.begin] + self.new.encode() + source[self.end :]


SYMMETRIC = "isinstance", "max", "min", "maximum", "minimum"
"""Functions with arguments whose exchange cannot cause an observable fault."""


def is_number(node: ast.AST) -> bool:
    """Whether an expression is a number, with or without a minus sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def is_type(node: ast.AST) -> bool:
    """Whether an expression names a class, by the usual spelling, or is None."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name[:1].isupper() or name in dir(builtins) or ast.unparse(node) == "None"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the changes of one expression: the kind of change and the new expression."""

    def changed(**fields: object) -> ast.AST:
        new = deepcopy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.Compare():
            for n, op in enumerate(node.ops):
                other = COMPARED[type(op)]()
                yield "comparison", changed(ops=[*node.ops[:n], other, *node.ops[n + 1 :]])
        case ast.BinOp(op=ast.MatMult()):
            yield "arithmetic", changed(left=node.right, right=node.left)
        case ast.BinOp() if not (isinstance(node.op, ast.BitOr) and is_type(node.right)):
            text = isinstance(node.left, ast.Constant | ast.JoinedStr) and not is_number(node.left)
            if type(node.op) in COMPUTED and not text:
                yield "arithmetic", changed(op=COMPUTED[type(node.op)]())
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean", changed(op=other)
        case ast.UnaryOp() if is_number(node):
            yield "number", ast.BinOp(left=node, op=ast.Add(), right=ast.Constant(1))
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield ("boolean" if isinstance(node.op, ast.Not) else "arithmetic"), node.operand
        case ast.Constant() if isinstance(node.value, bool):
            yield "boolean", ast.Constant(not node.value)
        case ast.Constant() if is_number(node):
            yield "number", ast.Constant(node.value + 1)
        case ast.Call():
            called = ast.unparse(node.func).rpartition(".")[2]
            for n, keyword in enumerate(node.keywords):
                if keyword.arg is not None and (called, keyword.arg) != ("zip", "strict"):
                    left = [*node.keywords[:n], *node.keywords[n + 1 :]]
                    yield "dropped keyword", changed(keywords=left)
            first = node.args[:2] if called not in SYMMETRIC else []
            if len(first) == 2 and not any(isinstance(x, ast.Starred) for x in first):
                if ast.dump(first[0]) != ast.dump(first[1]):
                    yield "swapped arguments", changed(args=[*first[::-1], *node.args[2:]])


def mutants(root: Path, file: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of their places."""
    source = (root / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    seen: Counter[tuple[str, ...]] = Counter()

    def add(node: ast.expr, kind: str, new: ast.AST, where: str) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old, text = ast.unparse(node), f"({ast.unparse(ast.fix_missing_locations(new))})"
        seen[where, kind, old, text] += 1
        number = seen[where, kind, old, text]
        found.append(
            Mutant(
                file=file, line=node.lineno, kind=kind, where=where, begin=begin, end=end,
                old=old, new=text, number=number,
            )
        )  # fmt: skip

    def visit(node: ast.AST, where: str) -> None:
        if isinstance(node, ast.JoinedStr | ast.Raise):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}".lstrip(".")
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            add(node.test, "inverted condition", ast.UnaryOp(ast.Not(), node.test), where)
        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                add(test, "inverted condition", ast.UnaryOp(ast.Not(), test), where)
        if isinstance(node, ast.expr):
            for kind, new in changes(node):
                add(node, kind, new, where)
            if is_number(node):
                return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, where)

    visit(ast.parse(source), "")
    return found
