"""Mixers with a state of fixed size instead of keys and values: Gated DeltaNet and convolutions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.attention.linear import causal_conv, gated_delta_rule
from transformer_jax.cache import state_cache
from transformer_jax.cache.state_cache import StateCache
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
        mixed, tail = causal_conv(
            by_compiler(_joined, projected, PartitionSpec(rows, length)),
            jnp.concatenate([self.query_conv, self.key_conv, self.value_conv], axis=1),
            initial_state=None if cache is None else cache.tail,
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
        heads, state = mix(**named, initial_state=None if cache is None else cache.state, **tokens)
        visit("gated_delta/state", state)
        eps = cfg.norm_eps if sizes.norm_eps is None else sizes.norm_eps
        heads = norm(heads, self.head_scale.astype(F32), None, eps, centred=False)
        latent = x if sizes.gate_rank is None else self.gate_latent(x, dropout_key)
        activation = jax.nn.silu if sizes.gate_activation == "silu" else jax.nn.sigmoid
        gate = lambda heads, z: heads * activation(z.astype(F32))  # noqa: E731
        heads = by_compiler(gate, [heads, self.gate(latent, dropout_key)], split(heads))
        heads = visit("gated_delta/heads", heads.astype(x.dtype))
        y = visit("gated_delta/output", self.out(heads, dropout_key))
        if cache is None:
            return y, None
        assert positions is not None
        return y, state_cache.advance(cache, state, tail, positions)


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
        mixed, tail = causal_conv(
            gate * up,
            self.conv,
            self.conv_bias if self.config.short_conv.conv_bias else None,
            segments=segments,
            valid=None if positions is None else positions >= 0,
            initial_state=None if cache is None else cache.tail,
            return_state=True,
        )
        hidden = visit("short_conv/hidden", output_gate * mixed)
        y = visit("short_conv/output", self.down(hidden, dropout_key))
        if cache is None:
            return y, None
        assert positions is not None
        return y, state_cache.advance(cache, None, tail, positions)


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
