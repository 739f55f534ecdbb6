"""Define the parts of a transformer: linen modules that name parameters, over pure functions.

Dropout is on exactly when a `key` is given; a module takes its key as an argument, splits it once,
and hands the parts on, so a looped and a scanned stack draw the same numbers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax.errors import ScopeParamShapeError

from transformer_jax.attention import biases
from transformer_jax.attention.api import dot_product_attention, dot_product_attention_weights
from transformer_jax.attention.masks import Mask
from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache import paged_cache
from transformer_jax.cache.paged_cache import PagedCache
from transformer_jax.config import Learned, ModelConfig, Rope, Shaw, Sinusoidal
from transformer_jax.models import positions as pos
from transformer_jax.models.adapters import product
from transformer_jax.models.functional import (
    F32,
    activate,
    against,
    dropout,
    held,
    layer_norm,
    lookup,
    rms_norm,
    split_key,
)
from transformer_jax.models.quantized import QuantizedTable, table_logits
from transformer_jax.sharding import by_compiler, gathered, split
from transformer_jax.shown import short_repr

PositionBias = biases.ALiBi | biases.RelativeBias
"""The biases of a distance that a config can ask for."""

Record = tuple[()]
"""() asks a block for its BlockRecord, None does not: a tree, and so known under any trace."""


def parameter(
    module: nn.Module, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...]
) -> jax.Array:
    """Declare a parameter in f32; of one that is there, only check the shape.

    Flax would trace its initializer to compare them, which is half of all tracing.
    """
    if not module.has_variable("params", name):
        return module.param(name, init, shape, F32)
    value = nn.unbox(module.get_variable("params", name))
    if np.shape(value) != shape:
        path = "/".join(module.path)
        raise ScopeParamShapeError(name, path, np.shape(value), shape)
    return value


def refuse_rngs(module: nn.Module, key: jax.Array | None) -> None:
    """Raise ValueError where `model.apply` was given a key 'dropout' in `rngs`, and no argument.

    Nothing here draws from flax's `rngs`, so dropout would be off in silence. Keys of other names,
    as `nnx.bridge` gives them, are for the parameters. A model inside another module is not
    checked: there they may be for the other's layers.
    """
    scope = module.scope
    if key is not None or scope is None or scope.path or module.is_initializing():
        return
    if "dropout" in scope.rngs:
        rule = "dropout takes its key as an argument: model.apply(variables, ..., key=key)"
        raise ValueError(f"rngs has 'dropout': {rule}")


class Norm(nn.Module):
    """Apply the config's LayerNorm or RMSNorm over the last axis."""

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
    """Return what a norm multiplies by, of what it stores; in f32."""
    scale = scale.astype(F32)
    return 1.0 + scale if config.norm_unit_offset else scale


class Linear(nn.Module):
    """Return x W + b in the compute dtype, W ~ N(0, std^2), over the last `contract` axes.

    The key is for the dropout of adapters, where the kernel has any.
    """

    config: ModelConfig
    features: tuple[int, ...]
    contract: int = 1
    use_bias: bool | None = None
    std: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        cfg = self.config
        std = cfg.init_std if self.std is None else self.std
        shape = (*x.shape[x.ndim - self.contract :], *self.features)
        kernel = parameter(self, "kernel", nn.initializers.normal(std), shape)
        bias = None
        if cfg.use_bias if self.use_bias is None else self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, self.features).astype(cfg.dtype)
        return product(x.astype(cfg.dtype), kernel, bias, self.contract, key, str(self.name))


def branch_std(config: ModelConfig, depth: int | None) -> float:
    """Return the initial scale of a branch's output matrix: 2 L of them add up (GPT-2)."""
    return config.init_std / (2 * (config.num_layers if depth is None else depth)) ** 0.5


@short_repr
class HeadMasks(NamedTuple):
    """Hold what the outputs of heads are multiplied by; None leaves them as they are."""

    own: jax.Array | None = None  # [N]; of a whole stack, [N] or [L, N]
    cross: jax.Array | None = None  # of the attention to an encoder's output


