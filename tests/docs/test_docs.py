"""The documentation's code runs, and prints what the documentation says it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[tuple[str, str]]:
    """(code, expected output) pairs: a python fence and the indented text that follows it."""
    found = re.findall(r"```python\n(.*?)```\n((?:\n(?:    [^\n]*\n)+)?)", text, re.DOTALL)
    return [(code, re.sub(r"^    ", "", out, flags=re.M).strip("\n")) for code, out in found]


def numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?\d+\.?\d*(?:e[+-]\d+)?", text)]


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]{2,}", text)


OWN_STEP = [pytest.param(page, marks=pytest.mark.slow) for page in PAGES[1:]]  # of .ci/run


@pytest.mark.parametrize("page", [README, *OWN_STEP], ids=lambda p: p.stem)
def test_code_prints_what_the_page_says(page):
    names: dict = {}
    for code, expected in blocks(page.read_text()):
        if page == README:
            names = {}  # each of its snippets stands by itself
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, names)
        if expected:
            assert numbers(out.getvalue()) == pytest.approx(numbers(expected), abs=2e-4), code
            assert words(out.getvalue()) == words(expected), code


def test_the_readme_lists_every_page():
    text = README.read_text()
    assert [page for page in PAGES[1:] if f"](docs/{page.name})" not in text] == []
    assert len(PAGES) > 4


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("lectures", 6),
        ("attention", 9),
        ("cache", 5),
        ("decoding", 7),
        ("kernels", 3),
        ("lora", 5),
        ("pretrained", 7),
        ("streaming", 6),
        ("tokenizers", 3),
    ],
)
def test_a_page_has_output_to_compare(page, least):
    pairs = blocks((ROOT / "docs" / f"{page}.md").read_text())
    assert sum(bool(out) for _, out in pairs) >= least
