"""Keep the batch of a step whose loss stands out, to look at it and to compute it again.

OUT/spikes/step-00000120.npz holds the arrays of the step's micro-batches, leaves [A, B, ...], under
the names of `Batch`, with `step`, `loss` and `grad_norm`; the .txt beside it, its rows as text.
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
"""Losses whose median a loss is compared with."""

LEAST = 10
"""Losses that there must be before one can stand out."""

MOST = 10
"""Batches that a run's folder keeps."""


class Spikes:
    """Tell which losses stand out: above `factor` times the median of the last, or not finite."""

    def __init__(self, factor: float, folder: Path) -> None:
        self.factor, self.folder = factor, folder / "spikes"
        self._recent: deque[float] = deque(maxlen=RECENT)

    def stands_out(self, loss: float, grad_norm: float) -> bool:
        """Say whether a step's numbers stand out from those before it, and remember its loss."""
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        known = len(self._recent) >= LEAST
        high = finite and known and loss > self.factor * statistics.median(self._recent)
        # a loss that stands out would raise the median that the next ones are compared with
        if finite and not high:
            self._recent.append(loss)
        return not finite or high

    def is_full(self) -> bool:
        """Say whether the folder keeps as many batches as it may."""
        return len(list(self.folder.glob("step-*.npz"))) >= MOST

    def save(
        self, step: int, batch: Batch, loss: float, grad_norm: float, tokenizer: Tokenizer | None
    ) -> Path:
        """Write a step's micro-batches, and return the file."""
        arrays: dict[str, Leaf] = {
            part.name: np.asarray(getattr(batch, part.name))
            for part in fields(batch)
            if getattr(batch, part.name) is not None
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"step-{step:08d}.npz"
        partial = file.with_suffix(".tmp")
        with open(partial, "wb") as content:
            np.savez(content, **arrays, step=step, loss=loss, grad_norm=grad_norm)
        # whoever looks at the folder while the run goes on sees whole files
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
    """Return the micro-batches of a step that a run has kept, leaves [A, B, ...]."""
    with np.load(path) as found:
        names = [part.name for part in fields(Batch) if part.name in found.files]
        return Batch(**{"labels": None, **{name: found[name] for name in names}})
