"""Numbers of schemas; `python -m tests.server.fuzz_numbers` tries them by the minute."""

import pytest

pytest.importorskip("llguidance")

from tests.server.fuzz_numbers import fuzz


@pytest.mark.slow
def test_numbers_of_a_schema_are_written_as_they_are_or_refused():
    seen, wrong = fuzz(7, cases=150)
    assert not wrong, "\n".join(wrong)
    assert seen["written"] > 40 and seen["refused"] > 20
