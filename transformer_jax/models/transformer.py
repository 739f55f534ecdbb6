"""Make Encoder, Decoder and EncoderDecoder from one Block.

`model.apply({"params": params}, tokens, ...) -> (logits f32, cache)` is training, prefill and
decoding alike: any number of tokens at a time, with or without a cache. A token whose position is
negative is padding: no query sees it and it is not cached. Dropout is on exactly when a `key` is
given; flax's `rngs` are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from transformer_jax.models.packing import documents_of
from transformer_jax.models.places import NO_EDIT, NOWHERE, Captured, Edit, Places
from transformer_jax.models.stack import (
    CROSS_WEIGHTS,
    WEIGHTS,
    AttentionWeights,
    Stack,
    attention_weights,
)
from transformer_jax.shown import short_repr
from transformer_jax.tracing import at_once, known_sizes, known_value

DecoderResult = tuple[jax.Array, ModelCache | None] | tuple[jax.Array, ModelCache | None, Captured]
"""Logits f32[B, T, V], the updated cache, and where places are captured their values."""


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
        refuse_surplus(self)

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
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> jax.Array:  # [B, T, D]
        """Return the hidden state of every token, [B, T, D]; of frames, of every output of theirs.

        Tokens stand at `positions`, or at arange(T). `segments` packs documents, as in `Decoder`;
        `types` are BERT's token types, 0 where none are given. `head_mask` multiplies what each
        head gives, before the output matrix (Michel et al. 2019); `edit` is that of `__call__`.
        ValueError where an argument does not fit the tokens or the config.
        """
        places = Places.of(self.config, (), edit).scaled_heads("attention", head_mask)
        check_head_mask("head_mask", head_mask, self.config.num_layers, self.config.num_heads)
        return self._encode(tokens, positions, mask, segments, types, key, places)[0]

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
        places = Places.of(self.config, WEIGHTS, NO_EDIT)
        x, captured = self._encode(tokens, positions, mask, segments, types, None, places)
        weights = attention_weights(self.config, captured, x, None)
        return x if self.config.inputs is not None else self._logits(x), None, weights

    def _encode(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        mask: Mask | None,
        segments: jax.Array | None,
        types: jax.Array | None,
        key: jax.Array | None,
        places: Places,
    ) -> tuple[jax.Array, Captured]:
        cfg = self.config
        refuse_rngs(self, key)
        if types is not None and cfg.type_vocab_size is None:
            raise ValueError("types are given, but type_vocab_size is None")
        if segments is not None and isinstance(cfg.inputs, Patches | Frames):
            kind = type(cfg.inputs).__name__
            raise ValueError(f"segments with {kind}: give each of them a row of its own")
        return run_encoder(self, tokens, positions, mask, segments, types, key, places)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T], or what the config's inputs describe
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,
        segments: jax.Array | None = None,  # i32[B, T]
        types: jax.Array | None = None,  # i32[B, T]
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> tuple[jax.Array, None] | tuple[jax.Array, None, Captured]:
        """Return logits f32[B, T, V] for masked-token training, and None; takes what `encode` does.

        The values of the places `capture` come after it, in a dict, where it names any; `edit`
        changes them (`transformer_jax.places`). ValueError where the config has `inputs`: take
        `encode`, `pool` or `classify`.
        """
        if self.config.inputs is not None and not self.is_initializing():
            rule = "there are no logits of tokens: method='encode', 'pool' or 'classify'"
            raise ValueError(f"inputs is {self.config.inputs!r}: {rule}")
        check_head_mask("head_mask", head_mask, self.config.num_layers, self.config.num_heads)
        places = Places.of(self.config, capture, edit).scaled_heads("attention", head_mask)
        x, captured = self._encode(tokens, positions, mask, segments, types, key, places)
        if self.config.pooling is not None and self.is_initializing():
            self._pool(x, None)
        if self.config.num_classes is not None and self.is_initializing():
            self._classes(x, None)
        if self.config.inputs is not None:
            return x, None
        outside = places.outside()
        logits = outside("logits", self._logits(x))
        captured = places.in_order(captured | outside.captured)
        return (logits, None, captured) if capture else (logits, None)

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
        refuse_surplus(self)

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
        capture: Sequence[str] = (),
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> DecoderResult:
        """Return logits f32[B, T, V] of the next token, and the updated cache.

        Without `positions`, tokens stand at arange(T), or after what the cache holds. A `mask`
        takes the place of `Causal()`: one that does not contain it, such as `Padding(valid)` alone,
        sees the future; the config's window and the segments are added to it. `segments`
        packs documents, runs of equal ids: attention stays within one, and its positions start at 0
        (padding may be a document of its own). An id that comes again after another is refused
        where it is known; a traced one begins a document. `at` asks for the logits [B, Q, V] after
        the tokens of these indices alone, NaN where there is no such token: a vocabulary is wide,
        and after a prompt one row of T counts. `head_mask` multiplies what each head gives, before
        the output matrix (Michel et al. 2019). `key` turns dropout on. The values of the places
        `capture` come third, in a dict, where it names any; `edit` changes values by functions
        (`transformer_jax.places`). ValueError where an argument does not fit the tokens, the
        config or the cache, and where a known position is past the cache's end.
        """
        check_head_mask("head_mask", head_mask, self.config.num_layers, self.config.num_heads)
        places = Places.of(self.config, capture, edit).scaled_heads("attention", head_mask)
        given = DecoderInputs(tokens, positions, mask, cache, segments, key, places=places)
        logits, cache, captured = run_decoder(self, given).logits(self, at, places)
        return (logits, cache, places.in_order(captured)) if capture else (logits, cache)

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
        given = DecoderInputs(tokens, positions, mask, segments=segments, key=key)
        return self.embed.output_layer(run_decoder(self, given).x)

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # None is Causal(); another mask replaces it
        cache: ModelCache | None = None,
        segments: jax.Array | None = None,  # i32[B, T]: ids of packed documents
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> tuple[jax.Array, ModelCache | None, AttentionWeights]:
        """Return what `__call__` does, and what every layer weighed the keys with."""
        places = Places.of(self.config, WEIGHTS, edit)
        given = DecoderInputs(tokens, positions, mask, cache, segments, places=places)
        return run_decoder(self, given).attended(self, places)


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
        refuse_surplus(self)

    def encode(
        self,
        source: jax.Array,  # i32[B, S], or what the config's inputs describe
        *,
        positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        mask: Mask | None = None,
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]
        key: jax.Array | None = None,
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> jax.Array:  # [B, S, D]
        """Return the encoder's output of a source, which the decoder attends to: its memory.

        `edit` is that of `__call__`, of the encoder's places.
        """
        refuse_rngs(self, key)
        check_head_mask("head_mask", head_mask, self.config.num_layers, self.config.num_heads)
        places = Places.of(self.config, (), edit).inside("encoder/")
        places = places.scaled_heads("attention", head_mask)
        return run_encoder(self, source, positions, mask, None, None, key, places)[0]

    def attend_source(
        self,
        source: jax.Array,  # i32[B, S], or what the config's inputs describe
        *,
        positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        mask: Mask | None = None,
    ) -> tuple[jax.Array, AttentionWeights]:
        """Return what `encode` does, and what every layer weighed the source with."""
        names = [f"encoder/{name}" for name in WEIGHTS]
        places = Places.of(self.config, names, NO_EDIT).inside("encoder/")
        x, captured = run_encoder(self, source, positions, mask, None, None, None, places)
        return x, attention_weights(self.config, captured, x, None)

    def _memory(
        self,
        source: jax.Array,
        positions: jax.Array | None,
        key: jax.Array | None,
        places: Places = NOWHERE,
    ) -> tuple[jax.Array, jax.Array, Captured]:  # [B, S, D], i32[B, S]
        """Return the encoder's output and where it stands, negative for padding."""
        refuse_rngs(self, key)
        memory, captured = run_encoder(self, source, positions, None, None, None, key, places)
        positions = input_positions(self.config.inputs, positions)
        return memory, _default_positions(memory.shape[:2], positions), captured

    def init_cache(
        self,
        source: jax.Array,  # i32[B, S], or what the config's inputs describe
        *,
        capacity: int,
        positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        dtype: jax.typing.DTypeLike | None = None,
        slack: int = 0,
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> ModelCache:
        """Read the source once: its cross-attention keys and values, and an empty target cache.

        `capacity`, `dtype` and `slack` are of the target's cache, and mean what they mean for
        `models.init_cache`; the source is held in the compute dtype. `edit` is that of `__call__`,
        of the encoder's places.
        """
        places = Places.of(self.config, (), edit).inside("encoder/")
        memory, positions, _ = self._memory(source, positions, None, places)
        cross = self.decoder.init_cross_cache(memory, positions)
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
        capture: Sequence[str] = (),
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> DecoderResult:
        """Return logits f32[B, T, V] of the next target token, and the updated cache.

        They are read from a `source`, as in training, or from a `cache` of `init_cache`, which has
        read its source: give one of the two. `source_positions` are the source's, negative where it
        is padding; `positions` are the target's. `at` asks for the logits [B, Q, V] after the
        tokens of these indices alone. A head mask multiplies what each head of its attention gives,
        before the output matrix. `key` turns dropout on, in both stacks. `capture` and `edit` are
        as in `Decoder`; places of the encoder need a `source`. ValueError as in `Decoder`.

            logits, _ = model.apply({"params": params}, target, source=source)
            cache = model.apply({"params": params}, source, capacity=64, method="init_cache")
            logits, cache = model.apply({"params": params}, target, cache=cache)
        """
        cfg = self.config
        check_head_mask("head_mask", head_mask, cfg.decoder_layers, cfg.num_heads)
        check_head_mask("cross_head_mask", cross_head_mask, cfg.decoder_layers, cfg.num_heads)
        check_head_mask("encoder_head_mask", encoder_head_mask, cfg.num_layers, cfg.num_heads)
        if encoder_head_mask is not None and source is None:
            raise ValueError("encoder_head_mask without a source: a cache has already read its own")
        places = Places.of(cfg, capture, edit)
        encoder_places = places.inside("encoder/").scaled_heads("attention", encoder_head_mask)
        places = places.scaled_heads("attention", head_mask)
        places = places.scaled_heads("cross_attention", cross_head_mask)
        given = DecoderInputs(tokens, positions, mask, cache, key=key, places=places)
        given, captured = self._with_source(given, source, source_positions, encoder_places)
        logits, cache, own = run_decoder(self, given).logits(self, at, places)
        captured = places.in_order(captured | own)
        return (logits, cache, captured) if capture else (logits, cache)

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]: the target
        *,
        source: jax.Array | None = None,  # i32[B, S], or what the config's inputs describe
        source_positions: jax.Array | None = None,  # i32[B, S]; negative is padding
        positions: jax.Array | None = None,  # i32[B, T]; negative is padding
        mask: Mask | None = None,  # on the target; None is Causal()
        cache: ModelCache | None = None,
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> tuple[jax.Array, ModelCache | None, AttentionWeights]:
        """Return what `__call__` does, and what the decoder weighed target and source with."""
        places = Places.of(self.config, CROSS_WEIGHTS, edit)
        given = DecoderInputs(tokens, positions, mask, cache, places=places)
        inside = places.inside("encoder/")
        given, _ = self._with_source(given, source, source_positions, inside)
        return run_decoder(self, given).attended(self, places)

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
        given = DecoderInputs(tokens, positions, key=key)
        given, _ = self._with_source(given, source, source_positions, NOWHERE)
        return self.embed.output_layer(run_decoder(self, given).x)

    def _with_source(
        self,
        given: DecoderInputs,
        source: jax.Array | None,
        positions: jax.Array | None,
        places: Places,  # the encoder's
    ) -> tuple[DecoderInputs, Captured]:
        """Return the decoder's inputs with the memory of a source, and what its encoder captured.

        A key is split: one part is the encoder's.
        """
        refuse_rngs(self, given.key)
        if (source is None) == (given.cache is None):
            raise ValueError("give either source or cache: a cache already holds its source")
        if source is None and positions is not None:
            raise ValueError("source_positions without a source: a cache already holds them")
        encoder_key, key = split_key(given.key, 2)
        if source is None:
            for name in (*places.capture, *(name for name, _ in places.edit)):
                raise ValueError(f"encoder/{name} with a cache: it has already read its source")
            return given._replace(key=key), {}
        memory, positions, captured = self._memory(source, positions, encoder_key, places)
        given = given._replace(key=key, memory=memory, memory_positions=positions)
        return given, {f"encoder/{name}": value for name, value in captured.items()}


