"""Configure one n-gram language model."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_jax.config.fields import Size, check_types, fail
from transformer_jax.config.keywords import known_fields
from transformer_jax.shown import short_repr


@short_repr
@known_fields
@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """Describe an n-gram model with interpolated Kneser-Ney smoothing (Chen & Goodman 1999)."""

    vocab_size: Size = 256
    """Token kinds."""
    order: Size = 5
    """n: a prediction sees n - 1 tokens."""
    nodes: tuple[int, ...] | None = None
    """Distinct 1-grams, 2-grams, ... n-grams that are stored: the sizes of the parameters, which
    `count_ngrams` fills in. None before counting."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.nodes is None:
            return
        if len(self.nodes) != self.order:
            fail("nodes", self.nodes, f"must have one entry for each order up to {self.order}")
        if min(self.nodes) < 1 or max(self.nodes) >= 2**31 - 1:
            fail("nodes", self.nodes, "must be positive and below 2**31 - 1")

    @property
    def context(self) -> int:
        """Return how many tokens a prediction sees."""
        return self.order - 1