ALL_HEADS = HeadMasks()
"""No mask: every head counts as it is."""


@short_repr
class AttendedKeys(NamedTuple):
    """Hold the keys that one attention weighed, and how."""

    weights: jax.Array  # f32[B, N, T, S]: after the softmax, before dropout
    positions: jax.Array | None  # i32[B, S] of the keys; None is arange(S)


@short_repr
class AttentionOutput(NamedTuple):
    """Hold what `Attention` returns."""

    x: jax.Array  # [B, T, D]
    cache: kv.KVCache | PagedCache | None
    attended: AttendedKeys | None = None  # where it was asked for


@short_repr
class BlockRecord(NamedTuple):
    """Hold what a block read and weighed."""

    x: jax.Array  # [B, T, D]: the stream before the block
    own: AttendedKeys
    cross: AttendedKeys | None  # over an encoder's output


@short_repr
class BlockOutput(NamedTuple):
    """Hold what `Block` returns."""

    x: jax.Array  # [B, T, D]
    cache: kv.KVCache | PagedCache | None
    record: BlockRecord | None = None  # where it was asked for


class _Heads(NamedTuple):
    """Hold the operands of one attention, projected and split into heads."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    mask: Mask | None
    bias: PositionBias | None
    q_positions: jax.Array | None  # i32[B, T]; None is arange(T)
    k_positions: jax.Array | None  # i32[B, S]; None is arange(S)
    k_scale: jax.Array | None = None  # f32[B, S, K] where k is int8
    v_scale: jax.Array | None = None  # f32[B, S, K] where v is int8
    block_table: jax.Array | None = None  # i32[B, M] where k, v and scales are [P, page, ..]


class Attention(nn.Module):
    """Multi-head attention with MHA, GQA or MQA heads, to x itself or to an encoder's output.

    out = W_o concat_n softmax(scale q_n k_g^T + bias) v_g, with key head g = n // G of query head n
    (Vaswani et al. 2017, 3.2; Ainslie et al. 2023). A head mask multiplies what the heads give,
    before W_o (Michel et al. 2019).
    """

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
        if self._shaw is not None:
            rows, std = 2 * self._shaw.max_distance + 1, nn.initializers.normal(cfg.init_std)
            self.shaw_key = parameter(self, "shaw_key", std, (rows, cfg.key_dim))
            self.shaw_value = parameter(self, "shaw_value", std, (rows, cfg.value_dim))

    @property
    def _rope(self) -> Rope | None:
        """Return the rotation of queries and keys; attention to an encoder's output has none."""
        positions = self.config.positions
        if self.cross or not isinstance(positions, Rope):
            return None
        return positions.in_layer(self.window)

    @property
    def _shaw(self) -> Shaw | None:
        """Return the vectors of distances; attention to an encoder's output has none."""
        positions = self.config.positions
        return positions if isinstance(positions, Shaw) and not self.cross else None

    def keys_values(
        self,
        x: jax.Array,  # [B, S, D]
        token_positions: jax.Array | None,  # i32[B, S] or [S], for the rotation
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, Hv]
        """Project keys, normalised and rotated as they are cached, and values."""
        cfg = self.config
        k, v = self.key(x, key), self.value(x, key)
        if cfg.qk_norm:
            k = rms_norm(k, _unit(cfg, self.key_scale), cfg.norm_eps)
        if self._rope is not None:
            assert token_positions is not None
            k = pos.apply_rope(k, token_positions, self._rope)
        return k, v

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        token_positions: jax.Array | None = None,  # i32[B, T] or [T]
        positions: jax.Array | None = None,  # i32[B, T]; None is arange(T)
        mask: Mask | None = None,
        bias: PositionBias | None = None,
        cache: kv.KVCache | PagedCache | None = None,
        cross_cache: kv.KVCache | None = None,
        key: jax.Array | None = None,
        head_mask: jax.Array | None = None,  # [N]
        record: bool = False,
    ) -> AttentionOutput:
        """Attend to x itself, through `cache` if given, or to the keys of a `cross_cache`.

        The output [B, T, D] and the updated cache; with `record`, what was weighed, too.
        """
        cfg = self.config
        q = self.query(x, key)
        if cfg.qk_norm:
            q = rms_norm(q, _unit(cfg, self.query_scale), cfg.norm_eps)
        k_positions = positions
        scales: tuple[jax.Array | None, jax.Array | None] = (None, None)
        block_table = None
        if cross_cache is not None:
            k, v, k_positions = cross_cache.k, cross_cache.v, cross_cache.positions
        else:
            if self._rope is not None:
                assert token_positions is not None
                q = pos.apply_rope(q, token_positions, self._rope)
            k, v = self.keys_values(x, token_positions, key)
            if cache is not None:
                assert positions is not None
                as_held = not record and self._shaw is None
                seen: kv.KVCache | PagedCache
                if not isinstance(cache, PagedCache):
                    cache, seen = kv.extend_held(cache, k, v, positions, self.window)
                    k_positions = seen.positions
                else:
                    cache = seen = paged_cache.update(cache, k, v, positions)
                    k_positions = paged_cache.gather_positions(cache)
                    if as_held and cache.k.dtype in (jnp.int8, cfg.dtype):
                        block_table = cache.block_table
                    else:
                        seen = paged_cache.gather_pages(cache)
                if seen.k_scale is not None and as_held:
                    k, v, scales = seen.k, seen.v, (seen.k_scale, seen.v_scale)
                else:
                    k, v = (x.astype(cfg.dtype) for x in kv.read(seen, k.dtype))
        heads = _Heads(q, k, v, mask, bias, positions, k_positions, *scales, block_table)
        attend = self._attend if self._shaw is None else self._attend_shaw
        out = (jax.checkpoint(attend) if cfg.remat == "attention" else attend)(heads, key)
        if head_mask is not None:
            out = out * head_mask.astype(out.dtype)[None, None, :, None]
        return AttentionOutput(self.out(out, key), cache, self._attended(heads) if record else None)

    def _attend(self, heads: _Heads, key: jax.Array | None) -> jax.Array:  # [B, T, N, Hv]
        cfg = self.config
        return dot_product_attention(
            heads.q,
            heads.k,
            heads.v,
            mask=heads.mask,
            bias=heads.bias,
            scale=cfg.attention_scale,
            softcap=cfg.attention_softcap,
            sinks=self.sinks if cfg.attention_sinks else None,
            q_positions=heads.q_positions,
            k_positions=heads.k_positions,
            dropout_rate=0.0 if key is None else cfg.attention_dropout,
            dropout_key=key if cfg.attention_dropout else None,
            key_scale=heads.k_scale,
            value_scale=heads.v_scale,
            block_table=heads.block_table,
            implementation=cfg.implementation,
        )

    def _attend_shaw(self, heads: _Heads, key: jax.Array | None) -> jax.Array:  # [B, T, N, Hv]
        """Add vectors of the distance to keys and values (Shaw et al. 2018).

        The weights materialise: [B, N, T, S].
        """
        q, k, v = heads.q, heads.k, heads.v
        finite = jnp.isfinite(v).all(axis=-1, keepdims=True)  # or a weight of 0 would not hide it
        k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
        weights = dropout(self._weights(heads._replace(k=k)), self.config.attention_dropout, key)

        def average(
            weights: jax.Array,
            v: jax.Array,
            table: jax.Array,
            q_positions: jax.Array,
            k_positions: jax.Array,
        ) -> jax.Array:
            groups = rearrange(weights, "B (K G) T S -> B K G T S", K=self.config.kv_heads)
            out = jnp.einsum("BKGTS,BSKH->BTKGH", groups, v.astype(jnp.float32))
            out = rearrange(out, "B T K G H -> B T (K G) H")
            out = out + pos.shaw_values(weights, table, q_positions, k_positions)
            return out.astype(q.dtype)

        arrays = [weights, v, self.shaw_value, *_known_positions(heads)]
        return by_compiler(average, arrays, split(q, slice(3)))

    def _weights(self, heads: _Heads) -> jax.Array:  # f32[B, N, T, S]
        """Compute what the values are weighed with, before dropout."""
        cfg, bias = self.config, heads.bias
        q_positions, k_positions = heads.q_positions, heads.k_positions
        if self._shaw is not None:
            q_positions, k_positions = _known_positions(heads)
            scale = cfg.key_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
            shaw = pos.shaw_scores(heads.q, self.shaw_key, q_positions, k_positions)
            bias = scale * shaw  # type: ignore[assignment]
        return dot_product_attention_weights(
            heads.q,
            heads.k,
            mask=heads.mask,
            bias=bias,
            scale=cfg.attention_scale,
            softcap=cfg.attention_softcap,
            sinks=self.sinks if cfg.attention_sinks else None,
            q_positions=q_positions,
            k_positions=k_positions,
        )

    def _attended(self, heads: _Heads) -> AttendedKeys:
        """Compute the weights again to show: NaN where the output is, 0 for padding tokens."""
        finite = jnp.isfinite(heads.v).all(axis=-1, keepdims=True)
        weights = self._weights(heads._replace(k=jnp.where(finite, heads.k, jnp.nan)))
        if heads.q_positions is not None:
            weights = jnp.where(heads.q_positions[:, None, :, None] >= 0, weights, 0.0)
        return AttendedKeys(weights, heads.k_positions)


