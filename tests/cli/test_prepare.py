"""The command prepare: inputs, output files, errors and resuming after a kill."""

import dataclasses
import errno
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from transformer_jax.__main__ import main
from transformer_jax.cli.prepare import ProgressLine
from transformer_jax.config import ConfigError
from transformer_jax.config.prepare import PrepareConfig
from transformer_jax.corpus import documents as reading
from transformer_jax.corpus import is_prepared, open_corpus, prepare
from transformer_jax.corpus import prepare as preparing  # the function; its module is below
from transformer_jax.corpus.documents import cut_file, read_input
from transformer_jax.corpus.folder import (
    MANIFEST,
    PARTS,
    PLAN,
    TOKENIZER,
    end_id,
    prepared_folders,
    sealed,
)
from transformer_jax.corpus.prepare import Progress, part_of, token_dtype
from transformer_jax.tokenizers.special import plain
from transformer_jax.tokenizers.trained import ByteTokenizer, WordTokenizer
from transformer_jax.tokenizers.utf8 import DataError

module = sys.modules[preparing.__module__]
LINES = [f"line {i} " + "wörter " * (i * 7 % 11) + str(i * i) for i in range(211)]


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(LINES) + "\n")
    return str(file)


def config(*data, **changes):
    usual = dict(data=data, documents="lines", tokenizer="byte", val_fraction=0.1)
    return PrepareConfig(**usual | changes)


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def documents(corpus, name):
    """Read the documents of a part with NumPy and check the documented layout."""
    part = getattr(corpus, name)
    files = sorted(corpus.path.glob(f"{name}-[0-9]*.bin"))
    stream = np.concatenate([np.fromfile(file, part.dtype) for file in files])
    bounds = np.fromfile(corpus.path / f"{name}-index.bin", "<i8")
    assert len(stream) == part.tokens and len(bounds) == part.documents + 1
    assert (stream[bounds] == end_id(corpus.tokenizer)).all()
    assert bounds[0] == 0 and bounds[-1] == len(stream) - 1
    pairs = itertools.pairwise(bounds)
    return [corpus.tokenizer.to_bytes(stream[a + 1 : b]).decode() for a, b in pairs]


def test_documents_keep_order_and_are_not_split_between_parts(text, tmp_path):
    corpus = prepare(config(text), tmp_path / "out")
    found = {name: documents(corpus, name) for name in PARTS}
    for name in PARTS:
        assert found[name] == [line for line in LINES if part_of(line, 0.1) == name]
        assert getattr(corpus, name).characters == sum(map(len, found[name]))
    assert 5 < len(found["val"]) < 50
    corpus.check()


@pytest.mark.slow
def test_output_bytes_do_not_depend_on_workers_or_chunk_size(text, tmp_path):
    sizes = {"bpe_vocab_size": 300, "tokenizer": "bpe"}
    one = prepare(config(text, **sizes), tmp_path / "one", chunk_bytes=500)
    two = prepare(config(text, **sizes), tmp_path / "two", chunk_bytes=500, workers=2)
    assert contents(one.path) == contents(two.path)
    whole = prepare(config(text), tmp_path / "whole")
    cut = prepare(config(text), tmp_path / "cut", chunk_bytes=97)
    for name in PARTS:
        assert documents(whole, name) == documents(cut, name)


def test_tokenizer_is_trained_on_the_training_part(tmp_path):
    words = [f"word{chr(97 + i)}" for i in range(20)]
    (tmp_path / "text.txt").write_text("\n".join(words))
    found = preparing(
        config(str(tmp_path / "text.txt"), tokenizer="word", val_fraction=0.4), tmp_path / "out"
    )
    assert {*plain(found.tokenizer).words} == {x for x in words if part_of(x, 0.4) == "train"}


