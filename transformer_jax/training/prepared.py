"""Input pipeline for prepared folders, which shuffles, mixes, batches, and prefetches rows.

A grain pipeline (https://google-grain.readthedocs.io) orders the rows. It shuffles each folder with
a key of (seed, epoch) and mixes folders by weight. Every stage supports random access. The rows of
step n depend only on the seed and n, so a resumed run does not need iterator state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import grain
import numpy as np

from transformer_jax.config import ConfigError
from transformer_jax.corpus.folder import Part
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch
from transformer_jax.training.data import IGNORE
from transformer_jax.training.rows import pack
from transformer_jax.values import value_class

MIXTURE = 2**16
"""Number of rows after which the pattern of a mixture repeats."""

THREADS = 4
"""Number of prefetching threads."""

AHEAD = 8
"""Number of steps whose inputs are prefetched to the device."""


class PartRows(Protocol):
    """Rows from one part of a prepared folder."""

    @property
    def length(self) -> int:
        """Return the number of tokens per row."""

    @property
    def separate(self) -> bool:
        """Whether a row contains several documents that cannot attend to each other."""

    def __len__(self) -> int: ...

    def read(
        self, row: int, tokens: np.ndarray, labels: np.ndarray, segments: np.ndarray | None
    ) -> None:
        """Write a row into the arrays, i32[T] each. Positions without a token are not changed."""


@value_class
class WindowRows:
    """Consecutive windows of a part's token stream. No token is a label more than once."""

    part: Part
    length: int
    whole: bool = False
    """Whether to include a shorter window at the end."""
    separate: bool = False

    def __len__(self) -> int:
        # The last token has no next token.
        labels = self.part.tokens - 1
        return -(-labels // self.length) if self.whole else labels // self.length

    def read(
        self, row: int, tokens: np.ndarray, labels: np.ndarray, segments: np.ndarray | None
    ) -> None:
        start = row * self.length
        size = min(self.length, self.part.tokens - 1 - start)
        _read_piece(self.part, start, size, tokens, labels)


class DocumentRows:
    """Documents packed into rows. Short documents share a row, and long ones span several rows.

    Pieces are placed in corpus order. Each goes into the fullest of the OPEN_ROWS open rows that
    has room for it. Labels are the next tokens of the same document.
    """

    def __init__(self, part: Part, length: int, packed: bool = True) -> None:
        self.part, self.length, self.separate = part, length, packed
        starts, sizes = _pieces(part.bounds(), length, int(part.begins))
        if packed:
            row_of = pack(sizes, length, fullest=True)
            # The sort groups the pieces by row. It is stable, so the pieces of a row stay in corpus
            # order.
            order = np.argsort(row_of, kind="stable")
            starts, sizes = starts[order], sizes[order]
            counts = np.bincount(row_of)
        else:
            counts = np.ones(len(sizes), np.int64)
        self._starts, self._sizes = starts, sizes
        self._first = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return len(self._first) - 1

    def read(
        self, row: int, tokens: np.ndarray, labels: np.ndarray, segments: np.ndarray | None
    ) -> None:
        at = 0
        pieces = range(self._first[row], self._first[row + 1])
        for number, piece in enumerate(pieces, start=1):
            size = int(self._sizes[piece])
            _read_piece(self.part, int(self._starts[piece]), size, tokens[at:], labels[at:])
            if segments is not None:
                segments[at : at + size] = number
            at += size


def _read_piece(part: Part, start: int, size: int, tokens: np.ndarray, labels: np.ndarray) -> None:
    found = np.empty(size + 1, part.dtype)
    part.read(start, found)
    tokens[:size], labels[:size] = found[:-1], found[1:]


def _pieces(
    bounds: np.ndarray,  # i64[documents + 1]
    length: int,
    skipped: int,
) -> tuple[np.ndarray, np.ndarray]:  # i64[n], i32[n]
    """Return the start and the number of labels (up to `length`) of each piece of each document.

    A document begins `skipped` tokens after the end token of the previous document. Its last label
    is its own end token.
    """
    sizes = np.diff(bounds) - skipped
    counts = -(-sizes // length)
    if sizes.min(initial=1) < 1:
        raise DataError("index must be ascending")
    first = np.cumsum(counts) - counts
    offsets = (np.arange(counts.sum()) - np.repeat(first, counts)) * length
    left = np.repeat(sizes, counts) - offsets
    return np.repeat(bounds[:-1] + skipped, counts) + offsets, np.minimum(left, length).astype(
        np.int32
    )


def row_order(
    counts: Sequence[int], seed: int, weights: Sequence[float] | None = None
) -> grain.MapDataset:
    """Return an endless sequence of (folder, row) pairs, where folder f has `counts[f]` rows.

    In each epoch, every row of a folder is read once, in a new order. Folders are mixed by weight
    (see `Mixture`). The default weight of a folder is its number of rows.
    """
    for count in counts:
        if not 0 < count < 2**31:
            raise DataError(f"a folder has {count} rows: must be at least 1 and below 2**31")
    orders = [
        # an odd factor is invertible modulo 2**32, so distinct seeds stay distinct
        grain.MapDataset.range(count)
        .shuffle(seed=(seed * 0x9E3779B1 + folder) % 2**32)
        .repeat()
        .map(lambda row, folder=folder: (folder, int(row)))
        for folder, count in enumerate(counts)
    ]
    if len(orders) == 1:
        return orders[0]
    mixture = Mixture(counts if weights is None else weights)
    return grain.MapDataset.select_from_datasets(orders, mixture)


class Mixture:
    """Mixture of folders that maps each index of an endless sequence to (folder, row).

    The pattern repeats every MIXTURE rows. Folder f gets round(MIXTURE w_f / sum(w)) of these rows,
    but at least one. Its rows are evenly spaced.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64) * MIXTURE
        self._counts = np.maximum(shares.round().astype(np.int64), 1)
        folders = np.repeat(np.arange(len(weights)), self._counts)
        ranks = np.concatenate([np.arange(count) for count in self._counts])
        # Row r of n is placed at (r + 0.5) / n of the pattern, so the rows of each folder are
        # evenly spaced.
        turns = np.argsort((ranks + 0.5) / self._counts[folders], kind="stable")
        self._folders, self._ranks = folders[turns], ranks[turns]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, row: int) -> tuple[int, int]:
        turn, at = divmod(row, len(self._folders))
        folder = int(self._folders[at])
        return folder, turn * int(self._counts[folder]) + int(self._ranks[at])


@value_class
class RowReader:
    """Reader that combines rows from several folders into batches."""

    rows: tuple[PartRows, ...]

    def __call__(
        self,
        chosen: np.ndarray,  # i64[..., B, 2]: folder and row; folder -1 means an empty row
    ) -> Batch:  # leaves i32[..., B, T]
        """Return the chosen rows. Labels are IGNORE at empty positions."""
        shape = (*chosen.shape[:-1], self.rows[0].length)
        tokens, labels = np.zeros(shape, np.int32), np.full(shape, IGNORE, np.int32)
        segments = np.zeros(shape, np.int32) if self.rows[0].separate else None
        for index in np.ndindex(*chosen.shape[:-1]):
            folder, row = (int(i) for i in chosen[index])
            if folder >= 0:
                row_segments = None if segments is None else segments[index]
                self.rows[folder].read(row, tokens[index], labels[index], row_segments)
        return Batch(tokens, labels, segments)


def rows_of_process(batch_size: int, process: tuple[int, int]) -> slice:
    """Return the slice of batch rows for process p of P, from p B / P to (p + 1) B / P.

    Raises ConfigError unless P divides B.
    """
    index, count = process
    if batch_size % count:
        rule = f"must be a multiple of the {count} processes"
        raise ConfigError(f"batch_size is {batch_size}: {rule}")
    size = batch_size // count
    return slice(index * size, (index + 1) * size)


def step_batches(
    reader: RowReader,
    order: grain.MapDataset,
    accumulation: int,
    batch_size: int,
    process: tuple[int, int] = (0, 1),  # index and count
) -> grain.MapDataset:
    """Return this process's inputs for each step as a Batch with leaves [A, B / P, T].

    Raises ConfigError unless P divides B.
    """
    process_rows = rows_of_process(batch_size, process)

    def chosen(pairs: np.ndarray) -> np.ndarray:
        rows = pairs.reshape(accumulation, batch_size, 2)
        return rows[:, process_rows]

    return order.batch(accumulation * batch_size, batch_fn=np.array).map(chosen).map(reader)


class Prefetcher:
    """Random-access pipeline that prefetches elements while access is sequential."""

    def __init__(self, steps: grain.MapDataset, place: Callable[[Batch], Batch]) -> None:
        """Wrap the pipeline `steps`. `place` puts each element on its devices."""
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
        self._iterator = iter(steps.map(place).to_iter_dataset(options))
        self._next = 0

    def __call__(self, step: int) -> Batch:
        """Return element `step`."""
        # access is not sequential after a run is resumed or goes back to an earlier step
        if step != self._next:
            self._iterator.set_state({"next_index": step})
        self._next = step + 1
        found: Batch = next(self._iterator)
        return found
