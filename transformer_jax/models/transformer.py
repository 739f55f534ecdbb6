"""Encoder, Decoder and EncoderDecoder: three models from one Block.

`model.apply({"params": params}, tokens, ...) -> (logits f32, cache)` is training, prefill and
decoding alike: any number of tokens at a time, with or without a cache. A token whose position is
negative is padding: nobody sees it and it is not cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import cache as kv
from transformer_jax import positions as pos
from transformer_jax.config import ModelConfig
from transformer_jax.integers import as_int32
from transformer_jax.layers import Block, Embed, Linear, Norm, activate, parameter, split_key
from transformer_jax.masks import Causal, Mask, Padding, Prefix, Segments, Window

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
        """Slots per row of the longest layer."""
        if isinstance(self.layers, kv.KVCache):
            return self.layers.k.shape[2]
        return max(layer.capacity for layer in self.layers)


class AttentionWeights(NamedTuple):
    """What each layer saw, and what it weighed the values with: after the softmax, before dropout.

    A row sums to 1, to less by the share of `attention_sinks`, and to 0 where it sees nothing or is
    of a padding token. Of one token, as `make_step(model).attend` gives them, there is no T, and S
    are the slots of the cache: slot p of a full cache is position p.
    """

    self: jax.Array | tuple[jax.Array, ...]
    """f32[B, L, N, T, S]; from caches of a window pattern f32[B, N, T, S] of each layer."""
    positions: jax.Array | tuple[jax.Array, ...]
    """i32[B, S]: where the keys of `self` stand, -1 what is empty; of a pattern, of each layer."""
    cross: jax.Array | None = None
    """f32[B, L, N, T, S] over the tokens of an encoder-decoder's source."""
    hidden: jax.Array | None = None
    """[B, L + 1, T, D]: the stream before each block, and the stack's output, which is normalised
    unless post-norm. Of one token [B, L + 1, D]. Padding tokens have some too; it means nothing."""


def by_slot(weights: AttentionWeights, cache: ModelCache) -> AttentionWeights:
    """The weights of one token without T, in the slots of the `cache` that now holds it.

    A cache shorter than its window was read with the new key behind it: that weight moves to the
    slot of the key.
    """

    def fold(own: jax.Array, seen: jax.Array, held: jax.Array) -> jax.Array:
        own, slots = own[..., 0, :], held.shape[1]
        if own.shape[-1] == slots:
            return own
        new = held == seen[:, slots:]  # [B, S]; of a padding token all are 0
        new = new.reshape(len(new), *(1,) * (own.ndim - 2), slots)
        return own[..., :slots] + jnp.where(new, own[..., slots:], 0.0)

    held: Any
    if isinstance(weights.self, tuple):
        held = tuple(layer.positions for layer in cast(tuple, cache.layers))
    elif isinstance(cache.layers, kv.KVCache):
        held = cache.layers.positions[:, 0]
    else:
        held = cache.layers[0].positions
    cross = None if weights.cross is None else weights.cross[..., 0, :]
    own = jax.tree.map(fold, weights.self, weights.positions, held)
    hidden = None if weights.hidden is None else weights.hidden[..., 0, :]
    return AttentionWeights(own, held, cross, hidden)


def rewind_cache(
    cache: ModelCache,
    length: jax.Array,  # i32[B]
) -> ModelCache:
    """Every layer forgets the positions >= length[b], as `cache.rewind` says; a source stays.

    Rings need room for it: a `capacity` (of one window) or a `slack` (of a pattern) that is larger
    than they need by as many slots as tokens are forgotten.
    """
    if isinstance(cache.layers, kv.KVCache):
        rewind = jax.vmap(kv.rewind, in_axes=(1, None), out_axes=1)
        return replace(cache, layers=rewind(cache.layers, length))
    return replace(cache, layers=tuple(kv.rewind(layer, length) for layer in cache.layers))


