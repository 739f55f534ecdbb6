"""The parts of a transformer: linen modules that name parameters, over pure functions.

Dropout is on exactly when a `key` is given; a module takes its key as an argument, splits it once,
and hands the parts on, so a looped and a scanned stack draw the same numbers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ScopeParamShapeError

from transformer_jax import cache as kv
from transformer_jax import positions as pos
from transformer_jax.arguments import check_key
from transformer_jax.attention import dot_product_attention, dot_product_attention_weights
from transformer_jax.config import Activation, ModelConfig
from transformer_jax.masks import Mask
from transformer_jax.meshes import by_compiler, split

F32 = jnp.float32


def layer_norm(
    x: jax.Array,  # [..., D]
    scale: jax.Array | None,  # [D]
    bias: jax.Array | None,  # [D]
    eps: float = 1e-5,
) -> jax.Array:
    """(x - mean) / sqrt(var + eps) * scale + bias over the last axis, in f32 (Ba et al. 2016)."""

    def normalise(x, scale, bias):
        y = x.astype(jnp.float32)
        y = y - y.mean(axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + eps)
        return _affine(y, scale, bias).astype(x.dtype)

    return by_compiler(normalise, [x, scale, bias], split(x))


def rms_norm(
    x: jax.Array,  # [..., D]
    scale: jax.Array | None,  # [D]
    eps: float = 1e-5,
) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in f32 (Zhang & Sennrich 2019)."""

    def normalise(x, scale):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + eps)
        return _affine(y, scale, None).astype(x.dtype)

    return by_compiler(normalise, [x, scale], split(x))


def _affine(y: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    lead = (1,) * (y.ndim - 1)
    if scale is not None:
        y = y * scale.reshape(*lead, -1)
    if bias is not None:
        y = y + bias.reshape(*lead, -1)
    return y


def activate(x: jax.Array, name: Activation) -> jax.Array:
    """relu, silu, gelu x Phi(x), or GPT-2's gelu_tanh (Hendrycks & Gimpel 2016)."""
    match name:
        case "relu":
            return jax.nn.relu(x)
        case "silu":
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """x / (1 - rate) where kept, 0 elsewhere; x itself without a key (Srivastava et al. 2014)."""
    if key is None or rate == 0.0:
        return x

    def drop(x, key):
        keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))

    return by_compiler(drop, [x, key], split(x))


def split_key(key: jax.Array | None, parts: int) -> list[jax.Array | None]:
    """`parts` keys from one, or as many times None."""
    if key is None:
        return [None] * parts
    check_key("key", key)
    return list(jax.random.split(key, parts))


def parameter(
    module: nn.Module, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...]
) -> jax.Array:
    """`module.param` in f32; of one that is there, only the shape is looked at.

    Flax would trace its initializer to compare them, which is half of all tracing.
    """
    if not module.has_variable("params", name):
        return module.param(name, init, shape, F32)
    value = nn.unbox(module.get_variable("params", name))
    if np.shape(value) != shape:
        path = "/".join(module.path)
        raise ScopeParamShapeError(name, path, np.shape(value), shape)
    return value


