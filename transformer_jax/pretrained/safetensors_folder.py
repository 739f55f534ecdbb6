"""Reading and writing of weight folders in Hugging Face's layout, independent of any model.

    config.json
    model.safetensors                  or model-00001-of-00003.safetensors, ..., together with
    model.safetensors.index.json       the name of the file that contains each tensor

Folders are untrusted. Sizes are checked before anything is allocated, and names before anything is
opened. The `safetensors` package reads tensors with `pread`, so each tensor has its own memory, and
truncating a file during the read raises an error instead of SIGBUS. Corrupted values are not
detected, because safetensors has no checksum.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.durable_files import sync
from transformer_jax.pytree import Array
from transformer_jax.untrusted_files import Json, JsonObject, Untrusted, brief, is_plain, shown
from transformer_jax.values import value_class

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
"""Name of the file that PEFT writes instead of CONFIG."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

CONFIG_LIMIT = 2**23
"""Maximum size in bytes of config.json and of other JSON files except the index. This is enough for
65,000 class names in `id2label` and `label2id`."""
HEADER_LIMIT = 10**8
"""Maximum size in bytes of a safetensors header (set by the format) and of an index."""
HEADER_VALUES = 2**20
"""Maximum number of values in a header (about 130,000 tensors) or an index (a million names)."""
RANK_LIMIT = 32
"""Maximum number of axes of a tensor."""
SHARD_BYTES = 5 * 10**9
"""Maximum size in bytes of each file that is written (huggingface_hub's default)."""

_FILES = Untrusted(CheckpointError)

_DTYPES = {
    "BOOL": np.dtype(bool),
    "I8": np.dtype(np.int8), "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32), "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8), "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32), "U64": np.dtype(np.uint64),
    "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype(np.float32), "F64": np.dtype(np.float64),
}  # fmt: skip
_NAMES = {dtype.name for dtype in _DTYPES.values()}

_DOWNLOADED = ["*.json", "*.txt", "*.bpe", "*.jinja", "model*.safetensors"]
_PLAIN = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors", re.ASCII)
_REPOSITORY = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)


@value_class
class TensorInfo:
    """Description of a tensor from the header of a file."""

    file: str
    dtype: str
    """Name of the dtype in NumPy or ml_dtypes, such as "float32" or "bfloat16"."""
    shape: tuple[int, ...]


