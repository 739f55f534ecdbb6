"""Masks as small integer programs that every kernel can evaluate.

A program reads integers of a query and a key, and returns whether the query sees the key, as in:

    Causal() & Segments(ids)        (k0 >= 0) & ((k0 <= q0) & (q1 == k1))

Kernels in JAX call the program with tiles of vectors. The CPU kernels interpret its encoding, which
`numbered` returns and `cpu/source/mask.h` runs. Interval arithmetic (`bounds`) classifies whole
tiles. `write` converts a trace to a program, and rejects unsupported operations.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from transformer_jax.kernels.contract import Array, Refused

Operand = tuple[str, int]
"""Operand of a step. ("q", i) and ("k", i) are vector i of the queries and the keys, and ("pair",
i) is bit i of the integer of the pair. ("number", n) is the number n, and ("step", i) is the result
of step i."""

Range = tuple[Array, Array]
"""Bounds (lowest, highest) of integers, as i32 arrays that broadcast, in NumPy if concrete."""

Value = TypeVar("Value")  # value in a trace that does not depend on the program's vectors

LOW, HIGH = -(2**31), 2**31 - 1


def _wide(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Broadcast the arguments of a `lax` function, which requires equal shapes."""
    return lambda x, y: function(*jnp.broadcast_arrays(jnp.int32(x), jnp.int32(y)))


OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "min": jnp.minimum,
    "max": jnp.maximum,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "shift_left": _wide(lax.shift_left),
    "shift_right_arithmetic": _wide(lax.shift_right_arithmetic),
    "select_n": lambda x, y, z: jnp.where(x != 0, z, y),
    "div": _wide(lax.div),
    "rem": _wide(lax.rem),
}
"""Operations of a program on 32-bit integers, in the order of `Operation` in mask.h. Python's
operators return NumPy arrays for NumPy arrays, and `bounds` calls only those operators for them."""

_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_LOGIC = {"and", "or", "xor"}


