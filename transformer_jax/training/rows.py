"""Layout of examples in rows, which are bucketed by length or contain several packed examples.

The rows of a step depend only on (seed, step), so a resumed run does not need iterator state. Each
epoch reads every row once, in a new order.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from functools import lru_cache

import jax
import numpy as np

from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch
from transformer_jax.training.data import IGNORE
from transformer_jax.values import value_class

BUCKETS = 4
"""Maximum number of different padded lengths. A separate program is compiled for each length."""

BUCKET_ROWS = 1000
"""Minimum number of rows per bucket. For fewer rows, compiling a program takes more time than it
saves."""

MULTIPLE = 8
"""Row lengths are rounded up to a multiple of this number."""

OPEN_ROWS = 64
"""Maximum number of open rows during packing. Without a limit, packing takes quadratic time."""

FILL = {"labels": IGNORE}
"""Padding values, keyed by field. The padding of all other fields is 0 or False."""


@value_class
class Rows:
    """Examples laid out as rows, in buckets of equal row length."""

    buckets: tuple[Batch, ...]  # leaves [n, ...]
    counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", tuple(len(bucket.tokens) for bucket in self.buckets))

    @property
    def labels(self) -> int:
        """Return the number of labels in all rows."""
        return sum(int((bucket.labels != IGNORE).sum()) for bucket in self.buckets)

    def split_over(self, devices: int, most: int) -> Rows:
        """Return rows that `devices` can split, in balanced order if possible.

        Rows are padded to a multiple of MULTIPLE and of 2 * `devices`, which `zigzag_positions`
        needs, but to at most `most` tokens, which must be a multiple of `devices`.
        """
        unit = math.lcm(MULTIPLE, 2 * devices)

        def divided(bucket: Batch) -> Batch:
            length = bucket.tokens.shape[1]
            if length % (2 * devices) == 0 or length == most:
                return bucket
            size = -(-length // unit) * unit
            size = most if length < most < size else size

            def longer(name: str, leaf: np.ndarray) -> np.ndarray:
                widths = (0, 0), (0, size - length)
                return np.pad(leaf, widths, constant_values=FILL.get(name, 0))

            leaves = {name: leaf for name, leaf in vars(bucket).items() if leaf is not None}
            return replace(
                bucket, **{name: longer(name, x) for name, x in leaves.items() if x.ndim > 1}
            )

        return Rows(tuple(map(divided, self.buckets)))

    def step(self, seed: int, step: int, accumulation: int, size: int) -> Batch:
        """Return the micro-batches of a step, with leaves [A, B, ...], all from one bucket.

        If a bucket has too few rows left to fill its last step, its first rows are repeated.
        """
        total = accumulation * size
        ends = np.cumsum([-(-count // total) for count in self.counts])  # last step of each bucket
        epoch, number = divmod(step, int(ends[-1]))
        # the steps are shuffled, so that an epoch does not process one bucket after the other
        number = _shuffled(seed, epoch, 0, int(ends[-1]))[number]
        bucket = int(np.searchsorted(ends, number, "right"))
        start = (number - (ends[bucket - 1] if bucket else 0)) * total
        order = _shuffled(seed, epoch, bucket + 1, self.counts[bucket])
        chosen = order[(start + np.arange(total)) % len(order)]

        def take(leaf: np.ndarray) -> np.ndarray:
            return leaf[chosen].reshape(accumulation, size, *leaf.shape[1:])

        found: Batch = jax.tree.map(take, self.buckets[bucket])
        return found

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield every row once, in batches [B, ...]. Empty rows fill the last batch of a bucket."""
        for bucket, count in zip(self.buckets, self.counts, strict=True):
            for start in range(0, count, size):
                here = slice(start, start + size)
                yield _filled(jax.tree.map(lambda leaf, here=here: leaf[here], bucket), size)


@lru_cache(maxsize=16)
def _shuffled(seed: int, epoch: int, part: int, count: int) -> np.ndarray:  # i64[count]
    """Return a random permutation of `count` items that depends only on the arguments."""
    # the raw Philox stream is the same in all NumPy versions, and `random_starts` never sets bit 63
    key = (seed << 64) + (1 << 63) + (epoch << 8) + part
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def _filled(batch: Batch, size: int) -> Batch:
    """Append empty rows to a batch so that it has `size` rows."""
    short = size - len(batch.labels)
    if not short:
        return batch

    def longer(name: str, leaf: np.ndarray) -> np.ndarray:
        last = np.full((short, *leaf.shape[1:]), FILL.get(name, 0), leaf.dtype)
        if name.endswith("valid"):  # a row without valid tokens has no finite logits
            last[:, 0] = True
        return np.concatenate([leaf, last])

    leaves = {name: leaf for name, leaf in vars(batch).items() if leaf is not None}
    return Batch(**{name: longer(name, leaf) for name, leaf in leaves.items()})


