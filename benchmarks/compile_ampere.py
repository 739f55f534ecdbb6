"""Compile the kernels for other NVIDIA GPUs than Hopper, none of which is there, and print sizes.

    python -m benchmarks.compile_ampere 8.0            # every head dim, full and causal
    python -m benchmarks.compile_ampere 12.0 --options # with bias, softcap, dropout, ...
    python -m benchmarks.compile_ampere 8.9 --head-dims 64 128 --only forward decode
    python -m benchmarks.compile_ampere 8.0 --step     # what a step of decoding over a cache takes

Needs `pip install "jax[cuda13]==0.11.2"` and no GPU. The first argument is the compute capability;
one a process, as Mosaic GPU keeps the first one that it compiles for. Spills are bytes stored and
loaded. Exits with 1 if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from benchmarks import decode_step, h200
from benchmarks.compile_gpu import causal, in_matrix
from benchmarks.h200 import HEADS, B, T
from transformer_jax.kernels import Target, ampere, using
from transformer_jax.kernels.contract import Problem
from transformer_jax.training.hardware import H200

N, K = HEADS
KERNELS: dict[str, Callable[..., Any]] = {  # each alone, without the loop that runs it again
    "forward": ampere.marking_forward,
    "decode": ampere.decode,
    "dq": ampere.marking_dq,
    "dkdv": ampere.marking_dkdv,
    "bias": ampere.sum_bias,
}
CAPABILITIES = ("8.0", "8.6", "8.9", "10.0", "10.3", "12.0", "12.1")


class Chip(jax.sharding.AbstractDevice):
    """Say which GPU Pallas lowers for."""

    compute_capability: str


def device(capability: str) -> Any:
    """The device, for which programs are compiled and on which none runs."""
    jax.config.update("jax_platforms", "cpu")
    major, minor = capability.split(".")
    chip = f"major: {major} minor: {minor}"
    if int(major) >= 9:  # Mosaic GPU writes for sm_120a, which ptxas must know
        chip += " feature_extension: ACCELERATED_FEATURES"
    described = H200.replace("major: 9 minor: 0", chip)
    assert described != H200
    return topologies.get_topology_desc(
        "", platform="cuda", target_config=described, topology="1x1x1"
    ).devices[0]


def context(capability: str) -> AbstractContextManager:
    """A context in which Pallas knows the compute capability."""
    chip = Chip(device_kind=f"compute capability {capability}", num_cores=None, platform="gpu")
    object.__setattr__(chip, "compute_capability", capability)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(
            (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=chip
        )
    )


def configurations(
    options: bool, head_dims: Sequence[int], kinds: Sequence[str]
) -> Iterator[tuple[str, str, int, Problem, dict[str, Any]]]:
    """Yield a name, kernel, head dim, problem and fields of Operands."""
    if not options:
        for H in head_dims:
            for kind in kinds:
                for name, visible in (("full", None), ("causal", causal)):
                    yield name, kind, H, Problem(H**-0.5, visible=visible), {}
        return
    scores: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "bias": ({}, {"bias": ((B, N, T, T), jnp.bfloat16)}),
        "key bias": ({}, {"bias": ((1, N, 1, T), jnp.float32)}),
        "slopes": ({}, {"slopes": ((1, N), jnp.float32)}),
        "softcap": ({"softcap": 30.0}, {}),
        "sinks": ({}, {"sinks": ((1, N), jnp.float32)}),
        "dropout": ({"dropout_rate": 0.1}, {"dropout": ((2, B, N), jnp.uint32)}),
        "matrix": ({"visible": in_matrix}, {"pairs": ((1, 1, T, T), jnp.int8)}),
    }
    for name, (fields, operands) in scores.items():
        for H in head_dims:
            for kind in kinds:
                if kind == "decode" and name == "dropout":
                    continue
                yield name, kind, H, Problem(H**-0.5, **({"visible": causal} | fields)), operands
    scale = ((B, T, K), jnp.float32)
    for H in head_dims if "decode" in kinds else ():
        held = ((B, T, K, H), jnp.int8)
        problem = Problem(H**-0.5, visible=causal)
        yield "pages", "decode", H, problem, {"pages": ((B, 2), jnp.int32)}
        int8 = dict(key=held, value=held, k_scale=scale, v_scale=scale)
        yield "int8", "decode", H, problem, int8


def print_steps(capability: str) -> None:
    """Print what steps of decoding take beside a cache, and what they make that is as large."""
    place = jax.sharding.SingleDeviceSharding(device(capability))
    print("cache                      its bytes   temporaries   as large as keys or values")
    for name, dtype, capacity, page in (
        ("bfloat16", jnp.bfloat16, decode_step.S, None),
        ("bfloat16, 24 slots fewer", jnp.bfloat16, decode_step.S - 24, None),
        ("int8", jnp.int8, decode_step.S, None),
        ("bfloat16, pages of 64", jnp.bfloat16, decode_step.S, 64),
        ("int8, pages of 256", jnp.int8, decode_step.S, 256),
    ):
        with using(Target("ampere")), context(capability):
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
        assert memory.alias_size_in_bytes >= held  # written in place
        sizes = f"{held / 1e6:9.0f} MB {memory.temp_size_in_bytes / 1e6:10.1f} MB"
        print(f"{name:24} {sizes}   {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capability", choices=CAPABILITIES)
    parser.add_argument("--options", action="store_true", help="with bias, softcap, ...")
    parser.add_argument("--step", action="store_true", help="steps of decoding over a cache")
    parser.add_argument("--only", choices=KERNELS, nargs="+", default=list(KERNELS))
    parser.add_argument("--head-dims", type=int, nargs="+", help="these alone")
    arguments = parser.parse_args()
    if arguments.step:
        print_steps(arguments.capability)
        return
    dims = arguments.head_dims or ((64, 128) if arguments.options else ampere.HEAD_DIMS)
    where, failures = device(arguments.capability), 0
    chip = functools.partial(context, arguments.capability)
    print("kernel      H  tile   scores    registers   spills   shared memory")
    for name, kind, H, problem, options in configurations(arguments.options, dims, arguments.only):
        plan = ampere.blocks(kind, H, H)
        print(f"{kind:8} {H:4}  {plan.q}x{plan.k}  {name:8}", end="", flush=True)
        try:
            found = h200.compile_kernel(
                kind, H, H, problem, where, function=KERNELS[kind], plan=plan, chip=chip, **options
            )
        except Exception as error:
            failures += 1
            print(" ", str(error).splitlines()[0][:120], flush=True)
            continue
        spills = "{:4} {:4}".format(*found.spills)
        print(f"{found.registers:>10}   {spills}   {found.memory / 1024:6.1f} KiB", flush=True)
    if failures:
        sys.exit(f"{failures} kernels did not compile")


if __name__ == "__main__":
    main()
