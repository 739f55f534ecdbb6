"""Checkpoints: exact restore, detection of damage, and atomic saves."""

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import threading
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.support.killed import Killed, killed_after
from tests.support.saved import arrays_of, largest_file
from transformer_jax.checkpoints import checkpoint, orbax_arrays
from transformer_jax.checkpoints.checkpoint import (
    CheckpointError,
    Saver,
    best_step,
    prune,
    read_manifest,
    remove_partial,
    restore,
    save,
    saved_steps,
    step_path,
    verify,
)
from transformer_jax.durable_files import write_file

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def tree(rng) -> dict:
    """One leaf of every kind, including NaN, infinities and negative zero."""
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.0], np.float32)
    return {
        "params": {
            "block_0": {"kernel": rng.standard_normal((5, 3)).astype(np.float32), "odd": odd},
            "half": rng.standard_normal(7).astype(np.float16),
            "brain": rng.standard_normal((2, 3)).astype(ml_dtypes.bfloat16),
            "empty": np.zeros((0, 3), np.float32),
        },
        "opt_state": [
            {"mu": rng.standard_normal((5, 3)).astype(np.float32)},
            (np.array(7, np.int32), np.array([True, False, True])),
            {f"i{n}": np.array([-1], f"int{n}") for n in (8, 16, 32, 64)},
            {f"u{n}": np.array([255], f"uint{n}") for n in (8, 16, 32, 64)},
            np.array([1 / 3], np.float64),
        ],
        "scalar": np.float32(1 / 3),
        "count": 3,
        "flag": True,
        "rate": 0.1,
    }


def zeros(tree) -> dict:
    return jax.tree.map(lambda x: np.zeros_like(x) if hasattr(x, "dtype") else type(x)(), tree)


def bits(tree) -> list:
    return [
        (np.asarray(leaf).dtype, np.shape(leaf), np.asarray(leaf).tobytes())
        for leaf in jax.tree.leaves(tree)
    ]


def test_every_leaf_type_is_restored_exactly(tmp_path, tree):
    path = save(tmp_path, 7, tree, {"val_loss": 1.5, "note": "é"})
    again = restore(path, tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert len(bits(tree)) == 21
    assert bits(again) == bits(tree)
    assert [type(a) for a in jax.tree.leaves(again)] == [type(a) for a in jax.tree.leaves(tree)]
    assert read_manifest(path).metadata == {"val_loss": 1.5, "note": "é"}


def test_checkpoint_folder_may_be_relative_path(tmp_path, tree, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = checkpoint.save(Path("run"), 5, tree)
    assert not path.is_absolute()
    chex.assert_trees_all_equal(checkpoint.restore(path, tree), tree)


def test_checkpoint_folder_may_be_string(tmp_path, tree):
    path = save(str(tmp_path / "run"), 7, tree)
    assert path == step_path(str(tmp_path / "run"), 7) == tmp_path / "run" / "step-00000007"
    assert bits(restore(str(path), tree)) == bits(tree)
    assert saved_steps(str(tmp_path / "run")) == [7] and verify(str(path)).path == path


def test_orbax_can_restore_saved_arrays(tmp_path, tree):
    found = arrays_of(save(tmp_path, 7, tree))
    assert (
        found["params:params.block_0.odd"].tobytes() == tree["params"]["block_0"]["odd"].tobytes()
    )
    assert len(found) == 20  # all but the empty one


def test_jax_arrays_are_restored_exactly_and_can_be_donated(tmp_path, rng):
    tree = {
        "params": {"w": jnp.asarray(rng.standard_normal((17, 64)), jnp.float32)},
        "b": jnp.asarray(rng.standard_normal(5), jnp.bfloat16),
        "n": jnp.zeros((), jnp.int32),
        "e": jnp.zeros((3, 0), jnp.float32),
    }
    again = restore(save(tmp_path, 0, tree), jax.eval_shape(lambda: tree))
    assert bits(again) == bits(tree)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(again))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(again))
    old = again["params"]["w"]
    jax.jit(lambda w: w + 1, donate_argnums=0)(old)
    assert old.is_deleted()


