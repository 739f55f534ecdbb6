"""Edits with every method of running a model (`tests.interpret.fuzz_edits` runs more cases)."""

import pytest

from tests.interpret.fuzz_edits import CONFIGS, ENTRIES, case, fuzz

pytestmark = pytest.mark.usefixtures("quick_compilation")
EDITS = ("add", "positions", "mean", "last", "missing")


@pytest.mark.slow_except("capture-add")
@pytest.mark.long_except(
    "capture-add", "capture-mean", "chunks-positions", "chunks-last", "serve-add", "serve-mean",
    "speculate-positions", "generate-last", "generate-mean", "generate-missing", "left-mean",
)  # fmt: skip
@pytest.mark.parametrize("which", EDITS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_random_edit_matches_full_forward_or_is_rejected_by_name(entry, which):
    name, wrong = case(3, ENTRIES.index(entry), kind="learned", entry=entry, which=which)
    assert not wrong, f"{name}: {wrong}"


@pytest.mark.long
@pytest.mark.parametrize("kind", CONFIGS)
def test_edits_on_random_batches_match_full_forward(kind):
    ran, failed = fuzz(7, cases=20, kind=kind)
    assert not failed, "\n".join(failed)
    assert ran.total() == 20
