"""Bring files and folders to the disk, whole or not at all, and hold the lock of a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk.

    A file system that cannot be asked for that keeps what it is given in its own way: it is no
    error.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        _synced(handle, path)
    finally:
        os.close(handle)


def _synced(handle: int, path: Path) -> None:
    try:
        with naming(path):
            os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a file, and return when it is on the disk."""
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    with naming(path), open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        _synced(stream.fileno(), path)


def write_file(path: Path, content: str | bytes) -> None:
    """Replace a small file: afterwards, or after a crash, it holds the old content or the new."""
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
    """Add the name of the file to an OSError of writing, which has none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def locked(folder: Path, busy: Callable[[str], Exception]) -> Iterator[None]:
    """Hold `folder/lock`, which contains this process's number.

    Where another process holds it, `busy` makes the error of that number. OSError where the file
    system has no locks. The system frees the lock when its process ends, however it ends.
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
            rule = f"its file system has no locks ({error.strerror}): choose one on a local disk"
            raise OSError(error.errno, rule, str(folder)) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(file)):
                break
        # its owner removed the file between our `open` and our `flock`: that lock locks nothing
        os.close(handle)
    try:
        with contextlib.suppress(OSError):  # the number is for people
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)
