"""Feed-forward language model that reads the last C tokens (Bengio et al. 2003).

As in all models, `model.apply({"params": params}, tokens, state=state, valid=valid) -> (logits f32,
state)` is used for training, prefill, and decoding.

    x = [E w_(t-C+1); ...; E w_t]          the concatenated vectors of the last C tokens
    h = tanh(W x + b)                      repeated `num_layers` times
    logits = U h + D x + d                 D only with `direct`

A learned vector, `begin`, fills the positions before the first token. Training gathers all windows
and computes them at once.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from transformer_jax.config.architectures import AnyModelConfig, PlaceShapes
from transformer_jax.config.fields import Fraction, Positive, Size, check_types, fail
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
class WindowConfig(AnyModelConfig):
    """Config for a feed-forward language model that reads the last tokens (Bengio et al. 2003)."""

    vocab_size: Size = 256
    """Size of the vocabulary."""
    context: Size = 4
    """Number of tokens that a prediction sees, which is n - 1 for an n-gram."""
    d_embed: Size = 128
    """Width of the token embeddings."""
    d_hidden: Size = 128
    """Width of each hidden layer."""
    num_layers: Size = 1
    """Number of hidden layers."""
    direct: bool = False
    """Add a direct linear connection from the embeddings to the logits."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output matrix."""
    dropout: Fraction = 0.0
    """Dropout rate on embeddings, between layers, and before the output matrix."""
    init_std: Positive = 0.1
    """Initial standard deviation of the embeddings and the output matrix."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.tie_embeddings and self.d_embed != self.d_hidden:
            rule = f"needs d_embed {self.d_embed} to equal d_hidden {self.d_hidden}"
            fail("tie_embeddings", self.tie_embeddings, rule)

    @property
    def read_out_dim(self) -> int:
        """Return the input width of the output matrix."""
        return self.d_hidden

    def build(self) -> WindowLM:
        return WindowLM(self)

    def init_state(self, batch: int) -> RecentTokens:
        return init_recent_tokens(self, batch)

    def word_vectors(self, params: Any) -> Any:
        return params["embed"]["tokens"]

    def places(self) -> PlaceShapes:
        shapes: PlaceShapes = {"embedding": ("B", "T", self.context * self.d_embed)}
        for i in range(self.num_layers):
            shapes[f"layer_{i}/hidden"] = ("B", "T", self.d_hidden)
        return shapes | {"logits": ("B", "T", self.vocab_size)}


class WindowLM(RecentTokensLM):
    """Feed-forward language model that reads a window of tokens (Bengio et al. 2003).

    Attributes:
        config: config of the model.
    """

    config: WindowConfig

    def setup(self) -> None:
        cfg = self.config
        self.embed = Vocabulary(cfg)
        normal = nn.initializers.normal(cfg.init_std)
        self.begin = parameter(self, "begin", normal, (cfg.d_embed,))
        self.hidden = [nn.Dense(cfg.d_hidden) for _ in range(cfg.num_layers)]
        if cfg.direct:
            shape = (cfg.context * cfg.d_embed, cfg.vocab_size)
            self.direct = parameter(self, "direct", nn.initializers.lecun_normal(), shape)
        refuse_surplus(self)

    def _predict(
        self,
        windows: jax.Array,  # i32[B, Q, C]
        key: jax.Array | None,
        visit: Visit,
        whole: bool,
    ) -> jax.Array:  # f32[B, Q, V]
        cfg = self.config
        keys = split_key(key, cfg.num_layers + 1)
        begins = (windows < 0)[..., None]
        # -1 is no row of the table, so look up any row, which is replaced in the next line
        vectors = lookup(self.embed.tokens, jnp.where(windows < 0, 0, windows))
        vectors = jnp.where(begins, self.begin[None, None, None], vectors)
        x = dropout(rearrange(vectors, "B Q C E -> B Q (C E)"), cfg.dropout, keys[0])
        h = x = visit("embedding", x)
        for i, layer in enumerate(self.hidden):
            h = visit(f"layer_{i}/hidden", jnp.tanh(layer(h)))
            h = dropout(h, cfg.dropout, keys[i + 1])
        logits = self.embed.logits(h)
        if cfg.direct:
            logits = logits + jnp.einsum("BQX,XV->BQV", x, self.direct)
        return logits