def cache_limit(config: ModelConfig, capacity: int) -> int | None:
    """Positions a cache can hold; None where every layer is a ring that never fills.

    That is one of at least its window and the sink tokens. `capacity` is the longest layer's.
    """
    rings = [
        window is not None and capacity >= window + config.sink_tokens
        for window in (_window(config, i) for i in range(config.decoder_layers))
    ]
    return None if all(rings) else capacity


def empty_layers(
    config: ModelConfig,
    depth: int,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike | None = None,  # None is the compute dtype
    slack: int = 0,
) -> Layers:
    """Empty self-attention caches of a stack, no two of whose leaves share memory.

    Of a window pattern, windowed layers are rings of min(capacity, window + sinks + slack) slots.
    """
    if slack < 0:
        raise ValueError(f"slack is {slack}: must not be negative")
    if slack and not isinstance(config.window, tuple):
        rule = "is for rings of a window pattern, here a ring has `capacity` slots"
        raise ValueError(f"slack is {slack}: {rule}")

    def layer(i: int) -> kv.KVCache:
        slots = _slots(config, i, capacity, slack)
        return kv.init(
            batch,
            slots,
            config.kv_heads,
            config.key_dim,
            config.value_dim,
            config.dtype if dtype is None else dtype,
            _sinks(config, i, slots),
        )

    if not config.scan_layers:
        return tuple(map(layer, range(depth)))
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * depth, axis=1), layer(0))


def _window(config: ModelConfig, i: int) -> int | None:
    return config.windows[i % len(config.windows)]


def _slots(config: ModelConfig, i: int, capacity: int, slack: int = 0) -> int:
    """How long the cache of layer i is, where the longest have `capacity` slots."""
    window = _window(config, i)
    if window is None or not isinstance(config.window, tuple):
        return capacity
    return min(capacity, window + config.sink_tokens + slack)


