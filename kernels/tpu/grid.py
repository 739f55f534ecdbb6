"""Walk over rows of tiles and, innermost, over the list of tiles that each visits.

The index maps of a Pallas grid read the list, so a tile that is not listed is not fetched. The axis
along the list is as long as the longest list, which is known when running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from transformer_jax.kernels.chips import TPU_LIST_BYTES, TPU_VMEM_BYTES
from transformer_jax.kernels.contract import (
    FULL,
    PARTIAL,
    Blocks,
    Operands,
    Problem,
    Refused,
    Saved,
    TileLists,
    result,
    tile_lists,
)

Ref = Any
"""A reference to memory, or a part of one; Pallas has no public type for it."""

Write = tuple[str, tuple[int, ...], DTypeLike]  # kind of tile, shape and dtype of a result
Place = tuple[Any, Any, Any, Any]  # b, n, row of tiles, place in the row's list

LIST = None  # the axis of a grid along the lists


class TileInputs(NamedTuple):
    """Hold what a kernel reads, [B, N, T, H] and [B, N, 1, T]: arrays, their kinds, their tiles."""

    query: Any
    key: Any
    value: Any
    q_vectors: Any
    k_vectors: Any
    pairs: Any  # [B, N, S, T]
    bias: Any
    slopes: Any
    sinks: Any
    dropout: Any
    do: Any
    row_max: Any
    log_sum: Any
    D: Any


class GridStep(NamedTuple):
    """Say which tile a kernel works on."""

    b: jax.Array
    n: jax.Array  # a query head
    i: jax.Array  # index of the first query
    j: jax.Array  # index of the first key
    heads: int
    bias_shape: tuple[int, ...]
    first: Any  # whether it is the first step of a result
    last: Any
    full: Any
    partial: Any

    def visit(self, tile: Callable[[bool], None]) -> None:
        """Run `tile(masked)` if the tile is listed, without a mask where it is full."""
        pl.when(self.full)(partial(tile, False))
        if self.partial is not None:
            pl.when(self.partial)(partial(tile, True))

    def parts(self, x: TileInputs, size: int) -> list[tuple[GridStep, TileInputs]]:
        """Cut a tile along the keys, and say where each part stands."""
        keys = x.key.shape[0]
        if keys % size:
            return [(self, x)]
        return [
            (self._replace(j=self.j + at), self._cut(x, pl.ds(at, size)))
            for at in range(0, keys, size)
        ]

    def _cut(self, x: TileInputs, here: Any) -> TileInputs:
        by_key = x.bias is not None and self.bias_shape[1] > 1
        return x._replace(
            key=x.key.at[here],
            value=x.value.at[here],
            k_vectors=tuple(vector.at[:, here] for vector in x.k_vectors),
            pairs=None if x.pairs is None else x.pairs.at[here],
            bias=x.bias.at[:, here] if by_key else x.bias,
        )

    def scalar(self, ref: Ref) -> jax.Array:
        """Read this head's number of [B or 1, N], flattened."""
        return ref[self.n if ref.shape[0] == self.heads else self.b * self.heads + self.n]

    def by_key(self, tile: jax.Array) -> jax.Array:
        """Transpose a tile of the bias to [block_k or 1, block_q or 1]."""
        T, S = self.bias_shape
        if T > 1 and S > 1:
            return tile.T
        return column(tile) if S > 1 else tile


def column(row: jax.Array) -> jax.Array:  # [1, block_k] -> [block_k, 1]
    """Stand a row up as a column."""
    return row.reshape(-1, 1)


KernelBody = Callable[..., None]  # of GridStep, TileInputs, references to results and to scratch


