"""Preparation of a folder of tokens by several processes.

Worker processes encode the documents, and one process writes the tokens in order. The result
depends only on the files and the settings, not on the number of processes or on interruptions.
During preparation, the folder also contains these files:

    prepare.json    the settings, and the size and sha256 of each input file
    progress.json   the number of chunks already written, and the resulting lengths of the files
    lock            locked by the process that is writing

When you run the command again, it discards data past the lengths in `progress.json`. The manifest
is written last. A folder without a manifest cannot be opened.
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
"""Approximate size of a chunk in bytes."""

RECORD_SECONDS = 2.0
"""Maximum number of seconds of work that an interruption loses, in addition to the chunks being
read."""

PROGRESS = "progress.json"

Item = TypeVar("Item")
Found = TypeVar("Found")


class Progress(NamedTuple):
    """Progress of the preparation of a folder."""

    phase: str
    done: int
    """Total number of bytes in the input files."""
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
    """Write a folder of tokens and open it.

    This function resumes an interrupted preparation.

    Args:
        config: the files, their format, and the tokenizer.
        out: the folder to write.
        tokenizer: the tokenizer, which must be passed if `config.tokenizer` is a folder, and must
            be None otherwise.
        workers: the number of processes. If it is more than one, the main module of the calling
            program must be importable.
        report: a function that is called with the progress.
        chunk_bytes: the approximate size of a chunk in bytes.

    Raises:
        ConfigError: if the tokenizer is missing or not allowed, or if `out` cannot be created.
        DataError: if a file cannot be used.
    """
    if (tokenizer is None) != (config.tokenizer in TRAINED):
        rule = "pass `tokenizer` if and only if it is not trained here"
        raise ConfigError(f"tokenizer is {config.tokenizer!r}: {rule}")
    if workers < 1:
        fail("workers", workers, "must be at least 1")
    check_new_folder("out", str(out))
    folder = Path(out)
    sizes = [os.path.getsize(path) if os.path.exists(path) else 0 for path in config.data]
    # More workers than chunks would have nothing to do.
    workers = min(workers, -(-sum(sizes) // chunk_bytes) or 1)
    with _locked_folder(folder), _WorkerPool(workers) as pool:
        inputs = list(_reporting("reading", pool.map(read_input, config.data), sizes, report))
        plan = _plan(config, inputs, tokenizer, chunk_bytes)
        stored = _read_json(folder / MANIFEST) or _read_json(folder / PLAN)
        if stored is None:
            if {entry.name for entry in folder.iterdir()} - {"lock", f"{PLAN}.tmp"}:
                rule = "must not exist, be empty, or have been started by the same command"
                raise ConfigError(f"out is {str(folder)!r}: {rule}")
            write_whole(folder / PLAN, json.dumps(plan, indent=1).encode())
        else:
            old, new = stored.get("settings", {}), plan["settings"]
            changed = [f"{k}: {old.get(k)!r} -> {new[k]!r}" for k in new if old.get(k) != new[k]]
            if changed:
                rule = "was started with other settings: " + "; ".join(changed)
                raise ConfigError(f"out is {str(folder)!r}: {rule}")
            for before, now in zip(stored["inputs"], plan["inputs"], strict=True):
                if before != now:
                    rule = f"has changed since {folder} was started: sha256 {before['sha256'][:16]}"
                    raise DataError(f"{now['path']}: {rule} -> {now['sha256'][:16]}")
        if not (folder / MANIFEST).exists():
            try:
                formats = [config.format_of(path) for path in config.data]
                pairs = zip(inputs, formats, strict=True)
                chunks = [c for i, format in pairs for c in cut_file(i, format, chunk_bytes)]
                work = _Preparation(folder, config, chunks, pool, report)
                work.write_tokenizer(tokenizer)
                work.encode()
                work.finish(plan)
            except _ResumableDataError:
                raise
            except DataError:  # these files and settings will always fail, so remove the output
                for file in folder.iterdir():
                    if file.name != "lock":
                        file.unlink()
                raise
        for name in (PROGRESS, PLAN):
            (folder / name).unlink(missing_ok=True)
    return open_corpus(folder)


class _ResumableDataError(DataError):
    """Error that the same command can recover from."""


class _EncodedChunk(NamedTuple):
    """Tokens of the documents of a chunk that are in one part, each followed by its end token."""

    tokens: np.ndarray  # dtype[n]
    ends: np.ndarray  # i64[documents]: positions of the end tokens
    characters: int


@dataclasses.dataclass(frozen=True)
class _Encoder:
    """Function that encodes chunks with the tokenizer of the folder."""

    folder: Path
    reader: Reader
    val_fraction: float

    def __call__(self, chunk: Chunk) -> dict[str, _EncodedChunk]:
        tokenizer = _read_tokenizer(self.folder)
        # Each worker reads the tokenizer from its file, because sending it with every chunk would
        # be slow.
        first, end, dtype = frame(tokenizer).first, end_id(tokenizer), token_dtype(tokenizer)
        found: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
        characters = dict.fromkeys(PARTS, 0)
        for number, text in enumerate(self.reader.documents(chunk)):
            try:
                ids = encode_text(tokenizer, text)
            except DataError as error:
                where = f"{chunk.path}: document {number} after byte {chunk.start}"
                raise DataError(f"{where}: {error}") from None
            if len(ids) == 0:
                continue
            if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
                wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0]
                rule = f"must be below the vocabulary size {tokenizer.vocab_size}"
                raise DataError(f"{chunk.path}: the tokenizer returned token {wrong}: {rule}")
            part = part_of(text, self.val_fraction)
            found[part].append(np.concatenate([first, ids, [end]]).astype(dtype))
            characters[part] += len(text)
        # Checked after reading, so that a change during the read is also found.
        check_unchanged(chunk.of)
        joined = {}
        for part in PARTS:
            ends = np.cumsum([len(ids) for ids in found[part]], dtype=np.int64) - 1
            tokens = np.concatenate(found[part]) if found[part] else np.zeros(0, dtype)
            joined[part] = _EncodedChunk(tokens, ends, characters[part])
        return joined


def part_of(text: str, val_fraction: float) -> str:
    """Choose the part of a document by its hash, so that equal documents are in the same part."""
    return "val" if _hash(text) < val_fraction * 2**64 else "train"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _hashes(reader: Reader, chunk: Chunk) -> list[int]:
    return [_hash(text) for text in reader.documents(chunk)]


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the dtype of token files, which is uint16 if every ID fits and otherwise uint32."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


@lru_cache(maxsize=1)
def _read_tokenizer(folder: Path) -> Tokenizer:
    return tokenizer_from_json((folder / TOKENIZER).read_text("utf-8", "surrogatepass"))


def _letters(reader: Reader, chunk: Chunk) -> frozenset[str]:
    """Return the set of characters in a chunk."""
    return frozenset("".join({letter for text in reader.documents(chunk) for letter in text}))


def _training_text(reader: Reader, val_fraction: float, chunk: Chunk) -> str:
    """Return the training documents of a chunk, each followed by a newline."""
    texts = (text for text in reader.documents(chunk) if part_of(text, val_fraction) == "train")
    return "".join(f"{text}\n" for text in texts)


class _Preparation:
    """Steps of one preparation."""

    def __init__(
        self,
        folder: Path,
        config: PrepareConfig,
        chunks: list[Chunk],
        pool: _WorkerPool,
        report: Report,
    ) -> None:
        self.folder, self.config, self.chunks = folder, config, chunks
        self.pool, self.report = pool, report
        self.reader = Reader(config.field, config.text_errors)

    def write_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Write the tokenizer unless its file exists; None trains one on the input files."""
        if (self.folder / TOKENIZER).exists():
            return
        tokenizer = with_special_tokens(tokenizer or self._create_tokenizer(), ["eos"])
        write_whole(self.folder / TOKENIZER, tokenizer.to_json().encode("utf-8", "surrogatepass"))

    def _create_tokenizer(self) -> Tokenizer:
        """Create or train the tokenizer that the config specifies."""
        config = self.config
        if config.tokenizer == "byte":
            return ByteTokenizer()
        if config.tokenizer == "char":
            letters = self.pool.map(partial(_letters, self.reader), self.chunks)
            reported = _reporting("characters", letters, _sizes(self.chunks), self.report)
            found = frozenset[str]().union(*reported)
            if not found:
                raise _empty(config)
            return CharTokenizer("".join(sorted(found)))
        total, size = sum(_sizes(self.chunks)), config.sample_mb * 10**6
        n = len(self.chunks)
        count = n if total <= size else max(1, n * size // total)
        sample = [self.chunks[i * n // count] for i in range(count)]  # evenly spaced chunks
        read = partial(_training_text, self.reader, config.val_fraction)
        texts = self.pool.map(read, sample)
        text = "".join(_reporting("sample", texts, _sizes(sample), self.report))
        if not text:
            raise self._split_error()
        self.report(Progress("tokenizer", 0, 0, 0))
        if config.tokenizer == "word":
            return WordTokenizer.train(text, config.word_count)
        return BPETokenizer.train(text, config.bpe_vocab_size)

    def _split_error(self) -> DataError:
        """Return an error for the case that all documents are in one part.

        The message suggests another fraction.
        """
        lists = self.pool.map(partial(_hashes, self.reader), self.chunks)
        hashes = [value for part in lists for value in part]
        if not hashes:
            return _empty(self.config)
        distinct, limit = sorted({*hashes}), self.config.val_fraction * 2**64
        held_out = sum(value < limit for value in hashes)
        count = f"{held_out} of {len(hashes)} documents ({len(distinct)} distinct) are held out"
        remedy = "add a different document"
        if len(distinct) > 1:  # any fraction between two neighboring hashes separates them
            low, high = distinct[-2:] if held_out else distinct[:2]
            fractions = (math.ceil(low / 2**64 * 10**n) / 10**n for n in range(1, 21))
            fraction = next((x for x in fractions if low < x * 2**64 <= high), None)
            remedy = f"try --val-fraction {fraction}" if fraction else remedy
        found = f"val_fraction is {self.config.val_fraction}: {count}"
        return DataError(f"{found}, but both parts need at least one ({remedy})")

    def encode(self) -> None:
        """Append the tokens of the remaining chunks."""
        recorded = _read_json(self.folder / PROGRESS) or {"chunks": 0}
        # An earlier preparation in this process may have used a folder with the same name.
        _read_tokenizer.cache_clear()
        tokenizer = _read_tokenizer(self.folder)
        capacity = self.config.shard_mb * 10**6 // token_dtype(tokenizer).itemsize
        parts = {part: _PartWriter(self.folder, part, tokenizer, capacity) for part in PARTS}
        with contextlib.ExitStack() as stack:
            for part, writer in parts.items():
                stack.enter_context(contextlib.closing(writer))
                # Tokens after the last record may be incomplete, so they are cut off and encoded
                # again.
                writer.resume(recorded.get(part))
            first = done = recorded["chunks"]
            encoder = _Encoder(self.folder, self.reader, self.config.val_fraction)
            last, total = time.monotonic(), sum(_sizes(self.chunks))
            read = sum(_sizes(self.chunks[:first]))
            for encoded in self.pool.map(encoder, self.chunks[first:]):
                for part, writer in parts.items():
                    writer.append(encoded[part])
                read, done = read + self.chunks[done].bytes, done + 1
                documents = sum(writer.documents for writer in parts.values())
                self.report(Progress("encoding", read, total, documents))
                if time.monotonic() - last >= RECORD_SECONDS or done == len(self.chunks):
                    # The counts are recorded only after the tokens are on disk.
                    counts = {part: writer.sync() for part, writer in parts.items()}
                    content = json.dumps({"chunks": done} | counts)
                    write_whole(self.folder / PROGRESS, content.encode())
                    last = time.monotonic()

    def finish(self, plan: JsonObject) -> None:
        """Write the manifest; raise DataError if a part has no documents."""
        recorded = _read_json(self.folder / PROGRESS) or {}
        parts = {part: recorded.get(part, {"documents": 0}) for part in PARTS}
        counts = [parts[part]["documents"] for part in PARTS]
        if 0 in counts:
            raise self._split_error()
        tokenizer = _read_tokenizer(self.folder)
        dtype = token_dtype(tokenizer)
        capacity = self.config.shard_mb * 10**6 // dtype.itemsize
        names = [TOKENIZER]
        for part in PARTS:
            shards = -(-parts[part]["tokens"] // capacity)
            names += [shard_file(part, i) for i in range(shards)] + [index_file(part)]
        self.report(Progress("hashing", 0, 0, sum(counts)))
        # The files are read again from disk, so the hashes also cover what was written before a
        # restart.
        found = self.pool.map(scan_file, [self.folder / name for name in names])
        manifest = {
            "format": FORMAT,
            "dtype": dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "end_id": end_id(tokenizer),
            "shard_tokens": capacity,
            "parts": parts,
            **plan,
            "files": dict(zip(names, found, strict=True)),
        }
        write_whole(self.folder / MANIFEST, sealed(manifest).encode())


class _PartWriter:
    """Writer that appends tokens to the files of one part."""

    def __init__(self, folder: Path, part: str, tokenizer: Tokenizer, capacity: int) -> None:
        self.folder, self.part, self.capacity = folder, part, capacity
        self.dtype, self.end = token_dtype(tokenizer), end_id(tokenizer)
        self.tokens = self.documents = self.characters = 0
        self._shard: tuple[int, BinaryIO] | None = None
        self._index: BinaryIO | None = None

    def resume(self, recorded: dict[str, int] | None) -> None:
        """Truncate the files to their recorded lengths, or start over if `recorded` is None."""
        counts = recorded or {"tokens": 0, "documents": 0, "characters": 0}
        self.tokens, self.documents = counts["tokens"], counts["documents"]
        self.characters = counts["characters"]
        shards = sorted(self.folder.glob(f"{self.part}-[0-9]*.bin"))
        for number in range(-(-self.tokens // self.capacity)):
            tokens = min(self.capacity, self.tokens - number * self.capacity)
            self._truncate(
                self.folder / shard_file(self.part, number), tokens * self.dtype.itemsize
            )
        for file in shards[-(-self.tokens // self.capacity) :]:
            file.unlink()
        index = self.folder / index_file(self.part)
        if recorded is None:
            index.unlink(missing_ok=True)
        else:
            self._truncate(index, 8 * (self.documents + 1))
        with _writing(index):
            self._index = open(index, "ab")
        if recorded is None:
            # The stream begins with an end token, so that the first document also follows one.
            self._write_tokens(np.array([self.end], self.dtype))
            with _writing(index):
                self._index.write(np.zeros(1, "<i8").tobytes())

    def _truncate(self, file: Path, size: int) -> None:
        """Truncate a file to its recorded size; raise DataError if it is shorter."""
        current = file.stat().st_size if file.exists() else 0
        if current < size:
            rule = (
                f"has {current} bytes, but {size} were written; remove the folder and start again"
            )
            raise DataError(f"{file}: {rule}")
        if current > size:
            os.truncate(file, size)

    def append(self, encoded: _EncodedChunk) -> None:
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
                    if self._shard is not None:  # the previous shard is complete
                        _sync(self._shard[1])
                        self._shard[1].close()
                    self._shard = number, open(file, "ab")
                self._shard[1].write(part.tobytes())
            self.tokens += len(part)
            done += len(part)

    def sync(self) -> dict[str, int]:
        """Flush the files to disk and return the counts to record."""
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
        """Close the files.

        Errors are ignored, because data that is lost on a full disk has not been recorded.
        """
        for stream in (self._shard and self._shard[1], self._index):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    sync(Path(stream.name))


class _WorkerPool:
    """Pool of worker processes that returns results in order."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> _WorkerPool:
        if self.count > 1:
            self._pool = ProcessPoolExecutor(
                self.count, mp_context=get_context("spawn"), initializer=_start_worker
            )
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def map(self, function: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[Found]:
        """Yield `function(item)` for each item, while the workers compute a few items ahead."""
        if self._pool is None:
            yield from map(function, items)
            return
        try:
            waiting = deque[Future[Found]]()
            for item in items:
                waiting.append(self._pool.submit(function, item))
                # Two items per worker keep all workers busy, and bound the results that wait in
                # memory.
                if len(waiting) >= 2 * self.count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            rule = "a worker died (out of memory?); run the same command again to continue"
            raise _ResumableDataError(f"workers is {self.count}: {rule}") from None


def _start_worker() -> None:
    """Ignore Ctrl-C in a worker, and exit when its parent process ends for any reason."""
    # Ctrl-C reaches all processes in a terminal; the parent ends the workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # otherwise each worker would start one thread per core
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _reporting(
    phase: str, found: Iterable[Found], sizes: Sequence[int], report: Report
) -> Iterator[Found]:
    """Yield the results, one for each item of `sizes`, and report the number of bytes processed."""
    done = 0
    for size, result in zip(sizes, found, strict=True):
        done += size
        report(Progress(phase, done, sum(sizes), 0))
        yield result


def _sizes(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.bytes for chunk in chunks]


def _plan(
    config: PrepareConfig, inputs: list[Input], tokenizer: Tokenizer | None, chunk_bytes: int
) -> JsonObject:
    """Return the settings and the input files, which determine the content of the folder."""
    settings = dataclasses.asdict(config) | {"chunk_bytes": chunk_bytes}
    if tokenizer is not None:
        text = tokenizer.to_json().encode("utf-8", "surrogatepass")
        settings["tokenizer"] = f"sha256 {hashlib.sha256(text).hexdigest()}"
        if frame(tokenizer).first:
            settings["begins"] = True  # missing in folders from older versions
    read = [{"path": i.path, "bytes": i.bytes, "sha256": i.sha256} for i in inputs]
    # JSON has no tuples, and the result is compared with a plan that was read from a file.
    return json.loads(json.dumps({"settings": settings, "inputs": read}))


def _read_json(file: Path) -> JsonObject | None:
    """Read a JSON object that this module wrote; return None if the file does not exist."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise DataError(f"{file}: must be an object")
    return found


def _empty(config: PrepareConfig) -> DataError:
    return DataError(f"data is {','.join(config.data)!r}: the files contain no documents")


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically."""
    with _writing(file):
        write_file(file, content)


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Convert an OSError, such as one from a full disk, to a DataError that names the file."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written ({error.strerror}); run the same command again to continue"
        raise _ResumableDataError(f"{file}: {rule}") from None


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder and lock it; raise DataError if another process has locked it."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder, lambda owner: DataError(f"{folder}: process {owner} is preparing it")):
            yield
    finally:
        with contextlib.suppress(OSError):  # fails unless the folder is empty
            folder.rmdir()
