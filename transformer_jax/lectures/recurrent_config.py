"""Configure one recurrent model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformer_jax.config.fields import Fraction, Positive, Size, check_types, fail, unread
from transformer_jax.config.keywords import known_fields
from transformer_jax.shown import short_repr

Cell = Literal["rnn", "lstm", "gru"]
StateAttention = Literal["dot", "general", "additive"]
ContextUse = Literal["output", "input", "state"]


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Describe a recurrent language model, tagger or encoder-decoder.

    With `source_vocab_size` it is an encoder-decoder (`RecurrentSeq2Seq`), without it and with
    `bidirectional` a tagger that reads a text from both ends (`RecurrentTagger`), else a language
    model (`RecurrentLM`).
    """

    vocab_size: Size = 256
    """Token kinds; of an encoder-decoder, the target's."""
    source_vocab_size: Size | None = None
    """Token kinds of the source; None has no encoder."""
    d_embed: Size = 128
    """Width of a token's vector."""
    d_hidden: Size = 128
    """Width of a cell's state; of each direction of the encoder, too."""
    num_layers: Size = 1
    """Cells on top of each other; in the encoder as many."""
    cell: Cell = "lstm"
    """rnn (Elman 1990), lstm (Hochreiter & Schmidhuber 1997, Gers et al. 2000), or gru (Cho et al.
    2014)."""
    forget_bias: float = 0.0
    """lstm: where the biases of the forget gates begin; with 1 a cell keeps most of itself from one
    token to the next (Gers et al. 2000, Jozefowicz et al. 2015)."""
    bidirectional: bool = False
    """The encoder, or without a source the whole model, reads from both ends (Schuster & Paliwal
    1997)."""
    attention: StateAttention | None = None
    """How the decoder scores the encoder's states: dot or general (Luong et al. 2015), or additive
    (Bahdanau et al. 2015); None has only the encoder's last state."""
    context: ContextUse | None = None
    """Where the context of the attention enters. output: the state after the token asks, and the
    logits are read from tanh(W [context; state]). input: the state before the token asks, the
    context enters the first cell beside the token, and the logits are read as with output. state:
    as output, and tanh(W [context; state]) is the state that the next token starts from. None is
    the paper's: input with additive, output with dot and general."""
    d_attention: Size | None = None
    """additive: width of the hidden layer; None is d_hidden."""
    num_classes: Size | None = None
    """Classes of the classification head of a model that reads from both ends; None has no head."""
    tie_embeddings: bool = False
    """The output matrix is the embedding matrix."""
    dropout: Fraction = 0.0
    """Rate on embeddings, between layers and before the output matrix (Zaremba et al. 2014)."""
    init_std: Positive = 0.1
    """Standard deviation of embeddings and of the output matrix."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.cell != "lstm":
            unread(self, "needs cell 'lstm'", "forget_bias")
        if self.source_vocab_size is None:
            unread(self, "needs a source_vocab_size", "attention")
        if not self.is_tagger:
            unread(self, "needs bidirectional, and no source_vocab_size", "num_classes")
        if self.attention is None:
            unread(self, "needs an attention", "context")
        if self.attention != "additive":
            unread(self, "needs attention 'additive'", "d_attention")
        if self.attention == "dot" and self.bidirectional:
            rule = "two directions are twice as wide as the decoder's state: take 'general'"
            fail("attention", self.attention, rule)
        if self.tie_embeddings and self.read_out_dim != self.d_embed:
            rule = f"needs d_embed {self.d_embed} to equal d_hidden {self.d_hidden}"
            fail("tie_embeddings", self.tie_embeddings, rule)

    @property
    def attention_dim(self) -> int:
        return self.d_hidden if self.d_attention is None else self.d_attention

    @property
    def context_use(self) -> ContextUse | None:
        """Return where the context enters; None without attention."""
        if self.attention is None or self.context is not None:
            return self.context
        return "input" if self.attention == "additive" else "output"

    @property
    def is_tagger(self) -> bool:
        """Return whether the model reads a text from both ends, and so writes none."""
        return self.bidirectional and self.source_vocab_size is None

    @property
    def read_out_dim(self) -> int:
        """Return the width of the vectors that logits are read from."""
        return self.d_embed if self.is_tagger and self.tie_embeddings else self.d_hidden

    @property
    def memory_dim(self) -> int:
        """Width of the encoder's states."""
        return 2 * self.d_hidden if self.bidirectional else self.d_hidden
