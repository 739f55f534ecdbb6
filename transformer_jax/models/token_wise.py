"""Static check that a function treats all indices of an axis independently and identically.

Along such an axis, applying the function to parts of an array is equivalent to applying it to the
whole array. An edit needs this property if the model reads only a few tokens per call. The analysis
of the function's jaxpr is conservative: False means "not proven".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxprs_in_params

Constant = frozenset[int]
"""Axes along which an array is uniform. The array does not depend on the edited value."""
State = int | Constant
"""Axis of an array along which indices remain independent, or a constant."""

ELEMENTWISE = set(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg
    nextafter not or pow real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor""".split()
)
REDUCE = set(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split()
)
ALONG = set("cumsum cumprod cummax cummin cumlogsumexp sort rev top_k".split())


class _Mixed(Exception):
    """Exception raised when an index may depend on other indices."""


def is_wise(
    function: Callable[..., Any],
    values: Sequence[jax.ShapeDtypeStruct],
    axis: int,
    size: int,
    alike: bool = True,
) -> bool:
    """Whether a function provably processes the indices of an axis independently.

    Args:
        function: function that maps arrays to one array with the shape of the first array.
        values: shapes of the arguments. All except the first have one element per row and token,
            [B, T], so their axis is 1, or 0 if `axis` is 0.
        axis: axis of the first array to check.
        size: size of this axis for tracing.
        alike: whether all indices must be treated identically. If False, `x.at[0].add(1)` passes
            the check.
    """
    axes = [axis, *(min(axis, 1) for _ in values[1:])]

    def traced(size: int) -> ClosedJaxpr | None:
        shapes = [
            jax.ShapeDtypeStruct((*x.shape[:k], size, *x.shape[k + 1 :]), x.dtype)
            for x, k in zip(values, axes, strict=True)
        ]
        try:
            closed = jax.make_jaxpr(function)(*shapes)
        except Exception:  # the function does not support this size
            return None
        return closed if [x.shape for x in closed.out_avals] == [shapes[0].shape] else None

    if (closed := traced(size)) is None:
        return False
    if axis:  # tracing with other sizes reveals branches and constants that depend on the size
        others = [traced(other) for other in (1, 2 * size + 1)]
        if any(x is None or _arithmetic(x) != _arithmetic(closed) for x in others):
            return False
    try:
        consts = [_constant(c, alike) for c in closed.consts]
        (found,) = _outputs(closed.jaxpr, consts, axes, alike)
    except _Mixed:
        return False
    return found == axis if isinstance(found, int) else axis in found


def _arithmetic(closed: ClosedJaxpr) -> list[object]:
    """Return the operations and literals of a program, independent of the sizes of its arrays."""
    found: list[object] = []

    def read(jaxpr: Jaxpr, consts: Sequence[Any]) -> None:
        known = [x for x in consts if not isinstance(x, jax.core.Tracer) and jnp.size(x) < 2**16]
        found.extend(np.asarray(x).tobytes() for x in known)
        for eqn in jaxpr.eqns:
            for inner in jaxprs_in_params(eqn.params):
                read(inner, ())
            if eqn.primitive.name in ELEMENTWISE | REDUCE:
                numbers = [np.asarray(x.val).item() for x in eqn.invars if isinstance(x, Literal)]
                found.append((eqn.primitive.name, str(numbers)))

    read(closed.jaxpr, closed.consts)
    return found


def _constant(x: Any, alike: bool) -> Constant:
    """Return the uniform axes of a constant, which are all axes unless `alike`."""
    return frozenset(i for i, size in enumerate(jnp.shape(x)) if size == 1 or not alike)


