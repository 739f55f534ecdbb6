"""Named arrays in orbax format with one writer per process, and a barrier between processes.

Orbax is imported on first use, so programs that neither save nor restore do not load it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    from etils import epath
    from orbax.checkpoint import PyTreeCheckpointHandler

TIMEOUT = 600
"""Maximum time in seconds to wait for other processes."""

LATE_REPORTS = 0.2
"""Time in seconds to wait, after an error, for reports from TensorStore's other threads."""


def staged(array: jax.Array) -> jax.Array:
    """Start copying an array to host memory. The array can be donated afterward.

    Each device copies its shard. A replicated array is copied once.
    """
    if array.is_fully_replicated:
        # Every device has the whole array, so one copy is enough.
        array = array.addressable_shards[0].data
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


def write(folder: Path, arrays: Mapping[str, np.ndarray | jax.Array]) -> None:
    """Write the shards of this process into an empty folder. `finish` then makes it readable.

    Process 0 writes the NumPy arrays. Raises OSError with the name of the file if writing fails.
    """
    from orbax.checkpoint import args

    tree = {_key(name): array for name, array in arrays.items()}
    with _quiet(), _safe_path(folder) as path:
        saving = _handler().async_save(path, args=args.PyTreeSave(tree))
        for future in asyncio.run(saving) or ():
            future.result()


def finish(folder: Path) -> None:
    """Merge the data of all processes. Process 0 calls this after all processes have written."""
    with _quiet(), _safe_path(folder) as path:
        _handler().finalize(path)


def read(
    folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray | jax.Array]:
    """Read arrays, as JAX arrays for requests with a sharding and as NumPy arrays otherwise.

    Each process reads only its devices' shards. Raises ValueError if the folder lacks an array.
    """
    from orbax.checkpoint import ArrayRestoreArgs, RestoreArgs, args

    tree = {_key(name): like for name, like in wanted.items()}
    restore_args = {
        name: RestoreArgs(restore_type=np.ndarray)
        if like.sharding is None
        else ArrayRestoreArgs(sharding=like.sharding, global_shape=like.shape, dtype=like.dtype)
        for name, like in tree.items()
    }
    request = args.PyTreeRestore(item=tree, restore_args=restore_args, partial_restore=True)
    with _quiet(), _safe_path(folder) as path:
        found = _handler().restore(path, args=request)
    return {name: found[_key(name)] for name in wanted}


def agree(name: str, error: BaseException | None = None) -> None:
    """Wait for all processes. An error in one process is raised in all of them.

    `name` must be unique to this call.
    """
    if jax.process_count() > 1:
        from jax._src.distributed import global_state  # JAX has no public barrier for threads

        client = global_state.client
        assert client is not None  # because there are several processes
        if error is not None:
            message = f"{type(error).__name__}: {error}"
            client.key_value_set(f"{name}/{jax.process_index()}", message)
        client.wait_at_barrier(f"{name}:barrier", TIMEOUT * 1000)
        for key, message in [] if error is not None else client.key_value_dir_get(f"{name}/"):
            raise OSError(f"process {key.rpartition('/')[2]}: {message}")
    if error is not None:
        raise error


def _key(name: str) -> str:
    return name.replace("/", ".")  # orbax would create a folder for a slash


@cache
def _handler() -> PyTreeCheckpointHandler:
    from orbax.checkpoint import PyTreeCheckpointHandler

    # Parameters hardly compress, so compression would only take time.
    return PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the output of orbax about errors that it also raises.

    Orbax logs the traceback of each thread, and closes its event loops at the first error.
    TensorStore then reports "Event loop is closed" for the other writes, outside Python's threads.
    """

    def keep(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    log, previous = logging.getLogger("absl"), sys.unraisablehook
    log.addFilter(keep)
    sys.unraisablehook = hook
    try:
        yield
    except BaseException:
        time.sleep(LATE_REPORTS)
        raise
    finally:
        sys.unraisablehook = previous
        log.removeFilter(keep)


@contextlib.contextmanager
def _safe_path(folder: Path) -> Iterator[epath.Path]:
    """Yield a path that orbax can read: the folder itself, or a symbolic link to it.

    Orbax interprets brackets as a glob pattern and a colon as part of a URL, and TensorStore
    requires UTF-8. System errors that TensorStore reports as text are raised as OSError with the
    file name.
    """
    from etils import epath

    folder = folder.absolute()
    with contextlib.ExitStack() as stack:
        path = folder
        if not re.fullmatch(r"[\w./-]+", str(folder), re.ASCII):
            path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "checkpoint")
            path.symlink_to(folder)
        try:
            yield epath.Path(path)
        except ValueError as error:
            message = str(error).replace(str(path), str(folder))
            code = re.search(r"os_error_code='(\d+)'", message)
            if code is None:
                raise ValueError(message) from None
            files = re.findall(r'"(/[^"]*)"', message)
            number = int(code[1])
            raise OSError(number, os.strerror(number), files[-1] if files else None) from None
