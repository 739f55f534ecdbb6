"""Compile the Hopper kernels for an H200 that is not there, and print what they take.

    python -m benchmarks.compile_gpu            # equal head dims, 192 with 128, 256 with 192
    python -m benchmarks.compile_gpu --all      # all 36 pairs
    python -m benchmarks.compile_gpu --options  # with bias, softcap, a mask of many vectors, ...

Needs `pip install "jax[cuda13]==0.11.2"` and no GPU. Registers are per thread at launch; a consumer
raises its share to 240 of them and the producer drops to 24. Spills are bytes stored and loaded.
A note such as (C7513) at the end of a line is ptxas saying that it waits for each product at once.
Exits with 1 if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core as mosaic

from transformer_jax.kernels import hopper
from transformer_jax.kernels.contract import Operands, Problem, Saved, TileLists

# An H200 SXM as XLA wants a target described (GpuTargetConfigProto, text format)
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""
LIMIT = 232448  # bytes of shared memory a block may ask for
B, T, N, K = 2, 2048, 4, 2
KINDS = ("forward", "dq", "dkdv", "bias", "single_pass")
BY_KEY = ("dkdv", "single_pass")  # whose lists have a row for each tile of keys


def causal(q: tuple, k: tuple) -> jax.Array:
    return (k[0] >= 0) & (q[0] >= k[0])


def seven(q: tuple, k: tuple) -> jax.Array:
    """A mask of seven vectors for queries and seven for keys, more than are copied with a tile."""
    seen = causal(q, k)
    for i in range(1, 7):
        seen = seen & (q[i] == k[i])
    return seen


def in_matrix(q: tuple, k: tuple) -> jax.Array:
    """A Dense mask among causal ones."""
    return causal(q, k) & ((k[-1] & 1) != 0)


def structs(problem: Problem, kind: str, H: int, Hv: int, sharding: Any, **options: Any) -> tuple:
    """Shapes of a kernel's arguments after the problem; `options` are fields of Operands."""
    plan = hopper.blocks(kind, H, Hv)

    def struct(shape: tuple, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    if kind == "bias":
        options = {"bias": ((1, N, T, T), jnp.bfloat16)} | options
    if problem.visible is seven:
        positions = (struct((1, T), jnp.int32), *(struct((B, T), jnp.int32),) * 6)
    else:
        positions = (struct((1, T), jnp.int32),)
    operands = Operands(
        query=struct((B, T, N, H), jnp.bfloat16),
        key=struct((B, T, K, H), jnp.bfloat16),
        value=struct((B, T, K, Hv), jnp.bfloat16),
        q_vectors=positions,
        k_vectors=positions,
        **{name: struct(*option) for name, option in options.items()},
    )
    rows, columns = T // plan.q, T // plan.k
    if kind in BY_KEY:
        rows, columns = columns, rows
    count = struct((1, 1, rows), jnp.int32)
    lists = TileLists(struct((1, 1, rows, columns), jnp.int32), count, count)
    vector = struct((B, N, T), jnp.float32)
    saved = Saved(struct((B, T, N, Hv), jnp.bfloat16), vector, vector, vector)
    return (operands, lists, plan) if kind == "forward" else (operands, lists, plan, saved)


def compile_one(kind: str, H: int, Hv: int, problem: Problem, device: Any, **options: Any) -> str:
    """One row of the table."""
    function = getattr(hopper, kind if kind == "forward" else f"backward_{kind}")
    sharding = jax.sharding.SingleDeviceSharding(device)
    operands, lists, plan, *saved = structs(problem, kind, H, Hv, sharding, **options)
    chip = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=chip
    )
    sizes: list[int] = []
    size_of = mosaic._smem_tree_size

    def measured(buffers: Any) -> int:  # of shared memory, all that Mosaic lays out
        sizes.append(size_of(buffers))
        return sizes[-1]

    start = time.perf_counter()
    with (
        tempfile.TemporaryFile() as log,
        mock.patch.object(mosaic, "_smem_tree_size", measured),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        kept = [os.dup(stream) for stream in (1, 2)]  # ptxas's report is printed from C++
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        try:
            traced = jax.jit(lambda o, t, *s: function(problem, o, t, plan, *s))
            traced.lower(operands, lists, *saved).compile()
        finally:
            for stream, original in zip((1, 2), kept, strict=True):
                os.dup2(original, stream)
                os.close(original)
        log.seek(0)
        report = log.read().decode()
        memory = max(sizes)
    [registers] = re.findall(r"Used (\d+) registers", report)
    [spills] = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads\n", report)[-1:]
    notes = set(re.findall(r"\(C\d+\)", report))
    return (
        f"{registers:>9}  {spills[0]:>4} {spills[1]:>4}  {memory / 1024:6.1f} of"
        f" {LIMIT // 1024} KiB  {time.perf_counter() - start:4.1f} s  {' '.join(notes)}"
    )


def kernels(H: int, Hv: int) -> tuple[str, ...]:
    """Those that these widths have."""
    return tuple(kind for kind in KINDS if kind != "single_pass" or H + Hv <= 256)


def configurations(arguments: argparse.Namespace):
    """(name, kind, H, Hv, problem, fields of Operands)"""
    dims = hopper.HEAD_DIMS
    if arguments.options:
        scores = {
            "bias": ({}, {"bias": ((B, N, T, T), jnp.bfloat16)}),
            "key bias": ({}, {"bias": ((1, N, 1, T), jnp.float32)}),
            "slopes": ({}, {"slopes": ((1, N), jnp.float32)}),
            "fixed": ({"fixed_slopes": True}, {"slopes": ((1, N), jnp.float32)}),
            "softcap": ({"softcap": 30.0}, {}),
            "sinks": ({}, {"sinks": ((1, N), jnp.float32)}),
            "dropout": ({"dropout_rate": 0.1}, {"dropout": ((2, B, N), jnp.uint32)}),
        }
        for name, (fields, options) in scores.items():
            for H in (64, 128):
                for kind in KINDS:
                    yield name, kind, H, H, Problem(H**-0.5, visible=causal, **fields), options
        matrix = {"pairs": ((1, 1, T, T), jnp.int8)}
        for H in dims:
            for kind in kernels(H, H):
                yield "matrix", kind, H, H, Problem(H**-0.5, visible=in_matrix), matrix
        for H in dims:
            for kind in kernels(H, H):
                yield "7 vectors", kind, H, H, Problem(H**-0.5, visible=seven), {}
        return
    pairs = [(H, H) for H in dims] + [(192, 128), (256, 192)]
    if arguments.all:
        pairs = [(H, Hv) for H in dims for Hv in dims]
    for H, Hv in pairs:
        for kind in kernels(H, Hv):
            for name, visible in (("full", None), ("causal", causal)):
                yield name, kind, H, Hv, Problem(H**-0.5, visible=visible), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all pairs of head dims")
    parser.add_argument("--options", action="store_true", help="with bias, softcap, ...")
    arguments = parser.parse_args()
    device = topologies.get_topology_desc(
        "", platform="cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    print("kernel         H   Hv  tile    scores    registers  spills     shared memory    time")
    failures = 0
    for name, kind, H, Hv, problem, options in configurations(arguments):
        plan = hopper.blocks(kind, H, Hv)
        print(f"{kind:11} {H:4} {Hv:4}  {plan.q:3}x{plan.k:<3} {name:9}", end="", flush=True)
        try:
            print(compile_one(kind, H, Hv, problem, device, **options), flush=True)
        except Exception as error:
            failures += 1
            print(" ", str(error).splitlines()[0][:120], flush=True)
    if failures:
        sys.exit(f"{failures} kernels did not compile")


if __name__ == "__main__":
    main()
