"""Multi-head latent attention, whose cache contains one small vector per token for all heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.attention import biases, latent_attention
from transformer_jax.attention.api import dot_product_attention, dot_product_attention_weights
from transformer_jax.attention.masks import Mask
from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache import paged_cache
from transformer_jax.cache.paged_cache import PagedCache
from transformer_jax.config import ModelConfig, Rope
from transformer_jax.models import positions as pos
from transformer_jax.models.adapters import AdaptedKernel
from transformer_jax.models.functional import F32, drop_weights
from transformer_jax.models.layers import Linear, branch_std, parameter, refuse_surplus
from transformer_jax.models.module import Module
from transformer_jax.models.ops import norm
from transformer_jax.models.places import Visit
from transformer_jax.sharding import by_compiler, split

EPS = 1e-6
"""Epsilon of the norms of latent vectors, which DeepSeek's models do not configure."""


class MultiHeadLatentAttention(Module):
    """Attention whose keys and values are linear functions of one latent vector per token.

        c = norm(W_c x);  r = rotate(W_r x);  q_n = [q'_n, rotate(q''_n)] = W_q norm(W_a x)
        k_n = [W_k,n c, r];  v_n = W_v,n c;  out = W_o concat_n softmax(scale q_n k_n^T) v_n

    (DeepSeek-AI 2024, DeepSeek-V2, section 2.1). The parameters are named query_latent (W_a),
    query (W_q), latent (W_c), rotated_key (W_r), key (W_k), value (W_v) and out (W_o).

    The cache is a `KVCache` with c as keys and r as values, both with a single head.
    """

    config: ModelConfig
    depth: int | None = None
    """Number of blocks in the stack; None means num_layers."""
    window: int | None = None
    """Window of the mask, from which a cache determines the keys that new tokens can still see."""
    number: int | None = None
    """Index of the block in a looped stack."""

    def setup(self) -> None:
        cfg, sizes = self.config, self.config.latent_attention
        assert sizes is not None
        linear, ones = partial(Linear, cfg, use_bias=False), nn.initializers.ones
        if (rank := sizes.query_rank) is not None:
            self.query_latent = linear((rank,))
            self.query_latent_scale = parameter(self, "query_latent_scale", ones, (rank,))
        self.query = linear((cfg.num_heads, sizes.key_dim))
        self.latent, self.rotated_key = linear((sizes.kv_rank,)), linear((sizes.rope_dim,))
        self.latent_scale = parameter(self, "latent_scale", ones, (sizes.kv_rank,))
        self.key = linear((cfg.num_heads, sizes.nope_dim))
        self.value = linear((cfg.num_heads, sizes.value_dim))
        self.out = linear((cfg.d_model,), 2, std=branch_std(cfg, self.depth))
        if cfg.attention_sinks:
            self.sinks = parameter(self, "sinks", nn.initializers.zeros, (cfg.num_heads,))
        order = cfg.positions
        rope = order.in_layer(self.window, self.number) if isinstance(order, Rope) else None
        # `dims` describes the heads of the attention layers
        self.rope = None if rope is None else replace(rope, dims=None)
        refuse_surplus(self)

    def _rotated(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:  # [B, T, N, R]
        if self.rope is None:
            return x
        assert positions is not None
        return pos.apply_rope(x, positions, self.rope)

    def _kernels(self) -> list[jax.Array] | None:
        """Return W_k and W_v in the compute dtype, or None if one has an adapter.

        The sum of a kernel and its adapter is never stored, so adapters need the expanded form.
        """
        found = [self.variables["params"][name]["kernel"] for name in ("key", "value")]
        if any(isinstance(kernel, AdaptedKernel) for kernel in found):
            return None
        return [kernel.astype(self.config.dtype) for kernel in found]

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array | None = None,  # i32[B, T], for masks and caches
        token_positions: jax.Array | None = None,  # i32[B, T] or [T], for rotation
        mask: Mask | None = None,
        bias: biases.ALiBi | biases.RelativeBias | None = None,
        cache: kv.KVCache | PagedCache | None = None,
        dropout_key: jax.Array | None = None,
        visit: Visit | None = None,
    ) -> tuple[jax.Array, kv.KVCache | PagedCache | None]:
        """Attend from x to itself and to earlier tokens in `cache`, and return the new cache."""
        cfg, sizes = self.config, self.config.latent_attention
        assert sizes is not None
        visit = Visit() if visit is None else visit
        normed = partial(norm, bias=None, eps=EPS, centred=False)
        y, H = x, sizes.nope_dim
        if sizes.query_rank is not None:
            y = normed(self.query_latent(x, dropout_key), self.query_latent_scale.astype(F32))
        q = self.query(y, dropout_key)
        q = jnp.concatenate([q[..., :H], self._rotated(q[..., H:], token_positions)], axis=-1)
        c = normed(self.latent(x, dropout_key), self.latent_scale.astype(F32))[:, :, None]
        r = self._rotated(self.rotated_key(x, dropout_key)[:, :, None], token_positions)
        q = visit("latent_attention/query", q)
        c = visit("latent_attention/latent", c)
        r = visit("latent_attention/rotated_key", r)
        k_positions = positions
        if cache is not None:
            assert positions is not None
            if isinstance(cache, PagedCache):
                cache = paged_cache.update(cache, c, r, positions)
                seen = paged_cache.gather_pages(cache)
            else:
                cache, seen = kv.extend_quantized(cache, c, r, positions, self.window)
            c, r = (one.astype(cfg.dtype) for one in kv.read(seen, c.dtype))
            k_positions = seen.positions
        if "latent_attention/key_positions" in visit.requested:
            found = jnp.arange(x.shape[1]) if k_positions is None else k_positions
            found = jnp.broadcast_to(found.astype(jnp.int32), (x.shape[0], found.shape[-1]))
            visit("latent_attention/key_positions", found)
        options: dict[str, Any] = dict(
            mask=mask, bias=bias, scale=cfg.attention_scale, softcap=cfg.attention_softcap,
            sinks=self.sinks if cfg.attention_sinks else None, q_positions=positions,
            k_positions=k_positions, implementation=cfg.attention_implementation,
        )  # fmt: skip
        drop: dict[str, Any] = {}
        if dropout_key is not None and cfg.attention_dropout:
            drop = dict(dropout_rate=cfg.attention_dropout, dropout_key=dropout_key)
        kernels = None if cache is None else self._kernels()
        place = "latent_attention/weights"
        if kernels is not None and place not in visit.requested:
            # In a step of decoding, the expanded form would multiply the latents of all slots by
            # both kernels, so `latent_attention` chooses the form with fewer products.
            of_cache: Any = partial(latent_attention, **options, **drop)
            heads = of_cache(q, c[:, :, 0], r[:, :, 0], *kernels)
        else:
            k, v = self.key(c[:, :, 0], dropout_key), self.value(c[:, :, 0], dropout_key)
            k = by_compiler(_with_rotated, [k, r], split(k))
            if place in visit.requested:
                weights = self._weights(q, k, v, options, visit)
            if place in visit.edits:
                weights = drop_weights(weights, cfg.attention_dropout, dropout_key)
                heads = by_compiler(_average, [weights, v], split(q)).astype(q.dtype)
            else:
                attend: Any = partial(dot_product_attention, **options, **drop)
                heads = (jax.checkpoint(attend) if cfg.remat == "attention" else attend)(q, k, v)
        heads = visit("latent_attention/heads", heads)
        return visit("latent_attention/output", self.out(heads, dropout_key)), cache

    def _weights(
        self, q: jax.Array, k: jax.Array, v: jax.Array, options: dict[str, Any], visit: Visit
    ) -> jax.Array:  # f32[B, N, T, S]
        """Return the softmax before dropout, after its edits, as in `Attention`."""
        # the kernels return NaN for a query that sees a nonfinite value
        k = jnp.where(jnp.isfinite(v).all(axis=-1, keepdims=True), k, jnp.nan)
        weights = dot_product_attention_weights(q, k, **options)
        if (queries := options["q_positions"]) is not None:  # padding queries have no weights
            weights = jnp.where(queries[:, None, :, None] >= 0, weights, 0.0)
        weights = visit("latent_attention/weights", weights)
        if "latent_attention/weights" in visit.edits and options["k_positions"] is not None:
            # an edit must not give weight to an empty slot
            wrong = (weights != 0) & (options["k_positions"] < 0)[:, None, None]
            weights = jnp.where(wrong.any(axis=-1, keepdims=True), jnp.nan, weights)
        return weights


def _with_rotated(k: jax.Array, r: jax.Array) -> jax.Array:  # [B, S, N, H], [B, S, 1, R]
    shared = jnp.broadcast_to(r, (*k.shape[:3], r.shape[3]))
    return jnp.concatenate([k, shared], axis=-1)


def _average(weights: jax.Array, v: jax.Array) -> jax.Array:  # [B, N, T, S], [B, S, N, Hv]
    v = jnp.where(jnp.isfinite(v).all(axis=-1, keepdims=True), v, 0)  # 0 * NaN would be NaN
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v.astype(F32))
