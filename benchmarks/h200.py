"""Compile for an H200 that is not there.

Needs `pip install "jax[cuda13]==0.11.2"`, and for machine code nvdisasm on the path or beside ptxas
(`pip install nvidia-cuda-nvdisasm`). `device` leaves JAX the CPU alone.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core as mosaic

from transformer_jax.kernels import hopper
from transformer_jax.kernels.contract import Blocks, Operands, Problem, Saved, TileLists
from transformer_jax.kernels.hopper import repair
from transformer_jax.training.hardware import H200

KIND = "NVIDIA H200"
SHARED_MEMORY = 232448  # bytes that a block may ask for
B, T = 2, 2048
HEADS = 4, 2  # N, K
FEW = 4  # queries of "decode"
WITHOUT_SAVED = ("forward", "decode")
KERNELS = {  # each alone, without the second kernel that computes marked rows again
    "forward": repair.marking_forward,
    "decode": hopper.decode,
    "dq": repair.marking_dq,
    "dkdv": repair.marking_dkdv,
    "bias": hopper.backward_bias,
    "single_pass": repair.marking_single_pass,
}
BY_KEY = ("dkdv", "single_pass")  # whose lists have a row for each tile of keys


def device() -> Any:
    """The device, for which programs are compiled and on which none runs."""
    jax.config.update("jax_platforms", "cpu")
    return topologies.get_topology_desc(
        "", platform="cuda", target_config=H200, topology="1x1x1"
    ).devices[0]


def context() -> AbstractContextManager:
    """A context in which Pallas knows the chip."""
    chip = jax.sharding.AbstractDevice(device_kind=KIND, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(
            (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=chip
        )
    )


@dataclass(frozen=True)
class Compiled:
    """Hold what ptxas reports for a kernel."""

    registers: int  # a thread, at launch
    spills: tuple[int, int]  # bytes stored and loaded
    memory: int  # bytes of shared memory, as Mosaic lays it out
    notes: tuple[str, ...]
    seconds: float
    code: str  # the listing of nvdisasm among other output; none unless asked for


def structs(
    problem: Problem,
    kind: str,
    H: int,
    Hv: int,
    sharding: Any,
    vectors: int,
    heads: tuple[int, int],
    plan: Blocks,
    **options: Any,
) -> tuple:
    """Shapes of a kernel's arguments after the problem.

    A mask reads `vectors` of queries and as many of keys; `options` are fields of Operands.
    """
    N, K = heads
    queries = FEW if kind == "decode" else T

    def struct(shape: tuple, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    if kind == "bias":
        options = {"bias": ((1, N, T, T), jnp.bfloat16)} | options
    rows_of = (1, *(B,) * (vectors - 1))
    if kind == "decode":
        pairs = options.keys() & {"bias", "pairs"}
        options |= {name: (_of_few(options[name][0]), options[name][1]) for name in pairs}
    arrays = {
        "query": ((B, queries, N, H), jnp.bfloat16),
        "key": ((B, T, K, H), jnp.bfloat16),
        "value": ((B, T, K, Hv), jnp.bfloat16),
    }
    operands = Operands(
        q_vectors=tuple(struct((b, queries), jnp.int32) for b in rows_of),
        k_vectors=tuple(struct((b, T), jnp.int32) for b in rows_of),
        **{name: struct(*array) for name, array in (arrays | options).items()},
    )
    rows, columns = -(-queries // plan.q), T // plan.k
    if kind in BY_KEY:
        rows, columns = columns, rows
    count = struct((1, 1, rows), jnp.int32)
    lists = TileLists(struct((1, 1, rows, columns), jnp.int32), count, count)
    vector = struct((B, N, T), jnp.float32)
    saved = Saved(struct((B, T, N, Hv), jnp.bfloat16), vector, vector, vector)
    return (operands, lists, plan) if kind in WITHOUT_SAVED else (operands, lists, plan, saved)


def _of_few(shape: tuple) -> tuple:
    return (*shape[:2], min(shape[2], FEW), shape[3])


def compile_kernel(
    kind: str,
    H: int,
    Hv: int,
    problem: Problem,
    device: Any,
    *,
    vectors: int = 1,
    heads: tuple[int, int] = HEADS,
    code: bool = False,
    function: Callable[..., Any] | None = None,
    plan: Blocks | None = None,
    chip: Callable[[], AbstractContextManager] = context,
    **options: Any,
) -> Compiled:
    """Compile one kernel; `code` asks for its machine code too.

    Another backend gives its `function`, its tile sizes as `plan` and the context of its `chip`.
    """
    function = function or KERNELS[kind]
    sharding = jax.sharding.SingleDeviceSharding(device)
    plan = plan or hopper.blocks(kind, H, Hv)
    operands, lists, plan, *saved = structs(
        problem, kind, H, Hv, sharding, vectors, heads, plan, **options
    )
    sizes: list[int] = []
    size_of = mosaic._smem_tree_size

    def measured(buffers: Any) -> int:  # of shared memory, all that Mosaic lays out
        sizes.append(size_of(buffers))
        return sizes[-1]

    wanted = {"MOSAIC_GPU_DUMP_PTXAS": "1"} | ({"MOSAIC_GPU_DUMP_SASS": "1"} if code else {})
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile() as log,
        mock.patch.dict(os.environ, wanted),
        mock.patch.object(mosaic, "_smem_tree_size", measured),
        chip(),
    ):
        kept = [os.dup(stream) for stream in (1, 2)]  # the report is printed from C++
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
    [registers] = re.findall(r"Used (\d+) registers", report)
    [spills] = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads\n", report)[-1:]
    return Compiled(
        registers=int(registers),
        spills=(int(spills[0]), int(spills[1])),
        memory=max(sizes),
        notes=tuple(sorted(set(re.findall(r"\(C\d+\)", report)))),
        seconds=time.perf_counter() - start,
        code=report if code else "",
    )
