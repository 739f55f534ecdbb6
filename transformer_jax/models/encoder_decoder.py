"""Make an EncoderDecoder of the stacks that `transformer` has: a source in, a target out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from transformer_jax.attention.masks import Mask
from transformer_jax.cache.model_cache import ModelCache, empty_layers
from transformer_jax.checks import as_int32
from transformer_jax.config import ModelConfig
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.models.block import BlockInputs
from transformer_jax.models.functional import split_key
from transformer_jax.models.inputs import InputLayer, input_positions
from transformer_jax.models.layers import (
    Embed,
    OutputLayer,
    refuse_rngs,
    refuse_surplus,
)
from transformer_jax.models.places import NO_EDIT, NOWHERE, Captured, Edit, Places
from transformer_jax.models.stack import (
    CROSS_WEIGHTS,
    WEIGHTS,
    AttentionWeights,
    Stack,
    attention_weights,
)
from transformer_jax.models.transformer import (
    DecoderResult,
    decoder_logits,
    run_decoder,
    run_encoder,
)


class EncoderDecoder(CheckedModule):
    """Source in, target out (Vaswani et al. 2017).

    Both stacks share the embedding, unless the config has a `source_vocab_size`, or `inputs`: then
    a `source` is f32[B, S, D_in] or f32[B, H, W, C], and its positions are those of the vectors, of
    the frames, or of the patches and the class token.

    Attributes:
        config: of kind "encoder-decoder".
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
        positions: jax.Array | None = None,  # i32[B, S]
        mask: Mask | None = None,
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]
        key: jax.Array | None = None,
    ) -> jax.Array:  # [B, S, D]
        """Return the encoder's output of a source, which the decoder attends to: its memory.

        Args:
            source: i32[B, S], or what the config's inputs describe.
            positions: i32[B, S], negative is padding; None is arange(S).
            mask: which tokens of the source each sees; None is all.
            head_mask: f32[L, N] or [N], multiplies what each head gives, before the output matrix.
            key: a single key, which turns dropout on.

        Returns:
            [B, S, D], in the compute dtype.
        """
        masks = [("head_mask", head_mask, "encoder/attention")]
        places = Places.of(self, head_masks=masks).inside("encoder/")
        given = BlockInputs(positions=positions, mask=mask, places=places)
        return run_encoder(self, source, given, key=key)[0]

    def attend_source(
        self,
        source: jax.Array,  # i32[B, S], or what the config's inputs describe
        *,
        positions: jax.Array | None = None,  # i32[B, S]
        mask: Mask | None = None,
    ) -> tuple[jax.Array, AttentionWeights]:
        """Return what `encode` does, and what every layer weighed the source with.

        Args:
            source: i32[B, S], or what the config's inputs describe.
            positions: i32[B, S], negative is padding; None is arange(S).
            mask: which tokens of the source each sees; None is all.
        """
        names = [f"encoder/{name}" for name in WEIGHTS]
        places = Places.of(self, names).inside("encoder/")
        given = BlockInputs(positions=positions, mask=mask, places=places)
        x, captured, _ = run_encoder(self, source, given)
        return x, attention_weights(self.config, captured, x, None)

    def init_cache(
        self,
        source: jax.Array,  # i32[B, S], or what the config's inputs describe
        *,
        capacity: int,
        positions: jax.Array | None = None,  # i32[B, S]
        dtype: jax.typing.DTypeLike | None = None,
        slack: int = 0,
    ) -> ModelCache:
        """Read the source once: its cross-attention keys and values, and an empty target cache.

        The source is held in the compute dtype.

        Args:
            source: i32[B, S], or what the config's inputs describe.
            capacity: positions of a row of the target, as in `transformer_jax.init_cache`.
            positions: i32[B, S], of the source, negative is padding; None is arange(S).
            dtype: of the target's keys and values; None is the compute dtype.
            slack: as in `transformer_jax.init_cache`.
        """
        cfg, places = self.config, Places.of(self).inside("encoder/")
        given = self._read(source, positions, places)[0]
        assert given.memory is not None and given.memory_positions is not None
        cross = self.decoder.init_cross_cache(given.memory, given.memory_positions)
        depth, rows = cfg.decoder_layers, source.shape[0]
        return ModelCache(empty_layers(cfg, depth, rows, capacity, dtype, slack), cross)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        source: jax.Array | None = None,  # i32[B, S], or what the config's inputs describe
        source_positions: jax.Array | None = None,  # i32[B, S]
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,  # on the target; None is Causal()
        cache: ModelCache | None = None,
        at: jax.Array | None = None,  # i32[B, Q]
        head_mask: jax.Array | None = None,  # f32[L, N] or [N]: over the target
        cross_head_mask: jax.Array | None = None,  # f32[L, N] or [N]: over the source
        encoder_head_mask: jax.Array | None = None,  # f32[L, N] or [N]; needs a source
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> DecoderResult:
        """Return logits of the next target token, and the updated cache.

        The source is given, as in training, or a cache of `init_cache`, which has read it.

            logits, _ = model.apply({"params": params}, target, source=source)
            cache = model.apply({"params": params}, source, capacity=64, method="init_cache")
            logits, cache = model.apply({"params": params}, target, cache=cache)

        Args:
            tokens: i32[B, T], the target.
            source: i32[B, S], or what the config's inputs describe; None with a cache.
            source_positions: i32[B, S], negative is padding; None is arange(S).
            positions: i32[B, T], of the target, negative is padding; None is arange(T), or what
                comes after the cache's.
            mask: on the target, takes the place of `Causal()`.
            cache: of the source and of the target's tokens before; None with a source.
            at: i32[B, Q], indices of the tokens whose logits are asked for; None is every token.
            head_mask: f32[L, N] or [N], multiplies what each head gives over the target, before the
                output matrix.
            cross_head_mask: f32[L, N] or [N], the same of the heads over the source.
            encoder_head_mask: f32[L, N] or [N], the same of the encoder's; needs a source.
            key: a single key, which turns dropout on, in both stacks.
            capture: names of places (`transformer_jax.places`), whose values are returned; those of
                the encoder need a source.
            edit: functions by the names of places, which change the values there.

        Returns:
            Logits f32[B, T, V], of `at` [B, Q, V], and the cache; with `capture` also the values by
            name.

        Raises:
            ValueError: if not one of source and cache is given, an argument does not fit the
                tokens, the config or the cache, or a known position is past the cache's end.
        """
        if encoder_head_mask is not None and source is None:
            raise ValueError("encoder_head_mask without a source: a cache has already read its own")
        masks = [
            ("head_mask", head_mask, "attention"),
            ("cross_head_mask", cross_head_mask, "cross_attention"),
            ("encoder_head_mask", encoder_head_mask, "encoder/attention"),
        ]
        places = Places.of(self, capture, edit, masks)
        inside = places.inside("encoder/")
        if cache is not None:  # the model's own edits of the encoder made what the cache holds
            asked = Places.of(self.config, capture, edit).inside("encoder/")
            for name in (*asked.capture, *dict(asked.edit)):
                raise ValueError(f"encoder/{name} with a cache: it has already read its source")
        given, own, key = self._given(source, source_positions, cache, inside, key)
        given = replace(given, positions=positions, mask=mask, places=places)
        logits, cache, captured, _ = decoder_logits(
            self, tokens, given, cache=cache, key=key, at=at
        )
        captured = own | captured
        return (logits, cache, places.in_order(captured)) if capture else (logits, cache)

    def attend(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        source: jax.Array | None = None,  # i32[B, S], or what the config's inputs describe
        source_positions: jax.Array | None = None,  # i32[B, S]
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,  # on the target; None is Causal()
        cache: ModelCache | None = None,
    ) -> tuple[jax.Array, ModelCache | None, AttentionWeights]:
        """Return what `__call__` does, and what the decoder weighed target and source with.

        Args:
            tokens: i32[B, T], the target.
            source: i32[B, S], or what the config's inputs describe; None with a cache.
            source_positions: i32[B, S], negative is padding; None is arange(S).
            positions: i32[B, T], of the target, negative is padding; None is arange(T), or what
                comes after the cache's.
            mask: on the target, takes the place of `Causal()`.
            cache: of the source and of the target's tokens before; None with a source.
        """
        places = Places.of(self, CROSS_WEIGHTS)
        inside = places.inside("encoder/")
        given, _, _ = self._given(source, source_positions, cache, inside)
        given = replace(given, positions=positions, mask=mask, places=places)
        logits, cache, captured, x = decoder_logits(self, tokens, given, cache=cache)
        return logits, cache, attention_weights(self.config, captured, x, cache)

    def output_layer(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        source: jax.Array,  # i32[B, S], or what the config's inputs describe
        source_positions: jax.Array | None = None,  # i32[B, S]
        positions: jax.Array | None = None,  # i32[B, T]
        key: jax.Array | None = None,
    ) -> OutputLayer:
        """Return what the logits of `__call__` are computed of, for a loss that takes them apart.

        They are softcap(x table^T + bias): `chunked_cross_entropy` never holds all of them. An edit
        of "logits" has no effect.

        Args:
            tokens: i32[B, T], the target.
            source: i32[B, S], or what the config's inputs describe.
            source_positions: i32[B, S], negative is padding; None is arange(S).
            positions: i32[B, T], of the target, negative is padding; None is arange(T).
            key: a single key, which turns dropout on, in both stacks.
        """
        places = Places.of(self)
        inside = places.inside("encoder/")
        given, _, key = self._given(source, source_positions, None, inside, key=key)
        given = replace(given, positions=positions, places=places)
        return self.embed.output_layer(run_decoder(self, tokens, given, key=key)[0])

    def _given(
        self,
        source: jax.Array | None,
        positions: jax.Array | None,
        cache: ModelCache | None,
        places: Places = NOWHERE,  # the encoder's
        key: jax.Array | None = None,
    ) -> tuple[BlockInputs, Captured, jax.Array | None]:
        """Return the memory of a source, what its encoder captured, and the decoder's key."""
        refuse_rngs(self, key)
        if (source is None) == (cache is None):
            raise ValueError("give either source or cache: a cache already holds its source")
        source_key, key = split_key(key, 2)
        if source is not None:
            given, captured = self._read(source, positions, places, source_key)
            return given, {f"encoder/{name}": value for name, value in captured.items()}, key
        if positions is not None:
            raise ValueError("source_positions without a source: a cache already holds them")
        return BlockInputs(), {}, key

    def _read(
        self,
        source: jax.Array,
        positions: jax.Array | None,
        places: Places,
        key: jax.Array | None = None,
    ) -> tuple[BlockInputs, Captured]:
        """Return the memory of a source and where it stands, and what the encoder captured."""
        given = BlockInputs(positions=positions, places=places)
        memory, captured, _ = run_encoder(self, source, given, key=key)
        positions = input_positions(self.config.inputs, positions)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(memory.shape[1]), memory.shape[:2])
        positions = as_int32("positions", positions)
        return BlockInputs(memory=memory, memory_positions=positions), captured
