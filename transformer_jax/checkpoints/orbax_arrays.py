"""Write and read named arrays with orbax, each process its shards, and let processes agree.

Orbax is imported on the first use: what neither saves nor restores does not pay for it.
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
"""Seconds that a process waits for the others to write their shards."""

LATE_REPORTS = 0.2
"""Seconds after an error in which TensorStore's other threads report theirs."""


def staged(array: jax.Array) -> jax.Array:
    """Begin to copy an array to the host's memory: later donation of it changes nothing.

    Each device copies its shard; of a replicated array one copy is made.
    """
    if array.is_fully_replicated:
        array = array.addressable_shards[0].data
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


def write(folder: Path, arrays: Mapping[str, np.ndarray | jax.Array]) -> None:
    """Write this process's part of the arrays into an empty folder; `finish` makes it readable.

    NumPy arrays are written by process 0. OSError names the file that could not be written.
    """
    from orbax.checkpoint import args

    tree = {_key(name): array for name, array in arrays.items()}
    with _quiet(), _plainly_named(folder) as path:
        saving = _handler().async_save(path, args=args.PyTreeSave(tree))
        for future in asyncio.run(saving) or ():
            future.result()


def finish(folder: Path) -> None:
    """Join what the processes have written; process 0 calls it once all have."""
    with _quiet(), _plainly_named(folder) as path:
        _handler().finalize(path)


def read(
    folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray | jax.Array]:
    """Read the arrays `wanted`: NumPy arrays, or JAX arrays where a sharding is given.

    Of a sharded array each process reads what its devices hold. ValueError where the folder does
    not have them.
    """
    from orbax.checkpoint import ArrayRestoreArgs, RestoreArgs, args

    tree = {_key(name): like for name, like in wanted.items()}
    how = {
        name: RestoreArgs(restore_type=np.ndarray)
        if like.sharding is None
        else ArrayRestoreArgs(sharding=like.sharding, global_shape=like.shape, dtype=like.dtype)
        for name, like in tree.items()
    }
    request = args.PyTreeRestore(item=tree, restore_args=how, partial_restore=True)
    with _quiet(), _plainly_named(folder) as path:
        found = _handler().restore(path, args=request)
    return {name: found[_key(name)] for name in wanted}


def agree(name: str, error: BaseException | None = None) -> None:
    """Wait until all processes are here, and raise in each of them if one has an error.

    `name` is one that no other meeting has.
    """
    if jax.process_count() > 1:
        from jax._src.distributed import global_state  # JAX has no public barrier of threads

        client = global_state.client
        assert client is not None  # there are several processes
        if error is not None:
            told = f"{type(error).__name__}: {error}"
            client.key_value_set(f"{name}/{jax.process_index()}", told)
        client.wait_at_barrier(f"{name}:met", TIMEOUT * 1000)
        for key, told in [] if error is not None else client.key_value_dir_get(f"{name}/"):
            raise OSError(f"process {key.rpartition('/')[2]}: {told}")
    if error is not None:
        raise error


def _key(name: str) -> str:
    return name.replace("/", ".")  # a slash would become a folder


@cache
def _handler() -> PyTreeCheckpointHandler:
    from orbax.checkpoint import PyTreeCheckpointHandler

    return PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what orbax prints of an error: the error itself is raised and says it.

    It logs the traceback of each thread, and ends its event loops at the first error, to which
    TensorStore then reports the other writes: "Event loop is closed", from no thread of Python's.
    """

    def wanted(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    def shown(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    log, before = logging.getLogger("absl"), sys.unraisablehook
    log.addFilter(wanted)
    sys.unraisablehook = shown
    try:
        yield
    except BaseException:
        time.sleep(LATE_REPORTS)
        raise
    finally:
        sys.unraisablehook = before
        log.removeFilter(wanted)


@contextlib.contextmanager
def _plainly_named(folder: Path) -> Iterator[epath.Path]:
    """Name a folder as orbax reads names: where it would not, by a link.

    It takes brackets for a pattern and a colon for a URL, and TensorStore wants UTF-8. What the
    latter reports of the system in words is raised as OSError with its file.
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
            said = str(error).replace(str(path), str(folder))
            code = re.search(r"os_error_code='(\d+)'", said)
            if code is None:
                raise ValueError(said) from None
            files = re.findall(r'"(/[^"]*)"', said)
            number = int(code[1])
            raise OSError(number, os.strerror(number), files[-1] if files else None) from None
