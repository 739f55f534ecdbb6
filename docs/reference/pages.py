"""Fill the pages of the reference: each folder's page gets all modules of the folder.

mkdocs calls `on_page_markdown` (`hooks` of mkdocs.yml); mkdocstrings then turns each `::: module`
line into what the module's docstrings say. So a new module is on its page without anybody listing
it. `Drawings` (`extensions` of mkdocstrings) keeps the drawings of masks as they are typed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the line `<!-- modules of FOLDER -->` by the folder's modules."""
    return re.sub(r"<!-- modules of (\S+) -->", lambda found: modules(found[1]), markdown)


def modules(folder: str) -> str:
    """Return a folder's docstring, and a section for each of its modules."""
    paths = sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
    names = [".".join(path.with_suffix("").parts) for path in paths]
    whole = folder.replace("/", ".")
    said = [f"::: {whole}\n    options:\n      members: false\n"]
    for name in names:
        if not name.endswith("__init__"):
            short = name.removeprefix(f"{whole}.")
            said.append(f"## {short}\n\n::: {name}\n    options:\n      heading_level: 3\n")
    return "\n".join(said)


class Drawings(griffe.Extension):
    """Indent the drawings in docstrings, lines of `#` and `.` alone, so that they become code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one module, class or function."""
        if obj.docstring:
            obj.docstring.value = indent_drawings(obj.docstring.value)


def indent_drawings(text: str) -> str:
    """Return a text whose lines of `#`, `.` and spaces are indented by four spaces."""
    return re.sub(r"^(?=[#.] [#. ]+$)", "    ", text, flags=re.M)
