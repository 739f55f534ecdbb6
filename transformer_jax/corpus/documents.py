"""Reading of documents from files in chunks.

A chunk is a contiguous range of documents in a file, so that processes can read in parallel.
Chunk boundaries depend only on the file and the chunk size.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from transformer_jax.config.prepare import DocumentFormat
from transformer_jax.tokenizers.plain_text import read_text, split_documents
from transformer_jax.tokenizers.utf8 import DataError, utf8
from transformer_jax.untrusted_files import Untrusted

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

BLOCK = 2**20
"""Number of bytes to read at a time."""

_LINE_END = re.compile(rb"\r\n?+|\n")
_BLANK_LINES = re.compile(rb"(?:\r\n?+|\n)(?:[ \t\f\v]*+(?:\r\n?+|\n))+")


class Input(NamedTuple):
    """Size and hash of an input file at the time of its first read."""

    path: str
    bytes: int
    sha256: str
    changed: int
    """Modification time of the file, in nanoseconds."""


class Chunk(NamedTuple):
    """Range of documents in a file, given as bytes or as row groups of a Parquet file."""

    path: str
    format: DocumentFormat
    start: int
    end: int
    bytes: int
    """Size of the chunk in bytes, for progress reports."""
    of: Input


@dataclass(frozen=True)
class Reader:
    """Reader of the documents in a chunk."""

    field: str
    """Field (JSON lines) or column (Parquet) that contains the document."""
    text_errors: str
    """How to treat invalid UTF-8. strict raises DataError; replace inserts U+FFFD."""

    def documents(self, chunk: Chunk) -> Iterator[str]:
        """Yield the nonempty documents.

        Raises DataError with the file and the position if a document is invalid.
        """
        if chunk.format == "parquet":
            file = open_parquet(chunk.path)
            if self.field not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"{chunk.path} has no column {self.field!r} (columns: {names})")
            for group in range(chunk.start, chunk.end):
                try:
                    values = file.read_row_group(group, columns=[self.field]).column(0).to_pylist()
                except Exception as error:  # pyarrow's own exceptions, and OSError
                    raise _invalid(chunk.path, error) from None
                for row, value in enumerate(values):
                    yield from self._text(value, f"{chunk.path}: row {row} of row group {group}")
            return
        try:
            with open(chunk.path, "rb") as stream:
                stream.seek(chunk.start)
                content = stream.read(chunk.end - chunk.start)
        except OSError as error:
            raise DataError(f"{chunk.path} cannot be read ({error.strerror})") from None
        if chunk.format != "jsonl":
            text = read_text(content, chunk.path, self.text_errors, chunk.start)
            yield from split_documents(text, chunk.format)
            return
        # `str.splitlines` would also split at U+2028, which a JSON string may contain
        for match in re.finditer(rb"[^\r\n]+", content):
            at = chunk.start + match.start()
            line = read_text(match[0], chunk.path, self.text_errors, at)
            if not line.strip():
                continue
            where = f"{chunk.path}: line at byte {at}"
            found = Untrusted(DataError).parse(line, where)
            if not isinstance(found, dict):
                raise DataError(f"{where}: must be an object")
            yield from self._text(found.get(self.field), where)

    def _text(self, value: object, where: str) -> Iterator[str]:
        """Yield a document if it is not empty; raise DataError if it is not a string."""
        if not isinstance(value, str):
            found = "is missing" if value is None else f"has type {type(value).__name__}"
            raise DataError(f"{where}: {self.field} {found}: must be a string")
        if self.text_errors == "replace":
            # JSON can spell out half of a surrogate pair, which UTF-8 cannot represent.
            value = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        try:
            utf8(value)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if value.strip():
            yield value


def read_input(path: str) -> Input:
    """Return the size and hash of a file; raise DataError if it cannot be read."""
    found, size = hashlib.sha256(), 0
    try:
        with open(path, "rb") as stream:
            changed = os.fstat(stream.fileno()).st_mtime_ns
            while block := stream.read(BLOCK):
                found.update(block)
                size += len(block)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"data is {path!r}: cannot be read ({reason})") from None
    return Input(path, size, found.hexdigest(), changed)


def cut_file(file: Input, format: DocumentFormat, size: int) -> list[Chunk]:
    """Divide a file into chunks of about `size` bytes without splitting documents."""
    if format == "parquet":
        groups = open_parquet(file.path).num_row_groups
        each = file.bytes // max(groups, 1)
        return [Chunk(file.path, format, i, i + 1, each, file) for i in range(groups)]
    cuts = [0]
    if format != "files":
        boundary = _BLANK_LINES if format == "paragraphs" else _LINE_END
        with open(file.path, "rb") as stream:
            while cuts[-1] + size < file.bytes:
                start, seen, cut = cuts[-1] + size, b"", file.bytes
                stream.seek(start)
                while block := stream.read(BLOCK):
                    seen += block
                    found = boundary.search(seen)
                    # the next block may begin with the \n of an \r\n
                    if found and found.end() < len(seen):
                        cut = start + found.end()
                        break
                    tail = len(seen.rstrip())  # only trailing whitespace can start a boundary
                    start, seen = start + tail, seen[tail:]
                cuts.append(cut)
    pairs = itertools.pairwise([*cuts, file.bytes])
    return [Chunk(file.path, format, a, b, b - a, file) for a, b in pairs if b > a]


def open_parquet(path: str) -> ParquetFile:
    """Open a Parquet file; raise DataError if pyarrow is not installed or the file is invalid."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: Parquet needs pyarrow: run pip install pyarrow") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own exceptions, and OSError
        raise _invalid(path, error) from None


def _invalid(path: str, error: Exception) -> DataError:
    return DataError(f"{path} is not a valid Parquet file ({' '.join(str(error).split())[:200]})")


def check_unchanged(file: Input) -> None:
    """Raise DataError if a file has changed since it was first read."""
    try:
        found = os.stat(file.path)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read ({error.strerror})") from None
    if (found.st_size, found.st_mtime_ns) != (file.bytes, file.changed):
        raise DataError(f"{file.path} changed while it was being read")
