"""The slips of `python -m tests.planted_bugs` match the current code and existing tests."""

from collections import Counter
from pathlib import Path

from tests.planted_bugs.slips import SLIPS

ROOT = Path(__file__).parents[1]


def test_each_planted_bug_matches_exactly_one_source_location():
    texts = {slip.file: (ROOT / slip.file).read_text() for slip in SLIPS}
    wrong = [slip.name for slip in SLIPS if texts[slip.file].count(slip.old) != 1]
    assert not wrong, "the code has changed: update these slips, or replace them by similar ones"
    assert all(slip.old != slip.new for slip in SLIPS)
    assert Counter(slip.name for slip in SLIPS).most_common(1)[0][1] == 1


def test_each_planted_bug_names_existing_tests():
    tests = {test for slip in SLIPS for test in slip.tests}
    texts = {test.partition("::")[0] for test in tests}
    texts = {file: (ROOT / file).read_text() for file in texts}
    suite = (ROOT / "tests/support/attention_suite.py").read_text()
    for test in tests:
        file, *_, name = test.split("::")
        where = texts[file] + (suite if test.count("::") == 2 else "")
        assert f"def {name.partition('[')[0]}(" in where, test


def test_planted_bugs_cover_every_folder():
    folders = Counter(str(Path(slip.file).parent) for slip in SLIPS)
    folders_of_package = {file.parent for file in ROOT.glob("transformer_jax/*/*.py")}
    package = {str(x.relative_to(ROOT)) for x in folders_of_package if not x.is_symlink()}
    assert package <= {*folders} and len(SLIPS) >= 100
