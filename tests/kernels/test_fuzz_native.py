"""Random calls of the CPU kernels; `python -m tests.kernels.fuzz_native` makes thousands."""

import pytest

from tests.kernels.fuzz_native import fuzz
from transformer_jax.kernels import cpu

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.skipif(isinstance(cpu.library(), str), reason=f"no kernels: {cpu.library()}"),
]


@pytest.mark.slow
def test_random_attention_calls_and_gradients_match_float64():
    options, worst, failed = fuzz(60, seed=7, of_a_program=10)
    assert not failed, "\n".join(failed)
    assert len(options) > 15 and 0 < worst <= 1