def _known_positions(heads: _Heads) -> tuple[jax.Array, jax.Array]:
    """Return the positions of queries and keys, arange where none are given."""
    q, k = heads.q_positions, heads.k_positions
    q = jnp.arange(heads.q.shape[1]) if q is None else q
    return q, jnp.arange(heads.k.shape[1]) if k is None else k


class FeedForward(nn.Module):
    """Return act(x W_up) W_down, or with `glu` (act(x W_gate) * (x W_up)) W_down (Shazeer 2020)."""

    config: ModelConfig
    depth: int | None = None
    """Blocks of the stack it stands in; None is num_layers."""

    @nn.compact
    def __call__(
        self, x: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:  # [B, T, D] -> [B, T, D]
        cfg = self.config
        linear = partial(Linear, cfg, use_bias=cfg.ff_bias)
        hidden = linear((cfg.ff_dim,), name="up")(x, key)
        if cfg.glu:
            hidden = activate(linear((cfg.ff_dim,), name="gate")(x, key), cfg.activation) * hidden
        else:
            hidden = activate(hidden, cfg.activation)
        return linear((cfg.d_model,), name="down", std=branch_std(cfg, self.depth))(hidden, key)


class Block(nn.Module):
    """Self-attention, optional cross-attention and feed-forward, each in a residual branch.

    x + f(n(x)) pre-norm, n(x + f(x)) post-norm, x + m(f(n(x))) sandwich, for f in that order.
    """

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

    def _enter(self, branch: str, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        """Return what a branch reads of the stream."""
        return x if self.config.norm_order == "post" else self.norm[branch](x)

    def _join(
        self,
        branch: str,
        x: jax.Array,  # [B, T, D]: the stream
        y: jax.Array,  # [B, T, D]: the branch's output
        key: jax.Array | None,
    ) -> jax.Array:  # [B, T, D]
        """Add a branch's output to the stream, with dropout and the norms of the config's order."""
        cfg = self.config
        if cfg.norm_order == "sandwich":
            y = self.out_norm[branch](y)
        x = x + dropout(y, cfg.dropout, key)
        return self.norm[branch](x) if cfg.norm_order == "post" else x

    def init_cross_cache(
        self,
        memory: jax.Array,  # [B, S, D]
        positions: jax.Array,  # i32[B, S]; negative where padded
        key: jax.Array | None = None,
    ) -> kv.KVCache:
        """Compute the keys and values of an encoder's output once, for all later queries."""
        k, v = self.cross_attention.keys_values(memory, None, key)
        positions = jnp.array(positions, jnp.int32)  # a copy: layers share no memory
        return kv.KVCache(k, v, positions, jnp.maximum(positions.max(axis=1) + 1, 0))

    def scan_cross_cache(
        self, memory: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, kv.KVCache]:
        """Wrap `init_cross_cache` in the form of a scan's step, which hands the memory on."""
        return memory, self.init_cross_cache(memory, positions)

    def scan_step(
        self,
        carry: tuple[jax.Array, kv.KVCache | None],  # [B, T, D], leaves [B, L, ...]
        layer: jax.Array,  # i32[]
        key: jax.Array | None,
        head_masks: HeadMasks,
        cross_caches: kv.KVCache | None,  # leaves [B, L, ...]
        *shared: Any,
    ) -> tuple[tuple[jax.Array, kv.KVCache | None], BlockRecord | None]:
        """Run the block in the form of a scan's step, on its part of all caches.

        They are carried, neither cut up beforehand nor gathered from the steps, so that a cache
        that is donated is written where it lies.
        """

        def part(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, layer, 1, keepdims=False)

        def write(leaf: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(leaf, new, layer, 1)

        x, caches = carry
        cache, cross_cache = jax.tree.map(part, (caches, cross_caches))
        x, cache, record = self(x, cache, cross_cache, key, head_masks, *shared)
        caches = None if caches is None else jax.tree.map(write, caches, cache)
        return (x, caches), record

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        cache: kv.KVCache | PagedCache | None = None,
        cross_cache: kv.KVCache | None = None,
        key: jax.Array | None = None,
        head_masks: HeadMasks = ALL_HEADS,
        positions: jax.Array | None = None,  # i32[B, T]; None is arange(T)
        token_positions: jax.Array | None = None,  # i32[B, T] or [T]
        mask: Mask | None = None,
        bias: PositionBias | None = None,
        memory: jax.Array | None = None,  # [B, S, D]: an encoder's output
        memory_positions: jax.Array | None = None,  # i32[B, S]
        record: Record | None = None,
    ) -> BlockOutput:
        """Run the branches: the output [B, T, D], the updated cache, and what `record` asks for.

        A block with cross-attention reads a `cross_cache`, or makes one of `memory`.
        """
        entered, keys = x, split_key(key, 5)
        own = self.attention(
            self._enter("attention", x),
            positions=positions,
            token_positions=token_positions,
            mask=mask,
            bias=bias,
            cache=cache,
            key=keys[1],
            head_mask=head_masks.own,
            record=record is not None,
        )
        x, crossed = self._join("attention", x, own.x, keys[0]), None
        if self.cross:
            if cross_cache is None:
                assert memory is not None and memory_positions is not None
                cross_cache = self.init_cross_cache(memory, memory_positions, keys[3])
            out = self.cross_attention(
                self._enter("cross_attention", x),
                positions=positions,
                cross_cache=cross_cache,
                key=keys[3],
                head_mask=head_masks.cross,
                record=record is not None,
            )
            x, crossed = self._join("cross_attention", x, out.x, keys[2]), out.attended
        y = self.feed_forward(self._enter("feed_forward", x), keys[4])
        x = self._join("feed_forward", x, y, keys[4])
        if own.attended is None:
            return BlockOutput(x, own.cache)
        return BlockOutput(x, own.cache, BlockRecord(entered, own.attended, crossed))


@short_repr
class OutputLayer(NamedTuple):
    """Hold what logits are computed of: x table^T + bias, before a soft cap."""

    x: jax.Array  # [B, T, D]
    table: jax.Array  # [V, D]
    bias: jax.Array | None  # [V]


class Embed(nn.Module):
    """Token (and position, and type) vectors in, logits out.

    Both sides of an encoder-decoder share the tokens' vectors, unless the config has a
    `source_vocab_size`; the target has a table of positions and a norm of its own (Lewis et al.
    2020).
    """

    config: ModelConfig

    def setup(self) -> None:
        cfg = self.config
        std = cfg.d_model**-0.5 if cfg.scale_embeddings else cfg.init_std
        normal = nn.initializers.normal(std)
        if cfg.kind != "encoder" or cfg.inputs is None:
            self.tokens = parameter(self, "tokens", normal, (cfg.vocab_size, cfg.d_model))
        if cfg.source_vocab_size is not None:
            shape = cfg.source_vocab_size, cfg.d_model
            self.source_tokens = parameter(self, "source_tokens", normal, shape)
        sides = ("", "target_") if cfg.kind == "encoder-decoder" else ("",)
        if isinstance(cfg.positions, Learned):
            shape = cfg.max_len + cfg.positions.offset, cfg.d_model
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
        tokens: jax.Array,  # i32[B, T], or [B, T, D] what an `InputLayer` gives
        token_positions: jax.Array,  # i32[B, T] or [T]
        types: jax.Array | None = None,  # i32[B, T]
        key: jax.Array | None = None,
        target: bool = False,
    ) -> jax.Array:  # [B, T, D]
        """Return E[token] (times sqrt(D)) plus position and type vectors; zeros where padded."""
        cfg = self.config
        x = tokens.astype(F32) if tokens.ndim == 3 else self._look_up(tokens, target)
        added = None
        if isinstance(cfg.positions, Learned):
            added = pos.learned(self.tables[target], token_positions, cfg.positions.offset)
        elif isinstance(cfg.positions, Sinusoidal):
            added = pos.sinusoidal(token_positions, cfg.d_model, layout=cfg.positions.layout)
        if added is not None:
            x = x + (added if added.ndim == 3 else added[None])
        if cfg.type_vocab_size is not None:
            x = x + lookup(self.types, jnp.zeros_like(tokens) if types is None else types)
        if token_positions.ndim == 2:  # or 0 * NaN of a padding token would enter gradients
            x = jnp.where((token_positions < 0)[:, :, None], 0.0, x)
        if cfg.embedding_norm:
            x = self.norms[target](x)
        return dropout(x, cfg.dropout, key).astype(cfg.dtype)

    def _look_up(self, tokens: jax.Array, target: bool) -> jax.Array:  # i32[B, T] -> [B, T, D]
        cfg = self.config
        own = cfg.source_vocab_size is not None and not target
        table: Any = self.source_tokens if own else self.tokens
        quantized = isinstance(table, QuantizedTable)
        x = table.look_up(tokens) if quantized else lookup(table, tokens)
        return x * cfg.d_model**0.5 if cfg.scale_embeddings else x

    def output_layer(self, x: jax.Array) -> OutputLayer:  # [B, T, D]
        """Return what the logits of hidden states are computed of."""
        cfg = self.config
        x = x if cfg.logit_scale is None else x * cfg.logit_scale
        table = gathered(self._output_table.astype(cfg.dtype), x, slice(2))
        return OutputLayer(x, table, self.bias if cfg.logit_bias else None)

    @property
    def _output_table(self) -> Any:  # [V, D]: an array or a QuantizedTable
        return self.tokens if self.config.tie_embeddings else self.output

    def logits(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> f32[B, T, V]
        """Return (scale) x E^T (+ bias), soft-capped, in f32 whatever the compute dtype."""
        cfg, table = self.config, self._output_table
        if cfg.logit_scale is not None:
            x = x * cfg.logit_scale
        bias = self.bias if cfg.logit_bias else None
        if isinstance(table, QuantizedTable):
            y = table_logits(x, table, bias)
        else:
            table = gathered(held(table, math.prod(x.shape[:2]), cfg.dtype), x, slice(2))
            y = by_compiler(against, [x, table, bias], split(x, slice(2), split(table, slice(1))))
        if cfg.logit_softcap is not None:
            y = cfg.logit_softcap * jnp.tanh(y / cfg.logit_softcap)
        return y
