"""Text, tokenizers and windows against their definitions in plain Python."""

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformer_jax.config import TrainConfig, preset
from transformer_jax.tokenizers.special import tokenizer_from_json
from transformer_jax.tokenizers.trained import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
)
from transformer_jax.training import data
from transformer_jax.training.data import (
    DataError,
    consecutive_starts,
    load_dataset,
    random_starts,
    read,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

NASTY = "a\0b\ufeffc\r\nd\té\u0301\u200f\u05d0\u202e\U0001f469\u200d\U0001f469\U0010ffff\n\n  x"
ENGLISH = "The cat sat on the mat, and the dog sat on the cat. " * 31
ANY = st.characters(exclude_categories=())  # including lone surrogates
BPE = BPETokenizer.train(ENGLISH, 269)


def write(folder, content: bytes, name="text.txt") -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


def small(path, **changes) -> TrainConfig:
    return TrainConfig(model=preset("tiny"), data=str(path), context=7, **changes)


@example("a\ud800b")
@given(st.text(ANY))
@settings(max_examples=300, deadline=None)
def test_byte_and_bpe_tokenizers_round_trip_any_text(text):
    try:
        expected = text.encode()
    except UnicodeEncodeError:
        for tokenizer in (ByteTokenizer(), BPE):
            with pytest.raises(DataError, match="lone surrogate"):
                tokenizer.encode(text)
        return
    assert ByteTokenizer().to_bytes(ByteTokenizer().encode(text)) == expected
    assert BPE.to_bytes(BPE.encode(text)) == expected


@given(st.text(ANY, min_size=1))
@settings(max_examples=300, deadline=None)
def test_char_tokenizer_round_trips_training_text(text):
    tokenizer = CharTokenizer.train(text)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == [sorted(set(text)).index(character) for character in text]
    assert tokenizer.to_bytes(ids) == text.encode("utf-8", "surrogatepass")


def test_saved_tokenizers_round_trip_difficult_text():
    for tokenizer in (CharTokenizer.train(NASTY), ByteTokenizer(), BPETokenizer.train(NASTY, 300)):
        again = tokenizer_from_json(tokenizer.to_json())
        assert again == tokenizer
        assert again.encode(NASTY).tolist() == tokenizer.encode(NASTY).tolist()
        assert again.to_bytes(again.encode(NASTY)).decode() == NASTY


def test_bpe_merges_frequent_pairs_and_needs_fewer_tokens_than_bytes():
    assert BPE.vocab_size == 269
    ids = BPE.encode(ENGLISH)
    assert ids.max() < 269
    assert 0 < len(ids) < len(ENGLISH) / 2
    assert b" the" in {BPE.to_bytes([i]) for i in range(BPE.vocab_size)}


@pytest.mark.slow
def test_bpe_training_is_deterministic_across_processes():
    code = (
        "import hashlib, sys; from transformer_jax.tokenizers.trained import BPETokenizer; "
        "print(hashlib.sha256(BPETokenizer.train(sys.argv[1], 269).definition.encode())"
        ".hexdigest())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, ENGLISH], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == hashlib.sha256(BPE.definition.encode()).hexdigest()


@pytest.mark.parametrize("unknown", ["a", "c", "f", "z", " ", "é"])
def test_character_adjacent_to_known_one_is_unknown(unknown):
    tokenizer = CharTokenizer("bdegy")
    rule = rf"character 2 is U\+{ord(unknown):04X} '{unknown}', which is not among the 5 characters"
    with pytest.raises(DataError, match=rule):
        tokenizer.encode(f"ye{unknown}b")
    with pytest.raises(DataError, match=r"character 0 is U\+D800"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"kind": "char"}', '{"kind": "char", "characters": ""}',
        '{"kind": "char", "characters": "ba"}', '{"kind": "char", "characters": "aa"}',
        '{"kind": "char", "characters": "a", "more": 1}', '{"kind": "byte", "more": 1}',
        '{"kind": "bpe", "definition": {}}', '{"kind": "bpe", "definition": 3}',
        '{"kind": "word"}', "[" * 100_000,
    ],
)  # fmt: skip
def test_invalid_tokenizer_file_is_rejected(text):
    with pytest.raises(DataError):
        tokenizer_from_json(text)


def test_bpe_vocabulary_without_all_bytes_is_rejected():
    definition = json.loads(BPE.definition)
    vocab = definition["model"]["vocab"]
    del vocab["Ā"]  # byte 0
    vocab["!!"] = 0 if 0 not in vocab.values() else next(iter(set(range(269)) - {*vocab.values()}))
    with pytest.raises(DataError, match=r"not every byte|definition"):
        BPETokenizer(json.dumps(definition))


