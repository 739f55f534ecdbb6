"""Forty kills of one run at random times, at least ten of them during a save."""

import pytest

from tests.cli.test_train import flags, kill_and_finish

__all__ = ["flags"]

pytestmark = pytest.mark.usefixtures(
    "quick_compilation"
)  # the same compilation settings as in the killed runs


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_run_loses_at_most_one_save_interval(flags, tmp_path, rng):
    assert kill_and_finish(flags, tmp_path, rng, 40) >= 10
