"""Performance goals for the kernels on an H200 in bfloat16, and comparison of a run with them.

`python -m benchmarks.attention --goals` measures the cells in `GOALS`, each with the contenders
that its goals require, and then prints a table of the goals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import contenders, timing
from benchmarks.contenders import IN_JAX, OURS, WITHOUT
from benchmarks.specs import Direction

MATMUL = "a matmul"
"""Name of the rate of a product of 8192 x 8192 matrices in the same run."""
UNORDERED = f"{OURS} pallas_unordered"
WITNESS = "jax.nn cudnn"
"""Contenders for cells that have no other contenders."""
PEERS = tuple(name for name in contenders.PEERS if name != "onnxruntime")  # it runs only on a CPU
NATIVE = tuple(name for name in IN_JAX if name != "jax.nn cudnn")
"""Contenders in JAX, except NVIDIA's closed-source kernel."""
TOLERANCE = 0.1  # relative to the largest value; allows for other orders of summation in bfloat16


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Target ratio of our rate in a cell to the rate of contenders or to another rate."""

    case: str
    direction: Direction
    ratio: float
    than: tuple[str, ...]
    """Contenders, the fastest of which counts; `MATMUL`; or another case, whose rate counts."""
    of: str = OURS

    @property
    def peers(self) -> tuple[str, ...]:
        """Return the contenders in the ratio."""
        return tuple(name for name in self.than if name in (*PEERS, WITHOUT))

    @property
    def rate(self) -> str | None:
        """Return the case whose rate is the divisor."""
        return None if self.peers or self.than == (MATMUL,) else self.than[0]


def _goals() -> tuple[Goal, ...]:
    both: Direction = "forward+backward"
    dense, best = "causal-gqa-h128-s8192", PEERS
    cells: list[tuple[str, Direction, list[tuple[float, tuple[str, ...]]]]] = [
        ("causal-16k-h128-s8192", "forward", [(1.05, best), (0.87, (MATMUL,))]),
        ("causal-16k-h64-s4096", "forward", [(1.10, best), (0.60, (MATMUL,))]),
        ("causal-16k-h128-s8192", "backward",
         [(1.00, ("jax.nn cudnn",)), (1.30, ("tokamax",)), (0.55, (MATMUL,))]),
        ("causal-16k-h256-s4096", "backward", [(2.5, NATIVE), (0.48, (MATMUL,))]),
        ("window1024-gqa-h128-s8192", both,
         [(1.15, ("jax.nn cudnn",)), (2.0, ("tokamax",)), (0.75, (dense,))]),
        ("window1024-gqa-h128-s32768", both,
         [(1.15, ("jax.nn cudnn",)), (2.0, ("tokamax",)), (0.9, ("window1024-gqa-h128-s8192",))]),
        ("documents12-h128-s8192", both, [(1.5, ("torch flex",)), (0.85, (dense,))]),
        ("alibi-16k-h128-s4096", both, [(2.0, ("tokamax",))]),
        ("bias-16k-h128-s2048", both, [(2.0, ("tokamax",))]),
        ("everything-gqa-h128-s8192", both, [(1 / 1.10, (WITHOUT,))]),
        (dense, both, []),
    ]  # fmt: skip
    goals = [
        Goal(case=case, direction=direction, ratio=ratio, than=than)
        for case, direction, wanted in cells
        for ratio, than in wanted
    ]
    fused = Goal(
        case="causal-16k-h128-s8192", direction="backward", ratio=0.73, than=(MATMUL,), of=UNORDERED
    )
    return (*goals, fused)


GOALS = _goals()


def cells(goals: Sequence[Goal] = GOALS) -> dict[tuple[str, Direction], set[str]]:
    """Return the cells to measure, with their contenders."""
    found: dict[tuple[str, Direction], set[str]] = {}
    for goal in goals:
        found.setdefault((goal.case, goal.direction), {OURS}).update({goal.of, *goal.peers})
        if goal.rate is not None:
            found.setdefault((goal.rate, goal.direction), {OURS}).add(WITNESS)
    return found


def reached(
    cases: Sequence[dict[str, Any]],
    matmul: float,
    failed: Mapping[str, str],
    goals: Sequence[Goal] = GOALS,
) -> list[dict[str, Any]]:
    """Return, for each goal, its ratio and the missing contenders, or None and the reason.

    `cases` contains the measured cells, `failed` maps other cells to reasons, and `matmul` is in
    FLOP/s.
    """
    measured = {(found["case"], found["direction"]): found for found in cases}

    def trouble_in(goal: Goal, case: str) -> str | None:
        cell = measured.get((case, goal.direction))
        if cell is None:
            return failed.get(f"{case} {goal.direction}", "not asked for")
        why = trouble(cell, goal.of)
        return why and f"{goal.of}: {why}"

    rows = []
    for goal in goals:
        why = trouble_in(goal, goal.case)
        if why is None and goal.rate is not None and (missing := trouble_in(goal, goal.rate)):
            why = f"{goal.rate}: {missing}"
        than, ratio, reason = (
            _compared(goal, measured, matmul) if why is None else (_name(goal), None, why)
        )
        rows.append(
            {
                "case": goal.case,
                "direction": goal.direction,
                "of": goal.of,
                "than": than,
                "goal": goal.ratio,
                "ratio": ratio,
                "reason": reason,
            }
        )
    return rows


def _compared(
    goal: Goal, measured: Mapping[tuple[str, str], dict[str, Any]], matmul: float
) -> tuple[str, float | None, str | None]:  # divisor, ratio, and reason or missing contenders
    cell, than = measured[goal.case, goal.direction], _name(goal)
    if goal.peers:
        troubles = {name: trouble(cell, name) for name in goal.peers}
        ratios = {n: _speedup(cell, goal.of, n) for n, why in troubles.items() if why is None}
        if not ratios:
            return than, None, "; ".join(f"{name}: {why}" for name, why in troubles.items())
        fastest = min(ratios, key=ratios.__getitem__)
        than += f", {fastest}" if len(goal.than) > 1 else ""
        missing = [name for name, why in troubles.items() if why is not None]
        return than, ratios[fastest], f"without {', '.join(missing)}" if missing else None
    if goal.rate is None:
        return than, _rate(cell, goal.of) / matmul, None
    other = measured[goal.rate, goal.direction]
    return than, _rate(cell, goal.of) / _rate(other, goal.of), None


def _name(goal: Goal) -> str:
    """Return the name of the divisor."""
    than = {PEERS: "best peer", NATIVE: "best native to JAX"}.get(goal.than, goal.than[0])
    return than if goal.rate is None else f"rate of {than}"


def trouble(cell: dict[str, Any], name: str) -> str | None:
    """Return the reason why the time of a contender does not count, or None if it does."""
    if name not in cell["timings"]:
        return cell["absent"].get(name, "does not run")
    differences = cell["difference"]  # from ours; None for a different function
    peers = [differences[peer] for peer in PEERS if peer in differences]
    if name not in PEERS and peers and all(map(_too_large, peers)):
        return "differs from everyone"
    if name in differences and _too_large(differences[name]):
        x = differences[name]
        return "not finite" if x is None else f"differs by {x:.2g}"
    return None


def _too_large(difference: float | None) -> bool:
    return difference is None or difference > TOLERANCE


def _speedup(cell: dict[str, Any], of: str, peer: str) -> float:
    if of == OURS:
        return cell["speedup_of_ours"][peer]
    timings = cell["timings"]
    return timings[peer]["median_s"] / timings[of]["median_s"]


def _rate(cell: dict[str, Any], name: str) -> float:
    return cell["flops"] / cell["timings"][name]["median_s"]


def _verdict(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return row["reason"]
    said = "reached" if row["ratio"] >= row["goal"] else "missed"
    return said if row["reason"] is None else f"{said}, {row['reason']}"


def table(found: Sequence[dict[str, Any]], ours: str) -> str:
    """Return a table with one line per goal. `ours` is the name of our implementation."""
    rows = [
        (
            f"{row['case']} {row['direction']}, {row['of']}",
            row["than"],
            f"{row['goal']:.2f}",
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            _verdict(row),
        )
        for row in found
    ]
    return f"\nours is {ours}\n" + timing.table(
        ("goal", "speed against", "wanted", "found", ""), rows
    )
