"""Malformed requests; `python -m tests.server.fuzz_bodies` sends 10,000."""

import pytest

pytest.importorskip("starlette")

from tests.server.fuzz_bodies import fuzz

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_malformed_requests_neither_crash_nor_leak():
    statuses, wrong = fuzz(7, cases=600)
    assert not wrong, "\n".join(wrong)
    assert statuses[200] > 20 and statuses[400] > 200 and {405, 413, 415} <= set(statuses)
