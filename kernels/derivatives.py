"""Derivatives of fast kernels: a backward pass of their own, and plain JAX for all others.

`jax.custom_vjp` makes a forward and a backward pass one function, of which JAX then knows the
gradient and nothing else. Here a plain function stands beside the passes, one that computes the
same and that JAX differentiates itself:

    f(x)                    is computed as the caller says
    gradient                by the forward and the backward pass
    tangents of f           by those of the plain function (`jax.jvp`, `jax.linearize`)
    tangents of a gradient  by those of the plain function's gradient, in every order

Tangents are one operation of JAX's, which is linear in them. What it computes is the plain
function's tangents, and its transpose is the backward pass.
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
    """The passes that compute f of a tree of arrays, and its gradient.

    Outputs are a tuple of floating arrays. `wanted` is a tree of bools in the structure of the
    tree of arrays: True where the gradient is read. Elsewhere the backward pass may return
    anything.
    """

    forward: Callable[[Tree], tuple[tuple[jax.Array, ...], Tree]]
    """Compute the outputs of the tree, and what the backward pass reads."""
    backward: Callable[[Tree, Tree, tuple[jax.Array, ...], Tree], Tree]
    """Compute gradients, a tree: given the tree, what `forward` saved, cotangents and `wanted`."""
    plain: Callable[[Tree], tuple[jax.Array, ...]]
    """Compute the outputs of the tree in code that JAX differentiates."""


def differentiable(
    compute: Callable[[Tree], tuple[jax.Array, ...]], passes: Passes, tree: Tree
) -> tuple[jax.Array, ...]:
    """Return `compute(tree)`, which is f of the passes, with derivatives of every order."""
    leaves, structure = jax.tree.flatten(tree)
    inside = _OfLeaves(passes, structure)

    @jax.custom_jvp
    def call(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return compute(jax.tree.unflatten(structure, leaves))

    @partial(call.defjvp, symbolic_zeros=True)
    def rule(leaves: Leaves, tangents: Leaves) -> tuple[Tree, Tree]:
        out, saved = inside.forward(leaves)
        return out, inside.tangents(leaves, saved, out, tangents)

    return call(*leaves)


@dataclass(frozen=True, eq=False)
class _OfLeaves:
    """`Passes` as functions of the leaves of the tree, each differentiable in turn."""

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
            # only `backward` reads what is saved, and finds its own tangents
            zeros = jax.tree.map(partial(zero_from_primal, symbolic_zeros=False), saved)
            return (out, saved), (self.tangents(leaves, saved, out, tangents), zeros)

        return call(*leaves)

    def tangents(self, leaves: Leaves, saved: Tree, out: Tree, tangents: Leaves) -> Tree:
        """Return the tangents of the outputs."""
        # leaves that nobody moves cost nothing: their gradients are not even asked for
        dots = _given(SymbolicZero, tangents)
        if not dots:
            return jax.tree.map(jnp.zeros_like, out)
        moved = list(dots)
        saved_leaves, saved_structure = jax.tree.flatten(saved)
        count = len(leaves)

        def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            given = arrays[-len(moved) :]
            return _along(self.plain, arrays[:count], dict(zip(moved, given, strict=True)))

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
        """Return the gradients of the leaves that are moved."""
        count = len(leaves)
        wanted = self.structure.unflatten([i in moved for i in range(count)])

        @jax.custom_jvp
        def call(leaves: Tree, saved: Tree, cotangents: Tree) -> tuple[jax.Array, ...]:
            tree = self.structure.unflatten(leaves)
            found = self.passes.backward(tree, saved, tuple(cotangents), wanted)
            found = self.structure.flatten_up_to(found)
            return tuple(found[i] for i in moved)

        def plain(arrays: Leaves) -> tuple[jax.Array, ...]:
            leaves, cotangents = arrays[:count], tuple(arrays[count:])
            of_moved, given = _restricted(self.plain, leaves, moved)
            return jax.vjp(of_moved, *given)[1](cotangents)

        @partial(call.defjvp, symbolic_zeros=True)
        def rule(primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
            leaves, saved, cotangents = primals
            out = self.backward(moved, leaves, saved, cotangents)
            dots = _given(SymbolicZero, [*tangents[0], *tangents[2]])
            # only what is saved moves
            if not dots:
                return out, jax.tree.map(jnp.zeros_like, out)
            return out, _along(plain, [*leaves, *cotangents], dots)

        return call(list(leaves), saved, list(cotangents))


def _given(zero: type, tangents: Leaves) -> dict[int, Tree]:
    """Return the tangents that are not zero by their type, by index."""
    return {i: x for i, x in enumerate(tangents) if not isinstance(x, zero)}


def _along(function: Callable[[Leaves], Tree], leaves: Leaves, tangents: dict[int, Tree]) -> Tree:
    """Return the tangents of a function of leaves, given those of some of them."""
    of_some, some = _restricted(function, leaves, tangents)
    return jax.jvp(of_some, some, list(tangents.values()))[1]


def _restricted(
    function: Callable[[Leaves], Tree], leaves: Leaves, moved: Iterable[int]
) -> tuple[Callable[..., Tree], list[Tree]]:
    """Return a function of some of its leaves alone, and these."""

    def of_some(*some: Tree) -> Tree:
        given = dict(zip(moved, some, strict=True))
        return function([given.get(i, x) for i, x in enumerate(leaves)])

    return of_some, [leaves[i] for i in moved]


# The operation: of what is known, and of `moved` tangents after it

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
    """Return tangents, and the change of these: by what is known, and linear in themselves."""
    known, bind = arrays[:-moved], partial(_tangents.bind, moved=moved, compute=compute, **rest)
    given = _given(ad.Zero, changes)
    parts = []
    # linear in the tangents, so theirs are the same operation on their changes
    if any(i >= len(known) for i in given):
        parts.append(bind(*known, *map(ad.instantiate_zeros, changes[-moved:])))
    by_known = {i: x for i, x in given.items() if i < len(known)}
    if by_known:
        parts.append(_along(lambda xs: compute(*xs), arrays, by_known))
    return bind(*arrays), jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *map(list, parts))


def _transpose(
    cotangents: Leaves, *arrays: jax.Array, moved: int, transposed: Function, **_: object
) -> Tree:
    known = arrays[:-moved]
    found = transposed(*known, *map(ad.instantiate_zeros, cotangents))
    asked = map(ad.is_undefined_primal, arrays[-moved:])
    return [None] * len(known) + [x if a else None for x, a in zip(found, asked, strict=True)]


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

    # all tangents are mapped, so that the results are, and the cotangents of a transpose
    arrays = [*arrays[:-moved], *map(mapped, arrays[-moved:], axes[-moved:])]
    axes = (*axes[:-moved], *(0 for _ in range(moved)))
    compute = jax.vmap(compute, in_axes=axes)
    of_cotangents = jax.vmap(transposed, in_axes=(*axes[:-moved], *(0 for _ in types)))
    found = _tangents.bind(
        *arrays,
        moved=moved,
        compute=compute,
        transposed=of_cotangents,
        types=tuple(jax.make_jaxpr(compute)(*arrays).out_avals),
    )
    return found, (0,) * len(types)


mlir.register_lowering(_tangents, _lower)
ad.primitive_jvps[_tangents] = _differentiate
ad.primitive_transposes[_tangents] = _transpose
batching.primitive_batchers[_tangents] = _map


def _let_kernels_have_buffers() -> None:
    """Teach JAX to compile a `custom_jvp` whose function makes buffers, as it does a `custom_vjp`.

    Kernels in Pallas on Mosaic GPU make some. When a program is compiled nobody differentiates it
    any more, so JAX's rule for the one serves the other. Where JAX has other names inside, such a
    program raises JAX's own NotImplementedError; nothing else needs the rule.
    """
    with contextlib.suppress(ImportError, AttributeError, KeyError):  # names of JAX's own
        from jax._src.custom_derivatives import custom_jvp_call_p, custom_vjp_call_p
        from jax._src.state.discharge import _discharge_rules

        usual = _discharge_rules[custom_vjp_call_p]
        unused: dict[str, Any] = dict(num_consts=0, fwd_jaxpr_thunk=None, bwd=None, out_trees=None)

        def rule(*given: Any, call_jaxpr: Jaxpr, **_: object) -> Tree:  # JAX's own types
            return usual(*given, call_jaxpr=call_jaxpr, symbolic_zeros=False, **unused)

        # not over a rule of JAX's own, which a later version may have
        _discharge_rules.setdefault(custom_jvp_call_p, rule)


_let_kernels_have_buffers()