def _sinks(config: ModelConfig, i: int, slots: int) -> int:
    """The sinks of layer i: none in a cache that is too short to ever turn."""
    window = _window(config, i)
    turns = window is not None and slots >= window + config.sink_tokens
    return config.sink_tokens if turns else 0


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
            shared = (nn.broadcast,) * 8
            self.blocks = nn.scan(
                block,
                methods={
                    "scan_step": dict(lifted, in_axes=(0, 0, *shared), out_axes=1),
                    "scan_context": dict(lifted, in_axes=nn.broadcast, out_axes=1),
                },
            )(cfg, self.cross, self.depth, _window(cfg, 0))
        else:
            block = nn.remat(Block) if cfg.remat else Block
            self.block = [
                block(cfg, self.cross, self.depth, _window(cfg, i)) for i in range(self.depth)
            ]
        if cfg.positions == "t5":
            normal = nn.initializers.normal(cfg.init_std)
            shape = cfg.relative_buckets, cfg.num_heads
            self.relative_bias = parameter(self, "relative_bias", normal, shape)
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
        masks: tuple[Mask | None, ...],  # layer i has masks[i % len(masks)]
        layers: Layers | None = None,
        cross: Layers | None = None,
        memory: jax.Array | None = None,  # [B, S, D]
        memory_positions: jax.Array | None = None,  # i32[B, S]
        key: jax.Array | None = None,
        weights: bool = False,
    ) -> tuple[Any, ...]:
        """The output [B, T, D], normalised unless post-norm, and the updated caches; behind them,
        if `weights`, the AttentionWeights."""
        updated: Layers | None

        def shared(i: int):
            mask = masks[i % len(masks)]
            bias, attend = self._bias(), () if weights else None
            return positions, token_positions, mask, bias, memory, memory_positions, attend

        if self.config.scan_layers:
            keys = None if key is None else jax.random.split(key, self.depth)
            numbers, blocks = jnp.arange(self.depth), cast(Any, self.blocks)
            (x, updated), pairs = blocks.scan_step((x, layers), numbers, keys, cross, *shared(0))
        else:
            new, pairs = [], []
            for i, (block, key_i) in enumerate(
                zip(self.block, split_key(key, self.depth), strict=True)
            ):
                layer = layers[i] if isinstance(layers, tuple) else None
                context = cross[i] if isinstance(cross, tuple) else None
                x, layer, *seen = block(x, layer, context, key_i, *shared(i))
                new.append(layer)
                pairs.append(seen)
            updated = None if layers is None else tuple(new)
        x = x if self.config.norm_order == "post" else self.norm(x)
        return (x, updated, self._collect(pairs, layers, x)) if weights else (x, updated)

    def _collect(self, pairs: Any, layers: Layers | None, x: jax.Array) -> AttentionWeights:
        """What the blocks saw, listed or scanned, and the stack's output x as one value."""
        cfg = self.config
        if cfg.scan_layers:
            stream, (own, at), *crossed = pairs
            at = None if at is None else at[:, 0]
            cross = crossed[0][0] if self.cross else None
        else:
            stream = jnp.stack([seen[0] for seen in pairs], axis=1)
            own, places = zip(*(seen[1] for seen in pairs), strict=True)
            cross = jnp.stack([seen[2][0] for seen in pairs], axis=1) if self.cross else None
        hidden = jnp.concatenate([stream, x[:, None]], axis=1)
        if not cfg.scan_layers:
            if layers is not None and isinstance(cfg.window, tuple):
                return AttentionWeights(own, places, cross, hidden)
            own, at = jnp.stack(own, axis=1), places[0]
        if at is None:
            at = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        return AttentionWeights(own, at, cross, hidden)


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
        if cfg.pooling is not None:
            self.pooler = Linear(cfg, (cfg.d_model,))
        if cfg.num_classes is not None:
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
        return self._encode(tokens, positions, mask, segments, types, key)[0]

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
    ) -> tuple[jax.Array, None, AttentionWeights]:
        """As `__call__`, and what every layer weighed the tokens with."""
        x, weights = self._encode(tokens, positions, mask, segments, types, None, True)
        return self._logits(x), None, weights

    def _encode(self, tokens, positions, mask, segments, types, key, weights=False) -> list[Any]:
        cfg = self.config
        check_tokens(tokens, cfg.vocab_size)
        if types is not None and cfg.type_vocab_size is None:
            raise ValueError("types are given, but type_vocab_size is None")
        token_positions, masks = place(cfg, tokens, positions, segments, mask)
        embed_key, stack_key = split_key(key, 2)
        x = self.embed(tokens, token_positions, types, embed_key)
        x, _, *seen = self.encoder(
            x,
            positions=positions,
            token_positions=token_positions,
            masks=masks,
            key=stack_key,
            weights=weights,
        )
        return [x, *seen]

    def __call__(self, tokens: jax.Array, **arguments) -> tuple[jax.Array, None]:
        """Logits f32[B, T, V] for masked-token training; takes what `encode` takes."""
        x = self.encode(tokens, **arguments)
        if self.config.pooling is not None and self.is_initializing():
            self._pool(x, None)
        if self.config.num_classes is not None and self.is_initializing():
            self._classes(x, None)
        return self._logits(x), None

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.config.masked_token_head:
            x = self.head_norm(activate(self.head_dense(x), self.config.activation))
        return self.embed.logits(x)

    def classify(self, tokens: jax.Array, **arguments) -> jax.Array:  # f32[B, C]
        """Class logits of each row: W times what `pool` gives."""
        if self.config.num_classes is None:
            raise ValueError("num_classes is None: this encoder has no classification head")
        return self._classes(self.encode(tokens, **arguments), arguments.get("positions"))

    def pool(self, tokens: jax.Array, **arguments) -> jax.Array:  # f32[B, D]
        """One vector a row: act(P h + p), h of its first token that is not padding."""
        if self.config.pooling is None:
            raise ValueError("pooler is None: this encoder has no such layer")
        x = self._pool(self.encode(tokens, **arguments), arguments.get("positions"))
        return x.astype(jnp.float32)

    def _pool(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        first = x[:, 0]
        if positions is not None:
            at = jnp.argmax(positions >= 0, axis=1)
            first = jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        pooled = self.pooler(first)
        return jnp.tanh(pooled) if self.config.pooling == "tanh" else jax.nn.relu(pooled)

    def _classes(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        return self.classifier(self._pool(x, positions)).astype(jnp.float32)


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
        at: jax.Array | None = None,  # i32[B, Q]; None is every token
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, ModelCache | None]:
        """Logits f32[B, T, V] of the next token, and the updated cache.

        Without `positions`, tokens stand at arange(T), or behind what the cache holds. A `mask`
        takes the place of `Causal()`: one that does not contain it, such as `Padding(valid)` alone,
        sees the future; the config's window and the segments are added to it. `segments`
        packs documents: attention stays within one, and its positions start at 0 (padding may be
        a document of its own). `at` asks for the logits [B, Q, V] behind the tokens of these
        indices alone, NaN where there is no such token: a vocabulary is wide, and behind a prompt
        one row of T counts.
        """
        return decode_tokens(self, tokens, positions, mask, cache, segments, key, at=at)

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # None is Causal(); another mask replaces it
        cache: ModelCache | None = None,
        segments: jax.Array | None = None,  # i32[B, T]: ids of packed documents
    ) -> tuple[jax.Array, ModelCache | None, AttentionWeights]:
        """As `__call__`, and what every layer weighed the keys with."""
        return decode_tokens(self, tokens, positions, mask, cache, segments, None, weights=True)


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
        return self._encode(source, positions, mask, key)[0]

    def attend_source(
        self,
        source: jax.Array,  # i32[B, S]
        *,
        positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        mask: Mask | None = None,
    ) -> tuple[jax.Array, AttentionWeights]:
        """As `encode`, and what every layer of the encoder weighed the source with."""
        x, weights = self._encode(source, positions, mask, None, weights=True)
        return x, weights

    def _encode(self, source, positions, mask, key, weights=False) -> list[Any]:
        check_tokens(source, self.config.vocab_size)
        token_positions, masks = place(self.config, source, positions, None, mask)
        embed_key, stack_key = split_key(key, 2)
        x = self.embed(source, token_positions, key=embed_key)
        x, _, *seen = self.encoder(
            x,
            positions=positions,
            token_positions=token_positions,
            masks=masks,
            key=stack_key,
            weights=weights,
        )
        return [x, *seen]

    def init_cache(
        self,
        source: jax.Array,  # i32[B, S]
        *,
        capacity: int,
        positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        dtype: jax.typing.DTypeLike | None = None,
        slack: int = 0,
    ) -> ModelCache:
        """Read the source once: its cross-attention keys and values, and an empty target cache.

        `capacity`, `dtype` and `slack` are of the target's cache, and mean what they mean for
        `models.init_cache`; the source is held in the compute dtype.
        """
        memory = self.encode(source, positions=positions)
        cross = self.decoder.context_cache(memory, _default_positions(source, positions))
        cfg = self.config
        depth, rows = cfg.decoder_layers, len(source)
        return ModelCache(empty_layers(cfg, depth, rows, capacity, dtype, slack), cross)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]: the target
        *,
        source: jax.Array | None = None,  # i32[B, S]
        source_positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # on the target; None is Causal()
        cache: ModelCache | None = None,
        at: jax.Array | None = None,  # i32[B, Q]; None is every token
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, ModelCache | None]:
        """Logits f32[B, T, V] of the next target token: from a `source`, or from a `cache`.

        `at` asks for the logits [B, Q, V] behind the tokens of these indices alone.
        """
        return self._decode(tokens, source, source_positions, positions, mask, cache, key, at=at)

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]: the target
        *,
        source: jax.Array | None = None,  # i32[B, S]
        source_positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # on the target; None is Causal()
        cache: ModelCache | None = None,
    ) -> tuple[jax.Array, ModelCache | None, AttentionWeights]:
        """As `__call__`, and what every layer of the decoder weighed target and source with."""
        return self._decode(tokens, source, source_positions, positions, mask, cache, None, True)

    def _decode(
        self, tokens, source, source_positions, positions, mask, cache, key, weights=False, at=None
    ) -> Any:
        if (source is None) == (cache is None):
            raise ValueError("give either source or cache: a cache already holds its source")
        if source is None and source_positions is not None:
            raise ValueError("source_positions without a source: a cache already holds them")
        encoder_key, key = split_key(key, 2)
        memory = None
        if source is not None:
            memory = self.encode(source, positions=source_positions, key=encoder_key)
            source_positions = _default_positions(source, source_positions)
        return decode_tokens(
            self, tokens, positions, mask, cache, None, key, memory, source_positions, weights, at
        )


