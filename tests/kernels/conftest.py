import pytest

from transformer_jax.kernels import cpu


@pytest.fixture(params=cpu.INSTRUCTIONS)
def instructions(request):
    """Run with each instruction set that this processor has."""
    library, before = cpu.library(), cpu.instructions()
    if not library.attention_use(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.attention_use(before.encode())
