"""Text to windows of tokens: where it comes from, how it is cut, and which windows a step reads.

Text is kept as it is, byte for byte: no newline is translated and no byte-order mark dropped. The
windows of a step follow from (seed, step) alone, so a resumed run needs no iterator state.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from transformer_jax.config import TrainConfig
from transformer_jax.pretrained_text import pretrained_from_json
from transformer_jax.text import DataError as DataError
from transformer_jax.text import byte_letters, utf8

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
IGNORE = -100
"""Label of a position that has no target."""

# Pieces a BPE merges within, as GPT-2's, but bounded: the time stays linear in any text.
_PIECE = r" ?\p{L}{1,32}| ?\p{N}{1,8}| ?[^\s\p{L}\p{N}]{1,16}|\s{1,16}(?!\S)"


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """Ids i32[n]; DataError names what has no id."""

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """UTF-8 of the ids: a piece at a time, so a character may be split between calls."""

    def to_json(self) -> str: ...


@dataclass(frozen=True)
class CharTokenizer:
    """One id per character, in the order of their code points."""

    characters: str

    def __post_init__(self) -> None:
        if not self.characters or sorted(set(self.characters)) != list(self.characters):
            raise DataError("characters of a tokenizer: must be distinct, in order, at least one")

    @classmethod
    def train(cls, text: str) -> CharTokenizer:
        """Every character of the text."""
        return cls("".join(map(chr, np.unique(_code_points(text)))))

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        points, known = _code_points(text), _code_points(self.characters)
        ids = np.minimum(np.searchsorted(known, points), len(known) - 1).astype(np.int32)
        wrong = np.flatnonzero(known[ids] != points)
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"character {at} is U+{ord(text[at]):04X} {text[at]!r}: "
                f"not among the {self.vocab_size} characters of the training text"
            )
        return ids

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return "".join(self.characters[i] for i in ids).encode("utf-8", "surrogatepass")

    def to_json(self) -> str:
        return _dump({"kind": "char", "characters": self.characters})


@dataclass(frozen=True)
class ByteTokenizer:
    """One id per byte of UTF-8: any text, any file."""

    @property
    def vocab_size(self) -> int:
        return 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(list(ids))

    def to_json(self) -> str:
        return _dump({"kind": "byte"})


@dataclass(frozen=True)
class BPETokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019).

    `definition` is the JSON of the `tokenizers` library. Every byte is a token, so any text has
    ids, and they give it back exactly.
    """

    definition: str

    def __post_init__(self) -> None:
        try:
            pieces = set(self._bytes)
        except Exception as error:  # the Rust library raises plain Exception
            raise DataError(f"definition of a tokenizer: {error!r}") from None
        if not pieces >= {bytes([byte]) for byte in range(256)}:
            raise DataError("definition of a tokenizer: not every byte has a token")

    @classmethod
    def train(cls, text: str, vocab_size: int) -> BPETokenizer:
        """At most `vocab_size` tokens: the 256 bytes and the most frequent merges of the text."""
        from tokenizers import Regex, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Library

        model = Library(models.BPE())
        model.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PIECE), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        model.train_from_iterator(_lines(text), trainer=trainer)
        return cls(_canonical(json.loads(model.to_str())))

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @cached_property
    def _library(self) -> Any:
        from tokenizers import Tokenizer as Library

        return Library.from_str(self.definition)

    @cached_property
    def _bytes(self) -> list[bytes]:
        letters = byte_letters()
        pieces = (self._library.id_to_token(i) for i in range(self._library.get_vocab_size()))
        return [bytes(letters[letter] for letter in piece) for piece in pieces]

    def encode(self, text: str) -> np.ndarray:
        utf8(text)
        parts = self._library.encode_batch_fast(_lines(text), add_special_tokens=False)
        return np.array([i for part in parts for i in part.ids], np.int32)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes[i] for i in ids)

    def to_json(self) -> str:
        return _dump({"kind": "bpe", "definition": json.loads(self.definition)})