@dataclass(frozen=True)
class Program:
    """Boolean function of the integers of a query and a key, with the operators &, | and ~."""

    steps: tuple[tuple[str, tuple[Operand, ...]], ...]
    result: Operand

    def __and__(self, other: Program) -> Program:
        return combined("and", self, other)

    def __or__(self, other: Program) -> Program:
        return combined("or", self, other)

    def __invert__(self) -> Program:
        return combined("eq", self, number(0))

    @property
    def is_bool(self) -> bool:
        """Whether the result is always 0 or 1."""
        return self._is_bool(self.result)

    def _is_bool(self, operand: Operand) -> bool:
        kind, index = operand
        if kind != "step":
            return kind == "pair" or operand in (("number", 0), ("number", 1))
        name, operands = self.steps[index]
        return name in _COMPARISONS or (name in _LOGIC and all(map(self._is_bool, operands)))

    def reads(self, side: str) -> set[int]:
        """Return the indices of the vectors ("q", "k") or bits ("pair") that the program reads."""
        read = [operand for _, operands in self.steps for operand in operands] + [self.result]
        return {index for kind, index in read if kind == side}

    def __call__(self, q: Sequence[jax.Array | None], k: Sequence[jax.Array | None]) -> jax.Array:
        """Return the visible pairs in a tile, given vectors that broadcast to the tile.

        Vectors that are not read may be None. If the bits of `Dense` masks are read, they are in
        k[-1].
        """
        values: dict[Operand, Any] = {}  # arrays, and numbers as int
        for kind, index in (*(x for _, operands in self.steps for x in operands), self.result):
            if kind == "number":
                values[kind, index] = index
            elif kind != "step":
                one: Any = q[index] if kind == "q" else k[-1 if kind == "pair" else index]
                values[kind, index] = (one & np.int32(1 << index)) != 0 if kind == "pair" else one
        for i, (name, operands) in enumerate(self.steps):
            read, inputs = [values[x] for x in operands], list[ArrayLike]()
            if name in _LOGIC and all(map(self._is_bool, operands)):
                inputs += [np.bool_(x) if isinstance(x, int) else x for x in read]
            else:  # a bool among integers; Mosaic GPU cannot cast bools, so select
                for x in read:
                    one = np.int32(x) if isinstance(x, int) else x
                    inputs.append(jnp.where(one, 1, 0) if one.dtype == jnp.bool_ else one)
            values["step", i] = OPERATIONS[name](*inputs)
        found = values[self.result]
        if isinstance(found, int):
            assert k[0] is not None
            return jnp.broadcast_to(jnp.bool_(found), k[0].shape)
        return found if found.dtype == jnp.bool_ else found != 0

    def numbered(self, num_q: int, num_k: int, *, pairs: bool) -> tuple[list[int], list[int]]:
        """Return flattened operations (code, x, y, z) on registers, and the constants.

        The registers contain the query vectors, the key vectors, the integer of the pair if there
        is one, the constants, and then the result of each operation. The last register contains the
        result.
        """
        program, constants = self, []
        # the interpreter in mask.h reads only registers, so each bit becomes a step
        if pairs:
            for bit in sorted(self.reads("pair")):
                integer, mask = Program((), ("k", num_k)), number(1 << bit)
                is_set = combined("ne", combined("and", integer, mask), number(0))
                program = program.with_operand(("pair", bit), is_set)
                # the last register must contain the result, so even a vector that is read needs a
                # step
        if not program.steps or program.result != ("step", len(program.steps) - 1):
            program = combined("max", program, program)
        for _, operands in program.steps:
            constants += [n for kind, n in operands if kind == "number" and n not in constants]
        constants = list(dict.fromkeys(constants))
        first = num_q + num_k + pairs
        starts = {"q": 0, "k": num_q, "number": first, "step": first + len(constants)}
        codes = list(OPERATIONS)
        operations = []
        for name, operands in program.steps:
            registers = [
                starts[kind] + (constants.index(i) if kind == "number" else i)
                for kind, i in operands
            ]
            operations += [codes.index(name), *registers, *[0] * (3 - len(registers))]
        return operations, constants

    def with_operand(self, operand: Operand, by: Program) -> Program:
        """Return the program with an operand replaced by the result of another program."""
        programs = {operand: by}
        for i, (name, operands) in enumerate(self.steps):
            inputs = (programs.get(x, Program((), x)) for x in operands)
            programs["step", i] = combined(name, *inputs)
        return programs.get(self.result, Program((), self.result))

    def bounds(self, ranges: Callable[[Operand], Range]) -> Range:
        """Return the lowest and the highest result, using interval arithmetic on 32-bit integers.

        `ranges` returns the range of a vector or of a bit of the pair. A result that may wrap
        around has the full range.
        """
        found: dict[Operand, Range] = {}
        for operand in (*(x for _, operands in self.steps for x in operands), self.result):
            if operand[0] == "number":
                found[operand] = (np.full((1, 1, 1, 1), operand[1], np.int32),) * 2
            elif operand[0] != "step" and operand not in found:  # a pass over all positions
                found[operand] = ranges(operand)
        for i, (name, operands) in enumerate(self.steps):
            are_bools = all(map(self._is_bool, operands))
            found["step", i] = _bounds(name, are_bools, *(found[x] for x in operands))
        return found[self.result]


def number(n: int) -> Program:
    """Return a program whose result is a constant."""
    return Program((), ("number", int(n)))


def combined(name: str, *programs: Program) -> Program:
    """Return the program of an operation on the results of other programs."""
    # equal steps are merged, so that two windows share the step `q - k`
    steps: dict[tuple[str, tuple[Operand, ...]], int] = {}
    results = []
    for program in programs:
        moved: dict[Operand, Operand] = {}
        for i, (step, operands) in enumerate(program.steps):
            inputs = tuple(moved.get(x, x) for x in operands)
            moved["step", i] = "step", steps.setdefault((step, inputs), len(steps))
        results.append(moved.get(program.result, program.result))
    # no step is needed for an operand that is always true
    if name in ("and", "or"):
        neutral = "number", int(name == "and")
        for i, other in ((0, 1), (1, 0)):
            if results[i] == neutral and programs[other].is_bool:
                return Program(tuple(steps), results[other])
            if name == "or" and results[i] == ("number", 1) and programs[other].is_bool:
                return number(1)
    last = steps.setdefault((name, tuple(results)), len(steps))
    return Program(tuple(steps), ("step", last))


