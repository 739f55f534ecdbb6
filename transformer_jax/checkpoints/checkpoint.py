"""Atomic checkpoints that consist of arrays in orbax format and a manifest.

    step-00000500/
        params/         the leaves under `params`, in orbax format
        opt_state/
        state/          the leaves at the top level
        manifest.json   leaf names, dtypes, and shapes; size and SHA-256 of each file; own SHA-256

A save copies the values to the host and returns. A thread writes them to `step-00000500.tmp`. Each
process writes its shards, reads them back, and compares them with the originals. Process 0 then
writes the manifest, syncs the folder to disk, and renames it. A `step-N` folder is therefore always
complete, and a killed process leaves only a `.tmp` folder. Loading a checkpoint never runs code
from it, and hashes are checked before the data is used.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checkpoints import orbax_arrays
from transformer_jax.checkpoints.manifest import (
    DTYPES,
    FORMAT,
    MANIFEST,
    CheckpointError,
    Leaf,
    Manifest,
    check_files,
    check_name,
    contents,
    digest_of,
    read_manifest,
    sealed,
)
from transformer_jax.checkpoints.manifest import verify as verify
from transformer_jax.durable_files import sync, write_file, write_synced
from transformer_jax.pytree import Array, PyTree
from transformer_jax.untrusted_files import Json, JsonObject

READ_BACK_BYTES = 2**28
"""Number of bytes read back at a time when a save is verified."""

Check: TypeAlias = Callable[[int, Mapping[str, np.ndarray]], None]
"""Function that receives a step and its arrays, keyed by name, and raises an error to prevent
saving. For a sharded array, it receives the shards of this process."""


class Saver:
    """Background checkpoint writer, which can be used as a context manager.

    Each `save` waits for the previous one, and the end of the context waits for the last one. A
    write error is raised by the next `save` or `wait`, or at the end of the context. It does not
    affect other checkpoints. In a distributed run, all processes must call the same methods and
    share the folder.
    """

    def __init__(
        self, folder: str | Path, keep: int | None = None, check: Check | None = None
    ) -> None:
        """Save into `folder`. Unless `keep` is None, call `prune` with `keep` after each save.

        `check` is called with the arrays before they are written.
        """
        self._path, self._keep, self._check = Path(folder), keep, check
        # absolute, because the working directory may change while the thread writes
        self._folder = self._path.absolute()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:  # otherwise, the context's exception is more important
                raise

    def save(self, step: int, tree: PyTree, metadata: JsonObject | None = None) -> Path:
        """Start writing `tree` to `folder/step-N` and return this path.

        Leaves can be arrays, including PRNG keys, or Python numbers. The caller can donate the
        arrays immediately after the call. An older `step-N` is replaced.
        """
        self.wait()
        leaves, keys, arrays = list[Leaf](), dict[str, str](), dict[str, Array]()
        for name, value in _named_leaves(tree).items():
            if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                keys[name] = str(jax.random.key_impl(value))
                value = jax.random.key_data(value)
            # This copies NumPy arrays, because the caller may change them while the thread writes.
            array = value if isinstance(value, jax.Array) else np.array(value)
            if str(array.dtype) not in DTYPES:
                raise ValueError(f"{name}: dtype {array.dtype} cannot be saved")
            leaves.append(Leaf(name, str(array.dtype), array.shape))
            arrays[name] = array
        # start copying to the host only after all leaves have been checked
        for name, array in arrays.items():
            if isinstance(array, jax.Array):
                arrays[name] = orbax_arrays.staged(array)
        content = {
            "format": FORMAT,
            "step": step,
            "metadata": dict(metadata or {}),
            "leaves": [[leaf.name, leaf.dtype, list(leaf.shape)] for leaf in leaves],
            "keys": keys,
        }
        # reject invalid JSON now, and copy metadata that the caller may change later
        content = json.loads(json.dumps(content, allow_nan=False))
        final = step_path(self._folder, step)
        groups: dict[str, dict[str, Array]] = {}
        for leaf in leaves:
            if 0 not in leaf.shape:
                groups.setdefault(leaf.group, {})[leaf.name] = arrays[leaf.name]
        del arrays
        self._thread = threading.Thread(
            target=self._write, args=(final, content, groups), name="save checkpoint"
        )
        self._thread.start()
        return step_path(self._path, step)

    def wait(self) -> None:
        """Wait until the last save is on disk. If it failed, raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(
        self,
        final: Path,
        content: JsonObject,
        groups: Mapping[str, Mapping[str, Array]],
    ) -> None:
        partial = final.with_name(final.name + ".tmp")
        first = jax.process_index() == 0
        barrier = f"{final}:{next(_save_numbers)}"
        try:
            with _synchronized(f"{barrier}:created"):
                if first:
                    shutil.rmtree(partial, ignore_errors=True)
                    for group in (".", *groups):
                        (partial / group).mkdir(parents=True, exist_ok=True)
            with _synchronized(f"{barrier}:written"):
                for group, staged in groups.items():
                    arrays = {name: _on_host(array) for name, array in staged.items()}
                    if self._check is not None:
                        self._check(content["step"], _shards(arrays))
                    orbax_arrays.write(partial / group, arrays)
            with _synchronized(f"{barrier}:joined"):
                if first:
                    for group in groups:
                        orbax_arrays.finish(partial / group)
            # verify the new checkpoint before removing an older one
            with _synchronized(f"{barrier}:read"):
                for group, staged in groups.items():
                    _read_back(partial / group, staged, final)
            with _synchronized(f"{barrier}:committed"):
                if first:
                    # The manifest comes last, and the rename after it, so a folder without `.tmp`
                    # is always complete.
                    names = sorted(name for name, is_folder in contents(partial) if not is_folder)
                    files = {name: digest_of(partial / name) for name in names}
                    write_synced(partial / MANIFEST, sealed(content | {"files": files}))
                    # sync the whole folder before the rename, in case of a crash
                    for name, is_folder in contents(partial):
                        if is_folder:
                            sync(partial / name)
                    sync(partial)
                    if final.exists():
                        _remove(final)
                    partial.rename(final)
                    sync(final.parent)
                    if self._keep is not None:
                        prune(self._folder, self._keep)
        except BaseException as error:
            self._error = error
            if first:
                shutil.rmtree(partial, ignore_errors=True)


