"""Say what the compiled Hopper kernels cost, by their machine code: no GPU is needed or used.

    python -m benchmarks.kernel_model --out benchmarks/results/kernel_model_h200.json
    python -m benchmarks.kernel_model --only 'forward 128'   # kernels whose name contains this
    python -m benchmarks.kernel_model --read FILE            # what was counted before, no compiler
    python -m benchmarks.kernel_model --program              # what stands around the kernels

Each kernel is compiled for an H200 and read (`kernel_cost.py` says how, and what `overlapped` and
`serial` are). The cells let the kernels' own schedule share out their own lists of tiles to 132
programs; a share is of the tensor cores' rate, for the products of the pairs that are seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import h200, kernel_program, specs, timing
from benchmarks.kernel_cost import KINDS, PIECES, SEEN, TENSOR_FLOPS, Cost, cost_of, read
from benchmarks.specs import AttentionCase
from transformer_jax.kernels.contract import Blocks, Operands, TileLists
from transformer_jax.kernels.hopper import schedule

PROCESSORS = schedule.PROGRAMS


# What a call takes


def lists_of(case: AttentionCase, kind: str, blocks: dict[str, Any]) -> TileLists:
    """The tiles that a kernel visits."""
    mask = case.mask()
    assert mask is not None
    at = jnp.arange(case.queries, dtype=jnp.int32)[None]
    plan = mask.block_plan(at, at, block_q=blocks["q"], block_k=blocks["k"])
    return plan.query_tiles() if kind in h200.BY_KEY else plan.key_tiles()


def pieces_by_item(case: AttentionCase, kind: str, lists: TileLists) -> np.ndarray:
    """How often each item runs each of `PIECES`: i32[items, 4]."""
    rows = lists.seen.shape[-1]
    by_key = kind in h200.BY_KEY
    groups = case.heads // case.kv_heads if by_key else 1
    shape = (case.batch, case.heads // groups, groups, rows)

    def each(x: jax.Array) -> np.ndarray:
        heads = np.broadcast_to(np.asarray(x), (case.batch, case.heads, rows))
        return heads.reshape(shape).sum(axis=2).reshape(-1)

    full, seen = np.asarray(lists.full), np.asarray(lists.seen)
    if kind == "forward":  # whose first tile is in the item
        full, seen = np.maximum(full - 1, 0), np.maximum(seen - 1, 0)
    once = np.ones(shape[0] * shape[1] * rows, np.int32)
    heads = once * groups * by_key
    return np.stack([once, heads, each(full), each(seen - full)], axis=1).astype(np.int32)


def share_out(order: jax.Array, pieces: jax.Array) -> np.ndarray:
    """Count the pieces that each program runs, by the kernels' own loop: i32[programs, 4]."""

    def one(_: jax.Array) -> jax.Array:
        return schedule.each_item(
            len(order), lambda item, total: total + pieces[order[item]], jnp.zeros_like(pieces[0])
        )

    programs = min(len(order), schedule.PROGRAMS)
    return np.asarray(jax.vmap(one, axis_name="program")(jnp.arange(programs)))


def predict(case: AttentionCase, cost: Cost, lists: TileLists | None = None) -> dict[str, Any]:
    """Cycles of a kernel for a case, by the program that takes longest.

    Without `lists` they are those of the case's mask, of queries that are as many as the keys.
    """
    kind = cost.kind
    lists = lists or lists_of(case, kind, cost.blocks)
    query, key = (
        jax.ShapeDtypeStruct((case.batch, length, heads, case.head_dim), jnp.bfloat16)
        for length, heads in ((case.queries, case.heads), (case.keys, case.kv_heads))
    )
    by_key = kind in h200.BY_KEY
    items = schedule.key_items if by_key else schedule.query_items
    blocks = Blocks(**cost.blocks)
    group = case.heads // case.kv_heads if by_key else 1
    order = jnp.asarray(items(Operands(query, key, key), blocks).in_order(lists, group))
    pieces = pieces_by_item(case, kind, lists)
    loads = share_out(order, jnp.asarray(pieces))
    bounds = cost.bounds()
    found: dict[str, Any] = {
        "kernel": kind,
        "items": len(order),
        "tiles": _tiles(case, kind, lists),
    }
    for name in ("overlapped", "serial"):
        each = [getattr(bounds[p], name) if p in bounds else 0.0 for p in PIECES]
        busy = loads @ np.array(each)
        found[name] = float(busy.max())
        found[f"{name}_balance"] = float(busy.mean() / busy.max())
    area = cost.blocks["q"] * cost.blocks["k"]
    found["coverage"] = case.heads * case.pairs() / (found["tiles"]["seen"] * area)
    found["tensor"] = float(
        bounds["full"].cycles["tensor"] * found["tiles"]["seen"] / schedule.PROGRAMS
    )
    return found


