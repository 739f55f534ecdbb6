"""Numbers in JSON schemas; `python -m tests.server.fuzz_numbers` runs for minutes."""

import pytest

pytest.importorskip("llguidance")

from tests.server.fuzz_numbers import fuzz


@pytest.mark.slow
def test_schema_numbers_are_exact_or_rejected():
    seen, wrong = fuzz(7, cases=150)
    assert not wrong, "\n".join(wrong)
    assert seen["written"] > 40 and seen["refused"] > 20
