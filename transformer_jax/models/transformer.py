"""Make Encoder and Decoder from one Block; `encoder_decoder` joins both.

`model.apply({"params": params}, tokens, ...) -> (logits f32, cache)` is training, prefill and
decoding alike: any number of tokens at a time, with or without a cache. A token whose position is
negative is padding: no query sees it and it is not cached. Dropout is on exactly when a `key` is
given; flax's `rngs` are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, Unpack

import jax
import jax.numpy as jnp

from transformer_jax.attention.mask import check_mask
from transformer_jax.attention.masks import Causal, Mask
from transformer_jax.cache.model_cache import ModelCache
from transformer_jax.checks import check_array
from transformer_jax.config import Frames, ModelConfig, Patches
from transformer_jax.models.arguments import (
    CheckedModule,
    check_cache_room,
    check_sees_past,
    check_tokens,
    positions_and_masks,
    refuse_unread,
    visited_logits,
)
from transformer_jax.models.block import BlockInputs
from transformer_jax.models.functional import activate, split_key
from transformer_jax.models.inputs import InputLayer, check_inputs, input_positions
from transformer_jax.models.layers import (
    Embed,
    Linear,
    Norm,
    OutputLayer,
    refuse_rngs,
    refuse_surplus,
)
from transformer_jax.models.places import NO_EDIT, Captured, Edit, Places
from transformer_jax.models.stack import (
    WEIGHTS,
    AttentionWeights,
    Stack,
    attention_weights,
)
from transformer_jax.tracing import known_value

if TYPE_CHECKING:
    from transformer_jax.models.encoder_decoder import EncoderDecoder

DecoderResult = tuple[jax.Array, ModelCache | None] | tuple[jax.Array, ModelCache | None, Captured]
"""Logits f32[B, T, V], the updated cache, and where places are captured their values."""


class EncodeOptions(TypedDict, total=False):
    """Name the arguments of an encoder after the tokens; `Encoder.encode` says what they are."""

    positions: jax.Array | None
    mask: Mask | None
    segments: jax.Array | None
    types: jax.Array | None
    head_mask: jax.Array | None
    key: jax.Array | None


class Encoder(CheckedModule):
    """Bidirectional stack with masked-token and classification heads (Devlin et al. 2019).

    Where the config has `inputs`, it reads vectors, images or frames in the place of tokens: a
    method's `tokens` are then f32[B, T, D_in] or f32[B, H, W, C], and `positions` are those of the
    vectors, of the frames, or of the patches and the class token. It has no logits then.

    Attributes:
        config: of kind "encoder".
    """

    config: ModelConfig

    def setup(self) -> None:
        cfg = self.config
        self.embed = Embed(cfg)
        if cfg.inputs is not None:
            self.inputs = InputLayer(cfg)
        self.encoder = Stack(cfg, cfg.num_layers, bidirectional=True)
        if cfg.masked_token_head or cfg.pooling == "transform":
            width = cfg.embedding_width if cfg.masked_token_head else cfg.d_model
            self.head_dense = Linear(cfg, (width,))
            self.head_norm = Norm(cfg)
        if cfg.pooling not in (None, "transform"):
            self.pooler = Linear(cfg, (cfg.d_model,))
        if cfg.num_classes is not None:  # ModernBERT has this bias although it has no other
            bias = True if cfg.pooling == "transform" else None
            self.classifier = Linear(cfg, (cfg.num_classes,), use_bias=bias)
        refuse_surplus(self)

    def encode(
        self,
        tokens: jax.Array,  # i32[B, T], or what the config's inputs describe
        *,
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]
        key: jax.Array | None = None,
    ) -> jax.Array:  # [B, T, D]
        """Return the hidden state of every token; of frames, of every output of theirs.

        Args:
            tokens: i32[B, T], or what the config's inputs describe.
            positions: i32[B, T], negative is padding; None is arange(T).
            mask: which tokens a token sees; None is all. The config's window is added to it.
            segments: i32[B, T], ids of packed documents, as in `Decoder`; None is one document.
            types: i32[B, T], BERT's token types; None is 0. Needs a `type_vocab_size`.
            head_mask: f32[L, N] or [N], multiplies what each head gives, before the output matrix
                (Michel et al. 2019).
            key: a single key, which turns dropout on.

        Returns:
            [B, T, D], in the compute dtype.

        Raises:
            ValueError: if an argument does not fit the tokens or the config.
        """
        masks = [("head_mask", head_mask, "attention")]
        places = Places.of(self, head_masks=masks)
        given = BlockInputs(positions=positions, mask=mask, places=places)
        return run_encoder(self, tokens, given, segments=segments, types=types, key=key)[0]

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
    ) -> tuple[jax.Array, None, AttentionWeights]:
        """Return the logits of `__call__`, None, and what every layer weighed the tokens with.

        Where the config has no logits, the hidden states of `encode` in their place.

        Args:
            tokens: i32[B, T], or what the config's inputs describe.
            positions: i32[B, T], negative is padding; None is arange(T).
            mask: which tokens a token sees; None is all.
            segments: i32[B, T], ids of packed documents; None is one document.
            types: i32[B, T], BERT's token types; None is 0.
        """
        places = Places.of(self, WEIGHTS)
        given = BlockInputs(positions=positions, mask=mask, places=places)
        x, captured, _ = run_encoder(self, tokens, given, segments=segments, types=types)
        weights = attention_weights(self.config, captured, x, None)
        return self._logits(x) if self.config.has_logits else x, None, weights

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T], or what the config's inputs describe
        *,
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> tuple[jax.Array, None] | tuple[jax.Array, None, Captured]:
        """Return logits for masked-token training, and None.

        Args:
            tokens: i32[B, T].
            positions: i32[B, T], negative is padding; None is arange(T).
            mask: which tokens a token sees; None is all. The config's window is added to it.
            segments: i32[B, T], ids of packed documents; None is one document.
            types: i32[B, T], BERT's token types; None is 0.
            head_mask: f32[L, N] or [N], multiplies what each head gives, before the output matrix.
            key: a single key, which turns dropout on.
            capture: names of places (`transformer_jax.places`), whose values are returned.
            edit: functions by the names of places, which change the values there.

        Returns:
            Logits f32[B, T, V] and None; with `capture` also the values by name.

        Raises:
            ValueError: if an argument does not fit, or the config has no logits, as with `inputs`:
                then take `encode`, `pool` or `classify`.
        """
        if not self.config.has_logits and not self.is_initializing():
            name = "embedding_dim" if self.config.inputs is None else "inputs"
            rule = "there are no logits of tokens: method='encode', 'pool' or 'classify'"
            raise ValueError(f"{name} is {getattr(self.config, name)!r}: {rule}")
        masks = [("head_mask", head_mask, "attention")]
        places = Places.of(self, capture, edit, masks)
        given = BlockInputs(positions=positions, mask=mask, places=places)
        x, captured, given = run_encoder(
            self, tokens, given, segments=segments, types=types, key=key
        )
        if self.is_initializing():
            if self.config.pooling is not None:
                self._pool(x, None)
            if self.config.num_classes is not None:
                self._classes(x, None)
            if not self.config.has_logits:
                return x, None
        visit = given.places.visit(positions=given.token_positions)
        logits = visit("logits", self._logits(x))
        captured = captured | visit.captured
        return (logits, None, places.in_order(captured)) if capture else (logits, None)

    def _logits(self, x: jax.Array) -> jax.Array:
        return self.embed.logits(self._transformed(x))

    def _transformed(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        """Return what the output matrix reads."""
        return self._transform(x) if self.config.masked_token_head else x

    def _transform(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
        return self.head_norm(activate(self.head_dense(x), self.config.activation))

    def output_layer(self, tokens: jax.Array, **arguments: Unpack[EncodeOptions]) -> OutputLayer:
        """Return what the logits of `__call__` are computed of, for a loss that takes them apart.

        Args:
            tokens: i32[B, T].
            **arguments: the others of `encode`.
        """
        return self.embed.output_layer(self._transformed(self.encode(tokens, **arguments)))

    def classify(
        self, tokens: jax.Array, **arguments: Unpack[EncodeOptions]
    ) -> jax.Array:  # f32[B, C] or [B, T, C]
        """Return class logits of each row, W times what `pool` gives, or of tokens, W h.

        Where the config's `pooler_reads` is "each", those of tokens too are of what `pool` gives.

        Args:
            tokens: i32[B, T], or what the config's inputs describe.
            **arguments: the others of `encode`.

        Returns:
            f32[B, C], or where the config's `classes_of` is not "text" f32[B, T, C].

        Raises:
            ValueError: if the config has no `num_classes`.
        """
        if self.config.num_classes is None:
            raise ValueError("num_classes is None: this encoder has no classification head")
        return self._classes(self.encode(tokens, **arguments), arguments.get("positions"))

    def pool(
        self, tokens: jax.Array, **arguments: Unpack[EncodeOptions]
    ) -> jax.Array:  # f32[B, D] or [B, T, D]
        """Return a vector of each row: act(P h + p), h of its first token that is not padding.

        The config's `pooler_reads` may say that h is the mean of a row, or of each token.

        Args:
            tokens: i32[B, T], or what the config's inputs describe.
            **arguments: the others of `encode`.

        Returns:
            f32[B, D], or where every token is pooled f32[B, T, D].

        Raises:
            ValueError: if the config has no `pooler`, nor classes.
        """
        if self.config.pooling is None:
            raise ValueError("pooler is None: this encoder has no such layer")
        x = self._pool(self.encode(tokens, **arguments), arguments.get("positions"))
        return x.astype(jnp.float32)

    def _pool(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        cfg = self.config
        assert cfg.pooling is not None
        positions = input_positions(cfg.inputs, positions)
        valid = jnp.ones(x.shape[:2], bool) if positions is None else positions >= 0
        if cfg.pooler_reads == "mean":
            total = jnp.where(valid[:, :, None], x.astype(jnp.float32), 0.0).sum(axis=1)
            x = total / jnp.maximum(valid.sum(axis=1), 1)[:, None]
        elif cfg.pooler_reads == "first":
            at = jnp.argmax(valid, axis=1)[:, None, None]
            x = jnp.take_along_axis(x, at, axis=1)[:, 0]
        if cfg.pooling == "transform":
            return self._transform(x)
        pooled = self.pooler(x)
        return jnp.tanh(pooled) if cfg.pooling == "tanh" else activate(pooled, cfg.pooling)

    def _classes(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        cfg = self.config
        pools = cfg.classes_of == "text" or cfg.pooler_reads == "each"
        return self.classifier(self._pool(x, positions) if pools else x).astype(jnp.float32)


class Decoder(CheckedModule):
    """Causal language model (Radford et al. 2019; Touvron et al. 2023).

    Attributes:
        config: of kind "decoder".
    """

    config: ModelConfig

    def setup(self) -> None:
        self.embed = Embed(self.config)
        self.decoder = Stack(self.config, self.config.num_layers)
        refuse_surplus(self)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,  # None is Causal(); another mask replaces it
        cache: ModelCache | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        at: jax.Array | None = None,  # i32[B, Q]
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> DecoderResult:
        """Return logits of the next token, and the updated cache.

        Args:
            tokens: i32[B, T].
            positions: i32[B, T], negative is padding; None is arange(T), or what comes after the
                cache's.
            mask: takes the place of `Causal()`, so write `Causal() & Padding(valid)`. One that says
                nothing of the future, such as `Padding(valid)` alone, is refused; `Everything()`
                in it sees all. The config's window and the segments are added to it.
            cache: of the tokens before, as `init_cache` or the last call gave it; None has none.
            segments: i32[B, T], ids of packed documents, which are runs of equal ids: attention
                stays within one, and its positions start at 0 (padding may be a document of its
                own). An id that comes again after another is refused where it is known; a traced
                one begins a document.
            at: i32[B, Q], indices of the tokens whose logits are asked for; None is every token. A
                vocabulary is wide, and after a prompt one row of T counts.
            head_mask: f32[L, N] or [N], multiplies what each head gives, before the output matrix
                (Michel et al. 2019).
            key: a single key, which turns dropout on.
            capture: names of places (`transformer_jax.places`), whose values are returned.
            edit: functions by the names of places, which change the values there.

        Returns:
            Logits f32[B, T, V], of `at` [B, Q, V], NaN where there is no such token, and the cache;
            with `capture` also the values by name.

        Raises:
            ValueError: if an argument does not fit the tokens, the config or the cache, or a known
                position is past the cache's end.
        """
        masks = [("head_mask", head_mask, "attention")]
        places = Places.of(self, capture, edit, masks)
        given = BlockInputs(positions=positions, mask=mask, places=places)
        logits, cache, captured, _ = decoder_logits(
            self, tokens, given, cache=cache, segments=segments, key=key, at=at
        )
        return (logits, cache, places.in_order(captured)) if capture else (logits, cache)

    def output_layer(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,  # None is Causal(); another mask replaces it
        segments: jax.Array | None = None,  # i32[B, T]
        key: jax.Array | None = None,
    ) -> OutputLayer:
        """Return what the logits of `__call__` are computed of, for a loss that takes them apart.

        They are softcap(x table^T + bias): `chunked_cross_entropy` never holds all of them. An edit
        of "logits" has no effect.

        Args:
            tokens: i32[B, T].
            positions: i32[B, T], negative is padding; None is arange(T).
            mask: takes the place of `Causal()`.
            segments: i32[B, T], ids of packed documents.
            key: a single key, which turns dropout on.
        """
        given = BlockInputs(positions=positions, mask=mask, places=Places.of(self))
        x = run_decoder(self, tokens, given, segments=segments, key=key)[0]
        return self.embed.output_layer(x)

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,  # None is Causal(); another mask replaces it
        cache: ModelCache | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
    ) -> tuple[jax.Array, ModelCache | None, AttentionWeights]:
        """Return what `__call__` does, and what every layer weighed the keys with.

        Args:
            tokens: i32[B, T].
            positions: i32[B, T], negative is padding; None is arange(T), or what comes after the
                cache's.
            mask: takes the place of `Causal()`.
            cache: of the tokens before; None has none.
            segments: i32[B, T], ids of packed documents.
        """
        places = Places.of(self, WEIGHTS)
        given = BlockInputs(positions=positions, mask=mask, places=places)
        logits, cache, captured, x = decoder_logits(
            self, tokens, given, cache=cache, segments=segments
        )
        return logits, cache, attention_weights(self.config, captured, x, cache)


def _check_types(types: jax.Array, tokens: jax.Array) -> None:
    check_array("types", types, "[B, T]")
    if types.shape != tokens.shape or not jnp.issubdtype(types.dtype, jnp.integer):
        rule = f"must be integers {list(tokens.shape)}, as tokens are"
        raise ValueError(f"types are {types.dtype}{list(types.shape)}: {rule}")


def run_encoder(
    model: Encoder | EncoderDecoder,
    source: jax.Array,  # i32[B, S], or what the config's inputs describe
    given: BlockInputs,  # with positions, a mask and places as a caller gives them
    *,
    segments: jax.Array | None = None,  # i32[B, S]
    types: jax.Array | None = None,  # i32[B, S]
    key: jax.Array | None = None,
) -> tuple[jax.Array, Captured, BlockInputs]:  # [B, S, D]
    """Check what an encoder reads, embed it, and run its stack; return also what it was given."""
    cfg = model.config
    refuse_rngs(model, key)
    if types is not None and cfg.type_vocab_size is None:
        raise ValueError("types are given, but type_vocab_size is None")
    if segments is not None and isinstance(cfg.inputs, Patches | Frames):
        kind = type(cfg.inputs).__name__
        raise ValueError(f"segments with {kind}: give each of them a row of its own")
    x, positions = source, given.positions
    if cfg.inputs is None:
        check_tokens(source, cfg.encoder_vocab_size)
        if types is not None:
            _check_types(types, source)
    else:
        check_inputs(cfg.inputs, source)
        x = model.inputs(source, positions)
        positions = input_positions(cfg.inputs, positions)
    token_positions, masks = positions_and_masks(cfg, x.shape[:2], positions, segments, given.mask)
    places = given.places.told(token_positions, packed=segments is not None)
    given = replace(given, positions=positions, token_positions=token_positions, places=places)
    embed_key, stack_key = split_key(key, 2)
    x = model.embed(x, token_positions, types, embed_key)
    x, _, captured = model.encoder(x, given, masks, key=stack_key)
    return x, captured, given


def run_decoder(
    model: Decoder | EncoderDecoder,
    tokens: jax.Array,  # i32[B, T]
    given: BlockInputs,  # with positions, a mask and places as a caller gives them
    *,
    cache: ModelCache | None = None,
    segments: jax.Array | None = None,  # i32[B, T]
    key: jax.Array | None = None,
) -> tuple[jax.Array, ModelCache | None, Captured, jax.Array | None, BlockInputs]:
    """Check what a decoder reads, embed it, and run its stack.

    Return [B, T, D], the updated cache, what is captured, bool[B]: rows for which the cache has no
    room, and what the stack was given.
    """
    cfg, crossed = model.config, model.config.kind == "encoder-decoder"
    refuse_rngs(model, key)
    check_tokens(tokens, cfg.vocab_size)
    positions, mask, overflow = given.positions, given.mask, None
    if cache is not None:
        if segments is not None:
            raise ValueError("segments with a cache: give each document a row of its own")
        positions, overflow = check_cache_room(cfg, cache, tokens, positions, crossed)
        if mask is not None:
            length = known_value(cache.length) if given.positions is None else None
            if length is not None:  # the mask is asked by the positions that follow
                end = int(length.max(initial=0)) + tokens.shape[1]
                check_mask(mask, tokens.shape[0], cfg.num_heads, end, end)
            tokens = refuse_unread(mask, cache, tokens, positions)
    if mask is None:
        mask = Causal()
    else:
        check_sees_past(mask)
    token_positions, masks = positions_and_masks(
        cfg, tokens.shape, positions, segments, mask, causal=True
    )
    packed = segments is not None
    places = given.places.told(token_positions, whole=cache is None, packed=packed)
    given = replace(given, positions=positions, token_positions=token_positions, places=places)
    embed_key, stack_key = split_key(key, 2)
    x = model.embed(tokens, token_positions, key=embed_key, target=crossed)
    x, cache, captured = model.decoder(x, given, masks, cache=cache, key=stack_key)
    if overflow is not None and cache is not None and cache.exhausted is not None:
        overflow |= cache.exhausted
    return x, cache, captured, overflow, given


def decoder_logits(
    model: Decoder | EncoderDecoder,
    tokens: jax.Array,  # i32[B, T]
    given: BlockInputs,
    *,
    cache: ModelCache | None = None,
    segments: jax.Array | None = None,  # i32[B, T]
    key: jax.Array | None = None,
    at: jax.Array | None = None,  # i32[B, Q]
) -> tuple[jax.Array, ModelCache | None, Captured, jax.Array]:
    """Run a decoder: return logits f32[B, T, V], the cache, what is captured, and [B, T, D].

    Logits are NaN in rows for which the cache has no room.
    """
    x, cache, captured, overflow, given = run_decoder(
        model, tokens, given, cache=cache, segments=segments, key=key
    )
    visit = given.places.visit(positions=given.token_positions)
    logits = visited_logits(model.embed, x, at, visit)
    if overflow is not None:
        logits = jnp.where(overflow[:, None, None], jnp.nan, logits)
    return logits, cache, captured | visit.captured, x
