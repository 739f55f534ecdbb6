"""Derivatives of kernels, computed by their own backward passes and by plain JAX.

`jax.custom_vjp` combines a forward and a backward pass into a function, and JAX can compute only
the gradient of that function. In this module, a plain function that JAX can differentiate computes
the same values as the passes. The values and derivatives come from the following sources:

    f(x)                    computed by the caller's function
    gradient                from the forward and the backward pass
    tangents of f           from those of the plain function (`jax.jvp`, `jax.linearize`)
    tangents of a gradient  from those of the plain function's gradient, of any order

The tangents are computed by a single JAX primitive, which is linear in the input tangents. The
primitive computes the tangents of the plain function, and its transpose is the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir

from transformer_jax.kernels.lowering import Leaves, Tree

Function = Callable[..., Tree]


@dataclass(frozen=True, eq=False)
class Passes:
    """Passes that compute a function f of a tree of arrays, and the gradient of f.

    The output is a tuple of floating-point arrays. `wanted` is a tree with the structure of the
    input. Its leaves are True if the gradient of the input leaf is needed. The backward pass may
    return any values for the other leaves.
    """

    forward: Callable[[Tree], tuple[tuple[jax.Array, ...], Tree]]
    """Return the outputs, and the residuals for the backward pass."""
    backward: Callable[[Tree, Tree, tuple[jax.Array, ...], Tree], Tree]
    """Return a tree of gradients from (tree, residuals, cotangents, wanted)."""
    plain: Callable[[Tree], tuple[jax.Array, ...]]
    """Return the outputs, computed by code that JAX can differentiate."""


def differentiable(
    compute: Callable[[Tree], tuple[jax.Array, ...]], passes: Passes, tree: Tree
) -> tuple[jax.Array, ...]:
    """Return f as a function `compute(tree)` that has derivatives of any order."""
    leaves, structure = jax.tree.flatten(tree)
    functions = _LeafPasses(passes, structure)

    @jax.custom_jvp
    def call(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return compute(jax.tree.unflatten(structure, leaves))

    @partial(call.defjvp, symbolic_zeros=True)
    def rule(leaves: Leaves, tangents: Leaves) -> tuple[Tree, Tree]:
        out, saved = functions.forward(leaves)
        return out, functions.tangents(leaves, saved, out, tangents)

    return call(*leaves)


@dataclass(frozen=True, eq=False)
class _LeafPasses:
    """`Passes` as differentiable functions of the leaves of the tree."""

    passes: Passes
    structure: jax.tree_util.PyTreeDef

    def plain(self, leaves: Leaves) -> tuple[jax.Array, ...]:
        return self.passes.plain(self.structure.unflatten(leaves))

    def forward(self, leaves: Leaves) -> tuple[tuple[jax.Array, ...], Tree]:
        @jax.custom_jvp
        def call(*leaves: jax.Array) -> Tree:
            return self.passes.forward(self.structure.unflatten(leaves))

        @partial(call.defjvp, symbolic_zeros=True)
        def rule(leaves: Leaves, tangents: Leaves) -> tuple[Tree, Tree]:
            out, saved = self.forward(leaves)
            # only `backward` uses the residuals, and it computes their tangents itself
            zeros = jax.tree.map(partial(zero_from_primal, symbolic_zeros=False), saved)
            return (out, saved), (self.tangents(leaves, saved, out, tangents), zeros)

        return call(*leaves)

    def tangents(self, leaves: Leaves, saved: Tree, out: Tree, tangents: Leaves) -> Tree:
        # leaves without a tangent cost nothing, because the backward pass skips their gradients
        dots = _nonzero(SymbolicZero, tangents)
        if not dots:
            return jax.tree.map(jnp.zeros_like, out)
        moved = list(dots)
        saved_leaves, saved_structure = jax.tree.flatten(saved)
        count = len(leaves)

        def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            dots = arrays[-len(moved) :]
            return _along(self.plain, arrays[:count], dict(zip(moved, dots, strict=True)))

        def transposed(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            at = count + len(saved_leaves)
            saved = jax.tree.unflatten(saved_structure, arrays[count:at])
            return self.backward(moved, arrays[:count], saved, arrays[at:])

        return tuple(
            _tangents.bind(
                *leaves,
                *saved_leaves,
                *dots.values(),
                moved=len(moved),
                compute=compute,
                transposed=transposed,
                types=tuple(jax.typeof(x).to_tangent_aval() for x in out),
            )
        )

    def backward(
        self, moved: Sequence[int], leaves: Leaves, saved: Tree, cotangents: Leaves
    ) -> tuple[jax.Array, ...]:
        """Return the gradients of the `moved` leaves."""
        count = len(leaves)
        wanted = self.structure.unflatten([i in moved for i in range(count)])

        @jax.custom_jvp
        def call(leaves: Tree, saved: Tree, cotangents: Tree) -> tuple[jax.Array, ...]:
            tree = self.structure.unflatten(leaves)
            gradients = self.passes.backward(tree, saved, tuple(cotangents), wanted)
            gradients = self.structure.flatten_up_to(gradients)
            return tuple(gradients[i] for i in moved)

        def plain(arrays: Leaves) -> tuple[jax.Array, ...]:
            leaves, cotangents = arrays[:count], tuple(arrays[count:])
            of_moved, inputs = _restricted(self.plain, leaves, moved)
            return jax.vjp(of_moved, *inputs)[1](cotangents)

        @partial(call.defjvp, symbolic_zeros=True)
        def rule(primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
            leaves, saved, cotangents = primals
            out = self.backward(moved, leaves, saved, cotangents)
            dots = _nonzero(SymbolicZero, [*tangents[0], *tangents[2]])
            # only the residuals have tangents
            if not dots:
                return out, jax.tree.map(jnp.zeros_like, out)
            return out, _along(plain, [*leaves, *cotangents], dots)

        return call(list(leaves), saved, list(cotangents))


def _nonzero(zero: type, tangents: Leaves) -> dict[int, Tree]:
    """Return the tangents that are not symbolic zeros, keyed by index."""
    return {i: x for i, x in enumerate(tangents) if not isinstance(x, zero)}


def _along(function: Callable[[Leaves], Tree], leaves: Leaves, tangents: dict[int, Tree]) -> Tree:
    """Return the tangents of a function, given the tangents of some of its input leaves."""
    of_some, some = _restricted(function, leaves, tangents)
    return jax.jvp(of_some, some, list(tangents.values()))[1]


def _restricted(
    function: Callable[[Leaves], Tree], leaves: Leaves, moved: Iterable[int]
) -> tuple[Callable[..., Tree], list[Tree]]:
    """Return a function of only the `moved` leaves, and the values of these leaves."""

    def of_some(*some: Tree) -> Tree:
        replaced = dict(zip(moved, some, strict=True))
        return function([replaced.get(i, x) for i, x in enumerate(leaves)])

    return of_some, [leaves[i] for i in moved]


# The primitive, whose operands are primal values followed by `moved` tangents

_tangents = Primitive("tangents")
_tangents.multiple_results = True


@_tangents.def_impl
def _run(*arrays: jax.Array, compute: Function, **_: object) -> Tree:
    return compute(*arrays)


@_tangents.def_abstract_eval
def _types(*_: object, types: tuple[jax.core.AbstractValue, ...], **__: object) -> Tree:
    return types


def _lower(
    context: mlir.LoweringRuleContext, *values: ir.Value, compute: Function, **_: object
) -> Sequence[ir.Value | Sequence[ir.Value]]:
    return mlir.lower_fun(compute, multiple_results=True)(context, *values)


def _differentiate(
    arrays: Leaves, changes: Leaves, *, moved: int, compute: Function, **rest: object
) -> Tree:
    """Return the tangents, and their own tangents with respect to all operands."""
    primals, bind = arrays[:-moved], partial(_tangents.bind, moved=moved, compute=compute, **rest)
    nonzero = _nonzero(ad.Zero, changes)
    parts = []
    # the operation is linear in the tangents, so their tangents pass through the same operation
    if any(i >= len(primals) for i in nonzero):
        parts.append(bind(*primals, *map(ad.instantiate_zeros, changes[-moved:])))
    changed = {i: x for i, x in nonzero.items() if i < len(primals)}
    if changed:
        parts.append(_along(lambda xs: compute(*xs), arrays, changed))
    return bind(*arrays), jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *map(list, parts))


def _transpose(
    cotangents: Leaves, *arrays: jax.Array, moved: int, transposed: Function, **_: object
) -> Tree:
    primals = arrays[:-moved]
    found = transposed(*primals, *map(ad.instantiate_zeros, cotangents))
    linear = map(ad.is_undefined_primal, arrays[-moved:])
    return [None] * len(primals) + [x if a else None for x, a in zip(found, linear, strict=True)]


def _map(
    arrays: Leaves,
    axes: Sequence[int | None],
    *,
    moved: int,
    compute: Function,
    transposed: Function,
    types: tuple[jax.core.AbstractValue, ...],
) -> tuple[Tree, Tree]:
    (size,) = {x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None}

    def mapped(x: Tree, axis: int | None) -> Tree:
        if axis is None:
            return jnp.broadcast_to(x[None], (size, *x.shape))
        return jnp.moveaxis(x, axis, 0)

    # map all tangents, so that the results and the cotangents of a transpose are also mapped
    arrays = [*arrays[:-moved], *map(mapped, arrays[-moved:], axes[-moved:])]
    axes = (*axes[:-moved], *(0 for _ in range(moved)))
    compute = jax.vmap(compute, in_axes=axes)
    of_cotangents = jax.vmap(transposed, in_axes=(*axes[:-moved], *(0 for _ in types)))
    out = _tangents.bind(
        *arrays,
        moved=moved,
        compute=compute,
        transposed=of_cotangents,
        types=tuple(jax.make_jaxpr(compute)(*arrays).out_avals),
    )
    return out, (0,) * len(types)


mlir.register_lowering(_tangents, _lower)
ad.primitive_jvps[_tangents] = _differentiate
ad.primitive_transposes[_tangents] = _transpose
batching.primitive_batchers[_tangents] = _map


def _register_discharge_rule() -> None:
    """Register the discharge rule of `custom_vjp` for `custom_jvp` functions that create buffers.

    Pallas kernels on Mosaic GPU create buffers. The rule applies to both kinds of functions,
    because it runs after differentiation. If the private names in JAX change, programs that need
    the rule raise JAX's own NotImplementedError, and all other programs still run.
    """
    with contextlib.suppress(ImportError, AttributeError, KeyError):  # private names of JAX
        from jax._src.custom_derivatives import custom_jvp_call_p, custom_vjp_call_p
        from jax._src.state.discharge import _discharge_rules

        usual = _discharge_rules[custom_vjp_call_p]
        unused: dict[str, Any] = dict(num_consts=0, fwd_jaxpr_thunk=None, bwd=None, out_trees=None)

        def rule(*args: Any, call_jaxpr: Jaxpr, **_: object) -> Tree:  # private types of JAX
            return usual(*args, call_jaxpr=call_jaxpr, symbolic_zeros=False, **unused)

        # `setdefault`, because a later version of JAX may have its own rule
        _discharge_rules.setdefault(custom_jvp_call_p, rule)


_register_discharge_rule()
