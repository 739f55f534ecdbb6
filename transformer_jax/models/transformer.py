"""Make Encoder and Decoder from one Block; `encoder_decoder` joins both.

`model.apply({"params": params}, tokens, ...) -> (logits f32, cache)` is training, prefill and
decoding alike: any number of tokens at a time, with or without a cache. A token whose position is
negative is padding: no query sees it and it is not cached. Dropout is on exactly when a `key` is
given; flax's `rngs` are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

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
from transformer_jax.models.places import NO_EDIT, Captured, Edit, Places, Visit
from transformer_jax.models.stack import Stack
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
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> jax.Array | tuple[jax.Array, Captured]:  # [B, T, D]
        """Return the hidden state of every token; of frames, of every output of theirs.

        Args:
            tokens: i32[B, T], or what the config's inputs describe.
            positions: i32[B, T], negative is padding; None is arange(T).
            mask: which tokens a token sees; None is all. The config's window is added to it.
            segments: i32[B, T], ids of packed documents, as in `Decoder`; None is one document.
            types: i32[B, T], BERT's token types; None is 0. Needs a `type_vocab_size`.
            key: a single key, which turns dropout on.
            capture: names of places (`transformer_jax.places`), whose values are returned.

        Returns:
            [B, T, D], in the compute dtype; with `capture` also the values by name.

        Raises:
            ValueError: if an argument does not fit the tokens or the config.
        """
        places = Places.of(self, capture)
        x, visit = run_encoder(
            self, tokens, places, positions=positions, mask=mask, segments=segments, types=types,
            key=key,
        )  # fmt: skip
        return (x, places.in_order(visit.captured)) if capture else x

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T], or what the config's inputs describe
        *,
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
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
        places = Places.of(self, capture, edit)
        x, visit = run_encoder(
            self, tokens, places, positions=positions, mask=mask, segments=segments, types=types,
            key=key,
        )  # fmt: skip
        if self.is_initializing():
            # flax declares the parameters of a layer when it is called, so `init` calls every head
            if self.config.pooling is not None:
                self._pool(x, None)
            if self.config.num_classes is not None:
                self._classes(x, None)
            if not self.config.has_logits:
                return x, None
        x = self._transformed(x) if self.config.masked_token_head else x
        logits = visit("logits", self.embed.logits(x))
        return (logits, None, places.in_order(visit.captured)) if capture else (logits, None)

    def _transformed(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
        return self.head_norm(activate(self.head_dense(x), self.config.activation))

    def output_layer(self, tokens: jax.Array, **arguments: Unpack[EncodeOptions]) -> OutputLayer:
        """Return what the logits of `__call__` are computed of, for a loss that takes them apart.

        Args:
            tokens: i32[B, T].
            **arguments: the others of `encode`.
        """
        x: Any = self.encode(tokens, **arguments)
        return self.embed.output_layer(self._transformed(x) if self.config.masked_token_head else x)

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
        x: Any = self.encode(tokens, **arguments)
        return self._classes(x, arguments.get("positions"))

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
        x: Any = self.encode(tokens, **arguments)
        return self._pool(x, arguments.get("positions")).astype(jnp.float32)

    def _pool(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        cfg = self.config
        assert cfg.pooling is not None
        positions = input_positions(cfg.inputs, positions)
        valid = jnp.ones(x.shape[:2], bool) if positions is None else positions >= 0
        if cfg.pooler_reads == "mean":
            # 0 for padding, and a divisor of at least 1: a row of padding alone has the mean 0
            total = jnp.where(valid[:, :, None], x.astype(jnp.float32), 0.0).sum(axis=1)
            x = total / jnp.maximum(valid.sum(axis=1), 1)[:, None]
        elif cfg.pooler_reads == "first":
            # the first True, which is not column 0 where a row is padded on its left
            at = jnp.argmax(valid, axis=1)[:, None, None]
            x = jnp.take_along_axis(x, at, axis=1)[:, 0]
        if cfg.pooling == "transform":
            return self._transformed(x)
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
        places = Places.of(self, capture, edit)
        logits, cache, captured = run_decoder(
            self, tokens, places, positions=positions, mask=mask, cache=cache, segments=segments,
            at=at, key=key,
        )  # fmt: skip
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
        x = run_decoder(
            self, tokens, Places.of(self), positions=positions, mask=mask, segments=segments,
            key=key, read_out=False,
        )[0]  # fmt: skip
        return self.embed.output_layer(x)


def run_encoder(
    model: Encoder | EncoderDecoder,
    source: jax.Array,  # i32[B, S], or what the config's inputs describe
    places: Places,
    *,
    positions: jax.Array | None,  # i32[B, S]
    mask: Mask | None = None,
    segments: jax.Array | None = None,  # i32[B, S]
    types: jax.Array | None = None,  # i32[B, S]
    key: jax.Array | None = None,
) -> tuple[jax.Array, Visit]:  # [B, S, D]
    """Check the inputs of an encoder, embed them, and run its stack.

    Return the hidden states and a visit that holds all captured values, for the logits to join.
    """
    cfg = model.config
    refuse_rngs(model, key)
    if types is not None and cfg.type_vocab_size is None:
        raise ValueError("types are given, but type_vocab_size is None")
    if segments is not None and isinstance(cfg.inputs, Patches | Frames):
        kind = type(cfg.inputs).__name__
        raise ValueError(f"segments with {kind}: give each of them a row of its own")
    x = source
    if cfg.inputs is None:
        check_tokens(source, cfg.encoder_vocab_size)
        if types is not None:
            check_array("types", types, "[B, T]")
            if types.shape != source.shape or not jnp.issubdtype(types.dtype, jnp.integer):
                rule = f"must be integers {list(source.shape)}, as tokens are"
                raise ValueError(f"types are {types.dtype}{list(types.shape)}: {rule}")
    else:
        check_inputs(cfg.inputs, source)
        x = model.inputs(source, positions)
        # from here on they are those of the vectors that convolutions made of frames
        positions = input_positions(cfg.inputs, positions)
    token_positions, masks = positions_and_masks(cfg, x.shape[:2], positions, segments, mask)
    places = places.told(token_positions, packed=segments is not None)
    given = BlockInputs(positions=positions, token_positions=token_positions, places=places)
    embed_key, stack_key = split_key(key, 2)
    x = model.embed(x, token_positions, types, embed_key)
    visit = places.visit(positions=token_positions)
    x, _ = model.encoder(x, given, masks, visit, key=stack_key)
    return x, visit


def run_decoder(
    model: Decoder | EncoderDecoder,
    tokens: jax.Array,  # i32[B, T]
    places: Places,
    *,
    positions: jax.Array | None = None,  # i32[B, T]
    mask: Mask | None = None,
    cache: ModelCache | None = None,
    segments: jax.Array | None = None,  # i32[B, T]
    memory: jax.Array | None = None,  # [B, S, D]
    memory_positions: jax.Array | None = None,  # i32[B, S]
    at: jax.Array | None = None,  # i32[B, Q]
    key: jax.Array | None = None,
    read_out: bool = True,
) -> tuple[jax.Array, ModelCache | None, Captured]:
    """Check the inputs of a decoder, embed them, run its stack, and compute the logits.

    Return logits f32[B, T, V], NaN in rows for which the cache has no room, the updated cache and
    the captured values. Without `read_out`, return the hidden states [B, T, D] for logits.
    """
    cfg, crossed = model.config, model.config.kind == "encoder-decoder"
    refuse_rngs(model, key)
    check_tokens(tokens, cfg.vocab_size)
    overflow = None
    if cache is not None:
        if segments is not None:
            raise ValueError("segments with a cache: give each document a row of its own")
        follows = positions is None
        positions, overflow = check_cache_room(cfg, cache, tokens, positions, crossed)
        if mask is not None:
            length = known_value(cache.length) if follows else None
            if length is not None:  # the mask is asked by the positions that follow
                end = int(length.max(initial=0)) + tokens.shape[1]
                check_mask(mask, tokens.shape[0], cfg.num_heads, end, end)
            # A traced call cannot raise: in a row that must fail, tokens become -1 and logits NaN.
            tokens = refuse_unread(mask, cache, tokens, positions)
    if mask is None:
        mask = Causal()
    else:
        check_sees_past(mask)
    token_positions, masks = positions_and_masks(
        cfg, tokens.shape, positions, segments, mask, causal=True
    )
    places = places.told(token_positions, whole=cache is None, packed=segments is not None)
    given = BlockInputs(
        positions=positions, token_positions=token_positions, places=places, memory=memory,
        memory_positions=memory_positions,
    )  # fmt: skip
    embed_key, stack_key = split_key(key, 2)
    # the target has its own table of positions and its own norm (Lewis et al. 2020)
    x = model.embed(tokens, token_positions, key=embed_key, target=crossed)
    visit = places.visit(positions=token_positions)
    x, cache = model.decoder(x, given, masks, visit, cache=cache, key=stack_key)
    if not read_out:
        return x, cache, visit.captured
    logits = visited_logits(model.embed, x, at, visit)
    if overflow is not None and cache is not None:
        if cache.exhausted is not None:
            overflow |= cache.exhausted
        # a traced position past the end of the cache was not written: what follows it is unknown
        logits = jnp.where(overflow[:, None, None], jnp.nan, logits)
    return logits, cache, visit.captured
