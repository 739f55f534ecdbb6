"""Configure how files of text become a folder of tokens."""

from __future__ import annotations

from typing import Literal

from transformer_jax.config.fields import Size, check_types, fail, unread
from transformer_jax.config.keywords import config_class

DocumentFormat = Literal["lines", "paragraphs", "files", "jsonl", "parquet"]

TRAINED = ("byte", "char", "word", "bpe")
"""Tokenizers that a preparation makes itself; any other is given."""


@config_class
class PrepareConfig:
    """Describe a preparation: what to read, where documents end, how to cut them into tokens."""

    data: tuple[str, ...]
    """The files, in the order in which their documents follow each other."""
    documents: DocumentFormat | None = None
    """lines, paragraphs (ended by an empty line) or files of text; jsonl: a field of an object a
    line; parquet: a column. None: jsonl and parquet by the end of a file's name, else paragraphs.
    """
    field: str = "text"
    """jsonl and parquet: the field or column that holds a document."""
    tokenizer: str = "bpe"
    """byte, char, word or bpe; else the folder whose tokenizer is taken."""
    bpe_vocab_size: Size = 32768
    """bpe: token kinds."""
    word_count: Size = 1
    """word: how often a word must occur in the sample to be a token."""
    sample_mb: Size = 64
    """bpe and word: so many 10**6 bytes of the files, evenly spread, are learnt from."""
    val_fraction: float = 0.01
    """Share of the documents that are held out; a document's own hash decides."""
    text_errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8: strict stops and names the offset, replace writes U+FFFD."""
    shard_mb: Size = 512
    """Largest file of tokens, in 10**6 bytes."""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.data:
            fail("data", self.data, "must name at least one file")
        if not 0.0 < self.val_fraction < 1.0:
            fail("val_fraction", self.val_fraction, "must be between 0 and 1")
        if not self.field:
            fail("field", self.field, "must not be empty")
        if self.bpe_vocab_size < 257:
            rule = "must be at least 257 (every byte, one merge)"
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
        """Return how a file holds its documents."""
        if self.documents is not None:
            return self.documents
        if file.lower().endswith((".jsonl", ".ndjson")):
            return "jsonl"
        return "parquet" if file.lower().endswith(".parquet") else "paragraphs"
