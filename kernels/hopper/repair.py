"""Keep the rule on what is not finite: compute again, in place, the rows that met it.

The kernels of `forward`, `backward` and `backward_single_pass` mark such rows with NaN. In a tile
that a mask cuts, a weight of zero times NaN makes NaN of rows that do not see it, and a softcap
makes infinity finite. So each is followed by a kernel of this module, which reads the marks, one
number a row, and is done where there is none. A marked row is computed again from the same tiles in
the same order: to a rounding it is what it would be with finite numbers in place of those that it
does not see.

What is multiplied with weights is made finite in shared memory first: rows of values in the forward
pass, rows of keys for dq, rows of queries and of do for dk and dv. So are keys for dk and dv, of
whose products softcap takes the derivative. Every other product is confined to pairs, where the
mask selects, and rows that pass no gradient on have the product 0. The single-pass backward has no
lists by queries: its dq is computed again from all keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.contract import (
    LOWEST,
    Blocks,
    Operands,
    Problem,
    Saved,
    TileLists,
    vary,
)
from transformer_jax.kernels.hopper.backward import backward_dkdv as marking_dkdv
from transformer_jax.kernels.hopper.backward import backward_dq as marking_dq
from transformer_jax.kernels.hopper.backward import base_of
from transformer_jax.kernels.hopper.backward_single_pass import (
    backward_single_pass as marking_single_pass,
)
from transformer_jax.kernels.hopper.forward import divided, raised
from transformer_jax.kernels.hopper.forward import forward as marking_forward
from transformer_jax.kernels.hopper.memory import (
    COLUMN,
    HAS_JAX_11,
    ROW,
    ROWS,
    WGMMA,
    Ref,
    across,
    at,
    f32,
    filled,
    load,
    load_along,
    marks_of,
    tile_slots,
)
from transformer_jax.kernels.hopper.products import add_products, product
from transformer_jax.kernels.hopper.schedule import name_of
from transformer_jax.kernels.hopper.scores import (
    LN2,
    TilePosition,
    TileVectors,
    distance,
    kept,
    probabilities,
    queries_as_columns,
    score_unit,
    scores,
)
from transformer_jax.kernels.repair import repaired_backward, repaired_forward

READ = 128  # marks that a warpgroup reads at least
MOST = 2048  # and at most

# The kernels of the contract


def forward(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, ...]:
    """Return the output [B, T, N, Hv], and f32[B, N, T] each of m and log l.

    m is the maximum of a row, less at most the slack.
    """
    if not HAS_JAX_11:
        return _looped_forward(problem, operands, lists, blocks)
    results = marking_forward(problem, operands, lists, blocks)
    if problem.detect_nonfinite:
        H, Hv, k = operands.query.shape[-1], operands.value.shape[-1], blocks.k
        tiles = dict(q_tile=(ROWS, H), k_tile=(k, H), v_tile=(k, Hv), out_tile=(ROWS, Hv))
        body = functools.partial(_forward, problem, blocks)
        results = _again(problem, body, None, tiles, (operands, lists), results)
    return vary(results, like=operands)


def backward_dq(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, jax.Array | None]:
    """Return dq [B, T, N, H], and with learned slopes f32[B, N, T] of -sum_j ds_ij |q_i - k_j|."""
    if not HAS_JAX_11:
        return _looped_dq(problem, operands, lists, blocks, saved)
    dq, slopes, marks = marking_dq(problem, operands, lists, blocks, saved)
    if problem.detect_nonfinite:
        [dq, *rest] = _dq_again(problem, operands, lists, blocks, saved, marks, (dq, slopes))
        slopes = rest[0] if rest else None
    return vary((dq, slopes), like=operands)


def backward_dkdv(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, ...]:
    """Return dk [B, S, K, H] and dv [B, S, K, Hv]; the rows of `lists` are key tiles here."""
    if not HAS_JAX_11:
        return _looped_dkdv(problem, operands, lists, blocks, saved)
    dk, dv, marks = marking_dkdv(problem, operands, lists, blocks, saved)
    results: tuple[jax.Array, ...] = dk, dv
    if problem.detect_nonfinite:
        results = _dkdv_again(problem, operands, lists, blocks, saved, marks, results)
    return vary(results, like=operands)


def backward_single_pass(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, ...]:
    """Return dq, dk and dv, and with learned slopes f32[B, N, S] of -sum_i ds_ij |q_i - k_j|.

    The rows of `lists` are key tiles.
    """
    arguments = problem, operands, lists, blocks, saved
    dq, *results, marks = marking_single_pass(*arguments)
    if problem.detect_nonfinite:
        every = Blocks(q=ROWS, k=ROWS)  # tile of keys: the lists are those of the other side
        [dq] = _dq_again(problem, operands, None, every, saved, marks, (dq, None))
        results = _dkdv_again(problem, operands, lists, blocks, saved, marks, tuple(results))
    return vary((dq, *results), like=operands)


# With jax 0.10, which takes no references inside a part of a mesh: a loop around the kernels


@repaired_forward
def _looped_forward(problem: Problem, operands: Operands, *rest: Any) -> Any:
    return vary(marking_forward(problem, operands, *rest), like=operands)


@repaired_backward
def _looped_dq(problem: Problem, operands: Operands, *rest: Any) -> Any:
    return vary(marking_dq(problem, operands, *rest)[:2], like=operands)


@repaired_backward
def _looped_dkdv(problem: Problem, operands: Operands, *rest: Any) -> Any:
    return vary(marking_dkdv(problem, operands, *rest)[:2], like=operands)


# What they run


def _dq_again(
    problem: Problem, operands: Operands, lists: TileLists | None, blocks: Blocks, saved: Saved,
    marks: jax.Array, results: Any,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Return dq, and the rows of slopes if they are given, computed again where rows are marked.

    Marks are f32[B, N, T]; without lists f32[1, B, K, S], of the keys that a query head meets.
    """
    H, Hv, k = operands.query.shape[-1], operands.value.shape[-1], blocks.k
    tiles = dict(
        q_tile=(ROWS, H), do_tile=(ROWS, Hv), k_tile=(k, H), v_tile=(k, Hv), out_tile=(ROWS, H)
    )
    body = functools.partial(_backward_dq, problem, blocks)
    given = operands, lists, saved.do, base_of(saved), saved.D
    results = tuple(x for x in results if x is not None)
    return _again(problem, body, marks, tiles, given, results, whole=lists is None)


