"""Embedding and output matrices of the models in the lectures."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.models.functional import dropout
from transformer_jax.models.layers import parameter, refuse_surplus
from transformer_jax.models.module import Module
from transformer_jax.models.ops import lookup


class Vocabulary(Module):
    """Embedding and output layer of a model."""

    config: Any  # a RecurrentConfig, ConvolutionConfig or WindowConfig

    def setup(self) -> None:
        cfg = self.config
        normal = nn.initializers.normal(cfg.init_std)
        self.tokens = parameter(self, "tokens", normal, (cfg.vocab_size, cfg.d_embed))
        if not cfg.tie_embeddings:
            self.output = parameter(self, "output", normal, (cfg.vocab_size, cfg.read_out_dim))
        self.bias = parameter(self, "bias", nn.initializers.zeros, (cfg.vocab_size,))
        refuse_surplus(self)

    def __call__(
        self, tokens: jax.Array, valid: jax.Array, key: jax.Array | None
    ) -> jax.Array:  # [B, T, E]
        return embed(self.tokens, tokens, valid, self.config.dropout, key)

    def logits(self, x: jax.Array) -> jax.Array:  # [B, T, H] -> f32[B, T, V]
        """Return x W^T + b."""
        table = self.tokens if self.config.tie_embeddings else self.output
        return jnp.einsum("BTH,VH->BTV", x, table) + self.bias[None, None]


def embed(
    table: jax.Array, tokens: jax.Array, valid: jax.Array, rate: float, key: jax.Array | None
) -> jax.Array:  # [B, T, E]
    """Look up tokens and apply dropout. Padding becomes zero to avoid 0 * NaN in gradients."""
    return dropout(jnp.where(valid[:, :, None], lookup(table, tokens), 0.0), rate, key)
