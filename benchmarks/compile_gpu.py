"""Compile the Hopper kernels for an H200 that is not there, and print what they take.

    python -m benchmarks.compile_gpu            # 9 equal head dims, and 4 pairs of unlike ones
    python -m benchmarks.compile_gpu --all      # all pairs of multiples of 16
    python -m benchmarks.compile_gpu --options  # with bias, softcap, a mask of many vectors, ...
    python -m benchmarks.compile_gpu --only decode  # one kernel

Needs `pip install "jax[cuda13]==0.11.2"` and no GPU. Registers are per thread at launch; a consumer
raises its share to 240 of them and the producer drops to 24. Spills are bytes stored and loaded.
A note such as (C7513) at the end of a line is ptxas saying that it waits for each product at once.
Exits with 1 if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import h200
from benchmarks.h200 import HEADS, SHARED_MEMORY, B, T
from transformer_jax.kernels import hopper
from transformer_jax.kernels.chips import HOPPER_UNLIKE_HEAD_DIMS as UNLIKE_HEAD_DIMS
from transformer_jax.kernels.contract import Problem

N = HEADS[0]
DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
UNLIKE = ((80, 112), (192, 128), (256, 192), (240, 208))
OPTION_DIMS = (32, 64, 96, 128, 192, 256)
KINDS = ("forward", "decode", "dq", "dkdv", "bias", "single_pass")


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


def compile_one(kind: str, H: int, Hv: int, problem: Problem, device: Any, **options: Any) -> str:
    """One row of the table."""
    vectors = 7 if problem.visible is seven else 1
    found = h200.compile_kernel(kind, H, Hv, problem, device, vectors=vectors, **options)
    return (
        f"{found.registers:>9}  {found.spills[0]:>4} {found.spills[1]:>4}"
        f"  {found.memory / 1024:6.1f} of {SHARED_MEMORY // 1024} KiB"
        f"  {found.seconds:4.1f} s  {' '.join(found.notes)}"
    )


def kernels(H: int, Hv: int) -> tuple[str, ...]:
    """Those that these widths have."""
    return tuple(kind for kind in KINDS if kind != "single_pass" or H + Hv <= 256)


def _takes(kind: str, fields: dict[str, Any]) -> bool:
    return kind != "decode" or "dropout_rate" not in fields


def configurations(arguments: argparse.Namespace):
    """(name, kind, H, Hv, problem, fields of Operands)"""
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
                for kind in (kind for kind in KINDS if _takes(kind, fields)):
                    yield name, kind, H, H, Problem(H**-0.5, visible=causal, **fields), options
        matrix = {"pairs": ((1, 1, T, T), jnp.int8)}
        for H in OPTION_DIMS:
            for kind in kernels(H, H):
                yield "matrix", kind, H, H, Problem(H**-0.5, visible=in_matrix), matrix
        for H in OPTION_DIMS:
            for kind in kernels(H, H):
                yield "7 vectors", kind, H, H, Problem(H**-0.5, visible=seven), {}
        return
    pairs = [*((H, H) for H in DIMS), *UNLIKE]
    if arguments.all:
        every = [(H, Hv) for H in hopper.HEAD_DIMS for Hv in hopper.HEAD_DIMS]
        pairs = [(H, Hv) for H, Hv in every if H == Hv or H + Hv <= UNLIKE_HEAD_DIMS]
    for H, Hv in pairs:
        for kind in kernels(H, Hv):
            for name, visible in (("full", None), ("causal", causal)):
                yield name, kind, H, Hv, Problem(H**-0.5, visible=visible), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all pairs of head dims")
    parser.add_argument("--options", action="store_true", help="with bias, softcap, ...")
    parser.add_argument("--only", choices=KINDS, help="one kernel")
    arguments = parser.parse_args()
    device = h200.device()
    print("kernel         H   Hv  tile    scores    registers  spills     shared memory    time")
    failures = 0
    for name, kind, H, Hv, problem, options in configurations(arguments):
        if arguments.only not in (None, kind):
            continue
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
