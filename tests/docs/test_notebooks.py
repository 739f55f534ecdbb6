"""Notebooks: generated from the pages, and executable."""

import json
import re
import runpy
import textwrap
from pathlib import Path

import pytest

from tests.support.compilation import quick_environment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("jupytext", reason="generates the notebooks; in the extra test")
    return runpy.run_path(str(ROOT / "docs" / "notebooks.py"))


def test_notebooks_match_script_output(script):
    assert {path.stem for path in NOTEBOOKS} == set(script["NOTEBOOKS"])
    for path in NOTEBOOKS:
        assert path.read_text() == script["notebook"](path.stem), "run docs/notebooks.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_install_package_and_store_page_output(path, script):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert "pip install" in "".join(cells[0]["source"]) and len(cells) > 3
    page = (ROOT / "docs" / f"{script['NOTEBOOKS'][path.stem][0]}.md").read_text()
    for cell in cells:
        for output in cell["outputs"]:
            last = cell["source"][-1]
            lines = textwrap.indent("".join(output["text"]), "    ")
            assert re.search(re.escape(last) + "(  # fmt: skip)?\n```\n\n" + re.escape(lines), page)


def test_notebook_links_point_to_existing_files():
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        text = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        targets = [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]
        local = [target for target in targets if target and "://" not in target]
        assert local and all((FOLDER / target).exists() for target in local), path.stem


@pytest.mark.long_except("load_tune_convert")
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run_without_errors(path, monkeypatch):
    for name, value in quick_environment().items():  # for the process of the kernel
        monkeypatch.setenv(name, value)
    nbformat = pytest.importorskip("nbformat", reason="reads notebooks; in the extra test")
    nbclient = pytest.importorskip("nbclient", reason="runs notebooks; in the extra test")
    notebook = nbformat.read(path, as_version=4)
    stored = [bool(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    resources = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = [any(output.get("name") == "stdout" for output in cell.outputs) for cell in cells]
    assert all(printed[n] for n, there in enumerate(stored) if there) and sum(stored) >= 3
