"""Size-limited reading and strict parsing of files in an untrusted folder.

Names must be plain, links must stay within the folder, and sizes are checked before reading. The
only exception is the cache of the Hugging Face Hub, where the files in
`models--ORG--NAME/snapshots/REVISION` are links into `models--ORG--NAME/blobs`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias, TypedDict

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
"""Value in a JSON file, as returned by the `json` module. Check its type before you use it."""

JsonObject: TypeAlias = dict[str, Any]
"""JSON object from a published file or from a file that this library wrote."""


class FileDigest(TypedDict):
    """Expected size and SHA-256 hash of a file."""

    bytes: int
    sha256: str


DEPTH_LIMIT = 64
"""Maximum nesting depth of JSON objects and lists."""
VALUE_LIMIT = 2**17
"""Default maximum number of JSON values. In memory, a value takes up to 100 times its bytes in the
file."""

_PLAIN = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_CHUNK = re.compile(rb'(?:[^"]++|%b){1,4096}+' % _STRING.pattern, re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_path(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a path."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} is of type {type(value).__name__}: must be the path of a folder")


@dataclass(frozen=True)
class Untrusted:
    """Reader of untrusted files.

    It raises `error` with a one-line message that names the file and the violated rule.
    """

    error: type[ValueError]

    def there(self, folder: Path, name: str) -> bool:
        """Whether the folder has an entry with this name, even if it is a broken link."""
        if not is_plain(name):
            raise self.error(f"{folder}: {shown(name)} is not a plain file name")
        return os.path.lexists(folder / name)

    def inside(self, folder: Path, name: str) -> Path:
        """Return the resolved path of a regular file. Links must stay within the folder."""
        if not is_plain(name):
            raise self.error(f"{folder}: {shown(name)} is not a plain file name")
        root = Path(os.path.realpath(folder))
        path = Path(os.path.realpath(root / name))
        cache = root.parents[1] if len(root.parents) > 1 else root
        cached = root.parent.name == "snapshots" and cache.name.startswith("models--")
        if not (path.is_relative_to(root) or (cached and path.is_relative_to(cache / "blobs"))):
            raise self.error(f"{folder / name} is a link that leaves the folder")
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            raise self.error(f"{folder / name} cannot be read ({error.strerror})") from None
        if not stat.S_ISREG(mode):
            raise self.error(f"{folder / name} is not a regular file")
        return path

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[BinaryIO]:
        """Open a regular file for reading, without blocking if a pipe has replaced it."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise self.error(f"{path} cannot be read ({error.strerror})") from None
        with open(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise self.error(f"{path} is not a regular file")
            yield stream

    def content(self, path: Path, limit: int) -> bytes:
        """Return the content of a file, which must not exceed `limit` bytes."""
        with self.opened(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                raise self.error(f"{path} has {size} bytes: must have at most {limit}")
            # the file may have grown since its size was read
            return stream.read(limit)

    def json(
        self, data: bytes, where: str, values: int = VALUE_LIMIT, *, decimals: bool = False
    ) -> Json:
        """Parse strict JSON: UTF-8 without duplicate keys, with finite numbers, within the limits.

        If `decimals` is set, numbers other than integers are returned as `Decimal`s with all their
        digits.
        """
        # Check depth and size before parsing, because the JSON parser does not limit them.
        depth = count = 0
        for chunk in _CHUNK.finditer(data):  # in chunks, because `bare` is a copy of its input
            bare = _STRING.sub(b"", chunk[0])
            for mark in bare.translate(None, _NO_BRACKETS)[: 2 * values]:
                depth += 1 if mark in b"[{" else -1
                if depth > DEPTH_LIMIT:
                    raise self.error(f"{where} is nested more than {DEPTH_LIMIT} levels deep")
            count += sum(map(bare.count, (b"[", b"{", b",")))
            if count > values:
                raise self.error(f"{where} has more than {values} values")

        def number(text: str) -> Any:
            if not math.isfinite(value := float(text)):
                raise self.error(f"{where}: {shown(text)} is not a finite number")
            try:
                return Decimal(text) if decimals else value
            except ArithmeticError:  # such as an exponent with twenty digits
                raise self.error(f"{where}: the number {shown(text)} is too small") from None

        return self.parse(data, where, parse_float=number, parse_constant=number)

    def parse(self, text: str | bytes, where: str, **hooks: Any) -> Json:
        """Parse JSON without duplicate keys; the hooks are passed to `json.loads`."""

        def pairs(items: list[tuple[str, Json]]) -> dict[str, Json]:
            found = dict(items)
            # Python keeps the last of several equal keys, but other parsers may keep the first
            if len(found) < len(items):
                seen: set[str] = set()
                twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
                raise self.error(f"{where}: {shown(twice)} appears twice")
            return found

        try:
            decoded = text if isinstance(text, str) else text.decode()
            found: Json = json.loads(decoded, object_pairs_hook=pairs, **hooks)
            return found
        except self.error:
            raise
        except (ValueError, RecursionError) as error:
            raise self.error(f"{where} is not JSON ({brief(error)})") from None

    def json_object(self, path: Path, limit: int, values: int = VALUE_LIMIT) -> JsonObject:
        """Read a JSON file that contains an object and has at most `limit` bytes."""
        content = self.json(self.content(path, limit), str(path), values)
        if not isinstance(content, dict):
            raise self.error(f"{path}: must be an object")
        return content


def is_plain(name: object) -> bool:
    """Whether this is a plain file name or a path of plain names, without "..", "~" or spaces."""
    return isinstance(name, str) and all(_PLAIN.fullmatch(part) for part in name.split("/"))


def shown(value: object) -> str:
    """Format a value from a file for a message: escaped and shortened to about 80 characters."""
    # cut a long value before it is escaped, which can multiply its length
    text = ascii(value[:80] if isinstance(value, str | list) else value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def brief(error: BaseException) -> str:
    """Shorten another library's message for use in ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text[:200])


MISSING: Any = object()
"""Default value that marks a key as required."""


class ObjectKeys:
    """Reader that looks up the keys of an object and records which keys were read.

    The message of an `error` is one line with the file, the key, its value and the violated rule.
    """

    error: type[ValueError] = ValueError

    def __init__(
        self, content: JsonObject | Mapping[str, Any], where: str, prefix: str = ""
    ) -> None:
        """Read only the keys that start with `prefix`, and remove the prefix from their names."""
        self.where, self.prefix, self.taken = where, prefix, set[str]()
        self.content = {
            key.removeprefix(prefix): value
            for key, value in content.items()
            if key.startswith(prefix)
        }

    def fail(self, name: str, value: object, rule: str) -> NoReturn:
        state = "is missing" if value is MISSING else f"is {shown(value)}"
        raise self.error(f"{self.where}: {self.prefix}{name} {state}: {rule}")

    def take(self, name: str, default: Any = None) -> Any:
        """Return the raw value of a key, and mark the key as read."""
        self.taken.add(name)
        return self.content.get(name, default)

    def unread(self) -> Iterator[str]:
        """Yield the names of the keys that were not read."""
        return (name for name in self.content if name not in self.taken)
