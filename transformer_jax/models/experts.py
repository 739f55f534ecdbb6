"""Give each token to a few of many feed-forwards: a mixture of experts, without a capacity.

The rows of each expert are gathered into blocks of one size, the last of them filled up with zeros,
and a scan multiplies block after block with its expert's matrices. So the work is that of the
chosen experts, up to less than a block for each, whatever the router does, and no token is dropped.
`jax.lax.ragged_dot` computes the same; on a CPU it multiplies every row with every expert, which
takes five to six times as long with 2 of 8 (benchmarks/NOTES.md).
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
from transformer_jax.tracing import known_sizes

LARGEST_BLOCK = 256
"""Rows that are multiplied with an expert at a time; more make no product faster on a CPU."""


ROUTED = "routed"
"""The collection in which `apply(..., mutable=[ROUTED])` returns the router's logits of all blocks,
f32[B, T, E], or f32[L, B, T, E] of a scanned stack."""


Matrix = tuple[jax.Array | QuantizedKernel | AdaptedKernel, jax.Array | None]
"""The kernels [E, D, F] and the biases [E, F] of a linear layer of all experts; in a block of rows,
the kernel [D, F] and the bias [F] of its expert."""


def route(
    experts: Experts,
    logits: jax.Array,  # f32[..., E]
    bias: jax.Array | None = None,  # f32[E], of which `selection_bias` says more
) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token, the likeliest first, and their weights.

    Returns:
        i32[..., k] and f32[..., k].
    """
    ranked = logits  # in the order of the scores, of which those near 0 and 1 may be equal
    if bias is not None:
        own = bias.astype(F32).reshape(*(1,) * (logits.ndim - 1), -1)
        ranked = _probabilities(experts, logits) + own
    # the choice has no gradient: the router learns by the weights of those that are chosen
    chosen = jax.lax.top_k(jax.lax.stop_gradient(ranked), experts.top_k)[1]
    if experts.score == "softmax" and experts.normalize:
        weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=-1))
    else:
        weights = jnp.take_along_axis(_probabilities(experts, logits), chosen, axis=-1)
        if experts.normalize:
            # as in DeepSeek-V3's code: all sigmoids that are chosen may round to 0
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    unknown = jnp.isnan(logits).any(axis=-1, keepdims=True)  # top_k may pass over NaN
    return chosen, jnp.where(unknown, jnp.nan, experts.scale * weights)


def _probabilities(experts: Experts, logits: jax.Array) -> jax.Array:
    return jax.nn.softmax(logits) if experts.score == "softmax" else jax.nn.sigmoid(logits)


