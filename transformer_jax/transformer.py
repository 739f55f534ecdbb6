"""Encoder, Decoder and EncoderDecoder: three models from one Block.

`model.apply({"params": params}, tokens, ...) -> (logits f32, cache)` is training, prefill and
decoding alike: any number of tokens at a time, with or without a cache. A token whose position is
negative is padding: nobody sees it and it is not cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import cache as kv
from transformer_jax import positions as pos
from transformer_jax.config import ModelConfig
from transformer_jax.layers import Block, Embed, Linear, Norm, activate, split_key
from transformer_jax.masks import Causal, Mask, Segments, Window

Layers = tuple[kv.KVCache, ...] | kv.KVCache
"""One cache a layer; or, of a scanned stack, one whose leaves are [B, L, ...]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelCache:
    """All a model remembers of the tokens so far; goes in and comes out, never mutated."""

    layers: Layers
    cross: Layers | None = None
    """Keys and values of an encoder-decoder's source, computed once."""

    @property
    def length(self) -> jax.Array:  # i32[B]
        """The position of each row's next token."""
        if isinstance(self.layers, kv.KVCache):
            return self.layers.length[:, 0]
        return self.layers[0].length

    @property
    def capacity(self) -> int:
        """Slots per row and layer."""
        if isinstance(self.layers, kv.KVCache):
            return self.layers.k.shape[2]
        return self.layers[0].capacity


def cache_limit(config: ModelConfig, capacity: int) -> int | None:
    """Positions a cache can hold; None where a ring at least as long as the window never fills."""
    return None if config.window is not None and capacity >= config.window else capacity


def empty_layers(config: ModelConfig, depth: int, batch: int, capacity: int) -> Layers:
    """Empty self-attention caches of a stack."""
    heads, dim, value_dim = config.kv_heads, config.key_dim, config.value_dim
    # Each layer has memory of its own, which can be given away.
    layers = tuple(
        kv.init(batch, capacity, heads, dim, value_dim, config.dtype) for _ in range(depth)
    )
    if not config.scan_layers:
        return layers
    return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *layers)


class Stack(nn.Module):
    """Blocks one after the other: a loop (`block_0`, ...) or a scan over stacked parameters."""

    config: ModelConfig
    depth: int
    cross: bool = False
    bidirectional: bool = False

    def setup(self) -> None:
        cfg = self.config
        if cfg.scan_layers:
            block = nn.remat(Block, prevent_cse=False) if cfg.remat else Block
            lifted: dict[str, Any] = dict(
                variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth
            )
            shared = (nn.broadcast,) * 6
            self.blocks = nn.scan(
                block,
                methods={
                    "__call__": dict(lifted, in_axes=(1, 1, 0, *shared), out_axes=1),
                    "scan_context": dict(lifted, in_axes=nn.broadcast, out_axes=1),
                },
            )(cfg, self.cross, self.depth)
        else:
            block = nn.remat(Block) if cfg.remat else Block
            self.block = [block(cfg, self.cross, self.depth) for _ in range(self.depth)]
        if cfg.positions == "t5":
            self.relative_bias = self.param(
                "relative_bias",
                nn.initializers.normal(cfg.init_std),
                (cfg.relative_buckets, cfg.num_heads),
                jnp.float32,
            )
        if cfg.norm_order != "post":
            self.norm = Norm(cfg)

    def _bias(self) -> pos.ALiBi | pos.RelativeBias | None:
        """The position bias all layers share."""
        cfg = self.config
        if cfg.positions == "alibi":
            return pos.ALiBi(pos.alibi_slopes(cfg.num_heads))
        if cfg.positions == "t5":
            return pos.RelativeBias(
                self.relative_bias,
                bidirectional=self.bidirectional,
                max_distance=cfg.relative_max_distance,
            )
        return None

    def context_cache(
        self,
        memory: jax.Array,  # [B, S, D]
        positions: jax.Array,  # i32[B, S]
    ) -> Layers:
        """Every block's keys and values of a source."""
        if self.config.scan_layers:
            return self.blocks.scan_context(memory, positions)[1]
        return tuple(block.context_cache(memory, positions) for block in self.block)

    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array | None,  # i32[B, T]; None is arange(T)
        token_positions: jax.Array,  # i32[B, T] or [T]
        mask: Mask | None,
        layers: Layers | None = None,
        cross: Layers | None = None,
        memory: jax.Array | None = None,  # [B, S, D]
        memory_positions: jax.Array | None = None,  # i32[B, S]
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, Layers | None]:
        """The output [B, T, D], normalised unless post-norm, and the updated caches."""
        shared = (positions, token_positions, mask, self._bias(), memory, memory_positions)
        updated: Layers | None
        if self.config.scan_layers:
            keys = None if key is None else jax.random.split(key, self.depth)
            scanned: Any = self.blocks
            x, updated = scanned(x, layers, cross, keys, *shared)
        else:
            new: list[Any] = []
            for i, (block, key_i) in enumerate(
                zip(self.block, split_key(key, self.depth), strict=True)
            ):
                layer = layers[i] if isinstance(layers, tuple) else None
                context = cross[i] if isinstance(cross, tuple) else None
                x, layer = block(x, layer, context, key_i, *shared)
                new.append(layer)
            updated = None if layers is None else tuple(new)
        return (x if self.config.norm_order == "post" else self.norm(x)), updated


