"""Reader for GGUF, the single-file model format of llama.cpp.

A file consists of metadata followed by tensors:

    "GGUF", version, number of tensors, number of keys
    key, type, value                   for each key; a value can be a list, such as the vocabulary
    name, sizes, type, offset          for each tensor
    bytes of the tensors               quantized types: blocks of 32 or 256 numbers share scales

The format is defined in ggml's docs/gguf.md. Little-endian files of versions 2 and 3 are supported.
Files are untrusted, so each length is compared with the number of remaining bytes before anything
is allocated. The package `gguf` defines the types and dequantizes blocks. Its reader is not used,
because it trusts the lengths and takes ten seconds for 100,000 strings. Files are not
memory-mapped.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.untrusted_files import Untrusted, shown
from transformer_jax.values import value_class

HEADER_LIMIT = 2**26
"""Maximum size of the metadata in bytes. A vocabulary of 262,144 tokens takes about ten million
bytes."""
COUNT_LIMIT = 2**17
"""Maximum number of keys and maximum number of tensors."""
NAME_LIMIT = 256
"""Maximum length of a key or tensor name, in bytes. The limit for tensors in ggml is 64."""
RANK_LIMIT = 4
"""Maximum number of axes of a tensor, as in ggml."""
CHUNK = 2**22
"""Number of values to dequantize at a time."""

_FILES = Untrusted(CheckpointError)
_SCALARS = dict(zip(range(8), "BbHhIif?", strict=True)) | dict(
    zip((10, 11, 12), "Qqd", strict=True)
)
"""`struct` format for each type code. Code 8 is a string, and code 9 is a list."""
_TEXT, _LIST = 8, 9
_PLAIN = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16),
}  # fmt: skip
"""Tensor types that keep their dtype. All other types become float32."""

Value = str | bool | int | float | list[str] | np.ndarray


@value_class
class GgufTensor:
    """Description of a tensor from the header of a file."""

    kind: str
    """Name of the type in ggml, such as "Q4_K"."""
    shape: tuple[int, ...]
    """Shape in the order of NumPy, with the contiguous axis last. The file lists that axis
    first."""
    start: int
    """Offset of the first byte in the file."""
    row_bytes: int
    """Size in bytes of a row along the last axis."""


@value_class
class GgufFile:
    """Metadata of a GGUF file and the locations of its tensors, which have not been read."""

    path: Path
    metadata: Mapping[str, Value]
    """Metadata values, keyed by name. A float32 value is represented by the shortest decimal that
    rounds to it, which is the value in the original config. A list is a list of strings or an
    array."""
    tensors: Mapping[str, GgufTensor]
    """Tensors, keyed by name, in the order of the file."""
    stamp: tuple[int, ...] = field(repr=False)
    """Identity of the file when it was opened. `read` fails if the file has changed."""

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """Read a tensor, or a slice along its first axis.

        F16 and BF16 tensors keep their dtype. All other types become float32.
        """
        found = self.tensors[name]
        shape = found.shape if part is None else found.shape[1:]
        rows = math.prod(shape[:-1])
        start = found.start + (0 if part is None else part * rows * found.row_bytes)
        with _FILES.opened(_resolved(self.path)) as stream:
            if _stamp(stream) != self.stamp:
                raise CheckpointError(f"{self.path} has changed since it was opened")
            stream.seek(start)
            if found.kind in _PLAIN:
                flat = np.empty(math.prod(shape), _PLAIN[found.kind])
                _fill(stream, flat.view(np.uint8), self.path)
                return flat.reshape(shape)
            numbers = np.empty((rows, shape[-1]), np.float32)
            # Read in chunks, so that memory never contains all raw bytes and all numbers.
            step = max(1, CHUNK // shape[-1])
            for first in range(0, rows, step):
                raw = np.empty((min(step, rows - first), found.row_bytes), np.uint8)
                _fill(stream, raw.reshape(-1), self.path)
                numbers[first : first + len(raw)] = _dequantise(raw, found.kind)
        return numbers.reshape(shape)

    @cached_property
    def architecture(self) -> str:
        """Return the name of the architecture, which is also the prefix of its metadata keys."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise CheckpointError(
                f"{self.path}: general.architecture is {shown(found)}: must be a string"
            )
        return found


