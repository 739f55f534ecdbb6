"""Mixers with a state of fixed size instead of keys and values: Gated DeltaNet and convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.attention.linear import causal_conv, gated_delta_rule
from transformer_jax.cache import state_cache
from transformer_jax.cache.state_cache import PendingTokens, StateCache
from transformer_jax.config import ModelConfig
from transformer_jax.models.functional import F32
from transformer_jax.models.layers import Linear, branch_std, parameter, refuse_surplus
from transformer_jax.models.module import Module
from transformer_jax.models.ops import norm
from transformer_jax.models.places import Visit
from transformer_jax.sharding import by_compiler, split

L2_EPS = 1e-6
"""Number added to the sum of squares of a query or key, under the root."""


class GatedDeltaNet(Module):
    """Gated delta rule with a short convolution and a gated norm (Yang et al. 2024, section 3.4).

        q, k, v = silu(conv(W_q x, W_k x, W_v x));  q, k = q / |q|, k / |k|
        beta = sigmoid(W_b x) (2 sigmoid(W_b x) with `negative_eigenvalues`)
        decay = -exp(decay_rate) softplus(W_a x + decay_bias)
        out = W_o (norm(gated_delta_rule(q, k, v, decay, beta)) silu(W_z x))

    The parameters are named query, key, value (W_q, W_k, W_v), beta (W_b), decay (W_a), gate (W_z)
    and out (W_o). With `decay_rank` (Kimi Team 2025, Kimi Linear), each channel of a key has its
    own decay, and W_a is the product of decay and decay_latent. With `gate_rank`, W_z is that of
    gate and gate_latent. Padding leaves the state and the convolution unchanged.
    """

    config: ModelConfig
    depth: int | None = None
    """Number of blocks in the stack; None means num_layers."""

    def setup(self) -> None:
        cfg, sizes = self.config, self.config.gated_delta
        assert sizes is not None
        linear = partial(Linear, cfg, use_bias=False)
        heads, values = sizes.num_key_heads, sizes.num_value_heads
        self.query, self.key = linear((heads, sizes.key_dim)), linear((heads, sizes.key_dim))
        self.value, self.gate = (linear((values, sizes.value_dim)) for _ in range(2))
        decays = (values,) if sizes.decay_rank is None else (values, sizes.key_dim)
        self.beta, self.decay = linear((values,)), linear(decays)
        if sizes.decay_rank is not None:
            self.decay_latent = linear((sizes.decay_rank,))
        if sizes.gate_rank is not None:
            self.gate_latent = linear((sizes.gate_rank,))
        self.out = linear((cfg.d_model,), 2, std=branch_std(cfg, self.depth))
        for name, width in (
            ("query_conv", heads * sizes.key_dim),
            ("key_conv", heads * sizes.key_dim),
            ("value_conv", values * sizes.value_dim),
        ):
            setattr(self, name, _conv_weight(self, name, sizes.conv_width, width))
        self.decay_rate = parameter(self, "decay_rate", _decay_rates, (values,))
        self.decay_bias = parameter(self, "decay_bias", _decay_biases, decays)
        ones = nn.initializers.ones
        self.head_scale = parameter(self, "head_scale", ones, (sizes.value_dim,))
        refuse_surplus(self)

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative means padding
        segments: jax.Array | None = None,  # i32[B, T]
        cache: StateCache | None = None,
        dropout_key: jax.Array | None = None,
        visit: Visit | None = None,
    ) -> tuple[jax.Array, StateCache | None]:
        """Mix each token of x with the earlier tokens of its document and return the new cache."""
        cfg, sizes = self.config, self.config.gated_delta
        assert sizes is not None
        visit = Visit() if visit is None else visit
        valid = None if positions is None else positions >= 0
        tokens: Any = dict(segments=segments, valid=valid)
        projected = [f(x, dropout_key) for f in (self.query, self.key, self.value)]
        rows, length, _ = split(x)
        inputs = by_compiler(_joined, projected, PartitionSpec(rows, length))
        mixed, tail = causal_conv(
            inputs,
            jnp.concatenate([self.query_conv, self.key_conv, self.value_conv], axis=1),
            initial_state=None if cache is None else _last_inputs(cache),
            return_state=True,
            **tokens,
        )
        separate = partial(_separated, shapes=[y.shape for y in projected])
        q, k, v = by_compiler(separate, [mixed], tuple(map(split, projected)))
        beta = jax.nn.sigmoid(self.beta(x, dropout_key).astype(F32))
        beta = 2 * beta if sizes.negative_eigenvalues else beta
        latent = x if sizes.decay_rank is None else self.decay_latent(x, dropout_key)
        steps = self.decay(latent, dropout_key)
        decay = by_compiler(_decays, [steps, self.decay_bias, self.decay_rate], split(steps))
        named: Any = dict(query=q, key=k, value=v, decay=decay, beta=beta)
        named = {name: visit(f"gated_delta/{name}", y) for name, y in named.items()}
        mix: Any = partial(gated_delta_rule, return_state=True)
        # as in attention, only the values between the queries and the output are recomputed
        mix = jax.checkpoint(mix) if cfg.remat == "attention" else mix
        if cache is None or cache.pending is None:
            state = None if cache is None else cache.state
            heads, state = mix(**named, initial_state=state, **tokens)
            if cache is not None:
                assert positions is not None
                cache = state_cache.advance(cache, state, tail, positions)
        else:
            by_row: Any = jax.tree.map(split, cache)
            results = split(named["value"]), by_row.state, by_row
            arrays = [cache, positions, inputs, named]
            heads, state, cache = by_compiler(partial(_mix_pending, mix), arrays, results)
        visit("gated_delta/state", state)
        eps = cfg.norm_eps if sizes.norm_eps is None else sizes.norm_eps
        heads = norm(heads, self.head_scale.astype(F32), None, eps, centred=False)
        latent = x if sizes.gate_rank is None else self.gate_latent(x, dropout_key)
        activation = jax.nn.silu if sizes.gate_activation == "silu" else jax.nn.sigmoid
        gate = lambda heads, z: heads * activation(z.astype(F32))  # noqa: E731
        heads = by_compiler(gate, [heads, self.gate(latent, dropout_key)], split(heads))
        heads = visit("gated_delta/heads", heads.astype(x.dtype))
        y = visit("gated_delta/output", self.out(heads, dropout_key))
        return y, cache


def _last_inputs(cache: StateCache) -> jax.Array:  # [B, W - 1, C]
    """Return the last inputs of the convolution, including those of pending tokens."""
    if cache.pending is None:
        return cache.tail

    def last(tail: jax.Array, inputs: jax.Array, count: jax.Array) -> jax.Array:
        at = count[:, None] + _up_to(tail.shape[1])
        return _at(jnp.concatenate([tail, inputs], axis=1), at)

    arrays = [cache.tail, cache.pending.inputs, cache.pending.count]
    found: jax.Array = by_compiler(last, arrays, split(cache.tail))
    return found


def _in_sequence(
    pending: PendingTokens,
    valid: jax.Array,  # bool[B, T]
) -> tuple[jax.Array, jax.Array]:  # bool[B, R + T], i32[B, R + T]
    """Return which pending and new tokens exist, and an order without gaps between them."""
    read = _up_to(pending.inputs.shape[1]) < pending.count[:, None]
    read = jnp.concatenate([read, valid], axis=1)
    return read, jnp.argsort(~read, axis=1, stable=True)


def _advance(
    cache: StateCache,
    state: jax.Array | None,  # f32[B, N, H, Hv]
    positions: jax.Array,  # i32[B, T]
    inputs: jax.Array,  # [B, T, C]
) -> StateCache:
    """Return the cache after new tokens. The last R are pending, with only their inputs."""
    pending, R, W = cache.pending, cache.slack, cache.tail.shape[1] + 1
    assert pending is not None
    read, order = _in_sequence(pending, positions >= 0)
    inputs = _at(jnp.concatenate([pending.inputs, inputs.astype(pending.inputs.dtype)], 1), order)
    total = read.sum(axis=1, keepdims=True, dtype=jnp.int32)
    done = jnp.maximum(total - R, 0)
    tail = jnp.concatenate([cache.tail, inputs], axis=1)
    tail = _at(tail, done + _up_to(W - 1))
    inputs = _at(inputs, done + _up_to(R))
    pending = replace(pending, count=(total - done)[:, 0], inputs=inputs)
    return state_cache.advance(cache, state, tail, positions, pending)


def _mix_pending(
    mix: Callable[..., tuple[jax.Array, jax.Array]],
    cache: StateCache,
    positions: jax.Array,  # i32[B, T]
    inputs: jax.Array,  # [B, T, C]
    named: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array, StateCache]:
    """Return the heads of new tokens, the state after them, and the new cache.

    The pending and the new tokens of each row form one sequence, whose last R tokens are pending
    afterwards. The first part of the sequence leads to the cache's new state. The second part is
    computed from there, only for its outputs, and the next call reads it again.
    """
    pending, R, T = cache.pending, cache.slack, positions.shape[1]
    assert pending is not None
    valid = positions >= 0
    read, order = _in_sequence(pending, valid)
    # the outputs of tokens that were pending are known, so their queries are not stored
    query = named["query"]
    old: Any = {name: getattr(pending, name) for name in named if name != "query"}
    old["query"] = jnp.zeros_like(query, shape=(len(query), R, *query.shape[2:]))
    found = {
        name: _at(jnp.concatenate([old[name], x.astype(old[name].dtype)], axis=1), order)
        for name, x in named.items()
    }
    rank = jnp.cumsum(read, axis=1, dtype=jnp.int32)
    total = rank[:, -1:]
    done = jnp.maximum(total - R, 0)  # at most T
    first = {name: x[:, :T] for name, x in found.items()}
    heads, state = mix(**first, valid=_up_to(T) < done, initial_state=cache.state)
    kept = done + _up_to(R)
    last = {name: _at(x, kept) for name, x in found.items()}
    others, final = mix(**last, valid=kept < total, initial_state=state)
    rank = rank[:, R:] - 1
    at = jnp.where(rank < done, rank, rank - done + T)
    heads = _at(jnp.concatenate([heads, others], axis=1), at)
    heads = jnp.where(valid[..., None, None], heads, 0)
    del last["query"]
    cache = _advance(cache, state, positions, inputs)
    assert cache.pending is not None
    return heads, final, replace(cache, pending=replace(cache.pending, **last))


def _up_to(count: int) -> jax.Array:  # i32[1, count]
    return jnp.arange(count, dtype=jnp.int32)[None]


def _at(x: jax.Array, index: jax.Array) -> jax.Array:  # [B, S, ..], i32[B, J] -> [B, J, ..]
    index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)


class GatedShortConv(Module):
    """Short convolution between two gates, which are linear functions of the input (LFM2).

        out = W_down (W_c x * conv(W_b x * W_up x))

    The parameters are named up (W_up), input_gate (W_b), output_gate (W_c), conv and down (W_down).
    With `conv_bias`, the projections and the convolution also have biases. Padding leaves the
    convolution unchanged. Source: Liquid AI 2025, "Liquid Foundation Models v2".
    """

    config: ModelConfig
    depth: int | None = None
    """Number of blocks in the stack; None means num_layers."""

    def setup(self) -> None:
        cfg, sizes = self.config, self.config.short_conv
        assert sizes is not None
        linear = partial(Linear, cfg, (cfg.d_model,), use_bias=sizes.conv_bias)
        self.up, self.input_gate, self.output_gate = linear(), linear(), linear()
        self.down = linear(std=branch_std(cfg, self.depth))
        self.conv = _conv_weight(self, "conv", sizes.conv_width, cfg.d_model)
        if sizes.conv_bias:
            zeros = nn.initializers.zeros
            self.conv_bias = parameter(self, "conv_bias", zeros, (cfg.d_model,))
        refuse_surplus(self)

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative means padding
        segments: jax.Array | None = None,  # i32[B, T]
        cache: StateCache | None = None,
        dropout_key: jax.Array | None = None,
        visit: Visit | None = None,
    ) -> tuple[jax.Array, StateCache | None]:
        """Mix each token of x with the W - 1 tokens before it and return the new cache."""
        visit = Visit() if visit is None else visit
        up, gate, output_gate = (
            visit(f"short_conv/{name}", getattr(self, name)(x, dropout_key))
            for name in ("up", "input_gate", "output_gate")
        )
        assert self.config.short_conv is not None
        inputs = gate * up
        mixed, tail = causal_conv(
            inputs,
            self.conv,
            self.conv_bias if self.config.short_conv.conv_bias else None,
            segments=segments,
            valid=None if positions is None else positions >= 0,
            initial_state=None if cache is None else _last_inputs(cache),
            return_state=True,
        )
        hidden = visit("short_conv/hidden", output_gate * mixed)
        y = visit("short_conv/output", self.down(hidden, dropout_key))
        if cache is None:
            return y, None
        assert positions is not None
        if cache.pending is None:
            return y, state_cache.advance(cache, None, tail, positions)
        arrays = [cache, None, positions, inputs]
        return y, by_compiler(_advance, arrays, jax.tree.map(split, cache))


def _conv_weight(module: Module, name: str, width: int, channels: int) -> jax.Array:  # [W, C]
    """Declare a convolution's weight, which initially keeps the variance of its inputs."""
    return parameter(module, name, nn.initializers.normal(width**-0.5), (width, channels))


