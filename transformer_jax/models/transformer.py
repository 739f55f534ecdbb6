"""Encoder and decoder, both built from `Block`; `encoder_decoder` combines the two.

`model.apply({"params": params}, tokens, ...) -> (logits f32, cache)` serves training, prefill and
decoding, with any number of tokens per call, and with or without a cache. A token with a negative
position is padding. No query sees padding, and padding is not cached. Passing a `key` turns dropout
on. Flax's `rngs` have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    gather_tokens,
    positions_and_masks,
    refuse_disorder,
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
from transformer_jax.models.places import Captured, Places, Visit
from transformer_jax.models.stack import Stack
from transformer_jax.tracing import concrete_value

if TYPE_CHECKING:
    from transformer_jax.models.encoder_decoder import EncoderDecoder

DecoderResult = tuple[jax.Array, ModelCache | None] | tuple[jax.Array, ModelCache | None, Captured]
"""Logits f32[B, T, V], the updated cache and, with `capture`, the captured values."""


class EncodeOptions(TypedDict, total=False):
    """Keyword arguments of an encoder's methods, documented in `Encoder.encode`."""

    positions: jax.Array | None
    mask: Mask | None
    segments: jax.Array | None
    types: jax.Array | None
    key: jax.Array | None


class Encoder(CheckedModule):
    """Bidirectional stack with masked-token and classification heads (Devlin et al. 2019).

    If the config has `inputs`, the encoder reads vectors, images or frames and has no logits. The
    `tokens` argument is then f32[B, T, D_in] or f32[B, H, W, C], and `positions` are those of the
    vectors, the frames, or the class token and the patches.

    Attributes:
        config: a config of kind "encoder".
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
        if cfg.num_classes is not None:  # ModernBERT has this bias, although it has no other biases
            bias = True if cfg.pooling == "transform" else None
            self.classifier = Linear(cfg, (cfg.num_classes,), use_bias=bias)
        refuse_surplus(self)

    def encode(
        self,
        tokens: jax.Array,  # i32[B, T], or an array that matches the config's inputs
        *,
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> jax.Array | tuple[jax.Array, Captured]:  # [B, T, D]
        """Return the hidden state of each token, or of each frame after the convolutions.

        Args:
            tokens: token IDs, or an array that matches the config's `inputs`.
            positions: negative means padding; None means arange(T).
            mask: tokens that each token sees; None means all. The config's window also applies.
            segments: IDs of packed documents, as in `Decoder`; None means one document.
            types: BERT's token types; None means 0. Requires `type_vocab_size`.
            key: a single PRNG key, which turns dropout on.
            capture: names of the places (see `transformer_jax.places`) whose values are returned.

        Returns:
            [B, T, D] in the compute dtype. With `capture`, a dict of the captured values is also
            returned.

        Raises:
            ValueError: If an argument does not match the tokens or the config.
        """
        places = Places.of(self, capture)
        x, visit = run_encoder(
            self, tokens, places, positions=positions, mask=mask, segments=segments, types=types,
            key=key,
        )  # fmt: skip
        return (x, places.in_order(visit.captured)) if capture else x

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T], or an array that matches the config's inputs
        *,
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> tuple[jax.Array, None] | tuple[jax.Array, None, Captured]:
        """Return the logits of each token, and None instead of a cache.

        Args:
            tokens: i32[B, T].
            positions: negative means padding; None means arange(T).
            mask: tokens that each token sees; None means all. The config's window also applies.
            segments: IDs of packed documents; None means one document.
            types: BERT's token types; None means 0.
            key: a single PRNG key, which turns dropout on.
            capture: names of the places (see `transformer_jax.places`) whose values are returned.

        Returns:
            The logits f32[B, T, V] and None. With `capture`, a dict of the captured values is also
            returned.

        Raises:
            ValueError: If an argument does not match the tokens or the config, or if the model has
                no logits (for example because its config has `inputs`). Use `encode`, `pool` or
                `classify` for such a model.
        """
        if not self.config.has_logits and not self.is_initializing():
            name = "embedding_dim" if self.config.inputs is None else "inputs"
            rule = "such a model has no token logits: use method='encode', 'pool' or 'classify'"
            raise ValueError(f"{name} is {getattr(self.config, name)!r}: {rule}")
        places = Places.of(self, capture)
        x, visit = run_encoder(
            self, tokens, places, positions=positions, mask=mask, segments=segments, types=types,
            key=key,
        )  # fmt: skip
        if self.is_initializing():
            # flax creates the parameters of a layer when the layer is called, so `init` calls each
            # head
            if self.config.pooling is not None:
                self._pool(x, None)
            if self.config.num_classes is not None:
                self._classes(x, None)
            if not self.config.has_logits:
                return x, None
        x = self.head_transform(x) if self.config.masked_token_head else x
        logits = visit("logits", self.embed.logits(x))
        return (logits, None, places.in_order(visit.captured)) if capture else (logits, None)

    def head_transform(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
        """Apply BERT's dense layer, activation and norm before the logits or the classifier."""
        return self.head_norm(activate(self.head_dense(x), self.config.activation))

    def output_layer(self, tokens: jax.Array, **arguments: Unpack[EncodeOptions]) -> OutputLayer:
        """Return the hidden states and the output matrix, so a loss can compute logits in chunks.

        Args:
            tokens: i32[B, T], the token IDs.
            **arguments: the other arguments of `encode`.
        """
        x: Any = self.encode(tokens, **arguments)
        x = self.head_transform(x) if self.config.masked_token_head else x
        return self.embed.output_layer(x)

    def classify(
        self, tokens: jax.Array, **arguments: Unpack[EncodeOptions]
    ) -> jax.Array:  # f32[B, C] or [B, T, C]
        """Return the class logits of each row, W pool(h), or of each token, W h.

        If the config's `pooler_reads` is "each", the logits of each token are also computed from
        `pool`.

        Args:
            tokens: token IDs, or an array that matches the config's `inputs`.
            **arguments: the other arguments of `encode`.

        Returns:
            The class logits f32[B, C], or f32[B, T, C] if the config's `classes_of` is not "text".

        Raises:
            ValueError: If the config has no `num_classes`.
        """
        if self.config.num_classes is None:
            raise ValueError("num_classes is None: this encoder has no classification head")
        x: Any = self.encode(tokens, **arguments)
        return self._classes(x, arguments.get("positions"))

    def pool(
        self, tokens: jax.Array, **arguments: Unpack[EncodeOptions]
    ) -> jax.Array:  # f32[B, D] or [B, T, D]
        """Return one vector per row: act(P h + p), with the state h of the first non-padding token.

        The config's `pooler_reads` can specify that h is the mean over the row or the state of each
        token.

        Args:
            tokens: token IDs, or an array that matches the config's `inputs`.
            **arguments: the other arguments of `encode`.

        Returns:
            The vectors f32[B, D], or f32[B, T, D] if each token is pooled.

        Raises:
            ValueError: If the config has neither a `pooler` nor classes.
        """
        if self.config.pooling is None:
            raise ValueError("pooler is None: this encoder has no pooling layer")
        x: Any = self.encode(tokens, **arguments)
        return self._pool(x, arguments.get("positions")).astype(jnp.float32)

    def _pool(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        cfg = self.config
        assert cfg.pooling is not None
        positions = input_positions(cfg.inputs, positions)
        valid = jnp.ones(x.shape[:2], bool) if positions is None else positions >= 0
        if cfg.pooler_reads == "mean":
            # padding counts as 0, and the divisor is at least 1, so the mean of an all-padding row
            # is 0
            total = jnp.where(valid[:, :, None], x.astype(jnp.float32), 0.0).sum(axis=1)
            x = total / jnp.maximum(valid.sum(axis=1), 1)[:, None]
        elif cfg.pooler_reads == "first":
            # the index of the first True, which is not 0 if a row is left-padded
            x = gather_tokens(x, jnp.argmax(valid, axis=1)[:, None])[:, 0]
        if cfg.pooling == "transform":
            return self.head_transform(x)
        pooled = self.pooler(x)
        return jnp.tanh(pooled) if cfg.pooling == "tanh" else activate(pooled, cfg.pooling)

    def _classes(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        cfg = self.config
        pools = cfg.classes_of == "text" or cfg.pooler_reads == "each"
        return self.classifier(self._pool(x, positions) if pools else x).astype(jnp.float32)


class Decoder(CheckedModule):
    """Causal language model (Radford et al. 2019; Touvron et al. 2023).

    Attributes:
        config: a config of kind "decoder".
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
        mask: Mask | None = None,  # None means Causal(); another mask replaces it
        cache: ModelCache | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        at: jax.Array | None = None,  # i32[B, Q]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> DecoderResult:
        """Return the logits of the next token, and the updated cache.

        Args:
            tokens: i32[B, T].
            positions: negative means padding. None means arange(T), or the positions that follow
                the cache if one is passed.
            mask: mask that replaces `Causal()`, so use, for example, `Causal() & Padding(valid)`. A
                mask that does not hide any future tokens, such as `Padding(valid)`, raises an error
                unless it includes `Everything()`. The config's window and the segments also apply.
            cache: the cache from `init_cache` or the previous call; None means a new sequence.
            segments: IDs of packed documents. Each run of equal IDs is a document, and padding may
                also be a document. Attention is limited to the document, and its positions start at
                0. An ID that occurs again after another ID raises an error. Inside a trace, it
                starts a new document. With `positions`, segments[b, p] is the document of position
                p, and each row of `positions` must contain 0 to T - 1, in any order.
            at: i32[B, Q], indices of the tokens whose logits are computed; None means all.
                After a prompt, you usually need only the logits of the last token.
            key: a single PRNG key, which turns dropout on.
            capture: names of the places (see `transformer_jax.places`) whose values are returned.

        Returns:
            The logits f32[B, T, V], or f32[B, Q, V] with `at` (NaN if an index is out of range),
            and the cache. With `capture`, a dict of the captured values is also returned.

        Raises:
            ValueError: If an argument does not match the tokens, the config or the cache, or if a
                known position is past the end of the cache.
        """
        places = Places.of(self, capture)
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
        mask: Mask | None = None,  # None means Causal(); another mask replaces it
        segments: jax.Array | None = None,  # i32[B, T]
        key: jax.Array | None = None,
    ) -> OutputLayer:
        """Return the hidden states and the output matrix, so a loss can compute logits in chunks.

        The logits are softcap(x table^T + bias). An edit of "logits" has no effect.

        Args:
            tokens: i32[B, T].
            positions: negative means padding; None means arange(T).
            mask: mask that replaces `Causal()`.
            segments: IDs of packed documents.
            key: a single PRNG key, which turns dropout on.
        """
        x = run_decoder(
            self, tokens, Places.of(self), positions=positions, mask=mask, segments=segments,
            key=key, read_out=False,
        )[0]  # fmt: skip
        return self.embed.output_layer(x)


def run_encoder(
    model: Encoder | EncoderDecoder,
    source: jax.Array,  # i32[B, S], or an array that matches the config's inputs
    places: Places,
    *,
    positions: jax.Array | None,  # i32[B, S]
    mask: Mask | None = None,
    segments: jax.Array | None = None,  # i32[B, S]
    types: jax.Array | None = None,  # i32[B, S]
    key: jax.Array | None = None,
) -> tuple[jax.Array, Visit]:  # [B, S, D]
    """Check the inputs of an encoder, embed them, and run its stack.

    Return the hidden states and a visit with all captured values. The caller computes the logits.
    """
    cfg = model.config
    refuse_rngs(model, key)
    if types is not None and cfg.type_vocab_size is None:
        raise ValueError("types were passed, but type_vocab_size is None")
    if segments is not None and isinstance(cfg.inputs, Patches | Frames):
        kind = type(cfg.inputs).__name__
        raise ValueError(f"segments with {kind} are not supported: use one row per input")
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
        # from here on, these are the positions of the vectors that the convolutions computed
        positions = input_positions(cfg.inputs, positions)
    token_positions, masks = positions_and_masks(cfg, x.shape[:2], positions, segments, mask)
    places = places.with_facts(token_positions, packed=segments is not None)
    inputs = BlockInputs(positions=positions, token_positions=token_positions, places=places)
    embed_key, stack_key = split_key(key, 2)
    x = model.embed(x, token_positions, types, embed_key)
    visit = places.visit(positions=token_positions)
    x, _ = model.encoder(x, inputs, masks, visit, key=stack_key)
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

    Return the logits f32[B, T, V] (NaN in rows that do not fit in the cache), the updated cache and
    the captured values. Without `read_out`, return the hidden states [B, T, D] instead of the
    logits.
    """
    cfg, is_cross = model.config, model.config.kind == "encoder-decoder"
    refuse_rngs(model, key)
    check_tokens(tokens, cfg.vocab_size)
    overflow = None
    if cache is not None:
        if segments is not None:
            raise ValueError("segments with a cache are not supported: use one row per document")
        follows = positions is None
        positions, overflow = check_cache_room(cfg, cache, tokens, positions, is_cross)
        if mask is not None:
            length = concrete_value(cache.length) if follows else None
            if length is not None:  # the mask is evaluated at the positions after the cache
                end = int(length.max(initial=0)) + tokens.shape[1]
                check_mask(mask, tokens.shape[0], cfg.num_heads, end, end)
            # A traced call cannot raise an error, so the tokens of an invalid row become -1 and its
            # logits become NaN.
            tokens = refuse_unread(mask, cache, tokens, positions)
    if mask is None:
        mask = Causal()
    elif cfg.has_state and not isinstance(mask, Causal):
        rule = "layers with a state support only Causal(); positions of -1 mark padding"
        raise ValueError(f"mask is {mask!r}: {rule}, and segments mark documents")
    else:
        check_sees_past(mask)
    token_positions, masks = positions_and_masks(
        cfg, tokens.shape, positions, segments, mask, causal=True
    )
    # `places` and `visit` perform `capture` and `edit`; without these, they do nothing. `positions`
    # are for masks and caches. `token_positions` are for embeddings and rotation, and start at 0 in
    # each document of a packed row.
    places = places.with_facts(token_positions, whole=cache is None, packed=segments is not None)
    inputs = BlockInputs(
        positions=positions, token_positions=token_positions, places=places, memory=memory,
        memory_positions=memory_positions, segments=segments if cfg.has_state else None,
    )  # fmt: skip
    embed_key, stack_key = split_key(key, 2)
    # the target has its own position table and its own norm (Lewis et al. 2020)
    x = model.embed(tokens, token_positions, key=embed_key, target=is_cross)
    visit = places.visit(positions=token_positions)
    x, cache = model.decoder(x, inputs, masks, visit, cache=cache, key=stack_key)
    if cfg.has_state and cache is None and positions is not None:
        x = jnp.where(refuse_disorder(positions)[:, None, None], jnp.nan, x)
    if not read_out:
        return x, cache, visit.captured
    logits = visited_logits(model.embed, x, at, visit)
    if overflow is not None and cache is not None:
        if cache.exhausted is not None:
            overflow |= cache.exhausted
        # a token at a traced position past the end of the cache was not written, so later logits
        # are wrong
        logits = jnp.where(overflow[:, None, None], jnp.nan, logits)
    return logits, cache, visit.captured
