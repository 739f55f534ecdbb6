"""Checkpoints of several devices and processes, restored on other numbers of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.devices import ROOT, on_devices
from transformer_jax.checkpoints.checkpoint import Saver, restore, verify

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathlib import Path
from transformer_jax.checkpoints.checkpoint import restore, save, step_path, verify

def values():
    rng = np.random.default_rng(0)
    return {
        "params": {
            "w": rng.standard_normal((16, 6)).astype(np.float32),
            "h": jnp.asarray(rng.standard_normal((8, 5)), jnp.bfloat16),
            "none": np.zeros((0, 8), np.float32),
        },
        "opt_state": {"mu": rng.standard_normal((16, 6)).astype(np.float32)},
        "step": np.int32(7),
    }

SPECS = {
    "params": {"w": P("x"), "h": P("x"), "none": P()}, "opt_state": {"mu": P("x")}, "step": P(),
}

def placed():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return jax.tree.map(
        lambda value, spec: jax.make_array_from_callback(
            np.shape(value), NamedSharding(mesh, spec), lambda i, v=value: np.asarray(v)[i]
        ),
        values(), SPECS,
    )

def like():
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), placed()
    )

def same(found):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(placed()), strict=True)
    for a, b in pairs:
        assert a.sharding == b.sharding and a.dtype == b.dtype
        for one, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()

folder, task, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if len(sys.argv) > 4:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[4]}", 2, int(sys.argv[5]))
assert jax.device_count() == count
if task == "save":
    save(folder, 7, placed())
verify(step_path(folder, 7))
same(restore(step_path(folder, 7), like()))
same_params = restore(step_path(folder, 7), {"params": like()["params"]})
assert list(same_params) == ["params"]
print(json.dumps(len(jax.tree.leaves(same_params))))
"""


@pytest.mark.slow
def test_checkpoint_is_restored_on_different_device_counts(tmp_path):
    assert on_devices(8, "-c", PROGRAM, str(tmp_path), "save", "8") == 3
    for count in (1, 2):
        assert on_devices(count, "-c", PROGRAM, str(tmp_path), "restore", str(count)) == 3
    assert on_devices(2, "-c", PROGRAM, str(tmp_path / "two"), "save", "2") == 3
    assert on_devices(8, "-c", PROGRAM, str(tmp_path / "two"), "restore", "8") == 3


@pytest.mark.long
def test_single_process_restores_checkpoint_saved_by_two(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), "save", "2", port, str(process)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )
        for process in range(2)
    ]  # fmt: skip
    try:
        ends = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
    for process, (out, err) in zip(both, ends, strict=True):
        assert process.returncode == 0, err
        assert json.loads(out) == 3
    (saved,) = Path(tmp_path).iterdir()
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= {p.name for p in (saved / "params").iterdir()}
    assert on_devices(1, "-c", PROGRAM, str(tmp_path), "restore", "1") == 3


def test_save_is_exact_even_if_state_is_donated_afterward(tmp_path):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: -x - 1, tree), donate_argnums=0)
    tree = {"params": {f"w{n}": jnp.full((257, 129), n, jnp.float32) for n in range(9)}}
    expected = jax.tree.map(np.array, tree)
    with Saver(tmp_path) as saver:
        path = saver.save(3, tree)
        for _ in range(5):
            before, tree = tree, step(tree)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    verify(path)
    found = restore(path, expected)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), found, expected))


def test_background_save_error_is_raised_once_by_next_call(tmp_path):
    def refuse(step, arrays):
        if step == 2:
            raise RuntimeError(f"step {step}: {sorted(arrays)}")

    tree = {"params": {"w": np.ones(3)}}
    with Saver(tmp_path, keep=1, check=refuse) as saver:
        first = saver.save(1, tree)
        saver.save(2, tree)
        with pytest.raises(RuntimeError, match=r"step 2: \['params/w'\]"):
            saver.save(3, tree)
        saver.wait()
        assert [p.name for p in tmp_path.iterdir()] == [first.name]
        last = saver.save(4, tree)
    assert [p.name for p in tmp_path.iterdir()] == [last.name]
    with pytest.raises(RuntimeError), Saver(tmp_path, check=refuse) as saver:
        saver.save(2, tree)
