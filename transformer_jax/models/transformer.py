"""Make Encoder, Decoder and EncoderDecoder from one Block.

`model.apply({"params": params}, tokens, ...) -> (logits f32, cache)` is training, prefill and
decoding alike: any number of tokens at a time, with or without a cache. A token whose position is
negative is padding: no query sees it and it is not cached. Dropout is on exactly when a `key` is
given; flax's `rngs` are refused.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.masks import And, Causal, Mask, Or, Padding, Prefix, Segments, Window
from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache.model_cache import (
    ModelCache,
    check_cache,
    empty_layers,
    refuse_past_capacity,
    refuse_past_int32,
    room_of,
)
from transformer_jax.checks import as_int32, check_positions
from transformer_jax.config import Frames, Learned, ModelConfig, Patches
from transformer_jax.models.functional import activate, split_key
from transformer_jax.models.inputs import InputLayer, check_inputs, input_positions
from transformer_jax.models.layers import (
    ALL_HEADS,
    Embed,
    HeadMasks,
    Linear,
    Norm,
    OutputLayer,
    refuse_rngs,
)
from transformer_jax.models.packing import documents_of
from transformer_jax.models.stack import AttentionWeights, Stack, StackOutput
from transformer_jax.tracing import at_once, known_sizes, known_value


class Encoder(nn.Module):
    """Bidirectional stack with masked-token and classification heads (Devlin et al. 2019).

    Where the config has `inputs`, it reads vectors, images or frames in the place of tokens: a
    method's `tokens` are then f32[B, T, D_in] or f32[B, H, W, C], and `positions` are those of the
    vectors, of the frames, or of the patches and the class token. It has no logits then.
    """

    config: ModelConfig

    def setup(self) -> None:
        cfg = self.config
        self.embed = Embed(cfg)
        if cfg.inputs is not None:
            self.inputs = InputLayer(cfg)
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
        tokens: jax.Array,  # i32[B, T], or what the config's inputs describe
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]
        key: jax.Array | None = None,
    ) -> jax.Array:  # [B, T, D]
        """Return the hidden state of every token, [B, T, D]; of frames, of every output of theirs.

        Tokens stand at `positions`, or at arange(T). `segments` packs documents, as in `Decoder`;
        `types` are BERT's token types, 0 where none are given. `head_mask` multiplies what each
        head gives, before the output matrix (Michel et al. 2019). ValueError where an argument does
        not fit the tokens or the config.
        """
        return self._encode(tokens, positions, mask, segments, types, key, head_mask).x

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
    ) -> tuple[jax.Array, None, AttentionWeights]:
        """Return the logits of `__call__`, None, and what every layer weighed the tokens with.

        Where the config has `inputs`, the hidden states of `encode` in the place of logits.
        """
        out = self._encode(tokens, positions, mask, segments, types, None, weights=True)
        assert out.weights is not None
        x = out.x if self.config.inputs is not None else self._logits(out.x)
        return x, None, out.weights

    def _encode(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        mask: Mask | None,
        segments: jax.Array | None,
        types: jax.Array | None,
        key: jax.Array | None,
        head_mask: jax.Array | None = None,
        weights: bool = False,
    ) -> StackOutput:
        cfg = self.config
        refuse_rngs(self, key)
        check_head_mask("head_mask", head_mask, cfg.num_layers, cfg.num_heads)
        if types is not None and cfg.type_vocab_size is None:
            raise ValueError("types are given, but type_vocab_size is None")
        if segments is not None and isinstance(cfg.inputs, Patches | Frames):
            kind = type(cfg.inputs).__name__
            raise ValueError(f"segments with {kind}: give each of them a row of its own")
        x, positions = _read(self, tokens, positions)
        token_positions, masks = positions_and_masks(cfg, _places(x), positions, segments, mask)
        embed_key, stack_key = split_key(key, 2)
        return self.encoder(
            self.embed(x, token_positions, types, embed_key),
            positions=positions,
            token_positions=token_positions,
            masks=masks,
            key=stack_key,
            head_masks=HeadMasks(head_mask),
            weights=weights,
        )

    def __call__(self, tokens: jax.Array, **arguments: Any) -> tuple[jax.Array, None]:
        """Return logits f32[B, T, V] for masked-token training; takes what `encode` takes.

        ValueError where the config has `inputs`: take `encode`, `pool` or `classify`.
        """
        if self.config.inputs is not None and not self.is_initializing():
            rule = "there are no logits of tokens: method='encode', 'pool' or 'classify'"
            raise ValueError(f"inputs is {self.config.inputs!r}: {rule}")
        x = self.encode(tokens, **arguments)
        if self.config.pooling is not None and self.is_initializing():
            self._pool(x, None)
        if self.config.num_classes is not None and self.is_initializing():
            self._classes(x, None)
        return x if self.config.inputs is not None else self._logits(x), None

    def _logits(self, x: jax.Array) -> jax.Array:
        return self.embed.logits(self._transformed(x))

    def _transformed(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        """Return what the output matrix reads."""
        if self.config.masked_token_head:
            x = self.head_norm(activate(self.head_dense(x), self.config.activation))
        return x

    def output_layer(self, tokens: jax.Array, **arguments: Any) -> OutputLayer:
        """Return what the logits of `__call__` are computed of, for a loss that takes them apart.

        It takes what `encode` takes.
        """
        return self.embed.output_layer(self._transformed(self.encode(tokens, **arguments)))

    def classify(self, tokens: jax.Array, **arguments: Any) -> jax.Array:  # f32[B, C]
        """Return class logits of each row: W times what `pool` gives; takes what `encode` takes."""
        if self.config.num_classes is None:
            raise ValueError("num_classes is None: this encoder has no classification head")
        return self._classes(self.encode(tokens, **arguments), arguments.get("positions"))

    def pool(self, tokens: jax.Array, **arguments: Any) -> jax.Array:  # f32[B, D]
        """Return a vector of each row: act(P h + p), h of its first token that is not padding."""
        if self.config.pooling is None:
            raise ValueError("pooler is None: this encoder has no such layer")
        x = self._pool(self.encode(tokens, **arguments), arguments.get("positions"))
        return x.astype(jnp.float32)

    def _pool(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        first = x[:, 0]
        if positions is not None and not isinstance(self.config.inputs, Frames):
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
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, ModelCache | None]:
        """Return logits f32[B, T, V] of the next token, and the updated cache.

        Without `positions`, tokens stand at arange(T), or after what the cache holds. A `mask`
        takes the place of `Causal()`: one that does not contain it, such as `Padding(valid)` alone,
        sees the future; the config's window and the segments are added to it. `segments`
        packs documents, runs of equal ids: attention stays within one, and its positions start at 0
        (padding may be a document of its own). An id that comes again after another is refused
        where it is known; a traced one begins a document. `at` asks for the logits [B, Q, V] after
        the tokens of these indices alone, NaN where there is no such token: a vocabulary is wide,
        and after a prompt one row of T counts. `head_mask` multiplies what each head gives, before
        the output matrix (Michel et al. 2019). `key` turns dropout on. ValueError where an argument
        does not fit the tokens, the config or the cache, and where a known position is past the
        cache's end.
        """
        heads = HeadMasks(head_mask)
        return decode_tokens(self, tokens, positions, mask, cache, segments, key, heads, at=at)[:2]

    def output_layer(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # None is Causal(); another mask replaces it
        segments: jax.Array | None = None,  # i32[B, T]: ids of packed documents
        key: jax.Array | None = None,
    ) -> OutputLayer:
        """Return what the logits of `__call__` are computed of, for a loss that takes them apart.

        They are softcap(x table^T + bias): `chunked_cross_entropy` never holds all of them.
        """
        x = run_decoder(self, tokens, positions, mask, None, segments, key)[0].x
        return self.embed.output_layer(x)

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # None is Causal(); another mask replaces it
        cache: ModelCache | None = None,
        segments: jax.Array | None = None,  # i32[B, T]: ids of packed documents
    ) -> tuple[jax.Array, ModelCache | None, AttentionWeights]:
        """Return what `__call__` does, and what every layer weighed the keys with."""
        out = decode_tokens(self, tokens, positions, mask, cache, segments, None, weights=True)
        logits, cache, weights = out
        assert weights is not None
        return logits, cache, weights


class EncoderDecoder(nn.Module):
    """Source in, target out (Vaswani et al. 2017).

    Both stacks share the embedding, unless the config has a `source_vocab_size`, or `inputs`: then
    a `source` is f32[B, S, D_in] or f32[B, H, W, C], and its positions are those of the vectors, of
    the frames, or of the patches and the class token.
    """

    config: ModelConfig

    def setup(self) -> None:
        cfg = self.config
        self.embed = Embed(cfg)
        if cfg.inputs is not None:
            self.inputs = InputLayer(cfg)
        self.encoder = Stack(cfg, cfg.num_layers, bidirectional=True)
        self.decoder = Stack(cfg, cfg.decoder_layers, cross=True)

    def encode(
        self,
        source: jax.Array,  # i32[B, S], or what the config's inputs describe
        *,
        positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        mask: Mask | None = None,
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]
        key: jax.Array | None = None,
    ) -> jax.Array:  # [B, S, D]
        """Return the encoder's output of a source, which the decoder attends to: its memory."""
        return self._encode(source, positions, mask, key, head_mask).x

    def attend_source(
        self,
        source: jax.Array,  # i32[B, S], or what the config's inputs describe
        *,
        positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        mask: Mask | None = None,
    ) -> tuple[jax.Array, AttentionWeights]:
        """Return what `encode` does, and what every layer weighed the source with."""
        out = self._encode(source, positions, mask, None, weights=True)
        assert out.weights is not None
        return out.x, out.weights

    def _encode(
        self,
        source: jax.Array,
        positions: jax.Array | None,
        mask: Mask | None,
        key: jax.Array | None,
        head_mask: jax.Array | None = None,
        weights: bool = False,
    ) -> StackOutput:
        refuse_rngs(self, key)
        check_head_mask("head_mask", head_mask, self.config.num_layers, self.config.num_heads)
        x, positions = _read(self, source, positions)
        token_positions, masks = positions_and_masks(self.config, _places(x), positions, None, mask)
        embed_key, stack_key = split_key(key, 2)
        return self.encoder(
            self.embed(x, token_positions, key=embed_key),
            positions=positions,
            token_positions=token_positions,
            masks=masks,
            key=stack_key,
            head_masks=HeadMasks(head_mask),
            weights=weights,
        )

    def _memory(
        self,
        source: jax.Array,
        positions: jax.Array | None,
        key: jax.Array | None,
        head_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:  # [B, S, D], i32[B, S]
        """Return the encoder's output and where it stands, negative for padding."""
        memory = self.encode(source, positions=positions, head_mask=head_mask, key=key)
        positions = input_positions(self.config.inputs, positions)
        return memory, _default_positions(memory.shape[:2], positions)

    def init_cache(
        self,
        source: jax.Array,  # i32[B, S], or what the config's inputs describe
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
        cross = self.decoder.init_cross_cache(*self._memory(source, positions, None))
        cfg = self.config
        depth, rows = cfg.decoder_layers, source.shape[0]
        return ModelCache(empty_layers(cfg, depth, rows, capacity, dtype, slack), cross)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]: the target
        *,
        source: jax.Array | None = None,  # i32[B, S], or what the config's inputs describe
        source_positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # on the target; None is Causal()
        cache: ModelCache | None = None,
        at: jax.Array | None = None,  # i32[B, Q]; None is every token
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]: over the target
        cross_head_mask: jax.Array | None = None,  # f32[L, N] or [N]: over the source
        encoder_head_mask: jax.Array | None = None,  # f32[L, N] or [N]; needs a source
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, ModelCache | None]:
        """Return logits f32[B, T, V] of the next target token, and the updated cache.

        They are read from a `source`, as in training, or from a `cache` of `init_cache`, which has
        read its source: give one of the two. `source_positions` are the source's, negative where it
        is padding; `positions` are the target's. `at` asks for the logits [B, Q, V] after the
        tokens of these indices alone. A head mask multiplies what each head of its attention gives,
        before the output matrix. `key` turns dropout on, in both stacks. ValueError as in
        `Decoder`.

            logits, _ = model.apply({"params": params}, target, source=source)
            cache = model.apply({"params": params}, source, capacity=64, method="init_cache")
            logits, cache = model.apply({"params": params}, target, cache=cache)
        """
        layers, heads = self.config.num_layers, self.config.num_heads
        check_head_mask("encoder_head_mask", encoder_head_mask, layers, heads)
        if encoder_head_mask is not None and source is None:
            raise ValueError("encoder_head_mask without a source: a cache has already read its own")
        masks = HeadMasks(head_mask, cross_head_mask)
        return self._decode(
            tokens, source, source_positions, positions, mask, cache, key, at=at,
            head_masks=masks, encoder_head_mask=encoder_head_mask,
        )[:2]  # fmt: skip

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]: the target
        *,
        source: jax.Array | None = None,  # i32[B, S], or what the config's inputs describe
        source_positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # on the target; None is Causal()
        cache: ModelCache | None = None,
    ) -> tuple[jax.Array, ModelCache | None, AttentionWeights]:
        """Return what `__call__` does, and what the decoder weighed target and source with."""
        out = self._decode(
            tokens, source, source_positions, positions, mask, cache, None, weights=True
        )
        logits, cache, weights = out
        assert weights is not None
        return logits, cache, weights

    def output_layer(
        self,
        tokens: jax.Array,  # i32[B, T]: the target
        *,
        source: jax.Array,  # i32[B, S], or what the config's inputs describe
        source_positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        key: jax.Array | None = None,
    ) -> OutputLayer:
        """Return what the logits of `__call__` are computed of, for a loss that takes them apart.

        They are softcap(x table^T + bias): `chunked_cross_entropy` never holds all of them.
        """
        refuse_rngs(self, key)
        encoder_key, key = split_key(key, 2)
        memory, source_positions = self._memory(source, source_positions, encoder_key)
        x = run_decoder(
            self, tokens, positions, None, None, None, key, ALL_HEADS, memory, source_positions
        )[0].x
        return self.embed.output_layer(x)

    def _decode(
        self,
        tokens: jax.Array,
        source: jax.Array | None,
        source_positions: jax.Array | None,
        positions: jax.Array | None,
        mask: Mask | None,
        cache: ModelCache | None,
        key: jax.Array | None,
        weights: bool = False,
        at: jax.Array | None = None,
        head_masks: HeadMasks = ALL_HEADS,
        encoder_head_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, ModelCache | None, AttentionWeights | None]:
        refuse_rngs(self, key)
        if (source is None) == (cache is None):
            raise ValueError("give either source or cache: a cache already holds its source")
        if source is None and source_positions is not None:
            raise ValueError("source_positions without a source: a cache already holds them")
        encoder_key, key = split_key(key, 2)
        memory = None
        if source is not None:
            memory, source_positions = self._memory(
                source, source_positions, encoder_key, encoder_head_mask
            )
        return decode_tokens(
            self, tokens, positions, mask, cache, None, key, head_masks,
            memory, source_positions, weights, at,
        )  # fmt: skip