def test_arrays_with_sharding_are_read_to_their_devices(tmp_path):
    path = save(tmp_path, 3, {"host": np.arange(7.0), "device": jnp.arange(5.0)})
    (folder,) = (file for file in path.iterdir() if file.is_dir())
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found = orbax_arrays.read(folder, {
        "host": jax.ShapeDtypeStruct((7,), np.float64),
        "device": jax.ShapeDtypeStruct((5,), np.float32, sharding=place),
    })  # fmt: skip
    assert isinstance(found["host"], np.ndarray) and isinstance(found["device"], jax.Array)
    assert found["device"].sharding == place
    assert found["host"].tolist() == [*range(7)] and found["device"].tolist() == [*range(5)]


def test_save_captures_values_at_call_time(tmp_path, monkeypatch):
    """Even if the caller overwrites or donates them before they are written."""
    begin, write = threading.Event(), Saver._write

    def late(self, *arguments):
        assert begin.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(Saver, "_write", late)
    tree = {"host": np.arange(7.0), "device": jnp.arange(5.0)}
    expected = bits(tree)
    with Saver(tmp_path) as saver:
        path = saver.save(3, tree)
        tree["host"][:] = -1
        jax.jit(lambda x: -x, donate_argnums=0)(tree["device"])
        begin.set()
    assert tree["device"].is_deleted()
    like = {"host": np.zeros(7), "device": jax.ShapeDtypeStruct((5,), jnp.float32)}
    assert bits(restore(path, like)) == expected


def test_metadata_that_is_no_json_is_rejected_at_once(tmp_path):
    with (
        Saver(tmp_path) as saver,
        pytest.raises(ValueError, match="Out of range float values are not JSON compliant"),
    ):
        saver.save(1, {}, {"val_loss": float("nan")})


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_prng_keys_are_restored(tmp_path, implementation):
    tree = {
        "one": jax.random.key(5, impl=implementation),
        "many": {"keys": jax.random.split(jax.random.key(6, impl=implementation), (2, 3))},
    }
    again = restore(save(tmp_path, 3, tree), jax.eval_shape(lambda: tree))
    assert again["one"].dtype == tree["one"].dtype
    chex.assert_trees_all_equal(again, tree)
    drawn = jax.random.normal(again["one"], (7,))
    assert drawn.tolist() == jax.random.normal(tree["one"], (7,)).tolist()


def test_prng_key_with_different_implementation_is_rejected(tmp_path):
    path = save(tmp_path, 3, {"key": jax.random.key(5, impl="rbg")})
    with pytest.raises(CheckpointError, match="key is key<rbg>"):
        restore(path, jax.eval_shape(lambda: {"key": jax.random.key(5)}))
    with pytest.raises(CheckpointError, match="key is key<rbg>"):
        restore(path, {"key": np.zeros(4, np.uint32)})


def test_single_group_can_be_restored_alone(tmp_path, tree):
    path = save(tmp_path, 7, tree)
    shutil.rmtree(path / "opt_state")
    again = restore(path, {"params": tree["params"]})
    assert bits(again) == bits({"params": tree["params"]})
    with pytest.raises(CheckpointError, match=r"opt_state/\S+ cannot be read"):
        restore(path, tree)


def test_error_lists_mismatched_leaves(tmp_path):
    path = save(tmp_path, 7, {"params": {"a": np.zeros(3, np.float32), "b": np.zeros(2)}})
    like = {"params": {"a": np.zeros((3, 1), np.float32), "c": np.zeros(2)}}
    with pytest.raises(CheckpointError) as caught:
        restore(path, like)
    for part in ("params/c is missing", "params/b is unexpected", "float32[3], not float32[3, 1]"):
        assert part in str(caught.value)
    with pytest.raises(CheckpointError, match=r"float64\[2\], not float32\[2\]"):
        restore(path, {"params": {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}})


