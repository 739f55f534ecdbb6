"""Count what a compiled Hopper kernel issues for a tile, and the cycles that its units need.

A kernel is compiled for an H200 (`benchmarks/h200.py`). In its machine code the loops over tiles
are the innermost ones that multiply. A consumer has two, over full and over partial tiles: the one
with fewer comparisons is over full ones. Both must multiply exactly what a tile needs, or this
stops. What one pass issues is counted by the units that do it. An SM has four quarters, and each of
the four warps of a warpgroup is in one of them; cycles are

    tensor    M N K of every HGMMA / 2048     989 TFLOP/s / 132 SMs / 1.83 GHz = 4096 FLOP a cycle
    shared    bytes / 128                     32 banks of 4 bytes; operands, stores and copies
    special   8 of a MUFU                     16 results a cycle and SM
    half      2 of a comparison, a maximum,   64 results a cycle and SM
              an integer's sum, a conversion
    issue     1 of any instruction            one a cycle and quarter

(data sheet and white paper of the H100 and H200; CUDA C++ Programming Guide, "Throughput of Native
Arithmetic Instructions" and "Shared Memory", compute capability 9.0). A tile of an SM takes at
least the most of the five, summed over its consumers (`overlapped`); if nothing runs beside a
product, the most of the first two and after it of the last three (`serial`). Neither knows
latencies, device memory or the clock.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from benchmarks import h200, sass
from benchmarks.sass import Instruction, Shape
from benchmarks.specs import AttentionCase
from transformer_jax.attention.mask_vectors import MaskVectors
from transformer_jax.kernels import hopper
from transformer_jax.kernels.contract import Blocks, Problem
from transformer_jax.kernels.hopper.backward_single_pass import PARTS, dq_shares
from transformer_jax.kernels.hopper.memory import ROWS

TENSOR_FLOPS = 4096  # of an SM in a cycle, dense bfloat16
SHARED_BYTES = 128  # between shared memory and the rest of an SM in a cycle
UNITS = {"special": 8, "half": 2, "issue": 1}  # cycles that an instruction of a warp keeps each
HALF_RATE = frozenset(
    "F2FP FMNMX FSEL FSET FSETP I2FP IABS IADD3 IMNMX ISETP LEA LOP3 PLOP3 PRMT SEL SHF SHL SHR"
    " VIADD VIADDMNMX VIMNMX".split()
)
COMPARISONS = ("FSEL", "FSETP", "ISETP", "SEL", "LOP3", "PLOP3", "VOTE")
SYNCHRONISING = ("BAR", "DEPBAR", "FENCE", "SYNCS", "WARPGROUP", "WARPSYNC")
LOCAL = ("LDL", "STL")  # where spilled registers go


KINDS = ("forward", "dq", "dkdv", "single_pass")
HEADS = 32, 16  # N, K: so many that a program has several items, and an item several heads
PIECES = ("item", "head", "full", "partial")
SEEN: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": dict(causal=True),
    "softcap": dict(causal=True, softcap=30.0),
    "window": dict(causal=True, window=1024),
    "documents": dict(causal=True, documents=12),
    "window, documents": dict(causal=True, window=1024, documents=12),
    "everything": dict(causal=True, window=1024, documents=12, softcap=30.0, sinks=True),
}
"""The options that are added to plain scores, as fields of an `AttentionCase`."""


@dataclass(frozen=True)
class Work:
    """Count the instructions that one warp of a consumer issues in one pass through a piece."""

    products: dict[str, int]  # HGMMA by shape
    tensor: float  # cycles
    instructions: int
    special: int
    half: int
    shared: int  # bytes to and from shared memory
    local: int  # loads and stores of spilled registers
    synchronising: dict[str, int]

    @classmethod
    def of(cls, code: Sequence[Instruction]) -> Work:
        names = Counter(i.name for i in code)
        shapes = Counter(i.shape for i in code if i.shape)
        return cls(
            products={"x".join(map(str, shape)): n for shape, n in sorted(shapes.items())},
            tensor=sum(n * 2 * m * w * k / TENSOR_FLOPS for (m, w, k), n in shapes.items()),
            instructions=len(code),
            special=names["MUFU"],
            half=sum(names[name] for name in HALF_RATE),
            shared=sum(i.shared_bytes for i in code),
            local=sum(names[name] for name in LOCAL),
            synchronising={name: names[name] for name in SYNCHRONISING if names[name]},
        )

    def cycles(self) -> dict[str, float]:
        """Cycles by unit."""
        counts = {"special": self.special, "half": self.half, "issue": self.instructions}
        by_warp = {unit: float(UNITS[unit] * n) for unit, n in counts.items()}
        return {"tensor": self.tensor, "shared": self.shared / SHARED_BYTES} | by_warp


@dataclass(frozen=True)
class Bound:
    """Cycles of an SM for a piece of a kernel."""

    cycles: dict[str, float]  # by unit, summed over the consumers
    serial: float

    @classmethod
    def of(cls, works: Sequence[Work], copied: int = 0) -> Bound:
        """Sum over the consumers; `copied` bytes move between shared and device memory."""
        each = [work.cycles() for work in works]
        cycles = {unit: sum(one[unit] for one in each) for unit in each[0]}
        cycles["shared"] += copied / SHARED_BYTES
        alone = sum(max(one[unit] for unit in UNITS) for one in each)
        return cls(cycles, max(cycles["tensor"], cycles["shared"]) + alone)

    @property
    def overlapped(self) -> float:
        return max(self.cycles.values())

    @property
    def unit(self) -> str:
        """The unit that is the limit if all is overlapped."""
        return max(self.cycles, key=lambda unit: self.cycles[unit])


@dataclass(frozen=True)
class Cost:
    """A compiled kernel: what each consumer issues in each of its pieces.

    A program runs items, an item heads (in a kernel that walks by keys), a head full and partial
    tiles. A forward kernel's item has its first tile in it.
    """

    kind: str
    H: int
    scores: str
    blocks: dict[str, Any]
    registers: int
    spills: tuple[int, int]
    pieces: dict[str, list[Work]]

    def bounds(self) -> dict[str, Bound]:
        return {
            piece: Bound.of(works, self.copied if piece in ("full", "partial") else 0)
            for piece, works in self.pieces.items()
        }

    @property
    def copied(self) -> int:
        """Bytes that a tile's copies move, without those of a mask's vectors."""
        if self.kind in h200.BY_KEY:  # q, do, two vectors; and dq, which is added to memory
            added = 4 * self.H * (self.kind == "single_pass")
            return self.blocks["q"] * (4 * self.H + 8 + added)
        return self.blocks["k"] * 4 * self.H


def product(N: int, K: int) -> Counter[Shape]:
    """The HGMMA of [64, K] times [K, N]."""
    return Counter({(ROWS, N, 16): K // 16})


def products_of_consumers(kind: str, plan: Blocks, H: int, Hv: int) -> list[Counter[Shape]]:
    """Return the products that each consumer computes for a tile."""
    by_query = product(plan.k, H), product(plan.k, Hv), product(H, plan.k)
    s, dp = product(plan.q, H), product(plan.q, Hv)
    dk, dv = product(H, plan.q), product(Hv, plan.q)
    match kind:
        case "forward":
            return [product(plan.k, H) + product(Hv, plan.k)] * (plan.q // ROWS)
        case "dq":
            return [sum(by_query, Counter())] * (plan.q // ROWS)
        case "dkdv" if plan.k == ROWS:
            return [s + dv, dp + dk]
        case "dkdv":
            return [s + dp + dv + dk] * (plan.k // ROWS)
        case "single_pass":
            shares = dq_shares(plan, H)
            return [s + dp + dv + dk + product(one.columns, PARTS * ROWS) for one in shares]
    raise ValueError(f"no kernel {kind!r}")


def pieces_of(
    kernel: sass.Kernel, kind: str, wanted: Counter[Shape], masked: int, which: int = 0
) -> dict[str, Work]:
    """Find the loops of the consumers that multiply `wanted` for a tile, and count.

    `masked` is how many comparisons a thread needs more for a partial tile: one a score or none.
    Where two consumers have code of their own and multiply the same shapes, `which` says which.
    """
    owners: dict[int, list[tuple[sass.Loop, list[Instruction]]]] = {}
    for loop in kernel.tile_loops():
        try:
            code = kernel.one_pass(loop, wanted)
        except ValueError:
            continue
        owners.setdefault(kernel.around(loop)[-1].header, []).append((loop, code))
    found = list(owners.values())[min(which, len(owners) - 1)] if owners else []
    if len(found) != 2:
        raise ValueError(f"{len(found)} loops multiply {dict(wanted)} a tile, not 2")
    compared = [sum(i.name in COMPARISONS for i in code) for _, code in found]
    (full, full_code), (partial, partial_code) = (
        found if compared[0] <= compared[1] else found[::-1]
    )
    if abs(compared[1] - compared[0]) < masked:
        raise ValueError(f"{compared} comparisons: no loop has {masked} more than the other")
    around = [loop for loop in kernel.around(full) if loop.holds(partial)]
    by_key = kind in h200.BY_KEY
    if len(around) != 1 + by_key:
        raise ValueError(f"{len(around)} loops are around those over tiles")
    item = kernel.one_pass(around[-1], wanted if kind == "forward" else Counter(), [full, partial])
    pieces = {"full": Work.of(full_code), "partial": Work.of(partial_code)}
    if by_key:
        item = kernel.one_pass(around[-1], Counter(), [around[0]])
        head = kernel.one_pass(around[0], Counter(), [full, partial])
        pieces["head"] = Work.of(head)
    return pieces | {"item": Work.of(item)}


def problem_of(case: AttentionCase) -> tuple[Problem, int, dict[str, Any]]:
    """A case's problem, how many vectors of each side its mask reads, fields of its operands."""
    visible, vectors, mask = None, 1, case.mask()
    if mask is not None:
        at = jnp.arange(case.queries, dtype=jnp.int32)[None]
        read = MaskVectors.of(mask, at, at, True)
        visible, vectors = read.visible, len(read.q)
    options = {"sinks": ((1, case.heads), jnp.float32)} if case.sinks else {}
    return Problem(case.head_dim**-0.5, case.softcap, visible=visible), vectors, options


