r"""Read a prepared folder: the tokens of a corpus in files, with where its documents end.

    manifest.json      what is here: sizes, counts, and the sha256 of every file and of itself
    tokenizer.json     the tokenizer, with a token `eos` that ends a document
    train-00000.bin    tokens, little-endian uint16 or uint32 by the vocabulary, one after the other
    train-index.bin    i64: where the tokens that end documents stand
    val-...            the same of the documents that are held out

A part is one stream: eos, document, eos, document, eos. Document d stands between tokens
`index[d]` and `index[d + 1]`, which are eos; it begins with what its tokenizer puts before a
text, if anything.

Tokens are read at their place and copied (pread), not through mapped memory: a file that is cut
short meanwhile is then an error and not the end of the process (SIGBUS), and what was read does not
count as memory of the process. The files map as they are: `np.memmap(file, "<u2", "r")`.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np

from transformer_jax.tokenizers.special import special_ids, tokenizer_from_json
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.untrusted_files import FileDigest, JsonObject, Untrusted
from transformer_jax.values import value_class

MANIFEST = "manifest.json"
PLAN = "prepare.json"
"""In a folder whose preparation has not ended."""
TOKENIZER = "tokenizer.json"
FORMAT = "transformer_jax tokens, 1"
PARTS = ("train", "val")
MANIFEST_LIMIT = 64 * 2**20
"""Largest manifest that is read, in bytes."""
BLOCK = 2**20
"""Bytes that are read at once when a file is checked."""

_FILES = Untrusted(DataError)


def index_file(part: str) -> str:
    """Return the name of the index of a part."""
    return f"{part}-index.bin"


def shard_file(part: str, number: int) -> str:
    """Return the name of a file of tokens."""
    return f"{part}-{number:05d}.bin"


@value_class
class Part:
    """Read tokens of one part of a folder; threads may share it.

    Attributes:
        folder: where its files are.
        name: "train" or "val".
        tokens: how many there are.
        documents: how many there are.
        characters: of all documents, without their ends.
        shard_tokens: tokens of a file; the last one has fewer.
        dtype: of a token in the files.
        begins: whether the tokenizer's own tokens begin each document, after the end of the one
            before.
    """

    folder: Path
    name: str
    tokens: int
    documents: int
    characters: int
    shard_tokens: int
    dtype: np.dtype
    begins: bool = False

    @cached_property
    def _open(self) -> dict[int, int]:
        return {}

    @cached_property
    def _opening(self) -> threading.Lock:
        return threading.Lock()

    def read(
        self,
        start: int,
        into: np.ndarray,  # dtype[n], contiguous
    ) -> None:
        """Copy tokens into an array.

        Args:
            start: number of the first token.
            into: dtype[n], contiguous, which gets tokens `start` to `start + n`.

        Raises:
            DataError: if a file cannot be read, or has become shorter.
        """
        done = 0
        while done < len(into):
            shard, at = divmod(start + done, self.shard_tokens)
            part = into[done : done + self.shard_tokens - at]
            size, offset = part.nbytes, at * self.dtype.itemsize
            try:
                # pread has no position that threads would share
                found = os.preadv(self._handle(shard), [part.view(np.uint8)], offset)
            except OSError as error:
                where = self.folder / shard_file(self.name, shard)
                raise DataError(f"{where}: cannot be read ({error.strerror})") from None
            # a mapped file that was cut short would end the process with SIGBUS instead
            if found < size:
                where = self.folder / shard_file(self.name, shard)
                rule = f"ends before byte {offset + size}: was cut short after it was checked"
                raise DataError(f"{where}: {rule}")
            done += len(part)

    def _handle(self, shard: int) -> int:
        """Return the open file of a shard."""
        handle = self._open.get(shard)
        if handle is None:
            with self._opening:
                if shard not in self._open:
                    file = self.folder / shard_file(self.name, shard)
                    self._open[shard] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                handle = self._open[shard]
        return handle

    def __del__(self) -> None:
        for handle in self.__dict__.get("_open", {}).values():
            os.close(handle)

    def bounds(self) -> np.ndarray:  # i64[documents + 1]
        """Return where the tokens that end documents stand, mapped from the file."""
        shape = (self.documents + 1,)
        return np.memmap(self.folder / index_file(self.name), "<i8", "r", shape=shape)


@value_class
class Corpus:
    """Hold a prepared folder whose manifest is whole; `check` looks at its files.

    Attributes:
        path: the folder.
        sha256: of the manifest, and so of all that is here.
        tokenizer: what made the tokens.
        train: the part that is trained on.
        val: the part that is held out.
        files: size and hash of each file by name.
    """

    path: Path
    sha256: str
    tokenizer: Tokenizer
    train: Part
    val: Part
    files: Mapping[str, FileDigest]

    def check(self, vocab_size: int | None = None) -> None:
        """Read every file and raise DataError for the first that is not as it was written.

        Ids must be below the vocabulary of the tokenizer, or below `vocab_size`.
        """
        limit = self.tokenizer.vocab_size if vocab_size is None else vocab_size
        dtype = self.train.dtype
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            jobs = []
            for name, said in self.files.items():
                tokens = name.endswith(".bin") and not name.endswith("index.bin")
                file = self.path / name
                jobs.append(pool.submit(_check_file, file, said, dtype if tokens else None, limit))
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def is_prepared(path: str | Path) -> bool:
    """Say whether a folder was prepared, or is on the way to be."""
    folder = Path(path)
    whole = (folder / MANIFEST).is_file() and (folder / TOKENIZER).is_file()
    return whole or (folder / PLAN).is_file()


def prepared_folders(data: str) -> tuple[str, ...]:
    """Return the prepared folders that `TrainConfig.data` names; none where it names a text.

    Several have commas between them: DataError where one of them is none.
    """
    if is_prepared(data):
        return (data,)
    names = tuple(data.split(","))
    if len(names) == 1 or os.path.exists(data) or not any(map(is_prepared, names)):
        return ()
    for name in names:
        if not is_prepared(name):
            rule = "is no prepared folder: python -m transformer_jax prepare makes one"
            raise DataError(f"data is {data!r}: {name!r} {rule}")
    return names


def open_corpus(path: str | Path) -> Corpus:
    """Read the manifest and the tokenizer of a prepared folder; DataError if either is damaged."""
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        rule = f"its preparation has not ended ({MANIFEST} is missing): give the command again"
        raise DataError(f"{folder}: {rule}")
    content = _FILES.content(folder / MANIFEST, MANIFEST_LIMIT)
    manifest: JsonObject = _FILES.json_object(folder / MANIFEST, MANIFEST_LIMIT, 2**22)
    if manifest.get("format") != FORMAT:
        raise DataError(f"{folder / MANIFEST}: must have format {FORMAT!r}")
    if content.decode() != sealed(manifest):
        raise DataError(f"{folder / MANIFEST}: sha256 mismatch: it is damaged")
    _check_file(folder / TOKENIZER, manifest["files"][TOKENIZER], None, 0)
    tokenizer = tokenizer_from_json((folder / TOKENIZER).read_text("utf-8", "surrogatepass"))
    dtype = np.dtype(manifest["dtype"])
    given = dict(dtype=dtype, shard_tokens=manifest["shard_tokens"])
    begins = manifest["settings"].get("begins", False)
    parts = {
        name: Part(folder, name, begins=begins, **given, **said)
        for name, said in manifest["parts"].items()
    }
    sha256 = hashlib.sha256(content).hexdigest()
    return Corpus(folder, sha256, tokenizer, parts["train"], parts["val"], manifest["files"])


def sealed(manifest: JsonObject) -> str:
    """Return the text of a manifest with its own hash, over all that is before it, at its end."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps(content | {"sha256": digest}, indent=1) + "\n"


