"""Pallas grids over the tiles that a call visits, row by row.

One axis of the grid follows the list of visits (`visits.py`). The index maps use the list, so tiles
that are not listed are not fetched. The size of the axis is the length of the longest list, which
is known only at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from transformer_jax.kernels.chips import TPU_LIST_BYTES, TPU_SUM_BYTES, TPU_VMEM_BYTES
from transformer_jax.kernels.contract import (
    FULL,
    PARTIAL,
    Blocks,
    Index,
    Operands,
    Problem,
    Refused,
    Residuals,
    TileLists,
    tile_lists,
)
from transformer_jax.kernels.sharding import result
from transformer_jax.kernels.tpu.inputs import TileInputs, tile_inputs
from transformer_jax.kernels.tpu.visits import VisitLists, flatten

Ref = jax.Ref
"""Reference to memory, or to a part of it."""

Span = pl.Slice | slice
Scratch = tuple[int, ...] | pl.MemoryRef | pltpu.SemaphoreType
"""Scratch memory of a kernel, as the shape of a float32 array or a Pallas type."""

Write = tuple[str, tuple[int, ...], DTypeLike]  # kind of tile, shape and dtype of a result


class GridStep(NamedTuple):
    """Current tile of a kernel."""

    b: Index
    n: Index  # a query head
    i: Index  # index of the first query
    j: Index  # index of the first key
    heads: int
    kinds: TileInputs  # of the inputs
    first: Index  # whether it is the first step of a result
    last: Index
    full: Index
    partial: Index | None
    begins: jax.Array  # whether it is the first step of a key head, in `by_queries_of_key_heads`
    ends: jax.Array

    def visit(self, tile: Callable[[bool], None]) -> None:
        """Run `tile(masked)` if the tile is listed, where `masked` is false for full tiles."""
        pl.when(self.full)(partial(tile, False))
        if self.partial is not None:
            pl.when(self.partial)(partial(tile, True))

    def parts(self, x: TileInputs, size: int) -> list[tuple[GridStep, TileInputs]]:
        """Split a tile along the keys, and yield each part with its step."""
        keys, parts = x.key.shape[0], []
        if keys % size:
            return [(self, x)]
        for at in range(0, keys, size):
            here = pl.ds(at, size)

            def of_keys(kind: str, ref: Ref, here: Span = here) -> Ref:
                return ref.at[:, here] if kind in ("key row", "pairs") else ref

            kinds = self.kinds.bias, self.kinds.score_values
            bias, score_values = jax.tree.map(of_keys, kinds, (x.bias, x.score_values))
            part = x._replace(
                key=x.key.at[here],
                value=x.value.at[here],
                k_vectors=tuple(vector.at[:, here] for vector in x.k_vectors),
                pairs=None if x.pairs is None else x.pairs.at[here],
                bias=bias,
                score_values=score_values,
            )
            parts.append((self._replace(j=self.j + at), part))
        return parts

    def scalar(self, ref: Ref) -> jax.Array:
        """Return the value for this head from a flattened array [B or 1, N]."""
        return ref[self.n if ref.shape[0] == self.heads else self.b * self.heads + self.n]


def by_key(kind: str, tile: jax.Array) -> jax.Array:
    """Transpose a tile of a bias or value to [block_k or 1, block_q or 1]."""
    if kind == "pairs":
        return tile.T
    return column(tile) if kind == "key row" else tile


def column(row: jax.Array) -> jax.Array:  # [1, block_k] -> [block_k, 1]
    """Reshape a row to a column."""
    return row.reshape(-1, 1)


KernelBody = Callable[..., None]  # (GridStep, TileInputs, references to results and to scratch)


def by_queries(
    name: str, kernel: KernelBody, problem: Problem, operands: Operands, saved: Residuals | None,
    lists: TileLists, blocks: Blocks, *,
    writes: Sequence[Write], scratch: Sequence[Scratch] = (),
) -> list[jax.Array]:  # fmt: skip
    """Run a kernel over query tiles and the key tiles that each of them visits."""
    B, _, N, _ = operands.query.shape
    refuse_long(lists)
    G = N // operands.key.shape[2]
    walk = _Walk((B, N), (), lambda b, n, _: (b, n), flatten(lists), blocks, G)
    return _run(name, kernel, problem, operands, saved, walk, writes, scratch)


def by_queries_of_key_heads(
    name: str, kernel: KernelBody, problem: Problem, operands: Operands, saved: Residuals | None,
    lists: TileLists, blocks: Blocks, *, writes: Sequence[Write], scratch: Sequence[Scratch] = (),
) -> list[jax.Array]:  # fmt: skip
    """Run a kernel like `by_queries`, with all query heads of a key head in sequence."""
    (B, _, N, _), K = operands.query.shape, operands.key.shape[2]
    G = N // K
    refuse_long(lists)
    walk = _Walk((B, K), (G,), lambda b, h, g: (b, h * G + g), flatten(lists), blocks, G, axis=3)
    return _run(name, kernel, problem, operands, saved, walk, writes, scratch)


def by_keys(
    name: str, kernel: KernelBody, problem: Problem, operands: Operands, saved: Residuals | None,
    lists: TileLists, blocks: Blocks, *,
    writes: Sequence[Write], scratch: Sequence[Scratch] = (), heads: int,
) -> list[jax.Array]:  # fmt: skip
    """Run a kernel over key tiles and the query tiles that visit each of them.

    Each of the `heads` heads has N // heads query heads, which visit a tile in sequence unless each
    query head has its own list.
    """
    B, _, N, _ = operands.query.shape
    G = N // heads
    refuse_long(lists)
    visits = flatten(lists, G)
    sharers = G // visits.packing.heads

    def place(b: Index, h: Index, g: Index) -> tuple[Index, Index]:
        return b, h * G + g

    group = N // operands.key.shape[2]
    walk = _Walk((B, heads), (sharers,), place, visits, blocks, group, keys_as_rows=True)
    return _run(name, kernel, problem, operands, saved, walk, writes, scratch)


def by_pairs(
    name: str, kernel: KernelBody, problem: Problem, operands: Operands, saved: Residuals | None,
    lists: TileLists, blocks: Blocks, *, writes: Sequence[Write],
) -> list[jax.Array]:  # fmt: skip
    """Run a kernel over pairs of tiles, with the rows and heads that share a bias innermost."""
    assert operands.bias is not None
    B, _, N, _ = operands.query.shape
    bias_batch, bias_heads = operands.bias.shape[:2]
    batch, heads = B // bias_batch, N // bias_heads

    def place(b: Index, n: Index, sharer: Index) -> tuple[Index, Index]:
        return (
            b * batch + lax.div(sharer, np.int32(heads)),
            n * heads + lax.rem(sharer, np.int32(heads)),
        )

    refuse_long(lists, copies=2)
    classes = classes_of(lists)
    # a tile is visited if any head that shares the bias sees it, and each head reads its own class
    shared = [axis for axis in (0, 1) if operands.bias.shape[axis] == 1]
    visits = flatten(tile_lists(classes.max(axis=shared, keepdims=True)))
    group, lead = N // operands.key.shape[2], (bias_batch, bias_heads)
    walk = _Walk(lead, (batch * heads,), place, visits, blocks, group)
    return _run(name, kernel, problem, operands, saved, walk, writes, (), classes)


def refuse_long(lists: TileLists, copies: int = 1, table_bytes: int = 0) -> None:
    """Raise `Refused` if lists and a block table are too large for scalar memory."""
    size = 4 * lists.order.size * copies + table_bytes
    if size > TPU_LIST_BYTES:
        table = " and a block table" if table_bytes else ""
        raise Refused(
            f"tile lists of shape {lists.order.shape}{table} take {size} bytes of scalar "
            f"memory: must be at most {TPU_LIST_BYTES}"
        )


@dataclass(frozen=True, eq=False)
class _Walk:
    """Mapping of grid indices to tiles."""

    lead: tuple[int, int]  # axes of rows and heads, which run in any order
    sharers: tuple[int, ...]  # axis of heads that share a sum (for a key head or bias), or empty
    place: Callable[[Index, Index, Index], tuple[Index, Index]]
    """Return b and n, given the indices along the lead axes and the sharers."""
    visits: VisitLists
    blocks: Blocks
    group: int
    keys_as_rows: bool = False
    axis: Literal[2, 3] = 2
    """Grid axis of the visits. The sharers are the other one: with 2, they take turns, and with 3,
    a sharer makes all its visits before the next sharer."""

    def line(self, ids: Sequence[Index]) -> Index:
        """Return the offset of a list in the flattened visits."""
        batch, lists, size = self.visits.numbers.shape
        head = ids[1] * self.sharers[0] + ids[2] if self.axis == 3 else ids[1]
        return ((ids[0] if batch > 1 else 0) * lists + (head if lists > 1 else 0)) * size

    def tile(self, ids: Sequence[Index], numbers: Ref) -> tuple[Index, Index, Index, Index]:
        """Return b, n and the indices of the query tile and the key tile."""
        visit = self.visits.packing.unpack(numbers[self.line(ids) + ids[self.axis]])
        sharer = ids[5 - self.axis] if self.sharers else 0
        b, n = self.place(ids[0], ids[1], visit.head + sharer)
        row, column = visit.row, visit.column
        return b, n, *((column, row) if self.keys_as_rows else (row, column))

    def spec(self, kind: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        if kind in ("scalars", "whole"):
            return pl.BlockSpec(memory_space=pltpu.SMEM if kind == "scalars" else pl.ANY)
        blocks = self.blocks

        def index(*args: Any) -> tuple[Index, ...]:  # grid indices, then tables
            rank = 3 + len(self.sharers)
            b, n, i, j = self.tile(args[:rank], args[rank])
            b, h = (b if shape[0] > 1 else 0), (n if shape[1] > 1 else 0)
            return {
                "query": (b, n, i, 0),
                "key": (b, lax.div(n, np.int32(self.group)), j, 0),
                "query row": (b, h, 0, i),
                "key row": (b, h, 0, j),
                "pairs": (b, h, i, j),
                "transposed pairs": (b, h, j, i),
                "one": (b, h, 0, 0),
            }[kind]

        tile = {
            "query": (blocks.q, shape[3]),
            "key": (blocks.k, shape[3]),
            "query row": (1, blocks.q),
            "key row": (1, blocks.k),
            "pairs": (blocks.q, blocks.k),
            "transposed pairs": (blocks.k, blocks.q),
            "one": (1, 1),
        }[kind]
        return pl.BlockSpec((None, None, *tile), index)


def _run(
    name: str,
    kernel: KernelBody,
    problem: Problem,
    operands: Operands,
    saved: Residuals | None,
    walk: _Walk,
    writes: Sequence[Write],
    scratch: Sequence[Scratch],
    classes: jax.Array | None = None,  # if the lists contain the tiles of any sharer
) -> list[jax.Array]:
    tables = [walk.visits.numbers] if classes is None else [walk.visits.numbers, classes]
    arrays, kinds = tile_inputs(operands, saved)
    inputs: list[TileInputs | jax.Array] = [arrays]
    aliases = {}
    in_specs = [jax.tree.map(lambda kind, x: walk.spec(kind, x.shape), kinds, arrays)]
    # results of tiles that are not visited remain zero
    if classes is not None:
        inputs += [jnp.zeros(shape, dtype) for _, shape, dtype in writes]
        in_specs += [pl.BlockSpec(memory_space=pl.ANY)]
        aliases = {len(tables) + len(jax.tree.leaves(arrays)): 0}
    # the axis of visits is as long as the longest list, which is known only at run time
    later = *walk.sharers, walk.visits.longest
    grid: tuple[Any, ...] = *walk.lead, *(later if walk.axis == 3 else later[::-1])
    N, blocks, packing = operands.query.shape[2], walk.blocks, walk.visits.packing
    result_of = packing.row if classes is None else packing.tile

    def body(*refs: Ref) -> None:
        (numbers, *rest), (x, *others) = refs[: len(tables)], refs[len(tables) :]
        ids = [pl.program_id(axis) for axis in range(len(grid))]
        b, n, i, j = walk.tile(ids, numbers)
        at, line, end = ids[walk.axis], walk.line(ids), pl.num_programs(walk.axis) - 1
        # a result stays in VMEM while consecutive visits belong to it, so compare with both
        # neighbors
        before, here, after = (
            numbers[line + place]
            for place in (jnp.maximum(at - 1, 0), at, jnp.minimum(at + 1, end))
        )
        first = (at == 0) | (result_of(before) != result_of(here))
        last = (at == end) | (result_of(after) != result_of(here))
        begins, ends = at == 0, at == end
        for axis in {*range(2, len(grid))} - {walk.axis}:
            opens, closes = ids[axis] == 0, ids[axis] == pl.num_programs(axis) - 1
            begins, ends = begins & opens, ends & closes
            if walk.axis == 2:
                first, last = first & opens, last & closes
        kind = packing.unpack(here).tile_class
        if classes is not None:
            index: Index = 0  # index in the flattened classes, whose axes of size 1 are shared
            for place, size in zip((b, n, i, j), classes.shape, strict=True):
                index = index * size + (place if size > 1 else 0)
            kind = jnp.where(kind > 0, rest[0][index], 0)
            others = others[1:]  # skip the zeros that initialize the results
        is_partial = None if problem.visible is None else kind == PARTIAL
        q0, k0 = i * blocks.q, j * blocks.k
        step = GridStep(b, n, q0, k0, N, kinds, first, last, kind == FULL, is_partial, begins, ends)
        kernel(step, x, *others)

    # sums stay in VMEM along the last axes, so only rows and heads may run in any order
    semantics: list[Literal["parallel", "arbitrary"]] = ["parallel", "parallel"]
    semantics += ["arbitrary"] * (len(grid) - 2)
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=grid,
            in_specs=in_specs,
            out_specs=[walk.spec(kind, shape) for kind, shape, _ in writes],
            scratch_shapes=[
                pltpu.VMEM(x, jnp.float32) if isinstance(x, tuple) else x for x in scratch
            ],
        ),
        out_shape=[result(shape, dtype, operands.query) for _, shape, dtype in writes],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics,
            vmem_limit_bytes=TPU_VMEM_BYTES + TPU_SUM_BYTES * (walk.axis == 3),
        ),
        interpret=problem.interpret,
        name=name,
    )(*(table.reshape(-1) for table in tables), *inputs)


def classes_of(lists: TileLists) -> jax.Array:  # i32[B or 1, N or 1, rows, columns]
    """Return the class of every tile, which is 0 if it is not listed, or else PARTIAL or FULL."""
    B, N, rows, columns = lists.order.shape
    c = lax.broadcasted_iota(jnp.int32, lists.order.shape, 3)
    kinds = (c < lists.full[..., None]) * (FULL - PARTIAL) + (c < lists.seen[..., None]) * PARTIAL
    flat = jnp.zeros((B * N * rows, columns), jnp.int32)
    flat = jax.vmap(lambda row, at, kind: row.at[at].max(kind))(
        flat, lists.order.reshape(flat.shape), kinds.reshape(flat.shape)
    )
    return flat.reshape(lists.order.shape)