def test_float64_without_x64_is_rejected(tmp_path):
    path = save(tmp_path, 7, {"a": np.zeros(3)})
    with pytest.raises(CheckpointError, match="float64 needs jax_enable_x64"):
        restore(path, {"a": jax.ShapeDtypeStruct((3,), np.float64)})


@pytest.mark.parametrize(
    "tree", [{"a/b": np.zeros(1)}, {"..": np.zeros(1)}, {"": np.zeros(1)}, {"a b": np.zeros(1)}]
)
def test_unsafe_leaf_names_are_rejected(tmp_path, tree):
    if "a/b" in tree:
        tree["a"] = {"b": np.zeros(1)}
    with pytest.raises(ValueError, match=r"leaf name|two leaves"):
        save(tmp_path, 1, tree)
    assert not list(tmp_path.iterdir())


def test_arbitrary_python_objects_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="a: dtype object cannot be saved"):
        save(tmp_path, 1, {"a": np.array([None])})
    assert not list(tmp_path.iterdir())


def damaged_files(path: Path) -> tuple[Path, ...]:
    """Return a file of arrays, two of orbax's metadata, and the manifest."""
    return (
        largest_file(path, "params"),
        path / "opt_state" / "manifest.ocdbt",
        path / "state" / "_METADATA",
        path / "manifest.json",
    )


def mutations(path: Path, other: Path, rng: np.random.Generator):
    """Yield 60 ways to damage a checkpoint: a name and a function."""

    def flip(file, _):
        content = bytearray(file.read_bytes())
        bit = int(rng.integers(8 * len(content)))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)

    def cut(file, _):
        os.truncate(file, int(rng.integers(file.stat().st_size)))

    def extend(file, _):
        with open(file, "ab") as stream:
            stream.write(rng.bytes(int(rng.integers(1, 9))))

    def zero(file, _):
        file.write_bytes(bytes(file.stat().st_size))

    def swap(file, foreign):
        shutil.copy(foreign, file)

    def link(file, _):
        file.rename(path.parent / "elsewhere")
        file.symlink_to(path.parent / "elsewhere")

    def pipe(file, _):
        file.unlink()
        os.mkfifo(file)

    def remove(file, _):
        file.unlink()

    changes = (*[flip] * 7, cut, cut, extend, zero, remove, swap, link, pipe)
    for file, foreign in zip(damaged_files(path), damaged_files(other), strict=True):
        for change in changes:
            yield (
                f"{change.__name__} {file}",
                lambda change=change, file=file, foreign=foreign: change(file, foreign),
            )


@pytest.mark.slow
def test_checkpoint_corruption_is_detected(tmp_path, tree, rng):
    more = {"opt_state": [*tree["opt_state"], 1.0], "more": 1}
    other = save(tmp_path / "other", 8, zeros(tree | more))
    pristine = save(tmp_path / "pristine", 7, tree)
    path, seen = tmp_path / "damaged" / pristine.name, 0
    shutil.copytree(pristine, path)
    for what, damage in mutations(path, other, rng):
        shutil.rmtree(path.parent)
        shutil.copytree(pristine, path)
        verify(path)
        damage()
        with pytest.raises(CheckpointError) as caught:
            verify(path)
            pytest.fail(f"not detected: {what}")
        assert what.split()[-1] in str(caught.value), what
        with pytest.raises(CheckpointError):
            restore(path, tree)
            pytest.fail(f"restored: {what}")
        seen += 1
    assert seen == 60


def test_checkpoint_with_wrong_step_in_name_is_rejected(tmp_path, tree):
    path = save(tmp_path, 7, tree)
    path.rename(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match="contains step 7, but the folder is step-00000009"):
        verify(tmp_path / "step-00000009")


@pytest.mark.slow
def test_extra_file_in_checkpoint_is_detected(tmp_path, tree):
    for where in (".", "params", "params/d"):
        path = save(tmp_path, 7, tree)
        verify(path)
        (path / where / "more.bin").write_bytes(b"1")
        with pytest.raises(CheckpointError, match=r"more\.bin is not part of this checkpoint"):
            verify(path)


