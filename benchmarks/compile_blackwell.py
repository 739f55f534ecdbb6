"""Compile the kernels for datacentre Blackwell without such a GPU, and print what a tile costs.

    python -m benchmarks.compile_blackwell             # every head dim, full and causal
    python -m benchmarks.compile_blackwell --options   # with bias, softcap, dropout, ...
    python -m benchmarks.compile_blackwell --capability 10.3 --head-dims 128

Needs `pip install "jax[cuda13]==0.11.2"`, nvdisasm, and no GPU. Spills are bytes stored and loaded.
Cycles are of one multiprocessor (SM) for one tile of all consumers, a full one and a partial one:

    tensor    2 M N K of every product / 8192    2.25 PFLOP/s / 148 SMs / 1.85 GHz
    shared    bytes / 128                        factors of products that lie there, and copies
    special   8 of a MUFU                        16 results a cycle and SM: exp2, rsqrt, tanh
    issue     1 of any instruction of a warp     one a cycle and quarter of an SM, with a rescaling

2.25 PFLOP/s is of the B200's data sheet, 16 results a cycle of the CUDA C++ Programming Guide
(arithmetic instructions, compute capability 10.0), the others are assumptions. Each consumer has
one warp in every quarter. Exits with 1 if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks import compile_ampere, h200, sass
from transformer_jax.kernels import blackwell
from transformer_jax.kernels.blackwell.backward import CONSUMERS, WIDEST
from transformer_jax.kernels.contract import Blocks

KERNELS: dict[str, Callable[..., Any]] = {  # each alone, without the loop that runs it again
    "forward": blackwell.marking_forward,
    "dq": blackwell.marking_dq,
    "dkdv": blackwell.marking_dkdv,
}
TENSOR_FLOPS = 8192  # of an SM in a cycle, dense bfloat16
SHARED_BYTES = 128  # between shared memory and the rest of an SM in a cycle
SPECIAL_CYCLES = 8  # that a MUFU of a warp keeps its quarter's unit


def tensor_cycles(kind: str, plan: Blocks, H: int, Hv: int) -> float:
    """Return what the products of a tile take: 2 forward, 3 for dq, 4 for dk and dv."""
    widths = {"forward": H + Hv, "dq": 2 * H + Hv, "dkdv": 2 * (H + Hv)}[kind]
    return 2 * plan.q * plan.k * widths / TENSOR_FLOPS


def shared_cycles(kind: str, plan: Blocks, H: int, Hv: int) -> float:
    """Return what a tile's traffic of shared memory takes, in two bytes a number.

    Scores and dp have both factors there, the sums the right one. The copies bring one tile.
    """
    rows, columns = (plan.k, plan.q) if kind == "dkdv" else (plan.q, plan.k)
    consumers = plan.q // 128 if kind == "forward" else 1
    scores = rows * H + consumers * columns * H
    dp, sums = rows * Hv + columns * Hv, columns * {"dq": H, "dkdv": H + Hv}.get(kind, Hv)
    read = scores + (consumers * sums if kind == "forward" else dp + sums)
    return 2 * (read + columns * (H + Hv)) / SHARED_BYTES


def consumers_work(code: str) -> list[tuple[int, int]]:
    """Return (MUFU, instructions) of a pass through each loop over tiles of each consumer.

    These are the innermost loops that store to tensor memory. Of the ways through one, the longest
    counts.
    """
    kernel = sass.parse(code)
    stores = [
        loop
        for loop in kernel.loops
        if any(i.name == "STTM" for block in loop.blocks for i in kernel.blocks[block])
    ]
    inner = [loop for loop in stores if not any(loop.holds(other) for other in stores)]
    passes = [kernel.one_pass(loop, Counter()) for loop in inner]
    return [(sum(i.name == "MUFU" for i in code), len(code)) for code in passes]


def cycles(found: list[tuple[int, int]], consumers: int) -> list[str]:
    """Return "special issue" of a full and of a partial tile: the latter is the longer loop.

    Consumers may share the code of two loops.
    """
    if len(found) == 2:
        found = found * consumers
    if len(found) != 2 * consumers:
        raise ValueError(f"{len(found)} loops over tiles, not two of each of {consumers} consumers")
    by_length = sorted(found, key=lambda one: one[1])
    halves = by_length[:consumers], by_length[consumers:]
    return [
        f"{SPECIAL_CYCLES * sum(mufu for mufu, _ in half):5} {sum(n for _, n in half):5}"
        for half in halves
    ]


def consumers_of(kind: str, plan: Blocks) -> int:
    """Return how many warpgroups compute: one for 128 queries each, or two that share a tile."""
    return plan.q // 128 if kind == "forward" else CONSUMERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", choices=("10.0", "10.3"), default="10.0")
    parser.add_argument("--options", action="store_true", help="with bias, softcap, ...")
    parser.add_argument("--head-dims", type=int, nargs="+", help="these alone")
    arguments = parser.parse_args()
    dims = arguments.head_dims or ((64, 128) if arguments.options else blackwell.HEAD_DIMS)
    where, failures = compile_ampere.device(arguments.capability), 0
    chip = functools.partial(compile_ampere.context, arguments.capability)
    print(
        "kernel      H  tile     scores    registers   spills   shared memory   tensor   shared",
        end="",
    )
    print("   full: special issue   partial: special issue")
    for name, kind, H, problem, options in compile_ampere.configurations(
        arguments.options, dims, tuple(KERNELS)
    ):
        if kind not in KERNELS or (kind == "dkdv" and 2 * H > WIDEST):  # else Ampere's
            continue
        plan = blackwell.blocks(kind, H, H)
        print(f"{kind:8} {H:4}  {plan.q}x{plan.k:<5}  {name:8}", end="", flush=True)
        try:
            found = h200.compile_kernel(
                kind, H, H, problem, where, function=KERNELS[kind], plan=plan, chip=chip,
                code=True, **options,
            )  # fmt: skip
        except Exception as error:
            failures += 1
            print(" ", str(error).splitlines()[0][:120], flush=True)
            continue
        spills = "{:4} {:4}".format(*found.spills)
        full, partial = cycles(consumers_work(found.code), consumers_of(kind, plan))
        tensor, shared = (f(kind, plan, H, H) for f in (tensor_cycles, shared_cycles))
        print(
            f"{found.registers:>10}   {spills}   {found.memory / 1024:6.1f} KiB   {tensor:9.0f}"
            f"   {shared:6.0f}"
            f"   {full:>19}   {partial:>22}",
            flush=True,
        )
    if failures:
        sys.exit(f"{failures} kernels did not compile")


if __name__ == "__main__":
    main()
