"""Read the machine code of a Hopper kernel: its loops, and what a pass through each one issues.

The text is nvdisasm's. Branches and labels make a graph of blocks. A block dominates another one if
every way to that passes it; an edge back to a block that dominates its source closes a loop, which
is all that reaches the edge without passing the block (a natural loop). The compiler puts the
repetition of a wait far below the loop that waits: an interval of addresses would take that for a
loop of its own, a graph does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

LINE = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+"
    r"(?:(?P<guard>@!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
LABEL = re.compile(r"^(?P<name>\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
SHAPE = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)")
ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")
TABLES = ("BRX", "JMX")  # jumps by a table, which is not in the listing
Shape = tuple[int, int, int]  # M, N, K of one HGMMA


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    guard: str  # "" where it always runs
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def shape(self) -> Shape | None:
        """M, N and K of an HGMMA."""
        found = SHAPE.match(self.opcode)
        return (int(found[1]), int(found[2]), int(found[3])) if found else None

    @property
    def shared_bytes(self) -> int:
        """Count the bytes that a warpgroup moves at least to or from shared memory, in bfloat16.

        The left operand of an HGMMA may be in registers; the right one is read once. A load takes a
        cycle, 128 bytes, of each warp, as where threads share what they read.
        """
        if self.shape:
            M, N, K = self.shape
            left = self.operands.split(",")[1].strip()
            return 2 * K * (N + M * left.startswith("gdesc"))
        if self.name == "LDS":
            return 4 * 128
        if self.name == "STS":
            width = re.search(r"\.(?:[US](8|16)|(64|128))\b", self.opcode)
            return 16 * int(width[1] or width[2]) if width else 16 * 32
        if self.name in ("LDSM", "STSM"):
            return 16 * 32 * int(self.opcode.rpartition(".")[2])
        return 0

    @property
    def target(self) -> str | None:
        """The label that it may jump to; those of BSSY and such are where threads meet again."""
        jumps = self.name in ("BRA", "JMP") or self.opcode.startswith("WARPSYNC.COLLECTIVE")
        found = TARGET.search(self.operands) if jumps else None
        return found[1] if found else None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may come after it."""
        if self.name in ENDS:
            return bool(self.guard)
        always = self.name in ("BRA", "JMP") and self.operands.strip().startswith("`(")
        return not always or bool(self.guard) or self.opcode.startswith(("BRA.DIV", "BRA.CONV"))


@dataclass(frozen=True)
class Loop:
    """A natural loop, as numbers of blocks."""

    header: int
    latches: frozenset[int]  # blocks that jump back to the header
    blocks: frozenset[int]

    def holds(self, other: Loop) -> bool:
        return other.blocks < self.blocks