def decode_tokens(
    model: Decoder | EncoderDecoder,
    tokens: jax.Array,
    positions: jax.Array | None,
    mask: Mask | None,
    cache: ModelCache | None,
    segments: jax.Array | None,
    key: jax.Array | None,
    head_masks: HeadMasks = ALL_HEADS,
    memory: jax.Array | None = None,
    memory_positions: jax.Array | None = None,
    weights: bool = False,
    at: jax.Array | None = None,
) -> tuple[jax.Array, ModelCache | None, AttentionWeights | None]:
    """Embed, run the decoder stack and read the logits; shared by both causal models.

    The logits, the updated cache, and where `weights` asks for them the weights.
    """
    out, overflow = run_decoder(
        model, tokens, positions, mask, cache, segments, key, head_masks,
        memory, memory_positions, weights,
    )  # fmt: skip
    logits = model.embed.logits(out.x if at is None else gather_tokens(out.x, at))
    if overflow is not None:
        logits = jnp.where(overflow[:, None, None], jnp.nan, logits)
    return logits, out.cache, out.weights


def run_decoder(
    model: Decoder | EncoderDecoder,
    tokens: jax.Array,
    positions: jax.Array | None,
    mask: Mask | None,
    cache: ModelCache | None,
    segments: jax.Array | None,
    key: jax.Array | None,
    head_masks: HeadMasks = ALL_HEADS,
    memory: jax.Array | None = None,
    memory_positions: jax.Array | None = None,
    weights: bool = False,
) -> tuple[StackOutput, jax.Array | None]:
    """Embed tokens and run the decoder stack, and mark the rows for which a cache has no room."""
    cfg = model.config
    refuse_rngs(model, key)
    check_tokens(tokens, cfg.vocab_size)
    check_head_mask("head_mask", head_masks.own, cfg.decoder_layers, cfg.num_heads)
    check_head_mask("cross_head_mask", head_masks.cross, cfg.decoder_layers, cfg.num_heads)
    overflow, crossed = None, isinstance(model, EncoderDecoder)
    if cache is not None:
        if segments is not None:
            raise ValueError("segments with a cache: give each document a row of its own")
        positions, overflow = check_cache_room(cfg, cache, tokens, positions, crossed)
        tokens = _refuse_unread(mask, cache, tokens, positions)
    mask = Causal() if mask is None else mask
    token_positions, masks = positions_and_masks(cfg, tokens, positions, segments, mask, True)
    embed_key, stack_key = split_key(key, 2)
    out = model.decoder(
        model.embed(tokens, token_positions, key=embed_key, target=crossed),
        positions=positions,
        token_positions=token_positions,
        masks=masks,
        cache=cache,
        memory=memory,
        memory_positions=memory_positions,
        key=stack_key,
        head_masks=head_masks,
        weights=weights,
    )
    if overflow is not None and out.cache is not None and out.cache.exhausted is not None:
        overflow |= out.cache.exhausted
    return out, overflow