def bucketed(examples: Sequence[Batch], padding: bool = False) -> Rows:
    """Lay out one example per row, with at most BUCKETS row lengths.

    If `padding` is true, the field `valid` is added. Causal models do not need it because padding
    comes last.
    """
    sizes = [len(e.tokens) + (0 if e.source is None else len(e.source)) for e in examples]
    # The sort is stable, so that a resumed run lays out its examples in the same rows.
    order = np.argsort(sizes, kind="stable")
    parts = max(1, min(BUCKETS, len(order) // BUCKET_ROWS))
    cuts = [round(len(order) * (i + 1) / parts) for i in range(parts)]
    found, start = [], 0
    for cut in cuts:
        part = [examples[i] for i in order[start:cut]]
        if not part:
            continue
        if cut != cuts[-1]:
            longest, here = (-(-sizes[order[i]] // MULTIPLE) for i in (-1, cut - 1))
            if here == longest or here * 5 > longest * 4:  # too similar to separate
                continue
        found.append(padded(part, padding))
        start = cut
    return Rows(tuple(found))


def stack_rows(
    rows: Sequence[np.ndarray],  # i32[T], bool[T], f32[T, D_in], f32[H, W, C] or i32[] each
    fill: int = 0,
) -> tuple[np.ndarray, np.ndarray | None]:  # [B, T, ...], bool[B, T]
    """Pad shorter rows with `fill`, stack them, and return the array and a mask of valid entries.

    The length is rounded up to a multiple of MULTIPLE. Images [H, W, C] and classes [] are not
    padded because all have the same shape. The mask is then None.
    """
    first = rows[0]
    kind = first.dtype if first.dtype == bool else np.dtype(np.float32)
    kind = np.dtype(np.int32) if np.issubdtype(first.dtype, np.integer) else kind
    if first.ndim in (0, 3):
        return np.stack(rows).astype(kind), None
    shape = len(rows), -(-max(map(len, rows)) // MULTIPLE) * MULTIPLE
    stacked, valid = np.full((*shape, *first.shape[1:]), fill, kind), np.zeros(shape, bool)
    for number, row in enumerate(rows):
        stacked[number, : len(row)] = row
        valid[number, : len(row)] = True
    return stacked, valid


def padded(examples: Sequence[Batch], padding: bool) -> Batch:
    """Lay out one example per row, with rows of equal length. `padding` adds the field `valid`."""

    def column(name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        rows = [getattr(example, name) for example in examples]
        return (None, None) if rows[0] is None else stack_rows(rows, FILL.get(name, 0))

    (tokens, valid), (source, source_valid) = column("tokens"), column("source")
    labels, prefix = column("labels")[0], column("prefix")[0]
    return Batch(tokens, labels, None, valid if padding else None, prefix, source, source_valid)


def pack(
    sizes: np.ndarray,  # i32[n], each from 1 to `length`
    length: int,
    fullest: bool = False,
) -> np.ndarray:  # i32[n]
    """Return the row number of each piece.

    A piece is placed in the first of the last OPEN_ROWS rows that has room for it. If `fullest` is
    true, it is placed in the fullest of up to OPEN_ROWS open rows instead. The time is linear in
    the number of pieces.
    """
    found, count = np.empty(len(sizes), np.int32), 0
    rooms, rows = list[int](), list[int]()  # open rows, sorted by room if `fullest`
    for block in range(0, len(sizes), 2**16):  # in blocks, because Python ints take more memory
        for piece, size in enumerate(sizes[block : block + 2**16].tolist(), start=block):
            if fullest:
                at = bisect_left(rooms, size)
            else:
                at = next((i for i, room in enumerate(rooms) if room >= size), len(rooms))
            if at < len(rooms):
                row, room = rows.pop(at), rooms.pop(at) - size
            else:
                row, room, count = count, length - size, count + 1
                # This closes the oldest row or, if `fullest`, the one with the least room.
                if len(rooms) == OPEN_ROWS:
                    del rooms[0], rows[0]
                at = len(rooms)
            found[piece] = row
            if fullest:
                at = bisect_left(rooms, room)
            # without `fullest`, full rows stay in the list, because they count as recent rows
            if room or not fullest:
                rooms.insert(at, room)
                rows.insert(at, row)
    return found


def packed(examples: Sequence[Batch], length: int) -> Rows:
    """Lay out several examples per row with `pack`.

    Each example is a separate segment. It cannot attend to other examples, and its positions start
    at 0.

    Args:
        examples: one batch per example, with tokens and labels [T].
        length: number of tokens per row.

    Raises:
        DataError: If an example is longer than a row.
    """
    sizes = np.array([len(example.tokens) for example in examples], np.int32)
    for number in np.flatnonzero(sizes > length)[:1]:
        rule = f"must be at most {length}, the length of a row"
        raise DataError(f"example {number} has {sizes[number]} tokens: {rule}")
    row_of = pack(sizes, length)
    shape = int(row_of.max(initial=-1)) + 1, length
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    labels = np.full(shape, IGNORE, np.int32)
    prefix = None if not examples or examples[0].prefix is None else np.zeros(shape, bool)
    ends, counts = [0] * shape[0], [0] * shape[0]
    for example, size, row in zip(examples, sizes.tolist(), row_of.tolist(), strict=True):
        here, counts[row] = slice(ends[row], ends[row] + size), counts[row] + 1
        ends[row] += size
        tokens[row, here], labels[row, here] = example.tokens, example.labels
        # segment 0 is padding
        segments[row, here] = counts[row]
        if prefix is not None:
            prefix[row, here] = example.prefix
    return Rows((Batch(tokens, labels, segments, None, prefix),))


def laid_out(examples: Sequence[Batch], length: int | None) -> Rows:
    """Pack examples if two of average length fit in a row. Otherwise, lay out one example per row.

    Args:
        examples: one batch per example, with tokens and labels [T].
        length: number of tokens per row; None disables packing.
    """
    if length is not None and 2 * sum(len(e.tokens) for e in examples) <= length * len(examples):
        return packed(examples, length)
    return bucketed(examples)