def _dkdv_again(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Saved,
    marks: jax.Array, results: Any,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Return dk, dv and, if they are given, the rows of slopes, again where rows are marked."""
    H, Hv, q = operands.query.shape[-1], operands.value.shape[-1], blocks.q
    tiles = dict(k_tile=(ROWS, H), v_tile=(ROWS, Hv), q_tile=(q, H), do_tile=(q, Hv))
    tiles |= dict(dk_tile=(ROWS, H), dv_tile=(ROWS, Hv))
    body = functools.partial(_backward_dkdv, problem, blocks)
    given = queries_as_columns(operands), lists, saved.do, base_of(saved), saved.D
    return _again(problem, body, marks, tiles, given, results)


def _again(
    problem: Problem,
    body: Callable[..., None],
    marks: jax.Array | None,  # f32[B, heads, rows] or [parts, B, heads, rows], NaN if marked
    tiles: dict[str, tuple[int, int]],  # in shared memory
    given: tuple[Any, ...],
    results: tuple[jax.Array, ...],
    *,
    whole: bool = False,
) -> tuple[jax.Array, ...]:
    """Run a body on the results, in place, for 64 rows each where some rows are marked.

    A program reads the marks of some rows and computes these; or, as a `whole`, those of all keys
    of a query head, and computes all its queries. Without marks the last of the results has them.
    """
    interpret = {"interpret": problem.interpret} if problem.interpret else {}
    (B, T, N, _), dtype = given[0].query.shape, given[0].query.dtype
    *_, heads, rows = (results[-1] if marks is None else marks).shape
    if rows % READ:
        marks = pad(results[-1] if marks is None else marks, rows + -rows % READ)
    heads, rows = (N, T) if whole else (heads, rows)
    width = T if whole else math.gcd(rows, MOST)
    kernel = plgpu.kernel(
        functools.partial(_program, body, (heads, rows, width), whole),
        out_type=(),
        grid=(B * heads * (rows // width),),
        grid_names=("program",),
        kernel_name=f"{name_of(body)}_again",
        scratch_types=dict(
            {name: tile_slots(None, *shape, dtype) for name, shape in tiles.items()},
            bad=plgpu.SMEM((max(shape[0] for shape in tiles.values()),), f32),
            arrived=plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **interpret,
    )
    refs = tuple(jax.new_ref(x) for x in results)
    kernel(marks, given, refs)
    return tuple(jax.freeze(x) for x in refs)


def pad(x: jax.Array, length: int) -> jax.Array:
    """Return an array whose last axis is as long, zeros at the end."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])


def _program(
    body: Callable[..., None],
    sizes: tuple[int, int, int],
    whole: bool,
    marks: Ref | None,
    given: tuple[Any, ...],
    results: tuple[Ref, ...],
    **memory: Ref,
) -> None:
    """Run a program: the body for 64 rows at a time, if some mark of its rows is NaN."""
    heads, rows, width = sizes
    program, parts = lax.axis_index("program"), rows // width
    b, head, start = program // (heads * parts), program // parts % heads, program % parts * width
    marked = results[-1] if marks is None else marks
    sources = [marked] if len(marked.shape) == 3 else [marked.at[i] for i in range(marked.shape[0])]
    owner, first, length = head, start, max(width, READ)  # of 64 rows more are read: padding
    if whole:
        of_keys = marked.shape[-2]
        owner, first, length = head // (heads // of_keys), jnp.int32(0), marked.shape[-1]
    piece = math.gcd(length, MOST)
    layout = plgpu.Layout.WG_STRIDED((piece,), math.gcd(piece // READ, 4))

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        for source in sources:
            here = load(source.at[b, owner, pl.ds(first + i * piece, piece)], layout)
            total = total + jnp.sum(here * 0)
        return total

    @pl.when(lax.fori_loop(0, length // piece, add, f32(0)) != 0)
    def _() -> None:
        tiles = _Tiles(memory)

        def one(i: jax.Array, carry: jax.Array) -> jax.Array:
            r0 = start + i * ROWS
            own = None
            if not whole:
                rows_at = b, head, pl.ds(r0, ROWS)
                own = sum(load(source.at[rows_at], WGMMA.reduce(1)) for source in sources)
            body(tiles, given, results, b, head, r0, own)
            return carry

        lax.fori_loop(0, width // ROWS, one, jnp.int32(0))


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Move tiles of 64 rows between device memory and shared memory, one at a time."""

    memory: dict[str, Ref]

    def __getitem__(self, name: str) -> Ref:
        return self.memory[name]

    def read(self, name: str, source: Ref) -> Ref:
        """Copy a tile into shared memory."""
        arrived = self.memory["arrived"]
        plgpu.commit_smem()  # the copy comes after plain reads of the slot
        plgpu.copy_gmem_to_smem(source, self[name], arrived)
        plgpu.barrier_wait(arrived)
        return self[name]

    def clean(self, name: str) -> None:
        """Put zeros into rows that are not finite."""
        for part in self.parts(name):
            x = load(self[name].at[part], WGMMA)
            found = across(marks_of(self[name].at[part]), x)
            self[name][part] = jnp.where(found == 0, x, jnp.zeros_like(x))
        plgpu.commit_smem()

    def parts(self, name: str) -> list[Any]:
        """Return the slices of 64 rows of a tile."""
        return [pl.ds(start, ROWS) for start in range(0, self[name].shape[0], ROWS)]

    def bad_columns(self, *names: str) -> jax.Array:  # f32[64, rows]
        """Return NaN in columns whose rows of a tile are not finite, else 0."""
        bad = self.memory["bad"]
        plgpu.commit_smem()
        for part in self.parts(names[0]):
            bad[part] = sum(marks_of(self[name].at[part]) for name in names)
        plgpu.commit_smem()
        return load_along(bad, (ROWS, bad.shape[0]), COLUMN)

    def write(self, name: str, target: Ref, new: jax.Array, own: jax.Array | None) -> None:
        """Write the rows of a tile whose mark is NaN; without marks, those which are NaN."""
        tile = self.read(name, target)
        own = marks_of(tile) if own is None else own
        old = load(tile, WGMMA)
        tile[...] = jnp.where(across(own, new) == 0, old, new.astype(old.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, target)
        plgpu.wait_smem_to_gmem(0)


def _write_rows(target: Ref, new: jax.Array, own: jax.Array | None) -> None:
    """Write the numbers of rows whose mark is NaN."""
    old = load(target, WGMMA.reduce(1))
    own = old * 0 if own is None else own
    target[...] = jnp.where(own == 0, old, new)


# The arithmetic


def _forward(
    problem: Problem, blocks: Blocks, tiles: _Tiles, given: tuple[Any, ...],
    results: tuple[Ref, Ref, Ref], b: Any, n: Any, q0: Any, own: jax.Array,
) -> None:  # fmt: skip
    """Compute 64 rows of the output, m and log l."""
    operands, lists = given
    (_, _, N, _), (_, _, K, Hv) = operands.query.shape, operands.value.shape
    vectors = TileVectors(problem, operands, ROW, copies=False)
    rows, unit, shape = vectors.of_rows(b, q0), score_unit(problem, operands), (ROWS, blocks.k)
    row, queries = q0 // blocks.q, (b, pl.ds(q0, ROWS), n)
    slack = blocks.slack * (1 - 2**-20)
    bad_query = marks_of(tiles.read("q_tile", operands.query.at[queries]))

    def add(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, row_max, total = carry
        k0 = at(lists.order, b, n, row, j)[...] * blocks.k
        keys = b, pl.ds(k0, blocks.k), n // (N // K)
        tiles.read("k_tile", operands.key.at[keys])
        tiles.read("v_tile", operands.value.at[keys])
        bad = tiles.bad_columns("k_tile", "v_tile")
        tiles.clean("v_tile")
        beside = vectors.of_columns(None, 0, b, k0, blocks.k)
        where = TilePosition(b, n, q0, k0, rows, beside)
        raw = product(tiles["q_tile"], tiles["k_tile"].transpose((1, 0)))
        # NaN, which the mask hides: products of an infinity may all be -inf, as of hidden keys
        s, _ = scores(problem, operands, raw + bad + across(bad_query, raw), where, ROW, True)
        grown = raised(row_max, s.max(axis=1) * unit, slack)
        shrink = jnp.exp2(row_max - grown)
        p = jnp.exp2(s * unit - across(grown, s))
        total = total * shrink + p.sum(axis=1)
        if problem.dropout_rate:
            p = jnp.where(kept(problem, operands, where, shape, ROW), p, 0)
        p, grown, total, shrink = lax.optimization_barrier((p, grown, total, shrink))  # as there
        acc = acc * across(shrink, acc)
        [acc] = add_products(problem, (acc, p.astype(operands.value.dtype), tiles["v_tile"]))
        return acc, grown, total

    start = filled((ROWS, Hv), 0), filled((ROWS,), LOWEST), filled((ROWS,), 0)
    acc, row_max, total = lax.fori_loop(0, at(lists.seen, b, n, row)[...], add, start)
    acc, row_max, total, live = divided(problem, operands, b, n, acc, row_max, total)
    out, row_max_out, log_sum_out = results
    tiles.write("out_tile", out.at[queries], acc, own)
    place = b, n, pl.ds(q0, ROWS)
    _write_rows(row_max_out.at[place], jnp.where(live, row_max * LN2, -jnp.inf), own)
    _write_rows(log_sum_out.at[place], jnp.where(live, jnp.log2(total) * LN2, 0), own)


def _pairs(
    problem: Problem, operands: Operands, raw: jax.Array, base: jax.Array, where: TilePosition,
    q_axis: int,
) -> Any:  # fmt: skip
    """Return what `probabilities` does, with p 0 in rows that pass no gradient on."""
    raw = jnp.where(base == jnp.inf, 0, raw)
    return probabilities(problem, operands, raw, base, where, q_axis, True)


def _backward_dq(
    problem: Problem, blocks: Blocks, tiles: _Tiles, given: tuple[Any, ...],
    results: tuple[Ref, ...], b: Any, n: Any, q0: Any, own: jax.Array | None,
) -> None:  # fmt: skip
    """Compute 64 rows of dq, and of the slopes' gradient."""
    operands, lists, do, base_rows, D_rows = given
    (_, _, N, H), (_, S, K, _) = operands.query.shape, operands.key.shape
    vectors, shape = TileVectors(problem, operands, ROW, copies=False), (ROWS, blocks.k)
    rows, row = vectors.of_rows(b, q0), q0 // blocks.q
    place, queries = (b, n, pl.ds(q0, ROWS)), (b, pl.ds(q0, ROWS), n)
    base, D = (load(x.at[place], WGMMA.reduce(1)) for x in (base_rows, D_rows))
    tiles.read("q_tile", operands.query.at[queries])
    tiles.read("do_tile", do.at[queries])

    def add(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        acc, slope = carry
        k0 = (j if lists is None else at(lists.order, b, n, row, j)[...]) * blocks.k
        keys = b, pl.ds(k0, blocks.k), n // (N // K)
        tiles.read("k_tile", operands.key.at[keys])
        tiles.read("v_tile", operands.value.at[keys])
        tiles.clean("k_tile")
        where = TilePosition(b, n, q0, k0, rows, vectors.of_columns(None, 0, b, k0, blocks.k))
        raw = product(tiles["q_tile"], tiles["k_tile"].transpose((1, 0)))
        _, differentiate = _pairs(problem, operands, raw, across(base, raw), where, ROW)
        dp = product(tiles["do_tile"], tiles["v_tile"].transpose((1, 0)))
        ds, du = differentiate(dp, across(D, dp))
        if len(results) == 2:
            slope -= (ds * distance(where, shape)).sum(axis=1)
        [acc] = add_products(problem, (acc, du.astype(operands.key.dtype), tiles["k_tile"]))
        return acc, slope

    start = filled((ROWS, H), 0), filled((ROWS,), 0)
    count = S // blocks.k if lists is None else at(lists.seen, b, n, row)[...]
    acc, slope = lax.fori_loop(0, count, add, start)
    tiles.write("out_tile", results[0].at[queries], acc * problem.scale, own)
    if len(results) == 2:
        _write_rows(results[1].at[place], slope, own)


def _backward_dkdv(
    problem: Problem, blocks: Blocks, tiles: _Tiles, given: tuple[Any, ...],
    results: tuple[Ref, ...], b: Any, head: Any, k0: Any, own: jax.Array,
) -> None:  # fmt: skip
    """Compute 64 rows of dk and dv, one after the other, and the slopes' gradient with dk."""
    operands, lists, do, base_rows, D_rows = given
    N, K, dtype = operands.query.shape[2], operands.key.shape[2], operands.query.dtype
    G, shape, row = N // K, (ROWS, blocks.q), k0 // blocks.k
    vectors = TileVectors(problem, operands, COLUMN, copies=False)
    keys, rows = (b, pl.ds(k0, ROWS), head), vectors.of_rows(b, k0)
    tiles.read("k_tile", operands.key.at[keys])
    tiles.read("v_tile", operands.value.at[keys])
    tiles.clean("k_tile")

    def add(is_key: bool, n: Any, j: jax.Array, carry: Any) -> tuple[jax.Array, jax.Array]:
        total, slope = carry
        q0 = at(lists.order, b, n, row, j)[...] * blocks.q
        queries, place = (b, pl.ds(q0, blocks.q), n), (b, n, pl.ds(q0, blocks.q))
        tiles.read("q_tile", operands.query.at[queries])
        tiles.read("do_tile", do.at[queries])
        bad = tiles.bad_columns("do_tile")
        tiles.clean("q_tile")
        tiles.clean("do_tile")
        beside = vectors.of_columns(None, 0, b, q0, blocks.q)
        where = TilePosition(b, n, q0, k0, rows, beside)
        raw = product(tiles["k_tile"], tiles["q_tile"].transpose((1, 0)))
        base = load_along(base_rows.at[place], shape, COLUMN)
        p, differentiate = _pairs(problem, operands, raw, base, where, COLUMN)
        if is_key:
            dp = product(tiles["v_tile"], tiles["do_tile"].transpose((1, 0)))
            ds, du = differentiate(dp, load_along(D_rows.at[place], shape, COLUMN))
            if len(results) == 3:
                slope -= (ds * distance(where, shape)).sum(axis=1)
            factors = du, tiles["q_tile"]
        else:
            factors = p + jnp.where(p == 0, 0, bad), tiles["do_tile"]
        [total] = add_products(problem, (total, factors[0].astype(dtype), factors[1]))
        return total, slope

    def all_heads(is_key: bool, width: int) -> jax.Array:
        def one_head(g: jax.Array, total: jax.Array) -> jax.Array:
            n = head * G + g
            each = functools.partial(add, is_key, n)
            start = total, filled((ROWS,), 0)
            total, slope = lax.fori_loop(0, at(lists.seen, b, n, row)[...], each, start)
            if is_key and len(results) == 3:
                _write_rows(results[2].at[b, n, pl.ds(k0, ROWS)], slope, own)
            return total

        return lax.fori_loop(0, G, one_head, filled((ROWS, width), 0))

    dk = all_heads(True, operands.key.shape[-1]) * problem.scale
    tiles.write("dk_tile", results[0].at[keys], dk, own)
    tiles.write("dv_tile", results[1].at[keys], all_heads(False, do.shape[-1]), own)