@pytest.mark.slow_except("x")
@pytest.mark.parametrize("piece", ["x", "ab \n", " ", "é\u0301\0", "the cat "])
def test_encoding_takes_linear_time(piece):
    def seconds(length):
        text = (piece * (length // len(piece) + 1))[:length]
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            BPE.encode(text)
            CharTokenizer.train(text).encode(text)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(400_000) < 8 * seconds(100_000)  # 4 when linear, 16 when quadratic


def test_every_text_source_type_is_supported(tmp_path, monkeypatch):
    assert read(write(tmp_path, b"\xff\0"))[0].content == b"\xff\0"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"from a pipe")))
    assert [s.content for s in read("-")] == [b"from a pipe"]
    (docs,) = read("python-docs")
    from pydoc_data.topics import topics

    assert docs.content.decode().startswith(topics[min(topics)])
    assert len(docs.content) > 300_000


def test_folder_is_read_in_path_order_without_hidden_files(tmp_path):
    for name, content in (("b.txt", b"two"), ("a.txt", b"one\n"), ("e.txt", b""), (".h", b"no")):
        write(tmp_path, content, name)
    for folder in ("c", ".git"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, b"three\r\n", "d.txt")
    assert b"".join(s.content for s in read(str(tmp_path))) == b"one\ntwo\nthree\r\n"


def test_run_folders_and_links_to_folders_are_skipped(tmp_path):
    texts, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    for folder in (texts, texts / "model", texts / "run", texts / "mine", elsewhere):
        folder.mkdir()
    for name in ("config.json", "tokenizer.json", "metrics.jsonl"):
        write(texts / "run", b"no", name)
    for name in ("config.json", "tokenizer.json"):
        write(texts / "model", b"yes", name)
    write(texts / "mine", b"out")
    write(elsewhere, b"no")
    (texts / "link").symlink_to(elsewhere)
    found = read(str(texts), str(tmp_path / "elsewhere" / ".." / "texts" / "mine"))
    assert b"".join(s.content for s in found) == b"yes\nyes\n"
    assert b"out\n" in [s.content for s in read(str(texts), "runs/other")]


