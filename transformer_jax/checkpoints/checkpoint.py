"""Save and restore checkpoints: arrays by orbax and a manifest, whole or not at all.

    step-00000500/
        params/         the leaves under `params`, as orbax writes them
        opt_state/
        state/          the leaves at the top level
        manifest.json   names, dtypes, shapes; size and sha256 of each file, and its own sha256

A save copies the values to the host and returns; a thread writes them. The folder is written as
`step-00000500.tmp`: each process writes its shards, reads them back and compares them with what it
was given, then process 0 writes the manifest; all is synced to the disk, and then renamed. So a
`step-N` is complete, and a process that was killed leaves a `.tmp`. Nothing in the folder can run
code, and every file is compared with its hash before use.
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
"""Bytes that are read back at once of what was saved."""

Check: TypeAlias = Callable[[int, Mapping[str, np.ndarray]], None]
"""Raises where the arrays of a step, by their names, must not be saved. Of a sharded array it is
given each shard of this process."""


class Saver:
    """Save checkpoints into a folder while the caller goes on; as a context, wait for the last.

    One save is written at a time: the next waits for it. An error of writing is raised by the next
    `save`, by `wait` or at the end of the context, and leaves the other checkpoints as they were.
    With several processes each of them calls the same methods, and the folder is one they share.
    """

    def __init__(
        self, folder: str | Path, keep: int | None = None, check: Check | None = None
    ) -> None:
        """Save into `folder`; after each save `prune` to `keep`, if given.

        `check` is asked about the arrays before they are written.
        """
        self._named, self._keep, self._check = Path(folder), keep, check
        self._folder = self._named.absolute()  # wherever the process goes while the thread writes
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:  # else the error of the context is the one to know
                raise

    def save(self, step: int, tree: PyTree, metadata: JsonObject | None = None) -> Path:
        """Begin to write `tree` as `folder/step-N` and return that path.

        Leaves are arrays (PRNG keys too) or Python numbers; saved are their values at the call,
        though the caller donates them next. An older `step-N` is replaced.
        """
        self.wait()
        leaves, keys, arrays = list[Leaf](), dict[str, str](), dict[str, Array]()
        for name, value in _named(tree).items():
            if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                keys[name] = str(jax.random.key_impl(value))
                value = jax.random.key_data(value)
            array = value if isinstance(value, jax.Array) else np.array(value)
            if str(array.dtype) not in DTYPES:
                raise ValueError(f"{name}: dtype {array.dtype} cannot be saved")
            leaves.append(Leaf(name, str(array.dtype), array.shape))
            arrays[name] = array
        # no copy to the host begins before every leaf is known to be one that can be saved
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
        # what is not JSON is refused now, and metadata that the caller changes later is not written
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
        return step_path(self._named, step)

    def wait(self) -> None:
        """Return when the last save is on the disk; raise its error."""
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
        meeting = f"{final}:{next(_meetings)}"
        try:
            with _together(f"{meeting}:made"):
                if first:
                    shutil.rmtree(partial, ignore_errors=True)
                    for group in (".", *groups):
                        (partial / group).mkdir(parents=True, exist_ok=True)
            with _together(f"{meeting}:written"):
                for group, staged in groups.items():
                    arrays = {name: _on_host(array) for name, array in staged.items()}
                    if self._check is not None:
                        self._check(content["step"], _shards(arrays))
                    orbax_arrays.write(partial / group, arrays)
            with _together(f"{meeting}:joined"):
                if first:
                    for group in groups:
                        orbax_arrays.finish(partial / group)
            # what was written is read back before any older checkpoint is removed
            with _together(f"{meeting}:read"):
                for group, staged in groups.items():
                    _read_back(partial / group, staged, final)
            with _together(f"{meeting}:committed"):
                if first:
                    names = sorted(name for name, is_folder in contents(partial) if not is_folder)
                    files = {name: digest_of(partial / name) for name in names}
                    write_synced(partial / MANIFEST, sealed(content | {"files": files}))
                    # a crash after the rename must find all of the folder on the disk
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
    """Write `tree` as `folder/step-N` and return that path once it is there; see `Saver.save`.

    N has eight digits: `step_path(folder, step)`. An error leaves the folder as it was.
    """
    with Saver(folder) as saver:
        return saver.save(step, tree, metadata)


def restore(path: str | Path, like: PyTree, *, verified: bool = False) -> PyTree:
    """Return the tree that was saved, bit for bit, in the structure of `like`.

    `path` is what `save` returned: that of one step. Leaves of `like` are arrays, numbers or
    `jax.ShapeDtypeStruct`. Each leaf comes back as the same kind: NumPy array, Python number, or
    JAX array with the sharding of the `ShapeDtypeStruct`, if it has one, whatever it was saved
    from. With only some of the top-level entries, `{"params": ...}`, the files of the others are
    not read. Where `verify` has just been asked, `verified`, the hashes are not compared again, and
    each process reads what its devices hold. CheckpointError names the file that is damaged, or the
    leaves that are missing, unexpected or of another shape.
    """
    manifest = read_manifest(path)
    wanted = _named(like)
    groups = {Leaf(name, "", ()).group for name in wanted}
    _compare(manifest, wanted, groups)
    if not verified:
        for group in groups:
            check_files(manifest, group)
    arrays: dict[str, Array] = {}
    for group in sorted(groups):
        leaves = [leaf for leaf in manifest.leaves if leaf.group == group]
        asked: dict[str, jax.ShapeDtypeStruct] = {}
        for leaf in leaves:
            given = wanted[leaf.name]
            sharding = given.sharding if isinstance(given, jax.ShapeDtypeStruct) else None
            if 0 in leaf.shape:  # of which there is no file
                arrays[leaf.name] = np.zeros(leaf.shape, leaf.numpy_dtype)
            elif sharding is None or leaf.name in manifest.keys:
                asked[leaf.name] = jax.ShapeDtypeStruct(leaf.shape, leaf.numpy_dtype)
            else:
                _check_width(leaf.numpy_dtype)
                asked[leaf.name] = jax.ShapeDtypeStruct(
                    leaf.shape, leaf.numpy_dtype, sharding=sharding
                )
        if asked:
            try:
                arrays |= orbax_arrays.read(manifest.path / group, asked)
            except (ValueError, KeyError, OSError) as error:
                why = str(error).splitlines()[0] if str(error) else repr(error)
                raise CheckpointError(f"{manifest.path / group}: cannot be read ({why})") from None
        # a forged manifest may have the hashes of the files, and other shapes
        for leaf in leaves:
            array = arrays[leaf.name]
            if array.shape != leaf.shape or array.dtype != leaf.numpy_dtype:
                there = f"{array.dtype}{list(array.shape)}"
                raise CheckpointError(
                    f"{manifest.path / group}: {leaf.name} is {there}, the manifest says "
                    f"{leaf.dtype}{list(leaf.shape)}"
                )
    values = {
        name: _as(value, arrays[name], manifest.keys.get(name)) for name, value in wanted.items()
    }
    return jax.tree.unflatten(jax.tree.structure(like), list(values.values()))


def saved_steps(folder: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending."""
    if not Path(folder).is_dir():
        return []
    names = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in os.scandir(folder))
    return sorted(int(name[1]) for name in names if name)


