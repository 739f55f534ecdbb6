"""Hand a call of attention to the fused kernels: padded arrays, vectors, lists of tiles."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.attention.arguments import AttentionCall, Implementation, as_array, bias_shape
from transformer_jax.attention.biases import ALiBi, Bias
from transformer_jax.attention.block_plan import pad
from transformer_jax.attention.blockwise.core import scaled
from transformer_jax.attention.mask import refuse_mask
from transformer_jax.attention.mask_vectors import NO_EMPTY_SLOT, MaskVectors
from transformer_jax.attention.masks import Everything
from transformer_jax.kernels import Target, platform, target
from transformer_jax.kernels.caches import clip_pages
from transformer_jax.kernels.chips import blocks as blocks_of
from transformer_jax.kernels.chips import kinds, processors_of
from transformer_jax.kernels.contract import (
    Blocks,
    Kind,
    Operands,
    Problem,
    Vectors,
)
from transformer_jax.kernels.gradient import BY_KEY, ListsByKernel, attend
from transformer_jax.kernels.program import Program
from transformer_jax.pytree import register
from transformer_jax.sharding import vary
from transformer_jax.shown import short_repr
from transformer_jax.tracing import at_once


@dataclass(frozen=True)
class Tiling:
    """Say how the arrays of a call are cut up; hashable."""

    where: Target  # with the tile sizes of every kernel of the call
    lengths: tuple[int, int]  # T, S
    positioned: tuple[bool, bool]  # whether positions of queries, and of keys, are given
    padded: tuple[int, int]
    group: int  # query heads of a key head
    packs: bool  # whether kernels get the queries of a group as rows of one tile


@short_repr
@register(arrays=("q_vectors", "k_vectors", "pairs", "lists"), static=("visible", "tiling"))
@dataclass(frozen=True)
class FusedPlan:
    """Hold what the kernels read of a mask and of positions, whatever queries and keys are."""

    q_vectors: Vectors
    k_vectors: Vectors
    pairs: jax.Array | None
    lists: ListsByKernel
    visible: Program | None  # what compares the vectors; None where every pair is seen
    tiling: Tiling


@dataclass(frozen=True)
class Pallas(Implementation):
    """Run the fused kernels of kernels/, on the target that `kernels.target()` names."""

    single_pass: bool = False
    """Whether one backward kernel makes all gradients: on Hopper, the last bits of its sums differ
    from run to run."""

    pads = True
    """Whether arrays are made as long as whole tiles."""

    def environment(self) -> Target | str:
        """Return the target, which `kernels.using` changes."""
        return target()

    def refuse(self, call: AttentionCall) -> str | None:
        """Return why the kernels would not run a call, or None."""
        where = self.environment()
        if isinstance(where, str):
            return where
        query, key, value, bias = call.query, call.key, call.value, call.bias
        if self.pads and 0 in (*query.shape, *key.shape, *value.shape):
            return f"an axis is empty: query {query.shape}, key {key.shape}, value {value.shape}"
        by_array = call.scale_array is not None
        if by_array:
            inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
            found = jax.eval_shape(partial(_with_scale, where), *inputs, jnp.float32(1))
            query, key, value = map(as_array, found)
            call = dataclasses.replace(call, query=query, key=key, value=value, scale_array=None)
        if _is_evaluated(bias):
            return f"takes a bias that is an array or ALiBi, not {type(bias).__name__}"
        if bias is not None and str(getattr(bias, "dtype", "")) == "float64":
            return "computes in float32, the bias is float64"
        reason = None if call.mask is None else refuse_mask(call.mask)
        if reason is None:
            problem = _problem(call, None, where, self.single_pass)
            reason = where.backend.refuse(problem, query, key, value)
            if reason is not None and by_array:
                which = f"query {query.dtype}{query.shape}, key {key.dtype}{key.shape}"
                reason += f"; with a scale that is an array, the kernels get {which}"
        return reason or _refuse_lists(call, where)

    def reads_int8(self, call: AttentionCall) -> bool:
        """Say whether the kernel for few queries takes a call, and reads int8."""
        where = self.environment()
        assert isinstance(where, Target)
        return where.backend.int8 and call.scale_array is None and _has_few_queries(call, where)

    def reads_pages(self, call: AttentionCall) -> bool:
        """Say whether the kernel for few queries takes a call, and reads pages of this size."""
        where, page = self.environment(), call.key.shape[1]
        assert isinstance(where, Target)
        least = where.backend.page if call.scale_array is None else 0
        fits = call.block_table is not None and least > 0 and page > 0 and page % least == 0
        return fits and _has_few_queries(call, where)

    def plan(self, call: AttentionCall) -> FusedPlan | None:
        """Return the lists of tiles and the vectors; None where all of them are constants."""
        if 0 in (*call.query.shape, *call.key.shape, *call.value.shape):
            return None
        if not jax.tree.leaves((call.mask, call.q_positions, call.k_positions)):
            return None
        return _plan(call, self._tiling(call))

    def attend(self, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        """Return the output [B, T, N, Hv] and lse f32[B, T, N]."""
        if call.scale_array is not None:
            where = self.environment()
            assert isinstance(where, Target)
            q, k, v = _with_scale(where, call.query, call.key, call.value, call.scale_array)
            inner = dataclasses.replace(call, query=q, key=k, value=v, scale=1.0, scale_array=None)
            out, lse = self.attend(inner)
            return out.astype(call.query.dtype), lse
        tiling, plan = self._tiling(call), call.plan
        if not isinstance(plan, FusedPlan) or plan.tiling != tiling:
            plan = _plan(call, tiling)
        problem = _problem(call, plan.visible, tiling.where, self.single_pass)
        problem = dataclasses.replace(problem, packs=tiling.packs)
        out, lse = attend(problem, tiling.where, *vary((_operands(call, plan), plan.lists)))
        return out[:, : call.sizes[1]], jnp.moveaxis(lse[:, :, : call.sizes[1]], 1, 2)

    def _tiling(self, call: AttentionCall) -> Tiling:
        """Return the tile sizes of a call, and its lengths in whole tiles."""
        where = self.environment()
        assert isinstance(where, Target)
        _, T, N, S = call.sizes
        by_rows = where.backend.sums_fit(S, call.query.shape[3], call.value.shape[3])
        run = kinds(self.single_pass, _has_few_queries(call, where), by_rows)
        blocks = {kind: _blocks(call, where, kind) for kind in run}
        padded_T, padded_S, packs = T, S, _packs(call, where, blocks["forward"].q)
        if self.pads:
            tiles = [b.q for kind, b in blocks.items() if kind != "decode"]
            padded_T = T if packs else _round_up(T, math.lcm(*tiles))
            padded_S = _round_up(S, math.lcm(*(b.k for b in blocks.values())))
        where = dataclasses.replace(where, blocks=tuple(blocks.items()))
        positioned = call.q_positions is not None, call.k_positions is not None
        group = N // call.key.shape[2]
        return Tiling(where, (T, S), positioned, (padded_T, padded_S), group, packs)


@dataclass(frozen=True)
class Native(Pallas):
    """Run the compiled kernels of kernels/cpu on a CPU."""

    single_pass: bool = True  # each of its sums has one order
    pads = False

    def environment(self) -> Target | str:
        """Return the target, with the instruction set, or why there is none."""
        if platform() != "cpu":
            return f"needs a CPU, the backend is {platform()}"
        from transformer_jax.kernels import cpu

        found = cpu.library()
        return found if isinstance(found, str) else Target("cpu", chip=cpu.instructions())

    def attend(self, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        """Return the output [B, T, N, Hv] and lse f32[B, T, N]."""
        query, key, value, bias = call.query, call.key, call.value, call.bias
        if 0 in (*query.shape, *key.shape, *value.shape):
            out = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
            return out, jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
        if _is_evaluated(bias):
            call = dataclasses.replace(call, bias=bias.materialize(*call.positions()))
        return super().attend(call)

    def refuse(self, call: AttentionCall) -> str | None:
        """Return why the kernels would not run a call, or None."""
        if _is_evaluated(call.bias):
            array = bias_shape(call.bias, *call.positions())
            if 4 * array.size > MOST_BIAS:
                size = f"{4 * array.size / 2**30:.1f} GiB"
                return f"makes an array of {type(call.bias).__name__}: {size}, at most 1"
            call = dataclasses.replace(call, bias=as_array(array))
        return super().refuse(call)


MOST_BIAS = 2**30
"""The most bytes of a bias that the native kernels get as an array though it is a value."""


def _with_scale(
    where: Target, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return query, key and value, with a scale [] or [N] multiplied into the query.

    They become float32, so that the query is not rounded. Kernels that multiply only 16 bits get
    the query in two parts, the rounded value and the rest, next to keys of twice the width: the two
    parts have at least 16 bits together.
    """
    wide = scaled(query, scale)
    if not where.backend.narrow or jnp.finfo(query.dtype).bits > 16:
        return wide, key.astype(jnp.float32), value.astype(jnp.float32)
    own = jnp.finfo(query.dtype)
    # XLA may remove a cast there and back; the gradient of the second part is that of the query
    first = lax.stop_gradient(lax.reduce_precision(wide, own.nexp, own.nmant))
    parts = [x.astype(query.dtype) for x in (first, wide - first)]
    return jnp.concatenate(parts, axis=-1), jnp.concatenate([key, key], axis=-1), value


