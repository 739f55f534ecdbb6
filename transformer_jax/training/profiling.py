"""Record a profile of some steps of a run, as XProf and Perfetto show it."""

from __future__ import annotations

from pathlib import Path

import jax

from transformer_jax.config import TrainConfig
from transformer_jax.pytree import PyTree


class Profile:
    """Record steps a to b of `config.profile`, "a-b", into OUT/profile; of None, nothing."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self._steps, self._folder, self._on = config.profiled_steps, folder / "profile", False

    def before(self, step: int, state: PyTree) -> None:
        """Start where `step`, from 1 on, is the first; earlier ones are computed by then."""
        # steps that were begun before may still be running, and are not to be in the profile
        if self._steps is not None and not self._on and step == self._steps[0]:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._on = True

    def after(self, step: int, state: PyTree) -> None:
        """Stop where `step` is the last, once it is computed."""
        if self._on and self._steps is not None and step >= self._steps[1]:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Stop, if it is still recording."""
        if self._on:
            self._on = False
            jax.profiler.stop_trace()