class Norm(nn.Module):
    """The config's LayerNorm or RMSNorm, over the last axis."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
        cfg = self.config
        scale = _unit(cfg, parameter(self, "scale", _unit_init(cfg), (x.shape[-1],)))
        if cfg.norm == "rmsnorm":
            return rms_norm(x, scale, cfg.norm_eps)
        bias = None
        if cfg.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, (x.shape[-1],))
        return layer_norm(x, scale, bias, cfg.norm_eps)


def _unit_init(config: ModelConfig) -> Any:
    return nn.initializers.zeros if config.norm_unit_offset else nn.initializers.ones


def _unit(config: ModelConfig, scale: jax.Array) -> jax.Array:
    """What a norm multiplies by, of what it stores; in f32."""
    scale = scale.astype(F32)
    return 1.0 + scale if config.norm_unit_offset else scale


def project(
    x: jax.Array,  # [..., *inputs]
    kernel: jax.Array,  # [*inputs, *outputs]
    bias: jax.Array | None = None,  # [*outputs]
    contract: int = 1,
) -> jax.Array:  # [..., *outputs]
    """x W + b over the last `contract` axes of x.

    One product of two matrices: over a batch of them, XLA's CPU backend computes the gradient of W
    from a transposed copy, which takes a third of a training step. There, from wide to narrow, it
    is the product with a W^T that XLA may not fold away: then the gradient of W is g^T x, which
    has the narrow matrix first and takes two thirds of the time of x^T g. With few rows, as in
    decoding, the copy would cost more than the product.

    One row, there, is 8 products side by side and their sum: W is read at the memory's rate, where
    one product uses a core and a half.
    """
    lead = slice(x.ndim - contract)
    outputs = split(kernel, slice(contract, None))
    return by_compiler(partial(_project, contract), [x, kernel, bias], split(x, lead, outputs))


def _project(contract, x, kernel, bias):
    lead, outputs = x.shape[: x.ndim - contract], kernel.shape[contract:]
    inputs, width, rows = math.prod(kernel.shape[:contract]), math.prod(outputs), math.prod(lead)
    x, kernel = x.reshape(rows, inputs), kernel.reshape(inputs, width)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and rows >= inputs > width:
        across = jax.lax.optimization_barrier(kernel.T)
        y = jax.lax.dot_general(x, across, (((1,), (1,)), ((), ())))
    elif on_cpu and rows == 1 and inputs % 8 == 0 and x.dtype == jnp.float32:
        y = jnp.einsum("PI,PIO->PO", x.reshape(8, -1), kernel.reshape(8, -1, width))
        y = y.sum(axis=0, keepdims=True)
    else:
        y = x @ kernel
    if bias is not None:
        y = y + bias.reshape(1, -1)
    return y.reshape(*lead, *outputs)


class Linear(nn.Module):
    """x W + b in the config's compute dtype, W ~ N(0, std^2), over the last `contract` axes."""

    config: ModelConfig
    features: tuple[int, ...]
    contract: int = 1
    use_bias: bool | None = None
    std: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        std = cfg.init_std if self.std is None else self.std
        shape = (*x.shape[x.ndim - self.contract :], *self.features)
        kernel = parameter(self, "kernel", nn.initializers.normal(std), shape).astype(cfg.dtype)
        bias = None
        if cfg.use_bias if self.use_bias is None else self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, self.features).astype(cfg.dtype)
        return project(x.astype(cfg.dtype), kernel, bias, self.contract)


def branch_std(config: ModelConfig, depth: int | None) -> float:
    """Initial scale of a branch's output matrix: 2 L of them add up in the stream (GPT-2)."""
    return config.init_std / (2 * (config.num_layers if depth is None else depth)) ** 0.5