def router_losses(
    experts: Experts,
    logits: jax.Array,  # f32[B, T, E], of one block
    valid: jax.Array | None = None,  # bool[B, T]: tokens that count
) -> tuple[jax.Array, jax.Array]:
    """Return the balance loss E sum_e f_e P_e and the z loss of a block, without coefficients.

    Experts are counted as the logits order them, before any `selection_bias`.
    """

    def both(
        logits: jax.Array, valid: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:  # f32[], f32[]
        chosen, _ = route(experts, logits)
        # f_e and P_e of the Switch Transformer (Fedus et al. 2021, 2.2), with k choices of a token
        taken = jax.nn.one_hot(chosen, experts.count, dtype=F32).sum(axis=-2)  # [B, T, E]
        # the z loss keeps logits small, whose differences bfloat16 would lose (Zoph et al. 2022)
        probabilities, z = jax.nn.softmax(logits), jax.nn.logsumexp(logits, axis=-1) ** 2
        if valid is None:
            used, mean, z = taken.mean((0, 1)), probabilities.mean((0, 1)), z.mean()
        else:
            share = valid.astype(F32) / jnp.maximum(valid.sum(), 1)
            used, mean = (jnp.einsum("BT,BTE->E", share, x) for x in (taken, probabilities))
            z = (share * z).sum()
        return experts.count * (used * mean).sum(), z

    return by_compiler(both, [logits, valid], PartitionSpec())


def router_loss(
    experts: Experts, logits: Sequence[jax.Array], valid: Sequence[jax.Array | None]
) -> jax.Array:
    """Return what experts add to the loss of training, averaged over the blocks: f32[].

    Args:
        experts: of the config.
        logits: of the router, f32[B, T, E] of a block or f32[L, B, T, E] of a scanned stack.
        valid: of each, bool[B, T]: tokens that count; None is all.
    """
    found = []
    for given, real in zip(logits, valid, strict=True):
        blocks = given if given.ndim == 4 else given[None]
        found += [router_losses(experts, block, real) for block in blocks]
    balance, z = (sum(part) / len(found) for part in zip(*found, strict=True))
    return jnp.asarray(experts.balance_loss * balance + experts.z_loss * z)


def block_size(rows: int, count: int) -> int:
    """Return how many rows of an expert make a block: at most half of what one has on average."""
    size = 1
    while 4 * size * count <= rows and size < LARGEST_BLOCK:
        size *= 2
    return size


def by_expert(
    function: Callable[..., jax.Array],
    rows: jax.Array,  # [N, W]
    chosen: jax.Array,  # i32[N]
    matrices: tuple[Matrix, ...],  # leaves lead with E
    key: jax.Array | None = None,
    held: tuple[jax.Array, int] | None = None,
) -> jax.Array:  # [N, W']
    """Return `function(x, matrices of its expert, key)` of each row x; it is called with blocks.

    Where the matrices are those of a part of the experts, `held` is the number of the part's first
    one and how many there are in all: rows of the others are not multiplied, and come to zero.
    """
    count, size = jax.tree.leaves(matrices)[0].shape[0], rows.shape[0]
    elsewhere, total = None, count
    if held is not None:
        first, total = held
        chosen = chosen - first
        elsewhere = (chosen < 0) | (chosen >= count)
        chosen = jnp.where(elsewhere, count, chosen)
    block = block_size(size, total) if known_sizes(size) else 1  # of an export with any batch
    if block == 1:
        slots, of_block = jnp.arange(size), chosen
    else:
        order = jnp.argsort(chosen)
        owned = jnp.bincount(chosen, length=count)
        ends = jnp.cumsum(-(-owned // block))  # of each expert's blocks
        number = jnp.arange(size) - (jnp.cumsum(owned) - owned)[chosen[order]]  # within its expert
        begin = (ends + owned // -block)[chosen[order]]
        slots = jnp.zeros(size, jnp.int32).at[order].set(begin * block + number)
        at = jnp.arange((size + count * (block - 1)) // block)
        of_block = jnp.searchsorted(ends, at, side="right")
        if elsewhere is None:  # blocks without a row read the last expert once more
            of_block = jnp.minimum(of_block, jnp.max(chosen))
        else:
            slots = jnp.where(elsewhere, at.size * block + jnp.arange(size), slots)
    blocks = of_block.shape[0]
    padded = jnp.zeros((blocks * block, rows.shape[1]), rows.dtype)
    padded = padded.at[slots].set(rows, unique_indices=True)  # none that lies outside
    keys = None if key is None else jax.random.split(key, blocks)

    def step(
        _: None, part: tuple[jax.Array, jax.Array, jax.Array | None]
    ) -> tuple[None, jax.Array]:
        x, expert, own_key = part

        own = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), matrices
        )
        if elsewhere is None:
            return None, function(x, own, own_key)
        none = jax.eval_shape(function, x, own, own_key)
        zeros = vary(jnp.zeros(none.shape, none.dtype), (x, own))
        return None, jax.lax.cond(expert < count, function, lambda *_: zeros, x, own, own_key)

    parts = padded.reshape(blocks, block, rows.shape[1]), of_block, keys
    # the backward pass takes the matrices again, or it would keep a copy of them for each block
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
    """Return `each` of a mesh whose axes `experts` split the matrices, and `rows` the rows B.

    Every device computes with its own experts for the rows of all devices along `experts`, and the
    results are summed over them. Along other axes the matrices are gathered before the blocks are
    multiplied: no block waits for another device.
    """
    mine = axis_names(experts)
    others = tuple(name for name in axis_names(rows) if name not in mine) or None

    def part(
        x: jax.Array, chosen: jax.Array, matrices: tuple[Matrix, ...], key: jax.Array | None
    ) -> jax.Array:
        shards, at = jax.lax.axis_size(mine), jax.lax.axis_index(mine)
        count = jax.tree.leaves(matrices)[0].shape[0]
        key = None if key is None else jax.random.fold_in(key, at)
        x, matrices, key = vary((x, matrices, key))  # their gradients are summed outside of a loop
        y = each(x, chosen, matrices, key, held=(at * count, shards * count))
        return jax.lax.psum(y, mine)

    by_rows = PartitionSpec(others)
    specs = by_rows, by_rows, PartitionSpec(mine), PartitionSpec()
    return jax.shard_map(part, in_specs=specs, out_specs=by_rows)(x, chosen, matrices, key)


class ExpertMatrix(Module):
    """Declare a matrix of each expert, and its bias."""

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
    """Return sum_e w_e f_e(x) over the experts that the router chooses for x, in f32 sums.

    Each f_e is a feed-forward as the config has it. The router's product is computed in f32
    whatever the compute dtype (Fedus et al. 2021, 2.4).
    """

    config: ModelConfig
    depth: int | None = None
    """Blocks of the stack it stands in; None is num_layers."""

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
            held: tuple[jax.Array, int] | None = None,
        ) -> jax.Array:  # [B, T, k, ...]
            if x.ndim == chosen.ndim:
                x = jnp.broadcast_to(x[:, :, None], (*chosen.shape, x.shape[-1]))
            x = x.reshape(chosen.size, x.shape[-1])
            y = by_expert(function, x, chosen.ravel(), matrices, key, held)
            return y.reshape(*chosen.shape, y.shape[-1])

        def of_chosen(function: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
            found = partial(each, function)
            if parts := split(jax.tree.leaves(up)[0])[0]:
                rows = split(chosen)[0]
                found = partial(_over_devices, found, rows=rows, experts=parts)
            return by_compiler(found, [*arrays, key], split(chosen))

        x = x.astype(cfg.dtype)
        hidden, out = partial(_hidden, cfg), partial(_linear, "down")
        if "feed_forward/hidden" in visit.asked:
            y = visit("feed_forward/hidden", of_chosen(hidden, x, chosen, inner))
            y = of_chosen(out, y, chosen, (down,))
        else:
            both = lambda x, own, key: out(hidden(x, own[:-1], key), own[-1:], key)  # noqa: E731
            y = of_chosen(both, x, chosen, (*inner, down))
        y = (weights[..., None] * y.astype(F32)).sum(axis=-2).astype(x.dtype)
        return visit("feed_forward/output", y if shared is None else y + shared)


def _linear(
    name: str, x: jax.Array, matrices: tuple[Matrix, ...], key: jax.Array | None
) -> jax.Array:  # [N, W] -> [N, W']
    kernel, bias = matrices[0]
    if isinstance(kernel, AdaptedKernel) and kernel.rows is not None:
        raise ValueError(
            "rows choose adapters of a row of the batch: experts have one adapter each"
        )
    return product(x, kernel, bias, 1, key, name)


def _hidden(
    config: ModelConfig, x: jax.Array, matrices: tuple[Matrix, ...], key: jax.Array | None
) -> jax.Array:  # [N, D] -> [N, F]
    hidden = _linear("up", x, matrices[:1], key)
    if not config.glu:
        return activate(hidden, config.activation)
    gate = _linear("gate", x, matrices[1:], key)
    return gated(gate, hidden, config.activation, config.glu_limit, config.glu_unit_offset)
