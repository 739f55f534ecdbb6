"""The page of reported faults: complete cases and existing tests."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "reported_faults.md"
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())))


def test_faults_page_lists_every_reproduction_case():
    cases = re.findall(r"^\| ([AB]\d+) \|", PAGE.read_text(), re.M)
    assert set(cases) == {f"{kind}{n}" for kind in "AB" for n in range(1, 17)}
    second = {
        case.rstrip("abcde")
        for case in re.findall(r"^\| C([\d.]+[a-e]?) \|", PAGE.read_text(), re.M)
    }
    counts = {1: 9, 2: 8, 3: 8, 4: 8, 5: 7}
    wanted = {f"{section}.{n}" for section, last in counts.items() for n in range(1, last + 1)}
    assert wanted <= second


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part.replace("/", "."))
def test_tests_named_on_faults_page_exist(file, name):
    text = (TESTS / file).read_text()
    assert not name or f"def {name}(" in text
