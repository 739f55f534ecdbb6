"""Flash attention on NVIDIA Hopper, in Pallas on Mosaic GPU.

Every kernel is persistent and warp-specialised: one warpgroup copies tiles into slots of shared
memory (TMA, on barriers), the others, `Blocks.q / 64` or `Blocks.k / 64` of them, hold 64 rows of
the scores each and multiply (wgmma). In the forward pass two of them take turns at the tensor
cores, so that the softmax of one hides behind the products of the other (FlashAttention-3, Shah et
al. 2024, section 3.1), and with some `Blocks.slack` a warp rescales its sums only where a maximum
has risen by more than that (FlashAttention-4, Zadouri et al. 2026). Scores are kept in base 2. The
backward pass is two kernels, for dq and for dk and dv, so that no sum depends on the order in which
programs finish; one kernel for all three, without that promise, is in hopper_fused.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from transformer_jax.kernels.contract import (
    LOWEST,
    Blocks,
    Lists,
    Operands,
    Problem,
    Saved,
    learns_slopes,
    mix,
    result,
    threshold,
    vary,
)

PROGRAMS = 132  # multiprocessors of an H100 or H200 SXM: as many programs stay resident
ROWS = 64  # rows of a tile that one warpgroup multiplies
COPIED = 4  # vectors of a mask that are copied with a tile; more are read of memory, one by one
LEVELS = 8  # of how heavy an item is; few keep heads together, many share the work out evenly
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
LOG2E = math.log2(math.e)
LN2 = math.log(2)
ROW, COLUMN = 0, 1  # the axis of a tile along which a vector lies
WGMMA = plgpu.Layout.WGMMA  # how the registers of a warpgroup hold a tile

HAS_JAX_11 = hasattr(plgpu, "InterpretGPUParams")
HAS_INTERPRETER = hasattr(plgpu, "store")  # that of jax 0.12; the one of jax 0.11 fails here

f32 = jnp.float32
i32 = jnp.int32


LIST_BYTES = None  # lists are in device memory
HEADS_FIRST = False  # whether results come as [B, N, T, H], transposed
SHORTEST = None  # short sequences are padded to whole tiles


def blocks(kind: str, H: int, Hv: int, itemsize: int = 2) -> Blocks:
    """Tile sizes of a kernel: "forward", "queries", "keys", "bias" or "unordered". What fits
    227 KiB of shared memory and, at 240 registers a thread, spills none or little; see
    benchmarks/compile_gpu.py."""
    del itemsize  # 2: `refuse` lets through nothing else
    wide = max(H, Hv) > 128
    match kind:
        case "forward":
            return Blocks(q=128, k=64 if wide else 128, stages=3 if H + Hv <= 192 else 2)
        case "queries":
            return Blocks(q=128, k=64, stages=3 if H + Hv <= 256 else 2)
        case "keys":
            narrow = H + Hv <= 256
            return Blocks(q=64, k=128 if narrow else 64, stages=3 if narrow else 2)
        case "bias":
            return Blocks(q=128, k=64, stages=1 if wide else 2)
        case "unordered":
            return Blocks(q=128 if max(H, Hv) == 32 else 64, k=128, stages=2)
    raise ValueError(f"no kernel {kind!r}")


def refuse(problem: Problem, query: Any, key: Any, value: Any) -> str | None:
    """Why these arrays (or their shapes and dtypes) can't be done here, or None."""
    H, Hv = query.shape[-1], value.shape[-1]
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the Hopper kernel multiplies bfloat16 or float16, not {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return f"query {query.dtype}, key {key.dtype} and value {value.dtype} differ in dtype"
    if H not in HEAD_DIMS or Hv not in HEAD_DIMS:
        return f"head dims {H} (query, key) and {Hv} (value) are not both in {HEAD_DIMS}"
    if problem.unordered and H + Hv > 256:
        return f"hopper: unordered with H + Hv {H} + {Hv}: must be at most 256"
    if problem.unordered and not HAS_JAX_11:
        return f"hopper: unordered needs jax 0.11 or later, this is {jax.__version__}"
    if problem.interpret and not HAS_INTERPRETER:
        return f"the interpreter of Mosaic GPU needs jax 0.12, this is {jax.__version__}"
    return None


# Memory


def tiles(slots: int, rows: int, width: int, dtype: Any, swizzle: int | None = None) -> Any:
    """Slots in shared memory as wgmma and TMA want them."""
    size = jnp.dtype(dtype).itemsize
    swizzle = swizzle or next(s for s in (128, 64, 32) if width * size % s == 0)
    layout = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM((slots, rows, width), dtype, transforms=layout)


def at(ref: Any, *index: Any) -> Any:
    """`ref.at[index]`, where an axis of size 1 is shared."""
    return ref.at[tuple(0 if size == 1 else i for size, i in zip(ref.shape, index, strict=True))]


def turn_of(step: Any, slots: int) -> jax.Array:
    """Which of some slots a step uses; i32 also where Python's integers are taken for i64."""
    return lax.rem(step, i32(slots))


def fresh(slot: Any) -> jax.Array:
    """The slot, as a number that the compiler knows nothing of. wgmma takes a descriptor for every
    16 columns of a tile; those of a slot that stays are kept in registers from step to step, up to
    64 of them, and something else is spilled. So they cost an addition each time instead."""
    return lax.optimization_barrier(jnp.asarray(slot, i32)) if HAS_JAX_11 else slot


def spread(ref: Any, shape: tuple[int, ...], axis: int) -> jax.Array:
    """A vector of memory along one axis of a tile, repeated over the other."""
    vector = load(ref, WGMMA.reduce(1 - axis))
    return lax.broadcast_in_dim(vector, shape, [axis])


def load(ref: Any, layout: Any) -> jax.Array:
    """Registers in `layout`, straight from global memory where `ref` is there."""
    index = () if HAS_JAX_11 else ((),)
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def over(rows: jax.Array, like: jax.Array) -> jax.Array:
    """A value per row, repeated over the columns of a tile."""
    return lax.broadcast_in_dim(rows, like.shape, [0])


def filled(shape: tuple[int, ...], value: float) -> jax.Array:
    layout = WGMMA if len(shape) == 2 else WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, f32), layout)


# Products


