"""Write a prepared folder: read documents in several processes, and append their tokens in order.

What is written follows from the files and the settings alone, not from the number of processes, nor
from where it was interrupted. While it is written the folder holds besides:

    prepare.json    the settings, and the size and sha256 of every file that is read
    progress.json   how many chunks are in the files of tokens, and how long those then are
    lock            held by the process that is writing

What is in the files beyond `progress.json` is cut off when the command is given again. The manifest
is written last, and only a folder with a manifest is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np

from transformer_jax.config import ConfigError
from transformer_jax.config.fields import check_new_folder, fail
from transformer_jax.config.prepare import TRAINED, PrepareConfig
from transformer_jax.corpus.documents import (
    Chunk,
    Input,
    Reader,
    check_unchanged,
    cut_file,
    read_input,
)
from transformer_jax.corpus.folder import (
    FORMAT,
    MANIFEST,
    PARTS,
    PLAN,
    TOKENIZER,
    Corpus,
    end_id,
    index_file,
    open_corpus,
    scan_file,
    sealed,
    shard_file,
)
from transformer_jax.durable_files import locked, sync, write_file
from transformer_jax.tokenizers.special import (
    encode_text,
    frame,
    tokenizer_from_json,
    with_special_tokens,
)
from transformer_jax.tokenizers.trained import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
)
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.untrusted_files import JsonObject

CHUNK_BYTES = 2**22
"""About how much of a file a process reads at once."""

RECORD_SECONDS = 2.0
"""How much work an interruption costs at most, with what the processes were reading."""

PROGRESS = "progress.json"

Item = TypeVar("Item")
Found = TypeVar("Found")


class Progress(NamedTuple):
    """Say how far a preparation is."""

    phase: str
    done: int
    """Bytes of the files."""
    total: int
    documents: int


Report = Callable[[Progress], None]


def prepare(
    config: PrepareConfig,
    out: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    workers: int = 1,
    report: Report = lambda progress: None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Corpus:
    """Write a folder of tokens, or go on with it where it was interrupted, and return it opened.

    Args:
        config: the files, their form and the tokenizer.
        out: the folder.
        tokenizer: given where `config.tokenizer` names none that is made here.
        workers: with more than one, each is a process of its own, and the calling program's main
            module must be one that can be imported.
        report: is told how far it is.
        chunk_bytes: of a file, how many bytes a worker takes at a time.

    Raises:
        ConfigError: if the tokenizer is missing or of no use, or `out` cannot be made.
        DataError: if a file cannot be used.
    """
    if (tokenizer is None) != (config.tokenizer in TRAINED):
        raise ConfigError(f"tokenizer is {config.tokenizer!r}: must be given where it is not made")
    if workers < 1:
        fail("workers", workers, "must be at least 1")
    check_new_folder("out", str(out))
    folder = Path(out)
    sizes = [os.path.getsize(path) if os.path.exists(path) else 0 for path in config.data]
    workers = min(workers, -(-sum(sizes) // chunk_bytes) or 1)
    with _locked_folder(folder), _Workers(workers) as pool:
        inputs = list(_counted("reading", pool.map(read_input, config.data), sizes, report))
        plan = _plan(config, inputs, tokenizer, chunk_bytes)
        _claim(folder, plan)
        if not (folder / MANIFEST).exists():
            try:
                formats = [config.format_of(path) for path in config.data]
                pairs = zip(inputs, formats, strict=True)
                chunks = [c for i, format in pairs for c in cut_file(i, format, chunk_bytes)]
                work = _Work(folder, config, chunks, pool, report)
                work.write_tokenizer(tokenizer)
                work.encode()
                work.finish(plan)
            except _UnfinishedDataError:
                raise
            except DataError:  # these files and settings make no folder: it would be in the way
                for file in folder.iterdir():
                    if file.name != "lock":
                        file.unlink()
                raise
        for name in (PROGRESS, PLAN):
            (folder / name).unlink(missing_ok=True)
    return open_corpus(folder)


class _UnfinishedDataError(DataError):
    """Report what the same command may go on after."""


class _Encoded(NamedTuple):
    """Hold the tokens of a chunk's documents in one part, each document with its end."""

    tokens: np.ndarray  # dtype[n]
    ends: np.ndarray  # i64[documents]: where their last tokens stand
    characters: int


