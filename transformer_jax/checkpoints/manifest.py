"""Manifest of a checkpoint, which describes the leaves and contains the hash of each file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from transformer_jax.durable_files import sync
from transformer_jax.untrusted_files import FileDigest, JsonObject, Untrusted
from transformer_jax.values import value_class

MANIFEST = "manifest.json"
MANIFEST_LIMIT = 64 * 2**20
"""Maximum size of a manifest, in bytes."""

FORMAT = 2
DTYPES = {
    str(np.dtype(t)): np.dtype(t)
    for t in (
        jnp.bool_, jnp.int8, jnp.int16, jnp.int32, jnp.int64,
        jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64,
        jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64,
    )
}  # fmt: skip


class CheckpointError(ValueError):
    """Error for a checkpoint that is damaged or does not match the tree to restore."""


@value_class
class Leaf:
    """Description of an array in a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    @property
    def group(self) -> str:
        """Return the folder that contains the array."""
        group, _, rest = self.name.partition("/")
        return group if rest else "state"


@value_class
class Manifest:
    """Contents of a checkpoint's manifest, whose checksum has been verified."""

    path: Path
    step: int
    metadata: JsonObject
    files: Mapping[str, FileDigest]
    """Size and hash of each file, keyed by its path in the checkpoint folder."""
    leaves: tuple[Leaf, ...]
    """All leaves, in tree order."""
    keys: Mapping[str, str]
    """Implementation of each PRNG key, keyed by leaf name. The leaf contains uint32 key data."""


_FILES = Untrusted(CheckpointError)


def verify(path: str | Path) -> Manifest:
    """Check each file of a checkpoint against its manifest."""
    manifest = read_manifest(path)
    check_files(manifest)
    return manifest


def read_manifest(path: str | Path) -> Manifest:
    """Read and check the manifest of a checkpoint, but no other file."""
    path = Path(path)
    file = path / MANIFEST
    text = _read(file, None).decode("utf-8", "replace")
    try:
        content = json.loads(text)
        del content["sha256"]
        # compare the text, because parsed content would ignore the order of keys
        if text != sealed(content):
            raise ValueError("its checksum is wrong")
        if content["format"] != FORMAT:
            rule = f"this version reads only format {FORMAT}"
            raise CheckpointError(f"{file}: format is {content['format']!r:.20}, but {rule}")
        leaves = tuple(Leaf(n, d, tuple(s)) for n, d, s in content["leaves"])
        manifest = Manifest(
            path=path,
            step=content["step"],
            metadata=content["metadata"],
            files=content["files"],
            leaves=leaves,
            keys=content["keys"],
        )
        for leaf in leaves:
            check_name(leaf.name)
            if not all(type(n) is int and n >= 0 for n in leaf.shape):
                raise ValueError(f"the shape of {leaf.name} is invalid")
            if leaf.dtype not in DTYPES:
                raise ValueError(f"the dtype of {leaf.name} is unknown")
        for entry in manifest.files.values():
            int(entry["bytes"])
        groups, folders = {leaf.group for leaf in leaves if 0 not in leaf.shape}, set[str]()
        for name in manifest.files:
            parts = name.split("/")
            # a leading dot or another character could lead outside the folder
            if len(parts) < 2 or any(not re.fullmatch(r"\w[\w.-]*", p, re.ASCII) for p in parts):
                raise ValueError(f"the file name {name!r} is invalid")
            folders.add(parts[0])
        if groups != folders:
            raise ValueError("its files do not match its leaves")
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: damaged ({error!r})") from None
    if path.name != f"step-{manifest.step!s:0>8}":
        raise CheckpointError(
            f"{file}: contains step {manifest.step}, but the folder is {path.name}"
        )
    return manifest


def check_files(manifest: Manifest, group: str | None = None) -> None:
    """Check the files of a checkpoint, or of one group of its leaves, against the manifest."""

    def in_group(names: Iterable[str]) -> list[str]:
        return sorted(n for n in names if group is None or n.startswith(f"{group}/"))

    try:
        found = {name for name, is_folder in contents(manifest.path) if not is_folder}
    except OSError as error:
        raise CheckpointError(f"{manifest.path} cannot be read ({error.strerror})") from None
    for name in in_group(found - set(manifest.files) - {MANIFEST}):
        raise CheckpointError(f"{manifest.path / name} is not part of this checkpoint")
    for name in in_group(manifest.files):
        file, entry = manifest.path / name, manifest.files[name]
        if hashlib.sha256(_read(file, entry["bytes"])).hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{file} has the wrong SHA-256 checksum")


def contents(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the relative path of each entry below a folder, and whether it is a folder."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        is_folder = entry.is_dir(follow_symlinks=False)
        yield entry.name, is_folder
        if is_folder:
            for name, inner in contents(Path(entry.path)):
                yield f"{entry.name}/{name}", inner


def digest_of(path: Path) -> FileDigest:
    """Sync a file to disk and return its size and hash."""
    sync(path)
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return {"bytes": stream.tell(), "sha256": digest.hexdigest()}


def sealed(content: JsonObject) -> str:
    """Return the text of a manifest, including a checksum of the rest of its content."""
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content | {"sha256": sha256}, sort_keys=True, indent=1) + "\n"


def check_name(name: str) -> None:
    """Raise ValueError if a leaf name is not a safe file name."""
    if not re.fullmatch(r"\w+(/\w+)*", name, re.ASCII):
        raise ValueError(f"leaf name {name!r} must be words separated by /")


def _read(file: Path, size: int | None) -> bytes:
    """Read a regular file of `size` bytes, or of up to MANIFEST_LIMIT bytes if `size` is None."""
    with _FILES.opened(file) as stream:
        actual = os.fstat(stream.fileno()).st_size
        if size is None and actual > MANIFEST_LIMIT:
            raise CheckpointError(f"{file} has {actual} bytes: must have at most {MANIFEST_LIMIT}")
        if size is not None and actual != size:
            raise CheckpointError(f"{file} has {actual} bytes, but the manifest specifies {size}")
        return stream.read(actual)
