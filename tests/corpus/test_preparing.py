"""Preparation of folders: progress reports, the order of workers, and the sample."""

from __future__ import annotations

import json
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from transformer_jax.config.prepare import PrepareConfig
from transformer_jax.corpus import prepare
from transformer_jax.corpus.folder import MANIFEST
from transformer_jax.corpus.prepare import Progress, _Preparation, _WorkerPool, part_of
from transformer_jax.tokenizers.trained import ByteTokenizer, CharTokenizer
from transformer_jax.tokenizers.utf8 import DataError

module = sys.modules[prepare.__module__]


def test_preparation_reports_phases_and_writes_files_in_manifest(tmp_path):
    lines = [f"{'ab' * (i % 3)}c{i}" for i in range(30)]
    (tmp_path / "a.txt").write_text("\n".join(lines[:20]) + "\n")
    (tmp_path / "b.txt").write_text("\n".join(lines[20:]) + "\n")
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    one, two = (Path(file).stat().st_size for file in files)
    config = PrepareConfig(data=tuple(files), documents="lines", tokenizer="char", val_fraction=0.3)
    reports = []
    corpus = prepare(config, tmp_path / "out", report=reports.append, chunk_bytes=one)
    total = one + two
    assert reports == [
        Progress("reading", one, total, 0), Progress("reading", total, total, 0),
        Progress("characters", one, total, 0), Progress("characters", total, total, 0),
        Progress("encoding", one, total, 20), Progress("encoding", total, total, 30),
        Progress("hashing", 0, 0, 30),
    ]  # fmt: skip
    manifest = json.loads((corpus.path / MANIFEST).read_text())
    parts = {part: [x for x in lines if part_of(x, 0.3) == part] for part in ("train", "val")}
    letters = sorted({*"".join(lines)})
    assert manifest["vocab_size"] == len(letters) + 1 and manifest["end_id"] == len(letters)
    assert manifest["dtype"] == "<u2" and manifest["shard_tokens"] == 512 * 10**6 // 2
    for part, texts in parts.items():
        found = np.fromfile(corpus.path / f"{part}-00000.bin", "<u2")
        ids = [[letters.index(c) for c in text] + [len(letters)] for text in texts]
        expected = [
            len(letters),
            *(i for row in ids for i in row),
        ]  # eos also precedes the first document
        assert found.tolist() == expected
        assert manifest["parts"][part] == {
            "tokens": len(expected), "documents": len(texts), "characters": sum(map(len, texts)),
        }  # fmt: skip
        ends = np.fromfile(corpus.path / f"{part}-index.bin", "<i8")
        assert ends.tolist() == [0, *np.cumsum([len(row) for row in ids])]


class Future:
    def __init__(self, value, fails=False):
        self.value, self.fails = value, fails

    def result(self):
        if self.fails:
            raise BrokenProcessPool("gone")
        return self.value


def test_workers_prefetch_and_return_results_in_order(monkeypatch):
    submitted, events = [], []

    class Pool:
        def __init__(self, count, mp_context, initializer):
            events.append((count, mp_context.get_start_method(), initializer))

        def submit(self, function, item):
            submitted.append(item)
            return Future(function(item), item == 13)

        def shutdown(self, **kwargs):
            events.append(kwargs)

    monkeypatch.setattr(module, "ProcessPoolExecutor", Pool)
    with _WorkerPool(2) as pool:
        found, ahead = [], []
        for value in pool.map(lambda x: x * x, range(9)):
            found.append(value)
            ahead.append(len(submitted))
    assert found == [x * x for x in range(9)] and ahead == [4, 5, 6, 7, 8, 9, 9, 9, 9]
    assert events[0] == (2, "spawn", module._start_worker)
    assert events[1:] == [{"wait": True, "cancel_futures": True}]
    with pytest.raises(
        DataError, match=r"^workers is 2: a worker died .*run the same command again"
    ):
        with _WorkerPool(2) as pool:
            list(pool.map(str, [12, 13]))
    assert events[-1] == {"wait": False, "cancel_futures": True}
    with _WorkerPool(1) as alone:
        assert list(alone.map(str, range(3))) == ["0", "1", "2"]
    assert len(events) == 4


def test_tokenizer_sample_is_spread_over_all_chunks(monkeypatch):
    chunks = [SimpleNamespace(bytes=500_000, number=n) for n in range(11)]
    read = []

    def text(reader, val_fraction, chunk):
        read.append(chunk.number)
        return f"text {chunk.number}\n"

    monkeypatch.setattr(module, "_training_text", text)
    monkeypatch.setattr(module.WordTokenizer, "train", lambda text, count: (text, count))
    reports = []
    for megabytes, chosen in (
        (2, [0, 2, 5, 8]),
        (1, [0, 5]),
        (5, [*range(11)][:10]),
        (6, range(11)),
    ):
        config = PrepareConfig(
            data=("x",), tokenizer="word", sample_mb=megabytes, word_count=3, documents="lines"
        )
        read.clear()
        reports.clear()
        made = _Preparation(
            Path("x"), config, chunks, _WorkerPool(1), reports.append
        )._create_tokenizer()
        assert read == list(chosen)
        assert made == ("".join(f"text {n}\n" for n in chosen), 3)
        assert reports[-2:] == [
            Progress("sample", 500_000 * len(read), 500_000 * len(read), 0),
            Progress("tokenizer", 0, 0, 0),
        ]
    config = PrepareConfig(data=("x",), tokenizer="byte")
    assert isinstance(
        _Preparation(Path("x"), config, [], _WorkerPool(1), print)._create_tokenizer(),
        ByteTokenizer,
    )
    monkeypatch.setattr(module, "_letters", lambda reader, chunk: {"b", "a"})
    config = PrepareConfig(data=("x",), tokenizer="char")
    made = _Preparation(
        Path("x"), config, chunks, _WorkerPool(1), lambda p: None
    )._create_tokenizer()
    assert made == CharTokenizer("ab")
