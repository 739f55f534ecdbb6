"""Config of low-rank adapters."""

from __future__ import annotations

from typing import Literal

from transformer_jax.config.fields import Fraction, Positive, Size, check_types, fail
from transformer_jax.config.keywords import config_class

Base = Literal["float32", "bfloat16", "int8", "int4"]


@config_class
class LoraConfig:
    """Low-rank adapters for the kernels of a model: W + scale A B (Hu et al. 2021)."""

    rank: Size = 8
    """Rank of the adapters (r), which is the number of columns in A and the number of rows in B."""
    alpha: Positive = 16.0
    """Numerator alpha in the scale of the adapters, alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = ("query", "value")
    """Modules whose kernels get adapters, selected by the ends of their paths, such as query,
    attention/query or encoder/block_0/attention/query. "all-linear" selects every kernel in every
    block. Use the paths of a looped stack, even if the layers are scanned."""
    layers: tuple[int, ...] | None = None
    """Indices of the blocks that get adapters in each stack. None adapts all blocks."""
    dropout: Fraction = 0.0
    """Dropout rate for the inputs of the adapters during training."""
    rslora: bool = False
    """Scale adapters by alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023)."""

    base: Base = "float32"
    """Storage format of the frozen parameters during training. int8 and int4 apply to the kernels
    of blocks. All other frozen parameters are then stored as bfloat16."""
    trained: tuple[str, ...] = ()
    """Name prefixes of parameters to train in full, in addition to the adapters, such as
    embed,decoder/norm."""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.targets or "" in tuple(self.targets):
            fail("targets", self.targets, "must contain at least one name, and no empty name")
        if self.layers is not None:
            if not self.layers or min(self.layers) < 0 or len({*self.layers}) < len(self.layers):
                fail(
                    "layers",
                    self.layers,
                    "must contain at least one index, each at least 0 and used once",
                )

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
