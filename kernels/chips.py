"""Tile sizes by chip, kernel and head widths: one table, and where its numbers come from.

`python -m benchmarks.tune_attention` searches on the attached chip and prints rows to put here.
What no row names takes the backend's own choice, `blocks` in its file: sizes that compile for every
width it supports, and that nothing was measured for.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from transformer_jax.kernels import Target
from transformer_jax.kernels.contract import Blocks

Kind = Literal["forward", "queries", "keys", "bias", "unordered"]


def kinds(unordered: bool) -> tuple[Kind, ...]:
    """The kernels of a call."""
    gradients: tuple[Kind, ...] = ("unordered",) if unordered else ("queries", "keys")
    return ("forward", *gradients, "bias")


TABLE: dict[tuple[str, Kind, int, int, int], Blocks] = {}
"""(chip as JAX names it, kernel, H, Hv, bytes of a number) to tiles; none measured yet."""

FASTEST: frozenset[str] = frozenset()
"""Chips on which the kernels were measured to be the best choice where they run; none yet, so
`implementation=None` leaves them to those who ask by name."""


def blocks(where: Target, kind: Kind, H: int, Hv: int, width: int, T: int, S: int) -> Blocks:
    """The tiles of a kernel; short sequences take shorter ones, where a backend can."""
    found = dict(where.blocks).get(kind) or TABLE.get((where.chip, kind, H, Hv, width))
    found = found or where.module.blocks(kind, H, Hv, width)
    least = where.module.SHORTEST
    q, k = (_at_most(n, length, least) for n, length in ((found.q, T), (found.k, S)))
    return dataclasses.replace(found, q=q, k=k)


def _at_most(block: int, length: int, least: int | None) -> int:
    """A power of two that holds a short sequence, from `least`; blocks divide each other."""
    if least is None or length >= block:
        return block
    return min(block, max(least, 1 << (length - 1).bit_length()))
