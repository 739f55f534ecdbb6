"""Documentation: its code, the shown output, links, names and tables."""

import ast
import contextlib
import io
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.support.compilation import quick_environment

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *(page for folder in ("docs", "docs/lectures")
                   for page in sorted((ROOT / folder).glob("*.md")))]  # fmt: skip


def blocks(text: str) -> list[tuple[str, str]]:
    """Return pairs (code, expected output): a python fence and the indented text after it."""
    found = re.findall(r"```python\n(.*?)```\n((?:\n(?:    [^\n]*\n)+)?)", text, re.DOTALL)
    return [(code, re.sub(r"^    ", "", out, flags=re.M).strip("\n")) for code, out in found]


def numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?\d+\.?\d*(?:e[+-]\d+)?", text)]


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]{2,}", text)


CHANGES = [page for page in PAGES if "```diff" in page.read_text()]
"""Pages that change the library; their code runs in a copy with the changes."""
RUN = [page for page in PAGES if page not in CHANGES]
OWN_STEP = [pytest.param(page, marks=pytest.mark.slow) for page in RUN[1:]]  # a step of .ci/run


def check_output(code: str, printed: str, expected: str) -> None:
    if expected:
        assert numbers(printed) == pytest.approx(numbers(expected), abs=2e-4), code
        assert words(printed) == words(expected), code


@pytest.mark.slow
@pytest.mark.usefixtures("registering")
@pytest.mark.parametrize("page", [README, *OWN_STEP], ids=lambda p: p.stem)
def test_code_prints_output_shown_on_page(page, monkeypatch):
    name = page.stem if page.stem.startswith("howto_") else f"page_{page.stem}"
    module = types.ModuleType(name)  # classes of a page are imported by name
    monkeypatch.setitem(sys.modules, name, module)
    names: dict = vars(module)
    for code, expected in blocks(page.read_text()):
        if page == README:
            names = {}  # its snippets are independent
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, names)
        check_output(code, out.getvalue(), expected)


def copy_with_changes(text: str, folder: Path) -> None:
    """Copy the package into a folder, and apply each change of a page.

    A change is a `diff` fence: `@@ FILE`, then lines that occur once in the file, with changes.
    """
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "transformer_jax", folder / "transformer_jax", ignore=skip)
    changes = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    assert changes
    for change in "".join(changes).split("@@ ")[1:]:
        name, *lines = change.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        before = (folder / name).read_text()
        assert before.count(old) == 1, f"{name} has {before.count(old)} times:\n{old}"
        (folder / name).write_text(before.replace(old, new))


@pytest.mark.parametrize("page", CHANGES, ids=lambda p: p.stem)
def test_source_lines_changed_by_page_occur_once(page, tmp_path):
    copy_with_changes(page.read_text(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", CHANGES, ids=lambda p: p.stem)
def test_code_with_page_changes_prints_output_shown(page, tmp_path):
    text = page.read_text()
    copy_with_changes(text, tmp_path)
    pairs = blocks(text)
    assert sum(bool(expected) for _, expected in pairs) >= 2
    script = tmp_path / "page.py"
    script.write_text("\nprint(chr(30))\n".join(code for code, _ in pairs))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=250,
        env=quick_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for (code, expected), printed in zip(pairs, done.stdout.split("\x1e\n"), strict=True):
        check_output(code, printed, expected)


def test_navigation_lists_every_page():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"[\w/]+\.md$", text[text.index("\nnav:") :], re.M)
    there = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert len(there) > 20
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_point_to_existing_files(name):
    links = re.findall(r"""(?:\]\(|href="|src=")([^)"#]+)""", (ROOT / name).read_text())
    local = [link for link in links if not link.startswith("https://")]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.stem)
def test_site_links_point_to_existing_pages(page):
    """Check links like mkdocs --strict, without mkdocs."""
    links = re.findall(r"""(?:\]\(|href="|src=")([^)"#]+)""", page.read_text())
    local = [(page.parent / link).resolve() for link in links if "://" not in link]
    docs = ROOT / "docs"
    assert [f for f in local if not (f.is_file() and f.is_relative_to(docs))] == []