def _refuse_unread(
    mask: Mask | None,
    cache: ModelCache,
    tokens: jax.Array,  # i32[B, T]
    positions: jax.Array,  # i32[B, T]
) -> jax.Array:  # i32[B, T]
    """Return the tokens, -1 in rows whose mask lets a query see keys that are not read yet.

    Read later, those keys would be missing here: a prefix must be read in one call. ValueError
    where that is known.
    """
    if mask is None or not _looks_ahead(mask):
        return tokens
    with at_once(mask, cache.length, positions):
        end = jnp.maximum(cache.length, positions.max(axis=1) + 1)  # [B]
        unread = end[:, None] + jnp.arange(cache.capacity)[None]
        sees = mask.allows(positions, unread) & (positions >= 0)[:, None, :, None]
        ahead = jnp.broadcast_to(sees.any(axis=(1, 2, 3)), end.shape)
    known = known_value(ahead)
    if known is not None and known.any():
        row = int(known.argmax())
        raise ValueError(
            f"mask is {mask!r}: in row {row} it lets a token see positions from {int(end[row])} "
            "on, which this call does not read; read them in one call, without `chunk`"
        )
    return jnp.where(ahead[:, None], -1, tokens)


def _looks_ahead(mask: Mask) -> bool:
    """Return whether a query may see a key after it, as far as the mask's structure tells."""
    if isinstance(mask, And):
        return _looks_ahead(mask.left) and _looks_ahead(mask.right)
    if isinstance(mask, Or):
        return _looks_ahead(mask.left) or _looks_ahead(mask.right)
    return mask.causal_window is None or not mask.causal_window[0]


