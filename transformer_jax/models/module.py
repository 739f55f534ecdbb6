"""Base class of all linen modules in this package."""

from __future__ import annotations

import jax
from flax import linen as nn


class Watched(type):
    """Metaclass that clears JAX's compilation caches when a module's method is replaced."""

    replaced = 0

    def __init__(cls, *args: object, **named: object) -> None:
        super().__init__(*args, **named)
        type.__setattr__(cls, "_complete", True)

    def __setattr__(cls, name: str, value: object) -> None:
        super().__setattr__(name, value)
        cls._invalidate(name)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        cls._invalidate(name)

    def _invalidate(cls, name: str) -> None:
        # flax sets methods while it creates a class, and sets __dataclass_fields__ on its bases
        if "_complete" in vars(cls) and (name == "__call__" or not name.startswith("__")):
            Watched.replaced += 1
            jax.clear_caches()


class Module(nn.Module, metaclass=Watched):
    """Base class of the linen modules in this package."""
