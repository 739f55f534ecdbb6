"""Functions of a score, divided into a part for the kernels and a part that XLA computes.

A function (score, row, head, query position, key position) -> score may read arrays. `ScoreProgram`
divides the operations of its trace:

    values     operations that depend neither on the score nor on both a query and a key. They may
               be any operations. XLA computes them once for all rows, heads, queries and keys
    the rest   elementwise operations, which the kernels apply to tiles

For example, `s * slopes[h] + table[h, q] * jnp.tanh(q - k)` has the values slopes[h] and table[h,
q], so the kernels look up nothing. JAX differentiates the values with respect to the arrays that
the function reads. Therefore, the kernels compute only the gradients of the score and of the
values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from transformer_jax.kernels.program import type_of

Array = jax.Array
SCORE, ROW, HEAD, QUERY, KEY = range(5)  # the arguments of the function

ELEMENTWISE = {
    "abs", "add", "and", "ceil", "clamp", "convert_element_type", "cos", "custom_jvp_call",
    "div", "eq", "erf", "exp", "exp2", "floor", "ge", "gt", "integer_pow", "is_finite", "le",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "sin", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip
"""Operations on tiles that Mosaic compiles, also for their derivatives."""

CALLS = "pjit", "jit", "closed_call"
LOOK_UPS = "gather", "dynamic_slice", "concatenate"
DTYPES = [jnp.dtype(x) for x in (jnp.float32, jnp.int32, jnp.bool_)]


@dataclass(frozen=True, eq=False)
class _Parts:
    """Operations of a program, and the variables that its kernel part reads."""

    before: Sequence[JaxprEqn]
    inside: Sequence[JaxprEqn]
    values: dict[Var, frozenset[int]]
    """Values, with the arguments that each of them depends on."""


class ScoreProgram:
    """Trace of a function of one score, without calls. Two traces with the same text are equal.

    Calls with equal programs share a compiled program, although a lambda is a new object in each
    call.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr, text = jaxpr, str(jaxpr)
        # the text does not contain the numbers of an array
        self.key: object = id(jaxpr) if "[...]" in text else text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreProgram) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @functools.cached_property
    def _parts(self) -> _Parts:
        depends = {x: frozenset({i}) for i, x in enumerate(self.jaxpr.invars)}
        depends |= {x: frozenset[int]() for x in self.jaxpr.constvars}
        before, inside, read = list[JaxprEqn](), list[JaxprEqn](), list[Var]()
        for equation in self.jaxpr.eqns:
            names = [x for x in equation.invars if isinstance(x, Var)]
            found = frozenset[int]().union(*(depends[x] for x in names))
            depends |= dict.fromkeys(equation.outvars, found)
            (inside if _of_pair(found) else before).append(equation)
            read += names if _of_pair(found) else []
        read += [x for x in self.jaxpr.outvars if isinstance(x, Var)]
        # the kernels have the positions already
        given = self.jaxpr.invars[QUERY], self.jaxpr.invars[KEY]
        values = {x: depends[x] for x in read if not _of_pair(depends[x]) and x not in given}
        return _Parts(before, inside, values)

    @functools.cached_property
    def refused(self) -> str | None:
        """The reason why kernels cannot apply the function to a tile, or None."""
        for equation in self._parts.inside:
            if (reason := _refuse(equation)) is not None:
                return reason
        return None

    def values(
        self,
        captured: Sequence[jax.Array],
        rows: jax.Array,  # i32[B]
        heads: jax.Array,  # i32[N]
        q_positions: jax.Array,  # i32[B or 1, T]
        k_positions: jax.Array,  # i32[B or 1, S]
    ) -> tuple[jax.Array, ...]:  # f32 or i32[B or 1, N or 1, T or 1, S or 1] each
        """Return the values. At most one of the axes of queries and keys is longer than 1."""
        parts, found = self._parts, dict[Var, jax.Array]()
        for arguments in dict.fromkeys(parts.values.values()):
            names = [x for x, depends in parts.values.items() if depends == arguments]

            def one(row: Array, head: Array, at: Array, names: Any = names) -> list[jax.Array]:
                inputs = [*captured, jnp.float32(0), row, head, at, at]
                known = dict(zip((*self.jaxpr.constvars, *self.jaxpr.invars), inputs, strict=True))
                _run(parts.before, known)
                return [known[x] for x in names]

            at = {QUERY: q_positions, KEY: k_positions}.get(max(arguments, default=0))
            at = jnp.zeros((1, 1), jnp.int32) if at is None else at
            batch = max(len(at), len(rows) if ROW in arguments else 1)
            row = jnp.broadcast_to(rows if ROW in arguments else rows[:1], batch)
            head = heads if HEAD in arguments else heads[:1]
            at = jnp.broadcast_to(at, (batch, at.shape[1]))
            along: Any = jax.vmap(one, (None, None, 0))
            along = jax.vmap(jax.vmap(along, (None, 0, None)), (0, None, 0))
            axis = 2 if KEY in arguments else 3
            for name, x in zip(names, along(row, head, at), strict=True):
                floating = jnp.issubdtype(x.dtype, jnp.floating)
                x = x.astype(jnp.float32 if floating else jnp.int32)
                found[name] = jnp.expand_dims(x, axis)
        return tuple(found[x] for x in parts.values)

    def __call__(
        self,
        scores: jax.Array,
        q_positions: jax.Array,
        k_positions: jax.Array,
        values: Sequence[jax.Array],
    ) -> jax.Array:
        """Return the new scores of a tile, given arrays that broadcast to it."""
        parts, variables = self._parts, self.jaxpr.invars
        names = [variables[SCORE], variables[QUERY], variables[KEY], *parts.values]

        def one(*inputs: jax.Array) -> jax.Array:
            known = dict(zip(names, inputs, strict=True))
            for name in parts.values:
                known[name] = known[name].astype(type_of(name).dtype)
            _run(parts.inside, known)
            (out,) = self.jaxpr.outvars
            return jnp.asarray(_read(out, known), scores.dtype)

        # broadcast first, so that no operation has an array with fewer axes than the tile
        inputs = [jnp.broadcast_to(x, scores.shape) for x in (q_positions, k_positions, *values)]
        for _ in scores.shape:
            one = jax.vmap(one)
        return one(scores, *inputs)


