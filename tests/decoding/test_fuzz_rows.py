"""Random batches against rows alone; `python -m tests.decoding.fuzz_rows` draws more cases."""

import pytest

from tests.decoding.fuzz_rows import ENTRIES, fuzz

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.long
def test_rows_of_random_batches_match_separate_rows():
    ran, failed = fuzz(7, cases=10 * len(ENTRIES))
    assert not failed, "\n".join(failed)
    assert set(ran) == set(ENTRIES)
