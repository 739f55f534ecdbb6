"""Save and restore checkpoints: plain bytes and a manifest, written whole or not at all.

    step-00000500/
        params.bin      the leaves under `params`, one after the other, little-endian
        opt_state.bin
        state.bin       the leaves at the top level
        manifest.json   names, dtypes, shapes; size and sha256 of each file, and its own sha256

The folder is written as `step-00000500.tmp`: files, then the manifest, each synced to the disk, and
then renamed. So a `step-N` is complete, and a process that was killed leaves a `.tmp`. Nothing in
the folder can run code, and every size is compared with the file's before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

MANIFEST = "manifest.json"
MANIFEST_LIMIT = 64 * 2**20
"""Largest manifest that is read, in bytes."""

PyTree: TypeAlias = Any
"""A nested structure of arrays, PRNG keys and numbers."""

_FORMAT = 1
_DTYPES = {
    str(np.dtype(t)): np.dtype(t)
    for t in (
        jnp.bool_, jnp.int8, jnp.int16, jnp.int32, jnp.int64,
        jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64,
        jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64,
    )
}  # fmt: skip


class CheckpointError(ValueError):
    """Report a checkpoint that is damaged, or that does not fit what it is restored into."""


@dataclass(frozen=True)
class Leaf:
    """Describe one array of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def file(self) -> str:
        group, _, rest = self.name.partition("/")
        return f"{group if rest else 'state'}.bin"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """Hold a checkpoint's list of its contents, whose own checksum was right."""

    path: Path
    step: int
    metadata: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    """Name of each file to its {"bytes", "sha256"}."""
    leaves: tuple[Leaf, ...]
    """Every leaf, in the order of their bytes."""
    keys: Mapping[str, str]
    """Names of PRNG keys to their implementation; their leaves are uint32 key data."""


