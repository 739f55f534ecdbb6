"""Simulate the end of a process while it changes the disk."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

CALLS = ("mkdir", "open", "fsync", "rename", "rmdir", "unlink", "chmod")


class Killed(BaseException):
    """End the process: no handler may tidy up after it."""


@contextlib.contextmanager
def killed_after(calls: int) -> Iterator[None]:
    """Let `calls` calls change the disk, and raise Killed in each later one."""
    left = calls

    def dying(real):
        def call(*args, **kwargs):
            nonlocal left
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
        yield