@dataclass(frozen=True, eq=False)
class Kernel:
    """The blocks of a kernel, in the order of their addresses, and the edges between them."""

    blocks: tuple[tuple[Instruction, ...], ...]
    after: tuple[tuple[int, ...], ...]

    @cached_property
    def order(self) -> list[int]:
        """Blocks that can be reached, each before its successors but for edges back."""
        found: list[int] = []
        seen, stack = {0}, [(0, iter(self.after[0]))]
        while stack:
            block, rest = stack[-1]
            follower = next((b for b in rest if b not in seen), None)
            if follower is None:
                found.append(block)
                stack.pop()
            else:
                seen.add(follower)
                stack.append((follower, iter(self.after[follower])))
        return found[::-1]

    @cached_property
    def before(self) -> dict[int, list[int]]:
        """The predecessors of each block that can be reached."""
        found: dict[int, list[int]] = {block: [] for block in self.order}
        for block in self.order:
            for follower in self.after[block]:
                found[follower].append(block)
        return found

    @cached_property
    def dominators(self) -> dict[int, set[int]]:
        """For each block those that every way to it passes."""
        every = set(self.order)
        found = {block: every for block in self.order} | {0: {0}}
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                new = set.intersection(*(found[b] for b in self.before[block])) | {block}
                changed |= new != found[block]
                found[block] = new
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        """All loops, by the address of their headers."""
        latches: dict[int, set[int]] = {}
        for block in self.order:
            for follower in self.after[block]:
                if follower in self.dominators[block]:
                    latches.setdefault(follower, set()).add(block)
        return [
            Loop(header, frozenset(ends), self._body(header, ends))
            for header, ends in sorted(latches.items())
        ]

    def _body(self, header: int, latches: Iterable[int]) -> frozenset[int]:
        body, stack = {header}, list(latches)
        while stack:
            block = stack.pop()
            if block not in body:
                body.add(block)
                stack += self.before[block]
        return frozenset(body)

    def multiplies(self, blocks: Iterable[int]) -> bool:
        return any(i.shape for block in blocks for i in self.blocks[block])

    def _waits(self, loop: Loop) -> bool:
        """Whether a loop does nothing but look at a barrier again."""
        code = [i for block in loop.blocks for i in self.blocks[block]]
        return len(code) < 12 and any(i.opcode.startswith("SYNCS.PHASECHK") for i in code)

    def tile_loops(self) -> list[Loop]:
        """The innermost loops that multiply: one pass of each is one tile."""
        loops = [loop for loop in self.loops if self.multiplies(loop.blocks)]
        return [loop for loop in loops if not any(loop.holds(other) for other in loops)]

    def around(self, loop: Loop) -> list[Loop]:
        """The loops that hold a loop, from inside out."""
        return sorted((x for x in self.loops if x.holds(loop)), key=lambda x: len(x.blocks))

    def one_pass(
        self, loop: Loop, wanted: Counter[Shape], without: Iterable[Loop] = ()
    ) -> list[Instruction]:
        """The longest way through a loop that multiplies exactly what is `wanted`.

        Loops within it are passed once, those of `without` count for nothing, and the repetition of
        a wait is no way: every wait succeeds at once. Where two warpgroups share the code of a loop
        and each has a branch of its own, the number of products says that a way takes one of them.
        """
        left_out = frozenset().union(*(inner.blocks for inner in without))
        waiting = frozenset().union(*(inner.blocks for inner in self.loops if self._waits(inner)))
        heads = {other.header for other in self.loops if other.blocks <= loop.blocks}
        ways: dict[int, dict[tuple, tuple[int, tuple]]] = {}
        for block in (b for b in self.order if b in loop.blocks - waiting):
            code = () if block in left_out else self.blocks[block]
            products = Counter(i.shape for i in code if i.shape)
            if block == loop.header:
                arriving = [((), (0, ()))]
            else:
                arriving = [
                    way
                    for b in self.before[block]
                    if not (block in heads and block in self.dominators[b])
                    for way in ways.get(b, {}).items()
                ]
            here = ways.setdefault(block, {})
            for made, (length, path) in arriving:
                total = Counter(dict(made)) + products
                if not total <= wanted:
                    continue
                key = tuple(sorted(total.items()))
                way = length + len(code), (path, block)
                if key not in here or here[key][0] < way[0]:
                    here[key] = way
        ends = [ways.get(b, {}).get(tuple(sorted(wanted.items()))) for b in loop.latches]
        found = max((end for end in ends if end), default=None, key=lambda end: end[0])
        if found is None:
            there = Counter(i.shape for b in loop.blocks for i in self.blocks[b] if i.shape)
            raise ValueError(f"no way through a loop multiplies {dict(wanted)}: it has {there}")
        path, code = found[1], []
        while path:
            path, block = path
            code = [*(() if block in left_out else self.blocks[block]), *code]
        return code


def parse(text: str) -> Kernel:
    """Read the one kernel of a listing; lines of other programs' output are passed over.

    A jump by a table may go to the first block of all code that nothing else leads to.
    """
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label["name"]] = len(code)
        elif found := LINE.match(line):
            fields = (found[name] or "" for name in ("guard", "opcode", "operands"))
            code.append(Instruction(*fields))
    if not code:
        raise ValueError("no machine code: is nvdisasm on the path?")
    ends = [i for i, x in enumerate(code, 1) if x.target or not x.falls_through or x.name in ENDS]
    starts = sorted({0, *labels.values(), *ends} - {len(code)})
    number = {start: i for i, start in enumerate(starts)}
    blocks, after = [], []
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        last = code[end - 1]
        followers = [number[labels[last.target]]] if last.target else []
        if last.falls_through and end in number:
            followers.append(number[end])
        blocks.append(tuple(code[start:end]))
        after.append(tuple(dict.fromkeys(followers)))
    tables = [i for i, block in enumerate(blocks) if block[-1].name in TABLES]
    while tables:
        reached = set(Kernel(tuple(blocks), tuple(after)).order)
        unreached = next((i for i in range(len(blocks)) if i not in reached), None)
        if unreached is None:
            break
        for i in tables:
            after[i] = (*after[i], unreached)
    return Kernel(tuple(blocks), tuple(after))