def open_gguf(path: str | Path) -> GgufFile:
    """Read the metadata of a file and check the locations of its tensors, without reading them.

    Raises CheckpointError if the file is invalid. The message names the file and the invalid key or
    tensor.
    """
    path = Path(path)
    with _FILES.opened(_resolved(path)) as stream:
        header = _Header(path, stream)
        if header.take(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file")
        # An invalid file is reported even if the package is missing.
        _library()
        version = header.number("I")
        if version not in (2, 3):
            # A small number in the wrong byte order has zeros in its lower half.
            big = " (of a big-endian machine)" if version % 2**16 == 0 else ""
            raise CheckpointError(f"{path}: version is {version}{big}: must be 2 or 3")
        counts = header.number("Q"), header.number("Q")
        # A 24-byte file can claim to contain 2^62 keys.
        for count, kind in zip(counts, ("tensors", "keys"), strict=True):
            if count > COUNT_LIMIT:
                raise header.wrong(
                    f"the number of {kind} is {count}: must be at most {COUNT_LIMIT}"
                )
        metadata: dict[str, Value] = {}
        for _ in range(counts[1]):
            key = header.text("a key", NAME_LIMIT)
            if key in metadata:
                raise header.wrong(f"key {shown(key)} appears twice")
            metadata[key] = header.value(key)
        # Offsets are relative to the end of the header, which is known only after all tensors are
        # listed.
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(counts[0]):
            name = header.text("a tensor's name", NAME_LIMIT)
            if name in infos:
                raise header.wrong(f"tensor {shown(name)} appears twice")
            rank = header.number("I")
            if not 1 <= rank <= RANK_LIMIT:
                raise header.wrong(
                    f"{shown(name)} has {rank} axes: must have from 1 to {RANK_LIMIT}"
                )
            shape = tuple(header.number("Q") for _ in range(rank))[::-1]
            infos[name] = shape, header.number("I"), header.number("Q")
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or not 0 < align <= 2**16 or align & (align - 1):
            raise header.wrong(f"general.alignment is {shown(align)}: must be a power of two")
        # The data begins at the next multiple of the alignment.
        begin = -(-header.place // align) * align
        tensors = {
            name: _located(path, name, *info, begin, header.size, align)
            for name, info in infos.items()
        }
        stamp = _stamp(stream)
    return GgufFile(path, MappingProxyType(metadata), MappingProxyType(tensors), stamp)


class _Header:
    """Reader for the start of a file that checks each value against the remaining bytes."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self.size, self.place = os.fstat(stream.fileno()).st_size, 0

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}")

    def take(self, count: int, what: str = "the header") -> bytes:
        if count > self.size - self.place:
            rule = f"needs {count} bytes, but only {self.size - self.place} remain in the file"
            raise self.wrong(f"truncated, or not a GGUF file: {what} {rule}")
        if self.place + count > HEADER_LIMIT:
            raise self.wrong(f"{what} exceeds the limit of {HEADER_LIMIT} bytes of metadata")
        self.place += count
        return self._stream.read(count)

    def number(self, code: str) -> Any:
        (found,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        # The value in the original config is 1e-05, for example, not 9.999999747378752e-06.
        return float(str(np.float32(found))) if code == "f" else found

    def text(self, what: str, limit: int = HEADER_LIMIT) -> str:
        length = self.number("Q")
        if length > limit:
            raise self.wrong(f"{what} has {length} bytes: must have at most {limit}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what}: byte {error.start} is not UTF-8") from None

    def value(self, key: str) -> Value:
        kind = self.number("I")
        if kind == _TEXT:
            return self.text(shown(key))
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _LIST:
            raise self.wrong(f"{shown(key)} has a value of type {kind}: must be 0 to 12")
        kind, count = self.number("I"), self.number("Q")
        if kind not in _SCALARS and kind != _TEXT:
            raise self.wrong(
                f"{shown(key)} is a list of type {kind}: must contain numbers or strings"
            )
        # Each string begins with its length, which takes 8 bytes.
        least = 8 if kind == _TEXT else struct.calcsize(f"<{_SCALARS[kind]}")
        if count * least > self.size - self.place:
            rule = f"has {count} items, but only {self.size - self.place} bytes remain in the file"
            raise self.wrong(f"truncated: list {shown(key)} {rule}")
        if kind == _TEXT:
            return [self.text(shown(key)) for _ in range(count)]
        return np.frombuffer(self.take(count * least, shown(key)), f"<{_SCALARS[kind]}")


def _located(
    path: Path, name: str, shape: tuple[int, ...], code: int, offset: int,
    begin: int, size: int, align: int,
) -> GgufTensor:  # fmt: skip
    """Check the type and the location of a tensor.

    `begin` is the offset of the first byte after the header.
    """
    library, where = _library(), f"{path}: {shown(name)}"
    try:
        kind = library.GGMLQuantizationType(code)
        block, block_bytes = library.GGML_QUANT_SIZES[kind]
        if kind.name not in _PLAIN:
            # The package lists types that it cannot dequantize, so dequantize a block of zeros as a
            # test.
            _dequantise(np.zeros((1, block_bytes), np.uint8), kind.name)
    except (ValueError, KeyError):
        raise CheckpointError(f"{where} has the unknown type {code}") from None
    except NotImplementedError:
        raise CheckpointError(
            f"{where} has type {kind.name}, which is not supported for weights"
        ) from None
    if not all(shape) or shape[-1] % block:
        rule = f"sizes must be positive, and the last must be divisible by {block}"
        raise CheckpointError(f"{where} is {kind.name}{list(shape)}: {rule}")
    row_bytes = shape[-1] // block * block_bytes
    end = begin + offset + math.prod(shape[:-1]) * row_bytes
    if offset % align:
        raise CheckpointError(f"{where} begins at offset {offset}: must be divisible by {align}")
    if end > size:
        rule = f"ends at byte {end}, but the file has {size} bytes: is it truncated?"
        raise CheckpointError(f"{where}: {kind.name}{list(shape)} {rule}")
    return GgufTensor(kind.name, shape, begin + offset, row_bytes)


def _dequantise(raw: np.ndarray, kind: str) -> np.ndarray:
    """Dequantize rows of bytes to float32."""
    library = _library()
    with np.errstate(all="ignore"):  # scales that are NaN or inf are kept
        return library.quants.dequantize(raw, library.GGMLQuantizationType[kind])


def _fill(stream: BinaryIO, target: np.ndarray, path: Path) -> None:
    if stream.readinto(memoryview(target)) != target.nbytes:  # type: ignore[attr-defined]
        raise CheckpointError(f"{path} was truncated while being read")


def _resolved(path: Path) -> Path:
    # The Hub's cache consists of links, which `Untrusted.opened` does not follow.
    return Path(os.path.realpath(path))


def _stamp(stream: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            "reading a GGUF file requires the package gguf: run pip install gguf"
        ) from None
    return gguf
