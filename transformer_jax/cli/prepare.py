"""Convert text files to a folder of tokens that train.py reads in pieces.

python -m transformer_jax prepare --data a.txt b.txt --out FOLDER
python -m transformer_jax prepare --data web-*.jsonl --field text --out web --bpe-vocab-size 32768
python -m transformer_jax prepare --data books.parquet --out books --tokenizer web
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_jax.cli.command import read_tokenizer, run
from transformer_jax.cli.flags import WORDS
from transformer_jax.cli.report import shell_path
from transformer_jax.config import ConfigError
from transformer_jax.config.prepare import TRAINED, PrepareConfig

if TYPE_CHECKING:
    from transformer_jax.corpus.prepare import Progress


@dataclass(frozen=True, kw_only=True)
class Prepare(PrepareConfig):
    """Command-line options."""

    data: tuple[str, ...] = field(metadata=WORDS)
    """Input files, in order, as text, JSON Lines or Parquet."""
    tokenizer: str = "bpe"
    """The kind of tokenizer (byte, char, word or bpe), or the folder of a run, a published model or
    a prepared corpus, whose tokenizer is used."""
    out: str
    """Output folder, which is new or contains an unfinished preparation to continue."""
    workers: int | None = None
    """Number of processes; default: one process per processor."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Prepare, argv, write_folder)


def write_folder(options: Prepare) -> None:
    """Prepare the files and print a summary."""
    # The folder stores this config without `out` and `workers`, which may change on a continuation.
    names = [one.name for one in fields(PrepareConfig)]
    config = PrepareConfig(**{name: getattr(options, name) for name in names})
    workers = _processors() if options.workers is None else options.workers
    from transformer_jax.corpus.prepare import prepare

    tokenizer, name = None, config.tokenizer
    if name not in TRAINED:
        if not Path(name).exists() and name.count("/") != 1:
            rule = f"must be {', '.join(TRAINED)} or a folder with tokenizer.json"
            raise ConfigError(f"tokenizer is {name!r}: {rule}")
        tokenizer = read_tokenizer(name)
    with ProgressLine() as line:
        corpus = prepare(
            config, options.out, tokenizer=tokenizer, workers=workers, report=line.show
        )
    train, val = corpus.train, corpus.val
    print(
        f"{corpus.path}: {train.tokens:,} tokens in {train.documents:,} documents, "
        f"{val.tokens:,} in {val.documents:,} held out; vocabulary of "
        f"{corpus.tokenizer.vocab_size:,}, {8 * train.dtype.itemsize} bits per token"
    )
    print(f"python train.py --data {shell_path(str(corpus.path))} --out FOLDER")


class ProgressLine:
    """Progress on standard error, as one updated line in a terminal or several lines in a file."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next, self._phase = 0.0, ""
        self._began, self._before = 0.0, 0
        self._shown = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown and self._terminal:
            print(file=sys.stderr)

    def show(self, progress: Progress) -> None:
        """Print a line unless the previous line was printed too recently."""
        now = time.monotonic()
        if progress.phase != self._phase:
            self._phase, self._next = progress.phase, 0.0
            self._began, self._before = now, progress.done
        # The last line of a phase is always printed.
        complete = progress.total > 0 and progress.done == progress.total
        if now < self._next and not complete:
            return
        self._next = now + (0.2 if self._terminal else 10.0)
        start, end = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{start}{self._line(progress, now)}", end=end, file=sys.stderr, flush=True)
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
            line += f", {read / seconds / 1e6:,.1f} MB/s, {left:,.0f} seconds left"
        return line


def _processors() -> int:
    """Return the number of processors that this process may use."""
    # `cpu_count` counts the processors of the machine, but a container may have fewer.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
