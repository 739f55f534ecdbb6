"""Turn a mask's comparison into the small program that the kernels on a CPU evaluate.

The comparison is traced once for a pair of a query and a key. Each operation of the trace becomes
(operation, x, y, z), the numbers of the registers that it reads: the query's vectors, the key's,
the integer of the pair if there is one, constants, and results so far. `source/mask.h` runs it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.kernels.contract import Refused

_OPERATIONS = (
    "add", "sub", "mul", "and", "or", "xor", "min", "max", "eq", "ne", "lt", "le", "gt", "ge",
    "shift_left", "shift_right_arithmetic", "select_n", "div", "rem",
)  # fmt: skip
"""In the order of `Operation` in source/mask.h."""
_CODE = {name: code for code, name in enumerate(_OPERATIONS)}
_SAME = {"broadcast_in_dim", "reshape", "squeeze", "copy", "stop_gradient"}
_CALLS = {"pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call"}


class Program(NamedTuple):
    """Hold the operations, i32[n, 4], and the constants, i32[m], as tuples."""

    operations: tuple[int, ...] = ()
    constants: tuple[int, ...] = ()


def program_of(visible: Any, num_q: int, num_k: int, *, pairs: bool) -> Program:
    """Return the program of a comparison; Refused where an operation is not of 32-bit integers."""
    one = jax.ShapeDtypeStruct((), jnp.int32)
    more = (jax.ShapeDtypeStruct((), jnp.int8),) if pairs else ()
    # a new function each time: JAX remembers the traces of those that it has seen
    traced = jax.make_jaxpr(lambda q, k: visible(q, k))((one,) * num_q, (*(one,) * num_k, *more))
    writer = _Writer(num_q + num_k + pairs)
    (result,) = writer.run(traced.jaxpr, traced.consts, list(range(writer.inputs)))
    if not writer.operations or writer.operations[-1] is not writer.made.get(result):
        result = writer.write("or", result, result)  # the last register is the answer
    first = writer.inputs + len(writer.constants)

    def number(register: Any) -> int:
        kind, index = register if isinstance(register, tuple) else ("input", register)
        return index + {"input": 0, "constant": writer.inputs, "result": first}[kind]

    operations = [
        (code, *(number(register) for register in registers))
        for code, *registers in writer.operations
    ]
    return Program(tuple(x for each in operations for x in each), tuple(writer.constants))


class _Writer:
    """Collect the operations and constants of a trace."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.operations: list[list[Any]] = []
        self.constants: list[int] = []
        self.made: dict[Any, list[Any]] = {}

    def write(self, name: str, x: Any, y: Any, z: Any = 0) -> Any:
        """Append an operation; return the register of its result."""
        register = "result", len(self.operations)
        self.operations.append([_CODE[name], x, y, z])
        self.made[register] = self.operations[-1]
        return register

    def constant(self, value: Any) -> Any:
        """Return the register of a constant."""
        if isinstance(value, jax.core.Tracer) or np.size(value) != 1:
            raise Refused("takes a mask whose comparison reads its vectors alone")
        value = np.asarray(value).reshape(())
        if value.dtype.kind not in "bi" or not -(2**31) <= int(value) < 2**31:
            raise Refused(f"takes masks of integers of 32 bits, not {value.dtype}")
        if int(value) not in self.constants:
            self.constants.append(int(value))
        return "constant", self.constants.index(int(value))

    def run(self, jaxpr: Any, consts: Any, arguments: list[Any]) -> list[Any]:
        """Append the operations of a trace; return the registers of its results."""
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= {var: self.constant(x) for var, x in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom: Any) -> Any:
            return known[atom] if not hasattr(atom, "val") else self.constant(atom.val)

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            known |= zip(equation.outvars, self.equation(equation, given), strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, given: list[Any]) -> list[Any]:
        """Append one operation of a trace."""
        name = equation.primitive.name
        for atom in (*equation.invars, *equation.outvars):
            dtype = atom.aval.dtype
            if dtype not in (jnp.int32, jnp.int8, jnp.bool_):
                raise Refused(f"takes masks of integers of 32 bits, {name} is of {dtype}")
        if name in _CALLS:
            inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            return self.run(inner.jaxpr, inner.consts, given)
        is_bool = equation.outvars[0].aval.dtype == jnp.bool_
        if name in _SAME:
            return given
        if name == "convert_element_type":
            from_bool = equation.invars[0].aval.dtype == jnp.bool_
            if is_bool and not from_bool:
                return [self.write("ne", given[0], self.constant(0))]
            narrows = equation.outvars[0].aval.dtype == jnp.int8 and not from_bool
            if narrows and equation.invars[0].aval.dtype != jnp.int8:
                raise Refused("takes no mask that makes integers of 8 bits")
            return given
        if name == "not":
            return [self.write("xor", given[0], self.constant(1 if is_bool else -1))]
        if name == "neg":
            return [self.write("sub", self.constant(0), given[0])]
        if name == "abs":
            negated = self.write("sub", self.constant(0), given[0])
            return [self.write("max", given[0], negated)]
        if name == "clamp":
            return [self.write("min", self.write("max", given[0], given[1]), given[2])]
        if name not in _CODE or len(given) > 3:
            raise Refused(f"takes no mask that computes {name}")
        return [self.write(name, *given)]
