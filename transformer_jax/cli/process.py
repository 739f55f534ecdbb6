"""Setup of a command's process, such as memory, signals, output streams and error messages."""

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
    """Make glibc keep freed memory, so that each step reuses its buffers without page faults.

    XLA allocates the temporary buffers of each step on its own thread. By default, glibc maps and
    unmaps large blocks every time, which takes a quarter of the time of a small step on a CPU. The
    results do not change. This function has no effect on systems without glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads
        glibc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks are allocated on the heap
        glibc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def escape_unprintable() -> None:
    """Make the standard streams escape characters that their encoding does not contain."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # the stream is closed or has been replaced
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list. The second signal ends the process immediately."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            # Do not use `sys.exit`, because the cleanup after the first signal may have stopped
            # responding.
            os._exit(128 + number)
        received.append(number)
        # Do not use `print`, which is not reentrant, because the signal may interrupt another
        # `print`.
        os.write(2, b"\nstopping after this step; a second signal stops immediately\n")

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, or the file and the reason for an OSError.

    The message of a programming error, such as a KeyError, begins with the type of the error.
    """
    kind = type(error).__name__

    def flag(found: re.Match[str]) -> str:
        name, value = found[1].replace("_", "-"), found[2].strip("'")
        return f"--{name}" if name == "resume" else f"--{name} {value}"

    # A setting in backticks, such as `text_errors='replace'`, is converted to a flag.
    message = re.sub(r"`([a-z_]+)=([^`]*)`", flag, " ".join(str(error).split()))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    # The message of a KeyError contains only the key.
    if isinstance(error, LookupError | TypeError | AttributeError | ArithmeticError):
        return f"{kind}: {message} (--debug shows the traceback)"
    return message or kind
