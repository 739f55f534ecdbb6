"""Code shared by the Hopper and Ampere decode kernels, such as layouts and sums over list parts."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.contract import Index, Operands, TileLists
from transformer_jax.kernels.nvidia.memory import ROWS, Ref, Span, i32
from transformer_jax.kernels.nvidia.scores import LN2, LOG2E
from transformer_jax.kernels.packed_queries import PackedQueries
from transformer_jax.kernels.sharding import QUERIES
from transformer_jax.kernels.sharding import ROWS as OF_ROWS

Padded = TypeVar("Padded", jax.Array, jax.Array | None)


def for_copies(operands: Operands, listed: int | None = None) -> Operands:
    """Pad keys and values for copies if necessary.

    Copies need at least 64 keys, and the number of keys must be a multiple of 8. Past the end,
    copies on Hopper read zeros, and copies on Ampere begin earlier. Hopper reads scales without
    copies, so it needs `listed` scales, the number of keys in listed tiles. None means the number
    of keys. Pages need no padding.
    """
    if operands.pages is not None:
        return operands

    def padded(x: Padded, length: int) -> Padded:
        if x is None or x.shape[1] == length:
            return x
        return jnp.pad(x, [(0, length - n if axis == 1 else 0) for axis, n in enumerate(x.shape)])

    S = max(ROWS, -(-operands.key.shape[1] // 8) * 8)
    return operands._replace(
        key=padded(operands.key, S),
        value=padded(operands.value, S),
        k_scale=padded(operands.k_scale, listed or S),
        v_scale=padded(operands.v_scale, listed or S),
    )


def as_rows(operands: Operands) -> Operands:
    """Pack the queries of each key head as the 64 rows of one tile."""
    T, N, K = *operands.query.shape[1:3], operands.key.shape[2]
    return PackedQueries(T, N // K, ROWS).operands(operands)


def lists_of_key_heads(operands: Operands, lists: TileLists) -> TileLists:
    """Return one tile list per key head, or a single list that all heads share."""
    if lists.order.shape[1] == 1:
        return lists
    group = operands.query.shape[2] // operands.value.shape[2]
    return TileLists(*(x[:, ::group] for x in lists[:3]))


def part_of(seen: jax.Array, part: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    """Return the half-open range of the tiles in a list that belong to a part."""
    return part * seen // parts, (part + 1) * seen // parts


def place_of(operands: Operands, b: Index, k0: Index, width: int = ROWS) -> tuple[Index, Span]:
    """Return the batch row or page of the keys from k0 on, and their slots in it."""
    if operands.pages is None:
        return b, pl.ds(k0, width)
    table: Ref = operands.pages
    page, columns = i32(operands.key.shape[1]), table.shape[1]
    # a tile may end after the last page
    block = jnp.minimum(lax.div(k0, page), columns - 1)
    return table.at[b, block][...], pl.ds(lax.rem(k0, page), width)


def swizzle(x: jax.Array) -> int | None:
    """Return the swizzle for int8 tiles, such that `columns_at_once` is a multiple of its parts."""
    return None if x.dtype != jnp.int8 else columns_at_once(x.shape[3])


def columns_at_once(width: int) -> int:
    """Return the number of columns of a tile to load at a time, which divides the width."""
    return next(columns for columns in (64, 32, 16) if width % columns == 0)


def merged(
    operands: Operands,
    acc: jax.Array,  # f32[B, K, parts, rows, Hv]
    row_max: jax.Array,  # f32[B, K, parts, ROWS], in base 2
    total: jax.Array,  # f32[B, K, parts, ROWS]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Combine the sums of all parts and the sink into the output, m and log l."""
    T, N, K = *operands.query.shape[1:3], operands.key.shape[2]
    packed = PackedQueries(T, N // K, ROWS)
    # sum in a fixed order instead of the order in which programs finish, so that all runs produce
    # the same bits
    top = row_max.max(axis=2)
    weight = jnp.exp2(row_max - top[:, :, None])
    total = packed.unpacked((weight * total).sum(axis=2), OF_ROWS)  # f32[B, N, T]
    weight = weight[:, :, :, : acc.shape[3], None]
    summed = packed.unpacked((weight * acc).sum(axis=2).swapaxes(1, 2), QUERIES)
    top, live = packed.unpacked(top, OF_ROWS), total != 0
    if operands.sinks is not None:
        sinks = operands.sinks[..., None] * LOG2E
        grown = jnp.maximum(top, sinks)
        shrink = jnp.exp2(top - grown)
        total = total * shrink + jnp.exp2(sinks - grown)
        summed, top = summed * shrink.swapaxes(1, 2)[..., None], grown
    total = jnp.where(live, total, 1)
    seen, divisor = (x.swapaxes(1, 2)[..., None] for x in (live, total))  # [B, T, N, 1]
    out = jnp.where(seen, summed / divisor, 0).astype(operands.query.dtype)
    return out, jnp.where(live, top * LN2, -jnp.inf), jnp.log2(total) * LN2
