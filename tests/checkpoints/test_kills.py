"""Forty kills of one run at random moments: nothing is lost, and many meet a save."""

import pytest

from tests.cli.test_train import flags, kill_and_finish

__all__ = ["flags"]

pytestmark = pytest.mark.usefixtures("quick_compilation")  # as the runs that are killed compile


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_forty_kills_lose_no_more_than_a_save_interval_each(flags, tmp_path, rng):
    assert kill_and_finish(flags, tmp_path, rng, 40) >= 10