def save(folder: str | Path, step: int, tree: PyTree, metadata: JsonObject | None = None) -> Path:
    """Write `tree` to `folder/step-N`, wait until it is on disk, and return this path.

    N has eight digits. If an error occurs, the folder is unchanged. See also `Saver.save`.
    """
    with Saver(folder) as saver:
        return saver.save(step, tree, metadata)


def restore(path: str | Path, like: PyTree, *, verified: bool = False) -> PyTree:
    """Restore a saved tree, bit for bit, in the structure of `like`.

    `path` is the path that `save` returned. Each leaf of `like` is an array, a number, or a
    `jax.ShapeDtypeStruct`. It determines the type of the restored leaf, regardless of the saved
    type: a NumPy array, a Python number, or a JAX array with the sharding of the
    `ShapeDtypeStruct`. If `like` has only some of the top-level entries, such as `{"params": ...}`,
    only their files are read. If you have called `verify`, pass `verified=True` to skip the hash
    checks. Each process then reads only the shards for its devices. Raises CheckpointError if a
    file is damaged, or if leaves are missing, unexpected, or have a different shape.
    """
    manifest = read_manifest(path)
    wanted = _named_leaves(like)
    groups = {Leaf(name, "", ()).group for name in wanted}
    _compare(manifest, wanted, groups)
    if not verified:
        for group in groups:
            check_files(manifest, group)
    arrays: dict[str, Array] = {}
    for group in sorted(groups):
        leaves = [leaf for leaf in manifest.leaves if leaf.group == group]
        requests: dict[str, jax.ShapeDtypeStruct] = {}
        for leaf in leaves:
            value = wanted[leaf.name]
            sharding = value.sharding if isinstance(value, jax.ShapeDtypeStruct) else None
            if 0 in leaf.shape:  # empty arrays have no file
                arrays[leaf.name] = np.zeros(leaf.shape, leaf.numpy_dtype)
                continue
            if leaf.name in manifest.keys:
                sharding = None  # keys are wrapped and placed after their data is read
            if sharding is not None:
                _check_width(leaf.numpy_dtype)
            requests[leaf.name] = jax.ShapeDtypeStruct(
                leaf.shape, leaf.numpy_dtype, sharding=sharding
            )
        if requests:
            try:
                arrays |= orbax_arrays.read(manifest.path / group, requests)
            except (ValueError, KeyError, OSError) as error:
                why = str(error).splitlines()[0] if str(error) else repr(error)
                raise CheckpointError(f"{manifest.path / group} cannot be read ({why})") from None
        # a forged manifest may have the correct hashes but wrong shapes
        for leaf in leaves:
            array = arrays[leaf.name]
            if array.shape != leaf.shape or array.dtype != leaf.numpy_dtype:
                raise CheckpointError(
                    f"{manifest.path / group}: {leaf.name} is {array.dtype}{list(array.shape)}, "
                    f"but the manifest specifies {leaf.dtype}{list(leaf.shape)}"
                )
    values = []
    for name, value in wanted.items():
        array, key = arrays[name], manifest.keys.get(name)
        sharding = value.sharding if isinstance(value, jax.ShapeDtypeStruct) else None
        restored: PyTree = array
        if key is not None:
            restored = _key(array, key)
        elif isinstance(array, jax.Array):
            sharding = None  # read directly into its shards
        elif isinstance(value, np.ndarray | np.generic):
            restored = array.copy() if isinstance(value, np.ndarray) else array[()]
        elif isinstance(value, bool | int | float):
            restored = array.item()
        else:
            _check_width(array.dtype)
            if sharding is None:
                restored = jnp.array(array)  # a copy, because JAX cannot donate NumPy's buffer
        values.append(restored if sharding is None else jax.device_put(restored, sharding))
    return jax.tree.unflatten(jax.tree.structure(like), values)


