"""Hand a call of attention to the fused kernels: padded arrays, vectors, lists of tiles.

`Pallas.plan` decides everything that shapes, options and the device decide, once for a call.
`mask_operands` makes what the kernels read of a mask. `Pallas.attend` puts both together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.attention.arguments import (
    AttentionCall,
    Implementation,
    Plan,
    as_array,
    bias_shape,
)
from transformer_jax.attention.biases import ALiBi, Bias
from transformer_jax.attention.block_plan import pad
from transformer_jax.attention.blockwise.core import scaled
from transformer_jax.attention.mask import refuse_mask
from transformer_jax.attention.mask_vectors import NO_EMPTY_SLOT, MaskVectors
from transformer_jax.attention.masks import Everything
from transformer_jax.kernels import Target, chips, platform, target
from transformer_jax.kernels.caches import clip_pages
from transformer_jax.kernels.contract import Blocks, Kind, Operands, Problem, Vectors
from transformer_jax.kernels.gradient import BY_KEY, ListsByKernel, fused_attention
from transformer_jax.kernels.program import Program
from transformer_jax.sharding import vary
from transformer_jax.tracing import at_once
from transformer_jax.values import value_class


@dataclass(frozen=True, kw_only=True)
class KernelPlan(Plan):
    """How the kernels run a call: on which target, and how its arrays are cut up."""

    where: Target  # with the tile sizes of every kernel of the call
    lengths: tuple[int, int]  # T, S
    positioned: tuple[bool, bool]  # whether positions of queries, and of keys, are given
    padded: tuple[int, int]
    group: int  # query heads of a key head
    packs: bool  # whether kernels get the queries of a group as rows of one tile


@value_class(arrays=("q_vectors", "k_vectors", "pairs", "lists"), static=("visible", "plan"))
class MaskOperands:
    """The arrays that the kernels read of a mask and of positions, with their program."""

    q_vectors: Vectors
    k_vectors: Vectors
    pairs: jax.Array | None
    lists: ListsByKernel
    visible: Program | None  # what compares the vectors; None where every pair is seen
    plan: KernelPlan


@dataclass(frozen=True)
class Pallas(Implementation):
    """Run the fused kernels of kernels/, on the target that `kernels.target()` names."""

    single_pass: bool = False
    """Whether one backward kernel makes all gradients: on Hopper, the last bits of its sums differ
    from run to run."""

    pads = True
    """Whether arrays are made as long as whole tiles."""
    evaluates_biases = False
    """Whether a bias that is a value, and not ALiBi, is made an array."""

    def target(self) -> Target | str:
        """Return where the kernels run, which `kernels.using` changes, or why nowhere."""
        return target()

    def refuse(self, call: AttentionCall) -> str | None:
        """Return why the kernels would not run a call, or None."""
        plan = self.plan(call)
        return plan if isinstance(plan, str) else None

    def plan(self, call: AttentionCall) -> KernelPlan | str:
        """Return the tile sizes of a call, and its lengths in whole tiles, or why it cannot run."""
        where = self.target()
        if isinstance(where, str):
            return where
        backend, plain = where.backend, call.plain_shapes()
        query, key, value, bias = plain.query, plain.key, plain.value, plain.bias
        if self.pads and 0 in (*query.shape, *key.shape, *value.shape):
            return f"an axis is empty: query {query.shape}, key {key.shape}, value {value.shape}"
        by_array = call.scale_array is not None
        if by_array:
            inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
            found = jax.eval_shape(partial(_with_scale, where), *inputs, jnp.float32(1))
            query, key, value = map(as_array, found)
        # kernels read the slopes of ALiBi
        if isinstance(bias, Bias) and not isinstance(bias, ALiBi):
            if not self.evaluates_biases:
                return f"takes a bias that is an array or ALiBi, not {type(bias).__name__}"
            array = bias_shape(bias, *plain.positions())
            if 4 * array.size > MOST_BIAS:
                takes = f"{4 * array.size / 2**30:.1f} GiB"
                return f"makes an array of {type(bias).__name__}: {takes}, at most 1"
            bias = as_array(array)
        if bias is not None and str(getattr(bias, "dtype", "")) == "float64":
            return "computes in float32, the bias is float64"
        if call.mask is not None and (reason := refuse_mask(call.mask)) is not None:
            return reason
        reason = backend.refuse(where, self.single_pass, query, key, value)
        if reason is not None:
            if by_array:
                which = f"query {query.dtype}{query.shape}, key {key.dtype}{key.shape}"
                reason += f"; with a scale that is an array, the kernels get {which}"
            return reason

        (B, T, N, S), (K, H), Hv = call.sizes, key.shape[2:], value.shape[3]
        group, by_rows = N // K, backend.sums_fit(S, H, Hv)

        def tiles(page: int | None) -> dict[Kind, Blocks]:
            # the kernel of few queries is for a call that nobody differentiates
            few = T * group <= backend.decode_rows and call.dropout_rate == 0
            run = chips.kinds(self.single_pass, few, by_rows)
            sizes = H, Hv, query.dtype.itemsize, T, S, K, page
            found = {kind: chips.blocks(where, kind, *sizes) for kind in run}
            if few and backend.list_bytes is not None:
                # its list is of the tiles of all batch rows, with S padded as all kernels want it
                whole = math.lcm(*(b.k for b in found.values()))
                padded = -(-S // whole) * whole
                listed = B * padded // found["decode"].k
                table = 0 if page is None or call.block_table is None else call.block_table.size
                if 4 * (listed + table) > backend.list_bytes:
                    del found["decode"]
            return found

        # pages are read in place only if a kernel for few queries takes the call; the tiles that
        # divide a page differ from those of keys that lie in a row
        page, blocks = None, tiles(None)
        if call.block_table is not None and backend.page and not by_array:
            slots = call.key.shape[1]
            in_place = tiles(slots) if slots and slots % backend.page == 0 else {}
            if "decode" in in_place:
                page, blocks = slots, in_place
        reads_int8 = backend.int8 and not by_array and "decode" in blocks

        if backend.list_bytes is not None:
            batch, heads = (1, 1) if call.mask is None else call.mask.lead
            places = call.q_positions, call.k_positions
            leads = [batch, *(p.shape[0] for p in places if p is not None and len(p.shape) == 2)]
            lead = max(leads) * heads
            for kind, b in blocks.items():
                dense = kind == "bias" and isinstance(bias, jax.Array | jax.ShapeDtypeStruct)
                if kind == "decode" or (kind == "bias" and not dense):
                    continue
                rows, columns = -(-T // b.q), -(-S // b.k)
                size = 4 * lead * ((1 + dense) * rows * columns + 2 * max(rows, columns))
                if size > backend.list_bytes:
                    of_tiles = f"{lead} x {rows} x {columns}"
                    most = backend.list_bytes
                    return f"lists of {of_tiles} tiles take {size} bytes: at most {most}"

        # Queries of a group are packed where the forward kernel then has half as many tiles, or
        # fewer. Dropout goes by head and query, a kernel takes one slope a head, and a bias of
        # heads without a row for each query would become larger.
        packs = backend.packs and call.dropout_rate == 0 and not isinstance(bias, ALiBi)
        if bias is not None and not isinstance(bias, Bias) and bias.shape[1] > 1 == bias.shape[2]:
            packs = False
        block_q = blocks["forward"].q
        packs = packs and 2 * -(-T * group // block_q) <= group * -(-T // block_q)
        padded_T, padded_S = T, S
        if self.pads:
            # one length that every kernel's tiles divide, so that arrays are padded once
            block_q = math.lcm(*(b.q for kind, b in blocks.items() if kind != "decode"))
            block_k = math.lcm(*(b.k for b in blocks.values()))
            padded_T = T if packs else -(-T // block_q) * block_q
            padded_S = -(-S // block_k) * block_k
        return KernelPlan(
            where=replace(where, blocks=tuple(blocks.items())),
            lengths=(T, S),
            positioned=(call.q_positions is not None, call.k_positions is not None),
            padded=(padded_T, padded_S),
            group=group,
            packs=packs,
            reads_pages=page is not None,
            reads_int8=reads_int8 and call.key_scale is not None,
        )

    def share(self, call: AttentionCall) -> MaskOperands | None:
        """Return what the kernels read of the mask; None where all of that are constants."""
        if 0 in (*call.query.shape, *call.key.shape, *call.value.shape):
            return None
        if not jax.tree.leaves((call.mask, call.q_positions, call.k_positions)):
            return None
        return mask_operands(call)

    def attend(self, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        """Return the output [B, T, N, Hv] and lse f32[B, T, N]."""
        plan, T, shared = call.plan, call.query.shape[1], call.shared
        assert isinstance(plan, KernelPlan)
        query, key, value, bias = call.query, call.key, call.value, call.bias
        if 0 in (*query.shape, *key.shape, *value.shape):
            out = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
            return out, jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
        scale = 1 / math.sqrt(query.shape[3]) if call.scale is None else call.scale
        if isinstance(bias, Bias) and not isinstance(bias, ALiBi):
            bias = bias.materialize(*call.positions())
        if call.scale_array is not None:
            query, key, value = _with_scale(plan.where, query, key, value, call.scale_array)
            scale = 1.0
        # a planned mask may come from a call with other tiles: then its lists are of no use
        if not isinstance(shared, MaskOperands) or shared.plan != plan:
            shared = mask_operands(call)
        problem = Problem(
            scale,
            softcap=call.softcap,
            dropout_rate=call.dropout_rate,
            visible=shared.visible,
            nondeterministic=self.single_pass,
            packs=plan.packs,
            interpret=plan.where.interpret,
            processors=chips.processors_of(plan.where),
        )
        inner = replace(call, query=query, key=key, value=value, bias=bias)
        tree = vary((operands_of(inner, shared), shared.lists))
        out, lse = fused_attention(problem, plan.where, *tree)
        return out[:, :T].astype(call.query.dtype), jnp.moveaxis(lse[:, :, :T], 1, 2)


@dataclass(frozen=True)
class Native(Pallas):
    """Run the compiled kernels of kernels/cpu on a CPU."""

    single_pass: bool = True  # each of its sums has one order
    pads = False
    evaluates_biases = True

    def target(self) -> Target | str:
        """Return the target, with the instruction set, or why there is none."""
        if platform() != "cpu":
            return f"needs a CPU, the backend is {platform()}"
        from transformer_jax.kernels import cpu

        found = cpu.library()
        return found if isinstance(found, str) else Target("cpu", chip=cpu.instructions())


MOST_BIAS = 2**30
"""The most bytes of a bias that the native kernels get as an array though it is a value."""


def _with_scale(
    where: Target, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return query, key and value, with a scale [] or [N] multiplied into the query.

    Kernels that multiply only 16 bits get the query in two parts, next to keys of twice the width.
    """
    # float32: rounded, the scale would be lost in the query
    wide = scaled(query, scale)
    if not where.backend.narrow or jnp.finfo(query.dtype).bits > 16:
        return wide, key.astype(jnp.float32), value.astype(jnp.float32)
    # the rounded value and the rest have at least 16 bits together
    own = jnp.finfo(query.dtype)
    # XLA may remove a cast there and back; the gradient of the second part is that of the query
    first = lax.stop_gradient(lax.reduce_precision(wide, own.nexp, own.nmant))
    parts = [x.astype(query.dtype) for x in (first, wide - first)]
    return jnp.concatenate(parts, axis=-1), jnp.concatenate([key, key], axis=-1), value


