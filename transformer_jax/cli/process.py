"""Process setup for a command: memory, signals, output streams and error messages."""

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
    """Tell glibc to keep freed memory, so that a step reuses its buffers without page faults.

    XLA allocates the temporaries of each step on its own thread, and glibc maps and unmaps large
    blocks every time, which takes a quarter of a small step on a CPU. Results do not change. On
    systems without glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads
        glibc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap
        glibc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def escape_unprintable() -> None:
    """Make the standard streams write characters outside their encoding as escapes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # the stream is closed or replaced
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list; the second one ends the process at once."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            # Not `sys.exit`: the cleanup after the first signal may be what hangs.
            os._exit(128 + number)
        received.append(number)
        # Not `print`, which is not reentrant: the signal may interrupt another `print`.
        os.write(2, b"\nstopping after this step; a second signal stops immediately\n")

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line; for an OSError, the file and the reason.

    For a programming error, such as a KeyError, the message begins with its type.
    """
    kind = type(error).__name__

    def flag(found: re.Match[str]) -> str:
        name, value = found[1].replace("_", "-"), found[2].strip("'")
        return f"--{name}" if name == "resume" else f"--{name} {value}"

    # A setting in backquotes, such as `text_errors='replace'`, becomes a flag.
    message = re.sub(r"`([a-z_]+)=([^`]*)`", flag, " ".join(str(error).split()))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    # The message of a KeyError is only the key.
    if isinstance(error, LookupError | TypeError | AttributeError | ArithmeticError):
        return f"{kind}: {message} (--debug shows the traceback)"
    return message or kind