class Attention(nn.Module):
    """Multi-head attention with MHA, GQA or MQA heads, to itself or to a `context`."""

    config: ModelConfig
    cross: bool = False
    depth: int | None = None
    """Blocks of the stack it stands in; None is num_layers."""
    window: int | None = None
    """The window that its mask has, by which a cache knows what new tokens still see."""

    def setup(self) -> None:
        cfg = self.config
        qkv_bias = cfg.use_bias if cfg.qkv_bias is None else cfg.qkv_bias
        self.query = Linear(cfg, (cfg.num_heads, cfg.key_dim), use_bias=qkv_bias)
        self.key = Linear(cfg, (cfg.kv_heads, cfg.key_dim), use_bias=qkv_bias)
        self.value = Linear(cfg, (cfg.kv_heads, cfg.value_dim), use_bias=qkv_bias)
        self.out = Linear(cfg, (cfg.d_model,), contract=2, std=branch_std(cfg, self.depth))
        if cfg.qk_norm:
            unit = _unit_init(cfg)
            self.query_scale = parameter(self, "query_scale", unit, (cfg.key_dim,))
            self.key_scale = parameter(self, "key_scale", unit, (cfg.key_dim,))
        if cfg.attention_sinks:
            self.sinks = parameter(self, "sinks", nn.initializers.zeros, (cfg.num_heads,))
        if cfg.positions == "shaw" and not self.cross:
            rows, std = 2 * cfg.relative_max_distance + 1, nn.initializers.normal(cfg.init_std)
            self.shaw_key = parameter(self, "shaw_key", std, (rows, cfg.key_dim))
            self.shaw_value = parameter(self, "shaw_value", std, (rows, cfg.value_dim))

    def keys_values(
        self,
        context: jax.Array,  # [B, S, D]
        token_positions: jax.Array | None,  # i32[B, S] or [S], for the rotation
    ) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, Hv]
        """Keys, normalised and rotated as they are cached, and values."""
        cfg = self.config
        k, v = self.key(context), self.value(context)
        if cfg.qk_norm:
            k = rms_norm(k, _unit(cfg, self.key_scale), cfg.norm_eps)
        if cfg.positions == "rope" and not self.cross:
            assert token_positions is not None
            k = pos.apply_rope(k, token_positions, cfg.layer_rope(self.window))
        return k, v

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        token_positions: jax.Array | None = None,  # i32[B, T] or [T]
        positions: jax.Array | None = None,  # i32[B, T]; None is arange(T)
        mask: Mask | None = None,
        bias: pos.ALiBi | pos.RelativeBias | None = None,
        cache: kv.KVCache | None = None,
        context: kv.KVCache | None = None,
        key: jax.Array | None = None,
        weights: bool = False,
    ) -> tuple[Any, ...]:
        """Attend to x itself, through `cache` if given, or to a `context` of keys and values.

        The output [B, T, D] and the updated cache; behind them, if `weights`, the pair of them
        f32[B, N, T, S] and the positions i32[B, S] of the keys (None is arange(S)).
        """
        cfg = self.config
        q = self.query(x)
        if cfg.qk_norm:
            q = rms_norm(q, _unit(cfg, self.query_scale), cfg.norm_eps)
        k_positions = positions
        if context is not None:
            k, v, k_positions = context.k, context.v, context.positions
        else:
            if cfg.positions == "rope":
                assert token_positions is not None
                q = pos.apply_rope(q, token_positions, cfg.layer_rope(self.window))
            k, v = self.keys_values(x, token_positions)
            if cache is not None:
                assert positions is not None
                cache, k, v, k_positions = kv.extend(cache, k, v, positions, self.window)
                k, v = k.astype(cfg.dtype), v.astype(cfg.dtype)
        attend = self._shaw if cfg.positions == "shaw" and not self.cross else self._attend
        out = self.out(attend(q, k, v, mask, bias, positions, k_positions, key))
        if not weights:
            return out, cache
        return out, cache, self._seen(q, k, v, mask, bias, positions, k_positions)

    def _attend(self, q, k, v, mask, bias, q_positions, k_positions, key):
        cfg = self.config
        return dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            scale=cfg.attention_scale,
            softcap=cfg.attention_softcap,
            sinks=self.sinks if cfg.attention_sinks else None,
            q_positions=q_positions,
            k_positions=k_positions,
            dropout_rate=0.0 if key is None else cfg.attention_dropout,
            dropout_key=key if cfg.attention_dropout else None,
            implementation=cfg.implementation,
        )

    def _shaw(self, q, k, v, mask, bias, q_positions, k_positions, key):
        """Relative vectors join the keys and the values (Shaw et al. 2018); weights materialise."""
        cfg = self.config
        q_positions = jnp.arange(q.shape[1]) if q_positions is None else q_positions
        k_positions = jnp.arange(k.shape[1]) if k_positions is None else k_positions
        finite = jnp.isfinite(v).all(axis=-1, keepdims=True)  # or a weight of 0 would not hide it
        k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
        weights = self._weights(q, k, mask, bias, q_positions, k_positions)
        weights = dropout(weights, cfg.attention_dropout, key)

        def average(weights, v, table, q_positions, k_positions):
            grouped = weights.reshape(q.shape[0], cfg.kv_heads, -1, *weights.shape[2:])
            out = jnp.einsum("BKGTS,BSKH->BTKGH", grouped, v.astype(jnp.float32))
            out = out.reshape(*q.shape[:3], -1)
            out = out + pos.shaw_values(weights, table, q_positions, k_positions)
            return out.astype(q.dtype)

        arrays = [weights, v, self.shaw_value, q_positions, k_positions]
        return by_compiler(average, arrays, split(q, slice(3)))

    def _weights(self, q, k, mask, bias, q_positions, k_positions) -> jax.Array:  # f32[B, N, T, S]
        """What the values are weighed with, before dropout."""
        cfg = self.config
        if cfg.positions == "shaw" and not self.cross:
            q_positions = jnp.arange(q.shape[1]) if q_positions is None else q_positions
            k_positions = jnp.arange(k.shape[1]) if k_positions is None else k_positions
            scale = cfg.key_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
            bias = scale * pos.shaw_scores(q, self.shaw_key, q_positions, k_positions)
        return dot_product_attention_weights(
            q,
            k,
            mask=mask,
            bias=bias,
            scale=cfg.attention_scale,
            softcap=cfg.attention_softcap,
            sinks=self.sinks if cfg.attention_sinks else None,
            q_positions=q_positions,
            k_positions=k_positions,
        )

    def _seen(self, q, k, v, mask, bias, q_positions, k_positions):
        """The weights, NaN where the output is and 0 for padding tokens; the keys' positions."""
        k = jnp.where(jnp.isfinite(v).all(axis=-1, keepdims=True), k, jnp.nan)
        weights = self._weights(q, k, mask, bias, q_positions, k_positions)
        if q_positions is not None:
            weights = jnp.where(q_positions[:, None, :, None] >= 0, weights, 0.0)
        return weights, k_positions