def test_error_names_unreadable_entry_of_folder(tmp_path, monkeypatch):
    write(tmp_path, b"one")
    (tmp_path / "z.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"z\.txt: cannot be read \(No such file"):
        read(str(tmp_path))
    (tmp_path / "z.txt").unlink()
    (tmp_path / "inner").mkdir()
    scan = os.scandir

    def closed(path):
        if os.path.basename(path) == "inner":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(DataError, match=r"inner: cannot be read \(Permission denied"):
        read(str(tmp_path))


def test_closed_standard_input_raises_error(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(DataError, match="data is '-': standard input is closed"):
        read("-")


def test_text_is_unchanged_except_leading_byte_order_mark(tmp_path):
    text, mark = NASTY * 13, b"\xef\xbb\xbf"
    path = write(tmp_path, mark + text.encode())
    for kind in (
        dict(tokenizer="char"),
        dict(tokenizer="byte"),
        dict(tokenizer="bpe", bpe_vocab_size=300),
    ):
        found = load_dataset(small(path, **kind))
        whole = found.tokenizer.to_bytes(found.train) + found.tokenizer.to_bytes(found.val)
        assert whole == text.encode()
        assert found.sha256 == hashlib.sha256(mark + text.encode()).hexdigest()


def test_last_tenth_of_text_is_held_out(tmp_path):
    text = "".join(chr(ord("a") + i % 23) for i in range(1009))
    found = load_dataset(small(write(tmp_path, text.encode())))
    assert found.tokenizer.to_bytes(found.train).decode() == text[: int(1009 * 0.9)]
    assert found.tokenizer.to_bytes(found.val).decode() == text[int(1009 * 0.9) :]
    assert found.val_characters == len(found.val) == 101
    assert found.train.dtype == np.uint8


def test_held_out_characters_do_not_depend_on_tokenizer(tmp_path):
    path = write(tmp_path, (ENGLISH + "é" * 503).encode())
    for kind in ("byte", "bpe"):
        found = load_dataset(small(path, tokenizer=kind))
        held_out = found.tokenizer.to_bytes(found.val)
        assert found.val_characters == len(held_out.decode("utf-8", "replace")) < len(held_out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\xef\xbb\xbf", "it is empty except for a byte-order mark"),
        (b"abcdefgh", "training part has 7 tokens, but a window of context 7 needs 8"),
        (b"abcdefgh" * 5, "held-out part has 4 tokens, but a window of context 7 needs 8"),
        (b"abc\xffdef" * 99, "text.txt: byte 3 is 0xff: must be UTF-8"),
        ("wide".encode("utf-16"), "byte 0 is 0xff: must be UTF-8"),
        (b"\xed\xa0\x80" * 99, "byte 0 is 0xed: must be UTF-8"),
    ],
)
def test_unusable_text_raises_error_with_reason(tmp_path, content, message):
    with pytest.raises(DataError) as caught:
        load_dataset(small(write(tmp_path, content)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_utf8_is_replaced_on_request_and_kept_as_bytes(tmp_path):
    path = write(tmp_path, b"abc\xffdef" * 99)
    replaced = load_dataset(small(path, text_errors="replace"))
    assert "\ufffd" in replaced.tokenizer.characters
    as_bytes = load_dataset(small(path, tokenizer="byte"))
    assert as_bytes.tokenizer.to_bytes(as_bytes.train)[:7] == b"abc\xffdef"


@pytest.mark.parametrize("name", ["/nonexistent/text", "", "a\0b", "/proc/self/mem"])
def test_error_names_unreadable_source(name):
    with pytest.raises(DataError, match="data is "):
        load_dataset(small(name))


def test_shakespeare_text_is_downloaded_once_and_verified(tmp_path, monkeypatch):
    content, calls = b"To be, or not to be" * 17, []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", hashlib.sha256(content).hexdigest())

    def answer(url, timeout):
        calls.append(url)
        return io.BytesIO(content)

    monkeypatch.setattr("urllib.request.urlopen", answer)
    for _ in range(3):
        assert [s.content for s in read("shakespeare")] == [content]
    assert calls == [data.SHAKESPEARE]
    file = tmp_path / "transformer_jax" / "shakespeare.txt"
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"shakespeare.txt: the SHA-256 checksum must be"):
        read("shakespeare")
    file.unlink()
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", "0" * 64)
    with pytest.raises(DataError, match="does not have the SHA-256 checksum"):
        read("shakespeare")
    assert not file.exists()


def test_missing_network_error_suggests_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def unreachable(url, timeout):
        raise OSError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    with pytest.raises(DataError) as caught:
        read("shakespeare")
    line = str(caught.value)
    assert "\n" not in line
    assert str(tmp_path / "transformer_jax" / "shakespeare.txt") in line
    assert "`data=FILE`" in line


def test_window_starts_depend_only_on_seed_and_step():
    first = random_starts(3, 5, (2, 7), 1009)
    assert first.tolist() == random_starts(3, 5, (2, 7), 1009).tolist()
    assert first.dtype == np.int32 and first.shape == (2, 7)
    others = {tuple(random_starts(s, n, (14,), 1009)) for s in range(7) for n in range(11)}
    assert len(others) == 77
    assert (
        random_starts(0, 3 << 32, (7,), 1009).tolist() != random_starts(3, 0, (7,), 1009).tolist()
    )


def test_window_starts_are_stable_across_versions():
    golden = [[932681, 293945, 524907], [28606, 702972, 792537]]
    assert random_starts(7, 11, (2, 3), 1_000_003).tolist() == golden


def test_micro_batches_use_same_windows_as_one_large_batch():
    big = random_starts(3, 5, (1, 12), 1009)
    assert random_starts(3, 5, (4, 3), 1009).reshape(1, 12).tolist() == big.tolist()


def test_window_starts_are_uniform_and_include_both_ends():
    draws = random_starts(1, 0, (26_000,), 13)
    counts = np.bincount(draws, minlength=13)
    assert len(counts) == 13
    assert ((counts - 2000) ** 2 / 2000).sum() < 39.1  # chi-square, 12 degrees, p = 1e-4


@pytest.mark.parametrize("bad", [(-1, 0, 5), (2**32, 0, 5), (0, -1, 5), (0, 0, 0), (0, 0, 2**31)])
def test_out_of_range_window_starts_raise_error(bad):
    seed, step, count = bad
    with pytest.raises(ValueError, match="out of range"):
        random_starts(seed, step, (3,), count)


@pytest.mark.parametrize("tokens", [8, 9, 14, 15, 16, 101])
def test_consecutive_windows_cover_every_label_once(tokens):
    starts = consecutive_starts(tokens, 7)
    assert starts[-1] < tokens - 1, "a window of no labels"
    seen = [
        start + offset + 1 for start in starts for offset in range(7) if start + offset + 1 < tokens
    ]
    assert seen == list(range(1, tokens))
