"""Constrain texts token by token: say on the host which tokens may come next.

A processor of logits is compiled into the program and sees what the program has. A constraint, such
as the parser of a grammar, is a mutable Python object: it is queried before each token, and reads
the token that was chosen. So its rows are decoded one token at a time, and other rows are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """The tokens that may come next in one text; each text needs its own constraint."""

    @property
    def allowed(self) -> np.ndarray:  # bool[V]
        """Return which tokens may come next; one that ends texts only where the text may end."""

    @property
    def ended(self) -> bool:
        """Return whether the text is whole, and nothing but its end can follow."""

    def read(self, token: int) -> None:
        """Go on with a token that was allowed; ValueError where the text cannot."""


def allowed_tokens(constraints: Sequence[Constraint | None]) -> np.ndarray | None:  # bool[B, V]
    """Return which tokens may come next in each row: all where there is no constraint.

    None where no row has one.
    """
    found = [None if one is None else one.allowed for one in constraints]
    # No mask at all keeps the program of free requests, which is compiled already.
    known = next((allowed for allowed in found if allowed is not None), None)
    if known is None:
        return None
    return np.stack([np.ones_like(known) if allowed is None else allowed for allowed in found])
