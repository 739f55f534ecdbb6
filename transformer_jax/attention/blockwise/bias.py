"""Bias of one tile in blockwise attention: a slice of an array, or an evaluated `Bias`.

The function of a score, `score_mod`, is also evaluated here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from transformer_jax.attention.arguments import AttentionCall
from transformer_jax.attention.biases import Bias
from transformer_jax.attention.block_plan import pad
from transformer_jax.attention.blockwise.tiles import Place, Sizes, int32
from transformer_jax.attention.score_mod import ScoreMod
from transformer_jax.kernels.contract import Index
from transformer_jax.kernels.sharding import TILES, AxisNames
from transformer_jax.sharding import vary
from transformer_jax.values import value_class

Modifier = TypeVar("Modifier", bound="Bias | ScoreMod")

Sum = jax.Array | list[jax.Array] | None
"""Accumulated gradient of a bias array or of the floating-point leaves of a `Bias`, or None."""


def _bias_slices(place: Place) -> tuple[tuple[int, Index, int], ...]:
    """Return (axis, start, length) of the tile along each axis of the bias."""
    sizes = place.sizes
    heads = sizes.heads * sizes.G
    return (
        (0, place.b * sizes.rows, sizes.rows),
        (1, place.c * heads, heads),
        (2, place.i * sizes.block_q, sizes.block_q),
        (3, place.j * sizes.block_k, sizes.block_k),
    )


def bias_tile(
    place: Place, bias: jax.Array | Bias, call: AttentionCall, bad: float
) -> jax.Array:  # f32[group, G block_q, block_k]
    """Return a tile of the bias, with NaN and inf replaced by `bad`."""
    if not isinstance(bias, Bias):
        part = bias
        for axis, start, length in _bias_slices(place):
            if part.shape[axis] != 1 and axis >= 2:
                part = pad(part, axis, place.sizes.grid[axis - 2] * length, 0)
            part = place.take(part, axis, start, length)
    else:
        heads = place.sizes.heads * place.sizes.G
        part = bias.materialize(*place.positions(call))
        part = place.take(part, 0, place.b * place.sizes.rows, place.sizes.rows)
        part = place.take(part, 1, place.c * heads, heads)
    part = part.astype(jnp.float32)
    return place.spread(jnp.where(part < jnp.inf, part, bad))


def bias_zeros(bias: jax.Array | Bias | None, sizes: Sizes) -> Sum:
    """Return f32 zeros for the gradient of the bias, with an array padded to whole tiles."""
    if bias is None:
        return None
    if isinstance(bias, Bias):
        return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), floating_leaves(bias))
    whole = (None, None, sizes.grid[0] * sizes.block_q, sizes.grid[1] * sizes.block_k)
    shape = [n if n == 1 or w is None else w for n, w in zip(bias.shape, whole, strict=True)]
    return jnp.zeros(shape, jnp.float32)


def bias_add(place: Place, total: Sum, call: AttentionCall, ds: jax.Array) -> Sum:
    """Add the gradient of the bias in one tile to the total."""
    bias = call.bias
    assert bias is not None
    if isinstance(bias, Bias):
        # differentiate the bias of this tile with respect to its leaves
        tile = lambda leaves: bias_tile(place, _replace(bias, leaves), call, 0.0)  # noqa: E731
        (gradient,) = jax.vjp(tile, floating_leaves(bias))[1](ds)
        return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, gradient)
    starts = [0 if n == 1 else s[1] for n, s in zip(bias.shape, _bias_slices(place), strict=True)]
    shape = [1 if n == 1 else s[2] for n, s in zip(bias.shape, _bias_slices(place), strict=True)]
    zeros = vary(jnp.zeros(shape, jnp.float32), ds)
    # the transpose of `spread` sums over the axes that it broadcast
    (gradient,) = jax.vjp(place.spread, zeros)[1](ds)
    at = int32(starts)
    assert isinstance(total, jax.Array)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, shape) + gradient, at)


def score_tile(
    place: Place, call: AttentionCall, s: jax.Array, leaves: list[jax.Array], bad: float
) -> jax.Array:  # f32[group, G block_q, block_k]
    """Apply `score_mod`, with these floating-point leaves, to the scores of a tile.

    NaN and inf are replaced by `bad`.
    """
    assert call.score_mod is not None
    sizes = place.sizes
    heads = sizes.heads * sizes.G
    modify = _replace(call.score_mod, leaves)
    modify = dataclasses.replace(
        modify,
        rows=place.take(modify.rows, 0, place.b * sizes.rows, sizes.rows),
        heads=place.take(modify.heads, 0, place.c * heads, heads),
    )
    by_head = rearrange(s, "(r h) (G t) s -> r (h G) t s", r=sizes.rows, G=sizes.G)
    found = place.spread(modify(by_head, *place.positions(call)))
    return jnp.where(found < jnp.inf, found, bad)


def floating_leaves(tree: Bias | ScoreMod) -> list[jax.Array]:
    """Return the floating-point leaves of a tree."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def _replace(tree: Modifier, leaves: list[jax.Array]) -> Modifier:
    new = iter(leaves)
    floating = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: next(new) if floating(x) else x, tree)


def bias_sums(bias: jax.Array | Bias | None, total: Sum) -> list[jax.Array]:
    """Return the gradient as a list of arrays, without padding."""
    if bias is None or isinstance(bias, Bias):
        return list(total or ())
    assert isinstance(total, jax.Array)
    return [total[tuple(slice(n) for n in bias.shape)]]


def bias_gradient(bias: jax.Array | Bias | ScoreMod | None, total: list[jax.Array]) -> Any:
    """Return the bias with its floating-point leaves replaced by the gradient, in their dtypes."""
    if bias is None:
        return None
    if isinstance(bias, jax.Array):
        return total[0].astype(bias.dtype)
    pairs = zip(total, floating_leaves(bias), strict=True)
    return _replace(bias, [x.astype(leaf.dtype) for x, leaf in pairs])


def bias_axes(bias: jax.Array | Bias | None, *, of_gradient: bool = False) -> list[AxisNames]:
    """Return the axis names of a bias. The axes of a `Bias` are unknown and not sharded."""
    if not isinstance(bias, Bias):
        return [] if bias is None else [TILES]
    leaves = jax.tree.leaves(bias) if not of_gradient else floating_leaves(bias)
    return [(None,) * jnp.ndim(x) for x in leaves]


def score_axes(score_mod: ScoreMod | None, *, of_gradient: bool = False) -> list[AxisNames]:
    """Return the axis names of the leaves of `score_mod`. Captured arrays are not sharded."""
    if score_mod is None:
        return []
    captured = floating_leaves(score_mod) if of_gradient else score_mod.captured
    names: list[AxisNames] = [(None,) * jnp.ndim(x) for x in captured]
    return names if of_gradient else [*names, ("b",), ("n",)]


@value_class(arrays=("bias", "row", "head"), static=("full", "size"), eq=False)
class PartOfBias:
    """Part of a `Bias` for some batch rows and heads, sliced from its materialized array."""

    bias: Bias
    row: Index  # index of the first row
    head: Index  # index of the first head
    full: tuple[int, int]  # total number of rows and heads
    size: tuple[int, int]  # number of rows and heads in this part

    def materialize(self, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        bias = self.bias.materialize(q_positions, k_positions)
        for axis, start in enumerate((self.row, self.head)):
            full, size = self.full[axis], self.size[axis]
            if bias.shape[axis] == full != size:
                bias = lax.dynamic_slice_in_dim(bias, start, size, axis)
        return bias
