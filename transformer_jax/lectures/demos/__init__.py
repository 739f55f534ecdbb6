"""Demonstrations of claims made in the lectures, with one short module per claim.

    python -m transformer_jax demo vanishing_gradients --out runs/demos

Each module defines `OPTIONS`, the options that it accepts, and `demonstrate`, which prints numbers,
saves a picture, and returns the numbers. The tests are in `tests/lectures/demos/`, and the
explanations in docs/lectures/.
"""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parent


def demonstrations() -> dict[str, str]:
    """Return the summary line of each demonstration, keyed by name, without importing it."""
    summaries = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem not in ("__init__", "shared"):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            summaries[path.stem] = docstring.partition("\n")[0]
    return summaries
