"""Gated convolutional language model (Dauphin et al. 2017).

As in all models, `model.apply({"params": params}, tokens, state=state, valid=valid) -> (logits f32,
state)` is used for training, prefill, and decoding.

    a_t, b_t = W_0 x_(t-k+1) + ... + W_(k-1) x_t + c     k tokens at once, W: [k, D, 2 D]
    x'_t     = x_t + a_t sigmoid(b_t)                    repeated for each of L layers
    logits   = U x + d

The convolutions are causal, and a prediction sees the last L (k - 1) + 1 tokens. A learned vector,
`begin`, fills the positions before the first token. The state contains only the last tokens, so
each decoding step recomputes their layers.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from transformer_jax.config.architectures import AnyModelConfig, PlaceShapes
from transformer_jax.config.fields import Fraction, Positive, Size
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
    """Config for a gated convolutional language model (Dauphin et al. 2017)."""

    vocab_size: Size = 256
    """Size of the vocabulary."""
    kernel_size: Size = 4
    """Number of tokens that a layer reads at once: the current token and the tokens before it."""
    d_hidden: Size = 128
    """Width of the token embeddings and of each layer."""
    num_layers: Size = 4
    """Number of stacked convolutions. Each one sees kernel_size - 1 more tokens than the previous
    one."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output matrix."""
    dropout: Fraction = 0.0
    """Dropout rate on embeddings, between layers, and before the output matrix."""
    init_std: Positive = 0.1
    """Initial standard deviation of the embeddings and the output matrix."""

    @property
    def context(self) -> int:
        """Return the number of tokens that a prediction sees, L (k - 1) + 1."""
        return self.num_layers * (self.kernel_size - 1) + 1

    @property
    def d_embed(self) -> int:
        """Return the width of the token embeddings."""
        return self.d_hidden

    @property
    def read_out_dim(self) -> int:
        """Return the input width of the output matrix."""
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
    """Gated convolutional language model (Dauphin et al. 2017).

    Attributes:
        config: config of the model.
    """

    config: ConvolutionConfig

    def setup(self) -> None:
        cfg = self.config
        self.embed = Vocabulary(cfg)
        normal = nn.initializers.normal(cfg.init_std)
        self.begin = parameter(self, "begin", normal, (cfg.d_embed,))
        self.convolution = [
            # no padding, because a line starts with all the tokens that its first prediction sees
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
        if whole:  # the windows overlap, so each layer runs once along the sequence
            lines = jnp.concatenate([windows[:, 0, :-1], windows[:, :, -1]], axis=1)
        else:
            lines = rearrange(windows, "B Q C -> (B Q) C")
        keys = split_key(key, cfg.num_layers + 1)
        begins = (lines < 0)[..., None]
        # -1 is no row of the table, so look up any row, which is replaced in the next line
        vectors = lookup(self.embed.tokens, jnp.where(lines < 0, 0, lines))
        x = jnp.where(begins, self.begin[None, None], vectors)
        for i, layer in enumerate(self.convolution):
            x = dropout(x, cfg.dropout, keys[i])
            value, gate = jnp.split(layer(x), 2, axis=-1)
            # without padding, the output has no vectors for the first k - 1 positions
            x = x[:, cfg.kernel_size - 1 :] + value * jax.nn.sigmoid(gate)
        x = x if whole else rearrange(x, "(B Q) 1 D -> B Q D", Q=count)
        x = visit("read_out", dropout(x, cfg.dropout, keys[-1]))
        return self.embed.logits(x)