def product(a: Any, b: Any, after: Callable[[], None] = lambda: None) -> jax.Array:
    """a @ b in float32; `after` runs once the tensor cores are busy with it."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        after()
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), f32))


def add_products(problem: Problem, *sums: tuple[jax.Array, Any, Any]) -> list[jax.Array]:
    """acc + a @ b for every (acc, a, b), in place on the device; `a` may be in registers."""
    if problem.interpret:  # which has no `run_state`, nor wgmma from registers
        results = [acc + jnp.dot(a[...], b[...], preferred_element_type=f32) for acc, a, b in sums]
        plgpu.commit_smem()  # the next copy into these slots comes after these plain reads
        return results

    def multiply(refs):
        for ref, (_, a, b) in zip(refs, sums, strict=True):
            plgpu.wgmma(ref, a, b)

    return pl.run_state(multiply)([plgpu.ACC.init(acc) for acc, _, _ in sums])


def products(
    problem: Problem,
    scored: tuple[Any, Any],
    summed: tuple[jax.Array, Any, Any],
    after: Callable[[], None],
    meanwhile: Callable[[jax.Array], Any],
) -> tuple[jax.Array, Any]:
    """acc + p @ v, and `meanwhile(q @ k)`, which is evaluated while the tensor cores do the former;
    `after` runs once they are busy with both."""
    (q, k), (acc, p, v) = scored, summed
    if problem.interpret:
        [acc] = add_products(problem, summed)
        return acc, meanwhile(product(q, k, after))

    def multiply(raw_ref, acc_ref):
        acc_ref[...] = acc
        plgpu.wgmma(raw_ref, q, k)
        plgpu.wgmma(acc_ref, p, v)
        after()
        found = meanwhile(plgpu.wgmma_accumulator_load(raw_ref, wait_n=1))
        return acc_ref[...], found

    raw = plgpu.ACC((q.shape[0], k.shape[1]), f32)
    return pl.run_scoped(multiply, raw, plgpu.ACC((acc.shape[0], acc.shape[1]), f32))


# Scores of a tile


def plain(problem: Problem, operands: Operands) -> bool:
    """Whether a score is its product times a positive number: exp2's argument is then one fma."""
    return (
        problem.softcap is None
        and operands.bias is None
        and operands.slopes is None
        and problem.scale > 0
    )


def unit(problem: Problem, operands: Operands) -> float:
    """What a score that `scores` returns is multiplied with to be in base 2."""
    return problem.scale * LOG2E if plain(problem, operands) else 1.0


class Place(NamedTuple):
    """Where a tile is, and the vectors of its rows and columns: None for one that nothing reads."""

    b: Any
    n: Any
    q0: Any  # the first query
    k0: Any  # the first key
    rows: tuple[jax.Array | None, ...] = ()  # i32[rows], in registers
    columns: tuple[Any, ...] = ()  # references to i32[columns], in shared memory where copied


def distance(place: Place, shape: tuple[int, ...]) -> jax.Array:
    """|q position - k position|."""
    assert place.rows[0] is not None
    rows = lax.broadcast_in_dim(place.rows[0], shape, [ROW])
    return jnp.abs((rows - spread(place.columns[0], shape, COLUMN)).astype(f32))


def scores(
    problem: Problem,
    operands: Operands,  # references to memory
    raw: jax.Array,  # [rows, columns], q . k
    place: Place,
    q_axis: int,  # which axis of the tile is queries
    partial: bool,
) -> tuple[jax.Array, jax.Array | None]:  # the scores over `unit`, and softcap's tanh
    shape = raw.shape
    s, tanh = raw, None
    if problem.softcap is not None:
        # tanh.approx has 11 bits; this form has the 22 of exp2 and rsqrt, which is one instruction
        grown = 1.0 + jnp.exp2(raw * (2 * LOG2E * problem.scale / problem.softcap))
        tanh = 1.0 - 2.0 * lax.rsqrt(grown * grown)
        if (
            problem.softcap > 256
        ):  # whose multiple of a rounding counts: the series where x is small
            x = raw * (problem.scale / problem.softcap)
            square = x * x
            series = x - x * square * (1 / 3 - square * (2 / 15))
            tanh = jnp.where(square < 0.01, series, tanh)
        s = tanh * (problem.softcap * LOG2E)
    elif not plain(problem, operands):
        s = raw * (problem.scale * LOG2E)
    if operands.bias is not None:
        bias = tile_of(operands.bias, place, shape, q_axis).astype(f32)
        # the lowest finite number, which some write for a mask, stays finite
        s = s + jnp.where(bias == -jnp.inf, -jnp.inf, jnp.maximum(bias * LOG2E, LOWEST))
    if operands.slopes is not None:
        slope = at(operands.slopes, place.b, place.n)[...] * LOG2E
        s = s - distance(place, shape) * slope
    if partial and problem.visible is not None:
        rows = [x if x is None else lax.broadcast_in_dim(x, shape, [ROW]) for x in place.rows]
        columns = [x if x is None else spread(x, shape, COLUMN) for x in place.columns]
        queries, keys = (rows, columns) if q_axis == ROW else (columns, rows)
        if operands.pairs is not None:
            keys.append(tile_of(operands.pairs, place, shape, q_axis).astype(i32))
        s = jnp.where(visible(problem, operands, queries, keys, shape), s, -jnp.inf)
    return s, tanh


def traced(problem: Problem, operands: Operands, shape: tuple[int, ...]) -> Any:  # ClosedJaxpr
    """`problem.visible` of vectors spread over a tile."""
    vector = jax.ShapeDtypeStruct(shape, i32)
    of_keys = len(operands.k_vectors) + (operands.pairs is not None)
    assert problem.visible is not None
    return jax.make_jaxpr(problem.visible)((vector,) * len(operands.q_vectors), (vector,) * of_keys)


def visible(
    problem: Problem, operands: Operands, q_vectors: list, k_vectors: list, shape: tuple[int, ...]
) -> jax.Array:
    """`problem.visible`, with its `~` written as a comparison of integers: Mosaic GPU's own goes by
    way of a cast to bool that it lacks."""

    def evaluate(jaxpr, consts, *values):
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        for step in jaxpr.eqns:
            read = [v.val if hasattr(v, "val") else known[v] for v in step.invars]
            inner = step.params.get("jaxpr")
            if step.primitive.name == "not" and read[0].dtype == jnp.bool_:
                results = [jnp.where(read[0], 0, 1) == 1]
            elif step.primitive.name in ("jit", "pjit"):
                results = evaluate(inner.jaxpr, inner.consts, *read)
            else:
                results = step.primitive.bind(*read, **step.params)
                results = results if step.primitive.multiple_results else [results]
            known.update(zip(step.outvars, results, strict=True))
        return [v.val if hasattr(v, "val") else known[v] for v in jaxpr.outvars]

    program = traced(problem, operands, shape)
    [seen] = evaluate(program.jaxpr, program.consts, *q_vectors, *k_vectors)
    return seen


