"""Chat templates, which are untrusted Jinja code, rendered in a sandbox with a limited budget.

The environment matches that of Hugging Face. It is immutable and sandboxed, with `trim_blocks`,
`lstrip_blocks`, `break` and `continue`, `raise_exception`, `strftime_now`, and a `tojson` that does
not escape HTML. Templates can access only plain data and an allowlist of filters and methods. Each
loop iteration, call, operation, and output character is charged to the budget in advance, so a
template finishes or fails at the same point on every machine. The time for a comparison or filter
is limited by the size of its arguments and by a time limit for the rendering.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import CodeType
from typing import Any, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace
from jinja2.visitor import NodeTransformer

from transformer_jax.tokenizers.utf8 import DataError

TEMPLATE_LIMIT = 2**17
"""Maximum length of a template, in characters."""
BUDGET = 2**22
"""Number of units that a rendering may spend. The input adds 64 units per character and 1,024 per
value."""
SECONDS = 10.0
"""Time limit for a rendering, in seconds."""

_STEP = 64  # units per iteration, call, or operation; a character costs one unit
_VALUE = 16  # units per value, including each value in a list
_DEPTH = 64  # maximum nesting of the data
_BITS = 4096  # maximum size of an integer, in bits
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset({
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum",
        "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle",
        "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
        "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines",
        "startswith", "strip", "swapcase", "title", "upper",
    })),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "index"})),
)  # fmt: skip
_FILTERS = frozenset({
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first",
    "float", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map",
    "max", "min", "reject", "rejectattr", "replace", "reverse", "safe", "select", "selectattr",
    "sort", "string", "sum", "title", "trim", "unique", "upper", "wordcount",
})  # fmt: skip


Value: TypeAlias = Any
"""Value of a template expression, which is JSON data or a function from the sandbox."""


def render(template: str, variables: Mapping[str, Value], now: datetime | None = None) -> str:
    """Render a template; raise DataError if it fails or calls `raise_exception`.

    `now` is the time that `strftime_now` formats. None uses the time of the call.
    """
    if len(template) > TEMPLATE_LIMIT:
        raise DataError(
            f"the chat template has {len(template)} characters: must have at most {TEMPLATE_LIMIT}"
        )
    plain = {name: _plain(value, name) for name, value in variables.items()}
    meter = _Meter(BUDGET)
    # The budget grows with the input, to allow long conversations.
    meter.left += _STEP * meter.weight(plain, limit=2**31)
    try:
        sandbox = _Sandbox(meter, now)
        code = _compile(template)
        loaded = jinja2.Template.from_code(sandbox, code, sandbox.make_globals(None))
        return "".join(loaded.generate(plain))
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"chat template: line {error.lineno}: {_line(error.message)}") from None
    except RecursionError:
        raise DataError("chat template: recursion or nesting is too deep") from None
    except Exception as error:  # a template can raise any exception
        raise DataError(f"chat template: {_line(error) or type(error).__name__}") from None


def literals(template: str) -> str:
    """Return the literal text and string constants of a template, separated by null characters."""
    try:
        tree = _Sandbox(_Meter(BUDGET)).parse(template[:TEMPLATE_LIMIT])
    # `chat` has already raised an error for such a template.
    except (jinja2.TemplateError, RecursionError):
        return ""
    found = {node.data for node in tree.find_all(nodes.TemplateData)}
    constants = (node.value for node in tree.find_all(nodes.Const))
    return "\0".join(sorted(found | {value for value in constants if isinstance(value, str)}))


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> CodeType:
    sandbox = _Sandbox(_Meter(BUDGET))
    # The code does not depend on the sandbox, which a rendering replaces by its own.
    return sandbox.compile(_MeterCalls().visit(sandbox.parse(template)))


class _Meter:
    """Remaining budget of a rendering."""

    def __init__(self, units: int) -> None:
        self.left = units
        self.end = time.monotonic() + SECONDS

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0 or time.monotonic() > self.end:
            raise jinja2.TemplateRuntimeError("exceeds the budget for computation and output")

    def pay(self, value: Value) -> Value:
        """Charge for a value and return the value."""
        self.spend(self.weight(value, limit=self.left))
        return value

    def weight(self, value: Value, limit: int) -> int:
        """Return the cost of printing a value. A result above `limit` is only a lower bound."""
        total, stack = 0, [value]
        # a list may contain another list a million times, so counting stops at the limit
        while stack and total <= limit:
            value = stack.pop()
            total += _VALUE
            if isinstance(value, str | bytes):
                total += len(value)
            elif isinstance(value, int):
                total += value.bit_length() // 64
            elif isinstance(value, list | tuple | set | frozenset):
                total += len(value)
                stack.extend(value)
            elif isinstance(value, dict):
                total += len(value)
                stack.extend(value)
                stack.extend(value.values())
        return total


class _Names(Namespace):
    """Jinja's `namespace`, restricted to names without a leading underscore."""

    def __init__(*args: Value, **kwargs: Value) -> None:
        # A template may pass a keyword argument named `self`.
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Value) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.sandbox.SecurityError(f"namespace has no attribute {name!r}")