class Encoder(nn.Module):
    """Bidirectional stack with masked-token and classification heads (Devlin et al. 2019)."""

    config: ModelConfig

    def setup(self) -> None:
        cfg = self.config
        self.embed = Embed(cfg)
        self.encoder = Stack(cfg, cfg.num_layers, bidirectional=True)
        if cfg.masked_token_head:
            self.head_dense = Linear(cfg, (cfg.d_model,))
            self.head_norm = Norm(cfg)
        if cfg.num_classes is not None:
            self.pooler = Linear(cfg, (cfg.d_model,))
            self.classifier = Linear(cfg, (cfg.num_classes,))

    def encode(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
        key: jax.Array | None = None,
    ) -> jax.Array:  # [B, T, D]
        """The hidden state of every token."""
        cfg = self.config
        check_tokens(tokens, cfg.vocab_size)
        if types is not None and cfg.type_vocab_size is None:
            raise ValueError("types are given, but type_vocab_size is None")
        token_positions, mask = _place(cfg, tokens, positions, segments, mask)
        embed_key, stack_key = split_key(key, 2)
        x = self.embed(tokens, token_positions, types, embed_key)
        x, _ = self.encoder(
            x, positions=positions, token_positions=token_positions, mask=mask, key=stack_key
        )
        return x

    def __call__(self, tokens: jax.Array, **arguments) -> tuple[jax.Array, None]:
        """Logits f32[B, T, V] for masked-token training; takes what `encode` takes."""
        x = self.encode(tokens, **arguments)
        if self.config.num_classes is not None and self.is_initializing():
            self._classes(x, None)
        if self.config.masked_token_head:
            x = self.head_norm(activate(self.head_dense(x), self.config.activation))
        return self.embed.logits(x), None

    def classify(self, tokens: jax.Array, **arguments) -> jax.Array:  # f32[B, C]
        """Class logits of each row: W tanh(pool(its first token that is not padding))."""
        if self.config.num_classes is None:
            raise ValueError("num_classes is None: this encoder has no classification head")
        return self._classes(self.encode(tokens, **arguments), arguments.get("positions"))

    def _classes(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        first = x[:, 0]
        if positions is not None:
            at = jnp.argmax(positions >= 0, axis=1)
            first = jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        return self.classifier(jnp.tanh(self.pooler(first))).astype(jnp.float32)


class Decoder(nn.Module):
    """Causal language model (Radford et al. 2019; Touvron et al. 2023)."""

    config: ModelConfig

    def setup(self) -> None:
        self.embed = Embed(self.config)
        self.decoder = Stack(self.config, self.config.num_layers)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # None is Causal(); another mask replaces it
        cache: ModelCache | None = None,
        segments: jax.Array | None = None,  # i32[B, T]: ids of packed documents
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, ModelCache | None]:
        """Logits f32[B, T, V] of the next token, and the updated cache.

        Without `positions`, tokens stand at arange(T), or behind what the cache holds. A `mask`
        takes the place of `Causal()`: one that does not contain it, such as `Padding(valid)` alone,
        sees the future; the config's window and the segments are added to it. `segments`
        packs documents: attention stays within one, and its positions start at 0 (padding may be
        a document of its own).
        """
        return decode_tokens(
            self, tokens, positions, Causal() if mask is None else mask, cache, segments, key
        )


