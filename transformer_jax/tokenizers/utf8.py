"""Provide what all tokenizers share: their error, UTF-8, and the letters that spell bytes."""

from __future__ import annotations


class DataError(ValueError):
    """Report text that cannot be read, encoded or cut into windows."""


def utf8(text: str) -> bytes:
    """Encode a text; DataError names a lone surrogate, which has no UTF-8."""
    if not isinstance(text, str):
        raise DataError(f"text is {text!r:.80}: must be a str")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        point = ord(text[error.start])
        message = f"character {error.start} is U+{point:04X}, a lone surrogate: it has no UTF-8"
        raise DataError(message) from None


def byte_letters() -> dict[str, int]:
    """Map each of GPT-2's printable letters to the byte that it spells in byte-level BPE files."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + i): byte for i, byte in enumerate(hidden)}
