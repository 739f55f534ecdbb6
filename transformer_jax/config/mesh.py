"""Configure how a run is split over devices."""

from __future__ import annotations

import math
from dataclasses import fields

from transformer_jax.config.fields import Size, check_types
from transformer_jax.config.keywords import config_class


@config_class
class MeshConfig:
    """Lay out devices in a grid, `data=2,fsdp=4,tensor=2`, over which a run is split.

    All of them are used: the product of the sizes is how many there are, in all processes together.
    """

    data: Size = 1
    """Devices that take different rows of a batch and hold the same parameters."""
    fsdp: Size = 1
    """Devices that take different rows of a batch, and each a part of every parameter and of the
    optimizer's state: the parts of a matrix are gathered where it is used (Rajbhandari et al.
    2020)."""
    tensor: Size = 1
    """Devices that share the heads and the widths of each layer: they take the same rows (Shoeybi
    et al. 2019)."""
    expert: Size = 1
    """Devices that take different rows of a batch, and each a part of the experts: the rows of all
    of them meet at each expert's device (Lepikhin et al. 2020). The experts' matrices are whole
    where they are used, so those of "tensor" compute the same experts."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def shape(self) -> dict[str, int]:
        """Return the size of each axis by its name, in the order of the grid."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def devices(self) -> int:
        """Return how many devices the grid has."""
        return math.prod(self.shape.values())

    @property
    def row_shards(self) -> int:
        """Return over how many devices the rows of a batch are split."""
        return self.data * self.fsdp * self.expert

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in self.shape.items() if size > 1]
        return ",".join(sizes) or "data=1"