def inlined(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Return a trace without calls, whose arrays, also those of its calls, are constants."""

    def run(*arguments: jax.Array) -> list[jax.Array]:
        return _inlined(traced, arguments)

    return jax.make_jaxpr(run)(*traced.in_avals)


def _inlined(traced: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    variables = *traced.jaxpr.constvars, *traced.jaxpr.invars
    known = dict(zip(variables, (*traced.consts, *arguments), strict=True))
    _run(traced.jaxpr.eqns, known)
    return [_read(x, known) for x in traced.jaxpr.outvars]


def _run(equations: Iterable[JaxprEqn], known: dict[Var, Any]) -> None:
    """Evaluate equations, and add their results to the known variables."""
    for equation in equations:
        inputs = [_read(x, known) for x in equation.invars]
        if equation.primitive.name in CALLS:
            found = _inlined(_called(equation), inputs)
        elif equation.primitive.name == "copy":
            found = inputs
        # Mosaic lowers `sign` only if a TPU is attached
        elif equation.primitive.name == "sign" and type_of(equation.outvars[0]).dtype in DTYPES:
            x = lax.stop_gradient(jnp.asarray(inputs[0]))
            one = jnp.ones_like(x)
            found = [lax.select(x > 0, one, lax.select(x < 0, -one, x))]
        else:
            params = equation.primitive.get_bind_params(equation.params)
            found = equation.primitive.bind(*inputs, **params)
            found = found if equation.primitive.multiple_results else [found]
        known.update(zip(equation.outvars, found, strict=True))


def _read(x: Var | Literal, known: dict[Var, Any]) -> Any:
    return x.val if isinstance(x, Literal) else known[x]


def _called(equation: JaxprEqn) -> ClosedJaxpr:
    return equation.params.get("jaxpr") or equation.params["call_jaxpr"]


def _of_pair(arguments: frozenset[int]) -> bool:
    """Whether a result that depends on these arguments differs between the pairs of a tile."""
    return SCORE in arguments or {QUERY, KEY} <= arguments


def _refuse(equation: JaxprEqn) -> str | None:
    """Return the reason why an operation cannot be applied to a tile, or None."""
    name = equation.primitive.name
    if name == "custom_jvp_call" or name in CALLS:
        inner = map(_refuse, _called(equation).jaxpr.eqns)
        return next((reason for reason in inner if reason is not None), None)
    if name not in ELEMENTWISE:
        name = "a look-up" if name in LOOK_UPS else name
        return (
            f"does not support a score_mod that computes {name} from a score, or from a query "
            "and a key"
        )
    for dtype in (type_of(x).dtype for x in (*equation.invars, *equation.outvars)):
        if dtype not in DTYPES:
            return f"supports only a score_mod in float32 and int32, but {name} uses {dtype}"
    return None
