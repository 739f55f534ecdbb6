"""Tokenizers that `train.py` creates, for characters, bytes, BPE and words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from transformer_jax.tokenizers.pretrained import pretrained_from_json
from transformer_jax.tokenizers.utf8 import DataError as DataError
from transformer_jax.tokenizers.utf8 import byte_letters, utf8
from transformer_jax.untrusted_files import Json, JsonObject
from transformer_jax.values import tokens_repr

# BPE merges within these pieces, which are those of GPT-2 with limited length to ensure linear time
_PIECE = r" ?\p{L}{1,32}| ?\p{N}{1,8}| ?[^\s\p{L}\p{N}]{1,16}|\s{1,16}(?!\S)"


class Tokenizer(Protocol):
    """Interface of all tokenizers."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """Encode text as IDs, i32[n]; raise DataError for a character that has no ID."""

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the UTF-8 bytes of the IDs. A character can be split between calls."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decode IDs; invalid UTF-8 becomes U+FFFD. Raises DataError for an unknown ID."""

    def to_json(self) -> str: ...


class HasBytes(Protocol):
    """`Tokenizer` methods that `WholeText` needs."""

    @property
    def vocab_size(self) -> int: ...
    def to_bytes(self, ids: Iterable[int]) -> bytes: ...


class WholeText:
    """Mixin that implements `decode` by calling `to_bytes`."""

    def decode(self: HasBytes, ids: Iterable[int]) -> str:
        """Decode IDs; invalid UTF-8 becomes U+FFFD. Raises DataError for an unknown ID."""
        return self.to_bytes(known_ids(ids, self.vocab_size)).decode("utf-8", "replace")


def known_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return IDs as a list of integers; raise DataError for an ID outside the vocabulary."""
    if not isinstance(ids, Iterable):
        raise DataError(f"ids is {ids!r:.80}: must be a sequence of integers")
    found = np.asarray(ids if hasattr(ids, "dtype") else list(ids))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise DataError(f"ids are {found.dtype}{list(found.shape)}: must be a sequence of integers")
    for i in found:
        if not 0 <= i < vocab_size:
            raise DataError(f"ID {i} has no token: must be at least 0 and below {vocab_size}")
    return [int(i) for i in found]


@dataclass(frozen=True)
class CharTokenizer(WholeText):
    """Tokenizer with one ID per character, in the order of code points.

    Attributes:
        characters: one or more distinct characters, in sorted order.
    """

    characters: str

    def __post_init__(self) -> None:
        if not self.characters or sorted(set(self.characters)) != list(self.characters):
            raise DataError(
                "the characters of a tokenizer must be distinct and sorted, and at least one"
            )

    @classmethod
    def train(cls, text: str) -> CharTokenizer:
        """Create a tokenizer for all characters in a text."""
        return cls("".join(map(chr, np.unique(_code_points(text)))))

    def __repr__(self) -> str:
        return tokens_repr(self)

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        points, known = _code_points(text), _code_points(self.characters)
        # an unknown character gets the ID of another character, which the comparison below detects
        ids = np.minimum(np.searchsorted(known, points), len(known) - 1).astype(np.int32)
        wrong = np.flatnonzero(known[ids] != points)
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"character {at} is U+{ord(text[at]):04X} {text[at]!r}, "
                f"which is not among the {self.vocab_size} characters of the training text"
            )
        return ids

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return "".join(self.characters[i] for i in ids).encode("utf-8", "surrogatepass")

    def to_json(self) -> str:
        return _dump({"kind": "char", "characters": self.characters})


@dataclass(frozen=True)
class ByteTokenizer(WholeText):
    """Tokenizer with one ID per UTF-8 byte, which supports any text or file."""

    def __repr__(self) -> str:
        return tokens_repr(self)

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
class BPETokenizer(WholeText):
    """Byte-level BPE tokenizer (Sennrich et al. 2016; Radford et al. 2019).

    Because every byte is a token, encoding is lossless for any text.

    Attributes:
        definition: the JSON of the `tokenizers` library.
    """

    definition: str

    def __post_init__(self) -> None:
        try:
            pieces = set(self._bytes)
        except Exception as error:  # the Rust library raises plain Exception
            raise DataError(f"the definition of a tokenizer is invalid: {error!r}") from None
        if not pieces >= {bytes([byte]) for byte in range(256)}:
            raise DataError("in the definition of a tokenizer, not every byte has a token")

    @classmethod
    def train(cls, text: str, vocab_size: int) -> BPETokenizer:
        """Train a tokenizer with the 256 bytes and the most frequent merges.

        Args:
            text: the training text.
            vocab_size: the maximum number of tokens.
        """
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
            # Bytes that do not occur in the training text also get a token, so that any text can be
            # encoded.
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        # `encode` splits text in the same way, so no token spans two parts.
        model.train_from_iterator(_lines(text), trainer=trainer)
        return cls(_canonical(json.loads(model.to_str())))

    def __repr__(self) -> str:
        return tokens_repr(self)

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
        # the library encodes the parts in parallel
        parts = self._library.encode_batch_fast(_lines(text), add_special_tokens=False)
        return np.array([i for part in parts for i in part.ids], np.int32)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes[i] for i in ids)

    def to_json(self) -> str:
        return _dump({"kind": "bpe", "definition": json.loads(self.definition)})


@dataclass(frozen=True)
class WordTokenizer(WholeText):
    """Tokenizer with one ID per space-separated word. All unknown words share an ID.

    ID 0 is an unknown word, and ID 1 is the end of a line. Decoding inserts a single space between
    words, regardless of the original spaces.

    Attributes:
        words: distinct words without spaces. Their IDs start at 2.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        # text is split at spaces, so a word with a space would never match
        if len(set(self.words)) != len(self.words) or not all(
            w == "".join(w.split()) and w for w in self.words
        ):
            raise DataError("the words of a tokenizer must be distinct and without spaces")

    @classmethod
    def train(cls, text: str, count: int = 1) -> WordTokenizer:
        """Create a tokenizer for the words in a text, with the most frequent words first.

        Args:
            text: the training text.
            count: the minimum number of occurrences for a word to be included.
        """
        found = Counter(text.split())
        known = [word for word, times in found.items() if times >= count]
        # ties are sorted by word, so that equal texts result in equal IDs
        return cls(tuple(sorted(known, key=lambda word: (-found[word], word))))

    def __repr__(self) -> str:
        return tokens_repr(self)

    @property
    def vocab_size(self) -> int:
        return len(self.words) + 2

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words, start=2)}

    def encode(self, text: str) -> np.ndarray:
        utf8(text)
        ids: list[int] = []
        for number, line in enumerate(text.split("\n")):
            ids += [1] * (number > 0)
            ids += [self._ids.get(word, 0) for word in line.split()]
        return np.array(ids, np.int32)

    def unknown(self, text: str) -> list[str]:
        """Return the distinct unknown words in a text."""
        return [word for word in dict.fromkeys(text.split()) if word not in self._ids]

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the UTF-8 bytes of the IDs, with a space before each word."""
        spelled = (
            "\n" if i == 1 else " " + ("<unk>" if i == 0 else self.words[i - 2]) for i in ids
        )
        return "".join(spelled).encode("utf-8", "surrogatepass")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the words, separated by spaces; raise DataError for an ID that has no word."""
        return super().decode(ids).removeprefix(" ")

    def to_json(self) -> str:
        return _dump({"kind": "word", "words": list(self.words)})


