"""Training on prepared folders: the rows of each step, their order, and rejected folders."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

import train
from tests.support.tolerances import FORWARD_F32, assert_near
from tests.training.test_training import assert_same_state
from transformer_jax.__main__ import main as run_command
from transformer_jax.checkpoints.run_folder import config_from_json, config_to_json
from transformer_jax.config import ConfigError, ModelConfig, TrainConfig
from transformer_jax.config.mesh import MeshConfig
from transformer_jax.config.prepare import PrepareConfig
from transformer_jax.config.tasks import LanguageTask, MaskedTask
from transformer_jax.corpus import prepare
from transformer_jax.corpus.folder import Part, end_id, open_corpus
from transformer_jax.models.factory import init_params
from transformer_jax.tokenizers.trained import ByteTokenizer, CharTokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training import prepared
from transformer_jax.training import rows as training_rows
from transformer_jax.training.batch import batch_logits
from transformer_jax.training.data import IGNORE
from transformer_jax.training.loop import fit
from transformer_jax.training.prepared import DocumentRows, Mixture, WindowRows, row_order
from transformer_jax.training.rows import pack
from transformer_jax.training.tasks import load_task
from transformer_jax.training.tasks.task import Tokenizers

pytestmark = pytest.mark.usefixtures("unoptimised_compilation")

MODEL = ModelConfig(d_model=22, num_heads=2, num_layers=1, d_ff=29, max_len=13, use_bias=False)


def prepared_lines(path, name, lines, **changes):
    """Write `lines` to a text file and prepare the folder `name` from it."""
    (path / f"{name}.txt").write_text("\n".join(lines))
    usual = dict(documents="lines", tokenizer="byte", val_fraction=0.2)
    return prepare(PrepareConfig(data=(str(path / f"{name}.txt"),), **usual | changes), path / name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Prepare two folders of 211 and 101 documents with no document in common."""
    path = tmp_path_factory.mktemp("prepared")
    for name, count in (("web", 211), ("books", 101)):
        lines = [f"{name} {i} " + name[0] * (i * 7 % 23) for i in range(count)]
        prepared_lines(path, name, lines)
    return path


def config(folders, *names, **changes):
    data = ",".join(str(folders / name) for name in names or ("web",))
    usual = dict(
        model=MODEL, data=data, out=str(folders / "run"), steps=6, batch_size=6, accumulation=2,
        eval_every=3, checkpoint_every=3, sample_tokens=0, log_every=1, warmup_steps=2, seed=3,
    )  # fmt: skip
    return TrainConfig(**usual | changes)


def documents(**changes):
    return LanguageTask(documents="prepared", **changes)


def stream(folders, name, part="train"):
    """Read the tokens of a part with NumPy only."""
    files = sorted((folders / name).glob(f"{part}-0*.bin"))
    return np.concatenate([np.fromfile(file, "<u2") for file in files]).astype(np.int32)


def pieces(tokens, end, length):
    """Return the inputs and labels of documents, in pieces of at most `length`."""
    (bounds,) = np.nonzero(tokens == end)
    found = []
    for a, b in itertools.pairwise(bounds):
        for start in range(a, b, length):
            stop = min(start + length, b)
            found.append((*tokens[start:stop], -1, *tokens[start + 1 : stop + 1]))
    return found


def read(rows, separate=False):
    """Return all rows: tokens, labels and segments."""
    made = []
    for row in range(len(rows)):
        tokens, labels = np.zeros(rows.length, np.int32), np.full(rows.length, IGNORE, np.int32)
        segments = np.zeros(rows.length, np.int32)
        rows.read(row, tokens, labels, segments)
        made.append((tokens, labels, segments))
    return [np.stack(leaves) for leaves in zip(*made, strict=True)]


def same(one, two):
    leaves = jax.tree.leaves(one), jax.tree.leaves(two)
    assert len(leaves[0]) == len(leaves[1]) > 0
    for a, b in zip(*leaves, strict=True):
        assert a.shape == b.shape and np.array_equal(a, b)


