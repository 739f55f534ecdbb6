"""How fast is our attention compared with other libraries, and how does its memory use grow?

    python -m benchmarks.attention --quick
    python -m benchmarks.attention --out benchmarks/results/attention_cpu.json

Compares our implementations, both by name and as chosen by `None`, with the attention functions of
torch, jax.nn, and flax. Both the forward pass and the forward and backward passes are measured.
Each contender gets inputs in its fastest layout and the mask in its most efficient form. A
contender that is not installed, cannot express a case, or does not fit into memory is reported with
the reason and not counted.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from benchmarks import contenders, goals, specs, timing
from benchmarks.contenders import OURS, PEERS, WITHOUT
from benchmarks.goals import trouble
from benchmarks.peers import Absent
from benchmarks.specs import AttentionCase, Direction
from benchmarks.timing import Contender
from transformer_jax.attention.api import IMPLEMENTATIONS

DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")
QUESTION = "attention: seconds per call of ours and its peers"


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    start = time.perf_counter()
    clock = timing.prepare(one_core=options.one_core)
    before = timing.environment()
    print(timing.headline(before))
    if options.wait_each is None:  # otherwise, a CPU would run several calls at once
        options.wait_each = before["platform"] == "cpu"
    if options.goals and before["platform"] != "cpu":
        options.ours = options.ours or "pallas"  # the goals are about these kernels
    selected = _selected(options, before["platform"])
    if not selected:
        raise SystemExit(f"no case's name contains {options.only!r}")
    dtype = selected[0][0].dtype
    results: dict[str, Any] = {"limits": {}, "cases": [], "failed": {}}

    def limits(when: str) -> float:
        found = results["limits"][when] = timing.limits(dtype, clock)
        matmul, read, copy = (
            found[f"{name}_per_s"] for name in ("matmul_flops", "read_bytes", "copy_bytes")
        )
        print(
            f"{when}: one {dtype} matmul {matmul / 1e9:.0f} GFLOP/s, "
            f"one read {read / 1e9:.1f} GB/s, one copy {copy / 1e9:.1f} GB/s",
            flush=True,
        )
        return matmul

    limit = limits("before")
    before["limits"] = results["limits"]["before"]

    def write(**more: Any) -> None:
        results.update(more)
        if options.out is not None:
            timing.write(options.out, QUESTION, before, results)

    for case, direction, who in selected:
        try:
            if time.perf_counter() - start > 60 * options.minutes:
                raise TimeoutError(f"not begun: {options.minutes:g} minutes are over")
            found = measure(case, direction, options, clock, who)
        except Exception as error:  # keep the results of the other cases
            results["failed"][f"{case.name} {direction}"] = timing.brief(error)
            print(f"\n{case.name} {direction}: {timing.brief(error)}", flush=True)
        else:
            results["cases"].append(found)
            print(_line(found, limit), flush=True)
        write()  # after each case, in case the run is interrupted
    print(flush=True)
    fastest = max(limit, limits("after"))
    means = geometric_means(results["cases"])
    print(_means_table(means))
    memory = [] if options.skip_memory else list(memory_growth(options))
    if memory:
        print(_memory_table(memory))
    reached = []
    if options.goals:
        reached = goals.reached(results["cases"], fastest, results["failed"])
        print(goals.table(reached, options.ours or "what None chooses"))
    write(geometric_means=means, memory=memory, goals=reached)
    if options.out is not None and results["cases"]:
        plot(results["cases"], fastest, before["device"], options.out.with_suffix(".png"))
    if results["failed"]:
        raise SystemExit(f"not measured: {', '.join(results['failed'])}")


def measure(
    case: AttentionCase,
    direction: Direction,
    options: argparse.Namespace,
    clock: Callable[[], float],
    who: set[str] | None = None,
) -> dict[str, Any]:
    """Return timings, ratios to ours, and the largest difference for one case and direction.

    `who` contains the names of the contenders; None means all of them.
    """
    builders = contenders.builders(case, direction, options)
    present, differences = [], {}
    absent = {name: contenders.lacking(case, name) for name in sorted((who or set()) - {*builders})}
    reference: list[np.ndarray] = []
    for name, build in builders.items():
        if who is not None and name not in who:
            continue
        try:
            if name in options.without:
                raise Absent("left out")
            call = build()
            outputs = [np.asarray(leaf, np.float32) for leaf in call()]
            reference = reference or outputs
            if name != WITHOUT:  # it computes a different function
                differences[name] = _difference(reference, outputs)
            queued = not options.wait_each and isinstance(call, contenders.Work)
            present.append(
                Contender(name, call.begin, call.wait) if queued else Contender(name, call)
            )
        except Absent as reason:
            if name == OURS:
                raise
            absent[name] = str(reason)
        except Exception as error:
            if name == OURS:
                raise
            absent[name] = timing.brief(error)  # contenders raise errors of any type
    taken = timing.interleave(present, rounds=options.repeats, seconds=options.seconds, clock=clock)
    return {
        "case": case.name,
        "direction": direction,
        "ours": options.ours or contenders.explain(case).chosen,
        "flops": case.flops(direction),
        "timings": {name: t.summary() for name, t in taken.items()},
        "speedup_of_ours": {
            name: timing.speedup(taken[OURS], t) for name, t in taken.items() if name != OURS
        },
        "difference": differences,
        "absent": absent,
    }


def _difference(ours: list[np.ndarray], other: list[np.ndarray]) -> float | None:
    """Return the largest |other - ours| / max |ours| over all results, or None if not finite."""
    with np.errstate(invalid="ignore"):
        pairs = zip(ours, other, strict=True)
        found = [float(np.abs(mine - x).max() / np.abs(mine).max()) for mine, x in pairs]
    return max(found) if all(map(math.isfinite, found)) else None


def geometric_means(cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return our mean speedup, the worst cell, and the count for each direction and contender.

    Cells in which a contender computes a different function do not count.
    """
    means: dict[str, dict[str, Any]] = {}
    for direction in get_args(Direction):
        ratios: dict[str, dict[str, float]] = {}
        for found in cases:
            if found["direction"] != direction:
                continue
            same = {n: r for n, r in found["speedup_of_ours"].items() if not trouble(found, n)}
            for name, ratio in same.items():
                ratios.setdefault(name, {})[found["case"]] = ratio
            if peers := [ratio for name, ratio in same.items() if name in PEERS]:
                ratios.setdefault("best peer", {})[found["case"]] = min(peers)
        means[direction] = {
            name: {
                "mean": timing.geometric_mean(cells.values()),
                "worst": min(cells.values()),
                "worst_case": min(cells, key=cells.__getitem__),
                "cells": len(cells),
            }
            for name, cells in ratios.items()
        }
    return means


