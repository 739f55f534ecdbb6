"""Simulated kills of a process while it changes the disk."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CALLS = ("mkdir", "open", "fsync", "rename", "rmdir", "unlink", "chmod")


class Killed(BaseException):
    """End of the process; no handler may clean up after it."""


@contextlib.contextmanager
def killed_after(calls: int) -> Iterator[Callable[[], int]]:
    """Allow `calls` calls to change the disk, and raise `Killed` in each later one.

    The yielded function returns the number of remaining calls.
    """
    left = calls
    ours = {"MainThread", "save checkpoint"}  # threads of orbax must end by themselves

    def dying(real):
        def call(*args, **kwargs):
            nonlocal left
            if threading.current_thread().name not in ours:
                return real(*args, **kwargs)
            left -= 1
            if left < 0:
                raise Killed
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, dying(getattr(os, name)))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
        patch.setattr(Path, "rename", dying(Path.rename))
        yield lambda: left