def test_training_windows_label_each_token_once_in_order(folders):
    tokens = stream(folders, "web")
    corpus = open_corpus(folders / "web")
    count = (len(tokens) - 1) // 13
    inputs, labels, _ = read(WindowRows(corpus.train, 13))
    assert np.array_equal(inputs.ravel(), tokens[: count * 13])
    assert np.array_equal(labels.ravel(), tokens[1 : count * 13 + 1])
    inputs, labels, _ = read(WindowRows(corpus.train, 13, whole=True))
    assert np.array_equal(labels[labels != IGNORE], tokens[1:])
    assert len(tokens) % 13 != 1 and len(inputs) == count + 1


@pytest.mark.parametrize("packed", [True, False])
def test_packed_rows_contain_each_piece_once_with_documents_separated(folders, packed):
    corpus = open_corpus(folders / "web")
    rows = DocumentRows(corpus.train, 17, packed)
    found = Counter()
    for tokens, labels, segments in zip(*read(rows), strict=True):
        assert np.array_equal(segments > 0, labels != IGNORE)
        for number in range(1, segments.max() + 1):
            (at,) = np.nonzero(segments == number)
            assert np.array_equal(at, np.arange(at[0], at[-1] + 1))
            found[(*tokens[at], -1, *labels[at])] += 1
        assert packed or segments.max() == 1
    wanted = Counter(pieces(stream(folders, "web"), end_id(corpus.tokenizer), 17))
    assert found == wanted and sum(found.values()) > 200
    if packed:  # rows are nearly full
        used = sum(len(piece) // 2 for piece in wanted.elements())
        assert used > 0.9 * len(rows) * 17


def test_packing_respects_row_capacity_and_open_row_limit(rng):
    sizes = rng.integers(1, 30, 997).astype(np.int32)
    rows = pack(sizes, 29, fullest=True)
    used = np.bincount(rows, weights=sizes)
    assert used.max() <= 29 and used.min() > 0
    assert np.array_equal(rows, pack(sizes, 29, fullest=True))
    assert used.sum() > 0.95 * 29 * len(used)
    for piece in range(len(sizes)):  # no row is opened while another has room
        if rows[piece] > rows[:piece].max(initial=-1):
            before = np.bincount(rows[:piece], sizes[:piece], minlength=1)[-20:]
            assert piece == 0 or (29 - before < sizes[piece]).all()


def test_fullest_row_is_closed_when_too_many_rows_are_open(monkeypatch):
    sizes = np.array([9, 8, 7, 1, 3, 1], np.int32)
    assert pack(sizes, 10, fullest=True).tolist() == [0, 1, 2, 0, 2, 1]
    monkeypatch.setattr(training_rows, "OPEN_ROWS", 2)
    assert pack(sizes, 10, fullest=True).tolist() == [0, 1, 2, 1, 2, 1]


@pytest.mark.slow
def test_packed_document_logits_match_single_document(folders):
    task = load_task(
        config(folders, task=documents(), batch_size=40, model=replace(MODEL, max_len=31))
    )
    params = init_params(task.config.model, jax.random.key(0))
    batch = jax.tree.map(lambda leaf: leaf[0], task.inputs(0, 0, 1))
    logits = jax.jit(batch_logits(task.config.model))
    row = int(np.argmax(batch.segments.max(axis=1)))
    packed = logits(params, batch, None)[row]
    assert batch.segments[row].max() >= 2
    (at,) = np.nonzero(batch.segments[row] == 2)
    alone = replace(batch, segments=None, tokens=np.zeros_like(batch.tokens))
    alone.tokens[0, : len(at)] = batch.tokens[row, at]
    assert_near(packed[at], logits(params, alone, None)[0, : len(at)], FORWARD_F32)


@pytest.mark.slow
@pytest.mark.parametrize("task", [LanguageTask(), documents()])
def test_each_epoch_visits_every_row_once_in_new_order(folders, task):
    made = load_task(config(folders, task=task))
    count = len(made.rows[0])
    steps = -(-2 * count // 12)
    order = np.array([row_order([count], 3)[i] for i in range(2 * count)])
    assert (order[:, 0] == 0).all()
    first, second = order[:count, 1], order[count:, 1]
    assert np.array_equal(np.sort(first), np.arange(count))
    assert np.array_equal(np.sort(second), np.arange(count))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.arange(count))
    other = [row_order([count], 4)[i][1] for i in range(count)]
    assert not np.array_equal(first, other) and not np.array_equal(second, other)
    tokens, *_ = read(made.rows[0])
    batches = [made.inputs(step, 0, 1) for step in range(steps)]
    seen = np.concatenate([batch.tokens.reshape(-1, 13) for batch in batches])
    assert np.array_equal(seen[: 2 * count], tokens[order[:, 1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [LanguageTask(), pytest.param(documents(), marks=pytest.mark.long)]
)
def test_restoring_iterator_at_any_step_yields_same_remaining_rows(folders, task):
    run = config(folders, "web", "books", task=task, data_weights=(0.7, 0.3), batch_size=14)
    whole = load_task(run)
    rows = [len(r) for r in whole.rows]
    steps = 36
    assert 2 * rows[0] < 0.7 * 28 * steps and 2 * rows[1] < 0.3 * 28 * steps  # two epochs
    assert rows[0] < 0.7 * 28 * 20 and rows[1] < 0.3 * 28 * 20  # still the first epoch
    wanted = [jax.device_get(whole.inputs(step)) for step in range(steps)]
    assert len({batch.tokens.tobytes() for batch in wanted}) == steps
    for position in range(24):
        task = load_task(run) if position % 8 == 0 else whole  # another process, or a step back
        for step in range(position, steps):
            same(task.inputs(step), wanted[step])


@pytest.mark.slow
def test_resumed_run_is_bit_identical_across_epochs(folders, tmp_path):
    run = config(folders, "books", batch_size=20, steps=8)
    assert 3 * 40 < len(load_task(run).rows[0]) < 6 * 40  # the first epoch ends after the stop
    straight = fit(replace(run, out=str(tmp_path / "straight")))
    stopped = replace(run, out=str(tmp_path / "stopped"))
    steps = iter([False, False, True])
    assert fit(stopped, stop=lambda: next(steps)).step == 3
    resumed = fit(stopped, resume=True)
    assert_same_state(resumed.state, straight.state)
    assert resumed.val_loss == straight.val_loss is not None


def test_mixture_folders_are_sampled_in_requested_proportions():
    for weights in ([0.7, 0.3], [5, 1, 2], [1, 1], [0.999, 0.001]):
        mixture = Mixture(weights)
        shares = np.array(weights) / np.sum(weights)
        folders, rows = np.array([mixture[i] for i in range(30_000)]).T
        for end in (100, 1000, 30_000):
            counts = np.bincount(folders[:end], minlength=len(weights))
            assert np.abs(counts - shares * end).max() <= len(weights)
        far = 10 * prepared.MIXTURE + 17
        folders = np.append(folders, [mixture[far + i][0] for i in range(5)])
        for folder in range(len(weights)):  # none of its rows is skipped
            folder_rows = rows[folders[:30_000] == folder]
            assert np.array_equal(folder_rows, np.arange(len(folder_rows)))
    mixture = Mixture([2, 1])
    turns = [mixture[i] for i in range(prepared.MIXTURE - 3, 3 * prepared.MIXTURE)]
    for folder in (0, 1):
        folder_rows = [row for f, row in turns if f == folder]
        assert folder_rows == list(range(folder_rows[0], folder_rows[0] + len(folder_rows)))


@pytest.mark.slow_except("None-None")
@pytest.mark.parametrize(
    ("weights", "share"), [((0.7, 0.3), 0.7), ((1.0, 3.0), 0.25), (None, None)]
)
def test_each_step_samples_folders_by_weight(folders, weights, share):
    task = load_task(config(folders, "web", "books", data_weights=weights, task=documents()))
    count = [len(rows) for rows in task.rows]
    share = count[0] / sum(count) if share is None else share
    web = {row.tobytes() for row in read(task.rows[0])[0]}
    books = {row.tobytes() for row in read(task.rows[1])[0]}
    assert not web & books
    batches = [task.inputs(step, 0, 1).tokens.reshape(-1, 13) for step in range(30)]
    seen = [row.tobytes() in web for row in np.concatenate(batches)]
    assert abs(sum(seen) - share * len(seen)) <= 2


def test_two_processes_read_halves_of_single_process_batch(folders, monkeypatch):
    task = load_task(config(folders, "web", "books"))
    reads = []
    real = Part.read

    def counted(part, start, into):
        reads.append(start)
        real(part, start, into)

    monkeypatch.setattr(Part, "read", counted)
    for step in (0, 1, 40):
        whole = task.inputs(step, 0, 1)
        assert len(reads) == 12
        halves = [task.inputs(step, process, 2) for process in range(2)]
        assert len(reads) == 24 and sorted(reads[:12]) == sorted(reads[12:])
        same(whole, jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *halves))
        reads.clear()
    batches = [list(task.evaluation(process, 2)) for process in range(2)]
    assert len(batches[0]) == len(batches[1]) > 3
    for whole, *halves in zip(task.evaluation(), *batches, strict=True):
        same(whole, jax.tree.map(lambda *leaves: np.concatenate(leaves), *halves))
    with pytest.raises(ConfigError, match="batch_size is 6: must be a multiple of the 4 processes"):
        task.inputs(0, 0, 4)


def test_each_process_reads_its_own_rows_by_default(folders, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    task = load_task(config(folders))
    same(task.inputs(5), task.inputs(5, 2, 3))
    assert task.inputs(6).tokens.shape == (2, 2, 13)


PROCESS = """
import sys
from functools import partial
import jax
import numpy as np
port, count, index, sizes, folder = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
from jax.experimental.multihost_utils import process_allgather
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.config.mesh import MeshConfig
from transformer_jax.training.placement import make_placement
from transformer_jax.training.tasks import load_task
model = ModelConfig(d_model=22, num_heads=2, num_layers=1, max_len=13)
task = load_task(TrainConfig(model=model, data=folder, batch_size=6, accumulation=2))
place = make_placement(MeshConfig(**eval(f"dict({sizes})")))
task.place, task.reader = partial(place.rows_of_process, axis=1), place.reader()
whole = [task.inputs(step, 0, 1).tokens for step in (0, 1, 2)]
for step in range(3):
    tokens = task.inputs(step).tokens
    assert tokens.shape == (2, 6, 13)
    found = process_allgather(tokens, tiled=True)
    assert np.array_equal(found, whole[step])
print("part", *task.reader, "shape", *tokens.addressable_data(0).shape)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "count", "parts"),
    [
        ("data=2", 2, [(0, 2), (1, 2)]),
        ("context=2", 2, [(0, 1)] * 2),
        ("data=2,context=2", 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("tensor=2,fsdp=2", 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
def test_processes_read_only_rows_of_their_devices(folders, sizes, count, parts):
    """Processes that share rows, such as those along "context", read the same part."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, port, str(count), str(i), sizes, str(folders / "web")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for i in range(count)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for text, (index, number) in zip(outputs, parts, strict=True):
        assert f"part {index} {number} shape 2 {6 // number} 13" in text, text


@pytest.mark.parametrize("task", [LanguageTask(), documents()])
def test_evaluation_covers_held_out_labels_once_in_order(folders, task):
    made = load_task(config(folders, "web", "books", task=task))
    batches = list(made.evaluation())
    labels = np.concatenate([batch.labels.reshape(-1) for batch in batches])
    wanted = [stream(folders, name, "val") for name in ("web", "books")]
    if task.documents is None:
        assert np.array_equal(labels[labels != IGNORE], np.concatenate([t[1:] for t in wanted]))
    else:
        found = np.bincount(labels[labels != IGNORE], minlength=257)
        assert np.array_equal(found, sum(np.bincount(t[1:], minlength=257) for t in wanted))
    same(batches, list(made.evaluation()))
    some = load_task(config(folders, "web", "books", task=task, eval_batches=3))
    assert len(list(some.evaluation())) == 3
    same(list(some.evaluation()), list(some.evaluation()))


@pytest.mark.slow
def test_training_steps_do_not_wait_for_slow_storage(folders, monkeypatch):
    real = Part.read

    def read(part, start, into):
        time.sleep(0.002)
        real(part, start, into)

    monkeypatch.setattr(Part, "read", read)
    task = load_task(config(folders))  # 12 rows per step
    waits = []
    for step in range(25):
        start = time.perf_counter()
        task.inputs(step)
        waits.append(time.perf_counter() - start)
        time.sleep(0.03)
    start = time.perf_counter()
    task.inputs(25, 0, 1)
    assert time.perf_counter() - start > 0.024
    assert np.median(waits[1:]) < 0.012


def test_loss_per_character_includes_document_ends(tmp_path):
    lines = [f"wörd {i} and word {i * i}" for i in range(200)]
    corpus = prepared_lines(tmp_path, "out", lines, tokenizer="bpe", bpe_vocab_size=300)
    task = load_task(config(tmp_path, "out"))
    loss, unit = task.per_character(2.0)
    labels = corpus.val.tokens - 1
    assert unit == "character"
    assert loss == 2.0 * labels / (corpus.val.characters + corpus.val.documents)
    assert corpus.val.characters > labels


def test_mixture_uses_tokenizer_from_its_folders(folders):
    run = config(folders, "web", "books", val_data=str(folders / "books"))
    task = load_task(run, Tokenizers(ByteTokenizer()))
    streams = [stream(folders, name) for name in ("web", "books")]
    for found, tokens in zip(task.documents(), streams, strict=True):
        np.testing.assert_array_equal(found, tokens)
    held_out = len(stream(folders, "books", "val"))
    rows = [(len(tokens) - 1) // 13 for tokens in streams]
    assert [len(part) for part in task.rows] == rows  # full windows; the remainder is dropped
    parts = ", ".join(
        f"{folders / name}: {len(tokens):,} tokens in {count:,} rows"
        for name, tokens, count in zip(("web", "books"), streams, rows, strict=True)
    )
    assert task.described() == f"{parts}; {held_out:,} tokens held out, 156 in a step"
    assert task.per_character(1.5) == (1.5, "byte") and task.tokens_per_step == 2 * 6 * 13
    other = f"its tokenizer differs from {folders}/run; prepare it with `tokenizer={folders}/run`"
    with pytest.raises(ConfigError, match=f"web': {other}$"):
        load_task(run, Tokenizers(CharTokenizer("ab")))
    documented = replace(run, task=documents())
    corpus = open_corpus(folders / "books")
    task = load_task(documented)
    task.tokenizers = Tokenizers(CharTokenizer("ab"))  # its characters are not bytes
    loss, unit = task.per_character(1.5)
    labels, ends = corpus.val.tokens - 1, corpus.val.documents
    assert (loss, unit) == (1.5 * labels / (corpus.val.characters + ends), "character")


def test_damaged_folder_is_rejected_before_writing_files(folders, tmp_path):
    out = prepared_lines(tmp_path, "out", [f"line {i}" for i in range(300)]).path
    file = out / "train-00000.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 4
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000.bin has the wrong SHA-256 checksum"):
        fit(config(tmp_path, "out"))
    (out / "manifest.json").unlink()
    (out / "prepare.json").write_text("{}")
    with pytest.raises(DataError, match="preparation is unfinished"):
        fit(config(tmp_path, "out"))
    assert not (tmp_path / "run").exists()


def test_shard_truncated_during_run_raises_one_line_error(folders, tmp_path):
    prepared_lines(tmp_path, "out", [f"line {i}" for i in range(3000)], val_fraction=0.01)
    task = load_task(config(tmp_path, "out"))
    task.inputs(0)
    os.truncate(tmp_path / "out" / "train-00000.bin", 50)
    with pytest.raises(
        DataError, match=r"train-00000.bin: ends before byte \d+, so it was truncated"
    ):
        for step in range(1, 300):  # steps that were read ahead are intact
            task.inputs(step)


def test_settings_incompatible_with_prepared_folder_raise_error(folders, tmp_path):
    prepared_lines(tmp_path, "other", [f"other {i}" for i in range(300)], tokenizer="char")
    both = f"{folders / 'web'},{tmp_path / 'other'}"
    encoder = replace(MODEL, kind="encoder")
    cases = [
        (DataError, r"other: its tokenizer differs from that of .*web", {"data": both}),
        (ConfigError, "documents is 'lines'", {"task": LanguageTask(documents="lines")}),
        (ConfigError, "task is 'masked'", {"task": MaskedTask(), "model": encoder}),
        (ConfigError, "tokenizer is 'bpe'", {"tokenizer": "bpe"}),
        (DataError, "val_data is .*txt': must be a prep", {"val_data": f"{tmp_path}/other.txt"}),
        (DataError, "'nowhere' is not a prepared folder", {"data": f"{folders / 'web'},nowhere"}),
        (ConfigError, "vocab_size is 100", {"vocab": 100}),
        (DataError, r"books: train has \d+ tokens, but a window of context 3000 needs 3001",
         {"data": str(folders / "books"), "model": replace(MODEL, max_len=3000)}),
    ]  # fmt: skip
    for error, message, changes in cases:
        vocabulary = changes.pop("vocab", None)
        with pytest.raises(error, match=message):
            load_task(config(folders, **changes), vocab_size=vocabulary)
    with pytest.raises(ConfigError, match=r"documents is 'prepared': data is .*txt', which is not"):
        load_task(config(tmp_path, "other.txt", task=documents()))
    weights = r"data_weights is .*: must be one weight for each of the "
    with pytest.raises(ConfigError, match=weights + "0"):
        load_task(config(tmp_path, "other.txt", data_weights=(1.0, 2.0)))
    with pytest.raises(ConfigError, match=weights + "2"):
        load_task(config(folders, "web", "books", data_weights=(1.0,)))
    with pytest.raises(ConfigError, match=r"data_weights .*must be positive"):
        config(folders, "web", "books", data_weights=(1.0, 0.0))
    weighted = config(folders, "web", "books", data_weights=(1.0, 2.0), task=documents())
    assert config_from_json(config_to_json(weighted)) == weighted


@pytest.mark.slow
def test_resumed_run_rejects_changed_data_and_weights(folders, tmp_path):
    run = config(
        folders, "web", "books", data_weights=(1.0, 2.0), out=str(tmp_path / "run"), steps=3
    )
    fit(run)
    later = replace(run, steps=4)
    with pytest.raises(ConfigError, match=r"data \(sha256\)"):
        swapped = ",".join(reversed(run.data.split(",")))
        fit(replace(later, data=swapped), resume=True)
    with pytest.raises(ConfigError, match=r"data_weights: \(1.0, 2.0\) -> \(2.0, 1.0\)"):
        fit(replace(later, data_weights=(2.0, 1.0)), resume=True)


@pytest.mark.long
def test_trained_model_continues_on_folder_with_its_tokenizer(folders, tmp_path):
    first = config(folders, "web", out=str(tmp_path / "first"), steps=3)
    fit(first)
    second = replace(
        first, model=load_task(first).config.model, init_from=first.out, tokenizer="pretrained",
        data=str(folders / "books"), out=str(tmp_path / "second"),
    )  # fmt: skip
    assert fit(second).val_loss is not None
    prepared_lines(tmp_path, "other", [f"other {i}" for i in range(300)], tokenizer="char")
    with pytest.raises(ConfigError, match=r"its tokenizer differs from .*first; prepare it with"):
        fit(replace(second, data=str(tmp_path / "other"), out=str(tmp_path / "third")))


@pytest.mark.slow
def test_train_command_accepts_data_mixture(folders, tmp_path, capsys):
    flags = (
        "--steps 2 --context 13 --batch-size 4 --d-model 20 --num-heads 2 --num-layers 1 --d-ff 29 "
        "--sample-tokens 5 --documents prepared --data-weights 0.7,0.3"
    )
    data = f"{folders / 'web'},{folders / 'books'}"
    assert train.main([*flags.split(), "--data", data, "--out", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    assert "web: 3,334 tokens in" in output and "held-out loss" in output and "per byte" in output
    assert train.main(["--out", str(tmp_path / "run"), "--resume", "--steps", "3"]) == 0
    capsys.readouterr()
    run = ["--model", str(tmp_path / "run")]
    found = []
    for data in (str(folders / "web"), f"{folders / 'web'},{folders / 'books'}"):
        assert run_command(["evaluate", *run, "--data", data, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["nats_per_byte"])
    assert found[0] != found[1] and 3.0 < found[1] < 6.0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert found[1] == pytest.approx(last["val_loss"], rel=1e-6)
    assert run_command(["generate", *run, "--prompt", "web", "--num-tokens", "3"]) == 0
    assert train.main([*flags.split(), "--data", str(folders / "web"), "--out", "x"]) == 2
    assert "data_weights is (0.7, 0.3): must be one weight for each" in capsys.readouterr().err


@pytest.mark.slow
def test_text_in_memory_does_not_require_grain(tmp_path):
    (tmp_path / "text").write_text("some text " * 100)
    script = (
        "import sys; from transformer_jax.config import TrainConfig;"
        "from transformer_jax.training.tasks import load_task;"
        f"load_task(TrainConfig(data={str(tmp_path / 'text')!r}, context=7)).inputs(0);"
        "import transformer_jax.training.loop; print('grain' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout == "False\n", ended.stderr


def test_missing_grain_error_names_package(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    config = TrainConfig(data=str(folders / "web"), context=7)
    with pytest.raises(ConfigError, match=r"^data is .*web': reading .* pip install grain$"):
        load_task(config)


RESIDENT = """
import sys
from pathlib import Path
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.training.tasks import load_task
def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(l for l in lines if l.startswith("VmHWM")).split()[1]) * 1024
def task(data):
    model = ModelConfig(max_len=512, d_model=8, num_heads=1)
    return load_task(TrainConfig(model=model, data=data, batch_size=64))
for data in sys.argv[1:]:
    made = task(data)
    steps = 1 + len(made.rows[0]) // 64
    for step in range(max(steps, 600)):
        made.inputs(step)
    print(made.rows[0].part.tokens * 2, resident())
"""


@pytest.mark.long
def test_reading_corpus_uses_far_less_memory_than_its_size(tmp_path):
    for name, size in (("small", 3), ("large", 40)):
        lines = [f"{i:09999d}" for i in range(size * 100)]
        prepared_lines(tmp_path, name, lines, val_fraction=0.01)
    command = [sys.executable, "-c", RESIDENT, str(tmp_path / "small"), str(tmp_path / "large")]
    ended = subprocess.run(command, capture_output=True, text=True)
    (small, before), (large, after) = (map(int, line.split()) for line in ended.stdout.splitlines())
    assert large > 75e6 > 10 * small
    assert after - before < 0.2 * large


@pytest.mark.long
def test_run_on_mesh_uses_same_rows_as_one_device(folders):
    """With one device; tests/multi_device covers more."""
    one = config(folders, out=str(folders / "one"), steps=3)
    over = replace(one, out=str(folders / "over"), mesh=MeshConfig(data=1))
    assert fit(one).val_loss == pytest.approx(fit(over).val_loss, rel=1e-6)