def _tiles(case: AttentionCase, kind: str, lists: TileLists) -> dict[str, int]:
    rows = lists.seen.shape[-1]
    shape = (case.batch, case.heads, rows)
    counts = {"seen": lists.seen, "full": lists.full}
    return {k: int(np.broadcast_to(np.asarray(x), shape).sum()) for k, x in counts.items()}


def share(case: AttentionCase, direction: specs.Direction, cycles: float) -> float:
    """The share of the tensor cores' rate that the products of the seen pairs have."""
    return case.flops(direction) / TENSOR_FLOPS / PROCESSORS / cycles


def predict_call(
    case: AttentionCase, direction: specs.Direction, costs: Sequence[Cost]
) -> dict[str, Any]:
    """Predict a call: the cycles of its kernels, which run in turn, and its share of the rate."""
    kernels = [predict(case, cost) for cost in costs]
    row: dict[str, Any] = {"case": case.name, "direction": direction, "kernels": kernels}
    for name in ("overlapped", "serial"):
        cycles = sum(kernel[name] for kernel in kernels)
        row[name] = {"cycles": cycles, "share": share(case, direction, cycles)}
    return row


CALLS: tuple[tuple[str, specs.Direction, tuple[str, ...]], ...] = (
    ("forward", "forward", ("forward",)),
    ("backward", "backward", ("dq", "dkdv")),
    ("single pass", "backward", ("single_pass",)),
)
CELLS = (
    *((f"causal-16k-h{H}-s{S}", "causal") for H in (64, 128) for S in (2048, 8192)),
    ("causal-gqa-h128-s8192", "causal"),
    ("documents12-h128-s8192", "documents"),
    ("window1024-gqa-h128-s8192", "window"),
    ("everything-gqa-h128-s8192", "everything"),
)
"""Cases of `specs.py`, and which kernels they run."""


