"""Transformer block: attention, cross-attention and feed-forward layers in residual branches."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from flax.core import unfreeze

from transformer_jax.attention import biases
from transformer_jax.attention.api import dot_product_attention, dot_product_attention_weights
from transformer_jax.attention.masks import Mask
from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache import paged_cache
from transformer_jax.cache.paged_cache import PagedCache
from transformer_jax.cache.state_cache import StateCache
from transformer_jax.config import CustomPositions, ModelConfig, Rope, Shaw
from transformer_jax.config.fields import nearest
from transformer_jax.models import positions as pos
from transformer_jax.models.editing import EditSpec
from transformer_jax.models.experts import ExpertFeedForward
from transformer_jax.models.functional import F32, drop_weights, dropout, split_key
from transformer_jax.models.gated_delta import GatedDeltaNet, GatedShortConv
from transformer_jax.models.latent_attention import MultiHeadLatentAttention
from transformer_jax.models.layers import (
    FeedForward,
    Linear,
    Norm,
    branch_std,
    norm_scale,
    parameter,
    refuse_surplus,
)
from transformer_jax.models.module import Module
from transformer_jax.models.ops import norm
from transformer_jax.models.places import (
    NOWHERE,
    BlockEdit,
    Captured,
    Places,
    Visit,
    places,
)
from transformer_jax.pytree import Params
from transformer_jax.sharding import by_compiler, split
from transformer_jax.values import short_repr, value_class

PositionBias = biases.ALiBi | biases.RelativeBias
"""Position biases that a config can specify."""

LayerCache = kv.KVCache | PagedCache


@value_class(
    kw_only=True,
    arrays=(
        "positions",
        "token_positions",
        "segments",
        "mask",
        "bias",
        "memory",
        "memory_positions",
    ),
    static=("places",),
)
class BlockInputs:
    """Inputs shared by all blocks of a stack."""

    positions: jax.Array | None = None  # i32[B, T], for masks and caches; None means arange(T)
    token_positions: jax.Array | None = None  # i32[B, T] or [T], for rotation; per document
    segments: jax.Array | None = None  # i32[B, T], for layers with a state; `mask` includes them
    mask: Mask | None = None
    bias: PositionBias | None = None
    memory: jax.Array | None = None  # [B, S, D], the output of an encoder
    memory_positions: jax.Array | None = None  # i32[B, S]; negative means padding
    places: Places = NOWHERE


class _Heads(NamedTuple):
    """Operands of an attention call, projected and split into heads."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    mask: Mask | None
    bias: PositionBias | None
    q_positions: jax.Array | None  # i32[B, T]; None means arange(T)
    k_positions: jax.Array | None  # i32[B, S]; None means arange(S)
    k_scale: jax.Array | None = None  # f32[B, S, K] if k is int8
    v_scale: jax.Array | None = None  # f32[B, S, K] if v is int8
    block_table: jax.Array | None = None  # i32[B, M] if k, v and scales are [P, page, ..]

    def known_positions(self) -> tuple[jax.Array, jax.Array]:
        """Return the positions of queries and keys, with None replaced by arange."""
        q, k = self.q_positions, self.k_positions
        q = jnp.arange(self.q.shape[1]) if q is None else q
        return q, jnp.arange(self.k.shape[1]) if k is None else k


