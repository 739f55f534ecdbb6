r"""Prepared folders, which contain the tokens of a corpus and an index of its documents.

    manifest.json      sizes, counts, and the sha256 of each file and of itself
    tokenizer.json     the tokenizer, with a token `eos` that ends each document
    train-00000.bin    consecutive tokens, little-endian uint16 or uint32, by vocabulary size
    train-index.bin    i64: positions of the tokens that end documents
    val-...            the same files for the held-out documents

A part is a single stream: eos, document, eos, document, eos. Document d is between the eos tokens
at `index[d]` and `index[d + 1]`. It begins with the tokens that the tokenizer prepends, if any.

Tokens are copied with pread instead of being memory-mapped. Therefore, truncating a file raises an
error instead of killing the process (SIGBUS), and the data does not count toward the memory of the
process. You can also map the files yourself: `np.memmap(file, "<u2", "r")`.
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
"""Name of a file that exists until the preparation of a folder is finished."""
TOKENIZER = "tokenizer.json"
FORMAT = "transformer_jax tokens, 1"
PARTS = ("train", "val")
MANIFEST_LIMIT = 64 * 2**20
"""Maximum size of a manifest, in bytes."""
BLOCK = 2**20
"""Number of bytes to read at a time when checking a file."""

_FILES = Untrusted(DataError)


def index_file(part: str) -> str:
    """Return the name of the index file of a part."""
    return f"{part}-index.bin"


def shard_file(part: str, number: int) -> str:
    """Return the name of a file that contains one shard of tokens."""
    return f"{part}-{number:05d}.bin"


@value_class
class Part:
    """Part of a prepared folder, which threads can safely share.

    Attributes:
        folder: the prepared folder.
        name: the name of the part, "train" or "val".
        tokens: the number of tokens.
        documents: the number of documents.
        characters: the number of characters in all documents, without end tokens.
        shard_tokens: the number of tokens per file. The last file can have fewer.
        dtype: the dtype of the tokens in the files.
        begins: whether each document begins with tokens that the tokenizer prepends, after the
            previous eos.
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
            start: the index of the first token to copy.
            into: the array to fill with the n tokens from index `start`.

        Raises:
            DataError: if a file cannot be read or has become shorter.
        """
        done = 0
        while done < len(into):
            shard, at = divmod(start + done, self.shard_tokens)
            part = into[done : done + self.shard_tokens - at]
            size, offset = part.nbytes, at * self.dtype.itemsize
            try:
                with self._opening:
                    if shard not in self._open:
                        file = self.folder / shard_file(self.name, shard)
                        self._open[shard] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                # unlike read, pread does not use the file position, which all threads share
                found = os.preadv(self._open[shard], [part.view(np.uint8)], offset)
            except OSError as error:
                where = self.folder / shard_file(self.name, shard)
                raise DataError(f"{where} cannot be read ({error.strerror})") from None
            if found < size:
                where = self.folder / shard_file(self.name, shard)
                rule = f"ends before byte {offset + size}, so it was truncated after it was checked"
                raise DataError(f"{where}: {rule}")
            done += len(part)

    def __del__(self) -> None:
        # the attribute would create the dict if no file has been opened
        for handle in self.__dict__.get("_open", {}).values():
            os.close(handle)

    def bounds(self) -> np.ndarray:  # i64[documents + 1]
        """Return the memory-mapped positions of the tokens that end documents."""
        shape = (self.documents + 1,)
        return np.memmap(self.folder / index_file(self.name), "<i8", "r", shape=shape)


@value_class
class Corpus:
    """Prepared folder with a valid manifest, whose files `check` verifies.

    Attributes:
        path: the folder.
        sha256: the hash of the manifest, which contains the hash of each file.
        tokenizer: the tokenizer of the corpus.
        train: the training part.
        val: the held-out part.
        files: the size and hash of each file, keyed by name.
    """

    path: Path
    sha256: str
    tokenizer: Tokenizer
    train: Part
    val: Part
    files: Mapping[str, FileDigest]

    def check(self, vocab_size: int | None = None) -> None:
        """Read the files and raise DataError if one of them differs from the manifest.

        All IDs must be below `vocab_size`. None uses the vocabulary size of the tokenizer.
        """
        limit = self.tokenizer.vocab_size if vocab_size is None else vocab_size
        dtype = self.train.dtype
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            jobs = []
            for name, entry in self.files.items():
                tokens = name.endswith(".bin") and not name.endswith("index.bin")
                file = self.path / name
                jobs.append(pool.submit(_check_file, file, entry, dtype if tokens else None, limit))
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                # do not read the remaining files
                pool.shutdown(cancel_futures=True)
                raise


def is_prepared(path: str | Path) -> bool:
    """Whether a folder is a prepared folder, even if its preparation is not finished."""
    folder = Path(path)
    complete = (folder / MANIFEST).is_file() and (folder / TOKENIZER).is_file()
    return complete or (folder / PLAN).is_file()


def prepared_folders(data: str) -> tuple[str, ...]:
    """Return the prepared folders that `TrainConfig.data` names, or () if it names text files.

    Names are separated by commas. Raises DataError if only some of them are prepared folders.
    """
    # the name of a folder may itself contain a comma
    if is_prepared(data):
        return (data,)
    names = tuple(data.split(","))
    if len(names) == 1 or os.path.exists(data) or not any(map(is_prepared, names)):
        return ()
    for name in names:
        if not is_prepared(name):
            rule = "is not a prepared folder; create one with python -m transformer_jax prepare"
            raise DataError(f"data is {data!r}: {name!r} {rule}")
    return names


def open_corpus(path: str | Path) -> Corpus:
    """Open a prepared folder; raise DataError if its manifest or tokenizer is damaged."""
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        rule = f"preparation is unfinished ({MANIFEST} is missing); run the prepare command again"
        raise DataError(f"{folder}: {rule}")
    content = _FILES.content(folder / MANIFEST, MANIFEST_LIMIT)
    manifest: JsonObject = _FILES.json_object(folder / MANIFEST, MANIFEST_LIMIT, 2**22)
    if manifest.get("format") != FORMAT:
        raise DataError(f"{folder / MANIFEST}: must have format {FORMAT!r}")
    if content.decode() != sealed(manifest):
        raise DataError(f"{folder / MANIFEST} has the wrong SHA-256 checksum, so it is damaged")
    _check_file(folder / TOKENIZER, manifest["files"][TOKENIZER], None, 0)
    # a character of the tokenizer may be a lone surrogate
    tokenizer = tokenizer_from_json((folder / TOKENIZER).read_text("utf-8", "surrogatepass"))
    dtype = np.dtype(manifest["dtype"])
    shared = dict(
        dtype=dtype,
        shard_tokens=manifest["shard_tokens"],
        begins=manifest["settings"].get("begins", False),
    )
    parts = {
        name: Part(folder, name, **shared, **counts) for name, counts in manifest["parts"].items()
    }
    sha256 = hashlib.sha256(content).hexdigest()
    return Corpus(folder, sha256, tokenizer, parts["train"], parts["val"], manifest["files"])


def sealed(manifest: JsonObject) -> str:
    """Return a manifest as JSON text whose last entry is the hash of all other entries."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps(content | {"sha256": digest}, indent=1) + "\n"


