"""Mixture of experts without a capacity limit, so no token is dropped.

The rows of each expert are gathered into blocks of equal size, and the last block is padded with
zeros. A scan multiplies each block by the matrices of its expert. The work is proportional to the
number of chosen experts (plus less than one block per expert), no matter how unevenly the router
distributes tokens. `jax.lax.ragged_dot` computes the same result, but on a CPU it multiplies every
row by every expert, which takes five to six times as long with 2 of 8 experts
(benchmarks/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.config import ModelConfig
from transformer_jax.config.experts import Experts
from transformer_jax.models.adapters import AdaptedKernel, product
from transformer_jax.models.functional import F32, activate, gated
from transformer_jax.models.layers import FeedForward, Linear, branch_std, parameter, refuse_surplus
from transformer_jax.models.module import Module
from transformer_jax.models.places import Visit
from transformer_jax.models.quantized import QuantizedKernel
from transformer_jax.sharding import Axis, axis_names, by_compiler, split, vary
from transformer_jax.tracing import are_concrete

LARGEST_BLOCK = 256
"""Maximum number of rows per product with an expert. Larger blocks are not faster on a CPU."""


ROUTED = "routed"
"""Collection that contains the router logits of each block, f32[B, T, E], or f32[L, B, T, E] for a
scanned stack. It is returned by `apply(..., mutable=[ROUTED])`."""


Matrix = tuple[jax.Array | QuantizedKernel | AdaptedKernel, jax.Array | None]
"""Kernels [E, D, F] and biases [E, F] of one linear layer for all experts, or the kernel [D, F] and
bias [F] of a single expert."""


def route(
    experts: Experts,
    logits: jax.Array,  # f32[..., E]
    bias: jax.Array | None = None,  # f32[E], see `Experts.selection_bias`
) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token, most likely first, and their weights.

    Returns:
        The experts i32[..., k] and their weights f32[..., k].
    """
    score = jax.nn.softmax if experts.score == "softmax" else jax.nn.sigmoid
    ranked = logits  # not the scores, because scores near 0 and 1 may tie
    if bias is not None:
        ranked = score(logits) + bias.astype(F32).reshape(*(1,) * (logits.ndim - 1), -1)
    elif experts.group_best > 1:  # a sum of logits would rank groups differently
        ranked = score(logits)
    if experts.groups > 1:
        of_group = ranked.reshape(*ranked.shape[:-1], experts.groups, -1)
        best = jax.lax.top_k(of_group, experts.group_best)[0].sum(axis=-1)
        groups = jax.lax.top_k(jax.lax.stop_gradient(best), experts.top_groups)[1]
        kept = jax.nn.one_hot(groups, experts.groups, dtype=bool).any(axis=-2)
        ranked = jnp.where(kept[..., None], of_group, -jnp.inf).reshape(ranked.shape)
    # the choice has no gradient; the router learns through the weights of the chosen experts
    chosen = jax.lax.top_k(jax.lax.stop_gradient(ranked), experts.top_k)[1]
    if experts.score == "softmax" and experts.normalize:
        weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=-1))
    else:
        weights = jnp.take_along_axis(score(logits), chosen, axis=-1)
        if experts.normalize:
            # 1e-20, as in DeepSeek-V3's code, because all chosen sigmoids may round to 0
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    has_nan = jnp.isnan(logits).any(axis=-1, keepdims=True)  # top_k may skip a NaN
    return chosen, jnp.where(has_nan, jnp.nan, experts.scale * weights)


