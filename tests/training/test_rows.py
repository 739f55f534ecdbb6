"""Rows of examples: buckets, packing, and the order in which epochs read them."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.support.tolerances import assert_near
from transformer_jax.config import (
    ConvolutionConfig,
    MeshConfig,
    ModelConfig,
    NgramConfig,
    RecurrentConfig,
    TrainConfig,
    WindowConfig,
)
from transformer_jax.config.tasks import LanguageTask
from transformer_jax.lectures.ngram import count_ngrams
from transformer_jax.models.factory import init_params
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training import rows as training_rows
from transformer_jax.training.batch import Batch, batch_scores
from transformer_jax.training.data import IGNORE
from transformer_jax.training.rows import bucketed, laid_out, pack, packed
from transformer_jax.training.tasks import load_task

pytestmark = pytest.mark.usefixtures("quick_compilation")


def examples(count, longest, prefix=False, seed=5):
    """Draw examples whose first token is their index + 1, which identifies rows."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        ids = random.integers(1, 17, random.integers(3, longest + 1)).astype(np.int32)
        ids[0] = number + 1
        labels = ids[1:].copy()
        labels[0] = IGNORE
        first = np.arange(len(labels)) < 1 if prefix else None
        found.append(Batch(ids[:-1], labels, prefix=first))
    return found


def test_every_epoch_visits_each_row_once_in_new_order():
    rows = bucketed(examples(41, 7))
    read = [rows.step(3, step, 2, 5).tokens[..., 0].ravel() for step in range(10)]
    first, second = np.concatenate(read[:5]), np.concatenate(read[5:])
    for epoch in (first, second):
        numbers, counts = np.unique(epoch, return_counts=True)
        assert numbers.tolist() == list(range(1, 42))
        assert counts.sum() == 50  # the last step repeats nine rows
    assert not np.array_equal(first, second)


def test_single_step_epochs_have_different_orders():
    rows = bucketed(examples(41, 7))
    first, second, third = (rows.step(3, step, 1, 41).tokens[:, :, 0].tolist() for step in range(3))
    assert sorted(first[0]) == sorted(second[0]) == list(range(1, 42))
    assert first != second != third != first


def test_training_rows_depend_only_on_seed_and_step():
    made = [bucketed(examples(41, 7)).step(seed, step, 2, 5) for seed, step in [(3, 4)] * 2]
    assert np.array_equal(made[0].tokens, made[1].tokens)
    for seed, step in ((4, 4), (3, 5)):
        other = bucketed(examples(41, 7)).step(seed, step, 2, 5)
        assert not np.array_equal(made[0].tokens, other.tokens)


def test_evaluation_visits_every_row_once_and_pads_last_batch():
    rows = bucketed(examples(13, 7))
    batches = list(rows.batches(5))
    assert [batch.tokens.shape[0] for batch in batches] == [5, 5, 5]
    assert (batches[-1].labels[3:] == IGNORE).all()
    labels = sum((batch.labels != IGNORE).sum() for batch in batches)
    assert labels == rows.labels == sum(len(e.labels) - 1 for e in examples(13, 7))


def test_length_buckets_contain_rows_of_similar_length(monkeypatch):
    monkeypatch.setattr(training_rows, "BUCKET_ROWS", 10)
    batches = examples(61, 41)
    rows = bucketed(batches)
    assert len(rows.buckets) == 4
    lengths = [bucket.tokens.shape[1] for bucket in rows.buckets]
    assert lengths == sorted(lengths) and all(length % 8 == 0 for length in lengths)
    for bucket in rows.buckets:
        for tokens, labels in zip(bucket.tokens, bucket.labels, strict=True):
            example = batches[tokens[0] - 1]
            size = len(example.tokens)
            assert np.array_equal(tokens[:size], example.tokens) and not tokens[size:].any()
            assert np.array_equal(labels[:size], example.labels) and (labels[size:] == IGNORE).all()
    padded = sum(bucket.tokens.size for bucket in rows.buckets)
    assert padded < 0.75 * 61 * 48


def test_packing_keeps_examples_whole():
    batches = examples(23, 7)
    (rows,) = packed(batches, 13).buckets
    found = set()
    for tokens, labels, segments in zip(rows.tokens, rows.labels, rows.segments, strict=True):
        for number in range(1, segments.max() + 1):
            (at,) = np.nonzero(segments == number)
            assert np.array_equal(at, np.arange(at[0], at[-1] + 1))
            example = batches[tokens[at[0]] - 1]
            assert np.array_equal(tokens[at], example.tokens)
            assert np.array_equal(labels[at], example.labels)
            found.add(tokens[at[0]])
    assert len(found) == 23
    (together,), (apart,) = (laid_out(batches, length).buckets for length in (13, 7))
    assert np.array_equal(together.tokens, rows.tokens) and apart.segments is None
    with pytest.raises(DataError, match="example 0 has 5 tokens: must be at most 4"):
        packed([Batch(np.arange(5), np.arange(5))], 4)


