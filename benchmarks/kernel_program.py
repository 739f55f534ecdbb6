"""List what XLA runs around the kernels of one call of attention, compiled for an H200.

`python -m benchmarks.kernel_model --program` prints it. What is counted is read from the optimised
program: everything that the entry calls, with the bodies of its loops, but not what is inside a
fusion, which is one kernel. The host asks for the condition of a loop in every call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import h200
from transformer_jax import Causal, Segments, dot_product_attention
from transformer_jax.kernels import Target, using

SHAPE = (2, 8192, 16, 128)  # [B, S, N, H]
MASKS = ("causal", "documents, traced")
DIRECTIONS = ("forward", "forward+backward")
NO_KERNEL = frozenset(
    "after-all async-done async-start async-update bitcast call conditional constant"
    " copy-done get-tuple-element opt-barrier parameter partition-id replica-id tuple while".split()
)
INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
COMPUTATION = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s*\(.*\{\s*$")
CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
CUSTOM = re.compile(r'custom_call_target="([^"]+)"')


@dataclass(frozen=True)
class Operation:
    """One instruction of an optimised program."""

    name: str
    opcode: str
    text: str

    @property
    def called(self) -> list[str]:
        """The computations that it runs as programs of their own."""
        if self.opcode not in ("while", "conditional", "call", "async-start"):
            return []
        branches = [name for found in BRANCHES.findall(self.text) for name in found.split(",")]
        return [*CALLED.findall(self.text), *(name.strip().lstrip("%") for name in branches)]

    def kind(self, program: Program) -> str:
        """The name under which it is counted."""
        if self.opcode == "custom-call":
            target = CUSTOM.search(self.text)
            name = target[1] if target else "?"
            return "mosaic" if "mosaic" in name.lower() else f"custom-call {name}"
        if self.opcode == "fusion":
            inside = {op.opcode for name in CALLED.findall(self.text) for op in program[name]}
            moves = inside & {"copy", "sort", "transpose"}
            return f"fusion with {'/'.join(sorted(moves))}" if moves else "fusion"
        return self.opcode


Program = dict[str, list[Operation]]  # by computation


def parse(text: str) -> tuple[str, Program]:
    """Return the entry's name and all computations of an optimised program."""
    entry, program = "", {}
    inside: list[Operation] | None = None
    for line in text.splitlines():
        if inside is None:
            if head := COMPUTATION.match(line):
                inside = program.setdefault(head["name"], [])
                entry = head["name"] if head["entry"] else entry
        elif line.startswith("}"):
            inside = None
        elif found := INSTRUCTION.match(line):
            rest = _after_type(found["rest"])
            inside.append(Operation(found["name"], rest.partition("(")[0].strip(), rest))
    if not entry:
        raise ValueError("no entry: not the text of a compiled program")
    return entry, program


def _after_type(text: str) -> str:
    """Return the text after the type of a result, which may be a tuple of types."""
    if not text.startswith("("):
        return text.partition(" ")[2]
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[i + 1 :].strip()
    return text


def operations(entry: str, program: Program) -> Iterator[tuple[Operation, bool]]:
    """All that the entry runs, and whether a loop or a branch runs it."""
    stack = [(entry, False)]
    while stack:
        name, nested = stack.pop()
        for op in program[name]:
            yield op, nested
            inner = nested or op.opcode in ("while", "conditional")
            stack += [(called, inner) for called in op.called]


def count(text: str) -> dict[str, dict[str, int]]:
    """Count kernels by kind, and loops: what always runs, and what a loop or a branch runs."""
    entry, program = parse(text)
    found: dict[str, Counter[str]] = {"always": Counter(), "nested": Counter()}
    for op, nested in operations(entry, program):
        if op.opcode not in NO_KERNEL or op.opcode in ("while", "conditional"):
            found["nested" if nested else "always"][op.kind(program)] += 1
    return {name: dict(sorted(kinds.items())) for name, kinds in found.items()}


def compile_call(mask: str, direction: str, device: Any) -> jax.stages.Compiled:
    """Compile attention by the fused kernels; ids of documents are an argument."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=sharding)
    ids = jax.ShapeDtypeStruct(SHAPE[:2], jnp.int32, sharding=sharding)

    def attend(ids: jax.Array, *qkv: jax.Array) -> jax.Array:
        seen = Causal() if mask == "causal" else Causal() & Segments(ids)
        return dot_product_attention(*qkv, mask=seen, implementation="pallas")

    def both(ids: jax.Array, do: jax.Array, *qkv: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *qkv: attend(ids, *qkv), *qkv)
        return out, pull(do)

    with using(Target("hopper", chip=h200.KIND)), h200.context():
        if direction == "forward":
            lowered = jax.jit(attend).lower(ids, array, array, array)
        else:
            lowered = jax.jit(both).lower(ids, array, array, array, array)
        return lowered.compile()


def measure(device: Any) -> list[dict[str, Any]]:
    """One row for each mask and direction."""
    rows = []
    for mask in MASKS:
        for direction in DIRECTIONS:
            compiled = compile_call(mask, direction, device)
            memory = compiled.memory_analysis()
            rows.append(
                {
                    "mask": mask,
                    "direction": direction,
                    "temporaries": memory.temp_size_in_bytes,
                    "arguments": memory.argument_size_in_bytes,
                    "results": memory.output_size_in_bytes,
                    **count(compiled.as_text()),
                }
            )
    return rows
