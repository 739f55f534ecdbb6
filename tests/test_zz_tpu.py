import pytest
pytest.register_assert_rewrite("attention_suite", "tolerances")
from attention_suite import AttentionSuite
from transformer_jax.kernels import Target
import jax.experimental.pallas.mosaic_gpu as plgpu
class TestTpu(AttentionSuite):
    implementation = "pallas"
    target = Target("tpu", True)
    may_refuse = True
    queries, span = 139, 251
class TestHopper(AttentionSuite):
    implementation = "pallas"
    target = Target("hopper", plgpu.InterpretGPUParams(detect_races=False)) if hasattr(plgpu, "InterpretGPUParams") else None
    may_refuse = True
    queries, span = 139, 251
    dim = 64
    dtype = "bfloat16"
    forward_tolerance = 2**-7
    gradient_tolerance = 2**-6
