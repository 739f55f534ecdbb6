"""Network traffic of a compiled program, computed from its text."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"(pred|bf16|f\d+\w*|s\d+|u\d+)\[([\d,]*)\]")
_BYTES = {"pred": 1.0, "bf16": 2.0, "s4": 0.5, "u4": 0.5}


class Traffic(NamedTuple):
    """Number of bytes that each device sends in one run of a program."""

    bytes: dict[str, float]
    """Number of bytes, keyed by the kind of collective."""
    unknown_loops: int
    """Number of collectives in loops of unknown length. Each of these is counted once."""

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


def network_traffic(text: str, devices: int) -> Traffic:
    """Return the number of bytes that each device sends per run of a program, assuming rings.

    In a group of g devices, a gather or scatter sends (g - 1) / g of its data, an all-reduce sends
    twice as much, and a permutation sends all of it. Collectives in loops count once per iteration.
    `text` is the result of `jax.stages.Compiled.as_text`.
    """
    lines: dict[str, list[str]] = {}  # of each computation; `entry` is the one that runs first
    name = None
    for line in text.splitlines():
        match = _COMPUTATION.match(line)
        if match:
            name = "entry" if line.startswith("ENTRY") else match[1]
            lines[name] = []
        elif line.startswith("}"):
            name = None
        elif name is not None:
            lines[name].append(line)
    runs, unknown = _run_counts(lines)
    found: dict[str, tuple[str, float]] = {}
    uncertain = 0
    for name, body in lines.items():
        for number, line in enumerate(body):
            match = _COLLECTIVE.search(line)
            if match is None or runs[name] == 0:
                continue
            # XLA prints the groups of devices in three notations, and nothing for a single group.
            named = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
            counted = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line)
            listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
            if named:
                axes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
                group = math.prod(int(axes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
            elif counted:
                group = int(counted[2])
            else:
                group = len(listed[1].split(",")) if listed and listed[1] else devices
            kind, sizes = match[2], list[float]()
            for dtype, dims in _SHAPE.findall(match[1]):
                bits = re.search(r"\d+", dtype)
                width = _BYTES.get(dtype, int(bits[0]) / 8 if bits else 4.0)
                sizes.append(math.prod(int(n) for n in dims.split(",") if n) * width)
            # Except for an all-reduce, the start of an asynchronous collective also lists its
            # operands, as (in, out) or ((in, in), (out, out)). A permutation appends two numbers.
            if "-start(" in match[0] and kind == "collective-permute":
                sizes = sizes[1:2] or sizes
            elif "-start(" in match[0] and kind != "all-reduce":
                sizes = sizes[len(sizes) // 2 :]
            size = sum(sizes)
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # the TPU compiler's notation
            elif kind == "reduce-scatter":
                size *= group  # the result is one of `group` parts
            share = {"all-reduce": 2 * (group - 1) / group, "collective-permute": 1.0}
            sent = size * share.get(kind, (group - 1) / group) * runs[name]
            channel = re.search(r"channel_id=(\d+)", line)
            # JAX gives channel 1 to all collectives inside a `shard_map`, such as those of a ring
            is_own = channel is not None and channel[1] != "1"
            key = f"channel {channel[1]}" if channel and is_own else f"{name} {number}"
            if key not in found or found[key][1] < sent:  # in several parts if asynchronous
                found[key] = kind, sent
            uncertain += name in unknown
    sums: dict[str, float] = defaultdict(float)
    for kind, sent in found.values():
        sums[kind] += sent
    return Traffic(dict(sums), uncertain)


def _run_counts(lines: dict[str, list[str]]) -> tuple[dict[str, float], set[str]]:
    """Return the run count of each computation and the computations in loops of unknown length."""
    calls: dict[str, list[tuple[str, float, bool]]] = defaultdict(list)
    for name, body in lines.items():
        for line in body:
            loop = _WHILE.search(line)
            if loop:
                limits = _LIMIT.findall("\n".join(lines.get(loop[1], [])))
                is_known = len(limits) == 1
                calls[name].append((loop[2], float(limits[0]) if is_known else 1.0, not is_known))
                continue
            called = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                called += re.findall(r"%?([\w.\-]+)", branches)
            calls[name] += [(one, 1.0, False) for one in called]
    runs: dict[str, float] = defaultdict(float)
    unknown: set[str] = set()

    def visit(name: str, count: float, uncertain: bool) -> None:
        runs[name] += count
        if uncertain:
            unknown.add(name)
        for called, factor, open_ended in calls[name]:
            if called in lines:
                visit(called, count * factor, uncertain or open_ended)

    visit("entry", 1.0, False)
    return runs, unknown
