"""Detection of a NaN in a long row; `python -m tests.decoding.fuzz_nan` draws more cases."""

import pytest

from tests.decoding.fuzz_nan import MADE, PLACES, check, fuzz

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow_except("TopK*-inf - inf", "speculation-inf - inf", "pooling-inf - inf")
@pytest.mark.parametrize("made", ["inf - inf", "-nan"])
@pytest.mark.parametrize("name", PLACES)
def test_fuzzer_detects_nan_in_long_row(name, made):
    assert check(name, 1000, 3, "float32", made, mapped=False, seed=0) is None


@pytest.mark.long
def test_fuzzer_detects_randomly_placed_nans():
    ran, failed = fuzz(5, cases=4 * len(PLACES))
    assert not failed, "\n".join(failed)
    assert ran == 4 * len(PLACES) and len(MADE) == 5