# Interval arithmetic


def _bounds(name: str, are_bools: bool, x: Range, y: Range, *rest: Range) -> Range:
    """Return the bounds of the results of an operation, given the bounds of its operands."""
    (x_low, x_high), (y_low, y_high) = x, y
    # use NumPy while all values are concrete, so that a plan without arrays compiles nothing
    xp: ModuleType = np if all(isinstance(one, np.ndarray) for one in sum(rest, x + y)) else jnp
    corners, found = [(a, b) for a in x for b in y], list[Array]()
    if name in ("eq", "ne"):
        every = (x_low == x_high) & (y_low == y_high) & (x_low == y_low)
        some = (x_low <= y_high) & (y_low <= x_high)
        low, high = (every, some) if name == "eq" else (~some, ~every)
        return low.astype(np.int32), high.astype(np.int32)
    if name in _COMPARISONS:
        holds = OPERATIONS[name]
        ends = [(x_high, y_low), (x_low, y_high)]
        least, most = ends if name in ("lt", "le") else ends[::-1]
        return holds(*least).astype(np.int32), holds(*most).astype(np.int32)
    if name in ("min", "max"):
        pick = xp.minimum if name == "min" else xp.maximum
        return pick(x_low, y_low), pick(x_high, y_high)
    if name == "select_n":
        low, high = xp.minimum(y_low, rest[0][0]), xp.maximum(y_high, rest[0][1])
        first, second = (x_low == 0) & (x_high == 0), (x_low > 0) | (x_high < 0)
        pick_low = xp.where(first, y_low, xp.where(second, rest[0][0], low))
        return pick_low, xp.where(first, y_high, xp.where(second, rest[0][1], high))
    if name in _LOGIC:
        found = [OPERATIONS[name](a, b) for a, b in ((x_low, y_low), (x_high, y_high))]
        # monotone on 0 and 1, so the bounds are exact
        if are_bools and name != "xor":
            return found[0], found[1]
        constant = (x_low == x_high) & (y_low == y_high)
        if are_bools:
            low, high = xp.zeros_like(found[0]), xp.ones_like(found[0])
        else:
            natural = (x_low >= 0) & (y_low >= 0)
            highest = xp.minimum(x_high, y_high) if name == "and" else HIGH
            low, high = xp.where(natural, 0, LOW), xp.where(natural, highest, HIGH)
        return (xp.where(constant, found[0], low).astype(np.int32),
                xp.where(constant, found[0], high).astype(np.int32))  # fmt: skip
    if name == "add":
        ends = [(x_low, y_low), (x_high, y_high)]
        found = [a + b for a, b in ends]
        wraps = [((a ^ c) & (b ^ c)) < 0 for (a, b), c in zip(ends, found, strict=True)]
    elif name == "sub":
        ends = [(x_low, y_high), (x_high, y_low)]
        found = [a - b for a, b in ends]
        wraps = [((a ^ b) & (a ^ c)) < 0 for (a, b), c in zip(ends, found, strict=True)]
    elif name == "mul":
        found = [a * b for a, b in corners]
        # float32 is inexact near 2^31, so products above 2^30 are treated as too large
        sizes = [a.astype(np.float32) * b.astype(np.float32) for a, b in corners]
        wraps = [xp.abs(size) > 2.0**30 for size in sizes]
    elif name == "shift_left":
        found = [a << (b & 31) for a, b in corners]
        wraps = [(c >> (b & 31) != a) | (b < 0) | (b > 31)
                 for (a, b), c in zip(corners, found, strict=True)]  # fmt: skip
    elif name == "shift_right_arithmetic":
        found = [a >> xp.clip(b, 0, 31) for a, b in corners]
        wraps = [b < 0 for _, b in corners]
    else:  # div and rem, toward zero
        by = y_low > 0
        # a divisor that may be 0 or negative results in the full range
        divisors = [xp.where(by, b, 1) for b in y]
        found = []
        for a, b in ((a, b) for a in x for b in divisors):
            down = a // b
            found.append(down + ((a < 0) & (down * b != a)).astype(np.int32))
        wraps = [~by]
        if name == "rem":
            # no multiple of the divisor lies between the bounds
            same = (y_low == y_high) & (found[0] == found[2])
            most = divisors[1] - 1
            low = xp.where(x_low >= 0, 0, xp.maximum(x_low, -most))
            high = xp.where(x_high <= 0, 0, xp.minimum(x_high, most))
            left = [a - c * divisors[0] for a, c in zip(x, found[::2], strict=True)]
            found = [xp.where(same, left[0], low), xp.where(same, left[1], high)]
    anything = functools.reduce(operator.or_, wraps)
    low, high = functools.reduce(xp.minimum, found), functools.reduce(xp.maximum, found)
    return (xp.where(anything, LOW, low).astype(np.int32),
            xp.where(anything, HIGH, high).astype(np.int32))  # fmt: skip


