"""Write the notebooks of docs/notebooks from pages of the documentation, by jupytext.

    python docs/notebooks.py

A notebook is a page or some of its sections. The output that the page shows below a block of code
becomes the output of its cell. tests/docs/test_docs.py runs the code of the pages and checks that
output; tests/docs/test_notebooks.py runs the notebooks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import jupytext

DOCS = Path(__file__).parent
FOLDER = DOCS / "notebooks"
ATTENTION = "Masks", "Which implementation", "Dropout", "Decoding with a cache", "Attention weights"
NOTEBOOKS = {
    "attention_in_ten_minutes": ("attention", ATTENTION),
    "train_and_look_inside": ("train_and_look_inside", None),
    "find_a_circuit": ("find_a_circuit", None),
    "load_tune_convert": ("load_tune_convert", None),
}
"""Name of a notebook: its page, and the sections that it takes after the beginning (None: all)."""

PRINTED = re.compile(r"```python\n.*?```\n((?:\n(?:    [^\n]*\n)+)?)", flags=re.S)
"""Match a block of code and the indented lines below it, which show its output."""

SET_UP = """# Install the package from the checkout that this notebook lies in. Where there is none,
# as in Colab, make one first: !git clone ADDRESS checkout; %cd checkout/docs/notebooks
import importlib.util

if importlib.util.find_spec("transformer_jax") is None:
    %pip install -q -e ../..
"""


def notebook(name: str) -> str:
    """Return the text of a notebook: its first cell installs, the others are the page's."""
    page, sections = NOTEBOOKS[name]
    text = (DOCS / f"{page}.md").read_text()
    beginning, *rest = re.split(r"(?m)^(?=## )", text)
    kept = [s for s in rest if sections is None or s[3:].split("\n", 1)[0] in sections]
    text = "".join([beginning, *kept])
    printed = [found[1] for found in PRINTED.finditer(text)]
    made = jupytext.reads(as_notebook(text), fmt="md")
    cells = [
        {"cell_type": cell.cell_type, "id": f"cell-{n}", "metadata": {}, "source": cell.source}
        for n, cell in enumerate(made.cells, start=1)
    ]
    first = {"cell_type": "code", "id": "cell-0", "metadata": {}, "source": SET_UP.strip()}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for n, (cell, said) in enumerate(zip([first, *code], ["", *printed], strict=True), start=1):
        lines = re.sub(r"(?m)^    ", "", said).strip("\n").splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell |= {"execution_count": n, "outputs": [stream] if lines else []}
    for cell in [first, *cells]:
        cell["source"] = cell["source"].splitlines(keepends=True)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {
        "cells": [*cells[:1], first, *cells[1:]], "metadata": metadata, "nbformat": 4,
        "nbformat_minor": 5,
    }  # fmt: skip
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def as_notebook(page: str) -> str:
    """Return a page without outputs, with formulas and links as a notebook reads them."""
    page = PRINTED.sub(lambda found: found[0].removesuffix(found[1]), page)
    page = page.replace("```sh\n", "```\n")  # commands for a run of the reader's own
    page = re.sub(r"```math\n(.*?)```", lambda m: f"$$\n{m[1]}$$", page, flags=re.S)
    page = re.sub(r"\$`(.+?)`\$", r"$\1$", page)
    page = re.sub(r"<!-- notebook .*? -->\n\n", "", page)
    page = re.sub(r"  # fmt: skip$", "", page, flags=re.M)
    return re.sub(r"\]\((?!https?://|#)", "](../", page)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in NOTEBOOKS:
        (FOLDER / f"{name}.ipynb").write_text(notebook(name))
