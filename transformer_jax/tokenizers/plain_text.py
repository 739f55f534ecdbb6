r"""Common rules for the text, lines and documents in a file.

A file is encoded in UTF-8. A byte-order mark at its beginning is not part of the text. Lines end at
\n, \r\n, or \r, as in Python's text files. U+2028, U+0085, and form feeds are ordinary characters.
A blank line contains only whitespace (`str.isspace`). Documents are nonblank lines, paragraphs (the
lines between blank lines), or whole files, with \n between their lines.
"""

from __future__ import annotations

import re
from typing import Literal

from transformer_jax.tokenizers.utf8 import DataError

MARK = b"\xef\xbb\xbf"
"""The byte-order mark, U+FEFF, in UTF-8."""

_UTF_16 = "UTF-16; convert it with iconv -f UTF-16 -t UTF-8"
_COMPRESSED = "; decompress it first"
_KINDS = (
    (rb"\xff\xfe|\xfe\xff|\0[^\0]\0[^\0]|[^\0]\0[^\0]\0", _UTF_16),
    (rb"\x1f\x8b", f"gzip{_COMPRESSED}"),
    (rb"\x28\xb5\x2f\xfd", f"zstd{_COMPRESSED}"),
    (rb"BZh[1-9]1AY&SY", f"bzip2{_COMPRESSED}"),
    (rb"\xfd7zXZ\0", f"xz{_COMPRESSED}"),
    (rb"PK\x03\x04", "a zip archive; unpack it first"),
    (rb"PAR1\x15", "Parquet; use python -m transformer_jax prepare --documents parquet"),
)
"""Initial bytes of files that are not UTF-8 text, regardless of their suffix."""
_NO_CONTROL = re.compile(rb"[^\x00-\x1f]")
_WHITE = re.compile(rb"[\t-\r]")


def read_text(content: bytes, where: str, errors: str | None = None, at: int = 0) -> str:
    """Decode a file, or a part of it that starts at byte `at`, as UTF-8.

    `errors` is the setting `text_errors`, which is strict or replace. replace inserts U+FFFD for
    invalid bytes. None means strict, for callers without this setting. Raises DataError if a byte
    is invalid or the file is not text. The message contains the position of the first invalid byte
    or the format of the file.
    """
    if at == 0:
        for start, kind in _KINDS:
            if re.match(start, content, re.DOTALL):
                raise DataError(f"{where}: byte 0 is 0x{content[0]:02x}: must be UTF-8, not {kind}")
        # Detect UTF-16 without a byte-order mark: at least three in four bytes at even (or odd)
        # positions are the same few control characters, the high bytes of one or two alphabets.
        # UTF-8 text with as many control characters has more kinds of them, or only whitespace.
        for high in (content[:4096:2], content[1:4096:2]):
            controls = _NO_CONTROL.sub(b"", high)
            many = 10 <= len(high) <= 4 / 3 * len(controls)
            if many and len(set(controls)) <= 3 and _WHITE.sub(b"", controls):
                raise DataError(
                    f"{where}: byte 0 is 0x{content[0]:02x}: must be UTF-8, not {_UTF_16}"
                )
    try:
        text = content.decode("utf-8", errors or "strict")
    except UnicodeDecodeError as error:
        hint = "; `text_errors='replace'` substitutes U+FFFD" if errors else ""
        raise DataError(
            f"{where}: byte {at + error.start} is 0x{content[error.start]:02x}: must be UTF-8 "
            f"({error.reason}){hint}"
        ) from None
    # only at the start of a file is U+FEFF a mark, not part of the text
    return text.removeprefix("\ufeff") if at == 0 else text


def split_lines(text: str) -> list[str]:
    """Split text into lines without line endings. The last line may lack a line ending."""
    found = _unify_line_ends(text).split("\n")
    return found if found[-1] else found[:-1]


def split_documents(text: str, kind: Literal["lines", "paragraphs", "files"]) -> list[str]:
    """Return the nonblank documents in the text of a file."""
    text = _unify_line_ends(text)
    if kind == "lines":
        parts = text.split("\n")
    else:
        parts = re.split(r"\n\s*\n", f"\n{text}\n") if kind == "paragraphs" else [text]
    return [part.strip("\n") for part in parts if part.strip()]


def _unify_line_ends(text: str) -> str:
    r"""Replace all line endings with \n."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
