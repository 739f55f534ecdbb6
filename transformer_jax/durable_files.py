"""Atomic and durable file writes, and a lock for a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk if the file system supports it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        _fsync(handle, path)
    finally:
        os.close(handle)


def _fsync(handle: int, path: Path) -> None:
    try:
        with naming(path):
            os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a file and flush it to disk."""
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    with naming(path), open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        _fsync(stream.fileno(), path)


def write_file(path: Path, content: str | bytes) -> None:
    """Replace a small file atomically.

    After a crash, the file has either its old or its new content.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        write_synced(partial, content)
        os.replace(partial, path)
        sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an OSError that has none, such as a write error."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def locked(folder: Path, busy: Callable[[str], Exception]) -> Iterator[None]:
    """Lock a folder while the context is active.

    The lock is the file `folder/lock`, which contains the ID of this process.

    Raises `busy(pid)` if another process has locked the folder, and OSError if the file system does
    not support locks. The operating system releases the lock when the process ends, even after a
    crash.
    """
    file = folder / "lock"
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 64, 0).decode(errors="replace").strip()
            os.close(handle)
            raise busy(owner or "?") from None
        except OSError as error:
            os.close(handle)
            file.unlink(missing_ok=True)
            # two runs in one folder would overwrite each other's checkpoints
            rule = f"its file system does not support locks ({error.strerror}); choose a local disk"
            raise OSError(error.errno, rule, str(folder)) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(file)):
                break
        # the previous owner deleted the file between `open` and `flock`, so this lock is not valid
        os.close(handle)
    try:
        with contextlib.suppress(OSError):  # the ID is only used in error messages
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)
