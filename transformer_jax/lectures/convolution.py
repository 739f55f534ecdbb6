"""Predict a token by gated convolutions over the tokens before it (Dauphin et al. 2017).

`model.apply({"params": params}, tokens, state=state, valid=valid) -> (logits f32, state)` is
training, prefill and decoding alike, as it is with the other models.

    a_t, b_t = W_0 x_(t-k+1) + ... + W_(k-1) x_t + c     k tokens at once, W: [k, D, 2 D]
    x'_t     = x_t + a_t sigmoid(b_t)                    once for each of L layers
    logits   = U x + d

No layer reads a later token, so a prediction sees the last L (k - 1) + 1. Before the beginning
stands one learned vector, `begin`. The state is the last tokens, from which a step computes anew.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from transformer_jax.config.architectures import AnyModelConfig, PlaceShapes
from transformer_jax.config.fields import Fraction, Positive, Size, check_types
from transformer_jax.config.keywords import config_class
from transformer_jax.lectures.recent_tokens import (
    RecentTokens,
    RecentTokensLM,
    init_recent_tokens,
)
from transformer_jax.lectures.vocabulary import Vocabulary
from transformer_jax.models.functional import dropout, split_key
from transformer_jax.models.layers import parameter, refuse_surplus
from transformer_jax.models.ops import lookup
from transformer_jax.models.places import Visit


@config_class
class ConvolutionConfig(AnyModelConfig):
    """Describe a language model of gated convolutions over earlier tokens (Dauphin et al. 2017)."""

    vocab_size: Size = 256
    """Token kinds."""
    kernel_size: Size = 4
    """Tokens that a layer reads at once: the newest, and those just before it."""
    d_hidden: Size = 128
    """Width of a token's vector, and of each layer."""
    num_layers: Size = 4
    """Convolutions on top of each other; each sees kernel_size - 1 tokens more."""
    tie_embeddings: bool = False
    """The output matrix is the embedding matrix."""
    dropout: Fraction = 0.0
    """Rate on embeddings, between layers and before the output matrix."""
    init_std: Positive = 0.1
    """Standard deviation of embeddings and of the output matrix."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def context(self) -> int:
        """Return the tokens that a prediction sees: L (k - 1) + 1."""
        return self.num_layers * (self.kernel_size - 1) + 1

    @property
    def d_embed(self) -> int:
        """Return the width of a token's vector."""
        return self.d_hidden

    @property
    def read_out_dim(self) -> int:
        """Return the width of the vectors that logits are read from."""
        return self.d_hidden

    def build(self) -> ConvolutionLM:
        return ConvolutionLM(self)

    def init_state(self, batch: int) -> RecentTokens:
        return init_recent_tokens(self, batch)

    def places(self) -> PlaceShapes:
        return {"read_out": ("B", "T", self.d_hidden), "logits": ("B", "T", self.vocab_size)}

    def word_vectors(self, params: Any) -> Any:
        return params["embed"]["tokens"]


class ConvolutionLM(RecentTokensLM):
    """Predict each token by convolutions over those before it (Dauphin et al. 2017).

    Attributes:
        config: of the model.
    """

    config: ConvolutionConfig

    def setup(self) -> None:
        cfg = self.config
        self.embed = Vocabulary(cfg)
        normal = nn.initializers.normal(cfg.init_std)
        self.begin = parameter(self, "begin", normal, (cfg.d_embed,))
        self.convolution = [
            # a line has all the tokens that its first prediction sees, so nothing is padded
            nn.Conv(2 * cfg.d_hidden, (cfg.kernel_size,), padding="VALID")
            for _ in range(cfg.num_layers)
        ]
        refuse_surplus(self)

    def _predict(
        self,
        windows: jax.Array,  # i32[B, Q, C]
        key: jax.Array | None,
        visit: Visit,
        whole: bool,
    ) -> jax.Array:  # f32[B, Q, V]
        cfg = self.config
        count = windows.shape[1]
        if whole:  # the windows overlap: each layer runs once along the text
            lines = jnp.concatenate([windows[:, 0, :-1], windows[:, :, -1]], axis=1)
        else:
            lines = rearrange(windows, "B Q C -> (B Q) C")
        keys = split_key(key, cfg.num_layers + 1)
        begins = (lines < 0)[..., None]
        vectors = lookup(self.embed.tokens, jnp.where(lines < 0, 0, lines))
        x = jnp.where(begins, self.begin[None, None], vectors)
        for i, layer in enumerate(self.convolution):
            x = dropout(x, cfg.dropout, keys[i])
            value, gate = jnp.split(layer(x), 2, axis=-1)
            x = x[:, cfg.kernel_size - 1 :] + value * jax.nn.sigmoid(gate)
        x = x if whole else rearrange(x, "(B Q) 1 D -> B Q D", Q=count)
        x = visit("read_out", dropout(x, cfg.dropout, keys[-1]))
        return self.embed.logits(x)