def by_queries(
    name: str, kernel: KernelBody, problem: Problem, operands: Operands, saved: Saved | None,
    lists: TileLists, blocks: Blocks, *,
    writes: Sequence[Write], scratch: Sequence[tuple[int, ...]] = (),
) -> list[jax.Array]:  # fmt: skip
    """Run a kernel over query tiles and the key tiles that each visits."""
    B, T, N, _ = operands.query.shape

    def at(b: Any, n: Any, row: Any, c: Any) -> Place:
        return b, n, row, c

    walk = _Walk((B, N, T // blocks.q, LIST), at, blocks, lists.order.shape, _group(operands))
    return _run(name, kernel, problem, operands, saved, lists, walk, writes, scratch)


def by_keys(
    name: str, kernel: KernelBody, problem: Problem, operands: Operands, saved: Saved | None,
    lists: TileLists, blocks: Blocks, *,
    writes: Sequence[Write], scratch: Sequence[tuple[int, ...]] = (), heads: int,
) -> list[jax.Array]:  # fmt: skip
    """Run a kernel over key tiles and the query tiles that visit each.

    There are N // heads query heads for each of `heads`.
    """
    B, S, _, _ = operands.key.shape
    G = operands.query.shape[2] // heads

    def at(b: Any, h: Any, row: Any, g: Any, c: Any) -> Place:
        return b, h * G + g, row, c

    grid = (B, heads, S // blocks.k, G, LIST)
    walk = _Walk(grid, at, blocks, lists.order.shape, _group(operands), keys_as_rows=True)
    return _run(name, kernel, problem, operands, saved, lists, walk, writes, scratch)


def by_pairs(
    name: str, kernel: KernelBody, problem: Problem, operands: Operands, saved: Saved | None,
    lists: TileLists, blocks: Blocks, *, writes: Sequence[Write],
) -> list[jax.Array]:  # fmt: skip
    """Run a kernel over pairs of tiles and, innermost, the rows and heads that share a bias."""
    assert operands.bias is not None
    B, T, N, _ = operands.query.shape
    bias_batch, bias_heads = operands.bias.shape[:2]
    batch, heads = B // bias_batch, N // bias_heads

    def at(b: Any, n: Any, row: Any, c: Any, sharer: Any) -> Place:
        return (
            b * batch + lax.div(sharer, np.int32(heads)),
            n * heads + lax.rem(sharer, np.int32(heads)),
            row,
            c,
        )

    classes = classes_of(lists)
    shared = [axis for axis in (0, 1) if operands.bias.shape[axis] == 1]
    lists = tile_lists(classes.max(axis=shared, keepdims=True))
    grid = (bias_batch, bias_heads, T // blocks.q, LIST, batch * heads)
    walk = _Walk(grid, at, blocks, lists.order.shape, _group(operands))
    return _run(name, kernel, problem, operands, saved, lists, walk, writes, (), classes)


def _group(operands: Operands) -> int:
    """Return how many query heads read a key head."""
    return operands.query.shape[2] // operands.key.shape[2]


@dataclass(frozen=True, eq=False)
class _Walk:
    """Say which tile each place in the grid works on."""

    grid: tuple[int | None, ...]  # three axes in any order, then those that must run in order
    at: Callable[..., Place]  # of the place in the grid
    blocks: Blocks
    lists_shape: tuple[int, ...]  # of TileLists.order
    group: int
    keys_as_rows: bool = False

    def line(self, shape: Sequence[int], b: Any, n: Any, row: Any) -> Any:
        """Return which row of a flattened table a row of tiles has."""
        b, n = (b if shape[0] > 1 else 0), (n if shape[1] > 1 else 0)
        return (b * shape[1] + n) * shape[2] + row

    def tile(self, ids: Sequence[Any], order: Ref) -> Place:
        """Return b, n, and the tiles of queries and of keys."""
        b, n, row, c = self.at(*ids)
        column = order[self.line(self.lists_shape, b, n, row) * self.lists_shape[3] + c]
        return b, n, *((column, row) if self.keys_as_rows else (row, column))

    def spec(self, kind: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Return how Pallas cuts an array of a kind into tiles."""
        if kind == "scalars":
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        rank, blocks = len(self.grid), self.blocks

        def index(*args: Any) -> tuple[Any, ...]:
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
    saved: Saved | None,
    lists: TileLists,
    walk: _Walk,
    writes: Sequence[Write],
    scratch: Sequence[tuple[int, ...]],
    classes: jax.Array | None = None,  # if the lists say only which tiles some head visits
) -> list[jax.Array]:
    """Run a kernel on a grid."""
    tables = [*lists] if classes is None else [*lists, classes]
    size = sum(4 * table.size for table in tables)
    if size > TPU_LIST_BYTES:
        raise Refused(
            f"lists of tiles of shape {lists.order.shape} take {size} bytes of scalar memory: "
            f"at most {TPU_LIST_BYTES}"
        )
    list_axis = walk.grid.index(LIST)
    longest = jnp.maximum(lists.seen.max(), 1)
    sizes: Any = (*walk.grid[:list_axis], longest, *walk.grid[list_axis + 1 :])
    arrays, kinds = _inputs(operands, saved)
    inputs: list[Any] = [arrays]
    aliases = {}
    in_specs = [jax.tree.map(lambda kind, x: walk.spec(kind, x.shape), kinds, arrays)]
    if classes is not None:  # tiles that are not visited stay zero
        inputs += [jnp.zeros(shape, dtype) for _, shape, dtype in writes]
        in_specs += [pl.BlockSpec(memory_space=pl.ANY)]
        aliases = {len(tables) + len(jax.tree.leaves(arrays)): 0}
    semantics: Any = ("parallel",) * 3 + ("arbitrary",) * (len(walk.grid) - 3)
    return pl.pallas_call(
        _body(kernel, problem, operands, walk, None if classes is None else classes.shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=sizes,
            in_specs=in_specs,
            out_specs=[walk.spec(kind, shape) for kind, shape, _ in writes],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[result(shape, dtype, operands.query) for _, shape, dtype in writes],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics,
            vmem_limit_bytes=TPU_VMEM_BYTES,
        ),
        interpret=problem.interpret,
        name=name,
    )(*(table.reshape(-1) for table in tables), *inputs)


def _body(
    kernel: KernelBody,
    problem: Problem,
    operands: Operands,
    walk: _Walk,
    classes_shape: tuple[int, ...] | None,
) -> Callable[..., None]:
    """Return the function of references that Pallas runs at each place in the grid."""
    N, rank, blocks = operands.query.shape[2], len(walk.grid), walk.blocks
    bias_shape = (0, 0) if operands.bias is None else operands.bias.shape[2:]
    number = 3 if classes_shape is None else 4  # of tables

    def body(*refs: Ref) -> None:
        (order, full, seen, *rest), (x, *others) = refs[:number], refs[number:]
        ids = [pl.program_id(axis) for axis in range(rank)]
        _, _, row, c = walk.at(*ids)
        b, n, i, j = walk.tile(ids, order)
        here = walk.line(walk.lists_shape, b, n, row)
        first = _all(ids[axis] == 0 for axis in range(3, rank))
        last = _all(ids[axis] == pl.num_programs(axis) - 1 for axis in range(3, rank))
        is_full, is_partial = c < full[here], (c >= full[here]) & (c < seen[here])
        if classes_shape is not None:
            listed = c < seen[here]
            kind = rest[0][walk.line(classes_shape, b, n, row) * classes_shape[3] + j]
            first = (ids[rank - 1] == 0) & ((c == 0) | listed)
            is_full, is_partial = listed & (kind == FULL), listed & (kind == PARTIAL)
            others = others[1:]
        if problem.visible is None:
            is_partial = None
        q0, k0 = i * blocks.q, j * blocks.k
        step = GridStep(b, n, q0, k0, N, bias_shape, first, last, is_full, is_partial)
        kernel(step, x, *others)

    return body


def classes_of(lists: TileLists) -> jax.Array:  # i32[B or 1, N or 1, rows, columns]
    """Return the class of every tile: 0 if it is not listed, else PARTIAL or FULL."""
    B, N, rows, columns = lists.order.shape
    c = lax.broadcasted_iota(jnp.int32, lists.order.shape, 3)
    kinds = (c < lists.full[..., None]) * (FULL - PARTIAL) + (c < lists.seen[..., None]) * PARTIAL
    flat = jnp.zeros((B * N * rows, columns), jnp.int32)
    flat = jax.vmap(lambda row, at, kind: row.at[at].max(kind))(
        flat, lists.order.reshape(flat.shape), kinds.reshape(flat.shape)
    )
    return flat.reshape(lists.order.shape)


def _all(conditions: Iterable[jax.Array]) -> jax.Array:
    return reduce(jnp.logical_and, conditions)


def _inputs(operands: Operands, saved: Saved | None) -> tuple[TileInputs, TileInputs]:
    """Return the arrays in the order kernels read them, and the kind of each."""

    def vectors(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(x[:, None, None] for x in arrays)

    def rows(x: jax.Array) -> jax.Array:
        return x[:, :, None]

    bias, kind = operands.bias, None
    if bias is not None:
        T, S = bias.shape[2:]
        kind = {(0, 0): "one", (0, 1): "key row", (1, 0): "query row", (1, 1): "pairs"}[
            T > 1, S > 1
        ]
        bias = bias.swapaxes(2, 3) if kind == "query row" else bias
    words = operands.dropout
    arrays = TileInputs(
        query=operands.query.swapaxes(1, 2),
        key=operands.key.swapaxes(1, 2),
        value=operands.value.swapaxes(1, 2),
        q_vectors=vectors(operands.q_vectors),
        k_vectors=vectors(operands.k_vectors),
        pairs=None if operands.pairs is None else operands.pairs.swapaxes(2, 3),
        bias=bias,
        slopes=None if operands.slopes is None else operands.slopes.reshape(-1),
        sinks=None if operands.sinks is None else operands.sinks.reshape(-1),
        dropout=None if words is None else (words[0].reshape(-1), words[1].reshape(-1)),
        do=None if saved is None else saved.do.swapaxes(1, 2),
        row_max=None if saved is None else rows(saved.row_max),
        log_sum=None if saved is None else rows(saved.log_sum),
        D=None if saved is None else rows(saved.D),
    )
    kinds = TileInputs(
        "query", "key", "key", "query row", "key row", "transposed pairs", kind,
        "scalars", "scalars", "scalars", "query", "query row", "query row", "query row",
    )  # fmt: skip
    for_each = zip(kinds, arrays, strict=True)
    return arrays, TileInputs(*(jax.tree.map(lambda _, kind=kind: kind, x) for kind, x in for_each))