def _joined(*heads: jax.Array) -> jax.Array:  # [B, T, N, H] each -> [B, T, C]
    return jnp.concatenate(
        [x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]) for x in heads], axis=-1
    )


def _separated(x: jax.Array, shapes: list[tuple[int, ...]]) -> tuple[jax.Array, ...]:
    """Return f32 queries, keys and values of these shapes, with norm 1 for queries and keys."""
    ends = np.cumsum([math.prod(shape[2:]) for shape in shapes])[:-1]
    parts = jnp.split(jax.nn.silu(x.astype(F32)), ends, axis=-1)
    q, k, v = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    q, k = (y * jax.lax.rsqrt((y * y).sum(axis=-1, keepdims=True) + L2_EPS) for y in (q, k))
    return q, k, v


def _decays(
    x: jax.Array,  # [B, T, N] or [B, T, N, H]
    bias: jax.Array,  # [N] or [N, H]
    rate: jax.Array,  # [N]
) -> jax.Array:  # f32[B, T, N] or f32[B, T, N, H]
    steps = jax.nn.softplus(x.astype(F32) + bias[None, None].astype(F32))
    rates = rate.reshape(1, 1, -1, *(1,) * (x.ndim - 3))
    return -jnp.exp(rates.astype(F32)) * steps


def _decay_rates(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Draw log A for A from 1 to 16, as in Mamba-2 (Dao and Gu 2024)."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _decay_biases(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Draw the inverse softplus of step sizes from 0.001 to 0.1 with uniform logarithms."""
    low, high = np.log(0.001), np.log(0.1)
    step = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    return step + jnp.log(-jnp.expm1(-step))