def run_encoder(
    model: Encoder | EncoderDecoder,
    source: jax.Array,  # i32[B, S], or what the config's inputs describe
    positions: jax.Array | None,
    mask: Mask | None,
    segments: jax.Array | None,
    types: jax.Array | None,
    key: jax.Array | None,
    places: Places,
) -> tuple[jax.Array, Captured]:  # [B, S, D]
    """Embed what an encoder reads and run its stack."""
    cfg = model.config
    if cfg.inputs is None:
        check_tokens(source, cfg.encoder_vocab_size)
        x, shape = source, source.shape
    else:
        check_inputs(cfg.inputs, source)
        x = model.inputs(source, positions)
        positions, shape = input_positions(cfg.inputs, positions), x.shape[:2]
    token_positions, masks = positions_and_masks(cfg, shape, positions, segments, mask)
    embed_key, stack_key = split_key(key, 2)
    given = BlockInputs(positions=positions, token_positions=token_positions, places=places)
    x = model.embed(x, token_positions, types, embed_key)
    x, _, captured = model.encoder(x, given, masks, key=stack_key)
    return x, captured


@short_repr
class DecoderInputs(NamedTuple):
    """Hold what a decoder reads, of both causal models."""

    tokens: jax.Array  # i32[B, T]
    positions: jax.Array | None = None  # i32[B, T]; negative is padding
    mask: Mask | None = None  # None is Causal()
    cache: ModelCache | None = None
    segments: jax.Array | None = None  # i32[B, T]
    key: jax.Array | None = None
    memory: jax.Array | None = None  # [B, S, D]
    memory_positions: jax.Array | None = None  # i32[B, S]
    places: Places = NOWHERE