def memory_growth(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the temporary bytes of the forward and backward passes as S doubles; nothing is run."""
    base = specs.attention_cases("memory")[0]
    if jax.default_backend() != "cpu":
        base = replace(base, dtype="bfloat16")
    lengths = (512, 1024) if options.quick else (2048, 4096, 8192, 16384)
    variants: dict[str, dict[str, Any]] = {
        "window256": dict(window=256), "causal": {}, "alibi": dict(bias="alibi"),
    }  # fmt: skip
    if options.quick:  # each variant, length, and contender needs a program
        variants = {"causal": {}}
    for label, changes in variants.items():
        cases = [replace(base, queries=n, keys=n, **changes) for n in lengths]
        builders = {"jax.nn": lambda case: contenders.jax_nn(case, "xla")}
        for name, reason in contenders.explain(cases[0]).items():
            if reason is None:
                builders[f"{OURS} {name}"] = partial(contenders.ours, name=name)
        for name, build in builders.items():
            sizes = [_temporary_bytes(case, build) for case in cases]
            steps = itertools.pairwise(sizes)
            yield {
                "mask": label,
                "name": name,
                "lengths": list(lengths),
                "bytes": sizes,
                "slopes": [math.log2(after / before) for before, after in steps],
            }


def _temporary_bytes(
    case: AttentionCase, build: Callable[[AttentionCase], contenders.Attend]
) -> int:
    attend, cotangent = jax.eval_shape(lambda: (build(case), contenders.cotangent_of(case)))
    given = attend, cotangent, *jax.eval_shape(case.inputs)
    lowered = jax.jit(contenders.with_gradients).lower(*given)
    return int(lowered.compile().memory_analysis().temp_size_in_bytes)


def _line(found: dict[str, Any], limit: float) -> str:
    timings, ratios = found["timings"], found["speedup_of_ours"]
    rate = found["flops"] / timings[OURS]["median_s"]
    lines = [
        f"\n{found['case']} {found['direction']}: {rate / 1e9:.0f} GFLOP/s, "
        f"{rate / limit:.2f} of a matmul"
    ]
    differs = {
        name: "not finite" if x is None else f"{x:.0e}" for name, x in found["difference"].items()
    }
    rows = []
    for name, taken in timings.items():
        low, high = taken["quartiles_s"]
        rows.append(
            (
                name,
                f"{1e3 * taken['median_s']:.2f}",
                f"{1e3 * low:.2f}-{1e3 * high:.2f}",
                f"{ratios[name]:.2f}" if name in ratios else "",
                differs.get(name, ""),
            )
        )
    header = ("", "ms, median", "middle half", f"ours is {timing.FASTER}", "differs")
    lines.append(timing.table(header, rows))
    lines += [f"{name}: {reason}" for name, reason in found["absent"].items()]
    return "\n".join(lines)


def _means_table(means: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            name,
            direction,
            f"{found['mean']:.2f}x",
            f"{found['worst']:.2f}x {found['worst_case']}",
            str(found["cells"]),
        )
        for direction, by_name in means.items()
        for name, found in by_name.items()
    ]
    return "\n" + timing.table(
        ("ours against", "direction", "geometric mean", "worst cell", "cells"), rows
    )


def _memory_table(memory: list[dict[str, Any]]) -> str:
    lengths = memory[0]["lengths"]
    rows = [
        (
            f"{found['mask']}, {found['name']}",
            *(f"{size / 2**20:.0f}" for size in found["bytes"]),
            " ".join(f"{slope:.2f}" for slope in found["slopes"]),
        )
        for found in memory
    ]
    header = ("temporaries, MiB, at S =", *map(str, lengths), "slope (1 is linear)")
    return "\n" + timing.table(header, rows)


def plot(cases: list[dict[str, Any]], limit: float, device: str, path: Path) -> None:
    """Plot the rate of each contender relative to a matmul, with one row per case and direction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for found in cases for name in found["timings"]))
    labels = [f"{found['case']}, {found['direction']}" for found in cases]
    figure = Figure(figsize=(9, 1.6 + 0.34 * len(cases)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes, ink = figure.add_subplot(), "#444444"
    colors = ("#e07b39", "#3b6fb6", "#5b9a5b", "#9566a8", "#b04a5a", "#7f7f7f")
    for index, name in enumerate(names):
        rates = {
            row: found["flops"] / found["timings"][name]["median_s"] / limit
            for row, found in enumerate(cases)
            if name in found["timings"]
        }
        axes.plot(
            list(rates.values()), list(rates), "osDv^P"[index // len(colors)],
            color=colors[index % len(colors)], ms=9 if name == OURS else 5, alpha=0.85, label=name,
        )  # fmt: skip
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("rate over the pairs that are seen, one matmul is 1", color=ink)
    axes.set_title(device, loc="left", color=ink, parse_math=False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=ink)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, labelcolor=ink)
    figure.savefig(path)


def _selected(
    options: argparse.Namespace, platform: str
) -> list[tuple[AttentionCase, Direction, set[str] | None]]:
    """Return the cells to measure and the contenders of each cell; None means all contenders."""
    chosen: list[tuple[AttentionCase, Direction, set[str] | None]]
    if options.goals:
        cases = {case.name: case for case in specs.attention_cases("gpu")}
        chosen = [(cases[name], direction, who) for (name, direction), who in goals.cells().items()]
    else:
        tag = "quick" if options.quick else "cpu" if platform == "cpu" else "gpu"
        chosen = [(case, d, None) for case in specs.attention_cases(tag) for d in DIRECTIONS]
    dtype = options.dtype or ("float32" if platform == "cpu" else "bfloat16")
    chosen = [(replace(case, dtype=dtype), d, who) for case, d, who in chosen]
    return [cell for cell in chosen if options.only in cell[0].name]


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    cases = parser.add_mutually_exclusive_group().add_argument
    cases("--quick", action="store_true", help="three short cases, in two minutes")
    cases("--goals", action="store_true", help="the cells of our goals for an H200, and a table")
    names = tuple(IMPLEMENTATIONS)
    add("--ours", choices=names, default=None, help="our implementation (what None chooses)")
    add("--only", default="", metavar="TEXT", help="cases whose name contains this")
    dtypes = "float32", "bfloat16", "float16"
    add("--dtype", choices=dtypes, help="float32 on a CPU, else bfloat16, unless given")
    add("--repeats", type=int, default=None, help="rounds (20, or 3 with --quick)")
    add("--seconds", type=float, default=None, help="the longest a case may take (30, quick: 3)")
    add("--memory", type=float, default=8.0, metavar="GiB", help="for materialised scores")
    others = (*PEERS, WITHOUT, *(f"{OURS} {name}" for name in names))
    add("--without", nargs="+", default=[], choices=others, metavar="NAME", help="to leave out")
    add("--minutes", type=float, default=math.inf, help="begin no case after so many")
    add("--skip-memory", action="store_true", help="leave out the table of memory")
    add("--one-core", action="store_true", help=timing.ONE_CORE)
    add("--wait-each", action="store_true", default=None, help="wait for each call, as on a CPU")
    add("--out", type=Path, default=None, help="JSON to write, and a PNG beside it")
    options = parser.parse_args(argv)
    if options.repeats is None:
        options.repeats = 3 if options.quick else 20
    if options.seconds is None:
        options.seconds = 3.0 if options.quick else 30.0
    return options


if __name__ == "__main__":
    main()
