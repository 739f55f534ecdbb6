"""Coordination of a run's processes. Only the first process writes, and all stop together.

With only one process, nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

import jax
import numpy as np

from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.checkpoints.run_folder import RunError
from transformer_jax.config import ConfigError

T = TypeVar("T")

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ConfigError, RunError, CheckpointError, OSError)
}
_MAX_BYTES = 4096
"""Maximum size in bytes of the error name and message that are sent to the other processes."""


def is_first() -> bool:
    """Whether this process writes to the run's folder."""
    return jax.process_index() == 0


def by_first(work: Callable[[], T]) -> T | None:
    """Call `work` in the first process and return its result. Return None in other processes.

    All processes wait for the first one. An error in it is raised in all of them.
    """
    if jax.process_count() == 1:
        return work()
    result, error = None, None
    if is_first():
        try:
            result = work()
        except Exception as raised:
            error = raised
    from jax.experimental import multihost_utils

    # only arrays can be broadcast, so an error is sent as an array of fixed size
    sent = np.zeros(_MAX_BYTES, np.uint8)
    if error is not None:
        content = f"{type(error).__name__}\n{error}".encode()[:_MAX_BYTES]
        # a truncated message is better than none
        sent[: len(content)] = np.frombuffer(content, np.uint8)
    # An all-zero array means that there was no error.
    received = bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent))).rstrip(b"\0")
    # The first process raises the original error below, with its traceback.
    if received and not is_first():
        name, _, message = received.decode(errors="replace").partition("\n")
        raise _ERRORS.get(name, RuntimeError)(message)
    if error is not None:
        raise error
    return result


def any_process(flag: bool) -> bool:
    """Whether `flag` is set in any process. All processes must call this function."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def time_of_first() -> str:
    """Return the first process's time in ISO 8601 format, to the second."""
    now = datetime.now().isoformat(timespec="seconds")
    if jax.process_count() == 1:
        return now
    from jax.experimental import multihost_utils

    sent = np.frombuffer(now.encode(), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent), np.uint8)).decode()


def gathered_here(tree: T) -> T:
    """Copy arrays that are split across processes to every host."""
    if jax.process_count() == 1:
        return tree
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def wait_for_all(name: str) -> None:
    """Wait until all processes reach this point."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
