"""Folders of weights: round trips, and rejection of hostile folders by name."""

import ctypes
import dataclasses
import json
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from tests.support import hostile_weights as hostile
from tests.support.hostile_weights import EIGHT, FILES, GOOD, entry, lay, raw
from tests.support.killed import Killed, killed_after
from transformer_jax import load as load_model
from transformer_jax import load_sentence_encoder
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.pretrained.safetensors_folder import (
    CONFIG,
    CONFIG_LIMIT,
    HEADER_LIMIT,
    INDEX,
    SINGLE,
    TensorInfo,
    open_folder,
    write_folder,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tensors(rng) -> dict[str, np.ndarray]:
    """Tensors of every dtype and kind of shape, including NaN, infinities, and negative zero."""
    found = {
        "odd": np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.0], np.float32),
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "brain": rng.standard_normal((2, 3, 7)).astype(ml_dtypes.bfloat16),
        "double": rng.standard_normal(11),
        "flags": np.array([True, False, True]),
        "scalar": np.array(1 / 3, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "turned": rng.standard_normal((5, 3)).astype(np.float32).T,
        "foreign": np.arange(7, dtype=">i4"),
    }
    found |= {f"i{n}": np.array([-1, 5], f"int{n}") for n in (8, 16, 32, 64)}
    return found | {f"u{n}": np.array([255, 5], f"uint{n}") for n in (8, 16, 32, 64)}


def bits(tensors) -> dict[str, tuple]:
    return {
        name: (array.dtype.name, array.shape, array.astype(array.dtype.newbyteorder("=")).tobytes())
        for name, array in dict(tensors).items()
    }


def digest(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 64], ids=["one file", "shards"])
def test_tensors_round_trip_bitwise(tmp_path, tensors, shard_bytes):
    config = {"model_type": "gpt2", "n": 3, "é": [1.5, None, True, {"x": []}]}
    path = tmp_path / "new" / "model"
    write_folder(path, config, tensors.items(), shard_bytes=shard_bytes)
    folder = open_folder(path)
    assert (folder.path, folder.config) == (path, config)
    assert len({info.file for info in folder.tensors.values()}) == (1 if shard_bytes > 64 else 6)
    assert len(tensors) == 17
    expected = bits(tensors)
    assert {k: (i.dtype, i.shape) for k, i in folder.tensors.items()} == {
        name: value[:2] for name, value in expected.items()
    }
    assert bits(folder.read_all(tensors)) == expected
    assert {name: bits({name: folder.read(name)})[name] for name in tensors} == expected
    theirs = {}
    for file in path.glob("*.safetensors"):
        theirs |= safetensors.numpy.load_file(file)
        with safetensors.safe_open(file, "numpy") as reader:
            assert reader.metadata() == {"format": "pt"}
        assert file.stat().st_mode == (path / CONFIG).stat().st_mode
    assert bits(theirs) == expected
    assert [p.name for p in path.parent.iterdir()] == ["model"]


def test_loaded_tensor_is_independent_copy(tmp_path):
    folder = open_folder(lay(tmp_path, GOOD))
    first = folder.read("a")
    first[:] = 7
    assert folder.read("a").tobytes() == EIGHT
    assert (tmp_path / SINGLE).read_bytes() == GOOD
    assert folder.tensors == {"a": TensorInfo(SINGLE, "float32", (2,))}


@pytest.mark.parametrize("shard_bytes", [1, 13, 40, 100, 10**6])
def test_shard_layout_matches_huggingface_hub(tmp_path, tensors, shard_bytes):
    from huggingface_hub.serialization import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
        get_storage_id=lambda array: None,
        max_shard_size=shard_bytes,
    )
    write_folder(tmp_path / "m", {}, tensors.items(), shard_bytes=shard_bytes)
    found = {}
    for path in (tmp_path / "m").glob("*.safetensors"):
        with safetensors.safe_open(path, "numpy") as reader:
            found[path.name] = sorted(reader.keys())
    assert found == {file: sorted(names) for file, names in split.filename_to_tensors.items()}
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        assert (tmp_path / "m" / INDEX).read_text() == text
    else:
        assert shard_bytes == 10**6
        assert not (tmp_path / "m" / INDEX).exists()


