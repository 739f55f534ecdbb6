"""Constraints that are evaluated in Python, token by token.

A logit processor is compiled into the decoding program. A constraint, such as the parser of a
grammar, is a mutable Python object on the host. It is queried before each token and updated after
it, so each call of the program decodes a single token while a row has a constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """The tokens that may come next in one sequence; each sequence needs its own constraint."""

    @property
    def allowed(self) -> np.ndarray:  # bool[V]
        """Mask of the tokens that may come next; a stop token is set only if the text may end."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete, and only a stop token can follow."""

    def read(self, token: int) -> None:
        """Append an allowed token to the text; raise ValueError if nothing can follow it."""


def allowed_tokens(constraints: Sequence[Constraint | None]) -> np.ndarray | None:  # bool[B, V]
    """Return the mask of tokens that may come next in each row.

    Rows without a constraint allow all tokens. If no row has a constraint, return None.
    """
    masks = [None if constraint is None else constraint.allowed for constraint in constraints]
    # Without a mask, unconstrained requests keep using the program that is already compiled.
    example = next((mask for mask in masks if mask is not None), None)
    if example is None:
        return None
    return np.stack([np.ones_like(example) if mask is None else mask for mask in masks])
