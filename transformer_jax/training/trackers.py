"""Experiment trackers: TensorBoard, Weights & Biases, and trackio.

Each tracker needs an optional package, which is imported at the start of a run that uses it. If a
tracker fails, for example because of the network or a full disk, the run reports the error and
continues.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.untrusted_files import JsonObject

PACKAGES: dict[str, str] = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""Names of the packages that the trackers require, keyed by tracker."""

PROJECT = "transformer_jax"


class Tracker(Protocol):
    """Receiver of the measurements of a step."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writer of TensorBoard event files in the run folder (see `tensorboard --logdir runs`)."""

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class _RunLogger:
    """Base class for packages whose run object has the methods `log` and `finish`."""

    _run: Any  # the package may not be installed

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class WeightsAndBiases(_RunLogger):
    """Tracker for Weights & Biases. A resumed run continues the same W&B run."""

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        import wandb

        # the ID of a W&B run cannot contain slashes
        identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=PROJECT, name=folder.name, id=identity, resume="allow", dir=str(folder),
            config=asdict(config),
        )  # fmt: skip


class Trackio(_RunLogger):
    """Tracker for trackio. A resumed run continues the trackio run of the same name."""

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        import trackio

        self._run = trackio.init(
            project=PROJECT, name=folder.name, resume="allow", config=asdict(config)
        )


TRACKERS: dict[str, Callable[[Path, TrainConfig], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    for name in names:
        package = PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"log contains {name!r}, which needs {package}: run pip install {package}"
            )


class Trackers:
    """Trackers of a run. A tracker that fails is removed, and its error is reported once."""

    def __init__(
        self,
        names: Iterable[str],
        folder: Path,
        config: TrainConfig,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._open: dict[str, Tracker] = {}
        for name in names:
            self._try(name, partial(self._start, name, folder, config))

    def _start(self, name: str, folder: Path, config: TrainConfig) -> None:
        self._open[name] = TRACKERS[name](folder, config)

    def write(self, step: int, line: JsonObject) -> None:
        """Send the numbers in a line of metrics.jsonl to all trackers."""
        numbers = {
            name: float(value)
            for name, value in line.items()
            if name != "step" and isinstance(value, int | float)
        }
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.write, step, numbers))

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        # each tracker is closed only once
        self._open.clear()

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # third-party code may raise any error
            self._open.pop(name, None)
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._say(f"log: {name} failed and is disabled ({why})")
