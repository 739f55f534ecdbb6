"""Text data: reading, tokenization, splitting off held-out text, and training windows.

Text that is read as a whole keeps its newlines. See `tokenizers.plain_text` for the definitions of
text, line, and document. The windows of a step depend only on (seed, step), so a resumed run needs
no iterator state.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from transformer_jax.config import TrainConfig
from transformer_jax.tokenizers.plain_text import MARK, read_text
from transformer_jax.tokenizers.trained import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
)
from transformer_jax.tokenizers.utf8 import DataError as DataError
from transformer_jax.values import value_class

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
IGNORE = -100
"""Label of a position without a target."""


class ShortText(DataError):
    """Error for text that is shorter than a window. `tokens` is the length of the text."""

    def __init__(self, message: str, tokens: int) -> None:
        super().__init__(message)
        self.tokens = tokens


@value_class
class Source:
    """Content of a file or of a named data set."""

    name: str
    content: bytes

    def text(self, errors: str = "strict") -> str:
        """Decode the content as UTF-8. Raises DataError if a byte is invalid."""
        return read_text(self.content, self.name, errors)


def read(data: str, out: str | None = None) -> list[Source]:
    """Read the data that `TrainConfig.data` specifies: a file, a folder, `-`, or a named data set.

    `-` means standard input. The files in a folder are sorted by path. Hidden files, links to
    folders, and run folders such as `out` are skipped. A newline is appended to each file that does
    not end with one.
    """
    if data == "-":
        if sys.stdin is None:
            raise DataError("data is '-': standard input is closed")
        return [Source("standard input", sys.stdin.buffer.read())]
    if data == "python-docs":
        # part of every Python installation, so a first run needs neither a file nor a network
        topics = importlib.import_module("pydoc_data.topics").topics  # the texts that help() shows
        return [Source(data, "\n\n".join(topics[name] for name in sorted(topics)).encode())]
    if data == "shakespeare":
        return [Source(data, _download(SHAKESPEARE, SHAKESPEARE_SHA256, "shakespeare"))]
    path = Path(data)
    try:
        if not data:
            raise FileNotFoundError
        if not path.is_dir():
            return [Source(data, path.read_bytes())]
    except FileNotFoundError:
        rule = "no such file or folder (use - for standard input, python-docs or shakespeare)"
        raise DataError(f"data is {data!r}: {rule}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"data is {data!r}: cannot be read ({reason})") from None
    file, out_folder = path, None if out is None else os.path.realpath(out)
    of_a_run = "config.json", "tokenizer.json", "metrics.jsonl"

    def unreadable(error: OSError) -> None:
        raise error  # `os.walk` would skip a folder that cannot be listed

    try:
        files: list[Path] = []
        for folder, folders, names in os.walk(path, onerror=unreadable):
            visible = [Path(folder, name) for name in folders if not name.startswith(".")]
            # os.walk skips folders that are removed here, so a run does not train on its own output
            folders[:] = [
                inner.name
                for inner in visible
                if os.path.realpath(inner) != out_folder
                and not all(os.path.isfile(inner / name) for name in of_a_run)
            ]
            files += [Path(folder, name) for name in names if not name.startswith(".")]
        sources = []
        for file in sorted(files):
            if content := file.read_bytes():
                whole = content if content.endswith(b"\n") else content + b"\n"
                sources.append(Source(str(file), whole))
        return sources
    except OSError as error:
        where = error.filename or file
        raise DataError(f"data is {data!r}: {where}: cannot be read ({error.strerror})") from None


def _download(url: str, sha256: str, name: str) -> bytes:
    """Return the content with this hash from the user's cache. Download it first if necessary."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    file = Path(cache, "transformer_jax", f"{name}.txt")
    if file.is_file():
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise DataError(
                f"{file}: the SHA-256 checksum must be {sha256}; delete the file and try again"
            )
        return content
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=30) as answer:
            content = answer.read(1 << 26)
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{name}: cannot be downloaded ({reason}); "
            f"save {url} as {file}, or train on your own text with `data=FILE`"
        ) from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(
            f"{name}: the download of {url} does not have the SHA-256 checksum {sha256}"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    # each concurrent run writes its own file, and the last rename wins
    handle, partial = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
    os.replace(partial, file)
    return content


@value_class
class Dataset:
    """Tokenized text, split into a training part and a held-out part."""

    tokenizer: Tokenizer
    train: np.ndarray  # unsigned or i32[n]
    val: np.ndarray  # unsigned or i32[m]
    val_characters: int
    """Number of characters in the held-out part, for the loss per character."""
    sha256: str
    """Hash of the bytes that were read."""


def load_dataset(config: TrainConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """Read `config.data`, train the tokenizer unless one is passed, encode the text, and split it.

    The held-out part is `val_data`, if it is set. Otherwise, it is the last `val_fraction` of the
    characters, or of the bytes for the `byte` tokenizer. See `train_tokenizer` for the text that
    the tokenizer is trained on.
    """
    sources, kept = _read_all(config, config.data), 1.0 - config.val_fraction
    held_out = [] if config.val_data is None else _read_all(config, config.val_data)
    content = b"".join(source.content for source in (*sources, *held_out))
    if config.tokenizer == "byte":
        tokenizer = tokenizer or ByteTokenizer()
        parts = [source.content.removeprefix(MARK) for source in (*sources, *held_out)]
        whole = b"".join(parts)
        cut = sum(map(len, parts[: len(sources)])) if held_out else int(len(whole) * kept)
        train, val = np.frombuffer(whole[:cut], np.uint8), np.frombuffer(whole[cut:], np.uint8)
        val_characters = len(whole[cut:].decode("utf-8", "replace"))
    else:
        texts = [source.text(config.text_errors) for source in (*sources, *held_out)]
        text = "".join(texts)
        if not text:
            raise DataError(f"data is {config.data!r}: it is empty except for a byte-order mark")
        cut = sum(map(len, texts[: len(sources)])) if held_out else int(len(text) * kept)
        tokenizer = tokenizer or train_tokenizer(config, text, text[:cut])
        train, val = tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:])
        largest = max(int(part.max(initial=0)) for part in (train, val))
        if config.tokenizer == "pretrained" and largest >= config.model.vocab_size:
            rule = f"{config.init_from} has only {config.model.vocab_size} tokens"
            raise DataError(f"data is {config.data!r}: it contains token {largest}, but {rule}")
        val_characters = len(text) - cut
    # with this dtype, byte tokens take no more memory than the file
    small = np.min_scalar_type(tokenizer.vocab_size - 1)
    dtype = small if small.itemsize < 4 else np.dtype(np.int32)
    needed = config.sequence_len + 1
    for name, part in (("training", train), ("held-out", val)):
        if len(part) < needed:
            subject = "it" if config.val_data == config.data else f"its {name} part"
            raise ShortText(
                f"data is {config.data!r}: {subject} has {len(part)} tokens, "
                f"but a window of context {config.sequence_len} needs {needed}",
                len(part),
            )
        if len(part) >= 2**31:
            rule = f"its {name} part has {len(part):,} tokens: must have fewer than 2**31"
            raise DataError(f"data is {config.data!r}: {rule}")
    return Dataset(
        tokenizer=tokenizer,
        train=train.astype(dtype),
        val=val.astype(dtype),
        val_characters=val_characters,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _read_all(config: TrainConfig, data: str) -> list[Source]:
    """Call `read`. Raises DataError if the data is empty."""
    sources = read(data, config.out)
    if not any(source.content for source in sources):
        hint = "; pipe a text into the command" if data == "-" else ""
        name = "data" if data == config.data else "val_data"
        raise DataError(f"{name} is {data!r}: it is empty{hint}")
    return sources


def train_tokenizer(config: TrainConfig, text: str, training: str) -> Tokenizer:
    """Create the tokenizer that a config specifies.

    The `char` tokenizer collects its characters from all of `text`. The `word` and `bpe` tokenizers
    are trained on `training`.
    """
    match config.tokenizer:
        case "byte":
            return ByteTokenizer()
        case "char":
            return CharTokenizer.train(text)
        case "word":
            return WordTokenizer.train(training, config.word_count)
        case "bpe":
            return BPETokenizer.train(training, config.bpe_vocab_size)
        case "pretrained":
            raise DataError("tokenizer is 'pretrained': no tokenizer was passed")


def line_tokenizer(config: TrainConfig, lines: Iterable[str], training: Iterable[str]) -> Tokenizer:
    """Create a tokenizer for lines as `train_tokenizer` does, but without a newline in `char`."""
    if config.tokenizer == "char":
        return CharTokenizer.train("".join(lines))
    return train_tokenizer(config, "\n".join(lines), "\n".join(training))


def random_starts(
    seed: int, step: int, shape: tuple[int, ...], count: int
) -> np.ndarray:  # i32[shape]
    """Draw the window starts of a step uniformly from [0, count).

    The windows depend only on the arguments, and not on the division of a step into micro-batches.
    """
    if not (0 <= seed < 2**32 and 0 <= step < 2**63 and 0 < count < 2**31):
        raise ValueError(f"seed {seed}, step {step} or count {count} is out of range")
    # unlike Generator methods, this raw stream is the same in all NumPy versions
    words = np.random.Philox(key=(seed << 64) + step).random_raw(int(np.prod(shape)))
    scaled = (words >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)
    return scaled.astype(np.int32).reshape(shape)


def consecutive_starts(tokens: int, length: int) -> np.ndarray:  # i32[n]
    """Return window starts that cover the text once. The last window may extend past its end."""
    return np.arange(0, tokens - 1, length, dtype=np.int32)
