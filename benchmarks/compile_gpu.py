"""Compile the kernels for an NVIDIA GPU that is not attached, and print registers and spills.

    python -m benchmarks.compile_gpu                # for Hopper, such as an H200
    python -m benchmarks.compile_gpu 8.0            # for Ampere, or another compute capability
    python -m benchmarks.compile_gpu --options      # with bias, softcap, many vectors, and so on
    python -m benchmarks.compile_gpu 8.9 --head-dims 64 192:128 --only forward decode
    python -m benchmarks.compile_gpu 8.0 --step     # memory of a decoding step over a cache

This command needs `pip install "jax[cuda13]==0.11.2"`, but no GPU. Each process compiles for one
capability, because Mosaic GPU keeps the first one. The number of registers is per thread at launch.
After launch, a Hopper consumer increases its number to 240, and the producer decreases its number
to 24. Spills are the numbers of bytes stored and loaded. A note such as (C7513) at the end of a
line is a report by ptxas that the kernel waits for each product immediately. The exit status is 1
if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from benchmarks import decode_step
from transformer_jax.kernels import Target, ampere, hopper, using
from transformer_jax.kernels.contract import Blocks, Operands, Problem, Residuals, TileLists
from transformer_jax.kernels.program import Program, combined, program_of
from transformer_jax.training.planning.hardware import H200

HOPPER = "9.0"
CAPABILITIES = ("8.0", "8.6", "8.9", HOPPER, "10.0", "10.3", "12.0", "12.1")
B, T, N, K = 2, 2048, 4, 2
FEW = 4  # number of queries of "decode"
HOPPER_DIMS = (
    *((H, H) for H in (32, 64, 80, 96, 112, 128, 160, 192, 256)),
    *((80, 112), (192, 128), (256, 192), (240, 208)),
)
KERNELS: dict[Any, dict[str, Callable[..., Any]]] = {
    hopper: {
        "forward": hopper.forward,
        "decode": hopper.decode,
        "dq": hopper.backward_dq,
        "dkdv": hopper.backward_dkdv,
        "bias": hopper.backward_bias,
        "single_pass": hopper.backward_single_pass,
    },
    ampere: {
        "forward": ampere.forward,
        "decode": ampere.decode,
        "dq": ampere.backward_dq,
        "dkdv": ampere.backward_dkdv,
        "bias": ampere.backward_bias,
    },
}


causal = program_of(lambda q, k: (k[0] >= 0) & (q[0] >= k[0]), 1, 1)
seven = causal
"""Mask with seven query vectors and seven key vectors, which is more than are copied with a
tile."""
for i in range(1, 7):
    seven = seven & combined("eq", Program((), ("q", i)), Program((), ("k", i)))
in_matrix = causal & Program((), ("pair", 0))
"""Dense mask combined with causal masks."""


# The device


class Chip(jax.sharding.AbstractDevice):
    """Target GPU of Pallas."""

    compute_capability: str


def device(capability: str = HOPPER) -> Any:
    """Return the target device of compiled programs. JAX itself sees only the CPU."""
    jax.config.update("jax_platforms", "cpu")
    described = H200
    if capability != HOPPER:
        major, minor = capability.split(".")
        chip = f"major: {major} minor: {minor}"
        if int(major) > 9:  # Mosaic GPU targets sm_120a, which ptxas must support
            chip += " feature_extension: ACCELERATED_FEATURES"
        described = H200.replace("major: 9 minor: 0", chip)
        assert described != H200
    return topologies.get_topology_desc(
        "", platform="cuda", target_config=described, topology="1x1x1"
    ).devices[0]


def context(capability: str = HOPPER) -> AbstractContextManager:
    """Return a context in which Pallas compiles for the chip."""
    kind = "NVIDIA H200" if capability == HOPPER else f"compute capability {capability}"
    chip = Chip(device_kind=kind, num_cores=None, platform="gpu")
    object.__setattr__(chip, "compute_capability", capability)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(
            (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=chip
        )
    )


def backend_of(capability: str) -> Any:
    return hopper if capability == HOPPER else ampere


# One kernel


class Compiled(NamedTuple):
    """Report by ptxas about a kernel."""

    registers: int  # per thread, at launch
    spills: tuple[int, int]  # number of bytes stored and loaded
    notes: tuple[str, ...]


def compile_one(
    kind: str, H: int, Hv: int, problem: Problem, capability: str = HOPPER, **arrays: Any
) -> Compiled:
    """Compile a kernel. `arrays` contains fields of Operands as (shape, dtype)."""
    backend = backend_of(capability)
    plan, function = backend.blocks(kind, H, Hv), KERNELS[backend][kind]
    operands, lists, *saved = structs(kind, H, Hv, problem, plan, device(capability), arrays)
    traced = jax.jit(lambda o, t, *s: function(problem, o, t, plan, *s))
    with (
        tempfile.TemporaryFile() as log,
        mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTXAS": "1"}),
        context(capability),
    ):
        kept = [os.dup(stream) for stream in (1, 2)]  # the report is printed by C++
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        try:
            traced.lower(operands, lists, *saved).compile()
        finally:
            for stream, original in zip((1, 2), kept, strict=True):
                os.dup2(original, stream)
                os.close(original)
        log.seek(0)
        report = log.read().decode()
    [registers] = re.findall(r"Used (\d+) registers", report)
    [(stored, loaded)] = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads\n", report)[
        -1:
    ]
    notes = tuple(sorted(set(re.findall(r"\(C\d+\)", report))))
    return Compiled(int(registers), (int(stored), int(loaded)), notes)


def structs(
    kind: str, H: int, Hv: int, problem: Problem, plan: Blocks, device: Any, arrays: dict[str, Any]
) -> tuple:
    """Return the shapes of a kernel's arguments after the problem, without the tile sizes."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    queries = FEW if kind == "decode" else T

    def struct(shape: tuple, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    if kind == "bias":
        arrays = {"bias": ((1, N, T, T), jnp.bfloat16)} | arrays
    for name in arrays.keys() & {"bias", "pairs"}:
        (b, n, t, s), dtype = arrays[name]
        arrays |= {name: ((b, n, min(t, queries), s), dtype)}
    given = {
        "query": ((B, queries, N, H), jnp.bfloat16),
        "key": ((B, T, K, H), jnp.bfloat16),
        "value": ((B, T, K, Hv), jnp.bfloat16),
    } | arrays
    batches = (1, *(B,) * 6) if problem.visible is seven else (1,)
    operands = Operands(
        q_vectors=tuple(struct((b, queries), jnp.int32) for b in batches),
        k_vectors=tuple(struct((b, T), jnp.int32) for b in batches),
        **{name: struct(*array) for name, array in given.items()},
    )
    rows, columns = -(-queries // plan.q), T // plan.k
    if kind in ("dkdv", "single_pass"):
        rows, columns = columns, rows
    count = struct((1, 1, rows), jnp.int32)
    lists = TileLists(struct((1, 1, rows, columns), jnp.int32), count, count, rows=count)
    if kind in ("forward", "decode"):
        return operands, lists
    vector = struct((B, N, T), jnp.float32)
    return operands, lists, Residuals(struct((B, T, N, Hv), jnp.bfloat16), vector, vector, vector)


# Many kernels


def configurations(
    options: bool, dims: list[tuple[int, int]], kinds: list[str]
) -> Iterator[tuple[str, str, int, int, Problem, dict[str, Any]]]:
    """Yield a name, a kernel, H, Hv, a problem, and the fields of Operands."""
    slopes = {"slopes": ((1, N), jnp.float32)}
    masked, scale = {"visible": causal}, ((B, T, K), jnp.float32)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "bias": (masked, {"bias": ((B, N, T, T), jnp.bfloat16)}),
        "key bias": (masked, {"bias": ((1, N, 1, T), jnp.float32)}),
        "slopes": (masked, slopes),
        "fixed": (masked | {"fixed_slopes": True}, slopes),
        "softcap": (masked | {"softcap": 30.0}, {}),
        "sinks": (masked, {"sinks": ((1, N), jnp.float32)}),
        "dropout": (masked | {"dropout_rate": 0.1}, {"dropout": ((2, B, N), jnp.uint32)}),
        "matrix": ({"visible": in_matrix}, {"pairs": ((1, 1, T, T), jnp.int8)}),
        "7 vectors": ({"visible": seven}, {}),
        "pages": (masked, {"pages": ((B, 2), jnp.int32)}),
        "int8": (masked, {"k_scale": scale, "v_scale": scale}),
    }
    if not options:
        cases = {"full": ({}, {}), "causal": (masked, {})}
    for H, Hv in dims:
        for kind in kinds:
            for name, (fields, arrays) in cases.items():
                few = kind == "decode"
                if (name == "dropout" and few) or (name in ("pages", "int8") and not few):
                    continue
                if kind == "single_pass" and H + Hv > 256:
                    continue
                held = {}
                if name == "int8":
                    held = {"key": ((B, T, K, H), jnp.int8), "value": ((B, T, K, Hv), jnp.int8)}
                yield name, kind, H, Hv, Problem(H**-0.5, **fields), arrays | held


def print_steps(capability: str) -> None:
    """Print the memory of decoding steps without the cache, and results as large as the cache."""
    place = jax.sharding.SingleDeviceSharding(device(capability))
    target = Target("hopper", chip="NVIDIA H200") if capability == HOPPER else Target("ampere")
    print("cache                      its bytes   temporaries   as large as keys or values")
    for name, dtype, capacity, page in (
        ("bfloat16", jnp.bfloat16, decode_step.S, None),
        ("bfloat16, 24 slots fewer", jnp.bfloat16, decode_step.S - 24, None),
        ("int8", jnp.int8, decode_step.S, None),
        ("bfloat16, pages of 64", jnp.bfloat16, decode_step.S, 64),
        ("int8, pages of 256", jnp.int8, decode_step.S, 256),
    ):
        with using(target), context(capability):
            if page is None:
                step = decode_step.lowered(place, capacity, dtype=dtype)
                numbers = decode_step.B * capacity * decode_step.K * decode_step.H
            else:
                step, numbers = decode_step.lowered_over_pages(place, page, dtype)
            compiled = step.compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert "attention_decode" in text
        counts = Counter(kind for kind, _ in decode_step.large_results(text, numbers))
        found = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
        held = 2 * numbers * jnp.dtype(dtype).itemsize
        assert memory.alias_size_in_bytes >= held  # updated in place
        sizes = f"{held / 1e6:9.0f} MB {memory.temp_size_in_bytes / 1e6:10.1f} MB"
        print(f"{name:24} {sizes}   {found}", flush=True)


def _widths(text: str) -> tuple[int, int]:
    H, _, Hv = text.partition(":")
    return int(H), int(Hv or H)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capability", choices=CAPABILITIES, nargs="?", default=HOPPER)
    parser.add_argument("--options", action="store_true", help="with bias, softcap, ...")
    parser.add_argument("--step", action="store_true", help="steps of decoding over a cache")
    parser.add_argument("--only", choices=KERNELS[hopper], nargs="+", help="these kernels")
    parser.add_argument("--head-dims", type=_widths, nargs="+", help="these alone: H, or H:Hv")
    given = parser.parse_args()
    if given.step:
        print_steps(given.capability)
        return
    backend, failures = backend_of(given.capability), 0
    every = HOPPER_DIMS if backend is hopper else [(H, H) for H in ampere.HEAD_DIMS]
    dims = given.head_dims or ([(64, 64), (128, 128)] if given.options else list(every))
    kinds = [kind for kind in KERNELS[backend] if kind in (given.only or KERNELS[backend])]
    print("kernel         H   Hv  tile    scores    registers  spills")
    for name, kind, H, Hv, problem, arrays in configurations(given.options, dims, kinds):
        plan = backend.blocks(kind, H, Hv)
        print(f"{kind:11} {H:4} {Hv:4}  {plan.q:3}x{plan.k:<3} {name:9}", end="", flush=True)
        try:
            found = compile_one(kind, H, Hv, problem, given.capability, **arrays)
        except Exception as error:
            failures += 1
            print(" ", str(error).splitlines()[0][:120], flush=True)
            continue
        stored, loaded = found.spills
        print(f"{found.registers:>10} {stored:>5} {loaded:>4}", *found.notes, flush=True)
    if failures:
        sys.exit(f"{failures} kernels did not compile")


if __name__ == "__main__":
    main()
