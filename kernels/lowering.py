"""Choice between the compiled library and plain JAX when a program is lowered.

The platform, and whether the program is exported, are known only during lowering. An exported
program may run on a machine without the library, and JAX rejects unknown calls in an export.
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
"""Tree of arrays. JAX has no type for it."""
Leaves = Sequence[Tree]
"""Leaves of a tree, which are arrays, tangents or symbolic zeros, or placeholders in a JAX rule."""


def here_or_elsewhere(
    here: Callable[..., Results],
    elsewhere: Callable[..., Results],
    tree: Tree,
    *,
    single_device: bool = False,
    mapped: bool = False,
) -> Results:
    """Return `here(*tree)` in a program for this machine's CPU, and otherwise `elsewhere(*tree)`.

    Both functions must compute the same values. Derivatives come from `elsewhere`. If
    `single_device` is true, `elsewhere` also runs on several devices and, unless `mapped` is true,
    under `vmap`, for which `here` has no rules.
    """
    leaves, structure = jax.tree.flatten(tree)
    plain = lambda *leaves: elsewhere(*jax.tree.unflatten(structure, leaves))  # noqa: E731
    # trace the function, so that JAX finds the operations to partition and the types in a
    # `shard_map`
    traced = jax.make_jaxpr(here)(*tree)
    how = dict(single_device=single_device, mapped=mapped)
    return tuple(_either.bind(*leaves, here=traced, elsewhere=plain, **how))


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
    single_device: bool,
    mapped: bool,
) -> Sequence[ir.Value | Sequence[ir.Value]]:
    module = context.module_context
    # an exported program may run on a machine without the library, even on a CPU
    exported = module.lowering_parameters.for_export
    is_here = tuple(module.platforms) == ("cpu",) and not exported
    if single_device:
        is_here = is_here and getattr(module.axis_context, "num_devices", None) == 1
    chosen = jaxpr_as_fun(here) if is_here else elsewhere
    return mlir.lower_fun(chosen, multiple_results=True)(context, *values)


def _differentiate(
    primals: Leaves, tangents: Leaves, *, elsewhere: Callable[..., Results], **_: object
) -> tuple[Results, Results]:
    """Return the results and tangents of `elsewhere`, because the library has no derivatives."""
    # only for leaves with tangents, because integers, such as tile lists, have none
    moved = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def along(*some: jax.Array) -> Results:
        replaced = dict(zip(moved, some, strict=True))
        out: Results = elsewhere(*(replaced.get(i, x) for i, x in enumerate(primals)))
        return out

    return jax.jvp(along, [primals[i] for i in moved], [tangents[i] for i in moved])


def _map(
    leaves: Leaves,
    axes: Sequence[int | None],
    *,
    here: ClosedJaxpr,
    elsewhere: Callable[..., Results],
    single_device: bool,
    mapped: bool,
) -> tuple[Results, tuple[int, ...]]:
    if single_device and not mapped:
        found: Results = jax.vmap(elsewhere, in_axes=axes)(*leaves)
        return found, (0,) * len(found)
    # bind both functions again, so that the choice is still made when the program is lowered
    library = jax.vmap(jaxpr_as_fun(here), in_axes=axes)
    plain = jax.vmap(elsewhere, in_axes=axes)
    how = dict(single_device=single_device, mapped=mapped)
    found = here_or_elsewhere(library, plain, leaves, **how)
    return found, (0,) * len(found)


mlir.register_lowering(_either, _lower)
ad.primitive_jvps[_either] = _differentiate
batching.primitive_batchers[_either] = _map
