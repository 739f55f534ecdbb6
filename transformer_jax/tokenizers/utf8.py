"""What every tokenizer shares: its error, UTF-8, and the letters that stand for bytes."""

from __future__ import annotations


class DataError(ValueError):
    """Text that cannot be read, encoded or cut into windows."""


def utf8(text: str) -> bytes:
    """DataError names a lone surrogate, which has none."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        point = ord(text[error.start])
        message = f"character {error.start} is U+{point:04X}, a lone surrogate: it has no UTF-8"
        raise DataError(message) from None


def byte_letters() -> dict[str, int]:
    """GPT-2's printable letter of every byte, as byte-level BPE files spell them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + i): byte for i, byte in enumerate(hidden)}