def decode_tokens(
    model: Decoder | EncoderDecoder,
    tokens: jax.Array,
    positions: jax.Array | None,
    mask: Mask | None,
    cache: ModelCache | None,
    segments: jax.Array | None,
    key: jax.Array | None,
    memory: jax.Array | None = None,
    memory_positions: jax.Array | None = None,
    weights: bool = False,
    at: jax.Array | None = None,
) -> Any:
    """Embed, run the decoder stack and read the logits; shared by both causal models."""
    cfg = model.config
    check_tokens(tokens, cfg.vocab_size)
    overflow, crossed = None, isinstance(model, EncoderDecoder)
    if cache is not None:
        if segments is not None:
            raise ValueError("segments with a cache: give each document a row of its own")
        positions, overflow = follow(cfg, cache, tokens, positions, crossed)
    mask = Causal() if mask is None else mask
    token_positions, masks = place(cfg, tokens, positions, segments, mask, causal=True)
    embed_key, stack_key = split_key(key, 2)
    x = model.embed(tokens, token_positions, key=embed_key, target=crossed)
    x, layers, *seen = model.decoder(
        x,
        positions=positions,
        token_positions=token_positions,
        masks=masks,
        layers=None if cache is None else cache.layers,
        cross=None if cache is None else cache.cross,
        memory=memory,
        memory_positions=memory_positions,
        key=stack_key,
        weights=weights,
    )
    logits = model.embed.logits(x if at is None else pick(x, at))
    if overflow is not None:
        logits = jnp.where(overflow[:, None, None], jnp.nan, logits)
    if cache is None or layers is None:
        return logits, None, *seen
    return logits, replace(cache, layers=layers), *seen


