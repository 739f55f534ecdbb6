"""Configure one recurrent model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformer_jax.config.fields import check_types, fail, fraction, positive, unread

Cell = Literal["lstm", "gru"]
StateAttention = Literal["dot", "general", "additive"]


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Describe a recurrent model: a language model, or with `source_vocab_size` a translator."""

    vocab_size: int = 256
    """Token kinds; of an encoder-decoder, the target's."""
    source_vocab_size: int | None = None
    """Token kinds of the source; None has no encoder."""
    d_embed: int = 128
    """Width of a token's vector."""
    d_hidden: int = 128
    """Width of a cell's state; of each direction of the encoder, too."""
    num_layers: int = 1
    """Cells on top of each other; in the encoder as many."""
    cell: Cell = "lstm"
    """lstm (Hochreiter & Schmidhuber 1997, Gers et al. 2000), or gru (Cho et al. 2014)."""
    bidirectional: bool = False
    """The encoder reads the source from both ends (Schuster & Paliwal 1997)."""
    attention: StateAttention | None = None
    """How the decoder looks at the encoder's states: dot or general (Luong et al. 2015) with the
    state after each token, additive (Bahdanau et al. 2015) with the one before it; None has only
    the encoder's last state."""
    d_attention: int | None = None
    """additive: width of the hidden layer; None is d_hidden."""
    tie_embeddings: bool = False
    """The output matrix is the embedding matrix."""
    dropout: float = 0.0
    """Rate on embeddings, between layers and before the output matrix (Zaremba et al. 2014)."""
    init_std: float = 0.1
    """Standard deviation of embeddings and of the output matrix."""

    def __post_init__(self) -> None:
        check_types(self)
        positive(self, "vocab_size", "source_vocab_size", "d_embed", "d_hidden", "num_layers")
        positive(self, "d_attention", "init_std")
        fraction(self, "dropout")
        if self.source_vocab_size is None:
            unread(self, "needs a source_vocab_size", "bidirectional", "attention")
        if self.attention != "additive":
            unread(self, "needs attention 'additive'", "d_attention")
        if self.attention == "dot" and self.bidirectional:
            rule = "two directions are twice as wide as the decoder's state: take 'general'"
            fail("attention", self.attention, rule)
        if self.tie_embeddings and self.d_embed != self.d_hidden:
            rule = f"needs d_embed {self.d_embed} to equal d_hidden {self.d_hidden}"
            fail("tie_embeddings", self.tie_embeddings, rule)

    @property
    def attention_dim(self) -> int:
        return self.d_hidden if self.d_attention is None else self.d_attention

    @property
    def memory_dim(self) -> int:
        """Width of the encoder's states."""
        return 2 * self.d_hidden if self.bidirectional else self.d_hidden