class EncoderDecoder(nn.Module):
    """Source in, target out (Vaswani et al. 2017); both stacks share the embedding."""

    config: ModelConfig

    def setup(self) -> None:
        cfg = self.config
        self.embed = Embed(cfg)
        self.encoder = Stack(cfg, cfg.num_layers, bidirectional=True)
        self.decoder = Stack(cfg, cfg.decoder_layers, cross=True)

    def encode(
        self,
        source: jax.Array,  # i32[B, S]
        *,
        positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        mask: Mask | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:  # [B, S, D]
        """The encoder's output."""
        check_tokens(source, self.config.vocab_size)
        token_positions, mask = _place(self.config, source, positions, None, mask)
        embed_key, stack_key = split_key(key, 2)
        x = self.embed(source, token_positions, key=embed_key)
        x, _ = self.encoder(
            x, positions=positions, token_positions=token_positions, mask=mask, key=stack_key
        )
        return x

    def init_cache(
        self,
        source: jax.Array,  # i32[B, S]
        *,
        capacity: int,
        positions: jax.Array | None = None,  # i32[B, S]; negative is padding
    ) -> ModelCache:
        """Read the source once: its cross-attention keys and values, and an empty target cache."""
        memory = self.encode(source, positions=positions)
        cross = self.decoder.context_cache(memory, _default_positions(source, positions))
        cfg = self.config
        return ModelCache(empty_layers(cfg, cfg.decoder_layers, len(source), capacity), cross)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]: the target
        *,
        source: jax.Array | None = None,  # i32[B, S]
        source_positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # on the target; None is Causal()
        cache: ModelCache | None = None,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, ModelCache | None]:
        """Logits f32[B, T, V] of the next target token: from a `source`, or from a `cache`."""
        if (source is None) == (cache is None):
            raise ValueError("give either source or cache: a cache already holds its source")
        if source is None and source_positions is not None:
            raise ValueError("source_positions without a source: a cache already holds them")
        encoder_key, key = split_key(key, 2)
        memory = None
        if source is not None:
            memory = self.encode(source, positions=source_positions, key=encoder_key)
            source_positions = _default_positions(source, source_positions)
        mask = Causal() if mask is None else mask
        return decode_tokens(
            self, tokens, positions, mask, cache, None, key, memory, source_positions
        )


def decode_tokens(
    model: Decoder | EncoderDecoder,
    tokens: jax.Array,
    positions: jax.Array | None,
    mask: Mask,
    cache: ModelCache | None,
    segments: jax.Array | None,
    key: jax.Array | None,
    memory: jax.Array | None = None,
    memory_positions: jax.Array | None = None,
) -> tuple[jax.Array, ModelCache | None]:
    """Embed, run the decoder stack and read the logits; shared by both causal models."""
    cfg = model.config
    check_tokens(tokens, cfg.vocab_size)
    overflow = None
    if cache is not None:
        _check_cache(model, cache, tokens)
        if segments is not None:
            raise ValueError("segments with a cache: give each document a row of its own")
        if positions is None:
            positions = kv.next_positions(cache.length, jnp.ones(tokens.shape, bool))
        limit = cache_limit(cfg, cache.capacity)
        if limit is not None:
            positions, overflow = _refuse_overflow(positions, limit)
    token_positions, placed = _place(cfg, tokens, positions, segments, mask, causal=True)
    embed_key, stack_key = split_key(key, 2)
    x = model.embed(tokens, token_positions, key=embed_key)
    x, layers = model.decoder(
        x,
        positions=positions,
        token_positions=token_positions,
        mask=placed,
        layers=None if cache is None else cache.layers,
        cross=None if cache is None else cache.cross,
        memory=memory,
        memory_positions=memory_positions,
        key=stack_key,
    )
    logits = model.embed.logits(x)
    if overflow is not None:
        logits = jnp.where(overflow[:, None, None], jnp.nan, logits)
    if cache is None or layers is None:
        return logits, None
    return logits, replace(cache, layers=layers)