@short_repr
class DecoderRun(NamedTuple):
    """Hold what a decoder's stack gives."""

    x: jax.Array  # [B, T, D]
    cache: ModelCache | None
    overflow: jax.Array | None  # bool[B]: rows for which the cache has no room
    captured: Captured

    def logits(
        self, model: Decoder | EncoderDecoder, at: jax.Array | None = None, places: Places = NOWHERE
    ) -> tuple[jax.Array, ModelCache | None, Captured]:
        """Return logits f32[B, T, V], NaN in rows that overflow; the cache; what is captured."""
        outside = places.outside()
        logits = model.embed.logits(self.x if at is None else gather_tokens(self.x, at))
        logits = outside("logits", logits)
        if self.overflow is not None:
            logits = jnp.where(self.overflow[:, None, None], jnp.nan, logits)
        return logits, self.cache, self.captured | outside.captured

    def attended(
        self, model: Decoder | EncoderDecoder, places: Places
    ) -> tuple[jax.Array, ModelCache | None, AttentionWeights]:
        """Return logits, the cache, and the weights of all blocks."""
        weights = attention_weights(model.config, self.captured, self.x, self.cache)
        return *self.logits(model, None, places)[:2], weights


def run_decoder(model: Decoder | EncoderDecoder, given: DecoderInputs) -> DecoderRun:
    """Embed tokens and run the decoder's stack."""
    cfg, tokens, positions, cache = model.config, given.tokens, given.positions, given.cache
    refuse_rngs(model, given.key)
    check_tokens(tokens, cfg.vocab_size)
    overflow, crossed = None, isinstance(model, EncoderDecoder)
    if cache is not None:
        if given.segments is not None:
            raise ValueError("segments with a cache: give each document a row of its own")
        positions, overflow = check_cache_room(cfg, cache, tokens, positions, crossed)
        tokens = _refuse_unread(given.mask, cache, tokens, positions)
    mask = Causal() if given.mask is None else given.mask
    token_positions, masks = positions_and_masks(
        cfg, tokens.shape, positions, given.segments, mask, causal=True
    )
    embed_key, stack_key = split_key(given.key, 2)
    x = model.embed(tokens, token_positions, key=embed_key, target=crossed)
    inputs = BlockInputs(
        positions=positions,
        token_positions=token_positions,
        memory=given.memory,
        memory_positions=given.memory_positions,
        places=given.places,
    )
    x, cache, captured = model.decoder(x, inputs, masks, cache=cache, key=stack_key)
    if overflow is not None and cache is not None and cache.exhausted is not None:
        overflow |= cache.exhausted
    return DecoderRun(x, cache, overflow, captured)


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