def router_losses(
    experts: Experts,
    logits: jax.Array,  # f32[B, T, E], for one block
    valid: jax.Array | None = None,  # bool[B, T], the tokens that count
) -> tuple[jax.Array, jax.Array]:
    """Return the balance loss E sum_e f_e P_e and the z-loss of a block, without coefficients.

    The choices are counted from the logits, without the `selection_bias`.
    """

    def both(
        logits: jax.Array, valid: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:  # f32[], f32[]
        chosen, _ = route(experts, logits)
        # f_e and P_e of the Switch Transformer (Fedus et al. 2021, 2.2), with k choices per token
        chosen = jax.nn.one_hot(chosen, experts.count, dtype=F32).sum(axis=-2)  # [B, T, E]
        # the z-loss keeps logits small, because bfloat16 would round large ones (Zoph et al. 2022)
        probabilities, z = jax.nn.softmax(logits), jax.nn.logsumexp(logits, axis=-1) ** 2
        if valid is None:
            f, P, z = chosen.mean((0, 1)), probabilities.mean((0, 1)), z.mean()
        else:
            share = valid.astype(F32) / jnp.maximum(valid.sum(), 1)
            f, P = (jnp.einsum("BT,BTE->E", share, x) for x in (chosen, probabilities))
            z = (share * z).sum()
        return experts.count * (f * P).sum(), z

    return by_compiler(both, [logits, valid], PartitionSpec())


def router_loss(
    experts: Experts, logits: Sequence[jax.Array], valid: Sequence[jax.Array | None]
) -> jax.Array:
    """Return the auxiliary training loss of the experts, f32[], averaged over the blocks.

    Args:
        experts: the config of the experts.
        logits: router logits, f32[B, T, E] for each block, or f32[L, B, T, E] for a scanned stack.
        valid: for each array in `logits`, a mask bool[B, T] of the tokens that count; None means
            all.
    """
    losses = []
    for each, mask in zip(logits, valid, strict=True):
        blocks = each if each.ndim == 4 else each[None]
        losses += [router_losses(experts, block, mask) for block in blocks]
    balance, z = (sum(part) / len(losses) for part in zip(*losses, strict=True))
    return jnp.asarray(experts.balance_loss * balance + experts.z_loss * z)


def block_size(rows: int, count: int) -> int:
    """Return the number of rows per block: a power of 2, at most half the average per expert."""
    size = 1
    while 4 * size * count <= rows and size < LARGEST_BLOCK:
        size *= 2
    return size


def by_expert(
    function: Callable[..., jax.Array],
    rows: jax.Array,  # [N, W]
    chosen: jax.Array,  # i32[N]
    matrices: tuple[Matrix, ...],  # leaves have a leading axis E
    key: jax.Array | None = None,
    shard: tuple[jax.Array, int] | None = None,
) -> jax.Array:  # [N, W']
    """Apply `function(x, matrices, key)` to blocks of rows that share an expert's matrices.

    If `matrices` contains only a shard of the experts, `shard` specifies the index of the first
    expert in the shard and the total number of experts. The results for rows of other experts are
    zero.
    """
    count, size = jax.tree.leaves(matrices)[0].shape[0], rows.shape[0]
    elsewhere, total = None, count
    if shard is not None:
        first, total = shard
        chosen = chosen - first
        elsewhere = (chosen < 0) | (chosen >= count)
        chosen = jnp.where(elsewhere, count, chosen)
    block = block_size(size, total) if are_concrete(size) else 1  # an export for any batch size
    if block == 1:
        slots, of_block = jnp.arange(size), chosen
    else:
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=count)  # number of rows of each expert
        ends = jnp.cumsum(-(-sizes // block))  # index after each expert's last block
        number = jnp.arange(size) - (jnp.cumsum(sizes) - sizes)[chosen[order]]  # within its expert
        # Python's division rounds down, so `sizes // -block` is minus the number of the expert's
        # blocks.
        begin = (ends + sizes // -block)[chosen[order]]
        slots = jnp.zeros(size, jnp.int32).at[order].set(begin * block + number)
        # The number of blocks must be static. Each expert pads at most block - 1 rows.
        at = jnp.arange((size + count * (block - 1)) // block)
        of_block = jnp.searchsorted(ends, at, side="right")
        if elsewhere is None:  # unused blocks read the matrices of the last expert again
            of_block = jnp.minimum(of_block, jnp.max(chosen))
        else:
            slots = jnp.where(elsewhere, at.size * block + jnp.arange(size), slots)
    blocks = of_block.shape[0]
    padded = jnp.zeros((blocks * block, rows.shape[1]), rows.dtype)
    padded = padded.at[slots].set(rows, unique_indices=True)  # drops slots that are out of range
    keys = None if key is None else jax.random.split(key, blocks)

    def step(
        _: None, part: tuple[jax.Array, jax.Array, jax.Array | None]
    ) -> tuple[None, jax.Array]:
        x, expert, block_key = part

        def index(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False)

        arguments = x, jax.tree.map(index, matrices), block_key
        if elsewhere is None:
            return None, function(*arguments)
        out = jax.eval_shape(function, *arguments)
        zeros = vary(jnp.zeros(out.shape, out.dtype), arguments[:2])
        return None, jax.lax.cond(expert < count, function, lambda *_: zeros, *arguments)

    parts = padded.reshape(blocks, block, rows.shape[1]), of_block, keys
    # recompute in the backward pass; otherwise, a copy of the matrices would be saved for each
    # block
    step = jax.checkpoint(step, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable)
    found = jax.lax.scan(step, None, parts)[1]
    found = found.reshape(padded.shape[0], found.shape[-1])
    return found.at[slots].get(mode="fill", fill_value=0)


def _over_devices(
    each: Callable[..., jax.Array],
    x: jax.Array,  # [B, T, D], or [B, T, k, F]
    chosen: jax.Array,  # i32[B, T, k]
    matrices: tuple[Matrix, ...],
    key: jax.Array | None,
    *,
    rows: Axis,
    experts: Axis,
) -> jax.Array:  # [B, T, k, ...]
    """Run `each` on a mesh whose `experts` axes shard the matrices and whose `rows` axes shard B.

    Each device applies its own experts to the rows of all devices along the `experts` axes, and the
    results are summed. Along the other axes, the matrices are gathered before the scan, so that no
    block has to wait.
    """
    axes = axis_names(experts)
    others = tuple(name for name in axis_names(rows) if name not in axes) or None

    def part(
        x: jax.Array, chosen: jax.Array, matrices: tuple[Matrix, ...], key: jax.Array | None
    ) -> jax.Array:
        shards, at = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
        count = jax.tree.leaves(matrices)[0].shape[0]
        key = None if key is None else jax.random.fold_in(key, at)
        x, matrices, key = vary((x, matrices, key))  # sum gradients after the loop, not in it
        y = each(x, chosen, matrices, key, shard=(at * count, shards * count))
        return jax.lax.psum(y, axes)

    by_rows = PartitionSpec(others)
    specs = by_rows, by_rows, PartitionSpec(axes), PartitionSpec()
    return jax.shard_map(part, in_specs=specs, out_specs=by_rows)(x, chosen, matrices, key)


class ExpertMatrix(Module):
    """One matrix and one bias per expert."""

    config: ModelConfig
    shape: tuple[int, int, int]  # [E, D, F]
    std: float

    @nn.compact
    def __call__(self) -> Matrix:
        cfg = self.config
        kernel = parameter(self, "kernel", nn.initializers.normal(self.std), self.shape)
        bias = None
        if cfg.use_bias if cfg.ff_bias is None else cfg.ff_bias:
            shape = self.shape[0], self.shape[2]
            bias = parameter(self, "bias", nn.initializers.zeros, shape).astype(cfg.dtype)
        refuse_surplus(self)
        if isinstance(kernel, jax.Array):
            kernel = kernel.astype(cfg.dtype)
        return kernel, bias


class ExpertFeedForward(Module):
    """Mixture of experts: sum_e w_e f_e(x) over the experts that the router chooses.

    The sum is computed in f32. Each f_e is a feed-forward layer with the config's activation. The
    router's product is always computed in f32 (Fedus et al. 2021, section 2.4).
    """

    config: ModelConfig
    depth: int | None = None
    """Number of blocks in the stack; None means num_layers."""

    @nn.compact
    def __call__(
        self, x: jax.Array, key: jax.Array | None = None, visit: Visit | None = None
    ) -> jax.Array:  # [B, T, D] -> [B, T, D]
        cfg, visit = self.config, Visit() if visit is None else visit
        experts = cfg.experts
        assert experts is not None
        in_f32 = replace(cfg, dtype="float32")
        router = Linear(in_f32, (experts.count,), use_bias=experts.router_bias, name="router")
        logits = visit("feed_forward/router", router(x.astype(F32), key))
        # Otherwise, `init` would return the logits as a second collection next to the parameters.
        if not self.is_initializing():
            self.sow(ROUTED, "logits", logits, init_fn=tuple)
        bias = None
        if experts.selection_bias:
            bias = parameter(self, "selection_bias", nn.initializers.zeros, (experts.count,))
        by_row = split(logits, slice(2))
        chosen, weights = by_compiler(partial(route, experts), [logits, bias], by_row)

        wide, narrow = (experts.count, cfg.d_model, cfg.expert_dim), branch_std(cfg, self.depth)
        up = ExpertMatrix(cfg, wide, cfg.init_std, name="up")()
        inner = (up, ExpertMatrix(cfg, wide, cfg.init_std, name="gate")()) if cfg.glu else (up,)
        shape = experts.count, cfg.expert_dim, cfg.d_model
        down = ExpertMatrix(cfg, shape, narrow, name="down")()
        shared = None
        if experts.shared_d_ff is not None:
            plain = replace(cfg, experts=None, d_ff=experts.shared_d_ff)
            shared = FeedForward(plain, self.depth, name="shared")(x, key)
            if experts.shared_gate:
                gate = Linear(in_f32, (1,), use_bias=False, name="shared_gate")
                shared = (jax.nn.sigmoid(gate(x.astype(F32), key)) * shared).astype(x.dtype)
        refuse_surplus(self)

        def each(
            function: Callable[..., jax.Array],
            x: jax.Array,  # [B, T, D], or [B, T, k, F]
            chosen: jax.Array,
            matrices: tuple[Matrix, ...],
            key: jax.Array | None,
            shard: tuple[jax.Array, int] | None = None,
        ) -> jax.Array:  # [B, T, k, ...]
            if x.ndim == chosen.ndim:
                x = jnp.broadcast_to(x[:, :, None], (*chosen.shape, x.shape[-1]))
            x = x.reshape(chosen.size, x.shape[-1])
            y = by_expert(function, x, chosen.ravel(), matrices, key, shard)
            return y.reshape(*chosen.shape, y.shape[-1])

        def run(function: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
            call = partial(each, function)
            if axis := split(jax.tree.leaves(up)[0])[0]:
                call = partial(_over_devices, call, rows=split(chosen)[0], experts=axis)
            return by_compiler(call, [*arrays, key], split(chosen))

        x = x.astype(cfg.dtype)
        hidden, out = partial(_hidden, cfg), partial(_linear, "down", cfg.invariant)
        if "feed_forward/hidden" in visit.requested:
            y = visit("feed_forward/hidden", run(hidden, x, chosen, inner))
            y = run(out, y, chosen, (down,))
        else:  # run both layers in one scan
            both = lambda x, each, key: out(hidden(x, each[:-1], key), each[-1:], key)  # noqa: E731
            y = run(both, x, chosen, (*inner, down))
        y = (weights[..., None] * y.astype(F32)).sum(axis=-2).astype(x.dtype)
        return visit("feed_forward/output", y if shared is None else y + shared)


def _linear(
    name: str, invariant: bool, x: jax.Array, matrices: tuple[Matrix, ...], key: jax.Array | None
) -> jax.Array:  # [N, W] -> [N, W']
    kernel, bias = matrices[0]
    if isinstance(kernel, AdaptedKernel) and kernel.rows is not None:
        raise ValueError("rows are not supported for experts: each expert has a single adapter")
    return product(x, kernel, bias, 1, key, name, invariant=invariant)


def _hidden(
    config: ModelConfig, x: jax.Array, matrices: tuple[Matrix, ...], key: jax.Array | None
) -> jax.Array:  # [N, D] -> [N, F]
    hidden = _linear("up", config.invariant, x, matrices[:1], key)
    if not config.glu:
        return activate(hidden, config.activation)
    gate = _linear("gate", config.invariant, x, matrices[1:], key)
    return gated(gate, hidden, config.activation, config.glu_limit, config.glu_unit_offset)