def gather_tokens(x: jax.Array, at: jax.Array) -> jax.Array:  # [B, T, D], i32[B, Q] -> [B, Q, D]
    """Return the tokens of these indices of each row; NaN where there is no such token.

    ValueError where `at` is no array of integers with a row for each of x.
    """
    if not hasattr(at, "ndim"):
        raise ValueError(f"at is a {type(at).__name__}: must be an array [B, Q]")
    if not jnp.issubdtype(at.dtype, jnp.integer) or at.ndim != 2 or at.shape[0] != x.shape[0]:
        raise ValueError(f"at is {at.dtype}{list(at.shape)}: must be integers [{x.shape[0]}, Q]")
    index = jnp.where(at < 0, x.shape[1], at)[:, :, None]
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=jnp.nan)


def check_cache_room(
    config: ModelConfig,
    cache: ModelCache,
    tokens: jax.Array,  # [B, T]
    positions: jax.Array | None,  # i32[B, T]; None is after what the cache holds
    crossed: bool = False,
) -> tuple[jax.Array, jax.Array]:  # i32[B, T], bool[B]
    """Return the positions of new tokens in a cache, and the rows that have no room for them.

    A known position past the end is a ValueError; a traced one becomes padding, and its row's
    result is to be NaN. A ring ends only where int32 does. ValueError, too, where the cache is not
    this model's.
    """
    check_cache(config, cache, tokens, crossed)
    positions = check_positions(tokens.shape, positions)
    if positions is None:
        positions = kv.next_positions(cache.length, jnp.ones(tokens.shape, bool))
    limit = room_of(config, cache)
    if limit is None:
        return refuse_past_int32(positions)
    return refuse_past_capacity(positions, limit)