class Vectors:
    """The vectors of a mask beside a tile: those of its rows are loaded once for all tiles of the
    row, those of its columns are copied into shared memory with the tile."""

    def __init__(self, problem: Problem, operands: Operands, q_axis: int, *, copies: bool = True):
        queries, keys = operands.q_vectors, operands.k_vectors
        self.rows, self.columns = (queries, keys) if q_axis == ROW else (keys, queries)
        needed = self._read(problem, operands)
        self._rows, self._columns = needed if q_axis == ROW else needed[::-1]
        self.copied = sorted(self._columns)[: COPIED * copies]
        self._every_tile = operands.slopes is not None

    @staticmethod
    def _read(problem: Problem, operands: Operands) -> tuple[set[int], set[int]]:
        """Which vectors of queries and of keys some tile reads."""
        positions = {0} if operands.slopes is not None else set()
        found = set(positions), set(positions)
        if problem.visible is not None:
            jaxpr = traced(problem, operands, (1, 1)).jaxpr
            used = {id(v) for step in jaxpr.eqns for v in step.invars}
            every = [(0, i) for i in range(len(operands.q_vectors))]
            every += [(1, i) for i in range(len(operands.k_vectors))]
            for (side, i), v in zip(every, jaxpr.invars, strict=False):  # behind them the pairs
                if id(v) in used:
                    found[side].add(i)
        return found

    def slots(self, count: int, width: int) -> dict[str, Any]:
        """Shared memory for `count` tiles in flight, if any."""
        rows = count * len(self.copied)
        return {"columns": plgpu.SMEM((rows, width), i32)} if rows else {}

    def copy(self, columns: Any, slot: Any, barrier: Any, b: Any, start: Any) -> None:
        """Start the copies for a tile; each, `len(copied)` of them, arrives at the barrier."""
        for i, index in enumerate(self.copied):
            source = at(self.columns[index], b, pl.ds(start, columns.shape[1]))
            plgpu.copy_gmem_to_smem(source, columns.at[slot * len(self.copied) + i], barrier)

    def of_rows(self, b: Any, start: Any) -> tuple[jax.Array | None, ...]:
        """Those of a warpgroup's rows, in registers."""
        layout = WGMMA.reduce(1)
        return tuple(
            load(at(vector, b, pl.ds(start, ROWS)), layout) if i in self._rows else None
            for i, vector in enumerate(self.rows)
        )

    def of_columns(self, columns: Any, slot: Any, b: Any, start: Any, width: int) -> tuple:
        """References to those of a tile's columns."""

        def one(index, vector):
            if index in self.copied:
                return columns.at[slot * len(self.copied) + self.copied.index(index)]
            return at(vector, b, pl.ds(start, width)) if index in self._columns else None

        return tuple(one(*each) for each in enumerate(self.columns))

    def late(self, partial: bool) -> bool:
        """Whether the scores of a tile read what was copied, and so its slot is released after."""
        return bool(self.copied) and (partial or self._every_tile)

    def release(self, barrier: Any, partial: bool) -> None:
        """Let the producer have a tile's slot, whose next copy comes after plain reads of it."""
        if self.late(partial):
            plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)


def roomy(H: int, Hv: int) -> bool:
    """Whether shared memory holds more than what `forward` and `gradient_queries` multiply."""
    return H + Hv <= 384


def turned(operands: Operands) -> Operands:
    """With arrays of pairs as kernels want them that hold queries as columns."""
    arrays = {name: getattr(operands, name) for name in ("pairs", "bias")}
    return operands._replace(
        **{name: x.swapaxes(2, 3) for name, x in arrays.items() if x is not None}
    )


def tile_of(array: Any, place: Place, shape: tuple[int, ...], q_axis: int) -> jax.Array:
    """A tile of an array of pairs [B or 1, N or 1, T or 1, S or 1]; with queries as columns, of
    [B or 1, N or 1, S or 1, T or 1]."""
    b, n, q0, k0 = place[:4]
    starts = (q0, k0) if q_axis == ROW else (k0, q0)
    has_rows, has_columns = (size > 1 for size in array.shape[2:])
    rows = pl.ds(starts[0], shape[0]) if has_rows else 0
    columns = pl.ds(starts[1], shape[1]) if has_columns else 0
    tile = at(array, b, n, rows, columns)
    if has_rows and has_columns:
        return load(tile, WGMMA)
    if has_rows or has_columns:
        return spread(tile, shape, ROW if has_rows else COLUMN)
    return jnp.full(shape, tile[...])


def kept(
    problem: Problem, operands: Operands, place: Place, shape: tuple[int, ...], q_axis: int
) -> jax.Array:
    """`contract.keep` of a tile, mixing each row and column once."""
    b, n, q0, k0 = place[:4]

    def indices(start, axis):
        layout = WGMMA.reduce(1 - axis)
        count = plgpu.broadcasted_iota(jnp.uint32, (shape[axis],), 0, layout=layout)
        return count + start.astype(jnp.uint32)

    def broadcast(vector, axis):
        return lax.broadcast_in_dim(vector, shape, [axis])

    assert operands.dropout is not None
    first = mix(operands.dropout[0, b, n] ^ indices(q0, q_axis))
    second = mix(operands.dropout[1, b, n] + first)
    columns = broadcast(mix(indices(k0, 1 - q_axis)), 1 - q_axis)
    bits = mix((columns ^ broadcast(first, q_axis)) + broadcast(second, q_axis))
    return bits >= jnp.uint32(threshold(problem.dropout_rate))


# Work