def test_token_files_have_at_most_shard_size(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"{i:01000d}" for i in range(1300)))
    corpus = prepare(config(str(file), shard_mb=1), tmp_path / "out")
    sizes = [f.stat().st_size for f in sorted(corpus.path.glob("train-0*.bin"))]
    assert len(sizes) == 3 and sizes[:2] == [10**6] * 2 and 0 < sizes[2] < 10**6
    first = documents(corpus, "train")
    assert first == [f"{i:01000d}" for i in range(1300) if part_of(f"{i:01000d}", 0.1) == "train"]
    stream = np.concatenate([np.fromfile(f, "<u2") for f in sorted(corpus.path.glob("train-0*"))])
    into = np.zeros(1200, np.uint16)
    for start in (0, 499_000, 499_999, 500_000, len(stream) - 1200):
        corpus.train.read(start, into)
        assert np.array_equal(into, stream[start : start + 1200])


@pytest.mark.long_except("1000")
@pytest.mark.parametrize("size", [70_000, 1000])
def test_token_ids_use_16_bits_if_they_fit(size, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{chr(0x1000 + i)}\n" for i in range(size) if i + 0x1000 != 0xFFFF
                            and not 0xD800 <= i + 0x1000 < 0xE000))  # fmt: skip
    corpus = prepare(config(str(file), tokenizer="char"), tmp_path / "out")
    assert corpus.train.dtype == ("<u4" if size == 70_000 else "<u2")
    texts = file.read_text().splitlines()
    assert documents(corpus, "val") == [t for t in texts if part_of(t, 0.1) == "val"]


def test_65536_token_ids_fit_into_16_bits():
    for size, dtype in ((2**16 - 1, "<u2"), (2**16, "<u2"), (2**16 + 1, "<u4")):
        words = WordTokenizer(tuple(f"w{i}" for i in range(size - 2)))
        assert words.vocab_size == size and token_dtype(words) == dtype
        assert np.array([size - 1]).astype(dtype) == size - 1


def test_documents_are_split_by_paragraph_file_or_json_line(tmp_path):
    texts = [f"first {i}\nsecond {i}" for i in range(60)]
    files = {
        "paragraphs": ("a.txt", "\n\n".join(texts[:30]) + "\n  \n\n" + "\n \n".join(texts[30:])),
        "jsonl": ("a.jsonl",
                  "\n".join(json.dumps({"id": i, "body": t}) for i, t in enumerate(texts))),
    }  # fmt: skip
    for kind, (name, content) in files.items():
        (tmp_path / name).write_text(content)
        changes = {"field": "body"} if kind == "jsonl" else {}
        given = config(str(tmp_path / name), documents=None, val_fraction=0.3, **changes)
        corpus = prepare(given, tmp_path / kind, chunk_bytes=101)
        for part in PARTS:
            assert documents(corpus, part) == [t for t in texts if part_of(t, 0.3) == part]
    paths = []
    for i, t in enumerate(texts[:20]):
        (tmp_path / f"{i:02}.txt").write_text(t)
        paths.append(str(tmp_path / f"{i:02}.txt"))
    corpus = prepare(config(*paths, documents="files", val_fraction=0.3), tmp_path / "files")
    assert documents(corpus, "train") == [t for t in texts[:20] if part_of(t, 0.3) == "train"]


