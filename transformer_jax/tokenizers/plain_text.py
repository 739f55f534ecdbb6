r"""Read text from bytes, and cut it into lines and documents: the same for all that read files.

A file is UTF-8; a byte-order mark at its beginning is no part of the text. A line ends at \n, \r\n
or \r, as in Python's text files, and nowhere else: U+2028, U+0085, a form feed are characters like
others. A blank line has nothing but white space (`str.isspace`). Documents are the lines that are
not blank; or paragraphs, the lines between blank ones; or whole files; with \n between their lines.
"""

from __future__ import annotations

import re
from typing import Literal

from transformer_jax.tokenizers.utf8 import DataError

MARK = b"\xef\xbb\xbf"
"""The byte-order mark, U+FEFF, in UTF-8."""

_UTF_16 = "UTF-16: iconv -f UTF-16 -t UTF-8 makes text of it"
_COMPRESSED = ": decompress it first"
_KINDS = (
    (rb"\xff\xfe|\xfe\xff|\0[^\0]\0[^\0]|[^\0]\0[^\0]\0", _UTF_16),
    (rb"\x1f\x8b", f"gzip{_COMPRESSED}"),
    (rb"\x28\xb5\x2f\xfd", f"zstd{_COMPRESSED}"),
    (rb"BZh[1-9]1AY&SY", f"bzip2{_COMPRESSED}"),
    (rb"\xfd7zXZ\0", f"xz{_COMPRESSED}"),
    (rb"PK\x03\x04", "a zip archive: unpack it first"),
    (rb"PAR1\x15", "Parquet: python -m transformer_jax prepare --documents parquet reads it"),
)
"""How files begin that are no text, whatever their names end in."""
_NO_CONTROL = re.compile(rb"[^\x00-\x1f]")
_WHITE = re.compile(rb"[\t-\r]")


def read_text(content: bytes, where: str, errors: str | None = None, at: int = 0) -> str:
    """Return the text of a file, or of a part that begins at byte `at`, as UTF-8.

    `errors` is the setting `text_errors`: strict, or replace, which puts U+FFFD for what is no
    UTF-8; None is strict where there is no such setting. DataError names the first byte that is no
    UTF-8, or the kind of a file that is no text.
    """
    if at == 0:
        for begins, kind in _KINDS:
            if re.match(begins, content, re.DOTALL):
                raise DataError(f"{where}: byte 0 is 0x{content[0]:02x}: not UTF-8 but {kind}")
        # UTF-16 without a mark: three in four of every second byte are the same few control
        # characters, the high bytes of ASCII and of an alphabet or two. A text in UTF-8 that has so
        # many control characters has more kinds of them, or only white ones.
        for high in (content[:4096:2], content[1:4096:2]):
            controls = _NO_CONTROL.sub(b"", high)
            many = 10 <= len(high) <= 4 / 3 * len(controls)
            if many and len(set(controls)) <= 3 and _WHITE.sub(b"", controls):
                raise DataError(f"{where}: byte 0 is 0x{content[0]:02x}: not UTF-8 but {_UTF_16}")
    try:
        text = content.decode("utf-8", errors or "strict")
    except UnicodeDecodeError as error:
        hint = "; `text_errors='replace'` marks it" if errors else ""
        raise DataError(
            f"{where}: byte {at + error.start} is 0x{content[error.start]:02x}: not UTF-8 "
            f"({error.reason}){hint}"
        ) from None
    return text.removeprefix("\ufeff") if at == 0 else text


def split_lines(text: str) -> list[str]:
    """Return the lines of a text without their ends; the last one needs none."""
    found = _ended(text).split("\n")
    return found if found[-1] else found[:-1]


def split_documents(text: str, kind: Literal["lines", "paragraphs", "files"]) -> list[str]:
    """Return the documents of the text of a file that are not blank."""
    text = _ended(text)
    if kind == "lines":
        parts = text.split("\n")
    else:
        parts = re.split(r"\n\s*\n", f"\n{text}\n") if kind == "paragraphs" else [text]
    return [part.strip("\n") for part in parts if part.strip()]


def _ended(text: str) -> str:
    """Return a text whose lines all end at a line feed."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
