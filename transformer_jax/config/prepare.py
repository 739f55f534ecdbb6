"""Config of a preparation, which converts text files to a folder of tokens."""

from __future__ import annotations

from typing import Literal

from transformer_jax.config.fields import Size, check_types, fail, unread
from transformer_jax.config.keywords import config_class

DocumentFormat = Literal["lines", "paragraphs", "files", "jsonl", "parquet"]

TRAINED = ("byte", "char", "word", "bpe")
"""Tokenizers that a preparation can create. Any other value is the path of a folder."""


@config_class
class PrepareConfig:
    """Input files of a preparation, how to split them into documents, and the tokenizer."""

    data: tuple[str, ...]
    """Input files, in the order in which their documents are stored."""
    documents: DocumentFormat | None = None
    """Unit of text that counts as a document. For text files: lines, paragraphs (separated by empty
    lines) or files. jsonl: a field of the JSON object on each line. parquet: a value of a column.
    None uses jsonl or parquet for files with that extension, and paragraphs otherwise."""
    field: str = "text"
    """jsonl and parquet: name of the field or column that contains the documents."""
    tokenizer: str = "bpe"
    """Tokenizer: byte, char, word, bpe, or the path of a folder that contains a tokenizer."""
    bpe_vocab_size: Size = 32768
    """bpe: vocabulary size."""
    word_count: Size = 1
    """word: minimum number of occurrences that a word needs in the sample to become a token."""
    sample_mb: Size = 64
    """bpe and word: size of the training sample for the tokenizer, in 10**6 bytes, taken from all
    files."""
    val_fraction: float = 0.01
    """Fraction of the documents to hold out. The hash of a document decides whether it is held
    out."""
    text_errors: Literal["strict", "replace"] = "strict"
    """How to treat invalid UTF-8. strict raises an error with the byte offset; replace inserts
    U+FFFD."""
    shard_mb: Size = 512
    """Maximum size of each file of tokens, in 10**6 bytes."""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.data:
            fail("data", self.data, "must name at least one file")
        if not 0.0 < self.val_fraction < 1.0:
            fail("val_fraction", self.val_fraction, "must be between 0 and 1")
        if not self.field:
            fail("field", self.field, "must not be empty")
        if self.bpe_vocab_size < 257:
            rule = "must be at least 257 (256 bytes and one merge)"
            fail("bpe_vocab_size", self.bpe_vocab_size, rule)
        if self.tokenizer != "bpe":
            unread(self, "needs tokenizer 'bpe'", "bpe_vocab_size")
        if self.tokenizer != "word":
            unread(self, "needs tokenizer 'word'", "word_count")
        if self.tokenizer not in ("bpe", "word"):
            unread(self, "needs tokenizer 'bpe' or 'word'", "sample_mb")
        if not {self.format_of(file) for file in self.data} & {"jsonl", "parquet"}:
            unread(self, "needs documents 'jsonl' or 'parquet'", "field")

    def format_of(self, file: str) -> DocumentFormat:
        """Return the format of the documents in a file."""
        if self.documents is not None:
            return self.documents
        if file.lower().endswith((".jsonl", ".ndjson")):
            return "jsonl"
        return "parquet" if file.lower().endswith(".parquet") else "paragraphs"