def tokenizer_from_json(text: str) -> Tokenizer:
    """The tokenizer that `to_json` wrote; DataError where it is anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"tokenizer: not JSON ({error})") from None
    match content:
        case {"kind": "char", "characters": str(characters), **rest} if not rest:
            return CharTokenizer(characters)
        case {"kind": "byte", **rest} if not rest:
            return ByteTokenizer()
        case {"kind": "bpe", "definition": dict(definition), **rest} if not rest:
            return BPETokenizer(_canonical(definition))
        case {"kind": "pretrained"}:
            return pretrained_from_json(content)
    kinds = "'char', 'byte', 'bpe' or 'pretrained'"
    raise DataError(f"tokenizer: must have kind {kinds}, and what belongs to it")


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def _canonical(definition: dict[str, Any]) -> str:
    return json.dumps(definition, ensure_ascii=False)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _lines(text: str, size: int = 1 << 16) -> list[str]:
    """Parts of about `size` characters, cut behind a newline where there is one."""
    parts, start = [], 0
    while start < len(text):
        end = start + size
        if end < len(text):
            newline = text.rfind("\n", start, end)
            end = newline + 1 if newline >= 0 else end
        parts.append(text[start:end])
        start = end
    return parts


@dataclass(frozen=True)
class Source:
    """The bytes of one file, or of a named set."""

    name: str
    content: bytes

    def text(self, errors: str = "strict") -> str:
        """Decoded as UTF-8; DataError names the first byte that is none."""
        try:
            return self.content.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name}: byte {error.start} is 0x{self.content[error.start]:02x}: not UTF-8 "
                f"({error.reason}); --text-errors replace marks it, --tokenizer byte reads any file"
            ) from None


def read(data: str, out: str | None = None) -> list[Source]:
    """What `TrainConfig.data` names: a file, a folder's files in order of path, `-`, or a set.

    Left out of a folder are hidden files, links to folders, and the folders of runs, `out` first
    of all. Its files that end in no newline get one.
    """
    if data == "-":
        if sys.stdin is None:
            raise DataError("data is '-': standard input is closed")
        return [Source("standard input", sys.stdin.buffer.read())]
    if data == "python-docs":
        return [Source(data, _python_docs().encode())]
    if data == "shakespeare":
        return [Source(data, _download(SHAKESPEARE, SHAKESPEARE_SHA256, "shakespeare"))]
    path = Path(data)
    try:
        if not data:
            raise FileNotFoundError
        if not path.is_dir():
            return [Source(data, path.read_bytes())]
    except FileNotFoundError:
        rule = "no such file or folder (or - for standard input, python-docs, shakespeare)"
        raise DataError(f"data is {data!r}: {rule}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"data is {data!r}: cannot be read ({reason})") from None
    file = path
    try:
        sources = []
        for file in _files(path, out):
            if content := file.read_bytes():
                whole = content if content.endswith(b"\n") else content + b"\n"
                sources.append(Source(str(file), whole))
        return sources
    except OSError as error:
        where = error.filename or file
        raise DataError(f"data is {data!r}: {where}: cannot be read ({error.strerror})") from None


def _files(path: Path, out: str | None) -> list[Path]:
    """The files to read in a folder and below; OSError for a folder that cannot be listed."""

    def unreadable(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, names in os.walk(path, onerror=unreadable):
        shown = [Path(folder, name) for name in folders if not name.startswith(".")]
        folders[:] = [inner.name for inner in shown if not _is_run(inner, out)]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _is_run(folder: Path, out: str | None) -> bool:
    """Whether this is `out`, or holds what every run folder does."""
    if out is not None and os.path.realpath(folder) == os.path.realpath(out):
        return True
    names = "config.json", "tokenizer.json", "metrics.jsonl"
    return all(os.path.isfile(folder / name) for name in names)


def _python_docs() -> str:
    """The documentation behind Python's help(): English, and shipped with every Python."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def _download(url: str, sha256: str, name: str) -> bytes:
    """The file of that hash, from the user's cache or else, once, from the network."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    file = Path(cache, "transformer_jax", f"{name}.txt")
    if file.is_file():
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise DataError(f"{file}: sha256 differs from {sha256}: remove it and run again")
        return content
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=30) as answer:
            content = answer.read(1 << 26)
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{name}: cannot be downloaded ({reason}); "
            f"save {url} as {file}, or train on a text of yours with --data FILE"
        ) from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(f"{name}: what {url} gave has another sha256 than {sha256}")
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
    os.replace(partial, file)
    return content


@dataclass(frozen=True)
class Dataset:
    """A text as ids, its last part held out."""

    tokenizer: Tokenizer
    train: np.ndarray  # unsigned or i32[n]
    val: np.ndarray  # unsigned or i32[m]
    val_characters: int
    """Characters of the held-out part: loss per token x m / this is the loss per character."""
    sha256: str
    """Of the bytes that were read."""


def load_dataset(config: TrainConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """Read `config.data`, train the tokenizer unless one is given, encode and split.

    The split is by characters (bytes for `byte`): the last `val_fraction` is held out. `char`
    takes its characters from the whole text, `bpe` learns its merges from the training part.
    """
    sources = read(config.data, config.out)
    content = b"".join(source.content for source in sources)
    if not content:
        raise DataError(f"data is {config.data!r}: it is empty")
    kept = 1.0 - config.val_fraction
    if config.tokenizer == "byte":
        tokenizer = tokenizer or ByteTokenizer()
        ids = np.frombuffer(content, np.uint8)
        cut = int(len(ids) * kept)
        train, val = ids[:cut], ids[cut:]
        val_characters = len(content[cut:].decode("utf-8", "replace"))
    else:
        text = "".join(source.text(config.text_errors) for source in sources)
        cut = int(len(text) * kept)
        if tokenizer is None and config.tokenizer == "char":
            tokenizer = CharTokenizer.train(text)
        elif tokenizer is None and config.tokenizer == "pretrained":
            raise DataError("tokenizer is 'pretrained': none is given")
        elif tokenizer is None:
            tokenizer = BPETokenizer.train(text[:cut], config.bpe_vocab_size)
        train, val = tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:])
        if config.tokenizer == "pretrained":
            _check_known(config, train, val)
        val_characters = len(text) - cut
    small = np.min_scalar_type(tokenizer.vocab_size - 1)
    dtype = small if small.itemsize < 4 else np.dtype(np.int32)
    needed = config.sequence_len + 1
    for name, part in (("training", train), ("held-out", val)):
        if len(part) < needed:
            raise DataError(
                f"data is {config.data!r}: its {name} part has {len(part)} tokens, "
                f"a window of context {config.sequence_len} needs {needed}"
            )
        if len(part) >= 2**31:
            raise DataError(f"data is {config.data!r}: its {name} part has 2**31 tokens or more")
    return Dataset(
        tokenizer=tokenizer,
        train=train.astype(dtype),
        val=val.astype(dtype),
        val_characters=val_characters,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _check_known(config: TrainConfig, *parts: np.ndarray) -> None:
    """A published tokenizer may have tokens that its model has not."""
    largest = max(int(part.max(initial=0)) for part in parts)
    if largest >= config.model.vocab_size:
        rule = f"{config.init_from} has {config.model.vocab_size} tokens"
        raise DataError(f"data is {config.data!r}: it has token {largest}: {rule}")


def random_starts(
    seed: int, step: int, shape: tuple[int, ...], count: int
) -> np.ndarray:  # i32[shape]
    """Where the windows of a step start, uniform in [0, count): a pure function of its arguments.

    Philox keyed by (seed, step); NumPy keeps this stream the same in every version. A step of A
    micro-batches of B windows reads the same windows as one of A x B.
    """
    if not (0 <= seed < 2**32 and 0 <= step < 2**63 and 0 < count < 2**31):
        raise ValueError(f"seed {seed}, step {step}, count {count}: out of range")
    words = np.random.Philox(key=(seed << 64) + step).random_raw(int(np.prod(shape)))
    scaled = (words >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)
    return scaled.astype(np.int32).reshape(shape)


def consecutive_starts(tokens: int, length: int) -> np.ndarray:  # i32[n]
    """Starts of windows that cover a text once; the last one may reach past its end."""
    return np.arange(0, tokens - 1, length, dtype=np.int32)


def pad_documents(
    documents: Sequence[np.ndarray],  # i32[n] each
    length: int,
) -> tuple[np.ndarray, np.ndarray]:  # tokens i32[B, T], labels i32[B, T]
    """One document a row: row b predicts its tokens 1.. from those before; the rest is ignored."""
    tokens = np.zeros((len(documents), length), np.int32)
    labels = np.full((len(documents), length), IGNORE, np.int32)
    for row, document in enumerate(documents):
        _place(document, tokens[row], labels[row], row)
    return tokens, labels


def pack_documents(
    documents: Sequence[np.ndarray],  # i32[n] each
    length: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # tokens, labels, segments: i32[B, T]
    """Several documents a row, each into the first row with room; segment 0 is padding.

    With `segments` given to a decoder, a document sees no other and its positions start at 0.
    """
    room: list[int] = []
    places = []
    for index, document in enumerate(documents):
        size = _inputs(document, length, index)
        row = next((r for r, left in enumerate(room) if left >= size), len(room))
        if row == len(room):
            room.append(length)
        places.append((row, length - room[row]))
        room[row] -= size
    tokens = np.zeros((len(room), length), np.int32)
    labels = np.full((len(room), length), IGNORE, np.int32)
    segments = np.zeros((len(room), length), np.int32)
    for index, (document, (row, at)) in enumerate(zip(documents, places, strict=True)):
        size = _place(document, tokens[row, at:], labels[row, at:], index)
        segments[row, at : at + size] = segments[row].max() + 1
    return tokens, labels, segments


def _inputs(document: np.ndarray, length: int, index: int) -> int:
    if not 2 <= len(document) <= length + 1:
        raise DataError(f"document {index} has {len(document)} tokens: must be 2 to {length + 1}")
    return len(document) - 1


def _place(document: np.ndarray, tokens: np.ndarray, labels: np.ndarray, index: int) -> int:
    size = _inputs(document, len(tokens), index)
    tokens[:size], labels[:size] = document[:-1], document[1:]
    return size
