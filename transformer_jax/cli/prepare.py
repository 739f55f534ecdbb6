"""Turn files of text into a folder of tokens that train.py reads piece by piece.

python -m transformer_jax prepare --data a.txt b.txt --out FOLDER
python -m transformer_jax prepare --data web-*.jsonl --field text --out web --bpe-vocab-size 32768
python -m transformer_jax prepare --data books.parquet --out books --tokenizer web
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from transformer_jax.cli.command import Parser, run
from transformer_jax.cli.report import shell_path
from transformer_jax.config import ConfigError
from transformer_jax.config.prepare import TRAINED, DocumentFormat, PrepareConfig

if TYPE_CHECKING:
    from transformer_jax.corpus.prepare import Progress
    from transformer_jax.tokenizers.trained import Tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (a model cannot be read) or 2 (usage)."""
    return run(_parser(), argv, _prepare)


def _prepare(arguments: argparse.Namespace) -> None:
    given = {field.name: getattr(arguments, field.name) for field in fields(PrepareConfig)}
    given["data"] = tuple(arguments.data)
    config = PrepareConfig(**{name: v for name, v in given.items() if v is not MISSING})
    workers = _processors() if arguments.workers is None else arguments.workers
    if workers < 1:
        raise ConfigError(f"workers is {workers}: must be at least 1")
    from transformer_jax.corpus.prepare import prepare

    tokenizer = None if config.tokenizer in TRAINED else read_tokenizer(config.tokenizer)
    with ProgressLine() as line:
        corpus = prepare(
            config, arguments.out, tokenizer=tokenizer, workers=workers, report=line.show
        )
    train, val = corpus.train, corpus.val
    print(
        f"{corpus.path}: {train.tokens:,} tokens of {train.documents:,} documents, "
        f"{val.tokens:,} of {val.documents:,} held out; vocabulary of "
        f"{corpus.tokenizer.vocab_size:,}, {8 * train.dtype.itemsize} bits a token"
    )
    print(f"python train.py --data {shell_path(str(corpus.path))} --out FOLDER")


def read_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a run, of a prepared folder, or of a published model."""
    from transformer_jax.pretrained.weights import open_weights
    from transformer_jax.text.text_model import published_tokenizer
    from transformer_jax.tokenizers.special import tokenizer_from_json

    file = Path(path, "tokenizer.json")
    if file.is_file():
        text = file.read_text("utf-8", "surrogatepass")
        if text.startswith('{\n "kind"'):  # as `to_json` writes it
            return tokenizer_from_json(text)
    elif not Path(path).exists() and path.count("/") != 1:
        rule = f"must be {', '.join(TRAINED)}, or a folder with tokenizer.json"
        raise ConfigError(f"tokenizer is {path!r}: {rule}")
    return published_tokenizer(open_weights(path))


class ProgressLine:
    """Show on standard error how far a preparation is: over and over, or now and then in a file."""

    def __init__(self) -> None:
        self._alone = sys.stderr.isatty()
        self._next, self._phase = 0.0, ""
        self._began, self._before = 0.0, 0
        self._shown = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown and self._alone:
            print(file=sys.stderr)

    def show(self, progress: Progress) -> None:
        """Show a line, if the last one is old enough."""
        now = time.monotonic()
        if progress.phase != self._phase:
            self._phase, self._next = progress.phase, 0.0
            self._began, self._before = now, progress.done
        whole = progress.total > 0 and progress.done == progress.total
        if now < self._next and not whole:
            return
        self._next = now + (0.2 if self._alone else 10.0)
        print(
            f"\r\x1b[K{self._line(progress, now)}" if self._alone else self._line(progress, now),
            end="" if self._alone else "\n", file=sys.stderr, flush=True,
        )  # fmt: skip
        self._shown = True

    def _line(self, progress: Progress, now: float) -> str:
        if not progress.total:
            return f"prepare: {progress.phase}"
        line = f"prepare: {progress.phase} {progress.done / progress.total:.0%}"
        line += f" of {progress.total / 1e6:,.1f} MB"
        if progress.documents:
            line += f", {progress.documents:,} documents"
        seconds, read = now - self._began, progress.done - self._before
        if seconds > 1.0 and read:
            left = (progress.total - progress.done) / (read / seconds)
            line += f", {read / seconds / 1e6:,.1f} MB a second, {left:,.0f} seconds left"
        return line


def _processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _parser() -> Parser:
    parser = Parser("prepare", "Turn files of text into a folder of tokens for train.py.")
    add = parser.add_argument
    add("--data", required=True, nargs="+", metavar="FILE", help="text, JSON lines or Parquet")
    add("--out", required=True, metavar="FOLDER", help="where to write, or to go on")
    add(
        "--documents", choices=get_args(DocumentFormat), default=MISSING,
        help="where documents end: at a line, at an empty line, with the file; or a field of JSON "
        "lines, or a column of Parquet; default: by the end of the name, else paragraphs",
    )  # fmt: skip
    add("--field", default=MISSING, metavar="NAME", help="of a document in JSON lines and Parquet")
    add(
        "--tokenizer", default=MISSING, metavar="NAME",
        help="byte, char, word, bpe [bpe]; or the folder of a run, of a published model, or one "
        "that is prepared, to take its tokenizer",
    )  # fmt: skip
    number: dict[str, Any] = {"type": int, "default": MISSING, "metavar": "N"}
    add("--bpe-vocab-size", help="token kinds of a bpe [32768]", **number)
    add("--word-count", help="word: how often a word must occur [1]", **number)
    add("--sample-mb", help="bpe and word: learnt from so many 10^6 bytes [64]", **number)
    add(
        "--val-fraction", type=float, default=MISSING, metavar="X",
        help="share of the documents that are held out [0.01]",
    )  # fmt: skip
    add(
        "--text-errors", choices=("strict", "replace"), default=MISSING,
        help="invalid UTF-8: strict stops and names the offset, replace writes U+FFFD [strict]",
    )  # fmt: skip
    add("--shard-mb", help="largest file of tokens, in 10^6 bytes [512]", **number)
    add("--workers", type=int, metavar="N", help="processes; default: one a processor")
    return parser
