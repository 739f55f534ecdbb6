"""Configure low-rank adapters."""

from __future__ import annotations

from typing import Literal

from transformer_jax.config.fields import Fraction, Positive, Size, check_types, fail
from transformer_jax.config.keywords import config_class

Base = Literal["float32", "bfloat16", "int8", "int4"]


@config_class
class LoraConfig:
    """Low-rank adapters W + scale A B of a model's kernels (Hu et al. 2021)."""

    rank: Size = 8
    """Columns of A and rows of B (r)."""
    alpha: Positive = 16.0
    """Numerator of the scale."""
    targets: tuple[str, ...] | Literal["all-linear"] = ("query", "value")
    """Modules with a kernel, by the end of their path: query, attention/query, encoder/block_0/
    attention/query; "all-linear" is every kernel of every block. Paths are those of a looped stack,
    whatever the parameters are."""
    layers: tuple[int, ...] | None = None
    """Only in these blocks of each stack; None is everywhere."""
    dropout: Fraction = 0.0
    """Rate of dropout on what A reads, in training."""
    rslora: bool = False
    """Scale alpha / sqrt(rank) in place of alpha / rank (Kalajdzievski 2023)."""

    base: Base = "float32"
    """What the other parameters, which stay as they are, are held in while adapters are trained.
    int8 and int4 are for the kernels of blocks, everything else is then bfloat16."""
    trained: tuple[str, ...] = ()
    """Parameters that are trained whole beside the adapters, by the beginnings of their names:
    embed,decoder/norm."""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.targets or "" in tuple(self.targets):
            fail("targets", self.targets, "must name at least one module, and none by ''")
        if self.layers is not None:
            if not self.layers or min(self.layers) < 0 or len({*self.layers}) < len(self.layers):
                fail("layers", self.layers, "must be different indices from 0, at least one")

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