def test_extra_files_are_saved_and_found(tmp_path):
    files = {"tokenizer.json": b"{}", "1_Pooling/config.json": b'{"x": 2}', "modules.json": b"[1]"}
    write_folder(tmp_path / "m", {"n": 1}, [], files=files)
    folder = open_folder(str(tmp_path / "m"))
    assert folder.read_json("1_Pooling/config.json") == {"x": 2}
    assert folder.read_json("modules.json") == [1]
    assert folder.read_json("generation_config.json") is None
    assert folder.file("tokenizer.json") == tmp_path / "m" / "tokenizer.json"
    assert folder.file("merges.txt") is None
    assert dict(folder.tensors) == {}
    for name in ("config.json", INDEX, SINGLE, "../x", "/x", "a//b", "", "~", "a/../../x"):
        with pytest.raises(CheckpointError, match=r"files: .* plain file name"):
            write_folder(tmp_path / "n", {}, [], files={name: b""})
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_failed_save_reports_cause_and_leaves_no_files(tmp_path):
    one = np.zeros(1, np.float32)
    cases = [
        ({}, [("a", np.array([None]))], "'a': dtype object"),
        ({}, [("a", np.zeros(1, complex))], "'a': dtype complex128"),
        ({}, [("a", one), ("a", one)], "'a': the name must be a unique string"),
        ({}, [("__metadata__", one)], "'__metadata__'"),
        ({}, [(3, one)], "3: the name must be"),
        ({"a": {1, 2}}, [("a", one)], "config.json cannot be written"),
        ({"a": float("nan")}, [("a", one)], "config.json cannot be written"),
        ({"a": "x" * CONFIG_LIMIT}, [("a", one)], r"config\.json has \d+ bytes"),
    ]
    for config, tensors, message in cases:
        with pytest.raises(CheckpointError, match=message):
            write_folder(tmp_path / "m", config, tensors)
        assert list(tmp_path.iterdir()) == []


def test_saving_does_not_replace_folder_with_other_files(tmp_path):
    path = tmp_path / "m"
    path.mkdir()
    write_folder(path, {"n": 1}, [("a", np.ones(9, np.float32))] * 1, files={"README.md": b"1"})
    write_folder(path, {"n": 2}, [("b", np.ones(3)), ("c", np.ones(3))], shard_bytes=24,
                 files={"README.md": b"2"})  # fmt: skip
    assert {p.name for p in path.iterdir()} == {
        CONFIG, INDEX, "README.md", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }  # fmt: skip
    before = digest(path)
    with pytest.raises(CheckpointError, match=r"contains 'README\.md', which would be lost"):
        write_folder(path, {"n": 3}, (1 / 0 for _ in "a"))  # raised before any tensor is computed
    (path / "sub").mkdir()
    (path / "sub" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"contains 'sub/notes\.txt', which would be lost"):
        write_folder(path, {"n": 3}, [], files={"README.md": b"3"})
    shutil.rmtree(path / "sub")
    (path / "sub").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"contains 'sub', which would be lost"):
        write_folder(path, {"n": 3}, [], files={"README.md": b"3"})
    (path / "sub").unlink()
    assert digest(path) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="not a folder"):
        write_folder(tmp_path / "file", {}, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "m"]


def test_overwriting_open_folder_preserves_open_tensors(tmp_path):
    path, old = tmp_path / "m", np.arange(4096, dtype=np.float32)
    write_folder(path, {}, [("a", old), ("b", old + 1)])
    folder = open_folder(path)
    mapped = np.memmap(path / SINGLE, mode="r")
    content = bytes(mapped)
    halved = ((name, array / 2) for name, array in folder.read_all(["a", "b"]))
    write_folder(path, {}, halved)  # from the same folder
    assert bytes(mapped) == content
    assert bits(open_folder(path).read_all("ab")) == bits({"a": old / 2, "b": (old + 1) / 2})
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since"):
        folder.read("a")