class FeedForward(nn.Module):
    """act(x W_up) W_down, or with `glu` (act(x W_gate) * (x W_up)) W_down (Shazeer 2020)."""

    config: ModelConfig
    depth: int | None = None
    """Blocks of the stack it stands in; None is num_layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        cfg = self.config
        linear = partial(Linear, cfg, use_bias=cfg.ff_bias)
        hidden = linear((cfg.ff_dim,), name="up")(x)
        if cfg.glu:
            hidden = activate(linear((cfg.ff_dim,), name="gate")(x), cfg.activation) * hidden
        else:
            hidden = activate(hidden, cfg.activation)
        return linear((cfg.d_model,), name="down", std=branch_std(cfg, self.depth))(hidden)


class Block(nn.Module):
    """Self-attention, optional cross-attention and feed-forward, each in a residual branch."""

    config: ModelConfig
    cross: bool = False
    depth: int | None = None
    """Blocks of the stack it stands in; None is num_layers."""
    window: int | None = None
    """The window that its mask has."""

    def setup(self) -> None:
        cfg = self.config
        branches = ["attention", *(["cross_attention"] if self.cross else []), "feed_forward"]
        self.attention = Attention(cfg, depth=self.depth, window=self.window)
        if self.cross:
            self.cross_attention = Attention(cfg, cross=True, depth=self.depth)
        self.feed_forward = FeedForward(cfg, self.depth)
        self.norm = {name: Norm(cfg) for name in branches}
        if cfg.norm_order == "sandwich":
            self.out_norm = {name: Norm(cfg) for name in branches}

    def _branch(self, name, x, key, function):
        """x + f(n(x)), n(x + f(x)) or x + n(f(n(x))), with dropout on the branch's output."""
        cfg, norm = self.config, self.norm[name]
        y, *more = function(x if cfg.norm_order == "post" else norm(x))
        if cfg.norm_order == "sandwich":
            y = self.out_norm[name](y)
        x = x + dropout(y, cfg.dropout, key)
        return (norm(x) if cfg.norm_order == "post" else x), *more

    def context_cache(
        self,
        context: jax.Array,  # [B, S, D]
        positions: jax.Array,  # i32[B, S]; negative where padded
    ) -> kv.KVCache:
        """Cross-attention keys and values of a context, computed once for all later queries."""
        k, v = self.cross_attention.keys_values(context, None)
        positions = jnp.array(positions, jnp.int32)  # a copy: layers share no memory
        return kv.KVCache(k, v, positions, jnp.maximum(positions.max(axis=1) + 1, 0))

    def scan_context(
        self, context: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, kv.KVCache]:
        """`context_cache` in the form of a scan's step, which hands the context on."""
        return context, self.context_cache(context, positions)

    def scan_step(
        self,
        carry: tuple[jax.Array, kv.KVCache | None],  # [B, T, D], leaves [B, L, ...]
        layer: jax.Array,  # i32[]
        key: jax.Array | None,
        contexts: kv.KVCache | None,  # leaves [B, L, ...]
        *shared,
    ) -> tuple[tuple[jax.Array, kv.KVCache | None], list[Any]]:
        """The block in the form of a scan's step, which reads and writes its part of all caches.

        They are carried, neither cut up beforehand nor gathered from the steps, so that a cache
        that is donated is written where it lies.
        """

        def part(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, layer, 1, keepdims=False)

        def write(leaf: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(leaf, new, layer, 1)

        x, caches = carry
        cache, context = jax.tree.map(part, (caches, contexts))
        x, cache, *seen = self(x, cache, context, key, *shared)
        caches = None if caches is None else jax.tree.map(write, caches, cache)
        return (x, caches), seen

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        cache: kv.KVCache | None = None,
        context: kv.KVCache | None = None,
        key: jax.Array | None = None,
        positions: jax.Array | None = None,  # i32[B, T]; None is arange(T)
        token_positions: jax.Array | None = None,  # i32[B, T] or [T]
        mask: Mask | None = None,
        bias: pos.ALiBi | pos.RelativeBias | None = None,
        memory: jax.Array | None = None,  # [B, S, D]
        memory_positions: jax.Array | None = None,  # i32[B, S]
        attend: tuple[()] | None = None,  # () asks for weights: a tree, so known under any trace
    ) -> tuple[Any, ...]:
        """The block's output [B, T, D] and its updated cache; with `attend`, x itself and the
        weights of `attention` and of `cross_attention` behind them, as `Attention` gives them."""
        weights = attend is not None
        given = [x] if weights else []
        keys = split_key(key, 5)
        x, cache, *seen = self._branch(
            "attention",
            x,
            keys[0],
            lambda y: self.attention(
                y,
                positions=positions,
                token_positions=token_positions,
                mask=mask,
                bias=bias,
                cache=cache,
                key=keys[1],
                weights=weights,
            ),
        )
        if self.cross:
            if context is None:
                assert memory is not None and memory_positions is not None
                context = self.context_cache(memory, memory_positions)
            x, _, *crossed = self._branch(
                "cross_attention",
                x,
                keys[2],
                lambda y: self.cross_attention(
                    y, positions=positions, context=context, key=keys[3], weights=weights
                ),
            )
            seen += crossed
        (x,) = self._branch("feed_forward", x, keys[4], lambda y: (self.feed_forward(y),))
        return x, cache, *given, *seen


