"""Token-by-token decoding with the same result as the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.untrusted_files import Json, shown

Step: TypeAlias = Callable[[str, bool, bool], str]
"""Function that maps (token, is first, is last) to the token's new text."""

_CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
    (" 'm", "'m"), (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""Replacements (old, new) that BERT's decoder applies to clean up spaces."""


@dataclass(frozen=True)
class Spelling:
    """Decoder of the `tokenizers` library that is applied token by token."""

    byte_level: bool = False
    byte_fallback: bool = False
    steps: tuple[Step, ...] = ()
    """Functions applied in order."""
    ends: tuple[tuple[str, int, int], ...] = ()
    """Characters to strip, each with the maximum number to remove at the start and at the end of
    the text."""
    marks_spaces: bool = True
    """Whether each token itself shows whether a space precedes it."""

    def piece(self, token: str, first: bool, last: bool) -> bytes:
        """Return the bytes of a token."""
        if self.byte_fallback and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
            return bytes.fromhex(byte[1])
        for step in self.steps:
            token = step(token, first, last)
        return token.encode()

    def strip(self, text: str) -> str:
        """Remove the characters that the decoder strips at both ends of the whole text."""
        for character, start, stop in self.ends:
            while start and text.startswith(character):
                text, start = text[len(character) :], start - 1
            while stop and text.endswith(character):
                text, stop = text[: -len(character)], stop - 1
        return text


def read_decoder(decoder: Json) -> Spelling:
    """Read a decoder like that of GPT-2, SentencePiece or BERT; raise DataError for any other."""
    if decoder is None:
        return Spelling(steps=(_new_word,), marks_spaces=False)
    if not isinstance(decoder, dict):
        raise DataError(f"decoder is {shown(decoder)}: must be an object")
    listed = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    parts = [part for part in listed if isinstance(part, dict)] if isinstance(listed, list) else []
    if not isinstance(listed, list) or len(parts) < len(listed):
        raise DataError(f"decoder {shown(decoder)}: must be a sequence of objects")
    kinds = [part.get("type") for part in parts]
    if "ByteLevel" in kinds:
        if all(kind in ("ByteLevel", "Fuse") for kind in kinds):
            return Spelling(byte_level=True)
        raise DataError(
            f"decoder is a sequence of {', '.join(map(str, kinds))}, which is not supported"
        )
    steps, ends = list[Step](), list[tuple[str, int, int]]()
    for n, part in enumerate(parts):
        match part:
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip", "content": str(c), "start": int(start), "stop": int(stop)} if (
                "Fuse" in kinds[:n] and c
            ):
                ends.append((c, start, stop))
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                "Fuse" not in kinds[:n] and old
            ):
                steps.append(partial(_replace, old, new, new))
            case {"type": "Metaspace", "replacement": str(mark), **rest}:
                default = "always" if rest.get("add_prefix_space", True) else "never"
                prepends = (rest.get("prepend_scheme") or default) != "never"
                steps.append(partial(_metaspace, mark, prepends))
            case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
                steps.append(partial(_word_piece, prefix, cleanup))
            case {"type": "BPEDecoder", "suffix": str(suffix)} if suffix:
                steps.append(partial(_replace, suffix, " ", ""))
            case _:
                raise DataError(f"decoder {shown(part)} is not supported")
    return Spelling(
        byte_fallback="ByteFallback" in kinds,
        steps=tuple(steps),
        ends=tuple(ends),
        marks_spaces="WordPiece" not in kinds,
    )


def _new_word(token: str, first: bool, last: bool) -> str:
    return token if first else " " + token


def _replace(old: str, new: str, at_end: str, token: str, first: bool, last: bool) -> str:
    """Replace `old` with `new`, or with `at_end` in the last token."""
    return token.replace(old, at_end if last else new)


def _metaspace(mark: str, prepends: bool, token: str, first: bool, last: bool) -> str:
    """Decode a SentencePiece token by replacing its mark with a space."""
    return token.replace(mark, "" if first and prepends else " ")


def _word_piece(prefix: str, cleanup: bool, token: str, first: bool, last: bool) -> str:
    """Decode a BERT token by adding a space before new words, but not before punctuation."""
    if not first:
        token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
    for old, new in _CLEANED if cleanup else ():
        token = token.replace(old, new)
    return token