def saved_steps(folder: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in ascending order."""
    if not Path(folder).is_dir():
        return []
    names = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in os.scandir(folder))
    return sorted(int(name[1]) for name in names if name)


def step_path(folder: str | Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return Path(folder) / f"step-{step:08d}"


def set_metadata(path: str | Path, **changes: Json) -> None:
    """Update values in the metadata of a checkpoint. The arrays do not change."""
    manifest = Path(path) / MANIFEST
    read_manifest(path)  # raises CheckpointError if it is damaged
    content = json.loads(manifest.read_text())
    del content["sha256"]
    content["metadata"] |= changes
    write_file(manifest, sealed(content))


def best_step(folder: str | Path) -> int | None:
    """Return the step with the lowest `val_loss` in its metadata. Ties go to the earliest step."""
    losses = []
    for step in saved_steps(folder):
        with contextlib.suppress(CheckpointError):  # skip damaged checkpoints
            loss = read_manifest(step_path(folder, step)).metadata.get("val_loss")
            if isinstance(loss, float):
                # A minimum over pairs prefers the earlier of two steps with equal losses.
                losses.append((loss, step))
    return min(losses)[1] if losses else None


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints except the best one and the last `keep`."""
    steps, best = saved_steps(folder), best_step(folder)
    for step in steps[:-keep]:
        if step != best:
            _remove(step_path(folder, step))


def set_aside(folder: Path, step: int) -> None:
    """Rename the damaged checkpoints of later steps from `step-N` to `step-N.damaged`."""
    for later in saved_steps(folder):
        if later > step:
            path = step_path(folder, later)
            aside = path.with_name(path.name + ".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def remove_partial(folder: Path) -> None:
    """Remove the partial checkpoints that a killed process left behind."""
    for path in folder.glob("step-*.tmp"):
        shutil.rmtree(path)


def _named_leaves(tree: PyTree) -> dict[str, PyTree]:
    """Return the leaves, keyed by slash-separated name, in tree order."""
    found: dict[str, PyTree] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        check_name(name)
        if name in found:
            raise ValueError(f"two leaves have the name {name!r}")
        found[name] = leaf
    return found


def _on_host(array: Array) -> Array:
    """Convert a staged array to NumPy, unless it is sharded."""
    if isinstance(array, jax.Array) and array.is_fully_replicated:
        return np.asarray(array)
    return array


def _shards(arrays: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Return the arrays, with each sharded array replaced by the shards of this process."""
    parts: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if isinstance(array, jax.Array):
            for number, shard in enumerate(array.addressable_shards):
                parts[f"{name}[{number}]"] = np.asarray(shard.data)
        else:
            parts[name] = array
    return parts


def _read_back(folder: Path, staged: Mapping[str, Array], final: Path) -> None:
    """Raise CheckpointError if the written arrays do not read back bit for bit.

    Each process reads its own shards. Process 0 also reads the arrays that are not sharded.
    """
    arrays = {name: _on_host(array) for name, array in staged.items()}
    if jax.process_index() != 0:
        arrays = {name: array for name, array in arrays.items() if isinstance(array, jax.Array)}
    waiting = list(arrays.items())
    while waiting:
        part: dict[str, Array] = {}
        size = 0
        while waiting and (not part or size + waiting[-1][1].nbytes <= READ_BACK_BYTES):
            # At least one array is read, even if it is larger than the limit.
            name, part[name] = waiting[-1]
            size += waiting.pop()[1].nbytes
        like = {
            name: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=getattr(array, "sharding", None)
            )
            for name, array in part.items()
        }
        found = _shards(orbax_arrays.read(folder, like))
        for name, original in _shards(part).items():
            same = found[name].dtype == original.dtype and found[name].shape == original.shape
            if not same or not np.array_equal(_bits(found[name]), _bits(original)):
                rule = (
                    "reads back differently, so this save is discarded; older checkpoints are kept"
                )
                raise CheckpointError(f"{final}: {name} {rule}")


def _bits(array: np.ndarray) -> np.ndarray:
    # Bytes compare NaN as equal to itself, and 0.0 as different from -0.0.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


_save_numbers = itertools.count()


@contextlib.contextmanager
def _synchronized(name: str) -> Iterator[None]:
    """Wait for all processes at the end of the context. If one has an error, raise it in all."""
    try:
        yield
    except BaseException as error:
        orbax_arrays.agree(name, error)
        raise
    else:
        orbax_arrays.agree(name)


def _remove(path: Path) -> None:
    """Rename a checkpoint before removing it, so that a `step-N` folder never lacks files."""
    renamed = path.with_name(path.name + ".old.tmp")
    shutil.rmtree(renamed, ignore_errors=True)
    path.rename(renamed)
    shutil.rmtree(renamed)


def _compare(manifest: Manifest, wanted: Mapping[str, PyTree], groups: set[str]) -> None:
    """Raise CheckpointError if leaves are missing, unexpected, or of a different shape."""

    def describe(value: PyTree) -> str:
        return f"{value.dtype}{list(value.shape)}"

    saved = {leaf.name: leaf for leaf in manifest.leaves if leaf.group in groups}
    wrong = [f"{name} is missing" for name in wanted if name not in saved]
    wrong += [f"{name} is unexpected" for name in saved if name not in wanted]
    for name, value in wanted.items():
        if name in saved:
            leaf, key = saved[name], manifest.keys.get(name)
            actual = f"{leaf.dtype}{list(leaf.shape)}"
            if key is not None:
                try:
                    zeros = jnp.zeros(leaf.shape, leaf.dtype)
                    actual = describe(jax.eval_shape(lambda zeros=zeros, key=key: _key(zeros, key)))
                except (ValueError, TypeError):
                    actual = f"unknown kind of key {key!r}"
            expected = describe(value if hasattr(value, "dtype") else np.asarray(value))
            if actual != expected:
                wrong.append(f"{name} is {actual}, not {expected}")
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CheckpointError(f"{manifest.path}: {'; '.join(wrong[:8])}{more}")


def _key(data: Array, implementation: str) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=implementation)


def _check_width(dtype: np.dtype) -> None:
    # Without jax_enable_x64, JAX would silently round 64-bit arrays to 32 bits.
    if str(jax.dtypes.canonicalize_dtype(dtype)) != str(dtype):
        raise CheckpointError(f"dtype {dtype} needs jax_enable_x64")
