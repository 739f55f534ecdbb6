"""Lines and documents are the same for every reader; `tests.corpus.fuzz_lines` draws more texts."""

import gzip

import pytest

from tests.corpus.fuzz_lines import fuzz
from transformer_jax.config.prepare import PrepareConfig
from transformer_jax.tokenizers.plain_text import read_text, split_documents, split_lines
from transformer_jax.tokenizers.utf8 import DataError


@pytest.mark.slow
def test_all_readers_split_lines_and_documents_identically():
    count, calls, failed = fuzz(range(3, 26))
    assert not failed, "\n".join(failed)
    assert count == 23 and len(calls) == 17 and min(calls.values()) > 9


def test_lines_match_python_and_blank_lines_end_paragraphs():
    text = " \n\na\u2028b\r\nc\x0c\rd\x85\n\u2029\t\ne\n\n"
    assert split_lines(text) == [" ", "", "a\u2028b", "c\x0c", "d\x85", "\u2029\t", "e", ""]
    assert split_documents(text, "lines") == ["a\u2028b", "c\x0c", "d\x85", "e"]
    assert split_documents(text, "paragraphs") == ["a\u2028b\nc\x0c\nd\x85", "e"]
    assert split_documents(text, "files") == [" \n\na\u2028b\nc\x0c\nd\x85\n\u2029\t\ne"]
    assert split_lines("") == [] and split_lines("\n") == [""] == split_lines("\r")


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("wide".encode("utf-16"), "UTF-16"),
        ("wide".encode("utf-16-be"), "UTF-16"),
        ("\u0442\u0435\u043a\u0441\u0442, \u0447\u0442\u043e".encode("utf-16-le"), "UTF-16"),
        (
            "\u03b3\u03c1\u03b1\u03bc\u03bc\u03ae\n\u05d0\u05d1\u05d2\n".encode("utf-16-be"),
            "UTF-16",
        ),
        (gzip.compress(b"text", mtime=0), "gzip"),
        (b"\x28\xb5\x2f\xfd text", "zstd"),
        (b"PAR1\x15\x04", "Parquet"),
    ],
)
def test_binary_formats_are_named_and_never_decoded(content, kind, errors):
    with pytest.raises(DataError, match=f"^file: byte 0 is 0x..: must be UTF-8, not {kind}"):
        read_text(content, "file", errors)


@pytest.mark.parametrize(
    "text",
    [
        "a\tb\tc\td\n" * 7,
        "\0",
        "a\0",
        "ab\0cd\x1b[0m\0 " * 5,
        "\x01a",
        "\f\n" * 9,
        "\x1db\x1c \x0b\u3000\x1f\x1e\0\t\x1c\x1d\x1f\r\x1d\n" * 2,
        "\u0442\u0435" * 9,
    ],
)
def test_control_characters_are_accepted_as_text(text):
    assert read_text(text.encode(), "file") == text


def test_byte_order_mark_is_removed_only_at_start_of_file():
    marked = "\ufeffa\ufeff".encode()
    assert read_text(marked, "file") == "a\ufeff"
    assert read_text(marked, "file", at=7) == "\ufeffa\ufeff"
    with pytest.raises(DataError, match=r"file: byte 10 is 0xff"):
        read_text(b"abc\xff", "file", at=7)


def test_text_errors_option_is_suggested_only_if_available():
    with pytest.raises(DataError, match=r"`text_errors='replace'` substitutes U\+FFFD$"):
        read_text(b"abc\xff", "file", "strict")
    with pytest.raises(DataError, match=r"must be UTF-8 \(invalid start byte\)$"):
        read_text(b"abc\xff", "file")


def test_file_suffixes_are_case_insensitive():
    config = PrepareConfig(data=("a.JSONL", "b.Parquet", "c.NDJson", "d.TXT"), field="body")
    assert [*map(config.format_of, config.data)] == ["jsonl", "parquet", "jsonl", "paragraphs"]
