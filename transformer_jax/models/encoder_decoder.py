"""Make an EncoderDecoder of the stacks that `transformer` has: a source in, a target out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.attention.masks import Mask
from transformer_jax.cache.model_cache import ModelCache, empty_layers
from transformer_jax.checks import as_int32
from transformer_jax.config import ModelConfig
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.models.functional import split_key
from transformer_jax.models.inputs import InputLayer, input_positions
from transformer_jax.models.layers import Embed, OutputLayer, refuse_surplus
from transformer_jax.models.places import NO_EDIT, Captured, Edit, Places
from transformer_jax.models.stack import Stack
from transformer_jax.models.transformer import DecoderResult, run_decoder, run_encoder


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
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> jax.Array | tuple[jax.Array, Captured]:  # [B, S, D]
        """Return the encoder's output of a source, which the decoder attends to: its memory.

        Args:
            source: i32[B, S], or what the config's inputs describe.
            positions: i32[B, S], negative is padding; None is arange(S).
            mask: which tokens of the source each sees; None is all.
            key: a single key, which turns dropout on.
            capture: names of the encoder's places, "encoder/...", whose values are returned.

        Returns:
            [B, S, D], in the compute dtype; with `capture` also the values by name.
        """
        places = Places.of(self, capture)
        for name in places.capture:
            if not name.startswith("encoder/"):
                raise ValueError(f"{name} of a source: encode reads no target")
        x, captured = self._read(source, places, positions=positions, mask=mask, key=key)
        return (x, places.in_order(captured)) if capture else x

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
        cfg = self.config
        memory, _ = self._read(source, Places.of(self), positions=positions)
        cross = self.decoder.init_cross_cache(memory, self._places_of(memory, positions))
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
        places = Places.of(self, capture, edit)
        if (source is None) == (cache is None):
            raise ValueError("give either source or cache: a cache already holds its source")
        source_key, key = split_key(key, 2)
        given: dict[str, Any] = dict(positions=positions, mask=mask, cache=cache, at=at, key=key)
        of_source: Captured = {}
        if source is not None:
            memory, of_source = self._read(
                source, places, positions=source_positions, key=source_key
            )
            given |= dict(memory=memory, memory_positions=self._places_of(memory, source_positions))
        elif source_positions is not None:
            raise ValueError("source_positions without a source: a cache already holds them")
        else:  # the model's own edits of its encoder are in the cache
            asked = Places.of(self.config, capture, edit).inside("encoder/")
            for name in (*asked.capture, *dict(asked.edit)):
                raise ValueError(f"encoder/{name} with a cache: it has already read its source")
        logits, cache, captured = run_decoder(self, tokens, places, **given)
        captured = of_source | captured
        return (logits, cache, places.in_order(captured)) if capture else (logits, cache)

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
        source_key, key = split_key(key, 2)
        places = Places.of(self)
        memory, _ = self._read(source, places, positions=source_positions, key=source_key)
        x = run_decoder(
            self, tokens, places, positions=positions, memory=memory,
            memory_positions=self._places_of(memory, source_positions), key=key, read_out=False,
        )[0]  # fmt: skip
        return self.embed.output_layer(x)

    def _read(
        self, source: jax.Array, places: Places, **given: Any
    ) -> tuple[jax.Array, Captured]:  # [B, S, D]
        """Return the memory of a source, and the captured values of its encoder by whole name."""
        memory, visit = run_encoder(self, source, places.inside("encoder/"), **given)
        return memory, {f"encoder/{name}": value for name, value in visit.captured.items()}

    def _places_of(self, memory: jax.Array, positions: jax.Array | None) -> jax.Array:  # i32[B, S]
        """Return the positions of a memory, negative where its source is padding."""
        positions = input_positions(self.config.inputs, positions)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(memory.shape[1]), memory.shape[:2])
        return as_int32("positions", positions)
