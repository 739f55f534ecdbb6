"""Choose between a call of the library and plain JAX when a program is lowered, not when traced.

Only then is it known for which platform a program is, and whether it is exported: such a program
may be run where there is no library, and JAX refuses one with a call that it doesn't know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir

Results = tuple[jax.Array, ...]
Tree = Any
"""A tree of arrays; JAX has no type for one."""
Leaves = Sequence[Tree]
"""Leaves of a tree: arrays, tangents that may be zeros, or what stands for an array in a rule."""


def here_or_elsewhere(
    here: Callable[..., Results],
    elsewhere: Callable[..., Results],
    tree: Tree,
    *,
    alone: bool = False,
) -> Results:
    """Return `here(*tree)` in a program for this machine's CPU, else `elsewhere(*tree)`.

    Both compute the same, of arrays that are leaves. The second one's derivatives are the result's.
    With `alone`, the first one has no rules for `vmap` and for several devices: it is for neither.
    """
    leaves, structure = jax.tree.flatten(tree)
    plain = lambda *leaves: elsewhere(*jax.tree.unflatten(structure, leaves))  # noqa: E731
    # a trace, in which JAX finds what has to be split over devices, and the types in a `shard_map`
    traced = jax.make_jaxpr(here)(*tree)
    return tuple(_either.bind(*leaves, here=traced, elsewhere=plain, alone=alone))


_either = Primitive("here_or_elsewhere")
_either.multiple_results = True


@_either.def_impl
def _run(*leaves: jax.Array, here: ClosedJaxpr, **_: object) -> Results:
    return tuple(jaxpr_as_fun(here)(*leaves))


@_either.def_abstract_eval
def _types(*_: object, here: ClosedJaxpr, **__: object) -> list[jax.core.AbstractValue]:
    return here.out_avals


def _lower(
    context: mlir.LoweringRuleContext,
    *values: ir.Value,
    here: ClosedJaxpr,
    elsewhere: Callable[..., Results],
    alone: bool,
) -> Sequence[ir.Value | Sequence[ir.Value]]:
    module = context.module_context
    # an exported program may run where there is no library, even on a CPU
    exported = module.lowering_parameters.for_export
    stays = tuple(module.platforms) == ("cpu",) and not exported
    if alone:
        stays = stays and getattr(module.axis_context, "num_devices", None) == 1
    chosen = jaxpr_as_fun(here) if stays else elsewhere
    return mlir.lower_fun(chosen, multiple_results=True)(context, *values)


def _differentiate(
    primals: Leaves, tangents: Leaves, *, elsewhere: Callable[..., Results], **_: object
) -> tuple[Results, Results]:
    """Return results and tangents of the plain functions: the library has no derivatives."""
    # only along what moves: integers, such as lists of tiles, have no tangents
    moved = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def along(*changed: jax.Array) -> Results:
        given = dict(zip(moved, changed, strict=True))
        found: Results = elsewhere(*(given.get(i, x) for i, x in enumerate(primals)))
        return found

    return jax.jvp(along, [primals[i] for i in moved], [tangents[i] for i in moved])


def _map(
    leaves: Leaves,
    axes: Sequence[int | None],
    *,
    here: ClosedJaxpr,
    elsewhere: Callable[..., Results],
    alone: bool,
) -> tuple[Results, tuple[int, ...]]:
    if alone:
        found: Results = jax.vmap(elsewhere, in_axes=axes)(*leaves)
        return found, (0,) * len(found)
    # both again under one operation: which one runs is still decided when it is lowered
    library = jax.vmap(jaxpr_as_fun(here), in_axes=axes)
    found = here_or_elsewhere(library, jax.vmap(elsewhere, in_axes=axes), leaves)
    return found, (0,) * len(found)


mlir.register_lowering(_either, _lower)
ad.primitive_jvps[_either] = _differentiate
batching.primitive_batchers[_either] = _map