def _read(
    model: Encoder | EncoderDecoder,
    source: jax.Array,  # i32[B, S], or what the config's inputs describe
    positions: jax.Array | None,  # i32[B, S]
) -> tuple[jax.Array, jax.Array | None]:  # i32[B, T] or [B, T, D], i32[B, T]
    """Check what an encoder reads; return its tokens, or their vectors, and where they stand."""
    cfg = model.config
    if cfg.inputs is None:
        check_tokens(source, cfg.encoder_vocab_size)
        return source, positions
    check_inputs(cfg.inputs, source)
    return model.inputs(source, positions), input_positions(cfg.inputs, positions)


def _places(x: jax.Array) -> jax.Array:  # [B, T] or [B, T, D] -> [B, T]
    """Return an array with one element for each token."""
    return x if x.ndim == 2 else x[:, :, 0]


def _default_positions(shape: tuple[int, ...], positions: jax.Array | None) -> jax.Array:
    if positions is not None:
        return as_int32("positions", positions)
    return jnp.broadcast_to(jnp.arange(shape[1]), shape)


def positions_and_masks(
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array | None,
    segments: jax.Array | None,
    mask: Mask | None,
    causal: bool = False,
) -> tuple[jax.Array, tuple[Mask | None, ...]]:
    """Return the positions for embeddings and rotation, and a mask for each window of the config.

    The masks, one for each item of the window pattern, are `mask` with that window, the sink tokens
    and the segments. The positions are i32[B, T] or [T]; with segments each counts from 0.
    """
    positions = check_positions(tokens.shape, positions)
    if isinstance(config.positions, Learned) and positions is None and segments is None:
        if known_sizes(tokens.shape[1]) and tokens.shape[1] > config.max_len:
            raise ValueError(f"{tokens.shape[1]} tokens are more than max_len {config.max_len}")
    token_positions = jnp.arange(tokens.shape[1]) if positions is None else positions
    sinks: Mask | None = None
    if config.sink_tokens:
        sinks = Prefix(np.full(1, config.sink_tokens, np.int32))  # type: ignore[arg-type]
    if segments is not None:
        if positions is not None:
            rule = "leave positions out, or give each document a row of its own"
            raise ValueError(f"positions with segments: a document's positions start at 0; {rule}")
        if segments.shape != tokens.shape:
            raise ValueError(f"segments {segments.shape} and tokens {tokens.shape} differ in shape")
        same = Segments(documents_of(segments))
        mask = same if mask is None else mask & same
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


