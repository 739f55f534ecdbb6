"""Hand a call of attention to the fused kernels: padded arrays, vectors, lists of tiles."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.attention.arguments import AttentionCall, Implementation, bias_shape
from transformer_jax.attention.biases import ALiBi
from transformer_jax.attention.block_plan import BlockPlan, pad
from transformer_jax.attention.blockwise.core import scaled
from transformer_jax.attention.mask_vectors import MATRICES, Comparison, MaskVectors
from transformer_jax.attention.masks import Everything, Mask
from transformer_jax.kernels import Target, platform, target
from transformer_jax.kernels.chips import Kind, kinds
from transformer_jax.kernels.chips import blocks as blocks_of
from transformer_jax.kernels.contract import Blocks, Operands, Problem, Refused
from transformer_jax.kernels.gradient import ListsByKernel, attend
from transformer_jax.sharding import vary
from transformer_jax.tracing import at_once


@dataclass(frozen=True)
class Pallas(Implementation):
    """Run the fused kernels of kernels/, on the target that `kernels.target()` names."""

    nondeterministic: bool = False
    """Whether the backward pass is the single-pass one, whose last bits differ from run to run."""

    pads = True
    """Whether arrays are made as long as whole tiles."""

    @property
    def single_pass(self) -> bool:
        """Say whether one backward kernel makes all gradients."""
        return self.nondeterministic

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
        if call.scale_array is not None:
            return "takes no scale that is an array"
        if bias is not None and not hasattr(bias, "shape") and not isinstance(bias, ALiBi):
            return f"takes a bias that is an array or ALiBi, not {type(bias).__name__}"
        if bias is not None and str(getattr(bias, "dtype", "")) == "float64":
            return "computes in float32, the bias is float64"
        reason = None if call.mask is None else refuse_mask(call.mask)
        if reason is None:
            problem = _problem(call, None, where, self.single_pass)
            reason = where.module.refuse(problem, query, key, value)
        return reason or _refuse_lists(call, where)

    def attend(self, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        """Return the output [B, T, N, Hv] and lse f32[B, T, N]."""
        where = self.environment()
        assert isinstance(where, Target)
        _, T, _, S = call.sizes
        H, Hv, width = call.query.shape[3], call.value.shape[3], call.query.dtype.itemsize
        blocks = {
            kind: blocks_of(where, kind, H, Hv, width, T, S) for kind in kinds(self.single_pass)
        }
        padded_T, padded_S = T, S
        if self.pads:
            padded_T = _round_up(T, math.lcm(*(b.q for b in blocks.values())))
            padded_S = _round_up(S, math.lcm(*(b.k for b in blocks.values())))
        operands, lists, visible = _inputs(call, blocks, (padded_T, padded_S))
        problem = _problem(call, visible, where, self.single_pass)
        where = dataclasses.replace(where, blocks=tuple(blocks.items()))
        out, lse = attend(problem, where, *vary((operands, lists)))
        return out[:, :T], jnp.moveaxis(lse[:, :, :T], 1, 2)


@dataclass(frozen=True)
class Native(Pallas):
    """Run the compiled kernels of kernels/cpu on a CPU."""

    pads = False

    @property
    def single_pass(self) -> bool:
        """Say that one kernel makes all gradients: each of its sums has one order."""
        return True

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
        if call.scale_array is None:
            return super().attend(call)
        wide = dataclasses.replace(
            call,
            query=scaled(query, call.scale_array),
            key=key.astype(jnp.float32),
            value=value.astype(jnp.float32),
            scale=1.0,
            scale_array=None,
        )
        out, lse = super().attend(wide)
        return out.astype(query.dtype), lse

    def refuse(self, call: AttentionCall) -> str | None:
        """Return why the kernels would not run a call, or None."""
        given = dataclasses.replace(call, scale_array=None)
        if _is_evaluated(call.bias):
            array = bias_shape(call.bias, *call.positions())
            if 4 * array.size > MOST_BIAS:
                size = f"{4 * array.size / 2**30:.1f} GiB"
                return f"makes an array of {type(call.bias).__name__}: {size}, at most 1"
            given = dataclasses.replace(given, bias=array)
        reason = super().refuse(given)
        if reason is not None or call.mask is None or not call.mask.calls_user_code:
            return reason
        try:  # a comparison that somebody else wrote
            jax.eval_shape(self.attend, call)
        except Refused as error:
            return str(error)
        return None


MOST_BIAS = 2**30
"""The most bytes of a bias that the native kernels get as an array though it is a value."""


def _is_evaluated(bias: Any) -> bool:
    """Say whether a bias is a value that has no kernel of its own."""
    return bias is not None and not hasattr(bias, "shape") and not isinstance(bias, ALiBi)


def refuse_mask(mask: Mask) -> str | None:
    """Return why a kernel cannot evaluate a mask, or None."""
    if mask.num_matrices > MATRICES:
        return f"takes at most {MATRICES} Dense masks, not {mask.num_matrices}"
    return mask.refuse_kernel()


def _refuse_lists(call: AttentionCall, where: Target) -> str | None:
    """Return whether the lists of tiles are too long for where a backend keeps them."""
    most = where.module.LIST_BYTES
    if most is None:
        return None
    _, T, _, S = call.sizes
    batch, heads = (1, 1) if call.mask is None else call.mask.lead
    places = call.q_positions, call.k_positions
    leads = [batch, *(p.shape[0] for p in places if p is not None and len(p.shape) == 2)]
    sizes = call.query.shape[3], call.value.shape[3], call.query.dtype.itemsize, T, S
    for kind in kinds(nondeterministic=False):
        b = blocks_of(where, kind, *sizes)
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


def _inputs(
    call: AttentionCall, blocks: dict[Kind, Blocks], padded: tuple[int, int]
) -> tuple[Operands, ListsByKernel, Comparison | None]:
    """Return padded arrays, the tiles that each kernel visits, and what compares the vectors.

    None compares where every pair is seen.
    """
    padded_T, padded_S = padded
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
        plans = _plans(mask, *at, tuple(blocks.values()), padded)
    by_key = "dkdv", "single_pass"
    lists = {
        kind: plan.query_tiles() if kind in by_key else plan.key_tiles()
        for kind, plan in zip(blocks, plans, strict=True)
    }
    slopes, bias = _biases(call, padded_T, padded_S)
    operands = Operands(
        pad(call.query, 1, padded_T, 0),
        pad(call.key, 1, padded_S, 0),
        pad(call.value, 1, padded_S, 0),
        q_vectors,
        k_vectors,
        pairs,
        bias,
        slopes,
        None if call.sinks is None else call.sinks.astype(jnp.float32)[None],
        call.head_words(),
    )
    everywhere = mask.sees_everything and call.k_positions is None and call.sizes[3] == padded_S
    return operands, lists, None if everywhere else vectors.visible


@partial(jax.jit, static_argnums=(3, 4))  # at once, each step would be a program of its own
def _plans(
    mask: Mask,
    q: jax.Array,
    k: jax.Array,
    blocks: tuple[Blocks, ...],
    padded: tuple[int, int],
) -> list[BlockPlan]:
    """Return the plan for each kernel's tile sizes."""
    found = {(b.q, b.k): plan_of(mask, q, k, b, padded) for b in blocks}
    return [found[b.q, b.k] for b in blocks]