class _Generation(Extension):
    """Tag `{% generation %}`, which marks the assistant's text.

    Only the body of the tag is rendered.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _MeterCalls(NodeTransformer):
    """Transformer that replaces loops, literals, slices, and concatenations with sandbox calls."""

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(
            node.data, lineno=node.lineno
        )  # an expression, so that `finalize` meters it

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call("metered", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _call("slice", node.node, *(end or nodes.Const(None) for end in ends))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call("identity", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        # A tuple that is assigned to, as in `for a, b in pairs`, cannot be replaced by a call.
        return _call("identity", node) if node.ctx == "load" else node


def _call(name: str, *arguments: Value) -> nodes.Call:
    line = arguments[0].lineno if arguments else 1
    function = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(function, list(arguments), [], None, None, lineno=line)


@jinja2.pass_context  # also prevents constant folding by the compiler
def _pay_output(context: Context, value: Value) -> Value:
    sandbox: Value = context.environment
    return sandbox.meter.pay(value)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Environment that renders one template and meters all of its work."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, meter: _Meter, now: datetime | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would bypass the meter
            finalize=_pay_output,
            extensions=[_Generation, loopcontrols],
            # Each rendering has its own sandbox, so `_compile` caches the code instead.
            cache_size=0,
        )
        self.meter = meter
        filters = {name: f for name, f in self.filters.items() if name in _FILTERS}
        filters["tojson"] = _tojson
        self.filters = {name: self._metered(name, f) for name, f in filters.items()}
        names = {name: self.globals[name] for name in ("range", "cycler", "joiner")}
        self.globals = names | {
            # a function, because a template could access the methods of the class `dict`
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Names,
            "raise_exception": _raise_exception,
            "strftime_now": _clock(now),
        }

    def metered(self, iterable: Iterable[Value]) -> Iterator[Value]:
        for item in iterable:
            self.meter.spend(_STEP)
            yield item

    def identity(self, value: Value) -> Value:
        return value

    def concatenate(self, *parts: Value) -> str:
        return "".join(str(self.meter.pay(part)) for part in parts)

    def slice(self, value: Value, start: Value, stop: Value, step: Value) -> Value:
        return value[start:stop:step]

    def call(self, context: Value, function: Value, /, *args: Value, **kwargs: Value) -> Value:
        self.meter.spend(_STEP)
        owner = getattr(function, "__self__", None)
        # For plain values, only some methods are allowed; Jinja's own objects guard theirs.
        if owner is not None and not isinstance(owner, _Sandbox | LoopContext | Cycler):
            name = getattr(function, "__name__", "?")
            allowed = next((names for kind, names in _METHODS if isinstance(owner, kind)), ())
            if name not in allowed:
                kind = type(owner).__name__
                raise jinja2.sandbox.SecurityError(f"{kind}.{name} is not allowed in a template")
            if isinstance(owner, str):
                self.meter.spend(len(owner))
                if name == "join" and args:
                    args = (self._pay_join(args[0], owner), *args[1:])
                elif name == "replace":
                    self._pay_replace(owner, *args[:2])
        return self.meter.pay(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Value) -> Callable[..., str] | None:
        """Return Jinja's guarded `str.format`, which is charged in advance."""
        guarded = super().wrap_str_format(value)
        if guarded is None:
            return None

        def metered(*args: Value, **kwargs: Value) -> str:
            text = value.__self__
            # A large width, or a nested field that may contain one, could turn a short text into
            # gigabytes.
            _check_format(r"\d{4}|\{[^{}]*\{", text)
            # In the worst case, every field prints all the arguments.
            self.meter.spend(text.count("{") * self.meter.weight([args, kwargs], self.meter.left))
            return guarded(*args, **kwargs)

        return metered

    def call_binop(self, context: Context, operator: str, left: Value, right: Value) -> Value:
        self.meter.spend(_STEP)
        numbers = isinstance(left, int) and isinstance(right, int)
        # The sizes are checked in advance, because the operation itself could run for hours.
        if operator == "**" and numbers and left.bit_length() * abs(right) > _BITS:
            raise jinja2.TemplateRuntimeError(f"a power has more than {_BITS} bits")
        if operator == "*" and numbers and left.bit_length() + right.bit_length() > _BITS:
            raise jinja2.TemplateRuntimeError(f"a product has more than {_BITS} bits")
        if operator == "*" and not numbers:
            for value, count in ((left, right), (right, left)):
                if isinstance(count, int):
                    self.meter.spend(self.meter.weight(value, self.meter.left) * max(count, 0))
        if operator == "%" and isinstance(left, str):
            _check_format(r"%[^a-zA-Z%]*(\*|\d{4})", left)
            self.meter.spend(left.count("%") * self.meter.weight(right, self.meter.left))
        return self.meter.pay(super().call_binop(context, operator, left, right))

    def _metered(self, name: str, function: Callable[..., Value]) -> Callable[..., Value]:
        """Wrap a filter so that it charges for its result.

        If the result may be longer than the input, it is charged in advance.
        """
        passes = hasattr(function, "jinja_pass_arg")

        @functools.wraps(function)  # copies `jinja_pass_arg`, which Jinja reads
        def metered(*args: Value, **kwargs: Value) -> Value:
            self.meter.spend(_STEP)
            first, rest = args[: passes + 1], args[passes + 1 :]
            value = first[-1] if len(first) > passes else None
            if name == "join":
                separator = rest[0] if rest else kwargs.get("d", "")
                first = (*first[:-1], self._pay_join(value, separator))
            elif name == "replace":
                new = rest[1] if len(rest) > 1 else kwargs.get("new", "")
                self._pay_replace(str(value), rest[0] if rest else kwargs.get("old", ""), new)
            elif name == "indent":
                width = rest[0] if rest else kwargs.get("width", 4)
                wide = width if isinstance(width, int) else len(str(width))
                self.meter.spend((str(value).count("\n") + 1) * max(wide, 0))
            elif name == "tojson":
                self.meter.pay(value)
            elif isinstance(value, str | list | tuple | dict):
                self.meter.spend(len(value))
            return self.meter.pay(function(*first, *rest, **kwargs))

        return metered

    def _pay_join(self, items: Value, separator: Value) -> list[Value]:
        # An iterator can be read only once, so this returns the items as a list.
        found = list(self.metered(items))
        self.meter.spend(len(found) * len(str(separator)))
        return self.meter.pay(found)

    def _pay_replace(self, text: str, old: Value = "", new: Value = "") -> None:
        self.meter.spend(text.count(str(old)) * len(str(new)))


