"""Training: data, batches, losses, optimizers, tasks, the training step, and the training loop.

`loop.fit` trains the model of a `TrainConfig`. `step` and `losses` contain building blocks for a
custom loop. The names in `_LATER` need optax and other heavy packages, so they are imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from transformer_jax.training.losses import chunked_cross_entropy, cross_entropy

if TYPE_CHECKING:
    from transformer_jax.checkpoints.run_folder import RunError
    from transformer_jax.training.batch import Batch, batch_loss
    from transformer_jax.training.evaluation import evaluate
    from transformer_jax.training.loop import Result, fit
    from transformer_jax.training.optimizers import learning_rate_schedule, make_optimizer
    from transformer_jax.training.report import MAX_REJECTED
    from transformer_jax.training.step import (
        TrainState,
        init_state,
        make_eval_step,
        make_train_step,
        start_state,
    )

__all__ = [
    "MAX_REJECTED",
    "Batch",
    "Result",
    "RunError",
    "TrainState",
    "batch_loss",
    "chunked_cross_entropy",
    "cross_entropy",
    "evaluate",
    "fit",
    "init_state",
    "learning_rate_schedule",
    "load_task",
    "make_eval_step",
    "make_optimizer",
    "make_train_step",
    "start_state",
]

_LATER = {
    "MAX_REJECTED": "report",
    "load_task": "tasks",
    "Result": "loop",
    "Batch": "batch",
    "RunError": "loop",
    "evaluate": "evaluation",
    "fit": "loop",
    "TrainState": "step",
    "init_state": "step",
    "batch_loss": "batch",
    "learning_rate_schedule": "optimizers",
    "make_eval_step": "step",
    "make_optimizer": "optimizers",
    "make_train_step": "step",
    "start_state": "step",
}
"""Modules that define the names that are imported on first use, keyed by name."""


def __getattr__(name: str) -> Any:
    """Import the module that defines a name in `_LATER`."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    """Return all public names, including those not yet imported, for completion in editors."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
