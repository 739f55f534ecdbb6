"""Files of a folder that is taken for hostile: found, read within limits, and parsed strictly.

A name is plain, a link stays in the folder, and a size is known before anything is read. One
exception: the cache of the Hugging Face hub, whose `models--ORG--NAME/snapshots/REVISION` is all
links into `models--ORG--NAME/blobs`.
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
"""A value of a JSON file, as `json` reads it: what it is must be asked before it is used."""

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON that is asked field by field: one of a published file, or one of ours."""


class FileDigest(TypedDict):
    """Say what a file must hold."""

    bytes: int
    sha256: str


DEPTH_LIMIT = 64
"""Objects and lists within each other in any JSON."""
VALUE_LIMIT = 2**17
"""Values in a JSON, which take up to a hundred times their bytes, unless more are allowed."""

_PLAIN = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_CHUNK = re.compile(rb'(?:[^"]++|%b){1,4096}+' % _STRING.pattern, re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_path(name: str, value: object) -> None:
    """Raise ValueError unless this is a path."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} is a {type(value).__name__}: must be the path of a folder")


@dataclass(frozen=True)
class Untrusted:
    """Read such files, and raise `error` with one line that names file and rule."""

    error: type[ValueError]

    def there(self, folder: Path, name: str) -> bool:
        """Whether there is such an entry, be it a link to nothing."""
        if not is_plain(name):
            raise self.error(f"{folder}: {shown(name)} is no plain file name")
        return os.path.lexists(folder / name)

    def inside(self, folder: Path, name: str) -> Path:
        """Return the regular file of that name, links resolved; an error if they lead elsewhere."""
        if not is_plain(name):
            raise self.error(f"{folder}: {shown(name)} is no plain file name")
        root = Path(os.path.realpath(folder))
        path = Path(os.path.realpath(root / name))
        cache = root.parents[1] if len(root.parents) > 1 else root
        cached = root.parent.name == "snapshots" and cache.name.startswith("models--")
        if not (path.is_relative_to(root) or (cached and path.is_relative_to(cache / "blobs"))):
            raise self.error(f"{folder / name}: a link that leaves the folder")
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            raise self.error(f"{folder / name}: cannot be read ({error.strerror})") from None
        if not stat.S_ISREG(mode):
            raise self.error(f"{folder / name}: not a regular file")
        return path

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[BinaryIO]:
        """Open a file to read, as it was found: whatever else has come there is not waited for."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise self.error(f"{path}: cannot be read ({error.strerror})") from None
        with open(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise self.error(f"{path}: not a regular file")
            yield stream

    def content(self, path: Path, limit: int) -> bytes:
        """Return all of a file of at most `limit` bytes."""
        with self.opened(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                raise self.error(f"{path}: has {size} bytes: at most {limit} are read")
            return stream.read(limit)

    def json(
        self, data: bytes, where: str, values: int = VALUE_LIMIT, *, decimals: bool = False
    ) -> Json:
        """Return strict JSON: UTF-8, no key twice, finite numbers, within the limits.

        With `decimals`, a number that is no integer is a `Decimal`, as it is written.
        """
        self._check_limits(data, where, values)

        def number(text: str) -> Any:
            if not math.isfinite(value := float(text)):
                raise self.error(f"{where}: {shown(text)} is not a finite number")
            try:
                return Decimal(text) if decimals else value
            except ArithmeticError:  # an exponent of twenty digits
                raise self.error(f"{where}: {shown(text)} is too small a number") from None

        return self.parse(data, where, parse_float=number, parse_constant=number)

    def parse(self, text: str | bytes, where: str, **hooks: Any) -> Json:
        """Return JSON, of which no object has a key twice; `json.loads` takes the hooks."""

        def pairs(items: list[tuple[str, Json]]) -> dict[str, Json]:
            found = dict(items)
            if len(found) < len(items):
                seen: set[str] = set()
                twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
                raise self.error(f"{where}: {shown(twice)} is there twice")
            return found

        try:
            decoded = text if isinstance(text, str) else text.decode()
            found: Json = json.loads(decoded, object_pairs_hook=pairs, **hooks)
            return found
        except self.error:
            raise
        except (ValueError, RecursionError) as error:
            raise self.error(f"{where}: not JSON ({brief(error)})") from None

    def json_object(self, path: Path, limit: int, values: int = VALUE_LIMIT) -> JsonObject:
        """Read the object in a JSON file of at most `limit` bytes."""
        content = self.json(self.content(path, limit), str(path), values)
        if not isinstance(content, dict):
            raise self.error(f"{path}: must be an object")
        return content

    def _check_limits(self, data: bytes, where: str, limit: int) -> None:
        """Before the parser runs, whose own limits are the interpreter's stack and the memory."""
        depth = values = 0
        for chunk in _CHUNK.finditer(data):  # in chunks, for what has no strings is a copy
            bare = _STRING.sub(b"", chunk[0])
            for mark in bare.translate(None, _NO_BRACKETS)[: 2 * limit]:
                depth += 1 if mark in b"[{" else -1
                if depth > DEPTH_LIMIT:
                    raise self.error(f"{where}: nested deeper than {DEPTH_LIMIT}")
            values += sum(map(bare.count, (b"[", b"{", b",")))
            if values > limit:
                raise self.error(f"{where}: has more than {limit} values")


def is_plain(name: object) -> bool:
    """Tell whether this is a file's name, or a path of such names, that leads nowhere else."""
    return isinstance(name, str) and all(_PLAIN.fullmatch(part) for part in name.split("/"))


def shown(value: object) -> str:
    """Show what a file says, for a message: no control characters, and not all of it."""
    text = ascii(value[:80] if isinstance(value, str | list) else value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def brief(error: BaseException) -> str:
    """Shorten a library's message, for one of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text[:200])


MISSING: Any = object()
"""The default of a key that must be there."""


class ObjectKeys:
    """Keys of an object, read one by one; a key that nobody read is an error.

    `error` is one line that names the file, the key, its value and the rule.
    """

    error: type[ValueError] = ValueError

    def __init__(
        self, content: JsonObject | Mapping[str, Any], where: str, prefix: str = ""
    ) -> None:
        """Take the keys that begin with `prefix`, which is left out of their names here."""
        self.where, self.prefix, self.taken = where, prefix, set[str]()
        self.content = {
            key.removeprefix(prefix): value
            for key, value in content.items()
            if key.startswith(prefix)
        }

    def fail(self, name: str, value: object, rule: str) -> NoReturn:
        """Raise the error of a key."""
        said = "is missing" if value is MISSING else f"is {shown(value)}"
        raise self.error(f"{self.where}: {self.prefix}{name} {said}: {rule}")

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a key as it stands in the file."""
        self.taken.add(name)
        return self.content.get(name, default)

    def unread(self) -> Iterator[str]:
        """Yield the names of the keys that nobody read."""
        return (name for name in self.content if name not in self.taken)