class Attention(Module):
    """Self- or cross-attention with multi-head, grouped-query or multi-query heads.

    out = W_o concat_n softmax(scale q_n k_g^T + bias) v_g, with key head g = n // G for query head
    n (Vaswani et al. 2017, section 3.2; Ainslie et al. 2023). With `attention_gate`, each head is
    multiplied by sigmoid(W_gate x)_n.
    """

    config: ModelConfig
    cross: bool = False
    depth: int | None = None
    """Number of blocks in the stack; None means num_layers."""
    window: int | None = None
    """Window of the mask, from which a cache determines the keys that new tokens can still see."""
    number: int | None = None
    """Index of the block in a looped stack."""

    def setup(self) -> None:
        cfg = self.config
        qkv_bias = cfg.use_bias if cfg.qkv_bias is None else cfg.qkv_bias
        self.query = Linear(cfg, (cfg.num_heads, cfg.key_dim), use_bias=qkv_bias)
        self.key = Linear(cfg, (cfg.kv_heads, cfg.key_dim), use_bias=qkv_bias)
        self.value = Linear(cfg, (cfg.kv_heads, cfg.value_dim), use_bias=qkv_bias)
        if cfg.attention_gate:
            self.gate = Linear(cfg, (cfg.num_heads, cfg.value_dim), use_bias=qkv_bias)
        self.out = Linear(
            cfg, (cfg.d_model,), 2, use_bias=cfg.out_bias, std=branch_std(cfg, self.depth)
        )
        if cfg.qk_norm:
            for name, heads in ("query_scale", cfg.num_heads), ("key_scale", cfg.kv_heads):
                shape = {
                    "head": (cfg.key_dim,),
                    "own_head": (heads, cfg.key_dim),
                    "heads": (heads * cfg.key_dim,),
                }[cfg.qk_norm_over]
                setattr(self, name, norm_scale(self, name, cfg, *shape))
                if cfg.qk_norm_bias:
                    name = name.replace("scale", "norm_bias")
                    setattr(self, name, parameter(self, name, nn.initializers.zeros, shape))
        if cfg.attention_sinks:
            self.sinks = parameter(self, "sinks", nn.initializers.zeros, (cfg.num_heads,))
        # cross-attention has no notion of distance
        order = None if self.cross else cfg.positions
        self.rope = order.in_layer(self.window, self.number) if isinstance(order, Rope) else None
        self.custom = order if isinstance(order, CustomPositions) else None
        self.shaw = order if isinstance(order, Shaw) else None
        if self.shaw is not None:
            # one vector for each distance from -max to max; larger distances are clipped
            rows, std = 2 * self.shaw.max_distance + 1, nn.initializers.normal(cfg.init_std)
            self.shaw_key = parameter(self, "shaw_key", std, (rows, cfg.key_dim))
            self.shaw_value = parameter(self, "shaw_value", std, (rows, cfg.value_dim))
        refuse_surplus(self)

    def cross_keys_values(
        self, memory: jax.Array, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, Hv]
        """Return the cross-attention keys and values of a memory [B, S, D]."""
        k = self._normed_rotated(self.key(memory, dropout_key), "key", None)
        return k, self.value(memory, dropout_key)

    def _normed_rotated(
        self,
        x: jax.Array,  # [B, T, N, H]
        name: Literal["query", "key"],
        positions: jax.Array | None,  # i32[B, T] or [T]
    ) -> jax.Array:  # [B, T, N, H]
        """Apply `qk_norm` and the rotation to queries or keys."""
        if self.config.qk_norm_after_rope:
            return self._normed(self._rotated(x, positions), name)
        return self._rotated(self._normed(x, name), positions)

    def _normed(self, x: jax.Array, name: Literal["query", "key"]) -> jax.Array:  # [B, T, N, H]
        cfg = self.config
        if not cfg.qk_norm:
            return x
        scale = self.query_scale if name == "query" else self.key_scale
        bias = getattr(self, f"{name}_norm_bias") if cfg.qk_norm_bias else None
        centred = cfg.qk_norm_kind == "layernorm"
        normed = partial(norm, eps=cfg.norm_eps, centred=centred, invariant=cfg.invariant)
        if cfg.qk_norm_over == "head":
            return normed(x, scale, bias)
        if cfg.qk_norm_over == "own_head":
            # in Cohere, each head has its own scale, which `norm` cannot apply
            y = normed(x.astype(F32), None, None) * scale[None, None]
            return (y if bias is None else y + bias.astype(F32)[None, None]).astype(x.dtype)
        # OLMo 2 normalizes all heads together, before splitting them
        return normed(rearrange(x, "B T N H -> B T (N H)"), scale, bias).reshape(x.shape)

    def _rotated(
        self,
        x: jax.Array,  # [B, T, N, H]
        positions: jax.Array | None,  # i32[B, T] or [T]
    ) -> jax.Array:  # [B, T, N, H]
        if self.rope is not None:
            assert positions is not None
            return pos.apply_rope(x, positions, self.rope)
        if self.custom is None:
            return x
        assert positions is not None
        rotated = self.custom.rotate(x, pos.in_rows(positions))
        if rotated is None:
            return x
        if rotated.shape != x.shape:
            rule = f"must be the shape of x, {x.shape}"
            raise ValueError(f"positions.rotate returns shape {rotated.shape}: {rule}")
        return rotated.astype(x.dtype)

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        inputs: BlockInputs,
        *,
        cache: LayerCache | None = None,
        cross_cache: kv.KVCache | None = None,
        dropout_key: jax.Array | None = None,
        visit: Visit | None = None,
        projected: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attend from x to itself and to earlier tokens in `cache`, or to a `cross_cache`.

        Return the output [B, T, D] and the updated cache. If a custom block passes `projected`
        queries, keys and values, return the output of each head, [B, T, N, Hv], instead.
        """
        cfg = self.config
        visit = Visit() if visit is None else visit
        branch = "cross_attention" if self.cross else "attention"
        # fused kernels never materialize the weights, so compute them only on request
        weights_name = f"{branch}/weights"
        requested, edited = weights_name in visit.requested, weights_name in visit.edits

        q = self.query(x, dropout_key) if projected is None else projected[0]
        q = self._normed_rotated(q, "query", inputs.token_positions)
        if cross_cache is None:
            if projected is None:
                k, v = self.key(x, dropout_key), self.value(x, dropout_key)
            else:
                k, v = projected[1:]
            # Keys are rotated before they are cached, so that a cached key is never rotated again.
            k = self._normed_rotated(k, "key", inputs.token_positions)
            mask, bias, k_positions = inputs.mask, inputs.bias, inputs.positions
        else:  # all of the source is visible except its padding, which has negative positions
            k, v, k_positions = cross_cache.k, cross_cache.v, cross_cache.positions
            mask = bias = None
        q, k = visit(f"{branch}/query", q), visit(f"{branch}/key", k)
        v = visit(f"{branch}/value", v)
        heads = _Heads(q, k, v, mask, bias, inputs.positions, k_positions)
        if cache is not None:
            cache, heads = self._update_cache(cache, heads, as_stored=not requested)
        if f"{branch}/key_positions" in visit.requested:
            k_positions = jnp.asarray(heads.known_positions()[1], jnp.int32)
            k_positions = jnp.broadcast_to(k_positions, (x.shape[0], k_positions.shape[-1]))
            visit(f"{branch}/key_positions", k_positions)
        if requested:
            weights = self._weights(heads)
            if heads.q_positions is not None:  # padding queries have no weights
                weights = jnp.where(heads.q_positions[:, None, :, None] >= 0, weights, 0.0)
            weights = visit(weights_name, weights)
        if edited and cache is not None:  # an edit must not give weight to an empty slot
            assert heads.k_positions is not None
            wrong = (weights != 0) & (heads.k_positions < 0)[:, None, None]
            weights = jnp.where(wrong.any(axis=-1, keepdims=True), jnp.nan, weights)
        if edited:
            if cfg.invariant:  # XLA multiplies edited weights by the values
                raise NotImplementedError(
                    f"invariant=True does not support an edit of {weights_name}"
                )
            # dropout must drop the same weights as without an edit
            drop = drop_weights if self.shaw is None else dropout
            out = self._average(drop(weights, cfg.attention_dropout, dropout_key), heads)
        else:
            # "attention" recomputes only the scores: queries, keys and values are saved
            attend = jax.checkpoint(self._attend) if cfg.remat == "attention" else self._attend
            out = attend(heads, dropout_key)
        if cfg.attention_gate:
            gate = visit(f"{branch}/gate", jax.nn.sigmoid(self.gate(x, dropout_key)))
            out = by_compiler(jnp.multiply, [out, gate], split(out))
        out = visit(f"{branch}/heads", out)
        if projected is None:
            out = visit(f"{branch}/output", self.out(out, dropout_key))
        return out, cache

    def _update_cache(
        self, cache: LayerCache, heads: _Heads, *, as_stored: bool
    ) -> tuple[LayerCache, _Heads]:
        """Write new keys and values and return the cache and the heads with all cached keys.

        If `as_stored` is True, int8 values and pages are passed to attention in their stored form.
        """
        cfg, dtype = self.config, heads.k.dtype
        assert heads.q_positions is not None
        # Shaw's scores and captured weights require plain arrays
        as_stored = as_stored and self.shaw is None
        seen: LayerCache
        block_table = None
        scales: tuple[jax.Array | None, jax.Array | None] = (None, None)
        if isinstance(cache, PagedCache):
            cache = seen = paged_cache.update(cache, heads.k, heads.v, heads.q_positions)
            k_positions = paged_cache.gather_positions(cache)
            # In any other dtype, the pages would have to be converted, and the pool contains the
            # pages of all rows.
            if as_stored and cache.k.dtype in (jnp.int8, cfg.dtype):
                block_table = cache.block_table
            else:
                seen = paged_cache.gather_pages(cache)
        else:
            cache, seen = kv.extend_quantized(
                cache, heads.k, heads.v, heads.q_positions, self.window
            )
            if cfg.invariant and self.window is not None:
                # the slots of a ring are not in the order of the keys, in which sums are added
                seen = kv.in_order(seen)
            k_positions = seen.positions
        if seen.k_scale is not None and as_stored:
            k, v, scales = seen.k, seen.v, (seen.k_scale, seen.v_scale)
        else:
            k, v = (x.astype(cfg.dtype) for x in kv.read(seen, dtype))
        heads = heads._replace(
            k=k,
            v=v,
            k_positions=k_positions,
            k_scale=scales[0],
            v_scale=scales[1],
            block_table=block_table,
        )
        return cache, heads

    def _attend(self, heads: _Heads, dropout_key: jax.Array | None) -> jax.Array:  # [B, T, N, Hv]
        """Return the output of each head. Shaw's positions materialize the attention weights."""
        cfg = self.config
        if self.shaw is not None:
            weights = dropout(self._weights(heads), cfg.attention_dropout, dropout_key)
            return self._average(weights, heads)
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
            dropout_rate=0.0 if dropout_key is None else cfg.attention_dropout,
            dropout_key=dropout_key if cfg.attention_dropout else None,
            key_scale=heads.k_scale,
            value_scale=heads.v_scale,
            block_table=heads.block_table,
            implementation=cfg.attention_implementation,
        )

    def _average(self, weights: jax.Array, heads: _Heads) -> jax.Array:
        """Average the values with weights f32[B, N, T, S] and return [B, T, N, Hv]."""
        # set nonfinite values to zero, because 0 * NaN would be NaN
        finite = jnp.isfinite(heads.v).all(axis=-1, keepdims=True)
        v = jnp.where(finite, heads.v, 0)

        def average(
            weights: jax.Array,
            v: jax.Array,
            table: jax.Array | None,
            q_positions: jax.Array,
            k_positions: jax.Array,
        ) -> jax.Array:
            groups = rearrange(weights, "B (K G) T S -> B K G T S", K=self.config.kv_heads)
            out = jnp.einsum("BKGTS,BSKH->BTKGH", groups, v.astype(jnp.float32))
            out = rearrange(out, "B T K G H -> B T (K G) H")
            if table is not None:
                out = out + pos.shaw_values(weights, table, q_positions, k_positions)
            return out.astype(heads.q.dtype)

        table = None if self.shaw is None else self.shaw_value
        arrays = [weights, v, table, *heads.known_positions()]
        return by_compiler(average, arrays, split(heads.q, slice(3)))

    def _weights(self, heads: _Heads) -> jax.Array:  # f32[B, N, T, S]
        """Return the softmax before dropout. If a query sees NaN or inf, its row is NaN."""
        cfg, bias = self.config, heads.bias
        finite = jnp.isfinite(heads.v).all(axis=-1, keepdims=True)
        # The kernels return NaN for a query that sees a nonfinite value. Weights do not depend on
        # the values, so mark the keys of such values.
        k = jnp.where(finite, heads.k, jnp.nan)
        q_positions, k_positions = heads.q_positions, heads.k_positions
        if self.shaw is not None:
            q_positions, k_positions = heads.known_positions()
            # Shaw's term is scaled like q.k: q (k + a) / sqrt(H). A bias is not scaled.
            scale = cfg.key_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
            shaw = pos.shaw_scores(heads.q, self.shaw_key, q_positions, k_positions)
            bias = scale * shaw  # type: ignore[assignment]
        return dot_product_attention_weights(
            heads.q,
            k,
            mask=heads.mask,
            bias=bias,
            scale=cfg.attention_scale,
            softcap=cfg.attention_softcap,
            sinks=self.sinks if cfg.attention_sinks else None,
            q_positions=q_positions,
            k_positions=k_positions,
            implementation=cfg.attention_implementation,
        )