def test_full_disk_preserves_old_folder(tmp_path):
    path = tmp_path / "m"
    write_folder(path, {}, [("a", np.ones(3, np.float32))])
    before, limits = digest(path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written .*File too large"):
            write_folder(path, {}, [("a", np.ones(4096, np.float32))])
        with pytest.raises(OSError, match="too large"):
            write_folder(path, {"a": "x" * 9999}, [("a", np.ones(3, np.float32))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert digest(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.slow
def test_save_killed_at_any_system_call_leaves_complete_folder(tmp_path):
    """Kills the process at each call that changes the disk, and at each fsync."""
    path = tmp_path / "m"

    def save(n: int) -> None:
        write_folder(path, {"n": n}, [("a", np.full(3, n)), ("b", np.full(2, n))], shard_bytes=24)

    save(1)
    old = digest(path)
    save(2)
    new = digest(path)
    ends = 0
    for fatal in range(1000):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        save(1)
        try:
            with killed_after(fatal):
                save(2)
            break
        except Killed:
            ends += 1
        folders = sorted(tmp_path.iterdir())
        assert all(p == path or re.fullmatch(r"m\.[0-9a-f]{8}\.tmp", p.name) for p in folders)
        if path.exists():
            assert digest(path) in (old, new), f"killed in call {fatal}"
        else:
            assert [digest(p) for p in folders] in ([old, new], [new, old])
    assert ends > 10
    assert digest(path) == new
    assert list(tmp_path.iterdir()) == [path]


def test_all_files_are_synced_before_rename(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle):
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).stat().st_ino)
        fsync(handle)

    def renamed(path, new):
        if new == tmp_path / "m":
            done.append("rename")
        return rename(path, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    tensors = [("a", np.ones(3)), ("b", np.ones(2))]
    write_folder(tmp_path / "m", {}, tensors, shard_bytes=24, files={"s/t": b""})
    before = set(done[: done.index("rename")])
    assert {p.stat().st_ino for p in [tmp_path / "m", *(tmp_path / "m").rglob("*")]} <= before
    assert done[-1] == tmp_path.stat().st_ino


@pytest.mark.slow
def test_reading_buffers_one_tensor_and_writing_one_shard(tmp_path):
    """192 MiB of 16 MiB tensors: read one at a time, and written in shards of 32 MiB."""
    code = f"""
import json, numpy as np
from pathlib import Path
from tests.support.hostile_weights import measured
from transformer_jax.pretrained.safetensors_folder import open_folder, write_folder
folder = Path({str(tmp_path)!r}) / "m"
made = ((str(i), np.full(2**22, i, np.float32)) for i in range(12))
write_folder(folder.with_name("warm"), {{}}, [("a", np.zeros(3))])
_, written = measured(lambda: write_folder(folder, {{}}, made, shard_bytes=2**25))
opened = open_folder(folder)
def read():
    for name, array in opened.read_all(opened.tensors):
        assert array[-1] == int(name)
        del array
_, grown = measured(read)
print(json.dumps([written, grown]))
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    written, read = json.loads(out.stdout)
    assert 15 * 2**20 <= read <= 24 * 2**20  # the kernel counts pages in batches
    assert 30 * 2**20 <= written <= 56 * 2**20


@pytest.mark.parametrize("name", FILES)
def test_error_names_hostile_file(tmp_path, name):
    content, message = FILES[name]
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / SINGLE))) as caught:
        open_folder(lay(tmp_path, content))
    assert re.search(message, str(caught.value))
    assert len(str(caught.value)) < 500 + len(str(tmp_path))
    assert str(caught.value).isprintable()


@pytest.mark.slow
def test_hostile_files_use_bounded_time_and_memory(tmp_path):
    script = [sys.executable, "-m", "tests.support.hostile_weights", str(tmp_path)]
    out = subprocess.run(script, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(out.stdout)
    assert set(found) == set(FILES)
    assert len(found) >= 40
    for name, (seconds, grown) in found.items():
        assert seconds < 1, name
        assert grown <= 64 * 2**20, name


def base() -> bytes:
    """Return the file to mutate: tensors of five kinds, and metadata."""
    header = {
        "__metadata__": {"format": "pt"},
        "block.0.weight": entry("F32", [31, 7], 0, 868),
        "block.0.bias": entry("BF16", [2], 868, 872),
        "count": entry("I64", [], 872, 880),
        "empty": entry("U8", [0, 5], 880, 880),
        "mask": entry("BOOL", [3], 880, 883),
    }
    return raw(header, bytes(range(220)) * 4 + b"\1\0\1")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.long)])
def test_mutated_file_is_rejected_or_matches_header(tmp_path, rng, count):
    """A successful read must return the bytes that the separately parsed header assigns."""
    good = base()
    assert len(open_folder(lay(tmp_path, good)).tensors) == 5
    refused = read = 0
    for _ in range(count):
        content = hostile.mutated(rng, good)
        if content == good:
            continue
        (tmp_path / SINGLE).write_bytes(content)
        try:
            folder = open_folder(tmp_path)
            found = dict(folder.read_all(folder.tensors))
        except CheckpointError as error:
            assert str(tmp_path / SINGLE) in str(error)
            refused += 1
            continue
        read += 1
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        header.pop("__metadata__", None)
        assert set(found) == set(header)
        for name, array in found.items():
            begin, end = header[name]["data_offsets"]
            assert array.tobytes() == content[8 + size + begin : 8 + size + end]
            assert list(array.shape) == header[name]["shape"]
            assert array.nbytes == array.size * hostile.SIZES[header[name]["dtype"]]
    assert refused > count / 2
    assert read > count / 50


def test_file_truncated_after_opening_raises_error(tmp_path):
    array = np.arange(2**16, dtype=np.float32)
    write_folder(tmp_path / "m", {}, [("a", array), ("b", array)])
    folder = open_folder(tmp_path / "m")
    pairs = folder.read_all("ab")
    next(pairs)
    os.truncate(tmp_path / "m" / SINGLE, 2**18)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: 'b': Could not read"):
        next(pairs)
    with pytest.raises(CheckpointError, match="has changed since the folder was opened"):
        folder.read("a")
    (tmp_path / "m" / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        folder.read("a")


def test_tensor_that_contradicts_header_is_rejected(tmp_path):
    folder = open_folder(lay(tmp_path, GOOD))
    for dtype, shape in (("float32", (1, 2)), ("uint32", (2,))):
        other = dataclasses.replace(folder, tensors={"a": TensorInfo(SINGLE, dtype, shape)})
        with pytest.raises(CheckpointError, match=r"'a' is float32\[2\]: must be "):
            other.read("a")


def test_error_names_unknown_tensor(tmp_path):
    folder = open_folder(lay(tmp_path, GOOD))
    for read in (folder.read, lambda name: folder.read_all(["a", name])):
        with pytest.raises(CheckpointError, match="there is no tensor 'x'"):
            read("x")


def test_code_in_model_folder_is_never_executed(tmp_path):
    canary, folder = tmp_path / "canary", tmp_path / "m"
    found = hostile.payloads(canary)
    assert len(found) >= 6
    __import__("pickle").loads(found["pickle"])  # shows that the payload works
    canary.rmdir()
    for name, content in found.items():
        lay(folder, content)
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            open_folder(folder)
        (folder / SINGLE).rename(folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="is a pickle, which this library never reads"):
            open_folder(folder)
        lay(folder, GOOD, content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            open_folder(folder)
        assert not canary.exists(), name


class Watch:
    """Monitor of the files of a folder that any code opens, by inotify."""

    def __init__(self, folder: Path) -> None:
        self.libc = ctypes.CDLL(None)
        self.handle = self.libc.inotify_init1(os.O_NONBLOCK)
        assert self.handle >= 0
        IN_OPEN = 0x20
        assert self.libc.inotify_add_watch(self.handle, os.fsencode(folder), IN_OPEN) >= 0

    def opened(self) -> set[str]:
        try:
            events, names = os.read(self.handle, 65536), set()
        except BlockingIOError:
            return set()
        while events:
            size = struct.unpack_from("iIII", events)[3]
            names.add(os.fsdecode(events[16 : 16 + size].rstrip(b"\0")))
            events = events[16 + size :]
        return names

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        os.close(self.handle)


NAMES = [
    "../outside/x.safetensors", "../../x.safetensors", "..", ".", "", "/etc/passwd",
    "sub/../../outside/x.safetensors", "sub/x.safetensors", "/dev/zero", "~/x.safetensors",
    "~root/x.safetensors", "x.safetensors\0", "../outside\0.safetensors", "..\\x.safetensors",
    "C:\\x.safetensors", "\\\\host\\x.safetensors", "file:///x.safetensors", "x.bin",
    ".hidden.safetensors", "x.safetensors/", "%2e%2e/x.safetensors", "x y.safetensors",
    "․․/x.safetensors", "ﬁle.safetensors", "x\n.safetensors", "x" * 300 + ".safetensors",
    "x" * 10**6 + ".safetensors", 3, None, ["x.safetensors"],
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:30])
def test_index_cannot_refer_to_files_outside_folder(tmp_path, name):
    outside, folder = lay(tmp_path / "outside", b""), tmp_path / "m"
    (outside / "x.safetensors").write_bytes(GOOD)
    lay(folder, GOOD).joinpath(SINGLE).rename(folder / "good.safetensors")
    absolute = str(outside / "x.safetensors")
    for hostile_name in [name, absolute] if name == "/etc/passwd" else [name]:
        index = {"weight_map": {"b": "good.safetensors", "a": hostile_name}}
        (folder / INDEX).write_text(json.dumps(index))
        with Watch(outside) as watch:
            with pytest.raises(CheckpointError, match=r"index\.json: 'a' is in .* plain") as caught:
                open_folder(folder)
            assert not watch.opened()
            open_folder(lay(outside, GOOD))
            assert watch.opened() == {CONFIG, SINGLE}
        assert len(str(caught.value)) < 300 + len(str(folder))


def links(folder: Path, outside: Path) -> dict[str, tuple[str, str]]:
    """Create directory entries with plain names that are not regular files of the folder."""
    (folder / "out.safetensors").symlink_to(outside / "x.safetensors")
    (folder / "chain.safetensors").symlink_to("out.safetensors")
    (folder / "up.safetensors").symlink_to("../outside/x.safetensors")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "nothing.safetensors").symlink_to("nowhere")
    (folder / "zero.safetensors").symlink_to("/dev/zero")
    (folder / "proc.safetensors").symlink_to("/proc/self/mem")
    (folder / "folder.safetensors").mkdir()
    os.mkfifo(folder / "pipe.safetensors")
    leaves = "is a link that leaves the folder"
    return {
        "out": leaves, "chain": leaves, "up": leaves, "zero": leaves, "proc": leaves,
        "loop": "is not a regular file|cannot be read", "nothing": "cannot be read",
        "folder": "is not a regular file", "pipe": "is not a regular file",
        "absent": "cannot be read",
    }  # fmt: skip


def test_files_outside_folder_are_never_opened(tmp_path):
    outside, folder = lay(tmp_path / "outside", GOOD), lay(tmp_path / "m", GOOD)
    (outside / "x.safetensors").write_bytes(GOOD)
    (folder / SINGLE).rename(folder / "good.safetensors")
    for name, message in links(folder, outside).items():
        index = {"weight_map": {"b": "good.safetensors", "a": f"{name}.safetensors"}}
        (folder / INDEX).write_text(json.dumps(index))
        with Watch(folder) as near, Watch(outside) as far:
            with pytest.raises(CheckpointError, match=rf"m/{name}\.safetensors ({message})"):
                open_folder(folder)
            assert near.opened() == {CONFIG, INDEX}
            assert not far.opened()
    (folder / INDEX).unlink()
    (folder / "linked").symlink_to(outside)
    (folder / "secret.json").symlink_to(outside / CONFIG)
    (folder / SINGLE).symlink_to(outside / SINGLE)
    with Watch(outside) as watch:
        with pytest.raises(CheckpointError, match=r"model\.safetensors is a link that leaves"):
            open_folder(folder)
        (folder / SINGLE).unlink()
        (folder / SINGLE).symlink_to("good.safetensors")  # links within the folder are allowed
        opened = open_folder(folder)
        assert opened.read("a").tobytes() == EIGHT
        for name in ("secret.json", "linked/config.json"):
            for read in (opened.read_json, opened.file):
                with pytest.raises(CheckpointError, match=f"{name} is a link that leaves"):
                    read(name)
        for name in ("../outside/config.json", str(outside / CONFIG), "~", "", "a\0", "linked//x"):
            with pytest.raises(CheckpointError, match="is not a plain file name"):
                opened.read_json(name)
        for name in (SINGLE, CONFIG):
            (folder / name).unlink()
            (folder / name).symlink_to(outside / name)
            with pytest.raises(CheckpointError, match=f"{name} is a link that leaves"):
                open_folder(folder)
            with pytest.raises(CheckpointError, match=f"{name} is a link that leaves"):
                opened.read("a") if name == SINGLE else opened.read_json(name)
        assert not watch.opened()


def sharded(folder: Path, files: dict[str, bytes], weight_map: object) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / CONFIG).write_text("{}")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_index_must_match_tensor_files(tmp_path):
    one, two = (raw({name: entry()}, EIGHT) for name in "ab")
    files = {"1.safetensors": one, "2.safetensors": two}
    right = {"a": "1.safetensors", "b": "2.safetensors"}
    assert list(open_folder(sharded(tmp_path / "m", files, right)).tensors) == ["a", "b"]
    cases = [
        (right | {"c": "1.safetensors"}, r"1\.safetensors: 'c' is missing"),
        (right | {"c": "2.safetensors", "d": "2.safetensors"}, r"'c' is missing, and 1 more"),
        ({"a": "1.safetensors", "c": "2.safetensors"}, r"2\.safetensors: 'c' is missing"),
        ({"a": "2.safetensors", "b": "1.safetensors"}, r"2\.safetensors: 'a' is missing"),
        (right | {"c": "3.safetensors"}, r"3\.safetensors cannot be read"),
        (right | {"c": "M.safetensors", "d": "m.safetensors"}, "must differ in more than case"),
        ({}, "weight_map must be an object"),
        ([], "weight_map must be an object"),
        ("1.safetensors", "weight_map must be an object"),
    ]
    for weight_map, message in cases:
        with pytest.raises(CheckpointError, match=message):
            open_folder(sharded(tmp_path / "m", files, weight_map))
    extra = {"1.safetensors": raw({"a": entry(), "c": entry(begin=8, end=16)}, EIGHT * 2)}
    with pytest.raises(CheckpointError, match=r"1\.safetensors: 'c' is not in the index"):
        open_folder(sharded(tmp_path / "m", files | extra, right))
    for damage in (b"", bytes(len(two)), two[:-1], hostile.zipped("x", b"x")):
        damaged = {"2.safetensors": damage}
        with pytest.raises(CheckpointError, match=r"2\.safetensors(: | is not a safetensors file)"):
            open_folder(sharded(tmp_path / "m", files | damaged, right))
    for text in ("[]", "1", "null", '{"weight_map": {"a": "x", "a": "y"}}', "[" * 10**6):
        (tmp_path / "m" / INDEX).write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json(: | is )"):
            open_folder(tmp_path / "m")
    with open(tmp_path / "m" / INDEX, "wb") as stream:
        stream.truncate(HEADER_LIMIT + 1)
    with pytest.raises(CheckpointError, match=r"index\.json has 100000001 bytes"):
        open_folder(tmp_path / "m")


def test_header_size_limit_matches_format(tmp_path):
    path = lay(tmp_path, struct.pack("<Q", HEADER_LIMIT + 1) + b"{") / SINGLE
    with open(path, "r+b") as stream:
        stream.truncate(HEADER_LIMIT + 9)
    with pytest.raises(
        CheckpointError, match="header has 100000001 bytes: must have at most 100000000"
    ):
        open_folder(tmp_path)
    assert path.unlink() is None
    with pytest.raises(
        safetensors.SafetensorError, match=r"[Hh]eader"
    ):  # the library rejects it, too
        path.write_bytes(struct.pack("<Q", HEADER_LIMIT + 1) + b"{")
        safetensors.safe_open(path, "numpy")


@pytest.mark.slow
def test_index_and_header_for_235b_model_are_parsed(tmp_path):
    """The names of Qwen3-235B-A22B in an index, and those of 48 layers in one file."""
    layers = [
        f"model.layers.{i}.mlp.experts.{e}.{name}_proj.weight"
        for i in range(94) for e in range(128) for name in ("gate", "up", "down")
    ]  # fmt: skip
    others = [f"model.layers.{i}.self_attn.{n}.weight" for i in range(94) for n in range(9)]
    names = [*layers, *others, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert len(names) == 36_945
    held = {name: entry("BF16", [1, 1], 2 * i, 2 * i + 2) for i, name in enumerate(names)}
    file = "model-00001-of-00118.safetensors"
    content = {file: raw(held, bytes(2 * len(names)))}
    folder = sharded(tmp_path / "m", content, dict.fromkeys(names, file))
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    assert (folder / INDEX).stat().st_size > 2**21 < len(content[file])
    assert list(open_folder(folder).tensors) == names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "must be an object"),
        (b"3", "must be an object"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b'{"a": 1} {}', "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        ('{"a": 1}'.encode("utf-16"), "not JSON"),
        (b'{"a": NaN}', "'NaN' is not a finite number"),
        (b'{"a": [-Infinity]}', "'-Infinity' is not a finite number"),
        (b'{"a": 1e400}', "'1e400' is not a finite number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": 1, "b": 2, "a": 1}', "'a' appears twice"),
        (b'{"a": {"b": 2, "b": 1}}', "'b' appears twice"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nested more than 64 levels deep"),
        (b'{"a": "\\"' + b"[" * 64 + b'", "b": ' + b"[" * 64, "nested more than 64 levels deep"),
        (b"[" * 10**6, "nested more than 64 levels deep"),
        (b'{"a":' * 10**5, "nested more than 64 levels deep"),
        (b'{"a": [' + b"0," * 2**17 + b"0]}", "more than 131072 values"),
        (b'{"a": "' + b"\\" * CONFIG_LIMIT, "has 8388615 bytes: must have at most 8388608"),
        (b'{"a": "' + b'\\"' * 500_000, "not JSON"),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_hostile_config_is_rejected(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=rf"config\.json.* {re.escape(message)}") as caught:
        open_folder(lay(tmp_path, GOOD, content))
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_two_gigabyte_config_is_rejected_without_reading(tmp_path):
    lay(tmp_path, GOOD)
    with open(tmp_path / CONFIG, "wb") as stream:
        stream.truncate(2**31)
    with pytest.raises(CheckpointError, match=r"config\.json has 2147483648 bytes"):
        open_folder(tmp_path)


def test_config_with_12007_class_names_is_loaded(tmp_path):
    names = [f"number {i} of the goods and services of a long catalogue" for i in range(12_007)]
    config = {"id2label": {str(i): name for i, name in enumerate(names)}}
    config["label2id"] = {name: i for i, name in enumerate(names)}
    assert open_folder(lay(tmp_path, GOOD, json.dumps(config).encode())).config == config


def test_brackets_in_json_strings_do_not_count_as_nesting(tmp_path):
    config = {"template": '\\"[{' * 100 + "\\", "deep": json.loads("[" * 63 + "]" * 63)}
    assert open_folder(lay(tmp_path, GOOD, json.dumps(config).encode())).config == config


def test_error_names_missing_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="'no such/place/here': must be an existing folder"):
        open_folder("no such/place/here")
    for path in (tmp_path / "nowhere", Path("org/name")):
        with pytest.raises(CheckpointError, match="the folder does not exist"):
            open_folder(path)
    for name in ("", "a/b/c", "../a", "~/a", "a b", "a/", "/a/b", "a\0", "a" * 999):
        with pytest.raises(CheckpointError, match="must be an existing folder or a repository ID"):
            open_folder(name)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_folder(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        open_folder(tmp_path)
    lay(tmp_path, GOOD).joinpath(SINGLE).unlink()
    with pytest.raises(CheckpointError, match=f"there is no {SINGLE} and no {INDEX}$"):
        open_folder(tmp_path)
    with pytest.raises(CheckpointError, match="revision='main' requires a repository ID"):
        open_folder(tmp_path, revision="main")


def test_adapter_folder_error_names_base_model(tmp_path):
    for base, part in (("org/base", ", 'org/base',"), (None, "")):
        content = json.dumps({"peft_type": "LORA", "base_model_name_or_path": base})
        (tmp_path / "adapter_config.json").write_text(content)
        rule = f"not a model; load its base model{part} and then load_lora\\(path, params, names\\)"
        for load in (open_folder, load_model, load_sentence_encoder):
            with pytest.raises(CheckpointError, match=rule):
                load(tmp_path)


def test_repository_is_downloaded_without_pickles(tmp_path, monkeypatch):
    requests = []

    def download(repository, *, revision, allow_patterns):
        requests.append((repository, revision))
        names = {
            "config.json": True, SINGLE: True, INDEX: True, "tokenizer.json": True,
            "1_Pooling/config.json": True, "vocab.txt": True, "merges.txt": True,
            "chat_template.jinja": True, "model-00001-of-00002.safetensors": True,
            "pytorch_model.bin": False, "tf_model.h5": False, "flax_model.msgpack": False,
            "consolidated.safetensors": False, "modeling_x.py": False, "onnx/model.onnx": False,
            "onnx/model.safetensors": False,
        }  # fmt: skip
        kept = huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns)
        assert set(kept) == {name for name, wanted in names.items() if wanted}
        return str(lay(tmp_path / "m", GOOD))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_folder("gpt2").path == tmp_path / "m"
    assert open_folder("org/name-1.0", revision="v2").read("a").tobytes() == EIGHT
    assert requests == [("gpt2", None), ("org/name-1.0", "v2")]

    def fails(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network,\nand no such snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(CheckpointError, match=r"'gpt2': .* no network, and no such snapshot"):
        open_folder("gpt2")


def cached(root: Path, content: bytes = GOOD) -> Path:
    """Create a repository in the layout of the hub's cache: links in a snapshot to blobs."""
    repository = root / "models--org--name"
    snapshot = repository / "snapshots" / ("c" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c" * 40)
    for name, data in ((CONFIG, b"{}"), (SINGLE, content)):
        (repository / "blobs" / f"blob-{name}").write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
    return snapshot


def test_cached_snapshot_may_link_only_to_own_blobs(tmp_path):
    snapshot = cached(tmp_path)
    assert open_folder(snapshot).read("a").tobytes() == EIGHT
    repository = snapshot.parents[1]
    for target in (repository / "refs" / "main", lay(tmp_path / "outside", GOOD) / SINGLE):
        (snapshot / SINGLE).unlink()
        (snapshot / SINGLE).symlink_to(target)
        with pytest.raises(CheckpointError, match="a link that leaves"):
            open_folder(snapshot)
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(f"../../blobs/{SINGLE}")
    (repository / "blobs" / SINGLE).symlink_to(tmp_path / "outside" / SINGLE)
    with pytest.raises(CheckpointError, match="a link that leaves"):
        open_folder(snapshot)
    shutil.rmtree(repository / "blobs")
    (repository / "blobs").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="a link that leaves"):
        open_folder(snapshot)
    plain = cached(tmp_path / "again").parents[1].rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a link that leaves"):
        open_folder(plain / "snapshots" / ("c" * 40))
    with pytest.raises(CheckpointError, match="which would be lost"):
        write_folder(plain / "snapshots" / ("c" * 40), {}, [])


@pytest.mark.slow
def test_cached_model_is_loaded_without_network(tmp_path):
    cached(tmp_path)
    code = (
        "from transformer_jax.pretrained.safetensors_folder import open_folder\n"
        "print(open_folder('org/name').read('a').tobytes().hex())\n"
        "try: open_folder('org/other')\n"
        "except ValueError as error: print(type(error).__name__, error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, second = out.stdout.splitlines()
    assert first == EIGHT.hex()
    rule = "it is not in the hub's cache, and HF_HUB_OFFLINE forbids a download"
    assert second == f"CheckpointError 'org/other': no such folder, and {rule}"


def test_unreachable_hub_raises_one_line_error(monkeypatch):
    def unreachable(*arguments, **keywords):
        try:
            try:
                raise socket.gaierror(-2, "Name or service not known")
            except OSError as error:
                raise RuntimeError("[Errno -2] Name or service not known") from error
        except RuntimeError as error:
            raise FileNotFoundError("Got: ConnectError. " + "An error " * 50) from error

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    rule = r"the hub could not be reached \(Name or service not known\)"
    with pytest.raises(CheckpointError, match=rf"^'gpt2': no such folder, and {rule}$"):
        open_folder("gpt2")


def test_missing_package_error_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"huggingface_hub: run pip install huggingface_hub$"):
        open_folder("gpt2")
    monkeypatch.setattr(safetensors, "__version__", "0.7.1rc0")
    with pytest.raises(CheckpointError, match=r"0\.7\.1rc0: must be 0\.8 or later"):
        open_folder(lay(tmp_path, GOOD))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=r"safetensors: run pip install safetensors$"):
        open_folder(lay(tmp_path, GOOD))


@pytest.mark.slow
def test_importing_library_loads_neither_package():
    code = (
        "import sys, transformer_jax.pretrained.safetensors_folder\n"
        "print([m for m in ('safetensors', 'huggingface_hub') if m in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