def plan_of(
    mask: Mask, q: jax.Array, k: jax.Array, blocks: Blocks, padded: tuple[int, int]
) -> BlockPlan:
    """Return the plan of padded lengths; tiles after the end are skipped."""
    plan = mask.block_plan(q, k, block_q=blocks.q, block_k=blocks.k)
    return plan.padded(-(-padded[0] // blocks.q), -(-padded[1] // blocks.k))


def _biases(
    call: AttentionCall, padded_T: int, padded_S: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the slopes f32[1, N] of ALiBi, or the bias as a padded array."""
    bias = call.bias
    if isinstance(bias, ALiBi):
        slopes = jnp.asarray(bias.slopes, jnp.float32)
        return jnp.broadcast_to(slopes, (1, call.query.shape[2])), None
    if bias is None:
        return None, None
    # [.., T, S] is read in its own dtype; what is smaller costs nothing to copy
    as_given = min(bias.shape[2:]) > 1 and bias.dtype == call.query.dtype
    dense = bias if as_given else bias.astype(jnp.float32)
    for axis, given, length in ((2, call.sizes[1], padded_T), (3, call.sizes[3], padded_S)):
        if dense.shape[axis] == given and given != 1:
            dense = pad(dense, axis, length, 0)
    return None, dense


def _problem(call: AttentionCall, visible: Any, where: Target, nondeterministic: bool) -> Problem:
    scale = 1 / math.sqrt(call.query.shape[3]) if call.scale is None else call.scale
    fields = call.softcap, call.dropout_rate, visible
    return Problem(scale, *fields, nondeterministic=nondeterministic, interpret=where.interpret)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
