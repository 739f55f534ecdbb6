"""Compile attention with split lengths for TPUs that are not attached: memory and bytes.

    python -m benchmarks.long_rows                              # v5e and v6e, 8k to 64k tokens
    python -m benchmarks.long_rows --target tpu-v6e-8 --lengths 8192 --devices 4
    python -m benchmarks.long_rows --json benchmarks/results/long_rows.jsonl

This command needs `pip install libtpu`, but no TPU. It compiles the gradient of causal attention in
zigzag order, in bfloat16, in a ring and by all-to-all. It prints the bytes of temporary arrays on a
device, and the bytes that a device sends in all collectives of the program, on average.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax import Causal, dot_product_attention
from transformer_jax.attention import api, ring, zigzag_positions
from transformer_jax.training.planning.hardware import find_hardware

SIZES = dict(bf16=2, f32=4, s32=4, u32=4, pred=1)


def compiled(
    target: str, devices: int, length: int, way: str, implementation: str, heads: tuple[int, int]
) -> dict[str, object]:
    """Return the bytes of temporary arrays and of transfers of one program."""
    hardware = find_hardware(target)
    axes = (jax.sharding.AxisType.Explicit,)
    mesh = Mesh(np.array(hardware.devices()[:devices]), ("context",), axis_types=axes)
    split = NamedSharding(mesh, PartitionSpec(None, "context"))
    shape = lambda n: jax.ShapeDtypeStruct((1, length, n, 128), jnp.bfloat16, sharding=split)  # noqa: E731
    at = zigzag_positions(length, devices)

    def loss(*inputs: jax.Array) -> jax.Array:
        out = dot_product_attention(
            *inputs, mask=Causal(), q_positions=at, k_positions=at, implementation=implementation
        )
        return (out.astype(jnp.float32) ** 2).sum()

    def ways(call: api.AttentionCall) -> object:
        found = ring.split_lengths(call)
        assert isinstance(found, list)
        return [one for one in found if bool(one.repeats) == (way == "all-to-all")]

    N, K = heads
    with hardware.lowering(), mock.patch.object(api, "split_lengths", ways):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape(N), shape(K), shape(K)).compile()
    return dict(
        target=target, devices=devices, length=length, way=way, implementation=implementation,
        heads=heads, temporary=int(program.memory_analysis().temp_size_in_bytes),
        sent=sent(program.as_text(), devices),
        jax=jax.__version__,
    )  # fmt: skip


def sent(text: str, devices: int) -> dict[str, int]:
    """Return the bytes that a device sends on average, keyed by collective."""
    found: dict[str, int] = {}
    kinds = "collective-permute|all-to-all|all-gather|all-reduce"
    for result, kind, start, rest in re.findall(rf"= (.*?) ({kinds})(-start)?\((.*)", text):
        sizes = [
            SIZES[dtype] * math.prod(map(int, filter(None, shape.split(","))))
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result)
        ]
        size = sizes[1] if start else sum(sizes)  # a start returns its operand, its result, ..
        if kind == "collective-permute":
            pairs = re.findall(r"\{\d+,\d+\}", rest.partition("source_target_pairs=")[2])
            size = size * len(pairs) // devices
        elif kind != "all-reduce":
            size = size * (devices - 1) // devices
        found[kind] = found.get(kind, 0) + size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", default=["tpu-v5e-8", "tpu-v6e-8"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384, 32768, 65536])
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--heads", nargs=2, type=int, default=[8, 8], help="query and key heads")
    parser.add_argument("--implementations", nargs="+", default=["pallas", "blockwise"])
    parser.add_argument("--json", type=Path, help="append one line for each program")
    args = parser.parse_args()
    cases = itertools.product(
        args.implementations, args.target, args.lengths, args.devices, ("ring", "all-to-all")
    )
    for implementation, target, length, devices, way in cases:
        found = compiled(target, devices, length, way, implementation, tuple(args.heads))
        line = json.dumps(found)
        print(line, flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
