"""Profiles of selected steps, for XProf and Perfetto."""

from __future__ import annotations

from pathlib import Path

import jax

from transformer_jax.config import TrainConfig
from transformer_jax.pytree import PyTree


class Profile:
    """Profiler that records steps a to b in OUT/profile when `config.profile` is "a-b".

    If `config.profile` is None, nothing is recorded.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self._steps, self._folder, self._on = config.profiled_steps, folder / "profile", False

    def before(self, step: int, state: PyTree) -> None:
        """Start recording if `step` (from 1) is the first profiled step."""
        # wait for earlier steps so that they do not appear in the profile
        if self._steps is not None and not self._on and step == self._steps[0]:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._on = True

    def after(self, step: int, state: PyTree) -> None:
        """Stop recording after the last profiled step."""
        if self._on and self._steps is not None and step >= self._steps[1]:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Stop recording if it is active."""
        if self._on:
            self._on = False
            jax.profiler.stop_trace()
