"""Lay examples out as rows of batches: in buckets of about one length, or packed several to a row.

The rows of a step follow from (seed, step) alone: every epoch reads each row, in an order that the
seed and the epoch's number give, so a resumed run needs no iterator state. The last step of a
length is filled with rows that the epoch has read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from transformer_jax.shown import short_repr
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch
from transformer_jax.training.data import IGNORE

BUCKETS = 4
"""Lengths that rows are padded to, at most: a program is compiled for each."""

BUCKET_ROWS = 1000
"""Rows that a bucket has at least, or its program costs more than its padding."""

MULTIPLE = 8
"""Rows of a bucket are as long as the next multiple of this."""

FILL = {"labels": IGNORE}
"""What stands in a field where a row has ended; else 0 or False."""


@short_repr
class Example(NamedTuple):
    """Hold one example: what a model reads, and the label of each of its tokens."""

    tokens: np.ndarray  # i32[T], or f32[H, W, C] with a class
    labels: np.ndarray  # i32[T], IGNORE where there is none; or i32[] of a class
    prefix: int = 0
    """How many tokens, from the first on, all tokens of the example see."""
    source: np.ndarray | None = None  # i32[S], f32[S, D_in] or f32[H, W, C]


@short_repr
@dataclass(frozen=True)
class Rows:
    """Hold rows of examples in buckets of one length each."""

    buckets: tuple[Batch, ...]  # leaves [n, ...]
    counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", tuple(len(bucket.tokens) for bucket in self.buckets))

    @property
    def labels(self) -> int:
        """Return how many labels all rows have."""
        return sum(int((bucket.labels != IGNORE).sum()) for bucket in self.buckets)

    def step(self, seed: int, step: int, accumulation: int, size: int) -> Batch:
        """Return the micro-batches of a step, leaves [A, B, ...], all of one bucket.

        A bucket whose rows do not fill its last step takes the first of its rows again.
        """
        plan = _plan(self.counts, accumulation * size)
        epoch, number = divmod(step, len(plan))
        bucket, start = plan[_shuffled(seed, epoch, 0, len(plan))[number]]
        order = _shuffled(seed, epoch, bucket + 1, self.counts[bucket])
        chosen = order[(start + np.arange(accumulation * size)) % len(order)]
        rows = _taken(self.buckets[bucket], chosen)
        shape = (accumulation, size)
        return _mapped(rows, lambda name, leaf: leaf.reshape(*shape, *leaf.shape[1:]))

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield every row once, leaves [B, ...]; the last batch of a bucket has empty rows."""
        for bucket, count in zip(self.buckets, self.counts, strict=True):
            for start in range(0, count, size):
                rows = _taken(bucket, np.arange(start, min(start + size, count)))
                yield _mapped(rows, lambda name, leaf: _filled(name, leaf, size))


def _plan(counts: tuple[int, ...], size: int) -> list[tuple[int, int]]:
    """Return the steps of an epoch: a bucket, and where in its order of rows the step begins."""
    return [(b, start) for b, count in enumerate(counts) for start in range(0, count, size)]


@lru_cache(maxsize=16)
def _shuffled(seed: int, epoch: int, part: int, count: int) -> np.ndarray:  # i64[count]
    """Return an order of `count` things that its arguments alone decide.

    Philox, keyed by them: NumPy keeps its raw stream the same in every version.
    """
    key = (seed << 64) + (1 << 63) + (epoch << 8) + part  # no step of `random_starts` has it
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def _mapped(batch: Batch, change: Callable[[str, np.ndarray], np.ndarray]) -> Batch:
    """Return a batch with `change(name, leaf)` in the place of each leaf that there is."""
    found = {}
    for part in fields(batch):
        leaf = getattr(batch, part.name)
        found[part.name] = None if leaf is None else change(part.name, leaf)
    return Batch(**found)


def _taken(batch: Batch, index: np.ndarray) -> Batch:  # i64[n]
    """Return the rows of these numbers."""
    return _mapped(batch, lambda name, leaf: leaf[index])


def _filled(name: str, leaf: np.ndarray, size: int) -> np.ndarray:
    """Return the rows of a leaf with empty ones after them, `size` in all."""
    short = size - len(leaf)
    if not short:
        return leaf
    last = np.full((short, *leaf.shape[1:]), FILL.get(name, 0), leaf.dtype)
    if name.endswith("valid"):  # a row that reads nothing at all has no finite logits
        last[:, 0] = True
    return np.concatenate([leaf, last])


