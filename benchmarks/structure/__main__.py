"""Measure and draw the structure of the library: its imports, its floors, the length of its parts.

    python -m benchmarks.structure --check               exit 1 where an import does not go down
    python -m benchmarks.structure --figures             print a Markdown table
    python -m benchmarks.structure --figures --before before.json    with a column of earlier ones
    python -m benchmarks.structure --json figures.json   write the same figures
    python -m benchmarks.structure --svg house.svg       draw the floors
    python -m benchmarks.structure --svg house.svg --check   exit 1 where more than lengths differs

The files are parsed, not imported, with one exception: to see which types carry a mask from
`dot_product_attention` to a tile, the call is traced. `--root` names another checkout to measure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.structure.drawing import draw, same_floors
from benchmarks.structure.figures import figures, markdown
from benchmarks.structure.imports import ROOT, violations


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 where a check fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--check", action="store_true", help="exit 1 where something is wrong")
    parser.add_argument("--figures", action="store_true", help="print a Markdown table")
    parser.add_argument("--before", type=Path, help="figures to print beside: a file of --json")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--svg", type=Path, help="draw the floors; with --check, compare")
    given = parser.parse_args(argv)
    if not (given.check or given.figures or given.json or given.svg):
        parser.error("nothing to do: give --check, --figures, --json or --svg")
    wrong: list[str] = []
    if given.check and not given.svg:
        wrong += violations(given.root)
    if given.svg:
        drawing = draw(given.root)
        if not given.check:
            given.svg.write_text(drawing, encoding="utf-8")
        elif not given.svg.exists() or not same_floors(given.svg.read_text("utf-8"), drawing):
            wrong.append(f"{given.svg} is not what would be drawn: run with --svg, not --check")
    if given.figures or given.json:
        measured = figures(given.root)
        if given.json:
            text = json.dumps(measured, indent=1, ensure_ascii=False)
            given.json.write_text(text + "\n", encoding="utf-8")
        if given.figures:
            before = json.loads(given.before.read_text("utf-8")) if given.before else None
            print(markdown(measured, before), end="")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