def _within_segments(segments: jax.Array) -> jax.Array:  # i32[B, T] -> i32[B, T]
    """Return each token's distance from the first of its run of equal ids."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    starts = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def check_tokens(tokens: jax.Array | np.ndarray, vocab_size: int) -> None:
    """Raise ValueError unless tokens are integers [B, T], and known ones in the vocabulary.

    A traced id outside the vocabulary gives NaN.
    """
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


def check_head_mask(name: str, mask: jax.Array | None, layers: int, heads: int) -> None:
    """Raise ValueError unless a head mask is None, or floats of each head or layer and head."""
    if mask is None:
        return
    wanted = f"must be floats [{heads}] or [{layers}, {heads}], of heads or layers and heads"
    if not hasattr(mask, "ndim"):
        raise ValueError(f"{name} is a {type(mask).__name__}: {wanted}")
    fits = mask.shape in ((heads,), (layers, heads))
    if not fits or not jnp.issubdtype(mask.dtype, jnp.floating):
        raise ValueError(f"{name} is {mask.dtype}{list(mask.shape)}: {wanted}")


def check_one(tokens: jax.Array) -> None:
    """Raise ValueError unless there is one token a row."""
    if tokens.ndim != 2 or tokens.shape[1] != 1:
        raise ValueError(f"tokens have shape {tokens.shape}: attend reads one token a row, [B, 1]")