@short_repr
@dataclass
class CustomCall:
    """State and helper methods that a custom block passes to `CustomBlock.run` in one call.

    Attributes:
        layer: index of the block, which is traced in a scanned stack.
    """

    attention: Attention
    inputs: BlockInputs
    cache: LayerCache | None
    visit: Visit
    keys: Sequence[jax.Array | None]
    layer: jax.Array | int | None
    stream: jax.Array  # [B, T, D]
    attended: bool = False
    dropped: int = 0

    def attend(
        self,
        q: jax.Array,  # [B, T, N, H]
        k: jax.Array,  # [B, T, K, H]
        v: jax.Array,  # [B, T, K, Hv]
    ) -> jax.Array:  # [B, T, N, Hv]
        """Return the output of each head, with the config's positions, mask and implementation.

        Pass `q` and `k` before rotation. Earlier tokens are read from the cache, and the new tokens
        are written to it. Raise ValueError on a second call, or if a shape does not match the
        config.
        """
        cfg = self.attention.config
        if self.attended:
            raise ValueError("attend was called twice: a block caches the keys of a single call")
        lead, dtype = self.stream.shape[:2], self.stream.dtype
        sizes = {
            "q": (cfg.num_heads, cfg.key_dim),
            "k": (cfg.kv_heads, cfg.key_dim),
            "v": (cfg.kv_heads, cfg.value_dim),
        }
        for (name, size), x in zip(sizes.items(), (q, k, v), strict=True):
            if x.shape != (*lead, *size):
                rule = f"the config (num_heads, num_kv_heads, head_dim) requires {[*lead, *size]}"
                raise ValueError(f"attend: {name} is {list(x.shape)}: {rule}")
        self.attended = True
        # A custom block may compute in float32, but the cache and the kernels use the compute
        # dtype.
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        heads, self.cache = self.attention(
            self.stream, self.inputs, cache=self.cache, dropout_key=self.keys[0], visit=self.visit,
            projected=(q, k, v),
        )  # fmt: skip
        return heads

    def dropout(self, y: jax.Array) -> jax.Array:
        """Apply the config's dropout to an array of any shape if dropout is on."""
        key = self.keys[1]
        self.dropped += 1
        # A block may call this method several times, and each call must draw its own bits.
        key = None if key is None else jax.random.fold_in(key, self.dropped)
        return dropout(y, self.attention.config.dropout, key)


