"""Config of low-rank adapters."""

from __future__ import annotations

from typing import Literal

from transformer_jax.config.fields import Fraction, Positive, Size, check_types, fail
from transformer_jax.config.keywords import config_class

Base = Literal["float32", "bfloat16", "int8", "int4"]


@config_class
class LoraConfig:
    """Low-rank adapters W + scale A B of a model's kernels (Hu et al. 2021)."""

    rank: Size = 8
    """Rank of the adapters (r): columns of A and rows of B."""
    alpha: Positive = 16.0
    """Numerator of the adapters' scale, alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = ("query", "value")
    """Modules whose kernels get adapters, by the ends of their paths: query, attention/query,
    encoder/block_0/attention/query. "all-linear" selects every kernel of every block. Paths are
    those of a looped stack, even if the layers are scanned."""
    layers: tuple[int, ...] | None = None
    """Indices of the blocks in each stack that get adapters. None adapts all blocks."""
    dropout: Fraction = 0.0
    """Dropout rate of the adapters' inputs during training."""
    rslora: bool = False
    """Scale adapters by alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023)."""

    base: Base = "float32"
    """Storage format of the frozen parameters during training. int8 and int4 apply to the kernels
    of blocks; all other frozen parameters are then bfloat16."""
    trained: tuple[str, ...] = ()
    """Name prefixes of parameters to train in full, next to the adapters: embed,decoder/norm."""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.targets or "" in tuple(self.targets):
            fail("targets", self.targets, "must contain at least one name, and no empty name")
        if self.layers is not None:
            if not self.layers or min(self.layers) < 0 or len({*self.layers}) < len(self.layers):
                fail("layers", self.layers, "must contain different indices from 0, at least one")

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