def _is_evaluated(bias: jax.Array | Bias | None) -> TypeGuard[Bias]:
    """Say whether a bias is a value that has no kernel of its own."""
    return isinstance(bias, Bias) and not isinstance(bias, ALiBi)


def _has_few_queries(call: AttentionCall, where: Target) -> bool:
    """Say whether the backend's `decode` takes a call that nobody differentiates.

    It does not where its list, of the tiles of all batch rows, is too long for where that is kept.
    """
    (B, T, N, S), (K, H) = call.sizes, call.key.shape[2:]
    if T * N // K > where.backend.decode_rows or call.dropout_rate > 0:
        return False
    most, Hv = where.backend.list_bytes, call.value.shape[3]
    if most is None:
        return True
    run = kinds(False, True, where.backend.sums_fit(S, H, Hv))
    *others, k = [_blocks(call, where, kind).k for kind in run]
    listed = _round_up(S, math.lcm(*others, k)) // k  # S is padded to whole tiles of every kernel
    table = 0 if call.block_table is None else call.block_table.size
    return 4 * (B * listed + table) <= most


def _packs(call: AttentionCall, where: Target, block_q: int) -> bool:
    """Say whether the queries of all heads that read a key head are packed as rows of one tile.

    They are where the forward kernel then has half as many tiles, or fewer. Dropout goes by head
    and query, a kernel takes one slope a head, and a bias of heads without a row for each query
    would become larger.
    """
    (_, T, N, _), bias = call.sizes, call.bias
    group = N // call.key.shape[2]
    if not where.backend.packs or call.dropout_rate > 0 or isinstance(bias, ALiBi):
        return False
    if not (bias is None or isinstance(bias, Bias)) and bias.shape[1] > 1 == bias.shape[2]:
        return False
    return 2 * -(-T * group // block_q) <= group * -(-T // block_q)


def _blocks(call: AttentionCall, where: Target, kind: Kind) -> Blocks:
    """Return the tile sizes of a kernel of a call."""
    (_, T, _, S), (length, K, H), Hv = call.sizes, call.key.shape[1:], call.value.shape[3]
    page = None if call.block_table is None else length
    return blocks_of(where, kind, H, Hv, call.query.dtype.itemsize, T, S, K, page)


def _refuse_lists(call: AttentionCall, where: Target) -> str | None:
    """Return whether the lists of tiles are too long for where a backend keeps them."""
    most = where.backend.list_bytes
    if most is None:
        return None
    _, T, _, S = call.sizes
    batch, heads = (1, 1) if call.mask is None else call.mask.lead
    places = call.q_positions, call.k_positions
    leads = [batch, *(p.shape[0] for p in places if p is not None and len(p.shape) == 2)]
    by_rows = where.backend.sums_fit(S, call.query.shape[3], call.value.shape[3])
    for kind in kinds(nondeterministic=False, by_rows=by_rows):
        b = _blocks(call, where, kind)
        rows, columns = -(-T // b.q), -(-S // b.k)
        dense = kind == "bias" and isinstance(call.bias, jax.Array | jax.ShapeDtypeStruct)
        if kind == "bias" and not dense:
            continue
        lead = max(leads) * heads
        size = 4 * lead * ((1 + dense) * rows * columns + 2 * max(rows, columns))
        if size > most:
            tiles = f"{lead} x {rows} x {columns}"
            return f"lists of {tiles} tiles take {size} bytes: at most {most}"
    return None


def _plan(call: AttentionCall, tiling: Tiling) -> FusedPlan:
    """Return what a mask is to the kernels: padded vectors, and the tiles that each kernel visits.

    Begin here to see how a mask gets into a kernel. `MaskVectors.of` traces it, `block_plan` bounds
    it in every tile, `prepare` writes the lists of tiles as the backend's grids read them.
    """
    padded_T, padded_S = tiling.padded
    blocks: dict[Kind, Blocks] = dict(tiling.where.blocks)
    mask = Everything() if call.mask is None else call.mask
    with at_once(mask, call.q_positions, call.k_positions):
        at = call.positions()
        indices = call.q_positions is None and call.k_positions is None
        vectors = MaskVectors.of(mask, *at, indices)
        q_vectors = tuple(pad(x, 1, padded_T, 0) for x in vectors.q)
        k_vectors = tuple(pad(x, 1, padded_S, -1 if i == 0 else 0) for i, x in enumerate(vectors.k))
        pairs = vectors.pairs()
        if pairs is not None:
            pairs = pad(pad(pairs, 2, padded_T, 0), 3, padded_S, 0)
        if tiling.packs:  # one tile has all queries
            blocks = {kind: dataclasses.replace(b, q=padded_T) for kind, b in blocks.items()}
        plans = {}
        for b in blocks.values():  # tiles after the end are skipped
            grid = -(-padded_T // b.q), -(-padded_S // b.k)
            plans[b.q, b.k] = vectors.block_plan(b.q, b.k).padded(*grid)
        lists: ListsByKernel = {}
        for kind, b in blocks.items():
            plan = plans[b.q, b.k]
            if kind == "decode" or tiling.packs:
                plan = plan.of_first_queries(tiling.group)
            listed = plan.query_tiles() if kind in BY_KEY else plan.key_tiles()
            lists[kind] = tiling.where.backend.prepare(listed)
    everywhere = vectors.visible == NO_EMPTY_SLOT
    no_empty_slot = call.k_positions is None and call.sizes[3] == padded_S
    visible = None if everywhere and no_empty_slot else vectors.visible
    return FusedPlan(q_vectors, k_vectors, pairs, lists, visible, tiling)


def _operands(call: AttentionCall, plan: FusedPlan) -> Operands:
    """Return padded arrays, of a bias its array or the slopes f32[1, N] of ALiBi."""
    padded_T, padded_S = plan.tiling.padded
    slopes, bias = None, call.bias
    if isinstance(bias, ALiBi):
        slopes = jnp.asarray(bias.slopes, jnp.float32)
        slopes, bias = jnp.broadcast_to(slopes, (1, call.query.shape[2])), None
    elif bias is not None:
        assert not isinstance(bias, Bias)
        # [.., T, S] is read in its own dtype; what is smaller costs nothing to copy
        as_given = min(bias.shape[2:]) > 1 and bias.dtype == call.query.dtype
        bias = bias if as_given else bias.astype(jnp.float32)
        for axis, given, length in ((2, call.sizes[1], padded_T), (3, call.sizes[3], padded_S)):
            if bias.shape[axis] == given and given != 1:
                bias = pad(bias, axis, length, 0)
    keys_values = call.key, call.value
    if "decode" not in plan.lists:  # which reads past the end, where copies are zeros
        keys_values = pad(call.key, 1, padded_S, 0), pad(call.value, 1, padded_S, 0)
    return Operands(
        pad(call.query, 1, padded_T, 0),
        *keys_values,
        plan.q_vectors,
        plan.k_vectors,
        plan.pairs,
        bias,
        slopes,
        None if call.sinks is None else call.sinks.astype(jnp.float32)[None],
        call.head_words(),
        call.key_scale,
        call.value_scale,
        None if call.block_table is None else clip_pages(call.block_table, len(call.key)),
    )


def _problem(
    call: AttentionCall, visible: Program | None, where: Target, single_pass: bool
) -> Problem:
    scale = 1 / math.sqrt(call.query.shape[3]) if call.scale is None else call.scale
    return Problem(
        scale,
        softcap=call.softcap,
        dropout_rate=call.dropout_rate,
        visible=visible,
        nondeterministic=single_pass,
        interpret=where.interpret,
        processors=processors_of(where),
    )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