def sealed(content: dict) -> str:
    """Return a manifest with a correct checksum, as an attacker would write it."""
    content = {k: v for k, v in content.items() if k != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content | {"sha256": digest}, sort_keys=True, indent=1) + "\n"


HOSTILE = {
    "a huge shape": lambda c: c["leaves"].append(["params/x", "float32", [2**40, 2**40]]),
    "a huge size": lambda c: next(iter(c["files"].values())).update(bytes=2**62),
    "a negative shape": lambda c: c["leaves"][0].__setitem__(2, [-1]),
    "a boolean shape": lambda c: c["leaves"][0].__setitem__(2, [True]),
    "an unknown dtype": lambda c: c["leaves"][0].__setitem__(1, "object"),
    "a path out": lambda c: c["leaves"].append(["../../etc/passwd", "int8", [0]]),
    "a path out of a file": lambda c: c["files"].update({"../x": {"bytes": 0, "sha256": ""}}),
    "a null in a name": lambda c: c["leaves"].append(["a\0/b", "int8", [0]]),
    "a format that is a list": lambda c: c.update(format=[2]),
    "a folder that no leaf is in": lambda c: c["files"].update({"x/y": {"bytes": 0, "sha256": ""}}),
    "a step that is none": lambda c: c.update(step="../../x"),
    "files that are a list": lambda c: c.update(files=[]),
    "leaves that are a number": lambda c: c.update(leaves=3),
    "no keys": lambda c: c.pop("keys"),
    "a key that is none": lambda c: c.update(keys={"scalar": "threefry2x32"}),
    "an unknown kind of key": lambda c: c.update(keys={"scalar": "rot13"}),
}


@pytest.mark.slow_except("a format that is a list", "a negative shape", "a path out")
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_manifest_is_rejected_before_allocation(tmp_path, tree, what):
    path = save(tmp_path, 7, tree)
    content = json.loads((path / "manifest.json").read_text())
    HOSTILE[what](content)
    (path / "manifest.json").write_text(sealed(content))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        restore(path, tree)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.parametrize("written", [1, 3])
def test_checkpoint_with_unknown_format_version_is_rejected(tmp_path, tree, written):
    path = save(tmp_path, 7, tree)
    content = json.loads((path / "manifest.json").read_text())
    content["format"] = written
    content["files"] = {"params.bin": {"bytes": 4, "sha256": ""}}  # the file names of format 1
    (path / "manifest.json").write_text(sealed(content))
    for read in (verify, lambda path: restore(path, tree)):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        message = f"{path}/manifest.json: format is {written}, but this version reads only format 2"
        assert str(caught.value) == message


def test_test_manifest_writer_matches_library_format(tmp_path, tree):
    path = save(tmp_path, 7, tree)
    text = (path / "manifest.json").read_text()
    assert sealed(json.loads(text)) == text