def _default_positions(shape: tuple[int, ...], positions: jax.Array | None) -> jax.Array:
    if positions is not None:
        return as_int32("positions", positions)
    return jnp.broadcast_to(jnp.arange(shape[1]), shape)


def positions_and_masks(
    config: ModelConfig,
    shape: tuple[int, ...],  # B, T
    positions: jax.Array | None,
    segments: jax.Array | None,
    mask: Mask | None,
    causal: bool = False,
) -> tuple[jax.Array, tuple[Mask | None, ...]]:
    """Return the positions for embeddings and rotation, and a mask for each window of the config.

    The masks, one for each item of the window pattern, are `mask` with that window, the sink tokens
    and the segments. The positions are i32[B, T] or [T]; with segments each counts from 0.
    """
    positions = check_positions(shape, positions)
    if isinstance(config.positions, Learned) and positions is None and segments is None:
        if known_sizes(shape[1]) and shape[1] > config.max_len:
            raise ValueError(f"{shape[1]} tokens are more than max_len {config.max_len}")
    token_positions = jnp.arange(shape[1]) if positions is None else positions
    sinks: Mask | None = None
    if config.sink_tokens:
        sinks = Prefix(np.full(1, config.sink_tokens, np.int32))  # type: ignore[arg-type]
    if segments is not None:
        if positions is not None:
            rule = "leave positions out, or give each document a row of its own"
            raise ValueError(f"positions with segments: a document's positions start at 0; {rule}")
        if segments.shape != shape:
            raise ValueError(f"segments {segments.shape} and tokens {shape} differ in shape")
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