def step_path(folder: str | Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return Path(folder) / f"step-{step:08d}"


def set_metadata(path: str | Path, **changes: Json) -> None:
    """Write other values of a checkpoint's metadata; its arrays stay as they are."""
    manifest = Path(path) / MANIFEST
    read_manifest(path)  # CheckpointError where it is damaged
    content = json.loads(manifest.read_text())
    del content["sha256"]
    content["metadata"] |= changes
    write_file(manifest, sealed(content))


def best_step(folder: str | Path) -> int | None:
    """Return the step whose metadata has the lowest `val_loss`, the first of equals."""
    losses = []
    for step in saved_steps(folder):
        with contextlib.suppress(CheckpointError):  # a damaged one cannot be the best
            loss = read_manifest(step_path(folder, step)).metadata.get("val_loss")
            if isinstance(loss, float):
                losses.append((loss, step))
    return min(losses)[1] if losses else None


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the best and the last `keep`."""
    steps, best = saved_steps(folder), best_step(folder)
    for step in steps[:-keep]:
        if step != best:
            _remove(step_path(folder, step))


def set_aside(folder: Path, step: int) -> None:
    """Rename the damaged checkpoints after `step`: `step-N` becomes `step-N.damaged`."""
    for later in saved_steps(folder):
        if later > step:
            path = step_path(folder, later)
            aside = path.with_name(path.name + ".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def remove_partial(folder: Path) -> None:
    """Remove what a killed process left half-written or half-removed."""
    for path in folder.glob("step-*.tmp"):
        shutil.rmtree(path)


def _named(tree: PyTree) -> dict[str, PyTree]:
    """Return the leaves by their slash-separated names, in the order of the tree."""
    found: dict[str, PyTree] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        check_name(name)
        if name in found:
            raise ValueError(f"leaf {name!r}: two have this name")
        found[name] = leaf
    return found


def _on_host(array: Array) -> Array:
    """Return a staged array as NumPy's, unless several devices share it."""
    if isinstance(array, jax.Array) and array.is_fully_replicated:
        return np.asarray(array)
    return array


def _shards(arrays: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Return the arrays of a process, and of those it shares its shards."""
    parts: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if isinstance(array, jax.Array):
            for number, shard in enumerate(array.addressable_shards):
                parts[f"{name}[{number}]"] = np.asarray(shard.data)
        else:
            parts[name] = array
    return parts


def _read_back(folder: Path, staged: Mapping[str, Array], final: Path) -> None:
    """Raise CheckpointError where what was written does not read as what was given, bit for bit.

    Each process reads its own shards, and the first what is no one's.
    """
    arrays = {name: _on_host(array) for name, array in staged.items()}
    if jax.process_index() != 0:
        arrays = {name: array for name, array in arrays.items() if isinstance(array, jax.Array)}
    waiting = list(arrays.items())
    while waiting:
        part: dict[str, Array] = {}
        size = 0
        while waiting and (not part or size + waiting[-1][1].nbytes <= READ_BACK_BYTES):
            name, part[name] = waiting[-1]
            size += waiting.pop()[1].nbytes
        like = {
            name: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=getattr(array, "sharding", None)
            )
            for name, array in part.items()
        }
        found = _shards(orbax_arrays.read(folder, like))
        for name, given in _shards(part).items():
            same = found[name].dtype == given.dtype and found[name].shape == given.shape
            if not same or not np.array_equal(_bits(found[name]), _bits(given)):
                rule = "does not read as it was written: this save is given up, older ones stay"
                raise CheckpointError(f"{final}: {name} {rule}")


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


_meetings = itertools.count()


@contextlib.contextmanager
def _together(name: str) -> Iterator[None]:
    """Leave the context with all processes, or with an error in all."""
    try:
        yield
    except BaseException as error:
        orbax_arrays.agree(name, error)
        raise
    else:
        orbax_arrays.agree(name)


def _remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that no `step-N` ever lacks files."""
    gone = path.with_name(path.name + ".old.tmp")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def _compare(manifest: Manifest, wanted: Mapping[str, PyTree], groups: set[str]) -> None:
    """Raise CheckpointError that lists what is missing, unexpected or of another shape."""

    def spelled(value: PyTree) -> str:
        return f"{value.dtype}{list(value.shape)}"

    saved = {leaf.name: leaf for leaf in manifest.leaves if leaf.group in groups}
    wrong = [f"{name} is missing" for name in wanted if name not in saved]
    wrong += [f"{name} is unexpected" for name in saved if name not in wanted]
    for name, value in wanted.items():
        if name in saved:
            leaf, key = saved[name], manifest.keys.get(name)
            there = f"{leaf.dtype}{list(leaf.shape)}"
            if key is not None:
                try:
                    zeros = jnp.zeros(leaf.shape, leaf.dtype)
                    there = spelled(jax.eval_shape(lambda zeros=zeros, key=key: _key(zeros, key)))
                except (ValueError, TypeError):
                    there = f"key of an unknown kind {key!r}"
            here = spelled(value if hasattr(value, "dtype") else np.asarray(value))
            if here != there:
                wrong.append(f"{name} is {there}, not {here}")
    if wrong:
        shown = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise CheckpointError(f"{manifest.path}: {shown}")


def _key(data: Array, implementation: str) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=implementation)


def _check_width(dtype: np.dtype) -> None:
    if str(jax.dtypes.canonicalize_dtype(dtype)) != str(dtype):
        raise CheckpointError(f"dtype {dtype} needs jax_enable_x64")


def _as(like: PyTree, array: Array, key: str | None) -> PyTree:
    """Return an array that was read as the kind of leaf that `like` is."""
    sharding = like.sharding if isinstance(like, jax.ShapeDtypeStruct) else None
    if key is not None:
        value = _key(array, key)
        return value if sharding is None else jax.device_put(value, sharding)
    if isinstance(array, jax.Array):
        return array
    if isinstance(like, np.ndarray | np.generic):
        return array.copy() if isinstance(like, np.ndarray) else array[()]
    if isinstance(like, bool | int | float):
        return array.item()
    _check_width(array.dtype)
    if sharding is not None:
        return jax.device_put(array, sharding)
    return jnp.array(array)  # a copy: a buffer that NumPy owns could not be donated