@dataclasses.dataclass(frozen=True)
class _Encoder:
    """Turn chunks into tokens, by the tokenizer of a folder."""

    folder: Path
    reader: Reader
    val_fraction: float

    def __call__(self, chunk: Chunk) -> dict[str, _Encoded]:
        tokenizer = _tokenizer_in(self.folder)
        first, end, dtype = frame(tokenizer).first, end_id(tokenizer), token_dtype(tokenizer)
        found: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
        characters = dict.fromkeys(PARTS, 0)
        for number, text in enumerate(self.reader.documents(chunk)):
            try:
                ids = encode_text(tokenizer, text)
            except DataError as error:
                where = f"{chunk.path}: document {number} from byte {chunk.start} on"
                raise DataError(f"{where}: {error}") from None
            if len(ids) == 0:
                continue
            if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
                wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0]
                rule = f"must be below the vocabulary of {tokenizer.vocab_size}"
                raise DataError(f"{chunk.path}: the tokenizer gave token {wrong}: {rule}")
            part = part_of(text, self.val_fraction)
            found[part].append(np.concatenate([first, ids, [end]]).astype(dtype))
            characters[part] += len(text)
        check_unchanged(chunk.of)
        joined = {}
        for part in PARTS:
            ends = np.cumsum([len(ids) for ids in found[part]], dtype=np.int64) - 1
            tokens = np.concatenate(found[part]) if found[part] else np.zeros(0, dtype)
            joined[part] = _Encoded(tokens, ends, characters[part])
        return joined


def part_of(text: str, val_fraction: float) -> str:
    """Return "val" for a share of all texts, by their hash: the same text is never in both."""
    return "val" if _hash(text) < val_fraction * 2**64 else "train"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _hashes(reader: Reader, chunk: Chunk) -> list[int]:
    return [_hash(text) for text in reader.documents(chunk)]


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return what a file of tokens holds: uint16 where every id fits, else uint32."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


@lru_cache(maxsize=1)
def _tokenizer_in(folder: Path) -> Tokenizer:
    return tokenizer_from_json((folder / TOKENIZER).read_text("utf-8", "surrogatepass"))


def _letters(reader: Reader, chunk: Chunk) -> frozenset[str]:
    """Return the characters of a chunk."""
    return frozenset("".join({letter for text in reader.documents(chunk) for letter in text}))


def _training_text(reader: Reader, val_fraction: float, chunk: Chunk) -> str:
    """Return the documents of a chunk that are not held out, a line or more each."""
    texts = (text for text in reader.documents(chunk) if part_of(text, val_fraction) == "train")
    return "".join(f"{text}\n" for text in texts)