def _check_cache(model: Decoder | EncoderDecoder, cache: ModelCache, tokens: jax.Array) -> None:
    """The cache has the layout, the depth and the rows of this model and these tokens."""
    cfg, crossed = model.config, isinstance(model, EncoderDecoder)
    if crossed and cache.cross is None:
        raise ValueError("cache.cross is None: start it from a source, with method='init_cache'")
    depth = cfg.decoder_layers if crossed else cfg.num_layers
    for name in ("layers", "cross") if crossed else ("layers",):
        layers = getattr(cache, name)
        if isinstance(layers, kv.KVCache) != cfg.scan_layers:
            held, wanted = ("looped", "scanned") if cfg.scan_layers else ("scanned", "looped")
            raise ValueError(f"cache.{name} is of a {held} stack, the model's is {wanted}")
        found = layers.length.shape[1] if isinstance(layers, kv.KVCache) else len(layers)
        if found != depth:
            raise ValueError(f"cache.{name} has {found} layers, the model {depth}")
    if cache.length.shape[0] != tokens.shape[0]:
        raise ValueError(f"tokens have {tokens.shape[0]} rows, the cache {cache.length.shape[0]}")


def _refuse_overflow(positions: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
    """Positions with those past the cache's end made padding, and which rows [B] had any.

    A known position raises; a traced one poisons its row's logits and overwrites nothing.
    """
    if not isinstance(positions, jax.core.Tracer) and positions.size:
        last = int(np.max(positions))
        if last >= limit:
            raise ValueError(f"position {last} is past the cache: its capacity is {limit}")
    beyond = positions >= limit
    return jnp.where(beyond, -1, positions), beyond.any(axis=1)


def _default_positions(tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
    if positions is not None:
        return positions
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def _place(
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array | None,
    segments: jax.Array | None,
    mask: Mask | None,
    causal: bool = False,
) -> tuple[jax.Array, Mask | None]:
    """Positions for embeddings and rotation, and the mask with the config's window and segments."""
    if positions is not None and not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions are {positions.dtype}: must be integers")
    if positions is not None and positions.shape != tokens.shape:
        raise ValueError(f"positions {positions.shape} and tokens {tokens.shape} differ in shape")
    if config.positions == "learned" and positions is None and segments is None:
        if tokens.shape[1] > config.max_len:
            raise ValueError(f"{tokens.shape[1]} tokens are more than max_len {config.max_len}")
    token_positions = jnp.arange(tokens.shape[1]) if positions is None else positions
    extra: list[Mask] = []
    if config.window is not None:
        extra.append(Window(config.window, None if causal else config.window))
    if segments is not None:
        if positions is not None:
            raise ValueError("positions with segments: a document's positions start at 0")
        if segments.shape != tokens.shape:
            raise ValueError(f"segments {segments.shape} and tokens {tokens.shape} differ in shape")
        extra.append(Segments(segments))
        token_positions = _within_segments(segments)
    for other in extra:
        mask = other if mask is None else mask & other
    return token_positions, mask


def _within_segments(segments: jax.Array) -> jax.Array:  # i32[B, T] -> i32[B, T]
    """Each token's distance from the first of its run of equal ids."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    starts = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def check_tokens(tokens: jax.Array | np.ndarray, vocab_size: int) -> None:
    """Integer ids of rank 2; a known id outside the vocabulary raises (a traced one gives NaN)."""
    if not hasattr(tokens, "ndim"):
        raise ValueError(f"tokens are a {type(tokens).__name__}: must be an array [B, T]")
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens are {tokens.dtype}{list(tokens.shape)}: must be integers [B, T]")
    if isinstance(tokens, jax.core.Tracer):
        return
    known = np.asarray(tokens)
    wrong = np.argwhere((known < 0) | (known >= vocab_size))
    if len(wrong):
        row, column = wrong[0]
        raise ValueError(
            f"token {known[row, column]} at [{row}, {column}]: must be in 0..{vocab_size - 1}"
        )


def stack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """A looped model's parameters as its scanned twin has them: block_0, ... -> blocks [L, ...]."""
    names = sorted((n for n in params if n.startswith("block_")), key=lambda n: int(n[6:]))
    out = {
        name: stack_layers(value) if isinstance(value, Mapping) else value
        for name, value in params.items()
        if name not in names
    }
    if names:
        out["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[n] for n in names))
    return out


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `stack_layers`."""
    out: dict[str, Any] = {}
    for name, value in params.items():
        if name == "blocks":
            depth = jax.tree.leaves(value)[0].shape[0]
            for i in range(depth):
                out[f"block_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], value)
        else:
            out[name] = unstack_layers(value) if isinstance(value, Mapping) else value
    return out