def check_same_tokenizer(corpora: list[Corpus]) -> None:
    """Raise DataError where two folders were prepared with different tokenizers."""
    first = corpora[0]
    for other in corpora[1:]:
        if other.tokenizer.to_json() != first.tokenizer.to_json():
            rule = f"must be that of {first.path}: prepare it with `tokenizer={first.path}`"
            raise DataError(f"{other.path}: tokenizer {rule}")


def end_id(tokenizer: Tokenizer) -> int:
    """Return the token that ends a document."""
    return special_ids(tokenizer)["eos"]


def scan_file(
    file: Path, look: Callable[[np.ndarray], None] | None = None, dtype: np.dtype | None = None
) -> FileDigest:
    """Return the size and the hash of a file; `look` is shown its tokens, some at a time."""
    found, size = hashlib.sha256(), 0
    try:
        with open(file, "rb", buffering=0) as stream:
            buffer = bytearray(BLOCK)
            view = memoryview(buffer)
            while count := stream.readinto(buffer):
                found.update(view[:count])
                size += count
                if look is not None:
                    whole = count - count % np.dtype(dtype).itemsize
                    look(np.frombuffer(view[:whole], dtype))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
    return {"bytes": size, "sha256": found.hexdigest()}


def _check_file(file: Path, said: FileDigest, dtype: np.dtype | None, limit: int) -> None:
    """Raise DataError where a file has another size or hash, or an id of `limit` or more."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
    if size != said["bytes"]:
        raise DataError(f"{file}: has {size} bytes, {said['bytes']} were written: it is damaged")
    largest = -1

    def look(tokens: np.ndarray) -> None:
        nonlocal largest
        largest = max(largest, int(tokens.max(initial=0)))

    found = scan_file(file, None if dtype is None else look, dtype)
    if found["sha256"] != said["sha256"]:
        raise DataError(f"{file}: sha256 mismatch: it is damaged")
    if dtype is not None and largest >= limit:
        raise DataError(f"{file}: has token {largest}: must be below the vocabulary of {limit}")
