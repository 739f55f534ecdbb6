"""Malformed requests; `python -m tests.server.fuzz_bodies` sends 10,000."""

import pytest

pytest.importorskip("starlette")

from tests.server.fuzz_bodies import fuzz

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_no_malformed_request_fails_the_server_or_stays_in_it():
    statuses, wrong = fuzz(7, cases=600)
    assert not wrong, "\n".join(wrong)
    assert statuses[200] > 20 and statuses[400] > 200 and {405, 413, 415} <= set(statuses)