def _check_format(pattern: str, text: str) -> None:
    if re.search(pattern, text):
        raise jinja2.sandbox.SecurityError("a format must not have a computed or very large width")


def _tojson(
    value: Value,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Value = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not (isinstance(indent, int) and indent <= 16):
        raise jinja2.TemplateRuntimeError(
            f"the indent of tojson is {_line(indent)}: must be at most 16"
        )
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _clock(now: datetime | None) -> Callable[[str], str]:
    """Return the function `strftime_now` for a given time. None uses the current time."""

    def strftime_now(format: str) -> str:
        # The output is charged only afterward, so its length must be bounded.
        if len(format) > 100:
            raise jinja2.TemplateRuntimeError("strftime_now: the format exceeds 100 characters")
        _check_format(r"%[^a-zA-Z%]*\d", format)
        return (now or datetime.now()).strftime(format)

    return strftime_now


def _plain(value: Value, path: str, depth: int = 0) -> Value:
    """Copy JSON data.

    Raises DataError for other types, because a template could call their methods.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > _DEPTH:
        raise DataError(f"{path} is nested more than {_DEPTH} levels deep")
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise DataError(f"{path} has the key {_line(repr(key))}: must be a string")
        items = value.items()
        return {key: _plain(item, f"{path}.{_line(key)}", depth + 1) for key, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    kind = type(value).__name__
    raise DataError(
        f"{path} has type {kind}: must be a string, number, boolean, list, dict or None"
    )


def _line(message: object) -> str:
    words = " ".join(str(message)[:1000].split())
    return words if len(words) <= 200 else words[:200] + "..."