TEXTS = [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *PAGES]


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_files_and_commands_named_on_page_exist(page):
    text = page.read_text()
    folders = "transformer_jax|kernels|tests|benchmarks|reproduce|docs"
    paths = {path for path in re.findall(rf"\b(?:{folders})/[\w/.*]+\w", text)}
    assert [path for path in sorted(paths) if "NAME" not in path and not any(ROOT.glob(path))] == []
    modules = set(
        re.findall(r"python -m ((?:transformer_jax|tests|benchmarks|reproduce)[\w.]*)", text)
    )
    files = [ROOT / name.replace(".", "/") for name in sorted(modules)]
    there = [f.with_suffix(".py").exists() or (f / "__main__.py").exists() for f in files]
    assert all(there), files


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_table_cells_have_at_most_120_characters(page):
    outside = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    rows = re.findall(r"^\|.*\|$", outside, re.M)
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell) for cell in cells]
    assert [cell for cell in shown if len(cell) > 120] == []


def test_pages_begin_with_text_paragraph():
    """Only the start page explains that indented output is printed by the code above it."""
    note = "is printed by the code above it"
    for page in PAGES:
        text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(), flags=re.S).strip()
        assert re.match(r"# .*\n\n[`*\[]*[A-Za-z]", text), page.stem
        assert (note in text) == (page.name == "index.md"), page.stem


def test_llms_txt_lists_the_pages():
    script = runpy.run_path(str(ROOT / "docs" / "llms.py"))
    assert (ROOT / "docs" / "llms.txt").read_text() == script["llms_txt"]()


def test_reference_has_page_for_every_folder():
    package = ROOT / "transformer_jax"
    folders = {path.parent.name for path in package.glob("*/__init__.py")} | {"kernels"}
    reference = ROOT / "docs" / "reference"
    for folder in folders:
        path = folder if folder == "kernels" else f"transformer_jax/{folder}"
        assert f"<!-- modules of {path} -->" in (reference / f"{folder}.md").read_text()
    small = (reference / "small_modules.md").read_text()
    modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    assert modules == set(re.findall(r"^::: transformer_jax\.(\w+)$", small, re.M))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["architecture", "three_questions"])
def test_functions_named_on_page_exist_in_stated_file(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    named = re.findall(r"`([\w.]+)`\s+\(`([\w/]+\.py)`\)", text)
    assert len(named) > 30
    missing = []
    for name, path in named:
        folder = ROOT if path.startswith(("kernels/", "train.py")) else ROOT / "transformer_jax"
        tree = (
            ast.parse((folder / path).read_text())
            if (folder / path).exists()
            else ast.Module([], [])
        )
        if not set(name.split(".")) <= defined(tree):
            missing.append(f"{name} in {path}")
    assert missing == []


def defined(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, methods, classes and variables."""
    names = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    targets = [
        node.targets if isinstance(node, ast.Assign) else [node.target]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    return names | {x.id for xs in targets for x in xs if isinstance(x, ast.Name)}


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("lectures/decoding_and_cache", 3), ("lectures/masks_and_shapes", 5),
        ("lectures/perceptron_and_networks", 2), ("lectures/positions", 4),
        ("lectures/recurrent_networks", 3), ("lectures/self_attention", 3),
        ("lectures/sequence_to_sequence", 4), ("lectures/streaming_and_windows", 2),
        ("attention", 7), ("cache", 5), ("decoding", 6), ("design_kernels", 2), ("howto_block", 3),
        ("howto_family", 2), ("howto_implementation", 1), ("howto_mask", 2), ("kernels", 2),
        ("lora", 5), ("meshes", 1), ("pretrained", 5), ("seq2seq", 5), ("streaming", 4),
        ("tokenizers", 3), ("training", 2),
    ],
)  # fmt: skip
def test_documentation_shows_minimum_number_of_outputs(page, least):
    pairs = blocks((ROOT / "docs" / f"{page}.md").read_text())
    assert sum(bool(out) for _, out in pairs) >= least
