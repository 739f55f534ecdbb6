"""Random calls of the fused kernels; `python -m tests.kernels.fuzz_fused` makes hundreds."""

import pytest

from tests.kernels.fuzz_fused import TPU, hopper
from tests.kernels.fuzz_native import fuzz
from tests.support.hopper_kernels import needs_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]


@pytest.mark.long
@pytest.mark.parametrize("name", ["tpu", pytest.param("hopper", marks=needs_interpreter)])
def test_random_attention_calls_and_gradients_match_float64(name):
    kernels = TPU if name == "tpu" else hopper()
    options, worst, failed = fuzz(8, seed=3, of_a_program=2, kernels=kernels)
    assert not failed, "\n".join(failed)
    assert 0 < worst <= 1
    assert not any(option.startswith("refused") for option in options)
