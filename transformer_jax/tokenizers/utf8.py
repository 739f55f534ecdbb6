"""UTF-8 encoding, GPT-2's byte alphabet and the error that all tokenizers raise."""

from __future__ import annotations


class DataError(ValueError):
    """Error for text or data that cannot be read, encoded or split into windows."""


def utf8(text: str) -> bytes:
    """Encode a string; raise DataError for a lone surrogate, which UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise DataError(f"text is {text!r:.80}: must be a string")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        point = ord(text[error.start])
        message = (
            f"character {error.start} is U+{point:04X}, a lone surrogate, which UTF-8 cannot encode"
        )
        raise DataError(message) from None


def byte_letters() -> dict[str, int]:
    """Map each printable character in byte-level BPE files to its byte, as GPT-2 does."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}