def save(folder: Path, step: int, tree: PyTree, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write `tree` as `folder/step-N` and return that path; an older `step-N` is replaced.

    Leaves are arrays (PRNG keys too) or Python numbers. An error leaves the folder as it was.
    """
    leaves, keys, contents = [], {}, []
    for name, value in _named(tree).items():
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            keys[name] = str(jax.random.key_impl(value))
            value = jax.random.key_data(value)
        array = np.asarray(jax.device_get(value))
        if str(array.dtype) not in _DTYPES:
            raise ValueError(f"{name}: dtype {array.dtype} cannot be saved")
        leaves.append(Leaf(name, str(array.dtype), array.shape))
        contents.append(np.ascontiguousarray(array))
    final = folder / f"step-{step:08d}"
    partial = final.with_name(final.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        files = {}
        for file in sorted({leaf.file for leaf in leaves}):
            parts = (c for leaf, c in zip(leaves, contents, strict=True) if leaf.file == file)
            files[file] = _write(partial / file, parts)
        content = {
            "format": _FORMAT,
            "step": step,
            "metadata": dict(metadata or {}),
            "files": files,
            "leaves": [[leaf.name, leaf.dtype, list(leaf.shape)] for leaf in leaves],
            "keys": keys,
        }
        _write(partial / MANIFEST, [np.frombuffer(_sealed(content).encode(), np.uint8)])
        sync(partial)
        if final.exists():
            _remove(final)
        partial.rename(final)
        sync(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def restore(path: Path, like: PyTree) -> PyTree:
    """Return the tree that was saved, bit for bit, in the structure of `like`.

    Leaves of `like` are arrays, numbers or `jax.ShapeDtypeStruct`. Each leaf comes back as the same
    kind: NumPy array, Python number, or JAX array with the sharding of the `ShapeDtypeStruct`, if
    it has one. With only some of the top-level entries, `{"params": ...}`, the files of the others
    are not read. CheckpointError names the file that is damaged, or the leaves that are missing,
    unexpected or of another shape.
    """
    manifest = read_manifest(path)
    wanted = _named(like)
    files = {Leaf(name, "", ()).file for name in wanted}
    _compare(manifest, wanted, files)
    values: dict[str, Any] = {}
    for file in sorted(files):
        content, offset = _verified(manifest, file), 0
        for leaf in manifest.leaves:
            if leaf.file != file:
                continue
            dtype = _DTYPES[leaf.dtype]
            array: np.ndarray = np.ndarray(leaf.shape, dtype, content, offset)
            offset += leaf.bytes
            values[leaf.name] = _as(wanted[leaf.name], array, manifest.keys.get(leaf.name))
    return jax.tree.unflatten(jax.tree.structure(like), [values[name] for name in wanted])


def verify(path: Path) -> Manifest:
    """Check every file of a checkpoint against its manifest."""
    manifest = read_manifest(path)
    found = {entry.name for entry in os.scandir(path)} - {MANIFEST}
    for name in sorted(found - set(manifest.files)):
        raise CheckpointError(f"{path / name}: not part of this checkpoint")
    for name in manifest.files:
        _verified(manifest, name)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of a checkpoint; its files are not read."""
    file = path / MANIFEST
    text = _read(file, None).decode("utf-8", "replace")
    try:
        content = json.loads(text)
        leaves = tuple(Leaf(n, d, tuple(s)) for n, d, s in content["leaves"])
        manifest = Manifest(
            path, content["step"], content["metadata"], content["files"], leaves, content["keys"]
        )
        del content["sha256"]
        sealed, version = _sealed(content), content["format"]
        sizes = {leaf.file: 0 for leaf in leaves}
        for leaf in leaves:
            _check_name(leaf.name)
            if not all(type(n) is int and n >= 0 for n in leaf.shape):
                raise ValueError(f"shape of {leaf.name}")
            sizes[leaf.file] += leaf.bytes
        consistent = sizes == {name: entry["bytes"] for name, entry in manifest.files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: damaged ({error!r})") from None
    if text != sealed or not consistent:
        raise CheckpointError(f"{file}: damaged (its checksum or its sizes are wrong)")
    if version != _FORMAT:
        raise CheckpointError(f"{file}: format {version}: this version reads {_FORMAT}")
    if path.name != f"step-{manifest.step!s:0>8}":
        raise CheckpointError(f"{file}: is of step {manifest.step}, not of {path.name}")
    return manifest


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in os.scandir(folder))
    return sorted(int(name[1]) for name in names if name)


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def best_step(folder: Path) -> int | None:
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


def write_file(path: Path, content: str) -> None:
    """Replace a small file: afterwards, or after a crash, it holds the old text or the new."""
    partial = path.with_name(path.name + ".tmp")
    try:
        _write(partial, [np.frombuffer(content.encode("utf-8", "surrogatepass"), np.uint8)])
        os.replace(partial, path)
        sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves by their slash-separated names, in the order of the tree."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        _check_name(name)
        if name in found:
            raise ValueError(f"leaf {name!r}: two have this name")
        found[name] = leaf
    return found


def _check_name(name: str) -> None:
    if not re.fullmatch(r"\w+(/\w+)*", name, re.ASCII):
        raise ValueError(f"leaf {name!r}: must be words separated by /")


def _write(path: Path, arrays: Iterable[np.ndarray]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with naming(path), open(path, "wb") as stream:
        for array in arrays:
            data = array.reshape(-1).view(np.uint8).data
            digest.update(data)
            stream.write(data)
            size += len(data)
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an OSError of writing, which has none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that no `step-N` ever lacks files."""
    gone = path.with_name(path.name + ".old.tmp")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def _sealed(content: dict[str, Any]) -> str:
    """Return the manifest's text with the checksum of its other content."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content | {"sha256": sha256}, sort_keys=True, indent=1) + "\n"


def _read(file: Path, size: int | None) -> bytes:
    """Read a regular file of `size` bytes; None allows up to MANIFEST_LIMIT."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file}: not a regular file")
        if size is None and status.st_size > MANIFEST_LIMIT:
            rule = f"at most {MANIFEST_LIMIT} are read"
            raise CheckpointError(f"{file}: has {status.st_size} bytes, {rule}")
        if size is not None and status.st_size != size:
            raise CheckpointError(f"{file}: has {status.st_size} bytes, the manifest says {size}")
        with open(handle, "rb", closefd=False) as stream:
            return stream.read(status.st_size)
    finally:
        os.close(handle)


def _verified(manifest: Manifest, name: str) -> bytes:
    entry = manifest.files[name]
    content = _read(manifest.path / name, entry["bytes"])
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise CheckpointError(f"{manifest.path / name}: sha256 mismatch")
    return content


def _compare(manifest: Manifest, wanted: Mapping[str, Any], files: set[str]) -> None:
    saved = {leaf.name: leaf for leaf in manifest.leaves if leaf.file in files}
    wrong = [f"{name} is missing" for name in wanted if name not in saved]
    wrong += [f"{name} is unexpected" for name in saved if name not in wanted]
    for name, value in wanted.items():
        if name in saved:
            here, there = _spell(value), _spell_leaf(saved[name], manifest.keys.get(name))
            if here != there:
                wrong.append(f"{name} is {there}, not {here}")
    if wrong:
        shown = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise CheckpointError(f"{manifest.path}: {shown}")


def _spell(value: Any) -> str:
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    return f"{value.dtype}{list(value.shape)}"


def _spell_leaf(leaf: Leaf, key: str | None) -> str:
    if key is None:
        return f"{leaf.dtype}{list(leaf.shape)}"
    try:
        return _spell(jax.eval_shape(lambda: _key(jnp.zeros(leaf.shape, leaf.dtype), key)))
    except (ValueError, TypeError):
        return f"key of an unknown kind {key!r}"


def _key(data: Any, implementation: str) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=implementation)


def _as(like: Any, array: np.ndarray, key: str | None) -> Any:
    if key is not None:
        return _key(array, key)
    if isinstance(like, np.ndarray | np.generic):
        return array.copy() if isinstance(like, np.ndarray) else array[()]
    if isinstance(like, bool | int | float):
        return array.item()
    if str(jax.dtypes.canonicalize_dtype(array.dtype)) != str(array.dtype):
        raise CheckpointError(f"dtype {array.dtype} needs jax_enable_x64")
    sharding = like.sharding if isinstance(like, jax.ShapeDtypeStruct) else None
    if sharding is not None:
        return jax.device_put(array, sharding)
    return jnp.array(array)  # a copy: a buffer that NumPy owns could not be donated
