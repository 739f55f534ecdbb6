"""Set up the process of a command: its memory, its signals, and how it prints an error."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator
from types import FrameType


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, so that a step's buffers come back without page faults.

    XLA allocates a step's temporaries anew every time, on a thread of its own; glibc maps large
    ones and unmaps them again, which takes a quarter of a small step on a CPU. Elsewhere than on
    Linux with glibc this does nothing, and it changes no number.
    """
    with contextlib.suppress(OSError, AttributeError):
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads
        glibc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap
        glibc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def print_anything() -> None:
    """Let the standard streams write what their encoding has no character for as an escape."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # closed, or replaced by something else
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list; the second one ends the process at once."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            # Not `sys.exit`: the first signal's cleanup may be what hangs.
            os._exit(128 + number)
        received.append(number)
        # `print` may be in the middle of a line when a signal comes, and is not reentrant.
        os.write(2, b"\nstopping after this step; once more stops at once\n")

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def one_line(error: BaseException) -> str:
    """Return what an error says, in one line; of an OSError, the file and the reason.

    An error of the program itself, such as a KeyError, begins with its type.
    """
    kind = type(error).__name__

    def flag(found: re.Match[str]) -> str:
        name, value = found[1].replace("_", "-"), found[2].strip("'")
        return f"--{name}" if name == "resume" else f"--{name} {value}"

    # A setting in backquotes, `text_errors='replace'`, is a flag here.
    said = re.sub(r"`([a-z_]+)=([^`]*)`", flag, " ".join(str(error).split()))
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    # The text of a KeyError is only the key.
    if isinstance(error, LookupError | TypeError | AttributeError | ArithmeticError):
        return f"{kind}: {said} (--debug shows where)"
    return said or kind
