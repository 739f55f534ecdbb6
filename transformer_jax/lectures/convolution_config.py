"""Configure one convolutional language model."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_jax.config.fields import Fraction, Positive, Size, check_types
from transformer_jax.config.keywords import known_fields
from transformer_jax.shown import short_repr


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig:
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