class Embed(nn.Module):
    """Token (and position, and type) vectors in, logits out.

    Both sides of an encoder-decoder share the tokens' vectors; the target has a table of positions
    and a norm of its own (Lewis et al. 2020).
    """

    config: ModelConfig

    def setup(self) -> None:
        cfg = self.config
        std = cfg.d_model**-0.5 if cfg.scale_embeddings else cfg.init_std
        normal = nn.initializers.normal(std)
        self.tokens = parameter(self, "tokens", normal, (cfg.vocab_size, cfg.d_model))
        sides = ("", "target_") if cfg.kind == "encoder-decoder" else ("",)
        if cfg.positions == "learned":
            shape = cfg.max_len + cfg.position_offset, cfg.d_model
            self.tables = [parameter(self, f"{side}positions", normal, shape) for side in sides]
        if cfg.type_vocab_size is not None:
            self.types = parameter(self, "types", normal, (cfg.type_vocab_size, cfg.d_model))
        if cfg.embedding_norm:
            self.norms = [Norm(cfg, name=f"{side}norm") for side in sides]
        if not cfg.tie_embeddings:
            self.output = parameter(self, "output", normal, (cfg.vocab_size, cfg.d_model))
        if cfg.logit_bias:
            self.bias = parameter(self, "bias", nn.initializers.zeros, (cfg.vocab_size,))

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        token_positions: jax.Array,  # i32[B, T] or [T]
        types: jax.Array | None = None,  # i32[B, T]
        key: jax.Array | None = None,
        target: bool = False,
    ) -> jax.Array:  # [B, T, D]
        """E[token] (times sqrt(D)), plus position and type vectors; zeros where padded."""
        cfg = self.config
        x = lookup(self.tokens, tokens)
        if cfg.scale_embeddings:
            x = x * cfg.d_model**0.5
        if cfg.positions in ("learned", "sinusoidal"):
            if cfg.positions == "learned":
                added = pos.learned(self.tables[target], token_positions, cfg.position_offset)
            else:
                added = pos.sinusoidal(token_positions, cfg.d_model, layout=cfg.sinusoid)
            x = x + (added if added.ndim == 3 else added[None])
        if cfg.type_vocab_size is not None:
            x = x + lookup(self.types, jnp.zeros_like(tokens) if types is None else types)
        if token_positions.ndim == 2:  # or 0 * NaN of a padding token would enter gradients
            x = jnp.where((token_positions < 0)[:, :, None], 0.0, x)
        if cfg.embedding_norm:
            x = self.norms[target](x)
        return dropout(x, cfg.dropout, key).astype(cfg.dtype)

    def logits(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> f32[B, T, V]
        """(scale) x E^T (+ bias), soft-capped; the sums are f32 whatever the compute dtype."""
        cfg = self.config
        table = self.tokens if cfg.tie_embeddings else self.output
        if cfg.logit_scale is not None:
            x = x * cfg.logit_scale
        arrays = [x, table.astype(cfg.dtype), self.bias if cfg.logit_bias else None]
        y = by_compiler(_against, arrays, split(x, slice(2), split(table, slice(1))))
        if cfg.logit_softcap is not None:
            y = cfg.logit_softcap * jnp.tanh(y / cfg.logit_softcap)
        return y


def _against(
    x: jax.Array,  # [B, T, D]
    table: jax.Array,  # [V, D]
    bias: jax.Array | None,  # [V]
) -> jax.Array:  # f32[B, T, V]
    """x E^T + b. On a CPU a few rows are taken as (E x^T)^T, which XLA may not turn back: E, the
    large one, is then read as it lies: up to half as fast again (benchmarks/NOTES.md)."""
    rows = x.reshape(math.prod(x.shape[:2]), x.shape[2])
    if 1 < len(rows) <= 16 and jax.default_backend() == "cpu":
        y = jnp.einsum("VD,XD->VX", table, rows, preferred_element_type=F32)
        y = jax.lax.optimization_barrier(y).T
    else:
        y = jnp.einsum("XD,VD->XV", rows, table, preferred_element_type=F32)
    y = y.reshape(*x.shape[:2], len(table))
    return y if bias is None else y + bias[None, None]


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:  # [V, D], i32[...] -> [..., D]
    """Rows of a table; an id outside it gives NaN, never another row."""
    if ids.dtype.itemsize < 4:  # too narrow, perhaps, for the table's length
        ids = ids.astype(jnp.int32)
    ids = jnp.where(ids < 0, table.shape[0], ids)
    return by_compiler(_take, [table, ids], split(ids))


def _take(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="fill")
