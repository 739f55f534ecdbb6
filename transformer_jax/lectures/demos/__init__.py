"""Demonstrate what the lectures claim: one short module for each claim.

    python -m transformer_jax demo vanishing_gradients --out runs/demos

Each has `OPTIONS`, the values that it takes, and `demonstrate`, which prints figures, saves a
picture and returns the figures. Their tests are in `tests/lectures/demos/`; docs/lectures/
explains them.
"""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parent


def demonstrations() -> dict[str, str]:
    """Return the first line about each demonstration by its name, without importing any."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem not in ("__init__", "shared"):
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            found[path.stem] = said.partition("\n")[0]
    return found