def mask_operands(call: AttentionCall) -> MaskOperands:
    """Return what a mask is to the kernels: padded vectors, and the tiles that each kernel visits.

    Begin here to see how a mask gets into a kernel. `MaskVectors.of` traces it, `block_plan` bounds
    it in every tile, `prepare` writes the lists of tiles as the backend's grids read them.
    """
    plan = call.plan
    assert isinstance(plan, KernelPlan)
    padded_T, padded_S = plan.padded
    blocks: dict[Kind, Blocks] = dict(plan.where.blocks)
    mask = Everything() if call.mask is None else call.mask
    with at_once(mask, call.q_positions, call.k_positions):
        at = call.positions()
        indices = call.q_positions is None and call.k_positions is None
        vectors = MaskVectors.of(mask, *at, indices)
        # keys after the end are empty slots, queries after it any: their rows are cut off
        q_vectors = tuple(pad(x, 1, padded_T, 0) for x in vectors.q)
        k_vectors = tuple(pad(x, 1, padded_S, -1 if i == 0 else 0) for i, x in enumerate(vectors.k))
        pairs = vectors.pairs()
        if pairs is not None:
            pairs = pad(pad(pairs, 2, padded_T, 0), 3, padded_S, 0)
        # one tile has all queries
        if plan.packs:
            blocks = {kind: replace(b, q=padded_T) for kind, b in blocks.items()}
        plans = {}
        # tiles after the end are skipped
        for b in blocks.values():
            grid = -(-padded_T // b.q), -(-padded_S // b.k)
            plans[b.q, b.k] = vectors.block_plan(b.q, b.k).padded(*grid)
        lists: ListsByKernel = {}
        for kind, b in blocks.items():
            tiles = plans[b.q, b.k]
            if kind == "decode" or plan.packs:
                tiles = tiles.of_first_queries(plan.group)
            listed = tiles.query_tiles() if kind in BY_KEY else tiles.key_tiles()
            lists[kind] = plan.where.backend.prepare(listed)
    # without a program the kernels have no code for partial tiles
    everywhere = vectors.visible == NO_EMPTY_SLOT
    no_empty_slot = call.k_positions is None and call.sizes[3] == padded_S
    visible = None if everywhere and no_empty_slot else vectors.visible
    return MaskOperands(q_vectors, k_vectors, pairs, lists, visible, plan)


def operands_of(call: AttentionCall, shared: MaskOperands) -> Operands:
    """Return padded arrays, of a bias its array or the slopes f32[1, N] of ALiBi."""
    padded_T, padded_S = shared.plan.padded
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
    # the decode kernel reads past the end, where copies are zeros
    if "decode" not in shared.lists:
        keys_values = pad(call.key, 1, padded_S, 0), pad(call.value, 1, padded_S, 0)
    return Operands(
        pad(call.query, 1, padded_T, 0),
        *keys_values,
        shared.q_vectors,
        shared.k_vectors,
        shared.pairs,
        bias,
        slopes,
        None if call.sinks is None else call.sinks.astype(jnp.float32)[None],
        call.head_words(),
        call.key_scale,
        call.value_scale,
        None if call.block_table is None else clip_pages(call.block_table, len(call.key)),
    )