def check_same_tokenizer(corpora: list[Corpus]) -> None:
    """Raise DataError if two folders were prepared with different tokenizers."""
    first = corpora[0]
    for other in corpora[1:]:
        if other.tokenizer.to_json() != first.tokenizer.to_json():
            rule = f"differs from that of {first.path}; prepare it with `tokenizer={first.path}`"
            raise DataError(f"{other.path}: its tokenizer {rule}")


def end_id(tokenizer: Tokenizer) -> int:
    """Return the ID of the token that ends a document."""
    return special_ids(tokenizer)["eos"]


def scan_file(
    file: Path, look: Callable[[np.ndarray], None] | None = None, dtype: np.dtype | None = None
) -> FileDigest:
    """Return the size and hash of a file, and pass its tokens to `look` block by block."""
    found, size = hashlib.sha256(), 0
    try:
        with open(file, "rb", buffering=0) as stream:
            buffer = bytearray(BLOCK)
            view = memoryview(buffer)
            while count := stream.readinto(buffer):
                found.update(view[:count])
                size += count
                if look is not None:
                    # a damaged file may end in the middle of a token
                    whole = count - count % np.dtype(dtype).itemsize
                    look(np.frombuffer(view[:whole], dtype))
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})") from None
    return {"bytes": size, "sha256": found.hexdigest()}


def _check_file(file: Path, entry: FileDigest, dtype: np.dtype | None, limit: int) -> None:
    """Raise DataError if a file has the wrong size or hash, or contains an ID >= `limit`."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})") from None
    if size != entry["bytes"]:
        raise DataError(
            f"{file} has {size} bytes, but {entry['bytes']} were written, so it is damaged"
        )
    largest = -1

    def look(tokens: np.ndarray) -> None:
        nonlocal largest
        largest = max(largest, int(tokens.max(initial=0)))

    found = scan_file(file, None if dtype is None else look, dtype)
    if found["sha256"] != entry["sha256"]:
        raise DataError(f"{file} has the wrong SHA-256 checksum, so it is damaged")
    if dtype is not None and largest >= limit:
        raise DataError(
            f"{file}: contains token {largest}: must be below the vocabulary size {limit}"
        )
