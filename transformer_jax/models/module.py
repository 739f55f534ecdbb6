"""The base class of our linen modules."""

from __future__ import annotations

import jax
from flax import linen as nn


class Watched(type):
    """Class of our linen modules: if you replace a method of one, all programs are forgotten."""

    replaced = 0

    def __init__(cls, *args: object, **named: object) -> None:
        super().__init__(*args, **named)
        type.__setattr__(cls, "_complete", True)

    def __setattr__(cls, name: str, value: object) -> None:
        super().__setattr__(name, value)
        cls._forget(name)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        cls._forget(name)

    def _forget(cls, name: str) -> None:
        # flax sets methods while it makes a class, and __dataclass_fields__ of its bases
        if "_complete" in vars(cls) and (name == "__call__" or not name.startswith("__")):
            Watched.replaced += 1
            jax.clear_caches()


class Module(nn.Module, metaclass=Watched):
    """A linen module of this package."""
