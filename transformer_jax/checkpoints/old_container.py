"""Read the checkpoints of format 1, which are no longer written: plain bytes and a manifest.

step-00000500/
params.bin      the leaves under `params`, one after the other, little-endian
opt_state.bin
state.bin       the leaves at the top level
manifest.json   as in `checkpoint`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np


class Described(Protocol):
    """Describe one array: its name, its shape and its type."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def numpy_dtype(self) -> np.dtype: ...


def file_of(name: str) -> str:
    """Return the file that holds a leaf."""
    group, _, rest = name.partition("/")
    return f"{group if rest else 'state'}.bin"


def file_sizes(leaves: Iterable[Described]) -> dict[str, int]:
    """Return the files of some leaves and their bytes."""
    sizes: dict[str, int] = {}
    for leaf in leaves:
        file = file_of(leaf.name)
        sizes[file] = sizes.get(file, 0) + _bytes(leaf)
    return sizes


def arrays_of(leaves: Iterable[Described], contents: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Return the arrays that are in the files `contents`, in the order of the leaves."""
    arrays, offsets = {}, dict.fromkeys(contents, 0)
    for leaf in leaves:
        file = file_of(leaf.name)
        if file in contents:
            arrays[leaf.name] = np.ndarray(
                leaf.shape, leaf.numpy_dtype, contents[file], offsets[file]
            )
            offsets[file] += _bytes(leaf)
    return arrays


def _bytes(leaf: Described) -> int:
    return math.prod(leaf.shape) * leaf.numpy_dtype.itemsize
