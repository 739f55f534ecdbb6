"""Loss spikes. Batches with an unusually high loss are saved for inspection and replay.

The file OUT/spikes/step-00000120.npz contains the step's micro-batches, with leaves [A, B, ...],
keyed by `Batch` field. It also contains `step`, `loss`, and `grad_norm`. The .txt file contains the
rows as text.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from dataclasses import fields
from pathlib import Path

import numpy as np

from transformer_jax.durable_files import write_file
from transformer_jax.pytree import Leaf
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.training.batch import Batch

RECENT = 50
"""Number of losses in the window of the running median."""

LEAST = 10
"""Minimum number of recent losses before a loss can count as a spike."""

MOST = 10
"""Maximum number of saved batches per run."""


class Spikes:
    """Detector of losses that exceed `factor` times the recent median or are not finite."""

    def __init__(self, factor: float, folder: Path) -> None:
        self.factor, self.folder = factor, folder / "spikes"
        self._recent: deque[float] = deque(maxlen=RECENT)

    def is_spike(self, loss: float, grad_norm: float) -> bool:
        """Whether a step is a spike. If it is not, its loss is added to the running median."""
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        enough = len(self._recent) >= LEAST
        high = finite and enough and loss > self.factor * statistics.median(self._recent)
        # a spike would raise the median for later losses
        if finite and not high:
            self._recent.append(loss)
        return not finite or high

    def is_full(self) -> bool:
        """Whether the folder already contains the maximum number of batches."""
        return len(list(self.folder.glob("step-*.npz"))) >= MOST

    def save(
        self, step: int, batch: Batch, loss: float, grad_norm: float, tokenizer: Tokenizer | None
    ) -> Path:
        """Save the micro-batches of a step and return the path of the file."""
        arrays: dict[str, Leaf] = {
            part.name: np.asarray(getattr(batch, part.name))
            for part in fields(batch)
            if getattr(batch, part.name) is not None
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"step-{step:08d}.npz"
        partial = file.with_suffix(".tmp")
        # `np.savez` would append .npz to a name, but not to an open file.
        with open(partial, "wb") as content:
            np.savez(content, **arrays, step=step, loss=loss, grad_norm=grad_norm)
        # rename last so that other processes never see a partial file
        os.replace(partial, file)
        tokens = arrays["tokens"]
        if tokenizer is not None and np.issubdtype(tokens.dtype, np.integer):
            rows = tokens.reshape(-1, tokens.shape[-1])
            texts = [tokenizer.to_bytes(row.tolist()).decode(errors="replace") for row in rows]
            lines = [f"row {number}: {text!r}" for number, text in enumerate(texts)]
            head = f"step {step}, loss {loss}, gradient norm {grad_norm}"
            write_file(file.with_suffix(".txt"), "\n".join([head, *lines]) + "\n")
        return file


def read_batch(path: str | Path) -> Batch:
    """Load the micro-batches of a saved step, with leaves [A, B, ...]."""
    with np.load(path) as found:
        names = [part.name for part in fields(Batch) if part.name in found.files]
        return Batch(**{"labels": None, **{name: found[name] for name in names}})