def test_half_of_surrogate_pair_is_replaced_on_request(tmp_path):
    lines = [rf'{{"text": "{i} \ud83d\ude42 \ud83d!"}}' for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    given = config(str(tmp_path / "a.jsonl"), documents=None, text_errors="replace")
    corpus = prepare(given, tmp_path / "out")
    found = documents(corpus, "train") + documents(corpus, "val")
    assert sorted(found) == sorted(f"{i} \U0001f642 \ufffd!" for i in range(40))


@pytest.mark.parametrize("block", [1, 3, 17])
def test_chunk_boundaries_do_not_depend_on_read_size(block, tmp_path, monkeypatch):
    file = tmp_path / "text.txt"
    file.write_text(
        "".join(f"document {i}\nline" + "\n  \t\n\n \n"[: 2 + i % 6] for i in range(97))
    )
    given = read_input(str(file))
    wanted = cut_file(given, "paragraphs", 50)
    monkeypatch.setattr(reading, "BLOCK", block)
    assert read_input(str(file)) == given
    assert cut_file(given, "paragraphs", 50) == wanted
    assert len(wanted) > 12
    content = file.read_bytes()
    for chunk in wanted[1:]:
        assert content[chunk.start : chunk.start + 8] == b"document"


def test_chunks_do_not_split_line_endings(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_bytes(b"".join(b"line %d\r\n" % i for i in range(97)))
    given = read_input(str(tmp_path / "text.txt"))
    for block in (1, 2, 2**20):
        monkeypatch.setattr(reading, "BLOCK", block)
        chunks = cut_file(given, "lines", 30)
        content = (tmp_path / "text.txt").read_bytes()
        assert len(chunks) > 12 and chunks[-1].end == len(content)
        assert all(content[c.start : c.start + 4] == b"line" for c in chunks)


@pytest.mark.parametrize("content", ["", "\n\n \n"])
def test_file_without_documents_is_rejected(content, tmp_path):
    (tmp_path / "text.txt").write_text(content)
    with pytest.raises(DataError, match=r"text.txt': the files contain no documents$"):
        prepare(config(str(tmp_path / "text.txt")), tmp_path / "out")


def test_parquet_files_can_be_prepared(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"document {i}" for i in range(50)]
    file = str(tmp_path / "a.parquet")
    table = arrow.table({"text": texts, "n": list(range(50))})
    parquet.write_table(table, file, row_group_size=7)
    corpus = prepare(config(file, documents=None), tmp_path / "out")
    assert documents(corpus, "train") == [t for t in texts if part_of(t, 0.1) == "train"]
    with pytest.raises(DataError, match=r"a.parquet has no column 'body' \(columns: text, n\)"):
        prepare(config(file, documents=None, field="body"), tmp_path / "other")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"a.parquet is not a valid Parquet file \("):
        prepare(config(file, documents=None), tmp_path / "damaged")


def test_parquet_without_pyarrow_raises_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"pip install pyarrow$"):
        prepare(config(str(file), documents=None), tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\nbad \xff\n", r"a.txt: byte 9 is 0xff: must be UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl: line at byte 14 is not JSON"),
        ("a.jsonl", b'{"text": "a", "text": "b"}\n', r"line at byte 0: 'text' appears twice"),
        (
            "a.jsonl",
            b'{"text": 7}\n',
            r"a.jsonl: line at byte 0: text has type int: must be a string",
        ),
        ("a.jsonl", b'{"body": "a"}\n', r"a.jsonl: line at byte 0: text is missing"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"line at byte 0: character 0 is U\+D800"),
        ("a.txt", b" \n\n", r"a.txt': the files contain no documents"),
        ("a.txt", b"one", r"val_fraction is 0.1: 0 of 1 documents"),
    ],
)
def test_error_names_unreadable_file(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(config(str(tmp_path / name), documents=None), tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.parametrize(
    ("kinds", "fraction", "tokenizer"),
    [(7, 0.01, "byte"), (2, 0.01, "byte"), (2, 0.9999, "word"), (1, 0.01, "byte"), (1, 0.9, "bpe")],
)
def test_empty_part_error_suggests_validation_fraction(kinds, fraction, tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    lines = [f"line {number % kinds}" for number in range(60 * kinds)]
    file.write_text("\n".join(lines))
    usual = dict(documents="lines", tokenizer=tokenizer)
    usual |= dict(bpe_vocab_size=300) if tokenizer == "bpe" else {}
    given = PrepareConfig(data=(str(file),), val_fraction=fraction, **usual)
    with pytest.raises(DataError) as caught:
        prepare(given, tmp_path / "out")
    held_out = len(lines) if fraction > 0.5 else 0
    message = f"{held_out} of {len(lines)} documents ({kinds} distinct) are held out, but both"
    assert message in str(caught.value)
    if kinds == 1:
        assert str(caught.value).endswith("(add a different document)")
        return
    share = float(re.search(r"--val-fraction (\S+)\)", str(caught.value))[1])
    corpus = prepare(dataclasses.replace(given, val_fraction=share), tmp_path / "out")
    assert (
        0
        < len({*documents(corpus, "train")})
        < kinds
        == len({*documents(corpus, "train"), *documents(corpus, "val")})
    )


class Killed(BaseException):
    pass


def test_resuming_after_kill_at_any_write_produces_identical_bytes(text, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RECORD_SECONDS", 0.0)
    given = config(text, tokenizer="bpe", bpe_vocab_size=280)
    want = contents(prepare(given, tmp_path / "whole", chunk_bytes=2500).path)
    real, out, ended = os.fsync, tmp_path / "out", 0
    for calls in range(1000):
        left = calls

        def fsync(handle):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            prepare(given, out, chunk_bytes=2500)
        except Killed:
            ended += 1
            if not (out / MANIFEST).exists():
                with pytest.raises(DataError):
                    open_corpus(out)
            continue
        break
    assert ended > 2
    assert contents(out) == want


def test_preparation_that_lost_a_file_or_only_its_end_can_run_again(text, tmp_path, monkeypatch):
    out, unlink = tmp_path / "out", Path.unlink

    def killed(*arguments):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module._Preparation, "finish", killed)
        prepare(config(text), out)
    file = out / "train-00000.bin"
    tokens = file.read_bytes()
    file.unlink()
    rule = rf"{file}: has 0 bytes, but {len(tokens)} were written; remove the folder"
    with monkeypatch.context() as patch, pytest.raises(DataError, match=rule):
        patch.setattr(Path, "unlink", lambda *arguments, **options: None)  # keep the other files
        prepare(config(text), out)
    file.write_bytes(tokens)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(
            Path, "unlink", lambda path, **options: (killed if path.name == PLAN else unlink)(path)
        )
        prepare(config(text), out)
    assert (out / PLAN).exists()
    found = contents(prepare(config(text), out).path)
    assert found == contents(prepare(config(text), tmp_path / "whole").path)


SCRIPT = """
import resource, sys, time
from transformer_jax.config.prepare import PrepareConfig
from transformer_jax.corpus import prepare
from transformer_jax.corpus.prepare import _Encoder
def report(progress):
    print(progress.phase, progress.done, flush=True)
    time.sleep(0.02)
if __name__ == "__main__":
    if len(sys.argv) > 4:  # maximum file size
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
    data = (sys.argv[1],)
    config = PrepareConfig(data=data, documents="lines", tokenizer="byte", val_fraction=0.1)
    sys.modules["transformer_jax.corpus.prepare"].RECORD_SECONDS = 0.05
    prepare(config, sys.argv[2], workers=int(sys.argv[3]), chunk_bytes=300, report=report)
"""


@pytest.mark.slow
def test_killed_preparation_can_be_resumed(text, tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), text, str(out), "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("encoding") and int(line.split()[1]) > 4000:
            break
    children = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert json.loads((out / "progress.json").read_text())["chunks"] > 0
    assert is_prepared(out) and not (out / MANIFEST).exists()
    with pytest.raises(DataError, match="preparation is unfinished"):
        open_corpus(out)
    deadline = time.monotonic() + 10  # its worker processes end with it
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(children) >= 2 and not any(map(alive, children))
    read = []
    corpus = prepare(
        config(text), out, chunk_bytes=300,
        report=lambda p: read.append(p.done) if p.phase == "encoding" else None,
    )  # fmt: skip
    assert read[0] > 300  # recorded chunks are not read again
    assert contents(corpus.path) == contents(
        prepare(config(text), tmp_path / "w", chunk_bytes=300).path
    )


def children_of(pid):
    """Return the process IDs of the children of a process."""
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    """Whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


WORKERS = """
import multiprocessing, os, time
from transformer_jax.corpus.prepare import _start_worker
def work(seconds):
    _start_worker()
    time.sleep(seconds)
context = multiprocessing.get_context("fork")
done, busy = (context.Process(target=work, args=(seconds,)) for seconds in (0, 30))
done.start()
done.join(30)
busy.start()
print(done.exitcode, busy.pid, flush=True)
time.sleep(30)
"""


def test_worker_ends_with_its_work_or_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", WORKERS], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            code, worker = parent.stdout.readline().split()
            assert code == b"0" and alive(int(worker))
            time.sleep(0.1)  # the worker starts to watch its parent
        finally:
            parent.kill()
    deadline = time.monotonic() + 10
    while alive(int(worker)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(int(worker))


@pytest.mark.slow
def test_full_disk_raises_one_line_error_and_preparation_can_resume(text, tmp_path):
    out, script = tmp_path / "out", tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), text, str(out), "1", "8000"]
    ended = subprocess.run(command, capture_output=True, text=True)
    last = ended.stderr.strip().splitlines()[-1]
    assert "DataError" in last and "train-00000.bin: cannot be written (File too large)" in last
    assert not (out / MANIFEST).exists()
    again = prepare(config(text), out, chunk_bytes=300)
    assert contents(again.path) == contents(
        prepare(config(text), tmp_path / "w", chunk_bytes=300).path
    )


def test_resuming_with_changed_file_or_settings_is_rejected(text, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def killed(*arguments):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module._Preparation, "encode", killed)
        prepare(config(text), out)
    with pytest.raises(ConfigError, match=r"other settings: val_fraction: 0.1 -> 0.2"):
        prepare(config(text, val_fraction=0.2), out)
    with open(text, "a") as stream:
        stream.write("one more\n")
    with pytest.raises(DataError, match=r"text.txt: has changed since .*out was started: sha256"):
        prepare(config(text), out)


def test_file_that_changes_during_reading_is_rejected(text, tmp_path, monkeypatch):
    real = module._Preparation.encode

    def encode(work):
        with open(text, "r+b") as stream:
            stream.write(b"LINE")
        os.utime(text, ns=(1, 1))
        real(work)

    monkeypatch.setattr(module._Preparation, "encode", encode)
    with pytest.raises(DataError, match=r"text.txt changed while it was being read"):
        prepare(config(text), tmp_path / "out")


def test_concurrent_preparations_are_rejected(text, tmp_path):
    with module._locked_folder(tmp_path / "out"):
        with pytest.raises(DataError, match=r"process \d+ is preparing it"):
            prepare(config(text), tmp_path / "out")


@pytest.mark.parametrize("name", ["train-00000.bin", "val-00000.bin", "train-index.bin",
                                  "tokenizer.json", MANIFEST])  # fmt: skip
@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "gone"])
def test_damaged_prepared_folder_is_detected(name, damage, text, tmp_path):
    out = prepare(config(text), tmp_path / "out").path
    content = bytearray((out / name).read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    content = content[:-2] if damage == "shorter" else content
    content = content + b"  " if damage == "longer" else content
    (out / name).write_bytes(content)
    if damage == "gone":
        (out / name).unlink()
    message = f"{name}|preparation is unfinished"
    if damage in ("shorter", "longer") and name != MANIFEST:  # detected without reading the file
        message = rf"{name} has \d+ bytes, but \d+ were written, so it is damaged"
    with pytest.raises(DataError, match=message):
        open_corpus(out).check()


def test_error_names_id_outside_vocabulary(text, tmp_path):
    corpus = prepare(config(text), tmp_path / "out")
    corpus.check(257)
    with pytest.raises(
        DataError, match=r".bin: contains token 256: must be below the vocabulary size 256"
    ):
        corpus.check(256)
    file = corpus.path / "train-00000.bin"
    tokens = np.fromfile(file, "<u2")
    tokens[7] = 300
    tokens.tofile(file)
    manifest = json.loads((corpus.path / MANIFEST).read_text())
    manifest["files"][file.name]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (corpus.path / MANIFEST).write_text(sealed(manifest))
    with pytest.raises(
        DataError, match=r"train-00000.bin: contains token 300: must be below the voc"
    ):
        open_corpus(corpus.path).check()


def test_tokenizer_with_wrong_ids_is_rejected(text, tmp_path):
    class Wrong(ByteTokenizer):
        def encode(self, text):
            return super().encode(text) + 1000

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "encode_text", lambda tokenizer, text: Wrong().encode(text))
        with pytest.raises(
            DataError, match=r"returned token 1\d+: must be below the vocabulary size 257"
        ):
            prepare(config(text), tmp_path / "out")


def test_shard_truncated_during_reading_raises_error(text, tmp_path):
    corpus = prepare(config(text), tmp_path / "out")
    into = np.zeros(11, corpus.train.dtype)
    corpus.train.read(500, into)
    os.truncate(corpus.path / "train-00000.bin", 600)
    with pytest.raises(DataError, match=r"train-00000.bin: ends before byte 1022"):
        corpus.train.read(500, into)


def test_prepared_folders_are_recognized(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        prepare(config(text), name)
    assert prepared_folders("one") == ("one",)
    assert prepared_folders("one,two") == ("one", "two")
    assert prepared_folders(text) == prepared_folders("none,neither") == ()
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "one" / TOKENIZER, tmp_path / "run")  # a run also has a tokenizer
    assert prepared_folders("run") == ()
    with pytest.raises(DataError, match="'three' is not a prepared folder"):
        prepared_folders("one,three")


def test_prepare_command_writes_token_files(text, tmp_path, capsys):
    out = str(tmp_path / "out")
    flags = [
        "prepare", "--data", text, "--documents", "lines", "--val-fraction", "0.1", "--workers",
        "1",
    ]  # fmt: skip
    assert main([*flags, "--out", out, "--tokenizer", "byte"]) == 0
    message = capsys.readouterr()
    assert "tokens in 1" in message.out and "vocabulary of 257, 16 bits per token" in message.out
    assert "prepare: encoding 100%" in message.err
    assert contents(tmp_path / "out") == contents(prepare(config(text), tmp_path / "same").path)
    assert main([*flags, "--out", str(tmp_path / "b"), "--tokenizer", out]) == 0
    assert open_corpus(tmp_path / "b").tokenizer == open_corpus(out).tokenizer
    capsys.readouterr()
    wrong = {
        "tokenizer is 'nowhere': must be byte, char, word, bpe or a folder": [
            "--tokenizer",
            "nowhere",
        ],
        "workers is 0: must be at least 1": ["--workers", "0"],
        "field is 'body': needs documents 'jsonl' or 'parquet'": ["--field", "body"],
        "shard_mb is 0: must be positive": ["--shard-mb", "0"],
    }
    for line, more in wrong.items():
        assert main([*flags, "--out", str(tmp_path / "c"), *more]) == 2
        assert capsys.readouterr().err.startswith(f"prepare: {line}")
    missing = ["prepare", "--data", str(tmp_path / "no"), "--out", str(tmp_path / "c")]
    assert main(missing) == 2
    assert "no': cannot be read (No such file or directory)" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["layers=[1,2]", "a*?{b}% #\nn\u0303", "~", "-x"])
def test_files_with_unusual_names_are_prepared(tmp_path, name):
    file = tmp_path / f"{name}.TXT"
    file.write_text("\n".join(LINES))
    out = tmp_path / name
    corpus = prepare(config(str(file)), out)
    assert documents(corpus, "val") == [line for line in LINES if part_of(line, 0.1) == "val"]
    assert prepared_folders(str(out)) == (str(out),)


@pytest.mark.parametrize(
    ("content", "changes", "rule"),
    [
        (b"a\n\xff\n" + b"more\n" * 97, dict(text_errors="replace"), "byte 2 is 0xff"),
        (
            "\n".join(map(str, range(23))).encode(),
            dict(val_fraction=0.5),
            "both parts need at least one",
        ),
        (b" \n\n", None, "the files contain no documents"),
        (b"\x1f\x8b", None, "gzip"),
    ],
)
def test_failed_preparation_leaves_no_folder(tmp_path, content, changes, rule):
    file, out = tmp_path / "text.txt", tmp_path / "out"
    file.write_bytes(content)
    with pytest.raises(DataError, match=rule):
        prepare(config(str(file), val_fraction=0.001), out, chunk_bytes=5)
    assert not out.exists()
    if changes is None:  # repair the file instead of the command
        file.write_text("\n".join(LINES))
    prepare(config(str(file), **dict(val_fraction=0.3) | (changes or {})), out, chunk_bytes=5)


def test_preparation_without_file_locks_leaves_no_folder(tmp_path, text, monkeypatch):
    def refuse(handle, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    flags = ["--data", text, "--out", str(tmp_path / "out"), "--tokenizer", "byte"]
    with pytest.raises(OSError, match="does not support locks"):
        prepare(config(text), tmp_path / "out")
    assert main(["prepare", *flags]) == 1
    assert not (tmp_path / "out").exists()


def test_progress_line_shows_rate_and_remaining_time():
    line = ProgressLine()
    line._began, line._before = 100.0, 2_000_000
    done = Progress("reading", 6_000_000, 10_000_000, 1_234)
    expected = "prepare: reading 60% of 10.0 MB, 1,234 documents, 2.0 MB/s, 2 seconds left"
    assert line._line(done, 102.0) == expected


def test_progress_uses_one_terminal_line_or_few_file_lines(monkeypatch):
    rate = ", 3 documents, 0.2 MB/s, 3 seconds left"
    expected = ["a 10% of 1.0 MB", f"a 40% of 1.0 MB{rate}"]
    whole = ["a 100% of 1.0 MB, 0.6 MB/s, 0 seconds left", "b"]
    for alone, wanted in (
        (True, "".join(f"\r\x1b[Kprepare: {line}" for line in expected + whole) + "\n"),
        (False, "".join(f"prepare: {line}\n" for line in expected[:1] + whole)),
    ):
        stream = io.StringIO()
        stream.isatty = lambda alone=alone: alone
        monkeypatch.setattr(sys, "stderr", stream)
        clock = iter([1.0, 1.1, 2.5, 2.6, 2.61, 2.62])
        monkeypatch.setattr(time, "monotonic", lambda clock=clock: next(clock))
        with ProgressLine() as line:
            for done, documents in ((10**5, 0), (2 * 10**5, 1), (4 * 10**5, 3), (10**6, 0)):
                line.show(Progress("a", done, 10**6, documents))
            line.show(Progress("b", 0, 0, 0))
        found = stream.getvalue()
        assert found == wanted, found
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressLine():
        pass
    assert stream.getvalue() == ""


def test_prepare_flags_set_config_fields(monkeypatch, capsys):
    given = []
    part = SimpleNamespace(tokens=1234, documents=5, dtype=np.dtype("<u4"))
    corpus = SimpleNamespace(
        path=Path("-a b"), train=part, val=part, tokenizer=SimpleNamespace(vocab_size=70000)
    )
    monkeypatch.setattr(module, "prepare", lambda *g, **n: given.append((g, n)) or corpus)
    argv = "--data a.jsonl b --out o --documents jsonl --field f --tokenizer bpe --workers 3 "
    argv += (
        "--bpe-vocab-size 300 --sample-mb 2 --val-fraction 0.25 --text-errors replace --shard-mb 7"
    )
    assert main(["prepare", *argv.split()]) == 0
    (((made, out), named),) = given
    assert (made, out) == (PrepareConfig(
        data=("a.jsonl", "b"), documents="jsonl", field="f", tokenizer="bpe", bpe_vocab_size=300,
        sample_mb=2, val_fraction=0.25, text_errors="replace", shard_mb=7,
    ), "o")  # fmt: skip
    assert named["tokenizer"] is None and named["workers"] == 3 and callable(named["report"])
    assert capsys.readouterr().out.splitlines() == [
        "-a b: 1,234 tokens in 5 documents, 1,234 in 5 held out; vocabulary of 70,000, 32 bits per "
        "token",
        "python train.py --data './-a b' --out FOLDER",
    ]
    given.clear()
    assert main("prepare --data a --out o --tokenizer word --word-count 4".split()) == 0
    ((made, _), named) = given[0]
    assert made == PrepareConfig(data=("a",), tokenizer="word", word_count=4)
    assert named["workers"] == len(os.sched_getaffinity(0))


def test_single_token_documents_and_token_zero_are_kept(tmp_path):
    written = ["a", "\0", *map(str, range(40))]
    (tmp_path / "text.txt").write_text("\n".join(written))
    corpus = prepare(config(str(tmp_path / "text.txt")), tmp_path / "out")
    texts = [text for part in PARTS for text in documents(corpus, part)]
    assert sorted(texts) == sorted(written)