def schedule(weight: jax.Array) -> jax.Array:  # i32[...] -> i32[items]
    """Flat indices of items, roughly the heaviest first: items of one level stay in their order, so
    that programs which run together read few heads, which the cache holds."""
    weight = weight.reshape(-1)
    level = -(-weight * LEVELS // jnp.maximum(weight.max(), 1))
    return jnp.argsort(-level, stable=True).astype(i32)


def query_items(operands: Operands, lists: Lists) -> jax.Array:
    """Flat indices of [B, N, query tiles]."""
    B, _, N, _ = operands.query.shape
    return schedule(jnp.broadcast_to(lists.seen, (B, N, lists.seen.shape[-1])))


def key_items(operands: Operands, lists: Lists) -> jax.Array:
    """Flat indices of [B, K, key tiles]."""
    (B, _, N, _), (_, _, K, _) = operands.query.shape, operands.key.shape
    weight = jnp.broadcast_to(lists.seen, (B, N, lists.seen.shape[-1]))
    return schedule(weight.reshape(B, K, N // K, -1).sum(axis=2))


def each_item(items: Any, body: Callable, carry: Any, programs: int | None = None) -> Any:
    """`carry = body(item, carry)` for the items of this program: every `PROGRAMS`th of the list,
    back and forth, so that the heavy ones are shared out evenly."""
    total = items.shape[0]
    programs = min(total, programs or PROGRAMS)
    program = lax.axis_index("program")

    def position(turn):
        return turn * programs + jnp.where(turn % 2 == 0, program, programs - 1 - program)

    full = total // programs
    mine = full + (position(jnp.int32(full)) < total).astype(i32)
    return lax.fori_loop(0, mine, lambda turn, carry: body(items[position(turn)], carry), carry)


def each_tile(full: Any, seen: Any, body: Callable, carry: Any) -> Any:
    """`carry = body(j, carry, partial)` for the tiles of a list: full ones, then partial ones. Both
    loops count from 0: what is read of memory varies over a mesh, what is computed of it does not,
    and a loop's counter must stay of one type."""
    carry = lax.fori_loop(0, full, functools.partial(body, partial=False), carry)
    partial = functools.partial(body, partial=True)
    return lax.fori_loop(0, seen - full, lambda j, carry: partial(full + j, carry), carry)


def registers(consumers: int) -> tuple[int, int] | None:
    """Registers a thread of a consumer and of the producer may hold; None leaves them equal."""
    return {1: None, 2: (240, 24), 3: (160, 32)}[consumers]


def launch(problem: Problem, body: Callable, consumers: int, items: int, **options: Any) -> Any:
    interpret = {"interpret": problem.interpret} if problem.interpret else {}
    kernel = plgpu.kernel(
        body,
        grid=(min(items, PROGRAMS),),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **interpret,
        **options,
    )

    def call(*arguments):  # Mosaic GPU forgets that results vary over a mesh as arguments do
        return vary(kernel(*arguments), like=arguments)

    return call


def specialise(consumers: int, produce: Callable[[], None], consume: Callable[[Any], None]) -> None:
    """One warpgroup produces, the others consume."""
    warpgroup = lax.axis_index("warpgroup")
    limits = registers(consumers)

    @pl.when(warpgroup < consumers)
    def _():
        if limits:
            plgpu.set_max_registers(limits[0], action="increase")
        consume(warpgroup)

    @pl.when(warpgroup == consumers)
    def _():
        if limits:
            plgpu.set_max_registers(limits[1], action="decrease")
        produce()


# Forward


def forward(
    problem: Problem, operands: Operands, lists: Lists, blocks: Blocks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output [B, T, N, Hv], and f32[B, N, T] each of m, the rows' maximum but for some slack, and
    log l."""
    if blocks.stages < 2:
        raise ValueError(f"stages is {blocks.stages}: the forward kernel needs at least 2")
    if not 0 <= blocks.slack <= 15:
        raise ValueError(f"slack is {blocks.slack}: must be from 0 to 15, as float16 ends at 2^16")
    (B, T, N, H), Hv = operands.query.shape, operands.value.shape[-1]
    dtype = operands.query.dtype
    consumers, stages = blocks.q // ROWS, blocks.stages
    items = query_items(operands, lists)
    vectors = Vectors(problem, operands, ROW, copies=roomy(H, Hv) or shares(H, Hv))
    in_place = {} if shares(H, Hv) else {"out_tile": tiles(consumers, ROWS, Hv, dtype)}
    return launch(
        problem,
        functools.partial(_forward, problem, blocks),
        consumers,
        items.size,
        out_type=(
            result((B, T, N, Hv), dtype, operands.query),
            result((B, N, T), f32, operands.query),
            result((B, N, T), f32, operands.query),
        ),
        scratch_types=dict(
            q_tile=tiles(consumers, ROWS, H, dtype),
            k_tile=tiles(stages, blocks.k, H, dtype),
            v_tile=tiles(stages, blocks.k, Hv, dtype),
            q_full=plgpu.Barrier(num_barriers=consumers),
            q_empty=plgpu.Barrier(num_barriers=consumers),
            k_full=plgpu.Barrier(num_arrivals=1 + len(vectors.copied), num_barriers=stages),
            k_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            v_full=plgpu.Barrier(num_barriers=stages),
            v_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            turn=plgpu.Barrier(num_barriers=2),
            **vectors.slots(stages, blocks.k),
            **in_place,
        ),
    )(items, lists, operands)


def any_of_warp(rows: jax.Array) -> jax.Array:  # bool[rows] -> bool[]
    """Whether one of a warp's own rows is true. Warps may differ, so what depends on it may hold no
    barrier and no wgmma."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA.reduce(1),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_, rows):
        own = vector.extract(functools.reduce(arith.ori, rows.registers.flat), [], [0])
        every_lane = mgpu.c(-1, ir.IntegerType.get_signless(32))
        found = nvvm.vote_sync(every_lane, own, "any")
        return mgpu.FragmentedArray.splat(found, (), is_signed=False)

    return vote(rows)


def rescaled(acc: jax.Array, shrink: jax.Array, risen: jax.Array | None) -> jax.Array:
    """acc times the factor of its row, which is 1 everywhere in a warp that has not `risen`."""
    if risen is None:
        return acc * over(shrink, acc)
    return lax.cond(risen, lambda: acc * over(shrink, acc), lambda: acc)


def shares(H: int, Hv: int) -> bool:
    """Whether the output leaves through the query's slot, where memory is short."""
    return H == Hv > 128


def _forward(
    problem, blocks, items, lists, operands, out, high_out, log_out, *,
    q_tile, k_tile, v_tile,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, columns=None, out_tile=None,
):  # fmt: skip
    (_, T, N, H), (_, _, K, Hv) = operands.query.shape, operands.value.shape
    consumers, stages = blocks.q // ROWS, blocks.stages
    rows = T // blocks.q
    vectors = Vectors(problem, operands, ROW, copies=roomy(H, Hv) or shares(H, Hv))
    # beyond 2^27, high + 8 may be rounded to high + 16, and 2^16 is infinite in float16
    slack = blocks.slack * (1 - 2**-20)
    branches = slack > 0 and HAS_JAX_11 and not problem.interpret

    def place(item):
        return item // (N * rows), item // rows % N, item % rows

    def produce():
        def tile_item(item, carry):
            b, n, row = place(item)
            done, step = carry
            for w in range(consumers):
                pl.when(done > 0)(functools.partial(plgpu.barrier_wait, q_empty.at[w]))
                source = operands.query.at[b, pl.ds(row * blocks.q + w * ROWS, ROWS), n]
                plgpu.copy_gmem_to_smem(source, q_tile.at[w], q_full.at[w])

            def load(j, step):
                keys = pl.ds(at(lists.order, b, n, row, j)[...] * blocks.k, blocks.k)
                slot = turn_of(step, stages)
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
                k = operands.key.at[b, keys, n // (N // K)]
                plgpu.copy_gmem_to_smem(k, k_tile.at[slot], k_full.at[slot])
                vectors.copy(columns, slot, k_full.at[slot], b, keys.start)
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(v_empty.at[slot]))
                v = operands.value.at[b, keys, n // (N // K)]
                plgpu.copy_gmem_to_smem(v, v_tile.at[slot], v_full.at[slot])
                return step + 1

            return done + 1, lax.fori_loop(0, at(lists.seen, b, n, row)[...], load, step)

        each_item(items, tile_item, (jnp.int32(0), jnp.int32(0)))

    def consume(w):
        def attend(item, step):
            b, n, row = place(item)
            q0 = row * blocks.q + w * ROWS
            full, seen = at(lists.full, b, n, row)[...], at(lists.seen, b, n, row)[...]
            query_vectors = vectors.of_rows(b, q0)

            def tile(j, carry, partial, first=False):
                """The products of this tile's keys and of the last one's values; beside the latter,
                this tile's softmax."""
                acc, high, total, p, step = carry
                slot, last = turn_of(step, stages), turn_of(step + stages - 1, stages)
                late = vectors.late(partial)
                k0 = at(lists.order, b, n, row, j)[...] * blocks.k
                beside = vectors.of_columns(columns, slot, b, k0, blocks.k)
                where = Place(b, n, q0, k0, query_vectors, beside)

                def turn_over():
                    if consumers == 2:
                        plgpu.barrier_arrive(turn.at[1 - w])

                def softmax(raw):
                    if not late:
                        plgpu.barrier_arrive(k_empty.at[slot])
                    # a product that is not finite marks its row: 0 * it is NaN
                    marked = total + (raw * 0).sum(axis=1) if problem.mark else total
                    s, _ = scores(problem, operands, raw, where, ROW, partial)
                    one = unit(problem, operands)
                    top = s.max(axis=1) * one
                    if slack:  # LOWEST + slack is LOWEST: any score is above it
                        grown = jnp.where(top > high + slack, top, high)
                    else:
                        grown = jnp.maximum(high, top)
                    risen = any_of_warp(grown > high) if branches else None
                    shrink = jnp.exp2(high - grown)
                    p = jnp.exp2(s * one - over(grown, s))
                    if late:
                        vectors.release(k_empty.at[slot], partial)
                    summed = marked * shrink + p.sum(axis=1)
                    if problem.dropout_rate:
                        p = jnp.where(kept(problem, operands, where, p.shape, ROW), p, 0)
                    found = lax.optimization_barrier((p, grown, summed, shrink))
                    plgpu.barrier_wait(v_full.at[slot])  # for the next; and nothing sinks below
                    return *found, risen

                plgpu.barrier_wait(k_full.at[slot])
                if consumers == 2:
                    plgpu.barrier_wait(turn.at[w])
                q, k = q_tile.at[fresh(w)], k_tile.at[slot].transpose((1, 0))
                if first:
                    p, high, total, _, _ = softmax(product(q, k, turn_over))
                else:
                    acc, (p, high, total, shrink, risen) = products(
                        problem, (q, k), (acc, p, v_tile.at[last]), turn_over, softmax
                    )
                    plgpu.barrier_arrive(v_empty.at[last])
                    acc = rescaled(acc, shrink, risen)
                # not before: the tensor cores read the last tile's until they are done
                return acc, high, total, p.astype(v_tile.dtype), step + 1

            def every_tile(carry):
                carry = tile(jnp.int32(0), carry, True, first=True)
                ahead = jnp.maximum(full, 1)
                visit = functools.partial(lax.fori_loop, 0)
                carry = visit(ahead - 1, lambda j, c: tile(j + 1, c, False), carry)
                carry = visit(seen - ahead, lambda j, c: tile(j + ahead, c, True), carry)
                acc, high, total, p, step = carry
                slot = turn_of(step + stages - 1, stages)
                [acc] = add_products(problem, (acc, p, v_tile.at[slot]))
                plgpu.barrier_arrive(v_empty.at[slot])
                return acc, high, total, p, step

            plgpu.barrier_wait(q_full.at[w])
            nothing = plgpu.layout_cast(jnp.zeros((ROWS, blocks.k), v_tile.dtype), WGMMA)
            carry = filled((ROWS, Hv), 0), filled((ROWS,), LOWEST), filled((ROWS,), 0), nothing
            carry = lax.cond(seen > 0, every_tile, lambda carry: carry, (*carry, step))
            acc, high, total, _, step = carry
            if out_tile is not None:
                plgpu.barrier_arrive(q_empty.at[w])

            live = total != 0
            shrink = filled((ROWS,), 1)
            if operands.sinks is not None:
                sink = at(operands.sinks, b, n)[...] * LOG2E
                grown = jnp.maximum(high, sink)
                shrink = jnp.exp2(high - grown)
                total, high = total * shrink + jnp.exp2(sink - grown), grown
            factor = jnp.where(live, shrink / total, 0) * (1 / (1 - problem.dropout_rate))
            acc = (acc * over(factor, acc)).astype(out.dtype)
            staged = q_tile if out_tile is None else out_tile
            staged[w] = acc
            rows_out = b, n, pl.ds(q0, ROWS)
            high_out[rows_out] = jnp.where(live, high * LN2, -jnp.inf)
            log = jnp.where(live, jnp.log2(total) * LN2, 0)
            if problem.mark:
                log = log + (acc.astype(f32) * 0).sum(axis=1)
            log_out[rows_out] = log
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.at[w], out.at[b, pl.ds(q0, ROWS), n])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if out_tile is None:
                plgpu.barrier_arrive(q_empty.at[w])
            return step

        if consumers == 2:  # the turns of the first begin and end with an arrival of the second
            pl.when(w == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        each_item(items, attend, jnp.int32(0))
        if consumers == 2:
            pl.when(w == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    specialise(consumers, produce, consume)


# Backward


def base(saved: Saved) -> jax.Array:  # f32[B, N, T]
    """What p = 2^(s - base) subtracts."""
    return (saved.high + saved.log) * LOG2E


def weights(
    problem: Problem,
    operands: Operands,  # references to memory
    raw: jax.Array,  # [rows, columns], q . k
    base: jax.Array,  # [rows, columns]
    place: Place,
    q_axis: int,
    partial: bool,
) -> tuple[jax.Array, Callable]:  # p f, and (do . v, D) -> ds, du
    # One number per pair lives until `differentiate`: what dropout leaves out is negative, and what
    # is not visible 0, as exp2(-inf) is.
    s, tanh = scores(problem, operands, raw, place, q_axis, partial)
    if operands.bias is not None:  # of a row that is lost to a bias that is not finite
        s = jnp.where(base == jnp.inf, -jnp.inf, s)
    weight = dropped = jnp.exp2(s * unit(problem, operands) - base)
    grow = 1 / (1 - problem.dropout_rate)
    if problem.dropout_rate:
        keep = kept(problem, operands, place, weight.shape, q_axis)
        weight = jnp.where(keep, weight, -weight)
        dropped = jnp.maximum(weight, 0) * grow
    capped = weight if tanh is None else weight * (1 - tanh * tanh)

    def differentiate(dp, D):
        def times(weight):
            d = jnp.where(weight < 0, 0, dp * grow) if problem.dropout_rate else dp
            ds = (jnp.abs(weight) if problem.dropout_rate else weight) * (d - D)
            return jnp.where(weight == 0, 0, ds) if partial else ds  # dp may have overflowed

        return times(weight), times(capped)

    return dropped, differentiate


def gradient_queries(
    problem: Problem, operands: Operands, lists: Lists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, jax.Array | None]:
    """dq [B, T, N, H], and with learned slopes f32[B, N, T] of -sum_j ds_ij |q_i - k_j|."""
    (B, T, N, H), Hv = operands.query.shape, operands.value.shape[-1]
    dtype = operands.query.dtype
    consumers, stages = blocks.q // ROWS, blocks.stages
    items = query_items(operands, lists)
    rows = result((B, N, T), f32, operands.query)
    has_slopes = learns_slopes(problem, operands)
    slots = value_slots(blocks, H, Hv)
    vectors = Vectors(problem, operands, ROW, copies=roomy(H, Hv))
    in_place = {} if H + Hv > 256 else {"dq_tile": tiles(consumers, ROWS, H, dtype)}
    results = launch(
        problem,
        functools.partial(_gradient_queries, problem, blocks),
        consumers,
        items.size,
        out_type=(result((B, T, N, H), dtype, operands.query),) + (rows,) * has_slopes,
        scratch_types=dict(
            q_tile=tiles(consumers, ROWS, H, dtype),
            do_tile=tiles(consumers, ROWS, Hv, dtype),
            k_tile=tiles(stages, blocks.k, H, dtype),
            v_tile=tiles(slots, blocks.k, Hv, dtype),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=consumers),
            q_empty=plgpu.Barrier(num_barriers=consumers),
            k_full=plgpu.Barrier(num_arrivals=1 + len(vectors.copied), num_barriers=stages),
            k_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            v_full=plgpu.Barrier(num_barriers=slots),
            v_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
            **vectors.slots(stages, blocks.k),
            **in_place,
        ),
    )(items, lists, operands, saved.do, base(saved), saved.D)
    return results if has_slopes else (results[0], None)


def value_slots(blocks: Blocks, H: int, Hv: int) -> int:
    """Slots for the values of `gradient_queries`, which leave sooner than the keys."""
    return blocks.stages if roomy(H, Hv) else 1


def _gradient_queries(
    problem, blocks, items, lists, operands, do, base, D, dq, slope_out=None, *,
    q_tile, do_tile, k_tile, v_tile,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, columns=None, dq_tile=None,
):  # fmt: skip
    (_, T, N, H), (_, _, K, Hv) = operands.query.shape, operands.value.shape
    consumers, stages = blocks.q // ROWS, blocks.stages
    slots = v_tile.shape[0]
    rows = T // blocks.q
    vectors = Vectors(problem, operands, ROW, copies=roomy(H, Hv))

    def place(item):
        return item // (N * rows), item // rows % N, item % rows

    def produce():
        def tile_item(item, carry):
            b, n, row = place(item)
            done, step = carry
            for w in range(consumers):
                pl.when(done > 0)(functools.partial(plgpu.barrier_wait, q_empty.at[w]))
                queries = b, pl.ds(row * blocks.q + w * ROWS, ROWS), n
                plgpu.copy_gmem_to_smem(operands.query.at[queries], q_tile.at[w], q_full.at[w])
                plgpu.copy_gmem_to_smem(do.at[queries], do_tile.at[w], q_full.at[w])

            def load(j, step):
                keys = pl.ds(at(lists.order, b, n, row, j)[...] * blocks.k, blocks.k)
                slot = turn_of(step, stages)
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
                k = operands.key.at[b, keys, n // (N // K)]
                plgpu.copy_gmem_to_smem(k, k_tile.at[slot], k_full.at[slot])
                vectors.copy(columns, slot, k_full.at[slot], b, keys.start)
                slot = turn_of(step, slots)
                pl.when(step >= slots)(lambda: plgpu.barrier_wait(v_empty.at[slot]))
                v = operands.value.at[b, keys, n // (N // K)]
                plgpu.copy_gmem_to_smem(v, v_tile.at[slot], v_full.at[slot])
                return step + 1

            return done + 1, lax.fori_loop(0, at(lists.seen, b, n, row)[...], load, step)

        each_item(items, tile_item, (jnp.int32(0), jnp.int32(0)))

    def consume(w):
        def walk(item, step):
            b, n, row = place(item)
            q0 = row * blocks.q + w * ROWS
            queries = b, n, pl.ds(q0, ROWS)
            full, seen = at(lists.full, b, n, row)[...], at(lists.seen, b, n, row)[...]
            base_rows = load(base.at[queries], WGMMA.reduce(1))
            D_rows = load(D.at[queries], WGMMA.reduce(1))
            query_vectors = vectors.of_rows(b, q0)

            def tile(j, carry, partial):
                acc, slope, step = carry
                k_slot, v_slot = turn_of(step, stages), turn_of(step, slots)
                k = k_tile.at[k_slot]
                k0 = at(lists.order, b, n, row, j)[...] * blocks.k
                beside = vectors.of_columns(columns, k_slot, b, k0, blocks.k)
                where = Place(b, n, q0, k0, query_vectors, beside)
                plgpu.barrier_wait(k_full.at[k_slot])
                raw = product(q_tile.at[fresh(w)], k.transpose((1, 0)))
                _, differentiate = weights(
                    problem, operands, raw, over(base_rows, raw), where, ROW, partial
                )
                plgpu.barrier_wait(v_full.at[v_slot])
                v = v_tile.at[fresh(v_slot)]
                dp = product(do_tile.at[fresh(w)], v.transpose((1, 0)))
                ds, du = differentiate(dp, over(D_rows, dp))
                plgpu.barrier_arrive(v_empty.at[v_slot])
                if slope_out is not None:
                    slope -= (ds * distance(where, ds.shape)).sum(axis=1)
                [acc] = add_products(problem, (acc, du.astype(k_tile.dtype), k))
                vectors.release(k_empty.at[k_slot], partial)
                return acc, slope, step + 1

            plgpu.barrier_wait(q_full.at[w])
            carry = filled((ROWS, H), 0), filled((ROWS,), 0), step
            acc, slope, step = each_tile(full, seen, tile, carry)
            if dq_tile is not None:
                plgpu.barrier_arrive(q_empty.at[w])
            staged = q_tile if dq_tile is None else dq_tile
            staged[w] = (acc * problem.scale).astype(staged.dtype)
            if slope_out is not None:
                slope_out[queries] = slope
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.at[w], dq.at[b, pl.ds(q0, ROWS), n])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if dq_tile is None:
                plgpu.barrier_arrive(q_empty.at[w])
            return step

        each_item(items, walk, jnp.int32(0))

    specialise(consumers, produce, consume)


def gradient_keys(
    problem: Problem, operands: Operands, lists: Lists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, jax.Array]:
    """dk [B, S, K, H] and dv [B, S, K, Hv]; the rows of `lists` are key tiles here."""
    H, (B, S, K, Hv) = operands.query.shape[-1], operands.value.shape
    dtype, stages = operands.key.dtype, blocks.stages
    parts = blocks.k // ROWS
    consumers = max(2, parts)
    items = key_items(operands, lists)
    vectors = Vectors(problem, operands, COLUMN)
    operands = turned(operands)
    return launch(
        problem,
        functools.partial(_gradient_keys, problem, blocks),
        consumers,
        items.size,
        out_type=(
            result((B, S, K, H), dtype, operands.query),
            result((B, S, K, Hv), dtype, operands.query),
        ),
        scratch_types=dict(
            k_tile=tiles(parts, ROWS, H, dtype),
            v_tile=tiles(parts, ROWS, Hv, dtype),
            q_tile=tiles(stages, blocks.q, H, dtype),
            do_tile=tiles(stages, blocks.q, Hv, dtype),
            base_columns=plgpu.SMEM((stages, blocks.q), f32),
            D_columns=plgpu.SMEM((stages, blocks.q), f32),
            k_full=plgpu.Barrier(num_arrivals=2, num_barriers=parts),
            k_empty=plgpu.Barrier(num_arrivals=consumers // parts, num_barriers=parts),
            q_full=plgpu.Barrier(num_arrivals=4 + len(vectors.copied), num_barriers=stages),
            q_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            both=plgpu.Barrier(num_arrivals=consumers),
            **vectors.slots(stages, blocks.q),
        ),
    )(items, lists, operands, saved.do, base(saved), saved.D)


def copy_queries(
    lists: Lists, vectors: Vectors, item: tuple, G: int,
    sources: tuple, slots: tuple, columns: Any, full: Any, empty: Any, step: Any,
) -> Any:  # fmt: skip
    """Copy what a tile of keys is multiplied with, for every query head of its key head and every
    tile of its list: of the query, do, base and D a tile each into the next slot."""
    b, head, row = item
    stages, width = slots[0].shape[:2]

    def of_head(g, step):
        n = head * G + g

        def tile(j, step):
            queries = pl.ds(at(lists.order, b, n, row, j)[...] * width, width)
            slot = turn_of(step, stages)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            for i, (source, target) in enumerate(zip(sources, slots, strict=True)):
                place = (b, queries, n) if i < 2 else (b, n, queries)
                plgpu.copy_gmem_to_smem(source.at[place], target.at[slot], full.at[slot])
            vectors.copy(columns, slot, full.at[slot], b, queries.start)
            return step + 1

        return lax.fori_loop(0, at(lists.seen, b, n, row)[...], tile, step)

    return lax.fori_loop(0, G, of_head, step)


def _gradient_keys(
    problem, blocks, items, lists, operands, do, base, D, dk_out, dv_out, *,
    k_tile, v_tile, q_tile, do_tile, base_columns, D_columns,
    k_full, k_empty, q_full, q_empty, both, columns=None,
):  # fmt: skip
    """Two warpgroups hold 64 keys each, or, where their dk and dv are too many registers for one,
    the same 64: the first sums dv, the second dk."""
    (_, _, N, H), (_, S, K, Hv) = operands.query.shape, operands.value.shape
    stages, parts, G = blocks.stages, blocks.k // ROWS, N // K
    bare = plain(problem, operands) and not problem.dropout_rate
    consumers = max(2, parts)
    rows = S // blocks.k
    vectors = Vectors(problem, operands, COLUMN)

    def place(item):
        return item // (K * rows), item // rows % K, item % rows

    def produce():
        def tile_item(item, carry):
            b, head, row = place(item)
            done, step = carry
            for w in range(parts):
                pl.when(done > 0)(functools.partial(plgpu.barrier_wait, k_empty.at[w]))
                keys = b, pl.ds(row * blocks.k + w * ROWS, ROWS), head
                plgpu.copy_gmem_to_smem(operands.key.at[keys], k_tile.at[w], k_full.at[w])
                plgpu.copy_gmem_to_smem(operands.value.at[keys], v_tile.at[w], k_full.at[w])

            sources = operands.query, do, base, D
            slots = q_tile, do_tile, base_columns, D_columns
            step = copy_queries(
                lists, vectors, (b, head, row), G, sources, slots, columns, q_full, q_empty, step
            )
            return done + 1, step

        each_item(items, tile_item, (jnp.int32(0), jnp.int32(0)))

    def consume(w, wanted=("dk", "dv")):
        part = w if parts == consumers else 0

        def walk(item, step):
            b, head, row = place(item)
            k0 = row * blocks.k + part * ROWS
            key_vectors = vectors.of_rows(b, k0)

            def tile(j, carry, partial, n):
                sums, step = dict(carry[0]), carry[1]
                slot = turn_of(step, stages)
                q, do = q_tile.at[slot], do_tile.at[slot]
                q0 = at(lists.order, b, n, row, j)[...] * blocks.q
                beside = vectors.of_columns(columns, slot, b, q0, blocks.q)
                where = Place(b, n, q0, k0, key_vectors, beside)
                shape = (ROWS, blocks.q)
                plgpu.barrier_wait(q_full.at[slot])

                raw = product(k_tile.at[fresh(part)], q.transpose((1, 0)))
                bases = spread(base_columns.at[slot], shape, COLUMN)
                p, differentiate = weights(problem, operands, raw, bases, where, COLUMN, partial)
                p = p.astype(q_tile.dtype)
                v, do_columns = v_tile.at[fresh(part)], do.transpose((1, 0))
                if len(wanted) == 2 and bare and not partial:
                    dv = (sums["dv"], p, do), (filled(shape, 0), v, do_columns)
                    sums["dv"], dp = add_products(problem, *dv)
                else:  # fewer registers at a time, for what a mask or an option needs
                    if "dv" in wanted:
                        [sums["dv"]] = add_products(problem, (sums["dv"], p, do))
                    if "dk" in wanted:
                        dp = product(v, do_columns)
                if "dk" in wanted:
                    _, du = differentiate(dp, spread(D_columns.at[slot], shape, COLUMN))
                    [sums["dk"]] = add_products(problem, (sums["dk"], du.astype(q_tile.dtype), q))
                plgpu.commit_smem()  # the next copies come after plain reads of the slot
                plgpu.barrier_arrive(q_empty.at[slot])
                return sums, step + 1

            def one_head(g, carry):
                n = head * G + g
                full, seen = at(lists.full, b, n, row)[...], at(lists.seen, b, n, row)[...]
                return each_tile(full, seen, functools.partial(tile, n=n), carry)

            plgpu.barrier_wait(k_full.at[part])
            widths = {"dk": H, "dv": Hv}
            sums = {name: filled((ROWS, widths[name]), 0) for name in wanted}
            sums, step = lax.fori_loop(0, G, one_head, (sums, step))
            if parts != consumers:  # the other warpgroup reads the slots that are written next
                plgpu.barrier_arrive(both)
                plgpu.barrier_wait(both)
            keys = b, pl.ds(k0, ROWS), head
            outs = {"dk": (k_tile, dk_out, problem.scale), "dv": (v_tile, dv_out, 1.0)}
            for name in wanted:
                staged, _, scale = outs[name]
                staged[part] = (sums[name] * scale).astype(staged.dtype)
            plgpu.commit_smem()
            for name in wanted:
                staged, out, _ = outs[name]
                plgpu.copy_smem_to_gmem(staged.at[part], out.at[keys])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(k_empty.at[part])
            return step

        each_item(items, walk, jnp.int32(0))

    def consume_half(w):
        pl.when(w == 0)(lambda: consume(w, ("dv",)))
        pl.when(w == 1)(lambda: consume(w, ("dk",)))

    specialise(consumers, produce, consume if parts == consumers else consume_half)


def gradient_unordered(
    problem: Problem, operands: Operands, lists: Lists, blocks: Blocks, saved: Saved
) -> tuple[jax.Array, ...]:
    """`gradient_queries` and `gradient_keys` in one: see hopper_fused.py."""
    from transformer_jax.kernels import hopper_fused  # which imports this file

    return hopper_fused.gradients(problem, operands, lists, blocks, saved)


def gradient_bias(
    problem: Problem, operands: Operands, lists: Lists, blocks: Blocks, saved: Saved
) -> jax.Array:
    """ds summed over the axes that the bias lacks; f32 in the bias's shape."""
    (_, T, _, H), (_, S, _, Hv) = operands.query.shape, operands.value.shape
    assert operands.bias is not None
    dtype, shape = operands.query.dtype, operands.bias.shape
    consumers, stages = blocks.q // ROWS, blocks.stages
    visits = visited(lists)
    vectors = Vectors(problem, operands, ROW)
    # An item is one tile of the sum. Along T or S a bias without that axis is summed in registers
    # and then once more here, over the rows or columns of one tile; one without both keeps T.
    T_out = T if shape[2] > 1 or shape[3] == 1 else blocks.q
    S_out = S if shape[3] > 1 else blocks.k
    outer = (*shape[:2], T_out // blocks.q, S_out // blocks.k)
    total = launch(
        problem,
        functools.partial(_gradient_bias, problem, blocks, outer),
        consumers,
        math.prod(outer),
        out_type=result((*shape[:2], T_out, S_out), f32, operands.query),
        scratch_types=dict(
            q_tile=tiles(stages * consumers, ROWS, H, dtype),
            do_tile=tiles(stages * consumers, ROWS, Hv, dtype),
            k_tile=tiles(stages, blocks.k, H, dtype),
            v_tile=tiles(stages, blocks.k, Hv, dtype),
            out_tile=tiles(consumers, ROWS, blocks.k, f32),
            filled_slot=plgpu.Barrier(
                num_arrivals=2 + 2 * consumers + len(vectors.copied), num_barriers=stages
            ),
            empty_slot=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            **vectors.slots(stages, blocks.k),
        ),
    )(jnp.arange(math.prod(outer), dtype=i32), visits, operands, saved.do, base(saved), saved.D)
    lacking = tuple(axis for axis in (2, 3) if shape[axis] == 1)
    return total.sum(axis=lacking, keepdims=True)


def visited(lists: Lists) -> jax.Array:  # i32[B or 1, N or 1, query tiles, key tiles]
    """1 for the tiles that the lists name, else 0."""
    *where, turn = jnp.indices(lists.order.shape, sparse=True)
    named = (turn < lists.seen[..., None]).astype(i32)
    return jnp.zeros(lists.order.shape, i32).at[*where, lists.order].max(named)


def _gradient_bias(
    problem, blocks, outer, items, visits, operands, do, base, D, out, *,
    q_tile, do_tile, k_tile, v_tile, out_tile, filled_slot, empty_slot, columns=None,
):  # fmt: skip
    """Masks every tile it visits: that of a full one is true, and this kernel is short."""
    (B, T, N, _), (_, S, K, _) = operands.query.shape, operands.value.shape
    consumers, stages = blocks.q // ROWS, blocks.stages
    vectors = Vectors(problem, operands, ROW)
    inner = tuple(
        size // o for size, o in zip((B, N, T // blocks.q, S // blocks.k), outer, strict=True)
    )

    def digits(index, sizes):
        """The index of an array of these sizes at a flat index."""
        for axis in range(len(sizes)):
            yield index // math.prod(sizes[axis + 1 :]) % sizes[axis]

    def each_tile(item, body, carry):
        """`body(b, n, row, column, carry)` for the visited tiles that are summed in an item."""

        def visit(index, carry):
            parts = zip(digits(item, outer), digits(index, inner), strict=True)
            tile = tuple(o + i for o, i in parts)  # one of the two is 0 on every axis
            return lax.cond(
                at(visits, *tile)[...] > 0, lambda c: body(*tile, c), lambda c: c, carry
            )

        return lax.fori_loop(0, math.prod(inner), visit, carry)

    def produce():
        def copy(b, n, row, column, step):
            slot = turn_of(step, stages)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty_slot.at[slot]))
            keys = b, pl.ds(column * blocks.k, blocks.k), n // (N // K)
            plgpu.copy_gmem_to_smem(operands.key.at[keys], k_tile.at[slot], filled_slot.at[slot])
            plgpu.copy_gmem_to_smem(operands.value.at[keys], v_tile.at[slot], filled_slot.at[slot])
            vectors.copy(columns, slot, filled_slot.at[slot], b, keys[1].start)
            for w in range(consumers):
                queries = b, pl.ds(row * blocks.q + w * ROWS, ROWS), n
                place = slot * consumers + w
                for source, target in ((operands.query, q_tile), (do, do_tile)):
                    plgpu.copy_gmem_to_smem(
                        source.at[queries], target.at[place], filled_slot.at[slot]
                    )
            return step + 1

        each_item(items, lambda item, step: each_tile(item, copy, step), jnp.int32(0))

    def consume(w):
        def add(b, n, row, column, carry):
            total, step = carry
            slot = turn_of(step, stages)
            place = slot * consumers + w
            q0 = row * blocks.q + w * ROWS
            k0 = column * blocks.k
            beside = vectors.of_columns(columns, slot, b, k0, blocks.k)
            where = Place(b, n, q0, k0, vectors.of_rows(b, q0), beside)
            rows = b, n, pl.ds(q0, ROWS)
            layout = WGMMA.reduce(1)
            base_rows, D_rows = load(base.at[rows], layout), load(D.at[rows], layout)
            plgpu.barrier_wait(filled_slot.at[slot])
            raw = product(q_tile.at[fresh(place)], k_tile.at[fresh(slot)].transpose((1, 0)))
            _, differentiate = weights(
                problem, operands, raw, over(base_rows, raw), where, ROW, True
            )
            dp = product(do_tile.at[fresh(place)], v_tile.at[fresh(slot)].transpose((1, 0)))
            vectors.release(empty_slot.at[slot], True)
            return total + differentiate(dp, over(D_rows, dp))[0], step + 1

        def sum_item(item, step):
            total, step = each_tile(item, add, (filled((ROWS, blocks.k), 0), step))
            b, n, row, column = digits(item, outer)
            out_tile[w] = total
            plgpu.commit_smem()
            rows = pl.ds(row * blocks.q + w * ROWS, ROWS)
            target = out.at[b, n, rows, pl.ds(column * blocks.k, blocks.k)]
            plgpu.copy_smem_to_gmem(out_tile.at[w], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return step

        each_item(items, sum_item, jnp.int32(0))

    specialise(consumers, produce, consume)
