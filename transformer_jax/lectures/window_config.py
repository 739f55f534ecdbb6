"""Configure one feed-forward language model over a fixed window of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_jax.config.fields import Fraction, Positive, Size, check_types, fail
from transformer_jax.config.keywords import known_fields
from transformer_jax.shown import short_repr


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """Describe a feed-forward language model over the last tokens (Bengio et al. 2003)."""

    vocab_size: Size = 256
    """Token kinds."""
    context: Size = 4
    """Tokens that a prediction sees: n - 1 of an n-gram."""
    d_embed: Size = 128
    """Width of a token's vector."""
    d_hidden: Size = 128
    """Width of each hidden layer."""
    num_layers: Size = 1
    """Hidden layers."""
    direct: bool = False
    """Logits also read the tokens' vectors themselves, by one matrix."""
    tie_embeddings: bool = False
    """The output matrix is the embedding matrix."""
    dropout: Fraction = 0.0
    """Rate on embeddings, between layers and before the output matrix."""
    init_std: Positive = 0.1
    """Standard deviation of embeddings and of the output matrix."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.tie_embeddings and self.d_embed != self.d_hidden:
            rule = f"needs d_embed {self.d_embed} to equal d_hidden {self.d_hidden}"
            fail("tie_embeddings", self.tie_embeddings, rule)

    @property
    def read_out_dim(self) -> int:
        """Return the width of the vectors that logits are read from."""
        return self.d_hidden
