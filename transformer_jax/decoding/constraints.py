"""Constraints that are evaluated in Python, token by token.

Unlike a logit processor, which is compiled into the decoding program, a constraint (such as the
parser of a grammar) is a mutable Python object on the host. The constraint is queried before each
token and updated after it. Therefore, each call of the program decodes a single token if any row
has a constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """Constraint on the next token of one sequence. Each sequence needs its own constraint."""

    @property
    def allowed(self) -> np.ndarray:  # bool[V]
        """Mask of the possible next tokens. Stop tokens are included only if the text may end."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete, so that only a stop token can follow."""

    def read(self, token: int) -> None:
        """Append an allowed token to the text. Raise ValueError if no token can follow it."""


def allowed_tokens(constraints: Sequence[Constraint | None]) -> np.ndarray | None:  # bool[B, V]
    """Return a mask of the tokens that may come next in each row.

    All tokens are allowed in rows without a constraint. If no row has a constraint, return None.
    """
    masks = [None if constraint is None else constraint.allowed for constraint in constraints]
    # Without a mask, unconstrained requests continue to use the already compiled program.
    example = next((mask for mask in masks if mask is not None), None)
    if example is None:
        return None
    return np.stack([np.ones_like(example) if mask is None else mask for mask in masks])