def pick(x: jax.Array, at: jax.Array) -> jax.Array:  # [B, T, D], i32[B, Q] -> [B, Q, D]
    """Of each row the tokens of these indices; NaN where there is no such token."""
    if not hasattr(at, "ndim"):
        raise ValueError(f"at is a {type(at).__name__}: must be an array [B, Q]")
    if not jnp.issubdtype(at.dtype, jnp.integer) or at.ndim != 2 or len(at) != len(x):
        raise ValueError(f"at is {at.dtype}{list(at.shape)}: must be integers [{len(x)}, Q]")
    index = jnp.where(at < 0, x.shape[1], at)[:, :, None]
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=jnp.nan)


def follow(
    config: ModelConfig,
    cache: ModelCache,
    tokens: jax.Array,  # [B, T]
    positions: jax.Array | None,  # i32[B, T]; None is behind what the cache holds
    crossed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Positions of new tokens in a cache of this model, and the rows [B] whose cache has no room.

    A known position past the end raises; a traced one becomes padding, and its row's result is to
    be NaN. A ring ends only where int32 does.
    """
    _check_cache(config, cache, tokens, crossed)
    positions = _check_positions(tokens, positions)
    if positions is None:
        positions = kv.next_positions(cache.length, jnp.ones(tokens.shape, bool))
    limit = cache_limit(config, cache.capacity)
    if limit is None:
        return refuse_last(positions)
    return _refuse_overflow(positions, limit)


def _check_cache(config: ModelConfig, cache: ModelCache, tokens: jax.Array, crossed: bool) -> None:
    """The cache has the layout, the depth and the rows of this model and these tokens."""
    if crossed and cache.cross is None:
        raise ValueError("cache.cross is None: start it from a source, with method='init_cache'")
    depth = config.decoder_layers if crossed else config.num_layers
    for name in ("layers", "cross") if crossed else ("layers",):
        layers = getattr(cache, name)
        if isinstance(layers, kv.KVCache) != config.scan_layers:
            held, wanted = ("looped", "scanned") if config.scan_layers else ("scanned", "looped")
            raise ValueError(f"cache.{name} is of a {held} stack, the model's is {wanted}")
        found = layers.length.shape[1] if isinstance(layers, kv.KVCache) else len(layers)
        if found != depth:
            raise ValueError(f"cache.{name} has {found} layers, the model {depth}")
    for i in range(1 if config.scan_layers else depth):
        if isinstance(cache.layers, kv.KVCache):
            slots, sinks = cache.capacity, cache.layers.sinks
        else:
            slots, sinks = cache.layers[i].capacity, cache.layers[i].sinks
        least = _slots(config, i, cache.capacity)
        if slots < least or sinks != _sinks(config, i, slots):
            wants = f"the model wants {_sinks(config, i, slots)} and at least {least}"
            raise ValueError(f"cache.layers[{i}] has {sinks} sinks and {slots} slots, {wants}")
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


def refuse_last(
    positions: jax.Array,  # i32[B, T]
) -> tuple[jax.Array, jax.Array]:
    """As `_refuse_overflow`, for a ring: rows that reach 2^31 - 1 are padding as a whole.

    Behind it positions would be negative, which is padding, and vanish in silence; a row that
    counts past it holds it.
    """
    last = np.iinfo(np.int32).max
    beyond = (positions >= last).any(axis=1)
    if not isinstance(beyond, jax.core.Tracer) and bool(np.any(beyond)):
        row = int(np.argmax(beyond))
        raise ValueError(f"row {row} reaches position {last}: rebase the cache before it does")
    return jnp.where(beyond[:, None], -1, positions), beyond


def _default_positions(tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
    if positions is not None:
        return as_int32("positions", positions)
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def place(
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array | None,
    segments: jax.Array | None,
    mask: Mask | None,
    causal: bool = False,
) -> tuple[jax.Array, tuple[Mask | None, ...]]:
    """Positions for embeddings and rotation, and for each window of the config's pattern the mask
    with that window, the sinks and the segments."""
    positions = _check_positions(tokens, positions)
    if config.positions == "learned" and positions is None and segments is None:
        if tokens.shape[1] > config.max_len:
            raise ValueError(f"{tokens.shape[1]} tokens are more than max_len {config.max_len}")
    token_positions = jnp.arange(tokens.shape[1]) if positions is None else positions
    sinks: Mask | None = None
    if config.sink_tokens:
        sinks = Prefix(np.full(1, config.sink_tokens, np.int32))  # type: ignore[arg-type]
    if segments is not None:
        if positions is not None:
            raise ValueError("positions with segments: a document's positions start at 0")
        if segments.shape != tokens.shape:
            raise ValueError(f"segments {segments.shape} and tokens {tokens.shape} differ in shape")
        mask = Segments(segments) if mask is None else mask & Segments(segments)
        token_positions = _within_segments(segments)
        if sinks is not None:
            sinks = Padding(token_positions < config.sink_tokens)

    def within(window: int | None) -> Mask | None:
        if window is None:
            return mask
        near: Mask = Window(window, None if causal else window)
        near = near if sinks is None else near | sinks
        return near if mask is None else mask & near

    return token_positions, tuple(map(within, config.windows))


def _check_positions(tokens: jax.Array, positions: jax.Array | None) -> jax.Array | None:
    """Positions as i32[B, T]."""
    if positions is None:
        return None
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions are {positions.dtype}: must be integers")
    if positions.shape != tokens.shape:
        raise ValueError(f"positions {positions.shape} and tokens {tokens.shape} differ in shape")
    return as_int32("positions", positions)


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


def check_one(tokens: jax.Array) -> None:
    """One token a row."""
    if tokens.ndim != 2 or tokens.shape[1] != 1:
        raise ValueError(f"tokens have shape {tokens.shape}: attend reads one token a row, [B, 1]")


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