# Conversion of a trace to a program

SHAPES = {"broadcast_in_dim", "reshape", "squeeze", "copy"}
_SAME = {"stop_gradient", "pvary", "pcast", "optimization_barrier"}
_MADE_OF_THEM = {
    "convert_element_type",
    "not",
    "neg",
    "abs",
    "sign",
    "clamp",
    "square",
    "integer_pow",
}
_CALLS = {"pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call"}


class ValueReader(Protocol[Value]):
    """Evaluator for values in a trace, which also defines how a program reads them."""

    def evaluate(
        self, equation: JaxprEqn, inputs: Sequence[Value | Array | Program]
    ) -> list[Value] | None:
        """Return the results of an operation, or None if its inputs include programs."""

    def read(self, value: Value | Array, shape: tuple[int, ...] = ()) -> Program:
        """Return a program that reads a value, which has the shape `shape` in the trace."""

    def halves(self, value: Value | Array, shape: tuple[int, ...]) -> list[Program]:
        """Return the programs that read the lower and the upper half of 64-bit integers."""


class _ConstantReader:
    """`ValueReader` for arrays, which become constants in the program."""

    def evaluate(
        self, equation: JaxprEqn, inputs: Sequence[Array | Program]
    ) -> list[jax.Array] | None:
        arrays = [x for x in inputs if not isinstance(x, Program)]
        return bound(equation, arrays) if len(arrays) == len(inputs) else None

    def read(self, value: Array, shape: tuple[int, ...] = ()) -> Program:
        del shape
        if isinstance(value, jax.core.Tracer) or np.size(value) != 1:
            raise Refused("supports only masks whose function reads only its vectors")
        value = np.asarray(value).reshape(())
        if value.dtype.kind not in "bi" or not LOW <= int(value) <= HIGH:
            raise Refused(f"supports only masks of 32-bit integers, not {value.dtype}")
        return number(int(value))

    def halves(self, value: Array, shape: tuple[int, ...]) -> list[Program]:
        del shape
        raise Refused(f"supports only masks of 32-bit integers, not {value.dtype}")


