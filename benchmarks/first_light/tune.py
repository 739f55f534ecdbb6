"""Which tile sizes are the fastest, and which goals are reached with them?"""

from __future__ import annotations

import ast
import itertools
import json
import re
import tempfile
from pathlib import Path

from benchmarks import timing, tune_attention
from benchmarks.first_light import checks, rehearsal
from benchmarks.first_light.checks import Check, Ended, Step, Verdict
from benchmarks.first_light.goals_with_rows import Row
from benchmarks.first_light.speed import measure_goals
from transformer_jax.kernels.contract import Kind

ROW = re.compile(r"^ {4}(\(.*?\)): Blocks\((\d+), (\d+), (\d+)(?:, slack=([\d.]+))?\),")
AGAIN = "goals with these rows"
SEARCH_SHARE = 0.55  # fraction of the step's time
KERNELS: tuple[tuple[Kind, ...], ...] = (("forward",), ("dq", "dkdv"), ("single_pass",))
SEARCHES = (*itertools.product((128, 64), KERNELS), *((256, kernels) for kernels in KERNELS[:2]))
"""Head dimensions and the kernels to tune. There is no single-pass kernel for H = 256."""
REHEARSED = ["--batch", "1", "--heads", "2:1", "--dims", "16", "--lengths", "128", "--repeats", "1"]
REHEARSED += ["--seconds", "0", "--candidates", "128:128:2"]


def run(step: Step) -> None:
    """Search for the best tile sizes, then measure the goals with them."""
    seconds = SEARCH_SHARE * step.left()
    searches = SEARCHES[:1] if step.rehearsed else SEARCHES
    with tempfile.TemporaryDirectory() as folder:
        with timing.side_by_side(Path(folder)):
            wanted = [search(*each, seconds, step.rehearsed) for each in searches]
            records = step.run(*wanted, jobs=len(wanted))
        found = [row for record in records for row in record["found"]]
        if not found:
            return
        rows = Path(folder) / "rows.json"
        rows.write_text(json.dumps(found))
        more = ["--without", "flax", "jax.nn"]  # these were slower in `speed`
        measure_goals(step, AGAIN, step.left(), more, rows=rows)


def search(H: int, kernels: tuple[Kind, ...], seconds: float, rehearsed: bool) -> Check:
    """Return a check that searches for tile sizes and keeps the rows found before a timeout."""
    minutes = f"{max(seconds - 30, 1) / 60:.2f}"
    if rehearsed:
        command = checks.python("first_light.tune", minutes, *rehearsal.flags(True))
    else:
        given = ("--dims", str(H), "--batch", "2", "--repeats", "10", "--seconds", "5")
        command = checks.python(
            "tune_attention", *given, "--minutes", minutes, "--kernels", *kernels
        )

    def judge(ended: Ended) -> Verdict:
        verdict = checks.by_status(ended)
        if verdict.outcome == "passed" and not rows(ended.output):
            return Verdict("failed", f"no rows were found: {checks.last_line(ended.output)}")
        return verdict

    return Check(
        f"search at H {H}: {', '.join(kernels)}",
        command,
        seconds,
        judge=judge,
        collect=lambda ended: rows(ended.output),
    )


def rows(text: str) -> list[Row]:
    """Read the rows that `benchmarks.tune_attention` prints for `kernels/chips.py`."""
    found = []
    for line in text.splitlines():
        if match := ROW.match(line):
            key, *tiles, slack = match.groups()
            found.append((*ast.literal_eval(key), *map(int, tiles), float(slack or 0)))
    return found


def main() -> None:
    """Run a rehearsal of the search in this process."""

    def rehearse() -> None:
        with rehearsal.kernels(True):
            tune_attention.main(REHEARSED)

    checks.main_of(rehearse)


if __name__ == "__main__":
    main()