def tokenizer_of(content: Json) -> Tokenizer:
    """Create the tokenizer that a JSON object describes; raise DataError if it is invalid."""
    match content:
        case {"kind": "char", "characters": str(characters), **rest} if not rest:
            return CharTokenizer(characters)
        case {"kind": "byte", **rest} if not rest:
            return ByteTokenizer()
        case {"kind": "bpe", "definition": dict(definition), **rest} if not rest:
            return BPETokenizer(_canonical(definition))
        case {"kind": "word", "words": list(words), **rest} if not rest:
            texts = tuple(word for word in words if isinstance(word, str))
            if len(texts) < len(words):
                raise DataError("the words of a tokenizer must be strings")
            return WordTokenizer(texts)
        case dict() if content.get("kind") == "pretrained":
            return pretrained_from_json(content)
    kinds = "'char', 'byte', 'bpe', 'word', 'special' or 'pretrained'"
    raise DataError(f"tokenizer: must have kind {kinds}, and only the fields of that kind")


def _dump(content: JsonObject) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def _canonical(definition: JsonObject) -> str:
    return json.dumps(definition, ensure_ascii=False)


def _code_points(text: str) -> np.ndarray:
    if not isinstance(text, str):
        raise DataError(f"text is {text!r:.80}: must be a string")
    # UTF-32 has one word per character. A lone surrogate, which a damaged text may contain, is
    # kept.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _lines(text: str, size: int = 1 << 16) -> list[str]:
    """Split text into parts of at most `size` characters, after a newline if possible."""
    parts, start = [], 0
    while start < len(text):
        end = start + size
        if end < len(text):
            newline = text.rfind("\n", start, end)
            end = newline + 1 if newline >= 0 else end
        parts.append(text[start:end])
        start = end
    return parts