@pytest.mark.slow_except("\\xff", "null", "{}")
@pytest.mark.parametrize("text", ["", "[" * 100_000, "null", "3", "{}", '{"a": 1', "\xff"])
def test_invalid_manifest_is_rejected(tmp_path, tree, text):
    path = save(tmp_path, 7, tree)
    (path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        verify(path)


def test_oversized_manifest_is_not_read(tmp_path, tree):
    path = save(tmp_path, 7, tree)
    os.truncate(path / "manifest.json", 2**33)
    with pytest.raises(CheckpointError, match="must have at most 67108864"):
        verify(path)


def digest(path: Path) -> dict[str, str]:
    files = (p for p in path.rglob("*") if p.is_file())
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "layers=[1,2]"])
def test_full_disk_preserves_last_checkpoint(tmp_path, tree, name):
    folder = tmp_path / name
    path = save(folder, 7, tree)
    before = digest(path)
    big = {**tree, "params": {"w": np.ones(40960, np.float32)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for step in (8, 7):
            with pytest.raises(
                OSError, match=rf"too large: '{re.escape(str(folder))}/step-.*/params/"
            ):
                save(folder, step, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in folder.iterdir()] == [path.name]
    assert digest(path) == before
    verify(path)


def test_checkpoints_in_read_only_folder_are_preserved(tmp_path, tree, monkeypatch):
    path = save(tmp_path, 7, tree)
    before, make = digest(path), Path.mkdir

    def refuse(self, *args, **kwargs):
        if ".tmp" in str(self):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        make(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        with pytest.raises(OSError, match=r"Read-only file system: '.*step-00000008"):
            save(tmp_path, 8, tree)
    assert digest(path) == before
    verify(path)
    save(tmp_path, 8, tree)  # the folder is writable again
    assert checkpoint.saved_steps(tmp_path) == [7, 8]


def test_array_shared_by_two_leaves_is_restored_separately(tmp_path, rng):
    shared = jnp.array(rng.normal(size=(3, 4)), jnp.float32)
    tree = {"params": {"embed": shared, "head": shared}}
    found = checkpoint.restore(save(tmp_path, 1, tree), tree)
    chex.assert_trees_all_equal(found, tree)
    jax.jit(lambda x: x + 1, donate_argnums=0)(
        found["params"]["embed"]
    )  # the two do not share a buffer
    np.testing.assert_array_equal(found["params"]["head"], shared)


SLOW = [pytest.param(part, marks=pytest.mark.long) for part in range(1, 8)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("part", [0, *SLOW])
def test_killing_process_during_save_leaves_only_complete_checkpoints(tmp_path, part):
    """Each part kills the process at 8 of 64 calls that change the disk or are an fsync."""
    older = {"params": {"a": np.arange(5.0)}, "step": 3}
    newer = zeros(older)
    save(tmp_path / "start", 7, older)

    def work(folder):
        save(folder, 7, newer)
        save(folder, 8, newer)
        prune(folder, 1)

    shutil.copytree(tmp_path / "start", tmp_path / "all")
    with killed_after(10**6) as left:
        work(tmp_path / "all")
    calls = 10**6 - left()
    assert calls > 40
    kills = 0
    for fatal in sorted({(8 * k + part) * calls // 64 for k in range(8)}):
        folder = tmp_path / f"run{fatal}"
        shutil.copytree(tmp_path / "start", folder)
        with pytest.raises((Killed, OSError)), killed_after(fatal):
            work(folder)
        for step in saved_steps(folder):
            found = restore(step_path(folder, step), older)
            assert bits(found) in (bits(older), bits(newer)), f"killed in call {fatal}"
        remove_partial(folder)
        assert not list(folder.glob("*.tmp"))
        kills += 1
    assert kills == 8
    assert saved_steps(tmp_path / "all") == [8]


def test_all_files_are_synced_before_the_rename(tmp_path, tree, monkeypatch):
    done = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle):
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(
        Path, "rename", lambda path, new: done.append("rename") or rename(path, new)
    )
    save(tmp_path, 7, tree)
    files = {p.name for p in (tmp_path / "step-00000007").rglob("*")}
    assert len(files) > 20
    assert done[-3:] == ["step-00000007.tmp", "rename", tmp_path.name]
    assert files <= set(done[:-3])
    assert done.index("manifest.json") > done.index("_METADATA")


def test_save_replaces_damaged_checkpoint(tmp_path, tree):
    path = save(tmp_path, 7, tree)
    largest_file(path, "params").write_bytes(b"")
    save(tmp_path, 7, tree)
    verify(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_damaged_checkpoint_is_never_selected_as_best(tmp_path):
    for step, loss in enumerate([2.0, 1.0], 1):
        save(tmp_path, step, {"a": np.zeros(1)}, {"val_loss": loss})
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    assert best_step(tmp_path) == 1
    assert best_step(tmp_path / "nothing") is None


def test_small_file_is_replaced_atomically(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    write_file(file, "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_file(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


ODD_NAMES = [
    "layers=[1,2]", "a(*b?c", "{x,y}", "100%", "a#b", " two  words ", "-dash", "~", "gs:", "a:b",
    "line\nend", "n\u0303\u00f1", "$HOME", "'\"`\\", b"caf\xe9".decode("utf-8", "surrogateescape"),
]  # fmt: skip


@pytest.mark.slow_except("-dash", "a(*b?c", "a:b", "~")
@pytest.mark.parametrize("name", ODD_NAMES)
def test_checkpoint_folder_may_have_any_name(tmp_path, name):
    tree = {"params": {"w": np.arange(7.0)}, "step": 3}
    folder = tmp_path / name / "inner"
    found = restore(save(folder, 3, tree), tree)
    chex.assert_trees_all_equal(found, tree)
    assert [path.name for path in (tmp_path / name / "inner").iterdir()] == ["step-00000003"]
    os.rename(os.fsencode(tmp_path / name), os.fsencode(tmp_path / "plain"))
    arrays = arrays_of(tmp_path / "plain" / "inner" / "step-00000003")
    np.testing.assert_array_equal(arrays["params:params.w"], tree["params"]["w"])


@pytest.mark.slow_except("plain")
@pytest.mark.parametrize("name", ["plain", "layers=[1,2]"])
def test_older_checkpoints_are_kept_if_saved_data_fails_verification(tmp_path, monkeypatch, name):
    older = {"params": {"w": np.arange(311.0)}, "state": {"k": np.arange(5)}}
    newer = {"params": {"w": np.arange(311.0) + 1.5}, "state": {"k": np.arange(5)}}
    finish = orbax_arrays.finish

    def finish_damaged(folder):
        finish(folder)
        if folder.name == "params":
            files = folder.rglob("d/*")
            file = max(files, key=lambda path: path.stat().st_size)
            content, value = file.read_bytes(), np.float64(17 + 1.5).tobytes()
            assert content.count(value) == 1
            file.write_bytes(content.replace(value, np.float64(18).tobytes()))

    folder = tmp_path / name
    with checkpoint.Saver(folder, keep=1) as saver:
        saver.save(1, older)
        saver.wait()
        monkeypatch.setattr(orbax_arrays, "finish", finish_damaged)
        path = saver.save(2, newer)
        with pytest.raises(CheckpointError) as caught:
            saver.wait()
        assert str(caught.value) == (
            f"{path}: params/w reads back differently, so "
            "this save is discarded; older checkpoints are kept"
        )
        assert [entry.name for entry in folder.iterdir()] == ["step-00000001"]
        chex.assert_trees_all_equal(restore(step_path(folder, 1), older), older)
        monkeypatch.undo()
        saver.save(2, newer)
    assert saved_steps(folder) == [2]
    chex.assert_trees_all_equal(restore(step_path(folder, 2), newer), newer)


@pytest.mark.slow_except("EINVAL", "ENOTSUP")
@pytest.mark.parametrize("code", ["EINVAL", "ENOTSUP", "ENOSYS", "EOPNOTSUPP"])
def test_checkpoints_do_not_require_directory_sync(tmp_path, monkeypatch, code):
    fsync = os.fsync

    def synced(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    tree = {"params": {"w": np.arange(7.0)}}
    chex.assert_trees_all_equal(restore(save(tmp_path, 3, tree), tree), tree)
    write_file(tmp_path / "small", "text")
    assert (tmp_path / "small").read_text() == "text"
    monkeypatch.setattr(os, "fsync", lambda handle: fsync(10**6))
    with pytest.raises(OSError, match="small"):  # other errors of fsync are raised
        write_file(tmp_path / "small", "other")
    assert (tmp_path / "small").read_text() == "text"


@pytest.mark.slow
def test_changing_working_directory_does_not_affect_pending_save(tmp_path, monkeypatch):
    tree = {"params": {"w": np.arange(7.0)}}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with checkpoint.Saver(Path("run")) as saver:
        monkeypatch.chdir(tmp_path / "elsewhere")
        saver.save(3, tree)
    assert saved_steps(tmp_path / "run") == [3]