@value_class
class WeightFolder:
    """Config of an open folder and the headers of its files, without any tensors."""

    path: Path
    config: JsonObject
    """Content of config.json."""
    tensors: Mapping[str, TensorInfo]
    """All tensors, keyed by name, in the order of the files and of their bytes in each file."""
    stamps: Mapping[str, tuple[int, ...]] = field(repr=False)
    """Identity of each file when the folder was opened. Reading fails if a file has changed."""

    @property
    def where(self) -> str:
        """Return the path of config.json, for error messages."""
        return str(self.path / CONFIG)

    def read(self, name: str) -> np.ndarray:
        """Read one tensor.

        To read several tensors, use `read_all`, which opens each file only once.
        """
        return next(self.read_all([name]))[1]

    def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield tensors one at a time, file by file, in the order of `names` within each file.

        Only one tensor is in memory at a time if the caller drops each tensor before requesting the
        next.
        """
        files: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            if name not in self.tensors:
                raise CheckpointError(f"{self.path}: there is no tensor {shown(name)}")
            files.setdefault(self.tensors[name].file, []).append(name)
        # Unlike a generator's variable, chain keeps no reference to the yielded tensor.
        return itertools.chain.from_iterable(itertools.starmap(self._read, files.items()))

    def file(self, name: str) -> Path | None:
        """Return the path of a file such as "1_Pooling/config.json", or None if it does not exist.

        Raises CheckpointError if the name or a link leads outside the folder.
        """
        return _FILES.inside(self.path, name) if _FILES.there(self.path, name) else None

    def read_json(self, name: str) -> Json:
        """Read the object or list in another JSON file, or return None if it does not exist."""
        path = self.file(name)
        if path is None:
            return None
        content = _FILES.json(_FILES.content(path, CONFIG_LIMIT), str(path))
        if not isinstance(content, dict | list):
            raise CheckpointError(f"{path}: must be an object or a list")
        return content

    def _read(self, file: str, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        path = _FILES.inside(self.path, file)
        if _stamp(path) != self.stamps[file]:
            raise CheckpointError(f"{path} has changed since the folder was opened")
        with _opened(path) as reader:
            for name in names:
                yield name, self._tensor(path, reader, name)

    def _tensor(self, path: Path, reader: Any, name: str) -> np.ndarray:
        # A separate function, because a generator's local variable would keep the tensor alive.
        info = self.tensors[name]
        try:
            array = reader.get_tensor(name)
        except (_library().SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {shown(name)}: {brief(error)}") from None
        if (array.dtype.name, array.shape) != (info.dtype, info.shape):
            found = f"{array.dtype}{list(array.shape)}"
            rule = f"must be {info.dtype}{list(info.shape)}"
            raise CheckpointError(f"{path}: {shown(name)} is {found}: {rule}")
        return array


def open_folder(path_or_id: str | Path, *, revision: str | None = None) -> WeightFolder:
    """Check config.json and the header of each file in a folder, without reading any tensor.

    If the path exists, it must be a folder, which is read without network access. Otherwise, "NAME"
    or "ORG/NAME" is a repository at `revision`, which huggingface_hub finds in its cache or
    downloads (cache only with HF_HUB_OFFLINE=1). Links can lead to other places in the folder and,
    in the cache, from `models--ORG--NAME/snapshots/REVISION` to `models--ORG--NAME/blobs`. Raises
    CheckpointError if a file is invalid. The message names the file and the invalid tensor, if any.
    """
    folder = _located(path_or_id, revision)
    # Without this check, the error would be about config.json, which PEFT does not write.
    if _FILES.there(folder, ADAPTER) and not any(_FILES.there(folder, n) for n in (SINGLE, INDEX)):
        adapter = _FILES.json_object(_FILES.inside(folder, ADAPTER), CONFIG_LIMIT)
        base = adapter.get("base_model_name_or_path")
        base = f", {shown(base)}," if isinstance(base, str) else ""
        rule = f"load its base model{base} and then load_lora(path, params, names)"
        raise CheckpointError(f"{folder} is a PEFT adapter ({ADAPTER}), not a model; {rule}")
    path = _FILES.inside(folder, CONFIG)
    config = _FILES.json_object(path, CONFIG_LIMIT)
    listed = _listed(folder)
    # Check all paths before opening the first file.
    paths = {file: _FILES.inside(folder, file) for file in listed}
    stamps = {file: _stamp(path) for file, path in paths.items()}
    tensors: dict[str, TensorInfo] = {}
    for file, names in listed.items():
        found = _header(paths[file], file)
        if names is not None:
            missing, unlisted = names - found.keys(), found.keys() - names
            for wrong, rule in ((missing, "is missing"), (unlisted, "is not in the index")):
                if wrong:
                    others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                    raise CheckpointError(f"{paths[file]}: {shown(min(wrong))} {rule}{others}")
        tensors |= found
    return WeightFolder(folder, config, MappingProxyType(tensors), MappingProxyType(stamps))


def write_folder(
    path: str | Path,
    config: JsonObject,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,  # extra files, such as "tokenizer.json"
) -> None:
    """Write a folder for `open_folder` and `transformers`, either completely or not at all.

    Tensors are grouped into files of up to `shard_bytes` bytes. A larger tensor gets its own file.
    Only the tensors of one file are in memory at a time. The files are written to `NAME.*.tmp` next
    to the folder, synced, checked with `open_folder` and renamed.

    An existing folder is replaced if it contains only files with the same names, which are
    config.json, the model's files, the index and `files`. Any other file raises CheckpointError.
    Processes that have the old files open can still read them. If the process is killed between the
    two renames of a replacement, both complete folders remain as `NAME.*.tmp`.
    """
    final, files = Path(os.path.realpath(path)), dict(files or {})
    for name in files:
        if not is_plain(name) or _is_weight_file(name):
            raise CheckpointError(
                f"files: {shown(name)} must be a plain file name that is not used by the weights"
            )
    _check_replaceable(final, files)
    partial = final.with_name(f"{final.name}.{secrets.token_hex(4)}.tmp")
    try:
        partial.mkdir(parents=True)
        _write(partial / CONFIG, _dump(config, CONFIG))
        _write_tensors(partial, tensors, shard_bytes)
        for name, content in files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            _write(partial / name, content)
        # The name of a file is stored in its directory, which must be synced separately.
        for folder, _, _ in os.walk(partial):
            sync(Path(folder))
        # Detect unreadable output before removing the old folder.
        open_folder(partial)
        # Another program may have written to the old folder in the meantime.
        _check_replaceable(final, files)
        _replace(final, partial)
    except BaseException:  # also clean up after an interrupt
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _located(path_or_id: str | Path, revision: str | None) -> Path:
    if not isinstance(path_or_id, str | os.PathLike):
        kind = type(path_or_id).__name__
        raise CheckpointError(f"path_or_id is of type {kind}: must be a folder or a repository ID")
    path, name = Path(path_or_id), shown(str(path_or_id))
    if os.path.lexists(path_or_id):
        if revision is not None:
            raise CheckpointError(
                f"{name} is a local path: revision={revision!r} requires a repository ID"
            )
        if not path.is_dir():
            raise CheckpointError(f"{name} is not a folder")
        return path
    if isinstance(path_or_id, Path):
        raise CheckpointError(f"{name}: the folder does not exist")
    if not _REPOSITORY.fullmatch(path_or_id):
        raise CheckpointError(
            f"{name}: must be an existing folder or a repository ID, NAME or ORG/NAME"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        need = "a repository ID requires huggingface_hub: run pip install huggingface_hub"
        raise CheckpointError(f"{name}: no such folder, and {need}") from None
    try:
        found = snapshot_download(path_or_id, revision=revision, allow_patterns=_DOWNLOADED)
    except Exception as error:  # the underlying libraries raise exceptions of various types
        # huggingface_hub wraps errors that httpx wrapped, so search the chain for the cause.
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        reason = brief(error)
        for one in chain:  # the last match wins
            if isinstance(one, TimeoutError | ConnectionError | socket.gaierror):
                reason = f"the hub could not be reached ({one.strerror or brief(one)})"
        if any(type(one).__name__ == "OfflineModeIsEnabled" for one in chain):
            reason = "it is not in the hub's cache, and HF_HUB_OFFLINE forbids a download"
        raise CheckpointError(f"{name}: no such folder, and {reason}") from error
    return Path(found)


def _listed(folder: Path) -> dict[str, set[str] | None]:
    """Map each tensor file to the names that it must contain, or to None if there is no index."""
    # As in transformers, a single file takes precedence over an index.
    if _FILES.there(folder, SINGLE):
        return {SINGLE: None}
    if not _FILES.there(folder, INDEX):
        pickles = any(
            _FILES.there(folder, f"pytorch_model.bin{end}") for end in ("", ".index.json")
        )
        hint = "; pytorch_model.bin is a pickle, which this library never reads" if pickles else ""
        raise CheckpointError(f"{folder}: there is no {SINGLE} and no {INDEX}{hint}")
    path = _FILES.inside(folder, INDEX)
    index = _FILES.json(_FILES.content(path, HEADER_LIMIT), str(path), HEADER_VALUES)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object that maps tensors to files")
    listed: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        if not (isinstance(file, str) and _PLAIN.fullmatch(file) and file.endswith(".safetensors")):
            raise CheckpointError(
                f"{path}: {shown(name)} is in {shown(file)}: must be a plain *.safetensors name"
            )
        names = listed.setdefault(file, set())
        assert names is not None
        names.add(name)
    # On a case-insensitive file system, names that differ only in case are the same file.
    if len({file.lower() for file in listed}) < len(listed):
        clash = sorted(listed, key=str.lower)
        a, b = next((a, b) for a, b in itertools.pairwise(clash) if a.lower() == b.lower())
        raise CheckpointError(f"{path}: {shown(a)} and {shown(b)} must differ in more than case")
    return listed


def _header(path: Path, file: str) -> dict[str, TensorInfo]:
    """Return descriptions of the tensors in a file, in the order of their bytes.

    This parser names the invalid tensor in error messages and rejects duplicate names. The library
    parses the header again, and both results must agree.
    """
    with _FILES.opened(path) as stream:
        # The length of the header takes 8 bytes. The header is a JSON object, so the next byte is
        # "{".
        size, start = os.fstat(stream.fileno()).st_size, stream.read(9)
        length = int.from_bytes(start[:8], "little")
        if start[8:] != b"{":
            raise CheckpointError(f"{path} is not a safetensors file")
        if length > size - 8:
            raise CheckpointError(
                f"{path}: truncated, or not a safetensors file: "
                f"its header has {length} bytes, but the file has {size}"
            )
        if length > HEADER_LIMIT:
            raise CheckpointError(
                f"{path}: the header has {length} bytes: must have at most {HEADER_LIMIT}"
            )
        stream.seek(8)
        content = _FILES.json(stream.read(length), f"{path}: header", HEADER_VALUES)
    assert isinstance(content, dict)  # the first byte is "{"
    # This key contains arbitrary strings, which have no effect on the tensors.
    content.pop("__metadata__", None)
    room = size - 8 - length
    found: dict[str, TensorInfo] = {}
    entry: Any  # unchecked JSON; missing fields are errors below
    for name, entry in content.items():
        where = f"{path}: {shown(name)}"
        try:
            code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            dtype = _DTYPES.get(code)
            rank = len(shape)
            counts = [*shape, begin, end] if rank <= RANK_LIMIT else []
            whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in counts)
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(
                f"{where}: must have a dtype, a shape, and data_offsets"
            ) from None
        if dtype is None:
            rule = f"must be one of {', '.join(_DTYPES)}"
            raise CheckpointError(f"{where}: dtype {shown(code)}: {rule}")
        if rank > RANK_LIMIT or not whole:
            values = f"shape {shown(shape)}, data_offsets {shown([begin, end])}"
            rule = f"must be at most {RANK_LIMIT} integers of at least 0"
            raise CheckpointError(f"{where}: {values}: {rule}")
        if math.prod(shape) * dtype.itemsize != end - begin:
            rule = f"does not fit the bytes {shown(begin)} to {shown(end)}"
            raise CheckpointError(f"{where}: {dtype.name}{shown(shape)} {rule}")
        if end > room:
            raise CheckpointError(
                f"{where}: ends at byte {shown(end)}, but the file has {room} bytes of data"
            )
        found[name] = TensorInfo(file, dtype.name, tuple(shape))
    del content  # up to a million names; the library parses the header again
    with _opened(path) as reader:
        names = reader.offset_keys()
    if set(names) != set(found):
        raise CheckpointError(
            f"{path}: the header is ambiguous: safetensors finds other tensors in it"
        )
    return {name: found[name] for name in names}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file with the `safetensors` reader."""
    library = _library()
    try:
        # With mmap, truncating the file during the read would kill the process (SIGBUS).
        reader = library.safe_open(path, "numpy", backend="pread")
    except (library.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {brief(error)}") from None
    with reader:
        yield reader


def _library() -> ModuleType:
    try:
        import safetensors
    except ImportError:
        rule = "requires the package safetensors: run pip install safetensors"
        raise CheckpointError(f"reading weights {rule}") from None
    version = safetensors.__version__
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < (0, 8):
        raise CheckpointError(f"safetensors is {version}: must be 0.8 or later")
    return safetensors


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_weight_file(name: str) -> bool:
    """Whether a file with this name contains weights or their index."""
    return name in (CONFIG, INDEX) or bool(_WEIGHTS.fullmatch(name))


def _check_replaceable(path: Path, files: Mapping[str, bytes]) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    for folder, names, found in os.walk(path):
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        for name in sorted(found + links):
            entry = Path(folder, name)
            local = entry.relative_to(path).as_posix()
            if not (_is_weight_file(local) or local in files) or entry.is_symlink():
                raise CheckpointError(f"{path} contains {shown(local)}, which would be lost")


def _write_tensors(folder: Path, tensors: Iterable[tuple[str, Array]], shard_bytes: int) -> None:
    """Write tensors in order to files of up to `shard_bytes`, split as huggingface_hub does."""
    shards: list[list[str]] = []  # the tensor names of each file
    shard: dict[str, np.ndarray] = {}
    seen: set[str] = set()
    total = size = 0

    library = _library()
    from safetensors.numpy import save_file

    def flush(content: dict[str, np.ndarray]) -> None:
        shards.append(list(content))
        path = folder / f"{len(shards)}.safetensors"
        try:
            save_file(content, path, metadata={"format": "pt"})
        except library.SafetensorError as error:
            raise CheckpointError(f"{path} cannot be written ({brief(error)})") from None
        path.chmod(stat.S_IMODE((folder / CONFIG).stat().st_mode))  # save_file sets it to 0600
        sync(path)

    for name, value in tensors:
        array = _checked(name, value, seen)
        total += array.nbytes
        if array.nbytes > shard_bytes:
            flush({name: array})
        else:
            if size + array.nbytes > shard_bytes:
                flush(shard)
                shard, size = {}, 0
            shard[name] = array
            size += array.nbytes
        del value, array  # before the next tensor is computed
    if shard or not shards:
        flush(shard)
    # The final file names contain the number of files, which is known only now.
    if len(shards) == 1:
        (folder / "1.safetensors").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{i}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write(folder / INDEX, _dump(index, INDEX))


def _checked(name: str, value: Array, seen: set[str]) -> np.ndarray:
    """Convert a tensor to C order and native byte order for writing. The shape does not change."""
    if not isinstance(name, str) or name == "__metadata__" or name in seen:
        raise CheckpointError(
            f"tensor {shown(name)}: the name must be a unique string other than __metadata__"
        )
    seen.add(name)
    array = np.asarray(value)
    if array.dtype.name not in _NAMES:
        raise CheckpointError(
            f"tensor {shown(name)}: dtype {array.dtype} is not supported by safetensors"
        )
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def _dump(content: JsonObject, name: str) -> bytes:
    try:
        return (json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be written ({brief(error)})") from None


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as stream:
        stream.write(content)
    sync(path)


def _replace(path: Path, partial: Path) -> None:
    """Rename `partial` to `path`.

    The old folder is deleted last, and is restored after an error.
    """
    old = partial.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    # A rename cannot overwrite a folder that is not empty, so two renames are needed.
    replaced = path.exists()
    if replaced:
        path.rename(old)
    try:
        partial.rename(path)
    except BaseException:
        if replaced:
            old.rename(path)
        raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)
