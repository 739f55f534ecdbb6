"""Read documents out of files, a chunk at a time.

A chunk is some documents of a file, one after the other; several processes read one each. Where
chunks begin follows from the files alone, whoever reads them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from transformer_jax.config.prepare import DocumentFormat
from transformer_jax.tokenizers.plain_text import read_text, split_documents
from transformer_jax.tokenizers.utf8 import DataError, utf8
from transformer_jax.untrusted_files import Untrusted

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

BLOCK = 2**20
"""Bytes that are read at once."""

_LINE_END = re.compile(rb"\r\n?+|\n")
_BLANK_LINES = re.compile(rb"(?:\r\n?+|\n)(?:[ \t\f\v]*+(?:\r\n?+|\n))+")


class Input(NamedTuple):
    """Say what a file was when it was first read."""

    path: str
    bytes: int
    sha256: str
    changed: int
    """When it last changed, in nanoseconds."""


class Chunk(NamedTuple):
    """Name some documents of a file: its bytes, or the row groups of a Parquet file."""

    path: str
    format: DocumentFormat
    start: int
    end: int
    bytes: int
    """How much of the file it is, for the progress."""
    of: Input


@dataclass(frozen=True)
class Reader:
    """Read the documents of chunks."""

    field: str
    """The field or column of a document, in JSON lines and Parquet."""
    text_errors: str
    """strict: a DataError for invalid UTF-8; replace: U+FFFD in its place."""

    def documents(self, chunk: Chunk) -> Iterator[str]:
        """Yield the documents that are not empty; DataError names the file and the place."""
        if chunk.format == "parquet":
            file = open_parquet(chunk.path)
            if self.field not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"{chunk.path}: has no column {self.field!r} (there are {names})")
            for group in range(chunk.start, chunk.end):
                try:
                    values = file.read_row_group(group, columns=[self.field]).column(0).to_pylist()
                except Exception as error:  # the library raises its own, and OSError
                    raise _damaged(chunk.path, error) from None
                for row, value in enumerate(values):
                    yield from self._text(value, f"{chunk.path}: row {row} of row group {group}")
            return
        try:
            with open(chunk.path, "rb") as stream:
                stream.seek(chunk.start)
                content = stream.read(chunk.end - chunk.start)
        except OSError as error:
            raise DataError(f"{chunk.path}: cannot be read ({error.strerror})") from None
        if chunk.format != "jsonl":
            text = read_text(content, chunk.path, self.text_errors, chunk.start)
            yield from split_documents(text, chunk.format)
            return
        # `str.splitlines` would cut at U+2028 too, which a JSON string may contain
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
        """Yield a document if it is not empty; DataError where it is no text."""
        if not isinstance(value, str):
            found = "is missing" if value is None else f"is a {type(value).__name__}"
            raise DataError(f"{where}: {self.field} {found}: must be a text")
        if self.text_errors == "replace":
            value = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        try:
            utf8(value)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if value.strip():
            yield value


def read_input(path: str) -> Input:
    """Read a file once for its size and hash; DataError where it cannot be read."""
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


def cut_file(given: Input, format: DocumentFormat, size: int) -> list[Chunk]:
    """Return the chunks of a file, of about `size` bytes; a document is never cut."""
    if format == "parquet":
        groups = open_parquet(given.path).num_row_groups
        each = given.bytes // max(groups, 1)
        return [Chunk(given.path, format, i, i + 1, each, given) for i in range(groups)]
    cuts = [0]
    if format != "files":
        boundary = _BLANK_LINES if format == "paragraphs" else _LINE_END
        with open(given.path, "rb") as stream:
            while cuts[-1] + size < given.bytes:
                cuts.append(_next_boundary(stream, cuts[-1] + size, boundary, given.bytes))
    ends = [*cuts[1:], given.bytes]
    pairs = zip(cuts, ends, strict=True)
    return [Chunk(given.path, format, a, b, b - a, given) for a, b in pairs if b > a]


def _next_boundary(stream: BinaryIO, start: int, boundary: re.Pattern[bytes], end: int) -> int:
    """Return where the first document after byte `start` begins; `end` where there is none."""
    stream.seek(start)
    seen = b""
    while block := stream.read(BLOCK):
        seen += block
        found = boundary.search(seen)
        if found and found.end() < len(seen):  # what follows a \r may be its \n
            return start + found.end()
        tail = len(seen.rstrip())  # only what ends the block may go on in the next one
        start, seen = start + tail, seen[tail:]
    return end


def open_parquet(path: str) -> ParquetFile:
    """Open a Parquet file; DataError without pyarrow, or where the file is none."""
    try:
        import pyarrow.parquet
    except ImportError:
        rule = "reading Parquet needs pyarrow: pip install pyarrow"
        raise DataError(f"{path}: {rule}") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except Exception as error:  # the library raises its own, and OSError
        raise _damaged(path, error) from None


def _damaged(path: str, error: Exception) -> DataError:
    return DataError(f"{path}: not a whole Parquet file ({' '.join(str(error).split())[:200]})")


def check_unchanged(given: Input) -> None:
    """Raise DataError where a file has changed since it was first read."""
    try:
        found = os.stat(given.path)
    except OSError as error:
        raise DataError(f"{given.path}: cannot be read ({error.strerror})") from None
    if (found.st_size, found.st_mtime_ns) != (given.bytes, given.changed):
        raise DataError(f"{given.path}: has changed while it was read")