class Block(Module):
    """A mixer, optional cross-attention and a feed-forward layer, each in a residual branch.

    The mixer is self-attention, unless the config's `mixers` contain another one. In this order,
    each branch f updates the stream x according to `norm_order`:

        pre       x + f(n(x))
        post      n(x + f(x))
        sandwich  x + m(f(n(x)))
        output    x + m(f(x))
        parallel  x + f(n(x)) + g(m(x)), with n = m for "parallel_shared"
    """

    config: ModelConfig
    cross: bool = False
    depth: int | None = None
    """Number of blocks in the stack; None means num_layers."""
    window: int | None = None
    """Window of the block's mask."""
    number: int | None = None
    """Index of the block in a looped stack; None in a scan, which passes it to `__call__`."""

    def setup(self) -> None:
        cfg = self.config
        if cfg.block is not None:
            init = partial(cfg.block.init, cfg)
            # Only the shapes are needed, so the initializer of the block is traced but not run.
            expected = jax.tree.map(jnp.shape, jax.eval_shape(init, jax.random.key(0)))
            own: Any = {}
            if self.has_variable("params", "own"):
                self._state.children["own"] = "params"  # mark it as declared, as `parameter` does
                own = self.get_variable("params", "own")
            elif expected:
                # All parameters are f32, regardless of the dtype that `init` returns.
                in_f32 = lambda key: jax.tree.map(lambda x: x.astype(F32), init(key))  # noqa: E731
                own = self.param("own", in_f32)
            own = unfreeze(own)
            shapes = jax.tree.map(jnp.shape, own)  # before flax freezes it in the next line
            self.own: Params = own
            if expected != shapes:
                path, kind = "/".join((*self.path, "own")), type(cfg.block).__name__
                raise ValueError(f"{path} has shapes {shapes}, but {kind}.init makes {expected}")
        mixer = "attention" if self.number is None else cfg.mixer(self.number)
        if mixer == "gated_delta":
            self.gated_delta = GatedDeltaNet(cfg, self.depth)
        elif mixer == "short_conv":
            self.short_conv = GatedShortConv(cfg, self.depth)
        elif mixer == "latent_attention":
            latent = MultiHeadLatentAttention(cfg, self.depth, self.window, self.number)
            self.latent_attention = latent
        else:
            number = self.number
            self.attention = Attention(cfg, depth=self.depth, window=self.window, number=number)
        if cfg.block is not None and cfg.block.is_whole:
            refuse_surplus(self)
            return
        branches = [mixer, *(["cross_attention"] if self.cross else [])]
        branches += ["feed_forward"] if cfg.ff_dim else []
        self.branches = branches
        if self.cross:
            self.cross_attention = Attention(cfg, cross=True, depth=self.depth)
        if cfg.ff_dim:
            feed_forward = ExpertFeedForward if cfg.has_experts(self.number) else FeedForward
            self.feed_forward = feed_forward(cfg, self.depth)
        self.order = order = (
            cfg.norm_order if self.number is None else cfg.norm_order_in(self.number)
        )
        if order == "parallel_shared":
            # in GPT-J and Cohere, the branches share one norm
            self.norm = dict.fromkeys(branches, Norm(cfg, name="norm"))
        elif order != "output":
            # in ModernBERT, the norm of the embedding replaces the first norm of block 0
            skipped = [] if cfg.first_norm or self.number != 0 else [mixer]
            self.norm = {name: Norm(cfg) for name in branches if name not in skipped}
        if order in ("sandwich", "output"):
            self.out_norm = {name: Norm(cfg) for name in branches}
        refuse_surplus(self)

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        inputs: BlockInputs,
        cache: LayerCache | StateCache | None = None,
        cross_cache: kv.KVCache | None = None,
        key: jax.Array | None = None,
        layer: jax.Array | int | None = None,  # index of the block, i32[] in a scan
    ) -> tuple[jax.Array, LayerCache | StateCache | None, Captured]:
        """Return the stream [B, T, D] after the branches, the updated cache and captured values.

        Cross-attention either reads `cross_cache` or computes its keys and values from the memory.
        """
        cfg = self.config
        source = inputs.memory_positions if cross_cache is None else cross_cache.positions
        layer = self.number if layer is None else layer
        visit = inputs.places.visit(layer, inputs.token_positions, source)
        # always split into five keys, so that the random numbers of a branch do not depend on which
        # other branches exist
        keys = split_key(key, 5)
        if cfg.block is not None and cfg.block.is_whole:
            assert not isinstance(cache, StateCache)
            call = CustomCall(self.attention, inputs, cache, visit, keys, layer, x)
            y = cfg.block.run(self.own, x, call)
            if not call.attended:
                raise ValueError(f"{cfg.block!r}: run must call attend once")
            if getattr(y, "shape", None) != x.shape:
                shape = getattr(y, "shape", type(y).__name__)
                raise ValueError(f"{cfg.block!r}: run returns {shape}: must be {x.shape}")
            return visit("residual", y.astype(x.dtype)), call.cache, visit.captured
        if cfg.block is not None:
            # the edits of the custom block apply before those of the call
            known = {name[8:] for name in places(cfg) if name.startswith("block_0/")}
            requested, edits = visit.requested, dict(visit.edits)
            for name, function in cfg.block.edit(self.own).items():
                if name not in known or name.endswith("/key_positions"):
                    rule = f"must be an editable place of a block{nearest(name, known)}"
                    raise ValueError(f"{type(cfg.block).__name__}.edit has {name!r}: {rule}")
                edits[name] = [BlockEdit(name, (), EditSpec(function)), *edits.get(name, [])]
            visit = copy(visit)
            visit.edits, visit.requested = edits, requested | edits.keys()
        drop = {"cross_attention": keys[2], "feed_forward": keys[4]}
        before = x
        for branch in self.branches:
            if branch == "feed_forward" and not cfg.is_parallel:
                x = visit("residual_mid", x)
            read = before if cfg.is_parallel else x
            after = self.order in ("post", "output") or branch not in self.norm
            y = read if after else self.norm[branch](read)
            y = visit(f"{branch}/input", y)
            if branch == "attention":
                assert not isinstance(cache, StateCache)
                y, cache = self.attention(y, inputs, cache=cache, dropout_key=keys[1], visit=visit)
            elif branch in ("gated_delta", "short_conv"):
                assert cache is None or isinstance(cache, StateCache)
                mix = self.gated_delta if branch == "gated_delta" else self.short_conv
                y, cache = mix(
                    y, positions=inputs.positions, segments=inputs.segments, cache=cache,
                    dropout_key=keys[1], visit=visit,
                )  # fmt: skip
            elif branch == "latent_attention":
                assert not isinstance(cache, StateCache)
                y, cache = self.latent_attention(
                    y, positions=inputs.positions, token_positions=inputs.token_positions,
                    mask=inputs.mask, bias=inputs.bias, cache=cache, dropout_key=keys[1],
                    visit=visit,
                )  # fmt: skip
            elif branch == "cross_attention":
                if cross_cache is None:
                    assert inputs.memory is not None and inputs.memory_positions is not None
                    memory = inputs.memory, inputs.memory_positions
                    cross_cache = self.init_cross_cache(*memory, keys[3])
                y, _ = self.cross_attention(
                    y, inputs, cross_cache=cross_cache, dropout_key=keys[3], visit=visit
                )
            else:
                y = self.feed_forward(y, keys[4], visit)
            if self.order in ("sandwich", "output"):
                y = self.out_norm[branch](y)
            # Granite scales the output of each branch
            y = y if cfg.residual_scale is None else y * cfg.residual_scale
            x = x + dropout(y, cfg.dropout, drop.get(branch, keys[0]))
            if self.order == "post":
                x = self.norm[branch](x)
        return visit("residual", x), cache, visit.captured

    def init_cross_cache(
        self,
        memory: jax.Array,  # [B, S, D]
        positions: jax.Array,  # i32[B, S]; negative means padding
        key: jax.Array | None = None,
    ) -> kv.KVCache:
        """Compute the keys and values of an encoder's output once for all later queries."""
        k, v = self.cross_attention.cross_keys_values(memory, key)
        positions = jnp.array(positions, jnp.int32)  # copy, so that layers share no buffer
        # A source that is all padding has only negative positions and thus length 0.
        return kv.KVCache(k, v, positions, jnp.maximum(positions.max(axis=1) + 1, 0))

    def scan_cross_cache(
        self, memory: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, kv.KVCache]:
        """Adapt `init_cross_cache` to `nn.scan`, with the memory as the carry."""
        return memory, self.init_cross_cache(memory, positions)

    def scan_step(
        self,
        carry: tuple[jax.Array, kv.KVCache | None, Captured],  # [B, T, D], leaves [B, L, ...]
        layer: jax.Array,  # i32[]
        key: jax.Array | None,
        cross_caches: kv.KVCache | None,  # leaves [B, L, ...]
        inputs: BlockInputs,
    ) -> tuple[tuple[jax.Array, kv.KVCache | None, Captured], Captured]:
        """Adapt `__call__` to `nn.scan`.

        The cache of all layers is part of the carry instead of being scanned over, so that a
        donated cache is updated in place. Values captured in only a few blocks are also part of the
        carry, keyed by full name. The scan stacks the other captured values, which form the second
        result.
        """

        def read(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(leaf, layer, 1, keepdims=False)

        def write(leaf: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(leaf, new, layer, 1)

        x, caches, sparse = carry
        cache, cross_cache = jax.tree.map(read, (caches, cross_caches))
        x, cache, captured = self(x, inputs, cache, cross_cache, key, layer)
        caches = None if caches is None else jax.tree.map(write, caches, cache)
        sparse, dense = inputs.places.keep(sparse, captured, layer)
        return (x, caches, sparse), dense