def _outputs(
    jaxpr: Jaxpr, consts: Sequence[State], inputs: Sequence[State], alike: bool
) -> list[State]:
    states: dict[Var, State] = {}
    states.update(zip(jaxpr.constvars, consts, strict=True))
    states.update(zip(jaxpr.invars, inputs, strict=True))

    def state(x: Any) -> State:
        return _constant(x.val, alike) if isinstance(x, Literal) else states[x]

    for eqn in jaxpr.eqns:
        found = _equation(eqn, [state(x) for x in eqn.invars], alike)
        for var, out in zip(eqn.outvars, found, strict=True):
            states[var] = out if isinstance(out, int) else out | _constant(var.aval, alike)
    return [state(x) for x in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[State], alike: bool) -> list[State]:
    """Return the states of an equation's outputs, or raise _Mixed if they are unknown."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [jnp.shape(x.aval) for x in eqn.invars]
    outs = [x.aval.shape for x in eqn.outvars]
    inner = next((params[n] for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if n in params), None)
    if inner is not None and name not in ("scan", "while", "cond"):
        closed = isinstance(inner, ClosedJaxpr)
        consts = [_constant(c, alike) for c in inner.consts] if closed else []
        return _outputs(inner.jaxpr if closed else inner, consts, inputs, alike)
    along = {k for k in inputs if isinstance(k, int)}
    if name in ELEMENTWISE:
        if not along:
            uniform = frozenset(range(len(outs[0])))
            for x, shape in zip(inputs, shapes, strict=True):
                uniform = uniform & x if shape and not isinstance(x, int) else uniform
            return [uniform]
        (k,) = along if len(along) == 1 else (_mixed(),)
        for x, shape in zip(inputs, shapes, strict=True):
            # an operand that differs along the axis would treat its indices differently
            if shape and not isinstance(x, int) and k not in x:
                _mixed()
        return [k]
    # the numbers differ only along their own axis
    if name == "iota":
        return [frozenset(range(len(outs[0]))) - {params["dimension"]}]
    first: State = inputs[0] if inputs else frozenset()
    shape = shapes[0] if shapes else ()
    moved = _moved_axes(name, params, shape, outs[0])
    if moved is not None:
        if isinstance(first, int) and along == {first}:
            fit = [
                isinstance(x, int) or first in x or not s
                for x, s in zip(inputs, shapes, strict=True)
            ]
            target = moved(first) if all(fit) else None
            return [_mixed() if target is None else target] * len(outs)
        if not along and not isinstance(first, int):
            kept = {at for at in map(moved, first) if at is not None}
            new = set(range(len(outs[0]))) - {moved(i) for i in range(len(shape))}
            return [frozenset(kept | (new if name == "broadcast_in_dim" else set()))] * len(outs)
    if not along:
        return [frozenset()] * len(outs)
    if name == "dot_general":
        return [_of_product(params["dimension_numbers"], inputs, shapes)]
    written = name.startswith("scatter") or name == "dynamic_update_slice"
    if written and not alike and isinstance(first, int) and along == {first}:
        if not any(isinstance(x, int) for x in inputs[1:]):
            return [first]  # the updates and their indices do not depend on the value
    if name.startswith("scatter"):
        return [_of_scatter(params["dimension_numbers"], inputs, shapes)]
    (k,) = along if len(along) == 1 else (_mixed(),)
    fits = [x == k or (not isinstance(x, int) and k in x) for x in inputs]
    if name in ("concatenate", "sort") and k != params["dimension"] and all(fits):
        return [k] * len(outs)
    if name == "dynamic_update_slice" and all(fits[:2]) and shapes[1][k] == shapes[0][k]:
        return [k] if not any(isinstance(x, int) for x in inputs[2:]) else _mixed()
    if name == "gather":
        return [_of_gather(params, inputs, shapes, outs[0])]
    return _mixed()


def _mixed() -> Any:
    raise _Mixed


def _moved_axes(
    name: str, params: Any, shape: tuple[int, ...], out: tuple[int, ...]
) -> Callable[[int], int | None] | None:
    """Return a function that maps axes of the first operand to output axes, or None if removed."""
    if name in REDUCE:
        gone = params["axes"]
        return lambda k: None if k in gone else k - sum(i < k for i in gone)
    if name in ALONG:
        mixed = params.get("dimensions", (params.get("axis", params.get("dimension", -1)),))
        mixed = [k % len(shape) for k in mixed]
        return lambda k: None if k in mixed else k
    if name == "broadcast_in_dim":
        to = params["broadcast_dimensions"]
        return lambda k: to[k]
    if name == "transpose":
        return lambda k: params["permutation"].index(k)
    if name == "stack":
        return lambda k: k + (params["axis"] <= k)
    if name == "squeeze":
        gone = params["dimensions"]
        return lambda k: None if k in gone else k - sum(i < k for i in gone)
    if name == "reshape":

        def reshaped(k: int) -> int | None:
            # the axis must have the same size, and the same number of elements before it
            before = 1
            for n in shape[:k]:
                before *= n
            product = 1
            for j, n in enumerate(out):
                if product == before and n == shape[k]:
                    return j
                product *= n
            return None

        return reshaped if params["dimensions"] is None else None
    if name == "slice":
        ends, steps = params["limit_indices"], params["strides"] or (1,) * len(shape)
        return lambda k: k if ends[k] == out[k] == shape[k] and steps[k] == 1 else None
    if name == "dynamic_slice":
        return lambda k: k if out[k] == shape[k] else None
    if name == "pad":
        return lambda k: k if tuple(params["padding_config"][k]) == (0, 0, 0) else None
    if name == "split":
        return lambda k: None if k == params["axis"] else k
    return None


def _of_product(numbers: Any, inputs: list[State], shapes: list[tuple[int, ...]]) -> int:
    contracted, batched = numbers
    found = set()
    for side, k in enumerate(inputs):
        if not isinstance(k, int):
            continue
        if k in contracted[side]:
            _mixed()
        if k in batched[side]:
            at = batched[side].index(k)
            other, other_axis = inputs[1 - side], batched[1 - side][at]
            if other != other_axis and (isinstance(other, int) or other_axis not in other):
                _mixed()
            found.add(at)
            continue
        if isinstance(inputs[1 - side], int):
            _mixed()
        taken = {*contracted[side], *batched[side]}
        # the result has the batched axes, then the free axes of the left operand, then those of the
        # right
        at = len(batched[0]) + sum(i not in taken for i in range(k))
        if side:
            at += len(shapes[0]) - len(contracted[0]) - len(batched[0])
        found.add(at)
    (axis,) = found if len(found) == 1 else (_mixed(),)
    return axis


def _of_gather(
    params: Any, inputs: list[State], shapes: list[tuple[int, ...]], out: tuple[int, ...]
) -> int:
    numbers, (operand, indices) = params["dimension_numbers"], inputs
    batching = getattr(numbers, "operand_batching_dims", ())
    gone = {*numbers.collapsed_slice_dims, *batching}
    if isinstance(operand, int) and not isinstance(indices, int):
        whole = params["slice_sizes"][operand] == shapes[0][operand]
        if operand in gone or operand in numbers.start_index_map or not whole:
            _mixed()
        return numbers.offset_dims[sum(i not in gone for i in range(operand))]
    if isinstance(indices, int) and not isinstance(operand, int) and not batching:
        # the last axis of the indices contains the coordinates of one element
        if indices == len(shapes[1]) - 1:
            _mixed()
        places = [i for i in range(len(out)) if i not in numbers.offset_dims]
        return places[indices]
    return _mixed()


def _of_scatter(numbers: Any, inputs: list[State], shapes: list[tuple[int, ...]]) -> int:
    operand, indices, updates = inputs
    gone = {*numbers.inserted_window_dims, *getattr(numbers, "operand_batching_dims", ())}
    kept = [i for i in range(len(shapes[0])) if i not in gone]
    k = operand if isinstance(operand, int) else None
    if isinstance(updates, int):
        if updates not in numbers.update_window_dims:
            _mixed()
        written = kept[numbers.update_window_dims.index(updates)]
        k = written if k in (None, written) else _mixed()
    if k is None or isinstance(indices, int) or k not in kept:
        _mixed()
    assert k is not None
    at = numbers.update_window_dims[kept.index(k)]
    whole = shapes[2][at] == shapes[0][k] and k not in numbers.scatter_dims_to_operand_dims
    for x, axis in (operand, k), (updates, at):
        if not isinstance(x, int) and axis not in x:
            _mixed()
    return k if whole else _mixed()
