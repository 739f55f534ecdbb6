"""Contents of a checkpoint folder, read only with orbax."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from etils import epath
from orbax.checkpoint import PyTreeCheckpointHandler


def arrays_of(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return every array of a checkpoint by name, read without the library."""
    arrays: dict[str, np.ndarray] = {}
    for group in sorted(path for path in checkpoint.iterdir() if path.is_dir()):
        found = PyTreeCheckpointHandler().restore(epath.Path(group))
        arrays |= {f"{group.name}:{name}": np.asarray(array) for name, array in found.items()}
    return arrays


def largest_file(checkpoint: Path, group: str) -> Path:
    """Return the largest array file of one group of leaves."""
    files = sorted((checkpoint / group).glob("ocdbt.process_0/d/*"))
    return max(files, key=lambda path: path.stat().st_size)