def bucketed(examples: Sequence[Example], padding: bool = False) -> Rows:
    """Lay out an example a row, in at most BUCKETS lengths; `padding` marks what is none.

    A model that reads from left to right needs no mark of the padding at the end of a row.
    """
    sizes = [len(e.tokens) + (0 if e.source is None else len(e.source)) for e in examples]
    order = np.argsort(sizes, kind="stable")
    parts = max(1, min(BUCKETS, len(order) // BUCKET_ROWS))
    cuts = [round(len(order) * (i + 1) / parts) for i in range(parts)]
    found, start = [], 0
    for cut in cuts:
        last = cut == cuts[-1]
        part = [examples[i] for i in order[start:cut]]
        if not part or (not last and _similar(sizes, order, cut, start)):
            continue
        found.append(padded(part, padding))
        start = cut
    return Rows(tuple(found))


def _similar(sizes: Sequence[int], order: np.ndarray, cut: int, start: int) -> bool:
    """Say whether what comes after a cut is too little longer for a program of its own."""
    longest = -(-sizes[order[-1]] // MULTIPLE)
    here = -(-sizes[order[cut - 1]] // MULTIPLE)
    return here == longest or here * 5 > longest * 4


def _length(sizes: Sequence[int]) -> int:
    return -(-max(sizes) // MULTIPLE) * MULTIPLE


def stack_rows(
    rows: Sequence[np.ndarray],  # i32[T], f32[T, D_in] or f32[H, W, C] each
) -> tuple[np.ndarray, np.ndarray | None]:  # [B, T, ...], bool[B, T]
    """Return rows as one array, with zeros after the shorter ones, and where they are none.

    The length is the next multiple of MULTIPLE. Pictures [H, W, C] are of one shape: they get no
    zeros, and there is None to say where those are not.
    """
    first = rows[0]
    if first.ndim == 3:
        return np.stack(rows).astype(np.float32), None
    shape = len(rows), _length([len(row) for row in rows])
    kind = np.int32 if np.issubdtype(first.dtype, np.integer) else np.float32
    stacked, valid = np.zeros((*shape, *first.shape[1:]), kind), np.zeros(shape, bool)
    for number, row in enumerate(rows):
        stacked[number, : len(row)] = row
        valid[number, : len(row)] = True
    return stacked, valid


def padded(examples: Sequence[Example], padding: bool) -> Batch:
    """Lay out an example a row, all of one length; `padding` marks what is none."""
    tokens, valid = stack_rows([example.tokens for example in examples])
    classes = examples[0].labels.ndim == 0
    labels = np.full(len(examples) if classes else tokens.shape, IGNORE, np.int32)
    prefix = np.zeros(tokens.shape, bool) if any(e.prefix for e in examples) else None
    for row, example in enumerate(examples):
        labels[row, ... if classes else slice(len(example.tokens))] = example.labels
        if prefix is not None:
            prefix[row, : example.prefix] = True
    source = source_valid = None
    if examples[0].source is not None:
        source, source_valid = stack_rows([e.source for e in examples if e.source is not None])
    return Batch(tokens, labels, None, valid if padding else None, prefix, source, source_valid)


def packed(examples: Sequence[Example], length: int) -> Rows:
    """Lay out several examples a row, each in the first of the last rows with room.

    With the segments given to a model, an example sees no other and its positions start at 0.
    """
    places, room = list[tuple[int, int]](), list[int]()
    for number, example in enumerate(examples):
        size = len(example.tokens)
        if size > length:
            raise DataError(f"example {number} has {size} tokens: a row has {length}")
        recent = range(max(0, len(room) - 64), len(room))  # or packing a corpus takes its square
        row = next((r for r in recent if room[r] >= size), len(room))
        if row == len(room):
            room.append(length)
        places.append((row, length - room[row]))
        room[row] -= size
    shape = (len(room), length)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    labels = np.full(shape, IGNORE, np.int32)
    prefix = np.zeros(shape, bool) if any(e.prefix for e in examples) else None
    for example, (row, at) in zip(examples, places, strict=True):
        here = slice(at, at + len(example.tokens))
        tokens[row, here], labels[row, here] = example.tokens, example.labels
        segments[row, here] = segments[row].max() + 1
        if prefix is not None:
            prefix[row, at : at + example.prefix] = True
    return Rows((Batch(tokens, labels, segments, None, prefix),))


def packs(examples: Sequence[Example], length: int) -> bool:
    """Say whether packing pays: whether two examples of the mean length fit into a row."""
    return 2 * sum(len(e.tokens) for e in examples) <= length * max(len(examples), 1)
