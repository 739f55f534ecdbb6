"""A call of attention as the fused kernels take it: padded arrays, vectors, lists of tiles."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.arguments import Call, Options
from transformer_jax.blockwise_tiles import pad
from transformer_jax.dropout import head_words, key_words
from transformer_jax.kernels import Target, target
from transformer_jax.kernels.blocks import blocks as blocks_of
from transformer_jax.kernels.blocks import kinds
from transformer_jax.kernels.contract import Blocks, Lists, Problem, lists_of
from transformer_jax.kernels.fused import Fixed, Plan, Visits, attend
from transformer_jax.mask_vectors import MaskVectors, not_vectors
from transformer_jax.masks import Everything, Mask
from transformer_jax.meshes import vary
from transformer_jax.positions import ALiBi
from transformer_jax.tiles import SKIPPED, at_once


def refuse(call: Call, unordered: bool = False) -> str | None:
    """Why the kernels would not run these arguments, or None."""
    where = target()
    if isinstance(where, str):
        return where
    query, key, value, bias = (call.arrays[name] for name in ("query", "key", "value", "bias"))
    if 0 in (*query.shape, *key.shape, *value.shape):
        return f"an axis is empty: query {query.shape}, key {key.shape}, value {value.shape}"
    if "scale" in call.arrays:
        return "takes no scale that is an array"
    if bias is not None and not hasattr(bias, "shape") and not isinstance(bias, ALiBi):
        return f"takes a bias that is an array or ALiBi, not {type(bias).__name__}"
    if bias is not None and str(getattr(bias, "dtype", "")) == "float64":
        return "computes in float32, the bias is float64"
    mask = call.arrays["mask"]
    reason = None if mask is None else not_vectors(mask)
    if reason is None:
        problem = _problem(call.options, None, where, unordered)
        reason = where.module.refuse(problem, query, key, value)
    return reason or _refuse_lists(call, where)


def _refuse_lists(call: Call, where: Target) -> str | None:
    """Whether the lists of tiles fit where a backend keeps them."""
    most = where.module.LIST_BYTES
    if most is None:
        return None
    query, value, mask = (call.arrays[name] for name in ("query", "value", "mask"))
    _, T, _, S = call.sizes
    places = [call.arrays[name] for name in ("q_positions", "k_positions")]
    batch, heads = (1, 1) if mask is None else mask.lead
    leads = [batch, *(p.shape[0] for p in places if p is not None and len(p.shape) == 2)]
    sizes = query.shape[3], value.shape[3], query.dtype.itemsize, T, S
    for kind in kinds(unordered=False):
        b = blocks_of(where, kind, *sizes)
        rows, columns = -(-T // b.q), -(-S // b.k)
        dense = kind == "bias" and isinstance(call.arrays["bias"], jax.Array | jax.ShapeDtypeStruct)
        if kind == "bias" and not dense:
            continue
        lead = max(leads) * heads
        size = 4 * lead * ((1 + dense) * rows * columns + 2 * max(rows, columns))
        if size > most:
            tiles = f"{lead} x {rows} x {columns}"
            return f"lists of {tiles} tiles take {size} bytes: at most {most}"
    return None


def pallas_attention(
    where: Target,
    options: Options,
    unordered: bool,
    *,
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    value: jax.Array,  # [B, S, K, Hv]
    mask: Mask | None,
    bias: Any,
    sinks: jax.Array | None,
    q_positions: jax.Array | None,
    k_positions: jax.Array | None,
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, Hv], f32[B, T, N]
    """`dot_product_attention` and its lse by the fused kernels; arguments are taken as checked."""
    (B, T, N, H), (_, S, _, Hv) = query.shape, value.shape
    width = query.dtype.itemsize
    blocks = {kind: blocks_of(where, kind, H, Hv, width, T, S) for kind in kinds(unordered)}
    rows = math.lcm(*(b.q for b in blocks.values()))
    columns = math.lcm(*(b.k for b in blocks.values()))
    padded_T, padded_S = _round_up(T, rows), _round_up(S, columns)

    mask = Everything() if mask is None else mask
    with at_once(mask, q_positions, k_positions):
        at = _positions(q_positions, T), _positions(k_positions, S)
        every_index = q_positions is None and k_positions is None
        vectors = MaskVectors.of(mask, *at, every_index)
        q_vectors = tuple(pad(x, 1, padded_T, 0) for x in vectors.q)
        k_vectors = tuple(pad(x, 1, padded_S, -1 if i == 0 else 0) for i, x in enumerate(vectors.k))
        pairs = vectors.pairs()
        if pairs is not None:
            pairs = pad(pad(pairs, 2, padded_T, 0), 3, padded_S, 0)
        lists = {
            (b.q, b.k): _tiles(mask, *at, b, (padded_T // b.q, padded_S // b.k))
            for b in blocks.values()
        }
    by_query = {kind: _lists(lists[b.q, b.k]) for kind, b in blocks.items()}
    of_keys = blocks["unordered" if unordered else "keys"]
    by_key = _lists(lists[of_keys.q, of_keys.k], by_key=True)
    everywhere = isinstance(mask, Everything) and k_positions is None and S == padded_S
    slopes, dense = None, None
    if isinstance(bias, ALiBi):
        slopes = jnp.broadcast_to(jnp.asarray(bias.slopes, jnp.float32), (1, N))
    elif bias is not None:
        # [.., T, S] is read in its own dtype; what is smaller costs nothing to copy
        as_given = min(bias.shape[2:]) > 1 and bias.dtype == query.dtype
        dense = bias if as_given else bias.astype(jnp.float32)
        for axis, given, length in ((2, T, padded_T), (3, S, padded_S)):
            if dense.shape[axis] == given and given != 1:
                dense = pad(dense, axis, length, 0)
    words = None
    if dropout_key is not None:
        words = jnp.stack(head_words(key_words(dropout_key), B, N))
    plan = Plan(
        where.module,
        _problem(options, None if everywhere else vectors.visible, where, unordered, H),
        tuple(blocks.items()),
    )
    visits = Visits(by_query["forward"], by_query.get("queries"), by_key, by_query["bias"])
    inputs = (
        pad(query, 1, padded_T, 0),
        pad(key, 1, padded_S, 0),
        pad(value, 1, padded_S, 0),
        dense,
        slopes,
        None if sinks is None else sinks.astype(jnp.float32)[None],
        Fixed(q_vectors, k_vectors, pairs, words, visits),
    )
    out, lse = attend(plan, *vary(inputs))
    return out[:, :T], jnp.moveaxis(lse[:, :, :T], 1, 2)


def _problem(
    options: Options, visible: Any, where: Target, unordered: bool = False, H: int = 1
) -> Problem:
    scale = 1 / math.sqrt(H) if options.scale is None else options.scale
    fields = options.softcap, options.dropout_rate, visible
    return Problem(scale, *fields, unordered=unordered, interpret=where.interpret)


def _positions(positions: jax.Array | None, length: int) -> jax.Array:  # i32[B or 1, length]
    if positions is None:
        return jnp.arange(length, dtype=jnp.int32)[None]
    return jnp.atleast_2d(positions).astype(jnp.int32)


def _tiles(mask: Mask, q: jax.Array, k: jax.Array, blocks: Blocks, grid: tuple[int, int]):
    """Classes of the tiles of the padded arrays; those behind the end are skipped."""
    classes = mask.block_plan(q, k, block_q=blocks.q, block_k=blocks.k).classes
    return pad(pad(jnp.asarray(classes), 2, grid[0], SKIPPED), 3, grid[1], SKIPPED)


def _lists(classes: jax.Array, by_key: bool = False) -> Lists:
    with at_once(classes):  # the transposition too: else XLA folds a sort, for up to half a minute
        return lists_of(classes.swapaxes(-1, -2) if by_key else classes)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
