"""Fused attention on a TPU: Pallas kernels for Mosaic, after FlashAttention-2 (Dao 2023).

The scores of a tile are held as [keys, queries]. Then what belongs to a query (m, l, D, positions)
is a row along the lanes, as in memory, sums over keys add whole registers, and the products onto
keys need no transpose; what is summed onto queries is held as [H, queries] and transposed once.

A grid walks over rows of tiles and, innermost, over the list of tiles to visit, which the index
maps read: a tile that is not listed is not fetched. That axis is as long as the longest list, which
is known when running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from transformer_jax.kernels.contract import (
    FULL,
    LOWEST,
    PARTIAL,
    Blocks,
    Lists,
    Operands,
    Problem,
    Saved,
    keep,
    learns_slopes,
    lists_of,
    result,
)

LIST_BYTES = 768 * 1024  # for the lists, of the 1 MiB of scalar memory
VMEM_BYTES = 32 * 1024 * 1024
PART = 128  # keys that the forward kernel works on at once


def refuse(
    problem: Problem,
    query: Any,  # [B, T, N, H]: arrays, or structs of their shape and dtype
    key: Any,  # [B, S, K, H]
    value: Any,  # [B, S, K, Hv]
) -> str | None:
    """What these kernels can't do, in a line; None where they can."""
    dtypes = [jnp.dtype(x.dtype).name for x in (query, key, value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in ("float32", "bfloat16"):
        return f"dtypes {', '.join(dtypes)}: must be float32 or bfloat16, and the same"
    for name, size in (("H", query.shape[-1]), ("Hv", value.shape[-1])):
        if size % 8 or not 0 < size <= 512:
            return f"{name} {size}: must be a multiple of 8 up to 512"
    if problem.unordered:
        return "tpu: 'pallas_unordered' needs a Hopper GPU"
    return None


HEADS_FIRST = True  # whether results come as [B, N, T, H], transposed
SHORTEST = 128  # tiles of fewer queries or keys are not made


def blocks(kind: str, H: int, Hv: int, itemsize: int) -> Blocks:
    """Tile sizes of the kernel "forward", "queries", "keys" or "bias"."""
    wide = kind != "bias" and itemsize == 2 and max(H, Hv) <= 256
    return Blocks(512, 1024 if wide else 512)


# The kernels


def forward(
    problem: Problem, operands: Operands, lists: Lists, blocks: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, T, N, Hv], f32[B, N, T], f32[B, N, T]
    """(out, m, log l), in dead rows 0, -inf and 0; a NaN in log marks a row to repeat."""
    B, T, N, _ = operands.query.shape
    Hv = operands.value.shape[3]

    def kernel(step, x, out, high, log, m, sums, acc):
        @pl.when(step.first)
        def _():
            m[...] = jnp.full_like(m, LOWEST)
            sums[...] = jnp.zeros_like(sums)
            acc[...] = jnp.zeros_like(acc)

        def tile(masked):
            # All products first: those of one part run while another part is exponentiated.
            parts = step.parts(x, PART)
            products = [scores(problem, y, at, masked) for at, y in parts]
            for (at, y), (s, _, raw) in zip(parts, products, strict=True):
                top = jnp.maximum(m[...], s.max(axis=0, keepdims=True))
                p, shrink = jnp.exp(s - top), jnp.exp(m[...] - top)
                total = shrink * sums[...] + p.sum(axis=0, keepdims=True)
                if problem.mark:  # a product that is not finite leaves its trace
                    total += (raw * 0).sum(axis=0, keepdims=True)
                m[...], sums[...] = top, total
                p = dropped(problem, p, y, at).astype(x.value.dtype)
                acc[...] = shrink * acc[...] + dot(y.value[...], p, 0, 0)

        step.visit(tile)

        @pl.when(step.last)
        def _():
            top, total, shrink = m[...], sums[...], jnp.ones(m.shape, jnp.float32)
            dead = total == 0
            if x.sinks is not None:
                sink = step.scalar(x.sinks)
                top = jnp.maximum(top, sink)
                shrink = jnp.exp(m[...] - top)
                total = total * shrink + jnp.exp(sink - top)
            total = jnp.where(dead, 1.0, total)
            rows = jnp.where(dead, 0.0, acc[...] * (shrink / total))
            out[...] = rows.T.astype(out.dtype)
            high[...] = jnp.where(dead, -jnp.inf, top)
            log[...] = jnp.log(total)
            if problem.mark:
                log[...] += (acc[...] * 0).sum(axis=0, keepdims=True)

    out, high, log = by_queries(
        "attention_forward", kernel, problem, operands, None, lists, blocks,
        writes=[
            ("query", (B, N, T, Hv), operands.query.dtype),
            ("query row", (B, N, 1, T), jnp.float32),
            ("query row", (B, N, 1, T), jnp.float32),
        ],
        scratch=[(1, blocks.q), (1, blocks.q), (Hv, blocks.q)],
    )  # fmt: skip
    return out.swapaxes(1, 2), high.reshape(B, N, T), log.reshape(B, N, T)


def gradient_queries(
    problem: Problem, operands: Operands, lists: Lists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, jax.Array | None]:  # [B, T, N, H], f32[B, N, T]
    """(dq, -sum_j ds_ij |q_i - k_j|), the second only with learned slopes."""
    B, T, N, H = operands.query.shape
    sloped = learns_slopes(problem, operands)

    def kernel(step, x, *refs):
        (dq, *slope_rows), (acc, *slope_acc) = refs[: 1 + sloped], refs[1 + sloped :]

        @pl.when(step.first)
        def _():
            for sums in (acc, *slope_acc):
                sums[...] = jnp.zeros_like(sums)

        def tile(masked):
            _, ds, du = score_gradients(problem, x, step, masked)
            acc[...] += dot(x.key[...], du.astype(x.key.dtype), 0, 0)
            for sums in slope_acc:
                sums[...] -= (ds * distances(x)).sum(axis=0, keepdims=True)

        step.visit(tile)

        @pl.when(step.last)
        def _():
            dq[...] = (acc[...] * problem.scale).T.astype(dq.dtype)
            for out, sums in zip(slope_rows, slope_acc, strict=True):
                out[...] = sums[...]

    dq, *slope_rows = by_queries(
        "attention_gradient_queries", kernel, problem, operands, saved, lists, blocks,
        writes=[
            ("query", (B, N, T, H), operands.query.dtype),
            *[("query row", (B, N, 1, T), jnp.float32)] * sloped,
        ],
        scratch=[(H, blocks.q), *[(1, blocks.q)] * sloped],
    )  # fmt: skip
    return dq.swapaxes(1, 2), slope_rows[0].reshape(B, N, T) if sloped else None


def gradient_keys(
    problem: Problem, operands: Operands, lists: Lists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, Hv]
    """(dk, dv), summed over the query heads that read a key head."""
    B, S, K, H = operands.key.shape
    Hv, dtype = operands.value.shape[3], operands.key.dtype

    def kernel(step, x, dk, dv, dk_sum, dv_sum):
        @pl.when(step.first)
        def _():
            dk_sum[...] = jnp.zeros_like(dk_sum)
            dv_sum[...] = jnp.zeros_like(dv_sum)

        def tile(masked):
            p, _, du = score_gradients(problem, x, step, masked)
            dv_sum[...] += dot(p.astype(x.do.dtype), x.do[...], 1, 0)
            dk_sum[...] += dot(du.astype(x.query.dtype), x.query[...], 1, 0)

        step.visit(tile)

        @pl.when(step.last)
        def _():
            dk[...] = (dk_sum[...] * problem.scale).astype(dk.dtype)
            dv[...] = dv_sum[...].astype(dv.dtype)

    dk, dv = by_keys(
        "attention_gradient_keys", kernel, problem, operands, saved, lists, blocks,
        writes=[("key", (B, K, S, H), dtype), ("key", (B, K, S, Hv), dtype)],
        scratch=[(blocks.k, H), (blocks.k, Hv)],
        heads=K,
    )  # fmt: skip
    return dk.swapaxes(1, 2), dv.swapaxes(1, 2)


def gradient_bias(
    problem: Problem, operands: Operands, lists: Lists, blocks: Blocks, saved: Saved
) -> jax.Array:  # f32, of the shape of the bias
    """ds, summed over the axes where the bias has size 1."""
    assert operands.bias is not None
    B, T, N, _ = operands.query.shape
    bias, S = operands.bias.shape, operands.key.shape[1]
    reduce = [axis for axis, size in enumerate(bias) if size == 1]

    def kernel(step, x, out):
        @pl.when(step.first)
        def _():
            out[...] = jnp.zeros_like(out)

        def tile(masked):
            _, ds, _ = score_gradients(problem, x, step, masked)
            if bias[3] == 1:
                out[...] += ds.sum(axis=0, keepdims=True)
            elif bias[2] == 1:
                out[...] += ds.sum(axis=1, keepdims=True).reshape(out.shape)
            else:
                out[...] += ds.T

        step.visit(tile)

    args = "attention_gradient_bias", kernel, problem, operands, saved
    if bias[3] == 1:
        writes = [("query row", (B, N, 1, T), jnp.float32)]
        (rows,) = by_queries(*args, lists, blocks, writes=writes)
        return rows.swapaxes(2, 3).sum(axis=reduce, keepdims=True)
    if bias[2] == 1:
        writes = [("key row", (B, N, 1, S), jnp.float32)]
        turned = lists_of(classes_of(lists).swapaxes(2, 3))
        (rows,) = by_keys(*args, turned, blocks, writes=writes, heads=N)
        return rows.sum(axis=reduce, keepdims=True)
    (pairs,) = by_pairs(*args, lists, blocks, writes=[("pairs", bias, jnp.float32)])
    return pairs


# The arithmetic of a tile


def dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """x and y summed over one axis of each, in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x,
        y,
        (((x_axis,), (y_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def scores(
    problem: Problem, x: Reads, step: Step, masked: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array]:  # [block_k, block_q]
    """(s, the softcap's tanh, the products q k alone)."""
    raw = dot(x.key[...], x.query[...], 1, 1)
    s, tanh = raw * problem.scale, None
    if problem.softcap is not None:
        tanh = jnp.tanh(s * (1 / problem.softcap))
        s = tanh * problem.softcap
    if x.bias is not None:
        s = s + step.turn_bias(x.bias[...].astype(jnp.float32))
    if x.slopes is not None:
        s = s - step.scalar(x.slopes) * distances(x)
    if masked:
        assert problem.visible is not None
        queries = tuple(vector[...] for vector in x.q_vectors)
        keys = tuple(column(vector[...]) for vector in x.k_vectors)
        if x.pairs is not None:
            keys += (x.pairs[...].astype(jnp.int32),)
        s = jnp.where(problem.visible(queries, keys), s, -jnp.inf)
    return s, tanh, raw


def score_gradients(
    problem: Problem, x: Reads, step: Step, masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:  # [block_k, block_q]
    """(p after dropout, ds, du)."""
    s, tanh, _ = scores(problem, x, step, masked)
    if x.bias is not None:  # of a row that is lost to a bias that is not finite
        s = jnp.where(x.high[...] == jnp.inf, -jnp.inf, s)
    p = jnp.exp(s - x.high[...] - x.log[...])
    dp = dropped(problem, dot(x.value[...], x.do[...], 1, 1), x, step)
    ds = p * (dp - x.D[...])
    du = ds if tanh is None else ds * (1 - tanh * tanh)
    if masked:  # what overflowed behind the mask stays there
        ds, du = (jnp.where(s > -jnp.inf, x, 0.0) for x in (ds, du))
    return dropped(problem, p, x, step), ds, du


def dropped(problem: Problem, p: jax.Array, x: Reads, step: Step) -> jax.Array:
    """p f, of [block_k, block_q]."""
    if x.dropout is None or not problem.dropout_rate:
        return p
    block_k, block_q = p.shape
    a, b = (step.scalar(words) for words in x.dropout)
    q_index = step.i + lax.broadcasted_iota(jnp.int32, (1, block_q), 1)
    k_index = step.j + lax.broadcasted_iota(jnp.int32, (block_k, 1), 0)
    stays = keep(a, b, q_index.astype(jnp.uint32), k_index.astype(jnp.uint32), problem.dropout_rate)
    return jnp.where(stays, p * (1 / (1 - problem.dropout_rate)), 0.0)


def distances(x: Reads) -> jax.Array:  # f32[block_k, block_q]
    return jnp.abs(x.q_vectors[0][...] - column(x.k_vectors[0][...])).astype(jnp.float32)


def column(row: jax.Array) -> jax.Array:  # [1, block_k] -> [block_k, 1]
    return row.reshape(-1, 1)


# Walks over tiles


class Reads(NamedTuple):
    """What a kernel reads, [B, N, T, H] and [B, N, 1, T]; or the same's kinds, specs or tiles."""

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
    high: Any
    log: Any
    D: Any


class Step(NamedTuple):
    """Where a kernel stands."""

    b: jax.Array
    n: jax.Array  # a query head
    i: jax.Array  # index of the first query
    j: jax.Array  # index of the first key
    heads: int
    bias_shape: tuple[int, int]
    first: Any
    last: Any
    full: Any
    partial: Any

    def visit(self, tile: Callable[[bool], None]) -> None:
        pl.when(self.full)(partial(tile, False))
        if self.partial is not None:
            pl.when(self.partial)(partial(tile, True))

    def parts(self, x: Reads, size: int) -> list[tuple[Step, Reads]]:
        """A tile cut along the keys, and where each part stands."""
        keys = x.key.shape[0]
        if keys % size:
            return [(self, x)]
        return [
            (self._replace(j=self.j + at), self._cut(x, pl.ds(at, size)))
            for at in range(0, keys, size)
        ]

    def _cut(self, x: Reads, here: Any) -> Reads:
        by_key = x.bias is not None and self.bias_shape[1] > 1
        return x._replace(
            key=x.key.at[here],
            value=x.value.at[here],
            k_vectors=tuple(vector.at[:, here] for vector in x.k_vectors),
            pairs=None if x.pairs is None else x.pairs.at[here],
            bias=x.bias.at[:, here] if by_key else x.bias,
        )

    def scalar(self, ref: Any) -> jax.Array:
        """Of [B or 1, N], flattened."""
        return ref[self.n if ref.shape[0] == self.heads else self.b * self.heads + self.n]

    def turn_bias(self, tile: jax.Array) -> jax.Array:  # to [block_k or 1, block_q or 1]
        T, S = self.bias_shape
        if T > 1 and S > 1:
            return tile.T
        return column(tile) if S > 1 else tile


def by_queries(name, kernel, problem, operands, saved, lists, blocks, *, writes, scratch=()):
    """A kernel over query tiles and the key tiles that each visits."""
    B, T, N, _ = operands.query.shape

    def at(b, n, row, c):
        return b, n, row, c

    return _walk(
        name, kernel, problem, operands, saved, lists, blocks,
        grid=(B, N, T // blocks.q, LIST), at=at, writes=writes, scratch=scratch,
    )  # fmt: skip


def by_keys(name, kernel, problem, operands, saved, lists, blocks, *, writes, scratch=(), heads):
    """A kernel over key tiles and the query tiles that visit each, of N // heads query heads."""
    B, S, _, _ = operands.key.shape
    G = operands.query.shape[2] // heads

    def at(b, h, row, g, c):
        return b, h * G + g, row, c

    return _walk(
        name, kernel, problem, operands, saved, lists, blocks,
        grid=(B, heads, S // blocks.k, G, LIST), at=at, writes=writes, scratch=scratch, turned=True,
    )  # fmt: skip


def by_pairs(name, kernel, problem, operands, saved, lists, blocks, *, writes):
    """A kernel over pairs of tiles and, innermost, the batch rows and heads that share a bias."""
    B, T, N, _ = operands.query.shape
    bias_batch, bias_heads = operands.bias.shape[:2]
    batch, heads = B // bias_batch, N // bias_heads

    def at(b, n, row, c, lane):
        return (
            b * batch + lax.div(lane, np.int32(heads)),
            n * heads + lax.rem(lane, np.int32(heads)),
            row,
            c,
        )

    classes = classes_of(lists)
    shared = [axis for axis in (0, 1) if operands.bias.shape[axis] == 1]
    return _walk(
        name, kernel, problem, operands, saved, lists_of(classes.max(axis=shared, keepdims=True)),
        blocks, grid=(bias_batch, bias_heads, T // blocks.q, LIST, batch * heads), at=at,
        writes=writes, classes=classes,
    )  # fmt: skip


LIST = None  # the axis of a grid along the lists


def _walk(
    name: str,
    kernel: Callable,
    problem: Problem,
    operands: Operands,
    saved: Saved | None,
    lists: Lists,
    blocks: Blocks,
    *,
    grid: tuple[int | None, ...],  # three axes in any order, then those that must run in order
    at: Callable,  # of the place in the grid: b, n, row of tiles, place in the row's list
    writes: Sequence[tuple[str, tuple[int, ...], Any]],
    scratch: Sequence[tuple[int, ...]] = (),
    turned: bool = False,  # rows of tiles are keys
    classes: jax.Array | None = None,  # if the lists say only which tiles some head visits
) -> list[jax.Array]:
    N, G = operands.query.shape[2], operands.query.shape[2] // operands.key.shape[2]
    bias_shape = (0, 0) if operands.bias is None else operands.bias.shape[2:]
    tables = [*lists] if classes is None else [*lists, classes]
    size = sum(4 * table.size for table in tables)
    if size > LIST_BYTES:
        raise NotImplementedError(
            f"lists of tiles of shape {lists.order.shape} take {size} bytes of scalar memory: "
            f"at most {LIST_BYTES}"
        )
    rank, list_axis = len(grid), grid.index(LIST)
    sizes: Any = (*grid[:list_axis], jnp.maximum(lists.seen.max(), 1), *grid[list_axis + 1 :])

    def line(shape, b, n, row):
        b, n = (b if shape[0] > 1 else 0), (n if shape[1] > 1 else 0)
        return (b * shape[1] + n) * shape[2] + row

    def place(ids, order):
        b, n, row, c = at(*ids)
        column = order[line(lists.order.shape, b, n, row) * lists.order.shape[3] + c]
        return b, n, *((column, row) if turned else (row, column))

    def spec(kind, shape):
        if kind == "scalars":
            return pl.BlockSpec(memory_space=pltpu.SMEM)

        def index(*args):
            b, n, i, j = place(args[:rank], args[rank])
            b, h = (b if shape[0] > 1 else 0), (n if shape[1] > 1 else 0)
            return {
                "query": (b, n, i, 0),
                "key": (b, lax.div(n, np.int32(G)), j, 0),
                "query row": (b, h, 0, i),
                "key row": (b, h, 0, j),
                "pairs": (b, h, i, j),
                "turned pairs": (b, h, j, i),
                "one": (b, h, 0, 0),
            }[kind]

        tile = {
            "query": (blocks.q, shape[3]),
            "key": (blocks.k, shape[3]),
            "query row": (1, blocks.q),
            "key row": (1, blocks.k),
            "pairs": (blocks.q, blocks.k),
            "turned pairs": (blocks.k, blocks.q),
            "one": (1, 1),
        }[kind]
        return pl.BlockSpec((None, None, *tile), index)

    order_of: Any = ("parallel",) * 3 + ("arbitrary",) * (rank - 3)

    def body(*refs: Any) -> None:
        (order, full, seen, *rest), (x, *others) = refs[: len(tables)], refs[len(tables) :]
        ids = [pl.program_id(axis) for axis in range(rank)]
        _, _, row, c = at(*ids)
        b, n, i, j = place(ids, order)
        here = line(lists.order.shape, b, n, row)
        first = _all(ids[axis] == 0 for axis in range(3, rank))
        last = _all(ids[axis] == pl.num_programs(axis) - 1 for axis in range(3, rank))
        is_full, is_partial = c < full[here], (c >= full[here]) & (c < seen[here])
        if classes is not None:
            listed = c < seen[here]
            kind = rest[0][line(classes.shape, b, n, row) * classes.shape[3] + j]
            first = (ids[rank - 1] == 0) & ((c == 0) | listed)
            is_full, is_partial = listed & (kind == FULL), listed & (kind == PARTIAL)
            others = others[1:]
        if problem.visible is None:
            is_partial = None
        kernel(
            Step(
                b, n, i * blocks.q, j * blocks.k, N, bias_shape, first, last, is_full, is_partial
            ),
            x,
            *others,
        )  # fmt: skip

    arrays, kinds = reads(operands, saved)
    inputs: list[Any] = [arrays]
    aliases = {}
    in_specs = [jax.tree.map(lambda kind, x: spec(kind, x.shape), kinds, arrays)]
    if classes is not None:  # tiles that are not visited stay zero
        inputs += [jnp.zeros(shape, dtype) for _, shape, dtype in writes]
        in_specs += [pl.BlockSpec(memory_space=pl.ANY)]
        aliases = {len(tables) + len(jax.tree.leaves(arrays)): 0}
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=sizes,
            in_specs=in_specs,
            out_specs=[spec(kind, shape) for kind, shape, _ in writes],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[result(shape, dtype, operands.query) for _, shape, dtype in writes],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=order_of,
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=problem.interpret,
        name=name,
    )(*(table.reshape(-1) for table in tables), *inputs)


def classes_of(lists: Lists) -> jax.Array:  # i32[B or 1, N or 1, rows, columns]
    """0 for a tile that is not listed, else PARTIAL or FULL."""
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


def reads(operands: Operands, saved: Saved | None) -> tuple[Reads, Reads]:
    """The arrays in the order kernels read them, and the kind of each."""

    def vectors(arrays):
        return tuple(x[:, None, None] for x in arrays)

    def rows(x):
        return x[:, :, None]

    bias, kind = operands.bias, None
    if bias is not None:
        T, S = bias.shape[2:]
        kind = {(0, 0): "one", (0, 1): "key row", (1, 0): "query row", (1, 1): "pairs"}[
            T > 1, S > 1
        ]
        bias = bias.swapaxes(2, 3) if kind == "query row" else bias
    words = operands.dropout
    arrays = Reads(
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
        high=None if saved is None else rows(saved.high),
        log=None if saved is None else rows(saved.log),
        D=None if saved is None else rows(saved.D),
    )
    kinds = Reads(
        "query", "key", "key", "query row", "key row", "turned pairs", kind,
        "scalars", "scalars", "scalars", "query", "query row", "query row", "query row",
    )  # fmt: skip
    for_each = zip(kinds, arrays, strict=True)
    return arrays, Reads(*(jax.tree.map(lambda _, kind=kind: kind, x) for kind, x in for_each))
