"""Decode kernel, which computes attention for few queries and many keys.

The queries of all heads that share a key head are the rows of one product. Therefore, each key and
value is read only once, directly from a cache [B, S, K, H]. A tile contains all heads of its slots,
or some of the heads if they are many or wide. In a pool of pages, a tile is a page or part of a
page, and the index map for keys and values looks up the page in the table. The grid follows a
single list, which contains the tiles of the first batch row, then those of the second, and so on.
Therefore, every step has a tile, and the amount of data that is read depends on the filled lengths
instead of the capacity. A core runs its grid in order, so the sums of a row stay in VMEM until its
last tile and do not need to be merged.

The scores of a tile have the layout [key heads, rows, keys]. A copy may read arbitrary data past
the end of keys and values. The mask hides these keys, and their values are replaced by zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from transformer_jax.kernels.chips import TPU_FEW_BYTES, TPU_LANES, TPU_VMEM_BYTES
from transformer_jax.kernels.contract import (
    LOWEST,
    Blocks,
    Index,
    Operands,
    Problem,
    TileLists,
    tile_lists,
)
from transformer_jax.kernels.packed_queries import PackedQueries
from transformer_jax.kernels.sharding import QUERIES, ROWS, result
from transformer_jax.kernels.tpu.grid import Ref, classes_of, refuse_long
from transformer_jax.kernels.tpu.inputs import TileInputs
from transformer_jax.kernels.tpu.scores import dot, power, unit
from transformer_jax.kernels.tpu.visits import Packing, Visit, flatten

SUBLANES = 8  # rows of a register
MOST_HEADS = 32  # per tile, because the program contains a separate product for each head


def decode(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the output [B, T, N, Hv], and m and log l as f32[B, N, T].

    There is one row of query tiles. Keys and values may end within a tile, but pages may not.
    """
    (B, T, N, _), (_, _, K, Hv) = operands.query.shape, operands.value.shape
    page, tables = operands.page, []
    if operands.pages is not None:
        if operands.key.shape[1] % blocks.k:
            raise ValueError(f"page={page} must be a multiple of the tile, {blocks.k} keys")
        tables = [operands.pages.reshape(-1)]
    # one list for all batch rows, so that every step of the grid has a tile
    lists = of_all_heads(lists, B)
    refuse_long(lists, table_bytes=4 * sum(x.size for x in tables))
    visits = flatten(lists)
    packed = PackedQueries(T, N // K, SUBLANES)
    rows = packed.tiles * SUBLANES
    x = _laid_out(packed.operands(operands), blocks.k)
    columns = 0 if operands.pages is None else operands.pages.shape[1]
    ends = operands.key.shape[1] if operands.pages is None else None
    walk = Walk(visits.packing, blocks.k, *tile_of_heads(operands, blocks.k), page, columns)
    specs = walk.specs(x)
    shapes = (B, K, rows, Hv), (B, K, rows, 1), (B, K, rows, 1)
    dtypes = operands.query.dtype, jnp.float32, jnp.float32
    scratch = [(walk.heads, rows, width) for width in (1, 1, Hv)]

    def kernel(numbers: Ref, *args: Any) -> None:
        """Add one tile of keys to the sums of its batch row."""
        # only the index maps use the table
        x, *refs = args if not tables else args[1:]
        out, row_max, log_sum, m, total, acc = refs  # [heads, rows, Hv or 1] each
        at, end = pl.program_id(1), pl.num_programs(1) - 1
        before, here, after = (
            numbers[place] for place in (jnp.maximum(at - 1, 0), at, jnp.minimum(at + 1, end))
        )
        row, visit = walk.packing.row, walk.packing.unpack(here)

        @pl.when((at == 0) | (row(before) != row(here)))
        def _() -> None:
            m[...] = jnp.full_like(m, LOWEST)
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

        @pl.when(visit.tile_class > 0)
        def _() -> None:
            k0 = visit.column * walk.k
            dtype = x.query.dtype
            keys, values = (walk.by_head(tile).astype(dtype) for tile in (x.key, x.value))
            v_scale = None if x.v_scale is None else x.v_scale[...][:, None]  # [heads, 1, keys]
            # zero weights times arbitrary data past the end may be NaN
            if ends is not None and ends % walk.k:
                inside = k0 + lax.broadcasted_iota(jnp.int32, values.shape, 1) < ends
                values = jnp.where(inside, values.astype(jnp.float32), 0.0).astype(dtype)
                if v_scale is not None:
                    inside = k0 + lax.broadcasted_iota(jnp.int32, v_scale.shape, 2) < ends
                    v_scale = jnp.where(inside, v_scale, 0.0)
            raw = jnp.stack([dot(x.query[h], keys[h], 1, 1) for h in range(walk.heads)])
            if x.k_scale is not None:
                raw = raw * x.k_scale[...][:, None]
            s = _scores(problem, x, raw)
            grown = jnp.maximum(m[...], s.max(axis=2, keepdims=True))
            p, shrink = power(x, s - grown), power(x, m[...] - grown)
            m[...] = grown
            total[...] = shrink * total[...] + p.sum(axis=2, keepdims=True)
            p = (p if v_scale is None else p * v_scale).astype(dtype)
            summed = jnp.stack([dot(p[h], values[h], 1, 0) for h in range(walk.heads)])
            acc[...] = shrink * acc[...] + summed

        @pl.when((at == end) | (row(after) != row(here)))
        def _() -> None:
            top, whole, shrink = m[...], total[...], jnp.ones(m.shape, jnp.float32)
            fully_masked = whole == 0
            if x.sinks is not None:
                sink = x.sinks[...] * unit(x)
                top = jnp.maximum(top, sink)
                shrink = power(x, m[...] - top)
                whole = whole * shrink + power(x, sink - top)
            whole = jnp.where(fully_masked, 1.0, whole)
            attended = jnp.where(fully_masked, 0.0, acc[...] * (shrink / whole))
            out[...] = attended.astype(out.dtype)
            row_max[...] = jnp.where(fully_masked, -jnp.inf, top * (1 / unit(x)))
            log_sum[...] = jnp.log(whole)

    out, row_max, log_sum = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(tables),
            grid=(K // walk.heads, visits.longest),
            in_specs=[specs],
            out_specs=[walk.spec("row", shape) for shape in shapes],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[
            result(shape, dtype, operands.query)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=TPU_VMEM_BYTES
        ),
        interpret=problem.interpret,
        name="attention_decode",
    )(visits.numbers.reshape(-1), *tables, x)
    row_max, log_sum = (packed.unpacked(x[..., 0], ROWS) for x in (row_max, log_sum))
    return packed.unpacked(out.swapaxes(1, 2), QUERIES), row_max, log_sum


def of_all_heads(lists: TileLists, B: int) -> TileLists:
    """Return one list of the tiles that any head visits, with the B batch rows as its rows."""
    # the kernel evaluates the mask in every tile, so it does not matter which tiles are full
    if lists.order.shape[1] > 1:
        lists = tile_lists(classes_of(lists).max(axis=1, keepdims=True))

    def by_row(x: jax.Array) -> jax.Array:  # [B or 1, 1, 1, ..] -> [1, 1, B, ..]
        return jnp.broadcast_to(x[:, 0, 0], (B, *x.shape[3:]))[None, None]

    return TileLists(*(by_row(x) for x in lists[:3]))


def _slots_first(x: jax.Array) -> bool:
    """Whether XLA stores an array [B, S, K, H] in that order instead of [B, K, S, H]."""
    # XLA uses tiles of 8 heads by 128 elements, or of 4, 2 or 1 heads if they fill 32 bits. For
    # other numbers of heads, it moves the axis of heads outside
    K = x.shape[2]
    return K % SUBLANES == 0 or (K in (1, 2, 4) and K * x.dtype.itemsize >= 4)


def tile_of_heads(operands: Operands, k: int) -> tuple[int, bool]:
    """Return the number of key heads in a tile of k keys, and whether its slots come first."""
    K, slots_first = operands.key.shape[2], _slots_first(operands.key)
    widths = [-(-x.shape[3] // TPU_LANES) * TPU_LANES for x in (operands.key, operands.value)]
    most = min(MOST_HEADS, TPU_FEW_BYTES // (k * sum(widths) * operands.query.dtype.itemsize))
    possible = [n for n in range(1, K + 1) if K % n == 0 and n <= most]
    # a tile contains whole registers of heads, or all heads
    if slots_first or operands.k_scale is not None:
        least = SUBLANES if K % SUBLANES == 0 else K
        possible = [n for n in possible if n % SUBLANES == 0 or n == K] or [least]
    return max(possible, default=1), slots_first


def _laid_out(packed: Operands, k: int) -> TileInputs:
    """Return the kernel's inputs with four axes, keeping the memory layout of keys and values."""

    def long(x: jax.Array) -> jax.Array:  # [B, S, ..], padded to at least one tile
        short = max(0, k - x.shape[1])
        return jnp.pad(x, [(0, short * (axis == 1)) for axis in range(x.ndim)]) if short else x

    def keys(x: jax.Array) -> jax.Array:
        return long(x) if _slots_first(x) else long(x).swapaxes(1, 2)

    def by_head(x: jax.Array | None) -> jax.Array | None:  # [B, S, K], stored as [B, K, S]
        return None if x is None else long(x).swapaxes(1, 2)

    def column(x: jax.Array | None) -> jax.Array | None:  # [B or 1, K, rows]
        return None if x is None else x[..., None]

    nothing = dict.fromkeys(("dropout", "do", "row_max", "log_sum", "D"))
    return TileInputs(
        query=packed.query.swapaxes(1, 2),
        key=keys(packed.key),
        value=keys(packed.value),
        q_vectors=tuple(x[:, None, :, None] for x in packed.q_vectors),
        k_vectors=tuple(x[:, None, None] for x in packed.k_vectors),
        pairs=packed.pairs,
        bias=packed.bias,
        score_values=packed.score_values,
        slopes=column(packed.slopes),
        sinks=column(packed.sinks),
        k_scale=by_head(packed.k_scale),
        v_scale=by_head(packed.v_scale),
        **nothing,
    )


@dataclass(frozen=True)
class Walk:
    """Mapping of grid indices (group of key heads, visit) to tiles."""

    packing: Packing
    k: int
    heads: int  # key heads per tile
    slots_first: bool
    page: int | None = None  # keys per page, if keys are in pages
    columns: int = 0  # columns of the block table

    def specs(self, x: TileInputs) -> TileInputs:
        keys = "slots" if self.slots_first else "keys"
        kinds = TileInputs(*["pairs"] * len(TileInputs._fields))
        kinds = kinds._replace(query="row", key=keys, value=keys, slopes="row", sinks="row")
        kinds = kinds._replace(k_scale="scales", v_scale="scales")
        of_kind = zip(kinds, x, strict=True)
        return TileInputs(
            *(jax.tree.map(lambda a, kind=kind: self.spec(kind, a.shape), field)
              for kind, field in of_kind)
        )  # fmt: skip

    def spec(self, kind: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Return the BlockSpec for an array of this kind, where axes of size 1 are shared."""
        heads = self.heads if shape[1] > 1 else 1
        tile = {
            "row": (heads, *shape[2:]),
            "slots": (self.k, self.heads, shape[-1]),
            "keys": (heads, self.k, shape[-1]),
            "pairs": (heads, shape[2], self.k if shape[-1] > 1 else 1),
            "scales": (heads, self.k),
        }[kind]

        def index(group: Index, at: Index, numbers: Ref, *tables: Ref) -> tuple[Index, ...]:
            visit = self.packing.unpack(numbers[at])
            if self.page is not None and kind in ("slots", "keys", "scales"):
                b, j = self._place(visit, *tables)
            else:
                b, j = (visit.row if shape[0] > 1 else 0), visit.column
            group = group if shape[1] > 1 else 0
            return {
                "row": (b, group, 0, 0),
                "slots": (b, j, group, 0),
                "keys": (b, group, j, 0),
                "pairs": (b, group, 0, j if shape[-1] > 1 else 0),
                "scales": (b, group, j),
            }[kind]

        return pl.BlockSpec((None, *tile), index)

    def _place(self, visit: Visit, table: Ref) -> tuple[Index, Index]:
        """Return the page of a visited key tile, and the index of the tile in the page."""
        assert self.page is not None
        tiles = np.int32(self.page // self.k)
        block = lax.div(visit.column, tiles)
        return table[visit.row * self.columns + block], lax.rem(visit.column, tiles)

    def by_head(self, tile: Ref) -> jax.Array:  # [heads, keys, H or Hv]
        """Return the keys or values of a tile with the head axis first."""
        return jnp.swapaxes(tile[...], 0, 1) if self.slots_first else tile[...]


def _scores(problem: Problem, x: TileInputs, raw: jax.Array) -> jax.Array:  # f32[heads, rows, keys]
    """Return the scores for products of queries and keys, multiplied by `unit`."""
    if problem.softcap is None:
        s = raw * (problem.scale * unit(x))
    else:
        s = jnp.tanh(raw * (problem.scale / problem.softcap)) * (problem.softcap * unit(x))
    queries, keys = ([vector[...] for vector in vectors] for vectors in (x.q_vectors, x.k_vectors))
    if x.bias is not None:
        s = s + x.bias[...].astype(jnp.float32)
    if x.slopes is not None:
        s = s - x.slopes[...] * jnp.abs(queries[0] - keys[0]).astype(jnp.float32)
    if problem.score is not None:
        s = problem.score(s, queries[0], keys[0], [value[...] for value in x.score_values])
        s = jnp.where(s < jnp.inf, s, jnp.inf)
    if problem.visible is not None:
        if x.pairs is not None:
            keys.append(x.pairs[...].astype(jnp.int32))
        s = jnp.where(problem.visible(tuple(queries), tuple(keys)), s, -jnp.inf)
    return s
