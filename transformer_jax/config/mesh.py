"""Config of the device mesh of a training run."""

from __future__ import annotations

import math
from dataclasses import fields

from transformer_jax.config.fields import Size, check_types
from transformer_jax.config.keywords import config_class


@config_class
class MeshConfig:
    """Grid of devices that split a training run, such as `data=2,fsdp=4,tensor=2`.

    The product of the sizes must equal the total number of devices in all processes.
    """

    data: Size = 1
    """Number of devices that process different rows of a batch with the same parameters."""
    fsdp: Size = 1
    """Number of devices that process different rows of a batch and each store a part of every
    parameter and of the optimizer state. The parts of a matrix are gathered before the matrix is
    used (Rajbhandari et al. 2020)."""
    tensor: Size = 1
    """Number of devices that split the heads and widths of each layer and process the same rows
    (Shoeybi et al. 2019)."""
    expert: Size = 1
    """Number of devices that process different rows of a batch and each store some of the experts.
    Tokens are sent to the devices that store their experts (Lepikhin et al. 2020). The "tensor"
    axis does not split expert matrices, so all devices along it compute the same experts."""
    context: Size = 1
    """Number of devices that split the tokens of each row, and the parameters like "fsdp". Keys and
    values travel from device to device (Liu et al. 2023). It must divide the length of the rows."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def shape(self) -> dict[str, int]:
        """Return the sizes of the axes, keyed by name, in the order of the grid."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def devices(self) -> int:
        """Return the number of devices in the grid."""
        return math.prod(self.shape.values())

    @property
    def row_shards(self) -> int:
        """Return the number of devices that split the rows of a batch."""
        return self.data * self.fsdp * self.expert

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in self.shape.items() if size > 1]
        return ",".join(sizes) or "data=1"
