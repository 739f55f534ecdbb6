"""Let the processes of one run agree: the first writes, and all go on or stop together.

With one process nothing here communicates.
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
_LONGEST = 4096
"""Bytes of an error's name and message that the other processes are told."""


def is_first() -> bool:
    """Say whether this is the process that writes the run's folder."""
    return jax.process_index() == 0


def by_first(work: Callable[[], T]) -> T | None:
    """Do work in the first process alone and return its result there, None in the others.

    All wait for it; an error of the first is raised in all.
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

    # arrays are all that processes can broadcast: an error is told as bytes, of one length for all
    told = np.zeros(_LONGEST, np.uint8)
    if error is not None:
        content = f"{type(error).__name__}\n{error}".encode()[:_LONGEST]
        # cut where it is too long: part of a message is better than none
        told[: len(content)] = np.frombuffer(content, np.uint8)
    said = bytes(np.asarray(multihost_utils.broadcast_one_to_all(told))).rstrip(b"\0")
    if said and not is_first():
        name, _, message = said.decode(errors="replace").partition("\n")
        raise _ERRORS.get(name, RuntimeError)(message)
    if error is not None:
        raise error
    return result


def any_process(flag: bool) -> bool:
    """Say whether a flag is set in any process; all have to ask."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def time_of_first() -> str:
    """Return the time of the first process, to the second, as ISO 8601 writes it."""
    now = datetime.now().isoformat(timespec="seconds")
    if jax.process_count() == 1:
        return now
    from jax.experimental import multihost_utils

    told = np.frombuffer(now.encode(), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(told), np.uint8)).decode()


def gathered_here(tree: T) -> T:
    """Return arrays that are split over several processes whole, on the host of each."""
    if jax.process_count() == 1:
        return tree
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def wait_for_all(what: str) -> None:
    """Return when all processes have come this far."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)