def cost_of(kind: str, H: int, scores: str, device: Any) -> Cost:
    """Compile a kernel and read its machine code."""
    case = AttentionCase(
        name=scores, batch=h200.B, queries=h200.T, keys=h200.T, heads=HEADS[0], kv_heads=HEADS[1],
        head_dim=H, value_dim=H, **SEEN[scores],
    )  # fmt: skip
    problem, vectors, options = problem_of(case)
    found = h200.compile_kernel(
        kind, H, H, problem, device, vectors=vectors, heads=HEADS, code=True, **options
    )
    plan = hopper.blocks(kind, H, H)
    kernel = sass.parse(found.code)
    width = plan.q if kind in h200.BY_KEY else plan.k
    masked = 0 if problem.visible is None else ROWS * width // 128
    consumers = products_of_consumers(kind, plan, H, H)
    read = [
        pieces_of(kernel, kind, wanted, masked, consumers[:i].count(wanted))
        for i, wanted in enumerate(consumers)
    ]
    pieces = {name: [one[name] for one in read] for name in PIECES if name in read[0]}
    blocks = {"q": plan.q, "k": plan.k, "stages": plan.stages}
    return Cost(kind, H, scores, blocks, found.registers, found.spills, pieces)


def read(text: str) -> list[Cost]:
    """The costs that a file holds."""
    fields = [field.name for field in dataclasses.fields(Cost)]
    found = []
    for row in json.loads(text)["kernels"]:
        cost = Cost(**{name: row[name] for name in fields})
        pieces = {name: [Work(**work) for work in works] for name, works in cost.pieces.items()}
        found.append(dataclasses.replace(cost, pieces=pieces, spills=tuple(cost.spills)))
    return found