def write(
    jaxpr: Jaxpr,
    consts: Sequence[Value | Array | Program],
    arguments: Sequence[Value | Array | Program],
    reader: ValueReader[Value],
) -> list[Value | Array | Program]:
    """Return the results of a trace, as programs if they depend on a query or a key.

    Each argument is a program or a value that `reader` can evaluate. Raises Refused if an operation
    is not in `OPERATIONS`, or if its operands are not 32-bit integers.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(atom: Var | Literal) -> Value | Array | Program:
        if isinstance(atom, Literal):
            return np.asarray(atom.val, type_of(atom).dtype)
        return values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        # `jnp` wraps some operations in its own jit
        if name in _CALLS:
            inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            found = write(inner.jaxpr, inner.consts, inputs, reader)
        else:
            evaluated = reader.evaluate(equation, inputs)
            found = [_step(equation, inputs, reader)] if evaluated is None else [*evaluated]
        values.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def type_of(atom: Var | Literal) -> jax.core.ShapedArray:
    """Return the type of an array in a trace."""
    assert isinstance(atom.aval, jax.core.ShapedArray)
    return atom.aval


def _step(
    equation: JaxprEqn, inputs: Sequence[Value | Array | Program], reader: ValueReader[Value]
) -> Program:
    """Convert one operation of a trace to a program."""
    name, out = equation.primitive.name, type_of(equation.outvars[0])
    looks_up = name in ("concatenate", "gather", "dynamic_slice")
    hint = "; use Dense(array) to look up pairs" if looks_up else ""
    kinds, shapes = zip(*((x.dtype, x.shape) for x in map(type_of, equation.invars)), strict=True)
    for dtype in (*kinds, out.dtype):
        # comparisons also accept other integers, because narrow integers fit and 64-bit integers
        # are compared by halves
        compared = name in _COMPARISONS and jnp.issubdtype(dtype, jnp.integer)
        fits = dtype.itemsize < 4 or name in ("eq", "ne")
        if dtype not in (jnp.int32, jnp.bool_) and not (compared and fits):
            raise Refused(f"supports only masks of 32-bit integers, but {name} uses {dtype}")
    if name == "select_n" and len(inputs) > 3:
        raise Refused(
            f"does not support a mask that selects among {len(inputs) - 1} values by a pair"
        )
    misshapen = name in SHAPES and not keeps_order(equation)
    if name not in OPERATIONS.keys() | SHAPES | _SAME | _MADE_OF_THEM or misshapen:
        operation = "a look-up" if looks_up else name
        raise Refused(
            f"does not support a mask that computes {operation} from a query and a key{hint}"
        )
    if kinds[0].itemsize > 4:
        # programs have only 32 bits
        values = [x for x in inputs if not isinstance(x, Program)]
        halves = zip(*map(reader.halves, values, shapes), strict=True)
        same = functools.reduce(operator.and_, (combined("eq", *pair) for pair in halves))
        return same if name == "eq" else ~same
    x, *others = (
        one if isinstance(one, Program) else reader.read(one, shape)
        for one, shape in zip(inputs, shapes, strict=True)
    )  # fmt: skip
    if name in SHAPES or name in _SAME:
        return x
    if name == "convert_element_type":
        if out.dtype == jnp.bool_ != kinds[0]:
            return combined("ne", x, number(0))
        return x
    if name == "not":
        return ~x if out.dtype == jnp.bool_ else combined("xor", x, number(-1))
    if name in ("neg", "abs"):
        negated = combined("sub", number(0), x)
        return negated if name == "neg" else combined("max", x, negated)
    if name == "sign":
        return combined("min", combined("max", x, number(-1)), number(1))
    if name == "clamp":
        return combined("min", combined("max", x, others[0]), others[1])
    if name in ("square", "integer_pow"):
        power = equation.params.get("y", 2)
        return functools.reduce(functools.partial(combined, "mul"), [x] * power, number(1))
    return combined(name, x, *others)


def bound(equation: JaxprEqn, inputs: Sequence[Array]) -> list[jax.Array]:
    """Evaluate one operation of a trace."""
    found = equation.primitive.bind(*inputs, **equation.params)
    return list(found) if equation.primitive.multiple_results else [found]


def keeps_order(equation: JaxprEqn) -> bool:
    """Whether an operation that changes shapes preserves the order of rows and heads."""
    shape, out = type_of(equation.invars[0]).shape, type_of(equation.outvars[0]).shape
    axes = equation.params.get("broadcast_dimensions")
    same_rank = axes == tuple(range(len(out))) and len(shape) == len(out)
    return same_rank or shape == out or math.prod(shape) == 1


def program_of(function: Callable[..., jax.Array], num_q: int, num_k: int) -> Program:
    """Return the program of a function of (query vectors, key vectors), one integer each."""
    one = jax.ShapeDtypeStruct((), jnp.int32)
    # use a new function each time, because JAX caches the traces of functions
    traced = jax.make_jaxpr(lambda q, k: function(q, k))((one,) * num_q, (one,) * num_k)
    arguments = [Program((), ("q", i)) for i in range(num_q)]
    arguments += [Program((), ("k", i)) for i in range(num_k)]
    reader = _ConstantReader()
    (found,) = write(traced.jaxpr, traced.consts, arguments, reader)
    return found if isinstance(found, Program) else reader.read(found)