def predictions(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """A row for each cell and call whose kernels are among the costs."""
    by_name = {(c.kind, c.H, c.scores): c for c in costs}
    cases = {case.name: case for case in specs.ATTENTION}
    rows = []
    for name, scores in CELLS:
        for call, direction, kinds in CALLS:
            keys = [(kind, cases[name].head_dim, scores) for kind in kinds]
            if all(key in by_name for key in keys):
                row = predict_call(cases[name], direction, [by_name[key] for key in keys])
                rows.append({"call": call} | row)
    return rows


def goals(costs: Sequence[Cost], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the bounds of two goals: documents against dense, all options against none.

    Forward and backward by dq and dk/dv. `tiles` counts the tensor cores' work in the visited tiles
    alone, shared out evenly.
    """
    by_name = {(c.kind, c.H, c.scores): c for c in costs}
    found: dict[str, Any] = {}

    def total(name: str, measure: str) -> float:
        picked = [r for r in rows if r["case"] == name and r["call"] in ("forward", "backward")]
        if measure == "tiles":
            return sum(kernel["tensor"] for row in picked for kernel in row["kernels"])
        return sum(row[measure]["cycles"] for row in picked)

    cases = {case.name: case for case in specs.ATTENTION}
    documents, dense = "documents12-h128-s8192", "causal-gqa-h128-s8192"
    if {documents, dense} <= {row["case"] for row in rows}:
        work = cases[documents].pairs() * cases[documents].heads
        work /= cases[dense].pairs() * cases[dense].heads
        found["documents against dense, rate"] = {
            measure: work * total(dense, measure) / total(documents, measure)
            for measure in ("tiles", "overlapped", "serial")
        }
    kinds = ("forward", "dq", "dkdv")
    case = cases["everything-gqa-h128-s8192"]
    with_all = [by_name.get((kind, 128, "everything")) for kind in kinds]
    without = [by_name.get((kind, 128, "window, documents")) for kind in kinds]
    if all(with_all) and all(without):
        base = [predict(case, cost) for cost in without]
        taken = [predict(case, cost) for cost in with_all]
        found["everything against without softcap and sinks, time"] = {
            bound: sum(x[bound] for x in taken) / sum(x[bound] for x in base)
            for bound in ("overlapped", "serial")
        }
    return found


# The command


def configurations(only: str) -> list[tuple[str, int, str]]:
    """(kind, H, scores); the last two of `SEEN` at H 128 alone."""
    found = []
    for H in (64, 128, 256):
        for kind in KINDS:
            if kind == "single_pass" and 2 * H > 256:
                continue
            for scores in SEEN:
                if scores in ("window, documents", "everything") and H != 128:
                    continue
                if only in f"{kind} {H} {scores}":
                    found.append((kind, H, scores))
    return found


def compiled(only: str, device: Any) -> list[Cost]:
    """Compile what is asked for, and print it as it comes."""
    costs = []
    for kind, H, scores in configurations(only):
        costs.append(cost_of(kind, H, scores, device))
        for line in kernel_lines(costs[-1]):
            print("  ".join(line), flush=True)
    return costs


HEADER = (
    "kernel, H, scores", "tiles", "tensor", "shared", "special", "half", "issue", "overlapped",
    "serial", "", "instructions", "BAR", "synchronising", "spills",
)  # fmt: skip


def kernel_lines(cost: Cost) -> list[tuple[str, ...]]:
    """Rows of the table of tiles: an SM's cycles, and what one consumer issues."""
    lines = []
    for piece, bound in cost.bounds().items():
        if piece == "head" or (piece == "partial" and cost.scores == "full"):
            continue
        work = cost.pieces[piece][-1]
        lines.append(
            (
                f"{cost.kind} {cost.H} {cost.scores}",
                piece if piece == "item" else f"{cost.blocks['q']}x{cost.blocks['k']} {piece}",
                *(f"{bound.cycles[unit]:.0f}" for unit in HEADER[2:7]),
                f"{bound.overlapped:.0f}",
                f"{bound.serial:.0f}",
                bound.unit,
                f"{work.instructions}",
                f"{work.synchronising.get('BAR', 0)}",
                f"{sum(work.synchronising.values())}",
                f"{max(w.local for w in cost.pieces[piece])}",
            )
        )
    return lines


def report(costs: Sequence[Cost], rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> str:
    """Everything as text."""
    lines = [timing.table(HEADER, [line for cost in costs for line in kernel_lines(cost)])]
    if rows:
        lines.append(
            "\n"
            + timing.table(
                ("cell", "call", "share, overlapped", "serial", "coverage", "balance"),
                (
                    (
                        row["case"],
                        row["call"],
                        f"{row['overlapped']['share']:.2f}",
                        f"{row['serial']['share']:.2f}",
                        " ".join(f"{k['coverage']:.2f}" for k in row["kernels"]),
                        " ".join(f"{k['overlapped_balance']:.2f}" for k in row["kernels"]),
                    )
                    for row in rows
                ),
            )
        )
    for name, values in found.items():
        lines.append(f"{name}: " + ", ".join(f"{k} {v:.2f}" for k, v in values.items()))
    return "\n".join(lines)


def program_report(rows: Sequence[dict[str, Any]]) -> str:
    """Return as text what XLA runs around the kernels."""
    lines = []
    for row in rows:
        lines.append(f"{row['mask']}, {row['direction']}")
        sizes = (f"{name} {row[name] / 2**20:.1f} MiB" for name in ("temporaries", "arguments"))
        lines.append(f"  {', '.join(sizes)}, results {row['results'] / 2**20:.1f} MiB")
        for where in ("always", "nested"):
            kinds = ", ".join(f"{n} {kind}" for kind, n in row[where].items())
            loops = row[where].get("while", 0) + row[where].get("conditional", 0)
            kernels = sum(row[where].values()) - loops
            lines.append(f"  {where}: {kernels} kernels; {kinds or 'nothing'}")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Name what compiled: packages, the assembler that Mosaic GPU calls, the commit."""

    def said(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    ptxas = said(f"{os.environ['MOSAIC_GPU_CUDA_ROOT']}/bin/ptxas", "--version")
    return {
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "ptxas": re.findall(r"V([\d.]+)", ptxas)[-1],
        "commit": said("git", "describe", "--always", "--dirty").strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def record(costs: Sequence[Cost], rows: Any, found: Any) -> dict[str, Any]:
    """Everything for a file."""
    kernels = [
        dataclasses.asdict(cost)
        | {
            "bounds": {
                piece: bound.cycles
                | {"overlapped": bound.overlapped, "serial": bound.serial, "limit": bound.unit}
                for piece, bound in cost.bounds().items()
            }
        }
        for cost in costs
    ]
    return {"kernels": kernels, "cells": rows, "goals": found}


def lines_of(results: dict[str, Any]) -> str:
    """JSON with one line for each row, so that two files can be compared."""
    parts = []
    for name, value in results.items():
        rows = (
            [json.dumps(row) for row in value] if name in ("kernels", "cells", "programs") else []
        )
        text = "[\n" + ",\n".join(rows) + "\n]" if rows else json.dumps(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", action="store_true", help="what XLA runs around the kernels")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--read", type=Path, help="a file of --out, instead of a compiler")
    parser.add_argument("--out", type=Path, help="write a JSON file, and a .txt beside it")
    given = parser.parse_args(argv)
    if given.read and given.program:
        parser.error("--read holds kernels, not programs: leave out --program")
    if given.read:
        made = json.loads(given.read.read_text())["versions"]
        costs = read(given.read.read_text())
    else:
        device, made = h200.device(), versions()
        costs = [] if given.program else compiled(given.only, device)
    if given.program:
        rows = kernel_program.measure(device)
        text, results = program_report(rows), {"shape": kernel_program.SHAPE, "programs": rows}
    else:
        cells = predictions(costs)
        found = goals(costs, cells)
        text, results = report(costs, cells, found), record(costs, cells, found)
    text = ", ".join(f"{name} {value}" for name, value in made.items()) + f"\n\n{text}\n"
    print(f"\n{text}", end="")
    if given.out:
        given.out.write_text(lines_of({"versions": made} | results))
        given.out.with_suffix(".txt").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
