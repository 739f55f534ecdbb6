"""Outcomes of cases, and the files that record them."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """The outcome of one case; `text` names the definition, the error or the difference."""

    implementation: str
    case: str
    kind: str
    text: str = ""


def write(
    path: Path, versions: Mapping[str, str], cells: Sequence[Cell], table: str, **more: object
) -> None:
    """Write PATH.md with a table, and PATH.json with the outcomes keyed by name and case."""
    found: dict[str, dict[str, str]] = {}
    for cell in cells:
        outcome = ": ".join(filter(None, (cell.kind, cell.text)))
        found.setdefault(cell.implementation, {})[cell.case] = outcome
    about = dict(python=platform.python_version(), machine=platform.machine(), versions=versions)
    everything = json.dumps(about | {"cells": found} | more, indent=1)
    path.with_suffix(".json").write_text(everything + "\n")
    path.with_suffix(".md").write_text(table + "\n")