class _Work:
    """Hold what the steps of one preparation share."""

    def __init__(
        self,
        folder: Path,
        config: PrepareConfig,
        chunks: list[Chunk],
        pool: _Workers,
        report: Report,
    ) -> None:
        self.folder, self.config, self.chunks = folder, config, chunks
        self.pool, self.report = pool, report
        self.reader = Reader(config.field, config.text_errors)

    def write_tokenizer(self, given: Tokenizer | None) -> None:
        """Write the tokenizer, made of the files unless it is given; leave one that is there."""
        if (self.folder / TOKENIZER).exists():
            return
        tokenizer = with_special_tokens(given or self._made(), ["eos"])
        write_whole(self.folder / TOKENIZER, tokenizer.to_json().encode("utf-8", "surrogatepass"))

    def _made(self) -> Tokenizer:
        """Return the tokenizer that the config names."""
        config = self.config
        if config.tokenizer == "byte":
            return ByteTokenizer()
        if config.tokenizer == "char":
            letters = self.pool.map(partial(_letters, self.reader), self.chunks)
            counted = _counted("characters", letters, _sizes(self.chunks), self.report)
            found = frozenset[str]().union(*counted)
            if not found:
                raise _empty(config)
            return CharTokenizer("".join(sorted(found)))
        total, size = sum(_sizes(self.chunks)), config.sample_mb * 10**6
        every = len(self.chunks)
        count = every if total <= size else max(1, every * size // total)
        chosen = [self.chunks[i * every // count] for i in range(count)]  # from all over the files
        read = partial(_training_text, self.reader, config.val_fraction)
        texts = self.pool.map(read, chosen)
        text = "".join(_counted("sample", texts, _sizes(chosen), self.report))
        if not text:
            raise self._undivided()
        self.report(Progress("tokenizer", 0, 0, 0))
        if config.tokenizer == "word":
            return WordTokenizer.train(text, config.word_count)
        return BPETokenizer.train(text, config.bpe_vocab_size)

    def _undivided(self) -> DataError:
        """Return an error for documents that are all in one part, with a fraction that helps."""
        lists = self.pool.map(partial(_hashes, self.reader), self.chunks)
        hashes = [own for part in lists for own in part]
        if not hashes:
            return _empty(self.config)
        kinds, limit = sorted({*hashes}), self.config.val_fraction * 2**64
        held = sum(own < limit for own in hashes)
        rule = f"of {len(hashes)} documents ({len(kinds)} distinct) {held} are held out"
        remedy = "add a different document"
        if len(kinds) > 1:  # any fraction between two neighbours divides them
            low, high = kinds[-2:] if held else kinds[:2]
            tries = (math.ceil(low / 2**64 * 10**n) / 10**n for n in range(1, 21))
            enough = next((share for share in tries if low < share * 2**64 <= high), None)
            remedy = f"--val-fraction {enough} divides them" if enough else remedy
        found = f"val_fraction is {self.config.val_fraction}: {rule}"
        return DataError(f"{found}: both parts need one ({remedy})")

    def encode(self) -> None:
        """Append the tokens of all chunks that are not yet written."""
        recorded = _read_json(self.folder / PROGRESS) or {"chunks": 0}
        _tokenizer_in.cache_clear()
        tokenizer = _tokenizer_in(self.folder)
        capacity = self.config.shard_mb * 10**6 // token_dtype(tokenizer).itemsize
        parts = {part: _Appended(self.folder, part, tokenizer, capacity) for part in PARTS}
        with contextlib.ExitStack() as stack:
            for part, appended in parts.items():
                stack.enter_context(contextlib.closing(appended))
                appended.go_on(recorded.get(part))
            first = done = recorded["chunks"]
            encoder = _Encoder(self.folder, self.reader, self.config.val_fraction)
            last, total = time.monotonic(), sum(_sizes(self.chunks))
            read = sum(_sizes(self.chunks[:first]))
            for encoded in self.pool.map(encoder, self.chunks[first:]):
                for part, appended in parts.items():
                    appended.append(encoded[part])
                read, done = read + self.chunks[done].bytes, done + 1
                documents = sum(appended.documents for appended in parts.values())
                self.report(Progress("encoding", read, total, documents))
                if time.monotonic() - last >= RECORD_SECONDS or done == len(self.chunks):
                    said = {part: appended.synced() for part, appended in parts.items()}
                    content = json.dumps({"chunks": done} | said)
                    write_whole(self.folder / PROGRESS, content.encode())
                    last = time.monotonic()

    def finish(self, plan: JsonObject) -> None:
        """Write the manifest; DataError where a part has no document."""
        recorded = _read_json(self.folder / PROGRESS) or {}
        said = {part: recorded.get(part, {"documents": 0}) for part in PARTS}
        counts = [said[part]["documents"] for part in PARTS]
        if 0 in counts:
            raise self._undivided()
        tokenizer = _tokenizer_in(self.folder)
        dtype = token_dtype(tokenizer)
        capacity = self.config.shard_mb * 10**6 // dtype.itemsize
        names = [TOKENIZER]
        for part in PARTS:
            shards = -(-said[part]["tokens"] // capacity)
            names += [shard_file(part, i) for i in range(shards)] + [index_file(part)]
        self.report(Progress("hashing", 0, 0, sum(counts)))
        found = self.pool.map(scan_file, [self.folder / name for name in names])
        manifest = {
            "format": FORMAT,
            "dtype": dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "end_id": end_id(tokenizer),
            "shard_tokens": capacity,
            "parts": said,
            **plan,
            "files": dict(zip(names, found, strict=True)),
        }
        write_whole(self.folder / MANIFEST, sealed(manifest).encode())


class _Appended:
    """Append tokens to the files of a part."""

    def __init__(self, folder: Path, part: str, tokenizer: Tokenizer, capacity: int) -> None:
        self.folder, self.part, self.capacity = folder, part, capacity
        self.dtype, self.end = token_dtype(tokenizer), end_id(tokenizer)
        self.tokens = self.documents = self.characters = 0
        self._shard: tuple[int, BinaryIO] | None = None
        self._index: BinaryIO | None = None

    def go_on(self, recorded: dict[str, int] | None) -> None:
        """Cut off what was written after the record; begin where there is none."""
        kept = recorded or {"tokens": 0, "documents": 0, "characters": 0}
        self.tokens, self.documents = kept["tokens"], kept["documents"]
        self.characters = kept["characters"]
        shards = sorted(self.folder.glob(f"{self.part}-[0-9]*.bin"))
        for number in range(-(-self.tokens // self.capacity)):
            tokens = min(self.capacity, self.tokens - number * self.capacity)
            self._cut(self.folder / shard_file(self.part, number), tokens * self.dtype.itemsize)
        for file in shards[-(-self.tokens // self.capacity) :]:
            file.unlink()
        index = self.folder / index_file(self.part)
        if recorded is None:
            index.unlink(missing_ok=True)
        else:
            self._cut(index, 8 * (self.documents + 1))
        with _writing(index):
            self._index = open(index, "ab")
        if recorded is None:
            self._write_tokens(np.array([self.end], self.dtype))
            with _writing(index):
                self._index.write(np.zeros(1, "<i8").tobytes())

    def _cut(self, file: Path, size: int) -> None:
        """Cut a file to the size that was recorded; DataError where it is shorter."""
        there = file.stat().st_size if file.exists() else 0
        if there < size:
            rule = f"has {there} bytes, {size} were written: remove the folder and begin anew"
            raise DataError(f"{file}: {rule}")
        if there > size:
            os.truncate(file, size)

    def append(self, encoded: _Encoded) -> None:
        """Append the documents of a chunk."""
        ends = encoded.ends + self.tokens
        self._write_tokens(encoded.tokens)
        assert self._index is not None
        with _writing(self.folder / index_file(self.part)):
            self._index.write(ends.astype("<i8").tobytes())
        self.documents += len(ends)
        self.characters += encoded.characters

    def _write_tokens(self, tokens: np.ndarray) -> None:
        done = 0
        while done < len(tokens):
            number, at = divmod(self.tokens, self.capacity)
            part = tokens[done : done + self.capacity - at]
            file = self.folder / shard_file(self.part, number)
            with _writing(file):
                if self._shard is None or self._shard[0] != number:
                    if self._shard is not None:  # it is whole, and leaves for the disk
                        _sync(self._shard[1])
                        self._shard[1].close()
                    self._shard = number, open(file, "ab")
                self._shard[1].write(part.tobytes())
            self.tokens += len(part)
            done += len(part)

    def synced(self) -> dict[str, int]:
        """Bring all to the disk and return what there is, for the record."""
        if self._shard is not None:
            with _writing(self.folder / shard_file(self.part, self._shard[0])):
                _sync(self._shard[1])
        assert self._index is not None
        with _writing(self.folder / index_file(self.part)):
            _sync(self._index)
        return {
            "tokens": self.tokens, "documents": self.documents, "characters": self.characters,
        }  # fmt: skip

    def close(self) -> None:
        """Close the files; what a full disk did not take is not recorded either."""
        for stream in (self._shard and self._shard[1], self._index):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    sync(Path(stream.name))


class _Workers:
    """Call functions in processes of their own, and hand on what they return in order."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Workers:
        if self.count > 1:
            self._pool = ProcessPoolExecutor(
                self.count, mp_context=get_context("spawn"), initializer=_start_worker
            )
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def map(self, function: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[Found]:
        """Yield `function(item)` of every item, a few of which are computed ahead."""
        if self._pool is None:
            yield from map(function, items)
            return
        try:
            waiting = deque[Future[Found]]()
            for item in items:
                waiting.append(self._pool.submit(function, item))
                if len(waiting) >= 2 * self.count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            rule = "has died (was there too little memory?); the same command goes on from here"
            raise _UnfinishedDataError(f"workers is {self.count}: one {rule}") from None


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it, however it ends."""
    # Ctrl-C reaches all processes of a terminal; the parent's answer ends the workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # each worker would start as many threads as there are cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _counted(
    phase: str, found: Iterable[Found], sizes: Sequence[int], report: Report
) -> Iterator[Found]:
    """Hand on what is found, one thing for each of `sizes`, and report the bytes so far."""
    done = 0
    for size, one in zip(sizes, found, strict=True):
        done += size
        report(Progress(phase, done, sum(sizes), 0))
        yield one


def _sizes(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.bytes for chunk in chunks]


def _plan(
    config: PrepareConfig, inputs: list[Input], tokenizer: Tokenizer | None, chunk_bytes: int
) -> JsonObject:
    """Return what the folder follows from, as JSON holds it."""
    settings = dataclasses.asdict(config) | {"chunk_bytes": chunk_bytes}
    if tokenizer is not None:
        text = tokenizer.to_json().encode("utf-8", "surrogatepass")
        settings["tokenizer"] = f"sha256 {hashlib.sha256(text).hexdigest()}"
        if frame(tokenizer).first:
            settings["begins"] = True  # folders of before have nothing there
    read = [{"path": i.path, "bytes": i.bytes, "sha256": i.sha256} for i in inputs]
    return json.loads(json.dumps({"settings": settings, "inputs": read}))


def _claim(folder: Path, plan: JsonObject) -> None:
    """Write the plan, or compare it with that of a folder that was begun."""
    stored = _read_json(folder / MANIFEST) or _read_json(folder / PLAN)
    if stored is None:
        if {entry.name for entry in folder.iterdir()} - {"lock", f"{PLAN}.tmp"}:
            rule = "must not exist, be empty, or have been begun by the same command"
            raise ConfigError(f"out is {str(folder)!r}: {rule}")
        write_whole(folder / PLAN, json.dumps(plan, indent=1).encode())
        return
    old, new = stored.get("settings", {}), plan["settings"]
    wrong = [f"{key}: {old.get(key)!r} -> {new[key]!r}" for key in new if old.get(key) != new[key]]
    if wrong:
        rule = "was begun with other settings: " + "; ".join(wrong)
        raise ConfigError(f"out is {str(folder)!r}: {rule}")
    for before, now in zip(stored["inputs"], plan["inputs"], strict=True):
        if before != now:
            rule = f"has changed since {folder} was begun: sha256 {before['sha256'][:16]}"
            raise DataError(f"{now['path']}: {rule} -> {now['sha256'][:16]}")


def _read_json(file: Path) -> JsonObject | None:
    """Return the object in a file that this module wrote; None where there is none."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise DataError(f"{file}: must be an object")
    return found


def _empty(config: PrepareConfig) -> DataError:
    return DataError(f"data is {','.join(config.data)!r}: has no document")


def write_whole(file: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    with _writing(file):
        write_file(file, content)


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Turn the error of a disk, full or not, into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written ({error.strerror}); the same command goes on from here"
        raise _UnfinishedDataError(f"{file}: {rule}") from None


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock; DataError where another process holds it."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder, lambda owner: DataError(f"{folder}: process {owner} is preparing it")):
            yield
    finally:
        with contextlib.suppress(OSError):  # which has files, as soon as anything was begun
            folder.rmdir()
