"""Encoder-decoder model, built from the stacks in `transformer`."""

from __future__ import annotations

from collections.abc import Sequence
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
from transformer_jax.models.places import Captured, Places
from transformer_jax.models.stack import Stack
from transformer_jax.models.transformer import DecoderResult, run_decoder, run_encoder


class EncoderDecoder(CheckedModule):
    """Sequence-to-sequence model (Vaswani et al. 2017).

    Both stacks share the embedding unless the config has a `source_vocab_size` or `inputs`. With
    `inputs`, `source` is f32[B, S, D_in] or f32[B, H, W, C], and its positions are those of the
    vectors, the frames, or the class token and the patches.

    Attributes:
        config: a config of kind "encoder-decoder".
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
        source: jax.Array,  # i32[B, S], or an array that matches the config's inputs
        *,
        positions: jax.Array | None = None,  # i32[B, S]
        mask: Mask | None = None,
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> jax.Array | tuple[jax.Array, Captured]:  # [B, S, D]
        """Return the encoder's output (the memory that the decoder attends to).

        Args:
            source: token IDs, or an array that matches the config's `inputs`.
            positions: negative means padding; None means arange(S).
            mask: source tokens that each source token sees; None means all.
            key: a single PRNG key, which turns dropout on.
            capture: names of the encoder's places ("encoder/...") whose values are returned.

        Returns:
            [B, S, D] in the compute dtype. With `capture`, a dict of the captured values is also
            returned.
        """
        places = Places.of(self, capture)
        for name in places.capture:
            if not name.startswith("encoder/"):
                raise ValueError(f"encode cannot capture {name}: it reads no target")
        x, captured = self._read(source, places, positions=positions, mask=mask, key=key)
        return (x, places.in_order(captured)) if capture else x

    def init_cache(
        self,
        source: jax.Array,  # i32[B, S], or an array that matches the config's inputs
        *,
        capacity: int,
        positions: jax.Array | None = None,  # i32[B, S]
        dtype: jax.typing.DTypeLike | None = None,
        slack: int = 0,
    ) -> ModelCache:
        """Return a cache with the keys and values of the source and an empty part for the target.

        The keys and values of the source are stored in the compute dtype.

        Args:
            source: token IDs, or an array that matches the config's `inputs`.
            capacity: number of positions in each target row, as in `transformer_jax.init_cache`.
            positions: source positions; negative means padding; None means arange(S).
            dtype: dtype of the target's keys and values; None means the compute dtype.
            slack: as in `transformer_jax.init_cache`.
        """
        cfg = self.config
        memory, _ = self._read(source, Places.of(self), positions=positions)
        # the source does not change, so its keys and values are computed only once
        cross = self.decoder.init_cross_cache(memory, self._memory_positions(memory, positions))
        depth, rows = cfg.decoder_layers, source.shape[0]
        return ModelCache(empty_layers(cfg, depth, rows, capacity, dtype, slack), cross)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        source: jax.Array | None = None,  # i32[B, S], or an array that matches the config's inputs
        source_positions: jax.Array | None = None,  # i32[B, S]
        positions: jax.Array | None = None,  # i32[B, T]
        mask: Mask | None = None,  # on the target; None means Causal()
        cache: ModelCache | None = None,
        at: jax.Array | None = None,  # i32[B, Q]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> DecoderResult:
        """Return the logits of the next target token, and the updated cache.

        Pass either the source, as in training, or a cache from `init_cache` that contains the
        source.

            logits, _ = model.apply({"params": params}, target, source=source)
            cache = model.apply({"params": params}, source, capacity=64, method="init_cache")
            logits, cache = model.apply({"params": params}, target, cache=cache)

        Args:
            tokens: the token IDs of the target.
            source: token IDs, or an array that matches the config's `inputs`; None with a cache.
            source_positions: negative means padding; None means arange(S).
            positions: target positions; negative means padding. None means arange(T), or the
                positions that follow the cache if one is passed.
            mask: mask on the target that replaces `Causal()`.
            cache: the cache with the source and earlier target tokens; None with a source.
            at: i32[B, Q], indices of the tokens whose logits are computed; None means all.
            key: a single PRNG key, which turns dropout on in both stacks.
            capture: names of the places whose values are returned. Encoder places require a source.

        Returns:
            The logits f32[B, T, V], or f32[B, Q, V] with `at`, and the cache. With `capture`, a
            dict of the captured values is also returned.

        Raises:
            ValueError: If both `source` and `cache` or neither are passed, if an argument does not
                match the tokens, the config or the cache, or if a known position is past the end of
                the cache.
        """
        places = Places.of(self, capture)
        if (source is None) == (cache is None):
            raise ValueError("pass either source or cache: a cache already contains its source")
        source_key, key = split_key(key, 2)
        arguments: dict[str, Any] = dict(
            positions=positions, mask=mask, cache=cache, at=at, key=key
        )
        of_source: Captured = {}
        if source is not None:
            memory, of_source = self._read(
                source, places, positions=source_positions, key=source_key
            )
            arguments |= dict(
                memory=memory, memory_positions=self._memory_positions(memory, source_positions)
            )
        elif source_positions is not None:
            raise ValueError("source_positions needs a source: a cache already contains them")
        else:  # the cache already includes the effects of the model's own encoder edits
            for name in Places.of(self.config, capture).inside("encoder/").capture:
                raise ValueError(
                    f"encoder/{name} is not available with a cache: its source was read earlier"
                )
        logits, cache, captured = run_decoder(self, tokens, places, **arguments)
        captured = of_source | captured
        return (logits, cache, places.in_order(captured)) if capture else (logits, cache)

    def output_layer(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        source: jax.Array,  # i32[B, S], or an array that matches the config's inputs
        source_positions: jax.Array | None = None,  # i32[B, S]
        positions: jax.Array | None = None,  # i32[B, T]
        key: jax.Array | None = None,
    ) -> OutputLayer:
        """Return the hidden states and the output matrix, so a loss can compute logits in chunks.

        The logits are softcap(x table^T + bias). An edit of "logits" has no effect.

        Args:
            tokens: the token IDs of the target.
            source: token IDs, or an array that matches the config's `inputs`.
            source_positions: negative means padding; None means arange(S).
            positions: target positions; negative means padding; None means arange(T).
            key: a single PRNG key, which turns dropout on in both stacks.
        """
        source_key, key = split_key(key, 2)
        places = Places.of(self)
        memory, _ = self._read(source, places, positions=source_positions, key=source_key)
        x = run_decoder(
            self, tokens, places, positions=positions, key=key, read_out=False, memory=memory,
            memory_positions=self._memory_positions(memory, source_positions),
        )[0]  # fmt: skip
        return self.embed.output_layer(x)

    def _read(
        self, source: jax.Array, places: Places, **arguments: Any
    ) -> tuple[jax.Array, Captured]:  # [B, S, D]
        """Return the encoder's output for a source, and its captured values, keyed by full name."""
        memory, visit = run_encoder(self, source, places.inside("encoder/"), **arguments)
        return memory, {f"encoder/{name}": value for name, value in visit.captured.items()}

    def _memory_positions(
        self, memory: jax.Array, positions: jax.Array | None
    ) -> jax.Array:  # i32[B, S]
        """Return the positions of the encoder's output; negative means padding."""
        positions = input_positions(self.config.inputs, positions)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(memory.shape[1]), memory.shape[:2])
        return as_int32("positions", positions)
