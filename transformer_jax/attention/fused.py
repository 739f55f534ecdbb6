"""Attention with the fused kernels: padded arrays, mask vectors and tile lists.

`Pallas.plan` makes all decisions that depend on shapes, options and the device, once per call.
`mask_operands` converts a mask to the arrays that kernels read. `Pallas.attend` runs the kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.attention.arguments import (
    AttentionCall,
    Implementation,
    Plan,
    Rows,
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
from transformer_jax.kernels.gradient import BY_KEY, ListsByKernel, fused_attention, fused_rows
from transformer_jax.kernels.program import Program
from transformer_jax.sharding import vary
from transformer_jax.tracing import eagerly
from transformer_jax.values import value_class


@dataclass(frozen=True, kw_only=True)
class KernelPlan(Plan):
    """Plan of a kernel call: the target, the tiles and the padding."""

    where: Target  # includes the tile sizes of every kernel in the call
    lengths: tuple[int, int]  # T, S
    positioned: tuple[bool, bool]  # whether queries and keys have explicit positions
    padded: tuple[int, int]  # T and S with padding
    group: int  # number of query heads per key head
    packs: bool  # whether the queries of a group are packed into one tile


@value_class(arrays=("q_vectors", "k_vectors", "pairs", "lists"), static=("visible", "plan"))
class MaskOperands:
    """Mask and positions in the form that the kernels read: arrays and a program."""

    q_vectors: Vectors
    k_vectors: Vectors
    pairs: jax.Array | None
    lists: ListsByKernel
    visible: Program | None  # compares the vectors; None if all pairs are visible
    plan: KernelPlan


@dataclass(frozen=True)
class Pallas(Implementation):
    """Fused kernels in kernels/, on the target `kernels.target()`."""

    single_pass: bool = False
    """Whether one backward kernel computes all gradients; on Hopper, their last bits may vary."""

    pads = True
    """Whether arrays are padded to whole tiles."""
    invariant = False
    """Whether the bits of a row are the same in every call that contains the row."""
    evaluates_biases = False
    """Whether a `Bias` other than ALiBi is materialized as an array."""

    def target(self) -> Target | str:
        """Return the target (see `kernels.using`), or the reason why none is available."""
        return target()

    def refuse(self, call: AttentionCall) -> str | None:
        """Return the reason why the kernels do not support a call, or None."""
        plan = self.plan(call)
        return plan if isinstance(plan, str) else None

    def plan(self, call: AttentionCall) -> KernelPlan | str:
        """Return the tile sizes and padded lengths for a call, or the reason why it cannot run."""
        where = self.target()
        if isinstance(where, str):
            return where
        backend, plain = where.backend, call
        if call.block_table is not None or call.key_scale is not None:
            plain = call.plain_shapes()
        query, key, value, bias = plain.query, plain.key, plain.value, plain.bias
        if self.pads and 0 in (*query.shape, *key.shape, *value.shape):
            return f"an axis is empty (query {query.shape}, key {key.shape}, value {value.shape})"
        by_array = call.scale_array is not None
        if by_array:
            inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
            found: Any = jax.eval_shape(partial(_with_scale, where), *inputs, jnp.float32(1))
            query, key, value = found
        # the kernels read the slopes of ALiBi instead of an array
        if isinstance(bias, Bias) and not isinstance(bias, ALiBi):
            if not self.evaluates_biases:
                return f"supports only an array or ALiBi as a bias, not {type(bias).__name__}"
            array: Any = bias_shape(bias, *plain.positions())
            if 4 * array.size > MOST_BIAS:
                gib = f"{4 * array.size / 2**30:.1f} GiB"
                return (
                    f"evaluates {type(bias).__name__} to an array of {gib}: must be at most 1 GiB"
                )
            bias = array
        if bias is not None and str(getattr(bias, "dtype", "")) == "float64":
            return "computes in float32, but the bias is float64"
        if call.mask is not None and (reason := refuse_mask(call.mask)) is not None:
            return reason
        if call.score_mod is not None:
            if not backend.score:
                return "supports score_mod only on a TPU"
            if (reason := call.score_mod.program.refused) is not None:
                return reason
        reason = backend.refuse(where, self.single_pass, query, key, value)
        if reason is not None:
            if by_array:
                which = f"query {query.dtype}{query.shape}, key {key.dtype}{key.shape}"
                reason += f"; with a scale that is an array, the kernels get {which}"
            return reason

        (B, T, N, S), (K, H), Hv = call.sizes, key.shape[2:], value.shape[3]
        group = N // K
        # the kernel for few queries does not support differentiation
        few = T * group <= backend.decode_rows and call.dropout_rate == 0
        gradients: list[Kind] = ["single_pass"] if self.single_pass else ["dq", "dkdv"]
        if backend.sums_fit(S, H, Hv):
            gradients = ["single_pass_rows"]
        run: list[Kind] = ["forward", *gradients, "bias"]
        run += ["score"] if call.score_mod is not None else []
        run += ["decode"] if few else []
        # only the kernel for few queries reads pages in place; its tile size must divide the page
        # size, so it differs from the tile size for contiguous keys
        slots, pages = call.key.shape[1], list[int | None]()
        if call.block_table is not None and backend.page and not by_array:
            pages += [slots] if slots and slots % backend.page == 0 else []
        for page in (*pages, None):
            sizes = H, Hv, query.dtype.itemsize, T, S, K, page
            blocks = {kind: chips.blocks(where, kind, *sizes) for kind in run}
            if few and backend.list_bytes is not None:
                # its list contains the tiles of all rows, with S padded to whole tiles of every
                # kernel
                whole = math.lcm(*(b.k for b in blocks.values()))
                padded = -(-S // whole) * whole
                listed = B * padded // blocks["decode"].k
                table = 0 if page is None or call.block_table is None else call.block_table.size
                if 4 * (listed + table) > backend.list_bytes:
                    del blocks["decode"]
            if "decode" in blocks:
                break
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
                    return f"lists of {of_tiles} tiles take {size} bytes: must be at most {most}"

        # pack the queries of a group if this halves the number of forward tiles. The exceptions are
        # dropout (which hashes the head and the query), ALiBi (which has one slope per head), and a
        # bias with heads but without a query axis (which would grow)
        packs = backend.packs and call.dropout_rate == 0 and not isinstance(bias, ALiBi)
        if bias is not None and not isinstance(bias, Bias) and bias.shape[1] > 1 == bias.shape[2]:
            packs = False
        block_q = blocks["forward"].q
        packs = packs and 2 * -(-T * group // block_q) <= group * -(-T // block_q)
        padded_T, padded_S = T, S
        if self.pads:
            # a multiple of the tile size of every kernel, so that arrays are padded only once
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
        """Return the mask's arrays for the kernels, or None if all of them are constants."""
        if 0 in (*call.query.shape, *call.key.shape, *call.value.shape):
            return None
        if not jax.tree.leaves((call.mask, call.q_positions, call.k_positions)):
            return None
        return mask_operands(call)

    reads_rows = reads_score_mod = True

    def refuse_part(self, call: AttentionCall) -> str | None:
        if self.invariant:
            return "adds the parts of the keys in an order that depends on the devices"
        if call.dropout_rate:
            return "the kernels compute dropout from indices that start at 0"
        return None

    def rows(self, call: AttentionCall) -> Rows:
        out, *sums = fused_rows(*self._arguments(call))
        T = call.query.shape[1]
        row_max, log_sum = (jnp.moveaxis(x[:, :, :T], 1, 2) for x in sums)
        return Rows(out[:, :T].astype(jnp.float32), row_max, log_sum)

    def attend(self, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        """Return the output [B, T, N, Hv] and lse f32[B, T, N]."""
        query, key, value = call.query, call.key, call.value
        if 0 in (*query.shape, *key.shape, *value.shape):
            out = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
            return out, jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
        known = None
        if call.rows is not None:
            out, *sums = call.rows
            length = call.plan.padded[0]  # type: ignore[attr-defined]
            row_max, log_sum = (jnp.moveaxis(x, 2, 1) for x in sums)
            # a padded query is a fully masked row
            known = (
                pad(out, 1, length, 0),
                pad(row_max, 2, length, -jnp.inf),
                pad(log_sum, 2, length, 0),
            )
        out, lse = fused_attention(*self._arguments(call), vary(known, query))
        T = query.shape[1]
        return out[:, :T].astype(query.dtype), jnp.moveaxis(lse[:, :, :T], 1, 2)

    def _arguments(self, call: AttentionCall) -> tuple[Problem, Target, Operands, ListsByKernel]:
        """Return the arguments of the kernels."""
        plan, shared = call.plan, call.shared
        assert isinstance(plan, KernelPlan)
        query, key, value, bias = call.query, call.key, call.value, call.bias
        (_, T, N, S), (padded_T, padded_S) = call.sizes, plan.padded
        scale = 1 / math.sqrt(query.shape[3]) if call.scale is None else call.scale
        if call.scale_array is not None:
            query, key, value = _with_scale(plan.where, query, key, value, call.scale_array)
            scale = 1.0
        # recompute the lists of a planned mask if it was planned for different tile sizes
        if not isinstance(shared, MaskOperands) or shared.plan != plan:
            shared = mask_operands(call)
        problem = Problem(
            scale,
            softcap=call.softcap,
            dropout_rate=call.dropout_rate,
            visible=shared.visible,
            nondeterministic=self.single_pass,
            invariant=self.invariant,
            packs=plan.packs,
            score=None if call.score_mod is None else call.score_mod.program,
            interpret=plan.where.interpret,
            processors=plan.where.processors or chips.HOPPER_WITH_FEWER.get(plan.where.chip),
        )
        slopes = None
        if isinstance(bias, ALiBi):  # the kernels read its slopes, f32[1, N]
            slopes = jnp.asarray(bias.slopes, jnp.float32)
            slopes, bias = jnp.broadcast_to(slopes, (1, N)), None
        elif isinstance(bias, Bias):
            bias = bias.materialize(*call.positions())
        if bias is not None:
            # kernels read a bias [.., T, S] in the query's dtype; casting from a smaller dtype is
            # free
            keeps_dtype = min(bias.shape[2:]) > 1 and bias.dtype == query.dtype
            bias = bias if keeps_dtype else bias.astype(jnp.float32)
        score_values = None
        if call.score_mod is not None:
            score_values = call.score_mod.values(*call.positions())

        def to_tiles(x: jax.Array) -> jax.Array:  # [.., T or 1, S or 1]
            for axis, size, padded in ((2, T, padded_T), (3, S, padded_S)):
                x = pad(x, axis, padded, 0) if x.shape[axis] == size != 1 else x
            return x

        bias, score_values = jax.tree.map(to_tiles, (bias, score_values))
        # the decode kernels support keys that end within a tile
        if "decode" not in shared.lists:
            key, value = pad(key, 1, padded_S, 0), pad(value, 1, padded_S, 0)
        operands = Operands(
            pad(query, 1, padded_T, 0),
            key,
            value,
            shared.q_vectors,
            shared.k_vectors,
            shared.pairs,
            bias,
            slopes,
            None if call.sinks is None else call.sinks.astype(jnp.float32)[None],
            call.head_words(),
            call.key_scale,
            call.value_scale,
            None if call.block_table is None else clip_pages(call.block_table, len(key)),
            score_values,
        )
        return problem, plan.where, *vary((operands, shared.lists))


@dataclass(frozen=True)
class Native(Pallas):
    """Compiled CPU kernels in kernels/cpu."""

    single_pass: bool = True  # deterministic on a CPU, where each sum has a fixed order
    reads_score_mod = False
    pads = False
    evaluates_biases = True

    def target(self) -> Target | str:
        """Return the target with its instruction set, or the reason why none is available."""
        if platform() != "cpu":
            return f"needs a CPU; the backend is {platform()}"
        from transformer_jax.kernels import cpu

        found = cpu.library()
        return found if isinstance(found, str) else Target("cpu", chip=cpu.instructions())


@dataclass(frozen=True)
class Invariant(Native):
    """The kernels of `Native` except the one for few queries, which adds in another order."""

    invariant = True


MOST_BIAS = 2**30
"""Maximum size in bytes of a `Bias` that is materialized for the native kernels."""


def _with_scale(
    where: Target, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return query, key and value, with the query multiplied by a scale [] or [N].

    For kernels that multiply only 16-bit numbers, the query is split into two concatenated parts,
    and the keys are repeated to twice their width.
    """
    # use float32, because 16 bits would round the scale
    wide = scaled(query, scale)
    if not where.backend.narrow or jnp.finfo(query.dtype).bits > 16:
        return wide, key.astype(jnp.float32), value.astype(jnp.float32)
    # together, the rounded value and the remainder have at least 16 bits of precision
    info = jnp.finfo(query.dtype)
    # use `reduce_precision`, because XLA may remove a cast to 16 bits and back. The first part has
    # no gradient, so the second part carries the gradient of the query
    first = lax.stop_gradient(lax.reduce_precision(wide, info.nexp, info.nmant))
    parts = [x.astype(query.dtype) for x in (first, wide - first)]
    return jnp.concatenate(parts, axis=-1), jnp.concatenate([key, key], axis=-1), value


def mask_operands(call: AttentionCall) -> MaskOperands:
    """Return a mask in the form that kernels read: padded vectors, and lists of tiles to visit.

    Start here to learn how a mask is passed to a kernel. `MaskVectors.of` traces the mask,
    `block_plan` computes its bounds in each tile, and `prepare` extends the tile lists for the
    backend's grid.
    """
    plan = call.plan
    assert isinstance(plan, KernelPlan)
    padded_T, padded_S = plan.padded
    blocks: dict[Kind, Blocks] = dict(plan.where.blocks)
    mask = Everything() if call.mask is None else call.mask
    with eagerly(mask, call.q_positions, call.k_positions):
        at = call.positions()
        indices = call.q_positions is None and call.k_positions is None
        vectors = MaskVectors.of(mask, *at, indices)
        # keys past the end are empty slots; queries past the end do not matter, because their
        # results are discarded
        q_vectors = tuple(pad(x, 1, padded_T, 0) for x in vectors.q)
        k_vectors = tuple(pad(x, 1, padded_S, -1 if i == 0 else 0) for i, x in enumerate(vectors.k))
        pairs = None
        if vectors.matrices:  # packed into the bits of one matrix
            bits = (matrix.astype(jnp.int8) << bit for bit, matrix in enumerate(vectors.matrices))
            pairs = pad(pad(reduce(jnp.bitwise_or, bits), 2, padded_T, 0), 3, padded_S, 0)
        if plan.packs:  # one tile contains all queries
            blocks = {kind: replace(b, q=padded_T) for kind, b in blocks.items()}
        plans = {}
        for b in blocks.values():
            # tiles past the end are skipped
            grid = -(-padded_T // b.q), -(-padded_S // b.k)
            plans[b.q, b.k] = vectors.block_plan(b.q, b.k).padded(*grid)
        lists: ListsByKernel = {}
        for kind, b in blocks.items():
            tiles = plans[b.q, b.k]
            if kind == "decode" or plan.packs:
                tiles = tiles.of_first_queries(plan.group)
            listed = tiles.query_tiles() if kind in BY_KEY else tiles.key_tiles()
            lists[kind] = plan.where.backend.prepare(listed)
    # if there is no program, the kernels are compiled without code for partial tiles
    sees_all = vectors.visible == NO_EMPTY_SLOT
    no_empty_slot = call.k_positions is None and call.sizes[3] == padded_S
    visible = None if sees_all and no_empty_slot else vectors.visible
    return MaskOperands(q_vectors, k_vectors, pairs, lists, visible, plan)