@pytest.mark.parametrize(
    ("context", "most", "longest", "length"),
    [(3, 96, 12, 24), (3, 96, 40, 48), (3, 45, 40, 45), (5, 80, 40, 40), (8, 80, 9, 16)],
)
def test_rows_of_documents_are_padded_for_devices_that_split_them(
    context, most, longest, length, tmp_path
):
    """A multiple of 8 and 2 * context, but at most the longest sequence."""
    (tmp_path / "text.txt").write_text("\n".join("ab" * 2 + "c" * n for n in range(longest - 4)))
    config = TrainConfig(
        task=LanguageTask(documents="lines", packed=False), data=str(tmp_path / "text.txt"),
        model=ModelConfig(max_len=most), out=str(tmp_path / "run"), val_fraction=0.3,
    )  # fmt: skip
    whole = load_task(config, None, None)
    task = load_task(replace(config, mesh=MeshConfig(context=context)), None, None)
    for rows, before in ((task.train, whole.train), (task.val, whole.val)):
        (found,), (bucket,) = rows.buckets, before.buckets
        assert found.tokens.shape[1] % context == 0
        size = bucket.tokens.shape[1]
        assert np.array_equal(found.tokens[:, :size], bucket.tokens)
        assert np.array_equal(found.labels[:, :size], bucket.labels)
        assert not found.tokens[:, size:].any() and (found.labels[:, size:] == IGNORE).all()
    assert task.val.buckets[0].tokens.shape[1] == length
    assert task.tokens_per_step == config.batch_size * task.train.buckets[0].tokens.shape[1]


@pytest.mark.parametrize("fullest", [False, True])
def test_piece_is_packed_into_first_or_fullest_row_with_room(fullest):
    """Brute force over all rows; 64 are open: the most recent, or those with room."""
    sizes, length = np.random.default_rng(3).integers(1, 30, 997), 29
    rooms, begun, wanted = {}, [], []
    for size in sizes:
        fits = [row for row in begun if rooms[row] >= size]
        row = min(fits, key=lambda row: rooms[row]) if fullest and fits else next(iter(fits), None)
        if row is None:
            row, rooms[len(rooms)] = len(rooms), length
            begun.append(row)
            if len(begun) > 64:
                # with `fullest`, full rows do not count, and the fullest one is closed
                begun.remove(min(begun[:-1], key=lambda row: rooms[row]) if fullest else begun[0])
        rooms[row] -= size
        begun = [row for row in begun if rooms[row] or not fullest]
        wanted.append(row)
    found = pack(sizes, length, fullest)
    if not fullest:
        assert found.tolist() == wanted
    totals_of_rows = np.bincount(found, sizes)  # any of several equally full rows may be used
    assert totals_of_rows.max() <= length and np.array_equal(
        np.sort(totals_of_rows), np.sort(np.bincount(wanted, sizes))
    )
    assert len(totals_of_rows) > 256, "too few rows for any to be closed"


def test_example_can_exactly_fill_remaining_space():
    """4 and 3 fill a row of 7, and so do 5 and 2; one more example starts the next row."""
    assert pack(np.array([4, 5, 3, 2, 1]), 7).tolist() == [0, 1, 0, 1, 2]


def test_pieces_past_first_block_are_assigned_rows():
    assert np.array_equal(pack(np.ones(2**16 + 3, np.int32), 1), np.arange(2**16 + 3))


def test_prefix_of_packed_example_covers_its_first_tokens():
    batches = [
        Batch(np.arange(n, dtype=np.int32), np.arange(n), prefix=np.arange(n) < n % 4)
        for n in range(4, 11)
    ]
    (rows,) = packed(batches, 13).buckets
    found, first = [], set()
    for segments, prefix in zip(rows.segments, rows.prefix, strict=True):
        for number in range(1, segments.max() + 1):
            (at,) = np.nonzero(segments == number)
            assert prefix[at].tolist() == [i < len(at) % 4 for i in range(len(at))]
            found.append(len(at))
            first.add(int(at[0]))
        assert not prefix[segments == 0].any()
    assert sorted(found) == list(range(4, 11)) and len(first) > 1


MODELS = {
    "causal": ModelConfig(vocab_size=29, d_model=12, num_heads=2, num_layers=2, max_len=19),
    "prefix": ModelConfig(vocab_size=29, d_model=12, num_heads=2, num_layers=2, max_len=19),
    "gru": RecurrentConfig(vocab_size=29, cell="gru", d_embed=5, d_hidden=7),
    "convolution": ConvolutionConfig(vocab_size=29, d_hidden=7, num_layers=2),
    "window": WindowConfig(vocab_size=29, context=3, d_embed=5, d_hidden=7),
    "ngram": NgramConfig(vocab_size=29, order=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_packed_loss_matches_individual_examples(name):
    batches = examples(19, 7, prefix=name == "prefix")
    model = MODELS[name]
    if isinstance(model, NgramConfig):
        model, params = count_ngrams(model, [example.tokens for example in batches])
    else:
        params = init_params(model, jax.random.key(2))
    scores = jax.jit(batch_scores(model))

    def totals(rows):
        return sum(np.asarray(scores(params, batch), np.float64) for batch in rows.batches(4))

    apart, together = totals(bucketed(batches)), totals(packed(batches, 19))
    assert apart[1] == together[1] == sum(len(e.labels) - 1 for e in batches)
    assert_near(together[0] / together[1], apart[0] / apart[1], 1e-5)
    assert apart[2] == together[2]
